"""Placement of what runs before training: the folder of its result, and the accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

__all__ = ["cache_folder", "on_accelerator", "spread_name"]


def cache_folder(folder: str | None, output_dir: str, name: str) -> Path:
    """``folder`` if it is named, else ``name`` beside ``output_dir``: shared by its experiment."""
    return Path(os.path.abspath(output_dir)).parent / name if folder is None else Path(folder)


def spread_name(model: nn.Module) -> str:
    """Name of a weight that is spread over processes already; "" where each is whole."""
    marks = ("ds_id", "device_mesh")
    named = model.named_parameters()
    return next((name for name, p in named if any(hasattr(p, mark) for mark in marks)), "")


@contextmanager
def on_accelerator(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model is on ``device``; afterwards it is where it was.

    Under FSDP2 and ZeRO transformers leaves the model on the CPU until it is cut up, which is
    after the Fisher is fitted and static passes are run: there they would take hours. Weights that
    are cut up already, or on several devices, stay. A model that does not fit as a whole has its
    Fisher fitted beforehand (`alphatoken fisher`). Parameters remain the same objects.
    """
    homes = {parameter.device for parameter in model.parameters()}
    if device.type == "cpu" or spread_name(model) or homes != {torch.device("cpu")}:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to("cpu")
        if torch.cuda.is_available():  # training wants all of the accelerator
            torch.cuda.empty_cache()
