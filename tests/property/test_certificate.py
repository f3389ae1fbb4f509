"""The certificate: right code passes with room to spare, and every fault that shows is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import FisherDrift, PreferenceBatch, Scorer, ScorerConfig
from alphatoken.certificate.certify import Certificate
from alphatoken.certificate.tolerances import TOLERANCES
from alphatoken.errors import InputError, UnsupportedError
from alphatoken.scoring.passes import Pass
from tests.places import nightly
from tests.property import mutants_adapters, mutants_proofs
from tests.property.mutants import BY_NAME
from tests.property.mutation import Edit, Mutant, applied, without_proofs
from tests.property.profiles import budget
from tests.property.properties import Setup, make_scorer, quiet, setups, stepped, summed_loss
from tests.property.strategies import make_case
from tests.property.tolerance import close

ROWS = ("pprrrr", "..prrr")
VALIDATION = (("pprr", "prrr"), ("ppr",))
ESTIMATORS = ("label", "direct", "alphatoken", "same_layer_hop", "path", "paper_literal")


# --- cases that faults are tried on --------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """How a fault is shown: what is built with it inside, and the component that must be off."""

    component: str
    estimator: str = "alphatoken"
    structure: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    build: Callable[[Trial], tuple[Scorer, dict[str, Any]]] | None = None

    @property
    def setup(self) -> Setup:
        """A small case with this structure: two rows, one padded, several validation rows."""
        structure = dict(self.structure)
        layers = structure.pop("scored", "all")
        score_bias = structure.pop("score_bias", False)
        rows = structure.pop("rows", ROWS)
        case = make_case(rows, structure.pop("validation", VALIDATION), seed=3, **structure)
        return Setup(case, layers, score_bias)

    def certificate(self) -> Certificate:
        """Of a scorer that is built and run here."""
        with quiet():
            if self.build is None:
                scorer, extra = make_scorer(self.setup, self.estimator, **dict(self.options)), {}
            else:
                scorer, extra = self.build(self)
            return scorer.verify(self.setup.case.batch, tokens=3, progress=False, **extra)


def trial(component: str, estimator: str = "alphatoken", **rest: Any) -> Trial:
    """Structure and options by name: those of ``ScorerConfig`` are options."""
    build = rest.pop("build", None)
    known = set(ScorerConfig.__dataclass_fields__) - {"score_bias"}
    chosen = tuple((k, v) for k, v in rest.items() if k in known)
    structure = tuple((k, v) for k, v in rest.items() if k not in known)
    return Trial(component, estimator, structure, chosen, build)


def weighted(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """Token weights of any sign, as omega on chosen and rejected rows."""
    labels = one.setup.case.batch["labels"]
    weights = torch.linspace(-1.0, 2.0, labels.numel(), dtype=torch.float64).view(labels.shape)
    return make_scorer(one.setup, one.estimator, **dict(one.options)), {"token_weights": weights}


def on_pairs(one: Trial, normalization: str = "tokens") -> tuple[Scorer, dict[str, Any]]:
    """Preference pairs as validation."""
    model, (chosen, rejected) = one.setup.case.model(), one.setup.case.validation
    reference = torch.tensor([-7.0, -9.0], dtype=torch.float64)
    pairs = PreferenceBatch(
        chosen, rejected, reference, reference.flip(0) * 1.2, beta=0.5, normalization=normalization
    )
    config = ScorerConfig(one.estimator, layers=one.setup.layers, **dict(one.options))
    return Scorer(model, pairs, None, config), {}


def per_pair(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """The same, divided by the pairs."""
    return on_pairs(one, "pairs")


PAIRS = {"validation": (("pprr", "prrr"), ("ppr", "prr"))}


def preconditioned(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """P as a mapping."""
    scorer = make_scorer(one.setup, one.estimator)
    p = {n: 0.5 + torch.rand_like(w).detach() for n, w in scorer.parameters.items()}
    return make_scorer(one.setup, one.estimator, preconditioner=p), {}


def adam(one: Trial, kind: str, name: str = "AdamW") -> tuple[Scorer, dict[str, Any]]:
    """P from the optimizer's state after two steps; a step of its own scale under "full"."""
    model, optimizer = stepped(one.setup, 2, name)
    labels = one.setup.case.batch["labels"]
    scorer = make_scorer(
        one.setup,
        one.estimator,
        model=model,
        optimizer=optimizer,
        preconditioner=kind,
        precondition_after=1,
    )
    weights = torch.full(labels.shape, 0.3, dtype=torch.float64)
    return scorer, {"step_weights": weights if kind == "full" else None}


