"""Diagnostic ``utility``: predicted against actual change of the validation loss after one step.

A copy of the model takes one real optimizer step on a batch with all tokens, and again with some
left out; J is the mean validation loss, evaluated anew each time.

    u_S = J(step without the tokens in S) - J(step with all)        > 0: training on S was useful

First order in the step size eta, for values a_k, s tokens of n left out, mean over

    nothing (sum)        u_S = eta sum_S a_k
    all response tokens  u_S = eta sum_S a_k / n
    the tokens kept      u_S = eta (sum_S a_k - s mean a) / (n - s)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.certificate import metrics
from alphatoken.config import ScorerConfig
from alphatoken.data import Example
from alphatoken.errors import ConfigError, CoverageError, UnsupportedError
from alphatoken.estimate.matrices import Formed
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap
from alphatoken.fidelity.options import CheckedOptions, option, thinned
from alphatoken.fidelity.prediction import (
    Prediction,
    breakdown,
    first_order,
    relative_error,
    slope,
)
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.stepping import OPTIMIZERS, Stepper
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.tokenwise import draw_short, token_gradients
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.scope import resolve_layers
from alphatoken.scorer import Scorer
from alphatoken.select.masks import keep_count

__all__ = [
    "Drop",
    "Options",
    "diagnose",
]

Numbers = NDArray[np.float64]
_ADAPTIVE = tuple(name for name in OPTIMIZERS if name != "sgd")
_OF_RUN = (
    "optimizer", "learning_rate", "weight_decay", "momentum", "max_grad_norm", "normalization",
    "warmup",
)  # fmt: skip


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Settings of the diagnostic ``utility``; each field's help says what it is."""

    optimizer: str = option(
        "adamw", f"What takes the step: {', '.join(OPTIMIZERS)}.", choices=OPTIMIZERS
    )
    learning_rate: float = option(1e-4, "Step size of your run.", above=0)
    weight_decay: float = option(0.0, "Weight decay of your run.", least=0)
    momentum: float = option(0.0, "Momentum of sgd or rmsprop.", least=0)
    max_grad_norm: float = option(0.0, "Gradient clipping of your run; 0: none.", least=0)
    normalization: str = option(
        "response",
        "The training loss is divided by: 'response' all response tokens, 'kept' those left in, "
        "'sum' nothing.",
        choices=("response", "kept", "sum"),
    )
    warmup: int = option(
        32,
        "Steps of size 0 that fill the optimizer's state at the model's own weights.",
        least=0,
        first=8,
    )
    groups: int = option(
        12, "Random groups of tokens that are left out together.", least=FEWEST, first=FEWEST
    )
    group_share: float = option(
        0.1, "Share of the batch's tokens in each of them.", above=0, below=1
    )
    validation_tokens: int = option(
        1500,
        "Most validation response tokens at which the loss is evaluated again and again.",
        least=1,
        first=200,
    )
    step_sizes: tuple[float, ...] = option(
        (), "Step sizes to compare; none: 0.01 to 100 times the learning rate.", above=0, first=3
    )
    sweep_tokens: int = option(8, "Tokens left out one by one at each step size.", least=1, first=2)
    float64_parameters: int = option(
        20_000_000,
        "Models up to this size are stepped as float64 copies, against cancellation.",
        least=0,
    )
    draws: int = option(200, "Bootstrap samples of each interval.", least=1)

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if self.optimizer in _ADAPTIVE and self.warmup < 1:
            raise ConfigError(
                f"{self.optimizer} needs at least one warm-up step",
                got=repr(self.warmup),
                why="without second moments its first step is the gradient's sign",
            )

    def etas(self, share: float = 1.0) -> tuple[float, ...]:
        """Step sizes to compare, the user's among them; a share of those that nobody named."""
        usual = [self.learning_rate * 10 ** (i / 2) for i in range(-4, 5)]
        return tuple(sorted({*(self.step_sizes or thinned(usual, 3, share)), self.learning_rate}))


# --- what is dropped, and what is predicted ------------------------------------------------------


