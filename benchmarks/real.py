"""Time on real language models: forward, step and all ways of valuing, in turn in one run.

Batches are 4 x 160 and 2 x 512 tokens of real rows (``real_rows``). A step is forward, loss over
the response tokens and backward of all parameters, without an optimizer. Everything is run once to
count its FLOPs, then timed round by round, so that each ratio is of two times of one round.

The other side of every row is the step as TRL's trainer runs it on an accelerator: TRL's own head,
at the positions that predict a response token, whose logits its backward forms once more. Floors
are of the arithmetic alone, with a head that is formed once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alphatoken import Scorer, ScorerConfig
from alphatoken.config import ESTIMATORS, FORMS
from alphatoken.data import EncodeOptions, Row, collate, encode_rows
from alphatoken.data.rows import Turn
from alphatoken.diagnose.estimators import flops
from alphatoken.errors import DataError
from benchmarks.cases import scoring_floor
from benchmarks.data import MODELS, Model
from benchmarks.floors import Shape
from benchmarks.frontier.draws import FORMATS
from benchmarks.measure import Run, compared, in_turn
from benchmarks.peak import (
    LAYERS,
    fresh_mib,
    head_at_responses,
    observed_step,
    plain_step,
    print_peak,
    trl_step,
)

Measured = dict[str, Any]
Batch = dict[str, Tensor]

SIZES = ((4, 160), (2, 512))
"""Rows and tokens of the batches."""

QUICK = ((1, 96),)
"""For ``--quick``."""


SMOLLM2, GEMMA3 = (MODELS[key] for key in ("smollm2", "gemma3"))

FEW = ("alphatoken", "label")
"""Estimators that are measured at every size."""

ALL = {"smollm2": ESTIMATORS, "gemma3": ("alphatoken", "direct", "path", "label")}
"""By model, those that are measured at the first of the sizes."""


def is_here(model: Model) -> bool:
    """Whether a model lies there; one line is printed where it does not."""
    try:
        model.folder()
    except DataError as problem:
        print(f"# left out: {problem.what}, {problem.got}", file=sys.stderr)
        return False
    return True


def batches_of(model: Model, size: tuple[int, int], device: torch.device) -> list[Batch]:
    """The batch that is trained on, and the validation batch."""
    both = batches(model.tokenizer(), *size)
    return [{name: x.to(device) for name, x in batch.items()} for batch in both]


@dataclass(frozen=True)
class Side:
    """One piece of work that is timed.

    Attributes:
        row: name of its row, after the model's key.
        what: of its size.
        work: run once a round.
        floor: FLOPs that it cannot do without, of a shape.
        beside: what runs inside it too, and is taken off round by round: "step", or a row.
    """

    row: str
    what: str
    work: Callable[[], Any]
    floor: Callable[[Shape], float]
    beside: str = ""


def rows_of(run: Run, real: Model) -> Iterator[Measured]:
    """All rows of one model; none where it is not here."""
    if not is_here(real):
        return
    model = head_at_responses(real.load().to(run.device).train())
    for index, (rows, length) in enumerate(QUICK if run.quick else SIZES):
        estimators = FEW if index or run.quick else ALL[real.key]
        sides = partial(_sides, estimators=estimators)
        yield from _of_batch(run, real, model, (rows, length), sides, run.pairs(2))


def differences_of(run: Run, real: Model) -> Iterator[Measured]:
    """Rows of label values over all parameters by forwards alone; none where it is not here."""
    if is_here(real):
        model = head_at_responses(real.load().to(run.device).train())
        for size in QUICK if run.quick else SIZES:
            measured = _of_batch(run, real, model, size, _by_differences, run.pairs(6))
            # A forward is timed there too, and stands in its own row already.
            yield from (row for row in measured if not row["name"].endswith("_forward"))


def _of_batch(
    run: Run,
    real: Model,
    model: Any,
    size: tuple[int, int],
    sides_of: Callable[..., Iterator[Side]],
    repeats: int,
) -> Iterator[Measured]:
    batch, validation = batches_of(real, size, run.device)
    sides = {
        "step": Side("step", "", partial(trl_step, model, batch), lambda shape: shape.step),
        "forward": Side(
            "forward", "", partial(_forward, model, batch), lambda shape: shape.forward
        ),
        **{f"{s.row} {s.what}": s for s in sides_of(model, batch, validation)},
    }
    counted = {name: flops(side.work) for name, side in sides.items()}
    seconds = in_turn({name: side.work for name, side in sides.items()}, repeats=repeats)
    for name, inside in [(n, side.beside) for n, side in sides.items() if side.beside]:
        counted[name] -= counted[inside]
        seconds[name] = [a - b for a, b in zip(seconds[name], seconds[inside], strict=True)]
    shape = Shape.of(model, *size)
    responses, validation_responses = (
        int((x["labels"][:, 1:] != -100).sum()) for x in (batch, validation)
    )
    text = f"{size[0]} x {size[1]} tokens of {source()}, {responses} of them response"
    for name, side in sides.items():
        if side.row != "step":
            yield {
                "name": f"{real.key}_{side.row}",
                "size": f"{side.what}; {text}" if side.what else text,
                **compared(seconds[name], seconds["step"]),
                **_floors(side, shape.with_responses(responses), validation_responses),
                "flops": counted[name],
                "flops_other": counted["step"],
                "tokens": shape.tokens,
                **_note(side, counted[name] / counted["step"]),
                "ratio_forward": compared(seconds[name], seconds["forward"])["ratio"],
            }


def _floors(side: Side, shape: Shape, validation_responses: int) -> Measured:
    """Over the step as TRL runs it; the rows of ``observe`` have their target from it."""
    valued = shape.with_responses(validation_responses) if side.row == "validation" else shape
    floor = side.floor(valued) / shape.recomputing_step
    return {"floor": floor, **({"target": 1.05 * floor} if side.row == "observe_k3" else {})}


def _note(side: Side, counted: float) -> Measured:
    said = f"FLOPs counted: {counted:.3f}x"
    if side.row == "first_use":
        said += "; Scorer made, proofs and values of the batch, G taken off"
    return {"note": said}


def _sides(
    model: Any, batch: Batch, validation: Batch, estimators: tuple[str, ...]
) -> Iterator[Side]:
    depth = model.config.num_hidden_layers
    for estimator in estimators:
        scorer = Scorer(model, validation, None, ScorerConfig(estimator=estimator, layers=LAYERS))
        scorer.score(batch)  # builds G and proves coverage
        what = f"{estimator}, K={LAYERS}"
        yield Side("score_k3", what, partial(scorer.score, batch), partial(_scored, estimator))
        step = partial(trl_step, model, batch, scorer)
        step()  # what is looked at in the first step alone is no part of a price
        yield Side("observe_k3", what, step, partial(_observed, estimator))
        if estimator != estimators[0]:
            continue
        yield Side("validation", what, partial(_build, scorer), _gradient)
        first = partial(_first_use, model, batch, validation, estimator)
        floor = partial(_scored, estimator)  # G is a row of its own
        yield Side("first_use", what, first, floor, beside=f"validation {what}")
    for row, parameters, floor in (
        ("label_linears", "linears", lambda shape: shape.dual_forward(depth)),
        ("label_all", "all", lambda shape: shape.dual_forward_all),
    ):
        config = ScorerConfig(
            "label", layers="all", parameters=parameters, derivative="forward_mode"
        )
        scorer = Scorer(model, validation, None, config)
        scorer.score(batch)
        yield Side(row, f"label, {parameters}", partial(scorer.score, batch), floor)


def _by_differences(model: Any, batch: Batch, validation: Batch) -> Iterator[Side]:
    """Label values over all parameters by forwards: alone, and beside a training step."""
    for form in FORMS:
        config = ScorerConfig("label", layers="all", parameters="all", derivative=form)
        scorer = Scorer(model, validation, None, config)
        step = partial(trl_step, model, batch, scorer)
        work = step if form == "one_sided" else partial(scorer.score, batch)
        # The error is looked at on the first batch and the 2nd, 4th, 8th, 16th: two forwards more,
        # on each 32nd in a longer run. None of the timed ones is such a batch: one counts FLOPs.
        for _ in range(_LOOKED):
            work()
        beside = "step" if form == "one_sided" else ""
        forwards = 1 if form == "one_sided" else 2
        yield Side(f"label_{form}", f"label, {form}", work, partial(_forwards, forwards), beside)


_LOOKED = 8


def _forwards(count: int, shape: Shape) -> float:
    """Forwards with a head at the positions that a loss reads."""
    return count * shape.forward


def _forward(model: Any, batch: Batch) -> None:
    with torch.no_grad():
        model(input_ids=batch["input_ids"], labels=batch["labels"], fused_lm_head=True)


def _build(scorer: Scorer) -> None:
    scorer.refresh()
    # What builds G for values, and stores it: ``scorer.direction`` would leave it to the next of
    # the scorer's sides to build it once more, inside that side's own time.
    scorer.estimator.cache.current()


def _first_use(model: Any, batch: Batch, validation: Batch, estimator: str) -> None:
    config = ScorerConfig(estimator=estimator, layers=LAYERS)
    Scorer(model, validation, None, config).score(batch)


# --- floors --------------------------------------------------------------------------------------


def _scored(estimator: str, shape: Shape) -> float:
    """A forward of its own, and values at K = 3."""
    if estimator == "label":
        return shape.dual_forward(LAYERS)
    return shape.forward + shape.partial_backward(LAYERS) + shape.contraction(LAYERS)


def _observed(estimator: str, shape: Shape) -> float:
    """TRL's step, and the values of its forward: the head's error is formed once."""
    return shape.recomputing_step + scoring_floor(shape, LAYERS, estimator)


def _gradient(shape: Shape) -> float:
    """G at K = 3."""
    return shape.forward + shape.backward(LAYERS, embeddings=False)


def real_memory(run: Run) -> Iterator[dict[str, Any]]:
    """Peak memory of fresh processes on real models: steps with values at K = 3, and without."""
    for real in (SMOLLM2, GEMMA3):
        if not is_here(real):
            continue
        for index, size in enumerate(QUICK if run.quick else SIZES):
            estimators = FEW if index or run.quick else ALL[real.key]
            plain = _peak(real, "step", size, run.device)
            for what in (*estimators, "label_all"):
                ours = _peak(real, what, size, run.device)
                said = (
                    "label over all parameters, scored"
                    if what == "label_all"
                    else (f"{what}, K={LAYERS}, observed")
                )
                yield {
                    "name": f"{real.key}_peak_memory",
                    "size": f"{said}; {size[0]} x {size[1]} tokens of {source()}",
                    "ours": ours,
                    "other": plain,
                    "ratio": ours / plain,
                    "floor": 1.0,
                    "unit": "MiB",
                    "note": "MiB of the whole process, G built in it, against a plain step's",
                }
            copy = _weights_mib(real)
            for form in FORMS:
                ours = _peak(real, form, size, run.device)
                yield {
                    "name": f"{real.key}_differences_peak",
                    "size": f"label over all parameters, {form}; {size[0]} x {size[1]} tokens of "
                    f"{source()}",
                    "ours": ours,
                    "other": plain,
                    "ratio": ours / plain,
                    "floor": 1.0,
                    "target": (plain + copy) / plain,
                    "unit": "MiB",
                    "note": f"MiB, as the others; a copy of the weights is {copy:.0f}",
                }


CHECKPOINTED: dict[str, tuple[tuple[int, int], float, dict[str, Any]]] = {
    "label": ((4, 512), 1.30, {"layers": "all", "parameters": "all", "derivative": "one_sided"}),
    "walk": ((4, 160), 1.5, {"walk_steps": 2}),
}
"""Estimators that look at no linear: rows and length, the most of a step's memory, options."""


