"""How a mutant is made, hunted and shown to be dead for the right reason.

A mutant is the library with one deliberate error: a few words of one function (or of two) replaced.
The function object stays the one that it was and runs other code while the mutant is applied, so
whoever holds it (an imported name, a registry, a decorator, a bound method) holds the mutant; the
oracles and the tests' own models are out of reach. It counts as killed by a property only if

* the property raised an ``AssertionError`` of its own (not one of the library's, and nothing else),
* the mutated code was called,
* the same property on the same example passes without the mutant (tried here, unless a test of
  its own runs this very example), and
* the library's own proofs were switched off meanwhile, so that it was the property that saw it
  (but for mutants of those proofs).

Whether those proofs would have refused the mutant by themselves is recorded for the documents.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import importlib
import inspect
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from unittest import mock

import jaxtyping
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from alphatoken.errors import CoverageError, InputError, ModelError, UnsupportedError
from alphatoken.estimate import label, proofs
from tests.property import profiles  # noqa: F401  (loaded before anything is drawn)

WHOLE_MODEL, ONE_CALL = 6, 20
"""Examples of a property that runs the scorer, and of one that calls a single function."""
TESTS = Path(__file__).parents[1]
_COMPARISONS = ("testing", "unittest")
"""Folders whose assertions are made for a test: ``torch.testing``, ``numpy.testing``."""


# --- what a mutant is ----------------------------------------------------------------------------


class Edit(NamedTuple):
    """One change: ``old`` occurs exactly once in the source of ``target``, and becomes ``new``.

    ``target`` is the dotted path of a function, method (static and class methods too) or property
    without the package: "select.masks.keep_count", "train.dpo.AlphaDPOTrainer.compute_loss". Nested
    functions are edited through the function around them.
    """

    target: str
    old: str
    new: str


@dataclass(frozen=True)
class Claim:
    """A property, the arguments that it is tried on, and packages that it cannot do without.

    ``late`` is a module that it imports by itself; ``hunt`` does so before anything is drawn, since
    what Hypothesis decorates inside an example takes over the example's settings. ``tested``: a
    test of its own runs the very examples without a mutant.
    """

    check: Callable[..., None]
    arguments: st.SearchStrategy[tuple[Any, ...]]
    examples: int
    needs: tuple[str, ...] = ()
    late: str = ""
    tested: bool = False

    @property
    def name(self) -> str:
        """``file::function``."""
        return f"{self.check.__module__.rpartition('.')[2]}.py::{self.check.__name__}"


def claim(
    check: Callable[..., None],
    *arguments: Any,
    examples: int | None = None,
    needs: tuple[str, ...] = (),
    tested: bool = False,
    **named: Any,
) -> Claim:
    """A claim of a test, by the function inside what Hypothesis draws; strategies or plain values.

    A property that runs a trainer takes seconds: give it one or two ``examples``, and the packages
    that it ``needs`` ("trl"), which it imports inside; where they are missing, its tests skip.
    ``tested``: see ``Claim``; a test without arguments runs its only example itself.
    """
    inner = body(check)
    if examples is None:
        whole = "setup" in inspect.signature(inner).parameters
        examples = WHOLE_MODEL if whole else ONE_CALL
    if named:

        @functools.wraps(inner)
        def positional(*values: Any) -> None:
            inner(**dict(zip(named, values, strict=True)))

        return Claim(positional, st.tuples(*map(_strategy, named.values())), examples, needs)
    drawn = st.tuples(*map(_strategy, arguments))
    return Claim(inner, drawn, examples, needs, tested=tested or not arguments)


def body(test: Callable[..., None]) -> Callable[..., None]:
    """The property itself: a test without what Hypothesis draws for it."""
    inner = getattr(test, "hypothesis", None)
    function: Callable[..., None] = test if inner is None else inner.inner_test
    return function


def _strategy(value: Any) -> st.SearchStrategy[Any]:
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


class Mutant(NamedTuple):
    """A named error in the library.

    Attributes:
        name: unique, in kebab case.
        claims: properties that should notice, in the order in which they are tried.
        sentence: the error as it was demanded (``SENTENCES`` in test_mutants), or what it breaks.
        edits: the changes.
        of_proofs: it breaks one of the library's own proofs, which therefore stay on.
    """

    name: str
    claims: tuple[Claim, ...]
    sentence: str
    edits: tuple[Edit, ...]
    of_proofs: bool

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages without which it cannot be tried."""
        return tuple(dict.fromkeys(need for one in self.claims for need in one.needs))


