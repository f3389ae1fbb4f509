"""Settings of the scorer, and cheap corrections of them, as sums of a draw's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.frontier.measure import CAPTURED, Numbers, Shares
from benchmarks.frontier.price import Scope

__all__ = ["Setting", "corrected", "plain", "random_settings", "singles", "spread"]

EXTRAS = ("embedding", "head", "norms")


@dataclass(frozen=True)
class Setting:
    """One way to value tokens.

    Attributes:
        name: as tables have it.
        family: settings of one family are joined in the picture.
        scope: what it computes.
        factors: of each layer in scope; 1 without.
        kind: a kind of parameters over all layers, in place of layers.
        draws: how many times a random choice is drawn anew; 0 where nothing is drawn.
        choose: the layers and factors of one draw.
        usable: whether today's options can say it.
    """

    name: str
    family: str
    scope: Scope
    factors: tuple[float, ...] | None = None
    kind: str = ""
    draws: int = 0
    choose: Callable[[np.random.Generator], tuple[tuple[int, ...], tuple[float, ...]]] | None = None
    usable: bool = True

    def values(self, shares: Shares) -> Numbers:
        """A number a token."""
        columns, estimator = shares.columns, self.scope.estimator
        if self.kind:
            return columns[f"label/{self.kind}"]
        found = np.zeros_like(columns["total"])
        factors = self.factors or (1.0,) * len(self.scope.layers)
        for layer, factor in zip(self.scope.layers, factors, strict=True):
            found += factor * columns[f"{estimator}/layer {layer}"]
        for extra in EXTRAS:
            if getattr(self.scope, extra):
                found += columns[f"label/{extra}"]
        return found

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
            yield Setting(f"{estimator}, last {count}", f"{estimator}, last", Scope(estimator, last))
            yield Setting(
                f"{estimator}, first {count}", f"{estimator}, first", Scope(estimator, first)
            )
            if count > 1:
                layers = spread(count, depth)
                yield Setting(
                    f"{estimator}, spread {count}", f"{estimator}, spread", Scope(estimator, layers)
                )
        yield Setting(f"{estimator}, all linears", f"{estimator}, all", Scope(estimator, every))
    label = Scope("label", every)
    for extras in (
        ("norms",), ("embedding",), ("head",), ("embedding", "head"), ("head", "norms"),
        EXTRAS,
    ):  # fmt: skip
        name = "label, all parameters" if extras == EXTRAS else "label, all linears + " + (
            " + ".join(extras)
        )
        said = extras == EXTRAS
        scope = replace(label, **dict.fromkeys(extras, True))
        yield Setting(name, "label, all", scope, usable=said)
    for extra in EXTRAS:
        scope = replace(Scope("label"), **{extra: True})
        yield Setting(f"{extra} alone", "kinds", scope, usable=False)
    both = Scope("label", embedding=True, head=True)
    yield Setting("embedding and head alone (one tied matrix)", "kinds", both, usable=False)
    for kind in ("query and key", "value and output", "MLP"):
        yield Setting(f"{kind} alone, all layers", "kinds", label, kind=kind, usable=False)


# --- corrections ---------------------------------------------------------------------------------


def corrected(depth: int) -> Iterator[Setting]:
    """Cheap corrections: the head's part in closed form, layers that stand for their neighbours."""
    every = tuple(range(depth))
    for estimator in ("label", "direct", "alphatoken"):
        for count in _counts(depth):
            scope = Scope(estimator, every[depth - count :], head=True)
            yield Setting(
                f"{estimator}, last {count} + head", f"{estimator}, last + head", scope,
                usable=False,
            )  # fmt: skip
    for count in (c for c in _counts(depth) if c > 1):
        layers = spread(count, depth)
        scope = Scope("label", layers, head=True)
        name = f"label, spread {count}"
        yield Setting(f"{name} + head", "label, spread + head", scope, usable=False)
        factors = _cells(layers, depth)
        yield Setting(
            f"{name}, weighted", "label, spread weighted", Scope("label", layers), factors,
            usable=False,
        )  # fmt: skip
        yield Setting(
            f"{name}, weighted + head", "label, spread weighted + head", scope, factors,
            usable=False,
        )  # fmt: skip
        everything = replace(scope, embedding=True, norms=True)
        yield Setting(
            f"{name}, weighted + head + embedding + norms", "label, spread weighted + all others",
            everything, factors, usable=False,
        )  # fmt: skip
    yield from _upper(depth)


def _upper(depth: int) -> Iterator[Setting]:
    """Layers spread over the upper part alone: tangents start higher, which is what saves most."""
    for share in (0.25, 0.5, 0.75):
        lowest = depth - round(share * depth)
        for count in (2, 3, 4, 6):
            layers = spread(count, depth, lowest)
            if len(layers) < count or lowest == 0:
                continue
            factors = _cells(layers, depth)
            scope = Scope("label", layers, head=True)
            name = f"label, {count} of the upper {share:.0%}, weighted + head"
            yield Setting(name, "label, upper + head", scope, factors, usable=False)


def _cells(layers: Sequence[int], depth: int) -> tuple[float, ...]:
    """How many layers are nearest to each of ``layers``; ties are shared."""
    found = dict.fromkeys(layers, 0.0)
    for layer in range(depth):
        distance = {own: abs(own - layer) for own in layers}
        nearest = [own for own in layers if distance[own] == min(distance.values())]
        for own in nearest:
            found[own] += 1 / len(nearest)
    return tuple(found[layer] for layer in layers)


# --- layers drawn anew each step -----------------------------------------------------------------


def random_settings(depth: int, draws: int = 40) -> Iterator[Setting]:
    """Layers drawn anew each step; each counts as one over its chance, so the mean is the sum."""
    for count in (k for k in (2, 4, 8, 15) if k < depth):
        for head in (False, True):
            scope = Scope("label", head=head)
            more = " + head" if head else ""
            family = f"label, random{more}"
            yield Setting(
                f"label, {count} random layers{more}", family, scope, draws=draws,
                choose=_uniform(count, depth), usable=False,
            )  # fmt: skip
            yield Setting(
                f"label, {count} random layers, one of each block{more}", f"{family}, blocks",
                scope, draws=draws, choose=_stratified(count, depth), usable=False,
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
    blocks = list(zip(edges, edges[1:], strict=False))

    def choose(generator: np.random.Generator) -> tuple[tuple[int, ...], tuple[float, ...]]:
        layers = tuple(int(generator.integers(low, high)) for low, high in blocks)
        return layers, tuple(float(high - low) for low, high in blocks)

    return choose
