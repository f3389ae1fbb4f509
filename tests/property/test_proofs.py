"""The proofs that run on a user's model refuse every trap, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import FisherDrift, Scorer, ScorerConfig
from alphatoken.direction.gradients import compare_gradients
from alphatoken.errors import AlphaTokenError, CoverageError, ModelError, UnsupportedError
from alphatoken.estimate.batch_proofs import prove_documents
from alphatoken.model import batch_slice
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_documents, around_responses
from alphatoken.oracle import gradients
from alphatoken.support.precision import full_precision
from tests.property.decoder import ReferenceAdapter, ReferenceDecoder
from tests.property.profiles import budget
from tests.property.setups import forward_of, refusal
from tests.property.strategies import SEEDS, Case, make_batch, make_case, rows

PLAIN = (("pprrr",), (("pprr",),))

TRAPS: dict[str, tuple[Case, str, type[AlphaTokenError], str]] = {
    "hidden use": (
        make_case(*PLAIN, hidden_use=True), "path", CoverageError, "mlp.up_proj.weight"
    ),
    "use below the scored layers": (
        make_case(*PLAIN, mlp="plain", tied_linears=True, layers=3),
        "direct", CoverageError, "mlp.up_proj.weight",
    ),
    "hidden mixer": (
        make_case(("pprrr",), (("pprr", "..pr"),), hidden_mixer=True),
        "direct", UnsupportedError, "mix outside attention",
    ),
    "hidden mixer, tokens of one row only": (
        make_case(("pprrr",), (("pr..", "pprr"),), hidden_mixer=True),
        "alphatoken", UnsupportedError, "mix outside attention",
    ),
    "named mixer": (
        make_case(*PLAIN, conv_mixer=True), "direct", UnsupportedError, "causal convolution"
    ),
    "attention dropout": (
        make_case(*PLAIN, attention_dropout=0.3), "direct", UnsupportedError, "attention dropout"
    ),
}  # fmt: skip
"""Case, an estimator that is wrong on it, the error, and a word of its message."""


def _masked(model: ReferenceDecoder) -> None:
    model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * (g > 0))


def _clipped(model: ReferenceDecoder) -> None:
    def clip(module: object, args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: g.clamp(-1e-3, 1e-3))

    model.layers[0].register_forward_hook(clip)


def _scaled(model: ReferenceDecoder) -> None:
    model.layers[0].mlp.register_full_backward_hook(lambda m, given, taken: (2 * given[0],))


def _without_gradients(model: ReferenceDecoder) -> None:
    @torch.no_grad()
    def branch(module: object, args: object, output: Tensor) -> Tensor:
        return 0.5 * output

    model.layers[0].mlp.register_forward_hook(lambda m, a, out: out + branch(m, a, out))


def _doubled(model: ReferenceDecoder) -> None:
    """A straight-through estimator: the backward is the identity's."""

    def double(module: object, args: object, output: Tensor) -> Tensor:
        return output + output.detach()

    model.layers[0].mlp.register_forward_hook(double)


OWN_BACKWARDS = {
    "a mask on a gradient": (_masked, "layers.0.mlp.up_proj.weight"),
    "clipping inside": (_clipped, ""),
    "a hook that scales": (_scaled, ""),
    "a branch without gradients": (_without_gradients, ""),
}
"""What makes a backward another than the forward's derivative, and a parameter to be named."""


class Leaking(ReferenceAdapter):
    """Runs packed rows under a mask of ones."""

    def forward(self, inputs):  # type: ignore[no-untyped-def]
        ids = inputs["input_ids"]
        return super().forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


LONG = {
    "right": ("pr" + 88 * ".", 40 * "p" + 30 * "r" + 20 * ".", 80 * "p" + 10 * "r", 90 * "r"),
    "left": (88 * "." + "pr", 20 * "." + 40 * "p" + 30 * "r", 80 * "p" + 10 * "r", 90 * "r"),
    "scattered": (30 * "pr" + 30 * ".", "ppr" + 87 * "p", 10 * "." + 20 * "pprr"),
    "packed": (
        "pr|" + 40 * "p" + 20 * "r" + "|" + 28 * "p",
        90 * "p",
        20 * "p" + 20 * "r" + "|" + 48 * "p" + "rr",
    ),
}
"""Batches that are much longer than a slice; the first row of some can show nothing."""
FORMS = ("plain", "positions", "pairs", "rows", "shared", "unknown")
"""Of the inputs beside tokens and padding: what has one entry a token, a pair, a row, or none."""
HIDDEN = ("hidden use", "use below the scored layers", "hidden mixer")
"""Traps that nothing but a forward and a backward gives away."""


