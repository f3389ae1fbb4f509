"""Figures of the results, as SVG files beside docs/results.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot

from benchmarks.training.grid import NOISES, POLICIES, TASKS
from benchmarks.training.tables import NAMES, Cells, chosen, difference, mean

COLOURS = ("#1b1b1b", "#8a8a8a", "#b5532f", "#1f77b4", "#2a8c4a")
TITLES = {"sft_code": "SFT, code", "sft_math": "SFT, mathematics", "dpo": "DPO"}

pyplot.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "alphatoken",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "figure.facecolor": "white",
    }
)


def draw_policies(cells: Cells, path: Path) -> None:
    """Target against retention loss: one panel a task and noise, seeds as dots, mean as cross."""
    figure, panels = pyplot.subplots(len(NOISES), len(TASKS), figsize=(10, 6.4), squeeze=False)
    for line, noise in zip(panels, NOISES, strict=True):
        for panel, task in zip(line, TASKS, strict=True):
            _policies(panel, chosen(cells, task=task, noise=noise, variant="main"))
            noisy = f"{noise:.0%} of response tokens replaced" if noise else "clean"
            panel.set_title(f"{TITLES[task]}, {noisy}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("target loss, held out (lower is better)")
    for line in panels:
        line[0].set_ylabel("retention loss")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    _save(figure, path)


def _policies(panel: Any, cells: Cells) -> None:
    """One panel; a ruinous policy stands at the right edge with its value, not on the scale."""
    usual = [c["target_loss"] for c in cells if c["policy"] != "bottom"]
    if not usual:
        return
    edge = max(usual) + 0.25 * (max(usual) - min(usual) + 1e-3)
    for key, colour in zip(POLICIES, COLOURS, strict=True):
        part = chosen(cells, policy=key[0], estimator=key[1])
        if not part:
            continue
        x, y = mean(part, "target_loss").mean, mean(part, "retention_loss").mean
        if x > edge:
            label = f"{x:.2f} →"
            panel.annotate(label, (edge, y), color=colour, ha="right", va="center", fontsize=8)
            panel.plot([], [], "x", color=colour, label=NAMES[key])
            continue
        dots = [c["target_loss"] for c in part], [c["retention_loss"] for c in part]
        panel.plot(*dots, "o", color=colour, markersize=3, alpha=0.5)
        panel.plot(x, y, "x", color=colour, markersize=9, markeredgewidth=2, label=NAMES[key])


def draw_differences(
    panels: Sequence[tuple[str, Sequence[tuple[str, Cells]], Cells]], key: str, path: Path
) -> None:
    """Mean difference to random selection with its interval, one line a variant."""
    count = max(len(groups) for _, groups, _ in panels)
    size = (5 * len(panels), 0.3 * count + 1.2)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for axis, (title, groups, base) in zip(axes[0], panels, strict=True):
        axis.axvline(0, color="#1b1b1b", linewidth=0.8)
        for place, (_, part) in enumerate(groups):
            found = difference(part, base, key) if part else None
            if found is not None:
                half = 0.0 if found.count < 2 else found.half
                colour = COLOURS[4] if found.mean < 0 else COLOURS[2]
                axis.errorbar(found.mean, place, xerr=half, fmt="o", color=colour, capsize=3)
        axis.set_title(title, fontsize=9)
        axis.set_yticks(range(len(groups)), [name for name, _ in groups])
        axis.invert_yaxis()
        axis.set_xlabel("target loss − random (negative is better)")
    axes[0][0].set_ylim(count - 0.5, -0.5)
    figure.tight_layout()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
