"""Settings of the scorer as sums of a draw's columns, and what they cost in training steps.

Prices are counted FLOPs over those of a training step of the same batch. Letters as in
``benchmarks.floors``: N positions of the batch, R of them before a response token, P
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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.floors import Shape
from benchmarks.frontier.measure import CAPTURED, Numbers, Shares
from benchmarks.frontier.parts import norm_groups


@dataclass(frozen=True)
class Setting:
    """One way to value tokens.

    Attributes:
        name: as tables have it.
        family: settings of one family are joined in the picture.
        estimator: "label" or a captured one.
        layers: whose linears are in scope.
        norms: layers whose norms are.
        embedding: whether its part is.
        final: whether the final norm's part is, in closed form.
        head: whether its part is, in closed form.
        kind: the linears of attention or of the MLP over all layers, in place of layers.
    """

    name: str
    family: str
    estimator: str
    layers: tuple[int, ...] = ()
    norms: tuple[int, ...] = ()
    embedding: bool = False
    final: bool = False
    head: bool = False
    kind: str = ""

    def lowest(self, depth: int) -> int:
        """The first layer that a tangent or an error passes."""
        return 0 if self.embedding else min((*self.layers, *self.norms), default=depth)

    @property
    def usable(self) -> bool:
        """Whether ``layers`` and ``parameters`` of the scorer's options can name it.

        They name parameters, each with all its uses: the models here have one matrix for embedding
        and head.
        """
        return self.embedding == self.head

    def options(self, depth: int) -> str:
        """Layers and parameters as the scorer's options name them; empty where they cannot."""
        every = tuple(range(depth))
        if not self.usable or (self.norms and self.norms != every):
            return ""
        count = len(self.layers)
        layers = ",".join(map(str, self.layers)) + ("," if count == 1 else "")
        layers = "all" if self.layers == every else layers
        if count and self.layers == every[depth - count :] and count < depth:
            layers = str(count)
        norms = {(True, True): ["*norm*"], (True, False): ["*layers.*norm*"]}
        norms |= {(False, True): ["*model.norm.*"], (False, False): []}
        parts = [{"": "linears", "attention": "*attn.*proj*", "MLP": "*mlp.*proj*"}[self.kind]]
        parts = parts if count else []
        parts += norms[bool(self.norms), self.final]
        parts += ["*embed_tokens*"] if self.head else []
        if count == depth and parts == ["linears", "*norm*", "*embed_tokens*"]:
            return "parameters=all"
        named = [] if parts == ["linears"] else [f"parameters={','.join(parts)}"]
        return " ".join([*([f"layers={layers}"] if count and not self.kind else []), *named])

    def values(self, shares: Shares) -> Numbers:
        """A number a token."""
        columns, estimator = shares.columns, self.estimator
        if self.kind:
            return columns[f"label/{self.kind}"]
        values = np.zeros_like(columns["total"])
        for layer in self.layers:
            values += columns[f"{estimator}/layer {layer}"]
        for group in norm_groups(depth_of(shares)):
            if group.start in self.norms:
                values += columns[f"label/norms {group.start}-{group.stop - 1}"]
        for name, chosen in (
            ("embedding", self.embedding),
            ("final norm", self.final),
            ("head", self.head),
        ):
            if chosen:
                values += columns[f"label/{name}"]
        return values

    def with_layers(self, layers: Sequence[int]) -> Setting:
        """The same of other layers."""
        return replace(self, layers=tuple(sorted(layers)))


def spread(count: int, depth: int) -> tuple[int, ...]:
    """``count`` layers at equal distances, from the first to the last."""
    places = np.linspace(0, depth - 1, count) if count > 1 else [depth - 1]
    return tuple(sorted({round(float(place)) for place in places}))


def _counts(depth: int) -> list[int]:
    return [k for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25) if k < depth]


def plain(depth: int) -> Iterator[Setting]:
    """Choices of layers and parameters, each by ``label`` and by captured errors."""
    every = tuple(range(depth))
    for estimator in ("label", *CAPTURED):
        for count in _counts(depth):
            last, first = every[depth - count :], every[:count]
            places = {"last": last, "first": first}
            if count > 1:
                places["spread"] = spread(count, depth)
            for place, layers in places.items():
                name = f"{estimator}, {place}"
                yield Setting(f"{name} {count}", name, estimator, layers)
        yield Setting(f"{estimator}, all linears", f"{estimator}, all", estimator, every)
    whole = all_parameters("label, all parameters", "label, all", depth)
    yield whole
    for lacking, changes in (
        ("the embedding", {"embedding": False}),
        ("the head", {"head": False}),
        ("embedding and head", {"embedding": False, "head": False}),
        ("the final norm", {"final": False}),
        ("all norms", {"final": False, "norms": ()}),
        ("the linears", {"layers": ()}),
    ):
        name = f"label, all parameters but {lacking}"
        yield replace(whole, name=name, family="lacking", **changes)
    for name, parts in (
        ("embedding alone", {"embedding": True}),
        ("head alone", {"head": True}),
        ("embedding and head alone", {"embedding": True, "head": True}),
        ("final norm alone", {"final": True}),
        ("final norm and head alone", {"final": True, "head": True}),
        ("layers' norms alone", {"norms": every}),
        ("all norms alone", {"norms": every, "final": True}),
        ("all norms and head alone", {"norms": every, "final": True, "head": True}),
        ("attention alone, all layers", {"layers": every, "kind": "attention"}),
        ("MLP alone, all layers", {"layers": every, "kind": "MLP"}),
    ):
        yield Setting(name, "kinds", "label", **parts)


def all_parameters(name: str, family: str, depth: int) -> Setting:
    """Label values over everything."""
    every = tuple(range(depth))
    return Setting(name, family, "label", every, every, embedding=True, final=True, head=True)


def depth_of(shares: Shares) -> int:
    """Layers of the model that a draw was measured on."""
    return sum(name.startswith("label/layer ") for name in shares.columns)


_BACKWARD = {"label": 2.0, "path": 2.5, "direct": 3.1, "alphatoken": 4.0}


def flops_of(shape: Shape, setting: Setting) -> float:
    """FLOPs of a forward and the values, of a batch whose head is formed at the R positions."""
    depth, linears = shape.depth, shape.contraction(1)
    above = depth - setting.lowest(depth)
    spent = float(shape.forward + shape.contraction(len(setting.layers)))  # M x
    if above:
        attention = _BACKWARD[setting.estimator] * shape.attention
        spent += above * (linears + attention) + shape.head
        # Below the lowest layer nothing moves, and no error is asked for.
        if not (setting.embedding or setting.lowest(depth) in setting.norms):
            spent -= 2 * shape.tokens * sum(i * o for i, o in shape.qkv)
    elif setting.final:
        spent += shape.head  # the error at the head's input, which the others have at hand
    return spent + (shape.head if setting.head else 0)
