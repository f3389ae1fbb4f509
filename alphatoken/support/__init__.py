"""Helpers that any room may use and on which no formula depends.

* :mod:`~alphatoken.support.precision`: the one rule on arithmetic, float32 at least in every
  sum; the first number that is not finite is refused, row and token named;
* :mod:`~alphatoken.support.options`: a field of a dataclass with its help beside its default;
* :mod:`~alphatoken.support.progress`: done, rate and time left of a long computation;
* :mod:`~alphatoken.support.coloured`: text whose tokens have the colours of their values;
  :mod:`~alphatoken.support.token_texts` is what each token adds to a text, and
  :mod:`~alphatoken.support.terminal` when text is coloured, and how;
* :mod:`~alphatoken.support.resume`: whether a run is the same run: digests, settings compared;
* :mod:`~alphatoken.support.storage`: files written whole or not at all, tensors checked when
  read.

This room imports ``errors`` and nothing else of the package.
"""
