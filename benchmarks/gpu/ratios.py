"""Steps of models of real shape with and without values: time, floors and peak memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from alphatoken import Scorer, ScorerConfig
from alphatoken.support.machine import timed
from benchmarks.cases import overhead_row, scoring_floor
from benchmarks.measure import Run
from benchmarks.models import Size
from benchmarks.peak import LAYERS, observed_step, plain_step

__all__ = ["SHAPES", "TARGETS", "contraction", "ratios", "rows_of_ratios"]

Row = dict[str, Any]
SHAPES = {
    "3B, vocabulary of 128k": Size(
        3072, 28, 128256, heads=24, kv_heads=8, ffn=8192, tied=True, length=4096
    ),
    "8B, vocabulary of 128k": Size(4096, 32, 128256, heads=32, kv_heads=8, ffn=14336, length=4096),
    "4B, vocabulary of 262k": Size(
        2560, 34, 262144, heads=20, kv_heads=4, ffn=10240, tied=True, length=4096
    ),
}
"""Layers, widths and vocabularies of Llama-3.2-3B, Llama-3.1-8B and (nearly) Gemma-3-4B."""

TINY = {
    "tiny, tied": Size(32, 5, 64, heads=4, kv_heads=2, ffn=64, tied=True, length=48),
    "tiny": Size(48, 4, 96, heads=4, kv_heads=2, ffn=96, length=48),
}
TARGETS = {"ratio": 1.12, "over_floor": 1.5, "memory_ratio": 1.15}


def ratios(run: Run) -> Iterator[Row]:
    """A bf16 step with the paper's values at K = 3, and with label values, over the plain step."""
    best = product_speed(run, torch.bfloat16)
    for name, size in (TINY if run.quick else SHAPES).items():
        model, size = _fitting(run, size)
        for estimator in ("alphatoken", "label"):
            row = {"shape": name, "estimator": estimator}
            try:
                row |= _measured(run, model, size, estimator, best)
            except torch.OutOfMemoryError as error:
                row |= {"why": str(error).splitlines()[0][:120], "ok": None}
            yield row
            model.zero_grad(set_to_none=True)
            _freed()
        del model
        _freed()


def rows_of_ratios(run: Run) -> int:
    """Rows that ``ratios`` gives."""
    return 2 * len(TINY if run.quick else SHAPES)


def _fitting(run: Run, size: Size) -> tuple[Any, Size]:
    """The model in bf16, of as many layers as leave room for a step (half of them, and so on)."""
    while True:
        model = None
        try:
            with _default_dtype(torch.bfloat16):
                model = size.model(run.device)
            plain_step(model, size.batch(run.device))
            return model, size
        except torch.OutOfMemoryError:
            if size.depth <= 2 * LAYERS:
                raise
        model = None  # here the error, and with it the tensors of its frames, is gone
        _freed()
        size = replace(size, depth=max(2 * LAYERS, size.depth // 2))


def _measured(run: Run, model: Any, size: Size, estimator: str, best: float) -> Row:
    batch = size.batch(run.device)
    model.zero_grad(set_to_none=True)
    plain = _peak(run, partial(plain_step, model, batch))  # while no direction is held
    scorer = Scorer(
        model, size.batch(run.device, seed=1), None,
        ScorerConfig(estimator=estimator, layers=LAYERS),
    )  # fmt: skip
    row = overhead_row(
        run, "gpu", (model, size, f"{estimator}, K={LAYERS}"), scorer, components=False, pairs=5
    )
    shape = size.shape(model)
    least = (shape.step + scoring_floor(shape, LAYERS, estimator)) / best

    def whole() -> None:
        scorer.refresh()  # the validation side belongs to the peak of a step
        observed_step(scorer, model, batch, components=False)

    model.zero_grad(set_to_none=True)
    valued = _peak(run, whole)
    found = {
        "size": row["size"],
        "seconds": row["ours"],
        "plain_seconds": row["other"],
        "ratio": row["ratio"],
        "low": row["low"],
        "high": row["high"],
        "floor": row["floor"],
        "over_floor": row["ours"] / least,
        "plain_over_floor": row["other"] / (shape.step / best),
        "memory_gib": None if valued is None else valued / 2**30,
        "memory_ratio": None if valued is None or plain is None else valued / plain,
    }
    met = {
        key: None if found[key] is None or run.quick else found[key] <= limit
        for key, limit in TARGETS.items()
    }
    return {**found, "met": met}


def contraction(run: Run) -> Iterator[Row]:
    """Routes of one contraction of 16-bit inputs with a float32 direction: seconds and error."""
    tokens, width = (64, 32) if run.quick else (4096, 4096)
    draw = torch.Generator().manual_seed(0)
    x, delta, m = (
        torch.randn(rows, width, generator=draw).to(run.device) for rows in (tokens, tokens, width)
    )
    x, delta = x.bfloat16(), delta.bfloat16()
    exact = (delta.double() * (x.double() @ m.double().mT)).sum(-1)
    for name, route in _routes(x, delta, m).items():
        try:
            found = route()
        except Exception as error:  # no such product on this device, or no compiler
            yield {"route": name, "seconds": None, "why": str(error).splitlines()[0][:120]}
            continue
        seconds = sorted(timed(route) for _ in range(3 if run.quick else 9))
        error = float((found.double() - exact).norm() / exact.norm())
        yield {"route": name, "seconds": seconds[len(seconds) // 2], "error": error}


def _routes(x: Any, delta: Any, m: Any) -> dict[str, Callable[[], Any]]:
    high = m.bfloat16()
    low = (m - high.float()).bfloat16()

    def wide() -> Any:
        return (delta.float() * (x.float() @ m.mT)).sum(-1)

    def tf32() -> Any:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return wide()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def narrow() -> Any:
        return (delta.float() * torch.mm(x, high.mT, out_dtype=torch.float32)).sum(-1)

    def split() -> Any:
        projected = torch.mm(x, high.mT, out_dtype=torch.float32)
        projected += torch.mm(x, low.mT, out_dtype=torch.float32)
        return (delta.float() * projected).sum(-1)

    @cache
    def made() -> Any:
        return torch.compile(wide, dynamic=False)

    def compiled() -> Any:
        return made()()

    return {
        "float32 products (the library's)": wide,
        "tf32 products": tf32,
        "direction rounded to bf16": narrow,
        "direction as the sum of two bf16": split,
        "float32 products, compiled": compiled,
    }


def product_speed(run: Run, dtype: torch.dtype) -> float:
    """FLOPs a second of one large product, the fastest of several."""
    side = 256 if run.quick else 8192
    a, b = (torch.randn(side, side, device=run.device, dtype=dtype) for _ in range(2))
    a @ b
    return 2 * side**3 / min(timed(lambda: a @ b) for _ in range(6))


def _peak(run: Run, work: Callable[[], None]) -> float | None:
    """Bytes that the allocator handed out at most; None on a CPU, which counts none."""
    if run.device.type != "cuda":
        work()
        return None
    _freed()
    torch.cuda.reset_peak_memory_stats(run.device)
    work()
    return float(torch.cuda.max_memory_allocated(run.device))


def _freed() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
