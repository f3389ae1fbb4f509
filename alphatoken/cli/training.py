"""Parts that ``alphatoken sft``, ``dpo`` and ``race`` share: help, checks, training, resuming."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from alphatoken.cli.program import HELP_ALL, CommandParser, add_option, kinds_of, shorten_help
from alphatoken.cli.recipes import accelerate_config, packaged_recipes
from alphatoken.cli.training_options import (
    FILES,
    RACE_FILES,
    RaceArguments,
    RowArguments,
    RunArguments,
    missing_files,
)
from alphatoken.cli.value_options import say_preset
from alphatoken.errors import ConfigError, DataError, counted
from alphatoken.presets import values_in_words
from alphatoken.score.options import ScoreOptions
from alphatoken.support.progress import is_first_process
from alphatoken.train.fields import AlphaFields, PairFields

__all__ = [
    "build_trainer",
    "changed_options",
    "check_launch",
    "check_output",
    "clear_output",
    "help_text",
    "load_data",
    "load_tokenizer",
    "make_trainer",
    "model_options",
    "require_libraries",
    "run_dpo",
    "run_sft",
    "train",
    "trainer_of",
    "vocabulary_of",
]

_NEEDED = ("accelerate", "datasets", "trl")

_INSIDE = ("ACCELERATE_MIXED_PRECISION", "LOCAL_RANK", "WORLD_SIZE")
"""Set in a process that accelerate or torchrun has started."""

_BY_SLURM = "SLURM_STEP_NUM_TASKS"
"""Number of tasks of a step of SLURM; nothing that trains here reads it."""


def require_libraries() -> None:
    """Check that the trainers' libraries are installed; switch their telemetry off.

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
    # TRL reports each trainer that is made to the hub. Here it does so only if the user asks for it
    # (HF_HUB_DISABLE_TELEMETRY=0).
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def trainer_of(command: str, words: Sequence[str] = ()) -> tuple[type[Any], type[Any]]:
    """Configuration and trainer of "sft" or "dpo".

    Raises:
        ConfigError: their libraries are not installed, or a file that the words name is missing,
            which is said before these libraries are loaded.
    """
    require_libraries()
    pairs = {flag.removeprefix("--"): word for flag, word in pairwise(words)}
    for missing in missing_files({n: pairs[n] for n in (*FILES, *RACE_FILES) if n in pairs}):
        raise missing
    if command == "dpo":
        from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer

        return AlphaDPOConfig, AlphaDPOTrainer
    from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer

    return AlphaSFTConfig, AlphaSFTTrainer


def _run(command: str, words: Sequence[str]) -> int:
    if {"--help", "-h", HELP_ALL} & set(words):
        print(help_text(command, words))
        return 0
    configuration, trainer = trainer_of(command, words)
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training_rows import check_rows
    from alphatoken.support.storage import no_empty_folder

    arguments = read_arguments(command, words, configuration)
    if arguments.model.model_name_or_path is None:
        raise ConfigError("no model is named", remedy="--model_name_or_path FOLDER_OR_HUB_NAME")
    check_rows(arguments)
    check_output(arguments)
    check_launch(arguments)
    # Nothing of an earlier run goes before all that can be refused has been.
    clear_output(arguments)
    notes = [_about_values(arguments)] if arguments.training.needs_values else []
    for note in [*notes, *_about_unread(arguments)] if is_first_process() else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    with no_empty_folder(arguments.training.output_dir):
        made, about_rows = build_trainer(arguments, trainer)
        train(arguments, made, [*about_rows, *_about_few_steps(made)])
    return 0


def _about_few_steps(trainer: Any) -> Iterator[str]:
    """A sentence on a run of so few optimizer steps that it learns hardly anything, with a cure."""
    from alphatoken.train.distributed import Ranks
    from alphatoken.train.steps import LEAST_STEPS, Schedule

    rows, world = len(trainer.train_dataset), Ranks(trainer.accelerator).world
    run = Schedule.of(trainer.args, rows, world)
    packed = "packed " * bool(getattr(trainer.args, "packing", False))
    if run.steps < LEAST_STEPS:
        yield (
            f"the whole run has {counted(run.steps, 'optimizer steps')}, of "
            f"{counted(run.rows_of_step, packed + 'rows')} each "
            f"({counted(rows, packed + 'training rows')}), which change a "
            f"model little; longer with {run.in_words(LEAST_STEPS)}"
        )


