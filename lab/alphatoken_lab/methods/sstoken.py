"""ssToken: learn on tokens that training has improved and that attend to the prompt."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import LabelledBatch
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken_lab.methods.static import model_losses
from alphatoken_lab.methods.token_table import TokenTable

_COLUMN = "initial_losses"
_EPSILON = 1e-8


@torch.no_grad()
def prompt_attention(
    attention: AttentionStatistics, prompt: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Share of each token's attention that goes to prompt tokens before it, mean over heads.

        Attn_t = (1/H) sum_h sum_{j in prompt, j <= t} A^h_tj

    Args:
        attention: of one layer; never a T x T matrix as a whole.
        prompt: True at prompt tokens of the same documents.
    """
    parts = []
    for block in attention.row_blocks():
        alpha, _ = attention.softmax(block)
        chosen = prompt[:, None, None, None, block.columns].to(alpha.dtype)
        parts.append((alpha * chosen).sum(-1).mean((1, 2)))
    return torch.cat(parts, -1)


def scaled_by_row(scores: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """``(s - min) / (max - min + 1e-8)`` over the response tokens of each row; 0 elsewhere."""
    low = scores.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    high = scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    return torch.where(mask, (scores - low) / (high - low + _EPSILON), torch.zeros_like(scores))


class SsToken(TokenPolicy):
    """Self-modulated and semantic-aware selection.

        REL_t = l_t(theta_0) - l_t(theta) = log p_theta / p_0 (y_t)
        Attn_t = (1/H) sum_h sum_{j in prompt} A^h_tj        (last layer, row of token t itself)
        s_t = gamma minmax(REL_t) + (1 - gamma) Attn_t
        keep the ceil(rho T) tokens of each sample with the largest s;  L = mean of l over them

    minmax is over the response tokens of the sample. theta_0 is the model before training; its
    losses are computed once, in evaluation mode. The attention is the training forward's own.
    The sign of REL is as published, opposite to Rho-1's: what has improved is kept.

    Prompt tokens are all tokens of the document that are no response tokens and stand before t, so
    that with several turns the later prompts count too (the code takes the first ones).

    Args:
        settings: see ``PolicySettings``.
        gamma: weight of REL, in [0, 1]. [0 to 1; raise it to trust the loss more than attention;
            the paper's 0.5]
        ratio: rho, the published budget. [above 0, to 1; raise it for clean rows; the paper's 0.6]
        attention_only_steps: optimizer steps at the start with gamma = 0. The code does so for the
            first 10,000 samples, and the paper does not say so; 0 by default. [from 0; to follow
            the code; the code; the paper has none]

    Raises:
        ConfigError: gamma outside [0, 1], ratio outside (0, 1], steps below 0.

    Source: arXiv 2510.18250; jianke0604/ssToken@2a0c57d.
    """

    name: ClassVar[str] = "sstoken"
    needs: ClassVar[Needs] = Needs(columns=(_COLUMN,), attention=True)
    scope: ClassVar[str] = "sequence"
    rounding: ClassVar[str] = "ceil"
    denominator: ClassVar[str] = "kept"
    source: ClassVar[str] = "arXiv 2510.18250; jianke0604/ssToken"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        gamma: float = 0.5,
        ratio: float = 0.6,
        attention_only_steps: int = 0,
    ) -> None:
        super().__init__(settings)
        if not 0 <= gamma <= 1:
            raise ConfigError("gamma must lie in [0, 1]", got=repr(gamma))
        if not 0 < ratio <= 1:
            raise ConfigError("ratio must lie in (0, 1]", got=repr(ratio))
        if attention_only_steps < 0:
            raise ConfigError(
                "attention_only_steps must be at least 0", got=repr(attention_only_steps)
            )
        self.gamma, self.native_ratio = gamma, ratio
        self.attention_only_steps = attention_only_steps

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses of all response tokens under the initial model."""
        return model_losses(stage, stage.model, _COLUMN)

    def scores(self, batch: PolicyBatch) -> Tensor:
        """Scores ``s_t`` of the paper."""
        gamma = 0.0 if batch.step < self.attention_only_steps else self.gamma
        scores = torch.zeros_like(batch.log_probs)
        if gamma:
            improved = batch.columns[_COLUMN].to(scores) + batch.log_probs
            scores = gamma * scaled_by_row(improved, batch.mask)
        if gamma < 1:
            assert batch.attention is not None
            attention = prompt_attention(batch.attention, prompt_tokens(batch))
            scores = scores + (1 - gamma) * attention.to(scores)
        return scores


def prompt_tokens(batch: PolicyBatch) -> Bool[Tensor, "b t"]:
    """Real tokens that are no response; the first token of a document is one of them.

    Documents of a packed row need no mark: no token attends to another document.
    """
    inputs = {k: v for k, v in batch.inputs.items() if k in ("attention_mask", "position_ids")}
    real = torch.ones_like(batch.mask)
    attention = LabelledBatch(inputs, batch.labels, batch.mask).inputs.get("attention_mask")
    if isinstance(attention, Tensor) and attention.dim() == 2:
        real = attention != 0
    return real & ~batch.mask
