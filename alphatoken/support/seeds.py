"""Seeds of draws, from what names a draw."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^63) from the text of the parts alone: the same in every Python, for ever."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
