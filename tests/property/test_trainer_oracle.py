"""Real trainers against the slow reference step: options drawn together, and each hard one pinned.

Hypothesis draws the options of a run; the rows and weights follow from a drawn seed. A pinned
case says beside its options what must have happened in it, so that none is easier than its name.
"""

from __future__ import annotations

import copy
import gc
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.places import tiered
from tests.property.profiles import budget
from tests.property.reference_step import (
    Document,
    Micro,
    Replay,
    RunConfig,
    RunData,
    plain_attention,
    scored,
)
from tests.property.setups import refusal
from tests.property.tolerance import close

MODEL = 1e-10
"""Float64, through a whole model and up to three optimizer steps, relative to the sum of absolute
terms."""

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
WIDTH = 16
RETAINED = 5
"""Retention rows."""


Rows = dict[str, list[dict[str, Any]]]
"""Rows of each kind (train, validation, retention), as a trainer takes them."""


def made_rows(run: RunConfig) -> Rows:
    """Random rows of differing lengths, all different, gaps in some responses."""
    generator = torch.Generator().manual_seed(run.seed)
    count = 2 * run.accumulation * run.rows
    if run.packing:
        count *= 3
    make = {"sft": _sft_row, "lm": _labelled_row, "dpo": _pair}[run.family]
    sizes = {"train": count, "validation": run.validation_batch_size + 4, "retention": RETAINED}
    plain = run.policy == "random"  # responses of one length, so that masks can be compared
    return {kind: [make(generator, plain) for _ in range(size)] for kind, size in sizes.items()}


def _number(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _letters(generator: torch.Generator, low: int, high: int) -> str:
    places = torch.randint(len(ALPHABET), (_number(generator, low, high),), generator=generator)
    return "".join(ALPHABET[i] for i in places.tolist())


def _sft_row(generator: torch.Generator, plain: bool) -> dict[str, Any]:
    prompt = 1 if plain else _number(generator, 0, 3)
    response = 4 if plain else _number(generator, 3, 5)
    ids = torch.randint(4, 4 + len(ALPHABET), (prompt + response,), generator=generator).tolist()
    mask = [0] * prompt + [1] * response
    if response == 5:
        mask[-2] = 0
    return {"input_ids": ids, "completion_mask": mask}


def _labelled_row(generator: torch.Generator, plain: bool) -> dict[str, Any]:
    row = _sft_row(generator, plain)
    marks = zip(row["input_ids"], row["completion_mask"], strict=True)
    return {"input_ids": row["input_ids"], "labels": [i if m else -100 for i, m in marks]}


def _pair(generator: torch.Generator, _: bool) -> dict[str, Any]:
    prompt, chosen, rejected = (_letters(generator, *n) for n in ((1, 3), (2, 4), (3, 6)))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def documents_of(batch: Mapping[str, Any]) -> Micro:
    """The documents of a collated batch, in (row, position) order."""
    ids = batch["input_ids"].tolist()
    if "completion_mask" in batch:
        half, marks = len(ids) // 2, batch["completion_mask"].bool().tolist()
    else:
        half, marks = 0, (batch["labels"] != -100).tolist()
    documents = []
    for row, (tokens, labelled) in enumerate(zip(ids, marks, strict=True)):
        for cut in _cuts(batch, row):
            branch = 0 if not half else (1 if row < half else -1)
            pair = row % half if half else 0
            documents.append(Document(tuple(tokens[cut]), tuple(labelled[cut]), row, branch, pair))
    return tuple(documents)


def _cuts(batch: Mapping[str, Any], row: int) -> list[slice]:
    """Where the documents of a row lie: between restarts of the positions, or off the padding."""
    if "position_ids" not in batch or "attention_mask" in batch:
        return [slice(0, int(batch["attention_mask"][row].sum()))]
    positions = batch["position_ids"][row].tolist()
    starts = [i for i, p in enumerate(positions) if p == 0]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(positions)], strict=True)]


