"""A running mean of the validation gradient, so that a few validation rows a step suffice."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from alphatoken.errors import ConfigError, InputError, NumericalError
from alphatoken.support.precision import wide

__all__ = ["RunningMean"]

_MEAN = "mean."


class RunningMean:
    """Bias-corrected exponential mean of gradients over steps, tensor by tensor.

    After t updates with g_1 .. g_t and decay d::

        mean_t = (1 - d) / (1 - d^t) * sum_i d^(t - i) g_i

    computed as ``mean_t = mean_(t-1) + w_t (g_t - mean_(t-1))``, ``w_t = (1 - d) / (1 - d^t)``.
    So a constant g is returned bit for bit, and so is every g with d = 0. The gradients are taken
    at different parameters: with a decay near 1 the mean lags behind the model. Held in float32
    or wider, on the device of the last gradient; not in the paper.

    Args:
        decay: d in [0, 1); about ``1 / (1 - d)`` steps are averaged. 0 keeps nothing.

    Raises:
        ConfigError: a decay outside [0, 1).
    """

    def __init__(self, decay: float) -> None:
        number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
        if not number or not 0 <= decay < 1:
            raise ConfigError(
                "the decay of the running mean lies in [0, 1)",
                got=repr(decay),
                why="1 would never forget its first gradient",
            )
        self.decay = float(decay)
        self.count = 0
        self._mean: dict[str, Tensor] = {}

    def update(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take one more gradient; returns the mean as tensors that share nothing with this object.

        Args:
            gradient: name -> tensor; names and shapes as in the updates before.

        Returns:
            name -> mean, in float32 or wider. With decay 0 the gradient itself, made wide.

        Raises:
            InputError: names or shapes that differ from the updates before.
            NumericalError: a NaN or Inf, which would stay in the mean for good. Nothing is taken.
        """
        self._require_same(gradient)
        _require_finite(gradient)
        self.count += 1
        if self.decay == 0:
            return {n: g.detach().to(wide(g.dtype), copy=True) for n, g in gradient.items()}
        weight = self._weight(self.count)
        for name, g in gradient.items():
            new = g.detach().to(wide(g.dtype))
            # lerp returns its first end where both are equal, and its second where the weight is 1.
            self._mean[name] = torch.lerp(self._mean.get(name, new).to(new), new, weight)
        return {name: mean.clone() for name, mean in self._mean.items()}

    def _weight(self, count: int) -> float:
        """``(1 - d) / (1 - d^t)``, without cancellation for d near 1."""
        return (1 - self.decay) / -math.expm1(count * math.log(self.decay))

    def _require_same(self, gradient: Mapping[str, Tensor]) -> None:
        if not self._mean:
            return
        if gradient.keys() != self._mean.keys():
            odd = sorted(gradient.keys() ^ self._mean.keys())
            raise InputError(
                "the gradient has other tensors than the running mean",
                got=f"{len(odd)} in one and not in the other, such as {odd[0]}",
                why="a mean over different parameters has no meaning",
                remedy="keep one set of scored layers for the whole run",
            )
        for name, g in gradient.items():
            if g.shape != self._mean[name].shape:
                raise InputError(
                    "a gradient and its running mean differ in shape",
                    got=f"{name}: {tuple(g.shape)}, the mean {tuple(self._mean[name].shape)}",
                    remedy="keep one model for the whole run",
                )

    def state_tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs, as named tensors (no copies of the mean)."""
        return {
            "count": torch.tensor(self.count),
            "decay": torch.tensor(self.decay, dtype=torch.float64),
            **{_MEAN + name: mean for name, mean in self._mean.items()},
        }

    def load_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_tensors` gave; the next update is then bit for bit the same.

        Raises:
            InputError: not such a state.
            ConfigError: a state of another decay.
        """
        missing = [name for name in ("count", "decay") if name not in state]
        odd = [n for n in state if n not in ("count", "decay") and not n.startswith(_MEAN)]
        if missing or odd:
            raise InputError(
                "this is no state of a running mean",
                got=f"without {missing}" if missing else f"unknown tensors, such as {odd[0]}",
            )
        if float(state["decay"]) != self.decay:
            raise ConfigError(
                "the running mean was kept with another decay",
                got=f"{float(state['decay'])} in the state, {self.decay} now",
                why="its bias correction would be wrong",
                remedy="resume with the decay of the run",
            )
        mean = {n[len(_MEAN) :]: t.clone() for n, t in state.items() if n.startswith(_MEAN)}
        self.count, self._mean = int(state["count"]), mean


def _require_finite(gradient: Mapping[str, Tensor]) -> None:
    finite = [torch.isfinite(g).all() for g in gradient.values()]
    # One look at the device for all tensors, not one each.
    if finite and not bool(torch.stack([f.to(finite[0].device) for f in finite]).all()):
        name = next(n for n, f in zip(gradient, finite, strict=True) if not bool(f))
        raise NumericalError(
            "the validation gradient is not finite",
            got=name,
            why="a NaN never leaves a running mean",
            remedy="look at the validation losses and the weights (a diverged run?)",
        )
