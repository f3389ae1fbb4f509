"""Rows of a training run: from files, the hub or TRL's mixture, as tokens or pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.reading import fields_of
from alphatoken.data import (
    EncodeOptions,
    Example,
    Pair,
    Reading,
    encode_row,
    pair_of,
    row_of,
)
from alphatoken.data.encode import require_shown
from alphatoken.data.source import SUFFIXES, Found, each_row, find_source
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.train.datasets import is_longer, preference_problems, preference_records
from alphatoken.train.loading import rows_tokenizer

__all__ = ["Item", "RowReader", "check_source", "evaluates"]

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

    def training_rows(self) -> list[Item]:
        """From the file, the hub, or TRL's mixture."""
        data, mixture = self.data, self.arguments.mixture
        if not check_source(self.arguments):
            raise ConfigError(_PLACE, got="none named", remedy=_ONE)
        if data.train_file is not None:
            found = find_source(data.train_file).read()
            return self._usable(found, data.train_file, "training", data.train_limit)
        if data.dataset_name is not None:
            name = data.dataset_name
            found = _of_hub(name, name, data.dataset_config, data.dataset_train_split)
        else:
            from trl.scripts.utils import get_dataset

            name, found = "mixture", _placed(get_dataset(mixture)["train"], "mixture")
        return self._usable(found, name, "training", data.train_limit)

    def evaluation_rows(self) -> list[Item]:
        """Of ``eval_data``, or of the hub's test split."""
        data = self.data
        if data.eval_data is not None:
            return self.source_rows(data.eval_data, "evaluation")
        assert data.dataset_name is not None  # see check_source
        name = f"{data.dataset_name}:{data.dataset_test_split}"
        found = _of_hub(name, data.dataset_name, data.dataset_config, data.dataset_test_split)
        return self._usable(found, name, "evaluation")

    def source_rows(self, source: str, name: str) -> list[Item]:
        """Rows of a SOURCE: a local file, or ``name#config:split`` of the hub."""
        if Path(source).suffix.lower() in SUFFIXES or Path(source).exists():
            return self._usable(find_source(source).read(), source, name)
        match = _HUB.fullmatch(source)
        if match is None:
            raise ConfigError(
                "this is neither a data file nor a data set of the hub",
                got=source,
                remedy="a .jsonl, .json or .parquet file, or name, name:split, name#config:split",
            )
        found = _of_hub(source, match["name"], match["config"], match["split"] or "train")
        return self._usable(found, source, name)

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
        self, found: Iterator[Found], source: str, name: str, limit: int | None = None
    ) -> list[Item]:
        """Those rows that can be trained on; the others are left out, or refused, if so asked.

        Before anything is held out, so that as many are held out as was asked for.
        """
        reading, items, first = Reading(Path(source).name), list[Item](), None
        make = partial(self._item, reading=reading, held=name != "training")
        for one, item in each_row(islice(found, limit), make, self.data.on_bad_rows):
            if isinstance(item, DataError):
                first = first or item
                reading.leave(item.what, one.place)
            elif (problem := self._problem(item)) is None:
                items.append(item)
            elif self.data.on_empty == "error":
                raise InputError(
                    f"a {name} row cannot be trained on: {problem}",
                    got=one.place,
                    remedy="mend it, or have such rows left out: --on_empty skip",
                )
            else:
                reading.leave(problem, one.place)
        reading.say()
        if not items:
            raise first or InputError(
                f"no {name} row is left",
                got=str(reading),
                remedy="look at the columns, max_length and max_prompt_length",
            )
        return items

    def _item(
        self, record: Mapping[str, Any], index: int, place: str, reading: Reading, *, held: bool
    ) -> Item:
        data, args = self.data, self.arguments.training
        if self.pairs:
            named = fields_of(
                data, chosen=data.chosen_column, rejected=data.rejected_column, optional=held
            )
            pair = pair_of(record, index, place, named, reading)
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


def _placed(dataset: Any, name: str) -> Iterator[Found]:
    """Rows of a data set, each with how a person finds it."""
    return (Found(index, f"{name}, row {index}", row) for index, row in enumerate(dataset))


def _of_hub(said: str, name: str, config: str | None, split: str) -> Iterator[Found]:
    """Rows of a data set of the hub, or of its cache, which messages call ``said``."""
    from datasets import load_dataset

    try:
        return _placed(load_dataset(name, name=config, split=split), said)
    except Exception as error:  # whatever the hub, the network and the file formats raise
        text = " ".join(str(error).split())
        raise DataError(
            "the data set cannot be loaded",
            got=f"{name}, split {split}: {type(error).__name__}: {text[:200]}",
            remedy="check name, config and split and the network, or give local files: train_file, "
            "validation_file",
        ) from None
