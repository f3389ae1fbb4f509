"""``alphatoken-lab compare``: a real grid of processes, killed and gone on with; crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from alphatoken.cli.recipes import find_recipe
from alphatoken.data import EncodeOptions, encode_rows, read_pairs, read_rows
from alphatoken.errors import ConfigError
from alphatoken.model.loading import load_causal_model, load_tokenizer
from alphatoken.support.progress import Tracker
from alphatoken.train.policies import policy_names
from alphatoken.train.sft import AlphaSFTConfig
from alphatoken_lab.measure.losses import encode_file, row_losses, summary
from alphatoken_lab.measure.measures import Measures
from alphatoken_lab.runner.grid import Cell, Grid, Task, all_cells
from alphatoken_lab.runner.launchers import PORT, LocalLauncher, SubmititLauncher, for_processes
from alphatoken_lab.runner.methods import Method, custom_method, known_methods
from alphatoken_lab.runner.records import records_csv, rows_of, with_costs
from alphatoken_lab.runner.running import GridFolder, run_grid, run_here
from alphatoken_lab.runner.tables import cost_table, problem_table, quality_table, to_markdown
from tests.both_programs import main
from tests.integration.small_world import saved_model
from tests.lab.forked_cells import ForkedLauncher, forked_cells
from tests.lab.small import write

PATIENCE = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("tiny") / "model")


def grid_file(folder: Path, model: Path, **changes: Any) -> Path:
    """A grid of one task with two real training steps a cell."""
    rows = [{"prompt": f"ask {i}", "response": f"say {i} {i}"} for i in range(20)]
    options = {
        "train_file": write(folder / "train.jsonl", rows[:12]),
        "use_cpu": True, "bf16": False, "max_steps": 2, "per_device_train_batch_size": 4,
        "learning_rate": 1e-3, "max_length": 32, "validation_rows": 2, "retention": "none",
        "gradient_checkpointing": False, "logging_strategy": "no",
    }  # fmt: skip
    measures = {
        "target_file": write(folder / "target.jsonl", rows[12:16]),
        "retention_file": write(folder / "old.jsonl", [{"text": "ask 1 2 3 4 5"}]),
    }
    content = {
        "about": "a tiny grid",
        "model_name_or_path": str(model),
        "seeds": [0],
        "policies": ["start", "standard", "wise-ft", "random"],
        "options": options,
        "tasks": {"small": {"command": "sft", "measures": measures}},
        **changes,
    }
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def compare(*words: str) -> list[str]:
    return [sys.executable, "-m", "alphatoken_lab.commands", "compare", *words]


# --- a real grid: killed, gone on with, a crash in it -------------------------------------------


def test_a_grid_killed_outright_goes_on_and_a_crash_is_a_line(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    methods = {"broken": {"policy": "random", "max_grad_norm": "no number"}}
    names = ["start", "standard", "broken"]
    grid, out = grid_file(tmp_path, model, methods=methods, policies=names), tmp_path / "out"
    words = ["--config", str(grid), "--output_dir", str(out)]
    # The grid is a fork, its cells are processes as users get them.
    (killed,) = ForkedLauncher().start([(compare(*words), tmp_path / "grid.txt")])
    first = out / "small" / "start-native-seed0" / "result.json"
    second = out / "small" / "standard-native-seed0"
    _wait(lambda: first.is_file() and (second / "log.txt").is_file())
    child = _child_of(killed.pid)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(PATIENCE)
    _wait(lambda: not _alive(child))  # no cell outlives the grid
    assert not (second / "result.json").exists()
    stamp, content = first.stat(), first.read_bytes()

    with forked_cells():
        assert main(["compare", *words]) == 1
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == (stamp.st_mtime_ns, stamp.st_ino)
    assert first.read_bytes() == content
    found = {r["policy"]: r for r in json.loads((out / "comparison.json").read_text())}
    assert {n: r["status"] for n, r in found.items()} == {
        "start": "done", "standard": "done", "broken": "failed",
    }  # fmt: skip
    assert "max_grad_norm" in found["broken"]["error"]
    assert found["standard"]["kept_tokens"] == found["standard"]["response_tokens"] > 0
    assert found["standard"]["time"] > 0
    assert found["standard"]["peak_memory"] > 50e6
    assert found["start"]["target"] != found["standard"]["target"]
    page = (out / "comparison.md").read_text()
    assert "| `small/broken-budget-seed0` | failed | " in page
    assert "failed: small/broken" in capfd.readouterr().err

    other = grid_file(tmp_path, model, policies=["start", "standard"], options={"max_steps": 9})
    assert main(["compare", "--config", str(other), "--output_dir", str(out)]) == 2
    assert "had other settings" in capfd.readouterr().err


def _wait(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def _child_of(parent: int) -> int:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True)
    return int(found.stdout.split()[0])


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False


# --- the runner, with quick processes -----------------------------------------------------------

QUICK = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
spec = json.loads((folder / "cell.json").read_text())
what = spec["options"].get("what", "work")
if what == "segfault":
    os.kill(os.getpid(), 11)
if what == "sleep":
    time.sleep(60)
if what == "raise":
    raise RuntimeError("no such luck")
if what == "silent":
    raise SystemExit(0)
(folder / "model").mkdir()
result = {"policy": spec["policy"], "spec": {k: v for k, v in spec.items() if k != "resolved"}}
(folder / "result.json").write_text(json.dumps(result))
"""


