"""Diagnostics: how far values can be trusted on the user's own model.

**The diagnostics** (``alphatoken diagnose NAME``; ``registry`` lists them): one file each.

- ``estimators``: every estimator against exact values, at its price. ``utility``: predicted against
  actual change of the loss after one step (eq. local_utility_def). ``value_propagation``: how much
  of the flow between tokens Value-Propagation sees (eq. app_value_path_bound).
- ``fisher``: whether the proxy ranks as real retention data would (eq. fisher_proxy).
  ``drift``: how far fine-tuning moved what must not be forgotten.
- ``sensitivity``, ``stability``, ``arithmetic``, ``coverage``, ``heatmap``: settings, noise,
  dtypes, what kept tokens cover, and which tokens of a text are valued.

Each has ``Options`` and ``diagnose(subject, options)``, which goes the same way in all: rows of the
``subject`` are drawn and valued (``valuing``: one engine, any settings, any directions), compared
(``statistics``), put into tables, and ``subject.conclude`` makes these a
:class:`~alphatoken.diagnose.diagnosis.Diagnosis`: an answer, tables, and figures, which
``figures`` draws as they are declared. ``page`` makes one HTML page of all; ``rounds`` keeps
a diagnosis to a time.

**May import** ``scorer`` and the rooms below, ``data``, ``report``, and the ``oracle``, which
otherwise only tests and benchmarks may; no trainer. **Tests**: planted cases with known answers in
``tests/property/test_diagnose_*.py``.
"""
