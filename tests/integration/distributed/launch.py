"""Start workers as ``accelerate launch`` does, in one process or more, and read what they found.

The environment of each is accelerate's own; the processes are forked from a server that has
imported the libraries (``tests/forked.py``), which saves ten seconds each.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import patch_environment
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from tests.forked import SERVER

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
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": layout.endswith("ram"),
            "fsdp_offload_params": False,
            "fsdp_reshard_after_forward": True,
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


OWN = {
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def environment(layout: str, config: Path) -> dict[str, str]:
    """What ``accelerate launch`` puts into the environment of every process."""
    words = ["--config_file", str(config), "--main_process_port", "0", "-m", "worker"]
    with patch_environment(**OWN):
        args, found, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        if layout == "single":
            return dict(prepare_simple_launcher_cmd_env(args)[1])
        if layout.startswith("zero"):
            fields = ",".join([*found.deepspeed_config, "mixed_precision"])
            args.deepspeed_fields_from_accelerate_config = fields
            made = dict(prepare_deepspeed_cmd_env(args)[1])
        else:
            made = dict(prepare_multi_gpu_env(args))
    size, port = str(processes(layout)), str(args.main_process_port)
    group = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return made | group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _process(layout: str, folder: Path, jobs: tuple[str, ...], given: dict[str, str]) -> None:
    os.environ |= given
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    from tests.integration.distributed.worker import work

    work(layout, folder, jobs)


def launch(layout: str, folder: Path, *jobs: str, timeout: float = 540) -> list[dict[str, Any]]:
    """What each process of ``worker.py`` saved, in the order of ranks.

    Raises:
        AssertionError: it failed or took too long, with the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "accelerate.yaml"
    config.write_text(yaml.safe_dump(accelerate_config(layout)))
    given = environment(layout, config)
    started = []
    for rank in range(processes(layout)):
        own = {} if layout == "single" else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (layout, folder, jobs, given | own)
        started.append(SERVER.Process(target=_process, args=arguments))
        started[-1].start()
    end = time.monotonic() + timeout
    try:
        while any(p.is_alive() for p in started) and not any(p.exitcode for p in started):
            assert time.monotonic() < end, f"{layout} takes too long"
            started[0].join(0.2)
    finally:
        for process in started:
            process.kill()
            process.join()
    codes = [process.exitcode for process in started]
    assert not any(codes), (
        f"{layout} ended with {codes}:\n" + ((folder / "output.txt").read_text()[-4000:])
    )
    return saved(layout, folder)


def saved(layout: str, folder: Path) -> list[dict[str, Any]]:
    """What a launch left in its folder."""
    ranks = range(processes(layout))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in ranks]
