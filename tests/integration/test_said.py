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

from tests.both_programs import main
from tests.page_numbers import MARK, ROOT, value_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *PAGES,
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "alphatoken/recipes").glob("*.yaml")),
]


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


CAPTION = (
    "A right and a wrong answer, valued by SmolLM2-135M-Instruct (four-bit weights) against eight "
    "other solved problems. Blue: a small step on this token lowers their loss; orange: it raises "
    "it. Worth most in both are `*`, `answer`, `There` and a `0` that was said before. The remark "
    "about trees and taste is worth less than nothing. The result of the first sum is worth more "
    "where it is wrong (118) than where it is right (108): a value says what serves the target, "
    "not what is true. `python examples/value_an_answer.py` draws it."
)


def test_the_first_caption_is_true_of_the_values() -> None:
    """Sentence by sentence."""
    (caption,) = re.findall(r"\(docs/answer\.svg\)\n\n\*(.+?)\*\n\n", README, re.S)
    assert plain(caption) == CAPTION
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


# --- numbers and their conditions ----------------------------------------------------------------


FIRST = r"(?<![\d.])0\.124(?![\d])"
CONDITIONS = {
    "the data": "GSM8K",
    "the weights": "four-bit weights",
    "rows trained on": r"64 (of 320 )?rows|same 64 rows",
    "steps before": "24 steps",
    "clean rows trained on": "16 clean",
    "clean rows in all": "32 clean rows",
    "the clean rows alone": r"0\.107",
    "in equal time": r"0\.100",
}


def test_the_gain_of_clean_rows_first_never_stands_without_its_conditions() -> None:
    said = {path: plain(path.read_text(encoding="utf-8")) for path in SOURCES}
    of = r"0\.124<!-- = -?selection/\S+method=after-validation/"
    where = [p for p in SOURCES if re.search(of, p.read_text())]
    assert len(where) >= 4
    lacking = {
        f"{path.name}: {name}"
        for path in where
        for name, words in CONDITIONS.items()
        if not re.search(words, said[path])
    }
    assert lacking == set()
    recipes = [p for p in SOURCES if p.suffix == ".yaml"]
    assert [p.name for p in recipes if re.search(FIRST, said[p])] == []


LOOKS = ('policy(=|: )"?all', 'estimator(=|: )"?label', 'value_parameters(=|: )"?all', "pool")
SAYS = (
    (("README.md", "docs/should-i.md", "alphatoken/recipes/recommended.yaml"),
     ("--config recommended", "was not measured")),
    (("README.md", "docs/trainers.md", "alphatoken/recipes/laptop-sft.yaml",
      "alphatoken/recipes/laptop-lora.yaml"), LOOKS),
    (("docs/data-formats.md", "docs/from-trl.md", "docs/datasets.md"),
     ("LLaMA-Factory", "drop `loss_weights` in silence|None of the three reads the column")),
    (("alphatoken/demo/run.py",), ("less often than a coin", "did worse than all of them")),
)  # fmt: skip
"""Pages, and what each of them must say."""


@pytest.mark.parametrize(("page", "words"), [(p, w) for pages, w in SAYS for p in pages])
def test_a_page_says_what_it_must(page: str, words: tuple[str, ...]) -> None:
    text = plain((ROOT / page).read_text(encoding="utf-8"))
    assert [said for said in words if not re.search(said, text)] == []


MODELS = "SmolLM2|Gemma 3 270M"
NO_WEIGHTS = {"corpora.md": "FLOPs counted of its shape", "cft.md": "no figures of it"}
NO_WEIGHTS |= {path.name: "of the hub's weights" for path in SOURCES if "laptop" in path.name}


def test_figures_of_a_language_model_say_that_its_weights_have_four_bits() -> None:
    unsaid = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name not in NO_WEIGHTS
        and re.search(MODELS, text := plain(path.read_text(encoding="utf-8")))
        and re.search(r"\d\.\d", text)
        and "four-bit weights" not in text
    ]
    assert unsaid == []


def test_numbers_by_the_papers_estimator_are_not_said_to_have_its_settings() -> None:
    selection = re.compile(r"selection/\S+method=alphatoken/[^>]*-->[^.|]{0,40}paper's settings")
    assert [p.name for p in SOURCES if selection.search(p.read_text(encoding="utf-8"))] == []


# --- what a value is -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_lines_promise_an_infinitely_small_step_and_no_other(page: str) -> None:
    first = plain((ROOT / page).read_text(encoding="utf-8"))[:900]
    assert "infinitely small plain gradient step" in first
    assert "step of AdamW" in first
    assert "was not predicted" in first
    steps: Any = json.loads((ROOT / "docs/fidelity.json").read_text())
    for model in ("smollm2", "gemma3"):  # as long as this holds, that is what has to be said
        assert steps[model]["facts"]["step"]["exact, all parameters, full P"][1] < 0


def test_readme_gives_the_figures_of_that_step_with_their_intervals() -> None:
    marked = [m["source"] for m in MARK.finditer(README[: README.index("## Start")])]
    of = "fidelity/{}/facts/step/exact, all parameters, full P/{}"
    assert {of.format(m, i) for m in ("smollm2", "gemma3") for i in range(3)} <= set(marked)


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


def test_the_demos_last_words_are_those_of_the_measurements() -> None:
    """It claims nothing for real models but what was measured there: as long as that is so."""
    assert value_of("fidelity/smollm2/facts/noise/low `alphatoken`, K = 3/2") < 0.5
    assert (
        value_of("selection/grids/code/tasks/code/method=alphatoken/against/target/standard/low")
        > 0
    )


# --- what was run on what ------------------------------------------------------------------------

HARDWARE = re.compile(
    r"flash attention|bitsandbytes|torchao|load_in_4bit|bf16 weights|device_map|"
    r"DistributedDataParallel|DDP|FSDP2|ZeRO"
)
TABLES = ("integration", "optimizers", "from-trl", "trainers")


def test_each_cell_about_hardware_that_nobody_had_says_not_run() -> None:
    """As long as docs/gpu.md has no figure. What is refused needs no run."""
    assert "No figure of a GPU exists yet" in (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    lines = [
        line
        for name in TABLES
        for line in (ROOT / f"docs/{name}.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and HARDWARE.search(line.rsplit("|", 2)[0]) and "FSDP1" not in line
    ]
    assert len(lines) >= 9
    assert [line for line in lines if "not run on" not in line] == []
    assert "not run on them" in README


# --- rounding and the sign of the Fisher ---------------------------------------------------------


def test_what_is_said_of_rounding_is_what_was_measured() -> None:
    found: dict[str, Any] = json.loads((ROOT / "docs/rounding.json").read_text())
    page = plain((ROOT / "docs/fidelity.md").read_text(encoding="utf-8"))
    small = {name: case for name, case in found.items() if case["model"] == "small"}
    assert len(small) == 9
    assert all(case["spearman"]["diagonal"][1] > 0 for case in small.values())  # no sign turned
    for bits in ("four", "three"):
        costs = [
            cost
            for name, case in small.items()
            if f"{bits} bits" in name
            for cost in case["rounding cost"].values()
        ]
        assert f"{min(costs):.2f} to {max(costs):.2f}" in page
    trained, again = (
        found[f"smollm2, trained before{more}"]["spearman"]["diagonal"]
        for more in ("", ", rounded again")
    )
    assert found["smollm2, as it comes"]["spearman"]["diagonal"][1] > 0
    assert again[2] < trained[1]  # weaker, beyond both intervals
    assert "it weakens the proxy, and turned no sign" in page
