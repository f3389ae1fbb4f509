"""Batches: labels to label positions, padding, packed documents, preference pairs.

A batch is what transformers uses: ``input_ids``, optionally ``attention_mask``, ``position_ids``
and the like, and ``labels``, unshifted, -100 where nothing is to be learned. Token ``i`` is
predicted from position ``p = i - 1`` (its *label position*). A token has a value if it is labelled
and its label position is real: the first token of a row has none, and one after padding on the
left would be predicted from the pad token. Everything that the library returns per token sits at
index ``i``. A label on padding itself is refused: transformers would train on it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from alphatoken.errors import InputError, UnsupportedError, require_choice
from alphatoken.model.vocabulary import chosen_losses
from alphatoken.support.devices import on_host, refuse
from alphatoken.support.precision import refuse_first, wide

IGNORE = -100
"""Label of a position that is not learned; transformers' convention."""
_WEIGHS = re.compile("(^|_)(loss|masks?|weights?)(_|$)")
_NO_WEIGHT = re.compile("(^|_)(attention|special_tokens|image|pixel|mm)_mask$")


def weighs_tokens(name: str) -> bool:
    """True for a column that other libraries have for a mask or for weights of the loss."""
    return _WEIGHS.search(name) is not None and _NO_WEIGHT.search(name) is None


