"""``alphatoken merge``: WiSE-FT, models between the one before training and the trained one."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.errors import ConfigError, FisherError

if TYPE_CHECKING:
    from alphatoken.policies.merge import Fishers

__all__ = ["run"]

_ABOUT = """\
Write theta = (1 - alpha) theta_before + alpha theta_after (WiSE-FT) as a model folder, for one
alpha or several. Arithmetic is float32; alpha 0 and 1 give the two models to the bit."""

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
  alphatoken merge --before base --after runs/sft --alpha 0.5 --out runs/wise
  alphatoken merge --before base --adapter runs/lora --alpha 0.25 0.5 0.75 --out runs/sweep \\
      --target_file target.jsonl --retention_file retention.jsonl
"""


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken merge``, ask for; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options = _parser().parse_args(list(words))
    from alphatoken.policies.merge import check_alpha

    alphas = [check_alpha(alpha) for alpha in options.alpha]
    if len(set(alphas)) != len(alphas):
        raise ConfigError("an alpha is named twice", got=" ".join(map(str, alphas)))
    out = Path(options.out)
    if out.exists():
        raise ConfigError("the output folder exists", got=str(out), remedy="give another --out")
    fishers = _fishers(options)
    if len(alphas) == 1:
        _merge(options, out, alphas[0], fishers)
        _measure(options, {alphas[0]: out}, out / "sweep.json")
        return 0
    folders = {alpha: out / f"alpha-{alpha:g}" for alpha in alphas}
    out.mkdir(parents=True)
    for alpha, folder in folders.items():
        _merge(options, folder, alpha, fishers)
    _measure(options, folders, out / "sweep.json")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alphatoken merge",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--before", required=True, metavar="FOLDER", help="model that training started from")
    trained = parser.add_mutually_exclusive_group(required=True)
    trained.add_argument("--after", metavar="FOLDER", help="trained model")
    trained.add_argument("--adapter", metavar="FOLDER", help="LoRA adapter trained on --before")
    add("--alpha", type=float, nargs="+", default=[0.5], help="in [0, 1] (default 0.5)")
    add("--out", required=True, metavar="FOLDER", help="to be written; must not exist")
    add("--fisher_before", metavar="FILE", help="Fisher of --before")
    add("--fisher_after", metavar="FILE", help="Fisher of --after")
    add("--fisher_floor", type=float, default=1e-8, help="least entry (default 1e-8)")
    add("--target_file", metavar="FILE", help="rows that training was for: measured on each")
    add("--retention_file", metavar="FILE", help="rows that must not be forgotten: likewise")
    add("--max_length", type=int, metavar="N", help="cut measured rows to N tokens")
    add("--debug", action="store_true", help="show the whole traceback of an error")
    return parser


def _fishers(options: argparse.Namespace) -> Fishers | None:
    if options.fisher_before is None and options.fisher_after is None:
        return None
    if options.fisher_before is None or options.fisher_after is None or options.adapter:
        raise ConfigError(
            "a Fisher-weighted merge needs a Fisher of both models",
            got="one of them, or --adapter",
            remedy="--fisher_before and --fisher_after with --after, or neither",
        )
    from alphatoken import FisherDrift
    from alphatoken.policies.merge import Fishers

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


def _merge(options: argparse.Namespace, out: Path, alpha: float, fishers: Fishers | None) -> None:
    from alphatoken.policies.merge import merge_folders

    if options.adapter is not None:
        _merge_adapter(options, out, alpha)
    else:
        weighed = merge_folders(options.before, options.after, out, alpha, fishers)
        if fishers is not None:
            print(f"{weighed} weights interpolated by Fisher, the others plainly")
    print(f"alpha {alpha:g}: {out}")


def _merge_adapter(options: argparse.Namespace, out: Path, alpha: float) -> None:
    """The base plus alpha times the delta: peft merges, the formula does the rest."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from alphatoken.cli.loading import loaded, no_progress_bar
    from alphatoken.policies.merge import merge_models

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(options.before)

    with no_progress_bar(), torch.no_grad():
        before = loaded("model", options.before, model)
        wide = model().float()  # the delta is small: bfloat16 would round it away twice
        adapted = loaded(
            "adapter", options.adapter, lambda: PeftModel.from_pretrained(wide, options.adapter)
        )
        merged: Any = merge_models(before.float(), adapted.merge_and_unload(), alpha)
        merged.to(_stored(options.before))
        tokenizer = loaded(
            "tokenizer", options.before, lambda: AutoTokenizer.from_pretrained(options.before)
        )
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        merged.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    os.rename(partial, out)


def _stored(name: str) -> Any:
    """The dtype that the base is stored in, which the merged model is stored in too."""
    import torch
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(name).dtype
    return torch.float32 if found is None else found


def _measure(options: argparse.Namespace, folders: dict[float, Path], path: Path) -> None:
    """Losses of each merged model, printed and written."""
    named = {"target": options.target_file, "retention": options.retention_file}
    files = {name: file for name, file in named.items() if file is not None}
    if not files:
        return
    from alphatoken.cli.loading import no_progress_bar
    from alphatoken.compare.evaluate import mean_response_loss, read_examples
    from alphatoken.compare.loading import load_causal_model
    from alphatoken.support.storage import write_json

    found = []
    for alpha, folder in folders.items():
        with no_progress_bar():
            model, tokenizer = load_causal_model(folder)
        losses = {
            name: mean_response_loss(model, read_examples(file, tokenizer, options.max_length))
            for name, file in files.items()
        }
        found.append({"alpha": alpha, **losses})
        print(f"alpha {alpha:g}: " + ", ".join(f"{n} {loss:.4f}" for n, loss in losses.items()))
    write_json(path, found)
