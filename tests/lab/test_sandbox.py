"""The sandbox: real programs that try to do harm, and HumanEval's problems in it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import alphatoken
from alphatoken.errors import ConfigError, DataError, UnsupportedError
from alphatoken_lab.compare import code_tasks, crossing, sandbox
from alphatoken_lab.compare.code_tasks import complete_function, pass_at_1
from alphatoken_lab.compare.sandbox import Limits, require_isolation, run_program
from alphatoken_lab.compare.verdict import judge_function
from tests.both_programs import main

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
    before = _programs()
    name = f"bomb{os.getpid()}"
    program = (
        f"# {name}\nimport os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass"
    )
    assert run_program(program, Limits(seconds=1.0, processes=8)).state == "timeout"
    counted = run_program(
        "import os, time\nn = 1\ntry:\n    while os.fork():\n        n += 1\n    time.sleep(60)\n"
        "except OSError:\n    print(n)",
        Limits(seconds=5.0, processes=8),
    )
    assert 1 <= int(counted.output) <= 8
    _require_ended(before)


def _programs() -> set[Path]:
    """Processes of any sandbox on this machine: other tests have theirs."""
    return {p for p in Path("/proc").glob("[0-9]*/cmdline") if b"program.py" in _read(p)}


def _require_ended(before: set[Path]) -> None:
    """What was not there before is gone, as soon as the kernel has reaped it."""
    until = time.monotonic() + 5.0
    while (left := _programs() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


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
        "assert not os.path.exists('/proc')\n"
        "for number in (2, 9, 15):\n"
        "    try:\n"
        "        os.kill(1, number)\n"  # the first process here; where it may, it is not heeded
        "    except PermissionError:\n"
        "        pass\n"
        "assert libc.ptrace(16, 1, 0, 0) == -1\n"  # attach
        "open('still here', 'w').close()\n"
    )
    outcome = run_program(program, QUICK)
    assert (outcome.state, outcome.output) == ("passed", "")


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """UNIX sockets of this machine, by a path and by an abstract name, and who has reached them."""
    addresses = {"path": str(tmp_path / "socket"), "abstract": f"\0sandbox{os.getpid()}"}
    reached: list[str] = []
    stop = threading.Event()
    servers: dict[str, socket.socket] = {}
    for kind, address in addresses.items():
        servers[kind] = socket.socket(socket.AF_UNIX)
        servers[kind].bind(address)
        servers[kind].listen()
        servers[kind].settimeout(0.1)
    os.chmod(addresses["path"], 0o777)

    def serve() -> None:
        while not stop.is_set():
            for kind, server in servers.items():
                with contextlib.suppress(TimeoutError):
                    server.accept()[0].close()
                    reached.append(kind)

    thread = threading.Thread(target=serve)
    thread.start()
    yield addresses, reached
    stop.set()
    thread.join()
    for server in servers.values():
        server.close()


def test_no_socket_of_the_machine_is_reached(
    sockets: tuple[dict[str, str], list[str]],
) -> None:
    addresses, reached = sockets
    connect = "import socket; socket.socket(socket.AF_UNIX).connect({!r})"
    for kind, address in addresses.items():
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(address)
        outcome = run_program(connect.format(address), QUICK)
        assert outcome.state == "failed", kind
        assert "FileNotFound" in outcome.output or "refused" in outcome.output
    time.sleep(0.4)
    assert sorted(reached) == ["abstract", "path"]  # from outside, once each


def test_nothing_of_the_machine_can_be_read(tmp_path: Path) -> None:
    """No file, variable, argument or descriptor; all that is there is named."""
    secret = tmp_path / "secret"
    secret.write_text("known to nobody")
    secret.chmod(0o777)
    wanted = [str(secret), "/etc/passwd", "/etc/hostname", "/proc/1/environ", "/proc/self/fd",
              "/run", "/var", "/root", "/home", "/sys", "/dev/shm", "/dev/pts", str(Path.cwd()),
              alphatoken.__file__, torch.__file__, "/usr/bin/env"]  # fmt: skip
    os.environ["SANDBOX_SECRET"] = "known to nobody"
    descriptor = os.open(secret, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        outcome = run_program(
            "import os, sys, json\n"
            f"there = [path for path in {wanted!r} if os.path.lexists(path)]\n"
            "there = {path: os.path.isdir(path) and os.listdir(path) for path in there}\n"
            "open_ = []\n"
            "for number in range(3, 256):\n"
            "    try:\n"
            "        os.fstat(number); open_.append(number)\n"
            "    except OSError: pass\n"
            "print(json.dumps([there, open_, sorted(os.environ), sys.argv, os.listdir('/')]))",
            QUICK,
        )
    finally:
        os.close(descriptor)
        del os.environ["SANDBOX_SECRET"]
    there, descriptors, variables, arguments, root = json.loads(outcome.output)
    # An interpreter may live under /root or /home: its own folders are there, and nothing else.
    own = [os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]
    for folder, entries in there.items():
        assert entries, folder
        assert all(any(f"{way}/".startswith(f"{folder}/{e}/") for way in own) for e in entries)
    assert descriptors == []
    assert set(variables) <= {"PATH", "HOME", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH"}
    assert arguments == ["/tmp/program.py"]
    ways = {way.split("/")[1] for way in own}
    known = {"etc", "proc", "run", "var", "root", "home", "sys", "mnt", "boot"}
    assert not set(root) & known - ways


def test_python_and_its_library_are_whole() -> None:
    modules = ("ssl", "sqlite3", "ctypes", "hashlib", "lzma", "bz2", "zlib", "decimal", "asyncio",
               "multiprocessing", "unicodedata", "statistics", "typing", "json")  # fmt: skip
    program = (
        f"import {', '.join(modules)}, threading\nt = threading.Thread(target=print)\nt.start()"
    )
    outcome = run_program(program, QUICK)
    assert (outcome.state, outcome.output) == ("passed", "\n")
    for package in ("torch", "numpy", "alphatoken"):
        assert "ModuleNotFoundError" in run_program(f"import {package}", QUICK).output


def test_the_disk_cannot_be_filled() -> None:
    """Neither by one file, nor by many, nor by names alone, nor through the output."""
    many = run_program(
        "n = 0\ntry:\n    while True:\n        open(f'{n}', 'wb').write(b'x' * (1 << 16)); n += 1\n"
        "except OSError:\n    print(n)",
        QUICK,
    )
    assert int(many.output) <= (1 << 22) // (1 << 16)
    names = run_program(
        "n = 0\ntry:\n    while True:\n        open(f'{n}', 'w').close(); n += 1\n"
        "except OSError:\n    print(n)",
        QUICK,
    )
    assert int(names.output) <= 1024
    for folder in ("/", "/usr/lib", "/dev"):
        assert run_program(f"open({folder + '/x'!r}, 'w')", QUICK).state == "failed"


def test_what_outlives_the_program_is_ended() -> None:
    """A child with a session of its own, which ignores every signal that it can."""
    program = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for number in range(1, 32):\n"
        "        try:\n"
        "            signal.signal(number, signal.SIG_IGN)\n"
        "        except OSError: pass\n"
        "    time.sleep(60)\n"
    )
    before, began = _programs(), time.monotonic()
    assert run_program(program, QUICK).state == "passed"
    assert time.monotonic() - began < 5
    _require_ended(before)


def test_without_unshare_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.require_isolation.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="is not run"):
            run_program(f"open({str(tmp_path / 'made')!r}, 'w')", QUICK)
    finally:
        sandbox.require_isolation.cache_clear()
    assert not list(tmp_path.iterdir())


def test_where_namespaces_are_forbidden_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What unshare says goes into the message."""
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho unshare failed: Operation not permitted\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox.require_isolation.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="Operation not permitted.*user namespaces"):
            run_program("print(1)", QUICK)
        with pytest.raises(UnsupportedError, match="is not run"):
            judge_function("def f():\n", "    return 1\n", "f", CHECK, QUICK)
    finally:
        sandbox.require_isolation.cache_clear()


