"""How time grows with T, attention apart, and with the size of the validation set.

Every attention call of the model is quadratic in T, whatever is done with its result. Its time is
measured in the same runs and taken off: each call is timed where the adapter hands it to the
scorer, and its backward between the arrival of the error at its output and the first gradient that
leaves it for query, key or value. All layers are scored, so no call escapes. What stays is the
scorer's own work, Value-Propagation's band included, and the rest of the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from scipy import stats

from alphatoken import Scorer, ScorerConfig
from alphatoken.model.protocol import (
    AttentionCall,
    AttentionOverride,
    NativeAttention,
    find_adapter,
)
from benchmarks.machine import timed, wait
from benchmarks.measure import Run, alternate
from benchmarks.models import Size

Row = dict[str, Any]


class AttentionClock:
    """Seconds spent in attention calls and their backward, on one adapter."""

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
    whole = fitted_exponent(lengths, [s["seconds"] for s in samples])[0]
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
        "note": f"least squares on {len(samples)} runs, 95 % interval; with attention "
        f"{whole:.2f}, which takes {sum(share) / len(share):.0%} of the time at T={longest}",
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
