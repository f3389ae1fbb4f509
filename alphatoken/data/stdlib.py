"""Real rows that every machine has: functions and topics of the Python standard library.

A function gives a row: its signature and docstring are the prompt, its body is the response.
``pydoc_data.topics``, the text of ``help("...")``, gives plain text. Nothing is fetched. A draw
is fixed by its arguments and the Python version: another version has other functions.

``python -m alphatoken.data.stdlib FOLDER`` writes them as files for the command line.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from alphatoken.data.pairs import Pair
from alphatoken.data.rows import Row, Turn
from alphatoken.data.split import normalise
from alphatoken.errors import ConfigError
from alphatoken.support.storage import write_jsonl

# Packages that are no library code, or that a distribution may leave out.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
_PROMPT = range(40, 1200)  # characters
_RESPONSE = range(40, 1600)
_PASSAGE = range(150, 2000)
_FILES = ("train", "validation", "test", "retention", "pairs")


def code_rows(count: int, seed: int = 0) -> list[Row]:
    """``count`` functions: signature and docstring as prompt, body as response.

    No two rows share a prompt or a response, so that slices of one draw share nothing.

    Raises:
        ConfigError: fewer functions than that fit the limits of length.
    """
    return list(_code_rows(count, seed))


@cache
def _code_rows(count: int, seed: int) -> tuple[Row, ...]:
    draw = random.Random(seed)
    files = _library()
    draw.shuffle(files)
    # A file's functions are alike: a small draw takes few of each.
    most = 1 + count // 80
    texts: set[str] = set()
    functions: list[tuple[str, str, str]] = []
    for path in files:
        count_of_file = 0
        for place, prompt, response in _functions(path):
            keys = {normalise(prompt), normalise(response)}
            if count_of_file < most and not keys & texts:
                texts |= keys
                count_of_file += 1
                functions.append((place, prompt, response))
        if len(functions) >= count:
            break
    _require(count, len(functions), "functions")
    draw.shuffle(functions)
    return tuple(
        Row(i, place, (Turn("user", prompt), Turn("assistant", response)))
        for i, (place, prompt, response) in enumerate(functions[:count])
    )


def code_pairs(count: int, seed: int = 0) -> list[Pair]:
    """``count`` preference pairs: the function's own body is chosen, another's rejected.

    Raises:
        ConfigError: as for :func:`code_rows`, which holds the same functions in the same order.
    """
    rows = code_rows(2 if count == 1 else count, seed)
    return [
        Pair(row.index, row.place, row.turns[:1], row.turns[1:], other.turns[1:])
        for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ][:count]


def text_rows(count: int, seed: int = 0) -> list[Row]:
    """``count`` paragraphs of ``pydoc_data.topics``, no two alike: responses to no prompt.

    Raises:
        ConfigError: fewer paragraphs than that fit the limits of length.
    """
    from pydoc_data.topics import topics

    texts = {
        normalise(text): (f"topic {name!r}", textwrap.dedent(text).strip())
        for name, topic in sorted(topics.items())
        for text in topic.split("\n\n")
        if len(text.strip()) in _PASSAGE
    }
    passages = list(texts.values())
    _require(count, len(passages), "paragraphs")
    random.Random(seed).shuffle(passages)
    return [
        Row(i, place, (Turn("assistant", text),))
        for i, (place, text) in enumerate(passages[:count])
    ]


def write_files(
    folder: str | Path, *, train: int = 1000, held_out: int = 200, seed: int = 0
) -> None:
    """Write ``train``, ``validation``, ``test``, ``retention`` and ``pairs`` as ``.jsonl`` files.

    Training, validation and test rows are of one draw and share nothing; ``validation``,
    ``test`` and ``retention`` (plain text, in the field ``text``) hold ``held_out`` rows each,
    ``pairs`` the training rows as preference pairs. Each file is written whole or not at all.

    Raises:
        ConfigError: a file of that name is there; it may hold rows of the caller's own.
    """
    folder = Path(folder)
    there = [path for name in _FILES if (path := folder / f"{name}.jsonl").exists()]
    if there:
        raise ConfigError(
            "the rows of the standard library would replace a file",
            got=str(there[0]),
            remedy="name another folder, or use the files that are there",
        )
    folder.mkdir(parents=True, exist_ok=True)
    rows = code_rows(train + 2 * held_out, seed)
    records = [{"prompt": row.prompt, "response": row.response} for row in rows]
    pairs = code_pairs(len(rows), seed)[:train]
    contents: tuple[list[dict[str, str]], ...] = (
        records[:train],
        records[train : train + held_out],
        records[train + held_out :],
        [{"text": row.response} for row in text_rows(held_out, seed)],
        [
            {name: getattr(pair, name)[0].text for name in ("prompt", "chosen", "rejected")}
            for pair in pairs
        ],
    )
    for name, content in zip(_FILES, contents, strict=True):
        write_jsonl(folder / f"{name}.jsonl", content)


def _library() -> list[Path]:
    paths: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # others are not entered
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths)


def _functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """(place, prompt, response) of each function of a file whose lengths are within the limits."""
    with tokenize.open(path) as file:
        source = file.read()
    lines = [f"{line}\n" for line in source.split("\n")]  # not at form feeds, as ast counts them
    for node in _definitions(ast.parse(source).body):
        if len(node.body) < 2 or ast.get_docstring(node, clean=False) is None:
            continue
        begin, end = node.body[0].end_lineno, node.end_lineno
        assert begin is not None
        assert end is not None
        prompt = _text(lines[node.lineno - 1 : begin])
        response = _text(lines[begin:end])
        if response[:1].isspace():
            continue  # a text over several lines that is indented less than the code around it
        if len(prompt) in _PROMPT and len(response) in _RESPONSE:
            yield f"{path.name}, line {node.lineno}", prompt, response


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    # What is defined inside a function is no row of its own.
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body)


def _text(lines: Sequence[str]) -> str:
    return textwrap.dedent("".join(lines)).strip("\n").rstrip()


def _require(count: int, available: int, what: str) -> None:
    if not 0 < count <= available:
        raise ConfigError(
            f"the standard library does not give that many {what}",
            got=f"{count} asked for, {available} found",
            remedy=f"ask for 1 to {available}",
        )


def main() -> None:
    """Read the one argument and write."""
    parser = argparse.ArgumentParser(prog="python -m alphatoken.data.stdlib", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the files")
    try:
        write_files(parser.parse_args().folder)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
