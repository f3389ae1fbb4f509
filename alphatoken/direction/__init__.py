"""The direction ``M = P o (G + lambda V)`` that token gradients are contracted with.

* ``G``, the gradient of what is to get better: :mod:`~alphatoken.direction.objective` takes it
  over validation rows or preference pairs.
* ``V``, the gradient of what is not to get worse. Over rows it is an objective like ``G``.
  Without rows it is the drift from the reference weights, weighted by a Fisher:
  :mod:`~alphatoken.direction.drift`. :mod:`~alphatoken.direction.fisher` fits that Fisher on
  responses that :mod:`~alphatoken.direction.sampling` draws from the model, from second moments of
  their gradients (:mod:`~alphatoken.direction.moments`).
* ``P``, what an optimizer's step does to a gradient: :mod:`~alphatoken.direction.preconditioner`
  states it, :mod:`~alphatoken.direction.updates` reads it from the state of each known
  optimizer, and :mod:`~alphatoken.direction.optimizers` finds that optimizer and its state.
  ``P`` may also be ``(K + mu)^-1`` of influence functions: :mod:`~alphatoken.direction.influence`.
* ``M``: :mod:`~alphatoken.direction.algebra` is the formula on matrices,
  :mod:`~alphatoken.direction.scored` chooses the parameters, :mod:`~alphatoken.direction.inputs`
  builds M from everything that goes into it, :mod:`~alphatoken.direction.age` says whether it is
  stale, and :mod:`~alphatoken.direction.cache` keeps it until then.
* A walk, whose end stands in M's place: :mod:`~alphatoken.direction.walk`.

**May import** ``config``, ``estimate``, ``select``, ``model``, ``support`` and ``errors``.
**Mathematics**: docs/notation.md, docs/retention.md and docs/optimizers.md. **Oracles**:
``alphatoken.oracle.gradients`` for G, ``enumeration`` for the Fisher, ``composite`` for V, P and M,
``retention`` for what V stands for, ``utility`` for a real optimizer's step.
"""
