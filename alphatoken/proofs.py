"""Proofs that run on the user's own model before any value is returned.

*Coverage*: the captured uses of the scored weights explain autograd's gradient. *Isolation*: the
self-only backward leaks nothing to other positions. *Documents*: packed neighbours do not see each
other. Each raises, naming the place and an estimator or input that does work.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alphatoken.adapter import DecoderAdapter
from alphatoken.batch import LabelledBatch
from alphatoken.capture import Recorder, accumulate_errors, evaluation_mode
from alphatoken.contraction import outer_sum
from alphatoken.errors import CoverageError, ModelError, UnsupportedError
from alphatoken.objective import gradient_of

__all__ = [
    "captured_gradients",
    "prove_coverage",
    "prove_documents",
    "prove_isolation",
    "require_self_rule",
]


def require_self_rule(recorder: Recorder, estimator: str) -> None:
    """Raise unless every layer from the first scored one on has a self-only backward.

    Raises:
        UnsupportedError: a mixer without softmax attention, or an attention module whose call was
            not seen; active attention dropout, which the recomputed weights would not contain.
    """
    scope = recorder.scope
    remedy = "estimator='label' (exact on every layer type) or 'path'"
    if scope.mixers:
        name, kind = next(iter(scope.mixers.items()))
        raise UnsupportedError(
            f"'{estimator}' is not defined on a layer without softmax attention",
            got=f"{name} ({kind})",
            why="its self-only backward has no rule here, and an approximation would be silent",
            remedy=remedy,
        )
    if not recorder.attention_seen:
        raise UnsupportedError(
            f"'{estimator}' saw no attention call in the scored layers",
            why="the model's attention does not go through the adapter's dispatch",
            remedy=remedy + ", or another attention implementation",
        )
    dropped = [use for use in recorder.attentions if use.dropout > 0]
    if dropped:
        raise UnsupportedError(
            f"'{estimator}' cannot score a pass with attention dropout",
            got=f"p={dropped[0].dropout}",
            why="the kernel's dropout mask is not known to the recomputed attention weights",
            remedy="set the attention dropout to 0, use scorer.score (dropout off), or 'path'",
        )


def prove_isolation(recorder: Recorder, losses: Tensor, mask: Tensor, estimator: str) -> bool:
    """Prove that the self-only backward leaks no error to other positions.

    Of each row, the last token's loss is sent back alone; every captured error away from its
    position must be exactly zero.

    Returns:
        False if nothing was proved: each of those tokens is predicted from the first position, and
        there is no other one to leak to.

    Raises:
        UnsupportedError: a module mixes positions outside the attention that was switched.
    """
    rows = mask.any(-1).nonzero().squeeze(-1)
    last = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)[rows]
    if not bool((last > 1).any()):
        return False
    with torch.enable_grad():
        loss = losses[rows, last].sum()
    errors = accumulate_errors(recorder, loss, recorder.outputs, "self")
    for use, error in zip(recorder.linears, errors, strict=True):
        if error is None:
            continue
        elsewhere = error.detach().clone()
        elsewhere[rows, last - 1] = 0
        if bool((elsewhere != 0).any()):
            raise UnsupportedError(
                f"'{estimator}' is not defined on this model: positions mix outside attention",
                got=f"the error of one token reaches other positions at {use.linear.name}",
                why="a direct value would contain part of the causal one, silently",
                remedy="estimator='label' or 'path', which are exact for every module type",
            )
    return True


_COVERAGE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_COVERAGE_TOLERANCE_HALF = 2e-2


def compare_gradients(
    captured: Mapping[str, tuple[Tensor, float]],
    expected: Mapping[str, Tensor | None],
    *,
    narrow: bool = False,
    remedy: str = "estimator='label', which follows the weight through every use",
) -> float:
    """Compare what the captured uses explain with autograd's gradient of the same loss.

    Args:
        captured: parameter name -> (sum over captured uses of delta (x) x, as stored; the sum of
            the norms of its terms). The error is relative to the latter, so that a gradient that
            cancels is no false alarm.
        expected: parameter name -> autograd's gradient (None: no path); all parameters in scope.
        narrow: autograd multiplied in 16 bits whatever the gradient's dtype says (autocast).
        remedy: what the error tells the user to do.

    Returns:
        The largest relative error (Frobenius norm).

    Raises:
        CoverageError: a parameter is used outside the captured modules; the message names it.
    """
    worst = 0.0
    for name, target in expected.items():
        found, scale = captured.get(name, (None, 0.0))
        parts = [t.double() for t in (target, found) if t is not None]
        if not parts:
            continue
        difference = parts[0] - parts[1] if len(parts) == 2 else parts[0]
        scale = max(scale, 0.0 if target is None else float(target.double().norm()))
        relative = float(difference.norm()) / scale if scale > 0 else float(difference.norm())
        dtype = torch.bfloat16 if narrow else _dtype(target)
        if not relative <= _COVERAGE_TOLERANCE.get(dtype, _COVERAGE_TOLERANCE_HALF):
            raise CoverageError(
                "a weight in scope is used in a way that was not captured",
                got=f"{name}: captured uses explain its gradient to a relative error of "
                f"{relative:.1e}",
                why="the part that passes through the other use would be missing from the values",
                remedy=remedy,
            )
        worst = max(worst, relative)
    return worst


def _dtype(gradient: Tensor | None) -> torch.dtype:
    return torch.float32 if gradient is None else gradient.dtype


def captured_gradients(
    recorder: Recorder, loss: Tensor, names: Mapping[int, str]
) -> dict[str, tuple[Tensor, float]]:
    """Weight and bias gradients that the captured uses explain: sums of delta (x) x.

    Beside each, the sum of the norms of its terms.

    Args:
        recorder: one recorded forward.
        loss: scalar loss of that forward.
        names: id of a parameter in scope -> its name; tied parameters gather in one entry.
    """
    errors = accumulate_errors(recorder, loss, recorder.outputs, "ordinary")
    found: dict[str, tuple[Tensor, float]] = {}
    for use, error in zip(recorder.linears, errors, strict=True):
        if error is None:
            continue
        gradient = outer_sum(error, use.x)
        sizes = error.to(gradient).norm(dim=-1)
        size = float((sizes * use.x.to(gradient).norm(dim=-1)).sum())
        parts = [(use.linear.weight, gradient.mT if use.linear.transposed else gradient, size)]
        if use.linear.bias is not None:
            flat = error.flatten(0, -2).to(gradient)
            parts.append((use.linear.bias, flat.sum(0), float(sizes.sum())))
        for owner, part, terms in parts:
            name = names.get(id(owner))
            if name is not None:
                before, known = found.get(name, (torch.zeros_like(part), 0.0))
                found[name] = (before + part, known + terms)
    return found


def prove_coverage(recorder: Recorder, losses: Tensor, parameters: Mapping[str, Tensor]) -> float:
    """Prove that the captured uses are all uses: sum of delta (x) x equals autograd's gradient.

    Returns:
        The largest relative error (Frobenius norm).

    Raises:
        CoverageError: a parameter is used outside the captured modules; the message names it.
    """
    with torch.enable_grad():
        loss = losses.sum()
    names = list(parameters)
    captured = captured_gradients(recorder, loss, {id(p): n for n, p in parameters.items()})
    expected = gradient_of(loss, [parameters[n] for n in names])
    narrow = any(use.s.dtype not in _COVERAGE_TOLERANCE for use in recorder.linears)
    return compare_gradients(captured, dict(zip(names, expected, strict=True)), narrow=narrow)


def prove_documents(adapter: DecoderAdapter, batch: LabelledBatch) -> None:
    """Prove that packed documents do not see each other: change the first ones, watch the last.

    Raises:
        ModelError: logits of the last document depend on the tokens before it.
    """
    starts = batch.document_starts
    assert starts is not None
    row = int(starts[:, 1:].any(-1).nonzero()[0])
    last = int(starts[row].nonzero()[-1])
    ids = batch.inputs["input_ids"].clone()
    ids[row, :last] = (ids[row, :last] == 0).to(ids)  # every token becomes another one
    with torch.no_grad(), evaluation_mode(adapter.model):
        before = adapter.forward(batch.inputs)[row, last:].float()
        after = adapter.forward({**batch.inputs, "input_ids": ids})[row, last:].float()
    if not torch.allclose(before, after, atol=1e-4 * float(before.abs().max()), rtol=0):
        raise ModelError(
            "this model lets packed documents see each other",
            got=f"row {row}: logits after token {last} change with the documents before it",
            why="values of one document would depend on its neighbours, silently",
            remedy="pass packed rows without an attention_mask, one document a row, or the "
            "boundary arguments (cu_seq_lens) that the model's kernels need",
        )
