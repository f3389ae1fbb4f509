"""The values that stand: one function each, from a setting to one number a token.

High says: training on this token lowers J. Whoever proposes another value adds a function to
``VALUES``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alphatoken import Scorer, ScorerConfig, fit_influence
from alphatoken.oracle.run import ledger_values, run_values
from benchmarks.standings.runs import Numbers, Setting, forward_of, losses_of

WARM = 8
"""Steps of training before Adam's own step is read: without them it has no second moments."""

_ALL: dict[str, Any] = {"layers": "all", "parameters": "all"}


def _valued(setting: Setting, scorer: Scorer) -> Numbers:
    return setting.to_numbers([(r, scorer.score(b).total) for r, b in setting.batches()])


def _scored(setting: Setting, **options: Any) -> Numbers:
    """By a scorer, on the model before training."""
    config = ScorerConfig(**options)
    return _valued(setting, Scorer(setting.model.eval(), setting.validations(), config=config))


def _random(setting: Setting) -> Numbers:
    return np.random.default_rng(7).standard_normal(setting.tokens)


@torch.no_grad()
def _loss(setting: Setting) -> Numbers:
    model = setting.model.eval()
    return setting.to_numbers([(r, losses_of(model, b)) for r, b in setting.batches()])


@torch.no_grad()
def _entropy(setting: Setting) -> Numbers:
    """Of the prediction: EAFT's weight, published as a rule."""
    model, entropies = setting.model.eval(), []
    for rows, batch in setting.batches():
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        spread = torch.distributions.Categorical(logits=forward_of(model)(inputs)).entropy()
        entropies.append((rows, spread.roll(1, 1)))  # what predicts a token stands before it
    return setting.to_numbers(entropies)


def _adam(setting: Setting) -> Numbers:
    """<P o G, grad l> with the denominator of Adam's next step, after some steps of training."""
    model = copy.deepcopy(setting.model).eval()
    stepper = setting.stepped(model, setting.order(0)[:WARM], [setting.rate] * WARM)
    config = ScorerConfig("label", preconditioner="frozen", precondition_after=1, **_ALL)
    return _valued(setting, Scorer(model, setting.validations(), config=config, optimizer=stepper))


def _influence(setting: Setting) -> Numbers:
    """Along (H + mu)^-1 G, H by one drawn label at every response position of the training rows."""
    model, rows = setting.model.eval(), setting.batch(range(len(setting.rows)))
    options: dict[str, Any] = {"samples": len(setting.rows), "layers": "all", "progress": False}
    if not setting.factors:
        setting.factors.append(fit_influence(model, rows, **options))
    config = ScorerConfig("label", layers="all", preconditioner="kronecker")
    scorer = Scorer(model, setting.validations(), config=config, influence=setting.factors[0])
    return _valued(setting, scorer)


def _walk(setting: Setting, steps: int) -> Numbers:
    return _scored(setting, estimator="walk", walk_steps=steps, walk_learning_rate=setting.rate)


def _run(setting: Setting, of: Callable[..., list[list[Tensor]]]) -> Numbers:
    """Values of a whole run, or the ledger of its steps; summed over the steps of a token."""
    model = copy.deepcopy(setting.model).eval()
    model.set_attn_implementation("eager")  # goes backwards twice
    run, validation = setting.run(0), setting.validations()
    values = of(model, forward_of(model), run, validation)
    pairs = zip(setting.order(0), values, strict=True)
    return setting.to_numbers([(rows, step[0]) for rows, step in pairs])


VALUES: dict[str, Callable[[Setting], Numbers]] = {
    "random": _random,
    "loss": _loss,
    "entropy": _entropy,
    "alphatoken, last 3": partial(_scored, estimator="alphatoken", layers=3),
    "alphatoken, all linears": partial(_scored, estimator="alphatoken", layers="all"),
    "direct, all linears": partial(_scored, estimator="direct", layers="all"),
    "path, all linears": partial(_scored, estimator="path", layers="all"),
    "label, last 3": partial(_scored, estimator="label", layers=3),
    "label, all parameters": partial(_scored, estimator="label", **_ALL),
    "label along Adam's step": _adam,
    "influence function, all linears": _influence,
    "walk of 1 step": partial(_walk, steps=1),
    "walk of 8 steps": partial(_walk, steps=8),
    "walk of 24 steps": partial(_walk, steps=24),
    "ledger of the run": partial(_run, of=ledger_values),
    "run value": partial(_run, of=run_values),
}

OF_THE_RUN = ("ledger of the run", "run value")
"""They go through the whole run."""

ONE_STEP = (
    *("alphatoken, last 3", "alphatoken, all linears", "direct, all linears", "path, all linears"),
    *("label, last 3", "label, all parameters", "label along Adam's step"),
)
"""Of first order in one step: what every other value must beat."""
