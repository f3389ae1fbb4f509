"""What values are taken along, kept for as long as it belongs to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from alphatoken.direction.age import age_of, weights_age
from alphatoken.direction.inputs import DirectionInputs, Retention
from alphatoken.errors import ModelError

__all__ = ["DirectionCache"]

T = TypeVar("T")


class DirectionCache(Generic[T]):
    """Keeps M (or the end of a walk) until it is stale, and builds it anew then.

    Args:
        inputs: what it is built from.
        build: builds it at the weights as they are.
        age_of: equal at two times only if nothing that it depends on has changed in between; its
            first entry is ``weights_age``.
        lasts: changes of the age after which it is stale; 0: it is kept until ``invalidate``.

    Attributes:
        inputs: what it is built from.
        pinned: what decides in the age's place; None for the age.
        kept: what was built last, whether it is stale or not; None before and after ``invalidate``.
        version: another number after each use that came with a change or built anew.
        builds: number of times that it was built.
    """

    def __init__(
        self,
        inputs: DirectionInputs,
        build: Callable[[DirectionInputs], T],
        *,
        age_of: Callable[[DirectionInputs], tuple[object, ...]] = age_of,
        lasts: int = 1,
    ) -> None:
        self.inputs = inputs
        self.pinned: object | None = None
        self.kept: T | None = None
        self.version = self.builds = 0
        self._build, self._age_of, self._lasts = build, age_of, lasts
        self._age: tuple[object, ...] | None = None
        self._changes = 0

    # --- what it is built from -------------------------------------------------------------------

    def set_validation(self, validation: Any) -> None:
        """Take another validation set, once it is checked; the next use builds anew."""
        self.inputs = self.inputs.against(validation)
        self.invalidate()

    def set_retention(self, retention: Retention) -> None:
        """Take another retention term, once it is checked; the next use builds anew."""
        self.inputs = self.inputs.retaining(retention)
        self.invalidate()

    # --- whether it is stale ---------------------------------------------------------------------

    def pin(self, version: object | None) -> None:
        """Let ``version`` decide when it is stale, instead of the weights' numbers."""
        self.pinned = version

    def invalidate(self) -> None:
        """Drop it; the next use builds it anew."""
        self.kept = self._age = None

    def keep(self, built: T) -> None:
        """Use ``built``, from another run or another cache, as if it had just been built here."""
        self.kept, self._age, self._changes = built, None, 0

    def follow(self, former: DirectionCache[T]) -> None:
        """Go on where another cache of the same weights stands."""
        self.kept, self._age, self._changes = former.kept, former._age, former._changes

    def _current_age(self) -> tuple[object, ...]:
        return self._age_of(self.inputs) if self.pinned is None else ("pinned", self.pinned)

    def require_current(self) -> None:
        """Raise where a weight was written to since the last use, unless ``pin`` decides.

        Raises:
            ModelError: one was.
        """
        sharded = self.inputs.scored.sharding is not None
        if self.pinned is not None or sharded or self._age is None:
            return
        if weights_age(self.inputs.adapter.model) != self._age[0]:
            raise ModelError(
                "a weight has changed since the observed forward began",
                why="its graph and the direction are of the earlier weights",
                remedy="take the values before the optimizer's step, inside observe()",
            )

    # --- using it --------------------------------------------------------------------------------

    def current(self) -> T:
        """The one of the current weights; built where there is none, or it is stale."""
        age = self._current_age()
        self.version += age != self._age
        self._changes += self._age is not None and age != self._age
        if self.kept is None or (self._lasts and self._changes >= self._lasts):
            self.kept = self._age = None  # if building fails, nothing of it may pass for current
            self.kept, self._changes = self._build(self.inputs), 0
            self.builds += 1
        self._age = age
        return self.kept

    def peek(self) -> T | None:
        """The one of the current weights if it is at hand; None where it would have to be built."""
        return self.kept if self._age is not None and self._current_age() == self._age else None
