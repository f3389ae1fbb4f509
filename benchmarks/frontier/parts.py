"""Label values by part of the parameters: one forward that carries a tangent for each part.

A label value is an inner product over parameters, so it is a sum over any parts of them:

    <grad l_k, M>  =  sum over parts p of  <grad_p l_k, M_p>

A forward with the tangent of one part gives that part's share for every token. All parts share one
run of the layers: at layer i the tangents of the parts below it are carried on together, and those
of its own parameters are added to them. What a run of all parts costs is therefore half of what as
many dual forwards would, and the head is met once: its error is contracted with all tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap

from alphatoken.errors import ModelError
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.partial_forward import hidden_of, with_hidden
from alphatoken.model.protocol import AttentionCall, DecoderAdapter, NativeAttention

_ATTENTION, _MLP, _NORMS = range(3)  # kinds of a layer's parameters
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

_TOGETHER = 24  # tangents that go through a layer at a time
_ROWS = 64  # positions that meet the head at a time: 64 MB of logits at a vocabulary of 262,144


@dataclass(frozen=True)
class Parts:
    """Shares (tokens, parts) of the response tokens of one batch, in (row, position) order."""

    names: tuple[str, ...]
    values: Tensor


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
    norms = (_norms_of(group) for group in norm_groups(depth))
    return (*layers, *norms, "final norm", "embedding", "head", "attention", "MLP")


def _norms_of(group: range) -> str:
    return f"norms {group.start}-{group.stop - 1}"


@torch.no_grad()
def part_values(
    adapter: DecoderAdapter,
    batch: LabelledBatch,
    direction: Mapping[str, Tensor],
    report: Callable[[], None] = lambda: None,
) -> Parts:
    """``<grad_p l_k, M_p>`` of every response token k and every part p; see ``part_names``.

    Args:
        adapter: of a transformers decoder with a final norm, and a head without a bias.
        batch: the tokens to value; dropout is off.
        direction: parameter name -> M over all parameters.
        report: called after each layer.

    Exactness: exact up to rounding. Oracle: ``alphatoken.oracle.gradients.label_values`` of each
    part's own direction.

    Raises:
        ModelError: the layers are not all that lies between the embedding and the final norm, a
            linear has a bias, or the head is more than one product.
    """
    model: Any = adapter.model
    moved = _by_parameter(model, direction)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [m for i in range(len(adapter.layers())) for m in adapter.attention_modules(i)]
    with evaluation_mode(model), adapter.override_attention(modules, _attention):
        calls = _calls(adapter, batch)
        _require_plain(model, batch, calls[0].hidden)
        tangent = functional_call(
            embedding, {"weight": moved[id(embedding.weight)]}, batch.inputs["input_ids"]
        )
        if embedding.padding_idx is not None:  # whose row the backward gives nothing
            unmoved = batch.inputs["input_ids"] == embedding.padding_idx
            tangent = tangent.masked_fill(unmoved.unsqueeze(-1), 0.0)
        names, stack = ["embedding"], tangent[None]
        for place, call in enumerate(calls):
            begun = _begun(place, len(calls))
            names += begun
            stack = torch.cat([stack, stack.new_zeros(len(begun), *tangent.shape)])
            stack, last = _through(call, stack, _shifts(names, place).to(stack), moved)
            report()
        found = _tail(model.get_decoder().norm, head, last, stack, moved, batch)
    columns = dict(zip([*names, "final norm", "head"], found.T, strict=True))
    linears = torch.stack([columns[f"layer {i}"] for i in range(len(calls))]).sum(0)
    columns["MLP"] = linears - columns["attention"]
    order = part_names(len(calls))
    return Parts(order, torch.stack([columns[name] for name in order], 1))


def _begun(place: int, depth: int) -> list[str]:
    """The parts whose first parameters lie in this layer."""
    groups = [_norms_of(group) for group in norm_groups(depth) if group.start == place]
    return [f"layer {place}", *groups, *(["attention"] if place == 0 else [])]


def _shifts(names: Sequence[str], place: int) -> Tensor:
    """(parts, kinds) 1 where a part holds this layer's parameters of a kind."""
    found = torch.zeros(len(names), 3)
    for row, name in zip(found, names, strict=True):
        if name == f"layer {place}":
            row[[_ATTENTION, _MLP]] = 1
        elif name == "attention":
            row[_ATTENTION] = 1
        elif name.startswith("norms "):
            first, last = map(int, name.removeprefix("norms ").split("-"))
            row[_NORMS] = float(first <= place <= last)
    return found


def _by_parameter(model: nn.Module, direction: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """M by the identity of its parameter: a tied one has several names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {id(named[name]): matrix for name, matrix in direction.items()}


# --- one run of the model --------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A decoder layer with the arguments that it was called with."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        hidden: Tensor = hidden_of(self.args, self.kwargs)
        return hidden

    def run(self, hidden: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        args, kwargs = with_hidden(self.args, self.kwargs, hidden)
        output = functional_call(self.layer, dict(parameters or {}), args, kwargs)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first


def _calls(adapter: DecoderAdapter, batch: LabelledBatch) -> list[_Call]:
    """Each layer's call in a forward of the trunk."""
    calls: list[_Call] = []

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(layer, args, kwargs))

    model: Any = adapter.model
    with ExitStack() as stack:
        for layer in adapter.layers():
            stack.enter_context(_hook(layer.register_forward_pre_hook(hook, with_kwargs=True)))
        model.get_decoder()(**adapter.arguments(batch.inputs))
    return calls


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _require_plain(model: Any, batch: LabelledBatch, first: Tensor) -> None:
    embedded = model.get_input_embeddings()(batch.inputs["input_ids"])
    head = model.get_output_embeddings()
    softcap = getattr(model.config, "final_logit_softcapping", None)
    if not torch.equal(embedded, first):
        raise _more("the embedding does not enter the first layer as it is")
    if head.bias is not None or softcap:
        raise _more("the head is not one product")


