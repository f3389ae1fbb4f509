"""The demo, made small: it finds the spoiled words, and everything it promises is there."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from alphatoken.demo import run_demo
from alphatoken.demo.model import make_tokenizer
from alphatoken.demo.run import SPOILED
from alphatoken.demo.world import TASKS, draw_exchanges, general_text, vocabulary

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


def test_world_has_no_unknown_word_and_no_repeated_prompt() -> None:
    tokenizer, draw = make_tokenizer(), random.Random(5)
    exchanges = draw_exchanges(300, draw)
    texts = [general_text(draw) for _ in range(50)]
    for text in [*texts, *(f"{e.prompt} {' '.join(e.response)}" for e in exchanges)]:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
    assert len({e.prompt for e in exchanges}) == 300
    others = draw_exchanges(100, draw, avoid=exchanges)
    assert {e.prompt for e in others}.isdisjoint(e.prompt for e in exchanges)
    assert len(tokenizer) == len(vocabulary()) + 6
    assert len({e.prompt.split()[0] for e in exchanges}) == len(TASKS)


def test_spoiled_words_are_marked() -> None:
    clean = draw_exchanges(400, random.Random(2))
    spoiled = draw_exchanges(400, random.Random(2), spoil=SPOILED)
    marks = np.concatenate([e.spoiled for e in spoiled])
    assert abs(marks.mean() - SPOILED) < 4 * (SPOILED * (1 - SPOILED) / marks.size) ** 0.5
    assert not any(any(e.spoiled) for e in clean)
    first = spoiled[0]
    words = draw_exchanges(1, random.Random(2))[0].response
    assert [a != b for a, b in zip(first.response, words, strict=True)] == list(first.spoiled)


@pytest.mark.filterwarnings("ignore:The .* side alone decides")
def test_demo_finds_spoiled_words_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_demo(tmp_path, scale=0.25)
    assert set(result.area) == {"alphatoken", "label"}
    # Chance is 0.5; the model is a quarter as trained as in the whole demo.
    assert min(result.area.values()) > 0.55
    page = result.report.read_text()
    assert "Stability, causal" in page
    printed = capsys.readouterr().out
    assert "less often than a coin" in printed
    assert str(result.report) in printed
