"""Oracles: slow, obvious, exact. They import nothing of the library except its errors.

Each is plain per-token autograd or a loop over the formula, shifts labels itself, and is handed the
model, a forward callable and the scored modules, so that it can share no mistake with the code that
it checks. All are meant for small models in float64; none is fast.

- ``gradients``: one ``autograd.grad`` a token, the ground of every other oracle.
- ``influence``: the influence matrix Psi and its exact readouts; ``readouts``: every value that the
  library returns, on a model whose attention is split.
- ``experts``: Psi over the tensors of mixtures of experts, by a copy of them for every position.
- ``propagation``: Value-Propagation and the paper's causal decomposition in loops
  (eq. phi_tgt_causal, causal_decomp); ``jacobian``: the exact Jacobian of one attention layer, with
  the score path, and the bound of what is left out (eq. app_score_path, app_value_path_bound).
- ``delta_net``: gated delta nets position by position, their coefficients on values, and the bound
  of what Value-Propagation leaves out there.
- ``enumeration``: the Fisher of a sequence model summed over every response; ``retention``: the
  retention side and the bound of its proxy, term by term; ``transfer``: the Wasserstein form of it.
- ``preference``: DPO written again from its definition. ``composite``: the direction
  ``M = P o (G + lambda V)`` built anew from what the user gave (eq. V_layer).
- ``utility`` and ``shapley``: what a label is truly worth, by taking the step with it and without
  it (eq. local_utility_def), and over every coalition.
- ``walk``: a copy that is trained on the validation rows, what a token's loss falls by, and label
  values and curvature along the way.
- ``run``: the derivative of the last validation loss by every token's weight in every step of a
  run, through all steps of SGD or AdamW; and the ledger of its steps.
- ``scope``: what is scored, found again from the model alone; ``evaluate``: what several stand on.

**May import** ``errors`` alone. **Read by** ``fidelity``, ``benchmarks`` and the tests only: the
estimators never see it. **Checked by** finite differences, and oracle against oracle
(``tests/property/test_oracle*.py``).
"""

from __future__ import annotations

from alphatoken.oracle.composite import corrected_fisher, damped_solve
from alphatoken.oracle.delta_net import (
    coefficients,
    convolve,
    delta_rule,
    left_out_bound,
    net_jacobian,
    propagated_parts,
    value_path,
)
from alphatoken.oracle.enumeration import (
    MonteCarloFisher,
    exact_fisher,
    exact_token_fisher,
    expected_retention_loss,
    monte_carlo_fisher,
)
from alphatoken.oracle.experts import expert_influence
from alphatoken.oracle.gradients import (
    label_curvatures,
    label_values,
    per_token_gradients,
    response_tokens,
    standard_errors,
    token_losses,
    validation_gradient,
)
from alphatoken.oracle.influence import (
    Influence,
    causal,
    column_sums,
    diagonal,
    exact_influence,
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
from alphatoken.oracle.preference import (
    PreferencePairs,
    dpo_gradient,
    dpo_loss,
    dpo_margin,
    dpo_omega,
    dpo_token_errors,
    masked_dpo_gradient,
    masked_dpo_omega,
    preference_objective,
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
from alphatoken.oracle.retention import (
    ProxyBound,
    hessian,
    kl_hessian,
    proxy_bound,
    retention_gradient,
    retention_loss,
)
from alphatoken.oracle.run import Run, ledger_values, run_end, run_loss, run_values
from alphatoken.oracle.shapley import exact_shapley
from alphatoken.oracle.transfer import (
    TransferBound,
    lipschitz_constant,
    prompt_fishers,
    transfer_bound,
    wasserstein,
)
from alphatoken.oracle.utility import (
    AdamState,
    adam_preconditioner,
    adam_step,
    adam_step_derivative,
    leave_one_out_utility,
    one_step_utility,
    sgd_step,
)
from alphatoken.oracle.walk import curvature_along, label_values_along, walk_values, walked

__all__ = [
    "AdamState",
    "AttentionSpec",
    "Hop",
    "Influence",
    "MonteCarloFisher",
    "PreferencePairs",
    "PropagationLayer",
    "ProxyBound",
    "Run",
    "TransferBound",
    "adam_preconditioner",
    "adam_step",
    "adam_step_derivative",
    "attend",
    "causal",
    "coefficients",
    "column_sums",
    "convolve",
    "corrected_fisher",
    "cross_position_jacobian",
    "curvature_along",
    "damped_solve",
    "delta_rule",
    "diagonal",
    "dpo_gradient",
    "dpo_loss",
    "dpo_margin",
    "dpo_omega",
    "dpo_token_errors",
    "equation_causal_decomp",
    "exact_fisher",
    "exact_influence",
    "exact_shapley",
    "exact_token_fisher",
    "expected_retention_loss",
    "expert_influence",
    "head_output_errors",
    "hessian",
    "jacobian_by_autograd",
    "kl_hessian",
    "label_curvatures",
    "label_values",
    "label_values_along",
    "leave_one_out_utility",
    "ledger_values",
    "left_out_bound",
    "lipschitz_constant",
    "masked_dpo_gradient",
    "masked_dpo_omega",
    "monte_carlo_fisher",
    "net_jacobian",
    "one_hop",
    "one_step_utility",
    "output_bounds",
    "per_token_gradients",
    "preference_objective",
    "prompt_fishers",
    "propagated_parts",
    "proxy_bound",
    "residual_after_output",
    "response_tokens",
    "retention_gradient",
    "retention_loss",
    "row_sums",
    "run_end",
    "run_loss",
    "run_values",
    "score_residual_norm",
    "sgd_step",
    "standard_errors",
    "to_token_index",
    "token_losses",
    "transfer_bound",
    "unassigned",
    "validation_gradient",
    "value_path",
    "value_path_bound",
    "value_propagation",
    "value_propagation_error",
    "value_propagation_pairs",
    "via_t",
    "walk_values",
    "walked",
    "wasserstein",
]
