"""A trainer's step with valuation against the same trainer's without, and its peak memory.

Both sides are whole optimizer steps: forward, loss, scoring, backward, clipping, AdamW. Ours draws
validation rows, builds G, V and M, values every response token and trains on half of them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from alphatoken import FisherDrift
from benchmarks.measure import alternate
from benchmarks.models import decoder, random_batch
from benchmarks.peak import fresh_mib, print_peak

Row = dict[str, Any]
LAYERS = 3


@dataclass(frozen=True)
class Size:
    """Model and batch."""

    width: int = 512
    depth: int = 24
    vocabulary: int = 8192
    rows: int = 16
    length: int = 128

    @property
    def text(self) -> str:
        return (
            f"d={self.width}, {self.depth} layers, K={LAYERS}, {self.rows} x {self.length} tokens"
        )


SIZE = Size()
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "train_step_fixed": (2, {"validation_mode": "fixed"}),
    "train_step_pool": (8, {"validation_mode": "pool"}),
}
"""Training rows a validation row, and options; the paper's setting, and the cheap one."""

ESTIMATORS = ("alphatoken", "direct", "path", "label")


def train_step(size: Size = SIZE, repeats: int = 7) -> Iterator[Row]:
    """One optimizer step of AlphaSFTTrainer against one of TRL's SFTTrainer, in turn."""
    for name, (share, options) in SETTINGS.items():
        for estimator in ESTIMATORS:
            with tempfile.TemporaryDirectory() as folder:
                other = _stepper(_plain(size, folder), size)
                ours = _stepper(_alpha(size, folder, estimator, share, options), size)
                row = alternate(ours, other, repeats=repeats)
                counted = _flops(ours) / _flops(other)
            yield {
                "name": name,
                "size": f"{estimator}, {size.text}, validation 1:{share}",
                **row,
                "floor": floor(size, share),
                "note": f"FLOPs counted: {counted:.2f}x; floor: FLOPs of the linears",
            }


def floor(size: Size, share: int) -> float:
    """FLOPs that any captured estimator needs beside the step's own, over the step's own.

    Per weight and training token a step costs 6; valuing costs 2 for the error's backward through a
    scored layer and 2 for the contraction. Per validation token: 2 a weight for the forward, 2 for
    the error's backward through head and scored layers, 2 a scored weight for the outer products.
    """
    model = _decoder(size)
    layers = [sum(p.numel() for p in layer.parameters() if p.dim() == 2) for layer in _body(model)]
    head, trunk = model.lm_head.weight.numel(), sum(layers)
    scored = sum(layers[-LAYERS:])
    step = 6 * (trunk + head)
    return 1 + (4 * scored + (2 * trunk + 4 * head + 4 * scored) / share) / step


def _body(model: Any) -> Any:
    return model.model.layers


def train_peak_memory(size: Size = SIZE) -> Iterator[Row]:
    """Peak resident memory of a fresh process that takes two steps."""
    bare, plain = _peak("import", size), _peak("plain", size)
    for name in SETTINGS:
        for estimator in ("alphatoken", "label"):
            ours = _peak(estimator, size, name)
            above = (ours - bare) / (plain - bare)
            yield {
                "name": "train_peak_memory",
                "size": f"{estimator}, {size.text}, {name.removeprefix('train_step_')}",
                "ours": ours,
                "other": plain,
                "ratio": ours / plain,
                "floor": 1.0,
                "note": f"MiB of the whole process; {above:.2f}x above the bare process "
                f"({bare:.0f} MiB)",
            }


def _decoder(size: Size) -> Any:
    return decoder(size.width, size.depth, vocabulary=size.vocabulary)


def _common(folder: str, size: Size) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": size.rows,
        "learning_rate": 1e-5,
        "max_steps": 1000,
        "max_length": None,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }


def _rows(size: Size, count: int, seed: int) -> Any:
    from datasets import Dataset

    batch = random_batch(count, size.length, size.vocabulary, seed=seed)
    return Dataset.from_dict({name: batch[name].tolist() for name in ("input_ids", "labels")})


def _tokenizer() -> Any:
    """TRL wants one; its rows are ids already, so the smallest will do."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
    )


def _plain(size: Size, folder: str) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        _decoder(size),
        args=SFTConfig(**_common(folder, size)),
        train_dataset=_rows(size, size.rows, 0),
        processing_class=_tokenizer(),
    )


def _alpha(size: Size, folder: str, estimator: str, share: int, options: dict[str, Any]) -> Any:
    from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer

    model = _decoder(size)
    batch = max(1, size.rows // share)
    return AlphaSFTTrainer(
        model,
        args=AlphaSFTConfig(
            **_common(folder, size),
            estimator=estimator,
            retention="diagonal",
            validation_batch_size=batch,
            held_out_steps=0,
            export_values=False,
            **options,
        ),
        train_dataset=_rows(size, size.rows, 0),
        validation_dataset=_rows(size, 4 * batch, 1),
        fisher=_fisher(model),
        processing_class=_tokenizer(),
    )


def _fisher(model: Any) -> FisherDrift:
    """A Fisher of the scored layers; what is in it does not change a step's time."""
    depth = len(_body(model))
    names = tuple(f"model.layers.{i}." for i in range(depth - LAYERS, depth))
    weights = {n: p.detach() for n, p in model.named_parameters() if n.startswith(names)}
    weights = {n: p for n, p in weights.items() if p.dim() == 2}
    fisher = {n: torch.full_like(p, 1e-4) for n, p in weights.items()}
    return FisherDrift(fisher, {n: p.clone() for n, p in weights.items()})


def _stepper(trainer: Any, size: Size) -> Callable[[], None]:
    """One optimizer step at each call, as ``Trainer.train`` takes it."""
    trainer.create_optimizer()
    trainer.state.max_steps = 1000
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(size.rows)])
    tokens = (batch["labels"][:, 1:] != -100).sum()

    def step() -> None:
        trainer.model.train()
        trainer.training_step(trainer.model, dict(batch), tokens)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        trainer.state.global_step += 1

    return step


def _flops(run: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _peak(what: str, size: Size, setting: str = "train_step_fixed") -> float:
    numbers = [size.width, size.depth, size.vocabulary, size.rows, size.length]
    return fresh_mib("benchmarks.step", what, setting, *map(str, numbers))


def main() -> None:
    """Two steps in this process; prints its peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["import", "plain", *ESTIMATORS])
    parser.add_argument("setting", choices=list(SETTINGS))
    parser.add_argument("numbers", type=int, nargs=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    size = Size(*options.numbers)
    share, changed = SETTINGS[options.setting]
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "import":
            import alphatoken.train.sft  # noqa: F401
        else:
            made = (
                _plain(size, folder)
                if options.what == "plain"
                else _alpha(size, folder, options.what, share, changed)
            )
            step = _stepper(made, size)
            step(), step()
    print_peak(torch.device("cpu"))


if __name__ == "__main__":
    main()
