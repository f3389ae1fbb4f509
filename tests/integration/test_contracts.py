"""Private names of other libraries, one contract each: it is there, and holds what is done with it.

A release that renames one fails here by that name, beside the file of ours that uses it. Runs of
the development branches (``.github/workflows/nightly.yml``) say so before a release does.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer, SFTTrainer

from alphatoken.errors import UnsupportedError
from alphatoken.model.attention import saved_log_sum_exp
from alphatoken.train import hooks, log_prob_proxy
from alphatoken.train.hooks import MODULES, NEEDED, OVERRIDDEN
from alphatoken.train.shards import Fsdp2Sharding
from tests.integration import tiny_training as tiny

ROOT = Path(__file__).parents[2]
Check = Callable[[], Any]


def takes(function: Any, *args: Any, **named: Any) -> bool:
    """Whether a function can be called like this; a name that is missing raises."""
    inspect.signature(function).bind(*args, **named)
    return True


def at(path: str) -> Any:
    """What stands under ``module:name.name``."""
    module, _, names = path.partition(":")
    found = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


ANY: Any = object()
BELOW: list[Any] = [Trainer, SFTTrainer, DPOTrainer]
TRAINER, SFT, DPO = BELOW

CALLED: dict[str, Check] = {
    # Overridden with this signature, or called like this: train/mixin.py.
    "_clip_grad_norm": lambda: takes(TRAINER._clip_grad_norm, ANY, ANY),
    "_get_output_dir": lambda: takes(TRAINER._get_output_dir, ANY, trial=None),
    "_load_rng_state": lambda: takes(TRAINER._load_rng_state, ANY, "checkpoint"),
    "_run_epoch": lambda: callable(TRAINER._run_epoch),  # whose arguments are passed on as they are
    "_save_checkpoint": lambda: takes(TRAINER._save_checkpoint, ANY, ANY, None),
    "compute_loss": lambda: takes(
        TRAINER.compute_loss, ANY, ANY, ANY, return_outputs=False, num_items_in_batch=None
    ),
    "create_model_card": lambda: takes(TRAINER.create_model_card, ANY),
    "get_batch_samples": lambda: takes(TRAINER.get_batch_samples, ANY, ANY, 1, ANY),
    "get_train_dataloader": lambda: takes(TRAINER.get_train_dataloader, ANY),
    "log": lambda: takes(TRAINER.log, ANY, {}, None),
    "training_step": lambda: takes(TRAINER.training_step, ANY, ANY, {}, None),
    "_prepare_inputs": lambda: takes(TRAINER._prepare_inputs, ANY, {}),
    "_push_from_checkpoint": lambda: takes(TRAINER._push_from_checkpoint, ANY, "folder"),
    # train/sft.py and train/dpo.py.
    "_get_collator_with_removed_columns": lambda: takes(
        TRAINER._get_collator_with_removed_columns, ANY, data_collator=ANY
    ),
    "SFTTrainer._prepare_dataset": lambda: takes(
        SFT._prepare_dataset, ANY, dataset=ANY, processing_class=ANY, args=ANY, packing=False,
        formatting_func=None, dataset_name="train",
    ),
    "DPOTrainer._prepare_dataset": lambda: takes(
        DPO._prepare_dataset, ANY, dataset=ANY, processing_class=ANY, args=ANY,
        dataset_name="train",
    ),
    "_precompute_ref_logps": lambda: takes(
        DPO._precompute_ref_logps, ANY, dataset=ANY, name="train", batch_size=1
    ),
    "compute_ref_log_probs": lambda: takes(
        DPO.compute_ref_log_probs, ANY, model=ANY, inputs={}
    ),
    "_tag_names": lambda: isinstance(SFT._tag_names, list) and isinstance(DPO._tag_names, list),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_a_method_of_a_trainer_takes_what_it_is_given(name: str) -> None:
    assert CALLED[name]()


# --- attributes of trainers ----------------------------------------------------------------------


class _Looks(TrainerCallback):
    """Notes attributes of a trainer in the middle of a run."""

    def __init__(self, trainer: Any, into: dict[str, Any]) -> None:
        self.trainer, self.into = trainer, into

    def on_step_end(self, *_: Any, **__: Any) -> None:
        for name in ATTRIBUTES:
            if hasattr(self.trainer, name):
                self.into[name] = getattr(self.trainer, name)


def _one_number(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() == 1


ATTRIBUTES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "_tr_loss": ("train/checkpoint.py", _one_number),
    "_total_loss_scalar": ("train/checkpoint.py", lambda x: isinstance(x, float)),
    "_globalstep_last_logged": ("train/checkpoint.py", lambda x: isinstance(x, int)),
    "current_gradient_accumulation_steps": ("train/mixin.py", lambda x: x == 2),
    "model_accepts_loss_kwargs": ("train/trainer.py", lambda x: x is True),
    "callback_handler": ("train/checkpoint.py", lambda x: isinstance(x.callbacks, list)),
    "_metrics": ("train/checkpoint.py", lambda x: all(
        isinstance(series, list) for part in ("train", "eval") for series in x[part].values()
    )),
    "_total_train_tokens": ("train/checkpoint.py", lambda x: float(x) > 0),
    "_is_vision_dataset": ("train/sft.py, train/dpo.py", lambda x: x is False),
    "_skip_prepare_dataset": ("train/sft.py", lambda x: x is False),
    "_formatting_func": ("train/sft.py", lambda x: x is None),
    "precompute_ref_logps": ("train/dpo.py", lambda x: x is False),
    "ld_alpha": ("train/dpo.py", lambda x: x is None),
    "ref_model": ("train/dpo.py", lambda x: isinstance(x, nn.Module)),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Attributes of trainers below ours after the first of two steps."""
    found: dict[str, dict[str, Any]] = {}
    own = {"gradient_accumulation_steps": 2, "max_steps": 2, "logging_steps": 2}
    own |= {"per_device_train_batch_size": 1, "model": tiny.model(layers=1)}
    for kind, more in ((SFTTrainer, {}), (DPOTrainer, {"ref_model": tiny.model(layers=1)})):
        trainer = tiny.made(kind, tmp_path_factory.mktemp("below"), **own, **more)
        trainer.add_callback(_Looks(trainer, found.setdefault(kind.__name__, {})))
        trainer.train()
    return found


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_a_trainer_is_what_it_is_read_as(
    seen: dict[str, dict[str, Any]], name: str
) -> None:
    where, holds = ATTRIBUTES[name]
    having = {kind: held for kind, held in seen.items() if name in held}
    needed = {kind for kind in seen if name in (*NEEDED[kind], *NEEDED["Trainer"])}
    assert having.keys() >= needed, f"alphatoken/{where}"
    assert having
    assert all(holds(held[name]) for held in having.values()), f"alphatoken/{where}"


