"""What one CUDA GPU is asked without a network: ``make gpu``.

``--device cpu`` runs the same questions in small on a CPU, which shows that they run.
"""
