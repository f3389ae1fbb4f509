"""The certificate: right code passes with room to spare, and every fault that shows is named."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import FisherDrift, PreferenceBatch, Scorer, ScorerConfig
from alphatoken.certificate.expected import TOLERANCES
from alphatoken.config import READ_BY
from alphatoken.errors import InputError, UnsupportedError
from alphatoken.estimate.estimator import Recording
from alphatoken.support.progress import Tracker
from alphatoken.values import Certificate
from tests.places import tiered
from tests.property.catalogue import BY_NAME
from tests.property.mutation import Mutant, applied, row, without_proofs
from tests.property.profiles import budget
from tests.property.setups import Setup, make_scorer, quiet, setups, stepped, summed_loss
from tests.property.strategies import make_case
from tests.property.tolerance import close

ROWS = ("pprrrr", "..prrr")
VALIDATION = (("pprr", "prrr"), ("ppr",))
ESTIMATORS = ("label", "direct", "alphatoken", "path", "paper_literal")


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
        rows = structure.pop("rows", ROWS)
        case = make_case(rows, structure.pop("validation", VALIDATION), seed=3, **structure)
        return Setup(case, layers)

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
    known = set(ScorerConfig.__dataclass_fields__)
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


def adam(one: Trial, kind: str, name: str = "AdamW", **more: Any) -> tuple[Scorer, dict[str, Any]]:
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
        **more,
    )
    weights = torch.full(labels.shape, 0.3, dtype=torch.float64)
    return scorer, {"step_weights": weights if kind == "full" else None}


def full(one: Trial) -> tuple[Scorer, dict[str, Any]]:
    """P = du/dg."""
    return adam(one, "full")


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
    drift = scorer.arguments.retention
    scaled = {n: f * 2.0**60 for n, f in drift.fisher.items()}
    scorer.set_retention(FisherDrift(scaled, drift.reference))
    return scorer, {}


DIRECT = trial("adaptation_direct", "direct")
HEADS = {"heads": 4, "kv_heads": 2}
CAUSAL = trial("adaptation_causal", **HEADS)
PATH = trial("adaptation", "path")
WINDOW = trial("adaptation_causal", window=2)
G = trial("direction (adaptation)", "path")
V = trial("direction (stability)", "path")
FULL = trial("direction (adaptation)", "path", build=full)
TOTAL = trial("total", "path")
PADDED = trial("mask", "path", rows=("pprrrr", "..rrrr"))

SEEN = {
    "aggregated-errors-as-direct": DIRECT,
    "label-after-padding-valued": PADDED,
    "head-mean-for-per-head": CAUSAL,
    "window-one-too-short": WINDOW,
    "soft-cap-factor-left-out-of-the-forward-mode": trial("adaptation", "label", softcap=2.0),
    "sign-missing-on-rejected-in-the-objective": trial(
        "direction (adaptation)", "path", build=on_pairs, **PAIRS
    ),
    "preconditioner-applied-twice": trial("direction (adaptation)", "path", build=preconditioned),
    "twice-called-module-overwritten": trial("adaptation", "path", repeated_linear=True),
    "stale-direction": trial("direction (adaptation)", "path", build=moved),
    "bfloat16-in-the-contraction": PATH,
    "named-parameters-of-the-scored-layers-alone": trial(
        "scope", "label", parameters="linears,*norm*,head.weight", build=adaptation_only,
    ),
    "unassigned-dropped": trial("unassigned", "path"),
    "lambda-on-the-adaptation": TOTAL,
    "reference-not-subtracted": V,
    "mean-of-batch-means": G,
    "token-weights-ignored": trial("adaptation", "path", build=weighted),
    "full-preconditioner-without-its-second-term": FULL,
    "coupled-decay-left-out-of-the-gradient": trial(
        "direction (adaptation)", "path", build=coupled
    ),
    "stability-in-spite-of-the-objective": trial(
        "stability", "path", objective="adaptation"
    ),
    "old-validation-set": trial("direction (adaptation)", "path", build=replaced),
    "label-values-not-scaled-back": trial("stability", "label", build=far),
    "pairs-counted-twice": trial("direction (adaptation)", "path", build=per_pair, **PAIRS),
    "one-part-in-a-billion": PATH,
}  # fmt: skip
"""Mutants of each room that a certificate passes through, and the component that must be off."""


OFTEN = """
aggregated-errors-as-direct head-mean-for-per-head soft-cap-factor-left-out-of-the-forward-mode
label-after-padding-valued sign-missing-on-rejected-in-the-objective stale-direction
unassigned-dropped named-parameters-of-the-scored-layers-alone reference-not-subtracted
lambda-on-the-adaptation stability-in-spite-of-the-objective token-weights-ignored
full-preconditioner-without-its-second-term
"""
"""One mutant for each component, kind of direction and estimator."""


@cache
def without_a_fault(one: Trial) -> Certificate:
    """Several faults are tried on the same case."""
    return one.certificate()


@pytest.mark.parametrize("name", tiered(sorted(SEEN), OFTEN.split()))
def test_a_mutant_does_not_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fault inside the certificate fails and names the component.

    Proves: a mutant does not agree (exact), against mutants of the core.
    """
    # The observed losses would refuse some before the certificate can.
    monkeypatch.setattr(Recording, "require_losses", lambda *_: None)
    right = without_a_fault(SEEN[name])
    assert right.passed, str(right)
    assert "every component agrees" in str(right)
    with applied(BY_NAME[name]) as calls, without_proofs():
        found = SEEN[name].certificate()
    assert calls.total() > 0
    assert not found.passed, str(found)
    assert SEEN[name].component in {check.component for check in found.failures}, str(found)
    assert str(found).endswith("does not agree")


