"""One cell: train, merge or take a model as it is, then measure; the result is written last."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import nn
from transformers import TrainerCallback

from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.model.batch import label_mask
from alphatoken.support.progress import is_first_process
from alphatoken.support.storage import read_json, replacing_folder, try_lock, write_json, write_text
from alphatoken.train.distributed import SHARDED, Ranks, layout
from alphatoken.train.policies import TRAINER_POLICIES
from alphatoken_lab.measure.measures import Measures
from alphatoken_lab.measure.measuring import measure, prepare
from alphatoken_lab.measure.pair_watch import OPTION, watch_pairs
from alphatoken_lab.measure.selection_cost import measured_selection
from alphatoken_lab.methods.merge import merge_models
from alphatoken_lab.runner.grid import left_out
from alphatoken_lab.runner.launchers import for_processes
from alphatoken_lab.runner.running import COLLECTED

_COST = (
    "steps", "kept_tokens", "response_tokens", "effective_tokens", "kept_share", "time",
    "scoring_time", "direction_time", "setup_time", "peak_memory", "peak_memory_of",
    "static_time", "selection_memory", "epoch_steps",
)  # fmt: skip


def run_cell(path: Path) -> int:
    """Run the cell of a folder, with ``cell.json``, and write its ``result.json``; exit status.

    What is compared differs in training alone: a model that is not trained is loaded with dtype,
    attention, revision and template of the trainer's.

    Raises:
        AlphaTokenError: whatever is wrong with options, rows or models.
    """
    spec = read_json(path / "cell.json")
    if spec is None:
        raise ConfigError("there is no cell in this folder", got=str(path))
    whole = not spec["keep_model"] or (path / "model").is_dir()
    if (path / "result.json").exists() and whole:  # it was queued twice
        return 0
    lock = try_lock(path / "lock") if is_first_process() else None
    if is_first_process() and lock is None:
        raise ConfigError("another process is at work on this cell", got=str(path))
    try:
        _run(path, spec)
    except AlphaTokenError:
        raise
    except Exception as error:  # the whole of it is in the log; its last line is in the table
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        return 3
    return 0


def _run(path: Path, spec: dict[str, Any]) -> None:
    begun = time.perf_counter()
    loaded = partial(_load, path, spec)
    result: dict[str, Any] = {}
    measures = None if spec["measures"] is None else Measures(**spec["measures"])
    prepared = None  # whatever the model is measured on is read before it is trained
    if measures is not None and is_first_process():
        prepared = prepare(measures, spec["command"])
    if spec["kind"] == "train":
        model, tokenizer, result = _train(spec, path, loaded)
        if not is_first_process():
            return
    elif spec["kind"] == "merge":
        base, tokenizer = loaded()
        model, _ = loaded(spec["resolved"]["merged"])
        merge_models(base, model, float(spec["resolved"]["alpha"]))
        # The cost is that of training the merged model; merging itself costs next to nothing.
        trained = read_json(Path(spec["resolved"]["merged"]).parent / "result.json") or {}
        result = {name: trained[name] for name in _COST if name in trained}
    else:
        model, tokenizer = loaded()
        result = {"kept_tokens": 0, "response_tokens": 0}
    if measures is not None and prepared is not None:
        result |= measure(
            model,
            tokenizer,
            measures,
            prepared,
            start=lambda: loaded()[0],
            folder=path,
            name=path.name,
            beta=float(spec["resolved"].get("beta", 0.1)),
        )
    own = {name: spec[name] for name in ("task", "policy", "mode", "seed", "kind", "command")}
    described = {key: value for key, value in spec.items() if key != "resolved"}
    seconds = time.perf_counter() - begun
    result = {**own, "status": "done", **result, "seconds": seconds, "spec": described}
    write_json(path / "result.json", result)
    for name in ("run", "counts"):  # checkpoints of a cell that is done, and what they counted
        shutil.rmtree(path / name, ignore_errors=True)


# --- training -----------------------------------------------------------------------------------


def _train(
    spec: Mapping[str, Any], path: Path, loaded: Callable[..., tuple[nn.Module, Any]]
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The trained model, its tokenizer, and what training cost."""
    with measured_selection() as selection:
        trainer, setup = _build(spec, path)
        static = selection.seconds
        counter = TokenCounter(trainer, path / "counts")
        counter.add_earlier(getattr(trainer.token_policy, "summary", {}))
        selection.restart()
        checkpoints = list((path / "run").glob("checkpoint-*"))
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint="auto" if checkpoints else None)
        counter.seconds += time.perf_counter() - began
        peak = selection.whole()
    counter.gather()
    result = {
        "steps": trainer.state.global_step,
        "kept_tokens": counter.kept,
        "response_tokens": counter.response,
        "effective_tokens": counter.effective,
        "kept_share": counter.kept / max(counter.response, 1),
        "time": counter.seconds,
        "scoring_time": counter.scoring,
        "direction_time": counter.direction,
        "setup_time": setup,
        "static_time": static,
        "epoch_steps": _epoch_steps(trainer),
        "peak_memory": peak,
        "peak_memory_of": selection.kind,
        "selection_memory": selection.selection(),
        "notes": counter.notes,
    }
    if trainer.rows.fisher is not None:  # by which its file is told from others of the grid
        result["fisher"] = trainer.rows.fisher.metadata.get("cache_key")
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    if layout(trainer.accelerator) in SHARDED:
        trainer.save_model(str(path / "run" / "whole"))  # all processes: each gives its part
        model = loaded(str(path / "run" / "whole"))[0] if is_first_process() else model
    if is_first_process() and spec["keep_model"]:
        with replacing_folder(path / "model") as folder:
            _without_adapters(model).save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
    return model, trainer.processing_class, result


