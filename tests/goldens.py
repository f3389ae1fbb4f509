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
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.integration import tiny_training as tiny
from tests.places import models_folder
from tests.rows import jsonl

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
LEFT_OUT = ("curvature", "curvature_error", "balance", "input_ids")
"""Fields of ``TokenValues`` that are no golden."""
SMOLLM2 = "SmolLM2-135M-Instruct"
SAVED_MODEL = "SAVED_MODEL"
"""Stands for the folder of a model that is saved before the run."""
SFT_POLICIES: dict[str, dict[str, Any]] = {
    "standard": {}, "dft": {}, "eaft": {}, "talr": {}, "flow": {}, "xtf": {}, "sstoken": {},
    "stm": {"threshold": 105.0}, "rho-1": {"reference_epochs": 1.0},
    "token-cleaning": {"warmup_share": 0.5}, "validation-first": {},
    "less": {
        "dimension": 64, "share": 0.5, "warmup_share": 0.5, "warmup_epochs": 2, "rank": 4,
        "warmup_learning_rate": 1e-3, "warmup_batch_size": 4,
    },
}  # fmt: skip
PAIR_POLICIES: dict[str, dict[str, Any]] = {
    "dpo": {}, "confpo": {}, "sepo": {"oracle": SAVED_MODEL}, "ti-dpo": {},
}  # fmt: skip
DIRECT_POLICIES = ("standard", "dft", "eaft", "talr", "rho-1", "dpo", "confpo", "ti-dpo")
"""Policies whose weights follow from numbers that can be drawn."""
DIAGNOSTICS = (
    "estimators", "utility", "value-propagation", "fisher", "heatmap", "coverage", "drift",
    "sensitivity", "stability", "arithmetic",
)  # fmt: skip
WORDS = ("place",)
"""Columns of value files that hold prose."""
RAISED = "raised"
"""Name of the entry of a case that raised."""
MEASURED = ("second", "time", "memory", "cost")
"""Parts of the names of a diagnosis' columns that hold measured times or sizes."""
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


def run_command(name: str, options: Mapping[str, object], *flags: str) -> None:
    """Run a command of the command line; options that are lists are repeated."""
    from alphatoken.cli import main as command

    words = [name, *flags]
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{option}", str(one)]
    status = command(words)
    if status:
        raise RuntimeError(f"exit status {status} of: alphatoken {' '.join(words)}")


EVERYTHING = {"parameters": "all", "layers": "all"}
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

VOCABULARY = {piece: i for i, piece in enumerate((*tiny.SPECIAL, *string.printable))}
OWN_SIZES = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 160}
SIZES: dict[str, Any] = {**tiny.SIZES, **OWN_SIZES, "num_hidden_layers": 3}
llama = partial(tiny.model, **OWN_SIZES)
mixtral = partial(tiny.mixture, **OWN_SIZES)
hybrid = partial(tiny.hybrid, **OWN_SIZES)


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
    rows = []
    for row in texts(count, seed):
        before, after = (
            [VOCABULARY.get(c, 3) for c in row[name]] for name in ("prompt", "completion")
        )
        rows.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
    return rows


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
    own |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    return GPT2LMHeadModel(GPT2Config(**own, **{n: SIZES[n] for n in names}))


def adapted(seed: int = 0) -> Any:
    """A Llama with LoRA whose B is not zero."""
    from peft import get_peft_model

    model = get_peft_model(llama(seed), tiny.lora())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama, "mixtral": mixtral, "gemma": gemma, "gpt2": gpt2, "hybrid": hybrid,
    "lora": adapted, "llama-float64": lambda: llama().double(),
    "llama-bfloat16": lambda: llama().bfloat16(),
}  # fmt: skip


UNVERIFIED = ("llama-bfloat16", "lora")