def validation_documents(items: Sequence[Any]) -> Micro:
    """The documents of a scorer's batches: of a pair the chosen one, then the rejected one."""
    documents: list[Document] = []
    for item in items:
        if not isinstance(item, Mapping) and hasattr(item, "inputs"):  # a batch that was read
            item = {**item.inputs, "labels": item.labels}
        if isinstance(item, Mapping):
            documents += [_content(d) for d in documents_of(item)]
            continue
        branches = [documents_of(dict(x)) for x in (item.chosen, item.rejected)]
        for chosen, rejected in zip(*branches, strict=True):
            documents += [_content(chosen, 1), _content(rejected, -1)]
    return tuple(documents)


def _content(document: Document, branch: int = 0) -> Document:
    return Document(document.ids, document.labelled, 0, branch)


def made_model(run: RunConfig) -> Any:
    """A Llama of two layers with grouped heads, in float64 throughout; adapted under LoRA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(run.seed)
    config = LlamaConfig(
        vocab_size=4 + len(ALPHABET),
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).double()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = _norm(), _norm()
    model.model.norm = _norm()
    return _adapted(model, run) if run.lora else model


def _norm() -> nn.Module:
    """As in transformers, but for the cast to float32 in the middle."""
    return nn.RMSNorm(WIDTH, eps=1e-6, dtype=torch.float64)


def _adapted(model: Any, run: RunConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    ).double()
    if run.seed % 2:  # B = 0 else, and with it the gradient of A at the first step
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return adapted


@cache
def _tokenizer(letters: str = ALPHABET) -> Any:
    from tests.integration.tiny_training import tokenizer

    return tokenizer(letters)


class ChunkedLogProbFunction(torch.autograd.Function):
    """TRL's fused head without its casts to float32: one node of the same name and contents."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, *_: Any
    ) -> tuple[Any, ...]:
        logits = hidden @ weight.T
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, log_z)
        ctx.compute_dtype, ctx.kernel_args = hidden.dtype, {}
        ctx.kernel_args |= {"logit_scale": 1.0, "inv_t": 1.0, "HAS_SOFTCAP": False}
        rest = [torch.zeros_like(log_z) for _ in range(3)]  # other figures of TRL's, unused here
        ctx.mark_non_differentiable(*rest)
        return logits.gather(-1, targets[:, None])[:, 0] - log_z, *rest, rest[0].bool()

    @staticmethod
    def backward(ctx: Any, error: Tensor, *_: Any) -> Any:
        hidden, weight, _, targets, log_z, _ = ctx.saved_tensors
        p = (hidden @ weight.T - log_z[:, None]).exp()
        of_logits = error[:, None] * (torch.nn.functional.one_hot(targets, len(weight)) - p)
        of_weight = of_logits.T @ hidden if ctx.needs_input_grad[1] else None
        return of_logits @ weight, of_weight, *[None] * 7


def _double_head() -> AbstractContextManager[Any]:
    utils = import_module("trl.trainer.utils")
    return mock.patch.object(utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)


@contextmanager
def _little_garbage() -> Iterator[None]:
    """accelerate collects garbage around a run, half of its time were all of it looked at."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _reference_model(model: Any) -> Any:
    """A copy with a plain attention, and without the forward that TRL has put on it."""
    from transformers import AttentionInterface

    AttentionInterface.register("alphatoken_reference", plain_attention)  # type: ignore[arg-type]
    twin = copy.deepcopy(model)
    base = twin.get_base_model() if hasattr(twin, "get_base_model") else twin
    vars(base).pop("forward", None)
    base.config._attn_implementation = "alphatoken_reference"
    return twin


@dataclass
class RunLog:
    """What was recorded of a run."""

    run: RunConfig
    start: Any = None
    fisher: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Tensor] = field(default_factory=dict)
    micro: dict[int, list[Micro]] = field(default_factory=lambda: defaultdict(list))
    drawn: dict[int, Micro] = field(default_factory=dict)
    kept_back: dict[int, Micro] = field(default_factory=dict)
    data: RunData | None = None
    all_rows: Micro = ()
    left_over: list[Any] = field(default_factory=list)
    values: dict[int, list[dict[str, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    gradients: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    ledger: dict[Any, Tensor] = field(default_factory=dict)
    visits: dict[Any, int] = field(default_factory=dict)
    logs: list[dict[str, float]] = field(default_factory=list)


APART = (
    "family", "loss", "lora", "steps", "accumulation", "rows", "layers", "seed", "beta", "packing",
)  # fmt: skip
"""Options that are no field of a trainer's configuration, or one of another form."""


