"""Hypothesis strategies that draw structure; the numbers come from seeded torch generators.

A batch is written as rows of characters, one a token, so that a failing structure can be read:

    p  prompt token (label -100)        .  padding
    r  response token (labelled)        |  next token starts another packed document

``("pprr", "..pr")`` is two rows, the second padded on the left. In ``"..rr"`` the first ``r`` is
labelled and has no value: it would be predicted from padding. The repr of a ``Case`` is the
``make_case`` call that rebuilds it, ready to be pinned with ``@example``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder

Rows = tuple[str, ...]

MODES = ("plain", "right", "left", "ragged", "packed")
"""Layouts of a batch; "ragged" pads each row on both sides."""
LENGTH = 8
ROWS = 3
VALIDATIONS = 3
VALIDATION_LENGTH = 6
VALIDATION_ROWS = 2
SEEDS = st.integers(0, 2**16 - 1)
_FLAG = st.booleans()
_NO = st.just(False)


# --- batches -------------------------------------------------------------------------------------


def _check_rows(lines: Rows) -> None:
    if len({len(line.replace("|", "")) for line in lines}) != 1:
        raise ValueError(f"rows must have one width: {lines}")
    if any("|" in line for line in lines) and any("." in line for line in lines):
        raise ValueError(f"packed rows carry no padding: {lines}")
    for line in lines:
        if set(line) - set("pr.|") or "|r" in line or line.startswith("|"):
            raise ValueError(f"not a row: {line!r} (a later document's first token is no label)")
        if "." in line.strip("."):
            raise ValueError(f"padding inside a row: {line!r}")
    if not _responds(lines):
        raise ValueError(f"no response token: {lines}")


def _responds(lines: Sequence[str]) -> bool:
    """Whether a label is predicted from a real position; one after padding or at 0 is not."""
    return any("rr" in line or "pr" in line for line in (x.replace("|", "") for x in lines))


def _positions(line: str) -> list[int]:
    """Position ids of one row: from 0 in each document, 0 on left padding, held on right."""
    positions: list[int] = []
    current = -1
    for char in line:
        if char == "|":
            current = -1
            continue
        current += char != "."
        positions.append(max(current, 0))
    return positions


def make_batch(
    lines: Rows,
    *,
    vocabulary: int,
    seed: int,
    explicit_mask: bool = False,
    explicit_positions: bool = False,
) -> dict[str, Tensor]:
    """The batch that ``lines`` describes, with token ids drawn from ``seed``.

    Padding holds random tokens, so that whatever leaks from it shows. ``attention_mask`` is there
    when a row is padded or it is asked for; ``position_ids`` when rows are packed or on request.
    """
    lines = tuple(lines)
    _check_rows(lines)
    plain = [line.replace("|", "") for line in lines]
    padded, packed = any("." in line for line in plain), any("|" in line for line in lines)
    if packed and explicit_mask:
        raise ValueError("packed documents are told apart by position_ids without a mask")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (len(plain), len(plain[0])), generator=generator)
    response = torch.tensor([[char == "r" for char in line] for line in plain])
    batch = {"input_ids": ids, "labels": torch.where(response, ids, -100)}
    if padded or explicit_mask:
        batch["attention_mask"] = torch.tensor([[int(c != ".") for c in line] for line in plain])
    if packed or explicit_positions:
        batch["position_ids"] = torch.tensor([_positions(line) for line in lines])
    return batch


@st.composite
def rows(
    draw: st.DrawFn, mode: str = "plain", max_length: int = LENGTH, max_rows: int = ROWS
) -> Rows:
    """Rows of one batch; at least one response token."""
    return _draw_rows(draw, mode, max_length, max_rows)


@cache
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


def _draw_rows(draw: st.DrawFn, mode: str, max_length: int, max_rows: int) -> Rows:
    """Every draw covers the maximal batch (labels as bits, paddings, breaks) and a slice is used.

    Dropping a row or a column while shrinking so leaves the rest as it was.
    """
    bits, pads = _integers(0, 2**max_length - 1), _integers(0, max_length)
    count, width = draw(_integers(1, max_rows)), draw(_integers(2, max_length))
    pool = []
    for _ in range(max_rows):
        labels = draw(bits)
        breaks = draw(bits) if mode == "packed" else 0
        left = draw(pads) if mode in ("left", "ragged") else 0
        right = draw(pads) if mode in ("right", "ragged") else 0
        pool.append((labels, breaks, left, right))
    lines = []
    for index, (labels, breaks, left, right) in enumerate(pool[:count]):
        if mode == "packed":
            keep = breaks & ~(1 << (width - 1)) if index == 0 else breaks
            lines.append(_packed_row(width, labels, keep))
        elif index > 0 and left + right >= width:
            lines.append("." * width)
        else:
            left = min(left, width - 2)
            right = min(right, width - 2 - left) if index == 0 else right
            lines.append(_row(width, labels, left, right))
    if not _responds(lines):
        lines[0] = _respond(lines[0])
    return tuple(lines)


def _char(labels: int, column: int) -> str:
    return "r" if labels >> column & 1 else "p"


def _row(width: int, labels: int, left: int, right: int) -> str:
    real = [_char(labels, column) for column in range(left, width - right)]
    return "." * left + "".join(real) + "." * right


def _packed_row(width: int, labels: int, breaks: int) -> str:
    line = _char(labels, 0)
    for column in range(1, width):
        line += "|p" if breaks >> column & 1 else _char(labels, column)
    return line


def _respond(line: str) -> str:
    last = len(line.rstrip("."))
    return line[: last - 1] + "r" + line[last:]


# --- models --------------------------------------------------------------------------------------


class _Pins:
    """Draws options by name, unless a value (or another strategy) was pinned."""

    def __init__(self, draw: st.DrawFn, pins: Mapping[str, Any]) -> None:
        self.draw, self.pins = draw, pins
        self.drawn: dict[str, Any] = {}
        # Options with no strategy of their own come from pins alone.
        for name in _PINNED_ONLY & pins.keys():
            self(name)

    def __call__(self, name: str, strategy: st.SearchStrategy[Any] = _NO) -> Any:
        pinned = self.pins.get(name, strategy)
        is_strategy = isinstance(pinned, st.SearchStrategy)
        self.drawn[name] = self.draw(pinned) if is_strategy else pinned
        return self.drawn[name]

    def __getitem__(self, name: str) -> Any:
        return self.drawn[name]

    def __contains__(self, name: str) -> bool:
        return name in self.drawn

    def has(self, name: str) -> bool:
        """Whether an option was pinned, to a value or a strategy."""
        return name in self.pins

    def fixed(self, name: str, value: Any) -> bool:
        """Whether an option was pinned to this value."""
        return name in self.pins and self.pins[name] is value


# Never drawn, only pinned: traps that the library has to refuse, and what only some tests are of.
_PINNED_ONLY = frozenset(
    {
        "attention_dropout", "conv_mixer", "end_token", "hidden_mixer", "hidden_use",
        "loose_parameter", "max_positions", "residual_dropout", "tied_linears",
    }
)  # fmt: skip
_FIELDS = tuple(f.name for f in fields(DecoderConfig))

_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "hidden": st.sampled_from([4, 5, 8, 12]),
    "positions": st.sampled_from(["none", "rotary", "learned"]),
    "qk_norm": _FLAG,
    "value_dim": st.sampled_from([None, 1, 3]),
    "attention_scale": st.sampled_from([None, 1.0]),
    "mlp": st.sampled_from(["plain", "gated"]),
    "mlp_width": st.sampled_from([3, 6, 12]),
    "norm": st.sampled_from(["none", "rms", "layernorm"]),
    "norm_place": st.sampled_from(["pre", "post", "sandwich"]),
    "bias": _FLAG,
    "softcap": st.sampled_from([None, 2.0]),
    "sinks": _FLAG,
    "tied_embeddings": _FLAG,
    "padding_token": st.sampled_from([None, 1]),
    "fused_qkv": _FLAG,
    "transposed": _FLAG,
    "repeated_linear": _FLAG,
    "final_softcap": st.sampled_from([None, 4.0]),
    "vocabulary": st.sampled_from([3, 7, 11]),
}
"""Options that depend on no other, the simplest value first."""
# A norm over one number leaves a sign, whose gradient is only rounding; rotation takes pairs.
_HEAD_DIMS = {
    "rotary": st.sampled_from([2, 4]),
    "normed": st.sampled_from([2, 3, 4]),
    "other": st.sampled_from([2, 1, 3, 4]),
}
_ROTARY_FACTOR = st.sampled_from([1.0, 1.3])
_WINDOWS = st.tuples(*[st.sampled_from([None, 1, 2, 3, 5])] * 3)
# Heads come as (heads, kv_heads), plain ones first.
_HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 2)])


def _draw_config(pins: _Pins) -> DecoderConfig:
    layers = pins("layers", _integers(2 if pins.fixed("repeated_block", True) else 1, 3))
    _draw_heads(pins)
    for name, strategy in _OPTIONS.items():
        pins(name, strategy)
    rotary = pins["positions"] == "rotary"
    pins("head_dim", _HEAD_DIMS["rotary" if rotary else "normed" if pins["qk_norm"] else "other"])
    pins("rotary_factor", _ROTARY_FACTOR if rotary else st.just(1.0))
    pins("windows", _WINDOWS)
    pins("repeated_block", _FLAG if layers > 1 else _NO)
    blind = pins("blind_rows", _NO if pins.fixed("additive_mask", True) else _FLAG)
    pins("additive_mask", _NO if blind else _FLAG)
    options = {name: pins[name] for name in _FIELDS if name in pins}
    if not pins.has("windows"):
        options["windows"] = _shortest(options["windows"][:layers])
    return DecoderConfig(**options)


def _draw_heads(pins: _Pins) -> None:
    if not pins.has("heads") and not pins.has("kv_heads"):
        heads, groups = pins.draw(_HEADS)
        pins("heads", st.just(heads))
        pins("kv_heads", st.just(groups))
    elif not pins.has("heads"):
        groups = pins("kv_heads")
        pins("heads", st.sampled_from([groups, 2 * groups, 3 * groups]))
    else:
        heads = pins("heads")
        pins("kv_heads", st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))


def _shortest(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """One entry where all layers have the same window."""
    return windows[:1] if len(set(windows)) == 1 else windows


@st.composite
def configs(draw: st.DrawFn, **pins: Any) -> DecoderConfig:
    """Structures of the reference decoder; keyword arguments pin options (or give a strategy)."""
    return _draw_config(_Pins(draw, pins))


# --- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Case:
    """A model, a training batch and validation batches, as structure and seeds.

    Attributes:
        config: of the decoder.
        train: rows of the training batch.
        validations: rows of each validation batch.
        seed: of weights and token ids.
        direction_seed: of ``directions``.
        explicit_mask: an ``attention_mask`` even where nothing is padded (and nothing packed).
        explicit_positions: ``position_ids`` even where nothing is packed.
    """

    config: DecoderConfig
    train: Rows
    validations: tuple[Rows, ...]
    seed: int = 0
    direction_seed: int = 1
    explicit_mask: bool = False
    explicit_positions: bool = False

    def __repr__(self) -> str:
        """The ``make_case`` call that rebuilds this case."""
        own = {
            name: getattr(self, name)
            for name, default in _CASE_DEFAULTS.items()
            if getattr(self, name) != default
        }
        own |= {
            f.name: getattr(self.config, f.name)
            for f in fields(DecoderConfig)
            if getattr(self.config, f.name) != f.default
        }
        rest = "".join(f", {name}={value!r}" for name, value in own.items())
        return f"make_case({self.train!r}, {self.validations!r}{rest})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis would spell out every field of a dataclass.
        printer.text(repr(self))

    def model(self) -> ReferenceDecoder:
        """A new decoder; equal numbers every time."""
        return ReferenceDecoder(self.config, self.seed)

    def adapter(self) -> ReferenceAdapter:
        """A new decoder in its adapter."""
        return ReferenceAdapter(self.model())

    def _batch(self, lines: Rows, index: int) -> dict[str, Tensor]:
        return make_batch(
            lines,
            vocabulary=self.config.vocabulary,
            seed=self.seed + 2**16 * (index + 1),
            explicit_mask=self.explicit_mask and not any("|" in line for line in lines),
            explicit_positions=self.explicit_positions,
        )

    @property
    def batch(self) -> dict[str, Tensor]:
        """The training batch, built anew."""
        return self._batch(self.train, 0)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The training batch without its labels, as a forward takes it."""
        return {name: x for name, x in self.batch.items() if name != "labels"}

    @property
    def validation(self) -> list[dict[str, Tensor]]:
        """The validation batches, built anew."""
        return [self._batch(lines, i + 1) for i, lines in enumerate(self.validations)]

    def directions(self, parameters: Mapping[str, Tensor], salt: int = 0) -> dict[str, Tensor]:
        """Standard normal tensors of these shapes, by name; another set for every ``salt``."""
        generator = torch.Generator().manual_seed(self.direction_seed + 2**16 * salt)
        return {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for name, p in parameters.items()
        }


