"""Launchers of a grid's processes: on this machine, on devices of their own, or in a queue."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from alphatoken.errors import ConfigError

__all__ = ["PARENT", "PORT", "Job", "Launcher", "LocalLauncher", "SubmititLauncher"]

PORT = "{port}"
"""Stands in a command for a port that no other cell of the grid has."""

PARENT = "ALPHATOKEN_COMPARE_PARENT"


@runtime_checkable
class Job(Protocol):
    """One cell that was started."""

    def poll(self) -> int | None:
        """Its exit status; None while it is at work or waits for a machine."""

    def stop(self) -> None:
        """Ask it to end."""

    def finish(self, patience: float) -> None:
        """Wait until it has ended; after ``patience`` seconds make it end."""


@runtime_checkable
class Launcher(Protocol):
    """Starts cells, as many at a time as it has room for."""

    def room(self) -> int:
        """Number of cells that can be started now."""

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[Job]:
        """Start commands, each with the file that its output goes to."""


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
        groups = range(0, len(devices), per_cell)
        found = [",".join(devices[i : i + per_cell]) for i in groups]
        self._free: list[str | None] = [*found] if devices else [None] * processes
        self._count = len(self._free)
        self._ports: set[int] = set()

    def room(self) -> int:
        """Places that no cell has."""
        return len(self._free)

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[Job]:
        """One process each, with devices, port and a share of the cores of its own."""
        return [self._start(words, log) for words, log in cells]

    def _start(self, words: Sequence[str], log: Path) -> Job:
        devices, port = self._free.pop(0), _free_port(self._ports)
        self._ports.add(port)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [word.replace(PORT, str(port)) for word in words],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment(devices, port),
                start_new_session=True,  # an interrupt on the terminal is the grid's to pass on
            )
        return _Process(process, self, devices, port)

    def _environment(self, devices: str | None, port: int) -> dict[str, str]:
        """Several cells share the cores, unless the user has said how."""
        threads = str(max(1, (os.cpu_count() or 1) // self._count))
        shared = {"OMP_NUM_THREADS": threads} if self._count > 1 else {}
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices, "MASTER_PORT": str(port)}
        return {**shared, **os.environ, **own, PARENT: str(os.getpid())}

    def give_back(self, devices: str | None, port: int) -> None:
        """A cell has ended; what it had is free."""
        self._free.append(devices)
        self._ports.discard(port)


class _Process:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        launcher: LocalLauncher,
        devices: str | None,
        port: int,
    ) -> None:
        self._process, self._launcher = process, launcher
        self._held: tuple[str | None, int] | None = (devices, port)

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._held is not None:
            self._launcher.give_back(*self._held)
            self._held = None
        return code

    def stop(self) -> None:
        self._process.terminate()

    def finish(self, patience: float) -> None:
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port(taken: set[int]) -> int:
    """A port that nobody listens on, and no other cell was given."""
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
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
        self._most, self._running = most, 0

    def room(self) -> int:
        """Cells that may still be put into the queue."""
        return self._most - self._running

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[Job]:
        """Submit all jobs as one SLURM array."""
        with self._executor.batch():
            jobs = [self._executor.submit(_run, words, str(log)) for words, log in cells]
        self._running += len(jobs)
        return [_Queued(job, self) for job in jobs]

    def ended(self) -> None:
        """A job has left the queue."""
        self._running -= 1


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


class _Queued:
    def __init__(self, job: Any, launcher: SubmititLauncher) -> None:
        self._job, self._launcher, self._code = job, launcher, None

    _code: int | None

    def poll(self) -> int | None:
        if self._code is None and self._job.done():
            try:
                self._code = int(self._job.result())
            except Exception as error:  # killed, timed out or never started
                print(f"submitit: {' '.join(str(error).split())[:300]}", file=sys.stderr)
                self._code = 1
            self._launcher.ended()
        return self._code

    def stop(self) -> None:
        self._job.cancel(check=False)

    def finish(self, patience: float) -> None:
        end = time.monotonic() + patience
        while not self._job.done() and time.monotonic() < end:
            time.sleep(0.1)