def _more(got: str) -> ModelError:
    return ModelError(
        "this decoder is more than embedding, layers, norm and head",
        got=got,
        why="the parts of a value would not sum to it",
        remedy="measure a decoder of Llama's or Gemma's kind",
    )


def _attention(call: AttentionCall, native: NativeAttention) -> Tensor:
    """Softmax attention in plain operations, which can be differentiated and batched at once."""
    share = call.query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (call.key, call.value))
    logits = call.query @ key.mT * call.scale
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    if call.mask is None:
        length = logits.shape[-1]
        seen = torch.ones(length, length, dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    elif call.mask.dtype == torch.bool:
        logits = logits.masked_fill(~call.mask, -torch.inf)
    else:
        logits = logits + call.mask
    return torch.softmax(logits, -1) @ value


# --- tangents --------------------------------------------------------------------------------


def _through(
    call: _Call, stack: Tensor, shifts: Tensor, moved: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """Tangents (parts, b, t, d) at a layer's output, its own parameters' added; and the output.

    Each kind of parameters of the layer moves with a number of its own, which is 0:
    ``y = W x + s (M x)`` has the derivative ``M x`` along s, and costs no product a tangent.
    """
    pushed, scales = _pushed(call, moved)
    linears = _linears(call)

    def run(hidden: Tensor, shift: Tensor) -> Tensor:
        def push(linear: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + shift[linears[linear]] * pushed[linear]

        norms = {
            name: p + shift[_NORMS] * scales[name]
            for name, p in call.layer.named_parameters()
            if name in scales
        }
        with ExitStack() as hooks:
            for linear in linears:
                hooks.enter_context(_hook(linear.register_forward_hook(push)))
            return call.run(hidden, norms)

    still = torch.zeros_like(shifts[0])

    def carried(tangent: Tensor, shift: Tensor) -> Tensor:
        return jvp(run, (call.hidden, still), (tangent, shift))[1]

    carry: Callable[[Tensor, Tensor], Tensor] = vmap(carried, chunk_size=_TOGETHER)
    return carry(stack, shifts), call.run(call.hidden)


def _linears(call: _Call) -> dict[nn.Module, int]:
    """The linears of a layer and their kinds."""
    return {
        module: _ATTENTION if name.split(".")[-1] in _PROJECTIONS else _MLP
        for name, module in call.layer.named_modules()
        if isinstance(module, nn.Linear)
    }


def _pushed(
    call: _Call, moved: Mapping[int, Tensor]
) -> tuple[dict[nn.Module, Tensor], dict[str, Tensor]]:
    """``M x`` at the output of each linear, and M of the norms by name."""
    pushed: dict[nn.Module, Tensor] = {}

    def see(linear: Any, args: tuple[Any, ...], output: Tensor) -> None:
        pushed[linear] = args[0] @ moved[id(linear.weight)].T

    covered = set()
    with ExitStack() as hooks:
        for linear in _linears(call):
            covered.add(id(linear.weight))
            hooks.enter_context(_hook(linear.register_forward_hook(see)))
        call.run(call.hidden)
    others = {n: p for n, p in call.layer.named_parameters() if id(p) not in covered}
    if any(p.dim() > 1 for p in others.values()):
        raise _more("a layer has matrices besides those of its linears")
    return pushed, {name: moved[id(p)] for name, p in others.items()}


# --- the head --------------------------------------------------------------------------------


def _tail(
    norm: nn.Module,
    head: Any,
    last: Tensor,
    stack: Tensor,
    moved: Mapping[int, Tensor],
    batch: LabelledBatch,
) -> Tensor:
    """Columns (tokens, parts), the last two the final norm's and the head's.

    The loss of a token moves by ``<W^T (pi - y), dn>`` with its normed state n, and by
    ``<(pi - y) (x) n, M_head>`` with the head.
    """
    rows, places = batch.mask.nonzero(as_tuple=True)
    targets = batch.labels[rows, places]
    found = []
    for block in _blocks(len(rows)):
        at = rows[block], places[block] - 1
        hidden = last[at]
        state, pull = vjp(norm, hidden)
        error = torch.softmax(head(state), -1)
        error[torch.arange(len(state)), targets[block]] -= 1
        at_state = error @ head.weight
        (at_hidden,) = pull(at_state)
        columns = torch.einsum("prd,rd->rp", stack[:, at[0], at[1]], at_hidden)
        weights = {name: p for name, p in norm.named_parameters() if id(p) in moved}
        scales = {name: moved[id(p)] for name, p in weights.items()}
        _, turned = jvp(lambda own, h=hidden: functional_call(norm, own, h), (weights,), (scales,))
        final = (turned * at_state).sum(-1)
        own = ((error @ moved[id(head.weight)]) * state).sum(-1)
        found.append(torch.cat([columns, final[:, None], own[:, None]], 1))
    return torch.cat(found)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _ROWS):
        yield slice(start, start + _ROWS)
