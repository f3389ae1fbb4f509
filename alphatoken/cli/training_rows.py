"""Rows of a training run: read as tokens or pairs, held apart from each other, counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from alphatoken import FisherDrift
from alphatoken.cli.arguments import Arguments
from alphatoken.cli.held_apart import Item, came_as_tokens, item_keys, take_apart
from alphatoken.cli.race_rows import (
    arms_by_number,
    left_out_columns,
    read_race_rows,
    rows_of_race,
)
from alphatoken.cli.training_options import FILES, SOURCES, missing_files
from alphatoken.data import (
    EncodeOptions,
    Example,
    Pair,
    Pools,
    Survey,
    pair_of,
    row_of,
    split_pools,
)
from alphatoken.data.encode import encode_example
from alphatoken.data.markers import is_filled, require_one_form
from alphatoken.data.messages import ROW_WEIGHTS
from alphatoken.data.named_rows import OPTION, of_no_file, read_numbers, rows_but_named
from alphatoken.data.pairs import is_longer, pair_problem, preference_record, weights_of_pair
from alphatoken.data.rows import ASKED, KEEP_MARKS, UNLEARNED, Row, Turn
from alphatoken.data.source import SourceRow, find_source, usable_rows
from alphatoken.data.split import about_pools, refuse_one_file
from alphatoken.data.texts import LEFT_OUT, TOKENS_DIGEST
from alphatoken.data.trl_rows import check_tokens
from alphatoken.data.weights import (
    LOSS_WEIGHTS,
    WEIGHTLESS,
    listed_weights,
    no_weights,
    turn_weights,
    whole_labels,
)
from alphatoken.errors import ConfigError, DataError, InputError, counted, short
from alphatoken.model.batch import IGNORE
from alphatoken.model.loading import rows_tokenizer
from alphatoken.train.policies import chosen_policy
from alphatoken.train.python_rows import (
    cut_problem,
    kept_tokens,
    pair_left,
    pair_limits,
    pair_tokens,
    said_limits,
)
from alphatoken.train.refusals import raise_first

# --- what is refused before any row is read -------------------------------------------------------


def check_rows(arguments: Arguments, *, reads_fisher: bool | None = None) -> None:
    """Refuse what can be said of the rows without reading them.

    Args:
        arguments: of the run.
        reads_fisher: whether any arm of its race reads a Fisher; None without a race.

    Raises:
        ConfigError: no source of the training rows or two, a missing file, a stream, evaluation
            without rows; numbers of rows that are none, or of no file; labels of the last answer
            and of all of a row; values or a policy without validation rows; a Fisher that nothing
            reads.
    """
    own = arguments.training.reads_fisher if reads_fisher is None else reads_fisher
    raise_first(chain(_refused_sources(arguments), _refused_rows(arguments, own)))
    if arguments.data.without_rows is not None:
        read_numbers(arguments.data.without_rows)


def _refused_sources(arguments: Arguments) -> Iterator[ConfigError]:
    data = arguments.data
    sources = [name for name in SOURCES if getattr(data, name)]
    if len(sources) != 1:
        yield ConfigError(
            "training rows must come from one place",
            got=" and ".join(sources) or "none named",
            remedy="give train_file (a local file or folder), dataset_name (of the hub), or in a "
            "recipe datasets (TRL's mixture)",
        )
    yield from missing_files({name: getattr(data, name) for name in FILES})
    named = {} if data.without_rows is None else {OPTION: data.without_rows}
    if data.train_file is None:
        for by, numbers in (named | arms_by_number(arguments.race)).items():
            yield of_no_file(numbers, f"rows of {sources[0]}", by)
    for name in ("dataset_streaming", "streaming"):
        if getattr(data, name):
            yield ConfigError(
                "streamed data sets are not read by this command",
                got=f"{name}: true",
                why="held-out rows could not be told from training rows",
                remedy=f"leave {name} out, or use the trainer from Python",
            )
    if data.test_split_size is not None:
        yield ConfigError(
            "rows for TRL's own evaluation are not split off the training rows",
            got=f"test_split_size: {data.test_split_size}",
            why="the split is drawn anew at each start, and a resumed run would train on others",
            remedy="leave it out, and name those rows: --eval_data FILE",
        )
    if evaluates(arguments) and data.eval_data is None:
        yield ConfigError(
            "evaluation needs rows", got="eval_strategy without eval_data", remedy="--eval_data"
        )


def _refused_rows(arguments: Arguments, reads_fisher: bool) -> Iterator[ConfigError]:
    args, data = arguments.training, arguments.data
    nothing = data.validation_file is None and data.validation_rows == 0
    if nothing and args.needs_values and args.objective != "stability":
        yield ConfigError(
            "values need a validation dataset",
            got="no --validation_file, and --validation_rows 0 draws none",
            remedy="--validation_file FILE, of a few clean rows of the target; or value nothing: "
            "--policy standard trains on every token",
        )
    if data.turns == "last" and getattr(args, "completion_only_loss", None) is False:
        yield ConfigError(
            "the last answer alone and all of a row cannot both be learned",
            got="turns: last, completion_only_loss: false",
            remedy="leave one of them out",
        )
    clean_first = args.policy == "validation-first"
    if args.policy in ("validation-first", "validation-mix") and data.validation_file is None:
        place = "first" if clean_first else "in every step"
        yield ConfigError(
            f"policy '{args.policy}' trains on a few clean rows of the target {place}",
            got="no --validation_file",
            why="rows drawn from the training rows are no cleaner than those",
            remedy="--validation_file FILE",
        )
    if clean_first and args.world_size > 1:
        yield ConfigError(
            "policy 'validation-first' trains in one process",
            got=f"{args.world_size} processes",
            remedy="two runs: --policy standard --train_file CLEAN, then --policy standard with "
            "--model_name_or_path of the first one's folder",
        )
    reads_retention = bool(arguments.race or args.reads_retention)
    for name, instead in data.unread_of_retention(
        reads_fisher=reads_fisher, reads_retention=reads_retention
    ):
        got = f"--{name} {getattr(data, name)}, "
        got += instead or f"retention {args.retention}, objective {args.objective}"
        of_rows = name == "retention_data"
        wanted = f"--objective both --retention {'data' if of_rows else 'diagonal'}, or "
        term = "retention rows are" if of_rows else "Fisher is"
        yield ConfigError(
            f"{name} is given, and no {term} {'fitted on it' if instead else 'wanted'}",
            got=got,
            why="nothing would read it",
            remedy=f"{'' if instead else wanted}leave --{name} out",
        )


# --- rows, one after the other --------------------------------------------------------------------


def evaluates(arguments: Arguments) -> bool:
    """True if TRL's own evaluation runs."""
    return str(getattr(arguments.training.eval_strategy, "value", "no")) != "no"


