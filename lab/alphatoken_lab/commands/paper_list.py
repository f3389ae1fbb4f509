"""``alphatoken-lab paper --list``: every table and figure, what it needs, what it costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from alphatoken_lab.commands.paper_plan import Work, planned, require_names, seconds_of
from alphatoken_lab.commands.paper_run import shown_time
from alphatoken_lab.paper.exhibits import LAPTOP, SCALES, Exhibit, every

__all__ = ["COSTS", "cost_of", "every_cost", "lines"]

COSTS = Path(str(files("alphatoken_lab"))) / "paper" / "costs.json"
"""Label -> scale -> what :func:`cost_of` counts, as `python -m benchmarks.paper costs` writes it:
counting all of them anew takes minutes, since each backbone's shape is built."""

_HEAD = """\
Each by its label: alphatoken-lab paper NAME [--scale full|laptop]. Costs are counted FLOPs, every
row as long as the longest, over 40 % of the peak of four A100, or one thread of a CPU; static
passes, the Fisher, measuring and judges come on top. Tables share cells: the second is cheaper."""


def lines() -> Iterator[str]:
    """What is printed."""
    yield _HEAD
    known: dict[str, Any] = json.loads(COSTS.read_text(encoding="utf-8"))
    for exhibit in every():
        yield f"\n{exhibit.label}  {exhibit.kind}, {exhibit.place}: {exhibit.title}"
        if exhibit.kind == "none":
            yield f"  {' '.join(exhibit.note.split())}"
        for scale, cost in known.get(exhibit.label, {}).items():
            yield f"  {scale:<7} {_needs(cost)}; {_cost(cost, scale)}"


def _needs(cost: Mapping[str, Any]) -> str:
    return ", ".join([*cost["models"], *cost["datasets"], *cost["files"]])


def _cost(cost: Mapping[str, Any], scale: str) -> str:
    many = "one thread" if scale == LAPTOP else f"{cost['processes']} GPUs"
    more = f" and {cost['diagnoses']} diagnoses" if cost["diagnoses"] else ""
    return (
        f"{cost['cells']} cells{more}, {cost['flops']:.2g} FLOPs, "
        f"about {shown_time(float(cost['seconds']))} on {many}, {cost['gib']:.3g} GiB each"
    )


def cost_of(work: Work) -> dict[str, Any]:
    """What an exhibit needs and costs at one scale, from shapes alone.

    Raises:
        ConfigError: one of its cells could not run.
    """
    plans = planned(work)
    require_names(work, plans)
    diagnosed = work.exhibit.diagnosis is not None
    return {
        "cells": sum(one.cells for one in plans),
        "diagnoses": len(work.grid.tasks) if diagnosed else 0,
        "flops": _rounded(sum(one.cells * one.flops for one in plans)),
        "seconds": round(sum(seconds_of(one, work.scale) for one in plans)),
        "gib": _rounded(max(one.memory for one in plans) / 2**30),
        "processes": max(one.processes for one in plans),
        "models": [Path(name).name if work.scale == LAPTOP else name for name in work.models()],
        "datasets": work.datasets() or ["rows of the standard library"],
        "files": _evaluation(work),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _evaluation(work: Work) -> list[str]:
    """Files of benchmarks and judges, by name."""
    if work.scale == LAPTOP:
        return []
    named = [Path(name).name for name in work.files()]
    return named + [Path(name).name for name in work.retention_files()]


def every_cost(exhibit: Exhibit, output: str) -> dict[str, dict[str, Any]]:
    """At both scales; empty where nothing is run."""
    from alphatoken_lab.commands.paper import PaperOptions

    if exhibit.kind == "none":
        return {}
    return {
        scale: cost_of(Work(exhibit, PaperOptions(scale=scale, output_dir=output)))  # type: ignore[arg-type]
        for scale in SCALES
    }
