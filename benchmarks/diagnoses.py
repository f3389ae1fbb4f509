"""``python -m benchmarks.diagnoses``: all diagnostics on a real small model, on two kinds of text.

Needs the data folder named by ALPHATOKEN_DATA. Runs ``alphatoken diagnose all`` for rows of the
model's own kind (near) and for grade-school mathematics (far), and writes what they say to
docs/fidelity-measured.md, word by word. Interrupted, it goes on where it was with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.registry import DIAGNOSTICS
from alphatoken.support.storage import replacing

PAGE = Path("docs/fidelity-measured.md")
RETENTION = {
    "tinystories": "tinystories/stories.jsonl,response=text",
    "gsm8k": "gsm8k/train.jsonl",
    "mbpp": "mbpp/train.jsonl,prompt=text,response=code",
    "dolly": "dolly_hhrlhf/train.jsonl",
    "hellaswag": "hellaswag/validation.jsonl,response=query",
}
"""Held-out rows of four sets: what the model must not forget; never the set that is valued."""

KINDS = {
    "near": (
        "text like the model's own",
        ["tinystories/stories.jsonl"],
        ["--response_column", "text"],
    ),
    "far": ("grade-school mathematics", ["gsm8k/train.jsonl"], []),
}


def command(kind: str, out: str) -> list[str]:
    """The command line; ``$DATA`` stands for the folder of data."""
    _, (train,), more = KINDS[kind]
    words = ["alphatoken", "diagnose", "all"]
    words += ["--model_name_or_path", "$DATA/stories260K/transformers"]
    words += ["--train_file", f"$DATA/{train}", *more, "--validation_rows", "32"]
    for name, place in RETENTION.items():
        if place.split(",")[0] == train:
            continue
        words += ["--retention", f"{name}=$DATA/{place}"]
    return [*words, "--max_length", "256", "--on_empty", "skip", "--output_dir", out]


def run(kind: str, out: Path, *, resume: bool) -> None:
    """Run it."""
    data = os.environ["ALPHATOKEN_DATA"]
    words = [word.replace("$DATA", data) for word in command(kind, str(out))]
    words = [sys.executable, "-m", "alphatoken.cli", *words[1:]]
    subprocess.run([*words, *(["--resume"] if resume and out.exists() else [])], check=True)


def minutes(out: Path) -> float:
    """What the diagnostics of a folder took together."""
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return sum(float(one["seconds"]) for one in record["diagnostics"].values()) / 60


def page(folders: dict[str, Path]) -> str:
    """What the diagnoses say, as Markdown."""
    lines = [
        "# Fidelity, measured",
        "",
        "Written by `python -m benchmarks.diagnoses`; do not edit by hand. The sentences are those",
        "that the diagnostics printed. `$DATA` is a folder with the model (260,032 parameters, 5",
        "layers, trained on TinyStories) and the rows. [What to make of it](fidelity.md).",
        "",
        "All nine together took "
        + ", ".join(f"{minutes(folder):.1f} minutes ({kind})" for kind, folder in folders.items())
        + " on one CPU thread, beside other work.",
    ]
    for kind in folders:
        lines += [
            "",
            f"**{kind}**: {KINDS[kind][0]}.",
            "",
            "```",
            shlex.join(command(kind, kind)).replace("'", ""),
            "```",
        ]
    for entry in DIAGNOSTICS:
        lines += ["", f"## {entry.name}", "", entry.question]
        for kind, folder in folders.items():
            found = Diagnosis.load(folder / entry.name)
            lines += ["", f"### {entry.name}, {kind}", ""]
            lines += [f"* {_plain(sentence)}" for sentence in found.answer]
            lines += ["", *(f"> {_plain(note)}\n>" for note in found.notes)]
    return "\n".join(lines).rstrip(">\n ") + "\n"


def _plain(sentence: str) -> str:
    """Without what Markdown would take for marks."""
    for mark in ("*", "_", "<", "$", "`", "|"):
        sentence = sentence.replace(mark, f"\\{mark}")
    return sentence


def main() -> None:
    """Run both and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/diagnoses"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    folders = {kind: options.work / kind for kind in KINDS}
    for kind, folder in folders.items():
        run(kind, folder, resume=options.resume)
    with replacing(PAGE) as temporary:
        temporary.write_text(page(folders), encoding="utf-8")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
