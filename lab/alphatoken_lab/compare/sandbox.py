"""Running code that a model wrote, in a process that can do no harm; or not running it at all.

A program runs in new network, process, mount and IPC namespaces (``unshare`` of util-linux), on an
empty root that holds the interpreter, its standard library and their shared libraries, read-only,
and nothing else of the machine: no file, socket, process, network, variable or package of it, not
even ``/proc``. It has a small scratch folder of its own, no privileges, and limits on time, memory,
processes, open files and written bytes. Where the machine does not allow that, the program is
refused, not run with less. ``verdict`` says who decides whether it did well.

What is left: the kernel's own system calls (no filter is set), the time it may take, and its
memory limit being one of each process.
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
from types import TracebackType
from typing import Any

from alphatoken.errors import UnsupportedError
from alphatoken_lab.compare import confine

__all__ = ["Limits", "Outcome", "Sandboxed", "require_isolation", "run_program"]


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
_MOUNTPOINTS = ("/mnt", "/srv", "/media", "/opt", "/home", "/tmp")

# Every extension module of the standard library, loaded; then the files that this has mapped.
_MAPPED = r"""
import ctypes, importlib, json, os, sysconfig
print(json.dumps(sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})))
folder = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
names = {file.split(".")[0] for file in os.listdir(folder)} if os.path.isdir(folder) else ()
for name in sorted(names):
    if not name.startswith(("_test", "xx", "_xx", "_tkinter")):
        try:
            importlib.import_module(name)
        except Exception:
            pass
try:
    ctypes.CDLL("libgcc_s.so.1")  # the threads' library wants it when one ends
except OSError:
    pass
for line in open("/proc/self/maps"):
    path = line.rstrip("\n").partition("/")[2]
    if ".so" in os.path.basename(path):
        print("/" + path)
"""


@functools.cache
def _python_files() -> dict[str, Any]:
    """What of the machine the interpreter needs: names for ``confine.empty_root``."""
    python = os.path.realpath(sys.executable)
    said = subprocess.run(
        [python, "-I", "-S", "-c", _MAPPED], capture_output=True, text=True, check=True
    )
    first, *found = said.stdout.splitlines()
    folders: list[str] = json.loads(first)
    libraries: set[str] = set()
    for path in filter(os.path.isfile, set(found)):
        if not any(path.startswith(folder + "/") for folder in folders):
            libraries.update(_names_of(path))
    loader = _loader_of(python)
    files = [python, *folders, *sorted(libraries | loader)]
    hidden = [
        os.path.join(folder, name)
        for folder in folders
        for name in ("site-packages", "dist-packages")
        if os.path.isdir(os.path.join(folder, name))
    ]
    taken = tuple(path + "/" for path in files)
    free = [p for p in _MOUNTPOINTS if os.path.isdir(p) and not any(_above(p, t) for t in taken)]
    if not free:
        raise _refused("no folder to build an empty root on")
    return {
        "python": python,
        "files": files,
        "hidden": hidden,
        "library_path": sorted({os.path.dirname(path) for path in libraries}),
        "mountpoint": free[0],
    }


def _above(folder: str, path: str) -> bool:
    return path.startswith(os.path.realpath(folder) + "/")


def _names_of(path: str) -> set[str]:
    """A library's file and the links beside it, by which it is looked up."""
    real = os.path.realpath(path)
    beside = (entry.path for entry in os.scandir(os.path.dirname(real)) if entry.is_symlink())
    return {real, *(link for link in beside if os.path.realpath(link) == real)}


def _loader_of(python: str) -> set[str]:
    """The dynamic loader, by the name that stands in the interpreter's file."""
    with open(python, "rb") as file:
        beginning = file.read(1 << 16)
    names = (word for word in beginning.split(b"\0") if word.startswith(b"/") and b"ld" in word)
    return {name.decode() for name in names if os.path.isfile(name)}


