"""``alphatoken-lab evaluate``: measure a folder as a cell of a grid is measured, and tabulate."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.cli.program import read_options
from alphatoken.errors import ConfigError
from alphatoken.score.options import ColumnOptions, ModelOptions
from alphatoken.support.options import option
from alphatoken_lab.measure.measures import MeasureOptions, read_measures

if TYPE_CHECKING:
    from alphatoken.model.loading import ModelParts
    from alphatoken_lab.measure.measures import Measures
    from alphatoken_lab.measure.measuring import Prepared

_ABOUT = """\
Measure a trained model: a folder, a LoRA adapter's folder (its base is loaded), or a name of the
hub. What is measured is what `alphatoken-lab compare` measures of every cell.

usage: alphatoken-lab evaluate MODEL (--retention_tasks NAME ... | --target_file FILE | ...)
           [options]"""

_MORE = """\
output
  OUT/evaluation.md     every score with its shots and whether the chat template was used, the means
                        General (--retention_tasks), Target, and Overall where both are there
  OUT/evaluation.json   the same, and the loss of each row
  OUT/answers-SET.json  answers for alpaca_eval --model_outputs; code-answers_rank0.db for lm_eval
                        --use_cache OUT/code-answers. What they leave in OUT/scores is put into the
                        tables by the same command with --only_report.

shots
  --shots mmlu=5 gsm8k=0. Without it: what the task's own file says, or else the paper's number
  (ARC-C 0, HellaSwag 0, MMLU 5, GSM8K 5), or else none.

examples
  alphatoken-lab evaluate runs/sft --retention_tasks arc_challenge hellaswag mmlu gsm8k \\
      --target_tasks humaneval
  alphatoken-lab evaluate runs/lora --retention_tasks tasks/arc.yaml --task_limit 100
  alphatoken-lab evaluate runs/dpo --questions alpaca=questions.jsonl

