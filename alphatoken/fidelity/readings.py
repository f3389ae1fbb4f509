"""Values under many settings from one forward: every estimator, choice of layers and window.

A layer's part of a value depends on no other choice: errors at layer l come from above, and the
contraction is a sum over layers. So one recorded forward over all layers, one self-only and one
ordinary backward give every number of layers K by partial sums, and each window W costs one more
propagation within its layer. Label values need one dual forward for each K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import ScorerConfig
from alphatoken.data import Example
from alphatoken.direction.objective import forward_losses, objective_gradient, scoring_forward
from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import CoverageError, UnsupportedError
from alphatoken.estimate.columns import Columns, Side, contract_columns
from alphatoken.estimate.estimators import (
    CAPTURED,
    ESTIMATORS,
    TokenErrors,
    hop_errors,
    scored_attentions,
    value_errors,
)
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.estimate.token_values import assign_columns
from alphatoken.fidelity.subject import Subject
from alphatoken.model.backward import accumulate_errors
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.capture import Recorder, record
from alphatoken.model.modes import evaluation_mode
from alphatoken.scorer import Scorer

__all__ = [
    "WINDOWED",
    "Readings",
    "Setting",
    "along",
    "full_gradient",
    "read",
    "supported",
    "targets",
]

WINDOWED = ("alphatoken", "paper_literal")
"""Estimators that Value-Propagation's window changes."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, order=True)
class Setting:
    """What is computed.

    Attributes:
        estimator: one of ``ESTIMATORS``.
        layers: indices of the scored layers.
        window: W; None for no limit, and where there is none.
        everything: label values over all trainable parameters, not only over the layers' linears.
    """

    estimator: str
    layers: tuple[int, ...]
    window: int | None = None
    everything: bool = False

    def __str__(self) -> str:
        """As a reader would write it."""
        if self.everything:
            return f"{self.estimator}, all parameters"
        whole = f"{self.estimator}, K={len(self.layers)}"
        if self.estimator not in WINDOWED:
            return whole
        return f"{whole}, W={'T' if self.window is None else self.window}"

    @property
    def columns(self) -> dict[str, Any]:
        """As cells of a table."""
        windowed = self.estimator in WINDOWED
        window = ("T" if self.window is None else self.window) if windowed else None
        return {"estimator": self.estimator, "K": len(self.layers), "W": window}

    def config(self, base: ScorerConfig) -> ScorerConfig:
        """Options of a scorer that computes it: the validation side alone, P = 1."""
        return replace(
            base,
            estimator=self.estimator,
            layers=list(self.layers),
            window=self.window,
            parameters="all" if self.everything else "linears",
            objective="adaptation",
            part="both",
            preconditioner=None,
        )


@dataclass(frozen=True)
class Readings:
    """Flat columns over the response tokens, in (row, position) order.

    Attributes:
        row: of each token.
        position: index of the token in its row.
        loss: token losses.
        values: per setting.
    """

    row: NDArray[np.int64]
    position: NDArray[np.int64]
    loss: Numbers
    values: dict[Setting, Numbers] = field(default_factory=dict)


def full_gradient(subject: Subject) -> dict[str, Tensor]:
    """Gradient of the mean validation loss by every trainable parameter, by name."""
    named = {n: p for n, p in subject.model.named_parameters() if p.requires_grad}
    validation = subject.batches(subject.validation)
    return objective_gradient(subject.adapter, named, validation, first=None)


def supported(
    subject: Subject, layers: tuple[int, ...], rows: Sequence[Example]
) -> tuple[dict[str, CoverageReport], dict[str, str]]:
    """Estimators that this model allows on these layers with what was proved; why not the others.

    Each scores a slice of the two shortest rows for real, with the scorer's own proofs of coverage
    and isolation.
    """
    whole, *_ = subject.batches(sorted(rows, key=lambda row: len(row.input_ids))[:2])
    shown = around_responses(read_batch(whole, max_length=subject.adapter.max_positions()))
    batch = {**shown.inputs, "labels": shown.labels}
    tracker = subject.tracker("What the model allows", len(ESTIMATORS))
    found, refused = {}, {}
    for number, estimator in enumerate(ESTIMATORS):
        tracker.report(number)
        config = Setting(estimator, layers, subject.config.window).config(subject.config)
        try:
            scorer = Scorer(subject.model, batch, None, config)
            scorer.score(batch)
        except (UnsupportedError, CoverageError) as problem:
            refused[estimator] = str(problem).splitlines()[0]
        else:
            found[estimator] = scorer.coverage
    return found, refused


