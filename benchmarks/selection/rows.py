"""Rows of the tasks: real ones, of which no two parts of a task share any, written as JSONL.

    clean            mathematics (GSM8K)
    noisy-words      the same, 30 % of the words of each response replaced by words of others
    noisy-responses  the same, 30 % of the responses exchanged between rows
    mixed            half of the rows, and as many general instructions (dolly)
    code             Python problems (MBPP)
    library-words    functions of the standard library, 30 % of their words replaced
    pairs            preferences (alpaca_eval), and with 25 % of them flipped
    oracle-*         what of a dirty task is clean: the most that any selection could find
    general          other general instructions than those that retention is measured on
    long-*           all other rows of the same kinds, for runs of hundreds of steps
    long-words-10    those with 10 % of the words replaced
    long-cut         those with half of the responses cut in their middle
    library-choosing functions by whose loss a race is decided
    validation-*     more clean rows, of which the first are those of validation

Every task keeps its target, validation and selection rows clean. Retention is measured on general
instructions and stories that nothing is trained on.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from alphatoken.data.stdlib import code_rows
from alphatoken.support.storage import write_jsonl
from benchmarks.data import cut, read

Row = dict[str, Any]

LETTERS = 480
"""Longest prompt and response together: some 130 tokens, so that nothing is cut at 160."""

SIZES = {"train": 320, "validation": 16, "choosing": 16}
"""Rows: trained on, valued against, and those by whose loss a learning rate is chosen."""

TARGET, GENERAL, STORIES = 40, 20, 8
DIRT = 0.3
LITTLE_DIRT, LITTLE = 0.1, "long-words-10.jsonl"
FLIPPED = 0.25


def write_rows(folder: Path, seed: int = 0) -> None:
    """All files of the grid, anew; another seed draws other rows and other dirt."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"selection {seed}")
    parts = cut(_shuffled(mathematics("train"), generator), **SIZES)
    general = cut(
        _shuffled(general_instructions(), generator), retention=GENERAL, train=SIZES["train"] // 2
    )
    target = _shuffled(mathematics("test"), generator)[:TARGET]
    for name in ("validation", "choosing"):
        write_jsonl(folder / f"{name}.jsonl", parts[name])
    write_jsonl(folder / "target.jsonl", target)
    rows = parts["train"]
    half = len(rows) // 2
    words, marks = replaced(rows, DIRT, generator)
    swapped, dirty = exchanged(rows, DIRT, generator)
    clean = [row for row, bad in zip(rows, dirty, strict=True) if not bad]
    mixed = _shuffled([*rows[:half], *general["train"]], generator)
    write_jsonl(folder / "clean.jsonl", rows)
    write_jsonl(folder / "noisy-words.jsonl", words)
    write_jsonl(folder / "noisy-words-marks.jsonl", marks)
    write_jsonl(folder / "noisy-responses.jsonl", swapped)
    write_jsonl(folder / "noisy-responses-marks.jsonl", ({"exchanged": int(bad)} for bad in dirty))
    write_jsonl(folder / "oracle-noisy-responses.jsonl", clean)
    write_jsonl(folder / "mixed.jsonl", mixed)
    write_jsonl(folder / "oracle-mixed.jsonl", rows[:half])
    for name in ("clean", "noisy-words"):
        write_jsonl(folder / f"oracle-{name}.jsonl", rows)
    write_jsonl(folder / "general.jsonl", general["train"][:16])
    write_jsonl(folder / "retention.jsonl", [*general["retention"], *_stories(generator)])
    _code(folder, generator)
    _pairs(folder, generator)
    excluded = [*parts["validation"], *parts["choosing"], *target, *general["retention"]]
    _long(folder, {row["prompt"] for row in excluded}, parts["validation"], seed)
    _of_library(folder, seed)
    write_later(folder, seed)


def write_later(folder: Path, seed: int = 0) -> None:
    """Files that folders of an earlier version lack, each by a draw of its own: others stay."""
    for name, made in (
        (LITTLE, _little_dirt),
        ("long-cut.jsonl", _cut_short),
        ("library-choosing.jsonl", _library_choosing),
    ):
        if not (path := folder / name).exists():
            write_jsonl(path, made(folder, seed))


