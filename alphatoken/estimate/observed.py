"""The handle that a training loop has on its own forward: ``Scorer.observe`` yields it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.config import WALK
from alphatoken.direction.objective import forward_losses
from alphatoken.errors import ModelError, UnsupportedError
from alphatoken.estimate.estimator import Estimator, Recording, foreign_scores, read_weights
from alphatoken.model.batch import LabelledBatch, read_batch, require_finite, token_losses
from alphatoken.model.capture import Recorder, graph_nodes
from alphatoken.model.forward import draws, evaluation_mode
from alphatoken.model.head import watched_head
from alphatoken.model.observed_forward import ObservedForward, by_batch_names
from alphatoken.support.devices import deferred_refusals
from alphatoken.support.precision import float16_named, wide
from alphatoken.values import TokenValues


class Observed:
    """Handle on the forward that ``Scorer.observe`` records."""

    def __init__(
        self,
        estimator: Estimator[Any],
        direction: Any,
        recorder: Recorder,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._estimator, self._direction, self._recorder = estimator, direction, recorder
        self._lock = lock
        self._valued, self._open = False, True

    def __repr__(self) -> str:
        """Whether this forward has been valued."""
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
            labels: (b, t) unshifted, -100 ignored.
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

        Returns:
            Values in the shape (b, t) of ``labels``, as of ``Scorer.score``.

        Raises:
            ModelError: there was no forward with gradients. InputError, NumericalError: as
                ``Scorer.score``.
        """
        # Locked, because the weights may be moved meanwhile.
        with float16_named(self._estimator.adapter.model), self._lock, deferred_refusals():
            self._require_open()
            self._estimator.cache.require_current()
            # Everything is read and refused before the first backward.
            batch = self._batch(labels)
            recording = self._recording(
                batch,
                logits_or_log_probs,
                read_weights("token", token_weights, batch.mask),
                read_weights("step", step_weights, batch.mask),
            )
            values = self._estimator.values(recording, self._direction, components=components)
            self._valued = True
            return values

    def close(self) -> None:
        """Refuse values from here on: the context ends, and what was recorded is let go."""
        self._open = False

    @property
    def _forward(self) -> ObservedForward:
        forward = self._recorder.latest
        assert forward is not None
        return forward

    def _recording(
        self,
        batch: LabelledBatch,
        scores: Tensor,
        token_weights: Tensor | None,
        step_weights: Tensor | None,
    ) -> Recording:
        """The observed forward, with scores that must be its own."""
        estimator, recorder = self._estimator, self._recorder
        config = estimator.config
        head = watched_head(scores)
        # Losses need their graph where errors are computed from them: by estimators that capture,
        # and below a watched head, whose errors label values share with the training step.
        # Otherwise label values along a fixed M compare them with those of the dual forward:
        # numbers do.
        graph = estimator.needs_forward or head is not None
        with nullcontext() if graph else torch.no_grad():
            losses = token_losses(scores, batch.labels)
        require_finite(losses, batch.mask, "batch")
        self._require_own(scores, losses, batch)
        # Estimators that capture errors notice by themselves whether any arrives.
        if not config.captured and not _follows(scores, recorder):
            raise foreign_scores("the graph of another forward")
        products = recorder.products | {scores.dtype}
        # What a walk changes is a difference of losses, and may be as small as their rounding.
        coarse = config.estimator == WALK and self._forward.is_coarser(scores)
        return Recording(
            batch,
            token_weights,
            step_weights,
            None if coarse else losses,
            recorder,
            head,
            products,
        )

    def _require_open(self) -> None:
        latest = self._recorder.latest
        if latest is not None and latest.model is None:
            raise ModelError(
                "decoder layers were run, and not the model around them",
                got="a call of the decoder by itself inside observe()",
                why="the arguments of the model and the scores that it returns are those of the "
                "observed forward",
                remedy="call the model itself, logits = model(...).logits; or scorer.score(batch)",
            )
        if not self._open or latest is None:
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
        estimator, recorder = self._estimator, self._recorder
        if recorder.forward is None and estimator.config.captured:
            recorder.require_graph()
        inputs = self._forward.inputs
        self._require_constant(inputs)
        inputs = by_batch_names(estimator.adapter, inputs)
        ids = inputs.get("input_ids")
        batch = read_batch(
            {**inputs, "input_ids": labels if ids is None else ids, "labels": labels},
            max_length=estimator.adapter.max_positions(),
        )
        if ids is None:  # a model that was called on embeddings
            del batch.inputs["input_ids"]
        estimator.check_labels(batch)
        # Before a forward of the proofs', which a cache would confuse.
        if estimator.config.captured:
            estimator.proofs.require_rule(recorder)
        with recorder.isolated():
            estimator.proofs.see_arguments(batch, observed=True)
        return batch

    def _require_constant(self, inputs: Mapping[str, Any]) -> None:
        """Refuse arguments that were made with parameters of the values."""
        # A forward of our own on the same arguments would take them for constants, and a captured
        # use of a parameter is one of this forward: the part of the gradient that passes through
        # the argument would be left out.
        made = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
        scored = self._estimator.scored
        names = {id(p): name for name, p in scored.parameters.items()}
        for argument, value in made.items():
            leaves = [value, *(getattr(n, "variable", None) for n in graph_nodes(value))]
            for leaf in leaves:
                # Shards are gathered into other tensors than the parameters.
                whole = scored.sharding is None and id(leaf) not in names
                if whole or not isinstance(leaf, nn.Parameter):
                    continue
                raise UnsupportedError(
                    f"{argument} was made with a parameter that values are over",
                    got=names.get(id(leaf), "a sharded parameter"),
                    why="its use outside of the observed forward would be missing from the values",
                    remedy="call the model on input_ids; or detach the argument, where nothing is "
                    "to be trained through it; or values over parameters that do not include it "
                    "(parameters='linears')",
                )

    def _require_own(self, scores: Tensor, losses: Tensor, batch: LabelledBatch) -> None:
        """Refuse scores that are not the ones that the observed forward returned."""
        # Casts and views of an output are recognised by the graph. Others are compared: with the
        # output, if it still lives; else with a forward of our own, where that gives the same.
        if self._forward.gave(scores):
            return
        outputs = [out for out in self._forward.outputs if out.dim() >= scores.dim()]
        if outputs:
            with torch.no_grad():
                same = any(_agree(scores.detach(), out.detach(), batch) for out in outputs)
            if not same:
                raise foreign_scores("other numbers than those that the model returned")
            return
        adapter = self._estimator.adapter
        if draws(adapter.model):
            raise foreign_scores(
                "scores that no output of the model can be compared with, of a forward with dropout"
            )
        with self._recorder.isolated(), torch.no_grad(), evaluation_mode(adapter.model):
            again = forward_losses(adapter, batch, "batch")
        own = Recording(
            batch, losses=losses, recorder=self._recorder, products=self._recorder.products
        )
        own.require_losses(again)


