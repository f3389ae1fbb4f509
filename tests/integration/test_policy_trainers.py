"""Policies in real trainers: every rule, resuming, errors. Equality with TRL: test_trainers.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from torch import Tensor
from trl import SFTTrainer

from alphatoken.cli.arguments import read_arguments
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.model.protocol import find_adapter
from alphatoken.train import (
    AlphaDPOConfig,
    AlphaDPOTrainer,
    AlphaSFTConfig,
    AlphaSFTTrainer,
    AlphaTrainer,
)
from alphatoken.train.policies import STANDS_FOR, chosen_policy
from alphatoken.train.policies.builtin import DPO, BottomRatioPolicy, Standard, TopRatioPolicy
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, TokenPolicy
from alphatoken_lab.methods.sstoken import prompt_attention, prompt_tokens
from alphatoken_lab.methods.talr import TALR
from tests.integration import policy_examples as examples
from tests.integration import tiny_training as tiny
from tests.integration.killed_run import Run, two_processes_are_one
from tests.integration.tiny_training import furthest, losses, model, options, sft_rows, weights
from tests.places import nightly

# Those that differ most: chosen rows after a warm-up, a static pass, attention, generation.
DIFFERENT = [(name, "native") for name in ("less", "stm", "sstoken", "cft")] + [("rho-1", "budget")]
OTHERS = (
    "random", "validation-first", "validation-mix", "walk-rows", "token-cleaning", "xtf", "rho-1",
    "flow", "talr", "eaft",
)  # fmt: skip
SUMMED = ("stm", "xtf", "token-cleaning", "less", "cft", "validation-mix", "walk-rows")
SGD = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}


def sft(folder: Path, policy: Any = None, **more: Any) -> Any:
    """By a policy: an object, a class, or a name as a recipe has it."""
    return tiny.made(AlphaSFTTrainer, folder, policy=policy, **more)


def dpo(folder: Path, policy: Any = None, **more: Any) -> Any:
    more = {"ref_model": None if more.get("peft") else model(1), "learning_rate": 1e-3, **more}
    return tiny.made(AlphaDPOTrainer, folder, **({"policy": policy} if policy else {}), **more)


plain_sft = partial(tiny.made, SFTTrainer)


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[f"alpha/{name}"] for entry in trainer.state.log_history if "loss" in entry]


def moved(trainer: Any, start: Any) -> float:
    before = weights(start)
    return max(float((p - before[n]).abs().max()) for n, p in weights(trainer.model).items())


def masked_rows() -> Dataset:
    """Tokenised rows with uneven numbers of even ids."""
    rows = []
    generator = torch.Generator().manual_seed(4)
    for i in range(24):
        ids = torch.randint(4, 40, (9 + i % 7,), generator=generator).tolist()
        if i % 3 == 0:
            ids = [x | 1 for x in ids[:-1]] + [4]
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return Dataset.from_list(rows)


def test_kept_is_divided_over_the_whole_step(tmp_path: Path) -> None:
    """A mask divided by kept tokens is TRL on labels of -100, over accumulated micro-batches."""
    rows = masked_rows()

    def blank(row: dict[str, Any]) -> dict[str, Any]:
        return {"labels": [x if x % 2 == 0 else -100 for x in row["labels"]]}

    shared = {**SGD, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    plain = plain_sft(tmp_path / "trl", train_dataset=rows.map(blank), **shared)
    own = sft(tmp_path / "own", examples.EvenIds, train_dataset=rows, **shared)
    late = sft(tmp_path / "late", examples.UnknownAhead, train_dataset=rows, **shared)
    for trainer in (plain, own, late):
        trainer.train()
    assert furthest(own, plain) < 1e-6
    assert furthest(late, plain) > 1e-4, "divided micro-batch by micro-batch it is another run"
    share = logged(own, "kept_share")
    assert all(0.1 < x < 0.9 for x in share)
    assert share == logged(own, "effective_share")


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{"retention": "none"}, pytest.param({"scoring_forward": "own"}, marks=pytest.mark.slow)],
)
def test_a_policy_of_ones_own_that_needs_values_is_top(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """The same values rank the same tokens: weights after the run and ledger have the same bits."""
    shared = {"max_steps": 3, "keep_ratio": 0.4, "policy_mode": "budget", **more}
    top = tiny.sft(tmp_path / "top", policy="top", **shared)
    own = tiny.sft(tmp_path / "own", policy=examples.Valuable, **shared)
    for trainer in (top, own):
        trainer.train()
    assert isinstance(top.token_policy, TopRatioPolicy)
    assert isinstance(own.token_policy, examples.Valuable)
    assert not (tmp_path / "top" / "policy.json").exists()
    assert (top.ledger.sums() == own.ledger.sums()).all()
    assert len(top.ledger) > 0
    assert 0 < own.ledger.sums()[:, -1].mean() < 1
    assert furthest(own, top) == 0


# --- every policy ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same tokenizer, trained a little on other rows."""
    folder = tmp_path_factory.mktemp("reference")
    trainer = plain_sft(folder / "run", train_dataset=sft_rows(32, seed=8), max_steps=6)
    trainer.train()
    trainer.model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def warm(reference: Path) -> Callable[[], Any]:
    """A start that finds some tokens likely, so that no published threshold keeps nothing."""
    folder = reference.parent / "warm"
    trainer = plain_sft(folder, train_dataset=sft_rows(48, seed=0), max_steps=40)
    trainer.train()
    state = weights(trainer.model)

    def start() -> Any:
        result = model()
        result.load_state_dict(state, strict=False)
        return result

    return start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [*DIFFERENT, *(pytest.param(name, "native", marks=nightly) for name in OTHERS)],
)
def test_every_sft_policy_trains(
    tmp_path: Path, reference: Path, warm: Any, name: str, mode: str
) -> None:
    small = {
        "less": {"dimension": 32, "warmup_epochs": 1, "rank": 4, "share": 0.2},
        "cft": {"max_new_tokens": 4},
        **{key: {"reference": str(reference)} for key in ("rho-1", "token-cleaning")},
    }
    trainer = sft(
        tmp_path / "run",
        policy_options=small.get(name),
        model=warm(),
        validation_dataset=sft_rows(8, seed=5),
        policy=name,
        gradient_accumulation_steps=2,
        max_steps=3,
        policy_mode=mode,
        **({"keep_ratio": 0.4} if mode == "budget" else {}),
    )
    trainer.train()
    assert len(losses(trainer)) == 3
    assert moved(trainer, warm()) > 1e-4
    if name != "random":
        record = json.loads((tmp_path / "run" / "policy.json").read_text())
        assert (record["policy"], record["settings"]["mode"]) == (name, mode)
        assert bool(record["summary"]) == (name in SUMMED)
        assert all(0 < share <= 1 for share in logged(trainer, "kept_share"))
        assert all(0 < share <= 1 + 1e-6 for share in logged(trainer, "effective_share"))
    if mode == "budget" and name == "rho-1":
        tokens = logged(trainer, "response_tokens")
        for share, count in zip(logged(trainer, "kept_share"), tokens, strict=True):
            assert 0.4 <= share <= 0.4 + 2 / count  # one of each of two micro-batches


