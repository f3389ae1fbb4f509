"""The page about a race: curves of the arms with intervals, the verdict, its cost and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from alphatoken.diagnose.diagnosis import Table
from alphatoken.diagnose.figures import Figure, Guide, draw
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import ConfigError
from alphatoken.race.arms import ALL
from alphatoken.race.decision import Difference
from alphatoken.race.rows import counted_rows
from alphatoken.race.runner import NATS_A_TOKEN, RaceResult, RaceState
from alphatoken.score.page import (
    Section,
    interval,
    number,
    pictures_html,
    render_page,
    setting_text,
    table_html,
)
from alphatoken.support.storage import write_text

PAGE = "race.html"
"""Its file, in the run's output folder."""

LIMITS = (
    "A look early in a run says little about its end: an arm that is ahead at the last look may be "
    "behind at the last step. Later looks say more and cost more.",
    "The choosing rows are rows of the target, and few. What else the model learns or forgets, "
    "they do not show; retention rows are a second column for what it knew before.",
    "The intervals rest on independent rows and on Student's t. Where a few rows have most of the "
    "tokens they are too narrow.",
)


def verdict(result: RaceResult) -> str:
    """What the race came to, in a few sentences: who goes on, and what is known of every arm."""
    state, outcome = result.state, result.outcome
    if not outcome.differences:
        return "No look is complete yet."
    others = [name for name in state.settings["arms"] if name not in (ALL, outcome.winner)]
    # Arms that were measured at the last look first.
    others.sort(key=lambda name: name not in outcome.differences[-1])
    step = f"step {state.looks[len(outcome.differences) - 1]} of {state.steps}"
    of_others = "; ".join(_told(result, name) for name in others)
    if outcome.winner is None:
        return f"After the look at {step}: {of_others}."
    if outcome.winner == ALL:
        return _all_goes_on(result, step, of_others)
    won = outcome.differences[-1][outcome.winner]
    of_pairs = state.unit != NATS_A_TOKEN
    lower = "" if of_pairs else f" (perplexity {lower_perplexity(won.value)} lower)"
    return (
        f"'{outcome.winner}' wins: at {step} its loss on {_choosing(state)} differs from that of "
        f"'all' by {_written(won)} {state.unit}{lower}, and {_together(state)}."
        + (f" Of the others: {of_others}." if others else "")
    )


def _all_goes_on(result: RaceResult, step: str, of_others: str) -> str:
    """The verdict where no arm won: the others are known to be worse, or no difference was seen."""
    state, outcome = result.state, result.outcome
    together = _together(state).capitalize()
    rows, beside = _choosing(state), f"Beside 'all', in {state.unit}: {of_others}. {together}."
    last = outcome.differences[-1]
    if len(outcome.left_at) == len(state.settings["arms"]) - 1:
        return f"'all' wins: by {step} every other arm has left the race, on {rows}. {beside}"
    if any(one.high < 0 for one in last.values()):
        return (
            f"'all' goes on: at {step} no arm is better on {rows} and no worse on the retention "
            f"rows. {beside}"
        )
    return (
        f"Undecided: at {step} no arm is better than 'all' on {rows} beyond its interval, so 'all' "
        f"goes on. {beside} A longer race or more choosing rows would see smaller differences."
    )


def _choosing(state: RaceState) -> str:
    return f"{state.settings['rows']['choosing']['rows']} choosing rows"


def _together(state: RaceState) -> str:
    together = f"{1 - state.settings['level']:.3g}".rstrip("0").rstrip(".")
    return f"all intervals of the race hold together with probability {together}"


def _told(result: RaceResult, name: str) -> str:
    """What is known of an arm, at the last look that it was measured at."""
    outcome, state = result.outcome, result.state
    if name in state.failures:
        return f"'{name}' failed"
    last = len(outcome.differences) - 1
    look = outcome.left_at.get(name, last)
    one = outcome.differences[look][name]
    if one.low <= 0 <= one.high and outcome.winner == ALL:
        if one.low == one.high:
            return f"'{name}' does as 'all' does"
        return f"'{name}' could be {number(-one.low, 2)} better or {number(one.high, 2)} worse"
    standing = _standing(one)
    if look < last:
        standing += f", left at step {state.looks[look]}"
    elif one.high < 0 and state.settings["keep_retention"]:
        forgets = outcome.retention[look][name].low > 0
        standing += ", but worse on the retention rows" if forgets else ""
    return f"'{name}' {_written(one)} ({standing})"


def _standing(one: Difference) -> str:
    """What an interval says of an arm beside 'all'."""
    return "better" if one.high < 0 else "worse" if one.low > 0 else "no difference seen"


def lower_perplexity(difference: float) -> str:
    """By which share exp of a mean loss is lower where the loss differs by so many nats.

        1 - exp(d)

    >>> lower_perplexity(-0.006), lower_perplexity(-0.14)
    ('0.6 %', '13 %')
    """
    return f"{-100 * math.expm1(difference):.2g} %"


def _written(one: Difference) -> str:
    return interval(one.value, one.low, one.high)


