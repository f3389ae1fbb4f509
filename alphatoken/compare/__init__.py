"""A grid of methods, modes and seeds on one model and data: run, measured, tabulated."""
