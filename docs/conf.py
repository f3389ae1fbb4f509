"""Sphinx configuration. Built with warnings as errors: ``make docs``."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
PACKAGE = HERE.parent / "alphatoken"
LAB = HERE.parent / "lab" / "alphatoken_lab"
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)

project = "AlphaToken"
author = "AlphaToken maintainers"
copyright = "AlphaToken maintainers"
release = version = VERSION.findall((PACKAGE / "__init__.py").read_text(encoding="utf-8"))[0]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "docstrings",
    "messages",
]
exclude_patterns = ["_build"]

# Tutorials written in Markdown are run at each build; recorded ones (.ipynb) are shown as they are,
# and `make tutorials` runs them again. Without the model none is run, and its page says so.
os.environ["ALPHATOKEN_MODELS"] = str(
    Path(os.environ.get("ALPHATOKEN_MODELS") or HERE.parent / "models").resolve()
)
# What is run is the package that the pages describe, wherever another one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parent), str(LAB.parent), os.environ.get("PYTHONPATH")])
)
TUTORIAL_MODEL = Path(os.environ["ALPHATOKEN_MODELS"], "SmolLM2-135M-Instruct")
nb_execution_mode = "force" if TUTORIAL_MODEL.is_dir() else "off"
nb_execution_excludepatterns = ["*.ipynb"]
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"
# A message is searched for as it was printed: --option, and straight quotes.
smartquotes = False
html_theme = "furo"
html_title = "AlphaToken"
html_static_path = ["_static"]
html_css_files = ["tables.css"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Shapes are jaxtyping strings; writing them out as aliases keeps signatures readable.
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True
# Only names of this package are checked: other projects' inventories would need the network.
# Signatures hold short names of types ("Tensor", "Float"), which are checked by mypy instead.
nitpick_ignore_regex = [(r"py:.*", r"(?!alphatoken(_lab)?\.).*")]


def _module_names() -> list[str]:
    """Every public module of both packages, by its file; the command lines are no interface."""
    names = []
    for path in sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")]):
        folder = LAB if path.is_relative_to(LAB) else PACKAGE
        parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts) and parts[1:2] not in (
            ("cli",),
            ("commands",),
        ):
            names.append(".".join(parts))
    return sorted(set(names))


def write_module_pages() -> None:
    """One page a module, so that no module can be left out of the reference.

    A package's page shows only its own docstring: what it re-exports is documented where it is
    defined, once. One page lists them all. They are no part of the tree beside the text, which is
    laid out anew on every page: with them in it that took half of the build.
    """
    folder = HERE / "modules"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = _module_names()
    index = ["All modules", "===========", "", *(f"* :doc:`{name}`" for name in names), ""]
    (folder / "index.rst").write_text("\n".join(index), encoding="utf-8")
    for name in names:
        place = name.replace(".", "/")
        package = any((root / place).is_dir() for root in (PACKAGE.parent, LAB.parent))
        lines = [":orphan:", "", name, "=" * len(name), "", f".. automodule:: {name}"]
        if not package:
            lines.append("   :members:")
        (folder / f"{name}.rst").write_text("\n".join([*lines, ""]), encoding="utf-8")


LOG = """# Log of experiments

*Lab notebook: experiments that no other page has. A user need not read it.*

Each entry states a question, the command that answers it, the figures and what was concluded;
failed ideas stay in. Figures of SmolLM2-135M-Instruct and Gemma 3 270M are of four-bit weights,
read back as float32. The entries are those of docs/log.yaml.
"""


def write_generated_pages() -> None:
    """Pages made of data, of the code and of its tests, written anew for each build."""
    entries = yaml.safe_load((HERE / "log.yaml").read_text(encoding="utf-8"))
    log = [LOG, *(f"## {one['question']}\n\n{one['answer']}" for one in entries)]
    (HERE / "log.md").write_text("\n".join(log), encoding="utf-8")
    for words in (["tests.property.generate_docs"], ["tests.options_page", "docs/options.md"]):
        subprocess.run([sys.executable, "-m", *words], cwd=HERE.parent, check=True)


def write_list_of_files() -> None:
    """Every module with the first line of its docstring, room by room."""
    lines = ["# Every file\n"]
    room = None
    for path in sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")], key=lambda p: (p.parent, p)):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if said is None:
            continue
        if path.parent != room:
            room = path.parent
            top = LAB.parent if room.is_relative_to(LAB) else PACKAGE.parent
            lines += ["", f"## {room.relative_to(top)}", ""]
        lines.append(f"* `{path.name}`: {said.splitlines()[0]}")
    (HERE / "files.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


NOT_RECORDED = '"recorded": false'
TO_RECORD = """```{note}
This page has not been recorded yet, so no output is shown. `make tutorials` runs it.
```"""
NOT_RUN = """
```{{note}}
This page was built without the model ({model} does not exist), so its code was not run and no
output is shown. `make models` fetches the model; then build the pages again.
```
"""


def say_what_was_not_run(app: Any, name: str, source: list[str]) -> None:
    """A note under the title of a tutorial that would have been run, or is to be recorded."""
    if NOT_RECORDED in source[0]:
        page = json.loads(source[0])
        note = {"cell_type": "markdown", "id": "note", "metadata": {}, "source": TO_RECORD}
        page["cells"].insert(1, note)
        source[0] = json.dumps(page)
    if nb_execution_mode == "off" and "{code-cell}" in source[0]:
        note = NOT_RUN.format(model=TUTORIAL_MODEL.name)
        source[0] = re.sub(r"(?m)^# .+\n", lambda title: title[0] + note, source[0], count=1)


MADE_BY_BUILD = {
    "Reference": ["options", "changelog"],
    "Contribute": ["files", "claims"],
    "Lab notebook (you need not read this)": ["log"],
}
"""Pages that no link can name beside the source, by the section of the first page."""


def make_tree(app: Any, name: str, source: list[str]) -> None:
    """Make the tree of pages from the first page's sections of links, which any viewer shows."""
    if name != "index":
        return

    def section(match: re.Match[str]) -> str:
        caption, links = match.groups()
        pages = [f"{title} <{page}>" for title, page in re.findall(r"\[(.+?)\]\((.+)\.md\)", links)]
        pages += MADE_BY_BUILD.get(caption, [])
        listed = "\n".join(pages)
        return f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n{listed}\n```\n"

    picture = r"!\[(.+)\]\(rows-light\.svg\)"
    shades = [
        f"```{{image}} rows-{shade}.svg\n:class: only-{shade}\n:alt: \\1\n```\n"
        for shade in ("light", "dark")
    ]
    source[0] = re.sub(picture, "\n".join(shades), source[0])
    source[0] = re.sub(r"(?m)^## (.+)\n\n((?:\[.+\n)+)", section, source[0])


def _prepare(app: Any, config: Any) -> None:
    write_list_of_files()
    write_module_pages()
    write_generated_pages()


def setup(app: Any) -> None:
    """Prepare before any page is read."""
    app.connect("config-inited", _prepare)
    app.connect("source-read", say_what_was_not_run)
    app.connect("source-read", make_tree)
