"""Oracles: slow, obvious, exact. They import nothing of the library except its errors.

Each is plain per-token autograd or a loop over the formula, shifts labels itself, and is handed the
model, a forward callable and the scored modules.
"""

from __future__ import annotations

from alphatoken.oracle.gradients import (
    label_values,
    per_token_gradients,
    response_tokens,
    token_losses,
    validation_gradient,
)
from alphatoken.oracle.influence import (
    Influence,
    absolute_scale,
    causal,
    column_sums,
    diagonal,
    exact_influence,
    influence_matrix,
    influence_terms,
    row_sums,
    to_token_index,
    unassigned,
)
from alphatoken.oracle.jacobian import (
    AttentionSpec,
    attend,
    cross_position_jacobian,
    jacobian_by_autograd,
    output_bounds,
    residual_after_output,
    score_residual_norm,
    value_path_bound,
    value_propagation_error,
)
from alphatoken.oracle.propagation import (
    Hop,
    PropagationLayer,
    equation_causal_decomp,
    head_output_errors,
    one_hop,
    value_propagation,
    value_propagation_pairs,
    via_t,
)

__all__ = [
    "AttentionSpec",
    "Hop",
    "Influence",
    "PropagationLayer",
    "absolute_scale",
    "attend",
    "causal",
    "column_sums",
    "cross_position_jacobian",
    "diagonal",
    "equation_causal_decomp",
    "exact_influence",
    "head_output_errors",
    "influence_matrix",
    "influence_terms",
    "jacobian_by_autograd",
    "label_values",
    "one_hop",
    "output_bounds",
    "per_token_gradients",
    "residual_after_output",
    "response_tokens",
    "row_sums",
    "score_residual_norm",
    "to_token_index",
    "token_losses",
    "unassigned",
    "validation_gradient",
    "value_path_bound",
    "value_propagation",
    "value_propagation_error",
    "value_propagation_pairs",
    "via_t",
]
