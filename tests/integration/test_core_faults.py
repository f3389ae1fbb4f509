"""Faults that reviews found in the core, each pinned by the smallest thing that shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers import BartConfig, BartForConditionalGeneration, LlamaForCausalLM

from alphatoken import AlphaTokenWarning, FisherDrift, Scorer, ScorerConfig
from alphatoken.errors import (
    AlphaTokenError,
    ConfigError,
    CoverageError,
    InputError,
    ModelError,
    NumericalError,
    UnsupportedError,
)
from alphatoken.estimate.batch_proofs import prove_documents
from alphatoken.model.batch import LabelledBatch, embedding_rows, read_batch
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import find_scope
from alphatoken.model.switch import BackwardSwitch
from tests.integration.tiny_scorer import (
    BATCH,
    VALIDATION,
    model_of,
    observed_values,
    printed_by,
    scorer_for,
)
from tests.places import nightly
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.decoder import ReferenceAdapter
from tests.property.strategies import make_batch, make_case

EACH = pytest.mark.parametrize("estimator", ["label", "direct"])


def drift_of(model: nn.Module, size: float = 1.0) -> FisherDrift:
    named = {n: p.detach() for n, p in model.named_parameters() if "proj" in n}
    return FisherDrift(
        {n: torch.full_like(p, size) for n, p in named.items()},
        {n: 0.9 * p for n, p in named.items()},
    )


def foreign() -> FisherDrift:
    """Of another model: its matrices do not fit."""
    return drift_of(model_of(1, hidden_size=8, num_attention_heads=2, head_dim=4))


def test_a_refused_retention_changes_nothing() -> None:
    model = model_of()
    before = drift_of(model)
    options = ScorerConfig(layers=2, max_relative_drift=None)
    scorer = Scorer(model, VALIDATION, before, options)
    scorer.warn = False
    expected = scorer.score(BATCH)
    with pytest.raises(AlphaTokenError):
        scorer.set_retention(foreign())
    for _ in range(2):  # from what is there, and built anew
        found = scorer.score(BATCH)
        assert torch.equal(found.total, expected.total)
        assert torch.equal(found.stability, expected.stability)
        scorer.refresh()
    assert scorer.arguments.retention is before


def test_a_refused_validation_changes_nothing() -> None:
    scorer = scorer_for(model_of())
    expected = scorer.score(BATCH).total
    with pytest.raises(InputError):
        scorer.set_validation([])
    assert torch.equal(scorer.score(BATCH).total, expected)


POINTED = """
import warnings
from alphatoken import AlphaTokenWarning
from tests.integration import test_core_faults as own
from tests.integration.tiny_scorer import inputs
for estimator in ("alphatoken", "path", "label"):
    for how in ("score", "values"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = own.model_of()
            config = own.ScorerConfig(estimator=estimator, layers=2, max_relative_drift=None)
            scorer = own.Scorer(model, own.VALIDATION, own.drift_of(model, 1e9), config)
            if how == "score":
                scorer.score(own.BATCH)  # here
            else:
                with scorer.observe() as observed:
                    logits = model(**inputs()).logits
                    observed.values(logits, own.BATCH["labels"])  # here
        found = [w for w in caught if issubclass(w.category, AlphaTokenWarning)]
        print(estimator, how, *(f"{w.filename}:{w.lineno}" for w in found))
"""


UNTOUCHED = """
from alphatoken.config import ESTIMATORS
from tests.integration import test_model_state as state
state.seed_everything()
model = state.odd_model()
before = state.Snapshot(model, python_random=True)
for estimator in ESTIMATORS:
    state.run_score(model, estimator)
before.check()
print("no generator is touched")
"""


@pytest.mark.slow
def test_a_warning_points_at_the_users_line_and_no_generator_is_touched() -> None:
    """In a process of its own: the run-time type checks of pytest stand between the frames.

    They draw from Python's generator too.
    """
    here = [n for n, line in enumerate(POINTED.split("\n"), 1) if line.endswith("# here")]
    score, values = (f"<string>:{line}" for line in here)
    lines = {"score": score, "values": values}
    expected = [
        f"{estimator} {how} {line}"
        for estimator in ("alphatoken", "path", "label")
        for how, line in lines.items()
    ]
    *found, last = printed_by("-c", POINTED + UNTOUCHED).splitlines()
    assert found == expected
    assert last == "no generator is touched"


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


LIMITS = {
    "plain": ({}, 16),
    "yarn, of a shorter one": (
        rope("yarn", factor=4.0, original_max_position_embeddings=8), 32,
    ),
    "linear": (rope("linear", factor=4.0), 16),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_scored_and_observed_passes_have_one_limit(name: str) -> None:
    """The model's own positions, or those of the scaling that was put on top of them."""
    parameters, limit = LIMITS[name]
    options = {"rope_parameters": parameters} if parameters else {}
    model = model_of(1, max_position_embeddings=16, **options)
    assert find_adapter(model).max_positions() == limit
    scorer = scorer_for(model, layers=1)
    for length in (limit, limit + 1):
        batch = make_batch(("p" + "r" * (length - 1),), vocabulary=VOCABULARY, seed=3)
        for run in (scorer.score, partial(observed_values, scorer)):
            if length == limit:
                run(batch)
            else:
                with pytest.raises(InputError, match=f"limit {limit}"):
                    run(batch)


def test_a_trainable_convolution_is_named() -> None:
    adapter = find_adapter(BY_NAME["qwen3_5"].build(1))
    scope = find_scope(adapter, "all")
    name = "model.layers.1.linear_attn.conv1d.weight"
    assert "convolution" in scope.uncovered[name]
    dict(adapter.model.named_parameters())[name].requires_grad_(False)
    assert name not in find_scope(adapter, "all").uncovered


def test_a_backward_mode_that_does_not_exist_is_refused() -> None:
    switch = BackwardSwitch()
    with pytest.raises(ConfigError, match="'selfonly'"), switch.to("selfonly"):  # type: ignore[arg-type]
        pass
    assert switch.mode == "ordinary"


def masked(blocked: bool) -> dict[str, Tensor]:
    """A packed row under a mask of pairs that keeps its documents apart, or does not."""
    batch = make_batch(("pprr|prrpr", "ppr|pprrrr"), vocabulary=VOCABULARY, seed=4)
    length = batch["input_ids"].shape[1]
    allowed = torch.ones(2, length, length, dtype=torch.bool).tril()
    if blocked:
        documents = (batch["position_ids"] == 0).cumsum(1)
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    return {**batch, "attention_mask": allowed[:, None]}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_mask_that_separates_documents_vouches_for_no_other_mask(dtype: torch.dtype) -> None:
    def given(blocked: bool) -> dict[str, Tensor]:
        batch = masked(blocked)
        if dtype != torch.bool:
            hidden = ~batch["attention_mask"]
            zeros = torch.zeros(hidden.shape, dtype=dtype)
            batch["attention_mask"] = zeros.masked_fill(hidden, torch.finfo(dtype).min)
        return batch

    scorer = scorer_for(model_of())
    scorer.score(given(True))
    with pytest.raises(ModelError, match="packed documents see each other"):
        scorer.score(given(False))
    scorer.score(given(True))
    one = given(True)  # the first row is in order, the second is not
    one["attention_mask"][1] = given(False)["attention_mask"][1]
    with pytest.raises(ModelError, match="packed documents see each other"):
        scorer.score(one)


def test_boundaries_that_are_always_told_alike_are_proved_once() -> None:
    model = model_of()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    scorer = scorer_for(model)
    counts = []
    for seed in range(3):
        batch = make_batch(("pprr|prrpr", "ppr|pprrrr"), vocabulary=VOCABULARY, seed=seed)
        calls.clear()
        scorer.score(batch)
        counts.append(len(calls))
    assert counts[1] == counts[2] == 1
    for batch in (masked(True), masked(True)):
        calls.clear()
        scorer.score(batch)
    assert len(calls) == 1
    ones = make_batch(("pprr|prrpr",), vocabulary=VOCABULARY, seed=4)
    with pytest.raises(ModelError, match="packed documents see each other"):
        scorer.score({**ones, "attention_mask": torch.ones(1, 9, dtype=torch.long)})


def packed_row(lengths: tuple[int, ...] = (5, 3, 4)) -> dict[str, Tensor]:
    """One row of several documents, told apart by their positions."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (1, sum(lengths)), generator=drawn)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def numbered() -> dict[str, Tensor]:
    """The same row with documents numbered in the mask: 1 1 1 1 1 2 2 2 3 3 3 3."""
    batch = packed_row()
    documents = (batch.pop("position_ids") == 0).cumsum(1)
    return batch | {"attention_mask": documents}


@EACH
def test_an_observed_forward_that_mixes_documents_is_refused(estimator: str) -> None:
    """transformers separates them by positions only where it keeps no cache."""
    model = model_of().train()
    scorer, batch = scorer_for(model, estimator), packed_row()
    expected = scorer.score(batch).total  # runs without a cache: nothing mixes
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    state = torch.get_rng_state()
    for _ in range(2):  # refused once, refused again
        with scorer.observe() as observed:
            logits = model(**inputs).logits
            with pytest.raises(ModelError, match=r"documents see each other.*use_cache=False"):
                observed.values(logits, batch["labels"])
    with scorer.observe() as observed:
        logits = model(**inputs, use_cache=False).logits
        found = observed.values(logits, batch["labels"]).total
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("attention", "estimator"), [("sdpa", "label"), ("eager", "path")])
def test_documents_that_a_mask_numbers_are_no_plain_row(attention: str, estimator: str) -> None:
    """Kernels that take the numbers for ones let documents see each other: refused, each time."""
    model = model_of()
    model.set_attn_implementation(attention)
    scorer = scorer_for(model, estimator)
    for _ in range(2):
        with pytest.raises(ModelError, match="documents see each other"):
            scorer.score(numbered())
    first = numbered()
    first["labels"] = first["input_ids"]
    with pytest.raises(InputError, match="first token of a packed document"):
        scorer.score(first)


@pytest.mark.parametrize("mask", [[[0.0, -1e9]], [[1, -1]], [[1.0, 0.5]]])
def test_a_mask_that_is_none_is_refused(mask: list[list[float]]) -> None:
    batch = packed_row((2,)) | {"attention_mask": torch.tensor(mask)}
    with pytest.raises(InputError, match="attention_mask"):
        scorer_for(model_of(), "label").score(batch)


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_a_pass_that_looks_ahead_is_refused_by_itself(estimator: str) -> None:
    """Each mask of pairs is judged; the pass that was refused leaves no trace."""
    batch = make_batch(("pprrprr", "prprrrr"), vocabulary=VOCABULARY, seed=1)
    inputs = {"input_ids": batch["input_ids"]}
    ahead = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    model = model_of()
    scorer = scorer_for(model, estimator)
    plain = scorer.score(batch).total
    causal = scorer.score({**batch, "attention_mask": ahead.tril()}).total
    assert torch.allclose(causal, plain, rtol=1e-6)
    with pytest.raises(ModelError, match="looks ahead"):
        scorer.score({**batch, "attention_mask": ahead})
    with scorer.observe() as observed:
        for mask in (ahead, ahead.tril()):
            logits = model(**inputs, attention_mask=mask, use_cache=False).logits
            if mask is ahead:
                with pytest.raises(ModelError, match="looks ahead"):
                    observed.values(logits, batch["labels"])
        again = observed.values(logits, batch["labels"]).total
    assert torch.allclose(again, plain, rtol=1e-6)


def test_a_flag_that_makes_a_pass_look_ahead_is_refused_after_any_other() -> None:
    batch = {k: v for k, v in BATCH.items() if k != "attention_mask"}
    scorer = scorer_for(model_of(), "direct")
    plain = scorer.score(batch).total
    for _ in range(2):
        with pytest.raises(ModelError, match="looks ahead"):
            scorer.score({**batch, "is_causal": False})
    assert torch.equal(scorer.score({**batch, "is_causal": True}).total, plain)


def test_encoder_decoders_are_refused_by_name() -> None:
    config = BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=VOCABULARY,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        Scorer(BartForConditionalGeneration(config), VALIDATION)


def test_the_default_number_of_layers_is_at_most_the_depth() -> None:
    model = model_of(1, num_hidden_layers=2)
    assert Scorer(model, VALIDATION).scope.layers == (0, 1)
    for layers in (3, "all"):  # where all parameters are meant no number of layers plays a part
        options = ScorerConfig("label", layers=layers, parameters="all")
        assert Scorer(model, VALIDATION, config=options).scope.layers == (0, 1)
    with pytest.raises(ConfigError, match="within the model"):
        Scorer(model, VALIDATION, config=ScorerConfig(layers=4))


CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""As transformers calls it: by the first name from 5.24 on."""


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
def test_a_batch_that_continues_a_cache_is_refused(estimator: str) -> None:
    """Its keys belong to positions that the pass does not run, and a forward fills it further."""
    model = model_of()
    scorer = scorer_for(model, estimator)
    scorer.score(BATCH)  # the proofs that run once are done
    ids = BATCH["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :3], use_cache=True)[CACHE]
    rest, labels = ids[:, 3:], BATCH["labels"][:, 3:]
    with scorer.observe() as observed:
        logits = model(rest, **{CACHE: cache}, use_cache=True).logits
        with pytest.raises(UnsupportedError, match=f"Got: {CACHE}"):
            observed.values(logits, labels)
    for name in ("cache", "past_key_values"):
        with pytest.raises(UnsupportedError, match=f"Got: {name}"):
            scorer.score({"input_ids": rest, "labels": labels, name: cache})


def test_more_keys_than_queries_have_no_self_only_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache that the model holds by itself: no argument shows it, the attention call does."""
    model = model_of()
    scorer = scorer_for(model, "direct")
    scorer.pin("as it is")  # or the proofs would run anew, since a forward is replaced
    scorer.score(BATCH)
    with torch.no_grad():
        cache = model(BATCH["input_ids"][:, :3], use_cache=True)[CACHE]
    inner = model.model.forward
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *args, **more: inner(*args, **more | {CACHE: cache}),
    )
    rest, labels = BATCH["input_ids"][:, 3:], BATCH["labels"][:, 3:]
    with scorer.observe() as observed:
        logits = model(rest, use_cache=True).logits
        with pytest.raises(UnsupportedError, match="more keys than queries"):
            observed.values(logits, labels)


class Logits(ReferenceAdapter):
    """Logits are changed after the forward; documents may be made to see each other."""

    change: Callable[[Tensor], None]
    leaks = False

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        ids = inputs["input_ids"]
        inputs = (
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if self.leaks else inputs
        )
        logits: Tensor = super().forward(inputs)
        type(self).change(logits)
        return logits


def first_is_nan(logits: Tensor) -> None:
    logits[:, 0] = torch.nan


def last_is_nan(logits: Tensor) -> None:
    logits[:, -1, 0] = torch.nan


def one_is_never_drawn(logits: Tensor) -> None:
    logits[..., 3] = -torch.inf


def packed(change: Callable[[Tensor], None], leaks: bool) -> tuple[Logits, LabelledBatch]:
    case = make_case(("pprr|prr", "prr|prrr"), (("pprr",),))
    kind = type("Changed", (Logits,), {"change": staticmethod(change), "leaks": leaks})
    return kind(case.model()), read_batch(case.batch)


@pytest.mark.parametrize("change", [first_is_nan, one_is_never_drawn])
def test_documents_are_told_apart_beside_logits_that_are_no_numbers(change: Any) -> None:
    """A NaN of another document, or a token never drawn, neither hides a leak nor is one."""
    prove_documents(*packed(change, leaks=False))
    with pytest.raises(ModelError, match="packed documents see each other"):
        prove_documents(*packed(change, leaks=True))


def test_a_nan_in_a_document_that_is_proved_is_said() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        prove_documents(*packed(last_is_nan, leaks=False))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.tanh()


NORMS: dict[str, Callable[..., Any]] = {
    "parametrized": lambda linear: parametrize.register_parametrization(
        linear, "weight", Doubled()
    ),
    "weight_norm": parametrizations.weight_norm,
}


@pytest.mark.parametrize("how", NORMS)
def test_a_weight_that_is_computed_is_followed_or_refused(how: str) -> None:
    model = model_of()
    NORMS[how](model.model.layers[-1].mlp.up_proj)
    with pytest.raises(CoverageError, match="parametrisation"):
        scorer_for(model, "path")
    assert scorer_for(model, "path", uncovered="skip").score(BATCH).total.any()
    scorer = scorer_for(model, "label")
    if how == "parametrized":
        assert "model.layers.2.mlp.up_proj.parametrizations.weight.original" in scorer.parameters
        assert scorer.verify(BATCH).passed
    else:  # torch has no forward mode for its kernel
        with pytest.raises(UnsupportedError, match="_weight_norm_interface"):
            scorer_for(model, "label", derivative="forward_mode").score(BATCH)
        with pytest.warns(AlphaTokenWarning, match="taken by finite differences"):
            values = scorer.score(BATCH)
        assert values.derivative == "central"


def test_rows_of_an_embedding_are_known_under_an_adapter() -> None:
    own = nn.Embedding(7, 2)
    for embedding, rows in (
        (own, 7),
        (SimpleNamespace(base_layer=own), 7),
        (nn.Linear(1, 1), None),
    ):
        model = SimpleNamespace(get_input_embeddings=lambda found=embedding: found)
        assert embedding_rows(model) == rows
    assert embedding_rows(SimpleNamespace()) is None


@pytest.mark.parametrize(("dtype", "estimator"), [(torch.int16, "label"), (torch.int32, "direct")])
def test_labels_of_any_integers(dtype: torch.dtype, estimator: str) -> None:
    scorer = scorer_for(model_of(), estimator)
    expected = scorer.score(BATCH).total
    narrow = BATCH | {"labels": BATCH["labels"].to(dtype)}
    assert torch.equal(scorer.score(narrow).total, expected)
    torch.testing.assert_close(observed_values(scorer, narrow), expected)
    with pytest.raises(InputError, match="input_ids"):
        scorer.score(BATCH | {"input_ids": BATCH["input_ids"].to(torch.int16)})


def test_weights_off_the_response_are_not_read() -> None:
    scorer = scorer_for(model_of(), "label")
    mask = scorer.score(BATCH).mask
    weights = torch.ones(mask.shape, dtype=torch.float64)
    expected = scorer.score(BATCH, token_weights=weights).total
    wild = weights.masked_fill(~mask, float("nan"))
    assert torch.equal(scorer.score(BATCH, token_weights=wild).total, expected)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="token_weights are not finite"):
            scorer.score(BATCH, token_weights=weights.masked_fill(mask, bad))


def test_two_threads() -> None:
    """torch has one level of forward mode, and a model one set of hooks."""
    model = model_of()
    scorers = [scorer_for(model, "label") for _ in range(2)]
    expected = [s.score(BATCH).total for s in scorers]
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(4):
            found[number].append(scorers[number].score(BATCH).total)

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert [torch.equal(x, expected[number]) for x in found[number]] == [True] * 4


def compiled(how: str) -> nn.Module:
    model = model_of()
    if how == "wrapper":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    part = model if how == "model.compile()" else model.model.layers[-1]
    part.compile(backend="eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("how", "estimator"),
    [("wrapper", "label"), ("model.compile()", "direct"), ("a layer", "label")],
)
def test_compiled_models_are_scored_as_they_were_written(how: str, estimator: str) -> None:
    scorer = scorer_for(compiled(how), estimator)
    expected = scorer_for(model_of(), estimator).score(BATCH).total
    assert torch.equal(scorer.score(BATCH).total, expected)
    if how == "wrapper" or estimator != "label":
        with pytest.raises(UnsupportedError, match="compiled"), scorer.observe():
            pass


OBSERVED = """
from tests.integration import test_core_faults as own
model = own.compiled("model.compile()")
scorer = own.scorer_for(model, "label")
own.torch.testing.assert_close(own.observed_values(scorer), scorer.score(own.BATCH).total)
print("equal")
"""


@pytest.mark.slow
@nightly
def test_label_observes_a_model_that_was_compiled_in_place() -> None:
    # By itself, because Dynamo cannot trace the checks of shapes that the tests put in.
    assert printed_by("-c", OBSERVED).endswith("equal\n")
