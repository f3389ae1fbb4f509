"""Rows and options of a small race, and the same runs without it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import set_seed

from alphatoken.race import RaceConfig, RaceResult, race
from alphatoken.race.decision import decide
from alphatoken.train import (
    AlphaDPOConfig,
    AlphaDPOTrainer,
    AlphaSFTConfig,
    AlphaSFTTrainer,
)
from tests.integration import tiny_training as tiny
from tests.property.test_own_weights import chat_tokenizer

LOOKS, STEPS = [2, 4], 7
HALF = {"policy": "random", "keep_ratio": 0.5}
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 0.25)
WALK = {
    "policy": "top", "estimator": "walk", "keep_ratio": 0.8, "walk_steps": 2, "walk_refresh": 3,
    "walk_learning_rate": 1e-3, "objective": "adaptation",
}  # fmt: skip

KEPT = {
    "policy": "top", "estimator": "label", "objective": "both", "retention": "diagonal",
    "fisher_samples": 4, "fisher_max_new_tokens": 4, "layers": "2",
}  # fmt: skip


@contextmanager
def declared(arm: str) -> Iterator[None]:
    """Inside, this arm wins every race that comes to its end."""

    def decided(*args: Any, **options: Any) -> Any:
        outcome = decide(*args, **options)
        return outcome if outcome.winner is None else replace(outcome, winner=arm)

    with mock.patch("alphatoken.race.runner.decide", decided):
        yield


def weighed(rows: Any, kind: str) -> tuple[Any, Any]:
    """The rows as tokens or turns where these have weights, and the same rows with weights.

    Args:
        rows: of texts.
        kind: what brings the weights: "row", "turn" or "token".
    """
    plain = [dict(row) for row in rows]
    if kind == "turn":
        plain = [{name: _chat(name, text) for name, text in row.items()} for row in plain]
    if kind == "token" and "chosen" not in plain[0]:
        plain = [dict(row) for row in tiny.tokenised(len(plain))]
    return plain, [{**row, **_weights(row, number, kind)} for number, row in enumerate(plain)]


def _chat(name: str, text: str) -> list[dict[str, Any]]:
    return [{"role": "user" if name == "prompt" else "assistant", "content": text}]


def _weights(row: dict[str, Any], number: int, kind: str) -> dict[str, Any]:
    def listed(count: int) -> list[float]:
        return [WEIGHTS[(number + place) % len(WEIGHTS)] for place in range(count)]

    own = WEIGHTS[number % len(WEIGHTS)]
    if kind == "row":
        return {"weight": own, **({"rejected_weight": 2.0} if "rejected" in row else {})}
    if "input_ids" in row:
        return {"loss_weights": listed(len(row["input_ids"]))}
    if kind == "token":  # TRL ends each response with a token of its own
        return {f"{s}_weights": listed(len(row[s]) + 1) for s in ("chosen", "rejected")}
    side = "completion" if "completion" in row else "rejected"
    return {side: [{**message, "weight": own} for message in row[side]]}


class World:
    """Rows and options of one race, and the same run without it.

    With ``weights`` ("row", "turn" or "token") training rows bring some; ``plain`` are the same
    rows without them.
    """

    def __init__(
        self, folder: Path, *, pairs: bool = False, peft: bool = False, weights: str | None = None
    ) -> None:
        self.folder, self.pairs, self.peft = folder, pairs, peft
        rows = tiny.preference_rows if pairs else tiny.sft_rows
        self.train, self.validation = rows(24), rows(10, seed=5)
        self.plain = self.train
        self.tokenizer = chat_tokenizer("plain") if weights == "turn" else tiny.tokenizer()
        if weights is not None:
            self.plain, self.train = weighed(self.train, weights)
        self.choosing = rows(8, seed=9)
        self.kind: Any = AlphaDPOTrainer if pairs else AlphaSFTTrainer

    def args(self, out: str, **more: Any) -> Any:
        own = {"max_steps": STEPS, "held_out_steps": 0, "validation_batch_size": 4, **more}
        options = tiny.options(self.folder / out, **own)
        return (AlphaDPOConfig if self.pairs else AlphaSFTConfig)(**options)

    @property
    def model(self) -> Callable[[], Any]:
        # Dropout: whoever draws a random number too many changes every step behind it.
        return partial(tiny.model, dropout=0.1)

    @property
    def more(self) -> dict[str, Any]:
        more: dict[str, Any] = {"processing_class": self.tokenizer}
        more |= {"peft_config": tiny.lora()} if self.peft else {}
        return more | ({"ref_model": tiny.model()} if self.pairs and not self.peft else {})

    def won_by(self, arm: str, out: str = "race", **changes: Any) -> RaceResult:
        """The race, in which this arm is declared the winner whatever the losses are."""
        with declared(arm):
            # No arm leaves before the last look.
            return self.race(out, **{"level": 1e-9, **changes})

    def race(self, out: str = "race", **changes: Any) -> RaceResult:
        """A race of ``all`` and another one; ``options`` are of the run, others as named."""
        config = {"arms": {"half": HALF}, "looks": LOOKS, "level": 0.5}
        names = set(RaceConfig.__dataclass_fields__)
        config |= {name: own for name, own in changes.items() if name in names}
        rest = {name: own for name, own in changes.items() if name not in names}
        options = rest.pop("options", {})
        arguments = {
            "train_dataset": self.train,
            "validation_dataset": self.validation,
            "choosing_dataset": self.choosing,
            **self.more,
            **rest,
        }
        return race(self.model, self.args(out, **options), RaceConfig(**config), **arguments)

    def alone(self, arm: str, out: str, fisher_dataset: Any = None, **options: Any) -> Any:
        """The run of an arm without a race."""
        own = {
            "all": {"policy": "standard"},
            "half": HALF,
            "walk": WALK,
            "kept": KEPT,
            "weights": {"policy": "weights"},
        }[arm]
        args = self.args(out, **{**options, **own})
        set_seed(args.seed)
        trainer = self.kind(
            model=self.model(),
            args=args,
            train_dataset=self.train if arm == "weights" else self.plain,
            validation_dataset=self.validation,
            fisher_dataset=fisher_dataset,
            **self.more,
        )
        trainer.train()
        return trainer


def same_weights(first: Any, second: Any) -> bool:
    one, two = tiny.weights(first.model), tiny.weights(second.model)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def in_two_processes(folder: Path, rank: int, port: int) -> None:
    """Body of one of two processes: a race, and its winner's run without it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    mark = folder / f"rank-{rank}"
    try:
        small = World(folder)
        options = {"ddp_backend": "gloo"}
        first = small.won_by("half", options=options, stop_after_looks=True)
        assert first.trainer is None
        result = small.won_by("half", options=options, resume=True)
        assert same_weights(result.trainer, small.alone("half", "alone", **options))
        mark.with_suffix(".done").write_text(str(result.outcome))
    except BaseException:
        mark.with_suffix(".error").write_text(traceback.format_exc())
        os._exit(1)  # a process group that waits for others must not hold this one
