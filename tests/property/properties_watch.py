"""Claims about what a training run collects of Value-Propagation's pairs: numbers, and counts."""

from __future__ import annotations

import numpy as np
import torch

from alphatoken.fidelity import collected_pairs, pairs
from alphatoken.model.batch import to_label_position
from alphatoken.model.partial_forward import hidden_of
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import jacobian
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.test_fidelity_value_propagation import (
    MODEL,
    batch_of,
    rows_of,
    spec_of,
    subject_of,
)
from tests.property.tolerance import close


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights in (1e-10, 1], some of them 0, and deviations over twelve powers of ten."""
    generator = np.random.default_rng(seed)
    alpha = 10.0 ** generator.uniform(-10, 0, (count, 2))
    alpha[generator.random((count, 2)) < 0.1] = 0.0
    return alpha, 10.0 ** generator.uniform(-6, 6, (count, 2))


def cell(value: float, edges: np.ndarray) -> int:
    """The cell of one number, by looking through all of them."""
    power = np.log10(value)
    inside = [i for i in range(len(edges) - 1) if edges[i] <= power < edges[i + 1]]
    return inside[0] if inside else (0 if power < edges[0] else len(edges) - 2)


def check_weights_and_deviations_of_pairs(
    config: DecoderConfig, seed: int, window: int | None
) -> None:
    """What a callback collects are alpha_{t->k} and ||v_t - o_k||_2 / sqrt(d_v) of each pair.

    Of the pairs t < k <= t + W of response tokens, each once, in a forward without a graph.
    """
    model = ReferenceDecoder(config, seed)
    subject = subject_of(model, rows_of(config, [6, 4]))
    batch = batch_of(subject, subject.train)
    used = to_label_position(batch.mask)
    read: list[torch.Tensor] = []
    hooks = [
        block.attention.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(hidden_of(args, kwargs)), with_kwargs=True
        )
        for block in model.layers
    ]
    seen_calls = pairs.see_calls(find_adapter(model), [0, 1], batch)
    for hook in hooks:
        hook.remove()
    assert [seen.layer for seen in seen_calls] == [0, 1]
    for seen, hidden in zip(seen_calls, read, strict=True):
        assert not seen.output.requires_grad
        alpha, deviation = pairs.weigh_pairs(seen, used, used, window)
        wanted = []
        for row, length in enumerate((6, 4)):
            state = jacobian.attend(spec_of(model, seen.layer, length), hidden[row, :length])
            last = length - 2  # predicts the last token
            value = state.value.repeat_interleave(len(state.alpha) // len(state.value), 0)
            for k in range(last + 1):
                for t in range(k):
                    near = window is None or k <= t + window
                    if near and float(state.alpha[:, k, t].sum()) > 0:
                        away = (value[:, t] - state.output[:, k]).norm(dim=-1)
                        wanted.append((state.alpha[:, k, t], away / value.shape[-1] ** 0.5))
        assert len(alpha) == len(wanted)
        for name, found, column in (("alpha", alpha, 0), ("deviation", deviation, 1)):
            expected = torch.stack([one[column] for one in wanted]) if wanted else None
            if expected is not None:
                # Rows by (batch row, k, t) there, by block of queries here: both sorted alike.
                order = (np.lexsort(one.T[::-1]) for one in (found, expected.numpy()))
                mine, theirs = (
                    torch.as_tensor(x)[torch.as_tensor(i)]
                    for x, i in zip((found, expected), order, strict=True)
                )
                close(mine, theirs, theirs.max() + 1.0, MODEL, name=name)


def check_counts_of_pairs(seed: int, count: int) -> None:
    """Every pair is counted in the one cell of its weight and deviation, and of their product.

    Those that a mask hides are counted in none; beyond the ends, in the cell at the end.
    """
    alpha, deviation = drawn(seed, count)
    found = collected_pairs.PairCounts.of(alpha, deviation)
    joint, risk = np.zeros_like(found.joint), np.zeros_like(found.risk)
    for a, d in zip(alpha.ravel(), deviation.ravel(), strict=True):
        if a > 0:
            joint[cell(a, collected_pairs.ALPHA), cell(d, collected_pairs.DEVIATION)] += 1
            risk[cell(a * d, collected_pairs.RISK)] += 1
    np.testing.assert_array_equal(found.joint, joint)
    np.testing.assert_array_equal(found.risk, risk)
    assert found.pairs == int((alpha > 0).sum())


def check_shares_above_powers_of_ten(seed: int, level: float) -> None:
    """The share of pairs with weight times deviation at or above a power of ten is exact."""
    alpha, deviation = drawn(seed, 50)
    alpha[0], deviation[0] = 0.5, 2.0 * level * 1.001  # in the first cell that counts
    risk = (alpha * deviation)[alpha > 0]
    found = collected_pairs.PairCounts.of(alpha, deviation).share_above(level)
    assert found == (risk >= level).mean()
