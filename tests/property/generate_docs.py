"""The page of claims, which each build of the documentation writes anew.

A test that proves an equation or a statement says so in its docstring::

    Proves: eq. phi_tgt_dir (exact), against ``diagonal``, autograd.

In that order: labels of the paper's equations, the name of a method, or the statement; the kind of
the quantity; the oracles of ``alphatoken.oracle`` in double backticks, and other truths in words.
The kind is of the quantity, not of the check, which is always to rounding: ``exact``; ``unbiased``
(its mean is exact); ``approximate`` (the method's own approximation, computed as it is defined).

What mutants did when they were last hunted stands in docs/kill-matrix.json, which
``python -m tests.property.generate_docs kills`` writes (minutes); ``kills NAME...`` hunts these
mutants alone, and keeps the lines of the others.
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
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.property.mutation import Kill, Mutant

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "claims.md"
KILLS = DOCS / "kill-matrix.json"
COMMAND = "python -m tests.property.generate_docs"


_LABELS = """
composite_val grad_alignment causal_decomp retention_taylor fisher_proxy mc_fisher gproxy
phi_proxy phi_tgt_dir phi_tgt_causal V_layer ap_gdp phi_total sft_masked_loss dpo_masked_loss
val_objective train_objective global_utility_def masked_update local_utility_def
first_order_delta shapley_closed_form_step composite_val_obj decomposition app_causal_decomp
app_two_paths app_score_path app_exact_jacobian app_via_t app_dpo_unroll app_rank1
app_rank1_factor app_aa_direct app_causal_rank1 app_aa_causal app_ap_gdp app_score_residual
app_value_path_bound app_taylor app_proxy_bound app_F_ret_dagger app_gap_decomp app_wasser
app_final_bound
"""
EQUATIONS = tuple(_LABELS.split())
"""Every numbered equation of the paper, by its label."""
NOT_PROVED = {
    "retention_taylor": "an approximation that leaves the first-order term out; `app_taylor`, with "
    "this term, is proved",
    "val_objective": "the best mask of a whole training is never computed",
    "train_objective": "the best mask of a whole training is never computed",
    "global_utility_def": "the utility of a whole training is never computed; that of one step, "
    "`local_utility_def`, is",
    "app_dpo_unroll": "the sum that it rearranges is not the gradient "
    "(`test_the_papers_routing_does_not_add_up_to_the_gradient`; row 1 of the gaps)",
    "app_rank1": "false as written: the loss of one token uses a weight at every position before "
    "it (row 2 of the gaps); the sum over positions is `test_outer_sum_is_the_weight_gradient`",
    "app_final_bound": "its parts are (`app_proxy_bound`, `app_gap_decomp`, `app_wasser`); the "
    "one inequality that joins them is not evaluated",
}
"""Equations that no test proves, and why none does."""
KINDS = ("exact", "unbiased", "approximate")


class Claim(NamedTuple):
    """What a test proves, as its docstring says."""

    name: str
    labels: tuple[str, ...]
    sentence: str
    kind: str
    against: str

    @property
    def oracles(self) -> set[str]:
        """Functions of ``alphatoken.oracle`` among what it is compared with."""
        return set(re.findall(r"``(\w+)``", self.against))


# --- claims: what the tests' docstrings say ------------------------------------------------------


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


@functools.cache
def claims() -> dict[str, Claim]:
    """Test -> what it proves."""
    return {
        name: _claim(name, docstring)
        for name, (_, docstring) in properties().items()
        if re.search(r"^Proves:", docstring, re.MULTILINE)
    }


_PROVES = re.compile(rf"^Proves: (.+) \(({'|'.join(KINDS)})\), against (.+)\.$")


def _claim(name: str, docstring: str) -> Claim:
    paragraphs = [" ".join(paragraph.split()) for paragraph in docstring.split("\n\n")]
    (line,) = (paragraph for paragraph in paragraphs if paragraph.startswith("Proves:"))
    match = _PROVES.match(line)
    if match is None:
        raise ValueError(f"{name}: '{line}' is not 'Proves: ... (kind), against ....'")
    what, kind, against = match.groups()
    equations = re.match(r"eqs?\. (.+)", what)
    words = name.partition("_")[2].replace("_", " ")
    statement = paragraphs[0] if line != paragraphs[0] else words
    sentence = statement if equations or what == statement else f"{what}: {statement}"
    sentence = f"{sentence[0].upper()}{sentence[1:].rstrip('.')}."
    labels = tuple(equations[1].split(", ")) if equations else ()
    return Claim(name, labels, sentence, kind, against)


def used_by(file: str) -> str:
    """The text of a file of tests and of all that it imports of these folders."""
    texts, files, waiting = _texts(), set[str](), {file}
    while waiting:
        files |= (new := waiting & set(texts))
        named = {word for one in new for line in _IMPORT.findall(texts[one])
                 for word in re.findall(r"\w+", line)}  # fmt: skip
        waiting = named - files
    return "\n".join(texts[one] for one in sorted(files))


_IMPORT = re.compile(r"^from tests\.(?:property|lab)(\.\w+| import (?:\([^)]*\)|.*))", re.M)


def cited() -> set[str]:
    """Equation labels that documents and docstrings cite: "eq. app_via_t", "eqs. a_b, c_d"."""
    texts = [
        *DOCS.glob("*.md"),
        DOCS.parent / "README.md",
        *DOCS.parent.glob("alphatoken/**/*.py"),
        *DOCS.parent.glob("lab/**/*.py"),
    ]
    labels: set[str] = set()
    for path in texts:
        if path == PAGE:
            continue
        for listed in _CITED.findall(path.read_text(encoding="utf-8")):
            labels |= {label for label in re.findall(r"\w+", listed) if "_" in label}
    return {label for label in labels if re.fullmatch(r"[A-Za-z]+(_[A-Za-z0-9]+)+", label)}


_LABEL = r"[A-Za-z0-9]+_\w+"
_CITED = re.compile(rf"\b[Ee]qs?\.\s+\(?`*(?:eq:)?({_LABEL}(?:`*(?:,| and)\s+`*(?:eq:)?{_LABEL})*)")


def page() -> str:
    """The page: equations, what each test proves and kills, and every mutant."""
    from tests.property.catalogue import LISTED, ROOMS

    matrix = json.loads(KILLS.read_text(encoding="utf-8"))
    killed: dict[str, list[str]] = {}
    for mutant, kills in matrix.items():
        for name, _ in kills["killed_by"]:
            killed.setdefault(name.partition("::")[2], []).append(mutant)
    head = ["Claim", "Against", "Test", "Mutants that it kills", "Kind"]
    return "\n".join(
        [
            "# Claims\n",
            "Each line is a statement of the paper or of this library, and what proves it. The "
            "claim begins with the labels of the paper's equations that it proves. It is compared "
            "with a slow, obvious function of `alphatoken.oracle`, or with what stands there in "
            "words. The test is a function of `tests/property` or `tests/lab`; the mutants are "
            "the planted errors by which it was seen to fail. The kind says what the quantity "
            "is: *exact*; *unbiased*, so that its mean is exact; or *approximate*, a method's "
            "approximation, which is then computed exactly as it is defined.\n",
            "## Equations of the paper\n",
            table(["Equation", "Proved by"], list(map(_equation_row, EQUATIONS))),
            "## What each test proves\n",
            table(head, [_claim_row(one, killed.get(one.name, [])) for one in claims().values()]),
            "## Mutants\n",
            "A mutant is the library with a few words replaced. It is *killed* when a property "
            "fails by its own assertion, the replaced code ran, the same example passes on the "
            "library as it is, and the library's own run-time proofs were switched off meanwhile "
            "(but for mutants of those proofs). Beside each property stands the number of the "
            "example at which it failed (of six through a whole model, else of twenty, drawn with "
            "the structure that the mutant needs). The last column says whether the library's "
            "proofs refuse the mutant by themselves, before any value is returned.\n",
            "### Errors that must be noticed\n",
            _kill_table(LISTED, matrix),
            *(f"### {title}\n\n{_kill_table(room, matrix)}" for title, room in ROOMS.items()),
        ]
    )


def _equation_row(label: str) -> list[str]:
    if label in NOT_PROVED:
        return [code(label), f"not proved: {text(NOT_PROVED[label])}"]
    return [code(label), ", ".join(code(x.name) for x in claims().values() if label in x.labels)]


def _claim_row(claim: Claim, mutants: list[str]) -> list[str]:
    labels = ", ".join(map(code, claim.labels))
    return [
        (f"{labels}: " if labels else "") + text(claim.sentence),
        text(claim.against),
        code(f"{properties()[claim.name][0]}.py::{claim.name}"),
        ", ".join(map(code, dict.fromkeys(mutants))),
        claim.kind,
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


def _kill_table(mutants: Sequence[Mutant], matrix: Mapping[str, Any]) -> str:
    head = ["Mutant", "What it stands for", "Change", "Killed by", "Own proofs"]
    return table(head, [_kill_row(mutant, matrix[mutant.name]) for mutant in mutants])


def _kill_row(mutant: Mutant, entry: Mapping[str, Any]) -> list[str]:
    changes = [
        f"{code(edit.target)}: {_words(edit.old)} → {_words(edit.new)}" for edit in mutant.edits
    ]
    return [
        code(mutant.name),
        text(mutant.sentence),
        "; ".join(changes),
        ", ".join(f"{code(name)} ({number})" for name, number in entry["killed_by"]),
        ", ".join(map(code, entry.get("refused_by", ()))) or "no",
    ]


def hunted(names: Sequence[str]) -> dict[str, Any]:
    """Hunt these mutants, in as many processes as there are cores. Raises if one survives."""
    import torch

    torch.set_num_threads(1)  # one a process; with more they wait for each other, six times as long
    matrix: dict[str, Any] = {}
    surviving: list[str] = []
    begun = time.monotonic()
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=10) as pool:
        for number, (name, kills) in enumerate(pool.imap(_kills, names), 1):
            dead = [kill for kill in kills if not isinstance(kill, str)]
            matrix[name] = {"killed_by": [[kill.claim, kill.example] for kill in dead]}
            if refused := sorted({kill.refused for kill in dead if kill.refused}):
                matrix[name]["refused_by"] = refused
            surviving += [f"'{name}' survives {kill}" for kill in kills if isinstance(kill, str)]
            left = (time.monotonic() - begun) / number * (len(names) - number)
            print(f"{number} of {len(names)}, {left:.0f} s left: {name}", file=sys.stderr)
    if surviving:
        raise SystemExit("a property is missing: " + "; ".join(surviving))
    return matrix


def write_kills(names: Sequence[str] = ()) -> None:
    """Hunt these mutants, or all; write a line a mutant, in the tables' order.

    Names that are mutants no more leave the file.
    """
    from tests.property.catalogue import BY_NAME

    matrix = json.loads(KILLS.read_text(encoding="utf-8")) if names else {}
    if unknown := set(names) - {*BY_NAME, *matrix}:
        raise SystemExit(f"no mutants: {', '.join(sorted(unknown))}")
    matrix |= hunted([name for name in names or BY_NAME if name in BY_NAME])
    rows = [(name, matrix[name]) for name in BY_NAME if name in matrix]
    lines = [f" {json.dumps(name)}: {json.dumps(kills)}" for name, kills in rows]
    KILLS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _kills(name: str) -> tuple[str, list[Kill | str]]:
    """(mutant, its kills; for a claim that does not kill it, why)."""
    from tests.property.catalogue import BY_NAME
    from tests.property.mutation import hunt

    kills: list[Kill | str] = []
    for one in BY_NAME[name].claims:
        try:
            kills.append(hunt(BY_NAME[name], one, refusals=True) or one.name)
        except Exception as error:  # all that is to be mended is said at the end, at once
            kills.append(f"{one.name}, which stops: {error!r:.200}")
    return name, kills


def _words(source: str) -> str:
    return code(" ".join(source.split())) if source else "nothing"  # a table's row is one line


def main(words: list[str]) -> None:
    """Write the page; or, with the word ``kills``, hunt the mutants named, or all (minutes)."""
    if words[:1] == ["kills"]:
        write_kills(words[1:])
    elif words:
        raise SystemExit(f"{COMMAND} [kills [NAME...]]")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
