"""A certificate on the user's own model: estimator against oracle, and against the label value.

Sampled tokens are sent back one by one through the untouched model (the oracle). What the
estimator claims to compute exactly must agree with that; what it approximates is compared and
reported. Then the values of the whole batch are ranked against the label value, over the scored
weights and over all trainable ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphatoken.adapter import DecoderAdapter
from alphatoken.batch import IGNORE, LabelledBatch, read_batch
from alphatoken.capture import evaluation_mode
from alphatoken.errors import InputError
from alphatoken.fidelity.metrics import sign_agreement, spearman, top_overlap
from alphatoken.forward_mode import label_values
from alphatoken.objective import objective_gradient
from alphatoken.oracle import gradients as gradient_oracle
from alphatoken.oracle import influence as influence_oracle
from alphatoken.precision import wide
from alphatoken.scorer import Scorer

__all__ = ["Certificate", "certify"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


@dataclass(frozen=True)
class Certificate:
    """What ``Scorer.verify`` found.

    Attributes:
        estimator: its name.
        tokens: response tokens sent through the oracle.
        batch_tokens: response tokens ranked.
        exact_part: which quantity of the estimator is exact and was compared.
        error: largest difference from the oracle, relative to the sum of absolute terms.
        tolerance: what the model's dtype allows.
        causal_error: relative distance of the causal approximation from the exact causal value
            (Euclidean norm over positions, sampled losses); None where nothing is approximated.
        spearman: rank correlation of the total with the label value, same weights, same M.
        sign_agreement: share of tokens with the same sign.
        overlap: share of the kept half in common.
        spearman_all: rank correlation of the adaptation value with the label value over all
            trainable parameters.
        overlap_all: overlap of the kept half with that.
        dtype: of the model's weights.
    """

    estimator: str
    tokens: int
    batch_tokens: int
    exact_part: str
    error: float
    tolerance: float
    causal_error: float | None
    spearman: float
    sign_agreement: float
    overlap: float
    spearman_all: float
    overlap_all: float
    dtype: str

    @property
    def passed(self) -> bool:
        """True if the exact part agrees with the oracle within the tolerance."""
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        """A short table with a verdict."""
        verdict = "agrees" if self.passed else "DOES NOT AGREE"
        lines = [
            f"Certificate for estimator '{self.estimator}' ({self.dtype})",
            f"  {self.exact_part} {verdict} with the per-token oracle on {self.tokens} tokens: "
            f"error {self.error:.1e} of the absolute terms (tolerance {self.tolerance:.0e})",
        ]
        if self.causal_error is not None:
            lines.append(
                f"  causal part: approximate, {self.causal_error:.2f} of the exact one away from it"
            )
        lines += [
            f"  against the label value, same weights ({self.batch_tokens} tokens): Spearman "
            f"{_show(self.spearman)}, sign agreement {_show(self.sign_agreement)}, "
            f"kept-half overlap {_show(self.overlap)}",
            f"  adaptation against the label value over all trainable parameters: Spearman "
            f"{_show(self.spearman_all)}, kept-half overlap {_show(self.overlap_all)}",
        ]
        return "\n".join(lines)


def _show(number: float) -> str:
    return (
        "not defined (too few tokens, or all values equal)"
        if math.isnan(number)
        else f"{number:.2f}"
    )


def certify(
    scorer: Scorer, batch: Mapping[str, Any], *, tokens: int = 8, seed: int = 0
) -> Certificate:
    """Check a scorer on ``batch``; see ``Certificate``. The model is left as found.

    Cost: one ordinary backward through the whole model per sampled token, two label passes, one
    full validation gradient.
    """
    if tokens < 1:
        raise InputError("tokens must be at least 1", got=repr(tokens))
    adapter = scorer.adapter
    checked = read_batch(batch, max_length=adapter.max_positions())
    values = scorer.score(batch)
    adaptation = values.adaptation
    assert adaptation is not None  # components are there unless they are declined
    direction = scorer.direction_for(batch).total()
    chosen = _sample(checked, tokens, seed)
    label = label_values(adapter, checked, direction, first=scorer.target.first or 0)
    causal: float | None = None
    if scorer.config.estimator == "label":
        part, error = "label value", _label_error(scorer, checked, chosen, direction, label)
    else:
        part, error, causal = _captured_error(scorer, checked, chosen, direction)
    label_all = _label_over_everything(scorer, checked)
    dtype = next(iter(scorer.parameters.values())).dtype
    return Certificate(
        estimator=scorer.config.estimator,
        tokens=int(chosen.sum()),
        batch_tokens=checked.response_tokens,
        exact_part=part,
        error=error,
        tolerance=_TOLERANCE.get(dtype, 5e-2),
        causal_error=causal,
        spearman=spearman(values.total, label, checked.mask),
        sign_agreement=sign_agreement(values.total, label, checked.mask),
        overlap=top_overlap(values.total, label.to(values.total), checked.mask),
        spearman_all=spearman(adaptation, label_all, checked.mask),
        overlap_all=top_overlap(adaptation, label_all, checked.mask),
        dtype=str(dtype).removeprefix("torch."),
    )


def _sample(batch: LabelledBatch, tokens: int, seed: int) -> Tensor:
    """(b, t) True at the sampled response tokens; its own generator."""
    candidates = batch.mask.flatten().nonzero().squeeze(-1).cpu()
    generator = torch.Generator().manual_seed(seed)
    picked = candidates[torch.randperm(len(candidates), generator=generator)[:tokens]]
    chosen = torch.zeros(batch.mask.numel(), dtype=torch.bool)
    chosen[picked] = True
    return chosen.view(batch.mask.shape).to(batch.mask.device)


def _plain_forward(adapter: DecoderAdapter) -> Any:
    """The untouched model, dropout off: nothing of the capture machinery takes part."""

    def forward(inputs: Mapping[str, Any]) -> Tensor:
        with evaluation_mode(adapter.model), torch.enable_grad():
            return adapter.forward(inputs)

    return forward


def _only(batch: LabelledBatch, chosen: Tensor) -> dict[str, Any]:
    return {**batch.inputs, "labels": batch.labels.masked_fill(~chosen, IGNORE)}


def _label_error(
    scorer: Scorer,
    batch: LabelledBatch,
    chosen: Tensor,
    direction: dict[str, Tensor],
    found: Tensor,
) -> float:
    adapter = scorer.adapter
    one = _only(batch, chosen)
    forward = _plain_forward(adapter)
    exact = gradient_oracle.label_values(adapter.model, forward, one, direction)
    scale = torch.zeros_like(exact)
    parameters = {n: p for n, p in scorer.parameters.items() if n in direction}
    picked = [(int(b), int(i)) for b, i in chosen.nonzero().tolist()]
    rows = gradient_oracle.per_token_gradients(adapter.model, forward, one, parameters, picked)
    for (b, i), gradient in zip(picked, rows, strict=True):
        for name, g in gradient.items():
            scale[b, i] += (g.double() * direction[name].double()).abs().sum().to(scale.device)
    return _worst(found.double() - exact, scale, chosen)


def _captured_error(
    scorer: Scorer, batch: LabelledBatch, chosen: Tensor, direction: dict[str, Tensor]
) -> tuple[str, float, float | None]:
    """Exact part, its error, and the distance of the causal approximation."""
    adapter = scorer.adapter
    modules = {linear.name: linear.module for linear in scorer.scope.linears}
    psi = influence_oracle.exact_influence(
        adapter.model,
        _plain_forward(adapter),
        _only(batch, chosen),
        modules,
        {**direction},
        score_bias=scorer.config.score_bias,
        transposed=[linear.name for linear in scorer.scope.linears if linear.transposed],
    )
    matrix, scale = psi.matrix, psi.absolute_scale
    columns = scorer.columns(batch, weights=chosen.to(wide(matrix.dtype)), direction=direction)
    direct, causal = columns.direct.double().cpu(), columns.causal.double().cpu()
    diagonal, column = influence_oracle.diagonal(matrix), influence_oracle.column_sums(matrix)
    if scorer.config.estimator in ("path", "paper_literal"):
        part, error = "path value", _worst(direct - column, scale.sum(1), None)
        exact_causal = None
    else:
        every = torch.diagonal(scale, dim1=1, dim2=2)
        part, error = "direct value", _worst(direct - diagonal, every, None)
        exact_causal = column - diagonal
    if exact_causal is None or scorer.config.estimator == "direct":
        return part, error, None
    norm = float(exact_causal.norm())
    away = float((causal - exact_causal).norm())
    return part, error, away / norm if norm > 0 else (0.0 if away == 0 else math.inf)


def _worst(difference: Tensor, scale: Tensor, mask: Tensor | None) -> float:
    """Largest |difference| over the largest scale; NaN stays NaN."""
    if mask is not None:
        difference, scale = difference[mask], scale[mask]
    whole = float(scale.max())
    worst = float(difference.abs().max())
    return worst / whole if whole > 0 else worst


def _label_over_everything(scorer: Scorer, batch: LabelledBatch) -> Tensor:
    adapter = scorer.adapter
    named = {n: p for n, p in adapter.model.named_parameters() if p.requires_grad}
    gradient = objective_gradient(adapter, named, scorer.validation, first=None)
    return label_values(adapter, batch, gradient, first=0)
