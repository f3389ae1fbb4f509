"""Value-Propagation's pairs, collected while a model trains: a callback with a fixed probe.

The paper's diagnostic is of token pairs "during training". Every so many optimizer steps the same
probe goes through the model, without dropout and without a graph, and attention weight and
value-output deviation of its causal-window pairs are counted
(:mod:`alphatoken.fidelity.collected_pairs`). Nothing of the model or of the run's random state
changes: a run with the callback ends with the bits of one without.

    trainer.add_callback(PairWatch(batch, "pairs.safetensors", every=50))

``collect_value_propagation=N`` of our trainers does the same on the first training rows. The file
is drawn by ``alphatoken diagnose value-propagation --collected FILE``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from alphatoken.errors import ConfigError
from alphatoken.fidelity.collected_pairs import CollectedPairs, PairCounts
from alphatoken.fidelity.pairs import (
    choose_positions,
    see_calls,
    softmax_layers,
    weigh_pairs,
)
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position
from alphatoken.model.layer_choice import read_layers
from alphatoken.model.protocol import find_adapter
from alphatoken.train.manifest import RESULTS

__all__ = ["FILE", "PROBE", "PairWatch", "pair_watch"]

FILE = "value-propagation.safetensors"
"""Where our trainers write it, in ``output_dir/_alphatoken``."""
PROBE = 8
"""Training rows that our trainers look at: the first ones."""
_INPUTS = ("input_ids", "attention_mask", "position_ids")


class PairWatch(TrainerCallback):
    """Counts a fixed probe's causal-window pairs at step 0, every ``every`` steps, and the last.

        alpha_{t->k}   and   ||v_t - o_k||_2 / sqrt(d_h),   both positions predicting a response
                                                            token, t < k <= t + W

    For any transformers trainer. Only the process that writes looks. A resumed run takes back what
    came after its checkpoint, so that no step is there twice; a new run begins a new file.
    Exactness: counts are exact to the width of a cell (16 a power of ten), weights and deviations
    to rounding. Memory: 150 KB a step and layer, whatever the probe; of more pairs than ``pairs`` a
    layer, positions are drawn once, with a fixed seed.

    Args:
        batch: the probe: ``input_ids``, ``labels`` (unshifted, -100 off the response) and what else
            the model takes; it is copied.
        path: of the file; each look replaces it, whole.
        every: optimizer steps between two looks.
        layers: that are looked at: the last K, "all", or indices.
        window: W; None for no limit.
        pairs: most pairs looked at in each layer and head.
        seed: of the draw of positions.
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
        pairs: int = 20_000,
        seed: int = 0,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        copied = {n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in batch.items()}
        self._batch = read_batch(copied, role="probe")
        self._used = to_label_position(self._batch.mask)
        (self._chosen,) = choose_positions([self._used], window, pairs, seed)
        self._path, self._every, self._layers, self._window = Path(path), every, layers, window
        self._context = context
        ids = self._batch.inputs["input_ids"].cpu()
        self._about = {
            "rows": len(ids),
            "probe": hashlib.sha256(ids.numpy().tobytes() + _labels(self._batch)).hexdigest(),
            "response_tokens": int(self._batch.mask.sum()),
            "window": window,
            "pairs": pairs,
            "seed": seed,
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
            earlier.require_same(self._about)
            self.collected = earlier.after_resuming(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look, if it is time."""
        if state.is_world_process_zero and state.global_step % self._every == 0:
            self._look(kwargs["model"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the model that training ends with."""
        if state.is_world_process_zero and state.global_step not in self.collected.steps:
            self._look(kwargs["model"], state.global_step)

    # --- one look ---------------------------------------------------------------------------------

    def _look(self, model: nn.Module, step: int) -> None:
        self.collected.steps[step] = self.counts(model)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.collected.save(self._path)

    def counts(self, model: nn.Module) -> dict[int, PairCounts]:
        """Counts of the probe's pairs under the model as it is, by layer."""
        adapter = find_adapter(model)
        device = next(model.parameters()).device
        inputs = {n: _on(x, device) for n, x in self._batch.inputs.items()}
        batch = LabelledBatch(inputs, self._batch.labels.to(device), self._batch.mask.to(device))
        used, chosen = self._used.to(device), self._chosen.to(device)
        found: dict[int, PairCounts] = {}
        layers, _ = softmax_layers(adapter, self._layers, "collect_value_propagation=0")
        with self._context():
            calls = see_calls(adapter, layers, batch)
        for seen in calls:
            counts = PairCounts.of(*weigh_pairs(seen, used, chosen, self._window))
            found[seen.layer] = found[seen.layer] + counts if seen.layer in found else counts
        return found


def pair_watch(trainer: Any) -> PairWatch:
    """The callback of a trainer of ours, by its options: the first training rows are the probe.

    Raises:
        ConfigError: the training rows are a stream, or there are none.
    """
    options = trainer.args
    if not hasattr(trainer.train_dataset, "__len__") or not len(trainer.train_dataset):
        raise ConfigError(
            "there are no first training rows to collect Value-Propagation's pairs on",
            got=type(trainer.train_dataset).__name__,
            why="the probe is the same at every step, and in every part of a resumed run",
            remedy="collect_value_propagation=0, and trainer.add_callback(PairWatch(batch, path))",
        )
    rows = [trainer.train_dataset[i] for i in range(min(PROBE, len(trainer.train_dataset)))]
    batch = trainer.data_collator(rows)
    inputs = {name: batch[name] for name in _INPUTS if batch.get(name) is not None}
    return PairWatch(
        {**inputs, "labels": trainer.response_labels(batch)},
        Path(str(options.output_dir)) / RESULTS / FILE,
        every=options.collect_value_propagation,
        layers=read_layers(options.score_layers),
        window=options.window,
        context=trainer.compute_loss_context_manager,
    )


def _labels(batch: LabelledBatch) -> bytes:
    labels: bytes = batch.labels.cpu().numpy().tobytes()
    return labels


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
