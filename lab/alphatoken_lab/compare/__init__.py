"""A grid of methods, modes and seeds on one model and data: run, measured, tabulated.

1. ``methods``: what can be compared, by name. ``grid``: which cells there are, and the models that
   they need first.
2. ``running``: each cell is a process of its own (``cell``), which trains, measures and writes its
   result last and whole; ``folder`` says what is there, so that a grid that was killed goes on.
3. ``evaluate``: losses on held-out rows, tasks of lm-eval (``harness``; ``code_tasks``:
   those that execute code), answers (``generation``) that a judge compares (``judge``).
4. ``tables``, ``page``: results as the paper lays them out.

Code that a model wrote runs in a container that the user names, and nowhere else.

**May import** ``policies``, ``train`` and the rooms below, not ``cli``. **Tests**:
``tests/lab/test_compare.py``, ``test_code_tasks.py``, ``test_judge.py``.
"""
