"""The reference decoder at its smallest: for dense Hessians and for listing every response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.property import tolerance
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.setups import forward_of

SCORED = tuple(
    f"layers.0.{name}.weight" for name in ("attention.k_proj", "attention.v_proj", "mlp.down_proj")
)


def tiny(seed: int, vocabulary: int = 3, width: int = 2):
    """Model, forward callable (which must never be shown the labels) and named parameters.

    One layer of one head without norms or positions, ``6 width^2 + 2 width vocabulary`` numbers.
    """
    config = DecoderConfig(
        vocabulary=vocabulary, layers=1, hidden=width, heads=1, kv_heads=1, head_dim=width,
        mlp="plain", mlp_width=width, norm="none", positions="none", residual_dropout=0.5,
    )  # fmt: skip
    model = ReferenceDecoder(config, seed)
    return model, forward_of(model), dict(model.named_parameters())


def flat_gradient(loss: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """One vector of the gradients, in the mapping's order; the graph stays."""
    gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    return torch.cat([g.reshape(-1) for g in gradients])


def state_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """What an oracle must leave as it was: storages, versions, flags, numbers, gradients, modes."""
    modes = [(module.training,) for module in model.modules()]
    return modes + [
        (p.data_ptr(), p._version, p.requires_grad, p.tolist(), p.grad) for p in model.parameters()
    ]


def labelled(rows: list[tuple[list[int], list[int]]], pad_left: bool) -> dict[str, Tensor]:
    """A batch of rows (prompt, response), padded with token 0 on one side."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids, mask, labels = [], [], []
    for prompt, response in rows:
        gap = longest - len(prompt) - len(response)
        full = prompt + response
        row = (full, [1] * len(full), [-100] * len(prompt) + response)
        for part, filler, out in zip(row, (0, 0, -100), (ids, mask, labels), strict=True):
            out.append([filler] * gap + part if pad_left else part + [filler] * gap)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def draw_rows(
    seed: int, lengths: list[tuple[int, int]], vocabulary: int
) -> list[tuple[list[int], list[int]]]:
    """Rows of random tokens with the given (prompt, response) lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(vocabulary, (n,), generator=generator).tolist() for n in pair)
        for pair in lengths
    ]


def close(
    actual: Tensor, expected: Tensor, tol: float, scale: Tensor | float = 0.0, name=""
) -> None:
    """Equal up to ``tol`` times the larger of the largest entry and ``scale``, recorded.

    One scale for all entries: those of a Hessian or a gradient are sums over the same passes, in
    which small entries are the remains of large terms.
    """
    largest = max(float(expected.detach().abs().max()), float(scale))
    tolerance.close(actual, expected, largest, tol, name=name)
