"""Wheels of all that the GPU kit needs besides torch, for a machine without a network.

python -m benchmarks.gpu.wheels fetch FOLDER     here, in the environment that `make` built
python -m benchmarks.gpu.wheels install FOLDER   there; what is not there in the very same version

`fetch --pythons 3.11,3.12` brings wheels for machines of both; without it, for this Python's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["closure", "main"]

ROOTS = (
    *("numpy", "scipy", "transformers", "safetensors", "jaxtyping"),
    *("accelerate", "datasets", "trl"),
    *("hypothesis", "pytest", "pytest-timeout", "beartype"),
)
"""What the library, its trainers and the property tests import."""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_LEFT_OUT = re.compile(r"torch|nvidia.*|triton|cuda.*", re.IGNORECASE)


def closure(roots: tuple[str, ...] = ROOTS, python: str = HERE) -> dict[str, str]:
    """Name -> version of the roots and of what they need, as installed here; torch left out.

    Args:
        roots: what is needed.
        python: of the other machine, such as "3.12". What only that one needs has no version.
    """
    from packaging.requirements import Requirement

    there = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = _name(waiting.pop())
        if name in found or _LEFT_OUT.fullmatch(name):
            continue
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
            continue
        found[name] = here.version
        for text in here.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(there):
                waiting.append(requirement.name)
    return dict(sorted(found.items()))


def fetch(folder: Path, pythons: Sequence[str] = (HERE,)) -> None:
    """Download the wheels of exactly these versions."""
    folder.mkdir(parents=True, exist_ok=True)
    for python in pythons:
        of_closure = closure(python=python).items()
        pins = [f"{name}=={version}" if version else name for name, version in of_closure]
        where = ("--python-version", python, "--dest", str(folder))
        _pip("download", "--no-deps", "--only-binary", ":all:", *where, *pins)


def install(folder: Path, target: Path) -> None:
    """Put what is not here in the wheels' own version into ``target``, without a network."""
    wheels = dict(_name_and_version(path) for path in sorted(folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(
            f"no wheels in {folder}/: run `make gpu-wheels` where there is a network and bring the "
            "folder along, or install the packages"
        )
    here = {_name(one.metadata["Name"] or ""): one.version for one in metadata.distributions()}
    pins = [f"{name}=={version}" for name, version in wheels.items() if here.get(name) != version]
    if not pins:
        return
    try:
        # By name, so that pip chooses the wheel of this Python.
        _pip("install", "--no-index", "--find-links", str(folder), "--no-deps", "--upgrade",
             "--target", str(target), *pins)  # fmt: skip
    except subprocess.CalledProcessError:
        raise SystemExit(
            f"{folder}/ has not every wheel that Python {HERE} on this machine takes: fetch them "
            f"with `make gpu-wheels GPU_PYTHONS={HERE}`"
        ) from None


def _name_and_version(wheel: Path) -> tuple[str, str]:
    name, version = wheel.name.split("-")[:2]
    return _name(name), version


def _name(text: str) -> str:
    return text.lower().replace("_", "-")


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], check=True)


def main() -> None:
    """Fetch or install."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["fetch", "install"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=Path("build/gpu"))
    parser.add_argument("--pythons", default=HERE, help="of the other machines, such as 3.11,3.12")
    options = parser.parse_args()
    if options.what == "fetch":
        fetch(options.folder, options.pythons.split(","))
    else:
        install(options.folder, options.target)


if __name__ == "__main__":
    main()
