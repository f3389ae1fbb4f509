"""Clouds of states: what the output head reads, how evenly it is spread, and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.diagnose.statistics import Numbers
from alphatoken.diagnose.subject import gathered
from alphatoken.errors import ConfigError, InputError
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position, token_losses
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.support.progress import Tracker

_WIDEST = 50  # principal components that t-SNE is given: the usual number, and quick at any width


def require_sklearn() -> None:
    """Refuse where scikit-learn cannot be imported.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError(
            "this diagnostic needs scikit-learn", remedy="pip install 'alphatoken[diagnose]'"
        ) from None


def clusters_of(points: Numbers, clusters: int, seed: int) -> NDArray[np.int64]:
    """Number of the k-means cluster of each point (scikit-learn, 4 starts, fixed seed)."""
    require_sklearn()
    from sklearn.cluster import KMeans

    distinct = len(np.unique(points, axis=0))
    labels = KMeans(min(clusters, distinct), n_init=4, random_state=seed).fit_predict(points)
    return np.asarray(labels, dtype=np.int64)


def entropy(labels: NDArray[Any], clusters: int) -> float:
    """Entropy of the histogram over ``log clusters``: 1 even, 0 all in one; NaN if undefined."""
    if not len(labels) or clusters < 2:
        return math.nan
    counts = np.unique(labels, return_counts=True)[1]
    shares = counts / counts.sum()
    return abs(float(-(shares * np.log(shares)).sum() / math.log(clusters)))  # no minus zero


def picture_of(points: Numbers, *, seed: int) -> Numbers:
    """t-SNE of a cloud, (n, 2): scikit-learn, PCA start, fixed seed.

    The perplexity is 30, and at most a third of the other points. Distances between far groups,
    sizes of groups and their density mean nothing in such a picture; neighbourhood does.

    Raises:
        InputError: fewer than 4 points, or a number that is not finite.
    """
    if len(points) < 4 or not np.isfinite(points).all():
        raise InputError(
            "t-SNE needs at least 4 points, all of them finite",
            got=f"{len(points)} points, {int((~np.isfinite(points)).sum())} numbers not finite",
            remedy="give more rows, or look at the model's states",
        )
    require_sklearn()
    from sklearn.manifold import TSNE

    points = _comparable(points)
    if not points.any():
        return np.zeros((len(points), 2))  # all points are one
    tsne = TSNE(
        perplexity=min(30.0, (len(points) - 1) / 3),
        init=(1e-4 * points[:, :2] / points[:, 0].std()).astype(np.float32),
        random_state=seed,
        n_jobs=1,
    )
    return np.asarray(tsne.fit_transform(points), dtype=np.float64)


def _comparable(points: Numbers) -> Numbers:
    """The first principal components of the cloud, in units of its width: 2 to 50."""
    centred = points - points.mean(0)
    directions: Numbers = np.linalg.svd(centred, full_matrices=False)[2]
    # The largest entry of a direction is positive: pictures do not flip between machines.
    largest = np.abs(directions).argmax(1)
    directions = np.sign(directions[np.arange(len(directions)), largest])[:, None] * directions
    reduced: Numbers = centred @ directions.T[:, :_WIDEST]
    if reduced.shape[1] < 2:
        reduced = np.pad(reduced, ((0, 0), (0, 2 - reduced.shape[1])))
    width = float(reduced.std())
    return reduced / width if width > 0 else reduced


@torch.no_grad()
def states_of(adapter: DecoderAdapter, batch: LabelledBatch) -> tuple[Tensor, Tensor, bool]:
    """Run the model once, dropout off, and record what its head reads; the model is unchanged.

    The head is found as the last module outside the blocks that maps the width of the blocks to
    that of the logits: no adapter has to name it.

    Returns:
        (b, t, d) what the head reads, which is after the final norm, or the last block's output
        where no head was found; (b, t) loss of every response token, 0 elsewhere; whether it was.
    """
    blocks = adapter.layers()
    inside = {module for block in blocks for module in block.modules()}
    leaves = [m for m in adapter.model.modules() if m not in inside and not any(m.children())]
    last: list[Tensor] = []
    heads: list[tuple[Tensor, int]] = []

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Replaced, not added: a block that is used at two depths leaves twice.
        last[:] = [output if isinstance(output, Tensor) else output[0]]

    def outside(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entry = args[0] if args else None
        if isinstance(entry, Tensor) and isinstance(output, Tensor) and entry.dim() == 3:
            heads.append((entry, output.shape[-1]))

    handles = [blocks[-1].register_forward_hook(leave)]
    handles += [module.register_forward_hook(outside) for module in leaves]
    try:
        with evaluation_mode(adapter.model):
            logits = adapter.forward(batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    (hidden,) = last
    wanted = (hidden.shape[-1], logits.shape[-1])
    entries = [entry for entry, width in heads if (entry.shape[-1], width) == wanted]
    losses = token_losses(logits, batch.labels)
    return entries[-1] if entries else hidden, losses, bool(entries)


def head_states(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], tracker: Tracker, *, pooled: bool
) -> tuple[dict[str, Numbers], str]:
    """States of the tokens of these batches, or of their rows if ``pooled``.

    Of a token at the position *before* it, where the model predicts it: its contextual embedding
    as its loss sees it, which holds the prefix, not the token. Of a row the mean over its tokens;
    padding cannot reach it.

    Returns:
        ``states`` (n, d) and ``losses`` (n,) of the tokens, in (row, position) order, or summed
        over the response tokens of each row; and the place of the states in the model, in words.
    """
    adapter = find_adapter(model)
    places: set[bool] = set()

    def of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        checked = read_batch(batch, max_length=adapter.max_positions())
        states, losses, has_head = states_of(adapter, checked)
        places.add(has_head)
        if not pooled:
            at = to_label_position(checked.mask)
            return {"states": states[at], "losses": losses[checked.mask]}
        attention = checked.inputs.get("attention_mask")
        real = torch.ones_like(checked.mask) if attention is None else attention != 0
        wide = states.double().masked_fill(~real.unsqueeze(-1), 0.0)
        return {"states": wide.sum(1) / real.sum(1, keepdim=True), "losses": losses.sum(1)}

    columns = gathered(batches, tracker, of)
    if places == {True}:
        return columns, "what the output head reads (after the final norm)"
    return columns, "the output of the last decoder block (no head was found)"
