"""Options of a run over a corpus, and those that several commands share.

Each dataclass is a group of the command line's help, or several, where a field begins one
(``alphatoken.cli.program`` makes flags of the fields). Nothing here imports torch before a model is
asked for, so that ``--help`` is quick.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphatoken.config import ValueOptions
from alphatoken.presets import PRESETS, values_in_words
from alphatoken.support.options import option

if TYPE_CHECKING:
    from torch import nn

    import alphatoken.data.rows
    from alphatoken.data import EncodeOptions, Fields


@dataclass(kw_only=True)
class ModelOptions:
    """Options of the model."""

    model_name_or_path: str = option(help="model folder or hub name")
    adapter: str | None = option(None, "folder of a LoRA adapter to load onto it (peft)")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of the model's weights"
    )
    device: str = option("auto", "device of the model (default: cuda if there is one, else cpu)")
    trust_remote_code: bool = option(False, "run code that comes with the model")

    def model(self) -> nn.Module:
        """The model in evaluation mode on its device.

        Raises:
            ModelError: it is missing or unreadable. ConfigError: no such device.
        """
        from alphatoken.model.loading import find_parts, load_causal_model

        parts = find_parts(self.model_name_or_path, self.adapter)
        return load_causal_model(
            parts.model,
            adapter=parts.adapter,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )

    def tokenizer(self) -> Any:
        """The tokenizer that belongs to the model: the adapter's own where it has one.

        Raises:
            ModelError: it is missing or unreadable.
        """
        from alphatoken.model.loading import find_parts, load_tokenizer

        parts = find_parts(self.model_name_or_path, self.adapter)
        return load_tokenizer(parts.tokenizer, trust_remote_code=self.trust_remote_code)

    def other(self, path: str) -> ModelOptions:
        """The same options of another model, which is loaded as this one is."""
        return replace(self, model_name_or_path=path, adapter=None)

    def within(self, how: EncodeOptions, layers: str) -> EncodeOptions:
        """Encoding options for this model, which need not be loaded.

        Raises:
            ConfigError: sequences longer than it allows, or scored ``layers`` that it lacks.
            ModelError: no configuration.
        """
        from alphatoken.model.choice import layers_within, read_layers
        from alphatoken.model.loading import find_limits, find_parts

        chosen = read_layers(layers)
        parts = find_parts(self.model_name_or_path, self.adapter)
        limits = find_limits(parts, trust_remote_code=self.trust_remote_code)
        length = limits.length(how.max_length)
        if limits.layers is not None:
            layers_within(chosen, limits.layers)
        return replace(how, max_length=length, vocabulary=limits.tokens)


@dataclass(kw_only=True)
class ColumnOptions:
    """Options for columns to read."""

    prompt_column: str | None = option(None, "name of the prompt column")
    response_column: str | None = option(None, "name of the response column")
    messages_column: str | None = option(None, "name of the chat column")
    unread_columns: str | None = option(None, "columns to ignore, joined by commas")

    @property
    def fields(self) -> Fields:
        """The columns to read."""
        from alphatoken.data import Fields

        unread = tuple(filter(None, (self.unread_columns or "").split(",")))
        return Fields(self.prompt_column, self.response_column, self.messages_column, unread=unread)


@dataclass(kw_only=True)
class LeftOutOptions:
    """Options for leaving out training rows."""

    on_empty: Literal["error", "skip"] = option(
        "skip",
        "Rows without a response, pairs with an empty response or two equal ones, on the command "
        "line prompts too long as well: 'skip' leaves them out and counts them, 'error' stops.",
    )
    leak_key: Literal["prompt", "conversation"] = option(
        "prompt", "rows repeat each other where they share the prompt, or all of the conversation"
    )
    turns: Literal["all", "last"] = option("all", "assistant turns to value")


@dataclass(kw_only=True)
class ReadingOptions(ColumnOptions):
    """Options for reading the rows."""

    train_limit: int | None = option(None, "maximum number of rows to read", at_least=1)
    max_length: int | None = option(
        None, "maximum length of a row in tokens (default: the model's limit)", at_least=1
    )
    chat_template: bool = option(True, "write chats with the tokenizer's template")
    on_bad_rows: Literal["error", "skip"] = option(
        "error", "rows that cannot be read or written as tokens: stop before any work, or name them"
    )

    @property
    def how(self) -> EncodeOptions:
        """Encoding of rows, before the model's own limits."""
        from alphatoken.data import EncodeOptions

        rows = self if isinstance(self, LeftOutOptions) else LeftOutOptions()
        return EncodeOptions(
            max_length=self.max_length,
            on_empty=rows.on_empty,
            turns=rows.turns,
            chat_template=self.chat_template,
            on_bad_rows=self.on_bad_rows,
        )

    def read_rows(
        self, path: str, *, limit: int | None = None, **more: Any
    ) -> list[alphatoken.data.rows.Row]:
        """Rows of a file; ``more`` are further fields of :class:`alphatoken.data.Fields`.

        Raises:
            DataError: as of :func:`alphatoken.data.read_rows`.
        """
        from alphatoken.data import read_rows

        columns = replace(self.fields, **more)
        return read_rows(path, fields=columns, limit=limit, on_bad_rows=self.on_bad_rows)


