"""Grids of cells: read from YAML, run, kept, resumed, and tabulated from JSON.

1. ``grid_file`` reads a grid; ``methods``: what can be compared, by name; ``grid``: its cells.
2. ``running``: each cell is a process of its own (``cell``), started by one of ``launchers``, which
   trains, measures and writes its result last and whole, so that a grid that was killed goes on.
3. ``records``: what the cells measured; ``tables``: tables and the page of them.

**Tests**: ``tests/lab/test_compare.py``, ``test_tuning.py``.
"""