def _require_cut_alike(
    piece: LabelledBatch, whole: LabelledBatch, rows: Tensor, columns: Tensor
) -> None:
    """Inputs, labels and mask, entry by entry."""
    for k, row in enumerate(rows.tolist()):
        place = columns[k].tolist()
        for name, value in whole.inputs.items():
            got: Any = piece.inputs[name]
            if value.dim() == 2 and value.shape == (1, whole.labels.shape[1]):
                own = got[k if len(got) > 1 else 0]  # a shared row stays one where nothing is cut
                expected = value[0, place].tolist()
                if name == "position_ids" and len(whole.labels) == 1:
                    expected = _counted_from_the_start(expected)
                assert own.tolist() == expected, name
            elif value.dim() == 4:
                assert torch.equal(got[k], value[row][:, place][:, :, place]), name
            elif value.shape == whole.labels.shape:
                assert torch.equal(got[k], value[row, place]), name
            elif value.dim() == 2:
                assert torch.equal(got[k], value[row]), name
            else:
                assert got is value, name
        assert not bool(piece.mask[k, 0]), "the first token of a row has a value"
        assert torch.equal(piece.mask[k, 1:], whole.mask[row, place][1:])
        learned = whole.labels[row, place][1:]
        assert torch.equal(piece.labels[k, 1:], learned)


def _counted_from_the_start(positions: list[int]) -> list[int]:
    """The first document's positions count up from where the others start; the rest is kept."""
    counted = [min(positions)]
    for before, after in pairwise(positions):
        if after != before + 1:
            break
        counted.append(counted[-1] + 1)
    return counted + positions[len(counted) :]


def _shown(batch: LabelledBatch) -> bool:
    """Whether a response token follows two real tokens of its own document."""
    starts, attention = batch.document_starts, batch.inputs.get("attention_mask")
    for row in range(batch.labels.shape[0]):
        for i in range(2, batch.labels.shape[1]):
            if attention is not None and not bool(attention[row, i - 2]):
                continue
            if starts is not None and bool(starts[row, i - 1]):
                continue
            if bool(batch.mask[row, i]):
                return True
    return False


@pytest.mark.parametrize("name", list(TRAPS))
def test_a_trap_is_refused(name: str) -> None:
    """No estimator gives values where its proof has nothing to stand on; the message says where.

    Proves: a trap is refused (exact), against traps.
    """
    case, estimator, kind, word = TRAPS[name]
    scorer = Scorer(case.model(), case.validation, config=ScorerConfig(estimator, layers=1))
    if name == "attention dropout":  # only a user's own training pass has it
        scorer.adapter.model.train()

        def run() -> object:
            with scorer.observe() as observed:
                logits = scorer.adapter.model(**case.inputs)
                return observed.values(logits, case.batch["labels"])

    else:

        def run() -> object:
            return scorer.score(case.batch)

    error = refusal(run)
    assert error is not None, f"{name}: values were returned"
    assert isinstance(error, kind), f"{name}: {error!r}"
    assert word in str(error), f"{name}: {error}"
    label = Scorer(case.model(), case.validation, config=ScorerConfig("label", layers=1))
    assert bool(torch.isfinite(label.score(case.batch).total).all())  # the remedy works


@pytest.mark.parametrize(
    "name",
    [
        "a mask on a gradient",
        "a branch without gradients",
        # Hooks on what passes by, as the mask is one on a weight.
        pytest.param("clipping inside", marks=pytest.mark.slow),
        pytest.param("a hook that scales", marks=pytest.mark.slow),
    ],
)
def test_a_backward_of_its_own_is_refused(name: str) -> None:
    """label is of what trains: a backward that is not the forward's derivative is refused.

    Proves: a backward of its own is refused (exact), against hooks, clipped errors, a branch
    without gradients.
    """
    change, parameter = OWN_BACKWARDS[name]
    case = make_case(*PLAIN)
    model = case.model()
    change(model)
    # M of validation rows; and M of no batch, which a named parameter shows as well as any.
    for objective in ("both", "stability") if parameter else ("both",):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        ones = {name: torch.ones_like(p) for name, p in weights.items()}
        drift = FisherDrift(ones, weights) if objective == "stability" else None
        config = ScorerConfig("label", layers=2, objective=objective)
        scorer = Scorer(model, case.validation, drift, config)
        error = refusal(lambda scorer=scorer: scorer.score(case.batch))
        assert isinstance(error, UnsupportedError), f"{name}: values were returned"
        assert "backward is not the derivative" in str(error)
        assert parameter in str(error)


