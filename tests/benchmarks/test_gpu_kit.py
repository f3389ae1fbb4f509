"""The GPU kit, in small on a CPU: all parts run, what is wrong is said, what is done stays."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import numbers, ratios, wheels
from benchmarks.gpu.page import page
from benchmarks.measure import Run
from benchmarks.models import Size

pytestmark = pytest.mark.slow  # of the benchmarks, and runs them

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run, by the command itself."""
    out = tmp_path_factory.mktemp("gpu")
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "min left" in done.stderr
    return out


def test_every_part_runs(found: Path) -> None:
    parts = json.loads((found / "gpu.json").read_text())["parts"]
    assert set(parts) == set(kit.PARTS)
    assert all(part["ok"] and part["rows"] and part["error"] is None for part in parts.values())
    rows = parts["numbers"]["rows"]
    kernels = numbers.kernels(torch.device("cpu"))
    assert len(rows) == len(numbers.ESTIMATORS) * len(numbers.LAYOUTS) * 2 * len(kernels)
    assert all(row["error"] is not None for row in rows)
    worst = {p: max(r["error"] for r in rows if r["precision"] == p) for p in ("fp32", "bf16")}
    assert worst["fp32"] < worst["bf16"], "narrow arithmetic is what it says"
    taken = {r["kernel"]: r["lse"] for r in rows if r["estimator"] == "alphatoken"}
    assert taken == {"math": "computed", "flash": "the kernel's"}
    runs = {row["run"]: row for row in parts["training"]["rows"]}
    assert runs["all tokens"]["apart"] == 0
    assert runs["all tokens"]["last_loss"] == runs["TRL"]["last_loss"]
    assert runs["half of the tokens"]["last_loss"] != runs["TRL"]["last_loss"]
    for row in parts["ratios"]["rows"]:
        assert row["ratio"] > 1
        assert row["over_floor"] > row["plain_over_floor"] / 2
        assert row["met"] == dict.fromkeys(ratios.TARGETS), "tiny sizes are not judged"
    routes = {row["route"]: row for row in parts["contraction"]["rows"]}
    assert routes["float32 products (the library's)"]["error"] < 1e-5
    assert parts["properties"]["rows"][0]["passed"] > 0


def test_the_page_shows_them(found: Path) -> None:
    text = (found / "gpu.md").read_text()
    assert "measures nothing" in text
    for _, title, _ in kit.PARTS.values():
        assert f"## {title}" in text
    assert "**Failed**" not in text
    assert "None" not in text