def row(
    name: str,
    properties: Claim | tuple[Claim, ...],
    sentence: str,
    *edits: tuple[str, str, str],
    of_proofs: bool = False,
) -> Mutant:
    """One row of a table of mutants: name, what kills it, what it breaks, (function, old, new).

    Tables are laid out by hand, a line for the name, a line for the sentence, and each edit on
    lines of its own, so that a change of the library changes nothing but the edit that follows it.
    """
    claims = (properties,) if isinstance(properties, Claim) else properties
    return Mutant(name, claims, sentence, tuple(Edit(*edit) for edit in edits), of_proofs)


# --- where a function stands in the sources -------------------------------------------------------

PACKAGE = TESTS.parent / "alphatoken"
LAB = TESTS.parent / "lab" / "alphatoken_lab"
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _parsed(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)


def place(target: str) -> tuple[Path, str, list[str]]:
    """(file, module, names inside) of a dotted path, found without importing anything.

    Functions of the lab are named by its rooms: "methods.stm.STM.scores".
    """
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


# --- applying it ---------------------------------------------------------------------------------


def function_of(target: str) -> FunctionType:
    """The innermost function that a dotted path means: below decorators, checks and properties."""
    function = _attribute(target)
    while not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        for wrapper in ("__func__", "fget", "__wrapped__", "func"):
            if (inner := getattr(function, wrapper, None)) is not None:
                function = inner
                break
        else:
            raise LookupError(f"{target} is no function: {function!r}")
    return function


def _attribute(target: str) -> Any:
    """What stands under a dotted path, decorators and all."""
    _, module, path = place(target)
    value: Any = importlib.import_module(module)
    for name in path:
        value = inspect.getattr_static(value, name)
    return value


def _edited(target: str, edits: list[Edit]) -> Definition:
    """The function's node after its edits."""
    source = source_of(target)
    for edit in edits:
        if source.count(edit.old) != 1:
            raise LookupError(
                f"'{edit.old}' occurs {source.count(edit.old)} times in {target}: the library has "
                "changed, and the mutant must follow"
            )
        source = source.replace(edit.old, edit.new)
    (node,) = ast.parse(source).body
    _, original, _ = definition(target)
    assert isinstance(node, Definition)
    before, after = (list(map(ast.unparse, n.decorator_list)) for n in (original, node))
    assert before == after, f"{target}: decorators are not part of what can be replaced"
    return node


def _compiled(target: str, node: Definition, call: str) -> FunctionType:
    """The node as a function of its own module that first reports the call to a global."""
    function, (_, original, classes) = function_of(target), definition(target)
    node = copy.deepcopy(node)
    node.decorator_list = []
    count = f"{call}({target!r}, __class__)" if function.__closure__ else f"{call}({target!r})"
    node.body = [*ast.parse(count).body, *node.body]
    if ast.dump(node.args) == ast.dump(original.args):  # defaults are kept, not computed anew
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
    shell: ast.stmt = node
    for owner in reversed(classes):  # private names and super() mean what they meant
        shell = ast.ClassDef(owner, [], [], [shell], [])
    tree = ast.fix_missing_locations(ast.Module([shell], []))
    flags = __future__.annotations.compiler_flag
    names: dict[str, Any] = {}
    exec(compile(tree, f"<mutant of {target}>", "exec", flags=flags), function.__globals__, names)
    for owner in classes:
        names = vars(names[owner])
    made = names[node.name]
    made = getattr(made, "__func__", made)  # __new__ and __init_subclass__ wrap themselves
    if made.__code__.co_freevars != function.__code__.co_freevars:
        raise LookupError(f"{target}: the mutant closes over {made.__code__.co_freevars}")
    return made


@contextmanager
def replaced(new: dict[str, Definition]) -> Iterator[Counter[str]]:
    """Functions run other code inside: dotted path -> node. Yields how often each was called."""
    calls: Counter[str] = Counter()
    name = "_a_mutant_was_called"
    kept: list[tuple[FunctionType, CodeType, Any, Any]] = []

    def count(target: str, *_: Any) -> None:
        calls[target] += 1

    try:
        for target, node in new.items():
            function, (_, original, _) = function_of(target), definition(target)
            made = _compiled(target, node, name)
            kept.append(
                (function, function.__code__, function.__defaults__, function.__kwdefaults__)
            )
            function.__globals__[name] = count
            function.__code__ = made.__code__
            if ast.dump(node.args) != ast.dump(original.args):
                function.__defaults__, function.__kwdefaults__ = (
                    made.__defaults__,
                    made.__kwdefaults__,
                )
            _forget(target)
        yield calls
    finally:
        for function, code, defaults, keywords in reversed(kept):
            function.__code__ = code
            function.__defaults__, function.__kwdefaults__ = defaults, keywords
            function.__globals__.pop(name, None)
        for target in new:
            _forget(target)


def _forget(target: str) -> None:
    """Empty the function's own cache, if it has one."""
    getattr(_attribute(target), "cache_clear", lambda: None)()


