"""Oracles: slow, obvious, exact. They import nothing of the library except its errors.

Each is plain per-token autograd or a loop over the formula, shifts labels itself, and is handed the
model, a forward callable and the scored modules, so that it can share no mistake with the code that
it checks. All are meant for small models in float64; none is fast.

- ``gradients``: one ``autograd.grad`` a token, the ground of every other oracle.
- ``influence``: the influence matrix Psi and its exact readouts, and Psi over the tensors of
  mixtures of experts, by a copy of them for every position; ``readouts``: every value that the
  library returns, on a model whose attention is split.
- ``propagation``: Value-Propagation and the paper's causal decomposition in loops
  (eq. phi_tgt_causal, causal_decomp); ``jacobian``: the exact Jacobian of one attention layer, with
  the score path, and the bound of what is left out (eq. app_score_path, app_value_path_bound).
- ``delta_net``: gated delta nets position by position, their coefficients on values, and the bound
  of what Value-Propagation leaves out there.
- ``enumeration``: the Fisher of a sequence model summed over every response, and the Wasserstein
  bound of what it differs by between prompts; ``retention``: the retention side and the bound of
  its proxy, term by term.
- ``preference``: DPO written again from its definition. ``composite``: the direction
  ``M = P o (G + lambda V)`` built anew from what the user gave (eq. V_layer).
- ``utility``: what a label is truly worth, by taking the step with it and without it
  (eq. local_utility_def), and over every coalition.
- ``run``: the derivative of the last validation loss by every token's weight in every step of a
  run, through all steps of SGD or AdamW; the ledger of its steps; and walks, on a copy that is
  trained on the validation rows: what a token's loss falls by, label values and curvature along.
- ``scope``: what is scored, found again from the model alone.

**May import** ``errors`` alone. **Read by** ``diagnose``, ``benchmarks`` and the tests only: the
estimators never see it. **Checked by** finite differences, and oracle against oracle
(``tests/property/test_oracle*.py``).
"""
