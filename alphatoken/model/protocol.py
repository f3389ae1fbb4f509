"""The core's view of a model: the ``DecoderAdapter`` protocol and its registry.

The core never imports a model library. It talks to an adapter, which is found by the name of the
module that defines the model's class and is imported only then.
"""

from __future__ import annotations

import importlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from alphatoken.errors import (
    ConfigError,
    CoverageError,
    InputError,
    ModelError,
    UnsupportedError,
    quoted,
)


@dataclass(frozen=True)
class ScoredLinear:
    """One linear map in scope: a trainable ``nn.Linear``-like module of a scored decoder layer.

    ``module.weight`` is (d_out, d_in), or (d_in, d_out) when ``transposed`` (GPT-2's Conv1D).
    Fused projections are one scored linear. ``name`` is its key in ``model.named_modules()``.
    """

    name: str
    module: nn.Module
    layer: int
    transposed: bool = False

    @property
    def weight_name(self) -> str:
        """Key of the weight in ``model.named_parameters(remove_duplicate=False)``."""
        return f"{self.name}.weight"

    @property
    def weight(self) -> Tensor:
        """The weight parameter as stored."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight


@dataclass(frozen=True)
class ScoredExperts(ScoredLinear):
    """The linear maps of all experts that one 3-D tensor of a mixture holds.

    ``weight`` is (experts, d_out, d_in), or (experts, d_in, d_out) when ``transposed``, and
    ``bias``, where there is one, (experts, d_out). ``module`` holds them as ``parameter`` and
    ``parameter + "_bias"``; ``name`` is the tensor's own key in ``model.named_parameters()``.
    """

    parameter: str = ""

    @property
    def weight_name(self) -> str:
        """Key of the tensor in ``model.named_parameters(remove_duplicate=False)``."""
        return self.name

    @property
    def bias_name(self) -> str:
        """Key that the biases have there, if there are any."""
        return f"{self.name}_bias"

    @property
    def weight(self) -> Tensor:
        """The tensor as stored."""
        weight = getattr(self.module, self.parameter)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def count(self) -> int:
        """Number of experts; of a tensor that ZeRO-3 leaves in parts, of the whole one."""
        weight = self.weight
        return int(getattr(weight, "ds_shape", weight.shape)[0])


@dataclass(frozen=True)
class AttentionCall:
    """Everything one softmax-attention call computes with, in one canonical layout.

    Shapes: query (b, h, t, d); key (b, g, t, d); value (b, g, t, dv), heads before tokens. Query
    head ``h`` reads key/value head ``h // r`` with r = H // G, as ``repeat_interleave(r, dim=1)``
    of keys and values has it. The logits are ``scale * q.k``, capped to
    ``softcap * tanh(logits / softcap)`` if ``softcap`` is set, then masked. ``sinks`` (H,) are
    extra logits that take probability and give no value.

    ``mask`` is boolean (True: may attend) or additive float, and broadcasts to (b, h, t, t), with
    queries before keys: (t, t) will do. None means causal, within what the next two say, which
    kernels are given that take no mask: ``documents`` (b, t) numbers the sequence that each
    position belongs to, -1 for padding, which attends to nothing and is attended to by none;
    ``window`` is the number of positions of its own document, the last of which is its own, that a
    query attends to. ``flash`` says that the kernel is one of these, of the flash-attn packages or
    the hub's builds of them.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    documents: Tensor | None = None
    window: int | None = None
    flash: bool = False

    def __post_init__(self) -> None:
        """Give a mask its leading axes, of length 1, and documents all their rows.

        Raises:
            InputError: one of them does not broadcast, or holds numbers of another kind.
        """
        rows, heads, queries, _ = self.query.shape
        mask, documents = self.mask, self.documents
        if mask is not None:
            numbers = mask.dtype == torch.bool or mask.is_floating_point()
            self._require("mask", mask, (rows, heads, queries, self.key.shape[2]), numbers)
            if mask.dim() < 4:
                object.__setattr__(self, "mask", mask[(None,) * (4 - mask.dim())])
        if documents is not None:
            numbers = not (documents.dtype == torch.bool or documents.is_floating_point())
            self._require("documents", documents, (rows, queries), numbers)
            object.__setattr__(self, "documents", documents.expand(rows, queries))

    def _require(self, name: str, tensor: Tensor, shape: tuple[int, ...], numbers: bool) -> None:
        missing = len(shape) - tensor.dim()
        sizes = (1,) * missing + tuple(tensor.shape)
        if missing >= 0 and numbers and all(n in (1, m) for n, m in zip(sizes, shape, strict=True)):
            return
        raise InputError(
            f"the {name} of an AttentionCall cannot be read",
            got=f"{tuple(tensor.shape)} of {tensor.dtype} for queries {tuple(self.query.shape)} "
            f"and keys {tuple(self.key.shape)}",
            why="weights would be of other positions than those that the kernel attends to",
            remedy="a mask that broadcasts to (b, h, t, t), boolean (True: may attend) or added to "
            "the logits; documents (b, t) as whole numbers; heads before tokens",
        )


NativeAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The model's own kernel: (query, key, value) -> output (b, h, t, dv); all else is bound."""

AttentionOverride = Callable[[AttentionCall, NativeAttention], Tensor]
"""Replacement for one attention call: (call, kernel it would use) -> output (b, h, t, dv)."""


@dataclass(frozen=True)
class DeltaCall:
    """Everything that one call of the gated delta rule computes with; see ``model.delta_rule``.

    Shapes: query and key (b, g, t, d), value (b, h, t, v), value head ``h`` reads key head
    ``h // (H // G)``; decay (b, h, t) is a logarithm, beta (b, h, t) the strength of the write.
    ``normalised``: the kernel divides queries and keys by their length. ``cached``: the rule starts
    from the state of positions that this pass did not run.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    normalised: bool = True
    cached: bool = False


@dataclass(frozen=True)
class ConvolutionCall:
    """One causal convolution along positions, each channel with taps of its own.

    x (b, c, t), weight (c, w), bias (c,) or None; ``activation`` follows, None: nothing.
    """

    module: nn.Module
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] | None = None


NativeDelta = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The model's own rule: (query, key, value, decay, beta) -> output (b, h, t, v)."""

DeltaOverride = Callable[[DeltaCall, NativeDelta], Tensor]
"""Replacement for one call of the rule."""

NativeConvolution = Callable[[Tensor], Tensor]
"""The model's own convolution: x -> output (b, c, t)."""

ConvolutionOverride = Callable[[ConvolutionCall, NativeConvolution], Tensor]
"""Replacement for one convolution."""


@runtime_checkable
class DeltaNets(Protocol):
    """Optional part of an adapter, for models with gated delta nets."""

    def delta_nets(self, layer: int) -> tuple[nn.Module, ...]:
        """The gated delta nets of this layer: a convolution on what the rule then reads."""
        ...

    def override_delta_nets(
        self,
        modules: Sequence[nn.Module],
        convolution: ConvolutionOverride,
        rule: DeltaOverride,
    ) -> AbstractContextManager[None]:
        """Context in which both calls of each of ``modules`` go through these functions."""
        ...


