"""Writes docs/architectures.json and .md: ``python -m tests.architectures_page [kind ...]``.

Tiny models with random weights, one for each kind of decoder that transformers has: which
estimators value them, and by which message the others are refused. What is returned is compared
with one backward a token, so "exact" is measured and not hoped. With names of kinds only these are
tried again, and the page is written from all that the data hold.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenError, InputError
from alphatoken.oracle import gradients, influence

DOCS = Path(__file__).parents[1] / "docs"
DATA, PAGE = DOCS / "architectures.json", DOCS / "architectures.md"
VOCABULARY = 32
TOLERANCE = 1e-4
"""Largest difference, relative to the sum of the absolute terms."""
DIFFERENCES = 2e-3
"""The same of label values by finite differences, in float32."""

_WIDTHS: dict[tuple[str, ...], Any] = {
    ("vocab_size",): VOCABULARY,
    ("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "d_embed"): 16,
    ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "dff", "ffn_hidden_size", "dim_ff"): 20,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"): 2,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"): 4,
    ("num_key_value_heads", "num_experts_per_tok"): 2,
    ("head_dim", "dim_head", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"): 4,
    ("max_position_embeddings", "n_positions", "max_seq_len"): 64,
    ("num_experts", "num_local_experts", "n_routed_experts"): 4,
    ("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "shared_expert_intermediate_size"): 8,
    ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"): 1,
    ("pad_token_id",): 0,
    ("bos_token_id",): 1,
    ("eos_token_id",): 2,
    ("is_decoder",): True,
}
_SMALL = {name: value for names, value in _WIDTHS.items() for name in names}

_HEADS = {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 1, "mamba_d_state": 8}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "qwen3_5_text": _DELTA, "qwen3_next": _DELTA,
    "bamba": _MAMBA, "deepseek_v2": _HEADS, "deepseek_v3": _HEADS,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 32},
    "mamba2": {"num_heads": 8, "head_dim": 4, "n_groups": 1, "state_size": 8},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    name: _OWN.get(name, {})
    for name in (
        "afmoe", "apertus", "arcee", "bamba", "bart", "bert", "bert-generation", "big_bird",
        "biogpt", "bitnet", "bloom", "camembert", "codegen", "cohere", "cohere2", "cpmant", "ctrl",
        "data2vec-text", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "ernie4_5",
        "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo",
        "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
        "jamba", "jetmoe", "lfm2", "llama", "llama4_text", "mamba", "mamba2", "mbart", "minimax",
        "ministral", "mistral", "mixtral", "modernbert-decoder", "mpt", "nemotron", "olmo", "olmo2",
        "olmo3", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma",
        "roberta", "rwkv", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
        "xlm",
    )
}  # fmt: skip
"""Kind, as transformers names it -> options that its small model needs beside the common ones."""

ESTIMATORS: dict[str, ScorerConfig] = {
    "label": ScorerConfig("label"),
    "label, all": ScorerConfig("label", parameters="all"),
    "path": ScorerConfig("path", uncovered="skip"),
    "direct": ScorerConfig("direct", uncovered="skip"),
    "alphatoken": ScorerConfig("alphatoken", uncovered="skip"),
}
_LOSS = "its own loss"
"""Columns of the table."""


def build(kind: str) -> nn.Module:
    """The kind's small model in evaluation mode, float32, with weights from a seed."""
    known = CONFIG_MAPPING[kind]
    default = known()
    fixed = {n for n, x in vars(known).items() if isinstance(x, property) and x.fset is None}
    names = [n for n in _SMALL if hasattr(default, n) and n not in fixed]
    options = {name: _SMALL[name] for name in names}
    config = known(**{**options, **KINDS[kind]})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (1.0 / p.shape[-1]) ** 0.5 if p.dim() > 1 else p)
            p.add_(0.1 * torch.randn_like(p) if p.dim() < 2 else 0.0)
    return model.float().eval()


def batch(seed: int) -> dict[str, Tensor]:
    """Two rows of ten tokens, the padding token among them; six are responses."""
    ids = torch.randint(0, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(seed))
    ids[:, 2] = 0
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "labels": labels}


def tried(kind: str) -> dict[str, str]:
    """What became of each estimator on this kind: "exact", "yes", or why it is refused."""
    model = build(kind)
    found = {name: outcome(model, config) for name, config in ESTIMATORS.items()}
    return {**found, _LOSS: own_loss(model)}


def own_loss(model: nn.Module) -> str:
    """What the model's own loss is the mean of: the losses that values are of, or others."""
    rows = batch(2)
    output: Any = model(**rows, use_cache=False)
    logits, labels = output.logits.flatten(0, 1), rows["labels"]
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    for name, wanted in (("next token", shifted), ("same token", labels)):
        if logits.shape[0] == wanted.numel():
            mean = nn.functional.cross_entropy(logits, wanted.flatten())
            if torch.allclose(mean, output.loss, rtol=1e-3):
                return name
    return "other"


