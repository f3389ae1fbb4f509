"""Operator mutants, sampled over the syntax trees of the library: ``python -m tests.sampled``."""
