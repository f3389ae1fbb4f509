"""The influence oracle against finite differences, ordinary autograd and its own exact cases.

The decoder is that of ``decoder.py`` with an attention written out here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.model.protocol import AttentionCall
from alphatoken.oracle import gradients, influence, jacobian, propagation
from tests.property.decoder import (
    DecoderConfig,
    ReferenceDecoder,
    TransposedLinear,
    dense_mask,
    draw_weights,
)
from tests.property.setups import attention_spec
from tests.property.tolerance import close

VOCABULARY, WIDTH, HEAD, HIDDEN = 7, 6, 4, 5
EXACT = 1e-12  # one contraction
MODEL = 1e-10  # through a whole decoder


@dataclass(frozen=True)
class Structure:
    layers: int = 2
    heads: int = 2
    groups: int = 1
    bias: bool = False
    rotary: bool = True
    qk_norm: bool = False
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    twice: bool = False  # a linear in each MLP is called twice
    tied: bool = False  # one MLP module serves all layers
    shared_weight: bool = False  # k and v projections share one Parameter
    transposed: bool = False
    seed: int = 0


class Decoder(ReferenceDecoder):
    """``epsilon`` scales every cross-position gradient and no value; each layer leaves a trace."""

    def __init__(self, structure: Structure) -> None:
        s = self.structure = structure
        super().__init__(
            DecoderConfig(
                vocabulary=VOCABULARY, layers=s.layers, hidden=WIDTH, heads=s.heads,
                kv_heads=s.groups, head_dim=HEAD, mlp="plain", mlp_width=HIDDEN, bias=s.bias,
                positions="rotary" if s.rotary else "none", qk_norm=s.qk_norm, sinks=s.sinks,
                softcap=s.softcap, windows=(s.window,), repeated_linear=s.twice,
            )
        )  # fmt: skip
        self.epsilon = 1.0
        self.trace: list[dict[str, Tensor]] = []
        for block in self.layers:
            attention = block.attention
            attention.override = self.attend
            if s.shared_weight:
                attention.k_proj.weight = attention.v_proj.weight
            if s.transposed:
                block.mlp.down_proj = TransposedLinear(HIDDEN, WIDTH, s.bias)
            if s.tied:
                block.mlp = self.layers[0].mlp
            block.register_forward_pre_hook(lambda _, args: self.trace.append({"h": args[0]}))
            attention.register_forward_pre_hook(lambda _, args: self.note(x=args[0]))
        self.final_norm.register_forward_pre_hook(lambda _, args: self.trace.append({"h": args[0]}))
        draw_weights(self, s.seed)

    def note(self, **tensors: Tensor) -> None:
        self.trace[-1] |= tensors

    def attend(self, call: AttentionCall, _: Any) -> Tensor:
        repeats = self.structure.heads // self.structure.groups

        def own(u: Tensor) -> Tensor:
            return u.repeat_interleave(repeats, dim=1)

        def across(u: Tensor) -> Tensor:
            return self.epsilon * own(u) + (1 - self.epsilon) * own(u).detach()

        q, k, v, mask = call.query, call.key, call.value, dense_mask(call)
        self_pair = torch.eye(q.shape[2], dtype=torch.bool)
        logits = torch.where(self_pair, q @ own(k).mT, q @ across(k).mT) * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        logits = logits.masked_fill(~mask, -torch.inf)
        if call.sinks is not None:
            sink = call.sinks[None, :, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        alpha = logits.softmax(-1)[..., : q.shape[2]]
        o = (alpha * self_pair) @ own(v) + (alpha * ~self_pair) @ across(v)
        self.note(k=k, v=v, alpha=alpha, o=o, mask=mask)
        return o

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        self.trace = []
        return super().forward(batch["input_ids"])

    def scored(self, last: int) -> dict[str, nn.Module]:
        parts = [f"attention.{name}" for name in self.layers[0].attention.linears()]
        parts += [f"mlp.{name}" for name in self.layers[0].mlp.linears()]
        chosen = range(len(self.layers) - last, len(self.layers))
        names = [f"layers.{j}.{part}" for j in chosen for part in parts]
        return {name: self.get_submodule(name) for name in names}

    def conv(self) -> list[str]:
        named = self.named_modules(remove_duplicate=False)
        return [name for name, module in named if isinstance(module, TransposedLinear)]


@dataclass(frozen=True)
class Case:
    """A decoder, its scored modules, a direction and a batch."""

    model: Decoder
    modules: dict[str, nn.Module]
    direction: dict[str, Tensor]
    batch: dict[str, Tensor]

    @property
    def options(self) -> dict[str, Any]:
        return {"transposed": self.model.conv()}

    def influence(self) -> influence.Influence:
        return influence.exact_influence(
            self.model, self.model, self.batch, self.modules, self.direction, **self.options
        )


def make_case(
    structure: Structure,
    *,
    last: int = 3,
    rows: int = 1,
    length: int = 4,
    labelled: tuple[bool, ...] = (True,) * 12,
) -> Case:
    model = Decoder(structure)
    modules = model.scored(min(last, structure.layers))
    generator = torch.Generator().manual_seed(structure.seed + 1)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    pattern = torch.tensor(labelled[: rows * length]).reshape(rows, length)
    batch = {"input_ids": ids, "labels": torch.where(pattern, ids, -100)}
    direction: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, module in modules.items():
        if id(module.weight) not in seen:
            seen.add(id(module.weight))
            shape: Any = module.weight.shape
            direction[f"{name}.weight"] = torch.randn(
                shape, generator=generator, dtype=torch.float64
            )
    return Case(model, modules, direction, batch)


structures = st.builds(
    Structure,
    layers=st.integers(1, 2),
    heads=st.just(4),
    groups=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    rotary=st.booleans(),
    qk_norm=st.booleans(),
    softcap=st.sampled_from([None, 0.8]),
    sinks=st.booleans(),
    window=st.sampled_from([None, 2]),
    twice=st.booleans(),
    tied=st.booleans(),
    shared_weight=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 2**16),
)
cases = st.builds(
    make_case,
    structures,
    last=st.integers(1, 2),
    rows=st.integers(1, 2),
    length=st.sampled_from([4, 1, 2, 3, 5]),
    labelled=st.one_of(
        st.just((True,) * 10), st.lists(st.booleans(), min_size=10, max_size=10).map(tuple)
    ),
)


def total_loss(case: Case) -> Tensor:
    """The summed loss by torch's own cross-entropy, for the vectorised references."""
    logits = case.model(case.batch)[:, :-1].flatten(0, 1)
    target = case.batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")


