"""Values in float32, TF32, bfloat16 and float16, compared: is my dtype good enough?

The run's own values are computed in each arithmetic that the device offers, beside float32. The
yardstick is in the data: an arithmetic is good enough if it changes fewer decisions than other
validation rows of the same number do, which are drawn from the given ones as in ``stability``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from alphatoken.diagnose.diagnosis import BAD, DOUBTFUL, GOOD, Diagnosis, Table
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.stability import Options
from alphatoken.diagnose.statistics import (
    Estimate,
    Numbers,
    bootstrap,
    kept,
    percent,
    relative_error,
    spearman,
)
from alphatoken.diagnose.subject import Subject, conclude
from alphatoken.diagnose.valuing import OwnValues, keep_shares, row_columns, scorer_for
from alphatoken.errors import CoverageError, NumericalError, UnsupportedError
from alphatoken.select.masks import keep_count

__all__ = ["Options", "changes", "diagnose", "redrawn_changes", "rounded"]

_FLOAT32 = "float32"
_OTHERS = {
    "TF32": (torch.float32, False, True),
    "bfloat16 autocast": (torch.float32, True, False),
    "bfloat16 weights": (torch.bfloat16, False, False),
    "float16 weights": (torch.float16, False, False),
}
"""Name -> dtype of the weights; whether autocast is on, and whether float32 products are TF32."""


@contextmanager
def rounded(device: str, *, autocast: bool = False, tf32: bool = False) -> Iterator[None]:
    """Set bfloat16 autocast and the precision of products inside; an exception restores them too.

    Args:
        device: type of the device on which autocast is set.
        autocast: whether bfloat16 autocast rounds what is multiplied.
        tf32: whether the matrix products of float32 are TF32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Value the same tokens in each arithmetic; compare with float32 and with other rows.

    Raises:
        InputError: too few tokens. DataError: too few validation rows. ConfigError: the objective
            has no validation side, or its values are not linear in the gradients of its rows.
    """
    options = options or Options()
    device, loaded = subject.device.type, _dtypes(subject.model)
    with rounded(device):
        base = OwnValues.of(subject.resized(model=_with_weights(subject.model, torch.float32)))
        columns = row_columns(base.subject, base.scorer, base.rows, base.validation)
    ratio, seed = subject.ratio, subject.seed
    shares = keep_shares(columns, base.rest, ratio, options.resamples, seed=seed)
    redrawn = bootstrap(
        np.mean, redrawn_changes(base.total, shares, ratio), groups=base.groups, seed=seed
    )
    values_by_arithmetic, refused = {_FLOAT32: base.total}, []
    for name in _tried(device, loaded):
        try:
            values_by_arithmetic[name] = _values(base, subject.model, name)
        except (CoverageError, NumericalError, UnsupportedError) as problem:
            refused.append(f"There are no values with {name}: {problem.what}.")
    records = [
        _record(base, name, values, redrawn, loaded)
        for name, values in values_by_arithmetic.items()
    ]
    rows = len(base.validation)
    drawn = {"validation_rows": rows, "draws": options.resamples, "decisions_changed": redrawn}
    return conclude(
        "arithmetic",
        subject,
        _conclusion(records[1:], redrawn, rows),
        [
            Table.of("arithmetics", "Values in each arithmetic, beside float32", records),
            Table.of("other-rows", "The same values against other validation rows", [drawn]),
        ],
        [_figure(_tokens_table(base, values_by_arithmetic), keep_count(ratio, len(base.total)))],
        valued=base.rows,
        notes=[*base.notes, *_notes(device, loaded), *refused],
        settings=asdict(options),
        mark=_mark(records[1:]),
    )


def _tried(device: str, loaded: set[torch.dtype]) -> list[str]:
    """All on CUDA; elsewhere there is no TF32, and float16 only if weights were loaded in it."""
    return [
        name
        for name, (weights, _, tf32) in _OTHERS.items()
        if device == "cuda"
        or not (tf32 or (weights == torch.float16 and torch.float16 not in loaded))
    ]


# --- numbers -------------------------------------------------------------------------------------


def changes(
    values: Numbers, truth: Numbers, ratio: float, rows: NDArray[Any], *, seed: int = 0
) -> dict[str, Estimate]:
    """Shares of decisions and of signs that are others, error in norm, and rank correlation.

    With A(v) the first ``ceil(ratio n)`` tokens by value, w ``values`` and v ``truth``:
    ``|A(w) xor A(v)| / n``, the share of ``sign w != sign v``, ``||w - v|| / ||v||`` and Spearman's
    correlation; intervals are over rows.
    """
    estimate = partial(bootstrap, groups=rows, seed=seed)
    return {
        "decisions_changed": estimate(np.mean, kept(values, ratio) != kept(truth, ratio)),
        "signs_changed": estimate(np.mean, np.sign(values) != np.sign(truth)),
        "relative_error": estimate(relative_error, values, truth),
        "spearman": estimate(spearman, values, truth),
    }


def redrawn_changes(truth: Numbers, keep_share: Numbers, ratio: float) -> Numbers:
    """(n,) share of the draws of other validation rows that reverse each decision.

    Args:
        truth: (n,) values against the rows given.
        keep_share: (n,) share of the draws in which a token is kept.
        ratio: share to keep.
    """
    return np.where(kept(truth, ratio), 1 - keep_share, keep_share)


def _record(
    base: OwnValues, name: str, values: Numbers, redrawn: Estimate, loaded: set[torch.dtype]
) -> dict[str, Any]:
    """One arithmetic beside float32, whose own record has no verdict."""
    measures = changes(values, base.total, base.subject.ratio, base.groups, seed=base.subject.seed)
    changed = measures["decisions_changed"].value
    good = None if name == _FLOAT32 else changed < redrawn.value or changed == 0
    weights, *products = _OTHERS.get(name, (torch.float32, False, False))
    return {
        "arithmetic": name,
        "yours": loaded == {weights} and not any(products),
        "good_enough": good,
        **measures,
    }


# --- values --------------------------------------------------------------------------------------


def _values(base: OwnValues, original: nn.Module, name: str) -> Numbers:
    """(n,) values of the same tokens, finite.

    Raises:
        CoverageError, NumericalError, UnsupportedError: the model has no values so.
    """
    weights, autocast, tf32 = _OTHERS[name]
    narrow = weights != torch.float32
    model = _with_weights(original, weights) if narrow else base.model
    retention = base.retention
    if retention is not None and narrow:
        # Rounded as the model's own weights are, or their rounding would count as drift.
        rounded_weights = {key: weight.to(weights) for key, weight in retention.reference.items()}
        retention = replace(retention, reference=rounded_weights)
    scorer = scorer_for(base.subject, model=model, retention=retention, rows=base.validation)
    with rounded(base.subject.device.type, autocast=autocast, tf32=tf32):
        values = base.subject.score(scorer, base.rows, f"Values, {name}")["total"]
    kept(values, base.subject.ratio)  # refuses what is not finite
    return values


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters() if weight.is_floating_point()}


def _with_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model if its weights have this dtype, else a copy."""
    if _dtypes(model) == {dtype}:
        return model
    copied = copy.deepcopy(model)
    # Buffers stay: loading in 16 bits leaves tables of angles as they are.
    for weight in copied.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return copied


