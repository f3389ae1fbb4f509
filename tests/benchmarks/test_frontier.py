"""The frontier: parts of values by the oracle, prices by counts, settings by the scorer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from alphatoken import Scorer, ScorerConfig
from alphatoken.data import Example, Row
from alphatoken.data.rows import Turn
from alphatoken.diagnose.estimators import flops
from alphatoken.diagnose.statistics import spearman
from alphatoken.model.batch import read_batch
from alphatoken.model.protocol import find_adapter
from alphatoken.oracle import gradients as oracle
from benchmarks.data import Model
from benchmarks.floors import Shape
from benchmarks.frontier import __main__ as frontier
from benchmarks.frontier import measure as measuring
from benchmarks.frontier.__main__ import main
from benchmarks.frontier.measure import Shares, measure
from benchmarks.frontier.parts import part_names, part_values
from benchmarks.frontier.settings import Setting, flops_of, plain, spread
from benchmarks.frontier.tables import Draws, agreement, chosen
from benchmarks.models import Size, decoder
from tests.places import nightly

DEPTH, VOCABULARY = 4, 40


def llama(*, tied: bool) -> Any:
    """A small decoder in float64, its norms too: transformers' own compute in float32."""
    model = decoder(16, DEPTH, vocabulary=VOCABULARY, heads=4, tie_word_embeddings=tied)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(exact_norm, module)
    return model.double().eval()


def exact_norm(norm: Any, x: Tensor) -> Tensor:
    scaled: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return scaled


def gemma() -> Any:
    """Gemma 3 with its norms of queries and keys, and windows shorter than the rows."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=DEPTH,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, sliding_window=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).double().eval()


def batch_of(rows: int = 2, length: int = 10, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens; the second row is shorter."""
    ids = torch.randint(
        0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3] = -100
    labels[1, -2:], mask[1, -2:] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def direction_of(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in model.named_parameters()
    }


def expected(model: Any, batch: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
    """Token by token, along a part of the direction alone."""

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = model(**inputs).logits
        return logits

    found = oracle.label_values(model, forward, batch, direction)
    return found[read_batch(batch).mask]


def belongs(name: str, part: str) -> bool:
    """Whether a parameter is in a part, from the words of its name alone."""
    norm = "norm" in name
    layer = int(name.split(".")[2]) if ".layers." in name else None
    if layer is None:
        return {"embed_tokens": "embedding", "norm": "final norm", "lm_head": "head"}[
            name.split(".")[-2]
        ] == part
    if part.startswith("layer "):
        return layer == int(part[6:]) and not norm
    if part.startswith("norms "):
        first, last = map(int, part[6:].split("-"))
        return norm and first <= layer <= last
    return not norm and part == ("attention" if "self_attn" in name else "MLP")


@pytest.mark.parametrize("made", [partial(llama, tied=False), gemma], ids=["llama", "gemma"])
def test_each_part_is_the_oracles_value_along_that_part(made: Callable[[], Any]) -> None:
    model = made()
    batch, direction = batch_of(), direction_of(model)
    found = part_values(find_adapter(model), read_batch(batch), direction)
    whole = expected(model, batch, direction).abs().mean()
    for place, part in enumerate(part_names(DEPTH)):
        if model.config.tie_word_embeddings and part in ("embedding", "head"):
            continue
        own = {name: m for name, m in direction.items() if belongs(name, part)}
        assert own, part
        error = (found[:, place] - expected(model, batch, own)).abs().max() / whole
        # transformers computes Gemma's norms in float32.
        assert error < (1e-12 if "Llama" in type(model).__name__ else 1e-5), part


def test_a_tied_matrix_has_two_parts_as_its_untied_copy_has() -> None:
    tied, untied = llama(tied=True), llama(tied=False)
    untied.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.lm_head.weight})
    direction, batch = direction_of(tied), read_batch(batch_of())
    both = direction | {"lm_head.weight": direction["model.embed_tokens.weight"]}
    found = part_values(find_adapter(tied), batch, direction)
    torch.testing.assert_close(found, part_values(find_adapter(untied), batch, both))


