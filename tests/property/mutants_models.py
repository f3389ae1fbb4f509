"""Errors in how models are met: adapters, fused kernels, mixtures of experts, gated delta nets."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.property import (
    test_adapters,
    test_attention,
    test_delta,
    test_experts,
    test_hybrids,
    test_kernels,
    test_plain_adapter,
)
from tests.property.mutants import calls
from tests.property.mutation import Claim, claim, row
from tests.property.setups import setups
from tests.property.test_delta import delta_cases
from tests.property.test_experts import MixtureCase
from tests.property.test_hybrids import FULL, LINEAR, HybridCase

# --- the adapter for transformers ----------------------------------------------------------------


def linears(name: str, layers: tuple[int, ...]) -> Claim:
    """Scored linears of some layers of one architecture."""
    check = test_adapters.test_scored_linears_are_the_linears_of_these_layers
    return claim(check, name, layers, examples=1)


def call(
    name: str, side: str = "none", implementation: str = "", dropout: float = 0.0, **options: float
) -> Claim:
    """The calls of one architecture, written out."""
    check = test_adapters.test_a_call_is_what_the_model_computes
    return claim(check, name, implementation, side, 3, dropout, options, examples=1)


def uncovered(name: str) -> Claim:
    """The report of one architecture."""
    return claim(test_adapters.test_what_is_not_scored_is_named, name, examples=1)


REGISTRY = claim(
    test_adapters.test_overrides_in_any_order, [0, 0, 1], None, set(), True, examples=1
)
DECODING = claim(test_adapters.test_decoding_is_the_forward, "gpt2", 4, examples=1)
MIXERS = claim(test_adapters.test_layers_without_softmax_are_named, "direct", examples=1)
LIMIT = claim(test_adapters.test_rows_beyond_the_limit_are_refused, "llama", examples=1)
LEAVES = claim(
    test_plain_adapter.test_an_override_that_stays_on_the_model_is_refused,
    estimator="alphatoken", setup=setups(transposed=False, layers=2), examples=1,
)  # fmt: skip


def defaults(**pins: object) -> Claim:
    """Default methods of an adapter, with a block that is used twice or a matrix left out."""
    check = test_plain_adapter.test_defaults_are_what_a_written_adapter_says
    return claim(check, setups(transposed=False, layers=2, **pins), frozenset({3, 4, 5, 6, 7}))


ADAPTERS = (
    row("adapter-counts-layers-from-the-top", linears("llama", (2,)),
        "the first layers' linears are scored for the last ones",
        ("model.transformers.TransformersAdapter.scored_linears",
         "for module in self._layers[layer].modules():",
         "for module in self._layers[-1 - layer].modules():")),
    row("adapter-scores-frozen-weights", linears("llama", (1, 2)),
        "linears that do not train are in scope",
        ("model.transformers.TransformersAdapter.scored_linears",
         "and weight.requires_grad", "and True")),
    row("conv1d-taken-as-a-linear", linears("gpt2", (0, 1)),
        "GPT-2's weights are read as (d_out, d_in)",
        ("model.transformers.TransformersAdapter.scored_linears",
         "transposed = isinstance(module, Conv1D)", "transposed = False")),
    row("experts-missing-from-the-report", uncovered("mixtral"),
        "3-D expert tensors are left out, and nothing says so",
        ("model.transformers.TransformersAdapter.uncovered",
         "_dimensions(parameter) >= 2", "_dimensions(parameter) == 2")),
    row("experts-named-for-something-else", uncovered("mixtral"),
        "the report does not say that a weight is an expert's",
        ("model.transformers._reason", "_dimensions(parameter) >= 3", "False")),
    row("attention-module-not-watched", call("llama"),
        "no module of a block is asked for its attention calls",
        ("model.transformers.TransformersAdapter.attention_modules",
         "if any(True for _ in m.children())", "if not any(True for _ in m.children())")),
    row("linear-attention-taken-for-softmax", MIXERS,
        "a layer without a self-only rule passes as one with it",
        ("model.transformers.TransformersAdapter.other_mixers",
         "if kind not in _SOFTMAX_LAYERS:", "if False:")),
    row("default-linears-hold-frozen-weights", defaults(),
        "an adapter's default puts linears that do not train in scope",
        ("model.protocol.DecoderAdapter.scored_linears",
         "and module.weight.requires_grad", "and True")),
    row("default-puts-a-repeated-block-at-its-last-place", defaults(repeated_block=True),
        "an adapter's default gives the linears of a block that is used twice the later layer",
        ("model.protocol.DecoderAdapter.scored_linears",
         "layer_of.setdefault(module, layer)", "layer_of[module] = layer")),
    row("default-report-is-empty", defaults(loose_parameter=True),
        "an adapter's default leaves a trainable matrix out, and nothing says so",
        ("model.protocol.DecoderAdapter.uncovered",
         "id(parameter) in inside - covered", "id(parameter) in covered - inside")),
    row("override-left-on-the-model", LEAVES,
        "an adapter's override stays, and later gradients go through it without a word",
        ("model.protocol.attention_overridden", "over = True", "over = None")),
    row("attention-scale-not-passed-on", call("gemma3", query_pre_attn_scalar=9),
        "the call's scale is 1 / sqrt(d) whatever the model says",
        ("model.dispatch._translated", "float(scale) if scale is not None else query", "query")),
    row("soft-cap-not-passed-on", call("gemma2", implementation="eager"),
        "logits are recomputed without the cap",
        ("model.dispatch._translated", 'softcap=named.get("softcap")', "softcap=None")),
    row("sinks-not-passed-on", call("gpt_oss", implementation="eager"),
        "attention weights are recomputed without the sinks",
        ("model.dispatch._translated", 'sinks=named.get("s_aux")', "sinks=None")),
    row("mask-not-passed-on", call("llama", "left"),
        "padding and windows are unknown to the recomputed weights",
        ("model.dispatch._translated", "mask=mask,", "mask=None,")),
    row("dropout-not-passed-on", call("llama", dropout=0.5),
        "a training pass with attention dropout looks like one without",
        ("model.dispatch._translated",
         'dropout=float(named.get("dropout") or 0.0)', "dropout=0.0")),
    row("grouped-heads-in-another-order-in-the-call", call("llama"),
        "key/value heads reach the estimators in another order than the kernel's",
        ("model.dispatch._through",
         "return override(replace(call, query=query, key=key, value=value), native)",
         "seen = replace(call, query=query, key=key.flip(1), value=value.flip(1))\n        "
         "return override(seen, lambda q, k, v: native(q, k.flip(1), v.flip(1)))")),
    row("override-not-taken-back", REGISTRY,
        "the registry keeps the dispatch when the last context is left",
        ("model.dispatch.dispatched", "            _remove_idle(name, kind)", "            pass")),
    row("override-of-every-model", REGISTRY,
        "another model's attention runs through the override too",
        ("model.dispatch.Dispatch.__call__", "self.active.get(module, ())",
         "self.active.get(module, next(iter(self.active.values()), ()))")),
    row("exit-takes-all-overrides", REGISTRY,
        "leaving one context takes the other overrides of its modules as well",
        ("model.dispatch.dispatched",
         "for one in dispatch.active[module] if one is not entered", "for one in ()"),
        ("model.dispatch.dispatched",
         "del dispatch.active[module]", "dispatch.active.pop(module, None)")),
    row("no-limit-of-positions", LIMIT,
        "rows beyond the model's positions are valued",
        ("model.transformers.TransformersAdapter.max_positions",
         "return position_limit(self.config)", "return None")),
    row("cached-decoding-one-position-late", DECODING,
        "positions of generated tokens start at one",
        ("model.transformers.TransformersAdapter.next_token_logits",
         ".cumsum(-1) - 1)", ".cumsum(-1))")),
    row("labels-reach-the-model", DECODING,
        "what shapes a trainer's loss is passed on to a scoring forward",
        ("model.transformers.TransformersAdapter.arguments",
         "if k not in _LOSS_KEYWORDS", "if True")),
)  # fmt: skip


# --- fused attention kernels ---------------------------------------------------------------------


def weights(mask: str) -> Claim:
    """Weights and log-sum-exps of calls whose kernel is told ``mask``."""
    cases = calls(mask=mask, b=2, chunk=2)
    return claim(test_attention.test_log_sum_exp_and_weights, cases, examples=60)


def told(mask: str) -> Claim:
    """Weights that the oracle makes of such calls."""
    cases = calls(mask=mask, b=2)
    return claim(test_attention.test_the_oracle_attends_as_the_call_says, cases, examples=60)


def understood(name: str, how: str) -> Claim:
    """A call of one architecture behind transformers' flash wrapper."""
    check = test_kernels.test_a_flash_call_is_what_the_model_computes
    return claim(check, name, how, 1, examples=1)


