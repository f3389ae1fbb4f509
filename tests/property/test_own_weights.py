"""Weights that rows bring: on the way to the loss, on the tokens of turns, in one step.

The oracle of a step is a loop over tokens in float64: the gradient of each log-probability by
autograd, times its weight and the coefficient of the loss.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.data import Row, Turn, encode_row
from alphatoken.data.weights import joined, parted, turn_weights, whole_labels
from alphatoken.errors import DataError, InputError, NumericalError
from alphatoken.train.policy import PolicyBatch, TokenPolicy
from tests.property.profiles import budget
from tests.property.reference_step import RunConfig
from tests.property.setups import refusal
from tests.property.test_trainer_oracle import _double_head, _tokenizer, made_model
from tests.property.tolerance import close

STEP, FLOOR = 1e-10, 1e-5
"""Float64, through a small model and one step of gradient descent at rate 1; what is added to the
sum of absolute terms, since the step is read off weights of size 1."""

# --- labels and weights in one column -------------------------------------------------------------

LABELS = st.one_of(st.just(-100), st.integers(0, 2**31 - 1))
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TOKENS = st.lists(st.tuples(LABELS, FLOAT32), min_size=1, max_size=12)


@given(TOKENS, st.integers(0, 12))
def test_label_and_weight_travel_as_one(tokens: list[tuple[int, float]], cut: int) -> None:
    """They come apart bitwise, also of a part of the column, and no label is lost or made.

    Proves: label and weight as one integer (exact), against both as they were, bitwise.
    """
    labels, weights = (list(column) for column in zip(*tokens, strict=True))
    codes = joined(labels, weights)
    assert [code == -100 for code in codes] == [label == -100 for label in labels]
    assert all(-(2**63) <= code < 2**63 for code in codes)
    own, theirs = parted(codes[:cut])
    assert own == labels[:cut]
    expected = [w if label != -100 else 0.0 for label, w in tokens[:cut]]
    assert np.float32(theirs).tobytes() == np.float32(expected).tobytes()


def test_a_product_beyond_float32_is_refused() -> None:
    """Weights of a row and of its tokens may be finite each, and their product not."""
    with pytest.raises(DataError, match=r"1e\+60 at token 1"):
        joined([1, 2], [1.0, 1e60])


# --- turns ----------------------------------------------------------------------------------------

_WRITTEN = "{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
_HEAD = "{% for m in messages %}{{ m['role'][0] }}="
_TAIL = "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
_MARKED = (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}"
)
TEMPLATES = {
    "plain": _HEAD + _WRITTEN + _TAIL,
    "marked": _HEAD + _MARKED + _TAIL,
    "white space": _HEAD + _WRITTEN + "{{ ' ' }}" + _TAIL,
}


@cache
def chat_tokenizer(template: str) -> Any:
    """Of characters, with a chat template; None has none."""
    from tests.integration.tiny_training import tokenizer

    made = tokenizer()
    made.chat_template = TEMPLATES.get(template)
    return made


WEIGHT = st.sampled_from([None, 0.0, 0.25, 1.0, 2.0, -0.5])
EXCHANGE = st.tuples(st.text("bcd", min_size=1, max_size=3), st.text("bcd", min_size=1, max_size=4))
CHATS = st.lists(st.tuples(EXCHANGE, WEIGHT, st.booleans()), min_size=1, max_size=4)


@given(st.sampled_from(["none", *TEMPLATES]), CHATS, WEIGHT, st.booleans())
def test_a_turn_weighs_its_own_tokens(
    template: str, chat: list[tuple[tuple[str, str], Any, bool]], of_row: Any, whole: bool
) -> None:
    """Each token that the labels of a turn have has the row's weight times the turn's.

    Where all of a row is learned, the tokens of turns that are marked otherwise are not.

    Proves: weight of a turn on its tokens (exact), against the labels of that turn alone.
    """
    tokenizer = chat_tokenizer(template)
    turns = []
    for (question, answer), weight, learned in chat:
        turns += [Turn("user", question, message=True)]
        turns += [Turn("assistant", answer, weight=weight, learned=learned, message=True)]
    row = Row(0, "here", tuple(turns), of_row)
    ids, _ = encode_row(row, tokenizer)
    laid = turn_weights(row, ids, ids if whole else [-100] * len(ids), tokenizer)
    factor, expected = 1.0 if of_row is None else of_row, [None] * len(ids)
    marked = set[int]()
    for i, turn in enumerate(turns):
        if turn.role == "user":
            continue
        alone = tuple(Turn(t.role, t.text, message=True, learned=t is turn) for t in turns)
        _, labels = encode_row(Row(0, "here", alone), tokenizer)
        own = (1.0 if turn.weight is None else turn.weight) if turn.learned else 0.0
        for place, label in enumerate(labels):
            if label != -100 or (i == len(turns) - 1 and place > _last(labels) >= 0):
                expected[place] = factor * own
                marked |= set() if turn.learned else {place}
    assert laid == [factor if w is None else w for w in expected]
    learned = [-100 if place in marked else token for place, token in enumerate(ids)]
    assert whole_labels(row, ids, tokenizer) == learned
    quiet = tuple(replace(turn, learned=turn.learned and turn.role != "user") for turn in turns)
    answers = [-100 if w is None else label for label, w in zip(learned, expected, strict=True)]
    assert whole_labels(replace(row, turns=quiet), ids, tokenizer) == answers


def _last(labels: Sequence[int]) -> int:
    return max((i for i, label in enumerate(labels) if label != -100), default=-1)


# --- one step -------------------------------------------------------------------------------------

ROWS = [
    ([5, 9, 11, 12, 30], [0.25, 1.0, 2.0]), ([7, 8, 9], [0.0, 3.0]),
    ([5, 9, 11, 12, 30], [4.0, 0.0, 0.5]), ([21, 22, 23, 24, 25, 26], [1.0, -0.5, 0.125]),
    ([31, 7, 13, 2], [1.0, 1.0]), ([5, 9, 11, 12, 30], [1.0, 1.0, 1.0]), ([18, 19], [0.75]),
]  # fmt: skip
"""Tokens, and weights of the last of them; three rows are the same text with other weights."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one batch": {"per_device_train_batch_size": 7},
    "unequal micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "packed": {"packing": True, "max_length": 9, "gradient_accumulation_steps": 64},
    "wrapped": {
        "packing": True, "packing_strategy": "wrapped", "max_length": 8,
        "gradient_accumulation_steps": 64, "per_device_train_batch_size": 1,
    },
    "padding-free": {"padding_free": True, "max_length": None, "per_device_train_batch_size": 4,
                     "gradient_accumulation_steps": 2},
    "cut": {"max_length": 4, "per_device_train_batch_size": 7},
    "cut at the start": {"max_length": 4, "per_device_train_batch_size": 7,
                         "truncation_mode": "keep_end"},
    "LoRA": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
}  # fmt: skip
DIVISORS = ("response", "kept", "sum")


