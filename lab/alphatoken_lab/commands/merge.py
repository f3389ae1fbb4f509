"""``alphatoken-lab merge``: WiSE-FT, averages of the weights before and after training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.cli.program import read_options
from alphatoken.errors import ConfigError
from alphatoken.support.options import option

_ABOUT = """\
Write theta = (1 - alpha) theta_before + alpha theta_after (WiSE-FT) as a model folder, for one
alpha or several. Arithmetic is float32; alpha 0 and 1 give the two models bitwise.

usage: alphatoken-lab merge --before FOLDER (--after FOLDER | --adapter FOLDER) --output_dir FOLDER
           [options]"""

_MORE = """\
LoRA
  --adapter FOLDER instead of --after: the base plus alpha times the merged delta.

a sweep
  Several --alpha write OUT/alpha-A each. `alphatoken-lab evaluate` measures a folder; a grid of
  `alphatoken-lab compare` trains, merges (the method wise-ft) and measures.

examples
  alphatoken-lab merge --before base --after runs/sft --alpha 0.5 --output_dir runs/wise
  alphatoken-lab merge --before base --adapter runs/lora --alpha 0.25 0.5 0.75 \\
      --output_dir runs/sweep
"""


@dataclass(kw_only=True)
class MergeOptions:
    """Everything that ``alphatoken-lab merge`` is told."""

    before: str = option(help="model that training started from")
    after: str | None = option(None, "the trained model", either="trained", required=True)
    adapter: str | None = option(
        None, "LoRA adapter trained on --before", either="trained", required=True
    )
    alpha: list[float] = option([0.5], "weight of --after, in [0, 1] (default 0.5)")
    output_dir: str = option(help="folder to write; it must not exist")
    traceback: bool = option(False, "show the whole traceback of an error")


def read(words: Sequence[str]) -> MergeOptions:
    """The options that ``words``, the arguments after ``alphatoken-lab merge``, stand for.

    Raises:
        ConfigError: words that cannot be read.
    """
    return read_options(
        "merge",
        MergeOptions,
        words,
        program="alphatoken-lab",
        description=_ABOUT,
        epilog=_MORE,
        allow_abbrev=False,
    )


def run(options: MergeOptions) -> None:
    """Write a model folder for each alpha; on an error none stays.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    from alphatoken_lab.methods.merge import check_alpha

    alphas = [check_alpha(alpha) for alpha in options.alpha]
    if len(set(alphas)) != len(alphas):
        raise ConfigError("an alpha is named twice", got=" ".join(map(str, alphas)))
    out = Path(options.output_dir)
    _check_folders(options, out)
    folders = {a: out / f"alpha-{a:g}" if len(alphas) > 1 else out for a in alphas}
    try:
        for alpha, folder in folders.items():
            _merge(options, folder, alpha)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # or the next try would be refused for it
        raise


def _check_folders(options: MergeOptions, out: Path) -> None:
    """Refuse, before a model is loaded, an output that exists and a folder that is no model."""
    from alphatoken.model.folder import is_adapter
    from alphatoken.model.loading import find_parts
    from alphatoken.support.resume import require_writable

    if out.exists():
        raise ConfigError(
            "the output folder exists", got=str(out), remedy="give another --output_dir"
        )
    require_writable(out)
    for flag, folder in (("--before", options.before), ("--after", options.after)):
        if folder is not None and is_adapter(folder):
            raise ConfigError(
                f"{flag} is the folder of an adapter",
                got=folder,
                why="it holds no weights of a model",
                remedy=f"--before BASE --adapter {folder}",
            )
    find_parts(options.before)
    find_parts(options.after or options.before, options.adapter)


def _merge(options: MergeOptions, out: Path, alpha: float) -> None:
    from alphatoken.model.loading import find_parts, load_tokenizer, no_progress_bar
    from alphatoken.support.storage import replacing_folder, write_json
    from alphatoken_lab.methods.merge import merge_models

    before, after = _models(options)
    # At alpha 1 nothing is interpolated: an adapter may then bring tokens that the base lacks.
    merged: Any = after if alpha == 1 else merge_models(before, after, alpha)
    if options.adapter is not None:
        merged.to(_stored_dtype(options.before))
    parts = find_parts(options.after or options.before, options.adapter)
    note = {"before": options.before, "after": options.after or options.adapter, "alpha": alpha}
    with replacing_folder(out) as partial:
        with no_progress_bar():
            merged.save_pretrained(partial)
        load_tokenizer(parts.tokenizer).save_pretrained(partial)
        write_json(partial / "merge.json", note)
    print(f"alpha {alpha:g}: {out}")


def _models(options: MergeOptions) -> tuple[Any, Any]:
    """The two models on the CPU: as they are stored, or in float32 under an adapter."""
    import torch

    from alphatoken.model.loading import load_causal_model

    # The delta of an adapter is small: bfloat16 would round it away twice.
    dtype: Any = "auto" if options.adapter is None else torch.float32
    before = load_causal_model(options.before, device="cpu", dtype=dtype)
    if options.adapter is None:
        return before, load_causal_model(str(options.after), device="cpu", dtype=dtype)
    adapted: Any = load_causal_model(
        options.before, adapter=options.adapter, device="cpu", dtype=dtype
    )
    return before, adapted.merge_and_unload()


def _stored_dtype(name: str) -> Any:
    import torch
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(name).dtype
    return torch.float32 if stored is None else stored