KERNELS = (
    row("documents-see-each-other", weights("documents"),
        "documents that a kernel keeps apart see each other in the recomputed weights",
        ("model.attention.CausalStructure.block", "(own == other)", "(own == own)")),
    row("padding-is-a-document", weights("holes"),
        "padding attends to padding, where the kernel leaves it out",
        ("model.attention.CausalStructure.block", "(own >= 0)", "(own >= -1)")),
    row("kernel-window-one-wider", weights("sliding"),
        "a window of w positions reaches w positions back beside the query's own",
        ("model.attention.CausalStructure.block", "k - t < self.window", "k - t <= self.window")),
    row("document-window-one-wider", weights("sliding documents"),
        "a window reaches one token further back, where documents are given",
        ("model.attention.CausalStructure.block",
         "places[:, None, columns] < self.window", "places[:, None, columns] <= self.window")),
    row("window-counts-padding", weights("sliding holes"),
        "padding inside a document counts in the distance that a window allows",
        ("model.attention.CausalStructure._tokens_before",
         "(self.documents >= 0).long().cumsum(-1)", "(self.documents >= -1).long().cumsum(-1)")),
    row("padding-ends-a-document", weights("holes"),
        "keys before padding inside their own document are left out of a block",
        ("model.attention.CausalStructure._document_begins",
         "torch.where(token, places, -1)", "torch.where(token, places, places)")),
    row("first-key-one-late", weights("sliding"),
        "the first key of a block with a window is left out",
        ("model.attention.CausalStructure.first_key",
         "rows.start - self.window + 1", "rows.start - self.window + 2")),
    row("flash-padding-attended", understood("llama", "mask"),
        "the padding mask of a flash kernel is not read",
        ("model.dispatch._documents", "return mask.long() - 1", "return mask.long() * 0")),
    row("flash-bounds-one-late", understood("llama", "bounds"),
        "the first token of a document belongs to the document before it",
        ("model.batch.documents_in_rows", "right=True", "right=False")),
    row("flash-positions-not-read", understood("llama", "positions"),
        "documents that only their positions tell apart see each other",
        ("model.dispatch._documents", "if bool((steps == positions).all()):", "if True:")),
    row("flash-window-not-read", understood("mistral", "bounds"),
        "the sliding window of a flash kernel is left out",
        ("model.dispatch._translated", 'window = named.get("sliding_window")', "window = None")),
    row("oracle-window-not-read", told("sliding"),
        "the oracle attends to every earlier token, whatever window the call says",
        ("oracle.readouts._attended", "if call.window is not None:", "if False:")),
    row("oracle-window-one-wider", told("sliding documents"),
        "a window of the oracle reaches one token further back",
        ("oracle.readouts._attended", "< call.window", "<= call.window")),
    row("oracle-documents-not-read", told("documents"),
        "the oracle lets the documents of a call see each other",
        ("oracle.readouts._attended", "one if call.documents is None else call.documents", "one")),
    row("oracle-padding-attended", told("holes"),
        "padding of a call attends to padding in the oracle",
        ("oracle.readouts._attended", "(of >= 0)", "(of >= -1)")),
)  # fmt: skip


