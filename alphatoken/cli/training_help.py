"""The help of ``sft`` and ``dpo``: our options, and the few of TRL's that most runs set.

TRL's and transformers' options number some two hundred; ``--help_all`` has them. This one is made
of fields alone, without importing torch or TRL, so that it is there at once.
"""

from __future__ import annotations

from dataclasses import Field, fields

from alphatoken.cli.options import CommandParser, default_of, shown
from alphatoken.cli.training_options import RowArguments, RunArguments
from alphatoken.train.fields import AlphaFields, PairFields

__all__ = ["USUAL", "short_help"]

USUAL = {
    "model_name_or_path": "Model folder or hub name.",
    "output_dir": "Folder for the model, its checkpoints and the report of the run.",
    "learning_rate": "Of the optimizer.",
    "num_train_epochs": "Passes over the training rows.",
    "max_steps": "Optimizer steps, instead of epochs.",
    "per_device_train_batch_size": "Rows (pairs) of one forward on each device.",
    "gradient_accumulation_steps": "Forwards of one optimizer step.",
    "max_length": "Longest sequence in tokens.",
    "bf16": "Mixed precision; by default where the device has it.",
    "use_peft": "Train a LoRA adapter instead of all weights.",
    "report_to": "Where curves go: trackio, tensorboard, wandb or none.",
    "seed": "Of the order of rows and of dropout.",
}
"""Options of TRL and transformers that most runs set, in our words."""


def short_help(command: str) -> str:
    """Text of ``alphatoken sft --help`` or ``dpo --help``."""
    parser = CommandParser(
        command,
        description=f"""\
Alpha-{command.upper()}: TRL's trainer with a gradient weighted by token value. A recipe sets
options, the command line overrides them; `alphatoken recipes` lists the packaged ones.

usage: alphatoken {command} [--config RECIPE] --model_name_or_path MODEL --train_file FILE
           [options]""",
        epilog="All of TRL's and transformers' options work too: "
        f"alphatoken {command} --help_all shows them.",
    )
    parser.add_argument(
        "--help_all", action="store_true", help="every option, TRL's and transformers' too"
    )
    parser.add_argument(
        "--config", metavar="RECIPE", help="YAML file or packaged recipe; repeated, the last wins"
    )
    usual = parser.add_argument_group("the usual ones of TRL and transformers")
    for name, text in USUAL.items():
        usual.add_argument(f"--{name}", metavar=name.rpartition("_")[2].upper(), help=text)
    kinds: dict[str, type] = {"rows": RowArguments, "this command": RunArguments}
    kinds |= {"pairs": PairFields} if command == "dpo" else {}
    kinds |= {"token values": AlphaFields}
    for title, kind in kinds.items():
        group = parser.add_argument_group(title)
        for one in fields(kind):
            if f"--{one.name}" in parser._option_string_actions:  # shown already
                continue
            metavar = one.name.rpartition("_")[2].upper()
            group.add_argument(f"--{one.name}", metavar=metavar, help=_said(one))
    return parser.format_help()


def _said(one: Field[object]) -> str:
    """Its sentence, and its default where it has one."""
    text, default = str(one.metadata["help"]), default_of(one)
    if default in (None, "\n", "") or "default" in text.lower():
        return text.replace("%", "%%")
    return f"{text} (default {shown(default)})".replace("%", "%%")
