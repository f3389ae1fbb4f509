"""Claims about the scorer as a whole: routes, validation and retention, layouts, what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken import FisherDrift, PreferenceBatch, Scorer, ScorerConfig, TokenValues
from alphatoken.oracle import gradients, influence, preference, utility
from tests.property.decoder import Attention, ReferenceAdapter, ReferenceDecoder
from tests.property.properties import (
    CONTRACTION,
    LAMBDA,
    MODEL,
    Setup,
    drift_of,
    forward_of,
    make_scorer,
    oracle_influence,
    parameters_of,
    quiet,
    quiet_score,
    truth,
)
from tests.property.tolerance import close

EVERY = ("alphatoken", "direct", "same_layer_hop", "path", "paper_literal", "label")


# --- the direction -------------------------------------------------------------------------------


def check_validation_gradient(setup: Setup) -> None:
    """G: mean over the response tokens of all batches, whatever their lengths; V entry by entry."""
    model = setup.case.model()
    scorer = make_scorer(setup, "path", model=model)
    gain, keep = truth(setup).directions
    size = absolute_gradient(model, setup.case.validation, parameters_of(setup, scorer.adapter))  # type: ignore[arg-type]
    found = scorer.direction
    assert set(found.adaptation) == set(gain)
    assert found.stability is not None
    for name, g in gain.items():
        close(found.adaptation[name], g, size[name], MODEL, name="G")
        v = keep[name]
        close(found.stability[name], v, v.abs() + size[name], CONTRACTION, name="V")


def absolute_gradient(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Mean over tokens of |gradient| plus its largest entry (sums round within a token too)."""
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    count = 0
    for batch in batches:
        for one in gradients.per_token_gradients(model, forward_of(model), batch, parameters):
            count += 1
            for name, g in one.items():
                total[name] += g.abs()
    return {n: (t + t.max()) / count for n, t in total.items()}


