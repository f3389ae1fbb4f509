"""The page of a run: what its curves show, and how it behaves in a real browser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphatoken.data.pieces import token_texts
from alphatoken.errors import DataError
from alphatoken.report.drawing import COLOURS, DASHES
from alphatoken.report.page import Picture, anchor_of
from alphatoken.train.curves import CHARTS, charts
from alphatoken.train.ledger import ValueLedger
from alphatoken.train.report import REPORT, VALUES, read_run, write_run_report
from alphatoken.train.value_export import export_values
from alphatoken.values import TokenValues
from tests.integration.browser import Browser, opened
from tests.integration.tiny_training import sums, tokenizer

pytestmark = pytest.mark.pictures

PARTS = ("adaptation_direct", "adaptation_causal", "stability_direct", "stability_causal")


def log(steps: int, every: int = 10) -> list[dict[str, Any]]:
    """A log_history as a run writes it, with a NaN in the middle."""
    draw = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        entry: dict[str, Any] = {
            "step": step,
            "epoch": step / steps,
            "loss": 0.8 + math.exp(-step / 150) + 0.02 * draw.standard_normal(),
            "grad_norm": 1 + 0.2 * draw.standard_normal(),
            "learning_rate": 1e-5 * (1 - step / steps),
            "alpha/kept_share": 0.5,
            "alpha/weight_share": 0.5,
            "alpha/total_mean": 1e-5,
            "alpha/total_std": 3e-4,
            "alpha/balance": step / steps,
            "alpha/relative_drift": math.sqrt(step) * 1e-3,
            "alpha/tokens_per_second": 1500.0,
            **{f"alpha/{name}_share": 0.4 - 0.1 * i for i, name in enumerate(PARTS)},
        }
        if step % (5 * every) == 0:
            pool, held = math.exp(-step / 200), math.exp(-step / 200) + step / 3000
            entry |= {"alpha/validation_pool": pool, "alpha/validation_held_out": held}
            entry["alpha/validation_gap"] = held - pool
        found.append(entry)
    found[len(found) // 2]["loss"] = math.nan
    return found


def ledger(rows: int = 6) -> ValueLedger:
    """Values of real tokenised rows, drawn at random."""
    pieces, filled = tokenizer(), ValueLedger()
    draw = torch.Generator().manual_seed(4)
    for step, row in enumerate(sums(rows)):
        prompt, response = (pieces(row[part])["input_ids"] for part in ("prompt", "completion"))
        ids = torch.tensor([prompt + response])
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        mask[0, len(prompt) :] = True
        drawn = torch.randn(2, *ids.shape, generator=draw) * mask
        values = TokenValues(
            total=drawn.sum(0), mask=mask, adaptation=drawn[0], stability=drawn[1],
            adaptation_direct=None, adaptation_causal=None, stability_direct=None,
            stability_causal=None, unassigned=torch.zeros(1), estimator="path",
            stability_weight=1.0,
        )  # fmt: skip
        weights = (values.total > 0).float()
        filled.add({"input_ids": ids}, mask, values, weights, scale=1e-5, step=step)
    return filled


def texts(ids: Sequence[int]) -> list[str]:
    return [piece.text for piece in token_texts(tokenizer(), ids)]


def run_folder(folder: Path, steps: int = 400, *, values: bool = True) -> Path:
    """A folder as a run leaves it."""
    for step in (steps // 2, steps):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        history = [entry for entry in log(steps) if entry["step"] <= step]
        state = {"global_step": step, "max_steps": steps + 100, "log_history": history}
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    options = {"policy": "top", "keep_ratio": 0.5, "run_name": "</script><b>x"}
    told = {"run": "0", "options": options, "versions": {"torch": "2"}}
    (folder / "alphatoken-run.json").write_text(json.dumps(told))
    if values:
        export_values(ledger(), folder / VALUES)
    return folder


# --- what is drawn --------------------------------------------------------------------------------


def points_of(chart: Picture, key: str = "loss") -> np.ndarray:
    """(2, n) steps, and heights upwards in points, of a drawn line's corners."""
    (path,) = re.findall(rf'id="{anchor_of(key)}">\s*<path d="([^"]*)"', chart.svg)
    corners = np.array(re.findall(r"[ML] (\S+) (\S+)", path), dtype=np.float64).T
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', chart.svg).groups())  # type: ignore[union-attr]
    left, right, _, _ = map(float, chart.data["box"].split())
    first, last = map(float, chart.data["steps"].split())
    steps = first + (corners[0] / width - left) / (right - left) * (last - first)
    return np.stack([steps, height - corners[1]])


