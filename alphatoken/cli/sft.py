"""``alphatoken sft``: train with TRL's SFTTrainer and token values."""

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
    from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer

    return run_training("sft", words, AlphaSFTConfig, AlphaSFTTrainer)
