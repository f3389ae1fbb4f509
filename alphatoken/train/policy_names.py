"""From a policy's name in the options to what the trainer does under it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.train.policies import find_policy
from alphatoken.train.policies import policy as make_policy
from alphatoken.train.policy import PolicySettings, TokenPolicy

__all__ = [
    "TRAINER_POLICIES",
    "chosen_policy",
    "read_policy_options",
    "trainer_fields",
    "unread_options",
]

TRAINER_POLICIES = ("top", "harmless", "random", "bottom", "all")
"""Policies of the trainers themselves, by value."""

_ONLY_VALUES: Mapping[str, Any] = {
    "value_unit": "token",
    "keep_scope": "batch",
    "interaction_weight": 0.0,
    "shared_threshold": False,
    "masked_logit": False,
}
"""Options that act on token values, and what they are where they do nothing."""


def read_policy_options(given: Any) -> dict[str, Any]:
    """A policy's own arguments, from a mapping or its JSON text.

    Raises:
        ConfigError: neither.
    """
    if given is None:
        return {}
    options = given
    if isinstance(given, str):
        try:
            options = json.loads(given)
        except ValueError as problem:
            raise ConfigError(
                "policy_options cannot be read",
                got=f"{given!r}: {problem}",
                remedy="""JSON with names in double quotes, such as '{"threshold": 2.5}'""",
            ) from None
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigError(
            "policy_options are arguments by name",
            got=repr(given),
            remedy="a mapping, or a JSON object as text",
        )
    return dict(options)


def trainer_fields(name: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of the options that the name stands for; None for a policy with code of its own.

    Raises:
        ConfigError: no such policy, or one that takes no such options.
    """
    kind = find_policy(name)
    fields = getattr(kind, "trainer_fields", None)
    return None if fields is None else dict(fields(**options))


def unread_options(options: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Options that the policy of a run does not look at or cannot run beside: name -> neutral.

    A recipe says how its own policy is carried out. Another policy in its place has a rule of its
    own, beside which the recipe's threshold, divisor or precomputed sums would be refused.

    Args:
        options: of the run, by name; of these ``policy``, ``policy_options`` and ``policy_mode``
            are read.
        family: "sft" or "preference", the trainer's.

    Returns:
        Empty for the trainers' own policies but "harmless", which has no ratio, and for a policy
        that cannot be made: what is wrong with it is said where it is chosen.
    """
    name = options.get("policy") or "top"
    if name in TRAINER_POLICIES:
        return {"keep_scope": _ONLY_VALUES["keep_scope"]} if name == "harmless" else {}
    try:
        arguments = read_policy_options(options.get("policy_options"))
        if trainer_fields(name, arguments) is not None:
            return {}
        mode = PolicySettings(mode=options.get("policy_mode") or "native")
        policy = make_policy(name, mode, **arguments)
    except (ConfigError, TypeError):
        return {}
    found = dict(_ONLY_VALUES)
    if mode.mode == "native" or type(policy).loss is not TokenPolicy.loss:
        found["kept_normalization"] = "response"
    if family == "preference" and policy.needs.reference:
        found["precompute_ref_log_probs"] = False
    return found


def chosen_policy(
    options: Any,
    given: TokenPolicy | type[TokenPolicy] | None,
    family: str,
    *,
    second_model: bool = False,
) -> TokenPolicy | None:
    """The policy of a run; None where the trainer's own one is meant.

    Args:
        options: ``AlphaOptions``; a name that stands for options has been replaced by them.
        given: policy or class that was handed over; goes before the name in the options.
        family: "sft" or "preference", the trainer's.
        second_model: whether one was handed over, beside what the options name.

    Raises:
        ConfigError: unknown, made for the other kind of trainer, or options that contradict it.
    """
    second_model = second_model or options.policy_reference is not None
    if given is None and options.policy in TRAINER_POLICIES:
        if second_model:
            raise _unread_reference(options.policy)
        return None
    settings: PolicySettings = options.policy_settings()
    arguments = read_policy_options(options.policy_options)
    if isinstance(given, TokenPolicy):
        policy = given
        policy.bind(settings)
    else:
        kind = options.policy if given is None else given
        policy = make_policy(kind, settings, **arguments)
    if getattr(policy, "only_by_name", False):
        raise ConfigError(
            f"policy '{policy.name}' is the trainer's own",
            got=f"policy={type(policy).__name__}",
            remedy=f"name it in the options: policy='{policy.name}'",
        )
    if second_model and not _reads_reference(policy):
        raise _unread_reference(policy.name)
    _refuse(policy, options, family)
    return policy


def _refuse_divisor(policy: TokenPolicy, asked: str) -> None:
    """See that ``kept_normalization`` is not ignored."""
    published = policy.settings.mode == "native" and policy.denominator != asked
    own_loss = type(policy).loss is not TokenPolicy.loss
    if asked == "response" or not (own_loss or published):
        return
    raise ConfigError(
        f"kept_normalization has no effect on policy '{policy.name}'",
        got=f"kept_normalization={asked!r}, policy_mode={policy.settings.mode!r}",
        why="it has a loss of its own"
        if own_loss
        else f"its published rule divides by the {policy.denominator} tokens",
        remedy="leave it out" if own_loss else "leave it out, or policy_mode='budget'",
    )


def _reads_reference(policy: TokenPolicy) -> bool:
    """Whether it scores with a second model, or does so with other options."""
    return policy.needs.scorer_model or type(policy).needs.scorer_model


def _unread_reference(name: str) -> ConfigError:
    """A second model was named, and the policy would not look at it."""
    return ConfigError(
        f"policy '{name}' scores with no second model",
        got="policy_reference",
        why="it would be loaded for nothing, and the run is not what its options say",
        remedy="leave it out; a policy of your own that reads it says "
        "needs = Needs(scorer_model=True)",
    )


def _refuse(policy: TokenPolicy, options: Any, family: str) -> None:
    if policy.family not in (family, "both"):
        place = {"sft": "supervised fine-tuning", "preference": "preference pairs"}
        raise ConfigError(
            f"policy '{policy.name}' is made for {place[policy.family]}",
            got=f"a trainer for {place[family]}",
            remedy="AlphaSFTTrainer or `alphatoken sft`"
            if policy.family == "sft"
            else "AlphaDPOTrainer or `alphatoken dpo`",
        )
    if policy.needs.reference and family != "preference":
        raise ConfigError(
            f"policy '{policy.name}' asks for reference log-probabilities",
            got="a trainer without a reference model",
            remedy="a column of prepare(), made with policy_reference",
        )
    _refuse_divisor(policy, options.kept_normalization)
    for name, neutral in _ONLY_VALUES.items():
        if getattr(options, name) != neutral:
            raise ConfigError(
                f"{name} belongs to token values, and policy '{policy.name}' makes none",
                got=f"{name}={getattr(options, name)!r}",
                remedy="leave it out: keep_ratio is the setting of such a policy"
                if name == "keep_scope"
                else f"leave it out, or policy='top' in place of '{policy.name}'",
            )
