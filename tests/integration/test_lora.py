"""LoRA: the factors A and B are valued, each by itself; the frozen base is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from alphatoken import fit_fisher, masked_sft_loss, select_top
from alphatoken.errors import CoverageError
from alphatoken.oracle import gradients, influence
from tests.integration.snapshot import Snapshot
from tests.integration.test_observe import same_gradients
from tests.integration.tiny_scorer import BATCH, VALIDATION, inputs, scorer_for
from tests.property.architectures import BY_NAME, plain_forward
from tests.property.tolerance import close

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning"),
    # peft still asks transformers by the old name
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
PROMPTS = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]


def adapted(
    *, trained: bool = True, name: str = "llama", seed: int = 1, dtype: Any = torch.float64,
    build: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """A PEFT model; with ``trained`` B is away from zero, as after some steps."""
    base = BY_NAME[name].build(seed, dtype=dtype, **(build or {}))
    config = LoraConfig(
        **{"r": 2, "lora_alpha": 5, "target_modules": list(TARGETS), "lora_dropout": 0.0, **options}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(base, config).to(dtype)
        if trained:
            stir(model)
    return model.eval()


@torch.no_grad()
def stir(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.4)


def factors(model: nn.Module, layers: tuple[int, ...], adapter: str = "default") -> dict[str, Any]:
    """The A and B modules of these layers by their names in the PEFT model."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(f".layers.{layer}." in name for layer in layers)
        and name.endswith((f"lora_A.{adapter}", f"lora_B.{adapter}"))
    }


def truth(model: nn.Module, modules: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """G over the factors, and Psi."""
    forward = plain_forward(model)
    parameters = {f"{name}.weight": module.weight for name, module in modules.items()}
    direction = gradients.validation_gradient(model, forward, VALIDATION, parameters)
    return direction, influence.exact_influence(model, forward, BATCH, modules, direction)


def at_tokens(by_position: Tensor) -> Tensor:
    return influence.to_token_index(by_position).masked_fill(BATCH["labels"] == -100, 0.0)


READOUTS = {
    "label": influence.row_sums,
    "path": influence.column_sums,
    "direct": influence.diagonal,
}


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", TARGETS),
        pytest.param("phi3", ("qkv_proj", "gate_up_proj"), marks=pytest.mark.slow),
        ("gpt2", ("c_attn", "c_fc")),  # matrices of another orientation
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_factors_have_the_values_of_per_token_autograd(name: str, targets: tuple[str, ...]) -> None:
    model = adapted(name=name, target_modules=list(targets))
    layers = (BY_NAME[name].depth - 2, BY_NAME[name].depth - 1)
    modules = factors(model, layers)
    if name == "gpt2":
        modules = {
            n: m
            for n, m in model.named_modules()
            if n.endswith((".lora_A.default", ".lora_B.default"))
        }
    assert len(modules) == 2 * 2 * len(targets)
    _, exact = truth(model, modules)
    for estimator in READOUTS:
        compare(model, estimator, exact)


def compare(model: nn.Module, estimator: str, exact: Any, **options: Any) -> None:
    """Values against their readout of Psi."""
    values = scorer_for(model, estimator, **options).score(BATCH)
    scale = at_tokens(
        influence.row_sums(exact.absolute_scale) + influence.column_sums(exact.absolute_scale)
    )
    expected = at_tokens(READOUTS[estimator](exact.matrix))
    close(values.total, expected, scale, 1e-6, name=f"lora {estimator}")
    assert float(expected.abs().max()) > 0


def test_names_are_those_of_the_model() -> None:
    model = adapted()
    scorer = scorer_for(model, "alphatoken", layers=(1,))
    assert set(scorer.coverage.linears) == set(factors(model, (1,)))
    assert len(scorer.coverage.linears) == 2 * len(TARGETS)
    assert set(scorer.coverage.parameters) <= dict(model.named_parameters()).keys()
    base = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert not base & set(scorer.coverage.parameters)


def test_before_the_first_step_all_signal_is_in_B() -> None:
    """B = 0: the gradient of A vanishes, so A's direction is zero and so are its values."""
    model = adapted(trained=False)
    modules = factors(model, (1, 2))
    scorer = scorer_for(model, "alphatoken")
    assert float(scorer.score(BATCH).total.abs().max()) > 0
    for name, m in scorer.direction.adaptation.items():
        assert bool((m == 0).all()) == ("lora_A" in name), name
    _, exact = truth(model, {n: m for n, m in modules.items() if "lora_B" in n})
    for estimator in READOUTS:
        compare(model, estimator, exact)


def test_a_frozen_trunk() -> None:
    """Adapters in the last layer only: nothing below or around requires gradients."""
    model = adapted(layers_to_transform=[2])
    _, exact = truth(model, factors(model, (2,)))
    for estimator in READOUTS:
        compare(model, estimator, exact, layers=1)


@pytest.mark.parametrize(
    ("estimator", "targets"),
    [("alphatoken", TARGETS), ("path", ("v_proj",)), ("label", ("down_proj",))],
)
def test_observing_a_frozen_trunk(estimator: str, targets: tuple[str, ...]) -> None:
    """The training pass has a graph only where the adapters reach; values are the scored ones."""
    model = adapted(layers_to_transform=[2], target_modules=list(targets)).train()
    scorer = scorer_for(model, estimator, layers=1)
    scored = scorer.score(BATCH)
    with scorer.observe() as observed:
        logits = model(**inputs()).logits
        values = observed.values(logits, BATCH["labels"])
        assert all(p.grad is None for p in model.parameters())
        keep = select_top(values.total, values.mask, ratio=0.5)
        masked_sft_loss(logits, BATCH["labels"], keep).backward()
    scale = float(scored.total.abs().sum())
    close(values.total, scored.total, scale, 1e-7, name=f"observed {targets[0]}")
    fresh = adapted(layers_to_transform=[2], target_modules=list(targets)).train()
    masked_sft_loss(fresh(**inputs()).logits, BATCH["labels"], keep).backward()
    same_gradients(model, fresh, 1e-10)


# --- variants that do not fit -------------------------------------------------------------------


def test_dora_is_refused_by_name() -> None:
    model = adapted(use_dora=True)
    before = Snapshot(model)
    with pytest.raises(CoverageError) as caught:
        scorer_for(model, "alphatoken").score(BATCH)
    message = str(caught.value)
    assert "DoRA" in message
    assert "lora_" in message
    assert "estimator='label'" in message
    before.check()


def test_label_values_of_dora_are_exact() -> None:
    model = adapted(use_dora=True)
    scorer = scorer_for(model, "label")
    assert set(scorer.coverage.parameters) >= {f"{n}.weight" for n in factors(model, (1, 2))}
    forward = plain_forward(model)
    parameters = {n: p for n, p in model.named_parameters() if n in scorer.parameters}
    direction = gradients.validation_gradient(model, forward, VALIDATION, parameters)
    expected = gradients.label_values(model, forward, BATCH, direction)
    values = scorer.score(BATCH)
    close(values.total, expected, float(expected.abs().sum()), 1e-6, name="DoRA label")


# --- Fisher -------------------------------------------------------------------------------------


def test_the_fisher_of_fresh_factors() -> None:
    """B_ref = 0: A's Fisher is zero and its stability stays zero for ever; B's does not."""
    model = adapted(trained=False)
    fisher = fit_fisher(
        model, PROMPTS, samples=4, layers=2, structure="kronecker", max_new_tokens=3, progress=False
    )
    at_start = scorer_for(model, "label", retention=fisher).score(BATCH)
    assert bool((at_start.stability == 0).all())  # W = W_ref
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    scorer = scorer_for(model, "label", retention=fisher)
    moved = scorer.score(BATCH)
    stability = scorer.direction.stability
    for name, v in stability.items():
        assert bool((v == 0).all()) == ("lora_A" in name), name
    forward = plain_forward(model)
    expected = gradients.label_values(model, forward, BATCH, stability)
    scale = float(expected.abs().sum())
    close(moved.stability, expected, scale, 1e-6, name="LoRA stability")
    assert scale > 0
