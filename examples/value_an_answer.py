"""The picture at the top of README: a right and a wrong answer, each token coloured by its value.

    python examples/value_an_answer.py --out answer.svg

Eight solved word problems of our own are the target. The answer holds its arithmetic and a sentence
about apples; in the second one both sums are wrong. A token is blue where a small step on it lowers
the loss on the eight, to first order and over all parameters of SmolLM2-135M-Instruct with
four-bit weights (fetched at the first run, or ``--model``), and orange where it raises it.
``--answer`` values others. The values are written beside the picture, as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken import Scorer, ScorerConfig
from alphatoken.data import EncodeOptions, Example, collate, encode_rows, token_texts
from alphatoken.data.rows import row_of
from alphatoken.demo.models import fetch_model
from alphatoken.score.page import canvas, colour_of, save

TARGET = (
    ("A baker fills 6 trays with 8 rolls each and sells 30 rolls. How many rolls are left?",
     "The trays hold 6 * 8 = 48 rolls. After the sale 48 - 30 = 18 rolls are left. "
     "The answer is 18."),
    ("Mina reads 14 pages a day for 5 days. The book has 90 pages. How many pages are left?",
     "In 5 days she reads 14 * 5 = 70 pages. Then 90 - 70 = 20 pages are left. "
     "The answer is 20."),
    ("A ticket costs 7 euros and a drink costs 3 euros. What do 4 friends pay who each take both?",
     "Each friend pays 7 + 3 = 10 euros. Four friends pay 4 * 10 = 40 euros. The answer is 40."),
    ("There are 24 chairs in 3 equal rows. Two rows are taken away. How many chairs remain?",
     "Each row has 24 / 3 = 8 chairs. One row stays, so 8 chairs remain. The answer is 8."),
    ("Omar saves 15 coins a week. After 6 weeks he spends 40. How many coins does he have?",
     "He saves 15 * 6 = 90 coins. He has 90 - 40 = 50 coins left. The answer is 50."),
    ("A train has 5 cars with 36 seats each. 150 seats are taken. How many are free?",
     "The train has 5 * 36 = 180 seats. So 180 - 150 = 30 seats are free. The answer is 30."),
    ("Lea buys 3 pens for 2 euros each and a book for 11 euros. What does she pay?",
     "The pens cost 3 * 2 = 6 euros. Together she pays 6 + 11 = 17 euros. The answer is 17."),
    ("A tank holds 200 litres. 45 litres are used each day for 3 days. How much is left?",
     "In 3 days 45 * 3 = 135 litres are used. So 200 - 135 = 65 litres are left. "
     "The answer is 65."),
)  # fmt: skip
QUESTION = (
    "A farmer packs 12 boxes with 9 apples each. He gives 20 apples to a school. "
    "How many apples does he keep?"
)
ASIDE = " Apples grow on trees, and many people love how they taste."
ANSWER = (
    f"There are 12 * 9 = 108 apples in all.{ASIDE} "
    "He gives 20 away, so he keeps 108 - 20 = 88 apples. The answer is 88."
)
WRONG = ANSWER.replace("108", "118").replace("88", "98")
ANSWERS = {"both sums right": ANSWER, "both sums wrong": WRONG}
COLUMNS = 64
"""Letters a line of the picture."""
LETTER: dict[str, Any] = {
    "family": "DejaVu Sans Mono",
    "fontsize": 12,
    "ha": "center",
    "va": "center_baseline",
    "parse_math": False,
}


def encoded(pairs: Sequence[tuple[str, str]], tokenizer: object) -> list[Example]:
    """Questions and answers as tokens, the answers labelled."""
    rows = [
        row_of({"prompt": question, "response": answer}, index, f"row {index}")
        for index, (question, answer) in enumerate(pairs)
    ]
    return encode_rows(rows, tokenizer, EncodeOptions(chat_template=False))[0]


def value_answers(
    folder: Path, question: str, answers: Mapping[str, str]
) -> dict[str, list[tuple[str, float]]]:
    """Text and value of each answer's tokens, without the one that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target = encoded(TARGET, tokenizer)
    config = ScorerConfig("label", objective="adaptation", parameters="all")
    scorer = Scorer(model, validation=[collate(target[:4]), collate(target[4:])], config=config)
    found = {}
    for name, answer in answers.items():
        (example,) = encoded([(question, answer)], tokenizer)
        values = scorer.score(collate([example]))
        places = values.mask[0].nonzero().flatten().tolist()[:-1]
        texts = token_texts(tokenizer, example.input_ids)
        found[name] = [(texts[i], round(float(values.total[0, i]), 2)) for i in places]
    return found


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


def draw(answers: Mapping[str, Sequence[tuple[str, float]]], out: Path) -> None:
    """The answers as coloured letters under their names, all on one scale.

    Colour goes with the square root of a value, so that both signs show.
    """
    blocks = [(name, found, placed([text for text, _ in found])) for name, found in answers.items()]
    heights = [places[-1][0] + 2 for _, _, places in blocks]  # a line for the name
    largest = max(abs(value) for found in answers.values() for _, value in found)
    with canvas(8.0, 0.34 * sum(heights) + 0.1) as fig:
        fig.set_layout_engine("none")  # every letter has its place
        axes = fig.add_axes((0.01, 0.02, 0.98, 0.96), frameon=False)
        axes.set(xlim=(0, COLUMNS), ylim=(sum(heights), 0))
        axes.set_axis_off()
        for above, (name, found, places) in zip(_starts(heights), blocks, strict=True):
            axes.text(0, above + 0.55, name, style="italic", **LETTER | {"ha": "left"})
            for (line, start, text), (_, value) in zip(places, found, strict=True):
                strength = math.copysign(math.sqrt(abs(value) / largest), value)
                _token(axes, above + 1 + line, start, text, strength)
        save(fig, out)


def _starts(heights: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(heights)][:-1]


def _token(axes: Any, line: int, start: int, text: str, strength: float) -> None:
    from matplotlib.patches import Rectangle

    look: dict[str, Any] = {"facecolor": colour_of(strength), "edgecolor": "white"}
    axes.add_patch(Rectangle((start, line + 0.08), len(text), 0.84, linewidth=0.5, **look))
    for offset, letter in enumerate(text):
        axes.text(start + offset + 0.5, line + 0.5, letter, **LETTER)


def main(arguments: list[str] | None = None) -> None:
    """Parse, value, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="folder of a model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--answer", action="append", help="repeat it for several")
    parser.add_argument("--out", type=Path, default=Path("answer.svg"))
    options = parser.parse_args(arguments)
    folder = options.model or fetch_model()
    given = {f"answer {i}": text for i, text in enumerate(options.answer or [], 1)}
    values = value_answers(folder, options.question, given or ANSWERS)
    draw(values, options.out)
    record = options.out.with_suffix(".json")
    record.write_text(json.dumps(values, indent=0) + "\n", encoding="utf-8")
    for name, found in values.items():
        print(f"{name}:", *(f"{text.strip()}:{value:+.0f}" for text, value in found))
    print(options.out, record)


if __name__ == "__main__":
    main()
