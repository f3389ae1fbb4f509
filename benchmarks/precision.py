"""``python -m benchmarks.precision``: values in bf16, tf32 and float32 against float64.

One model in every dtype: its weights are rounded to bf16 first, and what is compared is the same
function, computed in narrower arithmetic. Two ways: everything in the dtype, the direction G built
in it as well; and G built in float64 and rounded, so that only the training side is narrow. The
error of a value is relative to the sum of the absolute terms that it is the sum of.

The random model needs nothing; the pre-trained one of 260 K parameters and its rows come from the
folder named by ALPHATOKEN_DATA. tf32 exists on CUDA only.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken import Scorer, ScorerConfig
from alphatoken.certificate.metrics import spearman, top_overlap
from alphatoken.fidelity.per_row import absolute_terms
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients as oracle
from benchmarks.models import Size
from benchmarks.page import write_page
from benchmarks.results import Places, load, write_text
from benchmarks.rungs import LAYERS, Rung, section

__all__ = ["Subject", "ladder"]

ESTIMATORS = ("label", "alphatoken", "path", "direct")
KEPT = 0.5


@dataclass(frozen=True)
class Subject:
    """A model with its weights in float32, and what is scored against what."""

    name: str
    model: Any
    batch: Mapping[str, Tensor]
    validation: Mapping[str, Tensor]


# --- one model in several dtypes -----------------------------------------------------------------


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
    """The dtype of a rung; inside, tf32 products are on for "tf32" and off for the others."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield torch.bfloat16 if precision == "bf16" else torch.float32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _config(estimator: str, model: Any) -> ScorerConfig:
    layers = min(LAYERS, model.config.num_hidden_layers)
    return ScorerConfig(estimator=estimator, layers=layers)


# --- the ladder ----------------------------------------------------------------------------------


def ladder(subject: Subject, device: torch.device) -> Iterator[Rung]:
    """Every estimator in every precision that the device has, against float64."""
    precisions = ("bf16", "tf32", "fp32") if device.type == "cuda" else ("bf16", "fp32")
    batch, validation = (
        {name: tensor.to(device) for name, tensor in given.items()}
        for given in (subject.batch, subject.validation)
    )
    exact_model = in_dtype(subject.model, torch.float64).to(device)
    for estimator in ESTIMATORS:
        config = _config(estimator, subject.model)
        exact = Scorer(exact_model, validation, None, config)
        truth, direction = exact.score(batch), exact.direction.total()
        terms = absolute_sums(exact, batch, direction)
        for precision in precisions:
            for source in ("same", "float64"):
                with arithmetic(precision) as dtype:
                    model = in_dtype(subject.model, dtype).to(device)
                    given = None if source == "same" else _given(direction)
                    found = Scorer(model, validation, None, config, reduce=given).score(batch)
                mine, theirs = (v.total.double()[truth.mask] for v in (found, truth))
                errors = (mine - theirs).abs() / terms
                both = top_overlap(mine, theirs, ratio=KEPT)
                yield Rung(
                    subject.name,
                    precision,
                    source,
                    estimator,
                    float(errors.median()),
                    float(errors.max()),
                    spearman(mine, theirs),
                    both / (2 - both),  # equally many are kept on both sides
                    len(mine),
                    device.type,
                )


def _given(direction: Mapping[str, Tensor]) -> Any:
    """A reducer that hands over a known mean gradient, in the dtype that sums have."""

    def reduce(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        return {name: direction[name].to(total.dtype) for name, total in sums.items()}

    return reduce


def absolute_sums(
    scorer: Scorer, batch: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Tensor:
    """Sum of the absolute terms of each response token's value, in (row, position) order.

    Captured estimators: sum |delta| |M| |x| over scored linears. Label: sum |grad l_k| |M| over
    scored weights, by one backward a token.
    """
    terms = absolute_terms(scorer, batch, direction)
    device = batch["labels"].device
    if terms is not None:
        return torch.as_tensor(terms, device=device)
    adapter = find_adapter(scorer.adapter.model)
    parameters = oracle.directed_parameters(adapter.model, direction)
    sums = [
        sum(float((g.abs() * direction[name].abs()).sum()) for name, g in gradient.items())
        for gradient in oracle.per_token_gradients(
            adapter.model, adapter.forward, dict(batch), parameters
        )
    ]
    return torch.tensor(sums, dtype=torch.float64, device=device)


# --- subjects ------------------------------------------------------------------------------------


def random_subject(*, quick: bool = False) -> Subject:
    """Random weights, d = 256, four layers."""
    size = Size(32, 4, 64, 4, length=24) if quick else Size(256, 4, 512, rows=4, length=128)
    return Subject(
        f"random weights, d={size.width}, 4 layers",
        size.model(),
        size.batch(),
        size.batch(seed=1, rows=2 if quick else 8),
    )


def real_subjects(folder: Path) -> Iterator[Subject]:
    """The pre-trained decoder of 260 K parameters, on its own kind of text and on far text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.small_rows import ROWS, VALIDATION, batch_of, rows_of

    place = folder / "stories260K/transformers"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(place),
        AutoTokenizer.from_pretrained(place),
    )
    for kind, name in (("near", "its own kind of text"), ("far", "far text")):
        texts = rows_of(folder, kind)
        yield Subject(
            f"pre-trained, 260 K parameters, {name}",
            model,
            batch_of(tokenizer, texts, ROWS),
            batch_of(tokenizer, texts[120:], VALIDATION),
        )


def measure(places: Places, device: torch.device, *, quick: bool = False) -> list[Rung]:
    """Every subject at hand; written whole."""
    rungs = list(ladder(random_subject(quick=quick), device))
    if folder := os.environ.get("ALPHATOKEN_DATA"):
        if not Path(folder).is_dir():
            raise SystemExit(f"ALPHATOKEN_DATA is {folder!r}, and there is no such folder")
        for subject in real_subjects(Path(folder)):
            rungs += ladder(subject, device)
    write_text(places.precision, json.dumps([asdict(rung) for rung in rungs], indent=1) + "\n")
    return rungs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write precision.json, and the page anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny random model")
    parser.add_argument("--out", type=Path, help="a folder for all files, not the repository's own")
    options = parser.parse_args(arguments)
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its figures would replace real ones")
    places = Places() if options.out is None else Places.under(options.out)
    rungs = measure(places, torch.device(options.device), quick=options.quick)
    write_page(load(places.results), places)
    print(section(rungs))


if __name__ == "__main__":
    main()
