"""The defaults of ``DecoderAdapter``: what an adapter that writes three methods tells the core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import ConfigError, ModelError
from alphatoken.model.protocol import AttentionOverride, DecoderAdapter, find_adapter
from tests.property.decoder import ReferenceAdapter
from tests.property.profiles import budget
from tests.property.setups import Setup, layer_indices, make_scorer, quiet_score, refusal, setups
from tests.property.test_differences import llama
from tests.property.test_differences import rows_of as token_rows


class PlainAdapter(DecoderAdapter):
    """Of the reference decoder; writes no more than it must."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.written = model, ReferenceAdapter(model)

    def layers(self) -> Sequence[nn.Module]:
        return self.written.layers()

    def attention_modules(self, layer: int) -> tuple[nn.Module, ...]:
        return self.written.attention_modules(layer)

    def override_attention(
        self, modules: Sequence[nn.Module], override: AttentionOverride
    ) -> AbstractContextManager[None]:
        return self.written.override_attention(modules, override)


class Leaking(PlainAdapter):
    """Forgets to put the model's own kernels back."""

    @contextmanager
    def override_attention(
        self, modules: Sequence[nn.Module], override: AttentionOverride
    ) -> Iterator[None]:
        self.entered = super().override_attention(modules, override)
        self.entered.__enter__()
        yield


@given(
    setups(transposed=False, loose_parameter=st.booleans(), positions="learned"),
    st.sets(st.integers(0, 12), max_size=3),
)
@budget(12)
def test_defaults_are_what_a_written_adapter_says(setup: Setup, frozen: set[int]) -> None:
    """The same linears and matrices left out, whatever is frozen; the same logits.

    Proves: the default methods of an adapter find what a written one finds (exact), against the
    reference decoder's own.
    """
    model, layers = setup.case.model(), layer_indices(setup)
    for place, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(place not in frozen)
    plain, written = PlainAdapter(model), ReferenceAdapter(model)
    assert {(one.name, one.layer) for one in plain.scored_linears(layers)} == {
        (one.name, one.layer) for one in written.scored_linears(layers)
    }
    assert plain.uncovered(layers).keys() == written.uncovered(layers).keys()
    batch = {name: tensor for name, tensor in setup.case.batch.items() if name != "labels"}
    assert torch.equal(plain.forward(batch), written.forward(batch))


@pytest.mark.parametrize("estimator", ["alphatoken", "path", "label"])
@given(setup=setups(transposed=False))
@budget(4)
def test_values_do_not_depend_on_who_writes_the_defaults(estimator: str, setup: Setup) -> None:
    """Proves: values through the default methods of an adapter (exact), against a written one."""
    model, batch = setup.case.model(), setup.case.batch
    adapters = PlainAdapter(model), ReferenceAdapter(model)
    plain, written = (
        quiet_score(make_scorer(setup, estimator, model=model, adapter=adapter), batch).total
        for adapter in adapters
    )
    assert torch.allclose(plain, written, rtol=1e-10, atol=1e-12 * float(written.abs().max() + 1))


@pytest.mark.parametrize("estimator", ["alphatoken", "label"])
@given(setup=setups(transposed=False))
@budget(2)
def test_an_override_that_stays_on_the_model_is_refused(estimator: str, setup: Setup) -> None:
    """At the next call of the attention: a gradient to compare with would go through it too.

    Proves: attention of the model after values were made (exact), against the adapter's override.
    """
    model = setup.case.model()
    scorer = make_scorer(setup, estimator, model=model, adapter=Leaking(model))

    def score_and_run() -> None:
        quiet_score(scorer, setup.case.batch)
        PlainAdapter(model).forward({n: t for n, t in setup.case.batch.items() if n != "labels"})

    assert isinstance(error := refusal(score_and_run), ModelError)
    assert "override_attention() of your adapter Leaking leaves its override" in str(error)


def test_an_adapter_of_another_model_is_refused() -> None:
    """In a loop over checkpoints an adapter that was made before would give the first's values."""
    first, second = llama(), llama()
    with pytest.raises(ConfigError, match="adapter is of another model"):
        Scorer(first, token_rows(1, rows=2), adapter=find_adapter(second))
    Scorer(first, token_rows(1, rows=2), adapter=find_adapter(first))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: [*found, found[0]], "names a weight twice"),
        (lambda found: [replace(found[0], name="nowhere")], "that is not its module's"),
        (lambda found: [replace(found[0], name=found[1].name)], "that is not its module's"),
    ],
)
def test_linears_that_are_not_what_they_say_are_refused(change: Any, said: str) -> None:
    model = llama()
    adapter = find_adapter(model)
    found = adapter.scored_linears([0])
    adapter.scored_linears = lambda layers: change(found)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=rf"scored_linears\(\) of .*{said}"):
        Scorer(model, token_rows(1, rows=2), config=ScorerConfig("path"), adapter=adapter)


def test_an_adapter_without_blocks_or_a_class_is_refused() -> None:
    model = llama()
    with pytest.raises(ConfigError, match=r"adapter is a class.*PlainAdapter\(model\)"):
        Scorer(model, token_rows(1, rows=2), adapter=PlainAdapter)  # type: ignore[arg-type]
    adapter = find_adapter(model)
    adapter.layers = list  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"layers\(\) of .* gives no blocks"):
        Scorer(model, token_rows(1, rows=2), adapter=adapter)
