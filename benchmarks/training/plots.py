"""Figures of the results, as SVG files beside docs/results.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphatoken.report.drawing import COLOURS, canvas, save
from benchmarks.training.grid import NOISES, POLICIES, TASKS
from benchmarks.training.tables import NAMES, Cells, chosen, difference, mean

_BLUE, _RED, _GREEN, _PURPLE, _BLACK = COLOURS[:5]
_OF_POLICY = (_BLACK, _PURPLE, _RED, _BLUE, _GREEN)
TITLES = {"sft_code": "SFT, code", "sft_math": "SFT, mathematics", "dpo": "DPO"}


def draw_policies(cells: Cells, path: Path) -> None:
    """Target against retention loss: one panel a task and noise, seeds as dots, mean as cross."""
    with canvas(10, 6.4) as figure:
        panels = figure.subplots(len(NOISES), len(TASKS), squeeze=False)
        for line, noise in zip(panels, NOISES, strict=True):
            for panel, task in zip(line, TASKS, strict=True):
                _policies(panel, chosen(cells, task=task, noise=noise, variant="main"))
                noisy = f"{noise:.0%} of response tokens replaced" if noise else "clean"
                panel.set_title(f"{TITLES[task]}\n{noisy}", fontsize=9, loc="left")
        for panel in panels[-1]:
            panel.set_xlabel("target loss, held out (lower is better)")
        for line in panels:
            line[0].set_ylabel("retention loss")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8
        )
        save(figure, path)


def _policies(panel: Any, cells: Cells) -> None:
    """One panel; a ruinous policy stands over the corner with its target loss, not on the scale."""
    usual = [c["target_loss"] for c in cells if c["policy"] != "bottom"]
    if not usual:
        return
    panel.locator_params(nbins=5)
    edge = max(usual) + 0.25 * (max(usual) - min(usual) + 1e-3)
    for key, colour in zip(POLICIES, _OF_POLICY, strict=True):
        part = chosen(cells, policy=key[0], estimator=key[1])
        if not part:
            continue
        x, y = mean(part, "target_loss").mean, mean(part, "retention_loss").mean
        if x > edge:
            corner = {"xycoords": "axes fraction", "ha": "right", "va": "bottom", "fontsize": 8}
            panel.annotate(f"{x:.2f} →", (1, 1.01), color=colour, **corner)
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
    with canvas(5 * len(panels), 0.3 * count + 1.2) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, groups, base) in zip(axes, panels, strict=True):
            axis.axvline(0, color=_BLACK, linewidth=0.8)
            for place, (_, part) in enumerate(groups):
                found = difference(part, base, key) if part else None
                if found is not None:
                    half = 0.0 if found.count < 2 else found.half
                    colour = _GREEN if found.mean < 0 else _RED
                    axis.errorbar(found.mean, place, xerr=half, fmt="o", color=colour, capsize=3)
            axis.set_title(title, fontsize=9)
            axis.set_yticks(range(len(groups)), [name for name, _ in groups])
            axis.set_xlabel("target loss − random (negative is better)")
        axes[0].set_ylim(count - 0.5, -0.5)
        save(figure, path)