def test_all_that_is_looked_for_at_construction_has_a_contract() -> None:
    methods = {name.rpartition(".")[2] for name in CALLED}
    assert set(OVERRIDDEN) <= methods
    for names in NEEDED.values():
        assert set(names) <= methods | ATTRIBUTES.keys()


# --- the fused head ------------------------------------------------------------------------------


@pytest.fixture
def head_anew() -> Iterator[None]:
    log_prob_proxy.require_fused_head.cache_clear()
    yield
    log_prob_proxy.require_fused_head.cache_clear()


@pytest.mark.usefixtures("head_anew")
def test_the_node_of_trls_fused_head_is_read_as_it_is() -> None:
    """Node's name, saved tensors, settings, dtype and needed gradients: train/log_prob_proxy.py."""
    log_prob_proxy.require_fused_head()


@pytest.mark.usefixtures("head_anew")
@pytest.mark.parametrize("part", ["name", "order", "settings", "attribute"])
def test_another_fused_head_is_refused_when_a_trainer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    utils = import_module("trl.trainer.utils")
    theirs = utils._ChunkedLogProbFunction

    def forward(ctx: Any, *args: Any) -> Any:
        found = theirs.forward(ctx, *args)
        if part == "order":
            hidden, weight, *rest = ctx.to_save
            ctx.save_for_backward(weight, hidden, *rest)
        elif part == "settings":
            ctx.kernel_args = {"scale": 1.0}
        elif part == "attribute":
            del ctx.compute_dtype
        return found

    name = "Other" if part == "name" else theirs.__name__
    other = type(name, (torch.autograd.Function,), {
        "forward": staticmethod(forward), "backward": staticmethod(theirs.backward)
    })  # fmt: skip
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", other)
    with pytest.raises(UnsupportedError, match="TRL's fused head needs what"):
        tiny.sft(tmp_path, policy="random", model=tiny.model(layers=1))


