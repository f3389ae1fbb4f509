"""The trainers' own policies, what any policy is held to, and how one is found by its name."""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alphatoken.errors import AlphaTokenError, ConfigError, InputError, NumericalError
from alphatoken.select.masks import keep_count, select_top
from alphatoken.train.policies import OF_LAB, find_policy, policy, policy_names
from alphatoken.train.policies.builtin import Standard, TopRatioPolicy
from alphatoken.train.policy import PolicyBatch, PolicySettings, TokenPolicy
from tests.integration.policy_examples import Surprising

ROOT = Path(__file__).parents[2]
PLACE = "tests.integration.policy_examples:Surprising"
BUDGET = PolicySettings(mode="budget", keep_ratio=0.4)


def batch(
    losses: Sequence[Sequence[float]],
    *,
    columns: Mapping[str, Sequence[Sequence[float]]] | None = None,
    prompt: int = 2,
    side: str = "right",
    extra: int = 0,
    seed: int = 0,
    **more: Any,
) -> PolicyBatch:
    """Rows with ``prompt`` prompt tokens and one response token a loss, padded on one side."""
    width = prompt + max(map(len, losses)) + extra

    def place(rows: Sequence[Sequence[float]], before: float, fill: float) -> Tensor:
        result = torch.full((len(rows), width), fill, dtype=torch.float64)
        for i, row in enumerate(rows):
            whole = torch.tensor([before] * prompt + list(row), dtype=torch.float64)
            start = width - len(whole) if side == "left" else 0
            result[i, start : start + len(whole)] = whole
        return result

    mask = place([[1.0] * len(row) for row in losses], 0.0, 0.0) > 0
    real = place([[1.0] * len(row) for row in losses], 1.0, 0.0) > 0
    return PolicyBatch(
        inputs={"input_ids": real.long(), "attention_mask": real.long()},
        labels=torch.where(mask, 1, -100),
        mask=mask,
        log_probs=-place(losses, 0.0, 0.0),
        rank_groups=[slice(0, len(losses))],
        columns={name: place(rows, 0.0, 0.0) for name, rows in (columns or {}).items()},
        generator=torch.Generator().manual_seed(seed),
        **more,
    )


def on_tokens(result: Tensor, of: PolicyBatch) -> list[list[float]]:
    """Row by row, the numbers at response tokens; the others must be 0."""
    assert not bool(result[~of.mask].any())
    return [row[mask].tolist() for row, mask in zip(result, of.mask, strict=True)]


def test_rounding() -> None:
    values, mask = torch.arange(5.0)[None], torch.ones(1, 5).bool()
    assert int(select_top(values, mask, 0.5).sum()) == 3
    assert int(select_top(values, mask, 0.5, rounding="floor").sum()) == 2
    assert int(select_top(values, mask, 0.1, rounding="floor", scope="sequence").sum()) == 0
    assert keep_count(0.29, 100, rounding="floor") == 29  # in floating point it is 28.999...
    with pytest.raises(InputError, match="rounding"):
        select_top(values, mask, 0.5, rounding="nearest")


def test_standard_keeps_all() -> None:
    """Proves: standard (exact), against ones."""
    of = batch([[1.0, 2.0], [3.0]])
    for settings in (None, BUDGET):
        assert on_tokens(Standard(settings).weights(of), of) == [[1, 1], [1]]


def test_a_policy_of_ones_own() -> None:
    of = batch([[1.0, 3.0, 2.0]])
    for made in (policy(Surprising, BUDGET), policy(PLACE, BUDGET)):
        assert on_tokens(made.weights(of), of) == [[0, 1, 1]]


