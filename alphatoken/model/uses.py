"""Records of one forward's calls: of a linear, an attention, a gated delta net."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from alphatoken.model.attention import AttentionStatistics, propagate_values
from alphatoken.model.convolution import ConvolutionStatistics
from alphatoken.model.delta_rule import DeltaStatistics, Span
from alphatoken.model.protocol import ScoredLinear

__all__ = ["AttentionUse", "ConvolutionUse", "DeltaUse", "LinearUse"]


@dataclass(frozen=True)
class LinearUse:
    """One call of a scored linear: its input x (detached) and its output s (in the graph).

    Of a linear x is (b, t, i) and s (b, t, o). Of experts, to c of which each token was sent, they
    are (b, t, c, i) and (b, t, c, o), and ``experts`` (b, t, c) says to which.

    ``execution`` is the number of the decoder-block call that it happened in, counted from the
    first scored layer on. It tells the uses of a block that is called at two depths from each
    other, which the name of the linear cannot.
    """

    linear: ScoredLinear
    x: Tensor
    s: Tensor
    execution: int
    experts: Tensor | None = None


@dataclass(frozen=True)
class AttentionUse:
    """One attention call: value states and head outputs (in the graph), and its statistics.

    Errors are taken at ``output``; Value-Propagation sends them on from ``value``.
    """

    module: nn.Module
    value: Tensor
    output: Tensor
    statistics: AttentionStatistics
    dropout: float
    execution: int

    def propagated(
        self, error: Tensor, window: int | None, *, head_mean: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Value-Propagation of errors at ``output``: a tensor of the graph, and the error there."""
        carried = propagate_values(self.statistics, error, window=window, head_mean=head_mean)
        return self.value, carried.to(self.value.dtype)


@dataclass(frozen=True)
class ConvolutionUse:
    """One convolution: its input and its output (in the graph), and its statistics."""

    x: Tensor
    y: Tensor
    statistics: ConvolutionStatistics


@dataclass(frozen=True)
class DeltaUse:
    """One call of a gated delta rule, and the convolution in front of it.

    As ``AttentionUse``, which it stands beside in ``Recorder.attentions``. ``value`` are the
    rule's values, made by the convolution; Value-Propagation goes on from the convolution's input,
    the output of the value projection.
    """

    module: nn.Module
    convolution: ConvolutionUse
    value: Tensor
    output: Tensor
    statistics: DeltaStatistics
    execution: int
    dropout: ClassVar[float] = 0.0

    def propagated(
        self, error: Tensor, window: int | None, *, head_mean: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Value-Propagation of errors at ``output``: the convolution's input, and the error there.

        With A_kp the coefficient of the value at p in the rule's output at k, and the tap of the
        convolution that lies j positions back,

            e~_t = sum_{k in (t, t+W]} sum_j taps_j f'(z_{t+j}) A_{k,t+j} e_k,

        the derivative of all o_k . e_k by the value projection's output at t, queries, keys and
        gates held. With ``head_mean`` A is averaged over the value heads.

        Exactness: exact for the value rows of the last decoder layer with W = T. Oracle:
        ``alphatoken.oracle.delta_net.propagated``.
        """
        taps = self.convolution.statistics
        # The value at p = t + j counts from k = p on, but never k = t, and up to k = t + W.
        spans: list[Span] = [
            (int(j == 0), None if window is None else window - j) for j in range(taps.width)
        ]
        parts = self.statistics.carried(error, spans, mean=head_mean)
        # Autograd brings each part from the values to their channels of the convolution's output.
        placed = [
            torch.autograd.grad(
                self.value, self.convolution.y, part.to(self.value.dtype), retain_graph=True
            )[0]
            for part in parts
        ]
        x = self.convolution.x
        return x, taps.gathered(placed).to(x.dtype)
