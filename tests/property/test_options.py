"""Objective, part, the full preconditioner and what may change over a run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import FisherDrift, Scorer, ScorerConfig, TokenValues
from alphatoken.errors import ConfigError, InputError, NumericalError
from alphatoken.estimate.captured import Captured, assign_columns, contract_columns
from alphatoken.estimate.estimator import Recording
from alphatoken.estimate.token_values import DirectCausal
from alphatoken.model.batch import read_batch
from alphatoken.model.batch_slice import LENGTH, ROWS
from alphatoken.oracle import gradients, influence, utility
from alphatoken.support.options import check_options, option
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    BETAS,
    CONTRACTION,
    EPS,
    EVERY,
    LAMBDA,
    MODEL,
    Setup,
    Sides,
    compare_values,
    drift_of,
    forward_of,
    make_scorer,
    oracle_influence,
    parameters_of,
    propagated,
    quiet,
    quiet_score,
    readout,
    setups,
    stepped,
    zeros,
)
from tests.property.strategies import make_batch, make_case
from tests.property.test_direction import mean_size
from tests.property.tolerance import close


def _chosen(setup: Setup, sides: Sides, objective: str, wanted: bool) -> Sides:
    """The sides that the options ask for; nothing in the place of the others."""
    none = zeros(setup)[0]
    gain = sides[0] if wanted and objective != "stability" else none
    keep = sides[1] if wanted and objective != "adaptation" else none
    return gain, keep


def full_scorer(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, estimator: str, **options: Any
) -> Scorer:
    """Values of the optimizer's step; stability is the loss on given retention data."""
    options |= {"preconditioner": "full", "precondition_after": 1, "optimizer": optimizer}
    return make_scorer(setup, estimator, model=model, retention=[setup.case.batch], **options)


def random_weights(setup: Setup) -> Tensor:
    """(b, t) weights of token losses in the step's loss, some zero, some negative."""
    generator = torch.Generator().manual_seed(setup.case.seed)
    shape = setup.case.batch["labels"].shape
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    return weights * (torch.rand(shape, generator=generator) < 0.8)


def mean_weights(batch: Mapping[str, Tensor]) -> Tensor:
    """The default step: the mean over response tokens."""
    tokens = gradients.response_tokens(gradients.known_labels(batch))
    weights = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for b, i in tokens:
        weights[b, i] = 1 / len(tokens)
    return weights


def step_gradient(
    model: nn.Module, batch: Mapping[str, Tensor], parameters: Mapping[str, Tensor], weights: Tensor
) -> dict[str, Tensor]:
    """Gradient of the weighted token losses, by the oracle's token gradients."""
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    places = gradients.response_tokens(gradients.known_labels(batch))
    rows = gradients.per_token_gradients(model, forward_of(model), batch, parameters, places)
    for (b, i), row in zip(places, rows, strict=True):
        for name, g in row.items():
            total[name] += weights[b, i] * g
    return total


def adam_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], steps: int
) -> utility.AdamState:
    """The oracle's copy of the optimizer's state."""
    group = optimizer.param_groups[0]
    return utility.AdamState(
        steps,
        {n: optimizer.state[p]["exp_avg"].clone() for n, p in parameters.items()},
        {n: optimizer.state[p]["exp_avg_sq"].clone() for n, p in parameters.items()},
        BETAS,
        EPS,
        group["weight_decay"],
        isinstance(optimizer, torch.optim.AdamW),
    )


def _two_sided(setup: Setup, estimator: str, kind: str) -> tuple[Scorer, nn.Module]:
    if kind == "full":
        model, optimizer = stepped(setup, 2, "AdamW")
        return full_scorer(setup, model, optimizer, estimator), model
    model = setup.case.model()
    parameters = parameters_of(setup, ReferenceAdapter(model))
    p = {n: x.square() for n, x in setup.case.directions(parameters, salt=5).items()}
    given = p if kind == "given" else None
    return make_scorer(setup, estimator, model=model, preconditioner=given), model


def _two_sided_size(setup: Setup, model: nn.Module, scorer: Scorer) -> float:
    """Sum of the absolute terms of both sides over the whole of Psi."""
    assert isinstance(model, ReferenceDecoder)
    direction = scorer.direction_for(setup.case.batch)
    keep = direction.stability
    assert keep is not None
    sides = direction.adaptation, {n: LAMBDA * v for n, v in keep.items()}
    return sum(float(oracle_influence(setup, model, m).absolute_scale.sum()) for m in sides)


