"""Tables and figures of the paper as data, and how results are laid out as they are there.

``exhibits/NAME.yaml`` says of each what it shows: rows by method, columns by measure, and the
numbers that the paper prints. ``exhibits`` reads them, ``layout`` fills them with what cells of a
grid measured, ``pictures`` draws those that are figures of such numbers, ``rows`` makes the rows of
the laptop scale.

**May import** ``compare`` and what is below it. **Tests**: ``tests/lab/test_paper.py``.
"""
