"""``python -m alphatoken.cli``."""

from __future__ import annotations

import sys

from alphatoken.cli import main

sys.exit(main())
