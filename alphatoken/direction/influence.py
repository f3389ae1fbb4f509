"""Influence directions: M = (H + mu)^-1 G, H the eigenvalue-corrected Kronecker-factored Fisher.

Of each scored linear, over its flattened weight,

    H  =  (Q_S (x) Q_A) diag(Lambda) (Q_S (x) Q_A)^T
    M  =  Q_S ((Q_S^T G Q_A) / (Lambda + mu)) Q_A^T

with Q_S, Q_A the eigenvectors of the factors S_F (of output errors) and A_F (of inputs) and

    Lambda_ij  =  sum over sequences of (Q_S^T g Q_A)_ij^2  /  number of response tokens

g is the gradient of one training sequence's *summed* log-likelihood, whose labels are drawn from
the model at every response position, on the given prefix. Labels of two positions are then
independent and each score has mean zero, so that E[g g^T] is the sum of the single tokens': Lambda
is the diagonal, in these eigenvectors, of the Fisher of the *mean token loss*, as G is a gradient
of one. H is in units of loss per token per squared unit of weight, and M in units of weight: the
move by which Newton's step on H follows G.

mu is ``damping`` times the mean of Lambda, of each linear by itself. For damping to infinity
``mu M`` tends to G.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.direction.fisher import Settings, fitting
from alphatoken.direction.moments import CorrectedMoments
from alphatoken.direction.sampling import Prompts
from alphatoken.errors import FisherError
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.support.precision import full_precision, wide
from alphatoken.support.progress import ProgressSink
from alphatoken.support.storage import read_tensors, write_tensors

_KIND = "alphatoken influence factors"
_PARTS = ("left", "right", "eigenvalues")


@dataclass(frozen=True, eq=False)
class InfluenceFactors:
    """H of every parameter, by its eigenvectors and eigenvalues, in the parameter's stored layout.

    ``H = (left (x) right) diag(eigenvalues) (left (x) right)^T``. Of a weight stored as (d_out,
    d_in) left is Q_S and right Q_A; stored the other way round, they are exchanged and Lambda is
    turned.

    Attributes:
        left: (rows, rows) eigenvectors by parameter name, orthonormal columns.
        right: (columns, columns) likewise.
        eigenvalues: Lambda, >= 0, in the weight's shape.
        metadata: how they were fitted; ``metadata["model"]`` is compared with the scored model.
    """

    left: Mapping[str, Tensor] = field(repr=False)
    right: Mapping[str, Tensor] = field(repr=False)
    eigenvalues: Mapping[str, Tensor] = field(repr=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def check(self, shapes: Mapping[str, Sequence[int]], identity: Mapping[str, str]) -> None:
        """Check that every parameter in scope has factors of its shape, of this architecture.

        Which weights they were fitted at is not checked: one fit may serve a whole run.

        Raises:
            FisherError: one has not; the message names it.
        """
        for name, shape in shapes.items():
            eigenvalues = self.eigenvalues.get(name)
            if eigenvalues is None or tuple(eigenvalues.shape) != tuple(shape):
                raise FisherError(
                    "the influence factors do not fit every scored parameter",
                    got=f"'{name}' {tuple(shape)}: "
                    + ("none" if eigenvalues is None else str(tuple(eigenvalues.shape))),
                    remedy="fit_influence for (at least) the scored layers",
                )
        fitted = self.metadata.get("model", identity)
        if dict(fitted) != dict(identity):
            raise FisherError(
                "the influence factors were fitted for another architecture",
                got=f"{fitted} there, {identity} here",
                remedy="fit them on this model",
            )

    @torch.no_grad()
    @full_precision
    def solve(self, matrices: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
        """``(H + mu)^-1 m`` of each matrix of G or V, ``mu = damping * mean(Lambda)``.

        Exactness: exact, in float32 (float64 of float64). Oracle:
        ``alphatoken.oracle.composite.damped_solve``.

        Raises:
            FisherError: H has no inverse there: Lambda is all zero (LoRA's A while B is zero), or
                has a zero and damping is 0.
        """
        return {name: self._solved(name, m, damping) for name, m in matrices.items()}

    def _solved(self, name: str, matrix: Tensor, damping: float) -> Tensor:
        dtype = wide(matrix.dtype)
        left, right, eigenvalues = (
            part[name].to(matrix.device, dtype)
            for part in (self.left, self.right, self.eigenvalues)
        )
        mu = damping * eigenvalues.mean()
        solved = left @ ((left.T @ matrix.to(dtype) @ right) / (eigenvalues + mu)) @ right.T
        if not bool(torch.isfinite(solved).all()):
            raise FisherError(
                f"the Fisher of '{name}' has no inverse",
                got=f"largest eigenvalue {float(eigenvalues.max()):.3g}, damping {damping:g}",
                why="a direction without curvature would be followed without end",
                remedy="damping above 0; a LoRA factor A has no Fisher while B is zero: fit after "
                "some steps of training",
            )
        return solved

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one safetensors file, whole or not at all; :meth:`load` gives it back exactly.

        Raises:
            FisherError: the file could not be written; an old one stays as it was.
        """
        tensors = {f"{p}/{name}": t for p in _PARTS for name, t in getattr(self, p).items()}
        described = {"kind": _KIND, "metadata": json.dumps(dict(self.metadata))}
        write_tensors(path, tensors, described, error=FisherError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> InfluenceFactors:
        """Read what :meth:`save` wrote, onto the CPU.

        Raises:
            FisherError: no such file, truncated, altered, or of another kind.
        """
        tensors, described = read_tensors(path, error=FisherError)
        if described.get("kind") != _KIND:
            raise FisherError(
                f"the file '{os.fspath(path)}' holds no influence factors",
                got=f"kind {described.get('kind')!r}",
                remedy="a file that InfluenceFactors.save wrote",
            )
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return cls(**parts, metadata=json.loads(described["metadata"]))


def fit_influence(
    model: nn.Module,
    rows: Prompts,
    *,
    samples: int = 1000,
    layers: int | str | Sequence[int] = 3,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 50,
    progress: bool | ProgressSink | None = None,
    adapter: DecoderAdapter | None = None,
) -> InfluenceFactors:
    """Fit H of ``model`` as it is now, on training rows, for ``preconditioner="kronecker"``.

    Two passes over the same samples: the factors S_F and A_F, whose eigenvectors are kept; then
    the eigenvalues (see the module). A sample is a row whose response tokens are drawn from the
    model at every position, in one forward. The model is left as it was, as by ``fit_fisher``.

    Args:
        model: the model at which influence is taken.
        rows: training rows: a batch with ``labels``, or id tensors, of which all tokens but the
            first are response.
        samples: sequences; sample i is of row ``i % len(rows)``.
        layers: the last K decoder layers, "all", or indices; their linears.
        seed: of the labels.
        checkpoint: as of ``fit_fisher``, and so are the next; ``progress`` counts both passes.
        checkpoint_every: samples between two writes.
        progress: see there.
        adapter: see there.

    Returns:
        The same factors on every process that fits with the same arguments.

    Raises:
        As ``fit_fisher`` with ``structure="kronecker"``.

    Exactness: Lambda is an unbiased estimate of the Fisher's diagonal in the eigenvectors; H leaves
    out what is off that diagonal, and between linears. Oracle:
    ``alphatoken.oracle.composite.corrected_fisher``.
    """
    settings = Settings(samples, "kronecker", "token", 1, "linears", seed, 8)
    with fitting(
        model, rows, settings, layers, checkpoint, checkpoint_every, progress, adapter,
        corrected=True,
    ) as fit:  # fmt: skip
        assert isinstance(fit.moments, CorrectedMoments)
        left, right, eigenvalues = fit.moments.corrected(fit.response_tokens)
        return InfluenceFactors(left, right, eigenvalues, fit.metadata)
