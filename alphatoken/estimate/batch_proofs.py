"""Proofs of what a model reads in a batch: no later token, no packed neighbour.

Left padding is not proved but looked at. With an attention mask alone, positions that are relative
(rotary, ALiBi) or counted by the mask are the same on either side. A model that counts absolute
positions from the left edge (GPT-2), or carries a state through padding, has other losses of the
same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import AlphaTokenWarning, ModelError, warn_caller
from alphatoken.model.batch import LabelledBatch, documents_in_rows, token_losses
from alphatoken.model.batch_slice import LENGTH, columns_of_row, real_tokens
from alphatoken.model.forward import (
    evaluation_mode,
    graph_from_layer,
    hidden_of,
    response_losses,
    with_hidden,
)
from alphatoken.model.head import rounding_tolerance
from alphatoken.model.observed_forward import renamed_arguments
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.support.precision import refuse_first

_BY_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens",
             "max_length")  # fmt: skip
"""Arguments that never tell a model to look ahead, unless they are a mask of pairs."""
_OF_OUTPUTS = ("use_cache", "output_", "return_")
"""Flags of what a forward hands out."""


def argument_kinds(batch: LabelledBatch) -> frozenset[str] | None:
    """Attention kinds that the arguments declare; None if only a proof can tell.

    Batches for which this is equal are read alike, so one proof serves them. A flag such as
    ``is_causal`` is part of it. Token types, masks of other classes and the like say by what is in
    them what the model makes of them, and are proved with every batch.
    """
    kinds = set()
    for name, value in batch.inputs.items():
        if isinstance(value, bool) and not name.startswith(_OF_OUTPUTS):
            kinds.add(f"{name}={value}")
        if value is None or isinstance(value, (bool, int, float, str)):
            continue
        if not isinstance(value, Tensor):
            return None
        pairs = name == "attention_mask" and value.dim() > 2
        if name.startswith(_BY_TOKEN) and not pairs:
            kinds.add(name)
        elif pairs and not bool(allowed_pairs(value).triu(1).any()):
            kinds.add("causal mask of pairs")
        else:
            return None
    return frozenset(kinds)


def allowed_pairs(mask: Tensor) -> Tensor:
    """True where a mask of pairs lets a query see a key."""
    if mask.is_floating_point():  # forbids with about the dtype's most negative number
        return mask > torch.finfo(mask.dtype).min / 2
    return mask != 0


def prove_causality(adapter: DecoderAdapter, batch: LabelledBatch) -> bool:
    """Prove that no loss depends on its own token or a later one, by one forward and backward.

    The gradient of each row's first response token at the hidden states that enter the decoder
    must vanish from that token on.

    Returns:
        False if nothing was proved: no response token, or hidden states that are not (b, t, ...).

    Raises:
        ModelError: a loss depends on its own token or a later one.
        UnsupportedError: it does so through a document that reaches over two rows.
    """
    rows = batch.mask.any(-1).nonzero().squeeze(-1)
    first = batch.mask.long().argmax(-1)[rows]
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered.append(hidden_of(args, kwargs))
        # A copy goes on: trackers of modules, as in torch's counter of FLOPs, bear no leaf here.
        return with_hidden(args, kwargs, entered[-1].clone())

    # The hook comes after the one that begins the graph there, so what it sees is in the graph.
    with evaluation_mode(adapter.model), graph_from_layer(adapter, 0):
        handle = adapter.layers()[0].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            losses = token_losses(adapter.forward(batch.inputs), batch.labels)
        finally:
            handle.remove()
        hidden = entered[0]
        if not len(rows) or hidden.shape[:2] != batch.labels.shape:
            return False
        loss = losses[rows, first].sum()
        error = torch.autograd.grad(loss, hidden, allow_unused=True)[0]
    if error is None:
        return True
    places = torch.arange(hidden.shape[1], device=hidden.device)
    # Some models keep several streams of hidden states, (b, t, streams, d).
    size = error[rows].float().flatten(2).norm(dim=-1)
    later = torch.where(places >= first[:, None], size, 0.0).amax(-1)
    # A kernel may leave rounding where it ought to leave nothing.
    leaks = later > 1e-4 * size.amax(-1)
    if bool(leaks.any()):
        bounds = batch.inputs.get("cu_seq_lens_q")
        if isinstance(bounds, Tensor):  # a document that goes on in the next row is seen from there
            documents_in_rows(bounds, *batch.labels.shape)
        row = int(leaks.nonzero()[0])
        raise ModelError(
            "this model looks ahead: a prediction depends on its own token or later ones",
            got=f"row {int(rows[row])}: the loss of token {int(first[row])} has a gradient from "
            "there on",
            why="a value would be of a loss that has seen its answer, silently",
            remedy="a causal model (config.is_decoder=True in BERT's family, a causal mask); a "
            "model that attends both ways cannot be valued",
        )
    return True


Forward = Callable[[Mapping[str, Any]], Tensor]
"""Inputs to logits."""


@contextmanager
def as_scored(adapter: DecoderAdapter) -> Iterator[Forward]:
    """The adapter's forward, in evaluation mode."""
    with torch.no_grad(), evaluation_mode(adapter.model):
        yield adapter.forward


