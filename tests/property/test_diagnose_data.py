"""The verdict on rows: permutation tests against all orderings, intervals, halves and rows."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from alphatoken.config import ScorerConfig
from alphatoken.data import Example, batches
from alphatoken.diagnose import data
from alphatoken.diagnose.data import JUDGED, TRUSTED, Comparison, halves, together
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.statistics import (
    Estimate,
    PermutationTest,
    difference_of_means,
    permutation_test,
)
from alphatoken.diagnose.subject import Subject
from alphatoken.errors import DataError, InputError, NumericalError
from alphatoken.oracle import gradients
from alphatoken.oracle import run as oracle
from tests.property.profiles import budget
from tests.property.setups import forward_of
from tests.property.test_diagnose_heatmap import tiny_subject
from tests.rows import drawn_rows

Values = list[int]
# Few different values: ties are the hard case.
GROUP = st.lists(st.integers(-2, 2), min_size=1, max_size=3)


# --- permutation tests ----------------------------------------------------------------------------


def difference(values: tuple[int, ...], judged: int) -> Fraction:
    first, rest = values[:judged], values[judged:]
    return Fraction(sum(first), len(first)) - Fraction(sum(rest), len(rest))


def by_every_ordering(judged: Values, reference: Values) -> Fraction:
    """The p-value in its slowest form: every ordering of the rows, in exact numbers."""
    values, n = (*judged, *reference), len(judged)
    observed = abs(difference(values, n))
    hits = [abs(difference(order, n)) >= observed for order in permutations(values)]
    return Fraction(sum(hits), len(hits))


@given(GROUP, GROUP)
@example([2, 2], [0, 0, 1])
@example([0], [0])
@example([-2], [1, 1, 1])
@budget(2.0)
def test_a_permutation_test_goes_through_every_ordering(judged: Values, reference: Values) -> None:
    """And its groups may change places.

    Proves: two-sided permutation test of row means (exact), against every ordering of the rows.
    """
    result = permutation_test(judged, reference)
    assert result.exact
    assert result.arrangements == math.comb(len(judged) + len(reference), len(judged))
    assert result.p_value == pytest.approx(float(by_every_ordering(judged, reference)), abs=1e-12)
    assert permutation_test(reference, judged).p_value == result.p_value


MULTISET = st.lists(st.integers(-2, 3), min_size=4, max_size=8)


@given(MULTISET, st.integers(1, 3))
@example([0, 0, 0, 0, 5], 2)
@example([0, 1, 2, 4, 8], 2)
@budget(1.0)
def test_of_exchangeable_rows_the_p_value_is_valid_at_each_level(values: Values, n: int) -> None:
    """Every assignment of a fixed set of numbers to two groups, each as likely as another.

    Proves: P(p <= a) <= a of exchangeable rows (exact), against every assignment.
    """
    p_values = [
        split_test(values, chosen).p_value for chosen in combinations(range(len(values)), n)
    ]
    assert all(p > 0 for p in p_values)
    for level in set(p_values):
        assert sum(p <= level for p in p_values) <= level * len(p_values) + 1e-9


def split_test(values: Values, chosen: tuple[int, ...], **options: Any) -> PermutationTest:
    judged = [values[place] for place in chosen]
    rest = [value for place, value in enumerate(values) if place not in chosen]
    return permutation_test(judged, rest, **options)


def test_drawn_arrangements_are_valid_at_each_level_and_near_the_exact_p_value() -> None:
    """Fixed draws: 126 assignments of nine numbers, ten seeds each, 39 arrangements drawn.

    Proves: P(p <= a) <= a of drawn arrangements (exact), against every assignment, by counts.
    """
    values, draws = [0, 1, 1, 2, 3, 5, 8, 13, 21], 39
    chosen = list(combinations(range(9), 4))
    drawn = [
        split_test(values, one, most=0, draws=draws, seed=seed).p_value
        for seed in range(10)
        for one in chosen
    ]
    assert min(drawn) >= 1 / (draws + 1)
    for level in (1 / (draws + 1), 0.05, 0.1, 0.25, 0.5, 0.9):
        share = float(np.mean([p <= level + 1e-12 for p in drawn]))
        error = math.sqrt(level * (1 - level) / len(drawn))
        assert share <= level + 3.5 * error, level
    for one in chosen[::25]:
        exact, near = split_test(values, one), split_test(values, one, most=0, draws=4000)
        assert exact.exact
        assert not near.exact
        assert near.arrangements == 4000
        error = math.sqrt(exact.p_value * (1 - exact.p_value) / 4000)
        assert abs(near.p_value - exact.p_value) <= 4 * error + 1 / 4000
    assert split_test(values, chosen[0], most=0, seed=3) == split_test(
        values, chosen[0], most=0, seed=3
    )


def test_many_rows_are_drawn_in_parts_and_large_offsets_are_no_difference() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=1500)
    far = permutation_test(rows[:1000] + 1.0, rows[1000:], draws=3000)
    assert (far.p_value, far.exact) == (1 / 3001, False)
    assert permutation_test(rows[:1000], rows[1000:], draws=3000).p_value > 0.05
    # The same numbers far from 0: what rounding makes of ties must not make p smaller.
    judged, reference = [0.1, 0.2, 0.3], [0.3, 0.1, 0.2, 0.4]
    plain = permutation_test(judged, reference).p_value
    moved = permutation_test(np.array(judged) + 1e3, np.array(reference) + 1e3).p_value
    assert moved == plain


def test_rows_that_cannot_be_compared_are_refused() -> None:
    for judged, reference in (([], [1.0]), ([1.0], [])):
        with pytest.raises(InputError, match="rows in both groups"):
            permutation_test(judged, reference)
    with pytest.raises(NumericalError, match="1 of 3 rows"):
        permutation_test([1.0, math.nan], [1.0])


# --- the size of a difference ---------------------------------------------------------------------


@given(
    st.lists(st.integers(-9, 9), min_size=2, max_size=9),
    st.lists(st.integers(-9, 9), min_size=2, max_size=9),
)
@example([1, 1], [1, 2, 5])
@budget(2.0)
def test_the_interval_of_a_difference_is_welchs(judged: Values, reference: Values) -> None:
    """Proves: Welch's interval of a difference of means (approximate), against scipy."""
    result = difference_of_means(judged, reference)
    assert result.value == pytest.approx(np.mean(judged) - np.mean(reference), abs=1e-12)
    assert result.count == len(judged) + len(reference)
    if len({*judged}) == len({*reference}) == 1:
        assert result.low == result.high == result.value
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a group whose numbers are all equal
        expected = stats.ttest_ind(judged, reference, equal_var=False).confidence_interval(0.95)
    assert result.low == pytest.approx(expected.low, rel=1e-9, abs=1e-9)
    assert result.high == pytest.approx(expected.high, rel=1e-9, abs=1e-9)


