"""Where a token stands: padding on either side, and rows beyond the length before a scaling."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM, OPTConfig, OPTForCausalLM

from alphatoken import PreferenceBatch, Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenWarning, InputError
from alphatoken.model.transformers import position_limit
from alphatoken.oracle import gradients
from tests.integration.snapshot import Snapshot
from tests.integration.tiny_scorer import inputs, observed_values
from tests.property.architectures import BY_NAME, VOCABULARY, plain_forward
from tests.property.strategies import make_batch
from tests.property.tolerance import close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")

# --- padding on either side -----------------------------------------------------------------------

RIGHT = make_batch(("pprrr...", "pprprrrr"), vocabulary=VOCABULARY, seed=1)
LEFT = {name: torch.stack([x[0].roll(3), x[1]]) for name, x in RIGHT.items()}
VALIDATION = make_batch(("pprr",), vocabulary=VOCABULARY, seed=2)
OTHERS: dict[str, Any] = {
    "opt": lambda: OPTForCausalLM(
        OPTConfig(vocab_size=VOCABULARY, hidden_size=8, ffn_dim=8, num_hidden_layers=2,
                  num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=8),
    ),
    "falcon": lambda: FalconForCausalLM(
        FalconConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2,
                     num_attention_heads=2, alibi=True),
    ),
}  # fmt: skip


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return OTHERS[name]().double().eval() if name in OTHERS else BY_NAME[name].build(1)


def both_sides(
    model: nn.Module, estimator: str, *, position_ids: bool = False
) -> tuple[Tensor, Tensor]:
    """Values of the same tokens, padded on the right and on the left."""
    config = ScorerConfig(estimator, layers=2, uncovered="skip")
    moved = make_batch(("..pprr",), vocabulary=VOCABULARY, seed=2)
    for name in ("input_ids", "labels"):
        moved[name][:, 2:] = VALIDATION[name]
    right = Scorer(model, VALIDATION, config=config).score(RIGHT).total
    batches = [
        {**batch, "position_ids": counted(batch)} if position_ids else batch
        for batch in (moved, LEFT)
    ]
    left = Scorer(model, batches[0], config=config).score(batches[1]).total
    return right, torch.stack([left[0].roll(-3), left[1]])


def counted(batch: dict[str, Tensor]) -> Tensor:
    """Positions that count tokens."""
    return (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("llama", "path"),
        ("gpt_oss", "label"),
        ("opt", "label"),
        ("falcon", "label"),
        pytest.param("gemma3", "label", marks=pytest.mark.slow),
        pytest.param("opt", "path", marks=pytest.mark.slow),
    ],
)
def test_values_do_not_depend_on_the_side_of_padding(name: str, estimator: str) -> None:
    """Of models with rotary, mask-counted and ALiBi positions, by the attention mask alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        right, left = both_sides(model_of(name), estimator)
    close(left, right, right.abs().max(), 1e-5, name=f"{name}, padding on the left")


def test_models_that_count_columns_are_named_and_need_position_ids() -> None:
    """GPT-2's positions are columns."""
    model = model_of("gpt2")
    with pytest.warns(AlphaTokenWarning, match="GPT2LMHeadModel reads the padding on the left"):
        right, left = both_sides(model, "label")
    assert float((left - right).abs().max()) > 0.1 * float(right.abs().max())
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        right, left = both_sides(model, "label", position_ids=True)
    close(left, right, right.abs().max(), 1e-9, name="with position_ids")


def test_an_observed_pass_is_named_too_and_once() -> None:
    scorer = Scorer(model_of("gpt2"), VALIDATION, config=ScorerConfig("label", layers=2))
    with pytest.warns(AlphaTokenWarning, match=r"row 0 is \d.*position_ids that count tokens"):
        observed_values(scorer, LEFT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        observed_values(scorer, LEFT)


def test_a_row_without_a_response_says_nothing_of_the_others() -> None:
    """The first that is padded may have no token with a value."""
    batch = {name: tensor.clone() for name, tensor in LEFT.items()}
    first = {name: tensor[:1] for name, tensor in batch.items()}
    first["labels"] = torch.full_like(first["labels"], -100)
    both = {name: torch.cat([first[name], tensor]) for name, tensor in batch.items()}
    scorer = Scorer(model_of("gpt2"), VALIDATION, config=ScorerConfig("label", layers=2))
    with pytest.warns(AlphaTokenWarning, match="GPT2LMHeadModel reads the padding on the left"):
        scorer.score(both)


# --- rows beyond the length before a scaling ------------------------------------------------------


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


PLAIN = rope("default")
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=8)
DYNAMIC = rope("dynamic", factor=3.0)