def checkpointed_memory(run: Run) -> Iterator[dict[str, Any]]:
    """Peak memory of two checkpointed steps of SmolLM2 with values, and M in it, and without."""
    if not is_here(SMOLLM2):
        return
    for estimator, (size, target, _) in CHECKPOINTED.items():
        rows = size if not run.quick else QUICK[0]
        for head, promised in (("", {"target": target}), ("trl_", {})):
            whats = (f"checkpointed_{head}{what}" for what in ("step", estimator))
            plain, ours = (_peak(SMOLLM2, what, rows, run.device) for what in whats)
            logits = "TRL's head at response tokens" if head else "all logits"
            yield {
                "name": "checkpointed_peak_memory" if promised else "checkpointed_peak_trl",
                "size": f"{estimator} over all parameters, observed, {logits}; "
                f"{rows[0]} x {rows[1]} tokens of {source()}",
                "ours": ours,
                "other": plain,
                "ratio": ours / plain,
                "floor": 1.0,
                **promised,
                "unit": "MiB",
                "note": "MiB of the whole process, no optimizer, against a checkpointed step's",
            }


def _checkpointed(model: Any, what: str, batch: Batch, validation: Batch) -> None:
    estimator = what.removeprefix("trl_")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if estimator != what:
        head_at_responses(model)
    scorer = None
    if estimator != "step":
        config = ScorerConfig(estimator=estimator, **CHECKPOINTED[estimator][2])
        scorer = Scorer(model, validation, None, config)
    for _ in range(2):
        if scorer is not None:
            model.zero_grad()
            scorer.refresh()
        if estimator != what:
            trl_step(model, batch, scorer, components=False)
        elif scorer is None:
            plain_step(model, batch)
        else:
            observed_step(scorer, model, batch, components=False)