def check_adam_preconditioner(setup: Setup, steps: int) -> None:
    """frozen: M = P o (G + lambda V) with P from the optimizer, on the direction's side, once."""
    model = setup.case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.97), eps=1e-6)
    for _ in range(steps):
        optimizer.zero_grad()
        summed_loss(model, setup.case.batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    adapter = ReferenceAdapter(model)
    parameters = parameters_of(setup, adapter)
    drift = FisherDrift(*drift_of(setup, setup.case.model()))
    p = {}
    for name, parameter in parameters.items():
        moments = optimizer.state[parameter]
        state = utility.AdamState(
            steps, {name: moments["exp_avg"]}, {name: moments["exp_avg_sq"]}, (0.8, 0.97), 1e-6
        )
        # v^ is floored at 1e-16: entries that no gradient has reached have P = c / (1e-8 + eps).
        state.v[name].clamp_(min=1e-16 * (1 - 0.97**steps))  # type: ignore[attr-defined]
        p |= utility.adam_preconditioner({name: parameter}, state, "frozen")
    plain = gradients.validation_gradient(
        model, forward_of(model), setup.case.validation, parameters
    )
    v = {n: drift.fisher[n] * (w.detach() - drift.reference[n]) for n, w in parameters.items()}
    config = ScorerConfig(
        estimator="path",
        layers=setup.layers,
        score_bias=setup.score_bias,
        preconditioner="frozen",
        precondition_after=steps,
        max_relative_drift=None,
    )
    scorer = Scorer(model, setup.case.validation, drift, config, optimizer=optimizer)
    values = quiet_score(scorer, setup.case.batch)
    _compare_path(setup, model, values, {n: p[n] * g for n, g in plain.items()}, "adaptation, P")
    _compare_path(setup, model, values, {n: p[n] * g for n, g in v.items()}, "stability, P")
    patient = replace(config, precondition_after=steps + 1)  # P = 1 before that many steps
    values = quiet_score(
        Scorer(model, setup.case.validation, drift, patient, optimizer=optimizer), setup.case.batch
    )
    _compare_path(setup, model, values, plain, "adaptation, not yet P")


def _compare_path(
    setup: Setup,
    model: ReferenceDecoder,
    values: TokenValues,
    direction: Mapping[str, Tensor],
    name: str,
) -> None:
    """One side of path values against the column sums along a given direction."""
    psi = oracle_influence(setup, model, direction)
    found = values.adaptation if name.startswith("adaptation") else values.stability
    expected, scale = (
        influence.to_token_index(influence.column_sums(x)) * values.mask
        for x in (psi.matrix, psi.absolute_scale)
    )
    close(found, expected, scale, MODEL, name=f"path, {name}")


def summed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    losses = gradients.run_losses(forward_of(model), dict(batch))
    return torch.stack(list(losses.values())).sum()


def check_given_preconditioner(setup: Setup) -> None:
    """A mapping P (some parameters left at 1) scales M, for label and captured estimators alike."""
    model = setup.case.model()
    parameters = parameters_of(setup, ReferenceAdapter(model))
    given = {n: x.square() for n, x in list(setup.case.directions(parameters, salt=5).items())[::2]}
    t = truth(setup)
    adaptation, stability = ({n: given.get(n, 1.0) * m for n, m in d.items()} for d in t.directions)
    scorer = make_scorer(setup, "path", model=model, preconditioner=given)
    values = quiet_score(scorer, setup.case.batch)
    _compare_path(setup, model, values, adaptation, "adaptation, given P")
    _compare_path(setup, model, values, stability, "stability, given P")
    label = quiet_score(
        make_scorer(setup, "label", model=model, preconditioner=given), setup.case.batch
    )
    whole = {n: m + LAMBDA * stability[n] for n, m in adaptation.items()}
    psi = oracle_influence(setup, model, whole)
    expected = influence.to_token_index(influence.row_sums(psi.matrix))
    parts = [oracle_influence(setup, model, m).absolute_scale for m in (adaptation, stability)]
    scale = influence.to_token_index(influence.row_sums(parts[0] + LAMBDA * parts[1]))
    close(label.total, expected, scale, MODEL, name="label, given P")


# --- retention -----------------------------------------------------------------------------------


def check_kronecker_retention(setup: Setup) -> None:
    """V = S (W - W_ref) A of each scored weight, stored either way round."""
    setup = Setup(setup.case, setup.layers)
    model = setup.case.model()
    adapter = ReferenceAdapter(model)
    parameters = parameters_of(setup, adapter)
    transposed = list(parameters) if setup.case.config.transposed else []
    _, reference = drift_of(setup, model)
    factors, v = {}, {}
    for index, (name, weight) in enumerate(parameters.items()):
        rows, columns = weight.T.shape if transposed else weight.shape
        generator = torch.Generator().manual_seed(setup.case.direction_seed + index)
        s, a = (
            torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (rows, columns)
        )
        s, a = s @ s.T, a @ a.T
        factors[name] = (s, a)
        drift = (weight.detach() - reference[name]).T if transposed else (
            weight.detach() - reference[name]
        )  # fmt: skip
        v[name] = (s @ drift @ a).T if transposed else s @ drift @ a
    kept = FisherDrift.from_kronecker(factors, reference, transposed=transposed)
    config = ScorerConfig(estimator="path", layers=setup.layers, max_relative_drift=None)
    scorer = Scorer(model, setup.case.validation, kept, config)
    values = quiet_score(scorer, setup.case.batch)
    _compare_path(setup, model, values, v, "stability, Kronecker")


def check_retention_by_data(setup: Setup) -> None:
    """V = gradient of the mean token loss on given retention batches."""
    model = setup.case.model()
    data = [setup.case.batch, *setup.case.validation]
    parameters = parameters_of(setup, ReferenceAdapter(model))
    v = gradients.validation_gradient(model, forward_of(model), data, parameters)
    config = ScorerConfig(estimator="path", layers=setup.layers, score_bias=setup.score_bias)
    for retention in (data, data[0]):
        values = quiet_score(
            Scorer(model, setup.case.validation, retention, config), setup.case.batch
        )
        if retention is not data:
            v = gradients.validation_gradient(model, forward_of(model), data[0], parameters)
        _compare_path(setup, model, values, v, "stability, retention data")


def check_lambda(setup: Setup, weight: float) -> None:
    """stability is reported before lambda; total = adaptation + lambda stability."""
    values = quiet_score(make_scorer(setup, "direct"), setup.case.batch)
    model = setup.case.model()
    config = ScorerConfig(
        estimator="direct",
        layers=setup.layers,
        score_bias=setup.score_bias,
        stability_weight=weight,
        max_relative_drift=None,
    )
    drift = FisherDrift(*drift_of(setup, model))
    other = quiet_score(Scorer(model, setup.case.validation, drift, config), setup.case.batch)
    assert torch.equal(other.stability, values.stability)
    assert torch.equal(other.adaptation, values.adaptation)
    expected = values.adaptation + weight * values.stability
    scale = values.adaptation.abs() + abs(weight) * values.stability.abs()
    close(other.total, expected, scale, CONTRACTION, name="lambda")


# --- preference validation -----------------------------------------------------------------------


def preference_batches(setup: Setup, beta: float, normalization: str) -> list[PreferenceBatch]:
    """Validation batches 2n and 2n + 1 as chosen and rejected, with random references."""
    batches = setup.case.validation
    found = []
    for n in range(0, len(batches) - 1, 2):
        generator = torch.Generator().manual_seed(setup.case.seed + n)
        rows = len(batches[n]["labels"])
        reference = torch.randn(2, rows, generator=generator, dtype=torch.float64)
        found.append(PreferenceBatch(batches[n], batches[n + 1], *reference, beta, normalization))
    return found


def check_preference_validation(setup: Setup, beta: float, normalization: str) -> None:
    """G of preference pairs: gradient of the summed -log sigma(s) over its normaliser."""
    model = setup.case.model()
    parameters = parameters_of(setup, ReferenceAdapter(model))
    items = preference_batches(setup, beta, normalization)
    total = {n: torch.zeros_like(p) for n, p in parameters.items()}
    count = 0
    for item in items:
        pairs = preference.PreferencePairs(
            dict(item.chosen), dict(item.rejected), item.reference_chosen, item.reference_rejected
        )
        own = len(item.reference_chosen)
        if normalization == "tokens":
            own = sum(
                len(gradients.response_tokens(gradients.known_labels(b)))
                for b in (item.chosen, item.rejected)
            )
        objective = preference.preference_objective(
            forward_of(model), pairs, beta, normalisation=normalization
        )
        found = torch.autograd.grad(objective * own, list(parameters.values()), allow_unused=True)
        count += own
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                total[name] += gradient
    gain = {n: t / count for n, t in total.items()}
    for estimator in ("path", "label"):
        config = ScorerConfig(
            estimator=estimator,
            layers=setup.layers,
            score_bias=setup.score_bias,
        )
        validation: Any = items if len(items) > 1 else items[0]
        values = quiet_score(Scorer(model, validation, None, config), setup.case.batch)
        psi = oracle_influence(setup, model, gain)
        how = influence.column_sums if estimator == "path" else influence.row_sums
        expected, scale = (
            influence.to_token_index(how(x)) * values.mask for x in (psi.matrix, psi.absolute_scale)
        )
        # G is a difference of two branches: rounding is relative to both, not to what is left.
        size = scale + scale.max()
        close(values.total, expected, size, MODEL, name=f"preference, {estimator}")


# --- layouts -------------------------------------------------------------------------------------

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


def check_layout_does_not_matter(setup: Setup, estimator: str, extra: int) -> None:
    """A document's values: the same padded left or right, alone, among others, or packed."""
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


def other_padding(batch: Mapping[str, Tensor], shift: int) -> dict[str, Tensor]:
    """The batch with another token wherever nothing is read."""
    if "attention_mask" not in batch:
        return dict(batch)
    ids = batch["input_ids"]
    other = torch.where(batch["attention_mask"] == 0, (ids + shift) % 3, ids)
    return {**batch, "input_ids": other}


def check_padding_holds_nothing(setup: Setup, estimator: str, shift: int) -> None:
    """Values and G are the same, bit for bit, whatever token stands in the padding."""
    model, case = setup.case.model(), setup.case
    scorer = make_scorer(setup, estimator, model=model)
    given = quiet_score(scorer, case.batch)
    scorer.set_validation([other_padding(v, shift) for v in case.validation])
    found = quiet_score(scorer, other_padding(case.batch, shift))
    for name in ("total", "adaptation", "stability", "unassigned", "mask"):
        assert torch.equal(getattr(found, name), getattr(given, name)), f"{estimator}, {name}"


# --- one forward for both ------------------------------------------------------------------------


def check_observed_equals_scored(setup: Setup, estimator: str) -> None:
    """observe() on a pass without dropout = score(); the training gradient is a fresh run's."""
    batch = setup.case.batch
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    fresh = setup.case.model()
    summed_loss(fresh, batch).backward()
    model = setup.case.model().train()
    scorer = make_scorer(setup, estimator, model=model)
    expected = quiet_score(scorer, batch)
    with quiet(), scorer.observe() as observed:
        logits = model(**inputs)
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


def check_model_is_left_alone(setup: Setup, estimator: str) -> None:
    """Weights, gradients, hooks, modes, flags, overrides, RNG: as before, also after exceptions."""
    model = setup.case.model()
    disturb(model, setup.case.seed)
    batch = setup.case.batch
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    before = snapshot(model)
    scorer = make_scorer(setup, estimator, model=model)
    assert snapshot(model) == before
    quiet_score(scorer, batch)
    assert snapshot(model) == before, "after score"
    _ = scorer.direction
    assert snapshot(model) == before, "after direction"
    with quiet(), scorer.observe() as observed:
        observed.values(model(**inputs), batch["labels"])
    assert snapshot(model) == before, "after observe"
    try:
        with scorer.observe():
            model(**inputs)
            raise StopError
    except StopError:
        pass
    assert snapshot(model) == before, "after an exception in observe"
    _check_after_a_failing_forward(setup, scorer, model)


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


def check_direction_is_never_stale(setup: Setup, estimator: str) -> None:
    """After any write, of frozen weights too, counted or not: a fresh scorer's values, exactly."""
    model = setup.case.model()
    drift = FisherDrift(*drift_of(setup, model))
    scorer = make_scorer(setup, estimator, model=model)
    first = quiet_score(scorer, setup.case.batch).total
    assert torch.equal(quiet_score(scorer, setup.case.batch).total, first)
    scoped = {id(p) for p in scorer.parameters.values()}
    outside = [p for p in model.parameters() if id(p) not in scoped]
    for p in (next(iter(scorer.parameters.values())), outside[0]):
        with torch.no_grad():
            p.mul_(1.25)
        again = Scorer(model, setup.case.validation, drift, scorer.config)
        expected = quiet_score(again, setup.case.batch).total
        assert torch.equal(quiet_score(scorer, setup.case.batch).total, expected)
    first_weight = next(iter(scorer.parameters.values()))
    if len(first_weight) > 1:  # the same numbers, in other places
        first_weight.data[[0, 1]] = first_weight.data[[1, 0]].clone()
    else:
        outside[0].data.mul_(0.8)
    again = Scorer(model, setup.case.validation, drift, scorer.config)
    expected = quiet_score(again, setup.case.batch).total
    assert torch.equal(quiet_score(scorer, setup.case.batch).total, expected)
    first_weight.requires_grad_(False)
    if any(p.requires_grad for p in scorer.scope.parameters(biases=True).values()):
        again = Scorer(model, setup.case.validation, drift, scorer.config)
        expected = quiet_score(again, setup.case.batch).total
        assert torch.equal(quiet_score(scorer, setup.case.batch).total, expected)


def check_frozen_linears_are_out_of_scope(setup: Setup) -> None:
    """Linears without requires_grad take no part; the others keep their exact readouts."""
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
        config = ScorerConfig(
            estimator=estimator,
            layers=setup.layers,
            score_bias=setup.score_bias,
            max_relative_drift=None,
        )
        values = quiet_score(Scorer(model, setup.case.validation, drift, config), setup.case.batch)
        expected, scale = (
            influence.to_token_index(how(x)) * values.mask for x in (psi.matrix, psi.absolute_scale)
        )
        close(values.stability, expected, scale, MODEL, name=f"{estimator}, frozen linears")
