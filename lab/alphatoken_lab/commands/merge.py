"""``alphatoken-lab merge``: WiSE-FT, averages of the weights before and after training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.cli.options import option, read_options
from alphatoken.errors import ConfigError, FisherError
from alphatoken.score.options import ColumnOptions

if TYPE_CHECKING:
    from alphatoken_lab.compare.evaluate import Encoded
    from alphatoken_lab.methods.merge import Fishers

__all__ = ["MergeOptions", "run"]

_ABOUT = """\
Write theta = (1 - alpha) theta_before + alpha theta_after (WiSE-FT) as a model folder, for one
alpha or several. Arithmetic is float32; alpha 0 and 1 give the two models to the bit.

usage: alphatoken-lab merge --before FOLDER (--after FOLDER | --adapter FOLDER) --output_dir FOLDER
           [options]"""

_MORE = """\
LoRA
  --adapter FOLDER instead of --after: the base plus alpha times the merged delta.

Fisher-weighted
  --fisher_before and --fisher_after, diagonal Fishers of the two models (`alphatoken fisher`).
  Weights that neither Fisher has are interpolated plainly.

a sweep
  Several --alpha write OUT/alpha-A each. With --target_file and --retention_file every one is
  measured, and OUT/sweep.json holds the losses.

examples
  alphatoken-lab merge --before base --after runs/sft --alpha 0.5 --output_dir runs/wise
  alphatoken-lab merge --before base --adapter runs/lora --alpha 0.25 0.5 0.75 \\
      --output_dir runs/sweep --target_file target.jsonl --retention_file retention.jsonl
