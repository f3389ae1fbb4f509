"""A short causal convolution along positions with a switchable backward.

Letters: b batch, c channel, t position, w tap. Each channel has taps of its own, the last of which
lies on the position itself, and an activation f follows:

    y_t = f(z_t),    z_t = sum_w taps_w x_{t - W + 1 + w} + bias

*Self-only*: the last tap alone, ``dx_t = taps_{W-1} f'(z_t) dy_t``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from alphatoken.model.protocol import ConvolutionCall, NativeConvolution
from alphatoken.model.switch import BackwardSwitch, around
from alphatoken.support.precision import full_precision, wide

__all__ = ["ConvolutionStatistics", "switchable_convolution"]


class ConvolutionStatistics:
    """Input and taps of one call, without a graph; computed with in float32 or wider."""

    def __init__(self, call: ConvolutionCall) -> None:
        self.x, self.activation = call.x.detach(), call.activation
        self.dtype = wide(self.x.dtype, call.weight.dtype)
        # Copies: where weights are sharded, the storage is freed when the module is left.
        self.taps = call.weight.detach().to(self.dtype, copy=True)
        self.bias = None if call.bias is None else call.bias.detach().to(self.dtype, copy=True)

    @property
    def width(self) -> int:
        """The number of taps."""
        return self.taps.shape[-1]

    @full_precision
    def slope(self) -> Float[Tensor, "b c t"]:
        """f'(z) at every position."""
        channels, width = self.taps.shape
        x = F.pad(self.x.to(self.dtype), (width - 1, 0))
        with torch.no_grad():
            z = F.conv1d(x, self.taps.unsqueeze(1), self.bias, groups=channels)
        if self.activation is None:
            return torch.ones_like(z)
        with torch.enable_grad():
            z.requires_grad_()
            (slope,) = torch.autograd.grad(self.activation(z).sum(), z)
        return slope

    @full_precision
    def own(self, error: Float[Tensor, "b c t"]) -> tuple[Float[Tensor, "b c t"]]:
        """The error at the input of the same position: ``taps_{W-1} f'(z_t) dy_t``."""
        own = self.taps[:, -1:] * self.slope() * error.to(self.dtype)
        return (own.to(self.x.dtype),)

    @full_precision
    def gathered(self, errors: Sequence[Tensor]) -> Float[Tensor, "b c t"]:
        """``sum_j taps_{W-1-j} f'(z_{t+j}) E^j_{t+j}``: an error for each way through the taps.

        Args:
            errors: E^j (b, c, t) at the outputs, for the tap that lies j positions back. With one
                error for all it is the ordinary backward.
        """
        slope = self.slope()
        result = torch.zeros_like(slope)
        length = slope.shape[-1]
        for back, error in enumerate(errors[:length]):
            moved = self.taps[:, -1 - back, None] * slope * error.to(self.dtype)
            result[..., : length - back] += moved[..., back:]
        return result


def switchable_convolution(
    call: ConvolutionCall, native: NativeConvolution, switch: BackwardSwitch
) -> tuple[Tensor, ConvolutionStatistics]:
    """Run the model's own convolution inside a graph whose backward obeys ``switch``.

    As ``attention.switchable_attention``: the outputs (b, c, t), and the call's statistics.

    Exactness: self mode is the last tap, exactly. Oracle: ``alphatoken.oracle.influence`` and
    ``alphatoken.oracle.delta_net.held_taps``.
    """
    statistics = ConvolutionStatistics(call)
    return around(native, (call.x,), switch, lambda error, *_: statistics.own(error)), statistics
