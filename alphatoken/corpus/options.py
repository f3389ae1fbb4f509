"""Options of a run over a corpus, as the command line and Python have them.

Nothing here imports torch before a model is asked for, so that ``--help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from alphatoken.support.options import option

if TYPE_CHECKING:
    from torch import nn

    from alphatoken.data import EncodeOptions

__all__ = ["EngineOptions", "ModelOptions", "ResultOptions"]


@dataclass(kw_only=True)
class ModelOptions:
    """Options of the model."""

    model_name_or_path: str = option(help="model folder or hub name")
    adapter: str | None = option(None, "folder of a LoRA adapter to load onto it (peft)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "dtype of the model's weights"
    )
    device: str = option("auto", "device of the model (default: cuda if there is one, else cpu)")
    trust_remote_code: bool = option(False, "run code that comes with the model")

    def model(self) -> nn.Module:
        """The model in evaluation mode on its device.

        Raises:
            ModelError: it is missing or unreadable. ConfigError: no such device.
        """
        from alphatoken.train.loading import find_parts, load_causal_model

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
        from alphatoken.train.loading import find_parts, load_tokenizer

        parts = find_parts(self.model_name_or_path, self.adapter)
        return load_tokenizer(parts.tokenizer, trust_remote_code=self.trust_remote_code)

    def within(self, how: EncodeOptions, layers: Any) -> EncodeOptions:
        """Encoding options for this model, which need not be loaded.

        Raises:
            ConfigError: sequences longer than it allows, or scored ``layers`` that it lacks.
            ModelError: no configuration.
        """
        from alphatoken.model.layer_choice import layers_within
        from alphatoken.train.loading import find_limits, find_parts

        parts = find_parts(self.model_name_or_path, self.adapter)
        limits = find_limits(parts, trust_remote_code=self.trust_remote_code)
        length = limits.length(how.max_length)
        if limits.layers is not None:
            layers_within(layers, limits.layers)
        return replace(how, max_length=length, vocabulary=limits.tokens)


@dataclass(kw_only=True)
class ResultOptions:
    """Options of the results."""

    report: bool = option(True, "write an HTML report")
    write_dataset: bool = option(
        False, "write the rows as a data set too: labels, which any trainer reads, and loss_weights"
    )
    verify: int | None = option(
        None, "certify so many tokens by the slow oracle; exit status 2 if a number is off", least=1
    )


@dataclass(kw_only=True)
class EngineOptions:
    """Options for processes and machines."""

    engine: Literal["local", "ray"] = option(
        "local", "run in this process or those of torchrun, or in Ray's actors"
    )
    workers: int | None = option(None, "number of actors (--engine ray; default: one)", least=1)
    gpus_per_worker: float = option(0.0, "number of GPUs of each actor; 0 runs it on one CPU")
