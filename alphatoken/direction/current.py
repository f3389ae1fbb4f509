"""M at the current weights, rebuilt when it is stale, as one frame for valuing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from alphatoken.direction.age import age_of, weights_age
from alphatoken.direction.algebra import Direction, norms
from alphatoken.direction.build import Ingredients, Retention
from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import ModelError
from alphatoken.estimate.columns import Side
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.capture import Recorder

__all__ = ["DirectionBuilder", "End", "Frame"]


End = Callable[[LabelledBatch], Tensor]
"""Token losses (b, t) at the end of a move, without a graph, dropout off; 0 off the response."""


@dataclass(frozen=True, eq=False)
class Frame:
    """The current M and the scored parameters, against which passes are valued.

    Attributes:
        direction: both sides of M; P is left out where it is "full".
        made_of: what M was built from.
        end: losses at the end of a walk, to which values are taken; M is empty then.
    """

    direction: Direction
    made_of: Ingredients
    end: End | None = None

    @property
    def scored(self) -> ScoredParameters:
        """The parameters that values are inner products over."""
        return self.made_of.scored

    @cached_property
    def balance(self) -> dict[str, float]:
        """``||lambda V|| / ||G||`` per parameter.

        Measured when it is first asked for; under sharded weights by all processes together.
        """
        sharding = self.scored.sharding
        return self.direction.balance(norms if sharding is None else sharding.norms)

    def at_step(self, loss: Tensor, recorder: Recorder) -> Frame:
        """The frame for the step that this loss makes; for ``preconditioner="full"``."""
        gradient = self.made_of.step_gradient(loss, recorder)
        return replace(self, direction=self.made_of.at_step(self.direction, gradient))

    def sides(self, *, components: bool) -> tuple[Side | None, Side | None, dict[str, float]]:
        """Adaptation and stability to contract with, None for no such side, and their balance.

        Without ``components`` both are summed to M as one side, which saves a contraction; the
        balance is left empty there. With ``standard_errors`` they are never summed, since the parts
        of the adaptation side are contracted in its place.
        """
        direction = self.direction
        adaptation = Side(direction.adaptation) if self.made_of.config.adapts else None
        stability = None if direction.stability is None else Side(direction.stability)
        if components:
            return adaptation, stability, self.balance
        if direction.parts or adaptation is None or stability is None:
            return adaptation, stability, {}
        weight = direction.stability_weight
        return Side(adaptation.matrices, stability.matrices, weight), None, {}


class DirectionBuilder:
    """Keeps M for as long as it is that of the model, and builds it anew where it is not.

    Attributes:
        made_of: what M is built from.
        pinned: what decides when G and V are stale; None for the weights themselves.
    """

    def __init__(self, made_of: Ingredients) -> None:
        self.made_of = made_of
        self.pinned: object | None = None
        self._frame: Frame | None = None
        self._age: object = None

    def set_validation(self, validation: Sequence[Any]) -> None:
        """Take another validation set; G is built anew at the next use."""
        self.made_of = self.made_of.against(validation)
        self.invalidate()

    def set_retention(self, retention: Retention) -> None:
        """Take another retention term, once it is checked; V is built anew at the next use."""
        self.made_of = self.made_of.retaining(retention)
        self.invalidate()

    def invalidate(self) -> None:
        """Drop G and V; the next ``prepare`` builds them anew."""
        self._age = None

    def pin(self, version: object | None) -> None:
        """Let ``version`` decide when G and V are stale, instead of the weights' numbers."""
        self.pinned = version

    def follow(self, former: DirectionBuilder) -> None:
        """Take over what stays valid after a change of settings; G and V do not."""

    def _current_age(self) -> object:
        return age_of(self.made_of) if self.pinned is None else ("pinned", self.pinned)

    def require_current(self) -> None:
        """Raise where a weight was written to since ``prepare``, unless ``pin`` decides.

        Raises:
            ModelError: one was.
        """
        sharded = self.made_of.scored.sharding is not None
        if self.pinned is not None or sharded or self._age is None:
            return
        assert isinstance(self._age, tuple)
        if weights_age(self.made_of.adapter.model) != self._age[0]:
            raise ModelError(
                "a weight has changed since the observed forward began",
                why="its graph and the direction are of the earlier weights",
                remedy="take the values before the optimizer's step, inside observe()",
            )

    def prepare(self) -> Frame:
        """Make M current, and hand out what passes are valued with."""
        age = self._current_age()
        if self._frame is None or age != self._age:
            self._age = None  # if building fails, nothing of it may pass for current
            self._frame = Frame(self.made_of.direction(), self.made_of)
            self._age = age
        return self._frame

    def direction(self) -> Direction:
        """Both sides of M as whole matrices, at the current parameters; P = 1 for "full".

        Where M is stale it is built but not stored. ``prepare`` alone stores it: it is called
        after the proofs, and what is stored may be contracted.
        """
        if self._frame is not None and self._current_age() == self._age:
            return self._frame.direction
        return self.made_of.direction()
