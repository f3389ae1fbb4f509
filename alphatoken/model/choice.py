"""Choice of the scored layers and parameters, each written as one text; nothing imports torch here.

Parameters of the inner products:

    "linears"                            linears of the scored layers (the paper)
    "linears,experts"                    and the matrices of their mixtures of experts
    "all"                                every trainable parameter of the model
    "linears,*norm*,*embed_tokens*"      parts joined by commas: the linears of the scored layers,
                                         and trainable parameters whose names match a pattern

A pattern is one of ``fnmatch``: ``*`` any text, ``?`` one character, ``[ab]`` one of these. It
reaches parameters of all layers, whichever are scored. A tied weight has several names, and is
chosen by each of them with all its uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphatoken.errors import ConfigError

DEFAULT_LAYERS = 3
"""The last three layers, as in the paper; all of a model that has fewer."""


def read_layers(
    text: str | int | list[int] | tuple[int, ...], name: str = "layers"
) -> int | str | Sequence[int]:
    """A choice of layers from text, in the form that ``ScorerConfig.layers`` takes.

    >>> read_layers("3"), read_layers("all"), read_layers("0,4"), read_layers("4,")
    (3, 'all', [0, 4], [4])

    Args:
        text: ``"3"`` the last three layers, ``"all"``, or indices such as ``"0,4"`` (``"4,"`` is
            the fifth layer alone). A number, and a list of numbers, are taken as they are.
        name: of the option, for the message.

    Raises:
        ConfigError: anything else. Whether the model has such layers is not known here.
    """
    if isinstance(text, (int, list, tuple)) or text == "all":
        return text
    try:
        if "," not in text:
            return int(text)
        # Empty parts are allowed, so that "4," is one index where "4" is a number of layers.
        indices = [int(part) for part in text.split(",") if part.strip()]
    except (TypeError, ValueError):
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


PARAMETERS_REMEDY = (
    "'linears', 'linears,experts', 'all', or patterns of names such as 'linears,*norm*'"
)


@dataclass(frozen=True)
class ParameterChoice:
    """A choice of parameters, read.

    Attributes:
        everything: every trainable parameter of the model.
        linears: the linears of the scored layers.
        patterns: of names of further parameters.
        experts: the 3-D tensors of the scored layers' mixtures of experts.
    """

    everything: bool = False
    linears: bool = True
    patterns: tuple[str, ...] = ()
    experts: bool = False

    @classmethod
    def read(cls, text: str) -> ParameterChoice:
        """Parse a text into the choice that it means.

        >>> ParameterChoice.read("linears,*norm*")
        ParameterChoice(everything=False, linears=True, patterns=('*norm*',), experts=False)

        Raises:
            ConfigError: no text, an empty part, ``all`` beside something else, or ``experts``
                without ``linears``.
        """
        parts = text.split(",") if isinstance(text, str) else []
        parts = [part.strip() for part in parts]
        if not parts or not all(parts):
            raise ConfigError("parameters cannot be read", got=repr(text), remedy=PARAMETERS_REMEDY)
        if "all" in parts and len(parts) > 1:
            raise ConfigError(
                "'all' stands alone in parameters",
                got=repr(text),
                why="it already has every trainable parameter",
                remedy=PARAMETERS_REMEDY,
            )
        if "experts" in parts and "linears" not in parts:
            raise ConfigError(
                "'experts' stands beside 'linears' in parameters",
                got=repr(text),
                why="it adds the experts' matrices to those of the scored layers",
                remedy="'linears,experts'; or a pattern such as '*experts*' with estimator='label'",
            )
        words = ("linears", "experts", "all")
        patterns = tuple(dict.fromkeys(part for part in parts if part not in words))
        return cls("all" in parts, "linears" in parts, patterns, "experts" in parts)

    @property
    def captured(self) -> bool:
        """True if all that is chosen is captured, as all estimators but ``label`` need it."""
        return self.linears and not self.patterns

    @property
    def only_linears(self) -> bool:
        """True if nothing but the scored linears is chosen, as Kronecker factors need it."""
        return self.captured and not self.experts