class Sandboxed:
    """One program, started in a sandbox; a context, whose end is the end of all that it started.

    Args:
        program: source of a Python program.
        limits: what it may use.
        descriptors: open ones that it gets, by their own numbers; no other one is passed on.
    """

    def __init__(self, program: str, limits: Limits, descriptors: tuple[int, ...] = ()) -> None:
        root = os.geteuid() == 0
        unshare: list[str] = [shutil.which("unshare") or "unshare", *_NAMESPACES]
        if not root:
            unshare += ["--user", "--map-root-user"]
        settings: dict[str, Any] = {
            **asdict(limits), **_python_files(), "root": root, "nobody": _NOBODY,
        }  # fmt: skip
        settings["files_open"] = limits.files
        self._limits = limits
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the context's end)
        with tempfile.TemporaryFile() as source:
            source.write(program.encode("utf-8", "surrogatepass"))
            source.seek(0)
            self._process = subprocess.Popen(
                [*unshare, sys.executable, "-I", confine.__file__, json.dumps(settings)],
                stdin=source,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=descriptors,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                cwd="/",
            )

    def __enter__(self) -> Sandboxed:
        """Itself, running."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing of it is left."""
        self.stop()
        self._output.close()

    def outcome(self) -> Outcome:
        """Wait for its end, which its limits bring about at the latest."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(self._limits.seconds + 1.0)
        return _outcome(code, self.stop())

    def stop(self) -> str:
        """End it now; the end of what it wrote."""
        with suppress(ProcessLookupError):  # the first process of a namespace takes all with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _OUTPUT))
        return str(self._output.read().decode("utf-8", "replace"))


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Run one Python program, isolated. That it ended well is no verdict on what it did.

    Raises:
        UnsupportedError: this machine cannot isolate it; it was not run.
    """
    require_isolation()
    with Sandboxed(program, limits or Limits()) as running:
        return running.outcome()


@functools.cache
def require_isolation() -> None:
    """See that a program can be isolated here: a harmless one is run, and what it can do is tried.

    Raises:
        UnsupportedError: it cannot; says what is missing.
    """
    if sys.platform != "linux" or shutil.which("unshare") is None:
        raise _refused(f"{sys.platform}, unshare: {shutil.which('unshare')}")
    files = f"FILES = {_python_files()['files']!r}\n"
    with Sandboxed(files + _PROBE, Limits(seconds=20.0)) as probe:
        found = probe.outcome()
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
import ctypes, os, socket, struct
try:
    socket.create_connection(("192.0.2.1", 9), 1).close()
    raise SystemExit("the network is there")
except OSError as error:
    if error.errno not in (101, 100):  # no network at all, not merely nobody who answers
        raise SystemExit(f"the network is not cut off: {{error}}")
known = {{"etc", "proc", "run", "var", "root", "sys", "boot"}}
folders = ["/" + name for name in os.listdir("/") if name in known]
for folder in folders:  # an interpreter may live in one of them: nothing else may be there
    for path in (folder + "/" + name for name in os.listdir(folder)):
        if any(file.startswith(path + "/") for file in FILES):
            folders.append(path)
        elif path not in FILES:
            raise SystemExit("the machine's files are there: " + path)
if not os.statvfs("/").f_flag & os.ST_RDONLY:
    raise SystemExit("the files can be written")
held = ctypes.create_string_buffer(24)
header = struct.pack("Ii", 0x20080522, 0)
if ctypes.CDLL(None).capget(header, held) or any(struct.unpack("6I", held.raw)[i] for i in (0, 3)):
    raise SystemExit("privileges are left")
if os.environ.keys() - {{"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "LC_CTYPE"}}:
    raise SystemExit(f"the environment is there: {{sorted(os.environ)}}")
print({_READY!r})
"""


def _outcome(code: int | None, output: str) -> Outcome:
    if code is None or code == 128 + signal.SIGXCPU or code == 128 + signal.SIGKILL:
        return Outcome("timeout", None, output)
    code = 128 - code if code > 128 else code
    return Outcome("passed" if code == 0 else "failed", code, output)
