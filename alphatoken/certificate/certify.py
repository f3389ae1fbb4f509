"""A certificate on the user's own model: every number of a scorer against an oracle.

The oracle builds scope, labels, G, V, P, lambda and M anew from what the user gave
(``certificate.expected``). Every component of ``Scorer.score``, of its total alone and of
``Scorer.observe`` is then compared entry by entry, relative to that entry's own absolute terms, by
one table of tolerances. What is off is named: component, token, place.

Values along a walk are compared with the losses of a copy that plain torch trains.

What an estimator approximates is certified to be what its definition says. How far that lies from
the exact causal value is the diagnostic ``value-propagation``'s, how values rank ``estimators``'.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alphatoken.certificate.expected import SIDES, Entry, Expected
from alphatoken.certificate.expected_walk import ExpectedWalk
from alphatoken.config import WALK
from alphatoken.direction.algebra import Direction
from alphatoken.errors import AlphaTokenError, InputError, UnsupportedError
from alphatoken.estimate.captured import Captured, ColumnSums
from alphatoken.estimate.estimator import Estimator
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import to_token_index
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import adapter_remedy
from alphatoken.oracle.composite import read_drift
from alphatoken.scorer import Scorer
from alphatoken.support.progress import ProgressSink, Tracker
from alphatoken.values import Certificate, Check, TokenValues


def certify(
    scorer: Scorer,
    batch: Mapping[str, Any],
    *,
    tokens: int = 8,
    seed: int = 0,
    token_weights: Tensor | None = None,
    step_weights: Tensor | None = None,
    fisher_file: str | os.PathLike[str] | None = None,
    progress: bool | ProgressSink | None = None,
) -> Certificate:
    """Check a scorer on ``batch``; see ``Certificate``. The model is left as found.

    Cost: a forward and a backward for each validation batch, two or three of both for ``batch``,
    and one backward for each sampled token; besides three scorings. ``progress`` counts the sampled
    tokens. Of a walk: its steps twice more, on copies, and a few forwards; ``progress`` counts
    steps.

    Raises:
        InputError: fewer than one token. UnsupportedError: see ``Scorer.verify``.
    """
    if tokens < 1:
        raise InputError("tokens must be at least 1", got=repr(tokens))
    arguments = scorer.arguments
    if arguments.reduce is not None or arguments.sharding is not None:
        raise UnsupportedError(
            "a certificate needs whole weights and gradients in one process",
            got="a scorer with sharding=... or reduce=...",
            why="the oracle builds everything anew, from what this process was given",
            remedy="build a Scorer without them, on the whole model and validation set",
        )
    start = time.monotonic()
    weights = {"token_weights": token_weights, "step_weights": step_weights}
    by_way = _ways(scorer, batch, weights)
    if scorer.estimator.cache.outdated:
        raise UnsupportedError(
            "a walk that began at other weights cannot be certified",
            got="weights that have changed since the walk was taken",
            why="the oracle would have to walk from there, and those weights are gone",
            remedy="scorer.refresh(), which takes a new walk; or verify before you train",
        )
    if fisher_file is not None:
        arguments = replace(arguments, retention=read_drift(fisher_file))
    walks = arguments.config.estimator == WALK
    expected = (ExpectedWalk if walks else Expected)(arguments, batch, **weights)
    sampled = _sample(expected.mask, tokens, seed)
    count = 0 if walks else int(sampled.sum())
    work = 2 * arguments.config.walk_steps if walks else count
    tracker = Tracker("Certificate", work, progress)
    expected.compute(sampled, tracker)
    tracker.report(work)
    row, tolerance = expected.arithmetic
    stated = max(values.error for values in by_way.values())
    # What a walk moved is seen in every loss; its way is no direction that anything is read along.
    direction = None if walks else scorer.direction_for(batch, step_weights=step_weights)
    checks = [
        replace(c, tolerance=tolerance + 3 * stated * (c.component in expected.components))
        for c in _checks(batch, direction, by_way, expected)
    ]
    if not walks and not all(check.passed for check in checks):
        # The fault that is to be named may stop this as well.
        with suppress(AlphaTokenError, RuntimeError, LookupError):
            inside = values_by_parameter(scorer.estimator, batch, **weights)
            checks = [one if one.passed else _named(one, inside, expected) for one in checks]
    return Certificate(
        estimator=arguments.config.estimator,
        checks=tuple(checks),
        tokens=count,
        compared=int(expected.compared.sum()),
        batch_tokens=int(expected.mask.sum()),
        arithmetic=row,
        seconds=time.monotonic() - start,
        dtype=str(next(iter(expected.scope.parameters.values())).dtype).removeprefix("torch."),
        derivative=by_way["score"].derivative,
        stated_error=stated,
        rounding=expected.rounding,
        remedy=adapter_remedy(expected.adapter),
    )


def _sample(mask: Tensor, tokens: int, seed: int) -> Tensor:
    """(b, t) True at the sampled response tokens; its own generator."""
    candidates = mask.flatten().nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    picked = candidates[torch.randperm(len(candidates), generator=generator)[:tokens]]
    chosen = torch.zeros(mask.numel(), dtype=torch.bool)
    chosen[picked] = True
    return chosen.view(mask.shape)


def _ways(
    scorer: Scorer, batch: Mapping[str, Any], weights: Mapping[str, Tensor | None]
) -> dict[str, TokenValues]:
    """Values that the user gets, by every way to them."""
    by_way = {
        "score": scorer.score(batch, components=True, **weights),
        "score, total alone": scorer.score(batch, components=False, **weights),
    }
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with evaluation_mode(scorer.adapter.model), scorer.observe() as observed:
        with torch.enable_grad():
            scores = scorer.adapter.forward(inputs)
        by_way["observe"] = observed.values(scores, batch["labels"], components=True, **weights)
    return by_way


# --- comparing -----------------------------------------------------------------------------------


def _checks(
    batch: Mapping[str, Any],
    direction: Direction | None,
    by_way: Mapping[str, TokenValues],
    expected: Expected,
) -> list[Check]:
    """The worst entry of each component over all ways; tolerances are filled in later."""
    every = [
        check
        for way, values in by_way.items()
        for check in _of_values(way, values, batch, expected)
    ]
    every += [] if direction is None else _of_direction(direction, expected)
    every.append(Check("attention", expected.attention_error, 0.0))
    every.append(Check("oracle", expected.own_error, 0.0))
    worst: dict[str, Check] = {}
    for check in every:
        before = worst.setdefault(check.component, check)
        if not check.error <= before.error:  # also for NaN
            worst[check.component] = check
    return list(worst.values())


def _of_values(
    way: str, values: TokenValues, batch: Mapping[str, Any], expected: Expected
) -> Iterator[Check]:
    mask = values.mask.cpu()
    yield Check("mask", 0.0 if torch.equal(mask, expected.mask) else math.inf, 0.0, way)
    alone = way == "score, total alone"
    for name, entry in expected.components.items():
        got = getattr(values, name)
        if (got is None) != (entry is None or (alone and name != "total")):
            yield Check(name, math.inf, 0.0, f"{way}, missing or not asked for")
        elif got is not None and entry is not None:
            yield _of_tokens(name, way, got, entry, batch, expected)
    rows = values.unassigned.double().cpu()
    row, error = _worst(rows, expected.unassigned.value, expected.unassigned.scale)
    yield Check(
        "unassigned", error, 0.0, f"row {row} ({way})", None, float(rows[row]),
        float(expected.unassigned.value[row]),
    )  # fmt: skip
    for name, (value, scale) in expected.sums.items():
        got = getattr(values, name)
        if got is not None:
            total = float(got.double().sum())
            _, error = _worst(*(torch.tensor([x]) for x in (total, value, scale)))
            yield Check(name, error, 0.0, f"its sum over all tokens ({way})", None, total, value)


def _of_tokens(
    name: str,
    way: str,
    got: Tensor,
    entry: Entry,
    batch: Mapping[str, Any],
    expected: Expected,
) -> Check:
    """Every compared token, and every place that is no response token, which must hold 0."""
    values = got.detach().double().cpu()
    compared = expected.compared | ~expected.mask
    places = compared.nonzero()
    at, error = _worst(values[compared], entry.value[compared], entry.scale[compared])
    row, token = places[at].tolist()
    where = f"row {row}, token {token} (id {int(batch['input_ids'][row, token])}; {way})"
    return Check(
        name, error, 0.0, where, None, float(values[row, token]), float(entry.value[row, token])
    )


def _worst(values: Tensor, expected: Tensor, scale: Tensor) -> tuple[int, float]:
    """(index, error) of the entry that is farthest off, relative to its own scale.

    Rounding errors differ in sign and size from entry to entry, a fault shows in many: four times
    the root mean square over the entries counts where it is more.
    """
    away = (values.double() - expected.double()).abs()
    relative = torch.where(away == 0, 0.0, away / scale.double())
    relative = relative.masked_fill(relative.isnan(), torch.inf)
    index, several = int(relative.argmax()), relative[scale > 0]
    usual = float(several.square().mean().sqrt()) if len(several) >= _SEVERAL else 0.0
    return index, max(float(relative[index]), 4 * usual)


_SEVERAL = 6
"""Entries from which on their root mean square says something."""


def _of_direction(direction: Direction, expected: Expected) -> Iterator[Check]:
    """The scorer's own M against the oracle's, parameter by parameter."""
    owners = {alias: name for name, aliases in expected.names.items() for alias in aliases}
    for name in SIDES:
        matrices, exact = getattr(direction, name) or {}, expected.direction.get(name, {})
        keys = {owners.get(n, n): n for n in matrices}
        missing = set(keys) ^ set(exact)
        where = f"{name}, {min(missing)}" if missing else ""
        yield Check("scope", math.inf if missing else 0.0, 0.0, where)
        # A parameter whose own gradient nearly cancels is measured beside the others.
        sizes = [float(m.norm()) for m in exact.values()]
        usual = math.hypot(*sizes) / max(1, len(sizes)) ** 0.5
        for parameter, m in exact.items() if not missing else ():
            size = float(m.norm()) + usual
            away = float((matrices[keys[parameter]].double() - m).norm())
            error = away / size if size > 0 else (math.inf if away else 0.0)
            yield Check(f"direction ({name})", error, 0.0, "", parameter)


def _named(check: Check, inside: Mapping[str, Mapping[str, Tensor]], expected: Expected) -> Check:
    """A failed check of tokens with the linear map that most of the difference comes from."""
    entry = expected.components.get(check.component)
    if entry is None or check.parameter is not None:
        return check
    sides = [s for s in SIDES if check.component in ("total", s) or check.component.startswith(s)]
    away: dict[str, float] = {}
    for component, parts in inside.items():
        side, _, part = component.partition("_")
        if side not in sides or (
            check.component.startswith(f"{side}_") and component != check.component
        ):
            continue
        wanted = expected.components.get(component)
        for parameter, values in parts.items():
            if wanted is not None and parameter in wanted.by:
                moved = values if not part else to_token_index(values)
                difference = (moved - wanted.by[parameter])[expected.compared].abs()
                away[parameter] = away.get(parameter, 0.0) + float(difference.sum())
    worst = max(away, key=lambda name: away[name], default=None)
    return check if worst is None or away[worst] == 0 else replace(check, parameter=worst)


def values_by_parameter(
    estimator: Estimator[Any],
    batch: Mapping[str, Any],
    token_weights: Tensor | None,
    step_weights: Tensor | None,
) -> dict[str, dict[str, Tensor]]:
    """The scorer's own values by component, lambda not applied, and by linear map: (b, t) each.

    By position of use; for label by parameter and by token. These numbers decide nothing: they name
    the place of a value that is off.
    """
    scored, adapter = estimator.scored, estimator.adapter
    checked, token, step = estimator.read(batch, token_weights, step_weights)
    direction = estimator.prepare(checked)
    with estimator.forward(checked, token, step) as recording:
        sides = estimator.at_step(recording, direction).sides(components=True)
        present = {n: s for n, s in zip(("adaptation", "stability"), sides, strict=True) if s}
        if not isinstance(estimator, Captured):
            return {
                name: {
                    parameter: label_values(
                        adapter, checked, {parameter: m}, first=scored.first or 0
                    ).double().cpu()
                    for parameter, m in side.items()
                }
                for name, side in present.items()
            }  # fmt: skip
        recorder, _ = recording.recorded
        sums = ColumnSums(recorder, list(present.values()), scored.names)
        estimator.errors(recording, sums.add)
        by_place: dict[str, dict[str, Tensor]] = {}
        for name, parts in zip(present, sums.by_use, strict=True):
            for (part, index), value in parts.items():
                linear = recorder.linears[index].linear.name
                before = by_place.setdefault(f"{name}_{part}", {})
                zero = torch.zeros(checked.labels.shape, dtype=torch.float64)
                before[linear] = before.get(linear, zero) + value.detach().double().cpu()
        return by_place
