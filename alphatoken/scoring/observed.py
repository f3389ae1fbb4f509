"""The handle that a training loop has on its own forward: ``Scorer.observe`` yields it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from alphatoken.direction.current import Frame
from alphatoken.errors import ModelError
from alphatoken.model.backward import graph_nodes
from alphatoken.model.batch import LabelledBatch, read_batch, require_finite, token_losses
from alphatoken.model.capture import Recorder
from alphatoken.model.head import watched_head
from alphatoken.scoring.passes import Pass, Weights, foreign_scores
from alphatoken.scoring.valuing import Valuer
from alphatoken.support.precision import float16_named
from alphatoken.values import TokenValues

__all__ = ["Observed"]


class Observed:
    """Handle on the forward seen by ``Scorer.observe``."""

    def __init__(
        self,
        valuer: Valuer,
        frame: Frame,
        recorder: Recorder,
        *,
        self_only: bool,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._lock = lock
        self._valuer, self._frame, self._recorder = valuer, frame, recorder
        self._self_only = self_only
        self._valued, self._open = False, True

    def __repr__(self) -> str:
        """True if values were taken of it already."""
        return f"Observed({'valued' if self._valued else 'not valued yet'})"

    def values(
        self,
        logits_or_log_probs: Tensor,
        labels: Tensor,
        *,
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
        components: bool = True,
    ) -> TokenValues:
        """Values of the observed forward; its graph, and every .grad, stay as they are.

        Args:
            logits_or_log_probs: logits (b, t, vocabulary) of that forward, or token
                log-probabilities (b, t) or (b, t - 1), attached to its graph.
            labels: unshifted labels, -100 ignored.
            token_weights: (b, t) factor on each token's loss at index i, taken as constant;
                ``+omega`` on chosen and ``-omega`` on rejected rows under DPO.
            step_weights: (b, t) ``dL / dl_i`` of the loss L that the optimizer will see with all
                tokens kept, taken as constant; for ``preconditioner="full"``, which contains the
                gradient of L. Default: L is the mean over the response tokens of this batch.
                With accumulation, scale them so that this batch stands for the whole step; with
                gradient clipping, also by the factor that the step's gradient is expected to get.
            components: False gives the total alone, by one contraction (one dual forward under
                ``label``) with ``P o (G + lambda V)`` instead of one for each side. The same
                total up to rounding. The warning about one-sided values needs the components.

        Raises:
            ModelError: no forward with gradients was seen. InputError, NumericalError: as
                ``Scorer.score``.
        """
        # Locked, because the weights may be moved meanwhile.
        with float16_named(self._valuer.adapter.model), self._lock:
            valuer, recorder = self._valuer, self._recorder
            self._require_open()
            valuer.builder.require_current()
            # Everything is read and refused before the first backward.
            batch = self._batch(labels)
            # Before a forward of the proofs', which a cache would confuse.
            if valuer.config.captured:
                valuer.capture_check.require_rule(recorder)
            with recorder.aside():
                valuer.capture_check.see_arguments(batch, observed=True)
            weights = Weights.read(batch.mask, token_weights, step_weights)
            head = watched_head(logits_or_log_probs)
            # Losses need their graph where errors are taken of them: by estimators that capture,
            # and below a watched head, whose errors label values share with the training step.
            # Otherwise label values along a fixed M compare them with those of the dual forward:
            # numbers do.
            graph = self._self_only or valuer.needs_recording or head is not None
            with nullcontext() if graph else torch.no_grad():
                losses = token_losses(logits_or_log_probs, batch.labels)
            require_finite(losses, batch.mask, "batch")
            # Estimators that take errors see by themselves whether any arrives.
            if (
                not valuer.config.captured
                and recorder.linears
                and not _follows(logits_or_log_probs, recorder)
            ):
                raise foreign_scores("the graph of another forward")
            seen = Pass(batch, weights, losses, recorder, head=head, products=recorder.products)
            seen = valuer.with_kept_errors(seen)
            values = valuer.values(self._frame, seen, components=components)
            self._valued = True
            return values

    def close(self) -> None:
        """Called when the context ends: what was recorded is gone."""
        self._open = False

    def _require_open(self) -> None:
        if not self._open or self._recorder.latest is None:
            raise ModelError(
                "there is no forward to take values of",
                got="observe() has ended" if not self._open else "the model was not called",
                why="what the forward left is kept inside the context alone",
                remedy="call the model and values() inside 'with scorer.observe() as observed:'; "
                "the loss may be sent back afterwards",
            )

    def _batch(self, labels: Tensor) -> LabelledBatch:
        """The observed arguments with these labels, checked."""
        # The labels are handed in, since the model need not have been called with any.
        recorder = self._recorder
        if recorder.forward is None and self._valuer.config.captured:
            recorder.require_graph()
        forward = recorder.latest
        inputs = {} if forward is None else forward.inputs
        batch = read_batch(
            {**inputs, "input_ids": inputs.get("input_ids", labels), "labels": labels},
            max_length=self._valuer.adapter.max_positions(),
        )
        if "input_ids" not in inputs:  # a model that was called on embeddings
            del batch.inputs["input_ids"]
        return batch


def _follows(scores: Tensor, recorder: Recorder) -> bool:
    """True if a recorded linear lies in the graph of the scores; true of scores without a graph."""
    uses = {use.s.grad_fn for use in recorder.linears}
    return scores.grad_fn is None or any(node in uses for node in graph_nodes(scores))
