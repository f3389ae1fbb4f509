"""Static passes: one forward over the training rows, and a file of each token's numbers.

The rows go through the model a shard at a time. Each finished shard is a file, so a pass that was
killed goes on where it was; the finished table is one file whose name holds a digest of all that
it depends on (weights, rows, settings), and whose header is checked again when it is read. Several
processes of one launch share the shards among them. The model is left as it was: evaluation mode
and the absence of gradients end with the pass.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.errors import ConfigError, DataError, InputError, NumericalError
from alphatoken.model.batch import (
    IGNORE,
    PreferenceBatch,
    label_mask,
    labels_of_all,
    predicted_labels,
)
from alphatoken.model.forward import evaluation_mode, response_losses
from alphatoken.model.protocol import find_adapter
from alphatoken.select.masks import keep_count
from alphatoken.support.progress import Tracker
from alphatoken.support.resume import weights_digest
from alphatoken.train.ledger import Document, rows_fingerprint, split_batch
from alphatoken.train.policy import PolicyStage
from alphatoken_lab.methods.token_table import TableHeader, TokenTable

ROWS_PER_SHARD = 256
_POLL = 0.2  # seconds

Array = NDArray[Any]
Measure = Callable[[Any, Mapping[str, Tensor], Tensor], Mapping[str, Tensor]]
"""(model, inputs of a forward, labels (b, t)) -> (b, t) numbers by name, at token indices."""


def measure_losses(model: Any, inputs: Mapping[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """``loss``: -log p of every response token, (b, t), in float32 or wider."""
    return {"loss": response_losses(find_adapter(model), inputs, labels)}


def model_losses(stage: PolicyStage, model: nn.Module, column: str) -> TokenTable:
    """-log p of every response token of the training rows under ``model``.

        l_t = -log p(y_t | x, y_<t)

    Args:
        stage: rows, batches, the folder of the cache, progress.
        model: any decoder with the tokenizer of the rows; on its own device, in its own precision.
        column: name of the column.

    Returns:
        A table with one column, float32 or wider. Exact up to rounding. Policies that ask for the
        same model's share the cached pass.

    Raises:
        as :func:`static_pass`. Oracle: ``alphatoken.oracle.gradients.token_losses``.
    """
    table = static_pass(stage, model, ("loss",), measure_losses, "losses")
    return replace(table, columns={column: table.columns["loss"]})


def static_pass(
    stage: PolicyStage,
    model: nn.Module,
    columns: Sequence[str],
    measure: Measure,
    cache_key: str,
    *,
    settings: Mapping[str, Any] | None = None,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> TokenTable:
    """Apply ``measure`` to every response token of the training rows; cached and resumable.

    Rows of a shard are sorted by length into batches of ``stage.batch_size``; the documents of
    packed rows are read each by itself. Without gradients, in evaluation mode, on the device and
    in the precision of ``model``. Processes of one launch (torch.distributed) each take every
    world-th shard and wait for the others' files.

    Args:
        stage: rows, batches, the folder of the cache, progress.
        model: what is measured; its weights are part of the cache's name.
        columns: names that ``measure`` gives.
        measure: see ``Measure``.
        cache_key: beginning of the file's name: one a kind of pass.
        settings: what else the numbers depend on, plain JSON values.
        rows_per_shard: rows between two files.

    Raises:
        ConfigError: no rows.
        DataError: no response token in any row, or a file that cannot be read or written, or was
            made for other rows or another model.
        NumericalError: a NaN or Inf, naming row and token.
    """
    rows = _unpacked(stage.rows)
    if not rows:
        raise ConfigError("a static pass needs training rows", got="0 rows")
    header = TableHeader(
        kind=cache_key,
        model=weights_digest(model),
        data=rows_fingerprint(rows),
        settings={"columns": list(columns), "rows_per_shard": rows_per_shard, **(settings or {})},
    )
    shards = {
        f"{start // rows_per_shard:06d}": range(start, min(start + rows_per_shard, len(rows)))
        for start in range(0, len(rows), rows_per_shard)
    }

    def write(shard: str, file: Path, report: Report) -> None:
        chosen = {i: rows[i] for i in shards[shard]}
        with evaluation_mode(model), torch.no_grad():
            documents = list(_measured(stage, model, measure, columns, chosen, report))
        documents.sort(key=lambda entry: entry[0])
        numbers = {name: [own[name] for _, _, own in documents] for name in columns}
        TokenTable.of_documents([one for _, one, _ in documents], numbers, header).save(file)

    def join(files: Sequence[Path]) -> None:
        TokenTable.merge([TokenTable.load(part, header) for part in files]).save(file)

    file = pass_file(stage, header)
    if not file.exists():
        label = f"Pass over the training rows ({header.kind})"
        shared_pass(stage, file, {name: len(own) for name, own in shards.items()}, write, join,
                    label=label)  # fmt: skip
    table = TokenTable.load(file, header)
    if not table.tokens:
        raise DataError(
            "no training row has a response token",
            got=f"{len(rows)} rows",
            remedy="check the prompt/completion split and max_length",
        )
    return table


def _unpacked(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """A row for each document; the rows themselves where none is packed."""
    if not any(len(row.get("seq_lengths") or ()) > 1 for row in rows):
        return rows
    documents: list[Mapping[str, Any]] = []
    for row in rows:
        start, labels = 0, row.get("labels") or row["input_ids"]
        for length in row.get("seq_lengths") or (len(row["input_ids"]),):
            part = slice(start, start + length)
            documents.append({"input_ids": row["input_ids"][part], "labels": labels[part]})
            start += length
    return documents


def _measured(
    stage: PolicyStage,
    model: nn.Module,
    measure: Measure,
    columns: Sequence[str],
    rows: Mapping[int, Mapping[str, Any]],
    report: Report,
) -> Iterator[tuple[tuple[int, int], Document, dict[str, Array]]]:
    """((row, branch), document, columns) of each document of the rows, the longest rows first."""
    order = sorted(rows, key=lambda i: (-_length(rows[i]), i))
    for first in range(0, len(order), stage.batch_size):
        chosen = order[first : first + stage.batch_size]
        inputs, labels = row_inputs(stage, [rows[i] for i in chosen], device_of(model))
        mask = label_mask(labels)
        if bool(mask.any()):
            measured = measure(model, inputs, labels)
            forward: dict[str, Array] = {
                name: measured[name].detach().cpu().flatten().numpy() for name in columns
            }
            for document in split_batch(inputs, mask):
                row = chosen[int(document.places[0]) // mask.shape[1] % len(chosen)]
                own = {name: array[document.places] for name, array in forward.items()}
                _require_finite(own, row, document)
                yield (row, document.branch), document, own
        report(first + len(chosen))


def _require_finite(columns: Mapping[str, Array], row: int, document: Document) -> None:
    for name, column in columns.items():
        bad = ~np.isfinite(column)
        if bad.any():
            at = int(document.positions[int(bad.argmax())])
            raise NumericalError(
                f"the static pass found a number that is not finite in column {name}",
                got=f"{column[bad][0]} at training row {row}, token {at}",
                why="a NaN has no rank; the selection would be arbitrary",
                remedy="check the model's weights, and its precision (float16 overflows)",
            )


def _length(row: Mapping[str, Any]) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def row_inputs(
    stage: PolicyStage, rows: Sequence[Mapping[str, Any]], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs of a forward, labels) of rows, on ``device``.

    Preference pairs become [chosen; rejected], with the ``completion_mask`` that marks them so.
    The reference's sequence log-probabilities take no part in a forward.
    """
    if "input_ids" in rows[0]:
        batch = stage.row_batch(rows)
    else:
        blank = {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0}
        batch = stage.row_batch([blank | dict(row) for row in rows])
    if isinstance(batch, PreferenceBatch):
        batch = _stacked(batch)
    tensors = {
        name: tensor.to(device) for name, tensor in batch.items() if isinstance(tensor, Tensor)
    }
    attention = tensors.get("attention_mask")
    if "labels" not in tensors:
        return tensors, labels_of_all(tensors["input_ids"], attention)
    return tensors, predicted_labels(tensors.pop("labels"), attention)


