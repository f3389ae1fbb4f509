"""What each layout refuses, asked of real trainers there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alphatoken.errors import AlphaTokenError
from tests.integration.distributed.trainers import sft
from tests.integration.distributed.worker import forget_precision

ASKED: dict[str, tuple[dict[str, Any], ...]] = {
    "ddp": ({"ddp_static_graph": True},),
    "fsdp2": (
        {"estimator": "label", "parameters": "all", "bf16": True},
        {"estimator": "label", "parameters": "all", "preconditioner": "full"},
    ),
    "zero2": ({"preconditioner": "full"},),
    "zero3": ({"preconditioner": "frozen"},),
}


def refusals(layout: str, folder: Path) -> dict[str, str]:
    """Options -> what the trainer says to them, before any work."""
    found = {}
    for options in ASKED[layout]:
        forget_precision(layout)
        try:
            made = sft(layout, folder, retention="none", **options)
        except AlphaTokenError as error:
            found[str(options)] = f"{type(error).__name__}: {error}"
        else:
            found[str(options)] = f"accepted by {type(made).__name__}"
    forget_precision(layout)
    return found
