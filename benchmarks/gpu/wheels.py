"""Wheels of all that the GPU kit needs besides torch, for a machine without a network.

python -m benchmarks.gpu.wheels fetch FOLDER     here, in the environment that `make` built
python -m benchmarks.gpu.wheels install FOLDER   there; only what is not installed
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["closure", "main"]

ROOTS = (
    *("numpy", "scipy", "transformers", "safetensors", "jaxtyping"),
    *("accelerate", "datasets", "filelock", "trl"),
    *("hypothesis", "pytest", "pytest-timeout", "beartype"),
)
"""What the library, its trainers and the property tests import."""
_LEFT_OUT = re.compile(r"torch|nvidia.*|triton|cuda.*", re.IGNORECASE)


def closure(roots: tuple[str, ...] = ROOTS) -> dict[str, str]:
    """Name -> version of the roots and of what they need, as installed here; torch left out."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        name = _name(waiting.pop())
        if name in found or _LEFT_OUT.fullmatch(name):
            continue
        here = metadata.distribution(name)
        found[name] = here.version
        for text in here.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return dict(sorted(found.items()))


def fetch(folder: Path) -> None:
    """Download the wheels of exactly these versions."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={version}" for name, version in closure().items()]
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *pins)


def install(folder: Path, target: Path) -> None:
    """Put those of which no version is here into ``target``, without a network."""
    wheels = {_name(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    if not wheels:
        raise SystemExit(
            f"no wheels in {folder}/: run `make gpu-wheels` where there is a network and bring the "
            "folder along, or install the packages"
        )
    here = {_name(found.metadata["Name"] or "") for found in metadata.distributions()}
    missing = [str(path) for name, path in sorted(wheels.items()) if name not in here]
    if missing:
        _pip("install", "--no-index", "--no-deps", "--target", str(target), *missing)


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
    options = parser.parse_args()
    if options.what == "fetch":
        fetch(options.folder)
    else:
        install(options.folder, options.target)


if __name__ == "__main__":
    main()
