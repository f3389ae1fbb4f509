"""Whole rows by their mean walk value, chosen before training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.config import WALK, ScorerConfig
from alphatoken.errors import ConfigError, DataError
from alphatoken.model.batch import label_mask
from alphatoken.scorer import Scorer
from alphatoken.select.masks import fill_tokens, keep_count
from alphatoken.support.progress import Tracker
from alphatoken.support.resume import content_digest, weights_digest
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.distributed import in_pieces
from alphatoken.train.ledger import rows_fingerprint
from alphatoken.train.policies.builtin import Standard
from alphatoken.train.policies.trained_weights import say_of_pass, trainable
from alphatoken.train.policy import Needs, PolicySettings, PolicyStage, response_tokens

_ROWS = 256
"""Training rows between two files."""

Array = NDArray[Any]


class WalkRows(Standard):
    """All tokens with weight 1, of the rows of highest mean value along one walk.

        e_k = l_k(theta) - l_k(theta + D),     v_r = mean of e_k over the response tokens of row r
        rows to train on: the ceil(share R) of R rows with the largest v_r, of equal ones the first

    theta + D is where ``walk_steps`` AdamW steps on the validation rows lead from the start model,
    each on the next micro-batch of them (see ``alphatoken.estimate.walk``). Rows of another kind
    than the validation rows are left out as rows, with all that is in them. The walk and two
    forwards of every row come before training, in the run's precision; values are kept in the
    folder of the run's caches under all that they depend on, 256 rows a file, so that a killed pass
    goes on there. A row without a response token is never chosen. Every process computes the same.

    In mode "budget" rows are taken in the same order until they have ``keep_ratio`` of the response
    tokens; the row that reaches it is taken too.

    Args:
        settings: see ``PolicySettings``.
        share: rows that are kept, as a share of all. [above 0, to 1; the share of the rows that
            is of the target's kind; ours]
        walk_steps: number of AdamW steps of the walk. [from 1; raise it where the values of like
            rows differ little; 24, as for walks everywhere]
        walk_learning_rate: constant rate of the walk; None takes the run's. [null, or above 0;
            lower it where the walk is said to raise the loss; ours]

    Raises:
        ConfigError: an option out of range, packed rows, no validation rows.
        DataError: no row has a response token.
        NumericalError: a loss that is not finite.

    Exactness: exact up to the rounding of two forwards. Source: ours. Oracle:
    ``alphatoken.oracle.run`` (``walked``, ``walk_values``), a mean and a sort.
    """

    name: ClassVar[str] = "walk-rows"
    family: ClassVar[str] = "sft"
    needs: ClassVar[Needs] = Needs(validation=True)
    source: ClassVar[str] = "AlphaToken"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        share: float = 0.5,
        walk_steps: int = 24,
        walk_learning_rate: float | None = None,
    ) -> None:
        super().__init__(settings)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError("share of walk-rows lies in (0, 1]", got=repr(share))
        # Steps and rate are a walk's, and checked as such.
        ScorerConfig(WALK, walk_steps=walk_steps, walk_learning_rate=walk_learning_rate)
        self.share, self.walk_steps, self.walk_learning_rate = share, walk_steps, walk_learning_rate
        self._summary: dict[str, float] = {}

    @property
    def summary(self) -> Mapping[str, float]:
        """``rows``, ``chosen_rows``, ``kept_share`` of tokens, ``lowest_value`` of these rows."""
        return self._summary

    @property
    def reads_ratio(self) -> bool:
        """True in mode "budget"; else ``share`` says how many rows are kept."""
        return self.settings.mode == "budget"

    def choose_rows(self, stage: PolicyStage) -> list[int]:
        """Rows to train on, ascending."""
        values, tokens = self.row_values(stage), _tokens(stage.rows)
        order = np.argsort(-values, kind="stable")
        order = order[np.isfinite(values[order])]
        if not len(order):
            raise DataError(
                "no training row has a response token",
                got=f"{len(tokens)} rows",
                remedy="check the prompt/completion split and max_length",
            )
        if self.settings.mode == "native":
            chosen = order[: keep_count(self.share, len(tokens))]
        else:
            chosen = fill_tokens(order, tokens, self.settings.keep_ratio)
        self._summary |= {
            "rows": float(len(tokens)),
            "chosen_rows": float(len(chosen)),
            "kept_share": float(tokens[chosen].sum() / tokens.sum()),
            "lowest_value": float(values[chosen].min()),
        }
        say_of_pass(
            f"policy '{self.name}': {len(chosen)} of {len(tokens)} rows are trained on, with "
            f"{self._summary['kept_share']:.0%} of the response tokens; their mean values are "
            f"{self._summary['lowest_value']:.3g} nats or more"
        )
        return sorted(chosen.tolist())

    def row_values(self, stage: PolicyStage) -> Array:
        """(R,) mean walk value of each row in nats, float64; -inf without a response token."""
        _check_rows(stage)
        folder = self._folder(stage)
        parts = {
            folder / f"rows-{first:08d}.safetensors": range(
                first, min(first + _ROWS, len(stage.rows))
            )
            for first in range(0, len(stage.rows), _ROWS)
        }
        missing = {file: rows for file, rows in parts.items() if not file.exists()}
        total, left = len(stage.rows), sum(map(len, missing.values()))
        say_of_pass(
            f"policy '{self.name}': {len(stage.validation)} validation rows, {total} training rows"
            + (f", {total - left} of them valued by an earlier run in '{folder}'" * (left < total))
        )
        if missing:
            folder.mkdir(parents=True, exist_ok=True)
            scorer = self._scorer(stage)
            with Tracker("Walk values of the training rows", total, stage.progress) as tracker:
                tracker.resume(total - left)
                for file, rows in missing.items():
                    with stage.autocast():
                        values = _values(scorer, stage, [stage.rows[i] for i in rows])
                    write_tensors(file, {"values": values}, {})
                    left -= len(rows)
                    tracker.report(total - left)
        return np.concatenate([read_tensors(file)[0]["values"].numpy() for file in parts])

    def _rate(self, stage: PolicyStage) -> float | None:
        rate = self.walk_learning_rate
        return stage.run.get("learning_rate") if rate is None else rate

    def _folder(self, stage: PolicyStage) -> Path:
        """Folder of the values, named by all that they depend on."""
        device = next(stage.model.parameters()).device.type
        with stage.autocast():
            narrow = torch.is_autocast_enabled(device)
            precision = str(torch.get_autocast_dtype(device)) if narrow else "of the weights"
        digest = content_digest(
            [
                weights_digest(stage.model),
                sorted(trainable(stage.model)),
                rows_fingerprint(stage.rows),
                _tokens(stage.rows),
                rows_fingerprint(stage.validation),
                [self.walk_steps, self._rate(stage), _batch_size(stage)],
                device,
                precision,
            ]
        )
        return Path(stage.folder) / f"{self.name}-{digest[:16]}"

    def _scorer(self, stage: PolicyStage) -> Scorer:
        numbers = tuple(range(len(stage.validation)))
        pieces = in_pieces(numbers, -(-len(numbers) // _batch_size(stage)))
        return Scorer(
            stage.model,
            [stage.row_batch([stage.validation[i] for i in piece]) for piece in pieces],
            config=ScorerConfig(
                WALK,
                objective="adaptation",
                walk_steps=self.walk_steps,
                walk_learning_rate=self._rate(stage),
            ),
        )


def _values(scorer: Scorer, stage: PolicyStage, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """(len(rows),) mean values, float64; the longest rows first, so that little is padding."""
    means = torch.full((len(rows),), -math.inf, dtype=torch.float64)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    for first in range(0, len(order), stage.batch_size):
        chosen = order[first : first + stage.batch_size]
        for row, mean in zip(chosen, _means(scorer, stage, [rows[i] for i in chosen]), strict=True):
            means[row] = mean
    return means


def _means(
    scorer: Scorer, stage: PolicyStage, rows: Sequence[Mapping[str, Any]]
) -> Iterator[float]:
    batch = stage.row_batch(rows)
    mask = label_mask(batch["labels"])
    if not bool(mask.any()):
        yield from (-math.inf for _ in rows)
        return
    values = scorer.score(batch, components=False)
    counts = values.mask.sum(-1)
    sums = values.total.double().masked_fill(~values.mask, 0.0).sum(-1)
    for total, count in zip(sums.tolist(), counts.tolist(), strict=True):
        yield total / count if count else -math.inf


def _batch_size(stage: PolicyStage) -> int:
    """Validation rows of one step of the walk: as many as a micro-batch of the run has."""
    return int(stage.run.get("per_device_train_batch_size", 8))


def _tokens(rows: Sequence[Mapping[str, Any]]) -> Array:
    return np.asarray([response_tokens(row) for row in rows], np.int64)


def _check_rows(stage: PolicyStage) -> None:
    if not stage.validation or not len(stage.rows):
        raise ConfigError(
            "walk-rows needs validation rows and training rows",
            got=f"{len(stage.validation)} and {len(stage.rows)}",
            why="rows are chosen by what their losses fall by along steps on the validation rows",
            remedy="validation_dataset=..., a few clean rows of the target",
        )
    for row in stage.rows:
        if len(row.get("seq_lengths") or ()) > 1:
            raise ConfigError(
                "walk-rows chooses rows, each one sequence with labels",
                got="packed rows",
                remedy="packing=False",
            )