def edit(target: str, old: str, new: str) -> Mutant:
    """A fault of this file alone."""
    return row(f"{target}: {new}", (), "", (target, old, new))


def test_the_linear_that_is_off_is_named() -> None:
    """A contraction that is wrong in one linear map only."""
    fault = edit(
        "estimate.captured.ColumnSums.contract",
        "return contraction.contract(",
        "return (1.01 if '0.mlp.down' in use.linear.name else 1.0) * contraction.contract(",
    )
    with applied(fault), without_proofs():
        found = DIRECT.certificate()
    off = {check.component: check for check in found.failures}
    assert off["adaptation_direct"].parameter == "layers.0.mlp.down_proj"
    assert "layers.0.mlp.down_proj" in str(found)


def test_a_value_off_the_response_does_not_agree() -> None:
    """Tokens of the prompt and padding are no response, and their value is 0."""
    fault = edit(
        "estimate.token_values.combine",
        "total=g + stability_weight * v,",
        "total=g + stability_weight * v + 1.0 * ~mask,",
    )
    with applied(fault), without_proofs():
        found = trial("total").certificate()
    assert [check.component for check in found.failures] == ["total"]


@given(
    setup=setups(),
    estimator=st.sampled_from(ESTIMATORS),
    window=st.sampled_from([None, 0, 1, 3]),
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
    ),
    estimator="direct", window=None, objective="both", part="both",
)  # fmt: skip
@example(  # the norm behind one head of width 1 cancels all but 1e-15 of the causal part
    setup=Setup(
        case=make_case(
            ("prpr",), (("pr",),), direction_seed=0, vocabulary=3, heads=1, kv_heads=1, head_dim=1,
            mlp="plain", mlp_width=3, norm_place="sandwich", positions="none",
        ),
        layers="all",
    ),
    estimator="paper_literal", window=None, objective="both", part="both",
)  # fmt: skip
@budget(0.3, least=8)
def test_right_code_agrees(
    setup: Setup, estimator: str, window: int | None, objective: str, part: str
) -> None:
    """Every structure and option.

    Proves: right code agrees (exact), against every component anew.
    """
    if estimator in ("label", "path") or (estimator == "direct" and part == "causal"):
        part = "both"
    if estimator not in READ_BY["window"]:
        window = None
    with quiet():
        scorer = make_scorer(setup, estimator, window=window, objective=objective, part=part)
        found = scorer.verify(setup.case.batch, tokens=2, progress=False)
    assert found.passed, str(found)
    close(found.error, 0.0, 1.0, found.tolerance, name="certificate of right code")


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float16"), ("llama", "bfloat16"), ("gpt2", "float32"), ("gemma2", "float32")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)  # split, or fused, as in those above
        for case in (("llama", "float64"), ("llama", "float32"), ("phi3", "float32"))
    ],
)
def test_real_classes_agree_in_every_arithmetic(name: str, dtype: str) -> None:
    """Split, fused and transposed projections, soft-cap and windows."""
    for estimator in ("alphatoken", "label"):
        scorer, batch = real_scorer(name, getattr(torch, dtype), estimator)
        with quiet():
            found = scorer.verify(batch, tokens=4)
        assert found.passed, str(found)
        assert found.tolerance == TOLERANCES[found.arithmetic]
        label = f"certificate, {found.arithmetic}"
        close(found.error, 0.0, 1.0, found.tolerance, name=label)


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
        "estimate.captured.ColumnSums.contract",
        "return contraction.contract(",
        "return (2.0 if 'v_proj.lora_A' in use.linear.name else 1.0) * contraction.contract(",
    )
    with applied(fault), without_proofs():
        found = Scorer(model, batch, None, ScorerConfig("direct", layers=2)).verify(batch)
    off = {check.component: check for check in found.failures}
    assert "v_proj.lora_A" in str(off["adaptation_direct"].parameter)