def options_of(run: RunConfig) -> dict[str, Any]:
    """Fields of the trainer's configuration."""
    own = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in APART}
    if run.family == "dpo":
        own |= {"beta": run.beta, "max_length": None}
    if run.family == "sft":
        own |= {"packing": run.packing, "max_length": 16 if run.packing else None}
        # Said, since TRL does not ask rows that are tokenised already for their completion_mask.
        own |= {"loss_type": run.loss, "completion_only_loss": True}
    return own | {
        "per_device_train_batch_size": run.rows, "gradient_accumulation_steps": run.accumulation,
        "max_steps": run.steps, "layers": str(run.layers), "optim": "adamw_torch",
        "lr_scheduler_type": "linear", "value_seed": run.seed, "seed": run.seed,
    }  # fmt: skip


def made_trainer(run: RunConfig, folder: str, model: Any, **more: Any) -> Any:
    """A trainer of ours; ``more`` are options, and arguments of the trainer."""
    from datasets import Dataset

    from tests.integration import tiny_training as tiny

    family = {"sft": "SFT", "dpo": "DPO", "lm": ""}[run.family]
    rows = {f"{k}_dataset": Dataset.from_list(v) for k, v in made_rows(run).items()}
    if run.retention != "data" or run.objective == "adaptation":
        del rows["retention_dataset"]
    kind = getattr(import_module("alphatoken.train"), f"Alpha{family}Trainer")
    own = {"model": model, "processing_class": _tokenizer(), **rows, **options_of(run)}
    return tiny.made(kind, folder, **{**own, **more})


def _fisher(run: RunConfig, model: Any, log: RunLog) -> Any:
    """Random, with a reference that is not where training starts."""
    from alphatoken import FisherDrift

    generator = torch.Generator().manual_seed(run.seed + 1)
    draw = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    weights = {f"{n}.weight": m.weight.detach() for n, m in scored(model, run.layers).items()}
    shift = 0.05 if run.seed % 3 else 0.0
    log.reference = {n: w + shift * (draw(*w.shape) - 0.5) for n, w in weights.items()}
    if run.retention == "kronecker":
        log.fisher = {
            n: tuple(map(_square, map(draw, w.shape, w.shape))) for n, w in weights.items()
        }
        return FisherDrift({}, log.reference, factors=log.fisher)
    log.fisher = {n: 30 * draw(*w.shape) for n, w in weights.items()}
    return FisherDrift(log.fisher, log.reference)


def _square(rows: Tensor) -> Tensor:
    return rows.T @ rows


def trained(run: RunConfig, change: Callable[[Any], None] | None = None) -> RunLog:
    """Run the trainer, changed by its user if so, and record what goes in and what comes out."""
    from tests.integration.tiny_training import padded

    log, model = RunLog(run), made_model(run)
    uses_fisher = run.retention in ("diagonal", "kronecker") and run.objective != "adaptation"
    fisher = _fisher(run, model, log) if uses_fisher and run.policy != "random" else None
    more: dict[str, Any] = {"fisher": fisher}
    if run.family == "dpo" and not run.lora:
        more["ref_model"] = copy.deepcopy(model)
    if run.family == "lm":
        more["data_collator"] = padded
    with tempfile.TemporaryDirectory() as folder, _double_head(), _little_garbage():
        trainer = made_trainer(run, folder, model, **more)
        log.start = _reference_model(trainer.model)
        if fisher is None:
            modules = scored(log.start, run.layers)
            log.reference = {f"{n}.weight": m.weight.detach().clone() for n, m in modules.items()}
        _listen(trainer, log)
        if change is not None:
            change(trainer)
        trainer.train()
    _read_ledger(trainer, log)
    log.left_over = list(getattr(trainer, "_metrics", {}).get("eval", {}).values())
    log.logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    _record_data(trainer, log)
    return log


