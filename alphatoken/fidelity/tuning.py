"""A short fine-tuning for diagnostics that need a model after training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from alphatoken.errors import NumericalError
from alphatoken.model.batch import read_batch
from alphatoken.model.protocol import find_adapter
from alphatoken.model.response_losses import response_losses
from alphatoken.support.progress import Tracker

__all__ = ["fine_tuned", "usual_rate"]


def usual_rate(model: nn.Module) -> float:
    """AdamW's learning rate for a model of this width: ``0.064 / width``.

    What one step of Adam does to a layer's output grows with the number of its inputs, so the rate
    falls with it. The width is the median of the shorter sides of the model's matrices. A
    decoder of 260,032 parameters (64 wide) gets 1e-3, SmolLM2-135M (576 wide) 1.1e-4.
    """
    sides = [min(p.shape) for p in model.parameters() if p.dim() == 2]
    return 0.064 / float(np.median(sides)) if sides else 1e-4


def fine_tuned(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    *,
    steps: int,
    rate: float,
    seed: int,
    tracker: Tracker,
) -> nn.Module:
    """``model`` itself after AdamW steps on the mean response-token loss, in eval mode.

    Batches come in a shuffled order, again and again; dropout is off and the weights' decay 0, so
    the result is a function of the arguments.

    Raises:
        NumericalError: the loss is no longer finite.
    """
    adapter = find_adapter(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    generator = np.random.default_rng(seed)
    order: list[int] = []
    model.eval()
    for step in range(steps):
        order = order or generator.permutation(len(batches)).tolist()
        batch = read_batch(batches[order.pop()], max_length=adapter.max_positions())
        losses = response_losses(adapter, batch.inputs, batch.labels)
        loss = losses.sum() / batch.response_tokens
        if not bool(torch.isfinite(loss)):
            raise NumericalError(
                "the fine-tuning that a diagnostic compares with does not converge",
                got=f"loss {float(loss.detach())} at step {step + 1}",
                remedy="a smaller --tuning_rate, or give --reference",
            )
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss, inputs=parameters)
        optimizer.step()
        tracker.report(step + 1)
    for parameter in parameters:
        parameter.grad = None
    return model
