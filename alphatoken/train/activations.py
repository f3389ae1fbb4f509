"""What autograd keeps of a forward, counted on shapes alone: no weights, no arithmetic.

The model is copied with fake parameters (shape, dtype and device, no data) and run under torch's
fake mode; ``saved_tensors_hooks`` then see every tensor that the graph keeps. So the count is that
of the architecture as it is: its norms, its attention kernel, its adapters. Of layers that are
alike only the first is run; and one row and two, between which bytes are a straight line (weights
that autocast has narrowed are kept once, whatever the rows).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.model.capture import Scope, hidden_of, with_hidden
from alphatoken.model.protocol import DecoderAdapter, find_adapter

__all__ = ["Kept", "Shape", "kept_activations"]

_STATE = -1


@dataclass(frozen=True)
class Shape:
    """Of a forward.

    Attributes:
        rows: sequences.
        validation_rows: sequences of one validation forward; 0 for none.
        length: tokens of each.
        dtype: of the weights.
        autocast: bfloat16 arithmetic over wider weights.
        checkpointing: of the layers' activations.
        observed: the layers from the first scored one on run without checkpointing.
    """

    rows: int
    validation_rows: int
    length: int
    dtype: torch.dtype
    autocast: bool = False
    checkpointing: bool = False
    observed: bool = True


@dataclass(frozen=True)
class Kept:
    """Bytes that graphs keep beside parameters and logits.

    Attributes:
        training: the training forward.
        layer: one layer that is run again under checkpointing; 0 without.
        validation: the validation forward, whose graph begins at the first scored layer.
    """

    training: float
    layer: float
    validation: float


def kept_activations(adapter: DecoderAdapter, scope: Scope, shape: Shape) -> Kept | None:
    """Count what the graphs of a training step keep; None where shapes depend on data.

    Args:
        adapter: of the model, on any device, the meta device too; it is not touched.
        scope: what is scored.
        shape: of the batches.

    Exactness: the bytes that autograd saves in these forwards, each storage once, for rows with
    some padding (a batch without any may need no mask, and keys that are not repeated). A forward
    that branches on the numbers it computes (experts looped over) cannot be followed. Under
    checkpointing a layer keeps its input.
    """
    counted = _counted(adapter.model, shape)
    if counted is None:
        return None
    one, two = counted

    def of(rows: int, parts: list[int | None]) -> float:
        if not rows:
            return 0.0
        return sum(one[i] + (rows - 1) * (two[i] - one[i]) for i in parts)

    layers = [i for i in one if i is not None and i >= 0]
    graph = range(_first_trained(adapter), len(layers))
    whole = [i for i in graph if not shape.checkpointing or (shape.observed and i >= scope.first)]
    inputs = len(graph) - len(whole)
    return Kept(
        training=of(shape.rows, [None, *whole, *[_STATE] * inputs]),
        layer=max(of(shape.rows, [i]) for i in graph) if inputs else 0.0,
        validation=of(shape.validation_rows, [None, *layers[scope.first :]]),
    )


_Bytes = dict[int | None, float]
_COUNTED: dict[Any, tuple[_Bytes, _Bytes] | None] = {}
"""Of the last models: the cells of a grid plan the same one dozens of times, seconds each.

No ``lru_cache``, which would keep the models themselves.
"""


def _counted(model: nn.Module, shape: Shape) -> tuple[_Bytes, _Bytes] | None:
    """:func:`_count`, once for models that look alike."""
    key = (_looks(model), shape.dtype, shape.length, shape.autocast)
    if key not in _COUNTED:
        if len(_COUNTED) == 32:
            del _COUNTED[next(iter(_COUNTED))]
        _COUNTED[key] = _count(model, shape)
    return _COUNTED[key]


def _count(model: nn.Module, shape: Shape) -> tuple[_Bytes, _Bytes] | None:
    """What :func:`_run` finds with one row and with two; None where it cannot be run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            one, two = (_run(_with_fake_tensors(model, shape.dtype), shape, n) for n in (1, 2))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None
    return one, two


