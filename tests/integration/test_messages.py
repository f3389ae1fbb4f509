"""docs/messages.py: the page *Troubleshooting* lists every message that both packages raise."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from alphatoken import errors

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MESSAGES = load(DOCS / "messages.py")


def raised_by(path: Path) -> list[tuple[str, str]]:
    """Class and first words of what a file raises, read in another way than the page does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    messages = []
    for call in calls:
        if isinstance(call, ast.Call) and call.args:
            first = call.args[0]
            first = first.values[0] if isinstance(first, ast.JoinedStr) else first
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                messages.append((ast.unparse(call.func), first.value))
    return messages


@pytest.mark.slow
def test_no_message_is_missing_from_the_page() -> None:
    listed = set(MESSAGES.MARK.findall(PAGE))
    messages = MESSAGES.messages()
    assert {message.kind for message in messages} == listed
    assert all(f"\n## {kind}\n" in PAGE for kind in listed)
    assert {message.room for message in messages} == set(MESSAGES.ROOMS)
    compared = 0
    for path in sorted(p for folder in MESSAGES.PACKAGES for p in folder.rglob("*.py")):
        for kind, words in raised_by(path):
            if kind in listed:
                compared += 1
                assert any(m.kind == kind and m.what.startswith(words) for m in messages), words
    assert compared > 400


def test_an_error_names_its_heading() -> None:
    for kind in errors.__all__:
        if kind.endswith("Error"):
            error = getattr(errors, kind)("what is wrong", got="this")
            assert error.__notes__ == [f"Documentation: Troubleshooting, {kind}."]
            assert str(error) == "what is wrong. Got: this."
            assert f"\n## {kind}\n" in PAGE


@pytest.mark.slow
def test_each_class_has_its_messages_with_reason_and_remedy() -> None:
    text = MESSAGES.listed("DataError")
    assert "### DataError: Rows and their files" in text
    entry = text[text.index("a row has an empty response") :].split("\n\n")[0]
    assert "Why it matters: there is no token to value." in entry
    assert "Remedy: mend the row" in entry