def read(
    subject: Subject,
    rows: Sequence[Example],
    direction: Mapping[str, Tensor],
    settings: Sequence[Setting],
    label: str = "Values, all settings",
) -> Readings:
    """Values of the response tokens of ``rows`` under every setting.

    Args:
        subject: model, batch size, options that are not varied.
        rows: to value.
        direction: parameter name -> M, at least over the parameters of every setting.
        settings: what to compute.
        label: of the progress.

    Returns:
        What ``Scorer.score(...).total`` gives for each setting's config, up to rounding.
    """
    found = targets(subject, settings)
    columns: dict[Any, list[NDArray[Any]]] = {}
    tracker = subject.tracker(label, len(rows))
    for number, batch in enumerate(subject.batches(rows)):
        checked = read_batch(batch, max_length=subject.adapter.max_positions())
        places = checked.mask.cpu().nonzero().numpy()
        start = number * subject.batch_size
        columns.setdefault("row", []).append(places[:, 0] + start)
        columns.setdefault("position", []).append(places[:, 1])
        for key, values in _read_batch(subject, checked, direction, found):
            flat = values.detach()[checked.mask].double().cpu().numpy()
            columns.setdefault(key, []).append(flat)
        tracker.report(min(start + subject.batch_size, len(rows)))
    whole = {key: np.concatenate(parts) for key, parts in columns.items()}
    return Readings(
        whole["row"],
        whole["position"],
        whole["loss"],
        {setting: whole[setting] for setting in settings},
    )


def targets(subject: Subject, settings: Sequence[Setting]) -> dict[Setting, ScoredParameters]:
    """The library's own choice of parameters for each setting; nothing is built."""
    batch, *_ = subject.batches(subject.validation[:1])
    return {
        s: Scorer(subject.model, batch, None, s.config(subject.config)).scored for s in settings
    }


def _read_batch(
    subject: Subject,
    batch: LabelledBatch,
    direction: Mapping[str, Tensor],
    by_setting: Mapping[Setting, ScoredParameters],
) -> Iterator[tuple[Any, Tensor]]:
    adapter = subject.adapter
    with torch.no_grad(), evaluation_mode(adapter.model):
        yield "loss", forward_losses(adapter, batch, "batch")
    for group, widest in _groups(subject, by_setting):
        yield from _captured(subject, batch, direction, group, widest)
    for setting, scored in by_setting.items():
        if setting.estimator not in CAPTURED:
            first = scored.first or 0
            chosen = along(adapter.model, direction, scored.parameters)
            yield setting, label_values(adapter, batch, chosen, first=first)


