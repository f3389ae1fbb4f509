"""Digests of what the library computes, for a maintainer who restructures it; no test.

``python -m tests.goldens write FILE`` before a change and ``python -m tests.goldens compare FILE``
after it show which numbers the change altered, to the last bit. Digests hold for one machine and
one set of versions, so that none is kept in the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import string
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Entries = dict[str, dict[str, Any]]
Numbers = Iterator[tuple[str, object]]
Case = Callable[[Path], Numbers]

CASES: dict[str, Case] = {}
"""Name -> function that gets an empty folder and yields names and numbers."""


def case(name: str) -> Callable[[Case], Case]:
    """Register a case."""

    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


# --- what the library calls it: to be changed with the library -----------------------------------

ESTIMATORS = ("alphatoken", "direct", "path", "paper_literal", "label", "walk")
LEFT_OUT = ("curvature", "curvature_error", "balance")
"""Fields of ``TokenValues`` that are no golden."""
SMOLLM2 = "SmolLM2-135M-Instruct"
SFT_POLICIES = (
    "dft", "eaft", "talr", "flow", "stm", "xtf", "sstoken", "rho-1", "token-cleaning", "less",
    "validation-first",
)  # fmt: skip
PAIR_POLICIES = ("dpo", "confpo", "sepo", "ti-dpo")
POLICY_OPTIONS: dict[str, dict[str, Any]] = {}
WORDS = ("place",)
"""Columns of value files that hold prose."""
RAISED = "raised"
"""Name of the entry of a case that raised."""
CLOCKS = ("runtime", "per_second", "seconds", "_time", "time_", "memory", "flos")
"""Parts of the names of logged numbers that differ from run to run."""


def new_scorer(
    model: nn.Module, validation: Any, arguments: Mapping[str, Any], **options: Any
) -> Any:
    """A scorer with ``arguments`` of its own beside the options of its configuration."""
    from alphatoken import Scorer, ScorerConfig

    return Scorer(model, validation, config=ScorerConfig(**options), **arguments)


def numbers_of_values(values: Any) -> dict[str, object]:
    """Tensors and numbers of ``TokenValues``, by name."""
    kept = (Tensor, float, int, str)
    named = {one.name: getattr(values, one.name) for one in fields(values)}
    return {k: v for k, v in named.items() if k not in LEFT_OUT and isinstance(v, kept)}


def observed_values(scorer: Any, model: nn.Module, batch: Mapping[str, Tensor], **more: Any) -> Any:
    """Values of a forward of ours, as in a training loop."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with scorer.observe() as observed:
        logits = model(**inputs, use_cache=False).logits
        return observed.values(logits, batch["labels"], **more)


def numbers_of_certificate(certificate: Any) -> dict[str, object]:
    """Errors and tolerances of a certificate, and the numbers that it compared last."""
    found: dict[str, object] = {
        check.component: [check.error, check.tolerance, check.found, check.expected]
        for check in certificate.checks
    }
    return {**found, "tokens": certificate.tokens, "stated_error": certificate.stated_error}


def fitted_fisher(model: nn.Module, structure: str = "diagonal", **more: Any) -> Any:
    """A Fisher by a few sampled responses."""
    from alphatoken import fit_fisher

    prompts = [row["input_ids"][:10] for row in encoded(4, seed=11)]
    options = {"samples": 6, "max_new_tokens": 6, "layers": "all", "progress": False}
    return fit_fisher(model, prompts, structure=structure, **{**options, **more})


def fitted_influence(model: nn.Module, **more: Any) -> Any:
    """Kronecker factors with corrected eigenvalues."""
    from alphatoken import fit_influence

    rows = padded(encoded(4, seed=12))
    return fit_influence(model, rows, samples=6, progress=False, **more)


def preference_batch(model: nn.Module, normalization: str = "tokens") -> Any:
    """Pairs whose reference log-probabilities are those of the model itself, a little off."""
    from alphatoken import PreferenceBatch, token_losses

    branches = [padded(encoded(3, seed=seed)) for seed in (21, 22)]
    with torch.no_grad():
        sums = [-token_losses(logits_of(model, b), b["labels"]).sum(-1) for b in branches]
    return PreferenceBatch(
        *branches, sums[0] - 0.5, sums[1] + 0.25, beta=0.2, normalization=normalization
    )


def trainer_kind(family: str) -> Any:
    """The trainer of a family."""
    from alphatoken import train

    names = {"sft": "AlphaSFTTrainer", "dpo": "AlphaDPOTrainer", "plain": "AlphaTrainer"}
    return getattr(train, names[family])


