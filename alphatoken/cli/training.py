"""What ``alphatoken sft`` and ``alphatoken dpo`` share: plan or launch or train, and resume."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.cli.recipes import recipes_of
from alphatoken.cli.training_help import short_help
from alphatoken.errors import ConfigError, DataError, ModelError

__all__ = [
    "build_trainer",
    "check_files",
    "load_tokenizer",
    "model_options",
    "require_libraries",
    "run_dpo",
    "run_sft",
    "told_results",
    "trainer_of",
]

_NEEDED = ("accelerate", "datasets", "trl")


def require_libraries() -> None:
    """See that the trainers' libraries are installed; switch their telemetry off.

    TRL reports each trainer that is made to the hub. Here it does so only if the user asks for it
    (``HF_HUB_DISABLE_TELEMETRY=0``).

    Raises:
        ConfigError: names what is missing.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "training needs libraries that are not installed",
            got=", ".join(missing),
            remedy="pip install 'alphatoken[train]'",
        )
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def run_sft(words: Sequence[str]) -> int:
    """``alphatoken sft``: train with TRL's SFTTrainer and token values; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input. KeyboardInterrupt: says how to go on.
    """
    return _run("sft", words)


def run_dpo(words: Sequence[str]) -> int:
    """``alphatoken dpo``: the same with TRL's DPOTrainer."""
    return _run("dpo", words)


def trainer_of(command: str) -> tuple[type[Any], type[Any]]:
    """Configuration and trainer of "sft" or "dpo".

    Raises:
        ConfigError: their libraries are not installed.
    """
    require_libraries()
    if command == "dpo":
        from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer

        return AlphaDPOConfig, AlphaDPOTrainer
    from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer

    return AlphaSFTConfig, AlphaSFTTrainer


def _run(command: str, words: Sequence[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(short_help(command))
        return 0
    if "--help_all" in words:
        from alphatoken.cli.arguments import full_help

        print(full_help(command, trainer_of(command)[0]))
        return 0
    _require_model(words)
    configuration, trainer = trainer_of(command)
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.launching import check_launch, launch, layout_of, wants_launch

    arguments = read_arguments(command, words, configuration)
    check_files(arguments)
    check_output(arguments)
    if arguments.run.dry_run:
        from alphatoken.cli.planning import plan_run, show_plan

        show_plan(plan_run(arguments, layout_of(arguments)))
        return 0
    check_launch(arguments)
    clear_output(arguments)
    if wants_launch(arguments):
        return launch(arguments)
    _train(arguments, trainer)
    return 0


def _require_model(words: Sequence[str]) -> None:
    """See that the command line or a recipe names the model: before libraries are loaded.

    Raises:
        ConfigError: neither does. A recipe that cannot be read.
    """
    option = "model_name_or_path"
    found = any(word.partition("=")[0] == f"--{option}" for word in words)
    for recipe in recipes_of(words):
        found = found or recipe.options.get(option) is not None
    if not found:
        raise ConfigError("no model is named", remedy=f"--{option} FOLDER_OR_HUB_NAME")


def check_files(arguments: Any) -> None:
    """See that whatever is named by a path is there, before any work.

    Raises:
        ConfigError: names the option and the path.
    """
    data = arguments.data
    named = {"train_file": data.train_file, "fisher_file": data.fisher_file}
    for name in ("validation_file", "retention_data", "fisher_data", "eval_data"):
        source = getattr(data, name)
        if source is not None and Path(source).suffix in (".jsonl", ".json", ".parquet"):
            named[name] = source
    template = getattr(arguments.training, "chat_template_path", None)
    if template is not None and Path(template).suffix in (".jinja", ".j2"):
        named["chat_template_path"] = template
    for name, path in named.items():
        if path is not None and not Path(path).exists():
            raise ConfigError(f"{name} is not there", got=path, remedy="check the path")


def check_output(arguments: Any) -> None:
    """Refuse an output folder with something in it, unless it is to be resumed or overwritten.

    Raises:
        ConfigError: it is not empty, or a file. DataError: it cannot be written.
    """
    from alphatoken.corpus.folder import require_writable

    folder = Path(arguments.training.output_dir)
    if not _first():
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError("output_dir is a file", got=str(folder), remedy="name a folder")
    run = arguments.run
    going_on = run.resume or arguments.training.resume_from_checkpoint or run.overwrite_output
    if folder.exists() and os.listdir(folder) and not going_on:
        raise ConfigError(
            "the output folder is not empty",
            got=str(folder),
            why="two runs would be mixed in it",
            remedy="--resume to continue the run in it, --overwrite_output to start anew, or "
            "another --output_dir",
        )
    require_writable(folder)


def clear_output(arguments: Any) -> None:
    """Under ``--overwrite_output``, remove the checkpoints of the run that was there."""
    if _first() and arguments.run.overwrite_output:
        for path in Path(arguments.training.output_dir).glob("checkpoint-*"):
            if path.is_dir():
                shutil.rmtree(path)


def _first() -> bool:
    """Whether this is the first process, and the one that the user started."""
    return os.environ.get("RANK", "0") == "0" and "ALPHATOKEN_LAUNCHED" not in os.environ


# --- training -----------------------------------------------------------------------------------


def _train(arguments: Any, kind: type[Any]) -> None:
    """Read, build the trainer, train, save."""
    from alphatoken.cli.launching import layout_of
    from alphatoken.cli.planning import check_known

    check_known(arguments, layout_of(arguments))
    tokenizer = load_tokenizer(arguments)
    with _warnings_as_notes(arguments.training.process_index == 0):
        trainer, notes = build_trainer(arguments, kind, tokenizer)
    from alphatoken.train.manifest import RESULTS

    args, first = arguments.training, trainer.accelerator.is_main_process
    going_on = args.resume_from_checkpoint or ("auto" if arguments.run.resume else None)
    for note in notes if first else ():
        _note(note)
    try:
        with _warnings_as_notes(first):
            allowed = arguments.run.allow_changed or ()
            trainer.train(resume_from_checkpoint=going_on, allow_changed=allowed)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{trainer.state.global_step} steps done; the same command with --resume continues "
            f"after the last checkpoint in {args.output_dir}"
        ) from None
    _save(trainer, args.output_dir)
    trainer.create_model_card(
        model_name=Path(args.output_dir).name, dataset_name=arguments.data.dataset_name
    )
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.data.dataset_name)
    if first:
        print(f"{trainer.state.global_step} steps trained; model: {args.output_dir}")
        if (told := told_results(Path(args.output_dir) / RESULTS)) is not None:
            print(told)
    trainer.accelerator.end_training()  # ends the process group too


