"""Errors in a race: in its decision, in how arms are run and measured, and in who goes on."""

from __future__ import annotations

from alphatoken.train.steps import Schedule
from tests.property import test_pool, test_race_decision, test_race_runs, test_steps
from tests.property.mutation import Claim, claim, row

NEEDS = ("trl", "peft")
LEVEL = claim(
    test_race_decision.test_all_is_left_no_more_often_than_said, "normal", examples=1, tested=True
)
TOGETHER = claim(test_race_decision.test_all_intervals_hold_together)
FORGETS = claim(test_race_decision.test_an_arm_that_forgets_wins_only_where_nobody_asks)
FAILED = claim(test_race_decision.test_an_arm_that_failed_leaves)
EPOCHS = claim(test_race_runs.test_epochs_are_the_steps_that_they_have, needs=NEEDS)
LOSSES = claim(test_race_runs.test_losses_are_of_the_model_at_the_look, needs=NEEDS)
TOUCHES = claim(test_race_runs.test_measuring_touches_nothing, needs=NEEDS)
START = claim(
    test_race_runs.test_the_start_is_measured_before_any_step, False, examples=1, needs=NEEDS,
    tested=True,
)  # fmt: skip
WEIGHTS = claim(
    test_race_runs.test_weights_of_rows_race_against_none, True, "row", {}, examples=1,
    needs=NEEDS, tested=True,
)  # fmt: skip
FISHER = claim(
    test_race_runs.test_a_fisher_is_read_by_the_arm_that_wants_it, "kept", examples=1, needs=NEEDS,
    tested=True,
)  # fmt: skip
COPIES = claim(
    test_race_runs.test_copies_of_choosing_rows_add_no_certainty, False, examples=1, needs=NEEDS,
    tested=True,
)  # fmt: skip
PROMPTS = claim(
    test_race_decision.test_rows_of_one_prompt_are_one_row, 1, [0, 0, 0, 1, 2], examples=1,
    tested=True,
)  # fmt: skip
ROWS = claim(test_race_decision.test_rows_that_an_arm_leaves_out)
LOOKS = claim(test_race_decision.test_looks_by_default_and_by_hand)
DEALT = claim(
    test_steps.test_steps_are_those_of_accelerates_shares, Schedule(45, 4, 2), 4, False,
    examples=1, tested=True,
)  # fmt: skip
LONGER = claim(
    test_steps.test_options_for_a_longer_run_make_it_as_long, Schedule(45, 4, 4), 20, examples=1,
    tested=True,
)  # fmt: skip
FEW_ROWS = claim(
    test_pool.test_each_remedy_of_too_few_rows_is_one, "the same, all drawn", examples=1,
    tested=True,
)  # fmt: skip


def _loops(name: str) -> Claim:
    """The decision beside loops, on one of the pinned races."""
    case = getattr(test_race_decision, name)
    return claim(test_race_decision.test_race_against_loops, case, examples=1, tested=True)


def _winner(arm: str, *, peft: bool = False) -> Claim:
    return claim(
        test_race_runs.test_the_winner_is_its_run_without_a_race, arm, peft, examples=1,
        needs=NEEDS, tested=True,
    )  # fmt: skip


