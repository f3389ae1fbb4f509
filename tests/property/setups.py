"""The ground of all properties of the estimators: what is scored, the oracle's truth, comparison.

A property is a test of ``setup``, which ``mutation.body`` runs on any case and on any mutant of
the core. The core is reached through ``Scorer`` and through module attributes
only. Everything on the expected side comes from ``alphatoken.oracle`` or is written out here.

A ``Setup`` is a case and what of it is scored. The stability side gives every scorer a direction
that is known entry by entry: with a Fisher of ``F`` and a reference ``W - D / F`` it is ``D``, any
random direction. The adaptation side is the validation gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken import AlphaTokenWarning, FisherDrift, Scorer, ScorerConfig, TokenValues
from alphatoken.errors import AlphaTokenError
from alphatoken.model.protocol import AttentionCall, NativeAttention, ScoredLinear
from alphatoken.oracle import gradients, influence, jacobian, propagation
from tests.property.decoder import (
    Attention,
    ReferenceAdapter,
    ReferenceDecoder,
    explicit_attention,
    rotary_tables,
)
from tests.property.strategies import Case, cases
from tests.property.tolerance import allowed, close

EVERY = ("alphatoken", "direct", "path", "paper_literal", "label")


def compare_path(
    setup: Setup,
    model: ReferenceDecoder,
    values: TokenValues,
    direction: Mapping[str, Tensor],
    name: str,
) -> None:
    """One side of path values against the column sums along a given direction."""
    psi = oracle_influence(setup, model, direction)
    actual = values.adaptation if name.startswith("adaptation") else values.stability
    expected, scale = (
        influence.to_token_index(influence.column_sums(x)) * values.mask
        for x in (psi.matrix, psi.absolute_scale)
    )
    close(actual, expected, scale, MODEL, name=f"path, {name}")


def summed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    losses = gradients.run_losses(forward_of(model), dict(batch))
    return torch.stack(list(losses.values())).sum()


BETAS, EPS = (0.8, 0.97), 1e-3


def stepped(
    setup: Setup, steps: int, kind: str, eps: float = EPS
) -> tuple[ReferenceDecoder, torch.optim.Optimizer]:
    """A model after some real optimizer steps, and the optimizer."""
    model = setup.case.model()
    make = torch.optim.AdamW if kind in ("AdamW", "amsgrad") else torch.optim.Adam
    decay = 0.0 if kind == "Adam" else 0.05  # coupled under "Adam, L2"
    options = {"lr": 1e-3, "betas": BETAS, "eps": eps, "weight_decay": decay}
    optimizer = make(model.parameters(), amsgrad=kind == "amsgrad", **options)  # type: ignore[arg-type]
    for _ in range(steps):
        optimizer.zero_grad()
        summed_loss(model, setup.case.batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bits(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    """Whether every parameter has the bits that it had."""
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def refusal(run: Callable[[], object]) -> AlphaTokenError | None:
    """The library's error, if there is one."""
    try:
        run()
    except AlphaTokenError as error:
        return error
    return None


CONTRACTION = allowed("contraction", torch.float64)
"""Float64, one contraction, relative to the sum of absolute terms."""
MODEL = allowed("model", torch.float64)
"""Float64, through a whole model."""
LAMBDA = 1.5


# --- what is scored ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A case and what of it is scored: the layers (as the option has them)."""

    case: Case
    layers: int | str | tuple[int, ...] = "all"


@st.composite
def setups(draw: st.DrawFn, *, last: bool = False, **pins: Any) -> Setup:
    """Setups over ``cases(**pins)``: K, "all" or a list of layers. ``last``: K = 1."""
    case = draw(cases(**pins))
    assume(not is_certain(case))
    depth = case.config.layers
    if last:
        layers: int | str | tuple[int, ...] = 1
    else:
        some = st.sets(st.integers(0, depth - 1), min_size=1).map(lambda s: tuple(sorted(s)))
        layers = draw(st.one_of(st.integers(1, depth), st.just("all"), some))
    return Setup(case, layers)


def smooth(setup: Setup) -> bool:
    """Whether autograd gives true derivatives of every embedding's rows, as it need not."""
    return setup.case.config.padding_token is None


