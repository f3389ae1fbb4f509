"""A scorer is never stale: after any writer of weights or settings it equals a fresh one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenError, ModelError
from tests.integration.tiny_scorer import BATCH, VALIDATION, observed_values
from tests.property.architectures import BY_NAME


def plain(dtype: torch.dtype = torch.float64) -> Any:
    return BY_NAME["llama"].build(1).to(dtype)


def adapted() -> Any:
    """Two adapters whose factors are not zero; the first is active."""
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(plain(), config).double()
    model.add_adapter("second", config)
    return model.double().eval()


def scorer_of(model: nn.Module, estimator: str, **options: Any) -> Scorer:
    scored = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    drift = FisherDrift(
        {n: torch.ones_like(p) for n, p in scored.items()}, {n: 0.9 * p for n, p in scored.items()}
    )
    config = ScorerConfig(estimator, layers=2, max_relative_drift=None, **options)
    scorer = Scorer(model, VALIDATION, drift, config)
    scorer.warn = False
    return scorer


def values_of(scorer: Scorer, how: str = "score") -> Tensor | str:
    """The values, or by which words they are refused."""
    try:
        if how == "score":
            return scorer.score(BATCH).total
        return observed_values(scorer)
    except AlphaTokenError as error:
        return str(error)


def of_a_fresh(scorer: Scorer, how: str = "score") -> Tensor | str:
    """What a scorer finds that is made now, of the same model against the same rows."""
    given = scorer.given
    try:
        made = Scorer(
            given.model, given.validation, given.retention, given.config, optimizer=given.optimizer
        )
    except AlphaTokenError as error:
        return str(error)
    return values_of(made, how)


def text(found: Tensor | str) -> object:
    return found if isinstance(found, str) else found.tolist()


# --- weights --------------------------------------------------------------------------------------


def stepped(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., None]:
    def write(model: nn.Module) -> None:
        made = optimizer([p for p in model.parameters() if p.requires_grad], **options)
        model(**BATCH).loss.backward()
        made.step()
        model.zero_grad()

    return write


def through_data(model: Any) -> None:
    model.model.layers[-1].mlp.up_proj.weight.data.mul_(1.5)


def below_the_scored(model: Any) -> None:
    model.model.embed_tokens.weight.data.mul_(1.5)


def loaded_by_assignment(model: nn.Module) -> None:
    state = {name: 1.1 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def from_a_flat_buffer(model: nn.Module) -> None:
    """As ZeRO-1 and 2 do: the parameters become views of one buffer, which is written to."""
    parameters = list(model.parameters())
    flat = torch.cat(
        [torch.zeros(1, dtype=torch.float64), *(p.detach().flatten() for p in parameters)]
    )
    start = 1
    for p in parameters:
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    flat.mul_(1.1)


def a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.5)


def a_hook(model: Any) -> None:
    model.model.layers[-1].mlp.register_forward_hook(lambda module, args, output: 1.5 * output)


def of_the_configuration(model: Any) -> None:
    model.model.layers[-1].self_attn.scaling *= 2


def frozen(model: Any) -> None:
    """And released again where it was frozen."""
    attention = model.model.layers[-1].self_attn
    attention.requires_grad_(not attention.q_proj.weight.requires_grad)


WRITERS: dict[str, Callable[..., None]] = {
    "fused AdamW": stepped(torch.optim.AdamW, lr=1e-2, fused=True),
    "frozen weights": below_the_scored,
    "load_state_dict(assign=True)": loaded_by_assignment,
    "a flat buffer": from_a_flat_buffer,
    "a buffer": a_buffer,
    "a hook": a_hook,
    "an attribute": of_the_configuration,
    "frozen": frozen,
}


# That each number of a tensor shows, and each kind of setting, is proved in test_fingerprint.py.
@pytest.mark.parametrize(("how", "estimator"), [("score", "label"), ("observe", "alphatoken")])
def test_every_writer_is_noticed(how: str, estimator: str) -> None:
    """One after the other on one model, of which one scorer is asked each time."""
    model = plain()
    scorer = scorer_of(model, estimator)
    before = values_of(scorer, how)
    assert isinstance(before, Tensor)
    assert torch.equal(before, values_of(scorer, how))  # type: ignore[arg-type]
    for writer, write in WRITERS.items():
        write(model)
        found = values_of(scorer, how)
        assert text(found) == text(of_a_fresh(scorer, how)) != text(before), writer
        before = found


def test_a_step_that_rounding_lets_arrive_at_one_weight_is_noticed() -> None:
    """A sample of 16-bit weights would hardly hold the one that moved."""
    model = plain(torch.bfloat16)
    weight = model.model.layers[-1].mlp.up_proj.weight
    with torch.no_grad():
        weight.fill_(1.0)[5, 3] = 0.0
    scorer = scorer_of(model, "label")
    scorer.score(BATCH)
    old = scorer.builder.prepare().direction.adaptation
    weight.data.sub_(1e-5)
    assert int((weight != 1.0).sum()) == 1
    assert weight[5, 3] != 0.0
    scorer.score(BATCH)
    assert scorer.builder.prepare().direction.adaptation is not old


# --- adapters -------------------------------------------------------------------------------------


def rescaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(2.0)


@contextmanager
def merged(model: Any) -> Iterator[None]:
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


CHANGES: dict[str, Callable[..., Any]] = {
    "scaling": rescaled,
    "set_adapter": lambda model: model.set_adapter("second"),
    "disable_adapter": lambda model: model.disable_adapter(),
    "merge_adapter": merged,
    "a third": lambda model: (
        model.add_adapter("third", model.peft_config["second"]) or model.set_adapter("third")
    ),
    "unloaded": lambda model: model.delete_adapter("second") or model.set_adapter("default"),
}


@pytest.mark.parametrize(
    ("how", "parameters"),
    [("observe", "linears"), pytest.param("score", "all", marks=pytest.mark.slow)],
)
def test_every_change_of_adapters_is_noticed(how: str, parameters: str) -> None:
    """One after the other, as above."""
    model = adapted()
    config = ScorerConfig("label", layers=2, parameters=parameters, derivative="forward_mode")
    scorer = Scorer(model, VALIDATION, config=config)
    for name, change in CHANGES.items():
        before = values_of(scorer, how)
        context = change(model)
        with context if hasattr(context, "__enter__") else nullcontext():
            assert text(values_of(scorer, how)) == text(of_a_fresh(scorer, how)), name
        if hasattr(context, "__enter__"):  # all is as it was before
            torch.testing.assert_close(values_of(scorer, how), before)


# --- a pin, and a step inside observe() -----------------------------------------------------------


def test_a_pin_keeps_the_direction_and_follows_what_trains() -> None:
    model = plain()
    scorer = scorer_of(model, "label")
    scorer.pin("kept")
    scorer.score(BATCH)
    old = scorer.builder.prepare().direction
    WRITERS["fused AdamW"](model)
    WRITERS["an attribute"](model)
    scorer.score(BATCH)
    assert scorer.builder.prepare().direction.adaptation == old.adaptation  # the very tensors
    frozen(model)
    assert text(values_of(scorer)) == text(of_a_fresh(scorer))
    assert scorer.builder.pinned == "kept"


@pytest.mark.parametrize("estimator", ["label", "alphatoken"])
def test_a_step_between_forward_and_values_is_refused(estimator: str) -> None:
    model = plain()
    scorer = scorer_of(model, estimator)
    inputs = {k: v for k, v in BATCH.items() if k != "labels"}
    with scorer.observe() as observed:
        logits = model(**inputs, use_cache=False).logits
        through_data(model)
        with pytest.raises(ModelError, match="a weight has changed"):
            observed.values(logits, BATCH["labels"])
