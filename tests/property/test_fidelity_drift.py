"""Drift: measures of two clouds by closed forms, and the whole diagnostic where nothing moved."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats

from alphatoken.data import collate
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.fidelity import drift
from alphatoken.fidelity.clouds import density_of, ellipse_of
from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.similarity import cka, cka_estimate, cosine, relative_shift
from alphatoken.fidelity.states import PooledStates, pooled_states
from alphatoken.fidelity.subject import Subject
from alphatoken.support.progress import Tracker
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.test_fidelity_coverage import rows_of

QUIET = Tracker("", 0, False)


def cloud(probes: int, size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((probes, size))


def turned(points: np.ndarray, seed: int) -> np.ndarray:
    return points @ stats.ortho_group.rvs(points.shape[1], random_state=seed)


# --- alignment -----------------------------------------------------------------------------------


def test_alignment_is_one_for_the_same_cloud_turned_scaled_and_moved():
    before = cloud(20, 7, 0) * np.arange(1, 8)
    for after in (before, turned(before, 1), 3 * turned(before, 2) + 5):
        assert cka(before, after) == pytest.approx(1.0, abs=1e-12)


def test_a_rotation_is_a_distance_that_alignment_does_not_see():
    before = cloud(20, 7, 3)
    found = drift.set_record(before, turned(before, 4))
    assert found["relative_shift"].low > 0.5
    assert found["cka_debiased"].value == pytest.approx(1.0, abs=1e-12)


def song(k: np.ndarray, q: np.ndarray) -> float:
    """The unbiased HSIC of Song et al. (2012), equation by equation."""
    n = len(k)
    k, q = k - np.diag(np.diag(k)), q - np.diag(np.diag(q))
    one = np.ones(n)
    first = np.trace(k @ q)
    second = (one @ k @ one) * (one @ q @ one) / ((n - 1) * (n - 2))
    third = 2 * (one @ k @ q @ one) / (n - 2)
    return (first + second - third) / (n * (n - 3))


def test_debiased_alignment_is_song_s_unbiased_hsic():
    x, y = cloud(11, 5, 7), cloud(11, 5, 8) + 0.3 * cloud(11, 5, 7)
    k, q = x @ x.T, y @ y.T
    wanted = song(k, q) / math.sqrt(song(k, k) * song(q, q))
    assert cka(x, y) == pytest.approx(wanted, rel=1e-10)


def test_unrelated_states_align_to_zero_on_average():
    # Twelve probes of forty dimensions, 200 independent pairs: z-test of the mean at 4 deviations.
    pairs = [(cloud(12, 40, 100 + i), cloud(12, 40, 900 + i)) for i in range(200)]
    debiased = np.array([cka(x, y) for x, y in pairs])
    error = debiased.std(ddof=1) / math.sqrt(len(debiased))
    assert abs(debiased.mean()) < 4 * error
    assert np.abs(debiased).max() <= 1.0


def test_the_interval_of_unrelated_states_holds_zero():
    inside = [
        estimate.low <= 0.0 <= estimate.high
        for i in range(40)
        for estimate in [cka_estimate(cloud(30, 10, i), cloud(30, 10, 500 + i))]
    ]
    assert sum(inside) >= 32


def test_few_probes_have_no_alignment():
    assert math.isnan(cka(cloud(3, 2, 0), cloud(3, 2, 1)))
    assert not cka_estimate(cloud(7, 2, 0), cloud(7, 2, 1)).defined
    assert math.isnan(cka(np.ones((9, 2)), cloud(9, 2, 1)))


# --- distances -----------------------------------------------------------------------------------


def test_nothing_moved_is_zero_everywhere():
    before = cloud(20, 5, 12)
    found = drift.set_record(before, before.copy())
    shift = found["relative_shift"]
    assert (shift.value, shift.low, shift.high) == (0.0, 0.0, 0.0)
    assert found["cosine"].value == pytest.approx(1.0, abs=1e-12)
    assert found["cka_debiased"].value == pytest.approx(1.0, abs=1e-12)


def test_shifts_by_hand():
    before, after = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[3.0, 4.0], [2.0, 0.0]])
    np.testing.assert_allclose(relative_shift(before, after), [0, math.sqrt(2)])
    np.testing.assert_allclose(cosine(before, after), [1, 0])
    assert math.isnan(relative_shift(np.zeros((1, 2)), np.ones((1, 2)))[0])
    with pytest.raises(InputError, match="one shape"):
        relative_shift(before, after[:1])


def test_what_all_probes_share():
    before = cloud(16, 4, 13)
    assert drift.shared_share(before, before + np.array([1, 2, 3, 4])) == pytest.approx(1.0)
    apart = np.concatenate([np.ones((8, 4)), -np.ones((8, 4))])
    assert drift.shared_share(before, before + apart) == pytest.approx(0.0)
    assert math.isnan(drift.shared_share(before, before))


def test_the_change_of_loss_is_per_token():
    def pooled(losses: list[float]) -> PooledStates:
        return PooledStates(
            ("head",), (np.ones((9, 1)),), np.array(losses), np.arange(1.0, 10), True
        )

    before, after = pooled([1.0] * 9), pooled([1.0] * 8 + [46.0])
    found = drift.loss_record(drift.Pair(before, after))
    assert found["loss_before"].value == pytest.approx(9 / 45)
    assert found["loss_change"].value == pytest.approx(1.0)


# --- states --------------------------------------------------------------------------------------


def test_pooled_states_are_means_over_their_tokens_whatever_the_padding():
    model = ReferenceDecoder(DecoderConfig(layers=3), seed=5)
    rows = rows_of([(2, 5), (4, 3), (1, 7)], 11)
    seen: list[torch.Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row.input_ids]))
    handle.remove()
    for pool in ("all", "prompt", "response"):
        found = pooled_states(model, [collate(rows, padding_side="left")], QUIET, pool=pool)
        assert found.places == ("layer 1", "layer 2", "layer 3", "head")
        for index, (row, state) in enumerate(zip(rows, seen, strict=True)):
            own = np.array(row.labels) != -100
            own[0] = False  # nothing predicts the first token
            chosen = {"all": np.ones_like(own), "prompt": ~own, "response": own}[pool]
            wanted = state[0][torch.from_numpy(chosen)].mean(0)
            np.testing.assert_allclose(found.states[1][index], wanted, atol=1e-12)
    assert found.tokens.tolist() == [row.response_tokens for row in rows]


def test_an_unknown_pool_is_refused():
    model = ReferenceDecoder(DecoderConfig(), seed=5)
    with pytest.raises(ConfigError, match="pool"):
        pooled_states(model, [collate(rows_of([(2, 3)], 11))], QUIET, pool="last")


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


def test_two_equal_models_have_not_drifted():
    subject = tiny_subject()
    same = copy.deepcopy(subject.model)
    found = drift.diagnose(tiny_subject(reference=same), drift.Options(probes=10))
    for record in found.table("drift-sets").records():
        assert record["relative_shift"] == 0.0
        assert record["cka_debiased"] == pytest.approx(1.0, abs=1e-12)
    for record in found.table("drift-losses").records():
        assert record["loss_change"] == 0.0
    assert all(r["cka_debiased"] > 1 - 1e-12 for r in found.table("drift-layers").records())
    places = found.figure("drift-map").data.records()
    assert len(places) == 2 * 20
    assert found.answer.number == "0.00 [0.00, 0.00]"


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


def three_models(**options) -> Diagnosis:
    """Before; "near", which is that model again; "far", which is not."""
    model = tiny_subject().model
    loads = {"near": lambda: copy.deepcopy(model), "far": lambda: moved(model, 3.0)}
    return drift.diagnose(tiny_subject(beside=loads), drift.Options(probes=10, **options))


@pytest.fixture(scope="module")
def three() -> Diagnosis:
    return three_models()


def test_the_model_alone_beside_others_is_the_one_before(three: Diagnosis):
    records = {(r["model"], r["set"]): r for r in three.table("drift-sets").records()}
    assert {model for model, _ in records} == {"near", "far"}
    for one in ("first", "second"):
        assert records["near", one]["relative_shift"] == 0.0
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


def test_the_last_model_is_compared_with_the_first(three: Diagnosis):
    """Near has not moved at all, so that the difference is what far has moved."""
    difference = three.table("numbers").records()[0]
    assert difference["number"] == "mean shift of a probe of first, far minus near"
    far = next(r for r in three.table("drift-sets").records() if r["model"] == "far")
    assert difference["value"] == pytest.approx(far["relative_shift"])
    assert difference["value_low"] > 0


def test_a_model_given_with_its_reference_goes_beside_others_by_its_label():
    model = tiny_subject().model
    subject = tiny_subject(
        model=moved(model, 0.5), reference=model, beside={"far": lambda: moved(model, 3.0)}
    )
    found = drift.diagnose(subject, drift.Options(probes=10, label="alphatoken"))
    shifts = {
        r["model"]: r["relative_shift"]
        for r in found.table("drift-sets").records()
        if r["set"] == "first"
    }
    assert 0 < shifts["alphatoken"] < shifts["far"]
    with pytest.raises(ConfigError, match="two models have one name"):
        drift.diagnose(subject, drift.Options(probes=10, label="far"))


def test_an_ellipse_holds_its_share_of_a_normal_cloud_and_touches_its_axes():
    """200,000 points: z-test of the share inside at 4 deviations."""
    mix = np.array([[2.0, 0.0], [1.5, 0.5]])
    points = cloud(200_000, 2, 3) @ mix.T + [5.0, -1.0]
    outline = ellipse_of(points)
    inverse = np.linalg.inv(mix @ mix.T)
    radii = np.einsum("ni,ij,nj->n", outline - [5.0, -1.0], inverse, outline - [5.0, -1.0])
    np.testing.assert_allclose(radii, stats.chi2(2).ppf(0.95), rtol=0.02)
    away = points - points.mean(0)
    inside = np.einsum("ni,ij,nj->n", away, inverse, away) <= radii.mean()
    error = math.sqrt(0.95 * 0.05 / len(points))
    assert abs(inside.mean() - 0.95) < 4 * error + 0.001
    flat = ellipse_of(np.stack([np.arange(9.0), np.zeros(9)], 1))
    assert np.abs(flat[:, 1]).max() < 1e-6


def test_a_density_has_unit_mass_and_none_is_made_of_one_point():
    at, height = density_of(cloud(400, 1, 5)[:, 0])
    assert np.trapezoid(height, at) == pytest.approx(1.0, abs=0.02)
    assert density_of(np.ones(5))[0].size == 0


def test_few_probes_give_no_number_and_say_so():
    found = drift.diagnose(tiny_subject(), drift.Options(probes=3, perplexity=2.0))
    record = found.table("drift-sets").records()[0]
    assert math.isnan(record["relative_shift"])
    assert found.answer.number == ""
    assert any("Too few probes" in note for note in found.notes)


def test_retention_rows_are_needed():
    with pytest.raises(DataError, match="retention"):
        drift.diagnose(tiny_subject(retention={}))


def test_a_probe_without_the_tokens_that_are_averaged_is_refused():
    rows = rows_of([(2, 6)] * 9, 11)
    rows[4] = type(rows[4])(rows[4].row, rows[4].input_ids, rows[4].input_ids)
    # Its first token is never valued, and is all the prompt that is left.
    found = pooled_states(tiny_subject().model, [collate(rows)], QUIET, pool="prompt")
    assert np.isfinite(found.states[0]).all()
    batch = collate(rows)
    batch["attention_mask"][4] = 0  # nothing but padding
    found = pooled_states(tiny_subject().model, [batch], QUIET, pool="prompt")
    assert np.isnan(found.states[0][4]).all()
    with pytest.raises(DataError, match="no state to average"):
        drift.check_finite("set", drift.Pair(found, found), "prompt")
