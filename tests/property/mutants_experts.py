"""Errors in how mixtures of experts are captured and contracted."""

from __future__ import annotations

from tests.property import test_experts
from tests.property.mutation import Claim, Edit, Mutant, claim
from tests.property.test_experts import MixtureCase

CASE = MixtureCase("mixtral", ("..pprr",), ("prr",), experts=4, chosen=2, seed=21)
SHARED = MixtureCase("qwen3_next", ("..pprr", "prrr.."), ("prr",), (1,), seed=23)
BIASED = MixtureCase("gpt_oss", ("pprr..",), ("prr",), experts=3, chosen=2, seed=22)


def values(case: MixtureCase, estimator: str = "direct") -> Claim:
    """Values over linears and experts, by the oracle."""
    return claim(test_experts.test_values_over_linears_and_experts, case, estimator, examples=1)


LOOP = claim(test_experts.test_contraction_is_the_loop, test_experts.rows_cases(), examples=40)
OUTPUT = claim(test_experts.test_rows_make_the_models_own_output, CASE, examples=1)
EXPLAINED = claim(test_experts.test_weights_are_explained, BIASED, examples=1)
SERVES = claim(test_experts.test_one_forward_serves_both, CASE, examples=1)


def _mixture(name: str, sentence: str, target: str, old: str, new: str, *claims: Claim) -> Mutant:
    return Mutant(name, sentence, (Edit(target, old, new),), claims, listed=False)


_CONTRACT = "estimate.contraction.contract_experts"
_ROUTED = "model.experts.routed_experts"
_LINEAR = "model.capture.Recorder.on_linear"
_PRODUCTS = "model.experts._products"

MUTANTS = (
    _mixture(
        "expert-of-the-row-beside",
        "a row of an expert meets the direction of the expert before it",
        _CONTRACT, "@ m[expert]", "@ m[expert - 1]", LOOP,
    ),
    _mixture(
        "first-of-the-chosen-experts",
        "of the experts that a token was sent to, only the first one is valued",
        _CONTRACT, "view(experts.shape).sum(-1)", "view(experts.shape)[..., 0]",
        LOOP,
    ),
    _mixture(
        "last-of-the-chosen-experts",
        "the sum over a position's uses of experts is replaced by the last of them",
        _CONTRACT, "view(experts.shape).sum(-1)", "view(experts.shape)[..., -1]",
        LOOP,
    ),
    _mixture(
        "rows-of-experts-one-position-late",
        "values of routed rows fall to the position after theirs",
        _CONTRACT, "view(experts.shape).sum(-1)", "view(experts.shape).sum(-1).roll(1, -1)",
        LOOP,
    ),
    _mixture(
        "rows-of-padding-for-rows-of-tokens",
        "rows are put back into a batch that is read from its other end, padding first",
        "model.capture.Recorder.on_experts",
        "x.detach().unflatten(0, shape)", "x.detach().flip(0).unflatten(0, shape)",
        values(CASE),
    ),
    _mixture(
        "router-weight-left-out",
        "experts are added without the router's weights, so no error has them",
        _ROUTED, "(s * weights.unsqueeze(-1))", "(s + 0 * weights.unsqueeze(-1))", OUTPUT,
    ),
    _mixture(
        "router-weight-twice",
        "errors at the experts have the router's weight twice",
        _ROUTED, "weights.unsqueeze(-1)", "weights.unsqueeze(-1) ** 2", OUTPUT,
    ),
    _mixture(
        "router-cut-off",
        "no error reaches the layers below, or the router, through its weights",
        _ROUTED, "weights.unsqueeze(-1)", "weights.detach().unsqueeze(-1)",
        OUTPUT,
    ),
    _mixture(
        "gate-for-up",
        "the halves of a gate's input are taken for one another",
        _ROUTED, "act(s.flatten(0, 1))", "act(s.flatten(0, 1).roll(s.shape[-1] // 2, -1))",
        OUTPUT,
    ),
    _mixture(
        "rows-left-in-the-order-of-experts",
        "products come back in the order of the experts",
        _PRODUCTS, "torch.cat(order).argsort()", "torch.cat(order)", OUTPUT,
    ),
    _mixture(
        "matrix-of-the-expert-before",
        "each row is multiplied with the matrix of the expert before its own",
        _PRODUCTS, "matrices[expert]", "matrices[expert - 1]", OUTPUT,
    ),
    _mixture(
        "rows-that-nothing-follows-from",
        "errors are asked for at a view of the rows that the model does not go on with",
        "model.capture.Recorder.on_experts", "return rows.view(s.shape)", "return s",
        values(CASE),
    ),
    Mutant(
        "rows-of-a-shared-expert-position-by-position",
        "a shared expert's rows are taken to go through the positions first, and then the rows",
        (
            Edit(_LINEAR, "reshape(*shape, -1)", "reshape(*shape[::-1], -1).transpose(0, 1)"),
            Edit(_LINEAR, "s.view(*shape, -1)", "s.view(*shape[::-1], -1).transpose(0, 1)"),
            Edit(_LINEAR, "rows.view(s.shape)", "rows.transpose(0, 1).reshape(s.shape)"),
        ),
        (values(SHARED),),
        listed=False,
    ),
    _mixture(
        "shared-expert-whose-view-nothing-follows-from",
        "errors of a shared expert are asked for at a view that the model does not go on with",
        _LINEAR, "return rows.view(s.shape)", "return None", values(SHARED),
    ),
    _mixture(
        "gradient-of-the-expert-before",
        "the weight gradient of an expert is that of the one before it",
        "estimate.contraction.expert_outer_sums", "sums[expert] =", "sums[expert - 1] =",
        EXPLAINED,
    ),
    _mixture(
        "router-not-named",
        "where experts are captured, the report leaves their router out",
        "model.scope.find_scope", "if name not in captured}", "if name not in uncovered}",
        values(CASE),
    ),
    _mixture(
        "experts-of-every-model",
        "another model's experts run through the rows too",
        "model.dispatch.ExpertsDispatch.__call__",
        "self.active.get(module, ())",
        "self.active.get(module, next(iter(self.active.values())))",
        SERVES,
    ),
)  # fmt: skip
