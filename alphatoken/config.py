"""Options of the values, checked once, before any work.

``ScorerConfig`` states each option once: default, help, choices, range. Trainers and commands take
theirs from it, under the same names. Nothing here imports torch before a configuration is made:
the help of a command is there at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from alphatoken.errors import ConfigError, refuse_unknown
from alphatoken.model.choice import DEFAULT_LAYERS, ParameterChoice, read_layers
from alphatoken.presets import (
    PRESETS,
    WALK_RATE,
    preset_options,
    refuse_preset,
    written_options,
)
from alphatoken.presets import WALK as WALK
from alphatoken.support.options import check_options, option, same_option, with_options_in_docstring

if TYPE_CHECKING:
    from torch import Tensor


class ErrorRule(NamedTuple):
    """The errors at the scored linears that an estimator contracts with M.

    ``backward`` is "self", in which a position's use of the weights reaches its own loss alone (the
    diagonal of Psi), or "ordinary" (its column sums). ``propagation`` says how Value-Propagation
    carries the errors at the heads' outputs on to the positions that they attended to, as the
    causal part: "" not at all, "per_head" by each head's own attention, "mean" by their mean.
    """

    backward: str
    propagation: str = ""


CAPTURED: Mapping[str, ErrorRule] = {
    "alphatoken": ErrorRule("self", "per_head"),
    "direct": ErrorRule("self"),
    "path": ErrorRule("ordinary"),
    "paper_literal": ErrorRule("ordinary", "mean"),
}
"""Estimators that contract errors at the scored linears with M, each by its rule."""
ESTIMATORS = (*CAPTURED, "label")
"""First-order values: contractions of gradients with M."""
_PAPER, _WALK = PRESETS["paper"].options, PRESETS["walk"].options
SELF_ONLY = tuple(name for name, rule in CAPTURED.items() if rule.backward == "self")
"""Estimators that need the self-only backward."""
SPLIT = tuple(name for name, rule in CAPTURED.items() if name in SELF_ONLY or rule.propagation)
"""Estimators with a direct and a causal part: they need the attention calls, recorded through the
switchable backward. Path and label have one undivided value."""
FORMS = ("central", "one_sided")
"""Finite differences of ``label`` (``estimate.differences``), and forms of a walk's values."""

READ_BY: Mapping[str, tuple[str, ...]] = {
    "part": SPLIT,
    "window": tuple(name for name, rule in CAPTURED.items() if rule.propagation),
    "derivative": ("label",),
    "preconditioner": ESTIMATORS,
    "standard_errors": ESTIMATORS,
    "uncovered": ESTIMATORS,
    "stability_weight": ESTIMATORS,
    "walk_steps": (WALK,),
    "walk_learning_rate": (WALK,),
    "walk_refresh": (WALK,),
    "walk_form": (WALK,),
}
"""Option -> the estimators that read it. The others take its default alone."""

_NAMED = ("frozen", "full", "kronecker")
_NOT_READ_WHY = {
    "part": "its value is one number, with the direct and the causal part inside",
    "window": "it bounds Value-Propagation, and the others have none",
    "derivative": "the others contract errors of a backward with M",
}
_ALONG_A_WALK = (
    "its values are losses now less losses after AdamW steps of all that trains on the validation "
    "rows"
)


