"""WiSE-FT: average the weights before and after training.

    theta = (1 - alpha) theta_pre + alpha theta_ft

weight by weight, after training and at no cost to it. Arithmetic is float32 (float64 for float64
weights), whatever the weights are stored in; alpha 0 and 1 give the two models to the bit.

With diagonal Fishers of both models each number has a weight of its own:

    theta = (c0 theta_pre + c1 theta_ft) / (c0 + c1)
    c0 = (1 - alpha) max(F_pre, floor),   c1 = alpha max(F_ft, floor)

A weight without an entry in either Fisher is interpolated plainly; one with an entry in one of them
only is refused. With LoRA the first formula is the base plus alpha times the merged delta.

Source: Wortsman et al., arXiv 2109.01903; code mlfoundations/wise-ft@58b7a4b.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.support.precision import wide
from alphatoken.support.storage import write_json, write_tensors

__all__ = [
    "FLOOR",
    "Fishers",
    "WeightFolder",
    "check_alpha",
    "check_folders",
    "interpolate",
    "merge_folders",
    "merge_models",
    "merge_states",
]

FLOOR = 1e-8
"""Least Fisher entry, as in the published code."""

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_COPIED = (".json", ".jinja", ".model", ".txt", ".py", ".vocab")
"""Files beside the weights that belong to a model folder: configuration, tokenizer, template."""


@dataclass(frozen=True)
class Fishers:
    """Diagonal Fishers of both models, by parameter name.

    Attributes:
        before: of the model that training started from.
        after: of the trained one.
        floor: least entry; 0 would let two zeros divide by each other.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    floor: float = FLOOR

    def __post_init__(self) -> None:
        if not self.floor > 0:
            raise ConfigError(
                "the Fisher floor must be positive",
                got=str(self.floor),
                why="two entries of 0 would divide 0 by 0",
            )
        for name in sorted(set(self.before) ^ set(self.after)):
            raise InputError(
                "one Fisher has a weight that the other does not",
                got=name,
                why="its two sides would be weighed on different scales",
                remedy="fit both with the same layers and parameters",
            )

    def of(self, names: Sequence[str]) -> tuple[Tensor, Tensor] | None:
        """Entries of a weight under any of its names; None where there are none."""
        found = next((name for name in names if name in self.before), None)
        return None if found is None else (self.before[found], self.after[found])


def check_alpha(alpha: float) -> float:
    """``alpha``, if it lies in [0, 1].

    Raises:
        ConfigError: it does not.
    """
    if not 0 <= alpha <= 1:  # NaN too
        raise ConfigError(
            "alpha must lie in [0, 1]",
            got=str(alpha),
            why="outside, the model is not between the two",
            remedy="0 is the model before training, 1 the trained one",
        )
    return alpha


def interpolate(
    before: Tensor,
    after: Tensor,
    alpha: float,
    fishers: tuple[Tensor, Tensor] | None = None,
    floor: float = FLOOR,
) -> Tensor:
    """One weight between two; the module's text has the formulas.

    Args:
        before: of the model that training started from.
        after: of the same shape; the result has its dtype and device.
        alpha: in [0, 1]; 0 and 1 give either weight to the bit, with Fishers too.
        fishers: entries for both sides, of the weight's shape.
        floor: least entry of them.

    Returns:
        A tensor of its own; ``after`` itself, copied, where it holds no floating-point numbers.

    Raises:
        InputError: shapes differ.
    """
    if before.shape != after.shape or any(f.shape != after.shape for f in fishers or ()):
        shapes = [tuple(one.shape) for one in (before, after, *(fishers or ()))]
        raise InputError(
            "weights of one name have different shapes",
            got=", ".join(map(str, shapes)),
            why="a number that only one of them has cannot be interpolated",
            remedy="two models of one architecture and size",
        )
    if not after.is_floating_point() or alpha == 1:
        return after.detach().clone()
    if alpha == 0:  # 1 x + 0 y is not x to the bit where x is -0, nor where y is infinite
        return before.detach().to(after.device, after.dtype, copy=True)
    kind = wide(before.dtype, after.dtype)
    left, right = before.detach().to(after.device, kind), after.detach().to(kind)
    if fishers is None:
        return ((1 - alpha) * left + alpha * right).to(after.dtype)
    c0, c1 = (one.to(after.device, kind).clamp(min=floor) for one in fishers)
    c0, c1 = (1 - alpha) * c0, alpha * c1
    return ((c0 * left + c1 * right) / (c0 + c1)).to(after.dtype)


# --- in memory ----------------------------------------------------------------------------------