CASE = make_case(("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), layers=3, seed=3)
SETUP = Setup(CASE, 2)
PACKED = Setup(make_case(("pprr|prr", "pr|pprrr"), (("pprr", "prr."),), layers=2, seed=5), "all")
OBJECTIVES = ("both", "adaptation", "stability")
SPLIT = ("alphatoken", "direct", "paper_literal")


@given(
    setups(),
    st.sampled_from(
        [
            (e, o, p)
            for e in (*SPLIT, "label", "path")
            for o in OBJECTIVES
            for p in ("both", "direct", "causal")
            if p == "both" or (e in SPLIT and (e, p) != ("direct", "causal"))
        ]
    ),
)
@example(SETUP, ("alphatoken", "both", "both"))
@example(SETUP, ("alphatoken", "adaptation", "direct"))
@example(SETUP, ("alphatoken", "stability", "causal"))
@budget(1.0)
def test_objective_and_part(setup: Setup, choice: tuple[str, str, str]) -> None:
    """The chosen components are the oracle's, the others zero, the total is the chosen ones'.

    Proves: eqs. phi_proxy, phi_total, decomposition (exact), against ``exact_influence``,
    ``value_propagation``.
    """
    estimator, objective, part = choice
    direct = readout(setup, influence.diagonal)
    causal: Sides | None = propagated(setup, window=None)
    if estimator == "direct":
        causal = zeros(setup)
    elif estimator in ("label", "path"):
        direct = readout(
            setup, influence.row_sums if estimator == "label" else influence.column_sums
        )
        causal = None
    elif estimator == "paper_literal":
        direct = readout(setup, influence.column_sums)
        causal = propagated(setup, window=None, head_reduction="mean", aggregated=True)
    options = {"objective": objective, "part": part, "derivative": "auto"}
    options |= {"validation": None} if objective == "stability" else {}
    values = quiet_score(make_scorer(setup, estimator, **options), setup.case.batch)
    keep_direct, keep_causal = part != "causal", part != "direct"
    compare_values(
        values,
        setup,
        _chosen(setup, direct, objective, keep_direct),
        None if causal is None else _chosen(setup, causal, objective, keep_causal),
        name=f"{estimator}, {objective}, {part}",
    )
    together = sum(values.components().values(), torch.zeros_like(values.total))
    close(values.total, together, together.abs(), MODEL, name="sum of the components")


KINDS = ("Adam", "Adam, L2", "AdamW")


@given(
    setups(), st.sampled_from([1, 4]), st.sampled_from(KINDS),
    st.sampled_from(["linears", "all"]), st.booleans(),
)  # fmt: skip
@budget(0.3)
def test_full_values_are_the_steps_derivative(
    setup: Setup, steps: int, kind: str, parameters: str, given: bool
) -> None:
    """label: value_k = -d(J_val + lambda J_ret)/dw_k / lr after the optimizer's own step.

    Token by token, by the oracle's derivative of Adam's step in one token's weight; ``given``: the
    step's loss has weights of its own, else it is the mean over response tokens.

    Proves: full values are the steps derivative (exact), against ``adam_step_derivative``.
    """
    model, optimizer = stepped(setup, steps, kind)
    scorer = full_scorer(setup, model, optimizer, "label", parameters=parameters)
    batch = setup.case.batch
    weights = random_weights(setup) if given else mean_weights(batch)
    values = quiet_score(scorer, batch, step_weights=weights if given else None)
    chosen = scorer.parameters
    sides = [
        gradients.validation_gradient(model, forward_of(model), data, chosen)
        for data in (setup.case.validation, [batch])
    ]
    g = step_gradient(model, batch, chosen, weights)
    state = adam_state(optimizer, chosen, steps)
    current = {n: p.detach() for n, p in chosen.items()}
    places = gradients.response_tokens(gradients.known_labels(batch))
    rows = gradients.per_token_gradients(model, forward_of(model), batch, chosen, places)
    for (b, i), row in zip(places, rows, strict=True):
        move = utility.adam_step_derivative(g, row, state, current)
        for found, side in zip((values.adaptation, values.stability), sides, strict=True):
            terms = torch.cat([(side[n] * move[n]).flatten() for n in move])
            # Each entry of P is a difference of two terms of order 1 / (sqrt(v^) + eps).
            rough = torch.cat([(side[n] * row[n]).flatten() for n in move])
            size = terms.abs().sum() + rough.abs().sum()
            close(found[b, i], terms.sum(), size, MODEL, name=f"full, {kind}, {parameters}")


@given(setups(), st.sampled_from([1, 4]), st.booleans())
@budget(0.2)
def test_full_scales_the_direction_of_captured_estimators(
    setup: Setup, steps: int, given: bool
) -> None:
    """path along P o G and P o V, P the oracle's; the same values under score and observe.

    Proves: full scales the direction of captured estimators (exact), against
    ``adam_preconditioner``, ``exact_influence``.
    """
    model, optimizer = stepped(setup, steps, "AdamW")
    adapter = ReferenceAdapter(model)
    parameters = parameters_of(setup, adapter)
    batch = setup.case.batch
    weights = random_weights(setup) if given else mean_weights(batch)
    p = utility.adam_preconditioner(
        step_gradient(model, batch, parameters, weights),
        adam_state(optimizer, parameters, steps),
        "full",
        {n: w.detach() for n, w in parameters.items()},
    )
    scorer = full_scorer(setup, model, optimizer, "path")
    asked = {"step_weights": weights} if given else {}
    with quiet():
        values = scorer.score(batch, **asked)
        with scorer.observe() as observed:
            logits = model(**setup.case.inputs)
            seen = observed.values(logits, batch["labels"], **asked)
    assert torch.equal(seen.total, values.total)
    for data, found in (
        (setup.case.validation, values.adaptation), ([batch], values.stability)
    ):  # fmt: skip
        g = gradients.validation_gradient(model, forward_of(model), data, parameters)
        psi = oracle_influence(setup, model, {n: p[n] * g[n] for n in g})
        rough = oracle_influence(setup, model, g)
        expected = influence.to_token_index(influence.column_sums(psi.matrix)) * values.mask
        scale = influence.to_token_index(
            influence.column_sums(psi.absolute_scale + rough.absolute_scale)
        )
        close(found, expected, scale, MODEL, name="path, full")


def test_full_needs_the_steps_weights_where_values_have_their_own() -> None:
    model, optimizer = stepped(SETUP, 2, "Adam")
    scorer = full_scorer(SETUP, model, optimizer, "path")
    weights = torch.ones_like(CASE.batch["labels"], dtype=torch.float64)
    with pytest.raises(InputError, match=r"needs step_weights where token_weights are given"):
        scorer.score(CASE.batch, token_weights=weights)
    with pytest.raises(InputError, match=r"step_weights must have one entry a token"):
        scorer.score(CASE.batch, step_weights=weights[:, 1:])


PRECONDITIONERS = ("none", "given", "full")


@given(setups(), st.tuples(st.sampled_from(EVERY), st.sampled_from(PRECONDITIONERS)))
@example(SETUP, ("alphatoken", "full"))
@example(PACKED, ("alphatoken", "given"))
@budget(0.6)
def test_total_alone(setup: Setup, how: tuple[str, str]) -> None:
    """One contraction with M gives the total of two.

    ``how``: estimator, and kind of preconditioner.

    Proves: total alone (exact), against values with parts.
    """
    estimator, kind = how
    scorer, model = _two_sided(setup, estimator, kind)
    batch = setup.case.batch
    with quiet():
        scored = scorer.score(batch, components=False)
        with scorer.observe() as observed:
            logits = model(**setup.case.inputs)
            alone = observed.values(logits, batch["labels"], components=False)
            apart = observed.values(logits, batch["labels"])
    assert torch.equal(scored.total, alone.total)
    assert torch.equal(scored.unassigned, alone.unassigned)
    assert alone.adaptation is alone.stability is None
    assert (alone.components(), alone.shares(), alone.balance) == ({}, {}, {})
    size = _two_sided_size(setup, model, scorer)
    close(alone.total, apart.total, size, CONTRACTION, name=f"total alone, {estimator}, {kind}")
    close(alone.unassigned, apart.unassigned, size, CONTRACTION, name=f"the rest, {estimator}")


def _kept(captured: Captured, recording: Recording, sides: list[Any]) -> list[DirectCausal]:
    """Values along each side from errors at all linears, kept as sharded weights need them."""
    errors, (recorder, _) = captured.errors(recording), recording.recorded
    columns = contract_columns(recorder, errors, sides, captured.scored.names)
    return [assign_columns(one, recording.batch.mask) for one in columns]


@given(setups(), st.booleans())
@budget(0.1)
def test_errors_streamed_are_the_errors_kept(setup: Setup, cut: bool) -> None:
    """Contracting inside the backward gives the bits of contracting errors that were kept.

    With ``cut`` the last block's input is detached: no error of it passes a linear below.

    Proves: errors streamed are the errors kept (exact), against errors kept, bit by bit.
    """
    setup = replace(setup, layers="all") if cut else setup
    batch = read_batch(setup.case.batch)
    for estimator in ("alphatoken", "direct", "path", "paper_literal"):
        model = setup.case.model()
        if cut:
            model.layers[-1].register_forward_pre_hook(
                lambda _, args: (args[0].detach(), *args[1:])
            )
        captured = make_scorer(setup, estimator, model=model).estimator
        assert isinstance(captured, Captured)
        with quiet():
            direction = captured.prepare(batch)
            with captured.forward(batch) as recording:
                streamed = captured.values(recording, direction, components=True)
                kept = captured.combined(
                    recording, direction, partial(_kept, captured, recording), components=True
                )
        assert bool(kept.total.any())
        assert torch.equal(kept.unassigned, streamed.unassigned)
        for name, part in kept.components().items():
            assert torch.equal(part, streamed.components()[name]), (estimator, name)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": ("direct",)},
        {"objective": ("stability",)},
        {"part": ("causal",)},
        {"uncovered": ("skip",)},
        {"stability_weight": (1.0,)},
        {"damping": ()},
        {"window": (4,)},
        {"window": "4"},
        {"precondition_after": True},
    ],
    ids=str,
)
def test_a_tuple_is_no_value_of_an_option(options: dict[str, Any]) -> None:
    """One comma too many makes a tuple; it must not pass for its entry, nor for the default."""
    (name,) = options
    values = {one.name: one.default for one in fields(ScorerConfig)}
    check_options(SimpleNamespace(**values), ScorerConfig)
    with pytest.raises(ConfigError, match=f"{name} must be"):  # types are no help outside of tests
        check_options(SimpleNamespace(**{**values, **options}), ScorerConfig)