def along(
    model: nn.Module, direction: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The direction of these parameters, under their own names: a tied one has several."""
    named = dict(model.named_parameters(remove_duplicate=False))
    known = {id(named[name]): matrix for name, matrix in direction.items()}
    return {name: known[id(parameter)] for name, parameter in parameters.items()}


def _groups(
    subject: Subject, by_setting: Mapping[Setting, ScoredParameters]
) -> Iterator[tuple[list[Setting], ScoredParameters]]:
    """Captured settings that one forward can serve, and the scored whose scope covers them.

    That is all of them, unless a block is used at several depths: its layer is then another one
    in another scope, and such settings are read alone.
    """
    captured = {s: t for s, t in by_setting.items() if s.estimator in CAPTURED}
    if not captured:
        return
    layers = tuple(sorted({layer for setting in captured for layer in setting.layers}))
    union = Setting("path", layers)
    widest = targets(subject, [union])[union]
    apart = [s for s, t in captured.items() if _linears(widest, s.layers) != _linears(t, s.layers)]
    together = [setting for setting in captured if setting not in apart]
    if together:
        yield together, widest
    for setting in apart:
        yield [setting], captured[setting]


def _linears(scored: ScoredParameters, layers: Sequence[int]) -> set[str]:
    return {linear.name for linear in scored.scope.linears if linear.layer in layers}


def _captured(
    subject: Subject,
    batch: LabelledBatch,
    direction: Mapping[str, Tensor],
    settings: Sequence[Setting],
    scored: ScoredParameters,
) -> Iterator[tuple[Any, Tensor]]:
    """Values of captured settings from one forward, recorded over all their layers."""
    adapter = subject.adapter
    chosen = along(adapter.model, direction, scored.parameters)
    with record(adapter, scored.scope) as recorder:
        with scoring_forward(adapter, scored.first):
            losses = forward_losses(adapter, batch, "batch")
        parts = _Parts(recorder, losses, subject.config.head_reduction, chosen, scored.names)
        for setting in settings:
            direct, causal = parts.of(setting)
            columns = Columns(direct.to(causal), causal)
            position = subject.config.causal_position
            own, others, _ = assign_columns(columns, batch.mask, position)
            yield setting, own + others


class _Parts:
    """Columns (b, t) of each layer and kind of error of one recorded forward; each made once."""

    def __init__(
        self,
        recorder: Recorder,
        losses: Tensor,
        head_reduction: str,
        direction: Mapping[str, Tensor],
        names: Mapping[str, str],
    ) -> None:
        self.recorder, self.reduction, self.names = recorder, head_reduction, names
        self.side = Side(direction)
        self.layers = [use.linear.layer for use in recorder.linears]
        self.attentions = scored_attentions(recorder)
        with torch.enable_grad():
            self.loss = losses.sum()
        self.errors: dict[str, list[Tensor | None]] = {}
        self.columns: dict[tuple[Any, ...], dict[int, Tensor]] = {}

    def of(self, setting: Setting) -> tuple[Tensor, Tensor]:
        """Direct and causal columns of one setting: sums over its layers."""
        mode = "ordinary" if setting.estimator in ("path", "paper_literal") else "self"
        direct = self._sum((mode,), setting, lambda: self._backward(mode)[: len(self.layers)])
        if setting.estimator in ("direct", "path"):
            return direct, torch.zeros_like(direct)
        if setting.estimator == "same_layer_hop":
            return direct, self._sum(("hop",), setting, self._hop)
        key = ("values", mode, setting.window)
        return direct, self._sum(key, setting, lambda: self._values(mode, setting.window))

    def _sum(
        self, key: tuple[Any, ...], setting: Setting, make: Callable[[], list[Tensor | None]]
    ) -> Tensor:
        if key not in self.columns:
            self.columns[key] = self._by_layer(make())
        by_layer = self.columns[key]
        return torch.stack([by_layer[layer] for layer in setting.layers]).sum(0)

    def _by_layer(self, errors: Sequence[Tensor | None]) -> dict[int, Tensor]:
        found = {}
        nothing: list[Tensor | None] = [None] * len(errors)
        for layer in self.recorder.scope.layers:
            own = [e if at == layer else None for e, at in zip(errors, self.layers, strict=True)]
            side = [self.side]
            (columns,) = contract_columns(
                self.recorder, TokenErrors(own, nothing), side, self.names
            )
            found[layer] = columns.direct
        return found

    def _backward(self, mode: str) -> list[Tensor | None]:
        """Errors at the linears, then at the attention outputs."""
        if mode not in self.errors:
            outputs = [*self.recorder.outputs, *(a.output for a in self.attentions)]
            self.errors[mode] = accumulate_errors(self.recorder, self.loss, outputs, mode)
        return self.errors[mode]

    def _values(self, mode: str, window: int | None) -> list[Tensor | None]:
        reduction = "mean" if mode == "ordinary" else self.reduction
        return self._spread(
            mode, lambda use, e: value_errors(self.recorder, use, e, window, reduction)
        )

    def _hop(self) -> list[Tensor | None]:
        return self._spread("self", lambda use, e: hop_errors(self.recorder, use, e))

    def _spread(
        self, mode: str, send: Callable[[Any, Tensor], dict[int, Tensor]]
    ) -> list[Tensor | None]:
        """Head-output errors of each scored attention call, carried back to its linears."""
        causal: list[Tensor | None] = [None] * len(self.layers)
        for use, error in zip(
            self.attentions, self._backward(mode)[len(self.layers) :], strict=True
        ):
            if error is not None:
                for index, found in send(use, error).items():
                    causal[index] = found
        return causal
