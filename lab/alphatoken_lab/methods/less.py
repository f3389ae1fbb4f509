"""LESS: train on the rows whose gradients point where those of the validation rows do."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import ConfigError, DataError, NumericalError, require_choice
from alphatoken.select.masks import fill_tokens, keep_count
from alphatoken.support.precision import full_precision
from alphatoken.support.resume import weights_digest
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.ledger import rows_fingerprint
from alphatoken.train.policies.trained_weights import copy_weights, trainable
from alphatoken.train.policy import (
    Needs,
    PolicyBatch,
    PolicySettings,
    PolicyStage,
    TokenPolicy,
    response_tokens,
)
from alphatoken_lab.methods.lora_warmup import (
    AdamCheckpoint,
    LoraWarmup,
    adapted,
    mean_loss,
    warm_up,
)
from alphatoken_lab.methods.static import (
    Report,
    device_of,
    launch_place,
    pass_file,
    row_inputs,
    shared_pass,
    wait_for,
)
from alphatoken_lab.methods.token_table import TableHeader

ADAM = ("code", "paper")
AGGREGATES = ("mean_of_cosines", "cosine_of_mean")
_ROWS = 64  # rows between two files
_WORKSPACE = 2**28  # numbers of the gradients that are projected together: 1 GiB
_BLOCK = 1024  # rows of the sign matrix at a time
_GOLDEN = 0x9E3779B97F4A7C15

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
        subtasks: name of each validation row's subtask; None: all rows are of one. [null, or a name
            for each validation row; name them where the validation rows are of several tasks; the
            code's segments]
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
        file = pass_file(stage, header)
        if not file.exists():
            _write_influence(self, stage, header, names, file)
        return np.asarray(_scores_in(file, header).double().numpy())

    def _subtasks(self, validation: Sequence[Mapping[str, Any]]) -> list[str]:
        if self.subtasks is None:
            return ["all"] * len(validation)
        if len(self.subtasks) != len(validation):
            raise ConfigError(
                "subtasks of LESS names one for each validation row",
                got=f"{len(self.subtasks)} names, {len(validation)} rows",
            )
        return list(map(str, self.subtasks))


def _tokens(rows: Sequence[Mapping[str, Any]]) -> Array:
    return np.asarray([response_tokens(row) for row in rows], np.int64)


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


def _write_influence(
    policy: LESS, stage: PolicyStage, header: TableHeader, subtasks: Sequence[str], file: Path
) -> None:
    """Warm-up, then at each of its checkpoints the rows a part at a time, by all processes."""
    rank, world = launch_place()
    warmup = replace(policy.warmup, seed=policy.settings.seed)
    folder = file.with_suffix(".epochs")
    folder.mkdir(parents=True, exist_ok=True)
    count = len(stage.rows)
    parts = {
        f"rows-{epoch}-{first:08d}": (epoch, range(first, min(first + _ROWS, count)))
        for epoch in range(warmup.epochs)
        for first in range(0, count, _ROWS)
    }
    with adapted(stage.model, warmup) as model:
        if rank:
            wait_for([folder / f"epoch-{epoch}.safetensors" for epoch in range(warmup.epochs)])
        own = stage if rank == 0 else replace(stage, progress=False)
        checkpoints = warm_up(own, model, warmup, folder, header.to_json())

        @lru_cache(maxsize=1)  # parts of one checkpoint follow each other
        def gradients_at(epoch: int) -> tuple[_Gradients, Tensor]:
            gradients = _Gradients(stage, model, checkpoints[epoch], policy)
            return gradients, gradients.directions(subtasks)

        def write(name: str, part: Path, report: Report) -> None:
            epoch, chosen = parts[name]
            gradients, directions = gradients_at(epoch)
            scores = gradients.scored([stage.rows[i] for i in chosen], directions)
            write_tensors(part, {"scores": scores}, {"header": header.to_json()})
            report(len(chosen))

        def join(files: Sequence[Path]) -> None:
            rates = np.asarray([checkpoint.rate for checkpoint in checkpoints])
            each = len(files) // len(rates)
            scores = torch.zeros((), dtype=torch.float64)
            for epoch, rate in enumerate(rates / rates.sum()):
                own_files = files[epoch * each : (epoch + 1) * each]
                of_epoch = torch.cat([_scores_in(path, header) for path in own_files])
                scores = scores + float(rate) * of_epoch.double()
            write_tensors(file, {"scores": scores}, {"header": header.to_json()})

        sizes = {name: len(chosen) for name, (_, chosen) in parts.items()}
        shared_pass(stage, file, sizes, write, join, label="Gradients of the training rows")
    if world == 1:  # another process may still be reading
        shutil.rmtree(folder, ignore_errors=True)


def _scores_in(path: Path, expected: TableHeader) -> Tensor:
    """Scores of a file.

    Raises:
        DataError: unreadable, or made for something else (named).
    """
    tensors, facts = read_tensors(path)
    try:
        header = TableHeader.from_json(facts["header"])
    except (KeyError, ValueError, TypeError) as problem:
        raise DataError(f"the file '{path}' holds no LESS scores", got=str(problem)) from None
    header.require(expected, f"'{path}'")
    return tensors["scores"]


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

    def directions(self, subtasks: Sequence[str]) -> Tensor:
        """(subtasks, d) what a row's normalised update is multiplied with.

        Raises:
            DataError: a validation row without a gradient.
        """
        projected = self.projected(self.stage.validation, self.plain)
        empty = projected.norm(dim=-1) == 0
        if bool(empty.any()):
            raise DataError(
                "a validation row has no gradient",
                got=f"row {int(empty.nonzero()[0])}",
                why="it has no response token, or the adapters do not reach its loss",
                remedy="leave it out",
            )
        names = list(dict.fromkeys(subtasks))
        subtask = torch.tensor([names.index(name) for name in subtasks])
        each = _normal(projected) if self.policy.aggregate == "mean_of_cosines" else projected
        means = torch.stack([each[subtask == s].mean(0) for s in range(len(names))])
        return means if self.policy.aggregate == "mean_of_cosines" else _normal(means)

    def scored(self, rows: Sequence[Mapping[str, Any]], directions: Tensor) -> Tensor:
        """(rows, subtasks); -inf for a row without a response token."""
        scores = torch.full((len(rows), len(directions)), -math.inf)
        kept = [i for i, n in enumerate(_tokens(rows)) if n]
        if kept:
            updates = self.projected([rows[i] for i in kept], self.adam)
            scores[kept] = (_normal(updates) @ directions.T).cpu()
        return scores

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

    def projected(
        self, rows: Sequence[Mapping[str, Any]], take: Callable[[Mapping[str, Any]], Tensor]
    ) -> Tensor:
        """(rows, d), as many rows at a time as memory allows: they share the cost of the signs."""
        size, seed = max(1, _WORKSPACE // max(1, len(self.first))), self.policy.settings.seed
        stacks = (
            torch.stack([take(row) for row in rows[first : first + size]])
            for first in range(0, len(rows), size)
        )
        return torch.cat([project(stack, self.policy.dimension, seed=seed) for stack in stacks])


@full_precision
@torch.no_grad()
def project(
    vectors: Float[Tensor, "n D"], dimension: int | None, *, seed: int = 0
) -> Float[Tensor, "n d"]:
    """Random projection of each row to d numbers, in float32; the signs are no matrix in memory.

        y = R^T x / sqrt(d),   R (D, d) of independent +-1        E <R^T a, R^T b> / d = <a, b>

    The same seed gives the same signs on the same kind of device; the generators of CPU and CUDA
    differ. Several vectors at a time share the cost of making the signs.

    Args:
        vectors: x.
        dimension: d; None, or one that is not below D, for no projection (y = x).
        seed: of the signs.

    Exactness: inner products are unbiased, with variance below 2 |a|^2 |b|^2 / d.
    Source: TRAK, LESS (d = 8192, seed 0).
    """
    if dimension is None or dimension >= vectors.shape[-1]:
        return vectors.float()
    generator = torch.Generator(vectors.device)
    projected = torch.zeros(len(vectors), dimension, device=vectors.device)
    for block, part in enumerate(vectors.split(_BLOCK, dim=-1)):
        generator.manual_seed((seed * _GOLDEN + block) % 2**63)
        size = (part.shape[1], -(-dimension // 8))  # eight signs to a random byte
        drawn = torch.randint(
            0, 256, size, dtype=torch.uint8, device=part.device, generator=generator
        )
        bits = drawn.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=part.device) & 1
        signs = bits.flatten(1)[:, :dimension].float().mul_(2).sub_(1)
        projected += part.float() @ signs
    return projected / math.sqrt(dimension)