@pytest.mark.parametrize("slip", ["low", "mininum", "at_most", "requird"])
def test_a_word_of_an_option_that_nothing_reads_is_refused(slip: str) -> None:
    """A range by another name would be no range."""
    option(4, "how many", at_least=2, group="sizes", metavar="N")
    with pytest.raises(TypeError, match=f"does not take {slip};.*at_least.*group"):
        option(4, "how many", **{slip: 2})


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Fields made by option() or same_option(), and names read as attributes outside of them."""
    made, read = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(ast.Name(name), value=ast.Call(ast.Name("option" | "same_option"))):
                made.add(name)
            case ast.Attribute(attr=name, ctx=ast.Load()):
                read.add(name)
    return made, read


def test_every_option_is_read_somewhere() -> None:
    """A field that no line reads would be taken, recorded and without effect."""
    root = Path(__file__).parents[2]
    files = [*root.glob("alphatoken/**/*.py"), *root.glob("lab/alphatoken_lab/**/*.py")]
    trees = [_names(ast.parse(file.read_text())) for file in files]
    made, read = (set[str]().union(*names) for names in zip(*trees, strict=True))
    assert {"keep_ratio", "walk_steps", "arms"} < made  # of three classes, in three files
    # The lab's two files of the laptop run are read by the names of their parts, f"{part}_file".
    assert made - read == {"warm_file", "probes_file"}


def test_wrong_step_weights_are_refused_before_the_direction_is_built() -> None:
    roles: list[str] = []

    def reduce(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        roles.append(role)
        return {name: total / count for name, total in sums.items()}

    model = CASE.model()
    optimizer = torch.optim.AdamW(model.parameters())
    scorer = Scorer(
        model, CASE.validation, None, ScorerConfig("direct", preconditioner="full"),
        optimizer=optimizer, reduce=reduce,
    )  # fmt: skip
    with pytest.raises(InputError, match="step_weights"):
        scorer.direction_for(CASE.batch, step_weights=torch.ones(1, 1))
    assert roles == []


@given(setups(), st.sampled_from(EVERY))
@budget(0.2)
def test_replaced_sides_equal_a_fresh_scorer(setup: Setup, estimator: str) -> None:
    """set_validation, set_retention: the values of a scorer made that way.

    Proves: replaced sides equal a fresh scorer (exact), against a fresh scorer.
    """
    model = setup.case.model()
    batch, validation = setup.case.batch, setup.case.validation
    scorer = make_scorer(setup, estimator, model=model)
    quiet_score(scorer, batch)
    other, data = [batch], [*validation, batch]
    scorer.set_validation(other)
    scorer.set_retention(data)
    found = quiet_score(scorer, batch)
    expected = quiet_score(Scorer(model, other, data, scorer.config), batch)
    assert torch.equal(found.total, expected.total)
    assert found.balance == expected.balance


@given(setups(), st.sampled_from(EVERY))
@budget(0.1)
def test_pinned_direction(setup: Setup, estimator: str) -> None:
    """A pinned version keeps G and V whatever the weights do; another one builds them anew.

    Proves: pinned direction (exact), against a scorer at the pinned weights.
    """
    model = setup.case.model()
    scorer = make_scorer(setup, estimator, model=model)
    scorer.pin("first")
    quiet_score(scorer, setup.case.batch)
    kept = scorer.direction
    with torch.no_grad():
        for p in model.parameters():
            p.data.mul_(1.1)
    quiet_score(scorer, setup.case.batch)
    assert scorer.direction.adaptation is kept.adaptation
    scorer.pin("second")
    found = quiet_score(scorer, setup.case.batch)
    fresh = Scorer(
        model,
        setup.case.validation,
        FisherDrift(*drift_of(setup, setup.case.model())),
        scorer.config,
    )
    assert torch.equal(found.total, quiet_score(fresh, setup.case.batch).total)
    scorer.pin(None)
    next(model.parameters()).data.mul_(1.0)
    scorer.refresh()
    assert torch.equal(quiet_score(scorer, setup.case.batch).total, found.total)


@given(setups(), st.sampled_from(EVERY))
@budget(0.2)
def test_reduced_gradient(setup: Setup, estimator: str) -> None:
    """Sums and counts of two processes, added up by ``reduce``, are one with all batches.

    Proves: reduced gradient (exact), against one process with all batches.
    """
    model = setup.case.model()
    batch, validation = setup.case.batch, setup.case.validation
    data = [*validation, batch]

    def score(rows: Any, **more: Any) -> TokenValues:
        sides = {"validation": rows, "retention": rows, "derivative": "auto"}
        return quiet_score(make_scorer(setup, estimator, model=model, **sides, **more), batch)

    expected = score(data)
    sent: dict[str, tuple[dict[str, Tensor], float]] = {}

    def keep(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        sent[role] = ({n: s.clone() for n, s in sums.items()}, count)
        return {n: s / count for n, s in sums.items()}

    def add(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        others, more = sent[role]
        return {n: (s + others[n]) / (count + more) for n, s in sums.items()}

    score(data[:1], reduce=keep)
    assert set(sent) == {"validation", "retention"}
    found = score(data[1:], reduce=add)
    parameters = parameters_of(setup, ReferenceAdapter(model))
    size = oracle_influence(setup, model, mean_size(model, data, parameters)).absolute_scale.sum()
    for part in ("adaptation", "stability", "total"):
        one, two = getattr(found, part), getattr(expected, part)
        close(one, two, size, MODEL, name=f"reduced {part}, {estimator}")


@given(setups())
@example(SETUP)
@example(Setup(CASE, "all"))
@example(Setup(make_case(("pprrr",), (("pprr",),), layers=3, repeated_block=True), 1))
@budget(0.2)
def test_label_starts_at_the_observed_hidden_states(setup: Setup) -> None:
    """The trunk is not run again, and the values are those of a pass of its own.

    Proves: label starts at the observed hidden states (exact), against a pass of its own.
    """
    model = setup.case.model()
    batch = setup.case.batch
    scorer = make_scorer(setup, "label", model=model)
    calls: list[int] = []
    # Before the first values: a hook that comes later makes another model, which is proved again.
    handle = model.layers[0].attention.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    expected = quiet_score(scorer, batch)
    for _ in range(2):  # packed rows are proved once more as the user calls the model
        with quiet(), scorer.observe() as observed:
            calls.clear()
            logits = model(**setup.case.inputs)
            trunk = len(calls)
            try:
                values = observed.values(logits, batch["labels"])
            except InputError as error:  # of this refusal only: the dual forward has other losses
                if "do not belong to the observed forward" not in str(error):
                    raise
                raise AssertionError("a pass refused its own forward") from error
    handle.remove()
    assert torch.equal(values.total, expected.total)
    first, layers = scorer.scored.first, list(model.layers)
    skipped = first and not any(block in layers[first:] for block in layers[:first])
    assert (len(calls) == trunk) == bool(skipped)


def test_stability_needs_a_retention_term_and_adaptation_a_validation_set() -> None:
    model = CASE.model()
    with pytest.raises(ConfigError, match="needs a retention term"):
        Scorer(model, None, None, ScorerConfig(objective="stability"))
    with pytest.raises(InputError, match="no validation tokens"):
        Scorer(model, None, [CASE.batch])
    scorer = Scorer(model, None, [CASE.batch], ScorerConfig(objective="stability", layers=2))
    with pytest.raises(ConfigError, match="needs a retention term"):
        scorer.set_retention(None)


def test_the_proofs_run_without_a_validation_set_too() -> None:
    """With a Fisher there is no forward before the batch's own: it is the one they run on."""
    drift = FisherDrift(*drift_of(SETUP, CASE.model()))
    for retention in ([CASE.batch], drift):
        config = ScorerConfig(objective="stability", layers=2, max_relative_drift=None)
        scorer = Scorer(CASE.model(), None, retention, config)
        scorer.score(CASE.batch)
        assert scorer.coverage.isolated
        assert scorer.coverage.relative_error is not None
        assert scorer.coverage.relative_error < 1e-12


