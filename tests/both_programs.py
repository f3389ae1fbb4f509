"""``alphatoken`` and ``alphatoken-lab`` as one, for tests that go over commands of either."""

from __future__ import annotations

from collections.abc import Sequence

import alphatoken.cli
import alphatoken_lab.commands


def main(words: Sequence[str]) -> int:
    """Run the command by its name; its exit status."""
    program = (
        alphatoken_lab.commands if words[0] in alphatoken_lab.commands.COMMANDS else alphatoken.cli
    )
    return program.main(words)