def _about_values(arguments: Any) -> str:
    """The values of a run, and of the paper's what was measured to help in their place."""
    words = f"values: {values_in_words(arguments.training)}"
    if arguments.training.policy == "all":
        return f"{words}; policy 'all' trains on every token: values are written, and choose none"
    if arguments.run.value != "paper":
        return words
    if arguments.command == "dpo":
        return f"{words}; as published: `alphatoken race --dpo` measures whether they help"
    return (
        f"{words}; as published: on rows with wrong words --value walk was measured to help, and "
        "`alphatoken race` measures it on yours"
    )


def _about_unread(arguments: Any) -> Iterator[str]:
    """What is typed and this run does not read: it may have the options of another one."""
    from alphatoken.cli.arguments import named_options
    from alphatoken.train.policies import OF_VALUES, TRAINER_POLICIES

    args, typed = arguments.training, named_options(arguments.words)
    policy = f"policy '{args.policy}'"
    retains = args.needs_values and (args.reads_fisher or args.reads_retention)
    for read, why, names in (
        (args.needs_values, f"{policy} values no token", {"value", *OF_VALUES}),
        (args.policy != "all", f"{policy} trains on every token", {"keep_ratio"}),
        (args.policy not in TRAINER_POLICIES, f"{policy} has one mode", {"policy_mode"}),
        (retains or not args.needs_values, "there is no retention term", {"stability_weight"}),
        (args.reads_fisher, "no Fisher is wanted", {*_OF_A_FISHER}),
        (args.reads_retention, "no retention rows are wanted", {"retention_batch_size"}),
    ):
        if not read and (unread := sorted(typed & names)):
            yield f"{why}: nothing reads {', '.join(f'--{name}' for name in unread)}"


_OF_A_FISHER = (
    "fisher_samples", "fisher_max_new_tokens", "fisher_batch_size", "max_relative_drift",
)  # fmt: skip


run_sft, run_dpo = partial(_run, "sft"), partial(_run, "dpo")


_EXAMPLES = {
    "sft": (
        "  alphatoken sft --config laptop-sft --train_file rows.jsonl --output_dir out",
        "  alphatoken sft --config laptop-sft --policy top --value walk --keep_ratio 0.8 \\",
        "      --train_file rows.jsonl --validation_file clean.jsonl --output_dir out",
    ),
    "dpo": ("  alphatoken dpo --config laptop-dpo --train_file pairs.jsonl --output_dir out",),
    "race": (
        "  alphatoken race --config laptop-sft --config recommended --train_file rows.jsonl \\",
        "      --validation_file clean.jsonl --output_dir out",
    ),
}

_ABOUT = """\
Alpha-{0}: TRL's trainer with a gradient weighted by token value. A recipe sets
options, the command line overrides them."""
_RACE = """\
Short runs from one start, compared on trusted rows that none of them has seen; the winner trains
to the end. Arms are policies with their options; without any, training on every token against the
80 % of highest walk value. Options are those of `alphatoken sft`; with --dpo, of `dpo`."""


_FIRST = ("laptop-sft", "laptop-lora", "laptop-dpo", "recommended")
"""Recipes that ``--help`` lists."""

_ALWAYS = ("train_file", "validation_file", "value", "resume", "overwrite_output")
_OF_A_RUN = (*_ALWAYS, "validation_rows", "policy", "keep_ratio")
_SHOWN = {
    "sft": _OF_A_RUN,
    "dpo": _OF_A_RUN,
    "race": (*_ALWAYS, "arms", "choosing_file", "retention_file", "dpo"),
}
"""Options of ours that ``--help`` shows."""