@contextmanager
def applied(mutant: Mutant) -> Iterator[Counter[str]]:
    """The library with this error inside; yields how often each mutated function was called."""
    edits: dict[str, list[Edit]] = {}
    for edit in mutant.edits:
        edits.setdefault(edit.target, []).append(edit)
    with replaced({target: _edited(target, some) for target, some in edits.items()}) as calls:
        yield calls


@contextmanager
def without_proofs(*, trainers: bool = False) -> Iterator[None]:
    """The scorer takes what it would prove for granted; documents alone are still proved.

    With ``trainers``, which need TRL, they take its fused head for granted too.
    """
    granted: dict[str, Any] = {
        "prove_coverage": lambda *_: 0.0,
        "prove_isolation": lambda *_: None,
        "prove_causality": lambda *_: True,
    }
    agree = mock.Mock(**{"return_value.compare.return_value": (0.0, None)})
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(proofs, **granted))
        stack.enter_context(mock.patch.object(label, "DerivativeProof", agree))
        if trainers:
            stack.enter_context(mock.patch("alphatoken.train.mixin.require_fused_head"))
        yield


@contextmanager
def without_shapes() -> Iterator[None]:
    """Annotated shapes are not checked: values, not shapes, have to give a mutant away."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


# --- hunting it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """A mutant's end: the claim that saw it, at which example, what it said.

    ``refused``: the error by which the library's own proofs refuse the mutant, if they do and were
    asked.
    """

    mutant: str
    claim: str
    example: int
    message: str
    calls: int
    refused: str | None


class _Killed(BaseException):  # Hypothesis would run an Exception's example again
    """No further example is drawn."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill


def hunt(mutant: Mutant, claim: Claim, *, refusals: bool = False) -> Kill | None:
    """Try the claim on its examples with the mutant inside, up to the first kill.

    ``refusals``: the killing example runs once more, with the library's own proofs on.
    """
    if claim.late:
        importlib.import_module(claim.late)
    examples = 0

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
        nonlocal examples
        examples += 1
        if (kill := _try(mutant, claim, arguments, examples, refusals=refusals)) is not None:
            raise _Killed(kill)

    try:
        search()
    except _Killed as killed:
        return killed.kill
    return None


def _try(
    mutant: Mutant, claim: Claim, arguments: tuple[Any, ...], number: int, *, refusals: bool
) -> Kill | None:
    trainers = "trl" in claim.needs
    granted = nullcontext() if mutant.of_proofs else without_proofs(trainers=trainers)
    with granted, without_shapes():
        try:
            with applied(mutant) as calls:
                claim.check(*arguments)
            return None
        except AssertionError as error:
            if not _is_the_propertys_own(error):
                raise  # the library stumbled; nothing was shown about values
            frames = traceback.extract_tb(error.__traceback__)
            message = str(error).partition("\n")[0] or f"not ({frames[-1].line})"
        if not calls:
            raise RuntimeError(
                f"{mutant.name}: {claim.name} failed, and never called what is mutated"
            )
        if not claim.tested:
            _require_clean(claim, arguments)
    # A trainer is above the proofs, which look at the scorer.
    above = mutant.of_proofs or all(edit.target.startswith("train.") for edit in mutant.edits)
    refused = _refusal(mutant, claim, arguments) if refusals and not above else None
    return Kill(mutant.name, claim.name, number, message, calls.total(), refused)


_clean: set[tuple[Callable[..., None], tuple[Any, ...]]] = set()
"""Examples that are known to pass on the library as it is."""


def _require_clean(claim: Claim, arguments: tuple[Any, ...]) -> None:
    """Raise if the example fails without any mutant; one look is enough where it has a name."""
    hashable = all(map(_named, arguments))
    if hashable and (claim.check, arguments) in _clean:
        return
    try:
        claim.check(*arguments)
    except AssertionError as error:
        raise RuntimeError(f"{claim.name} fails without any mutant: {arguments!r}") from error
    if hashable:
        _clean.add((claim.check, arguments))


def _named(argument: Any) -> bool:
    """Whether it can be told apart from others by more than its place in memory."""
    try:
        hash(argument)
    except TypeError:
        return False
    return True


def _is_the_propertys_own(error: AssertionError) -> bool:
    """Whether a test raised it, itself or by a comparison that is made for tests."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if TESTS in file.parents or not set(_COMPARISONS) & set(file.parts):
            return TESTS in file.parents
    return False


def _refusal(mutant: Mutant, claim: Claim, arguments: tuple[Any, ...]) -> str | None:
    """The error of the library's own proofs on this example, if they notice."""
    with applied(mutant), without_shapes():
        try:
            claim.check(*arguments)
        except (CoverageError, InputError, ModelError, UnsupportedError) as error:
            return type(error).__name__
        except AssertionError:
            pass
    return None
