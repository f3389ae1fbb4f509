"""Policies of the trainers, and the search for a policy by name.

    policy("stm", PolicySettings(mode="budget", keep_ratio=0.4), threshold=2.5)

A policy is named in a recipe (``policy: stm``), handed to a trainer as an object or a class, or
named as ``package.module:Class``: a subclass of ``TokenPolicy`` with ``scores``. In its native mode
it does what its paper does; in budget mode it ranks tokens and the trainer keeps as many as it is
told, which makes methods comparable.

In ``builtin`` are the trainers' own (top, random, bottom and all, ``TRAINER_POLICIES``), every
token, and every token after the validation rows; ``own_weights`` has the weights that rows bring,
``validation_mix`` validation rows in every step, and ``walk_rows`` leaves out whole rows. Another
package gives its policies names by entry points of the group ``alphatoken.policies``, as
``alphatoken-lab`` does for the methods that people compare with.

**May import** ``train.policy`` and what it stands on. **Oracle**: values computed by hand in
``tests/property/test_policies*.py``; weights of 1 equal TRL bit for bit.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import Any

from alphatoken.config import WALK, ValueOptions, refused_by_estimator
from alphatoken.errors import ConfigError, require_choice
from alphatoken.model.choice import ParameterChoice, read_layers
from alphatoken.presets import PRESETS
from alphatoken.train.fields import AlphaFields
from alphatoken.train.policies.builtin import DPO, RATIO_POLICIES, Standard, ValidationFirst
from alphatoken.train.policies.own_weights import OwnWeights
from alphatoken.train.policies.validation_mix import ValidationMix
from alphatoken.train.policies.walk_rows import WalkRows
from alphatoken.train.policy import (
    ATTRIBUTES,
    Needs,
    PolicySettings,
    TokenPolicy,
    own_methods,
    rule_of,
)

__all__ = [
    "GROUP",
    "OF_VALUES",
    "STANDS_FOR",
    "TRAINER_POLICIES",
    "UNTOUCHED",
    "chosen_policy",
    "find_policy",
    "policy",
    "policy_names",
    "read_policy_options",
    "unread_by_estimator",
    "unread_options",
]

GROUP = "alphatoken.policies"
"""Entry points by which a package names its policies: ``name = "module:Class"``."""

TRAINER_POLICIES = tuple(RATIO_POLICIES)
"""Policies of the trainers themselves, by value."""

STANDS_FOR: Mapping[str, Mapping[str, Any]] = {
    "standard": {"policy": "all", "export_values": False},
    "dpo": {"policy": "all", "export_values": False},
    "alphatoken": {"policy": "top", "estimator": "alphatoken"},
    "label": {"policy": "top", "estimator": "label"},
}
"""Names of methods that are the trainers' own, and the options that each stands for."""

UNTOUCHED = ("standard", "dpo")
"""Names under which the trainer below is left as it is."""

OF_LAB = (
    "less", "token-cleaning", "stm", "xtf", "sstoken", "rho-1", "flow", "talr", "dft", "eaft",
    "gce", "loss-truncation", "prift", "cft", "confpo", "sepo", "ti-dpo",
)  # fmt: skip
"""Names of the published methods in ``alphatoken-lab``, for those who have not installed it."""

_OWN: dict[str, type[TokenPolicy]] = {
    "standard": Standard,
    "validation-first": ValidationFirst,
    "validation-mix": ValidationMix,
    "walk-rows": WalkRows,
    "dpo": DPO,
    "weights": OwnWeights,
}

_ONLY_VALUES: Mapping[str, Any] = {
    "value_unit": "token",
    "keep_scope": "batch",
    "shared_threshold": False,
    "masked_logit": False,
}
"""Options that act on token values, and what they are where they do nothing."""

_DEFAULTS: Mapping[str, Any] = {option.name: option.default for option in fields(AlphaFields)}

