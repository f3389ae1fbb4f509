"""Every estimator through ``Scorer`` against the influence matrix; what it refuses and leaves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import AlphaTokenWarning, CoverageError, FisherDrift, Scorer, ScorerConfig
from alphatoken.diagnose.value_propagation import causal_columns
from alphatoken.model.batch import read_batch
from alphatoken.oracle import gradients, influence, propagation
from tests.property.decoder import Attention, ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    EVERY,
    LAMBDA,
    MODEL,
    Setup,
    compare_values,
    drift_of,
    forward_of,
    layer_indices,
    make_scorer,
    oracle_influence,
    parameters_of,
    quiet,
    quiet_score,
    readout,
    scored,
    seen_attention,
    setups,
    summed_loss,
    truth,
    zeros,
)
from tests.property.strategies import PADDED, SEEDS, Case, make_case
from tests.property.tolerance import close

Document = tuple[Tensor, Tensor]
"""(ids, labels) of one document, its first token never labelled."""


def documents(batch: Mapping[str, Tensor]) -> list[tuple[list[tuple[int, int]], Document]]:
    """Every document of a batch: where its tokens stand, and the document."""
    ids, labels = batch["input_ids"], batch["labels"]
    real = batch.get("attention_mask", torch.ones_like(ids))
    positions = batch.get("position_ids")
    found = []
    for b in range(len(ids)):
        places: list[tuple[int, int]] = []
        for t in range(ids.shape[1]):
            if not real[b, t]:
                continue
            restart = (
                positions is not None and places and positions[b, t] != positions[b, t - 1] + 1
            )
            if restart:
                found.append(places)
                places = []
            places.append((b, t))
        if places:
            found.append(places)
    result = []
    for places in found:
        rows, columns = (torch.tensor(x) for x in zip(*places, strict=True))
        own = labels[rows, columns].clone()
        own[0] = -100
        result.append((places, (ids[rows, columns], own)))
    return result


def lay_out(docs: Sequence[Document], side: str, width: int, seed: int) -> dict[str, Tensor]:
    """One document a row, random tokens as padding on one side, positions from 0 in each."""
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "input_ids": torch.randint(3, (len(docs), width), generator=generator),
        "labels": torch.full((len(docs), width), -100),
        "attention_mask": torch.zeros(len(docs), width, dtype=torch.long),
        "position_ids": torch.zeros(len(docs), width, dtype=torch.long),
    }
    for row, (ids, labels) in enumerate(docs):
        where = span(len(ids), side, width)
        batch["input_ids"][row, where] = ids
        batch["labels"][row, where] = labels
        batch["attention_mask"][row, where] = 1
        batch["position_ids"][row, where] = torch.arange(len(ids))
    return batch


def span(length: int, side: str, width: int) -> slice:
    return slice(width - length, width) if side == "left" else slice(0, length)


def other_padding(batch: Mapping[str, Tensor], shift: int) -> dict[str, Tensor]:
    """The batch with another token wherever nothing is read."""
    if "attention_mask" not in batch:
        return dict(batch)
    ids = batch["input_ids"]
    other = torch.where(batch["attention_mask"] == 0, (ids + shift) % 3, ids)
    return {**batch, "input_ids": other}


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a user could notice on a model and on torch, in comparable form."""
    seen: dict[str, Any] = {
        "random": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
    }
    for name, p in model.named_parameters(remove_duplicate=False):
        grad = None if p.grad is None else (id(p.grad), p.grad.tolist())
        seen[name] = (id(p), p.data_ptr(), p._version, p.requires_grad, p.tolist(), grad)
    for name, module in model.named_modules():
        hooks = [
            list(getattr(module, kind))
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
                         "_backward_pre_hooks", "_forward_hooks_with_kwargs",
                         "_forward_pre_hooks_with_kwargs")
        ]  # fmt: skip
        override = module.override if isinstance(module, Attention) else None
        seen[f"{name} (module)"] = (module.training, hooks, override, sorted(module.__dict__))
    return seen


