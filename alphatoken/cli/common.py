"""Options that several commands share, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphatoken.cli.options import option

__all__ = [
    "LAYERS",
    "PARAMETERS",
    "BadRowOptions",
    "BudgetOptions",
    "ColumnOptions",
    "EarlierOptions",
    "LeftOutOptions",
    "ModelOptions",
    "ReadingOptions",
    "RunningOptions",
    "TrainingRowOptions",
    "ValuationOptions",
]

LAYERS = "last K layers, 'all', or indices such as 0,4"
PARAMETERS = (
    "'linears' of the scored layers, 'linears,experts' with those of their mixtures of experts, "
    "'all' trainable ones, or parts joined by commas, 'linears' and patterns of names such as "
    "'linears,*norm*'"
)

# Those of alphatoken.estimate.estimators, which imports torch.
_Estimator = Literal[
    "alphatoken", "direct", "same_layer_hop", "path", "label", "paper_literal", "walk"
]


@dataclass(kw_only=True)
class ModelOptions:
    """The model."""

    model_name_or_path: str = option(help="model folder or hub name")
    adapter: str | None = option(None, "folder of a LoRA adapter to load onto it (peft)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format of its weights"
    )
    device: str = option("auto", "default: cuda if there is one, else cpu")
    trust_remote_code: bool = option(False, "run code that comes with the model")


@dataclass(kw_only=True)
class ValuationOptions:
    """How to value."""

    estimator: _Estimator = option("alphatoken", "what the value of a token is")
    layers: str = option("3", LAYERS, flag="score_layers")
    window: int | None = option(32, "causal window in tokens, or none")
    stability_weight: float = option(1.5, "lambda, of stability in the total")
    walk_steps: int = option(
        24, "AdamW steps on the validation rows (--estimator walk: losses before less after)"
    )
    walk_learning_rate: float | None = option(None, "of these steps; default 5e-5")


@dataclass(kw_only=True)
class BudgetOptions:
    """How much to keep."""

    ratio: float = option(0.5, "share of the response tokens to keep", flag="keep_ratio")


@dataclass(kw_only=True)
class ColumnOptions:
    """Which columns are read."""

    prompt_column: str | None = option(None, "column of the prompt")
    response_column: str | None = option(None, "column of the response")
    messages_column: str | None = option(None, "column of the chat")
    unread_columns: str | None = option(None, "columns to leave aside, joined by commas")


@dataclass(kw_only=True)
class BadRowOptions:
    """What to do with bad rows."""

    on_bad_rows: Literal["error", "skip"] = option(
        "error", "rows that cannot be read or written as tokens: stop before any work, or name them"
    )


@dataclass(kw_only=True)
class ReadingOptions(ColumnOptions, BadRowOptions):
    """How to read the rows."""

    limit: int | None = option(None, "most rows that are read", least=1, flag="train_limit")
    max_length: int | None = option(None, "in tokens; default: what the model allows", least=1)
    chat_template: bool = option(True, "write chats with the tokenizer's template")


@dataclass(kw_only=True)
class LeftOutOptions:
    """Which training rows are left out."""

    on_empty: Literal["error", "skip"] = option(
        "skip",
        "Rows without a response, pairs with an empty response or two equal ones, on the command "
        "line prompts too long as well: 'skip' leaves them out and counts them, 'error' stops.",
    )
    on_leak: Literal["remove", "error"] = option(
        "remove", "what happens to training rows that repeat held-out ones"
    )
    leak_key: Literal["prompt", "conversation"] = option(
        "prompt", "rows repeat each other where they share the prompt, or all of the conversation"
    )
    turns: Literal["all", "last"] = option("all", "which assistant turns are valued")


@dataclass(kw_only=True)
class TrainingRowOptions(LeftOutOptions):
    """What to do with training rows."""

    on_long: Literal["truncate", "skip", "error"] = option(
        "truncate", "what happens to rows that are too long"
    )
    end_token: bool = option(True, "plain format: end each response with it")


@dataclass(kw_only=True)
class EarlierOptions:
    """What to do with an earlier run."""

    resume: bool = option(False, "keep what is finished, do the rest", either="earlier")
    overwrite_output: bool = option(False, "replace what is there", either="earlier")


@dataclass(kw_only=True)
class RunningOptions:
    """How to run."""

    batch_size: int = option(8, "rows of one forward", least=1, flag="per_device_train_batch_size")
    seed: int = option(0, "seed of every draw")
    quiet: bool = option(False, "no progress and no notes")
    traceback: bool = option(False, "show the whole traceback of an error")
