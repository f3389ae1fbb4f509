"""The peers of the benchmark compute what their rows say: checked against the oracle.

Float64, a small Llama whose norms run in float64 too, rows padded in front and behind, and two
validation batches with unequally many response tokens, where a mean of means would be wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients, influence
from benchmarks.measure import Run
from benchmarks.models import decoder, random_batch
from benchmarks.peak import fresh_mib
from benchmarks.peers import cases
from benchmarks.peers.agreement import agreement, ours, reference, relative_error, tokenwise
from benchmarks.peers.autograd import per_token_autograd
from benchmarks.peers.cases import ALL, BY_NAME
from benchmarks.peers.peer import Peer, Work, started

RUN = Run(torch.device("cpu"))
OWN = [peer for peer in ALL if not peer.requires]
PACKAGES = [peer for peer in ALL if peer.requires]
TORCH_OF_OLD = "ignore:.torch.jit.script. is deprecated:DeprecationWarning"


def pure_double(width: int = 16, depth: int = 3) -> nn.Module:
    """A Llama without the casts to float32 that transformers' own norms make."""
    model = decoder(width, depth, vocabulary=32, heads=4, length=64).double().eval()
    for block in [*model.model.layers, model.model]:
        for name, module in list(block.named_children()):
            if type(module).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(width, eps=module.variance_epsilon, dtype=torch.float64)
                generator = torch.Generator().manual_seed(len(name))
                norm.weight.data.uniform_(0.5, 1.5, generator=generator)
                setattr(block, name, norm)
    return model


def padded(rows: int, length: int, seed: int, *, front=(), behind=()) -> dict[str, torch.Tensor]:
    """Random rows; ``front`` and ``behind`` are (row, number of padded positions)."""
    batch = random_batch(rows, length, 32, seed=seed)
    mask = torch.ones_like(batch["input_ids"])
    for row, n in front:
        mask[row, :n] = 0
    for row, n in behind:
        mask[row, -n:] = 0
    batch["labels"][mask == 0] = -100
    for row, n in front:  # the first real token has nothing before it
        batch["labels"][row, n] = -100
    return {**batch, "attention_mask": mask}


@cache
def small() -> Work:
    """Three training rows; 4 x 12 and 1 x 20 validation tokens, the first batch with padding."""
    held_out = [
        padded(4, 12, 1, behind=[(0, 5), (1, 2)], front=[(2, 3)]),
        padded(1, 20, 2),
    ]
    batch = padded(3, 14, 0, behind=[(1, 4)], front=[(2, 3)])
    return Work(pure_double(), batch, held_out, layers=2)


@cache
def expected(estimand: str) -> torch.Tensor:
    """By the oracle: one backward a token, label by label and position by position."""
    work = small()
    adapter = find_adapter(work.model)
    direction = gradients.validation_gradient(
        work.model, adapter.forward, list(work.validation), dict(work.weights)
    )
    if estimand == "path":
        modules = {place: work.model.get_submodule(place) for place in work.places}
        psi = influence.exact_influence(work.model, adapter.forward, work.batch, modules, direction)
        return influence.column_sums(psi.matrix)
    values = gradients.label_values(work.model, adapter.forward, work.batch, direction)
    return values if estimand == "label" else values.sum(1)


def run(peer: Peer, work: Work) -> torch.Tensor:
    with started(peer, work) as values:
        return values().detach()


@pytest.mark.parametrize("peer", OWN, ids=lambda peer: peer.name)
def test_own_constructions_are_what_the_oracle_says(peer):
    found = run(peer, small())
    assert relative_error(found, expected(peer.estimand)) < 1e-9


@pytest.mark.filterwarnings(TORCH_OF_OLD)
@pytest.mark.parametrize("peer", PACKAGES, ids=lambda peer: peer.name)
def test_installed_packages_are_what_the_oracle_says(peer):
    absent = peer.missing()
    if absent:
        pytest.skip(absent)
    work = small()
    before = {name: p.clone() for name, p in work.model.named_parameters()}
    wanted = [p.requires_grad for p in work.model.parameters()]
    found = run(peer, work)
    allowed = 1e-9 if "kronfluence" in peer.requires else 1e-5  # bergson sums in float32
    assert relative_error(found, expected(peer.estimand)) < allowed
    assert all(torch.equal(before[name], p) for name, p in work.model.named_parameters())
    assert wanted == [p.requires_grad for p in work.model.parameters()]


