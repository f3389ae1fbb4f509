"""``python -m benchmarks.gpu.wheels FOLDER [PYTHON]``: what a GPU machine without a network needs.

Fills the folder with wheels of all that the GPU kit needs besides torch, in the versions that are
installed here, for this Python or the one named (such as 3.12); ``make gpu`` installs them there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["closure"]

ROOTS = (
    *("numpy", "scipy", "transformers", "safetensors", "jaxtyping"),
    *("accelerate", "datasets", "trl"),
    *("hypothesis", "pytest", "pytest-timeout", "beartype"),
)
"""What the library, its trainers and the property tests import."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_LEFT_OUT = re.compile(r"torch|nvidia.*|triton|cuda.*", re.IGNORECASE)


def closure(roots: tuple[str, ...] = ROOTS, python: str = HERE) -> list[str]:
    """The roots and what they need on a Python, pinned as installed here; torch left out."""
    there = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found or _LEFT_OUT.fullmatch(name):
            continue
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # only the other Python needs it
            found[name] = name
            continue
        found[name] = f"{name}=={here.version}"
        for text in here.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(there):
                waiting.append(requirement.name)
    return sorted(found.values())


def main(folder: Path, python: str = HERE) -> None:
    """Download the wheels, and write down their versions."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = folder / "requirements.txt"
    pins.write_text("\n".join(closure(python=python)) + "\n", encoding="utf-8")
    words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version"]
    command = [sys.executable, "-m", "pip", *words, python, "--dest", str(folder), "-r", str(pins)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
