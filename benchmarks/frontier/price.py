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


def flops_of(shape: Shape, scope: Scope) -> float:
    """FLOPs of a forward and the values, of a batch whose head is formed at the R positions."""
    depth, linears = shape.depth, shape.contraction(1)
    above = depth - scope.lowest(depth)
    spent = float(shape.forward + shape.contraction(len(scope.layers)))  # M x
    if above:
        attention = _BACKWARD[scope.estimator] * shape.attention
        spent += above * (linears + attention) + shape.head
        # Below the lowest layer nothing moves, and no error is asked for.
        if not (scope.embedding or scope.lowest(depth) in scope.norms):
            spent -= 2 * shape.tokens * sum(i * o for i, o in shape.qkv)
    elif scope.final:
        spent += shape.head  # the error at the head's input, which the others have at hand
    return spent + (shape.head if scope.head else 0)