# --- tables, figure and words ---------------------------------------------------------------------


def _tokens_table(base: OwnValues, values_by_arithmetic: Mapping[str, Numbers]) -> Table:
    """One record a token and arithmetic."""
    ranks = {
        name: np.argsort(np.argsort(-values, kind="stable")) + 1
        for name, values in values_by_arithmetic.items()
    }
    records = [
        {
            "arithmetic": name,
            "row": base.rows[int(row)].row.index,
            "position": int(base.values["position"][place]),
            "value in float32": float(base.total[place]),
            "value": float(values[place]),
            "rank in float32": int(ranks[_FLOAT32][place]),
            "rank": int(ranks[name][place]),
        }
        for name, values in values_by_arithmetic.items()
        if name != _FLOAT32
        for place, row in enumerate(base.groups)
    ]
    return Table.of("arithmetic-ranks", "Values and ranks of each token", records)


def _figure(tokens: Table, count: int) -> Figure:
    return Figure(
        "scatter",
        "arithmetic-ranks",
        tokens,
        "Where decisions change",
        "Tokens by falling value. Those left and below the dashed lines are kept in both, those "
        "right and above in neither; a point elsewhere is a decision that changes.",
        x="rank in float32",
        y="rank",
        facets="arithmetic",
        guides=(Guide(count + 0.5, "x"), Guide(count + 0.5, "y")),
        ylabel="rank in this arithmetic",
    )


def _mark(records: Sequence[Mapping[str, Any]]) -> str:
    enough = [bool(record["good_enough"]) for record in records]
    if not enough:
        return ""
    return GOOD if all(enough) else DOUBTFUL if any(enough) else BAD


def _conclusion(records: Sequence[Mapping[str, Any]], redrawn: Estimate, rows: int) -> str:
    if not records:
        return "No arithmetic but float32 gives values of this model."
    good, bad = (
        [record["arithmetic"] for record in records if record["good_enough"] == wanted]
        for wanted in (True, False)
    )
    verdict = " and ".join(good) or "float32 alone"
    verdict += f", but not with {' or '.join(bad)}" if good and bad else ""
    shares = ", ".join(
        f"{percent(record['decisions_changed'])} with {record['arithmetic']}" for record in records
    )
    return (
        f"Values are good enough with {verdict}: the share of decisions that change is {shares}, "
        f"and {percent(redrawn)} with another draw of the {rows} validation rows."
    )


def _notes(device: str, loaded: set[torch.dtype]) -> list[str]:
    notes = []
    if device != "cuda":
        notes.append(
            f"There is no TF32 on this device ({device}); float16 weights are tried on CUDA, and "
            "where a model was loaded so."
        )
    if loaded != {torch.float32}:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in loaded))
        notes.append(
            f"The weights were loaded in {names} and cast to float32, so that what loading rounded "
            "is in all values alike: it is not of the arithmetic."
        )
    return notes
