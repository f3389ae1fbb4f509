"""Rows of a training run: from files, the hub or TRL's mixture, as tokens or pairs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.reading import fields_of, unread_columns
from alphatoken.data import (
    EncodeOptions,
    Example,
    Pair,
    PairFields,
    Reading,
    encode_row,
    pair_of,
    row_of,
)
from alphatoken.data.encode import require_shown
from alphatoken.data.source import find_source
from alphatoken.errors import ColumnsError, ConfigError, DataError, InputError
from alphatoken.train.datasets import is_longer, preference_problems, preference_records
from alphatoken.train.loading import rows_tokenizer

__all__ = ["Item", "RowReader", "check_source", "evaluates"]

_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")
_HUB = re.compile(r"(?P<name>[\w./-]+)(#(?P<config>[\w.-]+))?(:(?P<split>[^:#]+))?")

Item = Example | Pair
"""What is trained on; its ``row`` is what other rows are compared with."""


_PLACE = "training rows must come from one place"
_ONE = "give train_file (a local file), dataset_name (of the hub), or a mixture under datasets"


def check_source(arguments: Arguments) -> bool:
    """Refuse what names rows twice, or rows that this command does not read.

    Returns:
        Whether training rows are named at all: a recipe may leave them to the command line.

    Raises:
        ConfigError: two sources, a stream, evaluation without rows.
    """
    data, mixture = arguments.data, arguments.mixture
    given = [n for n, v in (
        ("train_file", data.train_file),
        ("dataset_name", data.dataset_name),
        ("datasets", mixture.datasets),
    ) if v]  # fmt: skip
    if len(given) > 1:
        raise ConfigError(_PLACE, got=" and ".join(given), remedy=_ONE)
    if data.dataset_streaming or mixture.streaming:
        raise ConfigError(
            "streamed data sets are not read by this command",
            why="held-out rows could not be told from training rows",
            remedy="leave dataset_streaming out, or use the trainer from Python",
        )
    if evaluates(arguments) and data.eval_data is None and data.dataset_name is None:
        raise ConfigError(
            "evaluation needs rows", got="eval_strategy without eval_data", remedy="--eval_data"
        )
    return bool(given)


def evaluates(arguments: Arguments) -> bool:
    """Whether TRL's own evaluation runs."""
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
            chat_template=self.data.row_format != "text",
            separator=self.data.separator,
            vocabulary=vocabulary,
        )
        template = getattr(self.tokenizer, "chat_template", None) is not None
        self.chat = self.how.chat_template and template
        if self.data.row_format == "chat" and not template:
            raise ConfigError(
                "row_format 'chat' needs a chat template",
                got="a tokenizer without one",
                remedy="--chat_template_path, or --row_format text",
            )

    def training_rows(self, notes: list[str]) -> list[Item]:
        """From the file, the hub, or TRL's mixture."""
        data, mixture = self.data, self.arguments.mixture
        if not check_source(self.arguments):
            raise ConfigError(
                "training rows must come from one place", got="none named", remedy=_ONE
            )
        if data.train_file is not None:
            found = _in_file(data.train_file)
            return self._usable(found, data.train_file, "training", notes, data.train_limit)
        if data.dataset_name is not None:
            name = data.dataset_name
            dataset = _hub(name, data.dataset_config, data.dataset_train_split)
        else:
            from trl.scripts.utils import get_dataset

            name, dataset = "mixture", get_dataset(mixture)["train"]
        return self._usable(_placed(dataset, name), name, "training", notes, data.train_limit)

    def evaluation_rows(self, notes: list[str]) -> list[Item]:
        """Of ``eval_data``, or of the hub's test split."""
        if self.data.eval_data is not None:
            return self.source_rows(self.data.eval_data, "evaluation", notes)
        assert self.data.dataset_name is not None  # see check_source
        split = self.data.dataset_test_split
        name = f"{self.data.dataset_name}:{split}"
        found = _hub(self.data.dataset_name, self.data.dataset_config, split)
        return self._usable(_placed(found, name), name, "evaluation", notes)

    def source_rows(self, source: str, name: str, notes: list[str]) -> list[Item]:
        """Rows of a SOURCE: a local file, or ``name#config:split`` of the hub."""
        if Path(source).suffix.lower() in _FILES or Path(source).exists():
            return self._usable(_in_file(source), source, name, notes)
        match = _HUB.fullmatch(source)
        if match is None:
            raise ConfigError(
                "this is neither a data file nor a data set of the hub",
                got=source,
                remedy="a .jsonl, .json or .parquet file, or name, name:split, name#config:split",
            )
        found = _hub(match["name"], match["config"], match["split"] or "train")
        return self._usable(_placed(found, source), source, name, notes)

    def dataset(self, items: Sequence[Item]) -> Any:
        """A data set in TRL's form."""
        from datasets import Dataset

        return Dataset.from_list([self._record(item) for item in items])

    def _record(self, item: Item) -> dict[str, Any]:
        if isinstance(item, Example):
            return {"input_ids": item.input_ids, "labels": item.labels}
        end = getattr(self.tokenizer, "eos_token", None) or ""
        separator = self.data.separator
        return preference_records([item], chat=self.chat, separator=separator, end=end)[0]

    def _usable(
        self,
        records: Iterable[tuple[str, Mapping[str, Any] | DataError]],
        source: str,
        name: str,
        notes: list[str],
        limit: int | None = None,
    ) -> list[Item]:
        """Those rows that can be trained on; the others are counted in ``notes``, or refused.

        Before anything is held out, so that as many are held out as was asked for.
        """
        reading = Reading(Path(source).name)
        found: list[Item] = []
        bad, empty = dict[str, list[str]](), dict[str, list[str]]()
        first: DataError | None = None
        for index, (place, record) in enumerate(islice(records, limit)):
            try:
                if isinstance(record, DataError):
                    raise record
                item = self._item(record, index, place, reading, held=name != "training")
            except ColumnsError:
                raise
            except DataError as error:
                first = first or error
                bad.setdefault(error.what, []).append(place)
                continue
            if problem := self._problem(item):
                empty.setdefault(problem, []).append(place)
            else:
                found.append(item)
        reading.say()
        if first is not None and (not found or self.data.on_bad_rows == "error"):
            raise first
        self._report(bad, name, "on_bad_rows", notes)
        self._report(empty, name, "on_empty", notes)
        if not found:
            raise InputError(
                f"no {name} row is left",
                got=" ".join(notes) or f"{source}: no rows",
                remedy="look at the columns, max_length and max_prompt_length",
            )
        return found

    def _report(
        self, bad: Mapping[str, Sequence[str]], name: str, option: str, notes: list[str]
    ) -> None:
        for what, places in bad.items():
            some = ", ".join(places[:3])
            if getattr(self.data, option) == "error":
                raise InputError(
                    f"{len(places)} {name} rows cannot be trained on: {what}",
                    got=some,
                    remedy=f"mend them, or have them left out: --{option} skip",
                )
            notes.append(f"{len(places)} {name} rows dropped: {what} (such as {some}).")

    def _item(
        self, record: Mapping[str, Any], index: int, place: str, reading: Reading, *, held: bool
    ) -> Item:
        data, args = self.data, self.arguments.training
        if self.pairs:
            columns = (data.prompt_column, data.chosen_column, data.rejected_column)
            fields = PairFields(*columns, unread_columns(data), held)
            pair = pair_of(record, index, place, fields, reading)
            for said in (pair.chosen, pair.rejected):
                row = replace(pair.row, turns=(*pair.prompt, *said))
                require_shown(row, self.tokenizer, self.how)
                encode_row(row, self.tokenizer, replace(self.how, turns="last"))
            return pair
        named = fields_of(data, text=args.dataset_text_field, optional=held)
        row = row_of(record, index, place, named, reading)
        ids, labels = encode_row(row, self.tokenizer, self.how)
        return Example(row, ids, ids if args.completion_only_loss is False else labels)

    def _problem(self, item: Item) -> str | None:
        """What is wrong with a row that could be read."""
        args = self.arguments.training
        if isinstance(item, Example):
            if not item.response_tokens:
                return "the response is empty"
            limit = args.max_length if args.truncation_mode == "keep_start" else None
            if limit is not None and not replace(item, labels=item.labels[:limit]).response_tokens:
                return f"the prompt is longer than {limit - 1} tokens"
            return None
        record = self._record(item)
        problem = next(iter(preference_problems([record])), None)
        limits = [n for n in (args.max_prompt_length, args.max_length and args.max_length - 1) if n]
        cut = args.cuts_prompts and self.data.long_prompts == "cut"
        if problem or cut or not limits:
            return problem
        if is_longer(record["prompt"], self.tokenizer, limit := min(limits)):
            return f"the prompt is longer than {limit} tokens"
        return None


def _in_file(path: str) -> Iterator[tuple[str, Mapping[str, Any] | DataError]]:
    """Rows of a data file or folder; of a broken line, what is wrong with it."""
    return ((found.place, found.record) for found in find_source(path).read())


def _placed(dataset: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows of a data set, each with how a person finds it."""
    return ((f"{name}, row {index}", record) for index, record in enumerate(dataset))


def _hub(name: str, config: str | None, split: str) -> Any:
    """A data set of the hub, or of its cache."""
    from datasets import load_dataset

    try:
        return load_dataset(name, name=config, split=split)
    except Exception as error:  # whatever the hub, the network and the file formats raise
        text = " ".join(str(error).split())
        raise DataError(
            "the data set cannot be loaded",
            got=f"{name}, split {split}: {type(error).__name__}: {text[:200]}",
            remedy="check name, config and split and the network, or give local files: train_file, "
            "validation_file",
        ) from None
