"""Settings of the scorer, and cheap corrections of them, as sums of a draw's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from benchmarks.frontier.measure import CAPTURED, Numbers, Shares
from benchmarks.frontier.parts import norm_groups
from benchmarks.frontier.price import Scope

__all__ = ["Setting", "corrected", "plain", "random_settings", "singles", "spread"]


@dataclass(frozen=True)
class Setting:
    """One way to value tokens.

    Attributes:
        name: as tables have it.
        family: settings of one family are joined in the picture.
        scope: what it computes.
        factors: of each layer in scope; 1 without.
        kind: the linears of attention or of the MLP over all layers, in place of layers.
        draws: how many times a random choice is drawn anew; 0 where nothing is drawn.
        choose: the layers and factors of one draw.
    """

    name: str
    family: str
    scope: Scope
    factors: tuple[float, ...] | None = None
    kind: str = ""
    draws: int = 0
    choose: Callable[[np.random.Generator], tuple[tuple[int, ...], tuple[float, ...]]] | None = None

    @property
    def usable(self) -> bool:
        """Whether ``layers`` and ``parameters`` of the scorer's options can name it.

        They name parameters, each with all its uses: the models here have one matrix for embedding
        and head. Layers have no factors, and none is drawn.
        """
        scope = self.scope
        return self.factors is None and self.choose is None and scope.embedding == scope.head

    def options(self, depth: int) -> str:
        """Layers and parameters as the scorer's options name them; empty where they cannot."""
        scope, every = self.scope, tuple(range(depth))
        if not self.usable or (scope.norms and scope.norms != every):
            return ""
        count = len(scope.layers)
        layers = ",".join(map(str, scope.layers)) + ("," if count == 1 else "")
        layers = "all" if scope.layers == every else layers
        if count and scope.layers == every[depth - count :] and count < depth:
            layers = str(count)
        norms = {(True, True): ["*norm*"], (True, False): ["*layers.*norm*"]}
        norms |= {(False, True): ["*model.norm.*"], (False, False): []}
        parts = [{"": "linears", "attention": "*attn.*proj*", "MLP": "*mlp.*proj*"}[self.kind]]
        parts = parts if count else []
        parts += norms[bool(scope.norms), scope.final]
        parts += ["*embed_tokens*"] if scope.head else []
        if count == depth and parts == ["linears", "*norm*", "*embed_tokens*"]:
            return "parameters=all"
        named = [] if parts == ["linears"] else [f"parameters={','.join(parts)}"]
        return " ".join([*([f"layers={layers}"] if count and not self.kind else []), *named])

    def values(self, shares: Shares) -> Numbers:
        """A number a token."""
        columns, estimator = shares.columns, self.scope.estimator
        if self.kind:
            return columns[f"label/{self.kind}"]
        found = np.zeros_like(columns["total"])
        factors = self.factors or (1.0,) * len(self.scope.layers)
        for layer, factor in zip(self.scope.layers, factors, strict=True):
            found += factor * columns[f"{estimator}/layer {layer}"]
        for group in norm_groups(depth_of(shares)):
            if group.start in self.scope.norms:
                found += columns[f"label/norms {group.start}-{group.stop - 1}"]
        for name, chosen in (
            ("embedding", self.scope.embedding),
            ("final norm", self.scope.final),
            ("head", self.scope.head),
        ):
            if chosen:
                found += columns[f"label/{name}"]
        return found

    def with_layers(self, layers: Sequence[int]) -> Setting:
        """The same of other layers."""
        return replace(self, scope=replace(self.scope, layers=tuple(sorted(layers))))

    def drawn(self, generator: np.random.Generator) -> Setting:
        """With the layers of one random choice."""
        assert self.choose is not None
        layers, factors = self.choose(generator)
        return replace(self, scope=replace(self.scope, layers=layers), factors=factors)


def spread(count: int, depth: int, lowest: int = 0) -> tuple[int, ...]:
    """``count`` layers at equal distances, from ``lowest`` to the last."""
    places = np.linspace(lowest, depth - 1, count) if count > 1 else [depth - 1]
    return tuple(sorted({round(float(place)) for place in places}))


def _counts(depth: int) -> list[int]:
    return [k for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25) if k < depth]


def singles(depth: int) -> Iterator[Setting]:
    """Each layer by itself."""
    for layer in range(depth):
        for estimator in ("label", *CAPTURED):
            yield Setting(f"{estimator}, layer {layer}", "single", Scope(estimator, (layer,)))


