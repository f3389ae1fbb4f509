"""Proofs that run on the user's own model before any value is returned.

*Coverage*: the captured uses of the scored weights explain autograd's gradient. *Isolation*: the
self-only backward leaks nothing to other positions. *Documents*: packed neighbours do not see each
other. *Causality* and *derivatives* have files of their own. Each raises, naming the place and an
estimator or input that does work.

They run on a slice of a batch (``model/batch_slice.py``), so that the first use of a scorer costs
little more than any later one. What a slice shows holds for every use of a weight, and for every
way between positions, that a few dozen neighbouring tokens bring about. It cannot show what only
longer or other input does: a weight that is used beyond some length, an expert to which none of
these tokens was sent, a module that mixes positions farther apart than the slice is long.
``Scorer.verify`` compares the values of whole batches with an oracle, and sees those as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from alphatoken.errors import CoverageError, ModelError, UnsupportedError
from alphatoken.estimate.causality import allowed_pairs, argument_kinds, prove_causality
from alphatoken.estimate.gradients import captured_gradients, gradient_of
from alphatoken.estimate.names import CAPTURED, SELF_ONLY, SPLIT, WALK
from alphatoken.estimate.padding import padded_on_the_left, see_left_padding
from alphatoken.model.backward import accumulate_errors
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.batch_slice import around_documents, around_responses, real_tokens
from alphatoken.model.capture import Recorder, record
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import Scope
from alphatoken.model.sharding import Sharding
from alphatoken.support.finite import refuse_first
from alphatoken.support.precision import float16_named

__all__ = [
    "CaptureCheck",
    "CoverageReport",
    "prove_coverage",
    "prove_documents",
    "prove_isolation",
    "require_covered",
    "require_self_rule",
]


def require_covered(scope: Scope, estimator: str, uncovered: str) -> None:
    """Raise unless the estimator sees every matrix of the scored layers, or may leave some out.

    Args:
        scope: what can be captured, and what cannot.
        estimator: its name; label values need no captured errors and cover everything.
        uncovered: "error", or "skip" to leave matrices out and say so in the report.

    Raises:
        CoverageError: naming the first matrix that is not covered, and why.
    """
    if estimator not in CAPTURED or not scope.uncovered or uncovered == "skip":
        return
    name, reason = next(iter(scope.uncovered.items()))
    raise CoverageError(
        f"'{estimator}' cannot cover every matrix of the scored layers",
        got=f"{name}: {reason} ({len(scope.uncovered)} such)",
        why="their part of the gradient would be missing from the values",
        remedy=", or ".join(_covering(scope)),
    )


def _covering(scope: Scope) -> list[str]:
    """Remedies for uncovered matrices: only those that work here."""
    reasons = scope.uncovered.values()
    experts = [why for why in reasons if "linears,experts" in why]
    routed = any("router" in why for why in reasons)
    slow = " and model.set_experts_implementation('eager')" if experts or routed else ""
    remedies = [f"estimator='label'{slow}"]
    if experts:
        rest = ", uncovered='skip' for the others" if len(experts) < len(reasons) else ""
        remedies.append(f"parameters='linears,experts'{rest}")
    if scope.linears:
        remedies.append("uncovered='skip' to leave them out and say so")
    return remedies


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


# What rounding explains in each dtype; a use that was missed is of the size of the gradient itself.
_COVERAGE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_COVERAGE_TOLERANCE_HALF = 2e-2
_FOLLOWED = "estimator='label', which follows the weight through every use"


def compare_gradients(
    captured: Mapping[str, tuple[Tensor, float]],
    expected: Mapping[str, Tensor | None],
    *,
    narrow: bool = False,
    remedy: str = _FOLLOWED,
) -> float:
    """Compare what the captured uses explain with autograd's gradient of the same loss.

    Args:
        captured: parameter name -> (sum over captured uses of delta (x) x, as stored; the sum of
            the norms of its terms). The error is relative to the latter, so that a gradient that
            cancels is no false alarm.
        expected: parameter name -> autograd's gradient (None: no path); all parameters in scope.
        narrow: autograd multiplied in 16 bits whatever the gradient's dtype says (autocast).
        remedy: what the error tells the user to do.

    Returns:
        The largest relative error (Frobenius norm).

    Raises:
        CoverageError: a parameter is used outside the captured modules; the message names it.
    """
    worst = 0.0
    for name, target in expected.items():
        explained, scale = captured.get(name, (None, 0.0))
        parts = [t.double() for t in (target, explained) if t is not None]
        if not parts:
            continue
        difference = parts[0] - parts[1] if len(parts) == 2 else parts[0]
        scale = max(scale, 0.0 if target is None else float(target.double().norm()))
        relative = float(difference.norm()) / scale if scale > 0 else float(difference.norm())
        own = torch.float32 if target is None else target.dtype
        dtype = torch.bfloat16 if narrow else own
        # ``not <=`` instead of ``>``: a NaN is refused as well.
        if not relative <= _COVERAGE_TOLERANCE.get(dtype, _COVERAGE_TOLERANCE_HALF):
            raise CoverageError(
                "a weight in scope is used in a way that was not captured",
                got=f"{name}: captured uses explain its gradient to a relative error of "
                f"{relative:.1e}",
                why="the part that passes through the other use would be missing from the values",
                remedy=remedy,
            )
        worst = max(worst, relative)
    return worst


def prove_coverage(
    recorder: Recorder,
    losses: Tensor,
    parameters: Mapping[str, Tensor],
    names: Mapping[str, str],
    *,
    remedy: str = _FOLLOWED,
) -> float:
    """Prove that the captured uses are all uses: sum of delta (x) x equals autograd's gradient.

    Args:
        recorder: one recorded forward.
        losses: its token losses; the graph stays.
        parameters: name -> parameter, everything in scope.
        names: place of a parameter -> its name; see ``columns.ColumnSums``.
        remedy: what the error tells the user to do.

    Returns:
        The largest relative error (Frobenius norm).

    Raises:
        CoverageError: a parameter is used outside the captured modules; the message names it.
    """
    with torch.enable_grad():
        loss = losses.sum()
    # Ordinary errors, whatever the estimator: only they sum to the gradient. What is proved holds
    # for the self-only ones too, since it is about where the weights are used.
    errors = accumulate_errors(recorder, loss, recorder.outputs, "ordinary")
    captured = {
        name: (gradient, float(torch.as_tensor(size).detach()))
        for name, gradient, size in captured_gradients(recorder, errors, names)
        if gradient is not None
    }
    gradients = gradient_of(loss, list(parameters.values()), retain_graph=True)
    narrow = any(use.s.dtype not in _COVERAGE_TOLERANCE for use in recorder.linears)
    expected = dict(zip(parameters, gradients, strict=True))
    return compare_gradients(captured, expected, narrow=narrow, remedy=remedy)


Forward = Callable[[Mapping[str, Any]], Tensor]
"""Inputs to logits."""


@contextmanager
def _as_scored(adapter: DecoderAdapter) -> Iterator[Forward]:
    """The adapter's forward, in evaluation mode."""
    with torch.no_grad(), evaluation_mode(adapter.model):
        yield adapter.forward


