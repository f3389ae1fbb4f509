"""Wheel and sdist: what is in them, and that the wheel works outside the tree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

import alphatoken

ROOT = Path(__file__).parents[2]


def test_version_is_one_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = next(line for line in changes.splitlines() if line.startswith("## "))
    assert newest.split()[1] == alphatoken.__version__
    citation = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    assert f"version: {alphatoken.__version__}" in citation


def test_an_extra_that_a_message_names_is_one_of_the_package() -> None:
    declared = set(metadata("alphatoken").get_all("Provides-Extra") or [])
    named = {
        extra
        for path in (ROOT / "alphatoken").rglob("*.py")
        for extra in re.findall(r"pip install '?alphatoken\[(\w+)\]", path.read_text("utf-8"))
    }
    assert {"report", "train", "diagnose"} <= named <= declared


def test_no_page_installs_the_package_from_a_registry() -> None:
    """It is on none, where the name may be somebody else's."""
    install = re.compile(r"(pip|uv pip) install (-U )?[\"']?alphatoken[\"'\s`]")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if install.search(page.read_text("utf-8"))] == []


def run(*words: Any, cwd: Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, made as a release makes them: the wheel of what the sdist holds."""
    folder = tmp_path_factory.mktemp("dist")
    # Elsewhere than in the tree, whose git-ignored folder "build" Python would take for the module.
    for place in (ROOT, ROOT / "lab"):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, place, cwd=folder)
    return folder


def files_of(root: Path, package: str) -> set[str]:
    """Of a package in the tree."""
    return {
        str(path.relative_to(root))
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def held_by(built: Path, package: str) -> set[str]:
    """Files of the package's wheel, but those about itself."""
    (wheel,) = built.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_and_sdist_hold_all_files(built: Path) -> None:
    (sdist,) = built.glob("alphatoken-*.tar.gz")
    source = files_of(ROOT, "alphatoken")
    assert held_by(built, "alphatoken") == source
    assert held_by(built, "alphatoken_lab") == files_of(ROOT / "lab", "alphatoken_lab")
    assert {"alphatoken/py.typed", "alphatoken/score/page.html.j2"} <= source
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert source | {"pyproject.toml", "LICENSE", "CITATION.cff", "tests/smoke.py"} <= held
    assert not [name for name in held if name.startswith((".ci", "models", "runs", "build"))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """What it needs is read from the environment of the tests: nothing is downloaded."""
    wheels = sorted(built.glob("*.whl"))
    assert len(wheels) == 2
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", *wheels)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                   cwd=tmp_path).strip())  # fmt: skip
    # A folder that a .pth file names is searched last, and its own .pth files are not read: the
    # tree, installed to be edited, is not among what is found.
    (own / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    said = run(python, "-P", ROOT / "tests" / "smoke.py", cwd=tmp_path)
    found = json.loads(said.splitlines()[-1])
    assert found["seen"] == ["import", "help", "scorer", "report", "train", "lab"]
    assert Path(found["place"]) == own.resolve() / "alphatoken"