# --- gradients ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**16),
    length=st.integers(1, 6),
    hidden=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_token_losses_are_cross_entropies_at_the_index_of_the_predicted_token(
    seed: int, length: int, hidden: list[bool]
) -> None:
    """Proves: token losses are cross entropies at the index of the predicted token (exact),
    against ``token_losses``.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, length, VOCABULARY, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    labels = torch.where(torch.tensor(hidden[: 2 * length]).reshape(2, length), -100, ids)
    found = gradients.token_losses(logits, labels)
    expected = torch.zeros(2, length, dtype=torch.float64)
    expected[:, 1:] = F.cross_entropy(
        logits[:, :-1].mT, labels[:, 1:], ignore_index=-100, reduction="none"
    )
    assert found.dtype == torch.float64
    close(found, expected, torch.ones_like(expected), EXACT)
    assert bool((found[:, 0] == 0).all())
    tokens = gradients.response_tokens(labels)
    assert set(tokens) == {(b, i) for b, i in (labels != -100).nonzero().tolist() if i > 0}


def test_losses_refuse_logits_that_were_already_shifted() -> None:
    with pytest.raises(InputError, match="different tokens"):
        gradients.token_losses(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.long))


@settings(deadline=None)
@given(case=cases)
def test_label_values_are_directional_derivatives_of_each_loss(case: Case) -> None:
    """Autograd against a central difference of every token's loss along M.

    Proves: eq. grad_alignment (exact), against ``label_values``, finite differences.
    """
    values = gradients.label_values(case.model, case.model, case.batch, case.direction)
    parameters = dict(case.model.named_parameters(remove_duplicate=False))
    step = 1e-5

    def losses_at(shift: float) -> Tensor:
        with torch.no_grad():
            for name, m in case.direction.items():
                parameters[name].add_(m, alpha=shift)
            losses = gradients.token_losses(case.model(case.batch), case.batch["labels"])
            for name, m in case.direction.items():
                parameters[name].sub_(m, alpha=shift)
        return losses

    difference = (losses_at(step) - losses_at(-step)) / (2 * step)
    scale = influence.to_token_index(influence.row_sums(case.influence().absolute_scale))
    close(values, difference, scale + 1.0, 2e-6)


def test_validation_gradient_is_that_of_the_mean_over_all_batches() -> None:
    """Batches of different sizes: every response token has the same weight, not every batch."""
    structure = Structure(heads=2, groups=2)
    case = make_case(structure, rows=2, length=5)
    small = make_case(structure, rows=1, length=3, labelled=(False, False, True) * 4)
    other = replace(small, model=case.model, batch={**small.batch})
    found = gradients.validation_gradient(case.model, case.model, [case.batch, other.batch])
    mean = (total_loss(case) + total_loss(other)) / (8 + 1)
    named = dict(case.model.named_parameters())
    expected = torch.autograd.grad(mean, list(named.values()))
    for name, tensor in zip(named, expected, strict=True):
        close(found[name], tensor, tensor.abs().max() + tensor.abs(), MODEL)
    alone = gradients.validation_gradient(case.model, case.model, case.batch)
    assert not torch.allclose(alone["head.weight"], found["head.weight"])


# --- the influence matrix ------------------------------------------------------------------------


@settings(deadline=None)
@given(case=cases)
@example(case=make_case(Structure(layers=2, heads=4, groups=2, twice=True, tied=True), length=4))
@example(case=make_case(Structure(layers=2, heads=4, shared_weight=True, bias=True), length=4))
def test_the_four_readouts_are_what_their_names_say(case: Case) -> None:
    """Row sum: per-token gradient. Column sum: one ordinary backward. All: <grad L, M>.

    Proves: the four readouts are what their names say (exact), against ``row_sums``,
    ``column_sums``, ``diagonal``, ``causal``.
    """
    result = case.influence()
    psi, scale = result.matrix, result.absolute_scale
    labels = case.batch["labels"]

    by_token = gradients.label_values(case.model, case.model, case.batch, case.direction)
    rows = influence.to_token_index(influence.row_sums(psi))
    close(rows, by_token, influence.to_token_index(scale.sum(2)), MODEL)

    columns = influence.column_sums(psi)
    close(columns, ordinary_backward(case), scale.sum(1), MODEL)

    named = dict(case.model.named_parameters(remove_duplicate=False))
    found = torch.autograd.grad(
        total_loss(case), [named[n] for n in case.direction], allow_unused=True
    )
    terms = [
        torch.zeros(()) if g is None else (g * m).sum()
        for g, m in zip(found, case.direction.values(), strict=True)
    ]
    close(psi.sum(), torch.stack(terms).sum(), scale.sum(), MODEL)

    direct, causal = influence.diagonal(psi), influence.causal(psi)
    close(direct + causal, columns, scale.sum(1), EXACT)
    assert torch.equal(psi, psi.tril())
    predicts = torch.zeros_like(labels, dtype=torch.bool)
    predicts[:, :-1] = labels[:, 1:] != -100
    assert bool((psi[~predicts] == 0).all())
    assert bool((psi.abs() <= scale * (1 + EXACT)).all())


def ordinary_backward(case: Case) -> Tensor:
    """(dL/ds_t)^T M x_t of one backward over the summed loss, gathered by own hooks."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append((module, args[0].detach(), output))

    unique = {id(module): module for module in case.modules.values()}
    handles = [module.register_forward_hook(hook) for module in unique.values()]
    loss = total_loss(case)
    for handle in handles:
        handle.remove()
    errors = torch.autograd.grad(loss, [s for _, _, s in calls], allow_unused=True)
    named = dict(case.model.named_parameters(remove_duplicate=False))
    by_parameter = {id(named[name]): m for name, m in case.direction.items()}
    path = torch.zeros(case.batch["labels"].shape, dtype=torch.float64)
    for (module, x, _), delta in zip(calls, errors, strict=True):
        m = by_parameter[id(module.weight)]
        moved = x @ (m if isinstance(module, TransposedLinear) else m.T)
        if delta is not None:
            path += (delta * moved).sum(-1)
    return path