"""


@dataclass(kw_only=True)
class _Merging:
    """Options for models to merge."""

    before: str = option(help="model that training started from")
    after: str | None = option(None, "the trained model", either="trained", required=True)
    adapter: str | None = option(
        None, "LoRA adapter trained on --before", either="trained", required=True
    )
    alpha: list[float] = option([0.5], "weight of --after, in [0, 1] (default 0.5)")
    output_dir: str = option(help="folder to write; it must not exist")
    fisher_before: str | None = option(None, "Fisher file of --before")
    fisher_after: str | None = option(None, "Fisher file of --after")
    fisher_floor: float = option(1e-8, "lower limit of a Fisher's entries")
    target_file: str | None = option(None, "rows of the target, to measure each merge on")
    retention_file: str | None = option(
        None, "rows that must not be forgotten, to measure each merge on"
    )
    max_length: int | None = option(None, "cut measured rows to N tokens")
    traceback: bool = option(False, "show the whole traceback of an error")


@dataclass(kw_only=True)
class MergeOptions(_Merging, ColumnOptions):
    """Everything that ``alphatoken-lab merge`` is told."""


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken-lab merge``, ask for; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options = read_options(
        "merge",
        MergeOptions,
        words,
        program="alphatoken-lab",
        description=_ABOUT,
        epilog=_MORE,
        allow_abbrev=False,
    )
    from alphatoken_lab.methods.merge import check_alpha

    alphas = [check_alpha(alpha) for alpha in options.alpha]
    if len(set(alphas)) != len(alphas):
        raise ConfigError("an alpha is named twice", got=" ".join(map(str, alphas)))
    out = Path(options.output_dir)
    rows = _check(options, out)
    fishers = _fishers(options)
    if len(alphas) == 1:
        _merge(options, out, alphas[0], fishers)
        _measure(rows, {alphas[0]: out}, out / "sweep.json")
        return 0
    folders = {alpha: out / f"alpha-{alpha:g}" for alpha in alphas}
    out.mkdir(parents=True)
    try:
        for alpha, folder in folders.items():
            _merge(options, folder, alpha, fishers)
    except BaseException:
        shutil.rmtree(out)  # or the next try would be refused for it
        raise
    _measure(rows, folders, out / "sweep.json")
    return 0


def _check(options: MergeOptions, out: Path) -> Encoded:
    """Check all that can be checked before loading a model; tokens of the rows to measure."""
    from alphatoken.model.loading import find_limits, find_parts, load_tokenizer
    from alphatoken.support.resume import require_writable
    from alphatoken_lab.compare.evaluate import encode_files, read_files
    from alphatoken_lab.compare.measures import Measures
    from alphatoken_lab.methods.merge import check_folders

    if out.exists():
        raise ConfigError(
            "the output folder exists", got=str(out), remedy="give another --output_dir"
        )
    require_writable(out)
    _refuse_adapters(options)
    parts = find_parts(options.after or options.before, options.adapter)
    files = Measures(
        target_file=options.target_file,
        retention_file=options.retention_file,
        max_length=options.max_length,
    )
    measured = options.target_file is not None or options.retention_file is not None
    rows = read_files(files, "sft", replace(options.fields, optional=True)) if measured else {}
    if options.after is not None:
        find_parts(options.before)
        check_folders(options.before, options.after)
    if not measured:
        return {}
    return encode_files(rows, files, load_tokenizer(parts.tokenizer), find_limits(parts))


def _refuse_adapters(options: MergeOptions) -> None:
    """Refuse the folder of an adapter where a model is to be named."""
    from alphatoken.model.folder import is_adapter

    for flag, folder in (("--before", options.before), ("--after", options.after)):
        if folder is not None and is_adapter(folder):
            raise ConfigError(
                f"{flag} is the folder of an adapter",
                got=folder,
                why="it holds no weights of a model",
                remedy=f"--before BASE --adapter {folder}",
            )


def _fishers(options: MergeOptions) -> Fishers | None:
    if options.fisher_before is None and options.fisher_after is None:
        return None
    if options.fisher_before is None or options.fisher_after is None or options.adapter:
        raise ConfigError(
            "a Fisher-weighted merge needs a Fisher of both models",
            got="one of them, or --adapter",
            remedy="--fisher_before and --fisher_after with --after, or neither",
        )
    from alphatoken import FisherDrift
    from alphatoken_lab.methods.merge import Fishers

    found = []
    for path in (options.fisher_before, options.fisher_after):
        drift = FisherDrift.load(path)
        if drift.structure != "diagonal":
            raise FisherError(
                "a Fisher-weighted merge needs a diagonal Fisher",
                got=f"{path}: {drift.structure}",
                remedy="alphatoken fisher --structure diagonal",
            )
        found.append(dict(drift.fisher))
    return Fishers(found[0], found[1], options.fisher_floor)


def _merge(options: MergeOptions, out: Path, alpha: float, fishers: Fishers | None) -> None:
    from alphatoken_lab.methods.merge import merge_folders

    if options.adapter is not None:
        _merge_adapter(options, out, alpha)
    else:
        weighed = merge_folders(options.before, str(options.after), out, alpha, fishers)
        if fishers is not None:
            print(f"{weighed} weights interpolated by Fisher, the others plainly")
    print(f"alpha {alpha:g}: {out}")


def _merge_adapter(options: MergeOptions, out: Path, alpha: float) -> None:
    """The base plus alpha times the delta: peft merges, the formula does the rest."""
    import torch

    from alphatoken.model.loading import (
        find_parts,
        load_causal_model,
        load_tokenizer,
        no_progress_bar,
    )
    from alphatoken_lab.methods.merge import merge_models

    # The delta is small: bfloat16 would round it away twice.
    before, adapted = (
        load_causal_model(options.before, adapter=adapter, device="cpu", dtype=torch.float32)
        for adapter in (None, options.adapter)
    )
    whole: Any = adapted
    merged: Any = whole.merge_and_unload()
    if alpha < 1:
        _require_rows_between(before, merged, alpha)
        merged = merge_models(before, merged, alpha)
    merged.to(_stored(options.before))
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with no_progress_bar():
        merged.save_pretrained(partial)
    tokenizer = load_tokenizer(find_parts(options.before, options.adapter).tokenizer)
    tokenizer.save_pretrained(partial)
    os.rename(partial, out)


def _require_rows_between(before: Any, merged: Any, alpha: float) -> None:
    """Refuse an adapter that brings tokens along which the base has not."""
    rows = [len(model.get_input_embeddings().weight) for model in (before, merged)]
    if rows[0] != rows[1]:
        raise ConfigError(
            "the adapter's embedding is not of the base's size",
            got=f"{rows[1]} rows, {rows[0]} in the base, alpha {alpha:g}",
            why="a row that only one of them has cannot be interpolated",
            remedy="--alpha 1 alone",
        )


def _stored(name: str) -> Any:
    """The dtype that the base is stored in, which the merged model is stored in too."""
    import torch
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(name).dtype
    return torch.float32 if found is None else found


def _measure(rows: Encoded, folders: dict[float, Path], path: Path) -> None:
    """Losses of each merged model, printed and written."""
    if not rows:
        return
    from alphatoken.model.loading import load_causal_model
    from alphatoken.support.storage import write_json
    from alphatoken_lab.compare.evaluate import mean_response_loss

    found = []
    for alpha, folder in folders.items():
        model = load_causal_model(folder)
        losses = {
            name: mean_response_loss(model, some)
            for name, some in rows.items()
            if isinstance(some, list)  # no pairs
        }
        found.append({"alpha": alpha, **losses})
        print(f"alpha {alpha:g}: " + ", ".join(f"{n} {loss:.4f}" for n, loss in losses.items()))
    write_json(path, found)