def told_results(results: Path) -> str | None:
    """What a run left in its folder of results, in a line; None if nothing."""
    from alphatoken.train.results import REPORT

    values, report = (results / "values").is_dir(), (results / Path(REPORT).name).is_file()
    found = " and ".join(["values"] * values + ["report"] * report)
    quotes = ", which quote training rows" if values else ""
    return f"{found}{quotes}: {results}" if found else None


def _save(trainer: Any, folder: str) -> None:
    """Write the trained model.

    Raises:
        DataError: it could not be written; the checkpoints are as they were.
    """
    from safetensors import SafetensorError

    try:
        trainer.save_model(folder)
    except (OSError, SafetensorError) as error:
        raise DataError(
            "the trained model could not be written",
            got=f"{folder}: {error}",
            why="the run is over, and its last checkpoint is whole",
            remedy="free some space, and the same command with --resume writes it",
        ) from OSError(str(error))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def _warnings_as_notes(first: bool) -> Iterator[None]:
    """The library's own warnings in one line, of the first process; others as they are."""
    from alphatoken import AlphaTokenWarning

    shown = warnings.showwarning

    def show(message: Any, category: Any, *more: Any, **named: Any) -> None:
        if not issubclass(category, AlphaTokenWarning):
            shown(message, category, *more, **named)
        elif first:
            _note(str(message))

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def build_trainer(arguments: Any, kind: type[Any], tokenizer: Any = None) -> tuple[Any, list[str]]:
    """The trainer with its model and data, and what is to be said about the data.

    A ``tokenizer`` that is loaded already is not loaded again.

    Raises:
        AlphaTokenError: model or data cannot be used.
    """
    from safetensors import SafetensorError
    from trl.trainer.utils import get_peft_config, get_quantization_config

    from alphatoken import FisherDrift
    from alphatoken.cli.training_data import load_run_data
    from alphatoken.train.loading import freeze_unreached

    args, model = arguments.training, arguments.model
    if tokenizer is None:
        tokenizer = load_tokenizer(arguments)
    data = load_run_data(arguments, tokenizer, _vocabulary(arguments))
    if arguments.command == "sft":
        args.assistant_only_loss = False  # the labels of the rows are those of it already
    args.model_init_kwargs = model_options(arguments)
    file = arguments.data.fisher_file
    try:
        with warnings.catch_warnings():
            # Rows in common were found by text, and are counted in the notes.
            warnings.filterwarnings("ignore", ".*training rows repeat a")
            trainer = kind(
                model=model.model_name_or_path,
                args=args,
                train_dataset=data.train,
                eval_dataset=data.evaluation,
                processing_class=tokenizer,
                quantization_config=get_quantization_config(model),
                peft_config=get_peft_config(model),
                validation_dataset=data.validation,
                retention_dataset=data.retention,
                fisher=None if file is None else FisherDrift.load(file),
                fisher_dataset=data.fisher,
            )
    except SafetensorError as error:  # TRL loads the model
        raise ModelError(
            "the model cannot be loaded",
            got=f"{model.model_name_or_path}: SafetensorError: {error}",
            remedy="check the path and that the files in it are whole",
        ) from None
    freeze_unreached(trainer.model)
    return trainer, data.notes


def _vocabulary(arguments: Any) -> int | None:
    """Rows of the model's embedding; None where TRL makes it as large as a template's tokens ask.

    Raises:
        ModelError: the configuration cannot be loaded.
    """
    from alphatoken.train.loading import find_limits, find_parts

    args, model = arguments.training, arguments.model
    path = getattr(args, "chat_template_path", None)
    if path is not None and Path(path).suffix not in (".jinja", ".j2"):
        return None
    parts = find_parts(model.model_name_or_path)
    trusted = args.trust_remote_code
    return find_limits(parts, revision=model.model_revision, trust_remote_code=trusted).tokens


def model_options(arguments: Any) -> dict[str, Any]:
    """Options of ``from_pretrained`` by which the trainer loads its model."""
    args, model = arguments.training, arguments.model
    return {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }


def load_tokenizer(arguments: Any) -> Any:
    """The model's tokenizer, with the chat template that the options name.

    Raises:
        ModelError: model or tokenizer cannot be loaded.
    """
    from alphatoken.train import loading

    args, model = arguments.training, arguments.model
    tokenizer = loading.load_tokenizer(
        model.model_name_or_path,
        revision=model.model_revision,
        trust_remote_code=args.trust_remote_code,
    )
    template = getattr(args, "chat_template_path", None)
    if template is not None and Path(template).suffix in (".jinja", ".j2"):
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer
