"""The recipes of CONTRIBUTING.md and of docs/own.md, done as printed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenError, ConfigError, ModelError
from alphatoken.estimate.batch_proofs import as_observed
from alphatoken.model import protocol
from alphatoken.train.policies import policy
from alphatoken.train.policy import PolicyBatch, PolicySettings
from tests.integration import small_gpt, small_world, tower
from tests.integration.tiny_scorer import model_of, printed_by
from tests.integration.tiny_training import made, weights
from tests.property import generate_docs
from tests.property.strategies import make_batch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RECIPES = TEXT + (ROOT / "docs/own.md").read_text("utf-8")


def printed(name: str) -> str:
    """The block whose first line is this comment."""
    blocks = re.findall(r"^```(?:python|text)\n# ([^\n]+)\n(.+?)^```$", RECIPES, re.M | re.S)
    return dict(blocks)[name]


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the search path, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
            del sys.modules[name]


def test_the_ten_files_are_there() -> None:
    first = TEXT.partition("## Ten files to read")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", first, re.MULTILINE)
    assert len(files) == 10
    assert [name for name in files if not (ROOT / name).is_file()] == []


# --- a policy ------------------------------------------------------------------------------------


def surprising(recipes: Path) -> str:
    (recipes / "my_policy.py").write_text(printed("my_policy.py"), "utf-8")
    return "my_policy:Surprising"


def test_a_policy_keeps_what_its_scores_put_first(recipes: Path) -> None:
    chosen = policy(surprising(recipes), PolicySettings(mode="budget", keep_ratio=0.5))
    log_probs = torch.tensor([[0.0, -1.0, -3.0, -2.0, -0.5]])
    mask = torch.tensor([[False, True, True, True, True]])
    labels = torch.where(mask, 5, -100)
    batch = PolicyBatch({}, labels, mask, log_probs, rank_groups=[slice(0, 1)])
    assert chosen.weights(batch).tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0]]


def test_a_policy_trains_on_what_it_keeps(recipes: Path) -> None:
    """One step of plain SGD from the same weights, on a loss masked by hand."""
    from alphatoken.train import AlphaSFTTrainer

    run = {"policy": surprising(recipes), "policy_mode": "budget", "keep_ratio": 0.25}
    step = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.1}
    trainer = made(AlphaSFTTrainer, recipes / "run", export_values=False, **run, **step)
    batch = next(iter(trainer.get_train_dataloader()))
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)

    trainer.model.load_state_dict(before)
    trainer.model.zero_grad()
    labels = batch["labels"][:, 1:]
    logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="none"
    )
    response = labels != -100
    count = -(-int(response.sum()) // 4)
    threshold = losses[response].sort(descending=True).values[count - 1]
    (losses[losses >= threshold].sum() / response.sum()).backward()
    for name, parameter in trainer.model.named_parameters():
        step_taken = before[name] - 0.1 * parameter.grad
        torch.testing.assert_close(after[name], step_taken, rtol=1e-5, atol=1e-7)


def test_the_command_logs_what_the_policy_keeps(
    recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run's last step, and with rows that the page makes."""
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.train import AlphaSFTConfig

    surprising(recipes)
    monkeypatch.chdir(recipes)
    (block,) = re.findall(r"^```\n([^`]*my_policy:Surprising[^`]*)^```$", RECIPES, re.M)
    rows, command = block.replace("\\\n", " ").splitlines()
    options = read_arguments("sft", shlex.split(command)[2:], AlphaSFTConfig)
    assert options.training.logging_steps <= options.training.max_steps
    folder = shlex.split(rows, comments=True)[-1]
    assert options.data.train_file == f"{folder}/train.jsonl"


