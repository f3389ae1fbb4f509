"""Options of the trainers: what is valued, what is kept, against what; checked once, before work.

``AlphaOptions`` are the fields that ``AlphaSFTConfig``, ``AlphaDPOConfig`` and ``AlphaConfig`` add
to TRL's and transformers' own. All are plain values, so that they survive JSON, YAML recipes and
command lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from alphatoken.config import ScorerConfig
from alphatoken.errors import ConfigError
from alphatoken.estimate.estimators import WALK
from alphatoken.model.layer_choice import read_layers
from alphatoken.train.fields import AlphaFields, check_fields
from alphatoken.train.policies import (
    STANDS_FOR,
    TRAINER_POLICIES,
    chosen_policy,
    read_policy_options,
)
from alphatoken.train.policy import PolicySettings, TokenPolicy
from alphatoken.train.refused_settings import refused_early

__all__ = ["AlphaOptions"]


@dataclass
class AlphaOptions(AlphaFields):
    """Fields that the trainers' configurations add, checked; see ``AlphaFields`` for each.

    Raises:
        ConfigError: an unknown choice, a number out of range, or options that contradict each
            other; raised when the configuration is made.
    """

    FAMILY: ClassVar[str] = "sft"  # of the trainer: "sft" or "preference"

    def check_alpha(self) -> None:
        """Check every option; called by the configurations after their own checks."""
        self._read_null()
        self._resolve_policy()
        check_fields(self, AlphaFields)
        self._check_combinations()
        self.scorer_config()
        if self.weighs:
            for refusal in refused_early(self):
                raise refusal

    def _read_null(self) -> None:
        """Text "null" or "none" where an option may be none: argparse knows no other word."""
        for one in fields(AlphaFields):
            if one.default is None and getattr(self, one.name) in ("null", "none"):
                setattr(self, one.name, None)

    def _resolve_policy(self) -> None:
        """Put what a name stands for in place of it, and check what it does not stand for."""
        arguments = read_policy_options(self.policy_options)
        if self.policy == "dpo" and self.FAMILY != "preference":
            raise ConfigError("policy='dpo' is DPO's own loss", remedy="AlphaDPOTrainer")
        for name, value in STANDS_FOR.get(self.policy, {}).items():
            setattr(self, name, value)
        if self.policy in TRAINER_POLICIES and arguments:
            raise ConfigError(
                f"policy='{self.policy}' takes no options of its own",
                got=f"policy_options={arguments}",
            )
        self.policy_settings()  # checks mode and ratio, also where no policy reads them
        chosen = chosen_policy(self, None, self.FAMILY)
        if chosen is not None:
            self.check_policy(chosen)

    def check_policy(self, policy: TokenPolicy) -> None:
        """Refuse a policy that this kind of trainer cannot carry out with these options."""

    def policy_settings(self) -> PolicySettings:
        """Settings of a method by name."""
        return PolicySettings(
            mode=self.policy_mode,
            keep_ratio=self.keep_ratio,
            seed=self.value_seed,
        )

    def _check_harmless(self) -> None:
        """See that nothing else asks for what a rule without a ratio does not have."""
        if self.policy != "harmless":
            return
        reasons = {
            "objective='stability'": self.objective == "stability",
            f"keep_scope={self.keep_scope!r}": self.keep_scope != "batch",
            "kept_normalization='kept'": self.kept_normalization == "kept",
            "shared_threshold": self.shared_threshold,
        }
        _refuse(
            reasons,
            "policy='harmless' has no ratio: each token is judged by its own value and error",
            why="these rank tokens, count the kept ones ahead, or have no validation rows",
            remedy="leave them out, or policy='top'",
        )

        at_once = self.validation_rows_at_once
        if at_once is not None and not at_once < self.validation_batch_size:
            raise ConfigError(
                "policy='harmless' needs at least two validation forwards a step",
                got=f"{self.validation_batch_size} rows, {at_once} at once",
                why="the errors of values are taken from the spread between them",
                remedy="a larger validation_batch_size, or a smaller validation_micro_batch_size",
            )

    def _check_unit(self) -> None:
        """See that responses can be ranked whole."""
        if self.value_unit == "token":
            return
        reasons = {
            "keep_scope='sequence'": self.keep_scope == "sequence",
            f"policy={self.policy!r}": self.policy not in ("top", "harmless", "bottom"),
            **self._packed(),
        }
        _refuse(
            reasons,
            "value_unit='response' ranks whole responses, one a row, of a batch or a step",
            remedy="value_unit='token', or leave that out",
        )

    def _packed(self) -> dict[str, bool]:
        """Options under which a row is no example, and whether they are on."""
        return {n: bool(getattr(self, n, False)) for n in ("packing", "padding_free")}

    def _check_combinations(self) -> None:
        if self.objective == "stability" and self.retention == "none":
            raise ConfigError(
                "objective='stability' needs a retention term",
                got="retention='none'",
                remedy="retention='diagonal', 'kronecker' or 'data'",
            )
        self._check_retained()
        self._check_unit()
        self._check_harmless()

    def _check_retained(self) -> None:
        if self.estimator == WALK and self.retention != "none" and self.objective != "adaptation":
            raise ConfigError(
                "a walk has no stability side",
                got=f"estimator='walk', retention={self.retention!r}",
                why="it is steps on the validation rows, and V would take no part",
                remedy="retention='none', objective='adaptation', or estimator='label'",
            )

    @property
    def direction_lasts(self) -> int | None:
        """Steps for which a direction, or a walk, is used; None for the whole run."""
        if self.estimator == WALK:
            return self.walk_refresh or None
        return self.direction_steps

    def scorer_config(self) -> ScorerConfig:
        """The scorer's part; the trainer itself counts the steps between two walks."""
        rate = self.walk_learning_rate
        if self.estimator == WALK and rate is None:
            rate = getattr(self, "learning_rate", None)
        return ScorerConfig(
            walk_steps=self.walk_steps,
            walk_learning_rate=rate,
            walk_refresh=self.walk_refresh if self.estimator != WALK else 0,
            estimator=self.estimator,
            objective=self.objective,
            part=self.part,
            layers=read_layers(self.score_layers),
            window=self.window,
            stability_weight=self.stability_weight,
            stability_units=self.stability_units,
            preconditioner=self.preconditioner,
            precondition_after=self.precondition_after,
            parameters=self.value_parameters,
            uncovered=self.uncovered,
            max_relative_drift=self.max_relative_drift,
            standard_errors=self.policy == "harmless",
        )

    @property
    def validation_rows_at_once(self) -> int | None:
        """Rows of one validation forward; None for all of a process, where nothing is known."""
        if self.validation_micro_batch_size is not None:
            return self.validation_micro_batch_size
        if self.policy == "harmless":
            return -(-self.validation_batch_size // 8)
        # What memory a training forward has, it has: all rows at once may be many times as large.
        return getattr(self, "per_device_train_batch_size", None)

    @property
    def weighs(self) -> bool:
        """Whether any token is valued or weighed; if not, the trainer is the one below it."""
        return self.policy != "all" or self.needs_values

    @property
    def reads_fisher(self) -> bool:
        """Whether the stability term is a Fisher's."""
        return self.objective != "adaptation" and self.retention in ("diagonal", "kronecker")

    @property
    def needs_values(self) -> bool:
        """Whether tokens are valued at all: not under 'random', nor 'all' without an export."""
        return self.policy in ("top", "harmless", "bottom") or (
            self.policy == "all" and self.export_values
        )


def _refuse(reasons: Mapping[str, bool], what: str, *, remedy: str, why: str = "") -> None:
    """Raise if any of the reasons is given, and name those that are."""
    obstacles = [name for name, present in reasons.items() if present]
    if obstacles:
        raise ConfigError(what, got=", ".join(obstacles), why=why, remedy=remedy)