@pytest.mark.slow
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


def test_a_fault_in_the_adapter_does_not_agree() -> None:
    """A soft-cap that the recorded call does not pass on."""
    with quiet(), applied(BY_NAME["soft-cap-not-passed-on"]), without_proofs():
        scorer, batch = real_scorer("gemma2", torch.float32, "direct")
        found = scorer.verify(batch, tokens=3)
    assert {"adaptation_direct", "attention"} <= {check.component for check in found.failures}


def test_what_a_file_says_is_compared_with_what_was_loaded(tmp_path: Path) -> None:
    """Kronecker factors and a diagonal from a file; a fault in reading shows."""
    one = trial("direction (stability)", "path")
    case, scorer = one.setup.case, make_scorer(one.setup, "path")
    weights = scorer.parameters
    factors = {
        n: tuple(torch.eye(size, dtype=torch.float64) * 0.5 + 0.1 for size in w.shape)
        for n, w in weights.items()
    }
    kronecker = FisherDrift({}, scorer.arguments.retention.reference, factors=factors)
    for number, drift in enumerate((scorer.arguments.retention, kronecker)):
        path = tmp_path / f"{number}.safetensors"
        drift.save(path)
        with quiet():
            other = make_scorer(one.setup, "path", retention=False)
            other.set_retention(FisherDrift.load(path))
            assert other.verify(case.batch, tokens=1, fisher_file=path).passed
    scaled = {n: 1.01 * r for n, r in scorer.arguments.retention.reference.items()}
    with quiet():
        other.set_retention(FisherDrift(scorer.arguments.retention.fisher, scaled))
        off = other.verify(case.batch, tokens=1, fisher_file=tmp_path / "0.safetensors")
    assert "direction (stability)" in {check.component for check in off.failures}


@pytest.mark.parametrize(("kind", "make"), [("frozen", "AdamW"), ("full", "amsgrad")])
def test_preconditioned_values_agree(kind: str, make: str) -> None:
    """P from the optimizer's state, with retention batches too; ``SEEN`` has "full" of others."""
    one = trial("total", "alphatoken")
    data = {"retention": [one.setup.case.batch]} if make == "amsgrad" else {}
    scorer, extra = adam(one, kind, make, **data)
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
    optimizer = torch.optim.RMSprop(model.parameters())
    summed_loss(model, case.batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    config = ScorerConfig("path", layers=1, preconditioner="frozen", precondition_after=1)
    with pytest.raises(UnsupportedError, match="Adam and AdamW"):
        Scorer(model, case.validation, None, config, optimizer=optimizer).verify(case.batch)


def test_sampled_tokens_are_counted_and_the_model_is_left_as_it_was() -> None:
    """The first report has the number of sampled tokens, the last one has them all."""
    one, reports = trial("total"), list[Tracker]()
    scorer = make_scorer(one.setup, "alphatoken", model=(model := one.setup.case.model()))
    model.train()
    flags = [p.requires_grad for p in model.parameters()]
    with quiet():
        found = scorer.verify(
            one.setup.case.batch, tokens=3, progress=lambda one: reports.append(copy(one))
        )
    assert [one.done for one in reports] == [0, 1, 2, 3]
    assert {one.total for one in reports} == {3} == {found.tokens}
    assert model.training
    assert flags == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
