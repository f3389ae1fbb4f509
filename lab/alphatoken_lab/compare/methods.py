"""Methods that can be compared, by name: policies, named methods, LoRA, WiSE-FT.

A method says how a cell comes to its model: by training with some options, by training nothing, or
by merging two models that other cells left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.train.policies import (
    STANDS_FOR,
    TRAINER_POLICIES,
    find_policy,
    policy,
    policy_names,
    read_policy_options,
)
from alphatoken.train.policy import PolicySettings, TokenPolicy

__all__ = [
    "KINDS",
    "PLAIN",
    "START",
    "Method",
    "custom_method",
    "known_methods",
    "lacking_model",
]

KINDS = ("train", "start", "merge")
START = "start"
"""The model as it is before training: "Pre-trained" and "Base" of the paper's tables."""

PLAIN = {"sft": "standard", "dpo": "dpo"}
"""Training on all tokens, by command."""

_LORA = {
    "policy": "all",
    "use_peft": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": ["all-linear"],
}


@dataclass(frozen=True)
class Method:
    """One row of the tables.

    Attributes:
        name: by which it is asked for, and printed.
        kind: "train", "start" (no training) or "merge" (of the start and of ``merges``).
        family: "sft", "preference" or "both".
        modes: of ("native", "budget"), those that exist.
        options: of the trainer; of a merge: ``alpha``.
        merges: method whose model is merged with the start; None for training on all tokens.
        source: where it was published.
    """

    name: str
    kind: str = "train"
    family: str = "both"
    modes: tuple[str, ...] = ("native",)
    options: Mapping[str, Any] = field(default_factory=dict)
    merges: str | None = None
    source: str = ""


def known_methods() -> dict[str, Method]:
    """Every method by name, in the order of the tables.

    What `alphatoken-lab policies` lists, and: LoRA, WiSE-FT, the best tokens by value, the worst
    and a random share, and the model before training.
    """
    wise = "arXiv 2109.01903; mlfoundations/wise-ft"
    named = {name: _named(find_policy(name), name) for name in policy_names()}
    plain = [named.pop(name) for name in PLAIN.values() if name in named]
    own = [
        Method(START, kind="start"),
        *plain,
        Method("lora", options=_LORA, source="arXiv 2106.09685; PEFT"),
        Method("wise-ft", kind="merge", options={"alpha": 0.5}, source=wise),
    ]
    own += [
        Method(name, modes=("budget",), options={"policy": name}, source="control")
        for name in ("random", "bottom")
    ]
    own += [
        Method(name, modes=("budget",), options={"policy": name}, source="AlphaToken")
        for name in ("alphatoken", "label")
    ]
    return {method.name: method for method in (*own, *named.values())}


def _named(kind: type[TokenPolicy], name: str) -> Method:
    """A policy of the list."""
    family = "sft" if name == PLAIN["sft"] else kind.family  # pairs have a name of their own
    return Method(
        name, family=family, modes=_modes(name), options={"policy": name}, source=kind.source
    )


def _modes(name: str) -> tuple[str, ...]:
    """Those that differ: of the trainers' own policies either all tokens or a budget."""
    if name in (*PLAIN.values(), "validation-first"):  # all tokens
        return ("native",)
    return ("native", "budget")


def custom_method(name: str, given: Mapping[str, Any]) -> Method:
    """A method that a grid defines: options of the trainer, or a merge.

    ``{policy: top, estimator: label}`` trains with these options; ``{merges: stm, alpha: 0.3}``
    merges its model with the start; ``modes`` and ``family`` may be said. What is said of a known
    method goes over its options.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(given, Mapping):
        raise ConfigError("a method must be a mapping of options", got=f"{name}: {given!r}")
    known = known_methods().get(name)
    if known is not None:
        own = {key: value for key, value in given.items() if key not in ("modes", "family")}
        modes = tuple(given.get("modes", known.modes))
        if len(modes) == 1 < len(known.modes):  # of several modes a cell says which; here it is one
            own.setdefault("policy_mode", modes[0])
        return replace(known, modes=modes, options={**known.options, **own})
    options = dict(given)
    modes, family = options.pop("modes", None), options.pop("family", "both")
    merge, merges = "merges" in options, options.pop("merges", None)
    policy = options.get("policy")
    if not merge and policy is None:
        raise ConfigError(
            "a method must name either a policy or a method to merge",
            got=f"{name}: {sorted(options)}",
            remedy="policy: NAME and its options, or merges: METHOD and alpha: NUMBER",
        )
    if modes is None:
        by_value = policy in TRAINER_POLICIES and policy != "all"
        modes = ("budget",) if by_value else ("native",)
    return Method(name, "merge" if merge else "train", family, tuple(modes), options, merges)


def lacking_model(method: Method) -> str | None:
    """The argument by which a method is to name a second model; None if it needs none."""
    name = method.options.get("policy")
    if method.kind != "train" or name is None or name in (*TRAINER_POLICIES, *STANDS_FOR):
        return None
    own = read_policy_options(method.options.get("policy_options"))
    lacks: str | None = getattr(policy(name, PolicySettings(), **own), "lacks", None)
    return lacks
