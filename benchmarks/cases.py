"""The measurements of contraction, scoring, steps, memory and growth with T. Each yields rows.

A row is {name, size, ours, other, ratio, low, high, floor, note} and, where they mean something,
``flops`` and ``flops_other`` (counted), ``tokens``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from scipy import stats

from alphatoken import Scorer, ScorerConfig
from alphatoken.diagnose.estimators import flops
from alphatoken.direction.contraction import contract, outer_sum
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import (
    AttentionCall,
    AttentionOverride,
    NativeAttention,
    find_adapter,
)
from benchmarks.floors import Shape
from benchmarks.gram import contract_gram, gram_flops, projected_flops
from benchmarks.measure import Run, alternate, timed, wait
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
        resident = 2 * 4 * min(LAYERS, size.depth) * shape.block / 2**20
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
            "floor": 1 + resident / plain if what == "step_fisher" else 1.0,
            "unit": "MiB",
            "note": f"MiB of the whole process, G built at every step; {above:.2f}x above the bare "
            f"process ({bare:.0f} MiB)",
        }


# --- growth with T --------------------------------------------------------------------------------


class AttentionClock:
    """Seconds spent in attention calls and their backward, on one adapter.

    Every attention call of the model is quadratic in T, whatever is done with its result. Its time
    is measured in the same runs and taken off: each call is timed where the adapter hands it to the
    scorer, and its backward between the arrival of the error at its output and the first gradient
    that leaves it for query, key or value. All layers are scored, so no call escapes. What stays is
    the scorer's own work, Value-Propagation's band included, and the rest of the model.
    """

    def __init__(self, adapter: Any) -> None:
        self.seconds = 0.0
        self._since: float | None = None
        self._original = adapter.override_attention
        adapter.override_attention = self._override

    def reset(self) -> None:
        """Begin at zero."""
        self.seconds, self._since = 0.0, None

    @contextmanager
    def _override(self, modules: Sequence[Any], override: AttentionOverride) -> Iterator[None]:
        with self._original(modules, partial(self._call, override)):
            yield

    def _call(
        self, override: AttentionOverride, call: AttentionCall, native: NativeAttention
    ) -> torch.Tensor:
        self._start()
        output = override(call, native)
        self._stop()
        if output.requires_grad:
            output.register_hook(self._start)
            for tensor in (call.query, call.key, call.value):
                if tensor.requires_grad:
                    tensor.register_hook(self._stop)
        return output

    def _start(self, *_: Any) -> None:
        wait()
        self._since = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        if self._since is None:  # the second and third gradient that leave one call
            return
        wait()
        self.seconds += time.perf_counter() - self._since
        self._since = None


def fitted_exponent(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Slope of log seconds over log length by least squares, and its 95 % interval.

    With two points there is no residual, and no interval: both ends are the slope.
    """
    x, y = [math.log(n) for n in lengths], [math.log(s) for s in seconds]
    fit = stats.linregress(x, y)
    if len(x) < 3:
        return float(fit.slope), float(fit.slope), float(fit.slope)
    half = float(stats.t.ppf(0.975, len(x) - 2) * fit.stderr)
    return float(fit.slope), float(fit.slope) - half, float(fit.slope) + half


def _size(run: Run, length: int) -> Size:
    return Size(32, 3, 64, 4, length=length) if run.quick else Size(256, 3, 512, length=length)


def time_exponent(run: Run) -> Iterator[Row]:
    """Time of scoring over T up to 8,192, attention apart: the fitted exponent."""
    lengths = (64, 128) if run.quick else (1024, 2048, 4096, 8192)
    for name, estimator in (("time_exponent", "alphatoken"), ("time_exponent_label", "label")):
        subjects = [_subject(run, length, estimator) for length in lengths]
        for scorer, batch, _ in subjects:
            scorer.score(batch)  # builds G, and warms up
        samples: list[dict[str, float]] = []
        for _ in range(run.pairs(4)):  # lengths in turn: a slow moment meets all of them
            for length, (scorer, batch, clock) in zip(lengths, subjects, strict=True):
                clock.reset()
                whole = timed(partial(scorer.score, batch))
                samples.append({"length": length, "seconds": whole, "attention": clock.seconds})
        yield {"name": name, **_exponent_row(estimator, samples)}
        shapes = [_size(run, length).shape(subjects[0][0].adapter.model) for length in lengths]
        yield {"name": f"{name}_whole", **_whole_exponent_row(estimator, samples, shapes)}