def quick(path: Path) -> list[str]:
    return [sys.executable, "-c", QUICK, str(path)]


def cell(policy: str, what: str = "work", needs: tuple[str, ...] = (), **more: Any) -> Cell:
    return Cell("t", policy, "native", 0, "train", "sft", {"what": what}, needs, **more)


def test_crashes_of_every_kind_leave_the_others_alone(tmp_path: Path) -> None:
    cells = [
        cell("a", "segfault"), cell("b", "raise"), cell("c"), cell("d", "silent"),
        cell("e", needs=("t/b-native-seed0",)), cell("f", needs=("t/e-native-seed0",)),
        cell("g", needs=("t/c-native-seed0",)),
    ]  # fmt: skip
    reports: list[Any] = []
    found = run_grid(cells, GridFolder(tmp_path), quick, LocalLauncher(3), progress=reports.append)
    said = {name[2]: (status.state, status.error) for name, status in found.items()}
    assert said["a"] == ("failed", "ended by SIGSEGV")
    assert said["b"] == ("failed", "RuntimeError: no such luck")
    assert said["d"][0] == "failed"
    assert said["e"] == ("blocked", "needs t/b-native-seed0")
    assert said["f"] == ("blocked", "needs t/e-native-seed0")
    assert said["c"][0] == said["g"][0] == "done"
    assert reports[-1].done == reports[-1].total == 7
    mended = [cell(one.policy, needs=one.needs) for one in cells]
    with pytest.raises(ConfigError, match="other settings"):  # c was measured with "work": same
        run_grid([cell("c", "sleep")], GridFolder(tmp_path), quick, LocalLauncher())
    before = (tmp_path / "t/c-native-seed0/result.json").stat().st_mtime_ns
    found = run_grid(mended, GridFolder(tmp_path), quick, LocalLauncher(2), progress=False)
    assert {status.state for status in found.values()} == {"done"}
    assert (tmp_path / "t/c-native-seed0/result.json").stat().st_mtime_ns == before


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    def second(path: Path) -> list[str]:
        with pytest.raises(ConfigError, match="another run is at work"):
            run_grid([cell("a")], GridFolder(tmp_path), quick, LocalLauncher())
        return quick(path)

    status = run_grid([cell("a")], GridFolder(tmp_path), second, LocalLauncher())
    assert status["t/a-native-seed0"].state == "done"


def test_an_interrupt_ends_the_cells_and_says_how_to_go_on(tmp_path: Path) -> None:
    started: list[Path] = []

    def command(path: Path) -> list[str]:
        started.append(path)
        return quick(path)

    def interrupt(progress: Any) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    cells = [cell("a"), cell("b", "sleep"), cell("c")]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match=r"1 of 3 cells are done.*goes on"):
        run_grid(cells, GridFolder(tmp_path), command, LocalLauncher(2), progress=interrupt)
    assert time.monotonic() - began < 30
    status = GridFolder(tmp_path).status(cells)
    assert [one.state for one in status.values()] == ["done", "missing", "missing"]


