"""Values that a scorer must return, computed by oracles from the user's arguments alone.

The scorer's scope, parameters, direction, labels and errors are not looked at. Model, validation,
retention, optimizer, weights and configuration are taken as they were handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alphatoken.direction.inputs import ScorerArguments
from alphatoken.model.forward import evaluation_mode, kept_frequencies
from alphatoken.model.protocol import (
    DecoderAdapter,
    DeltaNets,
    attention_overridden,
    find_adapter,
    is_users_own,
)
from alphatoken.oracle import composite, readouts, scope
from alphatoken.oracle.gradients import batch_mask
from alphatoken.support.progress import Tracker

SIDES = ("adaptation", "stability")
Matrices = dict[str, Tensor]
"""By parameter name."""
_SELF_ONLY = ("alphatoken", "direct")
_SPLIT = (*_SELF_ONLY, "paper_literal")
_NOT_INPUTS = frozenset(
    (
        "labels", "shift_labels", "num_items_in_batch", "fused_lm_head", "logits_to_keep",
        "return_dict", "use_cache",
    )
)  # fmt: skip
"""Keys of a trainer's batch that shape a loss, or the output's form, and no logits."""

TOLERANCES: dict[str, float] = {
    "float64": 1e-10,  # right code: 1e-13 on drawn decoders that are float64 throughout
    "float64 over float32": 1e-6,  # 1.6e-7
    "float32": 5e-5,  # 1.3e-6; 3.5e-6 on SmolLM2-135M
    "float16": 5e-3,  # 1.4e-3; 2.3e-3 under label through a mixture of experts
    "bfloat16": 2.2e-2,  # 2.0e-2, Phi-3's causal part; the oracle's own two direct parts 1.4e-2
}
"""Error of right code, relative to the sum of the absolute terms of what is compared, by the dtype
of the weights; "float64 over float32" where a float64 model rounds to float32
inside, as the norms and rotary tables of transformers do. Beside each the worst error of right code
that was measured, on some fourteen tiny architectures with three draws and six estimators each. A
router that flips between two forwards in bfloat16 is beyond all tolerance, and is meant to be."""

_WIDTH = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 0}


class Narrowest(TorchDispatchMode):
    """Sees every operation inside the context; ``dtype`` is the narrowest float that came out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at its results."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype in _WIDTH and leaf.dim() > 0:
                self.dtype = min(self.dtype, leaf.dtype, key=lambda dtype: _WIDTH[dtype])
        return out


def tolerance_of(weights: torch.dtype, inside: torch.dtype) -> tuple[str, float]:
    """(row, tolerance) for a model of these weights whose forward rounds to ``inside``."""
    narrow = min(weights, inside, key=lambda dtype: _WIDTH.get(dtype, 0))
    row = str(narrow).removeprefix("torch.")
    if weights == torch.float64 and narrow == torch.float32:
        row = "float64 over float32"
    return row, TOLERANCES.get(row, TOLERANCES["bfloat16"])


@dataclass(frozen=True)
class Entry:
    """One component: values and sums of absolute terms, whole and by parameter or linear map."""

    value: Tensor
    scale: Tensor
    by: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zero(cls, shape: torch.Size, names: Collection[str]) -> Entry:
        """Zero values of this shape, whole and for each name."""
        value, scale, *by = (torch.zeros(shape, dtype=torch.float64) for _ in (0, 1, *names))
        return cls(value, scale, dict(zip(names, by, strict=True)))

    @classmethod
    def of(cls, parts: Mapping[str, tuple[Tensor, Tensor]], shape: torch.Size) -> Entry:
        """The sum of the linear maps' contributions."""
        whole = cls.zero(shape, ())
        value, scale = whole.value, whole.scale
        for part, size in parts.values():
            value = value + part.cpu()
            scale = scale + size.cpu()
        return cls(value, scale, {n: v.detach().cpu() for n, (v, _) in parts.items()})

    def __add__(self, other: Entry) -> Entry:
        names = {*self.by, *other.by}
        zero = torch.zeros_like(self.value)
        by = {n: self.by.get(n, zero) + other.by.get(n, zero) for n in sorted(names)}
        return Entry(self.value + other.value, self.scale + other.scale, by)

    def times(self, factor: float) -> Entry:
        """The entry, scaled by a factor."""
        by = {n: factor * v for n, v in self.by.items()}
        return Entry(factor * self.value, abs(factor) * self.scale, by)

    def map(self, move: Callable[[Tensor], Tensor]) -> Entry:
        """Applies ``move`` to the values, the scale and each part of ``by``."""
        return Entry(move(self.value), move(self.scale), {n: move(v) for n, v in self.by.items()})


