"""``python -m tests.goldens write|check FOLDER``: what the library computes, held against a move.

A change that only moves code leaves every number as it is. ``write`` keeps the numbers of this
checkout, ``check`` computes them again and names all that differ, to the bit: values under every
estimator and their certificates, runs of the trainers with their logs and last weights, the tables
of each diagnostic, and what command lines parse to. Bits hold on one machine and one set of
packages; so the folder belongs to a machine, and is not in the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

from tests.integration.snapshot import bits

ROOT = Path(__file__).parent.parent
_ESTIMATORS = ("alphatoken", "direct", "same_layer_hop", "path", "label", "paper_literal")
_OF_TIME = re.compile(r"time|second|runtime|per_second|flos|memory|cost|price|_loss_at|version")
"""Names of what a clock or the machine says, which no golden holds."""

Golden = dict[str, Any]


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(bits(tensor) or b"").hexdigest()[:16]
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest}"


def _plain(value: Any) -> Any:
    """For JSON, without what depends on the clock or on where a file lies."""
    if isinstance(value, torch.Tensor):
        return _digest(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if not _OF_TIME.search(str(k))}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float | int | str | bool | None):
        return value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _values(model: Any, train: list[Any], validation: list[Any], *, fisher: Any) -> Golden:
    from alphatoken import Scorer, ScorerConfig
    from alphatoken.data import collate

    kept: Golden = {}
    validation_batches = [collate(validation[i : i + 4]) for i in range(0, len(validation), 4)]
    for name in _ESTIMATORS:
        config = ScorerConfig(estimator=name, layers=3)
        scorer = Scorer(model, validation_batches, fisher, config)
        values = scorer.score(collate(train))
        kept[name] = {
            part: getattr(values, part)
            for part in ("total", "adaptation", "stability")
            if getattr(values, part, None) is not None
        }
        kept[name]["certificate"] = scorer.verify(collate(train[:2]))
    return kept


def values_of_the_small_decoder() -> Golden:
    """Six estimators with a Fisher, and certificates."""
    from alphatoken import fit_fisher
    from tests.integration import subjects

    model = subjects.model()
    train, validation = subjects.examples("topics", 0, 4, 96), subjects.examples("topics", 9, 8, 96)
    prompts = [example.input_ids[:12] for example in validation]
    fisher = fit_fisher(model, prompts, samples=8, max_new_tokens=8, layers=3, progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * parameter)
    return _values(model, train, validation, fisher=fisher)


def values_of_smollm2() -> Golden:
    """Six estimators without a Fisher, and certificates, where the model is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from alphatoken.data import EncodeOptions, encode_rows
    from alphatoken.data.stdlib import code_rows
    from tests.places import models_folder

    folder = models_folder() / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        return {"not here": str(folder.name)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = EncodeOptions(max_length=96, on_empty="skip")
    examples, _ = encode_rows(code_rows(8), AutoTokenizer.from_pretrained(folder), options)
    return _values(model, examples[:2], examples[2:6], fisher=None)


def _run(words: list[str], out: Path) -> Golden:
    """A training command: its logs, its last weights, and its values a token."""
    import pyarrow.parquet as pq
    from safetensors.torch import load_file

    from tests.both_programs import main

    status = main([*words, "--output_dir", str(out), "--use_cpu", "--report_to", "none"])
    if status:
        return {"status": status}
    state = json.loads(next(iter(sorted(out.rglob("trainer_state.json")))).read_text())
    tables = {
        "/".join(path.parts[-2:]): {
            name: hashlib.sha256(str(column).encode()).hexdigest()[:16]
            for name, column in pq.read_table(path).to_pydict().items()
        }
        for path in sorted(out.rglob("*.parquet"))
    }
    return {"log": state["log_history"], "weights": load_file(out / "model.safetensors")} | tables


def training() -> Golden:
    """One run of each trainer, with a Fisher and a running direction, and one over all tokens."""
    from tests.integration import tiny_training

    with tempfile.TemporaryDirectory() as name:
        place = tiny_training.saved(Path(name), 24)
        model = ["--model_name_or_path", str(place / "model")]
        common = [
            "--max_steps", "4", "--per_device_train_batch_size", "4", "--logging_steps", "1",
            "--save_steps", "4", "--validation_rows", "4", "--learning_rate", "1e-3",
        ]  # fmt: skip
        fisher = ["--retention", "diagonal", "--fisher_prompts", "4"]
        sft = ["sft", *model, "--train_file", str(place / "rows.jsonl"), *common]
        dpo = ["dpo", *model, "--train_file", str(place / "pairs.jsonl"), *common]
        return {
            "sft": _run([*sft, *fisher], place / "sft"),
            "sft label": _run([*sft, "--estimator", "label"], place / "sft-label"),
            "dpo": _run([*dpo, *fisher], place / "dpo"),
        }


def diagnoses() -> Golden:
    """The tables of each diagnostic, of sizes that no clock decides."""
    from alphatoken.fidelity import registry
    from tests.integration.subjects import subject

    small: dict[str, dict[str, Any]] = {
        "estimators": {"layers": (1, 3)},
        "coverage": {"draws": 40, "clusters": 6, "points": 200},
        "drift": {"probes": 8},
        "sensitivity": {
            "estimators": ("alphatoken", "label"), "layers": (1, 3), "windows": (0, 32),
            "weights": (0.0, 1.5),
        },
        "stability": {"resamples": 200},
    }  # fmt: skip
    kept: Golden = {}
    for entry in registry.DIAGNOSTICS:
        module = entry.load()
        given = subject("near", tokens=200, validation_rows=8, length=64)
        found = module.diagnose(given, module.Options(**small.get(entry.name, {})))
        kept[entry.name] = {table.key: list(table.records()) for table in found.tables}
    return kept


def _command_lines() -> Iterator[str]:
    """Of all pages, joined where a line goes on."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        text = page.read_text().replace("\\\n", " ")
        yield from re.findall(r"^\s*(?:>\s*)?(alphatoken [a-z]+ .*)$", text, re.M)


def _simple() -> dict[str, Any]:
    from alphatoken.cli.filter import FilterOptions
    from alphatoken.cli.fisher import FisherOptions
    from alphatoken.cli.score import ScoreOptions
    from alphatoken_lab.commands.compare import CompareOptions
    from alphatoken_lab.commands.evaluate import EvaluateOptions
    from alphatoken_lab.commands.merge import MergeOptions
    from alphatoken_lab.commands.paper import PaperOptions

    return {
        "score": ScoreOptions, "filter": FilterOptions, "fisher": FisherOptions,
        "evaluate": EvaluateOptions, "merge": MergeOptions, "compare": CompareOptions,
        "paper": PaperOptions,
    }  # fmt: skip


def _each_option() -> Iterator[str]:
    """A line for each option of each command, beside those that it cannot do without."""
    from alphatoken.cli.options import CommandParser, add_options

    for command, options in _simple().items():
        parser = CommandParser(command)
        add_options(parser, options)
        needed = " ".join(f"{a.option_strings[0]} x" for a in parser._actions if a.required)
        either = " ".join(
            f"{group._group_actions[0].option_strings[0]} x"
            for group in parser._mutually_exclusive_groups
            if group.required
        )
        for action in parser._actions:
            for flag in action.option_strings if action.dest != "help" else ():
                value = "" if action.nargs == 0 else str(list(action.choices or "2")[-1])
                yield f"alphatoken {command} {needed} {either} {flag} {value}"


def _parsed(words: list[str]) -> Any:
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.options import read_options
    from alphatoken.cli.training import trainer_of

    command, rest = words[0], words[1:]
    if command in _simple():
        return read_options(command, _simple()[command], rest)
    if command in ("sft", "dpo"):
        return read_arguments(command, rest, trainer_of(command)[0])
    return "not parsed here"


def command_lines() -> Golden:
    """Each line of the pages, and of each option, with what it parses to, or its refusal."""
    kept: Golden = {}
    for line in sorted({*_command_lines(), *_each_option()}):
        try:
            words = shlex.split(line, comments=True)[1:]
            kept[line] = _parsed(words)
        except (Exception, SystemExit) as problem:
            kept[line] = f"{type(problem).__name__}: {problem}"[:200]
    return kept


PIECES: tuple[Callable[[], Golden], ...] = (
    values_of_the_small_decoder,
    values_of_smollm2,
    training,
    diagnoses,
    command_lines,
)


def _differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            yield from _differences(before.get(name), after.get(name), f"{place}/{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, f"{place}[{i}]")
    elif json.dumps(before) != json.dumps(after):
        yield f"{place}: {str(before)[:80]} -> {str(after)[:80]}"


def main() -> int:
    """Write or check the goldens of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[piece.__name__ for piece in PIECES])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wrong = 0
    for piece in PIECES:
        if options.only and piece.__name__ not in options.only:
            continue
        now = json.loads(json.dumps(_plain(piece()), sort_keys=True))
        path = options.folder / f"{piece.__name__}.json"
        if options.what == "write":
            path.write_text(json.dumps(now, sort_keys=True, indent=1))
            print(f"{piece.__name__}: written")
            continue
        found = list(_differences(json.loads(path.read_text()), now))
        wrong += len(found)
        print(f"{piece.__name__}: {'equal' if not found else f'{len(found)} differences'}")
        print("".join(f"  {line}\n" for line in found[:20]), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