# --- devices and queues -------------------------------------------------------------------------

SEEING = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
spec = json.loads((folder / "cell.json").read_text())
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "MASTER_PORT")}
seen |= {"port": sys.argv[2], "began": time.time()}
others = folder.parent
end = time.time() + 20  # until the cell beside it is at work as well
(folder / "began").touch()
while len(list(others.glob("*/began"))) < 2 and time.time() < end:
    time.sleep(0.02)
result = {"spec": {k: v for k, v in spec.items() if k != "resolved"}, "seen": seen}
(folder / "result.json").write_text(json.dumps(result | {"ended": time.time()}))
"""


def seeing(path: Path) -> list[str]:
    return [sys.executable, "-c", SEEING, str(path), PORT]


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("t/*/result.json"))]


def test_two_devices_run_two_cells_at_a_time(tmp_path: Path) -> None:
    cells = [cell(name) for name in "abcd"]
    launcher = LocalLauncher(devices=["3", "5"])
    found = run_grid(cells, GridFolder(tmp_path), seeing, launcher, progress=False)
    assert {status.state for status in found.values()} == {"done"}
    results = results_of(tmp_path)
    # Which of them takes how many depends on how fast they are.
    used = [one["seen"]["CUDA_VISIBLE_DEVICES"] for one in results]
    assert len(used) == 4
    assert set(used) == {"3", "5"}
    for one in results:
        assert one["seen"]["port"] == one["seen"]["MASTER_PORT"]
        beside = [
            other for other in results
            if other is not one and other["seen"]["began"] < one["ended"]
            and one["seen"]["began"] < other["ended"]
        ]  # fmt: skip
        for other in beside:
            assert other["seen"]["CUDA_VISIBLE_DEVICES"] != one["seen"]["CUDA_VISIBLE_DEVICES"]
            assert other["seen"]["port"] != one["seen"]["port"]
    first, second = sorted(results, key=lambda one: one["seen"]["began"])[:2]
    assert second["seen"]["began"] < first["ended"], "at the same time"
    pairs = LocalLauncher(devices=["0", "1", "2", "3"], per_cell=2)
    assert pairs.most == 2


def test_a_queue_of_submitit(tmp_path: Path) -> None:
    cells = [cell("a"), cell("b"), cell("c", "raise"), cell("d", needs=("t/a-native-seed0",))]
    queue = SubmititLauncher(tmp_path / "queue", "local", 2)
    found = run_grid(cells, GridFolder(tmp_path), quick, queue, progress=False)
    said = {name[2]: (status.state, status.error) for name, status in found.items()}
    assert [said[name][0] for name in "abcd"] == ["done", "done", "failed", "done"]
    assert said["c"][1] == "RuntimeError: no such luck"
    assert queue.most == 2
    with pytest.raises(ConfigError, match="submitit refuses this"):
        SubmititLauncher(tmp_path, "local", 1, {"no_such_parameter": 3})
    with pytest.raises(ConfigError, match="submitit refuses this"):
        SubmititLauncher(tmp_path, "slurm", 1)  # no sbatch here


def test_the_global_batch_is_that_of_the_recipe() -> None:
    """Four processes of a layout, in one cell of 1, 2, 4, 8 or 16."""
    recipe = {"accelerate_config": "fsdp2", "per_device_train_batch_size": 4,
              "gradient_accumulation_steps": 2}  # fmt: skip
    for world, rows, steps in ((1, 4, 8), (2, 4, 4), (4, 4, 2), (8, 4, 1), (16, 2, 1)):
        found = for_processes(recipe, world)
        sizes = found["per_device_train_batch_size"], found["gradient_accumulation_steps"]
        assert sizes == (rows, steps)
        assert world * rows * steps == 32
    assert for_processes({}, 1) == {}
    with pytest.raises(ConfigError, match="32 rows a step, on 3 processes"):
        for_processes(recipe, 3)


def test_a_cell_of_two_processes_is_a_cell_of_one(model: Path, tmp_path: Path) -> None:
    grid = grid_file(tmp_path, model, policies=["alphatoken"], modes=["budget"])
    common = ["--config", str(grid), "--gradient_accumulation_steps", "2",
              "--validation_rows", "4", "--held_out_steps", "0"]  # fmt: skip
    with forked_cells():
        assert main(["compare", *common, "--output_dir", str(tmp_path / "one"), "--quiet"]) == 0
    words = ["--devices", "0,1", "--devices_per_cell", "2", "--quiet"]
    assert main(["compare", *common, "--output_dir", str(tmp_path / "two"), *words]) == 0
    for path in sorted((tmp_path / "one").glob("small/*/result.json")):
        one = json.loads(path.read_text())
        beside = tmp_path / "two" / path.parent.relative_to(tmp_path / "one")
        two = json.loads((beside / "result.json").read_text())
        assert two["steps"] == one["steps"] == 2
        assert two["response_tokens"] == one["response_tokens"]
        assert two["target"] == pytest.approx(one["target"], rel=1e-4)
        recipe = yaml.safe_load(
            (tmp_path / "two" / "small" / path.parent.name / "recipe.yaml").read_text()
        )
        assert recipe["gradient_accumulation_steps"] == 1


# --- which cells there are ----------------------------------------------------------------------

TARGET = Measures(target_file="t")


def task(**options: Any) -> Task:
    return Task("t", "sft", {"model_name_or_path": "m", **options}, TARGET)


def test_every_policy_has_its_cells() -> None:
    methods = tuple(known_methods().values())
    pairs = Task("p", "dpo", {"model_name_or_path": "m"}, TARGET)
    references = tuple(Task(n, "sft", {}) for n in ("curated", "oracle"))
    cells = all_cells(Grid((task(), pairs), methods, references=references))
    for name in policy_names():
        seeds = [c.seed for c in cells if c.policy == name and c.mode == "budget"]
        seeds = seeds or [c.seed for c in cells if c.policy == name]
        assert sorted(set(seeds)) == [0, 1, 2], name
    assert len({c.name for c in cells}) == len(cells)
    stm = [c for c in cells if c.policy == "stm" and c.seed == 0]
    assert [c.options["policy_mode"] for c in stm] == ["native", "budget"]
    assert all(c.options["keep_ratio"] == 0.5 for c in stm)
    rho = next(c for c in cells if c.policy == "rho-1")
    assert rho.needs == ("references/curated",)
    assert rho.options["policy_options"] == {"reference": "@curated"}
    standard = next(c for c in cells if c.policy == "standard")
    assert standard.keep_model
    assert standard.name in next(c for c in cells if c.policy == "wise-ft").needs
    order = [c.name for c in cells]
    assert all(order.index(n) < order.index(c.name) for c in cells for n in c.needs)


def test_what_a_recipe_says_of_values_gives_way_in_cells_of_other_methods() -> None:
    """A grid on a recipe of the paper: its threshold and divisor are those of token values."""
    said = {"model_name_or_path": "m", "keep_scope": "global", "kept_normalization": "sum"}
    pairs = {"model_name_or_path": "m", "precompute_ref_log_probs": True, "keep_scope": "global"}
    tasks = (Task("s", "sft", said, TARGET), Task("p", "dpo", pairs, TARGET))
    known = known_methods()
    methods = tuple(known[n] for n in ("stm", "alphatoken", "random", "ti-dpo"))
    cells = {(c.task, c.policy, c.mode): c.options for c in all_cells(Grid(tasks, methods, (0,)))}

    def found(*cell: str) -> tuple[Any, Any]:
        return cells[cell]["keep_scope"], cells[cell].get("kept_normalization")

    assert found("s", "stm", "native") == ("batch", "response")
    assert found("s", "stm", "budget") == ("batch", "sum")  # a budget is divided as asked
    assert found("s", "alphatoken", "budget") == ("global", "sum")
    assert found("s", "random", "budget") == ("global", "sum")
    assert cells["p", "ti-dpo", "native"]["precompute_ref_log_probs"] is False
    assert cells["p", "alphatoken", "budget"]["precompute_ref_log_probs"] is True


def test_options_of_values_stay_in_every_cell_and_run_where_there_are_values(
    tmp_path: Path,
) -> None:
    """A grid's folder that was filled before goes on: its cells are what they were."""
    from alphatoken_lab.runner.cell import _arguments

    said = {"model_name_or_path": "m", "direction_steps": 2, "layers": "2", "bf16": False,
            "kept_normalization": "sum", "use_cpu": True}  # fmt: skip
    known = known_methods()
    methods = tuple(known[n] for n in ("stm", "alphatoken", "random", "standard"))
    grid = Grid((Task("s", "sft", said, TARGET),), methods, (0,))
    for cell in all_cells(grid):
        assert (cell.options["direction_steps"], cell.options["layers"]) == (2, "2")
        assert cell.options["kept_normalization"] == "sum" or cell.policy == "stm"
        place = tmp_path / cell.policy / (cell.mode or "run")
        place.mkdir(parents=True, exist_ok=True)
        read = _arguments(place, "sft", cell.options).training
        valued = cell.policy in ("alphatoken", "random", "standard")
        assert read.direction_steps == (2 if valued else 1)
        assert (read.kept_normalization == "sum") == (cell.policy in ("alphatoken", "random")) or (
            cell.policy == "stm" and cell.mode == "budget"
        )


