"""Value files of rows, of any size, in one process or in many; the command ``score`` is made of it.

* ``options``: :class:`ScoreOptions` says what is valued, who values and what is made of the values;
* ``rows``: what becomes of each row, in any process and from any row on;
* ``queries``: texts in place of validation rows;
* ``job``: all that the values depend on, read and checked, and sealed in the output folder;
* ``blocks``: a stretch of rows to one value file; ``engines``: who values which of them;
* ``results``: selection over all files, summary, page; ``kept_rows``: rows to train on, and both
  ends; ``notes``: sentences about all of these;
* ``run``: :func:`score_corpus` does all of this; ``folder``: what a folder of results holds.

It knows no command line. **Tests**: ``tests/integration/test_corpus.py``.
"""
