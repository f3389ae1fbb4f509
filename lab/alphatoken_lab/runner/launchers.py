"""Launchers of a grid's processes: on this machine, on devices of their own, or in a queue."""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.cli.recipes import accelerate_config
from alphatoken.errors import ConfigError

__all__ = [
    "PARENT", "PORT", "LocalLauncher", "QueuedJob", "SubmititLauncher", "for_processes",
]  # fmt: skip

PORT = "{port}"
"""Stands in a command for a port that no other cell of the grid has."""

PARENT = "ALPHATOKEN_COMPARE_PARENT"


def for_processes(options: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Options for so many processes, with the global batch that the recipe means.

    A recipe with a layout of P processes trains on P micro-batches at a time. Another number of
    them makes more or fewer accumulation steps, or else smaller micro-batches.

    Raises:
        ConfigError: the global batch cannot be kept.
    """
    name = options.get("accelerate_config")
    content = {} if name in (None, "none") else accelerate_config(str(name))[1]
    meant = int(content.get("num_processes", 1))
    if meant == world:
        return dict(options)
    rows = int(options.get("per_device_train_batch_size", 8))
    steps = int(options.get("gradient_accumulation_steps", 1)) * meant
    shared = math.gcd(steps, world)
    parts = world // shared
    if rows % parts:
        raise ConfigError(
            "the global batch of the recipe cannot be kept",
            got=f"{rows * steps} rows a step, on {world} processes a cell",
            why="cells would train on another batch than the recipe says",
            remedy="another --devices_per_cell, or a batch that they divide",
        )
    kept = {"per_device_train_batch_size": rows // parts}
    return {**options, **kept, "gradient_accumulation_steps": steps // shared}


class LocalLauncher:
    """Processes of this machine.

    Args:
        processes: cells at a time, where no devices are named.
        devices: numbers of GPUs; each cell sees some of its own, by ``CUDA_VISIBLE_DEVICES``.
        per_cell: how many of them a cell gets.

    Raises:
        ConfigError: devices that cannot be dealt out evenly.
    """

    def __init__(self, processes: int = 1, devices: Sequence[str] = (), per_cell: int = 1) -> None:
        if processes < 1:
            raise ConfigError("--processes must be at least 1", got=str(processes))
        if devices and processes > 1:
            raise ConfigError(
                "--devices already sets the number of cells at a time",
                got=f"--processes {processes} as well",
                remedy="leave --processes out",
            )
        if len(set(devices)) < len(devices):
            raise ConfigError("a device is named twice", got=",".join(devices))
        if per_cell < 1 or (devices and len(devices) % per_cell):
            raise ConfigError(
                "the devices cannot be dealt out evenly",
                got=f"{len(devices)} devices, {per_cell} a cell",
                remedy="a --devices_per_cell that divides their number",
            )
        groups = [devices[i : i + per_cell] for i in range(0, len(devices), per_cell)]
        places: list[str | None] = [",".join(group) for group in groups]
        self._places = places or [None] * processes
        self._jobs: list[tuple[subprocess.Popen[bytes], str | None, int]] = []

    def room(self) -> int:
        """Number of places that no cell has."""
        self._jobs = [job for job in self._jobs if job[0].poll() is None]
        return len(self._places) - len(self._jobs)

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[subprocess.Popen[bytes]]:
        """Start one process each, with devices, port and a share of the cores of its own."""
        return [self._start(words, log) for words, log in cells]

    def _start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        busy, ports = [job[1] for job in self._jobs], {job[2] for job in self._jobs}
        devices = next((place for place in self._places if place not in busy), None)
        port = _free_port(ports)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [word.replace(PORT, str(port)) for word in words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment(devices, port),
                start_new_session=True,  # an interrupt on the terminal is the grid's to pass on
            )
        self._jobs.append((process, devices, port))
        return process

    def _environment(self, devices: str | None, port: int) -> dict[str, str]:
        """Several cells share the cores, unless the user has said how."""
        count = len(self._places)
        threads = str(max(1, (os.cpu_count() or 1) // count))
        shared = {"OMP_NUM_THREADS": threads} if count > 1 else {}
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices, "MASTER_PORT": str(port)}
        return {**shared, **os.environ, **own, PARENT: str(os.getpid())}


def _free_port(used: set[int]) -> int:
    """A port that nobody listens on, and no other cell was handed."""
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        if port not in used:
            return port


class SubmititLauncher:
    """Jobs of a queue, by submitit: SLURM, or its local executor where there is none.

    Cells that can start at the same time are one array. The folder must be seen by all machines.

    Args:
        folder: for submitit's own files.
        cluster: "slurm" or "local".
        most: cells in the queue at a time.
        parameters: of submitit's executor, such as ``slurm_partition``, ``timeout_min``,
            ``gpus_per_node``.

    Raises:
        ConfigError: submitit is not installed, or a parameter is not known to it.
    """

    def __init__(
        self, folder: Path, cluster: str, most: int, parameters: Mapping[str, Any] | None = None
    ) -> None:
        if find_spec("submitit") is None:
            raise ConfigError(
                "--launcher needs submitit", remedy="pip install 'alphatoken-lab[submitit]'"
            )
        import submitit

        try:
            self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self._executor.update_parameters(
                **{"name": "alphatoken", "timeout_min": 24 * 60, **(parameters or {})}
            )
        except (NameError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                "submitit refuses this",
                got=f"{cluster}: {' '.join(str(error).split())[:200]}",
                remedy="--launcher slurm where sbatch is, and submitit's names of parameters",
            ) from None
        self._most = most
        self._jobs: list[QueuedJob] = []

    def room(self) -> int:
        """Number of cells that may still be put into the queue."""
        self._jobs = [job for job in self._jobs if job.poll() is None]
        return self._most - len(self._jobs)

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[QueuedJob]:
        """Submit all jobs as one SLURM array."""
        with self._executor.batch():
            jobs = [self._executor.submit(_run, words, str(log)) for words, log in cells]
        started = [QueuedJob(job) for job in jobs]
        self._jobs += started
        return started


def _run(words: Sequence[str], log: str) -> int:
    """Run the command in the job, its output to the cell's log; return its exit status."""
    port = str(_free_port(set()))
    print("alphatoken:", shlex.join(words))
    with open(log, "wb") as file:
        return subprocess.run(
            [word.replace(PORT, port) for word in words],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        ).returncode


class QueuedJob:
    """A job of submitit's, which is polled and ended as ``subprocess.Popen`` is."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit status; None while it is at work or waits for a machine."""
        if self._code is None and self._job.done():
            try:
                self._code = int(self._job.result())
            except Exception as error:  # killed, timed out or never started
                print(f"submitit: {' '.join(str(error).split())[:300]}", file=sys.stderr)
                self._code = 1
        return self._code

    def terminate(self) -> None:
        """Ask it to end; the queue kills what was cancelled."""
        self._job.cancel(check=False)

    def wait(self, timeout: float) -> None:
        """Wait until it has ended; raises ``subprocess.TimeoutExpired``."""
        end = time.monotonic() + timeout
        while not self._job.done():
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("submitit", timeout)
            time.sleep(0.1)

    def kill(self) -> None:
        """Leave the rest to the queue, where it was cancelled."""
