"""Kernels that one training step launches, and its waits for the device: counts, on any CPU.

    python -m benchmarks.launches               all steps
    python -m benchmarks.launches top --where   one of them, and the places that launch and wait

An accelerator runs as fast as it is fed. What feeds it is counted below autograd: an operator that
is no view and no bare allocation is at least one kernel, and reading a number of the device (by
``item``, ``nonzero``, a Boolean index, ``tolist``) is a wait. Both depend on shapes alone and
repeat exactly. The model is a random Llama with SmolLM2's depth, heads and vocabulary and eight
numbers a head; the step is the third of a run of 2 rows with 64 tokens, checkpointed as TRL does by
default.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from alphatoken import Scorer, ScorerConfig, masked_sft_loss
from alphatoken.model import fingerprint
from benchmarks.models import decoder

ROWS, LENGTH, VOCABULARY, VALIDATION = 2, 64, 49_152, 32
STEP = 3
"""The step that is counted: caches are warm, and the direction is built anew as in every step."""

# --- counting ------------------------------------------------------------------------------------

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NO_KERNEL = {"_unsafe_view", "detach", "lift_fresh", "set_", "resize_", "_reshape_alias"}
_WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_READS = {"tolist", "cpu", "__array__"}


Launches = dict[str, Counter[str]]
"""Counts of one piece of work: ``kernels`` and ``waits``, each by the place in this library that
asked for it."""


def _place() -> str:
    """The innermost line of this library on the stack, or else of another one above torch."""
    frame, other = sys._getframe(2), "elsewhere"
    while frame is not None:
        name = frame.f_code.co_filename
        for package in ("/alphatoken/", "/site-packages/"):
            if package in name and "/site-packages/torch/" not in name:
                line = f"{name.split(package)[-1]}:{frame.f_code.co_name}"
                if package == "/alphatoken/":
                    return line
                other = line if other == "elsewhere" else other
        frame = frame.f_back
    return other


class _Kernels(TorchDispatchMode):
    """What is dispatched below autograd."""

    def __init__(self, counts: Launches) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in _ALLOCATIONS or name in _NO_KERNEL:
            return result
        if name in _WAITS or (name.startswith("index") and any(map(_boolean, args[1]))):
            self.counts["waits"][_place()] += 1
        if name != "_local_scalar_dense":
            self.counts["kernels"][_place()] += 1
        return result


def _boolean(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class _Reads(TorchFunctionMode):
    """Tensors that are read whole, which the dispatcher of a CPU does not see."""

    def __init__(self, counts: Launches) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and args and isinstance(args[0], Tensor):
            self.counts["waits"][_place()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Launches]:
    """Inside, everything is counted as an accelerator would be given it.

    Two defaults of a CPU launch more than an accelerator's would: optimizers and clipping without
    ``foreach``, and fingerprints of weights in small blocks.
    """
    counts: Launches = {"kernels": Counter(), "waits": Counter()}
    foreach = _foreach_utils._get_foreach_kernels_supported_devices
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if vars(module).get(foreach.__name__) is foreach:
                stack.enter_context(
                    mock.patch.object(module, foreach.__name__, return_value=[*foreach(), "cpu"])
                )
        stack.enter_context(mock.patch.object(fingerprint, "_JOINED_ON_CPU", fingerprint._JOINED))
        stack.enter_context(_Reads(counts))
        stack.enter_context(_Kernels(counts))
        yield counts


# --- what is counted -----------------------------------------------------------------------------


def model() -> nn.Module:
    """SmolLM2's depth, heads and vocabulary, eight numbers a head."""
    return decoder(
        72,
        30,
        vocabulary=VOCABULARY,
        heads=9,
        num_key_value_heads=3,
        intermediate_size=192,
        tie_word_embeddings=True,
    )


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Random tokens; the second half of each row is its response."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, VOCABULARY, (count, LENGTH), generator=generator).tolist()
    prompt = LENGTH // 2
    return [{"input_ids": row, "labels": [-100] * prompt + row[prompt:]} for row in ids]