def _listen(trainer: Any, log: RunLog) -> None:
    """Put ears on the trainer; none changes what it does."""
    from transformers import TrainerCallback

    compute, records, weigher = trainer.compute_loss, trainer.records, trainer.weigher
    record, valuation = records.micro_batch, getattr(weigher, "valuation", None)

    def heard_loss(model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Any:
        log.micro[trainer.state.global_step].append(documents_of(inputs))
        return compute(model, inputs, *args, **more)

    def heard_record(batch: Any, values: Any, weights: Tensor, factor: Any, **more: Any) -> None:
        step, mask = trainer.state.global_step, batch.mask
        parts = {} if values is None else {"total": values.total, **values.components()}
        log.values[step].append({n: v[mask].double() for n, v in parts.items()})
        log.weights[step].append(weights[mask].double())
        record(batch, values, weights, factor, **more)

    def heard_build() -> Any:
        scorer = build()
        for setter, data in (
            (scorer.set_validation, log.drawn),
            (scorer.set_retention, log.kept_back),
        ):
            _overhear(scorer, setter, data, trainer)
        return scorer

    class Ears(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            log.gradients.append(_flat(trainer.model, lambda p: p.grad))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            log.parameters.append(_flat(trainer.model, lambda p: p.detach()))

    trainer.compute_loss, records.micro_batch = heard_loss, heard_record
    records.write_results = lambda: None
    if valuation is not None:
        build, valuation._build = valuation._build, heard_build
    trainer.add_callback(Ears())


def _overhear(scorer: Any, setter: Any, rows: dict[int, Micro], trainer: Any) -> None:
    def heard(items: Any) -> None:
        rows[trainer.state.global_step] = validation_documents(items)
        setter(items)

    setattr(scorer, setter.__name__, heard)


def _flat(model: Any, of: Any) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if of(p) is None else of(p)).reshape(-1).double().clone()
            for p in model.parameters()
            if p.requires_grad
        ]
    )


def _read_ledger(trainer: Any, log: RunLog) -> None:
    for entry in trainer.ledger.documents.values():
        places = zip(entry.positions.tolist(), entry.ids[entry.positions].tolist(), strict=True)
        key = (0, 1, -1)[entry.branch], tuple(places)
        assert key not in log.ledger, "two documents of the ledger look the same"
        log.ledger[key] = torch.from_numpy(entry.sums.copy())
        log.visits[key] = entry.visits


def _record_data(trainer: Any, log: RunLog) -> None:
    """Record for the reference the micro-batches, and the rows that each step was measured by."""
    run = log.run
    pool = trainer.valuation.pool if trainer.args.needs_values else None
    rows = trainer.rows.validation

    def documents(chosen: Sequence[int]) -> Micro:
        return validation_documents([trainer.row_batch([rows[i] for i in chosen])])

    validation: list[Micro] = [() for _ in range(run.steps)]
    held_out: Micro = ()
    if pool is not None:
        validation = [documents(pool.rows(step)) for step in range(run.steps)]
        held_out = documents(pool.held_out) if pool.held_out else ()
        for step, drawn in log.drawn.items():
            validation[step] = drawn
    retention = [log.kept_back.get(step, ()) for step in range(run.steps)]
    weights = tuple(map(tuple, log.weights.values())) if run.policy == "random" else ()
    micro = tuple(map(tuple, log.micro.values()))
    log.data = RunData(micro, tuple(validation), tuple(retention), held_out, weights)
    log.all_rows = documents(range(len(rows))) if rows else ()


_replays: dict[Any, Replay] = {}


def replayed(log: RunLog) -> Replay:
    """The reference's run; the same question is not worked out twice."""
    data = log.data
    assert data is not None
    key = log.run, data.micro, data.validation, data.retention, data.held_out
    if key in _replays and not data.weights:
        return _replays[key]
    if len(_replays) > 40:
        _replays.clear()
    replay = Replay(log.run, log.start, data, log.fisher, log.reference)
    _replays[key] = replay
    return replay


def compared(run: RunConfig) -> tuple[RunLog, Replay]:
    """Both runs, once they agree."""
    log = trained(run)
    _check_rows(log)
    assert not log.left_over, "a scoring pass has left something in the trainer's own metrics"
    replay = replayed(log)
    assert len(log.gradients) == len(log.parameters) == len(log.logs) == run.steps
    for step, expected in enumerate(replay.steps):
        _compare_values(log, step, expected)
        _compare_weights(log, replay, step)
        close(
            log.gradients[step], expected.gradient, expected.gradient_scale, MODEL, name="gradient"
        )
        close(
            log.parameters[step],
            expected.parameters,
            expected.parameters.abs() + run.learning_rate,
            MODEL,
            name="parameters",
        )
        _compare_logs(log.logs[step], expected.logs)
    _compare_ledger(log, replay)
    return log, replay


