"""Responses for one Fisher, drawn by all processes of a launch while the main one fits.

Drawing is nearly all of a fit's time, and each batch of it is a function of the model, the prompts
and the samples' numbers. So the other processes draw ahead and leave their batches in a folder. The
main one takes what is there when it comes to a batch, and draws it itself where nothing is, so a
process that cannot help costs time and nothing else. Only those help that compute on a device like
the main one's: the Fisher is the same to the bit, however many they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.direction.fisher import draw_responses
from alphatoken.errors import AlphaTokenError, FisherError
from alphatoken.support.storage import read_tensors, write_json, write_tensors

__all__ = ["Helper", "SharedResponses", "arithmetic_of"]


def arithmetic_of(model: nn.Module) -> str:
    """What the bits of its products depend on beside the weights: the device, and its threads."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.version.cuda}"
    known = torch.backends.cpu.get_cpu_capability()
    return f"{device.type}, {known}, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class SharedResponses:
    """The main process's side.

    Attributes:
        status: file in which the main process says what it does.
        arithmetic: of the main process's model.
    """

    status: Path
    arithmetic: str = ""

    @property
    def folder(self) -> Path:
        """Where the others leave their batches."""
        return self.status.with_suffix(".responses")

    def __call__(self, batch: range) -> Mapping[int, Tensor] | None:
        """Say that this batch is being worked on, and take its responses if they are there.

        No fault of these files ends a fit: then the responses are drawn here.
        """
        with suppress(FisherError, OSError):
            if not self.folder.exists():
                self._begin()
            says = {"state": "fitting", "batch": batch.start, "arithmetic": self.arithmetic}
            write_json(self.status, says, error=FisherError)
            path = self.folder / f"{batch.start}.safetensors"
            if path.exists():
                tensors, _ = read_tensors(path, error=FisherError)
                path.unlink(missing_ok=True)
                found = {int(name): ids for name, ids in tensors.items()}
                return found if sorted(found) == list(batch) else None
        return None

    def _begin(self) -> None:
        """Make the folder; those that killed fits of the same Fisher left are no use to anybody."""
        key = self.status.name.partition(".")[0]
        for left in self.status.parent.glob(f"{key}.*.responses"):
            shutil.rmtree(left, ignore_errors=True)
        self.folder.mkdir()

    def remove(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Helper:
    """Another process's side: draws every ``world``-th batch, ahead of the main process.

    Args:
        shared: of the main process.
        model: the same model.
        prompts: the same prompts.
        settings: of ``fit_fisher``.
        rank: of this process, 1 or more.
        world: number of processes.
    """

    def __init__(
        self,
        shared: SharedResponses,
        model: nn.Module,
        prompts: Any,
        settings: Mapping[str, Any],
        rank: int,
        world: int,
    ) -> None:
        self._shared, self._model, self._prompts = shared, model, prompts
        self._how = {name: settings[name] for name in ("samples", "max_new_tokens", "seed")}
        size, samples = settings["batch_size"], settings["samples"]
        self._left = [
            range(start, min(start + size, samples))
            for number, start in enumerate(range(0, samples, size))
            if number % world == rank and settings["labels"] == "sequence"
        ]

    def draw(self, at: int) -> bool:
        """Draw the next batch behind sample ``at``; False: there is none left for this process."""
        self._left = [batch for batch in self._left if batch.start > at]
        if not self._left:
            return False
        batch = self._left.pop(0)
        try:
            drawn = draw_responses(self._model, self._prompts, batch, **self._how)
            path = self._shared.folder / f"{batch.start}.safetensors"
            tensors = {str(index): ids for index, ids in drawn.items()}
            write_tensors(path, tensors, {"batch": json.dumps([batch.start, batch.stop])},
                          error=FisherError)  # fmt: skip
        except (AlphaTokenError, RuntimeError, OSError):
            # The main process meets the same, if it is the model's or the prompts', and says so; or
            # it has ended, and its folder is gone.
            self._left = []
        return bool(self._left)