def help_text(command: str, words: Sequence[str] = ()) -> str:
    """Text of ``alphatoken sft --help``, ``dpo`` or ``race``: our options, and where TRL's are.

    With ``--help_all`` among the ``words`` it has every option of ours.
    """
    trl = "sft" if command == "race" else command
    whole = HELP_ALL in words
    recipes = [
        f"  {recipe.name:20}  {recipe.about}"
        for recipe in packaged_recipes()
        if recipe.command in (None, trl, command) and (whole or recipe.name in _FIRST)
    ]
    recipes += [] if whole else ["  others                --help_all lists them"]
    # Made of fields alone, without importing torch or TRL, so that it is there at once.
    parser = CommandParser(
        command,
        description=f"""\
{_RACE if command == "race" else _ABOUT.format(command.upper())}

usage: alphatoken {command} [--config RECIPE] --model_name_or_path MODEL --train_file FILE
           [--output_dir FOLDER] [options]

Beside those below, all of TRL's {trl.upper()}Config, ModelConfig and ScriptArguments work:
https://huggingface.co/docs/trl/{trl}_trainer""",
        epilog="\n".join(["recipes", *recipes, "", "examples", *_EXAMPLES[command]]),
    )
    parser.add_argument(
        "--config", metavar="RECIPE", help="YAML file or packaged recipe; repeated, the last wins"
    )
    kinds: dict[str, type] = {"rows": RowArguments, "this command": RunArguments}
    kinds |= {"pairs": PairFields} if command != "sft" else {}
    kinds = {"the race": RaceArguments} | kinds if command == "race" else kinds
    kinds |= {"token values": AlphaFields}
    for title, kind in kinds.items():
        group, field_kinds = parser.add_argument_group(title), kinds_of(kind)
        for one in fields(kind):
            if f"--{one.name}" not in parser._option_string_actions:  # not shown already
                add_option(group, one, field_kinds[one.name], f"--{one.name}")
    shorten_help(parser, _SHOWN[command], words)
    say_preset(parser, words, "walk" if command == "race" else "paper")
    return parser.format_help()


def check_output(arguments: Any) -> None:
    """Refuse an output folder with something in it, unless it is to be resumed or overwritten.

    Raises:
        ConfigError: it is not empty, a file, or holds another command's results. DataError: it
            cannot be written.
    """
    from alphatoken.support.resume import command_of, require_writable

    folder = Path(arguments.training.output_dir)
    if not is_first_process():
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError("output_dir is a file", got=str(folder), remedy="name a folder")
    run = arguments.run
    checkpoint = arguments.training.resume_from_checkpoint
    own = checkpoint is not None and folder.resolve() in Path(checkpoint).resolve().parents
    if run.overwrite_output and (run.resume or own):
        raise ConfigError(
            "one cannot both start anew and go on",
            got="--overwrite_output and "
            + ("--resume" if run.resume else f"--resume_from_checkpoint {checkpoint}"),
            why="the checkpoints to go on from would be removed",
            remedy="leave --overwrite_output out to go on",
        )
    going_on = run.resume or arguments.training.resume_from_checkpoint or run.overwrite_output
    if folder.exists() and os.listdir(folder) and not going_on:
        raise ConfigError(
            "the output folder is not empty",
            got=str(folder),
            why="two runs would be mixed in it",
            remedy="--resume to continue the run in it, --overwrite_output to start anew (its "
            "checkpoints are removed), or another --output_dir",
        )
    other = command_of(folder / "run.json")
    if other is not None:
        raise ConfigError(
            "the output folder holds results of another command",
            got=f"{folder / 'run.json'} of `alphatoken {other}`",
            why="there is no training run to go on with, and two runs would be mixed in it",
            remedy="another --output_dir",
        )
    require_writable(folder)


def clear_output(arguments: Any) -> None:
    """Remove the checkpoints of an earlier run under ``--overwrite_output``."""
    if is_first_process() and arguments.run.overwrite_output:
        for path in Path(arguments.training.output_dir).glob("checkpoint-*"):
            if path.is_dir():
                shutil.rmtree(path)


def check_launch(arguments: Any) -> None:
    """Check that the run has the processes that it is meant for, before anything is deleted.

    Raises:
        ConfigError: a layout that nobody has started, several GPUs for one process, or tasks of
            SLURM that do not know of each other.
    """
    if any(key in os.environ for key in _INSIDE):
        return
    own = ["-m", "alphatoken.cli", arguments.name, *arguments.words]
    name = arguments.run.accelerate_config
    if name not in (None, "none"):
        path = accelerate_config(name)[0]
        start = shlex.join(["accelerate", "launch", "--config_file", str(path), *own])
        raise ConfigError(
            "the run is meant for several processes",
            got=f"accelerate_config {name} in one process",
            remedy=f"{start}; or --accelerate_config none for one process",
        )
    if int(os.environ.get(_BY_SLURM) or 1) > 1:
        raise ConfigError(
            "SLURM started several tasks, each of which would train a model of its own",
            got=f"{_BY_SLURM}={os.environ[_BY_SLURM]}, no WORLD_SIZE",
            why="all would train on the same rows, and write to the same folder",
            remedy="one task a machine (srun --ntasks-per-node 1), and in it torchrun or "
            "`accelerate launch`",
        )
    if (gpus := arguments.training.n_gpu) > 1:
        start = shlex.join(["torchrun", "--nproc-per-node", str(gpus), *own])
        raise ConfigError(
            "one process would split each batch over several GPUs",
            got=f"{gpus} GPUs",
            why="torch.nn.DataParallel does not work with token values",
            remedy=f"{start}; or CUDA_VISIBLE_DEVICES=0 for one of them",
        )


