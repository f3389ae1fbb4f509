"""The scored layers and their trainable linears, chosen by ``find_scope``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.model.choice import PARAMETERS_REMEDY, ParameterChoice, layers_within
from alphatoken.model.protocol import DecoderAdapter, DeltaNets, ScoredExperts, ScoredLinear


def resolve_layers(adapter: DecoderAdapter, layers: int | str | Sequence[int]) -> tuple[int, ...]:
    """Indices of the scored decoder layers of this model, as ``layers_within`` gives them."""
    if depth := len(adapter.layers()):
        return layers_within(layers, depth)
    raise ConfigError(
        f"layers() of {type(adapter).__name__} gives no blocks",
        got="an empty list",
        remedy="all decoder blocks, first to last",
    )


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
    adapter: DecoderAdapter,
    layers: int | str | Sequence[int],
    choice: ParameterChoice = ParameterChoice(),  # noqa: B008  (frozen)
) -> Scope:
    """The scored layers, what of them and of the model is chosen, where a graph must begin.

    Where every parameter is chosen, all layers are scored, whatever ``layers`` says.

    Raises:
        ConfigError: bad ``layers``, no trainable linear in them where linears are chosen, no
            expert that can be captured where experts are, or a pattern that fits no trainable
            parameter.
    """
    chosen = resolve_layers(adapter, "all" if choice.everything else layers)
    if choice.linears:
        scope = _scope_of_linears(adapter, chosen, experts=choice.experts)
    else:
        scope = Scope(chosen, (), first=len(adapter.layers()) - 1)
    named = _named(adapter.model, choice)
    first = lowest_use(adapter, named.values(), scope.first)
    if used_outside(adapter, 0, named.values()):
        first = 0
    return replace(scope, first=first, named=named)


def _check_linears(adapter: DecoderAdapter, linears: Sequence[ScoredLinear]) -> None:
    """Refuse scored linears of an adapter that are not what they say.

    Raises:
        ConfigError: a name that is not that of the module's weight, or a module that comes twice.
    """
    named = dict(adapter.model.named_parameters(remove_duplicate=False))
    listed = set[int]()
    for linear in linears:
        twice = id(linear.module) in listed
        listed.add(id(linear.module))
        if named.get(linear.weight_name) is linear.weight and not twice:
            continue
        raise ConfigError(
            f"scored_linears() of {type(adapter).__name__} names a weight "
            + ("twice" if twice else "that is not its module's"),
            got=f"name {linear.name!r}, a {type(linear.module).__name__} in layer {linear.layer}",
            why="each weight counts once, under the name that the optimizer has it by",
            remedy="each linear once, with its key in model.named_modules()",
        )


def _scope_of_linears(adapter: DecoderAdapter, chosen: tuple[int, ...], *, experts: bool) -> Scope:
    linears = tuple(adapter.scored_linears(chosen))
    _check_linears(adapter, linears)
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


def _named(model: nn.Module, choice: ParameterChoice) -> dict[str, Tensor]:
    """Parameters that a name chooses, by their first names, in the model's order."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if choice.everything:
        return dict(trained)
    first = {id(parameter): name for name, parameter in trained.items()}
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(p)] for name, p in every if id(p) in first}
    chosen: set[str] = set()
    for pattern in choice.patterns:
        fitting = {first for name, first in aliases.items() if fnmatchcase(name, pattern)}
        if not fitting:
            raise _unmatched(pattern, list(aliases), model)
        chosen |= fitting
    return {name: parameter for name, parameter in trained.items() if name in chosen}


def _unmatched(pattern: str, names: Sequence[str], model: nn.Module) -> ConfigError:
    frozen = [
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and fnmatchcase(name, pattern)
    ]
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return ConfigError(
        "a pattern fits no trainable parameter",
        got=repr(pattern),
        why=f"{frozen[0]} is frozen" if frozen else f"there are names such as {', '.join(near)}",
        remedy="requires_grad_ it, or leave the pattern out" if frozen else PARAMETERS_REMEDY,
    )


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