@contextmanager
def as_observed(adapter: DecoderAdapter) -> Iterator[Forward]:
    """The model as its user has called it: in its modes, with no argument but those given.

    A model that is left to keep a cache may read packed rows as one document, and one that
    trains may keep none. Each call draws the same random numbers, so that dropout moves nothing.
    """

    def forward(inputs: Mapping[str, Any]) -> Tensor:
        # Those of a loss are left out, and none is added, such as ``use_cache=False``.
        arguments = {k: v for k, v in adapter.arguments(inputs).items() if k in inputs}
        arguments |= {"use_cache": inputs["use_cache"]} if "use_cache" in inputs else {}
        torch.set_rng_state(drawn)
        for device, state in by_device.items():
            torch.cuda.set_rng_state(state, device)
        return adapter.logits_of(adapter.model(**arguments))

    devices = {p.device for p in adapter.model.parameters() if p.is_cuda}
    drawn, by_device = torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices}
    with torch.no_grad(), torch.random.fork_rng(list(devices)):
        yield forward


def prove_documents(
    adapter: DecoderAdapter,
    batch: LabelledBatch,
    *,
    running: Callable[[DecoderAdapter], AbstractContextManager[Forward]] = _as_scored,
) -> None:
    """Prove that packed documents do not see each other, by two forwards of the model.

    The second forward gets other tokens in all documents of a row but the last, whose logits must
    stay as they were.

    Args:
        adapter: of the model.
        batch: with several documents in a row.
        running: a context that gives the forward.

    Raises:
        ModelError: logits of a row's last document depend on the tokens before it.
        NumericalError: one of them is NaN.
    """
    starts = batch.document_starts
    assert starts is not None
    places = torch.arange(starts.shape[1], device=starts.device)
    last = torch.where(starts, places, 0).amax(-1, keepdim=True)  # where it begins
    ids = batch.inputs["input_ids"]
    # 0 becomes 1 and all else 0: every token changes, and stays within any vocabulary.
    other = torch.where(places < last, (ids == 0).to(ids), ids)
    with running(adapter) as forward:
        before = forward(batch.inputs).float()
        after = forward({**batch.inputs, "input_ids": other}).float()
    watched = (places >= last) & (last > 0) & real_tokens(batch)
    # Equal logits first: some models set unused ones to -inf, and the difference of two is NaN. A
    # NaN elsewhere, at padding say, is nobody's, and must not reach the maximum of its row.
    moved = (before - after).abs().masked_fill_(before == after, 0.0).amax(-1)
    moved = torch.where(watched, moved, 0.0)
    refuse_first(
        moved.isnan(),
        moved,
        "a logit of a packed row is not finite",
        why="whether it depends on the documents before it cannot be seen",
        remedy="look at the weights and at the precision of the forward",
    )
    # A kernel may sum in another order; a document that is seen moves logits by far more than this.
    size = before[watched]
    changed = moved.amax(-1) > 1e-4 * float(size[size.isfinite()].abs().max())
    if bool(changed.any()):
        row = int(changed.nonzero()[0])
        raise ModelError(
            "this model lets packed documents see each other",
            got=f"row {row}: logits from token {int(last[row])} on change with the documents "
            "before it",
            why="values of one document would depend on its neighbours, silently",
            remedy="call the model with use_cache=False; pass packed rows without an "
            "attention_mask, one document a row, or the boundary arguments (cu_seq_lens) that the "
            "model's kernels need",
        )