def _agree(scores: Tensor, output: Tensor, batch: LabelledBatch) -> bool:
    """Whether scores and an output agree at each response token, but for rounding."""
    if scores.dim() == output.dim() == 3:
        if scores.shape != output.shape or scores.shape[:2] != batch.labels.shape:
            return False
        # Token i is predicted at position i - 1.
        rows = batch.mask[:, 1:]
        a, b = (x[:, :-1][rows] for x in (scores, output))
    else:
        # Log-probabilities may begin with token 1.
        count, length = batch.labels.shape
        if output.dim() == 2 and tuple(output.shape) not in ((count, length), (count, length - 1)):
            return False
        a, b = (token_losses(x, batch.labels)[batch.mask] for x in (scores, output))
    coarse = max(torch.finfo(x.dtype).eps for x in (scores, output))
    tolerance = min(256 * coarse, 5e-2)
    dtype = wide(a.dtype, b.dtype)
    return bool(torch.isclose(a.to(dtype), b.to(dtype), rtol=tolerance, atol=tolerance).all())


def _follows(scores: Tensor, recorder: Recorder) -> bool:
    """Whether a scored linear lies in the graph of the scores; also where either is in none."""
    uses = {*recorder.nodes, *(use.s.grad_fn for use in recorder.linears)}
    if scores.grad_fn is None or not uses:
        return True
    return any(node in uses for node in graph_nodes(scores))
