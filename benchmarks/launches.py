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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from alphatoken import Scorer, ScorerConfig, masked_sft_loss
from alphatoken.cli import main as cli
from alphatoken.data import Example, encode
from alphatoken.data.rows import Row
from alphatoken.data.stdlib import code_rows
from alphatoken.score import run
from alphatoken.support.storage import write_jsonl
from alphatoken.train.hooks import checkpointing_option
from benchmarks.counting import Launches, counting
from benchmarks.data import MODELS
from benchmarks.models import decoder

ROWS, LENGTH, VOCABULARY, VALIDATION, DEPTH = 2, 64, 49_152, 32, 30
STEP = 3
"""The step that is counted: caches are warm, and the direction is built anew as in every step."""

# --- what is counted -----------------------------------------------------------------------------


def model(depth: int = DEPTH) -> nn.Module:
    """SmolLM2's depth, heads and vocabulary, eight numbers a head."""
    return decoder(
        72,
        depth,
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


def training_step(options: Mapping[str, Any], *, depth: int = DEPTH, ours: bool = True) -> Launches:
    """Counts of one step of our trainer, or of TRL's, with these options."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer

    counts, counted = Launches(), Launches()

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == STEP:
                counted.kernels.update(counts.kernels)
                counted.waits.update(counts.waits)
            counts.clear()

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
            **options,
        }
        made = {
            "model": model(depth),
            "train_dataset": Dataset.from_list(rows(ROWS * STEP, seed=0)),
            "processing_class": tokenizer,
            "callbacks": [Count()],
        }
        if ours:
            arguments = AlphaSFTConfig(**common, held_out_steps=0)
            held_out = Dataset.from_list(rows(VALIDATION, seed=1))
            trainer = AlphaSFTTrainer(args=arguments, validation_dataset=held_out, **made)
        else:
            trainer = SFTTrainer(args=SFTConfig(**common), **made)
        with counting(counts):
            trainer.train()
    return counted


def observed_step(options: Mapping[str, Any] | None, *, depth: int = DEPTH) -> Launches:
    """Counts of a step of a plain loop, alone (None) or with values of its own forward.

    The direction is at hand, as in a loop that keeps it for several steps.
    """
    decoder_, counts = model(depth).train(), Launches()
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

    with counting(counts):
        # The error of differences is looked at in the first, second and fourth batch.
        for _ in range(5):
            counts.clear()
            step()
    return counts


@dataclass(frozen=True)
class CorpusCounts:
    """Counts of ``alphatoken score`` on a corpus.

    Attributes:
        positions: computed for each real token; what is above 1 is padding.
        waits: of each batch after the second.
        tokenised: times that each row was.
    """

    positions: float
    waits: float
    tokenised: float


def scored_corpus(folder: Path, *, count: int = 64, batch: int = 8) -> CorpusCounts:
    """Counts of rows of the standard library, valued by the model in this folder."""
    computed, waits, encoded = list[tuple[int, int]](), list[int](), list[str]()
    score_batch, encode_example = run._score_batch, encode.encode_example

    def counted_batch(scorer: Any, examples: Sequence[Example], queries: int) -> Any:
        lengths = [len(example.input_ids) for example in examples]
        computed.append((max(lengths) * len(lengths), sum(lengths)))
        with counting(Launches()) as counts:
            scored = score_batch(scorer, examples, queries)
        waits.append(counts.waits.total())
        return scored

    def counted_row(row: Row, *rest: Any) -> Example:
        encoded.append(row.place)
        return encode_example(row, *rest)

    with tempfile.TemporaryDirectory() as out, ExitStack() as stack:
        rows, held_out = Path(out, "rows.jsonl"), Path(out, "validation.jsonl")
        texts = [{"prompt": r.prompt, "response": r.response} for r in code_rows(count + 4)]
        write_jsonl(rows, texts[:count])
        write_jsonl(held_out, texts[count:])
        stack.enter_context(mock.patch.object(run, "_score_batch", counted_batch))
        stack.enter_context(mock.patch.object(encode, "encode_example", counted_row))
        words = f"score --model_name_or_path {folder} --train_file {rows} --validation_file "
        words += f"{held_out} --output_dir {out}/values --per_device_train_batch_size {batch} "
        words += " --value paper --max_length 256 --quiet --on_empty skip --no_report"
        status = cli(words.split())
    if status:
        raise RuntimeError(f"alphatoken score ended with {status}")
    positions, tokens = (sum(column) for column in zip(*computed, strict=True))
    # The first batches build G and prove coverage.
    steady = waits[2:]
    return CorpusCounts(
        positions / tokens,
        sum(steady) / len(steady),
        len(encoded) / len({*encoded}),
    )


LABEL_ALL = {"estimator": "label", "parameters": "all", "layers": "all"}
"""Beside a forward that the loop itself runs, its derivative is one-sided by default."""

ONE_PASS = {"validation_micro_batch_size": VALIDATION}
WALK = {"estimator": "walk", "layers": "3"}
UNCHECKED = {checkpointing_option(TrainingArguments): False}
"""Faster and larger than TRL's default, under which each block runs once more in the backward."""

STEPS: dict[str, tuple[str, Callable[..., Launches]]] = {
    "trl": ("TRL's SFTTrainer", partial(training_step, {}, ours=False)),
    "all": (
        "ours, every token, nothing exported",
        partial(training_step, {"policy": "all", "export_values": False}),
    ),
    "top": ("ours, top, K = 3, 32 rows of G", partial(training_step, {})),
    "label": (
        "ours, label, all parameters, G in one",
        partial(training_step, LABEL_ALL | ONE_PASS),
    ),
    "walk": ("ours, walk (the walk itself not in)", partial(training_step, WALK)),
    "trl-unchecked": (
        "TRL, no checkpointing",
        partial(training_step, UNCHECKED, ours=False),
    ),
    "top-unchecked": ("top, no checkpointing", partial(training_step, UNCHECKED)),
    "label-unchecked": (
        "label, no checkpointing",
        partial(training_step, LABEL_ALL | ONE_PASS | UNCHECKED),
    ),
    "walk-unchecked": ("walk, no checkpointing", partial(training_step, WALK | UNCHECKED)),
    "loop": ("a plain loop", partial(observed_step, None)),
    "observe": ("a plain loop with observe(), K = 3", partial(observed_step, {})),
    "observe-label": ("a plain loop with observe(), label", partial(observed_step, LABEL_ALL)),
}
"""Steps by name: what each is, and its counts."""
CORPUS = "corpus"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*STEPS, CORPUS]
    parser.add_argument("names", nargs="*", metavar="STEP", help=", ".join(names))
    parser.add_argument("--where", action="store_true", help="the places that launch and wait")
    parser.add_argument("--json", help="write kernels and waits by step into this file")
    arguments = parser.parse_args()
    results = dict[str, dict[str, float]]()
    for name in arguments.names or names:
        if name == CORPUS:
            corpus = scored_corpus(MODELS["smollm2"].folder())
            results[name] = asdict(corpus)
            print(
                f"{'score, in batches of 8':40} {corpus.positions:.2f} positions a token, "
                f"{corpus.waits:.0f} waits a batch, each row tokenised {corpus.tokenised:.0f} times"
            )
            continue
        title, count = STEPS[name]
        counts = count()
        kernels, waits = counts.kernels.total(), counts.waits.total()
        results[name] = {"kernels": kernels, "waits": waits}
        print(f"{title:40} {kernels:7,} kernels {waits:5,} waits", flush=True)
        if arguments.where:
            for kind in (counts.kernels, counts.waits):
                for place, number in kind.most_common(25):
                    print(f"    {number:7,}  {place}")
                print()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