@dataclass(frozen=True)
class Drop:
    """Tokens that are left out together.

    Attributes:
        name: how they were chosen.
        tokens: places in (row, position) order.
    """

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Bench:
    """Everything that one diagnosis steps with."""

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

    def gradient_of(self, drop: Drop) -> Mapping[str, Tensor]:
        """Gradient of the sum of the losses of the tokens that are left out.

        A single token is sent back through its row alone.
        """
        if len(drop.tokens) == 1:
            one = [self.places[drop.tokens[0]]]
            stepper, device = self.stepper, self.subject.device
            return next(
                token_gradients(stepper.adapter, self.rows, one, stepper.parameters, device)
            )
        weights = torch.zeros(self.batch.mask.shape, dtype=torch.float64)
        for token in drop.tokens:
            weights[self.places[token]] = 1.0
        return self.stepper.gradient(self.batch, weights.to(self.batch.labels.device))

    def gradient_without(self, drop: Drop | None) -> Mapping[str, Tensor]:
        """Gradient of the training loss without these tokens, before clipping.

        Each matrix is formed when it is read.
        """
        left = self.count - (0 if drop is None else len(drop.tokens))
        divisor = {"sum": 1, "response": self.count, "kept": max(left, 1)}
        by = divisor[self.options.normalization]
        if drop is None:
            return Formed(self.summed, lambda name: self.summed[name] / by)
        part = self.gradient_of(drop)
        return Formed(self.summed, lambda name: (self.summed[name] - part[name]) / by)

    @property
    def factor(self) -> float:
        """What clipping multiplies the whole gradient by."""
        return self.stepper.clip_factor(self.gradient_without(None))

    def predicted(self, values: Numbers, drop: Drop, eta: float) -> float:
        """First-order change, with the clipping of the whole gradient."""
        return self.factor * first_order(values, drop.tokens, eta, self.options.normalization)


def _bench(subject: Subject, options: Options) -> _Bench:
    rows = subject.sample()[: subject.batch_size]
    subject.require_tokens(rows, 2 * FEWEST, "statistics over fewer tokens are noise")
    # The same draw as of training rows.
    judged = replace(subject, train=subject.validation).sample(most=options.validation_tokens)
    size = sum(p.numel() for p in subject.model.parameters())
    stepper = Stepper(
        subject.model,
        options.optimizer,
        subject.batches(judged),
        dtype=torch.float64 if size <= options.float64_parameters else None,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
    )
    if options.optimizer in _ADAPTIVE or options.momentum:
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


def _predictions(bench: _Bench) -> tuple[list[Prediction], list[str]]:
    """The first is the best one there is: exact, over all parameters, of the optimizer's step."""
    found, notes = [], []
    wanted = _wanted(bench)
    tracker = bench.subject.tracker("Predictions", len(wanted))
    adaptive = bench.options.optimizer in _ADAPTIVE
    for number, (name, config, own) in enumerate(wanted):
        kind = config.preconditioner
        if adaptive:
            name += f", P={'1' if kind is None else kind if isinstance(kind, str) else 'given'}"
        try:
            values = _values(bench, config)
        except (UnsupportedError, CoverageError) as problem:
            notes.append(f"{name} is left out: {str(problem).splitlines()[0]}")
            continue
        found.append(Prediction(name, values, kind is not None or not adaptive, own))
        tracker.report(number + 1)
    return found, notes


def _wanted(bench: _Bench) -> list[tuple[str, ScorerConfig, bool]]:
    """(name, options, whether they are the user's) of every prediction."""
    adaptive = bench.options.optimizer in _ADAPTIVE
    kinds: tuple[Any, ...] = ("full", "frozen", None) if adaptive else (None,)
    given = replace(
        bench.subject.config, objective="adaptation", precondition_after=1, curvature=False
    )
    own = given if adaptive else replace(given, preconditioner=None)
    exact = replace(own, estimator="label", part="both", derivative="forward_mode")
    layers = len(resolve_layers(bench.subject.adapter, own.layers))
    whole = replace(exact, layers="all", parameters="all")
    scored = replace(exact, parameters="linears")
    bases = [("exact, all parameters", whole)]
    if own.parameters != "all":
        bases.append((f"exact, linears of {layers} layers", scored))
    tried = [(name, replace(base, preconditioner=p)) for name, base in bases for p in kinds]
    listed = own.estimator == "label" and own.parameters in ("linears", "all")
    known = listed and not isinstance(own.preconditioner, Mapping)
    found = [(name, c, known and _alike(c, own)) for name, c in tried]
    if not known:
        further = "" if own.parameters == "linears" else f", {own.parameters}"
        name = f"{own.estimator}, {layers} layers{further}"
        if adaptive and own.preconditioner != "full":
            found.append((name, replace(own, preconditioner="full"), False))
        found.append((name, own, True))
    return found


