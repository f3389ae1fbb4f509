"""Pages for users, and examples in docstrings, against what they speak of."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from alphatoken import errors
from alphatoken.data import pair_of, row_of
from benchmarks import prices
from tests import architectures_page as table
from tests import page_numbers
from tests.both_programs import main
from tests.page_numbers import MARK, PAGES, differences, filled, value_of, written
from tests.places import nightly
from tests.printed_commands import prose

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIALS = DOCS / "tutorials"


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MESSAGES = _module(DOCS / "messages.py")

# --- data formats --------------------------------------------------------------------------------


def _examples(kind: str) -> list[tuple[str, list[dict[str, Any]]]]:
    page = (DOCS / "data-formats.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"<!-- {kind}(.*?) -->\n```json\n(.*?)```", page, re.DOTALL)
    return [(note.strip(), [json.loads(x) for x in text.splitlines()]) for note, text in blocks]


def test_rows_of_the_page_are_read_as_it_says() -> None:
    found = _examples("rows:")
    counts = [int(note.removesuffix(" turns")) for note, _ in found]
    assert counts == [2, 2, 2, 3, 5, 4, 1]
    for note, records in found:
        rows = [row_of(record, 0, "here") for record in records]
        assert {len(row.turns) for row in rows} == {int(note.split()[0])}
        turns = {tuple((t.role, t.text, t.learned) for t in row.turns) for row in rows}
        assert len(turns) == 1, records
        marked = [text for *_, text, learned in turns.pop() if not learned]
        assert marked == (["48."] if len(rows[0].turns) == 4 else [])


def test_pairs_of_the_page_are_one_pair_in_three_forms() -> None:
    ((_, records),) = _examples("pairs")
    pairs = [pair_of(record, 0, "here") for record in records]
    texts = {
        tuple(turn.text for turn in (*pair.prompt, *pair.chosen, *pair.rejected)) for pair in pairs
    }
    assert texts == {("What is 6 times 7?", "6 * 7 = 42.", "6 * 7 = 48.")}
    assert len(pairs) == 3


def test_every_known_field_is_named() -> None:
    from alphatoken.data import marks, messages, pairs

    page = (DOCS / "data-formats.md").read_text(encoding="utf-8")
    known = (
        *messages.PROMPTS,
        *messages.RESPONSES,
        *messages.CHATS,
        *pairs.CHOSEN,
        *pairs.REJECTED,
    )
    known = (*known, *messages.ADDED, *messages.SYSTEMS, *messages.THOUGHTS)
    known = (*known, *marks._TRAINED, *marks._MASKED)
    known = (*known, *marks._WEIGHTS, *marks._USED, *marks._RIGHT, *marks._WRONG, *marks._REWARDS)
    for name in (*known, *messages.ROLES):
        assert f"`{name}`" in page or f'"{name}"' in page or f"the {name}" in page, name


# --- messages ------------------------------------------------------------------------------------


def _raised(path: Path) -> list[tuple[str, str]]:
    """Class and first words of what a file raises, found in another way than the page does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    found = []
    for call in raised:
        if isinstance(call, ast.Call) and call.args:
            first = call.args[0]
            first = first.values[0] if isinstance(first, ast.JoinedStr) else first
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((ast.unparse(call.func), first.value))
    return found


@pytest.mark.slow
def test_no_message_is_missing_from_the_page() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    shown = set(MESSAGES.MARK.findall(page))
    found = MESSAGES.messages()
    assert {one.kind for one in found} == shown
    assert all(f"\n## {kind}\n" in page for kind in shown)
    assert {one.room for one in found} == set(MESSAGES.ROOMS)
    looked = 0
    for path in sorted(p for folder in MESSAGES.PACKAGES for p in folder.rglob("*.py")):
        for kind, words in _raised(path):
            if kind in shown:
                looked += 1
                assert any(m.kind == kind and m.what.startswith(words) for m in found), words
    assert looked > 400


def test_an_error_names_its_heading() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for kind in errors.__all__:
        if kind.endswith("Error"):
            raised = getattr(errors, kind)("what is wrong", got="this")
            assert raised.__notes__ == [f"Documentation: Troubleshooting, {kind}."]
            assert str(raised) == "what is wrong. Got: this."
            assert f"\n## {kind}\n" in page


@pytest.mark.slow
def test_each_class_has_its_messages_with_reason_and_remedy() -> None:
    text = MESSAGES.listed("DataError")
    assert "### DataError: Rows and their files" in text
    entry = text[text.index("a row has an empty response") :].split("\n\n")[0]
    assert "Why it matters: there is no token to value." in entry
    assert "Remedy: mend the row" in entry


# --- links ----------------------------------------------------------------------------------------

BY_EACH_BUILD = {"claims", "files", "kill-matrix", "log", "options"}
"""Pages that nobody finds in the repository."""


LINKING = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/log.yaml")),
    *sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]),
]


def test_links_lead_to_files_of_the_repository() -> None:
    """Read raw, as a clone or a web page of the repository shows them."""
    looked = 0
    for page in LINKING:
        if page.stem in BY_EACH_BUILD and page.suffix == ".md":
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if not re.match(r"https?:|mailto:|#", target):
                place = page.parent / target.partition("#")[0]
                assert place.exists(), f"{page.name}: {target}"
                assert place.suffix != ".md" or place.stem not in BY_EACH_BUILD, (page.name, target)
                looked += 1
    assert looked > 200


def test_a_tutorial_counts_what_there_is() -> None:
    from alphatoken.fidelity.registry import DIAGNOSTICS

    text = prose(TUTORIALS / "2-choose.ipynb")
    assert len(DIAGNOSTICS) - 1 == 9
    assert "`diagnose` has nine more questions" in text