@with_options_in_docstring
@dataclass(frozen=True, repr=False)
class ScorerConfig:
    """Options of the values. The defaults are the paper's: K = 3, W = 32, lambda = 1.5.

    :meth:`walk`, :meth:`exact` and :meth:`paper` are the three ways to value, by name.

    ``alphatoken.estimate.captured`` says what each estimator contracts, and
    ``alphatoken.model.choice`` how ``parameters`` are chosen; for "walk", which moves all that
    trains, ``layers`` and ``parameters`` play no part. ``window`` None is no limit, 0 no causal
    part. ``preconditioner`` may also be "kronecker", which is (H + mu)^-1 by the influence factors
    handed to the scorer, or a mapping from parameter name to P; "full" is built anew for each
    batch, because it contains the gradient that the step will see (``step_weights`` of
    ``Scorer.score`` and ``Observed.values``).

    Raises:
        ConfigError: an unknown choice, or options that contradict each other.
    """

    estimator: str = option(
        _PAPER["estimator"],
        "estimator of token values: 'alphatoken' (the paper), 'direct', 'path', 'label' (exact for "
        "a loss mask), 'paper_literal', or 'walk' (the decrease of a token's loss along AdamW "
        "steps on the validation rows)",
        choices=(*ESTIMATORS, WALK),
    )
    # A side that is left out is not built: "stability" needs no validation set.
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
    # At most the depth of the model, since the default serves models of one or two layers as well.
    # Where ``parameters`` are "all" it plays no part.
    layers: int | str | Sequence[int] = option(
        _PAPER["layers"],
        "scored layers: the last K, 'all', or indices such as 0,4",
        within="1 to all layers",
    )
    window: int | None = option(
        _PAPER["window"],
        "window W of Value-Propagation in tokens, or none",
        at_least=0,
        optional=True,
    )
    stability_weight: float = option(
        _PAPER["stability_weight"],
        "lambda, the weight of stability in the total value; it has no natural unit: see the "
        "balance",
        above=-math.inf,
        below=math.inf,
    )
    # "frozen" holds the denominator of the step fixed. "full" is the exact derivative of the step,
    # and is built anew for each batch, since it contains the gradient that the step will see
    # (``step_weights``). Both read the optimizer that is handed to the scorer, "kronecker" its
    # influence factors; a mapping gives P by parameter name.
    preconditioner: str | Mapping[str, Tensor] | None = option(
        None,
        "'frozen' or 'full': values of the optimizer's step instead of the gradient's",
        within="null, 'frozen', 'full', 'kronecker', or a mapping",
    )
    # The frozen form is wrong by 95 % at step 4, by 6 % at step 31 (measured on Adam).
    precondition_after: int = option(
        30,
        "number of optimizer steps before which P = 1",
        at_least=1,
        why="before the first step the optimizer has no second moment",
    )
    damping: float = option(
        0.1,
        "what preconditioner='kronecker' adds to each eigenvalue of H, as a share of their mean",
        at_least=0,
        below=math.inf,
    )
    parameters: str = option(
        _PAPER["parameters"],
        "parameters that values are over: 'linears' of the scored layers, 'linears,experts' with "
        "the matrices of their mixtures of experts; with estimator 'label' also 'all' trainable "
        "ones, or parts joined by commas, 'linears' and patterns of names such as "
        "'linears,*norm*'",
        within="'linears', 'linears,experts', 'all', or patterns",
    )
    # Matrices that are skipped are named in ``Scorer.coverage``.
    uncovered: str = option(
        "error", "'error', or 'skip' matrices that no estimator covers", choices=("error", "skip")
    )
    # The median over parameters of ``||theta - theta_ref|| / ||theta_ref||``, so that a few that
    # moved far in training do not decide.
    max_relative_drift: float | None = option(
        1.0,
        "drift above which a Fisher is taken for another model's; none checks nothing",
        within="null, or above 0",
    )
    # Each validation batch is one part of the draw, so there must be at least two, of rows drawn
    # independently. The price is one contraction (a dual forward under ``label``) and a copy of G
    # for each.
    standard_errors: bool = option(False, "standard errors by the draw of the validation rows")
    # "forward_mode" is exact up to rounding. "central" (two forwards at theta +- h M) and
    # "one_sided" (one beside the observed losses, less exact) serve every kernel and layer, but
    # need weights and products in float32 or wider. "auto" prefers forward mode in float64; and in
    # narrower numbers differences where parameters below the scored layers take part, since forward
    # mode starts at the input of the first scored layer and is cheaper above it. If the model rules
    # one out, the other is used, with one warning. ``TokenValues`` say which it was, and its error.
    derivative: str = option(
        "auto",
        "how 'label' differentiates the token losses",
        choices=("auto", "forward_mode", *FORMS),
    )
    walk_steps: int = option(
        _WALK["walk_steps"],
        "AdamW steps of a walk, each on the next validation batch (estimator 'walk')",
        at_least=1,
    )
    walk_learning_rate: float | None = option(
        _WALK["walk_learning_rate"],
        f"constant learning rate of a walk; default: {WALK_RATE:g}, in a trainer the run's",
        above=0,
        below=math.inf,
    )
    walk_refresh: int = option(
        0,
        "optimizer steps after which a new walk starts from the current weights, on rows drawn "
        "anew; 0 takes one walk at the start (direction_steps has no effect on walks)",
        at_least=0,
    )
    # Central values do not depend on the weights after the walk, only on both of its ends: a run
    # that never renews its walk has one value a token, whatever it has learned.
    walk_form: str = option(
        "one_sided",
        "'one_sided': the loss now less that at the end of a walk; 'central': half of the loss as "
        "far behind the start of the walk less that at its end, which leaves out curvature",
        choices=FORMS,
    )

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that there are not, by name."""
        refuse_unknown(cls.__name__, "option", options, [one.name for one in fields(cls)])
        return super().__new__(cls)

    @classmethod
    def walk(cls, **more: Any) -> Self:
        """Walk values (``alphatoken.presets``); options in ``more`` override the preset's.

        >>> ScorerConfig.walk(walk_steps=48)
        ScorerConfig(estimator='walk', walk_steps=48)

        Raises:
            ConfigError: as of the class, or another estimator in ``more``.
        """
        return cls(**preset_options("walk", more))

    @classmethod
    def exact(cls, **more: Any) -> Self:
        """Label values over all parameters; otherwise as :meth:`walk`."""
        return cls(**preset_options("exact", more))

    @classmethod
    def paper(cls, **more: Any) -> Self:
        """The paper's values, the defaults; otherwise as :meth:`walk`."""
        return cls(**preset_options("paper", more))

    @property
    def choice(self) -> ParameterChoice:
        """The parameters that values are over: of a walk all that train."""
        return ParameterChoice.read("all" if self.estimator == WALK else self.parameters)

    @property
    def walk_rate(self) -> float:
        """The constant learning rate of a walk."""
        return WALK_RATE if self.walk_learning_rate is None else self.walk_learning_rate

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
        refuse_preset(self.estimator)
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
    """Research options for valuing tokens, in place of --value."""

    estimator: str = same_option(ScorerConfig, "estimator")
    layers: str = same_option(ScorerConfig, "layers", default=str(DEFAULT_LAYERS))
    parameters: str = same_option(ScorerConfig, "parameters")
    window: int | None = same_option(ScorerConfig, "window")
    stability_weight: float = same_option(ScorerConfig, "stability_weight")
    walk_steps: int = same_option(ScorerConfig, "walk_steps")
    walk_learning_rate: float | None = same_option(ScorerConfig, "walk_learning_rate")
    walk_form: str = same_option(ScorerConfig, "walk_form")
    derivative: str = same_option(ScorerConfig, "derivative")

    def scorer_config(self) -> ScorerConfig:
        """The configuration that these options, and those of a subclass, stand for.

        Raises:
            ConfigError: options without a meaning.
        """
        shared = {one.name for one in fields(self)} & {one.name for one in fields(ScorerConfig)}
        settings = {name: getattr(self, name) for name in shared}
        return ScorerConfig(**settings | {"layers": read_layers(self.layers)})


