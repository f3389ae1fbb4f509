"""What a run costs, told from the shape of the model alone: FLOPs of a step, bytes of a process.

FLOPs are multiply-adds times two of the matrix products. What costs time without them (norms,
optimizer, communication, padding) is left out on both sides of every ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from alphatoken.estimate.estimators import CAPTURED, SWITCHED
from alphatoken.model.capture import Scope, delta_nets_of
from alphatoken.model.head import output_head
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.train.activations import Kept, Shape, kept_activations

__all__ = [
    "Layout",
    "Memory",
    "Overhead",
    "Work",
    "activations_of",
    "dual_bytes",
    "fisher_sums",
    "loss_bytes",
    "memory_of",
    "overhead_of",
    "scored_numbers",
    "scored_work",
    "step_flops",
    "work_of",
]

_OPTIMIZER_BYTES = {
    "adamw_torch": 8, "adamw_torch_fused": 8, "adamw_torch_xla": 8, "adamw_hf": 8,
    "adamw_anyprecision": 8, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2,
    "paged_adamw_32bit": 8, "lion_32bit": 4, "lion_8bit": 1, "rmsprop": 4, "adagrad": 4,
    "sgd": 0, "adafactor": 0,
}  # fmt: skip
"""State per trained float32 number, in bytes; an optimizer that is not here counts as AdamW."""

_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "8bit": 1, "4bit": 0.5}

_LOGIT_BLOCK = 32768
_TOKEN_BLOCK = 4096
"""Vocabulary and tokens of one block of logits in TRL's head."""

_LOSS_BLOCK = 2**22
"""Numbers of one block of logits in ``alphatoken.model.head`` and ``vocabulary``."""

_CHANGING = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Settings of models that scale or cap what their head says, and the values that do neither."""


@dataclass(frozen=True)
class Layout:
    """On how many processes the run is spread, and what is split between them.

    Attributes:
        kind: "single", "ddp", "fsdp1", "fsdp2", "zero0" to "zero3", or another backend's name;
            ``alphatoken.train.layouts`` says which of them work.
        processes: how many.
        mixed: under DeepSpeed, bf16 weights with float32 masters.
        checkpoints: FSDP's own activation checkpointing is on.
    """

    kind: str = "single"
    processes: int = 1
    mixed: bool = True
    checkpoints: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Layout:
        """From the mapping in an accelerate configuration file."""
        backend = str(config.get("distributed_type", "NO")).upper()
        processes = int(config.get("num_processes", 1))
        mixed = config.get("mixed_precision") == "bf16"
        if backend == "DEEPSPEED":
            stage = int(config.get("deepspeed_config", {}).get("zero_stage", 2))
            return cls(f"zero{stage}", processes, mixed)
        if backend == "FSDP":
            options = config.get("fsdp_config", {})
            kind = f"fsdp{int(options.get('fsdp_version', 1))}"
            checkpoints = bool(options.get("fsdp_activation_checkpointing", False))
            return cls(kind, processes, mixed, checkpoints)
        several = "ddp" if backend in ("NO", "MULTI_GPU", "MULTI_CPU") else backend.lower()
        return cls("single" if processes == 1 else several, processes, mixed)

    def accelerator(self) -> Any:
        """What ``alphatoken.train.layouts`` looks at, as an accelerator of this layout has it."""
        backend = "NO" if self.kind == "single" else "MULTI_GPU"
        if self.kind.startswith("fsdp"):
            backend = "FSDP"
        elif self.kind.startswith("zero"):
            backend = "DEEPSPEED"
        elif self.kind not in ("single", "ddp"):
            backend = self.kind.upper()
        return SimpleNamespace(
            distributed_type=backend,
            is_fsdp2=self.kind == "fsdp2",
            parallelism_config=None,
            ddp_handler=None,
            state=SimpleNamespace(
                deepspeed_plugin=SimpleNamespace(zero_stage=self.kind.removeprefix("zero")),
                fsdp_plugin=SimpleNamespace(activation_checkpointing=self.checkpoints),
                dynamo_plugin=None,
            ),
        )

    @property
    def own_forward(self) -> bool:
        """Whether scoring needs a forward of its own (DeepSpeed)."""
        return self.kind.startswith("zero")

    def share(self, what: str) -> float:
        """Part of "weights", "gradients", "optimizer" or "scored" that one process holds."""
        split = {
            "weights": ("fsdp2", "zero3"),
            "scored": ("fsdp2", "zero3"),
            "gradients": ("fsdp2", "zero2", "zero3"),
            "optimizer": ("fsdp2", "zero1", "zero2", "zero3"),
        }
        return 1 / self.processes if self.kind in split[what] else 1.0


@dataclass(frozen=True)
class DeltaShape:
    """One gated delta net, computed in chunks (``model.delta_rule``); FLOPs per token.

    Attributes:
        heads: value heads; key: width of a key; value: of a value.
        taps: of the convolution, on ``channels``.
        chunk: positions of a chunk.
    """

    heads: int
    key: int
    value: int
    taps: int
    channels: int
    chunk: int

    @property
    def forward(self) -> float:
        """Convolution, the chunk's triangular system, its products, and three with the state."""
        d, v, c = self.key, self.value, self.chunk
        rule = 4 * c * d + c * (d + v) + 2 * c * v + 6 * d * v
        return float(self.heads * rule + 2 * self.taps * self.channels)

    def band(self, window: int) -> float:
        """The self-only backward, and coefficients and products of Value-Propagation."""
        d, v, c = self.key, self.value, self.chunk
        system = 2 * c * d + c * c  # made for each of the two
        own = c * (4 * v + 2 * d) + 6 * d * v
        blocks = (window + c - 1) // c  # later chunks that a window reaches
        coefficients = 6 * c * d + 2 * c * c + 2 * d * d + blocks * (2 * c * d + 2 * d * d)
        carried = (1 + blocks) * self.taps * 2 * c * v
        return float(self.heads * (2 * system + own + coefficients + carried))


