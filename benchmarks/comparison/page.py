"""Tables of docs/comparison.md and docs/results.md, from the JSON files of their runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scipy.stats import t as student

from benchmarks.pages import DOCS, number, table

__all__ = ["comparison", "results"]

Runs = Sequence[Mapping[str, Any]]

_KINDS = ("target_loss", "retention_loss")


def comparison(*tasks: str) -> str:
    """Methods and modes of some tasks: both losses, mean and standard deviation over seeds."""
    runs = [r for r in _read("comparison") if r["task"] in tasks]
    rows = []
    for method, mode in dict.fromkeys((r["policy"], r["mode"]) for r in runs):
        own = [r for r in runs if (r["policy"], r["mode"]) == (method, mode)]
        found = [[r for r in own if r["task"] == task] for task in tasks]
        share = next(_share(part) for part in found if part)
        cells = [_mean(r[kind] for r in part) for part in found for kind in _KINDS]
        rows.append((f"`{method}`", "–" if method == "start" else mode, share, *cells))
    heads = [f"{task}: {kind}" for task in tasks for kind in ("target", "retention")]
    return table(("method", "mode", "tokens", *heads), rows)


def _share(runs: Runs) -> str:
    kept = statistics.fmean(r["kept_tokens"] for r in runs)
    seen = statistics.fmean(r["response_tokens"] for r in runs)
    return f"{kept / seen:.0%}" if seen else "–"


def _mean(values: Iterable[float]) -> str:
    found = list(values)
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return number(statistics.fmean(found)) + spread


def results(kind: str) -> str:
    """``policies`` or ``variants``: differences to a random half, target and retention."""
    runs = _read("results")
    return _policies(runs) if kind == "policies" else _variants(runs)


_POLICIES = (("all", "none"), ("bottom", "alphatoken"), ("top", "alphatoken"), ("top", "label"))


def _policies(runs: Runs) -> str:
    rows = []
    for task, noise in dict.fromkeys((r["task"], r["noise"]) for r in runs):
        own = [r for r in runs if (r["task"], r["noise"], r["variant"]) == (task, noise, "main")]
        base = [r for r in own if r["policy"] == "random"]
        for kind in _KINDS:
            cells = [
                _beside([r for r in own if (r["policy"], r["estimator"]) == which], base, kind)
                for which in _POLICIES
            ]
            what = f"`{task}`, {noise:.0%} noise, {kind.partition('_')[0]}"
            rows.append((what, _mean(r[kind] for r in base), *cells))
    names = ("all tokens", "bottom half", "top half, `alphatoken`", "top half, `label`")
    return table(("task", "random half", *(f"{name} − random" for name in names)), sorted(rows))


def _variants(runs: Runs) -> str:
    """One seed: each variant beside a random half of the same ratio and start."""
    own = [r for r in runs if r["task"] == "sft_math" and r["policy"] == "top" and r["seed"] == 0]
    named = dict.fromkeys((r["variant"], r["estimator"]) for r in own)
    rows = []
    for variant, estimator in named:
        cells = []
        for noise in (0.0, 0.3):
            random = {
                r["variant"]: r
                for r in runs
                if (r["task"], r["noise"], r["policy"], r["seed"])
                == ("sft_math", noise, "random", 0)
            }
            part = [
                r
                for r in own
                if (r["variant"], r["estimator"], r["noise"]) == (variant, estimator, noise)
            ]
            base = [random.get(variant, random["main"])]
            cells += [_beside(part, base, kind) for kind in _KINDS]
        rows.append((f"`{estimator}`, {variant}", *cells))
    heads = [f"{rows}: {kind}" for rows in ("clean", "noisy") for kind in ("target", "retention")]
    return table(("top half − random half", *heads), rows)


def _beside(runs: Runs, base: Runs, kind: str) -> str:
    """Mean difference by seed and half its 95 % t-interval; bold where that leaves 0 out."""
    by_seed = {r["seed"]: r[kind] for r in base}
    gaps = [r[kind] - by_seed[r["seed"]] for r in runs if r["seed"] in by_seed]
    if not gaps:
        return "–"
    mean = statistics.fmean(gaps)
    if len(gaps) < 2:
        return f"{mean:+.2f}"
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    half = float(student.ppf(0.975, len(gaps) - 1)) * error
    said = f"{mean:+.2f} ± {half:.2f}"
    return f"**{said}**" if abs(mean) > half else said


def _read(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    return found
