"""The user's decoder, as the core sees it.

The core talks to a decoder through one protocol, so that it knows no model library. A scoring or
training step meets these files in this order:

1. :mod:`~alphatoken.model.protocol` finds the adapter of the model: its blocks, its linear maps,
   how a forward is run. :mod:`~alphatoken.model.transformers` is the adapter for transformers
   and PEFT; :mod:`~alphatoken.model.dispatch` and :mod:`~alphatoken.model.delta_dispatch` are the
   places where transformers' attention, experts and delta nets are replaced and put back.
2. :mod:`~alphatoken.model.batch` turns a mapping of tensors into labels by position: shift,
   padding, packed documents, preference pairs; :mod:`~alphatoken.model.batch_slice` cuts a few
   short rows out. :mod:`~alphatoken.model.vocabulary` takes the losses of the labels a block of
   positions at a time, of logits that somebody has formed; :mod:`~alphatoken.model.head` takes
   them at the output head, with its error, a block of the vocabulary at a time.
3. :mod:`~alphatoken.model.choice` reads which layers and parameters are scored, and
   :mod:`~alphatoken.model.scope` finds them in the model. :mod:`~alphatoken.model.capture` records
   the input ``x`` of each of their linear maps in a forward that the model does not notice
   (:mod:`~alphatoken.model.observed_forward` is the call itself), and takes the errors
   ``delta = d(loss)/d(output)``.
4. Each mixer has a backward that :mod:`~alphatoken.model.switch` cuts to the position itself:
   :mod:`~alphatoken.model.attention`, from whose probabilities come Value-Propagation's banded
   weights, and :mod:`~alphatoken.model.delta_rule`. :mod:`~alphatoken.model.experts` is a mixture
   whose rows can be seen.
5. :mod:`~alphatoken.model.forward` runs forwards of the library's own.
6. :mod:`~alphatoken.model.fingerprint` tells whether anything that values depend on has changed.

:mod:`~alphatoken.model.sharding` says what the core must know of weights that are spread over
processes. :mod:`~alphatoken.model.loading` loads models and tokenizers of transformers from a
folder or by name, for trainers and commands; :mod:`~alphatoken.model.folder` says what is wrong
with such a folder.

**May import** ``support`` and ``errors``. **Mathematics**: docs/notation.md for ``x``, ``delta``
and the label shift; the backwards and their self-only forms are equations of the docstrings of
:mod:`~alphatoken.model.attention` and :mod:`~alphatoken.model.delta_rule`.
"""
