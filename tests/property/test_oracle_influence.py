"""The influence oracle against finite differences, ordinary autograd and its own exact cases.

Directions are random over all scored weights: the stability side of ``setups.truth``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.model.protocol import AttentionCall, NativeAttention
from alphatoken.oracle import gradients, influence, jacobian, propagation
from alphatoken.oracle.readouts import split_attention
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder, TransposedLinear
from tests.property.profiles import budget
from tests.property.setups import (
    CONTRACTION,
    MODEL,
    Setup,
    attention_spec,
    forward_of,
    oracle_influence,
    propagation_layers,
    scored,
    seen_attention,
    setups,
    truth,
)
from tests.property.strategies import CASE, make_case
from tests.property.tolerance import close

SETUP = Setup(CASE)
PLAIN = Setup(make_case(("pprrrr",), layers=2, kv_heads=1, mlp="plain"))
TWICE = Setup(make_case(("prrr",), layers=2, heads=4, repeated_linear=True, repeated_block=True))
SHARED = Setup(make_case(("prrr",), layers=2, tied_linears=True, bias=True))


def direction_and_psi(setup: Setup) -> tuple[dict[str, Tensor], influence.Influence]:
    """A random direction, and Psi along it."""
    return truth(setup).directions[1], truth(setup).influences[1]


def label_values(setup: Setup, model: ReferenceDecoder, direction: Mapping[str, Tensor]) -> Tensor:
    return gradients.label_values(model, forward_of(model), setup.case.batch, direction)


def token_losses(setup: Setup, model: ReferenceDecoder) -> Tensor:
    labels = gradients.known_labels(setup.case.batch)
    return gradients.token_losses(model(**setup.case.inputs), labels)


def by_weight(model: nn.Module, direction: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """M by the identity of the parameter, for tied ones."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {id(named[name]): m for name, m in direction.items()}


def moved(module: nn.Module, x: Tensor, directions: Mapping[int, Tensor]) -> Tensor:
    """M x of one use."""
    m = directions[id(module.weight)]
    return x @ (m if isinstance(module, TransposedLinear) else m.T)


def total_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The summed loss by torch's own cross-entropy."""
    logits = forward_of(model)({n: x for n, x in batch.items() if n != "labels"})
    target = gradients.known_labels(batch)[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target, reduction="sum")