def tokenizer() -> Any:
    """One token a character, with a chat template."""
    fast = tiny.tokenizer(string.printable)
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}<s>{{ m.content }}|{% endif %}{% endfor %}"
    )
    return fast


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


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of one or two exchanges."""
    rows = texts(2 * count, seed)

    def turns(row: Mapping[str, str]) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]

    return [
        {"messages": turns(rows[i]) + (turns(rows[i + count]) if i % 2 else [])}
        for i in range(count)
    ]


def world_of_files(folder: Path) -> dict[str, Path]:
    """Saved models and files of rows, as the command line takes them."""
    places = {name: folder / name for name in ("model", "moved")}
    for name, model in (("model", llama()), ("moved", moved(llama()))):
        model.save_pretrained(places[name])
        tokenizer().save_pretrained(places[name])
    for name, count, seed in (("train", 24, 41), ("validation", 8, 42), ("retention", 10, 43)):
        places[name] = jsonl(folder / f"{name}.jsonl", texts(count, seed))
    places["chats"] = jsonl(folder / "chats.jsonl", chats(12, 44))
    places["pairs"] = jsonl(folder / "pairs.jsonl", pairs(20, 45))
    places["validation_pairs"] = jsonl(folder / "validation_pairs.jsonl", pairs(6, 46))
    return places


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
        numbers: dict[str, object] = {
            check.component: [check.error, check.tolerance, check.actual, check.expected]
            for check in certificate.checks
        }
        own = {"tokens": certificate.tokens, "stated_error": certificate.stated_error}
        yield "verify", numbers | own


def under(name: str, numbers: Numbers) -> Numbers:
    """The numbers with a name before theirs."""
    return ((f"{name}/{key}", value) for key, value in numbers)


def of_estimators(kind: str, verify: int, _: Path) -> Numbers:
    """Each estimator with its defaults, without retention and with each kind of it."""
    model, partly = MODELS[kind](), kind in ("mixtral", "hybrid")
    terms = {"diagonal": fitted_fisher(model, layers=2)}
    if not partly:
        terms["kronecker"] = fitted_fisher(model, "kronecker", layers=2)
    terms["data"] = [padded(encoded(4, seed=3))]
    moved(model)
    batch, validation = batches()
    skip = {"uncovered": "skip"} if partly else {}
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


for _kind in MODELS:
    CASES[f"values/{_kind}"] = partial(of_estimators, _kind, 0 if _kind in UNVERIFIED else 3)


OPTIONS: dict[str, dict[str, Any]] = {
    "adaptation alone": {"objective": "adaptation"},
    "stability alone": {"objective": "stability"},
    "direct part": {"part": "direct"},
    "causal part": {"part": "causal"},
    "no window": {"window": None},
    "window 3": {"window": 3},
    "window 0": {"window": 0},
    "all layers": {"layers": "all"},
    "layers 0 and 2": {"layers": (0, 2)},
    "lambda 0.3": {"stability_weight": 0.3},
    "standard errors": {"standard_errors": True},
    "paper_literal, causal part": {"estimator": "paper_literal", "part": "causal"},
    "path, all layers": {"estimator": "path", "layers": "all"},
    "path, standard errors": {"estimator": "path", "standard_errors": True},
    "label, standard errors": {"estimator": "label", "standard_errors": True},
    "label, all parameters": {"estimator": "label", "parameters": "all"},
    "label, norms": {"estimator": "label", "parameters": "linears,*norm*"},
    **{
        f"label, {way}, {parameters}": {
            "estimator": "label", "derivative": way, "parameters": parameters,
        }
        for way in ("forward_mode", "central", "one_sided")
        for parameters in ("linears", "all")
    },
}  # fmt: skip


@case("values/options")
def of_options(_: Path) -> Numbers:
    """Each option by itself, with a Fisher of all parameters."""
    model = llama()
    fisher = fitted_fisher(model, parameters="all")
    moved(model)
    batch, validation = batches()
    for name, options in OPTIONS.items():
        options = {"layers": "all" if options.get("parameters") == "all" else 2, **options}
        scorer = new_scorer(model, validation, {"retention": fisher}, **options)
        yield from under(name, ways_of(scorer, model, batch, 2))
        if options.get("standard_errors"):
            values = scorer.score(batch)
            yield f"{name}/standard_error", values.standard_error()
            yield f"{name}/by_batch", values.by_batch()


@case("values/preconditioners")
def of_preconditioners(_: Path) -> Numbers:
    """P of each kind, beside a Fisher."""
    for estimator in ("alphatoken", "path", "label"):
        model = llama()
        fisher, influence = fitted_fisher(model), fitted_influence(model)
        batch, validation = batches()
        optimizer = stepped(model, batch)
        generator = torch.Generator().manual_seed(8)
        diagonal = {
            name: torch.rand(parameter.shape, generator=generator)
            for name, parameter in new_scorer(model, validation, {}, layers=2).parameters.items()
        }
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "frozen": ("frozen", {"optimizer": optimizer}),
            "full": ("full", {"optimizer": optimizer}),
            "kronecker": ("kronecker", {"influence": influence}),
            "mapping": (diagonal, {}),
        }
        for name, (preconditioner, arguments) in kinds.items():
            scorer = new_scorer(
                model, validation, {**arguments, "retention": fisher}, estimator=estimator,
                preconditioner=preconditioner, precondition_after=2, layers=2,
            )  # fmt: skip
            yield from under(f"{estimator}, {name}", ways_of(scorer, model, batch, 2))


@case("values/pairs")
def of_pairs(_: Path) -> Numbers:
    """Preference pairs as the objective."""
    model = llama()
    batch, _validation = batches()
    for estimator in ESTIMATORS:
        own = {"walk_steps": 2} if estimator == "walk" else {"layers": 2}
        for normalization in ("tokens", "pairs"):
            pair = preference_batch(model, normalization)
            scorer = new_scorer(model, pair, {}, estimator=estimator, **own)
            verify = 0 if estimator == "walk" else 2
            yield from under(f"{estimator}, {normalization}", ways_of(scorer, model, batch, verify))


@case("values/batches")
def of_batches(_: Path) -> Numbers:
    """Batches of other forms, weights of tokens, and totals alone."""
    model = moved(llama())
    rows = encoded(4, seed=1)
    batch, validation = batches()
    ids = [row["input_ids"] for row in rows]
    packed = {
        "input_ids": torch.tensor([[*ids[0], *ids[1]]]),
        "position_ids": torch.tensor([[*range(len(ids[0])), *range(len(ids[1]))]]),
        "labels": torch.tensor([[*rows[0]["labels"], *rows[1]["labels"]]]),
    }
    shape = batch["labels"].shape
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(9))
    for estimator in ("alphatoken", "path", "label"):
        scorer = new_scorer(model, validation, {}, estimator=estimator, layers=2)
        yield from under(f"{estimator}, left", ways_of(scorer, model, padded(rows, "left"), 2))
        yield from under(f"{estimator}, packed", ways_of(scorer, model, packed, 2))
        for door, values in (
            ("score", scorer.score(batch, token_weights=weights)),
            ("observe", observed_values(scorer, model, batch, token_weights=weights)),
            ("score, total", scorer.score(batch, components=False)),
            ("observe, total", observed_values(scorer, model, batch, components=False)),
        ):
            yield f"{estimator}, {door}", numbers_of_values(values)
        if estimator == "alphatoken":  # it refuses dropout in the attention
            continue
        dropping = llama(dropout=0.2).train()
        scorer = new_scorer(dropping, validation, {}, estimator=estimator, layers=2)
        torch.manual_seed(3)
        yield f"{estimator}, dropout", numbers_of_values(observed_values(scorer, dropping, batch))


@case("values/over steps")
def of_steps(_: Path) -> Numbers:
    """One scorer while the weights, the validation rows and the retention term change."""
    for estimator in ("alphatoken", "label", "walk"):
        model = llama()
        fisher = fitted_fisher(model)
        batch, validation = batches()
        own = {"walk_steps": 2, "walk_refresh": 1} if estimator == "walk" else {"layers": 2}
        scorer = new_scorer(model, validation, {}, estimator=estimator, **own)
        yield f"{estimator}/before", numbers_of_values(scorer.score(batch))
        stepped(model, batch, 1)
        yield f"{estimator}/stepped", numbers_of_values(scorer.score(batch))
        scorer.set_validation(validation[1:])
        yield f"{estimator}/validation", numbers_of_values(scorer.score(batch))
        if estimator == "walk":
            continue
        scorer.set_retention(fisher)
        yield f"{estimator}/retention", numbers_of_values(scorer.score(batch))
        scorer.pin(1)
        scorer.score(batch)
        stepped(model, batch, 1)
        yield f"{estimator}/pinned", numbers_of_values(scorer.score(batch))


@case("values/walks")
def of_walks(_: Path) -> Numbers:
    """Walks: another rate, and the losses of a second model in place of one."""
    model = llama()
    batch, validation = batches()
    scorer = new_scorer(
        model, validation, {}, estimator="walk", walk_steps=4, walk_learning_rate=1e-3
    )
    yield from under("rate", ways_of(scorer, model, batch, 0))
    scorer = new_scorer(model, None, {"reference": moved(llama())}, estimator="walk")
    yield from under("reference", ways_of(scorer, model, batch, 0))


@case("values/experts")
def of_experts(_: Path) -> Numbers:
    """The matrices of experts among the parameters."""
    model = mixtral()
    batch, validation = batches()
    for estimator in ("alphatoken", "direct", "path", "label"):
        scorer = new_scorer(
            model, validation, {}, estimator=estimator, layers=2, parameters="linears,experts",
            uncovered="skip",
        )  # fmt: skip
        yield from under(estimator, ways_of(scorer, model, batch, 2))
    scorer = new_scorer(model, validation, {}, estimator="label", parameters="all")
    yield from under("label, all", ways_of(scorer, model, batch, 0))


def of_smollm2(place: Path, _: Path) -> Numbers:
    """A few estimators on SmolLM2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    reader = AutoTokenizer.from_pretrained(place)

    def read(count: int, seed: int) -> dict[str, Tensor]:
        rows = []
        for row in texts(count, seed, prompt=30, response=30):
            before, after = (reader(row[n]).input_ids for n in ("prompt", "completion"))
            rows.append({"input_ids": before + after, "labels": [-100] * len(before) + after})
        return padded(rows)

    batch, validation = read(2, 1), [read(1, 2)]
    fisher = fitted_fisher(model, samples=2, layers=3, max_new_tokens=4)
    moved(model, 1e-3)
    for estimator, options in {
        "alphatoken": {}, "path": {}, "label": {}, "walk": {"walk_steps": 1},
    }.items():  # fmt: skip
        arguments = {} if estimator == "walk" else {"retention": fisher}
        scorer = new_scorer(model, validation, arguments, estimator=estimator, **options)
        yield from under(estimator, ways_of(scorer, model, batch, 0))


