"""Errors in influence directions: in the factors of K, its eigenvalues, and the solve with it."""

from __future__ import annotations

from functools import partial

from tests.property import test_influence_direction as influence
from tests.property.mutation import claim, mutant

DENSE = claim(
    influence.test_influence_direction_is_the_dense_solve,
    setup=influence.SQUARE,
    damping=0.1,
    samples=3,
    examples=1,
)
VECTORS = claim(
    influence.test_eigenvectors_are_those_of_the_factors,
    setup=influence.SQUARE,
    seed=0,
    examples=1,
)
REDUCED = claim(influence.test_influence_of_reduced_gradients, examples=1)

_solve = partial(mutant, room="direction.influence.InfluenceFactors.")
_fit = partial(mutant, room="direction.moments.CorrectedMoments.")

MUTANTS = (
    _solve(
        "influence-factors-exchanged",
        "rows are turned by the eigenvectors of the inputs",
        ("_solved", "(self.left, self.right,", "(self.right, self.left,"),
        DENSE,
    ),
    _solve(
        "influence-eigenvectors-transposed",
        "Q G Q^T in place of Q^T G Q",
        ("_solved", "left.T @ matrix.to(dtype) @ right)", "left @ matrix.to(dtype) @ right.T)"),
        DENSE,
    ),
    _solve(
        "influence-damping-added-after-the-division",
        "mu keeps no eigenvalue from zero",
        ("_solved", "/ (eigenvalues + mu)", "/ eigenvalues + mu"),
        DENSE,
    ),
    _solve(
        "influence-damping-without-a-unit",
        "mu is no share of the eigenvalues",
        ("_solved", "damping * eigenvalues.mean()", "damping"),
        DENSE,
    ),
    _solve(
        "influence-damping-of-another-linear",
        "the first linear's mean for all",
        (
            "_solved",
            "damping * eigenvalues.mean()",
            "damping * next(iter(self.eigenvalues.values())).mean()",
        ),
        DENSE,
    ),
    _fit(
        "influence-eigenvalues-not-corrected",
        "an outer product of both sides' sums, as the factors have it",
        (
            "add",
            "gradient.square()",
            "torch.outer(*(gradient.square().sum(d) for d in (1, 0))) / gradient.square().sum()",
        ),
        DENSE,
    ),
    _fit(
        "influence-gradient-of-the-last-use",
        "uses of a weight are not summed before they are squared",
        ("add", "gradients[key] + part if key in gradients else part", "part"),
        claim(
            influence.test_influence_direction_is_the_dense_solve,
            setup=influence.TURNED,
            damping=0.1,
            samples=2,
            examples=1,
        ),
    ),
    _fit(
        "influence-eigenvectors-in-rows",
        "the transposed eigenvectors are kept",
        ("turn", ".eigenvectors)", ".eigenvectors.mT)"),
        VECTORS,
    ),
    mutant(
        "influence-labels-drawn-anew",
        "the second pass has other samples than the first",
        ("direction.fisher._Fit.run", "self._add(index % samples)", "self._add(index)"),
        DENSE,
    ),
    mutant(
        "influence-tokens-of-both-passes",
        "eigenvalues half as large",
        ("direction.fisher._Fit._add", "if self.done < self.settings.samples:", "if True:"),
        DENSE,
    ),
    mutant(
        "influence-before-the-reduction",
        "each process solves with its own gradient alone",
        (
            "direction.inputs.DirectionInputs._mean",
            "(self.arguments.reduce or mean_gradient)",
            "mean_gradient",
        ),
        REDUCED,
    ),
)
