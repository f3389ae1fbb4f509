"""Options of the scorer, checked once, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import Tensor

from alphatoken.errors import ConfigError, refuse_unknown, require_choice
from alphatoken.estimate.differences import FORMS
from alphatoken.estimate.estimators import CAPTURED, ESTIMATORS, SPLIT, WALK
from alphatoken.model.layer_choice import DEFAULT_LAYERS
from alphatoken.model.parameter_choice import ParameterChoice

__all__ = ["WALK_OPTIONS", "ScorerConfig"]

WALK_OPTIONS = ("walk_steps", "walk_learning_rate", "walk_refresh")  # read by "walk" alone

_NAMED = ("frozen", "full", "kronecker")

_CHOICES: dict[str, tuple[str, ...]] = {
    "estimator": (*ESTIMATORS, WALK),
    "objective": ("both", "adaptation", "stability"),
    "part": ("both", "direct", "causal"),
    "uncovered": ("error", "skip"),
    "derivative": ("auto", "forward_mode", *FORMS),
}


@dataclass(frozen=True, repr=False)
class ScorerConfig:
    """Options of the values. The defaults are the paper's: K = 3, W = 32, lambda = 1.5.

    Attributes:
        estimator: "alphatoken" (direct + Value-Propagation), "direct", "path", "label" or
            "paper_literal", see ``alphatoken.estimate.estimators``; or "walk", what a
            token's loss falls by along AdamW steps on the validation rows, all that trains moving.
            For "walk" ``layers`` and ``parameters`` play no part.
        objective: the sides of M that are built and summed: "both" (adaptation, and stability if
            there is a retention term), "adaptation", or "stability" (no validation set needed).
        part: the parts that are computed and summed: "both", "direct" or "causal". Other than
            "both" needs an estimator with a split: all but label and path ("direct" has no
            causal part).
        layers: scored decoder layers: K for the last K, "all", or indices. The default is at most
            the depth; where ``parameters`` are "all" it plays no part.
        window: W of Value-Propagation, in positions; None for no limit, 0 for no causal part.
        stability_weight: lambda. It has no natural unit: compare ``||lambda V||`` with ``||G||``
            (``Direction.balance``) before choosing it.
        preconditioner: None; "frozen" or "full", from the optimizer handed to the scorer;
            "kronecker", which is (K + mu)^-1 by the influence factors handed to it (of weights of
            linears, ``alphatoken.direction.influence``); or a mapping from parameter name to P.
            "frozen" holds the step's denominator fixed; "full" is the exact derivative of the step,
            and is built anew for each batch, because it contains the gradient that the step will
            see (``step_weights`` of ``Scorer.score`` and ``Observed.values``).
        precondition_after: P = 1 until the optimizer has taken this many steps; the frozen form is
            wrong by 95 % at step 4, by 6 % at step 31 (measured on Adam).
        damping: of ``preconditioner="kronecker"``: what is added to each eigenvalue of K, as a
            share of their mean in the same linear.
        parameters: "linears" of the scored layers; "linears,experts", the matrices of their
            mixtures of experts too; for ``label`` also "all" trainable parameters, or parts joined
            by commas, "linears" and patterns of parameter names in any layer ("linears,*norm*");
            see ``alphatoken.model.parameter_choice``.
        uncovered: "error" if a matrix in scope is not covered by the estimator (MoE experts,
            routers, DoRA), or "skip" to leave such matrices out of scope and name them in
            ``Scorer.coverage``.
        max_relative_drift: a Fisher whose reference is farther away than this (median over
            parameters of ``||W - W_ref|| / ||W_ref||``) is taken for another model's; None
            switches the check off.
        standard_errors: values come with the standard errors that the draw of the validation rows
            gives them (``TokenValues.standard_error``). Each validation batch is one part of the
            draw, so there must be at least two, of rows drawn independently. The price is one
            contraction (one dual forward under ``label``) and one copy of G more for each.
        derivative: how ``label`` differentiates the token losses. "forward_mode": one dual forward
            a direction, exact up to rounding. "central": two forwards at ``theta +- h M``, for any
            kernel and layer; needs weights and products in float32 or wider, and memory for one
            more copy of the weights in scope. "one_sided": one forward at ``theta - h M`` beside
            the observed one (or one of its own), less exact. "auto": differences where parameters
            below the scored layers take part and their arithmetic allows it, one-sided under
            ``observe`` without dropout, else central; forward mode for the last layers alone,
            which it runs from their input on. Where one of the two cannot be had, the other is
            taken, said once. ``TokenValues`` say which it was, and the estimated error.
        walk_steps: n, the steps of a walk, each on the next of the validation batches.
        walk_learning_rate: of its AdamW, constant, without weight decay; None takes 5e-5, and in a
            trainer the run's.
        walk_refresh: changes of the weights (optimizer steps) after which a new walk is taken from
            where they are; 0 for one walk from the start.

    Raises:
        ConfigError: an unknown choice, or options that contradict each other.
    """

    estimator: str = "alphatoken"
    objective: str = "both"
    part: str = "both"
    layers: int | str | Sequence[int] = DEFAULT_LAYERS
    window: int | None = 32
    stability_weight: float = 1.5
    preconditioner: str | Mapping[str, Tensor] | None = None
    precondition_after: int = 30
    damping: float = 0.1
    parameters: str = "linears"
    uncovered: str = "error"
    max_relative_drift: float | None = 1.0
    standard_errors: bool = False
    derivative: str = "auto"
    walk_steps: int = 24
    walk_learning_rate: float | None = None
    walk_refresh: int = 0

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that there are not, by name."""
        refuse_unknown(cls.__name__, "option", options, [one.name for one in fields(cls)])
        return super().__new__(cls)

    @property
    def choice(self) -> ParameterChoice:
        """The parameters that values are over: of a walk all that train."""
        return ParameterChoice.read("all" if self.estimator == WALK else self.parameters)

    @property
    def adapts(self) -> bool:
        """True if G is built."""
        return self.objective != "stability"

    @property
    def captured(self) -> bool:
        """True if values are contracted with errors at the scored linears: all but label's are."""
        return self.estimator in CAPTURED

    def __repr__(self) -> str:
        """Text of the options that differ from the defaults.

        >>> ScorerConfig(), ScorerConfig("label", layers="all")
        (ScorerConfig(), ScorerConfig(estimator='label', layers='all'))
        """
        changed = (
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if getattr(self, one.name) is not one.default
            and not isinstance(getattr(self, one.name), Mapping)
            and getattr(self, one.name) != one.default
        )
        return f"ScorerConfig({', '.join(changed)})"

    def __post_init__(self) -> None:
        """Check every option."""
        for name, allowed in _CHOICES.items():
            require_choice(name, getattr(self, name), allowed)
        # A bool is an int: window=True would mean 1.
        if self.window is not None and (isinstance(self.window, bool) or self.window < 0):
            raise ConfigError("window must be None or at least 0", got=repr(self.window))
        if not abs(self.stability_weight) < float("inf"):
            raise ConfigError("stability_weight must be finite", got=repr(self.stability_weight))
        if isinstance(self.preconditioner, str) and self.preconditioner not in _NAMED:
            raise ConfigError(
                "preconditioner must be None, 'frozen', 'full', 'kronecker' or a mapping of "
                "parameter name to tensor",
                got=repr(self.preconditioner),
            )
        if not 0 <= self.damping < float("inf"):
            raise ConfigError("damping must be finite and at least 0", got=repr(self.damping))
        if self.precondition_after < 1:
            raise ConfigError(
                "precondition_after must be at least 1",
                got=repr(self.precondition_after),
                why="before the first step the optimizer has no second moment",
            )
        if isinstance(self.walk_steps, bool) or self.walk_steps < 1:
            raise ConfigError("walk_steps must be at least 1", got=repr(self.walk_steps))
        if isinstance(self.walk_refresh, bool) or self.walk_refresh < 0:
            raise ConfigError("walk_refresh must be at least 0", got=repr(self.walk_refresh))
        if self.walk_learning_rate is not None and not 0 < self.walk_learning_rate < float("inf"):
            raise ConfigError(
                "walk_learning_rate must lie above 0", got=repr(self.walk_learning_rate)
            )
        self._check_walk()
        self._check_combinations()

    def _check_walk(self) -> None:
        """Raise for options that a walk has no use for, and for a walk's that nothing reads."""
        if self.estimator != WALK:
            changed = [n for n in WALK_OPTIONS if getattr(self, n) != getattr(ScorerConfig, n)]
            if changed:
                raise ConfigError(
                    f"{changed[0]} is an option of the estimator 'walk' alone",
                    got=f"{changed[0]}={getattr(self, changed[0])!r}, estimator={self.estimator!r}",
                    remedy="estimator='walk', or leave it out",
                )
            return
        unread = {
            "objective='stability'": self.objective == "stability",
            f"preconditioner={self.preconditioner!r:.20}": self.preconditioner is not None,
            "standard_errors=True": self.standard_errors,
            f"parameters={self.parameters!r}": self.parameters not in ("linears", "all"),
            f"layers={self.layers!r}": self.layers not in (DEFAULT_LAYERS, "all"),
            "uncovered='skip'": self.uncovered == "skip",
        }
        for got, given_here in unread.items():
            if given_here:
                raise ConfigError(
                    "an option has no meaning along a walk",
                    got=f"{got}, estimator='walk'",
                    why="its values are losses now less losses after AdamW steps of all that "
                    "trains on the validation rows",
                    remedy="leave it out, or estimator='label'",
                )

    def _check_combinations(self) -> None:
        if self.derivative != "auto" and self.estimator != "label":
            raise ConfigError(
                "derivative is an option of the estimator 'label' alone",
                got=f"derivative={self.derivative!r}, estimator={self.estimator!r}",
                why="the others contract errors of a backward with M",
                remedy="estimator='label', or derivative='auto'",
            )
        if self.part != "both" and self.estimator not in SPLIT:
            raise ConfigError(
                "only one of the two parts can be had from an estimator that splits them",
                got=f"part={self.part!r}, estimator={self.estimator!r}",
                why="its value is one number, with the direct and the causal part inside",
                remedy=f"estimator one of {', '.join(SPLIT)}, or part='both'",
            )
        if self.part == "causal" and self.estimator == "direct":
            raise ConfigError(
                "estimator='direct' has no causal part",
                got="part='causal'",
                why="every value would be zero",
                remedy="estimator='alphatoken' or 'paper_literal'",
            )
        if self.standard_errors and self.objective == "stability":
            raise ConfigError(
                "standard_errors are those of the adaptation value",
                got="objective='stability'",
                why="no validation row takes part in the stability value",
                remedy="objective='both' or 'adaptation'",
            )
        choice = ParameterChoice.read(self.parameters)
        if self.preconditioner == "kronecker" and not choice.only_linears:
            raise ConfigError(
                "preconditioner='kronecker' is for the weights of linears alone",
                got=f"parameters={self.parameters!r}",
                why="others have no Kronecker factors; and what a key's bias has of a gradient is "
                "rounding, which would be divided by itself",
                remedy="parameters='linears'",
            )
        if not choice.captured and self.estimator not in ("label", WALK):
            raise ConfigError(
                f"value parameters {self.parameters!r} are for the estimator 'label' alone",
                got=f"estimator {self.estimator!r}",
                why="embeddings, norms and the head are not linears whose errors are captured",
                remedy="--estimator label (in Python estimator='label'), or 'linears'",
            )
