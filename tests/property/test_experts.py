"""Mixtures of experts under captured estimators, and the oracle that they are compared with."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from alphatoken import Scorer, ScorerConfig, fit_fisher
from alphatoken.errors import ConfigError, CoverageError, ModelError, UnsupportedError
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.model.protocol import ScoredExperts, find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.oracle import gradients, influence
from alphatoken.oracle.experts import copied_per_position, expert_influence
from tests.property import properties_experts as claims
from tests.property.architectures import BY_NAME, MIXTURES
from tests.property.profiles import budget
from tests.property.properties_experts import MixtureCase, Truth, mixture_cases
from tests.property.tolerance import close

# torch's forward mode compiles some rules with torch.jit at first use, which torch deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

ALL = MixtureCase("mixtral", experts=3, chosen=3, seed=3)
ONE = MixtureCase("qwen3_moe", ("..pprr", "prrrr."), experts=4, chosen=1, layers=(1,), seed=4)
BIASED = MixtureCase("gpt_oss", ("..pprr",), experts=5, chosen=2, seed=5)
IDLE = MixtureCase("mixtral", ("pprr",), ("prr",), experts=8, chosen=1, seed=6)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", claims.ESTIMATORS)
@given(mixture_cases())
@example(ALL)
@example(ONE)
@example(BIASED)
@example(IDLE)
@budget(0.1, least=3)
def test_values_over_linears_and_experts(estimator: str, case: MixtureCase) -> None:
    claims.check_values_over_experts(case, estimator)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("qwen3_next", "direct"), ("qwen3_5_moe", "direct"), ("qwen3_next", "path"),
     ("qwen3_5_moe", "label")],
)  # fmt: skip
def test_a_shared_expert_is_valued_at_its_own_positions(name: str, estimator: str) -> None:
    """It is called on (b t, i), the rows of the batch one after the other."""
    case = MixtureCase(name, ("..ppr", "prrr."), ("pprr",), (0, 1), seed=31)
    claims.check_values_over_experts(case, estimator)


def test_rows_that_are_not_all_positions_are_refused() -> None:
    """A part of a layer that sees some of the tokens only, whichever they are."""
    case = MixtureCase("qwen3_next", seed=32)
    model: Any = case.model()
    block = model.model.layers[1].mlp
    own = block.shared_expert.forward

    def without_the_last(hidden: Tensor) -> Tensor:
        output: Tensor = own(hidden[:-1])
        return torch.cat([output, torch.zeros_like(output[:1])])

    block.shared_expert.forward = without_the_last
    with pytest.raises(ModelError, match="not called once on every position") as caught:
        case.scorer(model, "path").score(case.batch(case.train))
    assert "shared_expert" in str(caught.value)
    assert "estimator='label'" in str(caught.value)
    case.scorer(model, "label").score(case.batch(case.train))


def test_some_expert_of_the_examples_sees_no_token() -> None:
    with claims.mixture_calls(model := IDLE.model()) as calls, torch.no_grad():
        model(input_ids=IDLE.batch(IDLE.train)["input_ids"])
    assert all(len(call[2].unique()) < IDLE.experts for call in calls)


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@budget(0.1, least=3)
def test_experts_have_no_causal_part_of_their_own(case: MixtureCase) -> None:
    claims.check_experts_have_no_causal_part_of_their_own(case)


@given(mixture_cases())
@example(BIASED)
@budget(0.1, least=3)
def test_a_preconditioner_scales_the_tensors(case: MixtureCase) -> None:
    claims.check_a_preconditioner_scales_the_tensors(case)


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@example(IDLE)
@budget(0.4)
def test_gradients_of_experts_are_explained(case: MixtureCase) -> None:
    claims.check_weights_are_explained(case)


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@example(IDLE)
@budget(0.4)
def test_rows_make_the_models_own_output(case: MixtureCase) -> None:
    claims.check_rows_make_the_models_own_output(case)


@given(claims.rows_cases())
def test_contraction_by_experts_is_the_loop(case: claims.RowsCase) -> None:
    claims.check_contraction_is_the_loop(case)


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@budget(0.1, least=4)
def test_inner_products_of_tokens_over_experts(case: MixtureCase) -> None:
    claims.check_gram_over_experts(case)


@given(mixture_cases())
@example(ALL)
@example(ONE)
@example(BIASED)
@budget(0.1, least=4)
def test_one_forward_serves_scoring_and_training(case: MixtureCase) -> None:
    claims.check_one_forward_serves_both(case)


@pytest.mark.parametrize("estimator", ["alphatoken", "same_layer_hop", "paper_literal", "label"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_certificate_covers_experts(name: str, estimator: str) -> None:
    """``verify`` has every expert run on every position; an expert's error is seen, by name."""
    case = MixtureCase(name, seed=7)
    scorer = case.scorer(case.model(), estimator)
    certificate = scorer.verify(case.batch(case.train), tokens=3, progress=False)
    assert certificate.passed, certificate.failures
    if estimator == "label":
        return
    contract = "alphatoken.estimate.contraction.contract_experts"
    with patch(contract, lambda delta, *_: delta.new_zeros(delta.shape[:2])):
        certificate = scorer.verify(case.batch(case.train), tokens=3, progress=False)
    assert any("experts." in (check.parameter or "") for check in certificate.failures)


