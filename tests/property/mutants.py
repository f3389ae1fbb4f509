"""Every mutant that was demanded, and one for each step of the core that the demand leaves out.

Each is a few words of the core replaced; ``mutation`` says what counts as a kill. The claims beside
a mutant are drawn with the structure that it needs (two query heads a group, a soft-cap, a bias),
so that a few examples are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.property import (
    test_attention,
    test_batch,
    test_confidence,
    test_contraction,
    test_devices,
    test_differences,
    test_direction,
    test_estimators,
    test_fisher,
    test_head,
    test_label,
    test_losses,
    test_options,
    test_preconditioner,
    test_selection,
    test_sharded,
    test_value_propagation,
)
from tests.property.mutation import Claim, claim, row
from tests.property.setups import Setup, setups
from tests.property.strategies import MODES, configs, contractions, rows

# --- cases with the structure that a mutant needs -----------------------------------------------

TRAINS = (("pprrrr", "..prrr"), ("prprrr",), ("pprr|prr",), ("ppprrr", "prrr.."))
"""Training batches in which every position has something to leak: padded, packed, with gaps."""
SEVERAL = (("pprr", "prrr"),)
"""One validation batch of two sequences."""
VALIDATIONS = (SEVERAL, (("pprrr",), ("prr", "p.."), ("ppr",)))


def small(**pins: Any) -> st.SearchStrategy[Setup]:
    """Setups of at most two layers and two rows, cheap enough for a dozen examples."""
    defaults = {
        "layers": st.integers(1, 2),
        "train": st.sampled_from(TRAINS),
        "validations": st.sampled_from(VALIDATIONS),
    }
    return setups(**{**defaults, **pins})


def calls(**pins: Any) -> st.SearchStrategy[test_attention.AttentionCase]:
    """Attention calls over several positions, with two key/value heads of two query heads."""
    return test_attention.attention_cases(
        **{"t": st.integers(4, 8), "g": 2, "r": 2, "v": st.integers(2, 3), **pins}
    )


ADAM = test_preconditioner.adam_cases(1).map(lambda case: replace(case, eps=1e-3, zeros=False))
COUPLED_DECAY = claim(
    test_preconditioner.test_full_is_the_derivative_of_a_real_step,
    test_preconditioner.cases(
        tuple(k for k in test_preconditioner.ADAMS if "coupled decay" in k.name)
    ),
)
AMSGRAD = tuple(k for k in test_preconditioner.DOUBLE if k.name == "Adam, amsgrad")
DIRECT = claim(test_estimators.test_direct_is_the_diagonal, small())
PATH = claim(test_estimators.test_path_is_the_column_sums, small())
GRADIENT_OF_BATCHES = claim(
    test_direction.test_validation_gradient, small(validations=(("pprr", "prrr"), ("ppr",)))
)
SHARDED_OF_SEVERAL = claim(
    test_sharded.test_sharded_values_equal_whole_ones,
    small(validations=SEVERAL), "path", "diagonal", examples=6,
)  # fmt: skip
# One hop is counted per block object, so a block at two depths is no case of it.
SINGLE = small(repeated_block=False)
DEEP = small(layers=2, repeated_block=False).map(lambda setup: replace(setup, layers="all"))
BRANCHES = (("pprr", "prrr"), ("ppr", "prr"))
"""Chosen and rejected."""
TIED = small(tied_linears=True, mlp="gated")
TWICE = small(repeated_linear=True)
PADDED = small(train=("pprrrr", "..prrr"))
AFTER_PADDING = small(train=("..rrpr", "pprrr."), validations=((".rpr", "rr.."),))
"""A label that only padding precedes, on both sides."""
SEVERAL_BATCHES = small(validations=(("pprrr",), ("prr", "p.."), ("ppr",)))
ERRORS = claim(test_confidence.test_standard_errors, SEVERAL_BATCHES, "direct", False)
HARMLESS = claim(test_confidence.test_harmless, test_confidence.rule_cases(), 2, 0.95, examples=40)


def _rounded(kind: str, parameters: str, *, graph: bool) -> Claim:
    """Losses of a model with 16 bits somewhere."""
    check = test_head.test_losses_that_16_bits_rounded_somewhere
    return claim(check, kind, parameters, graph, examples=1, needs=("transformers",))


def alphatoken(cases: st.SearchStrategy[Setup], window: int | None = None) -> Claim:
    """The paper's estimator against the oracle's loops."""
    check = test_value_propagation.test_alphatoken_is_direct_plus_propagation
    return claim(check, cases, window)


def propagation(window: int | None, **pins: Any) -> Claim:
    """Value-Propagation of one call against the whole of alpha."""
    return claim(test_value_propagation.test_value_propagation, calls(**pins), window, False)


HOP = claim(test_estimators.test_same_layer_hop_is_one_hop_within_the_layer, SINGLE)
PROPAGATION = propagation(None)
BAND = propagation(2)
WINDOW = alphatoken(small(), 2)
ALL = frozenset({"query", "key", "value", "sinks"})
JVP = claim(test_attention.test_forward_mode_is_the_jvp, calls(), ALL)
SELF_BACKWARD = claim(test_attention.test_self_backward_is_the_diagonal, calls())
CONTRACTION = claim(test_contraction.test_projected_is_the_loop, contractions())
JVP_OF_SINKS = claim(test_attention.test_forward_mode_is_the_jvp, calls(sinks=True), ALL)
FROZEN_ADAM = claim(test_preconditioner.test_frozen_preconditioner, ADAM)
FULL_ADAM = claim(test_preconditioner.test_full_preconditioner, ADAM)
SFT_LOSS = claim(test_losses.test_sft_loss, test_losses.loss_cases(), "response")
SMALL_WEIGHTS = claim(
    test_losses.test_the_kept_divisor_is_the_sum_of_the_weights_however_small,
    test_losses.loss_cases(), 1e-8,
)  # fmt: skip
LOSSES = claim(test_losses.test_token_losses, test_losses.loss_cases())
TOTAL_ALONE = claim(test_options.test_total_alone, small(), ("path", "given"), examples=6)
SPLIT_IN_PARTS = {
    (objective, path): claim(
        test_options.test_objective_and_part, small(), ("alphatoken", objective, path), examples=6
    )
    for objective, path in (("both", "both"), ("adaptation", "both"), ("both", "causal"))
}
FULL = claim(
    test_options.test_full_scales_the_direction_of_captured_estimators, small(), 2, True, examples=6
)
FULL_STEP = claim(
    test_options.test_full_values_are_the_steps_derivative,
    small(), 2, "AdamW", "linears", True, examples=6,
)  # fmt: skip
REPLACED = claim(test_options.test_replaced_sides_equal_a_fresh_scorer, small(), "path", examples=6)
PINNED = claim(test_options.test_pinned_direction, small(), "path", examples=6)
STARTED = claim(
    test_options.test_label_starts_at_the_observed_hidden_states,
    small(layers=2, last=True, repeated_block=False), examples=6,
)  # fmt: skip
MASKED_DPO = claim(test_losses.test_masked_dpo_gradient, test_losses.pair_cases())
UNMASKED_DPO = claim(test_losses.test_unmasked_dpo_gradient, test_losses.pair_cases())
MASKED_LOGIT = claim(test_losses.test_masked_logit_is_the_ablation, test_losses.pair_cases())
MASKED_LOGIT_START = claim(test_losses.test_masked_logit_at_the_reference, test_losses.pair_cases())
PAIRS = claim(test_direction.test_preference_validation, small(validations=BRANCHES), 0.5, "tokens")
DIAGONAL_FISHER = claim(
    test_fisher.test_the_diagonal_is_the_mean_of_squared_sequence_gradients,
    config=configs(layers=1),
    layers=1,
    seed=st.integers(0, 99),
    samples=st.integers(2, 4),
    size=2,
    parameters="linears",
)
TOKEN_FISHER = claim(
    test_fisher.test_token_fisher_squares_labels_of_the_model,
    configs(layers=1),
    st.integers(0, 99),
    st.integers(1, 3),
)
EXPECTED_FISHER = claim(
    test_fisher.test_the_fit_expects_the_exact_fisher,
    config=configs(vocabulary=3, layers=1),
    end=None,
    seed=st.integers(0, 99),
    length=2,
)
KRONECKER_FISHER = claim(
    test_fisher.test_kronecker_factors_are_sums_over_positions_of_inputs_and_errors,
    config=configs(layers=1),
    seed=st.integers(0, 99),
    samples=st.integers(1, 2),
)


def selection(scope: str) -> Claim:
    """Half of the tokens, against a sort of tuples."""
    cases = test_selection.selection_cases()
    return claim(test_selection.test_selection, case=cases, percent=50, scope=scope, bottom=False)


# --- the mutants that were demanded --------------------------------------------------------------

DEMANDED = (
    row("sum-then-outer-in-the-weight-gradient",
        claim(test_contraction.test_outer_sum_is_the_weight_gradient, contractions()),
        "sum-then-outer over validation examples",
        ("direction.contraction.outer_sum",
         'torch.einsum("bto,bti->oi", delta.to(dtype), x.to(dtype))',
         'torch.einsum("to,ti->oi", delta.to(dtype).sum(0), x.to(dtype).sum(0))')),
    row("sum-then-outer-in-the-validation-gradient", SHARDED_OF_SEVERAL,
        "sum-then-outer over validation examples",
        ("direction.gradients._term", "contraction.outer_sum(error, use.x)",
         "contraction.outer_sum(error.sum(0, True), use.x.sum(0, True))")),
    row("aggregated-errors-as-direct", DIRECT,
        "aggregated errors used as direct",
        ("estimate.captured.token_errors",
         "CAPTURED[estimator]", 'CAPTURED[estimator]._replace(backward="ordinary")')),
    row("label-shift-off-by-one-in-the-losses", LOSSES,
        "label shift off by one",
        ("model.batch.by_prediction", "tokens - 1, labels", "tokens, labels")),
    row("label-shift-off-by-one-in-the-values", DIRECT,
        "label shift off by one",
        ("model.batch.to_token_index", "F.pad(by_position[:, :-1], (1, 0))", "by_position")),
    row("validation-prompt-dropped-from-the-gradient", SHARDED_OF_SEVERAL,
        "prompt positions of the validation sequences dropped",
        ("direction.objective.stream_losses",
         "consume(weighted, recorder)",
         "kept = (weights != 0).roll(-1, 1).unsqueeze(-1); recorder and "
         "vars(recorder).update(kept=kept); consume(weighted, recorder)"),
        ("direction.objective.captured_parts",
         "captured_gradients(recorder, errors,",
         "captured_gradients(recorder, [e if e is None else e * vars(recorder)['kept'] for e "
         "in errors],")),
    row("padding-leaks-into-the-attention-weights",
        claim(test_attention.test_log_sum_exp_and_weights, calls(mask="left")),
        "padding leaking in",
        ("model.attention.AttentionStatistics.__init__",
         "call.softcap, call.mask", "call.softcap, None")),
    row("padding-leaks-into-the-losses", LOSSES,
        "padding leaking in",
        ("model.batch.by_prediction", "tokens, bounds = _places_and_bounds(labels, bounds=True)",
         "tokens, bounds = torch.arange(1, labels.numel(), device=labels.device), None"),
        ("model.batch.by_prediction",
         "labels.flatten()[tokens]", "labels.flatten()[tokens].clamp(0)"),
        ("model.batch.token_losses", "losses.masked_fill(~mask, 0.0)", "losses")),
    row("label-after-padding-valued",
        claim(test_estimators.test_padding_holds_nothing, AFTER_PADDING, "path", 1),
        "padding leaking in",
        ("model.batch._off_padding",
         "return labels.masked_fill(hidden, IGNORE)", "return labels")),
    row("mask-of-the-token-for-that-of-its-label-position",
        claim(test_estimators.test_padding_holds_nothing, AFTER_PADDING, "label", 1),
        "padding leaking in",
        ("model.batch._off_padding", "F.pad(padding[:, :-1], (1, 0), value=False)", "padding")),
    row("mean-for-sum-of-the-losses", PATH,
        "mean for sum",
        ("estimate.estimator.Recording.summed_loss", ").sum()", ").mean()")),
    row("mean-for-sum-over-the-heads-of-a-group", PROPAGATION,
        "mean for sum",
        ("model.attention.propagate_values",
         'torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :])',
         'torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :]) / e.shape[2]')),
    row("last-token-dropped", LOSSES,
        "last token dropped",
        ("model.batch.by_prediction",
         "losses_at(tokens - 1", "losses_at((tokens := tokens[:-1]) - 1")),
    row("head-mean-for-per-head", PROPAGATION,
        "head-mean for per-head",
        ("model.attention.propagate_values", "if head_mean:", "if True:")),
    row("grouped-heads-in-the-wrong-order", SELF_BACKWARD,
        "grouped heads repeated in the wrong order",
        ("model.attention._group", "heads.reshape(batch, groups, count // groups, *rest)",
         "heads.reshape(batch, count // groups, groups, *rest).transpose(1, 2)")),
    row("alpha-with-the-value-projections-own-error", alphatoken(small()),
        "alpha paired with the value projection's own error instead of the head output's",
        ("estimate.captured.token_errors", "[attention.output for", "[attention.value for"),
        ("estimate.captured.token_errors",
         "start, at_start =",
         "error = error.repeat_interleave(attention.output.shape[1] // error.shape[1], 1); "
         "start, at_start =")),
    row("window-one-too-short", BAND,
        "window off by one",
        ("model.attention._band", "(k <= t + window)", "(k < t + window)")),
    row("window-one-too-long", BAND,
        "window off by one",
        ("model.attention._band", "(k <= t + window)", "(k <= t + window + 1)"),
        ("model.attention.propagate_values", "start - window)", "start - window - 1)")),
    row("alpha-of-the-wrong-direction", PROPAGATION,
        "alpha of the wrong direction (rows for columns)",
        ("model.attention.propagate_values",
         'torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :])',
         'torch.einsum("bgrkt,bgrtd->bgkd", alpha, e[..., block.columns, :])'),
        ("model.attention.propagate_values",
         "result[..., block.columns, :] +=", "result[..., block.rows, :] +=")),
    row("soft-cap-factor-left-out-of-the-self-only-backward",
        claim(test_attention.test_self_backward_is_the_diagonal, calls(softcap=1.5)),
        "soft-cap factor or sink left out",
        ("model.attention.self_terms", "if slope is not None:", "if False:")),
    row("soft-cap-factor-left-out-of-the-forward-mode",
        claim(test_attention.test_forward_mode_is_the_jvp, calls(softcap=1.5), ALL),
        "soft-cap factor or sink left out",
        ("model.attention.forward_mode_attention", "if block.slope is not None:", "if False:")),
    row("sink-left-out", claim(test_attention.test_log_sum_exp_and_weights, calls(sinks=True)),
        "soft-cap factor or sink left out",
        ("model.attention.AttentionStatistics.lse", "if self.sinks is not None:", "if False:")),
    row("sign-missing-on-rejected-in-the-objective", PAIRS,
        "missing sign on rejected",
        ("direction.objective.weighted_losses", "(1, -1)", "(1, 1)")),
    row("sign-missing-on-rejected-in-the-loss", UNMASKED_DPO,
        "missing sign on rejected",
        ("select.losses.masked_dpo_loss",
         "(kept_chosen - kept_rejected)", "(kept_chosen + kept_rejected)")),
    row("coefficient-from-the-masked-logit", MASKED_DPO,
        "coefficient from the masked logit",
        ("select.losses.masked_dpo_loss", "-chosen_losses.sum(-1)", "-kept_chosen"),
        ("select.losses.masked_dpo_loss", "-rejected_losses.sum(-1)", "-kept_rejected")),
    row("square-of-the-batch-gradient", DIAGONAL_FISHER,
        "square of the batch gradient for the Fisher",
        ("direction.moments.DiagonalMoments.add",
         "gradient.detach().to(wide(gradient.dtype)) ** 2", "gradient.detach()"),
        ("direction.moments.DiagonalMoments.means", "total.div_(count)", "total.div_(count) ** 2")),
    row("token-mean-scale-in-the-kronecker-factors", KRONECKER_FISHER,
        "token-mean scale in the Kronecker factors",
        ("direction.moments.KroneckerMoments.factors", 'self.sums[f"S/{key}"] / count',
         'self.sums[f"S/{key}"] / max(int(self.sums[f"uses/{key}"]), 1)')),
    row("preconditioner-applied-twice",
        (claim(test_direction.test_direction_algebra, test_direction.direction_cases()),
         claim(test_preconditioner.test_given_preconditioner, small()),
         claim(test_preconditioner.test_adam_preconditioner, small(), 2)),
        "preconditioner applied to the token side twice",
        ("direction.algebra.precondition", "m * p[name].to(m)", "m * p[name].to(m) ** 2")),
    row("twice-called-module-overwritten",
        claim(test_estimators.test_path_is_the_column_sums, TWICE),
        "tied or twice-called module overwritten instead of accumulated",
        ("model.capture.Recorder.on_linear",
         "self.linears.append(LinearUse(linear, x.detach()",
         "self.linears[:] = [u for u in self.linears if u.linear is not linear]; "
         "self.linears.append(LinearUse(linear, x.detach()")),
    row("tied-module-overwritten", claim(test_estimators.test_path_is_the_column_sums, TIED),
        "tied or twice-called module overwritten instead of accumulated",
        ("model.capture.Recorder.on_linear",
         "self.linears.append(LinearUse(linear, x.detach()",
         "w = linear.weight; self.linears[:] = [u for u in self.linears if u.linear.weight is "
         "not w]; self.linears.append(LinearUse(linear, x.detach()")),
    row("stale-direction", claim(test_direction.test_direction_is_never_stale, small(), "path"),
        "stale direction",
        ("model.fingerprint.numbers_of", "return tuple(digests)", "return ()")),
    row("float32-in-the-contraction", CONTRACTION,
        "float32 or bf16 arithmetic inside",
        ("direction.contraction.contract",
         "delta.to(dtype), projected)", "delta.float(), projected.float()).to(dtype)")),
    row("bfloat16-in-the-contraction", CONTRACTION,
        "float32 or bf16 arithmetic inside",
        ("direction.contraction.contract",
         "delta.to(dtype), projected)", "delta.bfloat16(), projected.bfloat16()).to(dtype)")),
    row("float32-in-the-attention-weights", PROPAGATION,
        "float32 or bf16 arithmetic inside",
        ("model.attention.AttentionStatistics.weights",
         "block.logits -", "block.logits.float() -")),
    row("bfloat16-in-the-self-only-backward", SELF_BACKWARD,
        "float32 or bf16 arithmetic inside",
        ("model.attention.self_terms", "value.to(dtype).unsqueeze(2) - o, e)",
         "(value.unsqueeze(2) - o).bfloat16().to(dtype), e)")),
    row("ties-all-kept", selection("batch"),
        "ties all kept",
        ("select.masks._top_of",
         "keep[candidates[order[:count]]] = True",
         "v = values.flatten()[candidates]; keep[candidates[v >= v[order[count - 1]]] if "
         "count else candidates] = True")),
    row("ceil-in-floating-point",
        claim(test_selection.test_keep_count,
            st.tuples(st.integers(1, 100), st.just(100), st.sampled_from([100, 50, 20])),
            examples=100),
        "ceil in floating point",
        ("select.masks.keep_count",
         "whole if abs(exact - whole) <= exact / 2**52 else _ROUNDINGS[rounding](exact)",
         "_ROUNDINGS[rounding](ratio * count)")),
    row("threshold-over-padding", selection("batch"),
        "threshold over padding",
        ("select.masks._top_of",
         "true_places(mask)", "torch.arange(mask.numel())"),
        ("select.masks._top_of", "return keep.view_as(mask)", "return keep.view_as(mask) & mask")),
)  # fmt: skip
# --- and of the steps that the demand leaves out -------------------------------------------------

MOVED = st.just((True, True, True))
"""Tangents of hidden states, weight and bias alike."""


HEAD = claim(
    test_head.test_head_losses, case=test_head.head_cases(), known=st.booleans(), examples=40
)  # fmt: skip


def on_model(check: Callable[..., None], *arguments: str) -> Claim:
    """One run of a test of one architecture of transformers."""
    return claim(check, *arguments, examples=1, needs=("transformers",))


CORE = (
    row("ceil-of-a-rounded-ratio",
        claim(test_selection.test_keep_count, st.tuples(st.integers(1, 6), st.just(6), st.just(6))),
        "ceil of a ratio that is no decimal, with the rounding of its float",
        ("select.masks.keep_count", "whole if abs(exact - whole) <= exact / 2**52 else ", "")),
    row("hops-keep-what-stays", HOP,
        "same-layer hops contain what stays at its position",
        ("diagnose.value_propagation._hop_errors_of", "e - own[i] if i in own else e", "e")),
    row("gate-passes-dk-in-self-mode", SELF_BACKWARD,
        "later queries reach earlier keys in the self-only backward",
        ("model.switch._Gate.backward", "*errors[: ctx.passing], *([None] * dropped)",
         "*errors[:2], *([None] * (len(errors) - 2))")),
    row("self-mode-without-dq", DIRECT,
        "the self-only backward stops at the query",
        ("model.switch._Gate.backward",
         "*errors[: ctx.passing], *([None] * dropped)", "*([None] * len(errors))")),
    row("scale-forgotten-in-dk",
        claim(test_attention.test_self_backward_is_the_diagonal, calls(scale=0.6)),
        "attention scale c left out of the self-only dk",
        ("model.attention.self_terms", "pull * statistics.scale", "pull")),
    row("softmax-mean-forgotten-in-dk", SELF_BACKWARD,
        "v_t instead of v_t - o_t in the self-only dk",
        ("model.attention.self_terms", ".unsqueeze(2) - o", ".unsqueeze(2) - 0 * o")),
    row("diagonal-ignores-the-mask",
        claim(test_attention.test_log_sum_exp_and_weights, calls(mask="additive")),
        "alpha_tt of a masked position",
        ("model.attention.AttentionStatistics.diagonal", "if self.mask is not None:", "if False:")),
    row("forward-mode-without-dv", JVP,
        "tangent of the values left out of the forward mode",
        ("model.attention.forward_mode_attention",
         "moved_weights + moved_values", "moved_weights")),
    row("forward-mode-without-the-mean", JVP,
        "softmax tangent alpha s' without its mean",
        ("model.attention.forward_mode_attention",
         "weighted = weighted.addcmul_(alpha, mean, value=-1)", "pass")),
    row("forward-mode-without-the-sinks", JVP_OF_SINKS,
        "the sinks take no probability in forward mode",
        ("model.attention.AttentionStatistics.softmax", "if self.sinks is None:", "if True:")),
    row("forward-mode-without-the-sinks-tangent", JVP_OF_SINKS,
        "a direction that moves the sinks is not felt",
        ("model.attention.forward_mode_attention", "mean = mean + share * moved", "pass")),
    row("named-parameters-from-the-scored-layers-on",
        claim(test_label.test_label_over_named_parameters, setups(layers=st.just(3)),
            st.just("layers.[12].mlp_norm.*")),
        "the graph begins at the first scored layer, above parameters that their names choose",
        ("model.scope.find_scope",
         "lowest_use(adapter, named.values(), scope.first)", "scope.first")),
    row("named-parameters-of-the-scored-layers-alone",
        claim(test_label.test_label_over_named_parameters, small(),
            st.just("linears,*norm*,embedding.weight")),
        "what names choose is left out where linears are chosen too",
        ("model.scope.Scope.parameters",
         "return chosen | {name: p for name, p in self.named.items() if id(p) not in owned}",
         "return chosen or dict(self.named)")),
    row("tied-weight-moved-in-one-place-only", claim(test_label.test_label_is_the_row_sums, TIED),
        "the dual forward moves one of the places of a tied weight",
        ("estimate.forward_mode._places", "return {", "seen: set = set(); return {"),
        ("estimate.forward_mode._places", "if id(parameter) in duals",
         "if id(parameter) in duals and not (id(parameter) in seen or seen.add(id(parameter)))")),
    row("unassigned-dropped", PATH,
        "columns of prompt positions are thrown away",
        ("estimate.captured.assign_columns",
         "everything - direct.sum(-1) - causal.sum(-1)", "torch.zeros_like(everything)")),
    row("lambda-on-the-adaptation", claim(test_direction.test_lambda, small(), 0.5),
        "lambda G + V instead of G + lambda V",
        ("estimate.token_values.combine", "g + stability_weight * v", "stability_weight * g + v")),
    row("reference-sign", PATH,
        "W_ref - W instead of W - W_ref",
        ("direction.algebra.diagonal_drift",
         "weight.to(dtype) - reference.to(dtype)", "reference.to(dtype) - weight.to(dtype)")),
    row("fisher-forgotten-in-the-drift", PATH,
        "V = W - W_ref",
        ("direction.algebra.diagonal_drift", "fisher.to(dtype) * (weight", "(weight")),
    row("observed-labels-for-sampled-labels", TOKEN_FISHER,
        "the Fisher of the data's labels, not of the model's own",
        ("direction.fisher._Fit._add",
         "response = draw_tokens(", "response = (lambda *_: sequence.ids[sequence.predicted])(")),
    row("token-mean-in-the-diagonal-fisher", EXPECTED_FISHER,
        "gradient of the mean, not of the summed, log-likelihood of a response",
        ("direction.fisher._Fit._add", "chosen.sum()", "chosen.mean()")),
    row("mean-of-batch-means", GRADIENT_OF_BATCHES,
        "J_tgt as the mean of the batches' means, whatever their lengths",
        ("direction.objective.stream_losses",
         "(loss * weights.to(loss)).sum()", "(loss * weights.to(loss)).sum() / tokens"),
        ("direction.objective.stream_losses", "count += tokens", "count += 1")),
    row("token-weights-ignored",
        claim(test_estimators.test_weighted_losses, small(train=("pprrr",)), st.integers(0, 9)),
        "observed values of unweighted losses",
        ("estimate.estimator.Recording.summed_loss",
         "losses if weights is None else losses * weights.to(losses)", "losses")),
    row("epsilon-inside-adams-root", FROZEN_ADAM,
        "sqrt(v^ + eps) instead of sqrt(v^) + eps",
        ("direction.preconditioner.frozen_preconditioner",
         "** 0.5 + update.eps", "+ update.eps).sqrt("),
        ("direction.preconditioner._derivative",
         "1 / (root + update.eps)", "1 / (root.square() + update.eps).sqrt()")),
    row("no-bias-correction-in-adam", FROZEN_ADAM,
        "raw moments for v^ and m^",
        ("direction.preconditioner.adam_update",
         "one, two = 1 - beta1 ** (steps + 1), 1 - beta2 ** (steps + 1)",
         "one, two, steps = 1.0, 1.0, 0")),
    row("full-preconditioner-without-its-second-term", FULL_ADAM,
        "the denominator's own dependence on the token is forgotten",
        ("direction.preconditioner._derivative",
         "update.slope * scale + n * scale_slope", "update.slope * scale")),
    row("curvature-added-in-the-full-preconditioner", FULL_ADAM,
        "the second term's sign",
        ("direction.preconditioner._derivative",
         "-root_slope * scale.square()", "root_slope * scale.square()")),
    row("gradient-left-out-of-the-second-moment", FULL_ADAM,
        "v^ of the state before the step in the full form",
        ("direction.preconditioner._derivative",
         "second = update.rest + update.share * away.square()",
         "second = update.rest + 0.0 * away.square()")),
    row("gradient-left-out-of-the-first-moment", FULL_ADAM,
        "m^ of the state before the step in the full form",
        ("direction.preconditioner._derivative",
         "n = update.offset + update.slope * g", "n = update.offset + 0.0 * g")),
    row("coupled-decay-left-out-of-the-gradient", COUPLED_DECAY,
        "Adam's weight decay is not part of g",
        ("direction.optimizers.read_update",
         "g = g + decay * local.detach().to(g)", "g = g.clone()")),
    row("amsgrads-maximum-forgotten",
        claim(test_preconditioner.test_full_is_the_derivative_of_a_real_step,
            test_preconditioner.cases(AMSGRAD)),
        "the running maximum does not hold the denominator",
        ("direction.preconditioner._derivative",
         "second = torch.maximum(second, update.largest)", "second = second.clone()")),
    row("stability-counted-twice", SPLIT_IN_PARTS["both", "both"],
        "the total takes lambda V twice",
        ("estimate.token_values.combine",
         "g + stability_weight * v", "g + 2 * stability_weight * v")),
    row("summed-direction-without-lambda", TOTAL_ALONE,
        "the total alone is contracted with G + V",
        ("direction.algebra.SummedDirection.__getitem__", "self._weight * ", "")),
    row("summed-direction-without-stability", TOTAL_ALONE,
        "the total alone is the adaptation",
        ("direction.algebra.SummedDirection.__getitem__", "+ self._weight * stability[name]", "")),
    row("stability-in-spite-of-the-objective", SPLIT_IN_PARTS["adaptation", "both"],
        'objective="adaptation" builds and sums the retention term as well',
        ("direction.inputs.DirectionInputs.retains",
         'self.config.objective != "adaptation" and', "")),
    row("errors-beside-the-way-forgotten",
        claim(test_options.test_errors_streamed_are_the_errors_kept, DEEP, True),
        "a linear that no other one's error passes is not asked for by itself",
        ("model.capture.stream_errors", "if i not in consumed]", "if False]")),
    row("streamed-errors-of-another-mode", DIRECT,
        "errors that are contracted in the backward are the ordinary ones",
        ("estimate.captured._at",
         "stream_errors(recorder, loss, mode,", 'stream_errors(recorder, loss, "ordinary",')),
    row("direct-part-in-spite-of-the-part", SPLIT_IN_PARTS["both", "causal"],
        'part="causal" sums the direct part as well',
        ("estimate.captured.token_errors", 'if part == "causal":', "if False:")),
    row("step-weights-ignored", FULL,
        "the full preconditioner's gradient is always that of the mean loss",
        ("estimate.estimator.Recording.step_loss",
         "weights, mask = self.step_weights,", "weights, mask = None,")),
    row("gradient-missing-from-the-full-preconditioner", FULL,
        "the step is taken to see no gradient",
        ("direction.inputs.DirectionInputs.at_step",
         " gradient,", " {n: 0 * g for n, g in gradient.items()},")),
    row("full-preconditioner-on-one-side", FULL_STEP,
        "P scales G but not V",
        ("direction.inputs._preconditioned", "scaled(stability)", "stability")),
    row("old-validation-set", REPLACED,
        "set_validation leaves G as it was",
        ("direction.cache.DirectionCache.set_validation", "self.invalidate()", "pass"),
        ("direction.cache.DirectionCache.set_retention", "self.invalidate()", "pass"),
        ("direction.cache.age_of",
         "numbers_of(_tensors_in((inputs.validation, inputs.arguments.retention))),", ""),
        ("direction.cache.age_of", "_identity(inputs.arguments.retention),", "")),
    row("pin-ignored", PINNED,
        "a pinned direction follows the weights",
        ("direction.cache.DirectionCache._current_age",
         "if self.pinned is None else", "if True else")),
    row("wrong-start-believed", STARTED,
        "a dual forward starts at hidden states that lead to other losses",
        ("model.forward.start_at", "kwargs, start)", "kwargs, 1.5 * start)"),
        ("model.forward.Start.gives", "return bool(", "return True or bool(")),
    row("omega-not-detached", UNMASKED_DPO,
        "the coefficient is differentiated too",
        ("select.losses.dpo_coefficient", ".detach()", "")),
    row("reference-unmasked-in-the-masked-logit", MASKED_LOGIT_START,
        "the mask acts on the policy's log-probabilities only",
        ("select.losses.masked_dpo_coefficient",
         "(keep_chosen * (chosen - reference_chosen)).sum(-1)",
         "(keep_chosen * chosen - reference_chosen).sum(-1)"),
        ("select.losses.masked_dpo_coefficient",
         "(keep_rejected * (rejected - reference_rejected)).sum(-1)",
         "(keep_rejected * rejected - reference_rejected).sum(-1)")),
    row("masked-logit-of-all-tokens", MASKED_LOGIT,
        "the ablation takes its coefficient from the unmasked logit",
        ("select.losses.masked_dpo_coefficient",
         "(keep_chosen * (chosen - reference_chosen)).sum(-1)",
         "(chosen - reference_chosen).sum(-1)")),
    row("mean-over-prompt-and-padding-too", SFT_LOSS,
        "the masked loss divides by all positions",
        ("select.losses.masked_sft_loss", "mask.sum() if", "torch.as_tensor(mask.numel()) if")),
    row("losses-outside-keep-still-pushed", SFT_LOSS,
        "the mask of kept tokens is ignored",
        ("select.losses.masked_sft_loss",
         "(losses * weights).sum()", "(losses * (0 * weights + 1)).sum()")),
    row("small-weights-divided-by-one", SMALL_WEIGHTS,
        "a sum of weights below 1 does not divide the masked loss",
        ("select.losses.masked_sft_loss",
         "torch.where(count > 0, count, 1)", "count.clamp(min=1)")),
    row("sequence-scope-ranks-the-batch", selection("sequence"),
        'scope="sequence" uses one threshold for the batch',
        ("select.masks.select_top", 'if scope == "batch":', 'if scope in ("batch", "sequence"):')),
    row("response-mean-over-padding",
        claim(test_selection.test_response_values, test_selection.selection_cases(), 50),
        "a response's mean is taken over the width of the batch",
        ("select.masks.response_values",
         "mask.sum(-1, keepdim=True).clamp(min=1)", "mask.shape[-1]")),
    row("response-mean-in-the-values-own-dtype",
        claim(test_selection.test_means_of_responses_are_summed_wider_than_their_values,
            examples=1),
        "a response's mean is summed in float32",
        ("select.masks.response_values", ".double().sum(", ".sum(")),
    row("state-of-another-kind-in-a-block", FULL_ADAM,
        "in blocks, the momentum is read where the second moment belongs",
        ("direction.preconditioner.full_preconditioner",
         "zip(entries, rest, strict=True)", "zip(entries, reversed(rest), strict=True)")),
    row("jackknife-without-its-factor", ERRORS,
        "the standard error of a value lacks (h - 1) / h",
        ("values.standard_error", "((count - 1) / count)", "1.0")),
    row("validation-batches-taken-for-equal", ERRORS,
        "the standard error takes every validation batch for one of as many tokens",
        ("estimate.estimator.Estimator.combined", "stacked.new_tensor(direction.shares)",
         "stacked.new_tensor([1 / len(parts)] * len(parts))")),
    row("part-divided-by-its-own-tokens", ERRORS,
        "with standard errors, G is the sum of the batches' means",
        ("direction.inputs.DirectionInputs._parts",
         'self._mean("validation", sums, whole)', 'self._mean("validation", sums, count)')),
    row("parts-without-the-preconditioner",
        claim(test_confidence.test_standard_errors, SEVERAL_BATCHES, "direct", True),
        "P scales G but not what each validation batch gives to it",
        ("direction.inputs._preconditioned", "scaled(part) for part", "part for part")),
    row("parts-for-the-values-of-each-batch",
        claim(test_confidence.test_values_by_batch, SEVERAL_BATCHES, "direct"),
        "what a validation batch gives to the mean counts as the value against it alone",
        ("values.TokenValues.by_batch",
         "return parts / shares.to(parts)", "return parts + 0 * shares.to(parts)")),
    row("lower-bound-for-the-upper", HARMLESS,
        "a token goes where it is not useful beyond doubt",
        ("select.confidence.select_harmless",
         "values.double() + quantile", "values.double() - quantile")),
    row("one-degree-of-freedom-too-many", HARMLESS,
        "the quantile of a token's bound has as many degrees of freedom as there are parts",
        ("select.confidence.select_harmless", "parts - 1)", "parts)")),
    row("last-of-equals-kept", selection("batch"),
        "ties go to the higher index",
        ("select.masks._top_of",
         "descending=True, stable=True).indices", "stable=True).indices.flip(0)")),
    row("first-layers-for-the-last",
        claim(test_direction.test_preference_validation,
            small(layers=2, last=True, validations=BRANCHES), 0.5, "tokens"),
        "layers=K taken from the bottom of the model",
        ("model.choice.layers_within", "range(depth - layers, depth)", "range(layers)")),
    row("hops-into-lower-layers",
        claim(test_estimators.test_same_layer_hop_is_one_hop_within_the_layer, DEEP),
        "same-layer hops and Value-Propagation go on into the layers below",
        ("estimate.captured.pull_back",
         "if use.execution == attention.execution", "if use.execution <= attention.execution")),
    row("target-left-in-the-heads-error", HEAD,
        "the error below the head lacks the row of W that belongs to the target",
        ("model.head._fold_rows", ".sub_(predictions.weight[predictions.targets])", "")),
    row("sums-not-shrunk-under-a-larger-maximum", HEAD,
        "a later block of the vocabulary has a larger maximum, and the errors so far stay",
        ("model.head._fold_rows", "errors.mul_(shrink.unsqueeze(-1))", "errors")),
    row("heads-weight-gradient-of-other-tokens", HEAD,
        "the tokens whose loss has a weight get the weights of the first ones",
        ("model.head._AtWeight.backward",
         "weights[used], lse[used]", "weights[: len(used)], lse[used]")),
    row("target-left-in-the-heads-weight-gradient", HEAD,
        "the gradient of W is that of the log-sum-exp alone",
        ("model.head._AtWeight.backward", "torch.where(within, c, 0.0)", "0.0")),
    row("target-of-every-block-in-the-heads-weight-gradient", HEAD,
        "a block of the vocabulary without a prediction's target has it at its edge",
        ("model.head._AtWeight.backward", "torch.where(within, c, 0.0)", "c")),
    row("target-of-the-last-block", HEAD,
        "the logit of a prediction's target is that of the last block",
        ("model.head._OnlineSoftmax.blocks",
         "torch.where(within, z.gather(-1, places), self.chosen[:, None])",
         "z.gather(-1, places)")),
    row("known-logits-of-other-rows", HEAD,
        "logits that are known are read in order, and not where each prediction stands",
        ("model.head._Predictions.block",
         "[:, columns][self.rows]", "[: len(self.rows), columns]")),
    row("tangent-of-the-target-forgotten",
        claim(test_head.test_head_tangents, test_head.head_cases(), MOVED),
        "label values at the head are the mean tangent, without that of the token itself",
        ("model.head._fold_dual", "mean / softmax.total - chosen_slope", "mean / softmax.total")),
    row("tangent-of-the-heads-weight-forgotten",
        claim(test_head.test_head_tangents, test_head.head_cases(), MOVED),
        "label values over all parameters lack what moves the head itself",
        ("model.head._logit_tangents", "if dw is not None:", "if False:")),
    row("losses-of-other-targets", on_model(test_head.test_losses_asked_twice, "llama"),
        "losses asked for at the same positions are taken for those of other tokens",
        ("model.head.HeadUse._cached_for", " and torch.equal(cached.targets, targets)", "")),
    row("tangents-times-errors-of-other-rows",
        on_model(test_head.test_observed_label_values, "llama", "linears"),
        "label values of an observed forward pair tangents with the errors of other predictions",
        ("model.head.HeadUse.dual_losses",
         "(cached.errors * dh", "(cached.errors.roll(1, 0) * dh")),
    row("tangent-of-the-observed-heads-weight-forgotten",
        on_model(test_head.test_observed_label_values, "llama", "all"),
        "label values over all parameters of an observed forward lack what moves the head itself",
        ("model.head.HeadUse.dual_losses", "if dw is not None or db is not None:", "if False:")),
    row("errors-at-other-hidden-states",
        on_model(test_head.test_tangents_at_other_hidden_states, "llama"),
        "errors of an observed forward are believed where the dual one has other hidden states",
        ("model.head._same_up_to_rounding", "return bool(", "return True or bool(")),
    row("capped-logits-taken-for-the-heads", on_model(test_head.test_own_forward, "gemma2"),
        "a model that caps its logits is taken for one that does not",
        ("model.forward._HeadInput.gives",
         "if self.is_handed_on(logits) else None", ""),
        ("model.forward._HeadInput.gives", "return equal", "return True")),
    row("logits-scaled-in-place-below-observe",
        on_model(test_head.test_logits_changed_in_place, "llama"),
        "logits that were changed in place are the head's by identity",
        ("model.head.watched_head", "logits._version != version", "False")),
    row("logits-scaled-in-place-elsewhere",
        on_model(test_head.test_logits_changed_in_place, "llama"),
        "logits of all positions are believed for those of one",
        ("model.forward._HeadInput.is_handed_on",
         "logits is t and t._version == version", "True")),
    row("logits-of-another-forward", on_model(test_head.test_scores_of_another_forward, "llama"),
        "label values take logits with the graph of another forward",
        ("estimate.observed._follows", "not uses:", "True:")),
    row("losses-of-another-forward", on_model(test_head.test_scores_of_another_forward, "llama"),
        "label values take losses that are not the model's",
        ("estimate.estimator.Recording.require_losses",
         "if not float((own", "if False and not float((own")),
    row("products-of-autocast-taken-for-wide",
        on_model(test_head.test_losses_that_autocast_rounded, "llama"),
        "what autocast rounds is taken for as exact as the hidden states",
        ("model.capture.Recorder.on_first_block",
         "cast = torch.is_autocast_enabled(device)", "cast = False")),
    row("products-of-scored-linears-forgotten",
        (_rounded("autocast in blocks", "linears", graph=True),
         claim(test_differences.test_an_observed_forward_in_16_bits_is_no_base, True, examples=1,
             needs=("transformers",))),
        "16 bits inside a block are taken for as exact as what it is given",
        ("model.capture.Recorder.products",
         "[*self.nodes.values(), *(use.s.dtype for use in self.linears)]",
         "list[torch.dtype]()")),
    row("weights-of-16-bits-overlooked",
        (_rounded("linears", "linears", graph=True), _rounded("the head", "linears", graph=True)),
        "frozen or narrow weights are taken for as exact as what runs between them",
        ("model.capture.Recorder.products", "self.weights.union(", "frozenset().union(")),
    row("losses-compared-by-the-last-forward", _rounded("autocast", "linears", graph=False),
        "their tolerance is of the forward that they are compared with",
        ("estimate.estimator.Recording.require_losses",
         "*self.products", "*self.recorded[0].products")),
    row("tangent-of-a-bias-forgotten",
        claim(test_label.test_label_over_named_parameters, small(bias=True),
            st.just("linears,*bias*")),
        "a linear of which only the weight moves takes its bias for fixed",
        ("estimate.forward_mode._linear", "if db is not None:", "if False:")),
    row("label-values-not-scaled-back",
        claim(test_label.test_label_is_linear_in_m, small(), 2.0**80),
        "the dual forward runs along M / ||M||, and the norm is forgotten",
        ("estimate.forward_mode.label_values",
         "to(wide(derivatives.dtype)) * scale", "to(wide(derivatives.dtype))")),
    row("pairs-counted-twice",
        claim(test_direction.test_preference_validation, small(validations=BRANCHES), 0.5, "pairs"),
        "J_tgt of preference pairs divided by the branches instead of the pairs",
        ("direction.objective.weighted_losses", "len(omega) / 2", "len(omega)")),
    row("modes-not-put-back", claim(test_estimators.test_model_is_left_alone, small(), "direct"),
        "the user's model stays in evaluation mode",
        ("model.forward.evaluation_mode", "module.training = flag", "pass")),
    row("self-only-mode-not-put-back",
        (claim(test_attention.test_the_mode_is_read_at_backward_time, calls()),
         claim(test_estimators.test_observed_equals_scored, small(), "direct")),
        "training's own backward through a scored graph stays self-only",
        ("model.switch.BackwardSwitch.to", "self.mode = before", "pass")),
    row("keys-of-the-kernel-believed",
        claim(test_attention.test_log_sum_exp_of_the_kernel,
            calls(softcap=None, sinks=False, d=4, v=4), False),
        "the log-sum-exp of a kernel is taken that attends to other keys than its call says",
        ("model.attention.AttentionStatistics._saved_lse",
         "if not holds(", "if False and not holds(")),
    row("kernel-that-rounds-believed",
        claim(test_attention.test_log_sum_exp_of_a_kernel_that_rounds_its_inputs,
            calls(softcap=None, sinks=False, mask="none", d=4, v=4, t=st.integers(2, 20))),
        "the log-sum-exp of a kernel is taken that rounded its queries and keys",
        ("model.attention.AttentionStatistics.take_saved", " and not rounded", "")),
    row("last-refusal-raised",
        claim(test_devices.test_the_first_refusal_is_raised, st.just([False, True, True]), False,
            False),
        "of several numbers that are refused on a device the last one is named",
        ("support.devices.settle", "min(raised)", "max(raised)")),
    row("refusals-dropped-after-an-error",
        claim(test_devices.test_the_first_refusal_is_raised, st.just([True]), True, True),
        "what an error came from is not said where numbers lie on a device",
        ("support.devices.deferred_refusals", "if failed or pending is None:",
         "if not failed and pending is None:")),
    row("places-of-labels-as-they-were",
        claim(test_batch.test_places_follow_labels_that_are_written_to, True, examples=1),
        "response tokens are looked for once, whatever is written to the labels later",
        ("model.batch._places_and_bounds", "version != labels._version or ", "")),
    row("places-of-the-host-kept",
        claim(test_batch.test_places_follow_writes_that_torch_does_not_count, "numpy", False,
            examples=1),
        "what numpy writes into labels is not read",
        ("model.batch._places_and_bounds", "on_host(labels) or ", "")),
    row("places-of-a-batch-that-is-read-again",
        claim(test_batch.test_places_follow_writes_that_torch_does_not_count, "data", True,
            examples=1),
        "what is written through .data is not read where a batch is",
        ("model.batch._places_and_bounds", "read is not None or version", "version")),
    row("places-of-a-known-number-from-the-end",
        claim(test_batch.test_reading_counts_tokens_and_positions_and_finds_documents,
            st.sampled_from(MODES).flatmap(rows), True),
        "on a device the places of response tokens are those of all others",
        ("model.batch._places_and_bounds", "descending=True, ", "")),
    row("one-part-in-a-billion",
        (CONTRACTION, PATH, DIRECT),
        "a contraction that is off by 1e-9 of itself",
        ("direction.contraction.contract",
         'return torch.einsum("bto,bto->bt",', 'return (1 + 1e-9) * torch.einsum("bto,bto->bt",')),
)  # fmt: skip
