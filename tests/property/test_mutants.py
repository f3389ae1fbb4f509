"""Each mutant is killed, by every property that is said to kill it; and the documents say so."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType

import pytest

from alphatoken import oracle
from alphatoken.select import masks as selection
from tests.places import nightly
from tests.property import generate_docs
from tests.property.catalogue import BY_NAME, CLAIMS, LISTED, MUTANTS, OF_LAB, ROOMS
from tests.property.mutation import Edit, Mutant, applied, claim, function_of, hunt, row, source_of

SENTENCES = """
sum-then-outer over validation examples; aggregated errors used as direct; label shift off by one;
prompt positions of the validation sequences dropped; padding leaking in; mean for sum; last token
dropped; head-mean for per-head; grouped heads repeated in the
wrong order; alpha paired with the value projection's own error instead of the head output's; window
off by one; alpha of the wrong direction (rows for columns); soft-cap factor or sink left out;
missing sign on rejected; coefficient from the masked logit; square of the batch gradient for the
Fisher; token-mean scale in the Kronecker factors; preconditioner applied to the token side twice;
tied or twice-called module overwritten instead of accumulated; stale direction; float32 or bf16
arithmetic inside; ties all kept; ceil in floating point; threshold over padding
"""
"""The errors that the properties must notice, as demanded."""
OF_METHODS = {mutant.name for room in OF_LAB.values() for mutant in room}
SOON = {mutant.name for mutant in LISTED} | {room[0].name for room in ROOMS.values()}
"""What was demanded, and one of each room, since rooms differ in what they break."""
_OF_TRAININGS = "cft reference validation_first validation_mix"
TRAINED = {f"test_policies_{name}.py" for name in _OF_TRAININGS.split()}
"""Files whose properties train, for seconds each."""


def late(name: str) -> list[pytest.MarkDecorator]:
    """A hunt runs whole properties; those of the other methods are by hand, or run trainings."""
    files = {one.name.partition("::")[0] for one in BY_NAME[name].claims}
    if name in OF_METHODS and files & TRAINED:
        return [pytest.mark.slow, nightly]
    return [] if name in SOON or files == {"test_methods.py"} else [pytest.mark.slow]


EVERY = [pytest.param(name, marks=late(name)) for name in BY_NAME]


@pytest.mark.parametrize("name", EVERY)
def test_a_mutant_is_killed_by_each_of_its_properties(name: str, record_property) -> None:
    """A few examples of each named property are enough; the same example passes unmutated."""
    mutant = BY_NAME[name]
    require(mutant.needs)
    assert mutant.claims
    for one in mutant.claims:
        kill = hunt(mutant, one)
        assert kill is not None, (
            f"'{name}' survives {one.name}; killed by: {killers(mutant) or 'nothing'}"
        )
        assert kill.calls > 0
        record_property("killed_by", f"{kill.claim}, example {kill.example}: {kill.message}")


def require(packages: tuple[str, ...]) -> None:
    """Skip, with the reason, where a package is missing."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


def killers(mutant: Mutant) -> list[str]:
    """Who else would notice; asked only when a named property did not."""
    names = []
    for one in CLAIMS:
        # A property of the proofs fails without them, whatever the mutant.
        with suppress(RuntimeError):
            if not one.needs and hunt(mutant, one) is not None:
                names.append(one.name)
    return names


def test_every_mutant_of_the_list_is_there() -> None:
    """Nothing that was demanded is missing, and nothing is said to be that was not."""
    wanted = {" ".join(part.split()) for part in SENTENCES.split(";")}
    assert {mutant.sentence for mutant in LISTED} == wanted
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and " " not in name for name in names)
    sentences = {mutant.sentence for mutant in MUTANTS if mutant not in LISTED}
    assert not sentences & wanted


FROZEN = "direction.preconditioner.frozen_preconditioner"


