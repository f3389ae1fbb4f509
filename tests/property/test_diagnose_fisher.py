"""The ``fisher`` diagnostic: a Fisher that equals the Hessian and one that does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn

from alphatoken import FisherDrift, ScorerConfig, fit_fisher
from alphatoken.data import Example, Row
from alphatoken.diagnose import fisher as diagnostic
from alphatoken.diagnose.diagnosis import Diagnosis, Table
from alphatoken.diagnose.statistics import Estimate
from alphatoken.diagnose.subject import Subject
from alphatoken.direction.sampling import sample_responses
from alphatoken.errors import InputError
from alphatoken.oracle.enumeration import exact_fisher
from alphatoken.oracle.gradients import unflatten
from alphatoken.oracle.retention import hessian, retention_loss
from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder
from tests.property.tolerance import close

pytestmark = pytest.mark.usefixtures("few_draws")

MODEL = 1e-9
CONTEXTS, LABELS, READ = 8, 16, 4
DOWN = "layers.0.mlp.down_proj.weight"
TINY = diagnostic.Options(rows=CONTEXTS * LABELS, max_new_tokens=4)


def example(ids: Sequence[int], prompt: int = 1) -> Example:
    ids = list(ids)
    return Example(Row(0, "row", ()), ids, [-100] * prompt + ids[prompt:])


# --- a Fisher that equals the Hessian --------------------------------------------------------


def quadratic() -> ReferenceDecoder:
    """A decoder whose retention loss is quadratic around it, with a diagonal Hessian.

    Token z puts one unit z of the MLP to a_z, whatever came before (no attention). The head reads
    dimensions that only W_down writes, and W_down is zero there: logits are zero, predictions are
    uniform, and linear in W_down. Columns of the head are orthogonal and add up to zero (Hadamard),
    of size s_o. So H = F = s_o^2 E[a_z^2 at z], at (o, z), and nothing off the diagonal; the square
    of a sampled gradient is that number exactly, whatever label is drawn.
    """
    config = DecoderConfig(
        vocabulary=LABELS, layers=1, hidden=CONTEXTS + READ, mlp="plain", mlp_width=CONTEXTS,
        norm="none", positions="none", end_token=None,
    )  # fmt: skip
    model = ReferenceDecoder(config, 1)
    block = model.layers[0]
    size = torch.linspace(0.7, 2.2, CONTEXTS, dtype=torch.float64)
    scale = torch.tensor([0.2, 0.5, 1.0, 2.0], dtype=torch.float64)
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[:CONTEXTS, :CONTEXTS] = torch.diag(size)
        block.attention.v_proj.weight.zero_()
        block.attention.requires_grad_(False)
        block.mlp.up_proj.weight.zero_()
        block.mlp.up_proj.weight[:, :CONTEXTS] = torch.eye(CONTEXTS, dtype=torch.float64)
        block.mlp.down_proj.weight.zero_()
        model.head.weight.zero_()
        signs = torch.as_tensor(hadamard(LABELS)[:, 1 : READ + 1], dtype=torch.float64)
        model.head.weight[:, CONTEXTS:] = signs * scale
    return model


def after(model: ReferenceDecoder, size: float = 1e-4) -> ReferenceDecoder:
    """The same after a small step of W_down where the head reads it."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    step = torch.randn(READ, CONTEXTS, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        moved.layers[0].mlp.down_proj.weight[CONTEXTS:] += size * step
    return moved


def rows_to_value() -> list[Example]:
    """Permutations of all contexts, then a label: each context is read once a row.

    A Fisher fitted on them is 8 times that of the retention rows, whose responses are one token:
    the same ranking on another scale.
    """
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(12):
        order = torch.randperm(CONTEXTS, generator=generator).tolist()
        label = int(torch.randint(LABELS, (1,), generator=generator))
        rows.append(example([*order, label]))
    return rows


def every_label() -> list[Example]:
    """The model's own label distribution, enumerated: each context with each of its labels."""
    return [example([z, y]) for z in range(CONTEXTS) for y in range(LABELS)]


