"""Options of the values, checked once, before any work.

``ScorerConfig`` states each option once: default, help, choices, range. Trainers and commands take
theirs from it, under the same names. Nothing here imports torch before a configuration is made:
the help of a command is there at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from alphatoken.errors import ConfigError, refuse_unknown
from alphatoken.estimate.names import CAPTURED, ESTIMATORS, FORMS, SPLIT, WALK
from alphatoken.model.layer_choice import DEFAULT_LAYERS, read_layers
from alphatoken.support.options import check_options, option, same_option

if TYPE_CHECKING:
    from torch import Tensor

    from alphatoken.model.parameter_choice import ParameterChoice

__all__ = ["READ_BY", "ScorerConfig", "ValueOptions", "refused_by_estimator"]

_NAMED = ("frozen", "full", "kronecker")

_FIRST_ORDER = ESTIMATORS  # all but "walk"

READ_BY: Mapping[str, tuple[str, ...]] = {
    "part": SPLIT,
    "derivative": ("label",),
    "preconditioner": _FIRST_ORDER,
    "standard_errors": _FIRST_ORDER,
    "uncovered": _FIRST_ORDER,
    "walk_steps": (WALK,),
    "walk_learning_rate": (WALK,),
    "walk_refresh": (WALK,),
}
"""Option -> the estimators that read it. The others take its default alone."""

_NOT_READ_WHY = {
    "part": "its value is one number, with the direct and the causal part inside",
    "derivative": "the others contract errors of a backward with M",
}
_ALONG_A_WALK = (
    "its values are losses now less losses after AdamW steps of all that trains on the validation "
    "rows"
)


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
            which it runs from their input on. If the model rules one of the two out, the other is
            used, with one warning. ``TokenValues`` say which it was, and the estimated error.
        walk_steps: n, the steps of a walk, each on the next of the validation batches.
        walk_learning_rate: of its AdamW, constant, without weight decay; None takes 5e-5, and in a
            trainer the run's.
        walk_refresh: changes of the weights (optimizer steps) after which a new walk is taken from
            where they are; 0 for one walk from the start.

    Raises:
        ConfigError: an unknown choice, or options that contradict each other.
    """

    estimator: str = option(
        "alphatoken",
        "estimator of token values: 'alphatoken' (the paper), 'direct', 'path', 'label' (exact for "
        "a loss mask), 'paper_literal', or 'walk' (the decrease of a token's loss along AdamW "
        "steps on the validation rows)",
        choices=(*ESTIMATORS, WALK),
    )
    objective: str = option(
        "both",
        "sides of the value: 'both', 'adaptation' or 'stability'",
        choices=("both", "adaptation", "stability"),
    )
    part: str = option(
        "both",
        "paths of the value: 'both', 'direct' or 'causal'",
        choices=("both", "direct", "causal"),
    )
    layers: int | str | Sequence[int] = option(
        DEFAULT_LAYERS,
        "scored layers: the last K, 'all', or indices such as 0,4",
        within="1 to all layers",
    )
    window: int | None = option(
        32, "window W of Value-Propagation in tokens, or none", at_least=0, optional=True
    )
    stability_weight: float = option(
        1.5,
        "lambda, the weight of stability in the total value; it has no natural unit: see the "
        "balance",
        above=-math.inf,
        below=math.inf,
    )
    preconditioner: str | Mapping[str, Tensor] | None = option(
        None,
        "'frozen' or 'full': values of the optimizer's step instead of the gradient's",
        within="null, 'frozen', 'full', 'kronecker', or a mapping",
    )
    precondition_after: int = option(
        30,
        "number of optimizer steps before which P = 1",
        at_least=1,
        why="before the first step the optimizer has no second moment",
    )
    damping: float = option(
        0.1,
        "what preconditioner='kronecker' adds to each eigenvalue of K, as a share of their mean",
        at_least=0,
        below=math.inf,
    )
    parameters: str = option(
        "linears",
        "parameters that values are over: 'linears' of the scored layers, 'linears,experts' with "
        "the matrices of their mixtures of experts; with estimator 'label' also 'all' trainable "
        "ones, or parts joined by commas, 'linears' and patterns of names such as "
        "'linears,*norm*'",
        within="'linears', 'linears,experts', 'all', or patterns",
    )
    uncovered: str = option(
        "error", "'error', or 'skip' matrices that no estimator covers", choices=("error", "skip")
    )
    max_relative_drift: float | None = option(
        1.0,
        "drift above which a Fisher is taken for another model's; none checks nothing",
        within="null, or above 0",
    )
    standard_errors: bool = option(False, "standard errors by the draw of the validation rows")
    derivative: str = option(
        "auto",
        "how 'label' differentiates the token losses",
        choices=("auto", "forward_mode", *FORMS),
    )
    walk_steps: int = option(
        24,
        "AdamW steps of a walk, each on the next validation batch (estimator 'walk')",
        at_least=1,
    )
    walk_learning_rate: float | None = option(
        None,
        "constant learning rate of a walk; default: 5e-5, in a trainer the run's",
        above=0,
        below=math.inf,
    )
    walk_refresh: int = option(
        0,
        "optimizer steps after which a new walk starts from the current weights, on rows drawn "
        "anew; 0 takes one walk at the start (direction_steps has no effect on walks)",
        at_least=0,
    )

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that there are not, by name."""
        refuse_unknown(cls.__name__, "option", options, [one.name for one in fields(cls)])
        return super().__new__(cls)

    @property
    def choice(self) -> ParameterChoice:
        """The parameters that values are over: of a walk all that train."""
        return _choice_of("all" if self.estimator == WALK else self.parameters)

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
        check_options(self)
        if isinstance(self.preconditioner, str) and self.preconditioner not in _NAMED:
            raise ConfigError(
                "preconditioner must be None, 'frozen', 'full', 'kronecker' or a mapping of "
                "parameter name to tensor",
                got=repr(self.preconditioner),
            )
        for _, error in refused_by_estimator(vars(self)):
            raise error
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.standard_errors and self.objective == "stability":
            raise ConfigError(
                "standard_errors are those of the adaptation value",
                got="objective='stability'",
                why="no validation row takes part in the stability value",
                remedy="objective='both' or 'adaptation'",
            )
        if self.preconditioner == "kronecker" and not self.choice.only_linears:
            raise ConfigError(
                "preconditioner='kronecker' is for the weights of linears alone",
                got=f"parameters={self.parameters!r}",
                why="others have no Kronecker factors; and what a key's bias has of a gradient is "
                "rounding, which would be divided by itself",
                remedy="parameters='linears'",
            )


@dataclass(kw_only=True)
class ValueOptions:
    """Options for valuing tokens."""

    estimator: str = same_option(ScorerConfig, "estimator")
    layers: str = same_option(ScorerConfig, "layers", default=str(DEFAULT_LAYERS))
    parameters: str = same_option(ScorerConfig, "parameters")
    window: int | None = same_option(ScorerConfig, "window")
    stability_weight: float = same_option(ScorerConfig, "stability_weight")
    walk_steps: int = same_option(ScorerConfig, "walk_steps")
    walk_learning_rate: float | None = same_option(ScorerConfig, "walk_learning_rate")

    def scorer_config(self) -> ScorerConfig:
        """The configuration that these options, and those of a subclass, stand for.

        Raises:
            ConfigError: options without a meaning.
        """
        shared = {one.name for one in fields(self)} & {one.name for one in fields(ScorerConfig)}
        settings = {name: getattr(self, name) for name in shared}
        return ScorerConfig(**settings | {"layers": read_layers(self.layers)})


# --- what an estimator does not read --------------------------------------------------------------


def refused_by_estimator(options: Mapping[str, Any]) -> Iterator[tuple[str, ConfigError]]:
    """Options that the estimator does not read or cannot follow: name, and the error of each.

    Args:
        options: by name, as ``ScorerConfig`` has them; those that are missing have their defaults.

    Raises:
        ConfigError: the choice of parameters cannot be read.
    """
    values: dict[str, Any] = {one.name: one.default for one in fields(ScorerConfig)}
    values |= options
    estimator = values["estimator"]
    for name, readers in READ_BY.items():
        if estimator not in readers and not _is_default(name, values[name]):
            yield name, _not_read(name, readers, values)
    if values["part"] == "causal" and estimator == "direct":
        yield (
            "part",
            ConfigError(
                "estimator='direct' has no causal part",
                got="part='causal'",
                why="every value would be zero",
                remedy="estimator='alphatoken' or 'paper_literal'",
            ),
        )
    if estimator == WALK:
        yield from _refused_by_walk(values)
    elif not _choice_of(values["parameters"]).captured and estimator != "label":
        yield (
            "parameters",
            ConfigError(
                f"parameters {values['parameters']!r} are for the estimator 'label' alone",
                got=f"estimator {estimator!r}",
                why="embeddings, norms and the head are not linears whose errors are captured",
                remedy="--estimator label (in Python estimator='label'), or 'linears'",
            ),
        )


def _is_default(name: str, value: Any) -> bool:
    default = getattr(ScorerConfig, name)
    return value is default or (not isinstance(value, Mapping) and bool(value == default))


def _not_read(name: str, readers: Sequence[str], values: Mapping[str, Any]) -> ConfigError:
    """The error of an option that the estimator does not read."""
    got = f"{name}={values[name]!r:.40}, estimator={values['estimator']!r}"
    if readers == _FIRST_ORDER:
        return _no_meaning_along_a_walk(got)
    return ConfigError(
        f"{name} is an option of the estimator{'s' * (len(readers) > 1)} "
        f"{', '.join(map(repr, readers))} alone",
        got=got,
        why=_NOT_READ_WHY.get(name, ""),
        remedy=f"estimator={readers[0]!r}, or {name}={getattr(ScorerConfig, name)!r}",
    )


def _refused_by_walk(values: Mapping[str, Any]) -> Iterator[tuple[str, ConfigError]]:
    """Options of which a walk follows some values alone: it moves all that trains."""
    layers = values["layers"]
    meaningless = {
        "objective": values["objective"] == "stability",
        "parameters": values["parameters"] not in ("linears", "all"),
        "layers": layers not in (DEFAULT_LAYERS, "all"),
    }
    for name, here in meaningless.items():
        if here:
            yield name, _no_meaning_along_a_walk(f"{name}={values[name]!r}, estimator='walk'")


def _no_meaning_along_a_walk(got: str) -> ConfigError:
    return ConfigError(
        "an option has no meaning along a walk",
        got=got,
        why=_ALONG_A_WALK,
        remedy="leave it out, or estimator='label'",
    )


def _choice_of(parameters: str) -> ParameterChoice:
    from alphatoken.model.parameter_choice import ParameterChoice  # torch

    return ParameterChoice.read(parameters)
