"""Policies of the trainers' own package, and how those of any package are found by name.

    policy("stm", PolicySettings(mode="budget", keep_ratio=0.4), threshold=2.5)

A policy is named in a recipe (``policy: stm``), handed to a trainer as an object or a class, or
named as ``package.module:Class``: a subclass of ``TokenPolicy`` with ``scores``. In its native mode
it does what its paper does; in budget mode it ranks tokens and the trainer keeps as many as it is
told, which makes methods comparable.

Here are ``standard`` (every token, and a random share), ``validation_first`` (every token, after
the validation rows) and ``by_value`` (our values as policies). Another package gives its policies
names by entry points of the group ``alphatoken.policies``, as ``alphatoken-lab`` does for the
methods that people compare with.

**May import** ``train.policy`` and what it stands on. **Oracle**: values computed by hand in
``tests/property/test_policies*.py``; weights of 1 equal TRL bit for bit.
"""

from __future__ import annotations

import difflib
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.train.policies.by_value import AlphaToken, Label
from alphatoken.train.policies.standard import DPO, Random, Standard
from alphatoken.train.policies.validation_first import ValidationFirst
from alphatoken.train.policy import PolicySettings, TokenPolicy

__all__ = ["GROUP", "find_policy", "policy", "policy_names"]

GROUP = "alphatoken.policies"
"""Entry points by which a package names its policies: ``name = "module:Class"``."""

_OWN: dict[str, type[TokenPolicy]] = {
    "standard": Standard,
    "random": Random,
    "validation-first": ValidationFirst,
    "dpo": DPO,
    "alphatoken": AlphaToken,
    "label": Label,
}


def policy_names() -> tuple[str, ...]:
    """Names of all policies: those here, then those of other packages that are installed."""
    return (*_OWN, *(name for name in _of_other_packages() if name not in _OWN))


def _of_other_packages() -> dict[str, str]:
    """Name to "module:Class"."""
    return _named_on(tuple(sys.path))


@cache
def _named_on(path: tuple[str, ...]) -> dict[str, str]:
    """Of the packages on a search path, each of which is looked through once."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def find_policy(name: str) -> type[TokenPolicy]:
    """The class of a policy by its name, or by "module:Class".

    Raises:
        ConfigError: there is none, or it is no policy.
    """
    if name in _OWN:
        return _OWN[name]
    target = name if ":" in name else _of_other_packages().get(name)
    if target is None:
        close = difflib.get_close_matches(name, policy_names(), n=1)
        raise ConfigError(
            "there is no such policy",
            got=repr(name),
            why="published methods are in the package alphatoken-lab",
            remedy=(f"did you mean {close[0]}? " if close else "")
            + f"known: {', '.join(policy_names())}; or module:Class; "
            'pip install "alphatoken[lab]" brings the methods that people compare with',
        )
    module, _, attribute = target.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise ConfigError(
            "the policy cannot be imported", got=f"{target}: {problem}", remedy="check the path"
        ) from problem
    if not (isinstance(found, type) and issubclass(found, TokenPolicy)):
        raise ConfigError(
            "this is no policy", got=target, remedy="a subclass of alphatoken.train.policy"
        )
    return found


def policy(
    name: str | type[TokenPolicy], settings: PolicySettings | None = None, **options: Any
) -> TokenPolicy:
    """A policy by its name or class.

    Args:
        name: see :func:`policy_names`; or "module:Class", or the class.
        settings: mode, budget, scope, rounding, seed; None for the defaults.
        **options: arguments of its own.

    Raises:
        ConfigError: no such policy, or arguments that it does not take.
    """
    kind = find_policy(name) if isinstance(name, str) else name
    try:
        return kind(settings, **options)
    except TypeError as problem:
        raise ConfigError(
            f"policy '{getattr(kind, 'name', kind.__qualname__)}' does not take these arguments",
            got=f"{', '.join(options) or 'none'} ({problem})",
            remedy="`alphatoken-lab policies NAME` describes them",
        ) from problem
