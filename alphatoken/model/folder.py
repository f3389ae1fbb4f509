"""Folders that are handed over as models: what each of them is, before a library tries to read it.

A folder that holds no whole model is refused by what it holds, with the remedy for that; and after
loading, by the weights that were not in its files. Names on the hub are left to transformers.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.errors import (
    AlphaTokenWarning,
    ModelError,
    UnsupportedError,
    first_few,
    warn_caller,
)
from alphatoken.support.storage import LFS

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model",
              "vocab.json", "vocab.txt", "sentencepiece.bpe.model")  # fmt: skip
_NAMED = 4
"""Files or weights that are named one by one."""
_OTHER_TASKS = r"For(.*Classification|MaskedLM|QuestionAnswering|MultipleChoice)$"
_AGAIN = "`git lfs pull` in the folder, or download the file itself"
_QUANTISED = {"gptq": ".qweight", "awq": ".qweight", "fp8": "F8_", "fbgemm_fp8": "F8_"}
"""Ending of a name, or beginning of a dtype, by which weights are seen to be of a quantisation."""


def is_adapter(folder: str | Path) -> bool:
    """True for the folder of an adapter that holds no model beside it."""
    folder = Path(folder).expanduser()
    return (folder / _ADAPTER).is_file() and not (folder / _CONFIG).is_file()


def require_model_folder(name: str | Path) -> None:
    """Refuse a file or folder that holds no whole decoder; a name on the hub is not looked up.

    Raises:
        ModelError: says what it holds instead, and what to do.
        UnsupportedError: a model with an encoder.
    """
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ModelError(
            "a model is a folder, and this is a file",
            got=str(name),
            remedy=_of_gguf(folder)
            if folder.suffix == ".gguf"
            else f"its folder: {folder.parent}, if config.json and tokenizer lie there too",
        )
    if not folder.is_dir():
        return
    if not (folder / _CONFIG).is_file():
        raise _without_config(folder)
    if (folder / _ADAPTER).is_file():
        raise ModelError(
            "the folder holds a model and an adapter",
            got=f"{folder}: {_CONFIG} and {_ADAPTER}",
            why="transformers would load the adapter onto its own base, and not this model",
            remedy=f"move {_ADAPTER} and the adapter's weights to a folder of their own; "
            "--model_name_or_path with the one folder is the model, and with the other the adapter "
            "on the base that it names",
        )
    config = _json(folder / _CONFIG)
    if config.get("is_encoder_decoder"):
        raise UnsupportedError(
            "encoder-decoder models are not covered",
            got=f"{folder}: {(config.get('architectures') or ['?'])[0]}",
            why="it shifts labels by itself, and its predictions see the encoder's input too",
            remedy="a causal language model, such as the family's ...ForCausalLM",
        )
    _require_kind(folder, config)
    tensors = _require_files(folder, _WEIGHTS)
    _require_quantised(folder, config, tensors)


def require_adapter_folder(name: str | Path) -> None:
    """Refuse a folder that holds no whole adapter.

    Raises:
        ModelError: says what it holds instead, and what to do.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    if not (folder / _ADAPTER).is_file():
        raise _without_adapter(folder)
    _json(folder / _ADAPTER)
    _require_files(folder, _ADAPTER_WEIGHTS)


def _without_adapter(folder: Path) -> ModelError:
    got, newest = f"{folder}: {_listing(folder)}", _newest(folder, _ADAPTER)
    if newest:
        return ModelError(
            "the folder is that of a training run, and holds no adapter but its checkpoints",
            got=got,
            remedy=f"the newest one: --adapter {newest}",
        )
    if (folder / _CONFIG).is_file():
        return ModelError(
            "the folder is that of a model, and holds no adapter",
            got=got,
            remedy=f"--model_name_or_path {folder}",
        )
    return ModelError(
        "the folder holds no adapter", got=got, remedy=f"the folder that {_ADAPTER} lies in"
    )


