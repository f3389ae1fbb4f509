"""Where a function of the library stands in its sources; nothing is imported.

A function is named by its dotted path without the package: "select.masks.keep_count",
"train.dpo.AlphaDPOTrainer.compute_loss"; those of the lab by its rooms: "methods.stm.STM.scores".
"""

from __future__ import annotations

import ast
import functools
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "alphatoken"
LAB = ROOT / "lab" / "alphatoken_lab"
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _parsed(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)


def place(target: str) -> tuple[Path, str, list[str]]:
    """(file, module, names inside) of a dotted path, found without importing anything."""
    parts = target.split(".")
    here = package = LAB if (LAB / parts[0]).is_dir() else PACKAGE
    for index, part in enumerate(parts):
        if (here / part).is_dir():
            here = here / part
            continue
        if (here / f"{part}.py").is_file():
            file, used = here / f"{part}.py", index + 1
        else:
            file, used = here / "__init__.py", index
        return file, ".".join([package.name, *parts[:used]]), parts[used:]
    raise LookupError(f"{target} is a package, not a function")


def definition(target: str) -> tuple[str, Definition, list[str]]:
    """(text of the file, node of the function, names of the classes around it)."""
    file, _, (*classes, name) = place(target)
    text, tree = _parsed(file)
    scope: list[ast.stmt] = tree.body
    for owner in classes:
        scope = next(n for n in scope if isinstance(n, ast.ClassDef) and n.name == owner).body
    nodes = [n for n in scope if isinstance(n, Definition) and n.name == name]
    if not nodes:
        raise LookupError(f"there is no function {target}: its mutants must follow")
    return text, nodes[0], classes  # of a property the getter, which stands first


def source_of(target: str) -> str:
    """Source of a function of the library, decorators included, dedented."""
    text, node, _ = definition(target)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
