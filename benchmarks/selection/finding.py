"""Who finds the dirt: how well each number of a token or a row tells the planted from the real.

On the start model, before any step: area under the curve of "the planted is lower" for values, of
"the planted is higher" for the loss; 0.5 is a coin. Intervals by drawing rows anew.

The excess loss ``l(theta) - l(theta + Delta)`` is a value too: Delta is what training on the
validation rows does to the parameters. Along a small part of Delta it is ``-<g, Delta>``: the exact
value with Delta in place of the validation gradient's negative. It is taken after 1, 8 and 24
steps, to see how far one has to walk.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score as auc
from torch import Tensor

from alphatoken import Scorer, ScorerConfig
from alphatoken.data import EncodeOptions, Example, batches, encode_rows, read_rows
from alphatoken.model.batch import label_mask
from alphatoken.model.forward import response_losses

ROWS, HELD, PARTS, BATCH, DRAWS = 80, 16, 4, 4, 500
SHORT = 0.02
LENGTH = 160
WALK, RATE = (1, 8, 24), 3e-5
"""Steps of AdamW, of BATCH validation rows each, and their learning rate."""

SETTINGS: dict[str, Mapping[str, Any]] = {
    "alphatoken, K = 3 (the paper)": {"estimator": "alphatoken"},
    "label, K = 3": {"estimator": "label"},
    "label, all parameters": {"estimator": "label", "layers": "all", "parameters": "all"},
}

FIRST = "label along {} AdamW steps on the validation rows"
EXCESS = "excess loss after {} steps"

Array = NDArray[np.float64]


Row = tuple[NDArray[np.bool_], dict[str, Array]]
"""Of the response tokens of one row: which were planted, and each number by name."""


def find_dirt(
    model: Any, tokenizer: Any, rows: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Areas under the curve by task and number, each with a 95 % interval.

    Args:
        model: the start model, in float32; left as it was.
        tokenizer: of the model.
        rows: folder that ``rows.write_rows`` has filled.
        say: gets a line when something is done.
    """
    clean = examples_of(rows / "validation.jsonl", tokenizer)[:HELD]
    parts = [next(batches(clean[k::PARTS], HELD)) for k in range(PARTS)]
    ends = walk(model, clean)
    say("the walk")
    areas: dict[str, Any] = {}
    for task, marked in (("noisy-words", _replaced), ("noisy-responses", _exchanged)):
        examples = examples_of(rows / f"{task}.jsonl", tokenizer)[:ROWS]
        lines = _marks(rows, task)
        marks = [lines[one.row.index] for one in examples]
        planted = [marked(one, mark, tokenizer) for one, mark in zip(examples, marks, strict=True)]
        numbers = _numbers(model, examples, parts, lambda text, task=task: say(f"{task}: {text}"))
        numbers |= excess(model, ends, examples)
        say(f"{task}: excess losses")
        each = [(p, {k: v[i] for k, v in numbers.items()}) for i, p in enumerate(planted)]
        if task == "noisy-responses":  # whole rows: one number each
            each = [(p[:1], {k: np.asarray([v.mean()]) for k, v in row.items()}) for p, row in each]
        areas[task] = _areas(each)
    return areas


def examples_of(path: Path, tokenizer: Any) -> list[Example]:
    """The rows of a file, tokenised as they are trained on."""
    options = EncodeOptions(max_length=LENGTH, chat_template=False, on_empty="skip")
    return encode_rows(read_rows(path), tokenizer, options)[0]


