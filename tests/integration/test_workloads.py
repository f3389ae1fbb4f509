"""A plan's counts against what a diagnosis sends through the model: no clock takes part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from alphatoken.cli.diagnose_options import read_request
from alphatoken.cli.diagnose_subject import prepare
from alphatoken.fidelity import workloads
from alphatoken.fidelity.budget import fit
from alphatoken.fidelity.prices import Counts, Prices
from alphatoken.fidelity.registry import find
from tests.integration.test_diagnose_cli import NAMES, SMALL, World, make_world

UNITS = ("forward", "backward", "dual")
PRICES = Prices(
    {f"{kind} {part}": 1.0 for kind in UNITS for part in ("pass", "position")}
    | {"sweep": 1.0, "draw": 1.0},
    graph=1.0, weights=1.0, length=8,
)  # fmt: skip


@contextmanager
def counted(model: torch.nn.Module) -> Iterator[Counter[str]]:
    """Positions that are sent through the last decoder layer, in every copy of the model."""
    found: Counter[str] = Counter()

    def see(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        found["positions"] += hidden.shape[0] * hidden.shape[1]

    layers = model.get_decoder().layers  # type: ignore[operator, union-attr]
    handle = layers[-1].register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def planned(folder: World, out: Path, name: str) -> tuple[float, float]:
    """Positions of forwards and dual forwards: in the plan, and as they were sent."""
    own = [word for word in SMALL if word.startswith(f"{name}.")]
    words = folder.words(name, out, *folder.retention, "--quiet")[2:]
    request = read_request("all", [find(name)], [*words, *(w for o in own for w in ("--set", o))])
    subject = prepare(request.shared).subject
    options = request.options[name]
    work = workloads.WORKLOADS[name](Counts(subject, PRICES), options)
    plan = fit(work, {**PRICES.seconds, **dict.fromkeys(work.measured, 0.0)}, None)
    said = sum(
        stage.units.get(f"{kind} position", 0.0)
        for stage, _ in plan.stages
        for kind in ("forward", "dual")
    )
    resized, sized = workloads.resized(subject, options, plan.sizes)
    with counted(subject.model) as found:
        find(name).load().diagnose(resized, sized)
    return said, found["positions"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_positions_that_a_diagnosis_sends(
    folder: World, tmp_path: Path, name: str
) -> None:
    """Within the factor of two that is promised; what costs as much as a forward counts as one."""
    said, sent = planned(folder, tmp_path / "out", name)
    assert 0.5 < said / sent < 2, (said, sent)


def test_a_wrong_count_is_seen(
    folder: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes counted four times as often as they run."""
    passes = Counts.passes
    monkeypatch.setattr(
        Counts, "passes", lambda self, kind, rows, times=1, size=None: passes(
            self, kind, rows, 4 * times, size
        ),
    )  # fmt: skip
    said, sent = planned(folder, tmp_path / "out", "coverage")
    assert said / sent > 2
