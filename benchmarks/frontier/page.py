"""docs/frontier.md and its pictures, from the figures alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.support.storage import replacing
from benchmarks.frontier.figures import worth
from benchmarks.frontier.measure import RATE, STEPS
from benchmarks.frontier.pictures import draw

__all__ = ["table", "write_page"]

Figures = Mapping[str, Any]

_HEAD = """# Quality against price

Written by `python -m benchmarks.frontier`; do not edit by hand.

Each setting is compared with the exact label value over **all** parameters, the first-order
effect of a token's weight on the validation loss. *Spearman* is the rank correlation with it,
*overlap* the share of the better half that both choose (chance: 0.50). Both are means over the
draws by their tokens, each draw ranked by itself; brackets are 95 % intervals that draw rows anew.
*Price* is in training steps of the same batch, with a forward of the values' own: counted FLOPs,
the head at the positions that a loss reads; building the direction is no part of it. Settings in
italics are sums of parts that the scorer's options cannot name: layers with weights or drawn anew,
and the head without the embedding, which are one matrix in these models.

{subjects}

SmolLM2 and Gemma 3 270M have four-bit weights, read back as float32. Draws: {draws}.
"""


def write_page(models: Figures, page: Path) -> None:
    """The page, and its pictures beside it."""
    pictures = draw(models, page.with_suffix(""))
    with replacing(page) as temporary:
        temporary.write_text(_page(models, pictures, page.stem), encoding="utf-8")


def _page(models: Figures, pictures: Sequence[tuple[str, str]], folder: str) -> str:
    parts = [_head(models)]
    parts += [f"![{caption}]({folder}/{name})\n\n*{caption}*\n" for name, caption in pictures]
    parts += [
        "## What is worth its price\n",
        "By rising price, what ranks better (by 0.02 at least) than everything cheaper.\n",
        *(_front(one) for one in models.values()),
        "## Which parameters carry the ranking\n",
        _beside(models, _in("kinds", "lacking")),
        _sizes(models),
        "## Which layers carry it\n",
        *(_layers(one) for one in models.values()),
        "## Cheap corrections\n",
        "*Closed* stands for the parts of the final norm and the head, which need no pass through "
        "the layers. *Weighted*: a layer counts for those that it is nearest to. Random layers are "
        "drawn anew each step and counted as one over their chance, so that their mean over steps "
        "is the sum; ± is the spread of Spearman from step to step. *Chosen*: norms, closed parts "
        "and the layers that help most for a price. The figures are of layers chosen on the rows "
        "of all other formats; the layers shown are the choice on all rows.\n",
        _chosen(models),
        _beside(models, _corrections),
        "## By kind of rows\n",
        *(_formats(one) for one in models.values()),
        *_adam(models),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _head(models: Figures) -> str:
    subjects = "\n".join(
        f"* {one['name']}: {one['depth']} layers, {len(one['draws'])} draws, {one['rows']} rows, "
        f"{one['tokens']} tokens; the parts sum to the library's label value to "
        f"{one['sum_error']:.0e} of their size"
        for one in models.values()
    )
    draws = sorted({name for one in models.values() for name in one["draws"]})
    return _HEAD.format(subjects=subjects, draws=", ".join(draws))


# --- tables --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown: names at the left, numbers at the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _name(record: Figures) -> str:
    name: str = record["name"]
    return name if record["usable"] else f"*{name}*"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _ranked(record: Figures) -> str:
    value, low, high = record["spearman"]
    noise = "" if record["noise"] is None else f" ± {record['noise']:.2f}"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]{noise}"


def _front(one: Figures) -> str:
    rows = [
        (
            _name(r), f"{r['price']:.2f}", f"{r['price_beside_a_step']:.2f}", _ranked(r),
            f"{r['overlap'][0]:.2f}",
        )
        for r in worth(one["records"])
    ]  # fmt: skip
    head = (one["name"], "price", "beside a step's forward", "Spearman", "overlap")
    said = [r for r in one["records"] if r["usable"]]
    own = [
        (
            _name(r), f"{r['price']:.2f}", _ranked(r), f"{r['overlap'][0]:.2f}",
            _code(r.get("options", "")),
        )
        for r in worth(said)
    ]  # fmt: skip
    return (
        table(head, rows)
        + "\nOf what the scorer's options can name:\n\n"
        + table((one["name"], "price", "Spearman", "overlap", "options"), own)
    )


def _in(*families: str) -> Callable[[Figures], bool]:
    return lambda record: record["family"] in families


_CORRECTED = ("closed", "everything", "norms last", "in last", "weighted", "random", "chosen")
"""Words in the families of cheap corrections."""


def _corrections(record: Figures) -> bool:
    family: str = record["family"]
    return any(word in family for word in _CORRECTED)


def _beside(models: Figures, wanted: Callable[[Figures], bool]) -> str:
    """Settings one below the other, models beside each other."""
    tables = {
        one["name"]: {r["name"]: r for r in one["records"] if wanted(r)} for one in models.values()
    }
    names = list(dict.fromkeys(name for table in tables.values() for name in table))

    def cells(table: Figures, name: str) -> tuple[str, str, str]:
        record = table.get(name)
        if record is None:
            return ("", "", "")
        return f"{record['price']:.2f}", _ranked(record), f"{record['overlap'][0]:.2f}"

    head = ["setting", *(w for m in tables for w in (f"{m}: price", "Spearman", "overlap"))]
    rows = [(n, *(c for table in tables.values() for c in cells(table, n))) for n in names]
    return table(head, rows)


def _chosen(models: Figures) -> str:
    rows = [
        (
            one["name"], r["name"].removeprefix("label, chosen for "), f"{r['price']:.2f}",
            _ranked(r), f"{r['overlap'][0]:.2f}", ", ".join(map(str, r["layers"])),
            f"{r['lowest']}",
        )
        for one in models.values()
        for r in one["records"] if r["family"] == "label, chosen"
    ]  # fmt: skip
    head = ("model", "budget", "price", "Spearman", "overlap", "layers", "norms from layer")
    return table(head, rows)


def _sizes(models: Figures) -> str:
    """How large the parts are."""
    shown = ("attention", "MLP", "final norm", "embedding", "head")
    rows = []
    for one in models.values():
        sizes = one["sizes"]
        norms = [f"{n.removeprefix('norms ')}: {x:.2f}" for n, x in sizes.items() if "norms" in n]
        rows.append((one["name"], *(f"{sizes[n]:.2f}" for n in shown), ", ".join(norms)))
    note = "Mean size of each part over the mean size of the values (parts cancel):\n\n"
    return note + table(("", *shown, "norms of layers"), rows)


def _layers(one: Figures) -> str:
    by_name = {r["name"]: r for r in one["records"]}
    rows = []
    for count in range(1, one["depth"]):
        if f"label, last {count}" not in by_name:
            continue
        label = [by_name.get(f"label, {kind} {count}") for kind in ("last", "first", "spread")]
        others = [
            by_name.get(f"{e}, {kind} {count}")
            for e in ("direct", "alphatoken", "path")
            for kind in ("last", "spread")
        ]
        rows.append([str(count), *("" if r is None else _short(r) for r in (*label, *others))])
    every = [by_name[f"{e}, all linears"] for e in ("label", "direct", "alphatoken", "path")]
    cells = ["all", *3 * [_short(every[0])], *(_short(r) for r in every[1:] for _ in range(2))]
    head = [
        f"{one['name']}: K", "label last", "first", "spread", "direct last", "spread",
        "alphatoken last", "spread", "path last", "spread",
    ]  # fmt: skip
    note = "Spearman (price) of the linears of K layers.\n\n"
    return note + table(head, [*rows, cells])


def _short(record: Figures) -> str:
    return f"{record['spearman'][0]:.2f} ({record['price']:.2f})"


def _formats(one: Figures) -> str:
    formats = list(dict.fromkeys(name.rsplit("-", 1)[0] for name in one["draws"]))
    chosen = {r["name"]: r for r in one["records"] if r["usable"]}
    wanted = [
        "alphatoken, last 3", "direct, last 3", "path, last 3", "label, last 3",
        "label, spread 4", "direct, all linears", "alphatoken, all linears", "path, all linears",
        "label, all linears",
    ]  # fmt: skip
    wanted += [r["name"] for r in worth(one["records"]) if r["name"] not in wanted]
    by_name = {r["name"]: r for r in one["records"]} | chosen

    def cell(record: Figures, kind: str) -> str:
        found = [x for n, x in record["by_draw"].items() if n.rsplit("-", 1)[0] == kind]
        low, high = min(found), max(found)
        mean = sum(found) / len(found)
        return f"{mean:.2f}" if len(found) == 1 else f"{mean:.2f} ({low:.2f} to {high:.2f})"

    rows = [[_name(by_name[n]), *(cell(by_name[n], kind) for kind in formats)] for n in wanted]
    return "Spearman by kind of rows (lowest to highest draw).\n\n" + table(
        [one["name"], *formats], rows
    )


_ADAM = (
    "kinds", "lacking", "without the exact P", "label, all", "direct, all", "alphatoken, all",
    "path, all", "label, last", "label, spread", "label, spread closed", "label, last + closed",
    "label, random", "label, random, blocks",
)  # fmt: skip
"""Families of settings that Adam's table has."""


