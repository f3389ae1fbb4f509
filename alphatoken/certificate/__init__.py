"""The certificate: every number that a scorer returns, against the oracle (``Scorer.verify``).

``certify`` compares every component of what the user gets with ``expected``, which builds labels,
scope, G, V, P, lambda and M anew from the scorer's arguments, by the oracles alone, and says how
far rounding may move each number.

**May import** the scorer, the core and the ``oracle``. ``Scorer.verify`` loads it when called.
**Tests**: ``tests/property/test_certificate.py``: mutants of the core that it must notice.
"""
