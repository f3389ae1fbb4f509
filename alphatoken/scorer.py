"""The scorer: model, validation and retention in; one value a response token out."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from alphatoken.config import WALK, ScorerConfig
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import DirectionCache, require_gradients
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.influence import InfluenceFactors
from alphatoken.direction.inputs import DirectionInputs, ScorerArguments
from alphatoken.direction.objective import GradientReducer
from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import (
    AlphaTokenWarning,
    ConfigError,
    InputError,
    ModelError,
    UnsupportedError,
)
from alphatoken.estimate.captured import Captured
from alphatoken.estimate.estimator import Estimator, Recording
from alphatoken.estimate.label import Label
from alphatoken.estimate.observed import Observed
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.estimate.walk import Walk, end_of_walk, walk_age
from alphatoken.model.batch import AnyBatch, PreferenceBatch
from alphatoken.model.fingerprint import (
    Written,
    settings_of,
    stamps_of,
    trained_of,
    written_between,
)
from alphatoken.model.forward import is_compiled, is_wrapper
from alphatoken.model.head import watch_head
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import Scope
from alphatoken.model.sharding import MasterWeights, Sharding
from alphatoken.support.devices import deferred_refusals
from alphatoken.support.precision import float16_named
from alphatoken.support.progress import ProgressSink
from alphatoken.values import Certificate, TokenValues

__all__ = ["AlphaTokenWarning", "CoverageReport", "Observed", "Scorer"]


_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Scores of one model are taken one after the other, since each puts hooks on it for a while."""


