"""Every place of a function at which one standard operator can plant an error.

Operators are those that mutation tools agree on: comparisons, arithmetic, numbers off by one,
negated and constant conditions, ``and`` for ``or``, dropped statements, swapped arguments, other
return values, moved slice bounds, other defaults, and reductions (``min`` for ``max``). Left out is
what no value depends on: docstrings, annotations, assertions, strings, and the texts of errors and
warnings.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.property.sources import PACKAGE, Definition, definition, source_of

Path_ = tuple[tuple[str, int | None], ...]
"""Way from a function's node to one inside: fields, and places in lists."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_TWINS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor",
    "sum": "mean", "mean": "sum", "zeros_like": "ones_like", "ones_like": "zeros_like",
}  # fmt: skip
_UNSEEN = frozenset({"decorator_list", "returns", "annotation", "type_comment"})
_PROSE = frozenset({"got", "why", "remedy", "name", "role", "desc", "description"})
_TALK = frozenset({"warn", "warn_once", "info", "debug", "write", "print"})


@dataclass(frozen=True)
class Site:
    """One possible mutant: the n-th change at one place of one function."""

    target: str
    path: Path_
    change: int
    operator: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Its name, which stays while the function stays."""
        way = "/".join(f"{field}{'' if at is None else at}" for field, at in self.path)
        return f"{self.target}:{way}:{self.change}"


def functions(modules: list[str]) -> Iterator[str]:
    """Dotted paths of all functions and methods of these modules ("scorer", "train.dpo")."""
    for module in modules:
        file = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        yield from _within(tree.body, module)


def _within(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _within(node.body, f"{prefix}.{node.name}")
        elif isinstance(node, Definition) and node.name not in ("__repr__", "__str__"):
            setter = any(isinstance(d, ast.Attribute) for d in node.decorator_list if
                         getattr(d, "attr", "") in ("setter", "deleter"))  # fmt: skip
            if not setter:
                yield f"{prefix}.{node.name}"


def fingerprint(target: str) -> str:
    """A digest of the function's source."""
    return hashlib.sha256(source_of(target).encode()).hexdigest()[:16]


def sites(target: str) -> list[Site]:
    """All of one function, in the order of its text; the line counts from its ``def``."""
    _, function, _ = definition(target)
    found = []
    for path, node in _places(function, ()):
        for index, (operator, new) in enumerate(_changes(node)):
            line = getattr(node, "lineno", function.lineno) - function.lineno
            after = "" if new is None else ast.unparse(new)
            found.append(Site(target, path, index, operator, line, ast.unparse(node), after))
    return [site for site in found if site.before != site.after]


def mutated(site: Site) -> Definition:
    """The function with this change."""
    _, function, _ = definition(site.target)
    function = copy.deepcopy(function)
    owner: ast.AST = function
    for field, at in site.path[:-1]:
        owner = getattr(owner, field) if at is None else getattr(owner, field)[at]
    field, at = site.path[-1]
    node = getattr(owner, field) if at is None else getattr(owner, field)[at]
    _, new = _changes(node)[site.change]
    new = ast.Pass() if new is None else new
    if at is None:
        setattr(owner, field, new)
    else:
        getattr(owner, field)[at] = new
    return ast.fix_missing_locations(function)


# --- where ---------------------------------------------------------------------------------------


def _places(node: ast.AST, path: Path_) -> Iterator[tuple[Path_, ast.AST]]:
    if path and not isinstance(node, (ast.arguments, ast.keyword, ast.comprehension)):
        yield path, node
    for field, value in ast.iter_fields(node):
        if field in _UNSEEN:
            continue
        several = isinstance(value, list)
        for at, child in enumerate(value if several else [value]):
            if isinstance(child, ast.AST) and not _is_talk(child):
                yield from _places(child, (*path, (field, at if several else None)))


