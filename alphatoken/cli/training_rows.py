"""Rows of a training run: from files, the hub or TRL's mixture, as conversations or pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.cli.arguments import Arguments
from alphatoken.data import Fields, Pair, PairFields, Row, pair_of, read_records, text_or_row
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.train.datasets import (
    preference_problems,
    preference_records,
    record_counts,
    sft_problems,
    sft_records,
)

__all__ = ["Item", "RowReader", "check_source", "evaluates"]

_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")
_HUB = re.compile(r"(?P<name>[\w./-]+)(#(?P<config>[\w.-]+))?(:(?P<split>[^:#]+))?")

Item = Row | Pair


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
    """Rows of files and of the hub, as conversations or pairs, and their records for TRL."""

    def __init__(self, arguments: Arguments, tokenizer: Any) -> None:
        self.arguments, self.data, self.tokenizer = arguments, arguments.data, tokenizer
        self.pairs = arguments.command == "dpo"
        template = getattr(tokenizer, "chat_template", None) is not None
        template |= getattr(arguments.training, "chat_template_path", None) is not None
        self.chat = self.data.row_format == "chat" or (self.data.row_format == "auto" and template)

    def training_rows(self) -> list[Item]:
        """From the file, the hub, or TRL's mixture."""
        data, mixture = self.data, self.arguments.mixture
        if not check_source(self.arguments):
            raise ConfigError(
                "training rows must come from one place", got="none named", remedy=_ONE
            )
        if data.train_file is not None:
            return self._file(Path(data.train_file), data.train_limit)
        if data.dataset_name is not None:
            name, config, split = data.dataset_name, data.dataset_config, data.dataset_train_split
            return self._items(_hub(name, config, split), name, data.train_limit)
        from trl.scripts.utils import get_dataset

        return self._items(get_dataset(mixture)["train"], "mixture", data.train_limit)

    def evaluation_rows(self) -> list[Item]:
        """Of ``eval_data``, or of the hub's test split."""
        if self.data.eval_data is not None:
            return self.source_rows(self.data.eval_data)
        assert self.data.dataset_name is not None  # see check_source
        split = self.data.dataset_test_split
        found = _hub(self.data.dataset_name, self.data.dataset_config, split)
        return self._items(found, f"{self.data.dataset_name}:{split}", None)

    def source_rows(self, source: str) -> list[Item]:
        """Rows of a SOURCE: a local file, or ``name#config:split`` of the hub."""
        if Path(source).suffix.lower() in _FILES or Path(source).is_file():
            return self._file(Path(source), None)
        match = _HUB.fullmatch(source)
        if match is None:
            raise ConfigError(
                "this is neither a data file nor a data set of the hub",
                got=source,
                remedy="a .jsonl, .json or .parquet file, or name, name:split, name#config:split",
            )
        found = _hub(match["name"], match["config"], match["split"] or "train")
        return self._items(found, source, None)

    def _file(self, path: Path, limit: int | None) -> list[Item]:
        items: list[Item] = []
        for place, record in read_records(path):
            if limit is not None and len(items) >= limit:
                break
            items.append(self._item(record, len(items), place))
        return _some(items, str(path))

    def _items(self, dataset: Any, name: str, limit: int | None) -> list[Item]:
        chosen = dataset if limit is None else dataset.select(range(min(limit, len(dataset))))
        items = [self._item(record, i, f"{name}, row {i}") for i, record in enumerate(chosen)]
        return _some(items, name)

    def _item(self, record: Mapping[str, Any], index: int, place: str) -> Item:
        data = self.data
        if self.pairs:
            columns = PairFields(data.prompt_column, data.chosen_column, data.rejected_column)
            return pair_of(record, index, place, columns)
        text = getattr(self.arguments.training, "dataset_text_field", "text")
        fields = Fields(data.prompt_column, data.response_column, data.messages_column)
        return text_or_row(record, index, place, fields, text)

    def dataset(self, items: Sequence[Item]) -> Any:
        """A data set in TRL's form."""
        from datasets import Dataset

        return Dataset.from_list(self._records(items))

    def _records(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        end = getattr(self.tokenizer, "eos_token", None) or ""
        separator, turns = self.data.separator, self.data.turns
        if self.pairs:
            pairs = [item for item in items if isinstance(item, Pair)]
            return preference_records(pairs, chat=self.chat, separator=separator, end=end)
        rows = [item for item in items if isinstance(item, Row)]
        return sft_records(rows, chat=self.chat, turns=turns, separator=separator, end=end)

    def usable(self, items: Sequence[Item], name: str, notes: list[str]) -> list[Item]:
        """Those rows that can be trained on; the others are counted in ``notes``, or refused.

        Before anything is held out, so that as many are held out as was asked for.
        """
        bad: dict[int, str] = {}
        for what, places in self._problems(items, name).items():
            rows = sorted(set(places))
            bad |= dict.fromkeys(rows, what)
            first = ", ".join(items[row].place for row in rows[:3])
            if self.data.on_bad_rows == "error":
                raise InputError(
                    f"{len(rows)} {name} rows cannot be trained on: {what}",
                    got=first,
                    remedy="mend them, or let them be left out (--on_bad_rows skip)",
                )
            notes.append(f"{len(rows)} {name} rows dropped: {what} (such as {first}).")
        left = [item for row, item in enumerate(items) if row not in bad]
        if not left:
            raise InputError(
                f"no {name} row is left",
                got=" ".join(notes),
                remedy="look at the columns, max_length and max_prompt_length",
            )
        return left

    def _problems(self, items: Sequence[Item], name: str) -> dict[str, list[int]]:
        """What is wrong -> numbers of the items; one item may be several records."""
        owners = list(range(len(items)))
        rows = [item for item in items if isinstance(item, Row)]
        if not self.pairs:
            counts = record_counts(rows, chat=self.chat, turns=self.data.turns)
            owners = [row for row, count in enumerate(counts) for _ in range(count)]
        args, tokenizer = self.arguments.training, self.tokenizer
        if self.chat and getattr(tokenizer, "chat_template", None) is None:
            tokenizer = None  # the trainer sets the template; lengths are not known before
        options = {"name": name, "tokenizer": tokenizer, "max_length": args.max_length}
        look: Callable[..., dict[str, list[int]]] = sft_problems
        if self.pairs:
            look = preference_problems
            options["max_prompt_length"] = args.max_prompt_length
            if args.cuts_prompts and self.data.long_prompts == "cut":
                options |= {"max_length": None, "max_prompt_length": None}
        found = look(self._records(items), **options)
        return {what: [owners[row] for row in rows_] for what, rows_ in found.items()}


def _some(items: list[Item], source: str) -> list[Item]:
    if not items:
        raise DataError("the data set has no rows", got=source, remedy="give one with rows")
    return items


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