def planted(**changes: Any) -> Subject:
    model = quadratic()
    given: dict[str, Any] = {
        "model": after(model),
        "reference": model,
        "train": rows_to_value(),
        "validation": rows_to_value()[:2],
        "retention": {"own": every_label()},
        "config": ScorerConfig(layers=1),
        "batch_size": 64,
        "fisher_samples": 48,
    }
    return Subject(**given | changes)


def exact() -> dict[str, Tensor]:
    """The diagonal Fisher by enumeration, of all scored weights."""
    model = quadratic()
    named = dict(model.named_parameters())
    scored = [linear.weight_name for linear in ReferenceAdapter(model).scored_linears([0])]
    weights = {name: named[name] for name in scored}
    every = [torch.tensor([z]) for z in range(CONTEXTS)]
    fisher = exact_fisher(model, lambda batch: model(**batch), every, 1, weights, LABELS)
    return unflatten(fisher.diagonal(), weights)


def drift_of(fisher: Mapping[str, Tensor]) -> FisherDrift:
    named = dict(quadratic().named_parameters())
    return FisherDrift(fisher, {n: named[n].detach() for n in fisher})


def test_the_plant_is_what_it_says() -> None:
    """Hessian of the enumerated rows = diagonal Fisher, by the oracles; the gradient is zero."""
    model = quadratic()
    parameters = {DOWN: dict(model.named_parameters())[DOWN]}
    subject = planted()

    def loss() -> Tensor:
        return retention_loss(lambda b: model(**b), subject.batches(every_label()))

    dense = hessian(loss, parameters)
    fisher = exact()[DOWN].flatten()
    assert float(fisher.max()) > 100 * float(fisher[fisher > 0].min()) > 0
    close(dense, torch.diag(fisher), fisher.max(), MODEL, name="H = F, diagonal")
    (gradient,) = torch.autograd.grad(loss(), list(parameters.values()))
    close(gradient, torch.zeros_like(gradient), 1.0, 1e-14, name="r_0 = 0")


@pytest.fixture(scope="module")
def found(few_draws: None) -> Diagnosis:
    """The whole pipeline, the Fisher fitted by the library."""
    return diagnostic.diagnose(planted(), TINY)


def test_a_fisher_that_equals_the_hessian_ranks_as_the_oracle_and_bare_drift_does_not(
    found: Diagnosis,
) -> None:
    records = {(r["proxy"], r["retention"]): r for r in found.table("agreement").records()}
    pooled = {proxy: r for (proxy, of), r in records.items() if of == diagnostic.POOLED}
    assert pooled["diagonal, token labels"]["spearman"] >= 0.999
    assert records["diagonal, token labels", "oracle own"]["spearman"] >= 0.999
    assert pooled["diagonal"]["spearman"] >= 0.95  # of free samples the contexts are drawn too
    assert pooled["kronecker"]["spearman"] >= 0.98  # its S_F has off-diagonal noise
    assert pooled["none"]["spearman"] < 0.8
    assert pooled["diagonal, token labels"]["overlap"] >= 0.95
    for record in records.values():
        assert record["spearman_low"] <= record["spearman"] <= record["spearman_high"]


# --- which Fisher -------------------------------------------------------------------------------


