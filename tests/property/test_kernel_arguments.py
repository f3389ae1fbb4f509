"""Arguments of transformers' flash wrapper that say who attends to whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alphatoken import UnsupportedError
from alphatoken.model import dispatch
from alphatoken.model.batch import read_batch
from alphatoken.model.batch_slice import LENGTH, around_documents
from tests.property.decoder import explicit_attention


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
    registry = ALL_ATTENTION_FUNCTIONS
    own = {"flash_attention_2": explicit_attention, "mine": flash_attention_forward}
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
