"""Several processes: which layout is asked for, and starting it with accelerate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from alphatoken.cli.arguments import Arguments
from alphatoken.cli.recipes import accelerate_config
from alphatoken.errors import ConfigError
from alphatoken.train.cost import Layout

__all__ = ["launch", "layout_of", "wants_launch"]

_INSIDE = ("ACCELERATE_MIXED_PRECISION", "LOCAL_RANK", "WORLD_SIZE")
"""Set in a process that accelerate or torchrun has started."""


def wants_launch(arguments: Arguments) -> bool:
    """Whether processes are still to be started."""
    name = arguments.run.accelerate_config
    return name not in (None, "none") and not any(key in os.environ for key in _INSIDE)


def layout_of(arguments: Arguments) -> Layout:
    """The layout of the run: what it was started in, or what it asks for.

    Raises:
        ConfigError: no such accelerate configuration.
    """
    name = arguments.run.accelerate_config
    config: dict[str, Any] = {}
    if name is not None and name != "none":
        config = accelerate_config(name)[1]
    elif "WORLD_SIZE" in os.environ:
        config = {"distributed_type": "MULTI_GPU", "num_processes": os.environ["WORLD_SIZE"]}
    if arguments.run.num_processes is not None:
        config["num_processes"] = arguments.run.num_processes
    return Layout.read(config)


def launch(arguments: Arguments) -> int:
    """Start the processes, wait for them, and return their exit status.

    Raises:
        ConfigError: no such configuration, or fewer GPUs than it needs.
    """
    path, config = accelerate_config(str(arguments.run.accelerate_config))
    count = arguments.run.num_processes or int(config.get("num_processes", 1))
    _require_devices(arguments, config, count)
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


def _require_devices(arguments: Arguments, config: dict[str, Any], count: int) -> None:
    """Refuse a layout on more GPUs than this machine has."""
    import torch

    on_cpu = config.get("use_cpu") or config.get("distributed_type") == "MULTI_CPU"
    if on_cpu or arguments.training.use_cpu:
        return
    here = count // int(config.get("num_machines", 1))
    found = torch.cuda.device_count()
    if found < here:
        raise ConfigError(
            "the layout needs more GPUs than there are",
            got=f"{here} processes on this machine, {found} GPUs",
            remedy="--num_processes, another --accelerate_config, or --accelerate_config none for "
            "one process",
        )
