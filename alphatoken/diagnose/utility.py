"""Diagnostic ``utility``: predicted against actual change of the validation loss after one step.

A copy of the model takes one real optimizer step on a batch with all n tokens, the training loss
being their mean, and again with one token k left out of the sum; J is the mean validation loss,
evaluated anew each time.

    u_k = J(step without k) - J(step with all)        > 0: training on k was useful
        = eta a_k / n                                 to first order in the step size eta

Oracle: ``alphatoken.oracle.utility``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphatoken.config import ScorerConfig
from alphatoken.data import Example
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import Diagnosis, Table, graded
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.statistics import (
    FEWEST,
    Estimate,
    Numbers,
    bootstrap,
    relative_error,
    spearman,
)
from alphatoken.diagnose.stepping import OPTIMIZERS, Stepper, draw_short, token_gradients
from alphatoken.diagnose.subject import Subject, conclude, require_first_order
from alphatoken.diagnose.valuing import with_estimator
from alphatoken.errors import ConfigError, CoverageError, UnsupportedError
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.scope import resolve_layers
from alphatoken.scorer import Scorer
from alphatoken.support.options import option

_FLOAT64 = 20_000_000
"""Models of at most so many parameters are stepped as float64 copies, against cancellation."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Settings of the diagnostic ``utility``; each field's help says what it is."""

    optimizer: str = option(
        "adamw", f"What takes the step: {', '.join(OPTIMIZERS)}.", choices=OPTIMIZERS
    )
    learning_rate: float = option(1e-4, "Step size of your run.", above=0)
    weight_decay: float = option(0.0, "Weight decay of your run.", at_least=0)
    warmup: int = option(
        32,
        "Steps of size 0 that fill the optimizer's state at the model's own weights.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        """Check options together, too."""
        super().__post_init__()
        if self.optimizer == "adamw" and self.warmup < 1:
            raise ConfigError(
                "adamw needs at least one warm-up step",
                got=repr(self.warmup),
                why="without second moments its first step is the gradient's sign",
            )


# --- what is left out, and what is predicted -----------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """Everything that one diagnosis steps with; tokens are numbered in (row, position) order."""

    subject: Subject
    options: Options
    rows: list[Example]
    batch: LabelledBatch
    places: list[tuple[int, int]]
    stepper: Stepper
    summed: dict[str, Tensor]

    @property
    def count(self) -> int:
        """Response tokens of the batch."""
        return len(self.places)

    def gradient_of(self, token: int) -> Mapping[str, Tensor]:
        """Gradient of the loss of one token, sent back through its row alone."""
        stepper, place = self.stepper, [self.places[token]]
        device = self.subject.device
        gradients = token_gradients(stepper.adapter, self.rows, place, stepper.parameters, device)
        return next(gradients)

    def gradient_without(self, token: int | None) -> Callable[[str], Tensor]:
        """Gradient of the training loss without this token, each matrix formed when it is read."""
        if token is None:
            return lambda name: self.summed[name] / self.count
        part = self.gradient_of(token)
        return lambda name: (self.summed[name] - part[name]) / self.count

    def predicted(self, values: Numbers, tokens: Sequence[int]) -> Numbers:
        """First-order changes at the user's step size."""
        return self.options.learning_rate / self.count * values[list(tokens)]

    def calibrated(self, config: ScorerConfig) -> bool:
        """Whether these values are in units of the loss; else only their ranks mean something."""
        return config.preconditioner is not None or self.options.optimizer != "adamw"


def _bench(subject: Subject, options: Options) -> _Bench:
    rows = subject.sample()[: subject.batch_size]
    subject.require_tokens(rows, 2 * FEWEST, "statistics over fewer tokens are noise")
    size = sum(p.numel() for p in subject.model.parameters())
    stepper = Stepper(
        subject.model,
        options.optimizer,
        subject.batches(subject.validation),
        dtype=torch.float64 if size <= _FLOAT64 else None,
        weight_decay=options.weight_decay,
    )
    if options.optimizer == "adamw":
        tracker = subject.tracker("Filling the optimizer's state", options.warmup)
        stepper.warm_up(_warm_up_batches(subject, stepper, options.warmup, tracker))
    stepper.set_rate(options.learning_rate)
    batch = stepper.read(*subject.batches(rows, len(rows)))
    places = [(int(b), int(i)) for b, i in batch.mask.nonzero().tolist()]
    summed = stepper.gradient(batch, batch.mask)
    return _Bench(subject, options, rows, batch, places, stepper, summed)


def _warm_up_batches(
    subject: Subject, stepper: Stepper, steps: int, tracker: Any
) -> Iterator[LabelledBatch]:
    """Random training rows, a batch a step."""
    generator = np.random.default_rng(subject.seed)
    usable = [row for row in subject.train if row.response_tokens]
    for step in range(steps):
        chosen = generator.permutation(len(usable))[: subject.batch_size]
        yield stepper.read(*subject.batches([usable[i] for i in chosen]))
        tracker.report(step + 1)


def _wanted(bench: _Bench) -> dict[str, ScorerConfig]:
    """Options of every prediction by its name.

    The first is the best that there is: exact, over all parameters, of the optimizer's step. The
    last is the user's own.
    """
    adaptive = bench.options.optimizer == "adamw"
    kinds: tuple[Any, ...] = ("full", "frozen", None) if adaptive else (None,)
    adaptation = replace(bench.subject.config, objective="adaptation", precondition_after=1)
    own = adaptation if adaptive else replace(adaptation, preconditioner=None)
    whole = replace(
        with_estimator(own, "label"), derivative="forward_mode", layers="all", parameters="all"
    )
    configs = [("exact, all parameters", replace(whole, preconditioner=p)) for p in kinds]
    further = "" if own.parameters == "linears" else f", {own.parameters}"
    layers = resolve_layers(bench.subject.adapter, own.layers)
    name = f"{own.estimator}, {len(layers)} layers{further}"
    if adaptive and own.preconditioner != "full":
        configs.append((name, replace(own, preconditioner="full")))
    wanted = {}
    configs.append((name, own))
    for prediction, config in configs:
        kind = "1" if config.preconditioner is None else config.preconditioner
        suffix = f", P={kind if isinstance(kind, str) else 'given'}" if adaptive else ""
        wanted[prediction + suffix] = config
    return wanted


def _predictions(bench: _Bench) -> tuple[dict[str, Numbers], list[str]]:
    """Values of all tokens by the name of the prediction, and why some are left out."""
    predictions, notes = {}, []
    wanted = _wanted(bench)
    tracker = bench.subject.tracker("Predictions", len(wanted))
    for number, (name, config) in enumerate(wanted.items()):
        try:
            predictions[name] = _values(bench, config)
        except (UnsupportedError, CoverageError) as problem:
            notes.append(f"{name} is left out: {str(problem).splitlines()[0]}")
            continue
        tracker.report(number + 1)
    return predictions, notes


def _values(bench: _Bench, config: ScorerConfig) -> Numbers:
    validation = [{**b.inputs, "labels": b.labels} for b in bench.stepper.validation]
    optimizer = None if config.preconditioner is None else bench.stepper.optimizer
    scorer = Scorer(bench.stepper.model, validation, None, config, optimizer=optimizer)
    values = scorer.score(
        {**bench.batch.inputs, "labels": bench.batch.labels},
        step_weights=bench.batch.mask.double() / bench.count,
    )
    flat: Numbers = values.total[bench.batch.mask].detach().double().cpu().numpy()
    return flat


# --- what happens --------------------------------------------------------------------------------


def _tokens(bench: _Bench) -> list[int]:
    """Sampled tokens of the shorter rows, in (row, position) order."""
    chosen, _ = draw_short(
        [len(row.input_ids) for row in bench.rows],
        np.array([row for row, _ in bench.places]),
        bench.subject.oracle_tokens,
        bench.subject.seed,
    )
    return [int(place) for place in chosen]


def _actual(bench: _Bench, tokens: Sequence[int], eta: float) -> Numbers:
    """u_k of each token at a step of size eta."""
    stepper, tracker = bench.stepper, bench.subject.tracker("Leaving one out", len(tokens))

    def objective(gradient: Callable[[str], Tensor]) -> float:
        with stepper.stepped(gradient, eta):
            return stepper.objective()

    whole = objective(bench.gradient_without(None))
    changes = []
    for number, token in enumerate(tokens):
        changes.append(objective(bench.gradient_without(token)) - whole)
        tracker.report(number + 1)
    return np.array(changes)


def slope(predicted: Numbers, actual: Numbers) -> float:
    """Least-squares slope of actual on predicted through 0: 1 where the scale is right."""
    square = float(predicted @ predicted)
    return float(predicted @ actual) / square if square else math.nan


def _quality(
    bench: _Bench, values: Numbers, tokens: Sequence[int], actual: Numbers, *, calibrated: bool
) -> dict[str, Estimate]:
    predicted = bench.predicted(values, tokens)
    rows = np.array([bench.places[token][0] for token in tokens])
    unscaled = Estimate.undefined(len(actual), "not in units of the loss")

    def boot(statistic: Callable[[Numbers, Numbers], float]) -> Estimate:
        return bootstrap(statistic, predicted, actual, groups=rows)

    return {
        "spearman": boot(spearman),
        "slope": boot(slope) if calibrated else unscaled,
        "relative_error": boot(relative_error) if calibrated else unscaled,
    }


# --- the diagnosis -------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Leave tokens out of one real step; see the head of this file.

    Raises:
        InputError: too few response tokens. NumericalError: the loss after a step is not finite.
        ConfigError: values along a walk.
    """
    options = options or Options()
    require_first_order(subject.config)
    bench = _bench(subject, options)
    wanted = _wanted(bench)
    predictions, left_out = _predictions(bench)
    tokens = _tokens(bench)
    actual = _actual(bench, tokens, options.learning_rate)
    records = [
        {"prediction": name}
        | _quality(bench, values, tokens, actual, calibrated=bench.calibrated(wanted[name]))
        for name, values in predictions.items()
    ]
    quality = Table.of(
        "one-token",
        "Leaving one token out",
        records,
        "With P = 1 under an adaptive optimizer a value is not in units of the loss.",
    )
    *_, own = wanted
    own = own if own in predictions else next(iter(predictions))
    score = quality.estimate(list(predictions).index(own), "spearman")
    return conclude(
        "utility",
        subject,
        f"Values ({own}) {'rank' if score.low > 0 else 'cannot be said to rank'} tokens by "
        f"what one {options.optimizer} step of size {options.learning_rate:g} does: rank "
        f"correlation {score}.",
        [quality],
        [_figure(bench, predictions, own, tokens, actual, bench.calibrated(wanted[own]))],
        valued=bench.rows,
        notes=[*_notes(bench, tokens), *left_out],
        settings=asdict(options),
        mark=graded(score),
    )


def _figure(
    bench: _Bench,
    predictions: Mapping[str, Numbers],
    own: str,
    tokens: Sequence[int],
    actual: Numbers,
    calibrated: bool,
) -> Figure:
    """The user's prediction against what happened, over a table with every prediction."""
    predicted = {name: bench.predicted(values, tokens) for name, values in predictions.items()}
    records = [
        {"row": bench.rows[row].row.index, "position": position}
        | {"actual": float(actual[number])}
        | {name: float(values[number]) for name, values in predicted.items()}
        for number, (row, position) in enumerate(bench.places[token] for token in tokens)
    ]
    return Figure(
        "scatter",
        "scatter",
        Table.of("left-out", "Every token that was left out", records),
        f"Predicted against actual effect: {own}",
        "On the dashed line the prediction is right; without one the value is not in units of the "
        "loss, and only the order counts.",
        x=own,
        y="actual",
        guides=(Guide(of="equal", label="right"),) if calibrated else (),
        xlabel="predicted" if calibrated else "value, times the step size",
        ylabel="actual change of the validation loss",
    )


def _notes(bench: _Bench, left_out: Sequence[int]) -> list[str]:
    stepper, options, subject = bench.stepper, bench.options, bench.subject
    dtype = str(next(stepper.model.parameters()).dtype).removeprefix("torch.")
    tokens = sum(batch.response_tokens for batch in stepper.validation)
    longest = max(len(bench.rows[bench.places[token][0]].input_ids) for token in left_out)
    notes = [
        f"{len(left_out)} of the tokens were left out one by one, drawn "
        f"at random from rows of at most {longest} positions (each costs a backward through its "
        f"row). The loss is over {tokens} validation response tokens.",
        f"Steps were taken on a {dtype} copy of the model.",
    ]
    if options.optimizer == "adamw":
        notes.append(
            f"The optimizer's state comes from {options.warmup} steps of size 0 on training rows, "
            "so it belongs to the model's present weights."
        )
    if subject.retention or subject.fisher is not None:
        notes.append("Predictions are of the validation side alone: no retention term.")
    return notes