@pytest.mark.slow
def test_losses_of_a_step_are_ranked_over_two_processes(tmp_path: Path) -> None:
    """As over two micro-batches of one process, up to the rounding of a sum."""
    rows = tiny.tokenised(24)
    options = {**SGD, "policy": "loss-truncation", "train_dataset": rows}
    two_processes_are_one(tmp_path, options)


@pytest.mark.parametrize("valued", [False, True])
def test_needs_that_depend_on_an_own_option_are_asked_with_it(tmp_path: Path, valued: bool) -> None:
    name = f"{examples.__name__}:{examples.ValuedIfAsked.__name__}"
    own = {"policy": name, "policy_options": {"valued": valued}, "bf16": False}
    assert AlphaSFTConfig(str(tmp_path), **own).needs_values is valued


def test_names_that_stand_for_options(tmp_path: Path) -> None:
    for name, stands_for in STANDS_FOR.items():
        kind = AlphaDPOConfig if name == "dpo" else AlphaSFTConfig
        made = kind(**options(tmp_path, policy=name))
        assert {option: getattr(made, option) for option in stands_for} == stands_for
        if name in ("standard", "dpo"):  # which leave the trainer below alone
            assert chosen_policy(made, None, made.FAMILY) is None


def test_transformers_trainer_takes_policies(tmp_path: Path) -> None:
    from transformers import DataCollatorForSeq2Seq

    collator = DataCollatorForSeq2Seq(tiny.tokenizer(), padding=True)
    arguments = {"data_collator": collator, "train_dataset": masked_rows(), "policy": "sstoken"}
    trainer = tiny.made(AlphaTrainer, tmp_path, **arguments)
    trainer.train()
    assert all(0.6 <= share < 0.75 for share in logged(trainer, "kept_share"))


