"""``--value``: what each command takes and says, and that values of two presets never mix."""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphatoken.cli import main
from alphatoken.cli.arguments import Arguments, read_arguments
from alphatoken.cli.diagnose_options import read_request
from alphatoken.cli.training import changed_options
from alphatoken.config import ValueOptions
from alphatoken.diagnose.data import FEWEST_TRUSTED
from alphatoken.diagnose.statistics import FEWEST
from alphatoken.errors import ConfigError
from alphatoken.presets import written_options
from alphatoken.score.job import require_trained_layers
from alphatoken.score.results import FEWEST_OF_VERDICT
from alphatoken.score.values import read_values
from alphatoken.support.storage import open_line
from alphatoken.train.dpo import AlphaDPOConfig
from alphatoken.train.records import VALUES
from alphatoken.train.sft import AlphaSFTConfig
from tests.integration.small_world import World, exchanges, flags
from tests.integration.test_cli import load, same
from tests.rows import jsonl

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

EXPLICIT = {
    "walk": {"estimator": "walk", "walk_steps": 24, "walk_learning_rate": 5e-5},
    "exact": {"estimator": "label", "parameters": "all"},
    "paper": {"estimator": "alphatoken", "layers": 3, "window": 32, "stability_weight": 1.5},
}


# --- score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, *EXPLICIT])
def test_score_writes_the_values_of_the_research_options(
    world: World, tmp_path: Path, value: str | None
) -> None:
    """To the bit; without a name those of the walk."""
    named: dict[str, Any] = {"value": value, "limit": 6}
    assert world.score(tmp_path / "named", "--no_report", **named) == 0
    explicit = EXPLICIT[value or "walk"]
    assert world.score(tmp_path / "explicit", "--no_report", **{"limit": 6, **explicit}) == 0
    assert same(load(tmp_path / "named"), load(tmp_path / "explicit"))
    assert any(np.any(one.values["total"]) for one in load(tmp_path / "named"))


def test_exact_values_in_float64_take_forward_mode(world: World, tmp_path: Path) -> None:
    """From the shell as in Python: no error of differences is left, and the values are the same."""
    errors, rows = {}, {}
    for dtype in ("float32", "float64"):
        folder = tmp_path / dtype
        words = {"value": "exact", "limit": 4, "dtype": dtype}
        assert world.score(folder, "--no_report", **words) == 0
        errors[dtype] = json.loads((folder / "summary.json").read_text())["values"]["derivatives"]
        rows[dtype] = [one.values["total"][one.response] for one in load(folder)]
    assert errors["float64"] == {"forward_mode": 0.0}
    assert errors["float32"] != errors["float64"]
    for one, other in zip(*rows.values(), strict=True):
        assert np.allclose(one, other, rtol=0, atol=1e-3 * np.abs(other).max())


def test_the_derivative_is_chosen_from_the_shell(world: World, tmp_path: Path) -> None:
    """Forward mode in float32 beside the preset, which takes differences there by itself."""
    words = {"value": "exact", "limit": 4, "derivative": "forward_mode"}
    assert world.score(tmp_path, "--no_report", **words) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["values"]["derivatives"] == {"forward_mode": 0.0}


def test_the_derivative_is_an_option_of_trainers(tmp_path: Path) -> None:
    options = {"estimator": "label", "derivative": "central", "use_cpu": True, "bf16": False}
    args = AlphaSFTConfig(output_dir=str(tmp_path), **options)
    assert args.scorer_config().derivative == "central"


