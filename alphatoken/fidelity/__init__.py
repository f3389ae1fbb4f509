"""Where oracle and estimators meet: certificate and diagnostics on the user's own model.

:mod:`alphatoken.fidelity.registry` names the nine diagnostics; each has ``Options`` and
``diagnose(subject, options)``, which returns a :class:`alphatoken.fidelity.diagnosis.Diagnosis`.
"""
