"""Self-evolving Token Cleaning: each round's model is the reference of the next.

    theta_0 = FT(theta_base, D_0, all tokens)
    theta_t = FT(theta_(t-1), the best tokens of D_t by  l(theta_base) - l(theta_(t-1)))

Round 0 has no reference yet. The last round is the run itself; those before it are trained on the
way, by the same trainer with the same arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from alphatoken.errors import ConfigError, DataError
from alphatoken.support.resume import weights_digest
from alphatoken.support.storage import write_json
from alphatoken.train.documents import rows_fingerprint
from alphatoken.train.policies.standard import Standard
from alphatoken.train.policies.trained_weights import load_copy, save_weights, weights_folder
from alphatoken.train.policy import PolicyStage
from alphatoken_lab.methods.static import keep_best, model_losses
from alphatoken_lab.methods.static_mask import GivenTable
from alphatoken_lab.methods.token_table import TokenTable

__all__ = ["Round", "RoundsBefore", "excess_losses", "self_evolving"]

Rows = Sequence[Mapping[str, Any]]
Train = Callable[[Path | None, Rows, TokenTable | None, Path], None]
Load = Callable[[Path], Any]
_COUNTS = "counts.json"


def excess_losses(stage: PolicyStage, base: Any, reference: Any) -> TokenTable:
    """Columns ``base`` and ``reference``: -log p of every training token under both models."""
    return model_losses(stage, base, "base").join(model_losses(stage, reference, "reference"))


@dataclass(frozen=True)
class Round:
    """One finished round of self-evolving cleaning.

    Attributes:
        number: from 0.
        rows: (first, one past the last) of the training rows.
        folder: where its model is.
        tokens: response tokens of its rows.
        kept: those trained on; all in round 0.
    """

    number: int
    rows: tuple[int, int]
    folder: Path
    tokens: int
    kept: int


def self_evolving(
    stage: PolicyStage,
    train: Train,
    load: Load,
    *,
    rounds: int = 5,
    ratio: float = 0.6,
    rounding: str = "floor",
) -> list[Round]:
    """All rounds, around any trainer; :class:`RoundsBefore` is for the trainers of this library.

        theta_0 = FT(theta_base, D_0, all tokens)
        theta_t = FT(theta_(t-1), the top floor(rho N_t) tokens of D_t by
                     s = l(theta_base) - l(theta_(t-1)))               t = 1 .. rounds - 1

    ``D_0 .. D_(rounds-1)`` are consecutive parts of the rows; sizes differ by one at most. The base
    stays fixed in the score. A finished round is in ``stage.folder/round-<t>``: a run that was
    killed goes on with the round that was not finished, and refuses rounds made for other rows,
    another base or other settings.

    Args:
        stage: base model (``model``), all rows, batches, the folder.
        train: (folder of the model to start from, or None for the base; rows; table with the column
            ``keep``, or None for all tokens; folder) -> trains and saves the model in that folder.
        load: (folder) -> the model saved there, for scoring.
        rounds: parts of the data, 5 as published.
        ratio: rho.
        rounding: of rho N_t, "floor" as published.

    Returns:
        The rounds; the last one's folder holds the result.

    Raises:
        ConfigError: fewer rows than rounds, or fewer than 2 rounds.
        DataError: a round in the folder is of another run.

    Source: UCSC-REAL/TokenCleaning, ``self_evolving_cleaning.sh`` (which does not run as shipped).
    """
    made_of = _made_of(stage, rounds, ratio, rounding)
    return _run_rounds(stage, train, load, made_of, rounds)


def _made_of(stage: PolicyStage, rounds: int, ratio: float, rounding: str) -> dict[str, Any]:
    """Settings on which every round of a run depends.

    Raises:
        ConfigError: fewer rows than rounds, or fewer than 2 rounds.
    """
    if rounds < 2 or len(stage.rows) < rounds:
        raise ConfigError(
            "self-evolving cleaning takes at least 2 rounds, and a row for each",
            got=f"{rounds} rounds, {len(stage.rows)} rows",
        )
    return {
        "model": weights_digest(stage.model),
        "data": rows_fingerprint(stage.rows),
        "rounds": rounds,
        "ratio": ratio,
        "rounding": rounding,
    }


def _run_rounds(
    stage: PolicyStage, train: Train, load: Load, made_of: Mapping[str, Any], until: int
) -> list[Round]:
    """The rounds before ``until``; those that are finished are read from their folders."""
    bounds = part_bounds(len(stage.rows), made_of["rounds"])
    done: list[Round] = []
    for t in range(until):
        folder = Path(stage.folder) / f"round-{t}"
        round_ = _finished(folder, made_of)
        if round_ is None:
            before = done[-1].folder if done else None
            round_ = _round(stage, train, load, t, (bounds[t], bounds[t + 1]), before, made_of)
        done.append(round_)
    return done


def part_bounds(rows: int, rounds: int) -> list[int]:
    """Start of each round's rows, and the end."""
    return [rows * t // rounds for t in range(rounds + 1)]


def _round(
    stage: PolicyStage,
    train: Train,
    load: Load,
    number: int,
    rows: tuple[int, int],
    before: Path | None,
    made_of: Mapping[str, Any],
) -> Round:
    """Score one part with the base against the last round's model, and train on what is kept."""
    folder = Path(stage.folder) / f"round-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    part = [stage.rows[i] for i in range(*rows)]
    table: TokenTable | None = None
    tokens = kept = 0
    if before is not None:
        table = excess_losses(replace(stage, rows=part, folder=folder), stage.model, load(before))
        score = table.columns["base"] - table.columns["reference"]
        keep = keep_best(table, score, float(made_of["ratio"]), str(made_of["rounding"]))
        table = table.with_columns(keep=keep)
        tokens, kept = table.tokens, int(keep.sum())
    train(before, part, table, folder)
    content = {"made_of": made_of, "rows": rows, "tokens": tokens, "kept": kept}
    write_json(folder / "round.json", content)
    return Round(number, rows, folder, tokens, kept)


def _finished(folder: Path, made_of: Mapping[str, Any]) -> Round | None:
    """The round in this folder if it was finished.

    Raises:
        DataError: it is of another run, or cannot be read.
    """
    file = folder / "round.json"
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        first, last = content["rows"]
        differing = [k for k in made_of if content["made_of"].get(k) != made_of[k]]
        number = int(folder.name.rpartition("-")[2])
        round_ = Round(number, (first, last), folder, content["tokens"], content["kept"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"the file '{file}' cannot be read", got=str(problem)) from problem
    if differing:
        raise DataError(
            f"the finished round in '{folder}' is of a run with another {', '.join(differing)}",
            got="; ".join(f"{k}: {content['made_of'].get(k)} there" for k in differing),
            why="its model was trained on other tokens",
            remedy="give another folder, or remove it",
        )
    return round_


# --- with the trainers of this library ------------------------------------------------------------


@dataclass(frozen=True)
class RoundsBefore:
    """Results of the rounds before the last.

    Attributes:
        rows: of the last round, to train on.
        folder: of the round before it, with its model.
        tokens: response tokens that these rounds trained on, over all their steps.
        kept: of them, with a weight other than 0.
    """

    rows: range
    folder: Path
    tokens: int
    kept: int

    @classmethod
    def run(cls, stage: PolicyStage, rounds: int, ratio: float, rounding: str) -> RoundsBefore:
        """Run them, or find them finished.

        They are kept under a digest of base, rows, settings and the trainer's arguments; after a
        kill, finished rounds are not run again.

        Args:
            stage: of the run; its trainer trains copies of the model.
            rounds: all of them, the last included.
            ratio: rho.
            rounding: see ``self_evolving``.

        Raises:
            ConfigError: a trainer that cannot train a copy, or fewer rows than rounds.
        """
        if stage.train is None:
            raise ConfigError(
                "this trainer cannot train the rounds of self-evolving Token Cleaning",
                got=f"rounds={rounds}",
                why="earlier rounds train a copy of the model, in one process with whole weights",
                remedy="one process; or self_evolving() with a trainer of your own",
            )
        made_of = _made_of(stage, rounds, ratio, rounding)
        folder = weights_folder(
            stage, f"token-cleaning-{rounds}-rounds", made_of["model"], made_of["data"],
            ratio, rounding,
        )  # fmt: skip
        done = _run_rounds(
            replace(stage, folder=folder), partial(_train_copy, stage), partial(load_copy, stage),
            made_of, until=rounds - 1,
        )  # fmt: skip
        counts = [json.loads((one.folder / _COUNTS).read_text(encoding="utf-8")) for one in done]
        return cls(
            rows=range(*part_bounds(len(stage.rows), rounds)[-2:]),
            folder=done[-1].folder,
            tokens=sum(count["tokens"] for count in counts),
            kept=sum(count["kept"] for count in counts),
        )


def _train_copy(
    stage: PolicyStage, before: Path | None, rows: Rows, table: TokenTable | None, folder: Path
) -> None:
    """``train`` of ``self_evolving``: a copy of the model, trained by the trainer's own kind."""
    tokens = kept = 0

    def record(mask: Tensor, weights: Tensor) -> None:
        nonlocal tokens, kept
        tokens, kept = tokens + int(mask.sum()), kept + int((weights * mask != 0).sum())

    assert stage.train is not None
    trained = stage.train(
        rows, {},
        model=None if before is None else load_copy(stage, before),
        policy=Standard() if table is None else GivenTable(table),
        record=record,
    )  # fmt: skip
    save_weights(trained, folder)
    write_json(folder / _COUNTS, {"tokens": tokens, "kept": kept})