class Scorer:
    """Values the response tokens of a batch against a validation objective and a retention term.

        value of token k  =  <gradient (as the estimator defines it), M>,   M = P o (G + lambda V)

    Args:
        model: a decoder; a transformers model is recognised, plain, under PEFT, and inside
            DistributedDataParallel, FSDP2 or a DeepSpeed engine.
        validation: a labelled batch or several (J_tgt is the mean token loss over all their
            response tokens; they are streamed), or preference pairs (``PreferenceBatch``); None
            only with ``objective="stability"``.
        retention: a ``FisherDrift``; or labelled retention batches, whose mean-loss gradient then
            is V; or None, adaptation only.
        config: what to compute.
        optimizer: for ``preconditioner="frozen"`` or ``"full"``.
        adapter: if the model's own adapter is not to be looked up.
        reduce: makes the mean of a summed gradient, for means over processes or steps; called
            once a build with "validation" and "retention". None divides.
        sharding: how to reach weights that are spread over processes (FSDP2, ZeRO-3). G is then
            built from captured errors, and M is gathered one matrix at a time.
        masters: name and parameter to the weight as the optimizer keeps it (float32, under
            DeepSpeed); V is taken from these.
        reference: for ``estimator="walk"``, a second model of the same tokens, on the same device:
            values are losses of ``model`` less its losses. It stands where a walk would end, so
            that ``validation`` may be None. A walk of the scorer's own needs no second model.
        influence: for ``preconditioner="kronecker"``, by ``fit_influence``; under DDP the same on
            every process.

    Attributes:
        estimator: ``Captured``, ``Label`` or ``Walk``; its ``cache`` keeps M.
        arguments: as they were handed over, with the rows that were set since.

    Own forwards run in evaluation mode (dropout off). Model, gradients, hooks, modes and RNG
    state are afterwards as before, also after an exception. G and V are rebuilt when anything has
    changed that they depend on: weights, by whichever writer, buffers, validation tensors, which
    parameters train, adapters and settings: numbers, tensors and arrays in attributes of modules,
    also in collections, objects and functions there. Globals and files are not read; ``refresh``
    after a change of one. A walk keeps its end while weights change, as a training run needs it,
    and ``score`` then warns; other validation numbers, or settings at the weights where it began,
    take a new one. For this each ``score`` and each ``observe`` reads all weights once, about what
    a forward of one token reads; with ``pin`` you decide, and nothing is read.

    Raises:
        ConfigError, CoverageError, UnsupportedError, FisherError, InputError, NumericalError,
        ModelError: see each class; raised before any value is returned.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from alphatoken import masked_sft_loss, select_top
        >>> seed = torch.manual_seed(0)
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))
        >>> ids = torch.randint(0, 32, (2, 6))
        >>> batch = {"input_ids": ids, "labels": ids}
        >>> scorer = Scorer(model, validation=batch, config=ScorerConfig("label", layers=1))
        >>> scorer
        Scorer(LlamaForCausalLM, layers 1; 1 validation batch; ScorerConfig(estimator='label', ...
        >>> values = scorer.score(batch)
        >>> values.total.shape, int(values.mask.sum())
        (torch.Size([2, 6]), 10)
        >>> with scorer.observe() as observed:  # one forward serves both
        ...     logits = model(**batch).logits
        ...     values = observed.values(logits, ids)
        >>> keep = select_top(values.total, values.mask, ratio=0.5)
        >>> int(keep.sum()), masked_sft_loss(logits, ids, keep).requires_grad
        (5, True)
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Mapping[str, Any] | PreferenceBatch | Sequence[Any] | None = None,
        retention: FisherDrift | Mapping[str, Any] | Sequence[Any] | None = None,
        config: ScorerConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        adapter: DecoderAdapter | None = None,
        reduce: GradientReducer | None = None,
        sharding: Sharding | None = None,
        masters: MasterWeights | None = None,
        reference: nn.Module | None = None,
        influence: InfluenceFactors | None = None,
    ) -> None:
        config = config or ScorerConfig()
        if not isinstance(model, nn.Module):
            raise InputError(
                "Scorer takes a model, and not its name",
                got=f"{type(model).__name__}: {str(model)[:80]!r}",
                remedy="AutoModelForCausalLM.from_pretrained(NAME)",
            )
        if isinstance(adapter, type):
            raise ConfigError(
                "the adapter is a class",
                got=adapter.__name__,
                remedy=f"an object of it: adapter={adapter.__name__}(model)",
            )
        if adapter is not None and not any(one is adapter.model for one in model.modules()):
            raise ConfigError(
                "the adapter is of another model",
                got=f"a {type(adapter.model).__name__} that is not the {type(model).__name__}",
                why="the values would be those of the adapter's model",
                remedy="an adapter that is made of this model",
            )
        if not isinstance(config, ScorerConfig):
            raise ConfigError(
                "config must be a ScorerConfig",
                got=f"{type(config).__name__}: {str(config)[:80]!r}",
                remedy="ScorerConfig('label'), or ScorerConfig(**options)",
            )
        if isinstance(retention, str | Path):
            raise InputError(
                "Scorer takes a Fisher or batches as retention, and not a name",
                got=repr(str(retention)),
                remedy="fit_fisher(model, prompts), FisherDrift.load(FILE), or labelled batches",
            )
        if reference is not None and config.estimator != WALK:
            raise ConfigError(
                "a second model is read by the estimator 'walk' alone",
                got=f"reference={type(reference).__name__}, estimator={config.estimator!r}",
                remedy="ScorerConfig('walk'), or leave reference out",
            )
        others = () if reference is None else reference.parameters()
        if shared := {*map(id, model.parameters())} & {*map(id, others)}:
            raise ConfigError(
                "the reference model holds parameters of the model itself",
                got=f"{len(shared)} of them",
                why="an adapter that is put onto a model is in use in both, and each value would "
                "be 0",
                remedy="load the second model by itself",
            )
        # G is rebuilt whenever the weights change; an iterator would be empty the second time.
        if isinstance(validation, Iterator):
            validation = list(validation)
        self.arguments = ScorerArguments(
            model, validation, retention, config, optimizer, adapter, reduce, sharding, masters,
            reference, influence,
        )  # fmt: skip
        self._trained: object = None
        self._settings: object = None
        # Attributes before the first forward of a build; and those that forwards write to.
        self._stamps: dict[str, object] | None = None
        self._written: Written = {}
        self._observing = False
        self.estimator = self._built()

    def _built(self) -> Estimator[Any]:
        """The estimator of the model as it is now; nothing is proved of it yet."""
        estimator: Estimator[Any]
        inputs = DirectionInputs.read(self.arguments)
        if inputs.config.estimator == WALK:
            lasts = inputs.config.walk_refresh
            walks = DirectionCache(inputs, end_of_walk, age_of=walk_age, lasts=lasts)
            estimator = Walk(walks)
        else:
            kind = Captured if inputs.config.captured else Label
            estimator = kind(DirectionCache(inputs, DirectionInputs.direction))
        model = inputs.adapter.model
        self._trained = trained_of(model)
        if inputs.scored.sharding is None:
            self._settings = settings_of(model, self._written)
            self._stamps = stamps_of(model)
        return estimator

    def _follow(self) -> None:
        """Build the estimator anew where scope and proofs are of another state of the model."""
        # Parameters may have been replaced, frozen or released, adapters switched. Under ``pin`` a
        # change of a mere setting waits for the next version, as one of weights does.
        model = self.adapter.model
        if self.scored.sharding is not None:  # weights come and go with each layer that runs
            return
        same = trained_of(model) == self._trained
        if same and self.estimator.cache.pinned is not None:
            return
        if same and settings_of(model, self._written) == self._settings:
            return
        estimator = self._built()
        estimator.carry_over(self.estimator, same_parameters=same)
        self.estimator = estimator

    def _settle(self) -> None:
        """Note which attributes the forwards that M was built by have written to."""
        # A number that a module notes at each pass is no setting, and would have M built at each.
        # What a first forward makes is one from here on.
        before, self._stamps = self._stamps, None
        if before is None or self.estimator.cache.pinned is not None:
            return
        after = stamps_of(self.adapter.model)
        self._written = {**written_between(before, after), **self._written}
        self._settings = settings_of(self.adapter.model, self._written)

    def _lock(self) -> Any:
        return _LOCKS.setdefault(self.adapter.model, RLock())

    def __repr__(self) -> str:
        """Model, layers, what values are taken against, and the options that were changed."""
        layers = ", ".join(map(str, self.scored.scope.layers))
        retention = self.arguments.retention
        count = len(self.validation)
        against = f"{count} validation batch{'es' * (count != 1)}"
        if retention is not None:
            kind = repr(retention) if isinstance(retention, FisherDrift) else "retention rows"
            against += f", {kind}"
        name = type(self.arguments.model).__name__
        return f"Scorer({name}, layers {layers}; {against}; {self.config!r})"

    @property
    def config(self) -> ScorerConfig:
        """The options of the scorer."""
        return self.arguments.config

    @property
    def adapter(self) -> DecoderAdapter:
        """The adapter of the model."""
        return self.estimator.adapter

    @property
    def scored(self) -> ScoredParameters:
        """The parameters as they were last chosen; ``scope`` and ``parameters`` look anew."""
        return self.estimator.scored

    @property
    def warn(self) -> bool:
        """Whether the scorer warns, once, when one side of M decides the ranking alone."""
        return self.estimator.warn

    @warn.setter
    def warn(self, warn: bool) -> None:
        self.estimator.warn = warn

    @property
    def validation(self) -> Sequence[AnyBatch]:
        """The validation batches of the scorer."""
        return self.estimator.inputs.validation

    @property
    def coverage(self) -> CoverageReport:
        """The parameters in scope, and the proofs about them so far.

        Proofs run at the first use, on a few short rows; ``verify`` compares whole batches.
        """
        return self.estimator.proofs.report

    @property
    def scope(self) -> Scope:
        """The scored layers and their linears."""
        self._follow()
        return self.scored.scope

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Parameter name -> parameter, everything that values are inner products over."""
        self._follow()
        return self.scored.parameters

    @property
    def direction(self) -> Direction:
        """M's two sides at the current parameters, as whole matrices.

        With ``preconditioner="full"`` M depends on the batch as well, and P is left out (P = 1)
        here; ``direction_for`` gives M for a batch.
        """
        with self._lock():
            self._follow()
            estimator = self.estimator
            if isinstance(estimator, Walk):
                return estimator.way()
            direction: Direction | None = estimator.cache.peek()
            # Where M is stale it is built but not kept. ``prepare`` alone keeps it: it runs the
            # proofs, and what is kept may be contracted.
            return estimator.inputs.direction() if direction is None else direction

    def refresh(self) -> None:
        """Drop G, V and a walk; the next use builds them anew, as a new scorer would."""
        self._require_outside("refresh")
        self.estimator.cache.invalidate()
        self.estimator.forget()

    def set_validation(
        self, validation: Mapping[str, Any] | PreferenceBatch | Sequence[Any]
    ) -> None:
        """Value against other validation batches from now on; the next use builds G anew."""
        if isinstance(validation, Iterator):
            validation = list(validation)
        self.estimator.cache.set_validation(validation)
        self.arguments = self.estimator.inputs.arguments

    def set_retention(
        self, retention: FisherDrift | Mapping[str, Any] | Sequence[Any] | None
    ) -> None:
        """Use another retention term from now on; the next use builds V anew."""
        self.estimator.cache.set_retention(retention)
        # Only now: a retention term that was refused must not be what the certificate compares
        # with.
        self.arguments = self.estimator.inputs.arguments

    def pin(self, version: object | None) -> None:
        """Let ``version`` decide when G and V are stale: they are rebuilt when it changes.

        For a direction that serves several steps, for weights in shards, and for weights that do
        not change, which then are not read. None: they are rebuilt whenever something has changed.
        """
        self.estimator.cache.pin(version)

    def score(
        self,
        batch: Mapping[str, Any],
        *,
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
        components: bool = True,
    ) -> TokenValues:
        """Value every response token of ``batch`` with a forward of its own (dropout off).

        Args:
            batch: ``input_ids`` (b, t), unshifted ``labels`` (b, t) with -100 for what is not
                valued, and whatever else the model's forward takes.
            token_weights: as in ``Observed.values``.
            step_weights: as in ``Observed.values``.
            components: as in ``Observed.values``.

        Returns:
            Values in the shape (b, t) of ``labels``; index i is the value of predicting token i.

        Raises:
            InputError, NumericalError, ModelError, CoverageError, UnsupportedError: see the class.
        """
        with float16_named(self.adapter.model), self._lock(), deferred_refusals():
            self._require_outside("score")
            self._follow()
            estimator = self.estimator
            checked, token, step = estimator.read(batch, token_weights, step_weights)
            require_gradients(self.adapter.model)
            estimator.proofs.see_arguments(checked)
            direction = estimator.prepare(checked)
            self._settle()
            # Label values along a fixed M run a dual forward of their own, and nothing before it.
            if not estimator.needs_forward:
                recording = Recording(checked, token, step)
                return estimator.values(recording, direction, components=components)
            with estimator.forward(checked, token, step) as recording:
                return estimator.values(recording, direction, components=components)

    @contextmanager
    def observe(self) -> Iterator[Observed]:
        """Watch the forward that training runs anyway, so that it serves scoring as well.

        Inside the context call the model, then ``observed.values(logits, labels)``; the loss may
        be sent back through the same graph, inside or after the context. Values see the pass as
        it is, its dropout masks included. ``label`` needs a dual forward of its own (dropout
        off), run from the observed arguments; where that gives the same losses, the layers below
        the first scored one are not run again, nor is the head, whose errors values and training
        share. Only the last forward with a graph is kept.
        """
        # M first: its forwards on the validation set must not be taken for the observed one.
        self._follow()
        self._require_uncompiled()
        lock = self._lock()
        with lock, deferred_refusals():  # proofs and walks move the weights
            direction = self.estimator.prepare()
            self._settle()
        with watch_head(self.adapter), self.estimator.proofs.recording() as recorder:
            observed = Observed(self.estimator, direction, recorder, lock)
            self._observing = True
            try:
                yield observed
            finally:
                self._observing = False
                observed.close()

    def _require_outside(self, method: str) -> None:
        if self._observing:
            raise ModelError(
                f"{method}() was called inside observe()",
                why="its own forward, or another M, would take the place of what is observed",
                remedy=f"call {method}() before or after the context, or observed.values() inside",
            )

    def _require_uncompiled(self) -> None:
        wrapped = is_wrapper(self.arguments.model)
        if wrapped or (self.config.captured and is_compiled(self.adapter.model)):
            raise UnsupportedError(
                f"'{self.config.estimator}' cannot observe a compiled model",
                got="torch.compile(model)" if wrapped else "a module with .compile()",
                why="compiled code shows neither inputs nor errors of its parts",
                remedy="scorer.score(batch), which runs the model uncompiled; or train it "
                "uncompiled; estimator='label' can observe a model under model.compile()",
            )

    def direction_for(
        self, batch: Mapping[str, Any], *, step_weights: Tensor | None = None
    ) -> Direction:
        """M's two sides as ``score`` takes them for this batch; needs weights that are not sharded.

        They differ from ``direction`` only under ``preconditioner="full"``, which depends on the
        batch.
        """
        if self.config.preconditioner != "full":
            return self.direction
        self._follow()
        estimator = self.estimator
        checked, _, weights = estimator.read(batch, step_weights=step_weights)
        direction = estimator.prepare(checked)
        with estimator.forward(checked, step_weights=weights) as recording:
            return estimator.at_step(recording, direction)

    def verify(
        self,
        batch: Mapping[str, Any],
        tokens: int = 8,
        *,
        seed: int = 0,
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
        fisher_file: str | os.PathLike[str] | None = None,
        progress: bool | ProgressSink | None = None,
    ) -> Certificate:
        """Certify what ``score`` and ``observe`` return; see ``alphatoken.certificate``.

        The oracle builds scope, labels, G, V, P and M anew from what was handed to this scorer,
        and compares every component of every sampled token by itself. Values along a walk, or to a
        second model, are compared for every token with the losses of a copy of the model that
        ``torch.optim.AdamW`` trains (memory: two models, gradients and moments more).

        Args:
            batch: a labelled batch.
            tokens: response tokens sampled for the per-token oracle (one backward each); unread by
                a walk.
            seed: of that sample.
            token_weights: as in ``Observed.values``.
            step_weights: as in ``Observed.values``.
            fisher_file: where the retention term was read from; the oracle then reads Fisher and
                reference weights from there, instead of taking the loaded ones.
            progress: None prints to stderr if that is a terminal, True always, False never; a
                function gets the :class:`alphatoken.support.progress.Tracker`.

        Raises:
            UnsupportedError: weights or gradients are spread over processes, P comes from an
                optimizer that the oracle does not know, or a walk began at other weights.
        """
        # By name: the certificate imports this file, and with it come the oracles.
        certificate = importlib.import_module("alphatoken.certificate.certify")
        certified: Certificate = certificate.certify(
            self,
            batch,
            tokens=tokens,
            seed=seed,
            token_weights=token_weights,
            step_weights=step_weights,
            fisher_file=fisher_file,
            progress=progress,
        )
        return certified