def _check_rows(log: RunLog) -> None:
    """The rows that a step is measured against: as many as configured, none twice, never one that
    is held out; the same at every step, or each once before any comes again."""
    run, data = log.run, log.data
    assert data is not None
    if run.policy == "random":
        return
    due = list(range(0, run.steps, run.direction_steps))
    if run.retention == "data" and run.objective != "adaptation":
        assert sorted(log.kept_back) == due
        branches = 2 if run.family == "dpo" else 1
        kept_back = [log.kept_back[step] for step in (due if run.direction_steps == 1 else [0])]
        _check_stream(kept_back, branches * run.retention_batch_size, branches * RETAINED)
    if run.objective == "stability":
        assert not log.drawn
        return
    assert sorted(log.drawn) == due
    branches = 2 if run.family == "dpo" else 1
    share = run.held_out_share if run.held_out_steps else 0.0
    count = len(log.all_rows) // branches
    held_count = max(1, round(share * count)) if share else 0
    assert len(data.held_out) == branches * held_count
    drawn = [row for step in data.validation for row in step]
    assert not set(data.held_out) & set(drawn), "a held_count-out row was drawn"
    size = branches * run.validation_batch_size
    if run.validation_mode == "pool":
        _check_stream(data.validation, size, len(log.all_rows) - len(data.held_out))
    else:
        assert len(set(data.validation)) == 1
        assert len(drawn) == size * run.steps == len(set(drawn)) * run.steps


def _check_stream(batches: Sequence[Micro], size: int, whole: int) -> None:
    """Batches of this many documents, none twice in one, and all before any comes again."""
    drawn = [document for batch in batches for document in batch]
    assert {len(batch) for batch in batches} == {len(set(batch)) for batch in batches} == {size}
    epoch = min(whole, len(drawn))
    assert len(set(drawn[:epoch])) == epoch, "a row came again before all had come"


def _compare_weights(log: RunLog, replay: Replay, step: int) -> None:
    if log.run.policy == "random":
        for micro, trained_with in zip(replay.data.micro[step], log.weights[step], strict=True):
            for pool in replay.rank_groups(micro):
                assert set(trained_with.tolist()) <= {0.0, 1.0}
                assert float(trained_with[pool].sum()) == math.ceil(replay.ratio * len(pool))
        return
    for trained_with, weights in zip(log.weights[step], replay.steps[step].chosen, strict=True):
        close(trained_with, weights, 1.0, 0.0, name="weights")


def _compare_values(log: RunLog, step: int, expected: Any) -> None:
    if log.run.policy == "random":
        assert not any(log.values[step]), "nothing is valued"
        return
    for components, values, scales in zip(
        log.values[step], expected.values, expected.scales, strict=True
    ):
        assert components.keys() == values.keys(), sorted(components)
        for name, value in components.items():
            close(value, values[name], scales[name], MODEL, name=name)


def _compare_logs(entry: Mapping[str, float], expected: Mapping[str, float]) -> None:
    for name, number in expected.items():
        assert name in entry, f"no {name} in the log"
        close(entry[name], number, abs(number) + 1e-4, 1e-6, name=name)


def _compare_ledger(log: RunLog, replay: Replay) -> None:
    assert log.visits == replay.visits, "visits of the ledger"
    for key, (table, sizes) in replay.ledger.items():
        close(log.ledger[key], table, sizes, MODEL, name="ledger")


@pytest.fixture(autouse=True)
def trainers() -> None:
    """Skip where the trainers' libraries are missing."""
    for name in ("trl", "peft"):
        pytest.importorskip(name, reason=f"the trainers need {name}")


Happened = Callable[[RunLog, Replay], bool]


def moved(log: RunLog, replay: Replay) -> bool:
    """Three steps, each with a gradient."""
    return all(step.norm > 0 for step in replay.steps)


def clipped(log: RunLog, replay: Replay) -> bool:
    """The last step's gradient was cut to less than half."""
    return 0 < replay.clip < 0.5