@contextmanager
def as_observed(adapter: DecoderAdapter) -> Iterator[Forward]:
    """The model as its user has called it: in its modes, with no argument but those given.

    A model that is left to keep a cache may read packed rows as one document, and one that
    trains may keep none. Each call draws the same random numbers, so that dropout moves nothing.
    """

    def forward(inputs: Mapping[str, Any]) -> Tensor:
        # Those of a loss are left out, and none is added, such as ``use_cache=False``.
        names = renamed_arguments(adapter, inputs)
        arguments = adapter.arguments(inputs)
        arguments = {k: v for k, v in arguments.items() if names.get(k, k) in inputs}
        arguments |= {"use_cache": inputs["use_cache"]} if "use_cache" in inputs else {}
        torch.set_rng_state(drawn)
        for device, state in by_device.items():
            torch.cuda.set_rng_state(state, device)
        return adapter.logits_of(adapter.model(**arguments))

    devices = {p.device for p in adapter.model.parameters() if p.is_cuda}
    drawn, by_device = torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices}
    with torch.no_grad(), torch.random.fork_rng(list(devices)):
        yield forward


def prove_documents(
    adapter: DecoderAdapter,
    batch: LabelledBatch,
    *,
    running: Callable[[DecoderAdapter], AbstractContextManager[Forward]] = as_scored,
) -> None:
    """Prove that packed documents do not see each other, by two forwards.

    The second one gets other tokens in all documents of a row but the last, whose logits must stay
    as they were. ``running`` is a context that gives the forward.

    Raises:
        ModelError: logits of a row's last document depend on the tokens before it.
        NumericalError: one of them is NaN.
    """
    starts = batch.document_starts
    assert starts is not None
    places = torch.arange(starts.shape[1], device=starts.device)
    last = torch.where(starts, places, 0).amax(-1, keepdim=True)  # where it begins
    ids = batch.inputs["input_ids"]
    # 0 becomes 1 and all else 0: every token changes, and stays within any vocabulary.
    other = torch.where(places < last, (ids == 0).to(ids), ids)
    with running(adapter) as forward:
        before = forward(batch.inputs).float()
        after = forward({**batch.inputs, "input_ids": other}).float()
    watched = (places >= last) & (last > 0) & real_tokens(batch)
    # Equal logits first: some models set unused ones to -inf, and the difference of two is NaN. A
    # NaN elsewhere, at padding say, is nobody's, and must not reach the maximum of its row.
    moved = (before - after).abs().masked_fill_(before == after, 0.0).amax(-1)
    moved = torch.where(watched, moved, 0.0)
    refuse_first(
        moved.isnan(),
        moved,
        "a logit of a packed row is not finite",
        why="whether it depends on the documents before it cannot be seen",
        remedy="look at the weights and at the precision of the forward",
    )
    # A kernel may sum in another order; a document that is seen moves logits by far more than this.
    size = before[watched]
    changed = moved.amax(-1) > 1e-4 * float(size[size.isfinite()].abs().max())
    if bool(changed.any()):
        row = int(changed.nonzero()[0])
        raise ModelError(
            "this model lets packed documents see each other",
            got=f"row {row}: logits from token {int(last[row])} on change with the documents "
            "before it",
            why="values of one document would depend on its neighbours, silently",
            remedy="call the model with use_cache=False; pass packed rows without an "
            "attention_mask, one document a row, or the boundary arguments (cu_seq_lens) that the "
            "model's kernels need",
        )