def _little_dirt(folder: Path, seed: int) -> list[Row]:
    """The clean rows of long runs with little dirt."""
    generator = random.Random(f"long words 10 {seed}")
    words, _ = replaced(_stored(folder, "long-clean"), LITTLE_DIRT, generator)
    return words


def _cut_short(folder: Path, seed: int) -> list[Row]:
    """Those rows, each second response ending after half of its words."""
    generator = random.Random(f"long cut {seed}")
    rows = _stored(folder, "long-clean")
    chosen = set(generator.sample(range(len(rows)), len(rows) // 2))
    return [
        {**row, "response": _half(row["response"])} if i in chosen else row
        for i, row in enumerate(rows)
    ]


def _half(text: str) -> str:
    """Up to the end of the middle word."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    return text[: ends[(len(ends) - 1) // 2]] if ends else text


def _library_choosing(folder: Path, seed: int) -> list[Row]:
    """Functions that no other part has."""
    parts = ("library-validation", "library-target", "library-words")
    # Training rows keep their prompt: only words of their responses are replaced.
    used = {row["prompt"] for part in parts for row in _stored(folder, part)}
    rows = _fitting(library(2000, seed), 360)
    return [row for row in rows if row["prompt"] not in used][: SIZES["choosing"]]


def _stored(folder: Path, name: str) -> list[Row]:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _long(folder: Path, excluded: set[str], validation: Sequence[Row], seed: int) -> None:
    """All rows that are not held, for runs of hundreds of steps, and more clean ones."""
    generator = random.Random(f"long {seed}")
    drawn = _shuffled(mathematics("train"), generator)
    rows = [row for row in drawn if row["prompt"] not in excluded]
    words, marks = replaced(rows, DIRT, generator)
    swapped, _ = exchanged(rows, DIRT, generator)
    others = [row for row in general_instructions() if row["prompt"] not in excluded]
    others = _shuffled(others, generator)[: len(rows) // 2]
    more = [row for row in mathematics("test") if row["prompt"] not in excluded]
    more = [*validation, *_shuffled(more, generator)]
    write_jsonl(folder / "long-clean.jsonl", rows)
    write_jsonl(folder / "long-words.jsonl", words)
    write_jsonl(folder / "long-words-marks.jsonl", marks)
    write_jsonl(folder / "long-responses.jsonl", swapped)
    write_jsonl(folder / "long-mixed.jsonl", _shuffled([*rows[: len(others)], *others], generator))
    for count in (64, 256):
        write_jsonl(folder / f"validation-{count}.jsonl", more[:count])


def _of_library(folder: Path, seed: int) -> None:
    """Functions for runs of 120 steps, two rows a step."""
    generator = random.Random(f"library {seed}")
    sizes = {"validation": SIZES["validation"], "target": TARGET, "train": 320}
    parts = cut(_fitting(library(2000, seed), 360), **sizes)
    for name in ("validation", "target"):
        write_jsonl(folder / f"library-{name}.jsonl", parts[name])
    words, _ = replaced(parts["train"], DIRT, generator)
    write_jsonl(folder / "library-words.jsonl", words)


def library(count: int, seed: int) -> list[Row]:
    """Functions of this Python's standard library; other versions have others."""
    rows = code_rows(count, seed)
    return [{"prompt": row.turns[0].text, "response": row.turns[1].text} for row in rows]


def replaced(
    rows: Sequence[Row], share: float, generator: random.Random
) -> tuple[list[Row], list[Row]]:
    """Each word of each response replaced with this chance by a word of any response.

    Also which words were: ``{"replaced": [0, 1, ...]}`` a row.
    """
    every = [word for row in rows for word in row["response"].split()]
    dirty_rows, marks = [], []
    for row in rows:
        parts = re.split(r"(\s+)", row["response"])
        bad = [bool(part.strip()) and generator.random() < share for part in parts]
        text = "".join(
            generator.choice(every) if b else part for part, b in zip(parts, bad, strict=True)
        )
        dirty_rows.append({**row, "response": text})
        words = [int(b) for part, b in zip(parts, bad, strict=True) if part.strip()]
        marks.append({"replaced": words})
    return dirty_rows, marks


def exchanged(
    rows: Sequence[Row], share: float, generator: random.Random
) -> tuple[list[Row], list[bool]]:
    """This share of the rows with one another's responses, and which; none keeps its own."""
    chosen = generator.sample(range(len(rows)), round(share * len(rows)))
    swapped = [dict(row) for row in rows]
    for at, other in zip(chosen, [*chosen[1:], chosen[0]], strict=True):
        swapped[at]["response"] = rows[other]["response"]
    dirty = set(chosen)
    return swapped, [i in dirty for i in range(len(rows))]


def mathematics(part: str) -> list[Row]:
    rows = read(f"gsm8k/{part}.jsonl")
    return _fitting({"prompt": r["question"], "response": _answer(r["answer"])} for r in rows)


def _answer(text: str) -> str:
    """Without the calculator's marks, such as ``<<48/2=24>>``, which no reader sees."""
    return re.sub(r"<<.*?>>", "", text)


def general_instructions() -> list[Row]:
    instructions = []
    for row in read("dolly_hhrlhf/train.jsonl"):
        _, _, rest = row["prompt"].partition("### Instruction:\n")
        instruction, marked, _ = rest.partition("### Response:")
        if marked and len(row["response"]) > 40:
            instructions.append(
                {"prompt": instruction.strip(), "response": row["response"].strip()}
            )
    return _fitting(instructions)


def _stories(generator: random.Random) -> list[Row]:
    rows = _shuffled(read("tinystories/stories.jsonl"), generator)
    return [{"text": row["text"][:LETTERS]} for row in rows[:STORIES]]


def _code(folder: Path, generator: random.Random) -> None:
    """MBPP's own training and test files."""

    sizes = {name: SIZES[name] for name in ("choosing", "validation")}
    parts = cut(_shuffled(programs("train"), generator), **sizes, train=None)
    for name, rows in parts.items():
        write_jsonl(folder / f"code-{name}.jsonl", rows)
    tests = _shuffled(programs("test"), generator)
    write_jsonl(folder / "code-target.jsonl", tests[:TARGET])


def programs(part: str) -> list[Row]:
    """Rows of MBPP's file, each asking with its first test."""
    return _fitting(
        {
            "prompt": f"{r['text']}\nYour code should pass: {r['test_list'][0]}",
            "response": r["code"].replace("\r\n", "\n"),
        }
        for r in read(f"mbpp/{part}.jsonl")
    )


def preferences() -> list[Row]:
    """alpaca_eval's pairs that are short and have a clear preference."""
    return [row for row in map(_preference, read("alpaca_eval/pairs.jsonl")) if row]


def _preference(row: Row) -> Row | None:
    """The pair; None where none of the two is the better: 1 and 2 name that."""
    both = row["output_1"].strip(), row["output_2"].strip()
    if row["preference"] not in (1, 2) or not all(both) or len(max(both, key=len)) >= LETTERS:
        return None
    better = int(row["preference"]) - 1
    prompt = row["instruction"].strip()
    return {"prompt": prompt, "chosen": both[better], "rejected": both[1 - better]}


def _pairs(folder: Path, generator: random.Random) -> None:
    """Pairs with a clear preference."""
    drawn = map(_preference, _shuffled(read("alpaca_eval/pairs.jsonl"), generator))
    preferred = [row for row in drawn if row]
    parts = cut(preferred, choosing=20, validation=32, target=48, train=None)
    for name, rows in parts.items():
        write_jsonl(folder / f"pairs-{name}.jsonl", rows)
    flipped = set(
        generator.sample(range(len(parts["train"])), round(FLIPPED * len(parts["train"])))
    )
    turned = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if i in flipped else row
        for i, row in enumerate(parts["train"])
    ]
    write_jsonl(folder / "pairs-flipped.jsonl", turned)
    straight = [row for i, row in enumerate(parts["train"]) if i not in flipped]
    write_jsonl(folder / "oracle-pairs-flipped.jsonl", straight)


def _fitting(rows: Iterable[Row], letters: int = LETTERS) -> list[Row]:
    return [row for row in rows if len(row["prompt"]) + len(row["response"]) <= letters]


def _shuffled(rows: Sequence[Row], generator: random.Random) -> list[Row]:
    return generator.sample(list(rows), len(rows))
