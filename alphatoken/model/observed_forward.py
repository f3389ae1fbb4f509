"""One call of the model as its user made it: its arguments by name, and what it returned.

What is valued must be what was observed. So the arguments are bound to the names of the forward's
signature, a write to one of them is noticed, and scores are traced back to the call's output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from alphatoken.errors import ModelError, quoted
from alphatoken.model.protocol import DecoderAdapter, is_users_own

_SOURCES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Scores to (the scores that they follow from alone, the versions that both had then)."""

_SAME_NUMBERS = ("ToCopy", "Alias", "Clone", "View", "UnsafeView", "ReshapeAlias", "Slice",
                 "Squeeze", "Unsqueeze", "_DDPSink")  # fmt: skip
"""Autograd nodes whose output holds the numbers of their input, in another dtype or shape."""


def register_source(scores: Tensor, source: Tensor) -> Tensor:
    """Note that ``scores`` follow from ``source`` alone, as losses do from logits; returns them.

    ``source`` are scores that the model returned, or that were registered themselves. The note
    holds until either tensor is written to in place: their versions are kept too.
    """
    _SOURCES[scores] = source, scores._version, source._version
    return scores


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a call by the names of the forward's signature; token ids as ``input_ids``.

    Raises:
        ModelError: the signature names fewer arguments than were given by position.
    """
    if not args:
        return dict(kwargs)
    names = _positional(module)
    if len(names) < len(args):
        names = ["input_ids"] if len(args) == 1 else names
    if len(names) < len(args):
        raise ModelError(
            "the model was called with arguments by position that have no names",
            got=f"{len(args)} of them, where {type(module).__qualname__}.forward names "
            f"{', '.join(names) or 'none'}",
            why="forwards that value the observed pass need the same arguments",
            remedy="pass them by name: model(input_ids=..., attention_mask=...)",
        )
    bound = dict(zip(names, args, strict=False))
    first = args[0]
    if "input_ids" not in bound and isinstance(first, Tensor) and not first.is_floating_point():
        bound = {"input_ids" if name == names[0] else name: bound[name] for name in bound}
    return {**bound, **kwargs}


_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
"""What ``arguments`` of an adapter may raise where a call lacks what it reads."""


def renamed_arguments(adapter: DecoderAdapter, names: Iterable[str]) -> dict[str, str]:
    """The model's name -> the batch's name of each argument that a user's adapter renames.

    Seen from what its ``arguments`` makes of one token; ``names`` of others that it may read.
    """
    if not is_users_own(adapter):
        return {}
    device = next(adapter.model.parameters()).device
    every = {"input_ids", "attention_mask", "position_ids", *names}
    batch = {name: torch.ones(1, 1, dtype=torch.long, device=device) for name in every}
    try:
        made = adapter.arguments(batch)
    except _UNREADABLE:  # whoever reads the call itself says what is missing
        return {}
    own = {id(value): name for name, value in batch.items()}
    return {k: own[id(v)] for k, v in made.items() if own.get(id(v), k) != k}


def by_batch_names(adapter: DecoderAdapter, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of the model, under their names in a batch.

    Raises:
        ModelError: the user's own adapter cannot read them.
    """
    names = renamed_arguments(adapter, arguments)
    inputs = {names.get(name, name): value for name, value in arguments.items()}
    if is_users_own(adapter):
        try:
            adapter.arguments(inputs)
        except _UNREADABLE as error:
            raise ModelError(
                "arguments() of your adapter cannot read a call of the model",
                got=f"{quoted(error)}; the call names {', '.join(inputs)}",
                why="proofs and forwards of the library's own run on the observed arguments",
                remedy="let arguments() rename, leave out and add, and read by inputs.get(...) "
                "what a call may lack; what is computed from a mask belongs into the model's "
                "forward",
            ) from error
    return inputs


def _positional(module: nn.Module) -> list[str]:
    """Names of the arguments that the forward takes by position."""
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    )  # fmt: skip
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in by_position]
    inner = getattr(module, "get_base_model", None)
    # A wrapper that hands all arguments on has the names of what it wraps.
    if not names and inner is not None and inner() is not module:
        return _positional(inner())
    return names


@dataclass(frozen=True)
class _Output:
    """Scores that a call returned: a reference, and version, node, shape and dtype as they were."""

    tensor: ref[Tensor]
    version: int
    node: Any
    shape: torch.Size
    dtype: torch.dtype

    def is_written(self) -> bool:
        """True if the scores live and were written to; of others it is not known."""
        tensor = self.tensor()
        return tensor is not None and tensor._version != self.version


