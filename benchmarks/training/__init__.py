"""Training runs on a real small model and real rows: policies, noise, seeds, and what they cost.

``python -m benchmarks.training run`` measures cells (one training run each) into a work folder,
``python -m benchmarks.training report`` writes docs/results.json and docs/results.md from them.
The model and the rows come from the folder that ALPHATOKEN_DATA names.
"""