TRAINER_OPTIONS: dict[str, Any] = {
    "layers": "2",
    "validation_batch_size": 4,
    "fisher_samples": 4,
    "fisher_max_new_tokens": 6,
    "held_out_steps": 2,
}
"""Small sizes of the trainers' own options."""


def value_files(folder: Path) -> Numbers:
    """Columns of each value file of a run or a job."""
    import pyarrow.parquet as pq

    for path in sorted(folder.rglob("*.parquet")):
        table = pq.read_table(path)
        for name in table.column_names:
            if name in WORDS:
                continue
            yield f"{path.relative_to(folder)}/{name}", table.column(name).to_pylist()


# --- the world: tiny models, and texts of the standard library ------------------------------------

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = {piece: i for i, piece in enumerate((*SPECIAL, *string.printable))}
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 160,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def texts(count: int, seed: int = 0, prompt: int = 12, response: int = 16) -> list[dict[str, str]]:
    """Beginnings of functions of the standard library, of differing lengths."""
    from alphatoken.data.stdlib import code_rows

    return [
        {"prompt": p.text[: prompt - i % 3], "completion": r.text.strip()[: response - i % 5]}
        for i, (p, r) in enumerate(row.turns[:2] for row in code_rows(count, seed))
    ]


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """The same, with the next row's response as the rejected one."""
    rows = texts(count + 1, seed)
    return [
        {"prompt": a["prompt"], "chosen": a["completion"], "rejected": "no" + b["completion"][:9]}
        for a, b in pairwise(rows)
    ]


def encoded(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows as token ids and labels."""
    found = []
    for row in texts(count, seed):
        before, after = (
            [VOCABULARY.get(c, 3) for c in row[name]] for name in ("prompt", "completion")
        )
        found.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
    return found


def padded(rows: Sequence[Mapping[str, list[int]]], side: str = "right") -> dict[str, Tensor]:
    """One batch of rows."""
    width = max(len(row["input_ids"]) for row in rows)

    def column(lists: Sequence[list[int]], fill: int) -> Tensor:
        gaps = [[fill] * (width - len(one)) for one in lists]
        return torch.tensor(
            [g + one if side == "left" else one + g for g, one in zip(gaps, lists, strict=True)]
        )

    return {
        "input_ids": column([row["input_ids"] for row in rows], 0),
        "attention_mask": column([[1] * len(row["input_ids"]) for row in rows], 0),
        "labels": column([row["labels"] for row in rows], -100),
    }


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of a batch."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A random Llama of three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48, **more))
    return model.to(dtype)


def mixtral(seed: int = 0) -> Any:
    """A random Mixtral: four experts, two a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=24, **experts))


def gemma(seed: int = 0) -> Any:
    """A random Gemma 3: norms of queries and keys, windows, tied embeddings."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {"head_dim": 8, "sliding_window": 6, "layer_types": kinds, "intermediate_size": 48}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **own))


def gpt2(seed: int = 0) -> Any:
    """A random GPT-2: weights stored the other way round, biases, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    own = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 160}
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    return GPT2LMHeadModel(GPT2Config(**own, **{n: SIZES[n] for n in names}))


def hybrid(seed: int = 0) -> Any:
    """A random Qwen 3.5: gated delta nets in two of three layers."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    own = {
        "intermediate_size": 48, "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    }  # fmt: skip
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **own))


def adapted(seed: int = 0) -> Any:
    """A Llama with LoRA whose B is not zero."""
    from peft import get_peft_model

    model = get_peft_model(llama(seed), lora())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def lora() -> Any:
    """Low-rank adapters on three kinds of linears."""
    from peft import LoraConfig

    targets = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama, "mixtral": mixtral, "gemma": gemma, "gpt2": gpt2, "hybrid": hybrid,
    "lora": adapted, "llama-float64": lambda: llama(dtype=torch.float64),
    "llama-bfloat16": lambda: llama(dtype=torch.bfloat16),
}  # fmt: skip


def tokenizer() -> Any:
    """One token a character, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}<s>{{ m.content }}|{% endif %}{% endfor %}"
    )
    return made


def moved(model: nn.Module, size: float = 0.01, seed: int = 5) -> nn.Module:
    """The model with every weight a little off, so that drift is not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += (size * noise).to(parameter.dtype)
    return model


def stepped(model: nn.Module, batch: Mapping[str, Tensor], steps: int = 3) -> torch.optim.Optimizer:
    """An optimizer that has taken some steps on a batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.8, 0.97), eps=1e-3, weight_decay=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = {**batch, "use_cache": False}
        model(**inputs).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


# --- values --------------------------------------------------------------------------------------


def batches() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A batch to value, and two validation batches."""
    rows = encoded(8, seed=2)
    return padded(encoded(4, seed=1)), [padded(rows[:4]), padded(rows[4:], "left")]


def ways_of(scorer: Any, model: nn.Module, batch: Any, verify: int = 3) -> Numbers:
    """Values of one scorer: ``score``, ``observe``, and the certificate's numbers."""
    yield "score", numbers_of_values(scorer.score(batch))
    yield "observe", numbers_of_values(observed_values(scorer, model, batch))
    if verify:
        certificate = scorer.verify(batch, tokens=verify, progress=False)
        yield "verify", numbers_of_certificate(certificate)


def under(name: str, numbers: Numbers) -> Numbers:
    """The numbers with a name before theirs."""
    return ((f"{name}/{key}", value) for key, value in numbers)


def retentions(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and retention terms of it by name."""
    model = MODELS[kind]()
    terms = {"diagonal": fitted_fisher(model, layers=2)}
    if kind not in ("mixtral", "hybrid"):
        terms["kronecker"] = fitted_fisher(model, "kronecker", layers=2)
    return moved(model), {**terms, "data": [padded(encoded(4, seed=3))]}


def of_estimators(kind: str, verify: int, _: Path) -> Numbers:
    """Each estimator with its defaults, without retention and with each kind of it."""
    model, terms = retentions(kind)
    batch, validation = batches()
    skip = {"uncovered": "skip"} if kind == "mixtral" else {}
    for estimator in ESTIMATORS:
        if estimator == "walk":  # no certificate, and nothing is retained along one
            walk = new_scorer(model, validation, {}, estimator="walk", walk_steps=3)
            yield from under("walk", ways_of(walk, model, batch, 0))
            continue
        own: dict[str, Any] = {"layers": 2, **skip}
        plain = new_scorer(model, validation, {}, estimator=estimator, **own)
        yield from under(estimator, ways_of(plain, model, batch, verify))
        for term, retention in terms.items():
            scorer = new_scorer(
                model, validation, {"retention": retention}, estimator=estimator, **own
            )
            yield from under(f"{estimator}, {term}", ways_of(scorer, model, batch, verify))


for _kind in ("llama", "mixtral", "gemma"):
    CASES[f"values/{_kind}"] = partial(of_estimators, _kind, 3)


# --- training ------------------------------------------------------------------------------------


def new_trainer(family: str, folder: Path, **more: Any) -> Any:
    """A trainer on a few rows; fields of its configuration are options, all else arguments."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq

    kind = trainer_kind(family)
    own = set(kind.CONFIG.__dataclass_fields__)
    rows: Callable[..., Any] = {"sft": texts, "dpo": pairs, "plain": encoded}[family]
    options = {
        "output_dir": str(folder / "run"), "per_device_train_batch_size": 4, "max_steps": 3,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "bf16": False, "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False, "max_length": 64, "seed": 3,
        **TRAINER_OPTIONS, **more,
    }  # fmt: skip
    arguments = {
        "model": llama(), "train_dataset": Dataset.from_list(rows(16, seed=1)),
        "validation_dataset": Dataset.from_list(rows(8, seed=2)), "processing_class": tokenizer(),
    }  # fmt: skip
    if family == "plain":
        del options["max_length"]
        arguments["data_collator"] = DataCollatorForSeq2Seq(arguments["processing_class"])
    if family == "dpo":
        arguments["ref_model"] = llama(seed=1)
    arguments |= {name: value for name, value in options.items() if name not in own}
    args = kind.CONFIG(**{name: value for name, value in options.items() if name in own})
    return kind(args=args, **arguments)


def outcome(trainer: Any) -> Numbers:
    """Last weights, logged numbers and value files of a run that is over."""
    state = {name: p.detach() for name, p in trainer.model.state_dict().items()}
    yield "weights", joined(state)
    for number, log in enumerate(trainer.state.log_history):
        kept = {k: v for k, v in log.items() if not any(part in k for part in CLOCKS)}
        yield f"log {number}", kept
    yield from value_files(Path(trainer.args.output_dir))


def trained(family: str, options: Mapping[str, Any], folder: Path) -> Numbers:
    """Outcome of a run."""
    trainer = new_trainer(family, folder, **options)
    trainer.train()
    return outcome(trainer)


RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "alphatoken": {},
        "path": {"estimator": "path"},
        "label": {"estimator": "label"},
        "label, all parameters": {"estimator": "label", "parameters": "all"},
        "walk": {"estimator": "walk", "walk_steps": 3, "layers": "3"},
        "random": {"policy": "random"},
        "bottom": {"policy": "bottom"},
        "all": {"policy": "all"},
        "dft": {"policy": "dft"},
    },
    "dpo": {
        "alphatoken": {},
        "label": {"estimator": "label"},
        "all": {"policy": "all"},
    },
    "plain": {
        "alphatoken": {},
        "label": {"estimator": "label"},
    },
}
"""Options of runs by family and name."""


