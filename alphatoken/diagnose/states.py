"""Inputs of the output head in one forward, at each response token or over a whole row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.diagnose.subject import gathered
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position, token_losses
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.support.progress import Tracker

__all__ = ["HeadStates", "head_states"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class HeadStates:
    """One row a response token, in (row, position) order; or one a sequence.

    Attributes:
        states: (n, d) what the head reads where the token is predicted; or the mean of what it
            reads over all tokens that are no padding.
        losses: (n,) of the token; or summed over the response tokens.
        has_head: whether a module that makes the logits was found.
    """

    states: Numbers
    losses: Numbers
    has_head: bool

    @property
    def place(self) -> str:
        """The place in the model that the states are of, in words."""
        if self.has_head:
            return "what the output head reads (after the final norm)"
        return "the output of the last decoder block (no head was found)"


@torch.no_grad()
def states_of(adapter: DecoderAdapter, batch: LabelledBatch) -> tuple[Tensor, Tensor, bool]:
    """Run the model once, dropout off, and look on; nothing of it is changed.

    The head is found as the last module outside the blocks that maps the width of the blocks to
    that of the logits: no adapter has to name it.

    Returns:
        (b, t, d) what the head reads, which is after the final norm, or the last block's output
        where no head was found; (b, t) loss of every response token, 0 elsewhere; whether it was.
    """
    blocks = adapter.layers()
    inside = {module for block in blocks for module in block.modules()}
    last: list[Tensor] = []
    heads: list[tuple[Tensor, int]] = []

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        last[:] = [output if isinstance(output, Tensor) else output[0]]

    def outside(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entry = args[0] if args else None
        if isinstance(entry, Tensor) and isinstance(output, Tensor) and entry.dim() == 3:
            heads.append((entry, output.shape[-1]))

    leaves = [m for m in adapter.model.modules() if m not in inside and not any(m.children())]
    handles = [blocks[-1].register_forward_hook(leave)]
    handles += [module.register_forward_hook(outside) for module in leaves]
    try:
        with evaluation_mode(adapter.model):
            logits = adapter.forward(batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    (hidden,) = last
    wanted = (hidden.shape[-1], logits.shape[-1])
    found = [entry for entry, width in heads if (entry.shape[-1], width) == wanted]
    losses = token_losses(logits, batch.labels)
    return found[-1] if found else hidden, losses, bool(found)


def head_states(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], tracker: Tracker, *, pooled: bool
) -> HeadStates:
    """States of the tokens of these batches, or of their rows if ``pooled``.

    Of a token at the position *before* it, where the model predicts it: its contextual embedding
    as its loss sees it, which holds the prefix, not the token. Of a row the mean over its tokens;
    padding cannot reach it.
    """
    adapter = find_adapter(model)
    places: set[bool] = set()

    def of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        checked = read_batch(batch, max_length=adapter.max_positions())
        states, losses, found = states_of(adapter, checked)
        places.add(found)
        if not pooled:
            at = to_label_position(checked.mask)
            return {"states": states[at], "losses": losses[checked.mask]}
        attention = checked.inputs.get("attention_mask")
        real = torch.ones_like(checked.mask) if attention is None else attention != 0
        wide = states.double().masked_fill(~real.unsqueeze(-1), 0.0)
        return {"states": wide.sum(1) / real.sum(1, keepdim=True), "losses": losses.sum(1)}

    return HeadStates(**gathered(batches, tracker, of), has_head=places == {True})
