"""What trainers promise beside their steps: one rule for all objectives, refusals, what is said."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alphatoken.errors import InputError, UnsupportedError
from tests.property.decoder import DecoderConfig, ReferenceDecoder
from tests.property.reference_step import RunConfig
from tests.property.setups import refusal
from tests.property.test_trainer_oracle import (
    ALPHABET,
    _sft_row,
    _tokenizer,
    made_model,
    made_rows,
    made_trainer,
    options_of,
)


def _trainer(run: RunConfig, model: Any, **more: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made_trainer(run, folder, model, export_values=False, **more)


PAIRS = RunConfig(family="dpo", retention="none", policy="top", rows=2, accumulation=1, steps=2)

PAIR_RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"precompute_ref_log_probs": True},
    "by length": {"ld_alpha": 0.3},
    "by length, ahead": {"ld_alpha": 0.3, "precompute_ref_log_probs": True},
}

FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}


def _pool(trainer: Any) -> float:
    """The mean preference loss of all validation pairs, as the trainer hands them to the scorer."""
    rows = trainer.rows.validation
    trainer.prepare_pool(rows)
    batch = trainer.row_batch(rows)
    sums = []
    for part in (batch.chosen, batch.rejected):
        with torch.no_grad():
            logits = trainer.model(
                input_ids=part["input_ids"], attention_mask=part["attention_mask"]
            ).logits
        losses = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), part["labels"][:, 1:], reduction="none"
        )
        sums.append(-losses.sum(-1).double())
    margins = sums[0] - sums[1] - (batch.reference_chosen - batch.reference_rejected)
    return float(-nn.functional.logsigmoid(batch.beta * margins).mean())


class _SecondHalf:
    """A collator that labels what the column ``begin`` says."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        from tests.integration.tiny_training import padded

        plain = [
            {
                "input_ids": list(row["input_ids"]),
                "labels": [-100] * row["begin"] + list(row["input_ids"])[row["begin"] :],
            }
            for row in rows
        ]
        return padded(plain)


COLLATED = {
    family: RunConfig(family=family, retention="none", policy="top") for family in ("sft", "lm")
}


def _mixture(share: float) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=4 + len(ALPHABET), hidden_size=16, intermediate_size=12,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, output_router_logits=True, router_aux_loss_coef=share,
    )  # fmt: skip
    made = MixtralForCausalLM(config).double()
    made.set_experts_implementation("eager")  # others multiply in 32 bits at most
    return made


OPTIONS = {"optim": "adamw_torch", "keep_scope": "global", "learning_rate": 1e-3}

FACTS: dict[str, Any] = {
    "processes": 1, "options": OPTIONS, "data": {"train_dataset": "these rows"},
    "versions": {"torch": "2.13.0"},
}  # fmt: skip

FASTER = {"options": {**OPTIONS, "learning_rate": 2e-3}}
CHECKPOINTED = {"options": {**OPTIONS, "gradient_checkpointing": True}}
OTHER_ROWS = {"data": {"train_dataset": "other rows"}}

RESUMED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "the same": ({}, (), ""),
    "checkpointing": (CHECKPOINTED, (), "noted"),
    "versions": ({"versions": {"torch": "2.14.0"}}, (), "noted"),
    "learning rate": (FASTER, (), "refused"),
    "learning rate, on purpose": (FASTER, ("learning_rate",), ""),
    "learning rate, another on purpose": (FASTER, ("train_dataset",), "refused"),
    "rows": (OTHER_ROWS, (), "refused"),
    "rows, on purpose": (OTHER_ROWS, ("train_dataset",), ""),
    "two processes, on purpose": ({"processes": 2}, ("processes",), "refused"),
}
"""Facts that are other in the second run, names that may be, and what is done about it."""

REFERENCES: dict[str, tuple[int, int, str | None, str]] = {
    "the same": (0, 0, ALPHABET, ""),
    "a row too few": (-1, 0, ALPHABET, "has no row for some tokens"),
    "as small as the policy": (-2, -2, ALPHABET, ""),
    "beside a padded policy": (0, 8, ALPHABET, ""),
    "two tokens exchanged": (0, 0, f"ba{ALPHABET[2:]}", "are not the trained model's"),
    "the last tokens not named": (0, 0, ALPHABET[:-3], ""),
    "without a tokenizer": (0, 0, None, ""),
}
"""Rows of reference and policy beyond the tokens, letters of the reference's tokenizer, refusal."""


ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "alpha": ({"lora_alpha": 64}, True),
    "scale by the root": ({"use_rslora": True}, True),
    "dropout": ({"lora_dropout": 0.1}, True),
    "modules": ({"target_modules": {"q_proj"}}, True),
    "ranks of some": ({"rank_pattern": {"q_proj": 4}}, True),
    "a set in another order": ({"layers_to_transform": {8, 0}}, False),
    "from elsewhere": (
        {"base_model_name_or_path": "b", "revision": "2", "peft_version": "1"},
        False,
    ),
    "for another task": ({"task_type": None, "inference_mode": True}, False),
}
"""Settings of a LoRA that are other in a second model, and whether it computes something else."""