def test_what_is_valued_is_said_before_any_work(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"model": world / "moved", "train": world / "train.jsonl"}
    words |= {"validation": world / "validation.jsonl", "out": tmp_path / "out", "limit": 4}
    assert main(["score", *flags(words), "--no_report"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "note: values: walk (by how many nats the loss of a token falls when the model takes 24 "
        "AdamW steps on the validation rows)"
    )
    fisher = {"fisher_file": world / "fisher.safetensors", "out": tmp_path / "fisher"}
    assert main(["score", *flags(words | fisher), "--no_report"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("note: values: paper (")
    assert first.endswith("; --fisher_file rules out the default, a walk")


def test_a_folder_of_the_former_default_is_not_gone_on_with(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are as they were; under its own name it goes on."""
    assert world.score(tmp_path, "--no_report", value="paper") == 0
    before = load(tmp_path)
    files = sorted((tmp_path / "values").iterdir())
    files[-1].unlink()
    assert world.score(tmp_path, "--no_report", "--resume", value=None) == 2
    said = capsys.readouterr().err
    assert "this is not the run to resume" in said
    assert "estimator: 'alphatoken' then, 'walk' now" in said
    assert "--value paper" in said
    assert sorted((tmp_path / "values").iterdir()) == files[:-1]
    assert world.score(tmp_path, "--no_report", "--resume", value="paper") == 0
    assert same(before, load(tmp_path))


def test_a_model_whose_layers_take_no_step_is_refused(world: World) -> None:
    """As one of quantised weights, of which a walk would move embeddings and norms alone."""
    model = world.loaded()[0]
    require_trained_layers(model)
    for layer in model.model.layers:
        for parameter in layer.parameters():
            parameter.requires_grad_(parameter.ndim == 1)
    with pytest.raises(ConfigError, match="--adapter FOLDER"):
        require_trained_layers(model)


# --- what trains ----------------------------------------------------------------------------------


def read(command: str, words: str, *over: str, race: bool = False) -> Arguments:
    kind: Any = {"sft": AlphaSFTConfig, "dpo": AlphaDPOConfig}[command]
    base = ["--model_name_or_path", "m", "--output_dir", "o", "--use_cpu", "--bf16", "false"]
    return read_arguments(command, [*words.split(), *base], kind, race=race, over=over)


def values_of(arguments: Arguments) -> tuple[Any, ...]:
    args = arguments.training
    return arguments.run.value, args.policy, args.estimator, args.parameters, args.layers


@pytest.mark.parametrize(
    ("command", "words", "wanted"),
    [
        ("sft", "", ("paper", "top", "alphatoken", "linears", "3")),
        ("dpo", "", ("paper", "top", "alphatoken", "linears", "3")),
        ("sft", "--value walk", ("walk", "top", "walk", "linears", "3")),
        ("sft", "--value exact", ("exact", "top", "label", "all", "all")),
        ("sft", "--estimator path", (None, "top", "path", "linears", "3")),
        ("sft", "--policy label", (None, "top", "label", "linears", "3")),
        # A preset that is typed goes before what a recipe says of values.
        ("sft", "--config laptop-sft", (None, "all", "label", "all", "3")),
        (
            "sft",
            "--config laptop-sft --value paper",
            ("paper", "all", "alphatoken", "linears", "3"),
        ),
        ("sft", "--config magicoder-qwen --value walk", ("walk", "top", "walk", "linears", "3")),
        ("dpo", "--config laptop-dpo --value walk", ("walk", "top", "walk", "linears", "3")),
    ],
)
def test_values_of_a_run(command: str, words: str, wanted: tuple[Any, ...]) -> None:
    assert values_of(read(command, words)) == wanted


@pytest.mark.parametrize(
    ("words", "wanted", "arms"),
    [
        ("", ("walk", "walk"), ["walk-80"]),
        ("--arms top", ("walk", "walk"), ["top"]),
        ("--walk_steps 48", ("walk", "walk"), ["walk-80"]),
        ("--value paper", ("paper", "alphatoken"), ["paper-80"]),
        ("--estimator path", (None, "path"), ["walk-80"]),
        # A walk has no stability side.
        ("--retention diagonal --arms top", ("paper", "alphatoken"), ["top"]),
        ("--config laptop-sft", (None, "label"), ["walk-80"]),
    ],
)
def test_values_of_a_race(words: str, wanted: tuple[Any, ...], arms: list[str]) -> None:
    found = read("sft", words, race=True)
    assert (found.run.value, found.training.estimator) == wanted
    assert found.race is not None
    assert found.race.arms == arms


def test_an_arm_keeps_the_steps_of_the_run_and_its_own_estimator() -> None:
    arm = ("--policy", "top", "--estimator", "walk")
    found = read("sft", "--walk_steps 48", *arm, race=True)
    assert values_of(found) == (None, "top", "walk", "linears", "3")
    assert found.training.walk_steps == 48
    other = read("sft", "--value paper", *arm, race=True)
    assert (other.run.value, other.training.estimator) == (None, "walk")


@pytest.mark.parametrize(
    "words", ["--value walk --estimator path", "--value exact --estimator walk"]
)
def test_a_preset_beside_another_estimator_is_one_error(words: str) -> None:
    with pytest.raises(ConfigError, match="is the estimator"):
        read("sft", words)


def test_a_recipe_may_name_a_preset(tmp_path: Path) -> None:
    """And what is typed goes before it."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text("value: walk\nwalk_steps: 12\n")
    found = read("sft", f"--config {recipe}")
    assert values_of(found)[:3] == ("walk", "top", "walk")
    assert found.training.walk_steps == 12
    assert values_of(read("sft", f"--config {recipe} --estimator path"))[:3] == (
        None,
        "top",
        "path",
    )
    assert read("sft", f"--config {recipe} --value walk").training.walk_steps == 24
    recipe.write_text("value: best\n")
    with pytest.raises(ConfigError):
        read("sft", f"--config {recipe}")


def test_a_race_refuses_a_value_that_no_arm_reads(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["race", "--model_name_or_path", str(world / "reference"), "--train_file",
             str(world / "train.jsonl"), "--validation_file", str(world / "validation.jsonl"),
             "--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path / "out")]  # fmt: skip
    assert main([*words, "--value", "exact", "--arms", "walk-80"]) == 2
    said = capsys.readouterr().err
    assert "no arm reads --value" in said
    assert "--arms exact-80" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "helps"), [("sft", "--value walk"), ("dpo", "race --dpo")])
def test_a_run_of_the_papers_values_says_what_was_measured(command: str, helps: str) -> None:
    from alphatoken.cli.training import _about_values

    said = _about_values(read(command, ""))
    assert said.startswith("values: paper (")
    assert helps in said
    assert "as published" not in _about_values(read(command, "--value walk"))
    said = _about_values(read(command, "--policy all"))
    assert "trains on every token: values are written, and choose none" in said
    assert "choose none" not in _about_values(read(command, "--policy top"))


# --- what a policy without values does not read ---------------------------------------------------

UNREAD = [
    ("weights", "--value walk", "--value has no effect on policy 'weights'.*values no token"),
    ("validation-mix", "--value paper", "--value has no effect on policy 'validation-mix'"),
    ("weights", "--walk_steps 3", "walk_steps belongs to token values"),
    ("walk-rows", "--estimator label", "estimator belongs to token values"),
    ("validation-mix", "--direction_steps 4", "direction_steps belongs to token values"),
    ("weights", "--keep_ratio 0.5", "--keep_ratio has no effect on policy 'weights'"),
]


@pytest.mark.parametrize(("policy", "words", "message"), UNREAD)
def test_what_is_typed_and_no_policy_reads_is_refused(
    policy: str, words: str, message: str
) -> None:
    """Also where it is a default; of a recipe it gives way, and says nothing of values."""
    with pytest.raises(ConfigError, match=message):
        read("sft", f"--policy {policy} {words}")
    given = read("sft", f"--config laptop-sft --policy {policy}")
    assert given.training.estimator == "alphatoken"
    assert given.unread == ("keep_ratio",)
    assert changed_options(given) == []  # a rule of its own says what is kept


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        ("--lora_r 8", "--use_peft"),
        ("--use_dora", "--use_peft"),
        ("--bnb_4bit_quant_type fp4", "--use_peft --load_in_4bit true"),
        ("--dataset_train_split test", "--dataset_name rows"),
        ("--dataset_test_split test", None),
        ("--ignore_bias_buffers", None),
    ],
)
def test_what_is_typed_of_trl_and_has_no_effect_is_refused(words: str, beside: str | None) -> None:
    """Such as a rank without an adapter, where every weight would be trained."""
    name = words.split()[0]
    for race in (False, True):
        with pytest.raises(ConfigError, match=f"{name} has no effect"):
            read("sft", words, race=race)
        if beside is not None:
            read("sft", f"{words} {beside}", race=race)


@pytest.mark.parametrize("name", ["estimator", "walk_refresh", "scoring_forward"])
def test_a_configuration_of_values_that_are_not_made_is_refused(name: str) -> None:
    """Controls may have the options of the run that they are compared with."""
    own = {"estimator": "walk", "walk_refresh": 3, "scoring_forward": "own"}[name]
    options = {"use_cpu": True, "bf16": False, "estimator": "walk", name: own}
    for policy in ("random", "all", "standard", "bottom"):
        assert getattr(AlphaSFTConfig("o", policy=policy, **options), name) == own
    del options["estimator"]
    with pytest.raises(ConfigError, match=f"{name} belongs to token values, and policy 'weights'"):
        AlphaSFTConfig("o", policy="weights", **{**options, name: own})


def test_a_race_has_options_of_values_for_the_arms_that_read_them(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("command: race\nvalue: walk\npolicy: weights\nwalk_steps: 12\n")
    words = f"--config {recipe}"
    assert read("sft", words, race=True).training.estimator == "alphatoken"
    valued = read("sft", words, "--policy", "top", race=True)
    assert (valued.training.estimator, valued.training.walk_steps) == ("walk", 12)
    with pytest.raises(ConfigError, match="walk_steps belongs to token values"):
        read("sft", words, "--policy", "weights", "--walk_steps", "6", race=True)


def test_what_is_typed_and_this_run_does_not_read_is_said() -> None:
    from alphatoken.cli.training import _about_unread

    for words, said in (
        ("--policy random --value walk --walk_steps 3 --keep_ratio 0.7",
         ["policy 'random' values no token: nothing reads --value, --walk_steps"]),
        ("--policy standard --keep_ratio 0.7",
         ["policy 'all' trains on every token: nothing reads --keep_ratio"]),
        ("--policy all --value walk", []),
        ("--stability_weight 2 --fisher_samples 4 --retention_batch_size 8 --policy_mode budget",
         ["policy 'top' has one mode: nothing reads --policy_mode",
          "there is no retention term: nothing reads --stability_weight",
          "no Fisher is wanted: nothing reads --fisher_samples",
          "no retention rows are wanted: nothing reads --retention_batch_size"]),
        ("--stability_weight 2 --fisher_samples 4 --retention diagonal", []),
        ("--stability_weight 2 --retention_batch_size 8 --retention data", []),
        ("--config laptop-sft --policy random", []),
    ):  # fmt: skip
        assert list(_about_unread(read("sft", words))) == said


def test_settings_of_a_job_name_the_estimator(world: World, tmp_path: Path) -> None:
    """Which is what keeps values of two presets apart."""
    assert world.score(tmp_path, "--no_report", limit=2, value=None) == 0
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert (settings["estimator"], settings["walk_steps"]) == ("walk", 24)


# --- help -----------------------------------------------------------------------------------------


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with contextlib.suppress(SystemExit):
        main([*words])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", ["score", "sft", "dpo", "race"])
def test_the_help_is_short_and_all_of_it_is_behind_a_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = help_of(capsys, command, "--help"), help_of(capsys, command, "--help_all")
    assert 20 < len(short) <= 60
    assert "--value {walk,exact,paper}" in " ".join(short)
    assert "--help_all" in " ".join(short)
    options = {word for line in whole for word in line.split() if word.startswith("--")}
    assert {"--estimator", "--layers", "--window", "--value"} <= options
    assert not {"--estimator", "--layers", "--window"} & {*" ".join(short).split()}
    for line in short:
        name = line.split()[0] if line.startswith("  --") else ""
        assert not name or name in options, line


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("score", "walk"), ("race", "walk"), ("diagnose data", "walk"), ("sft", "paper"),
        ("dpo", "paper"), ("diagnose utility", "paper"), ("score --value exact", "exact"),
        ("race --value=paper", "paper"), ("score --estimator path", None),
    ],
)  # fmt: skip
def test_the_help_says_the_defaults_that_are_in_force(
    words: str, value: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of options that the preset in force sets, its own; of the others the field's."""
    entries = "\n".join(help_of(capsys, *words.split(), "--help_all")).split("\n  --")
    texts = {one.split()[0]: " ".join(one.partition("\n\n")[0].split()) for one in entries}
    preset = written_options(value, {}) if value else {}
    for name, default in ((one.name, one.default) for one in fields(ValueOptions)):
        # Of one that is None its help says which number that is.
        shown = "" if default is None else f"(default {default})"
        if preset.get(name) is not None:
            shown = f"(of --value {value}: {preset[name]})"
        assert texts[name].endswith(shown), texts[name]


@pytest.mark.parametrize("command", ["show", "fisher"])
def test_a_help_that_is_whole_is_had_by_either_flag(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert help_of(capsys, command, "--help_all") == help_of(capsys, command, "--help")


def test_commands_stand_in_the_order_in_which_one_needs_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "\n".join(help_of(capsys, "--help"))
    names = ("show ", "score ", "diagnose data\n", "race ", "sft ", "dpo ", "diagnose  ", "fisher ")
    places = [text.index(f"\n    {name}") for name in names]
    assert places == sorted(places)


def test_a_result_ends_with_what_opens_it_and_the_next_command(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"model": world / "moved", "train": world / "train.jsonl", "limit": 4}
    words |= {"validation": world / "validation.jsonl", "out": tmp_path / "out"}
    assert main(["score", *flags(words)]) == 0
    *_, opens, then = capsys.readouterr().out.splitlines()
    assert opens == open_line(tmp_path / "out" / "report.html")
    few = f"next, with {FEWEST_OF_VERDICT} rows or more in each file: alphatoken "
    assert FEWEST_OF_VERDICT == FEWEST == FEWEST_TRUSTED
    command = shlex.split(then.removeprefix(few))
    assert command[:2] == ["diagnose", "data"]
    options, _ = read_request(*command[1:])
    assert (options.train_file, options.validation_file) == (
        str(world / "train.jsonl"), str(world / "validation.jsonl")
    )  # fmt: skip
    assert options.train_limit == 4
    trusted = tmp_path / "trusted.jsonl"
    jsonl(trusted, exchanges(8, seed=9))
    words |= {"limit": 8, "validation": trusted, "out": tmp_path / "more"}
    assert main(["score", *flags(words)]) == 0
    *_, then = capsys.readouterr().out.splitlines()
    assert then.startswith("next: alphatoken diagnose data ")


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_next_command_of_a_fisher_trains_with_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], structure: str
) -> None:
    assert world.fit(tmp_path / "fisher.safetensors", structure=structure) == 0
    *_, then = capsys.readouterr().out.splitlines()
    words = shlex.split(then.removeprefix("next: alphatoken "))
    files = {"ROWS": world / "train.jsonl", "TRUSTED": world / "validation.jsonl"}
    words = [str(files.get(word, word)) for word in words]
    words += ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--use_cpu"]
    assert main([*words, "--bf16", "false", "--validation_batch_size", "4"]) == 0
    assert any(np.any(one.values["stability"]) for one in read_values(tmp_path / "out" / VALUES))
