"""A Fisher is fitted once for a model, its prompts and settings, and read again by later runs.

An entry's name is a digest of all that it depends on, the weights included, so that one of another
model, data set or setting is never taken. Of several processes the main one comes first and fits,
resumably; the others find its file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alphatoken.direction.drift import FisherDrift, library_version
from alphatoken.direction.fisher import fit_fisher
from alphatoken.errors import ConfigError
from alphatoken.model.layer_choice import read_layers
from alphatoken.support.progress import ProgressSink
from alphatoken.support.resume import content_digest, weights_digest
from alphatoken.train.identity import dataset_digest
from alphatoken.train.options import AlphaOptions
from alphatoken.train.placement import on_accelerator, spread_name

__all__ = [
    "cache_key",
    "check_fisher_rows",
    "fisher_settings",
    "fitted_fisher",
]


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


def check_fisher_rows(options: AlphaOptions, fisher: FisherDrift | None, rows: Any) -> None:
    """Refuse a Fisher (``fisher=``), or rows for one (``fisher_dataset=``), that would go unused.

    The policy has no say: a control (random, all) may be given the same as the run that it is
    compared with.

    Raises:
        ConfigError: a Fisher is there already, or none is wanted.
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


def cache_key(model: nn.Module, prompts: Any, settings: dict[str, Any]) -> str:
    """SHA-256 over all that the fit depends on.

    The class, all weights and buffers and which of them are trained; the prompts; the settings;
    the versions of this library and of torch.
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

    Launches that share a folder and start at once may each fit; the bits are the same, and files
    are written whole or not at all.

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
    _announce(settings, folder)
    with on_accelerator(model, device or torch.device("cpu")):
        partial = path.with_suffix(".partial")
        fitted = fit_fisher(model, prompts, checkpoint=partial, progress=progress, **settings)
    replace(fitted, metadata={**fitted.metadata, "cache_key": path.stem}).save(path)
    partial.unlink(missing_ok=True)
    return read()


def _announce(settings: Mapping[str, Any], folder: Path) -> None:
    """Say what is about to be fitted: the dearest step before training."""
    print(
        f"fitting the Fisher before training: {settings['samples']:,} samples, responses of "
        f"at most {settings['max_new_tokens']} tokens; kept in '{folder}' for later runs. "
        "Fewer: fisher_samples; none: retention='none'",
        file=sys.stderr,
        flush=True,
    )
