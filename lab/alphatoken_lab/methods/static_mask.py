"""Policies whose mask is fixed before training: a static pass, a rule, one column of 0 and 1.

What they share: the rule in the mode that was asked for, over the tokens that are ranked together,
and the shares that it came to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.model.loading import find_parts, load_causal_model, load_tokenizer
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken.train.reference import check_tokens
from alphatoken_lab.methods.static import keep_best, require_selection
from alphatoken_lab.methods.token_table import TokenTable

Array = NDArray[Any]


class StaticMask(TokenPolicy):
    """Base of policies that decide on all training tokens before the first step.

    A subclass measures (``measured``), scores (``static_scores``, higher = keep) and, where the
    published rule is not a budget, has a rule of its own (``native_keep``).
    """

    scope: ClassVar[str] = "dataset"
    denominator: ClassVar[str] = "kept"
    needs: ClassVar[Needs] = Needs(columns=("score", "keep"), model=True)
    static = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._summary: dict[str, float] = {}

    @property
    def summary(self) -> Mapping[str, float]:
        """Findings of ``prepare``: tokens, ``kept_share``, and the policy's other reports."""
        return self._summary

    @property
    def reads_ratio(self) -> bool:
        """True if no rule or share of its own says how many tokens are kept."""
        own_rule = type(self).native_keep is not StaticMask.native_keep
        native = self.settings.mode == "native"
        return not native or not (own_rule or self.native_ratio is not None)

    def measured(self, stage: PolicyStage) -> TokenTable:
        """Measurements of every training token by the static passes."""
        raise NotImplementedError

    def static_scores(self, table: TokenTable) -> Array:
        """(N,), higher = keep."""
        raise NotImplementedError

    def native_keep(self, table: TokenTable) -> Array:
        """(N,) True where the published rule keeps a token; its budget where that is the rule."""
        return self.best_tokens(table, self.native_ratio or self.settings.keep_ratio)

    def best_tokens(self, table: TokenTable, ratio: float) -> Array:
        """(N,) the best ``ratio`` of all tokens."""
        return keep_best(table, self.static_scores(table), ratio, self.rounding)

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Measure, decide, and keep both as columns ``score`` and ``keep``.

        Raises:
            what the pass raises; DataError where nothing is kept.
        """
        table = self.measured(stage)
        scores = self.static_scores(table)
        if self.settings.mode == "native":
            keep = require_selection(self.native_keep(table), f"the rule of {self.name}")
        else:
            keep = self.best_tokens(table, self.settings.keep_ratio)
        self._summary |= {"tokens": float(table.tokens), "kept_share": float(keep.mean())}
        return table.with_columns(score=scores, keep=keep)

    def scores(self, batch: PolicyBatch) -> Tensor:
        """The static score of each token."""
        return batch.columns["score"]

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """The mask that was fixed before training."""
        return batch.columns["keep"].to(batch.log_probs.dtype)

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """The mask that was fixed before training."""
        return self.native_weights(batch)


class TableMask(StaticMask):
    """The weights of a table that is handed over: a column ``keep``, in [0, 1] or any numbers.

    For masks that were made elsewhere, and for the rounds of self-evolving Token Cleaning.

    Args:
        table: with the column ``keep``, over the training rows.
        settings: the mode plays no part.
    """

    name: ClassVar[str] = "table-mask"
    needs: ClassVar[Needs] = Needs(columns=("keep",))

    def __init__(self, table: TokenTable, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self.table = table

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """The table as it is."""
        keep = require_selection(self.table.columns["keep"], "the table")
        self._summary |= {"tokens": float(self.table.tokens), "kept_share": float(keep.mean())}
        return self.table


def second_model(
    stage: PolicyStage, source: str | nn.Module | None, policy: str, dtype: str | None = None
) -> Any:
    """A model that a policy scores with, without gradients, on the trained model's device.

    A folder with a PEFT adapter gives its base model with the adapter merged.

    Args:
        stage: of the run.
        source: a folder, a name on the hub, or the model itself.
        policy: whose it is.
        dtype: of its weights, if it is loaded: "bfloat16" halves the memory of "float32"; None
            takes the trained model's.

    Raises:
        ConfigError: there is none, or it reads other tokens.
        ModelError: it cannot be loaded, or its tokenizer.
    """
    if source is None:
        raise ConfigError(
            f"the policy {policy} needs a reference model, and none was given",
            why="its score is a difference between two models",
            remedy="name one in policy_options (a folder or a hub name), with the same tokenizer "
            "as the model",
        )
    own = next(stage.model.parameters())
    if isinstance(source, nn.Module):
        return source.to(own.device).eval().requires_grad_(False)
    parts, wanted = find_parts(source), own.dtype if dtype is None else dtype
    model: Any = load_causal_model(
        parts.model, adapter=parts.adapter, device=own.device, dtype=wanted
    )
    if stage.tokenizer is not None:
        rows = model.get_input_embeddings().weight.shape[0]
        check_tokens(stage.tokenizer, rows, load_tokenizer(parts.tokenizer))
    merged: nn.Module = model if parts.adapter is None else model.merge_and_unload()
    return merged.eval().requires_grad_(False)