def test_fishers_are_fitted_on_the_held_out_prompts_and_not_on_the_diagnosed_rows() -> None:
    """F is the second moment of what was read: zero at every context that no prompt holds.

    Prompts are of the first half of the contexts; the training rows read all of them. The main
    Fishers are of free samples, as the paper says.
    """
    held = [example([z, LABELS - 1]) for z in range(CONTEXTS // 2)]
    found, _ = diagnostic.variants(planted(prompts=held, fisher_samples=24), 1)
    for name, drift in found.items():
        factors = drift.structure == "kronecker"
        read = drift.factors[DOWN][1].diagonal() if factors else drift.fisher[DOWN].sum(0)
        known = read.nonzero().flatten().tolist()
        assert known == list(range(CONTEXTS // 2)), name
    everywhere = planted().fitted_fisher().fisher[DOWN].sum(0)
    assert bool((everywhere > 0).all())
    assert {name: drift.metadata["labels"] for name, drift in found.items()} == {
        "diagonal": "sequence", "kronecker": "sequence", "diagonal, token labels": "token",
    }  # fmt: skip
    given = drift_of(exact())
    assert diagnostic.variants(planted(fisher=given), 1)[0]["diagonal"] is given


def test_two_structures_have_the_responses_that_each_would_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, though they are drawn once."""
    drawn: list[int] = []

    def counted(adapter: Any, prompts: Any, *more: Any) -> Any:
        drawn.append(len(prompts))
        return sample_responses(adapter, prompts, *more)

    monkeypatch.setattr("alphatoken.direction.fisher.sample_responses", counted)
    rows = [example([z, z + 1, 3]) for z in range(CONTEXTS)]
    subject = planted(prompts=rows, fisher_samples=12, batch_size=4)
    found = {
        structure: subject.fitted_fisher(structure, labels="sequence", max_new_tokens=5)
        for structure in ("diagonal", "kronecker")
    }
    assert drawn == [4, 4, 4]
    (batch,) = subject.batches(rows, len(rows))
    for structure, drift in found.items():
        alone = fit_fisher(
            quadratic(), batch, samples=12, layers=1, structure=structure, labels="sequence",
            max_new_tokens=5, batch_size=4, progress=False,
        )  # fmt: skip
        for name, part in alone.fisher.items() if structure == "diagonal" else ():
            assert torch.equal(part, drift.fisher[name]), name
        for name, factors in alone.factors.items() if structure == "kronecker" else ():
            assert all(map(torch.equal, factors, drift.factors[name])), name


def test_the_notes_say_which_rows_the_fishers_are_of(found: Diagnosis) -> None:
    assert any("No prompts were held out" in note for note in found.notes)
    held = diagnostic.diagnose(planted(prompts=every_label()), TINY)
    said = (
        f"the prompts of {CONTEXTS * LABELS} rows that are not valued; whether the model was tuned"
    )
    assert any(said in note for note in held.notes)
    assert not any("neither tuned on" in note for note in held.notes)  # this nobody told it


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "reference", "cause"),
    [
        (quadratic, quadratic, "has not left its reference"),
        (
            quadratic,
            lambda: ReferenceDecoder(DecoderConfig(vocabulary=LABELS, layers=1, fused_qkv=True), 0),
            "not the same kind of model",
        ),
    ],
)
def test_a_reference_that_says_nothing_is_refused(
    model: Callable[[], nn.Module], reference: Callable[[], nn.Module], cause: str
) -> None:
    with pytest.raises(InputError, match=cause):
        diagnostic.diagnose(planted(model=model(), reference=reference()), TINY)


# --- pieces -------------------------------------------------------------------------------------


def test_a_random_choice_overlaps_as_counted() -> None:
    found = diagnostic.random_overlap(40, 0.3)
    assert found.value == pytest.approx(12 / 40)
    generator = np.random.default_rng(0)
    drawn = [
        np.intersect1d(generator.permutation(40)[:12], range(12)).size / 12 for _ in range(4000)
    ]
    assert np.mean(drawn) == pytest.approx(found.value, abs=4 * np.std(drawn) / 4000**0.5)
    inside = np.mean([found.low <= share <= found.high for share in drawn])
    assert inside >= 0.95
    assert not diagnostic.random_overlap(5, 0.5).defined


def test_the_fisher_is_judged_by_its_interval() -> None:
    for low, high, verdict in (
        (0.85, 0.95, "as real retention rows do"),
        (-0.85, -0.75, "the wrong way round"),
        (-0.04, 0.06, "not clearly as"),
    ):
        score = Estimate((low + high) / 2, low, high, 40)
        record = {"retention": diagnostic.POOLED, "proxy": "diagonal", "spearman": score}
        conclusion = diagnostic._conclusion(Table.of("agreement", "", [record]))
        assert verdict in conclusion
        assert str(score) in conclusion