# --- training -----------------------------------------------------------------------------------


def train(arguments: Any, trainer: Any, notes: list[str], *, arm: str = "") -> None:
    """Train to the end, and write the model.

    Args:
        arguments: of the run.
        trainer: of it.
        notes: what is to be said before.
        arm: name of the arm that won a race, and goes on from what is in the output folder.
    """
    args, first = arguments.training, trainer.accelerator.is_main_process
    resume = "auto" if arguments.run.resume or arm else None
    resume = args.resume_from_checkpoint or resume
    notes += [
        f"{name} of the recipe gives way to other options of this run: it is "
        f"{getattr(args, name, None)!r} here"
        for name in changed_options(arguments)
    ]
    for note in notes if first else ():
        print(f"note: {note}", file=sys.stderr)
    try:
        allowed = arguments.run.allow_changed or ()
        trainer.train(resume_from_checkpoint=resume, allow_changed=allowed)
    except KeyboardInterrupt:
        saved = any(Path(args.output_dir).glob("checkpoint-*"))
        raise KeyboardInterrupt(
            f"{counted(trainer.state.global_step, 'steps')} done; the same command with --resume "
            + ("in place of --overwrite_output " if arguments.run.overwrite_output else "")
            + (
                f"continues after the last checkpoint in {args.output_dir}"
                if saved
                else f"starts again, because no checkpoint is in {args.output_dir} yet"
            )
        ) from None
    _save(trainer, args.output_dir)
    trainer.create_model_card(
        model_name=Path(args.output_dir).name, dataset_name=arguments.data.dataset_name
    )
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.data.dataset_name)
    if first:
        steps = counted(trainer.state.global_step, "steps")
        if arm:
            print(f"trained: '{arm}', all {steps}; the model is in {args.output_dir}")
        else:
            print(f"{steps} trained; model: {args.output_dir}")
        print(_about_page(args), _next_command(arguments, trainer.model), sep="\n", flush=True)
    trainer.accelerator.end_training()  # ends the process group too


_OF_KEPT = {"keep_ratio", "value_unit", "keep_scope", "shared_threshold", "masked_logit"}
"""Options that say which tokens are kept: what has a rule of its own for it ignores them."""


def changed_options(arguments: Any) -> list[str]:
    """Options that gave way and are worth a line: nothing is lost of one that nothing reads."""
    from alphatoken.cli.arguments import named_options

    ignored = _OF_KEPT - named_options(arguments.words)
    return [name for name in arguments.unread if name not in ignored]


def _about_page(args: Any) -> str:
    """The line that opens the page of the run's values, or why there is none."""
    from alphatoken.support.storage import open_line
    from alphatoken.train.records import REPORT

    why = "no response token was valued"
    if not args.export_values:
        why = "export_values is off"
    elif not args.needs_values:
        why = f"policy '{args.policy}' weighs tokens without values"
    elif (page := Path(args.output_dir) / REPORT).exists():
        return open_line(page)
    return f"no page of values: {why}"


def _next_command(arguments: Any, model: Any) -> str:
    """The command that one types after the run, and what for."""
    out = arguments.training.output_dir
    if score := _losses_command(arguments, model):
        return f"next, to see which losses fell: {score}"
    code = (
        "from transformers import pipeline; "
        f"print(pipeline('text-generation', {out!r})('Hello')[0]['generated_text'])"
    )
    return f"next, to try the model: {shlex.join([sys.executable, '-c', code])}"