for _family, _runs in RUNS.items():
    for _name, _options in _runs.items():
        CASES[f"train/{_family}/{_name}"] = partial(trained, _family, _options)


# --- digests -------------------------------------------------------------------------------------


def joined(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """One record of many tensors: the digest of all, and the sum of each of the first."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(as_bytes(tensors[name]))
    sums = [float(tensors[name].double().sum()) for name in sorted(tensors)[:6]]
    return {"names": len(tensors), "sha256": digest.hexdigest(), "sums": sums}


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def flattened(value: object) -> Iterator[object]:
    """The items of lists in lists."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from flattened(one)
    else:
        yield value


def records(name: str, value: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Records of a number, a tensor, or a mapping of them."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from records(f"{name}/{key}", one)
    elif isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value)
        leading = tensor.detach().reshape(-1)
        leading = leading[leading != 0][:4].tolist()
        yield (
            name,
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "sha256": hashlib.sha256(as_bytes(tensor)).hexdigest(),
                "leading": [repr(number) for number in leading],
            },
        )
    elif isinstance(value, (list, tuple)) and len(repr(value)) > 200:
        own = list(flattened(value))
        yield (
            name,
            {
                "shape": [len(own)],
                "sha256": hashlib.sha256(repr(value).encode()).hexdigest(),
                "leading": [repr(one)[:40] for one in own if one not in (0, None, False, "")][:4],
            },
        )
    else:
        yield name, {"value": repr(value)}


def computed(prefix: str) -> Entries:
    """Records of every case that has names with this prefix, each in a folder of its own."""
    found: Entries = {}
    for name, numbers in CASES.items():
        if not (name.startswith(prefix) or prefix.startswith(name)):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            own = entries_of(name, numbers, Path(folder))
        found |= {key: record for key, record in own.items() if key.startswith(prefix)}
        print(f"{name}: {len(own)} entries, {time.monotonic() - began:.1f} s", flush=True)
    return found


def entries_of(name: str, numbers: Case, folder: Path) -> Entries:
    """Records of one case; one that raises leaves what it had, and its error."""
    from transformers import set_seed

    set_seed(0)
    own: Entries = {}
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for key, value in numbers(folder):
                own |= dict(records(f"{name}/{key}", value))
        except Exception as error:
            own[f"{name}/{RAISED}"] = {"value": f"{type(error).__name__}: {error}"}
            failure = traceback.format_exc()
        else:
            return own
    print(failure, file=sys.stderr)
    return own


def differences(before: Entries, now: Entries) -> Iterator[str]:
    """A line for each entry that differs, or that only one of the two has."""
    for name in [*before, *(name for name in now if name not in before)]:
        then, later = before.get(name), now.get(name)
        if then != later:
            yield f"{name}: {shown(then)} -> {shown(later)}"


def shown(record: Mapping[str, Any] | None) -> str:
    """A record without most of its digest."""
    if record is None:
        return "absent"
    return " ".join(str(part)[:8] if key == "sha256" else f"{part}" for key, part in record.items())


def main(words: Sequence[str] | None = None) -> int:
    """Write or compare; 1 if an entry differs, or a case raised."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", metavar="PREFIX", help="entries with such names")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    import alphatoken

    print(f"of {Path(alphatoken.__file__).parent}")
    began = time.process_time()
    now = computed(asked.only)
    print(f"{len(now)} entries, {time.process_time() - began:.0f} s of one processor")
    failed = [name for name in now if name.endswith(f"/{RAISED}")]
    if asked.action == "write":
        asked.file.parent.mkdir(parents=True, exist_ok=True)
        asked.file.write_text(json.dumps(now, indent=0) + "\n")
        print(*(f"{name}: {now[name]['value']}" for name in failed), sep="\n")
        return 1 if failed else 0
    then = json.loads(asked.file.read_text())
    lines = list(differences({k: v for k, v in then.items() if k.startswith(asked.only)}, now))
    print(*lines, f"{len(lines)} entries differ", sep="\n")
    return 1 if lines or failed else 0


if __name__ == "__main__":
    sys.exit(main())