@settings(deadline=None)
@given(case=cases)
def test_every_entry_is_the_effect_of_moving_one_use(case: Case) -> None:
    """Finite differences of Psi itself: W moves by M only where it is used at position t.

    Proves: every entry is the effect of moving one use (exact), against ``exact_influence``, finite
    differences.
    """
    result = case.influence()
    labels = case.batch["labels"]
    named = dict(case.model.named_parameters(remove_duplicate=False))
    by_parameter = {id(named[name]): m for name, m in case.direction.items()}
    unique = {id(module): module for module in case.modules.values()}
    step = 1e-5

    def losses_at(shift: float, t: int) -> Tensor:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            m = by_parameter[id(module.weight)]
            moved = args[0] @ (m if isinstance(module, TransposedLinear) else m.T)
            output = output.clone()
            output[:, t] += shift * moved[:, t]
            return output

        handles = [module.register_forward_hook(hook) for module in unique.values()]
        with torch.no_grad():
            losses = gradients.token_losses(case.model(case.batch), labels)
        for handle in handles:
            handle.remove()
        return losses

    for t in range(labels.shape[1]):
        difference = (losses_at(step, t) - losses_at(-step, t)) / (2 * step)
        entries = influence.to_token_index(result.matrix[:, :, t])
        scale = influence.to_token_index(result.absolute_scale[:, :, t])
        close(entries, difference, scale + 1.0, 2e-6)


