"""Uses of values: masks, weights, losses.

* :mod:`~alphatoken.select.masks`: exactly ``ceil(ratio n)`` tokens, ties by row and position;
* :mod:`~alphatoken.select.confidence`: all tokens but those that are harmful beyond doubt;
* :mod:`~alphatoken.select.losses`: the SFT and DPO losses of what was kept, and their
  normalisations.

All are functions of plain tensors and numbers.

**May import** ``model``, ``values``, ``support`` and ``errors``. **Mathematics**:
docs/selection-and-losses.md.
"""
