"""Whether a function that a model wrote passes its tests: said by a process it cannot reach.

Two sandboxes, joined by two pipes and nothing else. In one runs the completion; it is sent
arguments and sends back results. In the other run the tests, with a function in the completion's
place that asks the first one; what comes back is rebuilt from plain values (``crossing``). The
tests, their expected values and the mark that says "passed" are never where the completion is. So
it can end early, kill, redefine ``assert``, read all its files, memory and descriptors, answer
``==`` with yes, or print what it likes: the only way to pass is to send the right results.

Not covered: functions that take or return anything but plain values (a generator, a class, a
function), or that are tested by how they change their arguments. They fail. A test that reads the
results of a completion which was trained on that very test is no matter of a sandbox.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from alphatoken_lab.compare import crossing
from alphatoken_lab.compare.sandbox import Limits, Outcome, Sandboxed, require_isolation

__all__ = ["judge_function"]

_LONGEST = 1 << 22
"""Characters of one message."""

_SOLUTION = """
import os

def serve():
    requests, answers = os.fdopen({reads}, "r"), os.fdopen({writes}, "w")
    namespace = {{"__name__": "solution"}}
    exec(compile({source!r}, "solution", "exec"), namespace)
    for line in requests:
        arguments, named = decode(line)
        try:
            answer = (True, namespace[{entry!r}](*arguments, **named))
            text = encode(answer)
        except Exception as error:
            text = encode((False, type(error).__name__))
        answers.write(text + "\\n")
        answers.flush()

serve()
"""

_TESTS = """
import builtins, os

requests, answers = os.fdopen({writes}, "w"), os.fdopen({reads}, "r")

def ask(*arguments, **named):
    requests.write(encode((arguments, named)) + "\\n")
    requests.flush()
    line = answers.readline({longest})
    if not line.endswith("\\n"):
        raise RuntimeError("the completion's process is gone, or its result is too long")
    done, result = decode(line)
    if done is True:
        return result
    kind = getattr(builtins, str(result), None)
    # Only what a test may catch: SystemExit, for one, would end the tests.
    known = isinstance(kind, type) and issubclass(kind, Exception)
    raise (kind if known else RuntimeError)(f"raised by the completion: {{result!s:.80}}")

namespace = {{"__name__": "tests"}}
exec(compile({helpers!r}, "prompt", "exec"), namespace)
namespace[{entry!r}] = ask
exec(compile({test!r}, "test", "exec"), namespace)
namespace["check"](ask)
print({mark!r})
"""


def judge_function(
    prompt: str, completion: str, entry_point: str, test: str, limits: Limits | None = None
) -> Outcome:
    """Run ``check(entry_point)`` of ``test`` against the completion.

    Args:
        prompt: imports, helpers and the head of the function, its docstring perhaps.
        completion: the rest of it.
        entry_point: the function's name.
        test: source that defines ``check``; trusted, but isolated too.
        limits: of each of the two processes.

    Returns:
        The state is "passed" only if every line of ``check`` ran; the output is that of the tests,
        then what the completion printed.

    Raises:
        UnsupportedError: this machine cannot isolate programs; nothing was run.
    """
    require_isolation()
    limits = limits or Limits()
    mark = secrets.token_hex(16)
    codec = Path(crossing.__file__).read_text(encoding="utf-8")
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    with ExitStack() as stack:
        with _closing(asked, asks, answered, answers):  # so that each notices the other's end
            solution = codec + _SOLUTION.format(
                reads=asked, writes=answers, source=prompt + completion, entry=entry_point
            )
            tests = codec + _TESTS.format(
                reads=answered, writes=asks, longest=_LONGEST, helpers=_helpers(prompt),
                entry=entry_point, test=test, mark=mark,
            )  # fmt: skip
            judged = stack.enter_context(Sandboxed(solution, limits, (asked, answers)))
            judge = stack.enter_context(Sandboxed(tests, limits, (answered, asks)))
        found, printed = judge.outcome(), judged.stop()
    said = found.output.rstrip().endswith(mark)
    output = (found.output.replace(mark, "") + printed)[-4000:]
    state = "failed" if found.state == "passed" and not said else found.state
    return Outcome(state, found.code, output)


@contextmanager
def _closing(*descriptors: int) -> Iterator[None]:
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _helpers(prompt: str) -> str:
    """The prompt as source: its unfinished function gets a body."""
    for body in ("    pass\n", ""):
        with suppress(SyntaxError):
            compile(f"{prompt}\n{body}", "prompt", "exec")
            return f"{prompt}\n{body}"
    return ""
