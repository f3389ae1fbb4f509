"""How a mutant is made, hunted and shown to be dead for the right reason.

A mutant is the library with one deliberate error: a few words of one function (or of two) replaced.
While it is applied, every name in the library that means the function means the mutated one; the
oracles and the tests' own models are out of reach. It counts as killed by a property only if

* the property raised an ``AssertionError`` of its own (not one of the library's, and nothing else),
* the mutated code was called,
* the same property on the same example passes without the mutant, and
* the library's own proofs were switched off meanwhile, so that it was the property that saw it.

Whether those proofs would have refused the mutant by themselves is recorded beside.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import pkgutil
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import alphatoken
from alphatoken import proofs
from alphatoken.errors import CoverageError, UnsupportedError
from tests.property.tolerance import unrecorded

__all__ = [
    "Claim",
    "Edit",
    "Kill",
    "Mutant",
    "applied",
    "claim",
    "hunt",
    "source_of",
    "without_proofs",
]

WHOLE_MODEL, ONE_CALL = 6, 20
"""Examples of a property that runs the scorer, and of one that calls a single function."""
TESTS = Path(__file__).parent
PACKAGE = Path(alphatoken.__file__).parent


# --- what a mutant is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """One change: ``old`` occurs exactly once in the source of ``target``, and becomes ``new``.

    ``target`` is "module.function" or "module.Class.method" without the library's own name; the
    module may lie in a package ("train.dpo.AlphaDPOTrainer.loss_unit"). With ``body`` the whole
    function is another one, and ``old`` and ``new`` only say what that means.
    """

    target: str
    old: str
    new: str
    body: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Claim:
    """A property and the arguments that it is tried on."""

    check: Callable[..., None]
    arguments: st.SearchStrategy[tuple[Any, ...]]
    examples: int

    @property
    def name(self) -> str:
        """``file::function``."""
        return f"{self.check.__module__.rpartition('.')[2]}.py::{self.check.__name__}"


def claim(
    check: Callable[..., None], *arguments: Any, examples: int | None = None, **named: Any
) -> Claim:
    """A claim; arguments are strategies or plain values. Hypothesis tests may be named too."""
    if examples is None:
        whole = check.__module__.endswith(("properties_estimators", "properties_scorer"))
        examples = WHOLE_MODEL if whole else ONE_CALL
    inner = getattr(check, "hypothesis", None)
    body = check if inner is None else inner.inner_test
    if named:

        @functools.wraps(body)
        def positional(*values: Any) -> None:
            body(**dict(zip(named, values, strict=True)))

        return Claim(positional, st.tuples(*map(_strategy, named.values())), examples)
    return Claim(body, st.tuples(*map(_strategy, arguments)), examples)


def _strategy(value: Any) -> st.SearchStrategy[Any]:
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


@dataclass(frozen=True)
class Mutant:
    """A named error in the library.

    Attributes:
        name: unique, in kebab case.
        sentence: the error as it was demanded (``SENTENCES`` in test_mutants), or what it breaks.
        edits: the changes.
        claims: properties that should notice, in the order in which they are tried.
        listed: it was demanded.
    """

    name: str
    sentence: str
    edits: tuple[Edit, ...]
    claims: tuple[Claim, ...]
    listed: bool = True


# --- applying it ---------------------------------------------------------------------------------


@functools.cache
def _import_core() -> None:
    """Import every module that computes values, so that none binds a mutated name later."""
    for found in pkgutil.iter_modules(alphatoken.__path__, "alphatoken."):
        if not found.ispkg:
            importlib.import_module(found.name)
    importlib.import_module("alphatoken.adapters.optimizers")  # the scorer loads it on demand


def _readers() -> tuple[ModuleType, ...]:
    """Modules in which a name may mean a mutated function: the library, and the properties."""
    _import_core()
    return tuple(
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tests.property.prop")
        or name == "alphatoken"
        or (name.startswith("alphatoken.") and not name.startswith("alphatoken.oracle"))
    )


def _place(target: str) -> tuple[str, list[str]]:
    """The module's name, and the way from it to the function: a class or none, the function."""
    parts = target.split(".")
    for used in range(1, len(parts)):
        file = PACKAGE.joinpath(*parts[:used]).with_suffix(".py")
        if file.is_file():
            return ".".join(("alphatoken", *parts[:used])), parts[used:]
    raise LookupError(f"no module of the library holds {target}")


def _find(target: str) -> tuple[ModuleType, Any, str]:
    """(module, owner, attribute) of a target: the owner is the module or a class in it."""
    name, (*path, attribute) = _place(target)
    module = importlib.import_module(name)
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    return module, owner, attribute


