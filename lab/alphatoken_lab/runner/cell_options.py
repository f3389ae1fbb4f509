"""Options for running the cells of a grid, the same in all commands that run one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphatoken.support.options import option

__all__ = ["CellOptions"]


@dataclass(kw_only=True)
class CellOptions:
    """Options for running the cells."""

    processes: int = option(1, "number of cells at a time, or in the queue at a time")
    devices: str | None = option(None, "indices of the GPUs for cells: 0,1,2,3")
    devices_per_cell: int = option(
        1, "number of GPUs of one cell; its global batch stays", at_least=1, metavar="GPUS"
    )
    launcher: Literal["local", "slurm", "submitit-local"] = option(
        "local", "this machine, or a queue by submitit"
    )
    queue: str | None = option(None, "submitit's parameters: slurm_partition=gpu,timeout_min=600")
    only_report: bool = option(False, "write the tables of finished cells, run nothing")
    quiet: bool = option(False, "show no progress")
    traceback: bool = option(False, "show the whole traceback of an error")
