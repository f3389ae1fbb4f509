"""Choice of the scored layers in options and command lines; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from alphatoken.errors import ConfigError

__all__ = ["DEFAULT_LAYERS", "layers_within", "read_layers"]

DEFAULT_LAYERS = 3
"""The last three layers, as in the paper; all of a model that has fewer."""


def read_layers(text: str | int, name: str = "layers") -> int | str | list[int]:
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


def layers_within(layers: int | str | Sequence[int], depth: int) -> tuple[int, ...]:
    """Indices of the scored decoder layers, ascending.

    Args:
        layers: K for the last K layers, "all", or indices (negative ones count from the end).
        depth: layers of the model.

    The default number is at most the depth.

    Raises:
        ConfigError: another K or an index outside the model, an empty choice, another type.
    """
    # This must come before the tests of the type: a string is a Sequence as well, and a bool is an
    # int, so that True would otherwise mean K = 1.
    if layers == "all":
        return tuple(range(depth))
    if isinstance(layers, bool) or not isinstance(layers, (int, Sequence)) or layers == "":
        raise ConfigError("layers must be an int K, 'all' or indices", got=repr(layers))
    if isinstance(layers, str):
        raise ConfigError(
            "layers as a string can only be 'all'",
            got=repr(layers),
            remedy="pass a number K for the last K layers, 'all', or indices",
        )
    if isinstance(layers, int):
        layers = min(layers, depth) if layers == DEFAULT_LAYERS else layers
        if not 1 <= layers <= depth:
            raise ConfigError(
                "the number of scored layers must lie within the model",
                got=f"layers={layers}, model depth {depth}",
                remedy=f"pass 1 to {depth}, or 'all'",
            )
        return tuple(range(depth - layers, depth))
    # A set, since -1 and depth - 1 name one layer, whose values would otherwise be counted twice.
    chosen = sorted({i + depth if i < 0 else i for i in layers})
    if not chosen or chosen[0] < 0 or chosen[-1] >= depth:
        raise ConfigError(
            "scored layer indices must lie within the model",
            got=f"{list(layers)}, model depth {depth}",
            remedy=f"pass at least one index from {-depth} to {depth - 1}",
        )
    return tuple(chosen)
