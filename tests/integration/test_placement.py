"""What runs before training: where the model is meanwhile, and how processes add up their books."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from alphatoken.train import fisher_cache, policy_stage, records
from alphatoken.train.ledger import ValueLedger
from alphatoken.train.placement import on_accelerator
from alphatoken.train.policy import PolicySettings
from alphatoken.train.records import RunRecords
from alphatoken.train.sft import AlphaSFTTrainer
from alphatoken_lab.methods.stm import STM
from tests.integration import tiny_training as tiny
from tests.integration.test_ledger import Doc, add, visit

GPU = torch.device("cuda", 0)


class Moves:
    """Stands for the accelerator: notes where a model is sent, and moves nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[str] = []

        def to(model: nn.Module, place: Any) -> nn.Module:
            self.places.append(str(place))
            return model

        monkeypatch.setattr(nn.Module, "to", to)


def test_a_model_that_waits_on_the_cpu_is_taken_there_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, moves = tiny.model(), Moves(monkeypatch)

    def inside() -> None:
        with on_accelerator(model, GPU):
            assert moves.places == ["cuda:0"]
            raise KeyError("an error inside")

    with pytest.raises(KeyError):
        inside()
    assert moves.places == ["cuda:0", "cpu"]


def test_others_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(monkeypatch)
    cut = tiny.model()
    next(cut.parameters()).ds_id = 0  # type: ignore[attr-defined]
    with torch.device("meta"):
        elsewhere = tiny.model()
    for model, device in ((cut, GPU), (elsewhere, GPU), (tiny.model(), torch.device("cpu"))):
        with on_accelerator(model, device):
            pass
    assert moves.places == []


def test_fisher_and_static_passes_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of a run's passes before training are inside."""
    seen: list[tuple[str, Any]] = []

    def spying(module: Any, inner: str) -> None:
        @contextmanager
        def spy(model: nn.Module, device: torch.device) -> Iterator[None]:
            seen.append((inner, device))
            yield
            seen.append((inner, "left"))

        monkeypatch.setattr(module, "on_accelerator", spy)

    spying(fisher_cache, "fisher")
    spying(policy_stage, "policy")
    few = {"fisher_samples": 2, "fisher_max_new_tokens": 2}
    tiny.sft(tmp_path / "a", train_dataset=tiny.sft_rows(8), **few)
    more = {"train_dataset": tiny.sft_rows(8), "retention": "none"}
    tiny.made(AlphaSFTTrainer, tmp_path / "b", policy=STM(PolicySettings("budget", 0.5)), **more)
    cpu = torch.device("cpu")
    assert seen == [("fisher", cpu), ("fisher", "left"), ("policy", cpu), ("policy", "left")]


class Two:
    """One of two processes; what the first sends is the other's, where this is the second."""

    world = 2

    def __init__(self, rank: int, of_the_other: ValueLedger) -> None:
        self.rank, self._other = rank, of_the_other

    def broadcast_object(self, item: Any, source: int) -> Any:
        return item if source == self.rank else self._other


@pytest.mark.parametrize("rank", [0, 1])
def test_ledgers_of_processes_add_up(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    both, ledgers = ValueLedger(), (ValueLedger(), ValueLedger())
    documents = [Doc((1, 0, 1, 1), (False, True, True, True)), Doc((0, 1, 1), (False, True, True))]
    for seed, ledger in enumerate(ledgers):
        add(ledger, documents, visit(2, seed), "right", range(2))
        both.merge(ledger)
    monkeypatch.setattr(records, "Ranks", lambda accelerator: Two(rank, ledgers[1 - rank]))
    run = RunRecords.__new__(RunRecords)
    args = SimpleNamespace(should_save=rank == 0)
    run._trainer = SimpleNamespace(args=args, accelerator=None)  # type: ignore[assignment]
    run.ledger = ledgers[rank]
    before = run.ledger.state_tensors()
    found = run._all_ledgers()
    assert (found is None) == (rank == 1), "one process writes"
    for one, expected in ((run.ledger, before), (found, both.state_tensors())):
        if one is not None:
            assert all(torch.equal(t, expected[n]) for n, t in one.state_tensors().items())