def boundary_arguments(batch: LabelledBatch) -> frozenset[str] | None:
    """The arguments of a packed batch, and how each mask among them separates its documents.

    Two batches for which this is equal are read alike by the model, so one proof serves both. The
    names of the arguments would not be enough, since a mask may separate the documents of one batch
    and not those of the next. The result is None if an argument cannot be judged, or separates
    only some of the documents; such a batch is proved by itself.
    """
    boundaries: set[str] = set()
    for name, value in batch.inputs.items():
        judged = _judged(value, batch) if "mask" in name else "given"
        if judged is None:
            return None
        boundaries.add(f"{name}: {judged}")
    return frozenset(boundaries)


def _judged(mask: object, batch: LabelledBatch) -> str | None:
    """Documents that a mask separates, or None if it separates only some or is unreadable.

    "none": there is no mask. "ones": it hides nothing but padding. "numbered": its numbers change
    where a document starts, and nowhere else. "blocked": a mask of pairs that allows none across
    documents.
    """
    starts, shape = batch.document_starts, batch.labels.shape
    assert starts is not None
    if mask is None:
        return "none"
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        real = real_tokens(batch)
        if bool((mask[real] == 1).all()):
            return "ones"
        separated = (mask[:, 1:] != mask[:, :-1]) == starts[:, 1:]
        return "numbered" if bool((separated | ~real[:, 1:]).all()) else None
    if mask.dim() != 4 or mask.shape[-2:] != (shape[1], shape[1]):
        return None
    document = starts.long().cumsum(-1)
    foreign = (document[:, :, None] != document[:, None, :])[:, None]
    return None if bool((allowed_pairs(mask) & foreign).any()) else "blocked"


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


_SHARDED = "no process has whole weights, so autograd's gradient of one cannot be compared"
_SHARDED_ALONE = "it needs forwards of its own, which the processes may not run together"


