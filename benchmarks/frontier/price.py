"""What a setting costs, in training steps of the same batch, by counted FLOPs.

Letters as in ``benchmarks.floors``: N positions of the batch, R of them before a response token, P
weights of one layer's linears, A the forward of one attention call, V x d the head. The head is
counted at the R positions whose logits a loss reads, in steps and in values alike.

    forward          L (2 N P + A) + 2 R V d
    step             L (6 N P + 7/2 A) + 6 R V d
    label            forward + H (2 N P + 2 A) - (q, k, v of the lowest layer) + m 2 N P + 2 R V d
                     + 2 R V d for the head's own part
    head's own part, final norm's   forward + 2 R V d each
    captured         forward + 2 R V d + H (2 N P + B) - (q, k, v of the lowest) + m 2 N P

where m layers are in scope and H lie from the lowest of them up: tangents are carried up, errors
down, through all of those. B is what the backward through the attention takes: 5/2 A for path,
3.1 A for direct and 4 A for alphatoken, which compute the weights anew (counted). The embedding's
part starts below the first layer, so H = L. Lookups, norms and softmax count nothing, as in
``torch.utils.flop_counter``. The direction (a backward on validation rows) is no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.floors import Shape

__all__ = ["Batch", "Price", "Scope"]

_BACKWARD = {"label": 2.0, "path": 2.5, "direct": 3.1, "alphatoken": 4.0}


@dataclass(frozen=True)
class Scope:
    """What a setting computes.

    Attributes:
        estimator: "label" or a captured one.
        layers: whose linears are in scope.
        norms: layers whose norms are.
        embedding: whether its part is.
        final: whether the final norm's part is, in closed form.
        head: whether its part is, in closed form.
    """

    estimator: str
    layers: tuple[int, ...] = ()
    norms: tuple[int, ...] = ()
    embedding: bool = False
    final: bool = False
    head: bool = False

    def lowest(self, depth: int) -> int:
        """The first layer that a tangent or an error passes."""
        return 0 if self.embedding else min((*self.layers, *self.norms), default=depth)


@dataclass(frozen=True)
class Price:
    """Of one setting, in training steps.

    Attributes:
        own: with a forward of its own, as ``Scorer.score`` takes it.
        beside: beyond the forward that training runs anyway, as ``Scorer.observe`` takes it; a
            dual forward repeats the layers from the lowest one in scope on.
    """

    own: float
    beside: float


@dataclass(frozen=True)
class Batch:
    """A batch, whose FLOPs are counted.

    Attributes:
        shape: of the model, with the rows and positions of one batch.
        read: R.
    """

    shape: Shape
    read: int

    @classmethod
    def of(cls, model: Any, rows: int, length: int, tokens: int) -> Batch:
        """From a model and the size of a batch."""
        return cls(Shape.of(model, rows, length), tokens)

    @property
    def head(self) -> float:
        """One product with the head, at the positions that are read."""
        return 2 * self.read * self.shape.vocabulary * self.shape.width

    @property
    def linears(self) -> float:
        """One product with each linear of one layer."""
        return 2 * self.shape.tokens * self.shape.block

    @property
    def forward(self) -> float:
        """Of the model."""
        return self.shape.depth * (self.linears + self.shape.attention) + self.head

    @property
    def step(self) -> float:
        """Forward and backward of training."""
        layer = 3 * self.linears + 3.5 * self.shape.attention
        return self.shape.depth * layer + 3 * self.head

    def values(self, scope: Scope) -> tuple[float, float]:
        """FLOPs of the values beyond a forward, and of the forward that label repeats."""
        depth = self.shape.depth
        above = depth - scope.lowest(depth)
        qkv = 2 * self.shape.tokens * sum(i * o for i, o in self.shape.qkv)
        spent = len(scope.layers) * self.linears  # M x
        repeated = 0.0
        if above:
            attention = _BACKWARD[scope.estimator] * self.shape.attention
            spent += above * (self.linears + attention) + self.head
            # Below the lowest layer nothing moves, and no error is asked for.
            if not (scope.embedding or scope.lowest(depth) in scope.norms):
                spent -= qkv
        elif scope.final:
            spent += self.head  # the error at the head's input, which the others have at hand
        if scope.estimator == "label" and above:
            repeated = above * (self.linears + self.shape.attention) + self.head
        return spent + (self.head if scope.head else 0), repeated

    def price(self, scope: Scope) -> Price:
        """In training steps."""
        spent, repeated = self.values(scope)
        return Price((self.forward + spent) / self.step, (spent + repeated) / self.step)
