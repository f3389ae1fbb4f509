"""Values that a scorer must return, computed by oracles from the user's arguments alone.

The scorer's scope, parameters, direction, labels and errors are not looked at. Model, validation,
retention, optimizer, weights and configuration are taken as they were handed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alphatoken.certificate.entries import Entry, loosened
from alphatoken.certificate.tolerances import Narrowest, tolerance_of
from alphatoken.model.protocol import DecoderAdapter, DeltaNets, find_adapter
from alphatoken.oracle import composite, evaluate, readouts, scope
from alphatoken.support.progress import Tracker

if TYPE_CHECKING:
    from alphatoken.scorer import HandedOver

__all__ = ["SIDES", "Expected", "Oracle"]

SIDES = ("adaptation", "stability")
_SELF_ONLY = ("alphatoken", "direct", "same_layer_hop")
_SPLIT = (*_SELF_ONLY, "paper_literal")
_NOT_INPUTS = frozenset(
    (
        "labels", "shift_labels", "num_items_in_batch", "fused_lm_head", "logits_to_keep",
        "return_dict", "use_cache",
    )
)  # fmt: skip
"""Keys of a trainer's batch that shape a loss, or the output's form, and no logits."""


@dataclass(frozen=True)
class Expected:
    """The oracle's answer to one scorer.

    Attributes:
        mask: response tokens (b, t).
        seen: tokens that are compared, (b, t).
        sampled: tokens that were sent back one by one, (b, t).
        components: name (as in ``TokenValues``) -> entry by token; None where it must be None.
        unassigned: by row.
        sums: name -> (value, scale) of a component's sum over all tokens.
        direction: (P o G, P o V) by parameter name, None for a side that is not built.
        names: parameter name -> all its names.
        own_error: largest difference of the two oracles of the direct part.
        attention_error: of the recomputed attention from the model's own kernel.
        arithmetic: row of the table of tolerances, and the tolerance.
    """

    mask: Tensor
    seen: Tensor
    sampled: Tensor
    components: dict[str, Entry | None]
    unassigned: Entry
    sums: dict[str, tuple[float, float]]
    direction: tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]
    names: dict[str, list[str]]
    own_error: float
    attention_error: float
    arithmetic: tuple[str, float]


@dataclass
class Oracle:
    """Everything that ``Expected`` is computed from.

    Args:
        given: what the scorer's user handed over.
        batch: labelled, as the user has it.
        token_weights: (b, t) factors on token losses, or None.
        step_weights: (b, t) derivative of the step's loss by each token loss, or None.
    """

    given: HandedOver
    batch: Mapping[str, Any]
    token_weights: Tensor | None
    step_weights: Tensor | None

    def __post_init__(self) -> None:
        """Find the scope."""
        given, config = self.given, self.given.config
        self.model = scope.bare_model(given.model)
        if given.adapter is not None:
            self.model = given.adapter.model
        self.adapter: DecoderAdapter = given.adapter or find_adapter(self.model)
        self.scope = scope.find_scored(
            self.model,
            config.layers,
            blocks=None if given.adapter is None else given.adapter.layers(),
            parameters=config.parameters,
            loose=config.uncovered == "error",
        )
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.names = {n: names[id(p)] for n, p in self.scope.parameters.items()}
        self.mask = evaluate.batch_mask(self.batch)
        self.inside = Narrowest()

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of the untouched model."""
        if self.given.adapter is not None:
            return self.given.adapter.forward(inputs)
        kept = {k: v for k, v in inputs.items() if k not in _NOT_INPUTS}
        if hasattr(getattr(self.model, "config", None), "use_cache"):
            kept["use_cache"] = False
        output = self.model(**kept)
        logits = output if isinstance(output, Tensor) else output.logits
        assert isinstance(logits, Tensor)
        return logits

    # --- M -------------------------------------------------------------------------------------

    def direction(self) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
        """``G`` and ``V`` by parameter name, before P."""
        given, parameters = self.given, self.scope.parameters
        gain = keep = None
        if given.config.objective != "stability":
            gain = self._gradient(given.validation)
        if given.config.objective != "adaptation" and given.retention is not None:
            if isinstance(given.retention, composite.Drift):
                keep = composite.fisher_drift(given.retention, parameters, self.names.__getitem__)
            else:
                keep = self._gradient(given.retention)
        return gain, keep

    def _gradient(self, items: Any) -> dict[str, Tensor]:
        listed = [items] if isinstance(items, (Mapping, composite.Pairs)) else items
        return composite.objective_gradient(self.forward, listed, self.scope.parameters)

    def scale(self, losses: Tensor, places: Tensor) -> dict[str, Tensor]:
        """P by parameter name; where it is missing, 1."""
        config, parameters = self.given.config, self.scope.parameters
        kind = config.preconditioner
        if isinstance(kind, Mapping):
            return {
                n: p for n in parameters for a in self.names[n] if (p := kind.get(a)) is not None
            }
        if kind is None or kind == "kronecker":
            return {}
        gradients = None
        if kind == "full":
            weights = losses.new_full(losses.shape, 1 / len(losses))
            if self.step_weights is not None:
                weights = self.step_weights[tuple(places.T)].to(losses)
            found = torch.autograd.grad(
                (weights * losses).sum(),
                list(parameters.values()),
                retain_graph=True,
                allow_unused=True,
            )
            gradients = {
                n: torch.zeros_like(p) if g is None else g
                for (n, p), g in zip(parameters.items(), found, strict=True)
            }
        found_scale = composite.adam_scale(
            self.given.optimizer, parameters, gradients, after=config.precondition_after
        )
        return found_scale or {}

    def _preconditioned(
        self, side: Mapping[str, Tensor], p: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        factors, damping = self.given.influence, self.given.config.damping
        if factors is not None:
            return composite.damped_directions(factors, side, damping, self.names.__getitem__)
        return {n: m * p[n] if n in p else m for n, m in side.items()}

    # --- values --------------------------------------------------------------------------------

    def expect(self, sampled: Tensor, tracker: Tracker) -> Expected:
        """The values of the batch; ``sampled`` (b, t) tokens are sent back one by one."""
        self._tracker = tracker
        with only_trainable(self.model, self.scope.parameters), evaluating(self.model):
            gain, keep = self.direction()
            self._weight = self.given.config.stability_weight
            captured = self.given.config.estimator != "label"
            with (
                readouts.traced(
                    self.scope if captured else _unhooked(self.scope), self._shape
                ) as t,
                self.inside,
            ):
                losses, places = composite.losses_of(self.forward, self.batch)
            p = self.scale(losses, places)
            sides = [None if m is None else self._preconditioned(m, p) for m in (gain, keep)]
            find = self._columns if captured else self._rows
            components, rest, found = find(sides, t, losses, places, sampled)
        return Expected(
            mask=self.mask,
            sampled=sampled,
            components=self._components(components),
            unassigned=self._total(rest),
            direction=(sides[0], sides[1]),
            names=self.names,
            arithmetic=self.arithmetic,
            **found,
        )

    @property
    def _shape(self) -> torch.Size:
        shape: torch.Size = self.batch["input_ids"].shape
        return shape

    def _weights(self, losses: Tensor, places: Tensor) -> Tensor:
        if self.token_weights is None:
            return torch.ones_like(losses)
        return self.token_weights[tuple(places.T)].to(losses)

    @property
    def arithmetic(self) -> tuple[str, float]:
        """Row of the table of tolerances, once a forward has run, and the tolerance."""
        weights = next(iter(self.scope.parameters.values())).dtype
        return tolerance_of(weights, self.inside.dtype)

    def _conditions(self, losses: Tensor) -> Tensor:
        """Rounding that no code can avoid, by token, in units of the tolerance.

        The error of a loss at the logits is p - 1, with absolute terms 1 / (1 - p) times as large:
        a confident prediction has lost that many digits before anything is sent back.
        """
        weights = next(iter(self.scope.parameters.values())).dtype
        eps = torch.finfo(torch.promote_types(weights, torch.float32)).eps
        unsure = (-torch.expm1(-losses.detach().double())).clamp(min=eps)
        return 8 * eps / self.arithmetic[1] / unsure

    def _rows(
        self,
        sides: Sequence[dict[str, Tensor] | None],
        trace: readouts.Trace,
        losses: Tensor,
        places: Tensor,
        sampled: Tensor,
    ) -> tuple[list[Entry | None], list[Entry | None], dict[str, Any]]:
        """Label values: ``<grad l_k, M>``, one backward a token; and their sum by one more."""
        weights, parameters = self._weights(losses, places), self.scope.parameters

        def along(loss: Tensor) -> list[dict[str, tuple[float, float]] | None]:
            found = torch.autograd.grad(
                loss, list(parameters.values()), retain_graph=True, allow_unused=True
            )
            gradients = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
            return [None if side is None else _inner(gradients, side) for side in sides]

        entries: list[Entry | None] = [
            None if side is None else Entry.zero(self._shape, parameters) for side in sides
        ]
        conditions = 1 + self._conditions(losses)
        for n, row, token in self._sampled(sampled, places):
            for entry, parts in zip(entries, along(weights[n] * losses[n]), strict=True):
                if entry is not None and parts is not None:
                    for name, (value, size) in parts.items():
                        entry.by[name][row, token] = value
                        entry.value[row, token] += value
                        entry.scale[row, token] += size * float(conditions[n])
        sums = {}
        whole = along((weights * losses).sum())
        for name, parts in zip(SIDES, whole, strict=True):
            if parts is not None:
                value, size = (sum(each) for each in zip(*parts.values(), strict=True))
                sums[name] = (float(value), float(size))
        rows = self._shape[:1]
        nothing: list[Entry | None] = [None if s is None else Entry.zero(rows, ()) for s in sides]
        found = {
            "seen": sampled,
            "sums": sums,
            "own_error": 0.0,
            "attention_error": 0.0,
        }
        return [*entries, None, None], nothing, found

    def _columns(
        self,
        sides: Sequence[dict[str, Tensor] | None],
        trace: readouts.Trace,
        losses: Tensor,
        places: Tensor,
        sampled: Tensor,
    ) -> tuple[list[Entry | None], list[Entry | None], dict[str, Any]]:
        """Direct and causal columns of every position; direct ones of ``sampled`` one by one."""
        config = self.given.config
        weights = self._weights(losses, places)
        parameters = self.scope.parameters
        by_id = [
            None if side is None else {id(parameters[n]): m for n, m in side.items()}
            for side in sides
        ]

        def read(
            trace: readouts.Trace,
            errors: Sequence[Tensor | None],
            spread: Sequence[Tensor] | None = None,
        ) -> list[Entry | None]:
            return [
                None
                if m is None
                else Entry.of(
                    readouts.contract(trace, errors, m, spread=spread),
                    self._shape,
                )
                for m in by_id
            ]

        rounding = (weights * self._conditions(losses)).to(losses)
        ordinary = read(trace, self._errors(trace, (weights * losses).sum()))
        unsure = read(trace, self._errors(trace, (rounding * losses).sum()))
        ordinary = loosened(ordinary, unsure)
        none: list[Entry | None] = [
            None if m is None else Entry.zero(self._shape, ()) for m in by_id
        ]
        own_error, attention_error = 0.0, 0.0
        direct, causal = ordinary, none
        if config.estimator != "path":
            split = config.estimator in _SELF_ONLY
            with readouts.traced(
                self.scope,
                self._shape,
                split=split,
                override=self._override(self.adapter.attention_modules, "override_attention"),
                deltas=self._override(self.adapter.delta_nets, "override_delta_nets")
                if isinstance(self.adapter, DeltaNets)
                else None,
            ) as second:
                again, _ = composite.losses_of(self.forward, self.batch)
            attention_error = max((use.error for use in second.attentions), default=0.0)
            outputs = [use.output for use in second.attentions]

            def both(factors: Tensor) -> tuple[list[Entry | None], list[Entry | None]]:
                errors = self._errors(second, (factors * again).sum(), outputs)
                uses = len(second.linears)
                return read(second, errors[:uses]), self._causal(second, errors[uses:], read)

            (direct, causal), (unsure, later) = both(weights), both(rounding)
            direct, causal = loosened(direct, unsure), loosened(causal, later)
            if config.estimator == "same_layer_hop":
                # The library takes its own k = t terms away from the kernel's backward.
                causal = loosened(causal, direct)
            if split:
                direct, own_error = self._one_by_one(direct, by_id, trace, losses, places, sampled)
        if config.part == "direct":
            causal = none
        if config.part == "causal":
            direct = none
        one = [None if e is None else self._by_token(e, causal=False) for e in direct]
        two = [None if e is None else self._by_token(e, causal=True) for e in causal]
        rest = [
            None if d is None or c is None else _rest(d + c, a.value + b.value)  # type: ignore[union-attr]
            for d, c, a, b in zip(direct, causal, one, two, strict=True)
        ]
        found = {
            "seen": self.mask,
            "sums": {},
            "own_error": own_error,
            "attention_error": attention_error,
        }
        return [*one, *two], rest, found

    def _causal(
        self, trace: readouts.Trace, heads: Sequence[Tensor | None], read: Any
    ) -> list[Entry | None]:
        """Causal columns, as the estimator defines them, from errors at the heads' outputs."""
        config = self.given.config
        errors: list[Tensor | None] = [None] * len(trace.linears)
        if config.estimator in ("same_layer_hop", "direct"):
            if config.estimator == "same_layer_hop":
                errors = readouts.hop_errors(trace, heads)
            found: list[Entry | None] = read(trace, errors)
            return found
        mean = config.estimator == "paper_literal"
        errors, spread = readouts.propagated_errors(
            trace,
            heads,
            window=config.window,
            head_reduction="mean" if mean else config.head_reduction,
        )
        propagated: list[Entry | None] = read(trace, errors, spread)
        return propagated

    def _one_by_one(
        self,
        direct: Sequence[Entry | None],
        by_id: Sequence[dict[int, Tensor] | None],
        trace: readouts.Trace,
        losses: Tensor,
        places: Tensor,
        sampled: Tensor,
    ) -> tuple[list[Entry | None], float]:
        """The direct part of sampled tokens from the untouched model, one backward each."""
        entries = [None if e is None else e.map(lambda x: x.clone()) for e in direct]
        worst = 0.0
        weighted = self._weights(losses, places) * losses
        for n, row, token in self._sampled(sampled, places):
            place = (row, token - 1)
            errors = self._errors(trace, weighted[n])
            for entry, m in zip(entries, by_id, strict=True):
                if entry is None or m is None:
                    continue
                parts = readouts.contract(trace, errors, m, rows=place)
                one = Entry.of(parts, torch.Size([]))
                size = float(entry.scale[place])  # of the joint backward, conditions included
                away = abs(float(entry.value[place] - one.value))
                worst = max(worst, away / size if size > 0 else (torch.inf if away else 0.0))
                entry.value[place] = one.value
                for name, value in one.by.items():
                    entry.by[name][place] = value
        return list(entries), worst

    def _sampled(self, sampled: Tensor, places: Tensor) -> Iterator[tuple[int, int, int]]:
        """(number among the losses, row, token) of each sampled token, which is reported."""
        chosen = [(n, b, i) for n, (b, i) in enumerate(places.tolist()) if bool(sampled[b, i])]
        for done, one in enumerate(chosen):
            self._tracker.report(done)
            yield one

    def _errors(
        self, trace: readouts.Trace, loss: Tensor, also: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """d(loss)/d(output) of each use of a scored linear, and of ``also``; None without a way.

        A block that is used at two depths may lie below everything that has a gradient as well.
        """
        targets = [*(use.s for use in trace.linears), *also]
        live = [index for index, target in enumerate(targets) if target.requires_grad]
        found = torch.autograd.grad(
            loss, [targets[index] for index in live], retain_graph=True, allow_unused=True
        )
        errors: list[Tensor | None] = [None] * len(targets)
        for index, error in zip(live, found, strict=True):
            errors[index] = error
        return errors

    def _override(self, modules_of: Any, name: str) -> Any:
        """Sends the calls of every block that a scored weight lies at or below through others."""
        scored = {id(p) for p in self.scope.parameters.values()}
        first = next(
            index
            for index, block in enumerate(self.scope.blocks)
            if any(id(p) in scored for p in block.parameters())
        )
        modules = [
            module for layer in range(first, len(self.scope.blocks)) for module in modules_of(layer)
        ]
        return partial(getattr(self.adapter, name), modules)

    # --- assembling ----------------------------------------------------------------------------

    def _by_token(self, entry: Entry, *, causal: bool) -> Entry:
        """Columns by position to values by token; 0 off the response."""
        stays = causal and self.given.config.causal_position == "context"

        def move(columns: Tensor) -> Tensor:
            moved = torch.zeros_like(columns)
            moved[:, 1:] = columns[:, 1:] if stays else columns[:, :-1]
            return moved * self.mask.to(moved)

        return entry.map(move)

    def _total(self, sides: Sequence[Entry | None]) -> Entry:
        """Adaptation + lambda stability."""
        gain, keep = sides[0], sides[1]
        weighted = None if keep is None else keep.times(self._weight)
        both = [entry for entry in (gain, weighted) if entry is not None]
        return both[0] if len(both) == 1 else both[0] + both[1]

    def _components(self, entries: Sequence[Entry | None]) -> dict[str, Entry | None]:
        zero = Entry.zero(self._shape, ())
        config = self.given.config
        split = config.estimator in _SPLIT
        found: dict[str, Entry | None] = {}
        sides: list[Entry] = []
        for index, side in enumerate(SIDES):
            direct, causal = entries[index] or zero, entries[index + 2] or zero
            sides.append(direct + causal)
            found[side] = sides[-1]
            found[f"{side}_direct"] = direct if split else None
            found[f"{side}_causal"] = causal if split else None
        found["total"] = sides[0] + sides[1].times(self._weight)
        return found


def _inner(
    gradients: Mapping[str, Tensor], side: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Inner product ``<g, M>`` by parameter, and the sum of its absolute terms."""
    found = {}
    for name, g in gradients.items():
        terms = g.double() * side[name]
        found[name] = (float(terms.sum()), float(terms.abs().sum()))
    return found


def _rest(columns: Entry, assigned: Tensor) -> Entry:
    return Entry(columns.value.sum(-1) - assigned.sum(-1), columns.scale.sum(-1))


def _unhooked(scored: scope.ScoredModel) -> scope.ScoredModel:
    """The same without linears to hook: rows of Psi need none."""
    return scope.ScoredModel(scored.model, (), scored.layers, (), scored.loose, scored.parameters)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside; each module's own flag afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def only_trainable(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, no other parameter asks for gradients: the graph begins at the first scored one."""
    kept = {id(p) for p in parameters.values()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
