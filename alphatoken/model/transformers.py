"""Adapter for transformers decoders, plain or wrapped by PEFT.

Attention is reached through transformers' attention registry (see ``dispatch``): the config, the
mask functions and the implementation's name stay as they are (code inside the library compares
names), and only the calls of the chosen modules are rerouted. Gated delta nets have no registry;
see ``delta_dispatch``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from alphatoken.errors import ModelError, UnsupportedError
from alphatoken.model.delta_dispatch import is_delta_net, rerouted
from alphatoken.model.dispatch import ExpertsDispatch, dispatched, is_understood
from alphatoken.model.experts import PARAMETERS, ExpertsListener
from alphatoken.model.forward import kept_frequencies
from alphatoken.model.protocol import (
    AttentionOverride,
    ConvolutionOverride,
    DeltaOverride,
    ScoredExperts,
    ScoredLinear,
)

_LOSS_KEYWORDS = frozenset(
    (
        "labels", "shift_labels", "num_items_in_batch",  # the loss, which we take ourselves
        "fused_lm_head",  # TRL: token log-probabilities instead of logits
        "logits_to_keep", "return_dict",  # logits of all positions, in an object
    )
)  # fmt: skip
"""Keywords of a trainer's call that are not for a scoring pass."""
_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


# Contexts that pause checkpointing on one block may overlap and be left in any order. If each of
# them put back what it had met, the first to leave could switch checkpointing on while another
# still records, and the last could leave it off for good. So they are counted.
_PAUSED: dict[nn.Module, tuple[bool | None, int]] = {}
"""A block's own flag (None: it has none), and how many contexts hold it off."""
_PAUSING = threading.Lock()


def _resume(module: nn.Module) -> None:
    flag, contexts = _PAUSED.pop(module)
    if contexts > 1:
        _PAUSED[module] = flag, contexts - 1
    elif flag is None:
        del module.gradient_checkpointing
    else:
        module.gradient_checkpointing = flag  # type: ignore[assignment]


def _keep_differentiable(model: nn.Module) -> None:
    # On a CPU with bfloat16 instructions the first forward of bitsandbytes without gradients packs
    # 4-bit weights for quicker ones, and no gradient can be taken through the packed weights.
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                "4-bit weights are packed for forwards only",
                got=f"{name}.weight",
                why="bitsandbytes packed them in a forward without gradients, and no gradient goes "
                "through them",
                remedy="load the model anew, and hand it over before it generates or is evaluated",
            )


def require_head(model: PreTrainedModel) -> None:
    """Refuse a bare decoder and a classifier.

    Raises:
        ModelError: the model has no head over the vocabulary.
    """
    if model.get_output_embeddings() is None and not model.can_generate():
        raise ModelError(
            "the model has no head that predicts the next token",
            got=type(model).__qualname__,
            why="tokens are valued by their losses",
            remedy="a causal language model: AutoModelForCausalLM.from_pretrained(...)",
        )


