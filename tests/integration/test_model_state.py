"""The model is left as it was found: by values, by training steps, by exceptions halfway."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from alphatoken import Scorer, fit_fisher
from alphatoken.errors import UnsupportedError
from alphatoken.model.forward import draws
from tests.integration import tiny_scorer
from tests.integration.snapshot import Snapshot, bits
from tests.integration.tiny_scorer import BATCH, VALIDATION, inputs, observed_values
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch
from tests.property.tolerance import allowed, close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")


class PlannedError(RuntimeError):
    """Raised by the tests' own hooks."""


def odd_model(name: str = "llama", **options: Any) -> nn.Module:
    """A model in the middle of somebody's work: mixed modes, gradients, freezes, hooks."""
    model = BY_NAME[name].build(3, **options).train()
    blocks = model.get_decoder().layers if name != "gpt2" else model.transformer.h
    blocks[0].eval()
    for parameter in blocks[1].parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    model.get_input_embeddings().weight.requires_grad_(False)
    blocks[-1].register_forward_hook(lambda module, args, output: None)
    blocks[0].custom_attribute = "mine"
    return model


scorer_for = partial(tiny_scorer.scorer_for, uncovered="skip")


def seed_everything() -> None:
    torch.manual_seed(11)
    np.random.seed(12)  # noqa: NPY002  (the global one is meant)
    random.seed(13)


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        seed_everything()
        yield


# --- whatever is done, nothing stays ------------------------------------------------------------


def run_score(model: nn.Module, estimator: str) -> None:
    scorer_for(model, estimator).score(BATCH)


def run_observe(model: nn.Module, estimator: str) -> None:
    observed_values(scorer_for(model, estimator))


def run_all_layers(model: nn.Module, estimator: str) -> None:
    scorer = scorer_for(model, estimator, layers="all")
    scorer.score(BATCH)
    scorer.score(VALIDATION)


def run_all_parameters(model: nn.Module, estimator: str) -> None:
    scorer_for(model, estimator, parameters="all").score(BATCH)


OPERATIONS = {
    "score": run_score,
    "observe": run_observe,
    "all layers": run_all_layers,
    "all parameters": run_all_parameters,
}

# The estimators of captured gradients differ in what they read, not in what they do to a model.
EVERY = [
    ("llama", "alphatoken", "observe"),
    ("llama", "label", "observe"),
    ("llama", "alphatoken", "score"),
    ("gpt2", "label", "all layers"),
    ("mixtral", "alphatoken", "all layers"),
    ("gemma3", "label", "all parameters"),
]


@pytest.mark.parametrize(("name", "estimator", "operation"), EVERY)
def test_values_leave_no_trace(name: str, estimator: str, operation: str) -> None:
    model = odd_model(name)
    before = Snapshot(model)
    OPERATIONS[operation](model, estimator)
    before.check()


@pytest.mark.parametrize(
    ("structure", "labels"), [("diagonal", "sequence"), ("kronecker", "token")]
)
def test_fitting_a_fisher_leaves_no_trace(structure: str, labels: str) -> None:
    model = odd_model()
    before = Snapshot(model)
    prompts = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
    options = {"structure": structure, "labels": labels, "max_new_tokens": 3}
    fit_fisher(model, prompts, samples=3, layers=2, progress=False, **options)
    before.check()

    def stop(_: Any) -> None:
        torch.rand(3)  # a user's own use of the global generator: also put back
        raise PlannedError

    with pytest.raises(PlannedError):
        fit_fisher(model, prompts, samples=3, layers=2, progress=stop, **options)
    before.check()


# --- exceptions ---------------------------------------------------------------------------------


