"""Keep whatever is not harmful beyond doubt: a rule without a ratio.

A value is an estimate from a draw of validation rows, and another draw would give another one. A
token is dropped only where its value lies below zero by more than such draws explain:

    keep k   iff   v_k + t se_k >= 0,      t = the ``confidence`` quantile of Student's t

with one degree of freedom fewer than there are parts of the draw. On rows that all serve the target
next to nothing goes; on others what harms goes.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.select.masks import check_values


def select_harmless(
    values: Float[Tensor, "b t"],
    errors: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    parts: int,
    confidence: float = 0.95,
) -> Bool[Tensor, "b t"]:
    """Keep the response tokens whose value is not below zero beyond doubt.

    Args:
        values: one value a token.
        errors: their standard errors, as ``TokenValues.standard_error`` gives them.
        mask: True at response tokens; nothing else is kept.
        parts: of the validation draw that the errors are from, at least 2.
        confidence: one-sided, in [0.5, 1). At 0.5 the errors play no part: what is negative goes.

    Returns:
        Boolean mask (b, t). Of tokens whose true value is 0, a share of ``1 - confidence`` is
        dropped, if values against the parts are normally distributed.

    Raises:
        InputError: shapes that differ, fewer than two parts, a confidence out of range, a negative
            error.
        NumericalError: a NaN or Inf value or error, naming row and token.

    Source: ours. Oracle: the rule by loops with a quantile found by bisection, in the tests.
    """
    if not 0.5 <= confidence < 1:
        raise InputError(
            "confidence must lie in [0.5, 1)",
            got=repr(confidence),
            why="below 0.5 tokens of positive value would be dropped, at 1 none is ever",
        )
    if parts < 2:
        raise InputError("standard errors need at least two validation batches", got=repr(parts))
    check_values(values, mask)
    check_values(errors, mask)
    if bool((errors[mask] < 0).any()):
        raise InputError("a standard error is negative", got=repr(float(errors[mask].min())))
    quantile = float(stats.t.ppf(confidence, parts - 1))
    # In float64, so that a bound of 0 does not depend on the dtype of the values.
    bound = values.double() + quantile * errors.double()
    return mask & torch.where(mask, bound >= 0, False)
