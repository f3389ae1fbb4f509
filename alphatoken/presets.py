"""The three ways to value, one name each: a table that all other places read.

``ScorerConfig`` has its defaults from here, and makes a configuration of each name; the command
line (``--value``), the recipes and the arms of a race read the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from alphatoken.errors import ConfigError, require_choice
from alphatoken.model.choice import DEFAULT_LAYERS, ParameterChoice

WALK = "walk"
"""Loss differences along a walk; see ``estimate.walk``."""
WALK_RATE = 5e-5
"""Learning rate of a walk by default: a usual one of full fine-tuning."""


class Preset(NamedTuple):
    """Options of the values under one name; ``about`` says the unit and what a value means."""

    options: Mapping[str, Any]
    about: str


PRESETS: Mapping[str, Preset] = {
    "walk": Preset(
        {"estimator": WALK, "walk_steps": 24, "walk_learning_rate": None},
        "by how many nats the loss of a token falls when the model takes {walk_steps} AdamW steps "
        "on the validation rows",
    ),
    "exact": Preset(
        {"estimator": "label", "parameters": "all", "layers": "all"},
        "by how much a small step on a token alone lowers the validation loss, per unit of step; "
        "over all trainable parameters",
    ),
    "paper": Preset(
        {
            "estimator": "alphatoken",
            "parameters": "linears",
            "layers": DEFAULT_LAYERS,
            "window": 32,
            # No default suits every model: compare ``||lambda V||`` with ``||G||``
            # (``Direction.balance``) before choosing it.
            "stability_weight": 1.5,
        },
        "as exact, approximate: the paper's estimator over the linears of the last {layers} "
        "layers, W = {window}, retention (where there is any) by lambda = {stability_weight}",
    ),
}
"""The three ways to value. Defaults of ``ScorerConfig``, the command line, recipes and races read
their numbers from here."""


def refuse_preset(estimator: Any) -> None:
    """Refuse a preset's name where an estimator is named.

    Raises:
        ConfigError: says how the preset is had.
    """
    if isinstance(estimator, str) and estimator in PRESETS.keys() - {WALK}:
        own = PRESETS[estimator].options["estimator"]
        raise ConfigError(
            f"'{estimator}' is a preset, and no estimator",
            got=f"estimator={estimator!r}",
            why=f"it sets the estimator {own!r} and what that one values",
            remedy=f"ScorerConfig.{estimator}(), or --value {estimator}",
        )


def preset_options(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a preset, overridden by those in ``more``.

    Raises:
        ConfigError: there is no such preset, or ``more`` has another estimator.
    """
    require_choice("value", name, tuple(PRESETS))
    options = PRESETS[name].options
    own, other = options["estimator"], more.get("estimator", options["estimator"])
    if other != own:
        raise ConfigError(
            f"value '{name}' is the estimator {own!r}",
            got=f"--value {name}, --estimator {other} (estimator={other!r})",
            why="each of the two decides how tokens are valued",
            remedy="one of them alone",
        )
    return {**options, **more}


def written_options(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`preset_options` as ``ValueOptions`` has them: the layers are a text."""
    options = preset_options(name, more)
    return {key: str(value) if key == "layers" else value for key, value in options.items()}


_BESIDE: Mapping[str, Any] = {"part": "both", "preconditioner": None, "walk_form": "one_sided"}
"""Options that no preset sets, and what they are in all."""


def preset_of(options: Any) -> str | None:
    """Name of the preset that options of values are, or None; a walk of other steps is a walk.

    Args:
        options: a ``ScorerConfig``, or what has such fields.
    """
    if any(getattr(options, name, value) != value for name, value in _BESIDE.items()):
        return None
    for name, preset in PRESETS.items():
        names = preset.options.keys() - {"walk_steps", "walk_learning_rate"}
        # Layers are a text in some, and of no consequence where every parameter is valued.
        names -= {"layers"} if _everything(options) else set()
        if all(str(getattr(options, option)) == str(preset.options[option]) for option in names):
            return name
    return None


def _everything(options: Any) -> bool:
    return ParameterChoice.read(options.parameters).everything


def values_in_words(options: Any) -> str:
    """The values of these options: the preset's name and meaning, or the estimator and its choice.

    Args:
        options: as of :func:`preset_of`.
    """
    name = preset_of(options)
    if name is not None:
        preset = PRESETS[name]
        meaning = preset.about.format(**{one: getattr(options, one) for one in preset.options})
        rate = options.walk_learning_rate if name == WALK else None
        return f"{name} ({meaning}{'' if rate is None else f' at rate {rate:g}'})"
    words = f"estimator {options.estimator!r}"
    if options.estimator == WALK:
        return f"{words}, {options.walk_form}, of {options.walk_steps} AdamW steps, in nats"
    layers = "" if _everything(options) else f" of layers {options.layers}"
    return f"{words} over {options.parameters}{layers}"
