"""What a model card says of a run: library, paper, settings, and the share of tokens kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

from alphatoken import __version__
from alphatoken.train.fields import AlphaFields

__all__ = ["TAG", "add_section", "card_section", "kept_share"]

TAG = "alphatoken"

_HEADING = "## Token values"
_PAPER = (
    "Qing Liu, Ou Wu and Yi Du: *AlphaToken: Decoupling Adaptation and Stability for Path-Aware "
    "Response Token Valuation in LLM Post-Training*, 2026."
)
_ALWAYS = ("policy", "keep_ratio", "estimator", "score_layers", "validation_mode", "retention")
"""Settings that are named in any case; others where they are not the default."""
_PRIVATE = ("policy_cache", "fisher_cache")
"""Folders of the machine: of no use to a reader."""
_LOCAL = "a local file or folder"


def kept_share(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the response tokens that was trained on, over all logs of a run; None without any.

    The kept tokens of all logs over their response tokens: a log of few tokens counts for little.
    """
    logs = [log for log in history if "alpha/kept_share" in log]
    tokens = [float(log.get("alpha/response_tokens", 1.0)) for log in logs]
    if not sum(tokens):
        return None
    kept = (n * float(log["alpha/kept_share"]) for n, log in zip(tokens, logs, strict=True))
    return sum(kept) / sum(tokens)


def card_section(options: Any, history: Sequence[Mapping[str, Any]]) -> str:
    """The section in Markdown. Quotes no row.

    Args:
        options: the trainer's configuration.
        history: ``log_history`` of the trainer's state.
    """
    share = kept_share(history)
    trained = "" if share is None else f" {share:.1%} of the response tokens were trained on."
    lines = [
        _HEADING,
        "",
        "The gradient was weighted by what training on each response token is worth, with "
        f"AlphaToken {__version__} (`alphatoken`).{trained}",
        "",
        "| setting | value |",
        "|---|---|",
    ]
    for one in fields(AlphaFields):
        value = getattr(options, one.name)
        if one.name in _ALWAYS or (value != one.default and one.name not in _PRIVATE):
            lines.append(f"| `{one.name}` | `{_without_paths(value)}` |")
    return "\n".join([*lines, "", f"Paper: {_PAPER}", ""])


def _without_paths(value: Any) -> Any:
    """An option's value, with names of files and folders of this machine taken out."""
    if isinstance(value, str) and value.lstrip().startswith("{"):  # policy_options as JSON text
        value = json.loads(value)
    if isinstance(value, Mapping):
        return {name: _without_paths(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(part) for part in value]
    if isinstance(value, PurePath):
        return _LOCAL
    local = isinstance(value, str) and (
        value.startswith((".", "~"))
        or os.path.isabs(value)
        or (os.sep in value and os.path.exists(value))  # else a name on the hub
    )
    return _LOCAL if local else value


def add_section(card: Path, section: str) -> None:
    """Put the section at the end of a card that is there, in place of one of an earlier call."""
    if card.is_file():
        before = card.read_text(encoding="utf-8").partition(f"\n{_HEADING}\n")[0].rstrip()
        card.write_text(f"{before}\n\n{section}", encoding="utf-8")