@dataclass(kw_only=True)
class RunningOptions:
    """Options of the run itself."""

    per_device_train_batch_size: int = option(
        8, "number of rows of a forward or walk step", at_least=1
    )
    seed: int = option(0, "seed of all random draws")
    quiet: bool = option(False, "print no progress and no notes")
    traceback: bool = option(False, "show the whole traceback of an error")


@dataclass(kw_only=True)
class PresetOptions:
    """How tokens are valued."""

    value: str | None = option(
        None,
        "way to value: 'walk' (how far a token's loss falls as the model learns the validation "
        "rows), 'exact' (what a small step on it does to their loss), 'paper' (the same by the "
        "paper's approximation); default: 'walk' of score, race and diagnose data, else 'paper'",
        choices=tuple(PRESETS),
        metavar="VALUE",
    )


_OF_READING = ("trust_remote_code", "max_length", "chat_template", "on_bad_rows", "train_limit")


@dataclass(kw_only=True)
class CorpusOptions(
    ModelOptions, PresetOptions, ValueOptions, ReadingOptions, LeftOutOptions, RunningOptions
):
    """Options of the commands that value the rows of a file: ``score`` and ``diagnose``."""

    keep_ratio: float | None = option(
        None,
        "share of the response tokens to keep (default 0.5); the page of `score` shows which ones "
        "where it is given",
        group="options for keeping tokens",
    )
    resume: bool = option(
        False,
        "keep finished work and do the rest",
        either="earlier",
        group="options for an earlier run",
    )
    overwrite_output: bool = option(False, "replace existing output", either="earlier")

    @property
    def words(self) -> str:
        """Options by which another command finds this model and these rows, for a shell.

        Model and files stand first, then what decides how rows are read and is not at its default.
        Empty with an adapter: the commands that train begin at a whole model.
        """
        if self.adapter is not None:
            return ""
        of_rows = {one.name for kind in (ColumnOptions, LeftOutOptions) for one in fields(kind)}
        words: list[str] = []
        for name in ("model_name_or_path", "train_file", "validation_file"):
            if (path := getattr(self, name, None)) is not None:
                words += [f"--{name}", path]
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in of_rows.union(_OF_READING) or value == one.default:
                continue
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no_'}{one.name}")
            else:
                words += [f"--{one.name}", str(value)]
        return shlex.join(words)

    @property
    def ratio(self) -> float:
        """The share of the response tokens to keep."""
        return 0.5 if self.keep_ratio is None else self.keep_ratio


@dataclass(kw_only=True)
class ScoreOptions(CorpusOptions):
    """Everything that ``alphatoken score`` is told: the rows, and what is made of them."""

    train_file: str = option(help="rows to value", group="options for rows to value")
    validation_file: str | None = option(
        None, "rows that define the objective", either="validation", required=True
    )
    validation_rows: int | None = option(
        None,
        "number of validation rows to draw from the training rows",
        at_least=1,
        either="validation",
    )
    query: list[str] = option(
        [],
        "a text, or a row as a JSON object: which training rows raise or lower its probability; "
        "repeat it for several",
        metavar="TEXT",
        append=True,
        either="validation",
    )
    reference: str | None = option(
        None,
        "model folder, hub name or adapter whose losses are subtracted (--estimator walk); no walk "
        "is taken",
        metavar="MODEL",
        either="validation",
    )
    fisher_file: str | None = option(
        None, "Fisher file of the reference model (default: no stability)"
    )
    output_dir: str = option(help="folder for the results")
    keep_scope: Literal["batch", "sequence", "dataset"] = option(
        "batch",
        "rank tokens within a batch (the paper), a sequence, or all of them",
        group="options for tokens ranked together",
    )
    report: bool = option(True, "write an HTML report", group="options for results")
    shard_size: int | None = option(
        None, "rows in each value file (default: 64 or more, for about 1,000 files)", at_least=1
    )
    rows: Literal["tokens", "mean", "sum"] | None = option(
        None,
        "write rows.jsonl to train on: 'tokens' all rows with labels and loss_weights of the kept "
        "tokens; 'mean' or 'sum' the best rows by their tokens' values, as they are, up to "
        "--keep_ratio of the response tokens",
    )
    verify: int | None = option(
        None,
        "number of tokens of a batch to certify by the slow oracle (of a walk all tokens, by "
        "training a copy of the model); exit status 2 if a number is off",
        at_least=1,
        metavar="TOKENS",
    )
    engine: Literal["local", "ray"] = option(
        "local",
        "run in this process or those of torchrun, or in Ray's actors",
        group="options for processes and machines",
    )
    workers: int | None = option(None, "number of actors (--engine ray; default: one)", at_least=1)
    gpus_per_worker: float = option(
        0.0, "number of GPUs of each actor; 0 runs it on one CPU", metavar="GPUS"
    )

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return Path(self.output_dir)

    def values_in_words(self) -> str:
        """Unit and meaning of the values, and what rules out the default, where it does."""
        words = values_in_words(self)
        if self.reference is not None:
            words = f"walk (the loss of a token less that under {self.reference}, in nats)"
        elif self.query:
            words = words.replace("validation rows", "query")
        flag = rules_out_walk(vars(self))
        return f"{words}; {flag} rules out the default, a walk" if flag else words


def rules_out_walk(options: Mapping[str, Any]) -> str:
    """The flag beside which no walk can be taken, or ""."""
    flags = {
        "--fisher_file": options["fisher_file"] is not None,
        "more than one --query": len(options["query"]) > 1,
    }
    return next((flag for flag, named in flags.items() if named), "")
