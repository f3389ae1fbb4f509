"""Run as a script inside new namespaces: empties the root, drops all rights, starts the program.

Arguments: one JSON object; the program's source is on standard input. It imports nothing of the
library, since it runs before and after there is nothing but Python's own files.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
_MOUNT_SETATTR = 442  # the same number on all of them
_DETACH = 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_DROP_BOUND, _NO_NEW_PRIVILEGES = 24, 38


def _must(result: int, what: str) -> None:
    if result != 0:
        sys.stderr.write(f"sandbox: {what}: {os.strerror(ctypes.get_errno())}\n")
        sys.stderr.flush()
        os._exit(125)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    _must(_LIBC.mount(*given, flags, data.encode() or None), f"mount {target}")


def _read_only(target: str) -> None:
    attributes = struct.pack("QQQQ", 1, 0, 0, 0)
    done = _LIBC.syscall(_MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, len(attributes))
    _must(done, f"make {target} read-only")


def _place(root: str, path: str) -> None:
    """The host's file or folder ``path``, under the new root, by its own name."""
    folder, name = os.path.split(path)
    target = os.path.join(root + os.path.realpath(folder), name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "a").close()
    _mount(path, target, None, _BIND | _REC)


def empty_root(settings: dict[str, Any]) -> None:
    """A root that holds the named files, read-only, four devices and a scratch folder: /tmp."""
    os.umask(0o022)
    root = settings["mountpoint"]
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
    for path in settings["files"]:
        _place(root, path)
    for path in settings["hidden"]:
        _mount("tmpfs", root + path, "tmpfs", _NOSUID | _NODEV, "size=4k,mode=755")
    for path in _DEVICES:
        _place(root, path)
    os.makedirs(root + "/tmp")
    os.chdir(root)
    number = _PIVOT_ROOT.get(os.uname().machine, 155)
    _must(_LIBC.syscall(number, b".", b"."), "leave the machine's files")
    _must(_LIBC.umount2(b".", _DETACH), "let go of the machine's files")
    os.chdir("/")
    _read_only("/")
    size = f"size={settings['written']},nr_inodes=1024,mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, size)
    os.chdir("/tmp")


def drop_rights(settings: dict[str, Any], user: int) -> None:
    """No capability, not even after an exec; where we are root, another user and group."""
    for capability in range(64):
        _LIBC.prctl(_DROP_BOUND, capability, 0, 0, 0)
    if settings["root"]:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    _must(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")


def start(settings: dict[str, Any]) -> None:
    """Become the program, within its limits."""
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_CPU", int(settings["seconds"]) + 1),
        ("RLIMIT_NOFILE", settings["files_open"]),
        ("RLIMIT_FSIZE", settings["written"]),
        ("RLIMIT_NPROC", settings["processes"]),
        ("RLIMIT_AS", settings["memory"]),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))
    environment = {
        "PATH": "/nothing",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": ":".join(settings["library_path"]),
    }
    python = settings["python"]
    os.execve(python, [python, "-I", "-X", "utf8", "/tmp/program.py"], environment)


def main() -> None:
    """Confine, start, and pass on the exit code; 128 + n for signal n."""
    settings = json.loads(sys.argv[1])
    program = sys.stdin.buffer.read()
    empty_root(settings)
    with open("/tmp/program.py", "wb") as file:
        file.write(program)
    os.chmod("/tmp/program.py", 0o444)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process heeds no signal by default
    child = os.fork()
    if child == 0:
        drop_rights(settings, settings["nobody"])
        start(settings)
    # Another user than the program's, which so can neither signal nor trace who reports on it.
    drop_rights(settings, settings["nobody"] - 1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