def disturb(model: nn.Module, seed: int) -> None:
    """A state that must survive: mixed modes, a frozen parameter, gradients on some."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        module.training = bool(torch.rand((), generator=generator) < 0.5)
    for p in model.parameters():
        if torch.rand((), generator=generator) < 0.5:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    embedding = next(model.parameters())
    embedding.requires_grad_(False)


class StopError(Exception):
    """Raised on purpose inside a forward or a context."""


def _check_after_a_failing_forward(setup: Setup, scorer: Scorer, model: ReferenceDecoder) -> None:
    def stop(*_: Any) -> None:
        raise StopError

    last = model.layers[-1]
    assert isinstance(last.mlp, nn.Module)
    for target in (scorer, make_scorer(setup, scorer.config.estimator, model=model)):
        target.refresh()
        handle = last.mlp.register_forward_pre_hook(stop)
        before = snapshot(model)
        try:
            target.score(setup.case.batch)
        except StopError:
            pass
        else:
            raise AssertionError("the forward did not stop")
        assert snapshot(model) == before, "after an exception in the forward"
        handle.remove()


FULL = Setup(
    make_case(
        ("pprrrrr.", "..prprr."), (("pprr",), ("prrr.", "..prr")), layers=3, heads=4, kv_heads=2,
        qk_norm=True, softcap=2.0, sinks=True, windows=(None, 3), bias=True, repeated_linear=True,
    ),
    (0, 2),
)  # fmt: skip
TWICE = Setup(make_case(("pprrr",), (("pprr",),), layers=3, repeated_block=True), 1)
FUSED = Setup(make_case(("pprrr",), (("pprr",),), fused_qkv=True, transposed=True, bias=True), 1)
TIED = Setup(
    make_case(
        ("pprrr", "..prr"), (("pprrr",), ("prrr.", "..prr")),
        mlp="gated", bias=True, tied_linears=True,
    ),
    "all",
)  # fmt: skip
MIXED = Setup(make_case(("pprrr",), (("pprr",),), hidden_mixer=True), "all")
PLAIN = make_case(("pprrr", "..prr"), (("pprr", "prrr"),), layers=2)


@given(setups() | setups(tied_linears=True, mlp="gated"))
@example(TIED)  # one weight, two modules, a bias each
@example(FULL)
@example(TWICE)
@example(FUSED)
@budget(0.25)
def test_direct_is_the_diagonal(setup: Setup) -> None:
    """direct = diag(Psi), exactly; its causal part is zero.

    Proves: eq. phi_tgt_dir (exact), against ``diagonal``.
    """
    values = quiet_score(make_scorer(setup, "direct"), setup.case.batch)
    compare_values(values, setup, readout(setup, influence.diagonal), zeros(setup), name="direct")


@given(setups() | setups(tied_linears=True, mlp="gated") | setups(conv_mixer=True))
@example(TIED)
@example(MIXED)
@example(FULL)
@example(TWICE)
@budget(0.25)
def test_path_is_the_column_sums(setup: Setup) -> None:
    """path = column sums of Psi, the prompt's in ``unassigned``.

    Proves: path is the column sums (exact), against ``column_sums``, ``exact_influence``.
    """
    values = quiet_score(make_scorer(setup, "path"), setup.case.batch)
    compare_values(values, setup, readout(setup, influence.column_sums), None, name="path")


@given(setups(repeated_block=False))
@example(FULL)
@budget(0.15)
def test_same_layer_hop_is_one_hop_within_the_layer(setup: Setup) -> None:
    """Per scored layer, the one hop of the self-only errors to that layer's own projections.

    Of the parts of the exact causal value it is all but the longer hops.

    Proves: same layer hop is one hop within the layer (approximate), against ``one_hop``.
    """
    adapter = setup.case.adapter()
    model = adapter.model
    scorer = make_scorer(setup, "alphatoken", model=setup.case.model())
    for direction, exact in zip(truth(setup).directions, truth(setup).influences, strict=True):
        # A hop is a part of the off-diagonal of Psi; its terms are no larger than all of Psi's.
        scale = exact.absolute_scale.sum((1, 2)).unsqueeze(1)
        parts = causal_columns(scorer, read_batch(setup.case.batch), None, direction)
        for layer in layer_indices(setup):
            alone = Setup(setup.case, (layer,))
            linears = scored(alone, adapter)
            with seen_attention(alone, adapter) as seen:
                pairs = propagation.one_hop(
                    model,
                    forward_of(model),
                    setup.case.batch,
                    {linear.name: linear.module for linear in linears},
                    direction,
                    lambda seen=seen: [(s.call.key, s.call.value, s.output) for s in seen],
                    transposed=[linear.name for linear in linears if linear.transposed],
                )
            here = parts[layer]
            hop = here["window"] + here["beyond"] + here["score"]
            close(hop, pairs.sum(1), scale.expand_as(hop), MODEL, name=f"hop within layer {layer}")
            close(here["exact"] - here["longer"], hop, scale.expand_as(hop), MODEL, name="the rest")


@given(setups(), SEEDS)
@budget(0.1)
def test_weighted_losses(setup: Setup, seed: int) -> None:
    """token_weights (any sign) scale the rows of Psi, before and after which nothing changes.

    Proves: weighted losses (exact), against ``row_sums``, ``column_sums``, ``diagonal``.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = setup.case.batch["labels"]
    weights = torch.randn(labels.shape, generator=generator, dtype=torch.float64)
    batch = {k: v for k, v in setup.case.batch.items() if k != "labels"}
    expectations: Mapping[str, tuple[Any, Any]] = {
        "direct": (readout(setup, influence.diagonal, weights), zeros(setup)),
        "path": (readout(setup, influence.column_sums, weights), None),
        "label": (readout(setup, influence.row_sums, weights), None),
    }
    for estimator, (direct, causal) in expectations.items():
        model = setup.case.model()
        scorer = make_scorer(setup, estimator, model=model)
        with quiet(), scorer.observe() as observed:
            logits = model(**batch)
            values = observed.values(logits, labels, token_weights=weights)
        compare_values(values, setup, direct, causal, name=f"{estimator}, weighted")