def _weights_mib(real: Model) -> float:
    """Of one float32 copy of all parameters, a tied one once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(real.folder()))
    return sum(4 * p.numel() for p in model.parameters()) / 2**20


def _peak(real: Model, what: str, size: tuple[int, int], device: torch.device) -> float:
    """MiB of a fresh process."""
    words = (real.key, what, *map(str, size))
    return fresh_mib("benchmarks.real", *words, device=device)


def work(real: Model, what: str, size: tuple[int, int], device: torch.device) -> None:
    """Run ``what`` once."""
    model = real.load().to(device).train()
    batch, validation = batches_of(real, size, device)
    if what == "step":
        plain_step(model, batch)
    elif what.startswith("checkpointed_"):
        _checkpointed(model, what.removeprefix("checkpointed_"), batch, validation)
    elif what == "label_all":
        config = ScorerConfig("label", layers="all", parameters="all", derivative="forward_mode")
        Scorer(model, validation, None, config).score(batch)
    elif what in FORMS:
        config = ScorerConfig("label", layers="all", parameters="all", derivative=what)
        scorer = Scorer(model, validation, None, config)
        if what == "central":
            scorer.score(batch)
        else:
            observed_step(scorer, model, batch, components=True)
    else:
        scorer = Scorer(model, validation, None, ScorerConfig(estimator=what, layers=LAYERS))
        observed_step(scorer, model, batch, components=True)


def main() -> None:
    """Do one thing and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(ALL))
    ways = [f"{head}{way}" for head in ("", "trl_") for way in ("step", *CHECKPOINTED)]
    parser.add_argument(
        "what",
        choices=["step", *ESTIMATORS, "label_all", *FORMS, *(f"checkpointed_{w}" for w in ways)],
    )
    parser.add_argument("rows", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    real, size = MODELS[options.model], (options.rows, options.length)
    work(real, options.what, size, options.device)
    print_peak(options.device)


# --- real rows, in the model's own tokens ---------------------------------------------------------


def source() -> str:
    """Where the rows come from: ``$ALPHATOKEN_DATA``, or the Python standard library."""
    return "GSM8K" if os.environ.get("ALPHATOKEN_DATA") else "functions of the standard library"


def batches(tokenizer: Any, rows: int, length: int) -> tuple[Batch, Batch]:
    """A batch of ``rows`` x ``length`` tokens without padding, and another one to value it against.

    Each row is a conversation of as many problems and their solutions as it takes, in the plain
    format; the solutions are its response.
    """
    options = EncodeOptions(max_length=length, chat_template=False, on_empty="skip")
    # A few more than are needed: a long first problem may leave no room for its solution.
    examples, _ = encode_rows(list(_conversations(4 * rows, length)), tokenizer, options)
    examples = [example for example in examples if len(example.input_ids) == length]
    if len(examples) < 2 * rows:
        raise RuntimeError(f"{len(examples)} of {2 * rows} rows of real text have {length} tokens")
    both = collate(examples[:rows]), collate(examples[rows : 2 * rows])
    for batch in both:  # nothing is padded, and a mask of ones would only cost attention its kernel
        del batch["attention_mask"]
    return both


def _conversations(count: int, length: int) -> Iterator[Row]:
    """Rows joined until their text is long enough for ``length`` tokens of any tokenizer here."""
    rows_of, _ = FORMATS["gsm8k" if os.environ.get("ALPHATOKEN_DATA") else "library"]
    rows = iter(rows_of())
    for index in range(count):
        turns: list[Turn] = []
        # Fewer than eight characters a token: what is over is cut off.
        while sum(len(turn.text) for turn in turns) < 8 * length:
            turns += next(rows).turns
        yield Row(index, f"conversation {index}", tuple(turns))


if __name__ == "__main__":
    main()
