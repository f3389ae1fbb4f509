"""One forward, from its losses to the values of its response tokens.

Under ``Scorer.score`` the scorer runs the forward, in evaluation mode; under ``Scorer.observe`` the
user's training loop does, as it is (:mod:`~alphatoken.estimate.observed` is its handle). Both make
a ``Recording``, and one ``Estimator`` values it (:mod:`~alphatoken.estimate.estimator`, with what
all three share):

* :mod:`~alphatoken.estimate.captured` contracts captured errors with M, use by use, and moves the
  columns from the position that predicts to the token that is predicted.
* :mod:`~alphatoken.estimate.label` differentiates token losses along M:
  :mod:`~alphatoken.estimate.forward_mode` by one dual forward,
  :mod:`~alphatoken.estimate.differences` by forwards at weights that
  :mod:`~alphatoken.estimate.temporary_weights` moves and restores.
* :mod:`~alphatoken.estimate.walk` subtracts the losses at the end of a walk.

:mod:`~alphatoken.estimate.token_values` adds both sides with lambda to ``TokenValues``. Before any
value is returned :mod:`~alphatoken.estimate.proofs` shows on the user's own model that it is one:
:mod:`~alphatoken.estimate.batch_proofs` of what a prediction reads,
:mod:`~alphatoken.estimate.derivatives` of what ``label`` differentiates. Sharded weights allow no
such proof.

**May import** ``direction``, ``config``, ``select``, ``model``, ``values``, ``support`` and
``errors``. **Mathematics**: docs/notation.md and docs/estimators.md. **Oracles**:
``alphatoken.oracle.influence``, ``propagation`` for Value-Propagation, ``gradients`` for label
values, ``walk``; ``Scorer.verify`` compares entry by entry on the user's own model.
"""
