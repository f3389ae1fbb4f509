"""Errors in values along a walk, and in when a walk is taken."""

from __future__ import annotations

from functools import partial

from tests.property import test_walk as walks
from tests.property.mutation import claim, mutant
from tests.property.setups import Setup

COPY = claim(
    walks.test_walk_values_are_those_of_a_trained_copy,
    setup=Setup(walks.CASE),
    steps=3,
    examples=1,
)
DROPPED = claim(walks.test_a_forward_with_dropout_is_run_again, examples=1)
WEIGHED = claim(walks.test_token_weights_scale_their_token, examples=1)
DUE = claim(walks.test_a_new_walk_is_taken_when_it_is_due, refresh=2, pinned=False, examples=1)
KEPT = claim(walks.test_a_changed_setting_keeps_the_walk, examples=1)
NEW = claim(walks.test_other_validation_rows_and_a_refresh_take_a_new_walk, examples=1)
NARROW = claim(walks.test_weights_in_16_bits_walk_in_float32, examples=1)
CAST = claim(walks.test_autocast_keeps_no_cast_of_weights_that_moved, examples=1)
CLIMBS = claim(walks.test_a_walk_that_climbs_is_said, examples=1)

_error = partial(mutant, room="direction.walk.")
_cache = partial(mutant, room="direction.cache.DirectionCache.")

MUTANTS = (
    mutant(
        "walk-value-of-the-other-sign",
        "what the loss rises by",
        (
            "scoring.walk.Walk.values",
            "here.to(dtype) - there.to(dtype)",
            "there.to(dtype) - here.to(dtype)",
        ),
        COPY,
    ),
    mutant(
        "walk-value-of-a-dropped-pass",
        "the observed losses count, whatever drew in them",
        ("scoring.walk.Walk._losses", "draws(self.adapter.model)", "False"),
        DROPPED,
    ),
    mutant(
        "walk-value-without-its-weight",
        "token weights are left out",
        ("scoring.walk.Walk.values", "values = values * rec", "_ = values * rec"),
        WEIGHED,
    ),
    mutant(
        "walk-on-the-first-batch-alone",
        "every step sees one batch",
        ("direction.inputs.DirectionInputs.gradient_of_step", "number % max", "0 * max"),
        COPY,
    ),
    _error(
        "walk-that-does-not-follow-its-steps",
        "every gradient is taken at the start",
        ("walk", "                moved.place(weights)\n", ""),
        COPY,
    ),
    _error(
        "walk-with-weight-decay",
        "AdamW's own decay, which pulls the weights to 0",
        ("end_of_walk", ", weight_decay=0.0", ", weight_decay=1.0"),
        COPY,
    ),
    _error(
        "walk-in-16-bits",
        "steps smaller than a weight's rounding are lost",
        ("walk", "part.to(wide(part.dtype), copy=True)", "part.clone()"),
        NARROW,
    ),
    _cache(
        "walk-anew-at-each-step",
        "a walk from the start moves on with the run",
        ("current", "self._changes >= self._lasts", "self._changes >= 1"),
        DUE,
    ),
    _cache(
        "walk-never-anew",
        "walk_refresh is not read",
        ("current", "(self._lasts and self._changes >= self._lasts)", "False"),
        DUE,
    ),
    _cache(
        "walk-lost-with-a-setting",
        "a new walk from the weights as they are",
        ("follow", "= former.kept,", "= None,"),
        KEPT,
    ),
    _cache(
        "walk-of-former-rows",
        "other validation rows change nothing",
        ("invalidate", "self.kept = self._age = None", "pass"),
        NEW,
    ),
    _error(
        "climbing-walk-unsaid",
        "a rate that is too high is not noticed",
        ("end_of_walk", "if after > before:", "if after > 2 * before:"),
        CLIMBS,
    ),
    mutant(
        "cast-of-weights-that-moved",
        "autocast goes on with the cast that it has",
        ("estimate.shift.Moved._moved", "torch.clear_autocast_cache()", "pass"),
        CAST,
    ),
)
