"""Runs of several processes: their layout and what it rules out, sums, one threshold for all.

The order of the data. accelerate deals batches like cards: of each round of ``world`` batches,
rank r gets the r-th. So the batches of an optimizer step, in the order in which one process with
``world`` times as many accumulation steps would see them, are (micro-batch, rank). Whatever is
decided over all tokens of a step (ties, random draws) is decided in the order (micro-batch, rank,
row, position), and comes out as in one process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import AlphaTokenError, ConfigError, InputError, UnsupportedError
from alphatoken.model.choice import ParameterChoice
from alphatoken.model.sharding import MasterWeights
from alphatoken.support.resume import SAMPLED_NUMBERS, tensor_digest
from alphatoken.train.hooks import checkpointing_option
from alphatoken.train.policy import TokenPolicy, has_pass
from alphatoken.train.shards import Fsdp2Sharding, Zero3Sharding

# --- layouts --------------------------------------------------------------------------------------

SHARDED = ("fsdp2", "zero3")


def layout(accelerator: Any) -> str:
    """Name of the layout of a run over processes.

    "single", "ddp", "fsdp2", "zero1", "zero2" or "zero3"; and, which :func:`refused_layouts`
    refuses, "fsdp1", "zero0" or the name of another backend.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "NO":
        return "single"
    if kind == "FSDP":
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    if kind == "DEEPSPEED":
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return "ddp" if kind.startswith("MULTI_") else kind.lower()


def sharding_of(accelerator: Any, model: nn.Module) -> Fsdp2Sharding | Zero3Sharding | None:
    """Access to the prepared model's weights, or None if each process has them all."""
    kind = layout(accelerator)
    if kind not in SHARDED:
        return None
    plain = accelerator.unwrap_model(model)
    return Fsdp2Sharding(plain) if kind == "fsdp2" else Zero3Sharding(plain)


def needs_own_forward(accelerator: Any, options: Any) -> bool:
    """True if scoring runs its own forward: under DeepSpeed, by a global threshold, by option."""
    own_forward = options.scoring_forward == "own" or options.keep_scope == "global"
    # DeepSpeed's engine follows its own forward through its own backward, once; errors asked for on
    # the way would be taken for that backward.
    return own_forward or layout(accelerator).startswith("zero")