def test_curves_pass_through_the_logged_points() -> None:
    history = log(400)
    chart = charts(history)[0]
    assert (chart.title, chart.data["steps"]) == ("Loss", "0.0 400.0")
    (path,) = re.findall(r'id="loss">\s*<path d="([^"]*)"', chart.svg)
    assert path.count("M") == 2, "the NaN is a gap"
    steps, heights = points_of(chart)
    logged = np.array([(e["step"], e["loss"]) for e in history if math.isfinite(e["loss"])]).T
    assert steps == pytest.approx(logged[0], abs=0.5)
    slope, start = np.polyfit(heights, logged[1], 1)
    assert slope > 0
    assert slope * heights + start == pytest.approx(logged[1], abs=1e-4)


def test_only_what_was_logged_is_drawn() -> None:
    titles = [chart.title for chart in charts(log(100))]
    assert "Preference margin" not in titles
    assert {"Loss", "Validation gap", "Share kept", "Drift", "Speed"} <= set(titles)
    assert charts([]) == []
    assert charts([{"step": 1, "loss": math.nan}]) == []
    kept = next(c for c in charts(log(100)) if c.title == "Share kept")
    assert kept.data["names"] == "kept", "of a mask one line says it all"
    soft = [{**entry, "alpha/weight_share": 0.4} for entry in log(100)]
    kept = next(c for c in charts(soft) if c.title == "Share kept")
    assert kept.data["names"] == "kept|mean weight"
    assert kept.alt == "Share kept from step 0 to 100; last: kept 0.5, mean weight 0.4"
    parts = next(c for c in charts(soft) if c.title.startswith("What"))
    lines = re.findall(r'-share">\s*<path [^>]*style="([^"]*)"', parts.svg)
    assert len({re.search("stroke: ([^;]*)", line)[1] for line in lines}) == 4  # type: ignore[index]
    dashes = [re.findall("stroke-dasharray: ([^;]*)", line) for line in lines]
    assert len(set(map(tuple, dashes))) == 4, "told apart without colours"


def test_single_points_and_constants_are_seen() -> None:
    (chart,) = charts([{"step": 7, "eval_loss": 2.0}])
    assert marks(chart) == 1
    gaps = [{"step": s, "loss": 1.0 if s % 2 else math.inf} for s in range(1, 6)]
    assert marks(charts(gaps)[0]) == 3
    constant = charts([{"step": s, "loss": 2.0} for s in range(1, 6)])[0]
    assert marks(constant) == 0
    assert np.ptp(points_of(constant)[0]) == pytest.approx(4, abs=0.1)


def marks(chart: Picture) -> int:
    """Points drawn by themselves."""
    lines = re.findall(r'id="(?:eval-)?loss">(.*?)</g>\s*</g>', chart.svg, re.DOTALL)
    return sum(line.count("<use") for line in lines)


def test_colours_stand_out_from_white_and_from_each_other() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    assert all(1.05 / (luminance(colour) + 0.05) >= 3 for colour in COLOURS[:5])
    assert len(set(COLOURS)) == len(set(DASHES)) == len(COLOURS)
    assert max(len(spec.keys) for spec in CHARTS) <= len(COLOURS)


# --- what is read ---------------------------------------------------------------------------------


def test_newest_state_is_read(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "run"))
    assert (run.step, run.steps, len(run.history)) == (400, 500, 40)
    assert run.options["policy"] == "top"
    assert run.values is not None


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trainer state in"):
        write_run_report(tmp_path)
    folder = run_folder(tmp_path / "run")
    (folder / VALUES / "part-00000.parquet").write_text("cut")
    with pytest.raises(DataError, match="part-00000"):
        write_run_report(folder)
    for state in folder.rglob("trainer_state.json"):
        state.write_text("[1")
    with pytest.raises(DataError, match="no trainer state in"):
        write_run_report(folder)
    assert not (folder / REPORT).exists()


