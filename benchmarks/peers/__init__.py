"""AlphaToken beside other ways to value training data, on the same work, agreement checked first.

What each peer computes, and how it is run: docs/peers.md.
"""
