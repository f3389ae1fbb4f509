"""Drift: measures of two clouds by closed forms, and the whole diagnostic where nothing moved."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats

from alphatoken.data import collate
from alphatoken.diagnose import drift
from alphatoken.diagnose.clouds import head_states
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.figures import density_of, ellipse_of
from alphatoken.diagnose.subject import Subject
from alphatoken.errors import ConfigError, DataError
from alphatoken.support.progress import Tracker
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.rows import drawn_rows as rows_of

pytestmark = pytest.mark.usefixtures("few_draws")

QUIET = Tracker("", 0, False)


def cloud(probes: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((probes, size))


# --- distances -----------------------------------------------------------------------------------


def test_measures_by_hand():
    """Shifts in lengths of the state before; losses and their change a token."""
    before, after = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[3.0, 4.0], [2.0, 0.0]])
    np.testing.assert_allclose(drift.relative_shift(before, after), [0, math.sqrt(2)])
    assert math.isnan(drift.relative_shift(np.zeros((1, 2)), np.ones((1, 2)))[0])
    first, last = (
        {"states": np.ones((9, 1)), "losses": np.array([1.0] * 8 + [end])} for end in (1.0, 46.0)
    )
    record = drift.set_record(first, last, np.arange(1.0, 10))
    shift = record["relative_shift"]
    assert (shift.value, shift.low, shift.high) == (0.0, 0.0, 0.0)
    assert record["loss_before"].value == pytest.approx(9 / 45)
    assert record["loss_change"].value == pytest.approx(1.0)


# --- states --------------------------------------------------------------------------------------


def test_pooled_states_are_means_over_their_tokens_whatever_the_padding():
    model = ReferenceDecoder(DecoderConfig(layers=3), seed=5)
    rows = rows_of([(2, 5), (4, 3), (1, 7)], 11)
    found, place = head_states(model, [collate(rows)], QUIET, pooled=True)
    seen: list[torch.Tensor] = []
    handle = model.head.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row.input_ids]))
    handle.remove()
    for state, wanted in zip(found["states"], seen, strict=True):
        np.testing.assert_allclose(state, wanted[0].mean(0), atol=1e-12)
    assert place.startswith("what the output head reads")


# --- the whole -----------------------------------------------------------------------------------


def tiny_subject(**changes) -> Subject:
    rows = rows_of([(2, 5)] * 12, 11, seed=1)
    given = {
        "model": ReferenceDecoder(DecoderConfig(), seed=6).eval(),
        "train": rows,
        "validation": rows_of([(2, 4)] * 4, 11, seed=2),
        "retention": {
            "first": rows_of([(2, 6)] * 10, 11, seed=3),
            "second": rows_of([(3, 4), (5, 2)] * 5, 11, seed=4),
        },
        "batch_size": 4,
        "tuning_steps": 5,
    }
    return Subject(**{**given, **changes})


def test_a_tuned_copy_has_and_the_model_has_not():
    subject = tiny_subject(tuning_rate=1e-2)
    before = {name: p.clone() for name, p in subject.model.named_parameters()}
    found = drift.diagnose(subject, drift.Options(probes=10))
    assert all(r["relative_shift_low"] > 0 for r in found.table("drift-sets").records())
    assert all(torch.equal(p, before[name]) for name, p in subject.model.named_parameters())
    assert any("fine-tuned" in note for note in found.notes)
    assert found.settings["tuning_steps"] == 5


# --- several models in one space -----------------------------------------------------------------


def moved(model: ReferenceDecoder, size: float, seed: int = 0) -> ReferenceDecoder:
    """A copy with noise on its last block, whose states then move by a share of ``size``."""
    found = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.layers[-1].parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += size * parameter.std() * noise
    return found


@pytest.fixture(scope="module")
def three(few_draws: None) -> Diagnosis:
    """Before; "near", which is that model again; "far", which is not."""
    model = tiny_subject().model
    loads = {"near": lambda: copy.deepcopy(model), "far": lambda: moved(model, 3.0)}
    return drift.diagnose(tiny_subject(beside=loads), drift.Options(probes=10))


def test_the_model_alone_beside_others_is_the_one_before(three: Diagnosis):
    records = {(r["model"], r["set"]): r for r in three.table("drift-sets").records()}
    assert {model for model, _ in records} == {"near", "far"}
    for one in ("first", "second"):
        assert records["near", one]["relative_shift"] == records["near", one]["loss_change"] == 0.0
        assert records["far", one]["relative_shift_low"] > 0.1
    assert three.settings["tuning_steps"] is None
    assert three.notes[0] == "Before: the model given."


def test_all_models_lie_in_one_space(three: Diagnosis):
    """A model that has not moved lies where the one before lies, and one that has does not."""
    places = {
        (r["model"], r["set"], r["probe"]): (r["x"], r["y"])
        for r in three.figure("drift-map").data.records()
    }
    assert len(places) == 3 * 20
    every = np.array(list(places.values()))
    for one in ("first", "second"):
        before, near, far = (
            np.array([places[model, one, probe] for probe in range(10)])
            for model in ("before", "near", "far")
        )
        apart = np.linalg.norm(near - before, axis=1).mean()
        assert apart < 0.05 * every.std()
        assert np.linalg.norm(far - before, axis=1).mean() > 5 * apart


def test_the_space_is_fitted_once_a_set_on_every_model(monkeypatch: pytest.MonkeyPatch):
    seen: list[np.ndarray] = []

    def recorded(points: np.ndarray, **more) -> np.ndarray:
        seen.append(points)
        return points[:, :2]

    monkeypatch.setattr(drift, "picture_of", recorded)
    clouds = {name: cloud(7, 3, seed) for seed, name in enumerate(("before", "a", "b"))}
    found = drift.laid_out(clouds, seed=0)
    (points,) = seen
    np.testing.assert_array_equal(points, np.concatenate(list(clouds.values())))
    for name, own in clouds.items():
        np.testing.assert_array_equal(found[name], own[:, :2])


def test_a_model_given_with_its_reference_goes_beside_others_by_its_label():
    model = tiny_subject().model
    subject = tiny_subject(
        model=moved(model, 0.5), reference=model, beside={"far": lambda: moved(model, 3.0)}
    )
    found = drift.diagnose(subject, drift.Options(probes=10, label="alphatoken"))
    records = found.table("drift-sets").records()
    shifts = {r["model"]: r["relative_shift"] for r in records if r["set"] == "first"}
    assert 0 < shifts["alphatoken"] < shifts["far"]
    with pytest.raises(ConfigError, match="two models have one name"):
        drift.diagnose(subject, drift.Options(probes=10, label="far"))


def test_an_ellipse_holds_its_share_of_a_normal_cloud_and_touches_its_axes():
    """Against the quantile of chi^2_2, of 200,000 points."""
    mix = np.array([[2.0, 0.0], [1.5, 0.5]])
    points = cloud(200_000, 2, 3) @ mix.T + [5.0, -1.0]
    outline = ellipse_of(points)
    inverse = np.linalg.inv(mix @ mix.T)
    radii = np.einsum("ni,ij,nj->n", outline - [5.0, -1.0], inverse, outline - [5.0, -1.0])
    np.testing.assert_allclose(radii, stats.chi2(2).ppf(0.95), rtol=0.02)
    flat = ellipse_of(np.stack([np.arange(9.0), np.zeros(9)], 1))
    assert np.abs(flat[:, 1]).max() < 1e-6


def test_a_density_has_unit_mass_and_none_is_made_of_one_point():
    at, height = density_of(cloud(400, 1, 5)[:, 0])
    assert np.trapezoid(height, at) == pytest.approx(1.0, abs=0.02)
    assert density_of(np.ones(5))[0].size == 0


def test_few_probes_give_no_number_and_say_so():
    found = drift.diagnose(tiny_subject(), drift.Options(probes=3))
    record = found.table("drift-sets").records()[0]
    assert math.isnan(record["relative_shift"])
    assert found.conclusion == "How far states moved is not defined."
    assert any("Too few probes" in note for note in found.notes)


def test_states_that_are_not_finite_are_refused():
    model = tiny_subject().model
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.fill_(math.inf)
    with pytest.raises(DataError, match="not finite"):
        drift.diagnose(tiny_subject(reference=model), drift.Options(probes=10))
