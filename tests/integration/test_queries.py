"""``score --query``: values, the page of both sides, resume, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphatoken.data import EncodeOptions, Fields
from alphatoken.score import ScoredExample, value_files
from alphatoken.score.queries import encode_queries, query_rows, read_as
from tests.integration.browser import opened
from tests.integration.small_world import World, make_tokenizer
from tests.integration.test_cli import load, same
from tests.integration.test_report import channels
from tests.rows import jsonl

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

ROW = {"prompt": "say : it", "response": "the first is e and the last is d ."}
TEXT = "5 plus 0 is 5 ."
QUERIES = (TEXT, json.dumps(ROW))
ASKED = [word for query in QUERIES for word in ("--query", query)]

SINGLE = 1e-5
"""Of the largest value: float32, in two orders of summation."""


def score_queries(world: World, out: Path, *more: object, **changed: Any) -> int:
    """Exit status of ``score`` on the small files with queries in ``more``."""
    return world.score(out, *more, **({"validation": None} | changed))


def columns(folder: Path, key: str) -> dict[int, Any]:
    return {example.row: example.values[key] for example in load(folder)}


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "scope"),
    # Other estimators are as the first where queries are told apart; a walk is not.
    [("alphatoken", "dataset"), ("walk", "batch")],
)
def test_a_query_has_the_values_of_a_run_against_that_row(
    world: World, tmp_path: Path, estimator: str, scope: str
) -> None:
    """One query to the bit, several to rounding; a walk is on one query alone."""
    more = {"estimator": estimator, "scope": scope, "limit": 5}
    rows = [{"text": TEXT}, ROW]
    if estimator != "walk":
        assert score_queries(world, tmp_path / "both", *ASKED, "--no_report", **more) == 0
    for number, (query, row) in enumerate(zip(QUERIES, rows, strict=True), start=1):
        validation = jsonl(tmp_path / f"{number}.jsonl", [row])
        alone, one = tmp_path / f"alone{number}", tmp_path / f"one{number}"
        assert world.score(alone, "--no_report", validation=validation, **more) == 0
        assert score_queries(world, one, "--query", query, "--no_report", **more) == 0
        due, values_of_query = columns(alone, "adaptation"), columns(one, "query_1")
        assert due.keys() == values_of_query.keys()
        assert all(np.array_equal(due[row], values_of_query[row]) for row in due)
        if estimator != "walk":
            several = columns(tmp_path / "both", f"query_{number}")
            size = max(np.abs(values).max() for values in due.values())
            for index, values in due.items():
                assert np.abs(several[index] - values).max() <= SINGLE * size
    assert "query_1" not in load(tmp_path / "alone1")[0].values


def test_queries_are_resumed_and_other_queries_are_not(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score_queries(world, tmp_path, *ASKED, "--no_report") == 0
    before = load(tmp_path)
    value_files(tmp_path / "values")[1].unlink()
    for other in (ASKED[:2], [*ASKED[2:], *ASKED[:2]], ["--query", "3 plus 4 is 7 ."]):
        assert score_queries(world, tmp_path, *other, "--no_report", "--resume") == 2
        assert "this is not the run to resume: it differs in query" in capsys.readouterr().err
    assert world.score(tmp_path, "--no_report", "--resume") == 2
    assert score_queries(world, tmp_path, *ASKED, "--no_report", "--resume") == 0
    assert same(before, load(tmp_path))


# --- what a query is read as ----------------------------------------------------------------------


def test_what_a_query_is_read_as_is_said() -> None:
    texts = (TEXT, json.dumps(ROW), '{"text": "2"}', "[1]", "{no json", '{"prompt": ')
    rows = query_rows(texts, Fields())
    assert [row.turns[-1].text for row in rows] == [TEXT, ROW["response"], "2", *texts[3:]]
    examples, _ = encode_queries(rows[:3], make_tokenizer(), EncodeOptions(max_length=8))
    assert [read_as(example) for example in examples[:1]] == [
        "query 1 is read as plain text: 7 of its 8 tokens are valued"
    ]
    assert read_as(examples[1]) == (
        "query 2 is read as a prompt with its response: 2 of its 8 tokens are valued; "
        "9 more are beyond the length and were cut"
    )


REFUSED: dict[str, tuple[list[str], str]] = {
    "empty": (["--query", TEXT, "--query", ""], "a query has no token to value. Got: query 2: ''"),
    "blank": (["--query", "  \n"], "a query has no token to value. Got: query 1"),
    "no response": (['--query={"prompt": "add : 1 and 2", "response": ""}'], "no token to value"),
    "no row": (['--query={"prompt": "add : 1 and 2"}'], "query 1 has 'prompt'"),
    "beyond the length": (
        [*ASKED, "--query", json.dumps(ROW | {"prompt": "a b " * 12}), "--max_length", "20"],
        "Got: query 3: .*larger --max_length",
    ),
    "half a character": (["--query", "a \udc80"], "half of a character. Got: query 1"),
    "a walk to two": ([*ASKED, "--estimator", "walk"], "a walk leads to one query. Got: 2 of"),
    "two objectives": ([*ASKED, "--validation_rows", "2"], "not allowed with argument"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_query_that_cannot_be_used_is_one_line(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words, message = REFUSED[case]
    assert score_queries(world, tmp_path / "out", *words) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("\n") == 1
    assert not (tmp_path / "out" / "values").exists()


# --- the page -------------------------------------------------------------------------------------


def sums(examples: list[ScoredExample], key: str) -> dict[str, float]:
    """Of each row, by its place, the sum of its values."""
    return {e.place: float(e.values[key][e.response].astype(float).sum()) for e in examples}


@pytest.fixture(scope="module")
def paged(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a page, of which the last query is hostile."""
    out = tmp_path_factory.mktemp("paged")
    assert score_queries(world, out, *ASKED, "--query", "<b>5</b> </script> 5") == 0
    return out


