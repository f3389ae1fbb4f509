"""Errors in what a training run collects of Value-Propagation's pairs."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property import test_collected_pairs
from tests.property.decoder import DecoderConfig
from tests.property.mutation import Claim, Edit, Mutant, claim

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


def _watch(name: str, sentence: str, target: str, old: str, new: str, found: Claim) -> Mutant:
    return Mutant(name, sentence, (Edit(f"diagnose.{target}", old, new),), (found,), listed=False)


MUTANTS = (
    _watch(
        "deviation-not-normalised",
        "the deviation of a pair is not divided by the square root of the head's width",
        "pairs._deviation", "/ width**0.5", "", LOOKED,
    ),
    _watch(
        "deviation-from-the-own-output",
        "a token's value is compared with the output at its own position, not the later one",
        "pairs._deviation", "output[row, :, k]",
        "output[row, :, t]", LOOKED,
    ),
    _watch(
        "attention-transposed",
        "the weight of a pair is that of the earlier position on the later one",
        "pairs._select", "alpha = statistics.weights(block).flatten(1, 2)[row, :, at, column]",
        "alpha = statistics.weights(block).flatten(1, 2)[row, :, column, at]", LOOKED,
    ),
    _watch(
        "pairs-window-one-wider",
        "pairs are collected one position beyond the window",
        "pairs._select", "(k <= t + window)", "(k <= t + window + 1)", LOOKED,
    ),
    _watch(
        "cells-transposed",
        "cells of weight and deviation change places",
        "pairs.PairCounts.of", "columns[0], columns[1], bins",
        "columns[1], columns[0], bins", COUNTED,
    ),
    _watch(
        "risk-without-deviation",
        "the risk of a pair is its weight alone",
        "pairs.PairCounts.of", "(weight * away, RISK)", "(weight, RISK)", COUNTED,
    ),
    _watch(
        "masked-pairs-counted",
        "pairs that a mask hides are counted with the smallest weight",
        "pairs.PairCounts.of", "visible = alpha > 0", "visible = alpha >= 0", COUNTED,
    ),
    _watch(
        "shares-of-a-cell-less",
        "the first cell at a level is left out of the share above it",
        "pairs.PairCounts.share_above", "self.risk[max(first, 0) :]",
        "self.risk[max(first, 0) + 1 :]", SHARED,
    ),
)  # fmt: skip
