"""Bad input to the scorer: a table of what is asked, the error's type and its cause.

Each is one error, with what, got and a way out, and leaves the model untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphatoken import FisherDrift, PreferenceBatch, Scorer, ScorerConfig, fit_fisher
from alphatoken.errors import (
    AlphaTokenError,
    ConfigError,
    CoverageError,
    FisherError,
    InputError,
    ModelError,
    NumericalError,
    UnsupportedError,
)
from alphatoken.estimate.token_values import require_finite_values
from alphatoken.model.batch import require_tensors
from alphatoken.model.loading import load_or_refuse
from tests.integration.snapshot import Snapshot
from tests.integration.tiny_scorer import BATCH, VALIDATION, inputs, scorer_for
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")


def model_of(name: str = "llama", **options: Any) -> Any:
    return BY_NAME[name].build(1, **options)


def refused(
    kind: type[AlphaTokenError],
    call: Callable[[], Any],
    *causes: str,
    model: nn.Module | None = None,
) -> str:
    """The message of exactly one error of this kind; what, got, why and remedy are there."""
    before = None if model is None else Snapshot(model)
    with pytest.raises(AlphaTokenError) as caught:
        call()
    error = caught.value
    message = str(error)
    assert type(error) is kind, message
    assert error.__cause__ is error.__context__ is None, "one error, not a chain of them"
    assert error.what
    assert error.got
    assert error.why or error.remedy, message
    assert all(cause in message for cause in causes), message
    if before is not None:
        before.check()
    return message


def changed(batch: dict[str, Tensor] = BATCH, **replaced: Any) -> dict[str, Any]:
    """A copy of the batch; a None takes the key away."""
    return {k: v for k, v in {**batch, **replaced}.items() if v is not None}


# --- batches --------------------------------------------------------------------------------------

NOTHING = torch.full_like(BATCH["labels"], -100)
RESPONSES = BATCH["labels"] != -100
FIRST_ONLY = NOTHING.clone()
FIRST_ONLY[:, 0] = 5
BEYOND = BATCH["input_ids"].clone()
BEYOND[1, 2] = VOCABULARY
PACKED = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7]])
BAD_BATCHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all labels -100": (changed(labels=NOTHING), ("no response token", "-100")),
    "only the first token": (changed(labels=FIRST_ONLY), ("no response token", "index 0")),
    "no rows": ({k: v[:0] for k, v in BATCH.items()}, ("no response token",)),
    "no columns": ({k: v[:, :0] for k, v in BATCH.items()}, ("no response token",)),
    "no labels": (changed(labels=None), ("no tensor 'labels'", "unshifted")),
    "no ids": (changed(input_ids=None), ("no tensor 'input_ids'",)),
    "lists": (
        {k: v.tolist() for k, v in BATCH.items()},
        ("'input_ids'", "is no tensor", "list", "collate"),
    ),
    "shifted labels": (changed(labels=BATCH["labels"][:, 1:]), ("(2, 8)", "(2, 7)")),
    "one sequence": ({k: v[0] for k, v in BATCH.items()}, ("(batch, length)",)),
    "float labels": (changed(labels=BATCH["labels"].double()), ("integers", "float64")),
    "too long": (
        make_batch(("p" + "r" * 32,), vocabulary=VOCABULARY, seed=3), ("33 tokens", "limit 32")
    ),
    "a label beyond the vocabulary": (
        changed(labels=BATCH["labels"].masked_fill(RESPONSES, VOCABULARY)),
        (f"{VOCABULARY}", "row 0, token 2"),
    ),
    "an id beyond the embedding": (
        changed(input_ids=BEYOND), ("embedding", f"id {VOCABULARY} at row 1, token 2")
    ),
    "a negative id": (
        changed(input_ids=BATCH["input_ids"] - 10 * VOCABULARY), ("embedding", "row 0, token 0")
    ),
    "a negative label": (
        changed(labels=BATCH["labels"].masked_fill(RESPONSES, -1)), ("-1", "row 0, token 2")
    ),
    "labels on padding": (
        changed(labels=BATCH["input_ids"].clone()), ("padding", "row 0, token 7", "masked_fill")
    ),
    "a label across documents": (
        changed(attention_mask=None, position_ids=PACKED), ("packed document", "labels[0, 2]")
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    """One for all bad batches: it goes on after each."""
    return scorer_for(model_of())


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_batch_that_cannot_be_valued(scorer: Scorer, case: str) -> None:
    batch, parts = BAD_BATCHES[case]
    refused(InputError, lambda: scorer.score(batch), *parts, model=scorer.arguments.model)
    assert bool(torch.isfinite(scorer.score(BATCH).total).all())  # the scorer goes on


# Read by the same code: one each of what its reading, its length and its numbers refuse.
@pytest.mark.parametrize(
    "case", ["lists", "too long", "an id beyond the embedding", "labels on padding"]
)
def test_validation_that_cannot_be_used(case: str) -> None:
    """Named as the validation's fault, also where a good batch stands before it."""
    model = model_of()
    batch, parts = BAD_BATCHES[case]
    for validation in (batch, [VALIDATION, batch]):

        def call(validation: Any = validation) -> Any:
            return scorer_for(model, validation=validation).score(BATCH)

        message = refused(InputError, call, *parts, model=model)
        assert "validation" in message