def test_page_and_summary_have_the_rows_of_both_sides(paged: Path) -> None:
    page = (paged / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    lists = {one["anchor"]: one for one in data["lists"]}
    told = json.loads((paged / "summary.json").read_text())["queries"]
    examples = load(paged)
    for number, query in enumerate(told, start=1):
        key = f"query_{number}"
        ranked = sorted(sums(examples, key).items(), key=lambda item: -item[1])
        raising = [(place, x) for place, x in ranked if x > 0]
        lowering = [(place, x) for place, x in ranked[::-1] if x < 0]
        assert query["rows_raising"] == len(raising)
        assert query["rows_lowering"] == len(lowering)
        for name, word, due in (("highest", "raise", raising), ("lowest", "lower", lowering)):
            assert [(one["place"], one["value"]) for one in query[name]] == due[:10]
            anchor = f"query-{number}-{word}"
            assert (anchor in lists) == bool(due)
            if due:
                shown = lists[anchor]["examples"]
                assert [one["place"] for one in shown] == [place for place, _ in due[:10]]
                row = next(e for e in examples if e.place == due[0][0])
                values = row.values[key][row.response]
                assert shown[0]["values"][key] == [float(f"{x:.4g}") for x in values]
                assert f'id="{anchor}"' in page
    assert told[0]["highest"][0]["value"] > 0
    for text in ("Query 3", "7 of its 8 tokens are valued", "the first is e and the last is d"):
        assert text in page
    assert page.count("</script>") == 2
    assert "<b>5" not in page


@pytest.mark.slow
def test_browser_draws_the_rows_of_each_query(paged: Path, tmp_path: Path) -> None:
    with opened(paged / "report.html", tmp_path / "profile") as browser:
        data = json.loads(browser.evaluate("document.getElementById('page-data').textContent"))
        for one in data["lists"]:
            tokens = f"document.querySelectorAll('#{one['anchor']} .tok')"
            due = sum(example["response"].count("1") for example in one["examples"])
            assert browser.evaluate(f"{tokens}.length") == due
            values = [v for e in one["examples"] for v in e["values"][one["key"]]]
            colours = browser.evaluate(
                f"[...{tokens}].map(t => getComputedStyle(t).backgroundColor)"
            )
            for colour, value in zip(colours, values, strict=True):
                red, _, blue = channels(colour)
                assert (blue >= red) if value > 0 else (red >= blue)
        assert browser.evaluate("document.querySelectorAll('.kept, .dropped').length") == 0
        browser.evaluate("document.querySelector('.tok').focus()")
        label = browser.evaluate("document.activeElement.getAttribute('aria-label')")
        assert re.search(r": [+\u2212]?[0-9.]+", label)
        browser.begins_with(".scale", "[id$=raise] .tok", "[id$=lower] .tok", widths=[1280])
        browser.begins_with(".scale", "[id$=raise] .tok", widths=[420])
        assert not browser.errors
