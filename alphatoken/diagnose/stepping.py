"""The untouched model: gradients of single tokens, optimizer steps that are undone, fine-tuning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.data import Example, collate
from alphatoken.errors import NumericalError
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.forward import evaluation_mode, response_losses
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.oracle.gradients import per_token_gradients
from alphatoken.support.progress import Tracker

Weights = dict[str, Tensor]

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
OPTIMIZERS = tuple(_OPTIMIZERS)


class Stepper:
    """A copy of a model with an optimizer whose state is filled; every step starts from there.

    Attributes:
        model: the copy, in evaluation mode, at the weights it came with but inside ``stepped``.
        parameters: what trains, by name.
        optimizer: with its state after the warm-up.
        validation: where the objective is evaluated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str,
        validation: Sequence[Mapping[str, Any]],
        *,
        dtype: torch.dtype | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        self.model = copy.deepcopy(model).eval()
        if dtype is not None:
            self.model.to(dtype)
        self.adapter = find_adapter(self.model)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        # The learning rate is set at each step.
        self.optimizer = _OPTIMIZERS[optimizer](
            self.parameters.values(), lr=0.0, weight_decay=weight_decay
        )
        self.validation = [self.read(batch) for batch in validation]
        # The weights to go back to are the user's own, which no step touches: no copy of them.
        self._start = {n: p for n, p in model.named_parameters() if n in self.parameters}

    def read(self, batch: Mapping[str, Any]) -> LabelledBatch:
        """A checked batch, refused if it is longer than the model's positions."""
        return read_batch(batch, max_length=self.adapter.max_positions())

    def gradient(self, batch: LabelledBatch, weights: Tensor) -> Weights:
        """Gradient of ``sum_i weights_i loss_i`` at the current weights; ``.grad`` stays."""
        with evaluation_mode(self.model), torch.enable_grad():
            losses = response_losses(self.adapter, batch.inputs, batch.labels)
            loss = (losses * weights.to(losses)).sum()
            gradients = torch.autograd.grad(
                loss, list(self.parameters.values()), allow_unused=True, materialize_grads=True
            )
        return dict(zip(self.parameters, gradients, strict=True))

    def warm_up(self, batches: Iterator[LabelledBatch]) -> None:
        """Fill the optimizer's state: one step of size 0 on the mean loss of each batch."""
        # The weights stay: the state is that of a run that has just arrived at them.
        for batch in batches:
            gradient = self.gradient(batch, batch.mask / batch.response_tokens)
            for name, p in self.parameters.items():
                # Popped: no second set of gradients is held while the optimizer works.
                p.grad = gradient.pop(name).to(p)
            self.set_rate(0.0)
            self.optimizer.step()
            for p in self.parameters.values():
                p.grad = None
        self._restore()

    @contextmanager
    def stepped(self, gradient: Callable[[str], Tensor], lr: float) -> Iterator[None]:
        """Inside, the weights are those after one step of size ``lr`` along ``gradient``.

        Afterwards they are the copy's own again.
        """
        self.set_rate(lr)
        try:
            # One parameter at a time, on a copy of its state alone, and its gradient is asked for
            # only then: no second set of weights, moments or gradients is held.
            for name, p in self.parameters.items():
                state = self.optimizer.state.pop(p, None)
                if state:
                    self.optimizer.state[p] = {
                        key: value.clone() if isinstance(value, Tensor) else value
                        for key, value in state.items()
                    }
                p.grad = gradient(name).to(p)
                self.optimizer.step()  # parameters without a gradient stay
                p.grad = None
                self.optimizer.state.pop(p, None)
                if state:
                    self.optimizer.state[p] = state
            yield
        finally:
            self._restore()

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def objective(self) -> float:
        """Mean loss over all validation response tokens at the weights of the moment, in float64.

        Raises:
            NumericalError: it is not finite.
        """
        total, count = 0.0, 0
        with evaluation_mode(self.model):
            for batch in self.validation:
                losses = response_losses(self.adapter, batch.inputs, batch.labels)
                total += float(losses.double().sum())
                count += batch.response_tokens
        if not np.isfinite(total):
            raise NumericalError("the validation loss is not finite after a step", got=str(total))
        return total / count

    def _restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._start[name])


def usual_rate(model: nn.Module) -> float:
    """AdamW's learning rate for a model of this width: ``0.064 / width``.

    The width is the median of the shorter sides of the model's matrices. A decoder of 260,032
    parameters (64 wide) gets 1e-3, SmolLM2-135M (576 wide) 1.1e-4.
    """
    # What one step of Adam does to a layer's output grows with the number of its inputs.
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

    A function of the arguments: batches come in an order drawn by ``seed``, without dropout and
    weight decay.

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


def draw(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """Draw at most ``most`` of ``count`` places, without replacement, in rising order."""
    chosen = np.random.default_rng(seed).permutation(count)[:most]
    return np.sort(chosen).astype(np.int64)


def draw_short(
    lengths: Sequence[int] | NDArray[Any], rows: NDArray[Any], most: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """Draw at most ``most`` tokens at random from those of the shorter half of the rows.

    More rows are drawn from, by rising length, while they have fewer than ``most`` tokens. Every
    token of these rows is as likely as another, so the sample speaks for rows of that length.

    Args:
        lengths: positions of each row.
        rows: row of each token, numbered as ``lengths``.
        most: tokens.
        seed: of the draw.

    Returns:
        Places among the tokens in rising order, and the length of the longest row drawn from.
    """
    # One backward a token goes through its whole row: a token of a long row costs more.
    order = np.argsort(np.asarray(lengths), kind="stable")
    count = -(-len(order) // 2)
    while count < len(order) and int(np.isin(rows, order[:count]).sum()) < most:
        count += 1
    candidates = np.flatnonzero(np.isin(rows, order[:count]))
    chosen = candidates[draw(len(candidates), most, seed)]
    return chosen.astype(np.int64), int(np.asarray(lengths)[order[count - 1]])


def token_gradients(
    adapter: DecoderAdapter,
    rows: Sequence[Example],
    places: Sequence[tuple[int, int]],
    parameters: Mapping[str, Tensor],
    device: torch.device,
) -> Iterator[dict[str, Tensor]]:
    """Gradient of the loss of each token (row, position), in the order given.

    One ordinary backward a token, dropout off, without anything of the capture machinery.
    """
    # A row runs alone: neither padding nor its neighbours take part.
    model = adapter.model
    for row, tokens_of_row in groupby(places, key=itemgetter(0)):
        batch = {name: x.to(device) for name, x in collate([rows[row]]).items()}
        tokens = [(0, position) for _, position in tokens_of_row]
        with evaluation_mode(model), torch.enable_grad():
            yield from per_token_gradients(model, adapter.forward, batch, parameters, tokens)
