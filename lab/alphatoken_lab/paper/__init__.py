"""Tables and figures of the paper as data, and how each is made from the cells of a grid.

``exhibits/NAME.yaml`` says of each what it shows: rows by method, columns by measure, and the
numbers that the paper prints. ``exhibits`` reads them and fills them with records, ``work`` plans
their cells and what these need, ``figures`` hands models to a diagnostic or draws a grid's numbers,
``rows`` makes the rows of the laptop scale.

**Tests**: ``tests/lab/test_paper.py``.
"""