def test_a_function_is_the_mutant_inside_and_itself_again_afterwards() -> None:
    """Imported names, methods, static methods, super() and defaults; also past an exception."""
    edits = (
        Edit("model.attention._band", "(k <= t + window)", "(k < t + window)"),
        Edit("model.batch.to_token_index", "(1, 0)", "(0, 1)"),
        Edit("direction.cache.age_of", "object()", "None"),
        Edit("model.switch._Gate.backward", "[None] * dropped", "[None] * 0"),
        Edit("errors.AlphaTokenError.__init__", "super().__init__(", "super().__init__(0, "),
        Edit(
            "direction.preconditioner.frozen_preconditioner",
            "floor: float = 1e-16",
            "floor: float = 3",
        ),
    )
    before = [_state(edit) for edit in edits]

    def inside() -> None:
        with applied(row("six", (), "", *edits)) as calls:
            assert all(_state(e)[0] != one[0] for e, one in zip(edits, before, strict=True))
            frozen = function_of(FROZEN)
            assert frozen.__kwdefaults__ == {"floor": 3}
            assert vars(selection)["InputError"]("no").args[0] == 0
            assert calls == {"errors.AlphaTokenError.__init__": 1}
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert [_state(edit) for edit in edits] == before
    assert vars(selection)["InputError"]("no").args[0] != 0


def _state(edit: Edit) -> tuple[object, ...]:
    function = function_of(edit.target)
    return function.__code__, function.__defaults__, function.__kwdefaults__


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    """When the library changes, its mutants must follow; none turns into a no-op."""
    edit = Edit("select.masks.keep_count", "no such text", "x")
    with pytest.raises(LookupError, match="must follow"), applied(row("m", (), "", edit)):
        pass
    with pytest.raises(LookupError, match="must follow"):
        source_of("select.masks.no_such_function")
    for mutant in MUTANTS:
        for edit in mutant.edits:
            assert edit.old != edit.new
            assert source_of(edit.target).count(edit.old) == 1


def half(hundredths: int) -> None:
    assert selection.keep_count(hundredths / 100, 10) == 5


def never(number: int) -> None:
    raise AssertionError(number)


def impossible(count: int) -> None:
    assert selection.keep_count(0.5, count) == -1


ROUNDED = ("_ROUNDINGS[rounding](", "math.floor(")
NO_KILLS = {
    "an assertion in the library": (
        claim(half, 50), ("return whole", "assert False; return whole"), AssertionError, ""
    ),
    "an import error": (
        claim(half, 50), ("return whole", "import nothing; return whole"), ImportError, ""
    ),
    "never called": (claim(never, 1), ROUNDED, RuntimeError, "never called"),
    "fails anyway": (claim(impossible, 3), ROUNDED, RuntimeError, "without any mutant"),
}  # fmt: skip
"""A property, the words of ``keep_count`` that are replaced, and how the hunt ends."""


@pytest.mark.parametrize("name", NO_KILLS)
def test_a_failure_that_is_not_the_propertys_own_is_no_kill(name: str) -> None:
    """It is raised in the library, without the mutant's code, or without any mutant."""
    one, words, error, said = NO_KILLS[name]
    edit = Edit("select.masks.keep_count", *words)
    with pytest.raises(error, match=said or None):
        hunt(row("no kill", (), "", edit), one)
    assert selection.keep_count(0.5, 10) == 5


# --- documents -----------------------------------------------------------------------------------


def test_the_kill_matrix_lists_exactly_the_mutants() -> None:
    """Each beside the properties that have to kill it, on the page too."""
    matrix = json.loads(generate_docs.KILLS.read_text(encoding="utf-8"))
    claims = {mutant.name: [one.name for one in mutant.claims] for mutant in MUTANTS}
    recorded = {n: [name for name, _ in kills["killed_by"]] for n, kills in matrix.items()}
    stale = [n for n in {**claims, **recorded} if recorded.get(n) != claims.get(n)]
    assert not stale, f"{generate_docs.KILLS.name}: {generate_docs.COMMAND} kills {' '.join(stale)}"
    page = generate_docs.page().partition("\n## Mutants\n")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| .*::.* \| [^|]+ \|$", page, re.MULTILINE)
    assert rows == [mutant.name for mutant in MUTANTS]


