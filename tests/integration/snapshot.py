"""Everything about a model, and about the process, that the library must leave as it found it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def bits(tensor: Tensor | None) -> bytes | None:
    """The tensor's content; equal bytes mean equal bits, NaN included."""
    if tensor is None:
        return None
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Snapshot:
    """The state at one moment; ``check`` asserts that nothing has changed since.

    Python's own generator takes part on request only: under pytest, beartype draws from it to pick
    the items that it checks.
    """

    def __init__(self, model: nn.Module, *, python_random: bool = False) -> None:
        self.model, self.python_random = model, python_random
        self.state = self._take()

    def _take(self) -> dict[str, Any]:
        model = self.model
        modules = dict(model.named_modules())
        parameters = dict(model.named_parameters(remove_duplicate=False))
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return {
            "modules": {name: id(module) for name, module in modules.items()},
            "parameters": {name: id(p) for name, p in parameters.items()},
            "state dict": {name: bits(t) for name, t in model.state_dict().items()},
            "buffers": {name: bits(t) for name, t in model.named_buffers()},
            "versions": {name: p._version for name, p in parameters.items()},
            "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
            "grad": {name: (id(p.grad), bits(p.grad)) for name, p in parameters.items()},
            "parameter hooks": {
                name: len(getattr(p, "_backward_hooks", None) or ())
                for name, p in parameters.items()
            },
            "training": {name: module.training for name, module in modules.items()},
            "hooks": {
                (name, kind): list(getattr(module, kind, None) or ())
                for name, module in modules.items()
                for kind in _HOOKS
            },
            "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
            "gradient_checkpointing": {
                name: getattr(module, "gradient_checkpointing", None)
                for name, module in modules.items()
            },
            "configuration": repr(base.config.to_dict()),
            "attention implementation": base.config._attn_implementation,
            "attention registry": {
                name: id(function)
                for name, function in ALL_ATTENTION_FUNCTIONS._local_mapping.items()
            },
            "torch RNG": bits(torch.get_rng_state()),
            "numpy RNG": repr(np.random.get_state()),  # noqa: NPY002  (the global one is meant)
            "python RNG": random.getstate() if self.python_random else None,
            "grad mode": torch.is_grad_enabled(),
            "default dtype": torch.get_default_dtype(),
        }

    def check(self) -> None:
        """Assert that everything is as it was, naming what is not."""
        now = self._take()
        for what, before in self.state.items():
            after = now[what]
            if before == after:
                continue
            if isinstance(before, dict):
                changed = [k for k in {**before, **after} if before.get(k) != after.get(k)]
                raise AssertionError(f"{what} changed: {changed[:5]}")
            raise AssertionError(f"{what} changed")
