"""Names of the estimators, and which of them have what in common; nothing here imports torch."""

__all__ = ["CAPTURED", "ESTIMATORS", "FORMS", "SELF_ONLY", "SPLIT", "WALK"]

CAPTURED = ("alphatoken", "direct", "path", "paper_literal")
"""Estimators that contract errors at the scored linears with M."""
ESTIMATORS = (*CAPTURED, "label")
"""First-order values: contractions of gradients with M."""
WALK = "walk"
"""Loss differences along a walk; see ``direction.walk``."""
SELF_ONLY = ("alphatoken", "direct")
"""Estimators that need the self-only backward."""
SPLIT = (*SELF_ONLY, "paper_literal")
"""Estimators with a direct and a causal part: they need the attention calls, recorded through the
switchable backward. Path and label have one undivided value."""
FORMS = ("central", "one_sided")
"""Finite differences of ``label``; see ``estimate.differences``."""