# --- the direction -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_a_fisher_and_its_drift_have_the_tensors(name: str) -> None:
    """F of a 3-D tensor is the mean of squared sequence gradients, V = F o (W - W_ref)."""
    case = MixtureCase(name, layers=(1,), score_bias=False, seed=8)
    model, batch = case.model(), case.batch(("pprrr", "prrrr"))
    rows = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    fisher = fit_fisher(
        model, rows, layers=(1,), parameters="linears,experts", labels="token", samples=4, seed=1,
        progress=False,
    )  # fmt: skip
    tensors = Truth(case).of_experts
    assert tensors
    assert all(fisher.fisher[n].shape == p.shape for n, p in tensors.items())
    assert all(float(fisher.fisher[n].sum()) > 0 for n in tensors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    scorer = case.scorer(model, "direct", retention=fisher, objective="stability")
    found = scorer.direction.stability
    assert found is not None
    for n, p in dict(model.named_parameters()).items():
        if n in tensors:
            expected = fisher.fisher[n] * (p.detach() - fisher.reference[n])
            close(found[n], expected, expected.abs().amax(), 1e-6, name="V of experts")


def test_responses_are_drawn_where_a_trainer_asked_for_the_routers_loss() -> None:
    """TRL sets the config so; the loss needs no part in drawing, and fails with a cache."""
    found = []
    for asked in (False, True):
        model = MixtureCase("mixtral", layers=(1,)).model()
        model.config.output_router_logits = asked
        prompts = [torch.tensor([1, 4, 5]), torch.tensor([1, 6])]
        options = {"layers": (1,), "samples": 2, "max_new_tokens": 3, "progress": False}
        found.append(fit_fisher(model, prompts, parameters=claims.CHOSEN, **options).fisher)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


# --- what is in scope, and what is refused -------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_the_router_is_named_and_nothing_else_is_left_out(name: str) -> None:
    """Refused by its name unless it may be left out; a router that does not train is no reason."""
    case = MixtureCase(name, seed=9)
    truth, model, batch = Truth(case), case.model(), case.batch(case.train)
    with pytest.raises(CoverageError, match="router"):
        case.scorer(model, "direct", uncovered="error")
    scorer = case.scorer(model, "direct")
    scorer.score(batch)
    assert sorted(scorer.coverage.skipped) == sorted(truth.routers)
    assert all("router" in reason for reason in scorer.coverage.skipped.values())
    assert set(truth.of_experts) <= set(scorer.coverage.parameters)
    assert {n for n in truth.of_experts if not n.endswith("_bias")} <= set(scorer.coverage.linears)
    assert scorer.coverage.isolated is True
    assert scorer.coverage.relative_error is not None
    for router in truth.routers:
        dict(model.named_parameters())[router].requires_grad_(False)
    assert case.scorer(model, "direct", uncovered="error").score(batch).total.abs().sum() > 0


def test_without_the_word_nothing_changes() -> None:
    """The default's scope is what it was; its refusal says which word captures the experts."""
    case = MixtureCase("mixtral")
    adapter = find_adapter(case.model())
    scope = find_scope(adapter, (0, 1))
    assert not any(isinstance(linear, ScoredExperts) for linear in scope.linears)
    with pytest.raises(CoverageError, match="parameters='linears,experts'"):
        case.scorer(adapter.model, "direct", parameters="linears", uncovered="error")


def test_frozen_tensors_are_out_of_scope() -> None:
    """Only those that train are captured, and a choice of none of them is refused."""
    case = MixtureCase("gpt_oss", layers=(1,))
    model = case.model()
    tensors = {n: p for n, p in model.named_parameters() if "experts" in n and "layers.1" in n}
    for name, parameter in tensors.items():
        parameter.requires_grad_(name.endswith("down_proj"))
    scorer = case.scorer(model, "direct")
    scorer.score(case.batch(case.train))
    assert [n for n in scorer.coverage.parameters if "experts" in n] == [
        "model.layers.1.mlp.experts.down_proj"
    ]
    for parameter in tensors.values():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no expert of the scored layers"):
        case.scorer(model, "direct")


@pytest.mark.parametrize("text", ["experts", "experts,*norm*", "all,experts"])
def test_the_word_stands_beside_linears(text: str) -> None:
    with pytest.raises(ConfigError, match="stands"):
        ParameterChoice.read(text)


def test_a_model_without_experts_is_refused() -> None:
    model = BY_NAME["llama"].build(1)
    with pytest.raises(ConfigError, match="no expert of the scored layers can be captured"):
        Scorer(
            model, [MixtureCase().batch(("pprr",))], config=ScorerConfig(parameters=claims.CHOSEN)
        )


def test_kronecker_factors_are_refused() -> None:
    with pytest.raises(ConfigError, match="linear maps only"):
        fit_fisher(
            MixtureCase().model(), [torch.tensor([1, 2])], parameters=claims.CHOSEN,
            structure="kronecker",
        )  # fmt: skip


def test_experts_spread_over_processes_are_refused() -> None:
    case = MixtureCase("mixtral")
    model = case.model()
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    with pytest.raises(UnsupportedError, match="spread over processes"):
        case.scorer(model, "direct").score(case.batch(case.train))
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


def test_a_mixture_that_is_not_given_every_position_is_refused() -> None:
    """Rows without a position could not be valued: here the first one is left out."""
    case = MixtureCase("mixtral", layers=(1,), score_bias=False)
    model = case.model()
    (mixture,) = [m for n, m in model.named_modules() if n.endswith("1.mlp.experts")]
    own = mixture.forward

    def without_the_first(hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        rest = own(hidden[1:], experts[1:], weights[1:])
        return torch.cat([torch.zeros_like(hidden[:1]), rest])

    mixture.forward = without_the_first  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="not called once on every position"):
        case.scorer(model, "path").score(case.batch(case.train))


def test_a_use_beside_the_dispatch_is_refused_by_name() -> None:
    """A tensor that the model also uses elsewhere has a gradient that no row explains."""
    case = MixtureCase("mixtral", layers=(1,))
    model = case.model()
    (mixture,) = [m for n, m in model.named_modules() if n.endswith("1.mlp.experts")]

    def more(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 0.1 * args[0] * module.down_proj[0].mean()

    mixture.register_forward_hook(more)
    with pytest.raises(CoverageError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        case.scorer(model, "path").score(case.batch(case.train))


# --- nothing is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_is_seen_and_put_back(implementation: str) -> None:
    """transformers' own kernels give the values of its eager code; the registry is as before."""
    case = MixtureCase("mixtral", seed=12)
    model, batch = case.model().float(), case.batch(case.train)
    expected = case.scorer(model, "direct").score(batch).total
    model.set_experts_implementation(implementation)
    scorer = case.scorer(model, "direct")
    found = scorer.score(batch).total
    close(found, expected, expected.abs().sum(), 1e-5, name="implementations of experts")
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping

    def fail() -> None:
        with scorer.observe():
            assert implementation in ALL_EXPERTS_FUNCTIONS._local_mapping
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


@given(st.lists(st.integers(0, 1), min_size=2, max_size=4), st.randoms(use_true_random=False))
@budget(0.4)
def test_listeners_come_and_go_in_any_order(models: list[int], order: Any) -> None:
    """Each call is seen by the listeners that are there, and by none that has left."""
    built = [MixtureCase(name, seed=3).model() for name in ("mixtral", "qwen3_moe")]
    adapters = [find_adapter(model) for model in built]
    waiting, active, seen = list(enumerate(models)), [], []
    while waiting or active:
        if waiting and (not active or order.random() < 0.5):
            label, index = waiting.pop(0)

            def listen(
                _: nn.Module, name: str, x: Tensor, s: Tensor, e: Tensor, at: int = label
            ) -> Tensor:
                seen.append((at, name))
                return s

            found = [m for n, m in built[index].named_modules() if n.endswith(".experts")]
            context = adapters[index].override_experts(found, listen)  # type: ignore[attr-defined]
            context.__enter__()
            active.append((label, index, context))
        else:
            *_, context = active.pop(order.randrange(len(active)))
            context.__exit__(None, None, None)
        for index, model in enumerate(built):
            seen.clear()
            model(input_ids=torch.tensor([[1, 2, 3]]))
            wanted = [label for label, at, _ in active if at == index]
            assert [at for at, name in seen if name == "gate_up_proj"] == wanted * 2
            seen.clear()
            with torch.no_grad():
                model(input_ids=torch.tensor([[1, 2, 3]]))
            assert not seen
    assert not ALL_EXPERTS_FUNCTIONS._local_mapping


def test_checkpointed_blocks_are_valued_likewise() -> None:
    """Blocks above the first scored one are not checkpointed while they are recorded."""
    case = MixtureCase("mixtral", seed=13)
    model, batch = case.model(), case.batch(case.train)
    expected = case.scorer(model, "alphatoken").score(batch).total
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    scorer = case.scorer(model, "alphatoken")
    with scorer.observe() as observed:
        logits = scorer.adapter.forward(inputs)
        values = observed.values(logits, batch["labels"])
    claims.losses(logits, batch["labels"]).backward()
    close(values.total, expected, expected.abs().sum(), 1e-6, name="checkpointed")
    assert model.is_gradient_checkpointing


# --- the oracle ----------------------------------------------------------------------------------


@given(mixture_cases())
@example(ALL)
@example(BIASED)
@budget(0.2, least=5)
def test_rows_of_the_oracle_are_label_values(case: MixtureCase) -> None:
    """Copies of all positions together are the tensor: rows of Psi sum to <grad l_k, M>."""
    truth = Truth(case)
    direction = {n: truth.gradient[n] for n in truth.of_experts}
    found = expert_influence(truth.forward, truth.batch, truth.mixtures, direction)
    wanted = gradients.label_values(truth.model, truth.forward, truth.batch, direction)
    rows = influence.to_token_index(influence.row_sums(found.matrix))
    scale = influence.to_token_index(influence.row_sums(found.absolute_scale))
    close(rows, wanted, scale, claims.LIBRARY, name="rows of the experts' Psi")
    assert float(found.matrix.triu(1).abs().max()) == 0.0  # no use acts on an earlier loss


@pytest.mark.parametrize("name", MIXTURES)
def test_every_entry_is_the_effect_of_moving_one_copy(name: str) -> None:
    """Psi[k, t] by central differences: the tensors move along M at position t alone."""
    case = MixtureCase(name, ("pprr",), layers=(1,), seed=14)
    truth = Truth(case)
    direction = {n: truth.gradient[n] for n in truth.of_experts}
    psi = expert_influence(truth.forward, truth.batch, truth.mixtures, direction).matrix
    (mixture,) = truth.mixtures.values()
    own, step = mixture.forward, 1e-3

    def moved(t: int, size: float) -> dict[tuple[int, int], float]:
        def forward(*args: Tensor) -> Tensor:
            rows = []
            for n in range(len(args[0])):
                for name, m in direction.items():
                    truth.parameters[name].data.add_(m, alpha=size * (n == t))
                rows.append(own(*(a[n : n + 1] for a in args)))
                for name, m in direction.items():
                    truth.parameters[name].data.sub_(m, alpha=size * (n == t))
            return torch.cat(rows)

        mixture.forward = forward  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                return {
                    k: float(v) for k, v in gradients.run_losses(truth.forward, truth.batch).items()
                }
        finally:
            del mixture.forward

    for t in range(4):
        up, down = moved(t, step), moved(t, -step)
        for (b, i), high in up.items():
            slope = (high - down[b, i]) / (2 * step)
            assert abs(slope - float(psi[b, i - 1, t])) < 2e-4 * float(psi.abs().max()) + 1e-7


def test_copies_leave_the_module_as_it_was() -> None:
    """Also after an exception; inside, the output is the model's own."""
    case = MixtureCase("gpt_oss", seed=15)
    truth = Truth(case)
    inputs = {n: v for n, v in truth.batch.items() if n != "labels"}
    names = [n for n, _ in truth.model.named_parameters()]
    wanted = truth.forward(inputs)

    def fail() -> None:
        with copied_per_position(truth.mixtures) as copies:
            close(truth.forward(inputs), wanted, wanted.abs().amax(), 1e-12, name="with copies")
            assert all(len(each) == truth.batch["input_ids"].numel() for each in copies.values())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [n for n, _ in truth.model.named_parameters()] == names
    assert not any("forward" in vars(m) for m in truth.mixtures.values())
