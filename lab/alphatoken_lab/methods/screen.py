"""A screen before any value is taken: what the start model finds least likely is left out.

Values say whom a token's gradient serves; they do not see that a token is noise, whose gradient is
long in every direction. Its loss under the model before training does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.model.batch import IGNORE, label_mask
from alphatoken.select.masks import keep_count
from alphatoken.train.policy import PolicyStage
from alphatoken.train.policy_stage import (
    TrainingRows,
    cache_folder,
    kept_random_state,
    select_rows,
)
from alphatoken_lab.methods.static import model_losses

__all__ = ["screened"]


def screened(trainer: Any) -> Any:
    """The trainer's data set without what its model, as it is now, finds least likely.

    Of n response tokens the floor(share n) of highest ``-log p`` get the label -100; under
    ``value_unit="response"`` the floor(share n) of n rows with the highest mean go. Of equals the
    later ones go. One forward of all rows, cached like the passes of policies. Exact.

    Args:
        trainer: built, and not yet training; ``screen_share`` and ``value_unit`` of its options.

    Raises:
        ConfigError: a streamed data set, or another one that has no columns.
        UnsupportedError: sharded weights.
        DataError, NumericalError: as of :func:`alphatoken_lab.methods.static.static_pass`.

    Oracle: ``alphatoken.oracle.token_losses``.
    """
    options, data = trainer.args, trainer.train_dataset
    if any(parameter.numel() == 0 for parameter in trainer.model.parameters()):
        raise UnsupportedError(
            "screen_share needs whole weights for its pass over the rows",
            got="weights that are cut up over processes",
            remedy="screen_share=0, or a layout in which each process has the weights",
        )
    rows = TrainingRows(data)
    losses = _losses(trainer, rows)
    if options.value_unit == "response":
        # A row without a response teaches nothing, and is no case for the screen.
        means = torch.tensor([float(row.mean()) if len(row) else -torch.inf for row in losses])
        dropped = _highest(means, options.screen_share)
        return select_rows(data, (~dropped).nonzero().flatten().tolist(), "screen")
    tokens = _highest(torch.cat(losses), options.screen_share).split([len(x) for x in losses])
    labels = [_without(row, gone) for row, gone in zip(rows, tokens, strict=True)]
    transformed = (getattr(data, "format", None) or {}).get("type") == "custom"
    if not hasattr(data, "add_column") or transformed:
        raise ConfigError(
            "tokens can be screened in the columns of a datasets.Dataset only",
            got=f"{type(data).__name__}{' with a transform' if transformed else ''}",
            why="what goes is written as labels of -100",
            remedy="a datasets.Dataset without with_transform, or screen_share=0",
        )
    if "labels" in data.column_names:
        data = data.remove_columns("labels")
    return data.add_column("labels", labels)


def _losses(trainer: Any, rows: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Of each row: the losses of its response tokens, in order."""
    options = trainer.args
    stage = PolicyStage(
        model=trainer.model,
        rows=rows,
        validation=(),
        row_batch=trainer.row_batch,
        reference_model=None,
        folder=cache_folder(options),
        batch_size=options.per_device_eval_batch_size,
        progress=False if options.disable_tqdm else None,
    )
    with kept_random_state():
        table = model_losses(stage, trainer.model, "loss")
    found: list[Tensor] = []
    for start in range(0, len(rows), stage.batch_size):
        batch = stage.row_batch(rows[start : start + stage.batch_size])
        mask = label_mask(batch["labels"])
        column = table.columns_of(batch, mask, ["loss"])["loss"]
        found += [line[kept].cpu() for line, kept in zip(column, mask, strict=True)]
    return found


def _highest(losses: Tensor, share: float) -> Tensor:
    """Marks the floor(share n) highest of n; of equals the later ones."""
    marked = torch.zeros(len(losses), dtype=torch.bool)
    order = losses.argsort(stable=True)
    marked[order[len(losses) - keep_count(share, len(losses), rounding="floor") :]] = True
    return marked


def _without(row: Mapping[str, Any], gone: Tensor) -> list[int]:
    """Labels of a row, -100 where a response token is gone."""
    labels = torch.tensor(row["labels"])
    # The first token is predicted by nothing, so no loss stands for it.
    places = label_mask(labels[None])[0].nonzero().flatten()
    labels[places[gone]] = IGNORE
    return list(map(int, labels))
