"""Start a worker through ``accelerate launch``, in one process or more, and read what it found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

LAYOUTS = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
WORLD = 2
"""Processes of a layout."""
CLIP = 1.0
"""Gradients are clipped alike everywhere; DeepSpeed takes its own setting, not the trainer's."""


def processes(layout: str) -> int:
    """How many the layout has."""
    return 1 if layout == "single" else WORLD


def accelerate_config(layout: str) -> dict[str, Any]:
    """What ``accelerate config`` would have written for this layout, on one machine."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": processes(layout),
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if layout == "ddp":
        return {**config, "distributed_type": "MULTI_GPU"}
    if layout.startswith("fsdp"):
        fsdp = {
            "fsdp_version": int(layout[4]),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": layout.endswith("ram"),
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": True if layout[4] == "2" else "FULL_SHARD",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
        return {**config, "distributed_type": "FSDP", "fsdp_config": fsdp}
    if layout.startswith("zero"):
        deepspeed = {
            "zero_stage": int(layout[-1]),
            "gradient_clipping": CLIP,
            "gradient_accumulation_steps": "auto",  # the trainer's
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero3_save_16bit_model": layout == "zero3",
        }
        return {**config, "distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
    return {**config, "distributed_type": "NO", "num_processes": 1, "use_cpu": True}


def launch(layout: str, folder: Path, *jobs: str, timeout: float = 540) -> list[dict[str, Any]]:
    """What each process of ``worker.py`` saved, in the order of ranks.

    Raises:
        AssertionError: it failed or took too long, with the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "accelerate.yaml"
    config.write_text(yaml.safe_dump(accelerate_config(layout)))
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
    }
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if layout != "single":
        command += ["--main_process_port", "0"]  # any free port: runs do not disturb each other
    command += ["-m", "tests.integration.distributed.worker", layout, str(folder), *jobs]
    output = folder / "output.txt"
    with output.open("w") as log:
        started = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = started.wait(timeout)
        except BaseException as problem:
            os.killpg(started.pid, signal.SIGKILL)  # the launcher and the processes it started
            started.wait()
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise
            code = -1
    said = output.read_text().partition("torch/distributed/elastic")[0]  # the launcher's own trace
    assert code == 0, f"{layout} ended with {code}:\n{said[-4000:]}"
    return saved(layout, folder)


def saved(layout: str, folder: Path) -> list[dict[str, Any]]:
    """What a launch left in its folder."""
    ranks = range(processes(layout))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in ranks]