def unequal(log: RunLog, replay: Replay) -> bool:
    """Pairs differ in omega by a tenth."""
    return max(replay.omegas) > 1.1 * min(replay.omegas)


def packed(log: RunLog, replay: Replay) -> bool:
    """A micro-batch is one row of more documents than it was given rows."""
    return all(
        len(micro) > log.run.rows and {d.row for d in micro} == {0}
        for step in replay.data.micro
        for micro in step
    )


def uneven(log: RunLog, replay: Replay) -> bool:
    """Micro-batches of a step keep different shares, so that it matters which count divides."""
    shares = [[float(w.mean()) for w in step.weights] for step in replay.steps]
    return any(max(of_step) - min(of_step) > 0.005 for of_step in shares)


def tied(log: RunLog, replay: Replay) -> bool:
    """All values of the first step are zero: the weights are the reference's."""
    return all(not bool(values["total"].any()) for values in replay.steps[0].values)


def drawn_anew(log: RunLog, replay: Replay) -> bool:
    """Steps are measured against different rows."""
    return len(set(replay.data.validation)) == log.run.steps


PINNED: dict[str, tuple[RunConfig, Happened]] = {
    "the paper's, SFT": (RunConfig(estimator="alphatoken", layers=2), moved),
    "the paper's, DPO": (RunConfig("dpo", estimator="alphatoken", layers=2, seed=1), unequal),
    "LoRA": (RunConfig(lora=True, estimator="alphatoken", seed=1), moved),
    "clipping, full preconditioner": (
        RunConfig(preconditioner="full", max_grad_norm=0.1), clipped
    ),
    "full preconditioner of a sum": (
        RunConfig(preconditioner="full", kept_normalization="sum", max_grad_norm=1e9), moved
    ),
    "full preconditioner, DPO, one threshold": (
        RunConfig("dpo", preconditioner="full", shared_threshold=True, max_grad_norm=0.02), clipped
    ),
    "kept normalisation": (RunConfig(kept_normalization="kept", max_grad_norm=1e9, seed=4), uneven),
    "kept normalisation, DPO": (
        RunConfig("dpo", kept_normalization="kept", max_grad_norm=1e9), uneven
    ),
    "kept normalisation over a global threshold": (
        RunConfig(kept_normalization="kept", keep_scope="global", max_grad_norm=1e9, seed=2), uneven
    ),
    "masked logit": (RunConfig("dpo", masked_logit=True, kept_normalization="kept"), unequal),
    "packing": (RunConfig(packing=True, estimator="path"), packed),
    "packing, own forward": (
        RunConfig(packing=True, estimator="direct", scoring_forward="own", lora=True), packed
    ),
    "pool, micro-batches of validation": (
        RunConfig(validation_mode="pool", validation_micro_batch_size=2), drawn_anew
    ),
    "direction for two steps": (
        RunConfig(direction_steps=2, validation_mode="pool", preconditioner="frozen"), drawn_anew
    ),
    "global threshold, DPO": (RunConfig("dpo", keep_scope="global", estimator="path"), unequal),
    "stability alone, all tied at first": (RunConfig(objective="stability", seed=3), tied),
    "Kronecker retention": (RunConfig(retention="kronecker", seed=1), moved),
    "retention by rows": (RunConfig(retention="data", stability_weight=0.7), moved),
    "retention by pairs": (RunConfig("dpo", retention="data"), unequal),
    "whole responses, the worst": (RunConfig(value_unit="response", policy="bottom"), moved),
    "transformers' own trainer": (RunConfig("lm", kept_normalization="sum", lora=True), moved),
    "all tokens": (RunConfig(policy="all"), moved),
    "random": (RunConfig(policy="random", kept_normalization="kept"), moved),
    "DFT": (RunConfig(loss="dft", layers=2, preconditioner="full", max_grad_norm=1e9), moved),
}  # fmt: skip


# One of each structure: values by propagation, pairs, packed rows under an adapter, weights that
# one threshold decides before any backward, the optimizer's derivative, the trainer without TRL.
FAST = (
    "the paper's, SFT",
    "the paper's, DPO",
    "packing, own forward",
    "kept normalisation over a global threshold",
    "clipping, full preconditioner",
    "transformers' own trainer",
)


