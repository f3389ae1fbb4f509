"""The scorer: model, validation and retention in; one value a response token out."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alphatoken.adapter import DecoderAdapter, find_adapter
from alphatoken.batch import (
    LabelledBatch,
    PreferenceBatch,
    as_batches,
    read_batch,
    require_finite,
    token_losses,
)
from alphatoken.capture import Recorder, Scope, record
from alphatoken.config import ScorerConfig
from alphatoken.direction import Direction
from alphatoken.drift import FisherDrift
from alphatoken.errors import ConfigError, InputError, ModelError, warn_caller
from alphatoken.estimators import (
    SELF_ONLY,
    SPLIT,
    SWITCHED,
    Consume,
    TokenErrors,
    self_only_errors,
    token_errors,
)
from alphatoken.forward_mode import label_values
from alphatoken.interaction import token_gram
from alphatoken.objective import GradientReducer, forward_losses, scoring_forward
from alphatoken.progress import ProgressSink
from alphatoken.proofs import CoverageReport, Witness, require_self_rule
from alphatoken.readout import (
    Columns,
    ColumnSums,
    Side,
    assign_columns,
    combine,
    contract_columns,
    total_side,
)
from alphatoken.sharding import Sharding
from alphatoken.target import Target
from alphatoken.trunk import Start
from alphatoken.values import TokenValues

if TYPE_CHECKING:
    from alphatoken.fidelity.certificate import Certificate

__all__ = ["AlphaTokenWarning", "CoverageReport", "Given", "Observed", "Scorer"]

Parts = tuple[Tensor, Tensor, Tensor]
"""(direct, causal, unassigned) of one side, by token; see ``assign_columns``."""


class AlphaTokenWarning(UserWarning):
    """Something is legal but probably not meant; the message says what to look at."""


@dataclass(frozen=True)
class Given:
    """What the user handed to a scorer, untouched: all that the certificate takes from one.

    Attributes:
        model: with its wrappers.
        validation: batches or pairs; None for none.
        retention: as in ``Scorer``.
        config: the options.
        optimizer: as in ``Scorer``.
        adapter: the user's own; None where it was looked up.
        whole: no ``reduce`` and no ``sharding``: this process has everything.
    """

    model: nn.Module
    validation: Any
    retention: Any
    config: ScorerConfig
    optimizer: torch.optim.Optimizer | None
    adapter: DecoderAdapter | None
    whole: bool


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

    Attributes:
        warn: say so once when one side of M decides the ranking alone; True at first.

    Own forwards run in evaluation mode (dropout off). Model, gradients, hooks, modes and RNG
    state are afterwards as before, also after an exception. G and V are rebuilt when a parameter
    has changed (in-place version counters; writing through ``.data`` does not count, call
    ``refresh()`` then, or decide yourself with ``pin``).

    Raises:
        ConfigError, CoverageError, UnsupportedError, FisherError, InputError, NumericalError,
        ModelError: see each class; raised before any value is returned.
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Mapping[str, Any] | PreferenceBatch | Sequence[Any] | None,
        retention: FisherDrift | Mapping[str, Any] | Sequence[Any] | None = None,
        config: ScorerConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        adapter: DecoderAdapter | None = None,
        reduce: GradientReducer | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        config = config or ScorerConfig()
        if isinstance(validation, Iterator):
            validation = list(validation)
        whole = reduce is None and sharding is None
        self.given = Given(model, validation, retention, config, optimizer, adapter, whole)
        self.adapter = adapter or find_adapter(model)
        self.target = Target(
            self.adapter,
            () if validation is None else as_batches(validation),
            retention,
            config,
            optimizer,
            reduce=reduce,
            sharding=sharding,
        )
        scope = self.target.scope
        self._witness = Witness(
            self.adapter,
            scope,
            self.target.parameters,
            self.target.names,
            config.estimator,
            skipped=scope.uncovered if config.uncovered == "skip" else {},
            sharding=sharding,
        )
        self.warn = True
        self._warned = False
        self._starts = True  # a label pass may start at the observed forward's hidden states

    @property
    def config(self) -> ScorerConfig:
        """The options."""
        return self.target.config

    @property
    def validation(self) -> Sequence[Any]:
        """The validation batches."""
        return self.target.validation

    @property
    def coverage(self) -> CoverageReport:
        """What is in scope, and the proofs; filled at the first use."""
        return self._witness.report

    @property
    def scope(self) -> Scope:
        """The scored layers and their linears."""
        return self.target.scope

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Parameter name -> parameter, everything that values are inner products over."""
        return self.target.parameters

    @property
    def direction(self) -> Direction:
        """M's two sides at the current parameters, in projected form.

        With ``preconditioner="full"`` M depends on the batch as well: this is it with P = 1.
        """
        return self.target.direction()

    # --- what changes over a run -----------------------------------------------------------------

    def refresh(self) -> None:
        """Drop G and V; the next use builds them anew."""
        self.target.invalidate()

    def set_validation(
        self, validation: Mapping[str, Any] | PreferenceBatch | Sequence[Any]
    ) -> None:
        """Value against other validation batches from now on; the next use builds G anew."""
        if isinstance(validation, Iterator):
            validation = list(validation)
        self.target.set_validation(as_batches(validation))
        self.given = replace(self.given, validation=validation)

    def set_retention(
        self, retention: FisherDrift | Mapping[str, Any] | Sequence[Any] | None
    ) -> None:
        """Use another retention term from now on; the next use builds V anew."""
        self.target.set_retention(retention)
        self.given = replace(self.given, retention=retention)

    def set_stability_weight(self, stability_weight: float) -> None:
        """Change lambda; nothing is built anew."""
        self.target.config = replace(self.config, stability_weight=stability_weight)
        config = replace(self.given.config, stability_weight=stability_weight)
        self.given = replace(self.given, config=config)

    def pin(self, version: object | None) -> None:
        """Let ``version`` decide when G and V are stale, by equality; None goes back.

        For weights that change without their version counters (through ``.data``, or in shards),
        and to keep a direction over several steps.
        """
        self.target.pin(version)

    def _prepare(self, tokens: int | None) -> None:
        self.target.require_gradients()
        self.target.prepare(tokens, self._witness if self._witness.pending else None)

    # --- values --------------------------------------------------------------------------------

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
            batch: ``input_ids``, ``labels`` and whatever else the model's forward takes.
            token_weights: as in ``Observed.values``.
            step_weights: as in ``Observed.values``.
            components: as in ``Observed.values``.

        Returns:
            ``TokenValues``; index i of each tensor is the value of predicting token i.
        """
        checked = read_batch(batch, max_length=self.adapter.max_positions())
        weights = Weights.read(checked.mask, token_weights, step_weights)
        self._witness.see_documents(checked)
        self._prepare(checked.labels.numel())
        target = self.target
        if not target.captured and self.config.preconditioner != "full":
            return self._label(checked, weights, None, components=components)
        with self._witness.recording() as recorder:
            with scoring_forward(self.adapter, target.first):
                losses = forward_losses(self.adapter, checked, "batch")
            if target.captured:
                errors = None
                if target.sharding is not None:
                    errors = self._seen_errors(recorder, losses, checked.mask, weights)
                return self._contracted(
                    recorder, errors, losses, checked.mask, weights, components=components
                )
            return self._label(checked, weights, losses, recorder, components=components)

    @contextmanager
    def observe(self, *, interaction: bool = False) -> Iterator[Observed]:
        """Watch the forward that training runs anyway, so that it serves scoring as well.

        Inside the context call the model, then ``observed.values(logits, labels)``; the loss may
        be sent back through the same graph, inside or after the context. Values see the pass as
        it is, its dropout masks included. ``label`` needs a dual forward of its own (dropout
        off), run from the observed arguments; where that gives the same losses, the layers below
        the first scored one are not run again. Only the last forward with a graph is kept.

        Args:
            interaction: keep what ``Observed.interaction`` needs; of no consequence for
                estimators with self-only errors, which have it anyway.
        """
        self._prepare(tokens=None)
        switched = interaction or self.config.estimator in SWITCHED
        with record(
            self.adapter, self.scope, attention=switched, sharding=self.target.sharding
        ) as recorder:
            # Processes gather sharded matrices in one order, which a backward does not promise.
            kept = interaction or self.target.sharding is not None
            yield Observed(self, recorder, switched, kept)

    def _seen_errors(
        self, recorder: Recorder, losses: Tensor, mask: Tensor, weights: Weights
    ) -> TokenErrors:
        """Token errors of the weighted losses, once the coverage proof has seen the pass."""
        errors = self._errors(recorder, losses, weights.token)
        self._witness.see(recorder, losses, mask)
        return errors

    def _contracted(
        self,
        recorder: Recorder,
        errors: TokenErrors | None,
        losses: Tensor,
        mask: Tensor,
        weights: Weights,
        *,
        components: bool,
    ) -> TokenValues:
        """Values by errors at linears, contracted with each side of M or with both at once.

        Without ``errors`` each is contracted inside the backward that makes it, and none is kept.
        """
        target = self.target
        sides, balance = self._sides(recorder, losses, mask, weights, components=components)
        present = [side for side in sides if side is not None]
        if errors is None:
            sums = ColumnSums(recorder, present, target.names)
            self._errors(recorder, losses, weights.token, sums.add)
            self._witness.see(recorder, losses, mask)
            columns = iter(sums.columns())
        else:
            gather = None if target.sharding is None else target.sharding.gather
            columns = iter(contract_columns(recorder, errors, present, target.names, gather))
        position = self.config.causal_position
        gain, keep = (
            None if side is None else assign_columns(next(columns), mask, position)
            for side in sides
        )
        return self._finish(gain, keep, mask, balance, components=components)

    def _sides(
        self,
        recorder: Recorder,
        losses: Tensor | None,
        mask: Tensor,
        weights: Weights,
        *,
        components: bool,
    ) -> tuple[tuple[Side | None, Side | None], dict[str, float]]:
        """What is contracted for this batch: G and V, and their balance; or M alone."""
        target = self.target
        if self.config.preconditioner == "full":
            assert losses is not None
            direction = self._at_step(recorder, losses, mask, weights)
            gain = Side(direction.adaptation) if target.adapts else None
            keep = None if direction.stability is None else Side(direction.stability)
            sides = gain, keep
        else:
            direction, sides = None, target.sides
        if not components:
            whole = total_side(*sides, self.config.stability_weight)
            return sides if whole is None else (whole, None), {}
        return sides, target.balance if direction is None else target.balance_of(direction)

    def _at_step(
        self, recorder: Recorder, losses: Tensor, mask: Tensor, weights: Weights
    ) -> Direction:
        """M for the step that these losses make."""
        with torch.enable_grad():
            loss = (losses * weights.of_step(mask).to(losses)).sum()
        if not loss.requires_grad:
            raise foreign_scores("a detached tensor")
        return self.target.at_step(self.target.step_gradient(loss, recorder))

    def _errors(
        self,
        recorder: Recorder,
        losses: Tensor,
        weights: Tensor | None,
        consume: Consume | None = None,
    ) -> TokenErrors:
        self._witness.require_rule(recorder)
        with torch.enable_grad():
            loss = (losses if weights is None else losses * weights.to(losses)).sum()
        errors = None
        if loss.requires_grad:
            errors = token_errors(
                recorder,
                loss,
                self.config.estimator,
                window=self.config.window,
                head_reduction=self.config.head_reduction,
                path=self.config.path,
                consume=consume,
            )
        if errors is None or not errors.reached:
            raise foreign_scores(
                "a detached tensor" if errors is None else "the graph of another forward"
            )
        return errors

    def direction_for(
        self, batch: Mapping[str, Any], *, step_weights: Tensor | None = None
    ) -> Direction:
        """M's two sides as ``score`` takes them for this batch; needs whole weights.

        The same as ``direction`` unless ``preconditioner="full"``, which depends on the batch.
        """
        if self.config.preconditioner != "full":
            return self.direction
        checked = read_batch(batch, max_length=self.adapter.max_positions())
        weights = Weights.read(checked.mask, None, step_weights)
        self._prepare(tokens=None)
        with self._witness.recording() as recorder:
            with scoring_forward(self.adapter, self.target.first):
                losses = forward_losses(self.adapter, checked, "batch")
            return self._at_step(recorder, losses, checked.mask, weights)

    def columns(
        self,
        batch: LabelledBatch,
        *,
        weights: Tensor | None = None,
        direction: Mapping[str, Tensor] | None = None,
    ) -> Columns:
        """Columns by position of use for one direction, with weighted losses.

        For diagnostics; needs a captured estimator (label has rows, no columns), and whole weights.

        Args:
            batch: checked.
            weights: (b, t) factors on the token losses.
            direction: parameter name -> M; by default the total of ``direction``.
        """
        side = Side(self.direction.total() if direction is None else direction)
        with self._witness.recording() as recorder:
            with scoring_forward(self.adapter, self.target.first):
                losses = forward_losses(self.adapter, batch, "batch")
            errors = self._errors(recorder, losses, weights)
            return contract_columns(recorder, errors, [side], self.target.names)[0]

    def _label(
        self,
        batch: LabelledBatch,
        weights: Weights,
        losses: Tensor | None,
        recorder: Recorder | None = None,
        *,
        components: bool,
    ) -> TokenValues:
        """Label values; ``losses`` are those of a forward that has run, ``recorder`` is its."""
        sides, balance = self._sides(
            recorder or Recorder(self.scope), losses, batch.mask, weights, components=components
        )
        start = None if losses is None else self._start(recorder, losses)

        def along(side: Side) -> Parts:
            nonlocal start
            values = label_values(
                self.adapter,
                batch,
                side.of(side.matrices),
                first=self.target.first or 0,
                start=start,
            )
            if start is not None and start.refused:
                self._starts, start = False, None
            if weights.token is not None:
                values = values * weights.token.to(values)
            return values, torch.zeros_like(values), torch.zeros_like(values[:, 0])

        gain, keep = (None if side is None else along(side) for side in sides)
        return self._finish(gain, keep, batch.mask, balance, components=components)

    def _start(self, recorder: Recorder | None, losses: Tensor) -> Start | None:
        """Where a dual forward may start: the recorded input of the first scored layer."""
        forward = None if recorder is None else recorder.forward or recorder.begun
        if forward is None or forward.hidden is None or not forward.plain:
            return None
        usable = self._starts and self.target.first is not None
        return Start(forward.hidden, losses.detach()) if usable else None

    def _finish(
        self,
        adaptation: Parts | None,
        stability: Parts | None,
        mask: Tensor,
        balance: dict[str, float],
        *,
        components: bool,
    ) -> TokenValues:
        values = combine(
            adaptation,
            stability,
            mask=mask,
            split=self.config.estimator in SPLIT,
            estimator=self.config.estimator,
            stability_weight=self.config.stability_weight,
            balance=balance,
        )
        if not components:
            return values.total_alone()
        if self.warn and adaptation is not None and stability is not None and not self._warned:
            self._warn_if_one_sided(values)
        return values

    def _warn_if_one_sided(self, values: TokenValues) -> None:
        shares = values.shares()
        stability = sum(v for k, v in shares.items() if k.startswith("stability"))
        if 0 < stability < 0.001 or stability > 0.999:
            side = "stability" if stability > 0.5 else "adaptation"
            self._warned = True
            warn_caller(
                f"The {side} side alone decides the ranking (share of stability "
                f"{stability:.2e}): lambda has no natural unit. Look at values.balance and set "
                "stability_weight accordingly.",
                AlphaTokenWarning,
            )

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
        """Certify what ``score`` and ``observe`` return; see ``fidelity.certificate``.

        The oracle builds scope, labels, G, V, P and M anew from what was handed to this scorer,
        and compares every component of every sampled token by itself.

        Args:
            batch: a labelled batch.
            tokens: response tokens sampled for the per-token oracle (one backward each).
            seed: of that sample.
            token_weights: as in ``Observed.values``.
            step_weights: as in ``Observed.values``.
            fisher_file: where the retention term was read from; the oracle then reads Fisher and
                reference weights from there, instead of taking the loaded ones.
            progress: None prints to stderr if that is a terminal, True always, False never; a
                function gets a :class:`alphatoken.progress.Progress`.

        Raises:
            UnsupportedError: weights or gradients are spread over processes, or P comes from an
                optimizer that the oracle does not know.
        """
        module = importlib.import_module("alphatoken.fidelity.certificate")
        certificate: Certificate = module.certify(
            self,
            batch,
            tokens=tokens,
            seed=seed,
            token_weights=token_weights,
            step_weights=step_weights,
            fisher_file=fisher_file,
            progress=progress,
        )
        return certificate


@dataclass(frozen=True)
class Weights:
    """Constant factors (b, t) on token losses: of the values, and of the optimizer's step."""

    token: Tensor | None
    step: Tensor | None

    @classmethod
    def read(cls, mask: Tensor, token: Tensor | None, step: Tensor | None) -> Weights:
        """Detached and checked."""
        for name, weights in (("token_weights", token), ("step_weights", step)):
            if weights is not None and weights.shape != mask.shape:
                raise InputError(
                    f"{name} must have one entry a token",
                    got=f"{tuple(weights.shape)} for labels of {tuple(mask.shape)}",
                    remedy="expand weights of rows, and pad (b, t - 1) at index 0",
                )
        return cls(*(None if w is None else w.detach() for w in (token, step)))

    def of_step(self, mask: Tensor) -> Tensor:
        """d(loss of the step) / d(token loss); the mean over response tokens if not given."""
        if self.step is not None:
            return self.step
        if self.token is not None:
            raise InputError(
                "preconditioner='full' needs step_weights where token_weights are given",
                why="the gradient that the optimizer will see is part of M, and its scale is not "
                "known from the values' weights",
                remedy="step_weights = d(training loss) / d(token loss), all tokens kept, (b, t)",
            )
        return mask.double() / mask.sum()


