"""Predicted peak memory against fresh processes: training steps, and whole commands.

    python -m benchmarks.memory_model --commands models/gemma-3-270m [--only score]

runs ``score`` (each estimator), ``fisher``, ``sft`` and ``dpo`` on a real model, a process each,
and prints what each said before it started beside what it took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from alphatoken.estimate.estimators import ESTIMATORS
from benchmarks.peak import fresh_environment, peak_mib

Row = dict[str, Any]
MIB = 2.0**20


@dataclass(frozen=True)
class Setting:
    """One run: model, batch, and what is valued.

    Attributes:
        kind: "sft" or "dpo".
        estimator: of the values; "none" trains on every token without values.
        fisher: with a diagonal Fisher, else adaptation only.
        offload: the Fisher is left on disk.
        checkpointing: gradient checkpointing.
        dtype: of the weights.
    """

    kind: str = "sft"
    estimator: str = "alphatoken"
    width: int = 256
    depth: int = 8
    vocabulary: int = 2048
    rows: int = 8
    length: int = 128
    validation: int = 4
    layers: str = "3"
    fisher: bool = True
    offload: bool = False
    checkpointing: bool = False
    dtype: str = "float32"

    @property
    def text(self) -> str:
        """Where it differs from the default in more than size."""
        more = "".join(
            f", {word}"
            for word, on in (
                ("no Fisher", not self.fisher), ("offload", self.offload),
                ("checkpointing", self.checkpointing), ("bfloat16", self.dtype == "bfloat16"),
                (f"K={self.layers}", self.layers != "3"),
            )
            if on
        )  # fmt: skip
        return (
            f"{self.kind}, {self.estimator}, d={self.width}, {self.depth} layers, vocabulary "
            f"{self.vocabulary}, {self.rows} x {self.length} tokens{more}"
        )


SPREAD: tuple[Setting, ...] = (
    Setting(),
    Setting(width=512, depth=4, rows=4, vocabulary=8192),
    Setting(width=128, depth=24, rows=16),
    Setting(estimator="none", width=384),
    Setting(estimator="direct", rows=16, fisher=False),
    Setting(estimator="label", rows=16),
    Setting(layers="all", width=512, depth=6, rows=4),
    Setting(layers="all", width=512, depth=6, rows=1, validation=1, offload=True),
    Setting(vocabulary=16384, rows=4, validation=8),
    Setting(checkpointing=True, rows=16, depth=12),
    Setting(dtype="bfloat16", width=512),
    Setting(length=512, rows=4, estimator="alphatoken"),
    Setting(kind="dpo", rows=4),
    Setting(kind="dpo", rows=4, estimator="label", fisher=False),
    Setting(kind="dpo", rows=4, width=512, depth=6, estimator="none"),
)
"""Widths, depths, vocabularies, tokens, estimators, trainers, precisions."""


BARE = Setting(width=32, depth=1, vocabulary=64, rows=1, length=8, validation=1, layers="1")
"""The same libraries and code around next to nothing: what the process itself takes."""


# --- the measured side --------------------------------------------------------------------------


def measured(settings: Sequence[Setting], *, beside: int = 2) -> list[float]:
    """Peak resident bytes of a fresh process for each setting."""
    found: list[float] = []
    for start in range(0, len(settings), beside):
        running = [_started(setting) for setting in settings[start : start + beside]]
        found += [_finished(process) for process in running]
    return found


def _started(setting: Setting) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.memory_model", json.dumps(asdict(setting))]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(HF_HUB_OFFLINE="1"),
    )


def _finished(process: subprocess.Popen[str]) -> float:
    out, told = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(told[-2000:])
    return MIB * float(json.loads(out.strip().splitlines()[-1])["mib"])


def trainer(setting: Setting, folder: str) -> Any:
    """The real trainer, as a user makes it."""
    from alphatoken.train import AlphaDPOTrainer, AlphaSFTTrainer

    model = made(setting)
    more: dict[str, Any] = {}
    if setting.kind == "dpo":
        more["ref_model"] = made(setting)
    if setting.estimator != "none":
        more |= {
            "validation_dataset": rows(setting, setting.validation, 1),
            "fisher": fisher(model, setting, folder) if setting.fisher else None,
        }
    kind = AlphaDPOTrainer if setting.kind == "dpo" else AlphaSFTTrainer
    return kind(
        model,
        args=options(setting, folder),
        train_dataset=rows(setting, 2 * setting.rows, 0),
        processing_class=tokenizer(),
        **more,
    )


def options(setting: Setting, folder: str) -> Any:
    """The configuration that the plan and the run share."""
    from alphatoken.train import AlphaDPOConfig, AlphaSFTConfig

    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": setting.rows,
        "max_steps": 2,
        "max_length": setting.length,
        "gradient_checkpointing": setting.checkpointing,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "held_out_steps": 0,
        "export_values": False,
        "validation_batch_size": setting.validation,
        "score_layers": setting.layers,
        "fisher_offload": setting.offload,
        "retention": "diagonal" if setting.fisher else "none",
    }
    if setting.estimator == "none":
        common |= {"policy": "all", "retention": "none"}
    else:
        common |= {"estimator": setting.estimator}
    if setting.kind == "dpo":
        return AlphaDPOConfig(**common)
    return AlphaSFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})


def made(setting: Setting) -> Any:
    """The model, in its dtype."""
    from benchmarks.models import decoder

    model = decoder(setting.width, setting.depth, vocabulary=setting.vocabulary)
    return model.to(getattr(torch, setting.dtype))


def rows(setting: Setting, count: int, seed: int) -> Any:
    """Rows of ids, as long as allowed; a quarter of each is prompt."""
    from datasets import Dataset

    from benchmarks.models import random_batch

    batch = random_batch(count, setting.length, setting.vocabulary, seed=seed)
    if setting.kind == "sft":
        return Dataset.from_dict({name: batch[name].tolist() for name in ("input_ids", "labels")})
    words = [[f"w{token % WORDS}" for token in row] for row in batch["input_ids"].tolist()]
    prompt, end = setting.length // 4, setting.length - 1  # TRL adds the end token
    return Dataset.from_list(
        [
            {
                "prompt": " ".join(row[:prompt]),
                "chosen": " " + " ".join(row[prompt:end]),
                "rejected": " " + " ".join(row[prompt:end][::-1]),
            }
            for row in words
        ]
    )


WORDS = 97


def tokenizer() -> Any:
    """A word a token, as few words as rows of text need; rows of ids need none."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", *(f"w{i}" for i in range(WORDS))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def fisher(model: Any, setting: Setting, folder: str) -> Any:
    """A Fisher of the scored linears; what is in it changes no memory."""
    from alphatoken import FisherDrift
    from alphatoken.model.capture import find_scope
    from alphatoken.model.layer_choice import read_layers
    from alphatoken.model.protocol import find_adapter

    scope = find_scope(find_adapter(model), read_layers(setting.layers))
    weights = {linear.weight_name: linear.weight.detach() for linear in scope.linears}
    made = FisherDrift(
        {name: torch.full_like(w, 1e-4, dtype=torch.float32) for name, w in weights.items()},
        {name: w if setting.offload else w.clone() for name, w in weights.items()},
    )
    if not setting.offload:
        return made
    path = os.path.join(folder, "fisher.safetensors")
    made.save(path)
    return FisherDrift.open(path)


