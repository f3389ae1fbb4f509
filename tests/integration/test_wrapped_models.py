"""A scorer on models as trainers hand them over: wrapped, with a fused head and keywords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from alphatoken.direction.objective import scoring_forward
from alphatoken.model.protocol import find_adapter
from tests.integration.snapshot import Snapshot
from tests.integration.tiny_scorer import BATCH, inputs, model_of, scorer_for
from tests.property.architectures import BY_NAME
from tests.property.tolerance import close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")


# --- wrappers -------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_a_model_inside_ddp(one_process: None) -> None:
    model = model_of()
    expected = scorer_for(model, "alphatoken").score(BATCH).total
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert find_adapter(wrapped).model is model
    assert torch.equal(scorer_for(wrapped, "alphatoken").score(BATCH).total, expected)


@pytest.mark.parametrize("estimator", ["alphatoken", "path"])
def test_a_model_under_fsdp2(one_process: None, estimator: str) -> None:
    """Its class is another one by then, made on the fly; its weights are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from alphatoken.train.shards import Fsdp2Sharding

    plain, model = (model_of() for _ in range(2))
    mesh = init_device_mesh("cpu", (1,))
    for block in [*model.model.layers, model]:
        fully_shard(block, mesh=mesh)
    assert type(model).__name__ == "FSDPLlamaForCausalLM"
    assert find_adapter(model).identity() == find_adapter(plain).identity()
    expected = scorer_for(plain, estimator).score(BATCH).total
    scorer = scorer_for(model, estimator, sharding=Fsdp2Sharding(model))
    close(scorer.score(BATCH).total, expected, expected.abs().max(), 1e-7, name="FSDP2")
    with scorer.observe() as observed:
        logits = model(**inputs()).logits
        total = observed.values(logits, BATCH["labels"]).total
        logits.sum().backward()
    close(total, expected, expected.abs().max(), 1e-7, name="FSDP2, observed")
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_inside_a_deepspeed_engine() -> None:
    engine_module = pytest.importorskip("deepspeed.runtime.engine")
    model = model_of()
    engine = engine_module.DeepSpeedEngine.__new__(engine_module.DeepSpeedEngine)
    nn.Module.__init__(engine)  # the engine's class and attribute; its set-up is not at issue
    engine.module = model
    assert find_adapter(engine).model is model


# --- a trainer's forward --------------------------------------------------------------------------


def _fused(name: str) -> Any:
    model = BY_NAME[name].build(1, dtype=torch.float32)
    add_fused_lm_head(model)
    return model


@pytest.mark.parametrize(
    ("estimator", "own"), [("alphatoken", False), ("path", True), ("label", False)]
)
def test_values_of_a_forward_with_trls_fused_head(estimator: str, own: bool) -> None:
    """Token log-probabilities come back, no logits; trainers' keywords are in the call."""
    model = _fused("llama")
    scorer = scorer_for(model, estimator)
    expected = scorer.score(BATCH).total
    before = Snapshot(model)
    with scorer.observe() as observed:
        if own:
            with scoring_forward(scorer.adapter, scorer.scored.first):
                output = _fused_call(model)
        else:
            output = _fused_call(model)
        values = observed.values(output.log_probs, BATCH["labels"])
    before.check()
    close(values.total, expected, expected.abs().max(), 1e-5, name=f"fused, {estimator}")


def _fused_call(model: Any) -> Any:
    return model(
        **inputs(), labels=BATCH["labels"], fused_lm_head=True, num_items_in_batch=7,
        return_dict=True,
    )  # fmt: skip


def test_values_are_of_the_labels_that_are_passed() -> None:
    """The call's own labels may be others: those of ``values`` count."""
    model = _fused("llama")
    fewer = BATCH["labels"].clone()
    fewer[0, 3:] = -100
    scorer = scorer_for(model, "label")
    expected = scorer.score({**BATCH, "labels": fewer}).total
    with scorer.observe() as observed:
        output = _fused_call(model)
        values = observed.values(output.log_probs, fewer)
    assert torch.equal(values.mask, (fewer != -100))
    close(values.total, expected, expected.abs().max(), 1e-5, name="fewer labels")


def test_label_of_a_pass_with_dropout_is_that_of_a_pass_without() -> None:
    """Where the observed pass was another function, the trunk is run again, dropout off."""
    model = BY_NAME["gpt2"].build(1)
    expected = scorer_for(model, "label").score(BATCH).total
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.train()
    scorer = scorer_for(model, "label")
    calls: list[int] = []
    model.transformer.h[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        with scorer.observe() as observed:
            logits = model(**inputs()).logits
            before = len(calls)
            values = observed.values(logits, BATCH["labels"])
        assert len(calls) == before + 1
        assert torch.equal(values.total, expected)


def test_label_does_not_run_the_trunk_again_in_half_precision_either() -> None:
    model = model_of(1, dtype=torch.float32).train()
    scorer = scorer_for(model, "label")
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.autocast("cpu", dtype=torch.bfloat16), scorer.observe() as observed:
        logits = model(**inputs()).logits
        before = len(calls)
        observed.values(logits, BATCH["labels"])
    assert len(calls) == before