def test_labels_on_padding_are_refused_in_every_role() -> None:
    """Retention rows, pairs, and an observed pass, as in training and validation batches."""
    model, bad = model_of(), BAD_BATCHES["labels on padding"][0]
    zeros = torch.zeros(2, dtype=torch.float64)
    pairs = PreferenceBatch(VALIDATION, bad | {k: v[:, :7] for k, v in bad.items()}, zeros, zeros)
    assert torch.equal(pairs.rejected["labels"], bad["labels"][:, :7])
    scorer_for(model, validation=pairs).score(BATCH)  # the padding was cut off
    pairs = PreferenceBatch(VALIDATION, bad, zeros, zeros)

    def observed() -> object:
        with scorer_for(model).observe() as seen:
            return seen.values(model(**inputs()).logits, bad["labels"])

    for role, call in {
        "retention batch": lambda: scorer_for(model, retention=bad).score(BATCH),
        "validation batch": lambda: scorer_for(model, validation=pairs).score(BATCH),
        "batch": observed,
    }.items():
        refused(InputError, call, f"a label of the {role} lies on padding", model=model)


@pytest.mark.parametrize(
    ("validation", "causes"),
    [
        ([], ("no validation tokens", "at least one batch")),
        ([{"prompt": "one", "response": "three"}], ("'input_ids'", "'response'", "encode_rows")),
        ("a text", ("a list of batches", "str", "encode_rows")),
        (["two", "texts"], ("a list of batches", "str", "encode_rows")),
        ([[1, 2], [3, 4]], ("a list of batches", "list", "encode_rows")),
    ],
)
def test_what_is_no_validation_batch(validation: Any, causes: tuple[str, ...]) -> None:
    """Refused when the scorer is made, not when it first scores; but for none at all."""
    model = model_of()

    def call() -> Any:
        scorer = scorer_for(model, validation=validation)
        return scorer if validation else scorer.score(BATCH)

    refused(InputError, call, *causes, model=model)
    if validation and not isinstance(validation[0], dict):
        refused(InputError, lambda: require_tensors(validation, "batch"), "is no mapping")


def test_preference_pairs_that_do_not_pair() -> None:
    one = {k: v[:1] for k, v in VALIDATION.items()}
    zero = torch.zeros(2)
    refused(
        InputError,
        lambda: PreferenceBatch(VALIDATION, one, zero, zero),
        "one row a pair",
        "[1, 2]",
    )


# --- numbers ------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_in_the_batch_alone() -> None:
    """The validation never reads the broken row of the embedding."""
    model = model_of()
    batch = changed(input_ids=BATCH["input_ids"].clone())
    unused = next(i for i in range(VOCABULARY) if not bool((VALIDATION["input_ids"] == i).any()))
    batch["input_ids"][:] = int(VALIDATION["input_ids"][0, 0])
    batch["input_ids"][1, 4] = unused
    with torch.no_grad():
        model.get_input_embeddings().weight[unused] = float("nan")
    scorer = scorer_for(model, "label")
    refused(NumericalError, lambda: scorer.score(batch), "not finite", "row 1, token", model=model)


