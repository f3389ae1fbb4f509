"""Rows of a training run: from files or the hub, as tokens or pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.training_options import SOURCES
from alphatoken.data import EncodeOptions, Example, Pair, Survey, pair_of, row_of
from alphatoken.data.encode import encode_example
from alphatoken.data.markers import is_filled, require_one_form
from alphatoken.data.pairs import is_longer, pair_problem, preference_record
from alphatoken.data.pieces import LEFT_OUT
from alphatoken.data.rows import KEEP_MARKS, UNLEARNED
from alphatoken.data.source import SourceRow, find_source, usable_rows
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.model.loading import rows_tokenizer

__all__ = ["Item", "RowReader", "check_source", "evaluates"]

Item = Example | Pair
"""An example to train on; other rows are compared with its ``row``."""


_FILES = ("train_file", "validation_file", "retention_data", "fisher_data", "fisher_file",
          "eval_data")  # fmt: skip


def check_source(arguments: Arguments) -> None:
    """Refuse what names no rows, or two of them, or rows that this command does not read.

    Raises:
        ConfigError: no source or two, a missing file, a stream, evaluation without rows.
    """
    data = arguments.data
    sources = [name for name in SOURCES if getattr(data, name)]
    if len(sources) != 1:
        raise ConfigError(
            "training rows must come from one place",
            got=" and ".join(sources) or "none named",
            remedy="give train_file (a local file or folder), dataset_name (of the hub), or in a "
            "recipe datasets (TRL's mixture)",
        )
    for name in _FILES:
        path = getattr(data, name)
        if path is not None and not Path(path).exists():
            raise ConfigError(f"{name} does not exist", got=path, remedy="check the path")
    for name in ("dataset_streaming", "streaming"):
        if getattr(data, name):
            raise ConfigError(
                "streamed data sets are not read by this command",
                got=f"{name}: true",
                why="held-out rows could not be told from training rows",
                remedy=f"leave {name} out, or use the trainer from Python",
            )
    if data.test_split_size is not None:
        raise ConfigError(
            "rows for TRL's own evaluation are not split off the training rows",
            got=f"test_split_size: {data.test_split_size}",
            why="the split is drawn anew at each start, and a resumed run would train on others",
            remedy="leave it out, and name those rows: --eval_data FILE",
        )
    if evaluates(arguments) and data.eval_data is None:
        raise ConfigError(
            "evaluation needs rows", got="eval_strategy without eval_data", remedy="--eval_data"
        )


def evaluates(arguments: Arguments) -> bool:
    """True if TRL's own evaluation runs."""
    return str(getattr(arguments.training.eval_strategy, "value", "no")) != "no"