def test_named_mutants_are_hunted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one gets its line at its place, one that is gone loses it, others keep theirs."""
    whole = generate_docs.KILLS.read_text(encoding="utf-8")
    lines = [line for line in whole.splitlines() if '"ceil-in-floating-point"' not in line]
    file = tmp_path / "kill-matrix.json"
    file.write_text("\n".join([lines[0], ' "gone": {"killed_by": []},', *lines[1:]]), "utf-8")
    monkeypatch.setattr(generate_docs, "KILLS", file)
    with pytest.raises(AssertionError) as stale:
        test_the_kill_matrix_lists_exactly_the_mutants()
    command = str(stale.value).partition(generate_docs.COMMAND)[2].partition("\n")[0].split()
    assert command == ["kills", "ceil-in-floating-point", "gone"]
    generate_docs.main(command)
    assert file.read_text(encoding="utf-8") == whole
    with pytest.raises(SystemExit, match="no mutants: gone"):
        generate_docs.main(["kills", "gone"])


def test_mutants_of_methods_by_hand_die_in_the_fast_tests() -> None:
    """One that is written as CONTRIBUTING says; those that train wait for the nightly profile."""
    assert late("talr-without-its-floor") == []
    assert nightly in late("a-reference-of-other-options")


def test_what_a_mutant_is_killed_by_says_what_it_proves() -> None:
    """Every test that a mutant names has a ``Proves:`` line, and no line is written otherwise."""
    proved = generate_docs.claims()
    assert {one.name.partition("::")[2] for one in CLAIMS} <= set(proved)
    assert {one.kind for one in proved.values()} == set(generate_docs.KINDS)


def test_every_equation_has_its_proof_or_is_said_to_have_none() -> None:
    """All of the paper's; and what documents and docstrings cite is one of them."""
    equations, without = generate_docs.EQUATIONS, generate_docs.NOT_PROVED
    labels = {label for one in generate_docs.claims().values() for label in one.labels}
    assert labels == set(equations) - set(without)
    assert set(without) < set(equations)
    page = generate_docs.page()
    for label in without:
        assert f"| `{label}` | not proved: " in page
    assert generate_docs.cited()
    assert not generate_docs.cited() - set(equations)


PARTS_OF_ORACLES = """
adam_scale damped_directions fisher_drift losses_of objective_gradient read_drift
enumerate_responses enumerated_log_probabilities
batch_losses batch_mask displaced flatten gradient sequence_log_probabilities
undisturbed unflatten
directed_parameters known_labels listed logits_of scalar_losses moved_outputs recorded_uses
key_jacobian key_norm_bound rms_norm rms_norm_jacobian rotary_matrix branch_log_probabilities
contract propagated_errors split_attention traced bare_model decoder_blocks expert_tensors
find_scored taylor_remainder third_derivative_along adam_direction run_losses trainable moved_along
"""
"""What oracles and the certificate are put together from."""


def test_every_oracle_is_named_by_a_test_that_stands_on_it() -> None:
    """Each oracle proves something; and what a test stands on names its oracles."""
    proved = generate_docs.claims()
    named = {name for one in proved.values() for name in one.oracles}
    rooms = [import_module(f"alphatoken.oracle.{m.name}") for m in iter_modules(oracle.__path__)]
    every = {
        name
        for room in rooms
        for name, one in vars(room).items()
        if isinstance(one, FunctionType) and one.__module__ == room.__name__ and name[0] != "_"
    }
    assert every - named == set(PARTS_OF_ORACLES.split())
    assert named <= every
    properties = generate_docs.properties()
    for name, one in proved.items():
        text = generate_docs.used_by(properties[name][0])
        missing = {o for o in one.oracles if not re.search(rf"\b{o}\b", text)}
        assert not missing - {"sgd_step"}, f"{name} never calls {sorted(missing)}"
