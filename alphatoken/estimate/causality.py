"""Proof that a model predicts a token from the tokens before it only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ModelError
from alphatoken.model.batch import LabelledBatch, documents_in_rows, token_losses
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.partial_forward import graph_from_layer, hidden_of, with_hidden
from alphatoken.model.protocol import DecoderAdapter

__all__ = ["allowed_pairs", "argument_kinds", "prove_causality"]

_BY_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens",
             "max_length")  # fmt: skip
"""Arguments that never tell a model to look ahead, unless they are a mask of pairs."""
_OF_OUTPUTS = ("use_cache", "output_", "return_")
"""Flags of what a forward hands out."""


def argument_kinds(batch: LabelledBatch) -> frozenset[str] | None:
    """Attention kinds that the arguments declare; None if only a proof can tell.

    Batches for which this is equal are read alike, so one proof serves them. A flag such as
    ``is_causal`` is part of it. Token types, masks of other classes and the like say by what is in
    them what the model makes of them, and are proved with every batch.
    """
    kinds = set()
    for name, value in batch.inputs.items():
        if isinstance(value, bool) and not name.startswith(_OF_OUTPUTS):
            kinds.add(f"{name}={value}")
        if value is None or isinstance(value, (bool, int, float, str)):
            continue
        if not isinstance(value, Tensor):
            return None
        pairs = name == "attention_mask" and value.dim() > 2
        if name.startswith(_BY_TOKEN) and not pairs:
            kinds.add(name)
        elif pairs and not bool(allowed_pairs(value).triu(1).any()):
            kinds.add("causal mask of pairs")
        else:
            return None
    return frozenset(kinds)


def allowed_pairs(mask: Tensor) -> Tensor:
    """True where a mask of pairs lets a query see a key."""
    if mask.is_floating_point():  # forbids with about the dtype's most negative number
        return mask > torch.finfo(mask.dtype).min / 2
    return mask != 0


def prove_causality(adapter: DecoderAdapter, batch: LabelledBatch) -> bool:
    """Prove that no loss depends on its own token or a later one, by one forward and backward.

    The gradient of each row's first response token at the hidden states that enter the decoder
    must vanish from that token on.

    Returns:
        False if nothing was proved: no response token, or hidden states that are not (b, t, ...).

    Raises:
        ModelError: a loss depends on its own token or a later one.
        UnsupportedError: it does so through a document that reaches over two rows.
    """
    rows = batch.mask.any(-1).nonzero().squeeze(-1)
    first = batch.mask.long().argmax(-1)[rows]
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered.append(hidden_of(args, kwargs))
        # A copy goes on: trackers of modules, as in torch's counter of FLOPs, bear no leaf here.
        return with_hidden(args, kwargs, entered[-1].clone())

    # The hook comes after the one that begins the graph there, so what it sees is in the graph.
    with evaluation_mode(adapter.model), graph_from_layer(adapter, 0):
        handle = adapter.layers()[0].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            losses = token_losses(adapter.forward(batch.inputs), batch.labels)
        finally:
            handle.remove()
        hidden = entered[0]
        if not len(rows) or hidden.shape[:2] != batch.labels.shape:
            return False
        loss = losses[rows, first].sum()
        error = torch.autograd.grad(loss, hidden, allow_unused=True)[0]
    if error is None:
        return True
    places = torch.arange(hidden.shape[1], device=hidden.device)
    # Some models keep several streams of hidden states, (b, t, streams, d).
    size = error[rows].float().flatten(2).norm(dim=-1)
    later = torch.where(places >= first[:, None], size, 0.0).amax(-1)
    # A kernel may leave rounding where it ought to leave nothing.
    leaks = later > 1e-4 * size.amax(-1)
    if bool(leaks.any()):
        bounds = batch.inputs.get("cu_seq_lens_q")
        if isinstance(bounds, Tensor):  # a document that goes on in the next row is seen from there
            documents_in_rows(bounds, *batch.labels.shape)
        row = int(leaks.nonzero()[0])
        raise ModelError(
            "this model looks ahead: a prediction depends on its own token or later ones",
            got=f"row {int(rows[row])}: the loss of token {int(first[row])} has a gradient from "
            "there on",
            why="a value would be of a loss that has seen its answer, silently",
            remedy="a causal model (config.is_decoder=True in BERT's family, a causal mask); a "
            "model that attends both ways cannot be valued",
        )
    return True
