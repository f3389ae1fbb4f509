"""The scored layers and their trainable linears, chosen by ``find_scope``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.model.layer_choice import layers_within
from alphatoken.model.protocol import DecoderAdapter, DeltaNets, ScoredExperts, ScoredLinear

__all__ = [
    "Scope",
    "delta_nets_of",
    "find_scope",
    "lowest_use",
    "mixers_without_rule",
    "mixtures_of",
    "resolve_layers",
    "used_outside",
]


def resolve_layers(adapter: DecoderAdapter, layers: int | str | Sequence[int]) -> tuple[int, ...]:
    """Indices of the scored decoder layers of this model, as ``layers_within`` gives them."""
    return layers_within(layers, len(adapter.layers()))


@dataclass(frozen=True)
class Scope:
    """The scored layers and their trainable linears (S in docs/notation.md).

    Attributes:
        layers: indices of the scored layers.
        linears: scored linears, in forward order, each module once; after those of their layer
            the tensors of its experts, where these were chosen.
        uncovered: trainable parameters of these layers that no scored linear covers, and why.
        mixers: modules that mix positions without softmax attention and have no self-only rule
            (state space, convolution, other linear attention than gated delta nets), and their
            kind, in all layers from ``first`` to the last.
        first: the first layer that uses a weight in scope; the graph starts at its input. Lower
            than the first scored layer where a block or a weight is shared between depths.
        named: further parameters of any layer, chosen by their names.
    """

    layers: tuple[int, ...]
    linears: tuple[ScoredLinear, ...]
    uncovered: dict[str, str] = field(default_factory=dict)
    mixers: dict[str, str] = field(default_factory=dict)
    first: int = 0
    named: dict[str, Tensor] = field(default_factory=dict)

    def parameters(self) -> dict[str, Tensor]:
        """Weights of the linears by name; then ``named``.

        What is named and belongs to a linear as well is there once.
        """
        chosen = {linear.weight_name: linear.weight for linear in self.linears}
        owned = {id(parameter) for parameter in chosen.values()}
        return chosen | {name: p for name, p in self.named.items() if id(p) not in owned}


def find_scope(
    adapter: DecoderAdapter, layers: int | str | Sequence[int], *, experts: bool = False
) -> Scope:
    """The scope of ``layers`` in the adapter's model; with ``experts`` their 3-D tensors too.

    Raises:
        ConfigError: bad ``layers``, no trainable linear in them, or ``experts`` where none of
            their 3-D tensors can be captured.
    """
    chosen = resolve_layers(adapter, layers)
    linears = tuple(adapter.scored_linears(chosen))
    uncovered = adapter.uncovered(chosen)
    if experts:
        tensors = _scored_experts(adapter, chosen, uncovered)
        linears = tuple(sorted((*linears, *tensors), key=lambda linear: linear.layer))
        captured = {name for tensor in tensors for name in (tensor.weight_name, tensor.bias_name)}
        uncovered = {name: why for name, why in uncovered.items() if name not in captured}
    # Matrices that no linear covers are enough for ``label``. Estimators that need captured errors
    # are refused afterwards, by ``require_covered``.
    if not linears and not uncovered:
        raise ConfigError(
            "no trainable linear in the scored layers",
            got=f"layers {list(chosen)}",
            why="values are inner products with gradients of trainable weights",
            remedy="unfreeze them (requires_grad_), attach adapters, or choose other layers",
        )
    # A graph that began above a second use of a weight would lack that use's part of the gradient.
    # The proof of coverage could not see it: autograd's gradient would lack the same part.
    named = dict(adapter.model.named_parameters(remove_duplicate=False))
    owned = [linear.weight for linear in linears]
    first = lowest_use(adapter, [*owned, *(named[name] for name in uncovered)], chosen[0])
    # The layers above the scored ones count too: the error of a token passes through them on its
    # way down, and one that mixes positions would spoil the self-only backward.
    mixers = mixers_without_rule(adapter, range(first, len(adapter.layers())))
    return Scope(chosen, linears, uncovered, mixers, first)


def mixers_without_rule(adapter: DecoderAdapter, layers: Sequence[int]) -> dict[str, str]:
    """Modules of these layers that are neither softmax attention nor gated delta nets, by name."""
    return {
        name: kind
        for layer in layers
        if not delta_nets_of(adapter, layer)
        for name, kind in adapter.other_mixers([layer]).items()
    }


def delta_nets_of(adapter: DecoderAdapter, layer: int) -> tuple[nn.Module, ...]:
    """The gated delta nets of a layer; an adapter need not know of any."""
    return adapter.delta_nets(layer) if isinstance(adapter, DeltaNets) else ()


def mixtures_of(adapter: DecoderAdapter, layers: Sequence[int]) -> tuple[nn.Module, ...]:
    """The mixtures of experts of these layers; an adapter need not know of any."""
    find: Any = getattr(adapter, "mixtures", None)
    return () if find is None else tuple(find(layers))


def _scored_experts(
    adapter: DecoderAdapter, layers: Sequence[int], uncovered: Mapping[str, str]
) -> list[ScoredExperts]:
    find = getattr(adapter, "scored_experts", None)
    tensors: list[ScoredExperts] = [] if find is None else find(layers)
    if not tensors:
        name, reason = next(iter(uncovered.items()), ("", "no trainable tensor of experts"))
        raise ConfigError(
            "no expert of the scored layers can be captured",
            got=f"layers {list(layers)}: {name and name + ': '}{reason}",
            why="their rows are seen where transformers dispatches a mixture of experts "
            "(its ExpertsInterface), on trainable tensors",
            remedy="parameters='linears', or estimator='label', which follows any weight",
        )
    return tensors


def lowest_use(adapter: DecoderAdapter, parameters: Iterable[Tensor], default: int) -> int:
    """The lowest layer below ``default`` that holds one of these parameters; else ``default``."""
    wanted = {id(parameter) for parameter in parameters}
    below = (
        layer
        for layer, block in enumerate(adapter.layers()[:default])
        if any(id(parameter) in wanted for parameter in block.parameters())
    )
    return next(below, default)


def used_outside(adapter: DecoderAdapter, first: int, parameters: Iterable[Tensor]) -> bool:
    """True if a parameter also sits in a module outside the blocks from ``first`` on (tied).

    The graph must then start at the embeddings, or that part of its gradient is lost.
    """
    inside = {m for block in adapter.layers()[first:] for m in block.modules()}
    others = (m for m in adapter.model.modules() if m not in inside)
    elsewhere = {id(p) for module in others for p in module.parameters(recurse=False)}
    return any(id(parameter) in elsewhere for parameter in parameters)