@pytest.mark.parametrize(
    ("estimator", "how"),
    [
        *(("label", how) for how in ("score", "observe")),
        *(("alphatoken", how) for how in ("score", "observe")),
        ("walk", "score"),
        *(
            pytest.param(estimator, how, marks=pytest.mark.slow)
            for estimator, how in product(("direct", "path", "paper_literal"), ("score", "observe"))
        ),
    ],
)
def test_no_estimator_hands_a_nan_back(estimator: str, how: str) -> None:
    """A weight of a token that float64 holds, and the model's float32 does not."""
    model = model_of().float()
    options = {"layers": ScorerConfig().layers} if estimator == "walk" else {}
    scorer = scorer_for(model, estimator, **options)
    weights = torch.ones(BATCH["labels"].shape, dtype=torch.float64)
    weights[1, 5] = 1e300

    def call() -> object:
        if how == "score":
            return scorer.score(BATCH, token_weights=weights)
        with scorer.observe() as observed:
            logits = model(**inputs()).logits
            return observed.values(logits, BATCH["labels"], token_weights=weights, components=False)

    refused(NumericalError, call, "of a token is not finite", "row 1, token", "--dtype")


def test_a_direction_that_is_not_finite() -> None:
    """A preconditioner of the user's own: before the model is run, and where it changes later."""
    name = "model.layers.2.mlp.up_proj.weight"
    model = model_of()
    own = {name: torch.ones_like(model.get_parameter(name))}
    options = {"preconditioner": own, "derivative": "forward_mode"}
    scorer = scorer_for(model, "label", **options)
    scorer.score(BATCH)
    own[name][3, 4] = float("nan")
    refused(NumericalError, lambda: scorer.score(BATCH), "direction M is not finite", model=model)
    refused(NumericalError, lambda: scorer_for(model, "label", **options), "preconditioner", name)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"unassigned": torch.tensor([torch.inf])}, "sum over a prompt.*inf at row 0"),
        ({"total": torch.tensor([[0.0, torch.nan]])}, "total of a token.*row 0, token 1"),
    ],
)
def test_every_number_of_values_is_looked_at(place: dict[str, Tensor], message: str) -> None:
    scorer = scorer_for(model_of(), "label", validation=[VALIDATION] * 2, standard_errors=True)
    values = scorer.score(BATCH)
    assert require_finite_values(values) is values
    one = replace(
        values.total_alone(), total=torch.zeros(1, 2), mask=torch.ones(1, 2, dtype=torch.bool),
        unassigned=torch.zeros(1), parts=None, part_shares=None, input_ids=None, losses=None,
    )  # fmt: skip
    with pytest.raises(NumericalError, match=message):
        require_finite_values(replace(one, **place))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [4, 0, [-4], [], "last"])
