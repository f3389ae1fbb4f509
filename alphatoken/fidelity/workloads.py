"""What each diagnostic does, counted: its stages in priced units, as a function of its sizes.

One function a diagnostic, beside the order in which its sizes shrink: what matters least first,
and what matters most by the smallest steps. Counts follow the code of the diagnostic; that they
are right to a factor of two on a real model is measured, not proved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from alphatoken.data import Example
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.budget import Size, Stage, Units, Work, together
from alphatoken.fidelity.estimators import spread, windows_of
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.own_values import FEWEST_ROWS
from alphatoken.fidelity.prices import Counts
from alphatoken.fidelity.readings import WINDOWED
from alphatoken.fidelity.sensitivity import layer_choices
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.utility import judged_rows
from alphatoken.fidelity.value_propagation import pair_seconds
from alphatoken.model.batch_slice import LENGTH, ROWS

__all__ = ["WORKLOADS", "resized"]

_TOKENS = (96, 1000)
"""Response tokens that are the least: of as many rows as intervals over rows need, within these."""
_ROWS = 8
"""Validation rows below which the objective is that of single rows."""
_SLOW = 2**0.25
"""A factor for sizes that shrink last."""

Sizes = Mapping[str, Any]


def resized(subject: Subject, options: Any, sizes: Sizes) -> tuple[Subject, Any]:
    """Subject and options with planned sizes: each belongs to the one that has such a field."""
    own = {one.name for one in fields(options)}
    mine = {name: value for name, value in sizes.items() if name in own}
    shared = {name: value for name, value in sizes.items() if name not in own}
    return subject.resized(**shared), replace(options, **mine)


# --- sizes that several have ----------------------------------------------------------------------


def _tokens(subject: Subject, rows: int = FEWEST) -> Size:
    lengths = [row.response_tokens for row in subject.train if row.response_tokens]
    asked = min(subject.tokens, sum(lengths))
    least = min(max(_TOKENS[0], rows * -(-sum(lengths) // len(lengths))), _TOKENS[1])
    name = "response tokens to value"
    return Size.number("tokens", asked, min(asked, least), name, by=_SLOW, interval=True)


def _objective(subject: Subject) -> Size:
    asked = len(subject.validation)
    name = "validation rows in the objective"
    return Size.number("objective_rows", asked, min(asked, _ROWS), name, by=_SLOW)


def _validation(asked: int, subject: Subject) -> Size:
    """Of diagnostics that draw their validation rows themselves."""
    most = min(asked, len(subject.validation))
    name = "validation rows to draw from"
    least = min(most, max(2 * FEWEST_ROWS, _ROWS))
    return Size.number("validation_rows", most, least, name, by=_SLOW, interval=True)


def _number(options: Any, name: str, least: int, what: str, **more: Any) -> Size:
    asked = getattr(options, name)
    return Size.number(name, asked, min(asked, least), what, **more)


def _thinned(
    name: str, values: Sequence[Any], least: int, what: str, must: Sequence[Any] = ()
) -> Size:
    """Several values; every level leaves out every second one, but the ends and ``must``."""
    levels = [tuple(values)]
    while len(levels[-1]) > least:
        now = levels[-1]
        kept = [x for i, x in enumerate(now) if i % 2 == 0 or x == now[-1] or x in must]
        if len(kept) in (len(now), 0) or len(kept) < least:
            break
        levels.append(tuple(kept))
    return Size(name, tuple(levels), what)


def _tuning(counts: Counts) -> Work | None:
    """The fine-tuning that stands in for a missing reference; the same for all diagnostics."""
    subject = counts.subject
    if subject.reference is not None:
        return None

    def stages(size: Sizes) -> list[Stage]:
        mean = _mean_step(counts, subject.train)
        units = _times(mean, size["tuning_steps"])
        return [
            Stage(
                "Fine-tuning a copy",
                together(units, {"sweep": 3.0 * size["tuning_steps"]}),
                counts.memory(4, subject.train[: subject.batch_size]),
            )
        ]

    asked = subject.tuning_steps
    steps = Size.number("tuning_steps", asked, min(asked, 8), "steps of fine-tuning", by=_SLOW)
    return Work((steps,), stages)


def _mean_step(counts: Counts, rows: Sequence[Example]) -> Units:
    """One training step on a batch of these rows, in the mean over batches."""
    usable = [row for row in rows if row.response_tokens]
    batches = max(1, -(-len(usable) // counts.subject.batch_size))
    return _times(counts.step(usable), 1 / batches)


def _fisher(counts: Counts, samples: int, layers: int | None = None) -> Units:
    """A Fisher fitted with labels drawn on given texts: a gradient for each sample, row by row."""
    usable = counts.subject.fisher_rows
    whole = together(
        counts.passes("forward", usable, size=1),
        counts.passes("backward", usable, counts.share(layers), size=1),
    )
    each = _times(whole, 1 / max(1, len(usable)))
    return together(_times(each, samples), {"sweep": samples / 4})


def _times(units: Units, count: int | float) -> Units:
    """The same work so many times."""
    return {unit: n * count for unit, n in units.items()}


def _draws(statistics: int | float, draws: int, tokens: int) -> Units:
    """So many bootstrapped statistics over so many tokens."""
    return {"draw": float(statistics) * draws * (0.3 + 0.7 * tokens / 1000)}


# --- the nine -------------------------------------------------------------------------------------


def _estimators(counts: Counts, options: Any) -> Work:
    subject, depth = counts.subject, counts.depth
    asked = subject.sample()
    longest = max(len(row.input_ids) for row in asked)
    layers = options.layers or spread(depth, 8, counts.scored)
    windows = options.windows or tuple(w for w in windows_of(longest) if w is not None)
    fewest = [spread(depth, most, counts.scored) for most in (8, 6, 5, 4, 3)]
    levels = (layers,) if options.layers else tuple(dict.fromkeys([layers, *fewest]))

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        scopes, spreads = len(size["layers"]), len(size["windows"]) + 1
        shares = [counts.share(k) for k in size["layers"]]
        kinds = len(ESTIMATORS) - 1  # label apart
        keys = 3 + 2 * spreads
        settings = len(ESTIMATORS) * scopes + len(WINDOWED) * spreads + 1
        short = sorted(rows, key=lambda row: len(row.input_ids))
        half = short[: -(-len(short) // 2)]
        slices = {
            f"{kind} {part}": count
            for kind in ("forward", "backward")
            for part, count in (("pass", 1.0), ("position", float(ROWS * LENGTH)))
        }
        mean = _times(counts.step(half, size=1), 1 / len(half))
        each = {unit: n for unit, n in mean.items() if unit.startswith("backward")}
        priced = rows[: min(size["cost_rows"], subject.batch_size)]
        runs, objective = 1 + size["repeats"], subject.validation[: size["objective_rows"]]
        captured = together(
            counts.passes("forward", rows, 1 + keys), counts.passes("backward", rows, 2)
        )

        def priced_at(estimator: str, scored: int) -> Units:
            """An observed forward of a scorer with a direction of one row, then its values."""
            return together(
                counts.gradient(subject.validation[:1], scored),
                counts.passes("forward", priced),
                counts.beyond_forward(priced, estimator, scored, runs),
            )

        costs = [priced_at(name, k) for name in ESTIMATORS for k in size["layers"]]
        costs += [priced_at(name, counts.scored) for name in WINDOWED for _ in range(spreads)]
        directions = [counts.gradient(subject.validation[: len(priced)], k) for k in size["layers"]]
        noise = together(
            counts.passes("forward", rows, 6),
            counts.passes("backward", rows, 2),
            counts.passes("dual", rows, 1 + counts.share()),
        )
        tokens = size["tokens"]
        return [
            Stage(
                "What the model allows",
                _times(slices, 6.0 * len(ESTIMATORS)),
                counts.memory(2, short[:2]),
            ),
            Stage("Validation gradient", counts.step(objective), counts.memory(2, objective)),
            Stage(
                "Values, all settings",
                together(captured, counts.passes("dual", rows, sum(shares) + 1)),
                counts.memory(2, rows),
            ),
            Stage("Agreement with intervals", _draws(8.0 * settings, options.draws, tokens)),
            Stage(
                "Tokens one by one",
                together(
                    _times(each, size["oracle_tokens"]),
                    {"sweep": float(size["oracle_tokens"])},
                    counts.passes("forward", half, size=1),
                    _draws(16.0 * scopes * kinds, options.draws, size["oracle_tokens"]),
                ),
                counts.memory(2, half[-1:], 1),
            ),
            Stage(
                "Cost",
                together(
                    *costs,
                    _times(together(*directions), runs),
                    counts.step(priced, 2 * runs),
                ),
                counts.memory(2, priced),
            ),
            Stage(
                "Values, planted noise",
                together(noise, counts.passes("forward", objective)),
                counts.memory(2, rows),
            ),
        ]

    sizes = (
        _number(options, "cost_rows", 1, "rows of the batch that is priced", by=4.0),
        _number(options, "repeats", 1, "timings of each computation"),
        _thinned("windows", windows, 2, "windows"),
        Size("layers", levels, "numbers of scored layers"),
        _number(options, "draws", 100, "bootstrap samples of each interval"),
        Size.number(
            "oracle_tokens", subject.oracle_tokens, min(subject.oracle_tokens, FEWEST),
            "tokens sent one by one", interval=True,
        ),
        _objective(subject),
        _tokens(subject),
    )  # fmt: skip
    return Work(sizes, stages)


def _utility(counts: Counts, options: Any) -> Work:
    subject = counts.subject
    adaptive = options.optimizer != "sgd"
    scorers = 8 if adaptive else 3

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])[: subject.batch_size]
        whole = counts.step(rows, size=len(rows))
        judged = judged_rows(subject, size["validation_tokens"])
        short = sorted(rows, key=lambda row: len(row.input_ids))[: -(-len(rows) // 2)]
        single = _times(counts.step(short, size=1), 1 / len(short))
        moved = together(counts.passes("forward", judged), {"sweep": 6.0})
        singles, groups = size["oracle_tokens"], size["groups"]
        sweep = min(size["sweep_tokens"], singles)
        etas = len(size["step_sizes"])

        copies = 4 if adaptive else 2
        return [
            Stage(
                "Filling the optimizer's state",
                together(
                    _times(_mean_step(counts, subject.train), size["warmup"]),
                    {"sweep": 6.0 * size["warmup"]},
                ),
                counts.memory(copies, rows),
            ),
            Stage(
                "Predictions",
                together(
                    counts.step(judged, scorers), _times(whole, scorers),
                    counts.passes("dual", rows, scorers, size=len(rows)),
                ),
                # G, and for the full preconditioner the step's gradient and P, which becomes P o G;
                # beside them what is read of the optimizer's state for the largest matrix.
                counts.memory(copies + (3 if adaptive else 1), rows)
                + (3 * counts.largest if adaptive else 0),
            ),
            Stage(
                "Leaving one token out",
                together(_times(single, singles), _times(moved, singles + 1)),
                counts.memory(copies + 2, rows),
            ),
            Stage(
                "Leaving groups out",
                together(_times(whole, groups + 4), _times(moved, groups + 5)),
                counts.memory(copies + 2, rows),
            ),
            Stage(
                "Step sizes",
                together(
                    _times(moved, etas * (sweep + 5)), _times(single, etas * sweep),
                    _times(whole, etas * 4), counts.step(judged, etas),
                ),
                counts.memory(copies + 4, rows),
            ),
            Stage("Resolution", together(counts.step(judged), _times(moved, 4))),
        ]  # fmt: skip

    etas = _thinned("step_sizes", options.etas, 3, "step sizes", must=(options.learning_rate,))
    sizes = (
        etas,
        _number(options, "sweep_tokens", 2, "tokens left out at each step size"),
        _number(options, "warmup", 8, "steps that fill the optimizer's state"),
        _number(options, "validation_tokens", 200, "validation tokens of each re-evaluation"),
        _number(options, "groups", FEWEST, "groups of tokens", by=_SLOW, interval=True),
        Size.number(
            "oracle_tokens", subject.oracle_tokens, min(subject.oracle_tokens, 3 * FEWEST),
            "tokens left out one by one", by=2**0.5, interval=True,
        ),
        _tokens(subject, rows=3),  # one batch: its tokens are left out, not its rows
    )  # fmt: skip
    return Work(sizes, stages)


def _value_propagation(counts: Counts, options: Any) -> Work:
    subject, layers = counts.subject, counts.scored

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        parts = together(
            counts.passes("forward", rows, 1 + 5 * counts.share()),
            counts.passes("backward", rows, 2 * counts.share()),
        )
        objective = subject.validation[: size["objective_rows"]]
        return [
            Stage(
                "Attention pairs",
                together(
                    counts.passes("forward", rows),
                    {"pair": float(size["pairs"] * layers)},
                ),
                counts.memory(0, rows),
            ),
            Stage(
                "Pairs with intervals",
                _draws(
                    4.0 * layers * _heads(subject), options.draws,
                    min(size["pairs"], 40 * size["tokens"]),
                ),
            ),
            Stage(
                "Causal parts",
                together(counts.scorer(objective, rows[: subject.batch_size]), parts),
                counts.memory(1, rows),
            ),
            Stage(
                "Shares with intervals",
                _draws(7.0 * (layers + 1), options.draws, size["tokens"]),
            ),
        ]  # fmt: skip

    sizes = (
        _number(options, "pairs", 500, "pairs of positions in each layer and head"),
        _objective(subject),
        _tokens(subject),
    )
    return Work(sizes, stages, measured={"pair": lambda: pair_seconds(subject)})


def _heads(subject: Subject) -> int:
    config = getattr(subject.model, "config", None)
    return int(getattr(config, "num_attention_heads", 8) or 8)


def _fisher_proxy(counts: Counts, options: Any) -> Work:
    subject = counts.subject

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        held = [row for found in subject.retention_rows(size["rows"]).values() for row in found]
        samples, grown = size["fisher_samples"], size["sizes"][-1]
        kinds = ("sequence", "token") if options.both else (options.labels,)
        main, other = samples, -(-samples // 2)
        free = (main if options.labels == "sequence" else other) + grown
        longer = _free_samples(counts, free, size["max_new_tokens"]) if "sequence" in kinds else {}
        if options.labels == "sequence":  # the Kronecker fit, on responses that are drawn already
            longer = together(longer, _fisher(counts, samples))
        given = (2 * main if options.labels == "token" else main) + grown
        directions = 8 + 2 * len(size["sizes"]) + len(subject.retention)
        records = (3 + len(subject.retention)) * 4 * 3 + 36
        return [
            Stage(
                "Fisher",
                _fisher(counts, given) if "token" in kinds else {},
                counts.memory(1.5, rows[:1], 1),
            ),
            Stage("Fisher, free samples", longer, counts.memory(1.5, rows[:1], 1)),
            Stage(
                "Scores along retention directions",
                together(
                    counts.gradient(held), counts.gradient(held), counts.gradient(held),
                    counts.values(rows), counts.passes("forward", rows, 0.1 * directions),
                ),
                counts.memory(1.5, rows),
            ),
            Stage(
                "Agreement with intervals", _draws(float(records), options.draws, size["tokens"])
            ),
            Stage(
                "Terms of the bound",
                together(counts.step(held, 3), _fisher(counts, samples // 2), {"sweep": 10.0}),
                counts.memory(2, held),
            ),
        ]  # fmt: skip

    sizes = (
        _thinned("sizes", options.sizes, 1, "numbers of samples whose Fishers are compared"),
        _number(options, "max_new_tokens", 12, "tokens of a sampled response"),
        Size.number(
            "fisher_samples", subject.fisher_samples, min(subject.fisher_samples, 24),
            "samples of the Fisher",
        ),
        _number(options, "rows", FEWEST, "rows of each retention set"),
        _tokens(subject),
    )  # fmt: skip
    return Work(sizes, stages, _tuning(counts))


def _free_samples(counts: Counts, samples: int, new: int) -> Units:
    """A Fisher on responses sampled after the prompts: drawn a batch at a time, then a gradient."""
    rows = counts.subject.fisher_rows
    prompt = sum(len(row.input_ids) - row.response_tokens for row in rows) / len(rows)
    batches = -(-samples // counts.subject.batch_size)
    return {
        "forward pass": float(batches * new + samples),
        "forward position": samples * (2 * prompt + 3.0 * new),
        "backward pass": samples * counts.share(),
        "backward position": samples * counts.share() * (prompt + new),
        "sweep": samples / 4,
    }


def _heatmap(counts: Counts, options: Any) -> Work:
    subject = counts.subject

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        objective = subject.validation[: size["objective_rows"]]
        found = [Stage("Values", counts.scorer(objective, rows), counts.memory(1, rows))]
        if options.against != "none":
            other = None if options.against == "before" else options.against
            found.append(
                Stage(
                    f"Values, {options.against}",
                    counts.scorer(objective, rows, other),
                    counts.memory(1, rows),
                )
            )
        found.append(Stage("Intervals and pictures", _draws(20, 200, size["tokens"])))
        return found  # fmt: skip

    ahead = _tuning(counts) if options.tuned else None
    return Work((_objective(subject), _tokens(subject)), stages, ahead)


def _coverage(counts: Counts, options: Any) -> Work:
    subject = counts.subject
    scored = [name for name in options.policies if name in ESTIMATORS]

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        objective = subject.validation[: size["objective_rows"]]
        values = [counts.scorer(objective, rows, name) for name in scored]
        points = min(size["points"], size["tokens"])
        return [
            Stage("States", counts.passes("forward", rows, 2), counts.memory(0, rows)),
            Stage("Values of the policies", together(*values), counts.memory(1, rows)),
            Stage(
                "Numbers and map",
                together(
                    _draws(60, size["draws"], size["tokens"]), {"draw": 40.0 * points},
                ),
            ),
        ]  # fmt: skip

    sizes = (
        _number(options, "points", 200, "tokens in the picture"),
        _number(options, "draws", 50, "random selections"),
        _objective(subject),
        _tokens(subject),
    )
    return Work(sizes, stages)


def _drift(counts: Counts, options: Any) -> Work:
    subject = counts.subject
    places = counts.depth + 1
    beside = len(subject.beside)
    models = max(1, beside + (subject.reference is not None))  # after fine-tuning

    def stages(size: Sizes) -> list[Stage]:
        sets = subject.retention_rows(size["probes"])
        rows = [row for found in sets.values() for row in found]
        more = size["probes"] / 64
        # Of 64 probes: 200 Frechet distances, and for each place 64 alignments left out.
        similar = 12_500 * more**1.1 + 100 * (places + 2) * more**1.85
        return [
            Stage(
                "States before and after",
                counts.passes("forward", rows, 1 + models),
                counts.memory(2 if beside else 1),
            ),
            Stage("Similarity", {"draw": len(sets) * models * similar}),
            Stage("Map", {"draw": 23.0 * len(rows) * (1 + models)}),
        ]

    sizes = (_number(options, "probes", 16, "rows of each set", by=_SLOW, interval=True),)
    return Work(sizes, stages, None if beside else _tuning(counts))


def _sensitivity(counts: Counts, options: Any) -> Work:
    subject, depth = counts.subject, counts.depth
    layers = tuple(layer_choices(options.layers, depth, None))
    split = subject.config.objective != "adaptation"

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        chosen = subject.validation[: size["validation_rows"]]
        first = rows[: subject.batch_size]
        tried = [(name, None) for name in size["estimators"]]
        tried += [(None, k) for k in size["layers"]]
        tried += [(None, None) for _ in size["windows"]]
        runs = 1 + size["repeats"]
        settings = [
            together(
                counts.scorer(rows[:1], rows, name, k),
                counts.values(first, name, k, times=runs),
                {} if k is None else counts.gradient(chosen, k),
            )
            for name, k in tried
        ]
        most = max(size["layers"])
        found = [
            Stage(
                "Values of the run",
                together(counts.scorer(chosen, rows), counts.gradient(chosen, most),
                         counts.gradient(chosen), counts.step(first, runs)),
                counts.memory(2, rows),
            ),
            Stage("One setting at a time", together(*settings), counts.memory(1.5, rows)),
            Stage(
                "Values against each validation row",
                _each_row(counts, chosen, rows),
                counts.memory(1, rows),
            ),
            Stage(
                "Costs of fewer validation rows", counts.gradient(chosen), counts.memory(1, chosen)
            ),
            Stage(
                "Intervals",
                _draws(8.0 * (len(tried) + len(options.weights)), 200, size["tokens"]),
            ),
        ]  # fmt: skip
        if split:
            fitted = _fisher(counts, size["fisher_samples"], most)
            found.insert(0, Stage("Fisher", fitted, counts.memory(1.5, rows[:1], 1)))
        return found

    sizes = (
        _number(options, "repeats", 1, "timings of each setting"),
        _thinned("windows", options.windows, 2, "windows"),
        _thinned("layers", layers, 2, "numbers of scored layers", must=(counts.scored,)),
        _thinned("estimators", options.estimators, 3, "estimators", must=("label", "direct")),
        *(
            [Size.number(
                "fisher_samples", subject.fisher_samples, min(subject.fisher_samples, 24),
                "samples of the Fisher",
            )]
            if split else []
        ),
        _validation(options.validation_rows, subject),
        _tokens(subject),
    )  # fmt: skip
    return Work(sizes, stages, _tuning(counts) if split else None)


def _each_row(counts: Counts, validation: Sequence[Example], rows: Sequence[Example]) -> Units:
    """Every validation row's gradient by itself, and the rows once more for each chunk of them."""
    size = counts.prices.weights / 4 * min(1.0, counts.scored / counts.depth)
    chunks = -(-len(validation) // max(1, int(2**28 // max(size, 1.0))))
    own = together(
        counts.passes("forward", validation, size=1),
        counts.passes("backward", validation, counts.share(), size=1),
    )
    contracted = counts.passes("forward", rows, 0.05 * len(validation) * counts.share())
    values = _times(counts.values(rows), chunks)
    return together(own, values, contracted)


def _stability(counts: Counts, options: Any) -> Work:
    subject = counts.subject
    parts = options.fisher_parts if subject.config.objective != "adaptation" else 0

    def stages(size: Sizes) -> list[Stage]:
        rows = subject.sample(most=size["tokens"])
        chosen = subject.validation[: size["validation_rows"]]
        alone = together(
            counts.passes("forward", rows, 1 + counts.share(), size=1),
            counts.passes("backward", rows, counts.share(), size=1),
        )
        again = _times(counts.values(rows), 5)
        dtypes = size["precisions"] if len(size["precisions"]) > 1 else ()
        slower = sum(_SLOWER[name] for name in dtypes)
        copied = _times(counts.scorer(chosen, rows), slower)
        found = [
            Stage("Values of the run", counts.scorer(chosen, rows), counts.memory(1, rows)),
            Stage(
                "Values against each validation row",
                _each_row(counts, chosen, rows),
                counts.memory(1, rows),
            ),
            Stage("Resampling", _draws(0.4, 8 * options.resamples, size["tokens"])),
            Stage("Batches and padding", together(again, alone), counts.memory(1, rows)),
            Stage(
                "Precisions", copied,
                counts.memory(3 if "float64" in dtypes else 1, rows) * bool(dtypes),
            ),
        ]  # fmt: skip
        if parts:
            fitted = _fisher(counts, max(size["fisher_samples"], parts))
            found += [
                Stage(
                    "Fishers", together(fitted, counts.scorer(chosen, rows)),
                    counts.memory(2, rows),
                ),
            ]  # fmt: skip
        return found

    precisions: tuple[tuple[str, ...], ...] = (options.precisions,)
    if len(options.precisions) > 2:
        precisions = (options.precisions, options.precisions[:2])
    sizes = (
        Size("precisions", precisions, "precisions"),
        *(
            [Size.number(
                "fisher_samples", subject.fisher_samples, min(subject.fisher_samples, 2 * parts),
                "samples of the Fisher",
            )]
            if parts else []
        ),
        _validation(options.validation_rows, subject),
        _tokens(subject),
    )  # fmt: skip
    return Work(sizes, stages, _tuning(counts) if parts else None)


_SLOWER = {"float64": 2.0, "float32": 1.0, "bfloat16": 3.0, "float16": 6.0}
"""What a pass costs on a copy of this dtype, in passes of the model; of a float32 one on a CPU."""

WORKLOADS: dict[str, Callable[[Counts, Any], Work]] = {
    "estimators": _estimators,
    "utility": _utility,
    "value-propagation": _value_propagation,
    "fisher": _fisher_proxy,
    "heatmap": _heatmap,
    "coverage": _coverage,
    "drift": _drift,
    "sensitivity": _sensitivity,
    "stability": _stability,
}
"""By name of the diagnostic: counts, and its options, to its work."""