@pytest.mark.parametrize("estimand", ["label", "path", "sample"])
def test_reference_is_what_the_oracle_says(estimand):
    assert relative_error(reference(small(), estimand), expected(estimand)) < 1e-9


def test_three_estimands_share_their_row_totals_and_are_not_each_other():
    label, path, sample = (expected(name) for name in ("label", "path", "sample"))
    assert relative_error(label.sum(1), sample) < 1e-12
    assert relative_error(path.sum(1), sample) < 1e-12
    seen = agreement(replace(BY_NAME["gram_ghost_position"], estimand="label"), small(), path)
    assert not seen.agrees  # shifted or not, a column sum is no label value
    assert relative_error(tokenwise(path, small(), "path"), label) > 0.1


def test_ours_beside_a_peer_does_the_whole_work():
    work = small()
    for estimand, estimator in (("label", "label"), ("path", "path")):
        values = ours(work, estimator)()
        wanted = tokenwise(expected(estimand), work, estimand)
        assert relative_error(values.total, wanted) < 1e-9
        rows = values.total.sum(1) + values.unassigned
        assert relative_error(rows, expected("sample")) < 1e-9


def mean_of_means(work: Work):
    """A wrong peer: each validation batch weighs the same, however many tokens it has."""
    several = [replace(work, validation=[batch]) for batch in work.validation]
    runs = [per_token_autograd(one) for one in several]
    return lambda: torch.stack([each() for each in runs]).mean(0)


def first_batch_only(work: Work):
    """A wrong peer: it looks at one validation batch."""
    return per_token_autograd(replace(work, validation=work.validation[:1]))


@pytest.mark.parametrize("wrong", [mean_of_means, first_batch_only])
def test_agreement_notices_a_peer_that_mixes_up_validation_batches(wrong):
    peer = Peer("wrong", "something else", "label", wrong)
    seen = agreement(peer, small(), run(peer, small()))
    assert not seen.agrees
    assert "DOES NOT AGREE" in str(seen)
    alone = replace(small(), validation=small().validation[:1])
    assert agreement(peer, alone, run(peer, alone)).agrees  # right for one batch: that is the trap


# --- rows ----------------------------------------------------------------------------------------


def broken(work: Work):
    """A peer that is installed and does not run."""

    def values():
        raise RuntimeError("no CPU kernel")

    return values


def test_rows_of_peers_that_run_fail_or_are_missing(monkeypatch, capsys):
    absent = Peer("absent", "x", "label", per_token_autograd, requires=("no_such_package_here",))
    unable = Peer("unable", "x", "label", broken)
    peers = (absent, unable, BY_NAME["gram_ghost_position"])
    monkeypatch.setattr(cases, "ALL", peers)
    monkeypatch.setattr(cases, "standard", small)
    failed, timed = cases.peer_time(RUN)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for part in ("absent", "no_such_package_here", 'pip install "alphatoken[bench]"'):
        assert part in line
    assert failed["name"] == "peer_time/unable"
    assert math.isnan(failed["ratio"])
    assert failed["note"] == "RuntimeError: no CPU kernel"
    assert timed["name"] == "peer_time/gram_ghost_position"
    assert timed["agreement"] < 1e-9
    assert 0 < timed["low"] <= timed["ratio"] <= timed["high"]
    assert -1 <= timed["correlation"] < 1
    assert "agrees with ours" in timed["note"]


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_peak_memory_of_a_fresh_process():
    assert 1 < fresh_mib("benchmarks.peers.cases", "ours:path") < 1000
    with pytest.raises(RuntimeError, match="no_such_module"):  # what it said is in the message
        fresh_mib("benchmarks.no_such_module")
