"""Second moments of per-sequence gradients: elementwise, or as Kronecker factors.

Both are running sums over sequences. One sequence at a time: the gradient of the *summed*
log-likelihood of one response is squared, never the gradient of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from alphatoken.direction.gradients import prove_coverage
from alphatoken.errors import NumericalError
from alphatoken.model.capture import LinearUse, Recorder, record
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.scope import Scope
from alphatoken.support.precision import full_precision, wide


def _finite(tensor: Tensor, name: str, what: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise NumericalError(
            f"the {what} of '{name}' holds a NaN or an infinity",
            why="one such sequence would make the whole Fisher NaN",
            remedy="check the model's weights, or fit in a wider dtype",
        )
    return tensor


class DiagonalMoments:
    """Sum over sequences of (d log p / d w)^2, elementwise, for each of the parameters.

    A parameter under several names (tied) has one gradient, through all its uses, and one sum.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        first: dict[int, str] = {}
        self._unique: dict[str, Tensor] = {}
        self._key: dict[str, str] = {}
        for name, parameter in parameters.items():
            key = self._key[name] = first.setdefault(id(parameter), name)
            self._unique[key] = parameter
        self.sums = {
            name: torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
            for name, p in self._unique.items()
        }

    def observing(self) -> AbstractContextManager[None]:
        """A context that does nothing, since autograd gives the gradients without any capture."""
        return nullcontext()

    def add(self, log_likelihood: Tensor) -> None:
        """Square this sequence's gradient and add it; no ``.grad`` is touched.

        Raises:
            NumericalError: the squared gradient is not finite; names the parameter.
        """
        gradients = torch.autograd.grad(
            log_likelihood, list(self._unique.values()), allow_unused=True
        )
        # Widened before squaring (squares of small 16-bit numbers vanish), and all of them checked
        # before any is added: a refused sequence leaves the sums as they were.
        squares = {
            name: _finite(gradient.detach().to(wide(gradient.dtype)) ** 2, name, "gradient")
            for name, gradient in zip(self._unique, gradients, strict=True)
            if gradient is not None
        }
        for name, square in squares.items():
            self.sums[name] += square

    def means(self, count: int) -> dict[str, Tensor]:
        """The diagonal Fisher, by every name of a parameter; the sums are used up."""
        # Divided in place, which saves a copy of the size of the weights.
        unique = {name: total.div_(count) for name, total in self.sums.items()}
        return {name: unique[key] for name, key in self._key.items()}


class KroneckerMoments:
    """Sums for S_F and A_F of the scored linears.

    S: sum over sequences and positions of delta delta^T, delta = d log p / d s (aggregated
    errors, prompt positions included). A: sum of x x^T over the positions that the model reads
    (all up to the one that predicts the last response token), and their number. A weight that is
    used more than once, in one call or several, counts each use as a position.
    """

    def __init__(self, adapter: DecoderAdapter, scope: Scope) -> None:
        self._adapter, self._scope = adapter, scope
        self._recorder: Recorder | None = None
        self._proved = False
        first: dict[int, str] = {}
        self._key = {
            linear.weight_name: first.setdefault(id(linear.weight), linear.weight_name)
            for linear in scope.linears
        }
        self._linears = {linear.weight_name: linear for linear in scope.linears}
        self.sums: dict[str, Tensor] = {}
        for name in dict.fromkeys(self._key.values()):
            weight = self._linears[name].weight
            d_in, d_out = weight.shape if self._linears[name].transposed else weight.shape[::-1]
            zeros = torch.zeros((), dtype=wide(weight.dtype), device=weight.device)
            self.sums[f"S/{name}"] = zeros.expand(d_out, d_out).clone()
            self.sums[f"A/{name}"] = zeros.expand(d_in, d_in).clone()
            self.sums[f"uses/{name}"] = torch.zeros((), dtype=torch.int64)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record the inputs and errors of the scored linears inside, for ``add``."""
        with record(self._adapter, self._scope, attention=False) as recorder:
            self._recorder = recorder
            try:
                yield
            finally:
                self._recorder = None

    @full_precision
    def add(self, log_likelihood: Tensor) -> None:
        """Add this sequence's inputs and errors; no ``.grad`` is touched.

        Raises:
            NumericalError: an input or error is not finite; names the parameter.
            CoverageError: (first sequence) captured uses do not explain a weight's gradient.
        """
        for use, (x, delta) in self._uses(log_likelihood):
            name = self._key[use.linear.weight_name]
            self.sums[f"A/{name}"].addmm_(x.T, x)
            self.sums[f"S/{name}"].addmm_(delta.T, delta)
            self.sums[f"uses/{name}"] += len(x)

    def _uses(self, log_likelihood: Tensor) -> list[tuple[LinearUse, tuple[Tensor, Tensor]]]:
        """Uses of the scored linears in this sequence, with inputs and errors as rows."""
        recorder = self._recorder
        assert recorder is not None
        uses = list(recorder.linears)
        # The proof, on the first sequence, takes errors and gradients through the graph again.
        errors = torch.autograd.grad(
            log_likelihood, recorder.outputs, allow_unused=True, retain_graph=not self._proved
        )
        rows = [_rows(use, error) for use, error in zip(uses, errors, strict=True)]
        if not self._proved:
            weights = {self._key[name]: one.weight for name, one in self._linears.items()}
            remedy = "structure='diagonal', which follows the weight through every use"
            prove_coverage(recorder, log_likelihood, weights, self._key, remedy=remedy)
            self._proved = True
        recorder.clear()
        return list(zip(uses, rows, strict=True))

    def factors(self, count: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Factors (left, right) of each parameter in its stored layout."""
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, key in self._key.items():
            linear = self._linears[name]
            # S over sequences, A over uses: with both over positions the scale would be far below
            # that of the per-sequence diagonal, by about the length of a sequence.
            S = self.sums[f"S/{key}"] / count
            A = self.sums[f"A/{key}"] / max(int(self.sums[f"uses/{key}"]), 1)
            pairs[name] = (A, S) if linear.transposed else (S, A)
        return pairs


