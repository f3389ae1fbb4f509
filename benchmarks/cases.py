"""The measurements of contraction, scoring, steps and memory. Each yields rows.

A row is {name, size, ours, other, ratio, low, high, floor, note} and, where they mean something,
``flops`` and ``flops_other`` (counted), ``tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from alphatoken import Scorer, ScorerConfig
from alphatoken.diagnose.cost import flops
from alphatoken.estimate.contraction import contract, outer_sum
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import find_adapter
from benchmarks.floors import Shape
from benchmarks.gram import contract_gram, gram_flops, projected_flops
from benchmarks.measure import Run, alternate
from benchmarks.models import DEEP, TINY, Size
from benchmarks.peak import LAYERS, fresh_peak, observed_step, plain_step, scorer_for

Row = dict[str, Any]


# --- one contraction -----------------------------------------------------------------------------


def projected_vs_gram(run: Run) -> Iterator[Row]:
    """The two routes of one contraction at d = 4096 and 16,384 validation tokens."""
    width, tokens, count = (64, 32, 256) if run.quick else (4096, 512, 16384)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, width, generator=generator).to(run.device)

    delta, x = random(1, tokens), random(1, tokens)
    delta_v, x_v = random(count), random(count)
    sizes = tokens, count, width, width
    m = outer_sum(delta_v[None], x_v[None])

    def at_hand() -> Any:
        return contract(delta, x, m)

    def built() -> Any:
        return contract(delta, x, outer_sum(delta_v[None], x_v[None]))

    def gram() -> Any:
        return contract_gram(delta, x, delta_v, x_v)

    difference = float((at_hand() - gram()).norm() / gram().norm())
    size = f"d={width}, N={tokens}, N_v={count}"
    contraction = 2 * tokens * width**2
    for name, ours, work, pairs, which in (
        ("projected_vs_gram", at_hand, contraction, 7, "G at hand"),
        ("projected_vs_gram_built", built, projected_flops(*sizes), 2, "G built anew"),
    ):
        yield {
            "name": name,
            "size": f"{size}, {which}",
            **alternate(ours, gram, repeats=run.pairs(pairs)),
            "floor": work / gram_flops(*sizes),
            "flops": work,
            "flops_other": gram_flops(*sizes),
            "tokens": tokens,
            "validation_tokens": count,
            "note": f"{which}; floor: FLOP ratio; both differ by {difference:.0e} of their norm",
        }


# --- label values --------------------------------------------------------------------------------


def label_vs_step(run: Run) -> Iterator[Row]:
    """All label values, every layer scored and G built, against one plain training step."""
    size = TINY if run.quick else DEEP.on(run.device)
    model, batch = size.model(run.device), size.batch(run.device)
    config = ScorerConfig(estimator="label", layers="all")
    scorer = Scorer(model, size.batch(run.device, seed=1), None, config)
    scorer.score(batch)  # builds G
    ours, other = partial(scorer.score, batch), partial(plain_step, model, batch)
    counted = {"flops": flops(ours), "flops_other": flops(other)}
    shape = size.shape(model)
    yield {
        "name": "label_vs_step",
        "size": f"K=all, {size.text}",
        **alternate(ours, other, repeats=run.pairs(5), warm=False),
        "floor": shape.dual_forward(size.depth) / shape.step,
        **counted,
        "tokens": shape.tokens,
        "note": f"FLOPs counted: {counted['flops'] / counted['flops_other']:.2f}x; floor: one dual "
        "forward; G built beforehand",
    }


def label_vs_per_token(run: Run) -> Iterator[Row]:
    """All T label values in one dual forward, against one backward a token."""
    size = TINY if run.quick else Size(256, 4)
    model = size.model(run.device).eval()
    batch = size.batch(run.device)
    scorer = Scorer(model, size.batch(run.device, seed=1), None, ScorerConfig(estimator="label"))
    adapter, direction = find_adapter(model), scorer.direction.total()
    checked = read_batch(batch)
    ours = partial(label_values, adapter, checked, direction, first=scorer.scope.first)
    other = partial(_per_token, adapter, checked, direction)
    reference = other()
    error = float((ours()[checked.mask] - reference).abs().max() / reference.abs().max())
    tokens = checked.response_tokens
    shape = size.shape(model)
    backward = shape.partial_backward(LAYERS) + shape.contraction(LAYERS)
    yield {
        "name": "label_vs_per_token",
        "size": f"K={LAYERS}, {size.text}, T={tokens} of them valued",
        **alternate(ours, other, repeats=run.pairs(5), warm=False),
        "floor": shape.dual_forward(LAYERS) / (shape.forward + tokens * backward),
        "target": 8 / tokens,
        "tokens": tokens,
        "note": f"largest difference {error:.0e} of the largest value; floor: FLOPs of one dual "
        "forward over those of T backward passes",
    }


def _per_token(adapter: Any, batch: Any, direction: Any) -> torch.Tensor:
    """<grad l_k, M> for each response token, by one backward each through the scored layers."""
    named = dict(adapter.model.named_parameters())
    parameters = [named[name] for name in direction]
    losses = token_losses(adapter.forward(batch.inputs), batch.labels)[batch.mask]
    values = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        terms = zip(gradients, direction.values(), strict=True)
        values.append(sum((g * m).sum() for g, m in terms))
    return torch.stack(values).detach()


# --- scoring in the training step ----------------------------------------------------------------


def score_overhead(run: Run) -> Iterator[Row]:
    """A training step with observed scoring at K = 3 against the plain step."""
    size = TINY if run.quick else DEEP.on(run.device)
    model = size.model(run.device)
    for name, retention in (("score_overhead_k3", False), ("score_overhead_k3_fisher", True)):
        scorer = scorer_for(model, size, run.device, retention=retention)
        components = not retention
        batch = size.batch(run.device)
        # Builds G and proves coverage, which both timed sides leave out.
        scorer.score(batch, components=components)
        ours = partial(observed_step, scorer, model, batch, components=components)
        other = partial(plain_step, model, batch)
        counted = {"flops": flops(ours), "flops_other": flops(other)}
        shape, layers = size.shape(model), len(scorer.scope.layers)
        sides = "G and V, total alone" if retention else "G, with components"
        yield {
            "name": name,
            "size": f"alphatoken, K={LAYERS}, {sides}; {size.text}",
            **alternate(ours, other, repeats=run.pairs(7), warm=False),
            "floor": 1 + scoring_floor(shape, layers, "alphatoken") / shape.step,
            **counted,
            "tokens": shape.tokens,
            "note": f"FLOPs counted: {counted['flops'] / counted['flops_other']:.3f}x; "
            "validation side left out",
        }


def scoring_floor(shape: Shape, layers: int, estimator: str) -> int:
    """FLOPs of scoring beside the step's own, the errors below the head being the step's.

    Captured: partial backward and one contraction a linear. Label: what tangents add to a forward,
    and the scored layers' own forward, which the observed one does not share.
    """
    if estimator != "label":
        return shape.partial_backward(layers, head=False) + shape.contraction(layers)
    tangents = shape.dual_forward(layers) - shape.forward - shape.head
    return tangents + layers * (2 * shape.tokens * shape.block + shape.attention)


# --- memory --------------------------------------------------------------------------------------


def score_peak_memory(run: Run) -> Iterator[Row]:
    """Peak memory of fresh processes: training steps with scoring at K = 3, and without."""
    size = TINY if run.quick else DEEP.on(run.device)
    shape = size.shape(replace(size, depth=1).model())  # a layer's widths are all that is asked
    bare = fresh_peak("import", size, run.device)
    plain = fresh_peak("step", size, run.device)
    for name, what in (
        ("score_peak_memory", "step_alphatoken"),
        ("score_peak_memory_fisher", "step_fisher"),
    ):
        ours = fresh_peak(what, size, run.device)
        # G may go before the step's own peak; Fisher and reference weights stay over the run.
        held = 2 * 4 * min(LAYERS, size.depth) * shape.block / 2**20
        above = (ours - bare) / (plain - bare)
        sides = {
            "step_alphatoken": "G, with components",
            "step_fisher": "G and V, total alone",
        }[what]
        yield {
            "name": name,
            "size": f"alphatoken, K={LAYERS}, {sides}; {size.text}",
            "ours": ours,
            "other": plain,
            "ratio": ours / plain,
            "floor": 1 + held / plain if what == "step_fisher" else 1.0,
            "unit": "MiB",
            "note": f"MiB of the whole process, G built at every step; {above:.2f}x above the bare "
            f"process ({bare:.0f} MiB)",
        }
