"""What each process of a layout runs: jobs, ``module.job``; what they find is saved.

A job is a function of (layout, folder) in a module beside this one; all ranks run it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import training_args

from tests.pictures import leave_blank


def prepare_process(layout: str) -> None:
    """Three things that the libraries take for granted, and a CPU does not have."""
    torch.set_num_threads(1)
    if layout.startswith("fsdp"):
        PartialState(cpu=True)
    forget_precision(layout)
    if layout.startswith("zero"):
        import deepspeed

        # Plain gloo; its own shared-memory collectives would be compiled at first use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # transformers takes bf16=True without a GPU only with use_cpu, and then not DeepSpeed.
        training_args.is_torch_bf16_gpu_available = lambda: True


def forget_precision(layout: str) -> None:
    """Let the next trainer choose its own: accelerate keeps that of the first one."""
    AcceleratorState._reset_state()
    if layout.startswith("fsdp"):
        # accelerate offers FSDP beside an accelerator only. Under another device's name it runs
        # on gloo and the CPU as it is: this is the one thing told differently from a GPU run.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def device_options(layout: str) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` that put a run on the CPU in this layout."""
    if layout.startswith("fsdp"):
        return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
    if layout.startswith("zero"):
        return {"use_cpu": False, "ddp_backend": "gloo"}
    return {"use_cpu": True}


def end_process() -> None:
    """Let all processes end together: a group that is still open while Python ends may abort it."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def work(layout: str, folder: Path, jobs: tuple[str, ...]) -> None:
    """Run the jobs and save what they find."""
    prepare_process(layout)
    leave_blank(pytest.MonkeyPatch())  # the other ranks wait while the page of a run is drawn
    found = {}
    for job in jobs:
        module, _, name = job.rpartition(".")
        made = importlib.import_module(f"tests.integration.distributed.{module}")
        found[name] = getattr(made, name)(layout, folder / name)
    torch.save(found, folder / f"rank{PartialState().process_index}.pt")
    end_process()
