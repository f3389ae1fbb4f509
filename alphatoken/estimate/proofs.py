"""Proofs that run on the user's own model before any value is returned.

*Coverage* (``direction.gradients``): the captured uses of the scored weights explain autograd's
gradient. *Isolation*: the self-only backward leaks nothing to other positions. *Causality* and
*documents* (``batch_proofs``): no prediction sees its own token, nor a packed neighbour.
*Derivatives* (``derivatives``): what ``label`` differentiates is the trained loss. Each raises,
naming the place and an estimator or input that does work.

They run on a slice of a batch (``model/batch_slice.py``), so that the first use of a scorer costs
little more than any later one. What a slice shows holds for every use of a weight, and for every
way between positions, that a few dozen neighbouring tokens bring about. It cannot show what only
longer or other input does: a weight that is used beyond some length, an expert to which none of
these tokens was sent, a module that mixes positions farther apart than the slice is long.
``Scorer.verify`` compares the values of whole batches with an oracle, and sees those as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from alphatoken.config import SELF_ONLY, SPLIT, WALK, ScorerConfig
from alphatoken.direction.gradients import prove_coverage
from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import CoverageError, ModelError, UnsupportedError
from alphatoken.estimate.batch_proofs import (
    argument_kinds,
    as_observed,
    as_scored,
    boundary_arguments,
    padded_on_the_left,
    prove_causality,
    prove_documents,
    see_left_padding,
)
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.batch_slice import around_documents, around_responses
from alphatoken.model.capture import Recorder, accumulate_errors, record
from alphatoken.model.protocol import DecoderAdapter, adapter_named
from alphatoken.support.precision import float16_named


def require_self_rule(recorder: Recorder, estimator: str) -> None:
    """Raise unless every layer from the first scored one on has a self-only backward.

    Raises:
        UnsupportedError: a mixer that is neither softmax attention nor a gated delta net, or one of
            those whose call was not seen; keys or states of a cache; active attention dropout,
            which the recomputed weights would not contain.
    """
    scope = recorder.scope
    remedy = "estimator='label' (exact on every layer type) or 'path'"
    if scope.mixers:
        name, kind = next(iter(scope.mixers.items()))
        raise UnsupportedError(
            f"'{estimator}' is defined on attention and gated delta nets only",
            got=f"{name} ({kind})",
            why="its self-only backward has no rule here, and an approximation would be silent",
            remedy=remedy,
        )
    if not recorder.attention_seen:
        raise UnsupportedError(
            f"'{estimator}' saw no attention call in at least one of the scored layers",
            why="the model's attention does not go through the adapter's dispatch",
            remedy=remedy + ", or another attention implementation; a function that was put into "
            "transformers' attention registry meanwhile must call the one that it found there; a "
            "gated delta net must call its convolution and its rule by name, not as one kernel",
        )
    if recorder.latest is not None and recorder.latest.cached:
        raise UnsupportedError(
            f"'{estimator}' cannot value a pass that goes on from a cache: more keys than queries, "
            "or a state to begin with",
            got="keys or states of a cache",
            why="they belong to positions that the pass did not run, so that its self-only "
            "backward would be the ordinary one, silently",
            remedy="run the whole sequence in one forward, without a cache",
        )
    # Weights recomputed without the dropout mask would not be those of the pass.
    dropped = [use for use in recorder.attentions if use.dropout > 0]
    if dropped:
        raise UnsupportedError(
            f"'{estimator}' cannot score a pass with attention dropout",
            got=f"p={dropped[0].dropout}",
            why="the kernel's dropout mask is not known to the recomputed attention weights",
            remedy="set the attention dropout to 0; or estimator='path'; or score without dropout "
            "in a forward of its own: scorer.score, in a trainer scoring_forward='own'",
        )


def prove_isolation(recorder: Recorder, losses: Tensor, mask: Tensor, estimator: str) -> bool:
    """Prove that the self-only backward leaks no error to other positions.

    The loss of the last response token of each row is sent back by itself. Every captured error
    away from the position that predicts it must be exactly zero: the paths to other positions are
    cut, so that not even rounding may remain. The last token is the one to try, because all
    earlier positions can be reached from it.

    Returns:
        False if nothing was proved, because each of those tokens is predicted from the first
        position of its row, and there is no earlier one to leak to.

    Raises:
        UnsupportedError: a module mixes positions outside the attention that was switched.
    """
    rows = mask.any(-1).nonzero().squeeze(-1)
    # Rows without a response token are left out; they may be in a batch of several.
    last = (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)[rows]
    if not bool((last > 1).any()):
        return False
    # All rows at once: rows do not see each other, so one backward proves each of them.
    with torch.enable_grad():
        loss = losses[rows, last].sum()
    errors = accumulate_errors(recorder, loss, recorder.outputs, "self")
    for use, error in zip(recorder.linears, errors, strict=True):
        if error is None:  # the loss does not reach this use, so nothing leaks to it
            continue
        elsewhere = error.detach().clone()
        elsewhere[rows, last - 1] = 0
        if bool((elsewhere != 0).any()):
            raise UnsupportedError(
                f"'{estimator}' is not defined on this model: positions mix outside attention",
                got=f"the error of one token reaches other positions at {use.linear.name}",
                why="a direct value would contain part of the causal one, silently",
                remedy="estimator='label' or 'path', which are exact for every module type",
            )
    return True


@dataclass(frozen=True)
class CoverageReport:
    """The parameters in scope, and the proofs of their coverage.

    Attributes:
        linears: names of the scored linears.
        parameters: names of all parameters that the values are inner products over.
        skipped: matrices of the scored layers left out of scope, and why.
        relative_error: largest relative difference between the gradients that the captured uses
            explain and autograd's, on the first batch; None for ``label``.
        isolated: True once the self-only backward was proved to leak nothing to other positions,
            False while no batch was long enough to show it; None where nothing was tried yet or
            the estimator does not need it.
        derivatives: of ``label``, the relative difference between the derivative that is taken and
            autograd's on the first batch; None otherwise.
        unproved: proofs that cannot run here, and why.
    """

    linears: tuple[str, ...]
    parameters: tuple[str, ...]
    skipped: dict[str, str]
    relative_error: float | None = None
    isolated: bool | None = None
    derivatives: float | None = None
    unproved: dict[str, str] = field(default_factory=dict)


_WHOLE = "no process has whole weights, so autograd's gradient of one cannot be compared"
_ALONE = "it needs forwards of its own, which the processes may not run together"
_UNPROVED = {"coverage": _WHOLE, "documents": _ALONE, "causality": _ALONE, "derivatives": _WHOLE}
"""Under sharded weights nothing but isolation is proved."""


class CaptureCheck:
    """Runs each proof once, on the first recorded forward that can show it.

    ``Estimator.prepare`` shows it a slice of the first batch that M is built from, and under
    sharded weights that whole batch. Where there is none, or where it could not show everything,
    the first recording that is valued is looked at instead.

    Attributes:
        report: what was proved so far.
        pending: True until coverage, or of ``label`` the derivatives, were proved (or ruled out).
    """

    def __init__(
        self,
        adapter: DecoderAdapter,
        scored: ScoredParameters,
        config: ScorerConfig,
    ) -> None:
        self._adapter, self._scored, self._estimator = adapter, scored, config.estimator
        # Errors at its linears are asked for by estimators that capture, and by "full" P.
        self._capturing = config.captured or config.preconditioner == "full"
        sharded = scored.sharding is not None
        self._documents: set[frozenset[str]] = set()  # kinds of packed batches that were proved
        self._causal: set[frozenset[str]] = set()  # and kinds of arguments
        self._padding_seen = False  # whether one on the left was, which is warned of once
        self._version: int | None = None
        self._versions = 0
        self.pending = self._to_prove = config.captured or (
            config.estimator != WALK and not sharded
        )
        self.report = CoverageReport(
            tuple(linear.name for linear in scored.scope.linears),
            tuple(scored.parameters),
            skipped=scored.scope.uncovered if config.uncovered == "skip" else {},
            unproved=dict(_UNPROVED) if sharded else {},
        )

    def take(self, report: CoverageReport) -> None:
        """Take over what another scorer of the same model proved of this estimator."""
        # Nothing, where this one captures a layer that the other did not.
        if set(self.report.linears) <= set(report.linears):
            self.report = replace(
                self.report,
                relative_error=report.relative_error,
                isolated=report.isolated,
                derivatives=report.derivatives,
            )
            self.pending = False

    def see_version(self, version: int) -> None:
        """Ask for all proofs again at the 2nd, 4th, 8th, ... version of the direction."""
        # They are of the weights as they were: a branch behind a gate that opens in training, or
        # behind matrices that begin at 0, had no part in the predictions that were looked at.
        if version == self._version:
            return
        self._version = version
        self._versions += 1
        if self._versions > 1 and self._versions.bit_count() == 1:
            self.pending = self._to_prove
            self._documents.clear()
            self._causal.clear()
            self.report = replace(self.report, isolated=None)

    def recording(self) -> AbstractContextManager[Recorder]:
        """Record a forward with all that the estimator needs."""
        switched = self._estimator in SPLIT
        return record(
            self._adapter,
            self._scored.scope,
            attention=switched,
            capturing=self._capturing,
            sharding=self._scored.sharding,
        )

    def require_rule(self, recorder: Recorder) -> None:
        """Raise unless the recorded forward is one that the estimator is defined on."""
        with adapter_named(self._adapter):
            recorder.require_graph()
            if self._estimator in SPLIT:
                require_self_rule(recorder, self._estimator)

    def see(self, recorder: Recorder, losses: Tensor, mask: Tensor) -> None:
        """Prove what is not proved yet on this forward; its graph stays.

        Raises:
            ModelError, UnsupportedError, CoverageError: see the proofs.
        """
        self.require_rule(recorder)
        run = recorder.linears[0].x.shape[:2]
        if run != mask.shape:
            raise ModelError(
                "the decoder does not run on the batch's tokens alone",
                got=f"{tuple(run)} positions for labels of {tuple(mask.shape)}",
                why="positions that the model adds (a learnt prompt) would be taken for tokens",
                remedy="estimator='label', where the logits are of the tokens; or a model without "
                "positions of its own",
            )
        # Tried again as long as no batch had a row of which it could be shown.
        if self._estimator in SELF_ONLY and not self.report.isolated:
            with adapter_named(self._adapter):
                proved = prove_isolation(recorder, losses, mask, self._estimator)
            self.report = replace(self.report, isolated=proved)
        if self.pending and self._scored.sharding is None:
            kinds = (CoverageError,)
            with float16_named(self._adapter.model, kinds), adapter_named(self._adapter):
                error = prove_coverage(
                    recorder, losses, self._scored.parameters, self._scored.names
                )
            self.report = replace(self.report, relative_error=error)
        self.pending = False

    def derivatives_agree(self, relative: float, *, pending: bool = False) -> None:
        """Note by how much the derivative differs from autograd; ``pending``: prove it again."""
        self.report = replace(self.report, derivatives=relative)
        self.pending = pending

    def see_arguments(self, batch: LabelledBatch, *, observed: bool = False) -> None:
        """Refuse a batch of which a prediction sees later tokens, or another document.

        Kinds of arguments that are new are tried by forwards of our own; ``observed``: for
        documents in the way that the user has called the model.

        Raises:
            ModelError: see ``prove_causality`` and ``prove_documents``.
        """
        if self._scored.sharding is not None:
            return
        kinds = argument_kinds(batch)
        if kinds is None or kinds not in self._causal:
            with adapter_named(self._adapter):
                proved = prove_causality(self._adapter, around_responses(batch))
            if proved and kinds is not None:
                self._causal.add(kinds)
        if batch.document_starts is not None:
            with adapter_named(self._adapter):
                self._see_documents(batch, observed=observed)
        if not self._padding_seen and (row := padded_on_the_left(batch)) is not None:
            self._padding_seen = True
            see_left_padding(self._adapter, batch, row)

    def _see_documents(self, batch: LabelledBatch, *, observed: bool) -> None:
        arguments = boundary_arguments(batch)
        if observed and arguments is not None:
            # A forward of its own is another one than the user's, and so is training than testing.
            model = self._adapter.model
            modes = {f"mode {m.training}" for m in model.modules()}
            arguments |= {"observed", f"cache {batch.inputs.get('use_cache')}", *modes}
        if arguments is None or arguments not in self._documents:
            # Its masks were judged on the whole batch. Where they cannot be, the batch is proved
            # as a whole, since they may separate some of its documents and not others.
            piece = batch if arguments is None else around_documents(batch)
            prove_documents(self._adapter, piece, running=as_observed if observed else as_scored)
        if arguments is not None:
            self._documents.add(arguments)
