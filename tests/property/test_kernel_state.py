"""Forms in which kernels save their log-sum-exp, and arguments that say who attends to whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from alphatoken import Scorer, ScorerConfig, UnsupportedError
from alphatoken.model import attention, dispatch, kernel_state
from alphatoken.model.batch import read_batch
from alphatoken.model.batch_slice import LENGTH, around_documents
from tests.property.architectures import BY_NAME
from tests.property.decoder import explicit_attention
from tests.property.test_kernels import KernelCase, explicit_lse

CASE = KernelCase("rows", b=2, r=2, t=6, seed=3)
PACKED = KernelCase("documents", b=2, r=2, t=6, seed=3)


class Saving(torch.autograd.Function):
    """Explicit attention that saves ``form`` of its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Any, form: Any) -> Tensor:
        ctx.save_for_backward(q, k, v, form(explicit_lse(call)))
        return explicit_attention(call, q, k, v)

    @staticmethod
    def backward(ctx: Any, *error: Tensor) -> Any:
        raise NotImplementedError


def adopted(call: Any, form: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The log-sum-exp that is taken from a kernel which saves this form of it."""
    with patch.dict(attention._CONFIRMED, clear=True):
        statistics = attention.AttentionStatistics(call)
        output = Saving.apply(call.query, call.key, call.value, call, form)
        statistics.adopt(output, call)
        agreed = list(attention._CONFIRMED.values()) == [True]
        return statistics.lse.flatten(1, 2) if agreed else None


def flat(call: Any, lse: Tensor) -> Tensor:
    """(h, tokens), documents one after the other."""
    return lse.movedim(1, -1)[call.documents >= 0].mT


ROUNDED = {
    "as it is": lambda x: x,
    "rounded up to a tile": lambda x: torch.nn.functional.pad(x, (0, 26)),
    "a column": lambda x: x.unsqueeze(-1),
}


@pytest.mark.parametrize("form", ROUNDED)
def test_forms_of_a_batch(form: str) -> None:
    call = CASE.call()
    found = adopted(call, ROUNDED[form])
    assert found is not None
    assert torch.allclose(found, explicit_lse(call), rtol=0, atol=1e-12)


@pytest.mark.parametrize("more", [0, 5])
def test_forms_of_documents(more: int) -> None:
    call = PACKED.call()
    found = adopted(call, lambda x: torch.nn.functional.pad(flat(call, x), (0, more)))
    assert found is not None
    assert torch.allclose(found, explicit_lse(call), rtol=0, atol=1e-12)


def test_other_shapes_and_narrower_numbers_are_left() -> None:
    call = CASE.call()
    assert adopted(call, lambda x: x[..., :-1]) is None, "shorter than the rows"
    assert adopted(call, lambda x: x[:1]) is None, "of another batch"
    assert adopted(call, lambda x: x[:, :1]) is None, "of fewer heads"
    assert adopted(call, lambda x: x.long()) is None
    assert adopted(call, lambda x: x.float()) is None, "float32 of float64 inputs"
    single = replace(CASE, double=False).call()
    assert adopted(single, lambda x: x.float()) is not None
    assert adopted(single, lambda x: x.half()) is None, "near enough, and yet rounded"
    packed = PACKED.call()
    assert adopted(packed, lambda x: flat(packed, x)[:, :-1]) is None
    assert adopted(packed, lambda x: x) is None, "rows, where documents are asked for"


def test_what_one_call_shows_says_nothing_of_another_kind() -> None:
    """By dtype, mask, documents, window, soft-cap and sinks."""
    calls = [
        CASE.call(),
        replace(CASE, double=False).call(),
        replace(CASE, window=2).call(),
        replace(CASE, softcap=1.5).call(),
        replace(CASE, sinks=True).call(),
        PACKED.call(),
        replace(CASE, kind="sdpa, mask").call(),
    ]
    node = SimpleNamespace()
    kinds = {kernel_state._kind(node, call) for call in calls}
    assert len(kinds) == len(calls)
    assert kernel_state._kind(node, CASE.call()) in kinds
    assert kernel_state._kind(object(), CASE.call()) not in kinds, "of another kernel"


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [
        (torch.float64, 1e-11, 1e-7),
        (torch.float32, 1e-5, 1e-2),
        (torch.bfloat16, 1e-3, 0.1),
        (torch.float16, 1e-3, 0.1),
    ],
)
def test_how_near_is_the_same(dtype: torch.dtype, near: float, far: float) -> None:
    lse = torch.tensor([0.5, -torch.inf, 2.0], dtype=torch.float64)
    blind = torch.tensor([0.0, 1.0, 0.0])  # anything may stand where nothing is attended to
    assert kernel_state.agrees((lse + near).nan_to_num(neginf=0.0) + blind, lse, dtype)
    assert not kernel_state.agrees(lse + far, lse, dtype)
    assert kernel_state.agrees(lse[1:2], lse[1:2], dtype) is None, "nothing to compare"
    for wrong in (torch.inf, -torch.inf, torch.nan):
        assert kernel_state.agrees(torch.full_like(lse, wrong), lse, dtype) is False


def test_rows_that_a_mask_of_very_negative_numbers_closes_say_nothing() -> None:
    closed = torch.tensor([torch.finfo(torch.float32).min, 1.0])
    assert kernel_state.agrees(torch.tensor([0.0, 1.0]), closed, torch.float32)
    assert kernel_state.agrees(closed[:1], closed[:1], torch.float32) is None


def test_padding_beside_sinks_is_no_disagreement() -> None:
    computed = torch.tensor([0.7, 1.0, 2.0]).view(1, 1, 1, 3)
    saved = torch.tensor([-torch.inf, 1.0, 2.0]).view(1, 1, 1, 3)
    padding = torch.tensor([[True, False, False]])
    assert kernel_state.agrees(saved, computed, torch.float32, padding)
    assert not kernel_state.agrees(saved, computed, torch.float32)


@pytest.mark.parametrize("implementation", ["sdpa", "flash"])
def test_autocast_does_not_change_what_is_believed(implementation: str) -> None:
    """Float32 weights under bf16 autocast: the same values whichever came first."""
    ids = torch.randint(3, 23, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, 0] = -100

    def values(narrow: bool) -> Tensor:
        model = BY_NAME["llama"].build(3, implementation=implementation, dtype=torch.float32)
        scorer = Scorer(model, [batch], config=ScorerConfig(estimator="alphatoken", layers=2))
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            return scorer.score(batch).total

    found = []
    for order in ((True, False), (False, True)):
        with patch.dict(attention._CONFIRMED, clear=True):
            of = {narrow: values(narrow) for narrow in order}
            assert list(attention._CONFIRMED.values()) == [True], "of the float32 pass alone"
            found.append(of)
    for narrow in (True, False):
        assert torch.equal(found[0][narrow], found[1][narrow])


# --- arguments of transformers' flash wrapper ----------------------------------------------------


def documents(rows: int, length: int, **named: Any) -> list[list[int]] | None:
    module = named.pop("module", torch.nn.Identity())
    found = dispatch._documents(module, named, torch.zeros(rows, 1, length, 2))
    return None if found is None else found.tolist()


def bounds(*numbers: int, **more: Any) -> dict[str, Any]:
    found = torch.tensor(numbers, dtype=torch.int32)
    longest = int(found.diff().max())
    return {"cu_seq_lens_q": found, "cu_seq_lens_k": found, "max_length_q": longest,
            "max_length_k": longest, **more}  # fmt: skip


def positions(*rows: list[int]) -> dict[str, Tensor]:
    return {"position_ids": torch.tensor(rows)}


def test_bounds() -> None:
    assert documents(1, 5, **bounds(0, 2, 5)) == [[0, 0, 1, 1, 1]]
    assert documents(2, 3, **bounds(0, 2, 3, 6)) == [[0, 0, 1], [2, 2, 2]]
    # What lies behind the last bound is in no document, in whatever row.
    assert documents(1, 5, **bounds(0, 2, 4)) == [[0, 0, 1, 1, -1]]
    assert documents(3, 2, **bounds(0, 2)) == [[0, 0], [-1, -1], [-1, -1]]
    assert documents(1, 5, **bounds(2, 3, 5)) == [[-1, -1, 0, 1, 1]], "nor what lies before"
    with pytest.raises(UnsupportedError, match="reaches over two rows"):
        documents(2, 3, **bounds(0, 4, 6))


def test_bounds_without_lengths_are_not_read() -> None:
    """As in transformers, which then looks at the positions."""
    for missing in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
        named = {k: v for k, v in bounds(0, 2, 5).items() if k != missing}
        assert documents(1, 5, **named) is None
        assert documents(1, 5, **named, **positions([0, 1, 2, 0, 1])) == [[0, 0, 0, 1, 1]]


def test_positions() -> None:
    assert documents(1, 5, **positions([0, 1, 0, 1, 2])) == [[0, 0, 1, 1, 1]]
    assert documents(1, 5, **positions([2, 3, 2, 3, 4])) == [[0, 0, 1, 1, 1]]
    assert documents(1, 5, **positions([5, 6, 0, 1, 0])) == [[-1, -1, 0, 0, 1]]
    assert documents(1, 4, **positions([0, 1, 2, 3])) is None
    assert documents(1, 4, **positions([3, 4, 5, 6])) is None, "one sequence, further on"
    assert documents(2, 4, **positions([0, 1, 0, 1], [0, 1, 2, 3])) is None, "in one row only"
    assert documents(1, 1, **positions([0])) is None


@pytest.mark.parametrize("own", [True, False])
def test_causality_of_the_call_goes_before_the_modules(own: bool) -> None:
    module = torch.nn.Identity()
    module.is_causal = own  # type: ignore[assignment]
    assert documents(1, 3, module=module, is_causal=True) is None
    with pytest.raises(UnsupportedError, match="not causal"):
        documents(1, 3, module=module, is_causal=False)
    if own:
        assert documents(1, 3, module=module, is_causal=None) is None
    else:
        with pytest.raises(UnsupportedError, match="not causal"):
            documents(1, 3, module=module, is_causal=None)


def test_what_a_name_stands_for_decides_whether_it_is_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the name: somebody's own function may be registered under a kernel's."""
    assert dispatch.is_understood("flash_attention_2")
    assert not dispatch.is_understood("flex_attention")
    registry = dispatch.ALL_ATTENTION_FUNCTIONS
    own = {"flash_attention_2": explicit_attention, "mine": dispatch.flash_attention_forward}
    monkeypatch.setattr(registry, "_local_mapping", {**registry._local_mapping, **own})
    assert not dispatch.is_understood("flash_attention_2")
    assert dispatch.is_understood("mine")


# --- slices of packed rows -----------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(40, 10, 60), (64, 48), (20, 28, 16, 40)])
def test_bounds_are_cut_as_the_tokens_are(lengths: tuple[int, ...]) -> None:
    total = sum(lengths)
    ids = torch.arange(total)[None] % 7
    starts = torch.tensor([0, *lengths]).cumsum(0)
    labels = ids.clone()
    labels[0, starts[:-1]] = -100
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = {"input_ids": ids, "labels": labels, "position_ids": places}
    batch |= bounds(*starts.tolist(), seq_idx=torch.zeros_like(ids))
    piece = around_documents(read_batch(batch))
    inputs = piece.inputs
    assert inputs["input_ids"].shape == (1, LENGTH)
    cut = inputs["position_ids"][0]
    inner = [i for i in range(1, LENGTH) if cut[i] != cut[i - 1] + 1]
    for side in ("q", "k"):
        assert inputs[f"cu_seq_lens_{side}"].tolist() == [0, *inner, LENGTH]
        edges = torch.tensor([0, *inner, LENGTH])
        assert inputs[f"max_length_{side}"] == int(edges.diff().max())
    assert inner, "the slice shows two documents"
    alone = {name: x for name, x in batch.items() if not name.startswith("max_length")}
    cut_alone = around_documents(read_batch(alone)).inputs
    assert "max_length_q" not in cut_alone, "what was not given is not made up"
    assert cut_alone["cu_seq_lens_q"].tolist() == [0, *inner, LENGTH]
    # Kernels that read positions leave out what lies before the first start: so there is nothing.
    read = documents(1, LENGTH, position_ids=inputs["position_ids"])
    assert read is not None
    assert min(read[0]) == 0
    assert [i for i in range(1, LENGTH) if read[0][i] != read[0][i - 1]] == inner
