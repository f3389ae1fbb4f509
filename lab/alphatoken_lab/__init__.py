"""AlphaToken's lab: published methods, grids of them, evaluation, and the paper's tables.

- ``methods``: what others choose tokens or rows by, as policies of ``alphatoken``'s trainers.
- ``measure``: losses, tasks and answers of a model; cost of its training.
- ``runner``: a grid of methods and seeds, each cell trained and measured in a process of its own.
- ``paper``: the paper's tables and figures as data, and how results are laid out as they are there.
- ``commands``: ``alphatoken-lab policies``, ``compare``, ``evaluate``, ``merge``, ``paper``.

Nothing in ``alphatoken`` imports this package: its trainers find a method by an entry point.
"""

__version__ = "0.2.0"