def sft_rows() -> list[dict[str, Any]]:
    """Tokenised rows, with weights for each token: 9 where there is no label."""
    rows = []
    for ids, weights in ROWS:
        prompt = len(ids) - len(weights)
        labels = [-100] * prompt + ids[prompt:]
        rows.append({"input_ids": ids, "labels": labels, "loss_weights": [9.0] * prompt + weights})
    return rows


def documents(layout: str) -> list[tuple[list[int], list[int], list[float]]]:
    """Ids, labels and weights of each text that the model reads as one."""
    cut = slice(None)
    if layout.startswith("cut"):
        cut = slice(-4, None) if "start" in layout else slice(4)
    rows = [tuple(row[n][cut] for n in ("input_ids", "labels", "loss_weights"))
            for row in sft_rows()]  # fmt: skip
    if layout != "wrapped":
        return rows  # type: ignore[return-value]
    whole = [[x for row in rows for x in row[i]] for i in range(3)]
    return [tuple(c[a : a + 8] for c in whole) for a in range(0, len(whole[0]), 8)]  # type: ignore[misc]


def token_log_probs(model: Any, ids: Sequence[int]) -> Tensor:
    """(t - 1,) log-probability of each token but the first, of one text by itself."""
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(list(ids[1:]))[:, None])
    return chosen[:, 0]


def flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def gradient_of(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    return flat(
        torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True), parameters
    )


