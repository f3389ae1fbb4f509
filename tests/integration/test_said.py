"""What pages say in words, beside the values that they speak of."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.standings.values import ONE_STEP
from tests.both_programs import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def plain(text: str) -> str:
    """A page as it is read: without its comments, on one line."""
    return " ".join(re.sub(r"<!--.*?-->", "", re.sub(r"^# ", "", text, flags=re.M)).split())


# --- the first picture ---------------------------------------------------------------------------

ANSWERS: dict[str, list[tuple[str, float]]] = json.loads((ROOT / "docs/answer.json").read_text())
RIGHT, WRONG = ANSWERS["both sums right"], ANSWERS["both sums wrong"]


def total(tokens: list[tuple[str, float]], passage: str) -> float:
    """Values of the tokens of a passage, where it stands first."""
    ends, at = [], 0
    for text, _ in tokens:
        at += len(text)
        ends.append(at)
    start = "".join(text for text, _ in tokens).index(passage)
    return sum(
        value
        for (text, value), end in zip(tokens, ends, strict=True)
        if start <= end - len(text) and end <= start + len(passage)
    )


def best_four(tokens: list[tuple[str, float]]) -> list[str]:
    ranked = sorted(tokens, key=lambda token: -token[1])
    return sorted(text.strip() for text, _ in ranked[:4])


def test_the_first_caption_is_true_of_the_values() -> None:
    """Sentence by sentence."""
    (caption,) = re.findall(r"\(docs/answer\.svg\)\n\n\*(.+?)\*\n\n", README, re.S)
    for said in ("Worth most in both are `*`, `answer`, `There` and a `0`", "wrong (`118`)"):
        assert said in plain(caption)
    right, wrong = ("".join(text for text, _ in tokens) for tokens in (RIGHT, WRONG))
    assert "= 108" in right
    assert wrong == right.replace("108", "118").replace("88", "98")
    remark = " Apples grow on trees, and many people love how they taste."
    for tokens in (RIGHT, WRONG):
        assert min(value for _, value in tokens) < 0 < max(value for _, value in tokens)
        assert best_four(tokens) == ["*", "0", "There", "answer"]
        assert total(tokens, remark) < -20
    assert total(WRONG, " 118") > 20 > total(RIGHT, " 108")
    assert (ROOT / "examples/value_an_answer.py").is_file()


# --- what a value is -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_lines_promise_an_infinitely_small_step_and_no_other(page: str) -> None:
    first = plain((ROOT / page).read_text(encoding="utf-8"))[:900]
    assert "infinitely small plain gradient step" in first
    assert "step of AdamW" in first
    assert re.search("was not predicted|did not predict", first)
    steps: Any = json.loads((ROOT / "docs/fidelity.json").read_text())
    for model in ("smollm2", "gemma3"):  # as long as this holds, that is what has to be said
        assert steps[model]["facts"]["step"]["exact, all parameters, full P"][1] < 0
        assert steps[model]["facts"]["step"]["exact, all parameters, P = 1"][1] < 0


def test_the_standings_say_what_was_measured() -> None:
    """Sentences of README, docs/standings.md and the log about the small decoder."""
    runs = json.loads((ROOT / "docs/standings.json").read_text())["runs"]
    large = runs["smollm2"]["words"]["values"]
    told = [
        n for n, one in large.items() if not one["lds"]["tokens"][1] < 0 < one["lds"]["tokens"][2]
    ]
    assert told == ["label along Adam's step"]
    values: dict[str, Any] = runs["small"]["words"]["values"]
    for name in ONE_STEP:  # none of them predicts a run
        _, low, high = values[name]["lds"]["tokens"]
        assert low < 0 < high, name
    above = [name for name, one in values.items() if any(one["above"].values())]
    assert above == ["run value"]
    assert all(values["run value"]["above"].values())
    worst = {name for name, one in values.items() if one["drops"]["worst 0.2"] < 0}
    assert worst == {"walk of 24 steps", "ledger of the run", "run value"}
    best = {n: one["drops"]["best 0.2"] for n, one in values.items()}
    found = {name for name in best if name not in ("entropy", "random")}
    assert min(found, key=best.__getitem__) == "ledger of the run"
    assert max(best["entropy"], best["random"]) < 10 < best["ledger of the run"]
    rough: dict[str, Any] = runs["small"]["responses"]["values"]
    for name, one in rough.items():
        _, low, high = one["lds"]["tokens"]
        assert low < 0 < high, name
    worst_fifth = {name: one["drops"]["worst 0.2"] for name, one in rough.items()}
    assert min(worst_fifth, key=worst_fifth.__getitem__) == "walk of 24 steps"
    precision = {name: one["precision"] for name, one in rough.items()}
    assert max(precision, key=precision.__getitem__) == "influence function, all linears"
    assert max(precision.values()) < runs["small"]["responses"]["good"] + 0.05
    kinds: dict[str, Any] = runs["small"]["mixed"]["values"]
    told = [name for name, one in kinds.items() if one["lds"]["tokens"][1] > 0]
    assert told == ["label along Adam's step", "run value"]
    precision = {name: one["precision"] for name, one in kinds.items()}
    assert max(precision, key=precision.__getitem__) == "walk of 24 steps"


def runs_of(grid: str, task: str) -> dict[str, Any]:
    """Figures of docs/selection.json by method."""
    grids = json.loads((ROOT / "docs/selection.json").read_text(encoding="utf-8"))["grids"]
    return {entry["method"]: entry for entry in grids[grid]["tasks"][task]}


def beside_all(grid: str, task: str, method: str, kind: str = "target") -> dict[str, float]:
    """Loss of a method minus that of training on all tokens."""
    found: dict[str, float] = runs_of(grid, task)[method]["against"][kind]["standard"]
    return found


def test_longer_runs_say_what_was_measured() -> None:
    """Sentences of README, docs/should-i.md and docs/selection.md about hundreds of steps."""
    first = [
        beside_all("smollm2", "noisy-words", "validation-first")["mean"],
        beside_all("long", "words-16", "validation-first")["mean"],
    ]
    walks = []
    for task in ("words-120", "words-400", "words-800"):
        walk, one = (beside_all("long", task, name) for name in ("walk", "validation-first"))
        assert walk["seeds"] == one["seeds"] == 3
        assert walk["high"] < min(0, one["mean"])
        walks.append(walk["mean"])
        first.append(one["mean"])
    assert first == sorted(first)  # a head start that fades
    assert walks == sorted(walks)
    assert walks[-1] < walks[0] / 2
    assert beside_all("long", "words-800", "validation-first")["high"] > 0
    words = runs_of("long", "words-120")
    assert words["walk"]["target"] < runs_of("long", "words-400")["standard"]["target"]
    for name in set(words) - {"standard"}:
        assert words[name]["against"]["target"]["standard"]["seeds"] == 3
    for name in ("walk-64-rows", "walk-256-rows", "full-step-all"):
        assert abs(beside_all("long", "words-120", name)["mean"] - walks[0]) < 0.015
    for task in ("responses-400", "mixed-400"):  # the right rows alone would gain
        assert beside_all("long", task, "oracle")["high"] < 0
        losses = {name: beside_all("long", task, name)["mean"] for name in ("walk", "rho-1")}
        assert 0 < losses["walk"] < losses["rho-1"]
    assert beside_all("long_lora", "clean-400", "walk")["low"] > 0.1


def test_of_the_ways_to_take_walks_80_percent_gains_as_much_at_no_higher_retention_loss() -> None:
    """Sentences of docs/selection.md and docs/should-i.md on what is kept, and of other methods."""
    for task in ("words-400", "library-120"):
        more, less = (beside_all("long", task, name) for name in ("walk-80", "walk"))
        assert more["seeds"] == less["seeds"] == 3
        assert abs(more["mean"] - less["mean"]) < 0.01
        assert more["high"] < 0
        kept = beside_all("long", task, "walk-80", "retention")
        assert kept["mean"] < 0
    walk, renewed = (beside_all("long", "words-400", n)["mean"] for n in ("walk", "walk-renewed"))
    assert abs(walk - renewed) < 0.01
    renewed = beside_all("long", "words-400", "walk-renewed", "retention")["high"]
    assert renewed < beside_all("long", "words-400", "walk", "retention")["low"]
    order = ("walk", "rho-1", "alphatoken", "validation-first", "random")
    gains = [beside_all("long", "words-400", name)["mean"] for name in order]
    assert gains == sorted(gains)
    assert beside_all("long", "words-400", "random")["low"] > 0


def test_what_lasts_on_wrong_words_loses_on_other_rows() -> None:
    """Sentences of docs/selection.md, docs/should-i.md and README on the price of walk values."""
    for task in ("clean-400", "responses-400", "mixed-400"):
        walk, first = (beside_all("long", task, name) for name in ("walk", "validation-first"))
        assert walk["seeds"] == first["seeds"] == 3
        assert walk["low"] > 0
        assert first["low"] < 0 < first["high"]
    less = beside_all("long", "clean-400", "walk-80")
    assert 0 < less["low"] < less["mean"] < beside_all("long", "clean-400", "walk")["mean"]


def test_another_model_gains_less_and_loses_more() -> None:
    """Sentences of the same pages on LoRA and on Gemma."""
    assert beside_all("long_lora", "words-400", "walk")["high"] < 0
    gemma = beside_all("long_gemma3", "words-400", "walk")
    assert gemma["low"] < 0 < gemma["high"]
    loss = beside_all("long_gemma3", "clean-400", "walk")
    assert loss["seeds"] == gemma["seeds"] == 3
    assert 5.5 < loss["mean"] / beside_all("long", "clean-400", "walk")["mean"] < 6.5
    early = beside_all("long_gemma3", "words-120", "walk")
    assert early["seeds"] == 1
    assert early["high"] < 0


def test_rows_of_another_source_land_inside_the_interval() -> None:
    """The sentence of docs/selection.md on functions of the standard library."""
    for method in ("walk", "walk-80"):
        apart, known = (beside_all("long", t, method) for t in ("library-120", "words-120"))
        assert apart["seeds"] == 3
        assert apart["low"] < known["mean"] < apart["high"] < 0


def test_the_recommended_recipe_is_what_was_measured() -> None:
    """But for the rate of the walk, which is the run's own."""
    kept = {"policy", "keep_ratio", "estimator", "walk_steps", "objective", "retention"}
    made = yaml.safe_load((ROOT / "alphatoken/recipes/recommended.yaml").read_text())
    grid = yaml.safe_load((ROOT / "benchmarks/selection/long.yaml").read_text())
    measured = {**grid["options"], **grid["methods"]["walk-80"]}
    for name in (*kept, "validation_mode"):
        assert made[name] == measured[name], name