@dataclass(frozen=True)
class Work:
    """FLOPs of one forward, per token, of a model and of its parts.

    Attributes:
        linear: all matrices of each layer.
        attention: softmax attention, or gated delta net, of each layer; 0 for other mixers, which
            are left out.
        widths: query width (heads times head dimension) of each layer with softmax attention.
        head: the output projection.
        weights: the trainable matrices of the layers and the head: one more of these is what
            their gradients cost.
        head_trained: the output projection is among them.
        nets: the gated delta net of each layer that has one; empty: no layer has.
    """

    linear: tuple[float, ...]
    attention: tuple[float, ...]
    widths: tuple[float, ...]
    head: float
    weights: float
    head_trained: bool
    nets: tuple[DeltaShape | None, ...] = ()

    @property
    def forward(self) -> float:
        """The whole model."""
        return sum(self.linear) + sum(self.attention) + self.head

    def errors(self, layers: tuple[int, ...]) -> float:
        """A backward through these layers without any gradient of a weight."""
        return sum(self.linear[i] + 2 * self.attention[i] for i in layers)


def work_of(adapter: DecoderAdapter, length: int) -> Work:
    """Count the matrices of the adapter's model for sequences of ``length`` tokens."""
    base: Any = adapter.model
    text = base.config.get_text_config()
    head = base.get_output_embeddings()
    blocks = adapter.layers()
    names = {module: name for name, module in base.named_modules()}
    other = adapter.other_mixers(range(len(blocks)))
    active = _active_experts(text)
    linear, attention, widths, nets = [], [], [], []
    for index, block in enumerate(blocks):
        linear.append(2 * sum(active.get(p.dim(), 0) * p.numel() for p in block.parameters()))
        width = 0.0 if names[block] in other else _attention_width(text)
        reach = min(length, _window(text, index) or length)
        keys = length / 2 if reach == length else reach  # causal: half of the past on average
        net = _delta_shape(delta_nets_of(adapter, index), length)
        attention.append(4 * width * keys if net is None else net.forward)
        widths.append(width)
        nets.append(net)
    trained = {
        p: active.get(p.dim(), 0) * p.numel()
        for part in (*blocks, head)
        for p in part.parameters()
        if p.requires_grad
    }
    return Work(
        tuple(linear),
        tuple(attention),
        tuple(widths),
        2.0 * head.weight.numel(),
        2.0 * sum(trained.values()),
        bool(head.weight.requires_grad),
        tuple(nets),
    )


