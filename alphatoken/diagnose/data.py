"""Diagnostic of rows before any training: do they differ from the rows that are trusted?

The trusted rows (--validation_file) are split in halves by the seed. A walk of AdamW steps is taken
on one half; the other half, the reference, is what the training rows are compared with, since rows
that a walk was taken on look better than any others. Each row has the mean walk value of its
response tokens (by how many nats their loss falls along the walk), their mean loss, and what its
prompt does for them (their mean loss beside the prompt of a trusted row, less that). Permutation
tests over rows on the first two decide together, at a level of 5 %. Rows of another kind (another
task, another style) differ as rows with wrong words do: which it is, the rows of highest loss show.

All rows are read, up to --train_rows and --validation_rows; --budget and --tokens do not bound it.
It costs a walk and three forwards of each row. The values are written to data/values and
data/reference as `score --value walk` writes them, and --resume keeps the parts that are
finished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from alphatoken.config import WALK, ScorerConfig, walk_words
from alphatoken.data import Example
from alphatoken.data.encode import prompt_tokens
from alphatoken.data.source import number_of
from alphatoken.data.survey import said_places
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import DOUBTFUL, GOOD, Diagnosis, Table
from alphatoken.diagnose.figures import Figure
from alphatoken.diagnose.prompts import prompt_gains
from alphatoken.diagnose.statistics import (
    FEWEST,
    Estimate,
    Numbers,
    PermutationTest,
    difference_of_means,
    permutation_test,
)
from alphatoken.diagnose.subject import Subject, conclude
from alphatoken.diagnose.valuing import scorer_for, with_estimator
from alphatoken.errors import ConfigError, DataError, counted, short
from alphatoken.score.meaning import Meaning
from alphatoken.score.results import FEWEST_OF_VERDICT
from alphatoken.score.run import score_rows
from alphatoken.score.summary import HIGHEST, HIGHEST_LOSS, LOWEST, end_places
from alphatoken.score.value_page import row_list, shown_end
from alphatoken.score.values import LOSS, ScoredExample, read_values, write_values
from alphatoken.scorer import Scorer
from alphatoken.support.coloured import full_scale
from alphatoken.support.options import option

LEVEL = 0.05
"""Chance that rows which are exchangeable with the trusted ones are said to differ, at most."""

FEWEST_TRUSTED = FEWEST_OF_VERDICT
"""Fewest trusted rows: four for the walk, and four to compare with."""

JUDGED, TRUSTED = "your rows", "trusted rows"
"""The two groups of rows, as tables and figures name them."""

ALIKE, UNCLEAR, DIFFERENT = "alike", "unclear", "different"
"""What the tests come to."""

MEASURES = {"value": "mean walk value", "loss": "mean loss"}
"""Column of a row -> what it is, in nats; each is tested."""

_FOLDERS = {JUDGED: "values", TRUSTED: "reference"}
_PART = 64  # rows of a value file, as `score` has them of up to 65,536 rows


MOST_UNSEEN = 0.25
"""Share of rows of another kind that may go unnoticed where rows are said to look alike."""

SHOWN = 3
"""Rows of either end whose text is shown in colours."""

NAMED = 40
"""Rows beyond the reference that the answer names for one measure; the page has all."""

RECOMMENDED = ("walk-80", "validation-mix")
"""Arms of the recipe ``recommended``, which give way where others are named."""
NOT_ODD = "without-odd-rows"
"""The arm without the rows that no reference row reaches by its loss or its prompt."""

TRAIN_BATCH, EPOCHS = 8, 3
"""Training rows of a step, and passes over all of them, that TRL takes where none are named."""
_LOOK = "Look at the rows of highest loss and of lowest value."
FIRST_LOOK = 20
"""Step before which no race looks, unless it is told to."""
CHOOSING = 8
"""Rows that a race sets aside at least to choose by, unless it is told how many."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostic ``data``."""

    ends: int = option(10, "rows to list of lowest, of highest value, of highest loss", at_least=1)


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Compare the training rows with the half of the trusted rows that no walk has seen.

    Raises:
        DataError: fewer than 8 trusted rows, or fewer than 8 rows to judge.
        ConfigError: a folder is given for the values, and pyarrow is missing; or matplotlib is.
    """
    options = options or Options()
    if subject.folder is not None and find_spec("pyarrow") is None:
        raise ConfigError("value files need pyarrow", remedy="pip install 'alphatoken[data]'")
    walked, groups, notes, more = _groups(subject)
    notes += more
    config = with_estimator(subject.config, WALK)
    scorer = scorer_for(subject, rows=walked, config=config)
    scorer.pin("data")  # nothing is trained, so the weights need not be read to see it
    seconds = _take_walk(subject, scorer, groups)
    scored = {name: _scored(subject, scorer, name, rows) for name, rows in groups.items()}
    records = {name: [_record(name, one) for one in own] for name, own in scored.items()}
    _add_prompt_gains(subject, walked, groups, records)
    tests = {name: compare(records, name, subject.seed) for name in MEASURES}
    beyond = beyond_reference(records)
    for number, one in enumerate(records[JUDGED]):
        one["beyond"] = " and ".join(name for name, rows in beyond.items() if number in rows)
    answer = verdict(tests, len(groups[TRUSTED]))
    notes.append(_limits(tests, len(groups[TRUSTED])))
    batch, fits = subject.batch_size, race_batch(len(groups[JUDGED]), subject.batch_size)
    if answer != ALIKE and subject.words and fits < batch:
        notes.append(
            f"The race has batches of {fits} rows in place of {batch}, with which it would be over "
            f"before its first look, step {FIRST_LOOK}."
        )
    every = Table.of("data-rows", "Each row", [one for own in records.values() for one in own])
    ends = _ends(records[JUDGED], options.ends)
    doubts = doubts_of_walk(records[TRUSTED])
    said = rows_beyond(records, beyond)
    # Not by their values, which are of a walk on rows that a race may choose by.
    places = [one["place"] for one in records[JUDGED]]
    odd = {*beyond["loss"], *beyond["prompt"]}
    left = rows_to_leave_out(places, odd) if subject.words else ""
    command, takes = _next(subject, config, answer, walked, groups, left, seconds)
    return conclude(
        "data",
        subject,
        f"{_conclusion(tests, len(groups[TRUSTED]), said)} {doubts}".rstrip(),
        [
            _beyond_table(subject, groups[JUDGED], records[JUDGED], beyond),
            _tests_table(records, tests),
            _ends_table(subject, groups[JUDGED], records[JUDGED], ends),
        ],
        [_figure(every, name) for name in MEASURES],
        valued=groups[JUDGED],
        notes=notes,
        settings={
            **asdict(options),
            "estimator": WALK,
            "walk_steps": config.walk_steps,
            "walk_learning_rate": config.walk_learning_rate,
            "level": LEVEL,
        },
        next_command=command,
        next_time=takes,
        mark=GOOD if answer == ALIKE else DOUBTFUL,  # rows that differ need not be bad
        lists=_row_lists(subject, groups[JUDGED], scored[JUDGED], ends),
    )


def _next(
    subject: Subject,
    config: ScorerConfig,
    answer: str,
    walked: Sequence[Example],
    groups: Mapping[str, Sequence[Example]],
    left: str,
    seconds: float | None,
) -> tuple[str, str]:
    """The next command, and how long a race takes here by the ``seconds`` of the walk."""
    judged, batch, steps = groups[JUDGED], subject.batch_size, config.walk_steps
    trusted = len(walked) + len(groups[TRUSTED])
    beside = "" if subject.folder is None else _beside(subject.folder.parent)
    command = next_command(
        answer, subject.words, len(judged), trusted, batch, walk_words(config), beside, left
    )
    if answer == ALIKE or seconds is None or not command:
        return command, ""
    passes = race_passes(len(judged), batch, steps, 3 if left else 2)
    return command, time_in_words(passes * seconds_of_pass(seconds, steps, walked, judged, batch))


def next_command(
    answer: str,
    words: str,
    rows: int,
    trusted: int,
    batch: int = TRAIN_BATCH,
    walk: str = "",
    beside: str = "",
    left: str = "",
) -> str:
    """The command that does what the answer advises; "" where no command has named the rows.

    What a command line said of the ``walk`` is said to a race too. Its results go to a folder
    ``beside`` that of the diagnosis. One arm of a race leaves out the rows of the numbers ``left``.

    >>> next_command(ALIKE, "--train_file rows.jsonl", 400, 32, beside="out")
    'alphatoken sft --policy standard --train_file rows.jsonl --output_dir out-sft'
    """
    if not words:
        return ""
    if answer == ALIKE:
        command, kind = f"alphatoken sft --policy standard {words}{_sized(batch)}", "sft"
    else:
        command, kind = race_command(words + walk, rows, trusted, batch, left), "race"
    return f"{command} --output_dir {quote(f'{beside}-{kind}')}" if beside else command


def _beside(folder: Path) -> str:
    """The folder's path, to which an ending is put; of the current one, a name of its own."""
    return str(folder) if folder.name else "rows"