# --- what a policy is told ------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_is_the_forwards_own(tmp_path: Path, checkpointing: bool) -> None:
    """Against the model's eager attention weights; log-probabilities against its logits."""
    batches: list[PolicyBatch] = []

    class Reading(TokenPolicy):
        name = "reading"
        needs = examples.Needs(attention=True, model=True)

        def native_weights(self, batch: PolicyBatch) -> Tensor:
            batches.append(batch)
            return batch.mask.float()

    trainer = sft(tmp_path, Reading(), max_steps=1, gradient_checkpointing=checkpointing)
    before = model()
    trainer.train()
    (batch,) = batches
    prompt = prompt_tokens(batch)
    actual = prompt_attention(batch.attention, prompt)
    before.set_attn_implementation("eager")
    inputs = {k: batch.inputs[k] for k in ("input_ids", "attention_mask")}
    with torch.no_grad():
        outputs = before(**inputs, output_attentions=True)
    expected = (outputs.attentions[-1] * prompt[:, None, None]).sum(-1).mean(1)
    assert torch.allclose(actual[batch.mask].float(), expected[batch.mask], atol=1e-5)
    logits = torch.log_softmax(outputs.logits[:, :-1], -1)
    wanted = logits.gather(-1, batch.inputs["input_ids"][:, 1:, None]).squeeze(-1)
    assert torch.allclose(batch.log_probs[:, 1:][batch.mask[:, 1:]], wanted[batch.mask[:, 1:]],
                          atol=1e-5)  # fmt: skip
    assert not bool(batch.log_probs[~batch.mask].any())
    assert batch.model is trainer.model
    assert find_adapter(batch.model) is not None


