"""Real models as packages, and the main job on one of them: ``python -m alphatoken.demo``."""
