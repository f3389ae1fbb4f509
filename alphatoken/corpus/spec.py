"""What a run over a corpus is told: what is valued, what is made of it, and who does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from alphatoken import FisherDrift, ScorerConfig
from alphatoken.data import EncodeOptions, Fields
from alphatoken.model.layer_choice import layers_within
from alphatoken.train.loading import find_limits, find_parts, load_causal_model, load_tokenizer

__all__ = ["EngineSpec", "JobSpec", "ModelSpec", "ResultSpec", "on_device"]


@dataclass(frozen=True)
class ModelSpec:
    """A model, and how it is loaded.

    Attributes:
        name: folder, or name on the hub.
        adapter: folder of a LoRA adapter that is put onto it.
        dtype: number format of its weights.
        device: where it runs; "auto" takes a GPU if there is one.
        trust_remote_code: run code that comes with it.
    """

    name: str
    adapter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def model(self) -> nn.Module:
        """The model in evaluation mode on its device.

        Raises:
            ModelError: it is missing or unreadable. ConfigError: no such device.
        """
        parts = find_parts(self.name, self.adapter)
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
        parts = find_parts(self.name, self.adapter)
        return load_tokenizer(parts.tokenizer, trust_remote_code=self.trust_remote_code)

    def within(self, how: EncodeOptions, layers: Any) -> EncodeOptions:
        """How rows become tokens that this model takes; it need not be loaded.

        Raises:
            ConfigError: sequences longer than it allows, or scored ``layers`` that it lacks.
            ModelError: no configuration.
        """
        parts = find_parts(self.name, self.adapter)
        limits = find_limits(parts, trust_remote_code=self.trust_remote_code)
        length = limits.length(how.max_length)
        if limits.layers is not None:
            layers_within(layers, limits.layers)
        return replace(how, max_length=length, vocabulary=limits.tokens)


def on_device(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The batch where the model is."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What is valued, and where the values go.

    Attributes:
        model: that values.
        train_file: rows that are valued.
        output_dir: folder of the results.
        config: what a value is.
        validation_file: rows that define the objective; None draws them from the training rows:
        validation_rows: so many.
        reference: second model that ``estimator="walk"`` takes values to; no validation rows then.
        fisher_file: of the reference model; None values without stability.
        fields: which columns are read.
        how: training rows become tokens; the model's own limits are added to it.
        limit: most training rows that are read.
        on_leak: "remove" or "error" for training rows that repeat held-out ones.
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
        batch_size: rows of one forward.
        seed: of every draw.
        ratio: share of the tokens that are kept.
        scope: they are ranked within a "batch", a "sequence", or the whole "dataset".
        format: "parquet" or "jsonl"; None takes Parquet where it is installed.
        shard_size: rows of the data a file; None makes about a thousand files.
        components: the parts of each value are written as well.
        quiet: no progress and no notes.
    """

    model: ModelSpec
    train_file: str
    output_dir: str
    config: ScorerConfig
    validation_file: str | None = None
    validation_rows: int = 0
    reference: str | None = None
    fisher_file: str | None = None
    fields: Fields = field(default_factory=Fields)
    how: EncodeOptions = field(default_factory=lambda: EncodeOptions(on_empty="skip"))
    limit: int | None = None
    on_leak: str = "remove"
    leak_key: str = "prompt"
    batch_size: int = 8
    seed: int = 0
    ratio: float = 0.5
    scope: str = "batch"
    format: str | None = None
    shard_size: int | None = None
    components: bool = True
    quiet: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return Path(self.output_dir)

    def second(self) -> ModelSpec | None:
        """The reference model, loaded as the other is."""
        return (
            None
            if self.reference is None
            else replace(self.model, name=self.reference, adapter=None)
        )

    def fisher(self) -> FisherDrift | None:
        """The Fisher of the stability term.

        Raises:
            AlphaTokenError: the file is missing, or holds something else.
        """
        return None if self.fisher_file is None else FisherDrift.load(self.fisher_file)


@dataclass(frozen=True, kw_only=True)
class ResultSpec:
    """What is made of the value files.

    Attributes:
        report: a page.
        report_rows: rows that it shows.
        dataset: folder for the rows with their weights, for any trainer.
        verify: tokens that are certified by the slow oracle.
    """

    report: bool = True
    report_rows: int = 40
    dataset: str | None = None
    verify: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Who values.

    Attributes:
        name: "local" for this process, or those that a launcher started; or "ray".
        workers: Ray's actors; None is one.
        gpus: of each actor; 0 runs on the CPU.
        cpus: of each actor, where it has no GPU.
    """

    name: str = "local"
    workers: int | None = None
    gpus: float = 0.0
    cpus: float = 1.0