@given(setups())
@budget(0.1)
def test_frozen_linears_are_out_of_scope(setup: Setup) -> None:
    """Linears without requires_grad take no part; the others keep their exact readouts.

    Proves: frozen linears are out of scope (exact), against ``row_sums``, ``column_sums``.
    """
    model = setup.case.model()
    adapter = ReferenceAdapter(model)
    names = [n for n in parameters_of(setup, adapter) if n.endswith("weight")]
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names[setup.case.seed % 2 :: 2]:
        named[name].requires_grad_(False)
    parameters = parameters_of(setup, adapter)
    if not parameters:
        return
    direction = setup.case.directions(parameters, salt=1)
    drift = FisherDrift(
        {n: torch.ones_like(p) for n, p in parameters.items()},
        {n: p.detach() - direction[n] for n, p in parameters.items()},
    )
    v = {n: p.detach() - drift.reference[n] for n, p in parameters.items()}
    psi = oracle_influence(setup, model, v)
    readouts = {
        "direct": influence.diagonal, "path": influence.column_sums, "label": influence.row_sums
    }  # fmt: skip
    for estimator, how in readouts.items():
        options = {"model": model, "retention": drift, "derivative": "auto"}
        values = quiet_score(make_scorer(setup, estimator, **options), setup.case.batch)
        expected, scale = (
            influence.to_token_index(how(x)) * values.mask for x in (psi.matrix, psi.absolute_scale)
        )
        close(values.stability, expected, scale, MODEL, name=f"{estimator}, frozen linears")