# --- mixtures of experts -------------------------------------------------------------------------


CASE = MixtureCase("mixtral", ("..pprr",), ("prr",), experts=4, chosen=2, seed=21)
SHARED = MixtureCase("qwen3_next", ("..pprr", "prrr.."), ("prr",), (1,), seed=23)
BIASED = MixtureCase("gpt_oss", ("pprr..",), ("prr",), experts=3, chosen=2, seed=22)


def values(case: MixtureCase, estimator: str = "direct") -> Claim:
    """Values over linears and experts, by the oracle."""
    return claim(test_experts.test_values_over_linears_and_experts, case, estimator, examples=1)


LOOP = claim(test_experts.test_contraction_is_the_loop, test_experts.rows_cases(), examples=40)
OUTPUT = claim(test_experts.test_rows_make_the_models_own_output, CASE, examples=1)
EXPLAINED = claim(test_experts.test_weights_are_explained, BIASED, examples=1)
SERVES = claim(test_experts.test_one_forward_serves_both, CASE, examples=1)


EXPERTS = (
    row("expert-of-the-row-beside", LOOP,
        "a row of an expert meets the direction of the expert before it",
        ("direction.contraction.contract_experts", "@ m[expert]", "@ m[expert - 1]")),
    row("first-of-the-chosen-experts", LOOP,
        "of the experts that a token was sent to, only the first one is valued",
        ("direction.contraction.contract_experts",
         "view(experts.shape).sum(-1)", "view(experts.shape)[..., 0]")),
    row("last-of-the-chosen-experts", LOOP,
        "the sum over a position's uses of experts is replaced by the last of them",
        ("direction.contraction.contract_experts",
         "view(experts.shape).sum(-1)", "view(experts.shape)[..., -1]")),
    row("rows-of-experts-one-position-late", LOOP,
        "values of routed rows fall to the position after theirs",
        ("direction.contraction.contract_experts",
         "view(experts.shape).sum(-1)", "view(experts.shape).sum(-1).roll(1, -1)")),
    row("rows-of-padding-for-rows-of-tokens", values(CASE),
        "rows are put back into a batch that is read from its other end, padding first",
        ("model.capture.Recorder.on_experts",
         "x.detach().unflatten(0, shape)", "x.detach().flip(0).unflatten(0, shape)")),
    row("router-weight-left-out", OUTPUT,
        "experts are added without the router's weights, so no error has them",
        ("model.experts.routed_experts",
         "(s * weights.unsqueeze(-1))", "(s + 0 * weights.unsqueeze(-1))")),
    row("router-weight-twice", OUTPUT,
        "errors at the experts have the router's weight twice",
        ("model.experts.routed_experts", "weights.unsqueeze(-1)", "weights.unsqueeze(-1) ** 2")),
    row("router-cut-off", OUTPUT,
        "no error reaches the layers below, or the router, through its weights",
        ("model.experts.routed_experts",
         "weights.unsqueeze(-1)", "weights.detach().unsqueeze(-1)")),
    row("gate-for-up", OUTPUT,
        "the halves of a gate's input are taken for one another",
        ("model.experts.routed_experts",
         "act(s.flatten(0, 1))", "act(s.flatten(0, 1).roll(s.shape[-1] // 2, -1))")),
    row("rows-left-in-the-order-of-experts", OUTPUT,
        "products come back in the order of the experts",
        ("model.experts._products", "torch.cat(order).argsort()", "torch.cat(order)")),
    row("matrix-of-the-expert-before", OUTPUT,
        "each row is multiplied with the matrix of the expert before its own",
        ("model.experts._products", "matrices[expert]", "matrices[expert - 1]")),
    row("rows-that-nothing-follows-from", values(CASE),
        "errors are asked for at a view of the rows that the model does not go on with",
        ("model.capture.Recorder.on_experts", "return rows.view(s.shape)", "return s")),
    row("rows-of-a-shared-expert-position-by-position", values(SHARED),
        "a shared expert's rows are taken to go through the positions first, and then the rows",
        ("model.capture.Recorder.on_linear",
         "reshape(*shape, -1)", "reshape(*shape[::-1], -1).transpose(0, 1)"),
        ("model.capture.Recorder.on_linear",
         "s.view(*shape, -1)", "s.view(*shape[::-1], -1).transpose(0, 1)"),
        ("model.capture.Recorder.on_linear",
         "rows.view(s.shape)", "rows.transpose(0, 1).reshape(s.shape)")),
    row("shared-expert-whose-view-nothing-follows-from", values(SHARED),
        "errors of a shared expert are asked for at a view that the model does not go on with",
        ("model.capture.Recorder.on_linear", "return rows.view(s.shape)", "return None")),
    row("gradient-of-the-expert-before", EXPLAINED,
        "the weight gradient of an expert is that of the one before it",
        ("direction.contraction.expert_outer_sums", "sums[expert] =", "sums[expert - 1] =")),
    row("router-not-named", values(CASE),
        "where experts are captured, the report leaves their router out",
        ("model.scope._scope_of_linears", "if name not in captured}", "if name not in uncovered}")),
    row("experts-of-every-model", SERVES,
        "another model's experts run through the rows too",
        ("model.dispatch.ExpertsDispatch.__call__", "self.active.get(module, ())",
         "self.active.get(module, next(iter(self.active.values())))")),
)  # fmt: skip


