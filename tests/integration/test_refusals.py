"""Bad input to the scorer: one clear error each, and the model untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
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
    *parts: str,
    model: nn.Module | None = None,
) -> str:
    """The message of exactly one error of this kind; what, got, why and remedy are there."""
    before = None if model is None else Snapshot(model)
    with pytest.raises(AlphaTokenError) as caught:
        call()
    error = caught.value
    message = str(error)
    assert type(error) is kind, message
    assert error.__cause__ is None, "one error, not a chain of them"
    assert error.__context__ is None, "one error, not a chain of them"
    assert error.what
    assert error.got
    assert error.why or error.remedy, message
    for part in parts:
        assert part in message, message
    if before is not None:
        before.check()
    return message


def changed(batch: dict[str, Tensor] = BATCH, **replaced: Any) -> dict[str, Any]:
    """A copy of the batch; a None takes the key away."""
    return {k: v for k, v in {**batch, **replaced}.items() if v is not None}


# --- batches ------------------------------------------------------------------------------------

NOTHING = torch.full_like(BATCH["labels"], -100)
FIRST_ONLY = NOTHING.clone()
FIRST_ONLY[:, 0] = 5
TOO_LONG = make_batch(("p" + "r" * 32,), vocabulary=VOCABULARY, seed=3)
BAD_BATCHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all labels -100": (changed(labels=NOTHING), ("no response token", "-100")),
    "only the first token": (changed(labels=FIRST_ONLY), ("no response token", "index 0")),
    "no rows": (
        {k: v[:0] for k, v in BATCH.items()},
        ("no response token",),
    ),
    "no columns": ({k: v[:, :0] for k, v in BATCH.items()}, ("no response token",)),
    "no labels": (changed(labels=None), ("no tensor 'labels'", "unshifted")),
    "no ids": (changed(input_ids=None), ("no tensor 'input_ids'",)),
    "lists": (
        {k: v.tolist() for k, v in BATCH.items()},
        ("'input_ids' of the", "is no tensor", "Got: list", "collate"),
    ),
    "shifted labels": (changed(labels=BATCH["labels"][:, 1:]), ("one shape", "(2, 8)", "(2, 7)")),
    "one sequence": (
        {k: v[0] for k, v in BATCH.items()},
        ("one shape (batch, length)",),
    ),
    "float labels": (changed(labels=BATCH["labels"].double()), ("must be integers", "float64")),
    "too long": (TOO_LONG, ("longer than the model allows", "33 tokens", "limit 32")),
    "a label beyond the vocabulary": (
        changed(labels=BATCH["labels"].masked_fill(BATCH["labels"] != -100, VOCABULARY)),
        (f"{VOCABULARY}", "row 0, token 2"),
    ),
    "an id beyond the embedding": (
        changed(
            input_ids=BATCH["input_ids"]
            .clone()
            .index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(VOCABULARY))
        ),
        ("no row in the embedding", f"id {VOCABULARY} at row 1, token 2", f"{VOCABULARY} rows"),
    ),
    "a negative id": (
        changed(input_ids=BATCH["input_ids"] - 10 * VOCABULARY),
        ("no row in the embedding", "at row 0, token 0"),
    ),
    "a negative label": (
        changed(labels=BATCH["labels"].masked_fill(BATCH["labels"] != -100, -1)),
        ("-1", "row 0, token 2"),
    ),
    "labels on padding": (
        changed(labels=BATCH["input_ids"].clone()),
        ("lies on padding", "row 0, token 7", "transformers' loss counts it", "masked_fill"),
    ),
    "a label across documents": (
        changed(
            attention_mask=None,
            position_ids=torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7]]),
        ),
        ("first token of a packed document", "labels[0, 2]"),
    ),
}


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


def test_no_validation_at_all() -> None:
    model = model_of()
    refused(
        InputError,
        lambda: scorer_for(model, validation=[]).score(BATCH),
        "no validation tokens",
        "pass at least one batch",
        model=model,
    )


def test_rows_of_text_are_no_batches_either() -> None:
    """Refused when the scorer is made, not when it first scores."""
    rows = [{"prompt": "one and two", "response": "three"}]
    parts = ("validation batch has no tensor 'input_ids'", "'prompt', 'response'", "encode_rows")
    refused(InputError, lambda: scorer_for(model_of(), validation=rows), *parts)


@pytest.mark.parametrize("validation", ["a text", ["two", "texts"], [[1, 2], [3, 4]]])
def test_texts_and_ids_are_no_batches(validation: Any) -> None:
    """Refused when the scorer is made, with the calls that make batches of texts."""
    model = model_of()
    parts = ("a list of batches", type(validation[0]).__name__, "encode_rows")
    refused(InputError, lambda: scorer_for(model, validation=validation), *parts, model=model)
    given = ("is no mapping", type(validation).__name__, "encode_rows")
    refused(InputError, lambda: require_tensors(validation, "batch"), *given)


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


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("model.layers.2.mlp.down_proj.weight", "alphatoken"), ("lm_head.weight", "label")],
)
def test_weights_that_are_not_finite(name: str, estimator: str) -> None:
    model = model_of()
    with torch.no_grad():
        dict(model.named_parameters())[name][0, 0] = float("nan")
    call = lambda: scorer_for(model, estimator).score(BATCH)  # noqa: E731
    refused(NumericalError, call, "not finite", "row 0, token", "weights", model=model)


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
    one = replace(values.total_alone(), total=torch.zeros(1, 2), unassigned=torch.zeros(1))
    with pytest.raises(NumericalError, match=message):
        require_finite_values(replace(one, **place))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [4, 0, [-4], [], "last"])
def test_layers_that_the_model_does_not_have(layers: Any) -> None:
    model = model_of()
    message = refused(ConfigError, lambda: scorer_for(model, layers=layers), "layer", model=model)
    if isinstance(layers, int):
        assert f"layers={layers}, " in message
        assert "depth 3" in message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"estimator": "best"}, ("estimator must be one of", "'best'")),
        ({"window": -1}, ("window", "-1")),
        ({"stability_weight": float("nan")}, ("stability_weight", "nan")),
        ({"preconditioner": "adam"}, ("preconditioner", "frozen")),
        ({"uncovered": "ignore"}, ("uncovered", "skip")),
        ({"parameters": "all", "estimator": "direct"}, ("estimator='label'", "'direct'")),
    ],
)
def test_options_without_meaning(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScorerConfig(**options)
    for part in parts:
        assert part in str(caught.value)


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


@pytest.mark.parametrize("estimator", ["alphatoken", "path"])
def test_kernels_that_overwrite_what_they_saved(estimator: str) -> None:
    """A second backward through the graph would be wrong; the proof of coverage notices."""
    score = partial(scorer_for(overwriting_model(), estimator).score, BATCH)
    refused(CoverageError, score, "captured uses explain its gradient")


def test_kernels_without_forward_mode() -> None:
    scorer = scorer_for(overwriting_model(), "label", derivative="forward_mode")
    refused(UnsupportedError, lambda: scorer.score(BATCH), "without forward mode", "Liger")


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


def test_a_model_without_a_head() -> None:
    model = model_of().model
    call = lambda: scorer_for(model).score(BATCH)  # noqa: E731
    refused(ModelError, call, "no head", "causal language model", model=model)


@pytest.mark.parametrize("frozen", ["everything", "scored layers"])
def test_nothing_to_train(frozen: str) -> None:
    model = model_of()
    part = model if frozen == "everything" else model.model.layers[1:]
    part.requires_grad_(False)
    call = lambda: scorer_for(model)  # noqa: E731
    refused(ConfigError, call, "no trainable linear", "[1, 2]", "unfreeze", model=model)


def test_layers_whose_every_matrix_is_skipped() -> None:
    """Only experts and routers are trainable, and the user asked to leave them out."""
    model = model_of("mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    call = lambda: scorer_for(model, uncovered="skip").score(BATCH)  # noqa: E731
    refused(ConfigError, call, "no trainable", model=model)


def test_a_choice_for_label_alone_is_told_how_to_have_it() -> None:
    refused(ConfigError, lambda: ScorerConfig(parameters="all"), "--estimator label", "'linears'")


def test_a_model_that_is_not_here_is_told_by_which_option_to_name_one() -> None:
    def load(name: str) -> None:
        raise OSError("offline")

    with pytest.raises(ModelError, match=r"runs/none.*--model_name_or_path FOLDER"):
        load_or_refuse("model", "runs/none", load)