def test_token_index_is_one_past_the_label_position() -> None:
    """Proves: token index is one past the label position (exact), against ``to_token_index``."""
    values = torch.arange(1.0, 9.0).reshape(2, 4)
    shifted = influence.to_token_index(values)
    assert torch.equal(shifted, torch.tensor([[0.0, 1, 2, 3], [0, 5, 6, 7]]))


def test_gap_1_the_total_needs_the_prompt_positions() -> None:
    """Summing columns over the response alone misses what passes through the prompt.

    Proves: gap 1 the total needs the prompt positions (exact), against ``unassigned``,
    ``label_values``.
    """
    case = make_case(Structure(), length=6, labelled=(False,) * 3 + (True,) * 3)
    result = case.influence()
    columns = influence.column_sums(result.matrix)
    predicts = torch.tensor([[False, False, True, True, True, False]])
    response = torch.where(predicts, columns, 0.0).sum()
    prompt = influence.unassigned(columns, case.batch["labels"]).sum()
    scale = result.absolute_scale.sum()
    assert float(prompt.abs()) > 1e-3 * float(scale)
    expected = gradients.label_values(case.model, case.model, case.batch, case.direction).sum()
    close(response + prompt, expected, scale, MODEL)
    direct = influence.diagonal(result.matrix)  # the self terms alone do not do it either
    assert float((direct.sum() - expected).abs()) > 1e-3 * float(scale)


def test_terms_and_scale_agree_with_the_matrix() -> None:
    """Proves: terms and scale agree with the matrix (exact), against ``exact_influence``."""
    case = make_case(Structure(bias=True), length=4)
    exact = case.influence()
    psi, scale = exact.matrix, exact.absolute_scale
    assert set(exact.terms) == set(case.modules)
    close(sum(exact.terms.values()), psi, scale, EXACT)
    by_row = torch.zeros_like(scale)  # of one output's row alone a term has one summand: its size
    for row in range(max(len(m) for m in case.direction.values())):
        alone = {name: torch.zeros_like(m) for name, m in case.direction.items()}
        for name, m in case.direction.items():
            alone[name][row : row + 1] = m[row : row + 1]
        for term in replace(case, direction=alone).influence().terms.values():
            by_row += term.abs()
    close(scale, by_row, by_row, EXACT)


