"""Training steps of a token-valued run, slowly: each number from its definition, token by token.

Written from the mathematics of the library (docs/notation.md, docs/selection-and-losses.md) and
from what docs/trainers.md promises; of the library it imports the oracles and nothing else.
Documents go through the model one by one, unpadded and unpacked, with a plain attention of its own,
in float64.

    values      v_k = w_k <grad l_k, M> (or its columns),  M = P o (G + lambda V),  w = 1 or +-omega
    weights     the best ceil(rho n) of each pool, ties by (micro-batch, row, position)
    gradient    sum over kept tokens of  c_k grad l_k,  cut to the longest norm that is allowed
    update      AdamW, written out
    ledger      sum over visits of  learning rate * c * value, c the token's weight in the loss
                where it is kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.oracle import gradients, influence, propagation

FLOOR = 1e-16
"""Lower limit of Adam's second moment in a preconditioner, as docs/optimizers.md states it."""


@dataclass(frozen=True)
class RunConfig:
    """Options of the trainers that the reference knows.

    ``family`` is the trainer: TRL's for "sft" and "dpo", transformers' own for "lm". ``loss`` is
    SFT's, "nll" or "dft".
    """

    family: str = "sft"
    loss: str = "nll"
    lora: bool = False
    steps: int = 3
    accumulation: int = 2
    rows: int = 2
    estimator: str = "label"
    layers: int = 1
    objective: str = "both"
    stability_weight: float = 1.5
    window: int | None = 3
    policy: str = "top"
    keep_ratio: float = 0.5
    keep_scope: str = "batch"
    value_unit: str = "token"
    kept_normalization: str = "response"
    shared_threshold: bool = False
    masked_logit: bool = False
    retention: str = "diagonal"
    retention_batch_size: int = 2
    preconditioner: str | None = None
    precondition_after: int = 1
    validation_mode: str = "fixed"
    validation_batch_size: int = 3
    validation_micro_batch_size: int | None = None
    held_out_share: float = 0.2
    held_out_steps: int = 2
    direction_steps: int = 1
    scoring_forward: str = "auto"
    packing: bool = False
    max_grad_norm: float = 1.0
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    adam_epsilon: float = 1e-5
    beta: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.estimator not in ("alphatoken", "paper_literal"):
            object.__setattr__(self, "window", None)  # the others have none


@dataclass(frozen=True)
class Document:
    """One training sequence: token ids, which of them are labelled, where it lies in the batch.

    Under DPO ``branch`` is +1 for a chosen response and -1 for a rejected one, and ``pair`` counts
    the pairs of its micro-batch.
    """

    ids: tuple[int, ...]
    labelled: tuple[bool, ...]
    row: int = 0
    branch: int = 0
    pair: int = 0

    @property
    def places(self) -> list[int]:
        """Indices of the tokens that are predicted and count; nothing predicts the first one."""
        return [i for i, marked in enumerate(self.labelled) if marked and i > 0]

    @property
    def key(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """What a ledger shows of it: the branch, (position, token id) of each response token."""
        return self.branch, tuple((i, self.ids[i]) for i in self.places)

    def batch(self) -> dict[str, Tensor]:
        """A batch of this document alone."""
        pairs = zip(self.ids, self.labelled, strict=True)
        labels = [token if marked else -100 for token, marked in pairs]
        return {"input_ids": torch.tensor([self.ids]), "labels": torch.tensor([labels])}


Micro = tuple[Document, ...]
"""Documents of one micro-batch in (row, position) order; under DPO all chosen ones come first."""


@dataclass(frozen=True)
class RunData:
    """What the reference does not decide: the data that each step met.

    ``validation[s]`` and ``retention[s]`` are the documents that step s was measured against (of a
    pair the chosen and the rejected one, one after the other). ``weights``, by step and
    micro-batch, are those of a random policy.
    """

    micro: tuple[tuple[Micro, ...], ...]
    validation: tuple[Micro, ...]
    retention: tuple[Micro, ...]
    held_out: Micro = ()
    weights: tuple[tuple[Tensor, ...], ...] = ()


@dataclass
class Step:
    """All that must come out of one optimizer step.

    ``values`` and ``scales`` hold, micro-batch by micro-batch, each component of the tokens in
    order ("total" among them) and the sum of its absolute terms.
    ``gradient`` is what the optimizer gets, ``parameters`` what it leaves; both flat,
    ``gradient_scale`` sums absolute terms. ``chosen`` are the weights by the reference, ``weights``
    those it goes on with (see ``RunData``).
    """

    values: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[dict[str, Tensor]] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    norm: float = 0.0
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    gradient_scale: Tensor = field(default_factory=lambda: torch.zeros(0))
    parameters: Tensor = field(default_factory=lambda: torch.zeros(0))
    logs: dict[str, float] = field(default_factory=dict)


# --- the model as the reference runs it ----------------------------------------------------------


class PlainAttention:
    """Attention over one whole sequence, written out; keeps the weights and the heads' outputs."""

    def __init__(self) -> None:
        self.alpha: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        logits = more["scaling"] * query @ key.transpose(-1, -2)
        length = query.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        alpha = logits.masked_fill(later, -torch.inf).softmax(-1)
        heads = alpha @ value
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self.alpha[layer], self.outputs[layer] = alpha.detach(), heads
        return heads.transpose(1, 2), None


plain_attention = PlainAttention()
"""Registered with transformers by whoever builds the model, under any name."""


def scored(model: nn.Module, layers: int) -> dict[str, nn.Module]:
    """Every trainable linear of attention and MLP in the last K layers; LoRA factors apart."""
    blocks = {n: m for n, m in model.named_modules() if type(m).__name__ == "LlamaDecoderLayer"}
    last = list(blocks)[-layers:]
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and any(name.startswith(f"{block}.") for block in last)
    }


