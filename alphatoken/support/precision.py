"""The one rule on arithmetic, float32 at least in every sum; and refusal of what is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from alphatoken.errors import AlphaTokenError, NumericalError
from alphatoken.support.devices import refuse

_P = ParamSpec("_P")
_R = TypeVar("_R")
_BLOCK = 2**20  # numbers that are widened to float64 at a time
DEVICES = ("cpu", "cuda", "mps", "xpu")


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float64 if any input is, else float32.

    bfloat16 and float16 inputs are widened; a float64 model stays exact to rounding.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same numbers of several tensors of one shape, flat, a block at a time."""
    # Whoever sums in float64 widens a block, and holds no wide copy of a whole tensor.
    return zip(*(tensor.reshape(-1).split(_BLOCK) for tensor in tensors), strict=True)


def full_precision(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``function`` with autocast off: it would turn every matrix product into bfloat16."""

    @functools.wraps(function)
    def widened(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Values are often asked for inside a training step's torch.autocast. It goes on governing
        # the model's own arithmetic, while the contractions and sums of this library stay in full
        # precision.
        active = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        try:
            for device in active:
                torch.set_autocast_enabled(device, False)
            return function(*args, **kwargs)
        finally:
            for device in active:
                torch.set_autocast_enabled(device, True)

    return widened


@contextmanager
def float16_named(
    model: nn.Module, kinds: tuple[type[AlphaTokenError], ...] = (NumericalError,)
) -> Iterator[None]:
    """Context in which refusals by numbers name float16, where the model computes in it.

    Args:
        model: whose parameters, or autocast around it, say what it computes in.
        kinds: of errors that are raised for what numbers are.
    """
    try:
        yield
    except kinds as error:
        # Activations of large models leave its range upwards, and their gradients downwards. What
        # is then wrong with the numbers is neither the model's fault nor mended by another
        # estimator.
        dtypes = {parameter.dtype for parameter in model.parameters()}
        dtypes |= {torch.get_autocast_dtype(d) for d in DEVICES if torch.is_autocast_enabled(d)}
        if torch.float16 not in dtypes or error.why == _RANGE:
            raise
        raise type(error)(
            error.what,
            got=f"{error.got}, in float16",
            why=_RANGE,
            remedy="another number format: --dtype bfloat16 or float32 (in Python "
            "from_pretrained(..., dtype=torch.bfloat16), before transformers 5 torch_dtype)",
        ) from None


_RANGE = (
    "float16 ends at 65,504 and has nothing but 0 below 6e-8, so that large activations are lost, "
    "and gradients through them"
)


def refuse_first(
    bad: Bool[Tensor, "b t"], values: Shaped[Tensor, "b t"], what: str, *, why: str, remedy: str
) -> None:
    """Raise NumericalError for the first number of a batch that is ``bad``, by row and token.

    ``what`` is wrong, ``why`` and ``remedy`` are as in :class:`AlphaTokenError`. When it is raised
    is as of ``devices.refuse``.
    """
    values = values.detach()

    def raise_first() -> None:
        row, index = bad.nonzero()[0].tolist()
        got = f"{float(values[row, index])} at row {row}, token {index}"
        raise NumericalError(what, got=got, why=why, remedy=remedy)

    refuse(bad.any(), raise_first)