def test_the_model_is_left_as_it_was() -> None:
    case = make_case(Structure(), length=4)

    def broken(batch: Any) -> Tensor:
        case.model(batch)
        raise RuntimeError("inside the forward")

    case.influence()
    with pytest.raises(RuntimeError, match="inside"):
        influence.exact_influence(case.model, broken, case.batch, case.modules, case.direction)
    assert not any(module._forward_hooks for module in case.model.modules())
    assert all(parameter.grad is None for parameter in case.model.parameters())


# --- bad input ------------------------------------------------------------------------------------


def test_bad_directions_and_modules_are_named() -> None:
    case = make_case(Structure(layers=1), length=3)
    model, batch, modules, direction = case.model, case.batch, case.modules, case.direction

    def run(modules: Any, direction: Any, batch: Any = batch) -> None:
        influence.exact_influence(model, model, batch, modules, direction)

    with pytest.raises(InputError, match=r"layers\.0\.attention\.o_proj"):
        run(
            modules, {n: m for n, m in direction.items() if n != "layers.0.attention.o_proj.weight"}
        )
    with pytest.raises(InputError, match="nowhere"):
        run(modules, {**direction, "nowhere.weight": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="another shape"):
        run(modules, {**direction, "layers.0.attention.o_proj.weight": torch.zeros(2, 2)})
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(InputError, match="no response token"):
        gradients.validation_gradient(model, model, [empty, empty])


def test_a_tied_parameter_moves_one_way() -> None:
    case = make_case(Structure(layers=1, groups=2, shared_weight=True), length=3)
    m = case.direction["layers.0.attention.k_proj.weight"]
    both = {**case.direction, "layers.0.attention.v_proj.weight": m.clone()}
    once = case.influence()
    close(replace(case, direction=both).influence().matrix, once.matrix, once.absolute_scale, EXACT)
    with pytest.raises(InputError, match="two directions"):
        replace(case, direction={**both, "layers.0.attention.v_proj.weight": 2 * m}).influence()


def test_flattened_positions_are_refused() -> None:
    case = make_case(Structure(layers=1), length=3)

    def flat(batch: Any) -> Tensor:
        case.model.layers[0].mlp.up_proj(torch.zeros(3, WIDTH, dtype=torch.float64))
        return case.model(batch)

    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj"):
        influence.exact_influence(case.model, flat, case.batch, case.modules, case.direction)


# --- Value-Propagation ---------------------------------------------------------------------------


def recorded_layers(case: Case) -> list[propagation.PropagationLayer]:
    """What Value-Propagation needs of each scored layer, from the decoder's own trace."""
    model = case.model

    def outputs() -> list[Tensor]:
        return [entry["o"] for entry in model.trace[:-1]]

    errors = propagation.head_output_errors(model, case.batch, outputs)
    named = dict(model.named_parameters(remove_duplicate=False))
    by_parameter = {id(named[name]): m for name, m in case.direction.items()}
    layers = []
    for j, (entry, error) in enumerate(zip(model.trace[:-1], errors, strict=True)):
        if f"layers.{j}.attention.v_proj" not in case.modules:
            continue
        projection = model.layers[j].attention.v_proj
        layers.append(
            propagation.PropagationLayer(
                entry["alpha"].detach(),
                error,
                entry["x"].detach(),
                by_parameter[id(projection.weight)],
            )
        )
    return layers


@settings(deadline=None)
@given(structure=structures, length=st.integers(2, 5))
def test_what_propagation_misses_in_the_last_layer_is_known_exactly(
    structure: Structure, length: int
) -> None:
    """K = 1, W = T: off-diagonal Psi minus Value-Propagation = the score path of W_K, per head.

    Proves: eqs. app_score_path, app_score_residual (exact), against ``value_propagation_error``,
    ``value_propagation_pairs``.
    """
    # a scored weight that is also used in a lower layer, or as W_V, has other cross-position uses
    structure = replace(structure, shared_weight=False, tied=False)
    case = make_case(structure, last=1, length=length)
    result = case.influence()
    j = structure.layers - 1
    recorded = recorded_layers(case)[-1]
    x = case.model.trace[j]["x"][0].detach()
    spec = attention_spec(case.model, j, length)
    alpha = jacobian.attend(spec, x).alpha  # the spec is the decoder's own attention
    close(alpha, recorded.alpha[0], torch.ones_like(alpha), EXACT)

    missed = jacobian.value_propagation_error(
        spec, x, recorded.errors[0], case.direction[f"layers.{j}.attention.k_proj.weight"]
    ).sum(0)
    estimate = propagation.value_propagation_pairs(recorded)[0]
    scale = result.absolute_scale[0].sum(1, keepdim=True).expand_as(missed)
    close(estimate + missed, result.matrix[0].tril(-1), scale + 1e-6, MODEL)
    causal = influence.causal(result.matrix)[0]
    column = propagation.value_propagation([recorded])[0]
    close(column + missed.sum(0), causal, scale.sum(0) + 1e-6, MODEL)


@settings(deadline=None)
@given(case=cases, reduction=st.sampled_from(["per_head", "mean"]))
@example(case=make_case(Structure(groups=2), length=5), reduction="per_head")
def test_window_and_position_choose_the_pairs(case: Case, reduction: Any) -> None:
    layers = recorded_layers(case)
    pairs = sum(propagation.value_propagation_pairs(layer, reduction) for layer in layers)
    length = pairs.shape[1]
    k, t = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    scale = pairs.abs().sum((1, 2), keepdim=False)[:, None] + 1e-6
    for window in (0, 1, 2, 3, length, None):
        reach = length if window is None else window
        columns = torch.where((t < k) & (k - t <= reach), pairs, 0.0).sum(1)
        label = propagation.value_propagation(layers, window=window, head_reduction=reduction)
        close(label, columns, scale, EXACT)
        context = propagation.value_propagation(
            layers, window=window, head_reduction=reduction, causal_position="context"
        )
        close(context[:, :-1], columns[:, 1:], scale, EXACT)
        assert bool((context[:, -1] == 0).all())
        if window == 0:
            assert bool((label == 0).all())


def mean_pairs(layer: propagation.PropagationLayer) -> Tensor:
    """The paper's scalar alpha without a loop: mean over heads, errors added up per kv head."""
    rows, heads, length, width = layer.errors.shape
    groups = len(layer.direction) // width
    errors = layer.errors.reshape(rows, groups, heads // groups, length, width).sum(2)
    moved = (layer.inputs @ layer.direction.T).unflatten(-1, (groups, width))
    return torch.einsum("bkt,bgkv,btgv->bkt", layer.alpha.mean(1), errors, moved).tril(-1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_head_mean_is_the_papers_scalar_alpha(groups: int) -> None:
    case = make_case(Structure(layers=2, heads=4, groups=groups), length=5)
    for layer in recorded_layers(case):
        found = propagation.value_propagation_pairs(layer, "mean")
        expected = mean_pairs(layer)
        close(found, expected, expected.abs().max().expand_as(found), EXACT)
        per_head = propagation.value_propagation_pairs(layer)
        assert float((per_head - found).abs().max()) > 1e-3 * float(per_head.abs().max())


def test_the_equation_word_by_word_is_label_value_plus_propagation() -> None:
    """It does not add up to <grad L, M>: the causal paths are in grad l_t already.

    Proves: eqs. causal_decomp, app_causal_decomp (approximate), against ``equation_causal_decomp``.
    """
    case = make_case(Structure(layers=2), length=6, labelled=(False,) * 2 + (True,) * 4)
    layers = recorded_layers(case)
    values = propagation.equation_causal_decomp(
        case.model, case.model, case.batch, case.direction, layers, window=2
    )
    result = case.influence()
    added = influence.row_sums(result.matrix) + propagation.value_propagation(layers, window=2)
    expected = influence.to_token_index(added)
    expected[case.batch["labels"] == -100] = 0
    scale = result.absolute_scale.sum().expand_as(expected)
    close(values, expected, scale, MODEL)
    assert float((values.sum() - result.matrix.sum()).abs()) > 1e-3 * float(scale.max())


# --- one hop, and the paper's routing ------------------------------------------------------------


def one_hop(case: Case) -> Tensor:
    def hops() -> list[propagation.Hop]:
        return [propagation.Hop(e["k"], e["v"], e["o"]) for e in case.model.trace[:-1]]

    return propagation.one_hop(
        case.model, case.model, case.batch, case.modules, case.direction, hops, **case.options
    )


@settings(deadline=None)
@given(structure=structures)
def test_one_hop_is_the_linear_term_in_the_cross_position_gradients(structure: Structure) -> None:
    """Two layers: Psi(eps) = D + eps A + eps^2 B, so A = (Psi(1) - Psi(-1)) / 2 exactly."""
    case = make_case(replace(structure, layers=2), length=4)
    found = one_hop(case)
    result = case.influence()
    case.model.epsilon = -1.0
    reversed_sign = case.influence().matrix
    linear = (result.matrix - reversed_sign) / 2
    scale = result.absolute_scale.sum((1, 2), keepdim=True).expand_as(linear)
    close(found, linear, scale + 1e-6, MODEL)


def test_the_papers_routing_does_not_add_up_to_the_gradient() -> None:
    """sum_t "via t" gives the last layer nothing and lower layers too much, unlike grad l_k.

    Proves: eq. app_via_t (exact), against ``via_t``, ``label_values``.
    """
    case = make_case(Structure(layers=3, heads=2, groups=1), length=3)

    def hidden() -> list[Tensor]:
        return [entry["h"] for entry in case.model.trace]

    def routed(direction: dict[str, Tensor]) -> Tensor:
        return propagation.via_t(case.model, case.model, case.batch, direction, hidden).sum(2)

    by_layer = [
        {name: m for name, m in case.direction.items() if name.startswith(f"layers.{j}.")}
        for j in range(3)
    ]
    label = [
        gradients.label_values(case.model, case.model, case.batch, part)[:, 1:] for part in by_layer
    ]
    via = [routed(part)[:, :-1] for part in by_layer]
    assert bool((via[2] == 0).all())
    assert float(label[2].abs().min()) > 0
    # position 0 has only the self path, so each block above counts the whole gradient once
    close(via[1][:, 0], label[1][:, 0], label[1][:, 0].abs() + 1e-3, MODEL)
    close(via[0][:, 0], 2 * label[0][:, 0], label[0][:, 0].abs() + 1e-3, MODEL)


def test_the_papers_routing_counts_each_block_once_and_at_position_k() -> None:
    """Two blocks, M on the embedding: sum_t "via t" = <grad l_k, M> + (dl_k/dh_k^1).(dh_k^1 M).

    Proves: eqs. app_causal_decomp, app_via_t (approximate), against ``via_t``.
    """
    case = make_case(Structure(layers=2, heads=4, groups=2), length=5)
    model, embedding = case.model, case.model.embedding.weight
    m = torch.randn(
        embedding.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    direction = {"embedding.weight": m}

    def hidden() -> list[Tensor]:
        return [entry["h"] for entry in model.trace]

    routed = propagation.via_t(model, model, case.batch, direction, hidden)
    assert torch.equal(routed, routed.tril())
    label = gradients.label_values(model, model, case.batch, direction)[0, 1:]
    losses = gradients.token_losses(model(case.batch), case.batch["labels"])[0, 1:]
    middle = hidden()[1]
    at_k = [
        torch.autograd.grad(loss, middle, retain_graph=True)[0][0, k]
        for k, loss in enumerate(losses)
    ]
    step, ends = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            embedding.add_(m, alpha=sign * step)
            model(case.batch)
            ends.append(hidden()[1][0, :-1])
            embedding.sub_(m, alpha=sign * step)
    tangent = (ends[0] - ends[1]) / (2 * step)
    expected = label + (torch.stack(at_k) * tangent).sum(-1)
    close(routed[0, :-1].sum(1), expected, expected.abs() + 1.0, 2e-6)
