"""Errors in what reads and ranks corpora, and in diagnostics."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property import (
    test_collected_pairs,
    test_coloured,
    test_corpus,
    test_demo,
    test_held_apart,
    test_queries,
    test_shown_tokens,
)
from tests.property import test_diagnose_arithmetic as tests
from tests.property import test_diagnose_data as verdicts
from tests.property import test_diagnose_prompts as prompts
from tests.property import test_presets as presets
from tests.property import test_value_page as value_page
from tests.property.decoder import DecoderConfig
from tests.property.mutation import Claim, claim, row

# --- corpora of any size -------------------------------------------------------------------------


RATIOS = st.sampled_from([0.1, 0.25, 0.5, 0.9])
SHARE = claim(
    test_corpus.test_top_mask,
    st.lists(test_corpus.NUMBERS, min_size=6, max_size=30),
    RATIOS,
    examples=150,
)
BEST = claim(
    test_corpus.test_best_rows,
    st.lists(st.tuples(test_corpus.NUMBERS, st.integers(1, 9)), min_size=4, max_size=30),
    RATIOS,
    examples=150,
)
PLACES = claim(
    test_corpus.test_rows_from_any_place,
    test_corpus.lines(8),
    st.sampled_from([2, 3, 5]),
    st.integers(0, 7),
    st.integers(1, 20),
    examples=150,
)
NAMED = claim(
    test_corpus.test_rows_left_out_by_number,
    test_corpus.lines(8),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.lists(st.integers(0, 45), max_size=1),
    st.one_of(st.none(), st.integers(1, 40)),
    examples=150,
)
SPLIT = claim(
    test_corpus.test_corpus,
    test_corpus.lines(8),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=3),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 7),
    examples=150,
)
MARKED = claim(
    test_corpus.test_marked_turns,
    st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=3),
            st.sampled_from(["weight", "trainable"]),
            st.sampled_from([0, 1]),
        ),
        min_size=2,
        max_size=4,
    ),
    st.just(["system", "conversations"]),
    examples=20,
)
QUERIES = claim(test_queries.test_each_query_has_the_values_that_it_has_alone, examples=1)


def _apart(by_prompt: bool) -> Claim:
    """Rows of tokens beside rows that are measured."""
    case = (test_held_apart.HELD, test_held_apart.ROWS, test_held_apart.SKIPPED, by_prompt)
    check = test_held_apart.test_rows_of_tokens_repeat_no_row_that_is_measured
    return claim(check, *case, examples=1, tested=True)


ENDS = claim(value_page.test_the_rows_at_either_end, value_page.ROWS, examples=150)
KINDS = claim(value_page.test_values_by_kind_of_token, value_page.ROWS, examples=150)
MARKS = claim(
    value_page.test_marks_are_of_whole_intervals,
    st.lists(st.integers(-20, 20), min_size=3, max_size=3),
    examples=150,
)

CORPORA = (
    row("queries-exchanged", QUERIES,
        "the values against the last query are those of the first one",
        ("score.run._values_by_query", "values.by_batch()", "values.by_batch().flip(-1)")),
    row("rows-that-say-the-same-are-left-out", QUERIES,
        "a training row that repeats a query is removed, as one that repeats a validation row is",
        ("score.job.prepare_rows", "if options.query else", "if False else")),
    row("rows-of-tokens-compared-by-their-texts", _apart(True),
        "a row of tokens that repeats a row of texts is trained on",
        ("cli.held_apart.apart_from", "if any(map(came_as_tokens, items))", "if False")),
    row("rows-of-texts-compared-by-their-texts", _apart(True),
        "a row whose tokens are those of a row that is measured is trained on, if its text differs",
        ("cli.held_apart.item_keys", "set() if tokens is None else", "set() if True else")),
    row("a-prompt-of-tokens-beside-conversations", _apart(False),
        "rows whose prompts are the same tokens are left out against --leak_key conversation",
        ("data.split.token_keys", 'by == "prompt" and ', "")),
    row("prompts-of-tokens-end-at-the-first-label", _apart(True),
        "a row of a held-out prompt whose first response token is dropped is trained on",
        ("cli.held_apart._same_tokens", "if n <= end", "if n == end")),
    row("a-start-token-is-a-prompt", _apart(True),
        "rows that have the start token in common are taken for repeats",
        ("cli.held_apart._same_tokens", "if len(prompt) > 1", "if prompt")),
    row("rows-of-tokens-share-no-prompt", _apart(False),
        "rows of tokens that share a prompt alone are left out against --leak_key conversation",
        ("cli.held_apart._same_tokens", 'if by == "prompt"', "if by")),
    row("last-ties-of-all", SHARE,
        "of equal values at the threshold the last ones are kept",
        ("select.masks.top_mask", "== edge)[: count", "== edge)[::-1][: count")),
    row("one-row-over-the-budget", BEST,
        "the row at which the budget ends is kept too",
        ("score.results.best_rows", "max(1, count)", "count + 1")),
    row("the-last-of-equal-rows", BEST,
        "of rows of equal value the last ones are kept",
        ("score.results._ranked",
         'np.argsort(-values, kind="stable")', 'np.argsort(values, kind="stable")[::-1]')),
    row("rows-at-the-ends-by-their-sum", ENDS,
        "the rows that a page shows first are those of lowest and highest sum",
        ("score.summary.mean_of", "own.mean()", "own.sum()")),
    row("the-first-row-at-both-ends", ENDS,
        "a row is shown as one of the lowest and of the highest",
        ("score.summary._part_ends", "len(summary.row_means) // 2", "len(summary.row_means)")),
    row("rows-of-lowest-loss", ENDS,
        "the page names the rows of lowest loss for those of highest",
        ("score.summary._rank_row", "nlargest(_ROW_ENDS, losses", "nsmallest(_ROW_ENDS, losses")),
    row("places-of-lowest-loss", ENDS,
        "the terminal names the rows of lowest loss for those of highest",
        ("score.summary.end_places", "HIGHEST_LOSS: -losses", "HIGHEST_LOSS: losses")),
    row("ends-of-answers-are-words", KINDS,
        "the end of an answer counts as what its text says",
        ("score.token_kinds.page_kinds", "own[-1] = END", "pass")),
    row("first-tokens-are-words", KINDS,
        "the first token of an answer counts as what its text says",
        ("score.token_kinds.page_kinds", "own[0] = FIRST", "pass")),
    row("a-mark-by-the-number-alone", MARKS,
        "a diagnosis is good whose interval reaches far below",
        ("diagnose.diagnosis.graded", "estimate.low >= _CLEAR", "estimate.value >= _CLEAR")),
    row("rows-counted-from-the-mark", PLACES,
        "the rows between the mark and the first that is asked for are not passed over",
        ("data.source._read_lines", "if index >= start:", "if index >= 0:")),
    row("blank-lines-are-rows", PLACES,
        "a blank line counts as a row while rows are read, though not when they were counted",
        ("data.source._read_lines", "if is_blank(raw):", "if raw is None:")),
    row("line-numbers-from-the-mark", PLACES,
        "places are counted from the mark on",
        ("data.source._read_lines", "enumerate(file, start=line)", "enumerate(file, start=1)")),
    row("last-of-two-values-kept", PLACES,
        "of a key that stands twice in an object the last value counts",
        ("data.file_kinds._once_each", "if len(members) < len(pairs):", "if False:")),
    row("rows-named-by-their-count", NAMED,
        "rows are left out by their count in the file, which blank lines are no part of",
        ("data.named_rows.rows_but_named", "row.number in named", "row.index + 1 in named")),
    row("numbers-of-no-row", NAMED,
        "a number that no row has leaves nothing out",
        ("data.named_rows.refuse_missing", "if number not in there", "if False")),
    row("drawn-rows-are-trained-on", SPLIT,
        "rows that were drawn for validation are valued where no other rule removes them",
        ("score.job.Corpus._example", "if row.index in self.drawn:", "if False:")),
    row("repeats-of-the-fisher-stay", SPLIT,
        "rows that the Fisher was fitted on are valued",
        ("score.job.Corpus._example", '"fisher": self.fisher', '"fisher": frozenset()')),
    row("kept-prompts-are-learned", SPLIT,
        "labels of the rows that a survey keeps are all of their tokens",
        ("score.job.CorpusSurvey.examples", "labels.tolist()", "ids.tolist()")),
    row("marked-turns-are-learned", MARKED,
        "turns that the data mark as not to be trained on have labels",
        ("data.encode._encode", "row.turns[i].learned and ", "")),
    row("null-is-a-column", MARKED,
        "a column that is null counts as present",
        ("data.survey.Columns.__init__", "if v is not None and", "if")),
)  # fmt: skip


# --- pairs of Value-Propagation that a training run collects -------------------------------------


LOOKED = claim(
    test_collected_pairs.test_weights_and_deviations_of_pairs,
    DecoderConfig(layers=2, heads=4, kv_heads=2),
    st.integers(0, 9),
    st.sampled_from([1, 3]),
    examples=3,
)
COUNTED = claim(test_collected_pairs.test_counts_of_pairs, st.integers(0, 99), 30, examples=3)
SHARED = claim(
    test_collected_pairs.test_shares_above_powers_of_ten,
    st.integers(0, 99),
    st.sampled_from([0.001, 0.1]),
    examples=6,
)


COLLECTED_PAIRS = (
    row("deviation-not-normalised", LOOKED,
        "the deviation of a pair is not divided by the square root of the head's width",
        ("diagnose.pairs._deviation", "/ width**0.5", "")),
    row("deviation-from-the-own-output", LOOKED,
        "a token's value is compared with the output at its own position, not the later one",
        ("diagnose.pairs._deviation", "output[row, :, k]", "output[row, :, t]")),
    row("attention-transposed", LOOKED,
        "the weight of a pair is that of the earlier position on the later one",
        ("diagnose.pairs._select",
         "alpha = statistics.weights(block).flatten(1, 2)[row, :, at, column]",
         "alpha = statistics.weights(block).flatten(1, 2)[row, :, column, at]")),
    row("pairs-window-one-wider", LOOKED,
        "pairs are collected one position beyond the window",
        ("diagnose.pairs._select", "(k <= t + window)", "(k <= t + window + 1)")),
    row("cells-transposed", COUNTED,
        "cells of weight and deviation change places",
        ("diagnose.pairs.PairCounts.of",
         "columns[0], columns[1], bins", "columns[1], columns[0], bins")),
    row("risk-without-deviation", COUNTED,
        "the risk of a pair is its weight alone",
        ("diagnose.pairs.PairCounts.of", "(weight * away, RISK)", "(weight, RISK)")),
    row("masked-pairs-counted", COUNTED,
        "pairs that a mask hides are counted with the smallest weight",
        ("diagnose.pairs.PairCounts.of", "visible = alpha > 0", "visible = alpha >= 0")),
    row("shares-of-a-cell-less", SHARED,
        "the first cell at a level is left out of the share above it",
        ("diagnose.pairs.PairCounts.share_above",
         "self.risk[max(first, 0) :]", "self.risk[max(first, 0) + 1 :]")),
)  # fmt: skip


# --- the diagnostic that compares arithmetics ----------------------------------------------------


SCORED = claim(tests.test_each_arithmetic_has_the_scorers_values, "alphatoken", tested=True)
UNMOVED = claim(tests.test_a_model_that_has_not_moved_drifts_in_no_arithmetic)
NUMBERS = claim(tests.test_the_four_numbers_by_hand)
REDRAWN = claim(tests.test_what_other_rows_change_is_counted_draw_by_draw)
PLANTED = claim(tests.test_planted_rounding_turns_the_verdict)


ARITHMETICS = (
    row("autocast-never-on", SCORED,
        "values under autocast are those of float32",
        ("diagnose.arithmetic.rounded", "enabled=autocast", "enabled=False")),
    row("buffers-rounded-with-the-weights", SCORED,
        "tables of angles are rounded, which loading in 16 bits leaves alone",
        ("diagnose.arithmetic._with_weights", "return copied", "return copied.to(dtype)")),
    row("rounded-weights-from-a-reference-that-is-not", UNMOVED,
        "the rounding of the weights is taken for drift",
        ("diagnose.arithmetic._values",
         "reference=rounded_weights", "reference=retention.reference")),
    row("error-relative-to-the-narrow-values", NUMBERS,
        "the error is divided by the norm of the values that have it",
        ("diagnose.statistics.relative_error", "norm(truth)", "norm(values)")),
    row("decisions-that-stand-counted-as-reversed", REDRAWN,
        "the share of the draws that keep a kept token counts as its reversals",
        ("diagnose.arithmetic.redrawn_changes",
         "1 - keep_share, keep_share", "keep_share, 1 - keep_share")),
    row("good-enough-turned", PLANTED,
        "an arithmetic that changes more decisions than other rows do is good enough",
        ("diagnose.arithmetic._record", "changed < redrawn.value", "changed > redrawn.value")),
)  # fmt: skip


# --- the verdict on rows -------------------------------------------------------------------------


ORDERINGS = claim(
    verdicts.test_a_permutation_test_goes_through_every_ordering,
    judged=[2, 2], reference=[0, 0, 1], examples=1,
)  # fmt: skip
LEVELS = claim(
    verdicts.test_of_exchangeable_rows_the_p_value_is_valid_at_each_level,
    values=[0, 1, 2, 4, 8], n=2, examples=1,
)  # fmt: skip
DRAWN = claim(
    verdicts.test_drawn_arrangements_are_valid_at_each_level_and_near_the_exact_p_value, examples=1
)
WELCH = claim(
    verdicts.test_the_interval_of_a_difference_is_welchs,
    judged=[1, 4, 9], reference=[1, 2, 5, 5, 6, 0], examples=1,
)  # fmt: skip
TWO_TESTS = claim(verdicts.test_two_tests_are_valid_together, examples=1)
HALVES = claim(verdicts.test_halves_are_drawn_by_the_seed, examples=1)
ONE_HALF = claim(
    verdicts.test_rows_of_one_prompt_are_in_one_half, [0, 1, 2, 3, 4, 5, 6, 7, 7, 7], 0,
    examples=1, tested=True,
)  # fmt: skip
ROW_VALUES = claim(
    verdicts.test_each_row_has_its_value_and_loss_and_the_reference_was_not_walked_on, examples=1
)
LEFT_OUT = claim(
    verdicts.test_rows_on_both_sides_and_rows_without_a_response_are_left_out_and_counted,
    examples=1,
)
UNCLEAR = claim(verdicts.test_too_few_trusted_rows_to_tell_is_an_answer_too, examples=1)
BEYOND = claim(verdicts.test_rows_that_no_reference_row_reaches_are_named, examples=1)
PROMPTS = claim(
    prompts.test_each_row_gets_the_prompt_of_another,
    prompts.ROWS, prompts.ROWS, st.integers(4, 8), st.integers(0, 9), examples=200,
)  # fmt: skip
DRAWN_PROMPTS = claim(prompts.test_prompts_are_drawn, examples=1)
GAINS = claim(prompts.test_the_gain_of_a_prompt_is_that_of_losses_row_by_row, examples=1)
LEAVES_OUT = claim(verdicts.test_rows_that_an_arm_leaves_out_have_numbers_of_one_file, examples=1)
RACE_TIME = claim(verdicts.test_the_time_of_a_race_is_that_of_its_rows, examples=1)
VERDICT = claim(
    verdicts.test_the_verdict_follows_the_p_value_and_names_the_next_command, examples=1
)


VERDICTS = (
    row("permutation-test-one-sided", ORDERINGS,
        "rows of lower values than the others never differ",
        ("diagnose.statistics.permutation_test", "np.abs(part) >= observed", "part >= observed")),
    row("permutation-ties-not-counted", (ORDERINGS, LEVELS),
        "arrangements with the observed difference do not count, the observed one among them",
        ("diagnose.statistics.permutation_test", "np.abs(part) >= observed",
         "np.abs(part) > observed + 2e-12 * float(np.abs(values).sum())")),
    row("permutation-without-the-observed-arrangement", DRAWN,
        "where arrangements are drawn a p-value can be 0",
        ("diagnose.statistics.permutation_test", "(1 + hits) / (1 + draws)", "hits / draws")),
    row("arrangements-drawn-with-repeated-rows", DRAWN,
        "a row can be in a drawn group twice",
        ("diagnose.statistics._drawn_sums",
         "values[np.argpartition(noise, few - 1, axis=1)[:, :few]]",
         "values[(noise * len(values)).astype(np.int64)[:, :few]]")),
    row("interval-of-one-group-alone", WELCH,
        "the reference counts as if it were known without error",
        ("diagnose.statistics.difference_of_means",
         "variance = of_x + of_y", "variance = of_x")),
    row("two-tests-at-the-level-of-one", TWO_TESTS,
        "of rows that do not differ nearly twice as many as the level says are said to",
        ("diagnose.data.together", "len(tests) * min", "min")),
    row("prompt-of-the-row-itself", PROMPTS,
        "a row is given its own prompt in place of another one",
        ("diagnose.prompts.exchanged", "one != own and", "")),
    row("prompts-longer-than-any-row", PROMPTS,
        "a row with another prompt is longer than the model was asked to read",
        ("diagnose.prompts.exchanged", "len(one) + rest <= longest", "True")),
    row("first-prompt-for-all", DRAWN_PROMPTS,
        "every row is given the same prompt, by which all of them are off or none",
        ("diagnose.prompts.exchanged", "int(drawn) % len(fitting)", "0")),
    row("loss-beside-another-prompt-alone", GAINS,
        "an answer of low loss passes for one that needs no prompt",
        ("diagnose.prompts.prompt_gains", "next(means) - own", "next(means)")),
    row("rows-whose-prompt-does-most", BEYOND,
        "rows whose prompt does more than that of any reference row are named as odd",
        ("diagnose.data.beyond_reference", "(sign * numbers for",
         "(abs(sign) * numbers for")),
    row("arm-without-most-rows", LEAVES_OUT,
        "the race that is printed has an arm without most of the rows",
        ("diagnose.data.rows_to_leave_out", "min(NAMED, len(places) // 2)", "NAMED")),
    row("arm-without-rows-of-several-files", LEAVES_OUT,
        "the race that is printed names rows of several files by number",
        ("diagnose.data.rows_to_leave_out", "len(files) != 1 or", "")),
    row("halves-without-a-draw", HALVES,
        "the first trusted rows of the file are always those that are walked on",
        ("diagnose.data.halves",
         "np.random.default_rng(seed).permutation(len(of_prompt)).tolist()",
         "range(len(of_prompt))")),
    row("prompt-in-both-halves", ONE_HALF,
        "the walk is taken on other answers to the prompts of the reference",
        ("diagnose.data.halves", "_by_prompt(rows).values()", "[[n] for n in range(len(rows))]")),
    row("copies-of-a-row-judged", LEFT_OUT,
        "a training row that is there ten times counts as ten",
        ("diagnose.data._groups", "list(_without_copies(others).values())", "others")),
    row("reference-that-was-walked-on", ROW_VALUES,
        "rows are compared with the rows of the walk",
        ("diagnose.data._groups", "TRUSTED: reference}", "TRUSTED: walked}")),
    row("loss-at-the-end-of-the-walk", ROW_VALUES,
        "the losses beside the values are those after the walk",
        ("estimate.walk.Walk._values", "losses=here", "losses=there")),
    row("trusted-rows-judged-too", LEFT_OUT,
        "rows that are trusted are judged, some after a walk on themselves",
        ("diagnose.data._groups", "not in of_trusted]", "not in {}]")),
    row("verdict-turned", VERDICT,
        "rows that differ are said to look alike",
        ("diagnose.data.verdict", "together(tests) <= LEVEL", "together(tests) > LEVEL")),
    row("rows-beyond-one-reference-row", BEYOND,
        "rows that some reference row exceeds are said to be beyond all of them",
        ("diagnose.data.beyond_reference", "max(trusted[", "min(trusted[")),
    row("race-time-without-its-losers", RACE_TIME,
        "the arms that leave a race cost nothing in the time that is said before it",
        ("diagnose.data.race_passes", "= look * size * (losers + 1 / 3)", "= 0")),
    row("interval-that-leaves-0-out-not-read", UNCLEAR,
        "rows are said to look alike where the trusted ones are too few to tell",
        ("diagnose.data.verdict", "if apart or unseen", "if unseen")),
    row("look-alike-beside-few-trusted-rows", UNCLEAR,
        "rows are said to look alike where half of them could be of another kind",
        ("diagnose.data.verdict", "if apart or unseen > MOST_UNSEEN", "if apart")),
    row("race-where-rows-look-alike", VERDICT,
        "the next command is a race where the verdict says to train on everything",
        ("diagnose.data.next_command", "if answer == ALIKE", "if answer != ALIKE")),
)  # fmt: skip


# --- what ``show`` prints ------------------------------------------------------------------------


MARKS = claim(
    test_shown_tokens.test_a_character_is_marked_by_all_its_tokens,
    test_shown_tokens.TEXTS,
    test_shown_tokens.WEIGHTS,
    examples=100,
)
GROUPS = claim(
    test_shown_tokens.test_tokens_of_a_character_are_one_group,
    test_shown_tokens.TEXTS,
    st.integers(0, 3),
    examples=60,
)
TRUNCATED = claim(
    test_shown_tokens.test_what_truncation_leaves_of_a_row,
    test_shown_tokens.PLACES,
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from(["start", "end"]),
    examples=60,
    needs=("trl",),
)
CUT_PAIRS = claim(
    test_shown_tokens.test_a_pair_is_compared_as_it_is_cut,
    *[test_shown_tokens.RESPONSE] * 3,
    *[test_shown_tokens.LIMIT] * 3,
    st.sampled_from(["start", "end"]),
    examples=100,
    needs=("trl",),
)
NOTEBOOK = claim(
    test_coloured.test_a_notebook_shows_each_value_at_its_token,
    test_coloured.ROWS,
    test_coloured.SEEDS,
    examples=40,
)
TERMINAL = claim(
    test_coloured.test_a_terminal_shows_each_value_at_its_token,
    test_coloured.ROWS,
    test_coloured.SEEDS,
    examples=40,
)
TABLE = claim(
    test_coloured.test_a_table_has_one_line_a_response_token,
    test_coloured.ROWS,
    test_coloured.SEEDS,
    st.booleans(),
    examples=40,
    needs=("pandas",),
)
SPOILED = claim(
    test_demo.test_what_the_demo_calls_spoiled_is_spoiled_and_nothing_else,
    test_demo.SIZES,
    test_demo.SEEDS,
    examples=20,
)
STANDINGS = claim(test_demo.test_where_a_row_stands, test_demo.NATS, test_demo.SEEDS, examples=40)

SHOWN = (
    row("value-shown-one-token-late", NOTEBOOK,
        "each token is shown with the value of the one before it",
        ("values.TokenValues.show", "float(values[row, i])", "float(values[row, i - 1])")),
    row("padding-on-the-left-shown", TERMINAL,
        "padding is shown as if it were a prompt",
        ("values._real", "!= 0", ">= 0")),
    row("colours-exchanged-in-a-notebook", NOTEBOOK,
        "positive values are orange, and negative ones blue",
        ("support.coloured._marked", "PLUS if strength > 0", "PLUS if strength < 0")),
    row("colours-exchanged-in-a-terminal", TERMINAL,
        "positive values have the colour of negative ones",
        ("support.coloured.ColouredRows._token", "codes[strength > 0]", "codes[strength < 0]")),
    row("a-scale-of-the-first-row-alone", NOTEBOOK,
        "the first row alone decides the colours of all",
        ("support.coloured.ColouredRows.full", "in self.rows", "in self.rows[:1]")),
    row("clean-rows-said-to-be-spoiled", SPOILED,
        "the demo names the row before each one that it spoiled",
        ("demo.rows.demo_rows", "place: WRONG_WORDS", "max(place - 1, 0): WRONG_WORDS")),
    row("rows-of-low-loss-first", STANDINGS,
        "the demo ranks rows by loss from the lowest",
        ("demo.__main__.standings", "-means[row][1]", "means[row][1]")),
    row("prompts-in-the-means-of-rows", STANDINGS,
        "the demo's means count the tokens of prompts",
        ("demo.__main__.standings", "one.values[key][one.response].mean()",
         "one.values[key].mean()")),
    row("text-of-rows-read-as-html", NOTEBOOK,
        "a row that holds tags is shown as HTML",
        ("support.coloured.ColouredRows._html", "escape(visible(one.text) or EMPTY)",
         "visible(one.text) or EMPTY")),
    row("table-with-the-token-before", TABLE,
        "the table names the token before the one whose value it has",
        ("values.TokenValues.to_pandas", "self.input_ids.cpu()[row, position]",
         "self.input_ids.cpu()[row, position - 1]")),
    row("character-by-its-first-token", MARKS,
        "a character is marked by the first of its tokens alone",
        ("cli.marked_text._pieces", "weights[start:stop]", "weights[start : start + 1]")),
    row("weight-zero-marked-as-trained", MARKS,
        "a token of weight 0 is marked as trained on",
        ("cli.marked_text._pieces", "[start:stop] if weight)",
         "[start:stop] if weight is not None)")),
    row("control-characters-printed", MARKS,
        "a terminal obeys the control characters of a row",
        ("support.token_texts.visible", "_mark(match.group())", "match.group()")),
    row("half-a-character-printed", GROUPS,
        "tokens of one character are printed one by one",
        ("support.token_texts.text_groups", "stop - read < _LONGEST_CHARACTER", "False")),
    row("first-token-shown-as-trained", TRUNCATED,
        "the first token of a row, which nothing predicts, is shown as trained on",
        ("cli.show_run._cut", "own[:1] = [None] * len(own[:1])", "pass")),
    row("rows-shown-cut-at-the-other-end", TRUNCATED,
        "rows are shown with the end that truncation takes",
        ("train.python_rows.kept_tokens", '== "keep_start"', '!= "keep_start"')),
    row("pairs-compared-before-they-are-cut", CUT_PAIRS,
        "a pair whose responses are equal as they are cut trains on noise",
        ("train.python_rows.cut_problem", "or chosen != rejected",
         'or pair["chosen_ids"] != pair["rejected_ids"]')),
    row("a-cut-prompt-is-an-equal-pair", CUT_PAIRS,
        "a pair without room for a response is said to have two equal ones",
        ("train.python_rows.cut_problem", "not has_response or", "")),
    row("prompt-shown-as-trained", TRUNCATED,
        "tokens without a label are shown as trained on",
        ("cli.show_run._of_rows", "None if label == IGNORE else weight", "weight")),
)  # fmt: skip


NAMED = st.one_of(st.none(), st.sampled_from(presets.NAMES))
IN_FORCE = claim(
    presets.test_the_named_preset_then_research_options_then_the_default,
    NAMED, st.sets(st.sampled_from(presets.OPTIONS)), st.sampled_from(presets.NAMES),
)  # fmt: skip
OF_SCORE = claim(
    presets.test_score_takes_a_walk_where_one_can_be_taken, st.sampled_from([*presets.SCORE])
)
STEPS = claim(presets.test_the_walk_is_24_steps_at_its_rate, presets.SETUP, examples=1)

PRESETS = (
    row(
        "research-options-under-the-default-preset",
        IN_FORCE,
        "an option such as --window is read into a preset that has no such thing",
        ("config.in_force", "and not named.keys() & {*RESEARCH}", ""),
    ),
    row(
        "preset-beats-what-is-named-beside-it",
        IN_FORCE,
        "the steps that a user names give way to those of the preset",
        ("presets.preset_options", "{**options, **more}", "{**more, **options}"),
    ),
    row(
        "score-of-the-former-default",
        OF_SCORE,
        "where nothing is named rows are valued by the paper's estimator, and not along a walk",
        ("cli.score.read", 'else "walk"', 'else "paper"'),
    ),
    row(
        "walk-beside-a-fisher",
        OF_SCORE,
        "with a Fisher the default is a walk, which would leave it unread",
        ("score.options.rules_out_walk", 'options["fisher_file"] is not None', "False"),
    ),
    row(
        "walk-at-twice-its-rate",
        STEPS,
        "without a rate of its own a walk is longer than it is said to be",
        ("estimate.walk.end_of_walk", "rate = config.walk_rate", "rate = 2 * config.walk_rate"),
    ),
)
