"""Entry point of ``python -m alphatoken_lab.commands``."""

from alphatoken_lab.commands import main

raise SystemExit(main())
