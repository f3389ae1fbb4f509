"""One cell: train, merge or take a model as it is, then measure; the result is written last."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import nn
from transformers import TrainerCallback

from alphatoken.errors import ConfigError
from alphatoken.model.batch import label_mask
from alphatoken.support.storage import read_json, write_json
from alphatoken.train.distributed import Ranks
from alphatoken.train.layouts import SHARDED, layout
from alphatoken.train.policies import TRAINER_POLICIES
from alphatoken_lab.compare.evaluate import measure, read_files
from alphatoken_lab.compare.folder import CellFolder
from alphatoken_lab.compare.measures import Measures
from alphatoken_lab.compare.scores import prepare
from alphatoken_lab.compare.selection_cost import measured_selection
from alphatoken_lab.methods.merge import merge_models

__all__ = ["TokenCounter", "run_cell"]

_COST = (
    "steps", "kept_tokens", "response_tokens", "effective_tokens", "kept_share", "time",
    "scoring_time", "direction_time", "setup_time", "peak_memory", "peak_memory_of",
    "static_time", "selection_memory", "epoch_steps",
)  # fmt: skip

Build = Callable[[Path, str, Mapping[str, Any]], Any]
"""(folder of the cell, command, options) -> a trainer with its model and data."""

Load = Callable[..., tuple[nn.Module, Any]]
"""The same and, if it is another one, the model's folder -> a model and the run's tokenizer."""


def run_cell(
    path: Path, build: Build, load: Load, *, code_container: str | None = None
) -> dict[str, Any]:
    """Run the cell of a folder and write its ``result.json``.

    Args:
        path: folder of the cell, with ``cell.json``.
        build: makes the trainer; the command line's, so that a cell is what ``alphatoken sft`` or
            ``dpo`` would train with the same options.
        load: a model that is not trained here, with dtype, attention, revision and template of the
            trainer's: what is compared differs in training alone.
        code_container: image in which generated code is executed, by lm-eval.

    Raises:
        AlphaTokenError: whatever is wrong with options, rows or models.
    """
    begun = time.perf_counter()
    folder = CellFolder(path)
    spec = folder.spec()
    loaded = partial(load, path, spec["command"], _plain(spec["resolved"]))
    found: dict[str, Any] = {}
    measures = None if spec["measures"] is None else Measures(**spec["measures"])
    ready = None  # what is asked of the model is read before it is trained
    if measures is not None and _first():
        read_files(measures, spec["command"])
        ready = prepare(measures, code_container=code_container)
    if spec["kind"] == "train":
        model, tokenizer, found = _train(spec, folder, build, loaded)
        if not _first():
            return found
    elif spec["kind"] == "merge":
        base, tokenizer = loaded()
        model, _ = loaded(spec["resolved"]["merged"])
        merge_models(base, model, float(spec["resolved"]["alpha"]))
        found = _cost_of(Path(spec["resolved"]["merged"]).parent)
    else:
        model, tokenizer = loaded()
        found = {"kept_tokens": 0, "response_tokens": 0}
    if measures is not None:
        found |= measure(
            model,
            tokenizer,
            measures,
            command=spec["command"],
            start=lambda: loaded()[0],
            beta=float(spec["resolved"].get("beta", 0.1)),
            folder=path,
            code_container=code_container,
            prepared=ready,
        )
    own = {name: spec[name] for name in ("task", "policy", "mode", "seed", "kind", "command")}
    seconds = time.perf_counter() - begun
    asked = {key: value for key, value in spec.items() if key != "resolved"}
    result = {**own, "status": "done", **found, "seconds": seconds, "spec": asked}
    write_json(path / "result.json", result)
    for name in ("run", "counts"):  # checkpoints of a cell that is done, and what they counted
        shutil.rmtree(path / name, ignore_errors=True)
    return result


def _first() -> bool:
    """True if this is the process that measures: the only one, or the first of a launcher's."""
    return os.environ.get("RANK", "0") == "0"