def name_wrapped_layers(accelerator: Any, model: nn.Module, config: Any) -> None:
    """Have FSDP gather weights by those layer classes that this model has, before it is wrapped."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    named_by_user = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or (config or {}).get(
        "transformer_layer_cls_to_wrap"
    )
    if plugin is None or named_by_user:
        return
    # Accelerate takes all classes that the model's family names, and ends at the first one that is
    # not there: the blocks of a vision tower, in a model of the same family for text alone. It also
    # keeps the names of the first model for all later ones of the process. What the user named, in
    # the launcher's configuration or the trainer's, stays.
    classes = {type(module).__name__ for module in model.modules()}
    blocks = [name for name in getattr(model, "_no_split_modules", None) or () if name in classes]
    if blocks:
        plugin.transformer_cls_names_to_wrap = blocks


def check_same_weights(accelerator: Any, model: nn.Module) -> None:
    """Check that all processes hold the same weights, before the model is wrapped.

    Raises:
        ConfigError: they do not: a model was made at random by each, or loaded by the first
            alone.
    """
    ranks = Ranks(accelerator)
    if ranks.world == 1 or layout(accelerator) != "fsdp2":
        return
    own = ranks.gather_objects(tensor_digest(model.named_parameters(), numbers=SAMPLED_NUMBERS))
    if len(set(own)) > 1:
        raise ConfigError(
            "the processes hold different weights",
            got=f"process {next(i for i, one in enumerate(own) if one != own[0])} has others than "
            "the first",
            why="Fisher, start weights and static passes are taken before FSDP hands the first "
            "one's weights on",
            remedy="load one model in all of them, where it must be with "
            "fsdp_cpu_ram_efficient_loading: false",
        )


# --- what a layout rules out ----------------------------------------------------------------------


def refused_layouts(
    accelerator: Any, args: Any, model: nn.Module, policy: TokenPolicy | None = None
) -> Iterator[AlphaTokenError]:
    """Reasons for which a layout cannot be had, or something cannot be had in it.

    Args:
        accelerator: of the trainer.
        args: the trainer's configuration.
        model: before or after ``accelerator.prepare``.
        policy: of the run, if it weighs tokens.
    """
    yield from _refused_backends(accelerator, args)
    yield from _refused_devices(accelerator, args, model)
    yield from _refused_options(accelerator, args)
    if policy is not None:
        yield from _refused_policies(layout(accelerator), model, policy)


def _refused_backends(accelerator: Any, args: Any) -> Iterator[ConfigError]:
    kind = layout(accelerator)
    if kind not in ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3"):
        yield ConfigError(
            "token values are not available under this distributed backend",
            got=kind,
            why="they were not shown to be right there",
            remedy="use fsdp_version: 2" if kind == "fsdp1" else "use DDP, FSDP2 or ZeRO-1, 2 or 3",
        )
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        size = getattr(parallel, f"{name}_size", 1) or 1
        if size > 1:
            full = {"tp": "tensor", "cp": "context", "sp": "sequence"}[name]
            yield ConfigError(
                f"{full} parallelism does not work with token values",
                got=f"{name}_size={size}",
                why="each process holds a piece of a layer or sequence, so inputs and errors of "
                "scored linears are pieces too",
                remedy="use FSDP2 or ZeRO-3 for models that do not fit",
            )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == "fsdp2" and plugin is not None and plugin.activation_checkpointing:
        yield ConfigError(
            "FSDP's activation_checkpointing wraps every decoder layer",
            got="fsdp_activation_checkpointing: true",
            why="the scored layers must run without checkpointing",
            remedy=f"{checkpointing_option(args)}=True of the trainer, which is paused on them",
        )


def _refused_devices(accelerator: Any, args: Any, model: nn.Module) -> Iterator[ConfigError]:
    if getattr(args, "n_gpu", 1) > 1:
        yield ConfigError(
            "torch.nn.DataParallel does not work with token values",
            got=f"{args.n_gpu} GPUs in one process",
            why="its replicas live for one forward only",
            remedy="start one process a GPU with `accelerate launch`, or show it one GPU",
        )
    spread = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(spread) > 1:
        yield ConfigError(
            "a model that is spread over several devices does not work with token values",
            got=f"device_map over {', '.join(sorted(spread))}",
            why="directions and errors of its layers would lie on different devices; TRL spreads "
            "a model that is given by its name over all GPUs that one process sees",
            remedy="one process a GPU with `accelerate launch`, or model_init_kwargs={'device_map':"
            " None} and one GPU shown",
        )
    handler = accelerator.ddp_handler
    if getattr(handler, "static_graph", False) or getattr(args, "ddp_static_graph", False):
        yield ConfigError(
            "DistributedDataParallel with static_graph does not work with token values",
            got="static_graph=True",
            why="a scored first step records the wrong graph; gradients are then silently never "
            "averaged over processes",
            remedy="ddp_static_graph=False",
        )


def _refused_options(accelerator: Any, args: Any) -> Iterator[ConfigError]:
    kind, option = layout(accelerator), checkpointing_option(args)
    reentrant = (getattr(args, f"{option}_kwargs", None) or {}).get("use_reentrant")
    if getattr(args, option, False) and reentrant and not needs_own_forward(accelerator, args):
        yield ConfigError(
            "reentrant gradient checkpointing does not share its forward with scoring",
            got="use_reentrant=True",
            why="autograd cannot ask such a forward for the errors of single layers",
            remedy=f"{option}_kwargs={{'use_reentrant': False}}, or scoring_forward='own'",
        )
    captured = ParameterChoice.read(args.parameters).captured
    mixed = str(getattr(accelerator, "mixed_precision", "no"))
    precision = "bf16" if getattr(args, "bf16", False) else mixed
    moves_weights = args.estimator == "label" or not captured
    if kind in SHARDED and moves_weights and precision != "no":
        yield ConfigError(
            "label values on sharded weights need forwards in float32",
            got=f"mixed precision {precision}, estimator={args.estimator!r}, layout {kind}",
            why="they are differences between forwards at weights that move by little, which drown "
            "in 16 bits",
            remedy="no mixed precision; or DDP, ZeRO-1 or 2; or estimator='alphatoken', 'direct' "
            "or 'path' over 'linears' or 'linears,experts'",
        )
    if args.preconditioner is not None and kind.startswith("zero"):
        yield ConfigError(
            "preconditioned values cannot be had of DeepSpeed's optimizer",
            got=f"preconditioner={args.preconditioner!r}, layout {kind}",
            why="its state lies in flat partitions, each with parts of many parameters",
            remedy="preconditioner=None; or DDP or FSDP2, whose state has the parameter's shape",
        )
    if args.preconditioner == "full" and kind == "fsdp2" and moves_weights:
        yield ConfigError(
            "preconditioner='full' cannot be had for label values on sharded weights",
            got=f"estimator={args.estimator!r}, parameters={args.parameters!r}, layout {kind}",
            why="the gradient of each step would be reduced by a backward of its own",
            remedy="preconditioner='frozen', or DDP; or estimator='alphatoken', 'direct' or 'path'"
            " over 'linears' or 'linears,experts'",
        )


def _refused_policies(
    kind: str, model: nn.Module, policy: TokenPolicy
) -> Iterator[AlphaTokenError]:
    remedy = "a layout in which each process has the weights (DDP, ZeRO-1 or 2)"
    # At every batch, not only in a pass before training.
    if policy.needs.model and not has_pass(policy) and kind in SHARDED:
        yield UnsupportedError(
            f"policy '{policy.name}' runs the model itself, and the weights are sharded",
            why="no process has whole weights outside the trainer's own forward",
            remedy=remedy,
        )
    if policy.needs.entropy and kind in SHARDED:
        yield UnsupportedError(
            f"policy '{policy.name}' reads the output head, which is spread over processes",
            got=f"layout {kind}",
            remedy=remedy,
        )
    # Whole weights that were handed over are cut up after the pass; those that a run loads by name
    # (on the meta device where it is only planned) are cut up as they are loaded.
    sharded = any(weight.is_meta or weight.numel() == 0 for weight in model.parameters())
    if has_pass(policy) and kind == "zero3" and sharded:
        yield UnsupportedError(
            f"policy '{policy.name}' cannot run its pass over the rows on sharded weights",
            got=f"layout {kind}",
            remedy="run it once in one process; the files in policy_cache are then found here",
        )


# --- sums and decisions over processes ------------------------------------------------------------


class Ranks:
    """This process among those of a run.

    All methods are collective: every process calls them, in the same order. With one process they
    communicate nothing.

    Args:
        accelerator: accelerate's ``Accelerator``, or None for one process.

    Attributes:
        rank: number of this process.
        world: number of processes.
        device: of this process's tensors.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.world: int = 1 if accelerator is None else accelerator.num_processes
        self.device = torch.device("cpu") if accelerator is None else accelerator.device

    def sum_gradients(
        self, sums: dict[str, Tensor], count: float, *, sharded: bool = False
    ) -> tuple[dict[str, Tensor], float]:
        """Sums of gradients and of their counts over the processes, in place.

        The result is the same on every process, bit for bit.

        Args:
            sums: parameter name -> this process's sum; the same names everywhere.
            count: what the mean divides by, this process's part.
            sharded: the sums are parts of tensors that ``Sharding.reduce`` has summed already.

        Raises:
            InputError: the processes have different numbers of tensors.
        """
        if self.world == 1:
            return sums, count
        head = torch.tensor([count, len(sums)], dtype=torch.float64, device=self.device)
        dist.all_reduce(head)
        total, names = head.tolist()
        if names != self.world * len(sums):
            raise InputError(
                "the processes have different gradients to add up",
                got=f"{len(sums)} on rank {self.rank}, {int(names)} on {self.world} together",
            )
        if not sharded:
            for name in sorted(sums):
                sums[name] = sums[name].contiguous()
                dist.all_reduce(sums[name])
        return sums, total

    def gather_objects(self, item: Any) -> list[Any]:
        """One picklable object of each process, in the order of ranks, on every process."""
        if self.world == 1:
            return [item]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, item)
        return gathered

    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        """The object of one process, on every process."""
        if self.world == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=source, device=self.device)
        return box[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor, 0)

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any process."""
        if self.world == 1:
            return flag
        raised = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(raised)
        return bool(raised)


Decide = Callable[[Tensor, Tensor], Tensor]
"""(values (1, n), mask (1, n), all True) -> weights (1, n)."""


def global_selection(
    ranks: Ranks, values: Sequence[Tensor], masks: Sequence[Tensor], decide: Decide
) -> list[Tensor]:
    """Token weights of one optimizer step, decided over all its micro-batches on all processes.

    Args:
        ranks: this process among the others.
        values: of each micro-batch of this process, (b, t).
        masks: response tokens, the same shapes.
        decide: the policy. It sees the response tokens of the whole step in one row, in the
            order (micro-batch, rank, row, position), which is the order in which one process
            would see them; so ties fall as there, and so do random draws, provided that it draws
            alike on every process (seed a generator with the step).

    Returns:
        Weights of this process's micro-batches, 0 off the masks, in the dtype of their values.
        Their sum over the step is what the policy gives one batch: ``ceil(rho n)`` for a mask.

    Raises:
        What ``decide`` raises, on every process.
    """
    chosen = [v.detach()[m].double().cpu() for v, m in zip(values, masks, strict=True)]
    of_ranks = ranks.gather_objects(chosen)
    pieces: list[Tensor] = [torch.empty(0, dtype=torch.float64)]
    places: dict[tuple[int, int], int] = {}
    start = 0
    for step in range(max(map(len, of_ranks))):
        for rank, own in enumerate(of_ranks):
            if step < len(own):  # the last round of an epoch may not reach every rank
                places[step, rank] = start
                pieces.append(own[step])
                start += len(own[step])
    row = torch.cat(pieces).to(ranks.device)
    everything = torch.ones_like(row, dtype=torch.bool)
    decided = decide(row[None], everything[None])[0] if len(row) else row
    weights = []
    for step, (value, mask) in enumerate(zip(values, masks, strict=True)):
        start = places[step, ranks.rank]
        weight = torch.zeros_like(value)
        weight[mask] = decided[start : start + len(chosen[step])].to(value)
        weights.append(weight)
    return weights


def even_micro_batches(
    rows: Sequence[int], rank: int, world: int, size: int | None
) -> list[tuple[int, ...]]:
    """This process's rows in micro-batches, equally many on every process.

    Every ``world``-th row is this process's; ``size`` is the most rows of one micro-batch, None for
    all at once. Where the rows cannot be dealt out evenly, some micro-batches have one row more.
    """
    # Sharded weights are gathered in every forward, so a process that ran one forward less would
    # leave the others waiting. ValidationPool.share_of has seen to as many rows as processes.
    longest = -(-len(rows) // world)
    pieces = 1 if size is None else min(-(-longest // size), len(rows) // world)
    return in_pieces(tuple(rows[rank::world]), pieces)


def in_pieces(rows: tuple[int, ...], pieces: int) -> list[tuple[int, ...]]:
    """Rows in so many pieces of consecutive ones, whose numbers of rows differ by one at most."""
    bounds = [len(rows) * i // pieces for i in range(pieces + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(bounds)]


# --- weights --------------------------------------------------------------------------------------


def master_weights(accelerator: Any, model: nn.Module) -> MasterWeights | None:
    """The float32 weights that DeepSpeed's optimizer moves, where the model holds 16-bit copies.

    Returns:
        Name and parameter to its weight, whole, or a part under ZeRO-3. Collective. None if there
        are none, or if they are kept on disk.
    """
    if not layout(accelerator).startswith("zero"):
        return None
    # A weight in bfloat16 is rounded to 2^-9 of itself. Early in a run, and at small learning
    # rates, it has moved by less than that from the reference, so that a drift read off the copies
    # is rounding. The optimizer's own weights have none.
    plain = accelerator.unwrap_model(model)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    if not any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.values()):
        return None
    sharding = sharding_of(accelerator, model)
    if isinstance(sharding, Zero3Sharding):
        optimizers = (getattr(p, "_z3_optimizer", None) for p in parameters.values())
        if any(getattr(optimizer, "swap_optimizer", False) for optimizer in optimizers):
            return None  # on disk: each matrix would cost a read of its whole group
        return sharding.master

    @torch.no_grad()
    def whole(name: str, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        master = safe_get_full_fp32_param(parameters[name])
        return parameter.detach() if master is None else master

    return whole


def rounded_reference(drift: FisherDrift, model: nn.Module) -> FisherDrift:
    """The same Fisher, its reference rounded to the dtypes of a model with master weights."""
    # They began as what the 16-bit copies were then, so that the drift is exactly zero at the
    # start.
    dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    reference = {n: w.to(dtypes[n]).to(w.dtype) for n, w in drift.reference.items()}
    return FisherDrift(drift.fisher, reference, drift.metadata, drift.factors)


def cache_folder(folder: str | None, output_dir: str, name: str) -> Path:
    """``folder`` if it is named, else ``name`` beside ``output_dir``: shared by its experiment."""
    return Path(os.path.abspath(output_dir)).parent / name if folder is None else Path(folder)


def spread_name(model: nn.Module) -> str:
    """Name of a weight that is spread over processes already; "" where each is whole."""
    marks = ("ds_id", "device_mesh")
    named = model.named_parameters()
    return next((name for name, p in named if any(hasattr(p, mark) for mark in marks)), "")


@contextmanager
def on_accelerator(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the model is on ``device``; afterwards it is where it was."""
    # Under FSDP2 and ZeRO transformers leaves the model on the CPU until it is cut up, which is
    # after the Fisher is fitted and static passes are run: there they would take hours. Weights
    # that are cut up already, or on several devices, stay. A model that does not fit as a whole has
    # its Fisher fitted beforehand (`alphatoken fisher`). Parameters remain the same objects.
    homes = {parameter.device for parameter in model.parameters()}
    if device.type == "cpu" or spread_name(model) or homes != {torch.device("cpu")}:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to("cpu")
        if torch.cuda.is_available():  # training wants all of the accelerator
            torch.cuda.empty_cache()
