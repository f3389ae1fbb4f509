"""A Fisher is fitted once for a model, its prompts and settings, and found again by later runs.

An entry's name is a digest of all that it depends on, the weights included, so that one of another
model, data set or setting is never taken. The main process fits, resumably; the others draw
responses for it and poll a file, because a fit outlasts the patience of collective calls.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift, library_version
from alphatoken.direction.fisher import fit_fisher
from alphatoken.errors import ConfigError, FisherError, warn_caller
from alphatoken.estimate.matrices import Formed
from alphatoken.model.layer_choice import read_layers
from alphatoken.support.progress import ProgressSink
from alphatoken.support.storage import read_json, weights_digest, write_json
from alphatoken.train.options import AlphaOptions
from alphatoken.train.placement import on_accelerator
from alphatoken.train.shared_responses import Helper, SharedResponses, arithmetic_of

__all__ = [
    "cache_folder",
    "cache_key",
    "check_fisher_rows",
    "fisher_settings",
    "fisher_tensors",
    "fitted_fisher",
]

_POLL = 0.5  # seconds
_SHARED_WITHIN = 60.0  # seconds in which a file must be seen by the other processes


def cache_folder(options: AlphaOptions, output_dir: str) -> Path:
    """``fisher_cache``, or ``fisher`` beside ``output_dir``: shared by runs of one experiment."""
    if options.fisher_cache is not None:
        return Path(options.fisher_cache)
    return Path(os.path.abspath(output_dir)).parent / "fisher"


def fisher_settings(options: AlphaOptions) -> dict[str, Any]:
    """Arguments of :func:`alphatoken.fit_fisher` that the options mean; the seed is always 0."""
    return {
        "samples": options.fisher_samples,
        "layers": read_layers(options.score_layers),
        "structure": options.retention,
        "labels": options.fisher_labels,
        "max_new_tokens": options.fisher_max_new_tokens,
        "parameters": options.value_parameters,
        "batch_size": options.fisher_batch_size,
        "score_bias": options.score_bias,
        "seed": 0,
    }


def check_fisher_rows(options: AlphaOptions, fisher: FisherDrift | None, rows: Any) -> None:
    """Refuse a Fisher (``fisher=``), or rows for one (``fisher_dataset=``), that would go unused.

    The policy has no say: a control (random, all) may be given the same as the run that it is
    compared with.

    Raises:
        ConfigError: a Fisher is there already, none is wanted, or there are no rows.
    """
    if rows is not None and fisher is not None:
        raise ConfigError(
            "the Fisher is given twice",
            got="fisher=... and fisher_dataset=...",
            why="one is fitted already, and nothing would be fitted on the rows",
            remedy="leave one of them out",
        )
    if rows is None and fisher is None:
        return
    name = "fisher" if rows is None else "fisher_dataset"
    if not options.reads_fisher:
        raise ConfigError(
            f"{name} is given, and no Fisher is wanted",
            got=f"objective={options.objective!r}, retention={options.retention!r}",
            why="nothing would read it",
            remedy="leave it out, or objective='both' with retention='diagonal' or 'kronecker'",
        )
    if hasattr(rows, "__len__") and not len(rows):
        raise ConfigError(
            "fisher_dataset has no rows",
            why="the Fisher is an expectation over prompts",
            remedy="give some, or leave it out to take the prompts of the training rows",
        )


def fisher_tensors(fisher: FisherDrift) -> Mapping[str, Tensor]:
    """All numbers of a Fisher by name, for telling two of them apart; taken one at a time."""
    kinds: dict[str, Callable[[str], Tensor]] = {"reference": fisher.reference.__getitem__}
    if fisher.structure == "diagonal":
        kinds["fisher"] = fisher.fisher.__getitem__
    else:
        kinds["inputs"] = lambda name: fisher.factors[name][0]
        kinds["errors"] = lambda name: fisher.factors[name][1]

    def entry(key: str) -> Tensor:
        kind, _, name = key.partition("/")
        return kinds[kind](name)

    return Formed([f"{kind}/{name}" for kind in kinds for name in fisher.names], entry)


def cache_key(model: nn.Module, prompts: Any, settings: dict[str, Any]) -> str:
    """SHA-256 over all that the fit depends on.

    The class, all weights and buffers and which of them are trained; the prompts; the settings;
    the versions of this library and of torch.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    parts = {
        "model": type(model).__qualname__,
        "weights": weights_digest(model),
        "trained": hashlib.sha256(json.dumps(trained).encode()).hexdigest(),
        "prompts": _prompts_digest(prompts),
        "settings": settings,
        "versions": [library_version(), torch.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fitted_fisher(
    model: nn.Module,
    prompts: Any,
    options: AlphaOptions,
    folder: str | os.PathLike[str],
    *,
    progress: bool | ProgressSink | None = None,
    device: torch.device | None = None,
) -> FisherDrift:
    """The Fisher of ``model`` as it is, from the cache or fitted now; the same bits either way.

    Several processes of one launch call it together: the main one fits or finds the entry, the
    others draw responses for it where their model is the same, and wait for its file. Several
    launches on one folder may run at once: one fits, and the others take its entry.

    Args:
        model: the reference, before it is wrapped or sharded.
        prompts: as for :func:`alphatoken.fit_fisher`.
        options: of the run.
        folder: of the cache; created. On several machines it must be a shared one.
        progress: as for :func:`alphatoken.fit_fisher`.
        device: where a model that waits on the CPU is fitted; it goes back afterwards.

    Raises:
        ConfigError: the weights are sharded already, or the folder is not shared.
        FisherError: the main process failed (then the others say so too), or nothing can be
            written to ``folder``; and what :func:`alphatoken.fit_fisher` raises.
    """
    _require_whole(model)
    folder = Path(folder)
    with on_accelerator(model, device or torch.device("cpu")):
        if PartialState().is_main_process:
            entry = _as_main(model, prompts, fisher_settings(options), folder, progress)
        else:
            entry = _as_other(model, prompts, fisher_settings(options), folder)
    return entry if options.fisher_offload else _on(model, entry)


# --- the main process ---------------------------------------------------------------------------


def _as_main(
    model: nn.Module,
    prompts: Any,
    settings: dict[str, Any],
    folder: Path,
    progress: bool | ProgressSink | None,
) -> FisherDrift:
    message: list[Any] = [None, None]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        key = cache_key(model, prompts, settings)
    except BaseException as problem:
        message[1] = _described(problem)
        broadcast_object_list(message)
        if isinstance(problem, OSError):
            raise FisherError(
                f"the folder '{folder}' of the Fisher cache cannot be made",
                got=str(problem),
                remedy="give another one: fisher_cache=...",
            ) from problem
        raise
    message[0] = (key, folder / f"{key}.{secrets.token_hex(4)}.json")
    shared = None
    if PartialState().num_processes > 1:
        shared = SharedResponses(message[0][1], arithmetic_of(model))
    with _announced(message):
        return _entry(model, prompts, {**settings, "responses": shared}, folder, key, progress)


@contextmanager
def _announced(message: list[Any]) -> Iterator[None]:
    """Tell the other processes where to look, and how the fit ended; tidy up when they know."""
    if PartialState().num_processes == 1:
        yield
        return
    status: Path = message[0][1]
    with _held(status.with_suffix(".alive")), ExitStack() as stack:
        stack.callback(SharedResponses(status).remove)
        write_json(status, {"state": "fitting"}, error=FisherError)
        broadcast_object_list(message)
        try:
            yield
        except BaseException as problem:
            write_json(status, {"state": "failed", "error": _described(problem)}, error=FisherError)
            raise
        write_json(status, {"state": "done"}, error=FisherError)
        PartialState().wait_for_everyone()
    for path in (status, status.with_suffix(".alive")):
        path.unlink(missing_ok=True)


def _described(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def _entry(
    model: nn.Module,
    prompts: Any,
    settings: dict[str, Any],
    folder: Path,
    key: str,
    progress: bool | ProgressSink | None,
) -> FisherDrift:
    """The valid entry of this key, fitted first if there is none."""
    path = folder / f"{key}.safetensors"
    found = _load(path, key)
    if found is not None:
        return found
    with _held(folder / f"{key}.lock") as locked:
        found = _load(path, key)  # another launch may have fitted it while this one waited
        if found is not None:
            return found
        _announce(settings, folder)
        partial = folder / (f"{key}.partial" if locked else f"{key}.{secrets.token_hex(4)}.partial")
        fitted = _fit(model, prompts, settings, partial, progress)
        replace(fitted, metadata={**fitted.metadata, "cache_key": key}).save(path)
    return FisherDrift.open(path)


def _announce(settings: Mapping[str, Any], folder: Path) -> None:
    """Say what is about to be fitted: the dearest step before training."""
    what = "the labels of rows drawn anew"
    if settings["labels"] == "sequence":
        what = f"responses of at most {settings['max_new_tokens']} tokens"
    print(
        f"fitting the Fisher before training: {settings['samples']:,} samples, {what}; kept in "
        f"'{folder}' for later runs. Fewer: fisher_samples; none: retention='none'",
        file=sys.stderr,
        flush=True,
    )


def _fit(
    model: nn.Module,
    prompts: Any,
    settings: dict[str, Any],
    partial: Path,
    progress: bool | ProgressSink | None,
) -> FisherDrift:
    """Fit, going on from an interrupted one; one that cannot be read is started again."""
    try:
        return fit_fisher(model, prompts, checkpoint=partial, progress=progress, **settings)
    except FisherError as problem:
        if not partial.exists() or "could not be written" in problem.what:
            raise
        warn_caller(f"the interrupted fit is started again: {problem}")
        partial.unlink()
    return fit_fisher(model, prompts, checkpoint=partial, progress=progress, **settings)


def _load(path: Path, key: str) -> FisherDrift | None:
    """The entry, or None if there is none or it is damaged (which is said)."""
    if not path.exists():
        return None
    try:
        found = FisherDrift.open(path)
        if found.metadata.get("cache_key") == key:
            return found
        reason = "it is the entry of another model, data set or setting under this name"
    except FisherError as problem:
        reason = str(problem)
    warn_caller(f"the cached Fisher '{path}' is fitted again: {reason}")
    return None


# --- the others ---------------------------------------------------------------------------------


def _as_other(
    model: nn.Module, prompts: Any, settings: dict[str, Any], folder: Path
) -> FisherDrift:
    message: list[Any] = [None, None]
    broadcast_object_list(message)
    if message[1] is not None:
        raise _main_failed(message[1])
    key, status = message[0][0], folder / message[0][1].name
    helper: Helper | None = None

    def help_with(found: dict[str, Any]) -> bool:
        nonlocal helper
        if helper is None:
            rank, world = PartialState().process_index, PartialState().num_processes
            able = _draws_the_same(model, prompts, settings, key, found["arithmetic"])
            how = settings if able else {**settings, "samples": 0}
            helper = Helper(SharedResponses(status), model, prompts, how, rank, world)
        return helper.draw(found["batch"])

    return _wait(folder, key, status, help_with)


def _draws_the_same(
    model: nn.Module, prompts: Any, settings: dict[str, Any], key: str, arithmetic: str
) -> bool:
    """Whether this process has the main one's weights, on a device that computes as its does.

    With cpu_ram_efficient_loading, say, only the main process has the weights yet; and a model that
    did not fit onto a GPU is on the CPU.
    """
    with suppress(Exception):  # whatever is wrong here, the main process meets it and says so
        same = arithmetic_of(model) == arithmetic
        return same and cache_key(model, prompts, settings) == key
    return False


def _wait(
    folder: Path, key: str, status: Path, work: Callable[[dict[str, Any]], bool]
) -> FisherDrift:
    """Work while there is something to do, and poll until the main process is done."""
    start = time.monotonic()
    while True:
        found = read_json(status)
        if found is not None:
            start = time.monotonic()  # seen; a file that is replaced may be missed for a moment
        elif time.monotonic() - start > _SHARED_WITHIN:
            raise ConfigError(
                "the folder of the Fisher cache is not shared",
                got=f"'{folder}' on this machine does not show what the main process wrote there",
                why="the Fisher is fitted by one process, and the others read its file",
                remedy="fisher_cache=... on a shared file system, or fit it beforehand "
                "(`alphatoken fisher`) and pass fisher=...",
            )
        if found is not None and found["state"] == "done":
            entry = FisherDrift.open(folder / f"{key}.safetensors")
            PartialState().wait_for_everyone()
            return entry
        if found is not None and (found["state"] == "failed" or _died(status)):
            raise _main_failed(str(found.get("error", "it ended without a word")))
        if found is None or "batch" not in found or not work(found):
            time.sleep(_POLL)


def _main_failed(message: str) -> FisherError:
    return FisherError(
        "the main process could not fit the Fisher",
        got=message,
        remedy="see its own message; the next run goes on with the fit",
    )


def _died(status: Path) -> bool:
    """Whether the main process no longer holds its lock and yet has not said how it ended."""
    try:
        with FileLock(status.with_suffix(".alive"), timeout=0):
            pass
    except (NotImplementedError, OSError):  # it is held (a Timeout), or no locks exist here
        return False
    found = read_json(status)
    return found is not None and found["state"] == "fitting"


# --- files --------------------------------------------------------------------------------------


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Hold the lock on a file, waiting for whoever has it; False where locks do not exist.

    The system gives it back when its holder ends in whatever way: there are no stale locks.
    """
    lock = FileLock(path)
    try:
        lock.acquire(poll_interval=_POLL)
    except (NotImplementedError, OSError):  # fits are then not kept apart, only written atomically
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _prompts_digest(prompts: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(prompts, Sequence):
        for prompt in prompts:
            ids = torch.as_tensor(prompt, dtype=torch.long).cpu()
            digest.update(f"{len(ids)}:".encode() + ids.numpy().tobytes())
    else:
        for name in ("input_ids", "attention_mask", "labels"):
            if name in prompts:
                found = torch.as_tensor(prompts[name], dtype=torch.long).cpu().contiguous()
                digest.update(f"{name} {tuple(found.shape)}".encode() + found.numpy().tobytes())
    return digest.hexdigest()


def _require_whole(model: nn.Module) -> None:
    """Refuse sharded weights: one process cannot run such a model alone."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh"):
            raise ConfigError(
                "the Fisher cannot be fitted on sharded weights",
                got=f"'{name}' is spread over processes",
                why="one process fits it, and cannot run the model alone",
                remedy="fit it beforehand (`alphatoken fisher`) and pass fisher=..., or "
                "retention='data'",
            )


def _on(model: nn.Module, fisher: FisherDrift) -> FisherDrift:
    """The same, on the model's device, whole."""
    device = next(model.parameters()).device

    def there(entry: Tensor) -> Tensor:
        return entry.to(device)

    return replace(
        fisher,
        fisher={name: there(entry) for name, entry in fisher.fisher.items()},
        reference={name: there(entry) for name, entry in fisher.reference.items()},
        factors={name: (there(a), there(b)) for name, (a, b) in fisher.factors.items()},
    )