def test_the_recipe_of_a_method_names_what_is_there() -> None:
    recipe = TEXT.partition("### A published policy")[2].partition("\n### ")[0]
    paths = [name for name in re.findall(r"`([\w/.-]+)`", recipe) if "/" in name]
    assert len(paths) == 6
    assert [name for name in paths if not (ROOT / name).exists()] == []
    (proves,) = re.findall(r"Proves: .*?\.(?=``)", recipe)
    assert proves in (ROOT / "tests/lab/test_methods.py").read_text("utf-8")
    assert "\nMETHODS = (\n" in (ROOT / "tests/lab/mutants_policies.py").read_text("utf-8")
    assert f"{generate_docs.COMMAND} kills NAME" in recipe


@pytest.mark.parametrize(
    "name", ["alphatoken/diagnose/lengths.py", "tests/property/test_path_heads.py"]
)
def test_a_printed_file_keeps_the_rules_of_style(name: str) -> None:
    words = [sys.executable, "-m", "ruff", "check", "--stdin-filename", name, "-"]
    text = f"# {name}\n{printed(name)}"
    run = subprocess.run(words, input=text, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_printed_property_names_oracles_alone() -> None:
    """As ``test_every_oracle_is_named_by_a_test_that_stands_on_it`` demands of each property."""
    (proves,) = re.findall(r'Proves: .*?\."""', printed("tests/property/test_path_heads.py"))
    assert not re.findall("``", proves)  # it stands on the certificate


# --- an adapter ----------------------------------------------------------------------------------


@pytest.fixture
def adapted(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (recipes / "my_adapter.py").write_text(printed("my_adapter.py"), "utf-8")
    monkeypatch.setattr(protocol, "_REGISTRY", dict(protocol._REGISTRY))
    protocol.register_adapter(small_gpt.__name__, "my_adapter:SmallGPTAdapter")
    return small_gpt


BATCH = make_batch(("pprrprr.", "prprrrrr"), vocabulary=19, seed=1)
VALIDATION = make_batch(("pprrr.", "pprrrr"), vocabulary=19, seed=2)
CONFIGS = {
    name: ScorerConfig(name, layers="all", objective="adaptation")
    for name in ("alphatoken", "direct", "path", "paper_literal", "label")
}
CONFIGS["exact"] = ScorerConfig.exact(objective="adaptation")
CONFIGS["walk"] = ScorerConfig.walk(walk_steps=2, walk_learning_rate=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_all_that_a_model_needs(adapted: Any, name: str) -> None:
    """Values of a decoder of one's own equal those of plain autograd; its own loop gets them."""
    model = adapted.small_gpt(seed=1)
    scorer = Scorer(model, VALIDATION, config=CONFIGS[name])
    agrees(scorer, lambda: model(BATCH["input_ids"]))


def agrees(scorer: Scorer, call: Callable[[], Tensor]) -> None:
    """Values are certified, and those of the user's own call of the model are the same."""
    values = scorer.score(BATCH)
    certificate = scorer.verify(BATCH)
    assert certificate.passed, certificate
    with scorer.observe() as observed:
        again = observed.values(call(), BATCH["labels"])
    # Of differences within what they state.
    allowed = 1e-10 + 3 * (values.error + again.error)
    assert float((again.total - values.total).norm()) <= allowed * float(values.total.norm())
    assert values.total.abs().max() > 0


OF_TOWERS = """
from my_adapter import SmallGPTAdapter


class TowerAdapter(SmallGPTAdapter):
    def layers(self):
        return list(self.model.tower)

    def attention_modules(self, layer):
        return (self.model.tower[layer].mixer,)

    def arguments(self, inputs):
        return {"tokens": inputs["input_ids"], "real": inputs.get("attention_mask")}


class OfIds(TowerAdapter):
    def arguments(self, inputs):
        return {"input_ids": inputs["input_ids"]}
"""
"""The printed adapter for another model."""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [tower.Tower, tower.TowerOfIds])
@pytest.mark.parametrize("registered", [True, False])
def test_an_adapter_of_a_model_unlike_the_printed_one(
    adapted: Any, recipes: Path, kind: type[tower.Tower], registered: bool, name: str
) -> None:
    """Registered or handed over, renaming arguments or leaving the mask out."""
    (recipes / "my_tower.py").write_text(OF_TOWERS, "utf-8")
    own, handed = "TowerAdapter" if kind is tower.Tower else "OfIds", {}
    model = tower.tower(kind)
    adapter = getattr(importlib.import_module("my_tower"), own)(model)
    if registered:
        protocol.register_adapter(tower.__name__, f"my_tower:{own}")
    else:
        handed["adapter"] = adapter
    scorer = Scorer(model, VALIDATION, config=CONFIGS[name], **handed)
    agrees(scorer, lambda: model(BATCH["input_ids"]))
    agrees(scorer, lambda: model(**adapter.arguments(BATCH)))


FAULTS = """
from contextlib import contextmanager
from dataclasses import replace

from my_tower import TowerAdapter


class WithoutAttention(TowerAdapter):
    def attention_modules(self, layer):
        return super().attention_modules(layer) if layer else ()


class Idle(TowerAdapter):
    @contextmanager
    def override_attention(self, modules, override):
        yield


class OneBlockShort(TowerAdapter):
    def layers(self):
        return super().layers()[:-1]


class OtherScale(TowerAdapter):
    def override_attention(self, modules, override):
        def scaled(call, native):
            return override(replace(call, scale=1.0), native)

        return super().override_attention(modules, scaled)


class OneEarly(TowerAdapter):
    def logits_of(self, output):
        return output.roll(-1, 1)
"""


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("WithoutAttention", "alphatoken"), ("Idle", "alphatoken"), ("OneBlockShort", "direct"),
        ("OtherScale", "exact"), ("OneEarly", "walk"), ("OtherScale", "alphatoken"),
    ],
)  # fmt: skip
def test_a_fault_of_an_adapter_is_named_as_a_possible_cause(
    adapted: Any, recipes: Path, fault: str, name: str
) -> None:
    (recipes / "my_tower.py").write_text(OF_TOWERS, "utf-8")
    (recipes / "my_faults.py").write_text(FAULTS, "utf-8")
    model = tower.tower()
    adapter = getattr(importlib.import_module("my_faults"), fault)(model)
    scorer = Scorer(model, VALIDATION, config=CONFIGS[name], adapter=adapter)
    try:
        said = str(scorer.verify(BATCH))
    except AlphaTokenError as error:
        said = str(error)
    cause = f"your adapter {fault} may be the cause: each AttentionCall"
    if not said.startswith("Certificate"):  # the adapter opens an error, and its remedy
        assert said.startswith(f"under your adapter {fault} ")
        assert f"Remedy: {cause}" in said
    assert cause in said


