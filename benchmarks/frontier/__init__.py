"""``python -m benchmarks.frontier``: how well tokens are ranked, at what price, on real models."""