if (_place := models_folder() / SMOLLM2).is_dir():
    CASES["values/smollm2"] = partial(of_smollm2, _place)
else:
    print(f"values/smollm2 is left out: there is no {_place}")


# --- selection, policies, Fishers -----------------------------------------------------------------


@case("select/masks")
def of_masks(_: Path) -> Numbers:
    """Each selection from values that come with standard errors."""
    from alphatoken import response_values, select_bottom, select_random, select_top
    from alphatoken.select.confidence import select_harmless

    model = llama()
    batch, validation = batches()
    values = new_scorer(model, validation, {}, layers=2, standard_errors=True).score(batch)
    total, mask, errors = values.total, values.mask, values.standard_error()
    for ratio in (0.3, 0.55, 1.0):
        for scope in ("batch", "sequence"):
            named = f"{ratio} of a {scope}"
            generator = torch.Generator().manual_seed(4)
            yield f"top {named}", select_top(total, mask, ratio, scope=scope)
            yield f"bottom {named}", select_bottom(total, mask, ratio, scope=scope)
            yield (
                f"random {named}",
                select_random(mask, ratio, generator=generator, scope=scope),
            )
    yield "responses", response_values(total, mask)
    yield "harmless", select_harmless(total, errors, mask, parts=2, confidence=0.6)


