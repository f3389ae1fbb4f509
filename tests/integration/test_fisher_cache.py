"""The Fisher cache: what an entry is bound to, interrupted fits, several processes."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.fisher import fit_fisher
from alphatoken.errors import AlphaTokenError, ConfigError, FisherError
from alphatoken.support.progress import Tracker
from alphatoken.train import AlphaDPOTrainer, AlphaSFTTrainer, AlphaTrainer
from alphatoken.train.distributed import cache_folder
from alphatoken.train.options import AlphaOptions
from alphatoken.train.run_rows import cache_key, fisher_settings, fitted_fisher
from tests.integration import tiny_training as tiny

PROMPTS = [[1, 5, 9, 7], [1, 8], [1, 30, 31]]


def options(**more: Any) -> AlphaOptions:
    small = {
        "retention": "diagonal",
        "fisher_samples": 4,
        "fisher_max_new_tokens": 6,
        "layers": "2",
    }
    return AlphaOptions(**{**small, **more})


def equal(first: FisherDrift, second: FisherDrift) -> bool:
    return first.fisher.keys() == second.fisher.keys() and all(
        torch.equal(first.fisher[name], second.fisher[name])
        and torch.equal(first.reference[name], second.reference[name])
        for name in first.fisher
    )


class Count:
    """A progress sink that counts samples and can stop the fit."""

    def __init__(self, stop: int | None = None) -> None:
        self.seen: list[int] = []
        self._stop = stop

    def __call__(self, progress: Tracker) -> None:
        self.seen.append(progress.done)
        if progress.done == self._stop:
            raise KeyboardInterrupt


def entries(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


# --- one process ----------------------------------------------------------------------------------


def test_fitted_once_and_found_again(tmp_path: Path) -> None:
    first, second = Count(), Count()
    fitted = fitted_fisher(tiny.model(), PROMPTS, options(), tmp_path, progress=first)
    found = fitted_fisher(tiny.model(), PROMPTS, options(), tmp_path, progress=second)
    assert (first.seen, second.seen) == ([1, 2, 3, 4], [])
    assert equal(fitted, found)
    assert fitted.metadata == found.metadata
    assert entries(tmp_path) == [".safetensors"]


def test_settings_are_those_of_the_options() -> None:
    settings = fisher_settings(options(retention="kronecker"))
    assert settings["samples"] == 4
    assert settings["structure"] == "kronecker"
    assert settings["layers"] == 2
    own = {"checkpoint", "checkpoint_every", "progress", "adapter", "model", "prompts"}
    own |= {"responses", "labels"}
    assert set(settings) | own == set(inspect.signature(fit_fisher).parameters)


def test_folder_is_shared_by_runs_of_one_experiment() -> None:
    assert cache_folder(None, "runs/a/", "fisher") == Path.cwd() / "runs" / "fisher"
    assert cache_folder("x", "runs/a", "fisher") == Path("x")


CHANGES: dict[str, dict[str, Any]] = {
    "samples": {"fisher_samples": 5},
    "layers": {"layers": "1"},
    "structure": {"retention": "kronecker"},
    "tokens": {"fisher_max_new_tokens": 7},
    "batch": {"fisher_batch_size": 2},
}


def test_key_depends_on_everything_that_the_fit_does() -> None:
    def key(model: torch.nn.Module, prompts: Any = PROMPTS, **more: Any) -> str:
        return cache_key(model, prompts, fisher_settings(options(**more)))

    moved, frozen = tiny.model(), tiny.model()
    with torch.no_grad():
        moved.model.layers[0].mlp.up_proj.weight[3, 2] += 1e-3
    frozen.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    keys = [
        key(tiny.model()),
        key(moved),
        key(frozen),
        key(tiny.model(), [[1, 5, 9, 7], [1, 8], [1, 30, 32]]),
        key(tiny.model(), [[1, 5, 9, 7, 1], [8], [1, 30, 31]]),
        key(tiny.model(), PROMPTS[:2]),
        *(key(tiny.model(), **change) for change in CHANGES.values()),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(tiny.model())
    assert keys[0] == key(tiny.model(), [torch.tensor(prompt) for prompt in PROMPTS])
    assert keys[0] == key(tiny.model(), value_seed=7, keep_ratio=0.3), "no part in the fit"


def test_key_depends_on_how_adapters_enter() -> None:
    """The same factors under another scale have another Fisher."""
    from peft import LoraConfig, get_peft_model

    def key(**more: Any) -> str:
        torch.manual_seed(0)
        model = get_peft_model(tiny.model(), LoraConfig(**{**tiny.LORA, **more}))
        return cache_key(model, PROMPTS, fisher_settings(options()))

    keys = [key(), key(lora_alpha=64), key(use_rslora=True)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(peft_version="0.1")


def test_a_fisher_of_adapters_belongs_to_one_base(tmp_path: Path) -> None:
    """The factors of one seed are the same on two models; rounding of one base makes no other."""
    from peft import LoraConfig, get_peft_model

    def adapted(seed: int) -> torch.nn.Module:
        torch.manual_seed(0)
        return get_peft_model(tiny.model(seed=seed), LoraConfig(**tiny.LORA))

    fisher = fitted_fisher(adapted(0), PROMPTS, options(), tmp_path)
    assert fisher.metadata["base"]
    fisher.check(adapted(0), fisher.names)
    fisher.check(adapted(0).to(torch.bfloat16), fisher.names)
    with pytest.raises(FisherError, match="adapters on another base model"):
        fisher.check(adapted(1), fisher.names)
    with pytest.raises(FisherError, match="adapters on another base model"):
        fisher.check(adapted(1).to(torch.bfloat16), fisher.names)


def test_a_damaged_entry_is_named(tmp_path: Path) -> None:
    fitted_fisher(tiny.model(), PROMPTS, options(), tmp_path)
    (entry,) = tmp_path.glob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.raises(FisherError, match=entry.name):
        fitted_fisher(tiny.model(), PROMPTS, options(), tmp_path)


LONG = {"fisher_samples": 60, "fisher_max_new_tokens": 2}


def test_interrupted_fit_goes_on(tmp_path: Path) -> None:
    whole = fitted_fisher(tiny.model(), PROMPTS, options(**LONG), tmp_path / "whole")
    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        fitted_fisher(tiny.model(), PROMPTS, options(**LONG), folder, progress=Count(stop=55))
    assert ".partial" in entries(folder)
    again = Count()
    found = fitted_fisher(tiny.model(), PROMPTS, options(**LONG), folder, progress=again)
    assert again.seen == list(range(51, 61))
    assert equal(found, whole)
    assert ".partial" not in entries(folder)


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    model = tiny.model()
    model.lm_head.weight.ds_id = 0  # as ZeRO-3 marks its parameters
    with pytest.raises(ConfigError, match="lm_head"):
        fitted_fisher(model, PROMPTS, options(), tmp_path)


# --- rows of its own (fisher_dataset) -------------------------------------------------------------

HELD_OUT = 5  # fewer than the samples: the fit goes round them


ROWS = {"sft": tiny.sft_rows, "dpo": tiny.preference_rows, "plain": tiny.tokenised}
KINDS = {"sft": AlphaSFTTrainer, "dpo": AlphaDPOTrainer, "plain": AlphaTrainer}


def trainer(kind: str, folder: Path, **more: Any) -> Any:
    """A real trainer; ``rows`` are those of ``fisher_dataset``."""
    given = {
        "fisher_samples": 7,
        "train_dataset": ROWS[kind](12),
        "validation_dataset": ROWS[kind](8, seed=5),
        "fisher_dataset": more.pop("rows", None),
        **({"ref_model": tiny.model()} if kind == "dpo" else {}),
        **({"data_collator": DataCollatorForSeq2Seq(tiny.tokenizer())} if kind == "plain" else {}),
    }
    return tiny.made(KINDS[kind], folder / "out", **{**tiny.ALPHA, **given, **more})


def held_out(kind: str, rows: int = HELD_OUT, seed: int = 8) -> Dataset:
    return ROWS[kind](rows, seed)


def by_hand(seed: int, rows: int = HELD_OUT) -> FisherDrift:
    """Of the prompts as the tokenizer makes them, without any trainer."""
    prompts = [tiny.tokenizer()(row["prompt"])["input_ids"] for row in tiny.sums(rows, seed)]
    return fit_fisher(tiny.model(), prompts, samples=7, layers=2, max_new_tokens=8, progress=False)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("sft", {"packing": True}), ("dpo", {}), pytest.param("plain", {}, marks=pytest.mark.slow)],
    ids=["packed", "dpo", "plain"],
)
def test_fisher_is_fitted_on_the_prompts_of_its_own_rows(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    made = trainer(kind, tmp_path, rows=held_out(kind), **more)
    assert equal(made.rows.fisher, by_hand(8))
    assert not equal(made.rows.fisher, by_hand(0, rows=12)), "not on the training rows"
    trained = len(made.train_dataset)
    if not more:
        assert trained == 12, "the rows are not trained on"
        assert equal(trainer(kind, tmp_path).rows.fisher, by_hand(0, rows=12)), "the default"


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packing_changes_no_prompt_of_the_fisher(tmp_path: Path, strategy: str) -> None:
    """Of a packed row only what precedes its first label would be one."""
    made = trainer("sft", tmp_path, packing=True, packing_strategy=strategy)
    assert len(made.train_dataset) < 12
    assert equal(made.rows.fisher, by_hand(0, rows=12))


TOO_LONG = [{"prompt": "1+" * 40, "completion": " too long."}]


UNUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adaptation": ({"objective": "adaptation"}, "no Fisher is wanted"),
    "no retention": ({"retention": "none"}, "no Fisher is wanted"),
    "other retention": ({"retention": "data"}, "no Fisher is wanted"),
    "a fitted one": ({"rows": None, "retention": "none", "fisher": ...}, "fisher is given, and no"),
    "both": ({"fisher": ...}, "given twice"),
    "long prompts": ({"rows": Dataset.from_list(TOO_LONG)}, "no row is left"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_rows_that_would_go_unused_are_refused(name: str, tmp_path: Path) -> None:
    more, cause = UNUSED[name]
    own = {"fisher": by_hand(8)} if "fisher" in more else {}
    with pytest.raises(ConfigError, match=cause):
        trainer("sft", tmp_path, **{"rows": held_out("sft"), **more, **own})
    assert not (tmp_path / "fisher").exists(), "nothing was fitted"


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(AlphaTokenError, match="Fisher data set has no rows|no row is left"):
        trainer(kind, tmp_path, rows=held_out(kind).select([]))
    assert not (tmp_path / "fisher").exists(), "nothing was fitted"


def test_a_newcomer_fits_none_and_who_does_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 0.26 million parameters the default's 1,000 samples took 160 silent seconds."""
    default = AlphaSFTTrainer.CONFIG(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    made = trainer("sft", tmp_path, retention=default.retention)
    assert made.rows.fisher is None
    control = trainer("sft", tmp_path, rows=held_out("sft"), policy="random")
    assert control.rows.fisher is None, "a control may be called as what it is compared with"
    assert not (tmp_path / "fisher").exists()
    assert "Fisher" not in capfd.readouterr().err
    trainer("sft", tmp_path, disable_tqdm=False)
    said = capfd.readouterr().err
    first = said.index("fitting the Fisher before training: 7 samples")
    assert "at most 8 tokens" in said
    assert "none: retention='none'" in said
    assert re.search(r"Fisher: 7/7 \(100%\), +[0-9.]+/s", said[first:])
    trainer("sft", tmp_path, disable_tqdm=False)
    assert "fitting" not in capfd.readouterr().err, "it is found again"


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_fisher(tmp_path: Path) -> None:
    more = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer("sft", tmp_path, rows=held_out("sft"), **more).train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    other = trainer("sft", tmp_path, rows=held_out("sft", seed=9), **more)
    with pytest.raises(ConfigError, match=r"fisher: '\w+' then, '\w+' now"):
        other.train(resume_from_checkpoint=True)
    again = trainer("sft", tmp_path, rows=held_out("sft"), **more)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