def test_one_row_has_no_interval() -> None:
    assert "2 rows needed" in str(difference_of_means([1.0], [1.0, 2.0]))


def test_two_tests_are_valid_together() -> None:
    """The smaller p-value counts twice, whichever it is.

    Proves: Bonferroni's p-value of two tests (exact), against two that never meet.
    """

    def both(*p_values: float) -> float:
        tests = [
            Comparison(Estimate(0.0, 0.0, 0.0, 9), PermutationTest(p, 99, False)) for p in p_values
        ]
        return together(dict(zip(("value", "loss"), tests, strict=True)))

    assert both(0.03, 0.5) == both(0.5, 0.03) == pytest.approx(0.06)
    assert both(0.9, 0.8) == 1.0
    # Of two uniform p-values that never meet, one is at most 0.025 in 5 % of the cases.
    grid = np.linspace(0, 1, 401)[1:]
    turned = np.roll(grid, 200)
    assert np.mean([both(p, q) <= 0.05 for p, q in zip(grid, turned, strict=True)]) == 0.05


# --- rows -----------------------------------------------------------------------------------------


@given(st.integers(8, 31), st.integers(0, 99))
@budget(1.0)
def test_halves_share_nothing_and_keep_the_order(count: int, seed: int) -> None:
    rows = drawn_rows([(2, 3)] * count)
    first, second = halves(rows, seed)
    assert (len(first), len(second)) == (count // 2, count - count // 2)
    places = [[row.row.index for row in half] for half in (first, second)]
    assert all(half == sorted(half) for half in places)
    assert sorted([*places[0], *places[1]]) == list(range(count))
    again = halves(rows, seed)
    assert [[row.row.index for row in half] for half in again] == places


def test_halves_are_drawn_by_the_seed() -> None:
    """Each row is about as often in the half that is walked on as in the other.

    Proves: halves of the trusted rows are drawn (exact), against counts over seeds.
    """
    rows = drawn_rows([(2, 3)] * 9)
    often = Counter(row.row.index for seed in range(400) for row in halves(rows, seed)[0])
    share = 4 / 9
    error = math.sqrt(share * (1 - share) / 400)
    assert all(abs(often[place] / 400 - share) < 4 * error for place in range(9))


@given(st.lists(st.integers(0, 9), min_size=8, max_size=24), st.integers(0, 50))
@example([0, 1, 2, 3, 4, 5, 6, 7, 7, 7], 0)
def test_rows_of_one_prompt_are_in_one_half(prompts: list[int], seed: int) -> None:
    """Else the reference would have prompts whose answers the walk was taken on.

    Proves: halves of rows that share prompts (exact), against their prompts.
    """
    rows = [
        Example(row.row, [1, 2, prompt + 3, 4, place + 3], [-100, -100, -100, 4, place + 3])
        for place, (prompt, row) in enumerate(
            zip(prompts, drawn_rows([(2, 3)] * len(prompts)), strict=True)
        )
    ]
    walked, reference = halves(rows, seed)
    assert sorted([*walked, *reference], key=lambda row: row.input_ids[-1]) == rows
    first, second = ({row.input_ids[2] - 3 for row in half} for half in (walked, reference))
    assert first.isdisjoint(second)
    assert len(walked) <= len(rows) // 2
    left = len(rows) // 2 - len(walked)
    assert all(prompts.count(prompt) > left for prompt in second), "one more would have had room"


CONFIG = ScorerConfig("walk", walk_steps=3, walk_learning_rate=1e-2)
TRAIN = drawn_rows([(2, 5), (3, 4), (2, 7)] * 6, seed=1)
TRUSTED_ROWS = drawn_rows([(2, 4), (4, 6), (3, 2)] * 4, seed=2)


def subject(**changes: Any) -> Subject:
    return tiny_subject(
        **{"train": TRAIN, "validation": TRUSTED_ROWS, "config": CONFIG, "seed": 5, **changes}
    )


def table_of(found: Diagnosis) -> dict[str, list[dict[str, Any]]]:
    """Records of the rows by group."""
    records = found.figure("data-value").data.records()
    return {group: [one for one in records if one["rows"] == group] for group in (JUDGED, TRUSTED)}


def expected_record(
    own: Subject, walked: list[Example], row: Example
) -> tuple[float, float, float]:
    """Mean walk value, mean loss and share of negative values, by a copy that is trained."""
    make = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    steps = list(batches(walked, own.batch_size))
    end = oracle.walked(own.model, forward_of, steps, 3, make)
    (batch,) = batches([row], 1)
    value = oracle.walk_values(own.model, end, forward_of, batch).detach()
    loss = gradients.batch_losses(forward_of(own.model), batch).detach()
    mask = torch.tensor(row.labels)[None] != -100
    mask[:, 0] = False
    return (
        float(value[mask].mean()),
        float(loss[mask].mean()),
        float((value[mask] < 0).double().mean()),
    )


def test_each_row_has_its_value_and_loss_and_the_reference_was_not_walked_on() -> None:
    """Proves: mean walk value and loss of a row (exact), against ``walked``, ``walk_values``."""
    own = subject()
    groups = table_of(data.diagnose(own))
    assert [one["row"] for one in groups[JUDGED]] == [row.row.index for row in TRAIN]
    reference = {one["row"] for one in groups[TRUSTED]}
    assert len(reference) == 6
    # What the walk was taken on are the other trusted rows.
    walked = [row for row in TRUSTED_ROWS if row.row.index not in reference]
    for group, rows in ((JUDGED, TRAIN), (TRUSTED, TRUSTED_ROWS)):
        for one in groups[group][::3]:
            value, loss, negative = expected_record(own, walked, rows[one["row"]])
            assert one["value"] == pytest.approx(value, rel=1e-8, abs=1e-9)
            assert one["loss"] == pytest.approx(loss, rel=1e-8)
            assert one["negative"] == negative
            assert one["tokens"] == rows[one["row"]].response_tokens


def check_rows_beyond(found: Diagnosis) -> int:
    """Each row that no trusted row reaches is in the table of these, and says by what; how many."""
    groups = table_of(found)
    tables = {table.key: table.records() for table in found.tables}
    shown = {one["place"]: one["beyond"] for one in tables.get("data-beyond", [])}
    worst = {name: [one[name] for one in groups[TRUSTED]] for name in data.MEASURES}
    for one in groups[JUDGED]:
        by_loss, by_value = one["loss"] > max(worst["loss"]), one["value"] < min(worst["value"])
        gains = [own for row in groups[TRUSTED] if (own := row["prompt_gain"]) is not None]
        gain = one["prompt_gain"]
        by_prompt = gain is not None and bool(gains) and gain < min(gains)
        names = ["loss"] * by_loss + ["prompt"] * by_prompt + ["value"] * by_value
        said = " and ".join(names)
        assert one["beyond"] == said == shown.pop(one["place"], "")
    assert not shown
    return len(tables.get("data-beyond", []))


def test_tables_hold_the_tests_and_both_ends() -> None:
    found = data.diagnose(subject(), data.Options(ends=3))
    groups = table_of(found)
    for place, (name, title) in enumerate(data.MEASURES.items()):
        judged, trusted = ([one[name] for one in groups[group]] for group in (JUDGED, TRUSTED))
        record = found.table("data-tests").records()[place]
        assert record["measure"] == title
        assert record["p"] == permutation_test(judged, trusted, seed=5).p_value
        assert record[JUDGED] == pytest.approx(np.mean(judged))
        expected = difference_of_means(judged, trusted)
        assert found.table("data-tests").estimate(place, "difference") == expected
    order = sorted(groups[JUDGED], key=lambda one: one["value"])
    by_loss = sorted(groups[JUDGED], key=lambda one: -one["loss"])
    check_rows_beyond(found)
    ends = found.table("data-ends").records()
    assert [one["place"] for one in ends] == [
        one["place"] for one in [*by_loss[:3], *order[:3], *reversed(order[-3:])]
    ]
    names = ["highest mean loss", "lowest mean value", "highest mean value"]
    assert [one["end"] for one in ends] == [name for name in names for _ in range(3)]
    places = [one["place"] for one in by_loss]
    assert all(one["rank_by_loss"] == places.index(one["place"]) + 1 for one in ends)
    assert [title.lower() for title in found.lists] == names
    shown_ends = (by_loss, order, [*reversed(order)])
    for shown, end in zip(found.lists.values(), shown_ends, strict=True):
        for one, record in zip(shown["examples"], end, strict=False):
            assert (one["place"], one["mean"]) == (record["place"], record["value"])
            assert one["mean_loss"] == record["loss"]
            assert len(one["values"]["total"]) == record["tokens"] == one["response"].count("1")
            mean = sum(one["values"]["total"]) / record["tokens"]
            assert mean == pytest.approx(record["value"], abs=1e-3)
        assert len(shown["examples"]) == data.SHOWN
        assert shown["unit"] == "nats"
    assert found.settings["estimator"] == "walk"
    assert (found.settings["walk_steps"], found.settings["ends"]) == (3, 3)


def test_the_verdict_follows_the_p_value_and_names_the_next_command() -> None:
    """Rows of other tokens differ; rows of one draw do not.

    Proves: the verdict on rows (exact), against rows of one draw and of two.
    """
    words = "--model_name_or_path M --train_file R --validation_file T"
    alike = drawn_rows([(2, 5)] * 46, seed=4)
    found = data.diagnose(subject(train=alike[:18], validation=alike[18:], words=words))
    assert found.conclusion.startswith("Your rows look like the trusted ones (p = ")
    assert "train on everything" in found.conclusion
    batch = "--per_device_train_batch_size 4"  # the subject's
    assert found.next_command == f"alphatoken sft --policy standard {words} {batch}"
    assert found.mark == "good"
    # Two tokens in turn: a walk on such rows helps other such rows, and no others.
    other = [
        Example(row.row, [5 + n % 5, 5 + n // 5, 3, 4, 3, 4, 3], [-100, -100, 3, 4, 3, 4, 3])
        for n, row in enumerate(alike[:12])
    ]
    found = data.diagnose(subject(train=alike[8:28], validation=other, words=words))
    assert found.conclusion.startswith("Your rows differ from the trusted ones (p = ")
    race = f"{words} --walk_steps 3 --walk_learning_rate 0.01"  # the subject's
    rows = table_of(found)[JUDGED]
    odd = [one["place"] for one in rows if "loss" in one["beyond"] or "prompt" in one["beyond"]]
    left = sorted(int(place.split()[-1]) for place in odd)
    numbers = ",".join(map(str, left))
    assert found.next_command == data.race_command(race, 20, 12, batch=4, left=numbers)
    arms = f"--arms walk-80 validation-mix without-odd-rows:without_rows={numbers}"
    assert found.next_command.endswith(f" --choosing_rows 6 {arms}")
    assert "batches of 2 rows in place of 4" in " ".join(found.notes)
    assert check_rows_beyond(found) > 5
    assert found.mark == "doubtful", "rows of another task differ too, and are not bad"
    # In Python nobody has named any files.
    assert data.diagnose(subject(train=alike[8:28], validation=other)).next_command == ""


@given(st.integers(8, 40))
def test_the_race_that_is_named_has_rows_to_choose_by(trusted: int) -> None:
    """And, of so many trusted rows, some to value against, of which one may be held out.

    Proves: choosing rows of the race that is named (exact), against those that a race sets aside.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    from alphatoken.race.decision import FEWEST
    from alphatoken.race.rows import choosing_numbers
    from alphatoken.train import AlphaSFTConfig
    from alphatoken.train.refusals import check_pool

    *_, name, count = data.race_command("--train_file R", 400, trusted).split()
    wanted = int(count) if name == "--choosing_rows" else None
    chosen, others = choosing_numbers(trusted, wanted, seed=0)
    assert len(chosen) >= max(FEWEST, min(data.CHOOSING, trusted // 2))
    config = AlphaSFTConfig(output_dir="out", use_cpu=True, bf16=False)
    assert check_pool(config, len(others), 1).drawn


def test_a_walk_that_teaches_the_trusted_rows_nothing_is_said() -> None:
    """It is said where the mean value of the reference is not above 0, and nowhere else."""
    rows = drawn_rows([(2, 5)] * 16, seed=4)
    found = data.diagnose(subject(train=rows, validation=drawn_rows([(2, 5)] * 16, seed=9)))
    mean = float(np.mean([one["value"] for one in table_of(found)[TRUSTED]]))
    assert ("rose along the walk" in found.conclusion) == (mean <= 0)
    records = [{"value": -0.5}, {"value": 0.4}]
    assert "(mean value -0.050 nats)" in data.doubts_of_walk(records)
    assert data.doubts_of_walk([{"value": 0.1}]) == ""


def test_rows_that_no_reference_row_reaches_are_named() -> None:
    """Three of the losses, two of the prompts, one of the values; the outermost first.

    Proves: rows beyond the reference (exact), against planted rows.
    """

    def record(number: int, loss: float, value: float, gain: float | None) -> dict[str, Any]:
        return {"place": f"line {number}", "loss": loss, "value": value, "prompt_gain": gain}

    own = [record(1, 2.5, 0.0, 0.6), record(2, 1.0, -3.0, 0.1), record(3, 9.0, 0.1, None)]
    own += [record(4, 2.0, -1.0, -0.2), record(5, 3.0, 0.2, 0.5)]
    trusted = [record(1, 2.0, -1.0, 0.5), record(2, 0.5, 0.5, None)]
    records = {JUDGED: own, TRUSTED: trusted}
    beyond = data.beyond_reference(records)
    assert beyond == {"loss": [2, 4, 0], "prompt": [3, 1], "value": [1]}
    assert data.rows_beyond(records, beyond) == (
        "3 of 5 have a higher loss than every reference row (lines 3, 5, 1); 2 have a prompt that "
        "does less for the response (lines 4, 2); 1 has a lower walk value (line 2). Read these "
        "first (of rows of one source 1.7 would on average be beyond the reference by one measure)."
    )
    silent = [{**one, "prompt_gain": None} for one in trusted]
    assert data.beyond_reference({JUDGED: own, TRUSTED: silent})["prompt"] == []
    exchanged = {JUDGED: trusted, TRUSTED: own}
    assert data.rows_beyond(exchanged, data.beyond_reference(exchanged)) == ""
    many = [record(n, 10.0 + n, 0.0, None) for n in range(50)]
    beyond = {"loss": [*range(50)], "prompt": [], "value": []}
    said = data.rows_beyond({JUDGED: many, TRUSTED: trusted}, beyond)
    assert said.count(",") == data.NAMED
    assert said.count("...") == 1


def test_rows_that_an_arm_leaves_out_have_numbers_of_one_file() -> None:
    """Some rows of one file, no more than are named and than half.

    Proves: the rows of the arm that is printed (exact), against places written by hand.
    """
    places = [f"rows.jsonl, line {2 * number}" for number in range(100)]
    assert data.rows_to_leave_out(places, [7, 3]) == "6,14"
    assert data.rows_to_leave_out(places, []) == ""
    assert data.rows_to_leave_out(places[:5], [0, 1]) == "0,2"
    assert data.rows_to_leave_out(places[:5], [0, 1, 2]) == ""
    assert data.rows_to_leave_out(places, range(data.NAMED)).count(",") == data.NAMED - 1
    assert data.rows_to_leave_out(places, range(data.NAMED + 1)) == ""
    assert data.rows_to_leave_out([*places, "more.jsonl, line 1"], [3]) == ""


def test_the_time_of_a_race_is_that_of_its_rows() -> None:
    """By hand: 60 rows, 3 epochs of 8 are 24 steps, the only look is at step 20.

    Proves: rows that a race trains on (exact), against its steps counted one by one.
    """
    steps, look, size = 24, 20, 8
    mixed = sum(size + size // 2 for _ in range(steps))  # the winner
    every = sum(size for _ in range(look))
    selected = sum(size + size / 3 for _ in range(look))
    assert data.race_passes(60, size, 0) == pytest.approx(mixed + every + selected)
    fewer = sum(size for _ in range(look))
    assert data.race_passes(60, size, 0, 3) == pytest.approx(mixed + every + selected + fewer)
    assert data.race_passes(60, size, 24) == pytest.approx(mixed + every + selected + 24 * size)
    # Where the arm that selects wins, it is less.
    won = sum(size + size / 3 for _ in range(steps))
    assert won + every + sum(size + size // 2 for _ in range(look)) <= mixed + every + selected
    rows = drawn_rows([(2, 5)] * 12, seed=4)
    # Two batches of 8 and 4 rows: six rows a step.
    assert data.seconds_of_pass(144.0, 24, rows, rows, 8) == pytest.approx(1.0)


@given(st.integers(8, 2000), st.sampled_from((1, 2, 6, 8, 32)))
@example(45, 2)
@example(45, 8)
def test_the_race_that_is_named_has_a_look(rows: int, named: int) -> None:
    """Within the steps that TRL's own options give it; by the batch that is named, where it has.

    Proves: batch of the race that is named (exact), against the looks of a race of that run.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    from trl import SFTConfig

    from alphatoken.race.arms import looks_of

    defaults = SFTConfig.__dataclass_fields__
    epochs = int(defaults["num_train_epochs"].default)
    *_, last = data.race_command("--train_file R", rows, 32, named).split()
    usual = int(defaults["per_device_train_batch_size"].default)
    batch = int(last) if last.isdigit() else usual

    def has_a_look(size: int) -> bool:
        try:
            return bool(looks_of(math.ceil(rows / size) * epochs, None))
        except InputError:
            return False

    assert has_a_look(batch)
    halved = next(times for times in range(6) if named >> times == batch)
    assert not halved or not has_a_look(named >> (halved - 1))
    sft = data.next_command(data.ALIKE, "--train_file R", rows, 32, named)
    assert (f"--per_device_train_batch_size {named}" in sft) == (named != usual)


def test_too_few_trusted_rows_to_tell_is_an_answer_too() -> None:
    """A third of the rows far off, and four trusted rows: no arrangement test can be sure.

    Proves: verdict of too few trusted rows (exact), against planted rows.
    """

    def records(*losses: float) -> list[dict[str, float]]:
        return [{"value": -loss, "loss": loss} for loss in losses]

    clean = [1.0, 1.1, 1.2, 0.9, 1.05, 1.15, 0.95, 1.0]
    spoilt = [3.0, 3.1, 3.3, 2.9]
    for own, trusted, answer in (
        ([*clean, *spoilt], clean[:4], data.UNCLEAR),
        ([*clean, *spoilt], [*clean, *clean], data.DIFFERENT),
        (clean, clean[:4], data.UNCLEAR),  # half of the rows could be of another kind
        (clean, [*clean, *clean[:4]], data.UNCLEAR),
        ([x + 0.104 for x in clean], [*clean, *clean[:5]], data.UNCLEAR),  # p is 0.08
        (clean, [*clean, *clean[:5]], data.ALIKE),
    ):
        groups = {JUDGED: records(*own), TRUSTED: records(*trusted)}
        tests = {name: data.compare(groups, name, seed=0) for name in data.MEASURES}
        assert data.verdict(tests, len(trusted)) == answer
        said = data._conclusion(tests, len(trusted), "")
        assert ("a race measures" in said) == (answer != data.ALIKE)
        assert ("too few to be sure" in said) == (answer == data.UNCLEAR)
        limits = data._limits(tests, len(trusted))
        told = "with 26 or more trusted rows (--validation_file)" in limits
        assert told == (len(trusted) < 13)
        assert ("with more trusted rows" in limits) != told
        assert ("train on everything" in said) == (answer == data.ALIKE)
    assert data.unseen_share(13, 0.025) <= data.MOST_UNSEEN < data.unseen_share(12, 0.025)


def test_rows_on_both_sides_and_rows_without_a_response_are_left_out_and_counted() -> None:
    """Proves: rows that are trusted are not judged (exact), against the rows without them."""
    silent = Example(TRAIN[0].row, [3, 4, 5], [-100] * 3)
    train = [*TRAIN, *TRUSTED_ROWS[:2], silent, TRAIN[4], TRAIN[4]]
    found = data.diagnose(subject(train=train, validation=[*TRUSTED_ROWS, TRUSTED_ROWS[3]]))
    said = " ".join(found.notes)
    assert "2 training rows are among the trusted ones and are left out (" in said
    assert "1 training row has no response and is left out (" in said
    assert "2 training rows repeat another one and are left out (" in said
    assert "1 trusted row repeats another one and is left out (" in said
    assert "walk was taken on 6 trusted rows; the other 6 are the reference." in said
    groups = table_of(found)
    assert groups == table_of(data.diagnose(subject()))


def test_rows_of_one_text_and_other_labels_are_no_copies() -> None:
    """A chat that teaches its first answer is another row than the same chat with its second."""
    row = TRAIN[0]
    other = replace(row, labels=[-100] * (len(row.labels) - 1) + row.labels[-1:])
    found = data.diagnose(subject(train=[*TRAIN, other]))
    assert "repeat another one" not in " ".join(found.notes)
    assert len(table_of(found)[JUDGED]) == len(TRAIN) + 1


def test_too_few_rows_are_refused() -> None:
    for changes, cause in (
        ({"validation": TRUSTED_ROWS[:7]}, "too few trusted rows.*7 different ones"),
        ({"validation": [TRUSTED_ROWS[0]] * 9}, "too few trusted rows.*1 different ones"),
        ({"train": TRAIN[:7]}, "too few rows to judge"),
        (
            {"train": [*TRAIN[:7], *TRUSTED_ROWS]},
            "too few rows to judge.*7 different ones with a response",
        ),
    ):
        with pytest.raises(DataError, match=cause):
            data.diagnose(subject(**changes))