@case("select/losses")
def of_losses(_: Path) -> Numbers:
    """Masked losses with their gradients at the head."""
    from alphatoken import dpo_coefficient, masked_dpo_loss, masked_sft_loss, token_losses

    model = llama()
    batch, pair = padded(encoded(4, seed=1)), [padded(encoded(3, seed=seed)) for seed in (21, 22)]
    generator = torch.Generator().manual_seed(6)
    keeps = [torch.rand(b["labels"].shape, generator=generator) for b in (batch, *pair)]
    for normalization in ("response", "kept", "sum"):
        loss = masked_sft_loss(
            logits_of(model, batch), batch["labels"], keeps[0], normalization=normalization
        )
        yield f"sft, {normalization}", loss
    chosen, rejected = (token_losses(logits_of(model, b), b["labels"]) for b in pair)
    loss = masked_dpo_loss(
        chosen, rejected, -chosen.detach().sum(-1) - 0.5, -rejected.detach().sum(-1), *keeps[1:]
    )
    loss.backward()
    yield "dpo", loss
    yield "dpo, gradient", joined({n: p.grad for n, p in model.named_parameters()})
    sums = [-chosen.sum(-1), -rejected.sum(-1)]
    yield "dpo, omega", dpo_coefficient(*sums, sums[0] - 1, sums[1] + 1, beta=0.3)


