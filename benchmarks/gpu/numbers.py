"""Values on the device against float64 on the CPU: by precision, attention kernel and layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenError
from benchmarks.measure import Run
from benchmarks.models import Size

Row = dict[str, Any]
ESTIMATORS = ("alphatoken", "direct", "path", "label")
LAYOUTS = ("plain", "padded", "packed")
ALLOWED = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 6e-2}
"""Norm of the error over the norm of the exact values."""

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_PACKAGES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def kernels(device: torch.device) -> tuple[str, ...]:
    """Names of attention kernels to try: PyTorch's, on CUDA those of flash-attn's packages too."""
    if device.type != "cuda":
        return ("math", "flash")
    return (*_BACKENDS, *_PACKAGES)


def numbers(run: Run) -> Iterator[Row]:
    """Every estimator in every precision on every kernel and layout, against float64."""
    size = Size(32, 4, 64, 4, length=24) if run.quick else Size(256, 4, 512, rows=4, length=128)
    base, on_gpu = size.model().eval(), run.device.type == "cuda"
    for layout in LAYOUTS:
        batch, validation = layout_of(size, layout, 0), layout_of(size, layout, 1)
        exact_model = in_dtype(base, torch.float64)
        for estimator in ESTIMATORS:
            exact = _values(exact_model, batch, validation, estimator).double()
            for precision in ("fp32", "tf32", "bf16") if on_gpu else ("fp32", "bf16"):
                for kernel in kernels(run.device):
                    row = {"estimator": estimator, "layout": layout}
                    row |= {"precision": precision, "kernel": kernel}
                    yield row | _compared(run, base, batch, validation, row, exact)


def layout_of(size: Size, layout: str, seed: int) -> dict[str, Any]:
    """Rows of the size; padded on either side; or documents in one row, told apart by position."""
    batch: dict[str, Any] = size.batch(rows=2, seed=seed)
    length, labels = size.length, batch["labels"]
    if layout == "padded":
        mask = torch.ones_like(labels)
        mask[0, : length // 3], mask[1, -(length // 4) :] = 0, 0
        labels[mask == 0] = -100
        labels[0, length // 3] = -100  # nothing before it could predict it
        batch["attention_mask"] = mask
    if layout == "packed":
        lengths = [length // 2, length // 4, length - length // 2 - length // 4]
        positions = torch.cat([torch.arange(count) for count in lengths])[None]
        batch = {name: tensor[:1] for name, tensor in batch.items()}
        batch["labels"][positions == 0] = -100
        batch["position_ids"] = positions
    return batch


def _compared(
    run: Run,
    base: Any,
    batch: Mapping[str, Any],
    validation: Mapping[str, Any],
    row: Row,
    exact: Tensor,
) -> Row:
    with arithmetic(row["precision"]) as dtype:
        try:
            model = in_dtype(base, dtype).to(run.device)
            with _kernel(model, row["kernel"]):
                there = [
                    {name: tensor.to(run.device) for name, tensor in inputs.items()}
                    for inputs in (batch, validation)
                ]
                values = _values(model, *there, row["estimator"]).double().cpu()
        except AlphaTokenError as error:
            return {"error": None, "ok": False, "why": str(error)[:200]}
        except (RuntimeError, ImportError, ValueError, OSError) as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            # A kernel may be missing, or not do this; whatever else is said is a fault.
            missing = isinstance(error, (ImportError, ValueError, OSError))
            absent = row["kernel"] != "math" and (missing or "No available kernel" in text)
            why = f"{type(error).__name__}: {text[:120]}"
            return {"error": None, "ok": None if absent else False, "why": why}
    error = float((values - exact).norm() / exact.norm())
    return {"error": error, "ok": error <= ALLOWED[row["precision"]]}


def _values(
    model: Any, batch: Mapping[str, Any], validation: Mapping[str, Any], estimator: str
) -> Tensor:
    config = ScorerConfig(estimator=estimator, layers=3)
    return Scorer(model, dict(validation), None, config).score(dict(batch)).total


@contextmanager
def _kernel(model: Any, kernel: str) -> Iterator[None]:
    if kernel in _PACKAGES:
        model.set_attn_implementation(kernel)
        yield
        return
    with sdpa_kernel(_BACKENDS[kernel]):
        yield


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A copy whose weights are rounded to bf16, then held in ``dtype``.

    Buffers stay as they are: the rotary frequencies are float32 in every dtype, as loaders keep
    them. In float64 the norms compute in float64: transformers' own would cast to float32.
    """
    copied = copy.deepcopy(model).eval()
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    if dtype == torch.float64:
        for module in copied.modules():
            if type(module).__name__.endswith("RMSNorm"):
                _exact_norm(module)
    return copied


def _exact_norm(norm: nn.Module) -> None:
    weight: Any = norm.weight
    epsilon: Any = norm.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        scaled: Tensor = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon))
        return scaled

    norm.forward = forward  # of this copy alone


@contextmanager
def arithmetic(precision: str) -> Iterator[torch.dtype]:
    """The dtype of a precision; inside, tf32 products are on for "tf32" and off for the others."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield torch.bfloat16 if precision == "bf16" else torch.float32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
