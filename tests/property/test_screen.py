"""What the start model finds least likely goes before training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alphatoken import ConfigError
from alphatoken.train import AlphaDPOConfig, AlphaSFTConfig
from tests.property import properties_screen as claims
from tests.property.profiles import budget

pytest.importorskip("trl", reason="the trainers need trl")


@given(st.integers(0, 999), st.sampled_from([0.1, 0.25, 0.5]), st.just("token"))
@budget(0.1, least=5)
def test_tokens(seed: int, share: float, unit: str) -> None:
    claims.check_screen(seed, share, unit)


@given(st.integers(0, 999), st.sampled_from([0.1, 0.25, 0.5]), st.just("response"))
@budget(0.1, least=5)
def test_responses(seed: int, share: float, unit: str) -> None:
    claims.check_screen(seed, share, unit)


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (AlphaSFTConfig, {"screen_share": 1.0}, "screen_share"),
        (AlphaSFTConfig, {"screen_share": -0.1}, "screen_share"),
        (AlphaSFTConfig, {"screen_share": 0.1, "packing": True, "max_length": 64}, "packing"),
        (AlphaDPOConfig, {"screen_share": 0.1}, "pairs"),
    ],
)
def test_what_cannot_be_screened_is_refused(config, options, says, tmp_path) -> None:
    with pytest.raises(ConfigError, match=says):
        config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_a_row_without_a_response_is_not_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import datasets

    from alphatoken_lab.methods import screen

    losses = [torch.tensor(x) for x in ([], [1.0, 2.0], [3.0], [0.0])]
    monkeypatch.setattr(screen, "_losses", lambda *_: losses)
    rows = [{"input_ids": [i], "labels": [i]} for i in range(4)]
    trainer = SimpleNamespace(
        args=SimpleNamespace(value_unit="response", screen_share=0.25),
        train_dataset=datasets.Dataset.from_list(rows),
        model=torch.nn.Linear(1, 1),
    )
    assert [row["input_ids"] for row in screen.screened(trainer)] == [[0], [1], [3]]
