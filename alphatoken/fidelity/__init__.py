"""Diagnostics: how far values can be trusted on the user's own model.

**The diagnostics** (``alphatoken diagnose NAME``; ``registry`` lists them): one file each.

- ``estimators``: every estimator against exact values, at its price. ``utility``: predicted against
  actual change of the loss after one step (eq. local_utility_def). ``value_propagation``: how much
  of the flow between tokens Value-Propagation sees (eq. app_value_path_bound).
- ``fisher``: whether the proxy ranks as real retention data would (eq. fisher_proxy).
  ``drift``: how far fine-tuning moved what must not be forgotten.
- ``sensitivity``, ``stability``, ``coverage``, ``heatmap``: settings, noise, what kept tokens
  cover, and which tokens of a text are valued.

Each has ``Options`` and ``diagnose(subject, options)``, which returns a
:class:`~alphatoken.fidelity.diagnosis.Diagnosis` of a model, rows and an objective (``subject``):
an answer of four fields, tables, and figures, which ``figures`` draws as they are declared.
``intervals`` says how far a number can be trusted, ``page`` makes one HTML page of all; ``rounds``
keeps a diagnosis to a time. The other files compute: directions and decisions (``per_row``,
``resampling``, ``decisions``), tokens sent one by one (``tokenwise``), steps taken and taken back
(``stepping``).

**May import** ``scorer`` and the rooms below, ``data``, ``report``, and the ``oracle``, which
otherwise only tests and benchmarks may; no trainer. **Tests**: planted cases with known answers in
``tests/property/test_fidelity_*.py``.
"""
