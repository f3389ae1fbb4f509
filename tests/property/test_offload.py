"""A Fisher left on disk, and V that is never stored: the same bits, one matrix at a time."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import FisherDrift, Scorer, ScorerConfig, TokenValues, fit_fisher
from alphatoken.direction.algebra import precondition
from alphatoken.direction.drift_parts import ShardedDrift
from alphatoken.errors import ConfigError, FisherError, ModelError
from alphatoken.estimate.matrices import Formed
from alphatoken.support.storage import TensorFile, read_tensors, write_tensors
from tests.property.decoder import DecoderConfig, ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import (
    EVERY,
    LAMBDA,
    Setup,
    drift_of,
    parameters_of,
    quiet,
    setups,
    stepped,
)
from tests.property.strategies import make_case
from tests.property.test_sharded import FlatSharding, _kronecker

PRECONDITIONERS = (None, "given", "frozen", "full")


def fisher_of(setup: Setup, model: ReferenceDecoder, structure: str) -> FisherDrift:
    fisher = FisherDrift(*drift_of(setup, model))
    return _kronecker(setup, model, fisher) if structure == "kronecker" else fisher


def saved(fisher: FisherDrift, factory: pytest.TempPathFactory) -> Path:
    path = factory.mktemp("offload") / "fisher.safetensors"
    fisher.save(path)
    return path


def observed_values(scorer: Scorer, model: Any, batch: dict[str, Tensor]) -> TokenValues:
    with scorer.observe() as observed:
        logits = model(**{k: v for k, v in batch.items() if k != "labels"})
        return observed.values(logits, batch["labels"], components=False)


def same_bits(one: TokenValues, two: TokenValues) -> None:
    for name in ("total", "adaptation", "stability", "unassigned"):
        a, b = getattr(one, name), getattr(two, name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b), name
    assert one.balance == two.balance


def same_files(one: Path, two: Path) -> None:
    """Equal content; safetensors writes the header's entries in any order."""
    (first, told), (second, said) = read_tensors(one), read_tensors(two)
    assert told == said
    assert set(first) == set(second)
    assert all(torch.equal(t, second[name]) for name, t in first.items())


# --- the same values ------------------------------------------------------------------------------


