"""Errors in gated delta nets: rule, convolution, propagation, and how transformers' are reached."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property import test_delta, test_hybrids
from tests.property.mutation import claim, mutant
from tests.property.test_delta import delta_cases
from tests.property.test_hybrids import FULL, LINEAR, HybridCase

LONG = delta_cases(
    t=st.sampled_from([5, 8]), d=st.integers(2, 4), silent=st.just(0), strong=st.just(False)
)
"""Several positions whose states last, in chunks of any size."""
SELF = claim(test_delta.test_the_self_backward_holds_the_incoming_state, LONG)
GROUPS = claim(
    test_delta.test_the_self_backward_holds_the_incoming_state,
    delta_cases(t=st.just(5), d=st.just(3), g=st.just(2), r=st.just(2), silent=st.just(0)),
)
ORDINARY = claim(test_delta.test_the_ordinary_backward_is_the_kernels, LONG)
MODES = claim(test_delta.test_one_forward_of_the_rule_serves_both_backwards, LONG)
TAPS = claim(
    test_delta.test_the_convolution_alone, delta_cases(t=st.just(5), w=st.sampled_from([2, 4]))
)
CARRIED = claim(
    test_delta.test_carried_errors_are_the_coefficients,
    LONG,
    st.sampled_from([(1, None), (1, 2), (0, 3)]),
    False,
)
MEAN = claim(
    test_delta.test_carried_errors_are_the_coefficients,
    delta_cases(t=st.just(5), r=st.just(3), silent=st.just(0)),
    (1, None),
    True,
)
PROPAGATED = claim(
    test_delta.test_propagation_goes_through_the_taps,
    delta_cases(t=st.just(8), w=st.sampled_from([2, 3]), silent=st.just(0), strong=st.just(False)),
    st.sampled_from([None, 2, 3]),
    "per_head",
)
ROW = ("pprprrr",)
VALUES = claim(
    test_hybrids.test_propagation_is_exact_for_the_value_rows,
    HybridCase(pattern=(LINEAR, FULL, LINEAR), layers=(2,), train=ROW, seed=1),
    examples=1,
)
PUT_BACK = claim(
    test_hybrids.test_overrides_of_delta_nets_leave_nothing_behind, "qwen3_5", examples=1
)
CACHED = claim(test_hybrids.test_a_state_to_begin_with_is_told, 3, examples=1)
_TERMS = "model.delta_rule.self_terms"
_READ = "model.delta_rule.DeltaStatistics.read_back"
_CARRIED = "model.delta_rule.DeltaStatistics.carried"
_CHUNKS = "model.delta_rule.DeltaStatistics.chunks"

MUTANTS = (
    mutant(
        "delta-own-write-left-out-of-the-read",
        "the value at a position gets nothing from the output there",
        (_TERMS, "dvalue = beta * s * e", "dvalue = 0 * e"),
        SELF,
    ),
    mutant(
        "delta-own-write-left-out-of-the-key",
        "the key gets the correction's part only",
        (_TERMS, "beta * (p * query - s * w)", "-beta * s * w"),
        SELF,
    ),
    mutant(
        "delta-correction-left-out-of-the-key",
        "the key's part in what the state predicts is forgotten",
        (_TERMS, "beta * (p * query - s * w)", "beta * p * query"),
        SELF,
    ),
    mutant(
        "delta-prediction-left-out-of-beta",
        "beta is taken to write the value, not what is new in it",
        (
            _TERMS,
            "(value * e).sum(-1, keepdim=True) - ",
            "(value * e).sum(-1, keepdim=True) - 0 * ",
        ),
        SELF,
    ),
    mutant(
        "delta-beta-gets-nothing",
        "the strength of the write has no error of its own",
        (_TERMS, "dbeta = s * p", "dbeta = 0 * s * p"),
        SELF,
    ),
    mutant(
        "delta-decay-gets-nothing",
        "gates are taken for constants",
        (_TERMS, "((query - beta * s * key) * w)", "(0 * query * w)"),
        SELF,
    ),
    mutant(
        "delta-decay-forgets-the-correction",
        "the decayed state is read, and not corrected",
        (_TERMS, "((query - beta * s * key) * w)", "(query * w)"),
        SELF,
    ),
    mutant(
        "delta-query-reads-the-incoming-state-only",
        "the query's error lacks what its own position wrote",
        (_TERMS, "dquery = w + beta * p * key", "dquery = w"),
        SELF,
    ),
    mutant(
        "delta-length-taken-as-a-constant",
        "the Jacobian of a unit vector is one over its length",
        (
            "model.delta_rule._through_length",
            "summed - unit * (unit * summed).sum(-1, keepdim=True)",
            "summed",
        ),
        SELF,
    ),
    mutant(
        "delta-scale-of-the-query-forgotten",
        "d^(-1/2) enters the forward and not the error",
        (_TERMS, "scale = statistics.width**-0.5", "scale = 1.0"),
        SELF,
    ),
    mutant(
        "delta-heads-in-the-wrong-order",
        "value head h reads key head h mod g",
        (
            "model.delta_rule.DeltaStatistics.heads_of",
            "tensor.repeat_interleave(self.heads // self.groups, dim=1)",
            "tensor.repeat(1, self.heads // self.groups, *[1] * (tensor.dim() - 2))",
        ),
        GROUPS,
    ),
    mutant(
        "delta-state-of-the-position-itself",
        "the incoming state holds what the position writes",
        (_READ, "chunks.ratio.tril(-1)", "chunks.ratio"),
        SELF,
    ),
    mutant(
        "delta-incoming-state-not-decayed",
        "the position's own decay is left off the state that it reads",
        (_CHUNKS, "self.cut(self.decay).cumsum(-1)", "self.cut(self.decay).cumsum(-1).roll(1, -1)"),
        SELF,
    ),
    mutant(
        "delta-state-lost-between-chunks",
        "each chunk begins with an empty state",
        (_READ, "state = state * chunks.whole_decay[:, :, n]", "state = 0 * state"),
        SELF,
    ),
    mutant(
        "delta-gates-shared-across-positions",
        "every position decays as the first one of its chunk",
        (
            _CHUNKS,
            "self.cut(self.decay).cumsum(-1)",
            "self.cut(self.decay)[..., :1].expand(-1, -1, -1, self.size).cumsum(-1)",
        ),
        SELF,
    ),
    mutant(
        "delta-projection-left-out-within-a-chunk",
        "what one write takes from another is forgotten",
        (_CHUNKS, "lower = (key @ key.mT) * ratio", "lower = 0 * (key @ key.mT) * ratio"),
        CARRIED,
    ),
    mutant(
        "delta-projection-left-out-between-chunks",
        "a state passes a chunk decayed, and not corrected",
        (_CARRIED, "unit - ends @ chunks.decayed_key", "unit"),
        CARRIED,
    ),
    mutant(
        "delta-read-of-a-chunk-not-corrected",
        "a query reads an earlier chunk's state as it was",
        (_CARRIED, " - inner @ chunks.decayed_key", ""),
        CARRIED,
    ),
    mutant(
        "delta-decay-product-off-by-one",
        "the coefficient from t to k contains the decay at t",
        (
            _CHUNKS,
            "ratio = between.masked_fill(later, -torch.inf).exp()",
            "ratio = between.masked_fill(later, -torch.inf).exp() "
            "* self.cut(self.decay).exp().unsqueeze(-2)",
        ),
        CARRIED,
    ),
    mutant(
        "delta-window-off-by-one",
        "a position more than the window",
        (
            "model.uses.DeltaUse.propagated",
            "None if window is None else window - j)",
            "None if window is None else window - j + 1)",
        ),
        PROPAGATED,
    ),
    mutant(
        "delta-window-from-the-value",
        "the window begins at the value that a tap reaches",
        (
            "model.uses.DeltaUse.propagated",
            "None if window is None else window - j)",
            "window)",
        ),
        PROPAGATED,
    ),
    mutant(
        "delta-own-position-propagated",
        "the read of the own write counts as direct and as causal",
        ("model.uses.DeltaUse.propagated", "(int(j == 0),", "(0,"),
        PROPAGATED,
    ),
    mutant(
        "delta-write-of-a-tap-left-out",
        "what a tap brings to a later position is not read there",
        ("model.uses.DeltaUse.propagated", "(int(j == 0),", "(1,"),
        PROPAGATED,
    ),
    mutant(
        "delta-propagation-by-the-last-tap",
        "values move by the rule, and not by the convolution",
        ("model.convolution.ConvolutionStatistics.gathered", "errors[:length]", "errors[:1]"),
        VALUES,
    ),
    mutant(
        "delta-taps-in-reverse",
        "the tap that lies j back is taken from the other end",
        ("model.convolution.ConvolutionStatistics.gathered", "-1 - back, None", "back, None"),
        TAPS,
    ),
    mutant(
        "delta-slope-of-the-wrong-position",
        "a tap's activation is that of the position it leaves",
        (
            "model.convolution.ConvolutionStatistics.gathered",
            "moved = self.taps[:, -1 - back, None] * slope",
            "moved = self.taps[:, -1 - back, None] * slope.roll(back, -1)",
        ),
        PROPAGATED,
    ),
    mutant(
        "delta-heads-averaged-where-they-are-not",
        "per-head coefficients become their mean",
        (_CARRIED, "if mean:", "if True:"),
        claim(
            test_delta.test_carried_errors_are_the_coefficients,
            delta_cases(t=st.just(5), r=st.just(2), silent=st.just(0)),
            (1, None),
            False,
        ),
    ),
    mutant(
        "delta-heads-not-averaged",
        "the paper's scalar coefficient is one a head",
        (_CARRIED, "if mean:", "if False:"),
        MEAN,
    ),
    mutant(
        "convolution-keeps-all-taps",
        "self mode sends errors to earlier positions by the convolution",
        (
            "model.convolution.ConvolutionStatistics.own",
            "self.taps[:, -1:] * self.slope() * error.to(self.dtype)",
            "self.gathered([error] * self.width)",
        ),
        TAPS,
    ),
    mutant(
        "convolution-keeps-its-first-tap",
        "the tap that lies farthest back is taken for the own one",
        ("model.convolution.ConvolutionStatistics.own", "self.taps[:, -1:]", "self.taps[:, :1]"),
        TAPS,
    ),
    mutant(
        "convolution-forgets-its-activation",
        "the slope of the activation is taken for one",
        ("model.convolution.ConvolutionStatistics.own", "* self.slope() *", "*"),
        TAPS,
    ),
    mutant(
        "convolution-forgets-its-bias",
        "the activation's slope is taken without the bias",
        ("model.convolution.ConvolutionStatistics.slope", "self.bias, groups", "None, groups"),
        claim(
            test_delta.test_the_convolution_alone,
            delta_cases(bias=st.just(True), activation=st.just(True)),
        ),
    ),
    mutant(
        "delta-rule-passes-everything",
        "self mode is the ordinary backward of the rule",
        [
            ("model.switch._Tap.backward", 'ctx.switch.mode != "self"', "True"),
            ("model.switch._Gate.backward", 'ctx.switch.mode != "self"', "True"),
        ],
        SELF,
    ),
    mutant(
        "delta-rule-passes-itself-always",
        "training through the same graph gets self-only gradients of the rule",
        ("model.switch._Tap.backward", 'ctx.switch.mode != "self"', "False"),
        ORDINARY,
        MODES,
    ),
    mutant(
        "delta-names-left-replaced",
        "a modeling file keeps our function when the last override is left",
        ("model.delta_dispatch._remove", "if not reroute.users:", "if False:"),
        PUT_BACK,
    ),
    mutant(
        "delta-override-takes-another-ones",
        "leaving a context ends every override of the module",
        [
            (
                "model.delta_dispatch._entering",
                "in _ACTIVE[module] if one is not entered)",
                "in _ACTIVE.get(module, ()) if False)",
            ),
            ("model.delta_dispatch._entering", "del _ACTIVE[module]", "_ACTIVE.pop(module, 0)"),
        ],
        PUT_BACK,
    ),
    mutant(
        "delta-layer-never-left",
        "an error inside a layer leaves its thread in it",
        ("model.delta_dispatch.rerouted", "always_call=True", "always_call=False"),
        PUT_BACK,
    ),
    mutant(
        "delta-state-of-a-cache-not-noticed",
        "a pass that goes on from a state is valued",
        ("model.delta_dispatch._step", "cached=initial_state is not None", "cached=False"),
        CACHED,
    ),
)
