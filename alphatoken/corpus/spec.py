"""The inputs and outputs of a run over a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

from alphatoken import FisherDrift, ScorerConfig
from alphatoken.corpus.options import ModelOptions
from alphatoken.data import EncodeOptions, Fields

__all__ = ["JobSpec", "on_device"]


def on_device(batch: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The batch where the model is."""
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The rows to value, and the folder for the values.

    Attributes:
        model: that values.
        train_file: rows that are valued.
        output_dir: folder of the results.
        config: what a value is.
        validation_file: rows that define the objective; None draws them from the training rows:
        validation_rows: so many.
        queries: texts or rows in JSON in place of them, each with values of its own; training rows
            that repeat one stay.
        reference: second model that ``estimator="walk"`` takes values to; no validation rows then.
        fisher_file: of the reference model; None values without stability.
        fields: which columns are read.
        how: training rows become tokens; the model's own limits are added to it.
        limit: most training rows that are read.
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
        batch_size: rows of one forward.
        seed: of every draw.
        ratio: share of the tokens that are kept.
        scope: they are ranked within a "batch", a "sequence", or the whole "dataset".
        shard_size: rows of the data a file; None makes about a thousand files.
        quiet: no progress and no notes.
    """

    model: ModelOptions
    train_file: str
    output_dir: str
    config: ScorerConfig
    validation_file: str | None = None
    validation_rows: int = 0
    queries: Sequence[str] = ()
    reference: str | None = None
    fisher_file: str | None = None
    fields: Fields = field(default_factory=Fields)
    how: EncodeOptions = field(default_factory=lambda: EncodeOptions(on_empty="skip"))
    limit: int | None = None
    leak_key: str = "prompt"
    batch_size: int = 8
    seed: int = 0
    ratio: float = 0.5
    scope: str = "batch"
    shard_size: int | None = None
    quiet: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return Path(self.output_dir)

    def second(self) -> ModelOptions | None:
        """The reference model, loaded as the other is."""
        return (
            None
            if self.reference is None
            else replace(self.model, model_name_or_path=self.reference, adapter=None)
        )

    def fisher(self) -> FisherDrift | None:
        """The Fisher of the stability term.

        Raises:
            AlphaTokenError: the file is missing, or holds something else.
        """
        return None if self.fisher_file is None else FisherDrift.load(self.fisher_file)