def _build(spec: Mapping[str, Any], path: Path) -> tuple[Any, float]:
    """The trainer that ``alphatoken sft --config CELL/recipe.yaml`` would make, and the seconds.

    Raises:
        ConfigError: adapters on sharded weights.
    """
    from alphatoken.cli.training import build_trainer, trainer_of

    command, options = spec["command"], spec["resolved"]
    by_name = options.get("policy") not in TRAINER_POLICIES
    # Static passes of one policy in two cells would write the same files.
    building = path / "building"
    if by_name and not is_first_process():  # or a collective would wait for the first, with a limit
        while not building.exists():
            time.sleep(0.1)
    alone = by_name and is_first_process()
    with FileLock(path.parent.parent / "setup.lock") if alone else nullcontext():
        building.touch()
        begun = time.perf_counter()
        trainer, notes = build_trainer(_arguments(path, command, options), trainer_of(command)[1])
        for note in notes:
            print(f"note: {note}")
        if options.get(OPTION):
            trainer.add_callback(watch_pairs(trainer, path / COLLECTED, int(options[OPTION])))
        setup = time.perf_counter() - begun
    if layout(trainer.accelerator) in SHARDED and hasattr(trainer.model, "peft_config"):
        raise ConfigError(
            "a cell cannot measure adapters on sharded weights",
            got=f"{layout(trainer.accelerator)}, use_peft",
            why="what is saved are the adapters alone, and no process has the whole model",
            remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
        )
    return trainer, setup


def _load(path: Path, spec: Mapping[str, Any], folder: str | None = None) -> tuple[Any, Any]:
    """A model that is not trained here, as the cell's trainer would load it, and its tokenizer.

    ``folder`` is of another model with the same options, such as a trained one.
    """
    from trl.trainer.utils import get_quantization_config

    from alphatoken.cli.training import load_tokenizer, model_options
    from alphatoken.model.loading import load_for_training

    # Those of merging are none of the trainer's.
    options = {k: v for k, v in spec["resolved"].items() if k not in ("merged", "alpha")}
    arguments = _arguments(path, spec["command"], options)
    own = model_options(arguments)
    quantization = get_quantization_config(arguments.model)
    if quantization is not None and folder is None:
        own["quantization_config"] = quantization
    if folder is not None:
        own.pop("revision")
    model: Any = load_for_training(folder or arguments.model.model_name_or_path, **own)
    if quantization is None:
        model = model.to(arguments.training.device)
    return model.eval(), load_tokenizer(arguments)


def _arguments(path: Path, command: str, options: Mapping[str, Any]) -> Any:
    # Read as a user's would be, who runs the recipe that stands in the folder.
    import yaml

    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training import trainer_of

    shared = path.parent.parent
    own = {
        "fisher_cache": str(shared / "fishers"),
        "policy_cache": str(shared / "policies"),
        **for_processes(options, int(os.environ.get("WORLD_SIZE", "1"))),
        "output_dir": str(path / "run"),
    }
    for name in (OPTION, *left_out(options, command)):  # that of a callback, and others
        own.pop(name, None)
    recipe = path / "recipe.yaml"
    write_text(recipe, yaml.safe_dump(own, sort_keys=False))  # by each process, the same
    return read_arguments(command, ["--config", str(recipe)], trainer_of(command)[0])


