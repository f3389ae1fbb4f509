"""Options of the trainers: what is valued, what is kept, against what; checked once, before work.

``AlphaOptions`` are the fields that ``AlphaSFTConfig``, ``AlphaDPOConfig`` and ``AlphaConfig`` add
to TRL's and transformers' own. All are plain values, so that they survive JSON, YAML recipes and
command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from alphatoken.config import WALK, ScorerConfig
from alphatoken.errors import ConfigError, refuse_unknown
from alphatoken.presets import refuse_preset
from alphatoken.support.options import check_options
from alphatoken.train.fields import AlphaFields
from alphatoken.train.policies import (
    STANDS_FOR,
    TRAINER_POLICIES,
    UNTOUCHED,
    chosen_policy,
    find_policy,
    policy,
    read_policy_options,
)
from alphatoken.train.policy import PolicySettings, TokenPolicy, row_weights
from alphatoken.train.refusals import contradictions, raise_first, refused_losses, refused_settings

RENAMED = {
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "score_layers": "layers",
    "value_parameters": "parameters",
}
"""Options of earlier versions, of TRL, transformers and ours, by what they are called today."""


@dataclass
class AlphaOptions(AlphaFields):
    """Fields that the trainers' configurations add, checked; see ``AlphaFields`` for each.

    Raises:
        ConfigError: an unknown choice, a number out of range, or options that contradict each
            other; raised when the configuration is made.
    """

    FAMILY: ClassVar[str] = "sft"  # of the trainer: "sft" or "preference"

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that there are not, by name."""
        names = [one.name for one in fields(cls) if one.init]
        refuse_unknown(cls.__name__, "option", options, names, RENAMED)
        return super().__new__(cls)

    def check_alpha(self) -> None:
        """Check every option; called by the configurations after their own checks."""
        self._read_null()
        refuse_preset(self.estimator)
        self._resolve_policy()
        check_options(self, AlphaFields)
        raise_first(contradictions(self))
        self.scorer_config()
        if self.weighs:
            self.check_settings()

    def check_settings(self) -> None:
        """Refuse settings under which no token can be weighed."""
        raise_first(refused_settings(self))

    def _read_null(self) -> None:
        # argparse knows no other word for none.
        for one in fields(AlphaFields):
            if one.default is None and getattr(self, one.name) in ("null", "none"):
                setattr(self, one.name, None)

    def _resolve_policy(self) -> None:
        """Put what a name stands for in place of it, and check what it does not stand for."""
        arguments = read_policy_options(self.policy_options)
        if self.policy == "dpo" and self.FAMILY != "preference":
            raise ConfigError("policy='dpo' is for DPO only", remedy="AlphaDPOTrainer")
        stands_for = STANDS_FOR.get(self.policy, {})
        if self.estimator not in (
            AlphaFields.estimator,
            stands_for.get("estimator", self.estimator),
        ):
            raise ConfigError(
                f"policy '{self.policy}' is that of the estimator '{stands_for['estimator']}'",
                got=f"estimator={self.estimator!r}",
                remedy=f"policy='top' ranks by the values of {self.estimator!r}",
            )
        if self.policy in UNTOUCHED and self.kept_normalization != "response":
            raise ConfigError(
                f"kept_normalization has no effect on policy '{self.policy}'",
                got=f"kept_normalization={self.kept_normalization!r}",
                why="the trainer below is left as it is, and divides its loss by itself",
                remedy="leave it out, or policy='all', which trains on the same tokens",
            )
        for name, value in stands_for.items():
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
        raise_first(refused_losses(self, policy))

    def policy_settings(self) -> PolicySettings:
        """Settings of a method by name."""
        return PolicySettings(
            mode=self.policy_mode,
            keep_ratio=self.keep_ratio,
            seed=self.value_seed,
        )

    @property
    def direction_lasts(self) -> int | None:
        """Steps for which a direction, or a walk, is used; None for the whole run."""
        if self.estimator == WALK:
            return self.walk_refresh or None
        return self.direction_steps

    def scorer_config(self) -> ScorerConfig:
        """The scorer's part; the trainer itself counts the steps between two walks."""
        config = super().scorer_config()
        if self.estimator != WALK:
            return config
        rate = self.walk_learning_rate
        if rate is None:
            rate = getattr(self, "learning_rate", None)
        return replace(config, walk_learning_rate=rate, walk_refresh=0)

    @property
    def weighs(self) -> bool:
        """True if any token is valued or weighed; if not, the trainer is the one below it."""
        # Whether values are exported says nothing of what divides the loss.
        return self.policy != "all" or self.needs_values or self.kept_normalization == "sum"

    @property
    def reads_fisher(self) -> bool:
        """True if the stability term is a Fisher's."""
        return self.objective != "adaptation" and self.retention in ("diagonal", "kronecker")

    @property
    def reads_retention(self) -> bool:
        """True if the stability term is the loss of retention rows."""
        return self.objective != "adaptation" and self.retention == "data"

    @property
    def needs_values(self) -> bool:
        """True if tokens are valued at all: not under 'random', nor 'all' without an export."""
        if self.policy in TRAINER_POLICIES:
            exported = self.policy == "all" and self.export_values
            return self.policy in ("top", "bottom") or exported
        own = find_policy(self.policy).needs
        if isinstance(own, property):  # what it needs depends on its settings
            arguments = read_policy_options(self.policy_options)
            own = policy(self.policy, self.policy_settings(), **arguments).needs
        return own.values

    @property
    def row_weights(self) -> str:
        """How weights of the rows are read under the named policy: "refused", "read", "signed"."""
        return row_weights(chosen_policy(self, None, self.FAMILY))