def outcome(model: nn.Module, config: ScorerConfig) -> str:
    """Values of two rows by one estimator, compared with the oracle where there is one."""
    try:
        scorer = Scorer(model, batch(1), config=config)
        scorer.warn = False
        values = scorer.score(batch(2))
    except AlphaTokenError as error:
        return f"{type(error).__name__}: {error.what}"
    if config.estimator == "alphatoken":
        return "yes"
    skipped = " of the rest" if scorer.coverage.skipped else ""
    return _compared(scorer, values.total, config.estimator, values.derivative) + skipped


def _compared(scorer: Scorer, found: Tensor, estimator: str, derivative: str | None) -> str:
    model: Any = scorer.arguments.model

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits

    rows = batch(2)
    weights = dict(scorer.parameters)
    m = gradients.validation_gradient(model, forward, batch(1), weights)
    if estimator == "label":
        wanted, scale = torch.zeros(found.shape).double(), torch.zeros(found.shape).double()
        each = gradients.per_token_gradients(model, forward, rows, weights)
        for (b, i), gradient in zip(gradients.response_tokens(rows["labels"]), each, strict=True):
            terms = [(gradient[name].double() * along) for name, along in m.items()]
            wanted[b, i] = sum(t.sum() for t in terms)
            scale[b, i] = sum(t.abs().sum() for t in terms)
    else:
        linears = scorer.scope.linears
        modules = {linear.name: linear.module for linear in linears}
        turned = [linear.name for linear in linears if linear.transposed]
        try:
            psi = influence.exact_influence(model, forward, rows, modules, m, transposed=turned)
        except InputError:  # shared experts, which are called on positions in one dimension
            return "yes"
        read = influence.diagonal if estimator == "direct" else influence.column_sums
        wanted, scale = (
            influence.to_token_index(read(x)) for x in (psi.matrix, psi.absolute_scale)
        )
    response = rows["labels"] != -100
    off = ((found - wanted).abs() / scale)[response].max()
    most = TOLERANCE if derivative == "forward_mode" or estimator != "label" else DIFFERENCES
    return "exact" if float(off) <= most else f"WRONG by {float(off):.0e}"


# --- the page -------------------------------------------------------------------------------------

_HEAD = """\
# Which architectures work

Kinds of models of transformers {version} that each [estimator](estimators.md) can value, each tried as a tiny model with random weights:
two layers, float32, two rows of ten tokens without padding.

| cell | meaning |
|---|---|
| exact | every value equals per-token autograd, to {tolerance:.0e} of its absolute terms ({differences:.0e} for label values by finite differences) |
| yes | values are returned, and the checks that run on each model pass; there is no oracle for them here (`alphatoken` approximates) |
| of the rest | `uncovered="skip"` left out matrices that no linear covers, such as experts and routers |
| a number | the estimator refuses the model with the message below the table |

Here `label` scores the linears of all layers, and *label, all* every parameter.

*Its own loss* says which tokens the model's loss averages: a model with *same token* wants labels that were shifted before.

Kinds of BERT's family are built with `is_decoder=True`; without it, and as encoder-decoders, models are refused. Attention kernels, wrappers,
quantised and real weights were not tried; the checks at first use cover those.

<!-- Written by python -m tests.architectures_page from architectures.json; do not edit by hand -->

"""  # noqa: E501


def page(data: Mapping[str, Any]) -> str:
    """The page that these data make."""
    kinds: dict[str, dict[str, str]] = data["kinds"]
    reasons: dict[str, int] = {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for kind, found in sorted(kinds.items()):
        cells = []
        for name in ESTIMATORS:
            said = found[name].replace(f"'{name.partition(',')[0]}'", "this estimator")
            short = said.startswith(("exact", "yes"))
            cells.append(said if short else str(reasons.setdefault(said, len(reasons) + 1)))
        groups.setdefault((*cells, found[_LOSS]), []).append(kind)
    lines = [
        "| " + " | ".join([*ESTIMATORS, _LOSS, "kinds"]) + " |",
        "|---" * (2 + len(ESTIMATORS)) + "|",
        *(
            f"| {' | '.join(cells)} | {', '.join(alike)} |"
            for cells, alike in sorted(groups.items(), key=lambda one: -len(one[1]))
        ),
    ]
    head = _HEAD.format(version=data["transformers"], tolerance=TOLERANCE, differences=DIFFERENCES)
    notes = [f"{number}. {said}" for said, number in reasons.items()]
    return head + "\n".join([*lines, "", *notes]) + "\n"


def _try(kind: str, run: Callable[[str], dict[str, str]]) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        return run(kind)


_SECONDS = 120
"""What a kind may take; a model that takes longer is not small and is left out."""


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {_SECONDS} s")


def main(chosen: list[str]) -> None:
    """Try the chosen kinds, or all, and write data and page."""
    signal.signal(signal.SIGALRM, _too_long)
    known = (
        json.loads(DATA.read_text(encoding="utf-8"))["kinds"] if chosen and DATA.exists() else {}
    )
    for kind in chosen or list(KINDS):
        signal.alarm(_SECONDS)
        try:
            known[kind] = _try(kind, tried)
            print(kind, known[kind], flush=True)
        except Exception as error:  # the model itself cannot be made or run: it is no row
            print(f"{kind} is left out: {type(error).__name__}: {error}"[:200], flush=True)
    signal.alarm(0)
    data = {"transformers": transformers.__version__, "kinds": dict(sorted(known.items()))}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