def _alike(config: ScorerConfig, own: ScorerConfig) -> bool:
    names = ("parameters", "preconditioner")
    return all(getattr(config, name) == getattr(own, name) for name in names)


def _values(bench: _Bench, config: ScorerConfig) -> Numbers:
    validation = [{**b.inputs, "labels": b.labels} for b in bench.stepper.validation]
    optimizer = None if config.preconditioner is None else bench.stepper.optimizer
    scorer = Scorer(bench.stepper.model, validation, None, config, optimizer=optimizer)
    divisor = 1 if bench.options.normalization == "sum" else bench.count
    values = scorer.score(
        {**bench.batch.inputs, "labels": bench.batch.labels},
        step_weights=bench.factor * bench.batch.mask.double() / divisor,
    )
    found: Numbers = values.total[bench.batch.mask].detach().double().cpu().numpy()
    return found


def _singles(bench: _Bench) -> list[Drop]:
    """Sampled tokens of the shorter rows, one a drop."""
    chosen, _ = draw_short(
        [len(row.input_ids) for row in bench.rows],
        np.array([row for row, _ in bench.places]),
        bench.subject.oracle_tokens,
        bench.subject.seed,
    )
    return [Drop("one", (int(place),)) for place in chosen]


def _random_groups(bench: _Bench) -> list[Drop]:
    generator = np.random.default_rng(bench.subject.seed + 1)
    size = keep_count(bench.options.group_share, bench.count)
    return [
        Drop("random", tuple(sorted(generator.permutation(bench.count)[:size].tolist())))
        for _ in range(bench.options.groups)
    ]


def _selections(bench: _Bench, predictions: Sequence[Prediction]) -> list[Drop]:
    """What selection at the user's ratio would leave out, by several rules, and the opposite."""
    count = bench.count - keep_count(bench.subject.ratio, bench.count)
    if not count:
        return []
    generator = np.random.default_rng(bench.subject.seed + 2)
    rules = {"random": generator.permutation(bench.count)}
    for prediction in (p for p in predictions if p.own or p is predictions[0]):
        rules[f"lowest by {prediction.name}"] = np.argsort(prediction.values, kind="stable")
    rules[f"highest by {predictions[0].name}"] = np.argsort(-predictions[0].values, kind="stable")
    return [Drop(name, tuple(sorted(order[:count].tolist()))) for name, order in rules.items()]


# --- what happens --------------------------------------------------------------------------------


def _actual(
    bench: _Bench, drops: Sequence[Drop], etas: Sequence[float], label: str
) -> tuple[Numbers, Numbers]:
    """u_S of each drop at each step size (drops, sizes); J after the step with all tokens."""
    stepper, tracker = bench.stepper, bench.subject.tracker(label, len(drops))

    def objectives(gradient: Mapping[str, Tensor]) -> list[float]:
        found = []
        for eta in etas:
            with stepper.stepped(gradient, eta):
                found.append(stepper.objective())
        return found

    whole = np.array(objectives(bench.gradient_without(None)))
    without = []
    for number, drop in enumerate(drops):
        without.append(objectives(bench.gradient_without(drop)))
        tracker.report(number + 1)
    return np.array(without).reshape(-1, len(etas)) - whole, whole


def _quality(
    prediction: Prediction, predicted: Numbers, actual: Numbers, groups: Any, draws: int, what: str
) -> dict[str, Estimate]:
    def boot(statistic: Any) -> Estimate:
        return bootstrap(statistic, predicted, actual, groups=groups, draws=draws, what=what)

    unscaled = Estimate.undefined(len(actual), "not in units of the loss")
    return {
        "spearman": boot(metrics.spearman),
        "sign_agreement": boot(metrics.sign_agreement),
        "slope": boot(slope) if prediction.calibrated else unscaled,
        "relative_error": boot(relative_error) if prediction.calibrated else unscaled,
    }


def _quality_table(
    bench: _Bench,
    key: str,
    title: str,
    predictions: Sequence[Prediction],
    drops: Sequence[Drop],
    actual: Numbers,
) -> Table:
    single = key == "one-token"
    groups = [bench.places[drop.tokens[0]][0] for drop in drops] if single else None
    records = []
    for prediction in predictions:
        predicted = _predicted(bench, prediction, drops, bench.options.learning_rate)
        found = _quality(
            prediction, predicted, actual, groups, bench.options.draws,
            "tokens" if single else "groups",
        )  # fmt: skip
        records.append({"prediction": prediction.name} | found)
    note = "With P = 1 under an adaptive optimizer a value is not in units of the loss."
    return Table.of(key, title, records, note)


