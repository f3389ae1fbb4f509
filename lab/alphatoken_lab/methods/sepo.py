"""SePO: learn on the tokens that a small aligned model has moved most, up or down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage
from alphatoken_lab.methods.preference import PreferencePolicy
from alphatoken_lab.methods.static import model_losses
from alphatoken_lab.methods.static_mask import second_model
from alphatoken_lab.methods.token_table import TableHeader, TokenTable

_ORACLE, _REFERENCE = "oracle_losses", "reference_losses"


def without_first(mask: Bool[Tensor, "b t"]) -> Bool[Tensor, "b t"]:
    """The response without the first token of each row."""
    return mask & (mask.cumsum(-1) > 1)


class SePO(PreferencePolicy):
    """Selective preference optimisation: a small oracle chooses tokens, SimPO learns on them.

        r_t = log pi_oracle(y_t) - log pi_ref(y_t)
        chosen: the floor(k T) tokens with the largest r;  rejected: with the smallest
        L = -log sigma(beta (mean log p of the kept chosen - mean log p of the kept rejected))

    ``pi_oracle`` is ``pi_ref`` after DPO on a part of the pairs; both share the tokenizer of the
    trained model. Scores are computed once, before training. The published code has no factor in
    the loss: beta 1, no margin. ``loss="dpo"`` puts the mask on the log-ratios of the trained
    model and its own reference (our reading; beta 0.1).

    Args:
        settings: see ``PolicySettings``.
        oracle: the aligned model; it must be given. [null, or a folder or hub name; always; the
            paper trains one by DPO]
        reference: path of the model that it was aligned from; None for the trained model as it is
            before training. [null, or a folder or hub name; where the oracle is no offspring of the
            trained model; the paper's]
        k: the published budget, in (0, 1]. [above 0, to 1; raise it to train on more; the paper's
            0.3]
        skip_first: leave the first token of each response out, and out of T, as the code does.
            [true or false; true to follow the code; the code; the paper has none]
        dtype: dtype of the models that are loaded from paths. ["float32", "bfloat16" or "float16";
            where memory is short; ours]
        **base: see ``PreferencePolicy``.

    Raises:
        ConfigError: k outside (0, 1], or no oracle when the static pass begins.

    Source: Yang et al., EMNLP 2025; code SteveKGYang/SePO@d27092e, ``token_score.py``.
    """

    name: ClassVar[str] = "sepo"
    published_loss: ClassVar[str] = "simpo"
    losses: ClassVar[Mapping[str, tuple[float, float]]] = {"simpo": (1.0, 0.0), "dpo": (0.1, 0.0)}
    needs: ClassVar[Needs] = Needs(columns=(_ORACLE, _REFERENCE))
    scope: ClassVar[str] = "sequence"
    rounding: ClassVar[str] = "floor"
    denominator: ClassVar[str] = "kept"
    source: ClassVar[str] = "EMNLP 2025; SteveKGYang/SePO"
    static: bool = True

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        oracle: str | nn.Module | None = None,
        reference: str | nn.Module | None = None,
        k: float = 0.3,
        skip_first: bool = False,
        dtype: str = "float32",
        **base: Any,
    ) -> None:
        super().__init__(settings, **base)
        if not 0 < k <= 1:
            raise ConfigError("k must lie in (0, 1]", got=repr(k))
        self.oracle, self.reference = oracle, reference
        self.native_ratio = k
        self.skip_first, self.dtype = skip_first, dtype

    @property
    def lacks(self) -> str | None:
        """The argument that is to name its second model; None if it needs none."""
        return "oracle" if self.oracle is None else None

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses of every response token under oracle and reference; each pass is cached.

        Raises:
            ConfigError: no oracle, or a path that holds no model with the same tokenizer.
        """
        # One model at a time in memory.
        oracle = model_losses(stage, self._oracle(stage), _ORACLE)
        reference = model_losses(stage, self._reference(stage), _REFERENCE)
        settings = {"oracle": oracle.header.digest(), "reference": reference.header.digest()}
        header = TableHeader("sepo", data=oracle.header.data, settings=settings)
        return oracle.join(reference, header)

    def _oracle(self, stage: PolicyStage) -> Any:
        return second_model(stage, self.oracle, self.name, self.dtype)

    def _reference(self, stage: PolicyStage) -> Any:
        if self.reference is None:
            return stage.model
        return second_model(stage, self.reference, self.name, self.dtype)

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``r`` on chosen rows and ``-r`` on rejected ones."""
        r = batch.columns[_REFERENCE] - batch.columns[_ORACLE]
        chosen, rejected = r.chunk(2)
        return torch.cat([chosen, -rejected])

    def best(self, batch: PolicyBatch, ratio: float) -> Tensor:
        """Mask of the base; with ``skip_first`` without the first token of each row."""
        if self.skip_first:
            batch = replace(batch, mask=without_first(batch.mask))
        return super().best(batch, ratio)