def _train(
    spec: Mapping[str, Any], folder: CellFolder, build: Build, loaded: Load
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The trained model, its tokenizer, and what training cost."""
    with measured_selection() as selection:
        trainer, setup = _built(spec, folder, build)
        static = selection.seconds
        counter = TokenCounter(trainer, folder.path / "counts")
        counter.add_earlier(getattr(trainer.token_policy, "summary", {}))
        selection.restart()
        checkpoints = list((folder.path / "run").glob("checkpoint-*"))
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint="auto" if checkpoints else None)
        counter.seconds += time.perf_counter() - began
        peak = selection.whole()
    counter.gather()
    found = {
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
    if trainer.rows.fisher is not None:  # by which its file is found among those of the grid
        found["fisher"] = trainer.rows.fisher.metadata.get("cache_key")
    model = _trained(trainer, folder, loaded)
    if _first() and spec["keep_model"]:
        partial_folder = folder.path / "model.partial"
        shutil.rmtree(partial_folder, ignore_errors=True)
        _whole(model).save_pretrained(partial_folder)
        trainer.processing_class.save_pretrained(partial_folder)
        partial_folder.rename(folder.model)
    return model, trainer.processing_class, found


def _built(spec: Mapping[str, Any], folder: CellFolder, build: Build) -> tuple[Any, float]:
    """The trainer, its static pass done, and the seconds that this took.

    Raises:
        ConfigError: adapters on sharded weights.
    """
    options = spec["resolved"]
    by_name = options.get("policy") not in TRAINER_POLICIES
    # Static passes of one policy in two cells would write the same files.
    building = folder.path / "building"
    if by_name and not _first():  # or a collective would wait for the first, with a limit
        while not building.exists():
            time.sleep(0.1)
    alone = by_name and _first()
    with FileLock(folder.path.parent.parent / "setup.lock") if alone else nullcontext():
        building.touch()
        begun = time.perf_counter()
        trainer = build(folder.path, spec["command"], spec["resolved"])
        setup = time.perf_counter() - begun
    if layout(trainer.accelerator) in SHARDED and hasattr(trainer.model, "peft_config"):
        raise ConfigError(
            "a cell cannot measure adapters on sharded weights",
            got=f"{layout(trainer.accelerator)}, use_peft",
            why="what is saved are the adapters alone, and no process has the whole model",
            remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
        )
    return trainer, setup


def _epoch_steps(trainer: Any) -> float | None:
    """Optimizer steps of one epoch, parts of a step included; None for a stream."""
    args, rows = trainer.args, trainer.train_dataset
    if not hasattr(rows, "__len__"):
        return None
    together = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return float(len(rows) / together)


def _trained(trainer: Any, folder: CellFolder, loaded: Load) -> nn.Module:
    """The model after training, whole in this process; of weights in parts, in the first one."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
    if layout(trainer.accelerator) not in SHARDED:
        return model
    place = folder.path / "run" / "whole"
    trainer.save_model(str(place))  # all processes: each gives its part
    return loaded(str(place))[0] if _first() else model


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run whose trainer is not made: those of merging are none of the trainer's."""
    return {name: value for name, value in options.items() if name not in ("merged", "alpha")}


def _cost_of(path: Path) -> dict[str, Any]:
    """Cost of training the merged model; merging itself costs next to nothing."""
    result = CellFolder(path).result() or {}
    return {name: result[name] for name in _COST if name in result}


def _whole(model: Any) -> Any:
    """Adapters merged: who needs the model loads it as one."""
    merge = getattr(model, "merge_and_unload", None)
    if merge is None:
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
        self._folder, self._begun, self._gated = folder, time.perf_counter(), False
        self._trainer = trainer
        trainer.compute_loss = partial(self._compute_loss, trainer.compute_loss)
        trainer.monitor.record = partial(self._record, trainer.monitor.record)
        trainer.monitor.direction = partial(self._direction, trainer.monitor.direction)
        trainer.add_callback(self)

    def gather(self) -> None:
        """Count what the other processes trained on as well."""
        names = ("response", "kept", "effective")
        of_all = Ranks(self._trainer.accelerator).gather_objects([getattr(self, n) for n in names])
        for name, values in zip(names, zip(*of_all, strict=True), strict=True):
            setattr(self, name, sum(values))

    def _place(self, step: int) -> Path:
        """The counts of this process at a checkpoint."""
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
        self._gated = False
        labels = self._trainer.response_labels(inputs) if model.training else None
        found = inner(model, inputs, *a, **k)
        if labels is not None and not self._gated:  # no weights: every token counts
            count = int(label_mask(labels).sum())
            self.response, self.kept = self.response + count, self.kept + count
            self.effective += count
        return found

    def _record(self, inner: Callable[..., None], *args: Any, **named: Any) -> None:
        weights = named["weights"].detach() * named["mask"]
        self._gated = True
        self.response += int(named["mask"].sum())
        self.kept += int((weights != 0).sum())
        squares = float(weights.double().square().sum())
        self.effective += float(weights.double().sum()) ** 2 / squares if squares else 0.0
        self.scoring += float(named.get("seconds", 0.0))
        inner(*args, **named)

    def _direction(self, inner: Callable[[float], None], seconds: float) -> None:
        self.direction += seconds
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
        found = read_json(self._place(state.global_step))
        for name, value in (found or {}).items():
            setattr(self, name, value)
        self.notes.append(
            f"went on after step {state.global_step}"
            + ("" if found else "; tokens and time before it were not counted")
        )
