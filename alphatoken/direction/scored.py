"""Choice of the parameters over which a scorer takes inner products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alphatoken.config import ScorerConfig
from alphatoken.direction.gradients import require_covered
from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import Scope, find_scope, used_outside
from alphatoken.model.sharding import Sharding


@dataclass(frozen=True, eq=False)
class ScoredParameters:
    """The scored layers, and everything that values are inner products over.

    Attributes:
        scope: the scored layers and linears.
        parameters: parameter name -> parameter; under sharded weights this process's part of it.
        names: place of a parameter (``ScoredLinear.weight_name``) -> its name; tied places
            have one name.
        first: first layer of the graph; None when parameters below the layers take part.
        sharding: of the weights; None where every process has them.
    """

    scope: Scope
    parameters: dict[str, Tensor]
    names: dict[str, str]
    first: int | None
    sharding: Sharding | None

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole parameters."""
        if self.sharding is None:
            return {name: p.shape for name, p in self.parameters.items()}
        return {name: self.sharding.shape(name) for name in self.parameters}


def choose_parameters(
    adapter: DecoderAdapter, config: ScorerConfig, sharding: Sharding | None
) -> ScoredParameters:
    """Choose layers and parameters in the model as it is now.

    Raises:
        ConfigError: no trainable parameter is left, or a choice that the model does not have.
        CoverageError: matrices that the estimator does not cover.
        UnsupportedError: sharded weights that the estimator cannot work on; see also
            ``require_derivatives``.
    """
    choice = config.choice
    scope = find_scope(adapter, config.layers, choice)
    require_covered(scope, config.estimator, config.uncovered)
    parameters, names = _named_once(adapter, scope, config)
    require_derivatives(adapter.model, parameters)
    outside = used_outside(adapter, scope.first, parameters.values())
    if sharding is not None:
        _check_sharded(config, outside)
    first = None if choice.everything or outside else scope.first
    return ScoredParameters(scope, parameters, names, first, sharding)


def require_derivatives(model: nn.Module, chosen: Mapping[str, Tensor]) -> None:
    """Refuse embeddings whose gradient is divided by how often a forward reads a token.

    It would be another one with the last token read, or with a second sequence in the batch.

    Raises:
        UnsupportedError: ``chosen`` has a weight of such an embedding.
    """
    names = {id(parameter): name for name, parameter in chosen.items()}
    for module in model.modules():
        # PEFT looks up its factors in the way of the table that it adapts.
        table = getattr(module, "base_layer", module)
        counting = isinstance(table, nn.Embedding) and table.scale_grad_by_freq
        chosen_here = (names[id(p)] for p in module.parameters() if id(p) in names)
        name = next(chosen_here, None) if counting else None
        if name is not None:
            raise UnsupportedError(
                "an embedding under scale_grad_by_freq has no derivative of one token's loss",
                got=name,
                why="its gradient is divided by how often the batch holds a token",
                remedy="parameters= without that one, or scale_grad_by_freq=False",
            )


def _named_once(
    adapter: DecoderAdapter, scope: Scope, config: ScorerConfig
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters in scope by name, tied ones once, and the name of each place."""
    named: dict[str, Tensor] = dict(adapter.model.named_parameters(remove_duplicate=False))
    chosen = scope.parameters()
    # ``require_covered`` has let only ``label`` come here with matrices that no linear covers;
    # moved along M they are as exact as any other weight, so they are in scope.
    if config.uncovered == "error":
        chosen |= {name: named[name] for name in scope.uncovered}
    # A tied weight is one parameter with one gradient: counted under two names, its part of every
    # inner product would be doubled. ``names`` leads each place to the one name that is kept.
    once: dict[int, str] = {}
    names = {name: once.setdefault(id(p), name) for name, p in chosen.items()}
    if not once:
        skipped = list(scope.uncovered)
        raise ConfigError(
            "no trainable parameter is left in scope",
            got=f"{len(skipped)} skipped, such as {skipped[0]}" if skipped else "all are frozen",
            why="values are inner products with gradients of trainable weights",
            remedy="estimator='label' with uncovered='error', which covers them"
            if skipped
            else "unfreeze some (requires_grad_), or switch an adapter on",
        )
    return {name: chosen[name] for name in once.values()}, names


def _check_sharded(config: ScorerConfig, outside: bool) -> None:
    if config.standard_errors:
        raise UnsupportedError(
            "standard errors cannot be had on sharded weights",
            got="standard_errors=True",
            why="the gradient of each validation batch would be gathered by itself",
            remedy="standard_errors=False, or a layout in which each process has the weights "
            "(DDP, ZeRO-1 or 2)",
        )
    if not config.captured:
        _check_moved(config)
    elif outside:
        raise UnsupportedError(
            "a scored weight is tied to a module outside the scored layers",
            why="under sharded weights gradients come from the scored linears' errors, and "
            "the other use would be missing",
            remedy="untie it, score other layers, or a layout in which each process has the "
            "weights (DDP, ZeRO-1 or 2)",
        )


def _check_moved(config: ScorerConfig) -> None:
    """Raise where label values need whole weights: each process moves its own part of them."""
    if config.derivative == "forward_mode":
        raise UnsupportedError(
            "derivative='forward_mode' cannot run on sharded weights",
            got=f"estimator={config.estimator!r}, parameters={config.parameters!r}",
            why="it carries M of whole weights through one forward, and no process has them",
            remedy="derivative='auto', which moves each process's part of the weights; or a layout "
            "in which each process has the weights (DDP, ZeRO-1 or 2)",
        )
    if config.preconditioner == "full":
        raise UnsupportedError(
            "preconditioner='full' cannot be had for 'label' on sharded weights",
            got=f"parameters={config.parameters!r}",
            why="the gradient of each step would be reduced by a backward of its own",
            remedy="preconditioner='frozen', or a layout in which each process has the weights "
            "(DDP, ZeRO-1 or 2)",
        )