def full(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """P = du/dg."""
    return adam(one, "full")


def frozen(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """P with its denominator held."""
    return adam(one, "frozen")


def coupled(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """Adam's own weight decay."""
    return adam(one, "full", "Adam, L2")


def adaptation_only(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """No retention term."""
    return make_scorer(one.setup, one.estimator, retention=False, **dict(one.options)), {}


def moved(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """Values are taken, then the weights move, then values are asked for again."""
    model = one.setup.case.model()
    scorer = make_scorer(one.setup, one.estimator, model=model)
    scorer.score(one.setup.case.batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return scorer, {}


def replaced(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """Another validation set after values were taken."""
    scorer = make_scorer(one.setup, one.estimator)
    scorer.score(one.setup.case.batch)
    scorer.set_validation(list(one.setup.case.validation)[:1])
    return scorer, {}


def far(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """A retention term 2^60 times the adaptation: the dual forward runs along M / ||M||."""
    scorer = make_scorer(one.setup, one.estimator)
    drift = scorer.given.retention
    scaled = {n: f * 2.0**60 for n, f in drift.fisher.items()}
    scorer.set_retention(FisherDrift(scaled, drift.reference, exact_names=True))
    return scorer, {}


# --- which mutant shows, and where ---------------------------------------------------------------

DIRECT = trial("adaptation_direct", "direct")
HEADS = {"heads": 4, "kv_heads": 2}
CAUSAL = trial("adaptation_causal", **HEADS)
PATH = trial("adaptation", "path")
LABEL = trial("adaptation", "label")
BIAS = trial("adaptation", "path", bias=True, score_bias=True)
WINDOW = trial("adaptation_causal", window=2)
G = trial("direction (adaptation)", "path")
V = trial("direction (stability)", "path")
FULL = trial("direction (adaptation)", "path", build=full)
HOP = trial("adaptation_causal", "same_layer_hop")
TOTAL = trial("total", "path")
PADDED = trial("mask", "path", rows=("pprrrr", "..rrrr"))

SEEN = {
    "aggregated-errors-as-direct": DIRECT,
    "label-shift-off-by-one-in-the-losses": PATH,
    "label-shift-off-by-one-in-the-values": DIRECT,
    "padding-leaks-into-the-attention-weights": DIRECT,
    "padding-leaks-into-the-losses": PATH,
    "label-after-padding-valued": PADDED,
    "mask-of-the-token-for-that-of-its-label-position": PADDED,
    "mean-for-sum-of-the-losses": PATH,
    "mean-for-sum-over-the-heads-of-a-group": CAUSAL,
    "last-token-dropped": PATH,
    "bias-forgotten-in-the-contraction": BIAS,
    "head-mean-for-per-head": CAUSAL,
    "grouped-heads-in-the-wrong-order": trial("adaptation_direct", **HEADS),
    "alpha-with-the-value-projections-own-error": trial("adaptation_causal"),
    "window-one-too-short": WINDOW,
    "window-one-too-long": WINDOW,
    "alpha-of-the-wrong-direction": CAUSAL,
    "soft-cap-factor-left-out-of-the-self-only-backward": trial(
        "adaptation_direct", "direct", softcap=2.0
    ),
    "soft-cap-factor-left-out-of-the-forward-mode": trial("adaptation", "label", softcap=2.0),
    "sink-left-out": trial("adaptation_direct", "direct", sinks=True),
    "sign-missing-on-rejected-in-the-objective": trial(
        "direction (adaptation)", "path", build=on_pairs, **PAIRS
    ),
    "preconditioner-applied-twice": trial("direction (adaptation)", "path", build=preconditioned),
    "twice-called-module-overwritten": trial("adaptation", "path", repeated_linear=True),
    "tied-module-overwritten": trial("adaptation", "path", tied_linears=True),
    "stale-direction": trial("direction (adaptation)", "path", build=moved),
    "float32-in-the-contraction": PATH,
    "bfloat16-in-the-contraction": PATH,
    "float32-in-the-attention-weights": CAUSAL,
    "bfloat16-in-the-self-only-backward": DIRECT,
    "cross-mode-keeps-the-self-terms": HOP,
    "cross-mode-without-the-score-path": HOP,
    "gate-passes-dk-in-self-mode": DIRECT,
    "self-mode-without-dq": DIRECT,
    "scale-forgotten-in-dk": DIRECT,
    "softmax-mean-forgotten-in-dk": DIRECT,
    "forward-mode-without-dv": LABEL,
    "forward-mode-without-the-mean": LABEL,
    "forward-mode-without-the-sinks-tangent": trial(
        "adaptation", "label", sinks=True, parameters="all", build=adaptation_only,
    ),
    "tied-weight-moved-in-one-place-only": trial("adaptation", "label", tied_linears=True),
    "named-parameters-of-the-scored-layers-alone": trial(
        "scope", "label", parameters="linears,*norm*,head.weight", build=adaptation_only,
    ),
    "context-column-at-the-label-position": trial(
        "adaptation_causal", causal_position="context"
    ),
    "unassigned-dropped": trial("unassigned", "path"),
    "lambda-on-the-adaptation": TOTAL,
    "reference-sign": V,
    "fisher-forgotten-in-the-drift": V,
    "mean-of-batch-means": G,
    "validation-gradient-in-bf16": G,
    "token-weights-ignored": trial("adaptation", "path", build=weighted),
    "epsilon-inside-adams-root": FULL,
    "no-bias-correction-in-adam": FULL,
    "full-preconditioner-without-its-second-term": FULL,
    "state-of-another-kind-in-a-block": FULL,
    "curvature-added-in-the-full-preconditioner": FULL,
    "gradient-left-out-of-the-second-moment": FULL,
    "gradient-left-out-of-the-first-moment": FULL,
    "coupled-decay-left-out-of-the-gradient": trial(
        "direction (adaptation)", "path", build=coupled
    ),
    "stability-counted-twice": TOTAL,
    "lambda-in-inverse-units": trial("total", "path", stability_units="balance"),
    "summed-direction-without-lambda": TOTAL,
    "summed-direction-without-stability": TOTAL,
    "stability-in-spite-of-the-objective": trial(
        "stability", "path", objective="adaptation"
    ),
    "streamed-errors-of-another-mode": DIRECT,
    "direct-part-in-spite-of-the-part": trial("adaptation_direct", part="causal"),
    "step-weights-ignored": FULL,
    "gradient-missing-from-the-full-preconditioner": FULL,
    "full-preconditioner-on-one-side": trial("direction (stability)", "path", build=full),
    "old-validation-set": trial("direction (adaptation)", "path", build=replaced),
    "first-layers-for-the-last": trial("scope", "path", scored=1, build=adaptation_only),
    "hops-into-lower-layers": HOP,
    "label-values-not-scaled-back": trial("stability", "label", build=far),
    "pairs-counted-twice": trial("direction (adaptation)", "path", build=per_pair, **PAIRS),
    "one-part-in-a-billion": PATH,
}  # fmt: skip

OF_THE_HEAD = {
    "target-left-in-the-heads-error": ("alphatoken", "linears"),
    "tangent-of-the-target-forgotten": ("label", "linears"),
    "tangent-of-the-heads-weight-forgotten": ("label", "all"),
}
UNSEEN = {
    "forward-mode-without-the-sinks": "refused on the pass itself: the losses of forward mode are "
    "not those that are observed",
    "wrong-start-believed": "as above",
    "sum-then-outer-in-the-weight-gradient": "only the proof of coverage and sharded weights form "
    "G from captured errors, and a certificate of sharded weights is refused",
    "sum-then-outer-in-the-validation-gradient": "as above: sharded weights only",
    "validation-prompt-dropped-from-the-gradient": "as above: sharded weights only",
    "diagonal-ignores-the-mask": "a position that cannot attend to itself is in masks only that "
    "no decoder makes",
    "amsgrads-maximum-forgotten": "shows with amsgrad alone; see test_full_preconditioners",
    "errors-beside-the-way-forgotten": "where blocks add to one stream nothing lies beside the way"
    "; in a model that is cut the scorer refuses (no error reaches a linear)",
    "pin-ignored": "the certificate is of the current weights, so a pinned direction that follows "
    "them is what it asks for",
    "named-parameters-from-the-scored-layers-on": "costs time, no value: the graph then begins at "
    "the embeddings",
    **dict.fromkeys(OF_THE_HEAD, "drawn decoders name no head; seen on a real class, see below"),
    "tangent-of-a-bias-forgotten": "of biases beside inputs that do not move; none is here",
    "sums-not-shrunk-under-a-larger-maximum": "shows where a vocabulary takes several blocks",
    "heads-weight-gradient-of-other-tokens": "no estimator on errors values the head's weight",
    "target-left-in-the-heads-weight-gradient": "as above; `label` takes no gradient of it",
    "known-logits-of-other-rows": "of a training loop's forward, which no certificate runs",
    "losses-of-other-targets": "as above",
    "tangents-times-errors-of-other-rows": "as above",
    "logits-scaled-in-place-below-observe": "as above",
    "logits-scaled-in-place-elsewhere": "as above",
    "logits-of-another-forward": "as above",
    "losses-of-another-forward": "as above",
    "tangent-of-the-observed-heads-weight-forgotten": "as above",
    "errors-at-other-hidden-states": "as above",
    "capped-logits-taken-for-the-heads": "drawn decoders name no head",
    "jackknife-without-its-factor": "no value takes part; standard errors are not certified",
    "validation-batches-taken-for-equal": "as above",
    "part-divided-by-its-own-tokens": "of scorers that are asked for standard errors",
    "parts-without-the-preconditioner": "as above",
    "modes-not-put-back": "changes the user's model, no value",
    "self-only-mode-not-put-back": "changes what training sends back afterwards, no value",
}
ELSEWHERE = {
    "direction.fisher": "the Fisher is taken as it was given",
    "direction.moments": "the Fisher is taken as it was given",
    "select.losses.masked": "training losses, no values",
    "select.losses.dpo_coefficient": "omega is constant in every value",
    "select.masks": "selection starts from values",
    "select.confidence": "selection starts from values",
    "select.interaction": "products of token gradients are no part of a value",
    "train": "the trainer's own",
    "methods": "other methods",
}
"""Prefixes of what a mutant may change that no value of a scorer passes through."""


def elsewhere(mutant: Mutant) -> bool:
    """All its edits lie where no value of a scorer passes."""
    return all(any(edit.target.startswith(prefix) for prefix in ELSEWHERE) for edit in mutant.edits)


def test_each_mutant_shows_in_a_certificate_or_is_explained() -> None:
    """No mutant is forgotten, none is in two places."""
    outside = {name for name, mutant in BY_NAME.items() if elsewhere(mutant)}
    assert not set(SEEN) & set(UNSEEN)
    assert not (set(SEEN) | set(UNSEEN)) & outside
    assert set(SEEN) | set(UNSEEN) | outside == set(BY_NAME)


@pytest.mark.parametrize("name", sorted(SEEN))
def test_a_mutant_does_not_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fault inside the certificate fails and names the component."""
    # The observed losses would refuse some before the certificate can.
    monkeypatch.setattr(Pass, "require_losses", lambda *_: None)
    with applied(BY_NAME[name]) as calls, without_proofs():
        found = SEEN[name].certificate()
    assert calls.total() > 0
    assert not found.passed, str(found)
    assert SEEN[name].component in {check.component for check in found.failures}, str(found)
    assert str(found).endswith("does not agree")


@pytest.mark.parametrize("name", OF_THE_HEAD)
def test_an_error_at_the_head_does_not_agree(name: str) -> None:
    """On a transformers decoder, whose head is asked about response tokens only."""
    pytest.importorskip("transformers")
    estimator, parameters = OF_THE_HEAD[name]
    options = {"derivative": "forward_mode"} if estimator == "label" else {}
    scorer, batch = real_scorer("llama", torch.float64, estimator, parameters=parameters, **options)
    with quiet():
        assert scorer.verify(batch).passed
    scorer, batch = real_scorer("llama", torch.float64, estimator, parameters=parameters, **options)
    with applied(BY_NAME[name]) as calls, without_proofs(), quiet():
        found = scorer.verify(batch)
    assert calls.total() > 0
    assert not found.passed, str(found)


@pytest.mark.parametrize("one", list(dict.fromkeys(SEEN.values())), ids=lambda one: one.component)
def test_without_a_fault_the_same_certificate_agrees(one: Trial) -> None:
    """What a fault is shown on is no case that always fails."""
    found = one.certificate()
    assert found.passed, str(found)
    assert "every component agrees" in str(found)


# --- faults that no mutant is --------------------------------------------------------------------


def edit(target: str, old: str, new: str) -> Mutant:
    """A fault of this file alone."""
    return Mutant(f"{target}: {new}", "", (Edit(target, old, new),), (), listed=False)


PLANTED = {
    "another lambda": (
        edit(
            "estimate.token_values.combine",
            "g + stability_weight *", "g + 0.9 * stability_weight *",
        ),
        TOTAL,
    ),
    "a layer fewer": (
        edit(
            "model.layer_choice.layers_within",
            "(depth - layers, depth)", "(depth - layers + 1, depth)",
        ),
        trial("scope", "path", scored=2),
    ),
    "a validation batch fewer": (
        edit(
            "direction.build.Ingredients.against",
            "validation=validation",
            "validation=validation[:-1]",
        ),
        G,
    ),
    "the validation gradient in bfloat16": (
        edit(
            "direction.objective.mean_gradient",
            "sums.pop(name) / count", "(sums.pop(name) / count).bfloat16().float()",
        ),
        G,
    ),
    "one value too many in the mean": (
        edit("direction.objective.stream_losses", "count += tokens", "count += tokens + 1"), G,
    ),
    "omega forgotten in the objective": (
        edit(
            "direction.objective.weighted_losses",
            "(sign * omega)", "(sign * torch.ones_like(omega))",
        ),
        trial("direction (adaptation)", "path", build=on_pairs, **PAIRS),
    ),
    "omega of the other sign": (
        edit("direction.objective.preference_weights", "pairs.beta,", "-pairs.beta,"),
        trial("direction (adaptation)", "path", build=on_pairs, **PAIRS),
    ),
    "no reference in omega": (
        edit(
            "direction.objective.preference_weights", "pairs.reference_chosen.to(chosen)",
            "0 * pairs.reference_chosen.to(chosen)",
        ),
        trial("direction (adaptation)", "path", build=on_pairs, **PAIRS),
    ),
    "token weights squared in the backward": (
        edit(
            "scoring.passes.Pass.summed_loss",
            "* weights.to(losses)", "* weights.to(losses) ** 2",
        ),
        trial("adaptation_direct", "direct", build=weighted),
    ),
    "token weights forgotten by label": (
        edit(
            "scoring.valuing.Valuer._label",
            "taken.values * weights.to(taken.values)", "taken.values",
        ),
        trial("adaptation", "label", build=weighted),
    ),
    "values where nothing is learned": (
        edit("estimate.token_values.assign_columns", "direct).masked_fill(~mask, 0.0)", "direct)"),
        PATH,
    ),
    "stability squared": (
        edit("direction.algebra.diagonal_drift", "fisher.to(dtype) *", "fisher.to(dtype) ** 2 *"),
        V,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_planted_fault_does_not_agree(name: str) -> None:
    """Lambda, scope, G, omega, weights, the zeros off the response."""
    mutant, one = PLANTED[name]
    assert one.certificate().passed
    with applied(mutant) as calls, without_proofs():
        found = one.certificate()
    assert calls.total() > 0
    assert not found.passed, str(found)
    assert one.component in {check.component for check in found.failures}, str(found)


def test_stale_directions_do_not_agree() -> None:
    """Weights written to under a pin; a Fisher and a reference that were replaced."""
    one = trial("direction", "path")
    case = one.setup.case
    with quiet():
        scorer = make_scorer(one.setup, "path", model=(model := case.model()))
        scorer.pin("kept")
        assert scorer.verify(case.batch).passed
        model.layers[0].mlp.up_proj.weight.data.mul_(1.05)  # type: ignore[operator, union-attr]
        found = scorer.verify(case.batch)
        stale = {check.component: check for check in found.failures}
        assert "direction (stability)" in stale
        assert stale["direction (stability)"].parameter == "layers.0.mlp.up_proj.weight"
        assert "total" in stale
        scorer.refresh()
        assert scorer.verify(case.batch).passed
        drift = scorer.given.retention
        doubled = {n: 2 * f for n, f in drift.fisher.items()}
        scorer.set_retention(FisherDrift(doubled, drift.reference, exact_names=True))
        assert scorer.verify(case.batch).passed
        made_of = scorer.builder.made_of
        scorer.builder.made_of = replace(made_of, retention=drift)  # the Fisher before
        scorer.refresh()
        off = scorer.verify(case.batch)
    assert {"direction (stability)", "stability", "total"} <= {c.component for c in off.failures}
    assert "adaptation" not in {c.component for c in off.failures}


def test_the_linear_that_is_off_is_named() -> None:
    """A contraction that is wrong in one linear map only."""
    fault = edit(
        "estimate.columns.ColumnSums.contract",
        "return contraction.contract(",
        "return (1.01 if linear.name.endswith('0.mlp.down_proj') else 1.0) * contraction.contract(",
    )
    with applied(fault), without_proofs():
        found = DIRECT.certificate()
    off = {check.component: check for check in found.failures}
    assert off["adaptation_direct"].parameter == "layers.0.mlp.down_proj"
    assert "layers.0.mlp.down_proj" in str(found)


def test_token_weights_are_certified_and_their_absence_is_noticed() -> None:
    """Omega on chosen, minus omega on rejected rows: for every estimator."""
    for estimator in ESTIMATORS:
        one = trial("total", estimator, build=weighted)
        assert one.certificate().passed
        with quiet():
            scorer, extra = weighted(one)
            plain = dict.fromkeys(extra)
            assert scorer.verify(one.setup.case.batch, tokens=2, **plain).passed


# --- right code ----------------------------------------------------------------------------------


@given(
    setup=setups(),
    estimator=st.sampled_from(ESTIMATORS),
    window=st.sampled_from([None, 0, 1, 3]),
    position=st.sampled_from(["label", "context"]),
    reduction=st.sampled_from(["per_head", "mean"]),
    objective=st.sampled_from(["both", "adaptation", "stability"]),
    part=st.sampled_from(["both", "direct", "causal"]),
)
@example(  # the block of the scored layer is used below it as well, where nothing has a gradient
    setup=Setup(
        case=make_case(
            ("pr",), (("pr",),), vocabulary=3, layers=3, hidden=4, heads=1, kv_heads=1, head_dim=2,
            mlp="plain", mlp_width=3, norm="none", positions="none", repeated_block=True,
        ),
        layers=(1,),
        score_bias=False,
    ),
    estimator="direct", window=None, position="label", reduction="per_head", objective="both",
    part="both",
)  # fmt: skip
@budget(0.5, least=25)
def test_right_code_agrees(
    setup: Setup, estimator: str, window: int | None, position: str, reduction: str,
    objective: str, part: str,
) -> None:  # fmt: skip
    """Every structure and option; what is left of the tolerance is recorded."""
    if estimator in ("label", "path") or (estimator == "direct" and part == "causal"):
        part = "both"
    with quiet():
        scorer = make_scorer(
            setup, estimator, window=window, causal_position=position,
            head_reduction=reduction, objective=objective, part=part,
        )  # fmt: skip
        found = scorer.verify(setup.case.batch, tokens=2, progress=False)
    assert found.passed, str(found)
    close(found.error, 0.0, 1.0, found.tolerance, name="certificate of right code")


# --- narrow arithmetic, real classes -------------------------------------------------------------


def real_scorer(name: str, dtype: torch.dtype, estimator: str, **chosen: Any) -> Any:
    """A tiny transformers decoder, a drift, a padded batch."""
    from tests.property.architectures import BY_NAME as ARCHITECTURES

    model = ARCHITECTURES[name].build(1, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 23, (2, 9), generator=generator)
    held = torch.randint(3, 23, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    columns = torch.arange(9)
    labels = ids.masked_fill((columns < 3) | (mask == 0), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    validation = {"input_ids": held, "labels": held.masked_fill(torch.arange(7) < 2, -100)}
    config = ScorerConfig(estimator, layers=2, max_relative_drift=None, **chosen)
    parameters = Scorer(model, validation, None, config).parameters
    noise = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    drift = FisherDrift(
        {n: x.square() for n, x in noise.items()},
        {n: p.detach().float() + 0.02 * noise[n] for n, p in parameters.items()},
    )
    return Scorer(model, validation, drift, config), batch


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma2"])
def test_real_classes_agree_in_every_arithmetic(name: str, dtype: str) -> None:
    """Split, fused and transposed projections, soft-cap and windows; the margin is recorded."""
    for estimator in ("alphatoken", "label"):
        scorer, batch = real_scorer(name, getattr(torch, dtype), estimator)
        with quiet():
            found = scorer.verify(batch, tokens=4)
        assert found.passed, str(found)
        assert found.tolerance == TOLERANCES[found.arithmetic]
        label = f"certificate, {found.arithmetic}"
        close(found.error, 0.0, 1.0, found.tolerance, name=label)


SCALES = {
    "forgotten in dk": (BY_NAME["scale-forgotten-in-dk"], "direct"),
    "a quarter more in the weights": (
        edit("model.attention.AttentionStatistics.block", "* self.scale", "* (1.25 * self.scale)"),
        "alphatoken",
    ),
    "forgotten in the weights": (
        edit("model.attention.AttentionStatistics.block", "* self.scale", "* 1.0"), "label",
    ),
    "forgotten on the diagonal": (
        edit("model.attention.AttentionStatistics.diagonal", "* self.scale", "* 1.0"), "direct",
    ),
    "half of it in forward mode": (
        edit("model.attention.forward_mode_attention", "queries * statistics.scale",
             "queries * (0.5 * statistics.scale)"),
        "label",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SCALES))
def test_a_changed_attention_scale_shows_under_bfloat16(name: str) -> None:
    """Where rounding is coarsest."""
    fault, estimator = SCALES[name]
    with quiet(), applied(fault) as calls, without_proofs():
        scorer, batch = real_scorer("llama", torch.bfloat16, estimator)
        if name == "forgotten in the weights":  # the losses of forward mode are others: refused
            with pytest.raises(InputError, match="do not belong to the observed forward"):
                scorer.verify(batch, tokens=4)
            return
        found = scorer.verify(batch, tokens=4)
    assert calls.total() > 0
    assert not found.passed, str(found)
    assert any(check.component.startswith("adaptation") for check in found.failures)


def test_lora_factors_agree_and_a_fault_is_named() -> None:
    """Factors A and B are scored by themselves, B after its first step."""
    peft = pytest.importorskip("peft")
    from tests.property.architectures import BY_NAME as ARCHITECTURES

    base = ARCHITECTURES["llama"].build(1, dtype=torch.float32)
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(base, wanted)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    ids = torch.randint(3, 23, (2, 8), generator=generator)
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) < 3, -100)}
    for estimator in ("alphatoken", "label"):
        scorer = Scorer(model, batch, None, ScorerConfig(estimator, layers=2))
        assert scorer.verify(batch, tokens=3).passed
    fault = edit(
        "estimate.columns.ColumnSums.contract",
        "return contraction.contract(",
        "return (2.0 if 'v_proj.lora_A' in linear.name else 1.0) * contraction.contract(",
    )
    with applied(fault), without_proofs():
        found = Scorer(model, batch, None, ScorerConfig("direct", layers=2)).verify(batch)
    off = {check.component: check for check in found.failures}
    assert "v_proj.lora_A" in str(off["adaptation_direct"].parameter)


@pytest.mark.smollm2
def test_a_real_model_agrees_and_a_fault_does_not(smollm2: Any) -> None:
    """SmolLM2-135M: a few tokens, float32, in less than a minute of one quiet core."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def encoded(text: str | None) -> dict[str, torch.Tensor]:
        ids = torch.tensor([tokenizer(str(text))["input_ids"][:40]])
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(ids.shape[1]) < 20, -100)}

    batch, validation = encoded(dict.__doc__), encoded(int.__doc__)
    config = ScorerConfig("alphatoken", layers=2)
    found = Scorer(model, validation, None, config).verify(batch, tokens=2)
    assert found.passed, str(found)
    close(found.error, 0.0, 1.0, found.tolerance, name="certificate, SmolLM2")
    with applied(BY_NAME["scale-forgotten-in-dk"]), without_proofs():
        off = Scorer(model, validation, None, config).verify(batch, tokens=2)
    assert "adaptation_direct" in {check.component for check in off.failures}, str(off)


@pytest.mark.slow
@pytest.mark.gemma3
@pytest.mark.parametrize("kind", ["sliding_attention"])
def test_gemma_agrees_in_layers_of_both_kinds(gemma3: Any, kind: str) -> None:
    """Gemma 3 270M: norms of queries and keys, a window of 8 tokens instead of 512, real rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gemma3)
    layer = max(i for i, one in enumerate(model.config.layer_types) if one == kind)
    model.config.sliding_window = 8
    for block in model.model.layers:
        if block.self_attn.sliding_window is not None:
            block.self_attn.sliding_window = 8

    def encoded(text: str | None) -> dict[str, torch.Tensor]:
        ids = torch.tensor([tokenizer(str(text))["input_ids"][:32]])
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(ids.shape[1]) < 20, -100)}

    batch, validation = encoded(dict.__doc__), encoded(int.__doc__)
    config = ScorerConfig("alphatoken", layers=(layer,))
    found = Scorer(model, validation, None, config).verify(batch, tokens=2)
    assert found.passed, str(found)
    with applied(BY_NAME["scale-forgotten-in-dk"]), without_proofs():
        off = Scorer(model, validation, None, config).verify(batch, tokens=2)
    assert not off.passed


@pytest.mark.slow
@nightly
@pytest.mark.gemma3
def test_gemma_agrees_over_its_tied_embedding(gemma3: Any) -> None:
    """The embedding, two thirds of the parameters, is the output projection too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(gemma3)(str(dict.__doc__), return_tensors="pt")["input_ids"]
    batch = {"input_ids": ids[:, :12], "labels": ids[:, :12]}
    config = ScorerConfig("label", layers="all", parameters="all")
    found = Scorer(model, batch, None, config).verify(batch, tokens=1)
    assert found.passed, str(found)


DRIFT = {mutant.name: mutant for mutant in mutants_proofs.MUTANTS}


@pytest.mark.parametrize(
    "name",
    [
        "fisher-squared-again",
        "reference-not-subtracted",
        "half-precision-reference",
    ],
)
def test_a_fault_in_the_drift_does_not_agree(name: str) -> None:
    """V of another Fisher, or of another reference."""
    with applied(DRIFT[name]) as calls, without_proofs():
        found = V.certificate()
    assert calls.total() > 0
    assert {"direction (stability)", "total"} <= {check.component for check in found.failures}


def test_a_fault_in_the_adapter_does_not_agree() -> None:
    """A soft-cap that the recorded call does not pass on."""
    fault = next(m for m in mutants_adapters.MUTANTS if m.name == "soft-cap-not-passed-on")
    with quiet(), applied(fault), without_proofs():
        scorer, batch = real_scorer("gemma2", torch.float32, "direct")
        found = scorer.verify(batch, tokens=3)
    assert {"adaptation_direct", "attention"} <= {check.component for check in found.failures}


# --- what else users hand over -------------------------------------------------------------------


def test_what_a_file_says_is_compared_with_what_was_loaded(tmp_path: Path) -> None:
    """Kronecker factors and a diagonal from a file, streamed or not; a fault in reading shows."""
    one = trial("direction (stability)", "path")
    case, scorer = one.setup.case, make_scorer(one.setup, "path")
    weights = scorer.parameters
    factors = {
        n: tuple(torch.eye(size, dtype=torch.float64) * 0.5 + 0.1 for size in w.shape)
        for n, w in weights.items()
    }
    kronecker = FisherDrift.from_kronecker(factors, scorer.given.retention.reference)
    for number, drift in enumerate((scorer.given.retention, kronecker)):
        path = tmp_path / f"{number}.safetensors"
        drift.save(path)
        with quiet():
            for offload in ("none", "stream"):
                other = make_scorer(one.setup, "path", offload=offload, retention=False)
                other.set_retention(FisherDrift.open(path))
                assert other.verify(case.batch, tokens=1, fisher_file=path).passed
    scaled = {n: 1.01 * r for n, r in scorer.given.retention.reference.items()}
    with quiet():
        other.set_retention(FisherDrift(scorer.given.retention.fisher, scaled))
        off = other.verify(case.batch, tokens=1, fisher_file=tmp_path / "0.safetensors")
    assert "direction (stability)" in {check.component for check in off.failures}


@pytest.mark.parametrize("kind", ["frozen", "full"])
@pytest.mark.parametrize("make", ["AdamW", "Adam, L2", "amsgrad"])
def test_preconditioned_values_agree(kind: str, make: str) -> None:
    """P from the optimizer's state; with retention batches too."""
    one = trial("total", "alphatoken")
    if make == "amsgrad":
        model = one.setup.case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True, eps=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            summed_loss(model, one.setup.case.batch).backward()
            optimizer.step()
        optimizer.zero_grad()
        config = ScorerConfig("alphatoken", layers=2, preconditioner=kind, precondition_after=1)
        validation = one.setup.case.validation
        scorer = Scorer(model, validation, [one.setup.case.batch], config, optimizer=optimizer)
        extra: dict[str, Any] = {}
    else:
        scorer, extra = adam(one, kind, make)
    with quiet():
        found = scorer.verify(one.setup.case.batch, tokens=2, **extra)
    assert found.passed, str(found)


def test_what_cannot_be_certified_is_refused() -> None:
    """No tokens; reduced gradients; an optimizer whose step the oracle does not know."""
    one = trial("total", "path")
    case, model = one.setup.case, one.setup.case.model()
    with pytest.raises(InputError, match="at least 1"):
        make_scorer(one.setup, "path").verify(case.batch, tokens=0)
    reduced = Scorer(
        model, case.validation, None, ScorerConfig("path", layers=1),
        reduce=lambda role, sums, count: {n: g / count for n, g in sums.items()},
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="reduce"):
        reduced.verify(case.batch)
    optimizer = torch.optim.NAdam(model.parameters())
    summed_loss(model, case.batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    config = ScorerConfig("path", layers=1, preconditioner="frozen", precondition_after=1)
    with pytest.raises(UnsupportedError, match="Adam and AdamW"):
        Scorer(model, case.validation, None, config, optimizer=optimizer).verify(case.batch)


def test_the_cost_is_said_first_and_the_model_is_left_as_it_was() -> None:
    """The first report has the number of passes, the last one has them all."""
    one, reports = trial("total"), []
    scorer = make_scorer(one.setup, "alphatoken", model=(model := one.setup.case.model()))
    model.train()
    flags = [p.requires_grad for p in model.parameters()]
    with quiet():
        found = scorer.verify(one.setup.case.batch, tokens=3, progress=reports.append)
    assert reports[0].done == 0
    assert reports[0].note == f"{found.passes} forwards and backwards for 3 tokens"
    assert reports[-1].done == reports[-1].total == found.passes
    assert model.training
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