class RowReader:
    """Rows of files and of the hub, as tokens with labels or as pairs, and records of them for TRL.

    Rows become tokens as in every other command, by ``encode_row``; pairs are tokenised by TRL,
    after ``encode_row`` has seen that they can be. ``vocabulary`` is of the model's embedding.
    Weights that training rows bring are read where the policy reads them, and with them rows that
    are tokens already. ``weights`` in its place reads them in this way, and ``needs_weights`` says
    whether some must be there.
    """

    def __init__(
        self,
        arguments: Arguments,
        tokenizer: Any,
        vocabulary: int | None = None,
        weights: str | None = None,
        *,
        needs_weights: bool = True,
    ) -> None:
        self.arguments, self.data = arguments, arguments.data
        self.pairs = arguments.command == "dpo"
        self.weights = weights or arguments.training.row_weights
        self.needs_weights = needs_weights and self.weights != "refused"
        self.surveys: dict[str, Survey] = {}
        """What was read of each set of rows, by its name."""
        self.tokenizer = rows_tokenizer(arguments.training, tokenizer)
        self.how = EncodeOptions(
            turns=self.data.turns,
            chat_template=self.data.chat_template,
            vocabulary=vocabulary,
        )
        template = getattr(self.tokenizer, "chat_template", None) is not None
        self.chat = self.how.chat_template and template
        # Columns by which arms of a race leave training rows out, and their entries by item.
        self.columns = () if arguments.race is None else left_out_columns(arguments.race)
        self.entries: dict[int, dict[str, str]] = {}
        self.cut: dict[int, int] = {}
        """Tokens that the limits of a pair's length cut off both its sides, by item."""

    def training_rows(self) -> list[Item]:
        """Training rows from the file, the hub, or a mixture of data sets."""
        data = self.data
        if data.train_file is not None:
            source = find_source(data.train_file)
            survey = source.survey()
            others = arms_by_number(self.arguments.race)
            records = rows_but_named(source, data.without_rows, data.train_limit, survey, others)
            return self._usable(records, survey, "training")
        if data.datasets:
            return self._usable(_of_mixture(data), Survey("datasets"), "training", data.train_limit)
        assert data.dataset_name is not None  # see check_rows
        records = _of_hub(data.dataset_name, data.dataset_config, data.dataset_train_split)
        survey = Survey(Path(data.dataset_name).name)
        return self._usable(records, survey, "training", data.train_limit)

    def file_rows(self, path: str, name: str) -> list[Item]:
        """Rows of a local file or folder, called ``name``."""
        source = find_source(path)
        return self._usable(source.read(), source.survey(), name)

    def dataset(self, items: Sequence[Item], *, weighed: bool = False) -> Any:
        """A data set in TRL's form; with the weights of its rows, where they are ``weighed``."""
        from datasets import Dataset

        return Dataset.from_list([self._record(item, weighed=weighed) for item in items])

    def _record(self, item: Item, *, weighed: bool = False) -> dict[str, Any]:
        if isinstance(item, Example):
            weights = {LOSS_WEIGHTS: item.weights} if weighed and item.weights else {}
            return {"input_ids": item.input_ids, "labels": item.labels, **weights}
        record = preference_record(item, self.tokenizer, chat=self.chat)
        return {**record, **weights_of_pair(item, record)} if weighed else record

    def _usable(
        self, records: Iterable[SourceRow], survey: Survey, name: str, limit: int | None = None
    ) -> list[Item]:
        """Those rows that can be trained on; the others are left out, or refused, if so asked."""
        self.surveys[name] = survey
        # Before anything is held out, so that as many are held out as was asked for.
        make = partial(self._usable_item, survey=survey, name=name)
        items: list[Item] = usable_rows(islice(records, limit), make, survey, self.data.on_bad_rows)
        weighed = self.needs_weights and name == "training"
        if weighed and items and not any(map(is_weighted, items)):
            raise no_weights(str(survey))
        self._require_one_form([item for item in items if isinstance(item, Pair)])
        if not items:
            raise InputError(
                f"no {name} row is left",
                got=str(survey),
                remedy=KEEP_MARKS
                if UNLEARNED in survey.left
                else "look at the columns, max_length and max_prompt_length",
            )
        return items

    def _require_one_form(self, pairs: Sequence[Pair]) -> None:
        # TRL reads all pairs of a set as it reads the first.
        first = dict[bool, Pair]()
        for pair in pairs if self.chat else ():
            first.setdefault(is_filled(pair.row, self.tokenizer), pair)
        if len(first) > 1:
            raise InputError(
                "some pairs hold the chat template's own markers, and others do not",
                got=f"{first[True].place} does, {first[False].place} does not",
                why="TRL reads all pairs of a set in one form",
                remedy="two files, one of each; or --no_chat_template, which takes all as texts",
            )

    def _usable_item(
        self, record: Mapping[str, Any], index: int, place: str, survey: Survey, name: str
    ) -> Item | None:
        item = self._item(record, index, place, survey, optional=name != "training")
        if self.needs_weights and name == "training" and not is_weighted(item):
            survey.notes[WEIGHTLESS] += 1
        if self.columns and name == "training":
            self.entries[id(item)] = {column: str(record.get(column)) for column in self.columns}
            for column in self.columns:  # an arm reads it
                survey.unread.pop(column, None)
        if (problem := self._problem(item)) is None:
            survey.leave_out_turns(getattr(item, "left_turns", ()))
            return item
        if self.data.on_empty == "error":
            raise InputError(
                f"a {name} row cannot be trained on: {problem}",
                got=place,
                remedy="mend it, or have such rows left out: --on_empty skip",
            )
        survey.leave_out(problem, place)
        return None

    def _item(
        self, record: Mapping[str, Any], index: int, place: str, survey: Survey, *, optional: bool
    ) -> Item:
        # The named columns are optional in other rows than those to train on.
        data, args = self.data, self.arguments.training
        weights = "refused" if optional else self.weights
        if weights != "refused" and not self.pairs and record.get("input_ids") is not None:
            return _token_example(record, index, place, survey, weights, self.tokenizer)
        if self.pairs:
            columns = replace(
                data.fields,
                weights=weights,
                chosen=data.chosen_column,
                rejected=data.rejected_column,
                optional=optional,
            )
            pair = pair_of(record, index, place, columns, survey)
            chosen, notes = self._written(pair)
            survey.notes.update(notes)
            return replace(pair, written=chosen)
        columns = replace(
            data.fields, text=args.dataset_text_field, optional=optional, weights=weights
        )
        row = row_of(record, index, place, columns, survey)
        self._require_a_prompt(row)
        example = encode_example(row, self.tokenizer, self.how)
        survey.notes.update(dict.fromkeys(example.notes, 1))
        if args.completion_only_loss is False:
            whole = whole_labels(row, example.input_ids, self.tokenizer, self.how)
            example = replace(example, labels=whole)
            survey.notes.pop(ASKED, None)  # here it is learned
        if weights != "refused":
            own = turn_weights(row, example.input_ids, example.labels, self.tokenizer, self.how)
            example = replace(example, weights=own)
        return example

    def _require_a_prompt(self, row: Row) -> None:
        """Refuse plain text, of which all is learned, where the answers alone are to be."""
        args, named = self.arguments.training, ("completion_only_loss", "assistant_only_loss")
        chosen = [name for name in named if getattr(args, name, None)]
        plain = all(turn.role == "assistant" and not turn.message for turn in row.turns)
        if chosen and plain:
            raise DataError(
                f"a row has no prompt, and {chosen[0]} trains on answers alone",
                got=row.place,
                why="every token of a plain text is learned",
                remedy=f"leave {chosen[0]} out, or give prompt and response, or messages",
            )

    def _written(self, pair: Pair) -> tuple[Example, set[str]]:
        """The chosen side of a pair as tokens, and notes on how both sides are written."""
        sides = [replace(pair.row, turns=(*pair.prompt, *s)) for s in (pair.chosen, pair.rejected)]
        require_one_form(sides, self.tokenizer)
        how, notes = replace(self.how, turns="last"), set[str]()
        written = [encode_example(row, self.tokenizer, how) for row in sides]
        for one, turns in zip(written, (pair.chosen, pair.rejected), strict=True):
            if len(turns) > 1 and LEFT_OUT in one.notes:
                raise DataError(
                    "the text of a response would be lost",
                    got=pair.place,
                    why="the chat template does not write all turns of it",
                    remedy="one row a turn, or leave the template out (--no_chat_template)",
                )
            notes |= {*one.notes}
        return written[0], notes

    def _problem(self, item: Item) -> str | None:
        args = self.arguments.training
        if isinstance(item, Example):
            if not item.response_tokens:
                return "the response is empty" if item.row.is_learned else UNLEARNED
            limit = args.max_length if args.truncation_mode == "keep_start" else None
            if limit is not None and not replace(item, labels=item.labels[:limit]).response_tokens:
                return f"the prompt is longer than {limit - 1} tokens"
            return None
        return self._pair_problem(item)

    def _pair_problem(self, pair: Pair) -> str | None:
        """Reason for which a pair cannot be trained on; of one that can, its cut is noted."""
        args, record = self.arguments.training, self._record(pair)
        limits = [n for n in (args.max_prompt_length, args.max_length and args.max_length - 1) if n]
        cut = args.cuts_prompts and self.data.long_prompts == "cut"
        if (problem := pair_problem(record)) or not pair_limits(args):
            return problem
        if limits and not cut and is_longer(record["prompt"], self.tokenizer, limit := min(limits)):
            return f"the prompt is longer than {limit} tokens"
        tokens = pair_tokens(record, self.tokenizer)
        prompt, *sides = map(len, tokens.values())
        left = pair_left(tokens, args)
        self.cut[id(pair)] = sum(prompt + n - len(own) for n, own in zip(sides, left, strict=True))
        return cut_problem(tokens, left, args)


