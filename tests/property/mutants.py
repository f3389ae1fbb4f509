"""Every mutant that was demanded, and one for each step of the core that the demand leaves out.

Each is a few words of the core replaced; ``mutation`` says what counts as a kill. The claims beside
a mutant are drawn with the structure that it needs (two query heads a group, a soft-cap, a bias),
so that a few examples are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from tests.property import (
    test_attention,
    test_confidence,
    test_contraction,
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
from tests.property.mutants_train import TRAINERS
from tests.property.mutation import Claim, Mutant, Words, claim, mutant
from tests.property.setups import Setup, setups
from tests.property.strategies import configs, contractions

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

_build = partial(mutant, room="direction.inputs.")
_preconditioner = partial(mutant, room="direction.preconditioner.")
_estimators = partial(mutant, room="estimate.estimators.")
_forward_mode = partial(mutant, room="estimate.forward_mode.")
_token_values = partial(mutant, room="estimate.token_values.")
_response_losses = partial(mutant, room="model.response_losses.")
_losses = partial(mutant, room="select.losses.")
_masks = partial(mutant, room="select.masks.")

_DEMANDED = (
    mutant(
        "sum-then-outer-in-the-weight-gradient",
        "sum-then-outer over validation examples",
        (
            "estimate.contraction.outer_sum",
            'torch.einsum("bto,bti->oi", delta.to(dtype), x.to(dtype))',
            'torch.einsum("to,ti->oi", delta.to(dtype).sum(0), x.to(dtype).sum(0))',
        ),
        claim(test_contraction.test_outer_sum_is_the_weight_gradient, contractions()),
    ),
    mutant(
        "sum-then-outer-in-the-validation-gradient",
        "sum-then-outer over validation examples",
        (
            "estimate.gradients._term",
            "contraction.outer_sum(error, use.x)",
            "contraction.outer_sum(error.sum(0, True), use.x.sum(0, True))",
        ),
        SHARDED_OF_SEVERAL,
    ),
    _estimators(
        "aggregated-errors-as-direct",
        "aggregated errors used as direct",
        [
            ("token_errors", 'loss, "self", consume', 'loss, "ordinary", consume'),
            ("token_errors", 'else "self"', 'else "ordinary"'),
        ],
        DIRECT,
    ),
    mutant(
        "label-shift-off-by-one-in-the-losses",
        "label shift off by one",
        ("model.batch.by_prediction", "tokens - 1, labels", "tokens, labels"),
        LOSSES,
    ),
    mutant(
        "label-shift-off-by-one-in-the-values",
        "label shift off by one",
        ("model.batch.to_token_index", "F.pad(by_position[:, :-1], (1, 0))", "by_position"),
        DIRECT,
    ),
    mutant(
        "validation-prompt-dropped-from-the-gradient",
        "prompt positions of the validation sequences dropped",
        [
            (
                "direction.objective.stream_losses",
                "consume(weighted, recorder)",
                "kept = (weights != 0).roll(-1, 1).unsqueeze(-1); "
                "recorder and vars(recorder).update(kept=kept); "
                "consume(weighted, recorder)",
            ),
            (
                "direction.objective.captured_parts",
                "captured_gradients(recorder, errors,",
                "captured_gradients(recorder, [e if e is None else e * vars(recorder)['kept'] "
                "for e in errors],",
            ),
        ],
        SHARDED_OF_SEVERAL,
    ),
    mutant(
        "padding-leaks-into-the-attention-weights",
        "padding leaking in",
        (
            "model.attention.AttentionStatistics.__init__",
            "None if call.mask is not None else CausalStructure(call)",
            "CausalStructure(call)",
        ),
        claim(test_attention.test_log_sum_exp_and_weights, calls(mask="left")),
    ),
    mutant(
        "padding-leaks-into-the-losses",
        "padding leaking in",
        [
            (
                "model.batch.by_prediction",
                "mask.flatten().nonzero().squeeze(-1)",
                "torch.arange(1, labels.numel(), device=labels.device)",
            ),
            (
                "model.batch.by_prediction",
                "labels.flatten()[tokens]",
                "labels.flatten()[tokens].clamp(0)",
            ),
            ("model.batch.token_losses", "losses.masked_fill(~mask, 0.0)", "losses"),
        ],
        LOSSES,
    ),
    mutant(
        "label-after-padding-valued",
        "padding leaking in",
        (
            "model.batch.predicted_labels",
            "return labels.masked_fill(hidden, IGNORE)",
            "return labels",
        ),
        claim(test_estimators.test_padding_holds_nothing, AFTER_PADDING, "path", 1),
    ),
    mutant(
        "mask-of-the-token-for-that-of-its-label-position",
        "padding leaking in",
        (
            "model.batch.predicted_labels",
            "F.pad(padding[:, :-1], (1, 0), value=False)",
            "padding",
        ),
        claim(test_estimators.test_padding_holds_nothing, AFTER_PADDING, "label", 1),
    ),
    mutant(
        "mean-for-sum-of-the-losses",
        "mean for sum",
        ("scoring.recording.Recording.summed_loss", ").sum()", ").mean()"),
        PATH,
    ),
    mutant(
        "mean-for-sum-over-the-heads-of-a-group",
        "mean for sum",
        (
            "model.attention.propagate_values",
            'torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :])',
            'torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :]) / e.shape[2]',
        ),
        PROPAGATION,
    ),
    mutant(
        "last-token-dropped",
        "last token dropped",
        ("model.batch.by_prediction", "nonzero().squeeze(-1)", "nonzero().squeeze(-1)[:-1]"),
        LOSSES,
    ),
    mutant(
        "head-mean-for-per-head",
        "head-mean for per-head",
        ("model.attention.propagate_values", "if head_mean:", "if True:"),
        PROPAGATION,
    ),
    mutant(
        "grouped-heads-in-the-wrong-order",
        "grouped heads repeated in the wrong order",
        (
            "model.attention._group",
            "heads.reshape(batch, groups, count // groups, *rest)",
            "heads.reshape(batch, count // groups, groups, *rest).transpose(1, 2)",
        ),
        claim(test_attention.test_self_backward_is_the_diagonal, calls()),
    ),
    _estimators(
        "alpha-with-the-value-projections-own-error",
        "alpha paired with the value projection's own error instead of the head output's",
        [
            ("token_errors", "[attention.output for", "[attention.value for"),
            (
                "token_errors",
                "start, at_start =",
                "error = error.repeat_interleave(attention.output.shape[1] // error.shape[1], 1); "
                "start, at_start =",
            ),
        ],
        alphatoken(small()),
    ),
    mutant(
        "window-one-too-short",
        "window off by one",
        ("model.attention._band", "(k <= t + window)", "(k < t + window)"),
        BAND,
    ),
    mutant(
        "window-one-too-long",
        "window off by one",
        [
            ("model.attention._band", "(k <= t + window)", "(k <= t + window + 1)"),
            ("model.attention.propagate_values", "start - window)", "start - window - 1)"),
        ],
        BAND,
    ),
    mutant(
        "alpha-of-the-wrong-direction",
        "alpha of the wrong direction (rows for columns)",
        [
            (
                "model.attention.propagate_values",
                'torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :])',
                'torch.einsum("bgrkt,bgrtd->bgkd", alpha, e[..., block.columns, :])',
            ),
            (
                "model.attention.propagate_values",
                "result[..., block.columns, :] +=",
                "result[..., block.rows, :] +=",
            ),
        ],
        PROPAGATION,
    ),
    mutant(
        "soft-cap-factor-left-out-of-the-self-only-backward",
        "soft-cap factor or sink left out",
        ("model.attention.self_terms", "if slope is not None:", "if False:"),
        claim(test_attention.test_self_backward_is_the_diagonal, calls(softcap=1.5)),
    ),
    mutant(
        "soft-cap-factor-left-out-of-the-forward-mode",
        "soft-cap factor or sink left out",
        ("model.attention.forward_mode_attention", "if block.slope is not None:", "if False:"),
        claim(test_attention.test_forward_mode_is_the_jvp, calls(softcap=1.5), ALL),
    ),
    mutant(
        "sink-left-out",
        "soft-cap factor or sink left out",
        ("model.attention.AttentionStatistics.lse", "if self.sinks is not None:", "if False:"),
        claim(test_attention.test_log_sum_exp_and_weights, calls(sinks=True)),
    ),
    mutant(
        "sign-missing-on-rejected-in-the-objective",
        "missing sign on rejected",
        ("direction.objective.weighted_losses", "(1, -1)", "(1, 1)"),
        PAIRS,
    ),
    _losses(
        "sign-missing-on-rejected-in-the-loss",
        "missing sign on rejected",
        ("masked_dpo_loss", "(kept_chosen - kept_rejected)", "(kept_chosen + kept_rejected)"),
        UNMASKED_DPO,
    ),
    _losses(
        "coefficient-from-the-masked-logit",
        "coefficient from the masked logit",
        [
            ("masked_dpo_loss", "-chosen_losses.sum(-1)", "-kept_chosen"),
            ("masked_dpo_loss", "-rejected_losses.sum(-1)", "-kept_rejected"),
        ],
        MASKED_DPO,
    ),
    mutant(
        "square-of-the-batch-gradient",
        "square of the batch gradient for the Fisher",
        [
            (
                "direction.moments.DiagonalMoments.add",
                "gradient.detach().to(wide(gradient.dtype)) ** 2",
                "gradient.detach()",
            ),
            (
                "direction.moments.DiagonalMoments.means",
                "total.div_(count)",
                "total.div_(count) ** 2",
            ),
        ],
        DIAGONAL_FISHER,
    ),
    mutant(
        "token-mean-scale-in-the-kronecker-factors",
        "token-mean scale in the Kronecker factors",
        (
            "direction.moments.KroneckerMoments.factors",
            'self.sums[f"S/{key}"] / count',
            'self.sums[f"S/{key}"] / max(int(self.sums[f"uses/{key}"]), 1)',
        ),
        KRONECKER_FISHER,
    ),
    mutant(
        "preconditioner-applied-twice",
        "preconditioner applied to the token side twice",
        (
            "direction.algebra.precondition",
            "m * p[name].to(m)",
            "m * p[name].to(m) ** 2",
        ),
        claim(test_direction.test_direction_algebra, test_direction.direction_cases()),
        claim(test_preconditioner.test_given_preconditioner, small()),
        claim(test_preconditioner.test_adam_preconditioner, small(), 2),
    ),
    mutant(
        "twice-called-module-overwritten",
        "tied or twice-called module overwritten instead of accumulated",
        (
            "model.capture.Recorder.on_linear",
            "self.linears.append(LinearUse(linear, x.detach()",
            "self.linears[:] = [u for u in self.linears if u.linear is not linear]; "
            "self.linears.append(LinearUse(linear, x.detach()",
        ),
        claim(test_estimators.test_path_is_the_column_sums, TWICE),
    ),
    mutant(
        "tied-module-overwritten",
        "tied or twice-called module overwritten instead of accumulated",
        (
            "model.capture.Recorder.on_linear",
            "self.linears.append(LinearUse(linear, x.detach()",
            "w = linear.weight; "
            "self.linears[:] = [u for u in self.linears if u.linear.weight is not w]; "
            "self.linears.append(LinearUse(linear, x.detach()",
        ),
        claim(test_estimators.test_path_is_the_column_sums, TIED),
    ),
    mutant(
        "stale-direction",
        "stale direction",
        (
            "model.fingerprint.numbers_of",
            "return tuple(digests)",
            "return ()",
        ),
        claim(test_direction.test_direction_is_never_stale, small(), "path"),
    ),
    mutant(
        "float32-in-the-contraction",
        "float32 or bf16 arithmetic inside",
        (
            "estimate.contraction.contract",
            "delta.to(dtype), projected)",
            "delta.float(), projected.float()).to(dtype)",
        ),
        claim(test_contraction.test_projected_is_the_loop, contractions()),
    ),
    mutant(
        "bfloat16-in-the-contraction",
        "float32 or bf16 arithmetic inside",
        (
            "estimate.contraction.contract",
            "delta.to(dtype), projected)",
            "delta.bfloat16(), projected.bfloat16()).to(dtype)",
        ),
        claim(test_contraction.test_projected_is_the_loop, contractions()),
    ),
    mutant(
        "float32-in-the-attention-weights",
        "float32 or bf16 arithmetic inside",
        ("model.attention.AttentionStatistics.weights", "block.logits -", "block.logits.float() -"),
        PROPAGATION,
    ),
    mutant(
        "bfloat16-in-the-self-only-backward",
        "float32 or bf16 arithmetic inside",
        (
            "model.attention.self_terms",
            "value.to(dtype).unsqueeze(2) - o, e)",
            "(value.unsqueeze(2) - o).bfloat16().to(dtype), e)",
        ),
        claim(test_attention.test_self_backward_is_the_diagonal, calls()),
    ),
    _masks(
        "ties-all-kept",
        "ties all kept",
        (
            "_top_of",
            "keep[candidates[order[:count]]] = True",
            "v = values.flatten()[candidates]; "
            "keep[candidates[v >= v[order[count - 1]]] if count else candidates] = True",
        ),
        selection("batch"),
    ),
    _masks(
        "ceil-in-floating-point",
        "ceil in floating point",
        (
            "keep_count",
            "whole if abs(exact - whole) <= exact / 2**52 else _ROUNDINGS[rounding](exact)",
            "_ROUNDINGS[rounding](ratio * count)",
        ),
        claim(
            test_selection.test_keep_count,
            st.tuples(st.integers(1, 100), st.just(100), st.sampled_from([100, 50, 20])),
            examples=100,
        ),
    ),
    _masks(
        "threshold-over-padding",
        "threshold over padding",
        [
            ("_top_of", "mask.flatten().nonzero().squeeze(-1)", "torch.arange(mask.numel())"),
            ("_top_of", "return keep.view_as(mask)", "return keep.view_as(mask) & mask"),
        ],
        selection("batch"),
    ),
)

LISTED = tuple(replace(one, listed=True) for one in _DEMANDED)


# --- and of the steps that the demand leaves out -------------------------------------------------


MOVED = st.just((True, True, True))
"""Tangents of hidden states, weight and bias alike."""


def _head(name: str, sentence: str, edit: Words, *claims: Claim) -> Mutant:
    """An error in the losses that are taken at the output head."""
    cases, known = test_head.head_cases(), st.booleans()
    whole = claim(test_head.test_head_losses, case=cases, known=known, examples=40)
    return mutant(name, sentence, edit, *(claims or (whole,)), room="model.head.")


def on_model(check: Callable[..., None], *arguments: str) -> Claim:
    """One run of a test of one architecture of transformers."""
    return claim(check, *arguments, examples=1, needs=("transformers",))


OWN = (
    _masks(
        "ceil-of-a-rounded-ratio",
        "ceil of a ratio that is no decimal, with the rounding of its float",
        ("keep_count", "whole if abs(exact - whole) <= exact / 2**52 else ", ""),
        claim(test_selection.test_keep_count, st.tuples(st.integers(1, 6), st.just(6), st.just(6))),
    ),
    mutant(
        "hops-keep-what-stays",
        "same-layer hops contain what stays at its position",
        ("fidelity.causal_parts._hop_errors_of", "e - own[i] if i in own else e", "e"),
        HOP,
    ),
    mutant(
        "gate-passes-dk-in-self-mode",
        "later queries reach earlier keys in the self-only backward",
        (
            "model.switch._Gate.backward",
            "*errors[: ctx.passing], *([None] * dropped)",
            "*errors[:2], *([None] * (len(errors) - 2))",
        ),
        claim(test_attention.test_self_backward_is_the_diagonal, calls()),
    ),
    mutant(
        "self-mode-without-dq",
        "the self-only backward stops at the query",
        (
            "model.switch._Gate.backward",
            "*errors[: ctx.passing], *([None] * dropped)",
            "*([None] * len(errors))",
        ),
        DIRECT,
    ),
    mutant(
        "scale-forgotten-in-dk",
        "attention scale c left out of the self-only dk",
        ("model.attention.self_terms", "pull * statistics.scale", "pull"),
        claim(test_attention.test_self_backward_is_the_diagonal, calls(scale=0.6)),
    ),
    mutant(
        "softmax-mean-forgotten-in-dk",
        "v_t instead of v_t - o_t in the self-only dk",
        ("model.attention.self_terms", ".unsqueeze(2) - o", ".unsqueeze(2) - 0 * o"),
        claim(test_attention.test_self_backward_is_the_diagonal, calls()),
    ),
    mutant(
        "diagonal-ignores-the-mask",
        "alpha_tt of a masked position",
        ("model.attention.AttentionStatistics.diagonal", "if self.mask is not None:", "if False:"),
        claim(test_attention.test_log_sum_exp_and_weights, calls(mask="additive")),
    ),
    mutant(
        "forward-mode-without-dv",
        "tangent of the values left out of the forward mode",
        ("model.attention.forward_mode_attention", "moved_weights + moved_values", "moved_weights"),
        JVP,
    ),
    mutant(
        "forward-mode-without-the-mean",
        "softmax tangent alpha s' without its mean",
        (
            "model.attention.forward_mode_attention",
            "weighted = weighted.addcmul_(alpha, mean, value=-1)",
            "pass",
        ),
        JVP,
    ),
    mutant(
        "forward-mode-without-the-sinks",
        "the sinks take no probability in forward mode",
        ("model.attention.AttentionStatistics.softmax", "if self.sinks is None:", "if True:"),
        claim(test_attention.test_forward_mode_is_the_jvp, calls(sinks=True), ALL),
    ),
    mutant(
        "forward-mode-without-the-sinks-tangent",
        "a direction that moves the sinks is not felt",
        ("model.attention.forward_mode_attention", "mean = mean + share * moved", "pass"),
        claim(test_attention.test_forward_mode_is_the_jvp, calls(sinks=True), ALL),
    ),
    mutant(
        "named-parameters-from-the-scored-layers-on",
        "the graph begins at the first scored layer, above parameters that their names choose",
        (
            "model.parameter_choice.ParameterChoice.scope",
            "lowest_use(adapter, named.values(), scope.first)",
            "scope.first",
        ),
        claim(
            test_label.test_label_over_named_parameters,
            setups(layers=st.just(3)),
            st.just("layers.[12].mlp_norm.*"),
        ),
    ),
    mutant(
        "named-parameters-of-the-scored-layers-alone",
        "what names choose is left out where linears are chosen too",
        (
            "model.scope.Scope.parameters",
            "return chosen | {name: p for name, p in self.named.items() "
            "if id(p) not in chosen_ids}",
            "return chosen or dict(self.named)",
        ),
        claim(
            test_label.test_label_over_named_parameters,
            small(),
            st.just("linears,*norm*,embedding.weight"),
        ),
    ),
    _forward_mode(
        "tied-weight-moved-in-one-place-only",
        "the dual forward moves one of the places of a tied weight",
        [
            ("_places", "return {", "seen: set = set(); return {"),
            (
                "_places",
                "if id(parameter) in duals",
                "if id(parameter) in duals "
                "and not (id(parameter) in seen or seen.add(id(parameter)))",
            ),
        ],
        claim(test_label.test_label_is_the_row_sums, TIED),
    ),
    _token_values(
        "unassigned-dropped",
        "columns of prompt positions are thrown away",
        (
            "assign_columns",
            "everything - direct.sum(-1) - causal.sum(-1)",
            "torch.zeros_like(everything)",
        ),
        PATH,
    ),
    _token_values(
        "lambda-on-the-adaptation",
        "lambda G + V instead of G + lambda V",
        ("combine", "g + stability_weight * v", "stability_weight * g + v"),
        claim(test_direction.test_lambda, small(), 0.5),
    ),
    mutant(
        "reference-sign",
        "W_ref - W instead of W - W_ref",
        (
            "direction.algebra.diagonal_drift",
            "weight.to(dtype) - reference.to(dtype)",
            "reference.to(dtype) - weight.to(dtype)",
        ),
        PATH,
    ),
    mutant(
        "fisher-forgotten-in-the-drift",
        "V = W - W_ref",
        ("direction.algebra.diagonal_drift", "fisher.to(dtype) * (weight", "(weight"),
        PATH,
    ),
    mutant(
        "observed-labels-for-sampled-labels",
        "the Fisher of the data's labels, not of the model's own",
        (
            "direction.fisher._Fit._add",
            "response = draw_tokens(",
            "response = (lambda *_: given.ids[given.predicted])(",
        ),
        TOKEN_FISHER,
    ),
    mutant(
        "token-mean-in-the-diagonal-fisher",
        "gradient of the mean, not of the summed, log-likelihood of a response",
        ("direction.fisher._Fit._add", "chosen.sum()", "chosen.mean()"),
        EXPECTED_FISHER,
    ),
    mutant(
        "mean-of-batch-means",
        "J_tgt as the mean of the batches' means, whatever their lengths",
        [
            (
                "direction.objective.stream_losses",
                "(loss * weights.to(loss)).sum()",
                "(loss * weights.to(loss)).sum() / tokens",
            ),
            ("direction.objective.stream_losses", "count += tokens", "count += 1"),
        ],
        GRADIENT_OF_BATCHES,
    ),
    mutant(
        "token-weights-ignored",
        "observed values of unweighted losses",
        (
            "scoring.recording.Recording.summed_loss",
            "losses if weights is None else losses * weights.to(losses)",
            "losses",
        ),
        claim(test_estimators.test_weighted_losses, small(train=("pprrr",)), st.integers(0, 9)),
    ),
    _preconditioner(
        "epsilon-inside-adams-root",
        "sqrt(v^ + eps) instead of sqrt(v^) + eps",
        [
            ("frozen_preconditioner", "** 0.5 + update.eps", "+ update.eps).sqrt("),
            ("_derivative", "1 / (root + update.eps)", "1 / (root.square() + update.eps).sqrt()"),
        ],
        claim(test_preconditioner.test_frozen_preconditioner, ADAM),
    ),
    _preconditioner(
        "no-bias-correction-in-adam",
        "raw moments for v^ and m^",
        (
            "adam_update",
            "one, two = 1 - beta1 ** (steps + 1), 1 - beta2 ** (steps + 1)",
            "one, two, steps = 1.0, 1.0, 0",
        ),
        claim(test_preconditioner.test_frozen_preconditioner, ADAM),
    ),
    _preconditioner(
        "full-preconditioner-without-its-second-term",
        "the denominator's own dependence on the token is forgotten",
        ("_derivative", "update.slope * scale + n * scale_slope", "update.slope * scale"),
        claim(test_preconditioner.test_full_preconditioner, ADAM),
    ),
    _preconditioner(
        "curvature-added-in-the-full-preconditioner",
        "the second term's sign",
        ("_derivative", "-root_slope * scale.square()", "root_slope * scale.square()"),
        claim(test_preconditioner.test_full_preconditioner, ADAM),
    ),
    _preconditioner(
        "gradient-left-out-of-the-second-moment",
        "v^ of the state before the step in the full form",
        (
            "_derivative",
            "second = update.rest + update.share * away.square()",
            "second = update.rest + 0.0 * away.square()",
        ),
        claim(test_preconditioner.test_full_preconditioner, ADAM),
    ),
    _preconditioner(
        "gradient-left-out-of-the-first-moment",
        "m^ of the state before the step in the full form",
        ("_derivative", "n = update.offset + update.slope * g", "n = update.offset + 0.0 * g"),
        claim(test_preconditioner.test_full_preconditioner, ADAM),
    ),
    mutant(
        "coupled-decay-left-out-of-the-gradient",
        "Adam's weight decay is not part of g",
        (
            "direction.optimizers.read_update",
            "g = g + decay * local.detach().to(g)",
            "g = g.clone()",
        ),
        COUPLED_DECAY,
    ),
    _preconditioner(
        "amsgrads-maximum-forgotten",
        "the running maximum does not hold the denominator",
        (
            "_derivative",
            "second = torch.maximum(second, update.largest)",
            "second = second.clone()",
        ),
        claim(
            test_preconditioner.test_full_is_the_derivative_of_a_real_step,
            test_preconditioner.cases(AMSGRAD),
        ),
    ),
    _token_values(
        "stability-counted-twice",
        "the total takes lambda V twice",
        ("combine", "g + stability_weight * v", "g + 2 * stability_weight * v"),
        SPLIT_IN_PARTS["both", "both"],
    ),
    mutant(
        "summed-direction-without-lambda",
        "the total alone is contracted with G + V",
        ("direction.algebra.SummedDirection.__getitem__", "self._weight * ", ""),
        TOTAL_ALONE,
    ),
    mutant(
        "summed-direction-without-stability",
        "the total alone is the adaptation",
        (
            "direction.algebra.SummedDirection.__getitem__",
            "+ self._weight * stability[name]",
            "",
        ),
        TOTAL_ALONE,
    ),
    _build(
        "stability-in-spite-of-the-objective",
        'objective="adaptation" builds and sums the retention term as well',
        ("DirectionInputs.retains", 'self.config.objective != "adaptation" and', ""),
        SPLIT_IN_PARTS["adaptation", "both"],
    ),
    mutant(
        "errors-beside-the-way-forgotten",
        "a linear that no other one's error passes is not asked for by itself",
        ("model.backward.stream_errors", "if i not in consumed]", "if False]"),
        claim(test_options.test_errors_streamed_are_the_errors_kept, DEEP, True),
    ),
    _estimators(
        "streamed-errors-of-another-mode",
        "errors that are contracted in the backward are the ordinary ones",
        ("_at", "stream_errors(recorder, loss, mode,", 'stream_errors(recorder, loss, "ordinary",'),
        DIRECT,
    ),
    _estimators(
        "direct-part-in-spite-of-the-part",
        'part="causal" sums the direct part as well',
        ("token_errors", 'if part == "causal":', "if False:"),
        SPLIT_IN_PARTS["both", "causal"],
    ),
    mutant(
        "step-weights-ignored",
        "the full preconditioner's gradient is always that of the mean loss",
        (
            "scoring.recording.Recording.step_loss",
            "weights, mask = self.step_weights,",
            "weights, mask = None,",
        ),
        FULL,
    ),
    _build(
        "gradient-missing-from-the-full-preconditioner",
        "the step is taken to see no gradient",
        ("DirectionInputs.at_step", " gradient,", " {n: 0 * g for n, g in gradient.items()},"),
        FULL,
    ),
    _build(
        "full-preconditioner-on-one-side",
        "P scales G but not V",
        ("_preconditioned", "scaled(stability)", "stability"),
        FULL_STEP,
    ),
    mutant(
        "old-validation-set",
        "set_validation leaves G as it was",
        [
            ("direction.cache.DirectionCache.set_validation", "self.invalidate()", "pass"),
            ("direction.cache.DirectionCache.set_retention", "self.invalidate()", "pass"),
            (
                "direction.age.age_of",
                "numbers_of(_tensors_in((inputs.validation, inputs.arguments.retention))),",
                "",
            ),
            ("direction.age.age_of", "_identity(inputs.arguments.retention),", ""),
        ],
        REPLACED,
    ),
    mutant(
        "pin-ignored",
        "a pinned direction follows the weights",
        (
            "direction.cache.DirectionCache._current_age",
            "if self.pinned is None else",
            "if True else",
        ),
        PINNED,
    ),
    mutant(
        "wrong-start-believed",
        "a dual forward starts at hidden states that lead to other losses",
        [
            ("model.partial_forward.start_at", "kwargs, start)", "kwargs, 1.5 * start)"),
            ("model.partial_forward.Start.gives", "return bool(", "return True or bool("),
        ],
        STARTED,
    ),
    _losses(
        "omega-not-detached",
        "the coefficient is differentiated too",
        ("dpo_coefficient", ".detach()", ""),
        UNMASKED_DPO,
    ),
    _losses(
        "reference-unmasked-in-the-masked-logit",
        "the mask acts on the policy's log-probabilities only",
        [
            (
                "masked_dpo_coefficient",
                "(keep_chosen * (chosen - reference_chosen)).sum(-1)",
                "(keep_chosen * chosen - reference_chosen).sum(-1)",
            ),
            (
                "masked_dpo_coefficient",
                "(keep_rejected * (rejected - reference_rejected)).sum(-1)",
                "(keep_rejected * rejected - reference_rejected).sum(-1)",
            ),
        ],
        MASKED_LOGIT_START,
    ),
    _losses(
        "masked-logit-of-all-tokens",
        "the ablation takes its coefficient from the unmasked logit",
        (
            "masked_dpo_coefficient",
            "(keep_chosen * (chosen - reference_chosen)).sum(-1)",
            "(chosen - reference_chosen).sum(-1)",
        ),
        MASKED_LOGIT,
    ),
    _losses(
        "mean-over-prompt-and-padding-too",
        "the masked loss divides by all positions",
        ("masked_sft_loss", "mask.sum() if", "torch.as_tensor(mask.numel()) if"),
        claim(test_losses.test_sft_loss, test_losses.loss_cases(), "response"),
    ),
    _losses(
        "losses-outside-keep-still-pushed",
        "the mask of kept tokens is ignored",
        ("masked_sft_loss", "(losses * weights).sum()", "(losses * (0 * weights + 1)).sum()"),
        claim(test_losses.test_sft_loss, test_losses.loss_cases(), "response"),
    ),
    _masks(
        "sequence-scope-ranks-the-batch",
        'scope="sequence" uses one threshold for the batch',
        ("select_top", 'if scope == "batch":', 'if scope in ("batch", "sequence"):'),
        selection("sequence"),
    ),
    _masks(
        "response-mean-over-padding",
        "a response's mean is taken over the width of the batch",
        ("response_values", "mask.sum(-1, keepdim=True).clamp(min=1)", "mask.shape[-1]"),
        claim(test_selection.test_response_values, test_selection.selection_cases(), 50),
    ),
    _masks(
        "response-mean-in-the-values-own-dtype",
        "a response's mean is summed in float32",
        ("response_values", ".double().sum(", ".sum("),
        claim(
            test_selection.test_means_of_responses_are_summed_wider_than_their_values, examples=1
        ),
    ),
    _preconditioner(
        "state-of-another-kind-in-a-block",
        "in blocks, the momentum is read where the second moment belongs",
        (
            "full_preconditioner",
            "zip(entries, rest, strict=True)",
            "zip(entries, reversed(rest), strict=True)",
        ),
        claim(test_preconditioner.test_full_preconditioner, ADAM),
    ),
    mutant(
        "jackknife-without-its-factor",
        "the standard error of a value lacks (h - 1) / h",
        ("values.standard_error", "((count - 1) / count)", "1.0"),
        ERRORS,
    ),
    mutant(
        "validation-batches-taken-for-equal",
        "the standard error takes every validation batch for one of as many tokens",
        (
            "scoring.estimator.Estimator.combined",
            "stacked.new_tensor(direction.shares)",
            "stacked.new_tensor([1 / len(parts)] * len(parts))",
        ),
        ERRORS,
    ),
    _build(
        "part-divided-by-its-own-tokens",
        "with standard errors, G is the sum of the batches' means",
        (
            "DirectionInputs._parts",
            'self._mean("validation", sums, whole)',
            'self._mean("validation", sums, count)',
        ),
        ERRORS,
    ),
    _build(
        "parts-without-the-preconditioner",
        "P scales G but not what each validation batch gives to it",
        ("_preconditioned", "scaled(part) for part", "part for part"),
        claim(test_confidence.test_standard_errors, SEVERAL_BATCHES, "direct", True),
    ),
    mutant(
        "parts-for-the-values-of-each-batch",
        "what a validation batch gives to the mean counts as the value against it alone",
        (
            "values.TokenValues.by_batch",
            "return parts / shares.to(parts)",
            "return parts + 0 * shares.to(parts)",
        ),
        claim(test_confidence.test_values_by_batch, SEVERAL_BATCHES, "direct"),
    ),
    mutant(
        "lower-bound-for-the-upper",
        "a token goes where it is not useful beyond doubt",
        (
            "select.confidence.select_harmless",
            "values.double() + quantile",
            "values.double() - quantile",
        ),
        HARMLESS,
    ),
    mutant(
        "one-degree-of-freedom-too-many",
        "the quantile of a token's bound has as many degrees of freedom as there are parts",
        ("select.confidence.select_harmless", "parts - 1)", "parts)"),
        HARMLESS,
    ),
    _masks(
        "last-of-equals-kept",
        "ties go to the higher index",
        ("_top_of", "descending=True, stable=True).indices", "stable=True).indices.flip(0)"),
        selection("batch"),
    ),
    mutant(
        "first-layers-for-the-last",
        "layers=K taken from the bottom of the model",
        ("model.layer_choice.layers_within", "range(depth - layers, depth)", "range(layers)"),
        claim(
            test_direction.test_preference_validation,
            small(layers=2, last=True, validations=BRANCHES),
            0.5,
            "tokens",
        ),
    ),
    _estimators(
        "hops-into-lower-layers",
        "same-layer hops and Value-Propagation go on into the layers below",
        (
            "pull_back",
            "if use.execution == attention.execution",
            "if use.execution <= attention.execution",
        ),
        claim(test_estimators.test_same_layer_hop_is_one_hop_within_the_layer, DEEP),
    ),
    _head(
        "target-left-in-the-heads-error",
        "the error below the head lacks the row of W that belongs to the target",
        ("_fold_rows", ".sub_(predictions.weight[predictions.targets])", ""),
    ),
    _head(
        "sums-not-shrunk-under-a-larger-maximum",
        "a later block of the vocabulary has a larger maximum, and the errors so far stay",
        ("_fold_rows", "errors.mul_(shrink.unsqueeze(-1))", "errors"),
    ),
    _head(
        "heads-weight-gradient-of-other-tokens",
        "the tokens whose loss has a weight get the weights of the first ones",
        ("_AtWeight.backward", "weights[used], lse[used]", "weights[: len(used)], lse[used]"),
    ),
    _head(
        "target-left-in-the-heads-weight-gradient",
        "the gradient of W is that of the log-sum-exp alone",
        ("_AtWeight.backward", "p[at, places] -= c[at, 0]", "pass"),
    ),
    _head(
        "known-logits-of-other-rows",
        "logits that are known are read in order, and not where each prediction stands",
        ("_Predictions.block", "[:, columns][self.rows]", "[: len(self.rows), columns]"),
    ),
    _head(
        "tangent-of-the-target-forgotten",
        "label values at the head are the mean tangent, without that of the token itself",
        ("_fold_dual", "mean / softmax.total - chosen_slope", "mean / softmax.total"),
        claim(test_head.test_head_tangents, test_head.head_cases(), MOVED),
    ),
    _head(
        "tangent-of-the-heads-weight-forgotten",
        "label values over all parameters lack what moves the head itself",
        ("_Tangents.block", "if self.weight is not None:", "if False:"),
        claim(test_head.test_head_tangents, test_head.head_cases(), MOVED),
    ),
    _head(
        "losses-of-other-targets",
        "losses asked for at the same positions are taken for those of other tokens",
        ("HeadUse._cached_for", " and torch.equal(cached.targets, targets)", ""),
        on_model(test_head.test_losses_asked_twice, "llama"),
    ),
    _head(
        "tangents-times-errors-of-other-rows",
        "label values of an observed forward pair tangents with the errors of other predictions",
        ("HeadUse.dual_losses", "(cached.errors * dh", "(cached.errors.roll(1, 0) * dh"),
        on_model(test_head.test_observed_label_values, "llama", "linears"),
    ),
    _head(
        "tangent-of-the-observed-heads-weight-forgotten",
        "label values over all parameters of an observed forward lack what moves the head itself",
        ("HeadUse.dual_losses", "if dw is not None or db is not None:", "if False:"),
        on_model(test_head.test_observed_label_values, "llama", "all"),
    ),
    _head(
        "errors-at-other-hidden-states",
        "errors of an observed forward are believed where the dual one has other hidden states",
        ("_same_up_to_rounding", "return bool(", "return True or bool("),
        on_model(test_head.test_tangents_at_other_hidden_states, "llama"),
    ),
    _response_losses(
        "capped-logits-taken-for-the-heads",
        "a model that caps its logits is taken for one that does not",
        ("_HeadInput.gives", "self.is_handed_on(logits) and self._equal(logits)", "True"),
        on_model(test_head.test_own_forward, "gemma2"),
    ),
    mutant(
        "logits-scaled-in-place-below-observe",
        "logits that were changed in place are the head's by identity",
        (
            "model.head.watched_head",
            "logits._version != version",
            "False",
        ),
        on_model(test_head.test_logits_changed_in_place, "llama"),
    ),
    _response_losses(
        "logits-scaled-in-place-elsewhere",
        "logits of all positions are believed for those of one",
        ("_HeadInput.is_handed_on", "logits is t and t._version == version", "True"),
        on_model(test_head.test_logits_changed_in_place, "llama"),
    ),
    mutant(
        "logits-of-another-forward",
        "label values take logits with the graph of another forward",
        (
            "scoring.observed._follows",
            "return scores.grad_fn is None",
            "return True",
        ),
        on_model(test_head.test_scores_of_another_forward, "llama"),
    ),
    mutant(
        "losses-of-another-forward",
        "label values take losses that are not the model's",
        (
            "scoring.recording.Recording.require_losses",
            "if not float((own",
            "if False and not float((own",
        ),
        on_model(test_head.test_scores_of_another_forward, "llama"),
    ),
    mutant(
        "products-of-autocast-taken-for-wide",
        "what autocast rounds is taken for as exact as the hidden states",
        (
            "model.capture.Recorder.on_first_block",
            "cast = torch.is_autocast_enabled(device)",
            "cast = False",
        ),
        on_model(test_head.test_losses_that_autocast_rounded, "llama"),
    ),
    mutant(
        "products-of-scored-linears-forgotten",
        "16 bits inside a block are taken for as exact as what it is given",
        (
            "model.capture.Recorder.products",
            "[use.s.dtype for use in self.linears]",
            "list[torch.dtype]()",
        ),
        _rounded("autocast in blocks", "linears", graph=True),
        claim(
            test_differences.test_an_observed_forward_in_16_bits_is_no_base,
            True,
            examples=1,
            needs=("transformers",),
        ),
    ),
    mutant(
        "weights-of-16-bits-overlooked",
        "frozen or narrow weights are taken for as exact as what runs between them",
        ("model.capture.Recorder.products", "self.weights.union(", "frozenset().union("),
        _rounded("linears", "linears", graph=True),
        _rounded("the head", "linears", graph=True),
    ),
    mutant(
        "losses-compared-by-the-last-forward",
        "their tolerance is of the forward that they are compared with",
        (
            "scoring.recording.Recording.require_losses",
            "*self.products",
            "*self.recorded[0].products",
        ),
        _rounded("autocast", "linears", graph=False),
    ),
    _forward_mode(
        "tangent-of-a-bias-forgotten",
        "a linear of which only the weight moves takes its bias for fixed",
        ("_linear", "if db is not None:", "if False:"),
        claim(
            test_label.test_label_over_named_parameters,
            small(bias=True),
            st.just("linears,*bias*"),
        ),
    ),
    _forward_mode(
        "label-values-not-scaled-back",
        "the dual forward runs along M / ||M||, and the norm is forgotten",
        ("label_values", "to(wide(derivatives.dtype)) * scale", "to(wide(derivatives.dtype))"),
        claim(test_label.test_label_is_linear_in_m, small(), 2.0**80),
    ),
    mutant(
        "pairs-counted-twice",
        "J_tgt of preference pairs divided by the branches instead of the pairs",
        ("direction.objective.weighted_losses", "len(omega) / 2", "len(omega)"),
        claim(test_direction.test_preference_validation, small(validations=BRANCHES), 0.5, "pairs"),
    ),
    mutant(
        "modes-not-put-back",
        "the user's model stays in evaluation mode",
        ("model.modes.evaluation_mode", "module.training = flag", "pass"),
        claim(test_estimators.test_model_is_left_alone, small(), "direct"),
    ),
    mutant(
        "self-only-mode-not-put-back",
        "training's own backward through a scored graph stays self-only",
        ("model.switch.BackwardSwitch.to", "self.mode = before", "pass"),
        claim(test_attention.test_the_mode_is_read_at_backward_time, calls()),
        claim(test_estimators.test_observed_equals_scored, small(), "direct"),
    ),
    mutant(
        "one-part-in-a-billion",
        "a contraction that is off by 1e-9 of itself",
        (
            "estimate.contraction.contract",
            'return torch.einsum("bto,bto->bt",',
            'return (1 + 1e-9) * torch.einsum("bto,bto->bt",',
        ),
        claim(test_contraction.test_projected_is_the_loop, contractions()),
        PATH,
        DIRECT,
    ),
)

MUTANTS = (*LISTED, *OWN, *TRAINERS)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
