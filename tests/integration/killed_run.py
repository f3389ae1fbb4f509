"""Training runs in processes of their own that are killed outright at a chosen moment.

The processes are forked from a server that has imported the libraries and nothing else, which
saves seconds each; they are real ones, and so is the signal that ends them.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from alphatoken import train
from alphatoken.train.checkpoint import STAGING
from tests.forked import SERVER
from tests.integration import tiny_training as tiny
from tests.pictures import leave_blank

PATIENCE = 240.0  # seconds for any one process
_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")


@dataclass(frozen=True)
class Moment:
    """When a process stops and waits for its end.

    Attributes:
        event: a callback's event, such as "on_step_begin"; or "write": a file operation of a save.
        count: which one: the optimizer step that the event is in, or the number of the operation.
    """

    event: str
    count: int


@dataclass(frozen=True)
class Run:
    """What is trained, and how.

    Attributes:
        kind: "plain", "sft" or "dpo".
        folder: of the run.
        peft: whether adapters are trained.
        processes: how many train together, on gloo.
        options: of the trainer, over those of all tests.
    """

    kind: str
    folder: Path
    peft: bool = False
    processes: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The trainer's output_dir."""
        return self.folder / "out"

    def trainer(self) -> Any:
        """The trainer, before anything is run."""
        torch.manual_seed(11)
        given = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_steps": 8}
        given |= {"ddp_backend": "gloo"} if self.processes > 1 else {}
        given |= self.options
        adapters = tiny.lora()
        for name in vars(adapters).keys() & given.keys():
            setattr(adapters, name, given.pop(name))
        given["model"] = tiny.model(dropout=given.pop("dropout", 0.0))
        given["peft_config"] = adapters if self.peft else None
        rows = tiny.preference_rows if self.kind == "dpo" else tiny.sft_rows
        given.setdefault("train_dataset", rows(24))
        if given.pop("evaluate", False):
            given["eval_dataset"] = tiny.sft_rows(8, seed=9)
        if self.kind == "plain":
            return tiny.made(train.AlphaSFTTrainer, self.out, **{"policy": "standard", **given})
        given = {"fisher_cache": str(self.folder.parent / "fisher"), **given}
        if self.kind == "sft":
            return tiny.sft(self.out, validation_dataset=tiny.sft_rows(24, seed=5), **given)
        return tiny.dpo(self.out, **{"ref_model": None if self.peft else tiny.model(), **given})


# --- inside a process -----------------------------------------------------------------------------


class _Stop(TrainerCallback):
    """Waits at one event of one step."""

    def __init__(self, moment: Moment, reached: Path) -> None:
        def wait(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == moment.count:
                _wait(reached)

        setattr(self, moment.event, wait)


def _wait(reached: Path) -> None:
    reached.touch()
    while True:
        time.sleep(60)


def _stop_at_write(count: int, reached: Path) -> None:
    """Wait at the ``count``-th file operation that has to do with a checkpoint being written."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in _OPERATIONS and any(STAGING in str(name) for name in arguments[:2]):
            seen += 1
            if seen == count:
                _wait(reached)

    sys.addaudithook(hook)


def _main(
    run: Run, resume: str | bool | None, moment: Moment | None, mark: Path, rank: int, port: int
) -> None:
    """Body of a process: train, wait where it is told to, say how it ended."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if run.processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.processes),
            "LOCAL_WORLD_SIZE": str(run.processes), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
    torch.set_num_threads(1)
    leave_blank(pytest.MonkeyPatch())
    # The server's children all begin with one random state; a fresh process does not.
    seed = random.SystemRandom().getrandbits(32)
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        trainer = run.trainer()
        if moment is not None and moment.event == "write":
            _stop_at_write(moment.count, mark)
        elif moment is not None:
            trainer.add_callback(_Stop(moment, mark))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train(resume_from_checkpoint=resume)
        mark.with_suffix(".done").touch()
    except BaseException:
        mark.with_suffix(".error").write_text(traceback.format_exc())
        os._exit(1)  # a process group that waits for others must not hold this one


# --- outside --------------------------------------------------------------------------------------


def _start(run: Run, resume: str | bool | None, moment: Moment | None) -> list[tuple[Any, Path]]:
    run.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(run.processes):
        mark = run.folder / f"mark-{time.monotonic_ns()}-{rank}"
        process = SERVER.Process(target=_main, args=(run, resume, moment, mark, rank, port))
        process.start()
        started.append((process, mark))
    return started


def _text(mark: Path, suffix: str) -> str:
    with suppress(OSError):
        return mark.with_suffix(suffix).read_text()
    return ""


def kill(run: Run, moment: Moment, resume: str | bool | None = None) -> bool:
    """Train until the moment in the first process; then SIGKILL all. False if it ended before."""
    started = _start(run, resume, moment)
    process, mark = started[0]
    end = time.monotonic() + PATIENCE
    while not mark.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)
    alive: bool = process.is_alive()
    for one, _ in started:
        one.kill()
    for one, of_it in started:
        one.join(PATIENCE)
        assert not _text(of_it, ".error"), _text(of_it, ".error")
    assert mark.exists() or not alive, "it never got there"
    assert not alive or process.exitcode == -signal.SIGKILL
    return alive


def finish(run: Run, resume: str | bool | None = None) -> None:
    """Train to the end in fresh processes."""
    for process, mark in _start(run, resume, None):
        process.join(PATIENCE)
        assert mark.with_suffix(".done").exists(), (
            _text(mark, ".error") or f"exit code {process.exitcode}"
        )


def two_processes_are_one(folder: Path, options: dict[str, Any]) -> None:
    """A run of SFT by two processes is that by two micro-batches, up to the rounding of a sum."""
    options = {**options, "max_steps": 3, "per_device_train_batch_size": 2, "save_steps": 3}
    one = Run("sft", folder / "one", options={**options, "gradient_accumulation_steps": 2})
    two = Run("sft", folder / "two", processes=2, options=options)
    for each in (one, two):
        finish(each)
    first, second = (
        load_file(each.out / "checkpoint-3" / "model.safetensors") for each in (one, two)
    )
    start = tiny.weights(tiny.model())
    assert any(float((weight - start[name]).abs().max()) > 1e-3 for name, weight in first.items())
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < 1e-6