def is_weighted(item: Item) -> bool:
    """True if a row or pair brings a weight."""
    if isinstance(item, Example):
        return item.row.is_weighted
    return any(item.side(turns).is_weighted for turns in (item.chosen, item.rejected))


def _token_example(
    record: Mapping[str, Any],
    index: int,
    place: str,
    survey: Survey,
    weights: str,
    tokenizer: Any,
) -> Example:
    """A row of tokens with its weights, as ``score --rows tokens`` writes it; see the trainers."""
    there = {name: value for name, value in record.items() if value is not None}
    ids = there["input_ids"]
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise DataError("'input_ids' is no list of tokens", got=f"{place}: {short(repr(ids), 40)}")
    read = {"input_ids", "labels", LOSS_WEIGHTS, *ROW_WEIGHTS} & there.keys()
    unread = sorted(there.keys() - {*read, "attention_mask", TOKENS_DIGEST})
    check_tokens(
        there,
        index,
        name="training",
        read=read,
        unread=unread,
        tokenizer=tokenizer,
        survey=survey,
    )
    listed = listed_weights(there, LOSS_WEIGHTS, len(ids), place, weights)
    labels = there.get("labels", ids)
    # What comes before the first label is the prompt, by which rows are held apart.
    first = next((i for i, label in enumerate(labels) if label != IGNORE), len(ids))
    texts = (
        tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:first], ids[first:])
    )
    turns = (Turn("user", next(texts)), Turn("assistant", next(texts)))
    row = Row(index, place, turns, None if listed is None else 1.0)
    return Example(row, ids, labels, weights=listed or [1.0] * len(ids), decoded=True)


