"""``alphatoken-lab evaluate``: check, load, measure as a cell of a grid is measured, tabulate."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from alphatoken.data import read_records
from alphatoken.data.pairs import CHOSEN, REJECTED
from alphatoken.errors import ConfigError
from alphatoken.model.loading import (
    ModelParts,
    find_limits,
    find_parts,
    load_causal_model,
    load_tokenizer,
)
from alphatoken.support.resume import require_writable
from alphatoken.support.storage import write_json, write_text
from alphatoken_lab.commands.compare_grid import expanded, require_known
from alphatoken_lab.commands.evaluate import EvaluateOptions
from alphatoken_lab.compare.evaluate import encode_files, measure, read_files, require_template
from alphatoken_lab.compare.measures import OPPONENT, Measures
from alphatoken_lab.compare.scores import Prepared, prepare
from alphatoken_lab.compare.tables import markdown, setting_text

__all__ = ["run", "table"]


def run(options: EvaluateOptions) -> None:
    """Measure ``options.model_name_or_path`` and write the result.

    Raises:
        AlphaTokenError: wrong input, with what and where, before a model is loaded.
    """
    if options.quiet or not sys.stderr.isatty():  # bars of what lm-eval uses
        os.environ["TQDM_DISABLE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    out = Path(options.output_dir)
    _check_output(out, options)
    measures = _measures(options)
    command = _command(measures)
    if not options.beta > 0:
        raise ConfigError("--beta must lie above 0", got=repr(options.beta))
    parts = find_parts(options.model_name_or_path, options.adapter)
    start = options.start or (None if parts.adapter is None else parts.model)
    _require_start(measures, command, start)
    rows = read_files(measures, command, replace(options.fields, optional=True))
    ready = prepare(measures, code_container=options.code_container)
    tokenizer = load_tokenizer(parts.tokenizer, trust_remote_code=options.trust_remote_code)
    require_template(tokenizer, measures)
    limits = find_limits(parts, trust_remote_code=options.trust_remote_code)
    encoded = encode_files(rows, measures, tokenizer, limits)
    if options.dry_run:
        _show(measures, ready, parts)
        return
    model = _load(parts.model, options, parts.adapter)
    out.mkdir(parents=True, exist_ok=True)
    with redirect_stderr(io.StringIO()) if options.quiet else nullcontext():  # lm-eval's bars
        found = measure(
            model,
            tokenizer,
            measures,
            command=command,
            start=lambda: _load(str(start), options),
            beta=options.beta,
            folder=out,
            prepared=ready,
            encoded=encoded,
            progress=False if options.quiet else None,
        )
    result = {"model": options.model_name_or_path, **found, "measures": measures.spec()}
    write_json(out / "evaluation.json", result)
    text = f"# {Path(options.model_name_or_path).name}\n\n{table(result)}"
    write_text(out / "evaluation.md", text)
    print(table(result))
    print(f"written: {out / 'evaluation.md'}, evaluation.json")


def _check_output(out: Path, options: EvaluateOptions) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError("--output_dir is a file", got=str(out))
    if (out / "evaluation.json").exists() and not options.overwrite_output:
        raise ConfigError(
            "an evaluation is there already",
            got=str(out),
            remedy="--overwrite_output to replace it, or another --output_dir",
        )
    require_writable(out)


def _load(name: str, options: EvaluateOptions, adapter: str | None = None) -> Any:
    return load_causal_model(
        name,
        adapter=adapter,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )


# --- what is asked ------------------------------------------------------------------------------


def _measures(options: EvaluateOptions) -> Measures:
    """Measures of the file, overridden by the command line."""
    said = {
        "retention_tasks": options.tasks,
        "target_tasks": options.target_tasks,
        "shots": _pairs("--shots", options.shots, "mmlu=5", int),
        "task_path": options.task_path,
        "task_limit": options.task_limit,
        "task_chat": options.task_chat or None,
        "target_file": options.target_file,
        "retention_file": options.retention_file,
        "judge_sets": _sets(options),
        "judge": _judge(options),
        "max_new_tokens": options.max_new_tokens,
        "max_length": options.max_length,
        "batch_size": options.batch_size,
        "chat": None if options.chat else False,
    }
    measures = Measures(
        **{**_file(options.measures), **{k: v for k, v in said.items() if v is not None}}
    )
    if not (measures.target or measures.retention):
        raise ConfigError(
            "nothing is to be measured",
            got="no tasks, files or judge sets",
            remedy="--tasks arc_challenge, --target_file FILE, --judge_set NAME=QUESTIONS",
        )
    if measures.judge and not measures.sets:
        raise ConfigError("a judge has nothing to judge", got="no --judge_set")
    for name in ("target_file", "choosing_file", "retention_file"):
        path = getattr(measures, name)
        if path is not None and not Path(path).exists():
            raise ConfigError(f"{name} does not exist", got=path, remedy="check the path")
    return measures


def _file(path: str | None) -> dict[str, Any]:
    """Measures of a YAML file: the mapping itself, or what stands under ``measures`` in it."""
    import yaml

    if path is None:
        return {}
    if not Path(path).is_file():
        raise ConfigError("the file of --measures does not exist", got=path)
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError("the file of --measures is no YAML", got=f"{path}: {error}") from None
    if isinstance(found, Mapping) and "measures" in found:
        found = found["measures"]
    if not isinstance(found, Mapping):
        raise ConfigError("the file of --measures holds no mapping", got=path)
    require_known(found, {one.name for one in fields(Measures)}, path)
    return dict(expanded(dict(found), path))


def _pairs(flag: str, words: list[str] | None, example: str, kind: Any = str) -> Any:
    """``a=1 b=2`` as {a: 1, b: 2}."""
    if words is None:
        return None
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        try:
            found[name] = kind(value)
        except ValueError:
            given = ""
        if not (name and given and value):
            raise ConfigError(f"{flag} is NAME=VALUE", got=word, remedy=f"{flag} {example}")
    return found


def _sets(options: EvaluateOptions) -> Any:
    pairs = _pairs("--judge_set", options.judge_set, "alpaca=questions.jsonl,outputs.json")
    if pairs is None:
        return None
    found = {}
    for name, value in pairs.items():
        questions, _, opponent = value.partition(",")
        found[name] = {"questions": questions, "opponent": opponent or OPPONENT}
    return found


def _judge(options: EvaluateOptions) -> dict[str, Any] | None:
    given = {
        "model": options.judge_model,
        "url": options.judge_url,
        "key_variable": options.judge_key_variable,
        "prompt": options.judge_prompt,
    }
    said = {name: value for name, value in given.items() if value is not None}
    if options.judge is None and said:
        raise ConfigError(
            "no judge is named", got=f"--judge_{next(iter(said))} alone",
            remedy="--judge likelihood, or --judge endpoint",
        )  # fmt: skip
    return None if options.judge is None else {"kind": options.judge, **said}


def _command(measures: Measures) -> str:
    """True if the target's rows are preference pairs ("dpo") or responses ("sft")."""
    if measures.target_file is None:
        return "sft"
    first = next((record for _, record in read_records(measures.target_file)), {})
    pairs = zip(CHOSEN, REJECTED, strict=True)
    return "dpo" if any({*names} <= set(first) for names in pairs) else "sft"


