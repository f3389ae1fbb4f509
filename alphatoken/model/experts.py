"""Mixtures of experts computed so that the rows that reach each expert's matrices can be seen.

transformers keeps the matrices of all experts in one 3-D tensor, and its kernels let no row be
seen between two of them. Here the same function is computed with the rows in hand: token n is sent
to the experts e(n, 1) to e(n, c), and the mixture's output is

    y_n = sum_j w_nj D_e( act( U_e x_n ) ),    e = e(n, j)

with U_e and D_e the matrices (biases added) that the tensors "gate_up_proj" (or "up_proj") and
"down_proj" hold for expert e, and w_nj the router's weight. Letters: n token of the flattened
batch, c choice, e expert, o d_out, i d_in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Names that transformers' interface for experts gives their tensors, in forward order."""

ExpertsListener = Callable[[nn.Module, str, Tensor, Tensor, Tensor], Tensor]
"""Sees the routed rows of a mixture on their way through one of its 3-D tensors.

(module, parameter, inputs (n, c, d_in), outputs (n, c, d_out), experts (n, c)) -> outputs to go on
with. Token n, in the order of the flattened batch, was sent to c experts.
"""


def rows_by_expert(experts: Int[Tensor, "..."], count: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, indices of its rows in the flattened ``experts``), experts without a row left out.

    Args:
        experts: to which each row was sent.
        count: how many experts there are.
    """
    flat = experts.flatten()
    sizes = torch.bincount(flat, minlength=count).tolist()  # the one wait for the device
    for expert, rows in enumerate(flat.argsort(stable=True).split(sizes)):
        if len(rows):
            yield expert, rows


def routed_experts(
    module: Any,
    hidden: Float[Tensor, "n d"],
    experts: Int[Tensor, "n c"],
    weights: Float[Tensor, "n c"],
    listeners: Sequence[ExpertsListener],
) -> Float[Tensor, "n d"]:
    """The output of a mixture, its rows shown to the listeners on the way.

    Args:
        module: that holds the tensors, with the flags that ``use_experts_implementation`` gives it.
        hidden: input of the mixture.
        experts: to which each token is sent.
        weights: of the router; gradients reach it through them.
        listeners: see both products before anything follows from them.

    Exactness: the function that transformers' own kernels compute, up to rounding.
    Oracle: the model's own forward, and ``alphatoken.oracle.influence``.
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    act = module._apply_gate if module.has_gate else module.act_fn
    x = hidden.unsqueeze(1).expand(-1, experts.shape[1], -1)
    s = _shown(module, up, x, experts, listeners)
    # Models write their gates for rows, (rows, features).
    x = act(s.flatten(0, 1)).unflatten(0, s.shape[:2])
    s = _shown(module, "down_proj", x, experts, listeners)
    if module.has_post_expert_norm:
        s = module.post_expert_norm(s.flatten(0, 1)).unflatten(0, s.shape[:2])
    mixed: Tensor = (s * weights.unsqueeze(-1)).sum(1)
    return mixed.to(hidden.dtype)


def _shown(
    module: nn.Module,
    parameter: str,
    x: Tensor,
    experts: Tensor,
    listeners: Sequence[ExpertsListener],
) -> Tensor:
    """The product with one of the tensors, as the last listener hands it on."""
    s = _products(module, parameter, x, experts)
    for listener in listeners:
        s = listener(module, parameter, x, s, experts)
    return s


def _products(module: Any, parameter: str, x: Tensor, experts: Tensor) -> Tensor:
    """(n, c, o): each row times the matrix of its expert, its bias added."""
    weight: Tensor = getattr(module, parameter)
    rows = x.flatten(0, 1).to(weight.dtype)
    # Taken apart once: the gradient of ``weight[e]`` alone would be as large as all experts'.
    matrices = weight.unbind(0)
    products, order = [], []
    for expert, chosen in rows_by_expert(experts, len(matrices)):
        matrix = matrices[expert]
        products.append(rows[chosen] @ (matrix if module.is_transposed else matrix.mT))
        order.append(chosen)
    s = torch.cat(products)[torch.cat(order).argsort()].view(*experts.shape, -1)
    return s + getattr(module, f"{parameter}_bias")[experts] if module.has_bias else s