OF_VALUES: Mapping[str, Any] = {
    name: _DEFAULTS[name]
    for name in (
        *(option.name for option in fields(ValueOptions)),
        *("part", "uncovered", "preconditioner", "precondition_after", "walk_refresh"),
        *("direction_steps", "scoring_forward"),
    )
}
"""Options by which tokens are valued, and their defaults. Those by which rows are held out are none
of them: a run that values nothing is compared with one that does, on the same rows."""

_CONTROLS = (*RATIO_POLICIES.values(), Standard, DPO)
"""Policies that may be given the options of the run that they are compared with."""


# --- by name ------------------------------------------------------------------------------------


def policy_names() -> tuple[str, ...]:
    """Names of all policies: those here, then those of other packages that are installed."""
    return (*_OWN, *_named_on(tuple(sys.path)))


@cache
def _named_on(path: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names that installed packages give, but those of the library's own; the classes of each."""
    named: dict[str, tuple[str, ...]] = {}
    for point in entry_points(group=GROUP):
        if point.name not in {*_OWN, *TRAINER_POLICIES, *STANDS_FOR}:
            named[point.name] = (*{*named.get(point.name, ()), point.value},)
    return named


def find_policy(name: str) -> type[TokenPolicy]:
    """The class of a policy by its name, or by "module:Class".

    Raises:
        ConfigError: there is none, or it is no policy.
    """
    if name in _OWN:  # before others: no package can take such a name
        return _OWN[name]
    targets = (name,) if ":" in name else _named_on(tuple(sys.path)).get(name, ())
    if not targets:
        raise _no_such_policy(name)
    if len(targets) > 1:
        raise ConfigError(
            "two installed packages have a policy of this name",
            got=f"{name}: {', '.join(sorted(targets))}",
            why="the name does not say which of them is meant",
            remedy="module:Class in place of the name",
        )
    (target,) = targets
    module, _, attribute = target.partition(":")
    try:
        policy_class = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise ConfigError(
            "the policy cannot be imported",
            got=f"{target}: {problem}",
            remedy="module:Class of a file module.py in the folder where the command is called, or "
            "of an installed module; in Python the class itself",
        ) from problem
    return _require_class(policy_class, target)


def _no_such_policy(name: str) -> ConfigError:
    what, got = "there is no such policy", repr(name)
    module, _, attribute = name.rpartition(".")
    if module:
        remedy = f"did you mean '{module}:{attribute}'?"
        return ConfigError(what, got=got, why="a class is named after a colon", remedy=remedy)
    preset, _, share = name.rpartition("-")
    if preset in PRESETS and share.isdigit():
        remedy = f"--policy top --value {preset} --keep_ratio {int(share) / 100:g}"
        return ConfigError(what, got=got, why="this is an arm of a race", remedy=remedy)
    names = tuple(dict.fromkeys((*TRAINER_POLICIES, *STANDS_FOR, *policy_names())))
    plain = name.lower().replace("_", "-")
    close = difflib.get_close_matches(plain, dict.fromkeys((*names, *OF_LAB)), n=1)
    choices, why = f"known: {', '.join(names)}; or module:Class", ""
    if close and close[0] not in names:
        why = f"{close[0]} is a published method, and those are in the package alphatoken-lab"
        choices = f"`pip install ./lab` in a clone of the repository; {choices}"
    near = f"did you mean {close[0]}? " if close and close[0] != name else ""
    return ConfigError(what, got=got, why=why, remedy=near + choices)


def _require_class(kind: Any, called: str) -> type[TokenPolicy]:
    if not (isinstance(kind, type) and issubclass(kind, TokenPolicy)):
        raise ConfigError(
            "the object is not a policy",
            got=called,
            remedy="a subclass of alphatoken.train.policy.TokenPolicy, or an object of one",
        )
    return kind


def policy(
    name: str | type[TokenPolicy], settings: PolicySettings | None = None, **options: Any
) -> TokenPolicy:
    """A policy by its name or class.

    Args:
        name: see :func:`policy_names`; or "module:Class", or the class.
        settings: mode, budget, seed; None for the defaults.
        **options: arguments of its own.

    Raises:
        ConfigError: no such policy, or arguments that it does not take.
    """
    kind = find_policy(name) if isinstance(name, str) else _require_class(name, repr(name))
    # A constructor of its own may know nothing of settings, and hand none to the base's.
    takes = list(signature(kind).parameters)
    try:
        made = kind(settings, **options) if "settings" in takes else kind(**options)
    except TypeError as problem:
        raise ConfigError(
            f"policy '{getattr(kind, 'name', kind.__qualname__)}' does not take these arguments",
            got=f"{', '.join(options) or 'none'} ({problem})",
            remedy=f"it takes {', '.join(n for n in takes if n != 'settings') or 'none'}",
        ) from problem
    if settings is not None:
        made.bind(settings)
    return made


# --- of a run ------------------------------------------------------------------------------------


def read_policy_options(value: Any) -> dict[str, Any]:
    """A policy's own arguments, from a mapping or its JSON text.

    Raises:
        ConfigError: neither.
    """
    if value is None:
        return {}
    options = value
    if isinstance(value, str):
        try:
            options = json.loads(value)
        except ValueError as problem:
            raise ConfigError(
                "policy_options cannot be read",
                got=f"{value!r}: {problem}",
                remedy="""JSON with names in double quotes, such as '{"threshold": 2.5}'""",
            ) from None
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigError(
            "policy_options must be a mapping of arguments",
            got=repr(value),
            remedy="a mapping, or a JSON object as text",
        )
    return dict(options)


def unread_options(options: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Options that the policy of a run does not look at or cannot run beside: name -> neutral.

    A recipe says how its own policy is carried out. Another policy in its place has a rule of its
    own, beside which the recipe's threshold, divisor or precomputed sums would be refused.

    Args:
        options: of the run, by name; of these ``policy``, ``policy_options`` and ``policy_mode``
            are read.
        family: "sft" or "preference", the trainer's.

    Returns:
        Empty for the trainers' own policies, and for a policy that cannot be made.
    """
    name = options.get("policy") or "top"
    if name in UNTOUCHED:
        return {"kept_normalization": "response"}
    if name in STANDS_FOR or name in TRAINER_POLICIES:
        return {}
    try:
        arguments = read_policy_options(options.get("policy_options"))
        mode = PolicySettings(mode=options.get("policy_mode") or "native")
        made = policy(name, mode, **arguments)
        _refuse_unfinished(made)
    except (ConfigError, TypeError):
        return {}  # what is wrong with it is said where it is chosen
    neutral = {**_ONLY_VALUES, **_unread_of_values(made)}
    if made.settings.mode == "native" or made.replaces_loss:
        neutral["kept_normalization"] = "response"
    if not made.reads_ratio:
        neutral["keep_ratio"] = _DEFAULTS["keep_ratio"]
    if family == "preference" and made.needs.reference:
        neutral["precompute_ref_log_probs"] = False
    return neutral


def unread_by_estimator(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of values that the estimator of a run refuses: name -> default, which it takes.

    A recipe says how values of its own estimator are made. Another estimator in its place, named by
    itself or by a policy that stands for one, would refuse these.

    Args:
        options: of the run, by name.

    Returns:
        Empty where an option cannot be read.
    """
    values = {**_DEFAULTS, **{name: value for name, value in options.items() if value is not None}}
    stands_for = STANDS_FOR.get(str(values["policy"]), {}).get("estimator")
    estimator = stands_for or values["estimator"]
    try:
        ParameterChoice.read(values["parameters"])  # raises where it cannot be read
        layers = read_layers(values["layers"])
        refusals = refused_by_estimator({**values, "estimator": estimator, "layers": layers})
        neutral = {name: _DEFAULTS[name] for name, _ in refusals}
    except ConfigError:
        return {}  # what is wrong with it is said where it is used
    if estimator == WALK and values["objective"] != "adaptation":
        neutral["retention"] = _DEFAULTS["retention"]
    return neutral if stands_for is None else {"estimator": stands_for, **neutral}


def chosen_policy(
    options: Any,
    own: TokenPolicy | type[TokenPolicy] | None,
    family: str,
) -> TokenPolicy | None:
    """The policy of a run; None where the run weighs no token and is that of the trainer below.

    Args:
        options: ``AlphaOptions``; a name that stands for options has been replaced by them.
        own: policy or class that was handed over; goes before the name in the options.
        family: "sft" or "preference", the trainer's.

    Raises:
        ConfigError: unknown, made for the other kind of trainer, or options that contradict it.
    """
    settings: PolicySettings = options.policy_settings()
    if own is None and options.policy in TRAINER_POLICIES:
        # In budget mode ``kept_normalization`` says what divides the loss, not the policy.
        kind, budget = RATIO_POLICIES[options.policy], replace(settings, mode="budget")
        if not options.weighs:
            return None
        if options.policy == "all" and not options.export_values:
            return Standard(budget)  # whose loss has another divisor, and who reads no values
        return kind(budget, unit=options.value_unit)
    arguments = read_policy_options(options.policy_options)
    if isinstance(own, TokenPolicy):
        if arguments:
            raise ConfigError(
                "policy_options are not read by a policy object",
                got=f"policy_options={arguments}, and a policy '{own.name}' that was handed over",
                why="it was made with its arguments",
                remedy="leave them out, or hand over the class",
            )
        chosen = own
        chosen.bind(settings)
    else:
        chosen = policy(options.policy if own is None else own, settings, **arguments)
    _refuse(chosen, options, family)
    return chosen


def _refuse_divisor(chosen: TokenPolicy, divisor: str) -> None:
    published = chosen.settings.mode == "native" and chosen.denominator != divisor
    own_loss = chosen.replaces_loss
    if divisor == "response" or not (own_loss or published):
        return
    raise ConfigError(
        f"kept_normalization has no effect on policy '{chosen.name}'",
        got=f"kept_normalization={divisor!r}, policy_mode={chosen.settings.mode!r}",
        why="it has a loss of its own"
        if own_loss
        else f"its published rule divides by the {chosen.denominator} tokens",
        remedy="leave it out" if own_loss else "leave it out, or policy_mode='budget'",
    )


def _refuse_unfinished(chosen: TokenPolicy) -> None:
    """Refuse a class without a name or a method that its mode goes by, or with others in place."""
    kind = type(chosen)
    if not getattr(chosen, "name", None):
        raise ConfigError(
            "a policy has a name",
            got=f"{kind.__module__}:{kind.__qualname__} without one",
            why="logs, records and messages call it by that",
            remedy=f"name = '{kind.__name__.lower()}' in the class",
        )
    _refuse_attributes(chosen)
    native = chosen.settings.mode == "native"
    if own_methods(chosen, "scores", *rule_of(chosen)):
        return
    raise ConfigError(
        f"policy '{chosen.name}' has no rule for policy_mode='{chosen.settings.mode}'",
        got=f"a class {kind.__qualname__} without scores"
        + (" and native_weights" if native else ""),
        why="nothing says which tokens to keep",
        remedy="a method scores(batch), of which the best keep_ratio is kept, or "
        "native_weights(batch) for a rule without a budget (policy_mode='native')",
    )


def _refuse_attributes(chosen: TokenPolicy) -> None:
    """Refuse an attribute of another value or, by a slip of the pen, of another name."""
    if not isinstance(chosen.needs, Needs):
        raise ConfigError(
            f"needs of policy '{chosen.name}' must be a Needs",
            got=repr(chosen.needs),
            remedy="needs = Needs(values=True), of alphatoken.train.policy",
        )
    for name, values in ATTRIBUTES.items():
        require_choice(f"{name} of policy '{chosen.name}'", getattr(chosen, name), values)
    if own_methods(chosen, "weights"):
        raise ConfigError(
            f"policy '{chosen.name}' has weights() in place of the base's",
            got=type(chosen).__qualname__,
            why="it checks what a rule gives: shape, finite, not negative",
            remedy="native_weights(batch) for a rule without a budget, or scores(batch)",
        )
    attributes = [name for name, value in vars(TokenPolicy).items() if not callable(value)]
    own = {
        n for kind in type(chosen).__mro__ if kind not in TokenPolicy.__mro__ for n in vars(kind)
    }
    for name in sorted(own - {*vars(TokenPolicy)}):
        close = difflib.get_close_matches(name, attributes, n=1, cutoff=0.85)
        if close and not name.startswith("_") and not callable(getattr(chosen, name, None)):
            raise ConfigError(
                f"policy '{chosen.name}' has an attribute that nothing reads",
                got=f"{name}; did you mean {close[0]}?",
                remedy=f"{close[0]}, or a name that is less like it",
            )


def _refuse_rule_of_step(chosen: TokenPolicy) -> None:
    """Refuse a rule of its own that a step of several micro-batches would not go by."""
    own = own_methods(chosen, "native_weights", "budget_weights", "best")
    if chosen.scope == "step" and own:
        raise ConfigError(
            f"policy '{chosen.name}' has the scope 'step' and a rule of its own",
            got=", ".join(own),
            why="of the tokens of a step the best by their scores are kept, and a step of several "
            "micro-batches would not go by that rule",
            remedy="scores(batch), with native_ratio or keep_ratio; or another scope",
        )


def _unread_of_values(chosen: TokenPolicy) -> Mapping[str, Any]:
    """``OF_VALUES`` where the policy values nothing, unless it is a control."""
    return {} if chosen.needs.values or type(chosen) in _CONTROLS else OF_VALUES


def _refuse(chosen: TokenPolicy, options: Any, family: str) -> None:
    _refuse_unfinished(chosen)
    _refuse_rule_of_step(chosen)
    if chosen.family not in (family, "both"):
        place = {"sft": "supervised fine-tuning", "preference": "preference pairs"}
        raise ConfigError(
            f"policy '{chosen.name}' is made for {place[chosen.family]}",
            got=f"a trainer for {place[family]}",
            remedy="AlphaSFTTrainer or `alphatoken sft`; in a race other arms (--arms walk-80)"
            if chosen.family == "sft"
            else "AlphaDPOTrainer or `alphatoken dpo`",
        )
    if chosen.needs.reference and family != "preference":
        raise ConfigError(
            f"policy '{chosen.name}' asks for reference log-probabilities",
            got="a trainer without a reference model",
            remedy="a column of prepare(), made with a model of its own",
        )
    _refuse_divisor(chosen, options.kept_normalization)
    if not chosen.reads_ratio and options.keep_ratio != _DEFAULTS["keep_ratio"]:
        raise ConfigError(
            f"keep_ratio has no effect on policy '{chosen.name}'",
            got=f"keep_ratio={options.keep_ratio}, policy_mode={chosen.settings.mode!r}",
            why="a rule of its own says what is kept",
            remedy="leave it out"
            + (
                "; policy_mode='budget' keeps that share"
                if chosen.settings.mode == "native"
                else ""
            )
            + "; a class of your own whose rule reads it says so by reads_ratio",
        )
    for name, neutral in {**_ONLY_VALUES, **_unread_of_values(chosen)}.items():
        if getattr(options, name) != neutral:
            raise ConfigError(
                f"{name} belongs to the trainers' own policies, and '{chosen.name}' is none of them"
                if chosen.needs.values
                else f"{name} belongs to token values, and policy '{chosen.name}' makes none",
                got=f"{name}={getattr(options, name)!r}",
                remedy="leave it out: in policy_mode='budget' such a policy reads keep_ratio"
                if name == "keep_scope"
                else f"leave it out, or policy='top' in place of '{chosen.name}'",
            )
