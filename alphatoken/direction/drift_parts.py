"""Fisher drift where weights are sharded: V from parts, or from one whole matrix at a time.

A diagonal V is elementwise, so parts suffice: V_part = F_part o (W_part - W_ref_part). A
Kronecker-factored V mixes rows and columns, so each weight is gathered, its V is formed whole, and
this process's part of it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from alphatoken.direction.algebra import diagonal_drift
from alphatoken.direction.drift import FisherDrift, check_distance
from alphatoken.model.sharding import MasterWeights, Sharding

__all__ = ["ShardedDrift"]


class ShardedDrift:
    """A ``FisherDrift`` over sharded parameters; all methods are collective.

    Args:
        drift: the whole Fisher and reference, on every process.
        sharding: of the weights.
        parameters: parameter name -> parameter, as the process holds it.
        masters: parts of the weights as the optimizer keeps them; the parameters' own without it.

    Raises:
        FisherError: a parameter that is not covered, or of another shape.
    """

    def __init__(
        self,
        drift: FisherDrift,
        sharding: Sharding,
        parameters: Mapping[str, Tensor],
        masters: MasterWeights | None = None,
    ) -> None:
        drift.require({name: sharding.shape(name) for name in parameters})
        self._drift, self._sharding, self._parameters = drift, sharding, parameters
        self._masters = masters
        self._reference = self._kept(drift.reference)
        self._fisher = self._kept(drift.fisher) if drift.fisher else {}

    def _kept(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parts of the whole tensors, on the device of the parameter's own part."""
        sharding = self._sharding
        return {
            name: self._sharding.part_of(name, whole[name].to(sharding.local(name, p).device))
            for name, p in self._parameters.items()
        }

    def _part(self, name: str) -> Tensor:
        part_of = self._masters or self._sharding.local
        return part_of(name, self._parameters[name])

    def direction(self) -> dict[str, Tensor]:
        """This process's part of V, at the current weights; exact, as ``FisherDrift.direction``."""
        if self._fisher:
            return {
                name: diagonal_drift(self._fisher[name], self._part(name), self._reference[name])
                for name in self._parameters
            }
        # S_F and A_F mix all rows and columns: no part of V follows from a part of W by itself.
        parts = {}
        for name, parameter in self._parameters.items():
            if self._masters is None:
                whole = self._sharding.full(name, parameter)
            else:
                whole = self._sharding.gather(name, self._part(name))
            parts[name] = self._sharding.part_of(name, self._drift.direction({name: whole})[name])
        return parts

    def check(self, max_relative_drift: float | None) -> None:
        """Refuse a Fisher whose reference is too far away; see ``FisherDrift.check``."""
        # Norms of whole matrices are taken over all processes, so each comes to the same verdict.
        away = {n: self._part(n).float() - r.float() for n, r in self._reference.items()}
        distance = self._sharding.norms(away)
        size = self._sharding.norms({n: r.float() for n, r in self._reference.items()})
        check_distance(
            {n: distance[n] / size[n] for n in distance if size[n] > 0}, max_relative_drift
        )
