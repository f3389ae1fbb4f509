"""Errors in the diagnostic that compares arithmetics."""

from __future__ import annotations

from tests.property import test_diagnose_arithmetic as tests
from tests.property.mutation import claim, mutant

SCORED = claim(tests.test_each_arithmetic_has_the_scorers_values, "alphatoken", tested=True)
UNMOVED = claim(tests.test_a_model_that_has_not_moved_drifts_in_no_arithmetic)
NUMBERS = claim(tests.test_the_four_numbers_by_hand)
REDRAWN = claim(tests.test_what_other_rows_change_is_counted_draw_by_draw)
PLANTED = claim(tests.test_planted_rounding_turns_the_verdict)
_ROOM = "diagnose.arithmetic."

MUTANTS = (
    mutant(
        "autocast-never-on",
        "values under autocast are those of float32",
        ("Arithmetic.used", "enabled=self.autocast", "enabled=False"), SCORED, room=_ROOM,
    ),
    mutant(
        "buffers-rounded-with-the-weights",
        "tables of angles are rounded, which loading in 16 bits leaves alone",
        ("_with_weights", "return copied", "return copied.to(dtype)"), SCORED, room=_ROOM,
    ),
    mutant(
        "rounded-weights-from-a-reference-that-is-not",
        "the rounding of the weights is taken for drift",
        ("_values", "reference=rounded", "reference=retention.reference"), UNMOVED, room=_ROOM,
    ),
    mutant(
        "error-relative-to-the-narrow-values",
        "the error is divided by the norm of the values that have it",
        ("relative_error", "norm(truth)", "norm(values)"), NUMBERS, room="diagnose.statistics.",
    ),
    mutant(
        "decisions-that-stand-counted-as-reversed",
        "the share of the draws that keep a kept token counts as its reversals",
        ("redrawn_changes", "1 - keep_share, keep_share", "keep_share, 1 - keep_share"), REDRAWN,
        room=_ROOM,
    ),
    mutant(
        "good-enough-turned",
        "an arithmetic that changes more decisions than other rows do is good enough",
        ("_record", "changed < redrawn.value", "changed > redrawn.value"), PLANTED, room=_ROOM,
    ),
)  # fmt: skip
