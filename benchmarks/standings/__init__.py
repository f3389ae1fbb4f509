"""How well values predict what training does: ``python -m benchmarks.standings``."""
