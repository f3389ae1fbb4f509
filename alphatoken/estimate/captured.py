"""``Captured``: values by contraction of errors at the scored linears with M.

    v_k  =  sum over uses at positions assigned to k of  delta^T M x

Inputs x and errors delta are captured, and no gradient of a token is formed. One backward of the
recorded forward gives the errors, split into a *direct* and a *causal* part as the estimator
defines them. With Psi[k, t] the influence of the use of weights at position t on the loss at k:

    direct          diagonal                                   exact
    alphatoken      diagonal + Value-Propagation               the paper; causal part approximate
    path            column sums                                exact, all hops
    paper_literal   column sums + Value-Propagation of the     counts the causal path twice
                    aggregated errors, head-mean alpha

``label`` takes row sums of Psi, by derivatives; ``walk`` takes no gradient of a token at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from alphatoken.config import CAPTURED
from alphatoken.direction import contraction
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import require_gradients
from alphatoken.direction.gradients import uses_by_weight
from alphatoken.errors import InputError, NumericalError
from alphatoken.estimate.estimator import Estimator, Recording, Side, foreign_scores
from alphatoken.estimate.token_values import DirectCausal
from alphatoken.model.attention import AttentionUse
from alphatoken.model.batch import LabelledBatch, to_token_index
from alphatoken.model.capture import Recorder, accumulate_errors, stream_errors
from alphatoken.model.delta_rule import DeltaUse
from alphatoken.support.precision import full_precision, wide
from alphatoken.values import TokenValues

Consume = Callable[[str, int, Tensor], None]
"""Takes ("direct" or "causal", index in ``recorder.linears``, error (b, t, d_out))."""


@dataclass(frozen=True)
class TokenErrors:
    """Errors (b, t, d_out), in lists parallel to ``recorder.linears``; None where a part is zero.

    The lists are empty where the errors were handed over one by one. ``reached`` is False if the
    loss reaches nothing that was recorded: it belongs to another graph.
    """

    direct: list[Tensor | None]
    causal: list[Tensor | None]
    reached: bool = True


def token_errors(
    recorder: Recorder,
    loss: Tensor,
    estimator: str,
    *,
    window: int | None,
    part: str = "both",
    consume: Consume | None = None,
) -> TokenErrors:
    """Errors of the weighted loss sum, split as ``estimator`` defines.

    Args:
        recorder: one recorded forward.
        loss: scalar, sum of (weighted) token losses of that forward.
        estimator: one of ``CAPTURED``.
        window: W of Value-Propagation; None for no limit.
        part: "both", "direct" or "causal"; the other part is neither computed nor returned.
        consume: gets each error as soon as it is there, and none is kept: the direct ones inside
            the backward, the causal ones after it.
    """
    rule = CAPTURED[estimator]
    # Where no causal part is wanted, one backward down to the linears is all.
    if not rule.propagation or part == "direct":
        return _undivided(recorder, loss, rule.backward, consume)
    # The errors e_k at the head outputs that Value-Propagation starts from are self-only ones:
    # ordinary errors contain what later losses sent to position k, and propagating them counts that
    # twice. paper_literal does so on purpose, as a literal reading of the paper does.
    scored = scored_attentions(recorder)
    outputs = [attention.output for attention in scored]
    if part == "causal":
        heads = accumulate_errors(recorder, loss, outputs, rule.backward)
        direct: list[Tensor | None] = [None] * len(recorder.linears)
        reached = any(error is not None for error in heads)
    else:
        # One backward gives the errors at the linears and at the head outputs on the same way.
        direct, heads, reached = _at(recorder, loss, rule.backward, consume, outputs)
    causal: list[Tensor | None] = [None] * len(recorder.linears)
    for attention, error in zip(scored, heads, strict=True):
        if error is None:
            continue
        start, at_start = attention.propagated(error, window, head_mean=rule.propagation == "mean")
        # An error at the value states (of a delta net: at its convolution's input). Autograd
        # carries it to the linears that made them, through whatever the model puts in between: the
        # slice of a fused projection, LoRA factors, a value norm.
        for index, propagated in pull_back(recorder, attention, start, at_start).items():
            if consume is None:
                causal[index] = propagated
            else:
                consume("causal", index, propagated)
    return TokenErrors([], [], reached) if consume else TokenErrors(direct, causal, reached)


def _at(
    recorder: Recorder,
    loss: Tensor,
    mode: str,
    consume: Consume | None,
    also: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], list[Tensor | None], bool]:
    """Errors at the linears (none with ``consume``), at ``also``, and whether any was reached."""
    if consume is not None:
        return [], *stream_errors(recorder, loss, mode, partial(consume, "direct"), also)
    uses = len(recorder.linears)
    errors = accumulate_errors(recorder, loss, [*recorder.outputs, *also], mode)
    return errors[:uses], errors[uses:], any(error is not None for error in errors)


def _undivided(recorder: Recorder, loss: Tensor, mode: str, consume: Consume | None) -> TokenErrors:
    errors, _, reached = _at(recorder, loss, mode, consume)
    return TokenErrors(errors, [None] * len(errors), reached)


def scored_attentions(recorder: Recorder) -> list[AttentionUse | DeltaUse]:
    """Calls of attention and of delta rules in block executions with at least one scored linear."""
    executions = {use.execution for use in recorder.linears}
    return [a for a in recorder.attentions if a.execution in executions]


def pull_back(
    recorder: Recorder, attention: AttentionUse | DeltaUse, outputs: Tensor, error: Tensor
) -> dict[int, Tensor]:
    """Send an error at ``outputs``, of its shape, back to the linears of the call's own block.

    Returns:
        Index in ``recorder.linears`` -> error (b, t, d_out), of the linears that lead to
        ``outputs``: most (the output projection, the MLP) come after the attention.
    """
    # A causal part is hops within one layer. Without this limit the backward would go on from the
    # value states into the layers below.
    targets = {
        index: use.s
        for index, use in enumerate(recorder.linears)
        if use.execution == attention.execution
    }
    if not targets or not outputs.requires_grad:  # as with adapters on the query projection only
        return {}
    with recorder.repeatable(attention.module):
        errors = torch.autograd.grad(
            outputs, list(targets.values()), error, retain_graph=True, allow_unused=True
        )
    return {i: e for i, e in zip(targets, errors, strict=True) if e is not None}


Columns = tuple[Tensor, Tensor]
"""Values by position of use (b, t): the direct and the causal columns for one side of M."""


class ColumnSums:
    """Contracts errors one by one with each side of M, in whatever order they come.

    Args:
        recorder: the recorded forward.
        sides: of M, each by parameter name.
        names: place of a parameter (``weight_name`` of a linear) -> its name among the parameters
            in scope; tied places have one name.

    Attributes:
        by_use: of each side, the values (b, t) of each use by ("direct" or "causal", its index).
    """

    # Parameters are looked up by the names of their places, never by identity: where weights are
    # sharded, a module holds another object inside a forward than outside.

    def __init__(
        self,
        recorder: Recorder,
        sides: Sequence[Mapping[str, Tensor]],
        names: Mapping[str, str],
    ) -> None:
        self._recorder, self._sides, self._names = recorder, sides, names
        # Floating-point sums depend on their order, which is the backward's here and the scope's in
        # ``contract_columns``. So each use's values are kept, and summed in the scope's order.
        self.by_use: list[dict[tuple[str, int], Tensor]] = [{} for _ in sides]

    # Hooks call this inside the backward, where the user's autocast may be on.
    @full_precision
    def add(self, part: str, index: int, error: Tensor) -> None:
        """Contract the ("direct" or "causal") error of one use."""
        for side, by_use in zip(self._sides, self.by_use, strict=True):
            name = self._names[self._recorder.linears[index].linear.weight_name]
            by_use[part, index] = self.contract(index, error, side[name])

    def contract(self, index: int, error: Tensor, whole: Tensor) -> Tensor:
        """The values (b, t) of one use; ``whole`` is its matrix of one side."""
        use = self._recorder.linears[index]
        # M has the stored layout, while the contraction wants (d_out, d_in).
        m = whole.mT if use.linear.transposed else whole
        if use.experts is not None:
            return contraction.contract_experts(error, use.x, use.experts, m)
        return contraction.contract(error, use.x, m)

    def columns(self) -> list[Columns]:
        """The sums over all uses, for each side."""
        order = [i for _, uses in uses_by_weight(self._recorder, self._names) for i in uses]
        like, sums = self._recorder.linears[0].x, []
        for by_use in self.by_use:
            dtype = wide(*(value.dtype for value in by_use.values()))
            zero = torch.zeros(like.shape[:2], dtype=dtype, device=like.device)
            parts = {}
            for part in ("direct", "causal"):  # one that was not computed is zero
                values = [by_use[part, i] for i in order if (part, i) in by_use]
                parts[part] = reduce(torch.add, values).to(dtype) if values else zero
            sums.append((parts["direct"], parts["causal"]))
        return sums


@full_precision
def contract_columns(
    recorder: Recorder,
    errors: TokenErrors,
    sides: Sequence[Mapping[str, Tensor]],
    names: Mapping[str, str],
    gather: Callable[[str, Tensor], Tensor] | None = None,
) -> list[Columns]:
    """Columns for each side of M of errors that were kept; of others see ``ColumnSums``.

    Args:
        recorder: the recorded forward.
        errors: direct and causal errors at its linear uses.
        sides: as in ``ColumnSums``.
        names: as in ``ColumnSums``.
        gather: (parameter name, this process's part of its matrix) to the whole; None where every
            process has all of M. Collective: parameters are taken in the scope's order, the same
            on every process, and each matrix is gathered once and let go of.
    """
    parts = {"direct": errors.direct, "causal": errors.causal}
    sums = ColumnSums(recorder, sides, names)
    for name, uses in uses_by_weight(recorder, names):
        for side, by_use in zip(sides, sums.by_use, strict=True):
            whole = side[name]
            if gather is not None:
                whole = gather(name, whole)
            for part, index in ((p, i) for i in uses for p in parts):
                error = parts[part][index]
                if error is not None:
                    by_use[part, index] = sums.contract(index, error, whole)
    return sums.columns()


def assign_columns(columns: Columns, mask: Tensor) -> DirectCausal:
    """Columns by position to values by token.

    Both columns of token i are those of position i - 1, where it is predicted. What belongs to no
    response token is summed per row into ``unassigned``.
    """
    direct, causal = (to_token_index(column).masked_fill(~mask, 0.0) for column in columns)
    # Causal columns of prompt positions belong to no response token. They are reported and not
    # dropped, so that values and ``unassigned`` together are <grad L, M> for the path estimator.
    everything = columns[0].sum(-1) + columns[1].sum(-1)
    unassigned = everything - direct.sum(-1) - causal.sum(-1)
    return DirectCausal(direct, causal, unassigned)


class Captured(Estimator[Direction]):
    """Values of all estimators that contract captured errors: one backward for both sides of M.

    Exactness: as the table above says. Oracles: ``alphatoken.oracle.influence``, and
    ``alphatoken.oracle.propagation`` for Value-Propagation.
    """

    needs_forward = True

    def prepare(self, batch: LabelledBatch | None = None) -> Direction:
        """M at the current weights; see ``Estimator.prepare``."""
        require_gradients(self.adapter.model)
        self._prove_pending(batch)  # a model that is not covered is refused before M is built
        direction = super().prepare(batch)
        self.proofs.see_version(self.cache.version)
        self._prove_pending(batch)
        return direction

    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Prove coverage and isolation on a forward of this batch; see ``Estimator.prove``."""
        # Whatever is wrong with the tokens of a slice is reported when their whole batch runs, by
        # their place in it; until then nothing is proved. Sharded weights are gathered by all
        # processes at once, and one that left its proof out would keep the others waiting: there
        # the whole batch is run, and its error is raised.
        with ExitStack() as stack:
            try:
                self.proofs.see_arguments(batch)
                recording = stack.enter_context(self.forward(batch))
            except (InputError, NumericalError):
                if self.scored.sharding is not None:
                    raise
                return
            self.proofs.see(*recording.recorded, batch.mask)

    def _values(
        self, recording: Recording, direction: Direction, *, components: bool
    ) -> TokenValues:
        errors = self._all_errors(recording)
        direction = self.at_step(recording, direction)
        contracted = partial(self._contracted, recording, errors)
        return self.combined(recording, direction, contracted, components=components)

    def errors(self, recording: Recording, consume: Consume | None = None) -> TokenErrors:
        """Errors at the scored linears of the weighted losses; see ``token_errors``."""
        recorder, _ = recording.recorded
        self.proofs.require_rule(recorder)
        errors = token_errors(
            recorder,
            recording.summed_loss(),
            self.config.estimator,
            window=self.config.window,
            part=self.config.part,
            consume=consume,
        )
        # Every error would be None, and every value 0 without a warning.
        if not errors.reached:
            raise foreign_scores("the graph of another forward")
        return errors

    def _all_errors(self, recording: Recording) -> TokenErrors | None:
        """The errors at all scored linears under sharded weights; None elsewhere."""
        # Elsewhere each error is contracted inside the backward that makes it, and let go. The
        # processes must gather M's matrices in one order, and a backward promises none.
        if self.scored.sharding is None:
            return None
        errors = self.errors(recording)
        self.proofs.see(*recording.recorded, recording.batch.mask)
        return errors

    def _contracted(
        self, recording: Recording, errors: TokenErrors | None, sides: Sequence[Side]
    ) -> list[DirectCausal]:
        scored, (recorder, losses) = self.scored, recording.recorded
        mask = recording.batch.mask
        if errors is None or scored.sharding is None:
            sums = ColumnSums(recorder, sides, scored.names)
            self.errors(recording, sums.add)
            # After the errors, which also refuse a foreign graph; before any value is returned.
            self.proofs.see(recorder, losses, mask)
            columns = sums.columns()
        else:
            columns = contract_columns(
                recorder, errors, sides, scored.names, scored.sharding.gather
            )
        return [assign_columns(one, mask) for one in columns]