@case("fisher")
def of_fishers(_: Path) -> Numbers:
    """Fishers by sampled responses and labels, and influence factors."""
    model = llama()
    for structure in ("diagonal", "kronecker"):
        for labels in ("sequence", "token"):
            fisher = fitted_fisher(model, structure, labels=labels)
            for name in ("fisher", "factors", "reference"):
                yield f"{structure}, {labels}/{name}", of_parameters(getattr(fisher, name))
    everything = fitted_fisher(model, parameters="all")
    yield "all parameters", of_parameters(everything.fisher)
    influence = fitted_influence(model)
    for name in ("left", "right", "eigenvalues"):
        yield f"influence/{name}", of_parameters(getattr(influence, name))


def of_parameters(tensors: Mapping[str, Any]) -> dict[str, object]:
    """A record of tensors by parameter, or of pairs of them; empty of none."""
    flat = {
        f"{name} {i}": one
        for name, tensor in tensors.items()
        for i, one in enumerate(tensor if isinstance(tensor, tuple) else (tensor,))
    }
    return joined(flat) if flat else {}


def policy_weights(name: str, mode: str) -> Tensor:
    """Weights of a policy on a batch whose log-probabilities and columns are drawn."""
    from alphatoken.train.policies import policy
    from alphatoken.train.policy import PolicyBatch, PolicySettings

    chosen = policy(name, PolicySettings(mode=mode, keep_ratio=0.4, seed=1))
    batch = padded(encoded(6, seed=31))
    mask = batch["labels"] != -100
    generator = torch.Generator().manual_seed(2)

    def drawn() -> Tensor:
        return torch.where(mask, -torch.rand(mask.shape, generator=generator) * 4, 0.0)

    entropies = {k: -drawn() for k in (3, 5, 10, 20)}
    policy_batch = PolicyBatch(
        inputs=batch,
        labels=batch["labels"],
        mask=mask,
        log_probs=drawn(),
        rank_groups=[slice(0, 3), slice(3, 6)],
        reference=drawn(),
        model=llama(),
        columns={column: drawn() for column in chosen.needs.columns},
        entropy=lambda k: entropies[k],
        step=1,
        generator=generator,
    )
    return chosen.weights(policy_batch)