Entries = dict[str, Entry]
"""By side, of those that are built."""


def loosened(entries: Entries, more: Entries) -> Entries:
    """Widens the error scale of each entry by that of ``more``; values stay."""
    return {n: Entry(e.value, e.scale + more[n].scale, e.by) for n, e in entries.items()}


def listed_items(items: Any) -> list[Any]:
    """Labelled batches or pairs of an objective as a list, of one or of several."""
    return [items] if isinstance(items, (Mapping, composite.Pairs)) else list(items)


class Expected:
    """The oracle's answer to one scorer.

    Args:
        arguments: the scorer's, as its user handed them over.
        batch: labelled, as the user has it.
        token_weights: (b, t) factors on token losses, or None.
        step_weights: (b, t) derivative of the step's loss by each token loss, or None.

    Attributes:
        mask: response tokens (b, t).
        names: parameter name -> all its names.
        scope: the oracle's own.

    Attributes after ``compute``:
        compared: tokens that are compared, (b, t).
        components: name (as in ``TokenValues``) -> entry by token; None where it must be None.
        unassigned: by row.
        direction: P o G and P o V, by side.
        sums: name -> (value, scale) of a component's sum over all tokens.
        own_error: largest difference of the two oracles of the direct part.
        attention_error: of the recomputed attention from the model's own kernel.
        rounding: of a walk, in nats; see ``ExpectedWalk``.
    """

    rounding = 0.0

    compared: Tensor
    components: dict[str, Entry | None]
    unassigned: Entry
    direction: dict[str, Matrices]

    def __init__(
        self,
        arguments: ScorerArguments,
        batch: Mapping[str, Any],
        token_weights: Tensor | None,
        step_weights: Tensor | None,
    ) -> None:
        self.arguments, self.batch = arguments, batch
        self.token_weights, self.step_weights = token_weights, step_weights
        config = arguments.config
        self.model = scope.bare_model(arguments.model)
        self.adapter: DecoderAdapter = arguments.adapter or find_adapter(self.model)
        # One that the user handed over or registered says where the blocks are, and how the model
        # is called. Else the oracle finds both by itself.
        self.by_adapter = arguments.adapter is not None or is_users_own(self.adapter)
        if self.by_adapter:
            self.model = self.adapter.model
        self.scope = scope.find_scored(
            self.model,
            config.layers,
            blocks=self.adapter.layers() if self.by_adapter else None,
            parameters=config.parameters,
            loose=config.uncovered == "error",
        )
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.names = {n: names[id(p)] for n, p in self.scope.parameters.items()}
        self.mask = batch_mask(batch)
        self.inside = Narrowest()
        self.sums: dict[str, tuple[float, float]] = {}
        self.own_error = self.attention_error = 0.0

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of the untouched model."""
        if self.by_adapter:
            return self.adapter.forward(inputs)
        return self.plain_forward(self.model, inputs)

    @staticmethod
    def plain_forward(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of a model that is called as transformers' models are."""
        kept = {k: v for k, v in inputs.items() if k not in _NOT_INPUTS}
        if hasattr(getattr(model, "config", None), "use_cache"):
            kept["use_cache"] = False
        with kept_frequencies(model):
            output = model(**kept)
        logits = output if isinstance(output, Tensor) else output.logits
        assert isinstance(logits, Tensor)
        return logits

    def _gradients_of_sides(self) -> dict[str, Matrices]:
        """``G`` and ``V``, before P."""
        arguments, gradients = self.arguments, dict[str, Matrices]()
        if arguments.config.objective != "stability":
            gradients["adaptation"] = self._gradient(arguments.validation)
        if arguments.config.objective != "adaptation" and arguments.retention is not None:
            if isinstance(arguments.retention, composite.Drift):
                gradients["stability"] = composite.fisher_drift(
                    arguments.retention, self.scope.parameters, self.names.__getitem__
                )
            else:
                gradients["stability"] = self._gradient(arguments.retention)
        return gradients

    def _gradient(self, items: Any) -> Matrices:
        return composite.objective_gradient(
            self.forward, listed_items(items), self.scope.parameters
        )

    def _scale(self) -> Matrices:
        """P; where it is missing, 1."""
        config, parameters = self.arguments.config, self.scope.parameters
        kind = config.preconditioner
        if isinstance(kind, Mapping):
            return {
                n: p for n in parameters for a in self.names[n] if (p := kind.get(a)) is not None
            }
        if kind is None or kind == "kronecker":
            return {}
        gradients = None
        if kind == "full":
            weights = torch.full_like(self.losses, 1 / len(self.losses))
            if self.step_weights is not None:
                weights = self.step_weights[tuple(self.places.T)].to(self.losses)
            gradients = self._gradients((weights.detach() * self.losses).sum())
        scales = composite.adam_scale(
            self.arguments.optimizer, parameters, gradients, after=config.precondition_after
        )
        return scales or {}

    def _gradients(self, loss: Tensor) -> Matrices:
        parameters = self.scope.parameters
        gradients = torch.autograd.grad(
            loss, [*parameters.values()], retain_graph=True, allow_unused=True,
            materialize_grads=True,
        )  # fmt: skip
        return dict(zip(parameters, gradients, strict=True))

    def _preconditioned(self, side: Matrices, p: Matrices) -> Matrices:
        factors, damping = self.arguments.influence, self.arguments.config.damping
        if factors is not None:
            return composite.damped_directions(factors, side, damping, self.names.__getitem__)
        return {n: m * p[n] if n in p else m for n, m in side.items()}

    def compute(self, sampled: Tensor, tracker: Tracker) -> None:
        """Compute the values of the batch; one backward pass for each of the ``sampled`` (b, t)."""
        self._sampled, self._tracker = sampled, tracker
        captured, hooked = self.arguments.config.estimator != "label", self.scope
        if not captured:  # rows of Psi need no linears to hook
            hooked = replace(self.scope, blocks=(), linears=(), mixtures={})
        with only_trainable(self.model, self.scope.parameters), evaluation_mode(self.model):
            sides = self._gradients_of_sides()
            with readouts.traced(hooked, self._shape) as trace, self.inside:
                self.losses, self.places = composite.losses_of(self.forward, self.batch)
            p = self._scale()
            self.direction = {side: self._preconditioned(m, p) for side, m in sides.items()}
            if captured:
                self._columns(trace)
            else:
                self._rows()

    @property
    def _shape(self) -> torch.Size:
        shape: torch.Size = self.batch["input_ids"].shape
        return shape

    @property
    def _weights(self) -> Tensor:
        """Factor on each loss."""
        if self.token_weights is None:
            return torch.ones_like(self.losses)
        return self.token_weights[tuple(self.places.T)].to(self.losses)

    @property
    def arithmetic(self) -> tuple[str, float]:
        """Row of the table of tolerances, once a forward has run, and the tolerance."""
        weights = next(iter(self.scope.parameters.values())).dtype
        return tolerance_of(weights, self.inside.dtype)

    @property
    def _eps(self) -> float:
        """Of the weights' arithmetic, or of float32 where the weights are narrower."""
        weights = next(iter(self.scope.parameters.values())).dtype
        return torch.finfo(torch.promote_types(weights, torch.float32)).eps

    def _conditions(self) -> Tensor:
        """Rounding that no code can avoid, by token, in units of the tolerance.

        The error of a loss at the logits is p - 1, with absolute terms 1 / (1 - p) times as large:
        a confident prediction has lost that many digits before anything is sent back.
        """
        unsure = (-torch.expm1(-self.losses.detach().double())).clamp(min=self._eps)
        return 8 * self._eps / self.arithmetic[1] / unsure

    def _rows(self) -> None:
        """Label values: ``<grad l_k, M>``, one backward a token; and their sum by one more."""
        weighted, conditions = self._weights * self.losses, 1 + self._conditions()

        def along(loss: Tensor) -> dict[str, dict[str, tuple[float, float]]]:
            gradients = self._gradients(loss)
            return {side: _inner(gradients, m) for side, m in self.direction.items()}

        entries = {side: Entry.zero(self._shape, m) for side, m in self.direction.items()}
        for n, row, token in self._one_after_another():
            for side, parts in along(weighted[n]).items():
                entry = entries[side]
                for name, (value, size) in parts.items():
                    entry.by[name][row, token] = value
                    entry.value[row, token] += value
                    entry.scale[row, token] += size * float(conditions[n])
        for side, parts in along(weighted.sum()).items():
            value, size = map(sum, zip(*parts.values(), strict=True))
            self.sums[side] = (float(value), float(size))
        self.compared = self._sampled
        self._assemble(entries, {}, {})

    def _columns(self, trace: readouts.Trace) -> None:
        """Direct and causal columns of every position; direct ones of some tokens one by one."""
        config, parameters = self.arguments.config, self.scope.parameters
        weights = self._weights
        rounding = (weights * self._conditions()).to(self.losses)
        by_id = {
            side: {id(parameters[n]): m for n, m in matrices.items()}
            for side, matrices in self.direction.items()
        }

        def read(
            trace: readouts.Trace,
            errors: Sequence[Tensor | None],
            spread: Sequence[Tensor] | None = None,
        ) -> Entries:
            return {
                side: Entry.of(readouts.contract(trace, errors, m, spread=spread), self._shape)
                for side, m in by_id.items()
            }

        none = {side: Entry.zero(self._shape, ()) for side in by_id}
        if config.estimator == "path":
            direct, unsure = (
                read(trace, self._errors(trace, (factors * self.losses).sum()))
                for factors in (weights, rounding)
            )
            direct, causal = loosened(direct, unsure), none
        else:
            split = config.estimator in _SELF_ONLY
            with readouts.traced(
                self.scope,
                self._shape,
                split=split,
                override=partial(
                    attention_overridden,
                    self.adapter,
                    self._at_or_above(self.adapter.attention_modules),
                ),
                deltas=partial(
                    self.adapter.override_delta_nets, self._at_or_above(self.adapter.delta_nets)
                )
                if isinstance(self.adapter, DeltaNets)
                else None,
            ) as second:
                again, _ = composite.losses_of(self.forward, self.batch)
            self.attention_error = max((use.error for use in second.attentions), default=0.0)
            outputs = [use.output for use in second.attentions]

            def both(factors: Tensor) -> tuple[Entries, Entries]:
                errors = self._errors(second, (factors * again).sum(), outputs)
                uses = len(second.linears)
                return read(second, errors[:uses]), self._causal(second, errors[uses:], read)

            (direct, causal), (unsure, later) = both(weights), both(rounding)
            direct, causal = loosened(direct, unsure), loosened(causal, later)
            if split:
                self.own_error = self._replace_sampled(direct, by_id, trace)
        direct = none if config.part == "causal" else direct
        causal = none if config.part == "direct" else causal
        one = {side: self._by_token(entry) for side, entry in direct.items()}
        two = {side: self._by_token(entry) for side, entry in causal.items()}
        rest = {}
        for side in by_id:
            columns, assigned = direct[side] + causal[side], one[side].value + two[side].value
            left = columns.value.sum(-1) - assigned.sum(-1)
            rest[side] = Entry(left, columns.scale.sum(-1))
        self.compared = self.mask
        self._assemble(one, two, rest)

    def _causal(self, trace: readouts.Trace, heads: Sequence[Tensor | None], read: Any) -> Entries:
        """Causal columns, as the estimator defines them, from errors at the heads' outputs."""
        config, spread = self.arguments.config, None
        errors: list[Tensor | None] = [None] * len(trace.linears)
        if config.estimator != "direct":
            reduction = "mean" if config.estimator == "paper_literal" else "per_head"
            errors, spread = readouts.propagated_errors(
                trace, heads, window=config.window, head_reduction=reduction
            )
        entries: Entries = read(trace, errors, spread)
        return entries

    def _replace_sampled(
        self, direct: Entries, by_id: Mapping[str, dict[int, Tensor]], trace: readouts.Trace
    ) -> float:
        """Put the direct part of sampled tokens from the untouched model, one backward each.

        Returns:
            The largest difference from what stood there.
        """
        worst = 0.0
        weighted = self._weights * self.losses
        for n, row, token in self._one_after_another():
            place = (row, token - 1)
            errors = self._errors(trace, weighted[n])
            for side, entry in direct.items():
                parts = readouts.contract(trace, errors, by_id[side], rows=place)
                one = Entry.of(parts, torch.Size([]))
                size = float(entry.scale[place])  # of the joint backward, conditions included
                away = abs(float(entry.value[place] - one.value))
                worst = max(worst, away / size if size > 0 else (torch.inf if away else 0.0))
                entry.value[place] = one.value
                for name, value in one.by.items():
                    entry.by[name][place] = value
        return worst

    def _one_after_another(self) -> Iterator[tuple[int, int, int]]:
        """(number among the losses, row, token) of each sampled token, which is reported."""
        every = enumerate(self.places.tolist())
        chosen = [(n, b, i) for n, (b, i) in every if bool(self._sampled[b, i])]
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
        gradients = torch.autograd.grad(
            loss, [targets[index] for index in live], retain_graph=True, allow_unused=True
        )
        errors: list[Tensor | None] = [None] * len(targets)
        for index, error in zip(live, gradients, strict=True):
            errors[index] = error
        return errors

    def _at_or_above(self, modules_of: Any) -> list[Any]:
        """These modules of every block that a scored weight lies at or below."""
        scored = {id(p) for p in self.scope.parameters.values()}
        first = next(
            index
            for index, block in enumerate(self.scope.blocks)
            if any(id(p) in scored for p in block.parameters())
        )
        layers = range(first, len(self.scope.blocks))
        return [module for layer in layers for module in modules_of(layer)]

    def _by_token(self, entry: Entry) -> Entry:
        """Columns by position to values of the next token; 0 off the response."""

        def move(columns: Tensor) -> Tensor:
            moved = torch.zeros_like(columns)
            moved[:, 1:] = columns[:, :-1]
            return moved * self.mask.to(moved)

        return entry.map(move)

    def _assemble(self, direct: Entries, causal: Entries, rest: Entries) -> None:
        """Components from entries by token, and from what no token has by row."""
        split = self.arguments.config.estimator in _SPLIT
        zero, sides = Entry.zero(self._shape, ()), Entries()
        self.components = {}
        for side in SIDES:
            parts = {"direct": direct.get(side, zero), "causal": causal.get(side, zero)}
            both = parts["direct"] + parts["causal"]
            self.components[side] = sides[side] = both
            # A part that a norm all but cancels keeps the rounding of what was cancelled.
            more = both.times(8 * self._eps / self.arithmetic[1])
            for part, entry in loosened(parts, dict.fromkeys(parts, more)).items():
                self.components[f"{side}_{part}"] = entry if split else None
        self.components["total"] = self._total(sides, zero)
        self.unassigned = self._total(rest, Entry.zero(self._shape[:1], ()))

    def _total(self, sides: Entries, zero: Entry) -> Entry:
        """Adaptation + lambda stability."""
        gain, keep = (sides.get(side, zero) for side in SIDES)
        return gain + keep.times(self.arguments.config.stability_weight)


def _inner(gradients: Matrices, side: Matrices) -> dict[str, tuple[float, float]]:
    """Inner product ``<g, M>`` by parameter, and the sum of its absolute terms."""
    products = {}
    for name, g in gradients.items():
        terms = g.double() * side[name]
        products[name] = (float(terms.sum()), float(terms.abs().sum()))
    return products


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