def require_tokenizer_files(name: str | Path) -> None:
    """Refuse a folder without a tokenizer, or with pointers of Git LFS in its place.

    Raises:
        ModelError: says what to do.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    there = [folder / file for file in _TOKENIZER if (folder / file).is_file()]
    for path in there:
        _refuse_pointer(path)
    if not there:
        raise ModelError(
            "the folder has no tokenizer",
            got=f"{folder}: {_listing(folder)}",
            remedy="put that of the model it began from beside it: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained('{folder}')",
        )


def require_weights(report: Mapping[str, Any], name: str | Path) -> None:
    """Refuse a model with weights that were not in its files; say which of theirs it has not.

    Args:
        report: of ``from_pretrained(output_loading_info=True)``. Tied weights and what the model
            computes itself are not among the missing.
        name: of the model.

    Raises:
        ModelError: names the first weights.
    """
    shapes = sorted(report.get("mismatched_keys") or ())
    missing = sorted(report.get("missing_keys") or ())
    unexpected = sorted(report.get("unexpected_keys") or ())
    if shapes:
        key, stored, expected = shapes[0]
        raise ModelError(
            "weights are of other shapes than config.json says",
            got=f"{name}: {len(shapes)} weights, such as {key}: {tuple(stored)} in the file, "
            f"{tuple(expected)} by config.json",
            why="they would be random numbers",
            remedy="the config.json that was saved with these weights",
        )
    if missing:
        other = f"; the file has {', '.join(unexpected[:2])}" if unexpected else ""
        few = ", ".join(missing[:3])
        got = f"{name}: {len(missing)} that config.json asks for, such as {few}{other}"
        if all("head" in key or key.startswith("embed_out") for key in missing):
            raise ModelError(
                "the model has no output head in its files",
                got=got,
                why="it would be random numbers, and so would the losses",
                remedy="a causal language model: a bare model or a classifier has no head to value "
                "tokens by",
            )
        raise ModelError(
            "weights are not in the files",
            got=got,
            why="they would be random numbers",
            remedy="the config.json that was saved with these weights, or all of the weights "
            "(save_pretrained of the model itself writes both)",
        )
    if unexpected:
        warn_caller(
            f"{len(unexpected)} weights in the files of {name} have no place in the model and are "
            f"not loaded: {first_few(unexpected, _NAMED)}.",
            AlphaTokenWarning,
        )


# --- what a folder is -----------------------------------------------------------------------------


def _without_config(folder: Path) -> ModelError:
    newest = _newest(folder, _CONFIG) or _newest(folder, _ADAPTER)
    if newest:
        return ModelError(
            "the folder is that of a training run, and holds no model but its checkpoints",
            got=f"{folder}: {_listing(folder)}",
            remedy=f"the newest one: --model_name_or_path {newest}",
        )
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return ModelError(
            "the folder holds weights in GGUF, the format of llama.cpp",
            got=f"{folder}: {gguf[0].name}",
            why="they are quantised, and no gradient is taken through them",
            remedy=_of_gguf(gguf[0]),
        )
    if (sharded := _sharded(folder)) is not None:
        return sharded
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return ModelError(
            "the folder has weights and no config.json",
            got=f"{folder}: {_listing(folder)}",
            why="the weights alone do not say what model they are of",
            remedy=f"copy that of the model that they began from: cp BASE/config.json {folder}",
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{_CONFIG}"))
    return ModelError(
        "the folder holds no model",
        got=f"{folder}: {_listing(folder)}",
        remedy=f"one lies in it: --model_name_or_path {inside[0]}"
        if inside
        else "the folder that config.json and the weights lie in",
    )


def _require_kind(folder: Path, config: Mapping[str, Any]) -> None:
    architecture = str((config.get("architectures") or [""])[0])
    if re.search(_OTHER_TASKS, architecture):
        raise ModelError(
            "the model was not made to predict the next token",
            got=f"{folder}: {architecture}",
            why="it has no head that predicts the next token, by whose loss tokens are valued",
            remedy="a causal language model, such as the family's ...ForCausalLM",
        )


def _of_gguf(path: Path) -> str:
    return (
        "the folder of the model that it was made from, or what it holds as such a folder: "
        f"AutoModelForCausalLM.from_pretrained('{path.parent}', gguf_file='{path.name}')"
        ".save_pretrained(OTHER), and the tokenizer likewise (pip install gguf)"
    )


def _sharded(folder: Path) -> ModelError | None:
    """Refusal of a checkpoint that is spread over the processes that wrote it."""
    if (folder / "zero_to_fp32.py").is_file() or (folder / "latest").is_file():
        return ModelError(
            "the weights are in a checkpoint of DeepSpeed, spread over its processes",
            got=f"{folder}: {_listing(folder)}",
            remedy=f"gather them: python {folder}/zero_to_fp32.py {folder} {folder} "
            "--safe_serialization",
        )
    parts = sorted(path.parent for path in folder.glob("*/*.distcp"))
    if parts:
        return ModelError(
            "the weights are in a checkpoint of FSDP, spread over its processes",
            got=f"{folder}: {_listing(folder)}",
            remedy=f"gather them: accelerate merge-weights {parts[0]} {folder}",
        )
    return None


def _newest(folder: Path, file: str) -> Path | None:
    """The checkpoint of a run with the highest number that has this file."""
    numbered = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit() and (path / file).is_file()
    }
    return numbered[max(numbered)] if numbered else None


def _listing(folder: Path) -> str:
    return first_few(sorted(path.name for path in folder.iterdir()), _NAMED) or "nothing in it"


def _json(path: Path) -> dict[str, Any]:
    _refuse_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{type(content).__name__}, and no object")
    except ValueError as error:  # not UTF-8, not JSON
        raise ModelError(
            f"{path.name} of the folder is broken",
            got=f"{path}: {error}",
            remedy="download or copy it again",
        ) from None
    return content


# --- weights --------------------------------------------------------------------------------------


def _require_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Dtype of each tensor in the folder's weights, as far as their files say; all are whole."""
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = sorted(set(_json(index).get("weight_map", {}).values()))
            gone = [file for file in files if not (folder / file).is_file()]
            if gone:
                raise ModelError(
                    "shards of the weights are missing",
                    got=f"{folder}: no {first_few(gone, _NAMED)}; {len(files) - len(gone)} of "
                    f"{len(files)} are there",
                    remedy="copy or download them too",
                )
            break
        if (folder / name).is_file():
            files = [name]
            break
    else:
        raise _without_weights(folder, names)
    tensors: dict[str, str] = {}
    for file in files:
        _refuse_pointer(folder / file)
        if file.endswith(".safetensors"):
            tensors |= _dtypes_of(folder / file)
    return tensors