def write_race_page(
    path: Path, result: RaceResult, command: str = "", *, trained: bool = False
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: of the file.
        result: after any of its looks.
        command: that goes on with the run; once it is trained, one that trains as the winner
            does without a race, or "".
        trained: whether the winner has been trained to the end, into the folder of the page.
    """
    state, outcome = result.state, result.outcome
    columns = [("choosing", outcome.differences), ("retention", outcome.retention)]
    sections = [_column(state, name, looks) for name, looks in columns if looks]
    sections += [
        _cost(result, trained),
        Section("limits", "What a race does not say", remarks=LIMITS),
    ]
    html = f'<code class="command">{escape(command)}</code>' if command else ""
    if trained:
        end = f"'{result.winner}' was trained to step {state.steps}: {path.parent}"
        remarks = [end, *(["To train this way without a race:"] if command else [])]
        sections.append(Section("command", "The trained model", remarks=remarks, html=html))
    elif command:
        sections.append(Section("command", "To go on with the run", html=html))
    digests = {"rows", "start", "run"}
    settings = {n: value for n, value in state.settings.items() if n not in digests}
    counts = [counted_rows(name, own) for name, own in state.settings["rows"].items()]
    page = render_page(
        "A race of short runs",
        verdict(result),
        sections,
        rows=[f"{' and '.join(counts)}, which no arm trains on or values against."],
        settings=settings,
    )
    write_text(path, page)


def _column(state: RaceState, name: str, looks: Sequence[dict[str, Difference]]) -> Section:
    """Curves and table of one set of rows."""
    records = list(_records(state, name, looks))
    table = Table.of(f"race-{name}", f"Difference from 'all' on the {name} rows", records)
    note = ""
    try:
        drawing = draw(
            Figure(
                kind="lines",
                key=f"race-{name}",
                table=table,
                title=f"Loss on the {name} rows, minus that of 'all'",
                caption=f"{state.unit.capitalize()}, with the intervals that hold together over "
                "the race. Below 0 an arm is better than training on every token.",
                x="step",
                y="difference",
                series="arm",
                guides=(Guide(0.0, "y", "all"),),
                ylabel=state.unit,
                limits=((0, None), None),  # a single look would have an axis around it alone
            )
        )
        picture = pictures_html(
            {drawing.key: (drawing.title, drawing.caption, drawing.svg, drawing.alt)}
        )
    except ConfigError as missing:  # matplotlib, which is an extra
        picture, note = "", str(missing)
    if before := state.before.get(name):
        loss = _mean(before, state.tokens[name])
        first = {"step": 0, "arm": "before training", "shown": number(None), "loss": loss}
        records.insert(0, first)
    columns: list[Any] = [
        ("step", "number", [str(one["step"]) for one in records]),
        ("arm", "words", [str(one["arm"]) for one in records]),
        # On a narrow screen the first columns are in view: what decides is one of them.
        ("difference", "number", [one["shown"] for one in records]),
        ("loss", "number", [number(one["loss"], 4) for one in records]),
        ("loss of 'all'", "number", [number(one.get("loss_of_all"), 4) for one in records]),
        ("standard error", "number", [number(one.get("error"), 2) for one in records]),
    ]
    html = picture + table_html(columns, f"Differences on the {name} rows")
    return Section(name, f"{name.capitalize()} rows", html=html, notes=[note] if note else [])


def _records(
    state: RaceState, name: str, looks: Sequence[dict[str, Difference]]
) -> Iterator[dict[str, Any]]:
    tokens = state.tokens[name]
    for step, differences in zip(state.looks, looks, strict=False):
        losses = state.losses[str(step)]
        for arm, one in differences.items():
            yield {
                "step": step,
                "arm": arm,
                "difference": Estimate(one.value, one.low, one.high, len(tokens)),
                "error": one.error,
                "loss": _mean(losses[arm][name], tokens),
                "loss_of_all": _mean(losses[ALL][name], tokens),
                "shown": _written(one),
            }


def _mean(losses: Sequence[float], tokens: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(losses, tokens, strict=True)) / sum(tokens)


def cost(result: RaceResult) -> str:
    """What the arms that did not win have cost, in a sentence."""
    by_arm, seconds = result.state.steps_taken, result.state.seconds
    lost = [name for name in by_arm if name != result.winner]
    steps, spent = sum(by_arm[name] for name in lost), sum(seconds.get(name, 0.0) for name in lost)
    share = steps / result.state.steps
    return (
        f"The arms that do not go on took {steps} steps ({share:.0%} of a whole run) and, with "
        f"their values, {spent:.0f} seconds."
    )


def _cost(result: RaceResult, trained: bool) -> Section:
    state, outcome, by_arm = result.state, result.outcome, result.state.steps_taken
    fates = {}
    for name in by_arm:
        left = outcome.left_at.get(name)
        fates[name] = "runs" if left is None else f"left at step {state.looks[left]}"
        if outcome.winner is not None and left is None:
            goes_on = "trained to the end" if trained else "goes on"
            one = outcome.differences[-1].get(name)
            standing = "does not go on" if one is None else _standing(one)
            fates[name] = goes_on if name == outcome.winner else standing
        if name in state.failures:
            fates[name] = f"failed: {state.failures[name]}"
    columns: list[Any] = [
        ("arm", "words", list(by_arm)),
        ("outcome", "words", list(fates.values())),
        ("options", "words", [setting_text(state.settings["arms"][name]) for name in by_arm]),
        ("steps", "number", [str(steps) for steps in by_arm.values()]),
        ("seconds", "number", [f"{state.seconds.get(name, 0.0):.0f}" for name in by_arm]),
    ]
    remarks = [cost(result)] if outcome.winner else []
    return Section("arms", "Arms and cost", remarks=remarks, html=table_html(columns, "Arms"))
