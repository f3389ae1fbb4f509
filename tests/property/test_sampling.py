"""Responses are drawn from the model's own distribution, each from its own generator."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import alphatoken
from alphatoken.direction.sampling import (
    draw_tokens,
    read_sequences,
    sample_generator,
    sample_responses,
    uniform_numbers,
)
from alphatoken.errors import InputError, NumericalError
from alphatoken.oracle.enumeration import enumerate_responses, enumerated_log_probabilities
from alphatoken.support.seeds import seed_of
from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget


@st.composite
def padded_batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], dict[str, Tensor]]:
    """Rows without padding, where each one's labels begin, and the same as a padded batch."""
    rows = draw(
        st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=6), min_size=1, max_size=4)
    )
    starts = [draw(st.integers(1, len(row) - 1)) for row in rows]
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    batch = {
        "input_ids": torch.full((len(rows), width), draw(st.integers(0, 9))),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        "labels": torch.full((len(rows), width), -100),
    }
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        left = draw(st.booleans())
        place = slice(width - len(row), width) if left else slice(0, len(row))
        batch["input_ids"][i, place] = torch.tensor(row)
        batch["attention_mask"][i, place] = 1
        batch["labels"][i, place] = torch.tensor([-100] * start + row[start:])
    return rows, starts, batch