def race_command(
    words: str, rows: int, trusted: int, batch: int = TRAIN_BATCH, left: str = ""
) -> str:
    """The command of a race on so many training rows, of batches so small that it has a look.

    Of few trusted rows half choose: by default eight do, which may leave none to value against.
    With numbers of rows in ``left`` an arm beside those of the recipe leaves these out.

    >>> race_command("--train_file R", 400, 32)
    'alphatoken race --config recommended --train_file R'
    >>> race_command("--train_file R", 32, 8).removeprefix("alphatoken race --config recommended ")
    '--train_file R --per_device_train_batch_size 4 --choosing_rows 4'
    """
    more = _sized(race_batch(rows, batch))
    more += f" --choosing_rows {trusted // 2}" if trusted < 2 * CHOOSING else ""
    more += f" --arms {' '.join(RECOMMENDED)} {NOT_ODD}:without_rows={left}" if left else ""
    return f"alphatoken race --config recommended {words}{more}"


def rows_to_leave_out(places: Sequence[str], beyond: Collection[int]) -> str:
    """Numbers of rows that an arm of the race leaves out, as they are typed: those ``beyond``.

    "" where none is, or more than ``NAMED`` or than half of all rows are, or where rows are of
    several files, in which a number names no row.

    >>> rows_to_leave_out(["a.jsonl, line 2", "a.jsonl, line 3", "a.jsonl, line 9"], [2])
    '9'
    """
    files = {place.rpartition(" ")[0] for place in places}
    if len(files) != 1 or not 0 < len(beyond) <= min(NAMED, len(places) // 2):
        return ""
    return ",".join(str(number) for number in sorted(number_of(places[one]) for one in beyond))


def race_passes(rows: int, batch: int, walk: int, losers: int = 2) -> float:
    """Rows that a race of ``race_command`` trains on, at most, where a forward counts a third.

    With N steps of b rows in all, the last look at step L, and W steps of a walk:

        N (b + b / 2) + L b (losers + 1 / 3) + W b

    The arm with a trusted row more beside every two costs most where it wins; the ``losers`` leave
    at the last look, and one of them adds a forward to each of its steps.

    >>> round(race_passes(60, 8, 24), 1)
    853.3
    """
    size = race_batch(rows, batch)
    steps = -(-rows // size) * EPOCHS
    look = max(FIRST_LOOK, steps // 10)
    lost = look * size * (losers + 1 / 3)
    return steps * (size + max(1, size // 2)) + lost + walk * batch


def seconds_of_pass(
    seconds: float, steps: int, walked: Sequence[Example], judged: Sequence[Example], batch: int
) -> float:
    """Seconds in which a row to judge is trained on, by the walk's own ``steps``.

    A step of the walk takes ``len(walked) / ceil(len(walked) / batch)`` rows on average. Rows count
    by their tokens.
    """
    rows = steps * len(walked) / -(-len(walked) // batch)
    length, own = (np.mean([len(row.input_ids) for row in some]) for some in (judged, walked))
    return float(seconds / rows * length / own)


def time_in_words(seconds: float) -> str:
    """A time that is estimated, up to half as much again: what a step of TRL adds to one of a walk.

    >>> time_in_words(20), time_in_words(700), time_in_words(9000)
    ('1 to 2 minutes', '12 to 18 minutes', '2.5 to 3.8 hours')
    """
    minutes = max(1, round(seconds / 60))
    if minutes < 100:
        return f"{minutes} to {max(minutes + 1, round(1.5 * seconds / 60))} minutes"
    return f"{minutes / 60:.2g} to {minutes / 40:.2g} hours"


def race_batch(rows: int, batch: int) -> int:
    """Rows of a step with which a race has a look: so many, or halved until it has.

    >>> race_batch(400, 6), race_batch(45, 8), race_batch(15, 6)
    (6, 4, 1)
    """
    while batch > 1 and -(-rows // batch) * EPOCHS < FIRST_LOOK:
        batch //= 2
    return batch


def _sized(batch: int) -> str:
    return "" if batch == TRAIN_BATCH else f" --per_device_train_batch_size {batch}"


# --- rows -----------------------------------------------------------------------------------------


def halves(rows: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Split rows at random, each half in the order of the rows; the second has the odd one.

    Rows that share their prompt are in one half, the second where the first has no room for all.
    """
    of_prompt = list(_by_prompt(rows).values())
    first: set[int] = set()
    for number in np.random.default_rng(seed).permutation(len(of_prompt)).tolist():
        if len(first) + len(of_prompt[number]) <= len(rows) // 2:
            first.update(of_prompt[number])
    return (
        [row for place, row in enumerate(rows) if place in first],
        [row for place, row in enumerate(rows) if place not in first],
    )


def _without_copies(
    rows: Sequence[Example],
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], Example]:
    """Tokens and labels -> the first row that has them: a copy tells no more than the row."""
    distinct: dict[tuple[tuple[int, ...], tuple[int, ...]], Example] = {}
    for row in rows:
        distinct.setdefault((tuple(row.input_ids), tuple(row.labels)), row)
    return distinct


def _by_prompt(rows: Sequence[Example]) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> places of the rows that have it."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(prompt_tokens(row.input_ids, row.labels), []).append(place)
    return places


def require_rows(subject: Subject) -> list[str]:
    """Check that there are rows to judge, and trusted ones; sentences on those that are left out.

    Raises:
        DataError: fewer than 8 of either.
    """
    return _groups(subject)[2]


def _groups(
    subject: Subject,
) -> tuple[list[Example], dict[str, list[Example]], list[str], list[str]]:
    """Rows of the walk, rows to compare by group, what was left out, and notes on the others."""
    train, trusted = (
        [row for row in rows if row.response_tokens] for rows in (subject.train, subject.validation)
    )
    # A row on both sides would be compared with itself, and one that was walked on with the walk.
    distinct = _without_copies(trusted)
    of_trusted = {tokens for tokens, _ in distinct}
    others = [row for row in train if tuple(row.input_ids) not in of_trusted]
    kept, judged = list(distinct.values()), list(_without_copies(others).values())
    _require_enough(kept, judged)
    walked, reference = halves(kept, subject.seed)
    parted = {
        "training rows have no response": (subject.train, train),
        "training rows are among the trusted ones": (train, others),
        "training rows repeat another one": (others, judged),
        "trusted rows have no response": (subject.validation, trusted),
        "trusted rows repeat another one": (trusted, kept),
    }
    left_out = [note for what, rows in parted.items() if (note := _left_out(what, *rows))]
    enough = fewest_reference(LEVEL / len(MEASURES))
    if len(reference) < enough:
        left_out.append(
            f"{len(kept)} trusted rows are too few for the answer that rows look alike; it takes "
            f"{2 * enough}."
        )
    notes = []
    for name, rows in (("training", judged), ("reference", reference)):
        if shared := len(rows) - len(_by_prompt(rows)):
            notes.append(
                f"{counted(shared, f'{name} rows share the prompt of another one')}; the tests "
                "take all rows for independent, so their p may be too small."
            )
    notes.append(
        f"The walk was taken on {len(walked)} trusted rows; the other {len(reference)} are the "
        "reference."
    )
    return walked, {JUDGED: judged, TRUSTED: reference}, left_out, notes


def _left_out(what: str, rows: Sequence[Example], kept: Sequence[Example]) -> str:
    """A sentence on the rows that are not kept, the first few by their places; "" where all are.

    Those that are kept stand in the order of the rows.
    """
    staying, places = iter(kept), list[str]()
    coming = next(staying, None)
    for row in rows:
        if row is coming:
            coming = next(staying, None)
        else:
            places.append(row.row.place)
    told = counted(len(places), f"{what} and are left out")
    return f"{told}{said_places(places, len(places))}." if places else ""


def _require_enough(trusted: Sequence[Example], judged: Sequence[Example]) -> None:
    prompts = len(_by_prompt(trusted))
    if prompts < FEWEST_TRUSTED:
        of_prompts = f", of {prompts} prompts" if prompts < len(trusted) else ""
        raise DataError(
            "there are too few trusted rows",
            got=f"{len(trusted)} different ones with a response{of_prompts}",
            why="half of them are walked on, and the rows are compared with the other half",
            remedy=f"a --validation_file of {FEWEST_TRUSTED} rows or more; 32 see smaller "
            "differences",
        )
    if len(judged) < FEWEST:
        raise DataError(
            "there are too few rows to judge",
            got=f"{len(judged)} different ones with a response that are no trusted rows",
            why=f"a test over fewer than {FEWEST} rows says little",
            remedy="a --train_file of more rows",
        )


# --- values and losses ----------------------------------------------------------------------------


def _take_walk(
    subject: Subject, scorer: Scorer, groups: Mapping[str, Sequence[Example]]
) -> float | None:
    """Take the walk, of which no row's progress is part; its seconds, or None if none is needed."""
    folder = subject.folder
    numbers = [(group, n) for group, rows in groups.items() for n in range(-(-len(rows) // _PART))]
    if folder is not None and all(_path_of_part(folder, *one).exists() for one in numbers):
        return None
    start = time.monotonic()
    scorer.estimator.prepare()
    return time.monotonic() - start


def _nats(example: ScoredExample) -> tuple[Numbers, Numbers]:
    """Values and losses (n,) of the n response tokens."""
    value, loss = (
        np.asarray(example.values[key], float)[example.response] for key in ("total", LOSS)
    )
    return value, loss


def _record(group: str, example: ScoredExample) -> dict[str, Any]:
    """Where a row is, its mean value and loss, and its share of negative values."""
    value, loss = _nats(example)
    return {
        "rows": group,
        "row": example.row,
        "place": example.place,
        "tokens": len(value),
        "value": float(value.mean()),
        "loss": float(loss.mean()),
        "negative": float((value < 0).mean()),
        "beyond": "",
    }


def _add_prompt_gains(
    subject: Subject,
    walked: Sequence[Example],
    groups: Mapping[str, Sequence[Example]],
    records: Mapping[str, Sequence[dict[str, Any]]],
) -> None:
    """Put into each record what the row's prompt does, by the prompts of the rows of the walk."""
    rows = [row for own in groups.values() for row in own]
    every = [one for name in groups for one in records[name]]
    longest = max(len(row.input_ids) for row in (*walked, *rows))
    # In one call, so that draws are independent of each other over both groups.
    gains = prompt_gains(subject, rows, [one["loss"] for one in every], walked, longest)
    for one, gain in zip(every, gains, strict=True):
        one["prompt_gain"] = gain


def _scored(
    subject: Subject, scorer: Scorer, group: str, rows: Sequence[Example]
) -> list[ScoredExample]:
    """Values and losses of the rows, part by part; finished parts of the folder are read."""
    tracker = subject.tracker(f"Walk values of {group}", len(rows))
    tracker.report(0)
    scored: list[ScoredExample] = []
    for start in range(0, len(rows), _PART):
        part = rows[start : start + _PART]

        def report(share: float, start: int = start, size: int = len(part)) -> None:
            tracker.report(start + round(share * size))

        scored += _part_of(subject, scorer, group, start // _PART, part, report)
        tracker.report(start + len(part))
    return scored


def _path_of_part(folder: Path, group: str, number: int) -> Path:
    return folder / _FOLDERS[group] / f"part-{number:05d}.parquet"


def _part_of(
    subject: Subject,
    scorer: Scorer,
    group: str,
    number: int,
    rows: Sequence[Example],
    report: Callable[[float], None],
) -> list[ScoredExample]:
    size, ratio = subject.batch_size, subject.ratio
    if subject.folder is None:
        return list(score_rows(scorer, rows, size, ratio=ratio, report=report))
    path = _path_of_part(subject.folder, group, number)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_values(path, score_rows(scorer, rows, size, ratio=ratio, report=report))
    scored = list(read_values(path))
    if [(one.row, one.ids) for one in scored] != [(one.row.index, one.input_ids) for one in rows]:
        raise DataError(
            "a value file does not hold the rows that are judged",
            got=str(path),
            why="it was exchanged or changed since it was written",
            remedy="remove it and go on with --resume",
        )
    return scored


# --- the verdict ----------------------------------------------------------------------------------

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Group -> its records, one a row."""


@dataclass(frozen=True)
class Comparison:
    """The training rows beside the reference by one measure: difference of means, and its test."""

    difference: Estimate
    test: PermutationTest


def _columns(records: Records, measure: str) -> list[Numbers]:
    """A column of both groups; NaN where a row has no number."""
    groups = (records[group] for group in (JUDGED, TRUSTED))
    return [np.array([one[measure] for one in rows], float) for rows in groups]


def compare(records: Records, measure: str, seed: int) -> Comparison:
    """Compare the groups by the rows' column ``measure``."""
    judged, trusted = _columns(records, measure)
    return Comparison(
        difference_of_means(judged, trusted), permutation_test(judged, trusted, seed=seed)
    )


def together(tests: Mapping[str, Comparison]) -> float:
    """One p-value of several tests: the smallest times their number (Bonferroni), at most 1.

    ``P(p <= a) <= a`` if the rows are exchangeable, however the tests depend on each other.
    """
    return min(1.0, len(tests) * min(one.test.p_value for one in tests.values()))


def verdict(tests: Mapping[str, Comparison], reference: int) -> str:
    """DIFFERENT by the tests; else UNCLEAR if an interval of a difference leaves 0 out, or ALIKE.

    Few trusted rows cannot lead to a small p-value, however far off a part of the rows is: where
    ``unseen_share`` of the ``reference`` rows is above ``MOST_UNSEEN`` (13 rows are enough), the
    answer is UNCLEAR as well.
    """
    if together(tests) <= LEVEL:
        return DIFFERENT
    apart = [one for one in tests.values() if one.difference.low > 0 or one.difference.high < 0]
    unseen = unseen_share(reference, LEVEL / len(tests))
    return UNCLEAR if apart or unseen > MOST_UNSEEN else ALIKE


def unseen_share(reference: int, level: float) -> float:
    """Share of rows of another kind up to which a test at this level misses them, at least.

        s  with  (1 - s)^m = level,      s = 1 - level^(1/m)

    ``(1 - s)^m`` is the chance that m rows drawn from exchangeable ones, a share s of them of
    another kind, hold none of these. However far off such rows are, the p-value of a permutation
    test is about as large, and larger where the means of the other rows are spread.

    >>> [round(unseen_share(m, 0.025), 2) for m in (4, 8, 16, 40)]
    [0.6, 0.37, 0.21, 0.09]

    Exactness: approximate; for many rows, all far off on one side.
    """
    return float(1.0 - level ** (1 / reference))


def fewest_reference(level: float) -> int:
    """Fewest reference rows of which ``unseen_share`` is ``MOST_UNSEEN`` or less.

    >>> fewest_reference(0.025)
    13
    """
    return math.ceil(math.log(level) / math.log(1 - MOST_UNSEEN))


_BEYOND = {
    "loss": ("loss", 1, "a higher loss"),
    "prompt": ("prompt_gain", -1, "a prompt that does less for the response"),
    "value": ("value", -1, "a lower walk value"),
}
"""Measures by which a row may be beyond the reference: column, the end (1: high), in words."""


def beyond_reference(records: Records) -> dict[str, list[int]]:
    """Numbers of the rows that no reference row reaches, by each measure; outermost first.

    A row counts whose mean loss is above ("loss"), whose mean walk value is below ("value"), or
    whose prompt does less ("prompt"; see ``diagnose.prompts``) than that of each reference row. Of
    n exchangeable rows, n / (m + 1) do on average beside m reference rows. A row without a prompt
    counts by the others alone.
    """
    beyond = {}
    for measure, (column, sign, _) in _BEYOND.items():
        judged, trusted = (sign * numbers for numbers in _columns(records, column))
        rows = np.flatnonzero(judged > max(trusted[~np.isnan(trusted)], default=np.inf))
        beyond[measure] = rows[np.argsort(-judged[rows], kind="stable")].tolist()
    return beyond


def rows_beyond(records: Records, beyond: Mapping[str, Sequence[int]]) -> str:
    """How many rows are ``beyond`` the reference, and where; "" where there are none."""
    parts: list[str] = []
    for measure, (_, _, what) in _BEYOND.items():
        places = [records[JUDGED][n]["place"] for n in beyond[measure]]
        if places:
            of_all, than = f" of {len(records[JUDGED])}", " than every reference row"
            parts.append(
                f"{len(places)}{of_all * (not parts)} {'has' if len(places) == 1 else 'have'} "
                f"{what}{than * (not parts)}{said_places(places, len(places), NAMED)}"
            )
    usual = len(records[JUDGED]) / (len(records[TRUSTED]) + 1)
    return (
        f"{'; '.join(parts)}. Read these first (of rows of one source {usual:.2g} would on average "
        "be beyond the reference by one measure)."
        if parts
        else ""
    )


def _conclusion(tests: Mapping[str, Comparison], reference: int, beyond: str) -> str:
    p, answer = together(tests), verdict(tests, reference)
    if answer == DIFFERENT:
        return (
            f"Your rows differ from the trusted ones (p = {p:.2g} of all rows together): a race "
            "measures whether "
            f"selecting pays. {beyond or _LOOK} Rows of another task or style differ as rows with "
            "wrong words do."
        )
    if answer == UNCLEAR:
        return (
            f"Your rows may differ from the trusted ones (p = {p:.2g} of all rows together, above "
            f"{LEVEL:.0%}; {reference} reference rows are too few to be sure): a race measures "
            f"whether selecting pays. {beyond or _LOOK}"
        )
    share, ends = unseen_share(reference, LEVEL / len(tests)), tests["value"].difference
    return (
        f"Your rows look like the trusted ones (p = {p:.2g}): train on everything. "
        f"{reference} trusted rows cannot rule out that all differ by "
        f"{max(abs(ends.low), abs(ends.high)):.2g} nats, and {share:.0%} of your rows may be of "
        "another kind without being noticed."
    )


def _limits(tests: Mapping[str, Comparison], reference: int) -> str:
    """How large the differences are, and what the tests miss; with how many rows they miss less."""
    value, loss = (format(tests[name].difference, "+.3f") for name in MEASURES)
    enough = fewest_reference(LEVEL / len(tests))
    more = f"{2 * enough} or more" if reference < enough else "more"
    return (
        f"Beside {reference} reference rows the mean walk value of your rows differs by {value} "
        f"nats a token, their mean loss by {loss}. The tests may miss "
        f"{unseen_share(reference, LEVEL / len(tests)):.0%} of rows of another kind; with {more} "
        "trusted rows (--validation_file), of which the walk takes half, they miss fewer."
    )


def _beyond_table(
    subject: Subject,
    rows: Sequence[Example],
    records: Sequence[Mapping[str, Any]],
    beyond: Mapping[str, Sequence[int]],
) -> Table:
    """Every row that no reference row reaches: by loss, then by prompt or value alone."""
    shown = []
    columns = ("place", "beyond", *(column for column, *_ in _BEYOND.values()))
    for number in dict.fromkeys(number for rows in beyond.values() for number in rows):
        own = {name: records[number][name] for name in columns}
        shown.append(own | _short_texts(subject, rows[number]))
    return Table.of(
        "data-beyond",
        "Rows that no reference row reaches",
        shown,
        "beyond: by its loss, which is higher than that of each reference row, by its prompt, "
        "which does less, or by its value, which is lower. prompt gain: mean loss of the response "
        "beside the prompt of a trusted row, less its loss beside its own; about 0 where it "
        "answers another question. Training leaves out rows of one file by their numbers "
        "(--without_rows).",
    )


def _tests_table(records: Records, tests: Mapping[str, Comparison]) -> Table:
    rows = []
    for name, title in MEASURES.items():
        judged, trusted = _columns(records, name)
        test = tests[name].test
        rows.append(
            {
                "measure": title,
                JUDGED: float(judged.mean()),
                TRUSTED: float(trusted.mean()),
                "difference": tests[name].difference,
                "p": test.p_value,
                "arrangements": f"{'all ' * test.exact}{test.arrangements:,}",
            }
        )
    return Table.of(
        "data-tests",
        "Your rows beside the trusted ones",
        rows,
        "Means over rows, in nats a token. Permutation tests, two-sided, over arrangements of the "
        "rows into two groups: all that there are, or so many that were drawn. The verdict takes "
        "the smaller p times two. Intervals (Welch, 95 %) say how large a difference may be.",
    )


def doubts_of_walk(trusted: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where the loss of the reference rises along the walk.

    Its signs say nothing then, its ranks do. In a trial (SmolLM2-135M-Instruct in float32, one
    draw; 8 trusted rows of GSM8K; 24 rows with 30 % wrong words, 24 right ones) the mean value told
    these apart better after 24 steps at 2e-5, where the reference's mean was -0.15 nats (AUC 0.94),
    than after 6 (+0.23; 0.62). The loss told all of them apart.

    >>> doubts_of_walk([{"value": 0.1}])
    ''
    """
    mean = float(np.mean([one["value"] for one in trusted]))
    if mean > 0:
        return ""
    return (
        f"The loss of the reference rows rose along the walk (mean value {mean:+.3f} nats), as it "
        "does where a walk learns its few rows by heart: go by the losses first, and compare "
        "values with each other, not with 0."
    )


def _ends(records: Sequence[Mapping[str, Any]], count: int) -> dict[str, list[int]]:
    """Places of the rows of highest loss, and at either end of the mean value; outermost first."""
    value, loss = (np.array([one[name] for one in records]) for name in ("value", "loss"))
    ends = end_places(value, loss, min(count, len(records) // 2))
    return {name: ends[name] for name in (HIGHEST_LOSS, LOWEST, HIGHEST) if name in ends}


def _ends_table(
    subject: Subject,
    rows: Sequence[Example],
    records: Sequence[Mapping[str, Any]],
    ends: Mapping[str, Sequence[int]],
) -> Table:
    by_loss = np.argsort(np.array([-one["loss"] for one in records]), kind="stable").tolist()
    shown = []
    for end, places in ends.items():
        for place in places:
            own = records[place]
            shown.append(
                {
                    "end": end,
                    "place": own["place"],
                    "value": own["value"],
                    "negative": own["negative"],
                    "loss": own["loss"],
                    "rank_by_loss": by_loss.index(place) + 1,
                    **_short_texts(subject, rows[place]),
                }
            )
    return Table.of(
        "data-ends",
        "Rows of highest mean loss, and of lowest and of highest mean walk value",
        shown,
        "negative: share of the tokens whose loss rises along the walk. rank by loss: 1 is the "
        "row of highest mean loss. data-rows.csv, beside diagnosis.json, has every row.",
    )


def _short_texts(subject: Subject, example: Example) -> dict[str, str]:
    """The beginnings of a row's prompt and response, as columns of a table."""
    prompt, response = example.row.prompt, example.row.response
    if not example.row.turns:
        texts = subject.texts(example)
        first = next(place for place, label in enumerate(example.labels) if place and label >= 0)
        prompt, response = "".join(texts[:first]), "".join(texts[first:])
    return {"prompt": short(prompt, 120), "response": short(response, 240)}


def _row_lists(
    subject: Subject,
    rows: Sequence[Example],
    scored: Sequence[ScoredExample],
    ends: Mapping[str, Sequence[int]],
) -> dict[str, dict[str, Any]]:
    """A few rows of either end in colours, on the scale of all rows."""
    full = full_scale(value for one in scored for value in _nats(one)[0].tolist())
    lead = "Blue: the loss of the token falls along the walk, by so many nats. Orange: it rises."
    meaning = Meaning(lead, "nats", after="after the walk")
    lists = {}
    for end, places in ends.items():
        shown = [
            shown_end(replace(scored[place], tokens=subject.texts(rows[place])), ["total"])
            for place in places[:SHOWN]
        ]
        name = f"data-{end.replace(' ', '-')}"
        lists[end.capitalize()] = row_list(name, shown, "total", full, meaning)
    return lists


def _figure(rows: Table, measure: str) -> Figure:
    title = MEASURES[measure]
    return Figure(
        "histogram",
        f"data-{measure}",
        rows,
        f"Rows by their {title}",
        "Shares of each group. Look for rows of yours where no trusted row is.",
        x=measure,
        series="rows",
        xlabel=f"{title} of a row (nats a token)",
        ylabel="share of the rows",
    )