def _losses_command(arguments: Any, model: Any) -> str:
    """`alphatoken score` of losses before the run less those after it, on rows of the run.

    "" where it cannot read them: pairs, rows of the hub, tokens that only the run's tokenizer has.
    """
    from alphatoken.model.transformers import position_limit
    from alphatoken.train.manifest import RESULTS

    args, data = arguments.training, arguments.data
    own_tokens = (getattr(args, name, None) for name in ("chat_template_path", "eos_token"))
    revision = arguments.model.model_revision
    if arguments.command == "dpo" or any(own_tokens) or revision not in (None, "main"):
        return ""
    shared = {one.name for one in fields(ScoreOptions)} & {one.name for one in fields(RowArguments)}
    shared -= {"validation_file", "validation_rows", "fisher_file", "train_limit"}
    limit = position_limit(model.config.get_text_config())
    lengths = [length for length in (args.max_length, limit) if length is not None]
    options = ScoreOptions(
        **{name: getattr(data, name) for name in shared},
        model_name_or_path=arguments.model.model_name_or_path,
        trust_remote_code=args.trust_remote_code,
        max_length=min(lengths, default=None),
        output_dir=str(Path(args.output_dir) / RESULTS / "losses"),
    )
    # There it would value the rows that were left out by their numbers as well.
    train_file = data.train_file if data.without_rows is None else None
    # Trusted rows that were trained on show no more than training rows do.
    trusted = None if args.policy == "validation-mix" else data.validation_file
    for file in filter(None, (trusted, train_file)):
        options.train_file = file
        if _is_read(options):
            more = ["--reference", args.output_dir, "--output_dir", options.output_dir]
            return f"alphatoken score {options.words} {shlex.join(more)}"
    return ""


def _is_read(options: ScoreOptions) -> bool:
    """Whether `alphatoken score` reads the first row."""
    from alphatoken.data.rows import row_of
    from alphatoken.data.source import each_row, find_source

    make = partial(row_of, fields=options.fields)
    try:
        next(each_row(find_source(options.train_file).read(0, 1), make))
    except DataError:
        return False
    return True


def _save(trainer: Any, folder: str) -> None:
    """Write the trained model; where it cannot be, the checkpoints are as they were."""
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


def build_trainer(arguments: Any, kind: type[Any]) -> tuple[Any, list[str]]:
    """The trainer with its model and data, and what is to be said about the data.

    Raises:
        AlphaTokenError: model or data cannot be used.
    """
    tokenizer, datasets, notes = load_data(arguments)
    return make_trainer(arguments, kind, tokenizer, datasets), notes


def load_data(arguments: Any, arms: Sequence[Any] = ()) -> tuple[Any, dict[str, Any], list[str]]:
    """Tokenizer and data sets of the run, and what is to be said about the data.

    Args:
        arguments: of the run.
        arms: as for ``load_run_data``.

    Raises:
        AlphaTokenError: tokenizer or data cannot be used.
    """
    from alphatoken.cli.training_rows import load_run_data

    tokenizer = load_tokenizer(arguments)
    return tokenizer, *load_run_data(arguments, tokenizer, vocabulary_of(arguments), arms)


def make_trainer(arguments: Any, kind: type[Any], tokenizer: Any, datasets: dict[str, Any]) -> Any:
    """The trainer of these data sets, with its model."""
    from trl.trainer.utils import get_peft_config, get_quantization_config

    from alphatoken.model.loading import freeze_unreached

    args, model = arguments.training, arguments.model
    datasets = dict(datasets)
    places = datasets.pop("train_places")
    if arguments.command == "sft":
        args.assistant_only_loss = False  # the labels of the rows are those of it already
    args.model_init_kwargs = model_options(arguments)
    with warnings.catch_warnings():
        # Rows in common were found by text, and are counted in the notes.
        warnings.filterwarnings("ignore", ".*training rows repeat a")
        trainer = kind(
            model=model.model_name_or_path,
            args=args,
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            **datasets,
        )
    freeze_unreached(trainer.model)
    trainer.records.name_rows(places, datasets["train_dataset"])
    return trainer


def vocabulary_of(arguments: Any) -> int | None:
    """Rows of the embedding of the model that is named, which is not loaded; None: unknown."""
    from alphatoken.model.loading import find_limits, find_parts

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
    from alphatoken.model import loading

    args, model = arguments.training, arguments.model
    tokenizer = loading.load_tokenizer(
        loading.find_parts(model.model_name_or_path).tokenizer,
        revision=model.model_revision,
        trust_remote_code=args.trust_remote_code,
    )
    template = getattr(args, "chat_template_path", None)
    if template is not None and Path(template).suffix in (".jinja", ".j2"):
        if not Path(template).is_file():
            raise ConfigError("chat_template_path does not exist", got=template)
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    return tokenizer