def fail_at(module: nn.Module, call: int, *, backward: bool) -> Callable[[], None]:
    """Raise in this module's forward, or in the backward through it, at its n-th forward."""
    seen = [0]

    def stop(gradient: Tensor) -> Tensor:
        raise PlannedError("backward")

    def hook(_: nn.Module, args: Any, output: Any) -> None:
        seen[0] += 1
        if seen[0] < call:
            return
        if not backward:
            raise PlannedError("forward")
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(stop)

    return module.register_forward_hook(hook).remove


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(
    ("estimator", "operation"), [("alphatoken", "observe"), ("label", "score")]
)
def test_an_exception_halfway_leaves_no_trace(
    estimator: str, operation: str, call: int, backward: bool
) -> None:
    """Each forward is stopped in turn.

    They are the proofs', validation, the batch, and label's dual one.
    """
    model = odd_model()
    remove = fail_at(model.model.layers[-1].self_attn.o_proj, call, backward=backward)
    before = Snapshot(model)
    stopped = False
    try:
        OPERATIONS[operation](model, estimator)
    except PlannedError:
        stopped = True
    before.check()
    remove()
    assert stopped or call == 3, "not every operation has a third one"


# --- gradient checkpointing ---------------------------------------------------------------------


def kept_loss(logits: Tensor, keep: Tensor) -> Tensor:
    """Cross-entropy of the kept tokens; it shares no error of the head with the values."""
    return torch.nn.functional.cross_entropy(logits[:, :-1][keep[:, 1:]], BATCH["labels"][keep])


def masked_gradients(
    model: nn.Module, keep: Tensor, scorer: Scorer | None, *, inside: bool = True
) -> dict[str, bytes | None]:
    """Gradients of one masked training step, observed or not, by the loop's own loss."""
    for parameter in model.parameters():
        parameter.grad = None
    if scorer is None:
        logits = model(**inputs()).logits
        kept_loss(logits, keep).backward()
    else:
        with scorer.observe() as observed:
            logits = model(**inputs()).logits
            observed.values(logits, BATCH["labels"])
            assert all(p.grad is None for p in model.parameters())
            loss = kept_loss(logits, keep)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    return {name: bits(p.grad) for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("reentrant", "estimator", "inside"),
    [(True, "alphatoken", True), (False, "path", False), (False, "label", True)],
)
def test_checkpointing_stays_on_and_gives_the_same_gradients(
    reentrant: bool, estimator: str, inside: bool
) -> None:
    """The scored layers run without it during the observed pass, the trunk with it."""
    model = BY_NAME["gemma3"].build(4).train()
    keep = BATCH["labels"] != -100
    keep[0, -3:] = False
    plain = masked_gradients(model, keep, None)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed = masked_gradients(model, keep, None)
    assert checkpointed == plain
    for parameter in model.parameters():
        parameter.grad = None
    scorer = scorer_for(model, estimator, layers=1)
    before = Snapshot(model)
    scorer.score(BATCH)
    before.check()
    assert all(block.gradient_checkpointing for block in model.model.layers)
    assert masked_gradients(model, keep, scorer, inside=inside) == plain


EVERYTHING = {"layers": "all", "parameters": "all"}
WALKED = {"layers": "all", "parameters": "all", "walk_steps": 2, "walk_learning_rate": 0.1}


@pytest.mark.parametrize(
    ("estimator", "options", "in_build", "in_step"),
    [
        ("alphatoken", {}, 1, 0),  # errors are asked for at its linears
        ("label", EVERYTHING, 1, 1),
        ("label", EVERYTHING | {"derivative": "one_sided"}, 1, 1),
        ("walk", WALKED, 2, 1),
    ],
)
def test_values_are_the_same_with_checkpointing(
    estimator: str, options: dict[str, Any], in_build: int, in_step: int
) -> None:
    """It is left on in every pass that is sent back but one whose linears are looked at.

    So a block runs once more in each backward, of M and of the training step.
    """
    model = BY_NAME["llama"].build(4).train()
    keep, runs, results = BATCH["labels"] != -100, list[None](), []
    model.model.layers[-1].mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        scorer = tiny_scorer.scorer_for(model, estimator, **options)
        for _ in range(2):  # what is proved once, and of the second M, is proved by then
            values = observed_values(scorer)
            scorer.refresh()
        begun = len(runs)
        with scorer.observe():
            built = len(runs) - begun
        gradients = masked_gradients(model, keep, scorer)
        results.append((values, gradients, built, len(runs) - begun - built))
    (plain, *_), (checkpointed, *_) = results
    assert torch.equal(plain, checkpointed)
    assert results[0][1] == results[1][1]
    more = tuple(b - a for a, b in zip(results[0][2:], results[1][2:], strict=True))
    assert more == (in_build, in_step)


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_dropout_is_off_where_a_backward_runs_a_block_anew(estimator: str) -> None:
    model = BY_NAME["gpt2"].build(4, resid_pdrop=0.5, attn_pdrop=0.5).train()
    assert draws(model)
    plain = scorer_for(model, estimator).score(BATCH).total
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(scorer_for(model, estimator).score(BATCH).total, plain)


