"""Per-token gradients, one ordinary ``autograd.grad`` each: the ground of every other oracle.

Nothing here is shared with the code that it checks: labels are shifted here, the loss is spelled
out, and the model is only ever called through the ``forward`` that the caller hands in. Call it in
the mode in which the model is to be valued (dropout off).

Index convention: a tensor (b, t) of losses or values holds at index ``i`` what belongs to
predicting token ``i`` (from label position ``i - 1``); index 0 is never predicted and holds 0.

A *flat* vector of a parameter mapping is the concatenation, in the mapping's own order, of every
tensor read row by row (C order). Rows and columns of Hessians and Fishers follow that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alphatoken.errors import InputError

Batch = Mapping[str, Tensor]
"""``input_ids``, ``labels`` (unshifted, -100 ignored) and whatever else the model takes."""

Forward = Callable[[Batch], Tensor]
"""Logits (b, t, vocabulary) of a batch without its labels."""

Token = tuple[int, int]
"""(batch row b, token index i): the prediction of token i of row b."""

IGNORED = -100


def response_tokens(labels: Int[Tensor, "b t"]) -> list[Token]:
    """All (b, i) with a label: ``i >= 1`` and ``labels[b, i] != -100``, row by row."""
    rows = labels.tolist()
    return [
        (b, i)
        for b, row in enumerate(rows)
        for i, label in enumerate(row)
        if i >= 1 and label != IGNORED
    ]


def known_labels(batch: Batch) -> Int[Tensor, "b t"]:
    """``labels`` of a batch, -100 too where the token before is masked (``attention_mask`` 0).

    Such a token, the first one after padding on the left, is predicted from a position that the
    model does not read: its loss is a function of the pad id.
    """
    labels, real = batch["labels"].clone(), batch.get("attention_mask")
    if real is not None and real.dim() == 2:
        for b, i in response_tokens(labels):
            if real[b, i - 1] == 0:
                labels[b, i] = IGNORED
    return labels


def scalar_losses(
    logits: Float[Tensor, "b t vocab"], labels: Int[Tensor, "b t"]
) -> dict[Token, Tensor]:
    """The loss of each response token as a scalar of its own: l = -log pi(z_i | z_<i).

    Scalars, not one tensor: the backward of one token never touches the others, so a NaN at a
    padded position cannot reach it through a multiplication by zero.
    """
    return {
        # l_i = -log pi(z_i | z_<i): the logits at i - 1 predict token i
        (b, i): -torch.log_softmax(logits[b, i - 1], dim=-1)[int(labels[b, i])]
        for b, i in response_tokens(labels)
    }


def token_losses(
    logits: Float[Tensor, "rows length vocab"], labels: Int[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Token losses in the dtype of the logits: index i is the loss of predicting token i.

    Formula: ``out[b, i] = -log_softmax(logits[b, i - 1])[labels[b, i]]``, 0 without a label.

    Exactness: exact; differentiable.

    Raises:
        InputError: logits of another number of positions, as after a shift by the caller.
    """
    if logits.shape[:2] != labels.shape:
        raise InputError(
            "logits and labels cover different tokens",
            got=f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}",
            why="the shift by one would pair a label with another token's prediction",
            remedy="pass the logits of the whole sequence and the unshifted labels",
        )
    losses = scalar_losses(logits, labels)
    zero = logits.new_zeros(())
    rows, length = labels.shape
    columns = [losses.get((b, i), zero) for b in range(rows) for i in range(length)]
    return torch.stack(columns).reshape(rows, length)


def logits_of(forward: Forward, batch: Mapping[str, Any]) -> Tensor:
    """One forward, which is never shown the labels."""
    return forward({name: value for name, value in batch.items() if name != "labels"})


def listed(batches: Batch | Iterable[Batch]) -> list[Batch]:
    """Batches as a list, of one or of several."""
    return [batches] if isinstance(batches, Mapping) else list(batches)


def run_losses(forward: Forward, batch: Batch) -> dict[Token, Tensor]:
    """One forward pass with gradients on, and its scalar token losses."""
    with torch.enable_grad():
        return scalar_losses(logits_of(forward, batch), known_labels(batch))


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, by name; a tied one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient(
    loss: Tensor, parameters: Mapping[str, Tensor], *, keep_graph: bool = False
) -> dict[str, Tensor]:
    """``d loss / d parameter`` by name, zeros where the loss does not depend on it.

    ``keep_graph`` makes the gradients themselves differentiable. No ``.grad`` is touched.
    """
    gradients = torch.autograd.grad(
        loss,
        list(parameters.values()),
        create_graph=keep_graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(parameters, gradients, strict=True))


