"""Values along a walk, from a copy of the user's model that torch's own AdamW trains."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.certificate.expected import Entry, Expected, listed_items
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import find_adapter, is_users_own
from alphatoken.oracle import composite, scope
from alphatoken.oracle.gradients import Forward, batch_losses, trainable
from alphatoken.oracle.run import moved_along
from alphatoken.support.precision import wide
from alphatoken.support.progress import Tracker

_ROUNDINGS = 4.0
"""Of each weight in a forward; what a model's kernels add up to was measured to be no more."""


class ExpectedWalk(Expected):
    """The oracle's answer to a scorer with ``estimator="walk"``, for every response token.

        e_k = w_k (l_k(theta) - l_k(theta + D)),  or  w_k (l_k(theta - D) - l_k(theta + D)) / 2

    theta + D are the weights of the copy after ``walk_steps`` steps of ``torch.optim.AdamW``, each
    on the next validation batch; or those of the second model. AdamW divides each gradient by its
    own size, so that a walk amplifies the rounding of small ones; by how much is measured: a second
    copy has each weight off by some roundings in each step's forward, and ``rounding`` is by how
    many nats its values differ at most. Memory: two models, gradients and moments beside the
    user's; the central form one model more.
    """

    def compute(self, sampled: Tensor, tracker: Tracker) -> None:
        """Compute the values of all tokens of the batch: one forward at each end."""
        del sampled  # two forwards give the losses of all tokens
        with evaluation_mode(self.model):
            if self.arguments.reference is not None:
                before, after = self._losses(scope.bare_model(self.arguments.reference))
            else:
                before, after = self._losses(self._end(tracker, 0.0))
                others = self._losses(self._end(tracker, _ROUNDINGS))
                own = (before - after, others[0] - others[1])
                self.rounding = float((own[0] - own[1]).abs().max())
        weights = torch.ones_like(before)
        if self.token_weights is not None:
            weights = self.token_weights.double().cpu()
        if self._central:
            weights = weights / 2
        # Each end is rounded, so that their sum and not their difference is what is rounded.
        # A loss is a log-sum-exp less a logit, which are rounded as numbers above 1 are.
        allowed = (
            2.0 + before.abs() + after.abs() + 10 * self.rounding / self.arithmetic[1] * self.mask
        )
        self.compared, self.direction = self.mask, {}
        entry = Entry(weights * (before - after), weights.abs() * allowed)
        self._assemble({"adaptation": entry}, {}, {})

    @property
    def _central(self) -> bool:
        return self.arguments.config.walk_form == "central"

    def _losses(self, end: nn.Module) -> tuple[Tensor, Tensor]:
        """Losses (b, t) at both ends of a value, float64."""
        start = moved_along(self.model, end, -1.0) if self._central else self.model
        with torch.no_grad(), evaluation_mode(end), self.inside:
            losses = [batch_losses(self._forward_of(model), self.batch) for model in (start, end)]
        before, after = (one.double().cpu() for one in losses)
        return before, after

    def _end(self, tracker: Tracker, roundings: float) -> nn.Module:
        """A copy after the walk; each step's forward has so many roundings on each weight."""
        arguments, config = self.arguments, self.arguments.config
        twin = copy.deepcopy(self.model)
        forward, parameters = self._forward_of(twin), trainable(twin)
        draw = torch.Generator().manual_seed(0)
        # Weights in 16 bits step in float32 and are rounded for each forward.
        stepped = {n: p.detach().to(wide(p.dtype), copy=True) for n, p in parameters.items()}
        adamw = torch.optim.AdamW(stepped.values(), lr=config.walk_rate, weight_decay=0.0)
        batches = listed_items(arguments.validation)
        for number in range(config.walk_steps):
            tracker.report(number + (roundings > 0) * config.walk_steps)
            for parameter in parameters.values() if roundings else ():
                signs = torch.randint(0, 2, parameter.shape, generator=draw) * 2 - 1
                noise = roundings * torch.finfo(parameter.dtype).eps * signs.to(parameter)
                parameter.data.mul_(1 + noise)
            # grad J of this batch: of the mean token loss, or of the preference loss
            batch = batches[number % len(batches)]
            gradients = composite.objective_gradient(forward, [batch], parameters)
            for name, weight in stepped.items():
                weight.grad = gradients[name].to(weight)
            adamw.step()
            for name, parameter in parameters.items():
                parameter.data.copy_(stepped[name])
        return twin

    def _forward_of(self, model: nn.Module) -> Forward:
        """Logits of the user's model, of a copy of it, or of the second model."""
        if model is self.model:
            return self.forward
        if self.arguments.reference is not None:
            adapter = find_adapter(model)
            return adapter.forward if is_users_own(adapter) else partial(self.plain_forward, model)
        if not self.by_adapter:
            return partial(self.plain_forward, model)
        # The user's adapter, by modules and weights of the copy.
        modules = zip(self.model.modules(), model.modules(), strict=True)
        twins: dict[int, Any] = {id(own): twin for own, twin in modules}
        parameters = zip(self.model.parameters(), model.parameters(), strict=True)
        twins |= {id(own): twin for own, twin in parameters}
        forward: Forward = copy.deepcopy(self.adapter, twins).forward
        return forward