@case("policies")
def of_policies(_: Path) -> Numbers:
    """Weights of each policy that needs no pass over rows, in both modes."""
    for name in DIRECT_POLICIES:
        for mode in ("native", "budget"):
            yield f"{name}, {mode}", policy_weights(name, mode)


# --- training ------------------------------------------------------------------------------------


def new_trainer(family: str, folder: Path, **more: Any) -> Any:
    """A trainer on a few rows; a model or an adapter among the options is a function."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq

    from alphatoken import train

    kinds = {
        "sft": (train.AlphaSFTTrainer, texts), "dpo": (train.AlphaDPOTrainer, pairs),
        "plain": (train.AlphaTrainer, encoded),
    }  # fmt: skip
    kind, rows = kinds[family]
    arguments: dict[str, Any] = {
        "max_steps": 3, **TRAINER_OPTIONS, "model": llama(), "processing_class": tokenizer(),
        "train_dataset": Dataset.from_list(rows(16, seed=1)),
        "validation_dataset": Dataset.from_list(rows(8, seed=2)),
    }  # fmt: skip
    if family == "plain":
        arguments["data_collator"] = DataCollatorForSeq2Seq(arguments["processing_class"])
    if family == "dpo":
        arguments["ref_model"] = llama(seed=1)
    if "retention" in more:
        arguments["retention_dataset"] = Dataset.from_list(rows(6, seed=3))
    arguments |= {name: value() if callable(value) else value for name, value in more.items()}
    return tiny.made(kind, folder / "run", **arguments)


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
    own = options.get("policy_options", {})
    if SAVED_MODEL in own.values():
        llama(seed=2).save_pretrained(folder / "saved")
        tokenizer().save_pretrained(folder / "saved")
        replaced = {k: str(folder / "saved") if v == SAVED_MODEL else v for k, v in own.items()}
        options = {**options, "policy_options": replaced}
    trainer = new_trainer(family, folder, **options)
    trainer.train()
    return outcome(trainer)


def named_policies(policies: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of a run with each of these policies."""
    return {
        f"policy {name}": {"policy": name, **({"policy_options": own} if own else {})}
        for name, own in policies.items()
    }


RETAINED = {"retention_batch_size": 4, "max_relative_drift": None}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "alphatoken": {},
        "path": {"estimator": "path"},
        "label": {"estimator": "label"},
        "label, all parameters": {"estimator": "label", **EVERYTHING},
        "walk": {"estimator": "walk", "walk_steps": 3, "layers": "3"},
        "walk, refreshed": {
            "estimator": "walk", "walk_steps": 2, "walk_refresh": 2, "layers": "3",
        },
        "diagonal": {"retention": "diagonal", **RETAINED},
        "kronecker": {"retention": "kronecker", **RETAINED},
        "data": {"retention": "data", **RETAINED},
        "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        "accumulated, global": {
            "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
            "keep_scope": "global", "kept_normalization": "kept",
        },
        "responses": {"value_unit": "response", "keep_ratio": 0.7, "kept_normalization": "sum"},
        "pool": {"validation_mode": "pool", "direction_steps": 2, "max_steps": 4},
        "own forward": {"scoring_forward": "own"},
        "frozen": {"preconditioner": "frozen", "precondition_after": 1},
        "full": {"preconditioner": "full", "precondition_after": 1},
        "packed": {"packing": True, "max_length": 64},
        "lora": {"peft_config": tiny.lora, "learning_rate": 5e-2},
        "lora, label": {"peft_config": tiny.lora, "estimator": "label", **EVERYTHING},
        "mixtral": {"model": mixtral, "uncovered": "skip"},
        "mixtral, experts": {
            "model": mixtral, "parameters": "linears,experts", "uncovered": "skip",
        },
        "dropout": {"model": partial(llama, dropout=0.1), "estimator": "path"},
        "dropout, own forward": {
            "model": partial(llama, dropout=0.1), "scoring_forward": "own",
        },
        "random": {"policy": "random"},
        "bottom": {"policy": "bottom"},
        "all": {"policy": "all"},
        **named_policies(SFT_POLICIES),
        "policy stm, budget": {"policy": "stm", "policy_mode": "budget"},
    },
    "dpo": {
        "alphatoken": {},
        "path": {"estimator": "path"},
        "label": {"estimator": "label"},
        "walk": {"estimator": "walk", "walk_steps": 2, "layers": "3"},
        "diagonal": {"retention": "diagonal", **RETAINED},
        "shared threshold": {"shared_threshold": True},
        "masked logit": {"masked_logit": True},
        "global": {
            "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
            "keep_scope": "global",
        },
        "lora": {"peft_config": tiny.lora, "learning_rate": 5e-2, "ref_model": None},
        "random": {"policy": "random"},
        "all": {"policy": "all"},
        **named_policies(PAIR_POLICIES),
    },
    "plain": {
        "alphatoken": {},
        "label": {"estimator": "label"},
        "walk": {"estimator": "walk", "walk_steps": 2, "layers": "3"},
        "diagonal": {"retention": "diagonal", **RETAINED},
        "mixtral": {"model": mixtral, "uncovered": "skip"},
        "policy dft": {"policy": "dft"},
    },
}  # fmt: skip
"""Options of runs by family and name; a model or an adapter is made when its run begins."""