# --- what a newcomer runs ------------------------------------------------------------------------

BLOCKS = re.compile(r"^```(|python)\n(.*?)^```$", re.M | re.S)
FIRST_PAGES = ("README.md", "docs/quickstart.md")


def shell_lines(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block for kind, block in BLOCKS.findall(text) if not kind]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_a_bare_shell_has_what_the_lines_after_make_demo_call(page: str, tmp_path: Path) -> None:
    """``make demo`` leaves .venv; the next line makes python and alphatoken those of it."""
    first, second, *others = shell_lines(page)
    assert first.startswith("make demo")
    assert second == "source .venv/bin/activate"
    called = {line.split()[0] for line in others}
    assert called <= {"python", "alphatoken", "alphatoken-lab"}
    here = Path(sys.prefix)
    if not (here / "bin/activate").is_file():
        pytest.skip("these tests do not run in an environment with a script that enters it")
    (tmp_path / ".venv").symlink_to(here)
    script = f"{second}; command -v {' '.join(sorted(called))}"
    bare = {"PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=bare, capture_output=True, text=True, check=True
    )
    places = {Path(line).name: Path(line).parent.resolve() for line in found.stdout.splitlines()}
    assert places == dict.fromkeys(called, (here / "bin").resolve())


def test_the_two_commands_that_a_clone_begins_with_are_named() -> None:
    """Those that the Makefile calls so."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "The two commands a newcomer needs are `make demo` and `make test`" in makefile
    assert "make demo" in README
    assert "`make test`" in README


def test_an_extra_that_a_message_names_is_one_of_the_package() -> None:
    declared = set(metadata("alphatoken").get_all("Provides-Extra") or [])
    named = {
        extra
        for path in (ROOT / "alphatoken").rglob("*.py")
        for extra in re.findall(r"pip install '?alphatoken\[(\w+)\]", path.read_text("utf-8"))
    }
    assert {"report", "train", "diagnose"} <= named <= declared


def test_no_page_promises_the_package_on_a_registry() -> None:
    bare = re.compile(r"(pip|uv pip) install (-U )?[\"']?alphatoken[\"'\s`]")
    assert [p.name for p in PAGES if bare.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", [*FIRST_PAGES, "docs/tutorials/1-look.md"])
def test_first_blocks_use_the_exact_values_that_the_page_recommends(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    made = re.findall(r"config=ScorerConfig\(([^)]*)\)", text)
    assert set(made) == {'"label", parameters="all"'}
    scored = re.findall(r"^alphatoken score .*?(?:[^\\]$)", text, re.M | re.S)
    assert scored, page
    assert all("--estimator label --value_parameters all" in line for line in scored)


def test_help_of_the_command_line_does_not_send_newcomers_to_select(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = capsys.readouterr().out
    assert "worth it" not in help_text
    assert "--config recommended" in help_text
    assert "--estimator label --value_parameters all" in help_text
