"""Checkpoints that are whole or not there, and runs that go on from them to the same bits.

A checkpoint is written beside its place and renamed into it when it is complete: a process that is
killed at any moment leaves every ``checkpoint-N`` either whole or absent. It holds all that the
rest of the run depends on: what transformers saves, the trainer's own state (``alpha_state``), and
the statistics gathered since the last log. Of callbacks, transformers saves what an
``ExportableState`` says of itself. Tensors of any other, such as an average of the weights, are in
no checkpoint: a run goes on only if they are what they were, by 1,024 numbers of each.

Exact: a run that was killed and resumed ends with the bits of one that was not (same machine and
library versions, deterministic kernels).
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from alphatoken.errors import (
    AlphaTokenError,
    AlphaTokenWarning,
    ConfigError,
    DataError,
    warn_caller,
)
from alphatoken.support.storage import flush, read_tensors, write_tensors
from alphatoken.train.distributed import layout
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.manifest import (
    Manifest,
    chosen_checkpoint,
    note_run,
    require_same_run,
    rotate,
    weights_fingerprint,
    write_manifest,
)

STAGING = "_alphatoken-saving"
"""Folder of an unfinished checkpoint. The underscore keeps it out of uploads to the hub."""
_OWN = "alphatoken-rank{}.safetensors"

Digests = Mapping[str, str | None]
"""By callback, of the tensors that it holds; None where it holds none."""


class RunCheckpoints(TrainerCallback):
    """The checkpoints of one call of ``train``: where it goes on from, and how it saves.

    A callback that is added last, so that a resumed trainer takes up its state when all others
    have begun.

    Args:
        trainer: whose run it is; private state of transformers' and TRL's is saved with its own.
        facts: what the run's result depends on; None on processes that save nothing.

    Attributes:
        resuming: the checkpoint that this call goes on from, or None.
        staging: True while transformers is writing a checkpoint aside.
        random_state_loaded: whether this attempt to train has taken up the random state of
            ``resuming``; it is loaded once an attempt.
    """

    def __init__(self, trainer: TrainerInterface, facts: Mapping[str, Any] | None) -> None:
        self._trainer: Any = trainer
        self._facts = facts
        self._run = ""
        self._digests_at_start: Digests = {}
        self._warned_of_tensors = False
        self.resuming: Path | None = None
        self.staging = False
        self.random_state_loaded = False

    # --- going on ---------------------------------------------------------------------------------

    def begin(self, wanted: str | bool | None, allow_changed: Collection[str]) -> None:
        """Agree, over all processes, on the checkpoint to go on from and on the run's name.

        Raises:
            DataError, ConfigError: as in the trainer's ``train``, on every process.
        """
        outcome: list[Any] = [None, None]  # what the first process decides, or its error
        if self._trainer.args.process_index == 0:
            try:
                outcome[0] = self._find(wanted, allow_changed)
            except AlphaTokenError as problem:
                outcome[1] = problem
        # Raised by one process alone, an error would leave the others waiting.
        broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        path, self._run = outcome[0]
        self.resuming = None if path is None else Path(path)

    def _find(
        self, wanted: str | bool | None, allow_changed: Collection[str]
    ) -> tuple[str | None, str]:
        assert self._facts is not None
        output_dir = Path(str(self._trainer.args.output_dir))
        shutil.rmtree(output_dir / STAGING, ignore_errors=True)
        path, run = None, secrets.token_hex(8)
        if (chosen := chosen_checkpoint(output_dir, wanted)) is not None:
            require_same_run(*chosen, self._facts, allow_changed)
            path, run = str(chosen[0]), chosen[1].run
        trainer = self._trainer
        handed_over = trainer.policy_handed_over
        note_run(output_dir, run, self._facts, trainer.token_policy, handed_over=handed_over)
        return path, run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Load own state; on every attempt of ``auto_find_batch_size``."""
        self.random_state_loaded = False
        self._digests_at_start = self._callback_tensors()
        if self.resuming is not None:
            states = self._trainer.state.stateful_callbacks
            _restore_states(self._trainer.callback_handler.callbacks, states)
            self._load_own(self.resuming)

    def _callback_tensors(self) -> Digests:
        """Digests of the tensors that callbacks hold, the weights of the models left out."""
        models = (self._trainer.model, getattr(self._trainer, "ref_model", None))
        own = {id(p) for model in models if model is not None for p in model.parameters()}
        digests: dict[str, str | None] = {}
        numbers: Counter[str] = Counter()
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                continue
            kind = type(callback).__qualname__
            numbers[kind] += 1
            tensors = {
                name: tensor
                for name, tensor in _tensors("", vars(callback))
                if id(tensor) not in own and tensor.layout == torch.strided and not tensor.is_meta
            }
            digests[f"{kind} ({numbers[kind]})"] = weights_fingerprint(tensors)
        return digests

    def _load_own(self, folder: Path) -> None:
        trainer = self._trainer
        tensors, metadata = read_tensors(self._own_file(folder))
        self._refuse_lost_tensors(json.loads(metadata["callbacks"]))
        self._refuse_other_weights(json.loads(metadata["weights"]))
        loss = tensors.pop("loss").to(trainer._tr_loss.device)
        since_log = json.loads(metadata["since_log"])
        trainer._tr_loss += loss
        # transformers' train_loss is the mean over this call's steps: what came before is no part.
        trainer._total_loss_scalar -= sum(gather_object([float(loss)])) / trainer.args.world_size
        trainer._globalstep_last_logged = since_log["global_step"]
        for name, values in since_log["metrics"].items():
            trainer._metrics["train"][name][:0] = values
        if since_log["tokens"] is not None:
            trainer._total_train_tokens = since_log["tokens"]
        # Copies: what is read stays mapped to a file that rotation will remove.
        own = {name.removeprefix("alpha/"): tensor.clone() for name, tensor in tensors.items()}
        trainer.load_alpha_state(own, json.loads(metadata["alpha"]))

    def _weights(self) -> str | None:
        """Digest of the model's weights; None where no process has them whole."""
        trainer = self._trainer
        if layout(trainer.accelerator) not in ("single", "ddp"):
            return None
        return weights_fingerprint(dict(trainer.model.named_parameters()))

    def _refuse_other_weights(self, saved: str | None) -> None:
        """Refuse a model whose weights are not those that were saved.

        transformers loads a checkpoint without saying more than that keys were missing: where an
        architecture saves weights under other names than it has them, they stay as they were.

        Raises:
            DataError: they are others.
        """
        if saved is not None and self._weights() not in (saved, None):
            raise DataError(
                "the checkpoint's weights are not those that the model now has",
                got=type(self._trainer.model).__name__,
                why="transformers has left some of them out in loading it, so the run would go on "
                "from other weights",
                remedy="train to the end in one go: this architecture's checkpoints are saved "
                "under other names than it loads",
            )

    def _refuse_lost_tensors(self, saved: Digests) -> None:
        """Refuse a callback whose tensors are not those of the checkpoint, which has only digests.

        Raises:
            ConfigError: names the callbacks.
        """
        now = self._digests_at_start
        lost = [name for name in saved.keys() & now.keys() if saved[name] != now[name]]
        if lost:
            raise ConfigError(
                "a callback holds other tensors than at the checkpoint, which has none of them",
                got=", ".join(sorted(lost)),
                why="what it gathered before would be missing, and the run would be another one",
                remedy="train from the start, or resume without it; a callback may restore its "
                "tensors in on_train_begin, and transformers saves what an ExportableState says of "
                "itself",
            )

    # --- saving -----------------------------------------------------------------------------------

    def save(self, run_dir: Path, write: Callable[[], None]) -> Path:
        """Write a checkpoint aside, seal it, move it to its place, then remove old ones.

        Args:
            run_dir: where checkpoints lie.
            write: writes what transformers saves; ``staging`` is True while it runs.

        Returns:
            The checkpoint.

        Raises:
            DataError: a file could not be written, and the partial checkpoint was removed; or the
                processes do not write into one folder. Other processes wait, and the launcher ends
                them.
        """
        trainer, args = self._trainer, self._trainer.args
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        staged = run_dir / STAGING / final.name
        if args.should_save:
            shutil.rmtree(run_dir / STAGING, ignore_errors=True)
        # No process writes before what an earlier save has left is gone.
        trainer.accelerator.wait_for_everyone()
        try:
            self._write(write, staged)
            trainer.accelerator.wait_for_everyone()
            self._complete(staged, final)
            trainer.accelerator.wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:  # torch has no other for a disk
            raise DataError(
                f"the checkpoint '{final}' could not be written",
                got=f"{type(error).__name__}: {error}",
                why="a run goes on from whole checkpoints only; earlier ones are as they were",
                remedy="free some space or mend the permissions, then go on with --resume or "
                "resume_from_checkpoint='auto'; save_total_limit keeps fewer",
            ) from OSError(str(error))
        finally:
            if args.should_save:
                shutil.rmtree(run_dir / STAGING, ignore_errors=True)
        return final

    def _write(self, write: Callable[[], None], staged: Path) -> None:
        args, state = self._trainer.args, self._trainer.state
        # Old checkpoints go, and the hub is written to, when this one is in its place.
        limit, push = args.save_total_limit, args.push_to_hub
        args.save_total_limit, args.push_to_hub, self.staging = None, False, True
        try:
            write()
        finally:
            args.save_total_limit, args.push_to_hub = limit, push
            self.staging = False
        # transformers has noted the folder that it wrote to.
        if state.best_model_checkpoint == str(staged):
            state.best_model_checkpoint = str(staged.parents[1] / staged.name)
            if args.should_save:
                state.save_to_json(str(staged / TRAINER_STATE_NAME))
        staged.mkdir(parents=True, exist_ok=True)
        if not args.save_only_model:  # no run goes on from such a folder
            self._save_own(staged)

    def _own_file(self, folder: Path, process: int | None = None) -> Path:
        index = self._trainer.args.process_index if process is None else process
        return folder / _OWN.format(index)

    def _save_own(self, folder: Path) -> None:
        trainer = self._trainer
        tensors, values = trainer.alpha_state()
        metrics = getattr(trainer, "_metrics", {}).get("train", {})
        since_log = {
            "global_step": trainer._globalstep_last_logged,
            "metrics": {name: [float(x) for x in series] for name, series in metrics.items()},
            "tokens": getattr(trainer, "_total_train_tokens", None),
        }
        own = {f"alpha/{name}": tensor for name, tensor in tensors.items()}
        digests = self._callback_tensors()
        self._warn_of_tensors(digests)
        callbacks = {name: digest for name, digest in digests.items() if digest is not None}
        parts = {
            "alpha": values,
            "since_log": since_log,
            "callbacks": callbacks,
            "weights": self._weights(),
        }
        metadata = {name: json.dumps(part) for name, part in parts.items()}
        write_tensors(self._own_file(folder), {**own, "loss": trainer._tr_loss}, metadata)

    def _warn_of_tensors(self, digests: Digests) -> None:
        """Warn once of callbacks whose tensors have changed since the run began."""
        changed = [name for name in digests if digests[name] != self._digests_at_start.get(name)]
        if changed and not self._warned_of_tensors:
            self._warned_of_tensors = True
            warn_caller(
                f"checkpoints do not hold the tensors of {', '.join(changed)}, which change as the "
                "run goes on: unless that callback takes them up by itself, no run can resume with "
                "it",
                AlphaTokenWarning,
            )

    def _complete(self, staged: Path, final: Path) -> None:
        """Seal the folder and put it in its place; a former one of that name goes last."""
        args, state = self._trainer.args, self._trainer.state
        if not args.should_save:
            return
        if not args.save_on_each_node and not args.save_only_model:
            self._require_shared(staged)
        assert self._facts is not None
        resumable = not args.save_only_model
        write_manifest(staged, Manifest(state.global_step, self._run, resumable, self._facts))
        # A folder cannot be renamed onto one that is not empty.
        if final.exists():
            final.rename(staged.with_name("former"))
        staged.rename(final)
        flush(final.parent)
        best = state.best_model_checkpoint
        with suppress(OSError):  # old folders that cannot be removed are no failure to save
            rotate(final.parent, args.save_total_limit, final, best, staged.parent)

    def _require_shared(self, staged: Path) -> None:
        ranks = range(self._trainer.args.world_size)
        missing = [rank for rank in ranks if not self._own_file(staged, rank).exists()]
        if missing:
            raise DataError(
                "output_dir is not the same folder for all processes",
                got=f"nothing from process {missing[0]} arrived",
                remedy="a shared file system, or save_on_each_node=True",
            )


# --- callbacks ------------------------------------------------------------------------------------


def _restore_states(callbacks: Iterable[TrainerCallback], states: Mapping[str, Any]) -> None:
    """Give callbacks the state that a checkpoint has of them, such as the patience that is left."""
    exporting = [c for c in callbacks if isinstance(c, ExportableState)]
    for name in {type(one).__name__ for one in exporting} & states.keys():
        saved = states[name] if isinstance(states[name], list) else [states[name]]
        of_name = (one for one in exporting if type(one).__name__ == name)
        for callback, state in zip(of_name, saved, strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(callback, attribute, value)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from _tensors(name, dict(value.named_parameters()) | dict(value.named_buffers()))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        yield from _tensors(name, dict(enumerate(value)))