def _without_weights(folder: Path, names: Sequence[str]) -> ModelError:
    sharded = _sharded(folder)
    if sharded is not None:
        return sharded
    newest = _newest(folder, _CONFIG)
    return ModelError(
        "the folder has no weights",
        got=f"{folder}: {_listing(folder)}",
        remedy=f"the newest checkpoint in it: --model_name_or_path {newest}"
        if newest
        else f"copy or download {names[0]} too, or all its shards with {names[0]}.index.json",
    )


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise ModelError(
                f"{path.name} is a pointer of Git LFS, in place of the file itself",
                got=str(path),
                remedy=_AGAIN,
            )


def _dtypes_of(path: Path) -> dict[str, str]:
    """Dtype of each tensor in a safetensors file, which is refused unless it is whole."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length) if length < size else b"")
        tensors = {n: one for n, one in header.items() if n != "__metadata__"}
        ends = max((one["data_offsets"][1] for one in tensors.values()), default=0)
        dtypes = {name: str(one["dtype"]) for name, one in tensors.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{path.name} is no safetensors file",
            got=f"{path}: {size} bytes",
            remedy="copy or download it again",
        ) from None
    due = 8 + length + ends
    if size < due:
        raise ModelError(
            f"{path.name} is cut short",
            got=f"{path}: {size} bytes of {due}",
            remedy="copy or download it again",
        )
    return dtypes


def _require_quantised(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, str]) -> None:
    """Refuse plain weights under the configuration of a quantisation."""
    # On a machine that could run them, transformers would look for other tensors than there are.
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    mark = _QUANTISED.get(method)
    if mark is None or not tensors:
        return
    if any(name.endswith(mark) or dtype.startswith(mark) for name, dtype in tensors.items()):
        return
    raise ModelError(
        f"config.json says {method}, and the weights are not quantised",
        got=f"{folder}: {', '.join(sorted(set(tensors.values())))}, no "
        f"{'tensor' if mark.startswith('.') else 'dtype'} {mark}",
        why="one of the two is of another model",
        remedy="if the weights are right, delete quantization_config from config.json",
    )
