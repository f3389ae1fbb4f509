"""What values are taken along: kept for as long as it belongs to model, data and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.inputs import DirectionInputs, Retention
from alphatoken.errors import ModelError
from alphatoken.model.batch import LabelledBatch, PreferenceBatch
from alphatoken.model.fingerprint import numbers_of

T = TypeVar("T")


def weights_age(model: nn.Module) -> object:
    """A value that is equal at two times only if no weight was written to in between."""
    return numbers_of(model.parameters())


def age_of(inputs: DirectionInputs) -> tuple[object, ...]:
    """A value that is equal at two times only if G and V need not be rebuilt in between.

    The first entry is ``weights_age``.
    """
    if inputs.scored.sharding is not None:  # each process sees its own parts: always stale
        return (object(),)
    # Every parameter of the model counts and not only those in scope: G is a gradient through
    # all of them, and moves with frozen ones too if somebody writes to them.
    model, p = inputs.adapter.model, inputs.config.preconditioner
    return (
        weights_age(model),
        numbers_of(model.buffers()),
        # Autocast rounds the products that G is made of.
        [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        numbers_of(_tensors_in((inputs.validation, inputs.arguments.retention))),
        _identity(inputs.arguments.retention),
        numbers_of(_tensors_in(p)) if isinstance(p, Mapping) else _optimizer_age(inputs),
        _versions(vars(inputs.arguments.influence).values() if inputs.arguments.influence else ()),
    )


def validation_age(inputs: DirectionInputs) -> object:
    """A value that is equal at two times only if no validation tensor was written to in between."""
    return numbers_of(_tensors_in(inputs.validation))


def _optimizer_age(inputs: DirectionInputs) -> object:
    optimizer = inputs.arguments.optimizer
    if inputs.config.preconditioner != "frozen" or optimizer is None:
        return None
    inputs.check_preconditioner()  # a hook may have been put beside the step
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = [optimizer.state.get(p, {}) for p in inputs.scored.parameters.values()]
    return numbers_of(_tensors_in((state, groups))), repr(groups)


def _identity(retention: object) -> object:
    if not isinstance(retention, FisherDrift):
        return None
    # Constants, so that none of them need be read.
    return _versions(m for m in (retention.fisher, retention.reference) if isinstance(m, dict))


def _versions(tensors: Iterable[object]) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for m in tensors for tensor in _tensors_in(m)]


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (PreferenceBatch, LabelledBatch)):
        yield from _tensors_in(list(vars(value).values()))
    elif isinstance(value, (list, tuple)):
        for item in value:  # other collections may read their batches from a disk
            yield from _tensors_in(item)


def require_gradients(model: nn.Module) -> None:
    """Raise where no graph can be built.

    Raises:
        ModelError: inference mode is on, or a parameter was made in it.
    """
    outside = next((n for n, p in model.named_parameters() if p.is_inference()), None)
    if outside is not None or torch.is_inference_mode_enabled():
        raise ModelError(
            "values need gradients, which inference mode rules out for good",
            got="torch.inference_mode() is on" if outside is None else f"{outside}, made in it",
            remedy="load the model and call outside torch.inference_mode(); torch.no_grad() is "
            "fine",
        )


class DirectionCache(Generic[T]):
    """Keeps M (or the end of a walk) until it is stale, and builds it anew then.

    Args:
        inputs: what it is built from.
        build: builds it at the weights as they are.
        age_of: equal at two times only if nothing that it depends on has changed in between; its
            first entry is ``weights_age``.
        lasts: changes of the age after which it is stale; 0: whatever the weights become, it is
            kept. It is stale at once when another entry of the age has changed.

    Attributes:
        inputs: what it is built from now; ``set_validation`` and ``set_retention`` replace it.
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
        # At the first use of what is kept; None as long as ``pin`` decides. And whether a setting
        # of the model has changed since.
        self._start: tuple[object, ...] | None = None
        self._other_setting = False
        self._changes = 0

    def set_validation(self, validation: Any) -> None:
        """Build against another validation set from the next use on, once it is checked."""
        self.inputs = self.inputs.against(validation)
        self.invalidate()

    def set_retention(self, retention: Retention) -> None:
        """Build with another retention term from the next use on, once it is checked."""
        self.inputs = self.inputs.retaining(retention)
        self.invalidate()

    def pin(self, version: object | None) -> None:
        """Let ``version`` decide when it is stale, instead of the weights' numbers."""
        self.pinned = version

    def invalidate(self) -> None:
        """Drop it; the next use builds it anew."""
        self.kept = self._age = self._start = None
        self._other_setting = False

    def keep(self, built: T) -> None:
        """Use ``built``, from another run or another cache, as if it had just been built here."""
        self.invalidate()
        self.kept, self._changes = built, 0

    def follow(self, former: DirectionCache[T]) -> None:
        """Go on where another cache stands, of the same weights under another setting."""
        self.kept, self._age, self._changes = former.kept, former._age, former._changes
        self._start, self._other_setting = former._start, former._start is not None

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

    def current(self) -> T:
        """The one of the current weights; built where there is none, or it is stale."""
        age = self._current_age()
        self.version += age != self._age
        self._changes += self._age is not None and age != self._age
        due = self._lasts and self._changes >= self._lasts
        if self.kept is None or due or self._of_other_inputs(age):
            self.invalidate()  # if building fails, nothing of it may pass for current
            self.kept, self._changes = self._build(self.inputs), 0
            self.builds += 1
        self._age = age
        if self.pinned is None and self._start is None:
            self._start = age
        return self.kept

    def _of_other_inputs(self, age: tuple[object, ...]) -> bool:
        """Whether what is kept was built from other inputs than weights, which training moves.

        A setting that changed beside the weights may be training's own: a loop keeps its walk.
        """
        if self.pinned is not None or self._start is None:
            return False
        return age[1:] != self._start[1:] or (self._other_setting and age[0] == self._start[0])

    @property
    def outdated(self) -> bool:
        """Whether, at its last use, what is kept was of other weights than at its first.

        False where nobody knows: under ``pin``, and of weights in shards.
        """
        if self.pinned is not None or self.inputs.scored.sharding is not None:
            return False
        start, last = self._start, self._age
        return start is not None and last is not None and start[0] != last[0]

    def peek(self) -> T | None:
        """The one of the current weights if it is at hand; None where it would have to be built."""
        return self.kept if self._age in (None, self._current_age()) else None