@dataclass(eq=False)
class ObservedForward:
    """Arguments and output of one call of the model, and where its scored part began.

    "There" is the first scored layer, whose input ``hidden`` is.
    """

    model: nn.Module | None = None  # None: decoder blocks ran outside a call of the model
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None  # detached
    products: torch.dtype | None = None  # of matrix products there; under autocast not ``hidden``'s
    plain: bool = False  # the blocks below pass on a bare tensor, as ``forward.start_at`` does
    blocks: int = 0  # decoder blocks run from there on
    attended: set[int] = field(default_factory=set)  # those whose attention came to the recorder
    cached: bool = False  # some of it read keys of a cache
    returned: bool = False
    _outputs: list[_Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._versions = [(t, t._version) for t in _tensors((self.args, self.kwargs))]

    def __deepcopy__(self, memo: Any) -> ObservedForward:
        # A copy of the model, hooks and all, has not been called.
        return ObservedForward()

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments by name.

        Raises:
            ModelError: as ``named_arguments``; or one of them was written to since the call.
        """
        if self.model is None:
            return {}
        named = named_arguments(self.model, self.args, self.kwargs)
        written = {id(t) for t, version in self._versions if t._version != version}
        for name, value in named.items():
            # Labels are those of a loss of the model's own, and are handed to the values anew.
            if name != "labels" and any(id(t) in written for t in _tensors(value)):
                raise ModelError(
                    "an argument of the observed forward was written to since it ran",
                    got=name,
                    why="values would be of another forward than the one that was observed",
                    remedy="take the values first, or write to a copy of it",
                )
        return named

    def leave(self, scores: Iterable[Tensor]) -> None:
        """Keep which scores the call returned; nothing holds them alive but their user."""
        self.returned = True
        self._outputs = [
            _Output(ref(one), one._version, one.grad_fn, one.shape, one.dtype) for one in scores
        ]

    @property
    def outputs(self) -> Iterator[Tensor]:
        """Scores that the call returned, those that still live and were not written to."""
        for output in self._outputs:
            tensor = output.tensor()
            if tensor is not None and tensor._version == output.version:
                yield tensor

    def gave(self, scores: Tensor) -> bool:
        """True if these scores are an output, a cast or view of one, or a registered consequence.

        Of others nothing is said: they may hold the same numbers all the same.
        """
        while True:
            if any(scores is output for output in self.outputs):
                return True
            source, own, before = _SOURCES.get(scores, (None, 0, 0))
            if source is None or scores._version != own or source._version != before:
                return self._follows(scores)
            scores = source

    def is_coarser(self, scores: Tensor) -> bool:
        """True if these scores are rounded to fewer digits than any that the call returned."""
        digits = [torch.finfo(one.dtype).eps for one in self._outputs]
        return bool(digits) and torch.finfo(scores.dtype).eps > max(digits)

    def _follows(self, scores: Tensor) -> bool:
        """True if nothing that the graph shows between an output and scores changes a number."""
        # A write that autograd does not see shows in the version of what was written to.
        if _base(scores)._version not in self._versions_of(scores):
            return False
        output = self._above(scores.grad_fn)
        # A part of the vocabulary has another normaliser.
        return output is not None and (
            len(output.shape) != 3 or scores.shape[-1] == output.shape[-1]
        )

    def _versions_of(self, scores: Tensor) -> set[int]:
        """Versions that the memory of scores has if it is as it was made."""
        living = [(one, one.tensor()) for one in self._outputs]
        base = _base(scores)
        own = {
            one.version for one, tensor in living if tensor is not None and _base(tensor) is base
        }
        return own or {0}

    def _above(self, node: Any) -> _Output | None:
        """The output whose numbers a node of the graph hands on; None if it changes them."""
        while node is not None:
            for output in self._outputs:
                if node is output.node:
                    return None if output.is_written() else output
            if node.name().partition("Backward")[0] not in _SAME_NUMBERS:
                return None
            above = [parent for parent, _ in node.next_functions if parent is not None]
            # DistributedDataParallel clones all outputs in one node.
            if len(above) > 1:
                ends = [o for o in self._outputs for parent in above if parent is o.node]
                return ends[0] if ends and not any(o.is_written() for o in ends) else None
            node = above[0] if above else None
        return None


def _base(tensor: Tensor) -> Tensor:
    """The tensor whose memory, and version, a view shares; or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def scores_in(output: Any) -> list[Tensor]:
    """Logits and token log-probabilities in what a model returned.

    They are named so, or are the whole of it, or the first in a tuple that has an entry a token of
    the vocabulary.
    """
    if isinstance(output, tuple) and not hasattr(output, "logits"):
        output = next((one for one in output if isinstance(one, Tensor) and one.dim() == 3), None)
    named = (getattr(output, name, None) for name in ("logits", "log_probs"))
    every = [output] if isinstance(output, Tensor) else named
    return [one for one in every if isinstance(one, Tensor) and not one.is_inference()]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in an argument; not those of a cache."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
