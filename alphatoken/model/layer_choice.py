"""Which layers are scored, as options and command lines say it; nothing here imports torch."""

from __future__ import annotations

from alphatoken.errors import ConfigError

__all__ = ["DEFAULT_LAYERS", "read_layers"]

DEFAULT_LAYERS = 3
"""The last three layers, as in the paper; all of a model that has fewer."""


def read_layers(text: str | int, name: str = "score_layers") -> int | str | list[int]:
    """A choice of layers from text, in the form that ``ScorerConfig.layers`` takes.

    >>> read_layers("3"), read_layers("all"), read_layers("0,4"), read_layers("4,")
    (3, 'all', [0, 4], [4])

    Args:
        text: ``"3"`` the last three layers, ``"all"``, or indices such as ``"0,4"`` (``"4,"`` is
            the fifth layer alone). A number is taken as it is.
        name: of the option, for the message.

    Raises:
        ConfigError: anything else. Whether the model has such layers is not known here.
    """
    if isinstance(text, int) or text == "all":
        return text
    try:
        if "," not in text:
            return int(text)
        # Empty parts are allowed, so that "4," is one index where "4" is a number of layers.
        indices = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        indices = []
    if not indices:
        raise ConfigError(
            f"{name} cannot be read",
            got=repr(text),
            remedy="a number K for the last K layers, 'all', or indices such as 0,4",
        )
    return indices