@given(
    setup=setups(),
    estimator=st.sampled_from(EVERY),
    objective=st.sampled_from(["both", "stability"]),
    kind=st.sampled_from(PRECONDITIONERS),
    structure=st.sampled_from(["diagonal", "kronecker"]),
)
@example(
    setup=Setup(make_case(mlp="plain", tied_linears=True, layers=2)),
    estimator="alphatoken", objective="both", kind="full", structure="diagonal",
)  # fmt: skip
@example(
    setup=Setup(make_case(bias=True), score_bias=True),
    estimator="path", objective="both", kind="frozen", structure="diagonal",
)  # fmt: skip
@example(
    setup=Setup(make_case(transposed=True)),
    estimator="direct", objective="stability", kind=None, structure="kronecker",
)  # fmt: skip
@budget(0.5)
def test_values_are_the_same_to_the_bit(
    setup: Setup,
    estimator: str,
    objective: str,
    kind: str | None,
    structure: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """F, W_ref and V whole; F and W_ref on disk; V formed; all three, scored and observed."""
    if structure == "kronecker":
        setup = Setup(setup.case, setup.layers)  # no factors for biases there
    model, optimizer = stepped(setup, 2, "AdamW")
    fisher = fisher_of(setup, model, structure)
    path = saved(fisher, tmp_path_factory)
    parameters = parameters_of(setup, ReferenceAdapter(model))
    given_p = {n: x.square() for n, x in setup.case.directions(parameters, salt=5).items()}
    preconditioner: Any = given_p if kind == "given" else kind

    def scorer(retention: FisherDrift, offload: str) -> Scorer:
        config = ScorerConfig(
            estimator=estimator, objective=objective, layers=setup.layers, window=None,
            score_bias=setup.score_bias, stability_weight=LAMBDA, max_relative_drift=None,
            preconditioner=preconditioner, precondition_after=1, offload=offload,
        )  # fmt: skip
        return Scorer(model, setup.case.validation, retention, config, optimizer=optimizer)

    plain = scorer(fisher, "none")
    others = [
        scorer(FisherDrift.open(path), "none"),
        scorer(fisher, "stream"),
        scorer(FisherDrift.open(path), "stream"),
    ]
    batch = setup.case.batch
    with quiet():
        expected, alone = plain.score(batch), observed_values(plain, model, batch)
        for other in others:
            same_bits(other.score(batch), expected)
            same_bits(observed_values(other, model, batch), alone)
    streams = isinstance(others[-1].direction.stability, Formed)
    assert streams == (estimator != "label")  # forward mode moves all weights: V is built whole
    assert not isinstance(plain.direction.stability, Formed)


@given(setup=setups(), structure=st.sampled_from(["diagonal", "kronecker"]))
@budget(0.3)
def test_an_opened_fisher_is_the_loaded_one(
    setup: Setup, structure: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Entries, names, shapes, metadata, V, drift, checks, copies: all as ``load`` gives them."""
    model = setup.case.model()
    fisher = fisher_of(Setup(setup.case, setup.layers), model, structure)
    path = saved(fisher, tmp_path_factory)
    loaded, opened = FisherDrift.load(path), FisherDrift.open(path)
    assert (opened.streamed, loaded.streamed) == (True, False)
    assert opened.names == loaded.names == fisher.names
    assert opened.metadata == loaded.metadata
    assert opened.shapes == loaded.shapes == {n: w.shape for n, w in loaded.reference.items()}
    parameters = parameters_of(Setup(setup.case, setup.layers), ReferenceAdapter(model))
    expected = loaded.direction(parameters)
    assert all(torch.equal(v, expected[n]) for n, v in opened.direction(parameters).items())
    assert all(torch.equal(v, expected[n]) for n, v in opened.forming(parameters).items())
    assert opened.drift(parameters) == loaded.drift(parameters)
    assert opened.to("cpu") is opened
    again = path.with_name("again.safetensors")
    opened.save(again)
    same_files(again, path)
    with pytest.raises(FisherError, match="does not cover"):
        opened.forming({**parameters, "other.weight": torch.zeros(1)})


@pytest.mark.slow
@given(setup=setups(), structure=st.sampled_from(["diagonal", "kronecker"]))
@budget(0.3)
def test_sharded_parts_are_cut_from_the_file(
    setup: Setup, structure: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    setup = Setup(setup.case, setup.layers)
    model = setup.case.model()
    fisher = fisher_of(setup, model, structure)
    opened = FisherDrift.open(saved(fisher, tmp_path_factory))
    parameters = parameters_of(setup, ReferenceAdapter(model))
    one, two = (ShardedDrift(f, FlatSharding(model), parameters) for f in (fisher, opened))
    with reads() as seen:
        two = ShardedDrift(opened, FlatSharding(model), parameters)
    assert seen.most <= 1
    expected = one.direction()
    assert all(torch.equal(v, expected[n]) for n, v in two.direction().items())


# --- one matrix at a time -------------------------------------------------------------------------


class Reads:
    """Which entries were read, and how many of them were alive at once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.most = 0
        self._alive: list[weakref.ref[Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self.names.append(name)
        self._alive = [ref for ref in self._alive if ref() is not None] + [weakref.ref(tensor)]
        self.most = max(self.most, len(self._alive))


@contextmanager
def reads() -> Iterator[Reads]:
    """Watch what is read from files; the reading itself is the real one."""
    seen, real = Reads(), TensorFile.read

    def read(self: TensorFile, name: str) -> Tensor:
        tensor = real(self, name)
        seen.add(name, tensor)
        return tensor

    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFile, "read", read)
        yield seen


def deep() -> Setup:
    return Setup(make_case(layers=3))


def test_no_more_than_one_matrix_of_each_is_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Opening, building, contracting, the balance: F and W_ref of one parameter at a time."""
    setup = deep()
    model = setup.case.model()
    fisher = fisher_of(setup, model, "diagonal")
    path = saved(fisher, tmp_path_factory)
    config = ScorerConfig(
        estimator="alphatoken", layers="all", offload="stream", max_relative_drift=None,
    )  # fmt: skip
    with reads() as seen:
        opened = FisherDrift.open(path)
        checks = list(seen.names)
        scorer = Scorer(model, setup.case.validation, opened, config)
        built = len(seen.names)
        with quiet():
            scorer.score(setup.case.batch, components=False)
        contracted = seen.names[built:]
        with quiet():
            scorer.score(setup.case.batch)
    count = len(fisher.names)
    assert count > 9
    assert seen.most == 2  # F and W_ref of one parameter
    assert sorted(checks) == sorted(f"{kind}/{n}" for kind in ("fisher", "reference") for n in
                                    fisher.names)  # fmt: skip
    assert set(contracted) == set(checks)
    uses = 2  # a direct and a causal error
    assert len(contracted) <= uses * len(checks)


@pytest.mark.parametrize("whole", ["fisher", "reference"])
def test_the_watch_sees_what_is_held_whole(
    whole: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same count over an implementation that is not lazy: the test above can fail."""
    setup = deep()
    model = setup.case.model()
    path = saved(fisher_of(setup, model, "diagonal"), tmp_path_factory)
    with reads() as seen:
        held = dict(getattr(FisherDrift.open(path), whole))
    assert seen.most >= len(held) > 9


def test_v_is_formed_when_contracted_and_let_go(tmp_path_factory: pytest.TempPathFactory) -> None:
    setup = deep()
    model = setup.case.model()
    formed = fisher_of(setup, model, "diagonal").forming(
        parameters_of(setup, ReferenceAdapter(model))
    )
    name = next(iter(formed))
    assert formed[name] is not formed[name]
    assert torch.equal(formed[name], formed[name])
    assert not formed[name].requires_grad


def test_names_form_nothing() -> None:
    def form(name: str) -> Tensor:
        raise AssertionError(name)

    formed: Formed[Tensor] = Formed(["a", "b"], form)
    assert list(formed) == ["a", "b"]
    assert len(formed) == 2
    assert "a" in formed
    assert "c" not in formed
    assert "2 entries" in repr(formed)
    with pytest.raises(KeyError):
        formed["c"]
    assert isinstance(precondition(formed, {"a": torch.ones(1)}), Formed)
    assert precondition(formed, None) is formed


# --- the weights of V -----------------------------------------------------------------------------


def streaming(setup: Setup, model: ReferenceDecoder, offload: str = "stream") -> Scorer:
    fisher = FisherDrift(*drift_of(setup, setup.case.model()))
    config = ScorerConfig(
        estimator="direct", layers="all", offload=offload, max_relative_drift=None,
    )  # fmt: skip
    return Scorer(model, setup.case.validation, fisher, config)


def move(model: ReferenceDecoder, how: str) -> None:
    with torch.no_grad():
        for p in model.parameters():
            (p.data if how == "data" else p).mul_(1.01)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_v_of_weights_that_are_gone_is_refused(how: str) -> None:
    """Pinned over a step, eager keeps the earlier V; streaming says that it cannot."""
    setup = deep()
    model = setup.case.model()
    with quiet():
        for offload in ("none", "stream"):
            scorer = streaming(setup, model, offload)
            scorer.pin("a step")
            before = scorer.score(setup.case.batch)
            move(model, how)
            if offload == "none":
                scorer.score(setup.case.batch)
                continue
            with pytest.raises(ModelError, match="has changed since the direction was built"):
                scorer.score(setup.case.batch)
            scorer.pin("the next")
            found = scorer.score(setup.case.batch)
            assert not torch.equal(found.stability, before.stability)
            fresh = streaming(setup, model, "none").score(setup.case.batch)
            assert torch.equal(found.total, fresh.total)


def test_a_step_between_two_batches_is_followed_without_a_pin() -> None:
    setup = deep()
    model = setup.case.model()
    scorer = streaming(setup, model)
    with quiet():
        scorer.score(setup.case.batch)
        move(model, "in place")
        found = scorer.score(setup.case.batch)
        fresh = streaming(setup, model, "none").score(setup.case.batch)
    same_bits(found, fresh)


def test_weights_that_change_inside_observe_are_refused() -> None:
    setup = deep()
    model = setup.case.model()
    scorer = streaming(setup, model)
    batch = setup.case.batch
    with quiet(), scorer.observe() as observed:
        logits = model(**{k: v for k, v in batch.items() if k != "labels"})
        move(model, "data")
        with pytest.raises(ModelError, match="has changed since"):
            observed.values(logits, batch["labels"])


def test_retention_by_data_cannot_be_streamed() -> None:
    setup = deep()
    config = ScorerConfig(layers="all", offload="stream")
    with pytest.raises(ConfigError, match="needs a FisherDrift"):
        Scorer(setup.case.model(), setup.case.validation, [setup.case.batch], config)
    with pytest.raises(ConfigError, match="offload must be one of"):
        ScorerConfig(offload="disk")


# --- bad files ------------------------------------------------------------------------------------


def entries(**changed: Any) -> dict[str, Tensor]:
    tensors = {
        "fisher/a.weight": torch.ones(2, 3), "reference/a.weight": torch.zeros(2, 3),
        "fisher/b.weight": torch.ones(4), "reference/b.weight": torch.zeros(4),
    }  # fmt: skip
    tensors |= {name.replace("__", "/").replace("_weight", ".weight"): t for name, t in
                changed.items()}  # fmt: skip
    return {name: t for name, t in tensors.items() if t is not None}


DESCRIPTION = {
    "kind": "alphatoken Fisher drift", "format_version": "1", "structure": "diagonal",
    "names": '["a.weight", "b.weight"]', "metadata": "{}",
}  # fmt: skip

BAD: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "nan": ({"fisher__b_weight": torch.full((4,), float("nan"))}, {}, "b.weight.*NaN"),
    "infinite": ({"reference__a_weight": torch.full((2, 3), float("inf"))}, {}, "a.weight.*NaN"),
    "negative": ({"fisher__b_weight": torch.tensor([1.0, -1, 1, 1])}, {}, "negative"),
    "shape": ({"fisher__a_weight": torch.ones(3, 2)}, {}, "shape"),
    "integers": ({"fisher__a_weight": torch.ones(2, 3, dtype=torch.int64)}, {}, "floating-point"),
    "missing entry": ({"reference__b_weight": None}, {}, "reference/b.weight"),
    "kind": ({}, {"kind": "something else"}, "no Fisher that this version can read"),
    "metadata": ({}, {"metadata": "not json"}, "bad"),
    "version": ({}, {"format_version": "2"}, "no Fisher that this version can read"),
    "more names": ({}, {"names": '["a.weight", "c.weight"]'}, "bad"),
    "names": ({}, {"names": "["}, "incomplete or inconsistent"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("read", [FisherDrift.open, FisherDrift.load])
def test_a_bad_file_is_refused_by_both_readers(what: str, read: Any, tmp_path: Path) -> None:
    changed, described, message = BAD[what]
    path = tmp_path / "bad.safetensors"
    write_tensors(path, entries(**changed), {**DESCRIPTION, **described})
    with pytest.raises(FisherError, match=f"(?s){message}"):
        read(path)


def good(folder: Path) -> Path:
    path = folder / "good.safetensors"
    write_tensors(path, entries(), DESCRIPTION)
    return path


@given(place=st.integers(0, 10**9), cut=st.booleans())
@budget(1.0)
def test_a_file_cut_or_altered_anywhere_is_not_opened(
    place: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = good(tmp_path_factory.mktemp("altered"))
    content = path.read_bytes()
    place %= len(content)
    other = bytes([content[place] ^ 1])
    path.write_bytes(content[:place] + (b"" if cut else other + content[place + 1 :]))
    with pytest.raises(FisherError, match=r"good\.safetensors"):
        FisherDrift.open(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FisherError, match="nowhere"):
        FisherDrift.open(tmp_path / "nowhere")
    with pytest.raises(FisherError, match="cannot be read"):
        FisherDrift.open(tmp_path)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def _overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def _replaced(path: Path) -> None:
    write_tensors(path, entries(fisher__b_weight=torch.full((4,), 2.0)), DESCRIPTION)


@pytest.mark.parametrize("change", [_cut, _overwritten, _replaced, Path.unlink])
def test_a_file_that_changes_while_it_is_open_is_refused(change: Any, tmp_path: Path) -> None:
    path = good(tmp_path)
    opened = FisherDrift.open(path)
    weights = {"b.weight": torch.ones(4)}
    formed = opened.forming(weights)
    assert torch.equal(formed["b.weight"], torch.ones(4))
    kept = opened.fisher["b.weight"]
    change(path)
    for access in (lambda: formed["b.weight"], lambda: opened.reference["a.weight"]):
        with pytest.raises(FisherError, match=r"(?s)good\.safetensors.*(changed|No such)"):
            access()
    assert torch.equal(kept, torch.ones(4))  # what was read is in memory of its own


# --- fitted straight to disk ----------------------------------------------------------------------

SMALL = DecoderConfig(vocabulary=3, layers=2, hidden=4, head_dim=2, mlp_width=3, end_token=0)
PROMPTS = [torch.tensor([1]), torch.tensor([0, 2, 1])]


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_fitting_to_a_file_is_fitting_and_saving(structure: str, tmp_path: Path) -> None:
    def fit(**more: Any) -> FisherDrift:
        return fit_fisher(
            ReferenceDecoder(SMALL, 1), PROMPTS, samples=3, layers="all", max_new_tokens=3,
            structure=structure, **more,
        )  # fmt: skip

    fit().save(tmp_path / "one")
    found = fit(path=tmp_path / "two")
    assert found.streamed
    same_files(tmp_path / "one", tmp_path / "two")


def test_a_fit_that_cannot_be_written_keeps_its_checkpoint(tmp_path: Path) -> None:
    def fit(path: Path) -> FisherDrift:
        return fit_fisher(
            ReferenceDecoder(SMALL, 1), PROMPTS, samples=3, layers="all", max_new_tokens=3,
            checkpoint=tmp_path / "sums", checkpoint_every=2, path=path,
        )  # fmt: skip

    with pytest.raises(FisherError, match="could not be written"):
        fit(tmp_path / "no folder" / "fisher")
    assert (tmp_path / "sums").exists()
    assert fit(tmp_path / "fisher").streamed
    assert not (tmp_path / "sums").exists()