@given(
    setups(explicit_positions=True, max_length=6)
    | setups(mode="packed", explicit_positions=True, max_length=6, max_rows=2),
    st.sampled_from(EVERY),
    st.integers(0, 2),
)
@budget(0.24, least=5)
def test_layout_does_not_matter(setup: Setup, estimator: str, extra: int) -> None:
    """A document's values: the same padded left or right, alone, among others, or packed.

    Proves: layout does not matter (exact), against the document alone.
    """
    model = setup.case.model()
    placed = documents(setup.case.batch)
    docs = [document for _, document in placed]
    validations = [[d for _, d in documents(v)] for v in setup.case.validation]
    width = max(len(ids) for ids, _ in docs) + extra
    psi = [oracle_influence(setup, model, m) for m in truth(setup).directions]
    # Every term of the row: what any of its values may have been summed from.
    scale = (psi[0].absolute_scale + LAMBDA * psi[1].absolute_scale).sum((1, 2))
    scorer = make_scorer(setup, estimator, model=model)
    given = quiet_score(scorer, setup.case.batch).total
    drift = FisherDrift(*drift_of(setup, model))
    for side in ("left", "right"):
        laid = [
            lay_out(v, side, max(len(d[0]) for d in v) + extra, n)
            for n, v in enumerate(validations)
        ]
        other = Scorer(model, laid, drift, scorer.config)
        together = quiet_score(other, lay_out(docs, side, width, 17)).total
        for n, (places, (ids, labels)) in enumerate(placed):
            expected = torch.stack([given[place] for place in places])
            size = scale[places[0][0]]
            found = together[n, span(len(ids), side, width)]
            close(found, expected, size, MODEL, name=f"{estimator}, padding {side}")
            if side == "right" and bool((labels != -100).any()):
                alone = quiet_score(other, lay_out([docs[n]], side, len(ids), 3)).total[0]
                close(alone, expected, size, MODEL, name=f"{estimator}, alone")


PADDED_LABELS = make_case(("..rrpr", "pprrr."), ((".rpr", "rr.."), ("..rr",)))
"""The row that has a label which only padding precedes, on both sides."""


@given(
    setups(mode=st.sampled_from(["left", "ragged"]), max_length=6),
    st.sampled_from(EVERY),
    st.integers(1, 2),
)
@example(Setup(PADDED_LABELS), "alphatoken", 1)
@example(Setup(PADDED_LABELS), "label", 2)
@example(Setup(PADDED_LABELS, 1), "path", 1)
@budget(0.3)
def test_padding_holds_nothing(setup: Setup, estimator: str, shift: int) -> None:
    """Values and G are the same, bit for bit, whatever token stands in the padding.

    Proves: padding holds nothing (exact), against other padding, bit by bit.
    """
    model, case = setup.case.model(), setup.case
    scorer = make_scorer(setup, estimator, model=model)
    given = quiet_score(scorer, case.batch)
    scorer.set_validation([other_padding(v, shift) for v in case.validation])
    found = quiet_score(scorer, other_padding(case.batch, shift))
    for name in ("total", "adaptation", "stability", "unassigned", "mask"):
        assert torch.equal(getattr(found, name), getattr(given, name)), f"{estimator}, {name}"


@given(setups(), st.sampled_from(EVERY))
@budget(0.12)
def test_observed_equals_scored(setup: Setup, estimator: str) -> None:
    """observe() on a pass without dropout = score(); the training gradient is a fresh run's.

    Proves: observed equals scored (exact), against score, and a fresh run.
    """
    batch = setup.case.batch
    fresh = setup.case.model()
    summed_loss(fresh, batch).backward()
    model = setup.case.model().train()
    scorer = make_scorer(setup, estimator, model=model)
    expected = quiet_score(scorer, batch)
    with quiet(), scorer.observe() as observed:
        logits = model(**setup.case.inputs)
        values = observed.values(logits, batch["labels"])
    assert torch.equal(values.total, expected.total)
    assert torch.equal(values.unassigned, expected.unassigned)
    losses = gradients.scalar_losses(logits, gradients.known_labels(batch))
    torch.stack(list(losses.values())).sum().backward()
    for (name, p), q in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad), name