# --- who says that it passed ---------------------------------------------------------------------

HEAD = "def f(x):\n"
CHECK = (
    "def check(candidate):\n    assert candidate(2) == 40961\n    assert candidate(3) == 61441\n"
)
"""Its numbers are nowhere where the completion is."""

FORGED = {
    "ends early": "    import sys\n    sys.exit(0)\n",
    "ends at once": "    import os\n    os._exit(0)\n",
    "ends when it is read": "    return 1\nimport os\nos._exit(0)\n",
    "ends by a signal": "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "is equal to everything": (
        "    class Yes:\n        def __eq__(self, other): return True\n"
        "        __ne__ = __hash__ = None\n    return Yes()\n"
    ),
    "is a number that is equal to everything": (
        "    class Yes(int):\n        def __eq__(self, other): return True\n"
        "        def __hash__(self): return 1\n        def __repr__(self): return '40961'\n"
        "    return Yes(1)\n"
    ),
    "redefines assertions": (
        "    import builtins\n    builtins.AssertionError = builtins.print\n"
        "    builtins.__build_class__ = None\n    return 1\n"
    ),
    "raises what ends the tests": "    raise SystemExit(0)\n",
    "raises an end under another name": ("    raise type('SystemExit', (Exception,), {})('0')\n"),
    "prints what it reads": (
        "    text = open('/tmp/program.py').read()\n    print(text, 'passed')\n    return text\n"
    ),
    "answers for its own driver": (
        "    import os\n    for n in range(3, 64):\n        try:\n"
        '            os.write(n, b\'[true, true]\\n{"list": [true, {"int": "1"}]}\\n\' * 9)\n'
        "        except OSError: pass\n    return 1\n"
    ),
    "finds the tests": (
        "    import gc, re\n"
        "    texts = [o for o in gc.get_objects() if isinstance(o, (str, dict))]\n"
        "    found = re.findall(r'== (40961|61441)', str(texts) + open('/tmp/program.py').read())\n"
        "    return int(found[0]) if found else 1\n"
    ),
    "finds the tests in memory": (
        "    import os\n    for name in ('/proc/1/mem', '/proc/self/mem', '/proc/1/cmdline'):\n"
        "        if os.path.exists(name): return 40961\n    return 1\n"
    ),
    "sends nonsense": "    return {1: object()}\n",
    "sends too much": "    return 'x' * (1 << 23)\n",
    "contains itself": "    a = []\n    a.append(a)\n    return a\n",
}


