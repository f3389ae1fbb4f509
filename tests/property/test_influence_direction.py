"""Influence directions: the factors of K, the solve with it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import (
    FisherDrift,
    InfluenceFactors,
    Scorer,
    ScorerConfig,
    fit_fisher,
    fit_influence,
)
from alphatoken.errors import ConfigError, FisherError, UnsupportedError
from alphatoken.oracle import composite
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    EVERY,
    MODEL,
    Setup,
    make_scorer,
    oracle_influence,
    parameters_of,
    quiet,
    quiet_score,
    setups,
    truth,
)
from tests.property.strategies import SEEDS, make_case
from tests.property.test_direction import absolute_gradient
from tests.property.test_fisher import Interrupt, gradient_of_drawn_labels, stop_at
from tests.property.test_sharded import FlatSharding
from tests.property.tolerance import close

SQUARE = Setup(
    make_case(("pprrr",), (("pprr",), ("prrrr",)), hidden=4, head_dim=2, mlp_width=4, layers=2), 2
)
"""All maps as wide as they are high, so that no exchange of sides shows by a shape."""
TURNED = Setup(make_case(("pprrr",), (("pprr",),), transposed=True, repeated_linear=True))
TOKENS = 3
"""Response tokens of each of the two training rows."""


def linears() -> st.SearchStrategy[Setup]:
    """Setups without a window of one position, which would leave queries without a gradient."""
    windows = st.sampled_from([(None,), (3, None)])
    return setups(windows=windows)


def training_rows(setup: Setup) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(setup.case.seed)
    ids = torch.randint(setup.case.config.vocabulary, (2, 2 + TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def fitted(
    setup: Setup, model: ReferenceDecoder, samples: int = 3, **more: Any
) -> InfluenceFactors:
    rows, layers = training_rows(setup), setup.layers
    return fit_influence(model, rows, samples=samples, layers=layers, seed=7, **more)


def dense(setup: Setup, model: ReferenceDecoder, factors: InfluenceFactors) -> dict[str, Tensor]:
    """K of each weight from autograd's gradients of the labels that the fit draws."""
    weights = parameters_of(setup, ReferenceAdapter(model))
    ids, samples = training_rows(setup)["input_ids"], int(factors.metadata["samples"])
    each = [gradient_of_drawn_labels(model, ids[i % 2], i, 7, weights) for i in range(samples)]
    return {
        n: composite.corrected_fisher(
            factors.left[n], factors.right[n], [g[n] for g in each], samples * TOKENS
        )
        for n in weights
    }


@given(linears(), st.sampled_from([0.1, 3.0]), st.integers(1, 3))
@example(SQUARE, 0.1, 3)
@example(TURNED, 0.1, 2)
@budget(0.2)
def test_influence_direction_is_the_dense_solve(setup: Setup, damping: float, samples: int) -> None:
    """M = (K + mu)^-1 (G + lambda V), K the Fisher of the mean token loss in the factors'
    eigenvectors, mu the given share of its mean eigenvalue in the same linear.

    Proves: influence direction is the dense solve (exact), against ``corrected_fisher``,
    ``damped_solve``.
    """
    model = setup.case.model()
    factors = fitted(setup, model, samples)
    options = {"preconditioner": "kronecker", "damping": damping, "influence": factors}
    found = make_scorer(setup, "path", model=model, **options).direction
    weights = parameters_of(setup, ReferenceAdapter(model))
    size = absolute_gradient(model, setup.case.validation, weights)
    gain, keep = truth(setup).directions
    assert found.stability is not None
    for name, K in dense(setup, model, factors).items():
        # The largest eigenvalue of (K + mu)^-1 is 1 / mu.
        most = len(K) ** 0.5 / (damping * K.trace() / len(K))
        for side, m, terms in (
            (found.adaptation, gain, size[name]), (found.stability, keep, keep[name].abs()),
        ):  # fmt: skip
            expected = composite.damped_solve(K, m[name], damping)
            close(side[name], expected, terms.max() * most, MODEL, name=f"M of {name}")