def test_what_a_recipe_says_of_an_estimator_gives_way_in_cells_of_others() -> None:
    """A grid on ``laptop-sft``, whose label values over all parameters the paper's cannot have."""
    said = dict(find_recipe("laptop-sft").options)
    known = known_methods()
    methods = tuple(known[n] for n in ("standard", "random", "alphatoken", "label"))
    cells = all_cells(Grid((Task("s", "sft", said, TARGET),), methods, (0,)))
    made = {c.policy: AlphaSFTConfig(**_of_trainer(c.options)) for c in cells}
    values = {name: (one.estimator, one.parameters) for name, one in made.items()}
    assert values["label"] == values["random"] == ("label", "all")
    assert values["alphatoken"] == ("alphatoken", "linears")


def _of_trainer(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the trainer's configuration has, of a cell's."""
    names = {one.name for one in fields(AlphaSFTConfig)}
    return {name: value for name, value in options.items() if name in names}


def test_references_may_need_references_but_not_themselves() -> None:
    mine = Method("mine", options={"policy": "all", "policy_options": {"oracle": "@b"}})
    chain = (Task("a", "sft", {}), Task("b", "dpo", {"model_name_or_path": "@a"}))
    cells = all_cells(Grid((task(),), (mine,), seeds=(0,), references=chain))
    assert [c.name for c in cells] == ["references/a", "references/b", "t/mine-native-seed0"]
    circle = (Task("b", "sft", {"model_name_or_path": "@b"}),)
    with pytest.raises(ConfigError, match="form a cycle"):
        all_cells(Grid((task(),), (mine,), references=circle))
    with pytest.raises(ConfigError, match="no such reference"):
        all_cells(Grid((task(),), (mine,)))
    with pytest.raises(ConfigError, match="trains none"):
        all_cells(Grid((task(),), (known_methods()["rho-1"],)))
    with pytest.raises(ConfigError, match="add standard to --policies"):
        all_cells(Grid((task(),), (known_methods()["wise-ft"],)))


def test_a_custom_method_goes_over_a_known_one() -> None:
    found = custom_method("sepo", {"policy_options": {"oracle": "@o"}})
    assert found.modes == ("native", "budget")
    assert found.options == {"policy": "sepo", "policy_options": {"oracle": "@o"}}
    one = custom_method("sepo", {"modes": ["budget"]})
    assert one.modes == ("budget",)
    assert one.options == {"policy": "sepo", "policy_mode": "budget"}  # not the published rule
    assert custom_method("random", {"modes": ["budget"]}).options == {"policy": "random"}
    assert custom_method("mine", {"policy": "top", "part": "direct"}).modes == ("budget",)
    assert custom_method("wise", {"merges": "stm", "alpha": 0.3}).kind == "merge"
    with pytest.raises(ConfigError, match="either a policy"):
        custom_method("mine", {"part": "direct"})


@pytest.mark.parametrize(
    ("changes", "words", "match"),
    [
        ({"polices": ["start"]}, [], "did you mean policies"),
        ({"policies": ["standrad"]}, [], "did you mean standard"),
        ({"keep_ratio": 2}, [], "keep_ratio"),
        ({}, ["--keep_ratio", "0"], "keep_ratio"),
        ({"modes": ["both"]}, [], "native, budget"),
        (
            {"tasks": {"t": {"command": "ppo", "measures": {"target_file": "x"}}}},
            [],
            "one of sft, dpo",
        ),
        ({"tasks": {"t": {"command": "sft"}}}, [], "no measure of the target"),
        (
            {"tasks": {"t": {"command": "sft", "measures": {"target_tasks": "gsm8k"}}}},
            [],
            "target_tasks: [gsm8k]",
        ),
        ({"options": {"train_file": "$NO_SUCH_VARIABLE/x"}}, [], "NO_SUCH_VARIABLE"),
        ({}, ["--recipe", "laptop-sft"], "one place"),
        ({}, ["--seeds", "1", "1"], "seed is named twice"),
        ({}, ["--tasks", "none"], "unknown key"),
        ({}, ["--target_file", "/nowhere.jsonl"], "target_file does not exist"),
        ({}, ["--target_file", "{folder}/broken.jsonl"], "broken JSON line"),
        ({}, ["--target_file", "{folder}/empty.jsonl"], "has no rows"),
        ({}, ["--only", "nothing"], "no cell has such a name"),
        ({}, ["--processes", "0"], "at least 1"),
        ({}, ["stray"], "belongs to no option"),
        ({}, ["--devices", "0,1,2", "--devices_per_cell", "2"], "cannot be dealt out evenly"),
        ({}, ["--launcher", "slurm", "--devices", "0"], "a queue assigns devices itself"),
        (
            {},
            ["--devices", "0,1,2", "--devices_per_cell", "3", "--gradient_accumulation_steps", "2"],
            "global batch of the recipe cannot be kept",
        ),
    ],
)
def test_bad_grids_are_refused_in_one_line(
    changes: dict[str, Any],
    words: list[str],
    match: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = grid_file(tmp_path, model, **changes)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "If')
    (tmp_path / "empty.jsonl").touch()
    config = ["--config", str(grid), "--output_dir", str(tmp_path / "out")]
    assert main(["compare", *config, *(word.format(folder=tmp_path) for word in words)]) == 2
    said = capsys.readouterr().err
    assert match in said
    assert len([line for line in said.splitlines() if not line.startswith("note: ")]) == 1
    assert not list((tmp_path).glob("out/*/*"))


# --- what is measured ---------------------------------------------------------------------------


def test_losses_are_the_model_s_own(model: Path, tmp_path: Path) -> None:
    one, tokenizer = load_causal_model(model), load_tokenizer(model)
    rows = [{"prompt": f"ask {i}", "response": "say " + "1 2 " * i} for i in range(1, 6)]
    file = write(tmp_path / "rows.jsonl", rows)
    examples = encode_rows(read_rows(file), tokenizer)[0]
    total = count = 0.0
    for example in examples:
        ids, labels = torch.tensor([example.input_ids]), torch.tensor([example.labels])
        with torch.no_grad():
            logits = one(input_ids=ids).logits[0, :-1]
        total += float(F.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count += example.response_tokens
    for size in (1, 2, 16):
        found = summary(row_losses(one, examples, size))["loss"]
        assert found == pytest.approx(total / count, rel=1e-5)


def test_preference_figures_by_hand(model: Path, tmp_path: Path) -> None:
    start, tokenizer = load_causal_model(model), load_tokenizer(model)
    pairs = [{"prompt": f"ask {i}", "chosen": f"say {i}", "rejected": "say"} for i in range(4)]
    pairs.append({"prompt": "ask 7", "chosen": "", "rejected": "say"})  # left out, both sides
    file = write(tmp_path / "pairs.jsonl", pairs)
    found = encode_file(file, read_pairs(file), tokenizer, EncodeOptions(on_empty="skip"))
    assert [len(side) for side in found] == [4, 4]
    same = summary(row_losses(start, found, 16, lambda: start))
    assert same == {"loss": pytest.approx(0.6931472), "accuracy": 50.0, "margin": 0.0}
    other = load_causal_model(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.manual_seed(1)))
    one = summary(row_losses(other, found, 2, lambda: start, beta=0.7))
    logits = []
    for chosen, rejected in zip(*found, strict=True):
        ratios = [
            row_losses(start, [x], 1)["loss"][0] * x.response_tokens
            - row_losses(other, [x], 1)["loss"][0] * x.response_tokens
            for x in (chosen, rejected)
        ]
        logits.append(0.7 * (ratios[0] - ratios[1]))
    assert one["margin"] == pytest.approx(sum(logits) / 4, abs=1e-5)
    assert one["accuracy"] == 100 * sum(x > 0 for x in logits) / 4


# --- tables -------------------------------------------------------------------------------------


def record(policy: str, seed: int, target: float, **more: Any) -> dict[str, Any]:
    return {
        "task": "t", "policy": policy, "mode": "native", "seed": seed, "status": "done",
        "kept_tokens": 1000, "response_tokens": 2000, "effective_tokens": 1000.0,
        "target": target, "retention": 2.0, "overall": (target + 2) / 2, "unit": "loss",
        "time": 10.0 + seed, "scoring_time": 1.0, "direction_time": 3.0, "setup_time": 2.0,
        "peak_memory": 5e8, "peak_memory_of": "resident", **more,
    }  # fmt: skip


def test_tables_rank_and_say_what_is_missing() -> None:
    every = [record("start", s, 0.5) for s in (0, 1)]
    every += [record("a", s, 1.0 + s) for s in (0, 1)] + [record("b", s, 3.0) for s in (0, 1)]
    every += [record("c", 0, 4.0)]
    every += [record("c", 1, 9.9, status="failed", error="a|b")]
    rows = rows_of(with_costs(every), "t")
    lines = to_markdown(quality_table(rows)).splitlines()
    assert "target ↓" in lines[0]
    assert "effective" not in lines[0]
    assert "| 0.500 ± 0.000 |" in lines[2]  # before training: not ranked
    assert "**1.500 ± 0.707**" in lines[3]
    assert "<u>3.000 ± 0.000</u>" in lines[4]
    assert "| `c`, native (1 of 2 seeds) |" in lines[5]
    assert "| 4.000 |" in lines[5]
    assert "| 1,000 ± 0 | 0.500 ± 0.000 |" in lines[3]
    soft = with_costs([record("w", 0, 1.0, kept_tokens=2000, effective_tokens=1500.0)])
    heads, _, line = to_markdown(quality_table(rows_of(soft, "t"))).splitlines()
    assert "| tokens trained on | effective | share |" in heads
    assert "| 2,000 | 1,500 | 1.000 |" in line
    assert "| 10.5 ± 0.7 |" in to_markdown(cost_table(rows))
    assert "| 500 ± 0 |" in to_markdown(cost_table(rows))
    assert "| `t/c-native-seed1` | failed | a\\|b |" in problem_table(every)
    assert problem_table(every[:4]) == ""
    assert records_csv(every).count("\n") == len(every) + 1


def test_cells_of_this_process_are_kept(tmp_path: Path) -> None:
    """Each is made once; what was made before an error stays."""
    made: list[str] = []

    def make(path: Path) -> None:
        made.append(path.stem)
        if made == ["a", "b"]:
            raise RuntimeError("no such luck")
        path.write_text(path.stem)

    cells = {tmp_path / "t" / f"{name}.txt": make for name in "abc"}
    with pytest.raises(RuntimeError, match="no such luck"):
        run_here(cells, Tracker("cells", 3, False))
    reports: list[Any] = []
    run_here(cells, Tracker("cells", 3, reports.append))
    assert made == ["a", "b", "b", "c"]
    assert [path.read_text() for path in cells] == ["a", "b", "c"]
    assert reports[-1].done == 3
