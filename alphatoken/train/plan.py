"""What a run would do, without weights, data or network: the plan that ``--dry_run`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from alphatoken.model.layer_choice import read_layers
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.model.protocol import DecoderAdapter, ScoredLinear, find_adapter
from alphatoken.model.scope import Scope
from alphatoken.train.checks import Given, check_run
from alphatoken.train.layouts import needs_own_forward
from alphatoken.train.policies import chosen_policy

__all__ = ["Layout", "Plan", "make_plan"]


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


@dataclass(frozen=True)
class Plan:
    """Everything that ``--dry_run`` prints.

    Attributes:
        command: "sft" or "dpo".
        model: name, class, depth and numbers of parameters.
        scored: layers, linears (name -> shape), parameters, estimator.
        layout: processes, and what is split between them.
        batch: rows and tokens of a step; at most, as if no row were shorter than the longest.
        validation: rows of a step, and the ratio to the training rows.
        steps: rows, epochs and optimizer steps, where the number of rows is known.
        options: option -> (value, default) of whatever differs from the default.
        notes: what the reader should know.
    """

    command: str
    model: dict[str, Any]
    scored: dict[str, Any]
    layout: dict[str, Any]
    batch: dict[str, Any]
    validation: dict[str, Any]
    steps: dict[str, Any]
    options: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        values["options"] = {k: {"value": v, "default": d} for k, (v, d) in self.options.items()}
        return values


def make_plan(
    model: nn.Module,
    args: Any,
    layout: Layout,
    *,
    command: str,
    name: str = "",
    rows: int | None = None,
    options: Mapping[str, tuple[Any, Any]] | None = None,
    given: Given | None = None,
) -> Plan:
    """The plan of a run.

    Args:
        model: of the right shape, on the meta device or any other; adapters attached.
        args: an ``AlphaSFTConfig`` or ``AlphaDPOConfig``.
        layout: of the processes.
        command: "sft" or "dpo".
        name: of the model.
        rows: training rows, held-out ones taken off; None where unknown.
        options: whatever differs from the defaults.
        given: which data sets the run has; None if it has all that it needs.

    Raises:
        ConfigError, CoverageError, UnsupportedError: what the run itself would refuse, see
            :func:`alphatoken.train.checks.check_run`.
    """
    adapter = find_adapter(model)
    scope = ParameterChoice.read(args.value_parameters).scope(
        adapter, read_layers(args.score_layers)
    )
    if args.policy != "all" or args.needs_values:
        policy = chosen_policy(args, None, args.FAMILY)
        check_run(model, layout.accelerator(), args, policy, given or Given())
    length = args.max_length or adapter.max_positions() or 1024
    own_forward = needs_own_forward(layout.accelerator(), args)
    batch = _batch(args, layout, command, length)
    share = args.validation_batch_size / batch["rows"]
    return Plan(
        command=command,
        model=_model_part(model, adapter, name),
        scored=_scored_part(model, scope, args),
        layout={**asdict(layout), "own_forward": own_forward and args.needs_values},
        batch=batch,
        validation=_validation_part(args, share),
        steps=_steps(args, batch["rows_per_micro_batch"], rows),
        options=dict(options or {}),
        notes=_notes(scope, args),
    )


def _model_part(model: nn.Module, adapter: DecoderAdapter, name: str) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "name": name,
        "class": adapter.identity().get("class", type(model).__qualname__),
        "layers": len(adapter.layers()),
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
    }


def _scored_part(model: nn.Module, scope: Scope, args: Any) -> dict[str, Any]:
    def shape(linear: ScoredLinear) -> list[int]:
        weight: Tensor = linear.weight
        return list(weight.mT.shape if linear.transposed else weight.shape)

    scored = sum(parameter.numel() for parameter in scope.parameters(biases=False).values())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "layers": list(scope.layers),
        "linears": {linear.name: shape(linear) for linear in scope.linears},
        "parameters": scored,
        "share_of_trainable": scored / trained,
        "mixers": dict(scope.mixers),
        "estimator": args.estimator,
        "policy": args.policy,
    }


def _batch(args: Any, layout: Layout, command: str, length: int) -> dict[str, Any]:
    micro = args.per_device_train_batch_size * layout.processes
    rows = micro * args.gradient_accumulation_steps
    sequences = rows * (2 if command == "dpo" else 1)
    kept = _kept_share(args)
    return {
        "rows": rows,
        "rows_per_micro_batch": micro,
        "accumulation": args.gradient_accumulation_steps,
        "length": length,
        "tokens_at_most": sequences * length,
        "keep_ratio": kept,
        "kept_at_most": math.ceil((1.0 if kept is None else kept) * sequences * length),
    }


def _kept_share(args: Any) -> float | None:
    """Share of the response tokens that is trained on; None where the policy's rule decides."""
    policy = chosen_policy(args, None, args.FAMILY)
    if policy is not None and policy.settings.mode == "native":
        return policy.native_ratio
    return 1.0 if args.policy in ("all", "harmless") else float(args.keep_ratio)


def _validation_part(args: Any, share: float) -> dict[str, Any]:
    if not args.needs_values or args.objective == "stability":
        return {"rows": 0, "mode": "none", "ratio": 0.0, "per_steps": 1}
    return {
        "rows": args.validation_batch_size,
        "mode": args.validation_mode,
        "ratio": share,
        "per_steps": args.direction_steps,
    }


def _steps(args: Any, per_micro_batch: int, rows: int | None) -> dict[str, Any]:
    """As transformers counts them; packing makes them fewer."""
    if args.max_steps > 0:
        return {"rows": rows, "epochs": None, "steps": args.max_steps}
    if rows is None:
        return {"rows": None, "epochs": args.num_train_epochs, "steps": None}
    batches = math.ceil(rows / per_micro_batch)
    an_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    steps = math.ceil(args.num_train_epochs * an_epoch)
    return {"rows": rows, "epochs": args.num_train_epochs, "steps": steps}


def _notes(scope: Scope, args: Any) -> list[str]:
    notes = []
    if scope.uncovered and args.uncovered == "skip":
        notes.append(f"{len(scope.uncovered)} matrices of the scored layers are left out.")
    if args.gradient_checkpointing and scope.first == 0:
        notes.append("All layers are scored: none of them is checkpointed.")
    if getattr(args, "packing", False):
        notes.append("Packing fills sequences, so there are fewer steps than counted.")
    return notes
