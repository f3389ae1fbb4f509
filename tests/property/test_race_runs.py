"""Runs of a race: the winner is its own run, and arms are measured as they are at the look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from alphatoken.oracle.gradients import token_losses


@contextmanager
def world(**kind: Any) -> Iterator[Any]:
    """A small race in a folder of its own."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    from tests.integration.race_world import World

    with TemporaryDirectory() as folder:
        yield World(Path(folder), **kind)


FAST = {("walk", False), ("half", True)}
ARMS = [
    pytest.param(arm, peft, marks=() if (arm, peft) in FAST else pytest.mark.slow)
    for arm in ("walk", "all", "half")
    for peft in (False, True)
]


@pytest.mark.parametrize(("arm", "peft"), ARMS)
def test_the_winner_is_its_run_without_a_race(arm: str, peft: bool) -> None:
    """Weights, optimizer and schedule; a walk's end, dropout and the order of rows among them.

    Proves: the winner of a race (exact), against the same run without a race, bit for bit.
    """
    with world(peft=peft) as small:
        from alphatoken.train.manifest import checkpoints, verify
        from tests.integration.race_world import LOOKS, STEPS, WALK, same_weights

        changes: dict[str, Any] = {"arms": {"walk": WALK}} if arm == "walk" else {}
        options = {"save_strategy": "steps", "save_steps": STEPS, "lr_scheduler_type": "linear"}
        result = small.won_by(arm, options=options, **changes)
        alone = small.alone(arm, "alone", **options)
        assert result.trainer.state.global_step == STEPS
        assert same_weights(result.trainer, alone)
        folders = [small.folder / out / f"checkpoint-{STEPS}" for out in ("race", "alone")]
        for name in ("optimizer.pt", "scheduler.pt"):
            one, two = (str(torch.load(f / name, weights_only=False)) for f in folders)
            assert one == two
        verify(folders[0])
        steps = [step for step, _ in checkpoints(small.folder / "race")]
        assert steps == [*LOOKS, STEPS]
        assert not (small.folder / "race" / "arms").exists()


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_copies_of_choosing_rows_add_no_certainty(pairs: bool) -> None:
    """A file with each row three times decides as the file with each once, and says so.

    Proves: the rows that a race counts (exact), against the same race without copies.
    """
    with world(pairs=pairs) as small:
        once = small.race("once", stop_after_looks=True)
        copies = [row for row in small.choosing for _ in range(3)]
        thrice = small.race("thrice", choosing_dataset=copies, stop_after_looks=True)
        facts = thrice.state.settings["rows"]["choosing"]
        assert (facts["rows"], facts["prompts"]) == (24, 8)
        page = (small.folder / "thrice" / "race.html").read_text()
        assert "24 choosing rows of 8 prompts (rows of one prompt count as one)" in page
    for one, other in zip(once.outcome.differences, thrice.outcome.differences, strict=True):
        for arm, due in one.items():
            found = other[arm]
            assert (found.value, found.error) == pytest.approx((due.value, due.error), rel=1e-6)
            assert (found.low, found.high) == pytest.approx((due.low, due.high), rel=1e-6)


PACKED = {"packing": True, "max_length": 96, "gradient_accumulation_steps": 2}
WEIGHTS = [
    pytest.param(*case, marks=() if index < 2 else pytest.mark.slow)
    for index, case in enumerate([
        (False, "token", {}),
        (True, "row", {}),
        (False, "row", PACKED),
        (False, "turn", {}),
        (True, "token", {"gradient_accumulation_steps": 2}),
        (True, "turn", {}),
    ])
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "kind", "options"), WEIGHTS)
def test_weights_of_rows_race_against_none(pairs: bool, kind: str, options: Any) -> None:
    """Each of the two ends as its own run: by the weights, and on the same rows without them.

    Proves: a race of weights that rows bring (exact), against both runs without a race.
    """
    with world(pairs=pairs, weights=kind) as small:
        from tests.integration.race_world import same_weights

        won = {}
        for arm in ("weights", "all"):
            result = small.won_by(arm, arm, arms=["weights"], options=options)
            won[arm] = result.trainer
            assert same_weights(won[arm], small.alone(arm, "alone", **options))
        assert not same_weights(*won.values())