@pytest.mark.slow
def test_rows_are_chosen(tmp_path: Path) -> None:
    """Training on chosen rows is training on a data set of just those."""
    own = sft(tmp_path / "own", examples.FirstRows)
    assert len(own.train_dataset) == 8
    rows = sft_rows(48).select(list(examples.FirstRows.chosen))
    plain = plain_sft(tmp_path / "trl", train_dataset=rows)
    for trainer in (own, plain):
        trainer.train()
    assert furthest(own, plain) == 0.0


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path: Path) -> None:
    """Columns, attention and steps come back; dropout too. Kills: ``test_checkpoint.py``."""
    arguments = {"policy": "sstoken", "dropout": 0.1, "gradient_accumulation_steps": 2}
    run = Run("sft", tmp_path, options={**arguments, "policy_cache": str(tmp_path / "cache")})
    run.trainer().train()
    whole = load_file(run.out / "checkpoint-8" / "model.safetensors")
    run.trainer().train(resume_from_checkpoint=str(run.out / "checkpoint-3"))
    again = load_file(run.out / "checkpoint-8" / "model.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_another_policy_is_another_run(tmp_path: Path) -> None:
    shared = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    sft(tmp_path, TALR(tau=1.0), **shared).train()
    with pytest.raises(ConfigError, match="policy_arguments"):
        sft(tmp_path, TALR(tau=2.0), **{**shared, "max_steps": 2}).train(True)


HERE = "tests.integration.policy_examples"


@pytest.mark.parametrize("make", [sft, dpo])
@pytest.mark.parametrize("how", ["object", "class", "name"])
def test_the_record_of_a_run_says_which_policy_ran(tmp_path: Path, make: Any, how: str) -> None:
    """Class and options, however it was chosen, beside the facts that a resumed run compares."""
    options = {"floor": 0.25} if how == "name" else None
    chosen = {
        "object": {"policy": examples.Middle(floor=0.25)},
        "class": {"policy": examples.Middle},
        "name": {"policy": f"{HERE}:Middle", "policy_options": options},
    }[how]
    trainer = make(tmp_path, **chosen, max_steps=1)
    trainer.train()
    record = json.loads((tmp_path / "alphatoken-run.json").read_text())
    written = json.loads((tmp_path / "policy.json").read_text())
    own = {"floor": 0.5 if how == "class" else 0.25}
    expected = {"class": f"{HERE}:Middle", "options": own}
    assert record["policy"].items() >= {"name": "middle", **expected}.items()
    assert record["policy"]["settings"]["mode"] == "native"
    assert written.items() >= {"policy": "middle", **expected}.items()
    assert record["options"]["policy"] == expected["class"]
    assert record["options"]["policy_options"] == expected["options"]
    facts = trainer.run_facts()["options"]
    assert (facts["policy"], facts["policy_options"]) == (trainer.args.policy, options)


# --- bad input ------------------------------------------------------------------------------------


class Empty(examples.FirstRows):
    name = "empty"
    chosen = ()


class Twice(examples.FirstRows):
    name = "twice"
    chosen = (1, 1)


class NoColumns(examples.Surprising):
    name = "no-columns"
    needs = examples.Needs(columns=("missing",))


class Validates(examples.FirstRows):
    name = "validates"
    needs = examples.Needs(validation=True)


class Against(TokenPolicy):
    name = "against"
    signed = True
    denominator = "kept"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return -batch.mask.float()


class NotStatic(examples.EvenIds):
    """Reads the forward, and says that it does not."""

    name = "not-static"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return (batch.log_probs > batch.log_probs[batch.mask].mean()).float() * batch.mask


class WritesMask(examples.UnknownAhead):
    """Writes into what it is handed."""

    name = "writes-mask"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        batch.mask.zero_()
        return torch.ones_like(batch.log_probs)


def test_a_rule_that_writes_into_the_mask_is_refused(tmp_path: Path) -> None:
    """The step's records would count no response token."""
    with pytest.raises(ConfigError, match=r"writes-mask' writes into batch\.mask"):
        sft(tmp_path, WritesMask, max_steps=1).train()


def streamed() -> IterableDataset:
    return sft_rows(48).to_iterable_dataset()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda d: sft(d, policy="rho-1"), "needs a reference model"),
        (lambda d: sft(d, policy="less"), "validation"),
        (lambda d: sft(d, policy="confpo"), "preference pairs"),
        (lambda d: sft(d, policy="dpo"), "DPO"),
        (lambda d: dpo(d, policy="talr"), "supervised fine-tuning"),
        (lambda d: sft(d, policy="rho1"), "did you mean rho-1"),
        (lambda d: sft(d, policy="talr", policy_options="{'tau': 1}"), "cannot be read"),
        (lambda d: sft(d, policy="talr", policy_options="[1]"), "a mapping of arguments"),
        (lambda d: sft(d, policy="talr", policy_options={"to": 1}), "does not take"),
        (lambda d: sft(d, policy="top", policy_options={"to": 1}), "no options of its own"),
        (lambda d: sft(d, policy="label", policy_options={"to": 1}), "no options of its own"),
        (
            lambda d: sft(d, policy="sstoken", keep_ratio=0.2),
            "keep_ratio has no effect on policy 'sstoken'.*policy_mode='budget'",
        ),
        (lambda d: sft(d, examples.EvenIds, keep_ratio=0.2), "keep_ratio has no effect"),
        (lambda d: sft(d, Standard(), keep_ratio=0.2), "no effect on policy 'standard'"),
        (lambda d: sft(d, policy="dft", loss_type="dft"), "'dft' weighs .*twice"),
        (lambda d: sft(d, TALR, loss_type="dft"), "'talr' weighs .*twice"),
        (lambda d: sft(d, policy="talr", policy_mode="soft"), "policy_mode"),
        (lambda d: sft(d, policy="talr", keep_scope="global"), "keep_scope"),
        (lambda d: sft(d, examples.Valuable, keep_scope="global"), "the trainers' own policies"),
        (lambda d: sft(d, examples.Valuable, validation_dataset=None), "values need a validation"),
        (lambda d: dpo(d, examples.Valuable, loss_type=["sft"]), "likelihood loss"),
        (
            lambda d: sft(d, policy="talr", kept_normalization="kept"),
            "divides by the response",
        ),
        (lambda d: dpo(d, policy="confpo", kept_normalization="kept"), "loss of its own"),
        (lambda d: sft(d, Empty), "chose rows"),
        (lambda d: sft(d, Twice), "chose rows"),
        (lambda d: sft(d, examples.FirstRows, packing=True), "packed"),
        (lambda d: sft(d, policy="sstoken", packing=True), "one a row.*Got: packing"),
        (lambda d: sft(d, policy="sstoken", padding_free=True, max_length=None), "one a row"),
        (
            lambda d: sft(
                d, policy="loss-truncation", policy_options={"unit": "response"}, packing=True
            ),
            "'loss-truncation' ranks responses, one a row",
        ),
        (
            lambda d: sft(
                d,
                policy="rho-1",
                policy_options={"unit": "response", "reference_epochs": 1},
                padding_free=True,
                max_length=None,
                validation_dataset=tiny.sft_rows(4, seed=9),
            ),
            "'rho-1' ranks responses, one a row",
        ),
        (lambda d: sft(d, examples.FirstRows, train_dataset=streamed()), "streamed"),
        (lambda d: sft(d, NoColumns), "left columns out"),
        (lambda d: sft(d, Validates), "validation dataset"),
        (lambda d: sft(d, examples.Nameless), "examples:Nameless without one.*name = 'nameless'"),
        (lambda d: sft(d, policy=f"{HERE}:Nameless"), "a policy has a name"),
        (lambda d: sft(d, examples.Ruleless()), "'ruleless' has no rule.*scores.batch"),
        (
            lambda d: sft(d, examples.RuleOfStep, gradient_accumulation_steps=2).train(),
            "scope 'step' and a rule of its own.*native_weights",
        ),
        (
            lambda d: sft(d, examples.EvenIds, policy_mode="budget"),
            "'even-ids' has no rule for policy_mode='budget'",
        ),
        (
            lambda d: sft(d, NotStatic).train(),
            "'not-static' is static.*depend on the forward.*Got: a sum of .* before",
        ),
        (lambda d: sft(d, Against).train(), "weights of step 0 cannot divide its loss"),
        (lambda d: sft(d, Tensor), "not a policy"),
        (lambda d: sft(d, 3), "not a policy"),
        (lambda d: sft(d, examples.OwnDPO), "preference pairs"),
        (lambda d: dpo(d, examples.OwnDPO, precompute_ref_log_probs=True), "precompute"),
        (lambda d: dpo(d, examples.NoLoss).train(), "gave no loss"),
        (lambda d: sft(d, DPO), "preference pairs"),
    ],
)
def test_bad_input(tmp_path: Path, make: Any, match: str) -> None:
    with pytest.raises(AlphaTokenError, match=match):
        make(tmp_path)


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ({"needs": ["values"]}, "needs of policy 'surprising' must be a Needs"),
        ({"scope": "sequences"}, "scope of policy 'surprising'.*sequence"),
        ({"denominator": "keep"}, "denominator.*kept"),
        ({"published_loss": "mse"}, "published_loss.*cross_entropy"),
        ({"family": "dpo"}, "family.*preference"),
        ({"rounding": "up"}, "rounding.*ceil"),
        ({"need": Needs(values=True)}, "nothing reads.*need; did you mean needs"),
        ({"weights": lambda _, batch: batch.log_probs}, "weights.. in place.*native_weights"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_slip_in_a_class_is_named(tmp_path: Path, slip: dict[str, Any], said: str) -> None:
    """A misspelt attribute would rank other tokens together, or train by another divisor."""
    with pytest.raises(AlphaTokenError, match=said):
        sft(tmp_path, type("Own", (examples.Surprising,), slip))


@pytest.mark.parametrize("policy", [examples.OwnDPO, examples.ValuedDPO])
def test_evaluation_is_by_a_loss_that_needs_no_training_row(tmp_path: Path, policy: Any) -> None:
    """A loss of values would be 0 on evaluation rows, which have none: there is the trainer's."""
    rows = tiny.preference_rows(4, seed=3)
    trusted = tiny.preference_rows(12, seed=5)
    made = dpo(tmp_path / "own", policy, eval_dataset=rows, validation_dataset=trusted)
    assert made.token_policy.evaluates == (policy is examples.OwnDPO)
    plain = dpo(tmp_path / "plain", "standard", eval_dataset=rows)
    for trainer in (made, plain):  # away from the reference, where every loss is log 2
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(1.5)
    loss, expected = (trainer.evaluate()["eval_loss"] for trainer in (made, plain))
    assert abs(expected - math.log(2)) > 1e-3
    assert loss == pytest.approx(expected, abs=1e-5)


def test_tokens_of_packed_rows_may_be_ranked_together(tmp_path: Path) -> None:
    made = sft(tmp_path, policy="loss-truncation", packing=True)
    assert not made.token_policy.by_response
    assert made.args.packing


def test_options_beside_a_policy_are_an_arguments_of_its_class_alone(tmp_path: Path) -> None:
    """An object has its arguments already, and a loss is weighed twice in native mode alone."""
    args = AlphaSFTConfig(**options(tmp_path), policy="talr", policy_options={"tau": 2.0})
    assert vars(chosen_policy(args, TALR, "sft"))["tau"] == 2.0
    with pytest.raises(ConfigError, match="policy_options are not read by a policy object"):
        chosen_policy(args, TALR(), "sft")
    for more in ({"policy": "talr", "policy_mode": "budget"}, {"policy": "stm"}, {}):
        AlphaSFTConfig(**options(tmp_path), loss_type="dft", **more)


def test_command_line_takes_options(tmp_path: Path) -> None:
    words = ["--model_name_or_path", "x", "--output_dir", str(tmp_path), "--use_cpu", "true",
             "--bf16", "false", "--policy", "talr", "--policy_options", '{"tau": 1.5}',
             "--policy_mode", "budget"]  # fmt: skip
    result = read_arguments("sft", words, AlphaSFTConfig).training
    assert (result.policy, result.policy_mode) == ("talr", "budget")
    assert result.policy_options in ({"tau": 1.5}, json.dumps({"tau": 1.5}))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("policy: flow\npolicy_options:\n  tau: 2.0\nuse_cpu: true\nbf16: false\n")
    read = read_arguments("sft", ["--config", str(recipe), "--output_dir", "x"], AlphaSFTConfig)
    assert read.training.policy_options == {"tau": 2.0}


def test_ratios_that_are_handed_over_are_told_apart_when_a_run_resumes(tmp_path: Path) -> None:
    """Named ones are options; of an object or a class the facts of the run hold all of it."""

    class Own(TopRatioPolicy):
        name = "own"

        def __init__(self, settings: PolicySettings | None = None, *, k: int = 1) -> None:
            super().__init__(settings)
            self.k = k

    arguments = {"train_dataset": tiny.sft_rows(8), "validation_dataset": tiny.sft_rows(4, seed=1)}
    policies = (TopRatioPolicy, BottomRatioPolicy, TopRatioPolicy(unit="response"), Own(k=1))
    facts = [
        tiny.made(AlphaSFTTrainer, tmp_path / str(number), policy=policy, **arguments).run_facts()
        for number, policy in enumerate((*policies, Own(k=2)))
    ]
    digests = {fact["data"]["policy_arguments"] for fact in facts}
    assert len(digests) == len(facts)
    assert (tmp_path / "4" / "policy.json").is_file()
    assert not (tmp_path / "0" / "policy.json").exists()
    named = tiny.made(AlphaSFTTrainer, tmp_path / "named", keep_ratio=0.25, **arguments).run_facts()
    other = tiny.made(AlphaSFTTrainer, tmp_path / "other", keep_ratio=0.5, **arguments).run_facts()
    assert named["data"] == other["data"]


# --- what divides the loss of every token ---------------------------------------------------------


def test_a_sum_over_every_token_is_one_whatever_is_exported(tmp_path: Path) -> None:
    """A step is TRL's at a rate of as many times as it has tokens."""
    shared = {**SGD, "max_steps": 1, "learning_rate": 1e-3}
    own = {"policy": "all", "kept_normalization": "sum", "retention": "none"}
    trained = [
        tiny.sft(tmp_path / str(export), export_values=export, **own, **shared)
        for export in (True, False)
    ]
    for trainer in trained:
        trainer.train()
    (tokens,) = logged(trained[1], "response_tokens")
    trls = plain_sft(tmp_path / "trl", **{**shared, "learning_rate": 1e-3 * tokens})
    trls.train()
    assert furthest(trls, tiny.made(AlphaSFTTrainer, tmp_path / "start", policy="standard")) > 1e-3
    for trainer in trained:
        assert furthest(trainer, trls) < 1e-6


def test_a_trainer_that_is_left_as_it_is_has_its_own_divisor(tmp_path: Path) -> None:
    """What a recipe says of the divisor gives way, and that is said."""
    for kind, policy in ((AlphaSFTConfig, "standard"), (AlphaDPOConfig, "dpo")):
        with pytest.raises(ConfigError, match=f"no effect on policy '{policy}'"):
            kind(**options(tmp_path), policy=policy, kept_normalization="kept")
    (tmp_path / "own.yaml").write_text("policy: top\nkept_normalization: sum\n")
    words = ["--config", str(tmp_path / "own.yaml"), "--policy", "standard", "--bf16", "false"]
    read = read_arguments("sft", [*words, "--use_cpu", "true"], AlphaSFTConfig)
    assert (read.training.kept_normalization, read.unread) == ("response", ("kept_normalization",))


def test_a_model_that_was_trained_first_is_of_the_optimizer_handed_over(tmp_path: Path) -> None:
    """What is kept of another run is not found by one with another optimizer or collator."""

    def first(folder: str, **more: Any) -> Any:
        made = {"validation_dataset": sft_rows(6, seed=5), "policy_options": {"epochs": 2}}
        return sft(tmp_path / folder / "run", "validation-first", **made, **more)

    def descent(rate: float) -> dict[str, Any]:
        return {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": rate})}

    alone = first("alone", **descent(0.1))
    for more in ({}, descent(0.2), {"data_collator": tiny.padded, **descent(0.1)}):
        first("shared", **more)
    assert furthest(first("shared", **descent(0.1)), alone) == 0.0
    kept = list((tmp_path / "shared" / "policies").glob("validation-first-*"))
    assert len(kept) == 4
    first("shared", **descent(0.1))
    assert len(list((tmp_path / "shared" / "policies").glob("validation-first-*"))) == 4