def propagated_size(layer: propagation.PropagationLayer) -> Tensor:
    """Sum of the absolute terms of Value-Propagation by position, without a window."""
    heads, length, width = layer.errors.shape[1:]
    moved = (layer.inputs[0] @ layer.direction.T).view(length, -1, width)
    by_head = moved.repeat_interleave(heads // moved.shape[1], dim=1).abs()
    alpha, errors = layer.alpha[0].tril(-1), layer.errors[0].abs()
    return torch.einsum("hkt,hkv,thv->t", alpha, errors, by_head)


# --- the run -------------------------------------------------------------------------------------


class Replay:
    """The run again: ``steps`` after construction, ``ledger`` beside them.

    Args:
        config: the options.
        model: at the weights before training; it is moved along.
        data: the data.
        fisher: by parameter name, a diagonal, or the pair (S_F, A_F).
        reference: weights of the scored layers that the drift is measured from.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        data: RunData,
        fisher: Mapping[str, Any],
        reference: Mapping[str, Tensor],
    ) -> None:
        self.config, self.model, self.data = config, model.eval(), data
        self.fisher, self.reference = fisher, reference
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.modules = scored(model, config.layers)
        self.names = [f"{name}.weight" for name in self.modules]
        places, start = {}, 0
        for name, parameter in self.parameters.items():
            places[name] = slice(start, start := start + parameter.numel())
        self.places = places
        self.first, self.second = torch.zeros(start).double(), torch.zeros(start).double()
        self.clip = 1.0  # by which the last step's gradient was cut
        self.omegas: list[float] = []
        self.base: dict[Document, Tensor] = {}  # reference log-probabilities, of the first weights
        everyone = [d for step in data.micro for micro in step for d in micro]
        everyone += [d for part in (*data.validation, *data.retention, data.held_out) for d in part]
        if config.family == "dpo":
            for document in everyone:
                self.base[document] = -self.losses(document).detach()
        self.ledger: dict[Any, tuple[Any, Any]] = {}  # tables, and sums of absolute terms
        self.visits: dict[Any, int] = {}
        self.gain: dict[str, Tensor] = {}
        self.keep: dict[str, Tensor] = {}
        self.built: int | None = None
        self.stale = False
        self.look: dict[str, float] = {}  # the last look at the validation objective
        self.token_count = 0  # tokens trained on
        self.steps = [self.run(step) for step in range(config.steps)]

    # --- tokens ------------------------------------------------------------------------------

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits of one document."""
        logits: Tensor = self.model(**batch, use_cache=False).logits
        return logits

    def losses(self, document: Document) -> Tensor:
        """l_k of the response tokens of one document, differentiable."""
        return torch.stack(list(gradients.run_losses(self.forward, document.batch()).values()))

    def token_gradients(self, document: Document) -> tuple[Tensor, Tensor]:
        """(n,) losses and (n, parameters) grad l_k, one backward a token."""
        losses = self.losses(document)
        rows = [self.flat(self.gradient(loss, retain=True)) for loss in losses]
        return losses.detach(), torch.stack(rows)

    def gradient(self, loss: Tensor, *, retain: bool = False) -> dict[str, Tensor]:
        """d loss / d parameter, all that are trained."""
        parts = torch.autograd.grad(
            loss, list(self.parameters.values()), retain_graph=retain, materialize_grads=True
        )
        return dict(zip(self.parameters, parts, strict=True))

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector in the order of the parameters; what is not named is zero."""
        return torch.cat(
            [
                tensors.get(name, torch.zeros_like(p)).detach().reshape(-1).double()
                for name, p in self.parameters.items()
            ]
        )

    def part(self, flat: Tensor, name: str) -> Tensor:
        """One parameter's part of a vector, in its shape."""
        return flat[self.places[name]].view_as(self.parameters[name])

    # --- the objective and the direction --------------------------------------------------------

    def objective(self, documents: Sequence[Document]) -> tuple[Tensor, int]:
        """Sum of the objective and what its mean divides by in a log: tokens, or pairs."""
        if self.config.family != "dpo":
            losses = [self.losses(d).sum() for d in documents if d.places]
            return torch.stack(losses).sum(), sum(len(d.places) for d in documents)
        terms = []
        for chosen, rejected in zip(documents[::2], documents[1::2], strict=True):
            better, worse = (-self.losses(d).sum() - self.base[d].sum() for d in (chosen, rejected))
            terms.append(-nn.functional.logsigmoid(self.config.beta * (better - worse)))
        return torch.stack(terms).sum(), len(terms)

    def objective_gradient(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """Gradient of the objective a response token; of pairs, both branches' tokens count."""
        total, _ = self.objective(documents)
        return self.gradient(total / sum(len(d.places) for d in documents))

    def due(self, step: int) -> None:
        """A new direction, of the rows drawn for this step, unless an earlier one is still used."""
        if self.built is None or step - self.built >= self.config.direction_steps:
            self.built, self.stale = step, True

    def build(self, step: int) -> None:
        """G and V, once for each that is due, when the first micro-batch has to be valued."""
        if not self.stale:
            return
        self.stale, rows = False, self.built
        assert rows is not None
        here = {n: self.parameters[n].detach().double() for n in self.names}
        self.gain = {n: torch.zeros_like(w) for n, w in here.items()}
        self.keep = {n: torch.zeros_like(w) for n, w in here.items()}
        if self.config.objective != "stability":
            gain = self.objective_gradient(self.data.validation[rows])
            self.gain = {n: gain[n].double() for n in self.names}
        if self.config.objective != "adaptation":
            self.keep |= self.retention(rows, here)
        if self.config.preconditioner == "frozen":
            scale = self.preconditioner(step, None)
            self.gain = {n: scale[n] * g for n, g in self.gain.items()}
            self.keep = {n: scale[n] * v for n, v in self.keep.items()}

    def retention(self, step: int, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """V at the current weights."""
        kind = self.config.retention
        if kind == "data":
            keep = self.objective_gradient(self.data.retention[step])
            return {n: keep[n].double() for n in self.names}
        moved = {n: here[n] - self.reference[n] for n in self.names if kind != "none"}
        if kind == "kronecker":
            return {n: self.fisher[n][0] @ w @ self.fisher[n][1] for n, w in moved.items()}
        return {n: self.fisher[n] * w for n, w in moved.items()}

    def preconditioner(self, step: int, gradient: Tensor | None) -> dict[str, Tensor]:
        """P by name: of the state before the step, or of the step that sees ``gradient``."""
        if step < self.config.precondition_after:
            return {n: torch.ones_like(self.parameters[n]).double() for n in self.names}
        b1, b2, eps = 0.9, 0.999, self.config.adam_epsilon
        s = step + 1
        c = (1 - b1) / (1 - b1**s)
        if gradient is None:
            scale = c / ((self.second / (1 - b2**step)).clamp(min=FLOOR).sqrt() + eps)
            return {n: self.part(scale, n) for n in self.names}
        m = (b1 * self.first + (1 - b1) * gradient) / (1 - b1**s)
        v = (b2 * self.second + (1 - b2) * gradient**2) / (1 - b2**s)
        root = v.clamp(min=FLOOR).sqrt()
        slope = (1 - b2) * gradient / ((1 - b2**s) * root * (root + eps) ** 2)
        scale = c / (root + eps) - m * torch.where(v > FLOOR, slope, 0.0)
        return {n: self.part(scale, n) for n in self.names}

    # --- values ---------------------------------------------------------------------------------

    def value(
        self, document: Document, token_gradients: Tensor, direction: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Parts of <., M> of each response token, unweighted, with the sums of absolute terms."""
        flat = self.flat(direction)
        if self.config.estimator == "label":
            return {"": (token_gradients @ flat, token_gradients.abs() @ flat.abs())}
        batch, at = document.batch(), torch.tensor(document.places) - 1
        psi = influence.exact_influence(self.model, self.forward, batch, self.modules, direction)
        if self.config.estimator == "path":
            columns = influence.column_sums
            return {"": (columns(psi.matrix)[0, at], columns(psi.absolute_scale)[0, at])}
        diagonal = influence.diagonal
        direct = diagonal(psi.matrix)[0, at], diagonal(psi.absolute_scale)[0, at]
        if self.config.estimator == "direct":
            zero = torch.zeros_like(direct[0])
            return {"_direct": direct, "_causal": (zero, zero)}
        layers = self.propagated(batch, direction)
        causal = propagation.value_propagation(layers, window=self.config.window)[0, at]
        size = torch.stack([propagated_size(layer) for layer in layers]).sum(0)[at]
        return {"_direct": direct, "_causal": (causal, size)}

    def propagated(
        self, batch: Mapping[str, Tensor], direction: Mapping[str, Tensor]
    ) -> list[propagation.PropagationLayer]:
        """What Value-Propagation reads of the scored layers, by forwards of its own."""
        projections = {
            n: m for n, m in self.model.named_modules() if n.endswith("self_attn.v_proj")
        }
        blocks = list(projections)[-self.config.layers :]
        numbers = range(len(projections) - self.config.layers, len(projections))
        inputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda _, args: inputs.update({name: args[0].detach()})

        with ExitStack() as hooks:
            for n in blocks:
                hooks.enter_context(projections[n].register_forward_pre_hook(keep(n)))
            errors = propagation.head_output_errors(
                self.forward, batch, lambda: [plain_attention.outputs[i] for i in numbers]
            )
        return [
            propagation.PropagationLayer(
                plain_attention.alpha[i], error, inputs[n], self.moved(projections[n], n, direction)
            )
            for i, n, error in zip(numbers, blocks, errors, strict=True)
        ]

    def moved(self, module: Any, name: str, direction: Mapping[str, Tensor]) -> Tensor:
        """How the value projection's weight moves along M; of LoRA, s (B M_A + M_B A)."""
        if not self.config.lora:
            return direction[f"{name}.weight"]
        a, b = f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight"
        left, right = (self.parameters[n].detach().double() for n in (b, a))
        return float(module.scaling["default"]) * (left @ direction[a] + direction[b] @ right)

    def values(
        self, micro: Micro, gradients_: Sequence[Tensor], factors: Sequence[Tensor],
        gain: Mapping[str, Tensor], keep: Mapping[str, Tensor], weight: float,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
        """Components as they enter the total, and the total, of the tokens of one micro-batch."""
        sides = {"adaptation": (gain, 1.0), "stability": (keep, weight)}
        terms: dict[str, list[Tensor]] = {}
        sizes: dict[str, list[Tensor]] = {}
        for document, rows, factor in zip(micro, gradients_, factors, strict=True):
            if not document.places:
                continue
            for side, (direction, scale) in sides.items():
                for part, (value, size) in self.value(document, rows, direction).items():
                    terms.setdefault(side + part, []).append(factor * scale * value)
                    sizes.setdefault(side + part, []).append((factor * scale).abs() * size)
        parts, scales = ({n: torch.cat(x) for n, x in y.items()} for y in (terms, sizes))
        total, size = (torch.stack(list(x.values())).sum(0) for x in (parts, scales))
        return {"total": total, **parts}, {"total": size, **scales}

    # --- selection ------------------------------------------------------------------------------

    def rank_groups(self, micro: Micro) -> list[list[int]]:
        """Tokens of one micro-batch that are ranked together, by their number in it."""
        rows = [d.branch for d in micro for _ in d.places]
        labels = [0] * len(rows)
        if self.config.family == "dpo" and not self.config.shared_threshold:
            labels = rows
        return [
            [i for i, label in enumerate(labels) if label == one] for one in dict.fromkeys(labels)
        ]

    def groups(self, step: int) -> list[list[tuple[int, int]]]:
        """(micro-batch, token) of the tokens of one step that are ranked together."""
        rank_groups = [self.rank_groups(micro) for micro in self.data.micro[step]]
        if self.config.keep_scope == "global":
            return [
                [(i, t) for i, of_micro in enumerate(rank_groups) for t in of_micro[number]]
                for number in range(len(rank_groups[0]))
            ]
        return [
            [(i, t) for t in pool] for i, of_micro in enumerate(rank_groups) for pool in of_micro
        ]

    def ranked(self, micro: Micro, totals: Tensor) -> Tensor:
        """What tokens are ranked by: their values, or the mean value of their response."""
        if self.config.value_unit == "token":
            return totals
        parts = totals.split([len(d.places) for d in micro])
        return torch.cat([part.mean().expand_as(part) for part in parts if len(part)])

    def select(self, step: int, totals: Sequence[Tensor]) -> list[Tensor]:
        """Weight of each token of each micro-batch of the step."""
        micro = self.data.micro[step]
        weights = [torch.zeros(len(t)).double() for t in totals]
        ranked = [self.ranked(m, t) for m, t in zip(micro, totals, strict=True)]
        for group in self.groups(step):
            of_group = self.weigh([float(ranked[i][t]) for i, t in group], self.ratio)
            for (i, t), weight in zip(group, of_group, strict=True):
                weights[i][t] = weight
        return weights

    def weigh(self, values: list[float], ratio: Fraction) -> list[float]:
        """Weights of tokens that are ranked together, their sum ceil(rho n)."""
        budget = math.ceil(ratio * len(values))
        sign = -1 if self.config.policy == "bottom" else 1
        order = sorted(range(len(values)), key=lambda i: (-sign * values[i], i))
        return [float(i in order[:budget]) for i in range(len(values))]

    @property
    def ratio(self) -> Fraction:
        """rho, in decimals."""
        return Fraction(1 if self.config.policy == "all" else str(self.config.keep_ratio))

    # --- the loss -------------------------------------------------------------------------------

    def signs(
        self, micro: Micro, losses: Sequence[Tensor], masks: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Factor on each document's token losses: 1, the token's probability under DFT, or +-omega
        with omega = beta sigma(-s)."""
        if self.config.loss == "dft":
            return [torch.exp(-loss) for loss in losses]
        if self.config.family != "dpo":
            return [torch.ones_like(loss) for loss in losses]
        ratios = {}
        for number, (document, loss) in enumerate(zip(micro, losses, strict=True)):
            ratio = -loss - self.base[document]
            kept = ratio if masks is None else ratio * masks[number]
            ratios[document.pair, document.branch] = float(kept.sum())
        beta = self.config.beta
        factors = []
        for document, loss in zip(micro, losses, strict=True):
            s = beta * (ratios[document.pair, 1] - ratios[document.pair, -1])
            omega = beta / (1 + math.exp(s))
            self.omegas.append(omega)
            factors.append(torch.full_like(loss, document.branch * omega))
        return factors

    def unit(self, step: int) -> float:
        """Weight of one token's loss (times +-omega) in the trainer's loss, or in its sum."""
        micro = self.data.micro[step]
        if self.config.family == "dpo":
            return 1 / sum(len(m) // 2 for m in micro)
        if self.config.kept_normalization == "sum":
            return 1.0
        return 1 / sum(len(d.places) for m in micro for d in m)

    def kept_unit(self, step: int, out: Step) -> float:
        """The same in the loss that is trained on: by the kept tokens where those divide it."""
        unit = self.unit(step)
        if self.config.kept_normalization == "kept":
            count = sum(len(w) for w in out.weights)
            unit *= count / float(sum(w.sum() for w in out.weights))
        return unit

    # --- one step -------------------------------------------------------------------------------

    def run(self, step: int) -> Step:
        """Everything that one optimizer step does."""
        out = Step()
        tokens = [[self.token_gradients(d) for d in m] for m in self.data.micro[step]]
        losses, rows = ([[pair[i] for pair in m] for m in tokens] for i in (0, 1))
        if self.config.policy != "random":
            out.logs |= self.watched(step)
            self.due(step)
            self.value_all(step, out, losses, rows)
            totals = [v["total"] for v in out.values]
            out.weights = self.select(step, totals)
        out.chosen = out.weights
        if self.data.weights:
            out.weights = list(self.data.weights[step])
        self.descend(step, out, losses, rows)
        if out.values:
            self.record(step, out)
        out.logs |= self.logged(step, out, losses)
        return out

    def value_all(
        self,
        step: int,
        out: Step,
        losses: Sequence[Sequence[Tensor]],
        rows: Sequence[Sequence[Tensor]],
    ) -> None:
        """Values of every micro-batch."""
        weight = self.config.stability_weight
        for micro, loss, gradient in zip(self.data.micro[step], losses, rows, strict=True):
            self.build(step)
            signs = self.signs(micro, loss, None)
            gain, keep = self.sides(step, micro, gradient, signs)
            values, scales = self.values(micro, gradient, signs, gain, keep, weight)
            out.values.append(values)
            out.scales.append(scales)

    def sides(
        self, step: int, micro: Micro, rows: Sequence[Tensor], signs: Sequence[Tensor]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """G and V as this micro-batch is valued against them.

        With the full preconditioner the micro-batch's own gradient, all tokens kept, stands for the
        whole step's: times the number of micro-batches, and cut as the last step's was.
        """
        if self.config.preconditioner != "full":
            return self.gain, self.keep
        total = sum(sign @ gradient for sign, gradient in zip(signs, rows, strict=True))
        whole = len(self.data.micro[step]) * self.unit(step) * self.clip
        scale = self.preconditioner(step, whole * torch.as_tensor(total))
        return tuple({n: scale[n] * m for n, m in side.items()} for side in (self.gain, self.keep))  # type: ignore[return-value]

    def descend(
        self,
        step: int,
        out: Step,
        losses: Sequence[Sequence[Tensor]],
        rows: Sequence[Sequence[Tensor]],
    ) -> None:
        """The gradient of the masked loss, cut, and AdamW's step."""
        micro = self.data.micro[step]
        total, scale = torch.zeros_like(self.first), torch.zeros_like(self.first)
        unit = self.kept_unit(step, out)
        for m, loss, gradient, weights in zip(micro, losses, rows, out.weights, strict=True):
            masks = weights.split([len(d.places) for d in m])
            signs = self.signs(m, loss, masks if self.config.masked_logit else None)
            for sign, mask, row in zip(signs, masks, gradient, strict=True):
                total += unit * ((sign * mask) @ row)
                scale += unit * ((sign * mask).abs() @ row.abs())
        out.norm = float(total.norm())
        self.clip = min(1.0, self.config.max_grad_norm / (out.norm + 1e-6))
        out.gradient, out.gradient_scale = self.clip * total, self.clip * scale
        out.parameters = self.step_along(step, out.gradient)

    def rate(self, step: int) -> float:
        """The learning rate falls in a straight line to zero."""
        return self.config.learning_rate * (self.config.steps - step) / self.config.steps

    def step_along(self, step: int, gradient: Tensor) -> Tensor:
        """AdamW; norms and biases do not decay. Moves the model."""
        b1, b2, s, rate = 0.9, 0.999, step + 1, self.rate(step)
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * gradient**2
        m, v = self.first / (1 - b1**s), self.second / (1 - b2**s)
        before = self.flat(self.parameters)
        shrunk = {
            n: torch.full_like(p, 0.0 if "norm" in n or "bias" in n else self.config.weight_decay)
            for n, p in self.parameters.items()
        }
        after = before * (1 - rate * self.flat(shrunk)) - rate * m / (
            v.sqrt() + self.config.adam_epsilon
        )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.part(after, name))
        return after

    # --- what is written down -------------------------------------------------------------------

    def record(self, step: int, out: Step) -> None:
        """Add this step's visits: scaled total, adaptation and stability, and the weight."""
        rate = self.rate(step) * self.kept_unit(step, out)
        for number, micro in enumerate(self.data.micro[step]):
            weights = out.weights[number]
            tables = [self.table(rate, x[number], weights) for x in (out.values, out.scales)]
            parts = zip(*(t.split([len(d.places) for d in micro]) for t in tables), strict=True)
            for document, (table, sizes) in zip(micro, parts, strict=True):
                old = self.ledger.get(document.key, (0, 0))
                self.ledger[document.key] = old[0] + table, old[1] + sizes
                self.visits[document.key] = self.visits.get(document.key, 0) + 1

    @staticmethod
    def table(rate: float, values: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """(tokens, 4): what one visit of one micro-batch adds."""
        sides = [
            torch.stack([v for n, v in values.items() if n.startswith(side)]).sum(0)
            for side in ("total", "adaptation", "stability")
        ]
        return torch.stack([*(rate * side for side in sides), weights], dim=1)

    def watched(self, step: int) -> dict[str, float]:
        """Mean objective on the rows of this step and on those that no step draws."""
        every = self.config.held_out_steps
        if not every or not self.data.held_out:
            return {}
        look = step - step % every
        if look == step:
            objectives = {}
            for name, documents in (
                ("pool", self.data.validation[step]), ("held_out", self.data.held_out)
            ):  # fmt: skip
                total, count = self.objective(documents)
                objectives[f"alpha/validation_{name}"] = float(total.detach()) / count
            objectives["alpha/validation_gap"] = (
                objectives["alpha/validation_held_out"] - objectives["alpha/validation_pool"]
            )
            self.look = objectives
        return self.look

    def logged(self, step: int, out: Step, losses: Sequence[Sequence[Tensor]]) -> dict[str, float]:
        """The step's loss over all tokens, its gradient's norm and its rate."""
        entry = {
            "loss": self.reported(step, losses),
            "grad_norm": out.norm,
            "learning_rate": self.rate(step),
        }
        if self.config.family == "sft":  # TRL's count, which a pass of our own must not move
            self.token_count += sum(len(d.ids) for micro in self.data.micro[step] for d in micro)
            entry["num_tokens"] = float(self.token_count)
        return entry

    def reported(self, step: int, losses: Sequence[Sequence[Tensor]]) -> float:
        """The loss that the run reports: of all tokens, whatever was kept."""
        if self.config.family != "dpo":
            total = 0.0
            for m, of_micro in zip(self.data.micro[step], losses, strict=True):
                factors = self.signs(m, of_micro, None)
                total += sum(float(f @ loss) for f, loss in zip(factors, of_micro, strict=True))
            return total / sum(len(d.places) for m in self.data.micro[step] for d in m)
        terms = []
        for m, of_micro in zip(self.data.micro[step], losses, strict=True):
            for sign in self.signs(m, of_micro, None)[: len(m) // 2]:
                terms.append(
                    -math.log(1 - float(sign[0]) / self.config.beta)
                )  # sigma(s) = 1 - sigma(-s)
        return sum(terms) / len(terms)