@pytest.mark.parametrize("how", FORGED)
def test_a_completion_cannot_forge_its_verdict(how: str) -> None:
    outcome = judge_function(HEAD, FORGED[how], "f", CHECK, QUICK)
    assert outcome.state == "failed", outcome
    assert outcome.code != 0


def test_a_completion_that_never_answers_is_stopped() -> None:
    began = time.monotonic()
    for body in ("    while True: pass\n", "    import time\n    time.sleep(99)\n"):
        assert judge_function(HEAD, body, "f", CHECK, Limits(seconds=1.0)).state == "timeout"
    assert time.monotonic() - began < 30


def test_right_functions_pass() -> None:
    right = "    print('thinking')\n    return 20480 * x + 1\n"
    outcome = judge_function(HEAD, right, "f", CHECK, QUICK)
    assert outcome.state == "passed"
    assert "thinking" in outcome.output
    prompt = (
        "from typing import List\n\ndef helper(x: int) -> int:\n    return x + 1\n\n"
        'def f(x, *, more: List[int] = []):\n    """Doc."""\n'
    )
    body = (
        "    from collections import OrderedDict\n"
        "    if x is None: raise ValueError('none')\n"
        "    return OrderedDict(a=(x, [helper(x)], {1, 2}, b'z', 1.5, float('inf'), 1j, more))\n"
    )
    test = (
        "def check(candidate):\n"
        "    found = candidate(helper(0), more=[True])\n"
        "    assert found == {'a': (1, [2], {1, 2}, b'z', 1.5, float('inf'), 1j, [True])}\n"
        "    assert type(found) is dict and type(found['a'][1][0]) is int\n"
        "    assert f(10**30, more=[])['a'][0] == 10**30\n"
        "    try:\n        candidate(None)\n    except ValueError:\n        return\n"
        "    raise AssertionError('no error')\n"
    )
    outcome = judge_function(prompt, body, "f", test, QUICK)
    assert outcome.state == "passed", outcome


_ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(),
    st.text(),
)  # fmt: skip
_HASHABLE = st.recursive(_ATOMS, lambda inner: st.tuples(inner, inner), max_leaves=3)
_PLAIN = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.sets(_HASHABLE, max_size=3),
        st.frozensets(_HASHABLE, max_size=3),
        st.dictionaries(_HASHABLE, inner, max_size=3),
    ),
    max_leaves=6,
)


def spelled(value: Any) -> Any:
    """Comparable: by class, sets in some order, NaN equal to itself."""
    if isinstance(value, (list, tuple)):
        return type(value), [spelled(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(spelled(one)) for one in value)
    if isinstance(value, dict):
        return dict, [(spelled(k), spelled(v)) for k, v in value.items()]
    return type(value), repr(value)


@given(_PLAIN)
def test_what_crosses_is_what_was_sent(value: Any) -> None:
    found = crossing.decode(crossing.encode(value))
    assert spelled(found) == spelled(value)


def test_only_plain_values_cross() -> None:
    for value in (object(), print, {1: int}, [(i for i in ())]):
        with pytest.raises(TypeError, match="handed over"):
            crossing.encode(value)
    for text in ("{}", "[]", "3", '{"int": "1", "b": 2}', '{"object": []}', "nothing"):
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            crossing.decode(text)


# --- problems of HumanEval's form ---------------------------------------------------------------


def test_a_completion_ends_at_the_left_edge() -> None:
    assert complete_function("    return 1\n\n    # x\nprint(2)") == "    return 1\n\n    # x"
    assert complete_function("    return 1") == "    return 1"


PROBLEM = {
    "task_id": "ours/0",
    "prompt": "from typing import List\n\n\ndef rising(numbers: List[int]) -> bool:\n"
    '    """Whether each number is larger than the one before it."""\n',
    "entry_point": "rising",
    "canonical_solution": "    return all(a < b for a, b in zip(numbers, numbers[1:]))\n",
    "test": "def check(candidate):\n    assert candidate([]) and candidate([3])\n"
    "    assert candidate([1, 2, 5])\n    assert not candidate([1, 1])\n"
    "    assert not candidate([2, 1])\n",
}
"""A problem of HumanEval's form, ours."""


def test_solutions_of_humanevals_form_pass_and_wrong_ones_do_not() -> None:
    problem = PROBLEM
    for completion, solved in (
        (problem["canonical_solution"], True),
        ("    return None\n", False),
        ("    import os\n    os._exit(0)\n", False),  # leaves before the tests
    ):
        given = problem["prompt"], completion, problem["entry_point"], problem["test"]
        assert (judge_function(*given, QUICK).state == "passed") == solved


def test_pass_at_1_of_a_model_that_cannot_program(library_decoder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(library_decoder)
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    problems, others = tmp_path / "problems.jsonl", tmp_path / "others.jsonl"
    problems.write_text(json.dumps(PROBLEM) + "\n")
    others.write_text('{"prompt": "a", "response": "b"}\n')
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 4, "limit": 1, "folder": tmp_path}
    assert pass_at_1(model, tokenizer, problems, allow=True, **options) == 0.0
    assert (tmp_path / "code.json").is_file()
    with pytest.raises(ConfigError, match="allow_code_execution"):
        pass_at_1(model, tokenizer, problems, allow=False, **options)
    with pytest.raises(DataError, match="no problem of HumanEval's form"):
        pass_at_1(model, tokenizer, others, allow=True)


@pytest.mark.parametrize("group", ["target", "retention"])
def test_code_counts_for_the_group_it_is_of(
    group: str, library_decoder: Path, tmp_path: Path
) -> None:
    """The share stands in the group that is named, and makes the mean of no other."""
    problems, out = tmp_path / "problems.jsonl", tmp_path / "out"
    solved = {**PROBLEM, "test": "def check(candidate):\n    pass\n"}
    problems.write_text((json.dumps(solved) + "\n") * 2)
    measures = tmp_path / "measures.yaml"
    measures.write_text(f"code_file: {problems}\ncode_of: {group}\nmax_new_tokens: 2\n")
    words = ["evaluate", str(library_decoder), "--measures", str(measures)]
    words += ["--allow_code_execution", "--output_dir", str(out)]
    assert main([*words, "--quiet"]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert [name for name in found["details"] if name.endswith("code")] == [f"{group}/code"]
    assert found[group] == found["details"][f"{group}/code"]
    other = {"target": "retention", "retention": "target"}[group]
    assert found.get(other) is None


def test_a_model_that_solves_a_problem_is_credited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tmp_path / "problems.jsonl"
    rows.write_text(
        '{"prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(g): assert g(2) == 4"}\n'
        '{"prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(g): assert g(2) == 5"}\n'
    )
    shown: list[str] = []

    def answer(_: Any, __: Any, prompts: list[str], **___: Any) -> list[str]:
        shown.extend(prompts)
        return ["\n    return 2 * x\nprint(1)"] * 2

    monkeypatch.setattr(code_tasks, "answers", answer)
    assert pass_at_1(torch.nn.Linear(1, 1), None, rows, allow=True) == 50.0
    assert shown == ["def f(x):"] * 2, "a line's end belongs to the token of what comes next"


@pytest.mark.smollm2
def test_smollm2_adds_two_numbers(smollm2: Path, tmp_path: Path) -> None:
    """A prompt that ends with its line: shown the end alone, the model does not indent."""
    rows = tmp_path / "problems.jsonl"
    prompt = 'def add(a, b):\n    """Return the sum of a and b."""\n'
    test = "def check(add):\n    assert add(2, 3) == 5\n    assert add(-1, 1) == 0\n"
    rows.write_text(json.dumps({"prompt": prompt, "entry_point": "add", "test": test}) + "\n")
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    options: dict[str, Any] = {"max_new_tokens": 24, "folder": tmp_path}
    assert pass_at_1(model, tokenizer, rows, allow=True, **options) == 100.0, (
        tmp_path / "code.json"
    ).read_text()


def test_limits_of_code_problems_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tmp_path / "problems.jsonl"
    test = "def check(g): assert g(2) == 4"
    row = json.dumps({"prompt": "def f(x):\n", "entry_point": "f", "test": test})
    rows.write_text(f"{row}\n" * 3)
    asked: list[Any] = []

    def answer(_: Any, __: Any, prompts: list[str], **more: Any) -> list[str]:
        asked.append((len(prompts), more["max_new_tokens"], more["chat"]))
        return ["\n    return 2 * x"] * len(prompts)

    judge = code_tasks.judge_function
    monkeypatch.setattr(code_tasks, "answers", answer)
    monkeypatch.setattr(
        code_tasks, "judge_function", lambda *given: asked.append(given[4]) or judge(*given)
    )
    limits = Limits(seconds=7.0)
    options: dict[str, Any] = {"max_new_tokens": 9, "limit": 2, "limits": limits}
    model = torch.nn.Linear(1, 1)
    assert pass_at_1(model, None, rows, allow=True, folder=tmp_path, **options) == 100.0
    assert asked == [(2, 9, False), limits, limits]
    assert len(json.loads((tmp_path / "code.json").read_text())) == 2
