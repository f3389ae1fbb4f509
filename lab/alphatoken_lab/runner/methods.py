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
from alphatoken.train.policy import PolicySettings

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
    """

    name: str
    kind: str = "train"
    family: str = "both"
    modes: tuple[str, ...] = ("native",)
    options: Mapping[str, Any] = field(default_factory=dict)
    merges: str | None = None


def known_methods() -> dict[str, Method]:
    """Every method by name, in the order of the tables.

    What `alphatoken-lab policies` lists, and: LoRA, WiSE-FT, the best tokens by value, the worst
    and a random share, and the model before training.
    """
    named = {name: _of_policy(name) for name in policy_names()}
    plain = [named.pop(name) for name in PLAIN.values() if name in named]
    own = [
        Method(START, kind="start"),
        *plain,
        Method("lora", options=_LORA),
        Method("wise-ft", kind="merge", options={"alpha": 0.5}),
    ]
    for name in ("random", "bottom", "alphatoken", "label"):
        own.append(Method(name, modes=("budget",), options={"policy": name}))
    return {method.name: method for method in (*own, *named.values())}


def _of_policy(name: str) -> Method:
    """The method of a policy; of the trainers' own either all tokens or a budget."""
    family = "sft" if name == PLAIN["sft"] else find_policy(name).family  # pairs have their own
    whole = name in (*PLAIN.values(), "validation-first", "validation-mix")
    modes = ("native",) if whole else ("native", "budget")
    return Method(name, family=family, modes=modes, options={"policy": name})


def custom_method(name: str, entry: Mapping[str, Any]) -> Method:
    """A method that a grid defines: options of the trainer, or a merge.

    ``{policy: top, estimator: label}`` trains with these options; ``{merges: stm, alpha: 0.3}``
    merges its model with the start; ``modes`` and ``family`` may be set. An entry of a known
    method goes over its options.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError("a method must be a mapping of options", got=f"{name}: {entry!r}")
    options = dict(entry)
    modes, family = options.pop("modes", None), options.pop("family", "both")
    base = known_methods().get(name)
    if base is not None:
        kept = base.modes if modes is None else tuple(modes)
        if len(kept) == 1 < len(base.modes):  # a cell names its mode only where there are several
            options.setdefault("policy_mode", kept[0])
        return replace(base, modes=kept, options={**base.options, **options})
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
