"""The generators in themselves: every hard structure is reached, and a failure shrinks to little.

A property that never meets a grouped head proves nothing about grouped heads. For each hard case
``find`` must produce a witness within few examples, and shrink it to a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st

from alphatoken.oracle.gradients import known_labels, response_tokens
from tests.property.decoder import DecoderConfig
from tests.property.profiles import REACH
from tests.property.strategies import (
    MODES,
    Case,
    cases,
    configs,
    make_batch,
    make_case,
    rows,
)

SHRINK = settings(REACH, phases=[Phase.generate, Phase.shrink])


def witness(
    strategy: st.SearchStrategy[Any],
    predicate: Callable[[Any], bool],
    how: settings = SHRINK,
    seed: int = 0,
) -> Any:
    return find(strategy, predicate, settings=how, random=Random(seed))


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


def size(case: Case) -> int:
    """How much there is to read in a case: columns, rows and options that are not the simplest."""
    simplest = {
        "layers": 1, "hidden": 4, "heads": 1, "kv_heads": 1, "head_dim": 2, "mlp": "plain",
        "mlp_width": 3, "norm": "none", "positions": "none", "vocabulary": 3,
    }  # fmt: skip
    options = sum(
        getattr(case.config, name) != simplest.get(name, field.default)
        for name, field in DecoderConfig.__dataclass_fields__.items()
    )
    batches = (case.train, *case.validations)
    return options + sum(len(lines) * (width(lines) - 1) for lines in batches)


SMALLEST = size(
    make_case(
        ("pr",), (("pr",),), vocabulary=3, layers=1, hidden=4, heads=1, kv_heads=1, head_dim=2,
        mlp="plain", mlp_width=3, norm="none", positions="none",
    )
)  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_a_hard_case_is_reached(name: str) -> None:
    assert HARD[name](witness(cases(), HARD[name], REACH))


def test_without_a_demand_the_smallest_case_is_found() -> None:
    found = witness(cases(), lambda case: True)
    assert size(found) == SMALLEST == 2
    assert (found.seed, found.direction_seed) == (0, 0)


def test_a_failure_that_needs_two_things_shrinks_to_these_two() -> None:
    found = witness(cases(), lambda c: c.config.sinks and c.config.layers > 1 and len(c.train) > 1)
    # Sinks, a second layer, its window entry, a second row of one more column than needed at most.
    assert size(found) <= SMALLEST + 5, found
    assert len(found.train) == 2
    assert found.config.layers == 2


@given(case=cases())
@example(case=make_case())
def test_the_repr_rebuilds_the_case(case: Case) -> None:
    assert eval(repr(case), {"make_case": make_case}) == case


@given(case=cases())
def test_batches_are_what_their_rows_say(case: Case) -> None:
    for lines, batch in zip(
        (case.train, *case.validations), (case.batch, *case.validation), strict=True
    ):
        plain = [line.replace("|", "") for line in lines]
        assert batch["input_ids"].shape == (len(plain), len(plain[0]))
        assert int(batch["input_ids"].max()) < case.config.vocabulary
        for n, line in enumerate(plain):
            labels = batch["labels"][n].tolist()
            assert [label != -100 for label in labels] == [char == "r" for char in line]
            assert all(
                label in (-100, token)
                for label, token in zip(labels, batch["input_ids"][n].tolist(), strict=True)
            )
            if "attention_mask" in batch:
                assert batch["attention_mask"][n].tolist() == [int(char != ".") for char in line]
            else:
                assert "." not in line
        assert response_tokens(known_labels(batch))
        if "position_ids" in batch:
            assert batch["position_ids"].shape == batch["input_ids"].shape


def test_position_ids_restart_in_documents_and_start_after_padding() -> None:
    packed = make_batch(("pr|ppr", "p|pr|pr"), vocabulary=5, seed=0)
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]]
    assert "attention_mask" not in packed
    padded = make_batch(("..ppr", "pr..."), vocabulary=5, seed=0, explicit_positions=True)
    assert padded["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "lines",
    [
        ("ppr", "pr"),
        ("p|r",),
        (".r",),
        ("pp",),
        ("rp",),
        ("p.r",),
        ("pr|pr", ".pppr"[:4]),
        ("xpr",),
        ("|pr",),
    ],
)
def test_rows_that_mean_nothing_are_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="row|response|width|padding"):
        make_case(lines)


@pytest.mark.parametrize("mode", MODES)
def test_every_layout_keeps_to_its_limits(mode: str) -> None:
    @settings(max_examples=50, database=None, derandomize=True)
    @given(lines=rows(mode, 5, 2))
    def check(lines: tuple[str, ...]) -> None:
        make_batch(lines, vocabulary=3, seed=0)
        assert 2 <= width(lines) <= 5
        assert 1 <= len(lines) <= 2
        assert mode == "packed" or "|" not in "".join(lines)
        assert mode in ("left", "right", "ragged") or "." not in "".join(lines)
        if mode == "left":
            assert all(line.lstrip(".").count(".") == 0 for line in lines)
        if mode == "right":
            assert all(line.rstrip(".").count(".") == 0 for line in lines)

    check()


PINS: dict[str, Any] = {
    "layers": 1,
    "heads": 6,
    "kv_heads": 1,
    "norm": "layernorm",
    "mlp": "gated",
    "positions": "rotary",
    "windows": (2, None),
    "repeated_block": True,
    "additive_mask": True,
    "blind_rows": True,
    "qk_norm": True,
    "conv_mixer": True,
    "hidden_mixer": True,
    "hidden_use": True,
    "loose_parameter": True,
    "tied_linears": True,
    "attention_dropout": 0.5,
    "end_token": None,
}


@pytest.mark.parametrize("name", PINS)
def test_a_pinned_option_holds_whatever_else_is_drawn(name: str) -> None:
    extra = {"layers": 3} if name == "tied_linears" else {}

    @settings(max_examples=30, database=None, derandomize=True, deadline=None)
    @given(case=cases(**{name: PINS[name]}, **extra), config=configs(**{name: PINS[name]}, **extra))
    def check(case: Case, config: DecoderConfig) -> None:
        assert getattr(case.config, name) == getattr(config, name) == PINS[name]

    check()


def test_pins_may_be_strategies_and_unknown_ones_are_refused() -> None:
    found = witness(
        cases(layers=st.sampled_from([2, 3]), mode=st.sampled_from(["left", "packed"])),
        lambda c: c.config.layers == 3 and "|" in "".join(c.train),
    )
    assert found.config.layers == 3
    fixed = witness(cases(train=("ppr",), validations=(("pr",), ("ppr",))), lambda c: True)
    assert (fixed.train, fixed.validations) == (("ppr",), (("pr",), ("ppr",)))
    with pytest.raises(TypeError, match="wdith"):
        witness(cases(wdith=3), lambda c: True)