docs/evaluate.md says how win rates and executed code are scored."""


@dataclass(kw_only=True)
class EvaluateOptions(ModelOptions, MeasureOptions, ColumnOptions):
    """Options for reading and writing."""

    measures: str | None = option(None, "YAML file of measures, as a grid's `measures`")
    start: str | None = option(
        None, "model before training, reference of pairs (default: an adapter's base)"
    )
    chat: bool = option(True, "put rows and questions into the chat template")
    max_new_tokens: int | None = option(
        None, "maximum number of tokens of an answer (default 256)", at_least=1
    )
    max_length: int | None = option(None, "cut rows to N tokens", at_least=1)
    batch_size: int | None = option(None, "number of rows of one forward (default 16)", at_least=1)
    beta: float = option(0.1, "beta of DPO, for pairs")
    output_dir: str = option("runs/evaluate", "folder for results")
    overwrite_output: bool = option(False, "replace an earlier evaluation there")
    only_report: bool = option(False, "measure nothing: lay out the evaluation there anew")
    dry_run: bool = option(False, "check everything, list the measures, and stop")
    quiet: bool = option(False, "show no progress")
    traceback: bool = option(False, "show the whole traceback of an error")


def read(words: Sequence[str]) -> EvaluateOptions:
    """The options that ``words``, the arguments after ``alphatoken-lab evaluate``, stand for.

    Raises:
        ConfigError: words that cannot be read.
    """
    named = list(words)
    if named and not named[0].startswith("-"):
        named = ["--model_name_or_path", *named]
    return read_options(
        "evaluate",
        EvaluateOptions,
        named,
        program="alphatoken-lab",
        description=_ABOUT,
        epilog=_MORE,
        allow_abbrev=False,
    )


def run(options: EvaluateOptions) -> None:
    """Measure ``options.model_name_or_path`` and write the result.

    Raises:
        AlphaTokenError: wrong input, with what and where, before a model is loaded.
    """
    from alphatoken.support.storage import read_json, write_json, write_text
    from alphatoken_lab.measure.measuring import with_scores

    out = Path(options.output_dir)
    if options.only_report:
        result = read_json(out / "evaluation.json")
        if result is None:
            raise ConfigError("no evaluation is there", got=str(out), remedy="leave --only_report")
        result = with_scores(result, out)
    else:
        result = _measure_model(options, out)
        if result is None:
            return
    write_json(out / "evaluation.json", result)
    text = table(result)
    write_text(out / "evaluation.md", f"# {Path(options.model_name_or_path).name}\n\n{text}")
    print(text)
    print(f"written: {out / 'evaluation.md'}, evaluation.json")


def _measure_model(options: EvaluateOptions, out: Path) -> dict[str, Any] | None:
    from alphatoken.model.loading import find_limits, find_parts, load_causal_model, load_tokenizer
    from alphatoken_lab.measure.losses import encode_files
    from alphatoken_lab.measure.measuring import measure, prepare, require_template

    if options.quiet or not sys.stderr.isatty():  # bars of what lm-eval uses
        os.environ["TQDM_DISABLE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    _check_output(out, options)
    measures = _measures(options)
    if not options.beta > 0:
        raise ConfigError("--beta must lie above 0", got=repr(options.beta))
    parts = find_parts(options.model_name_or_path, options.adapter)
    start = options.start or (None if parts.adapter is None else parts.model)
    command = "dpo" if _has_pairs(measures) else "sft"
    if command == "dpo" and start is None:
        raise ConfigError(
            "the model before training is not named",
            got="pairs, which are compared with it",
            remedy="--start FOLDER",
        )
    prepared = prepare(measures, command, replace(options.fields, optional=True))
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=options.trust_remote_code)
    require_template(tokenizer, measures)
    limits = find_limits(parts, trust_remote_code=options.trust_remote_code)
    encoded = encode_files(prepared.rows, measures, tokenizer, limits)
    if options.dry_run:
        _show(measures, prepared, parts)
        return None

    def load(name: str, adapter: str | None = None) -> Any:
        return load_causal_model(
            name,
            adapter=adapter,
            device=options.device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )

    model = load(parts.model, parts.adapter)
    out.mkdir(parents=True, exist_ok=True)
    result = measure(
        model,
        tokenizer,
        measures,
        prepared,
        start=lambda: load(str(start)),
        folder=out,
        name=Path(options.model_name_or_path).name,
        beta=options.beta,
        encoded=encoded,
        progress=False if options.quiet else None,
    )
    return {"model": options.model_name_or_path, **result, "measures": measures.spec()}


def _check_output(out: Path, options: EvaluateOptions) -> None:
    from alphatoken.support.resume import require_writable

    if out.exists() and not out.is_dir():
        raise ConfigError("--output_dir is a file", got=str(out))
    if (out / "evaluation.json").exists() and not options.overwrite_output:
        raise ConfigError(
            "an evaluation is there already",
            got=str(out),
            remedy="--overwrite_output to replace it, or another --output_dir",
        )
    require_writable(out)


def _measures(options: EvaluateOptions) -> Measures:
    """Measures of the file, overridden by the command line."""
    from alphatoken_lab.measure.measures import require_files

    content = {**_file(options.measures), **options.set_measures()}
    for name in ("max_new_tokens", "max_length", "batch_size"):
        if getattr(options, name) is not None:
            content[name] = getattr(options, name)
    if not options.chat:
        content["chat"] = False
    measures = read_measures(content, options.measures or "the command line")
    if not (measures.target or measures.retention_file or measures.tasks):
        raise ConfigError(
            "nothing is to be measured",
            got="no tasks, files or questions",
            remedy="--retention_tasks arc_challenge, --target_file FILE, --questions NAME=FILE",
        )
    require_files(measures)
    return measures


def _file(path: str | None) -> dict[str, Any]:
    """Measures of a YAML file: the mapping itself, or what stands under ``measures`` in it."""
    from alphatoken.cli.recipes import find_recipe
    from alphatoken_lab.runner.grid_file import expand_variables

    if path is None:
        return {}
    if not Path(path).is_file():
        raise ConfigError("the file of --measures does not exist", got=path)
    content = find_recipe(path).options
    content = content.get("measures", content)
    if not isinstance(content, Mapping):
        raise ConfigError("the file of --measures holds no mapping", got=path)
    return dict(expand_variables(content, path))


def _has_pairs(measures: Measures) -> bool:
    from alphatoken.data import read_records
    from alphatoken.data.pairs import CHOSEN, REJECTED

    if measures.target_file is None:
        return False
    first = next((record for _, record in read_records(measures.target_file)), {})
    return any({*names} <= set(first) for names in zip(CHOSEN, REJECTED, strict=True))


def _show(measures: Measures, prepared: Prepared, parts: ModelParts) -> None:
    from alphatoken_lab.runner.tables import setting_text

    print(f"model: {parts.model}" + (f" with {parts.adapter}" if parts.adapter else ""))
    for name, path in measures.files.items():
        print(f"{name}_file: {path}")
    for group, tasks in prepared.tasks.items():
        for name, (_, how) in tasks.items():
            print(f"{group} task {name}: {setting_text(how)}")
    for name, questions in prepared.questions.items():
        print(f"questions {name}: {len(questions):,} questions")


def table(result: Mapping[str, Any]) -> str:
    """Every score with how it was measured, and the means, where all parts of one are there."""
    from alphatoken_lab.runner.tables import markdown, setting_text

    titles = {"retention": "General", "target": "Target"}
    details: Mapping[str, float] = result["details"]
    rows: list[list[str]] = []
    for group, title in titles.items():
        scores = {n: how for n, how in result["settings"].items() if n.startswith(f"{group}/")}
        for name, how in scores.items():
            score = f"{details[name]:.2f}" if name in details else "awaited"
            rows.append([title, f"`{name.split('/')[1]}`", score, setting_text(how)])
        if f"{group}_loss" in details:
            kind, loss = "pairs" if f"{group}_accuracy" in details else "rows", f"{group}_loss"
            how = "nats, lower is better"
            rows.append([title, f"loss of {kind}", f"{details[loss]:.4f}", how])
        if f"{group}_accuracy" in details:
            right = f"{details[f'{group}_accuracy']:.2f}"
            rows.append([title, "pairs that are right", right, "percent, ties half"])
        if scores and result[group] is not None:
            rows.append([f"**{title} Avg.**", "", f"**{result[group]:.2f}**", "mean of the above"])
    if result["overall"] is not None and result["unit"] == "score":
        both = f"mean of {' and '.join(titles.values())}"
        rows.append(["**Overall**", "", f"**{result['overall']:.2f}**", both])
    return markdown(["part", "measured", "score (%) or loss", "how"], rows)