def boundary_arguments(batch: LabelledBatch) -> frozenset[str] | None:
    """The arguments of a packed batch, and how each mask among them separates its documents.

    Two batches for which this is equal are read alike by the model, so one proof serves both. None
    if an argument cannot be judged, or separates only some of the documents; such a batch is proved
    by itself.
    """
    # Names would not do: a mask may separate the documents of one batch and not of the next.
    boundaries: set[str] = set()
    for name, value in batch.inputs.items():
        judged = _judged(value, batch) if "mask" in name else "given"
        if judged is None:
            return None
        boundaries.add(f"{name}: {judged}")
    return frozenset(boundaries)


def _judged(mask: object, batch: LabelledBatch) -> str | None:
    """Documents that a mask separates, or None if it separates only some or is unreadable.

    "none": there is no mask. "ones": it hides nothing but padding. "numbered": its numbers change
    where a document starts, and nowhere else. "blocked": a mask of pairs that allows none across
    documents.
    """
    starts, shape = batch.document_starts, batch.labels.shape
    assert starts is not None
    if mask is None:
        return "none"
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        real = real_tokens(batch)
        if bool((mask[real] == 1).all()):
            return "ones"
        separated = (mask[:, 1:] != mask[:, :-1]) == starts[:, 1:]
        return "numbered" if bool((separated | ~real[:, 1:]).all()) else None
    if mask.dim() != 4 or mask.shape[-2:] != (shape[1], shape[1]):
        return None
    document = starts.long().cumsum(-1)
    foreign = (document[:, :, None] != document[:, None, :])[:, None]
    return None if bool((allowed_pairs(mask) & foreign).any()) else "blocked"


_PADDING = 8  # columns of it that are shown


def padded_on_the_left(batch: LabelledBatch) -> int | None:
    """A row with padding on its left and no ``position_ids``, of which a token has a value."""
    attention = batch.inputs.get("attention_mask")
    if not isinstance(attention, Tensor) or attention.shape != batch.labels.shape:
        return None
    if batch.inputs.get("position_ids") is not None or not batch.begins_with_padding:
        return None
    padded = (attention[:, 0] == 0).to(batch.mask.device) & batch.mask.any(-1)
    return int(padded.long().argmax()) if bool(padded.any()) else None


@torch.no_grad()
def see_left_padding(adapter: DecoderAdapter, batch: LabelledBatch, row: int) -> None:
    """Warn where the losses of this row differ without its padding, by two short forwards."""
    first = int((batch.inputs["attention_mask"][row] != 0).long().argmax())
    response = int(batch.mask[row].long().argmax())
    stop = min(max(first + LENGTH, response + LENGTH // 2), batch.labels.shape[1])
    begin = max(0, first - _PADDING)
    beside, alone = (columns_of_row(batch, row, place, stop) for place in (begin, first))
    if beside is None or alone is None:
        return
    losses = []
    for piece in (beside, alone):
        with evaluation_mode(adapter.model):
            losses.append(response_losses(adapter, piece.inputs, piece.labels).double())
    read = alone.mask
    padded, own = losses[0][:, -read.shape[1] :][read], losses[1][read]
    tolerance = rounding_tolerance(next(adapter.model.parameters()).dtype)
    if not float((padded - own).norm()) > tolerance * (float(own.norm()) + len(own) ** 0.5):
        return
    warn_caller(
        f"{type(adapter.model).__name__} reads the padding on the left of a row: the mean loss of "
        f"row {row} is {float(padded.mean()):.4g} beside it, and {float(own.mean()):.4g} without "
        "(it counts positions from the left edge, or carries a state through padding). Values are "
        "of the batch as it is: pass position_ids that count tokens from 0, or pad on the right.",
        AlphaTokenWarning,
    )
