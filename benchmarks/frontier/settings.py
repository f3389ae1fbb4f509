"""Settings of the scorer as sums of a draw's columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.frontier.measure import CAPTURED, Numbers, Shares
from benchmarks.frontier.parts import norm_groups
from benchmarks.frontier.price import Scope


@dataclass(frozen=True)
class Setting:
    """One way to value tokens.

    Attributes:
        name: as tables have it.
        family: settings of one family are joined in the picture.
        scope: what it computes.
        kind: the linears of attention or of the MLP over all layers, in place of layers.
    """

    name: str
    family: str
    scope: Scope
    kind: str = ""

    @property
    def usable(self) -> bool:
        """Whether ``layers`` and ``parameters`` of the scorer's options can name it.

        They name parameters, each with all its uses: the models here have one matrix for embedding
        and head.
        """
        return self.scope.embedding == self.scope.head

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
        for layer in self.scope.layers:
            found += columns[f"{estimator}/layer {layer}"]
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