# --- FSDP2 and DeepSpeed -------------------------------------------------------------------------


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    """A model of one process, under FSDP2 with products in bfloat16."""
    if dist.is_initialized():
        pytest.skip("this process is in another group")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model[1], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
        yield model
    finally:
        dist.destroy_process_group()


def test_the_groups_of_fsdp2_are_read_all(sharded: Any) -> None:
    """``_get_fsdp_state`` and ``_fsdp_param_groups`` (one of them in older releases)."""
    sharding = Fsdp2Sharding(sharded)
    assert sharding.low_precision_reason() == "mixed precision in bfloat16"
    state, inner = (module._get_fsdp_state() for module in (sharded, sharded[1]))
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups += inner._fsdp_param_groups
        inner._fsdp_param_groups.clear()
        assert Fsdp2Sharding(sharded).low_precision_reason() == "mixed precision in bfloat16"
        del state._fsdp_param_groups
        type(state)._fsdp_param_group, before = None, type(state)._fsdp_param_group
        try:
            assert Fsdp2Sharding(sharded).low_precision_reason() is None
            del type(state)._fsdp_param_group
            with pytest.raises(UnsupportedError, match="without _fsdp_param_group"):
                Fsdp2Sharding(sharded).low_precision_reason()
        finally:
            type(state)._fsdp_param_group = before


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in MODULES.items() for name in names]
)
def test_an_attribute_of_deepspeed_is_set_where_it_is_read_from(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """By DeepSpeed's source: train/shards.py reads it of parameters and modules."""
    pytest.importorskip("deepspeed", reason="the extra deepspeed")
    monkeypatch.setattr(hooks, "MODULES", {module: (name,)})
    hooks.require_names.cache_clear()
    hooks.require_names(module)
    monkeypatch.setattr(hooks, "MODULES", {module: (name, "renamed")})
    hooks.require_names.cache_clear()
    with pytest.raises(UnsupportedError, match=r"deepspeed \S+, without renamed"):
        hooks.require_names(module)
    hooks.require_names.cache_clear()


@pytest.mark.slow  # imports DeepSpeed
def test_functions_of_deepspeed_take_what_they_are_given() -> None:
    deepspeed = pytest.importorskip("deepspeed", reason="the extra deepspeed")
    from deepspeed import utils
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    assert ZeroParamStatus.AVAILABLE
    assert takes(deepspeed.zero.GatheredParameters, [ANY], modifier_rank=0)
    assert takes(utils.safe_get_full_fp32_param, ANY)
    assert takes(utils.safe_get_local_fp32_param, ANY)
    assert takes(deepspeed.get_accelerator().current_device_name)


# --- all others ----------------------------------------------------------------------------------

UTILS = "trl.trainer.utils"
MAPPINGS = "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS"
EXPERTS = "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS"


def _hooks_of_steps() -> bool:
    made = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    kinds, hooks = ("pre", "post"), list[bool]()
    for kind in kinds:
        registered = getattr(made, f"_optimizer_step_{kind}_hooks")
        handle = getattr(made, f"register_step_{kind}_hook")(lambda *_: None)
        hooks.append(len(registered) == 1)
        handle.remove()
        everywhere = at(f"torch.optim.optimizer:_global_optimizer_{kind}_hooks")
        register = at(f"torch.optim.optimizer:register_optimizer_step_{kind}_hook")
        before = len(everywhere)
        handle = register(lambda *_: None)
        hooks.append(len(everywhere) == before + 1)
        handle.remove()
    return all(hooks)


def _inside_a_backward() -> bool:
    x, numbers = torch.ones(1, requires_grad=True), list[int]()
    x.register_hook(lambda g: numbers.append(torch._C._current_graph_task_id()))
    x.sum().backward()
    return numbers[0] >= 0


def _of_a_graph() -> bool:
    node = torch.ones(2, requires_grad=True).exp().grad_fn
    (one,) = node._input_metadata  # type: ignore[union-attr]
    return bool(one.dtype == torch.float32)


def _counts_writes() -> bool:
    tensor = torch.ones(2)
    before = tensor._version
    tensor.add_(1)
    return tensor._version == before + 1 and tensor[:1]._base is tensor


def _hooked() -> bool:
    module = nn.Linear(1, 1)
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return all(not getattr(module, kind) for kind in kinds) and not module.weight._backward_hooks


def _compiles() -> bool:
    inside = nn.Linear(1, 1)
    before = inside._compiled_call_impl
    inside.compile(backend="eager")
    whole: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    return (
        before is None
        and inside._compiled_call_impl is not None
        and type(whole).__module__.startswith("torch._dynamo")
        and isinstance(whole._modules["_orig_mod"], nn.Linear)
    )


def _dispatches() -> bool:
    registry = at(MAPPINGS)
    registry["alphatoken_contract"] = print
    there = registry._local_mapping.pop("alphatoken_contract") is print
    return there and "sdpa" in registry._global_mapping and "sdpa" not in registry._local_mapping


def _gates() -> bool:
    module = tiny.mixture().model.layers[0].mlp.experts
    names = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "act_fn", "config")
    return all(hasattr(module, name) for name in names) and isinstance(
        module.config._experts_implementation, str
    )


