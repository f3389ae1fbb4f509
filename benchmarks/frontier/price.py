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

from benchmarks.floors import Shape

__all__ = ["Price", "Scope"]

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

    @classmethod
    def of(cls, shape: Shape, scope: Scope) -> Price:
        """Of a batch whose head is formed at the R positions before a response token."""
        spent, repeated = _values(shape, scope)
        return cls((shape.forward + spent) / shape.step, (spent + repeated) / shape.step)


def _values(shape: Shape, scope: Scope) -> tuple[float, float]:
    """FLOPs of the values beyond a forward, and of the forward that label repeats."""
    depth, linears = shape.depth, shape.contraction(1)
    above = depth - scope.lowest(depth)
    spent = float(shape.contraction(len(scope.layers)))  # M x
    repeated = 0.0
    if above:
        attention = _BACKWARD[scope.estimator] * shape.attention
        spent += above * (linears + attention) + shape.head
        # Below the lowest layer nothing moves, and no error is asked for.
        if not (scope.embedding or scope.lowest(depth) in scope.norms):
            spent -= 2 * shape.tokens * sum(i * o for i, o in shape.qkv)
    elif scope.final:
        spent += shape.head  # the error at the head's input, which the others have at hand
    if scope.estimator == "label" and above:
        repeated = above * (linears + shape.attention) + shape.head
    return spent + (shape.head if scope.head else 0), repeated
