"""Rows that a run values against: validation rows, retention rows or a Fisher.

``prepare_run_rows`` tokenises, checks and fits when the trainer is made, so that a run refuses what
it cannot use before it trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, CoverageError
from alphatoken.model.layer_choice import read_layers
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.model.protocol import find_adapter
from alphatoken.model.scope import resolve_layers
from alphatoken.train.checks import check_lengths, check_pool, check_tokens
from alphatoken.train.datasets import plain_rows
from alphatoken.train.fisher_cache import fitted_fisher
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.placement import cache_folder

__all__ = ["RunRows", "prepare_run_rows"]


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
        check_pool(options, len(validation_rows), trainer.accelerator.num_processes)
        check_lengths(adapter, validation_rows, "validation", trainer.row_length)
        check_tokens(validation_rows, trainer.model, "validation")
    retention_rows: list[dict[str, Any]] = []
    if options.retention == "data" and options.objective != "adaptation":
        retention_rows = trainer.prepare_rows(retention, "retention")
        check_tokens(retention_rows, trainer.model, "retention")
    if options.reads_fisher:
        if fisher is None:
            fisher = fit_or_load_fisher(trainer, fisher_dataset)
        layers = resolve_layers(adapter, read_layers(options.layers))
        weights = {one.weight_name: one.weight for one in adapter.scored_linears(layers)}
        # ZeRO-3 has cut them up already.
        if weights and all(weight.numel() for weight in weights.values()):
            fisher.check(adapter, list(weights), max_relative_drift=options.max_relative_drift)
    return RunRows(validation_rows, retention_rows, fisher)


def fit_or_load_fisher(trainer: TrainerInterface, dataset: Any = None) -> FisherDrift:
    """A Fisher fitted on these rows (training rows for None), or taken from the cache.

    Raises:
        ConfigError: the rows that were named for it leave no prompt.
        CoverageError: it would leave out a matrix that is valued.
    """
    options = trainer.args
    _require_fisher_covers(trainer)
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


def _require_fisher_covers(trainer: TrainerInterface) -> None:
    """Check that what is valued has a Fisher, before it is fitted: 'label' values more than it."""
    options, adapter = trainer.args, find_adapter(trainer.model)
    choice = ParameterChoice.read(options.parameters, "parameters")
    scope = choice.scope(adapter, read_layers(options.layers))
    if scope.uncovered and not scope.named and options.uncovered != "skip":
        name, reason = next(iter(scope.uncovered.items()))
        raise CoverageError(
            "the Fisher does not cover every matrix of the scored layers",
            got=f"{name}: {reason} ({len(scope.uncovered)} such), retention={options.retention!r}",
            why="their retention would count as zero",
            remedy="retention='none', or parameters='all' with retention='diagonal'",
        )
