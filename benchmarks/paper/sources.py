"""Real rows for the laptop scale, as files that ``alphatoken-lab paper`` takes: never kept here.

sft        MBPP: trained on its training file, measured on its test file
metamath   GSM8K, likewise
dpo        alpaca_eval's preferences; before them general instructions (dolly)
retention  general instructions that nothing is trained on, and stories
probes     HellaSwag's contexts with their endings
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_jsonl
from benchmarks.data import read
from benchmarks.selection.rows import (
    LETTERS,
    general_instructions,
    mathematics,
    preferences,
    programs,
)

GENERAL, STORIES = 11, 5


def write_sources(folder: Path, grid: str) -> dict[str, Path]:
    """Write the sources of a grid ("sft", "metamath" or "dpo"); the file of each."""
    folder.mkdir(parents=True, exist_ok=True)
    general = general_instructions()
    random.Random("paper retention").shuffle(general)
    stories = [{"text": row["text"][:LETTERS]} for row in read("tinystories/stories.jsonl")]
    sources: dict[str, Sequence[Any]] = {"retention": [*general[:GENERAL], *stories[:STORIES]]}
    if grid == "sft":
        sources |= {"train": programs("train"), "target": programs("test"), "probes": _probes()}
    elif grid == "metamath":
        sources |= {"train": mathematics("train"), "target": mathematics("test")}
    else:
        sources |= {"train": preferences(), "warm": general[GENERAL:]}
    paths = {name: folder / f"{name}.jsonl" for name in sources}
    for name, rows in sources.items():
        write_jsonl(paths[name], rows)
    return paths


def _probes() -> list[dict[str, str]]:
    rows = read("hellaswag/validation.jsonl")
    return [{"prompt": one["query"], "response": one["choices"][one["gold"]]} for one in rows]