def _marks(rows: Path, task: str) -> list[dict[str, Any]]:
    text = (rows / f"{task}-marks.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _replaced(example: Example, mark: Mapping[str, Any], tokenizer: Any) -> NDArray[np.bool_]:
    """Tokens with a character of a word that was replaced; the end token is no word's."""
    text = example.row.response
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    bad, at = np.zeros(len(text), bool), 0
    for word, replaced in zip(text.split(), mark["replaced"], strict=True):
        at = text.index(word, at)
        bad[at : at + len(word)] = bool(replaced)
        at += len(word)
    ids = [label for label in example.labels if label != -100]
    spans = whole["offset_mapping"]
    agree = sum(a == b for a, b in zip(ids, whole["input_ids"], strict=False))
    if agree < min(len(ids), len(spans)):
        raise RuntimeError(f"{example.row.place}: the response is tokenised in another way")
    marks = [bool(bad[a:b].any()) for a, b in spans][: len(ids)]
    return np.asarray([*marks, *[False] * (len(ids) - len(marks))])


def _exchanged(example: Example, mark: Mapping[str, Any], _: Any) -> NDArray[np.bool_]:
    return np.full(example.response_tokens, bool(mark["exchanged"]))


def _numbers(
    model: Any, examples: Sequence[Example], parts: Sequence[Any], say: Callable[[str], None]
) -> dict[str, list[Array]]:
    """By name: of each example the numbers of its response tokens."""
    numbers: dict[str, list[Array]] = {"loss": _losses(model, examples)}
    say("losses")
    for name, options in SETTINGS.items():
        scorer = Scorer(model, parts, config=ScorerConfig(standard_errors=True, **options))
        scorer.warn = False
        numbers |= {name: [], f"{name}, over its error": []}
        for batch in batches(examples, BATCH):
            values = scorer.score(batch)
            error = values.standard_error().clamp(min=torch.finfo(torch.float32).tiny)
            numbers[name] += _by_row(values.total, values.mask)
            numbers[f"{name}, over its error"] += _by_row(values.total / error, values.mask)
        say(name)
    return numbers


def _losses(model: Any, examples: Sequence[Example]) -> list[Array]:
    """Turned round, so that the planted is lower as with values."""
    from alphatoken.model.protocol import find_adapter

    adapter, by_row = find_adapter(model), list[Array]()
    for batch in batches(examples, BATCH):
        labels = batch.pop("labels")
        with torch.no_grad():
            losses = response_losses(adapter, batch, labels)
        by_row += _by_row(-losses, label_mask(labels))
    return by_row


def walk(model: Any, clean: Sequence[Example]) -> dict[int, list[Tensor]]:
    """The parameters after each number of steps in ``WALK`` of training on the held rows."""
    walker = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(walker.parameters(), lr=RATE, weight_decay=0.0)
    ends: dict[int, list[Tensor]] = {}
    drawn = itertools.chain.from_iterable(batches(clean, BATCH) for _ in itertools.count())
    for step, batch in zip(range(1, max(WALK) + 1), drawn, strict=False):
        optimizer.zero_grad()
        walker(**batch).loss.backward()
        optimizer.step()
        if step in WALK:
            ends[step] = [one.detach().clone() for one in walker.parameters()]
    return ends


def excess(
    model: Any, ends: Mapping[int, Sequence[Tensor]], examples: Sequence[Example]
) -> dict[str, list[Array]]:
    """To first order towards each end of a walk, and the whole excess over the furthest.

    To first order: ``(l(theta - s Delta) - l(theta + s Delta)) / (2 s)``, s = ``SHORT``.
    """
    own = list(model.parameters())
    start = [one.detach().clone() for one in own]

    def losses(end: Sequence[Tensor], share: float) -> list[Array]:
        with torch.no_grad():
            for one, before, after in zip(own, start, end, strict=True):
                one.copy_(before + share * (after - before))
        return _losses(model, examples)

    differences = {}
    for steps, end in ends.items():
        both = zip(losses(end, SHORT), losses(end, -SHORT), strict=True)
        differences[FIRST.format(steps)] = [(a - b) / (2 * SHORT) for a, b in both]
    furthest = max(ends)
    both = zip(losses(ends[furthest], 1.0), losses(start, 0.0), strict=True)
    differences[EXCESS.format(furthest)] = [a - b for a, b in both]
    return differences


def _by_row(values: Tensor, mask: Tensor) -> list[Array]:
    return [
        line[kept].detach().double().cpu().numpy() for line, kept in zip(values, mask, strict=True)
    ]


def _areas(rows: Sequence[Row]) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    draws = [generator.integers(len(rows), size=len(rows)) for _ in range(DRAWS)]
    areas: dict[str, Any] = {
        "rows": len(rows),
        "planted": float(np.concatenate([planted for planted, _ in rows]).mean()),
    }
    for name in rows[0][1]:

        def area(chosen: Sequence[int], name: str = name) -> float:
            marked = np.concatenate([rows[i][0] for i in chosen])
            numbers = np.concatenate([rows[i][1][name] for i in chosen])
            return float("nan") if marked.all() or not marked.any() else auc(marked, -numbers)

        again = np.asarray([area(draw) for draw in draws])
        low, high = np.nanquantile(again, [0.025, 0.975])
        areas[name] = {"auc": area(range(len(rows))), "low": float(low), "high": float(high)}
    return areas


def main(model: str, rows: Path, out: Path) -> None:
    """Measure one model and write ``out``."""
    from alphatoken.model.loading import load_causal_model, load_tokenizer
    from alphatoken.support.storage import write_json

    loaded, tokenizer = load_causal_model(model), load_tokenizer(model)
    write_json(out, find_dirt(loaded.float().eval(), tokenizer, rows, _say))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
