"""A Fisher left on disk in real processes and real trainers: less memory, the same run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from alphatoken.cli import main
from alphatoken.demo.model import make_model, make_tokenizer
from alphatoken.demo.world import draw_exchanges
from alphatoken.errors import ConfigError
from alphatoken.report import read_values
from alphatoken.train import AlphaSFTConfig
from tests.integration import tiny_training as tiny
from tests.places import nightly
from tests.rows import jsonl

PROCESS = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from alphatoken import FisherDrift, Scorer, ScorerConfig

what, path = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=512, intermediate_size=1360, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
))
ids = torch.arange(1, 33).reshape(2, 16)
batch = {"input_ids": ids, "labels": ids.clone()}
if what == "write":
    weights = {n: p.detach() for n, p in model.model.layers.named_parameters(prefix="model.layers")
               if p.dim() == 2}
    FisherDrift({n: torch.rand_like(w) for n, w in weights.items()},
                {n: w + 0.01 * torch.randn_like(w) for n, w in weights.items()}).save(path)
    print(json.dumps(4 * sum(w.numel() for w in weights.values())))
else:
    read = FisherDrift.load if what == "load" else FisherDrift.open
    config = ScorerConfig(layers="all", objective="stability", estimator="direct",
                          offload="stream" if what == "stream" else "none")
    scorer = Scorer(model, None, read(path), config)
    total = scorer.score(batch).total
    # The proofs of the first use held gradients of everything; the peak is of the use after it.
    open("/proc/self/clear_refs", "w").write("5")
    assert scorer.score(batch).total.equal(total)
    peak = next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]
    print(json.dumps([int(peak) * 1024, total.double().tolist()]))
"""


def in_processes(path: Path, *kinds: str) -> list[Any]:
    """What fresh processes print that run beside each other."""
    # glibc's moving threshold would keep freed matrices: a peak that is a matter of luck.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, what, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for what in kinds
    ]
    found = []
    for process in running:
        out, told = process.communicate(timeout=300)
        assert process.returncode == 0, told
        found.append(json.loads(out.strip().splitlines()[-1]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's VmHWM")
def test_peak_memory_falls_by_what_is_not_held(tmp_path: Path) -> None:
    """F, W_ref and V are one size S: load holds 3 S, open S (V), streaming a matrix of each."""
    path = tmp_path / "fisher.safetensors"
    (size,) = in_processes(path, "write")
    assert 2 * size > 170 * 2**20
    (load, first), (opened, second), (stream, third) = in_processes(path, "load", "open", "stream")
    assert first == second == third
    assert load - opened == pytest.approx(2 * size, rel=0.1)
    assert opened - stream == pytest.approx(size, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["diagonal", pytest.param("kronecker", marks=nightly)])
def test_a_run_with_its_fisher_on_disk_is_the_same_run(retention: str, tmp_path: Path) -> None:
    """Weights after four steps of SFT to the bit, several micro-batches a step."""
    found = []
    for offload in (False, True):
        more = {"retention": retention, "gradient_accumulation_steps": 2}
        more |= {"fisher_offload": offload, "fisher_cache": str(tmp_path / "cache")}
        trainer = tiny.sft(tmp_path / f"{retention}-{offload}", **more)
        assert trainer.rows.fisher.streamed == offload
        trainer.train()
        found.append((tiny.weights(trainer.model), trainer.state.log_history))
    (one, logs), (two, others) = found
    assert all(torch.equal(w, two[name]) for name, w in one.items())
    drifts = [[x.get("train/drift", x.get("drift")) for x in log] for log in (logs, others)]
    assert drifts[0] == drifts[1]


@pytest.mark.slow
@nightly
def test_dpo_runs_with_its_fisher_on_disk(tmp_path: Path) -> None:
    found = []
    for offload in (False, True):
        more = {"fisher_offload": offload, "fisher_cache": str(tmp_path / "cache")}
        trainer = tiny.dpo(tmp_path / f"{offload}", ref_model=tiny.model(), **more)
        trainer.train()
        found.append(tiny.weights(trainer.model))
    assert all(torch.equal(w, found[1][name]) for name, w in found[0].items())


def test_options_that_contradict_it_are_refused(tmp_path: Path) -> None:
    for more in ({"retention": "data"}, {"direction_steps": 2}):
        with pytest.raises(ConfigError, match="fisher_offload"):
            AlphaSFTConfig(**tiny.options(tmp_path), fisher_offload=True, **more)


def test_the_score_command_reads_it_from_disk(tmp_path: Path) -> None:
    """The same values and settings, so that a run may be resumed with or without it."""
    tokenizer, model = make_tokenizer(), make_model(make_tokenizer())
    model.save_pretrained(tmp_path / "reference")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "moved")
    for name in ("reference", "moved"):
        tokenizer.save_pretrained(tmp_path / name)
    for name, count in (("train", 8), ("validation", 4)):
        rows = [
            {"prompt": e.prompt, "response": " ".join(e.response)}
            for e in draw_exchanges(count, random.Random(count))
        ]
        jsonl(tmp_path / f"{name}.jsonl", rows)
    fisher = tmp_path / "fisher.safetensors"
    fit = ["fisher", "--model_name_or_path", "reference", "--train_file", "validation.jsonl"]
    fit += ["--output_file", fisher]
    words = [tmp_path / w if w in ("reference", "validation.jsonl") else w for w in fit]
    assert main([str(w) for w in [*words, "--samples", 3, "--max_new_tokens", 4, "--quiet"]]) == 0
    score = [
        "score", "--model_name_or_path", tmp_path / "moved",
        "--train_file", tmp_path / "train.jsonl",
        "--validation_file", tmp_path / "validation.jsonl", "--fisher_file", fisher,
        "--per_device_train_batch_size", 4, "--quiet", "--no_report",
    ]  # fmt: skip
    values = []
    for name, more in (("whole", []), ("offload", ["--fisher_offload"])):
        assert main([str(w) for w in [*score, "--output_dir", tmp_path / name, *more]]) == 0
        values.append([e.values for e in read_values(tmp_path / name / "values")])
    assert len(values[0]) == 8
    for one, two in zip(*values, strict=True):
        assert all((one[key] == two[key]).all() for key in one)
    again = [*score, "--output_dir", tmp_path / "whole", "--resume", "--fisher_offload"]
    assert main([str(w) for w in again]) == 0
