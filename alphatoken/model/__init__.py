"""The user's decoder, as the core sees it.

The core talks to a decoder through one protocol, so that it knows no model library. A scoring or
training step meets these files in this order:

1. :mod:`~alphatoken.model.protocol` finds the adapter of the model: its blocks, its linear maps,
   how a forward is run. :mod:`~alphatoken.model.transformers` is the adapter for transformers
   and PEFT, :mod:`~alphatoken.model.dispatch` the one place where transformers' attention and
   experts are replaced and put back; :mod:`~alphatoken.model.experts` is a mixture of experts
   whose rows can be seen.
2. :mod:`~alphatoken.model.batch` turns a mapping of tensors into labels by position: shift,
   padding, packed documents, preference pairs. :mod:`~alphatoken.model.vocabulary` takes the
   losses of the labels a block of positions at a time, of logits that somebody has formed;
   :mod:`~alphatoken.model.head` takes them at the output head, with its error, a block of the
   vocabulary at a time. :mod:`~alphatoken.model.response_losses` does so in forwards of our own.
3. :mod:`~alphatoken.model.scope` chooses the scored linear maps.
   :mod:`~alphatoken.model.capture` records the input ``x`` of each of them in a forward that the
   model does not notice (:mod:`~alphatoken.model.uses` is what it keeps of a call), and
   :mod:`~alphatoken.model.backward` takes the errors ``delta = d(loss)/d(output)``.
4. :mod:`~alphatoken.model.attention` is softmax attention whose backward can be cut to the
   position itself; from its probabilities come Value-Propagation's banded weights.
5. :mod:`~alphatoken.model.fingerprint` tells whether anything that values depend on has changed.
6. :mod:`~alphatoken.model.partial_forward` builds the graph from the first scored layer on, and
   begins a second forward there, whose input the first one has remembered;
   :mod:`~alphatoken.model.modes` puts the model into evaluation mode and back.

:mod:`~alphatoken.model.layer_choice` reads which layers are scored,
:mod:`~alphatoken.model.sharding` says what the core must know of weights that are spread over
processes. :mod:`~alphatoken.model.loading` loads models and tokenizers of transformers from a
folder or by name, for trainers and commands; :mod:`~alphatoken.model.folder` says what is wrong
with such a folder.

**May import** ``support`` and ``errors``. **Mathematics**: docs/notation.md for ``x``, ``delta``
and the label shift; the attention backward and its self-only form are equations of
:mod:`~alphatoken.model.attention`'s own docstrings.
"""