@pytest.mark.parametrize("name", tiered(PINNED, FAST))
def test_a_pinned_run_is_the_references(name: str) -> None:
    run, happened = PINNED[name]
    assert happened(*compared(run)), f"nothing of the kind happened: {happened.__doc__}"


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Any options that may stand together."""
    pick: Callable[..., Any] = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    family = pick("sft", "sft", "dpo", "dpo", "dpo", "lm")
    dpo = family == "dpo"
    packing = family == "sft" and pick(False, False, True)
    scope = pick("batch", "global")
    whole = not packing and pick(False, False, True)
    accumulation, rows = pick((2, 2), (1, 3), (3, 1))
    preconditioner = pick(None, "frozen", "full")
    objective = pick("both", "both", "adaptation", "stability")
    kinds = ("diagonal", "kronecker", "data")
    estimator = pick("label", "direct", "path", "alphatoken")
    divisors = ("response", "sum") if family != "dpo" else ("response",)
    return RunConfig(
        family=family,
        loss=pick("nll", "dft") if family == "sft" and estimator == "label" else "nll",
        lora=draw(st.booleans()),
        accumulation=accumulation,
        rows=rows,
        estimator=estimator,
        layers=pick(1, 2),
        objective=objective,
        window=pick(None, 1, 3),
        policy=pick("top", "top", "bottom"),
        keep_ratio=pick(0.5, 0.3, 0.7, 1.0),
        keep_scope=scope,
        value_unit="response" if whole else "token",
        kept_normalization=pick(*divisors, "kept"),
        shared_threshold=dpo and draw(st.booleans()),
        masked_logit=dpo and draw(st.booleans()),
        retention=pick(*kinds) if objective == "stability" else pick("none", *kinds),
        preconditioner=preconditioner,
        precondition_after=pick(1, 2),
        validation_mode=pick("fixed", "pool"),
        validation_micro_batch_size=pick(None, 2),
        held_out_steps=pick(0, 1, 2),
        direction_steps=pick(1, 1, 2),
        scoring_forward=pick("auto", "own"),
        packing=packing,
        max_grad_norm=pick(0.05, 1e9),
        seed=draw(st.integers(0, 99)),
    )


# Of rows drawn at random a few.
@pytest.mark.filterwarnings("ignore:validation rows label", "ignore:.* rows repeat a")
@settings(budget(0.15, least=2), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(run=runs())
def test_the_trainer_is_the_reference(run: RunConfig) -> None:
    """Values, weights, the gradient handed to the optimizer, the update, the ledger and the logs
    of a real run are those of the slow reference, step by step.

    Proves: eqs. phi_total, sft_masked_loss, dpo_masked_loss (exact), against reference_step.py.
    """
    compared(run)


@pytest.mark.parametrize("run", [RunConfig(policy="random")])
def test_random_masks(run: RunConfig) -> None:
    """A random mask is another one at each micro-batch and each step, and the same in a second run;
    another seed gives others.

    Proves: random masks (exact), against masks of two runs.
    """
    first, again, other = (
        [[w.tolist() for w in step] for step in trained(replace(run, seed=seed)).weights.values()]
        for seed in (run.seed, run.seed, run.seed + 100)
    )
    assert first == again, "a second run draws other masks"
    assert first != other, "the seed does not matter"
    assert any(one != two for one, two, *_ in first), "micro-batches of a step draw the same"
    assert any(step[0] != first[0][0] for step in first), "steps draw the same"


@pytest.mark.parametrize("run", [RunConfig(policy="random")])
def test_every_step_is_weighed(run: RunConfig) -> None:
    """A loss is not handed out with outputs beside it, and a step with a loss of the user's own is
    not taken.

    Proves: every step is weighed (exact), against a run without outputs.
    """
    from alphatoken.errors import UnsupportedError

    def with_outputs(trainer: Any) -> None:
        compute = trainer.compute_loss
        trainer.compute_loss = lambda *args, **more: compute(
            *args, **{**more, "return_outputs": True}
        )[0]

    def own_loss(trainer: Any) -> None:
        trainer.compute_loss = lambda model, inputs, *args, **more: model(**inputs).loss

    for own in (with_outputs, own_loss):
        error = refusal(partial(trained, run, own))
        assert isinstance(error, UnsupportedError), f"a step was taken under {own.__name__}"