def _parallel_experts() -> bool:
    """The name under which experts that are spread over processes say so."""
    folder = Path(inspect.getfile(import_module("transformers"))).parent
    return any(
        "_is_expert_parallel" in path.read_text("utf-8")
        for path in (folder / "integrations").glob("*.py")
    )


def _captures_outputs() -> bool:
    module = import_module("transformers.utils.output_capturing")
    return "_output_capturing_hooks_installed" in inspect.getsource(module)


def _adapts() -> bool:
    from peft import get_peft_model

    model = get_peft_model(tiny.model(layers=1), tiny.lora())
    adapted = model.base_model.model.model.layers[0].self_attn.q_proj
    return (
        adapted.use_dora == {"default": False}
        and "default" in adapted.lora_A
        and "default" in adapted.lora_B
        and isinstance(adapted.base_layer, nn.Linear)
        and not model.active_peft_config.is_prompt_learning
        and isinstance(model.get_base_model(), type(tiny.model(layers=1)))
    )


def _accelerates() -> bool:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = {one.name for one in dataclasses.fields(FullyShardedDataParallelPlugin)}
    sizes = {one.name for one in dataclasses.fields(ParallelismConfig)}
    return (
        {"transformer_cls_names_to_wrap", "activation_checkpointing"} <= plugin
        and "zero_stage" in {one.name for one in dataclasses.fields(DeepSpeedPlugin)}
        and {"tp_size", "cp_size", "sp_size"} <= sizes
        and isinstance(Accelerator.is_fsdp2, property)
        and AcceleratedOptimizer.__module__.startswith("accelerate.")
        and all(takes(getattr(Accelerator, n), ANY) for n in ("wait_for_everyone",))
        and "ddp_handler" in inspect.getsource(Accelerator.__init__)
        and takes(Accelerator.unwrap_model, ANY, ANY)
    )


def _parses() -> bool:
    parser = at("trl.scripts.utils:TrlParser")
    adds = takes(parser._add_dataclass_arguments, ANY, ANY)
    called = "_add_dataclass_arguments" in inspect.getsource(parser.__mro__[1].__init__)
    return adds and called and takes(parser._parse_dataclass_field, ANY, ANY)


def _own_parsers() -> bool:
    parser = ArgumentParser()
    parser.add_argument("--one")
    return "--one" in parser._option_string_actions and parser._actions[-1].dest == "one"


def _other_optimizers() -> bool:
    from torch_optimizer import AdaBelief

    made = AdaBelief([torch.ones(1, requires_grad=True)])
    return isinstance(made._rectify, bool) and isinstance(made._weight_decouple, bool)


def _hooks_of_gradients() -> bool:
    weight = nn.Parameter(torch.ones(1))
    weight.register_post_accumulate_grad_hook(print)
    return list(weight._post_accumulate_grad_hooks.values()) == [print]


def _delta_nets() -> bool:
    from alphatoken.model.delta_dispatch import is_delta_net

    return any(is_delta_net(module) for module in tiny.hybrid().modules())


def _configured() -> bool:
    config = tiny.model(layers=1).config
    return isinstance(config._attn_implementation, str) and isinstance(config.name_or_path, str)


def _chunks() -> bool:
    return at(f"{UTILS}:_ChunkedLogProbFunction").__name__ + "Backward" == log_prob_proxy._NODE