def merge_states(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    alpha: float,
) -> dict[str, Tensor]:
    """All weights of two state dicts, name by name.

    Names that share memory in ``after`` (tied weights) are one weight: it is interpolated once, and
    every name gets the same tensor. Integer buffers are those of ``after``.

    Raises:
        ConfigError: alpha outside [0, 1]. InputError: names or shapes differ.
    """
    check_alpha(alpha)
    _require_same(set(before), set(after))
    merged: dict[str, Tensor] = {}
    for names in _tied(after):
        _require_tied(before, names)
        with _named(names[0]):
            weight = interpolate(before[names[0]], after[names[0]], alpha)
        merged |= dict.fromkeys(names, weight)
    return {name: merged[name] for name in after}


@torch.no_grad()
def merge_models(before: nn.Module, after: nn.Module, alpha: float) -> nn.Module:
    """Write the merged weights into ``after``, in place, and return it.

    Raises:
        ConfigError, InputError: as ``merge_states``; ``after`` is then as it was.
    """
    own = after.state_dict()
    for name, weight in merge_states(before.state_dict(), own, alpha).items():
        own[name].copy_(weight)
    return after


def _tied(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Names, grouped by the memory that they stand for."""
    groups: dict[Any, list[str]] = {}
    for name, weight in state.items():
        place: Any = (weight.data_ptr(), weight.shape, weight.stride(), weight.device)
        groups.setdefault(place if weight.numel() else name, []).append(name)
    return list(groups.values())


def _require_tied(before: Mapping[str, Tensor], names: Sequence[str]) -> None:
    for name in names[1:]:
        if not torch.equal(before[name], before[names[0]]):
            raise InputError(
                "weights are tied after training and were not before",
                got=f"{names[0]} and {name}",
                why="one weight cannot lie between two",
                remedy="load both models with the same tie_word_embeddings",
            )


def _require_same(before: set[str], after: set[str]) -> None:
    if before == after:
        return
    only = {"before training": sorted(before - after), "after it": sorted(after - before)}
    said = [f"{len(names)} only {where} ({names[0]})" for where, names in only.items() if names]
    raise InputError(
        "the two models do not have the same weights",
        got=", ".join(said),
        why="a weight that only one of them has cannot be interpolated",
        remedy="merge a LoRA adapter with --adapter; otherwise give the model that training "
        "started from",
    )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors inside get the weight's name."""
    try:
        yield
    except InputError as error:
        raise InputError(
            error.what, got=f"{name}: {error.got}", why=error.why, remedy=error.remedy
        ) from None


# --- model folders ------------------------------------------------------------------------------


class WeightFolder:
    """The safetensors weights of a model folder, read one tensor at a time.

    Raises:
        DataError: the folder, its weights or its configuration cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError("there is no such model folder", got=str(path))
        self.config = self._json("config.json")
        self.files = self._files()
        text = self.config.get("text_config") or {}
        tied = self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        self.tied = bool(tied)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
            return dict(found)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{name} cannot be read", got=f"{self.path}: {error}") from None

    def _files(self) -> dict[str, str]:
        """Name of each weight -> its file."""
        if (self.path / _INDEX).is_file():
            return self._indexed(self._json(_INDEX).get("weight_map"))
        if not (self.path / _WEIGHTS).is_file():
            raise DataError(
                "the folder has no safetensors weights",
                got=str(self.path),
                remedy="save the model with save_pretrained; an adapter goes to --adapter",
            )
        with self._open(_WEIGHTS) as file:
            return dict.fromkeys(file.keys(), _WEIGHTS)

    def _indexed(self, found: Any) -> dict[str, str]:
        """The index's files, each a plain name: they are read here, and written under that name."""
        if not isinstance(found, dict) or not found:
            raise DataError("the index lists no weights", got=str(self.path / _INDEX))
        for name, file in found.items():
            plain = isinstance(file, str) and file == re.split(r"[/\\]", file)[-1]
            if not plain or not file.endswith(".safetensors"):
                raise DataError(
                    "the index names a file that is none of its folder",
                    got=f"{self.path / _INDEX}: {name} in {file!r}",
                    why="it would be read from elsewhere, and the merged weights written there",
                    remedy="plain names that end in .safetensors, as save_pretrained writes them",
                )
        return found

    def _open(self, name: str) -> Any:
        try:
            return safe_open(str(self.path / name), framework="pt", device="cpu")
        except Exception as error:  # whatever safetensors raises on a broken file
            raise DataError(
                "the weights cannot be read", got=f"{self.path / name}: {error}"
            ) from None

    @property
    def names(self) -> set[str]:
        """Weights; a copy of the embedding under the head's name is left out where it is tied."""
        return {name for name in self.files if not (self.tied and name.endswith(_HEAD))}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight, from the headers of the files alone."""
        found: dict[str, tuple[int, ...]] = {}
        for file_name in set(self.files.values()):
            with self._open(file_name) as file:
                names = [n for n in self.names if self.files[n] == file_name]
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        return found

    def read(self, name: str) -> Tensor:
        """Read one weight by name."""
        with self._open(self.files[name]) as file:
            weight: Tensor = file.get_tensor(name)
        return weight


def check_folders(before: str | Path, after: str | Path) -> tuple[WeightFolder, WeightFolder]:
    """The two folders, whose weights have the same names and shapes.

    Raises:
        DataError: a folder cannot be read. InputError: names or shapes differ.
    """
    left, right = WeightFolder(before), WeightFolder(after)
    shapes = left.shapes(), right.shapes()
    common = left.names & right.names
    for name in sorted(common, key=lambda name: ("embed" not in name and "wte" not in name, name)):
        first, second = (side[name] for side in shapes)
        if first == second:
            continue
        rows, small = max(first[0], second[0]), left if first[0] < second[0] else right
        words = ("embed", "wte", "head")
        if first[1:] == second[1:] and any(word in name for word in words):
            raise InputError(
                "the two models have vocabularies of different sizes",
                got=f"{name}: {first[0]} rows before training, {second[0]} after it",
                why="a token that only one of them has cannot be interpolated",
                remedy=f"give both {rows} rows: model.resize_token_embeddings({rows}) of the model "
                f"in {small.path}, and save_pretrained to another folder",
            )
        raise InputError(
            "the two models are of different sizes",
            got=f"{name}: {first} before training, {second} after it",
            why="a number that only one of them has cannot be interpolated",
            remedy="the model that training started from",
        )
    _require_same(left.names, right.names)
    return left, right


def merge_folders(
    before: str | Path,
    after: str | Path,
    out: str | Path,
    alpha: float,
    fishers: Fishers | None = None,
) -> int:
    """A model folder between two others, one file of weights in memory at a time.

    The files' layout, the configuration and the tokenizer are those of ``after``. The folder
    appears whole or not at all, with ``merge.json`` about what it is.

    Returns:
        How many weights were interpolated by Fisher.

    Raises:
        ConfigError: alpha outside [0, 1], or ``out`` exists. DataError: a folder cannot be read.
        InputError: names or shapes differ.
    """
    check_alpha(alpha)
    (left, right), target = check_folders(before, after), Path(out)
    if target.exists():
        raise ConfigError(
            "the output folder exists", got=str(out), remedy="give another --output_dir"
        )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        weighed = _write_weights(left, right, partial, alpha, fishers)
        for path in right.path.iterdir():
            if path.is_file() and path.suffix in _COPIED and path.name != _INDEX:
                shutil.copy(path, partial / path.name)
        _write_note(partial, left, right, alpha, weighed, fishers)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return weighed


def _entries(
    fishers: Fishers | None, name: str, weight: Tensor, tied: bool
) -> tuple[Tensor, Tensor] | None:
    """Fisher entries of a weight; those of a tied embedding may stand under the head's name."""
    if fishers is None:
        return None
    names = [name]
    if tied and "embed" in name:
        heads = (head for head in sorted(fishers.before) if head.endswith(_HEAD))
        # Positions are embedded too, by a weight of another shape.
        names += [head for head in heads if fishers.before[head].shape == weight.shape]
    return fishers.of(names)


def _write_weights(
    left: WeightFolder, right: WeightFolder, folder: Path, alpha: float, fishers: Fishers | None
) -> int:
    weighed = 0
    floor = FLOOR if fishers is None else fishers.floor
    kept: dict[str, str] = {}
    for file in sorted(set(right.files.values())):
        merged = {}
        for name in sorted(n for n in right.names if right.files[n] == file):
            with _named(name):
                before, after = left.read(name), right.read(name)
                found = _entries(fishers, name, after, right.tied)
                merged[name] = interpolate(before, after, alpha, found, floor)
            weighed += found is not None
        if merged:
            write_tensors(folder / file, merged, {"format": "pt"})
            kept |= dict.fromkeys(merged, file)
    if (right.path / _INDEX).is_file():
        write_json(folder / _INDEX, {"metadata": {}, "weight_map": kept})
    return weighed


def _write_note(
    folder: Path,
    left: WeightFolder,
    right: WeightFolder,
    alpha: float,
    weighed: int,
    fishers: Fishers | None,
) -> None:
    note = {
        "before": str(left.path),
        "after": str(right.path),
        "alpha": alpha,
        "weights": len(right.names),
        "by_fisher": weighed,
        "fisher_floor": None if fishers is None else fishers.floor,
    }
    write_json(folder / "merge.json", note)