@runtime_checkable
class DecoderAdapter(Protocol):
    """The core's view of a decoder-only language model.

    A subclass writes ``layers``, ``attention_modules`` and ``override_attention``; the other
    methods have a default for a plain decoder, which is right where its docstring says so.

    An adapter of models with mixtures of experts may have three methods more, without which
    ``parameters="linears,experts"`` is refused, and forward mode meets the mixtures' own kernel:

    * ``mixtures(layers) -> tuple[nn.Module, ...]``: the mixtures of these layers.

    * ``scored_experts(layers) -> list[ScoredExperts]``: the trainable 3-D tensors of these layers
      whose rows it can show.
    * ``override_experts(modules, listener)``: a context in which every call of these modules with
      a graph or tangents shows its rows to the ``ExpertsListener``.
    """

    model: nn.Module

    # --- what a subclass writes ------------------------------------------------------------------

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The decoder blocks, first to last."""
        ...

    @abstractmethod
    def attention_modules(self, layer: int) -> tuple[nn.Module, ...]:
        """The modules of this layer that make softmax-attention calls."""
        ...

    @abstractmethod
    def override_attention(
        self, modules: Sequence[nn.Module], override: AttentionOverride
    ) -> AbstractContextManager[None]:
        """Context in which every attention call of ``modules`` goes through ``override``."""
        ...

    # --- the linears -----------------------------------------------------------------------------

    def scored_linears(self, layers: Sequence[int]) -> list[ScoredLinear]:
        """Trainable linears in attention and MLP of these layers, in forward order.

        Default: every trainable ``nn.Linear`` of the blocks, in the order in which the model
        registers them.
        """
        names = {module: name for name, module in self.model.named_modules()}
        blocks = self.layers()
        # A block or linear that is used at several depths counts once, at the first of them.
        layer_of: dict[nn.Module, int] = {}
        for layer in layers:
            for module in blocks[layer].modules():
                layer_of.setdefault(module, layer)
        return [
            ScoredLinear(names[module], module, layer)
            for module, layer in layer_of.items()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        ]

    def uncovered(self, layers: Sequence[int]) -> dict[str, str]:
        """Trainable matrices of these layers that no scored linear covers: name -> reason.

        Such are 3-D expert tensors, routers and the factors of DoRA. Default: every trainable
        parameter with two or more dimensions that is no weight of a scored linear.
        """
        covered = {id(linear.weight) for linear in self.scored_linears(layers)}
        blocks = self.layers()
        inside = {id(p) for layer in layers for p in blocks[layer].parameters() if p.ndim > 1}
        return {
            name: "no scored linear has this weight"
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) in inside - covered
        }

    def other_mixers(self, layers: Sequence[int]) -> dict[str, str]:
        """Modules of these layers that mix positions without softmax attention: name -> kind.

        Default: none. One that is not named is found when the scorer proves that the self-only
        backward is isolated.
        """
        return {}

    # --- the forward -----------------------------------------------------------------------------

    def pause_checkpointing(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Context in which these decoder blocks run without gradient checkpointing.

        Default: they never checkpoint.
        """
        return nullcontext()

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits (b, t, vocabulary) of one forward pass without a cache.

        Raises:
            ModelError: the model's forward, or an attention kernel, is called with arguments that
                it does not take.
        """
        try:
            output = self.model(**self.arguments(inputs))
        except TypeError as error:
            raise ModelError(
                f"the model cannot be called by your adapter {type(self).__name__}",
                got=quoted(error),
                remedy="let arguments() give what the model's forward takes, and what "
                "override_attention() puts in a kernel's place take what the kernel does",
            ) from error
        return self.logits_of(output)

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments that ``forward`` calls the model with (``inputs`` plus no cache).

        Default: the batch's own. It may leave out, rename and add; but it also reads the arguments
        of a call by the user, under their names in a batch and without what was added here.
        """
        return dict(inputs)

    def logits_of(self, output: Any) -> Tensor:
        """The logits in what the model's forward returned.

        Default: that itself, or the first of a tuple.

        Raises:
            ModelError: this is no tensor (b, t, vocabulary).
        """
        logits = output[0] if isinstance(output, tuple) and output else output
        if isinstance(logits, Tensor) and logits.dim() == 3:
            return logits
        shape = f" {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise ModelError(
            "the model's forward returned no logits (batch, tokens, vocabulary)",
            got=f"{type(logits).__qualname__}{shape}"
            f"{', the first of a tuple' if logits is not output else ''}",
            remedy=f"logits_of() of your adapter {type(self).__name__} takes them from what it "
            "returns",
        )

    def next_token_logits(
        self, input_ids: Tensor, attention_mask: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Logits (b, vocabulary) after the last column, and a cache to pass with the next column.

        ``state`` is None at first. ``input_ids`` and ``attention_mask`` are always the whole
        left-padded prefix; an adapter with a cache feeds the new column only. Default: the whole
        prefix each time.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.forward(inputs)[:, -1], None

    def max_positions(self) -> int | None:
        """The longest sequence the model allows, or None (the default) if it has no limit."""
        return None

    def end_tokens(self) -> tuple[int, ...]:
        """Token ids that end a generated sequence; by default none."""
        return ()

    def identity(self) -> dict[str, str]:
        """Facts that identify the architecture, as strings; a cached Fisher must have the same.

        Default: class, depth, and the shapes of all parameters.
        """
        shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        return {
            "class": type(self.model).__qualname__,
            "layers": str(len(self.layers())),
            "shapes": json.dumps(shapes),
        }


_REGISTRY: dict[str, str] = {
    "transformers": "alphatoken.model.transformers:TransformersAdapter",
    "peft": "alphatoken.model.transformers:TransformersAdapter",
}


def register_adapter(package: str, target: str) -> None:
    """Use ``target`` ("module:Class") for models of ``package`` (class or base class)."""
    _REGISTRY[package] = target


def _packages(model: nn.Module) -> Iterator[str]:
    """Modules that define the model's class and its bases, each followed by its parent packages.

    The bases count because a user's subclass of a library's model lives in the user's own module.
    """
    for cls in type(model).__mro__:
        module = cls.__module__
        yield module
        while "." in module:
            module = module.rpartition(".")[0]
            yield module


_WRAPPERS = ("torch.nn.parallel", "deepspeed", "torch._dynamo")
"""Packages whose modules run another one, and hold no weights of their own."""


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, a DeepSpeed engine or ``torch.compile``."""
    while any(package in _WRAPPERS for package in _packages(model)):
        own = vars(model).get("_modules", {})
        inner = own.get("_orig_mod") or own.get("module") or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def find_adapter(model: nn.Module) -> DecoderAdapter:
    """The adapter for ``model``, imported on first use.

    DistributedDataParallel, DeepSpeed's engine and ``torch.compile`` are unwrapped first. PEFT's
    wrapper is left on, because the adapter deals with it, and FSDP2 keeps the model's own class
    among the bases.

    Raises:
        ModelError: no adapter is registered for any package in the model's class hierarchy.
        ConfigError: the one that is registered cannot be imported or made.
    """
    if isinstance(model, DecoderAdapter):  # the user's model may follow the protocol by itself
        return model
    model = _unwrapped(model)
    for package in _packages(model):
        target = _REGISTRY.get(package)
        if target is not None:
            return _made(target, model)
    raise ModelError(
        "no adapter knows this model",
        got=f"{type(model).__module__}.{type(model).__qualname__}",
        why="layers, scored linears and attention calls cannot be found by guessing",
        remedy="pass a transformers decoder, or write a DecoderAdapter and register_adapter(...)",
    )


def _made(target: str, model: nn.Module) -> DecoderAdapter:
    """The registered adapter "module:Class" of the model."""
    module, _, name = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: of an empty name
        raise _cannot_be_made(target, quoted(error)) from error
    try:
        adapter = kind(model)
    except TypeError as error:  # of a class that leaves out what it has to write, too
        raise _cannot_be_made(target, quoted(error)) from error
    if not isinstance(adapter, DecoderAdapter):
        raise _cannot_be_made(target, f"{type(adapter).__qualname__} is no DecoderAdapter")
    return adapter


def _cannot_be_made(target: str, said: str) -> ConfigError:
    return ConfigError(
        "the registered adapter of this model cannot be made",
        got=f"{target!r}: {said}",
        remedy='register_adapter(package, "module:Class") with an importable subclass of '
        "DecoderAdapter that writes layers, attention_modules and override_attention, and is made "
        "of the model alone",
    )


def is_users_own(adapter: DecoderAdapter) -> bool:
    """Whether a user wrote the adapter: its class is none of the library's."""
    return type(adapter).__module__.partition(".")[0] != "alphatoken"


def adapter_remedy(adapter: DecoderAdapter) -> str:
    """What to look at in the user's own adapter where a proof fails; empty of the library's."""
    if not is_users_own(adapter):
        return ""
    return (
        f"your adapter {type(adapter).__name__} may be the cause: each AttentionCall that "
        "override_attention() makes must state the scale, mask and softcap of the model's own "
        "kernel, attention_modules() every attention, layers() every block in order, and "
        "arguments() all that logits depend on"
    )


@contextmanager
def attention_overridden(
    adapter: DecoderAdapter, modules: Sequence[nn.Module], override: AttentionOverride
) -> Iterator[None]:
    """``override_attention`` of the adapter; a user's own one is held to end with the context.

    Left on the model, it would have each later gradient go through ``override``, the one that
    ``verify`` compares with too.

    Raises:
        ModelError: at a call of the attention after the context, which still goes through it.
    """
    if not is_users_own(adapter):
        with adapter.override_attention(modules, override):
            yield
        return
    over = False

    def within(call: AttentionCall, native: NativeAttention) -> Tensor:
        if not over:
            return override(call, native)
        raise ModelError(
            f"override_attention() of your adapter {type(adapter).__name__} leaves its override on "
            "the model",
            got=f"a call of {type(call.module).__name__} after the context had ended",
            why="values, gradients and training after it would not be those of the model",
            remedy="put the model's own kernel back in a 'finally' after the 'yield'; this model "
            "has to be loaded anew",
        )

    try:
        with adapter.override_attention(modules, within):
            yield
    finally:
        over = True


@contextmanager
def adapter_named(adapter: DecoderAdapter) -> Iterator[None]:
    """Context in which a proof that fails names the user's own adapter first, as likely wrong."""
    try:
        yield
    except (CoverageError, ModelError, UnsupportedError) as error:
        name, remedy = f"your adapter {type(adapter).__name__}", adapter_remedy(adapter)
        if not remedy or name in str(error):
            raise
        what, more = (
            f"under {name} {error.what}",
            "; or ".join(filter(None, (remedy, error.remedy))),
        )
        named = type(error)(what, got=error.got, why=error.why, remedy=more)
        raise named from error.__cause__