# --- a draw --------------------------------------------------------------------------------------


def draw_of(rows: int = 4) -> tuple[list[Example], list[Example]]:
    def examples(seed: int) -> list[Example]:
        batch = batch_of(rows, seed=seed)
        row = Row(0, "made here", (Turn("assistant", ""),))
        return [
            Example(row, ids[: int(mask.sum())].tolist(), labels[: int(mask.sum())].tolist())
            for ids, labels, mask in zip(
                batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
            )
        ]

    return examples(2), examples(3)


def shares_of(model: Any, optimizer: Any = None) -> Shares:
    return measure(model, *draw_of(), optimizer)


def scored(model: Any, config: ScorerConfig, optimizer: Any = None) -> np.ndarray[Any, Any]:
    """What the library says of the same rows."""
    batch, validation = batch_of(4, seed=2), batch_of(4, seed=3)
    values = Scorer(model, validation, None, config, optimizer=optimizer).score(batch)
    found: np.ndarray[Any, Any] = values.total[values.mask].double().numpy()
    return found


@pytest.fixture(scope="module")
def measured() -> tuple[Any, Shares]:
    """A model, and the parts of its values of a draw."""
    model = llama(tied=True)
    return model, shares_of(model)


def settings_by_name() -> dict[str, Setting]:
    return {s.name: s for s in plain(DEPTH)}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("label, last 2", ScorerConfig(estimator="label", layers=2)),
        ("label, spread 3", ScorerConfig(estimator="label", layers=list(spread(3, DEPTH)))),
        ("label, all linears", ScorerConfig(estimator="label", layers="all")),
        (
            "label, all parameters",
            ScorerConfig(estimator="label", layers="all", parameters="all"),
        ),
        ("alphatoken, last 2", ScorerConfig(layers=2)),
        ("direct, first 3", ScorerConfig(estimator="direct", layers=[0, 1, 2])),
        ("path, spread 2", ScorerConfig(estimator="path", layers=[0, 3])),
    ],
)
def test_a_setting_is_what_the_scorer_says(
    name: str, config: ScorerConfig, measured: tuple[Any, Shares]
) -> None:
    model, shares = measured
    found = settings_by_name()[name].values(shares)
    np.testing.assert_allclose(found, scored(model, config), rtol=1e-6, atol=1e-9)


