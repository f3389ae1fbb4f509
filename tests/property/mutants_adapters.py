"""Errors in what the transformers adapter tells the core of a model."""

from __future__ import annotations

import functools

from tests.property import test_adapters
from tests.property.mutation import Claim, claim, mutant

_adapter = functools.partial(mutant, room="model.")


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


REGISTRY = claim(test_adapters.test_overrides_leave_nothing_behind, "llama", 5, examples=1)
DECODING = claim(test_adapters.test_decoding_is_the_forward, "gpt2", 4, examples=1)
MIXERS = claim(test_adapters.test_layers_without_softmax_are_named, "direct", examples=1)
LIMIT = claim(test_adapters.test_rows_beyond_the_limit_are_refused, "llama", examples=1)

MUTANTS = (
    _adapter(
        "adapter-counts-layers-from-the-top",
        "the first layers' linears are scored for the last ones",
        (
            "transformers.TransformersAdapter.scored_linears",
            "for module in self._layers[layer].modules():",
            "for module in self._layers[-1 - layer].modules():",
        ),
        linears("llama", (2,)),
    ),
    _adapter(
        "adapter-scores-frozen-weights",
        "linears that do not train are in scope",
        ("transformers.TransformersAdapter.scored_linears", "and weight.requires_grad", "and True"),
        linears("llama", (1, 2)),
    ),
    _adapter(
        "conv1d-taken-as-a-linear",
        "GPT-2's weights are read as (d_out, d_in)",
        (
            "transformers.TransformersAdapter.scored_linears",
            "transposed = isinstance(module, Conv1D)",
            "transposed = False",
        ),
        linears("gpt2", (0, 1)),
    ),
    _adapter(
        "experts-missing-from-the-report",
        "3-D expert tensors are left out, and nothing says so",
        (
            "transformers.TransformersAdapter.uncovered",
            "_dimensions(parameter) >= 2",
            "_dimensions(parameter) == 2",
        ),
        uncovered("mixtral"),
    ),
    _adapter(
        "experts-named-for-something-else",
        "the report does not say that a weight is an expert's",
        ("transformers._reason", "_dimensions(parameter) >= 3", "False"),
        uncovered("mixtral"),
    ),
    _adapter(
        "attention-module-not-watched",
        "no module of a block is asked for its attention calls",
        (
            "transformers.TransformersAdapter.attention_modules",
            "if any(True for _ in m.children())",
            "if not any(True for _ in m.children())",
        ),
        call("llama"),
    ),
    _adapter(
        "linear-attention-taken-for-softmax",
        "a layer without a self-only rule passes as one with it",
        (
            "transformers.TransformersAdapter.other_mixers",
            "if kind not in _SOFTMAX_LAYERS:",
            "if False:",
        ),
        MIXERS,
    ),
    _adapter(
        "attention-scale-not-passed-on",
        "the call's scale is 1 / sqrt(d) whatever the model says",
        ("dispatch._translated", "float(scale) if scale is not None else query", "query"),
        call("gemma3", query_pre_attn_scalar=9),
    ),
    _adapter(
        "soft-cap-not-passed-on",
        "logits are recomputed without the cap",
        ("dispatch._translated", 'softcap=named.get("softcap")', "softcap=None"),
        call("gemma2", implementation="eager"),
    ),
    _adapter(
        "sinks-not-passed-on",
        "attention weights are recomputed without the sinks",
        ("dispatch._translated", 'sinks=named.get("s_aux")', "sinks=None"),
        call("gpt_oss", implementation="eager"),
    ),
    _adapter(
        "mask-not-passed-on",
        "padding and windows are unknown to the recomputed weights",
        ("dispatch._translated", "mask=mask,", "mask=None,"),
        call("llama", "left"),
    ),
    _adapter(
        "dropout-not-passed-on",
        "a training pass with attention dropout looks like one without",
        ("dispatch._translated", 'dropout=float(named.get("dropout") or 0.0)', "dropout=0.0"),
        call("llama", dropout=0.5),
    ),
    _adapter(
        "grouped-heads-in-another-order-in-the-call",
        "key/value heads reach the estimators in another order than the kernel's",
        (
            "dispatch._through",
            "return override(replace(call, query=query, key=key, value=value), native)",
            "seen = replace(call, query=query, key=key.flip(1), value=value.flip(1))\n"
            "        return override(seen, lambda q, k, v: native(q, k.flip(1), v.flip(1)))",
        ),
        call("llama"),
    ),
    _adapter(
        "override-not-taken-back",
        "the registry keeps the dispatch when the last context is left",
        ("dispatch.dispatched", "            _remove_idle(name, kind)", "            pass"),
        REGISTRY,
    ),
    _adapter(
        "override-of-every-model",
        "another model's attention runs through the override too",
        (
            "dispatch.Dispatch.__call__",
            "self.active.get(module, ())",
            "self.active.get(module, next(iter(self.active.values()), ()))",
        ),
        REGISTRY,
    ),
    mutant(
        "exit-takes-all-overrides",
        "leaving one context takes the other overrides of its modules as well",
        [
            (
                "model.dispatch.dispatched",
                "for one in dispatch.active[module] if one is not entered",
                "for one in ()",
            ),
            (
                "model.dispatch.dispatched",
                "del dispatch.active[module]",
                "dispatch.active.pop(module, None)",
            ),
        ],
        REGISTRY,
    ),
    _adapter(
        "no-limit-of-positions",
        "rows beyond the model's positions are valued",
        (
            "transformers.TransformersAdapter.max_positions",
            "return position_limit(self.config)",
            "return None",
        ),
        LIMIT,
    ),
    _adapter(
        "cached-decoding-one-position-late",
        "positions of generated tokens start at one",
        ("transformers.TransformersAdapter.next_token_logits", ".cumsum(-1) - 1)", ".cumsum(-1))"),
        DECODING,
    ),
    _adapter(
        "labels-reach-the-model",
        "what shapes a trainer's loss is passed on to a scoring forward",
        ("transformers.TransformersAdapter.arguments", "if k not in _LOSS_KEYWORDS", "if True"),
        DECODING,
    ),
)