def _require_start(measures: Measures, command: str, start: str | None) -> None:
    """Refuse what compares with a model before training that nobody named."""
    sets = [name for name, one in measures.sets.items() if one.opponent == OPPONENT]
    if start is None and (sets or command == "dpo"):
        raise ConfigError(
            "the model before training is not named",
            got=f"opponent of {', '.join(sets)}" if sets else "reference of the pairs",
            remedy="--start FOLDER"
            + (", or stored answers: NAME=QUESTIONS,ANSWERS" if sets else ""),
        )


def _show(measures: Measures, ready: Prepared, parts: ModelParts) -> None:
    print(f"model: {parts.model}" + (f" with {parts.adapter}" if parts.adapter else ""))
    for name in ("retention_file", "target_file"):
        if getattr(measures, name):
            print(f"{name}: {getattr(measures, name)}")
    for group, tasks in ready.tasks.items():
        for name, shots in tasks.shots.items():
            counts = [min(n, measures.task_limit or n) for n in tasks.questions[name]]
            said = "/".join(map(str, sorted(set(shots))))
            used = measures.task_chat and name not in tasks.coded
            chat = "chat template" if used else "no chat template"
            print(f"{group} task {name}: {said}-shot, {chat}, {sum(counts):,} questions")
    for name, one in ready.sets.items():
        print(f"judge set {name}: against {one.how['opponent']}, {len(one.questions):,} questions")


# --- the table ----------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> str:
    """Every score with how it was measured, and the means, where all parts of one are there."""
    settings: Mapping[str, Mapping[str, Any]] = result["settings"]
    target = [how for name, how in settings.items() if name.startswith("target/")]
    judged = bool(target) and all("opponent" in how for how in target)
    titles = {"retention": "General", "target": "Preference" if judged else "Target"}
    rows: list[list[str]] = []
    for group, title in titles.items():
        for name, how in settings.items():
            if name.startswith(f"{group}/"):
                score = f"{result['details'][name]:.2f}"
                rows.append([title, f"`{name.split('/')[1]}`", score, setting_text(how)])
        rows += _losses(title, group, result["details"])
        if result[group] is not None and any(name.startswith(f"{group}/") for name in settings):
            rows.append([f"**{title} Avg.**", "", f"**{result[group]:.2f}**", "mean of the above"])
    if result["overall"] is not None and result["unit"] == "score":
        both = f"mean of {titles['retention']} and {titles['target']}"
        rows.append(["**Overall**", "", f"**{result['overall']:.2f}**", both])
    return markdown(["part", "measured", "score (%) or loss", "how"], rows)


def _losses(title: str, group: str, details: Mapping[str, float]) -> list[list[str]]:
    """Losses of the rows of a file; no part of a mean of percentages."""
    if f"{group}_loss" not in details:
        return []
    found = [[title, "loss of rows", f"{details[f'{group}_loss']:.4f}", "nats, lower is better"]]
    if f"{group}_accuracy" in details:
        found[0][1] = "loss of pairs"
        right = details[f"{group}_accuracy"]
        found.append([title, "pairs that are right", f"{right:.2f}", "percent, ties half"])
    return found