_CASE_DEFAULTS = {f.name: f.default for f in fields(Case) if isinstance(f.default, (bool, int))}

BATCH_PINS = frozenset(
    {
        "mode", "max_length", "max_rows", "train", "validation_mode", "validations",
        "max_validation_length", "max_validations", "seed", "direction_seed",
        "explicit_mask", "explicit_positions",
    }
)  # fmt: skip
"""What ``cases`` pins besides the fields of ``DecoderConfig``."""


def make_case(
    train: Rows = ("pprrr",),
    validations: tuple[Rows, ...] = (("pprr",),),
    *,
    seed: int = 0,
    direction_seed: int = 1,
    explicit_mask: bool = False,
    explicit_positions: bool = False,
    **config: Any,
) -> Case:
    """A case by hand, for pinned examples; ``config`` are fields of ``DecoderConfig``."""
    case = Case(
        DecoderConfig(**config),
        tuple(train),
        tuple(tuple(lines) for lines in validations),
        seed,
        direction_seed,
        explicit_mask,
        explicit_positions,
    )
    for lines in (case.train, *case.validations):
        _check_rows(lines)
    return case


CASE = make_case(("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), layers=2, seed=5)
ONE = make_case(("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), seed=5, layers=1)
TIED = make_case(("pprrr",), (("pprr",),), tied_embeddings=True)
SHARED = make_case(("pprrr",), (("pprr",),), layers=3, repeated_block=True, tied_embeddings=True)
# Every token is the embedding's padding token somewhere in the row, as an end of turn often is.
PADDED = make_case(("pprrr",), (("pprr",),), tied_embeddings=True, padding_token=1, vocabulary=3)


@st.composite
def cases(draw: st.DrawFn, **pins: Any) -> Case:
    """Cases of every structure. Keyword arguments pin options to a value or a strategy.

    Pinned can be every field of ``DecoderConfig`` (traps such as ``loose_parameter``,
    ``hidden_use``, ``conv_mixer``, ``hidden_mixer``, ``tied_linears`` and dropout come only so)
    and ``BATCH_PINS``: ``mode`` and ``validation_mode`` (of ``MODES``; each validation batch draws
    its own), ``max_length``, ``max_rows``, ``max_validation_length``, ``max_validations``,
    ``train`` and ``validations`` (rows), seeds, ``explicit_mask``, ``explicit_positions``.

    A one-token row has no label, so the shortest batch has two columns
    and one label position (T = 1 in the mathematics); shorter rows occur beside longer ones.
    """
    unknown = pins.keys() - BATCH_PINS - set(_FIELDS)
    if unknown:
        raise TypeError(f"nothing to pin by the name of {sorted(unknown)}")
    pinned = _Pins(draw, pins)
    config = _draw_config(pinned)
    return Case(
        config,
        seed=pinned("seed", SEEDS),
        direction_seed=pinned("direction_seed", SEEDS),
        explicit_mask=pinned("explicit_mask", _FLAG),
        explicit_positions=pinned("explicit_positions", _FLAG),
        train=_draw_train(pinned),
        validations=_draw_validations(pinned),
    )


_MODE = st.sampled_from(MODES)


def _draw_train(pins: _Pins) -> Rows:
    if pins.has("train"):
        return tuple(pins("train"))
    mode, length = pins("mode", _MODE), pins("max_length", st.just(LENGTH))
    return _draw_rows(pins.draw, mode, length, pins("max_rows", st.just(ROWS)))


def _draw_validations(pins: _Pins) -> tuple[Rows, ...]:
    if pins.has("validations"):
        return tuple(tuple(lines) for lines in pins("validations"))
    most = pins("max_validations", st.just(VALIDATIONS))
    length = pins("max_validation_length", st.just(VALIDATION_LENGTH))
    # The last draws of a case, so a smaller count drops batches and moves nothing else.
    return tuple(
        _draw_rows(pins.draw, pins("validation_mode", _MODE), length, VALIDATION_ROWS)
        for _ in range(pins.draw(_integers(1, most)))
    )


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""Where numbers are computed: one result is expected on every device that is here."""


# --- contractions --------------------------------------------------------------------------------


class Factors(NamedTuple):
    """What a contraction takes: token side, validation side and direction."""

    delta: Tensor
    x: Tensor
    delta_v: Tensor
    x_v: Tensor
    m: Tensor


@dataclass(frozen=True)
class ContractionCase:
    """Shapes of one contraction, letters as in the einsums, and a seed for its numbers."""

    b: int
    t: int
    o: int
    i: int
    v: int
    seed: int = 0
    device: str = "cpu"

    def factors(self, *, integers: bool = False) -> Factors:
        """float64 tensors; with ``integers`` from -4 to 4, so that every sum is exact."""
        generator = torch.Generator().manual_seed(self.seed)

        def tensor(*shape: int) -> Tensor:
            if integers:
                drawn = torch.randint(-4, 5, shape, generator=generator).double()
            else:
                drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(self.device)

        return Factors(
            tensor(self.b, self.t, self.o),
            tensor(self.b, self.t, self.i),
            tensor(self.v, self.o),
            tensor(self.v, self.i),
            tensor(self.o, self.i),
        )


def contractions() -> st.SearchStrategy[ContractionCase]:
    """Shapes of a contraction, output and input width drawn apart."""
    return st.builds(
        ContractionCase,
        b=st.integers(1, 3),
        t=st.integers(1, 7),
        o=st.integers(1, 9),
        i=st.integers(1, 9),
        v=st.integers(1, 12),
        seed=SEEDS,
        device=st.sampled_from(DEVICES),
    )
