"""LESS: train on the rows whose gradients point where those of the validation rows do."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import ConfigError, DataError, NumericalError, require_choice
from alphatoken.select.masks import keep_count
from alphatoken.support.precision import full_precision
from alphatoken.support.progress import Tracker
from alphatoken.support.resume import weights_digest
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.ledger import rows_fingerprint
from alphatoken.train.policies.trained_weights import copy_weights, trainable
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken_lab.methods.lora_warmup import (
    AdamCheckpoint,
    LoraWarmup,
    adapted,
    mean_loss,
    warm_up,
)
from alphatoken_lab.methods.projection import Projection
from alphatoken_lab.methods.static import device_of, row_inputs, wait_for
from alphatoken_lab.methods.token_table import TableHeader

ADAM = ("code", "paper")
AGGREGATES = ("mean_of_cosines", "cosine_of_mean")
_ROWS = 64  # rows between two files
_WORKSPACE = 2**28  # numbers of the gradients that are projected together: 1 GiB

Array = NDArray[Any]


class LESS(TokenPolicy):
    """Choose training rows by gradient similarity to validation rows, over a short LoRA training.

        s(z) = max over subtasks of mean over z' of  sum_i eta_i <Gamma_i(z), g_i(z')>

    over the checkpoints i of a warm-up on ``warmup_share`` of the rows: ``Gamma`` is Adam's update
    for row z, ``g`` the plain gradient of validation row z', both with respect to the LoRA
    parameters, projected to ``dimension`` numbers and normalised; ``eta_i`` the epoch's mean
    learning rate, their sum 1. All tokens of the chosen rows are trained on.

    The mode "native" keeps the top floor(share R) of R rows. The mode "budget" takes rows by score
    until ``keep_ratio`` of the response tokens is reached ("ceil": the first row that reaches it
    comes in; "floor": it stays out), so that runs of equal token budget can be compared.

    Args:
        settings: mode, budget, rounding, seed.
        share: share of the rows, 0.05 as published. [above 0, to 1; raise it where the data set is
            small; the paper's 0.05]
        subtasks: name of each validation row's subtask; None reads the column ``subtask``, and
            where there is none all rows are one. [null, or a name for each validation row; name
            them where the validation rows are of several tasks; the code's segments]
        dimension: d of the projection; None projects nothing, and neither does a d that is no less
            than the number of LoRA parameters. [null, or from 1; lower it where time or memory is
            short; the code's 8,192]
        adam: "code": m' / sqrt(v' + eps), no bias correction; "paper": m^ / (sqrt(v^) + eps).
            ["code" or "paper"; "paper" to follow the equations; the code]
        aggregate: "mean_of_cosines" (the code: validation gradients are normalised one by one), or
            "cosine_of_mean" (the paper: their mean is). ["mean_of_cosines" or "cosine_of_mean"; the
            second to follow the paper; the code]
        warmup_share: share of the rows for the LoRA warm-up; see
            :class:`~alphatoken_lab.methods.lora_warmup.LoraWarmup`. [above 0, to 1; raise it where
            the data set is small; the code's 0.05]
        warmup_epochs: epochs of the warm-up, each a checkpoint. [from 1; lower it to save passes:
            each epoch is one over all rows; the code's 4]
        warmup_learning_rate: learning rate of the warm-up. [above 0; as LoRA wants it on your
            model; the code's 2e-5]
        warmup_batch_size: rows of one of its steps. [from 1; lower it where the warm-up has few
            rows; the code's 32]
        rank: rank of its LoRA. [from 1; lower it for a small model; the code's 128]
        alpha: alpha of its LoRA. [above 0; with the rank; the code's 512]
        dropout: dropout of its LoRA. [from 0, below 1; 0 for a warm-up without chance; the code's
            0.1]
        target_modules: linears for its LoRA. [names of linear modules; where the model's
            projections have other names; the code's q, k, v, o]

    Raises:
        ConfigError: an argument out of range; no validation rows; packed rows.

    Source: Xia et al. 2024; princeton-nlp/LESS. Oracle: per-row autograd, in the tests.
    """

    name: ClassVar[str] = "less"
    needs: ClassVar[Needs] = Needs(model=True, validation=True)
    scope: ClassVar[str] = "dataset"
    rounding: ClassVar[str] = "ceil"
    source: ClassVar[str] = "arXiv 2402.04333; github.com/princeton-nlp/LESS"
    static = True

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        share: float = 0.05,
        subtasks: Sequence[str | int] | None = None,
        dimension: int | None = 8192,
        adam: str = "code",
        aggregate: str = "mean_of_cosines",
        warmup_share: float = 0.05,
        warmup_epochs: int = 4,
        warmup_learning_rate: float = 2e-5,
        warmup_batch_size: int = 32,
        rank: int = 128,
        alpha: float = 512.0,
        dropout: float = 0.1,
        target_modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    ) -> None:
        super().__init__(settings)
        if not 0 < share <= 1:
            raise ConfigError("share of LESS lies in (0, 1]", got=repr(share))
        require_choice("adam", adam, ADAM)
        require_choice("aggregate", aggregate, AGGREGATES)
        if dimension is not None and dimension < 1:
            raise ConfigError("dimension of LESS is 1 or more, or None", got=repr(dimension))
        self.share, self.subtasks, self.dimension = share, subtasks, dimension
        self.adam, self.aggregate = adam, aggregate
        self.warmup = LoraWarmup(
            share=warmup_share,
            epochs=warmup_epochs,
            learning_rate=warmup_learning_rate,
            batch_size=warmup_batch_size,
            rank=rank,
            alpha=float(alpha),
            dropout=dropout,
            target_modules=tuple(target_modules),
        )
        self._summary: dict[str, float] = {}

    @property
    def summary(self) -> Mapping[str, float]:
        """Findings of ``choose_rows``: ``rows``, ``chosen_rows``, ``kept_share`` (of tokens)."""
        return self._summary

    # --- at a batch: every token of the rows that were chosen -------------------------------------

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """1 on every response token: the rows were chosen before training."""
        return batch.mask.to(batch.log_probs.dtype)

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """All response tokens of the chosen rows, as in native mode."""
        return self.native_weights(batch)

    # --- the choice -------------------------------------------------------------------------------

    def choose_rows(self, stage: PolicyStage) -> list[int]:
        """Rows to train on, ascending.

        Raises:
            DataError: nothing is chosen.
        """
        influence = self.influence(stage)
        scores, tokens = influence.max(1), _tokens(stage.rows)
        order = np.lexsort((-scores,))  # stable: among equals the earlier row
        order = order[np.isfinite(scores[order])]
        if self.settings.mode == "native":
            chosen = order[: max(1, keep_count(self.share, len(tokens), rounding="floor"))]
        else:
            chosen = fill_tokens(order, tokens, self.settings.keep_ratio)
        if not len(chosen):
            raise DataError(
                "LESS chooses no row",
                got=f"keep_ratio={self.settings.keep_ratio}, {len(tokens)} rows",
                remedy="a larger keep_ratio",
            )
        share = float(tokens[chosen].sum() / tokens.sum())
        self._summary |= {
            "rows": float(len(tokens)), "chosen_rows": float(len(chosen)), "kept_share": share
        }  # fmt: skip
        return sorted(chosen.tolist())

    def influence(self, stage: PolicyStage) -> Array:
        """(R, subtasks) float64 scores of every row; -inf where a row has no response token.

        Cached under all that it depends on, and resumed: after a kill, finished epochs of the
        warm-up and finished parts of the rows are read from files.
        """
        _check_rows(stage)
        names = self._subtasks(stage.validation)
        header = TableHeader(
            kind="less",
            model=weights_digest(stage.model),
            data=rows_fingerprint(stage.rows),
            settings={
                "row_tokens": blake2b(_tokens(stage.rows).tobytes(), digest_size=8).hexdigest(),
                "validation": rows_fingerprint(stage.validation),
                "subtasks": [list(map(str, names))],
                "dimension": self.dimension,
                "adam": self.adam,
                "aggregate": self.aggregate,
                "warmup": {**asdict(self.warmup), "seed": self.settings.seed},
                "device": device_of(stage.model).type,
            },
        )
        return _Influence(self, stage, header, names).run()

    def _subtasks(self, validation: Sequence[Mapping[str, Any]]) -> list[str]:
        if self.subtasks is None:
            return [str(row.get("subtask", "all")) for row in validation]
        if len(self.subtasks) != len(validation):
            raise ConfigError(
                "subtasks of LESS names one for each validation row",
                got=f"{len(self.subtasks)} names, {len(validation)} rows",
            )
        return list(map(str, self.subtasks))


def _tokens(rows: Sequence[Mapping[str, Any]]) -> Array:
    counts = [sum(x != -100 for x in row.get("labels", row["input_ids"])[1:]) for row in rows]
    return np.asarray(counts, np.int64)


def _check_rows(stage: PolicyStage) -> None:
    if not stage.validation:
        raise ConfigError(
            "LESS needs validation rows",
            got="none",
            why="rows are chosen by their gradients' likeness to those of the validation rows",
            remedy="validation_dataset=..., a few rows of each task that training should serve",
        )
    if not len(stage.rows):
        raise ConfigError("LESS needs training rows", got="0 rows")
    for row in stage.rows:
        if "input_ids" not in row or len(row.get("seq_lengths") or ()) > 1:
            raise ConfigError(
                "LESS chooses rows, each one sequence with labels",
                got="packed rows" if "input_ids" in row else f"columns {sorted(row)}",
                remedy="packing=False, and supervised fine-tuning",
            )


def fill_tokens(order: Array, tokens: Array, ratio: float) -> Array:
    """The fewest rows with at least ``ceil(ratio N)`` of all N tokens, in the order given."""
    budget = keep_count(ratio, int(tokens.sum()))
    filled = np.cumsum(tokens[order])
    return order[: int(np.searchsorted(filled, budget, side="left")) + 1]


@full_precision
def adam_update(
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    steps: int,
    *,
    kind: str = "code",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Tensor:
    """Gamma: the direction of Adam's next step if ``gradient`` were its gradient.

    m' = b1 m + (1 - b1) g,   v' = b2 v + (1 - b2) g^2
    "code":   m' / sqrt(v' + eps)
    "paper":  m^ / (sqrt(v^) + eps),   m^ = m' / (1 - b1^t),  v^ = v' / (1 - b2^t),  t = steps + 1
    """
    m = betas[0] * first + (1 - betas[0]) * gradient
    v = betas[1] * second + (1 - betas[1]) * gradient.square()
    if kind == "code":
        return m / (v + eps).sqrt()
    t = steps + 1
    return (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)


class _Influence:
    """The computation behind :meth:`LESS.influence`, and its files."""

    def __init__(
        self, policy: LESS, stage: PolicyStage, header: TableHeader, names: Sequence[str]
    ) -> None:
        self.policy, self.header = policy, header
        self.names = list(dict.fromkeys(names))
        self.group = torch.tensor([self.names.index(name) for name in names])
        stem = f"less-{header.digest()}"
        self.file = Path(stage.folder) / f"{stem}.safetensors"
        self.folder = Path(stage.folder) / f"{stem}.parts"
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world = dist.get_world_size() if grouped else 1
        self.stage = stage if self.rank == 0 else replace(stage, progress=False)

    def run(self) -> Array:
        if not self.file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.make()
        return np.asarray(self.read(self.file)["scores"].double().numpy())

    def make(self) -> None:
        """Warm-up, validation gradients, then the rows a part at a time at each checkpoint."""
        warmup = LoraWarmup(**{**asdict(self.policy.warmup), "seed": self.policy.settings.seed})
        epochs = [self.folder / f"epoch-{i}.safetensors" for i in range(warmup.epochs)]
        starts = range(0, len(self.stage.rows), _ROWS)
        files = {(i, a): self.folder / f"rows-{i}-{a:08d}.safetensors"
                 for i in range(len(epochs)) for a in starts}  # fmt: skip
        with adapted(self.stage.model, warmup) as model:
            if self.rank:
                wait_for(epochs)
            checkpoints = warm_up(self.stage, model, warmup, self.folder, self.header.to_json())
            self.parts(model, checkpoints, files)
        if self.rank:
            wait_for([self.file])
            return
        wait_for(list(files.values()))
        rates = np.asarray([checkpoint.rate for checkpoint in checkpoints])
        rates = rates / rates.sum()
        scores = sum(
            float(rate) * torch.cat([self.read(files[i, a])["scores"] for a in starts]).double()
            for i, rate in enumerate(rates)
        )
        assert isinstance(scores, Tensor)
        self.write(self.file, scores)
        if self.world == 1:  # another process may still be reading
            shutil.rmtree(self.folder, ignore_errors=True)

    def parts(
        self,
        model: Any,
        checkpoints: Sequence[AdamCheckpoint],
        files: Mapping[tuple[int, int], Path],
    ) -> None:
        """This process's share of the parts that are not there yet."""
        mine = list(files)[self.rank :: self.world]
        missing = [key for key in mine if not files[key].exists()]
        count = {key: min(_ROWS, len(self.stage.rows) - key[1]) for key in mine}
        tracker = Tracker(
            "Gradients of the training rows", sum(count.values()),
            self.stage.progress,
        )  # fmt: skip
        done = sum(count[key] for key in mine if key not in missing)
        tracker.resume(done)
        for i, checkpoint in enumerate(checkpoints):
            starts = [a for j, a in missing if j == i]
            if not starts:
                continue
            gradients = _Gradients(self.stage, model, checkpoint, self.policy)
            directions = self.validation(gradients)
            for a in starts:
                rows = [self.stage.rows[r] for r in range(a, a + count[i, a])]
                self.write(files[i, a], self.scored(gradients, rows, directions))
                done += count[i, a]
                tracker.report(done)

    def validation(self, gradients: _Gradients) -> Tensor:
        """(subtasks, d) what a row's normalised update is multiplied with."""
        projected = gradients.project(self.stage.validation, gradients.plain)
        empty = projected.norm(dim=-1) == 0
        if bool(empty.any()):
            raise DataError(
                "a validation row has no gradient",
                got=f"row {int(empty.nonzero()[0])}",
                why="it has no response token, or the adapters do not reach its loss",
                remedy="leave it out",
            )
        each = _normal(projected) if self.policy.aggregate == "mean_of_cosines" else projected
        means = torch.stack([each[self.group == s].mean(0) for s in range(len(self.names))])
        return means if self.policy.aggregate == "mean_of_cosines" else _normal(means)

    def scored(
        self, gradients: _Gradients, rows: Sequence[Mapping[str, Any]], directions: Tensor
    ) -> Tensor:
        """(rows, subtasks); -inf for a row without a response token."""
        scores = torch.full((len(rows), len(directions)), -math.inf)
        kept = [i for i, n in enumerate(_tokens(rows)) if n]
        if kept:
            updates = gradients.project([rows[i] for i in kept], gradients.adam)
            scores[kept] = (_normal(updates) @ directions.T).cpu()
        return scores

    def write(self, path: Path, scores: Tensor) -> None:
        write_tensors(path, {"scores": scores}, {"header": self.header.to_json()})

    def read(self, path: Path) -> dict[str, Tensor]:
        """Scores of a file.

        Raises:
            DataError: unreadable, or made for something else (named).
        """
        tensors, facts = read_tensors(path)
        try:
            header = TableHeader.from_json(facts["header"])
        except (KeyError, ValueError, TypeError) as problem:
            raise DataError(f"the file '{path}' holds no LESS scores", got=str(problem)) from None
        header.require(TableHeader(**json.loads(self.header.to_json())), f"'{path}'")
        return tensors


def _normal(vectors: Tensor) -> Tensor:
    length = vectors.norm(dim=-1, keepdim=True)
    normal: Tensor = vectors / length.clamp(min=torch.finfo(vectors.dtype).tiny)
    return normal


class _Gradients:
    """Projected gradients of rows at one checkpoint; each row by itself, dropout off."""

    def __init__(
        self, stage: PolicyStage, model: Any, checkpoint: AdamCheckpoint, policy: LESS
    ) -> None:
        self.stage, self.model, self.checkpoint, self.policy = stage, model, checkpoint, policy
        self.parameters = trainable(model)
        copy_weights(checkpoint.weights, self.parameters)
        device = device_of(model)
        self.first, self.second = (
            torch.cat([moments[name].flatten() for name in self.parameters]).to(device).float()
            for moments in (checkpoint.first, checkpoint.second)
        )
        self.projection = Projection(len(self.first), policy.dimension, seed=policy.settings.seed)

    def plain(self, row: Mapping[str, Any]) -> Tensor:
        """(D,) gradient of the row's mean token loss."""
        inputs, labels = row_inputs(self.stage, [row], device_of(self.model))
        with torch.enable_grad():
            loss, count = mean_loss(self.model, inputs, labels)
            gradients = torch.autograd.grad(loss / max(1, count), list(self.parameters.values()))
        flat_gradient = torch.cat([g.flatten().float() for g in gradients])
        if not bool(torch.isfinite(flat_gradient).all()):
            raise NumericalError(
                "a row's gradient is not finite",
                got=f"a row of {len(row['input_ids'])} tokens",
                remedy="check the model's weights and precision",
            )
        return flat_gradient

    def adam(self, row: Mapping[str, Any]) -> Tensor:
        """(D,) Adam's update for the row."""
        warmup = self.policy.warmup
        return adam_update(
            self.plain(row), self.first, self.second, self.checkpoint.steps,
            kind=self.policy.adam, betas=warmup.betas, eps=warmup.eps,
        )  # fmt: skip

    def project(
        self, rows: Sequence[Mapping[str, Any]], take: Callable[[Mapping[str, Any]], Tensor]
    ) -> Tensor:
        """(rows, d), as many rows at a time as memory allows: they share the cost of the signs."""
        size = max(1, _WORKSPACE // max(1, self.projection.width))
        return torch.cat(
            [
                self.projection(torch.stack([take(row) for row in rows[a : a + size]]))
                for a in range(0, len(rows), size)
            ]
        )
