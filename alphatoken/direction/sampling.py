"""Prompts, and responses that the model samples to them.

Sampling is at temperature 1 from the full distribution: no top-k, no top-p, nothing that a
generation config would add, because the Fisher's expectation is over the model's own p(y | x).
Every sample has its own generator, seeded from (seed, index of the sample): what it draws does
not depend on the other samples in its batch, on where an interrupted fit was resumed, or on
PyTorch's global generators, which are never touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alphatoken.errors import InputError, NumericalError
from alphatoken.model.batch import IGNORE, LabelledBatch
from alphatoken.model.protocol import DecoderAdapter

__all__ = [
    "LabelledSequence",
    "Prompts",
    "draw_tokens",
    "greedy_responses",
    "read_sequences",
    "sample_generator",
    "sample_responses",
    "uniform_numbers",
]

if TYPE_CHECKING:
    Prompts = Sequence[Tensor | Sequence[int]] | Mapping[str, Any]
else:  # whatever is passed is read, or refused in our own words, also under run-time type checks
    Prompts = Any

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_CHUNK = 64  # positions whose full distributions are held in float64 at a time


@dataclass(frozen=True)
class LabelledSequence:
    """One sequence without padding, on the CPU.

    Attributes:
        ids: token ids, (length,).
        predicted: True at i where token i is a response token, (length,); never at 0.
    """

    ids: Int[Tensor, " length"]
    predicted: Bool[Tensor, " length"]

    @property
    def prompt(self) -> Int[Tensor, " prompt"]:
        """The tokens before the first predicted one."""
        first = self.predicted.nonzero()
        return self.ids[: int(first[0])] if len(first) else self.ids


def read_sequences(prompts: Prompts, *, labels: str) -> list[LabelledSequence]:
    """Sequences from a list of id tensors (or lists of ints), or from a batch; padding is stripped.

    With ``labels="sequence"`` only the prompt of each matters: a list entry is a prompt; in a
    batch with labels the prompt is what comes before the first predicted token (its first label,
    or the second token where labels cover the whole row). With ``labels="token"`` the tokens to
    be resampled are the labelled ones of a batch, and all but the first of a list entry; what
    follows the last of them is cut off.

    Raises:
        InputError: no prompts, an empty one, none to predict, not integer ids, packed rows.
    """
    if isinstance(prompts, Mapping):
        sequences = _from_batch(prompts)
    elif isinstance(prompts, (str, Tensor)):
        raise InputError(
            "prompts are neither a list of 1-D id tensors nor a batch",
            got=type(prompts).__name__,
            why="text needs a tokenizer, and a stacked tensor does not say what is padding",
            remedy="pass a list of 1-D tensors of ids, or a dict with input_ids and attention_mask",
        )
    else:
        sequences = [_from_ids(ids, f"prompt {i}") for i, ids in enumerate(prompts)]
    if labels == "sequence" and not (isinstance(prompts, Mapping) and "labels" in prompts):
        # Nothing says where a response would begin: all of it is prompt.
        sequences = [
            LabelledSequence(one.ids, torch.zeros_like(one.predicted)) for one in sequences
        ]
    if not sequences:
        raise InputError(
            "there are no prompts",
            why="the Fisher is an expectation over prompts",
            remedy="pass at least one",
        )
    for i, one in enumerate(sequences):
        if len(one.ids) == 0:
            raise InputError(
                f"prompt {i} is empty",
                why="there is no position from which its first token could be predicted",
                remedy="drop it, or start it with the beginning-of-sequence token",
            )
        if labels == "token" and not one.predicted.any():
            raise InputError(
                f"sequence {i} has no token to resample",
                got=f"{len(one.ids)} token(s), none of them labelled after the first",
                remedy='drop it, or fit with labels="sequence"',
            )
    return [_cut(one) for one in sequences] if labels == "token" else sequences


def _cut(one: LabelledSequence) -> LabelledSequence:
    # What follows the last token to be resampled cannot change a gradient.
    end = int(one.predicted.nonzero()[-1]) + 1
    return LabelledSequence(one.ids[:end], one.predicted[:end])


def _integers(values: Any, name: str) -> Tensor:
    try:
        ids = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(
            f"{name} is not made of token ids", got=str(problem), remedy="pass integers"
        ) from problem
    if ids.numel() == 0:
        return ids.detach().to("cpu", torch.int64)
    if ids.dtype not in _INTEGERS:
        raise InputError(
            f"{name} is not made of token ids",
            got=f"dtype {ids.dtype}",
            why="rounded or boolean ids would name other tokens",
            remedy="pass integer ids (torch.int64)",
        )
    return ids.detach().to("cpu", torch.int64)


def _from_ids(values: Any, name: str) -> LabelledSequence:
    ids = _integers(values, name)
    if ids.dim() != 1:
        raise InputError(
            f"{name} is not one row of token ids",
            got=f"shape {tuple(ids.shape)}",
            remedy="pass 1-D tensors, or one batch dict with input_ids and attention_mask",
        )
    predicted = torch.ones(len(ids), dtype=torch.bool)
    predicted[:1] = False
    return LabelledSequence(ids, predicted)


def _from_batch(batch: Mapping[str, Any]) -> list[LabelledSequence]:
    if "input_ids" not in batch:
        raise InputError(
            "the batch of prompts has no input_ids",
            got=f"keys {sorted(map(str, batch))}",
            remedy="pass token ids under 'input_ids'",
        )
    ids = _integers(batch["input_ids"], "input_ids")
    if ids.dim() != 2:
        raise InputError("input_ids is not (batch, length)", got=f"shape {tuple(ids.shape)}")
    inputs = {
        name: _rows(batch[name], ids, name)
        for name in ("attention_mask", "position_ids", "labels")
        if batch.get(name) is not None
    }
    real = inputs.setdefault("attention_mask", torch.ones_like(ids)) != 0
    packed = [key for key in ("cu_seq_lens_q", "cu_seqlens", "seq_idx") if key in batch]
    starts = LabelledBatch(inputs, ids, real).document_starts
    if packed or starts is not None:
        raise InputError(
            "the batch of prompts is packed",
            got=packed[0] if packed else "a document that begins within a row",
            why="several documents in a row would be read as one prompt",
            remedy="pass one prompt per row or per list entry",
        )
    wanted = inputs.get("labels", ids)
    return [
        _from_row(ids[row], real[row], wanted[row], "labels" not in inputs, row)
        for row in range(len(ids))
    ]


def _rows(values: Any, ids: Tensor, name: str) -> Tensor:
    rows = torch.as_tensor(values).detach().cpu()
    if rows.shape != ids.shape:
        raise InputError(
            f"{name} does not have the shape of input_ids",
            got=f"{tuple(rows.shape)} beside {tuple(ids.shape)}",
            remedy=f"pass {name} of shape (batch, length)",
        )
    return rows


def _from_row(
    ids: Tensor, real: Tensor, wanted: Tensor, unlabelled: bool, row: int
) -> LabelledSequence:
    places = real.nonzero().flatten()
    if len(places) == 0:
        return LabelledSequence(ids[:0], real[:0])
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first != len(places):
        raise InputError(
            f"the attention mask of row {row} has a hole",
            why="what the model reads there is not one sequence",
            remedy="pad on the left or on the right only",
        )
    ids, wanted = ids[first:last], wanted[first:last]
    predicted = wanted != IGNORE
    predicted[:1] = False
    if unlabelled or predicted.any():
        return LabelledSequence(ids, predicted)
    raise InputError(
        f"row {row} has no label",
        why="there is nothing that says where its prompt ends",
        remedy="drop the row, or pass the batch without labels",
    )


def sample_generator(seed: int, index: int) -> torch.Generator:
    """The CPU generator of sample ``index``: a function of (seed, index) alone."""
    # CPU generators keep 32 bits of their seed, so a hash of the pair would collide after some
    # 10^4 samples; an odd multiplier scatters the indices and keeps all 2^32 of them apart.
    base = int.from_bytes(hashlib.sha256(f"alphatoken:{seed}".encode()).digest()[:4], "little")
    generator = torch.Generator(device="cpu")
    generator.manual_seed((base + index * 0x9E3779B1) % 2**32)
    return generator


def uniform_numbers(count: int, generator: torch.Generator) -> Float[Tensor, " count"]:
    """Float64 numbers in [0, 1) from a CPU generator."""
    return torch.rand(count, generator=generator, dtype=torch.float64)


def draw_tokens(
    logits: Float[Tensor, "n vocabulary"], uniform: Float[Tensor, " n"], names: Sequence[str]
) -> Int[Tensor, " n"]:
    """One token per row from softmax(logits), by inverting its distribution function.

    ``uniform`` are numbers in [0, 1), ``names`` what each row is, for messages; a single name
    serves all rows.

    Exactness: exact up to float64 rounding, whatever the dtype of ``logits``; a token of
    probability 0 is never drawn.

    Raises:
        NumericalError: a NaN or +Inf among the logits, or a row that allows no token.
    """
    # Inverting a cumulative sum needs more digits than float32 has for a large vocabulary: tokens
    # of small probability would be rounded away. MPS has no float64.
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    drawn = []
    for start in range(0, len(logits), _CHUNK):
        rows = logits[start : start + _CHUNK].detach().to(wide)
        cumulative = rows.softmax(dim=-1).cumsum(dim=-1)
        total = cumulative[:, -1:]
        bad = (~torch.isfinite(total)).flatten().nonzero().flatten().tolist()
        if bad:
            name = names[0] if len(names) == 1 else names[start + bad[0]]
            raise NumericalError(
                f"the model's logits for {name} give no distribution",
                got="a NaN or an infinity",
                why="no token can be drawn from them",
                remedy="check the weights of the model, or load it in a wider dtype",
            )
        # Strictly below the total, or a number near 1 would be searched for past the last token
        # that has a probability above 0.
        below = torch.nextafter(total, torch.zeros_like(total))
        numbers = uniform[start : start + _CHUNK].to(rows).unsqueeze(1)
        threshold = torch.minimum(numbers * total, below)
        drawn.append(torch.searchsorted(cumulative, threshold, right=True).squeeze(1))
    return torch.cat(drawn).cpu()


def sample_responses(
    adapter: DecoderAdapter,
    prompts: Sequence[Int[Tensor, " _"]],
    generators: Sequence[torch.Generator],
    budgets: Sequence[int],
    names: Sequence[str],
) -> list[Int[Tensor, " _"]]:
    """Draw one response per prompt: y ~ p(. | x), token by token, temperature 1.

    A response ends with the first end token, which belongs to it, or after ``budgets[i]``
    tokens. The rows run as one batch, padded on the left. Exact up to the rounding with which
    the model computes a row inside a batch.

    Raises:
        NumericalError: logits that give no distribution; the message has the row's name.
    """

    def draw(logits: Tensor, rows: Sequence[int]) -> Tensor:
        # Each row draws from its own generator, so that what it draws does not depend on which
        # other rows still run, nor on the batch that it is in.
        uniform = torch.cat([uniform_numbers(1, generators[row]) for row in rows])
        return draw_tokens(logits, uniform, [names[row] for row in rows])

    return _responses(adapter, prompts, budgets, draw)


def greedy_responses(
    adapter: DecoderAdapter, prompts: Sequence[Int[Tensor, " _"]], budgets: Sequence[int]
) -> list[Int[Tensor, " _"]]:
    """The likeliest next token, again and again; ends and batches as in ``sample_responses``."""
    return _responses(adapter, prompts, budgets, lambda logits, _: logits.argmax(-1).cpu())


@torch.no_grad()
def _responses(
    adapter: DecoderAdapter,
    prompts: Sequence[Tensor],
    budgets: Sequence[int],
    choose: Callable[[Tensor, Sequence[int]], Tensor],
) -> list[Tensor]:
    """One response a prompt; ``choose`` takes (n, vocabulary) logits and the n rows they are of."""
    device = next(adapter.model.parameters()).device
    ends = frozenset(adapter.end_tokens())
    ids, mask = _pad_left(prompts, device)
    responses: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    state: Any = None
    while running:
        logits, state = adapter.next_token_logits(ids, mask, state)
        rows = sorted(running)
        tokens = choose(logits[rows], rows).tolist()
        column = torch.zeros(len(prompts), 1, dtype=torch.int64)
        for row, token in zip(rows, tokens, strict=True):
            responses[row].append(token)
            column[row] = token
            if token in ends or len(responses[row]) >= budgets[row]:
                running.discard(row)
        # Finished rows go on as padding, so that their positions do not run past the model's limit.
        goes_on = torch.tensor([[row in running] for row in range(len(prompts))])
        ids = torch.cat([ids, column.to(device)], dim=1)
        mask = torch.cat([mask, goes_on.to(mask)], dim=1)
    return [torch.tensor(response, dtype=torch.int64) for response in responses]


def _pad_left(prompts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