class Pairs(small_gpt.SmallGPT):
    """Returns the logits first, and something else, in the order that ``first`` says."""

    first = True

    def forward(self, tokens: Tensor) -> Any:
        pair = (super().forward(tokens), torch.zeros(()))
        return pair if self.first else pair[::-1]


def of_pairs() -> Pairs:
    model = small_gpt.small_gpt(seed=1)
    model.__class__ = Pairs
    return model


@pytest.mark.parametrize("name", ["alphatoken", "exact", "walk"])
def test_logits_may_be_the_first_of_a_tuple(adapted: Any, name: str) -> None:
    """As nanoGPT's forward returns them, before the loss."""
    adapter = importlib.import_module("my_adapter").SmallGPTAdapter
    model, plain = of_pairs(), adapted.small_gpt(seed=1)
    plain.load_state_dict(model.state_dict())
    scorer = Scorer(model, VALIDATION, config=CONFIGS[name], adapter=adapter(model))
    agrees(scorer, lambda: model(BATCH["input_ids"])[0])
    expected = Scorer(plain, VALIDATION, config=CONFIGS[name]).score(BATCH).total
    assert torch.equal(scorer.score(BATCH).total, expected)


def test_an_output_without_logits_names_the_method_that_takes_them(adapted: Any) -> None:
    model = of_pairs()
    model.first = False
    adapter = importlib.import_module("my_adapter").SmallGPTAdapter(model)
    with pytest.raises(ModelError, match=r"no logits .*logits_of\(\) of your adapter SmallGPTAdap"):
        Scorer(model, VALIDATION, config=CONFIGS["path"], adapter=adapter).score(BATCH)


