"""The three ways to value by name: the numbers, their values, and which of them is in force."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import ScorerConfig, TokenValues
from alphatoken.cli import diagnose_options, score
from alphatoken.config import RESEARCH, ValueOptions, in_force
from alphatoken.errors import ConfigError
from alphatoken.model.choice import read_layers
from alphatoken.oracle import run as oracle
from alphatoken.presets import PRESETS, preset_of, refuse_preset, values_in_words
from alphatoken.race.arms import PACKAGED
from alphatoken.scorer import Scorer
from tests.property.profiles import budget
from tests.property.setups import Setup, forward_of, quiet_score, setups
from tests.property.strategies import make_case
from tests.property.tolerance import close

CASE = make_case(("pprrrr", "..prrr"), (("pprr",), ("prrr.", "..prr")), layers=4, seed=3)
SETUP = Setup(CASE, 2)
EXPLICIT: dict[str, dict[str, Any]] = {
    "walk": {"estimator": "walk", "walk_steps": 24},
    "exact": {"estimator": "label", "parameters": "all"},
    "paper": {"estimator": "alphatoken", "layers": 3, "window": 32, "stability_weight": 1.5},
}
"""The research options that each name stands for, as one would type them."""
NAMES = tuple(EXPLICIT)


def value(setup: Setup, config: ScorerConfig) -> TokenValues:
    return quiet_score(Scorer(setup.case.model(), setup.case.validation, None, config),
                       setup.case.batch)  # fmt: skip


@given(setups(), st.sampled_from(NAMES))
@example(SETUP, "walk")
@example(SETUP, "exact")
@example(SETUP, "paper")
@budget(0.2)
def test_a_preset_has_the_values_of_its_research_options(setup: Setup, name: str) -> None:
    """To the bit; and options that are named beside it override its own."""
    made = getattr(ScorerConfig, name)
    ours, theirs = (value(setup, one) for one in (made(), ScorerConfig(**EXPLICIT[name])))
    assert torch.equal(ours.total, theirs.total)
    assert ours.estimator == theirs.estimator == EXPLICIT[name]["estimator"]
    assert preset_of(made()) == preset_of(ScorerConfig(**EXPLICIT[name])) == name


@given(setups())
@example(SETUP)
@budget(0.05)
def test_the_walk_is_24_steps_at_its_rate(setup: Setup) -> None:
    """Against a copy that is trained so.

    Proves: the walk is 24 steps at its rate (exact), against ``walked``, ``walk_values``.
    """
    model = setup.case.model()
    adamw = partial(torch.optim.AdamW, lr=5e-5, weight_decay=0.0)
    copy = oracle.walked(model, forward_of, setup.case.validation, 24, adamw)
    expected = oracle.walk_values(model, copy, forward_of, setup.case.batch)
    close(
        value(setup, ScorerConfig.walk()).total, expected, 1.0 + expected.abs(), 1e-8, name="walk"
    )


@pytest.mark.parametrize("name", ["exact", "paper"])
def test_a_preset_that_is_named_as_an_estimator_is_refused_by_its_own_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is a preset.*ScorerConfig\.{name}\(\)"):
        ScorerConfig(name)
    ScorerConfig("walk")  # is both
    refuse_preset([name])  # no text: refused with the choices


def test_numbers_stand_where_people_read_them() -> None:
    for name, options in EXPLICIT.items():
        found = {option: getattr(getattr(ScorerConfig, name)(), option) for option in options}
        assert found == options
    assert preset_of(ScorerConfig()) == "paper"
    walk = {option: getattr(ValueOptions(), option) for option in ("walk_steps",)}
    assert walk == {"walk_steps": 24}
    assert "24 AdamW steps on the validation rows)" in values_in_words(ScorerConfig.walk())
    other = values_in_words(ScorerConfig.walk(walk_steps=3, walk_learning_rate=1e-3))
    assert "takes 3 AdamW steps on the validation rows at rate 0.001)" in other
    assert (
        "last 3 layers, W = 32, retention (where there is any) by lambda = 1.5"
        in values_in_words(ScorerConfig())
    )
    for name in NAMES:
        arm = PACKAGED[f"{name}-80"]
        assert (arm["policy"], arm["keep_ratio"]) == ("top", 0.8)
        assert arm["estimator"] == EXPLICIT[name]["estimator"]
    # Of a run its own steps, which are 24 where none are named.
    assert "walk_steps" not in PACKAGED["walk-80"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "path", "layers": 2}, "estimator 'path' over linears of layers 2"),
        ({"part": "direct"}, "estimator 'alphatoken' over linears of layers 3"),
        ({"walk_form": "central", "estimator": "walk"},
         "estimator 'walk', central, of 24 AdamW steps, in nats"),
    ],
)  # fmt: skip
def test_other_values_have_no_name(options: dict[str, Any], words: str) -> None:
    config = ScorerConfig(**options)
    assert (preset_of(config), values_in_words(config)) == (None, words)


def test_keywords_override_and_another_estimator_is_refused() -> None:
    assert ScorerConfig.walk(walk_steps=48) == ScorerConfig("walk", walk_steps=48)
    assert ScorerConfig.paper(layers=5, window=None) == ScorerConfig(layers=5, window=None)
    assert ScorerConfig.exact(objective="adaptation").parameters == "all"
    for name in NAMES:
        with pytest.raises(ConfigError, match=f"--value {name}, --estimator path"):
            getattr(ScorerConfig, name)(estimator="path")
    for refused in ({"layers": 2}, {"window": 8}, {"stability_weight": 2.0}):
        with pytest.raises(ConfigError):
            ScorerConfig.walk(**refused)
    with pytest.raises(ConfigError, match="window is an option of the estimators 'alphatoken'"):
        ScorerConfig.exact(window=8)


# --- in force -------------------------------------------------------------------------------------

OPTIONS = ("estimator", "layers", "parameters", "window", "stability_weight", "walk_steps")


@given(
    st.one_of(st.none(), st.sampled_from(NAMES)),
    st.sets(st.sampled_from(OPTIONS)),
    st.sampled_from(NAMES),
)
@example(None, set(), "walk")
@example(None, {"window"}, "walk")
@example(None, {"walk_steps"}, "walk")
@example("exact", {"window"}, "walk")
def test_the_named_preset_then_research_options_then_the_default(
    named: str | None, others: set[str], default: str
) -> None:
    """Proves: the named preset then research options then the default (exact), against cases."""
    spoken: dict[str, Any] = {"walk_steps": 5, "layers": "7", "parameters": "linears"}
    spoken |= {"window": 9, "stability_weight": 0.5}
    if named is not None:
        spoken["estimator"] = EXPLICIT[named]["estimator"]
    else:
        spoken["estimator"] = "path"
    said = {option: spoken[option] for option in others}
    found, options = in_force(named, said, default)
    if named is not None:
        due: str | None = named
    else:
        due = None if others - {"walk_steps"} else default
    assert found == due
    wanted = dict(PRESETS[due].options) if due is not None else {}
    wanted |= {"layers": str(wanted["layers"])} if "layers" in wanted else {}
    assert options == wanted | said
    assert set(OPTIONS) - {"walk_steps"} <= {*RESEARCH}


# --- what a command takes -------------------------------------------------------------------------

ROWS = "--model_name_or_path m --train_file t --output_dir o"
SCORE: dict[str, tuple[str | None, str]] = {
    "--validation_file v": ("walk", "walk"),
    "--query text": ("walk", "walk"),
    "--reference other": ("walk", "walk"),
    "--validation_file v --walk_steps 3": ("walk", "walk"),
    "--validation_file v --verify 3": ("walk", "walk"),
    # Where no walk can be taken.
    "--query a --query b": ("paper", "alphatoken"),
    "--validation_file v --fisher_file f": ("paper", "alphatoken"),
    # What is named is meant.
    "--validation_file v --value exact": ("exact", "label"),
    "--validation_file v --value exact --verify 3": ("exact", "label"),
    "--validation_file v --value walk --estimator walk": ("walk", "walk"),
    "--validation_file v --estimator path": (None, "path"),
    "--validation_file v --layers 2": (None, "alphatoken"),
    "--validation_file v --stability_weight 2": (None, "alphatoken"),
}
"""Words of ``score`` -> the preset in force, and the estimator."""


@pytest.mark.parametrize("words", SCORE)
def test_score_takes_a_walk_where_one_can_be_taken(words: str) -> None:
    """Proves: score takes a walk where one can be taken (exact), against the table above."""
    options = score.read([*ROWS.split(), *words.split()])
    assert (options.value, options.estimator) == SCORE[words]
    said = options.values_in_words()
    if options.value is None:
        assert said.startswith(f"estimator '{options.estimator}'")
    else:
        assert said.startswith(f"{options.value} (")
    obstacle = "--fisher_file" in words or words.count("--query") > 1
    assert ("rules out the default" in said) == obstacle


def test_score_says_what_a_value_is_measured_on() -> None:
    said = {
        words: score.read([*ROWS.split(), *words.split()]).values_in_words()
        for words in ("--validation_file v", "--query text", "--reference other")
    }
    assert "AdamW steps on the validation rows" in said["--validation_file v"]
    assert "AdamW steps on the query" in said["--query text"]
    assert "less that under other" in said["--reference other"]
    assert "steps" not in said["--reference other"]


@pytest.mark.parametrize("value", NAMES)
def test_a_preset_beside_another_estimator_is_one_error(value: str) -> None:
    words = [*ROWS.split(), "--validation_file", "v", "--value", value, "--estimator", "path"]
    with pytest.raises(ConfigError, match=f"value '{value}' is the estimator"):
        score.read(words)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("data", ("walk", "walk", 24)),
        ("data --walk_steps 3", ("walk", "walk", 3)),
        ("estimators", ("paper", "alphatoken", 24)),
        ("all", ("paper", "alphatoken", 24)),
        ("all --value exact", ("exact", "label", 24)),
        ("stability --estimator path", (None, "path", 24)),
    ],
)
def test_diagnose_takes_a_walk_of_rows_and_the_papers_values_elsewhere(
    words: str, wanted: tuple[str | None, str, int]
) -> None:
    name, *more = words.split()
    options, _ = diagnose_options.read_request(name, *more, *ROWS.split(), "--validation_file", "v")
    assert (options.value, options.estimator, options.walk_steps) == wanted


@pytest.mark.parametrize("words", ["--value exact", "--estimator label", "--layers 2"])
def test_other_values_are_refused_of_rows(words: str) -> None:
    """They were read by nobody before."""
    rows = [*ROWS.split(), "--validation_file", "v"]
    with pytest.raises(ConfigError, match="the diagnostic data compares walk values"):
        diagnose_options.read_request("data", *words.split(), *rows)


def test_layers_of_a_run_are_read_in_each_form() -> None:
    """A run's layers may be text, as an option of a command is, or what ``ScorerConfig`` takes."""
    forms: Any = (("0,4", [0, 4]), ([0, 4], [0, 4]), ((0, 4), (0, 4)), (2, 2), ("all", "all"))
    for form, expected in forms:
        assert read_layers(form) == expected
    wrong: Any = ("last", "", ",")
    for form in wrong:
        with pytest.raises(ConfigError, match="layers cannot be read"):
            read_layers(form)
