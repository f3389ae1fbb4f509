"""Options of ``alphatoken-lab paper``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphatoken.support.options import option
from alphatoken_lab.runner.launchers import CellOptions


@dataclass(kw_only=True)
class PaperOptions(CellOptions):
    """Options for tables and figures, models and rows."""

    scale: Literal["full", "laptop"] = option("full", "run as in the paper, or in small")
    dry_run: bool = option(False, "list trainings and missing files, and stop")
    seeds: list[int] | None = option(None, "seeds (default: 0 1 2)")
    output_dir: str = option("runs/paper", "folder for cells, tables and figures")
    budget: str = option("10m", "time limit of a diagnostic for a figure, or none")
    evaluation_dir: str = option("paper-evaluation", "full: files of benchmarks and questions")
    model: str | None = option(None, "laptop: another model than SmolLM2-135M-Instruct")
    train_file: str | None = option(None, "laptop: rows (pairs) to train on, cut into all parts")
    target_file: str | None = option(None, "laptop: held-out rows (pairs); else cut from those")
    warm_file: str | None = option(None, "laptop: rows of the warm-up before preferences")
    retention_file: str | None = option(None, "laptop: rows that must not be forgotten")
    probes_file: str | None = option(None, "laptop: rows whose states are compared")