@given(setups(), st.sampled_from(EVERY))
@budget(0.15)
def test_model_is_left_alone(setup: Setup, estimator: str) -> None:
    """Weights, gradients, hooks, modes, flags, overrides, RNG: as before, also after exceptions.

    Proves: model is left alone (exact), against a snapshot.
    """
    model = setup.case.model()
    disturb(model, setup.case.seed)
    batch = setup.case.batch
    before = snapshot(model)
    scorer = make_scorer(setup, estimator, model=model)
    assert snapshot(model) == before
    quiet_score(scorer, batch)
    assert snapshot(model) == before, "after score"
    _ = scorer.direction
    assert snapshot(model) == before, "after direction"
    with quiet(), scorer.observe() as observed:
        observed.values(model(**setup.case.inputs), batch["labels"])
    assert snapshot(model) == before, "after observe"
    with suppress(StopError), scorer.observe():
        model(**setup.case.inputs)
        raise StopError
    assert snapshot(model) == before, "after an exception in observe"
    _check_after_a_failing_forward(setup, scorer, model)


def test_own_forwards_run_without_dropout() -> None:
    case = make_case(("pprrr",), (("pprr",),), residual_dropout=0.5, attention_dropout=0.5)
    plain = make_case(("pprrr",), (("pprr",),))
    for estimator in EVERY:
        config = ScorerConfig(estimator, layers=2)
        model = case.model().train()
        values = Scorer(model, case.validation, config=config).score(case.batch)
        expected = Scorer(plain.model(), plain.validation, config=config).score(plain.batch)
        assert torch.equal(values.total, expected.total)
        assert all(module.training for module in model.modules())


def test_an_observed_pass_is_valued_with_its_own_dropout() -> None:
    case = make_case(("pprrrr",), (("pprr",),), residual_dropout=0.5)
    model = case.model().train()
    scorer = Scorer(model, case.validation, config=ScorerConfig("path", layers=2))
    batch = case.batch
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    torch.manual_seed(3)
    with scorer.observe() as observed:
        values = observed.values(model(**inputs), batch["labels"])
    torch.manual_seed(3)
    losses = gradients.run_losses(forward_of(model), batch)
    named, m = dict(model.named_parameters()), scorer.direction.total()
    found = torch.autograd.grad(torch.stack(list(losses.values())).sum(), [named[n] for n in m])
    terms = torch.stack([(g * d).sum() for g, d in zip(found, m.values(), strict=True)])
    total = values.total.sum() + values.unassigned.sum()
    close(total, terms.sum(), terms.abs().sum() + 1.0, MODEL, name="dropout of the pass")
    dry = scorer.score(batch).total
    assert not torch.allclose(dry, values.total)


BOTH_BACKWARDS = ("alphatoken", "path")
"""Of those with captured errors: one by the self-only backward, one by the ordinary one."""


def score(case: Case, estimator: str, **options: Any) -> Tensor:
    config = ScorerConfig(estimator, **{"layers": 1, **options})
    return Scorer(case.model(), case.validation, config=config).score(case.batch).total


@pytest.mark.parametrize("estimator", BOTH_BACKWARDS)
def test_a_use_in_the_embedding_is_caught(estimator: str) -> None:
    case = make_case(("pprrr",), (("pprr",),), vocabulary=8, hidden=8, heads=2, head_dim=4)
    model = case.model()
    model.embedding.weight = model.layers[1].attention.q_proj.weight
    with pytest.raises(CoverageError, match=r"q_proj\.weight.*label"):
        Scorer(model, case.validation, config=ScorerConfig(estimator, layers=1)).score(case.batch)
    config = ScorerConfig("label", layers=1, derivative="forward_mode")
    scorer = Scorer(model, case.validation, config=config)
    values = scorer.score(case.batch).total
    m = gradients.validation_gradient(model, forward_of(model), case.validation, scorer.parameters)
    expected = gradients.label_values(model, forward_of(model), case.batch, m)
    close(values, expected, 1.0 + expected.abs().max(), MODEL, name="label, shared with embedding")