RACES = (
    row("race-without-bonferroni", (_loops("LATE"), LEVEL, TOGETHER),
        "each interval of a race has the level of all of them",
        ("race.decision.difference", "level / (2 * intervals)", "level / 2")),
    row("rows-of-a-race-weigh-the-same", _loops("LATE"),
        "a short row decides as much as a long one",
        ("race.decision.difference", "summed = counts * (ours - theirs)",
         "summed = ours - theirs")),
    row("error-of-a-ratio-without-its-covariance", _loops("TWO"),
        "the standard error of a difference takes the number of tokens for known",
        ("race.decision.difference", "/ (whole - counts)", "/ (whole - whole / rows)")),
    row("copies-of-a-row-counted", COPIES,
        "a choosing row that is given three times counts as three",
        ("race.runner.RaceState.outcome", "self.groups.get(name)", "None")),
    row("groups-of-a-race-mixed-up", PROMPTS,
        "rows of one prompt are left out one by one",
        ("race.decision.difference", "if groups is not None:", "if False:")),
    row("normal-for-students-t", (_loops("LATE"), TOGETHER),
        "intervals over sixteen rows are those over infinitely many",
        ("race.decision._quantile", "stats.t.ppf(probability, degrees)",
         "stats.norm.ppf(probability)")),
    row("winner-whose-interval-holds-0", (_loops("NARROW"), LEVEL),
        "an arm wins that is better by chance",
        ("race.decision._winner", "if one.high < 0", "if one.value < 0")),
    row("winner-at-the-first-look", _loops("EARLY"),
        "an arm wins before the last look",
        ("race.decision.decide", "len(choosing.looks) == looks or",
         "len(choosing.looks) > 0 or"),
        ("race.decision._winner", "if len(outcome.differences) < looks:", "if False:")),
    row("second-best-arm-wins", _loops("TWO"),
        "of two arms that are better the worse one goes on",
        ("race.decision._winner", "return min(better", "return max(better")),
    row("worse-arm-stays", _loops("LATE"),
        "an arm whose interval lies above 0 goes on to the next look",
        ("race.decision.decide", "or differences[name].low > 0", "")),
    row("failed-arm-stays", FAILED,
        "a race waits for an arm that broke",
        ("race.decision.decide", "name not in differences or differences[name].low > 0",
         "name in differences and differences[name].low > 0")),
    row("forgetful-arm-wins", FORGETS,
        "an arm that is worse on the retention rows wins though it must not",
        ("race.decision._winner", "if keep_retention and outcome.retention:", "if False:")),
    row("looks-from-the-first-step", LOOKS,
        "a short run has looks at which whatever selects is ahead",
        ("race.arms.looks_of", "max(EARLIEST, -(-share * steps // 1000))",
         "-(-share * steps // 1000)")),
    row("arm-without-rows-by-their-count", ROWS,
        "an arm leaves rows out by their count among the training rows, not by their number",
        ("race.rows.rows_of_arm", "not any(numbers[place] in part", "not any(place in part")),
    row("column-of-an-arm-beside-numbers", ROWS,
        "of an arm that leaves rows out by a column and by numbers, the column is not read",
        ("race.rows.rows_of_arm", "for place in kept if not any(",
         "for place in range(len(numbers)) if not any(")),
    row("arm-with-the-steps-of-its-looks", (EPOCHS, _winner("all")),
        "an arm follows the schedule of the race, not of the run",
        ("race.runner.Race._trainer", "trainer.args.max_steps = self.state.steps",
         "trainer.args.max_steps = self.state.looks[-1] + 1")),
    row("loss-of-a-row-summed", LOSSES,
        "a row's loss is not by token, and its tokens count twice",
        ("race.runner.row_losses", "losses.append(total / count)", "losses.append(total)")),
    row("loss-before-training-of-its-first-look", START,
        "what is shown as before training has been trained already",
        ("race.runner.Race._look", "elif arm.name == ALL and not self.state.before:",
         "if arm.name == ALL:")),
    row("all-without-the-rows-of-weight-0", WEIGHTS,
        "an arm that reads no weights trains on fewer rows than the one that does",
        ("train.python_rows.without_weights", "rest = dataset.remove_columns(",
         "rest = dataset.filter(lambda row: row['weight']).remove_columns(")),
    row("fisher-of-the-training-rows", FISHER,
        "rows for a Fisher are handed to no arm, and it is fitted on training rows",
        ("race.runner.datasets_of", '"fisher": args.reads_fisher', '"fisher": False')),
    row("look-in-the-mode-of-training", TOUCHES,
        "the reference of pairs is asked with dropout, and random numbers are drawn",
        ("race.runner.row_losses", "evaluation_mode(trainer.model), ", "")),
    row("steps-of-one-process", DEALT,
        "a run of several processes is taken for as long as one of a single process",
        ("train.steps.Schedule.steps", "(self.batch * self.processes)", "self.batch")),
    row("options-for-a-run-that-is-too-short", LONGER,
        "a refused race names options with which it is refused again",
        ("train.steps.Schedule.longer", "if one.steps >= wanted", "if one.steps >= wanted // 2")),
    row("remedy-that-is-in-force", FEW_ROWS,
        "too few validation rows are met with an option that has that value already",
        ("train.refusals.pool_remedies",
         "all_drawn if _has_pool(args, rows, processes, **all_drawn) else None", "all_drawn")),
)  # fmt: skip
