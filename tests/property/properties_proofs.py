"""Claims about the proofs that run on a user's model: each trap is refused, and by its name.

A trap is a decoder on which an estimator would be wrong in silence. A property that fails here
returned values for one. Mutants of these proofs make them vacuous, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from alphatoken import Scorer, ScorerConfig
from alphatoken.errors import AlphaTokenError, CoverageError, ModelError, UnsupportedError
from alphatoken.estimate.proofs import compare_gradients, prove_documents
from alphatoken.model.batch import read_batch
from tests.property.decoder import ReferenceAdapter
from tests.property.strategies import Case, make_case

__all__ = [
    "TRAPS",
    "check_a_gradient_that_is_not_explained_is_named",
    "check_a_trap_is_refused",
    "check_documents_that_see_each_other_are_refused",
    "check_isolation_is_claimed_only_where_it_was_shown",
    "refusal",
]

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


def refusal(run: Callable[[], object]) -> AlphaTokenError | None:
    """The library's error, if there is one."""
    try:
        run()
    except AlphaTokenError as error:
        return error
    return None


def check_a_trap_is_refused(name: str) -> None:
    """No estimator gives values where its proof has nothing to stand on; the message says where."""
    case, estimator, kind, word = TRAPS[name]
    scorer = Scorer(case.model(), case.validation, config=ScorerConfig(estimator, layers=1))
    if name == "attention dropout":  # only a user's own training pass has it
        scorer.adapter.model.train()

        def run() -> object:
            with scorer.observe() as observed:
                inputs = {k: v for k, v in case.batch.items() if k != "labels"}
                logits = scorer.adapter.model(**inputs)
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


def check_isolation_is_claimed_only_where_it_was_shown(long: bool) -> None:
    """``isolated`` is True after a token away from the first position was sent back, else False."""
    case = make_case(("prr",) if long else ("pr",), (("prr",) if long else ("pr",),))
    scorer = Scorer(case.model(), case.validation, config=ScorerConfig("direct", layers=1))
    error = refusal(lambda: scorer.score(case.batch))
    assert error is None, f"a model without any trap was refused: {error}"
    assert scorer.coverage.isolated is long
    assert scorer.coverage.relative_error is not None


def check_a_gradient_that_is_not_explained_is_named(size: float, wide: bool) -> None:
    """A part of ``size`` that no captured use explains is refused; rounding is not."""
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


def check_documents_that_see_each_other_are_refused(seed: int) -> None:
    """A packed row under a mask of ones leaks; under its own boundaries it does not."""
    case = replace(make_case(("pprr|prr", "prr|prrr"), PLAIN[1]), seed=seed)
    adapter = ReferenceAdapter(case.model())
    batch = read_batch(case.batch)
    assert refusal(lambda: prove_documents(adapter, batch)) is None

    class Leaking(ReferenceAdapter):
        def forward(self, inputs):  # type: ignore[no-untyped-def]
            ids = inputs["input_ids"]
            return super().forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    error = refusal(lambda: prove_documents(Leaking(case.model()), batch))
    assert isinstance(error, ModelError), "documents that see each other passed"
    assert "see each other" in str(error)