class CaptureCheck:
    """Runs each proof once, on the first recorded forward that can show it.

    ``Estimator.prepare`` shows it a slice of the first batch that M is built from, and under
    sharded weights that whole batch. Where there is none, or where it could not show everything,
    the first recording that is valued is looked at instead.

    Args:
        adapter: of the model.
        scope: what is captured.
        parameters: name -> parameter, everything in scope.
        names: place of a parameter -> its name.
        estimator: one that works on captured errors, "label", or "walk", which needs no proof.
        skipped: for the report.
        sharding: of the weights; where there is one, nothing but isolation is proved.

    Attributes:
        report: what was proved so far.
        pending: True until coverage, or of ``label`` the derivatives, were proved (or ruled out).
    """

    def __init__(
        self,
        adapter: DecoderAdapter,
        scope: Scope,
        parameters: Mapping[str, Tensor],
        names: Mapping[str, str],
        estimator: str,
        *,
        skipped: dict[str, str],
        sharding: Sharding | None,
    ) -> None:
        self._adapter, self._scope, self._estimator = adapter, scope, estimator
        self._parameters, self._names, self._sharding = parameters, names, sharding
        self._documents: set[frozenset[str]] = set()  # kinds of packed batches that were proved
        self._causal: set[frozenset[str]] = set()  # and kinds of arguments
        self._padding_seen = False  # whether one on the left was, which is warned of once
        self._version: int | None = None
        self._versions = 0
        self.pending = self._to_prove = estimator in CAPTURED or (
            estimator != WALK and sharding is None
        )
        self.report = CoverageReport(
            tuple(linear.name for linear in scope.linears),
            tuple(parameters),
            skipped,
            unproved={}
            if sharding is None
            else {
                "coverage": _SHARDED,
                "documents": _SHARDED_ALONE,
                "causality": _SHARDED_ALONE,
                "derivatives": _SHARDED,
            },
        )

    def take(self, report: CoverageReport) -> None:
        """Take over what another scorer of the same model proved of this estimator.

        Nothing is taken where this one captures a layer that the other did not.
        """
        if set(self.report.linears) <= set(report.linears):
            self.report = replace(
                self.report,
                relative_error=report.relative_error,
                isolated=report.isolated,
                derivatives=report.derivatives,
            )
            self.pending = False

    def see_version(self, version: int) -> None:
        """Ask for all proofs again at the 2nd, 4th, 8th, ... version of the weights.

        They are of the weights as they were: a branch behind a gate that opens in training, or
        behind matrices that begin at 0, had no part in the predictions that were looked at.

        Args:
            version: of the direction in use, which is built anew as the weights move.
        """
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
        return record(self._adapter, self._scope, attention=switched, sharding=self._sharding)

    def require_rule(self, recorder: Recorder) -> None:
        """Raise unless the recorded forward is one that the estimator is defined on."""
        recorder.require_graph()
        if self._estimator in SPLIT:
            require_self_rule(recorder, self._estimator)

    def see(self, recorder: Recorder, losses: Tensor, mask: Tensor) -> None:
        """Prove what is not proved yet on this forward; its graph stays.

        It is called before the first direction is built, with the forward of a slice, and with
        every pass that is valued, before the values are returned.

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
            proved = prove_isolation(recorder, losses, mask, self._estimator)
            self.report = replace(self.report, isolated=proved)
        if self.pending and self._sharding is None:
            with float16_named(self._adapter.model, (CoverageError,)):
                error = prove_coverage(recorder, losses, self._parameters, self._names)
            self.report = replace(self.report, relative_error=error)
        self.pending = False

    def derivatives_agree(self, relative: float, *, pending: bool = False) -> None:
        """Note that the derivative that is taken was shown to agree with autograd.

        Args:
            relative: by how much the two differ.
            pending: there was no M to look along, and the proof is to be taken again.
        """
        self.report = replace(self.report, derivatives=relative)
        self.pending = pending

    def see_arguments(self, batch: LabelledBatch, *, observed: bool = False) -> None:
        """Refuse a batch of which a prediction sees later tokens, or another document.

        Forwards of its own are run for kinds of arguments that were not met yet; for documents as
        the user has called the model, where that is what is ``observed``.

        Raises:
            ModelError: see ``causality`` and ``prove_documents``.
        """
        if self._sharding is not None:
            return
        kinds = argument_kinds(batch)
        if kinds is None or kinds not in self._causal:
            proved = prove_causality(self._adapter, around_responses(batch))
            if proved and kinds is not None:
                self._causal.add(kinds)
        if batch.document_starts is not None:
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
            prove_documents(self._adapter, piece, running=as_observed if observed else _as_scored)
        if arguments is not None:
            self._documents.add(arguments)