def _stacked(pairs: PreferenceBatch) -> dict[str, Tensor]:
    """[chosen; rejected], padded on the right to one width."""
    width = max(part["input_ids"].shape[1] for part in (pairs.chosen, pairs.rejected))
    fills = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}
    batch = {
        name: torch.cat(
            [
                F.pad(part[name], (0, width - part[name].shape[1]), value=fill)
                for part in (pairs.chosen, pairs.rejected)
            ]
        )
        for name, fill in fills.items()
    }
    batch["completion_mask"] = (batch["labels"] != IGNORE).long()
    return batch


# --- one pass by all processes of a launch --------------------------------------------------------

Report = Callable[[int], None]
"""Told how many rows of a part are done."""


def launch_place() -> tuple[int, int]:
    """Number of this process among those of its launch, and how many there are."""
    grouped = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)


def pass_file(stage: PolicyStage, header: TableHeader) -> Path:
    """File of a finished pass; its name holds a digest of all that it depends on."""
    return Path(stage.folder) / f"{header.kind}-{header.digest()}.safetensors"


def shared_pass(
    stage: PolicyStage,
    file: Path,
    parts: Mapping[str, int],
    write: Callable[[str, Path, Report], None],
    join: Callable[[Sequence[Path]], None],
    *,
    label: str,
) -> None:
    """Make a file of parts: each process of the launch makes its own, the first one joins them.

    A part that is there from an earlier start is left alone, so a kill costs one part a process.

    Args:
        stage: with its progress.
        file: of the whole; returns when it is there.
        parts: rows of each part, by its name.
        write: makes one part: (name, its file, report of rows that are done).
        join: makes the whole of the files of all parts, in their order.
        label: of the progress.

    Raises:
        DataError: the folder of the parts cannot be made.
    """
    rank, world = launch_place()
    folder = file.with_suffix(".parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(
            f"the folder '{folder}' cannot be made",
            got=str(problem),
            remedy="give a folder that can be written to",
        ) from problem
    files = {name: folder / f"{name}.safetensors" for name in parts}
    mine = list(parts)[rank::world]
    missing = [name for name in mine if not files[name].exists()]
    total, left = (sum(parts[name] for name in names) for names in (mine, missing))
    tracker = Tracker(label, total, stage.progress if rank == 0 else False)
    tracker.resume(total - left)
    for name in missing:
        if file.exists():
            break
        done = total - left
        write(name, files[name], lambda rows, done=done: tracker.report(done + rows))  # type: ignore[misc]
        left -= parts[name]
    if rank:
        wait_for([file])
        return
    wait_for(list(files.values()))
    join(list(files.values()))
    shutil.rmtree(folder, ignore_errors=True)