@pytest.mark.parametrize("estimator", BOTH_BACKWARDS)
def test_a_loose_parameter_is_refused_by_name_or_skipped_by_name(estimator: str) -> None:
    case = make_case(("pprrr", ".prrr"), (("pprr",),), loose_parameter=True)
    with pytest.raises(CoverageError, match=r"layers\.1\.mlp\.loose.*label"):
        score(case, estimator)
    model = case.model()
    config = ScorerConfig(estimator, layers=1, uncovered="skip")
    scorer = Scorer(model, case.validation, config=config)
    values = scorer.score(case.batch)
    assert scorer.coverage.skipped == {"layers.1.mlp.loose": "a matrix used outside any linear"}
    assert "layers.1.mlp.loose" not in scorer.coverage.parameters
    if estimator == "path":
        setup = Setup(case, 1)
        psi = oracle_influence(setup, model, scorer.direction.adaptation)
        expected, scale = (
            influence.to_token_index(influence.column_sums(x)) * values.mask
            for x in (psi.matrix, psi.absolute_scale)
        )
        close(values.total, expected, scale, MODEL, name="path, a loose matrix skipped")


LOOSE = make_case(("pprrr", ".prrr"), (("pprr",),), loose_parameter=True)
ONE_USE_BELOW = make_case(("pprrr",), (("pprr",),), mlp="plain", tied_linears=True, layers=3)
HIDDEN_USE = make_case(("pprrr",), (("pprr",),), hidden_use=True)


@pytest.mark.parametrize("case", [LOOSE, ONE_USE_BELOW, HIDDEN_USE])
def test_label_is_the_row_sums_along(case: Case) -> None:
    """label against per-token autograd over its own parameters, captured by linears or not.

    Proves: eq. grad_alignment (exact), against ``label_values``, ``validation_gradient``.
    """
    setup = Setup(case, 1)
    model = case.model()
    scorer = make_scorer(setup, "label", model=model, retention=False)
    values = quiet_score(scorer, setup.case.batch)
    parameters = dict(scorer.parameters)
    m = gradients.validation_gradient(model, forward_of(model), setup.case.validation, parameters)
    expected = gradients.label_values(model, forward_of(model), setup.case.batch, m)
    scale = sum(g.abs().sum() for g in m.values()) + 1.0
    close(values.total, expected, torch.as_tensor(scale), MODEL, name="label, own parameters")


def test_the_coverage_report_says_what_was_proved() -> None:
    case = FULL.case
    scorer = make_scorer(FULL, "alphatoken")
    assert scorer.coverage.relative_error is None
    quiet_score(scorer, case.batch)
    report = scorer.coverage
    assert report.relative_error is not None
    assert report.relative_error < 1e-12
    assert report.isolated is True
    assert "layers.2.attention.q_proj" in report.linears
    assert "layers.2.attention.q_proj.weight" in report.parameters
    assert not any(name.endswith(".bias") for name in report.parameters)
    assert not any(name.startswith("layers.1.") for name in report.linears)


def test_negative_layer_indices_count_from_the_end() -> None:
    for one, two in (((-1,), 1), ((0, -1), "all"), ((1, 0), (0, 1))):
        assert torch.equal(score(PLAIN, "direct", layers=one), score(PLAIN, "direct", layers=two))


WAYS: dict[str, dict[str, Any]] = {
    "alphatoken": {}, "direct": {}, "path": {}, "label": {},
    "label, central": {"derivative": "central"}, "label, one-sided": {"derivative": "one_sided"},
    "walk": {"walk_steps": 1}, "walk, central": {"walk_steps": 1, "walk_form": "central"},
}  # fmt: skip
"""Estimators, and the ways in which they come by losses, with their options."""