def _two_rows(token: int) -> dict[str, Tensor]:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, token, 8]])
    labels = torch.tensor([[-100, -100, 7, 8], [-100, -100, -100, 8]])
    return {"input_ids": ids, "labels": labels}


TRAINERS = ("trl", "peft")


def need(*packages: str) -> None:
    for name in packages:
        pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.mark.parametrize("name", list(PAIR_RULES))
def test_pools_begin_at_log_two(name: str) -> None:
    """Where the policy is the reference, the preference loss of validation pairs is log 2, whatever
    form the trained loss has.

    Proves: pools begin at log two (exact), against log 2.
    """
    need(*TRAINERS)
    model = made_model(PAIRS)
    reference = None if "ahead" in name else made_model(PAIRS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _trainer(PAIRS, model, ref_model=reference, **PAIR_RULES[name])
        loss = _pool(trainer)
    assert abs(loss - math.log(2)) < 1e-4, f"the pool begins at {loss}"


def test_a_moving_reference_is_looked_at_anew() -> None:
    """Where the reference has become the policy, the preference loss of validation pairs is log 2
    again, although the pairs were looked at before.

    Proves: a moving reference is looked at anew (exact), against log 2.
    """
    need(*TRAINERS)
    trainer = _trainer(PAIRS, made_model(PAIRS), ref_model=made_model(PAIRS), **FOLLOWING)
    _pool(trainer)
    generator = torch.Generator().manual_seed(1)
    moved = dict(trainer.ref_model.named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.3 * noise)
            moved[name].copy_(parameter)
    loss = _pool(trainer)
    assert abs(loss - math.log(2)) < 1e-4, f"the pool is at {loss}"


@pytest.mark.parametrize("family", ["sft", "lm"])
def test_a_collator_labels_every_batch(family: str) -> None:
    """A collator of the user's own decides which tokens count: in validation batches, in a Fisher's
    prompts and in its sequences, as in training.

    Proves: a collator labels every batch (exact), against the collator's labels.
    """
    need(*TRAINERS)
    import datasets

    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(8):
        ids = _sft_row(generator, False)["input_ids"]
        rows.append({"input_ids": ids, "labels": ids, "begin": len(ids) // 2})
    whole = datasets.Dataset.from_list(rows)
    more: dict[str, Any] = {"remove_unused_columns": False}
    if family == "sft":
        more["dataset_kwargs"] = {"skip_prepare_dataset": True}
    trainer = _trainer(
        COLLATED[family], made_model(COLLATED[family]),
        train_dataset=whole, validation_dataset=whole, data_collator=_SecondHalf(), **more,
    )  # fmt: skip
    validation = [dict(row) for row in trainer.rows.validation]
    own = [len(row["input_ids"]) - row["begin"] for row in validation]
    batch = trainer.row_batch(validation)
    assert (batch["labels"] != -100).sum(-1).tolist() == own, "labels of validation rows"
    prompts = trainer.fisher_prompts(trainer.train_dataset, 3)
    assert [len(one) for one in prompts] == [r["begin"] for r in rows][:3], "a Fisher's prompts"


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_the_routers_loss_is_trained(share: float) -> None:
    """All tokens of a mixture of experts kept, with its routers' loss: the step of transformers'
    own trainer (routers compute in float32).

    Proves: the routers loss is trained (exact), against transformers' own trainer.
    """
    need(*TRAINERS)
    import datasets
    import transformers

    from tests.integration.tiny_training import options, padded

    run = RunConfig(family="lm", retention="none", policy="random", keep_ratio=1.0, steps=1)
    rows = datasets.Dataset.from_list(made_rows(run)["train"])
    start = _mixture(share)
    ours = _trainer(run, _mixture(share))
    ours.train()
    with tempfile.TemporaryDirectory() as folder:
        named = options(folder, **options_of(run))
        shared = set(transformers.TrainingArguments.__dataclass_fields__)
        arguments = transformers.TrainingArguments(**{k: named[k] for k in shared & set(named)})
        theirs = transformers.Trainer(
            _mixture(share), arguments, train_dataset=rows, data_collator=padded
        )
        theirs.train()
    pairs = zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    pairs = zip(ours.model.parameters(), start.parameters(), strict=True)
    moved = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert apart < 1e-4 * moved, f"{apart} from transformers' weights"


@pytest.mark.parametrize("name", list(RESUMED))
def test_rounding_is_told_from_results(name: str) -> None:
    """A run goes on, and it is said, under facts that change rounding alone; under others only
    where they are named, and never on other processes.

    Proves: rounding is told from results (exact), against numbers by hand.
    """
    need(*TRAINERS)
    changed, allowed, done = RESUMED[name]
    manifest = import_module("alphatoken.train.manifest")
    refused, noted = manifest.split_changes(FACTS, {**FACTS, **changed}, allowed)
    assert (bool(refused), bool(noted)) == (done == "refused", done == "noted"), name


@pytest.mark.parametrize("name", list(ADAPTERS))
def test_settings_of_adapters_tell_models_apart(name: str) -> None:
    """Two models of the same weights have other digests, and so other places in a cache, exactly
    where their adapters compute something else; one without adapters has that of its weights.

    Proves: settings of adapters tell models apart (exact), against numbers by hand.
    """
    need("peft")
    from peft import LoraConfig

    from alphatoken.support.resume import adapter_settings, tensor_digest, weights_digest

    change, apart = ADAPTERS[name]
    model = nn.Linear(2, 3)
    tensors = list(model.named_parameters())
    assert (adapter_settings(model), weights_digest(model)) == ({}, tensor_digest(tensors))
    settings, digests = [], []
    for more in ({}, change):
        config = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        for option, value in ({"layers_to_transform": {0, 8}} | more).items():
            setattr(config, option, value)
        model.peft_config = {"default": config}  # type: ignore[assignment]
        settings.append(adapter_settings(nn.Sequential(model)))
        digests.append(weights_digest(model))
    differ = {n for n in settings[0] | settings[1] if settings[0].get(n) != settings[1].get(n)}
    assert differ == (set(change) if apart else set()), f"{name}: {differ}"
    assert len({tensor_digest(tensors), *digests}) == (3 if apart else 2), name


@pytest.mark.parametrize("name", list(REFERENCES))
def test_a_reference_reads_the_policys_tokens(name: str) -> None:
    """A reference of preference pairs is refused exactly where it has no row for a token of the
    policy, or its tokenizer calls the token otherwise.

    Proves: a reference reads the policys tokens (exact), against numbers by hand.
    """
    need(*TRAINERS)
    rows, own_rows, letters, word = REFERENCES[name]
    check = import_module("alphatoken.train.reference").check_reference
    tokenizer = _tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        if letters is not None:
            _tokenizer(letters).save_pretrained(folder)
        reference, policy = (
            SimpleNamespace(
                get_input_embeddings=lambda more=more: nn.Embedding(len(tokenizer) + more, 2),
                config=SimpleNamespace(name_or_path=folder),
            )
            for more in (rows, own_rows)
        )
        arguments = {"ref_model": reference, "model": policy, "processing_class": tokenizer}
        try:
            said = str(refusal(lambda: check(arguments)) or "")
        except KeyError as error:
            said = str(error)
    assert (word in said) if word else not said, f"{name}: {said}"


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("what", ["rows", "validation", "prompts"])
def test_tokens_without_a_row_are_refused(what: str, adapted: bool) -> None:
    """A token id for which the embedding has no row is refused with its place, in rows to score, in
    validation rows and in a Fisher's prompts; the last row's is served.

    Proves: tokens without a row are refused (exact), against the vocabulary.
    """
    need(*TRAINERS)
    from alphatoken import Scorer, ScorerConfig, fit_fisher

    model = made_model(RunConfig())
    if adapted:
        from peft import LoraConfig, get_peft_model

        own = ["embed_tokens", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=own, task_type="CAUSAL_LM"))
        model = model.double()
    count = 4 + len(ALPHABET)
    good = _two_rows(5)

    def use(token: int) -> None:
        bad = _two_rows(token)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if what == "prompts":
                prompts = [[5, 6], [5, 6, token, 7]]
                fit_fisher(model, prompts, samples=2, layers=1, max_new_tokens=1)
                return
            config = ScorerConfig(layers=1, estimator="direct", objective="adaptation")
            scorer = Scorer(model, bad if what == "validation" else good, None, config)
            scorer.score(bad if what == "rows" else good)

    for token in (-1, count, count + 7):
        try:
            error = refusal(partial(use, token))
        except (IndexError, RuntimeError) as problem:
            raise AssertionError(f"{token} is looked up: {problem}") from problem
        assert isinstance(error, InputError), f"{token} is served"
        assert ("prompt 1" if what == "prompts" else "row 1, token 2") in str(error), error
        assert str(token) in str(error), error
    assert refusal(lambda: use(count - 1)) is None, "a token of the vocabulary is refused"


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("parameters", "tied"), [("all", False), ("head.weight", True)])
def test_gradients_that_count_tokens_are_refused(parameters: str, tied: bool, scored: bool) -> None:
    """An embedding whose gradient is divided by counts of the batch is refused where it is in the
    scope of a Fisher or of label values, under whichever of its names, and there only.

    Proves: gradients that count tokens are refused (exact), against the scope.
    """
    from alphatoken import Scorer, ScorerConfig, fit_fisher

    prompts = [[1, 0], [2], [1, 1, 2]]

    def fit(of: str, **more: Any) -> None:
        model = ReferenceDecoder(DecoderConfig(tied_embeddings=tied, **more), 0)
        if scored:
            rows = {"input_ids": torch.tensor([[1, 0, 2]]), "labels": torch.tensor([[-100, 0, 2]])}
            layers = "all" if of == "all" else 1
            config = ScorerConfig("label", layers=layers, parameters=of)
            Scorer(model, rows, None, config).score(rows)
            return
        fit_fisher(model, prompts, samples=1, layers=1, max_new_tokens=1, parameters=of)

    error = refusal(lambda: fit(parameters, rare_tokens=True))
    assert isinstance(error, UnsupportedError), "an embedding under scale_grad_by_freq is taken"
    assert "scale_grad_by_freq" in str(error), error
    assert "embedding.weight" in str(error), error
    assert refusal(lambda: fit("linears", rare_tokens=True)) is None, "no embedding is in scope"
    assert refusal(lambda: fit(parameters)) is None, "an embedding without it is refused"


# --- options and rows that nothing would read ----------------------------------------------------


def _config(**options: Any) -> Any:
    train = import_module("alphatoken.train")
    return train.AlphaSFTConfig("out", use_cpu=True, bf16=False, **options)


UNREAD = ("estimator", "layers", "walk_form", "part", "preconditioner", "scoring_forward")


@pytest.mark.parametrize("name", UNREAD)
def test_options_of_values_are_refused_where_there_are_none(name: str) -> None:
    """Under a policy that values nothing; a control has those of the run that it is compared with.

    Proves: options of values without values (exact), against a rule by hand.
    """
    need(*TRAINERS)
    policies = import_module("alphatoken.train.policies")
    other: Any = {"layers": "1,2", "preconditioner": "frozen", "part": "direct"}.get(name, "own")
    for policy, refused in (("weights", True), ("random", False), ("top", False)):
        kind = policies.find_policy(policy) if policy == "weights" else None
        options = SimpleNamespace(**vars(_config(policy=policy)) | {name: other})
        chosen = kind() if kind else policies.RATIO_POLICIES[policy]()
        error = refusal(partial(policies._refuse, chosen, options, "sft"))
        assert (error is not None and name in str(error)) == refused, policy
    named = {"policy": "weights", name: other}
    assert policies.unread_options(named, "sft")[name] == policies.OF_VALUES[name]


@pytest.mark.parametrize("retention", ["none", "data", "diagonal"])
@pytest.mark.parametrize("objective", ["both", "adaptation"])
def test_retention_rows_are_refused_where_nothing_reads_them(
    retention: str, objective: str
) -> None:
    """And an arm of a race gets them where it reads them.

    Proves: retention rows that nothing reads (exact), against a rule by hand.
    """
    need(*TRAINERS)
    refusals = import_module("alphatoken.train.refusals")
    runner = import_module("alphatoken.race.runner")
    args = _config(retention=retention, objective=objective, policy="random")
    rows = {"validation": None, "retention": [{}], "fisher": None}
    wanted = (retention, objective) == ("data", "both")
    found = list(refusals.refused_datasets(args, None, rows, None))
    assert bool(found) != wanted
    handed = runner.datasets_of(args, {"retention_dataset": [{}], "validation_dataset": [{}]})
    assert ("retention_dataset" in handed) == wanted
    assert "validation_dataset" in handed


def test_a_sum_is_weighed_whatever_is_exported() -> None:
    """Proves: the divisor of every token's loss (exact), against a rule by hand."""
    need(*TRAINERS)
    for divisor, export in ((d, e) for d in ("response", "kept", "sum") for e in (True, False)):
        args = _config(policy="all", kept_normalization=divisor, export_values=export)
        assert args.weighs == (export or divisor == "sum"), (divisor, export)
        policy = import_module("alphatoken.train.policies").chosen_policy(args, None, "sft")
        assert (policy is None) != args.weighs
        assert policy is None or policy.needs.values == export


@pytest.mark.parametrize("labels", [[-100, -100, 5, 6], [4, -100, -100, 6]])
def test_a_row_of_weights_learns_by_those_on_its_labels(labels: list[int]) -> None:
    """The first token of a row is predicted by nothing.

    Proves: rows of which nothing is learned (exact), against a loop over tokens.
    """
    need(*TRAINERS)
    learns = import_module("alphatoken.train.row_weights")._learns
    for place, label in enumerate(labels):
        for weight in (0.0, 0.25, -1.0):
            row = {"labels": labels, "loss_weights": [weight * (i == place) for i in range(4)]}
            assert learns(row) == (weight != 0 and place > 0 and label != -100), (place, weight)
    for chosen, rejected in (([0.0], [0.0]), ([0.0, 2.0], [0.0]), ([0.0], [0.5])):
        pair = {"chosen_weights": chosen, "rejected_weights": rejected}
        assert learns(pair) == any([*chosen, *rejected])


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_learns_nothing_where_no_process_has_a_weight(world: int) -> None:
    """A step without a response, or of which another process learns, is none of them.

    Proves: steps that learn nothing (exact), against sums by hand.
    """
    need(*TRAINERS)
    records = import_module("alphatoken.train.records")
    own = {0: [(2, 0), (3, 1)], 1: [(2, 0), (1, 0)], 2: [(0, 0)], 3: [(4, 0)]}
    others = {0: [(1, 0)], 1: [(2, 0)], 2: [(0, 0)], 3: [(1, 1)]}

    def state(steps: Mapping[int, Any]) -> dict[str, Any]:
        made = records.TrainMonitor()
        for step, batches in steps.items():
            for response, kept in batches:
                mask = torch.arange(5)[None] < response
                made.record((torch.arange(5)[None] < kept).float(), mask, None, step)
        values: dict[str, Any] = made.state_values()
        return values

    states = [state(own), state(others)][:world]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        monitor = records.TrainMonitor()
        monitor._warn_of_empty(states)
        monitor._warn_of_empty(states)
    (text,) = [str(one.message) for one in said]
    assert text.startswith(f"step 1 learned nothing: each of its {3 if world == 1 else 5} ")
    assert f"in {2 if world == 1 else 1} of the 4 steps" in text


def test_a_kept_training_is_of_the_optimizer_and_collator_handed_over() -> None:
    """Proves: what a kept training depends on (exact), against a rule by hand."""
    need(*TRAINERS)
    stage = import_module("alphatoken.train.policy_stage")

    def found(rate: float | None, collator: Any = None) -> str:
        given = None if rate is None else (torch.optim.SGD, {"lr": rate})
        trainer = SimpleNamespace(
            optimizer=None, optimizer_cls_and_kwargs=given, own_collator=collator
        )
        return str(stage.handed_over(trainer))

    class Collator:
        def __init__(self, pad: int) -> None:
            self.pad = pad

    cases = [(None,), (0.1,), (0.2,), (0.1, Collator(0)), (0.1, Collator(1)), (None, len)]
    assert len({found(*case) for case in cases}) == len(cases)
    assert found(0.1, Collator(1)) == found(0.1, Collator(1))
    assert found(None) == "{}"


def test_a_policys_tables_are_part_of_what_it_is() -> None:
    """Of tensors, arrays and sets too; a private attribute is none of it.

    Proves: arguments of a policy (exact), against a rule by hand.
    """
    policies = import_module("alphatoken.train.policies")
    digest = import_module("alphatoken.support.resume").content_digest

    def found(**own: Any) -> str:
        policy = policies.find_policy("standard")()
        vars(policy).update(own)
        text: str = digest([policy.arguments()])
        return text

    for one, other in (
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.tensor([1, 2]).numpy(), torch.tensor([1, 3]).numpy()),
        ({"a", "b", "c"}, {"a", "b"}),
        (2.0, 3.0),
    ):
        assert found(table=one) != found(table=other)
        assert found(_table=one) == found(_table=other)
    assert found(table={"a", "b", "c"}) == found(table=frozenset({"c", "b", "a"}))