@pytest.mark.parametrize("name", ["padding row", "straight through"])
def test_a_backward_that_is_followed(name: str) -> None:
    """A detached straight-through branch, and an embedding's padding row, are no false alarm.

    Proves: eq. grad_alignment (exact), against ``label_values``, ``validation_gradient``.
    """
    case = make_case(*PLAIN, tied_embeddings=True, padding_token=1, vocabulary=3)
    model = case.model()
    if name == "straight through":
        _doubled(model)
    config = ScorerConfig("label", parameters="all", derivative="forward_mode")
    scorer = Scorer(model, case.validation, config=config)
    values = scorer.score(case.batch).total
    wanted = gradients.label_values(
        model,
        forward_of(model),
        case.batch,
        gradients.validation_gradient(model, forward_of(model), case.validation),
    )
    assert torch.allclose(values, wanted, rtol=1e-9, atol=1e-12)
    assert scorer.coverage.derivatives is not None
    assert scorer.coverage.derivatives < 1e-10


@pytest.mark.parametrize("estimator", ["direct", "path", "label"])
def test_a_model_that_looks_ahead_is_refused(estimator: str) -> None:
    """A prediction that sees its own token has no value, by any estimator.

    Proves: a model that looks ahead is refused (exact), against a model that does.
    """
    case = make_case(*PLAIN)
    model = case.model()
    model.layers[-1].register_forward_hook(lambda m, a, out: out + 0.1 * out.roll(-1, 1))
    scorer = Scorer(model, case.validation, config=ScorerConfig(estimator, layers=1))
    error = refusal(lambda: scorer.score(case.batch))
    assert isinstance(error, ModelError), "a model that looks ahead was valued"
    assert "looks ahead" in str(error)


@pytest.mark.parametrize("long", [False, True])
def test_isolation_is_claimed_only_where_it_was_shown(long: bool) -> None:
    """``isolated`` is True after a token away from the first position was sent back, else False.

    Proves: isolation is claimed only where it was shown (exact), against long and short rows.
    """
    case = make_case(("prr",) if long else ("pr",), (("prr",) if long else ("pr",),))
    scorer = Scorer(case.model(), case.validation, config=ScorerConfig("direct", layers=1))
    error = refusal(lambda: scorer.score(case.batch))
    assert error is None, f"a model without any trap was refused: {error}"
    assert scorer.coverage.isolated is long
    assert scorer.coverage.relative_error is not None


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("wide", [False, True])
def test_a_gradient_that_is_not_explained_is_named(size: float, wide: bool) -> None:
    """A part of ``size`` that no captured use explains is refused; rounding is not.

    Proves: a gradient that is not explained is named (exact), against parts left out.
    """
    dtype = torch.float64 if wide else torch.float32
    allowed = 1e-10 if wide else 1e-4
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(4, 3, generator=generator, dtype=dtype)
    norm = float(gradient.double().norm())

    def compare(found: dict[str, tuple[Tensor, float]], **expected: Tensor | None) -> object:
        return refusal(lambda: compare_gradients(found, expected))

    part = gradient * (1 - size)
    error = compare({"w": (part, norm)}, w=gradient)
    assert (error is not None) == (size > allowed), f"a part of {size:g}: {error}"
    assert error is None or "w:" in str(error)
    assert compare({}, w=gradient) is not None, "a weight whose use nobody saw"
    assert compare({"w": (gradient, norm)}, w=None) is not None, "a use that autograd does not see"
    assert compare({}, w=None) is None
    assert compare({"w": (gradient, norm)}, w=gradient, v=None) is None
    # A gradient that cancels is compared with what cancelled.
    assert compare({"w": (1e-13 * gradient, norm)}, w=-1e-13 * gradient) is None


@given(seed=SEEDS)
@budget(0.2, least=4)
def test_documents_that_see_each_other_are_refused(seed: int) -> None:
    """A packed row under a mask of ones leaks; under its own boundaries it does not.

    Proves: documents that see each other are refused (exact), against a model that leaks.
    """
    case = replace(make_case(("pprr|prr", "prr|prrr"), PLAIN[1]), seed=seed)
    adapter = ReferenceAdapter(case.model())
    batch = read_batch(case.batch)
    assert refusal(lambda: prove_documents(adapter, batch)) is None

    error = refusal(lambda: prove_documents(Leaking(case.model()), batch))
    assert isinstance(error, ModelError), "documents that see each other passed"
    assert "see each other" in str(error)


