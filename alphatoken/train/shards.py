"""``Sharding`` for the two ways of spreading weights that are supported: FSDP2 and ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.support.precision import wide
from alphatoken.train.hooks import MODULES, require_names, without_names


def _owners(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Each module below, and the nearest one around it whose weights FSDP2 gathers together."""
    owner = module if hasattr(module, "unshard") else owner
    yield module, owner
    for child in module.children():
        yield from _owners(child, owner)


def _groups(owner: Any) -> list[Any]:
    """The groups of parameters that a module gathers together; None is no such module.

    Raises:
        UnsupportedError: a release of torch that keeps them elsewhere.
    """
    if owner is None:
        return []
    try:
        state = owner._get_fsdp_state()
        # Before torch had several, it had this one or none.
        groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        return [group for group in groups if group is not None]
    except AttributeError as problem:
        raise without_names("FSDP2", ("torch",), (str(problem.name),), "alphatoken") from problem


class _Parts:
    """Common part of both shardings."""

    def part_of(self, name: str, full: Tensor) -> Tensor:
        """Part of a tensor; see ``Sharding``."""
        raise NotImplementedError

    def _copies(self, name: str) -> int:
        raise NotImplementedError

    @torch.no_grad()
    def reduce(self, name: str, full: Tensor) -> Tensor:
        """This process's part of the sum over all processes."""
        # Collectives take no strided views.
        total = full.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return self.part_of(name, total)

    @torch.no_grad()
    def norms(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """Norm of each whole tensor."""
        names = sorted(parts)
        if not names:
            return {}
        sums = torch.stack([parts[n].double().square().sum() / self._copies(n) for n in names])
        dist.all_reduce(sums)
        return dict(zip(names, sums.sqrt().tolist(), strict=True))

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over the processes."""
        total = torch.tensor(list(numbers), dtype=torch.float64)
        if dist.get_backend() == "nccl":
            total = total.cuda()
        dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums


class Fsdp2Sharding(_Parts):
    """``Sharding`` of a model under ``fully_shard``: parameters are DTensors.

    Parts are the DTensors' local shards (rows of the matrix, by ``torch.chunk``), of one size or
    not; parameters that FSDP2 leaves alone are whole everywhere. Hybrid sharding is one of the
    layouts.

    Args:
        model: the sharded model, outside a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.tensor import DTensor

        self._kind = DTensor
        self._layout: dict[str, Any] = {}
        self._shape: dict[str, torch.Size] = {}
        self._stride: dict[str, tuple[int, ...]] = {}
        self._owners = dict(_owners(model, None))
        for name, p in model.named_parameters(remove_duplicate=False):
            self._shape[name], self._stride[name] = p.shape, p.stride()
            if isinstance(p, DTensor):
                self._layout[name] = (p.device_mesh, p.placements)

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        return self._shape[name]

    @torch.no_grad()
    def full(self, name: str, parameter: Tensor) -> Tensor:
        """The whole parameter. Collective outside a forward; inside it is whole already."""
        if isinstance(parameter, self._kind):
            whole: Tensor = self._kind.full_tensor(parameter.detach())  # type: ignore[arg-type]
            return whole.to(parameter.device_mesh.device_type)
        return parameter.detach().clone()

    @torch.no_grad()
    def local(self, name: str, parameter: Tensor) -> Tensor:
        """This process's rows of the parameter."""
        if isinstance(parameter, self._kind):
            # With weights offloaded to the CPU, parts are worked on where the model runs.
            shard = self._kind.to_local(parameter.detach()).clone()  # type: ignore[arg-type]
            return shard.to(parameter.device_mesh.device_type)
        return self.part_of(name, parameter)

    @torch.no_grad()
    def part_of(self, name: str, full: Tensor) -> Tensor:
        """This process's rows of ``full``."""
        from torch.distributed.tensor import distribute_tensor

        if name not in self._layout:
            return full.detach().clone()
        mesh, placements = self._layout[name]
        # No source rank: every process has the whole tensor, so nothing is sent.
        whole = full.detach().contiguous()
        spread = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        return spread.to_local().clone()

    @torch.no_grad()
    def gather(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from all processes' rows."""
        if name not in self._layout:
            return part.detach().clone()
        mesh, placements = self._layout[name]
        spread = self._kind.from_local(
            part.detach().contiguous(),
            mesh,
            placements,
            run_check=False,
            shape=self._shape[name],
            stride=self._stride[name],
        )
        whole: Tensor = spread.full_tensor()
        return whole

    @contextmanager
    def repeatable(self, within: nn.Module | None = None) -> Iterator[None]:
        """FSDP2 gathers weights in every backward, where it enters a module by its output."""
        parts = () if within is None else within.parameters()
        if within is None or not any(isinstance(p, self._kind) for p in parts):
            yield
            return
        # A backward that starts inside a module never does: the weights around it are gathered
        # first.
        owner = self._owners[within]
        owner.unshard()
        try:
            yield
        finally:
            owner.reshard()

    def local_shard_and_direction(
        self, name: str, parameter: Tensor, part: Tensor
    ) -> tuple[Tensor, Tensor]:
        """This process's rows, which the next gathering reads, and those of M."""
        if isinstance(parameter, self._kind):
            rows = parameter.data.to_local()  # type: ignore[attr-defined]
            return rows, part.to(rows.device)
        return parameter.data, part

    @torch.no_grad()
    def overwrite(self, parts: Mapping[str, Tensor]) -> None:
        """Give parameters new numbers, of which this process has its part."""
        self.regather()
        named = dict(next(iter(self._owners)).named_parameters(remove_duplicate=False))
        for name, part in parts.items():
            self.local_shard_and_direction(name, named[name], part)[0].copy_(part)

    def regather(self) -> None:
        """Drop the gathered weights that FSDP2 keeps between forwards, as it does the root's."""
        for owner in {owner for owner in self._owners.values() if owner is not None}:
            owner.reshard()

    def low_precision_reason(self) -> str | None:
        """Dtype to which ``MixedPrecisionPolicy`` casts weights for the forward."""
        for group in (group for owner in set(self._owners.values()) for group in _groups(owner)):
            dtype = group.mp_policy.param_dtype
            if dtype is not None and wide(dtype) != dtype:
                return f"mixed precision in {dtype}".replace("torch.", "")
        return None

    def _copies(self, name: str) -> int:
        if name not in self._layout:
            return dist.get_world_size()
        mesh, placements = self._layout[name]
        copies = dist.get_world_size() // mesh.size()
        for axis, placement in enumerate(placements):
            copies *= 1 if placement.is_shard() else mesh.size(axis)
        return int(copies)


_COUNTERS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


class _LeafHook:
    """DeepSpeed's hook on the backward of a leaf, which can be told to do nothing."""

    def __init__(self, hook: Any) -> None:
        self.hook, self.quiet = hook, False

    def __call__(self, *args: Any) -> Any:
        return None if self.quiet else self.hook(*args)


def _leaf_hooks(module: nn.Module) -> list[_LeafHook]:
    """Hooks of one module, put in place of DeepSpeed's own unless that was done before."""
    hooks = module._backward_hooks
    for key, hook in hooks.items():
        if getattr(hook, "__module__", "").startswith("deepspeed."):
            hooks[key] = _LeafHook(hook)
    return [hook for hook in hooks.values() if isinstance(hook, _LeafHook)]


class Zero3Sharding(_Parts):
    """``Sharding`` of a model under DeepSpeed ZeRO-3: flat parts of equal length.

    Each parameter is flattened, padded with zeros to a multiple of its group's size, and cut;
    parameters that DeepSpeed leaves alone are whole everywhere.

    Args:
        model: the engine's module, outside a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        for module in MODULES:
            require_names(module)
        self._model = model
        self._parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self._leaf_hooks = [h for module in model.modules() for h in _leaf_hooks(module)]

    def _partitioned(self, name: str) -> bool:
        return hasattr(self._parameters[name], "ds_id")

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        p = self._parameters[name]
        return torch.Size(p.ds_shape if self._partitioned(name) else p.shape)

    @torch.no_grad()
    def full(self, name: str, parameter: Tensor) -> Tensor:
        """The whole parameter. Collective, unless it is whole at this time."""
        p = self._parameters[name]
        with self._gathered(p):
            whole: Tensor = p.data.detach().clone()
            return whole.view(self.shape(name))

    def _gathered(self, p: Any) -> Any:
        import deepspeed
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        # One that is whole now (small ones stay so) is in use: leaving the context would cut it.
        if not hasattr(p, "ds_id") or p.ds_status == ZeroParamStatus.AVAILABLE:
            return nullcontext()
        return deepspeed.zero.GatheredParameters([p])

    @torch.no_grad()
    def local(self, name: str, parameter: Tensor) -> Tensor:
        """This process's flat part of the parameter."""
        p = self._parameters[name]
        if not self._partitioned(name):
            return self.part_of(name, p)
        part: Tensor = p.ds_tensor.detach()
        if part.numel() != p.ds_tensor.ds_numel:
            raise ConfigError(
                "ZeRO-3 keeps weights on disk, where they cannot be read",
                got=f"{name}, offloaded to NVMe",
                remedy="offload_param to the CPU, or not at all",
            )
        return self._padded(p, part)

    @torch.no_grad()
    def master(self, name: str, parameter: Tensor) -> Tensor:
        """This process's flat part in float32, as the optimizer moves it (``MasterWeights``)."""
        from deepspeed.utils import safe_get_local_fp32_param

        p = self._parameters[name]
        if not self._partitioned(name) or not hasattr(p, "_z3_optimizer") or not p.requires_grad:
            return self.local(name, parameter)
        return self._padded(p, safe_get_local_fp32_param(p).detach())

    def _padded(self, p: Any, part: Tensor) -> Tensor:
        # The padding holds whatever was there.
        part = part.to(torch.device(self._device(p)), copy=True)
        start = self._place(p)[0] * part.numel()
        part[max(0, int(p.ds_numel) - start) :] = 0
        return part

    @staticmethod
    def _place(p: Any) -> tuple[int, int]:
        group = p.ds_process_group
        return dist.get_rank(group), dist.get_world_size(group)

    @staticmethod
    def _device(p: Any) -> Any:
        import deepspeed

        return deepspeed.get_accelerator().current_device_name()

    @torch.no_grad()
    def part_of(self, name: str, full: Tensor) -> Tensor:
        """This process's flat part of ``full``."""
        if not self._partitioned(name):
            return full.detach().clone()
        p = self._parameters[name]
        size = int(p.ds_tensor.ds_numel)
        start = self._place(p)[0] * size
        values = full.detach().reshape(-1)[start : start + size]
        part = full.new_zeros(size)
        part[: values.numel()] = values
        return part

    @torch.no_grad()
    def gather(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from all processes' parts."""
        if not self._partitioned(name):
            return part.detach().clone()
        p = self._parameters[name]
        parts = [torch.empty_like(part) for _ in range(self._place(p)[1])]
        dist.all_gather(parts, part.detach().contiguous(), group=p.ds_process_group)
        return torch.cat(parts)[: int(p.ds_numel)].view(self.shape(name))

    @contextmanager
    def repeatable(self, within: nn.Module | None = None) -> Iterator[None]:
        """DeepSpeed counts down, module by module, how often a backward will need its weights."""
        # The counts are set in the forward; at zero the weights are no longer fetched, and a second
        # backward would find them empty. Each linear is a module of its own to it, so that a
        # backward inside a block is nothing special. A *leaf*, as it has mixtures of experts, hangs
        # the reduction of its gradients on every backward through it; those of values have none,
        # and the training's would find zeros reduced before it.
        before = [
            (module, name, module.__dict__[name])
            for module in self._model.modules()
            for name in _COUNTERS
            if name in module.__dict__
        ]
        for hook in self._leaf_hooks:
            hook.quiet = True
        try:
            yield
        finally:
            for module, name, count in before:
                setattr(module, name, count)
            for hook in self._leaf_hooks:
                hook.quiet = False

    def _copies(self, name: str) -> int:
        world = dist.get_world_size()
        if not self._partitioned(name):
            return world
        return world // self._place(self._parameters[name])[1]

    def local_shard_and_direction(
        self, name: str, parameter: Tensor, part: Tensor
    ) -> tuple[Tensor, Tensor]:
        """This process's flat part, which the next gathering reads, and that of M."""
        p = self._parameters[name]
        if not self._partitioned(name):
            return p.data, part
        return p.ds_tensor.data, part.to(p.ds_tensor.device)

    @torch.no_grad()
    def overwrite(self, parts: Mapping[str, Tensor]) -> None:
        """Give parameters new numbers, of which this process has its part. Collective."""
        import deepspeed

        for name, part in parts.items():
            p = self._parameters[name]
            whole = self.gather(name, part.to(self._device(p)))
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                p.data.copy_(whole)

    def regather(self) -> None:
        """Drop what DeepSpeed keeps gathered, and gather the small ones that it never drops."""
        parameters = [p for p in self._parameters.values() if hasattr(p, "ds_id")]
        optimizer = next((p._z3_optimizer for p in parameters if hasattr(p, "_z3_optimizer")), None)
        if optimizer is not None:  # which counts what is gathered
            optimizer.parameter_offload.partition_all_parameters()
        for p in parameters if optimizer is None else ():
            p.ds_active_sub_modules.clear()
            p.partition()
        small = [p for p in parameters if p.ds_persist]
        if small:
            small[0].all_gather(small)

    def low_precision_reason(self) -> str | None:
        """None: DeepSpeed's narrow weights are narrow parameters, which others see."""
        return None