def walk_words(options: Any) -> str:
    """Options of a walk as a command line has them behind others, but for the defaults.

    >>> walk_words(ScorerConfig.walk(walk_steps=60, walk_form="central"))
    ' --walk_steps 60 --walk_form central'
    """
    names = ("walk_steps", "walk_learning_rate", "walk_form")
    changed = {n: getattr(options, n) for n in names if not _is_default(n, getattr(options, n))}
    return "".join(f" --{name} {value}" for name, value in changed.items())


# --- what is in force ----------------------------------------------------------------------------

RESEARCH = (
    *("estimator", "parameters", "layers"),
    *(name for name, readers in READ_BY.items() if WALK not in readers),
)
"""Options by which tokens are valued in another way than a preset's."""


def in_force(
    value: str | None, named: Mapping[str, Any], default: str
) -> tuple[str | None, dict[str, Any]]:
    """The preset in force, and the options of values that it and the options named come to.

    Args:
        value: the preset that was named, or None.
        named: options of values that were named beside it.
        default: the preset where neither it nor a research option was named.

    Returns:
        No preset where research options stand in its place; others then have their defaults.

    Raises:
        ConfigError: as of :func:`preset_options`.
    """
    if value is None and not named.keys() & {*RESEARCH}:
        value = default
    return value, dict(named) if value is None else written_options(value, named)


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
        unlimited = name == "window" and values[name] is None  # true of all that have no window
        if estimator not in readers and not (_is_default(name, values[name]) or unlimited):
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
    elif not ParameterChoice.read(values["parameters"]).captured and estimator != "label":
        yield (
            "parameters",
            ConfigError(
                f"parameters {values['parameters']!r} are for the estimator 'label' alone",
                got=f"estimator {estimator!r}",
                why="embeddings, norms and the head are not linears whose errors are captured",
                remedy="--estimator label (in Python estimator='label'), or 'linears'",
            ),
        )
    elif ParameterChoice.read(values["parameters"]).everything and _chosen_layers(values):
        yield (
            "layers",
            ConfigError(
                "layers choose nothing where every parameter is valued",
                got=f"layers={values['layers']!r}, parameters={values['parameters']!r}",
                why="they are those whose linears, or experts, are valued",
                remedy="leave layers out, or parameters='linears'",
            ),
        )


def _chosen_layers(values: Mapping[str, Any]) -> bool:
    """Whether layers were chosen, by another value than the default and than all of them."""
    return values["layers"] not in (DEFAULT_LAYERS, "all")


def _is_default(name: str, value: Any) -> bool:
    default = getattr(ScorerConfig, name)
    return value is default or (not isinstance(value, Mapping) and bool(value == default))


def _not_read(name: str, readers: Sequence[str], values: Mapping[str, Any]) -> ConfigError:
    """The error of an option that the estimator does not read."""
    got = f"{name}={values[name]!r:.40}, estimator={values['estimator']!r}"
    if readers == ESTIMATORS:
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
    meaningless = {
        "objective": values["objective"] == "stability",
        "parameters": values["parameters"] not in ("linears", "all"),
        "layers": _chosen_layers(values),
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
