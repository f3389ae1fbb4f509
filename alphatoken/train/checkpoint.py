"""Checkpoints that are whole or not there, and runs that go on from them to the same bits.

A checkpoint is written beside its place and renamed into it when it is complete: a process that is
killed at any moment leaves every ``checkpoint-N`` either whole or absent. It holds all that the
rest of the run depends on: what transformers saves, the trainer's own state (``alpha_state``), and
the statistics gathered since the last log.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from alphatoken.errors import AlphaTokenError, ConfigError, DataError, warn_caller
from alphatoken.support.storage import read_tensors, write_json, write_tensors
from alphatoken.train.identity import (
    data_fingerprint,
    differences,
    frozen_fingerprint,
    option_values,
)
from alphatoken.train.manifest import (
    RESULTS,
    RUN,
    Manifest,
    checkpoints,
    flush,
    latest_complete,
    rotate,
    set_aside,
    verify,
    write_manifest,
)

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:
    _Base = object

__all__ = ["CheckpointMixin", "library_versions"]

STAGING = "_alphatoken-saving"
"""Where a checkpoint grows. The underscore keeps it out of uploads to the hub."""
PUSHING = "_alphatoken-pushing"
"""Where what may be uploaded of a checkpoint is put together."""
_OWN = "alphatoken-rank{}.safetensors"

_LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "alphatoken")
_WRITING = re.compile(
    r"os error \d+|PytorchStreamWriter|inline_container|No space left|unexpected pos|iostream error"
)


class CheckpointMixin(_Base):
    """Goes before a transformers trainer in the bases; ``train`` and saving change, nothing else.

    A trainer with state of its own overrides :meth:`alpha_state` and :meth:`load_alpha_state`, and
    names the data that it depends on in :meth:`alpha_data`.

    Exact: a run that was killed and resumed ends with the bits of one that was not (same machine
    and library versions, deterministic kernels).
    """

    _run: str = ""
    _identity: Mapping[str, Any] | None = None
    _staging: bool = False
    _resuming: Path | None = None
    _random_state_loaded: bool = False

    # --- what a trainer says about itself -----------------------------------------------------

    def alpha_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This process's own state: tensors, and plain JSON values."""
        return {}, {}

    def load_alpha_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take back what :meth:`alpha_state` gave.

        Called once a resumed run, after all other callbacks' ``on_train_begin`` and before the
        first batch is read; model, optimizer and scheduler are loaded by then.
        """

    def alpha_data(self) -> dict[str, Any]:
        """Data sets that the run depends on, by name; compared when the run is resumed."""
        return {"train_dataset": self.train_dataset}

    def run_identity(self) -> dict[str, Any]:
        """Options, data and frozen weights that the run's result depends on, as JSON values."""
        return {
            "trainer": type(self).__name__,
            "options": option_values(self.args),
            "data": {name: data_fingerprint(data) for name, data in self.alpha_data().items()},
            "frozen_weights": frozen_fingerprint(cast(nn.Module, self.model)),
        }

    # --- resuming -----------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        allow_changed: Collection[str] = (),
    ) -> Any:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: True goes on from the last complete checkpoint of this folder's
                run, "auto" does so if there is one and starts otherwise, a path goes on from that
                one after checking it, None and False start.
            trial: as in transformers.
            ignore_keys_for_eval: as in transformers.
            allow_changed: names of options (or ``train_dataset`` and the like) that may differ
                from those of the interrupted run; the result then is neither run's.

        Raises:
            DataError: no complete checkpoint, or the one named is damaged.
            ConfigError: another number of processes, or options, data or frozen weights that
                differ; names each.
        """
        if self.args.should_save:
            self._identity = self.run_identity()
        self.remove_callback(_TakeUp)
        found = self._agreed(lambda: self._find(resume_from_checkpoint, allow_changed))
        path, self._run = found
        self._resuming = None if path is None else Path(path)
        self.add_callback(_TakeUp(self))
        return super().train(path, trial, ignore_keys_for_eval)

    def _find(
        self, wanted: str | bool | None, allow_changed: Collection[str]
    ) -> tuple[str | None, str]:
        """The checkpoint to go on from, if any, and the name of the run (one process only)."""
        output_dir = Path(str(self.args.output_dir))
        shutil.rmtree(output_dir / STAGING, ignore_errors=True)
        found = _chosen(output_dir, wanted)
        if found is None:
            run = secrets.token_hex(8)
        else:
            path, manifest = found
            self._compare(path, manifest, allow_changed)
            run = manifest.run
        self._note_run(output_dir, run)
        return None if found is None else str(found[0]), run

    def _note_run(self, output_dir: Path, run: str) -> None:
        """Leave in the folder which run it belongs to, and what that run is."""
        output_dir.mkdir(parents=True, exist_ok=True)
        content = {
            "run": run,
            "identity": self._identity,
            "versions": library_versions(),
            "results": RESULTS,
        }
        write_json(output_dir / RUN, content)

    def _compare(self, path: Path, manifest: Manifest, allowed: Collection[str]) -> None:
        """Refuse to go on as another run."""
        if not manifest.resumable:
            raise DataError(
                f"'{path}' holds no optimizer and random state",
                got="it was saved with save_only_model=True",
                remedy="give it as the model of a new run",
            )
        if manifest.world_size != self.args.world_size:
            raise ConfigError(
                "a run can only be resumed with the number of processes that it had",
                got=f"{self.args.world_size} now, {manifest.world_size} in '{path}'",
                why="each process has its own part of data order, random state and statistics",
                remedy=f"launch {manifest.world_size} processes, or start a new run from this "
                "model",
            )
        assert self._identity is not None
        changed = differences(manifest.identity, self._identity, allowed)
        if changed:
            listed = [f"{name}: {old!r} then, {new!r} now" for name, (old, new) in changed.items()]
            raise ConfigError(
                f"this is not the run that '{path}' belongs to",
                got="; ".join(listed),
                why="its result would be neither run's",
                remedy="give the values of the interrupted run; or, to go on with new ones on "
                f"purpose, train(..., allow_changed={sorted(changed)!r})",
            )
        other = differences({"versions": manifest.versions}, {"versions": library_versions()})
        if other:
            listed = [f"{name}: {old} then, {new} now" for name, (old, new) in other.items()]
            warn_caller(
                f"other library versions ({'; '.join(listed)}): the run goes on, but perhaps not "
                "to the bits that it would have had",
            )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As in transformers; a resumed run has its random state as soon as the batches are read.

        transformers loads it after this call, too late for what scores a whole step ahead inside
        an override of this method.
        """
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._resuming is not None:
            self._load_rng_state(str(self._resuming))
        return found

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once a resumed run: see :meth:`get_batch_samples`."""
        if checkpoint is not None and not self._random_state_loaded:
            super()._load_rng_state(checkpoint)
            self._random_state_loaded = True

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, which trains one step more when it resumes a run that is complete."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def resumed(self) -> bool:
        """Whether this call of ``train`` goes on from a checkpoint."""
        return self._resuming is not None

    # --- own state ----------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Load own state; on every attempt of ``auto_find_batch_size``."""
        self._random_state_loaded = False
        if self._resuming is not None:
            self._load_own(self._resuming)

    def _own_file(self, folder: Path, process: int | None = None) -> Path:
        index = self.args.process_index if process is None else process
        return folder / _OWN.format(index)

    def _save_own(self, folder: Path) -> None:
        """The trainer's state, and what transformers and TRL have gathered since the last log."""
        tensors, values = self.alpha_state()
        metrics = getattr(self, "_metrics", {}).get("train", {})
        since_log = {
            "global_step": self._globalstep_last_logged,
            "metrics": {name: [float(x) for x in found] for name, found in metrics.items()},
            "tokens": getattr(self, "_total_train_tokens", None),
        }
        own = {f"alpha/{name}": tensor for name, tensor in tensors.items()}
        metadata = {"alpha": json.dumps(values), "since_log": json.dumps(since_log)}
        write_tensors(self._own_file(folder), {**own, "loss": self._tr_loss}, metadata)

    def _load_own(self, folder: Path) -> None:
        tensors, metadata = read_tensors(self._own_file(folder))
        loss = tensors.pop("loss").to(self._tr_loss.device)
        since_log = json.loads(metadata["since_log"])
        self._tr_loss += loss
        # transformers' train_loss is the mean over this call's steps: what came before is no part.
        self._total_loss_scalar -= sum(gather_object([float(loss)])) / self.args.world_size
        self._globalstep_last_logged = since_log["global_step"]
        for name, found in since_log["metrics"].items():
            getattr(self, "_metrics")["train"][name][:0] = found  # noqa: B009
        if since_log["tokens"] is not None:
            self._total_train_tokens = since_log["tokens"]
        # Copies: what is read stays mapped to a file that rotation will remove.
        own = {name.removeprefix("alpha/"): tensor.clone() for name, tensor in tensors.items()}
        self.load_alpha_state(own, json.loads(metadata["alpha"]))

    # --- saving -------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = str(super()._get_output_dir(trial))
        return os.path.join(run_dir, STAGING) if self._staging else run_dir

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside, seal it, move it to its place, then remove old ones.

        Raises:
            DataError: it could not be written (disk full, no permission) on some process; names
                it, and the checkpoint that is still intact. The partial one is removed.
        """
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged = run_dir / STAGING / final.name
        if self.args.should_save:
            shutil.rmtree(run_dir / STAGING, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
            self._together(final, lambda: self._write(model, trial, staged), collective=sharded)
            self._together(final, lambda: self._complete(staged, final))
        finally:
            if self.args.should_save:
                shutil.rmtree(run_dir / STAGING, ignore_errors=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As in transformers, but for own state: it names tokens of the training rows.

        ``hub_strategy="checkpoint"`` uploads a whole folder, at some later time; it is given one of
        hard links to the rest of the checkpoint.
        """
        if self.is_world_process_zero():
            place = Path(str(self.args.output_dir)) / PUSHING
            going_on = getattr(self, "push_in_progress", None)
            if going_on is None or going_on.is_done():
                shutil.rmtree(place, ignore_errors=True)
            view = place / Path(checkpoint_folder).name
            _link_without(Path(checkpoint_folder), view, _OWN.format("*"))
            checkpoint_folder = str(view)
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        """As in transformers; what was put together for uploads goes."""
        super()._finish_current_push()
        if self.is_world_process_zero():
            shutil.rmtree(Path(str(self.args.output_dir)) / PUSHING, ignore_errors=True)

    def _write(self, model: nn.Module, trial: Any, staged: Path) -> None:
        """Everything of this process, into the staging folder."""
        limit, push = self.args.save_total_limit, self.args.push_to_hub
        self.args.save_total_limit, self.args.push_to_hub, self._staging = None, False, True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit, self.args.push_to_hub = limit, push
            self._staging = False
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(staged.parents[1] / staged.name)
            if self.args.should_save:
                self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        staged.mkdir(parents=True, exist_ok=True)
        self._save_own(staged)

    def _complete(self, staged: Path, final: Path) -> None:
        """Seal the folder and put it in its place; a former one of that name goes last."""
        if not self.args.should_save:
            return
        if not self.args.save_on_each_node:
            self._require_shared(staged)
        assert self._identity is not None
        manifest = Manifest(
            step=self.state.global_step,
            run=self._run,
            world_size=self.args.world_size,
            resumable=not self.args.save_only_model,
            identity=self._identity,
            versions=library_versions(),
        )
        write_manifest(staged, manifest)
        if final.exists():
            final.rename(staged.with_name("former"))
        staged.rename(final)
        flush(final.parent)
        best = self.state.best_model_checkpoint
        with suppress(OSError):  # old folders that cannot be removed are no failure to save
            rotate(final.parent, self.args.save_total_limit, final, best, staged.parent)

    def _require_shared(self, staged: Path) -> None:
        """See that every process wrote into this folder, not into one of the same name."""
        missing = [r for r in range(self.args.world_size) if not self._own_file(staged, r).exists()]
        if missing:
            raise DataError(
                "output_dir is not the same folder for all processes",
                got=f"nothing from process {missing[0]} arrived",
                remedy="a shared file system, or save_on_each_node=True",
            )

    def _together(self, final: Path, work: Callable[[], None], *, collective: bool = False) -> None:
        """Do one part of a save on every process; all fail if one does.

        A part with ``collective`` calls, which a failed process no longer joins, raises at once
        there, and the launcher ends the others.
        """
        problem: AlphaTokenError | None = None
        try:
            work()
        except Exception as cause:
            if not _is_about_writing(cause):
                raise
            problem = _not_saved(final, cause)
            problem.__cause__ = cause
            if collective:
                raise problem from cause
        problems = gather_object([problem and (self.args.process_index, str(problem.__cause__))])
        if problem is not None:
            raise problem
        for process, text in filter(None, problems):
            raise _not_saved(final, f"process {process}: {text}")

    def _agreed(self, decide: Callable[[], Any]) -> Any:
        """What the first process decides, or its error, on all of them."""
        outcome: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                outcome[0] = decide()
            except AlphaTokenError as problem:
                outcome[1] = problem
        broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


