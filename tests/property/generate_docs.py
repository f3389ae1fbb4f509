"""The pages of claims and of kills, which each build of the documentation writes anew.

The table of claims is ``claims.ROWS`` with the properties' docstrings and the catalogue's mutants.
The kill matrix is the catalogue with what the mutants did when they were last hunted, by
``python -m tests.property.generate_docs kills`` (minutes), which writes docs/kill-matrix.json.
"""

from __future__ import annotations

import ast
import functools
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.property.claims import Row as ClaimRow
    from tests.property.mutation import Kill, Mutant

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
CLAIMS_PAGE = DOCS / "claims.md"
KILLS_PAGE = DOCS / "kill-matrix.md"
KILLS = DOCS / "kill-matrix.json"
COMMAND = "python -m tests.property.generate_docs"


# --- claims: a table, and what the sources say of it --------------------------------------------


FOLDERS = ("property", "lab")


@functools.cache
def _texts() -> dict[str, str]:
    """File of properties and what they stand on, without its ending -> its text."""
    paths = [path for name in FOLDERS for path in (HERE.parent / name).glob("*.py")]
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(paths)}


@functools.cache
def properties() -> dict[str, tuple[str, str]]:
    """Every test, which is what a row may name -> its file, and its docstring."""
    return {
        node.name: (file, ast.get_docstring(node) or "")
        for file, text in _texts().items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def used_by(file: str) -> str:
    """The text of a file of tests and of all that it imports of these folders."""
    texts, found, waiting = _texts(), set[str](), {file}
    while waiting:
        found |= (new := waiting & set(texts))
        named = {word for one in new for line in _IMPORT.findall(texts[one])
                 for word in re.findall(r"\w+", line)}  # fmt: skip
        waiting = named - found
    return "\n".join(texts[one] for one in sorted(found))


_IMPORT = re.compile(r"^from tests\.(?:property|lab)(\.\w+| import (?:\([^)]*\)|.*))", re.M)


def cited() -> set[str]:
    """Equation labels that documents and docstrings cite: "eq. app_via_t", "eqs. a_b, c_d"."""
    texts = [
        *DOCS.glob("*.md"),
        DOCS.parent / "README.md",
        *DOCS.parent.glob("alphatoken/**/*.py"),
        *DOCS.parent.glob("lab/**/*.py"),
    ]
    found: set[str] = set()
    for path in texts:
        if path == CLAIMS_PAGE:
            continue
        for listed in _CITED.findall(path.read_text(encoding="utf-8")):
            found |= {label for label in re.findall(r"\w+", listed) if "_" in label}
    return {label for label in found if re.fullmatch(r"[A-Za-z]+(_[A-Za-z0-9]+)+", label)}


_LABEL = r"[A-Za-z0-9]+_\w+"
_CITED = re.compile(rf"\b[Ee]qs?\.\s+\(?`*(?:eq:)?({_LABEL}(?:`*(?:,| and)\s+`*(?:eq:)?{_LABEL})*)")


def claims_text() -> str:
    """The page of claims."""
    from tests.property.catalogue import MUTANTS
    from tests.property.claims import EQUATIONS, ROWS

    killed: dict[str, list[str]] = {}
    for mutant in MUTANTS:
        for one in mutant.claims:
            killed.setdefault(one.name.partition("::")[2], []).append(mutant.name)
    head = ["Claim", "Oracle", "Property", "Mutants", "Kind"]
    return "\n".join(
        [
            "# Claims\n",
            "Each line is a statement of the paper or of this library, and what proves it. The "
            "claim begins with the labels of the paper's equations that it proves, or with the "
            "name of a method. The oracle is a slow, obvious function of `alphatoken.oracle`, "
            "compared with or the scale of a tolerance, or what stands in brackets. The property "
            "is a function of `tests/property`; the mutants are the planted errors by which it "
            "was seen to fail ([kill matrix](kill-matrix.md)). The kind says what the quantity "
            "is: *exact*; *unbiased*, so that its mean is exact; or *approximate*, a method's "
            "approximation, which is then computed exactly as it is defined.\n",
            table(head, [_claim_row(row, killed.get(row.name, [])) for row in ROWS]),
            "## Equations of the paper\n",
            table(["Equation", "Proved by"], [_equation_row(*one) for one in EQUATIONS.items()]),
        ]
    )


def _equation_row(label: str, by: tuple[str, ...] | str) -> list[str]:
    proof = f"not proved: {text(by)}" if isinstance(by, str) else ", ".join(map(code, by))
    return [code(label), proof]


def _claim_row(row: ClaimRow, mutants: list[str]) -> list[str]:
    from tests.property.claims import EQUATIONS

    file, docstring = properties()[row.name]
    said = " ".join(docstring.partition("\n\n")[0].split())
    words = row.name.partition("_")[2].replace("_", " ")
    labels = ", ".join(code(x) if x in EQUATIONS else text(x) for x in row.labels)
    oracles = [text(o) if o.startswith("(") else code(o) for o in row.oracles]
    return [
        (f"{labels}: " if labels else "") + text(said or f"{words[0].upper()}{words[1:]}."),
        ", ".join(oracles),
        code(f"{file}.py::{row.name}"),
        ", ".join(map(code, dict.fromkeys(mutants))),
        row.kind,
    ]


# --- Markdown ------------------------------------------------------------------------------------


def code(source: str) -> str:
    """Inline code, also inside a table."""
    ticks = "``" if "`" in source else "`"
    return f"{ticks}{source}{ticks}".replace("|", "\\|")


def text(sentence: str) -> str:
    """Prose with ``code`` in it, safe in a table: nothing else is markup."""
    pieces = re.split(r"``?([^`]+)``?", sentence)
    return "".join(
        code(piece) if index % 2 else re.sub(r"([\\*_\[\]<>|$#{}])", r"\\\1", piece)
        for index, piece in enumerate(pieces)
    )


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# --- kills ---------------------------------------------------------------------------------------


def kills_text() -> str:
    """The kill matrix, of what the last hunt found (``docs/kill-matrix.json``)."""
    from tests.property.catalogue import LISTED, ROOMS

    found = json.loads(KILLS.read_text(encoding="utf-8"))
    return "\n".join(
        [
            "# Kill matrix\n",
            "A mutant is the library with a few words replaced. It is *killed* when a property "
            "fails by its own assertion, the replaced code ran, the same example passes on the "
            "library as it is, and the library's own run-time proofs were switched off meanwhile "
            "(but for mutants of those proofs). Beside each property stands the number of the "
            "example at which it failed (of six through a whole model, else of twenty, drawn with "
            "the structure that the mutant needs). The last column says whether the library's "
            "proofs refuse the mutant by themselves, before any value is returned.\n",
            "## Errors that must be noticed\n",
            _kill_table(LISTED, found),
            *(f"## {title}\n\n{_kill_table(room, found)}" for title, room in ROOMS.items()),
        ]
    )


def _kill_table(mutants: Sequence[Mutant], found: Mapping[str, Any]) -> str:
    head = ["Mutant", "What it stands for", "Change", "Killed by", "Own proofs"]
    return table(head, [_kill_row(mutant, found[mutant.name]) for mutant in mutants])


def _kill_row(mutant: Mutant, found: Mapping[str, Any]) -> list[str]:
    changes = [
        f"{code(edit.target)}: {_words(edit.old)} → {_words(edit.new)}" for edit in mutant.edits
    ]
    return [
        code(mutant.name),
        text(mutant.sentence),
        "; ".join(changes),
        ", ".join(f"{code(name)} ({number})" for name, number in found["killed_by"]),
        ", ".join(map(code, found.get("refused_by", ()))) or "no",
    ]


def hunted() -> dict[str, Any]:
    """Hunt every mutant, in as many processes as there are cores. Raises if one survives."""
    import torch

    from tests.property.catalogue import MUTANTS

    torch.set_num_threads(1)  # one a process; with more they wait for each other, six times as long
    names = [mutant.name for mutant in MUTANTS]
    found: dict[str, Any] = {}
    surviving: list[str] = []
    begun = time.monotonic()
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=10) as pool:
        for number, (name, kills) in enumerate(pool.imap(_kills, names), 1):
            dead = [kill for kill in kills if not isinstance(kill, str)]
            found[name] = {"killed_by": [[kill.claim, kill.example] for kill in dead]}
            if refused := sorted({kill.refused for kill in dead if kill.refused}):
                found[name]["refused_by"] = refused
            surviving += [f"'{name}' survives {kill}" for kill in kills if isinstance(kill, str)]
            left = (time.monotonic() - begun) / number * (len(names) - number)
            print(f"{number} of {len(names)}, {left:.0f} s left: {name}", file=sys.stderr)
    if surviving:
        raise SystemExit("a property is missing: " + "; ".join(surviving))
    return found


