"""Several processes: which layout is asked for, and starting it with accelerate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.recipes import accelerate_config
from alphatoken.errors import ConfigError
from alphatoken.train.plan import Layout

__all__ = ["check_launch", "launch", "layout_of", "wants_launch"]

_INSIDE = ("ACCELERATE_MIXED_PRECISION", "LOCAL_RANK", "WORLD_SIZE")
"""Set in a process that accelerate or torchrun has started."""

_BY_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Number of processes that MPI has started; accelerate reads it, and they find each other."""
_BY_SLURM = "SLURM_STEP_NUM_TASKS"
"""Number of tasks of a step of SLURM; nothing that trains here reads it."""


def wants_launch(arguments: Arguments) -> bool:
    """Whether processes are still to be started."""
    inside = any(key in os.environ for key in _INSIDE)
    # By itself nothing is started where somebody else has: each of theirs would start its own.
    if arguments.run.accelerate_config is None:
        inside = inside or any(_started(key) > 1 for key in (*_BY_MPI, _BY_SLURM))
    return _asked(arguments) is not None and not inside


def _asked(arguments: Arguments) -> tuple[Path, dict[str, Any]] | None:
    """File and content of the layout to start, with its number of processes; None: no layout.

    Without an accelerate_config, as many processes as are asked for, or one for each GPU, run
    under DistributedDataParallel, as `trl sft` has it.

    Raises:
        ConfigError: no such accelerate configuration.
    """
    name, count = arguments.run.accelerate_config, arguments.run.num_processes
    if name is None and count is None and not arguments.training.use_cpu:
        import torch

        count = torch.cuda.device_count()
    if name == "none" or (name is None and (count or 1) < 2):
        return None
    path, config = accelerate_config(name or "ddp")
    return path, {"num_processes": 1, **config, **({"num_processes": count} if count else {})}


def layout_of(arguments: Arguments) -> Layout:
    """The layout of the run: what it was started in, or what it asks for.

    Raises:
        ConfigError: no such accelerate configuration, one that is not started, or tasks of SLURM
            that nothing joins.
    """
    if arguments.run.accelerate_config in (None, "none") and "WORLD_SIZE" in os.environ:
        started = os.environ["WORLD_SIZE"]
        return Layout.read({"distributed_type": "MULTI_GPU", "num_processes": started})
    _require_one_task(arguments)
    asked = _asked(arguments)
    if asked is None:
        return Layout()
    _require_launcher(asked[1])
    return Layout.read(asked[1])


def check_launch(arguments: Arguments) -> None:
    """Refuse, before anything is deleted, what could not be started.

    Raises:
        ConfigError: as ``layout_of``, or fewer GPUs than the layout needs.
    """
    layout_of(arguments)
    asked = _asked(arguments)
    if asked is not None and wants_launch(arguments):
        _require_devices(arguments, asked[1])


def launch(arguments: Arguments) -> int:
    """Start the processes that ``check_launch`` has seen, wait for them; their exit status."""
    asked = _asked(arguments)
    assert asked is not None
    path, count = asked[0], int(asked[1]["num_processes"])
    if arguments.run.accelerate_config is None:
        batch = count * arguments.training.per_device_train_batch_size
        print(
            f"{count} processes under DistributedDataParallel, {batch} rows a forward; "
            "--accelerate_config takes another layout, or 'none' for one process",
            file=sys.stderr,
        )
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", str(path), "--num_processes", str(count),
        "-m", "alphatoken.cli", arguments.command, *arguments.words,
    ]  # fmt: skip
    return _wait_for(command, {**os.environ, "ALPHATOKEN_LAUNCHED": "1"})


_PATIENCE = 60.0
"""Seconds that interrupted processes get to end by themselves."""


def _wait_for(command: list[str], environment: dict[str, str]) -> int:
    """Run to the end. A SIGTERM goes on to the processes, an interrupt reaches them by itself."""
    process = subprocess.Popen(command, env=environment)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _started(key: str) -> int:
    return int(os.environ.get(key) or 1)


def _require_one_task(arguments: Arguments) -> None:
    """Refuse tasks of SLURM that would not know of each other."""
    known = any(key in os.environ for key in (*_INSIDE, *_BY_MPI))
    if arguments.run.accelerate_config is None and not known and _started(_BY_SLURM) > 1:
        raise ConfigError(
            "the tasks of this step of SLURM would each train alone",
            got=f"{_BY_SLURM}={os.environ[_BY_SLURM]}, no WORLD_SIZE",
            why="all would train on the same rows, and write to the same folder",
            remedy="one task a machine (srun --ntasks-per-node 1), and in it torchrun, `accelerate "
            "launch`, or --accelerate_config with a file that names the machines",
        )


def _require_launcher(config: dict[str, Any]) -> None:
    """Refuse a layout of which accelerate would start a single process, and say nothing."""
    count = int(config["num_processes"])
    by_mpi = config.get("mpirun_config") is not None
    if config.get("distributed_type") == "MULTI_CPU" and count > 1 and not by_mpi:
        raise ConfigError(
            "accelerate starts processes on the CPU by MPI only",
            got=f"distributed_type: MULTI_CPU, {count} processes, no mpirun_config",
            why="one process would train alone on a part of the batch",
            remedy=f"--use_cpu --num_processes {count} without this file, or mpirun_config in it",
        )


def _require_devices(arguments: Arguments, config: dict[str, Any]) -> None:
    """Refuse a layout on more GPUs than this machine has."""
    import torch

    on_cpu = config.get("use_cpu") or config.get("distributed_type") == "MULTI_CPU"
    if on_cpu or arguments.training.use_cpu:
        return
    here = int(config["num_processes"]) // int(config.get("num_machines", 1))
    found = torch.cuda.device_count()
    if found < here:
        raise ConfigError(
            "the layout needs more GPUs than there are",
            got=f"{here} processes on this machine, {found} GPUs",
            remedy="--num_processes, another --accelerate_config, --use_cpu, or "
            "--accelerate_config none for one process",
        )
