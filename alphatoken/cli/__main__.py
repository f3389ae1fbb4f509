"""Entry point of ``python -m alphatoken.cli``."""

from __future__ import annotations

import sys

from alphatoken.cli import main

if __name__ == "__main__":
    sys.exit(main())