def test_what_is_measured_stays(found: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (found / "gpu.json").read_bytes()
    assert kit.main(["--device", "cpu", "--out", str(found)]) == 0
    assert (found / "gpu.json").read_bytes() == before
    assert "[1/5]" not in capsys.readouterr().err


def test_a_wrong_value_fails_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kit.PARTS["numbers"]

    def some(run: Run) -> Any:
        yield next(iter(whole[0](run)))

    monkeypatch.setitem(kit.PARTS, "numbers", (some, *whole[1:]))
    words = ["numbers", "--device", "cpu", "--out", str(tmp_path)]
    assert kit.main(words) == 0
    monkeypatch.setitem(numbers.ALLOWED, "fp32", 0.0)
    assert kit.main(words) == 1
    assert "| 1 |" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_breaks_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(run: Run) -> Any:
        yield {"route": "a", "ok": True}
        raise RuntimeError("no such kernel")

    def fine(run: Run) -> Any:
        yield {"route": "b", "ok": True}

    monkeypatch.setitem(kit.PARTS, "contraction", (broken, "Broken", 1.0))
    monkeypatch.setitem(kit.PARTS, "training", (fine, "Fine", 1.0))
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert kit.main(["contraction", "training", *words]) == 1
    assert "FAILED: contraction" in capsys.readouterr().err
    text = (tmp_path / "gpu.md").read_text()
    assert "**Failed**: RuntimeError: no such kernel" in text
    assert "| b | yes |" in text
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert found["contraction"]["rows"] == [{"route": "a", "ok": True}]
    assert kit.main(["contraction", "--minutes", "0", *words]) == 1
    assert "no time left" in capsys.readouterr().err
    # The next call asks it again, and the one that went well stays.
    monkeypatch.setattr(
        kit, "PARTS", {name: kit.PARTS[name] for name in ("training", "contraction")}
    )
    monkeypatch.setitem(kit.PARTS, "contraction", (fine, "Fine", 1.0))
    monkeypatch.setitem(kit.PARTS, "training", (broken, "Broken", 1.0))
    assert kit.main(words) == 0


def test_a_part_that_shows_nothing_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that could not be asked, as where no shape fits, and a part that the time cuts off."""

    def nothing(run: Run) -> Any:
        yield {"route": "a", "ok": None}
        yield {"route": "b", "ok": None}

    def some(run: Run) -> Any:
        yield {"route": "a", "ok": None}
        yield {"route": "b"}

    def long(run: Run) -> Any:
        for name in "ab":
            time.sleep(0.1)
            yield {"route": name}

    words = ["contraction", "--device", "cpu", "--out", str(tmp_path), "--minutes"]
    counts = {nothing: 2, some: 2, long: 2}
    for rows, minutes, status in ((nothing, "1", 1), (some, "1", 0), (long, "0.001", 1)):
        monkeypatch.setitem(kit.PARTS, "contraction", (rows, "Rows", 1.0))
        monkeypatch.setitem(kit.ROWS, "contraction", lambda run, rows=rows: counts[rows])
        assert kit.main([*words, minutes]) == status
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]["contraction"]
    assert found["rows"] == [{"route": "a"}]
    assert found["error"] == "cut off before its end"
    assert "**Failed**: cut off before its end" in (tmp_path / "gpu.md").read_text()
    counts[long] = 1  # its last row may end late
    assert kit.main([*words, "0.001"]) == 0


def test_the_rows_of_a_long_part_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratios, "_fitting", lambda run, size: (torch.nn.Linear(1, 1), size))
    monkeypatch.setattr(ratios, "_measured", lambda *_: {"ratio": 1.0})
    for run in (Run(torch.device("cpu"), quick=quick) for quick in (True, False)):
        monkeypatch.setattr(ratios, "product_speed", lambda *_: 1.0)
        assert (
            len(list(ratios.ratios(run))) == ratios.rows_of_ratios(run) == kit.ROWS["ratios"](run)
        )


def test_targets_are_judged() -> None:
    row = {"shape": "3B", "estimator": "alphatoken", "size": "s", "ratio": 1.2, "low": 1.1}
    row |= {"high": 1.3, "floor": 1.05, "over_floor": 1.4, "plain_over_floor": 1.3}
    row |= {"memory_ratio": 1.2, "met": {"ratio": False, "over_floor": True, "memory_ratio": False}}
    large = {"shape": "8B", "estimator": "label", "why": "CUDA out of memory"}
    part = {"title": "Steps", "ok": True, "error": None, "seconds": 1.0, "rows": [row, large]}
    text = page({"machine": {"gpu": "H"}, "quick": False, "parts": {"ratios": part}})
    assert "| 8B | label | CUDA out of memory |" in text
    assert "over_floor; NOT ratio; NOT memory_ratio" in text
    assert "measures nothing" not in text.partition("Measured on")[2]


def test_no_figures_are_replaced_by_small_ones() -> None:
    with pytest.raises(SystemExit):
        kit.main(["--device", "cpu"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            kit.main([])


def test_the_page_of_the_repository_is_that_of_its_figures() -> None:
    found = json.loads(kit.JSON.read_text()) if kit.JSON.exists() else None
    assert kit.PAGE.read_text() == page(found)


def test_wheels_are_of_all_but_torch(tmp_path: Path) -> None:
    found = wheels.closure()
    assert {"transformers", "trl", "tokenizers", "huggingface-hub", "pyarrow"} <= set(found)
    assert not [name for name in found if "torch" in name or "nvidia" in name]
    with pytest.raises(SystemExit, match="no wheels"):
        wheels.install(tmp_path, tmp_path / "target")
    assert "exceptiongroup" not in found
    assert wheels.closure(("pytest",), python="3.10")["exceptiongroup"] == ""


def wheel(folder: Path, name: str, version: str, python: str) -> None:
    """The smallest wheel that pip installs."""
    about = f"{name}-{version}.dist-info"
    tag = f"py{python}-none-any"
    texts = {
        f"{name}.py": f"version = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as file:
        for place, text in texts.items():
            file.writestr(place, text)
        record = "".join(f"{place},,\n" for place in (*texts, f"{about}/RECORD"))
        file.writestr(f"{about}/RECORD", record)


def test_wheels_of_other_versions_and_pythons(tmp_path: Path) -> None:
    """What is here in another version is installed beside it; a wheel of another Python is not."""
    folder, target = tmp_path / "wheels", tmp_path / "target"
    folder.mkdir()
    wheel(folder, "pytest", "0.0.1", "3")
    wheel(folder, "a_little", "1.0", "3")
    wheels.install(folder, target)
    assert "0.0.1" in (target / "pytest.py").read_text()
    assert (target / "a_little.py").exists()
    wheel(folder, "another", "1.0", "399")
    with pytest.raises(SystemExit, match="make gpu-wheels GPU_PYTHONS="):
        wheels.install(folder, target)


def test_a_model_that_does_not_fit_loses_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them, and half again; scoring that does not fit is a row of its own."""
    tried: list[int] = []
    step = ratios.plain_step

    def full(model: Any, batch: Any) -> None:
        tried.append(model.config.num_hidden_layers)
        if tried[-1] > 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        step(model, batch)

    def too_much(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    size = Size(32, 28, 64, heads=4, kv_heads=2, ffn=64, length=16)
    monkeypatch.setattr(ratios, "TINY", {"tall": size})
    monkeypatch.setattr(ratios, "plain_step", full)
    monkeypatch.setattr(ratios, "observed_step", too_much)
    rows = list(ratios.ratios(Run(torch.device("cpu"), quick=True)))
    assert tried[:3] == [28, 14, 7]
    assert [row["estimator"] for row in rows] == ["alphatoken", "label"]
    assert all("out of memory" in row["why"] for row in rows)


def test_a_fault_of_the_device_is_no_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a kernel that is not there is passed over."""
    whole = numbers._values

    def values(model: Any, *rest: Any) -> Any:
        if next(model.parameters()).dtype != torch.float64:
            raise RuntimeError(said)
        return whole(model, *rest)

    monkeypatch.setattr(numbers, "_values", values)
    run = Run(torch.device("cpu"), quick=True)
    texts = {
        "Expected all tensors to be on the same device": False,
        "No available kernel. Aborting execution.": None,
        "": False,
    }
    for said, of_flash in texts.items():  # noqa: B007 (what values() above says)
        rows = {row["kernel"]: row["ok"] for row in numbers.numbers(run)}
        assert rows == {"math": False, "flash": of_flash}