@given(seed=SEEDS)
@budget(0.05, least=2)
def test_what_was_refused_is_refused_again(seed: int) -> None:
    """A packed row that leaks is refused at the second time as at the first; observed as well.

    What was proved of a forward of the scorer's own says nothing of one that its user runs.

    Proves: what was refused is refused again (exact), against a model that leaks.
    """
    case = replace(make_case(("pprr|prr", "prr|prrr"), PLAIN[1]), seed=seed)
    model = case.model()
    config = ScorerConfig("path", layers=1)
    scorer = Scorer(model, case.validation, config=config, adapter=Leaking(model))
    for _ in range(2):
        error = refusal(lambda: scorer.score(case.batch))
        assert isinstance(error, ModelError), "documents that see each other passed"

    # As a cache does: the forward that trains takes the positions for those of one document.
    inner = model.forward

    def forward(**inputs: Any) -> Tensor:
        ids = inputs["input_ids"]
        mixed = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inner(**(mixed if model.training else inputs))  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    scorer = Scorer(model, case.validation, config=config, adapter=ReferenceAdapter(model))
    scorer.score(case.batch)
    model.train()
    with scorer.observe() as observed:
        logits = model(**case.inputs)
        error = refusal(lambda: observed.values(logits, case.batch["labels"]))
    assert isinstance(error, ModelError), "documents that the observed forward mixes passed"
    assert "see each other" in str(error)


@given(seed=SEEDS)
@budget(0.05, least=2)
def test_a_pass_leaves_nothing_to_the_next(seed: int) -> None:
    """Of two observed forwards the last one's attentions are kept, and no more of them.

    Proves: a pass leaves nothing to the next (exact), against a pass by itself.
    """
    case = replace(make_case(*PLAIN), seed=seed)
    model = case.model()
    scorer = Scorer(model, case.validation, config=ScorerConfig("alphatoken", layers=2))
    counts = []
    with scorer.observe() as observed:
        for _ in range(2):
            logits = model(**case.inputs)
            counts.append(len(observed._recorder.attentions))
        values = observed.values(logits, case.batch["labels"]).total
    assert counts[0] == counts[1], "attentions of an earlier pass stay"
    assert torch.equal(values, scorer.score(case.batch).total)


@given(seed=SEEDS)
@budget(0.05, least=2)
def test_masks_of_flags_hide_labels(seed: int) -> None:
    """A boolean mask hides the labels after padding as the same mask in numbers does.

    Proves: masks of flags hide labels (exact), against a mask of numbers.
    """
    batch = make_batch(("..pprr", "pprr..", ".rrrrr"), vocabulary=11, seed=seed)
    numbers = batch["attention_mask"]
    batch["labels"] = batch["input_ids"].masked_fill(numbers == 0, -100)
    hidden = read_batch(batch)
    flags = read_batch({**batch, "attention_mask": numbers.bool()})
    assert not hidden.mask[0, :3].any()
    assert torch.equal(flags.mask, hidden.mask)
    assert torch.equal(flags.labels, hidden.labels)


@pytest.mark.parametrize("device", ["cpu"])
def test_autocast_outlives_an_error(device: str) -> None:
    """After a function in full precision, also one that raises, autocast is on as before.

    Proves: autocast outlives an error (exact), against autocast as it was.
    """

    @full_precision
    def run(fails: bool) -> bool:
        if fails:
            raise ArithmeticError
        return torch.is_autocast_enabled(device)

    with torch.autocast(device, dtype=torch.bfloat16):
        assert not run(False)
        assert torch.is_autocast_enabled(device)
        with suppress(ArithmeticError):
            run(True)
        assert torch.is_autocast_enabled(device), "autocast stays off after an error"


@pytest.mark.parametrize("layout", list(LONG))
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("seed", [0])
def test_a_slice_shows_what_its_batch_shows(name: str, layout: str, seed: int) -> None:
    """A fault that the whole batch gives away is given away by its slice, with the same words.

    Without the fault both are proved, and isolation is shown.

    Proves: a slice shows what its batch shows (exact), against the whole batch.
    """
    case, estimator, kind, word = TRAPS[name]
    case = replace(case, seed=seed)
    plain = make_case(*PLAIN, layers=case.config.layers, mlp=case.config.mlp)
    batch = make_batch(LONG[layout], vocabulary=case.config.vocabulary, seed=seed)
    whole = read_batch(batch)
    piece = around_responses(whole)
    assert piece.labels.numel() <= batch_slice.ROWS * batch_slice.LENGTH < whole.labels.numel() / 4
    for shown in (whole, piece):
        scorer = Scorer(case.model(), batch, config=ScorerConfig(estimator, layers=1))
        error = refusal(partial(scorer.estimator.prove, shown))
        assert isinstance(error, kind), f"{name}, {tuple(shown.labels.shape)}: {error!r}"
        assert word in str(error), f"{name}: {error}"
        scorer = Scorer(plain.model(), batch, config=ScorerConfig("direct", layers=1))
        scorer.estimator.prove(shown)
        report = scorer.coverage
        assert report.isolated, f"isolation was not shown on {tuple(shown.labels.shape)}"
        assert report.relative_error is not None


@given(seed=SEEDS)
@budget(0.2, least=4)
def test_a_slice_shows_which_documents_see_each_other(seed: int) -> None:
    """A slice of a packed row leaks under a mask of ones as the row does, and else does not.

    Proves: a slice shows which documents see each other (exact), against the whole batch.
    """
    case = make_case(*PLAIN)
    whole = read_batch(make_batch(LONG["packed"], vocabulary=11, seed=seed))
    piece = around_documents(whole)
    assert piece.labels.numel() < whole.labels.numel() / 4
    for shown in (whole, piece):
        assert refusal(partial(prove_documents, ReferenceAdapter(case.model()), shown)) is None
        error = refusal(partial(prove_documents, Leaking(case.model()), shown))
        assert isinstance(error, ModelError), "documents that see each other passed"


@given(
    lines=st.sampled_from(["plain", "right", "left", "ragged", "packed"]).flatmap(
        lambda mode: rows(mode, max_length=12, max_rows=5)
    ),
    size=st.tuples(st.integers(1, 3), st.integers(1, 6)),
    form=st.sampled_from(FORMS),
)
@example(("..pprr", "pprr..", "pr...."), (1, 3), "plain")
@example(("pr|pprr", "pppp|pr"), (1, 3), "pairs")
@example(("pprrr", "prrrr"), (1, 2), "unknown")
@example(("pr", "pp"), (2, 2), "shared")
@example(("pp|pr",), (1, 2), "plain")
@example(("ppprr|ppr",), (1, 5), "plain")
def test_a_slice_is_a_part_of_its_batch(
    lines: tuple[str, ...], size: tuple[int, int], form: str
) -> None:
    """Every input of a slice is the batch's at the same rows and positions, whatever its shape.

    Where the batch has a token with two real ones of its document before it, so has the slice.

    Proves: a slice is a part of its batch (exact), against entry by entry.
    """
    batch = make_batch(lines, vocabulary=11, seed=1, explicit_positions=form == "positions")
    b, t = batch["labels"].shape
    # A token's id is its place, so that a slice says by itself where it was taken.
    batch["input_ids"] = torch.arange(b * t).view(b, t)
    more = {
        "pairs": torch.arange(b * 2 * t * t).view(b, 2, t, t),
        "rows": torch.arange(b * (t + 1)).view(b, t + 1),
        "shared": torch.arange(t).view(1, t),
        "unknown": torch.arange(b * t + 2),
    }
    whole = read_batch({**batch, **({"more": more[form]} if form in more else {})})
    # Slices of another size, so that short batches are longer.
    with mock.patch.multiple(batch_slice, ROWS=size[0], LENGTH=size[1]):
        pieces = [around_responses(whole)]
        if whole.document_starts is not None:
            pieces.append(around_documents(whole))
    for piece in pieces:
        places = piece.inputs["input_ids"]
        taken, columns = places[:, 0] // t, places % t
        assert torch.equal(places // t, taken[:, None].expand_as(places)), "rows are mixed"
        assert bool((columns.diff(dim=-1) == 1).all()), "positions that are no neighbours"
        assert bool((taken.diff() > 0).all()), "rows out of order, or one row twice"
        uncut = t if form == "rows" else min(t, size[1])
        expected = (b, t) if form == "unknown" else (min(b, size[0]), uncut)
        assert piece.labels.shape == expected, f"{tuple(piece.labels.shape)} for {expected}"
        _require_cut_alike(piece, whole, taken, columns)
    if size[1] >= 3:
        assert _shown(pieces[0]) >= _shown(whole), "no token of the slice can show isolation"
    for piece in pieces[1:] if size[1] >= 2 else ():
        assert piece.document_starts is not None, "no document starts within the slice"
