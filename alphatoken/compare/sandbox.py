"""Running code that a model wrote, in a process that can do no harm; or not running it at all.

A program runs in new network, process, mount and IPC namespaces (``unshare`` of util-linux): no
network, no view of other processes, all files read-only, a small scratch folder of its own, no
privileges, and limits on time, memory, processes, open files and written bytes. Where the machine
does not allow that, the program is refused, not run with less. It gets Python's standard library
and no installed package.

What this does not hide: files that the user (or, under root, anybody) may read. Nothing can carry
them out but the program's output.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from alphatoken.errors import UnsupportedError

__all__ = ["Limits", "Outcome", "require_isolation", "run_program"]


@dataclass(frozen=True)
class Limits:
    """Of one program.

    Attributes:
        seconds: of wall clock; of CPU time as much, rounded up.
        memory: bytes of address space of each process.
        processes: threads and processes together.
        files: open at a time.
        written: bytes of each file, of the output, and of the scratch folder.
    """

    seconds: float = 5.0
    memory: int = 1 << 30
    processes: int = 16
    files: int = 64
    written: int = 1 << 22


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        state: "passed" (exit code 0), "failed" or "timeout".
        code: its exit code; -n for signal n; None after a timeout.
        output: the end of what it wrote, errors among it.
    """

    state: str
    code: int | None
    output: str


_NAMESPACES = ("--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL")
_NOBODY = 65534
_OUTPUT = 4000
_READY = "sandbox ready"

# Runs inside the new namespaces, in an interpreter of its own; so it imports nothing of ours.
_INSIDE = r"""
import ctypes, json, os, platform, resource, signal, struct, sys

limits = json.loads(sys.argv[1])
program = sys.stdin.buffer.read()
libc = ctypes.CDLL(None, use_errno=True)

def must(result, what):
    if result != 0:
        sys.stderr.write(f"sandbox: {what}: {os.strerror(ctypes.get_errno())}\n")
        os._exit(125)

def mount(source, target, kind, flags, data=None):
    must(libc.mount(source, target, kind, flags, data), f"mount {target.decode()}")

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
mount(None, b"/", None, MS_REC | MS_PRIVATE)
mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV)
# mount_setattr(AT_FDCWD, "/", AT_RECURSIVE, {set read-only}): every mount below, too. The same
# number on all architectures but alpha.
attributes = struct.pack("QQQQ", 1, 0, 0, 0)
must(libc.syscall(442, -100, b"/", 0x8000, attributes, len(attributes)), "read-only files")
scratch = f"size={limits['written']},mode=1777".encode()
mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, scratch)
os.chdir("/tmp")
# Nobody may not enter the folders above the interpreter; here it can.
os.mkdir("/tmp/.python")
mount(limits["prefix"].encode(), b"/tmp/.python", None, MS_BIND | MS_REC)
must(libc.syscall(442, -100, b"/tmp/.python", 0x8000, attributes, len(attributes)), "read-only")
with open("/tmp/program.py", "wb") as file:
    file.write(program)
os.chmod("/tmp/program.py", 0o444)

for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: nothing comes back at exec
if os.getuid() == 0 and limits["root"]:
    os.setgroups([])
    os.setgid(limits["nobody"])
    os.setuid(limits["nobody"])
must(libc.prctl(38, 1, 0, 0, 0), "no new privileges")

child = os.fork()
if child == 0:
    os.setsid()
    seconds = int(limits["seconds"]) + 1
    for name, value in (
        ("RLIMIT_CORE", 0), ("RLIMIT_CPU", seconds), ("RLIMIT_NOFILE", limits["files"]),
        ("RLIMIT_FSIZE", limits["written"]), ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_AS", limits["memory"]),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))
    python = "/tmp/.python/bin/" + limits["python"]
    os.execve(python, [python, "-I", "/tmp/program.py"],
              {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8",
               "LD_LIBRARY_PATH": "/tmp/.python/lib"})
_, status = os.waitpid(child, 0)
code = os.waitstatus_to_exitcode(status)
os._exit(code if code >= 0 else 128 - code)
"""


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Run one Python program, isolated.

    Raises:
        UnsupportedError: this machine cannot isolate it; it was not run.
    """
    require_isolation()
    return _run(program, limits or Limits())


@functools.cache
def require_isolation() -> None:
    """See that a program can be isolated here: a harmless one is run, and what it can do is tried.

    Raises:
        UnsupportedError: it cannot; says what is missing.
    """
    if sys.platform != "linux" or shutil.which("unshare") is None:
        raise _refused(f"{sys.platform}, unshare: {shutil.which('unshare')}")
    found = _run(_PROBE, Limits(seconds=20.0))
    if found.state != "passed" or found.output.strip() != _READY:
        raise _refused(found.output.strip()[-300:] or f"exit code {found.code}")


def _refused(got: str) -> UnsupportedError:
    return UnsupportedError(
        "generated code cannot be isolated on this machine, and is not run",
        got=got,
        why="it would run with the user's rights, files and network",
        remedy="Linux 5.12 or newer with util-linux and user namespaces; in a container, allow "
        "them",
    )


_PROBE = f"""
import os, socket
try:
    socket.create_connection(("192.0.2.1", 9), 1).close()
    raise SystemExit("the network is there")
except OSError as error:
    if error.errno not in (101, 100):  # no network at all, not merely nobody who answers
        raise SystemExit(f"the network is not cut off: {{error}}")
if not os.statvfs("/").f_flag & os.ST_RDONLY:
    raise SystemExit("the files can be written")
if any(int(line.split()[1], 16) for line in open("/proc/self/status") if "CapEff" in line):
    raise SystemExit("privileges are left")
print({_READY!r})
"""


def _run(program: str, limits: Limits) -> Outcome:
    root = os.geteuid() == 0
    unshare: list[str] = [shutil.which("unshare") or "unshare", *_NAMESPACES]
    if not root:
        unshare += ["--user", "--map-root-user"]
    python = os.path.basename(os.path.realpath(sys.executable))
    own = {"root": root, "nobody": _NOBODY, "prefix": sys.base_prefix, "python": python}
    settings: dict[str, Any] = {**asdict(limits), **own}
    command = [*unshare, sys.executable, "-I", "-c", _INSIDE, json.dumps(settings)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
        source.write(program.encode("utf-8", "surrogatepass"))
        source.seek(0)
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            cwd="/",
        )
        try:
            code: int | None = process.wait(limits.seconds + 1.0)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # its end is the end of all that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _outcome(code, _end(output))


def _end(output: Any) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - _OUTPUT))
    return str(output.read().decode("utf-8", "replace"))


def _outcome(code: int | None, output: str) -> Outcome:
    if code is None or code == 128 + signal.SIGXCPU or code == 128 + signal.SIGKILL:
        return Outcome("timeout", None, output)
    code = 128 - code if code > 128 else code
    return Outcome("passed" if code == 0 else "failed", code, output)
