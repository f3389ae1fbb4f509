"""The Fisher information of a sequence model, exactly: enumerate every response, weigh, add.

Notation: prompt x (a vector of token ids), response y, log p(y | x) the sum over its tokens.

    F  =  mean over x  sum over y  p(y | x)  g(y) g(y)^T         g(y) = grad log p(y | x)

Matrices follow the flat layout of :mod:`alphatoken.oracle.gradients`.

And the Wasserstein form of the transfer error between two such Fishers, on finite prompt sets:

    || F_dagger - F_ref ||  <=  L_g W_1  <=  L_g W_2

Both are the mean, over their prompts, of one map f from a prompt to a diagonal Fisher; L_g is the
Lipschitz constant of f on the space of prompts (eq. app_wasser).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle.gradients import (
    IGNORED,
    Batch,
    Forward,
    batch_mask,
    flatten,
    gradient,
    logits_of,
    sequence_log_probabilities,
    undisturbed,
)


def enumerate_responses(length: int, vocabulary: int, eos: int | None) -> list[tuple[int, ...]]:
    """Every response: ``length`` tokens, or fewer if it ends in ``eos``, which it then contains."""
    finished: list[tuple[int, ...]] = []
    unfinished: list[tuple[int, ...]] = [()]
    for _ in range(length):
        grown = [(*response, token) for response in unfinished for token in range(vocabulary)]
        finished += [response for response in grown if response[-1] == eos]
        unfinished = [response for response in grown if response[-1] != eos]
    return finished + unfinished


def enumerated_log_probabilities(
    forward: Forward, prompt: Tensor, response_length: int, vocabulary: int, eos: int | None = None
) -> Float[Tensor, " response"]:
    """``log p(y | prompt)`` of every response, in a fixed order, differentiable.

    Exact. Responses of one length share a forward without any padding.

    Raises:
        InputError: the probabilities do not add to 1, as they must when ``vocabulary`` is the
            width of the logits.
    """
    responses = enumerate_responses(response_length, vocabulary, eos)
    pieces = [
        sequence_log_probabilities(forward, batch)
        for batch in _batches_by_length(prompt, responses)
    ]
    log_probabilities = torch.cat(pieces)
    # sum_y p(y | x) = 1
    total = float(log_probabilities.detach().double().exp().sum())
    if not abs(total - 1.0) < 1e-3:
        raise InputError(
            "the enumerated responses do not exhaust the model's distribution",
            got=f"total probability {total:.6f}, vocabulary {vocabulary}",
            why="the result would not be an expectation",
            remedy="pass the width of the logits as vocabulary, and finite weights",
        )
    return log_probabilities


def expected_retention_loss(
    forward: Forward,
    prompts: Sequence[Tensor],
    response_length: int,
    vocabulary: int,
    reference_probabilities: Sequence[Tensor],
    eos: int | None = None,
) -> Tensor:
    """``mean over x  sum over y  q(y | x) (-log p_theta(y | x))`` for fixed ``q``, a scalar.

    With ``q`` the model's own probabilities at theta_ref this is KL(p_ref || p_theta) plus a
    constant: the retention loss of data that are the model's own, without sampling noise. ``q``
    has one vector a prompt, in the order of :func:`enumerated_log_probabilities`.
    """
    loss = torch.zeros(())
    for prompt, q in zip(prompts, reference_probabilities, strict=True):
        log_p = enumerated_log_probabilities(forward, prompt, response_length, vocabulary, eos)
        # -sum_y q(y | x) log p_theta(y | x), mean over prompts
        loss = loss - (q.detach() * log_p).sum() / len(prompts)
    return loss


def exact_fisher(
    model: nn.Module,
    forward: Forward,
    prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    eos: int | None = None,
) -> Float[Tensor, " flat flat"]:
    """Fisher information at the model's current parameters, by enumeration of all responses.

    ``F = mean_x sum_y p(y|x) g g^T`` with ``g = grad log p(y|x)`` summed over the response. Exact.
    Source: the Monte-Carlo Fisher (eq. mc_fisher), whose limit this is; with retention prompts, eq.
    app_F_ret_dagger. Checked by :func:`kl_hessian`.

    Args:
        model: the model behind ``forward``; left as it was.
        forward: batch -> logits.
        prompts: vectors of token ids, each of equal weight.
        response_length: the longest response.
        parameters: the model's parameters in scope, by name.
        vocabulary: the number of token ids, i.e. the width of the logits.
        eos: a token that ends a response.

    Raises:
        InputError: as :func:`enumerated_log_probabilities`, or foreign parameters.
    """
    with undisturbed(model, parameters):
        size = sum(parameter.numel() for parameter in parameters.values())
        fisher = next(iter(parameters.values())).new_zeros((size, size))
        for prompt in prompts:
            log_p = enumerated_log_probabilities(forward, prompt, response_length, vocabulary, eos)
            for one in log_p:
                g = flatten(gradient(one, parameters))
                # p(y | x) g g^T, g = grad log p(y | x) of the whole response
                fisher += one.detach().exp() * torch.outer(g, g) / len(prompts)
    return fisher


def exact_token_fisher(
    model: nn.Module, forward: Forward, batch: Batch, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Fisher with labels drawn on the *given* prefixes (``labels="token"``), in full.

    ``F = mean over rows  sum_p sum_c pi_p(c) g_pc g_pc^T`` with ``g_pc = grad log pi_p(c)``. The
    summed gradient of one draw squares to this in expectation, because scores at different
    positions of a fixed text are independent with mean zero. Exact. Rows without response tokens
    do not count. Returns (n, n) in the flat layout.

    Raises:
        InputError: the batch has no response token, or foreign parameters.
    """
    mask = batch_mask(batch)
    rows = int(mask.any(dim=1).sum())
    if rows == 0:
        raise InputError("the batch has no response token", got="all labels are -100")
    with undisturbed(model, parameters):
        logits = logits_of(forward, batch)
        size = sum(parameter.numel() for parameter in parameters.values())
        fisher = logits.new_zeros((size, size))
        for row, token in mask.nonzero().tolist():
            # every label c at position p = i - 1: pi_p(c) g_pc g_pc^T
            for one in torch.log_softmax(logits[row, token - 1], dim=-1):
                g = flatten(gradient(one, parameters))
                fisher += one.detach().exp() * torch.outer(g, g) / rows
    return fisher


