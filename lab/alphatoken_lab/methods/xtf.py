"""XTF: three filters of the base model drop tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import ConfigError, InputError, ModelError, require_choice
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import token_losses
from alphatoken.model.protocol import (
    AttentionCall,
    NativeAttention,
    attention_overridden,
    find_adapter,
)
from alphatoken.model.scope import resolve_layers
from alphatoken.train.policy import PolicySettings, PolicyStage
from alphatoken_lab.methods.static import keep_best, measure_losses, static_pass
from alphatoken_lab.methods.static_mask import StaticMask
from alphatoken_lab.methods.token_table import TokenTable

FILTERS = ("ri", "kn", "tr")
DISTANCES = ("euclidean", "cosine")
_ROWS = 1 << 14  # of the embedding matrix at a time

Array = NDArray[Any]

HEADS = ("mean", "max")
QUERIES = ("mean", "sum")


class XTF(StaticMask):
    """Drop tokens that matter little to reasoning, that are known, or that are off the task.

        RI   A_t < Q1 - c (Q3 - Q1)          A_t attention received; quartiles over the sample
        KN   1 - p_t < 0.05                  the base model knows it already
        TR   S_t in the second lowest Otsu class of S = 1 - Normalize(D(E(y_t), V))

    A token is kept if no filter drops it. All from the base model, before training. What the source
    leaves open is an argument; the defaults are our reading.

    In the mode "budget" the mask is brought to the budget by chance: tokens are dropped from the
    kept ones, or restored from the dropped ones, uniformly with ``settings.seed``. That is not of
    the paper, which has no score to rank by.

    Args:
        settings: mode, budget, scope, rounding, seed.
        filters: those that act. [any of "ri", "kn", "tr"; take one out to see what it does; the
            paper's three]
        layers: layers of A: K for the last K, "all", or indices. ["all", K, or indices; fewer to
            save time; ours; the paper does not say]
        heads: reduction of A's heads, "mean" or "max". ["mean" or "max"; only to compare readings;
            ours; the paper does not say]
        queries: reduction of A's queries, "mean" over later queries or their "sum". ["mean" or
            "sum"; only to compare readings; ours; the paper does not say]
        iqr_factor: c; 1.0 is published (not the usual 1.5). [any number; raise it to drop less; the
            paper's 1]
        known_below: threshold of KN, on 1 - p. [0 to 1; lower it to keep more mastered tokens; the
            paper's 0.05]
        distance: D, "euclidean" or "cosine". ["euclidean" or "cosine"; only to compare readings;
            ours; the paper does not say]
        classes: number of Otsu's classes. [from 2; with another number of clusters; ours; the
            library's default]
        bins: number of bins of Otsu's histogram. [from 2; only with many classes; ours; the
            library's default]
        cluster: class that is dropped, from 0, the lowest. [from 0, below classes; where the lowest
            cluster is not white space; the paper's second lowest]
        otsu_scope: "dataset", or "sequence": thresholds of each document. ["dataset" or "sequence";
            "sequence" where documents differ in kind; ours; the paper does not say]
        expert_words: V is the mean embedding of these words (each the mean of its tokens); None
            takes all response tokens of the data set. [null, or words; where the words of the
            domain are known; the paper has curated words]
        floor: least share of tokens that the published rule may leave; below it tokens are restored
            by chance, and the summary says how many. 0 switches it off. [0 to 1; 0 for the
            published rule to the letter; ours]

    Attributes:
        summary: also ``dropped_ri``, ``dropped_kn``, ``dropped_tr`` (shares, each filter by
            itself) and ``restored``.

    Raises:
        ConfigError: an argument out of range.

    Source: arXiv 2602.14536 (equations; no code is public).
    """

    name: ClassVar[str] = "xtf"
    source: ClassVar[str] = "arXiv 2602.14536"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        filters: Sequence[str] = FILTERS,
        layers: int | str | Sequence[int] = "all",
        heads: str = "mean",
        queries: str = "mean",
        iqr_factor: float = 1.0,
        known_below: float = 0.05,
        distance: str = "euclidean",
        classes: int = 3,
        bins: int = 256,
        cluster: int = 1,
        otsu_scope: str = "dataset",
        expert_words: Sequence[str] | None = None,
        floor: float = 0.05,
    ) -> None:
        super().__init__(settings)
        for name, value, allowed in (
            *(("filters", one, FILTERS) for one in filters),
            ("heads", heads, HEADS),
            ("queries", queries, QUERIES),
            ("distance", distance, DISTANCES),
            ("otsu_scope", otsu_scope, ("dataset", "sequence")),
        ):
            require_choice(f"{name} of XTF", value, allowed)
        tests = {
            "some filter acts": bool(filters),
            "iqr_factor is a finite number": math.isfinite(iqr_factor),
            "known_below lies in [0, 1]": 0 <= known_below <= 1,
            "classes lie in 2 .. bins": 2 <= classes <= bins,
            "cluster is one of the classes": 0 <= cluster < classes,
            "floor lies in [0, 1]": 0 <= floor <= 1,
            "expert_words are words": expert_words is None or bool(expert_words),
        }
        for what, ok in tests.items():
            if not ok:
                raise ConfigError(
                    f"XTF: {what}", remedy="`alphatoken-lab policies xtf` lists the arguments"
                )
        self.filters = tuple(filters)
        self.attention: dict[str, Any] = {"layers": layers, "heads": heads, "queries": queries}
        self.iqr_factor, self.known_below, self.floor = iqr_factor, known_below, floor
        self.distance, self.expert_words = distance, expert_words
        self.classes, self.bins, self.cluster = classes, bins, cluster
        self.otsu_scope = otsu_scope

    # --- the pass ---------------------------------------------------------------------------------

    def measured(self, stage: PolicyStage) -> TokenTable:
        """Columns ``loss``, ``token``; ``attention`` and ``relevance`` where their filters act."""
        columns = ["loss", "token"]
        settings: dict[str, Any] = {}
        if "ri" in self.filters:
            columns.append("attention")
            settings = dict(self.attention)
        table = static_pass(stage, stage.model, columns, self._measure, "xtf", settings=settings)
        if "tr" not in self.filters:
            return table
        centre = None
        if self.expert_words is not None:
            centre = _centre_of_words(self.expert_words, _embeddings(stage.model), stage.tokenizer)
        relevance = task_relevance(
            _embeddings(stage.model), table.columns["token"], centre, self.distance
        )
        return table.with_columns(relevance=relevance)

    def _measure(
        self, model: Any, inputs: Mapping[str, Tensor], labels: Tensor
    ) -> dict[str, Tensor]:
        if "ri" not in self.filters:
            return {**measure_losses(model, inputs, labels), "token": labels}
        logits, received = received_attention(model, inputs, **self.attention)
        return {"loss": token_losses(logits, labels), "token": labels, "attention": received}

    # --- the rule ---------------------------------------------------------------------------------

    def dropped(self, table: TokenTable) -> dict[str, Array]:
        """(N,) by filter: True where that filter drops the token."""
        drops: dict[str, Array] = {}
        if "ri" in self.filters:
            drops["ri"] = low_outliers(table, table.columns["attention"], self.iqr_factor)
        if "kn" in self.filters:
            # 1 - p, exact also where p is next to 1
            drops["kn"] = np.asarray(-np.expm1(-table.columns["loss"]) < self.known_below)
        if "tr" in self.filters:
            drops["tr"] = self._cluster(table)
        return drops

    def _cluster(self, table: TokenTable) -> Array:
        values = table.columns["relevance"]
        bounds = table.starts if self.otsu_scope == "sequence" else np.asarray([0, table.tokens])
        drop = np.zeros(table.tokens, bool)
        for a, b in pairwise(bounds):
            thresholds = multi_otsu(values[a:b], self.classes, self.bins)
            if thresholds is not None:
                drop[a:b] = np.searchsorted(thresholds, values[a:b], side="right") == self.cluster
        return drop

    def _filtered(self, table: TokenTable) -> Array:
        """(N,) True where no filter drops the token; the shares go to ``summary``."""
        drops = self.dropped(table)
        self._summary |= {f"dropped_{name}": float(d.mean()) for name, d in drops.items()}
        return np.asarray(~np.logical_or.reduce(list(drops.values())))

    def static_scores(self, table: TokenTable) -> Array:
        """1 where the filters keep the token, plus a uniform number below 1: chance within."""
        chance = np.random.default_rng(self.settings.seed).random(table.tokens)
        return self._filtered(table) + chance

    def native_keep(self, table: TokenTable) -> Array:
        """Tokens that the filters keep; if fewer than ``floor``, some of the rest too."""
        keep = self._filtered(table)
        least = math.ceil(self.floor * table.tokens)
        before = int(keep.sum())
        if before < least:
            keep = keep_best(table, self.static_scores(table), self.floor)
        self._summary["restored"] = float(int(keep.sum()) - before)
        return keep


def low_outliers(table: TokenTable, values: Array, factor: float) -> Array:
    """(N,) True below Q1 - factor (Q3 - Q1), quartiles (linear) over each document's tokens."""
    outliers = np.zeros(table.tokens, bool)
    for a, b in pairwise(table.starts):
        low, high = np.quantile(values[a:b].astype(np.float64), (0.25, 0.75))
        outliers[a:b] = values[a:b] < low - factor * (high - low)
    return outliers


# --- task relevance -------------------------------------------------------------------------------


def _embeddings(model: Any) -> Tensor:
    layer = model.get_input_embeddings()
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        raise ModelError(
            "the model has no input embedding matrix",
            got=type(layer).__qualname__,
            remedy="leave the filter 'tr' out",
        )
    return weight.detach()


@torch.no_grad()
def task_relevance(
    embeddings: Tensor, tokens: Array, centre: Tensor | None = None, distance: str = "euclidean"
) -> Array:
    """(N,) in [0, 1]: S = 1 - Normalize(D(E(y_t), V)), min-max over the tokens of the data set.

    Args:
        embeddings: (vocabulary, width).
        tokens: (N,) ids.
        centre: V (width,); None for the mean embedding of ``tokens``.
        distance: "euclidean" or "cosine" (1 - cosine).

    Returns:
        float64; all 1 where every distance is the same.
    """
    counts = np.bincount(tokens, minlength=len(embeddings))
    if centre is None:
        weights = torch.from_numpy(counts).to(embeddings.device, torch.float64)
        centre = sum(
            weights[i : i + _ROWS] @ embeddings[i : i + _ROWS].double()
            for i in range(0, len(embeddings), _ROWS)
        ) / len(tokens)  # type: ignore[assignment]
    assert isinstance(centre, Tensor)
    parts = []
    for start in range(0, len(embeddings), _ROWS):
        rows = embeddings[start : start + _ROWS].double()
        if distance == "cosine":
            parts.append(1 - torch.cosine_similarity(rows, centre[None], dim=-1))
        else:
            parts.append((rows - centre).norm(dim=-1))
    by_token = torch.cat(parts).cpu().numpy()
    used = by_token[counts > 0]
    spread = float(used.max() - used.min())
    normal = (by_token - used.min()) / spread if spread > 0 else np.zeros_like(by_token)
    return np.asarray(1 - normal[tokens])


def _centre_of_words(words: Sequence[str], embeddings: Tensor, tokenizer: Any) -> Tensor:
    """V: mean over the words of the mean embedding of each word's tokens."""
    if tokenizer is None:
        raise ConfigError("expert_words need the tokenizer", got="a stage without one")
    ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    if not all(ids):
        empty = words[[bool(i) for i in ids].index(False)]
        raise ConfigError("an expert word has no token", got=repr(empty))
    means = [embeddings[torch.as_tensor(i)].double().mean(0) for i in ids]
    return torch.stack(means).mean(0)


# --- Otsu's classes -------------------------------------------------------------------------------


def multi_otsu(values: Array, classes: int = 3, bins: int = 256) -> Array | None:
    """Thresholds between ``classes`` classes of ``values``; exact over the histogram.

        max over partitions of  sum over classes  (sum m_i c_i)^2 / sum m_i

    with bins of mass ``m_i`` and centre ``c_i``, classes being runs of bins: the variance between
    the classes up to constants.

    Args:
        values: (n,) finite numbers.
        classes: at least 2.
        bins: of equal width, from the smallest to the largest value.

    Returns:
        (classes - 1,) ascending: the class of a value is the number of thresholds at or below it
        (``np.searchsorted(thresholds, values, side="right")``). Among equal partitions the one
        with the lowest thresholds. None where fewer than ``classes`` bins are filled.

    Raises:
        InputError: fewer than two classes, or more classes than bins.

    Cost: O(classes bins^2). Source: Otsu 1979; Liao et al. 2001. scikit-image's
    ``threshold_multiotsu`` maximises the same over the same histogram and returns bin centres,
    which cuts the boundary bin in two; here a bin stays whole. Oracle: all
    partitions, in the tests.
    """
    if not 2 <= classes <= bins:
        raise InputError(
            "multi-Otsu needs at least 2 classes, and as many bins",
            got=f"{classes} classes, {bins} bins",
        )
    mass, edges = np.histogram(values, bins=bins)
    if np.count_nonzero(mass) < classes:
        return None
    weight = np.concatenate([[0.0], np.cumsum(mass)])
    moment = np.concatenate([[0.0], np.cumsum(mass * (edges[:-1] + edges[1:]) / 2)])
    # gain[i, j]: of one class over bins i .. j - 1; impossible where it holds nothing.
    inside = weight[None, :] - weight[:, None]
    gain = np.full((bins + 1, bins + 1), -np.inf)
    np.divide((moment[None, :] - moment[:, None]) ** 2, inside, out=gain, where=inside > 0)
    best, cuts = gain[0], []
    for _ in range(classes - 1):
        total = best[:, None] + gain
        cuts.append(total.argmax(0))
        best = total.max(0)
    ends = [bins]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return np.asarray(edges[sorted(ends[1:])])


# --- attention that a token receives --------------------------------------------------------------


def received_attention(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    layers: int | str | Sequence[int] = "all",
    heads: str = "mean",
    queries: str = "mean",
) -> tuple[Float[Tensor, "b t vocabulary"], Float[Tensor, "b t"]]:
    """Logits of one forward, and the attention that each token receives in it.

        A_t = mean over layers, heads and real queries q >= t of alpha_{q,t}

    without a T x T matrix.

    Args:
        model: a decoder whose attention is on transformers' interface.
        inputs: of the forward; padding is read from ``attention_mask``.
        layers: K for the last K, "all", or indices.
        heads: "mean" or "max" over the query heads.
        queries: "mean" over the real queries at or after t, or their "sum" (then early tokens
            receive more because more queries see them).

    Raises:
        ConfigError: other options, or no softmax attention in these layers.
    """
    require_choice("heads", heads, HEADS)
    require_choice("queries", queries, QUERIES)
    adapter = find_adapter(model)
    chosen = resolve_layers(adapter, layers)
    modules = [module for layer in chosen for module in adapter.attention_modules(layer)]
    if not modules:
        raise ConfigError(
            "none of the layers has softmax attention",
            got=f"layers {list(chosen)}",
            why="there are no attention scores to read",
            remedy="choose other layers, or leave the filter 'ri' out",
        )
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
    by_call: list[Tensor] = []

    def attend(call: AttentionCall, native: NativeAttention) -> Tensor:
        by_call.append(_received(call, real, heads, queries))
        return native(call.query, call.key, call.value)

    with attention_overridden(adapter, modules, attend):
        logits = adapter.forward(inputs)
    return logits, sum(by_call[1:], by_call[0]) / len(by_call)


def _received(call: AttentionCall, real: Tensor, heads: str, queries: str) -> Float[Tensor, "b t"]:
    """Attention that each token receives in one call, over the real queries."""
    statistics = AttentionStatistics(call)
    batch, length = call.query.shape[0], call.query.shape[2]
    received = torch.zeros(batch, length, dtype=statistics.dtype, device=call.query.device)
    real = real.to(received)
    for block in statistics.row_blocks():
        alpha = statistics.softmax(block)[0].flatten(1, 2)  # (b, h, k, t)
        by_query = alpha.mean(1) if heads == "mean" else alpha.amax(1)
        received[:, block.columns] += torch.einsum("bk,bkt->bt", real[:, block.rows], by_query)
    if queries == "sum":
        return received
    later = real.flip(1).cumsum(1).flip(1)  # real queries at or after t
    return received / later.clamp(min=1)
