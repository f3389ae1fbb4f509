"""Choice of the parameters of the inner products, written as one text.

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
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from alphatoken.errors import ConfigError
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import Scope, find_scope, lowest_use, resolve_layers, used_outside

__all__ = ["ParameterChoice"]

_REMEDY = "'linears', 'linears,experts', 'all', or patterns of names such as 'linears,*norm*'"


@dataclass(frozen=True)
class ParameterChoice:
    """A choice of parameters, read.

    Attributes:
        everything: every trainable parameter of the model.
        linears: the linears of the scored layers.
        patterns: of names of further parameters.
        experts: the 3-D tensors of the scored layers' mixtures of experts.
    """

    everything: bool
    linears: bool
    patterns: tuple[str, ...]
    experts: bool = False

    @classmethod
    def read(cls, text: str, name: str = "parameters") -> ParameterChoice:
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
            raise ConfigError(f"{name} cannot be read", got=repr(text), remedy=_REMEDY)
        if "all" in parts and len(parts) > 1:
            raise ConfigError(
                f"'all' stands alone in {name}",
                got=repr(text),
                why="it already has every trainable parameter",
                remedy=_REMEDY,
            )
        if "experts" in parts and "linears" not in parts:
            raise ConfigError(
                f"'experts' stands beside 'linears' in {name}",
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

    def scope(self, adapter: DecoderAdapter, layers: int | str | Sequence[int]) -> Scope:
        """The scored layers, what of them and of the model is chosen, where a graph must begin.

        Where every parameter is chosen, all layers are scored, whatever ``layers`` says.

        Raises:
            ConfigError: bad ``layers``, no trainable linear in them where linears are chosen, no
                expert that can be captured where experts are, or a pattern that fits no trainable
                parameter.
        """
        if self.linears:
            scope = find_scope(adapter, layers, experts=self.experts)
        else:
            chosen = resolve_layers(adapter, "all" if self.everything else layers)
            scope = Scope(chosen, (), first=len(adapter.layers()) - 1)
        named = self._named(adapter.model)
        first = lowest_use(adapter, named.values(), scope.first)
        if used_outside(adapter, 0, named.values()):
            first = 0
        return replace(scope, first=first, named=named)

    def _named(self, model: nn.Module) -> dict[str, Tensor]:
        """Parameters that a name chooses, by their first names, in the model's order."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.everything:
            return dict(trained)
        first = {id(parameter): name for name, parameter in trained.items()}
        every = model.named_parameters(remove_duplicate=False)
        aliases = {name: first[id(p)] for name, p in every if id(p) in first}
        chosen: set[str] = set()
        for pattern in self.patterns:
            fitting = {first for name, first in aliases.items() if fnmatchcase(name, pattern)}
            if not fitting:
                raise _unmatched(pattern, list(aliases), model)
            chosen |= fitting
        return {name: parameter for name, parameter in trained.items() if name in chosen}


def _unmatched(pattern: str, names: Sequence[str], model: nn.Module) -> ConfigError:
    frozen = [
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and fnmatchcase(name, pattern)
    ]
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return ConfigError(
        "a pattern fits no trainable parameter",
        got=repr(pattern),
        why=f"{frozen[0]} is frozen" if frozen else f"there are names such as {', '.join(near)}",
        remedy="requires_grad_ it, or leave the pattern out" if frozen else _REMEDY,
    )
