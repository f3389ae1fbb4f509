"""One forward, from its losses to the values of its response tokens.

Under ``Scorer.score`` the scorer runs the forward, in evaluation mode; under ``Scorer.observe`` the
user's training loop does, as it is. Both make a ``Pass`` of it, and one ``Valuer`` values it:

1. :mod:`~alphatoken.scoring.passes`: what a forward leaves behind, as one frozen object: batch,
   token losses, the weights on them, the recorder, and errors where they were kept.
2. :mod:`~alphatoken.scoring.valuing`: takes the sides of ``M`` for that pass, contracts its errors
   with them (or differentiates along them), and adds both sides up to ``TokenValues``.
3. :mod:`~alphatoken.scoring.observed`: the handle that a training loop has on its own forward.

**May import** ``direction``, ``config``, ``estimate``, ``select``, ``model``, ``values``,
``support`` and ``errors``. **Oracle**: ``Scorer.verify`` compares what comes out of here, entry by
entry, with ``alphatoken.oracle`` on the user's own model.
"""