def wait_for(files: Sequence[Path]) -> None:
    """Wait until all files exist; a pass outlasts the patience of collective calls."""
    while not all(file.exists() for file in files):
        time.sleep(_POLL)


# --- selection over the whole data set ------------------------------------------------------------


def keep_best(
    table: TokenTable,
    score: Array,
    ratio: float,
    rounding: str = "ceil",
) -> Array:
    """(N,) True for the best ``ratio`` of all tokens, by score, higher first.

    Exactly ``ceil(ratio N)`` or ``floor(ratio N)`` in exact arithmetic; among equal scores the
    earlier (document, position) wins. A document that several rows share counts once.

    Args:
        table: of the tokens.
        score: (N,) one number a token.
        ratio: rho in (0, 1].
        rounding: "ceil" or "floor".

    Raises:
        InputError: other options, or a score of another length.
        NumericalError: a score that is not finite.
        DataError: nothing is kept.
    """
    count = keep_count(ratio, table.tokens, rounding=rounding)
    if len(score) != table.tokens:
        raise InputError(
            "the policy must give one score for each token",
            got=f"{len(score)} scores, {table.tokens} tokens",
        )
    if not np.isfinite(score).all():
        token = int((~np.isfinite(score)).argmax())
        raise NumericalError("the score of a token is not finite", got=f"{score[token]} at {token}")
    keep = np.zeros(table.tokens, bool)
    keep[np.argsort(-score, kind="stable")[:count]] = True  # within ties the table's order
    return require_selection(keep, f"ratio {ratio}, rounding {rounding!r}")


def require_selection(keep: Array, rule: str) -> Array:
    """``keep``, unless it keeps nothing.

    Raises:
        DataError: naming the rule.
    """
    if not keep.any():
        raise DataError(
            "the selection keeps no token of the training rows",
            got=f"{rule}, {len(keep)} response tokens",
            why="there would be nothing to train on",
            remedy="loosen the rule, or use the mode 'budget'",
        )
    return keep