def test_the_proofs_add_forwards_of_a_few_rows_at_the_first_two_directions() -> None:
    model = CASE.model()
    calls: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda _m, _a, output: calls.append(tuple(output.shape[:2])))
    long = make_batch(("p" * 60 + "r" * 30,) * 4, vocabulary=11, seed=1)
    scorer = Scorer(model, [long, CASE.batch], None, ScorerConfig("alphatoken", layers=2))
    for _ in range(3):
        scorer.refresh()
        quiet_score(scorer, CASE.batch)
    # Causality by each kind of arguments, that of the padded batch first, whose padding on the left
    # is looked at; and then coverage. A batch's own kind is looked at before M is built.
    kind, padding, few = (2, 6), [(1, 6), (1, 4)], [(ROWS, LENGTH), (ROWS, LENGTH)]
    built, valued = [(4, 90), (2, 6)], (2, 6)
    first, second = [kind, *padding, *few, *built, valued], [*built, *few, valued]
    assert calls == [*first, *second, kind, *built, valued]
    assert scorer.coverage.relative_error is not None


@pytest.mark.parametrize("fault", ["label", "weight"])
def test_what_is_wrong_with_a_token_is_said_by_its_place_in_the_batch(fault: str) -> None:
    """The slice that is read first stumbles over it, and leaves it to the whole batch to say."""
    model = CASE.model()
    batch = make_batch(("p" * 60 + "r" * 30,) * 4, vocabulary=11, seed=1)
    if fault == "label":
        batch["labels"][0, 80:] = 11
        message = "row 0, token 80"
    else:
        model.embedding.weight.data[3] = torch.nan
        batch["input_ids"].fill_(1)[:, 84] = 3
        message = "row 0, token 60"  # masked positions are multiplied with zero, and NaN stays
    scorer = Scorer(model, batch, None, ScorerConfig("alphatoken", layers=2))
    with pytest.raises((InputError, NumericalError), match=message):
        scorer.score(CASE.batch)
    assert scorer.coverage.relative_error is None