def monte_carlo_fisher(
    model: nn.Module,
    forward: Forward,
    prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    *,
    samples: int,
    seed: int,
    eos: int | None = None,
) -> tuple[Float[Tensor, " flat"], Float[Tensor, " flat"]]:
    """Diagonal Fisher from sampled responses: the slow reference of eq. mc_fisher.

    Each sample draws a prompt uniformly, a response from the model at temperature 1 token by
    token, and squares the gradient of that one response's summed log-probability. Unbiased for
    :func:`exact_fisher`; error of order 1/sqrt(samples). Returns the mean and its standard error.

    Raises:
        InputError: foreign parameters.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = []
    with undisturbed(model, parameters):
        for _ in range(samples):
            prompt = prompts[int(torch.randint(len(prompts), (1,), generator=generator))]
            response = _sample(forward, prompt, response_length, eos, generator)
            (batch,) = _batches_by_length(prompt, [response])
            log_p = sequence_log_probabilities(forward, batch)
            # eq. mc_fisher: the square of one response's gradient, not of a batch's
            draws.append(flatten(gradient(log_p.sum(), parameters)) ** 2)
    squares = torch.stack(draws)
    # E[g^2], and its standard error std / sqrt(samples)
    return squares.mean(dim=0), squares.std(dim=0) / samples**0.5


def _sample(
    forward: Forward, prompt: Tensor, length: int, eos: int | None, generator: torch.Generator
) -> tuple[int, ...]:
    response: tuple[int, ...] = ()
    with torch.no_grad():
        while len(response) < length and (not response or response[-1] != eos):
            ids = torch.cat([prompt, prompt.new_tensor(response)]).unsqueeze(0)
            logits = forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            probabilities = torch.softmax(logits[0, -1], dim=-1)
            # y_i ~ p(. | x, y_<i) at temperature 1: the model's own labels, not observed ones
            token = torch.multinomial(probabilities.cpu(), 1, generator=generator)
            response = (*response, int(token))
    return response


def _batches_by_length(prompt: Tensor, responses: Sequence[tuple[int, ...]]) -> Iterator[Batch]:
    """One unpadded batch for each response length, shortest first, order kept within it."""
    # no padding, so that no mask can be wrong
    for length in sorted({len(response) for response in responses}):
        chosen = [list(response) for response in responses if len(response) == length]
        tail = torch.tensor(chosen, dtype=prompt.dtype, device=prompt.device)
        head = prompt.expand(len(chosen), -1)
        ids = torch.cat([head, tail], dim=1)
        labels = torch.cat([torch.full_like(head, IGNORED), tail], dim=1)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


# --- transfer between prompt sets -----------------------------------------------------------------

Metric = Callable[[Tensor, Tensor], float]
"""A distance between two prompts (vectors of token ids), positive unless they are equal."""


@dataclass(frozen=True)
class TransferBound:
    """Both sides of eq. app_wasser: ``transfer <= lipschitz * wasserstein_2``.

    ``largest`` is the largest entry of the two Fishers, by which rounding is measured.
    """

    transfer: float
    largest: float
    lipschitz: float
    wasserstein_1: float
    wasserstein_2: float

    @property
    def right(self) -> float:
        """``L_g W_2``, the paper's bound."""
        return self.lipschitz * self.wasserstein_2

    @property
    def holds(self) -> bool:
        """True if both forms hold (rounding of 1e-12 of the right side and the Fishers allowed)."""
        # eq. app_wasser by W_2 as printed, and by W_1, which the proof needs and is never larger
        right = min(self.right, self.lipschitz * self.wasserstein_1)
        return self.transfer <= right * (1 + 1e-12) + 1e-12 * self.largest