def _subject(run: Run, length: int, estimator: str) -> tuple[Scorer, Any, AttentionClock]:
    size = _size(run, length)
    model = size.model(run.device)
    adapter = find_adapter(model)
    clock = AttentionClock(adapter)
    config = ScorerConfig(estimator=estimator, layers="all")
    validation = _size(run, 64).batch(run.device, seed=1)
    scorer = Scorer(model, validation, None, config, adapter=adapter)
    return scorer, size.batch(run.device), clock


def _exponent_row(estimator: str, samples: list[dict[str, float]]) -> Row:
    lengths = [int(s["length"]) for s in samples]
    apart = [s["seconds"] - s["attention"] for s in samples]
    slope, low, high = fitted_exponent(lengths, apart)
    longest = max(lengths)
    share = [s["attention"] / s["seconds"] for s in samples if s["length"] == longest]
    return {
        "size": f"{estimator}, d=256, 3 layers, K=all, T={min(lengths)} to {longest}",
        "ours": slope,
        "other": 1.0,
        "ratio": slope,
        "low": low,
        "high": high,
        "floor": 1.0,
        "unit": "exponent",
        "samples": samples,
        "note": f"least squares on {len(samples)} runs, 95 % interval; attention, which is left "
        f"out, takes {sum(share) / len(share):.0%} of the time at T={longest}",
    }


def _whole_exponent_row(
    estimator: str, samples: list[dict[str, float]], shapes: Sequence[Shape]
) -> Row:
    """Attention in: the exponent of time beside that of the FLOPs, which may not fall behind it."""
    lengths, works = [s.length for s in shapes], list[float]()
    for shape in shapes:
        scoring = scoring_floor(shape, shape.depth, estimator)
        works.append(float(shape.forward + scoring))
    floor = fitted_exponent(lengths, works)[0]
    slope, low, high = fitted_exponent(
        [int(s["length"]) for s in samples], [s["seconds"] for s in samples]
    )
    return {
        "size": f"{estimator}, d=256, 3 layers, K=all, T={min(lengths)} to {max(lengths)}",
        "ours": slope,
        "other": floor,
        "ratio": slope,
        "low": low,
        "high": high,
        "floor": floor,
        "target": floor + 0.1,
        "unit": "exponent",
        "note": f"as above, with attention; FLOPs grow as T to the {floor:.2f}",
    }


def score_long(run: Run) -> Iterator[Row]:
    """Values of K = 3 of 4 layers at T = 4,096, attention included, against a training step."""
    length = 128 if run.quick else 4096
    size = Size(128, 4, 512, heads=8, rows=1, length=length)
    model, batch = size.model(run.device), size.batch(run.device)
    shape = size.shape(model)
    config = ScorerConfig(layers=LAYERS)
    scorer = Scorer(model, _size(run, 64).batch(run.device, seed=1), None, config)
    scorer.score(batch)  # builds G
    yield {
        "name": "score_long",
        "size": f"alphatoken, K={LAYERS}; {size.text}",
        **alternate(
            partial(scorer.score, batch), partial(plain_step, model, batch), repeats=run.pairs(9)
        ),
        "floor": (shape.forward + scoring_floor(shape, LAYERS, "alphatoken")) / shape.step,
        "tokens": size.rows * size.length,
        "note": "G built beforehand; forward and backward of all parameters, without an optimizer",
    }


def time_against_validation(run: Run) -> Iterator[Row]:
    """Scoring against 16 times the validation rows, G built: as fast as against one."""
    size = _size(run, 64 if run.quick else 1024)
    model, batch = size.model(run.device), size.batch(run.device)
    config = ScorerConfig(layers="all")
    one, many = (
        Scorer(model, _size(run, 64).batch(run.device, rows=rows, seed=1), None, config)
        for rows in (4, 64)
    )
    one.score(batch), many.score(batch)
    yield {
        "name": "time_against_validation",
        "size": f"alphatoken, K=all; {size.text}; 64 against 4 validation rows of 64 tokens",
        **alternate(partial(many.score, batch), partial(one.score, batch), repeats=run.pairs(9)),
        "floor": 1.0,
        "tokens": size.rows * size.length,
        "note": "G built beforehand on both sides",
    }
