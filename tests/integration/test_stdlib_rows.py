"""Rows of the standard library: real functions, drawn the same each time, none of them twice."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from alphatoken.data import leak_keys, read_pairs, read_rows
from alphatoken.data.rows import Fields
from alphatoken.data.stdlib import code_pairs, code_rows, main, text_rows, write_files
from alphatoken.errors import ConfigError


@pytest.mark.parametrize(
    ("count", "files"), [(300, 70), pytest.param(2000, 100, marks=pytest.mark.slow)]
)
def test_no_two_functions_share_a_text(count: int, files: int) -> None:
    rows = code_rows(count)
    assert [row.index for row in rows] == list(range(count))
    keys = [key for row in rows for key in leak_keys(row)]
    assert len(keys) == len(set(keys)) == 2 * count
    assert len({row.response for row in rows}) == count
    assert len({row.place.split(",")[0] for row in rows}) > files


def test_prompt_and_response_are_one_function() -> None:
    whole = 0
    for row in code_rows(300):
        assert row.prompt.startswith(("def ", "async def ")), row.place
        body = "".join(f"    {line}\n" for line in row.response.splitlines())
        try:
            tree = ast.parse(f"{row.prompt}\n{body}")
        except SyntaxError:
            continue  # a text over several lines, whose inner lines have no indent
        assert len(tree.body) == 1
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function)
        assert len(function.body) > 1
        whole += 1
    assert whole > 280


@pytest.mark.slow
def test_a_draw_is_fixed_and_a_seed_changes_it() -> None:
    words = "from alphatoken.data.stdlib import code_rows, text_rows; print(code_rows(9, 5), "
    words += "text_rows(9, 5))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == f"{code_rows(9, 5)} {text_rows(9, 5)}\n"
    assert code_rows(9, 5) != code_rows(9, 6)
    assert text_rows(9, 5) != text_rows(9, 6)
    drawn = code_rows(9, 5)
    drawn.clear()
    assert len(code_rows(9, 5)) == 9  # the caller's list is the caller's


def test_plain_text_is_a_response_to_nothing() -> None:
    rows = text_rows(500)
    assert all(row.prompt == "" and len(row.response) > 100 for row in rows)
    assert len({row.response for row in rows}) == 500


def test_pairs_prefer_the_own_body() -> None:
    rows, pairs = code_rows(50, 3), code_pairs(50, 3)
    assert [pair.row.turns for pair in pairs] == [row.turns for row in rows]
    for pair in pairs:
        assert pair.rejected != pair.chosen
    assert {pair.rejected for pair in pairs} == {pair.chosen for pair in pairs}
    assert code_pairs(1)[0].rejected != code_pairs(1)[0].chosen


def test_files_read_back_and_share_no_row(tmp_path: Path) -> None:
    write_files(tmp_path, train=40, held_out=10)
    parts = {
        name: read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "validation", "test")
    }
    assert [len(rows) for rows in parts.values()] == [40, 10, 10]
    keys = [key for rows in parts.values() for row in rows for key in leak_keys(row)]
    assert len(keys) == len(set(keys))
    assert parts["train"][0].turns == code_rows(60)[0].turns
    plain = read_rows(tmp_path / "retention.jsonl", fields=Fields(response="text"))
    assert [row.turns for row in plain] == [row.turns for row in text_rows(10)]
    pairs = read_pairs(tmp_path / "pairs.jsonl")
    assert [pair.rejected for pair in pairs] == [pair.rejected for pair in code_pairs(60)[:40]]


def test_a_file_that_is_there_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["stdlib", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert f"Got: {tmp_path / 'pairs.jsonl'}. Remedy: name another" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "count"),
    [(code_rows, 0), (code_rows, 1_000_000), (code_pairs, 0), (text_rows, -1), (text_rows, 10_000)],
)
def test_more_than_there_is_is_refused(draw: Callable[[int], list[object]], count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} asked for"):
        draw(count)
