"""Real trainers against the slow reference step: options drawn together, and each hard one pinned.

Hypothesis draws what a run is asked for; the rows and weights follow from a drawn seed. A pinned
case says beside its options what must have happened in it, so that none is easier than its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tests.property import properties_trainer as running
from tests.property.profiles import budget
from tests.property.properties_trainer import (
    Seen,
    check_every_step_is_weighed,
    check_random_masks,
    compared,
)
from tests.property.reference_step import Asked, Replay
from tests.property.tolerance import unrecorded


@pytest.fixture(autouse=True)
def trainers() -> None:
    """Skip where the trainers' libraries are missing."""
    for name in ("trl", "peft"):
        pytest.importorskip(name, reason=f"the trainers need {name}")


Happened = Callable[[Seen, Replay], bool]


def moved(seen: Seen, replay: Replay) -> bool:
    """Three steps, each with a gradient."""
    return all(step.norm > 0 for step in replay.steps)


def clipped(seen: Seen, replay: Replay) -> bool:
    """The last step's gradient was cut to less than half."""
    return 0 < replay.clip < 0.5


def unequal(seen: Seen, replay: Replay) -> bool:
    """Pairs differ in omega by a tenth."""
    return max(replay.omegas) > 1.1 * min(replay.omegas)


def packed(seen: Seen, replay: Replay) -> bool:
    """A micro-batch is one row of more documents than it was given rows."""
    return all(
        len(micro) > seen.asked.rows and {d.row for d in micro} == {0}
        for step in replay.told.micro
        for micro in step
    )


def uneven(seen: Seen, replay: Replay) -> bool:
    """Micro-batches of a step keep different shares, so that it matters which count divides."""
    shares = [[float(w.mean()) for w in step.weights] for step in replay.steps]
    return any(max(of_step) - min(of_step) > 0.005 for of_step in shares)


def tied(seen: Seen, replay: Replay) -> bool:
    """All values of the first step are zero: the weights are the reference's."""
    return all(not bool(values["total"].any()) for values in replay.steps[0].values)


def drawn_anew(seen: Seen, replay: Replay) -> bool:
    """Steps are measured against different rows."""
    return len(set(replay.told.validation)) == seen.asked.steps


def crowded_out(seen: Seen, replay: Replay) -> bool:
    """Some step left a token out although tokens of less value were kept."""
    return any(
        bool((values["total"][weights == 0][:, None] > values["total"][weights == 1]).any())
        for step in replay.steps
        for values, weights in zip(step.values, step.weights, strict=True)
    )


def some_dropped(seen: Seen, replay: Replay) -> bool:
    """Some step dropped tokens, and none dropped most."""
    kept = [float(torch.cat(of_step).mean()) for of_step in seen.weights]
    return min(kept) < 1 and max(kept) > 0.5


