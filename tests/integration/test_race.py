"""A race on real trainers: the winner is its own run to the bit, killed or not."""

from __future__ import annotations

import json
import math
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback

from alphatoken.cli import main
from alphatoken.errors import AlphaTokenWarning, ConfigError, DataError, InputError
from alphatoken.race import RaceConfig, race, runner
from alphatoken.race.page import PAGE
from alphatoken.support.storage import open_line
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.policy import TokenPolicy
from tests.forked import SERVER
from tests.integration import tiny_training as tiny
from tests.integration.race_world import (
    HALF,
    KEPT,
    LOOKS,
    STEPS,
    World,
    declared,
    in_two_processes,
    same_weights,
)
from tests.places import tiered
from tests.rows import jsonl


class Broken(TokenPolicy):
    """A policy whose weights are no numbers from step 3 on."""

    name = "broken"

    def native_weights(self, batch: Any) -> torch.Tensor:
        return batch.mask * (float("nan") if batch.step >= 3 else 1.0)


# --- the winner is its own run --------------------------------------------------------------------


def test_a_race_of_pairs(tmp_path: Path) -> None:
    """A row is a pair, its loss that of DPO, its weight 1."""
    world = World(tmp_path, pairs=True)
    result = world.won_by("half")
    assert result.state.tokens["choosing"] == [1.0] * 8
    assert same_weights(result.trainer, world.alone("half", "alone"))


@pytest.mark.parametrize("arm", ["standard", "weights"])
def test_all_against_itself_never_leaves(arm: str, tmp_path: Path) -> None:
    """An arm that trains on every token too, or by weights of 1: each difference is 0."""
    world = World(tmp_path)
    world.train = [{**row, "weight": 1.0} for row in world.plain]
    arms = {"same": {"policy": arm}, "other": {"policy": "weights"}}
    result = world.race(arms=arms, stop_after_looks=True)
    assert result.winner == "all"
    assert all(look["same"].value == look["same"].error == 0 for look in result.outcome.differences)


