"""Launchers of a grid's processes: on this machine, on devices of their own, or in a queue."""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from alphatoken.cli.recipes import accelerate_config
from alphatoken.errors import ConfigError
from alphatoken.support.options import option

PORT = "{port}"
"""Stands in a command for a port that no other cell of the grid has."""

PARENT = "ALPHATOKEN_COMPARE_PARENT"

_PR_SET_PDEATHSIG = 1
_ATTACHED = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, 9); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""A program that becomes another one, and is killed when the process that started it ends."""


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

    Attributes:
        most: cells at a time.

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
        devices_of: list[str | None] = [",".join(group) for group in groups]
        self._devices = devices_of or [None] * processes
        self._jobs: list[tuple[subprocess.Popen[bytes], str | None, int]] = []
        self.most = len(self._devices)

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[subprocess.Popen[bytes]]:
        """Start one process each, with devices, port and a share of the cores of its own."""
        return [self._start(words, log) for words, log in cells]

    def _start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        self._jobs = [job for job in self._jobs if job[0].poll() is None]
        busy, ports = [job[1] for job in self._jobs], {job[2] for job in self._jobs}
        devices = next((own for own in self._devices if own not in busy), None)
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
        # Several cells share the cores, unless the user has said how.
        threads = str(max(1, (os.cpu_count() or 1) // self.most))
        shared = {"OMP_NUM_THREADS": threads} if self.most > 1 else {}
        own = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices, "MASTER_PORT": str(port)}
        return {**shared, **os.environ, **own, PARENT: str(os.getpid())}


def _free_port(used: set[int]) -> int:
    while True:
        # One that was handed to another cell may not be listened on yet.
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
        self.most = most

    def start(self, cells: Sequence[tuple[list[str], Path]]) -> list[QueuedJob]:
        """Submit all jobs as one SLURM array."""
        with self._executor.batch():
            jobs = [self._executor.submit(_run, words, str(log)) for words, log in cells]
        return [QueuedJob(job) for job in jobs]


def _run(words: Sequence[str], log: str) -> int:
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


# --- a cell's process ---------------------------------------------------------------------------


def make_launcher(options: CellOptions, folder: Path) -> LocalLauncher | SubmititLauncher:
    """The launcher that the options describe; a queue keeps its own files in ``folder/queue``.

    Raises:
        ConfigError: options that contradict each other.
    """
    devices = [] if options.devices is None else options.devices.split(",")
    if options.launcher == "local":
        if options.queue is not None:
            raise ConfigError("--queue needs --launcher slurm", got=options.queue)
        if options.devices_per_cell > 1 and not devices:
            raise ConfigError(
                "--devices_per_cell needs the devices", got="no --devices", remedy="--devices 0,1"
            )
        return LocalLauncher(options.processes, devices, options.devices_per_cell)
    if devices:
        raise ConfigError(
            "a queue assigns devices itself", got=f"--devices {options.devices}",
            remedy="--devices_per_cell, or --queue gpus_per_node=N",
        )  # fmt: skip
    several = {"gpus_per_node": options.devices_per_cell} if options.devices_per_cell > 1 else {}
    cluster = options.launcher.removeprefix("submitit-")
    parameters = {**several, **_parameters(options.queue or "")}
    return SubmititLauncher(folder / "queue", cluster, options.processes, parameters)


def _parameters(text: str) -> dict[str, Any]:
    """``a=1,b=x`` as {a: 1, b: x}."""
    import yaml

    parameters = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("--queue is NAME=VALUE,NAME=VALUE", got=part)
        parameters[name.strip()] = yaml.safe_load(value)
    return parameters


def cell_command(path: Path, processes: int = 1) -> list[str]:
    """Command of the cell in a folder: a process, or a launcher's if the cell has several."""
    # A cell's own process ends with its parent before it loads torch, and help needs none at all.
    from alphatoken.support.storage import read_json

    own = ["-m", "alphatoken_lab.commands", "compare", "--cell", str(path)]
    spec, count = read_json(path / "cell.json") or {}, str(processes)
    if processes == 1 or spec["kind"] != "train":
        return [sys.executable, *own]
    name = spec["resolved"].get("accelerate_config")
    if name in (None, "none"):
        start = ["torch.distributed.run", "--nproc-per-node", count, "--master-port", PORT]
    else:
        start = ["accelerate.commands.launch", "--config_file", str(accelerate_config(name)[0]),
                 "--num_processes", count, "--main_process_port", PORT]  # fmt: skip
    attached = ["-c", _ATTACHED] if sys.platform == "linux" else []
    return [sys.executable, *attached, "-m", *start, *own]


def end_with_parent() -> None:
    """Called by a cell's process: it is killed when the process that started it ends (Linux)."""
    # Cells of a grid that was killed outright would train on, and the next start would run them a
    # second time beside themselves.
    parent: Any = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if "RANK" in os.environ:  # between them stands the launcher's agent, which does the same
        return
    if os.getppid() != int(parent):  # it ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