def _of_hub(name: str, config: str | None, split: str) -> Iterator[SourceRow]:
    from datasets import load_dataset

    place = f"{name}, split {split}"
    return _loaded(lambda: load_dataset(name, name=config, split=split), name, place)


def _of_mixture(data: Any) -> Iterator[SourceRow]:
    # In the order and the shares that TRL gives them.
    from trl.scripts.utils import DatasetMixtureConfig, get_dataset

    mixture = DatasetMixtureConfig(datasets=data.datasets)
    paths = ", ".join(str(one.data_files or one.data_dir or one.path) for one in data.datasets)
    return _loaded(lambda: get_dataset(mixture)["train"], "datasets", paths)


def _loaded(load: Callable[[], Any], name: str, place: str) -> Iterator[SourceRow]:
    try:
        rows = load()
    except Exception as error:  # whatever the hub, the network and the file formats raise
        text = " ".join(str(error).split())
        raise DataError(
            "the data set cannot be loaded",
            got=f"{place}: {type(error).__name__}: {text[:200]}",
            remedy="check path, name, config and split and the network, or give local files: "
            "train_file, validation_file",
        ) from None
    return (SourceRow(index, f"{name}, row {index}", row) for index, row in enumerate(rows))


# --- the data sets of a run ----------------------------------------------------------------------


