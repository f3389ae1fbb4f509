"""Errors in the oracle of whole runs, which no other oracle stands behind."""

from __future__ import annotations

from functools import partial

from tests.property import test_oracle_run as runs
from tests.property.mutation import claim, mutant

DIFFERENCES = claim(
    runs.test_values_are_differences_of_whole_runs, "adamw", 0.3, examples=1, tested=True
)
TORCH = claim(runs.test_a_run_is_that_of_torch, "adamw", examples=1, tested=True)
LEDGER = claim(runs.test_a_ledger_leaves_out_what_later_steps_do, examples=1)
KEPT = claim(runs.test_states_between_those_that_are_kept_change_no_bit, examples=1)

_error = partial(mutant, room="oracle.run.")

MUTANTS = (
    _error(
        "run-value-of-the-other-sign",
        "what the validation loss rises by",
        ("_Subject.back", "-part for part", "part for part"),
        DIFFERENCES,
    ),
    _error(
        "later-steps-do-nothing",
        "every step has the adjoint of the last",
        ("run_values", "adjoint, values[number] =", "_, values[number] ="),
        LEDGER,
    ),
    _error(
        "ledger-of-the-first-gradient",
        "every step of the ledger has J's gradient where the run starts",
        (
            "ledger_values",
            "subject.adjoint(validation, state)",
            "subject.adjoint(validation, subject.start())",
        ),
        LEDGER,
    ),
    _error(
        "moments-forgotten-on-the-way-back",
        "a token's part in the moments of later steps is left out",
        (
            "_Subject.back",
            "zip(after.flat(), adjoint.flat(), strict=True)",
            "zip(after.theta.values(), adjoint.theta.values(), strict=True)",
        ),
        DIFFERENCES,
    ),
    _error(
        "clipping-as-a-constant",
        "the norm does not depend on the tokens",
        (
            "Run._clipped",
            "scale = self.clip / (norm + 1e-6)",
            "scale = (self.clip / (norm + 1e-6)).detach()",
        ),
        DIFFERENCES,
    ),
    _error(
        "decay-forgotten-on-the-way-back",
        "weight decay shrinks the weights and not what earlier tokens did to them",
        (
            "Run.after",
            "(1 - rate * decay) * value - rate * u",
            "value - rate * decay * value.detach() - rate * u",
        ),
        DIFFERENCES,
    ),
    _error(
        "validation-where-the-run-starts",
        "J has its gradient before the first step",
        (
            "run_values",
            "subject.adjoint(validation, end)",
            "subject.adjoint(validation, kept[0])",
        ),
        LEDGER,
    ),
    _error(
        "states-of-the-first-step-between-two-kept",
        "every step on the way back is at the weights of the one that was kept",
        ("run_values", "states[number - first]", "states[0]"),
        KEPT,
    ),
    _error(
        "step-divided-by-its-first-batch",
        "accumulated batches do not count in N",
        ("Run.count", "in self.batches(number))", "in self.batches(number)[:1])"),
        TORCH,
    ),
    _error(
        "bias-correction-of-the-next-step",
        "Adam's moments are corrected for a step too many",
        ("Run.after", "AdamState(number,", "AdamState(number + 1,"),
        TORCH,
    ),
    _error(
        "weight-decay-of-every-parameter",
        "those that are named decay too",
        ("Run.after", "0.0 if name in self.undecayed else self.weight_decay", "self.weight_decay"),
        TORCH,
    ),
)