def per_token_gradients(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    parameters: Mapping[str, Tensor] | None = None,
    tokens: Sequence[Token] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Gradient of each token's loss: one forward, then one ``autograd.grad`` per token.

    Args:
        model: used only for its trainable parameters when ``parameters`` is None.
        forward: batch without labels -> logits (b, t, vocabulary).
        batch: with ``labels``.
        parameters: what to differentiate by, by name; a tied parameter once is enough.
        tokens: (row, token index) pairs; None means all response tokens.

    Yields:
        In the order of the tokens, a dict of gradients in each parameter's shape and dtype; zeros
        where the loss does not depend on the parameter.

    Exactness: exact. ``.grad`` is not touched.
    """
    losses = run_losses(forward, batch)
    wanted = trainable(model) if parameters is None else parameters
    for token in losses if tokens is None else tokens:
        yield gradient(losses[token], wanted)


def directed_parameters(model: nn.Module, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that a direction names, each parameter once.

    A tied parameter has several names. It is one variable, so naming it twice must not count its
    gradient twice: equal directions collapse onto the first name, different ones are refused.

    Raises:
        InputError: unknown name, other shape, or two directions for one parameter.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    kept: dict[str, Tensor] = {}
    first_name: dict[int, str] = {}
    for name, tensor in direction.items():
        if name not in named:
            raise InputError(
                "the direction names no parameter of the model",
                got=name,
                why="its part of the inner product would be dropped",
                remedy="use the keys of model.named_parameters()",
            )
        parameter = named[name]
        if tensor.shape != parameter.shape:
            raise InputError(
                "a direction has another shape than its parameter",
                got=f"{name}: {tuple(tensor.shape)} against {tuple(parameter.shape)}",
                why="broadcasting would give a number without meaning",
                remedy="give the direction in the parameter's own shape",
            )
        first = first_name.setdefault(id(parameter), name)
        if first == name:
            kept[name] = parameter
        elif not torch.equal(direction[first], tensor):
            raise InputError(
                "a tied parameter has two directions",
                got=f"{first} and {name}",
                why="one variable moves one way",
                remedy="name it once",
            )
    return kept


def label_values(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    direction: Mapping[str, Tensor],
    tokens: Sequence[Token] | None = None,
) -> Float[Tensor, "b t"]:
    """Label value of each token: <grad l_i, M>, by per-token autograd.

    Formula: ``out[b, i] = sum_theta <d l_{b,i} / d theta, M_theta>``; 0 elsewhere.

    Args:
        model: resolves the names in ``direction``.
        forward: batch without labels -> logits (b, t, vocabulary).
        batch: with ``labels``.
        direction: parameter name -> M in the parameter's own shape; any parameters, not only
            scored linears.
        tokens: see :func:`per_token_gradients`; other entries stay 0.

    Returns:
        (b, t) in float64, index i belonging to the prediction of token i.

    Exactness: exact up to the model's own arithmetic; the contraction is in float64.

    Source: mathematics of the row sum; the paper's eq. shapley_closed_form_step restricted to the
    parameters in the direction. Oracle of: the ``label`` estimator.
    """
    parameters = directed_parameters(model, direction)
    chosen = response_tokens(known_labels(batch)) if tokens is None else list(tokens)
    values = torch.zeros(batch["labels"].shape, dtype=torch.float64, device=batch["labels"].device)
    gradients = per_token_gradients(model, forward, batch, parameters, chosen)
    for (b, i), gradient in zip(chosen, gradients, strict=True):
        for name, part in gradient.items():
            # eq. grad_alignment: sum_theta <d l_i / d theta, M_theta>
            values[b, i] += torch.sum(part.double() * direction[name].double()).to(values.device)
    return values


def validation_gradient(
    model: nn.Module,
    forward: Forward,
    batches: Batch | Sequence[Batch],
    parameters: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gradient of J_tgt, the mean token loss over all response tokens of all batches.

    Formula: ``G = (1 / n) sum_v grad l_v``, n the number of response tokens in all batches
    together, summed token by token.

    Returns:
        parameter name -> G in float64, in the parameter's shape.

    Exactness: exact; float64 accumulation.

    Raises:
        InputError: no batch has a response token.

    Source: eq. grad_alignment. Oracle of: the adaptation part of the direction M.
    """
    wanted = trainable(model) if parameters is None else parameters
    several = listed(batches)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in wanted.items()}
    count = 0
    for batch in several:
        for gradient in per_token_gradients(model, forward, batch, wanted):
            # n over all batches together: the mean is over tokens, not over batches
            count += 1
            for name, part in gradient.items():
                # sum_v grad l_v, one token after the other
                total[name] += part.double()
    if count == 0:
        raise InputError(
            "the validation data have no response token",
            got=f"{len(several)} batch(es) with every label -100",
            why="the mean over nothing has no gradient",
            remedy="check how labels are made",
        )
    # grad J_tgt = (1 / n) sum_v grad l_v
    return {name: tensor / count for name, tensor in total.items()}


