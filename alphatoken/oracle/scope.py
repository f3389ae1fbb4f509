"""The scored parameters, found again from the model alone: blocks, linear maps, parameters.

Nothing is asked of the library's adapters. Blocks are the items of the outermost ``ModuleList`` of
the decoder; a linear map is a module that is seen to compute ``x W^T + b`` or ``x W + b``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ModelError


@dataclass(frozen=True)
class Linear:
    """One scored linear map; ``transposed`` if its weight is stored as (d_in, d_out).

    Where ``expert`` is a number, its weight is that entry of the module's 3-D ``parameter``.
    """

    name: str
    module: nn.Module
    transposed: bool
    parameter: str = "weight"
    expert: int | None = None


@dataclass(frozen=True)
class ScoredModel:
    """The scope of a valuation.

    Attributes:
        model: what names are relative to.
        blocks: all decoder blocks, first to last.
        layers: indices of the scored ones, ascending.
        linears: trainable linear maps of the scored blocks, each module once.
        loose: their other trainable matrices, by name: experts, routers, DoRA's factors.
        parameters: name -> parameter that values are inner products over, a tied one once.
        mixtures: the scored blocks' mixtures of experts by name, where they were chosen.
    """

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    layers: tuple[int, ...]
    linears: tuple[Linear, ...]
    loose: dict[str, Tensor]
    parameters: dict[str, Tensor]
    mixtures: dict[str, nn.Module]


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or DeepSpeed's engine; PEFT's wrapper stays."""
    while type(model).__module__.startswith(("torch.nn.parallel", "deepspeed")):
        model = model.get_submodule("module")
    return model


def decoder_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder blocks, first to last.

    Raises:
        ModelError: the model has no list of blocks.
    """
    for step in ("get_base_model", "get_decoder"):
        inner = getattr(model, step, None)
        model = model if inner is None else inner()
    lists = list(_outermost_lists(model))
    depth = _depth(model)
    # the decoder's list is as long as the model is deep; the largest of those
    fitting = [blocks for blocks in lists if len(blocks) == depth] or lists
    if not fitting:
        raise ModelError(
            "no list of decoder blocks was found",
            got=type(model).__qualname__,
            why="the oracle finds the scored layers by itself",
            remedy="pass the adapter that knows them: Scorer(..., adapter=...)",
        )
    return tuple(max((_numbers(blocks), n, list(blocks)) for n, blocks in enumerate(fitting))[2])


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            if len(child):
                yield child
        else:
            yield from _outermost_lists(child)


def _depth(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    return getattr(config, "num_hidden_layers", None)


def find_scored(
    model: nn.Module,
    layers: int | str | Sequence[int],
    *,
    blocks: Sequence[nn.Module] | None = None,
    parameters: str = "linears",
    loose: bool = True,
) -> ScoredModel:
    """The scope that these options mean.

    Args:
        model: without wrappers; see :func:`bare_model`.
        layers: K for the last K blocks, "all", or indices (negative ones from the end).
        blocks: the decoder blocks, where the user has named them.
        parameters: "linears", "all" trainable parameters of the model, or parts joined by commas:
            "linears", "experts" (the tensors of the scored blocks' mixtures), and patterns of names
            that trainable parameters of any layer have.
        loose: trainable matrices that are no linear map take part.
    """
    every = tuple(decoder_blocks(model) if blocks is None else blocks)
    chosen = _indices(layers, len(every))
    names = {module: name for name, module in model.named_modules()}
    dora = _dora_factors(model)
    linears: dict[nn.Module, Linear] = {}
    others: dict[str, Tensor] = {}
    for module in (m for index in chosen for m in every[index].modules()):
        turned = None if module in dora else _orientation(module)
        if turned is not None:
            linears.setdefault(module, Linear(names[module], module, turned))
        elif not isinstance(module, (nn.Embedding, nn.Conv1d)):
            others |= {
                f"{names[module]}.{name}": p
                for name, p in module.named_parameters(recurse=False)
                if p.requires_grad and p.dim() >= 2
            }
    named: dict[str, Tensor]
    parts = [part.strip() for part in parameters.split(",")]
    mixtures = {
        names[module]: module
        for module in (m for index in chosen for m in every[index].modules())
        if "experts" in parts and _is_mixture(module)
    }
    others = {n: p for n, p in others.items() if n.rpartition(".")[0] not in mixtures}
    by_name = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.requires_grad and any(fnmatch.fnmatchcase(name, part) for part in parts)
    }
    if parameters == "all":
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    elif "linears" not in parts:
        named = {}
    else:
        named = {f"{linear.name}.weight": _weight(linear.module) for linear in linears.values()}
        for name, module in mixtures.items():
            named |= expert_tensors(name, module)
        named |= others if loose else {}
    named |= by_name
    # a tied parameter is one variable: <grad l, M> counts it once, under its first name
    once: dict[int, str] = {}
    for name, parameter in named.items():
        once.setdefault(id(parameter), name)
    kept = {name: named[name] for name in once.values()}
    return ScoredModel(model, every, chosen, tuple(linears.values()), others, kept, mixtures)


def expert_tensors(name: str, module: nn.Module) -> dict[str, Tensor]:
    """The trainable 3-D tensors of a mixture of experts by name, without its biases."""
    return {
        f"{name}.{own}": p
        for own, p in module.named_parameters(recurse=False)
        if p.requires_grad and not own.endswith("_bias")
    }


def _is_mixture(module: nn.Module) -> bool:
    """True if the module holds trainable matrices of experts, (experts, ., .) as the last pair."""
    own = dict(module.named_parameters(recurse=False))
    return (
        {"down_proj"} <= own.keys()
        and bool({"gate_up_proj", "up_proj"} & own.keys())
        and hasattr(module, "is_transposed")
        and any(p.requires_grad and p.dim() == 3 for p in own.values())
    )


def _indices(layers: int | str | Sequence[int], depth: int) -> tuple[int, ...]:
    if layers == "all":
        return tuple(range(depth))
    if isinstance(layers, int):
        return tuple(range(depth))[-layers:]
    return tuple(sorted({int(i) % depth for i in layers}))


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _orientation(module: nn.Module) -> bool | None:
    """True if a trainable linear map stores (d_in, d_out); None if it is no such map.

    Two random inputs are sent through it: a square weight does not tell by its shape.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not weight.requires_grad:
        return None
    if isinstance(module, (nn.Embedding, nn.Conv1d)):
        return None
    errors = {}
    for turned in (False, True):
        matrix = weight.detach().mT if turned else weight.detach()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 2, matrix.shape[1], generator=generator).to(weight)
        try:
            with torch.no_grad():
                output = module.forward(x)
                # s = W x + b, or s = W^T x + b where (d_in, d_out) is stored
                wanted = nn.functional.linear(x, matrix, bias)
            errors[turned] = float((output - wanted).norm() / wanted.norm().clamp(min=1e-30))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue
    fitting = [turned for turned in errors if errors[turned] < 0.05]
    return min(fitting, key=lambda turned: errors[turned]) if fitting else None


def _dora_factors(model: nn.Module) -> set[nn.Module]:
    """LoRA factors whose weights DoRA also uses outside their own call."""
    factors: set[nn.Module] = set()
    for module in model.modules():
        dora = getattr(module, "use_dora", None)
        if isinstance(dora, dict) and any(dora.values()):
            for part in ("lora_A", "lora_B"):
                factors.update(module.get_submodule(part).modules())
    return factors