class CorrectedMoments(KroneckerMoments):
    """Kronecker factors first; then squares of gradients in the factors' eigenvectors.

    From ``turn`` on the sums hold Q_S and Q_A, an eigenvector a column, in place of S and A, and
    ``square`` adds up ``(Q_S^T g Q_A)^2``, g (d_out, d_in) the gradient of one sequence's summed
    log-likelihood.
    """

    def __init__(self, adapter: DecoderAdapter, scope: Scope) -> None:
        super().__init__(adapter, scope)
        for name in dict.fromkeys(self._key.values()):
            S, A = self.sums[f"S/{name}"], self.sums[f"A/{name}"]
            self.sums[f"square/{name}"] = torch.outer(S[0], A[0])
        self.sums["turned"] = torch.zeros((), dtype=torch.int64)

    def turn(self) -> None:
        """Put eigenvectors in place of the factors, once: the second pass begins."""
        if not self.sums["turned"]:
            for name, factor in self.sums.items():
                if name.startswith(("S/", "A/")):
                    factor.copy_(torch.linalg.eigh(factor.double()).eigenvectors)
            self.sums["turned"].fill_(1)

    @full_precision
    def add(self, log_likelihood: Tensor) -> None:
        """Add this sequence to the factors; after ``turn`` to the squares. Raises as the factors'.

        A gradient is the sum over all uses of a weight, squared as a whole.
        """
        if not self.sums["turned"]:
            super().add(log_likelihood)
            return
        gradients: dict[str, Tensor] = {}
        for use, (x, delta) in self._uses(log_likelihood):
            key = self._key[use.linear.weight_name]
            part = (delta @ self.sums[f"S/{key}"]).T @ (x @ self.sums[f"A/{key}"])
            gradients[key] = gradients[key] + part if key in gradients else part
        for key, gradient in gradients.items():
            self.sums[f"square/{key}"] += gradient.square()

    def corrected(self, count: int) -> tuple[dict[str, Tensor], ...]:
        """Left, right and eigenvalues, by weight in its stored layout; see ``influence``."""
        factors: tuple[dict[str, Tensor], ...] = {}, {}, {}
        for name, key in self._key.items():
            left, right = self.sums[f"S/{key}"], self.sums[f"A/{key}"]
            values = self.sums[f"square/{key}"] / count
            turned = self._linears[name].transposed
            factors[0][name], factors[1][name] = (right, left) if turned else (left, right)
            factors[2][name] = values.T if turned else values
        return factors


def _rows(use: LinearUse, error: Tensor | None) -> tuple[Tensor, Tensor]:
    """Input and error of one call as rows (uses, d_in), (uses, d_out), widened and checked."""
    name = use.linear.weight_name
    dtype = wide(use.linear.weight.dtype, use.s.dtype)
    delta = torch.zeros_like(use.s) if error is None else error.detach()
    x = use.x.to(dtype).reshape(-1, use.x.shape[-1])
    return (
        _finite(x, name, "input"),
        _finite(delta.to(dtype).reshape(-1, delta.shape[-1]), name, "output error"),
    )