def standard_errors(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    validation: Sequence[Batch],
    parameters: Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "b t"]:
    """Standard error of each token's label value over the draw of the validation batches.

    Formula: the delete-one jackknife. With ``v`` the value against all H batches and ``v_b`` that
    against all but batch b, ``out^2 = (H - 1) / H sum_b (v_b - v)^2``.

    Returns:
        (b, t) in float64; 0 off the response.

    Exactness: exact. Source: ours. Oracle of: ``TokenValues.standard_error``.
    """
    count = len(validation)

    def against(batches: Sequence[Batch]) -> Tensor:
        along = validation_gradient(model, forward, batches, parameters)
        return label_values(model, forward, batch, along)

    whole = against(validation)
    squares = torch.zeros_like(whole)
    for left_out in range(count):
        rest = [one for place, one in enumerate(validation) if place != left_out]
        # (v_b - v)^2, v_b without validation batch b
        squares += (against(rest) - whole) ** 2
    # sqrt((H - 1) / H sum_b (v_b - v)^2)
    return torch.sqrt(squares * (count - 1) / count)


# --- whole batches, and the model at other weights ------------------------------------------------


def batch_mask(batch: Batch) -> Bool[Tensor, " batch token"]:
    """Mask of tokens that count: with a label, a token before it, and attention to that one."""
    mask = known_labels(batch) != IGNORED
    mask[:, 0] = False  # nothing predicts a row's first token
    return mask


def batch_losses(forward: Forward, batch: Batch) -> Float[Tensor, " batch token"]:
    """``-log p`` of each response token, 0 elsewhere: one forward, differentiable, exact."""
    return token_losses(logits_of(forward, batch), known_labels(batch))


def sequence_log_probabilities(forward: Forward, batch: Batch) -> Float[Tensor, " batch"]:
    """``log p(y | x)`` of each row: minus the *sum* of its response tokens' losses. Exact."""
    return -batch_losses(forward, batch).sum(dim=1)


@contextmanager
def undisturbed(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Evaluate with dropout off and gradients to ``parameters`` on; put every flag back after.

    Raises:
        InputError: an entry is not the model's parameter of that name, or one (tied) parameter is
            named twice.
    """
    _check_belongs(model, parameters)
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in parameters.values()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)


@contextmanager
def displaced(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the live ``parameters`` hold ``values`` (same names) inside the block.

    The storages are exchanged, not overwritten: afterwards each parameter holds its old storage,
    bit for bit, and its version counter has not moved. Differentiate inside the block only.
    """
    before = {name: parameters[name].data for name in values}
    try:
        for name, value in values.items():
            parameters[name].data = value.detach().to(before[name])
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data


def flatten(tensors: Mapping[str, Tensor]) -> Float[Tensor, " flat"]:
    """One vector: the tensors in the mapping's order, each read in C order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflatten(flat: Float[Tensor, " flat"], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`flatten`: same names, order and shapes as ``like``."""
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {
        name: part.reshape(tensor.shape)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def _check_belongs(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    # Tied weights have several names; each of them is valid.
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if own.get(name) is not parameter:
            raise InputError(
                "a given parameter is not the model's own",
                got=name,
                why="the loss would not depend on it, and every derivative would be zero",
                remedy="take the tensors from model.named_parameters()",
            )
    if len({id(parameter) for parameter in parameters.values()}) < len(parameters):
        raise InputError(
            "a tied parameter is named twice",
            got=", ".join(parameters),
            why="one variable would count as two",
            remedy="name it once, as model.named_parameters() does",
        )