# --- narrow weights -----------------------------------------------------------------------------


def test_bf16_weights_give_float32_values_in_nearly_the_same_order() -> None:
    """Against float64 arithmetic on the same (rounded) weights; 60 tokens."""
    batch = make_batch(("pp" + "r" * 30,) * 2, vocabulary=VOCABULARY, seed=3)
    narrow = BY_NAME["llama"].build(5).to(torch.bfloat16)
    exact = copy.deepcopy(narrow).double()
    found, expected = (scorer_for(model).score(batch) for model in (narrow, exact))
    assert found.total.dtype == torch.float32
    assert expected.total.dtype == torch.float64
    assert bool(torch.isfinite(found.total).all())
    rank = spearmanr(found.total[found.mask].numpy(), expected.total[expected.mask].numpy())
    off = 1 - float(rank.statistic)
    close(off, 0.0, 1.0, allowed("rank", torch.bfloat16), name="order in bf16")


def test_tangents_beyond_float16_are_shortened() -> None:
    """Activations of some 9,000, which float16 holds, and not their tangents at length 1."""
    model = BY_NAME["llama"].build(5).float()
    with torch.no_grad():
        for name, factor in {"gate_proj": 0.003, "up_proj": 30.0, "down_proj": 3e4}.items():
            model.model.layers[0].mlp.get_submodule(name).weight *= factor
    exact = copy.deepcopy(model.half()).double()
    options = {"layers": 3, "derivative": "forward_mode"}
    found, expected = (scorer_for(m, "label", **options).score(BATCH).total for m in (model, exact))
    assert bool(torch.isfinite(found).all())
    close(found.double(), expected, expected.abs().max(), 2e-2, name="values in float16")


# --- dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate", "drawn"),
    [
        ("attention_dropout", 0.1, True),
        ("attention_dropout", 0.0, False),
        ("lora_dropout", {"default": 0.0, "second": 0.1}, True),
        ("lora_dropout", {"default": {"layers": 0.1}}, True),
        ("lora_dropout", {"default": 0.0}, False),
        ("drop_path_rates", [0.0, 0.1], True),
        ("drop_path_rates", (0.0, 0.0), False),
        ("router_jitter_noise", 0.01, True),
        ("drop_last", "never", False),
        ("scaling", {"default": 2.0}, False),
    ],
)
def test_a_forward_that_may_draw_is_known_by_its_rates(name: str, rate: Any, drawn: bool) -> None:
    """Numbers of a module, one for each adapter or layer too; in training mode alone."""
    model = BY_NAME["llama"].build(1).train()
    assert not draws(model)
    setattr(model.model.layers[1].self_attn, name, rate)
    assert draws(model) == drawn
    model.model.layers[1].self_attn.eval()
    assert not draws(model)
    assert draws(nn.Sequential(nn.Dropout(0.1)))


@pytest.mark.parametrize(
    ("name", "rates", "estimator"),
    [
        ("gpt2", {"attn_pdrop": 0.1}, "direct"),
        ("llama", {"attention_dropout": 0.1}, "alphatoken"),
    ],
)
def test_observed_attention_dropout_is_refused(
    name: str, rates: dict[str, float], estimator: str
) -> None:
    model = BY_NAME[name].build(6, **rates).train()
    before = Snapshot(model)
    with scorer_for(model, estimator).observe() as observed:
        logits = model(**inputs()).logits
        with pytest.raises(UnsupportedError) as caught:
            observed.values(logits, BATCH["labels"])
    message = str(caught.value)
    for part in (f"'{estimator}'", "attention dropout", "p=0.1", "Remedy", "path"):
        assert part in message
    before.state["torch RNG"] = bits(torch.get_rng_state())  # the user's own pass drew from it
    before.check()
