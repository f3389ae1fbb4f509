"""The scorer: model, validation and retention in; one value a response token out."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from alphatoken.errors import InputError
from alphatoken.estimators import SELF_ONLY, SPLIT, SWITCHED, TokenErrors, token_errors
from alphatoken.forward_mode import label_values
from alphatoken.objective import forward_losses, scoring_forward
from alphatoken.proofs import (
    prove_coverage,
    prove_documents,
    prove_isolation,
    require_self_rule,
)
from alphatoken.readout import Columns, assign_columns, combine, contract_columns
from alphatoken.target import Target
from alphatoken.values import TokenValues

if TYPE_CHECKING:
    from alphatoken.fidelity.certificate import Certificate

__all__ = ["AlphaTokenWarning", "CoverageReport", "Observed", "Scorer"]


class AlphaTokenWarning(UserWarning):
    """Something is legal but probably not meant; the message says what to look at."""


@dataclass(frozen=True)
class CoverageReport:
    """What is in scope and how it was proved.

    Attributes:
        linears: names of the scored linears.
        parameters: names of all parameters that the values are inner products over.
        skipped: matrices of the scored layers left out of scope, and why.
        relative_error: largest relative difference between the gradients that the captured uses
            explain and autograd's, on the first validation batch; None for ``label``.
        isolated: True once the self-only backward was proved to leak nothing to other positions,
            False while no batch was long enough to show it; None where nothing was tried yet or
            the estimator does not need it.
    """

    linears: tuple[str, ...]
    parameters: tuple[str, ...]
    skipped: dict[str, str]
    relative_error: float | None = None
    isolated: bool | None = None


class Scorer:
    """Values the response tokens of a batch against a validation objective and a retention term.

        value of token k  =  <gradient (as the estimator defines it), M>,   M = P o (G + lambda V)

    Args:
        model: a decoder; a transformers model, plain or under PEFT, is recognised.
        validation: a labelled batch or several (J_tgt is the mean token loss over all their
            response tokens; they are streamed), or preference pairs (``PreferenceBatch``).
        retention: a ``FisherDrift``; or labelled retention batches, whose mean-loss gradient then
            is V; or None, adaptation only.
        config: what to compute.
        optimizer: for ``preconditioner="frozen"``.
        adapter: if the model's own adapter is not to be looked up.

    Attributes:
        config: the options.
        coverage: what is in scope, and the proofs; filled at the first use.

    Own forwards run in evaluation mode (dropout off). Model, gradients, hooks, modes and RNG
    state are afterwards as before, also after an exception. G and V are rebuilt when a parameter
    has changed (in-place version counters; writing through ``.data`` does not count, call
    ``refresh()`` then).

    Raises:
        ConfigError, CoverageError, UnsupportedError, FisherError, InputError, NumericalError,
        ModelError: see each class; raised before any value is returned.
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Mapping[str, Any] | PreferenceBatch | Sequence[Any],
        retention: FisherDrift | Mapping[str, Any] | Sequence[Any] | None = None,
        config: ScorerConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        adapter: DecoderAdapter | None = None,
    ) -> None:
        self.config = config or ScorerConfig()
        self.adapter = adapter or find_adapter(model)
        self.validation = as_batches(validation)
        self.target = Target(self.adapter, self.validation, retention, self.config, optimizer)
        scope = self.target.scope
        self.coverage = CoverageReport(
            tuple(linear.name for linear in scope.linears),
            tuple(self.target.parameters),
            scope.uncovered if self.config.uncovered == "skip" else {},
        )
        self._proved = self._warned = False
        self._documents_proved: set[frozenset[str]] = set()

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
        """M's two sides at the current parameters, in projected form."""
        return self.target.direction()

    def refresh(self) -> None:
        """Drop G and V; the next use builds them anew."""
        self.target.invalidate()

    # --- proofs --------------------------------------------------------------------------------

    def _prepare(self, tokens: int | None) -> None:
        self.target.require_gradients()
        if not self._proved:
            self._prove()
        self.target.prepare(tokens)

    def _prove(self) -> None:
        """Coverage and isolation, on the first validation batch; raises or fills ``coverage``."""
        if self.target.captured:
            item = self.validation[0]
            plain = item.chosen if isinstance(item, PreferenceBatch) else item
            limit, role = self.adapter.max_positions(), "validation batch"
            batch = read_batch(plain, max_length=limit, role=role)
            with self._recording() as recorder:
                with scoring_forward(self.adapter, self.target.first):
                    losses = forward_losses(self.adapter, batch, role)
                self._require_rule(recorder)
                self._prove_isolation(recorder, losses, batch.mask)
                error = prove_coverage(recorder, losses, self.parameters)
            self.coverage = replace(self.coverage, relative_error=error)
        self._proved = True

    def _prove_isolation(self, recorder: Recorder, losses: Tensor, mask: Tensor) -> None:
        """Prove it once, on the first batch long enough to show a leak."""
        if self._self_only and not self.coverage.isolated:
            proved = prove_isolation(recorder, losses, mask, self.config.estimator)
            self.coverage = replace(self.coverage, isolated=proved)

    @property
    def _self_only(self) -> bool:
        return self.config.estimator in SELF_ONLY

    @property
    def _switched(self) -> bool:
        return self.config.estimator in SWITCHED

    def _require_rule(self, recorder: Recorder) -> None:
        recorder.require_graph()
        if self._switched:
            require_self_rule(recorder, self.config.estimator)

    def _prove_documents(self, batch: LabelledBatch) -> None:
        """Refuse packed batches on a model that lets one document see another."""
        # Whether boundaries hold depends on the arguments: a mask of ones takes them away again.
        arguments = frozenset(batch.inputs)
        if batch.document_starts is not None and arguments not in self._documents_proved:
            prove_documents(self.adapter, batch)
            self._documents_proved.add(arguments)

    # --- values --------------------------------------------------------------------------------

    def score(self, batch: Mapping[str, Any]) -> TokenValues:
        """Value every response token of ``batch`` with a forward of its own (dropout off).

        Args:
            batch: ``input_ids``, ``labels`` and whatever else the model's forward takes.

        Returns:
            ``TokenValues``; index i of each tensor is the value of predicting token i.
        """
        checked = read_batch(batch, max_length=self.adapter.max_positions())
        self._prove_documents(checked)
        self._prepare(checked.labels.numel())
        if not self.target.captured:
            return self._label(checked, None)
        with self._recording() as recorder:
            with scoring_forward(self.adapter, self.target.first):
                losses = forward_losses(self.adapter, checked, "batch")
            return self._captured_values(recorder, losses, checked.mask, None)

    @contextmanager
    def observe(self) -> Iterator[Observed]:
        """Watch the forward that training runs anyway, so that it serves scoring as well.

        Inside the context call the model, then ``observed.values(logits, labels)``; the loss may
        be sent back through the same graph, inside or after the context. Values see the pass as
        it is, its dropout masks included. ``label`` needs a dual forward of its own (dropout
        off), run from the observed arguments. Only the last forward with gradients is kept.
        """
        self._prepare(tokens=None)
        with self._recording() as recorder:
            yield Observed(self, recorder)

    @contextmanager
    def _recording(self) -> Iterator[Recorder]:
        with record(self.adapter, self.scope, attention=self._switched) as recorder:
            yield recorder

    def _captured_values(
        self, recorder: Recorder, losses: Tensor, mask: Tensor, weights: Tensor | None
    ) -> TokenValues:
        errors = self._errors(recorder, losses, weights)
        self._prove_isolation(recorder, losses, mask)
        target = self.target
        adaptation = contract_columns(
            recorder, errors, target.adaptation, target.names, target.factors
        )
        stability = None
        if target.stability is not None:
            stability = contract_columns(recorder, errors, target.stability, target.names)
        position = self.config.causal_position
        return self._finish(
            assign_columns(adaptation, mask, position),
            None if stability is None else assign_columns(stability, mask, position),
            mask,
        )

    def _errors(self, recorder: Recorder, losses: Tensor, weights: Tensor | None) -> TokenErrors:
        self._require_rule(recorder)
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
            )
        if errors is None or all(error is None for error in errors.direct):
            raise InputError(
                "the scores do not belong to the observed forward",
                got="a detached tensor" if errors is None else "the graph of another forward",
                why="no error would reach a scored linear, and every value would be zero",
                remedy="pass the logits that the model returned inside the context, undetached",
            )
        return errors

    def columns(self, batch: LabelledBatch, *, weights: Tensor | None = None) -> Columns:
        """Columns by position of use for the total direction M, with weighted losses.

        For diagnostics; needs a captured estimator (label has rows, no columns).
        """
        direction = self.direction.total()
        with self._recording() as recorder:
            with scoring_forward(self.adapter, self.target.first):
                losses = forward_losses(self.adapter, batch, "batch")
            errors = self._errors(recorder, losses, weights)
            return contract_columns(recorder, errors, direction, self.target.names)

    def _label(self, batch: LabelledBatch, weights: Tensor | None) -> TokenValues:
        first = self.target.first or 0
        sides: list[tuple[Tensor, Tensor, Tensor] | None] = []
        for side in (self.target.adaptation, self.target.stability):
            if side is None:
                sides.append(None)
                continue
            values = label_values(self.adapter, batch, side, first=first)
            if weights is not None:
                values = values * weights.to(values)
            none = torch.zeros_like(values)
            sides.append((values, none, torch.zeros_like(values[:, 0])))
        assert sides[0] is not None
        return self._finish(sides[0], sides[1], batch.mask)

    def _finish(
        self,
        adaptation: tuple[Tensor, Tensor, Tensor],
        stability: tuple[Tensor, Tensor, Tensor] | None,
        mask: Tensor,
    ) -> TokenValues:
        values = combine(
            adaptation,
            stability,
            mask=mask,
            split=self.config.estimator in SPLIT,
            estimator=self.config.estimator,
            stability_weight=self.config.stability_weight,
            balance=self.target.balance,
        )
        if stability is not None and not self._warned:
            self._warn_if_one_sided(values)
        return values

    def _warn_if_one_sided(self, values: TokenValues) -> None:
        shares = values.shares()
        stability = sum(v for k, v in shares.items() if k.startswith("stability"))
        if 0 < stability < 0.001 or stability > 0.999:
            side = "stability" if stability > 0.5 else "adaptation"
            self._warned = True
            warnings.warn(
                f"The {side} side alone decides the ranking (share of stability "
                f"{stability:.2e}): lambda has no natural unit. Look at values.balance and set "
                "stability_weight accordingly.",
                AlphaTokenWarning,
                stacklevel=4,
            )

    def verify(self, batch: Mapping[str, Any], tokens: int = 8, *, seed: int = 0) -> Certificate:
        """Certify the values on the user's own model and batch; see ``fidelity.certificate``.

        Args:
            batch: a labelled batch.
            tokens: response tokens sampled for the per-token oracle (one backward each).
            seed: of that sample.
        """
        module = importlib.import_module("alphatoken.fidelity.certificate")
        certificate: Certificate = module.certify(self, batch, tokens=tokens, seed=seed)
        return certificate


