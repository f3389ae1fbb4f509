"""AlphaToken beside other ways to value training data, on the same work, agreement checked first.

What each peer computes, and how it is run: docs/peers.md.
"""

from __future__ import annotations

from benchmarks.peers.cases import CASES

__all__ = ["CASES"]
