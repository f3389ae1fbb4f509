"""The running mean against its closed form, and its two exact cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.errors import ConfigError, InputError, NumericalError
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.running import RunningMean
from tests.unhooked import unhooked

Plain = unhooked("alphatoken.train.running").RunningMean

DECAYS = st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.99, 1 - 1e-7))
SHAPES = {"layer.0.weight": (3, 4), "layer.1.bias": (5,), "scale": ()}


def gradients(count: int, seed: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in SHAPES.items()
        }
        for _ in range(count)
    ]


def closed_form(given: list[Tensor], decay: float) -> tuple[Tensor, Tensor]:
    """``sum d^(t-i) g_i / sum d^(t-i)``, and the same of the absolute terms."""
    weights = [decay ** (len(given) - 1 - i) for i in range(len(given))]
    terms = [w * g / sum(weights) for w, g in zip(weights, given, strict=True)]
    return sum(terms, torch.zeros(())), sum((t.abs() for t in terms), torch.zeros(()))


@given(DECAYS, st.integers(1, 30), st.integers(0, 2**16))
def test_it_is_the_closed_form(decay: float, count: int, seed: int) -> None:
    given_ = gradients(count, seed)
    running = RunningMean(decay)
    for step, gradient in enumerate(given_, start=1):
        mean = running.update(gradient)
        for name in SHAPES:
            want, terms = closed_form([g[name] for g in given_[:step]], decay)
            # 1 - d loses nine digits where d is 1 - 1e-7, in the closed form as here.
            assert bool(((mean[name] - want).abs() <= 1e-12 * terms).all())


@given(DECAYS, st.integers(0, 2**16), st.sampled_from((torch.float64, torch.float32)))
def test_a_constant_is_a_fixed_point_bit_for_bit(
    decay: float, seed: int, dtype: torch.dtype
) -> None:
    (gradient,) = gradients(1, seed, dtype)
    running = RunningMean(decay)
    for _ in range(20):
        assert all(torch.equal(m, gradient[n]) for n, m in running.update(gradient).items())


@given(st.integers(0, 2**16), st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_decay_zero_is_the_identity(seed: int, dtype: torch.dtype) -> None:
    running = RunningMean(0.0)
    for gradient in gradients(4, seed, dtype):
        mean = running.update(gradient)
        for name, g in gradient.items():
            assert mean[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(mean[name], g.to(mean[name].dtype))


@given(DECAYS, st.integers(0, 6), st.integers(1, 6), st.integers(0, 2**16))
def test_a_resumed_mean_goes_on_bit_for_bit(
    decay: float, before: int, after: int, seed: int
) -> None:
    given_ = gradients(before + after, seed, torch.float32)
    whole = RunningMean(decay)
    for gradient in given_[:before]:
        whole.update(gradient)
    resumed = RunningMean(decay)
    resumed.load_tensors({n: t.clone() for n, t in whole.state_tensors().items()})
    for gradient in given_[before:]:
        a, b = whole.update(gradient), resumed.update(gradient)
        assert all(torch.equal(a[n], b[n]) for n in SHAPES)


def test_the_state_survives_a_file(tmp_path: object) -> None:
    running = RunningMean(0.9)
    for gradient in gradients(3, 0, torch.float32):
        running.update(gradient)
    path = f"{tmp_path}/mean.safetensors"
    write_tensors(path, running.state_tensors(), {})
    resumed = RunningMean(0.9)
    resumed.load_tensors(read_tensors(path)[0])
    (last,) = gradients(1, 9, torch.float32)
    a, b = running.update(last), resumed.update(last)
    assert all(torch.equal(a[n], b[n]) for n in SHAPES)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_what_it_returns_and_takes_stays_the_callers(decay: float) -> None:
    first, second = gradients(2, 3)
    running, alone = RunningMean(decay), RunningMean(decay)
    for gradient in (first, second):
        kept = {n: g.clone() for n, g in gradient.items()}
        mean = running.update(gradient)
        expected = alone.update(kept)
        assert all(torch.equal(mean[n], expected[n]) for n in SHAPES)
        state = running.state_tensors()
        before = {n: t.clone() for n, t in state.items()}
        for tensor in mean.values():
            tensor.fill_(7)
        assert all(torch.equal(g, kept[n]) for n, g in gradient.items())
        for tensor in gradient.values():
            tensor.fill_(7)
        assert all(torch.equal(t, before[n]) for n, t in running.state_tensors().items())


def test_half_precision_is_accumulated_in_float32() -> None:
    """In bfloat16 the step towards the new gradient would round to nothing."""
    running = RunningMean(0.99)
    for value in [1.0] * 200 + [1.0078125]:
        mean = running.update({"w": torch.tensor([value], dtype=torch.bfloat16)})["w"]
    assert mean.dtype == torch.float32
    assert 1 < float(mean) < 1.0078125


def test_averaging_lowers_the_noise_as_it_should() -> None:
    """Independent noise of variance 1 leaves ``(1 - d) / (1 + d)``; 4,000 coordinates, 5 sigma."""
    running = RunningMean(0.8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        mean = running.update({"w": torch.randn(4000, generator=generator)})["w"]
    want = 0.2 / 1.8
    assert abs(float(mean.square().mean()) - want) < 5 * want * (2 / 4000) ** 0.5


@pytest.mark.parametrize("decay", [1.0, -0.1, 2, float("nan"), "0.9", None, True])
def test_bad_decays_are_refused(decay: object) -> None:
    with pytest.raises(ConfigError, match="decay"):
        Plain(decay)


def test_other_tensors_are_refused_and_change_nothing() -> None:
    (gradient,) = gradients(1, 0)
    running = RunningMean(0.5)
    running.update(gradient)
    before = {n: t.clone() for n, t in running.state_tensors().items()}
    with pytest.raises(InputError, match="such as scale"):
        running.update({n: g for n, g in gradient.items() if n != "scale"})
    with pytest.raises(InputError, match="such as new"):
        running.update({**gradient, "new": torch.zeros(1)})
    with pytest.raises(InputError, match=r"layer\.0\.weight.*\(4, 3\)"):
        running.update({**gradient, "layer.0.weight": torch.zeros(4, 3)})
    with pytest.raises(NumericalError, match=r"layer\.1\.bias"):
        running.update({**gradient, "layer.1.bias": torch.full((5,), torch.nan)})
    assert all(torch.equal(t, before[n]) for n, t in running.state_tensors().items())


def test_bad_states_are_refused() -> None:
    running = RunningMean(0.5)
    state = running.state_tensors()
    with pytest.raises(InputError, match="count"):
        RunningMean(0.5).load_tensors({"decay": state["decay"]})
    with pytest.raises(InputError, match="odd"):
        RunningMean(0.5).load_tensors({**state, "odd": torch.zeros(1)})
    with pytest.raises(ConfigError, match="another decay"):
        RunningMean(0.6).load_tensors(state)