# --- killed ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing in the library catches it."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Ends the race at the n-th call of one of its functions, before or after its work."""
    with monkeypatch.context() as patch:

        def at(place: str, count: int) -> None:
            when, name = place.split()
            owner: Any = runner.Race if hasattr(runner.Race, name) else runner
            if not hasattr(owner, name):
                owner = AlphaSFTTrainer
            original, calls = getattr(owner, name), 0

            def dying(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == count and when == "before":
                    raise Killed
                result = original(*args, **kwargs)
                if calls == count:
                    raise Killed
                return result

            patch.undo()
            patch.setattr(owner, name, dying)

        at.undo = patch.undo  # type: ignore[attr-defined]
        yield at


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The same race, and its winner's run without it."""
    world = World(tmp_path_factory.mktemp("whole"))
    return world.won_by("half"), world.alone("half", "alone")


PLACES = {
    "in a step of the first arm": ("before training_step", 2),
    "in a step of the second arm": ("before training_step", 3),
    "after an arm was measured, before its checkpoint": ("after _measure", 1),
    "before the losses of the second arm": ("before _measure", 2),
    "after the second arm's checkpoint": ("after _save_checkpoint", 2),
    "at the end of a look": ("before _close_look", 1),
    "at the last look": ("after _measure", 4),
    "before the winner is moved": ("before _move_up", 1),
    "between two of its checkpoints": (),
    "after the winner was moved": ("after _move_up", 1),
    "as the winner goes on": ("before training_step", 10),
}
FIRST = (
    "after an arm was measured, before its checkpoint",
    "at the last look",
    "between two of its checkpoints",
)


@pytest.mark.parametrize("place", tiered(PLACES, FIRST))
def test_a_race_that_was_killed_goes_on_to_the_same_bits(
    place: str, tmp_path: Path, kill: Any, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every kind of place."""
    world = World(tmp_path)
    if place == "between two of its checkpoints":
        rename = Path.rename

        def dying(self: Path, target: Any) -> Any:
            result = rename(self, target)
            if self.parent.parent.name == "arms" and self.name.startswith("checkpoint"):
                raise Killed
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying)
            with pytest.raises(Killed):
                world.won_by("half")
    else:
        kill(*PLACES[place])
        with pytest.raises(Killed):
            world.won_by("half")
        kill.undo()
    result = world.won_by("half", resume=True)
    whole = world.won_by("half", "whole")
    assert result.state.losses == whole.state.losses
    assert result.state.before == whole.state.before
    assert result.outcome == whole.outcome
    assert same_weights(result.trainer, whole.trainer)
    assert same_weights(result.trainer, world.alone("half", "alone"))


@pytest.mark.parametrize("place", ["in a step of the second arm", "before the winner is moved"])
def test_a_race_of_weights_that_was_killed_goes_on(place: str, tmp_path: Path, kill: Any) -> None:
    """To the bits of the run by the weights; rows of other weights are refused."""
    world = World(tmp_path, weights="token")
    kill(*PLACES[place])
    with pytest.raises(Killed):
        world.won_by("weights", arms=["weights"])
    kill.undo()
    if place == "before the winner is moved":
        rows = [{**row, "loss_weights": [1.0] * len(row["labels"])} for row in world.plain]
        with pytest.raises(ConfigError, match="train_dataset"):
            world.won_by("weights", arms=["weights"], train_dataset=rows, resume=True)
    result = world.won_by("weights", arms=["weights"], resume=True)
    assert same_weights(result.trainer, world.alone("weights", "alone"))


def test_a_race_that_ended_with_its_verdict_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    result = world.race(stop_after_looks=True)
    assert result.trainer is None
    assert (tmp_path / "race" / "race.html").is_file()
    with pytest.raises(ConfigError, match="a race in the folder"):
        world.race()
    for changes, name in (
        ({"level": 0.2}, "level"),
        ({"looks": [2, 5]}, "looks"),
        ({"arms": {"half": {**HALF, "keep_ratio": 0.4}}}, "half"),
        ({"choosing_dataset": tiny.sft_rows(8, seed=8)}, "choosing"),
    ):
        with pytest.raises(ConfigError, match=name):
            world.race(resume=True, **changes)
    ended = world.race(resume=True)
    assert same_weights(ended.trainer, world.alone(result.winner, "alone"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("learning_rate", {"options": {"learning_rate": 0.5}}),
        ("max_steps", {"options": {"max_steps": 2 * STEPS}}),
        ("train_dataset", {"train_dataset": tiny.sft_rows(24, seed=77)}),
        ("lora_alpha", {"peft_config": LoraConfig(**{**tiny.LORA, "lora_alpha": 64})}),
        ("r", {"peft_config": LoraConfig(**{**tiny.LORA, "r": 8})}),
    ],
)
def test_arms_that_have_not_begun_join_no_other_run(
    name: str, change: Any, tmp_path: Path, kill: Any
) -> None:
    """Killed after the first arm: the second has no checkpoint with which it would be compared."""
    world = World(tmp_path, peft="peft_config" in change)
    kill("before training_step", 3)
    with pytest.raises(Killed):
        world.race(looks=[2])
    kill.undo()
    with declared("half"), pytest.raises(ConfigError, match=rf"differs in {name}\."):
        world.race(looks=[2], resume=True, **change)


@pytest.mark.slow
def test_two_processes_decide_as_one(tmp_path: Path) -> None:
    """The first one decides, both follow, and the winner is its run in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        SERVER.Process(target=in_two_processes, args=(tmp_path, rank, port)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    errors = [path.read_text() for path in tmp_path.glob("rank-*.error")]
    assert not errors, "\n".join(errors)
    outcomes = {path.read_text() for path in tmp_path.glob("rank-*.done")}
    assert len(outcomes) == 1


# --- what is refused, and said --------------------------------------------------------------------


def test_what_a_race_refuses_before_any_work(tmp_path: Path) -> None:
    world = World(tmp_path)
    model = tiny.model()
    for changes, error, message in (
        ({"options": {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2,
                      "save_strategy": "steps", "save_steps": 2}}, ConfigError, "load_best"),
        ({"options": {"save_only_model": True}}, ConfigError, "save_only_model"),
        ({"options": {"auto_find_batch_size": True}}, ConfigError, "auto_find_batch_size"),
        ({"options": {"ignore_data_skip": True}}, ConfigError, "ignore_data_skip"),
        ({"policy": Broken()}, ConfigError, "takes no policy"),
        ({"looks": [STEPS + 1]}, InputError, "over before the last look"),
        ({"keep_retention": True}, ConfigError, "keep_retention needs retention rows"),
        ({"choosing_dataset": tiny.sft_rows(1, seed=9)}, InputError, "at least 2 choosing rows"),
        ({"choosing_dataset": world.validation}, DataError, "every validation row is a choosing"),
        ({"choosing_dataset": None, "validation_dataset": None}, ConfigError, "rows to choose by"),
        ({"validation_dataset": None, "arms": ["walk-80"]}, ConfigError,
         "need a validation dataset"),
        ({"choosing_dataset": None, "validation_dataset": tiny.sft_rows(8)}, ConfigError,
         "too few trusted rows"),
        ({"arms": {"label": {"policy": "label"}},
          "options": {"validation_mode": "pool", "validation_batch_size": 16}}, ConfigError,
         r"the arm 'label' has too few validation rows. Got: [1-9]\d* rows that choose among the "
         r"arms, and of the others 10 rows.*\(\d+ are enough\)"),
        # What only a trainer of the arm sees, which has the model.
        ({"arms": {"half": HALF, "deep": {"policy": "label", "layers": "9"}}}, ConfigError,
         "layers=9, model depth 3"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            world.race(**changes)
    arguments = {"train_dataset": world.train, "validation_dataset": world.validation}
    with pytest.raises(ConfigError, match="can be made anew"):
        race(model, world.args("race"), **arguments)
    with pytest.raises(ConfigError, match="no configuration of a trainer"):
        race("model", {}, **arguments)
    assert not (tmp_path / "race" / "race.json").exists()
    assert not (tmp_path / "race" / "arms").exists(), "a second try is not taken for another run"


def test_arms_begin_at_the_same_weights(tmp_path: Path) -> None:
    """A function that makes another model each time is found out."""
    world, seeds = World(tmp_path), iter(range(9))
    arguments = {"train_dataset": world.train, "validation_dataset": world.validation}
    config = RaceConfig(arms={"half": HALF}, looks=LOOKS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="do not begin at the same weights"):
        race(
            lambda: tiny.model(next(seeds)), world.args("race"), config,
            choosing_dataset=world.choosing, **arguments, **world.more,
        )  # fmt: skip


def test_arms_begin_with_the_same_adapters(tmp_path: Path) -> None:
    """A function that makes adapters of another scale each time is found out."""
    world, scales = World(tmp_path), iter(range(8, 99, 8))

    def adapted() -> Any:
        config = LoraConfig(**{**tiny.LORA, "lora_alpha": next(scales)})
        return get_peft_model(tiny.model(), config)

    arguments = {"train_dataset": world.train, "validation_dataset": world.validation}
    config = RaceConfig(arms={"half": HALF}, looks=LOOKS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'half' has other adapters.*lora_alpha: 8 then, 16 now"):
        race(
            adapted, world.args("race"), config, choosing_dataset=world.choosing,
            **arguments, **world.more,
        )  # fmt: skip


def test_rows_are_split_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the trusted rows choose; one that comes twice is on one side alone."""
    world = World(tmp_path)
    rows = [*tiny.sums(20, seed=5), *tiny.sums(2, seed=5)]
    result = world.race(
        choosing_dataset=None, validation_dataset=rows, choosing_rows=10, stop_after_looks=True,
        retention_rows=tiny.sums(8, seed=11), level=1e-9,
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "looks at steps 2, 4 of 7, on 10 choosing rows and 8 retention rows" in said
    assert "at most 4 steps more than one run (57%)" in said
    assert "a look before step 20 says little" in said
    assert len(result.state.tokens["choosing"]) == 10
    assert len(result.outcome.retention) == 2
    page = (tmp_path / "race" / "race.html").read_text("utf-8")
    for words in ("Choosing rows", "Retention rows", "What a race does not say", "<img"):
        assert words in page


def test_rows_of_another_text_column_are_split(tmp_path: Path) -> None:
    """A validation row that repeats a choosing row is found by ``dataset_text_field``, too."""
    world = World(tmp_path)
    text = [{"content": f"{row['prompt']}{row['completion']}"} for row in tiny.sums(32)]
    rows = {"train_dataset": text[:16], "validation_dataset": text[16:24]}
    options = {"dataset_text_field": "content"}
    with pytest.raises(DataError, match="every validation row is a choosing row"):
        world.race(choosing_dataset=text[16:24], options=options, **rows)


def test_arms_without_values_need_no_validation_rows(tmp_path: Path) -> None:
    """Choosing rows alone suffice, and the race is the same as beside validation rows."""
    world = World(tmp_path)
    without = world.race("without", validation_dataset=None, stop_after_looks=True)
    beside = world.race("beside", stop_after_looks=True)
    assert without.outcome == beside.outcome


def test_options_that_an_arm_does_not_read_give_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the command line: the share that another arm keeps is no fault of this one."""
    arms = {"rows": {"policy": "walk-rows", "policy_options": {"walk_steps": 2}}, "half": HALF}
    World(tmp_path).race(arms=arms, options={"keep_ratio": 0.7}, stop_after_looks=True)
    said = capsys.readouterr().err
    assert "rows: keep_ratio of the run gives way to this arm" in said
    assert "half: keep_ratio" not in said


def test_few_choosing_rows_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(AlphaTokenWarning, match="3 choosing rows: Student's t has 2 degrees"):
        World(tmp_path).race(choosing_dataset=tiny.sft_rows(3, seed=9), stop_after_looks=True)


def test_training_rows_that_choose_are_warned_of(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.warns(AlphaTokenWarning, match="8 of 24 training rows repeat a choosing row"):
        world.race(choosing_dataset=tiny.sft_rows(8), stop_after_looks=True)


def test_rows_that_repeat_retention_rows_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training rows stay, of which a warning is given; what is valued against does not."""
    rows = [*tiny.sums(8), *tiny.sums(4, seed=5)]
    with pytest.warns(AlphaTokenWarning, match="8 of 24 training rows repeat a retention row"):
        World(tmp_path).race(retention_rows=rows, stop_after_looks=True)
    said = capsys.readouterr().err
    assert "4 validation rows repeat a retention row and were left out" in said


def test_an_arm_that_breaks_leaves_and_the_race_goes_on(tmp_path: Path) -> None:
    """Its reason is in the state and on the page; ``all`` that breaks ends the race."""
    world = World(tmp_path)
    broken = {"policy": f"{__name__}:Broken"}
    arms = {"half": HALF, "broken": broken}
    result = world.race(arms=arms, stop_after_looks=True, level=1e-9)
    assert result.outcome.left_at["broken"] == 1
    assert "broken" in result.state.failures["broken"]
    assert "failed" in (tmp_path / "race" / "race.html").read_text("utf-8")


class Ends(TrainerCallback):
    """Ends every run at its first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def test_an_arm_that_ends_before_its_look_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ended before the look"):
        World(tmp_path).race(callbacks=[Ends()])


def test_an_arm_without_some_rows(tmp_path: Path) -> None:
    """By a column, or by numbers from 0; steps and schedule are those of the whole run."""
    world = World(tmp_path)
    sources = ["web" if number % 3 else "book" for number in range(24)]
    world.train = world.train.add_column("source", sources)
    web = ",".join(str(number) for number in range(24) if number % 3)
    result = world.race(
        arms=["without:source=web", f"same:without_rows={web}"],
        stop_after_looks=True,
        options={"max_steps": -1, "num_train_epochs": 2.0},
        keep_arms=True,
    )
    assert result.state.steps == 12
    for look in result.state.losses.values():
        assert look["without:source=web"] == look["same"] != look["all"]
    folder = tmp_path / "race" / "arms" / "without-source-web"
    facts = [
        json.loads((path / "alphatoken.json").read_text())["facts"]
        for path in folder.glob("checkpoint-*")
    ]
    assert {one["options"]["max_steps"] for one in facts} == {12}
    for arms, message in (
        (["without:source=film"], "leaves out no row"),
        (["rest:without_rows=3,20-24"], "the arm 'rest': 24; the rows are 0 to 23"),
        ({"half": {**HALF, "keep_ratio": 7}}, "keep_ratio"),
    ):
        with pytest.raises((ConfigError, InputError), match=message):
            world.race("other", arms=arms)
    assert not (tmp_path / "other").exists()


def test_an_arm_without_the_rows_of_a_weight(tmp_path: Path) -> None:
    """The column is there when rows are left out by it, and gone when they are trained on."""
    world = World(tmp_path)
    world.train = [{**row, "weight": float(n % 2)} for n, row in enumerate(world.plain)]
    result = world.race(arms=["weights", "without:weight=0.0"], looks=[2], stop_after_looks=True)
    assert set(result.state.losses["2"]) == {"all", "weights", "without:weight=0.0"}


def test_arms_without_the_rows_that_they_read_are_refused(tmp_path: Path) -> None:
    """Before any work, also where only the last arm lacks them."""
    world, weighed = World(tmp_path), World(tmp_path, weights="token")
    data = {**KEPT, "retention": "data"}
    rows = [{**row, "loss_weights": [1.0]} for row in weighed.plain]
    negative = [{**row, "weight": -1.0} for row in world.plain]
    for changes, error, message in (
        ({"arms": {"half": HALF, "data": data}}, ConfigError, "needs a retention dataset"),
        ({"fisher_dataset": tiny.sft_rows(6, seed=21)}, ConfigError, "no Fisher is wanted"),
        ({"retention_dataset": tiny.sft_rows(6, seed=21)}, ConfigError, "no retention rows are"),
        ({"choosing_rows": 4}, ConfigError, "choosing_rows has no effect beside choosing_dataset"),
        ({"arms": ["weights"]}, InputError, "no training row has a weight"),
        ({"arms": ["weights"], "train_dataset": negative}, DataError, "a weight is negative"),
        ({"arms": ["weights"], "train_dataset": rows}, InputError, "'loss_weights' has 1 entries"),
    ):
        with pytest.raises(error, match=message):
            world.race("refused", **changes)
        assert not (tmp_path / "refused" / "race.json").exists()
        assert not (tmp_path / "refused" / "arms").exists()


def test_an_arm_gets_the_retention_rows_that_it_reads(tmp_path: Path) -> None:
    """The others begin and train as without them."""
    arms = {"half": HALF, "data": {**KEPT, "retention": "data"}}
    more = {"retention_dataset": tiny.sft_rows(6, seed=21), "stop_after_looks": True, "looks": [2]}
    both = World(tmp_path).race("both", arms=arms, **more).state.losses["2"]
    del more["retention_dataset"]
    alone = World(tmp_path).race("alone", arms={"half": HALF}, **more).state.losses["2"]
    assert {name: both[name] for name in alone} == alone


# --- the command ----------------------------------------------------------------------------------


def words(place: Path, out: str, *more: str) -> list[str]:
    return [
        "--model_name_or_path", str(place / "model"), "--train_file", str(place / "rows.jsonl"),
        "--validation_file", str(place / "clean.jsonl"), "--output_dir", str(place / out),
        "--max_steps", "5", "--per_device_train_batch_size", "4", "--learning_rate", "1e-2",
        "--validation_batch_size", "4", "--use_cpu", "--bf16", "false", "--report_to", "none",
        "--save_strategy", "no", "--no_chat_template", "--disable_tqdm", "true", "--walk_steps",
        "2", "--estimator", "walk", "--policy", "top", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.saved(tmp_path_factory.mktemp("race"), 24)
    jsonl(folder / "clean.jsonl", tiny.sums(16, seed=5))
    jsonl(folder / "choosing.jsonl", tiny.sums(8, seed=9))
    return folder


def test_the_command_and_the_run_of_its_winner(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``alphatoken race`` ends with the model of ``alphatoken sft`` and the arm's options."""
    own = ["--choosing_file", str(place / "choosing.jsonl"), "--looks", "2", "4", "--level", "1e-9"]
    own += ["--arms", "half:policy=random,keep_ratio=0.5"]
    with declared("half"):
        assert main(["race", *words(place, "raced"), *own]) == 0
    out, err = capsys.readouterr()
    assert "race of 2 arms (all, half): looks at steps 2, 4 of 5, on 8 choosing rows" in err
    assert "no arm reads --policy: each has its own" in err
    assert "'half' wins: at step 4 of 5" in out
    state = json.loads((place / "raced" / "race.json").read_text())
    loss = {
        arm: np.average(columns["choosing"], weights=state["tokens"]["choosing"])
        for arm, columns in state["losses"]["4"].items()
    }
    lower = 100 * (1 - math.exp(loss["half"] - loss["all"]))
    assert f"nats a token (perplexity {lower:.2g} % lower), and all intervals" in out
    assert "The arms that do not go on took 4 steps (80% of a whole run)" in out
    assert f"trained: 'half', all 5 steps; the model is in {place / 'raced'}\n" in out
    page, then, alone = out.splitlines()[-3:]
    assert page == "no page of values: policy 'random' weighs tokens without values"
    assert main(shlex.split(then.removeprefix("next, to see which losses fell: alphatoken "))) == 0
    capsys.readouterr()
    arm = ["--policy", "random", "--keep_ratio", "0.5"]
    assert main(["sft", *words(place, "alone"), *arm]) == 0
    one, two = (load_file(place / name / "model.safetensors") for name in ("raced", "alone"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    # Printed and on the page, it needs no word more.
    command = alone.removeprefix("to train this way without a race: ")
    shown = (place / "raced" / PAGE).read_text("utf-8").partition("The trained model")[2]
    assert escape(command) in shown
    assert main(shlex.split(command)[1:]) == 0
    three = load_file(place / "raced-alone" / "model.safetensors")
    assert all(torch.equal(one[name], three[name]) for name in one | three)


WINNERS = [
    ("sft", "all", "standard"),
    ("sft", "walk-80", "top"),
    ("sft", "validation-mix", "validation-mix"),
    ("dpo", "walk-80", "top"),
]


@pytest.mark.parametrize(
    ("command", "arm", "policy"),
    [pytest.param(*one, marks=() if one[1] == "walk-80" else pytest.mark.slow) for one in WINNERS],
)
def test_the_winner_of_a_recipes_race_is_trained_without_it(
    command: str, arm: str, policy: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the printed line, which ends with the winner's weights; it leaves the recipe out."""
    race_words = words(place, f"of-{command}-{arm}", "--config", "recommended")
    race_words += ["--looks", "2", "--level", "1e-9"]
    race_words += ["--choosing_file", str(place / "choosing.jsonl")]
    if command == "dpo":
        for seed, name in enumerate(("train", "validation", "choosing")):
            rows = list(tiny.preference_rows(24, seed=seed))
            at = race_words.index(f"--{name}_file")
            race_words[at + 1] = str(jsonl(place / f"{name}-pairs.jsonl", rows))
        race_words += ["--dpo", "--arms", "walk-80"]
    with declared(arm):
        assert main(["race", *race_words]) == 0
    *out, line = capsys.readouterr().out.splitlines()
    for scored in (one for one in out if one.startswith("next, to see which losses fell")):
        # Trusted rows that were trained on show no more than training rows do.
        train = race_words[race_words.index("--train_file") + 1]
        assert (f"--train_file {train} " in scored) == (arm == "validation-mix")
    start = f"to train this way without a race: alphatoken {command} "
    assert line.startswith(start)
    typed = shlex.split(line.removeprefix(start))
    assert typed[typed.index("--policy") + 1] == policy
    assert not {"--config", "--looks", "--level", "--choosing_file", "--arms", "--dpo"} & {*typed}
    assert ("--estimator" in typed) == (policy == "top")
    assert main([command, *typed]) == 0
    one, two = (
        load_file(place / f"of-{command}-{arm}{end}" / "model.safetensors")
        for end in ("", "-alone")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_command_of_an_arm_is_its_own_or_none(place: Path, tmp_path: Path) -> None:
    """What a recipe of a race says of the run is typed; where an arm has fewer rows, nothing is."""
    from alphatoken.cli.arguments import read_arguments, words_of
    from alphatoken.cli.without_race import command_of_arm
    from alphatoken.race.arms import read_arms
    from alphatoken.train import AlphaSFTConfig

    recipe = tmp_path / "own.yaml"
    recipe.write_text("command: race\narms: [walk-80]\nlooks: [2]\nweight_decay: 0.25\n")
    more = ["--overwrite_output", "--arms", "random", "without:source=web", f"--config={recipe}"]
    typed = words(place, "arm", *more)
    _, random, without = read_arms(["random", "without:source=web"])
    own = {
        arm.name: read_arguments(
            "sft", typed, AlphaSFTConfig, race=True, over=words_of(arm.options)
        )
        for arm in (random, without)
    }
    assert command_of_arm(own[without.name], without, 3) == ""
    line = command_of_arm(own[random.name], random, 3)
    (place / "arm-alone").mkdir()
    assert "--policy random --weight_decay 0.25" in line
    assert line.endswith(f" --output_dir {place / 'arm-alone'}")
    line = command_of_arm(own[random.name], random, 3)
    assert line.endswith(f" --output_dir {place / 'arm-alone-2'}")
    assert not {"--overwrite_output", "--arms", "--estimator"} & {*shlex.split(line)}


@pytest.mark.parametrize("command", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_the_command_races_weights_of_the_rows(command: str, place: Path) -> None:
    """``all`` is the run that leaves them aside; choosing rows are all the rows that it takes."""
    rows: Any = tiny.sums if command == "sft" else tiny.preference_rows
    weights = {"weight": 0.5} if command == "sft" else {"weight": 0.5, "rejected_weight": 2.0}
    weighed = [{**row, **(weights if n % 3 else {"weight": 0.0})} for n, row in enumerate(rows(24))]
    file = ["--train_file", str(jsonl(place / "weighed.jsonl", weighed)), "--validation_rows", "0"]
    own = ["--choosing_file", str(jsonl(place / "trusted.jsonl", list(rows(8, seed=9))))]
    own += ["--looks", "2", "--level", "1e-9", "--arms", "weights"]
    for arm, alone in (
        ("weights", ["--policy", "weights"]),
        ("all", ["--policy", "standard", "--unread_columns", ",".join(weights)]),
    ):
        raced, single = (words(place, f"{command}-{arm}-{name}") for name in ("raced", "alone"))
        for line in (raced, single):
            at = line.index("--validation_file")
            line[at : at + 2] = file
        at = single.index("--walk_steps")  # which a run of these policies does not read
        del single[at : at + 4]
        with declared(arm):
            assert main(["race", *raced, *own, *(["--dpo"] if command == "dpo" else [])]) == 0
        assert main([command, *single, *alone]) == 0
        one, two = (
            load_file(place / f"{command}-{arm}-{name}" / "model.safetensors")
            for name in ("raced", "alone")
        )
        assert all(torch.equal(one[name], two[name]) for name in one | two)


def test_the_command_on_a_fisher_of_one_arm(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompts are read for that arm; drawn from the training rows they are refused."""
    kept = "kept:policy=top,estimator=label,objective=both,retention=diagonal,layers=2,"
    kept += "fisher_samples=4,fisher_max_new_tokens=4"
    own = ["--arms", "walk-80", kept, "--looks", "2", "--stop_after_looks"]
    jsonl(place / "prompts.jsonl", tiny.sums(8, seed=21))
    prompts = ["--fisher_data", str(place / "prompts.jsonl")]
    assert main(["race", *words(place, "drawn"), *own]) == 2
    err = capsys.readouterr().err
    assert "other rows held out" in err
    assert "0 and 4 for 'kept'" in err
    assert main(["race", *words(place, "walked"), *prompts]) == 2
    assert "no Fisher is wanted" in capsys.readouterr().err
    assert main(["race", *words(place, "kept"), *own, *prompts]) == 0
    capsys.readouterr()


def test_the_command_stops_and_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = words(place, "stopped", "--looks", "2")
    assert main(["race", *own, "--stop_after_looks"]) == 0
    out, err = capsys.readouterr()
    assert "8 of 16 validation rows are set aside to choose by, and 8 are left for the arms" in err
    opens, then = out.splitlines()[-2:]
    assert opens == open_line(place / "stopped" / PAGE)
    page = (place / "stopped" / "race.html").read_text("utf-8")
    assert page.index("What a race does not say") < page.index('class="command">alphatoken race')
    assert not (place / "stopped" / "model.safetensors").exists()
    winner = json.loads((place / "stopped" / "race.json").read_text())["outcome"]["winner"]
    assert main(["race", *own]) == 2
    err = capsys.readouterr().err
    assert f"the output folder holds a race that has ended. Got: '{winner}' won" in err
    assert "--resume shows its verdict again" in err
    assert main(shlex.split(then.removeprefix("next: alphatoken "))) == 0
    assert (place / "stopped" / "model.safetensors").exists()
    page = (place / "stopped" / "race.html").read_text("utf-8")
    assert f"was trained to step 5: {place / 'stopped'}" in page
    (said,) = [line for line in out.splitlines() if " step 2 of 5" in line]
    capsys.readouterr()
    assert main(["race", *own, "--resume"]) == 0
    assert f"{said}\n" in capsys.readouterr().out
    (line,) = re.findall('class="command">(.*?)</code>', page)
    assert line.startswith("alphatoken sft ")
    assert main(["race", *own, "--overwrite_output", "--stop_after_looks"]) == 0
    assert not list((place / "stopped").glob("checkpoint-*"))


def test_a_column_that_an_arm_leaves_rows_out_by_is_read(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "source": "web" if n % 3 else "book", "id": n} for n, row in
            enumerate(tiny.sums(24))]  # fmt: skip
    marked = words(place, "marked", "--looks", "2", "--stop_after_looks")
    marked[marked.index("--train_file") + 1] = str(jsonl(place / "marked.jsonl", rows))
    assert main(["race", *marked, "--arms", "without:source=web"]) == 0
    assert "not read: id\n" in capsys.readouterr().err


def test_the_command_on_pairs_and_what_it_refuses(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl(place / "clean-pairs.jsonl", list(tiny.preference_rows(16, seed=5)))
    pairs = words(place, "pairs", "--dpo", "--looks", "2", "--stop_after_looks")
    pairs[pairs.index("--train_file") + 1] = str(place / "pairs.jsonl")
    pairs[pairs.index("--validation_file") + 1] = str(place / "clean-pairs.jsonl")
    assert main(["race", *pairs]) == 0
    capsys.readouterr()
    # The recipe's prompts of a Fisher, which a walk does not read, give way in every arm.
    assert main(["race", *pairs, "--config", "laptop-dpo", "--output_dir", str(place / "dpo")]) == 0
    assert "nats a pair" in capsys.readouterr().out
    for more, message in (
        (["--arms", "rndom"], "did you mean random"),
        (["--arms", "narrow:policy=random,zzz=0.4"], "narrow:policy=...,policy_options={...}"),
        (["--choosing_file", "none.jsonl"], "choosing_file does not exist"),
        (["--choosing_file", str(place / "choosing.jsonl"), "--choosing_rows", "4"],
         "--choosing_rows has no effect"),
        (["--keep_retention"], "keep_retention needs retention rows"),
        (["--arms", "without:source=film"], "leaves out no row"),
        (["--arms", "weights"], "no training row has a weight"),
        (["--arms", "deep:policy=label,layers=[9]"], "layers=[9]"),
        (["--looks", "9"], "over before the last look"),
        (["--load_best_model_at_end", "true", "--eval_strategy", "steps", "--save_strategy",
          "steps", "--eval_data", str(place / "rows.jsonl")], "load_best_model_at_end"),
    ):  # fmt: skip
        assert main(["race", *words(place, "refused"), *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        ("", False), ("--dpo", True), ("--dpo true", True), ("--dpo=true", True),
        ("--dpo false", False), ("--dpo --looks 2", True), ("RECIPE", True),
        ("RECIPE --dpo false", False),
    ],
)  # fmt: skip
def test_a_race_of_pairs_is_told_by_the_flag_or_a_recipe(
    words: str, pairs: bool, tmp_path: Path
) -> None:
    """The parser that reads the rest reads it alike."""
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.race import _is_of_pairs
    from alphatoken.train import AlphaSFTConfig

    recipe = tmp_path / "own.yaml"
    recipe.write_text("command: race\ndpo: true\n")
    typed = words.replace("RECIPE", f"--config {recipe}").split()
    assert _is_of_pairs(typed) == pairs
    said = read_arguments(
        "sft", [*typed, "--use_cpu", "--bf16", "false"], AlphaSFTConfig, race=True
    )
    assert said.race is not None
    assert said.race.dpo == pairs


def test_the_help_names_the_options_of_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["race", "--help_all"]) == 0
    text = capsys.readouterr().out
    for name in ("--arms", "--looks", "--choosing_file", "--stop_after_looks", "--keep_ratio"):
        assert name in text