def source_of(target: str) -> str:
    """Source of a function of the library, decorators included, dedented; nothing is imported."""
    name, (*path, attribute) = _place(target)
    text = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    scope: list[ast.stmt] = ast.parse(text).body
    for part in path:
        scope = next(n for n in scope if isinstance(n, ast.ClassDef) and n.name == part).body
    node = next(n for n in scope if isinstance(n, ast.FunctionDef) and n.name == attribute)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _mutated(target: str, edits: list[Edit]) -> Any:
    """The function after its edits, living in its own module's namespace."""
    module, owner, attribute = _find(target)
    if edits[0].body is not None:
        return edits[0].body
    source = source_of(target)
    for edit in edits:
        if source.count(edit.old) != 1:
            raise LookupError(
                f"'{edit.old}' occurs {source.count(edit.old)} times in {target}: the core has "
                "changed, and the mutant must follow"
            )
        source = source.replace(edit.old, edit.new)
    if isinstance(owner, type):  # super() of a method looks for its class in the enclosing scope
        body = textwrap.indent(source, "    ")
        source = f"def _method(__class__):\n{body}\n    return {attribute}"
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<mutant of {target}>", "exec", flags=flags)
    names: dict[str, Any] = {}
    exec(code, module.__dict__, names)
    return names["_method"](owner) if isinstance(owner, type) else names[attribute]


def _counted(function: Any, count: Callable[[], None]) -> Any:
    """The function (or method, or property) that also reports every call."""
    if isinstance(function, staticmethod):
        return staticmethod(_counted(function.__func__, count))
    if isinstance(function, property):
        return property(_counted(function.fget, count))

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        count()
        return function(*args, **kwargs)

    return wrapper


@contextmanager
def applied(mutant: Mutant | None) -> Iterator[Counter[str]]:
    """The library with this error inside; yields how often each mutated function was called."""
    calls: Counter[str] = Counter()
    targets: dict[str, list[Edit]] = {}
    for edit in mutant.edits if mutant else ():
        targets.setdefault(edit.target, []).append(edit)
    changed: list[tuple[Any, str, Any]] = []
    try:
        for target, edits in targets.items():
            _, owner, attribute = _find(target)
            original = vars(owner)[attribute]
            new = _counted(_mutated(target, edits), lambda t=target: calls.update([t]))
            places = [(owner, attribute)]
            if isinstance(owner, ModuleType):
                places = [
                    (module, name)
                    for module in _readers()
                    for name, value in list(vars(module).items())
                    if value is original
                ]
            for place, name in places:
                changed.append((place, name, original))
                setattr(place, name, new)
        yield calls
    finally:
        for place, name, original in reversed(changed):
            setattr(place, name, original)


@contextmanager
def without_proofs() -> Iterator[None]:
    """The scorer takes coverage and isolation for granted."""
    before = proofs.prove_coverage, proofs.prove_isolation
    proofs.prove_coverage, proofs.prove_isolation = lambda *_: 0.0, lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        proofs.prove_coverage, proofs.prove_isolation = before


# --- hunting it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """A mutant's end: the claim that saw it, at which example, what it said.

    ``refused``: the error by which the library's own proofs refuse the mutant, if they do.
    """

    mutant: str
    claim: str
    example: int
    message: str
    calls: int
    refused: str | None


def hunt(mutant: Mutant | None, claim: Claim) -> Kill | None:
    """Try the claim on its examples with the mutant inside, up to the first kill."""
    seen, kills = 0, list[Kill]()

    @settings(
        max_examples=claim.examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(claim.arguments)
    def search(arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if not kills:
            seen += 1
            kill = _try(mutant, claim, arguments, seen)
            kills.extend([] if kill is None else [kill])

    search()
    return kills[0] if kills else None


def _try(
    mutant: Mutant | None, claim: Claim, arguments: tuple[Any, ...], number: int
) -> Kill | None:
    with applied(mutant) as calls, without_proofs(), unrecorded():
        try:
            claim.check(*arguments)
            return None
        except AssertionError as error:
            if mutant is None:
                raise
            frames = traceback.extract_tb(error.__traceback__)
            if TESTS not in Path(frames[-1].filename).parents:
                raise  # the library stumbled; nothing was shown about values
            message = str(error).partition("\n")[0] or f"not ({frames[-1].line})"
    if not calls:
        raise RuntimeError(f"{mutant.name}: {claim.name} failed, and never called what is mutated")
    try:
        with unrecorded():
            claim.check(*arguments)
    except AssertionError as error:
        raise RuntimeError(f"{claim.name} fails without any mutant: {arguments!r}") from error
    return Kill(
        mutant.name, claim.name, number, message, calls.total(), _refusal(mutant, claim, arguments)
    )


def _refusal(mutant: Mutant, claim: Claim, arguments: tuple[Any, ...]) -> str | None:
    """The error of the library's own proofs on this example, if they notice."""
    with applied(mutant), unrecorded():
        try:
            claim.check(*arguments)
        except (CoverageError, UnsupportedError) as error:
            return type(error).__name__
        except AssertionError:
            pass
    return None
