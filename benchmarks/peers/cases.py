"""The measurements against peers, on the CPU. Each yields rows as ``benchmarks.cases`` does.

Two keys more: ``agreement`` (largest difference from our exact value, over the largest value) and
``correlation`` (Spearman of the peer's values with the exact label values of the same layers).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from alphatoken import Scorer, ScorerConfig
from alphatoken.diagnose.statistics import spearman
from alphatoken.model.batch import label_mask
from benchmarks.machine import timed
from benchmarks.measure import Run, alternate
from benchmarks.peak import fresh_mib
from benchmarks.peers import sizes
from benchmarks.peers.agreement import (
    OURS,
    Agreement,
    agreement,
    in_double,
    ours,
    reference,
    tokenwise,
)
from benchmarks.peers.peer import Peer, Work, started
from benchmarks.peers.registry import ALL
from benchmarks.small_rows import batch_of, rows_of

Row = dict[str, Any]

SLOW = 2.0
"""Seconds from which on a peer is timed 3 times instead of 7."""


def present() -> Iterator[Peer]:
    """The peers that can run here; one line on stderr for each of the others."""
    for peer in ALL:
        absent = peer.missing()
        if absent is None:
            yield peer
        else:
            print(absent, file=sys.stderr)


def failed(name: str, size: str, error: Exception) -> Row:
    """The row of a peer that is installed and does not run: no numbers, and the error itself."""
    nothing = dict.fromkeys(("ours", "other", "ratio", "floor"), math.nan)
    return {"name": name, "size": size, **nothing, "note": f"{type(error).__name__}: {error}"}


def peer_time(run: Run) -> Iterator[Row]:
    """Seconds of the whole work, validation side included; agreement is checked first."""
    if run.quick:  # each peer has sizes of its own
        return
    work = sizes.standard()
    exact = in_double(work)
    for peer in present():
        name = f"peer_time/{peer.name}"
        try:
            yield {"name": name, "size": sizes.DESCRIPTION, **_timed(peer, work, exact)}
        except Exception as error:
            yield failed(name, sizes.DESCRIPTION, error)


def _timed(peer: Peer, work: Work, exact: Work) -> Row:
    score = ours(work, OURS[peer.estimand])
    with started(peer, work) as value:
        found = value()
        seen = agreement(peer, work, found, exact)
        repeats = 3 if timed(value) > SLOW else 7
        times = alternate(score, value, repeats=repeats)
    return {
        **times,
        "floor": 1.0,
        "agreement": seen.error,
        "correlation": seen.correlation,
        "note": f"ours: {OURS[peer.estimand]}; {peer.computes}; {seen}",
    }


def peer_memory(run: Run) -> Iterator[Row]:
    """Peak MiB of the same work in a fresh process, above what the warm process held."""
    if run.quick:  # each peer has sizes of its own
        return
    for peer in present():
        name = f"peer_memory/{peer.name}"
        try:
            own, other = _peak(f"ours:{OURS[peer.estimand]}"), _peak(peer.name)
        except RuntimeError as error:
            yield failed(name, sizes.DESCRIPTION, error)
            continue
        yield {
            "name": name,
            "size": sizes.DESCRIPTION,
            "ours": own,
            "other": other,
            "ratio": own / other,
            "floor": 1.0,
            "note": f"MiB; ours: {OURS[peer.estimand]}; {peer.computes}",
        }


@cache
def _peak(name: str) -> float:
    return fresh_mib("benchmarks.peers.child", name, device=torch.device("cpu"))


def peer_correlation(run: Run) -> Iterator[Row]:
    """On a real small model (ALPHATOKEN_DATA): how each peer ranks tokens by their utility."""
    if run.quick:  # each peer has sizes of its own
        return
    folder = os.environ.get("ALPHATOKEN_DATA")
    if not folder:
        print("peer_correlation not run: ALPHATOKEN_DATA is not set", file=sys.stderr)
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for kind in ("near", "far"):
        work = real(Path(folder), kind)
        exact, mask = in_double(work), label_mask(work.batch["labels"])
        utility = _utility(exact)[mask]
        own = spearman(reference(exact, "label")[mask], utility)
        for peer in present():
            with started(peer, work) as value:
                found = value()
            seen = agreement(peer, work, found, exact)
            other = spearman(tokenwise(found, work, peer.estimand)[mask], utility)
            yield _correlated(peer, kind, work, seen, (own, other))


def _correlated(
    peer: Peer, kind: str, work: Work, seen: Agreement, found: tuple[float, float]
) -> Row:
    rows, length = work.batch["labels"].shape
    own, other = found
    return {
        "name": f"peer_correlation/{peer.name}",
        "size": f"{kind} text, 260 K decoder, K={work.layers}, {rows} x {length} tokens, "
        f"{len(work.validation)} validation batches",
        "ours": own,
        "other": other,
        "ratio": own / other if other else math.nan,
        "floor": 1.0,
        "agreement": seen.error,
        "correlation": seen.correlation,
        "note": "Spearman with first-order utility (label over all parameters), ours: label; "
        f"{peer.computes}; {seen}",
    }


def real(folder: Path, kind: str) -> Work:
    """The 260 K decoder on rows of one kind of text; two validation batches."""
    place = folder / "stories260K/transformers"
    model = AutoModelForCausalLM.from_pretrained(place).eval()
    tokenizer = AutoTokenizer.from_pretrained(place)
    texts = rows_of(folder, kind)
    held_out = batch_of(tokenizer, texts[120:], 16)
    halves = [{key: part[i : i + 8] for key, part in held_out.items()} for i in (0, 8)]
    return Work(model, batch_of(tokenizer, texts, 4), halves, layers=3)


def _utility(work: Work) -> torch.Tensor:
    """Label values over all parameters: each token's first-order utility."""
    config = ScorerConfig("label", layers="all", parameters="all", derivative="forward_mode")
    return Scorer(work.model, list(work.validation), None, config).score(work.batch).total


CASES = (peer_time, peer_memory, peer_correlation)
