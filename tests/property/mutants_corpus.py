"""Errors in what reads and ranks corpora of any size."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property import test_corpus, test_queries
from tests.property.mutation import Claim, Edit, Mutant, claim

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
SPLIT = claim(
    test_corpus.test_corpus,
    test_corpus.lines(8),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=3),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 7),
    examples=150,
)


def _corpus(name: str, sentence: str, target: str, old: str, new: str, found: Claim) -> Mutant:
    return Mutant(name, sentence, (Edit(target, old, new),), (found,), listed=False)


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

_SOURCE = "data.source._read_lines"
_ROW = "score.rows.Corpus"

_BY_QUERY = "score.engines._values_by_query"

MUTANTS = (
    _corpus(
        "queries-exchanged",
        "the values against the last query are those of the first one",
        _BY_QUERY, "values.by_batch()", "values.by_batch().flip(-1)", QUERIES,
    ),
    _corpus(
        "rows-that-say-the-same-are-left-out",
        "a training row that repeats a query is removed, as one that repeats a validation row is",
        "score.job.prepare_rows", "if not options.queries", "if True", QUERIES,
    ),
    _corpus(
        "last-ties-of-all",
        "of equal values at the threshold the last ones are kept",
        "select.masks.top_mask", "== edge)[: count", "== edge)[::-1][: count", SHARE,
    ),
    _corpus(
        "one-row-over-the-budget",
        "the row at which the budget ends is kept too",
        "score.kept_rows.best_rows", "max(1, count)", "count + 1", BEST,
    ),
    _corpus(
        "the-last-of-equal-rows",
        "of rows of equal value the last ones are kept",
        "score.kept_rows._ranked",
        'np.argsort(-values, kind="stable")', 'np.argsort(values, kind="stable")[::-1]', BEST,
    ),
    _corpus(
        "rows-counted-from-the-mark",
        "the rows between the mark and the first that is asked for are not passed over",
        _SOURCE, "if index >= start:", "if index >= 0:", PLACES,
    ),
    _corpus(
        "blank-lines-are-rows",
        "a blank line counts as a row while rows are read, though not when they were counted",
        _SOURCE, "if is_blank(raw):", "if raw is None:", PLACES,
    ),
    _corpus(
        "line-numbers-from-the-mark",
        "places are counted from the mark on",
        _SOURCE, "enumerate(file, start=line)", "enumerate(file, start=1)", PLACES,
    ),
    _corpus(
        "drawn-rows-are-trained-on",
        "rows that were drawn for validation are valued where no other rule removes them",
        f"{_ROW}._outcome", "if row.index in self.drawn:", "if False:", SPLIT,
    ),
    _corpus(
        "repeats-of-the-fisher-stay",
        "rows that the Fisher was fitted on are valued",
        f"{_ROW}._outcome", '"fisher": self.fisher', '"fisher": frozenset()', SPLIT,
    ),
    _corpus(
        "marked-turns-are-learned",
        "turns that the data mark as not to be trained on have labels",
        "data.encode._encode", "row.turns[i].learned and ", "", MARKED,
    ),
    _corpus(
        "null-is-a-column",
        "a column that is null counts as present",
        "data.survey.Columns.__init__", "if v is not None and", "if", MARKED,
    ),
)  # fmt: skip
