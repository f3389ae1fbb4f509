"""One forward serves both: values from a training pass, and the training step as if unobserved."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alphatoken import Scorer, ScorerConfig, TokenValues, masked_sft_loss, select_top
from alphatoken.errors import ModelError, UnsupportedError
from tests.integration import tiny_scorer
from tests.integration.snapshot import bits
from tests.integration.tiny_scorer import BATCH, ESTIMATORS, inputs
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.strategies import make_batch
from tests.property.tolerance import allowed, close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")

OTHER = make_batch(("ppprrrr", "pprrr.."), vocabulary=VOCABULARY, seed=5)
# Hybrids: tests/property/test_hybrids.py; a forward whose logits are capped is not the head's.
EVERY = [
    ("llama", "alphatoken"),
    ("llama", "label"),
    ("gemma2", "label"),
    ("gpt_oss", "alphatoken"),
    ("mixtral", "path"),
]


scorer_for = partial(tiny_scorer.scorer_for, uncovered="skip")


def observe(
    scorer: Scorer, model: nn.Module, batch: dict[str, Tensor] = BATCH, **options: Any
) -> tuple[TokenValues, Tensor]:
    """Values of one training forward, and its logits."""
    with scorer.observe() as observed:
        logits = model(**inputs(batch)).logits
        return observed.values(logits, batch["labels"], **options), logits


def gradients(model: nn.Module) -> dict[str, bytes | None]:
    return {name: bits(p.grad) for name, p in model.named_parameters()}


def no_gradients(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


# --- the training step --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "estimator"), EVERY)
def test_gradients_of_the_models_own_loss_are_untouched_to_the_bit(
    name: str, estimator: str
) -> None:
    model, fresh = (BY_NAME[name].build(1).train() for _ in range(2))
    values, logits = observe(scorer_for(model, estimator), model)
    assert no_gradients(model)
    cross_entropy(logits, BATCH["labels"], values.mask).backward()
    cross_entropy(fresh(**inputs()).logits, BATCH["labels"], values.mask).backward()
    plain = gradients(fresh)
    assert sum(g is not None for g in plain.values()) > 5
    assert gradients(model) == plain


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """As anybody would write it, over the tokens of the mask."""
    return torch.nn.functional.cross_entropy(logits[:, :-1][mask[:, 1:]], labels[mask])


def same_gradients(actual: nn.Module, expected: nn.Module, share: float) -> None:
    """Each gradient within a share of its own norm."""
    pairs = zip(actual.named_parameters(), expected.parameters(), strict=True)
    for (name, a), b in pairs:
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            error = (a.grad.double() - b.grad.double()).norm()
            close(error, 0.0, b.grad.double().norm(), share, name=name)


def run_anew_in_the_backward(block: nn.Module) -> None:
    """Checkpoint a block in a way that no adapter knows of, and so pauses."""
    kind: Any = type(block)

    class Checkpointed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    block.__class__ = Checkpointed


@pytest.mark.parametrize("checkpointed", [False, True])
def test_label_values_after_the_training_backward_are_those_before_it(checkpointed: bool) -> None:
    """They take numbers of the observed forward, whose graph is gone by then."""
    model = BY_NAME["llama"].build(1).train()
    scorer = scorer_for(model, "label")
    before, _ = observe(scorer, model)
    for block in model.model.layers if checkpointed else ():
        run_anew_in_the_backward(block)
    with scorer.observe() as observed:
        logits = model(**inputs()).logits
        masked_sft_loss(logits, BATCH["labels"], before.mask).backward()
        after = observed.values(logits, BATCH["labels"])
    assert torch.equal(after.total, before.total)


@pytest.mark.parametrize(
    ("name", "estimator", "parameters"),
    [
        ("llama", "alphatoken", "linears"),
        ("mixtral", "path", "linears,experts"),
        ("qwen3_5", "alphatoken", "linears"),
    ],
)
def test_blocks_that_run_anew_in_a_backward_have_the_values_of_others(
    name: str, estimator: str, parameters: str
) -> None:
    """Also those of a later call, and the training step is the same, bitwise.

    Values are up to rounding: under checkpointing the kernel's log-sum-exp is not read.
    """
    made = [BY_NAME[name].build(1).train() for _ in range(2)]
    for block in made[1].model.layers:
        run_anew_in_the_backward(block)
    totals = []
    for model in made:
        scorer = scorer_for(model, estimator, parameters=parameters)
        scored = scorer.score(BATCH).total
        with scorer.observe() as observed:
            logits = model(**inputs()).logits
            values = [observed.values(logits, BATCH["labels"]) for _ in range(2)]
            masked_sft_loss(logits, BATCH["labels"], values[0].mask).backward()
        totals.append([scored, *(one.total for one in values)])
    for plain, anew in zip(*totals, strict=True):
        torch.testing.assert_close(anew, plain, rtol=1e-12, atol=1e-14)
    assert gradients(made[0]) == gradients(made[1])


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_autocast(estimator: str) -> None:
    """bf16 arithmetic on float32 weights: float32 values, untouched gradients."""
    watched, plain = (BY_NAME["llama"].build(4, dtype=torch.float32).train() for _ in range(2))
    scorer = scorer_for(watched, estimator)
    exact = scorer_for(BY_NAME["llama"].build(4, dtype=torch.float64), estimator).score(BATCH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values, logits = observe(scorer, watched)
        assert no_gradients(watched)
        keep = select_top(values.total, values.mask, ratio=0.5)
        loss = masked_sft_loss(logits, BATCH["labels"], keep)
        fresh = masked_sft_loss(plain(**inputs()).logits, BATCH["labels"], keep)
    loss.backward()
    fresh.backward()
    assert values.total.dtype == torch.float32
    error = (values.total - exact.total).norm()
    close(error, 0.0, exact.total.norm(), allowed("norm", torch.bfloat16), name="bf16 values")
    same_gradients(watched, plain, allowed("norm", torch.bfloat16))


# --- what the values are of ---------------------------------------------------------------------


def without_gradients(model: Any) -> Tensor:
    """A reference pass and generation between the forward and values()."""
    logits: Tensor = model(**inputs()).logits
    with torch.no_grad():
        model(**inputs(OTHER))
    model.generate(OTHER["input_ids"][:, :3], max_new_tokens=2, do_sample=False)
    return logits


def the_last_of_several(model: Any) -> Tensor:
    model(**inputs(OTHER))
    logits: Tensor = model(**inputs()).logits
    return logits


def by_position(model: Any) -> Tensor:
    logits: Tensor = model(BATCH["input_ids"], BATCH["attention_mask"]).logits
    return logits


@pytest.mark.parametrize(
    ("passes", "estimator"),
    [(without_gradients, "label"), (the_last_of_several, "alphatoken"), (by_position, "path")],
)
def test_the_pass_whose_logits_are_given_counts(passes: Any, estimator: str) -> None:
    model = BY_NAME["llama"].build(5)
    scorer = scorer_for(model, estimator)
    expected, _ = observe(scorer, model)
    with scorer.observe() as observed:
        values = observed.values(passes(model), BATCH["labels"])
    assert torch.equal(values.total, expected.total)


# --- what the model was called with --------------------------------------------------------------

PADDED = make_batch(("..pprrr", "pprrrrr"), vocabulary=VOCABULARY, seed=3)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_arguments_by_position_are_those_of_the_observed_forward(name: str) -> None:
    """A mask by position hides the padding from forwards of our own as well."""
    model = BY_NAME["gpt2"].build(5)  # whose positions would move if the mask were lost
    scorer = tiny_scorer.scorer_for(model, **ESTIMATORS[name])
    expected = scorer.score(PADDED).total
    with scorer.observe() as observed:
        logits = model(PADDED["input_ids"], None, PADDED["attention_mask"]).logits
        values = observed.values(logits, PADDED["labels"])
    torch.testing.assert_close(values.total, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["path", "label over all parameters"])
def test_embeddings_beside_no_token_ids(name: str) -> None:
    """``input_ids=None`` says as much as leaving it out."""
    model = BY_NAME["llama"].build(5)
    scorer = tiny_scorer.scorer_for(model, **ESTIMATORS[name])
    draw = torch.Generator().manual_seed(2)
    embeddings = torch.randn(*PADDED["labels"].shape, 16, generator=draw, dtype=torch.float64)
    result = []
    for ids in ({}, {"input_ids": None}):
        with scorer.observe() as observed:
            mask = PADDED["attention_mask"]
            logits = model(**ids, inputs_embeds=embeddings, attention_mask=mask).logits
            result.append(observed.values(logits, PADDED["labels"]).total)
    assert torch.equal(*result)
    assert bool(result[0].any())


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("positional", [False, True])
def test_an_argument_that_is_written_to_after_the_forward_is_refused(
    name: str, positional: bool
) -> None:
    model = BY_NAME["llama"].build(5)
    scorer = tiny_scorer.scorer_for(model, **ESTIMATORS[name])
    ids, mask, labels = (PADDED[n].clone() for n in ("input_ids", "attention_mask", "labels"))
    with scorer.observe() as observed:
        if positional:
            logits = model(ids, mask, labels=labels).logits
        else:
            logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits
        labels[0, -1] = -100  # labels are handed over anew
        assert observed.values(logits, labels).total.any()
        mask[0, :3] = 1
        with pytest.raises(ModelError, match=r"written to since it ran. Got: attention_mask"):
            observed.values(logits, PADDED["labels"])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_embeddings_of_the_models_own_table(name: str) -> None:
    """A table that is in scope has a use outside of the observed forward, which is refused."""
    model = BY_NAME["llama"].build(5)
    scorer = tiny_scorer.scorer_for(model, **ESTIMATORS[name])
    table = model.get_input_embeddings()
    rest = {"attention_mask": BATCH["attention_mask"], "use_cache": False}
    everything = name not in ("alphatoken", "path", "direct", "label")
    for made, refused in (
        (lambda: 2.0 * table(BATCH["input_ids"]) / 2.0, everything),
        (lambda: table(BATCH["input_ids"]).detach(), False),
        (lambda: table(BATCH["input_ids"]).detach().requires_grad_(), False),
    ):
        with scorer.observe() as observed:
            logits = model(inputs_embeds=made(), **rest).logits
            if refused:
                with pytest.raises(UnsupportedError, match="inputs_embeds was made with a param"):
                    observed.values(logits, BATCH["labels"])
            else:
                values = observed.values(logits, BATCH["labels"])
                assert values.total.any()


def test_a_second_pass_on_what_a_first_one_made_is_refused() -> None:
    """Hidden states of one pass as inputs of the next: its uses of the weights would be missing."""
    model = BY_NAME["llama"].build(5)
    scorer = scorer_for(model, "path")
    with scorer.observe() as observed:
        first = model(**inputs(), output_hidden_states=True).hidden_states[-1]
        logits = model(inputs_embeds=first, attention_mask=BATCH["attention_mask"]).logits
        with pytest.raises(UnsupportedError, match="inputs_embeds was made with a parameter"):
            observed.values(logits, BATCH["labels"])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_decoder_by_itself_is_no_observed_forward(name: str) -> None:
    model = BY_NAME["llama"].build(5)
    scorer = tiny_scorer.scorer_for(model, **ESTIMATORS[name])
    for before in (False, True):
        with scorer.observe() as observed:
            if before:
                model(**inputs(OTHER))
            hidden = model.model(**inputs()).last_hidden_state
            with pytest.raises(ModelError, match="decoder layers were run, and not the model"):
                observed.values(model.lm_head(hidden), BATCH["labels"])


# --- misuse -------------------------------------------------------------------------------------


def test_the_first_pass_of_a_model_that_reads_its_own_outputs() -> None:
    """transformers puts hooks on its modules inside the first forward that gives router logits."""
    from tests.integration.tiny_training import mixture

    model, batch = mixture(), make_batch(("pprrr", "prrrr"), vocabulary=46, seed=3)
    model.config.output_router_logits = True
    model.set_experts_implementation("eager")
    config = ScorerConfig("path", layers=2, parameters="linears,experts", uncovered="skip")
    scorer = Scorer(model, batch, None, config)
    with scorer.observe() as observed:
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
        first = observed.values(logits, batch["labels"])
    assert bool(first.total[first.mask].abs().max() > 0)
    again = Scorer(model, batch, None, config).score(batch)
    assert torch.allclose(first.total, again.total, rtol=1e-4, atol=1e-6)


def test_what_would_spoil_the_observed_pass_is_refused() -> None:
    model = tiny_scorer.model_of()
    scorer = tiny_scorer.scorer_for(model, "path")
    expected = scorer.score(BATCH).total
    with scorer.observe() as observed:
        logits = model(**inputs()).logits
        with pytest.raises(ModelError, match="score.. was called inside observe"):
            scorer.score(BATCH)
        with pytest.raises(ModelError, match="refresh.. was called inside observe"):
            scorer.refresh()
        actual = observed.values(logits, BATCH["labels"]).total
    torch.testing.assert_close(actual, expected)
    scorer.refresh()
