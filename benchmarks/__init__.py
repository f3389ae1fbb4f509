"""Benchmarks: ratios measured side by side in one run, floors computed beside them."""