# --- the predicted side -------------------------------------------------------------------------


def predicted(setting: Setting) -> Any:
    """What ``--dry-run`` says, from the shape alone."""
    from alphatoken.train.cost import Layout
    from alphatoken.train.plan import make_plan

    with torch.device("meta"):
        model = made(setting)
    with tempfile.TemporaryDirectory() as folder:
        args = options(setting, folder)
        plan = make_plan(model, args, Layout(), command=setting.kind, dtype=setting.dtype)
    return plan.memory


def memory_model(settings: Sequence[Setting] = SPREAD) -> Iterator[Row]:
    """Predicted peak memory of a training process over the measured one."""
    bare, *peaks = measured([BARE, *settings])
    for setting, peak in zip(settings, peaks, strict=True):
        ours = predicted(setting).total
        yield {
            "name": "memory_model",
            "size": setting.text,
            "ours": (ours + bare) / MIB,
            "other": peak / MIB,
            "ratio": (ours + bare) / peak,
            "floor": 1.0,
            "note": f"MiB of the whole process; {ours / (peak - bare):.2f}x above the "
            f"{bare / MIB:.0f} MiB of the process itself",
        }


CASES = (memory_model,)


# --- whole commands on a real model ---------------------------------------------------------------

_LENGTH = 160
_SCORE = (
    "score --train_file ROWS --validation_file HELD --output_dir OUT --train_limit 4 "
    f"--per_device_train_batch_size 4 --max_length {_LENGTH} --no_report "
    "--format jsonl --on_empty skip"
)
_FISHER = (
    "fisher --train_file ROWS --output_file OUT --samples 4 --per_device_train_batch_size 4 "
    f"--max_new_tokens 8 --max_length {_LENGTH}"
)
_TRAIN = (
    "--output_dir OUT --dtype float32 --use_cpu true --bf16 false --max_steps 2 "
    f"--max_length {_LENGTH} --validation_batch_size 2 --held_out_share 0 --retention none "
    "--gradient_checkpointing false --report_to none --save_strategy no --export_values false"
)
_SFT = f"sft --train_file ROWS --validation_file HELD --per_device_train_batch_size 2 {_TRAIN}"
COMMANDS = {
    **{f"score {name}": f"{_SCORE} --estimator {name}" for name in ESTIMATORS},
    "score label, all parameters": f"{_SCORE} --estimator label --score_layers all "
    "--value_parameters all",
    "fisher": _FISHER,
    "fisher of labels": f"{_FISHER} --labels token",
    "sft": _SFT,
    "sft label": f"{_SFT} --estimator label",
    "dpo": f"dpo --train_file PAIRS --validation_file HELD_PAIRS --per_device_train_batch_size 1 "
    f"{_TRAIN}",
}
"""What is run; words in capitals stand for files."""

