"""Sampled mutants that no test sees, looked at one by one.

A sentence that begins with "Equivalent" says why no value depends on the change; the others are
holes of the tests that are left, or are seen by a test of a slower tier.
"""

from __future__ import annotations

__all__ = ["EXPLAINED"]

EXPLAINED: dict[str, str] = {
    "losses._by_response:body0/value/orelse/args0:0": (
        "Equivalent: the tensor has two axes there, so 1 is the last one."
    ),
    "vocabulary._ChosenLosses.forward:body3/body2/value/args0:0": (
        "Equivalent: the tensor has two axes, so 1 is the last one."
    ),
    "readout.total_side:body2:0": (
        "Equivalent: without the summed side both are contracted, at twice the cost."
    ),
    "objective.stream_losses:body2/body0/body1/body2:2": (
        "Equivalent: the proofs then run on the first batch that is scored."
    ),
    "preconditioner.full_preconditioner:body4/value:0": (
        "Equivalent but for a second moment that is exactly the floor."
    ),
    "scorer.Scorer.score:body6/test/values1:0": (
        "Equivalent: label values then come from a recorded forward, at more cost."
    ),
    "forward_mode._attention:body2:0": (
        "Only slower tests see it: on transformers' kernels, which have no rule for tangents."
    ),
    "target.Target._current_stamp:body1:2": (
        "A hole: a direction of sharded weights was kept after a step, and no test looked. Now "
        "`check_a_sharded_direction_is_never_stale` does."
    ),
    "attention._mask:body1/body0/value/args1/args1/slice:0": (
        "A hole where masks differ by head: groups and queries a group were two and two in the "
        "tests that ran."
    ),
}
"""By the mutant's key: function, way to the place, number of the change."""