def _epoch_steps(trainer: Any) -> float | None:
    args, rows = trainer.args, trainer.train_dataset
    if not hasattr(rows, "__len__"):
        return None  # a stream has no epochs
    together = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return float(len(rows) / together)


def _without_adapters(model: Any) -> Any:
    # Who needs the model loads it as a whole one; a copy is merged, since this one is measured.
    if not hasattr(model, "merge_and_unload"):
        return model
    import copy

    return copy.deepcopy(model).merge_and_unload()


# --- what training cost -------------------------------------------------------------------------


class TokenCounter(TrainerCallback):
    """Counts what is trained on, over all micro-batches; saved with each checkpoint.

    Attributes:
        response: response tokens that the model saw.
        kept: of these, tokens with a weight other than 0.
        effective: ``(sum w)^2 / sum w^2`` of each micro-batch, summed: what soft weights amount to.
        scoring: seconds spent on values, or on a policy's weights.
        direction: seconds spent on the validation and retention gradients.
        seconds: of training, in earlier runs of the cell.
        notes: what a reader of the numbers should know.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.response = self.kept = 0
        self.effective = self.scoring = self.direction = self.seconds = 0.0
        self.notes: list[str] = []
        self._folder, self._begun, self._has_weights = folder, time.perf_counter(), False
        self._trainer = trainer
        trainer.compute_loss = partial(self._compute_loss, trainer.compute_loss)
        trainer.monitor.record = partial(self._record, trainer.monitor.record)
        for name in ("scoring", "direction"):
            add = partial(self._add_seconds, name, getattr(trainer.monitor, name))
            setattr(trainer.monitor, name, add)
        trainer.add_callback(self)

    def gather(self) -> None:
        """Count what the other processes trained on as well."""
        names = ("response", "kept", "effective")
        of_all = Ranks(self._trainer.accelerator).gather_objects([getattr(self, n) for n in names])
        for name, values in zip(names, zip(*of_all, strict=True), strict=True):
            setattr(self, name, sum(values))

    def _place(self, step: int) -> Path:
        rank = self._trainer.accelerator.process_index
        return self._folder / (f"{step}-{rank}.json" if rank else f"{step}.json")

    def add_earlier(self, summary: Mapping[str, float]) -> None:
        """Count what a policy trained on before this run, such as earlier rounds."""
        if not self._trainer.accelerator.is_main_process:
            return  # counted once, by the first process
        tokens, kept = (int(summary.get(f"earlier_{name}", 0)) for name in ("tokens", "kept"))
        self.response, self.kept = self.response + tokens, self.kept + kept
        self.effective += kept

    def _compute_loss(self, inner: Callable[..., Any], model: Any, inputs: Any, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
        self._has_weights = False
        labels = self._trainer.response_labels(inputs) if model.training else None
        loss = inner(model, inputs, *a, **k)
        if labels is not None and not self._has_weights:  # no weights: every token counts
            count = int(label_mask(labels).sum())
            self.response, self.kept = self.response + count, self.kept + count
            self.effective += count
        return loss

    def _record(self, inner: Callable[..., None], *args: Any, **named: Any) -> None:
        weights = named["weights"].detach() * named["mask"]
        self._has_weights = True
        self.response += int(named["mask"].sum())
        self.kept += int((weights != 0).sum())
        squares = float(weights.double().square().sum())
        self.effective += float(weights.double().sum()) ** 2 / squares if squares else 0.0
        inner(*args, **named)

    def _add_seconds(self, name: str, inner: Callable[[float], None], seconds: float) -> None:
        setattr(self, name, getattr(self, name) + seconds)
        inner(seconds)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the counts up to a checkpoint beside it."""
        self._folder.mkdir(exist_ok=True, parents=True)
        names = ("response", "kept", "effective", "scoring", "direction")
        seconds = self.seconds + time.perf_counter() - self._begun
        counts = {**{name: getattr(self, name) for name in names}, "seconds": seconds}
        write_json(self._place(state.global_step), counts)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A run that goes on takes up the counts of its checkpoint."""
        self._begun = time.perf_counter()
        if not state.global_step:
            return
        counts = read_json(self._place(state.global_step))
        for name, value in (counts or {}).items():
            setattr(self, name, value)
        self.notes.append(
            f"went on after step {state.global_step}"
            + ("" if counts else "; tokens and time before it were not counted")
        )
