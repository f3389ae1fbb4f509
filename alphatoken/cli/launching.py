"""One process, or those that torchrun or accelerate started: nothing is started here."""

from __future__ import annotations

import os
import shlex

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.recipes import accelerate_config
from alphatoken.errors import ConfigError

__all__ = ["check_launch"]

_INSIDE = ("ACCELERATE_MIXED_PRECISION", "LOCAL_RANK", "WORLD_SIZE")
"""Set in a process that accelerate or torchrun has started."""

_BY_SLURM = "SLURM_STEP_NUM_TASKS"
"""Number of tasks of a step of SLURM; nothing that trains here reads it."""


def check_launch(arguments: Arguments) -> None:
    """See that the run has the processes that it is meant for, before anything is deleted.

    Raises:
        ConfigError: a layout that nobody has started, several GPUs for one process, or tasks of
            SLURM that do not know of each other.
    """
    if any(key in os.environ for key in _INSIDE):
        return
    own = ["-m", "alphatoken.cli", arguments.command, *arguments.words]
    name = arguments.run.accelerate_config
    if name not in (None, "none"):
        path = accelerate_config(name)[0]
        start = shlex.join(["accelerate", "launch", "--config_file", str(path), *own])
        raise ConfigError(
            "the run is meant for several processes",
            got=f"accelerate_config {name} in one process",
            remedy=f"{start}; or --accelerate_config none for one process",
        )
    if int(os.environ.get(_BY_SLURM) or 1) > 1:
        raise ConfigError(
            "the tasks of this step of SLURM would each train alone",
            got=f"{_BY_SLURM}={os.environ[_BY_SLURM]}, no WORLD_SIZE",
            why="all would train on the same rows, and write to the same folder",
            remedy="one task a machine (srun --ntasks-per-node 1), and in it torchrun or "
            "`accelerate launch`",
        )
    if (gpus := arguments.training.n_gpu) > 1:
        start = shlex.join(["torchrun", "--nproc-per-node", str(gpus), *own])
        raise ConfigError(
            "one process would split each batch over several GPUs",
            got=f"{gpus} GPUs",
            why="torch.nn.DataParallel does not work with token values",
            remedy=f"{start}; or CUDA_VISIBLE_DEVICES=0 for one of them",
        )
