"""A diagnosis that keeps to a time: whole rounds of growing size, of which the last one counts.

The first round is of the least that means anything, and always done. A size is a number of things
read or drawn: response tokens, in the order that the seed draws; validation rows; tokens sent one
by one; windows; samples. The sizes grow one after the other, the most important first, each to
twice its number at most. Time is measured, never forecast from shapes: twice the number takes at
most twice the time, so the next round is as many such steps ahead as the time left allows, by
what the last round took. A round that goes on past the time all the same is dropped at its next
report of progress, or when memory is full, and the one before it stands.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.estimators import spread, windows_of
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.own_values import FEWEST_ROWS
from alphatoken.fidelity.sensitivity import layer_choices
from alphatoken.fidelity.subject import Subject
from alphatoken.model.capture import resolve_layers
from alphatoken.support.progress import Console, Progress

__all__ = ["Size", "diagnosed_within", "number", "sizes_of", "steps", "thinned"]

_TOKENS = (96, 1000)
"""Response tokens of the first round: of as many rows as intervals need, within these."""
_ROWS = 8
"""Validation rows below which the objective is that of single rows."""
_TUNING = 0.25
"""Share of the time after which the fine-tuning of a copy stops."""


@dataclass(frozen=True)
class Size:
    """A size that grows from round to round.

    Attributes:
        name: of the field of ``Subject``, or of the diagnostic's options, that holds it.
        levels: values of that field, from the least that means anything up to what was asked for.
        what: the things that are more, for a sentence.
        whole: how many were asked for, where the last level does not say it.
    """

    name: str
    levels: tuple[Any, ...]
    what: str
    whole: int | None = None


def number(name: str, asked: int, least: int, what: str) -> Size:
    """A number that doubles.

    >>> number("tokens", 100, 20, "tokens").levels
    (20, 40, 80, 100)
    """
    levels = [min(asked, least)]
    while levels[-1] < asked:
        levels.append(min(asked, 2 * levels[-1]))
    return Size(name, tuple(levels), what)


def thinned(
    name: str, values: Sequence[Any], least: int, what: str, must: Sequence[Any] = ()
) -> Size:
    """Several values; a level has every second one of the next, but the ends and ``must``.

    >>> thinned("windows", (0, 1, 2, 4, 8), 2, "windows").levels
    ((0, 8), (0, 2, 8), (0, 1, 2, 4, 8))
    """
    levels = [tuple(values)]
    while len(levels[0]) > least:
        now = levels[0]
        kept = tuple(x for i, x in enumerate(now) if i % 2 == 0 or x == now[-1] or x in must)
        if not least <= len(kept) < len(now):
            break
        levels.insert(0, kept)
    return Size(name, tuple(levels), what)


def steps(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """All sizes by name, from the least to what was asked for: one of them a level up each time.

    >>> a, b = number("a", 4, 1, "things"), number("b", 2, 1, "others")
    >>> [tuple(step.values()) for step in steps([a, b])]
    [(1, 1), (2, 1), (2, 2), (4, 2)]
    """
    place = {size.name: 0 for size in sizes}
    found = [{size.name: size.levels[0] for size in sizes}]
    for _ in range(max((len(size.levels) for size in sizes), default=1) - 1):
        for size in sizes:
            if place[size.name] + 1 < len(size.levels):
                place[size.name] += 1
                found.append({**found[-1], size.name: size.levels[place[size.name]]})
    return found


# --- rounds ---------------------------------------------------------------------------------------


class _TimeIsUpError(Exception):
    """A round went on past the time."""


def diagnosed_within(
    seconds: float | None,
    name: str,
    subject: Subject,
    options: Any,
    given: frozenset[str],
    diagnose: Callable[[Subject, Any], Diagnosis],
    *,
    said: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """The largest diagnosis that can be made in the time; its notes say what was left out.

    Args:
        seconds: how long it may take; None for all that was asked for.
        name: of the diagnostic.
        subject: what is diagnosed.
        options: of the diagnostic.
        given: sizes that stay as they are.
        diagnose: one round.
        said: the time, as the user wrote it.
        clock: seconds since some moment.
    """
    if seconds is None:
        return diagnose(subject, options)
    start = clock()
    subject = subject.resized(tuning_seconds=_TUNING * seconds)
    sizes = [size for size in sizes_of(name, subject, options) if size.name not in given]
    path, place, reached = steps(sizes), 0, 0
    found: Diagnosis | None = None
    while True:
        began = clock()
        late = None if found is None else start + seconds
        try:
            found = diagnose(*_resized(_until(subject, late, clock), options, path[place]))
        except _TimeIsUpError:
            break
        except (torch.OutOfMemoryError, MemoryError):
            if found is None:
                raise
            said = f"{said}: a larger round ran out of memory"
            break
        reached, took, left = place, clock() - began, start + seconds - clock()
        ahead = math.floor(math.log2(left / max(took, 1e-3))) if left > 0 else 0
        if reached + 1 == len(path) or ahead < 1:
            break
        place = min(place + ahead, len(path) - 1)
    assert found is not None
    return _told(found, sizes, path[reached], path[-1], said)


def _resized(subject: Subject, options: Any, sizes: Mapping[str, Any]) -> tuple[Subject, Any]:
    """Subject and options with these sizes: each belongs to the one that has such a field."""
    own = {one.name for one in fields(options)}
    mine = {name: value for name, value in sizes.items() if name in own}
    shared = {name: value for name, value in sizes.items() if name not in own}
    return subject.resized(**shared), replace(options, **mine)


def _until(subject: Subject, late: float | None, clock: Callable[[], float]) -> Subject:
    """The subject, whose progress says when it is too late."""
    if late is None:
        return subject
    tell = subject.progress
    if isinstance(tell, bool) or tell is None:
        spoken = sys.stderr.isatty() if tell is None else tell
        tell = Console() if spoken else None

    def report(progress: Progress) -> None:
        if clock() > late:
            raise _TimeIsUpError
        if tell is not None:
            tell(progress)

    return subject.resized(progress=report)


def _told(
    found: Diagnosis,
    sizes: Sequence[Size],
    read: Mapping[str, Any],
    asked: Mapping[str, Any],
    said: str,
) -> Diagnosis:
    """The diagnosis with a note on what the time left out."""
    cut = [
        f"{_shown(read[size.name])} of {size.whole or _shown(asked[size.name])} {size.what}"
        for size in sizes
        if read[size.name] != asked[size.name]
    ]
    settings = {"budget": said, "read": ", ".join(cut) or "everything that was asked for"}
    notes = (f"Read {', '.join(cut)} (stopped by the budget of {said}).",) if cut else ()
    return replace(found, notes=(*notes, *found.notes), settings={**found.settings, **settings})


def _shown(value: Any) -> str:
    """A number as it is; of several values, how many."""
    return str(len(value)) if isinstance(value, tuple) else str(value)


# --- what grows in each of the nine ---------------------------------------------------------------


def sizes_of(name: str, subject: Subject, options: Any) -> list[Size]:
    """The sizes of a diagnostic, the most important first."""
    own = _OWN[name](subject, options)
    if name == "drift":
        return own
    tokens = _tokens(subject, 3 if name == "utility" else FEWEST)
    drawn = name in ("utility", "fisher", "sensitivity", "stability")
    return [tokens, *([] if drawn else [_objective(subject)]), *own]


def _tokens(subject: Subject, rows: int) -> Size:
    lengths = [row.response_tokens for row in subject.train if row.response_tokens]
    asked = min(subject.tokens, sum(lengths))
    least = min(max(_TOKENS[0], rows * -(-sum(lengths) // len(lengths))), _TOKENS[1])
    size = number("tokens", asked, least, "response tokens")
    return replace(size, levels=(*size.levels[:-1], subject.tokens), whole=asked)


def _objective(subject: Subject) -> Size:
    name = "validation rows in the objective"
    return number("objective_rows", len(subject.validation), _ROWS, name)


def _validation(subject: Subject, options: Any) -> Size:
    """Of diagnostics that draw their validation rows themselves."""
    most = min(options.validation_rows, len(subject.validation))
    size = number("validation_rows", most, max(2 * FEWEST_ROWS, _ROWS), "validation rows")
    return replace(size, levels=(*size.levels[:-1], options.validation_rows), whole=most)


def _own(options: Any, name: str, least: int, what: str) -> Size:
    return number(name, getattr(options, name), least, what)


def _samples(subject: Subject, least: int) -> Size:
    return number("fisher_samples", subject.fisher_samples, least, "samples of the Fisher")


def _singles(subject: Subject, least: int, what: str) -> Size:
    return number("oracle_tokens", subject.oracle_tokens, least, what)


def _of_estimators(subject: Subject, options: Any) -> list[Size]:
    depth = len(subject.adapter.layers())
    scored = len(resolve_layers(subject.adapter, subject.config.layers))
    longest = max(len(row.input_ids) for row in subject.sample())
    windows = options.windows or tuple(w for w in windows_of(longest) if w is not None)
    every = options.layers or spread(depth, 8, scored)
    fewer = dict.fromkeys(spread(depth, most, scored) for most in (3, 4, 5, 6))
    levels = [] if options.layers else [some for some in fewer if len(some) < len(every)]
    return [
        _singles(subject, FEWEST, "tokens sent one by one"),
        _own(options, "draws", 100, "bootstrap samples of each interval"),
        Size("layers", (*levels, options.layers), "numbers of scored layers", len(every)),
        _as_asked(thinned("windows", windows, 2, "windows"), options),
        _own(options, "repeats", 1, "timings of each computation"),
        _own(options, "cost_rows", 1, "rows of the batch that is priced"),
    ]


def _of_utility(subject: Subject, options: Any) -> list[Size]:
    kept = (options.learning_rate,)
    return [
        _singles(subject, 3 * FEWEST, "tokens left out one by one"),
        _own(options, "groups", FEWEST, "groups of tokens"),
        _own(options, "validation_tokens", 200, "validation tokens of each re-evaluation"),
        _own(options, "warmup", 8, "steps that fill the optimizer's state"),
        _own(options, "sweep_tokens", 2, "tokens left out at each step size"),
        _as_asked(thinned("step_sizes", options.etas, 3, "step sizes", kept), options),
    ]


def _of_fisher(subject: Subject, options: Any) -> list[Size]:
    return [
        _own(options, "rows", FEWEST, "rows of each retention set"),
        _samples(subject, 24),
        _own(options, "max_new_tokens", 12, "tokens of a sampled response"),
        thinned("sizes", options.sizes, 1, "numbers of samples whose Fishers are compared"),
    ]


def _of_sensitivity(subject: Subject, options: Any) -> list[Size]:
    depth = len(subject.adapter.layers())
    scored = len(resolve_layers(subject.adapter, subject.config.layers))
    layers = layer_choices(options.layers, depth, None)
    must = ("label", "direct")
    return [
        _validation(subject, options),
        *([] if subject.config.objective == "adaptation" else [_samples(subject, 24)]),
        thinned("estimators", options.estimators, 3, "estimators", must),
        _as_asked(thinned("layers", layers, 2, "numbers of scored layers", (scored,)), options),
        thinned("windows", options.windows, 2, "windows"),
        _own(options, "repeats", 1, "timings of each setting"),
    ]


def _of_stability(subject: Subject, options: Any) -> list[Size]:
    parts = 0 if subject.config.objective == "adaptation" else options.fisher_parts
    some = dict.fromkeys((options.precisions[:2], options.precisions))
    return [
        _validation(subject, options),
        *([_samples(subject, 2 * parts)] if parts else []),
        Size("precisions", tuple(some), "precisions"),
    ]


def _as_asked(size: Size, options: Any) -> Size:
    """The last level is the option itself, which may leave the choice to the diagnostic."""
    asked = getattr(options, size.name)
    return replace(size, levels=(*size.levels[:-1], asked), whole=len(size.levels[-1]))


def _of_value_propagation(_: Subject, options: Any) -> list[Size]:
    return [_own(options, "pairs", 500, "pairs of positions in each layer and head")]


def _of_heatmap(*_: Any) -> list[Size]:
    return []


def _of_coverage(_: Subject, options: Any) -> list[Size]:
    return [
        _own(options, "draws", 50, "random selections"),
        _own(options, "points", 200, "tokens in the picture"),
    ]


def _of_drift(_: Subject, options: Any) -> list[Size]:
    return [_own(options, "probes", 16, "rows of each set")]


_OWN: Mapping[str, Callable[[Subject, Any], list[Size]]] = {
    "estimators": _of_estimators,
    "utility": _of_utility,
    "value-propagation": _of_value_propagation,
    "fisher": _of_fisher,
    "heatmap": _of_heatmap,
    "coverage": _of_coverage,
    "drift": _of_drift,
    "sensitivity": _of_sensitivity,
    "stability": _of_stability,
}
"""What each of the nine has beside tokens and the objective."""