def tensors(examples: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of rows of one length."""
    return {name: torch.tensor([row[name] for row in examples]) for name in examples[0]}


def training_step(options: Mapping[str, Any] | None) -> Launches:
    """Counts of one step of TRL's trainer (None), or of ours with these options."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer

    counted: Launches = {}

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == STEP:
                counted.update((kind, counter.copy()) for kind, counter in counts.items())
            for counter in counts.values():
                counter.clear()

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>"
    )
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "per_device_train_batch_size": ROWS,
            "max_steps": STEP,
            "logging_steps": 1000,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "max_length": None,
        }
        made = {
            "model": model(),
            "train_dataset": Dataset.from_list(rows(ROWS * STEP, seed=0)),
            "processing_class": tokenizer,
            "callbacks": [Count()],
        }
        if options is None:
            trainer = SFTTrainer(args=SFTConfig(**common), **made)
        else:
            ours = AlphaSFTConfig(**common, held_out_steps=0, **options)
            held_out = Dataset.from_list(rows(VALIDATION, seed=1))
            trainer = AlphaSFTTrainer(args=ours, validation_dataset=held_out, **made)
        with counting() as counts:
            trainer.train()
    return counted


def observed_step(options: Mapping[str, Any] | None) -> Launches:
    """Counts of a step of a plain loop, alone (None) or with values of its own forward.

    The direction is at hand, as in a loop that keeps it for several steps.
    """
    decoder_ = model().train()
    batch, validation = (tensors(rows(ROWS, seed)) for seed in (0, 1))
    labels = batch.pop("labels")
    everything = torch.ones_like(labels, dtype=torch.bool)
    scorer = (
        None if options is None else Scorer(decoder_, validation, config=ScorerConfig(**options))
    )

    def step() -> None:
        decoder_.zero_grad()
        if scorer is None:
            logits = decoder_(**batch, use_cache=False).logits
        else:
            with scorer.observe() as observed:
                logits = decoder_(**batch, use_cache=False).logits
                observed.values(logits, labels)
        masked_sft_loss(logits, labels, everything).backward()

    # The error of differences is looked at in the first, second and fourth batch.
    for _ in range(4):
        step()
    with counting() as counts:
        step()
    return counts


LABEL_ALL = {"estimator": "label", "parameters": "all", "layers": "all"}
"""Beside a forward that the loop itself runs, its derivative is one-sided by default."""

STEPS: dict[str, tuple[str, Callable[[], Launches]]] = {
    "trl": ("TRL's SFTTrainer", lambda: training_step(None)),
    "all": (
        "ours, every token, nothing exported",
        lambda: training_step({"policy": "all", "export_values": False}),
    ),
    "top": ("ours, top, K = 3, 32 rows of G by 2", lambda: training_step({})),
    "label": ("ours, label over all parameters", lambda: training_step(LABEL_ALL)),
    "walk": ("ours, walk (the walk itself not in)", lambda: training_step({"estimator": "walk"})),
    "loop": ("a plain loop", lambda: observed_step(None)),
    "observe": ("a plain loop with observe(), K = 3", lambda: observed_step({})),
    "observe-label": ("a plain loop with observe(), label", lambda: observed_step(LABEL_ALL)),
}
"""Steps by name: what each is, and its counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--where", action="store_true", help="the places that launch and wait")
    parser.add_argument("--json", help="write kernels and waits by step into this file")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.names or STEPS:
        title, count = STEPS[name]
        counts = count()
        totals = {kind: counter.total() for kind, counter in counts.items()}
        results[name] = totals
        print("{:40} {kernels:7,} kernels {waits:5,} waits".format(title, **totals), flush=True)
        if arguments.where:
            for counter in counts.values():
                for place, number in counter.most_common(25):
                    print(f"    {number:7,}  {place}")
                print()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
