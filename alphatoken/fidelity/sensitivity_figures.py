"""The pictures of the sensitivity diagnostic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.plots import LINE, Guide, Panel, Series, picture

__all__ = ["masks", "ratios"]

Record = Mapping[str, Any]

_NAMES = {
    "estimator": "estimator",
    "K": "layers K",
    "W": "window W",
    "lambda": "lambda",
    "validation rows": "validation rows",
}
_COSTS = {
    "validation FLOPs / step": "validation gradient",
    "scoring FLOPs / step": "scoring",
}
_OWN: dict[str, Any] = {"marker": "*", "markersize": 12, "color": "#000000"}


def masks(records: Sequence[Record]) -> Figure:
    """Overlap with the run's kept tokens above, cost below; one column a setting."""
    found = {
        setting: here
        for setting in _NAMES
        if len(here := [r for r in records if r["setting"] == setting]) > 1
    }
    first = next(iter(found), "")
    return picture(
        "settings",
        "Kept tokens and cost, one setting at a time",
        "Above: a curve near 1 is a setting that hardly matters, one near the dashed line "
        "keeps tokens as if drawn at random. The run's own value is the large black mark. "
        "Below: what that value costs, so that a flat curve above a rising cost shows where "
        "to save. Lambda and the ratio cost nothing.",
        Table.of("settings_data", "Kept tokens and cost by setting", records),
        *(_overlaps(setting, here, setting == first) for setting, here in found.items()),
        *(_costs(setting, here, setting == first) for setting, here in found.items()),
        alt="Overlap with the run's kept tokens and cost in FLOPs for each tried value of "
        f"{', '.join(_NAMES[setting] for setting in found)}.",
        size=(2.3 * len(found) + 0.6, 5.0),
        across=len(found),
        sharex="col",
        sharey="row",
        height_ratios=[3, 2],
    )


def _overlaps(setting: str, records: Sequence[Record], first: bool) -> Panel:
    places = range(len(records))
    joined = setting != "estimator"
    overlaps = [record["overlap"] for record in records]
    series = [Series("overlap", places, overlaps, joined=joined)]
    disjoint = [record.get("overlap, disjoint subsets") for record in records]
    if any(disjoint):
        series.append(Series("overlap, two disjoint subsets", places, disjoint, joined=joined))
    own = [place for place in places if records[place]["default"]]
    values = [overlaps[place].value for place in own]
    series.append(Series("the run's value", own, values, **_OWN))
    return Panel(
        series,
        [Guide(records[0]["overlap by chance"], across=True, label="by chance")],
        columns=[record["value"] for record in records],
        title=_NAMES[setting],
        ylabel="overlap with the run's\nkept tokens" if first else "",
        ylim=(0.0, 1.05),
    )


def _costs(setting: str, records: Sequence[Record], first: bool) -> Panel:
    joined = setting != "estimator"
    series = [
        Series(label, range(len(records)), [r.get(key) for r in records], look=look, joined=joined)
        for look, (key, label) in enumerate(_COSTS.items(), start=2)
        if any(key in record for record in records)
    ]
    return Panel(
        series,
        columns=[record["value"] for record in records],
        title="" if series else "no cost",
        ylabel="FLOPs over those\nof a training step" if first else "",
        ylim=(0.0, None),
    )


def ratios(total: NDArray[np.float64], records: Sequence[Record]) -> Figure:
    """Share of the positive value that each ratio captures."""
    ordered = np.sort(total)[::-1]
    best = float(ordered[ordered > 0].sum())
    share = np.arange(1, len(ordered) + 1) / len(ordered)
    curve = np.cumsum(ordered) / best if best > 0 else np.full(len(ordered), np.nan)
    peak = float((total > 0).mean())
    (own,) = (record for record in records if record["default"])
    at, captured = own["value"], own["captured"].value
    data = [
        {"ratio": float(x), "value": float(v), "captured": float(y)}
        for x, v, y in zip(share, ordered, curve, strict=True)
    ]
    series = [
        Series("highest values first", share, curve, joined=True, **LINE),
        Series("at random (mean)", [0, 1], [0, curve[-1]], joined=True, marker=""),
        Series(f"the run: {at:g}", [at], [captured], **_OWN),
    ]
    return picture(
        "ratios",
        "How much value each ratio captures",
        "The curve rises as long as values are positive. A steep rise and a long flat top mean "
        "that few tokens carry the value and the ratio may be small; where it falls again, "
        "tokens are kept that speak against the objective.",
        Table.of("ratios_data", "Value captured by ratio", data),
        Panel(
            series,
            [Guide(peak, label=f"last positive value: {peak:.2f}", dashes=":")],
            xlabel="ratio kept",
            ylabel="kept value over all positive value",
        ),
        alt=f"Captured value against the ratio: {captured:.2f} at the run's "
        f"{at:g}, largest at {peak:.2f}.",
        size=(6.0, 4.0),
    )
