"""All diagnostics on three models, side by side: ``python -m benchmarks.diagnoses``."""
