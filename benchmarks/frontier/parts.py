"""Label values by part of the parameters.

A label value is an inner product over parameters, so it is a sum over any parts of them:

    <grad l_k, M>  =  sum over parts p of  <grad_p l_k, M_p>

One dual forward with the tangent of one part gives that part's share for every token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.protocol import DecoderAdapter, find_adapter

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def norm_groups(depth: int) -> list[range]:
    """Layers whose norms make one part: the last three, and up to the last sixth, third, half..."""
    cuts = {3, round(depth / 6), round(depth / 3), round(depth / 2), round(2 * depth / 3)}
    starts = sorted({0, *(depth - cut for cut in cuts if 0 < cut < depth)})
    return [range(a, b) for a, b in zip(starts, [*starts[1:], depth], strict=True)]


def part_names(depth: int) -> tuple[str, ...]:
    """The columns; the parts but for "attention" and "MLP" sum to the value.

    Each layer's linears; the norms of groups of layers, and the final one; embedding and head. The
    linears once more by kind: those of attention and of the MLP, over all layers.
    """
    layers = (f"layer {i}" for i in range(depth))
    norms = (f"norms {group.start}-{group.stop - 1}" for group in norm_groups(depth))
    return (*layers, *norms, "final norm", "embedding", "head", "attention", "MLP")


def part_values(
    adapter: DecoderAdapter, batch: LabelledBatch, direction: Mapping[str, Tensor]
) -> Tensor:
    """``<grad_p l_k, M_p>`` of every response token k and every part p: (tokens, parts).

    Tokens come in (row, position) order, parts in that of ``part_names``.

    Args:
        adapter: of a decoder of transformers.
        batch: the tokens to value; dropout is off.
        direction: parameter name -> M over all parameters.

    Exactness: exact up to rounding. Oracle: ``alphatoken.oracle.gradients.label_values`` of each
    part's own direction.
    """
    model, untied = _untied(adapter.model, direction)
    own, parts = find_adapter(model), _parts(model)
    depth = len(own.layers())
    columns = {}
    for name, first in {"attention": 0, **_lowest(depth)}.items():
        share = {key: untied[key] for key in parts[name] if key in untied}
        columns[name] = label_values(own, batch, share, first=first)[batch.mask]
    linears = torch.stack([columns[f"layer {i}"] for i in range(depth)]).sum(0)
    columns["MLP"] = linears - columns["attention"]
    return torch.stack([columns[name] for name in part_names(depth)], 1)


def _lowest(depth: int) -> dict[str, int]:
    """The first layer that the tangent of a part passes: the layers below need none."""
    groups = {f"norms {group.start}-{group.stop - 1}": group.start for group in norm_groups(depth)}
    ends = {"embedding": 0, "final norm": depth - 1, "head": depth - 1}
    return {f"layer {i}": i for i in range(depth)} | groups | ends


def _untied(
    model: nn.Module, direction: Mapping[str, Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with a head of its own, and M by its names: one matrix in two uses is two parts."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head.weight is not embedding.weight:
        return model, dict(direction)
    copied: Any = copy.deepcopy(model)
    copied.get_output_embeddings().weight = nn.Parameter(head.weight.detach().clone())
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    tied = {names[id(embedding)], names[id(head)]}
    (matrix,) = (m for name, m in direction.items() if name in tied)
    return copied, dict(direction) | dict.fromkeys(tied, matrix)


def _parts(model: Any) -> dict[str, list[str]]:
    """Names of the parameters of each part; those of attention are in their layers, too."""
    adapter = find_adapter(model)
    depth = len(adapter.layers())
    place = {id(m): i for i, layer in enumerate(adapter.layers()) for m in layer.modules()}
    parts: dict[str, list[str]] = {name: [] for name in part_names(depth)}
    ends = {
        id(model.get_input_embeddings()): "embedding",
        id(model.get_output_embeddings()): "head",
    }
    for module_name, module in model.named_modules():
        names = [f"{module_name}.{n}" for n, _ in module.named_parameters(recurse=False)]
        layer = place.get(id(module))
        if layer is None:
            parts[ends.get(id(module), "final norm")] += names
        elif isinstance(module, nn.Linear):
            parts[f"layer {layer}"] += names
            parts["attention"] += names if module_name.endswith(_PROJECTIONS) else []
        else:
            (group,) = (group for group in norm_groups(depth) if layer in group)
            parts[f"norms {group.start}-{group.stop - 1}"] += names
    return parts