class Observed:
    """Handle on the forward seen by ``Scorer.observe``."""

    def __init__(self, scorer: Scorer, recorder: Recorder) -> None:
        self._scorer, self._recorder = scorer, recorder

    def values(
        self, scores: Tensor, labels: Tensor, *, token_weights: Tensor | None = None
    ) -> TokenValues:
        """Values of the observed forward; its graph, and every .grad, stay as they are.

        Args:
            scores: logits (b, t, vocabulary) of that forward, or token log-probabilities (b, t)
                or (b, t - 1), attached to its graph.
            labels: unshifted labels, -100 ignored.
            token_weights: (b, t) factor on each token's loss at index i, taken as constant;
                ``+omega`` on chosen and ``-omega`` on rejected rows under DPO.

        Raises:
            ModelError: no forward with gradients was seen. InputError, NumericalError: as
                ``Scorer.score``.
        """
        scorer, recorder = self._scorer, self._recorder
        call = recorder.call
        if call is None:
            recorder.require_graph()
        inputs = {} if call is None else dict(call[1])
        if call is not None and call[0]:
            inputs["input_ids"] = call[0][0]
        batch = read_batch(
            {**inputs, "input_ids": inputs.get("input_ids", labels), "labels": labels}
        )
        scorer._prove_documents(batch)
        weights = None if token_weights is None else token_weights.detach()
        if not scorer.target.captured:
            return scorer._label(batch, weights)
        losses = token_losses(scores, labels)
        require_finite(losses, batch.mask, "batch")
        return scorer._captured_values(recorder, losses, batch.mask, weights)