@given(linears(), SEEDS)
@example(SQUARE, 0)
@example(TURNED, 0)
@budget(0.1)
def test_eigenvectors_are_those_of_the_factors(setup: Setup, seed: int) -> None:
    """Orthonormal, and S_F and A_F are diagonal in them.

    Proves: eigenvectors are those of the factors (exact), against the factors in their
    eigenvectors.
    """
    model, rows = setup.case.model(), training_rows(setup)
    options: dict[str, Any] = {"samples": 3, "layers": setup.layers, "seed": seed}
    found = fit_influence(model, rows, **options)
    fisher = fit_fisher(model, rows, structure="kronecker", labels="token", **options)
    assert set(found.eigenvalues) == set(fisher.names)
    for name, factors in fisher.factors.items():
        for q, factor in zip((found.left[name], found.right[name]), factors, strict=True):
            close(q.T @ q, torch.eye(len(q)), 1.0, MODEL, name="orthonormal")
            turned = q.T @ factor @ q
            close(turned, turned.diagonal().diag(), factor.trace(), MODEL, name="diagonal")


@given(linears())
@example(SQUARE)
@budget(0.1)
def test_identity_factors_and_large_damping(setup: Setup) -> None:
    """K = 1 gives G (over 1 + mu); mu to infinity gives G over mu.

    Proves: identity factors and large damping (exact), against G itself.
    """
    model = setup.case.model()
    plain = make_scorer(setup, "path", model=model).direction
    fit = fitted(setup, model)
    identity = InfluenceFactors(
        *({n: torch.eye(len(q), dtype=q.dtype) for n, q in side.items()}
          for side in (fit.left, fit.right)),
        {n: torch.ones_like(values) for n, values in fit.eigenvalues.items()},
    )  # fmt: skip

    def direction(factors: InfluenceFactors, damping: float) -> dict[str, Tensor]:
        options = {"preconditioner": "kronecker", "damping": damping, "influence": factors}
        return make_scorer(setup, "path", model=model, **options).direction.adaptation

    none, one, large = direction(identity, 0.0), direction(identity, 1.0), direction(fit, 1e12)
    for name, g in plain.adaptation.items():
        assert torch.equal(none[name], g)
        assert torch.equal(one[name], g / 2)
        mu = 1e12 * fit.eigenvalues[name].mean()
        close(mu * large[name], g, g.norm() + 1e-300, 1e-10 + g.numel() / 1e12, name="G over mu")


@given(linears(), st.sampled_from(EVERY))
@example(SQUARE, "alphatoken")
@budget(0.2)
def test_values_along_influence_directions(setup: Setup, estimator: str) -> None:
    """Every estimator contracts both sides of M as a retention term that is M entry by entry.

    Proves: values along influence directions (exact), against ``exact_influence``, a retention term
    that is M.
    """
    model, batch = setup.case.model(), setup.case.batch
    options = {"preconditioner": "kronecker", "influence": fitted(setup, model)}
    scorer = make_scorer(setup, estimator, model=model, **options)
    values, m = quiet_score(scorer, batch), scorer.direction
    weights = parameters_of(setup, ReferenceAdapter(model))
    assert m.stability is not None
    for found, side in ((values.adaptation, m.adaptation), (values.stability, m.stability)):
        # V = f (W - W_ref), W_ref so far away that W itself is beside it as good as rounding.
        f = 1e-3 * max(float(x.abs().max()) for x in side.values())
        drift = FisherDrift(
            {n: torch.full_like(w, f, requires_grad=False) for n, w in weights.items()},
            {n: w.detach() - side[n] / f for n, w in weights.items()},
        )
        config = replace(scorer.config, preconditioner=None)
        known = quiet_score(Scorer(model, setup.case.validation, drift, config), batch)
        size = oracle_influence(setup, model, side).absolute_scale.sum()
        close(found, known.stability, size, MODEL, name=f"{estimator} along M")


