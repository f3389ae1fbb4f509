"""Rows that a run values against: validation rows, retention rows or a Fisher.

``prepare_run_rows`` tokenises, checks and fits when the trainer is made, so that a run refuses what
it cannot use before it trains. A Fisher is fitted once for a model, its prompts and settings, and
read again by later runs: an entry's name is a digest of all that it depends on, the weights
included. Of several processes the main one comes first and fits, resumably; the others find its
file.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.direction.drift import FisherDrift, library_version
from alphatoken.direction.fisher import fit_fisher
from alphatoken.errors import AlphaTokenWarning, ConfigError, CoverageError, warn_caller
from alphatoken.model.choice import ParameterChoice, read_layers
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import find_scope, resolve_layers
from alphatoken.support.progress import ProgressSink
from alphatoken.support.resume import content_digest, weights_digest
from alphatoken.train.distributed import cache_folder, on_accelerator, spread_name
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.manifest import dataset_digest
from alphatoken.train.options import AlphaOptions
from alphatoken.train.pool import ValidationPool
from alphatoken.train.python_rows import plain_rows
from alphatoken.train.refusals import check_lengths, check_pool, check_tokens


@dataclass(frozen=True)
class RunRows:
    """Rows of a run beside those it trains on; empty where it needs none.

    Attributes:
        validation: tokenised validation rows.
        retention: tokenised retention rows, under ``retention="data"``.
        fisher: of the reference model, under a Fisher retention.
    """

    validation: list[dict[str, Any]] = field(default_factory=list)
    retention: list[dict[str, Any]] = field(default_factory=list)
    fisher: FisherDrift | None = None


def prepare_run_rows(
    trainer: TrainerInterface,
    validation: Any,
    retention: Any,
    fisher: FisherDrift | None,
    fisher_dataset: Any,
) -> RunRows:
    """Tokenise and check the rows, fit or load the Fisher; before training.

    Args:
        trainer: whose run it is; its model is as it was before training.
        validation: validation data set, in any form that the trainer takes.
        retention: retention data set, likewise.
        fisher: the Fisher that was handed over, or None to fit one.
        fisher_dataset: rows to fit it on; None for the training rows.

    Raises:
        ConfigError, InputError: rows that cannot be used, by name.
    """
    options = trainer.args
    adapter = find_adapter(trainer.model)
    if hasattr(trainer.train_dataset, "__len__"):  # of a stream no row is known yet
        check_lengths(adapter, plain_rows(trainer.train_dataset), "training", trainer.row_length)
    validation_rows: list[dict[str, Any]] = []
    if options.objective != "stability":
        validation_rows = trainer.prepare_rows(validation, "validation")
        pool = check_pool(options, len(validation_rows), trainer.accelerator.num_processes)
        if trainer.accelerator.is_main_process:
            _warn_of_a_fixed_batch(pool, len(validation_rows))
        check_lengths(adapter, validation_rows, "validation", trainer.row_length)
        check_tokens(validation_rows, trainer.model, "validation")
    retention_rows: list[dict[str, Any]] = []
    if options.reads_retention:
        retention_rows = trainer.prepare_rows(retention, "retention")
        check_tokens(retention_rows, trainer.model, "retention")
    if options.reads_fisher:
        if fisher is None:
            fisher = _fit_or_load_fisher(trainer, fisher_dataset)
        layers = resolve_layers(adapter, read_layers(options.layers))
        weights = {one.weight_name: one.weight for one in adapter.scored_linears(layers)}
        # ZeRO-3 has cut them up already.
        if weights and all(weight.numel() for weight in weights.values()):
            fisher.check(adapter, list(weights), max_relative_drift=options.max_relative_drift)
    return RunRows(validation_rows, retention_rows, fisher)


def _warn_of_a_fixed_batch(pool: ValidationPool, rows: int) -> None:
    """Say how many of the validation rows no step looks at, where there are some."""
    used, held_out = len(pool.drawn), len(pool.held_out)
    if pool.mode != "fixed" or used + held_out == rows:
        return
    watched = f", {held_out} are only watched" if held_out else ""
    warn_caller(
        f"{used} of {rows} validation rows are valued against, the same at every step{watched}, "
        f"and {rows - used - held_out} play no part: validation_mode='pool' (--validation_mode "
        "pool) takes them in turn",
        AlphaTokenWarning,
    )


def _fit_or_load_fisher(trainer: TrainerInterface, dataset: Any) -> FisherDrift:
    """A Fisher fitted on these rows (training rows for None), or taken from the cache.

    Raises:
        ConfigError: the rows that were named for it leave no prompt.
        CoverageError: it would leave out a matrix that is valued.
    """
    options = trainer.args
    choice = ParameterChoice.read(options.parameters)
    scope = find_scope(find_adapter(trainer.model), read_layers(options.layers), choice)
    # Label values are of more than what a Fisher covers.
    if scope.uncovered and not scope.named and options.uncovered != "skip":
        name, reason = next(iter(scope.uncovered.items()))
        raise CoverageError(
            "the Fisher does not cover every matrix of the scored layers",
            got=f"{name}: {reason} ({len(scope.uncovered)} such), retention={options.retention!r}",
            why="their retention would count as zero",
            remedy="retention='none', or parameters='all' with retention='diagonal'",
        )
    rows = trainer.train_dataset if dataset is None else trainer.tokenised(dataset, "Fisher")
    prompts = trainer.fisher_prompts(rows, options.fisher_samples)
    if not prompts:
        raise ConfigError(
            "no row is left to fit the Fisher on",
            why="its responses are sampled after the prompts of these rows",
            remedy="check the columns and max_length of fisher_dataset",
        )
    with options.main_process_first(local=False, desc="the Fisher"):
        return fitted_fisher(
            trainer.model,
            prompts,
            options,
            cache_folder(options.fisher_cache, options.output_dir, "fisher"),
            progress=not options.disable_tqdm,  # a log that is no terminal gets a line now and then
            device=trainer.accelerator.device,
        )


def fisher_settings(options: AlphaOptions) -> dict[str, Any]:
    """Arguments of :func:`alphatoken.fit_fisher` that the options mean; the seed is always 0."""
    return {
        "samples": options.fisher_samples,
        "layers": read_layers(options.layers),
        "structure": options.retention,
        "max_new_tokens": options.fisher_max_new_tokens,
        "parameters": options.parameters,
        "batch_size": options.fisher_batch_size,
        "seed": 0,
    }


def cache_key(model: nn.Module, prompts: Any, settings: dict[str, Any]) -> str:
    """SHA-256 over all that the fit depends on.

    The class, all weights and buffers, which of them are trained and how adapters enter; the
    prompts; the settings; the versions of this library and of torch.
    """
    inputs = {
        "model": type(model).__qualname__,
        "weights": weights_digest(model),
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
        "prompts": dataset_digest(prompts),
        "settings": settings,
        "versions": [library_version(), torch.__version__],
    }
    return content_digest([inputs])


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

    Args:
        model: the reference, before it is wrapped or sharded.
        prompts: as for :func:`alphatoken.fit_fisher`.
        options: of the run.
        folder: of the cache; created.
        progress: as for :func:`alphatoken.fit_fisher`.
        device: where a model that waits on the CPU is fitted; it goes back afterwards.

    Raises:
        ConfigError: the weights are sharded already.
        FisherError: a file in ``folder`` cannot be read, and is to be removed; and what
            :func:`alphatoken.fit_fisher` raises. OSError: the folder cannot be made.
    """
    if spread := spread_name(model):
        raise ConfigError(
            "the Fisher cannot be fitted on sharded weights",
            got=f"'{spread}' is spread over processes",
            why="one process fits it, and cannot run the model alone",
            remedy="fit it beforehand (`alphatoken fisher`) and pass fisher=..., or "
            "retention='data'",
        )
    folder, settings = Path(folder), fisher_settings(options)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cache_key(model, prompts, settings)}.safetensors"

    def read() -> FisherDrift:
        return FisherDrift.load(path).to(next(model.parameters()).device)

    if path.exists():
        return read()
    # It is the dearest step before training.
    print(
        f"fitting the Fisher before training: {settings['samples']:,} samples, responses of "
        f"at most {settings['max_new_tokens']} tokens; kept in '{folder}' for later runs. "
        "Fewer: fisher_samples; none: retention='none'",
        file=sys.stderr,
        flush=True,
    )
    with on_accelerator(model, device or torch.device("cpu")):
        partial = path.with_suffix(".partial")
        fitted = fit_fisher(model, prompts, checkpoint=partial, progress=progress, **settings)
    # Launches that share a folder and start at once may each fit; the bits are the same, and files
    # are written whole or not at all.
    replace(fitted, metadata={**fitted.metadata, "cache_key": path.stem}).save(path)
    partial.unlink(missing_ok=True)
    return read()