@pytest.mark.parametrize("method", ["layers", "attention_modules", "override_attention"])
def test_a_method_that_an_adapter_leaves_out_is_named(adapted: Any, method: str) -> None:
    """Where it is made: by the user, or of a registered class by the library."""
    written = dict(vars(importlib.import_module("my_adapter").SmallGPTAdapter))
    del written[method]
    kept = {name: one for name, one in written.items() if callable(one)}
    short = type("Short", (protocol.DecoderAdapter,), kept)
    model = adapted.small_gpt(seed=1)
    with pytest.raises(TypeError, match=f"Short.*{method}"):
        short(model)
    importlib.import_module("my_adapter").Short = short  # type: ignore[attr-defined]
    protocol.register_adapter(small_gpt.__name__, "my_adapter:Short")
    with pytest.raises(ConfigError, match=f"my_adapter:Short.*{method}"):
        Scorer(model, VALIDATION)


@pytest.mark.parametrize(
    "target",
    ["my_adaptor:SmallGPTAdapter", "my_adapter:SmallGPTAdaptor", "my_adapter.SmallGPTAdapter",
     "my_adapter", "", "my_adapter:partial", "my_adapter:AttentionCall"],
)  # fmt: skip
def test_a_registered_adapter_that_is_not_there_is_named(adapted: Any, target: str) -> None:
    protocol.register_adapter(small_gpt.__name__, target)
    with pytest.raises(ConfigError, match="module:Class") as raised:
        Scorer(adapted.small_gpt(seed=1), VALIDATION)
    assert repr(target) in str(raised.value)


def test_an_adapter_whose_call_does_not_fit_is_named(adapted: Any, recipes: Path) -> None:
    """A kernel of other arguments, and a forward of other names: the adapter, not a bare call."""
    source = printed("my_adapter.py")
    changes = {"attend(module, query, key, value)": "attend(module, query, key)", '"tokens"': '"x"'}
    for number, (old, new) in enumerate(changes.items()):
        (recipes / f"my_mistake_{number}.py").write_text(source.replace(old, new, 1), "utf-8")
        model = adapted.small_gpt(seed=1)
        adapter = importlib.import_module(f"my_mistake_{number}").SmallGPTAdapter(model)
        with pytest.raises(ModelError, match="adapter SmallGPTAdapter") as raised:
            Scorer(model, VALIDATION, config=CONFIGS["alphatoken"], adapter=adapter).score(BATCH)
        assert isinstance(raised.value.__cause__, TypeError)
        assert raised.value.remedy.startswith("let arguments() give")