def label_mask(labels: Int[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
    """True at index i where token i is a response token that some position predicts.

    The first token of a row has no position before it, so index 0 is always False.
    """
    mask = labels != IGNORE
    mask[:, :1] = False  # also of a batch without columns
    return mask


_PLACES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Labels on a device to (their version, places of their response tokens, least, largest label)."""


def response_places(labels: Int[Tensor, "b t"]) -> Int[Tensor, " n"]:
    """Indices of the response tokens in the flattened labels, in order.

    On a device they are looked for once for each tensor of labels, because their number is waited
    for; a write through ``.data`` is noticed there when ``read_batch`` reads the labels again.
    """
    return _places_and_bounds(labels, bounds=False)[0]


def has_response(labels: Int[Tensor, "b t"]) -> bool:
    """Whether any token is a response token; waits as ``response_places`` does."""
    return len(response_places(labels)) > 0


def _places_and_bounds(
    labels: Tensor, *, bounds: bool, read: Sequence[int] | None = None
) -> tuple[Tensor, tuple[int, int] | None]:
    """Places, and the least and largest label; ``read``: their number and these, where known."""
    # Nothing waits on the host, and what numpy or ``.data`` writes there has no version. Nor has
    # what is written to a tensor of inference mode.
    if on_host(labels) or labels.is_inference():
        places = label_mask(labels).flatten().nonzero().squeeze(-1)
        return places, _bounds(labels, places) if bounds else None
    version, places, extremes = _PLACES.get(labels, (None, None, None))
    if read is not None or version != labels._version or places is None:
        mask, extremes = label_mask(labels).flatten(), None
        if read is None:
            places = mask.nonzero().squeeze(-1)
        else:  # of known number, so that nothing waits: True comes first, each in order
            places = mask.to(torch.uint8).argsort(descending=True, stable=True)[: read[0]]
            extremes = read[1], read[2]
    if bounds and extremes is None:
        extremes = _bounds(labels, places)
    _PLACES[labels] = labels._version, places, extremes
    return places, extremes


def _bounds(labels: Tensor, places: Tensor) -> tuple[int, int]:
    if not len(places):
        return 0, 0
    least, largest = torch.stack(labels.flatten()[places].aminmax()).tolist()
    return int(least), int(largest)


def predicted_labels(
    labels: Int[Tensor, "b t"], attention_mask: Tensor | None, role: str = "batch"
) -> Int[Tensor, "b t"]:
    """``labels`` with -100 where the label position is masked: ``attention_mask[:, i - 1] == 0``.

    What the model says there is a function of the pad token, so nothing is to be learned from it
    and the token has no value. A mask that is no (b, t) (one of pairs) hides nothing. The first
    token of a packed document is another case: the mask does not show it. ``read_batch`` recognises
    it by ``position_ids`` and refuses it as a label.

    Raises:
        InputError: a label of padding itself, ``attention_mask[:, i] == 0``.
    """
    predicted, on_padding = _off_padding(labels, attention_mask)
    if on_padding is None:
        return predicted
    bad = on_padding

    def raise_first() -> None:
        row, index = bad.nonzero()[0].tolist()
        raise InputError(
            f"a label of the {role} lies on padding",
            got=f"label {int(labels[row, index])} at row {row}, token {index}, where "
            "attention_mask is 0",
            why="transformers' loss counts it, and trains the model to go on with padding; no "
            "response holds it, so that it has no value",
            remedy="labels.masked_fill(attention_mask == 0, -100); or a mask of 1 at a token that "
            "is to be learned, such as an end token that padding shares",
        )

    refuse(bad.any(), raise_first)
    return predicted


def _off_padding(labels: Tensor, attention_mask: Any) -> tuple[Tensor, Tensor | None]:
    """(``predicted_labels``, where a label lies on padding itself; None without a mask)."""
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != labels.shape:
        return labels, None
    padding = attention_mask.to(labels.device) == 0
    hidden = F.pad(padding[:, :-1], (1, 0), value=False)
    # Another negative label is refused as no token.
    return labels.masked_fill(hidden, IGNORE), padding & (labels >= 0)


def labels_of_all(
    input_ids: Int[Tensor, "b t"], attention_mask: Tensor | None
) -> Int[Tensor, "b t"]:
    """Each token as a label that some position predicts; -100 on padding and after it."""
    if attention_mask is None or attention_mask.shape != input_ids.shape:
        return input_ids
    real = attention_mask.to(input_ids.device) != 0
    return predicted_labels(input_ids.where(real, IGNORE), attention_mask)


def to_token_index(by_position: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Move values from label positions to token indices: ``out[:, i] = in[:, i - 1]``."""
    # What stands at the last position is dropped: it predicts no token of the row.
    return F.pad(by_position[:, :-1], (1, 0))


def to_label_position(by_token: Tensor) -> Tensor:
    """Inverse shift, from token indices to label positions: ``out[:, p] = in[:, p + 1]``."""
    return F.pad(by_token[:, 1:], (0, 1))


def token_losses(
    scores: Float[Tensor, "b p vocabulary"] | Float[Tensor, "b s"],
    labels: Int[Tensor, "b t"],
    *,
    role: str = "batch",
) -> Float[Tensor, "b t"]:
    """Loss of every response token: index i holds ``-log pi(z_i | z_<i)``, 0 elsewhere.

    Args:
        scores: logits (b, t, vocabulary), or token log-probabilities: (b, t) with index i for
            token i, or (b, t - 1) with index i - 1 for token i (TRL's layout).
        labels: unshifted, -100 ignored; see ``predicted_labels`` and ``response_places``.
        role: how messages call this batch.

    Returns:
        (b, t) in float32 or wider, differentiable (reverse and forward mode).

    Raises:
        InputError: a label that is no token of the vocabulary.
    """
    mask = label_mask(labels)
    if scores.dim() == 3:
        if scores.shape[:2] != labels.shape:
            raise InputError(
                f"logits and labels of the {role} must have one entry a position",
                got=f"{tuple(scores.shape)} and {tuple(labels.shape)}",
                remedy="pass all positions' logits (logits_to_keep=0) and unshifted labels",
            )
        losses = by_prediction(
            labels, partial(chosen_losses, scores), vocabulary=scores.shape[-1], role=role
        )
    # Log-probabilities in place of logits, as TRL's fused head gives them. One column fewer than
    # the labels means that they begin with token 1.
    elif scores.shape[1] == labels.shape[1] - 1:
        losses = F.pad(-scores.to(wide(scores.dtype)), (1, 0))
    else:
        losses = -scores.to(wide(scores.dtype))
    return losses.masked_fill(~mask, 0.0)


def by_prediction(
    labels: Int[Tensor, "b t"],
    losses_at: Callable[[Tensor, Tensor], Tensor],
    *,
    vocabulary: int,
    role: str,
) -> Float[Tensor, "b t"]:
    """Losses at token indices, 0 off the response, where a function gives those of predictions.

    Args:
        labels: of response tokens, -100 elsewhere; see ``predicted_labels``.
        losses_at: (n,) losses of n (positions, targets), positions counted over all rows.
        vocabulary: number of tokens.
        role: how messages call this batch.

    Raises:
        InputError: a label that is no token of the vocabulary.
    """
    tokens, bounds = _places_and_bounds(labels, bounds=True)
    # Checked first, since an index outside the vocabulary would stop the whole device.
    if bounds is not None and not 0 <= bounds[0] <= bounds[1] < vocabulary:
        raise _no_token(labels, vocabulary, role)
    # Token i is predicted at position i - 1, of the same row: index 0 is never in the mask.
    chosen = losses_at(tokens - 1, labels.flatten()[tokens].long())
    return chosen.new_zeros(labels.numel()).index_put((tokens,), chosen).view(labels.shape)


def _no_token(labels: Tensor, vocabulary: int, role: str) -> InputError:
    bad = label_mask(labels) & ((labels < 0) | (labels >= vocabulary))
    row, index = bad.nonzero()[0].tolist()
    return InputError(
        f"a label of the {role} is no token of the vocabulary",
        got=f"{int(labels[row, index])} at row {row}, token {index}; {vocabulary} tokens",
        why="there is no such prediction to take the loss of",
        remedy="labels are token ids, and -100 where nothing is learned",
    )


@dataclass(frozen=True)
class LabelledBatch:
    """One checked batch: what the model's forward takes, and which tokens are responses.

    Attributes:
        inputs: keyword arguments of the forward, without labels.
        labels: (b, t), unshifted; -100 too where the label position is padding.
        mask: (b, t) boolean, True at response tokens.
    """

    inputs: dict[str, Any]
    labels: Tensor
    mask: Tensor

    @property
    def response_tokens(self) -> int:
        """How many tokens of all rows are responses."""
        return len(response_places(self.labels))

    @property
    def positions(self) -> int:
        """Number of positions; padding does not count where an attention mask marks it."""
        attention = self.inputs.get("attention_mask")
        if isinstance(attention, Tensor) and attention.dim() == 2:
            return int((attention != 0).sum())
        return self.labels.numel()

    @cached_property
    def begins_with_padding(self) -> bool:
        """Whether a row begins with padding, by an attention mask of its tokens."""
        padded = _padded_first(self.inputs, self.labels)
        return padded is not None and bool(padded)

    @cached_property
    def document_starts(self) -> Tensor | None:
        """(b, t) True at the first token of each packed document; None if nothing is packed.

        A document starts where ``position_ids`` does not continue, or where the numbers of an
        ``attention_mask`` change that numbers them, between two real tokens. (From padding to the
        first token positions need not continue either.)
        """
        starts = _starts(self.inputs, self.labels)
        if starts is None or not bool(starts.any()):
            return None
        return _of_every_row(starts, self.labels)


def _padded_first(inputs: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    attention = inputs.get("attention_mask")
    if not isinstance(attention, Tensor) or attention.shape != labels.shape:
        return None
    return (attention[:, 0] == 0).any()


def _starts(inputs: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    """(b or 1, t - 1) True where a document starts after the first token; None if none can."""
    # Read from the positions too, because packed rows often come without any mask.
    position_ids, attention = inputs.get("position_ids"), inputs.get("attention_mask")
    starts: Tensor | None = None
    if isinstance(position_ids, Tensor) and position_ids.dim() == 2:
        starts = (position_ids[:, 1:] != position_ids[:, :-1] + 1).to(labels.device)
    if isinstance(attention, Tensor) and attention.shape == labels.shape:
        attention = attention.to(labels.device)
        changes = attention[:, 1:] != attention[:, :-1]
        starts = changes if starts is None else starts | changes
        starts = starts & (attention[:, 1:] != 0) & (attention[:, :-1] != 0)
    return starts


def _of_every_row(starts: Tensor, labels: Tensor) -> Tensor:
    # ``position_ids`` may have one row for all rows of the batch.
    return F.pad(starts, (1, 0), value=True).expand_as(labels)


def _longest(batch: Mapping[str, Any]) -> int:
    """Length of the longest sequence; in packed rows that is the longest document's."""
    position_ids, length = batch.get("position_ids"), int(batch["input_ids"].shape[1])
    if isinstance(position_ids, Tensor) and position_ids.dim() == 2 and length > 0:
        return int(position_ids.max()) + 1
    return length


def read_batch(
    batch: Mapping[str, Any] | LabelledBatch,
    *,
    max_length: int | None = None,
    role: str = "batch",
    model: Any = None,
) -> LabelledBatch:
    """Check a batch and split labels from inputs; no input is copied or moved.

    Args:
        batch: mapping with ``input_ids`` and ``labels``, both (b, t); what was read is returned.
        max_length: longest sequence that the model allows.
        role: how messages call this batch.
        model: its forward will look the ids up, so that each must have a row of its embedding.

    Raises:
        InputError: missing keys, wrong shapes or dtypes, no response token, a sequence longer
            than the model allows, a token without a row of the embedding, labels outside
            ``input_ids``' meaning or on padding, a mask of the loss that contradicts them, a packed
            document whose first token is a label (it would be predicted from another document).
        UnsupportedError: it continues a key/value cache.
    """
    if isinstance(batch, LabelledBatch):
        return batch
    require_tensors(batch, role)
    caches = [key for key in ("cache", "past_key_values") if batch.get(key) is not None]
    if caches:
        raise UnsupportedError(
            f"the {role} continues a cache",
            got=caches[0],
            why="its keys belong to positions that no forward of this batch runs, and every "
            "forward would fill the cache further",
            remedy="pass the whole sequence, with labels of -100 where nothing is valued",
        )
    input_ids, labels = batch["input_ids"], batch["labels"]
    if input_ids.dim() != 2 or labels.shape != input_ids.shape:
        raise InputError(
            f"input_ids and labels of the {role} must have one shape (batch, length)",
            got=f"{tuple(input_ids.shape)} and {tuple(labels.shape)}",
            remedy="do not shift or flatten the labels",
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels of the {role} must be integers", got=str(labels.dtype), remedy="cast to int64"
        )
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"input_ids of the {role} must be int32 or int64",
            got=str(input_ids.dtype),
            why="embeddings are looked up by no other",
            remedy="cast to int64",
        )
    result, refused = _read_numbers(batch, max_length, embedding_rows(model))
    if refused:
        _refuse_numbers(batch, max_length, role, model)
    _require_no_other_labels(batch, role, model)
    return result


def _read_numbers(
    batch: Mapping[str, Any], max_length: int | None, rows: int | None
) -> tuple[LabelledBatch, bool]:
    """The batch, and whether ``_refuse_numbers`` refuses it. Waits for the device once.

    Args:
        batch: whose tensors have the right shapes and dtypes.
        max_length: longest sequence that the model allows.
        rows: of the model's embedding, where they are known.
    """
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    attention, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
    labels, on_padding = _off_padding(batch["labels"].long(), attention)
    result = LabelledBatch(inputs, labels, label_mask(labels))
    starts, of_response = _starts(inputs, labels), labels.masked_fill(~result.mask, 0)
    if not labels.numel():
        return result, True
    bad = {
        "on padding": on_padding,
        "no row": _outside(batch["input_ids"], rows),
        "unmeant": _unmeant(attention),
        "start": None if starts is None else starts & result.mask[:, 1:],
    }
    last = None
    if isinstance(position_ids, Tensor) and position_ids.dim() == 2:
        last = position_ids.max()
    numbers = {
        "count": result.mask.sum(),
        **dict(zip(("least", "largest"), of_response.aminmax(), strict=True)),
        "last": last,
        "begins": _padded_first(inputs, labels),
        **{
            what: None if one is None else one.any()
            for what, one in {"packed": starts, **bad}.items()
        },
    }
    # Each number that is read alone waits for the device.
    present = {what: number.to(labels) for what, number in numbers.items() if number is not None}
    read = dict(zip(present, torch.stack([*present.values()]).tolist(), strict=True))
    bounds = read["count"], read["least"], read["largest"]
    _places_and_bounds(labels, bounds=False, read=bounds)
    # What would be read again.
    vars(result)["begins_with_padding"] = bool(read.get("begins"))
    vars(result)["document_starts"] = (
        _of_every_row(starts, labels) if starts is not None and read["packed"] else None
    )
    longest = labels.shape[1] if last is None else read["last"] + 1
    too_long = max_length is not None and longest > max_length
    return result, read["count"] == 0 or too_long or any(read.get(what) for what in bad)


def _refuse_numbers(
    batch: Mapping[str, Any], max_length: int | None, role: str, model: Any
) -> None:
    """Raise for the first of a batch's numbers that is refused, naming its place."""
    if max_length is not None and (length := _longest(batch)) > max_length:
        raise InputError(
            f"a sequence of the {role} is longer than the model allows",
            got=f"{length} tokens, limit {max_length}",
            why="positions past the limit have no meaning to the model",
            remedy="truncate, or split the conversation",
        )
    if model is not None:
        require_rows(batch["input_ids"], model, f"the {role}")
    _require_mask(batch.get("attention_mask"), role)
    _require_no_other_labels(batch, role, model)
    labels = predicted_labels(batch["labels"].long(), batch.get("attention_mask"), role)
    mask = label_mask(labels)
    if not bool(mask.any()):
        raise InputError(
            f"the {role} has no response token",
            got="labels are -100 everywhere, or only at index 0 and after padding",
            why="there is nothing to value, and means would divide by zero",
            remedy="check the prompt/response split and truncation",
        )
    starts = LabelledBatch(dict(batch), labels, mask).document_starts
    if starts is not None and bool((starts & mask).any()):
        row, index = (starts & mask).nonzero()[0].tolist()
        raise InputError(
            f"the first token of a packed document in the {role} is a label",
            got=f"labels[{row}, {index}]",
            why="it would be predicted from the last token of another document",
            remedy="set labels to -100 at the first token of each document",
        )


def labels_are_shifted(batch: LabelledBatch) -> bool:
    """Whether each label is the token after its place, and not the one at it; waits for the device.

    Labels that are other tokens altogether may be meant.
    """
    ids, labels = batch.inputs.get("input_ids"), batch.labels
    if not isinstance(ids, Tensor) or ids.shape != labels.shape:
        return False
    # What stands at the last place of a row follows no rule.
    labels, here, after = labels[:, :-1], ids[:, :-1].to(labels), ids[:, 1:].to(labels)
    unlabelled = labels == IGNORE
    follows = (unlabelled | (labels == after)).all()
    return bool(follows & (~unlabelled & (labels != here)).any())


def _unmeant(mask: Any) -> Tensor | None:
    """Where a two-dimensional mask is neither 0 nor a whole number from 1 on."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype == torch.bool:
        return None
    return (mask < 0) | (mask != mask.round()) if mask.is_floating_point() else mask < 0


def _outside(ids: Tensor, rows: int | None) -> Tensor | None:
    """Where an id has no row in an embedding of ``rows``."""
    if rows is None or ids.dtype.is_floating_point or not ids.numel():
        return None
    return (ids < 0) | (ids >= rows)


def _require_mask(mask: Any, role: str) -> None:
    bad = _unmeant(mask)
    if bad is not None and bool(bad.any()):
        raise InputError(
            f"a two-dimensional attention_mask of the {role} says nothing of its tokens",
            got=f"a {float(mask[bad][0]):g} in it",
            why="1 is read as a token and 0 as padding; whole numbers from 1 on number documents",
            remedy="pass 1 and 0, or an additive mask of pairs of four dimensions",
        )


def _require_no_other_labels(batch: Mapping[str, Any], role: str, model: Any) -> None:
    names = {name for name in batch if weighs_tokens(name)}
    if names and model is not None:  # what a forward reads by such a name is its own
        names -= inspect.signature(model.forward).parameters.keys()
    labels = batch["labels"]
    for name in sorted(names):
        own = batch[name]
        if not isinstance(own, Tensor):
            continue
        if own.shape == labels[:, 0].shape:
            other, said = own != 1, "a row, whose tokens all count alike"
        elif own.shape in (labels.shape, labels[:, 1:].shape):
            own = own[:, own.shape[1] - labels.shape[1] + 1 :]
            other = own != (labels[:, 1:] != IGNORE).to(own.device)
            said = "a token, which by its label counts as 1 or 0"
        else:
            continue
        if bool(other.any()):
            place = other.nonzero()[0].tolist()
            raise InputError(
                f"'{name}' of the {role} says something else than its labels",
                got=f"{float(own[tuple(place)]):g} for {said} (row {place[0]}"
                + (f", token {place[1] + 1})" if place[1:] else ")"),
                why="labels are taken as they are, and no forward reads it",
                remedy="write -100 into labels where nothing is valued, and leave it out; weights "
                "of token losses are token_weights= of score()",
            )


_TOKENISE = (
    "of texts, alphatoken.data makes them: collate(encode_rows(read_rows(FILE), tokenizer)[0])"
)


def require_tensors(batch: Any, role: str) -> None:
    """Check that a batch is a mapping with the two tensors that everything needs.

    Raises:
        InputError: names what is missing, and what makes batches of texts and of lists.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"the {role} is no mapping with input_ids and labels",
            got=type(batch).__name__,
            remedy=f'pass {{"input_ids": ..., "labels": ...}}; {_TOKENISE}',
        )
    for key in ("input_ids", "labels"):
        if key not in batch:
            texts = "input_ids" not in batch and not any(
                isinstance(one, Tensor) for one in batch.values()
            )
            raise InputError(
                f"the {role} has no tensor '{key}'",
                got=f"keys {sorted(map(str, batch))}",
                remedy="pass input_ids and labels as (batch, length) tensors, labels unshifted, "
                "-100 where nothing is learned" + f"; {_TOKENISE}" * texts,
            )
        if not isinstance(batch[key], Tensor):
            raise InputError(
                f"'{key}' of the {role} is no tensor",
                got=type(batch[key]).__name__,
                remedy="torch.tensor(...) of rows of one length; alphatoken.data.collate pads rows "
                "of several, and a tokenizer gives tensors with return_tensors='pt'",
            )


@dataclass(frozen=True, repr=False)
class PreferenceBatch:
    """Preference pairs with the reference model's sequence log-probabilities.

    Attributes:
        chosen: batch of the preferred responses; row n pairs with row n of ``rejected``.
        rejected: batch of the rejected responses.
        reference_chosen: (b,) log-probability of each chosen response under the reference model.
        reference_rejected: (b,) the same for the rejected ones.
        beta: DPO's temperature.
        normalization: "tokens" divides the summed gradient by the response tokens of both
            branches (the paper), "pairs" by the number of pairs (DPO's own mean).
    """

    chosen: Mapping[str, Any]
    rejected: Mapping[str, Any]
    reference_chosen: Tensor
    reference_rejected: Tensor
    beta: float = 0.1
    normalization: str = field(default="tokens")

    def __post_init__(self) -> None:
        pairs = {
            int(self.chosen["input_ids"].shape[0]),
            int(self.rejected["input_ids"].shape[0]),
            int(self.reference_chosen.numel()),
            int(self.reference_rejected.numel()),
        }
        if len(pairs) != 1:
            raise InputError(
                "chosen, rejected and reference log-probabilities must have one row a pair",
                got=f"row counts {sorted(pairs)}",
                remedy="row n of each belongs to pair n; drop unpaired rows",
            )
        require_choice("normalization", self.normalization, ("tokens", "pairs"), InputError)

    def __repr__(self) -> str:
        pairs = int(self.reference_chosen.numel())
        return f"PreferenceBatch({pairs} pairs, beta={self.beta}, {self.normalization!r})"

    def branches(self) -> Iterator[tuple[Mapping[str, Any], Tensor, int]]:
        """(batch, reference log-probabilities, sign): chosen first, then rejected."""
        yield self.chosen, self.reference_chosen, 1
        yield self.rejected, self.reference_rejected, -1


def require_finite(losses: Tensor, mask: Tensor, role: str) -> None:
    """Raise NumericalError naming the first response token whose loss is NaN or Inf."""
    # Other positions may be NaN: padded rows are under some kernels, and nothing is read there.
    refuse_first(
        ~torch.isfinite(losses.detach()) & mask,
        losses,
        f"the loss of a token in the {role} is not finite",
        why="one NaN spreads to every value through the sums",
        remedy="check the weights (a diverged run?), the labels' range and the precision",
    )


AnyBatch = Mapping[str, Any] | PreferenceBatch | LabelledBatch
"""A batch as the caller hands it over, or as a trainer has read it."""


def as_batches(validation: Any, role: str = "validation batch") -> Sequence[AnyBatch]:
    """Validation data as a sequence of batches, from one item or several.

    Raises:
        InputError: a text, rows of text, or a sequence of anything else that is no batch.
    """
    kinds = (Mapping, PreferenceBatch, LabelledBatch)
    if isinstance(validation, kinds):
        validation = [validation]
    batches = validation if isinstance(validation, Sequence) else list(validation)
    first = batches[0] if batches else None  # the others may be read from a disk one by one
    if first is not None and not isinstance(first, kinds):
        raise InputError(
            "validation must be a batch or a list of batches",
            got=f"{type(validation).__name__} of {type(first).__name__}",
            why="values are taken against the loss on labelled tokens",
            remedy=f"a batch, or a list of batches; {_TOKENISE}",
        )
    if isinstance(first, Mapping):
        require_tensors(first, role)
    return batches


def documents_in_rows(bounds: Tensor, batch: int, length: int) -> Tensor:
    """(b, t) document of each position by bounds in the flattened batch, -1 outside of them.

    Raises:
        UnsupportedError: a document reaches over two rows.
    """
    flat = torch.arange(batch * length, device=bounds.device)
    documents = torch.bucketize(flat, bounds[1:-1], right=True)
    outside = (flat < bounds[0]) | (flat >= bounds[-1])
    rows = documents.masked_fill(outside, -1).view(batch, length)
    if batch > 1 and bool(((rows[1:, 0] == rows[:-1, -1]) & (rows[1:, 0] >= 0)).any()):
        raise UnsupportedError(
            "a packed sequence reaches over two rows of the batch",
            got=f"{batch} rows of {length} positions",
            why="values are taken row by row",
            remedy="one row, as transformers' and TRL's collators for packing give it",
        )
    return rows


def embedding_rows(model: Any) -> int | None:
    """Number of tokens with a row in the input embedding; None if unknown."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    embedding = getattr(embedding, "base_layer", embedding)  # under a LoRA adapter
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def require_rows(ids: Tensor, model: Any, what: str) -> None:
    """Check that the embedding has a row for each of these ids, (batch, length) or (length,).

    Raises:
        InputError: one has none; names its place, and ``what`` the ids are.
    """
    # A token that was added to a tokenizer and not to the model: on a CPU its look-up raises a bare
    # IndexError, on a GPU it stops the device.
    rows = embedding_rows(model)
    bad = _outside(ids, rows)
    if bad is not None and bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        names = ("row", "token")[-len(place) :]
        where = ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=True))
        raise InputError(
            f"a token of {what} has no row in the embedding",
            got=f"id {int(ids[tuple(place)])} at {where}; {rows} rows",
            why="the model has never seen it: it was added to the tokenizer, and not to the model",
            remedy="the tokenizer that the model was trained with, or "
            "model.resize_token_embeddings(len(tokenizer)) before training",
        )