def _is_talk(node: ast.AST) -> bool:
    """Strings, errors, assertions, annotations: what is said, not what is computed."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in _PROSE
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name in _TALK or name.endswith(("Error", "Warning")) or name in ("cast", "TypeVar")
    return False


# --- what ----------------------------------------------------------------------------------------


def _changes(node: ast.AST) -> list[tuple[str, ast.AST | None]]:
    """(operator, new node) of every change at this very node; None drops it."""
    found: list[tuple[str, ast.AST | None]] = []
    for kind, make in _OPERATORS.items():
        if isinstance(node, kind):
            found += make(node)
    return found


def _compare(node: ast.Compare) -> list[tuple[str, ast.AST | None]]:
    found: list[tuple[str, ast.AST | None]] = []
    for at, operator in enumerate(node.ops):
        new = copy.deepcopy(node)
        new.ops[at] = _COMPARISONS[type(operator)]()
        found.append(("comparison", new))
    return found


def _binary(node: ast.BinOp | ast.AugAssign) -> list[tuple[str, ast.AST | None]]:
    found: list[tuple[str, ast.AST | None]] = []
    if type(node.op) in _ARITHMETIC and not _is_text(node):
        new = copy.deepcopy(node)
        new.op = _ARITHMETIC[type(node.op)]()
        found.append(("arithmetic", new))
    if isinstance(node, ast.AugAssign):
        found.append(("statement dropped", None))
    return found


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in (getattr(node, "left", None), getattr(node, "right", None))
    )


def _constant(node: ast.Constant) -> list[tuple[str, ast.AST | None]]:
    if isinstance(node.value, bool):
        return [("constant", ast.Constant(not node.value))]
    if isinstance(node.value, (int, float)):
        return [("constant", ast.Constant(node.value + step)) for step in (1, -1)]
    return []


def _condition(node: ast.If | ast.IfExp | ast.While) -> list[tuple[str, ast.AST | None]]:
    new = copy.deepcopy(node)
    new.test = ast.UnaryOp(ast.Not(), new.test)
    found: list[tuple[str, ast.AST | None]] = [("condition negated", new)]
    raises = isinstance(node, ast.If) and all(isinstance(n, ast.Raise) for n in node.body)
    if isinstance(node, ast.If) and not raises:
        found += [("condition constant", _with(node, "test", value)) for value in (True, False)]
    return found


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    new = copy.deepcopy(node)
    setattr(new, field, ast.Constant(value))
    return new


def _boolean(node: ast.BoolOp) -> list[tuple[str, ast.AST | None]]:
    new = copy.deepcopy(node)
    new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return [("and / or", new)]


def _unary(node: ast.UnaryOp) -> list[tuple[str, ast.AST | None]]:
    return [(f"{type(node.op).__name__.lower()} dropped", copy.deepcopy(node.operand))]


def _call(node: ast.Call) -> list[tuple[str, ast.AST | None]]:
    found: list[tuple[str, ast.AST | None]] = []
    plain = [a for a in node.args if not isinstance(a, (ast.Starred, ast.Constant))]
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if len(node.args) >= 2 and len(plain) == len(node.args) and name != "isinstance":
        new = copy.deepcopy(node)
        new.args[:2] = new.args[1::-1]
        found.append(("arguments swapped", new))
    method = isinstance(node.func, ast.Attribute)
    if name in _TWINS and (method or name not in ("sum", "mean")):
        new = copy.deepcopy(node)
        setattr(new.func, "attr" if method else "id", _TWINS[name])
        found.append(("reduction", new))
    return found


def _statement(node: ast.Expr | ast.Continue | ast.Break) -> list[tuple[str, ast.AST | None]]:
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return [("statement dropped", None)] if called or not isinstance(node, ast.Expr) else []


def _return(node: ast.Return) -> list[tuple[str, ast.AST | None]]:
    if node.value is None or isinstance(node.value, ast.Constant):
        return []
    return [("return value", ast.Return(ast.Constant(None)))]


def _slice(node: ast.Slice) -> list[tuple[str, ast.AST | None]]:
    found: list[tuple[str, ast.AST | None]] = []
    for side in ("lower", "upper"):
        bound = getattr(node, side)
        if bound is not None and not isinstance(bound, ast.Constant):
            new = copy.deepcopy(node)
            setattr(new, side, ast.BinOp(copy.deepcopy(bound), ast.Add(), ast.Constant(1)))
            found.append(("slice bound", new))
    return found


_OPERATORS = {
    ast.Compare: _compare,
    ast.BinOp: _binary,
    ast.AugAssign: _binary,
    ast.Constant: _constant,
    ast.If: _condition,
    ast.IfExp: _condition,
    ast.While: _condition,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.Call: _call,
    ast.Expr: _statement,
    ast.Continue: _statement,
    ast.Break: _statement,
    ast.Return: _return,
    ast.Slice: _slice,
}
