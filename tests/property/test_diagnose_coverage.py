"""Coverage: clouds, entropies and pictures whose right answer is known; states of real decoders."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from alphatoken.config import ScorerConfig
from alphatoken.data import collate
from alphatoken.diagnose import coverage
from alphatoken.diagnose.clouds import clusters_of, entropy, head_states, picture_of
from alphatoken.diagnose.subject import Subject
from alphatoken.diagnose.valuing import with_estimator
from alphatoken.errors import ConfigError, InputError
from alphatoken.model.protocol import find_adapter
from alphatoken.support.progress import Tracker
from tests.property.architectures import ARCHITECTURES
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.rows import drawn_rows as rows_of
from tests.rows import renumbered

pytestmark = pytest.mark.usefixtures("few_draws")

QUIET = Tracker("", 0, False)
LABELS = np.repeat([0, 1], 60)


# --- clouds --------------------------------------------------------------------------------------


def test_entropy_is_one_when_even_and_zero_in_one_cluster():
    assert entropy(np.array([0, 1, 2, 3] * 5), 4) == pytest.approx(1.0, abs=1e-12)
    assert entropy(np.zeros(9, dtype=int), 4) == 0.0
    assert entropy(np.array([0, 0, 0, 1]), 2) == pytest.approx(
        -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)), abs=1e-12
    )
    assert math.isnan(entropy(np.array([], dtype=int), 4))


def test_known_clusters_are_found_and_lie_apart_in_the_picture():
    """Gaussian clouds around 0 and around a point 30 away."""
    labels = LABELS
    points = np.random.default_rng(0).standard_normal((120, 6))
    points[:, 0] += 30 * labels
    found = clusters_of(points, 2, seed=0)
    assert len({(a, b) for a, b in zip(found.tolist(), labels.tolist(), strict=True)}) == 2
    places = picture_of(points, seed=0)
    distances = np.linalg.norm(places[:, None] - places[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (labels[distances.argmin(1)] == labels).all()
    centres = [places[labels == label].mean(0) for label in (0, 1)]
    radii = [
        np.linalg.norm(places[labels == label] - centre, axis=1).max()
        for label, centre in zip((0, 1), centres, strict=True)
    ]
    assert np.linalg.norm(centres[0] - centres[1]) > sum(radii)


def test_the_picture_is_a_function_of_points_and_seed_and_copes_with_few(
    monkeypatch: pytest.MonkeyPatch,
):
    points = np.random.default_rng(2).standard_normal((40, 5))
    np.testing.assert_array_equal(picture_of(points, seed=3), picture_of(points, seed=3))
    assert picture_of(points[:4], seed=0).shape == (4, 2)
    assert picture_of(points[:, :1], seed=0).shape == (40, 2)
    assert np.isfinite(picture_of(np.zeros((6, 3)), seed=0)).all()
    for cloud, cause in ((points[:3], "4 points"), (np.full((5, 2), np.nan), "not finite")):
        with pytest.raises(InputError, match=cause):
            picture_of(cloud, seed=0)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"alphatoken\[diagnose\]"):
        picture_of(np.zeros((9, 2)), seed=0)


# --- what a selection covers -------------------------------------------------------------------


def test_the_band_holds_random_selections_and_not_one_cluster():
    low, high = coverage.band_of(LABELS, 60, 300, seed=1)
    assert 0.0 < low <= high
    assert "less even than" in coverage._conclusion({"direct": 0.0}, (low, high))
    generator = np.random.default_rng(99)
    inside = sum(low <= entropy(generator.permutation(LABELS)[:60], 2) <= high for _ in range(100))
    assert inside >= 86  # of 100 at 95 %: 4 standard deviations


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(),
        DecoderConfig(norm="layernorm", bias=True, positions="learned", layers=3),
        DecoderConfig(repeated_block=True, tied_embeddings=True),
        DecoderConfig(norm="none", fused_qkv=True, transposed=True),
    ],
    ids=repr,
)
def test_states_are_what_the_head_reads_where_a_token_is_predicted(config: DecoderConfig):
    model = ReferenceDecoder(config, seed=1).train()
    rows = rows_of([(2, 5), (4, 3), (1, 7)], config.vocabulary)
    found, place = head_states(model, [collate(rows)], QUIET, pooled=False)
    logits = F.linear(torch.from_numpy(found["states"]), model.head.weight)
    losses = F.cross_entropy(logits, labels_of(rows), reduction="none")
    np.testing.assert_allclose(losses.detach().numpy(), found["losses"], rtol=1e-12)
    assert place.startswith("what the output head reads")
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def labels_of(rows):
    return torch.tensor([t for row in rows for t in row.labels if t != -100])


@pytest.mark.parametrize("family", ARCHITECTURES, ids=lambda family: family.name)
def test_the_head_is_found_on_every_family(family):
    model = family.build(3)
    rows = rows_of([(2, 5), (3, 4)], 23)
    found, place = head_states(model, [collate(rows)], QUIET, pooled=False)
    assert place.startswith("what the output head reads")
    head = model.get_output_embeddings()
    with torch.no_grad():
        logits = head(torch.from_numpy(found["states"]))
    cap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model.config, "logit_scale", 1.0) / getattr(model.config, "logits_scaling", 1.0)
    logits = logits * scale if cap is None else cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, labels_of(rows), reduction="none")
    np.testing.assert_allclose(losses.numpy(), found["losses"], rtol=1e-5, atol=1e-5)
    assert len(find_adapter(model).layers()) == family.depth


# --- the picture ---------------------------------------------------------------------------------


def test_the_picture_is_fitted_on_what_some_policy_keeps_and_on_nothing_else(monkeypatch):
    """The quarters of lowest and of highest loss are disjoint: half of the candidates."""
    seen: list[np.ndarray] = []

    def recorded(points: np.ndarray, **more) -> np.ndarray:
        seen.append(points)
        return points[:, :2]

    monkeypatch.setattr(coverage, "picture_of", recorded)
    rows = renumbered(rows_of([(2, 6)] * 10, 11, seed=1))
    subject = Subject(
        ReferenceDecoder(DecoderConfig(), seed=6).eval(), rows, rows_of([(2, 4)] * 4, 11, seed=2),
        batch_size=4, ratio=0.25,
    )  # fmt: skip
    options = coverage.Options(clusters=3, draws=20, policies=("low-perplexity", "high-perplexity"))
    found = coverage.diagnose(subject, options)
    (points,) = seen
    records = found.figure("coverage-map").data.records()
    assert len(points) == len(records) == 30  # of 60
    assert {r["row"] for r in records} <= {row.row.index for row in rows}
    assert max(r["row"] for r in records) > 10, "numbers of the file, not places of the sample"
    assert all(r["low-perplexity"] != r["high-perplexity"] for r in records)
    low = [r["loss"] for r in records if r["low-perplexity"]]
    high = [r["loss"] for r in records if r["high-perplexity"]]
    assert len(low) == len(high) == 15
    assert max(low) < min(high)
    np.testing.assert_array_equal(points[:, 0], [r["x"] for r in records])
    assert any("30 of 60; it shows 30" in note for note in found.notes)


def test_settings_that_an_estimator_does_not_allow_fall_back():
    config = ScorerConfig(part="causal", window=8)
    assert with_estimator(config, "label").part == "both"
    assert with_estimator(config, "direct").part == "both"
    assert with_estimator(config, "paper_literal").part == "causal"
    everything = ScorerConfig(estimator="label", parameters="all")
    assert with_estimator(everything, "alphatoken").parameters == "linears"
    assert with_estimator(config, "label").window == 32, "the default: it has none"
    differences = ScorerConfig(estimator="label", derivative="central")
    assert with_estimator(differences, "path").derivative == "auto"
