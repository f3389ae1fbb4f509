"""The measurements against peers, on the CPU. Each yields rows as ``benchmarks.cases`` does.

Two keys more: ``agreement`` (largest difference from our exact value, over the largest value) and
``correlation`` (Spearman of the peer's values with the exact label values of the same layers).

    python -m benchmarks.peers.cases NAME --threads 2

prints, as JSON, the peak memory of one side in a fresh process, above what it held before the work;
NAME is a peer's, or ``ours:ESTIMATOR``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from alphatoken import Scorer, ScorerConfig
from alphatoken.diagnose.statistics import spearman
from alphatoken.model.batch import label_mask
from benchmarks.data import MODELS
from benchmarks.measure import Run, alternate, timed
from benchmarks.pages import measured, number, table
from benchmarks.peak import fresh_mib, peak_mib
from benchmarks.peers import autograd, bergson_peer, kronfluence_peer
from benchmarks.peers.agreement import (
    OURS,
    Agreement,
    agreement,
    in_double,
    ours,
    reference,
    tokenwise,
)
from benchmarks.peers.peer import (
    DESCRIPTION,
    LAYERS,
    Peer,
    Work,
    random_rows,
    standard,
    standard_model,
    started,
)
from benchmarks.peers.peer import Run as PeerRun

Row = dict[str, Any]

ALL = (*autograd.PEERS, *kronfluence_peer.PEERS, *bergson_peer.PEERS)
"""All peers, in the order of the rows."""

BY_NAME = {peer.name: peer for peer in ALL}

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
    work = standard()
    exact = in_double(work)
    for peer in present():
        name = f"peer_time/{peer.name}"
        try:
            yield {"name": name, "size": DESCRIPTION, **_timed(peer, work, exact)}
        except Exception as error:
            yield failed(name, DESCRIPTION, error)


def _timed(peer: Peer, work: Work, exact: Work) -> Row:
    score = ours(work, OURS[peer.estimand])
    with started(peer, work) as value:
        peer_values = value()
        verdict = agreement(peer, work, peer_values, exact)
        repeats = 3 if timed(value) > SLOW else 7
        times = alternate(score, value, repeats=repeats)
    return {
        **times,
        "floor": 1.0,
        "agreement": verdict.error,
        "correlation": verdict.correlation,
        "note": f"ours: {OURS[peer.estimand]}; {peer.computes}; {verdict}",
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
            yield failed(name, DESCRIPTION, error)
            continue
        yield {
            "name": name,
            "size": DESCRIPTION,
            "ours": own,
            "other": other,
            "ratio": own / other,
            "floor": 1.0,
            "note": f"MiB; ours: {OURS[peer.estimand]}; {peer.computes}",
        }


@cache
def _peak(name: str) -> float:
    return fresh_mib("benchmarks.peers.cases", name, device=torch.device("cpu"))


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
                peer_values = value()
            verdict = agreement(peer, work, peer_values, exact)
            other = spearman(tokenwise(peer_values, work, peer.estimand)[mask], utility)
            yield _correlated(peer, kind, work, verdict, (own, other))


def _correlated(
    peer: Peer, kind: str, work: Work, verdict: Agreement, correlations: tuple[float, float]
) -> Row:
    rows, length = work.batch["labels"].shape
    own, other = correlations
    return {
        "name": f"peer_correlation/{peer.name}",
        "size": f"{kind} text, 260 K decoder, K={work.layers}, {rows} x {length} tokens, "
        f"{len(work.validation)} validation batches",
        "ours": own,
        "other": other,
        "ratio": own / other if other else math.nan,
        "floor": 1.0,
        "agreement": verdict.error,
        "correlation": verdict.correlation,
        "note": "Spearman with first-order utility (label over all parameters), ours: label; "
        f"{peer.computes}; {verdict}",
    }


def real(folder: Path, kind: str) -> Work:
    """The 260 K decoder on rows of one kind of text; two validation batches."""
    small = MODELS["small"]
    model, tokenizer = small.load(), small.tokenizer()
    texts = rows_of(folder, kind)
    held_out = batch_of(tokenizer, texts[120:], 16)
    halves = [{key: part[i : i + 8] for key, part in held_out.items()} for i in (0, 8)]
    return Work(model, batch_of(tokenizer, texts, 4), halves, layers=3)


def _utility(work: Work) -> torch.Tensor:
    """Label values over all parameters: each token's first-order utility."""
    config = ScorerConfig("label", layers="all", parameters="all", derivative="forward_mode")
    return Scorer(work.model, list(work.validation), None, config).score(work.batch).total


CASES = (peer_time, peer_memory, peer_correlation)


LENGTH, ROWS, VALIDATION = 150, 6, 16


def rows_of(folder: Path, kind: str) -> list[str]:
    """Text rows: stories, or question and answer."""
    name, keys = {
        "near": ("tinystories/stories.jsonl", ("text",)),
        "far": ("gsm8k/train.jsonl", ("question", "answer")),
    }[kind]
    with open(folder / name, encoding="utf-8") as file:
        return ["\n".join(json.loads(line)[k] for k in keys) for line in file]


def batch_of(tokenizer: Any, texts: list[str], count: int) -> dict[str, torch.Tensor]:
    """The first ``count`` texts long enough, cut to one length; every token is a response token."""
    encoded = (tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in texts)
    ids = torch.tensor([i for i in encoded if len(i) == LENGTH][:count])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


# --- in a fresh process -------------------------------------------------------------------------


@contextmanager
def side(name: str, work: Work) -> Iterator[PeerRun]:
    """A peer, or ours, set up for this work."""
    if not name.startswith("ours:"):
        with started(BY_NAME[name], work) as run:
            yield run
        return
    score = ours(work, name.removeprefix("ours:"))
    yield lambda: score().total


def memory(name: str) -> float:
    """Peak MiB of the whole work, after a tiny run: what libraries keep for good is no part."""
    model = standard_model()
    tiny = random_rows(1, 8, 9)
    with side(name, Work(model, tiny, [tiny], LAYERS)) as run:
        run()
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    before = int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    with side(name, standard(model, disposable=True)) as run:
        run()
    return peak_mib() - before


def main() -> None:
    """Do one thing and print the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps({"mib": memory(options.name)}))


# --- the table of docs/peers.md -----------------------------------------------------------------


def tables() -> str:
    """A line a peer: agreement, time and memory of ours over its own, and how it ranks tokens."""
    rows, lines = measured(), []
    for peer in ALL:
        own = {
            kind: [row for row in rows if row["name"] == f"peer_{kind}/{peer.name}"]
            for kind in ("time", "memory", "correlation")
        }
        time = _only(own["time"])
        lines.append(
            (
                f"`{peer.name}`",
                f"{time['agreement']:.0e}" if time else "–",
                number(time["ratio"] if time else None),
                number((_only(own["memory"]) or {}).get("ratio")),
                *(number(row["other"]) for row in own["correlation"]),
            )
        )
    head = ("peer", "differs from ours by", "time: ours / peer", "memory: ours / peer")
    return table((*head, "Spearman, near text", "Spearman, far text"), lines)


def _only(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return rows[0] if rows else None


if __name__ == "__main__":
    main()
