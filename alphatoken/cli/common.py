"""Options that several commands share, group by group, and the former names of flags."""

from __future__ import annotations

from dataclasses import dataclass

from alphatoken.cli.options import option

__all__ = [
    "ESTIMATORS",
    "FORMER",
    "LAYERS",
    "ModelOptions",
    "ReadingOptions",
    "RunningOptions",
    "TrainingRowOptions",
]

FORMER = {
    "debug": "traceback",
    "fisher": "fisher_file",
    "messages_field": "messages_column",
    "model": "model_name_or_path",
    "out": "output_dir",
    "overwrite": "overwrite_output",
    "prompt_field": "prompt_column",
    "response_field": "response_column",
    "train": "train_file",
    "validation": "validation_file",
}
"""Flag as it was called -> as it is called now, and in the trainers' options."""

ESTIMATORS = ("alphatoken", "direct", "same_layer_hop", "path", "label", "paper_literal")
"""Those of ``alphatoken.estimate.estimators``, which imports torch."""

LAYERS = "last K layers, 'all', or indices such as 0,4"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    model_name_or_path: str = option(help="model folder or hub name", metavar="PATH")
    adapter: str | None = option(None, "LoRA adapter to load onto it (peft)", metavar="PATH")
    dtype: str = option(
        "auto", "of its weights", choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str = option("auto", "default: cuda if there is one, else cpu", metavar="NAME")
    trust_remote_code: bool = option(False, "run code that comes with the model")


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How to read the rows."""

    prompt_column: str | None = option(None, "column of the prompt", metavar="NAME")
    response_column: str | None = option(None, "column of the response", metavar="NAME")
    messages_column: str | None = option(None, "column of the chat", metavar="NAME")
    limit: int | None = option(None, "read at most N rows", least=1)
    max_length: int | None = option(None, "default: what the model allows", least=1)
    chat_template: bool = option(True, "write chats with the tokenizer's template")


@dataclass(frozen=True, kw_only=True)
class TrainingRowOptions:
    """What to do with training rows."""

    on_long: str = option("truncate", "rows too long", choices=("truncate", "skip", "error"))
    on_empty: str = option("error", "rows without response", choices=("error", "skip"))
    on_leak: str = option("remove", "rows that repeat held-out ones", choices=("remove", "error"))
    turns: str = option("all", "assistant turns to value", choices=("all", "last"))
    end_token: bool = option(True, "plain format: end each response with it")


@dataclass(frozen=True, kw_only=True)
class RunningOptions:
    """How to run."""

    batch_size: int = option(8, "rows of one forward", least=1)
    seed: int = option(0, "of every draw")
    quiet: bool = option(False, "no progress and no notes")
    traceback: bool = option(False, "show the whole traceback of an error")