def load_run_data(
    arguments: Arguments,
    tokenizer: Any,
    vocabulary: int | None = None,
    arms: Sequence[Arguments] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Read all rows that the run needs.

    Tokens are looked for in the ``vocabulary`` rows of the model's embedding, if they are known.
    Training rows that repeat a validation, retention, Fisher or evaluation row are removed, rows
    that cannot be trained on are left out (or refused, if so asked): the notes count the former,
    the line that says what was read of a file the latter.

    Args:
        arguments: of the run.
        tokenizer: of the model.
        vocabulary: rows of its embedding.
        arms: of a race, which all train on the rows that are read here. What one of them reads is
            read, and weights are negative only where all that read them allow it.

    Returns:
        Data sets in TRL's forms, and a Fisher of earlier, by the trainer's arguments; None where
        the run has none; in "train_places" where a person finds each training row. And what was
        held out and removed, in sentences.

    Raises:
        ConfigError: no training rows named, or two sources of them.
        DataError, InputError: rows that cannot be read or used; the message names them.
    """
    check_rows(arguments)
    runs = [*arms] or [arguments]
    ways = {one.training.row_weights for one in runs}
    weights = next(way for way in ("read", "signed", "refused") if way in ways)
    reader = RowReader(arguments, tokenizer, vocabulary, weights)
    (validation, fisher), data = held_out(runs), arguments.data
    train = reader.training_rows()
    sources = {
        "validation": data.validation_file if validation is not None else None,
        "fisher": data.fisher_data if fisher is not None else None,
        "retention": data.retention_data,
    }
    refuse_one_file(data.train_file, _held_out_files(arguments, sources))
    own = {name: reader.file_rows(file, name) for name, file in sources.items() if file is not None}
    fitted = None if data.fisher_file is None else FisherDrift.load(data.fisher_file)
    race, notes = read_race_rows(arguments, reader.file_rows, {"training": train, **own})
    pools, pool_notes = _separate(arguments, validation, fisher, train, own, fitted)
    notes += pool_notes
    if evaluates(arguments):
        pools["eval"] = reader.file_rows(data.eval_data or "", "evaluation")
        others = {"training": pools["train"]}
        notes += take_apart(pools["eval"], "an evaluation row", others, data.leak_key)
    names = ("train", "eval", "validation", "retention", "fisher")
    if arguments.race is not None:
        race = rows_of_race(arguments, pools, race, notes)
    notes += _about_lengths({**pools, **race}, arguments.training, reader.cut)
    weighed = reader.weights != "refused"
    rows = {
        name: reader.dataset(items, weighed=weighed and name == "train")
        if (items := pools.get(name))
        else None
        for name in names
    }
    rows |= {name: reader.dataset(items) for name, items in race.items()}
    datasets = {**{f"{name}_dataset": own for name, own in rows.items()}, "fisher": fitted}
    datasets["train_places"] = [item.row.place for item in pools["train"]]
    if reader.columns:
        datasets["train_entries"] = [reader.entries[id(item)] for item in pools["train"]]
    return datasets, notes


# --- what TRL cuts off rows ---------------------------------------------------------------------

_CALLED = {
    "train": "training rows", "eval": "evaluation rows", "watched": "retention rows of the race",
}  # fmt: skip
"""What the rows of a pool are called, where it is not by the pool's name."""


def _is_packed(args: Any, pool: str) -> bool:
    """True of training rows under ``packing``, and of evaluation rows unless they have their own.

    All others are used row by row.
    """
    packing, own = getattr(args, "packing", False), getattr(args, "eval_packing", None)
    return bool({"train": packing, "eval": packing if own is None else own}.get(pool))


def _about_lengths(
    pools: Mapping[str, Sequence[Item]], args: Any, of_pairs: Mapping[int, int]
) -> list[str]:
    """A sentence on each set of rows of which some are longer than the limits of their length.

    Nothing is said of a Fisher's rows, of which the prompts alone are read.

    Args:
        pools: rows by what they are for.
        args: configuration of the trainer.
        of_pairs: tokens that are cut off a pair, by item.
    """
    notes = []
    for pool, items in pools.items():
        if pool != "fisher" and (lost := [own for i in items if (own := of_pairs.get(id(i)))]):
            notes.append(
                f"{len(lost)} of {len(items)} {_CALLED.get(pool, f'{pool} rows')} longer than "
                f"{said_limits(args)}: {counted(sum(lost), 'tokens')} cut."
            )
        lengths = [len(item.input_ids) for item in items if isinstance(item, Example)]
        long = [length for length in lengths if args.max_length and length > args.max_length]
        if not long or pool == "fisher":
            continue
        packed = _is_packed(args, pool)
        kept = kept_tokens(args, packed=packed)
        cut = sum(length - len(range(length)[kept]) for length in long)
        end = "start" if (kept.start or 0) < 0 else "end"
        fate = f"{counted(cut, 'tokens')} cut off at the {end}"
        if not cut:
            fate = f"packing_strategy {args.packing_strategy} takes them in parts"
        if cut or packed:
            notes.append(
                f"{len(long)} of {len(items)} {_CALLED.get(pool, f'{pool} rows')} longer "
                f"than {args.max_length} tokens: {fate}."
            )
    return notes


def _held_out_files(
    arguments: Arguments, sources: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Option -> file of rows that are read and not trained on."""
    data, race = arguments.data, arguments.race
    flags = {"validation": "--validation_file", "fisher": "--fisher_data"}
    files = {flags.get(name, "--retention_data"): file for name, file in sources.items()}
    files["--eval_data"] = data.eval_data if evaluates(arguments) else None
    if race is not None:
        files |= {"--choosing_file": race.choosing_file, "--retention_file": race.retention_file}
    return files


# --- how many rows are held out -----------------------------------------------------------------


def held_out(runs: Sequence[Arguments]) -> tuple[int | None, int | None]:
    """Validation rows and Fisher prompts to draw from the training rows; None: none are read.

    Args:
        runs: on the same rows; where some value tokens, those decide.
    """
    valuing = [one for one in runs if one.training.needs_values] or runs
    drawn = zip(*map(_drawn, valuing), strict=True)
    validation, fisher = (max((n for n in own if n is not None), default=None) for own in drawn)
    return validation, fisher


def _drawn(arguments: Arguments) -> tuple[int | None, int | None]:
    # The policy has no say of a run: the controls (random, all) train on the same rows.
    data, args = arguments.data, arguments.training
    validation: int | None = None
    if args.objective != "stability":
        validation = 0 if data.validation_file else data.validation_rows
        if validation is None:
            share = args.held_out_share if args.held_out_steps else 0.0
            validation = math.ceil(args.validation_batch_size / (1 - share))
            validation *= 8 if args.validation_mode == "pool" else 1
    fisher: int | None = None
    if args.reads_fisher and data.fisher_file is None:
        fisher = 0 if data.fisher_data else data.fisher_prompts
        fisher = args.fisher_samples if fisher is None else fisher
    return validation, fisher


# --- pools that share nothing -------------------------------------------------------------------


def _separate(
    arguments: Arguments,
    validation: int | None,
    fisher: int | None,
    train: Sequence[Item],
    own: Mapping[str, Sequence[Item]],
    fitted: FisherDrift | None,
) -> tuple[dict[str, list[Item]], list[str]]:
    """Pools that share nothing, by name, and what was done to make them so."""
    notes, data = list[str](), arguments.data
    if any(map(came_as_tokens, train)):  # below, rows are compared by their texts
        train = list(train)
        for name, held_out in own.items():
            what = "a prompt of the Fisher" if name == "fisher" else f"a {name} row"
            notes += take_apart(held_out, what, {"training": train}, data.leak_key)
    items = {"train": train, **own}
    rows = {name: [item.row for item in some] for name, some in items.items()}
    item_of = {  # a pair makes its row anew each time
        id(row): item for name in rows for row, item in zip(rows[name], items[name], strict=True)
    }
    judged = _judges(arguments)
    if not judged and (count := (validation or 0) + (fisher or 0)) >= len(train):
        notes.append(
            f"No row is held out, since this run reads none and {counted(len(train), 'rows')} are "
            f"too few to hold out {count}."
        )
        validation = fisher = 0
    retention = rows.get("retention", [])
    keys = {key for item in own.get("retention", ()) for key in item_keys(item)}
    keys |= set(() if fitted is None else fitted.metadata.get("row_keys", ()))
    pools = split_pools(
        rows["train"],
        validation=rows.get("validation"),
        validation_rows=validation or 0,
        fisher=rows.get("fisher"),
        fisher_rows=fisher or 0,
        fisher_keys=keys,
        leak_key=data.leak_key,
        keys=lambda row, by: item_keys(item_of[id(row)], by),
    )
    separate = {name: getattr(pools, name) for name in ("train", "validation", "fisher")}
    separate["retention"] = retention
    items_of = {name: [item_of[id(row)] for row in some] for name, some in separate.items()}
    return items_of, notes + _pool_notes(pools, arguments, judged=judged)


def _judges(arguments: Arguments) -> bool:
    """True if the run reads validation rows."""
    args = arguments.training
    policy = chosen_policy(args, None, args.FAMILY)
    return bool(args.needs_values or (policy is not None and policy.needs.validation))


def _pool_notes(pools: Pools, arguments: Arguments, *, judged: bool) -> list[str]:
    args, counts = arguments.training, pools.counts
    untrusted = ": they are no cleaner than the others; --validation_file names rows that you trust"
    drawn = {
        "drawn_validation": ("rows", "validation", judged, untrusted, "--validation_rows 0"),
        "drawn_fisher": ("prompts", "the Fisher", args.needs_values, "", "--fisher_prompts 0"),
    }
    notes = []
    for name, (what, use, read, quality, option) in drawn.items():
        if counts.get(name):
            unread = f", though this run reads none of them: {option} trains on them"
            more = quality if read else unread
            notes.append(f"{counted(counts[name], what)} drawn for {use} and not trained on{more}.")
    return notes + about_pools(counts, "Fisher prompts", pools.places)