class WithLoss(small_gpt.SmallGPT):
    """Makes the loss itself, as transformers' trainer wants it; no word of a cache."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None
    ) -> Any:
        logits = super().forward(input_ids)
        if labels is None:
            return SimpleNamespace(logits=logits)
        each = cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return SimpleNamespace(logits=logits, loss=each.sum() / count)


class WithCache(WithLoss):
    """Takes ``use_cache``, by this name or among others."""

    def forward(self, input_ids: Tensor, use_cache: bool = True, **rest: Any) -> Any:
        assert not use_cache
        return super().forward(input_ids, **rest)


class WithRest(WithLoss):
    """Hands on what it is given, and has no configuration that speaks of a cache."""

    def forward(self, input_ids: Tensor, **rest: Any) -> Any:
        return super().forward(input_ids, **rest)


class OfTrainer:
    """What the printed adapter has to say of them."""

    model: Any

    def arguments(self, inputs: Any) -> dict[str, Any]:
        use = {"use_cache": False} if isinstance(self.model, WithCache) else {}
        return {"input_ids": inputs["input_ids"], **use}

    def logits_of(self, output: Any) -> Any:
        return output.logits


@pytest.mark.parametrize("kind", [WithLoss, WithCache, WithRest])
def test_a_trainer_turns_off_a_cache_only_where_there_is_one(
    adapted: Any, tmp_path: Path, kind: type[WithLoss]
) -> None:
    from alphatoken.train import AlphaTrainer

    mine: Any = importlib.import_module("my_adapter")
    mine.OfTrainer = type("Own", (OfTrainer, mine.SmallGPTAdapter), {})
    protocol.register_adapter(__name__, "my_adapter:OfTrainer")
    model = adapted.small_gpt(seed=1).float()
    model.__class__ = kind
    ids = torch.randint(19, (12, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row.tolist(), "labels": [-100, *row[1:].tolist()]} for row in ids]
    before = weights(model)
    trainer = made(
        AlphaTrainer, tmp_path, model=model, train_dataset=rows[:8], validation_dataset=rows[8:],
        policy="top", keep_ratio=0.5, validation_batch_size=2, estimator="path", max_steps=2,
        objective="adaptation", remove_unused_columns=False,
        data_collator=lambda some: {n: torch.tensor([r[n] for r in some]) for n in rows[0]},
    )  # fmt: skip
    trainer.train()
    assert any(not torch.equal(before[name], one) for name, one in weights(model).items())


def test_no_adapter_of_the_library_is_blamed() -> None:
    adapter, error = protocol.find_adapter(model_of()), ModelError("what", remedy="remedy")
    with pytest.raises(ModelError) as raised, protocol.adapter_named(adapter):
        raise error
    assert raised.value is error


def test_a_call_that_an_adapter_cannot_read_is_named(adapted: Any, recipes: Path) -> None:
    """One error where ``arguments`` asks for a mask that the user's own call does not have."""
    source = OF_TOWERS.replace('inputs.get("attention_mask")', 'inputs["attention_mask"]')
    (recipes / "my_tower.py").write_text(source, "utf-8")
    model = tower.tower()
    adapter = importlib.import_module("my_tower").TowerAdapter(model)
    scorer = Scorer(model, VALIDATION, config=CONFIGS["path"], adapter=adapter)
    assert scorer.verify(BATCH).passed
    with scorer.observe() as observed:
        logits = model(tokens=BATCH["input_ids"])
        with pytest.raises(ModelError, match=r"arguments\(\) of your adapter .* 'attention_mask'"):
            observed.values(logits, BATCH["labels"])


def test_documents_are_proved_under_the_names_of_an_adapter(adapted: Any, recipes: Path) -> None:
    """With the arguments that the user's call had, and no others."""
    (recipes / "my_tower.py").write_text(OF_TOWERS, "utf-8")
    model = tower.tower()
    adapter = importlib.import_module("my_tower").TowerAdapter(model)
    with as_observed(adapter) as forward:
        for names in ({"input_ids"}, {"input_ids", "attention_mask"}):
            inputs = {name: BATCH[name] for name in names}
            assert torch.equal(forward(inputs), model(**adapter.arguments(inputs)))


def test_values_to_a_second_model_by_an_adapter_are_certified(adapted: Any, recipes: Path) -> None:
    (recipes / "my_tower.py").write_text(OF_TOWERS, "utf-8")
    protocol.register_adapter(tower.__name__, "my_tower:TowerAdapter")
    model, other = tower.tower(), tower.tower()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    scorer = Scorer(model, None, config=ScorerConfig("walk"), reference=other)
    agrees(scorer, lambda: model(BATCH["input_ids"]))