def test_a_policy_of_another_package_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point gives it one; a name of the library's own cannot be taken."""
    about = tmp_path / "strangers-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    names = f"[alphatoken.policies]\nsurprising-test = {PLACE}\nstandard = {PLACE}\n"
    (about / "entry_points.txt").write_text(names)
    assert "surprising-test" not in policy_names()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "surprising-test" in policy_names()
    assert type(policy("surprising-test")) is Surprising
    assert find_policy("standard") is Standard
    with pytest.raises(ConfigError, match="did you mean surprising-test"):
        find_policy("surprising-tests")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("validation_mix", "did you mean validation-mix?"),
        ("Top", "did you mean top?"),
        ("rho_1", "did you mean rho-1?"),
        ("tidpo", "did you mean ti-dpo?"),
        ("eaft", "eaft is a published method"),
        ("nothing like it", ""),
    ],
)
def test_the_lab_is_named_for_its_own_names_alone(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where it is installed."""
    with monkeypatch.context() as without:
        without.setattr("alphatoken.train.policies._named_on", lambda _: {})
        with pytest.raises(ConfigError) as caught:
            find_policy(name)
    assert meant in str(caught.value)
    assert ("./lab" in str(caught.value)) == (name in ("rho_1", "tidpo", "eaft"))
    installed = dict.fromkeys(OF_LAB, ("a:B",))
    monkeypatch.setattr("alphatoken.train.policies._named_on", lambda _: installed)
    with pytest.raises(ConfigError) as caught:
        find_policy(f"{name}s")
    assert "./lab" not in str(caught.value)


def test_names_of_the_lab_are_its_own() -> None:
    """Proves: names of methods that another package has (exact), against its entry points."""
    package = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())
    assert {*OF_LAB} == package["project"]["entry-points"]["alphatoken.policies"].keys()


def test_arguments_that_a_policy_takes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"does not take.*it takes rows, draw_from\."):
        policy("validation-mix", row=8)
    with pytest.raises(ConfigError, match=r"does not take.*it takes none\."):
        policy("standard", rows=8)


def test_a_name_of_two_packages_names_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, place in (("strangers", PLACE), ("others", PLACE.replace("Surprising", "Tired"))):
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        (about / "METADATA").write_text(metadata)
        (about / "entry_points.txt").write_text(f"[alphatoken.policies]\ntaken = {place}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="two installed packages.*Surprising.*Tired"):
        find_policy("taken")


def test_settings_are_the_trainers_unless_a_policy_has_its_own() -> None:
    own, others = Surprising(BUDGET), Surprising()
    for made in (own, others):
        made.bind(PolicySettings(keep_ratio=0.9))
    assert (own.settings.keep_ratio, others.settings.keep_ratio) == (0.4, 0.9)


class _SuperOfNothing(Surprising):
    def __init__(self, settings: PolicySettings | None = None, power: float = 1.0) -> None:
        super().__init__()
        self.power = power


class _NoSuper(Surprising):
    def __init__(self, settings: PolicySettings | None = None, power: float = 1.0) -> None:
        self.power = power


class _NoSettings(Surprising):
    def __init__(self, power: float = 1.0) -> None:
        self.power = power


@pytest.mark.parametrize("kind", [_SuperOfNothing, _NoSuper, _NoSettings])
def test_a_constructor_of_its_own_cannot_lose_the_settings(kind: type[Surprising]) -> None:
    made = policy(kind, BUDGET, power=2.0)
    assert made.settings == BUDGET
    assert vars(made)["power"] == 2.0
    assert vars(policy(kind, BUDGET))["power"] == 1.0


@pytest.mark.parametrize("mode", ["native", "budget"])
@pytest.mark.parametrize("rule", ["none", "best", "native_weights", "budget_weights"])
def test_kept_tokens_are_the_sum_of_the_weights_or_unknown(rule: str, mode: str) -> None:
    """A rule of the policy's own is no share of the tokens, so its sum is not taken for one.

    Proves: kept tokens of any policy before its forward (exact), against its weights.
    """
    of = batch([[1.0, 3.0, 2.0, 4.0]])
    own = {} if rule == "none" else {rule: lambda _, batch, *ratio: batch.mask.double()}
    made = type("Own", (Surprising,), own)(PolicySettings(mode, keep_ratio=0.5))
    kept = made.kept_tokens(of)
    assert kept is None or float(kept) == float(made.weights(of).sum())
    assert kept is not None or rule != "none"


class OwnShare(Surprising):
    name = "own-share"
    native_ratio = 0.5


class OwnRule(Surprising):
    name = "own-rule"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return (batch.log_probs < -1).to(batch.log_probs)


@pytest.mark.parametrize("mode", ["native", "budget"])
@pytest.mark.parametrize("kind", [Surprising, OwnShare, OwnRule, Standard, TopRatioPolicy])
def test_a_policy_reads_the_ratio_where_its_weights_follow_it(
    kind: type[TokenPolicy], mode: str
) -> None:
    """Proves: which policies read ``keep_ratio`` (exact), against their weights at two of them."""
    of = batch([[1.0, 3.0, 2.0, 4.0]])
    of = replace(of, values=torch.arange(of.mask.numel()).double().view_as(of.log_probs))
    few, many = (kind(PolicySettings(mode, keep_ratio=r)).weights(of).sum() for r in (0.25, 1.0))
    assert kind(PolicySettings(mode)).reads_ratio == (float(few) < float(many))


class Private(TokenPolicy):
    """Keeps its options under names of its own."""

    name = "private"

    def __init__(
        self, settings: PolicySettings | None = None, power: float = 2.0, *, ratio: float = 0.5
    ) -> None:
        super().__init__(settings)
        self._power, self.native_ratio = power, ratio


class Louder(Private):
    """Hands the rest to its base, and one that it makes of its own."""

    name = "louder"

    def __init__(self, loud: bool = False, **base: Any) -> None:
        super().__init__(None, 9.0 if loud else 2.0, **base)


class Quiet(Louder):
    """Has no constructor."""

    name = "quiet"


def test_every_option_of_a_policy_is_compared() -> None:
    """Under whatever name it is kept; defaults are written out.

    Proves: arguments of a policy (exact), against the options that it was made with.
    """

    def own(made: TokenPolicy) -> dict[str, Any]:
        found: dict[str, Any] = made.arguments()["own"]
        return found

    assert own(Private(None, 3.0)) == {"power": 3.0, "ratio": 0.5, "native_ratio": 0.5}
    assert own(Private()) == own(policy(Private, BUDGET)) == own(Private(power=2.0))
    assert own(policy(Private, ratio=0.25))["ratio"] == 0.25
    for kind in (Louder, Quiet):
        assert own(kind(True, ratio=0.1)) == {"loud": True, "ratio": 0.1, "native_ratio": 0.1}
        assert own(copy.deepcopy(kind(True))) == own(kind(True)) != own(kind())
    assert list(signature(Louder).parameters) == ["loud", "base"]
    made = Private()
    made.power = 5.0  # type: ignore[attr-defined]  # what it is now goes before what was given
    assert own(made)["power"] == 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5, 1e16, 1e300])
def test_weights_must_be_weights(bad: float) -> None:
    class Bad(TokenPolicy):
        name = "bad"

        def native_weights(self, batch: PolicyBatch) -> Tensor:
            return torch.where(batch.mask, torch.full_like(batch.log_probs, bad), math.nan)

    with pytest.raises(NumericalError, match="row 0, token 2"):
        Bad().weights(batch([[1.0]]))


@pytest.mark.parametrize("method", ["scores", "native_weights", "budget_weights"])
def test_what_is_no_number_for_each_token_is_refused_by_name(method: str) -> None:
    """Of another shape, or no tensor at all."""
    of = batch([[1.0, 2.0]])
    for result, got in ((of.log_probs[0], "shape (4,)"), ([0.5], "list"), (None, "NoneType")):
        own = {"name": "bad", method: lambda self, batch, result=result: result}
        settings = BUDGET if method == "budget_weights" else None
        with pytest.raises(ConfigError) as refused:
            type("Bad", (TokenPolicy,), own)(settings).weights(of)
        assert f"{method} of policy 'bad' must give a number for each token" in str(refused.value)
        assert got in str(refused.value)
        assert "1 rows of 4 tokens" in str(refused.value)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_a_score_must_be_finite(scope: str) -> None:
    """The error names policy, row and token; what stands off the response is not looked at."""

    class Bad(Surprising):
        name = "bad"

        def scores(self, batch: PolicyBatch) -> Tensor:
            bad = (batch.log_probs == -3.0) | ~batch.mask
            return batch.log_probs.masked_fill(bad, math.nan)

    Bad.scope = scope
    Bad().weights(batch([[1.0, 2.0]]))
    with pytest.raises(NumericalError, match=r"policy 'bad' gives a score.*row 1, token 3"):
        Bad().weights(batch([[1.0, 2.0], [2.0, 3.0]]))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: policy("standrad"), "did you mean standard"),
        (lambda: policy("my_policy.Surprising"), r"did you mean 'my_policy:Surprising'\?\nDoc"),
        (lambda: policy(Tensor), "not a policy"),
        (lambda: policy("standard", threshold=1), "does not take"),
        (lambda: policy("os:path"), "not a policy"),
        (lambda: policy("nowhere.at_all:Thing"), "cannot be imported"),
        (lambda: policy("bottoms"), "did you mean bottom"),
        (lambda: policy("walk-80"), "--policy top --value walk --keep_ratio 0.8"),
        (lambda: PolicySettings(mode="soft"), "policy_mode"),
        (lambda: PolicySettings(keep_ratio=0.0), "keep_ratio"),
    ],
)
def test_bad_input(call: Any, match: str) -> None:
    with pytest.raises(AlphaTokenError, match=match):
        call()
