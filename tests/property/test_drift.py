"""The Fisher drift as an object: V, names, layouts, files, refusals."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import AlphaTokenWarning, FisherDrift, Scorer, ScorerConfig
from alphatoken.direction.drift import check_distance
from alphatoken.errors import FisherError
from alphatoken.support.storage import write_tensors
from tests.property.profiles import budget
from tests.property.setups import refusal
from tests.property.strategies import SEEDS, make_case
from tests.property.tolerance import close

EXACT = 1e-14


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def made(seed: int, structure: str) -> tuple[FisherDrift, dict[str, Tensor], dict[str, Tensor]]:
    """(drift, current weights, V by loops) of a linear and a Conv1D; on the diagonal of a bias too.

    The two matrices have one shape, so that a name or a side taken for another still multiplies.
    """
    names = ("a.weight", "b.weight", *(["a.bias"] if structure == "diagonal" else []))
    shapes = {"a.weight": (3, 3), "b.weight": (3, 3), "a.bias": (3,)}
    weights = {n: numbers(seed + i, *shapes[n]) for i, n in enumerate(names)}
    reference = {n: w + 0.1 * numbers(seed + 10 + i, *w.shape)
                 for i, (n, w) in enumerate(weights.items())}  # fmt: skip
    away = {n: weights[n] - reference[n] for n in names}
    if structure == "diagonal":
        fisher = {n: numbers(seed + 20 + i, *shapes[n]).square() for i, n in enumerate(names)}
        v = {n: fisher[n] * away[n] for n in names}
        return FisherDrift(fisher, reference), weights, v
    factors = {}
    for i, n in enumerate(names):
        pair = [numbers(seed + 30 + 2 * i + j, 3, 3) for j in range(2)]
        factors[n] = (pair[0] @ pair[0].T, pair[1] @ pair[1].T)
    v = {
        "a.weight": factors["a.weight"][0] @ away["a.weight"] @ factors["a.weight"][1],
        # stored (d_in, d_out): S_F acts on its columns
        "b.weight": (factors["b.weight"][0] @ away["b.weight"].T @ factors["b.weight"][1]).T,
    }
    factors["b.weight"] = factors["b.weight"][::-1]
    return FisherDrift({}, reference, factors=factors), weights, v


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    assert set(found) == set(expected)
    for n, v in expected.items():
        close(found[n], v, v.abs().max() + 1.0, EXACT, name=f"{name} {n}")


def _refused(run: Callable[[], object], word: str) -> bool:
    error = refusal(run)
    assert error is None or word in str(error), str(error)
    return error is not None


STRUCTURES = st.sampled_from(["diagonal", "kronecker"])


@given(SEEDS, STRUCTURES)
@budget(0.5)
def test_v_is_the_definition(seed: int, structure: str) -> None:
    """V = F o (W - W_ref), or S_F (W - W_ref) A_F in the weight's own layout; 0 at W_ref.

    Proves: eqs. gproxy, V_layer (exact), against loops.
    """
    drift, weights, v = made(seed, structure)
    assert not _refused(lambda: drift.direction(weights), "")
    compare(drift.direction(weights), v, structure)
    compare(drift.to("cpu").direction(weights), v, f"{structure}, of a copy")
    at = {name: drift.reference[name] for name in drift.names}
    assert not any(bool(x.any()) for x in drift.direction(at).values())


@pytest.mark.parametrize(
    ("of_fisher", "of_model"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")],
)
def test_a_drift_that_is_rounding_is_said(of_fisher: str, of_model: str) -> None:
    """Between two dtypes at the start, and not once training has moved the weights farther.

    Proves: a drift that is rounding is said (exact), against the warnings that are given.
    """
    case = make_case(("pprrr",), (("pprr",),), layers=1)
    model = case.model().float()
    config = ScorerConfig("label", layers=1)
    weights = Scorer(model, case.validation, config=config).parameters
    exact = {name: weight.detach().clone() for name, weight in weights.items()}

    def said(reference: str, now: str, *, moved: float = 0.0) -> list[str]:
        held = {name: weight.to(getattr(torch, reference)) for name, weight in exact.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_((exact[name] * (1 + moved)).to(getattr(torch, now)))
                weight.data = weight.data.to(getattr(torch, now))
        drift = FisherDrift({name: torch.ones_like(weight) for name, weight in held.items()}, held)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", AlphaTokenWarning)
            Scorer(model, case.validation, drift, config)
            Scorer(model, case.validation, drift, config, masters=lambda _, weight: weight)
        return [str(one.message) for one in given if "mostly rounding" in str(one.message)]

    texts = said(of_fisher, of_model)
    assert len(texts) == 1
    assert f"weights are {of_fisher} and the model's {of_model}" in texts[0]
    assert not said(of_fisher, of_model, moved=0.03)
    assert not said(of_model, of_model)


@given(SEEDS, STRUCTURES)
@budget(0.2)
def test_files_give_the_same_drift(seed: int, structure: str) -> None:
    """Saved and loaded: the same V, to the bit.

    Proves: files give the same drift (exact), against the drift that was saved, bit by bit.
    """
    drift, weights, v = made(seed, structure)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fisher.safetensors"
        drift.save(path)
        loaded: list[FisherDrift] = []
        # A file that the library refuses is no such file either.
        assert refusal(lambda: loaded.append(FisherDrift.load(path))) is None
        (again,) = loaded
    found, expected = again.direction(weights), drift.direction(weights)
    compare(found, v, f"{structure}, from a file")
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert again.structure == structure


@given(SEEDS, st.floats(0.0, 1.0))
@budget(0.5)
def test_drift_is_the_relative_distance(seed: int, most: float) -> None:
    """||W - W_ref|| / ||W_ref||, and a median above the limit is refused.

    Proves: drift is the relative distance (exact), against norms.
    """
    drift, weights, _ = made(seed, "diagonal")
    found = drift.drift(weights)
    for name, weight in weights.items():
        reference = drift.reference[name]
        expected = float((weight - reference).norm() / reference.norm())
        # taken in float32, of weights that are ten times as large as their difference
        close(found[name], expected, 1.0 + expected, 1e-6, name="relative drift")
    middle = sorted(found.values())[1]
    assert _refused(lambda: check_distance(found, most), "too far") == (middle > most)
    assert not _refused(lambda: check_distance(found, None), "")


@given(SEEDS, STRUCTURES)
@budget(0.2)
def test_a_fisher_of_something_else_is_refused(seed: int, structure: str) -> None:
    """Missing parameters, other shapes, another architecture: no retention is made of them.

    Proves: a fisher of something else is refused (exact), against refusals.
    """
    drift, weights, _ = made(seed, structure)
    more = {**weights, "c.weight": numbers(seed, 3, 3)}
    other = {**weights, "a.weight": numbers(seed, 3, 1)}
    assert _refused(lambda: drift.direction(more), "does not cover")
    assert _refused(lambda: drift.direction(other), "another shape")
    kept = {"depth": "2", "width": "8"}
    named = FisherDrift(drift.fisher, drift.reference, {"model": kept}, drift.factors)
    assert not _refused(lambda: named.check_identity(kept), "")
    assert _refused(lambda: named.check_identity({**kept, "width": "9"}), "width: 8 in the Fisher")
    assert _refused(lambda: named.check_identity({"depth": "2"}), "another architecture")


def entries(**changed: Any) -> dict[str, Tensor]:
    tensors = {
        "fisher/a.weight": torch.ones(2, 3), "reference/a.weight": torch.zeros(2, 3),
        "fisher/b.weight": torch.ones(4), "reference/b.weight": torch.zeros(4),
    }  # fmt: skip
    return tensors | {
        name.replace("__", "/").replace("_weight", ".weight"): t for name, t in changed.items()
    }


DESCRIPTION = {
    "kind": "alphatoken Fisher drift", "format_version": "1", "structure": "diagonal",
    "names": '["a.weight", "b.weight"]', "metadata": "{}",
}  # fmt: skip

BAD: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "nan": ({"fisher__b_weight": torch.full((4,), float("nan"))}, {}, "b.weight.*NaN"),
    "infinite": ({"reference__a_weight": torch.full((2, 3), float("inf"))}, {}, "a.weight.*NaN"),
    "negative": (
        {"fisher__b_weight": torch.tensor([1.0, -1, 1, 1])},
        {},
        "'b.weight' has a negative",
    ),
    "shape": ({"fisher__a_weight": torch.ones(3, 2)}, {}, "Fisher of 'a.weight'"),
    "integers": ({"fisher__a_weight": torch.ones(2, 3, dtype=torch.int64)}, {}, "floating-point"),
    "kind": ({}, {"kind": "something else"}, "no Fisher that this version can read"),
    "version": ({}, {"format_version": "2"}, "no Fisher that this version can read"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused(what: str, tmp_path: Path) -> None:
    changed, described, message = BAD[what]
    path = tmp_path / "bad.safetensors"
    write_tensors(path, entries(**changed), {**DESCRIPTION, **described})
    with pytest.raises(FisherError, match=f"(?s){message}"):
        FisherDrift.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FisherError, match="nowhere"):
        FisherDrift.load(tmp_path / "nowhere")
    with pytest.raises(FisherError, match="cannot be read"):
        FisherDrift.load(tmp_path)
