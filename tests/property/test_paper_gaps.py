"""Rows of docs/paper-gaps.md that no property of an estimator, a step or a Fisher proves.

What a row of the mathematics says is otherwise proved by a property, which says so on a line
``Proves:`` of its docstring. What the packaged recipes are set to is one table here.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alphatoken.cli.recipes import find_recipe
from alphatoken.oracle import gradients, jacobian
from tests.property.setups import forward_of
from tests.property.strategies import make_case
from tests.property.tolerance import close


def test_the_gradient_of_one_token_has_a_rank_up_to_its_position() -> None:
    """Row 2: the paper's ``app_rank1`` says 1."""
    # Distinct tokens: equal ones at the start have equal inputs, which lowers the rank.
    case = make_case(("pppprrrr",), (("pprr",),), layers=3, vocabulary=100, seed=2)
    assert len(set(case.batch["input_ids"].flatten().tolist())) == 8
    model = case.model()
    name = "layers.0.attention.o_proj.weight"
    weight = {name: dict(model.named_parameters())[name]}
    ranks = [
        int(torch.linalg.matrix_rank(one[name], rtol=1e-9))
        for one in gradients.per_token_gradients(model, forward_of(model), case.batch, weight)
    ]
    positions = [i - 1 for _, i in gradients.response_tokens(gradients.known_labels(case.batch))]
    assert ranks == [p + 1 for p in positions]  # positions 0 .. p, one outer product each
    top = {n: p for n, p in model.named_parameters() if n == "layers.2.mlp.down_proj.weight"}
    for one in gradients.per_token_gradients(model, forward_of(model), case.batch, top):
        # Above the last attention a weight is used by the token's own position only.
        assert int(torch.linalg.matrix_rank(next(iter(one.values())), rtol=1e-9)) == 1


def test_the_factor_of_the_bound_does_not_vanish_with_the_head_width() -> None:
    """Row 7: c ||q_k|| ||W_K|| grows, weights drawn alike at each width, though c = 1 / sqrt(d)."""

    def factor(width: int, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        m, length = 32, 6

        def drawn(rows: int) -> Tensor:
            weight = torch.randn(rows, m, generator=generator, dtype=torch.float64)
            return weight / math.sqrt(m)

        spec = jacobian.AttentionSpec(
            drawn(width), drawn(width), drawn(width), heads=1, groups=1, scale=width**-0.5
        )
        x = torch.randn(length, m, generator=generator, dtype=torch.float64)
        state, bound = jacobian.attend(spec, x), jacobian.value_path_bound(spec, x)
        away = (state.value[0][None] - state.output[0][:, None]).norm(dim=-1)
        later = torch.ones(length, length, dtype=torch.bool).tril(-1)
        return float((bound[0] / (state.alpha[0] * away))[later].mean())

    means = {d: sum(factor(d, seed) for seed in range(10)) / 10 for d in (4, 16, 64)}
    assert means[4] < means[16] < means[64]
    assert means[64] > 1.5 * means[4]  # 1 / sqrt(d) alone would make it 4 times smaller


def test_prompt_and_response_are_cut_apart() -> None:
    """Row 17: a prompt keeps its end, a response its start.

    Proves: prompt and response are cut apart (exact), against slices by hand.
    """
    pytest.importorskip("trl")
    from alphatoken.train.python_rows import cut_pair

    row = {"prompt_ids": [1, 2, 3, 4], "chosen_ids": [5, 6, 7], "rejected_ids": [8]}
    cut = cut_pair(row, max_prompt=2, max_response=2)
    assert cut == {"prompt_ids": [3, 4], "chosen_ids": [5, 6], "rejected_ids": [8]}


def test_no_multiple_of_the_divergence_bounds_the_calibration_gap() -> None:
    """Row 37. A weight w, two tokens of logits w^2, 0: the gap falls as the divergence's root."""
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    log_p = torch.stack([w**2, 0 * w]).log_softmax(0)
    first = [torch.autograd.grad(-one, w, create_graph=True)[0] for one in log_p]
    second = torch.stack([torch.autograd.grad(one, w, retain_graph=True)[0] for one in first])
    p, slopes = log_p.detach().exp(), torch.stack(first).detach()
    fisher = (p * slopes**2).sum()
    close((p * second).sum(), fisher, fisher, 1e-12)  # the model's own data have no gap
    ratios = []
    for shift in (0.1, 0.01, 0.001):
        q = p + torch.tensor([shift, -shift])
        gap = abs((q * second).sum() - fisher)
        divergence = (q * (q.log() - log_p.detach())).sum()
        assert gap <= second.abs().max() * (2 * divergence).sqrt()
        ratios.append(float(gap / divergence))
    assert ratios[2] > 8 * ratios[1] > 64 * ratios[0]


EVERY = [
    f"{task}-{model}"
    for task in ("magicoder", "metamath", "ultrafeedback", "ultrachat")
    for model in ("llama", "gemma", "qwen")
]


GAINS: dict[str, Any] = {
    "tab:main_rq1_sft": {"overall": (1.54, 2.80, 2.51)},
    "tab:main_rq1_dpo": {
        "overall": (1.73, 1.54, 1.83), "target": (2.55, 2.95, 2.86), "retention": (0.91, 0.12, 0.80)
    },
    "tab:magicoder_forgetting_gemma4b": {"overall": (0.95,)},
}  # fmt: skip


@pytest.mark.parametrize("label", GAINS)
def test_gains_in_the_text_are_differences_of_its_tables(label: str) -> None:
    from alphatoken_lab.paper.exhibits import find

    exhibit = find(label)
    keys = [column.key for column in exhibit.columns["full"]]
    for number, group in enumerate(exhibit.groups):
        rows = {
            row.policy: {k: float(v.split()[0]) for k, v in zip(keys, row.printed, strict=True)}
            for row in group.rows
        }
        own = rows.pop("alphatoken")
        rows.pop("start", None)
        best = max(rows.values(), key=lambda means: means["overall"])
        for key, said in GAINS[label].items():
            assert own[key] - best[key] == pytest.approx(said[number], abs=0.011), (label, key)


PAGE = Path(__file__).parents[2] / "docs" / "paper-gaps.md"


def test_every_option_of_the_recipes_has_a_place() -> None:
    """Nothing that a recipe sets is silent, and the page names nothing that none sets."""
    text = PAGE.read_text(encoding="utf-8").split("## The paper's recipes, option by option")[1]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", text, re.MULTILINE)
    places = {name: place for names, place in rows for name in re.findall(r"`([a-z0-9_]+)`", names)}
    assert all(place for place in places.values())
    said = {name for recipe in EVERY for name in find_recipe(recipe).options}
    assert said == set(places)
