"""What was found on a GPU, as a page of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["page"]

Row = Mapping[str, Any]


_HEAD = """# On a GPU

`make gpu` asks one CUDA GPU, in at most ten minutes and without a network:

* Are the values those of float64 on a CPU: in float32, tf32 and bf16, on every attention kernel of
  PyTorch and of the flash-attn packages, padded and packed?
* What does a step with values cost over the plain step, in time and memory, beside its floors, at
  the shapes of models of three and eight billion parameters, with vocabularies of 128 and 262
  thousand and one row of 4,096 tokens?
* Does a run of the trainer in bf16 end where TRL's does?

It writes `benchmarks/gpu.json` and this page. On a machine without a network the packages come from
a folder: `make gpu-wheels` fills `wheels/` where there is a network, and `make gpu` on the other
machine installs what is missing there; torch must be there. `python -m benchmarks.gpu --device cpu
--out FOLDER` asks a CPU the same in small: it shows that everything runs, and measures nothing.
"""
_NONE = "\n**No figure of a GPU exists yet**: none could be had. The kit is tested on a CPU.\n"


def page(found: Mapping[str, Any] | None) -> str:
    """Markdown of everything in gpu.json; None: there is no such file."""
    if found is None:
        return _HEAD + _NONE
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    parts: Mapping[str, Any] = found["parts"]
    lines = [_HEAD, f"Measured on: {machine}."]
    if found["quick"]:
        lines += ["", "**Tiny sizes: this shows that everything runs, and measures nothing.**"]
    for name, write in _PARTS.items():
        if name in parts:
            part = parts[name]
            lines += ["", f"## {part['title']}", ""]
            if part["error"]:
                lines += [f"**Failed**: {part['error']}", ""]
            lines += [*write(part["rows"]), "", f"{part['seconds']:.0f} s."]
    return "\n".join(lines) + "\n"


def _numbers(rows: Sequence[Row]) -> list[str]:
    """The worst error over estimators and layouts, by precision and kernel."""
    by: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by.setdefault((row["precision"], row["kernel"]), []).append(row)
    body = []
    for (precision, kernel), group in by.items():
        ran = [row for row in group if row["error"] is not None]
        why = next((row["why"] for row in group if row["error"] is None), "")
        worst = max((row["error"] for row in ran), default=None)
        lse = sorted({row["lse"] for row in ran} - {"not needed"})
        wrong = sum(row["ok"] is False for row in ran)
        cells = [precision, kernel, f"{len(ran)} of {len(group)}", _number(worst), str(wrong)]
        body.append([*cells, ", ".join(lse), why])
    head = ["precision", "kernel", "ran", "worst error", "beyond what is allowed", "log-sum-exp"]
    return _table([*head, "why others did not"], body)


def _ratios(rows: Sequence[Row]) -> list[str]:
    head = ["model", "values", "size", "step over plain step", "its floor in FLOPs"]
    head += ["time over FLOP floor", "plain step's", "peak memory over plain step's", "targets met"]
    body = []
    for row in rows:
        if "why" in row:
            body.append([row["shape"], row["estimator"], row["why"], *[""] * (len(head) - 3)])
            continue
        met = [key for key, value in row["met"].items() if value]
        missed = [key for key, value in row["met"].items() if value is False]
        verdict = "; ".join([*met, *(f"NOT {key}" for key in missed)]) or "not judged"
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        cells = [row["shape"], row["estimator"], row["size"], ratio, f"{row['floor']:.3f}"]
        cells += [f"{row['over_floor']:.2f}", f"{row['plain_over_floor']:.2f}"]
        body.append([*cells, _number(row["memory_ratio"]), verdict])
    return _table(head, body)


def _plain(rows: Sequence[Row]) -> list[str]:
    head = list(dict.fromkeys(key for row in rows for key in row))
    return _table(head, [[_cell(row.get(key)) for key in head] for row in rows])


_PARTS = {
    "properties": _plain,
    "numbers": _numbers,
    "training": _plain,
    "contraction": _plain,
    "ratios": _ratios,
}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return _number(value) if isinstance(value, float) else str(value).replace("\n", " ")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [list(head), ["---"] * len(head), *body]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
