"""A scorer is never stale: after any writer of weights or settings it equals a fresh one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    used = scorer.arguments
    try:
        made = Scorer(
            used.model, used.validation, used.retention, used.config, optimizer=used.optimizer
        )
    except AlphaTokenError as error:
        return str(error)
    return values_of(made, how)


def text(result: Tensor | str) -> object:
    return result if isinstance(result, str) else result.tolist()


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
        result = values_of(scorer, how)
        assert text(result) == text(of_a_fresh(scorer, how)) != text(before), writer
        before = result


# --- what a forward reads besides -----------------------------------------------------------------


class Form(Enum):
    """A switch."""

    PLAIN = 1.0
    DOUBLE = 2.0


@dataclass
class Options:
    """Numbers of a forward."""

    scale: float = 1.0
    inner: Any = None


class Slotted:
    """Numbers without a ``__dict__``."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = torch.ones(4)


def double_if(doubled: bool) -> float:
    return 2.0 if doubled else 1.0


class Reading(nn.Module):
    """An MLP whose output is scaled by all that it holds in other ways than by weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.tensor = torch.linspace(0.5, 1.5, 8).double()
        self.pair: list[Any] = [torch.ones(2), {"other": torch.ones(3, dtype=torch.complex64)}]
        self.array = np.ones(5)
        self.space = SimpleNamespace(scale=1.0, more=[Options()])
        self.options = Options(inner=Slotted())
        self.form = Form.PLAIN
        self.part = partial(double_if, doubled=False)
        self.rate = {"a": {1.0}}
        scale = torch.ones(2)
        self.function: Callable[[], Any] = lambda: scale.prod()
        self.scale_of_function = scale
        self.hidden = (nn.Linear(1, 1, bias=False, dtype=torch.float64),)
        self.hidden[0].weight.data.fill_(1.0)

    def factor(self) -> Any:
        space, options = self.space, self.options
        result = self.pair[0].prod() * self.pair[1]["other"].real.prod() * self.array.prod()
        result = result * space.scale * space.more[0].scale * options.scale * self.form.value
        result = result * options.inner.scale.prod() * self.part() * sum(self.rate["a"])
        return result * self.function() * self.hidden[0].weight.item() * self.tensor.prod()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor()


READ: dict[str, Callable[[Any], object]] = {
    "a tensor": lambda m: m.tensor.data[5:6].mul_(2),
    "another tensor in its place": lambda m: setattr(m, "tensor", m.tensor * 2),
    "a tensor in a list": lambda m: m.pair[0].data.mul_(2),
    "a tensor in a mapping in it": lambda m: m.pair[1]["other"].data.mul_(2),
    "an array": lambda m: m.array.__setitem__(3, 2.0),
    "a namespace": lambda m: setattr(m.space, "scale", 2.0),
    "an object in a list in it": lambda m: setattr(m.space.more[0], "scale", 2.0),
    "a dataclass": lambda m: setattr(m.options, "scale", 2.0),
    "slots": lambda m: m.options.inner.scale.data.mul_(2),
    "an enumeration": lambda m: setattr(m, "form", Form.DOUBLE),
    "an argument of a partial": lambda m: setattr(m, "part", partial(m.part, doubled=True)),
    "a set": lambda m: m.rate["a"].add(3.0),
    "another function": lambda m: setattr(m, "function", lambda: 2.0),
    "a module that is not registered": lambda m: m.hidden[0].weight.data.mul_(2),
}


def test_whatever_a_module_holds_is_noticed() -> None:
    """One after the other, and in a hook at the end."""
    model = plain()
    mlp = model.model.layers[-1].mlp = Reading(model.model.layers[-1].mlp)
    state = SimpleNamespace(scale=torch.ones(3))
    del mlp.scale_of_function  # the function alone leads there

    def scaled(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * state.scale.prod()

    model.model.layers[0].register_forward_hook(scaled)
    scorer = Scorer(model, VALIDATION, config=ScorerConfig("path", layers=1))
    before = values_of(scorer)
    cell = dict(zip(mlp.function.__code__.co_freevars, mlp.function.__closure__, strict=True))
    changes: dict[str, Callable[[Any], object]] = {
        "a variable of a function": lambda m: cell["scale"].cell_contents.data.mul_(2),
        **READ,
        "what a hook reads": lambda m: state.scale.data.mul_(2),
    }
    for what, change in changes.items():
        assert torch.equal(values_of(scorer), before), what  # type: ignore[arg-type]
        change(mlp)
        result = values_of(scorer)
        assert text(result) == text(of_a_fresh(scorer)) != text(before), what
        before = result


class Noting(nn.Module):
    """An MLP that notes its pass, in numbers, tensors and new entries, and reads one of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.notes: dict[str, Any] = {"calls": 0, "scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.notes["calls"] += 1
        self.notes[f"at {self.notes['calls']}"] = True
        self.output = self.inner(x) * self.notes["scale"]
        self.latest = SimpleNamespace(norm=self.output.detach().norm())
        return self.output


def test_what_a_forward_writes_is_no_change_of_settings() -> None:
    """M is kept; and what stands beside it is still read."""
    model = plain()
    mlp = model.model.layers[-1].mlp = Noting(model.model.layers[-1].mlp)
    log: list[Tensor] = []
    mlp.register_forward_hook(lambda module, args, output: log.append(output))
    scorer = Scorer(model, VALIDATION, config=ScorerConfig("path", layers=1))
    for _ in range(3):  # first times: what a forward makes, and what it writes again
        before = values_of(scorer)
    estimator, m = scorer.estimator, scorer.estimator.cache.current()
    for _ in range(2):
        log.clear()
        assert torch.equal(values_of(scorer), before)  # type: ignore[arg-type]
    assert scorer.estimator is estimator
    assert scorer.estimator.cache.current() is m, "M is built at each pass"
    mlp.notes["scale"] = 2.0
    assert text(values_of(scorer)) == text(of_a_fresh(scorer)) != text(before)


def test_a_step_that_rounding_lets_arrive_at_one_weight_is_noticed() -> None:
    """A sample of 16-bit weights would hardly hold the one that moved."""
    model = plain(torch.bfloat16)
    weight = model.model.layers[-1].mlp.up_proj.weight
    with torch.no_grad():
        weight.fill_(1.0)[5, 3] = 0.0
    scorer = scorer_of(model, "label")
    scorer.score(BATCH)
    old = scorer.estimator.cache.current().adaptation
    weight.data.sub_(1e-5)
    assert int((weight != 1.0).sum()) == 1
    assert weight[5, 3] != 0.0
    scorer.score(BATCH)
    assert scorer.estimator.cache.current().adaptation is not old


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
    layers = "all" if parameters == "all" else 2
    config = ScorerConfig("label", layers=layers, parameters=parameters, derivative="forward_mode")
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
    old = scorer.estimator.cache.current()
    WRITERS["fused AdamW"](model)
    WRITERS["an attribute"](model)
    scorer.score(BATCH)
    assert scorer.estimator.cache.current().adaptation == old.adaptation  # the very tensors
    frozen(model)
    assert text(values_of(scorer)) == text(of_a_fresh(scorer))
    assert scorer.estimator.cache.pinned == "kept"


def test_a_pin_keeps_no_side_that_was_replaced() -> None:
    model = plain()
    scorer = scorer_of(model, "label")
    scorer.pin("kept")
    before = values_of(scorer)
    replaced = {"validation": (scorer.set_validation, BATCH), "retention": (scorer.set_retention,
                VALIDATION)}  # fmt: skip
    for side, (replace, data) in replaced.items():
        replace(data)
        result = values_of(scorer)
        assert text(result) == text(of_a_fresh(scorer)) != text(before), side
        before = result


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
