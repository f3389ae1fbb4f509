"""Value-Propagation's pairs, collected while a model trains: a callback with a fixed probe.

The paper's diagnostic is of token pairs "during training". Every so many optimizer steps the same
probe goes through the model, without dropout and without a graph, and attention weight and
value-output deviation of its causal-window pairs are counted
(:mod:`alphatoken.diagnose.pairs`). Nothing of the model or of the run's random state
changes: a run with the callback ends with the bits of one without.

    trainer.add_callback(watch_pairs(trainer, "pairs.safetensors", every=50))

A method of a grid asks for it by ``collect_value_propagation: 50``. The file is drawn by
``alphatoken diagnose value-propagation --collected FILE``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from alphatoken.diagnose.pairs import (
    CollectedPairs,
    PairCounts,
    attention_calls,
    choose_positions,
    softmax_layers,
    weigh_pairs,
)
from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position
from alphatoken.model.choice import read_layers
from alphatoken.model.protocol import find_adapter
from alphatoken.support.resume import changed_settings
from alphatoken.train.distributed import SHARDED, layout

OPTION = "collect_value_propagation"
"""The option of a method of a grid: optimizer steps between two looks."""
PROBE = 8
"""Training rows that are looked at: the first ones."""
_PAIRS, _SEED = 20_000, 0
"""Most pairs looked at in each layer and head, and the seed of which."""
_INPUTS = ("input_ids", "attention_mask", "position_ids")


class PairWatch(TrainerCallback):
    """Counts a fixed probe's causal-window pairs at step 0, every ``every`` steps, and the last.

        alpha_{t->k}   and   ||v_t - o_k||_2 / sqrt(d_h),   both positions predicting a response
                                                            token, t < k <= t + W

    For any transformers trainer. Only the process that writes looks. A resumed run takes back what
    came after its checkpoint, so that no step is there twice; a new run begins a new file.
    Exactness: counts are exact to the width of a cell (16 a power of ten), weights and deviations
    to rounding. Memory: 150 KB a step and layer, whatever the probe.

    Args:
        batch: the probe: ``input_ids``, ``labels`` (unshifted, -100 off the response) and what else
            the model takes; it is copied.
        path: of the file; each look replaces it, whole.
        every: optimizer steps between two looks.
        layers: that are looked at: the last K, "all", or indices.
        window: W; None for no limit.
        context: a context for the forward (autocast), where the model needs one.

    Raises:
        InputError: a probe that cannot be used; when the callback is made.

    Source: fig:app:vp_fidelity. Oracle: ``alphatoken.oracle.jacobian.attend``.
    """

    def __init__(
        self,
        batch: Mapping[str, Any],
        path: str | Path,
        *,
        every: int = 50,
        layers: int | str | Sequence[int] = 3,
        window: int | None = 32,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        copied = {n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in batch.items()}
        self._batch = read_batch(copied, role="probe")
        self._used = to_label_position(self._batch.mask)
        (self._chosen,) = choose_positions([self._used], window, _PAIRS, _SEED)
        self._path, self._every, self._layers, self._window = Path(path), every, layers, window
        self._context = context
        parts = (self._batch.inputs["input_ids"], self._batch.labels)
        self._about = {
            "rows": len(parts[0]),
            "probe": hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in parts)).hexdigest(),
            "response_tokens": int(self._batch.mask.sum()),
            "window": window,
            "pairs": _PAIRS,
            "seed": _SEED,
        }
        self.collected = CollectedPairs(self._about)

    # --- the trainer's hooks ----------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up what an earlier part of the run collected; or look for the first time."""
        if not state.is_world_process_zero:
            return
        self.collected = CollectedPairs(self._about)
        if state.global_step == 0:
            self._look(kwargs["model"], 0)
        elif self._path.is_file():
            earlier = CollectedPairs.load(self._path)
            self.collected = taken_up(earlier, self._about, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look, if it is time."""
        if state.is_world_process_zero and state.global_step % self._every == 0:
            self._look(kwargs["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the end, if that was not just done."""
        if state.is_world_process_zero and state.global_step not in self.collected.steps:
            self._look(kwargs["model"], state.global_step)

    def _look(self, model: nn.Module, step: int) -> None:
        self.collected.steps[step] = self.counts(model)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.collected.save(self._path)

    def counts(self, model: nn.Module) -> dict[int, PairCounts]:
        """Counts of the probe's pairs under the model as it is, by layer."""
        adapter = find_adapter(model)
        device = next(model.parameters()).device
        inputs = {
            n: x.to(device) if isinstance(x, Tensor) else x for n, x in self._batch.inputs.items()
        }
        batch = LabelledBatch(inputs, self._batch.labels.to(device), self._batch.mask.to(device))
        used, chosen = self._used.to(device), self._chosen.to(device)
        by_layer: dict[int, PairCounts] = {}
        layers, _ = softmax_layers(adapter, self._layers, f"{OPTION}=0")
        with self._context():
            calls = attention_calls(adapter, layers, batch)
        for layer, call, output in calls:
            counts = PairCounts.of(*weigh_pairs(call, output, used, chosen, self._window))
            by_layer[layer] = by_layer[layer] + counts if layer in by_layer else counts
        return by_layer


def taken_up(earlier: CollectedPairs, about: Mapping[str, Any], step: int) -> CollectedPairs:
    """The same without the records after ``step``, the checkpoint that a run resumes from.

    Raises:
        ConfigError: of another probe or other settings than ``about``; names what differs.
    """
    differing = changed_settings(earlier.about, about)
    if differing:
        name, (then, now) = next(iter(differing.items()))
        raise ConfigError(
            "pairs were collected with another probe or other settings before",
            got=f"{name}: {then} then, {now} now",
            why="counts of two probes cannot be compared step by step",
            remedy="the same probe and settings, or another file",
        )
    return CollectedPairs(earlier.about, {n: x for n, x in earlier.steps.items() if n <= step})


def watch_pairs(trainer: Any, path: str | Path, every: int) -> PairWatch:
    """The callback of a trainer of ours: the first training rows are the probe.

    Raises:
        UnsupportedError: sharded weights, or no scored layer with softmax attention.
    """
    kind, options = layout(trainer.accelerator), trainer.args
    if kind in SHARDED:
        raise UnsupportedError(
            "Value-Propagation's pairs cannot be collected on sharded weights",
            got=f"{OPTION}={every}, layout {kind}",
            why="one process looks, and a forward there needs all of them",
            remedy=f"{OPTION}=0, or DDP, ZeRO-1 or 2",
        )
    layers = read_layers(options.layers)
    softmax_layers(find_adapter(trainer.model), layers, f"{OPTION}=0")
    rows = [trainer.train_dataset[i] for i in range(min(PROBE, len(trainer.train_dataset)))]
    batch = trainer.data_collator(rows)
    inputs = {name: batch[name] for name in _INPUTS if batch.get(name) is not None}
    return PairWatch(
        {**inputs, "labels": trainer.response_labels(batch)},
        path,
        every=every,
        layers=layers,
        window=options.window,
        context=trainer.compute_loss_context_manager,
    )