def test_influence_of_reduced_gradients() -> None:
    """Under DDP: each process has the factors, and G is reduced before K is solved.

    Proves: influence of reduced gradients (exact), against one process with all batches.
    """
    model, data = SQUARE.case.model(), SQUARE.case.validation
    factors = fitted(SQUARE, model)
    assert all(
        torch.equal(t, other.eigenvalues[n])
        for other in (fitted(SQUARE, SQUARE.case.model()),)
        for n, t in factors.eigenvalues.items()
    )
    config = ScorerConfig("path", layers=2, preconditioner="kronecker")
    whole = Scorer(model, data, None, config, influence=factors).direction.adaptation
    sent: list[tuple[dict[str, Tensor], float]] = []

    def reduce(role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        sent.append(({n: s.clone() for n, s in sums.items()}, count))
        total = sum(tokens for _, tokens in sent)
        return {n: torch.stack([g[n] for g, _ in sent]).sum(0) / total for n in sums}

    for part in data:
        scorer = Scorer(model, [part], None, config, reduce=reduce, influence=factors)
        found = scorer.direction.adaptation
    assert len(sent) == 2
    for name, m in whole.items():
        close(found[name], m, m.abs().max(), MODEL, name="reduced M")


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])  # by errors, and along M
def test_the_certificate_solves_again(estimator: str) -> None:
    model = TURNED.case.model()
    options = {"preconditioner": "kronecker", "influence": fitted(TURNED, model)}
    scorer = make_scorer(TURNED, estimator, model=model, **options)
    with quiet():
        found = scorer.verify(TURNED.case.batch, tokens=2)
    assert found.passed, str(found)


def same(first: InfluenceFactors, second: InfluenceFactors) -> bool:
    return first.metadata == second.metadata and all(
        torch.equal(tensor, getattr(second, part)[name])
        for part in ("left", "right", "eigenvalues")
        for name, tensor in getattr(first, part).items()
    )


def test_an_interrupted_influence_fit_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """In either pass, and between the two; and a file gives back what was fitted."""
    model, path = TURNED.case.model(), tmp_path / "sums.safetensors"
    whole = fitted(TURNED, model, 4)
    # The first pass has four samples: within it, at its end, where the second begins, at the end.
    for stop, every in ((1, 1), (2, 3), (4, 1), (5, 3), (8, 1), (8, 3)):
        with pytest.raises(Interrupt):
            fitted(
                TURNED, model, 4, progress=stop_at(stop), checkpoint=path, checkpoint_every=every
            )
        assert path.exists() == (stop >= every)
        assert same(whole, fitted(TURNED, model, 4, checkpoint=path))
        path.unlink(missing_ok=True)
    whole.save(path)
    assert same(whole, InfluenceFactors.load(path))
    with pytest.raises(FisherError, match="no Fisher that this version can read"):
        FisherDrift.load(path)
    fit_fisher(model, training_rows(TURNED), samples=1).save(path)
    with pytest.raises(FisherError, match="holds no influence factors"):
        InfluenceFactors.load(path)


def test_what_influence_directions_cannot_do_is_refused() -> None:
    model = SQUARE.case.model()
    factors, last = fitted(SQUARE, model), fitted(replace(SQUARE, layers=1), model)
    other = replace(factors, metadata={"model": {"class": "another"}})
    flat = {n: torch.zeros_like(values) for n, values in factors.eigenvalues.items()}
    config = ScorerConfig("path", layers=2, preconditioner="kronecker")

    def make(config: ScorerConfig = config, **more: Any) -> Scorer:
        return Scorer(model, SQUARE.case.validation, None, config, **more)

    for more, error, message in (
        ({}, ConfigError, "go together"),
        ({"influence": factors, "config": replace(config, preconditioner=None)}, ConfigError,
         "go together"),
        ({"influence": last}, FisherError, "do not fit every scored parameter"),
        ({"influence": other}, FisherError, "another architecture"),
        ({"influence": factors, "sharding": FlatSharding(model)}, UnsupportedError, "DDP"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            make(**more)  # type: ignore[arg-type]
    with pytest.raises(FisherError, match=r"has no inverse.*B is zero"):
        _ = make(influence=replace(factors, eigenvalues=flat)).direction
