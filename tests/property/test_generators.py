"""Every hard structure is reached by the generator of cases.

A property that never meets a grouped head proves nothing about grouped heads.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import find

from tests.property.profiles import REACH
from tests.property.strategies import (
    Case,
    cases,
)


def lengths(case: Case) -> list[int]:
    """Real tokens of each training row."""
    return [sum(char in "pr" for char in line) for line in case.train]


def width(lines: tuple[str, ...]) -> int:
    return len(lines[0].replace("|", ""))


def holes(line: str) -> bool:
    """A prompt token between two response tokens: a second turn."""
    return "p" in line.strip(".p|")


HARD: dict[str, Callable[[Case], bool]] = {
    "one layer": lambda c: c.config.layers == 1,
    "three layers": lambda c: c.config.layers == 3,
    "grouped heads": lambda c: 1 < c.config.kv_heads < c.config.heads,
    "one key head for all": lambda c: c.config.kv_heads == 1 < c.config.heads,
    "head width apart from hidden": (
        lambda c: c.config.heads * c.config.head_dim != c.config.hidden
    ),
    "value width apart from key width": (
        lambda c: c.config.value_dim not in (None, c.config.head_dim)
    ),
    "in and out widths differ": lambda c: c.config.mlp_width != c.config.hidden,
    "gated": lambda c: c.config.mlp == "gated",
    "rms": lambda c: c.config.norm == "rms",
    "layernorm": lambda c: c.config.norm == "layernorm",
    "no norm": lambda c: c.config.norm == "none",
    "post norm": lambda c: c.config.norm != "none" and c.config.norm_place == "post",
    "sandwich norm": lambda c: c.config.norm != "none" and c.config.norm_place == "sandwich",
    "query and key norm": lambda c: c.config.qk_norm,
    "rotary with a factor": (
        lambda c: c.config.positions == "rotary" and c.config.rotary_factor != 1
    ),
    "learned positions": lambda c: c.config.positions == "learned",
    "biases": lambda c: c.config.bias,
    "softcap": lambda c: c.config.softcap is not None,
    "final softcap": lambda c: c.config.final_softcap is not None,
    "sinks": lambda c: c.config.sinks,
    "window shorter than the sequence": lambda c: any(
        w is not None and 1 < w < max(lengths(c))
        for w in map(c.config.window, range(c.config.layers))
    ),
    "window of the token itself": lambda c: 1 in c.config.windows,
    "full and sliding layers": lambda c: (
        None in c.config.windows and any(w is not None for w in c.config.windows)
    ),
    "tied embeddings": lambda c: c.config.tied_embeddings,
    "fused": lambda c: c.config.fused_qkv and c.config.kv_heads < c.config.heads,
    "transposed": lambda c: c.config.transposed,
    "fused and transposed": lambda c: c.config.fused_qkv and c.config.transposed,
    "block at two depths": lambda c: c.config.repeated_block,
    "block at two depths with one between": lambda c: (
        c.config.repeated_block and c.config.layers == 3
    ),
    "linear called twice": lambda c: c.config.repeated_linear,
    "additive mask": lambda c: c.config.additive_mask and "attention_mask" in c.batch,
    "one label position": lambda c: width(c.train) == 2,
    "a row of one token": lambda c: 1 in lengths(c),
    "a row without tokens": lambda c: 0 in lengths(c),
    "a row of tokens without labels": lambda c: any(
        "p" in line and "r" not in line for line in c.train
    ),
    "a padding query without keys": lambda c: any(line.startswith(".") for line in c.train),
    "a padding query that attends to nothing": (
        lambda c: c.config.blind_rows and any(line.startswith(".") for line in c.train)
    ),
    "left padding": lambda c: any("." in line[0] and "r" in line for line in c.train),
    "right padding": lambda c: any("." in line[-1] and "r" in line for line in c.train),
    "ragged on both sides": lambda c: any(
        line[0] == "." == line[-1] and "r" in line for line in c.train
    ),
    "label holes": lambda c: any(holes(line) for line in c.train),
    "label on the first token after padding": lambda c: any(".r" in line for line in c.train),
    "validation label after padding": lambda c: any(
        ".r" in line for lines in c.validations for line in lines
    ),
    "label on the first token": lambda c: any(line.startswith("r") for line in c.train),
    "packed": lambda c: any("|" in line for line in c.train),
    "packed, a response in every document": lambda c: any(
        "|" in line and all("r" in document[1:] for document in line.split("|")) for line in c.train
    ),
    "packed with a document of one token": lambda c: any(
        1 in map(len, line.split("|")) for line in c.train if "|" in line
    ),
    "several rows": lambda c: len(c.train) > 1,
    "no attention mask": lambda c: "attention_mask" not in c.batch,
    "attention mask of ones": (
        lambda c: "attention_mask" in c.batch and bool(c.batch["attention_mask"].all())
    ),
    "position ids without packing": lambda c: (
        "position_ids" in c.batch and not any("|" in line for line in c.train)
    ),
    "several validation batches": lambda c: len(c.validations) > 1,
    "validation sequences of different lengths": (
        lambda c: len({width(lines) for lines in c.validations}) > 1
    ),
    "two validation sequences in a batch": lambda c: any(
        sum("r" in line for line in lines) > 1 for lines in c.validations
    ),
    "validation longer than training": (lambda c: max(map(width, c.validations)) > width(c.train)),
    "padded validation": lambda c: any("." in line for lines in c.validations for line in lines),
    "packed validation": lambda c: any("|" in line for lines in c.validations for line in lines),
    "grouped heads, window, sinks and left padding at once": (
        lambda c: (
            1 < c.config.kv_heads < c.config.heads
            and c.config.sinks
            and any(w is not None for w in c.config.windows)
            and any(line.startswith(".") for line in c.train)
        )
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_a_hard_case_is_reached(name: str) -> None:
    assert HARD[name](find(cases(), HARD[name], settings=REACH, random=Random(0)))
