"""Sampled mutants that no test sees, looked at one by one.

A sentence that begins with "Equivalent" says why no value depends on the change; the others are
holes of the tests that are left, or are seen by a test of a slower tier.
"""

from __future__ import annotations

EXPLAINED: dict[str, str] = {
    "select.losses._by_response:body0/value/orelse/args0:0": (
        "Equivalent: the tensor has two axes there, so 1 is the last one."
    ),
    "model.vocabulary._ChosenLosses.forward:body3/body2/value/args0:0": (
        "Equivalent: the tensor has two axes, so 1 is the last one."
    ),
    "estimate.columns.total_side:body2:0": (
        "Equivalent: without the summed side both are contracted, at twice the cost."
    ),
    "direction.objective.stream_losses:body2/body0/body1/body2:2": (
        "Equivalent: the proofs then run on the first batch that is scored."
    ),
    "direction.preconditioner.full_preconditioner:body4/value:0": (
        "Equivalent but for a second moment that is exactly the floor."
    ),
    "scorer.Scorer.score:body6/test/values1:0": (
        "Equivalent: label values then come from a recorded forward, at more cost."
    ),
    "estimate.forward_mode._attention:body2:0": (
        "Only slower tests see it: on transformers' kernels, which have no rule for tangents."
    ),
    "direction.current.Target._current_stamp:body1:2": (
        "A hole: a direction of sharded weights was kept after a step, and no test looked. Now "
        "`test_a_sharded_direction_is_never_stale` does."
    ),
    "model.attention._mask:body1/body0/value/args1/args1/slice:0": (
        "A hole where masks differ by head: groups and queries a group were two and two in the "
        "tests that ran."
    ),
    "estimate.proofs.prove_isolation:body3/test/operand/args0/func/value/comparators0:0": (
        "A hole: no row ended at its third token, the shortest that can show a leak. Now "
        "`test_isolation_is_claimed_only_where_it_was_shown` takes that row."
    ),
    "scorer.Scorer.score:body7/body2:0": (
        "Not measured: `test_full_values_are_the_steps_derivative` fails, run by hand afterwards."
    ),
    "scorer.Scorer._warn_if_one_sided:body2/test/values0/comparators1:0": (
        "A hole: the warning about a side that decides alone then came too often, and no test "
        "expected silence. Now `test_a_side_is_said_to_decide_alone_from_a_share_of_0_999_on` does."
    ),
    "model.transformers._resume:body2/value:1": (
        "Not measured: leaving one of two pauses of checkpointing is the business of "
        "`test_attention_dispatch.py`."
    ),
    "train.options.AlphaOptions._check_numbers:body2/test/values1:0": (
        "A hole: nothing asks for micro-batches of one validation row."
    ),
}
"""By the mutant's key: function, way to the place, number of the change."""