def test_layers_that_the_model_does_not_have(layers: Any) -> None:
    model = model_of()
    causes = (f"layers={layers}, ", "depth 3") if isinstance(layers, int) else ("layer",)
    refused(ConfigError, lambda: scorer_for(model, layers=layers), *causes, model=model)


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ({"estimator": "best"}, ("estimator", "'best'")),
        ({"window": -1}, ("window", "-1")),
        ({"stability_weight": float("nan")}, ("stability_weight", "nan")),
        ({"preconditioner": "adam"}, ("preconditioner", "frozen")),
        ({"uncovered": "ignore"}, ("uncovered", "skip")),
        ({"parameters": "all"}, ("--estimator label", "'linears'")),
        ({"parameters": "all", "estimator": "direct"}, ("estimator='label'", "'direct'")),
        ({"derivative": "central"}, ("derivative", "'label'")),
        ({"standard_errors": True, "objective": "stability"}, ("no validation row takes part",)),
        *(
            ({"estimator": "label", "parameters": "all", "layers": layers}, ("layers=", "all"))
            for layers in (2, [0, 1])
        ),
        (
            {"preconditioner": "kronecker", "parameters": "all", "estimator": "label"},
            ("weights of linears alone",),
        ),
        *(({"damping": bad}, ("damping", repr(bad))) for bad in (-0.1, float("inf"), float("nan"))),
        *(  # options that do not belong to label values, and those that do not belong to a walk
            ({"estimator": estimator, name: value}, (name,))
            for estimator, name, value in (
                ("label", "walk_steps", 3), ("label", "walk_refresh", 1),
                ("label", "walk_learning_rate", 1e-3), ("walk", "objective", "stability"),
                ("walk", "preconditioner", "frozen"), ("walk", "standard_errors", True),
                ("walk", "parameters", "linears,*norm*"), ("walk", "layers", 2),
                ("walk", "uncovered", "skip"), ("walk", "part", "direct"),
                ("walk", "derivative", "central"), ("walk", "walk_steps", 0),
                ("walk", "walk_learning_rate", 0.0), ("walk", "walk_refresh", -1),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_options_without_meaning(options: dict[str, Any], causes: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScorerConfig(**options)
    assert all(cause in str(caught.value) for cause in causes)


def test_a_preconditioner_without_its_optimizer_or_of_another_shape() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="needs the optimizer"):
        scorer_for(model, preconditioner="frozen")
    for wrong in ({"nothing": torch.ones(2)}, {"model.layers.2.mlp.up_proj.weight": torch.ones(2)}):
        refused(
            ConfigError,
            lambda wrong=wrong: scorer_for(model, preconditioner=wrong),
            "fits no parameter",
            next(iter(wrong)),
            model=model,
        )


# --- Fisher -------------------------------------------------------------------------------------


def fitted(model: nn.Module, **options: Any) -> FisherDrift:
    prompts = [torch.tensor([3, 4, 5])]
    options = {"samples": 1, "layers": 2, "max_new_tokens": 2, "progress": False, **options}
    return fit_fisher(model, prompts, **options)


@pytest.mark.parametrize("labels", ["sequence", "token"])
def test_a_prompt_with_a_token_that_the_embedding_lacks(labels: str) -> None:
    model = model_of()
    ids = [torch.tensor([3, 4, 5]), torch.tensor([3, VOCABULARY, 4])]
    refused(
        InputError,
        lambda: fit_fisher(model, ids, samples=2, layers=2, labels=labels, progress=False),
        "a token of prompt 1 has no row in the embedding",
        f"id {VOCABULARY} at token 1",
        model=model,
    )


def test_a_fisher_of_other_weights() -> None:
    model = model_of()
    fisher = fitted(BY_NAME["llama"].build(2))
    call = lambda: scorer_for(model, retention=fisher)  # noqa: E731
    refused(FisherError, call, "too far", "max_relative_drift=None", model=model)
    scorer_for(model, retention=fisher, max_relative_drift=None)  # the way out works


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_values_are_the_same_where_gradients_are_off(estimator: str) -> None:
    model = model_of()
    expected = scorer_for(model, estimator).score(BATCH).total
    with torch.no_grad():
        before = Snapshot(model)
        found = scorer_for(model, estimator).score(BATCH).total
        before.check()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_inference_mode_is_refused(estimator: str) -> None:
    """No graph can be built there, whatever one asks for."""
    model = model_of()
    with torch.inference_mode():
        call = lambda: scorer_for(model, estimator).score(BATCH)  # noqa: E731
        refused(ModelError, call, "inference", model=model)
    with torch.inference_mode():
        frozen_for_ever = model_of()
    call = lambda: scorer_for(frozen_for_ever, estimator).score(BATCH)  # noqa: E731
    refused(ModelError, call, "inference")


@pytest.fixture
def foreign_attention() -> Iterator[str]:
    """The name of an implementation that works, and that no estimator knows."""
    ALL_ATTENTION_FUNCTIONS["foreign"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS["foreign"] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    yield "foreign"
    del ALL_ATTENTION_FUNCTIONS["foreign"], ALL_MASK_ATTENTION_FUNCTIONS["foreign"]


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_an_attention_implementation_that_is_not_known(
    foreign_attention: str, estimator: str
) -> None:
    model = model_of()
    expected = scorer_for(model, "path").score(BATCH).total
    model.config._attn_implementation_internal = foreign_attention
    refused(
        ModelError,
        lambda: scorer_for(model, estimator).score(BATCH),
        "attn_implementation='foreign'",
        "set_attn_implementation('sdpa')",
        "estimator='path'",
        model=model,
    )
    found = scorer_for(model, "path").score(BATCH).total  # the way out works
    # transformers makes no mask for a name that it does not know: other kernels, other rounding.
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


class Overwriting(torch.autograd.Function):
    """A gated activation whose backward writes gradients over what it saved, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        of_gate, of_up = error * slope * up, error * sigmoid * gate
        gate.data.copy_(of_gate)
        up.data.copy_(of_up)
        return gate, up


def overwriting_model() -> nn.Module:
    model = model_of()
    for layer in model.model.layers:

        def forward(x: Tensor, mlp: Any = layer.mlp) -> Tensor:
            return mlp.down_proj(Overwriting.apply(mlp.gate_proj(x), mlp.up_proj(x)))

        layer.mlp.forward = forward
    return model


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_a_model_without_an_adapter() -> None:
    model = Foreign()
    with pytest.raises(ModelError) as caught:
        scorer_for(model)
    for part in ("no adapter", "Foreign", "DecoderAdapter", "register_adapter"):
        assert part in str(caught.value)


def frozen(*parts: str) -> nn.Module:
    """Without what could be trained: all of it, or the scored layers."""
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (not parts or name.startswith(parts)))
    return model


def experts_alone() -> nn.Module:
    """Only experts and routers are trainable."""
    model = model_of("mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    return model


def poisoned(name: str) -> nn.Module:
    model = model_of()
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = float("nan")
    return model


UNTRAINABLE = (ConfigError, ("no trainable linear", "[1, 2]", "unfreeze"))
UNPROVED = (CoverageError, ("captured uses explain its gradient",))
NOT_FINITE = (NumericalError, ("not finite", "row 0, token", "weights"))
FORWARD = {"estimator": "label", "derivative": "forward_mode"}
Refusal = tuple[type[AlphaTokenError], tuple[str, ...]]
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], Refusal]] = {
    "no head": (lambda: model_of().model, {}, (ModelError, ("no head", "causal language model"))),
    "everything frozen": (frozen, {}, UNTRAINABLE),
    "scored layers frozen": (
        lambda: frozen("model.layers.1", "model.layers.2"), {}, UNTRAINABLE
    ),
    "every matrix skipped": (
        experts_alone, {"uncovered": "skip"}, (ConfigError, ("no trainable",))
    ),
    # A second backward through the graph would be wrong; the proof of coverage notices.
    "overwritten inputs": (overwriting_model, {"estimator": "alphatoken"}, UNPROVED),
    "overwritten inputs, path": (overwriting_model, {"estimator": "path"}, UNPROVED),
    "no forward mode": (overwriting_model, FORWARD, (UnsupportedError, ("forward mode", "Liger"))),
    "a NaN in a layer": (
        lambda: poisoned("model.layers.2.mlp.down_proj.weight"), {}, NOT_FINITE
    ),
    "a NaN in the head": (lambda: poisoned("lm_head.weight"), {"estimator": "label"}, NOT_FINITE),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_valued(name: str) -> None:
    build, options, (kind, causes) = MODELS[name]
    model = build()
    if causes == UNTRAINABLE[1]:  # no batch is needed to see it
        refused(kind, lambda: scorer_for(model, **options), *causes, model=model)
        return
    refused(kind, lambda: scorer_for(model, **options).score(BATCH), *causes, model=model)


def test_a_model_that_is_not_here_is_told_by_which_option_to_name_one() -> None:
    def load(name: str) -> None:
        raise OSError("offline")

    with pytest.raises(ModelError, match=r"runs/none.*--model_name_or_path FOLDER"):
        load_or_refuse("model", "runs/none", load)