class _TakeUp(TrainerCallback):
    """Added last, so that a resumed trainer takes up its state when all others have begun."""

    def __init__(self, trainer: CheckpointMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._take_up()


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a run's bits depend on."""
    found = {}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _chosen(output_dir: Path, wanted: str | bool | None) -> tuple[Path, Manifest] | None:
    """The checkpoint that ``resume_from_checkpoint`` means, checked."""
    if wanted is None or wanted is False:
        return None
    if wanted is not True and wanted != "auto":
        return Path(wanted), verify(Path(wanted))
    latest = latest_complete(output_dir, _current_run(output_dir))
    if latest is None and wanted is True:
        raise _nothing_to_resume(output_dir)
    for moved in set_aside(output_dir, latest[1].step if latest else -1):
        warn_caller(f"an incomplete checkpoint is set aside as '{moved}'")
    return latest


def _nothing_to_resume(output_dir: Path) -> DataError:
    other = latest_complete(output_dir)
    there = ", ".join(path.name for _, path in checkpoints(output_dir)) or "none at all"
    return DataError(
        f"there is no complete checkpoint of this run in '{output_dir}'",
        got=f"'{other[0]}' is of an earlier run" if other else f"checkpoints there: {there}",
        why="the run was stopped before its first save, or it is another folder",
        remedy="resume_from_checkpoint='auto' to start in this case"
        + (f", or give '{other[0]}' to go on with the earlier run" if other else ""),
    )


def _current_run(output_dir: Path) -> str | None:
    try:
        run = json.loads((output_dir / RUN).read_text(encoding="utf-8"))["run"]
        return str(run)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _link_without(folder: Path, view: Path, pattern: str) -> None:
    """``view`` becomes ``folder`` without the files of that name; linked, or copied where not."""
    shutil.rmtree(view, ignore_errors=True)
    for path in folder.rglob("*"):
        if path.is_dir() or path.match(pattern):
            continue
        linked = view / path.relative_to(folder)
        linked.parent.mkdir(parents=True, exist_ok=True)
        try:
            linked.hardlink_to(path)
        except OSError:  # a file system without hard links
            shutil.copy2(path, linked)


def _is_about_writing(problem: BaseException | None) -> bool:
    """Whether some cause is the file system's: each library wraps it in an error of its own."""
    while problem is not None:
        if isinstance(problem, (OSError, SafetensorError, DataError)) or _WRITING.search(
            str(problem)
        ):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _not_saved(final: Path, cause: BaseException | str) -> DataError:
    intact = latest_complete(final.parent)
    return DataError(
        f"the checkpoint '{final}' could not be written",
        got=str(cause) or type(cause).__name__,
        why="a run goes on from whole checkpoints only; the partial one was removed, and "
        + (f"the last one, '{intact[0]}', is intact" if intact else "there is no earlier one"),
        remedy="free some space or mend the permissions, then train with "
        f"resume_from_checkpoint={True if intact else 'auto'!r}; save_total_limit keeps fewer",
    )