def is_certain(case: Case) -> bool:
    """Whether a response token is predicted with a probability above 1 - 1e-4.

    The gradient of its loss, p - 1, has then lost four digits or more in the softmax itself, in the
    oracle as in the library: nothing can be compared to 1e-10 of what is left.
    """
    model = case.model()
    with torch.no_grad():
        for batch in (case.batch, *case.validation):
            inputs = {k: v for k, v in batch.items() if k != "labels"}
            losses = -model(**inputs)[:, :-1].log_softmax(-1)
            labels = batch["labels"][:, 1:]
            chosen = losses.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            if bool((chosen[labels != -100] < 1e-4).any()):
                return True
    return False


def layer_indices(setup: Setup) -> tuple[int, ...]:
    depth = setup.case.config.layers
    if setup.layers == "all":
        return tuple(range(depth))
    if isinstance(setup.layers, int):
        return tuple(range(depth - setup.layers, depth))
    assert isinstance(setup.layers, tuple)
    return tuple(i % depth for i in setup.layers)


def forward_of(model: nn.Module) -> Any:
    """The model as the oracles call it; it must never be shown the labels."""

    def forward(batch: Mapping[str, Tensor]) -> Tensor:
        assert "labels" not in batch
        logits: Tensor = model(**batch)
        return logits

    return forward


def scored(setup: Setup, adapter: ReferenceAdapter) -> list[ScoredLinear]:
    return adapter.scored_linears(layer_indices(setup))


def parameters_of(setup: Setup, adapter: ReferenceAdapter) -> dict[str, Tensor]:
    """Weights by name; a tied one once."""
    weights: dict[str, Tensor] = {}
    for linear in scored(setup, adapter):
        weights[linear.weight_name] = linear.weight
    once: dict[int, str] = {}
    for name, parameter in weights.items():
        once.setdefault(id(parameter), name)
    return {name: weights[name] for name in once.values()}