def _predicted(bench: _Bench, prediction: Prediction, drops: Sequence[Drop], eta: float) -> Numbers:
    return np.array([bench.predicted(prediction.values, drop, eta) for drop in drops])


def _drop_records(
    bench: _Bench, predictions: Sequence[Prediction], drops: Sequence[Drop], actual: Numbers
) -> list[dict[str, Any]]:
    eta = bench.options.learning_rate
    by_name = {p.name: _predicted(bench, p, drops, eta) for p in predictions}
    records = []
    for place, drop in enumerate(drops):
        where = bench.places[drop.tokens[0]] if len(drop.tokens) == 1 else (None, None)
        record: dict[str, Any] = {"left_out": drop.name, "tokens": len(drop.tokens)}
        record |= {"row": where[0], "position": where[1], "actual": float(actual[place])}
        records.append(record | {name: float(found[place]) for name, found in by_name.items()})
    return records


# --- where linearisation breaks ------------------------------------------------------------------


ONE, GROUP = "one token", "groups"


def _sweep_table(
    bench: _Bench, prediction: Prediction, singles: Sequence[Drop], groups: Sequence[Drop]
) -> Table:
    """Relative error of the prediction by step size, over the same tokens at every size."""
    apart = max(1, len(singles) // bench.options.sweep_tokens)
    tried = {ONE: list(singles)[::apart][: bench.options.sweep_tokens], GROUP: list(groups)[:4]}
    etas = bench.options.etas(bench.subject.share)
    errors: dict[str, list[float]] = {}
    for name, drops in tried.items():
        actual, _ = _actual(bench, drops, etas, f"Step sizes, {name}")
        errors[name] = [
            relative_error(_predicted(bench, prediction, drops, eta), actual[:, place])
            for place, eta in enumerate(etas)
        ]
    records = [
        {"step_size": eta} | {name: found[place] for name, found in errors.items()}
        for place, eta in enumerate(etas)
    ]
    note = "||predicted - actual|| / ||actual||."
    return Table.of("step-size", "Relative error of the prediction by step size", records, note)


# --- the diagnosis -------------------------------------------------------------------------------


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Leave tokens out of one real step; see the head of this file."""
    options = options or Options()
    bench = _bench(subject, options)
    predictions, left_out = _predictions(bench)
    best = predictions[0]
    singles, groups = _singles(bench), _random_groups(bench)
    chosen = _selections(bench, predictions)
    eta, before = options.learning_rate, bench.stepper.objective()
    found, (after,) = _actual(bench, singles, [eta], "Leaving one token out")
    one = found[:, 0]
    several = _actual(bench, [*groups, *chosen], [eta], "Leaving groups out")[0][:, 0]
    random = several[: len(groups)]
    tables = (
        _quality_table(bench, "one-token", "Leaving one token out", predictions, singles, one),
        _quality_table(
            bench, "random-groups", "Leaving random groups out", predictions, groups, random
        ),
        Table.of(
            "selection",
            f"Leaving {1 - subject.ratio:.0%} out",
            _drop_records(bench, predictions, chosen, several[len(groups) :]),
            f"Change of the validation loss against the step with all tokens, which moves it by "
            f"{after - before:+.3g}. Positive: leaving these tokens out costs.",
        ),
        _sweep_table(bench, best, singles, groups),
        Table.of(
            "left-out",
            "Every token and random group that was left out",
            _drop_records(bench, predictions, [*singles, *groups], np.concatenate([one, random])),
        ),
    )
    return conclude(
        "utility",
        subject,
        _answer(bench, tables[0], predictions),
        [*tables, _sweep_numbers(tables[3], eta)],
        _figures(tables, predictions, eta),
        valued=bench.rows,
        notes=[*_notes(bench), *left_out],
        settings={name: value for name, value in asdict(options).items() if name in _OF_RUN},
    )


def _figures(
    tables: Sequence[Table], predictions: Sequence[Prediction], eta: float
) -> Iterator[Figure]:
    """Two scatters at most (of the best prediction and of the user's own), sweep, selection."""
    _, _, selection, by_size, left_out = tables
    best = predictions[0]
    for place, shown in enumerate(p for p in predictions if p.own or p is best):
        yield Figure(
            "scatter",
            f"scatter-{place + 1}",
            left_out,
            f"Predicted against actual effect: {shown.name}{' (yours)' if shown.own else ''}",
            "On the dashed line the prediction is right; a cloud without slope means that the "
            "value says nothing about what the step does. Without a dashed line the value is not "
            "in units of the loss, and only the order counts. Axes are linear near 0.",
            x=shown.name,
            y="actual",
            series="left_out",
            guides=(Guide(of="equal", label="right"),) if shown.calibrated else (),
            xlabel="predicted" if shown.calibrated else "value, times the step size",
            ylabel="actual change of the validation loss",
            scales=("symlog", "symlog"),
        )
    yield Figure(
        "lines",
        "linearisation",
        by_size,
        "Where first order breaks: error of the prediction by step size",
        "To the right lines rise because a step is not infinitesimal: read where they cross 10 % "
        "and 50 %. A line that rises to the left as well shows rounding.",
        x="step_size",
        y=(ONE, GROUP),
        guides=(Guide(eta, label="your step size"), Guide(0.1, "y"), Guide(0.5, "y")),
        ylabel="||predicted - actual|| / ||actual||",
        scales=("log", "log"),
    )
    yield Figure(
        "bars",
        "selection-effect",
        selection,
        "What leaving a part of the tokens out does to the validation loss",
        "A rule is good if leaving its lowest tokens out lies to the left of leaving random "
        "ones out. The distance between the two marks is what first order misses.",
        x=("actual", best.name),
        y="left_out",
        guides=(Guide(0.0),),
        xlabel="change of the validation loss (right: worse without them)",
    )


def _answer(bench: _Bench, one: Table, predictions: Sequence[Prediction]) -> Answer:
    row = next((i for i, p in enumerate(predictions) if p.own), 0)
    score, eta = one.estimate(row, "spearman"), bench.options.learning_rate
    says = "do rank" if score.low > 0 else "cannot be said to rank"
    return Answer(
        f"Values {says} tokens by what one {bench.options.optimizer} step of size {eta:g} does.",
        str(score),
        f"rank correlation of the value '{predictions[row].name}' with what leaving a token out of "
        "that step does",
        "where predicted and actual change disagree, take a smaller step, or trust signs and ranks "
        "rather than sizes.",
    )


def _sweep_numbers(sweep: Table, eta: float) -> Table:
    """Errors at the user's step size, and from which size on they are too large."""
    records: list[dict[str, Any]] = list(sweep.records())
    etas = [record["step_size"] for record in records]
    found: dict[str, float | str] = {}
    for name in (ONE, GROUP):
        errors = [record[name] for record in records]
        found[f"{name}: relative error at your step size"] = errors[etas.index(eta)]
        for limit in (0.1, 0.5):
            at = breakdown(etas, errors, limit)
            found[f"{name}: off by more than {limit:.0%} from this step size on"] = (
                "no size tried" if at is None else "every size tried" if at == 0 else f"{at:.2g}"
            )
    return Table.of_numbers(found)


def _notes(bench: _Bench) -> list[str]:
    stepper, options, subject = bench.stepper, bench.options, bench.subject
    dtype = str(next(stepper.model.parameters()).dtype).removeprefix("torch.")
    tokens = sum(batch.response_tokens for batch in stepper.validation)
    notes = [
        f"{min(subject.oracle_tokens, bench.count)} of the tokens were left out one by one, drawn "
        "at random from the shorter half of the rows: each costs a backward through its row. The "
        f"loss is over {tokens} validation response tokens.",
        f"Steps were taken on a {dtype} copy of the model.",
    ]
    if options.optimizer in _ADAPTIVE or options.momentum:
        notes.append(
            f"The optimizer's state comes from {options.warmup} steps of size 0 on training rows, "
            "so it belongs to the model's present weights."
        )
    if options.max_grad_norm:
        notes.append(
            f"Clipping multiplies the whole gradient by {bench.factor:.3g}; that leaving a token "
            "out changes this factor is in the actual effects, not in the predictions."
        )
    if subject.retention or subject.fisher is not None:
        notes.append("Predictions are of the validation side alone: no retention term.")
    return notes
