"""Annotated shapes are checked at run time: in tests, and on a sample of the calls.

jaxtyping's own import hook checks every call of every function, closures included, which doubles
the time of the whole suite. Here a function with a shape among its annotations is checked on its
first calls in every test and on one call in sixty-four after that; closures and generators (context
managers) are not checked. Types without shapes are mypy's; those of what is constructed are checked
here too.
"""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

from jaxtyping import jaxtyped

FIRST, EVERY = 2, 64
_SHAPED = re.compile(r"\b(Bool|Float|Int|Shaped)\[")
_test = 0


def _checker() -> Any:
    from beartype import beartype  # the property tests also run where it is not installed

    return beartype


def begin() -> None:
    """The next test: every function is checked on its first calls again."""
    global _test
    _test += 1


def _at_home(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorated function where its annotations mean something: among the inner one's names."""
    inner = inspect.unwrap(function)
    if inner is function:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    home = FunctionType(call.__code__, inner.__globals__, closure=call.__closure__)
    return functools.update_wrapper(home, function)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its annotations enforced on a sample of its calls if they name a shape."""
    annotations = map(str, inspect.unwrap(function).__annotations__.values())
    if not any(map(_SHAPED.search, annotations)):
        return function
    strict: Callable[..., Any] | None = None  # made at the first call: most are never called
    calls, test = 0, -1

    @functools.wraps(function)
    def sampled(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, test, strict
        if test != _test:
            calls, test = 0, _test
        calls += 1
        if calls > FIRST and calls % EVERY:
            return function(*args, **kwargs)
        if strict is None:
            strict = jaxtyped(_at_home(function), typechecker=_checker())
        return strict(*args, **kwargs)

    return sampled


def _plain(value: Any, module: str) -> bool:
    """A function written in this module; what makes a context manager of one says another type."""
    own = inspect.isfunction(value) and value.__module__ == module
    return own and not inspect.isgeneratorfunction(inspect.unwrap(value))


def _instrument(owner: Any, module: str) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, (staticmethod, classmethod)) and _plain(value.__func__, module):
            setattr(owner, name, type(value)(checked(value.__func__)))
        elif _plain(value, module) and not (name == "__init__" and is_dataclass(owner)):
            setattr(owner, name, checked(value))


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == module.__name__:
                _instrument(value, module.__name__)
                if is_dataclass(value):
                    jaxtyped(value, typechecker=_checker())  # in place: what is constructed
        _instrument(module, module.__name__)


class _Finder(importlib.machinery.PathFinder):
    checked: Sequence[str] = ()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in cls.checked):
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(modules: Sequence[str]) -> None:
    """Check these modules, and what is below them, from their import on."""
    _Finder.checked = tuple(modules)
    sys.meta_path.insert(0, _Finder)
