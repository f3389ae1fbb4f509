"""A run of AlphaSFTTrainer in bf16 beside TRL's own, on bytes of the standard library."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from alphatoken.data.stdlib import code_rows
from benchmarks.measure import Run, timed

Row = dict[str, Any]


def training(run: Run) -> Iterator[Row]:
    """TRL's trainer twice; ours with all tokens, which must end where TRL's does; ours with half.

    On a CPU to the last bit. The backward of CUDA's attention kernels adds up in any order, so that
    there the last losses are compared, and TRL's second run shows how far its own are apart. The
    first run warms the device up; its seconds are not to be compared.
    """
    steps, rows = (3, 24) if run.quick else (60, 960)
    reference: dict[str, torch.Tensor] | None = None
    end = math.nan
    runs = {"TRL, to warm up": None, "TRL": None, "all tokens": 1.0, "half of the tokens": 0.5}
    for name, ratio in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(run, folder, ratio, steps, rows)
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = timed(trainer.train)
            weights = {n: p.detach().float().cpu() for n, p in trainer.model.named_parameters()}
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            del trainer  # or its peak would hold the memory of the one before
            gc.collect()
        apart = None
        if reference is None:
            reference, end = weights, losses[-1]
        elif ratio in (None, 1.0):
            apart = max(float((weights[n] - reference[n]).abs().max()) for n in weights)
        exact = run.device.type == "cpu"
        same = apart is None or (apart == 0 if exact else abs(losses[-1] - end) <= 0.05 * end)
        finite = all(math.isfinite(loss) for loss in losses)
        fell = run.quick or losses[-1] < losses[0]
        peak = torch.cuda.max_memory_allocated() / 2**20 if run.device.type == "cuda" else None
        yield {
            "run": name,
            "seconds_a_step": seconds / steps,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "apart": apart,
            "memory_mib": peak,
            "ok": finite and fell and same,
        }


def _trainer(run: Run, folder: str, ratio: float | None, steps: int, rows: int) -> Any:
    from datasets import Dataset
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer

    on_cpu = run.device.type == "cpu"
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    drawn = [
        {"prompt": row.prompt[:60], "completion": row.response[:60]} for row in code_rows(rows + 48)
    ]

    common: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 8, "max_steps": steps,
        "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "bf16": not on_cpu, "use_cpu": on_cpu, "disable_tqdm": True, "seed": 0,
        "dataloader_pin_memory": False, "log_level": "error",
    }  # fmt: skip
    made: dict[str, Any] = {
        "model": model,
        "train_dataset": Dataset.from_list(drawn[48:]),
        "processing_class": tokenizer,
    }
    if ratio is None:
        return _quiet(SFTTrainer(args=SFTConfig(**common), **made))
    config = AlphaSFTConfig(**common, keep_ratio=ratio, retention="none", held_out_steps=0)
    return _quiet(
        AlphaSFTTrainer(args=config, validation_dataset=Dataset.from_list(drawn[:48]), **made)
    )


def _quiet(trainer: Any) -> Any:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer
