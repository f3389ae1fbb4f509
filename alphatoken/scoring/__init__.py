"""One forward, from its losses to the values of its response tokens.

Under ``Scorer.score`` the scorer runs the forward, in evaluation mode; under ``Scorer.observe`` the
user's training loop does, as it is. Both make a ``Recording``, and one ``Estimator`` values it:

1. :mod:`~alphatoken.scoring.recording`: one forward as a frozen object: batch, token losses, the
   weights on them, the recorder, and the head's call.
2. :mod:`~alphatoken.scoring.estimator`: what all estimators share, from the proofs that are due to
   both sides of ``M`` added up to ``TokenValues``. Three classes:
   :mod:`~alphatoken.scoring.captured` contracts errors with ``M``,
   :mod:`~alphatoken.scoring.label` differentiates losses along ``M``,
   :mod:`~alphatoken.scoring.walk` subtracts the losses at the end of a walk.
3. :mod:`~alphatoken.scoring.observed`: the handle that a training loop has on its own forward.

**May import** ``direction``, ``config``, ``estimate``, ``select``, ``model``, ``values``,
``support`` and ``errors``. **Oracle**: ``Scorer.verify`` compares what comes out of here, entry by
entry, with ``alphatoken.oracle`` on the user's own model.
"""