@given(case=padded_batches())
def test_padding_on_either_side_is_stripped(
    case: tuple[list[list[int]], list[int], dict[str, Tensor]],
) -> None:
    rows, starts, batch = case
    found = read_sequences(batch, labels="sequence")
    assert [one.prompt.tolist() for one in found] == [
        row[:start] for row, start in zip(rows, starts, strict=True)
    ]
    whole = read_sequences(batch, labels="token")
    assert [one.ids.tolist() for one in whole] == rows
    assert [one.predicted.tolist() for one in whole] == [
        [i >= start for i in range(len(row))] for row, start in zip(rows, starts, strict=True)
    ]
    del batch["labels"]
    for unlabelled in (rows, batch):
        assert [
            one.prompt.tolist() for one in read_sequences(unlabelled, labels="sequence")
        ] == rows
    listed = read_sequences(rows, labels="token")
    for one, other in zip(read_sequences(batch, labels="token"), listed, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.predicted.tolist() == other.predicted.tolist()


def test_what_follows_the_last_label_is_cut_off() -> None:
    batch = {"input_ids": [[4, 5, 6, 7, 8]], "labels": [[-100, 5, -100, 7, -100]]}
    (one,) = read_sequences(batch, labels="token")
    assert one.ids.tolist() == [4, 5, 6, 7]
    assert one.predicted.tolist() == [False, True, False, True]


ONE = torch.tensor([[1, 2, 3]])
BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "no prompts": ([], "no prompts"),
    "no rows": ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, "no prompts"),
    "an empty one": ([[1], []], "prompt 1 is empty"),
    "only padding": ({"input_ids": ONE, "attention_mask": ONE * 0}, "prompt 0 is empty"),
    "text": ("hello", "tokenizer"),
    "texts": (["hello"], "not made of token ids"),
    "floats": ([[1.0, 2.0]], "dtype torch.float32"),
    "float tensors": ([torch.ones(3)], "dtype torch.float32"),
    "booleans": ([torch.ones(3, dtype=torch.bool)], "dtype torch.bool"),
    "ragged": ([[[1], [2, 3]]], "not made of token ids"),
    "a stacked tensor": (ONE, "padding"),
    "rows of rows": ([ONE], "not one row"),
    "no ids": ({"labels": ONE}, "no input_ids"),
    "one row as batch": ({"input_ids": ONE[0]}, r"not \(batch, length\)"),
    "a mask of another shape": ({"input_ids": ONE, "attention_mask": ONE[:, :2]}, "shape"),
    "a hole": ({"input_ids": ONE, "attention_mask": torch.tensor([[1, 0, 1]])}, "hole"),
    "no label": ({"input_ids": ONE, "labels": ONE * 0 - 100}, "row 0 has no label"),
    "packed": ({"input_ids": ONE, "position_ids": torch.tensor([[0, 1, 0]])}, "packed"),
    "packed by its mask": (
        {"input_ids": ONE, "attention_mask": torch.tensor([[1, 1, 2]])},
        "packed",
    ),
    "packed for flash": ({"input_ids": ONE, "cu_seq_lens_q": torch.tensor([0, 3])}, "packed"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_have_one_clear_error(name: str) -> None:
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(InputError, match=message):
        read_sequences(prompts, labels="sequence")


@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    numerator=st.integers(0, 2**53 - 1),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_token_is_where_the_distribution_function_passes_the_number(
    weights: list[int], numerator: int, dtype: torch.dtype
) -> None:
    """Against an exact count on integer weights; numbers within rounding of a step are left out."""
    logits = torch.tensor(weights, dtype=torch.float64).log().to(dtype).unsqueeze(0)
    uniform = torch.tensor([numerator / 2**53], dtype=torch.float64)
    (token,) = draw_tokens(logits, uniform, ["row"]).tolist()
    assert weights[token] > 0
    exact = logits[0].double().softmax(0)
    below = float(exact[:token].sum())
    assert below - 1e-12 <= float(uniform) < below + float(exact[token]) + 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_without_a_distribution_name_their_row(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(NumericalError, match="logits for sample 8"):
        draw_tokens(logits, torch.zeros(3), ["sample 7", "sample 8", "sample 9"])
    with pytest.raises(NumericalError):
        draw_tokens(torch.full((1, 3), -torch.inf), torch.zeros(1), ["row"])


def test_a_seed_is_the_same_in_every_python() -> None:
    """Runs that go on to the same bits hang on it; Python's hash() is no documented format."""
    assert seed_of("micro-batch", 0, 3, 1, 0) == 775874539004894166
    assert seed_of("micro-batch", 0, 31, 0) != seed_of("micro-batch", 0, 3, 1, 0)
    package = Path(alphatoken.__file__).parent
    hashed = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hash"
    ]
    assert hashed == []


STRUCTURES = [
    DecoderConfig(vocabulary=4, layers=1, end_token=2),
    DecoderConfig(vocabulary=4, layers=1, positions="learned", max_positions=6, end_token=2),
    DecoderConfig(vocabulary=4, layers=2, kv_heads=1, windows=(2, None), sinks=True, end_token=1),
    DecoderConfig(vocabulary=3, layers=1, end_token=None),
]  # the windows, sinks and missing end token are there for padding and stopping, not for sampling
PROMPTS = [torch.tensor([1]), torch.tensor([0, 2, 1]), torch.tensor([2, 2])]


def sampled(model: ReferenceDecoder, which: list[int], seed: int, first: int = 0) -> list[Tensor]:
    return sample_responses(
        ReferenceAdapter(model),
        [PROMPTS[i] for i in which],
        [sample_generator(seed, first + n) for n in range(len(which))],
        [3] * len(which),
        [str(n) for n in range(len(which))],
    )


@pytest.mark.parametrize(
    "config",
    [
        *STRUCTURES[1:3],  # one with room for few tokens, and one with all other options
        *(pytest.param(config, marks=pytest.mark.slow) for config in STRUCTURES[::3]),
    ],
    ids=repr,
)
def test_responses_follow_the_exact_sequence_probabilities(config: DecoderConfig) -> None:
    """Chi-square of 2,000 responses per prompt against enumeration; ragged batches of prompts."""
    model = ReferenceDecoder(config, seed=3)
    n = 2000
    drawn = sampled(model, [0, 1, 2] * n, seed=11)
    responses = enumerate_responses(3, config.vocabulary, config.end_token)
    lengths = sorted({len(r) for r in responses})
    ordered = [r for length in lengths for r in responses if len(r) == length]
    for i, prompt in enumerate(PROMPTS):
        log_p = enumerated_log_probabilities(
            lambda batch: model(batch["input_ids"]), prompt, 3, config.vocabulary, config.end_token
        )
        counts = Counter(tuple(r.tolist()) for r in drawn[i::3])
        assert not set(counts) - set(ordered)
        p = log_p.detach().exp()
        observed = torch.tensor([float(counts[response]) for response in ordered])
        assert chi_square(observed, p) > 1e-3
        assert chi_square(observed, p**1.25 / (p**1.25).sum()) < 1e-6  # teeth: sharper by a quarter


def chi_square(observed: Tensor, p: Tensor) -> float:
    """p-value of the counts under probabilities ``p``; rare cells are pooled to 5 expected."""
    order = p.argsort()
    n, expected = float(observed.sum()), p[order] * observed.sum()
    rare = max(int((expected < 5).sum()), 1)
    while float(expected[:rare].sum()) < 5:
        rare += 1
    cells = [
        torch.cat([x[:rare].sum(0, keepdim=True), x[rare:]]) for x in (observed[order], expected)
    ]
    wanted = cells[1] * n / cells[1].sum()
    return float(stats.chisquare(cells[0].double().numpy(), wanted.double().numpy()).pvalue)


@given(data=st.data())
@budget(0.2)
def test_a_sample_does_not_depend_on_its_batch(data: st.DataObject) -> None:
    model = ReferenceDecoder(data.draw(st.sampled_from(STRUCTURES)), seed=1)
    which = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    seed = data.draw(st.integers(0, 2**40))
    together = [r.tolist() for r in sampled(model, which, seed)]
    size = data.draw(st.integers(1, len(which)))
    apart = [
        r.tolist()
        for start in range(0, len(which), size)
        for r in sampled(model, which[start : start + size], seed, start)
    ]
    assert together == apart


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    model = ReferenceDecoder(STRUCTURES[0], seed=1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = sampled(model, [0, 1, 2], seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert [r.tolist() for r in sampled(model, [0, 1, 2], seed=1)] == [r.tolist() for r in first]


def test_a_response_ends_with_its_end_token_or_its_budget() -> None:
    model = ReferenceDecoder(STRUCTURES[0], seed=1)
    drawn = sample_responses(
        ReferenceAdapter(model),
        [PROMPTS[0]] * 200,
        [sample_generator(0, i) for i in range(200)],
        [1 + i % 9 for i in range(200)],
        ["row"] * 200,
    )
    for i, response in enumerate(drawn):
        assert 2 not in response[:-1].tolist()
        assert len(response) == 1 + i % 9 or (len(response) < 1 + i % 9 and response[-1] == 2)
    assert any(response[-1] == 2 for response in drawn)


def tiny_gpt2() -> Any:
    """Learned positions with room for 8, and a generation config that asks for something else."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=5, n_positions=8, n_embd=16, n_layer=2, n_head=2, eos_token_id=4,
        bos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.6,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.temperature = 0.01
    model.generation_config.top_k = 1
    model.generation_config.do_sample = True
    return model


def test_a_transformers_model_with_a_cache_samples_its_full_distribution() -> None:
    """Same bits of randomness, one row at a time, without cache or padding: same responses."""
    from alphatoken.model.transformers import TransformersAdapter

    model = tiny_gpt2()
    prompts = [torch.tensor([1]), torch.tensor([0, 2, 1, 1, 3, 2]), torch.tensor([2, 2, 1])]
    which = [n % 3 for n in range(60)]
    budgets = [8 - len(prompts[i]) for i in which]
    drawn = sample_responses(
        TransformersAdapter(model),
        [prompts[i] for i in which],
        [sample_generator(1, n) for n in range(60)],
        budgets,
        ["row"] * 60,
    )
    for n, i in enumerate(which):
        generator, ids, expected = sample_generator(1, n), prompts[i], []
        while len(expected) < budgets[n] and (not expected or expected[-1] != 4):
            with torch.no_grad():
                logits = model(ids.unsqueeze(0)).logits[:, -1]
            expected += draw_tokens(logits, uniform_numbers(1, generator), ["row"]).tolist()
            ids = torch.cat([prompts[i], torch.tensor(expected)])
        assert drawn[n].tolist() == expected
    assert len({tuple(r.tolist()) for r in drawn}) > 20