class RowReader:
    """Rows of files and of the hub, as tokens with labels or as pairs, and records of them for TRL.

    Rows become tokens as in every other command, by ``encode_row``; pairs are tokenised by TRL,
    after ``encode_row`` has seen that they can be. ``vocabulary`` is of the model's embedding.
    """

    def __init__(self, arguments: Arguments, tokenizer: Any, vocabulary: int | None = None) -> None:
        self.arguments, self.data = arguments, arguments.data
        self.pairs = arguments.command == "dpo"
        self.tokenizer = rows_tokenizer(arguments.training, tokenizer)
        self.how = EncodeOptions(
            turns=self.data.turns,
            chat_template=self.data.chat_template,
            vocabulary=vocabulary,
        )
        template = getattr(self.tokenizer, "chat_template", None) is not None
        self.chat = self.how.chat_template and template

    def training_rows(self) -> list[Item]:
        """Training rows from the file, the hub, or a mixture of data sets."""
        data = self.data
        if data.train_file is not None:
            return self.file_rows(data.train_file, "training", data.train_limit)
        if data.datasets:
            return self._usable(_of_mixture(data), Survey("datasets"), "training", data.train_limit)
        assert data.dataset_name is not None  # see check_source
        records = _of_hub(data.dataset_name, data.dataset_config, data.dataset_train_split)
        survey = Survey(Path(data.dataset_name).name)
        return self._usable(records, survey, "training", data.train_limit)

    def file_rows(self, path: str, name: str, limit: int | None = None) -> list[Item]:
        """Rows of a local file or folder, called ``name``."""
        source = find_source(path)
        return self._usable(source.read(), source.survey(), name, limit)

    def dataset(self, items: Sequence[Item]) -> Any:
        """A data set in TRL's form."""
        from datasets import Dataset

        return Dataset.from_list([self._record(item) for item in items])

    def _record(self, item: Item) -> dict[str, Any]:
        if isinstance(item, Example):
            return {"input_ids": item.input_ids, "labels": item.labels}
        return preference_record(item, self.tokenizer, chat=self.chat)

    def _usable(
        self, records: Iterable[SourceRow], survey: Survey, name: str, limit: int | None = None
    ) -> list[Item]:
        """Those rows that can be trained on; the others are left out, or refused, if so asked.

        Before anything is held out, so that as many are held out as was asked for.
        """
        make = partial(self._usable_item, survey=survey, name=name)
        items: list[Item] = usable_rows(islice(records, limit), make, survey, self.data.on_bad_rows)
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
        """Refuse texts beside messages: TRL reads all pairs of a set as it reads the first."""
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
        """What one record is to training; None where nothing can be learned of it."""
        item = self._item(record, index, place, survey, optional=name != "training")
        if (problem := self._problem(item)) is None:
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
        """The example or the pair of a record; the named columns are optional in other rows."""
        data, args = self.data, self.arguments.training
        if self.pairs:
            columns = replace(
                data.fields,
                chosen=data.chosen_column,
                rejected=data.rejected_column,
                optional=optional,
            )
            pair = pair_of(record, index, place, columns, survey)
            survey.notes.update(self._pair_notes(pair))
            return pair
        columns = replace(data.fields, text=args.dataset_text_field, optional=optional)
        row = row_of(record, index, place, columns, survey)
        example = encode_example(row, self.tokenizer, self.how)
        survey.notes.update(dict.fromkeys(example.notes, 1))
        if args.completion_only_loss is False:
            example = replace(example, labels=example.input_ids)
        return example

    def _pair_notes(self, pair: Pair) -> set[str]:
        """Notes on a pair that can be written as tokens, both sides in one form."""
        sides = [replace(pair.row, turns=(*pair.prompt, *s)) for s in (pair.chosen, pair.rejected)]
        require_one_form(sides, self.tokenizer)
        how, notes = replace(self.how, turns="last"), set[str]()
        for row, turns in zip(sides, (pair.chosen, pair.rejected), strict=True):
            of_side = encode_example(row, self.tokenizer, how).notes
            if len(turns) > 1 and LEFT_OUT in of_side:
                raise DataError(
                    "the text of a response would be lost",
                    got=pair.place,
                    why="the chat template does not write all turns of it",
                    remedy="one row a turn, or leave the template out (--no_chat_template)",
                )
            notes |= {*of_side}
        return notes

    def _problem(self, item: Item) -> str | None:
        """Problem of a row that could be read."""
        args = self.arguments.training
        if isinstance(item, Example):
            if not item.response_tokens:
                return "the response is empty" if item.row.is_learned else UNLEARNED
            limit = args.max_length if args.truncation_mode == "keep_start" else None
            if limit is not None and not replace(item, labels=item.labels[:limit]).response_tokens:
                return f"the prompt is longer than {limit - 1} tokens"
            return None
        record = self._record(item)
        problem = pair_problem(record)
        limits = [n for n in (args.max_prompt_length, args.max_length and args.max_length - 1) if n]
        cut = args.cuts_prompts and self.data.long_prompts == "cut"
        if problem or cut or not limits:
            return problem
        if is_longer(record["prompt"], self.tokenizer, limit := min(limits)):
            return f"the prompt is longer than {limit} tokens"
        return None


def _of_hub(name: str, config: str | None, split: str) -> Iterator[SourceRow]:
    """Rows of a data set of the hub, or of its cache."""
    from datasets import load_dataset

    place = f"{name}, split {split}"
    return _loaded(lambda: load_dataset(name, name=config, split=split), name, place)


def _of_mixture(data: Any) -> Iterator[SourceRow]:
    """Rows of TRL's mixture of data sets, in the order and the shares that TRL gives them."""
    from trl.scripts.utils import DatasetMixtureConfig, get_dataset

    mixture = DatasetMixtureConfig(datasets=data.datasets)
    paths = ", ".join(str(one.data_files or one.data_dir or one.path) for one in data.datasets)
    return _loaded(lambda: get_dataset(mixture)["train"], "datasets", paths)


def _loaded(load: Callable[[], Any], name: str, place: str) -> Iterator[SourceRow]:
    """Rows that a library loads; ``place`` says from where."""
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
