"""Rows of a value folder as two pictures, one for light pages and one for dark ones.

    python examples/draw_rows.py demo-output/verdict/data/values --model MODEL \\
        --row "wrong words=12" --row "as it was written=30" --out rows

``rows-light.svg`` and ``rows-dark.svg`` have each row's answer with its tokens in the colours of
their walk values, on one scale, and ``rows.json`` what they were drawn from; with that file in
place of the folder they are drawn again, and no model is needed. README shows the demo's rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphatoken.data import token_texts
from alphatoken.score import read_values
from alphatoken.score.page import canvas, save
from alphatoken.support.coloured import MINUS, OPAQUE, PLUS, ColouredRows, ShownToken

UNIT = "nats: how far the loss of a token falls along the walk"
COLUMNS = 76
"""Letters a line of the picture."""
INK = {"light": "#1f2328", "dark": "#e6edf3"}
FADED = {"light": "#656d76", "dark": "#8b949e"}
LETTER: dict[str, Any] = {
    "family": "DejaVu Sans Mono",
    "fontsize": 11,
    "ha": "center",
    "va": "center_baseline",
    "parse_math": False,
}


def read_rows(folder: Path, model: str, rows: dict[str, int]) -> list[dict[str, Any]]:
    """Name, line, prompt and tokens with values of each row, without the token that ends it."""
    from transformers import AutoTokenizer

    tokenizer, scored = AutoTokenizer.from_pretrained(model), {}
    for one in read_values(folder):
        scored[one.row + 1] = one
    read = []
    for name, line in rows.items():
        if line not in scored:
            raise SystemExit(f"{folder} has no values of line {line}")
        one = scored[line]
        texts = token_texts(tokenizer, one.ids)
        values = zip(texts, one.values["total"], one.response, strict=True)
        tokens = [(text, round(float(value), 3)) for text, value, valued in values if valued]
        prompt = "".join(
            text for text, valued in zip(texts, one.response, strict=True) if not valued
        )
        mean = round(float(one.values["total"][one.response].mean()), 2)
        if tokens[-1][0] in tokenizer.all_special_tokens:
            tokens.pop()
        read.append(
            {"name": name, "line": line, "mean": mean, "prompt": prompt.strip(), "tokens": tokens}
        )
    return read


def placed(texts: Sequence[str]) -> list[tuple[int, int, str]]:
    """Line, column and letters of each token; a line ends before a space."""
    places: list[tuple[int, int, str]] = []
    line = column = 0
    for index, text in enumerate(texts):
        following = itertools.takewhile(lambda later: not later[:1].isspace(), texts[index + 1 :])
        word = len(text) + sum(map(len, following))
        if text[:1].isspace() and column + word > COLUMNS:
            line, column = line + 1, 0
        shown = text if column else text.lstrip()
        places.append((line, column, shown))
        column += len(shown)
    return places


def draw(rows: Sequence[dict[str, Any]], out: Path, page: str) -> None:
    """The rows below each other, and the scale that all of them share, for a light or dark page."""
    scale = ColouredRows([[ShownToken(*one) for one in row["tokens"]] for row in rows], UNIT)
    blocks = []
    for row in rows:
        prompt = placed([f" {word}" for word in row["prompt"].split()])
        tokens = placed([text for text, _ in row["tokens"]])
        blocks.append((row, prompt, tokens))
    height = sum(p[-1][0] + t[-1][0] + 3.6 for _, p, t in blocks) + 1.2
    with canvas(8.0, 0.27 * height) as fig:
        fig.set_layout_engine("none")  # every letter has its place
        fig.patch.set_alpha(0.0)  # the page's own background
        axes = fig.add_axes((0.01, 0.01, 0.98, 0.98), frameon=False)
        axes.set(xlim=(0, COLUMNS), ylim=(height, 0))
        axes.set_axis_off()
        top = 0.0
        for row, prompt, tokens in blocks:
            mean = f"{row['mean']:+.2f}".replace("-", "\u2212")
            title = f"{row['name']}: mean {mean} nats"
            axes.text(
                0, top + 0.5, title, color=INK[page], weight="bold", **LETTER | {"ha": "left"}
            )
            for line, start, text in prompt:
                _letters(axes, top + 1.1 + line, start, text, FADED[page])
            top += prompt[-1][0] + 2.2
            for (line, start, text), (_, value) in zip(tokens, row["tokens"], strict=True):
                _behind(axes, top + line, start, len(text), scale.strength(value))
                _letters(axes, top + line, start, text, INK[page])
            top += tokens[-1][0] + 1.4
        _scale(axes, top + 0.2, scale, page)
        save(fig, out)


def _behind(axes: Any, top: float, start: float, width: float, strength: float) -> None:
    from matplotlib.patches import Rectangle

    colour = [channel / 255 for channel in (PLUS if strength > 0 else MINUS)]
    look: dict[str, Any] = {"facecolor": (*colour, OPAQUE * abs(strength)), "linewidth": 0}
    axes.add_patch(Rectangle((start + 0.04, top + 0.06), width - 0.08, 0.88, **look))


def _letters(axes: Any, top: float, start: float, text: str, colour: str) -> None:
    for offset, letter in enumerate(text):
        if not letter.isspace():
            axes.text(start + offset + 0.5, top + 0.5, letter, color=colour, **LETTER)


def _scale(axes: Any, top: float, scale: ColouredRows, page: str) -> None:
    """A strip of the colours with the numbers at its ends, and the unit."""
    least, most = f"\u2212{scale.full:g}", f"+{scale.full:g}"
    small = LETTER | {"fontsize": 9, "color": FADED[page]}
    axes.text(len(least), top + 0.5, least, **small | {"ha": "right"})
    start, steps = len(least) + 1, 24
    for number in range(steps):
        strength = scale.strength(scale.full * (2 * number / (steps - 1) - 1))
        _behind(axes, top, start + 0.5 * number, 0.58, strength)
    axes.text(start + 0.5 * steps + 1, top + 0.5, f"{most}  {UNIT}", **small | {"ha": "left"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, write down, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", type=Path, help="folder of value files, or the JSON of a picture")
    parser.add_argument("--model", help="whose tokenizer made the tokens")
    parser.add_argument(
        "--row", action="append", default=[], metavar="NAME=LINE", help="repeat it for several"
    )
    parser.add_argument("--out", type=Path, default=Path("rows"), help="beginning of the files")
    options = parser.parse_args(arguments)
    if options.values.suffix == ".json":
        rows = json.loads(options.values.read_text(encoding="utf-8"))
    elif not options.model or not options.row:
        parser.error("a folder of values needs --model and --row")
    else:
        named = dict(row.rsplit("=", 1) for row in options.row)
        rows = read_rows(options.values, options.model, {k: int(v) for k, v in named.items()})
        text = json.dumps(rows, indent=0, ensure_ascii=False)
        Path(f"{options.out}.json").write_text(f"{text}\n", encoding="utf-8")
    for page in INK:
        draw(rows, Path(f"{options.out}-{page}.svg"), page)
        print(f"{options.out}-{page}.svg")


if __name__ == "__main__":
    main()