# --- tutorials -----------------------------------------------------------------------------------


def test_every_page_has_its_place_in_the_order() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    captions = re.findall(r":caption: (\w+)", index)
    assert captions == ["Start", "Use", "Mathematics", "Evidence", "Reference", "Contribute"]
    listed = set(re.findall(r"^([\w/-]+)$", index, re.MULTILINE))
    there = {path.stem for path in DOCS.glob("*.md")} | BY_EACH_BUILD
    assert there - {"index"} == listed - {"tutorials/index", "adr/index"}


def test_tutorials_are_listed_and_say_what_they_take() -> None:
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    for path in sorted([*TUTORIALS.glob("[0-9]-*")]):
        assert f"]({path.name})" in index
        text = path.read_text(encoding="utf-8")
        assert "At the end you" in text, path.name
        assert re.search(r"minute|hour", text), path.name


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_recorded_tutorial_is_whole_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 200_000
    assert not re.search(r"/tmp/|/home/|/root/|/work/|site-packages|Warning", text)
    book = json.loads(text)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    if not book["metadata"].get("recorded", True):
        assert all(not cell["outputs"] for cell in cells)
        pytest.skip("not recorded yet: make tutorials")
    outputs = [one for cell in cells for one in cell["outputs"]]
    assert len(cells) > 2
    assert outputs
    assert all(one["output_type"] != "error" for one in outputs)
    assert all(one.get("name") != "stderr" for one in outputs)


# --- a policy of one's own ------------------------------------------------------------------------


def test_the_pages_policy_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that the page says, in either program, whose folder is not that of the rows."""
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"## Your own policy.*?```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_policy.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    before = list(sys.path)
    assert main(["policies", "my_policy:Surprising"]) == 0
    assert "Unlikely tokens first." in capsys.readouterr().out
    assert main(["sft", "--policy", "my_policy:Surprising", "--use_cpu"]) == 2
    assert "no model is named" in capsys.readouterr().err  # the policy was read before
    assert main(["sft", "--policy", "your_policy:Surprising", "--use_cpu"]) == 2
    assert "module.py in the folder where the command is called" in capsys.readouterr().err
    assert sys.path == before


# --- numbers in prose, which ``tests.page_numbers`` fills in --------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_marked_number_is_that_of_its_data(page: str) -> None:
    assert differences(page) == []


def test_pages_that_readers_meet_first_have_marked_numbers() -> None:
    for name in ("should-i", "fidelity", "paper-gaps", "selection"):
        assert MARK.search((DOCS / f"{name}.md").read_text()), name


def test_a_number_that_was_edited_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "-selection/grids/smollm2/tasks/clean/method=rho-1/against/target/standard/mean"
    right = f"\nit loses {written(value_of(source), '-0.014')}<!-- = {source} --> there"
    wrong = right.replace("loses -0.0", "loses -0.9")
    assert wrong != right
    (tmp_path / "page.md").write_text(wrong)
    monkeypatch.setattr(page_numbers, "ROOT", tmp_path)
    assert [line.split(":")[0] for line in differences("page.md")] == ["page.md, line 2"]
    assert filled(wrong) == right


# --- prices ---------------------------------------------------------------------------------------


def test_prices_are_those_of_their_measurements() -> None:
    assert json.loads(prices.FILE.read_text(encoding="utf-8")) == prices.prices()
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert prices.table_of_prices() in page


@pytest.mark.parametrize("page", [name for name in PAGES if name != "docs/log.yaml"])
def test_a_price_in_prose_is_one_of_the_table(page: str) -> None:
    """Whatever a page says that values take of a training step is the table's; the log is past."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- table:.*?<!-- end of table -->", "", text, flags=re.S)
    said = r"(\d+\.\d+)(<!-- = [^>]+ -->)?( \[[^\]]*\])? of (?:a|the time of a|the FLOPs of a)"
    for one in re.finditer(said + r" (?:training )?step", text):
        assert str(one[2]).startswith("<!-- = prices/"), one[0]
    for one in re.finditer(r"<!-- = ([^>]*/price\b[^>]*) -->", text):
        raise AssertionError(f"{one[1]}: docs/prices.json has this number")


# --- the table of architectures -------------------------------------------------------------------

SAMPLE = [
    *("afmoe", "bart", "deepseek_v3", "doge"),
    *(pytest.param(kind, marks=nightly) for kind in ("cpmant", "ctrl", "modernbert-decoder")),
]
"""An output that is viewed, an unshifted loss, projections on other positions, a kernel called by
the model; nightly positions of its own, blocks found without checkpointing, a head named decoder.
"""
TRIED: dict[str, Any] = json.loads(table.DATA.read_text(encoding="utf-8"))


def test_the_page_is_its_data_and_no_value_is_wrong() -> None:
    """Each is exact, returned after the proofs, or refused by an error of ours."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page(TRIED)
    assert len(TRIED["kinds"]) >= 40
    cells = [said for found in TRIED["kinds"].values() for said in found.values()]
    assert not [said for said in cells if said.startswith("WRONG")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(
    TRIED["transformers"] != transformers.__version__,
    reason="the table is of another release of transformers",
)
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_row_holds(kind: str) -> None:
    assert table.tried(kind) == TRIED["kinds"][kind]


# --- examples in docstrings -----------------------------------------------------------------------

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.glob("alphatoken/**/*.py"))
    if ">>> " in path.read_text("utf-8")
]


def test_there_are_examples() -> None:
    assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runs, and says what it says."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert found.attempted
    assert not found.failed, capsys.readouterr().out
