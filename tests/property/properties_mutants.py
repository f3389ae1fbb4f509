"""Claims that the other property files leave to a test of many samples, in an exact form."""

from __future__ import annotations

import torch
from torch import Tensor

from alphatoken.direction import fisher, sampling
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.tolerance import close


def check_token_fisher_squares_labels_of_the_model(
    config: DecoderConfig, seed: int, samples: int
) -> None:
    """labels="token": labels drawn from p(. | given prefix), never the given ones; their summed
    gradient is squared, sample by sample, and averaged."""
    model = ReferenceDecoder(config, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocabulary, (2, 5), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    found = fisher.fit_fisher(
        model, {"input_ids": ids, "labels": labels}, samples=samples, layers="all",
        labels="token", seed=seed,
    )  # fmt: skip
    named = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: named[name] for name in found.names}
    squares = {name: torch.zeros_like(w) for name, w in weights.items()}
    largest = 0.0
    for index in range(samples):
        gradient = _gradient_of_drawn_labels(model, ids[index % 2], index, seed, weights)
        for name, g in gradient.items():
            squares[name] += g.square() / samples
            largest = max(largest, float(g.abs().max()))
    for name, expected in squares.items():
        # A gradient that cancels is off by rounding of its terms, which are of order 1 here.
        scale = expected.max() + 1e-4 * largest + 1e-18
        close(found.fisher[name], expected, scale, 1e-10, name="token Fisher")


def _gradient_of_drawn_labels(
    model: ReferenceDecoder, ids: Tensor, index: int, seed: int, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    log_probs = model(ids[:-1].unsqueeze(0))[0, 1:].log_softmax(-1)
    uniform = torch.rand(
        len(log_probs), generator=sampling.sample_generator(seed, index), dtype=torch.float64
    )
    total = log_probs.new_zeros(())
    for row, u in zip(log_probs, uniform, strict=True):
        below = (row.detach().exp().cumsum(-1) <= u).sum().clamp(max=len(row) - 1)
        total = total + row[below]
    return dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))