PINNED: dict[str, tuple[Asked, Happened]] = {
    "the paper's, SFT": (Asked(estimator="alphatoken", layers=2), moved),
    "the paper's, DPO": (Asked("dpo", estimator="alphatoken", layers=2, seed=1), unequal),
    "LoRA": (Asked(lora=True, estimator="alphatoken", seed=1), moved),
    "LoRA from B = 0": (Asked(lora=True, preconditioner="frozen", seed=2), moved),
    "LoRA, DPO": (Asked("dpo", lora=True, seed=1), unequal),
    "clipping, full preconditioner": (
        Asked(preconditioner="full", max_grad_norm=0.1), clipped
    ),
    "clipping, frozen preconditioner": (
        Asked(preconditioner="frozen", max_grad_norm=0.1, seed=5), clipped
    ),
    "full preconditioner of a sum": (
        Asked(preconditioner="full", kept_normalization="sum", max_grad_norm=1e9), moved
    ),
    "full preconditioner, DPO, one threshold": (
        Asked("dpo", preconditioner="full", shared_threshold=True, max_grad_norm=0.02), clipped
    ),
    "all but the harmful": (Asked(policy="harmless", confidence=0.7), some_dropped),
    "all but the harmful, full preconditioner": (
        Asked(policy="harmless", confidence=0.6, preconditioner="full", estimator="alphatoken"),
        some_dropped,
    ),
    "all but harmful responses, LoRA": (
        Asked(policy="harmless", value_unit="response", confidence=0.8, lora=True, rows=3),
        some_dropped,
    ),
    "all but the harmful, DPO": (
        Asked("dpo", policy="harmless", confidence=0.6, preconditioner="frozen"), some_dropped
    ),
    "kept normalisation": (Asked(kept_normalization="kept", max_grad_norm=1e9, seed=4), uneven),
    "kept normalisation, DPO": (Asked("dpo", kept_normalization="kept", max_grad_norm=1e9), uneven),
    "kept normalisation over a global threshold": (
        Asked(kept_normalization="kept", keep_scope="global", max_grad_norm=1e9, seed=2), uneven
    ),
    "masked logit": (Asked("dpo", masked_logit=True, kept_normalization="kept"), unequal),
    "packing": (Asked(packing=True, estimator="path"), packed),
    "packing, own forward": (
        Asked(packing=True, estimator="direct", scoring_forward="own", lora=True), packed
    ),
    "pool, micro-batches of validation": (
        Asked(validation_mode="pool", validation_micro_batch_size=2), drawn_anew
    ),
    "direction for two steps": (
        Asked(direction_steps=2, validation_mode="pool", preconditioner="frozen"), drawn_anew
    ),
    "global threshold, DPO": (Asked("dpo", keep_scope="global", estimator="path"), unequal),
    "by sequence": (Asked(keep_scope="sequence", estimator="direct", layers=2), moved),
    "stability alone, all tied at first": (Asked(objective="stability", seed=3), tied),
    "adaptation alone": (Asked(objective="adaptation", retention="none"), moved),
    "Kronecker retention": (Asked(retention="kronecker", seed=1), moved),
    "retention by rows": (Asked(retention="data", stability_weight=0.7), moved),
    "retention by pairs": (Asked("dpo", retention="data"), unequal),
    "lambda in units of the balance": (
        Asked(stability_units="balance", stability_weight=0.4, estimator="alphatoken"), moved
    ),
    "lambda in units of the balance, full preconditioner, DPO": (
        Asked("dpo", stability_units="balance", preconditioner="full", retention="kronecker"),
        moved,
    ),
    "whole responses, the worst": (Asked(value_unit="response", policy="bottom"), moved),
    "transformers' own trainer": (Asked("lm", kept_normalization="sum", lora=True), moved),
    "all tokens": (Asked(policy="all"), moved),
    "random": (Asked(policy="random", kept_normalization="kept"), moved),
    "tokens that repeat each other": (
        Asked(interaction_weight=1.5, estimator="path", layers=2), crowded_out
    ),
    "tokens that repeat each other, DPO": (
        Asked("dpo", interaction_weight=1.0, lora=True, seed=1), crowded_out
    ),
    "DFT": (Asked(loss="dft", layers=2, preconditioner="full", max_grad_norm=1e9), moved),
    "nothing held out": (Asked(held_out_steps=0, validation_mode="pool"), drawn_anew),
    "three micro-batches of one row": (
        Asked(accumulation=3, rows=1, preconditioner="full", direction_steps=2), moved
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PINNED)
def test_a_pinned_run_is_the_references(name: str) -> None:
    asked, happened = PINNED[name]
    assert happened(*compared(asked)), f"nothing of the kind happened: {happened.__doc__}"


@st.composite
def runs(draw: st.DrawFn) -> Asked:
    """Any options that may stand together."""
    pick: Callable[..., Any] = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    family = pick("sft", "sft", "dpo", "dpo", "dpo", "lm")
    dpo = family == "dpo"
    packing = family == "sft" and pick(False, False, True)
    scope = pick("batch", "sequence", "global")
    whole = scope != "sequence" and not packing and pick(False, False, True)
    accumulation, rows = pick((2, 2), (1, 3), (3, 1))
    preconditioner = pick(None, "frozen", "full")
    objective = pick("both", "both", "adaptation", "stability")
    kinds = ("diagonal", "kronecker", "data")
    estimator = pick("label", "direct", "path", "alphatoken")
    divisors = ("response", "sum") if family != "dpo" else ("response",)
    policy = pick("top", "top", "bottom")
    judged = objective != "stability" and scope == "batch"
    policy = "harmless" if judged and pick(False, False, True) else policy
    harmless = policy == "harmless"
    ranked = policy == "top" and scope != "global"
    interacts = ranked and not whole and pick(False, True)
    return Asked(
        family=family,
        loss=pick("nll", "dft") if family == "sft" and estimator == "label" else "nll",
        lora=draw(st.booleans()),
        accumulation=accumulation,
        rows=rows,
        estimator=estimator,
        layers=pick(1, 2),
        objective=objective,
        stability_units=pick("plain", "plain", "balance") if objective == "both" else "plain",
        window=pick(None, 1, 3),
        policy=policy,
        interaction_weight=pick(0.5, 1.0, 2.0) if interacts else 0.0,
        keep_ratio=pick(0.5, 0.3, 0.7, 1.0),
        confidence=pick(0.5, 0.7, 0.95),
        keep_scope=scope,
        value_unit="response" if whole else "token",
        kept_normalization=pick(*divisors, *(() if harmless else ("kept",))),
        shared_threshold=dpo and not harmless and draw(st.booleans()),
        masked_logit=dpo and draw(st.booleans()),
        retention=pick(*kinds) if objective == "stability" else pick("none", *kinds),
        preconditioner=preconditioner,
        precondition_after=pick(1, 2),
        validation_mode=pick("fixed", "pool"),
        validation_micro_batch_size=None if harmless else pick(None, 2),
        held_out_steps=pick(0, 1, 2),
        direction_steps=pick(1, 1, 2),
        scoring_forward=pick("auto", "own"),
        packing=packing,
        max_grad_norm=pick(0.05, 1e9),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.filterwarnings("ignore:validation rows label")  # of rows drawn at random, a few
# A run takes a second, and shrinking some hundred runs: what was drawn is shown as it is.
@settings(budget(0.4, least=10), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(asked=runs())
def test_a_drawn_run_is_the_references(asked: Asked) -> None:
    running.check_the_trainer_is_the_reference(asked)


def test_random_masks() -> None:
    check_random_masks(Asked(policy="random"))


def test_every_step_is_weighed() -> None:
    check_every_step_is_weighed(Asked(policy="random"))


HARD: dict[str, Callable[[Asked], bool]] = {
    "full preconditioner under accumulation, clipped, DPO with LoRA": lambda a: (
        a.preconditioner == "full"
        and a.family == "dpo"
        and a.lora
        and a.accumulation > 1
        and a.max_grad_norm < 1
    ),
    "packing over a global threshold, divided by the kept": lambda a: (
        a.packing and a.keep_scope == "global" and a.kept_normalization == "kept"
    ),
    "pool and an old direction": lambda a: a.validation_mode == "pool" and a.direction_steps > 1,
    "harmless responses under the full preconditioner, by LoRA": lambda a: (
        a.policy == "harmless"
        and a.value_unit == "response"
        and a.preconditioner == "full"
        and a.lora
    ),
    "masked logit, one threshold, divided by the kept": lambda a: (
        a.masked_logit and a.shared_threshold and a.kept_normalization == "kept"
    ),
}


@pytest.mark.slow  # about the generator of runs
@pytest.mark.parametrize("name", HARD)
def test_the_hard_combinations_are_drawn(name: str) -> None:
    found = find(runs(), HARD[name], settings=settings(max_examples=5000, database=None))
    assert HARD[name](found)


SLIGHT = 1 + 1e-6
ALTERED = {
    "values": lambda seen: seen.values[1][0]["total"].mul_(SLIGHT),
    "weights": lambda seen: seen.weights[2][1].copy_(1 - seen.weights[2][1]),
    "gradient": lambda seen: seen.gradients[1].mul_(SLIGHT),
    "parameters": lambda seen: seen.parameters[2].mul_(SLIGHT),
    "ledger": lambda seen: next(iter(seen.ledger.values()))[:, 0].mul_(SLIGHT),
    "visits": lambda seen: seen.visits.update({next(iter(seen.visits)): 9}),
    "drift": lambda seen: seen.logs[1].update({"alpha/drift": 2 * seen.logs[1]["alpha/drift"]}),
    "an unlogged value": lambda seen: seen.logs[2].pop("alpha/total_mean"),
    "NaN": lambda seen: seen.gradients[0].fill_(torch.nan),
}


@pytest.mark.parametrize("name", ALTERED)
def test_the_comparison_has_teeth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millionth of any part of what was recorded, or one thing missing, is noticed."""
    asked = Asked()
    seen = trained_once(asked)
    altered = running.copy.deepcopy(seen)
    ALTERED[name](altered)
    monkeypatch.setattr(running, "trained", lambda _: altered)
    with unrecorded(), pytest.raises(AssertionError):
        compared(asked)


_seen: dict[Asked, Seen] = {}


def trained_once(asked: Asked) -> Seen:
    if asked not in _seen:
        _seen[asked] = running.trained(asked)
    return _seen[asked]