def _looks(model: nn.Module) -> Any:
    """All that a forward on shapes depends on: configuration, modules, tensors."""
    config: Any = model.config
    return (
        config.to_json_string(use_diff=False),
        getattr(config, "_attn_implementation", None),
        tuple((name, type(module)) for name, module in model.named_modules()),
        tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()),
        tuple((n, b.shape, b.dtype) for n, b in model.named_buffers()),
    )


def _first_trained(adapter: DecoderAdapter) -> int:
    """The layer at whose input the training graph begins."""
    below: Any = getattr(adapter.model, "get_input_embeddings", lambda: None)()
    if below is not None and any(p.requires_grad for p in below.parameters()):
        return 0
    trained = [any(p.requires_grad for p in block.parameters()) for block in adapter.layers()]
    return trained.index(True) if any(trained) else len(trained)


def _with_fake_tensors(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the modules around tensors without data; what is tied stays tied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers, module.__dict__):
            for tensor in kind.values():
                if isinstance(tensor, Tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = _fake(tensor, dtype)
    return copy.deepcopy(model, memo)


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Parameters in ``dtype``; buffers (rotary frequencies, say) as they are."""
    trained = isinstance(tensor, nn.Parameter)
    kind = dtype if trained and tensor.is_floating_point() else tensor.dtype
    made = torch.empty(tensor.shape, dtype=kind, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if trained else made


def _run(model: nn.Module, shape: Shape, rows: int) -> _Bytes:
    """Bytes kept by each layer, by the rest (None), and those of a layer's input (_STATE)."""
    adapter = find_adapter(model)
    blocks = adapter.layers()
    kept = _Kept(model)
    first: dict[Any, int] = {}
    like = [first.setdefault(_kind(adapter, i), i) for i in range(len(blocks))]
    for index, block in enumerate(blocks):
        if like[index] == index:
            block.register_forward_pre_hook(_Begin(kept, index), with_kwargs=True)
            block.register_forward_hook(kept.end)
        else:
            block.forward = _Skip(kept)
    ids = torch.zeros(rows, shape.length, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 1}
    autocast = torch.autocast("cpu", torch.bfloat16) if shape.autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor), autocast:
        model.train()(**adapter.arguments(inputs))
    return {
        i: kept.bytes.get(k, 0.0) for i, k in (*enumerate(like), (None, None), (_STATE, _STATE))
    }


def _kind(adapter: DecoderAdapter, index: int) -> Any:
    """Equal for layers that keep the same: class, parameters, kind of attention."""
    block = adapter.layers()[index]
    text: Any = adapter.model.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = getattr(text, "layer_types", None) or []
    parameters = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
    return type(block), parameters, kinds[index] if index < len(kinds) else None


class _Kept:
    """Bytes of the storages that a graph keeps, by the layer that runs; None outside of all."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, torch.UntypedStorage] = {}  # alive: a freed one's number comes again
        self.layer: int | None = None
        self.bytes: dict[int | None, float] = {}
        self.returned: Any = None

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.bytes[self.layer] = self.bytes.get(self.layer, 0.0) + storage.nbytes()
        return tensor

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.layer, self.returned = None, output


class _Begin:
    """At the start of a layer: what is kept from now on is its own, and its input has a graph."""

    def __init__(self, kept: _Kept, index: int) -> None:
        self._kept, self._index = kept, index

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._kept.layer = self._index
        hidden = hidden_of(args, kwargs)
        self._kept.bytes[_STATE] = float(hidden.untyped_storage().nbytes())
        if hidden.requires_grad:
            return None
        return with_hidden(args, kwargs, hidden.detach().requires_grad_())


class _Skip:
    """In place of a layer like one that has run: its input, as that one returned it."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        before = self._kept.returned
        return (hidden, *before[1:]) if isinstance(before, tuple) else hidden