def drift_of(setup: Setup, model: ReferenceDecoder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(Fisher, reference) by parameter name: V = F o (W - W_ref) is a random direction."""
    parameters = parameters_of(setup, ReferenceAdapter(model))
    away = setup.case.directions(parameters, salt=1)
    fisher = {n: d.square() + 0.1 for n, d in setup.case.directions(parameters, salt=2).items()}
    return fisher, {n: p.detach() - away[n] / fisher[n] for n, p in parameters.items()}


# --- the truth -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Both sides of M and their influence matrices, by the oracles.

    ``directions`` and ``influences`` hold the adaptation side first, the stability side second.
    """

    parameters: tuple[str, ...]
    directions: tuple[dict[str, Tensor], dict[str, Tensor]]
    influences: tuple[influence.Influence, influence.Influence]
    mask: Tensor


def oracle_influence(
    setup: Setup,
    model: ReferenceDecoder,
    direction: Mapping[str, Tensor],
    batch: Mapping[str, Tensor] | None = None,
) -> influence.Influence:
    """Psi of the setup's batch (or of another) along any direction."""
    linears = scored(setup, ReferenceAdapter(model))
    return influence.exact_influence(
        model,
        forward_of(model),
        setup.case.batch if batch is None else batch,
        {linear.name: linear.module for linear in linears},
        direction,
        transposed=[linear.name for linear in linears if linear.transposed],
    )


@lru_cache(maxsize=4)
def truth(setup: Setup) -> Truth:
    """The oracles' answer for a setup; no code of the core has a part in it."""
    model = setup.case.model()
    parameters = parameters_of(setup, ReferenceAdapter(model))
    gain = gradients.validation_gradient(
        model, forward_of(model), setup.case.validation, parameters
    )
    fisher, reference = drift_of(setup, model)
    keep = {n: fisher[n] * (p.detach() - reference[n]) for n, p in parameters.items()}
    both = (oracle_influence(setup, model, gain), oracle_influence(setup, model, keep))
    return Truth(
        tuple(parameters),
        (gain, keep),
        both,
        response_mask(gradients.known_labels(setup.case.batch)),
    )


def label_truth(
    setup: Setup, model: ReferenceDecoder, parameters: Mapping[str, Tensor], m: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The oracle's label values along ``m``, and the sums of their absolute terms."""
    forward, batch = forward_of(model), setup.case.batch
    expected = gradients.label_values(model, forward, batch, m)
    scale = torch.zeros_like(expected)
    tokens = gradients.response_tokens(gradients.known_labels(batch))
    each = gradients.per_token_gradients(model, forward, batch, parameters)
    for (b, i), gradient in zip(tokens, each, strict=True):
        scale[b, i] = sum((g.abs() * m[n].abs()).sum() for n, g in gradient.items())
    return expected, scale


def response_mask(labels: Tensor) -> Tensor:
    mask = torch.zeros_like(labels, dtype=torch.bool)
    for b, i in gradients.response_tokens(labels):
        mask[b, i] = True
    return mask


# --- scorers -------------------------------------------------------------------------------------


def make_scorer(
    setup: Setup,
    estimator: str,
    *,
    model: ReferenceDecoder | None = None,
    retention: Any = True,
    **more: Any,
) -> Scorer:
    """A scorer of the setup, with the random direction on its stability side if not told otherwise.

    Label values are taken by forward mode, which is exact to rounding. Other arguments of the
    scorer go by their names, all else is options.
    """
    if estimator == "label":
        more = {"derivative": "forward_mode", **more}
    if estimator == "walk":  # all that trains walks
        more = {"layers": ScorerConfig.layers, **more}
    model = setup.case.model() if model is None else model
    if isinstance(retention, bool):
        retention = FisherDrift(*drift_of(setup, model)) if retention else None
    own = ScorerConfig.__dataclass_fields__.keys()
    layers = "all" if more.get("parameters") == "all" else setup.layers
    options = {"layers": layers, "stability_weight": LAMBDA, "window": None, **more}
    options = {"max_relative_drift": None, **options}
    config = ScorerConfig(estimator, **{n: x for n, x in options.items() if n in own})
    arguments = {n: x for n, x in more.items() if n not in own}
    validation = arguments.pop("validation", setup.case.validation)
    return Scorer(model, validation, retention, config, **arguments)


@contextmanager
def quiet() -> Iterator[None]:
    """Random directions may well outweigh each other; that warning has a test of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AlphaTokenWarning)
        yield


def quiet_score(scorer: Scorer, batch: Mapping[str, Any], **more: Any) -> TokenValues:
    with quiet():
        return scorer.score(batch, **more)


def random_drift(parameters: Mapping[str, Tensor], seed: int) -> FisherDrift:
    """A random Fisher and a reference a little away from the weights."""
    generator = torch.Generator().manual_seed(seed)
    fisher, reference = {}, {}
    for name, parameter in parameters.items():
        noise = torch.rand(2, *parameter.shape, generator=generator, dtype=torch.float64)
        noise = noise.to(parameter.device)
        fisher[name] = noise[0]
        reference[name] = parameter.detach().double() + 0.3 * (noise[1] - 0.5)
    return FisherDrift(fisher, reference)


def at_tokens(by_position: Tensor, labels: Tensor) -> Tensor:
    """By token index, zero off the response."""
    response = labels.cpu() != -100
    response[:, 0] = False
    return influence.to_token_index(by_position.cpu()).masked_fill(~response, 0.0)


# --- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Values by position (b, t) and the sums of the absolute terms behind them."""

    value: Tensor
    scale: Tensor

    def __add__(self, other: Columns) -> Columns:
        return Columns(self.value + other.value, self.scale + other.scale)

    def __mul__(self, factor: float | Tensor) -> Columns:
        size = factor.abs() if isinstance(factor, Tensor) else abs(factor)
        return Columns(self.value * factor, self.scale * size)


Sides = tuple[Columns, Columns]
"""Adaptation, stability."""


def readout(setup: Setup, how: Any, weights: Tensor | None = None) -> Sides:
    """A readout of both matrices; ``weights`` (b, t) at token indices scale the losses."""

    def weighted(matrix: Tensor, absolute: bool) -> Tensor:
        if weights is None:
            return matrix
        by_position = torch.zeros_like(weights)
        by_position[:, :-1] = weights[:, 1:]
        return matrix * (by_position.abs() if absolute else by_position).unsqueeze(-1)

    first, second = (
        Columns(how(weighted(i.matrix, False)), how(weighted(i.absolute_scale, True)))
        for i in truth(setup).influences
    )
    return first, second


def zeros(setup: Setup) -> Sides:
    none = torch.zeros(setup.case.batch["labels"].shape, dtype=torch.float64)
    return Columns(none, none), Columns(none, none)


def of_tokens(by_position: Columns, mask: Tensor) -> Columns:
    """What falls on response tokens, at token indices."""
    value, scale = map(influence.to_token_index, (by_position.value, by_position.scale))
    return Columns(value * mask, scale * mask)


def above_rounding(scale: Tensor, beside: Tensor) -> Tensor:
    """A millionth of the largest terms beside it is added: an entry far below its neighbours, or
    below the other part of its value, is a difference of errors of their size, sent back through
    the model, and carries their rounding (seen: 1e-8 beside 6, off by 4e-10 of itself)."""
    return scale + 1e-6 * beside.max() if scale.numel() else scale


def row_total(columns: Columns) -> Columns:
    return Columns(columns.value.sum(1), columns.scale.sum(1))


def compare_values(
    values: TokenValues,
    setup: Setup,
    direct: Sides,
    causal: Sides | None,
    *,
    name: str,
) -> None:
    """All fields of the values against columns by position; ``causal=None``: no split."""
    mask = truth(setup).mask
    assert torch.equal(values.mask, mask)
    assert values.total.dtype == torch.float64
    by_side = (
        (values.adaptation, values.adaptation_direct, values.adaptation_causal),
        (values.stability, values.stability_direct, values.stability_causal),
    )
    weights = (1.0, values.stability_weight)
    nothing = zeros(setup)
    total, left = nothing[0], row_total(nothing[0])
    for side, (whole, one, two) in enumerate(by_side):
        later = nothing[side] if causal is None else causal[side]
        parts = (of_tokens(direct[side], mask), of_tokens(later, mask))
        both = parts[0] + parts[1]
        label = f"{name}, {'stability' if side else 'adaptation'}"
        if causal is None:
            assert one is None
            assert two is None
        else:
            assert one is not None
            assert two is not None
            for part, own, what in zip(parts, (one, two), ("direct", "causal"), strict=True):
                size = above_rounding(part.scale, both.scale)
                close(own, part.value, size, MODEL, name=f"{label} {what}")
        close(whole, both.value, both.scale, MODEL, name=label)
        total = total + both * weights[side]
        every = row_total(direct[side]) + row_total(later)
        rest = Columns(every.value - row_total(both).value, every.scale)
        left = left + rest * weights[side]
    close(values.total, total.value, total.scale, MODEL, name=f"{name}, total")
    close(values.unassigned, left.value, left.scale, MODEL, name=f"{name}, unassigned")


# --- Value-Propagation ---------------------------------------------------------------------------


@dataclass
class AttentionRecord:
    """One attention call of a scored layer: the call, its output, and its projection's input."""

    call: AttentionCall
    output: Tensor
    x: Tensor


@contextmanager
def seen_attention(setup: Setup, adapter: ReferenceAdapter) -> Iterator[list[AttentionRecord]]:
    """Record every attention call of the scored layers during the forwards inside."""
    modules = {m for layer in layer_indices(setup) for m in adapter.attention_modules(layer)}
    inputs: dict[nn.Module, Tensor] = {}
    records: list[AttentionRecord] = []

    def override(call: AttentionCall, native: NativeAttention) -> Tensor:
        output = native(call.query, call.key, call.value)
        records.append(AttentionRecord(call, output, inputs[call.module]))
        return output

    with ExitStack() as hooks, adapter.override_attention(list(modules), override):
        for module in modules:
            assert isinstance(module, Attention)
            source = module.qkv_proj if setup.case.config.fused_qkv else module.v_proj

            def hook(_: nn.Module, args: Any, __: Tensor, owner: nn.Module = module) -> None:
                inputs[owner] = args[0].detach()

            hooks.enter_context(source.register_forward_hook(hook))
        yield records


def value_direction(
    setup: Setup, adapter: ReferenceAdapter, module: nn.Module, direction: Mapping[str, Tensor]
) -> Tensor:
    """(g v, i) rows of the direction that make the value states."""
    assert isinstance(module, Attention)
    source = module.qkv_proj if setup.case.config.fused_qkv else module.v_proj
    by_identity = {
        id(p): direction[n]
        for n, p in adapter.model.named_parameters(remove_duplicate=False)
        if n in direction
    }
    m = by_identity[id(source.weight)]
    return (m.T if setup.case.config.transposed else m)[-module.widths[2] :]


@lru_cache(maxsize=4)
def propagation_layers(
    setup: Setup, aggregated: bool
) -> tuple[tuple[propagation.PropagationLayer, ...], ...]:
    """Per side of M, what the oracle of Value-Propagation reads of each scored attention call.

    ``aggregated``: the errors at the heads' outputs are those of the summed loss, as
    ``paper_literal`` has them, instead of each position's own.
    """
    adapter = setup.case.adapter()
    model, batch = adapter.model, setup.case.batch
    with seen_attention(setup, adapter) as records:
        if aggregated:
            losses = gradients.run_losses(forward_of(model), batch)
            summed = torch.stack(list(losses.values())).sum()
            errors = list(torch.autograd.grad(summed, [s.output for s in records]))
        else:
            errors = propagation.head_output_errors(
                forward_of(model), batch, lambda: [s.output for s in records]
            )
    sides = []
    for direction in truth(setup).directions:
        layers = []
        for record, error in zip(records, errors, strict=True):
            m = value_direction(setup, adapter, record.call.module, direction)
            alpha = attention_weights(record.call)
            layers.append(propagation.PropagationLayer(alpha, error, record.x, m))
        sides.append(tuple(layers))
    return tuple(sides)


def attention_weights(call: AttentionCall) -> Tensor:
    """alpha (b, h, k, t), by explicit softmax: the attention of values that are unit vectors."""
    b, g, t, _ = call.key.shape
    unit = torch.eye(t, dtype=call.key.dtype).expand(b, g, t, t)
    return explicit_attention(call, call.query, call.key, unit).detach()


def attention_spec(model: ReferenceDecoder, layer: int, length: int) -> jacobian.AttentionSpec:
    """The oracle's description of one attention layer, read off the decoder's own weights."""
    config, attention = model.config, model.layers[layer].attention

    def part(which: int, kind: str) -> Tensor | None:
        names = ("q_proj", "k_proj", "v_proj")
        module = attention.qkv_proj if config.fused_qkv else getattr(attention, names[which])
        tensor = getattr(module, kind)
        if tensor is None:
            return None
        tensor = tensor.detach()
        tensor = tensor.T if kind == "weight" and config.transposed else tensor
        return tensor.split(attention.widths)[which] if config.fused_qkv else tensor

    w_q, w_k, w_v = (part(i, "weight") for i in range(3))
    b_q, b_k, b_v = (part(i, "bias") for i in range(3))
    tables = None
    if config.positions == "rotary":
        tables = rotary_tables(config, torch.arange(length).unsqueeze(0))
    window = config.window(layer)
    place = torch.arange(length)
    gap = place[:, None] - place
    return jacobian.AttentionSpec(
        w_q,
        w_k,
        w_v,
        config.heads,
        config.kv_heads,
        config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        b_q,
        b_k,
        b_v,
        attention.q_norm.weight.detach() if config.qk_norm else None,
        attention.k_norm.weight.detach() if config.qk_norm else None,
        cos=None if tables is None else tables[0][0, 0],
        sin=None if tables is None else tables[1][0, 0],
        softcap=config.softcap,
        sinks=None if attention.sinks is None else attention.sinks.detach(),
        mask=(gap >= 0) & (gap < (window or length)),
    )


def propagated(
    setup: Setup, *, window: int | None, head_reduction: str = "per_head", aggregated: bool = False
) -> Sides:
    """Columns of Value-Propagation by position, by the oracle's loops, and their scale."""
    sides = []
    for layers in propagation_layers(setup, aggregated):
        value = propagation.value_propagation(
            layers,
            window=window,
            head_reduction=head_reduction,  # type: ignore[arg-type]
        )
        scale = sum(_propagation_scale(layer, window) for layer in layers)
        sides.append(Columns(value, torch.as_tensor(scale)))
    return sides[0], sides[1]


def _propagation_scale(layer: propagation.PropagationLayer, window: int | None) -> Tensor:
    """Sum of |alpha e (M x)| over heads, later positions of the window and components."""
    heads, width = layer.errors.shape[1], layer.errors.shape[-1]
    moved = layer.inputs @ layer.direction.T
    moved = moved.unflatten(-1, (-1, width)).abs()
    moved = moved.repeat_interleave(heads // moved.shape[2], dim=2)
    k = torch.arange(moved.shape[1])
    band = k.unsqueeze(-1) > k
    if window is not None:
        band = band & (k.unsqueeze(-1) <= k + window)
    # The mean over heads of alpha lies below their sum.
    alpha = layer.alpha.sum(1, keepdim=True) * band
    return torch.einsum("bskt,bhkv,bthv->bt", alpha, layer.errors.abs(), moved)