def _delta_shape(modules: Sequence[Any], length: int) -> DeltaShape | None:
    if not modules:
        return None
    (net,) = modules
    return DeltaShape(
        net.num_v_heads,
        net.head_k_dim,
        net.head_v_dim,
        net.conv1d.kernel_size[0],
        net.conv1d.in_channels,
        min(64, length),
    )


def _active_experts(text: Any) -> dict[int, float]:
    """Share of a parameter that works on one token, by its number of axes; 3 are experts."""
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    return {2: 1.0, 3: (getattr(text, "num_experts_per_tok", None) or experts) / experts}


def _attention_width(text: Any) -> float:
    heads = int(text.num_attention_heads)
    return float(heads * int(getattr(text, "head_dim", None) or text.hidden_size // heads))


def _window(text: Any, layer: int) -> int | None:
    kinds = getattr(text, "layer_types", None) or []
    if layer < len(kinds) and kinds[layer] != "sliding_attention":
        return None
    return getattr(text, "sliding_window", None)


# --- time --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overhead:
    """Work of one step over that of the same step without valuation, both counted in FLOPs.

    Attributes:
        floor: 1 + what the estimator cannot do without: errors through the scored layers, their
            contraction, and the validation side.
        expected: 1 + all parts.
        parts: name -> share of the unmasked step.
    """

    floor: float
    expected: float
    parts: dict[str, float]


def step_flops(work: Work, args: Any, *, reference_forward: bool = False) -> float:
    """FLOPs of an unmasked training step, a token; ``reference_forward`` as in ``overhead_of``."""
    every = tuple(range(len(work.linear)))
    again = _again(work, args)
    # TRL's head computes its logits once more in each backward, instead of keeping them.
    step = work.forward + work.errors(every) + 2 * work.head + work.weights + again
    return step + work.forward if reference_forward else step


def _again(work: Work, args: Any) -> float:
    """Layers that run a second time under gradient checkpointing."""
    return sum(work.linear) + sum(work.attention) if args.gradient_checkpointing else 0.0


_FLOOR = ("errors of the training rows", "contraction", "validation forward", "validation errors")


def overhead_of(
    work: Work,
    scope: Scope,
    args: Any,
    *,
    validation_share: float,
    own_forward: bool,
    reference_forward: bool = False,
) -> Overhead:
    """What valuation adds to a step, part by part.

    Args:
        work: of the model, adapters included.
        scope: what is scored.
        args: the trainer's configuration.
        validation_share: validation rows of a step over its training rows.
        own_forward: scoring runs a forward of its own.
        reference_forward: the step has the forward of a reference model in it (DPO).
    """
    if not args.needs_values:
        return Overhead(1.0, 1.0, {})
    every = tuple(range(len(work.linear)))
    from_first = tuple(range(scope.first, len(every)))
    scored = 2.0 * scored_work(scope)
    step = step_flops(work, args, reference_forward=reference_forward)
    # TRL's head computes the gradient of its weight in each backward, asked for or not.
    head_weight = work.head if work.head_trained and args.value_parameters != "all" else 0.0
    errors = work.errors(from_first) + work.head
    if args.estimator == "label":  # a forward of values and tangents in place of the errors
        errors = 2 * sum(work.linear[i] + work.attention[i] for i in from_first) + work.head
    rows = 0.0 if args.objective == "stability" else validation_share / args.direction_steps
    parts = {
        "errors of the training rows": errors,
        "contraction": scored,
        "validation forward": rows * work.forward,
        "validation errors": rows * (work.errors(from_first) + work.head + scored),
        "logits once more": work.head,
        "unused gradient of the head": head_weight,
    }
    if args.estimator in SWITCHED:
        parts["attention weights, Value-Propagation"] = _band(work, args, from_first)
    if own_forward:
        parts["forward of its own"] = work.forward
    elif _again(work, args):
        saved = sum(work.linear[i] + work.attention[i] for i in from_first)
        parts["scored layers not recomputed"] = -saved
    shares = {name: flops / step for name, flops in parts.items() if flops}
    floor = 1 + sum(shares.get(name, 0.0) for name in _FLOOR)
    return Overhead(floor, 1 + sum(shares.values()), shares)


def _band(work: Work, args: Any, layers: tuple[int, ...]) -> float:
    """Attention logits recomputed for their band, and the banded products."""
    length = args.max_length or 1024
    window = min(args.window if args.window is not None else length, length)
    attention = sum(2 * work.widths[i] * length + 4 * work.widths[i] * window for i in layers)
    nets = (work.nets[i] for i in layers if work.nets)
    return attention + sum(net.band(window) for net in nets if net is not None)


# --- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one process, by what they hold, and the largest sum that exists at one time.

    The libraries themselves (on a CPU: Python and everything imported, some 0.5 GiB) are left out.

    Attributes:
        weights: of the model.
        gradients: of what is trained.
        optimizer: its state.
        reference: DPO's second model.
        fisher: Fisher and reference weights of the scored layers, or the latter alone.
        directions: G, V and the running mean of G, kept from step to step.
        activations: what autograd keeps of the training rows.
        validation: what building G and V needs for a while.
        valuing: what valuing the training rows needs for a while.
        backward: what the start of the training rows' backward needs for a while.
        accumulated: gradients of earlier micro-batches are there while a step goes on.
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    reference: float = 0.0
    fisher: float = 0.0
    directions: float = 0.0
    activations: float = 0.0
    validation: float = 0.0
    valuing: float = 0.0
    backward: float = 0.0
    accumulated: bool = False

    @property
    def moments(self) -> dict[str, float]:
        """The sums at the moments of a step that can be its largest."""
        held = self.weights + self.optimizer + self.reference + self.fisher + self.directions
        graph = held + self.activations + (self.gradients if self.accumulated else 0.0)
        found = {
            "the direction is built": held + self.validation,
            "the training rows are valued": graph + self.valuing,
            "their backward begins": graph + self.backward,
            "the optimizer steps": held + self.gradients,
        }
        if not self.valuing:
            del found["the training rows are valued"]
        if not self.validation:
            del found["the direction is built"]
        return found

    @property
    def peak(self) -> str:
        """When it is largest."""
        return max(self.moments, key=lambda moment: self.moments[moment])

    @property
    def total(self) -> float:
        """The largest sum at one time."""
        return max(self.moments.values())

    @property
    def valuation(self) -> float:
        """What only valuation keeps."""
        return self.fisher + self.directions


def memory_of(
    adapter: DecoderAdapter, scope: Scope, args: Any, layout: Layout, *, command: str, dtype: str
) -> Memory:
    """Predict the peak memory of one process, from shapes alone.

    Weights and gradients in ``dtype`` (a torch dtype's name, "8bit" or "4bit"); under DeepSpeed's
    mixed precision in bf16, with float32 masters beside the optimizer's state. Rows are taken to
    be ``max_length`` long.

    Exactness: within 15 % of measured processes on one CPU, for the settings of
    ``tests/integration/test_memory_model.py``; elsewhere an estimate.
    """
    parameters = list(adapter.model.parameters())
    every = float(sum(p.numel() for p in parameters))
    trained = float(sum(p.numel() for p in parameters if p.requires_grad))
    lora = hasattr(adapter.model, "peft_config")
    narrow = layout.own_forward and layout.mixed
    width = 2 if narrow else _WIDTHS.get(dtype, 4)
    state = float(_OPTIMIZER_BYTES.get(str(getattr(args.optim, "value", args.optim)), 8))
    if state >= 4 and not narrow:  # torch's optimizers keep it in the weights' dtype
        state = state * max(width, 2) / 4
    second = command == "dpo" and not lora and not args.precompute_ref_log_probs
    batch = _Batch.read(adapter, args, command, "bfloat16" if narrow else dtype)
    kept = _kept(adapter, scope, args, batch, layout)
    return Memory(
        weights=width * every * layout.share("weights"),
        gradients=max(width, 2) * trained * layout.share("gradients"),
        optimizer=(state + (4 if narrow else 0)) * trained * layout.share("optimizer"),
        reference=width * every * layout.share("weights") if second else 0.0,
        fisher=_fisher_bytes(scope, args, width) * layout.share("scored"),
        directions=_direction_bytes(scope, args, layout),
        activations=kept.training,
        validation=_building_bytes(adapter, scope, args, layout, batch, kept.validation),
        valuing=_valuing_bytes(adapter, scope, args, batch),
        backward=kept.layer + batch.head(gradient=True),
        accumulated=args.gradient_accumulation_steps > 1,
    )


def scored_numbers(scope: Scope) -> int:
    """How many numbers the scored parameters are."""
    return sum(int(parameter.numel()) for parameter in scope.parameters(biases=False).values())


def scored_work(scope: Scope) -> float:
    """How many of these numbers work on one token: of experts, those that it is sent to."""
    resting = sum((1.0 - linear.active) * linear.weight.numel() for linear in scope.linears)
    return scored_numbers(scope) - resting


def fisher_sums(scope: Scope, structure: str) -> float:
    """Bytes of a Fisher in float32: "diagonal", or the two factors of each scored linear."""
    if structure == "diagonal":
        return 4.0 * scored_numbers(scope)
    return 4.0 * sum(a * a + b * b for a, b in _sizes(scope))


def _sizes(scope: Scope) -> list[tuple[int, int]]:
    """(out, in) of the scored linears, of every expert for itself."""
    shapes = [linear.weight.shape for linear in scope.linears]
    return [(int(a), int(b)) for *many, a, b in shapes for _ in range(math.prod(many))]


def loss_bytes(adapter: DecoderAdapter, positions: int, width: int) -> float:
    """What losses of a forward of our own hold while they are taken, of numbers ``width`` wide.

    Logits that are formed at once, their gradient, and one block of workspace.
    """
    numbers = _formed_logits(adapter, positions)
    return 2.0 * numbers * width + 4.0 * 2.5 * min(numbers, _LOSS_BLOCK)


def dual_bytes(adapter: DecoderAdapter, positions: int, width: int) -> float:
    """What a dual forward of our own holds in the head.

    Four tensors as large as the logits that are formed at once: those, and their tangents, which
    are two products and their sum.
    """
    return 4.0 * _formed_logits(adapter, positions) * width


def _formed_logits(adapter: DecoderAdapter, positions: int) -> float:
    """Numbers of logits that a forward of our own holds at once: one block, or all of them.

    All where the model changes what its head says; see ``alphatoken.model.response_losses``.
    """
    base: Any = adapter.model
    text = base.config.get_text_config()
    plain = output_head(adapter) is not None and all(
        getattr(text, name, None) in (None, same) for name, same in _CHANGING.items()
    )
    numbers = positions * int(base.get_output_embeddings().weight.shape[0])
    return float(min(numbers, _LOSS_BLOCK) if plain else numbers)


def _fisher_bytes(scope: Scope, args: Any, width: float) -> float:
    """Fisher (float32) and reference weights of the scored linears, by which drift is logged."""
    if not args.needs_values:
        return 0.0
    if not args.reads_fisher:
        return max(width, 2) * float(sum(a * b for a, b in _sizes(scope)))
    if args.fisher_offload:
        return 0.0
    return fisher_sums(scope, args.retention) + max(width, 2) * scored_numbers(scope)


def _direction_bytes(scope: Scope, args: Any, layout: Layout) -> float:
    """G, its running mean, its parts where values have errors, and V: of the scored linears."""
    if not args.needs_values:
        return 0.0
    held = 0  # as large as the scored weights together
    if args.objective != "stability":
        held += 1 + (args.running_mean > 0)
        if args.policy == "harmless":
            held += math.ceil(args.validation_batch_size / args.validation_rows_at_once)
    if args.retention != "none" and args.objective != "adaptation":
        held += not args.fisher_offload or args.estimator not in CAPTURED
    return 4.0 * held * scored_numbers(scope) * layout.share("scored")


@dataclass(frozen=True)
class _Batch:
    """Tokens of one forward, and the head that turns them into losses."""

    rows: int
    validation_rows: int
    length: int
    vocabulary: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    fused: bool
    head_trained: bool

    @classmethod
    def read(cls, adapter: DecoderAdapter, args: Any, command: str, dtype: str) -> _Batch:
        base: Any = adapter.model
        text = base.config.get_text_config()
        head = base.get_output_embeddings().weight
        rows = 0
        if args.needs_values and args.objective != "stability":
            rows = args.validation_rows_at_once or args.validation_batch_size
        return cls(
            args.per_device_train_batch_size * (2 if command == "dpo" else 1),
            rows,
            args.max_length or adapter.max_positions() or 1024,
            int(head.shape[0]),
            int(head.shape[1]),
            int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            getattr(torch, dtype, torch.bfloat16),
            not args.use_cpu,
            bool(head.requires_grad),
        )

    @property
    def width(self) -> int:
        """Bytes of a number of an activation."""
        return self.dtype.itemsize

    def head(self, *, gradient: bool) -> float:
        """TRL's head in its backward: one block of logits and what is made of it.

        Fused (Triton), the block is turned into its gradient in place. In plain torch eight more
        of its size, in float32, live at once. The weight's gradient is summed in float32.
        """
        tokens = min(self.rows * self.length, _TOKEN_BLOCK)
        if self.fused:
            block = float(tokens * _LOGIT_BLOCK * self.width)
        else:
            numbers = tokens * min(self.vocabulary, _LOGIT_BLOCK)
            block = numbers * (self.width + 4 * (7.25 + (self.width < 4)))
        weight = 4.0 * self.vocabulary * self.hidden if gradient and self.head_trained else 0.0
        return block + weight + 4.0 * self.rows * self.length * self.hidden


def _kept(adapter: DecoderAdapter, scope: Scope, args: Any, batch: _Batch, layout: Layout) -> Kept:
    shape = Shape(
        batch.rows,
        batch.validation_rows,
        batch.length,
        batch.dtype,
        bool((args.bf16 or args.fp16) and batch.width > 2),
        bool(args.gradient_checkpointing),
        bool(args.needs_values and not layout.own_forward),
    )
    return activations_of(adapter, scope, shape)


def activations_of(adapter: DecoderAdapter, scope: Scope, shape: Shape) -> Kept:
    """``kept_activations``, or a guess where shapes alone do not tell."""
    return kept_activations(adapter, scope, shape) or _guessed(adapter, scope, shape)


def _guessed(adapter: DecoderAdapter, scope: Scope, shape: Shape) -> Kept:
    """Inputs and outputs of all linears, where a forward cannot be followed on shapes alone."""
    width = 2 if shape.autocast else shape.dtype.itemsize
    layers = [
        float(sum(sum(p.shape) for p in block.parameters() if p.dim() == 2 and min(p.shape) > 64))
        for block in adapter.layers()
    ]
    tokens = shape.rows * shape.length
    above = sum(layers[scope.first :])
    validation = shape.validation_rows * shape.length * width * above
    if not shape.checkpointing:
        return Kept(tokens * width * sum(layers), 0.0, validation)
    text: Any = adapter.model.config.get_text_config()  # type: ignore[operator, union-attr]
    boundaries = len(layers) * int(text.hidden_size) + (above if shape.observed else 0.0)
    return Kept(tokens * width * boundaries, tokens * width * max(layers), validation)


def _building_bytes(
    adapter: DecoderAdapter,
    scope: Scope,
    args: Any,
    layout: Layout,
    batch: _Batch,
    saved: float,
) -> float:
    """G and V anew, beside the old ones: the validation graph, its logits and the sums.

    Each gradient is added to its sum as the backward makes it, and lies beside none.
    """
    if not args.needs_values:
        return 0.0
    size = 4.0 * scored_numbers(scope) * layout.share("scored")
    losses = loss_bytes(adapter, batch.validation_rows * batch.length, batch.width)
    return saved + losses + size


def _valuing_bytes(adapter: DecoderAdapter, scope: Scope, args: Any, batch: _Batch) -> float:
    """What the values of the training rows need beside their graph and the directions."""
    if not args.needs_values:
        return 0.0
    tokens = batch.rows * batch.length
    if args.estimator != "label":
        return max(batch.head(gradient=False), _layer_bytes(batch, tokens))
    duals = dual_bytes(adapter, tokens, batch.width)
    return 4.0 * scored_numbers(scope) + max(duals, _layer_bytes(batch, tokens))


def _layer_bytes(batch: _Batch, tokens: int) -> float:
    """One layer's errors, and the attention weights of a block of queries."""
    return batch.width * tokens * (4.0 * batch.intermediate + 4.0 * batch.hidden)