# --- gated delta nets ----------------------------------------------------------------------------


LONG = delta_cases(
    t=st.sampled_from([5, 8]), d=st.integers(2, 4), silent=st.just(0), strong=st.just(False)
)
"""Several positions whose states last, in chunks of any size."""
SELF = claim(test_delta.test_the_self_backward_holds_the_incoming_state, LONG)
GROUPS = claim(
    test_delta.test_the_self_backward_holds_the_incoming_state,
    delta_cases(t=st.just(5), d=st.just(3), g=st.just(2), r=st.just(2), silent=st.just(0)),
)
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


DELTA_NETS = (
    row("delta-own-write-left-out-of-the-read", SELF,
        "the value at a position gets nothing from the output there",
        ("model.delta_rule.self_terms", "dvalue = beta * s * e", "dvalue = 0 * e")),
    row("delta-own-write-left-out-of-the-key", SELF,
        "the key gets the correction's part only",
        ("model.delta_rule.self_terms", "beta * (p * query - s * w)", "-beta * s * w")),
    row("delta-correction-left-out-of-the-key", SELF,
        "the key's part in what the state predicts is forgotten",
        ("model.delta_rule.self_terms", "beta * (p * query - s * w)", "beta * p * query")),
    row("delta-prediction-left-out-of-beta", SELF,
        "beta is taken to write the value, not what is new in it",
        ("model.delta_rule.self_terms",
         "(value * e).sum(-1, keepdim=True) - ", "(value * e).sum(-1, keepdim=True) - 0 * ")),
    row("delta-beta-gets-nothing", SELF,
        "the strength of the write has no error of its own",
        ("model.delta_rule.self_terms", "dbeta = s * p", "dbeta = 0 * s * p")),
    row("delta-decay-gets-nothing", SELF,
        "gates are taken for constants",
        ("model.delta_rule.self_terms", "((query - beta * s * key) * w)", "(0 * query * w)")),
    row("delta-decay-forgets-the-correction", SELF,
        "the decayed state is read, and not corrected",
        ("model.delta_rule.self_terms", "((query - beta * s * key) * w)", "(query * w)")),
    row("delta-query-reads-the-incoming-state-only", SELF,
        "the query's error lacks what its own position wrote",
        ("model.delta_rule.self_terms", "dquery = w + beta * p * key", "dquery = w")),
    row("delta-length-taken-as-a-constant", SELF,
        "the Jacobian of a unit vector is one over its length",
        ("model.delta_rule._through_length",
         "summed - unit * (unit * summed).sum(-1, keepdim=True)", "summed")),
    row("delta-scale-of-the-query-forgotten", SELF,
        "d^(-1/2) enters the forward and not the error",
        ("model.delta_rule.self_terms", "scale = statistics.width**-0.5", "scale = 1.0")),
    row("delta-heads-in-the-wrong-order", GROUPS,
        "value head h reads key head h mod g",
        ("model.delta_rule.DeltaStatistics.heads_of",
         "tensor.repeat_interleave(self.heads // self.groups, dim=1)",
         "tensor.repeat(1, self.heads // self.groups, *[1] * (tensor.dim() - 2))")),
    row("delta-state-of-the-position-itself", SELF,
        "the incoming state holds what the position writes",
        ("model.delta_rule.DeltaStatistics.read_back", "chunks.ratio.tril(-1)", "chunks.ratio")),
    row("delta-incoming-state-not-decayed", SELF,
        "the position's own decay is left off the state that it reads",
        ("model.delta_rule.DeltaStatistics.chunks",
         "self.cut(self.decay).cumsum(-1)", "self.cut(self.decay).cumsum(-1).roll(1, -1)")),
    row("delta-state-lost-between-chunks", SELF,
        "each chunk begins with an empty state",
        ("model.delta_rule.DeltaStatistics.read_back",
         "state = state * chunks.whole_decay[:, :, n]", "state = 0 * state")),
    row("delta-gates-shared-across-positions", SELF,
        "every position decays as the first one of its chunk",
        ("model.delta_rule.DeltaStatistics.chunks", "self.cut(self.decay).cumsum(-1)",
         "self.cut(self.decay)[..., :1].expand(-1, -1, -1, self.size).cumsum(-1)")),
    row("delta-projection-left-out-within-a-chunk", CARRIED,
        "what one write takes from another is forgotten",
        ("model.delta_rule.DeltaStatistics.chunks",
         "lower = (key @ key.mT) * ratio", "lower = 0 * (key @ key.mT) * ratio")),
    row("delta-projection-left-out-between-chunks", CARRIED,
        "a state passes a chunk decayed, and not corrected",
        ("model.delta_rule.DeltaStatistics.carried", "unit - ends @ chunks.decayed_key", "unit")),
    row("delta-read-of-a-chunk-not-corrected", CARRIED,
        "a query reads an earlier chunk's state as it was",
        ("model.delta_rule.DeltaStatistics.carried", " - inner @ chunks.decayed_key", "")),
    row("delta-decay-product-off-by-one", CARRIED,
        "the coefficient from t to k contains the decay at t",
        ("model.delta_rule.DeltaStatistics.chunks",
         "ratio = between.masked_fill(later, -torch.inf).exp()",
         "ratio = between.masked_fill(later, -torch.inf).exp() * "
         "self.cut(self.decay).exp().unsqueeze(-2)")),
    row("delta-window-off-by-one", PROPAGATED,
        "a position more than the window",
        ("model.delta_rule.DeltaUse.propagated",
         "None if window is None else window - j)", "None if window is None else window - j + 1)")),
    row("delta-window-from-the-value", PROPAGATED,
        "the window begins at the value that a tap reaches",
        ("model.delta_rule.DeltaUse.propagated",
         "None if window is None else window - j)", "window)")),
    row("delta-own-position-propagated", PROPAGATED,
        "the read of the own write counts as direct and as causal",
        ("model.delta_rule.DeltaUse.propagated", "(int(j == 0),", "(0,")),
    row("delta-write-of-a-tap-left-out", PROPAGATED,
        "what a tap brings to a later position is not read there",
        ("model.delta_rule.DeltaUse.propagated", "(int(j == 0),", "(1,")),
    row("delta-propagation-by-the-last-tap", VALUES,
        "values move by the rule, and not by the convolution",
        ("model.delta_rule.ConvolutionStatistics.gathered", "errors[:length]", "errors[:1]")),
    row("delta-taps-in-reverse", TAPS,
        "the tap that lies j back is taken from the other end",
        ("model.delta_rule.ConvolutionStatistics.gathered", "-1 - back, None", "back, None")),
    row("delta-slope-of-the-wrong-position", PROPAGATED,
        "a tap's activation is that of the position it leaves",
        ("model.delta_rule.ConvolutionStatistics.gathered",
         "moved = self.taps[:, -1 - back, None] * slope",
         "moved = self.taps[:, -1 - back, None] * slope.roll(back, -1)")),
    row("delta-heads-averaged-where-they-are-not",
        claim(test_delta.test_carried_errors_are_the_coefficients,
            delta_cases(t=st.just(5), r=st.just(2), silent=st.just(0)), (1, None), False),
        "per-head coefficients become their mean",
        ("model.delta_rule.DeltaStatistics.carried", "if mean:", "if True:")),
    row("delta-heads-not-averaged", MEAN,
        "the paper's scalar coefficient is one a head",
        ("model.delta_rule.DeltaStatistics.carried", "if mean:", "if False:")),
    row("convolution-keeps-all-taps", TAPS,
        "self mode sends errors to earlier positions by the convolution",
        ("model.delta_rule.ConvolutionStatistics.own",
         "self.taps[:, -1:] * self.slope() * error.to(self.dtype)",
         "self.gathered([error] * self.width)")),
    row("convolution-keeps-its-first-tap", TAPS,
        "the tap that lies farthest back is taken for the own one",
        ("model.delta_rule.ConvolutionStatistics.own", "self.taps[:, -1:]", "self.taps[:, :1]")),
    row("convolution-forgets-its-activation", TAPS,
        "the slope of the activation is taken for one",
        ("model.delta_rule.ConvolutionStatistics.own", "* self.slope() *", "*")),
    row("convolution-forgets-its-bias",
        claim(test_delta.test_the_convolution_alone,
            delta_cases(bias=st.just(True), activation=st.just(True))),
        "the activation's slope is taken without the bias",
        ("model.delta_rule.ConvolutionStatistics.slope", "self.bias, groups", "None, groups")),
    row("delta-rule-passes-everything", SELF,
        "self mode is the ordinary backward of the rule",
        ("model.switch._Tap.backward", 'ctx.switch.mode != "self"', "True"),
        ("model.switch._Gate.backward", 'ctx.switch.mode != "self"', "True")),
    row("delta-rule-passes-itself-always", MODES,
        "training through the same graph gets self-only gradients of the rule",
        ("model.switch._Tap.backward", 'ctx.switch.mode != "self"', "False")),
    row("delta-names-left-replaced", PUT_BACK,
        "a modeling file keeps our function when the last override is left",
        ("model.delta_dispatch._remove", "if not reroute.users:", "if False:")),
    row("delta-override-takes-another-ones", PUT_BACK,
        "leaving a context ends every override of the module",
        ("model.delta_dispatch._entering",
         "in _ACTIVE[module] if one is not entered)", "in _ACTIVE.get(module, ()) if False)"),
        ("model.delta_dispatch._entering", "del _ACTIVE[module]", "_ACTIVE.pop(module, 0)")),
    row("delta-layer-never-left", PUT_BACK,
        "an error inside a layer leaves its thread in it",
        ("model.delta_dispatch.rerouted", "always_call=True", "always_call=False")),
    row("delta-state-of-a-cache-not-noticed", CACHED,
        "a pass that goes on from a state is valued",
        ("model.delta_dispatch._step", "cached=cached", "cached=False")),
)  # fmt: skip
