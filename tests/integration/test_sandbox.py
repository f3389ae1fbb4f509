"""The sandbox: real programs that try to do harm, and HumanEval's problems in it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken.compare import code_tasks, sandbox
from alphatoken.compare.code_tasks import complete_function, pass_at_1, program_of
from alphatoken.compare.sandbox import Limits, require_isolation, run_program
from alphatoken.data import read_records
from alphatoken.errors import ConfigError, DataError, UnsupportedError

QUICK = Limits(seconds=5.0)


@pytest.fixture(autouse=True, scope="module")
def isolated() -> None:
    """On a machine that cannot isolate, programs are refused, which has a test of its own."""
    try:
        require_isolation()
    except UnsupportedError as error:
        pytest.skip(f"this machine isolates no programs: {error}")


def test_a_program_runs_and_its_failure_is_seen() -> None:
    assert run_program("print(6 * 7)", QUICK).output == "42\n"
    failed = run_program("assert 1 == 2, 'on purpose'", QUICK)
    assert (failed.state, failed.code) == ("failed", 1)
    assert "on purpose" in failed.output


@pytest.fixture
def listening() -> Iterator[tuple[int, list[Any]]]:
    """A real server on this machine, and who has reached it."""
    reached: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    caller, address = server.accept()
                    caller.close()
                    reached.append(address)
                except TimeoutError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], reached
        stop.set()
        thread.join()


def test_no_network_not_even_this_machine(listening: tuple[int, list[Any]]) -> None:
    port, reached = listening
    program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    socket.create_connection(("127.0.0.1", port), 5).close()
    outcome = run_program(program, QUICK)
    assert outcome.state == "failed"
    assert "unreachable" in outcome.output
    time.sleep(0.3)
    assert len(reached) == 1  # the one from outside


def test_time_is_limited_busy_or_asleep() -> None:
    for program in ("while True: pass", "import time; time.sleep(60)"):
        began = time.monotonic()
        assert run_program(program, Limits(seconds=1.0)).state == "timeout"
        assert time.monotonic() - began < 20


def test_a_fork_bomb_stays_small_and_nothing_outlives_the_program() -> None:
    name = f"bomb{os.getpid()}"
    program = (
        f"# {name}\nimport os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass"
    )
    assert run_program(program, Limits(seconds=2.0, processes=8)).state == "timeout"
    counted = run_program(
        "import os, time\nn = 1\ntry:\n    while os.fork():\n        n += 1\n    time.sleep(60)\n"
        "except OSError:\n    print(n)",
        Limits(seconds=5.0, processes=8),
    )
    assert 1 <= int(counted.output) <= 8
    time.sleep(0.3)
    running = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"program.py" in _read(p)]
    assert not running


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_memory_is_limited() -> None:
    assert "MemoryError" in run_program("x = bytearray(1 << 33)", QUICK).output


def test_files_are_read_only_and_the_scratch_folder_is_small(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("as it was")
    for program in (f"open({str(mine)!r}, 'w')", f"import os; os.remove({str(mine)!r})"):
        assert run_program(program, QUICK).state == "failed"
    assert mine.read_text() == "as it was"
    assert run_program("open('a', 'w').write('b' * 1000)", QUICK).state == "passed"
    assert run_program("open('a', 'w').write('b' * (1 << 25))", QUICK).state == "failed"
    endless = run_program("while True: print('x' * 10000)", QUICK)
    assert endless.state in ("failed", "timeout")
    assert len(endless.output) <= 4000


def test_no_privileges_and_no_way_back() -> None:
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.mount(None, b'/', None, 32 | 4096, None) != 0\n"  # remount writable
        "libc.unshare(0x10000000 | 0x00020000)\n"  # a new user namespace, if there can be one
        "assert libc.mount(None, b'/', None, 32 | 4096, None) != 0\n"
        "assert [p for p in os.listdir('/proc') if p.isdigit()] == ['1', '2']\n"
    )
    assert run_program(program, QUICK).output == ""


def test_without_unshare_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.require_isolation.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="is not run"):
            run_program(f"open({str(tmp_path / 'made')!r}, 'w')", QUICK)
    finally:
        sandbox.require_isolation.cache_clear()
    assert not list(tmp_path.iterdir())


# --- problems of HumanEval's form ---------------------------------------------------------------


def test_a_completion_ends_at_the_left_edge() -> None:
    assert complete_function("    return 1\n\n    # x\nprint(2)") == "    return 1\n\n    # x"
    assert complete_function("    return 1") == "    return 1"


def test_humaneval_solutions_pass_and_wrong_ones_do_not(data_dir: Path) -> None:
    problem = dict(next(row for _, row in read_records(data_dir / "humaneval/HumanEval.jsonl")))
    for completion, solved in (
        (problem["canonical_solution"], True),
        ("    return None\n", False),
        ("    import os\n    os._exit(0)\n", False),  # leaves before the tests
    ):
        program = program_of(problem, completion, "all passed")
        assert ("all passed" in run_program(program, QUICK).output) == solved


def test_pass_at_1_of_a_real_model(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "stories260K" / "transformers"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = data_dir / "humaneval" / "HumanEval.jsonl"
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 4, "limit": 1, "folder": tmp_path}
    assert pass_at_1(model, tokenizer, problems, allow=True, **options) == 0.0  # it tells stories
    assert (tmp_path / "code.json").is_file()
    with pytest.raises(ConfigError, match="allow_code_execution"):
        pass_at_1(model, tokenizer, problems, allow=False, **options)
    with pytest.raises(DataError, match="no problem of HumanEval's form"):
        pass_at_1(model, tokenizer, data_dir / "gsm8k" / "test.jsonl", allow=True)


def test_a_model_that_solves_a_problem_is_credited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tmp_path / "problems.jsonl"
    rows.write_text(
        '{"prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(g): assert g(2) == 4"}\n'
        '{"prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(g): assert g(2) == 5"}\n'
    )
    monkeypatch.setattr(code_tasks, "answers", lambda *_, **__: ["    return 2 * x\nprint(1)"] * 2)
    assert pass_at_1(torch.nn.Linear(1, 1), None, rows, allow=True) == 50.0