def test_the_page_says_how_many_rows_were_seen_and_what_a_row_number_counts(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", values=False)
    pieces = tokenizer()
    parts = [
        [pieces(row[part])["input_ids"] for part in ("prompt", "completion")] for row in sums(9)
    ]
    rows = [{"input_ids": p + c, "labels": [-100] * len(p) + c} for p, c in parts]
    export_values(ledger(6), folder / VALUES, rows)
    text = " ".join(write_run_report(folder).read_text(encoding="utf-8").split())
    assert "6 of 9 training rows were seen" in text
    assert "counts the training rows from 0, without those that were left out or held out" in text


def test_page_of_a_long_run_stays_small_and_keeps_extremes(tmp_path: Path) -> None:
    peak = {5_432: 9.0}
    history = [{"step": s, "loss": peak.get(s, 1 + s % 7 / 100)} for s in range(1, 20_001)]
    chart = charts(history)[0]
    assert len(chart.svg) < 200_000
    steps, heights = points_of(chart)
    assert heights.max() - np.median(heights) > 80
    assert steps[heights.argmax()] == pytest.approx(5_432, abs=10)
    page = write_run_report(run_folder(tmp_path / "run", 20_000))
    assert page.stat().st_size < 3_000_000


def test_run_without_values_and_log_still_has_a_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", values=False)
    text = write_run_report(folder).read_text(encoding="utf-8")
    assert "exported no token values" in text
    assert 'id="examples"' not in text
    told = {"global_step": 999, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(told))
    assert "Nothing was logged" in write_run_report(folder).read_text(encoding="utf-8")


# --- the page in a browser ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_report(run_folder(tmp_path_factory.mktemp("report") / "run"), texts)


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(page, tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_browser_draws_every_chart_and_token(browser: Browser) -> None:
    drawn = browser.evaluate("document.querySelectorAll('#curves figure').length")
    assert drawn == len(charts(log(400)))
    assert browser.evaluate("[...document.images].every(i => i.naturalWidth === 360)")
    assert browser.evaluate("document.images.length") == drawn + 3
    responses = sum(len(row["completion"]) for row in sums(6))
    words = browser.evaluate("document.querySelector('.text').textContent")
    assert words == "".join(sums(6)[0].values()), "prompts are shown"
    assert browser.evaluate("document.querySelectorAll('.tok').length") == responses
    assert browser.evaluate("document.title") == "Run run"
    settings = browser.evaluate("document.querySelector('#settings').nextElementSibling.innerText")
    assert "keep_ratio" in settings
    assert "</script><b>x" in settings


def test_browser_reads_a_step_under_the_pointer_and_by_keys(browser: Browser) -> None:
    box = browser.evaluate(
        "(() => { const s = document.querySelector('#curves img'); s.scrollIntoView();"
        " const b = s.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    left, top, width, height = box
    chart = charts(log(400))[0]
    start, end, _, _ = map(float, chart.data["box"].split())
    browser.move_to(left + width * (start + (end - start) * 101 / 400), top + height / 2)
    told = "document.querySelector('#curves .reading').textContent"
    loss = next(entry["loss"] for entry in log(400) if entry["step"] == 100)
    assert browser.evaluate(told) == f"step 100: training {loss:.4g}"
    place = browser.evaluate(
        "(() => { const c = document.querySelector('.cursor').getBoundingClientRect();"
        " return [c.left, c.height]; })()"
    )
    assert place[0] == pytest.approx(left + width * (start + (end - start) / 4), abs=1)
    assert place[1] > 60
    browser.evaluate("document.querySelector('#curves .picture').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(told).startswith("step 110:")
    browser.press("End")
    assert browser.evaluate(told).startswith("step 400:")
    browser.evaluate("document.activeElement.blur()")
    assert browser.evaluate(told) == ""


def test_browser_download_holds_the_log(browser: Browser, tmp_path: Path) -> None:
    browser.download("#download", tmp_path / "alphatoken-report-data.json")
    data = json.loads((tmp_path / "alphatoken-report-data.json").read_text(encoding="utf-8"))
    assert len(data["history"]) == 40
    assert data["history"][20]["loss"] is None, "a NaN is no JSON"
    assert data["options"]["policy"] == "top"
    assert len(data["examples"]) == 6


def test_browser_narrow_screen_has_no_sideways_scroll(browser: Browser, tmp_path: Path) -> None:
    try:
        browser.needs_no_sideways_scroll(320, 390, 768)
        browser.resize(320, 800)
        small = browser.evaluate(
            "Math.min(...[...document.querySelectorAll('#curves img')]"
            ".map(i => i.getBoundingClientRect().width / i.naturalWidth)) * 12"
        )
        assert small >= 7, "the text of the axes stays readable"
        browser.screenshot(tmp_path / "narrow.png")
    finally:
        browser.resize(1200, 900)
