"""What a command says before it starts: time, memory, and the refusal of what cannot fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alphatoken import Scorer, ScorerConfig, fit_fisher
from alphatoken.cli import expecting, main
from alphatoken.errors import ConfigError
from alphatoken.fidelity.cost import measure
from alphatoken.model.capture import find_scope
from alphatoken.model.protocol import find_adapter
from alphatoken.support import machine
from alphatoken.support.machine import Free, require_memory
from alphatoken.train.cost import work_of
from alphatoken.train.scoring_cost import Batches, fisher_flops, scoring_flops

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

EXPECTED = re.compile(r"^expected: about (\d+):(\d\d):(\d\d) .* at most (\S+) GiB of memory", re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.tiny_training import saved

    return saved(tmp_path_factory.mktemp("expecting"), 24)


TRAINING = (
    "--use_cpu --bf16 false --max_steps 1 --report_to none --max_length 64 --validation_rows 4 "
    "--validation_batch_size 2 --retention none --save_strategy no --export_values false"
)
COMMANDS = {
    "score": "score --train_file rows.jsonl --validation_rows 4 --output_dir OUT --no_report",
    "fisher": "fisher --train_file rows.jsonl --output_file OUT --samples 2 --max_new_tokens 4",
    "fisher of labels": "fisher --train_file rows.jsonl --output_file OUT "
    "--samples 2 --labels token",
    "sft": f"sft --train_file rows.jsonl --output_dir OUT {TRAINING}",
    "dpo": f"dpo --train_file pairs.jsonl --output_dir OUT {TRAINING}",
}


def words(name: str, out: Path, *more: str) -> list[str]:
    given = [str(out) if word == "OUT" else word for word in COMMANDS[name].split()]
    return [*given, "--model_name_or_path", "model", *more]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_fit_is_refused_before_any_work(
    name: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What, got, why and remedy in one line; nothing is written; a switch goes on."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(machine, "free_memory", lambda _: Free(2.0**20, "this machine"))
    out = tmp_path / "out"
    assert main(words(name, out)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "this will not fit into memory. Got: " in said
    assert "this machine has 0.000977 GiB for it" in said
    assert "would be killed in the middle of its work" in said
    assert "--no_memory_check goes on all the same" in said
    assert not out.exists()
    monkeypatch.setattr(expecting, "_forward_seconds", lambda *_: 1.0)
    assert main(words(name, out, "--no_memory_check")) == 0
    assert out.exists()
    said = capsys.readouterr().err
    assert "GiB of memory" in said
    assert re.search(r"^expected: about \d+:\d\d:\d\d ", said, re.M)


@pytest.mark.parametrize(
    ("taken", "quickest"), [([0.5, 0.4, 0.3, 0.2, 0.1], 0.2), ([9.0, 0.3, 0.2], 0.3)]
)
def test_a_forward_that_was_held_up_is_not_the_speed(
    taken: list[float], quickest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four forwards where they are short, two where that alone takes long."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    clock = iter(taken)
    monkeypatch.setattr(expecting, "timed", lambda work: (work(), next(clock))[1])
    assert expecting._forward_seconds(find_adapter(model), 1, 8) == quickest


def test_the_time_said_is_flops_over_the_speed_of_a_forward(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A forward ten times as slow: ten times the seconds; rows that are done are not counted."""
    monkeypatch.chdir(folder)

    def said(seconds: float, *more: str) -> float:
        monkeypatch.setattr(expecting, "_forward_seconds", lambda *_: seconds)
        assert main(words("score", tmp_path / "out", "--shard_size", "4", *more)) == 0
        found = EXPECTED.search(capsys.readouterr().err)
        assert found is not None
        hours, minutes, rest = (int(part) for part in found.groups()[:3])
        assert 0.1 < float(found[4]) < 8  # of this process with its libraries, around a tiny model
        return float(3600 * hours + 60 * minutes + rest)

    once = said(10.0)
    assert said(100.0, "--overwrite_output") == pytest.approx(10 * once, rel=0.02)
    files = sorted((tmp_path / "out" / "values").iterdir())
    for path in files[-2:]:
        path.unlink()
    assert said(10.0, "--resume") < once
    capsys.readouterr()
    assert main(words("score", tmp_path / "out", "--shard_size", "4", "--resume", "--quiet")) == 0
    assert "expected" not in capsys.readouterr().err


# --- what is counted ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    shape = {
        "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


def drawn(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(512, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("config", "off"),
    [
        (ScorerConfig("path", layers=2), 0.05),
        (ScorerConfig("direct", layers=2), 0.05),
        (ScorerConfig("alphatoken", layers=2), 0.10),
        (ScorerConfig("label", layers=2), 0.10),
        (ScorerConfig("label", layers="all", parameters="all"), 0.10),
        (ScorerConfig("direct", layers=2, standard_errors=True), 0.10),
        (ScorerConfig("label", layers=2, standard_errors=True), 0.10),
    ],
    ids=lambda value: f"{value.estimator} {value.parameters}" if hasattr(value, "layers") else "",
)
def test_flops_of_scoring_are_those_that_torch_counts(
    model: LlamaForCausalLM, config: ScorerConfig, off: float
) -> None:
    """Rows valued one after another; attention is small here, and counted as causal."""
    batch, validation = drawn(4, 24, 0), [drawn(2, 24, 1), drawn(2, 24, 2)]
    scorer = Scorer(model, validation, None, config)
    scorer.score(batch)  # the proofs run once
    scorer.refresh()
    counted = measure(lambda: scorer.score(batch), repeats=0).flops
    adapter = find_adapter(model)
    held = Batches(2, 24, 2, 96)
    found = scoring_flops(
        work_of(adapter, 24),
        find_scope(adapter, config.layers),
        config,
        Batches(4, 24, 1, 96),
        held,
    )
    assert found == pytest.approx(counted, rel=off)


def test_flops_of_a_fisher_are_those_that_torch_counts(model: LlamaForCausalLM) -> None:
    batch = drawn(3, 24, 0)
    adapter = find_adapter(model)
    fit: Callable[[], Any] = lambda: fit_fisher(model, batch, samples=3, layers=2, labels="token")  # noqa: E731
    counted = measure(fit, repeats=0).flops
    found = fisher_flops(work_of(adapter, 24), find_scope(adapter, 2), 72)
    assert found == pytest.approx(counted, rel=0.1)


# --- the machine ----------------------------------------------------------------------------------


def test_what_is_free_is_the_least_that_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's memory, or what a container's limit leaves; and the process's own."""
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2500\n")
    (tmp_path / "memory.stat").write_text("anon 1700\ninactive_file 300\nactive_file 100\n")
    assert machine._left_of_group(tmp_path) == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._left_of_group(tmp_path) is None
    assert machine._left_of_group(tmp_path / "none") is None
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:  9 kB\nMemAvailable:       7 kB\n")
    assert machine._number(table, "MemAvailable") == 7 * 1024
    assert machine._number(table, "SwapFree") is None
    monkeypatch.setattr(machine, "_number", lambda _, name: 50.0 if name == "VmRSS" else 200.0)
    for group, free in ((None, 250.0), (30.0, 80.0), (500.0, 250.0)):
        monkeypatch.setattr(machine, "_left_of_group", lambda group=group: group)
        assert machine.free_memory(torch.device("cpu")) == Free(free, "this machine")


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda _: Free(100.0, "this machine"))
    cpu = torch.device("cpu")
    require_memory(60.0, cpu, peak="now", remedy="less")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 times"):
        require_memory(60.0, cpu, peak="now", remedy="less")