def foreign_scores(got: str) -> InputError:
    """The error for scores that errors cannot be taken of."""
    return InputError(
        "the scores do not belong to the observed forward",
        got=got,
        why="no error would reach a scored linear, and every value would be zero",
        remedy="pass the logits that the model returned inside the context, undetached",
    )


class Observed:
    """Handle on the forward seen by ``Scorer.observe``."""

    def __init__(self, scorer: Scorer, recorder: Recorder, switched: bool, kept: bool) -> None:
        self._scorer, self._recorder, self._switched = scorer, recorder, switched
        self._kept = kept
        self._last: tuple[_Call, TokenValues] | None = None

    def values(
        self,
        scores: Tensor,
        labels: Tensor,
        *,
        token_weights: Tensor | None = None,
        step_weights: Tensor | None = None,
        components: bool = True,
        keep_errors: bool = False,
    ) -> TokenValues:
        """Values of the observed forward; its graph, and every .grad, stay as they are.

        Args:
            scores: logits (b, t, vocabulary) of that forward, or token log-probabilities (b, t)
                or (b, t - 1), attached to its graph.
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
            keep_errors: keep the errors of all scored linears, so that ``components`` and
                ``interaction`` need no backward of their own. Else each is contracted inside the
                backward and let go: less memory by about the activations of the scored layers.

        Raises:
            ModelError: no forward with gradients was seen. InputError, NumericalError: as
                ``Scorer.score``.
        """
        scorer, recorder = self._scorer, self._recorder
        forward = recorder.forward or recorder.begun
        if recorder.forward is None and scorer.target.captured:
            recorder.require_graph()
        inputs = {} if forward is None else forward.inputs
        batch = read_batch(
            {**inputs, "input_ids": inputs.get("input_ids", labels), "labels": labels},
            max_length=scorer.adapter.max_positions(),
        )
        if "input_ids" not in inputs:  # a model that was called on embeddings
            del batch.inputs["input_ids"]
        scorer._witness.see_documents(batch)
        weights = Weights.read(batch.mask, token_weights, step_weights)
        needed = scorer.target.captured or self._switched or scorer.config.preconditioner == "full"
        with nullcontext() if needed else torch.no_grad():
            losses = token_losses(scores, batch.labels)
        require_finite(losses, batch.mask, "batch")
        errors = None
        if scorer.target.captured and (keep_errors or self._kept):
            errors = scorer._seen_errors(recorder, losses, batch.mask, weights)
        call = _Call(batch, losses, weights, errors)
        values = self._values(call, components=components)
        self._last = call, values
        return values

    def _values(self, call: _Call, *, components: bool) -> TokenValues:
        scorer, recorder = self._scorer, self._recorder
        batch, losses, weights, errors = call.batch, call.losses, call.weights, call.errors
        if not scorer.target.captured:
            return scorer._label(batch, weights, losses, recorder, components=components)
        return scorer._contracted(
            recorder, errors, losses, batch.mask, weights, components=components
        )

    def components(self) -> TokenValues:
        """The values of the last ``values`` call with their components.

        ``total`` and ``unassigned`` are the same tensors as there, so that who looks at the
        components changes nothing; they are the components' sum up to rounding.

        Raises:
            ModelError: ``values`` was not called.
        """
        call, values = self._last_call("components")
        if values.adaptation is not None:
            return values
        apart = self._values(call, components=True)
        return replace(apart, total=values.total, unassigned=values.unassigned)

    def interaction(self) -> Tensor:
        """Gram matrix of the direct token gradients of the last ``values`` call.

        ``G_kl = <g_k, g_l>`` over the scored weights, g_k the part of token k's loss gradient that
        passes through the position predicting it, ``token_weights`` included.

        Returns:
            (n, n), the response tokens in (row, position) order; see ``interaction.token_gram``.

        Raises:
            ConfigError: neither the estimator nor ``observe(interaction=True)`` asked for
                self-only errors. ModelError: ``values`` was not called.
            UnsupportedError: the model has layers without a self-only backward.
        """
        (last, _), scorer = self._last_call("interaction"), self._scorer
        if not self._switched:
            raise ConfigError(
                f"'{scorer.config.estimator}' has no self-only errors",
                why="inner products of token gradients are taken of them",
                remedy="scorer.observe(interaction=True)",
            )
        own = scorer.config.estimator in SELF_ONLY and scorer.config.path != "causal"
        errors = last.errors.direct if own and last.errors is not None else self._self_only(last)
        return token_gram(
            self._recorder.linears, errors, last.batch.mask, score_bias=scorer.config.score_bias
        )

    def _last_call(self, asked: str) -> tuple[_Call, TokenValues]:
        if self._last is None:
            raise ModelError(
                f"{asked}() follows values()",
                why="it is about the tokens and weights of that call",
                remedy="call observed.values(...) first",
            )
        return self._last

    def _self_only(self, last: _Call) -> list[Tensor | None]:
        self._recorder.require_graph()
        require_self_rule(self._recorder, "interaction")
        with torch.enable_grad():
            weights = last.weights.token
            weighted = last.losses if weights is None else last.losses * weights
            loss = weighted.sum()
        if not loss.requires_grad:
            raise foreign_scores("a detached tensor")
        return self_only_errors(self._recorder, loss)


@dataclass(frozen=True)
class _Call:
    """What a ``values`` call was about."""

    batch: LabelledBatch
    losses: Tensor
    weights: Weights
    errors: TokenErrors | None
