"""Everything that one CUDA GPU is asked, in ten minutes: ``make gpu``.

It runs without a network. ``--device cpu`` runs the same questions in small on a CPU, which shows
that they run and measures nothing.
"""
