"""Checkpoints that are whole or absent, and killed runs that go on to the same bits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from alphatoken.errors import AlphaTokenWarning, ConfigError, DataError, NumericalError
from alphatoken.support.storage import read_tensors
from alphatoken.train import AlphaSFTTrainer, manifest
from alphatoken.train.checkpoint import STAGING
from alphatoken.train.manifest import MANIFEST, latest_complete, verify
from tests.integration import tiny_training as tiny
from tests.integration.killed_run import Moment, Run, finish, kill
from tests.places import NIGHTLY
from tests.property.test_storage import file_size_limit

WRITES = 153  # file operations of a run's three saves
CLOCK = ("runtime", "per_second", "seconds", "scoring", "direction")

# What is trained. "sft" draws at random in the forward (dropout of the adapters), accumulates, and
# ranks tokens over whole steps, scored ahead of them; "dpo" trains all weights.
RUNS: dict[str, dict[str, Any]] = {
    "sft": {
        "kind": "sft",
        "peft": True,
        "options": {
            "lora_dropout": 0.2,
            "gradient_accumulation_steps": 2,
            "keep_scope": "global",
            "validation_mode": "pool",
            "per_device_train_batch_size": 2,
        },
    },
    "full": {
        "kind": "sft",
        # Weights that have moved further from the Fisher's reference than a start would allow.
        "options": {"direction_steps": 2, "policy": "bottom", "max_relative_drift": 1.0},
    },
    "dpo": {"kind": "dpo", "options": {"max_relative_drift": None}},
    "totals": {"kind": "sft", "options": {"export_values": False, "logging_steps": 5}},
}


def outcome(run: Run, step: int = 8) -> dict[str, Any]:
    """All that a run leaves: weights, optimizer, random state, own state, log; no clock times."""
    folder = run.out / f"checkpoint-{step}"
    verify(folder)
    weights = folder / ("adapter_model.safetensors" if run.peft else "model.safetensors")
    found: dict[str, Any] = {"weights": load_file(weights)}
    for name in ("optimizer.pt", "scheduler.pt"):
        found[name] = torch.load(folder / name, weights_only=False)
    for rank in range(run.processes):
        name = "rng_state.pth" if run.processes == 1 else f"rng_state_{rank}.pth"
        found[name] = torch.load(folder / name, weights_only=False)
        tensors, metadata = read_tensors(folder / f"alphatoken-rank{rank}.safetensors")
        found[f"own {rank}"] = tensors
        values = {name: json.loads(text) for name, text in metadata.items()}
        found[f"own values {rank}"] = timeless(values)
    state = json.loads((folder / "trainer_state.json").read_text())
    found["log"] = timeless(state["log_history"])
    for path in sorted(run.out.rglob("values*")):
        if path.is_file():
            found[path.name] = path.read_bytes()
    return found


def timeless(value: Any) -> Any:
    """Without what a clock has a part in."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(word in k for word in CLOCK)}
        return {name: timeless(item) for name, item in kept.items()}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def same(first: Any, second: Any, place: str = "") -> None:
    """Equal to the bit, at every place."""
    assert type(first) is type(second), place
    if isinstance(first, dict):
        assert first.keys() == second.keys(), place
        for name in first:
            same(first[name], second[name], f"{place}/{name}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), place
        for index, pair in enumerate(zip(first, second, strict=True)):
            same(*pair, f"{place}/{index}")
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype, place
        assert torch.equal(first, second), place
    elif hasattr(first, "tobytes"):
        assert first.tobytes() == second.tobytes(), place
    else:
        assert first == second, f"{place}: {first} and {second}"


# --- killed -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Run, dict[str, Any]]]:
    """A whole run of each kind, made once, and what it left."""
    folder = tmp_path_factory.mktemp("whole")
    found: dict[str, tuple[Run, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Run, dict[str, Any]]:
        if name not in found:
            run = Run(folder=folder / name, **RUNS[name])
            finish(run)
            found[name] = run, outcome(run)
        return found[name]

    return of


# One process after the other is killed, each going on from where the one before it was saved.
MOMENTS: list[tuple[str, list[Moment]]] = [
    (
        "sft",
        [
            Moment("on_substep_end", 4),  # half a step's gradients are in
            Moment("write", 9),  # half of the second checkpoint is there
            Moment("write", 46),  # the manifest itself
        ],
    ),
]
if NIGHTLY:
    MOMENTS += [
        (
            "full",
            [
                Moment("write", 49),  # sealed, but not in its place
                Moment("on_step_begin", 5),
                Moment("on_train_end", 8),  # complete
            ],
        ),
        ("totals", [Moment("on_step_begin", 4)]),
        ("dpo", [Moment("write", 46)]),
    ]
    MOMENTS += [(name, [Moment("write", n)]) for name in RUNS for n in range(1, WRITES + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments"),
    MOMENTS,
    ids=[f"{name}-{ms[-1].event}-{ms[-1].count}" for name, ms in MOMENTS],
)
def test_killed_run_goes_on_to_the_same_bits(
    uninterrupted: Any, tmp_path: Path, name: str, moments: list[Moment]
) -> None:
    whole, expected = uninterrupted(name)
    run = replace(whole, folder=whole.folder.with_name(f"{tmp_path.name}"))
    for moment in moments:
        assert kill(run, moment, resume="auto")
        for _, path in manifest.checkpoints(run.out):
            verify(path)  # whole, or not there
    finish(run, resume="auto")
    same(expected, outcome(run))
    assert not (run.out / STAGING).exists()
    shutil.rmtree(run.folder)


@pytest.mark.slow
def test_two_processes_are_killed_and_go_on(tmp_path: Path) -> None:
    options = {
        "per_device_train_batch_size": 2,
        "layers": "1",
        "max_relative_drift": None,
    }
    whole = Run("sft", tmp_path / "whole", processes=2, options=options)
    finish(whole)
    run = replace(whole, folder=tmp_path / "killed")
    assert kill(run, Moment("on_pre_optimizer_step", 4))
    finish(run, resume=True)
    same(outcome(whole), outcome(run))
    with pytest.raises(ConfigError, match="processes: 2 then, 1 now"):
        replace(run, processes=1).trainer().train(resume_from_checkpoint=True)


# --- in this process ----------------------------------------------------------------------------


class _Copy(TrainerCallback):
    """Keeps what is in the run's folder at one moment, as a kill leaves it."""

    def __init__(self, run: Run, to: Path) -> None:
        self.run, self.to = run, to

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            shutil.copytree(self.run.out, self.to)


def test_what_a_kill_leaves_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Without the kill, which takes processes of their own: the folder in the middle of a step."""
    whole = Run(folder=tmp_path / "whole", **RUNS["sft"])
    left = replace(whole, folder=tmp_path / "left")
    trainer = whole.trainer()
    trainer.add_callback(_Copy(whole, left.out))
    trainer.train()
    assert steps(left) == [3]
    left.trainer().train(resume_from_checkpoint="auto")
    found = outcome(whole), outcome(left)
    for one in found:  # the run-time type checks of pytest draw from Python's own generator
        del one["rng_state.pth"]["python"]
    same(*found)


@pytest.mark.parametrize(
    "options",
    [
        {"retention": "none"},
        {"preconditioner": "full", "max_relative_drift": None},
        pytest.param(  # some of these batches are too coarse for differences
            {"retention": "none", "estimator": "label", "layers": "all", "parameters": "all"},
            marks=pytest.mark.filterwarnings("ignore:label values are taken"),
        ),
        pytest.param(
            {"retention": "none", "objective": "adaptation", "estimator": "walk",
             "walk_steps": 2, "walk_refresh": 3, "walk_learning_rate": 1e-3, "layers": "3"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adaptation", "both sides of a full step", "differences", "walk"],
)  # fmt: skip
def test_a_direction_that_outlasts_a_save_is_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    """That of the checkpoint is the one that a run without a save goes on with."""
    steps_of_run = {"direction_steps": 3, "max_steps": 5, "save_steps": 2}
    more = {"held_out_steps": 0, "validation_mode": "pool", **steps_of_run}
    run = Run("sft", tmp_path / "whole", options={**options, **more})
    whole, again = resumed(run)
    same(tiny.weights(whole.model), tiny.weights(again.model))
    assert tiny.losses(whole) == tiny.losses(again)
    same(whole.ledger.state_tensors(), again.ledger.state_tensors())
    unsaved = {**run.options, "save_strategy": "no"}
    alone = replace(run, folder=tmp_path / "unsaved", options=unsaved).trainer()
    alone.train()
    same(tiny.weights(whole.model), tiny.weights(alone.model))
    assert tiny.losses(whole) == tiny.losses(alone)


def test_weights_that_a_checkpoint_gives_back_in_part_are_refused(tmp_path: Path) -> None:
    """transformers saves Mixtral's experts under names that a resumed run does not load."""
    more = {"policy": "standard", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    tiny.sft(tmp_path, model=tiny.mixture(), **more).train()
    again = tiny.sft(tmp_path, model=tiny.mixture(), **more)
    with pytest.raises(DataError, match="weights are not those that the model now has"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# --- what moves beside the model ------------------------------------------------------------------


def resumed(run: Run, with_callbacks: Callable[[Any], None] = lambda _: None) -> tuple[Any, Any]:
    """A trainer that has run whole, and one that went on from a copy of its first checkpoint."""
    again = replace(run, folder=run.folder.with_name("again"))
    trainers = run.trainer(), again.trainer()
    for trainer in trainers:
        with_callbacks(trainer)
    trainers[0].train()
    first = f"checkpoint-{steps(run)[0]}"
    shutil.copytree(run.out / first, again.out / first)
    trainers[1].train(resume_from_checkpoint=str(again.out / first))
    return trainers


class _MovesTheReference(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.pair = lambda: (trainer.ref_model.parameters(), trainer.model.parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for reference, trained in zip(*self.pair(), strict=True):
            reference.data.lerp_(trained.data, 0.3)


SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}


@pytest.mark.parametrize(
    ("options", "own"),
    [
        (SYNCED, False),
        pytest.param(SYNCED | {"policy": "standard"}, False, marks=pytest.mark.slow),
        pytest.param({"direction_steps": 4}, True, marks=pytest.mark.slow),
    ],
    ids=["values", "plain", "own callback"],
)
def test_a_reference_that_moves_goes_on_where_it_was(
    tmp_path: Path, options: dict[str, Any], own: bool
) -> None:
    few = {
        "retention": "none", "max_steps": 5, "per_device_train_batch_size": 2,
        "export_values": False, "validation_batch_size": 4, "held_out_steps": 0,
    }  # fmt: skip
    run = Run("dpo", tmp_path / "whole", options={**few, **options})
    add = lambda trainer: trainer.add_callback(_MovesTheReference(trainer))  # noqa: E731
    whole, again = resumed(run, add if own else lambda _: None)
    start, moved = tiny.weights(tiny.model()), tiny.weights(whole.ref_model)
    assert any(not torch.equal(start[name], weight) for name, weight in moved.items())
    same(moved, tiny.weights(again.ref_model))
    folders = (Path(trainer.args.output_dir).parent for trainer in (whole, again))
    found = [outcome(replace(run, folder=folder), 5) for folder in folders]
    for one in found:  # the run-time type checks of pytest draw from Python's own generator
        del one["rng_state.pth"]["python"]
    same(*found)


def test_another_reference_is_refused(tmp_path: Path) -> None:
    options = {"policy": "standard", "max_steps": 1, "save_steps": 1}
    run = Run("dpo", tmp_path, options=options)
    run.trainer().train()
    trainer = replace(run, options={**options, "ref_model": tiny.model(seed=1)}).trainer()
    with pytest.raises(ConfigError, match=r"reference_weights: '\w+' then, '\w+' now"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
        ({"peft_config": tiny.lora(), "ref_model": None}, "adapters"),
        ({"model": "adapter", "ref_model": None}, "adapters"),
    ],
)
def test_a_reference_that_nothing_can_move_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Any, cause: str
) -> None:
    monkeypatch.chdir(tmp_path)
    get_peft_model(tiny.model(), tiny.lora()).save_pretrained("adapter")
    with pytest.raises(ConfigError, match=f"sync_ref_model.*{cause}"):
        tiny.dpo(tmp_path / "run", **{"ref_model": tiny.model(), **SYNCED, **more})


class _Holds(TrainerCallback):
    """Tensors of its own: the same throughout, or those of the weights as the run began."""

    def __init__(self, anchored: bool) -> None:
        self.anchored, self.tensors = anchored, {"constant": torch.ones(3)}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if self.anchored:
            self.tensors |= tiny.weights(model)


def average() -> TrainerCallback:
    from trl import BEMACallback

    return cast("TrainerCallback", BEMACallback(update_freq=1))


@pytest.mark.parametrize(
    ("made", "changes", "lost"),
    [
        pytest.param(lambda: _Holds(anchored=False), False, "", marks=pytest.mark.slow),
        pytest.param(lambda: _Holds(anchored=True), False, "_Holds", marks=pytest.mark.slow),
        (average, True, "BEMACallback"),
    ],
    ids=["constant", "anchor", "average"],
)
def test_tensors_of_callbacks_are_no_part_of_checkpoints(
    tmp_path: Path, made: Callable[[], TrainerCallback], changes: bool, lost: str
) -> None:
    """A resumed run is refused where they have changed, by the run or with the weights."""
    run = Run("plain", tmp_path, options={"max_steps": 2, "save_steps": 1})
    trainer = run.trainer()
    trainer.add_callback(made())
    says = f"checkpoints do not hold the tensors of {lost}"
    with pytest.warns(AlphaTokenWarning, match=says) if changes else nullcontext():
        trainer.train()
    first = str(run.out / "checkpoint-1")
    trainer = run.trainer()
    trainer.add_callback(made())
    says = f"a callback holds other tensors.*{lost}"
    with pytest.raises(ConfigError, match=says) if lost else nullcontext():
        trainer.train(resume_from_checkpoint=first)
    if lost:
        run.trainer().train(resume_from_checkpoint=first)


def test_a_callbacks_saved_state_goes_on_where_it_was(tmp_path: Path) -> None:
    """The loss falls, and a figure that should grow does not: patience ends at the fifth look."""
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss",
        "greater_is_better": True, "evaluate": True, "learning_rate": 1e-3,
    }  # fmt: skip
    run = Run("plain", tmp_path / "whole", options=options)
    trainers = resumed(run, lambda trainer: trainer.add_callback(EarlyStoppingCallback(4)))
    assert [trainer.state.global_step for trainer in trainers] == [5, 5]


@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "adalomo"])
def test_optimizers_without_a_saved_state_do_not_go_on(tmp_path: Path, optim: str) -> None:
    facts = {"options": {"optim": optim}}
    made = manifest.Manifest(3, "run", True, facts)
    with pytest.raises(ConfigError, match=f"state is in no checkpoint.*{optim}"):
        manifest.require_same_run(tmp_path, made, facts, ())


def keep_labels(rows: Any) -> dict[str, torch.Tensor]:
    """A collator that leaves the first labels out."""
    batch = tiny.padded(rows)
    batch["labels"][:, :12] = -100
    return batch


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ({}, {"data_collator": tiny.padded}, "handed_over"),
        ({"data_collator": keep_labels}, {"data_collator": tiny.padded}, "data_collator"),
        (
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.2})},
            "optimizer",
        ),
    ],
)
def test_a_run_goes_on_with_what_was_handed_over(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], name: str
) -> None:
    """Of which no option says anything, and another one would make another run."""
    rows = {"train_dataset": tiny.tokenised(16)}
    kept = {"policy": "standard", "save_strategy": "steps", "save_steps": 2, **rows}
    made = partial(tiny.made, AlphaSFTTrainer, tmp_path, **kept)
    made(**first).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    with pytest.raises(ConfigError, match=f"(?s)it differs in {name}"):
        made(**second).train(resume_from_checkpoint=True)
    trainer = made(**first)
    trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=True)  # which has made an optimizer by now


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with checkpoints 3, 6 and 8."""
    run = Run("plain", tmp_path_factory.mktemp("finished"))
    run.trainer().train()
    return run.folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Run:
    """A copy of that run."""
    shutil.copytree(finished, tmp_path / "run")
    return Run("plain", tmp_path / "run")


def steps(run: Run) -> list[int]:
    return [step for step, _ in manifest.checkpoints(run.out)]


def damage(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "altered":
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    elif how == "missing file":
        (folder / "optimizer.pt").unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text("{")


HARMS = ["cut", "altered", "missing file", "no manifest", "no json"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HARMS)
def test_damaged_checkpoint_does_not_exist(run: Run, how: str) -> None:
    damage(run.out / "checkpoint-8", how)
    with pytest.raises(DataError, match="checkpoint-8"):
        run.trainer().train(resume_from_checkpoint=str(run.out / "checkpoint-8"))
    found = latest_complete(run.out)
    assert found[0].name == "checkpoint-6"
    if how != "no manifest":
        return
    trainer = run.trainer()
    with pytest.warns(UserWarning, match="passed over.*: checkpoint-8;"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    verify(run.out / "checkpoint-8")


def test_large_files_are_compared_at_both_ends(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    size = 65 << 20
    with (folder / "big").open("wb") as file:
        file.truncate(size)
    made = manifest.Manifest(1, "r", True, {})
    manifest.write_manifest(folder, made)
    assert verify(folder).run == "r"
    for place in (0, size - 1):
        with (folder / "big").open("r+b") as file:
            file.seek(place)
            file.write(b"\x01")
        with pytest.raises(DataError, match="big: its content has changed"):
            verify(folder)
        with (folder / "big").open("r+b") as file:
            file.seek(place)
            file.write(b"\x00")
    os.truncate(folder / "big", size - 1)
    with pytest.raises(DataError, match="big: .* bytes"):
        verify(folder)


@pytest.mark.slow
def test_what_resume_means(run: Run, tmp_path: Path) -> None:
    """That "auto" goes on is shown by the killed runs above."""
    empty = replace(run, folder=tmp_path / "empty")
    with pytest.raises(DataError, match="checkpoints there: none at all.*'auto'"):
        empty.trainer().train(resume_from_checkpoint=True)
    for wanted in (True, str(run.out / "checkpoint-3")):
        trainer = run.trainer()
        trainer.train(resume_from_checkpoint=wanted)
        assert trainer.state.global_step == 8
    started = run.trainer()
    started.args.max_steps = 1
    started.train(resume_from_checkpoint=False)
    assert started.state.global_step == 1


@pytest.mark.slow
def test_checkpoints_of_an_earlier_run_in_the_folder_are_not_taken(run: Run) -> None:
    first = verify(run.out / "checkpoint-8").run
    new = run.trainer()
    new.add_callback(_Raise(2))
    with pytest.raises(KeyboardInterrupt):
        new.train()
    assert steps(run) == [3, 6, 8]
    with pytest.raises(DataError, match="of an earlier run"):
        run.trainer().train(resume_from_checkpoint=True)
    trainer = run.trainer()
    trainer.train(resume_from_checkpoint=str(run.out / "checkpoint-8"))
    assert json.loads((run.out / manifest.RUN).read_text())["run"] == first


class _Raise(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*were reset:UserWarning")
def test_a_step_in_smaller_parts_is_the_same_step(run: Run) -> None:
    """What one changes after an out-of-memory: the run goes on to the same weights but rounding."""
    whole = load_file(run.out / "checkpoint-8" / "model.safetensors")
    smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = replace(run, options={**smaller, "gradient_checkpointing": False}).trainer()
    start = str(run.out / "checkpoint-3")
    with pytest.raises(ConfigError, match="per_device_train_batch_size: 4 then, 2 now"):
        trainer.train(resume_from_checkpoint=start)
    with pytest.warns(UserWarning, match=r"gradient_checkpointing: True then.*by rounding"):
        trainer.train(resume_from_checkpoint=start, allow_changed=list(smaller))
    parts = load_file(run.out / "checkpoint-8" / "model.safetensors")
    assert max(float((whole[n] - parts[n]).abs().max()) for n in whole) < 1e-4


def test_an_option_that_only_one_run_has_is_a_change() -> None:
    """As where another version of a library has more of them."""
    before, now = {"options": {"a": 1, "b": 2}}, {"options": {"a": 1, "c": 3}, "processes": 1}
    changes, _ = manifest.split_changes(before, now)
    assert changes == {"b": (2, None), "c": (None, 3), "processes": (None, 1)}


def test_another_number_of_processes_is_never_allowed() -> None:
    """Each has a part of the random state and of the statistics."""
    before, now = ({"processes": n, "options": {"seed": n, "tf32": n}} for n in (2, 1))
    changes, rounding = manifest.split_changes(before, now, ("processes", "seed"))
    assert (changes, rounding) == ({"processes": (2, 1)}, {"tf32": (2, 1)})


def test_what_has_changed_is_named_and_harmless_options_are_free(run: Run) -> None:
    other = replace(run, options={"seed": 4, "max_grad_norm": 2.0}).trainer()
    with pytest.raises(ConfigError, match="max_grad_norm: 1.0 then, 2.0 now; seed: 3 then, 4 now"):
        other.train(resume_from_checkpoint=True)
    trainer = run.trainer()
    rows = trainer.train_dataset
    trainer.train_dataset = rows.select([*range(23), 22])
    with pytest.raises(ConfigError, match=r"train_dataset: '\w+' then, '\w+' now"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=True, allow_changed=["train_dataset"])
    free = {"logging_steps": 1, "save_steps": 1, "disable_tqdm": False, "run_name": "other"}
    watched = replace(run, options=free).trainer()
    watched.train(resume_from_checkpoint=str(run.out / "checkpoint-6"))
    assert watched.state.global_step == 8


def test_adapters_on_another_base_are_refused(tmp_path: Path) -> None:
    run = Run("plain", tmp_path, peft=True, options={"max_steps": 1, "save_steps": 1})
    run.trainer().train()
    trainer = run.trainer()
    with torch.no_grad():
        trainer.model.get_base_model().model.embed_tokens.weight[5, 3] += 1
    with pytest.raises(ConfigError, match="frozen_weights: "):
        trainer.train(resume_from_checkpoint=True)


def test_adapters_of_other_settings_are_refused(tmp_path: Path) -> None:
    """The same factors under another scale are another function of the model."""
    run = Run("plain", tmp_path, peft=True, options={"max_steps": 1, "save_steps": 1})
    run.trainer().train()
    run.trainer().train(resume_from_checkpoint=True)
    other = replace(run, options={**run.options, "lora_alpha": 64, "use_rslora": True})
    named = "lora_alpha: 8 then, 64 now; use_rslora: False then, True now"
    with pytest.raises(ConfigError, match=f"differs in lora_alpha, use_rslora. Got: {named}"):
        other.trainer().train(resume_from_checkpoint=True)
    on_purpose = ["lora_alpha", "use_rslora"]
    other.trainer().train(resume_from_checkpoint=True, allow_changed=on_purpose)


def test_rows_that_are_not_skipped_are_a_fact_of_the_run(tmp_path: Path) -> None:
    """Only where they are not: earlier checkpoints say nothing of it."""
    run = Run("plain", tmp_path, options={"max_steps": 2, "save_steps": 1})
    trainer = run.trainer()
    trainer.train()
    assert "ignore_data_skip" not in trainer.run_facts()["options"]
    start = str(run.out / "checkpoint-1")
    again = replace(run, options={**run.options, "ignore_data_skip": True})
    with pytest.raises(ConfigError, match="ignore_data_skip: None then, True now"):
        again.trainer().train(resume_from_checkpoint=start)
    again.trainer().train(resume_from_checkpoint=start, allow_changed=["ignore_data_skip"])
    again.trainer().train(resume_from_checkpoint=True)  # which goes on as the run that it is


def test_other_versions_are_said(run: Run) -> None:
    folder = run.out / "checkpoint-8"
    made = verify(folder)
    versions = {**made.facts["versions"], "torch": "1.0"}
    manifest.write_manifest(folder, replace(made, facts={**made.facts, "versions": versions}))
    with pytest.warns(UserWarning, match=r"torch: '1\.0' then"):
        run.trainer().train(resume_from_checkpoint=True)


def test_model_only_checkpoints_are_no_place_to_go_on_from(tmp_path: Path) -> None:
    run = Run("plain", tmp_path, options={"save_only_model": True, "max_steps": 1})
    run.trainer().train()
    assert latest_complete(run.out) is None
    # The ledger names tokens of training rows, and nobody would read it.
    assert not list(run.out.rglob("alphatoken-rank*"))
    with pytest.raises(DataError, match="save_only_model"):
        run.trainer().train(resume_from_checkpoint=str(run.out / "checkpoint-1"))


def test_old_checkpoints_go_when_the_new_one_is_whole(tmp_path: Path) -> None:
    options = {"save_total_limit": 2, "save_steps": 1, "max_steps": 5}
    run = Run("plain", tmp_path, options=options)
    trainer = run.trainer()
    trainer.train()
    assert steps(run) == [4, 5]
    assert trainer.args.save_total_limit == 2
    assert sorted(path.name for path in run.out.iterdir()) == [
        "README.md", "alphatoken-run.json", "checkpoint-4", "checkpoint-5",
    ]  # fmt: skip


def test_best_checkpoint_stays_and_is_found(tmp_path: Path) -> None:
    options = {
        "save_total_limit": 1, "save_steps": 1, "max_steps": 4, "eval_strategy": "steps",
        "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True, "evaluate": True,
    }  # fmt: skip
    run = Run("plain", tmp_path, options=options)
    trainer = run.trainer()
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint))
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert best == run.out / f"checkpoint-{max(losses, key=lambda step: losses[step])}"
    assert steps(run) == sorted({int(best.name.split("-")[1]), 4}), "old ones go"
    assert trainer.args.save_total_limit == 1
    assert {path.name for path in run.out.iterdir() if "checkpoint" not in path.name} == {
        "README.md", "alphatoken-run.json",
    }  # fmt: skip
    state = json.loads((run.out / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)


# --- what cannot be written -----------------------------------------------------------------------


@pytest.mark.slow
def test_full_disk_leaves_the_last_checkpoint(run: Run) -> None:
    shutil.rmtree(run.out / "checkpoint-8")
    with (
        file_size_limit(100_000),
        pytest.raises(DataError, match="the checkpoint.*checkpoint-8' could not be written"),
    ):
        run.trainer().train(resume_from_checkpoint=True)
    assert steps(run) == [3, 6]
    assert not (run.out / STAGING).exists()
    run.trainer().train(resume_from_checkpoint=True)
    assert steps(run) == [3, 6, 8]


def test_place_that_cannot_be_written(run: Run) -> None:
    """Something else stands where the checkpoint would grow."""
    shutil.rmtree(run.out / "checkpoint-8")
    (run.out / STAGING).write_text("a file")
    with pytest.raises(DataError, match=f"checkpoint-8' could not be written.*{STAGING}") as caught:
        run.trainer().train(resume_from_checkpoint=True)
    assert isinstance(caught.value.__cause__, OSError)  # the command's status is a file's error's
    assert steps(run) == [3, 6]


def test_other_errors_while_saving_pass_through(run: Run) -> None:
    trainer = run.trainer()
    trainer.alpha_state = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not (run.out / STAGING).exists()


class _Poison(TrainerCallback):
    """A weight becomes NaN, as after a step that diverged."""

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == 4:
            with torch.no_grad():
                model.lm_head.weight[0, 0] = torch.nan


@pytest.mark.slow
def test_nan_stops_the_run_and_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    run = Run("sft", tmp_path / "nan", options={"max_relative_drift": None})
    trainer = run.trainer()
    trainer.add_callback(_Poison())
    with pytest.raises(NumericalError):
        trainer.train()
    assert steps(run) == [3]
    verify(run.out / "checkpoint-3")
    state = load_file(run.out / "checkpoint-3" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    again = run.trainer()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8


# --- what a run depends on ------------------------------------------------------------------------


def test_a_digest_is_of_the_content() -> None:
    of = manifest.dataset_digest
    rows, changed = tiny.sft_rows(30), tiny.sums(30)
    changed[17]["prompt"] += "?"
    shuffled = rows.shuffle(seed=1)
    places = [list(shuffled["prompt"]).index(prompt) for prompt in rows["prompt"]]
    longer = tiny.sft_rows(31)
    same = [tiny.sft_rows(30), shuffled.select(places), longer.select(range(30))]
    others = [
        shuffled,
        longer,
        rows.rename_column("prompt", "question"),
        Dataset.from_list(changed),
    ]
    assert {of(data) for data in same} == {of(rows)}
    assert len({of(data) for data in [rows, *others]}) == 5
    lists = ([[1, 2], [3], []], [[1], [2, 3], []], [[1, 2], [3], None], [[1, 2, 3], [], []])
    assert len({of(Dataset.from_dict({"ids": one})) for one in lists}) == 4


def test_a_digest_of_other_sequences() -> None:
    of = manifest.dataset_digest
    rows = [{"input_ids": [i, i + 1], "labels": torch.tensor([i])} for i in range(1000)]
    assert of(rows) == of([dict(reversed(row.items())) for row in rows]) != of(rows[:-1])
    assert of(iter(rows)) is of(None) is None
    assert of({"a": rows}) != of({"b": rows})
    numbers = torch.arange(12.0)
    other = numbers.clone().index_fill_(0, torch.tensor(1), 0)
    assert of({"w": numbers.reshape(3, 4)}) == of({"w": numbers.clone().reshape(3, 4)})
    made = [numbers.reshape(3, 4), numbers.reshape(4, 3), other.reshape(3, 4), (numbers, numbers)]
    assert len({of({"w": one}) for one in made}) == 4


def test_options_are_plain_and_complete(tmp_path: Path) -> None:
    run = Run("sft", tmp_path)
    options = manifest.run_options(run.trainer().args)
    assert options == json.loads(json.dumps(options))
    assert {"policy", "keep_ratio", "learning_rate", "packing", "lr_scheduler_type"} <= set(options)
    assert not {"output_dir", "logging_steps", "save_steps", "report_to"} & set(options)


def test_adapters_are_facts_in_what_they_compute(tmp_path: Path) -> None:
    """By the names of their options; not where they come from, nor in which order sets came."""
    trainer = Run("plain", tmp_path, peft=True).trainer()
    facts = trainer.run_facts()["adapters"]
    assert facts == json.loads(json.dumps(facts))
    some = ("r", "lora_alpha", "target_modules", "peft_type")
    assert [facts[name] for name in some] == [4, 8, ["down_proj", "q_proj", "v_proj"], "LORA"]
    assert {"lora_dropout", "use_rslora", "use_dora", "init_lora_weights"} < facts.keys()
    own = trainer.model.peft_config["default"]
    own.base_model_name_or_path, own.inference_mode, own.task_type = "elsewhere", True, None
    own.target_modules = ["v_proj", "q_proj", "down_proj"]
    own.target_modules = set(own.target_modules)
    assert trainer.run_facts()["adapters"] == facts
    trainer.model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    both = trainer.run_facts()["adapters"]
    assert both == {**facts, **{n: v for n, v in both.items() if n.startswith("second.")}}
    assert both["second.r"] == 2
    assert Run("plain", tmp_path).trainer().run_facts().keys().isdisjoint({"adapters"})
