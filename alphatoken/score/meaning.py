"""What a value says, in the sentence and the unit of its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alphatoken.config import CAPTURED, WALK
from alphatoken.presets import WALK_RATE
from alphatoken.score.page import number

RATE = 5e-5
"""Step in which a page of one-step values speaks: a usual rate of full fine-tuning."""

_PER_STEP = "nats per unit of step"


@dataclass(frozen=True)
class Meaning:
    """How a page speaks of its values.

    Attributes:
        lead: a sentence on what the colours say.
        unit: of a value, after its number.
        rate: of one-step values, the step by which a tooltip turns one into a change of the loss.
        after: of values that are a loss before less a loss after, after what; or "".
        trusted: a sentence, without its full stop, on the trusted rows that a page marks.
        components: key of a component -> what it says, where it says something else here.
    """

    lead: str = (
        "Blue: a small step on this token lowers the validation loss or keeps what the model knew. "
        "Orange: it does the opposite."
    )
    unit: str = ""
    rate: float | None = None
    after: str = ""
    trusted: str = "The walk was taken on them, so they lie higher"
    components: Mapping[str, str] = field(default_factory=dict)


def meaning_of(settings: Mapping[str, object], trusted: str) -> Meaning:
    """Meaning of the values of ``alphatoken score``.

    Args:
        settings: of the run, by the names of its flags.
        trusted: the rows that values are against, such as "the 8 trusted rows".
    """
    if settings.get("estimator") == WALK:
        return _of_walk(settings, trusted)
    objective, of_loss = f"the mean loss of {trusted}", False
    if settings.get("objective") == "stability" or not trusted:
        objective = "the penalty on drift from what the model was"
    elif settings.get("fisher_file", "none") != "none":
        weight = number(_float(settings["stability_weight"]))
        objective += f" plus {weight} times the penalty on drift"
    else:
        of_loss = True
    lead = (
        f"Blue: a step of rate {RATE:g} on this token alone lowers {objective}, by {RATE:g} times "
        "the value, to first order. Orange: it raises it"
    )
    if settings.get("estimator") in CAPTURED:
        layers = settings.get("layers")
        scope = f"the last {layers} layers" if isinstance(layers, int) else "the scored layers"
        paper = settings["estimator"] == "alphatoken"
        method = "The paper's estimator" if paper else f"The estimator '{settings['estimator']}'"
        lead += f". {method} approximates this on the linears of {scope}"
    elif settings.get("parameters", "all") != "all":
        lead += f". Only the {settings['parameters']} of the scored layers move"
    # One step moves the loss by the value times its rate only where that is what the value is.
    exact = of_loss and settings.get("estimator") not in CAPTURED
    return Meaning(f"{lead}.", _PER_STEP, RATE if exact else None)


def _of_walk(settings: Mapping[str, object], trusted: str) -> Meaning:
    if settings.get("reference") is not None:
        lead = (
            "Blue: the loss of this token is lower under the reference model, by so many nats. "
            "Orange: it is higher."
        )
        return Meaning(lead, "nats", after="under the reference")
    rate = settings.get("walk_learning_rate")
    lead = (
        "Blue: the loss of this token falls, by so many nats, when the model takes "
        f"{settings['walk_steps']} AdamW steps of rate "
        f"{WALK_RATE if rate is None else _float(rate):g} on {trusted}. Orange: it rises."
    )
    one_sided = settings.get("walk_form", "one_sided") == "one_sided"
    return Meaning(lead, "nats", after="after the walk" if one_sided else "")


def _float(value: object) -> float:
    return float(str(value))