_WITH_PEAK = (
    "import sys; from alphatoken.cli import main; from benchmarks.peak import peak_mib; "
    "status = main(sys.argv[1:]); print(peak_mib()); sys.exit(status)"
)


def commands_against_what_they_said(model: Path, only: str = "") -> Iterator[Row]:
    """Each command in a fresh process: what it said it would hold at most, over what it held."""
    for name, words in COMMANDS.items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = _files(Path(folder))
            given = [files.get(word, word) for word in words.split()]
            done = subprocess.run(
                [sys.executable, "-c", _WITH_PEAK, *given, "--model_name_or_path", str(model)],
                capture_output=True,
                text=True,
                check=False,
                env=fresh_environment(HF_HUB_OFFLINE="1"),
            )
        said = re.search(r"at most (\S+) GiB of memory", done.stderr)
        if done.returncode or said is None:
            raise RuntimeError(done.stderr[-2000:])
        peak = float(done.stdout.strip().splitlines()[-1])
        ours = 1024 * float(said[1])
        yield {"name": name, "size": model.name, "ours": ours, "other": peak, "ratio": ours / peak}


def _files(folder: Path) -> dict[str, str]:
    """Rows longer than the limit, so that every batch is as large as it may be."""
    from alphatoken.data.stdlib import code_rows

    long = [row for row in code_rows(3000) if len(row.response) > 8 * _LENGTH][:24]
    rows = [{"prompt": row.prompt[:200], "response": row.response} for row in long]
    pairs = [
        {"prompt": a["prompt"], "chosen": a["response"], "rejected": b["response"]}
        for a, b in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    parts = {
        "ROWS": rows[:16], "HELD": rows[16:], "PAIRS": pairs[:12], "HELD_PAIRS": pairs[16:20],
    }  # fmt: skip
    for name, some in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {name: str(folder / f"{name}.jsonl") for name in parts} | {"OUT": str(folder / "out")}


def main() -> None:
    """Two steps in this process; prints its peak memory. With --commands: see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", type=json.loads, nargs="?")
    parser.add_argument("--commands", type=Path, help="folder of a real model")
    parser.add_argument("--only", default="", help="commands whose name has this in it")
    options = parser.parse_args()
    if options.commands is not None:
        for row in commands_against_what_they_said(options.commands, options.only):
            print(json.dumps(row), flush=True)
        return
    given = options.setting
    setting = Setting(**{field.name: given[field.name] for field in fields(Setting)})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer(setting, folder).train()
    print(json.dumps({"mib": peak_mib()}))


if __name__ == "__main__":
    main()
