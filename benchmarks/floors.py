"""What the arithmetic alone asks for: FLOPs of steps and of scoring, from a shape.

FLOPs are counted as ``torch.utils.flop_counter`` counts them: two a multiply-add of a matrix
product, attention as if it were not causal, elementwise work not at all. Letters: N tokens of the
batch, T of one row, P weights of one decoder layer's linears, V x d the head, R positions that
need the head: all N, or with ``with_responses`` those that predict a response token.

    forward                     L (2 N P + A) + 2 R V d            A = 4 h T^2 d_h a row
    backward, all weights       L (4 N P + 5/2 A) + 4 R V d
    backward to K layers' errors    2 R V d + K (2 N P + 5/2 A) - (q, k, v of the lowest one)
    one contraction a linear    K 2 N P
    label, one dual forward     forward + K (4 N P + 2 A) + 2 R V d - (q, k, v of the lowest one)
    label, all parameters       forward + L (4 N P + 2 A) + 4 R V d

A tied head is counted as any other: its product with the hidden states and the gradient of both
are the same, and looking up or adding to rows of the embedding is no product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder and a batch for it."""

    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    depth: int
    vocabulary: int
    rows: int
    length: int
    responses: int | None = None

    @classmethod
    def of(cls, model: Any, rows: int, length: int) -> Shape:
        """The shape of a transformers model."""
        config = model.config
        heads = config.num_attention_heads
        return cls(
            width=config.hidden_size,
            ffn=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            depth=config.num_hidden_layers,
            vocabulary=config.vocab_size,
            rows=rows,
            length=length,
        )

    def with_responses(self, count: int) -> Shape:
        """The same with a head that is formed where a response token is predicted, and only there.

        Args:
            count: of the batch's positions that predict one.
        """
        return replace(self, responses=count)

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """N."""
        return self.rows * self.length

    @property
    def qkv(self) -> list[tuple[int, int]]:
        """(in, out) of the query, key and value projections."""
        out = (self.heads, self.kv_heads, self.kv_heads)
        return [(self.width, count * self.head_dim) for count in out]

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of one layer's linears."""
        attention = [*self.qkv, (self.heads * self.head_dim, self.width)]
        return [*attention, *2 * [(self.width, self.ffn)], (self.ffn, self.width)]

    @property
    def block(self) -> int:
        """P."""
        return _weights(self.linears)

    # --- FLOPs -----------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """One product with the head, at the positions that need it."""
        count = self.tokens if self.responses is None else self.responses
        return 2 * count * self.vocabulary * self.width

    @property
    def attention(self) -> int:
        """Forward of one attention call: two products."""
        return 4 * self.rows * self.heads * self.length**2 * self.head_dim

    @property
    def attention_backward(self) -> int:
        """Backward of one: five products, the scores computed anew among them."""
        return 5 * self.attention // 2

    @property
    def forward(self) -> int:
        """Of the whole model."""
        return self.depth * (2 * self.tokens * self.block + self.attention) + self.head

    def backward(self, layers: int | None = None, *, embeddings: bool = True) -> int:
        """With the weight gradients of the last ``layers`` layers (all) and, of all, the head.

        Args:
            layers: None for all of them and the head.
            embeddings: the error runs on below the lowest of these layers.
        """
        count = self.depth if layers is None else layers
        errors = self.partial_backward(count)
        weights = 2 * self.tokens * count * self.block + (self.head if layers is None else 0)
        below = 2 * self.tokens * _weights(self.qkv) if embeddings else 0
        return errors + weights + below

    @property
    def step(self) -> int:
        """Forward and backward of a training step; no optimizer."""
        return self.forward + self.backward()

    @property
    def recomputing_step(self) -> int:
        """The same where the head's logits are not kept and its backward forms them again."""
        return self.step + self.head

    def partial_backward(self, layers: int, *, head: bool = True) -> int:
        """Errors at the outputs of all linears of the last ``layers`` layers, no weight gradient.

        Args:
            layers: K.
            head: False where the errors below the head are at hand.
        """
        products = 2 * self.tokens * (layers * self.block - _weights(self.qkv))
        return products + layers * self.attention_backward + (self.head if head else 0)

    def contraction(self, layers: int) -> int:
        """One product ``x M^T`` for each linear of ``layers`` layers."""
        return 2 * self.tokens * layers * self.block

    def dots(self, layers: int) -> int:
        """The dot products with the errors that follow it, ``sum_o delta_o (x M^T)_o``."""
        return 2 * self.tokens * layers * sum(out for _, out in self.linears)

    def dual_forward(self, layers: int) -> int:
        """Forward with tangents from the last ``layers`` layers' weights on."""
        tangents = layers * (4 * self.tokens * self.block + 2 * self.attention) + self.head
        # The lowest layer's input has no tangent: of q, k and v only x times dW is left.
        return self.forward + tangents - 2 * self.tokens * _weights(self.qkv)

    @property
    def dual_forward_all(self) -> int:
        """Forward with tangents of all parameters: of the lowest layer's input and the head too."""
        return self.dual_forward(self.depth) + 2 * self.tokens * _weights(self.qkv) + self.head


def _weights(linears: list[tuple[int, int]]) -> int:
    return sum(i * o for i, o in linears)
