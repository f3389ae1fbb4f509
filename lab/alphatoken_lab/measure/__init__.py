"""Measures of a model and of its training: losses, tasks, answers, cost.

- ``measures``: what is asked for. ``measuring``: all of it, of one model, answers included.
- ``losses``: rows of files. ``tasks``: those of lm-eval.
- ``selection_cost``: memory and time of choosing tokens. ``pair_watch``: attention's pairs while a
  model trains.

Answers are exported. Who wins is for alpaca_eval to say, and code that a model wrote is for lm-eval
to execute, in a container of the user's; both leave a file that is read here.
**Tests**: ``tests/lab/test_measure.py``, ``test_pair_watch.py``.
"""