def plain(depth: int) -> Iterator[Setting]:
    """Choices of layers and parameters, each by ``label`` and by captured errors."""
    every = tuple(range(depth))
    for estimator in ("label", *CAPTURED):
        for count in _counts(depth):
            last, first = every[depth - count :], every[:count]
            yield Setting(
                f"{estimator}, last {count}", f"{estimator}, last", Scope(estimator, last)
            )
            yield Setting(
                f"{estimator}, first {count}", f"{estimator}, first", Scope(estimator, first)
            )
            if count > 1:
                layers = spread(count, depth)
                yield Setting(
                    f"{estimator}, spread {count}", f"{estimator}, spread", Scope(estimator, layers)
                )
        yield Setting(f"{estimator}, all linears", f"{estimator}, all", Scope(estimator, every))
    whole = Scope("label", every, every, embedding=True, final=True, head=True)
    yield Setting("label, all parameters", "label, all", whole)
    for lacking, changes in (
        ("the embedding", {"embedding": False}),
        ("the head", {"head": False}),
        ("embedding and head", {"embedding": False, "head": False}),
        ("the final norm", {"final": False}),
        ("all norms", {"final": False, "norms": ()}),
        ("the linears", {"layers": ()}),
    ):
        name = f"label, all parameters but {lacking}"
        yield Setting(name, "lacking", replace(whole, **changes))
    for name, scope in (
        ("embedding alone", Scope("label", embedding=True)),
        ("head alone", Scope("label", head=True)),
        ("embedding and head alone", Scope("label", embedding=True, head=True)),
        ("final norm alone", Scope("label", final=True)),
        ("final norm and head alone", Scope("label", final=True, head=True)),
        ("layers' norms alone", Scope("label", norms=every)),
        ("all norms alone", Scope("label", norms=every, final=True)),
        ("all norms and head alone", Scope("label", norms=every, final=True, head=True)),
    ):
        yield Setting(name, "kinds", scope)
    for kind in ("attention", "MLP"):
        scope = Scope("label", every)
        yield Setting(f"{kind} alone, all layers", "kinds", scope, kind=kind)


def depth_of(shares: Shares) -> int:
    """Layers of the model that a draw was measured on."""
    return sum(name.startswith("label/layer ") for name in shares.columns)


# --- corrections ---------------------------------------------------------------------------------


def corrected(depth: int) -> Iterator[Setting]:
    """Cheap corrections: parts in closed form, and layers that stand for their neighbours."""
    every = tuple(range(depth))
    for estimator in ("label", "direct", "alphatoken"):
        for count in _counts(depth):
            scope = Scope(estimator, every[depth - count :], final=True, head=True)
            yield Setting(
                f"{estimator}, last {count} + final norm + head", f"{estimator}, last + closed",
                scope,
            )  # fmt: skip
    for group in norm_groups(depth)[1:]:
        upper = every[group.start :]
        scope = Scope("label", upper, upper, final=True, head=True)
        name = f"label, everything in the last {len(upper)} + final norm + head"
        yield Setting(name, "label, everything last", scope)
        name = f"label, norms of the last {len(upper)} + final norm + head"
        yield Setting(name, "label, norms last", replace(scope, layers=()))
        for count in (c for c in (1, 2, 3, 5) if c < len(upper)):
            layers = spread(count, depth, group.start)
            factors = _cells(layers, depth, group.start)
            name = f"label, {count} of the last {len(upper)}, weighted + their norms + closed"
            chosen = replace(scope, layers=layers)
            yield Setting(name, "label, spread in last", chosen, factors)
    for count in (c for c in _counts(depth) if c > 1):
        layers = spread(count, depth)
        factors = _cells(layers, depth)
        name = f"label, spread {count}"
        scope = Scope("label", layers)
        closed = replace(scope, final=True, head=True)
        norms = replace(closed, norms=every)
        for more, family, extended, weights in (
            (" + final norm + head", "closed", closed, None),
            (", weighted", "weighted", scope, factors),
            (", weighted + final norm + head", "weighted + closed", closed, factors),
            (", weighted + all norms + head", "weighted + norms", norms, factors),
        ):
            yield Setting(
                name + more, f"label, spread {family}", extended, weights
            )  # fmt: skip


def _cells(layers: Sequence[int], depth: int, lowest: int = 0) -> tuple[float, ...]:
    """How many layers from ``lowest`` on are nearest to each of ``layers``; ties are shared."""
    found = dict.fromkeys(layers, 0.0)
    for layer in range(lowest, depth):
        distance = {own: abs(own - layer) for own in layers}
        nearest = [own for own in layers if distance[own] == min(distance.values())]
        for own in nearest:
            found[own] += 1 / len(nearest)
    return tuple(found[layer] for layer in layers)


# --- layers drawn anew each step -----------------------------------------------------------------


def random_settings(depth: int, draws: int = 40) -> Iterator[Setting]:
    """Layers drawn anew each step; each counts as one over its chance, so the mean is the sum."""
    for count in (k for k in (2, 4, 8, 15) if k < depth):
        for norms in (False, True):
            scope = Scope(
                "label", norms=tuple(range(depth)) if norms else (), final=norms, head=norms
            )
            more = " + all norms + head" if norms else ""
            family = f"label, random{more}"
            yield Setting(
                f"label, {count} random layers{more}", family, scope, draws=draws,
                choose=_uniform(count, depth),
            )  # fmt: skip
            yield Setting(
                f"label, {count} random layers, one of each block{more}", f"{family}, blocks",
                scope, draws=draws, choose=_stratified(count, depth),
            )  # fmt: skip


def _uniform(
    count: int, depth: int
) -> Callable[[np.random.Generator], tuple[tuple[int, ...], tuple[float, ...]]]:
    def choose(generator: np.random.Generator) -> tuple[tuple[int, ...], tuple[float, ...]]:
        layers = sorted(int(i) for i in generator.choice(depth, count, replace=False))
        return tuple(layers), (depth / count,) * count

    return choose


def _stratified(
    count: int, depth: int
) -> Callable[[np.random.Generator], tuple[tuple[int, ...], tuple[float, ...]]]:
    edges = [round(float(edge)) for edge in np.linspace(0, depth, count + 1)]
    blocks = list(pairwise(edges))

    def choose(generator: np.random.Generator) -> tuple[tuple[int, ...], tuple[float, ...]]:
        layers = tuple(int(generator.integers(low, high)) for low, high in blocks)
        return layers, tuple(float(high - low) for low, high in blocks)

    return choose