def test_adams_truth_is_the_scorers_with_the_full_preconditioner() -> None:
    model = llama(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in (5, 6):
        optimizer.zero_grad()
        model(**batch_of(seed=seed)).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    config = ScorerConfig(
        estimator="label", layers="all", parameters="all", preconditioner="full",
        precondition_after=1, derivative="forward_mode",
    )  # fmt: skip
    shares = shares_of(model, optimizer)
    said = scored(model, config, optimizer)
    np.testing.assert_allclose(shares.columns["total"], said, rtol=1e-6, atol=1e-9)
    every = settings_by_name()["label, all parameters"].values(shares)
    np.testing.assert_allclose(every, said, rtol=1e-6, atol=1e-9)


# --- prices --------------------------------------------------------------------------------------

SIZE = Size(64, 6, vocabulary=96, heads=4, rows=2, length=48)


@pytest.mark.parametrize(
    ("estimator", "layers", "parameters"),
    [
        ("label", (3, 4, 5), "linears"),
        ("label", (0, 2, 5), "linears"),
        ("label", tuple(range(6)), "all"),
        ("direct", (3, 4, 5), "linears"),
        ("alphatoken", (3, 4, 5), "linears"),
        ("path", (1, 5), "linears"),
    ],
)
def test_a_price_is_what_is_counted(
    estimator: str, layers: tuple[int, ...], parameters: str
) -> None:
    model = SIZE.model()
    derivative = "forward_mode" if estimator == "label" else "auto"
    scored = "all" if parameters == "all" else list(layers)
    config = ScorerConfig(estimator, layers=scored, parameters=parameters, derivative=derivative)
    scorer = Scorer(model, SIZE.batch(seed=1), None, config)
    scorer.score(SIZE.batch())  # the direction, and proofs
    counted = flops(lambda: scorer.score(SIZE.batch(), components=False))
    everything = parameters == "all"
    norms = layers if everything else ()
    setting = Setting("", "", estimator, layers, norms, everything, everything, everything)
    read = int((SIZE.batch()["labels"][:, 1:] != -100).sum())
    shape = Shape.of(model, SIZE.rows, SIZE.length).with_responses(read)
    assert flops_of(shape, setting) == pytest.approx(counted, rel=0.03)


def test_a_step_is_what_is_counted() -> None:
    model, batch = SIZE.model(), SIZE.batch()

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()

    # The forward of a training loop has logits of every position.
    assert Shape.of(model, SIZE.rows, SIZE.length).step == pytest.approx(flops(step), rel=0.01)


# --- figures -------------------------------------------------------------------------------------


def draws_of(columns: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> Draws:
    facts = {"batches": [[2, 48, 40]], "tokens": 40}
    names = tuple(f"{'abc'[place % 3]}-{place // 3}" for place in range(len(columns)))
    return Draws(names, tuple(Shares(c, facts) for c in columns), SIZE.model())


def planted(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """A draw whose values are those of layer 4, and noise elsewhere."""
    generator = np.random.default_rng(seed)
    parts = {f"label/{name}": 1e-3 * generator.normal(size=40) for name in part_names(6)}
    parts["label/layer 4"] = generator.normal(size=40)
    total = sum(x for n, x in parts.items() if n not in ("label/attention", "label/MLP"))
    return parts | {"total": total, "row": np.repeat(np.arange(4.0), 10)}


def test_the_planted_layer_is_chosen_as_soon_as_the_price_allows_it() -> None:
    found = chosen(draws_of([planted(seed) for seed in range(3)]), 6)
    assert any(4 in record["layers"] for record in found)
    for record in found:
        assert record["price"] <= float(record["name"].split()[-1]) + 1e-4  # of four decimals
        if 4 in record["layers"]:
            assert record["spearman"][0] > 0.95


def test_agreement_is_within_draws_and_its_interval_over_rows() -> None:
    truths = [np.arange(30.0), 100 + np.arange(30.0)]
    rows = [np.repeat(np.arange(3.0), 10)] * 2
    # Turned around within each draw: across both, the values would agree.
    values = [-truths[0], 300 - truths[1]]
    found = agreement(values, truths, rows, spearman)
    assert found.value == pytest.approx(-1)
    noisy = [np.random.default_rng(0).normal(size=30), truths[1]]
    wide = agreement(noisy, truths, rows, spearman)
    assert wide.low < wide.value < wide.high


# --- the command ---------------------------------------------------------------------------------


@nightly
def test_the_command_goes_on_where_it_was_and_writes_figures_alone(
    tmp_path: Path, library_decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALPHATOKEN_MODELS", str(library_decoder.parent))
    model = Model("small", "library decoder", library_decoder.name)
    monkeypatch.setattr(frontier, "MODELS", {"small": model})
    for module in (frontier, measuring):
        monkeypatch.setattr(module, "formats_of", lambda _: ["library"])
    words = ["--models", "small", "--draws", "2", "--adam", "1", "--work", str(tmp_path / "work")]
    words += ["--out", str(tmp_path)]
    made = 0

    def interrupted(*given: Any) -> Shares:
        nonlocal made
        made += 1
        if made == 2:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(frontier, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    assert main(words) == 0
    assert made == 4  # one draw; the interrupted one again, the third, and Adam's
    assert main(words) == 0
    assert made == 4
    figures = json.loads((tmp_path / "frontier.json").read_text(encoding="utf-8"))["small"]
    assert figures["draws"] == ["library-0", "library-1"]
    whole = next(r for r in figures["records"] if r["name"] == "label, all parameters")
    assert whole["spearman"] == [1.0, 1.0, 1.0]
    assert whole["price"] == pytest.approx(1, abs=0.06)
    assert figures["adam"]["draws"] == ["library-0"]
    assert (tmp_path / "frontier" / "frontier.svg").is_file()
