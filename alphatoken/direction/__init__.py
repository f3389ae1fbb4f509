"""The direction ``M = P o (G + lambda V)`` that token gradients are contracted with.

* ``G``, the gradient of what is to get better: :mod:`~alphatoken.direction.objective` takes it
  over validation rows or preference pairs.
* ``V``, the gradient of what is not to get worse. Over rows it is an objective like ``G``.
  Without rows it is the drift from the reference weights, weighted by a Fisher:
  :mod:`~alphatoken.direction.drift`. :mod:`~alphatoken.direction.fisher` fits that Fisher on
  responses that :mod:`~alphatoken.direction.sampling` draws from the model, from second moments of
  their gradients (:mod:`~alphatoken.direction.moments`).
* ``P``, what an optimizer's step does to a gradient: :mod:`~alphatoken.direction.preconditioner`
  states it for each known optimizer, and :mod:`~alphatoken.direction.optimizers` finds the
  optimizer's state. ``P`` may also be ``(H + mu)^-1`` of influence functions:
  :mod:`~alphatoken.direction.influence`.
* ``M``: :mod:`~alphatoken.direction.algebra` is the formula on matrices,
  :mod:`~alphatoken.direction.scored` chooses the parameters, :mod:`~alphatoken.direction.inputs`
  builds M from everything that goes into it, and :mod:`~alphatoken.direction.cache` keeps it until
  it is stale.
* :mod:`~alphatoken.direction.contraction` is the algebra of one product with M, pure functions of
  tensors; :mod:`~alphatoken.direction.gradients` sums captured uses to whole gradients, and proves
  that they are all.

**May import** ``config``, ``select``, ``model``, ``support`` and ``errors``.
**Mathematics**: docs/notation.md, docs/retention.md and docs/optimizers.md. **Oracles**:
``alphatoken.oracle.gradients`` for G, ``enumeration`` for the Fisher, ``composite`` for V, P and M,
``retention`` for what V stands for, ``utility`` for a real optimizer's step.
"""
