"""Token selection and weighting methods that people compare with, one file each.

    policy("stm", PolicySettings(mode="budget", keep_ratio=0.4), threshold=2.5)

A policy is named in a recipe (``policy: stm``), handed to a trainer as an object or a class, or
written by a user: a subclass of ``TokenPolicy`` with ``scores``, registered under a name or named
as ``package.module:Class``. In its native mode it does what its paper does; in budget mode it ranks
tokens and the trainer keeps as many as it is told, which makes methods comparable.

- From one forward over the rows before training (``static`` keeps it, cached and resumable):
  ``stm``, ``xtf`` (``attention_received``, ``attribution``, ``otsu``), ``token_cleaning`` and its
  rounds ``self_evolving``, ``sstoken``, ``flow``; masks that were fixed before: ``static_mask``.
- From continuations of the model, once: ``cft``.
- From a second model (``reference``): ``rho_1``, ``token_cleaning``, ``sepo``.
- From the training forward alone: ``talr``, ``dft``, ``eaft``, ``confpo``; of pairs
  (``preference``): ``ti_dpo``.
- Rows rather than tokens: ``less``, by gradients of a warmed-up LoRA (``lora_warmup``,
  ``projection``).
- Controls: ``standard`` (every token, and a random share); ``validation_first`` (every token, after
  the validation rows); ``alphatoken`` (our values as policies); ``merge`` (WiSE-FT: weights between
  start and end, after training).

**Formulas and sources**: each class's docstring, and docs/policies. **May import** ``train`` and
the rooms below; ``train`` finds a policy by its name and imports no policy. **Oracle**: values
computed by hand in ``tests/property/test_policies_*.py`` and ``tests/integration``; weights of 1
equal TRL bit for bit.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.train.policy import PolicySettings, TokenPolicy

__all__ = ["POLICIES", "find_policy", "policy", "register_policy"]

POLICIES: dict[str, str] = {
    "standard": "alphatoken.policies.standard:Standard",
    "random": "alphatoken.policies.standard:Random",
    "validation-first": "alphatoken.policies.validation_first:ValidationFirst",
    "less": "alphatoken.policies.less:LESS",
    "token-cleaning": "alphatoken.policies.token_cleaning:TokenCleaning",
    "stm": "alphatoken.policies.stm:STM",
    "xtf": "alphatoken.policies.xtf:XTF",
    "sstoken": "alphatoken.policies.sstoken:SsToken",
    "rho-1": "alphatoken.policies.rho_1:Rho1",
    "flow": "alphatoken.policies.flow:Flow",
    "talr": "alphatoken.policies.talr:TALR",
    "dft": "alphatoken.policies.dft:DFT",
    "eaft": "alphatoken.policies.eaft:EAFT",
    "cft": "alphatoken.policies.cft:CFT",
    "dpo": "alphatoken.policies.standard:DPO",
    "confpo": "alphatoken.policies.confpo:ConfPO",
    "sepo": "alphatoken.policies.sepo:SePO",
    "ti-dpo": "alphatoken.policies.ti_dpo:TIDPO",
    "alphatoken": "alphatoken.policies.alphatoken:AlphaToken",
    "label": "alphatoken.policies.alphatoken:Label",
}
"""Name to "module:Class"; a module is imported when its policy is looked up."""

_CLASSES: dict[str, type[TokenPolicy]] = {}


def register_policy(name: str, target: str | type[TokenPolicy]) -> None:
    """Let recipes and trainers find a policy under a name.

    Args:
        name: that no other policy has.
        target: the class, or "module:Class".

    Raises:
        ConfigError: the name is taken.
    """
    place = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
    if POLICIES.get(name, place) != place or name in ("top", "bottom", "all"):
        raise ConfigError(
            "a policy of this name is there already",
            got=f"{name}: {POLICIES.get(name, 'of the trainers')}",
        )
    POLICIES[name] = place
    if not isinstance(target, str):
        _CLASSES[name] = target


def find_policy(name: str) -> type[TokenPolicy]:
    """The class of a policy by its name, or by "module:Class".

    Raises:
        ConfigError: there is none, or it is no policy.
    """
    if name in _CLASSES:
        return _CLASSES[name]
    target = POLICIES.get(name, name if ":" in name else None)
    if target is None:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        raise ConfigError(
            "there is no such policy",
            got=repr(name),
            remedy=(f"did you mean {close[0]}? " if close else "")
            + f"known: {', '.join(POLICIES)}; or module:Class",
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
        name: see ``POLICIES``; or "module:Class", or the class.
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
            remedy="`alphatoken policies NAME` describes them",
        ) from problem