class Config:
    """Of a model whose positions end at 16 before any scaling."""

    max_position_embeddings = 16

    def __init__(self, **parameters: Any) -> None:
        self.rope_parameters = parameters


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({}, 16),
        (PLAIN, 16),
        (YARN, 32),
        (DYNAMIC, 48),
        (rope("dynamic", factor=1.0), 16),
        (rope("dynamic", factor=3.0, original_max_position_embeddings=8), 24),
        (rope("dynamic"), 16),
        # A set for each kind of layer, of which any may stretch.
        ({"sliding_attention": PLAIN, "full_attention": YARN}, 32),
        ({"full_attention": YARN, "sliding_attention": PLAIN}, 32),
        ({"full_attention": PLAIN, "sliding_attention": PLAIN}, 16),
        ({"full_attention": PLAIN, "sliding_attention": DYNAMIC}, 48),
    ],
)
def test_the_longest_that_any_rotary_set_allows(parameters: dict[str, Any], limit: int) -> None:
    assert position_limit(Config(**parameters)) == limit


def of_length(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    return make_batch(
        tuple("pp" + "r" * (n - 2) + "." * (max(lengths) - n) for n in lengths),
        vocabulary=VOCABULARY, seed=seed,
    )  # fmt: skip


def dynamic() -> Any:
    """Its frequencies follow the longest row of a pass, and stay so for the next ones."""
    return BY_NAME["llama"].build(1, max_position_embeddings=16, rope_parameters=DYNAMIC)


def by_autograd(train: dict[str, Tensor], validation: dict[str, Tensor]) -> Tensor:
    """Label values over all parameters, each pass on a model of its own."""
    one, other = dynamic(), dynamic()
    direction = gradients.validation_gradient(
        one, plain_forward(one), [validation], dict(one.named_parameters())
    )
    return gradients.label_values(other, plain_forward(other), train, direction)


@pytest.mark.parametrize(
    ("longest", "held", "form"),
    [
        (40, 10, "forward_mode"),
        (24, 40, "forward_mode"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (8, 30, "forward_mode"),
                (40, 24, "forward_mode"),
                (24, 40, "central"),
                (40, 24, "central"),
            )
        ),
    ],
)
def test_dynamic_scaling_has_values_beyond_its_first_length(
    longest: int, held: int, form: str
) -> None:
    """As of autograd on the same rows, whatever was run before, and again."""
    train, validation = of_length(7, longest), of_length(held, seed=1)
    model = dynamic()
    before = Snapshot(model)
    config = ScorerConfig("label", parameters="all", derivative=form)
    scorer = Scorer(model, validation, config=config)
    expected = by_autograd(train, validation)
    frame = None
    for _ in range(2):
        found = scorer.score(train).total
        tolerance = 1e-5 if form == "forward_mode" else 5e-3
        close(found, expected, expected.abs().max(), tolerance, name=f"dynamic, {form}")
        before.check()
        assert frame in (None, scorer.estimator.cache.current()), "M was built anew"
        frame = scorer.estimator.cache.current()


def test_dynamic_scaling_of_pairs_and_of_an_observed_pass() -> None:
    """The two branches differ in length; and a training pass goes on from its own frequencies."""
    model, train = dynamic(), of_length(20)
    branches = of_length(40), of_length(24, seed=3)
    own = []  # a reference that is the model: margins of 0
    for branch in branches:
        fresh = dynamic()
        with torch.no_grad():
            losses = gradients.run_losses(plain_forward(fresh), branch)
        own.append(-torch.stack(list(losses.values())).sum()[None])
    pairs = PreferenceBatch(*branches, *own, beta=1.0)
    scorer = Scorer(model, pairs, config=ScorerConfig("path", layers=2))
    first = scorer.score(train).total
    swapped = PreferenceBatch(*branches[::-1], *own[::-1], beta=1.0)
    other = Scorer(model, swapped, config=ScorerConfig("path", layers=2)).score(train).total
    close(other, -first, first.abs().max(), 1e-6, name="branches exchanged")
    with torch.no_grad():
        plain = dynamic()(**inputs(train)).logits
        assert torch.equal(model(**inputs(train)).logits, plain), "our passes left frequencies"
        model(**inputs(of_length(44)))  # the user's own longest row stays
        later = copy.deepcopy(model)(**inputs(train)).logits
        assert not torch.equal(later, plain)
    for estimator in ("path", "label"):
        scorer = Scorer(model, of_length(40), config=ScorerConfig(estimator, layers=2))
        assert torch.isfinite(observed_values(scorer, train)).all()
        with torch.no_grad():
            assert torch.equal(model(**inputs(train)).logits, later)


def test_the_certificate_agrees_where_validation_rows_are_the_longer_ones() -> None:
    scorer = Scorer(dynamic(), of_length(40, seed=1), config=ScorerConfig("path", layers=2))
    certificate = scorer.verify(of_length(7, 24), tokens=2, progress=False)
    assert certificate.passed, str(certificate)


def test_beyond_what_dynamic_scaling_stretches_is_refused() -> None:
    scorer = Scorer(dynamic(), of_length(10), config=ScorerConfig("label"))
    with pytest.raises(InputError, match="49 tokens, limit 48"):
        scorer.score(of_length(49))
