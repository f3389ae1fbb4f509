"""``alphatoken dpo``: train with TRL's DPOTrainer and token values."""

from __future__ import annotations

from collections.abc import Sequence

from alphatoken.cli.training import require_libraries, run_training

__all__ = ["run"]


def run(words: Sequence[str]) -> int:
    """Run the command; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    require_libraries()
    from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer

    return run_training("dpo", words, AlphaDPOConfig, AlphaDPOTrainer)