def _of_lists() -> bool:
    """Lists are worked on as their tensors are, one by one."""
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([[-2.0]])]
    norms = torch._foreach_norm(tensors), torch._foreach_norm(tensors, math.inf)
    kept = [torch.empty_like(one) for one in tensors]
    torch._foreach_copy_(kept, tensors)
    torch._foreach_add_(kept, tensors, alpha=-0.5)
    torch._foreach_div_(kept, 2.0)
    return (
        [[float(x) for x in one] for one in norms] == [[5.0, 2.0], [4.0, 2.0]]
        and [one.tolist() for one in kept] == [[0.75, -1.0], [[-0.5]]]
    )  # fmt: skip


def _keeps_log_sum_exp() -> bool:
    """The fused kernel of a CPU does; under hooks it is not read, and the hooks are seen."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    output = nn.functional.scaled_dot_product_attention(query, query, query)
    saved = saved_log_sum_exp(output, query.shape)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        hooked = top(True) is not None and saved_log_sum_exp(output, query.shape) is None
    expected = (query @ query.mT / 8**0.5).logsumexp(-1)
    return saved is not None and hooked and torch.allclose(saved[1], expected, atol=1e-5)


OTHERS: dict[str, tuple[str, Check]] = {
    "torch: Tensor._version, ._base": (
        "model/fingerprint.py, estimate/temporary_weights.py", _counts_writes
    ),
    "torch: _C._current_graph_task_id": (
        "model/capture.py", lambda: torch._C._current_graph_task_id() == -1 and _inside_a_backward()
    ),
    "torch: Optimizer._optimizer_step_pre_hooks, ._optimizer_step_post_hooks, "
    "_global_optimizer_pre_hooks, _global_optimizer_post_hooks": (
        "direction/optimizers.py", _hooks_of_steps,
    ),
    "torch: _foreach_norm, _foreach_copy_, _foreach_add_, _foreach_div_": (
        "direction/algebra.py, direction/objective.py, estimate/temporary_weights.py", _of_lists,
    ),
    "torch: Node._saved_logsumexp, ._saved_log_sumexp, "
    "_C._autograd._top_saved_tensors_default_hooks": (
        "model/attention.py", _keeps_log_sum_exp,
    ),
    "torch: Tensor._post_accumulate_grad_hooks": (
        "direction/optimizers.py", _hooks_of_gradients,
    ),
    "torch: Module._buffers": (
        "model/forward.py", lambda: "running_mean" in nn.BatchNorm1d(1)._buffers
    ),
    "torch: Node._input_metadata": ("estimate/derivatives.py", _of_a_graph),
    "torch: Module._forward_hooks, ._forward_pre_hooks, ._backward_hooks, ._backward_pre_hooks": (
        "model/fingerprint.py, model/head.py", _hooked,
    ),
    "torch: Module._compiled_call_impl, OptimizedModule._orig_mod, _modules": (
        "model/forward.py, train/refusals.py", _compiles,
    ),
    "torch: Module._parameters": (
        "model/sharding.py", lambda: "weight" in nn.Linear(1, 1)._parameters
    ),
    "torch: _DropoutNd": (
        "model/forward.py",
        lambda: issubclass(nn.Dropout, at("torch.nn.modules.dropout:_DropoutNd")),
    ),
    "torch: _scaled_dot_product_flash_attention_for_cpu, "
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "diagnose/estimators.py", lambda: all(
            hasattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}")
            for end in ("", "_backward")
        ),
    ),
    "torch: _python_dispatch.TorchDispatchMode, _pytree.tree_leaves": (
        "certificate/expected.py", lambda: at("torch.utils._python_dispatch:TorchDispatchMode")
        and at("torch.utils._pytree:tree_leaves")([1, [2]]) == [1, 2],
    ),
    "transformers: _local_mapping, _global_mapping": ("model/dispatch.py", _dispatches),
    "transformers: experts' _global_mapping": (
        "model/dispatch.py", lambda: "grouped_mm" in at(EXPERTS)._global_mapping
    ),
    "transformers: flash_attention_forward, prepare_fa_kwargs_from_position_ids": (
        "model/dispatch.py", lambda: takes(
            at("transformers.modeling_flash_attention_utils:prepare_fa_kwargs_from_position_ids"),
            torch.ones(1, 2),
        ) and at("transformers.integrations.flash_attention:flash_attention_forward"),
    ),
    "transformers: eager_attention_forward": (
        "model/dispatch.py",
        lambda: at("transformers.models.llama.modeling_llama:eager_attention_forward"),
    ),
    "transformers: _experts_implementation, _apply_gate": ("model/experts.py", _gates),
    "transformers: _is_expert_parallel": ("model/dispatch.py", _parallel_experts),
    "transformers: _output_capturing_hooks_installed": ("model/fingerprint.py", _captures_outputs),
    "transformers: _attn_implementation": ("model/transformers.py", _configured),
    "transformers: _no_split_modules": (
        "train/distributed.py",
        lambda: "LlamaDecoderLayer" in tiny.model(layers=1)._no_split_modules,
    ),
    "transformers: gated delta nets": ("model/delta_dispatch.py", _delta_nets),
    "transformers: ExportableState": (
        "train/checkpoint.py",
        lambda: {"args", "attributes"} <= at("transformers:EarlyStoppingCallback")(1).state().keys()
    ),
    "transformers: _add_dataclass_arguments, _parse_dataclass_field": ("cli/arguments.py", _parses),
    "Python: _actions, _option_string_actions": ("cli/arguments.py", _own_parsers),
    "Python: _getframe": ("errors.py", lambda: sys._getframe().f_code is not None),
    "trl: _ChunkedLogProbFunction": ("train/log_prob_proxy.py", _chunks),
    "trl: get_peft_config, get_quantization_config, create_model_from_path": (
        "cli/training.py, lab", lambda: takes(at(f"{UTILS}:get_peft_config"), ANY)
        and takes(at(f"{UTILS}:get_quantization_config"), ANY)
        and takes(at(f"{UTILS}:create_model_from_path"), "name", dtype="auto"),
    ),
    "trl: add_fused_lm_head": (
        "train/log_prob_proxy.py", lambda: takes(at(f"{UTILS}:add_fused_lm_head"), ANY)
    ),
    "trl: FusedCausalLMOutput": (
        "train/log_prob_proxy.py", lambda: {"log_probs", "aux_loss"}
        <= {one.name for one in dataclasses.fields(at(f"{UTILS}:FusedCausalLMOutput"))},
    ),
    "peft: LoRA layers": ("model/transformers.py, train/mixin.py", _adapts),
    "peft: load_peft_weights": (
        "model/loading.py", lambda: takes(at("peft.utils:load_peft_weights"), "folder")
    ),
    "accelerate: layouts": ("train/distributed.py, direction/optimizers.py", _accelerates),
    "torch_optimizer: _rectify, _weight_decouple": (
        "direction/preconditioner.py", _other_optimizers
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_private_name_holds_what_is_done_with_it(name: str) -> None:
    where, holds = OTHERS[name]
    assert holds(), f"alphatoken/{where}"


# --- none is forgotten ---------------------------------------------------------------------------


def _private_names() -> Iterator[tuple[str, str]]:
    """Private names in our code that are not defined in it, with their places."""
    own: set[str] = set()
    used: list[tuple[str, str]] = []
    for folder in ("alphatoken", "lab"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                name, defines = _name_of(node)
                if not name.startswith("_") or name.startswith("__"):
                    continue
                if defines:
                    own.add(name)
                else:
                    used.append((name, f"{path.relative_to(ROOT)}:{node.lineno}"))  # type: ignore[attr-defined]
    return ((name, place) for name, place in used if name not in own)


def _name_of(node: ast.AST) -> tuple[str, bool]:
    """The name that a node defines, or reads of another object; and whether it defines it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name, True
    if isinstance(node, (ast.Attribute, ast.Name)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        stored = isinstance(node.ctx, ast.Store)
        return (name, stored) if stored or isinstance(node, ast.Attribute) else ("", False)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        text = node.args[1]
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            return text.value, False
    return "", False


def test_every_private_name_of_others_has_a_contract() -> None:
    known = {name for names in NEEDED.values() for name in names} | set(OVERRIDDEN)
    known |= {name for names in MODULES.values() for name in names} | {"_fsdp_param_group"}
    known |= {"_get_fsdp_state", "_fsdp_param_groups", *CALLED, *ATTRIBUTES}
    told = set(re.findall(r"\w+", " ".join(OTHERS)))
    found = list(_private_names())
    assert len({name for name, _ in found}) > 20
    assert [(n, place) for n, place in found if n not in known and n not in told] == []