def test_defaults_of_an_adapter_name_what_is_left_out(adapted: Any) -> None:
    model = adapted.small_gpt(seed=1)
    model.blocks[1].register_parameter("gate", torch.nn.Parameter(torch.ones(2, 2)))
    adapter = protocol.find_adapter(model)
    assert [one.name for one in adapter.scored_linears([1])] == [
        f"blocks.1.{name}" for name in ("attention.c_attn", "attention.c_proj", "c_fc", "c_proj")
    ]
    assert adapter.uncovered([0]) == {}
    assert list(adapter.uncovered([1])) == ["blocks.1.gate"]
    tokens: Tensor = BATCH["input_ids"]
    following, _ = adapter.next_token_logits(tokens, torch.ones_like(tokens), None)
    assert torch.equal(following, model(tokens)[:, -1])
    assert adapter.identity() != protocol.find_adapter(small_gpt.small_gpt(seed=1)).identity()


# --- an estimator, a diagnostic: edits of a copy --------------------------------------------------


def changed_copy(folder: Path, *edits: tuple[str, str]) -> None:
    """The package and its tests, with the printed blocks at the places that they name.

    Args:
        folder: of the copy.
        edits: first line of a block, and the line that it comes after, is in place of (with "="
            in front), or "" for a file of its own.
    """
    for part in ("alphatoken", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    for place, line in edits:
        path, block = folder / place.partition(",")[0], printed(place)
        if not line:
            path.write_text(block, "utf-8")
            continue
        text, target = path.read_text("utf-8"), line.removeprefix("=")
        assert text.count(target) == 1, (place, target)
        path.write_text(text.replace(target, block if line[0] == "=" else target + block), "utf-8")


def test_an_estimator_is_a_row_and_its_property(tmp_path: Path) -> None:
    property_file = "tests/property/test_path_heads.py"
    changed_copy(
        tmp_path,
        ("alphatoken/config.py, in CAPTURED", "CAPTURED: Mapping[str, ErrorRule] = {\n"),
        (
            "alphatoken/certificate/expected.py, in place of _SPLIT",
            '=_SPLIT = (*_SELF_ONLY, "paper_literal")\n',
        ),
        (property_file, ""),
    )
    assert "1 passed" in printed_by("-m", "pytest", "-q", property_file, root=tmp_path)
    # Not the estimator beside it under another name.
    script = """
from alphatoken import Scorer, ScorerConfig
from tests.integration.tiny_scorer import BATCH, VALIDATION, model_of
of = {n: Scorer(model_of(), VALIDATION, config=ScorerConfig(n)) for n in ("path_heads", "path")}
values = {name: scorer.score(BATCH) for name, scorer in of.items()}
assert values["path_heads"].adaptation_direct.equal(values["path"].adaptation)
assert values["path_heads"].adaptation_causal.abs().max() > 0
"""
    printed_by("-c", script, root=tmp_path)


def test_a_diagnostic_is_a_file_and_an_entry(tmp_path: Path) -> None:
    changed_copy(
        tmp_path,
        ("alphatoken/diagnose/lengths.py", ""),
        ("alphatoken/diagnose/__init__.py, in DIAGNOSTICS", "DIAGNOSTICS = (\n"),
    )
    small_world.saved_model(tmp_path / "model")
    small_world.write_rows(tmp_path / "train.jsonl", 12, seed=1)
    small_world.write_rows(tmp_path / "validation.jsonl", 4, seed=2)
    files = {"train": "train.jsonl", "validation": "validation.jsonl", "out": "result"}
    words = small_world.flags({"model": "model", **files})
    printed_by("-m", "alphatoken.cli", "diagnose", "lengths", *words, root=tmp_path)
    found = json.loads((tmp_path / "result/lengths/diagnosis.json").read_text("utf-8"))
    (row,) = found["tables"][0]["rows"]
    assert -1 <= row[0] <= 1
    assert found["conclusion"].startswith("Values and lengths have a rank correlation of")