@contextmanager
def hooked(modules: Mapping[str, nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules.values():
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def scored_modules(setup: Setup, model: ReferenceDecoder) -> dict[str, nn.Module]:
    return {linear.name: linear.module for linear in scored(setup, ReferenceAdapter(model))}


# --- gradients ------------------------------------------------------------------------------------


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
    logits = torch.randn(2, length, 7, generator=generator, dtype=torch.float64)
    ids = torch.randint(7, (2, length), generator=generator)
    labels = torch.where(torch.tensor(hidden[: 2 * length]).reshape(2, length), -100, ids)
    losses = gradients.token_losses(logits, labels)
    expected = torch.zeros(2, length, dtype=torch.float64)
    expected[:, 1:] = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    assert losses.dtype == torch.float64
    close(losses, expected, torch.ones_like(expected), CONTRACTION)
    assert bool((losses[:, 0] == 0).all())
    tokens = gradients.response_tokens(labels)
    assert set(tokens) == {(b, i) for b, i in (labels != -100).nonzero().tolist() if i > 0}


@given(setups())
@budget(0.5)
def test_label_values_are_directional_derivatives_of_each_loss(setup: Setup) -> None:
    """Autograd against a central difference of every token's loss along M.

    Proves: eq. grad_alignment (exact), against ``label_values``, finite differences.
    """
    (direction, psi), model, step = direction_and_psi(setup), setup.case.model(), 1e-5
    named = dict(model.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def losses_at(shift: float) -> Tensor:
        for name, m in direction.items():
            named[name].add_(m, alpha=shift)
        losses = token_losses(setup, model)
        for name, m in direction.items():
            named[name].sub_(m, alpha=shift)
        return losses

    difference = (losses_at(step) - losses_at(-step)) / (2 * step)
    scale = influence.to_token_index(influence.row_sums(psi.absolute_scale))
    close(label_values(setup, model, direction), difference, scale + 1.0, 2e-6)


def test_validation_gradient_is_that_of_the_mean_over_all_batches() -> None:
    """Batches of different sizes: every response token has the same weight, not every batch."""
    model, batches = CASE.model(), CASE.validation
    gradient = gradients.validation_gradient(model, forward_of(model), batches)
    count = sum(len(gradients.response_tokens(gradients.known_labels(b))) for b in batches)
    named = dict(model.named_parameters())
    mean = torch.stack([total_loss(model, batch) for batch in batches]).sum() / count
    expected = torch.autograd.grad(mean, list(named.values()))
    for name, tensor in zip(named, expected, strict=True):
        close(gradient[name], tensor, tensor.abs().max() + tensor.abs(), MODEL)
    alone = gradients.validation_gradient(model, forward_of(model), batches[0])
    assert not torch.allclose(alone["head.weight"], gradient["head.weight"])


# --- the influence matrix ------------------------------------------------------------------------


@given(setups())
@example(TWICE)
@example(SHARED)
def test_the_four_readouts_are_what_their_names_say(setup: Setup) -> None:
    """Row sum: per-token gradient. Column sum: one ordinary backward. All: <grad L, M>.

    Proves: the four readouts are what their names say (exact), against ``row_sums``,
    ``column_sums``, ``diagonal``, ``causal``.
    """
    (direction, result), model = direction_and_psi(setup), setup.case.model()
    psi, scale = result.matrix, result.absolute_scale

    rows = influence.to_token_index(influence.row_sums(psi))
    row_scale = influence.to_token_index(influence.row_sums(scale))
    close(rows, label_values(setup, model, direction), row_scale, MODEL)

    columns = influence.column_sums(psi)
    close(columns, ordinary_backward(setup, model, direction), scale.sum(1), MODEL)

    named = dict(model.named_parameters(remove_duplicate=False))
    inputs = [named[name] for name in direction]
    whole = torch.autograd.grad(total_loss(model, setup.case.batch), inputs, materialize_grads=True)
    terms = [(g * m).sum() for g, m in zip(whole, direction.values(), strict=True)]
    close(psi.sum(), torch.stack(terms).sum(), scale.sum(), MODEL)

    direct, causal = influence.diagonal(psi), influence.causal(psi)
    close(direct + causal, columns, scale.sum(1), CONTRACTION)
    assert torch.equal(psi, psi.tril())
    predicts = influence.to_token_index(torch.ones_like(columns)).bool() & truth(setup).mask
    assert bool((psi[:, :-1][~predicts[:, 1:]] == 0).all())
    assert bool((psi[:, -1] == 0).all())
    assert bool((psi.abs() <= scale * (1 + CONTRACTION)).all())


def ordinary_backward(
    setup: Setup, model: ReferenceDecoder, direction: Mapping[str, Tensor]
) -> Tensor:
    """(dL/ds_t)^T M x_t of one backward over the summed loss, gathered by own hooks."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append((module, args[0].detach(), output))

    with hooked(scored_modules(setup, model), hook):
        loss = total_loss(model, setup.case.batch)
    errors = torch.autograd.grad(loss, [s for _, _, s in calls], materialize_grads=True)
    directions = by_weight(model, direction)
    terms = [
        (delta * moved(module, x, directions)).sum(-1)
        for (module, x, _), delta in zip(calls, errors, strict=True)
    ]
    return torch.stack(terms).sum(0)


@given(setups())
@budget(0.5)
def test_every_entry_is_the_effect_of_moving_one_use(setup: Setup) -> None:
    """Finite differences of Psi itself: W moves by M only where it is used at position t.

    Proves: every entry is the effect of moving one use (exact), against ``exact_influence``, finite
    differences.
    """
    (direction, result), model, step = direction_and_psi(setup), setup.case.model(), 1e-5
    directions = by_weight(model, direction)

    @torch.no_grad()
    def losses_at(shift: float, t: int) -> Tensor:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output[:, t] += shift * moved(module, args[0], directions)[:, t]
            return output

        with hooked(scored_modules(setup, model), hook):
            return token_losses(setup, model)

    for t in range(result.matrix.shape[2]):
        difference = (losses_at(step, t) - losses_at(-step, t)) / (2 * step)
        entries, scale = (
            influence.to_token_index(matrix[:, :, t])
            for matrix in (result.matrix, result.absolute_scale)
        )
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
    setup = Setup(make_case(("ppprrr",)))
    (direction, result), model = direction_and_psi(setup), setup.case.model()
    columns, scale = influence.column_sums(result.matrix), result.absolute_scale.sum()
    response = columns[:, 2:5].sum()  # the positions that predict a response token
    prompt = influence.unassigned(columns, setup.case.batch["labels"]).sum()
    assert float(prompt.abs()) > 1e-3 * float(scale)
    expected = label_values(setup, model, direction).sum()
    close(response + prompt, expected, scale, MODEL)
    direct = influence.diagonal(result.matrix)  # the self terms alone do not do it either
    assert float((direct.sum() - expected).abs()) > 1e-3 * float(scale)


def test_terms_and_scale_agree_with_the_matrix() -> None:
    """Proves: terms and scale agree with the matrix (exact), against ``exact_influence``."""
    model = PLAIN.case.model()
    direction, result = direction_and_psi(PLAIN)
    psi, scale = result.matrix, result.absolute_scale
    assert set(result.terms) == set(scored_modules(PLAIN, model))
    close(sum(result.terms.values()), psi, scale, CONTRACTION)
    by_row = torch.zeros_like(scale)  # of one output's row alone a term has one summand: its size
    for row in range(max(len(m) for m in direction.values())):
        alone = {name: torch.zeros_like(m) for name, m in direction.items()}
        for name, m in direction.items():
            alone[name][row : row + 1] = m[row : row + 1]
        for term in oracle_influence(PLAIN, model, alone).terms.values():
            by_row += term.abs()
    close(scale, by_row, by_row, CONTRACTION)


# --- the model, and what is refused ---------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model, (direction, _) = PLAIN.case.model(), direction_and_psi(PLAIN)

    def broken(batch: Any) -> Tensor:
        model(**batch)
        raise RuntimeError("inside the forward")

    with pytest.raises(RuntimeError, match="inside"):
        influence.exact_influence(
            model, broken, PLAIN.case.batch, scored_modules(PLAIN, model), direction
        )
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


OUTPUT = "layers.0.attention.o_proj.weight"


@pytest.mark.parametrize("name", [OUTPUT, "nowhere", "another shape", "up_proj", "no response"])
def test_refusals_name_what_is_wrong(name: str) -> None:
    """A weight without its direction, foreign ones, flattened positions, nothing to learn from."""
    model, (direction, _) = PLAIN.case.model(), direction_and_psi(PLAIN)
    batch, modules, forward = PLAIN.case.batch, scored_modules(PLAIN, model), forward_of(model)
    wrong = torch.zeros(2, 2, dtype=torch.float64)

    def flat(batch: Mapping[str, Tensor]) -> Tensor:
        model.layers[0].mlp.up_proj(torch.zeros(3, model.config.hidden, dtype=torch.float64))
        return forward(batch)

    run: Callable[..., object] = influence.exact_influence
    arguments: dict[str, tuple[Any, ...]] = {
        OUTPUT: (forward, batch, modules, {n: m for n, m in direction.items() if n != OUTPUT}),
        "nowhere": (forward, batch, modules, {**direction, "nowhere.weight": wrong}),
        "another shape": (forward, batch, modules, {**direction, OUTPUT: wrong}),
        "up_proj": (flat, batch, modules, direction),
        "no response": (forward, [{**batch, "labels": torch.full_like(batch["labels"], -100)}]),
    }
    if name == "no response":
        run = gradients.validation_gradient
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        run(model, *arguments[name])


def test_losses_refuse_logits_that_were_already_shifted() -> None:
    with pytest.raises(InputError, match="different tokens"):
        gradients.token_losses(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.long))


def test_a_tied_parameter_moves_one_way() -> None:
    model, (direction, once) = SHARED.case.model(), direction_and_psi(SHARED)
    first = "layers.0.mlp.gate_proj.weight"
    second, m = first.replace("gate", "up"), direction[first]
    both = oracle_influence(SHARED, model, {**direction, second: m.clone()})
    close(both.matrix, once.matrix, once.absolute_scale, CONTRACTION)
    with pytest.raises(InputError, match="two directions"):
        oracle_influence(SHARED, model, {**direction, second: 2 * m})


# --- Value-Propagation ---------------------------------------------------------------------------


# A scored weight that is also used in a lower layer has other cross-position uses.
@given(setups(last=True, repeated_block=False, fused_qkv=False, mode="plain"))
def test_what_propagation_misses_in_the_last_layer_is_known_exactly(setup: Setup) -> None:
    """K = 1, W = T: off-diagonal Psi minus Value-Propagation = the score path of W_K, per head.

    Proves: eqs. app_score_path, app_score_residual (exact), against ``value_propagation_error``,
    ``value_propagation_pairs``.
    """
    (direction, result), model = direction_and_psi(setup), setup.case.model()
    (recorded,) = propagation_layers(setup, False)[1]
    m_k = direction[f"layers.{setup.case.config.layers - 1}.attention.k_proj.weight"]
    if setup.case.config.transposed:
        m_k = m_k.T
    estimate = propagation.value_propagation_pairs(recorded)
    causal = influence.causal(result.matrix)
    column = propagation.value_propagation([recorded])
    for b, x in enumerate(recorded.inputs):
        spec = attention_spec(model, setup.case.config.layers - 1, len(x))
        alpha = jacobian.attend(spec, x).alpha  # the spec is the decoder's own attention
        close(alpha, recorded.alpha[b], torch.ones_like(alpha), CONTRACTION)
        missed = jacobian.value_propagation_error(spec, x, recorded.errors[b], m_k).sum(0)
        scale = result.absolute_scale[b].sum(1, keepdim=True).expand_as(missed)
        close(estimate[b] + missed, result.matrix[b].tril(-1), scale + 1e-6, MODEL)
        close(column[b] + missed.sum(0), causal[b], scale.sum(0) + 1e-6, MODEL)


def mean_pairs(layer: propagation.PropagationLayer) -> Tensor:
    """The paper's scalar alpha without a loop: mean over heads, errors added up per kv head."""
    rows, heads, length, width = layer.errors.shape
    groups = len(layer.direction) // width
    errors = layer.errors.reshape(rows, groups, heads // groups, length, width).sum(2)
    values = (layer.inputs @ layer.direction.T).unflatten(-1, (groups, width))
    return torch.einsum("bkt,bgkv,btgv->bkt", layer.alpha.mean(1), errors, values).tril(-1)


@given(setups(), st.sampled_from(["per_head", "mean"]))
@example(SETUP, "mean")
@budget(0.5)
def test_window_and_position_choose_the_pairs(setup: Setup, reduction: Any) -> None:
    layers = propagation_layers(setup, False)[1]
    of_layer = [propagation.value_propagation_pairs(layer, reduction) for layer in layers]
    pairs = torch.stack(of_layer).sum(0)
    length = pairs.shape[1]
    k, t = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    scale = torch.stack(of_layer).abs().sum((0, 2, 3))[:, None] + 1e-6
    for window in (0, 1, 2, 3, length, None):
        reach = length if window is None else window
        columns = torch.where((t < k) & (k - t <= reach), pairs, 0.0).sum(1)
        label, context = (
            propagation.value_propagation(
                layers, window=window, head_reduction=reduction, causal_position=position
            )
            for position in ("label", "context")
        )
        close(label, columns, scale, CONTRACTION)
        close(context[:, :-1], columns[:, 1:], scale, CONTRACTION)
        assert bool((context[:, -1] == 0).all())
        if window == 0:
            assert bool((label == 0).all())


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_head_mean_is_the_papers_scalar_alpha(groups: int) -> None:
    setup = Setup(make_case(("prrrr",), layers=2, heads=4, kv_heads=groups))
    for layer in propagation_layers(setup, False)[1]:
        mean, expected = propagation.value_propagation_pairs(layer, "mean"), mean_pairs(layer)
        close(mean, expected, expected.abs().max().expand_as(mean), CONTRACTION)
        per_head = propagation.value_propagation_pairs(layer)
        assert float((per_head - mean).abs().max()) > 1e-3 * float(per_head.abs().max())


def test_the_equation_word_by_word_is_label_value_plus_propagation() -> None:
    """It does not add up to <grad L, M>: the causal paths are in grad l_t already.

    Proves: eqs. causal_decomp, app_causal_decomp (approximate), against ``equation_causal_decomp``.
    """
    (direction, result), model = direction_and_psi(PLAIN), PLAIN.case.model()
    layers, batch = propagation_layers(PLAIN, False)[1], PLAIN.case.batch
    values = propagation.equation_causal_decomp(
        model, forward_of(model), batch, direction, layers, window=2
    )
    added = influence.row_sums(result.matrix) + propagation.value_propagation(layers, window=2)
    expected = influence.to_token_index(added) * truth(PLAIN).mask
    scale = result.absolute_scale.sum().expand_as(expected)
    close(values, expected, scale, MODEL)
    assert float((values.sum() - result.matrix.sum()).abs()) > 1e-3 * float(scale.max())


# --- one hop, and the paper's routing ------------------------------------------------------------


@given(setups(layers=2))
@budget(0.5)
def test_one_hop_is_the_linear_term_in_the_cross_position_gradients(setup: Setup) -> None:
    """Two layers: Psi(eps) = D + eps A + eps^2 B, so A = (Psi(1) - Psi(-1)) / 2 exactly.

    eps scales every cross-position gradient: eps of ordinary attention and 1 - eps of the split
    one, which have one value.
    """
    setup = replace(setup, layers="all")
    (direction, result), adapter = direction_and_psi(setup), setup.case.adapter()
    model, linears = adapter.model, scored(setup, adapter)
    with seen_attention(setup, adapter) as calls:
        hop = propagation.one_hop(
            model,
            forward_of(model),
            setup.case.batch,
            {linear.name: linear.module for linear in linears},
            direction,
            lambda: [(s.call.key, s.call.value, s.output) for s in calls],
            transposed=[linear.name for linear in linears if linear.transposed],
        )

    def reversed_sign(call: AttentionCall, native: NativeAttention) -> Tensor:
        return 2 * split_attention(call)[0] - native(call.query, call.key, call.value)

    attentions = [m for layer in range(2) for m in adapter.attention_modules(layer)]
    with adapter.override_attention(attentions, reversed_sign):
        linear_term = (result.matrix - oracle_influence(setup, model, direction).matrix) / 2
    scale = result.absolute_scale.sum((1, 2), keepdim=True).expand_as(linear_term)
    close(hop, linear_term, scale + 1e-6, MODEL)


@contextmanager
def recorded_states(model: ReferenceDecoder) -> Iterator[Callable[[], list[Tensor]]]:
    """Inside, the hidden states h^0 .. h^L of the latest forward, in its graph."""
    states: list[Tensor] = []
    with ExitStack() as stack:
        for module in (*model.layers, model.final_norm):
            hook = module.register_forward_pre_hook(lambda _, args: states.append(args[0]))
            stack.callback(hook.remove)
        yield lambda: states[-len(model.layers) - 1 :]


def test_the_papers_routing_does_not_add_up_to_the_gradient() -> None:
    """sum_t "via t" gives the last layer nothing and lower layers too much, unlike grad l_k.

    Proves: eq. app_via_t (exact), against ``via_t``, ``label_values``.
    """
    setup = Setup(make_case(("rrr",), layers=3))
    model, batch = setup.case.model(), setup.case.batch
    by_layer = [
        {
            name: m
            for name, m in direction_and_psi(setup)[0].items()
            if name.startswith(f"layers.{j}.")
        }
        for j in range(3)
    ]
    label = [label_values(setup, model, part)[:, 1:] for part in by_layer]
    with recorded_states(model) as states:
        via = [
            propagation.via_t(model, forward_of(model), batch, part, states).sum(2)[:, :-1]
            for part in by_layer
        ]
    assert bool((via[2] == 0).all())
    assert float(label[2].abs().min()) > 0
    # position 0 has only the self path, so each block above counts the whole gradient once
    close(via[1][:, 0], label[1][:, 0], label[1][:, 0].abs() + 1e-3, MODEL)
    close(via[0][:, 0], 2 * label[0][:, 0], label[0][:, 0].abs() + 1e-3, MODEL)


def test_the_papers_routing_counts_each_block_once_and_at_position_k() -> None:
    """Two blocks, M on the embedding: sum_t "via t" = <grad l_k, M> + (dl_k/dh_k^1).(dh_k^1 M).

    Proves: eqs. app_causal_decomp, app_via_t (approximate), against ``via_t``.
    """
    setup = Setup(make_case(("rrrrr",), layers=2, heads=4, kv_heads=2))
    model = setup.case.model()
    embedding = {"embedding.weight": model.embedding.weight}
    direction = setup.case.directions(embedding)
    label = label_values(setup, model, direction)[0, 1:]
    with recorded_states(model) as states:
        routed = propagation.via_t(model, forward_of(model), setup.case.batch, direction, states)
        assert torch.equal(routed, routed.tril())
        losses = token_losses(setup, model)[0, 1:]
        middle = states()[1]
        at_k = [
            torch.autograd.grad(loss, middle, retain_graph=True)[0][0, k]
            for k, loss in enumerate(losses)
        ]
        step, ends = 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                model.embedding.weight.add_(direction["embedding.weight"], alpha=sign * step)
                model(**setup.case.inputs)
                ends.append(states()[1][0, :-1])
                model.embedding.weight.sub_(direction["embedding.weight"], alpha=sign * step)
    tangent = (ends[0] - ends[1]) / (2 * step)
    expected = label + (torch.stack(at_k) * tangent).sum(-1)
    close(routed[0, :-1].sum(1), expected, expected.abs() + 1.0, 2e-6)
