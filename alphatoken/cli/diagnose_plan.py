"""Plans of a run of ``alphatoken diagnose``: made, refused, read again, and what a record says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alphatoken.cli.diagnose_options import Request
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.fidelity.budget import Plan, Work, clock, fit, same_ahead
from alphatoken.fidelity.prices import Counts, Prices, measured
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.workloads import WORKLOADS, resized

__all__ = [
    "BudgetError",
    "measured_prices",
    "plan_settings",
    "planned",
    "plans_of",
]


class BudgetError(ConfigError):
    """Sizes and a budget that were both given, and contradict each other."""


def measured_prices(subject: Subject) -> Prices:
    """Prices of the subject's model, with their progress."""
    tracker = subject.tracker("Prices of one row", 1)
    tracker.report(0)
    prices = measured(subject)
    tracker.report(1)
    return prices


def plans_of(
    names: Sequence[str], request: Request, subject: Subject, prices: Prices
) -> tuple[dict[str, Plan], dict[str, AlphaTokenError]]:
    """Plans of these diagnostics, and why others of them have none.

    What several do first, the fine-tuning of a copy, is done once; each is charged its part.
    """
    works: dict[str, Work] = {}
    plans: dict[str, Plan] = {}
    refused: dict[str, AlphaTokenError] = {}
    for name in names:
        try:
            works[name] = WORKLOADS[name](Counts(subject, prices), request.options[name])
        except AlphaTokenError as error:
            refused[name] = error
    sharers = max(1, sum(work.ahead is not None for work in works.values()))
    for name, work in works.items():
        try:
            plans[name] = _plan_of(name, work, request, prices, sharers)
        except AlphaTokenError as error:
            refused[name] = error
    return same_ahead(plans), refused


def _plan_of(name: str, work: Work, request: Request, prices: Prices, sharers: int) -> Plan:
    """The plan of one diagnostic.

    A size that the command line gives stays. Where it does not fit a budget that is given as well,
    that is refused; the default budget gives way, and the plan says what it will take.

    Raises:
        BudgetError: sizes and budget were both given, and do not fit.
        AlphaTokenError: what the diagnostic itself would refuse.
    """
    extra = {unit: measure() for unit, measure in work.measured.items()}
    seconds = {**prices.seconds, **extra}
    given = request.given[name]
    plan = fit(work, seconds, request.budget, given, sharers)
    if plan.fits or not request.shared.budget:
        return plan
    held = sorted(given & set(plan.sizes))
    freed = fit(work, seconds, request.budget, sharers=sharers)
    if freed.seconds < plan.seconds:
        raise BudgetError(
            f"the sizes given do not fit the budget given ({name})",
            got=f"{', '.join(held)}: about {clock(plan.seconds)} with all else at its least, "
            f"budget {clock(request.budget or 0)}",
            why="both were asked for, and neither is changed silently",
            remedy=f"--budget {math.ceil(plan.seconds)}s, --budget none, or leave a size to it",
        )
    return plan


def planned(subject: Subject, options: Any, record: Mapping[str, Any]) -> tuple[Subject, Any]:
    """Subject and options with the sizes of a plan's record, also of one read from a file."""
    sizes = {
        name: tuple(value) if isinstance(value, (list, tuple)) else value
        for name, value in record["sizes"].items()
    }
    return resized(subject, options, sizes)


def plan_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a diagnosis says of its plan among its settings."""
    cut = {name: value for name, value in record["sizes"].items() if value != record["asked"][name]}
    shown = ", ".join(f"{name} {_shown(value)}" for name, value in cut.items())
    budget = record["budget"]
    return {
        "budget": "none" if budget is None else clock(budget),
        "smaller than asked for": shown or "nothing",
    }


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