def wasserstein(
    left: Sequence[Tensor], right: Sequence[Tensor], metric: Metric, power: int
) -> float:
    """``W_power`` between the uniform distributions on two finite prompt lists.

    Exact optimal transport: each point is repeated until both lists have the same length; the
    vertices of that transport polytope are permutations (Birkhoff), so an optimal assignment is an
    optimal plan.
    """
    # equal masses: each of n points lcm / n times
    common = math.lcm(len(left), len(right))
    # d(a, b)^power of every pair
    costs = np.array([[metric(a, b) ** power for b in right] for a in left], dtype=np.float64)
    costs = costs.repeat(common // len(left), axis=0).repeat(common // len(right), axis=1)
    rows, columns = linear_sum_assignment(costs)
    # W_p = (mean over the plan of d^p)^(1/p)
    return math.pow(costs[rows, columns].mean(), 1.0 / power)


def prompt_fishers(
    model: nn.Module,
    forward: Forward,
    prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    eos: int | None = None,
) -> list[Tensor]:
    """The map of eq. app_wasser at each prompt: its own diagonal Fisher, flat, by enumeration.

    Exact. Raises as :func:`exact_fisher`.
    """
    return [
        exact_fisher(model, forward, [x], response_length, parameters, vocabulary, eos).diagonal()
        for x in prompts
    ]


def lipschitz_constant(
    prompts: Sequence[Tensor], images: Sequence[Tensor], metric: Metric
) -> float:
    """The smallest L with ``||f(x) - f(y)|| <= L d(x, y)`` on a finite set of prompts, all pairs.

    The norm is the operator norm of a diagonal matrix, i.e. its largest entry. For L_g of the paper
    ``prompts`` is the whole space that both distributions live on, not only what was drawn.

    Raises:
        InputError: two different prompts at distance 0 (then no L exists).
    """
    steepest = 0.0
    for i, (a, f_a) in enumerate(zip(prompts, images, strict=True)):
        for b, f_b in zip(prompts[:i], images[:i], strict=True):
            if torch.equal(a, b):
                continue
            # d(x, y) and ||f(x) - f(y)||
            distance, gap = metric(a, b), float((f_a - f_b).abs().max())
            if distance <= 0.0:
                raise InputError(
                    "the metric does not separate two different prompts",
                    got=f"{a.tolist()} and {b.tolist()} at distance {distance}",
                    why="no Lipschitz constant exists",
                )
            # L = max ||f(x) - f(y)|| / d(x, y)
            steepest = max(steepest, gap / distance)
    return steepest


def transfer_bound(
    model: nn.Module,
    forward: Forward,
    retention_prompts: Sequence[Tensor],
    reference_prompts: Sequence[Tensor],
    response_length: int,
    parameters: Mapping[str, Tensor],
    vocabulary: int,
    metric: Metric,
    *,
    lipschitz: float,
    eos: int | None = None,
) -> TransferBound:
    """Both sides of ``||F_dagger - F_ref|| <= L_g W_2`` (eq. app_wasser).

    F_dagger is the diagonal Fisher of the retention prompts, F_ref that of the reference prompts,
    each by enumeration of all responses; W_1 and W_2 are exact. ``lipschitz`` is L_g of the
    per-prompt Fisher on the *space of prompts*, from a closed form or from
    :func:`lipschitz_constant`. A constant of the drawn prompts alone would say nothing: with it the
    inequality holds for any two lists and any map.

    Raises:
        InputError: as :func:`exact_fisher`.
    """
    # eq. app_F_ret_dagger and eq. mc_fisher, by enumeration
    f_retention, f_reference = (
        exact_fisher(
            model, forward, prompts, response_length, parameters, vocabulary, eos
        ).diagonal()
        for prompts in (retention_prompts, reference_prompts)
    )
    return TransferBound(
        transfer=float((f_retention - f_reference).abs().max()),
        largest=float(torch.cat([f_retention, f_reference]).max()),
        lipschitz=lipschitz,
        wasserstein_1=wasserstein(retention_prompts, reference_prompts, metric, 1),
        wasserstein_2=wasserstein(retention_prompts, reference_prompts, metric, 2),
    )