@given(setups(), st.sampled_from([*WAYS]))
@example(Setup(PADDED), "label, central")
@example(FULL, "label")
@budget(0.1)
def test_values_come_with_the_losses_of_their_tokens(setup: Setup, way: str) -> None:
    """In nats, 0 off the response; central differences have them to the square of their step.

    Weights are of the values, and leave the losses as they are.

    Proves: losses beside values (exact), against ``token_losses``.
    """
    case, model = setup.case, setup.case.model()
    wanted = gradients.batch_losses(forward_of(model), case.batch).detach()
    options = {"retention": False, **WAYS[way]}
    scorer = make_scorer(setup, way.split(",")[0], model=model, **options)
    weights = torch.linspace(-1.0, 2.0, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    with quiet(), scorer.observe() as observed:
        watched = observed.values(model(**case.inputs), case.batch["labels"], token_weights=weights)
    for values in (quiet_score(scorer, case.batch, token_weights=weights), watched):
        assert values.losses is not None
        close(values.losses, wanted, 1.0 + wanted, 1e-7, name=way)
        assert not bool(values.losses[~values.mask].any())


@pytest.mark.parametrize("way", WAYS)
def test_values_outlive_the_buffers_of_their_batch(way: str) -> None:
    """A loop fills its tensors with the next batch; values and tokens stay those of the last.

    Proves: values outlive the buffers of their batch (exact), against copies of their tensors.
    """
    setup = Setup(PADDED)
    model = setup.case.model()
    options = {"retention": False, **WAYS[way]}
    scorer = make_scorer(setup, way.split(",")[0], model=model, **options)
    for observes in (False, True):
        buffers = {name: tensor.clone() for name, tensor in setup.case.batch.items()}
        inputs = {name: tensor for name, tensor in buffers.items() if name != "labels"}
        if observes:
            with quiet(), scorer.observe() as observed:
                values = observed.values(model(**inputs), buffers["labels"])
        else:
            values = quiet_score(scorer, buffers)
        own = {n: one for n, one in vars(values).items() if isinstance(one, Tensor)}
        before = {name: one.clone() for name, one in own.items()}
        assert torch.equal(before["input_ids"], setup.case.batch["input_ids"])
        for tensor in buffers.values():
            tensor.fill_(1)
        for name, one in own.items():
            assert torch.equal(one, before[name]), name


def _shifted(batch: Mapping[str, Tensor], last: int | None = -100) -> dict[str, Tensor]:
    labels = batch["labels"]
    end = labels[:, :1] if last is None else torch.full_like(labels[:, :1], last)
    return {**batch, "labels": torch.cat([labels[:, 1:], end], 1)}


@pytest.mark.parametrize("estimator", ["alphatoken", "walk"])
def test_labels_that_are_shifted_already_are_named(estimator: str) -> None:
    """Once a scorer, of batch and validation rows; other labels than the inputs may be meant.

    Proves: labels that are shifted already are named (exact), against the warnings that are given.
    """
    case = make_case(("pprrr", "prrrr"), (("pprr", "prrr"),), layers=2)
    model, plain = case.model(), case.batch
    others = {**plain, "labels": torch.where(plain["labels"] < 0, -100, 1)}
    some, whole = _shifted(plain), {**plain, "labels": plain["input_ids"]}
    rolled = _shifted(whole, None)

    def said(validation: Any, batches: Sequence[Mapping[str, Tensor]], *, watch: bool) -> list[str]:
        own = ScorerConfig(estimator, layers=1) if estimator != "walk" else ScorerConfig("walk")
        scorer = Scorer(model, validation, None, own, adapter=ReferenceAdapter(model))
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", AlphaTokenWarning)
            for batch in batches:
                if not watch:
                    scorer.score(batch)
                    continue
                inputs = {name: one for name, one in batch.items() if name != "labels"}
                with scorer.observe() as observed:
                    observed.values(model(**inputs), batch["labels"])
        texts = [str(one.message) for one in given]
        return [one for one in texts if "another token than the one at its place" in one]

    for watch in (False, True):
        assert not said([plain], [plain, others], watch=watch)
        for batches in ([some, some], [plain, rolled, some]):
            (one,) = said([plain], batches, watch=watch)
            assert one.startswith("In the batch a label")
        (one,) = said([some, plain], [plain, some], watch=watch)
        assert one.startswith("In the validation batch a label")