@pytest.mark.parametrize("arm", ["kept", pytest.param("walk", marks=pytest.mark.slow)])
def test_a_fisher_is_read_by_the_arm_that_wants_it(arm: str) -> None:
    """Rows for it are handed to that arm alone, and the others are the runs that have none.

    Proves: a race of which one arm reads a Fisher (exact), against each run without a race.
    """
    with world() as small:
        from tests.integration import tiny_training as tiny
        from tests.integration.race_world import KEPT, WALK, same_weights

        prompts = tiny.sft_rows(6, seed=21)
        arms = {"walk": WALK, "kept": KEPT}
        result = small.won_by(arm, arms=arms, looks=[2], fisher_dataset=prompts)
        own = {"fisher_dataset": prompts} if arm == "kept" else {}
        alone = small.alone(arm, "alone", **own)
        assert result.trainer.run_facts()["data"] == alone.run_facts()["data"]
        assert same_weights(result.trainer, alone)


def test_epochs_are_the_steps_that_they_have() -> None:
    """A run of epochs has the schedule of its steps, in every arm.

    Proves: the schedule of an arm (exact), against the same run without a race, bit for bit.
    """
    with world() as small:
        from tests.integration.race_world import same_weights

        options = {"max_steps": -1, "num_train_epochs": 1.0, "lr_scheduler_type": "linear"}
        result = small.won_by("half", options=options)
        assert result.state.steps == 6
        assert same_weights(result.trainer, small.alone("half", "alone", **options))


def test_losses_are_of_the_model_at_the_look() -> None:
    """By row, of a run that saved there: no dropout, no token of a prompt, no other step.

    Proves: losses at a look (exact), against ``token_losses`` of the checkpoint of that step.
    """
    with world() as small:
        from safetensors.torch import load_file

        from tests.integration.race_world import LOOKS

        result = small.race(stop_after_looks=True, level=1e-9)
        trainer = small.alone("half", "alone", save_strategy="steps", save_steps=LOOKS[0])
        rows = trainer.prepare_rows(small.choosing, "choosing")
        for step in LOOKS:
            folder = small.folder / "alone" / f"checkpoint-{step}"
            trainer.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            trainer.model.eval()
            for number, row in enumerate(rows):
                ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
                with torch.no_grad():
                    losses = token_losses(trainer.model(input_ids=ids).logits, labels)
                count = int((labels[:, 1:] != -100).sum())
                measured = result.state.losses[str(step)]["half"]["choosing"][number]
                assert measured == pytest.approx(float(losses.sum()) / count, rel=1e-5)
                assert result.state.tokens["choosing"][number] == count


@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_start_is_measured_before_any_step(pairs: bool) -> None:
    """Once, by row, of the model that all arms begin at; a race that goes on keeps it.

    Proves: losses before training (exact), against those of a trainer that has taken no step.
    """
    with world(pairs=pairs) as small:
        from transformers import set_seed

        from alphatoken.race.runner import row_losses

        result = small.race(stop_after_looks=True, level=1e-9)
        args = small.args("untrained", policy="standard")
        set_seed(args.seed)
        untrained = small.kind(
            model=small.model(), args=args, train_dataset=small.train,
            validation_dataset=small.validation, **small.more,
        )  # fmt: skip
        rows = untrained.prepare_rows(small.choosing, "choosing")
        due, _ = row_losses(untrained, rows)
        assert result.state.before == {"choosing": pytest.approx(due, rel=1e-6)}
        assert "before training" in (small.folder / "race" / "race.html").read_text("utf-8")
        again = small.race(resume=True, level=1e-9)
        assert again.state.before == result.state.before
        assert again.outcome == result.outcome


def test_measuring_touches_nothing() -> None:
    """Random states, modes, gradients and running metrics are as before, and losses repeat.

    Proves: a look that changes nothing (exact), against the state before it.
    """
    import random

    # The reference of adapters is the model itself, whose dropout would draw.
    for kind in ({}, {"pairs": True, "peft": True}):
        with world(**kind) as small:
            from alphatoken.race.runner import row_losses

            trainer = small.alone("all", "alone")
            trainer.model.train()
            next(m for n, m in trainer.model.named_modules() if n.endswith("layers.0")).eval()
            rows = trainer.prepare_rows(small.choosing, "choosing")

            def state(trainer: Any = trainer) -> tuple[Any, ...]:
                modes = [module.training for module in trainer.model.modules()]
                metrics = str(dict(trainer._metrics["train"])), trainer._total_train_tokens
                grads = [p.grad is None for p in trainer.model.parameters()]
                return modes, metrics, grads, torch.get_rng_state().tolist(), random.getstate()

            before = state()
            first, _ = row_losses(trainer, rows)
            second, _ = row_losses(trainer, rows)
            assert state() == before
            assert first == second
