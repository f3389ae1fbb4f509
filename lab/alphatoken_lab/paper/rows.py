"""Rows of the laptop scale: what each grid reads from ``$PAPER_ROWS``, cut from a few sources.

    source     where no file is named                      files that are cut from it
    train      sft: functions of the standard library      train, validation, fisher, target;
               metamath: questions about Python's topics   and curated, or oracle for dpo
               dpo: preference pairs of functions
    target     (none: cut from train)                      target
    warm       for dpo: questions about Python's topics    warm
    retention  paragraphs of Python's documentation        retention
    probes     for sft: other paragraphs, under their topic  probes

No two files of a grid share a row. Rows longer than ``LETTERS`` are left out, not cut; of a pair
the longer response counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.data import pair_of, read_records, row_of
from alphatoken.data.stdlib import code_pairs, code_rows, text_rows
from alphatoken.errors import DataError
from alphatoken.support.storage import replacing_folder, write_jsonl

Record = dict[str, Any]

LETTERS = 480
"""Longest row: some 130 tokens, so that little is cut at 160."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "sft": {"train": 96, "validation": 64, "fisher": 16, "curated": 48, "target": 24},
    "metamath": {"train": 96, "validation": 64, "fisher": 16, "curated": 48, "target": 24},
    "dpo": {"train": 64, "validation": 32, "fisher": 8, "oracle": 24, "target": 24},
}
"""Rows of each file that is cut from the source ``train``; of ``target`` also from its own."""

OTHER = {"retention": 16, "warm": 48, "probes": 64}
"""Rows of the files that have a source of their own."""

SOURCES: Mapping[str, tuple[str, ...]] = {
    "sft": ("train", "target", "retention", "probes"),
    "metamath": ("train", "target", "retention"),
    "dpo": ("train", "target", "warm", "retention"),
}

_DRAWN = 1600
"""Functions that are looked at; a quarter of them is short enough."""


def write_rows(
    folder: Path, grid: str, files: Mapping[str, str | Path] | None = None, *, seed: int = 0
) -> None:
    """Write the files of a grid, anew and all of them, or none.

    Args:
        folder: where they go.
        grid: "sft", "metamath" or "dpo".
        files: source -> file of rows, in place of the standard library's.
        seed: of the draw.

    Raises:
        DataError: a file cannot be read, a row of it is no row (pair), or a source has too few
            rows that are short enough.
    """
    generator = random.Random(f"paper {grid} {seed}")
    train = {"sft": _functions, "metamath": _questions, "dpo": _pairs}[grid]
    library: Mapping[str, Callable[[], list[Record]]] = {
        "train": train, "warm": _questions, "retention": _paragraphs, "probes": _others
    }  # fmt: skip
    users = {name: path for name, path in (files or {}).items() if name in SOURCES[grid]}
    drawn: dict[str, list[Record]] = {}
    for name in SOURCES[grid]:
        if name in users:
            drawn[name] = _fitting(_read(users[name], name, grid), generator)
        elif name in library:  # the target is else cut from the training rows
            drawn[name] = _fitting(library[name](), generator)
    parts: dict[str, list[Record]] = {}
    for source, rows in drawn.items():
        sizes = {source: SIZES[grid].get(source) or OTHER.get(source, 0)}
        if source == "train":
            sizes = {n: size for n, size in SIZES[grid].items() if n == "train" or n not in drawn}
        parts |= _cut(rows, sizes, users.get(source, "the standard library"))
    with replacing_folder(folder) as partial:
        for name, rows in parts.items():
            write_jsonl(partial / f"{name}.jsonl", rows)


def _read(path: str | Path, name: str, grid: str) -> Iterator[Record]:
    """Records of a user's file, each of which can be read as the cells will read it."""
    pairs = grid == "dpo" and name in ("train", "target")
    for i, (place, record) in enumerate(read_records(path)):
        if pairs:
            pair_of(record, i, place)
        else:
            row_of(record, i, place)
        yield dict(record)


def _cut(rows: Sequence[Record], sizes: Mapping[str, int], source: Any) -> dict[str, list[Record]]:
    needed = sum(sizes.values())
    if len(rows) < needed:
        raise DataError(
            "too few rows for the table",
            got=f"{len(rows)} rows of at most {LETTERS} letters in {source}, {needed} needed",
            remedy="a larger file, or one with shorter rows",
        )
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name], at = list(rows[at : at + size]), at + size
    return parts


def _fitting(rows: Iterable[Record], generator: random.Random) -> list[Record]:
    short = [row for row in rows if _letters(row) <= LETTERS]
    return generator.sample(short, len(short))


def _letters(row: Record) -> int:
    if "chosen" in row:
        return max(len(str(row[name])) for name in ("chosen", "rejected"))
    return sum(len(value) for value in row.values() if isinstance(value, str))


# --- the standard library -----------------------------------------------------------------------


def _functions() -> list[Record]:
    return [{"prompt": row.prompt, "response": row.response} for row in code_rows(_DRAWN)]


def _pairs() -> list[Record]:
    return [
        {
            "prompt": pair.prompt[0].text,
            "chosen": pair.chosen[0].text,
            "rejected": pair.rejected[0].text,
        }
        for pair in code_pairs(_DRAWN)
    ]


def _questions() -> list[Record]:
    """The other paragraphs, each asked for by its topic and its first words."""
    questions: dict[str, Record] = {}
    for row in text_rows(_PARAGRAPHS)[_PARAGRAPHS // 3 :]:
        words = row.response.split(" ")
        if len(words) > 12:
            prompt = (
                f"Python, {row.place}: how does the text go on that begins "
                f"{' '.join(words[:6])!r}?"
            )  # several paragraphs of a topic may begin alike
            questions.setdefault(prompt, {"prompt": prompt, "response": " ".join(words[6:])})
    return list(questions.values())


def _paragraphs() -> list[Record]:
    return [{"text": row.response} for row in text_rows(_PARAGRAPHS)[: _PARAGRAPHS // 6]]


def _others() -> list[Record]:
    rows = text_rows(_PARAGRAPHS)[_PARAGRAPHS // 6 : _PARAGRAPHS // 3]
    return [{"prompt": f"Python, {row.place}:", "response": row.response} for row in rows]


_PARAGRAPHS = 600
"""A sixth of them measures retention, a sixth are probes, the others are asked for."""
