"""Run the recorded tutorials again, and keep what they print.

    python docs/tutorials/record.py [docs/tutorials/2-choose.ipynb ...]

Without a name all are run. What would differ from one recording to the next without meaning, or
belongs to this machine alone, is left out: times, numbers of cells, what went to stderr, and paths.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOST_BYTES = 200_000
# What libraries print beside the tutorial's own lines: notes on the machine, figures of a trainer.
NOISE = re.compile(r"(?m)^(\[20[^\n]*\[(WARNING|INFO)\]|\{'(train_runtime|loss|eval_)')[^\n]*\n?")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def record(path: Path) -> None:
    """Run one notebook from the repository's root and write it with its output.

    Raises:
        ValueError: the recording names a folder of this machine, or is too large.
    """
    book: Any = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(book, timeout=7200, kernel_name="python3", resources=where).execute()
    tidy(book)
    text = nbformat.writes(book) + "\n"
    here = [p for p in (str(ROOT), str(Path.home()), "/tmp/") if len(p) > 1 and p in text]
    if here:
        raise ValueError(f"{path.name} would name folders of this machine: {', '.join(here)}")
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path.name} would have {len(text):,} bytes; {MOST_BYTES:,} are allowed")
    path.write_text(text, encoding="utf-8")


def tidy(book: Any) -> None:
    """Leave what the reader needs."""
    book.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.metadata.pop("execution", None)
        for one in cell.outputs:
            if "text" in one:
                one.text = NOISE.sub("", one.text)
        cell.outputs = [
            one for one in cell.outputs if one.get("name") != "stderr" and one.get("text", "-")
        ]
        for one in cell.outputs:
            one.pop("execution_count", None)
            if one.output_type == "execute_result":
                one.output_type, one.execution_count = "execute_result", None


def main() -> None:
    os.environ.setdefault("ALPHATOKEN_MODELS", str(ROOT / "models"))
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["PYTHONPATH"] = str(ROOT)
    for path in [*map(Path, sys.argv[1:])] or sorted(HERE.glob("*.ipynb")):
        print(f"running {path.name}", flush=True)
        record(path.resolve())


if __name__ == "__main__":
    main()