class TransformersAdapter:
    """The core's view of a transformers decoder.

    Args:
        model: a causal language model of transformers, or a ``PeftModel`` around one.
        layers: the decoder blocks, if they are not found by themselves.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module] | None = None) -> None:
        _keep_differentiable(model)
        self.model = model
        unwrap: Any = getattr(model, "get_base_model", None)
        self.base: Any = unwrap() if unwrap is not None else model
        if not isinstance(self.base, PreTrainedModel):
            raise ModelError(
                "this is not a transformers model",
                got=type(self.base).__qualname__,
                remedy="pass the PreTrainedModel (or PeftModel) itself",
            )
        if getattr(self.base.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                "encoder-decoder models are not covered",
                got=type(self.base).__qualname__,
                why="it shifts labels by itself, and its predictions see the encoder's input too",
                remedy="a causal language model, such as the family's ...ForCausalLM",
            )
        require_head(self.base)
        self.config = self.base.config.get_text_config(decoder=True)
        self._layers = list(layers) if layers is not None else self._find_layers()
        self._names = {module: name for name, module in model.named_modules()}

    def _find_layers(self) -> list[nn.Module]:
        depth = getattr(self.config, "num_hidden_layers", None)
        decoder = self.base.get_decoder()
        # Where a head is called decoder there is nothing inside it.
        if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
            decoder = self.base
        lists = [
            list(module)
            for module in decoder.modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth
        ]
        # Other lists of modules can have the same length; only the one of the decoder blocks is
        # made of checkpointing layers, in all but the oldest models.
        checkpointing = [
            one for one in lists if all(isinstance(m, GradientCheckpointingLayer) for m in one)
        ]
        lists = checkpointing or lists
        if len(lists) != 1:
            raise ModelError(
                "the decoder layers could not be found",
                got=f"{len(lists)} candidates of length {depth} in {type(decoder).__qualname__}",
                why="values are defined on the last K decoder layers",
                remedy="pass them: Scorer(..., adapter=TransformersAdapter(model, layers=[...]))",
            )
        return lists[0]

    def layers(self) -> Sequence[nn.Module]:
        """The decoder blocks, first to last."""
        return self._layers

    def scored_linears(self, layers: Sequence[int]) -> list[ScoredLinear]:
        """Trainable ``nn.Linear`` and ``Conv1D`` modules of these blocks, each once."""
        loose = self._dora_modules(layers)
        linears: dict[nn.Module, ScoredLinear] = {}  # by module: a block may serve two layers
        for layer in layers:
            for module in self._layers[layer].modules():
                weight = getattr(module, "weight", None)
                if (
                    isinstance(module, (nn.Linear, Conv1D))
                    and "weight" in module._parameters  # or it is computed of others at each call
                    and not is_parametrized(module)
                    and isinstance(weight, Tensor)
                    and weight.requires_grad
                    and module not in loose
                    and module not in linears
                ):
                    transposed = isinstance(module, Conv1D)
                    linears[module] = ScoredLinear(self._names[module], module, layer, transposed)
        return list(linears.values())

    def _dora_modules(self, layers: Sequence[int]) -> set[nn.Module]:
        # DoRA divides by the norm of the adapted weight, which it computes from the factors A and B
        # directly. The inputs and errors of their calls do not explain that part of the gradient.
        loose: set[nn.Module] = set()
        for layer in layers:
            for module in self._layers[layer].modules():
                dora = getattr(module, "use_dora", None)
                if isinstance(dora, dict) and any(dora.values()):
                    for part in ("lora_A", "lora_B"):
                        loose.update(m for m in getattr(module, part).modules())
        return loose

    def mixtures(self, layers: Sequence[int]) -> tuple[nn.Module, ...]:
        """The mixtures of these blocks that transformers dispatches, each once."""
        modules = (m for layer in layers for m in self._layers[layer].modules())
        return tuple(dict.fromkeys(filter(_is_mixture, modules)))

    def scored_experts(self, layers: Sequence[int]) -> list[ScoredExperts]:
        """Trainable 3-D tensors of the mixtures that transformers dispatches, each once."""
        tensors: dict[str, ScoredExperts] = {}  # by name: a block may serve two layers
        for layer in layers:
            for module in self.mixtures([layer]):
                for parameter, weight in module.named_parameters(recurse=False):
                    if parameter in PARAMETERS and weight.requires_grad:
                        name = f"{self._names[module]}.{parameter}"
                        turned = bool(module.is_transposed)
                        tensor = ScoredExperts(name, module, layer, turned, parameter)
                        tensors.setdefault(name, tensor)
        return list(tensors.values())

    def uncovered(self, layers: Sequence[int]) -> dict[str, str]:
        """Trainable matrices of these blocks used outside any linear: name -> reason."""
        scored = {linear.module for linear in self.scored_linears(layers)}
        dora = self._dora_modules(layers)
        reasons: dict[str, str] = {}
        for layer in layers:
            for module in self._layers[layer].modules():
                if module in scored or isinstance(module, nn.Embedding):
                    continue
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad and _dimensions(parameter) >= 2:
                        full = f"{self._names[module]}.{name}"
                        reasons[full] = _reason(module, parameter, module in dora)
        return reasons

    def attention_modules(self, layer: int) -> tuple[nn.Module, ...]:
        """Modules of the block that may call the attention interface (all but leaves)."""
        # Which of them does so has no common name; the others are simply never looked up.
        return tuple(m for m in self._layers[layer].modules() if any(True for _ in m.children()))

    def other_mixers(self, layers: Sequence[int]) -> dict[str, str]:
        """Blocks with linear attention, state-space or convolution mixers: name -> kind."""
        kinds = getattr(self.config, "layer_types", None) or []
        mixers: dict[str, str] = {}
        for layer in layers:
            block = self._layers[layer]
            kind = kinds[layer] if layer < len(kinds) else "full_attention"
            convolution = next((m for m in block.modules() if isinstance(m, nn.Conv1d)), None)
            if kind not in _SOFTMAX_LAYERS:
                mixers[self._names[block]] = str(kind)
            elif convolution is not None:
                mixers[self._names[convolution]] = "convolution"
        return mixers

    @contextmanager
    def override_attention(
        self, modules: Sequence[nn.Module], override: AttentionOverride
    ) -> Iterator[None]:
        """Reroute the attention calls of ``modules``; contexts may be left in any order."""
        if not modules:
            yield
            return
        name = self.config._attn_implementation
        if not is_understood(name):
            raise ModelError(
                "this attention implementation is not known to the estimators",
                got=f"attn_implementation={name!r}",
                why="its mask, and so its weights, cannot be recomputed from the call",
                remedy="model.set_attn_implementation('sdpa') (or 'eager', or a flash kernel), or "
                "estimator='path'",
            )
        with dispatched(name, modules, override):
            yield

    def delta_nets(self, layer: int) -> tuple[nn.Module, ...]:
        """The gated delta nets of the block, of the kinds that ``delta_dispatch`` knows."""
        return tuple(m for m in self._layers[layer].modules() if is_delta_net(m))

    def override_delta_nets(
        self,
        modules: Sequence[nn.Module],
        convolution: ConvolutionOverride,
        rule: DeltaOverride,
    ) -> AbstractContextManager[None]:
        """Reroute both calls of these delta nets; contexts may be left in any order."""
        return rerouted(modules, convolution, rule)

    @contextmanager
    def override_experts(
        self, modules: Sequence[nn.Module], listener: ExpertsListener
    ) -> Iterator[None]:
        """Show the rows of these mixtures to ``listener``; contexts may be left in any order."""
        config: Any = modules[0].config
        name = config._experts_implementation
        with dispatched(name, modules, listener, kind=ExpertsDispatch):
            yield

    def checkpoints(self) -> bool:
        """Whether a block has gradient checkpointing on."""
        return any(getattr(block, "gradient_checkpointing", False) for block in self.layers())

    @contextmanager
    def pause_checkpointing(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Turn gradient checkpointing off on these blocks, and back to what it was."""
        with _PAUSING:
            for module in modules:
                own = (module.__dict__.get("gradient_checkpointing"), 0)
                flag, contexts = _PAUSED.get(module, own)
                _PAUSED[module] = flag, contexts + 1
                # Set in the instance, so that other blocks of the class keep the class's default.
                module.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            yield
        finally:
            with _PAUSING:
                for module in modules:
                    _resume(module)

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that the logits depend on, without a cache; those of a loss are dropped."""
        kept = {k: v for k, v in inputs.items() if k not in _LOSS_KEYWORDS}
        return {**kept, "use_cache": False}

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of one forward pass, after which rotary frequencies are the user's again."""
        with kept_frequencies(self.model):
            return self.logits_of(self.model(**self.arguments(inputs)))

    def logits_of(self, output: Any) -> Tensor:
        """The logits of ``output``, its ``logits``."""
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise ModelError(
                "the model's output has no logits",
                got=type(output).__qualname__,
                remedy="pass a causal language model with its head",
            )
        return logits

    def output_head(self) -> nn.Module | None:
        """The module whose output the logits are, as far as the architecture says."""
        head: nn.Module | None = self.base.get_output_embeddings()
        return head

    def next_token_logits(
        self, input_ids: Tensor, attention_mask: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Logits after the last column; only the new column is fed once a cache exists."""
        # Rows are padded on the left, so positions count real tokens and not columns.
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        arguments: dict[str, Any] = {"use_cache": True}
        named = inspect.signature(self.base.forward).parameters
        if "logits_to_keep" in named:
            arguments["logits_to_keep"] = 1  # or the head would run on the whole prompt
        if "output_router_logits" in named:
            # Trainers ask the config for the router's loss, which takes the mask to be as long as
            # the new tokens are many.
            arguments["output_router_logits"] = False
        cache = "cache" if "cache" in named else "past_key_values"  # up to transformers 5.23
        if state is not None:
            arguments[cache] = state
            input_ids, positions = input_ids[:, -1:], positions[:, -1:]
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, **arguments
        )
        return self.logits_of(output)[:, -1], getattr(output, cache, None)

    def max_positions(self) -> int | None:
        """Position limit of the text config; see :func:`position_limit`."""
        return position_limit(self.config)

    def end_tokens(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config, or of the config."""
        generation = getattr(self.base, "generation_config", None)
        for source in (generation, self.config):
            end = getattr(source, "eos_token_id", None)
            if isinstance(end, int):
                return (end,)
            if end:
                return tuple(int(i) for i in end)
        return ()

    def identity(self) -> dict[str, str]:
        """Class, depth, widths and vocabulary of the model."""
        keys = (
            "model_type", "num_hidden_layers", "hidden_size", "intermediate_size",
            "num_attention_heads", "num_key_value_heads", "vocab_size",
        )  # fmt: skip
        shape = {k: str(getattr(self.config, k, None)) for k in keys}
        return {"class": _own_class(self.base).__qualname__, **shape}


def position_limit(config: Any) -> int | None:
    """``max_position_embeddings`` of a text config, or what its rotary scaling makes of it.

    Some scalings (YaRN, Llama 3, LongRoPE) name the length that they stretch. The limit is then at
    least ``factor`` times that length, because ``max_position_embeddings`` of such a config may
    still be the length before stretching. Dynamic scaling always takes it for that. None where
    there is no limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    return max([limit, *(_stretched(p, limit) for p in _rotary_parameters(config))])


def _rotary_parameters(config: Any) -> list[Mapping[str, Any]]:
    """The config's rotary parameters: one set for the model, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return []
    nested = [p for p in parameters.values() if isinstance(p, Mapping)]
    return nested or [parameters]


def _stretched(parameters: Mapping[str, Any], limit: int) -> int:
    """``factor`` times the length that was stretched; 0 where the config lacks either number."""
    original = parameters.get("original_max_position_embeddings")
    if not original and "dynamic" in str(parameters.get("rope_type")):
        original = limit
    factor = parameters.get("factor")
    return int(original * factor) if original and factor else 0


def _own_class(module: nn.Module) -> type:
    """The module's class before FSDP2 put one of its own on top."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _is_mixture(module: nn.Module) -> bool:
    """True if transformers calls this module through its interface for experts."""
    # ``use_experts_implementation`` sets these flags, which its kernels read.
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "config")
    return all(hasattr(module, flag) for flag in flags)


def _dimensions(parameter: Tensor) -> int:
    """Number of axes of the whole parameter; ZeRO-3 leaves a flat rest of it and ``ds_shape``."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _reason(module: nn.Module, parameter: Tensor, dora: bool) -> str:
    kind = _own_class(module).__qualname__
    if isinstance(module, nn.Conv1d):
        return "the taps of a convolution lie on several positions, and no linear covers them"
    if isinstance(module, ParametrizationList) or hasattr(module, "weight_g"):
        return "a parametrisation computes the weight of a linear from it"
    if dora:
        return "DoRA uses this weight outside its linear's call"
    if _dimensions(parameter) >= 3:
        captured = "captured under parameters='linears,experts' only"
        how = captured if _is_mixture(module) else "used without a linear of its own"
        return f"3-D expert tensor of {kind}, {how}"
    if "router" in kind.lower():
        return f"router weight of {kind}, used without a linear of its own"
    return f"{kind} uses this matrix outside any linear"