def _adam(models: Figures) -> list[str]:
    measured = {key: one for key, one in models.items() if one["adam"]}
    if not measured:
        return []
    parts = [
        "## Adam's step\n",
        "The same against the exact first-order effect on AdamW's next step: M = P o G with the "
        "derivative of its update at the valued rows' own gradient, second moments from "
        f"{STEPS} real steps (learning rate {RATE:g}, no decay). All settings "
        "here have that P but for those that say otherwise.\n",
    ]
    for one in measured.values():
        adam = one["adam"]
        parts.append(
            f"{one['name']}: {len(adam['draws'])} draws, {adam['rows']} rows, {adam['tokens']} "
            "tokens.\n"
        )
        chosen = [
            r
            for r in adam["records"]
            if r["family"] in _ADAM or r["name"].endswith((", last 3", ", last 10"))
        ]
        rows = [
            (_name(r), f"{r['price']:.2f}", _ranked(r), f"{r['overlap'][0]:.2f}") for r in chosen
        ]
        parts.append(table((one["name"], "price", "Spearman", "overlap"), rows))
        front = [
            (_name(r), f"{r['price']:.2f}", _ranked(r), f"{r['overlap'][0]:.2f}")
            for r in worth([r for r in adam["records"] if r["family"] != "without the exact P"])
        ]
        parts.append("What is worth its price:\n")
        parts.append(table((one["name"], "price", "Spearman", "overlap"), front))
    return parts
