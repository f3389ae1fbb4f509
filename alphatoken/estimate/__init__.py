"""Captured inputs and errors, contracted to one value a token.

A linear map ``W`` that a forward used with inputs ``x_t`` and errors ``delta_t`` has the
gradient ``sum_t delta_t x_t^T``. The value of a token is the inner product of its part of that
sum with a direction ``M``, which callers pass in:

1. :mod:`~alphatoken.estimate.estimators` says *which* errors an estimator contracts, as its
   direct and as its causal part: ordinary ones, those cut to the position itself, or propagated
   ones.
2. :mod:`~alphatoken.estimate.contraction` is the algebra, ``delta^T M x`` without the outer
   product: pure functions of tensors.
3. :mod:`~alphatoken.estimate.columns` sums the contractions of all uses of all scored maps to a
   column of numbers by position.
4. :mod:`~alphatoken.estimate.token_values` moves columns from the position that predicts to the
   token that is predicted, and adds both sides with lambda to ``TokenValues``.

Two ways beside that one: :mod:`~alphatoken.estimate.forward_mode` computes label values, which
are exact for a loss mask, by one differentiation along ``M``; and
:mod:`~alphatoken.estimate.gradients` sums captured uses to whole gradients, which
:mod:`~alphatoken.estimate.proofs` compares with autograd's on the user's own model before any
value is returned (sharded weights allow no such proof). For label values
:mod:`~alphatoken.estimate.derivatives` compares forward mode with autograd, and for all of them
:mod:`~alphatoken.estimate.causality` shows that no prediction sees its own token;
:mod:`~alphatoken.estimate.padding` names models that read the padding on the left of a row.

**May import** ``model``, ``values``, ``support`` and ``errors``. **Mathematics**:
docs/notation.md and docs/estimators.md; the oracles are
``alphatoken.oracle.influence``, ``propagation`` for Value-Propagation and ``gradients`` for label
values, and docs/claims.md says which property ties which two.
"""