for _family, _runs in RUNS.items():
    for _name, _options in _runs.items():
        CASES[f"train/{_family}/{_name}"] = partial(trained, _family, _options)


@case("train/resumed")
def resumed(folder: Path) -> Numbers:
    """Runs that were saved after two steps and went on from there in another trainer."""
    for family, options in {
        "sft": {"validation_mode": "pool", "retention": "diagonal", **RETAINED},
        "dpo": {"estimator": "label"},
        "plain": {"estimator": "walk", "walk_steps": 2, "layers": "3"},
    }.items():
        more = {**options, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        new_trainer(family, folder / family, **more).train()
        trainer = new_trainer(family, folder / family, **more)
        first = folder / family / "run" / "checkpoint-2"
        trainer.train(resume_from_checkpoint=str(first))
        yield from under(family, outcome(trainer))


# --- commands ------------------------------------------------------------------------------------


def numbers_in(value: object) -> object:
    """The numbers of a JSON document; texts and times are left out."""
    if isinstance(value, Mapping):
        return {
            key: numbers_in(one)
            for key, one in value.items()
            if not any(part in key for part in CLOCKS) and not isinstance(one, str)
        }
    if isinstance(value, list):
        return [numbers_in(one) for one in value if not isinstance(one, str)]
    return value


def of_diagnostic(name: str, folder: Path) -> Numbers:
    """Numbers in the tables and figures of one diagnosis."""
    places = world_of_files(folder)
    options: dict[str, object] = {
        "model_name_or_path": places["moved"], "reference": places["model"],
        "train_file": places["train"], "validation_file": places["validation"],
        "retention_set": [f"held={places['retention']}"], "output_dir": folder / "out",
        "per_device_train_batch_size": 4, "tokens": 80, "oracle_tokens": 6, "fisher_samples": 6,
        "tuning_steps": 3, "fisher_prompts": 4, "layers": 2, "budget": "none",
    }  # fmt: skip
    run_command("diagnose", options, name, "--quiet")
    document = json.loads((folder / "out" / name / "diagnosis.json").read_text())
    for table in (*document["tables"], *(figure["data"] for figure in document["figures"])):
        for number, column in enumerate(table["columns"]):
            cells = [numbers_in(row[number]) for row in table["rows"]]
            if not any(part in column for part in MEASURED):
                yield (
                    f"{table['key']}/{column}",
                    [one for one in cells if not isinstance(one, str)],
                )


for _name in DIAGNOSTICS:
    CASES[f"diagnose/{_name}"] = partial(of_diagnostic, _name)


@case("score")
def of_score(folder: Path) -> Numbers:
    """Value files and summaries of jobs on files."""
    places = world_of_files(folder)
    fisher = folder / "fisher.safetensors"
    prompts = jsonl(folder / "prompts.jsonl", texts(5, 47))
    sizes: dict[str, object] = {"per_device_train_batch_size": 4, "shard_size": 8}
    run_command(
        "fisher",
        {
            "model_name_or_path": places["model"], "train_file": prompts, "output_file": fisher,
            "samples": 4, "max_new_tokens": 6, "layers": 2,
        },
        "--quiet",
    )  # fmt: skip
    base = {"model_name_or_path": places["moved"], "train_file": places["train"], **sizes}
    jobs: dict[str, dict[str, object]] = {
        "alphatoken": {"validation_file": places["validation"], "fisher_file": fisher},
        "label": {"validation_file": places["validation"], "estimator": "label"},
        "walk": {"validation_file": places["validation"], "estimator": "walk", "walk_steps": 2},
        "reference": {"reference": places["model"], "estimator": "walk"},
        "chats": {"train_file": places["chats"], "validation_rows": 3, "max_length": 48},
        "queries": {"query": ["return self", "import os"], "estimator": "path"},
        "dataset": {"validation_file": places["validation"], "keep_scope": "dataset"},
    }
    for name, options in jobs.items():
        layers = {} if options.get("estimator") == "walk" else {"layers": 2}
        out = folder / name
        flags = ("--quiet", *(["--rows", "tokens"] if name == "dataset" else []))
        run_command("score", {**base, **layers, **options, "output_dir": out}, *flags)
        yield from under(name, value_files(out))
        yield f"{name}/summary", numbers_in(json.loads((out / "summary.json").read_text()))


@case("commands")
def of_training_commands(folder: Path) -> Numbers:
    """Runs by the command line: last weights, logs and value files."""
    places = world_of_files(folder)
    shared: dict[str, object] = {
        "model_name_or_path": places["model"], "max_steps": 3, "logging_steps": 1,
        "learning_rate": 1e-2, "report_to": "none", "per_device_train_batch_size": 4,
        "use_cpu": "true", "bf16": "false", "save_strategy": "no", "seed": 3, **TRAINER_OPTIONS,
    }  # fmt: skip
    files = {
        "sft": (places["train"], places["validation"]),
        "sft, chats": (places["chats"], places["validation"]),
        "dpo": (places["pairs"], places["validation_pairs"]),
    }
    for name, (train, validation) in files.items():
        out = folder / name.replace(", ", "-")
        options = {"train_file": train, "validation_file": validation, "output_dir": out}
        run_command(name[:3], {**shared, **options})
        for path in sorted(out.glob("*.safetensors")):
            yield f"{name}/{path.name}", joined(load_file(path))
        state = json.loads((out / "trainer_state.json").read_text())
        yield f"{name}/logs", numbers_in(state["log_history"])
        yield from under(name, value_files(out))


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
    entries: Entries = {}
    for name, numbers in CASES.items():
        if not (name.startswith(prefix) or prefix.startswith(name)):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            own = entries_of(name, numbers, Path(folder))
        entries |= {key: record for key, record in own.items() if key.startswith(prefix)}
        print(f"{name}: {len(own)} entries, {time.monotonic() - began:.1f} s", flush=True)
    return entries


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
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    import alphatoken

    print(f"of {Path(alphatoken.__file__).parent}")
    began = time.process_time()
    now = computed(arguments.only)
    print(f"{len(now)} entries, {time.process_time() - began:.0f} s of one processor")
    failed = [name for name in now if name.endswith(f"/{RAISED}")]
    if arguments.action == "write":
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps(now, indent=0) + "\n")
        print(*(f"{name}: {now[name]['value']}" for name in failed), sep="\n")
        return 1 if failed else 0
    then = json.loads(arguments.file.read_text())
    lines = list(differences({k: v for k, v in then.items() if k.startswith(arguments.only)}, now))
    print(*lines, f"{len(lines)} entries differ", sep="\n")
    return 1 if lines or failed else 0


if __name__ == "__main__":
    sys.exit(main())