def sft_gradient(model: Any, layout: str, divisor: str) -> tuple[Tensor, Tensor]:
    """(sum_t w_t grad l_t) / divisor, and the sum of the absolute terms, token by token."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    scale, count, kept = total.clone(), 0, 0.0
    for ids, labels, weights in documents(layout):
        log_probs = token_log_probs(model, ids)
        for i in range(1, len(ids)):
            if labels[i] != -100:
                own = weights[i] * gradient_of(-log_probs[i - 1], parameters)
                total, scale = total + own, scale + own.abs()
                count, kept = count + 1, kept + weights[i]
    by = {"response": count, "kept": kept, "sum": 1.0}[divisor]
    return total / by, scale / abs(by)


PAIRS = [
    ("ab", "cde", "fg", [1.0, 0.0, 2.0, 0.5], [0.25, 1.0, 4.0]),
    ("b", "cc", "dd", [1.0, 1.0, 3.0], [1.0, -1.0, 1.0]),
    ("b", "cc", "dd", [0.0, 2.0, 0.5], [0.5, 1.0, 1.0]),
]
"""Prompt, chosen, rejected, and weights of their tokens with the end token."""


def pair_rows() -> list[dict[str, Any]]:
    names = ("prompt", "chosen", "rejected", "chosen_weights", "rejected_weights")
    return [dict(zip(names, pair, strict=True)) for pair in PAIRS]


def dpo_gradient(
    model: Any, reference: Any, divisor: str, beta: float, cut: slice
) -> tuple[Tensor, Tensor]:
    """Mean over pairs of -omega (sum w+ grad l+ - sum w- grad l-), token by token."""
    parameters, encode = [p for p in model.parameters() if p.requires_grad], _tokenizer()
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    scale, count, kept = total.clone(), 0, 0.0
    for prompt, chosen, rejected, *both in PAIRS:
        before, sides = encode(prompt)["input_ids"], []
        for text, listed, sign in zip((chosen, rejected), both, (1, -1), strict=True):
            ids = [*encode(prompt + text)["input_ids"], 2][cut]
            marked = [*[None] * len(before), *listed][cut]
            # Nothing predicts the first token that is left.
            places = [i for i, weight in enumerate(marked) if weight is not None and i > 0]
            at = [i - 1 for i in places]
            own, theirs = (token_log_probs(m, ids)[at] for m in (model, reference))
            sides.append((own, theirs.detach(), [marked[i] for i in places], sign))
        margin = sum(sign * (own - theirs).sum() for own, theirs, _, sign in sides)
        assert isinstance(margin, Tensor)
        omega = beta * torch.sigmoid(-beta * margin.detach())
        for own, _, weighed, sign in sides:
            for log_prob, weight in zip(own, weighed, strict=True):
                term = -sign * omega * weight * gradient_of(log_prob, parameters) / len(PAIRS)
                total, scale = total + term, scale + term.abs()
                count, kept = count + 1, kept + weight
    by = kept / count if divisor == "kept" else 1.0
    return total / by, scale / abs(by)


def trained(kind: str, model: Any, rows: Any, **more: Any) -> Any:
    """One step of gradient descent at rate 1 by the policy, over all rows."""
    from alphatoken.train import AlphaDPOTrainer, AlphaSFTTrainer
    from tests.integration import tiny_training as tiny

    own = {
        "policy": "weights", "policy_options": {"allow_negative": True}, "optim": "sgd",
        "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "logging_steps": 1,
        "gradient_checkpointing": False, "processing_class": _tokenizer(), **more,
    }  # fmt: skip
    trainer_class = AlphaDPOTrainer if kind == "dpo" else AlphaSFTTrainer
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _double_head():
        warnings.simplefilter("ignore")
        trainer = tiny.made(trainer_class, folder, model=model, train_dataset=rows, **own)
        trainer.train()
    return trainer


def moved(model: Any, start: Any) -> Tensor:
    """What a step at rate 1 has subtracted."""
    pairs = zip(start.parameters(), model.parameters(), strict=True)
    return torch.cat([(a - b).detach().reshape(-1) for a, b in pairs if b.requires_grad])


@pytest.mark.parametrize(
    ("layout", "divisor"),
    [
        ("one batch", "sum"), ("unequal micro-batches", "response"),
        ("unequal micro-batches", "kept"), ("packed", "kept"), ("wrapped", "response"),
        ("padding-free", "kept"), ("cut", "response"), ("cut at the start", "kept"),
        ("LoRA", "kept"),
    ],
)  # fmt: skip
def test_a_step_is_the_weighted_sum_of_token_gradients(layout: str, divisor: str) -> None:
    """Of float64 rows, in every layout of them, under each divisor.

    Proves: update of weights that rows bring (exact), against autograd token by token.
    """
    model = made_model(RunConfig(lora=layout == "LoRA", seed=1))
    start = copy.deepcopy(model)
    trainer = trained("sft", model, sft_rows(), kept_normalization=divisor, **LAYOUTS[layout])
    gradient, scale = sft_gradient(start, layout, divisor)
    assert float(gradient.abs().max()) > 1e-3
    actual = moved(trainer.model, start)
    close(actual, gradient, scale + FLOOR, STEP, name="a step by own weights")


CUTS: dict[str, tuple[slice, dict[str, Any]]] = {
    "whole": (slice(None), {}),
    "start": (slice(4), {"max_length": 4}),
    "end": (slice(-3, None), {"max_length": 3, "truncation_mode": "keep_end"}),
}


@pytest.mark.parametrize(
    ("divisor", "kept"),
    [("response", "whole"), ("kept", "whole"), ("kept", "start"), ("response", "end")],
)
def test_a_step_of_pairs_is_the_weighted_sum(divisor: str, kept: str) -> None:
    """Both branches, with the coefficient of the unweighted margin; two pairs are one text.

    Proves: update of weights on pairs (exact), against autograd token by token.
    """
    model, reference = made_model(RunConfig(seed=1)), made_model(RunConfig(seed=2))
    start, fixed = copy.deepcopy(model), copy.deepcopy(reference)
    cut, options = CUTS[kept]
    shared = {"ref_model": reference, "beta": 0.3, "per_device_train_batch_size": 3, **options}
    trainer = trained("dpo", model, pair_rows(), kept_normalization=divisor, **shared)
    gradient, scale = dpo_gradient(start, fixed, divisor, 0.3, cut)
    assert float(gradient.abs().max()) > 1e-4
    close(moved(trainer.model, start), gradient, scale + FLOOR, STEP, name="a step of pairs")


class Surprising(TokenPolicy):
    """Weights that the forward decides, of a policy that is divided by their sum."""

    name = "surprising"
    denominator = "kept"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return (1 - batch.log_probs.exp()) * batch.mask


class NotStatic(Surprising):
    """Says that they are known before it."""

    name = "not-static"
    static = True


def test_weights_that_the_forward_decides_are_not_static() -> None:
    """The divisor of a step is the sum of other weights otherwise.

    Proves: divisor of a static policy (exact), against the weights of the training forward.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    for kind, said in ((Surprising, None), (NotStatic, "'not-static' is static")):
        more = {"policy": f"{__name__}:{kind.__name__}", "policy_options": None}
        rows = [{name: row[name] for name in ("input_ids", "labels")} for row in sft_rows()]
        error = refusal(partial(trained, "sft", made_model(RunConfig(seed=1)), rows, **more))
        assert (error is None) if said is None else (said in str(error))


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), min_size=2, max_size=4))
@example([0.0, 0.0])
@budget(0.1)
def test_a_sum_that_is_not_positive_divides_nothing(weights: list[float]) -> None:
    """A step is refused where its weights sum to 0 or less and are to divide it; a run of 0 alone.

    Proves: sum of own weights as a divisor (exact), against the sum of the row's numbers.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    ids = [5, *range(7, 7 + len(weights))]
    row = {"input_ids": ids, "labels": [-100, *ids[1:]], "loss_weights": [0.0, *weights]}
    more = {"per_device_train_batch_size": 2, "kept_normalization": "kept"}
    arguments = ("sft", made_model(RunConfig(seed=1)), [row, dict(row)])
    error = refusal(lambda: trained(*arguments, **more))
    if math.fsum(weights) > 0:
        assert error is None
    elif any(weights):
        assert isinstance(error, NumericalError)
        assert "cannot divide" in str(error)
    else:
        assert isinstance(error, InputError)
        assert "every weight of the training rows is 0" in str(error)
