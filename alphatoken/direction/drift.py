"""Fisher drift: V = F o (theta - theta_ref), or S_F (theta - theta_ref) A_F.

The Fisher and the reference weights are constants; V is rebuilt from the current weights. V is
exactly zero at theta = theta_ref, so retention says nothing at step 0. Under LoRA with B_ref = 0
the gradient of A is zero at the reference, hence so is its Fisher: A's part of V stays zero.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.direction.algebra import diagonal_drift, kronecker_drift
from alphatoken.errors import FisherError
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.model.sharding import MasterWeights, Sharding
from alphatoken.support.storage import read_tensors, write_tensors

_KIND = "alphatoken Fisher drift"
_FORMAT = "1"


def library_version() -> str:
    """The installed version of this library, or "unknown" when it runs uninstalled."""
    try:
        return version("alphatoken")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, eq=False)
class FisherDrift:
    """A Fisher of the reference model, its weights, and V as a function of the current weights.

    Diagonal: V = F o (theta - theta_ref), all (d_out, d_in) or whatever shape the parameter has.
    Kronecker: V = left (theta - theta_ref) right with (left, right) = (S_F, A_F), or (A_F, S_F) for
    weights stored as (d_in, d_out).

    Scale: F squares a gradient summed over a response, so V is in units of loss per sequence,
    while the adaptation direction is a mean over tokens: lambda has no natural unit.

    Keys are names of parameters.

    Attributes:
        fisher: diagonal Fisher, >= 0, in each parameter's own shape; empty for Kronecker.
        reference: weights of the reference model, one for each entry.
        metadata: how it was fitted; plain JSON values. ``metadata["model"]`` is compared with
            the scored model's identity where present, ``metadata["base"]`` with
            :func:`base_projections` of its adapted weights.
        factors: (left, right) per parameter; empty for the diagonal. Scale: A_F a mean over tokens,
            S_F a mean over sequences of the sum over positions; then tr(S_F) tr(A_F) is comparable
            with the trace of the per-sequence diagonal.
        shapes: of each parameter.

    Raises:
        FisherError: nothing given, both kinds given, other shapes, a NaN, an infinity or a
            negative entry; the message names the parameter.

    Source: the paper's retention proxy (Fisher drift); oracle: alphatoken.oracle.retention.
    """

    fisher: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Frozen, so that nothing is replaced once it is checked.
        for attribute in ("fisher", "reference", "factors"):
            object.__setattr__(self, attribute, dict(getattr(self, attribute)))
        object.__setattr__(self, "metadata", _plain(self.metadata))
        if bool(self.fisher) == bool(self.factors):
            raise FisherError(
                "exactly one of a diagonal Fisher and Kronecker factors is needed",
                got=f"{len(self.fisher)} diagonal entries, {len(self.factors)} pairs of factors",
                remedy="pass fisher={name: tensor}, or factors={name: (left, right)}",
            )
        _check_names(set(self.names), set(self.reference))
        for name, weight in self.reference.items():
            _check_finite(weight, name, "reference weight")
            if self.fisher:
                _check_diagonal(self.fisher[name], weight, name)
            else:
                _check_factors(*self.factors[name], weight, name)
            self.shapes[name] = weight.shape

    @property
    def structure(self) -> str:
        """Either "diagonal" or "kronecker"."""
        return "diagonal" if self.fisher else "kronecker"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the covered parameters."""
        return tuple(self.fisher or self.factors)

    def __repr__(self) -> str:
        fitted = {key: self.metadata[key] for key in ("layers", "samples") if key in self.metadata}
        extra = "".join(f", {key}={value}" for key, value in fitted.items())
        return f"FisherDrift({self.structure}, {len(self.names)} parameters{extra})"

    def to(self, device: torch.device | str) -> FisherDrift:
        """The same Fisher on another device (V is computed on the weights' device in any case)."""
        return FisherDrift(
            {name: F.to(device) for name, F in self.fisher.items()},
            {name: W.to(device) for name, W in self.reference.items()},
            self.metadata,
            {name: (L.to(device), R.to(device)) for name, (L, R) in self.factors.items()},
        )

    @torch.no_grad()
    def direction(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """V by parameter name, from the current weights; of their shapes, without a graph.

        Exactness: exact, in float32 (float64 for float64 weights).

        Raises:
            FisherError: a parameter that is not covered, or of another shape.
        """
        self.require({name: weight.shape for name, weight in parameters.items()})
        return {name: self._V(name, weight.detach()) for name, weight in parameters.items()}

    def _V(self, name: str, weight: Tensor) -> Tensor:
        reference = self.reference[name].to(weight.device)
        if self.fisher:
            return diagonal_drift(self.fisher[name].to(weight.device), weight, reference)
        left, right = (factor.to(weight.device) for factor in self.factors[name])
        return kronecker_drift(left, right, weight, reference)

    def require(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that every named parameter is covered, in this shape.

        Raises:
            FisherError: one is missing, or has another shape; the message names it.
        """
        missing = [name for name in shapes if name not in self.shapes]
        if missing:
            raise FisherError(
                "the Fisher does not cover every scored parameter",
                got=f"{len(missing)} missing, the first is '{missing[0]}'; it has "
                f"{len(self.names)}, such as '{self.names[0]}'",
                why="their retention would silently count as zero",
                remedy="fit it for at least these (`alphatoken fisher` with --layers and "
                "--parameters, fit_fisher with layers= and parameters=; for exact values 'all' as "
                "parameters), or value fewer",
            )
        for name, shape in shapes.items():
            if tuple(shape) != tuple(self.shapes[name]):
                raise FisherError(
                    f"the Fisher of '{name}' has another shape than the model's parameter",
                    got=f"{tuple(self.shapes[name])} beside {tuple(shape)}",
                    why="it was fitted for another model",
                    remedy="fit the Fisher for this model",
                )

    @torch.no_grad()
    def drift(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative drift ||theta - theta_ref|| / ||theta_ref|| (Frobenius) by parameter name.

        Parameters whose reference is zero (LoRA's B before training) are left out. Raises as
        :meth:`direction`.
        """
        self.require({name: weight.shape for name, weight in parameters.items()})
        relative: dict[str, float] = {}
        for name, weight in parameters.items():
            # Only compared with a limit, so float32 will do for float64 weights as well.
            reference = self.reference[name].to(weight.device, torch.float32)
            norm = float(reference.norm())
            if norm > 0:
                relative[name] = float((weight.to(torch.float32) - reference).norm()) / norm
        return relative

    @torch.no_grad()
    def lost_in(self, parameters: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.dtype] | None:
        """Dtypes (reference, weights) where most of the drift is the rounding between them.

        Most of ``theta - theta_ref`` is then gone once both are in the narrower one. None where it
        is not, or where all have one dtype. Raises as :meth:`direction`.
        """
        self.require({name: weight.shape for name, weight in parameters.items()})
        apart = left = 0.0
        dtypes = None
        for name, weight in parameters.items():
            reference = self.reference[name].to(weight.device)
            if reference.dtype == weight.dtype:
                continue
            dtypes = reference.dtype, weight.dtype
            narrow = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
            apart += float((weight.to(torch.float32) - reference.to(torch.float32)).square().sum())
            rounded = weight.to(narrow).to(torch.float32) - reference.to(narrow).to(torch.float32)
            left += float(rounded.square().sum())
        return dtypes if left < apart / 4 else None

    def check(
        self,
        model: nn.Module | DecoderAdapter,
        names: Iterable[str],
        *,
        max_relative_drift: float | None = 1.0,
    ) -> None:
        """Check that this Fisher belongs to ``model`` and covers the parameters ``names``.

        Args:
            model: the model that is scored, or its adapter.
            names: the scored parameters.
            max_relative_drift: largest median relative drift; None for any. Two unrelated models
                are about sqrt(2) apart, fine-tuning moves weights by far less.

        Raises:
            FisherError: another architecture, missing parameters, other shapes, weights so far
                from the reference that it must be another model's, or other weights under the
                factors of adapters, which are no entries.
        """
        adapter = model if isinstance(model, DecoderAdapter) else find_adapter(model)
        self.check_identity(adapter.identity())
        if base := self.metadata.get("base"):
            check_base(base, base_projections(adapter.model))
        weights = dict(adapter.model.named_parameters(remove_duplicate=False))
        unknown = [name for name in names if name not in weights]
        if unknown:
            raise FisherError("a scored name is no parameter of the model", got=f"'{unknown[0]}'")
        relative = self.drift({name: weights[name] for name in names})
        check_distance(relative, max_relative_drift)

    def check_identity(self, identity: Mapping[str, str]) -> None:
        """Check that this Fisher was fitted on a model of the same architecture.

        Raises:
            FisherError: it was not; the message says in what they differ.
        """
        fitted = self.metadata.get("model")
        if not isinstance(fitted, dict):
            return
        differing = [
            f"{key}: {fitted.get(key)} in the Fisher, {identity.get(key)} in the model"
            for key in sorted({*fitted, *identity})
            if fitted.get(key) != identity.get(key)
        ]
        if differing:
            raise FisherError(
                "the Fisher was fitted for another architecture",
                got="; ".join(differing),
                why="its entries would multiply weights that they say nothing about",
                remedy="fit the Fisher on this model, or load the model it was fitted on",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, whole or not at all; :meth:`load` gives it back exactly.

        Raises:
            FisherError: the file could not be written; an old one stays as it was.
        """
        tensors = {f"reference/{name}": W for name, W in self.reference.items()}
        tensors |= {f"fisher/{name}": F for name, F in self.fisher.items()}
        for name, (left, right) in self.factors.items():
            tensors |= {f"left/{name}": left, f"right/{name}": right}
        description = {
            "kind": _KIND,
            "format_version": _FORMAT,
            "library_version": library_version(),
            "structure": self.structure,
            "names": json.dumps(self.names),
            "metadata": json.dumps(self.metadata),
        }
        write_tensors(path, tensors, description, error=FisherError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FisherDrift:
        """Read what :meth:`save` wrote, onto the CPU, into memory of its own.

        Raises:
            FisherError: no such file, truncated, altered, or another kind or version of file; the
                message names the file.
        """
        tensors, described = read_tensors(path, error=FisherError)
        kind, form = described.get("kind"), described.get("format_version")
        if (kind, form) != (_KIND, _FORMAT):
            raise FisherError(
                f"the file '{os.fspath(path)}' is no Fisher that this version can read",
                got=f"kind {kind!r}, format version {form!r}; expected {_KIND!r}, {_FORMAT!r}",
                remedy="save it with FisherDrift.save of this version of the library",
            )
        # All else is there: the file was read as whole and unaltered.
        names, metadata = json.loads(described["names"]), json.loads(described["metadata"])
        reference = {name: tensors[f"reference/{name}"] for name in names}
        if described["structure"] == "diagonal":
            return cls({n: tensors[f"fisher/{n}"] for n in names}, reference, metadata)
        factors = {n: (tensors[f"left/{n}"], tensors[f"right/{n}"]) for n in names}
        return cls({}, reference, metadata, factors)


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
        if self._fisher:  # elementwise, so that parts suffice
            return {
                name: diagonal_drift(self._fisher[name], self._part(name), self._reference[name])
                for name in self._parameters
            }
        # Factors mix rows and columns: each V is formed whole, and this process's part kept.
        parts = {}
        for name, parameter in self._parameters.items():
            if self._masters is None:
                whole = self._sharding.full(name, parameter)
            else:
                whole = self._sharding.gather(name, self._part(name))
            parts[name] = self._sharding.part_of(name, self._drift.direction({name: whole})[name])
        return parts

    def check(self, max_relative_drift: float | None) -> None:
        """Refuse a Fisher whose reference is too far away; on all processes alike."""
        # Norms of whole matrices are taken over all processes, so each comes to the same verdict.
        away = {n: self._part(n).float() - r.float() for n, r in self._reference.items()}
        distance = self._sharding.norms(away)
        size = self._sharding.norms({n: r.float() for n, r in self._reference.items()})
        check_distance(
            {n: distance[n] / size[n] for n in distance if size[n] > 0}, max_relative_drift
        )


_SAMPLED = 4096
"""Entries of a weight that its projection reads."""


@torch.no_grad()
def base_projections(model: nn.Module) -> dict[str, float]:
    """``<w, r> / ||w||`` of each weight w under an adapter, by name; none where there is none.

    w is a sample of the weight, r a fixed vector of normal numbers: projections of two models are
    independent standard normal numbers; rounding to 16 bits moves one by less than 0.01.
    """
    projections = {}
    for name, weight in model.named_parameters():
        if ".base_layer." not in name or not weight.is_floating_point() or not weight.numel():
            continue
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].cpu().double()
        normal = torch.randn(
            len(sample), generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        norm = float(sample.norm())
        projections[name] = float(sample @ normal) / norm if norm > 0 else 0.0
    return projections


def check_base(fitted: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Refuse a Fisher of adapters on another base model; of weights that both have.

    Raises:
        FisherError: most projections differ by more than rounding.
    """
    away = {name: abs(now[name] - fitted[name]) for name in fitted if name in now}
    # Weights that were rounded to 4 bits are 0.1 apart, two unrelated ones 1.15 in the median.
    if away and median(away.values()) > 0.3:
        worst = max(away, key=lambda name: away[name])
        raise FisherError(
            "the Fisher was fitted for adapters on another base model",
            got=f"other weights, most of all '{worst}'",
            why="its entries would multiply factors that act on weights it says nothing about",
            remedy="fit the Fisher on this model, or load the base that it was fitted on",
        )


def check_distance(relative: Mapping[str, float], most: float | None) -> None:
    """Refuse a Fisher if the median ``||theta - theta_ref|| / ||theta_ref||`` exceeds ``most``."""
    if most is None or not relative:
        return
    # The median, so that a few matrices that moved far in training do not decide.
    middle = median(relative.values())
    if not middle <= most:
        worst = max(relative, key=lambda name: relative[name])
        raise FisherError(
            "the weights are too far from this Fisher's reference: fitted for another model?",
            got=f"median relative drift {middle:.3g} above {most:g}, the "
            f"largest {relative[worst]:.3g} at '{worst}'",
            why="the quadratic proxy holds near the reference only",
            remedy="fit the Fisher on the model that training starts from, or pass "
            "max_relative_drift=None if the distance is meant",
        )


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(dict(metadata)))
    except (TypeError, ValueError) as problem:
        raise FisherError("metadata must hold JSON values only", got=str(problem)) from problem
    assert isinstance(plain, dict)
    return plain


def _check_names(entries: set[str], reference: set[str]) -> None:
    if entries != reference:
        name = min(entries ^ reference)
        side = "reference weight" if name in entries else "Fisher"
        raise FisherError(
            f"there is no {side} for '{name}'",
            got=f"{len(entries)} Fisher entries, {len(reference)} references",
            why="V = F o (theta - theta_ref) needs both",
            remedy="give both under the same names",
        )


def _check_finite(entry: Any, name: str, what: str) -> None:
    if not isinstance(entry, Tensor) or not entry.is_floating_point():
        got = str(entry.dtype) if isinstance(entry, Tensor) else type(entry).__name__
        raise FisherError(f"the {what} of '{name}' is no floating-point tensor", got=got)
    if not bool(torch.isfinite(entry).all()):
        raise FisherError(
            f"the {what} of '{name}' holds a NaN or an infinity",
            why="every retention value would become NaN",
            remedy="fit it again, in a wider dtype if it overflowed",
        )


def _check_diagonal(fisher: Tensor, weight: Tensor, name: str) -> None:
    _check_finite(fisher, name, "Fisher")
    if fisher.shape != weight.shape:
        raise FisherError(
            f"the Fisher of '{name}' does not have the shape of its reference weight",
            got=f"{tuple(fisher.shape)} beside {tuple(weight.shape)}",
        )
    if fisher.numel() and float(fisher.min()) < 0:
        raise FisherError(
            f"the Fisher of '{name}' has a negative entry",
            got=f"{float(fisher.min()):.3g}",
            why="it is a mean of squares",
        )


def _check_factors(left: Tensor, right: Tensor, weight: Tensor, name: str) -> None:
    rows, columns = weight.shape if weight.dim() == 2 else (0, 0)
    for factor, size, side in ((left, rows, "left"), (right, columns, "right")):
        _check_finite(factor, name, f"{side} Kronecker factor")
        if factor.shape != (size, size) or weight.dim() != 2:
            raise FisherError(
                f"the {side} Kronecker factor of '{name}' does not fit its reference weight",
                got=f"{tuple(factor.shape)} beside {tuple(weight.shape)}",
                remedy="pass (S_F, A_F) of shapes (d_out, d_out), (d_in, d_in); (A_F, S_F) of a "
                "weight stored as (d_in, d_out)",
            )