def write_kills(found: Mapping[str, Any]) -> None:
    """A line a mutant, so that changes can be read."""
    lines = [f" {json.dumps(name)}: {json.dumps(kills)}" for name, kills in found.items()]
    KILLS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _kills(name: str) -> tuple[str, list[Kill | str]]:
    """(mutant, its kills; for a claim that does not kill it, why)."""
    from tests.property.catalogue import BY_NAME
    from tests.property.mutation import hunt

    found: list[Kill | str] = []
    for one in BY_NAME[name].claims:
        try:
            found.append(hunt(BY_NAME[name], one, refusals=True) or one.name)
        except Exception as error:  # all that is to be mended is said at the end, at once
            found.append(f"{one.name}, which stops: {error!r:.200}")
    return name, found


def _words(source: str) -> str:
    return code(" ".join(source.split())) if source else "nothing"  # a table's row is one line


def main(words: list[str]) -> None:
    """Write both pages; or, with the word ``kills``, hunt all mutants for them (minutes)."""
    if words == ["kills"]:
        write_kills(hunted())
    elif words:
        raise SystemExit(f"{COMMAND} [kills]")
    else:
        CLAIMS_PAGE.write_text(claims_text(), encoding="utf-8")
        KILLS_PAGE.write_text(kills_text(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
