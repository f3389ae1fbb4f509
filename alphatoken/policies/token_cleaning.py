"""Token Cleaning: keep the tokens that a fine-tuned reference finds easier than the base model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from alphatoken.errors import ConfigError, DataError
from alphatoken.policies.static import keep_best, model_losses
from alphatoken.policies.static_mask import StaticMask, require_model
from alphatoken.storage import replacing, weights_digest
from alphatoken.train.policy import Needs, PolicySettings, PolicyStage
from alphatoken.train.token_table import TokenTable, rows_fingerprint

__all__ = ["Round", "TokenCleaning", "excess_losses", "self_evolving"]

Array = NDArray[Any]
Rows = Sequence[Mapping[str, Any]]


def excess_losses(stage: PolicyStage, base: Any, reference: Any) -> TokenTable:
    """Columns ``base`` and ``reference``: -log p of every training token under both models."""
    return model_losses(stage, base, "base").join(model_losses(stage, reference, "reference"))


class TokenCleaning(StaticMask):
    """Fixed-model Token Cleaning: the global best by how much the reference gained on the base.

        s_t = l_t(theta_base) - l_t(theta_ref)        keep the top floor(rho N) of the data set

    The reference is the base fine-tuned on a curated warm-up set: the reference model that was
    named, or one that is trained first on ``warmup_share`` of the rows. Both passes are cached;
    training then starts from the base.

    Args:
        settings: mode, budget, scope, rounding. The mode "native" keeps ``ratio``.
        ratio: rho as published, 0.6.
        warmup_share: where no reference model was named: train one on this share of the training
            rows, the first ones (give curated rows first). None asks for a reference model.

    Raises:
        ConfigError: no reference model and no ``warmup_share``; a share outside (0, 1].

    Source: UCSC-REAL/TokenCleaning, ``get_global_top_k_indices``.
    """

    name: ClassVar[str] = "token-cleaning"
    rounding: ClassVar[str] = "floor"
    needs: ClassVar[Needs] = Needs(columns=("score", "keep"), model=True, scorer_model=True)
    direction: ClassVar[str] = "learnable first: most gained by the reference over the base"
    source: ClassVar[str] = "github.com/UCSC-REAL/TokenCleaning"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        ratio: float = 0.6,
        warmup_share: float | None = None,
    ) -> None:
        super().__init__(settings)
        for name, share in (("ratio", ratio), ("warmup_share", warmup_share)):
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"{name} of Token Cleaning lies in (0, 1]", got=repr(share))
        self.native_ratio, self.warmup_share = ratio, warmup_share
        if warmup_share is not None:  # then a reference may be missing
            self.needs = replace(type(self).needs, scorer_model=False)  # type: ignore[misc]

    def measured(self, stage: PolicyStage) -> TokenTable:
        """Losses under base and reference."""
        return excess_losses(stage, stage.model, self._reference(stage))

    def _reference(self, stage: PolicyStage) -> Any:
        if stage.reference_model is not None or self.warmup_share is None:
            return require_model(stage, self.name)
        if stage.train is None:
            raise ConfigError(
                "this trainer cannot train a reference model first",
                got=f"warmup_share={self.warmup_share}",
                remedy="train one on the warm-up rows and name it with policy_reference",
            )
        count = max(1, int(self.warmup_share * len(stage.rows)))
        return stage.train([stage.rows[i] for i in range(count)], {})

    def static_scores(self, table: TokenTable) -> Array:
        """Loss under the base minus loss under the reference."""
        return table.columns["base"] - table.columns["reference"]


# --- self-evolving --------------------------------------------------------------------------------


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
    train: Callable[[Path | None, Rows, TokenTable | None, Path], None],
    load: Callable[[Path], Any],
    *,
    rounds: int = 5,
    ratio: float = 0.6,
    rounding: str = "floor",
) -> list[Round]:
    """Self-evolving Token Cleaning: each round's model is the reference of the next.

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
            With the trainers of this library: ``policy=GivenTable(table)``.
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
    if rounds < 2 or len(stage.rows) < rounds:
        raise ConfigError(
            "self-evolving cleaning takes at least 2 rounds, and a row for each",
            got=f"{rounds} rounds, {len(stage.rows)} rows",
        )
    made_of = {
        "model": weights_digest(stage.model),
        "data": rows_fingerprint(stage.rows),
        "rounds": rounds,
        "ratio": ratio,
        "rounding": rounding,
    }
    bounds = [len(stage.rows) * t // rounds for t in range(rounds + 1)]
    done: list[Round] = []
    for t in range(rounds):
        folder = Path(stage.folder) / f"round-{t}"
        found = _finished(folder, made_of)
        if found is None:
            before = done[-1].folder if done else None
            found = _round(stage, train, load, t, (bounds[t], bounds[t + 1]), before, made_of)
        done.append(found)
    return done


def _round(
    stage: PolicyStage,
    train: Callable[[Path | None, Rows, TokenTable | None, Path], None],
    load: Callable[[Path], Any],
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
        keep = keep_best(table, score, float(made_of["ratio"]), "dataset", str(made_of["rounding"]))
        table = table.with_columns(keep=keep)
        tokens, kept = table.tokens, int(keep.sum())
    train(before, part, table, folder)
    content = {"made_of": made_of, "rows": rows, "tokens": tokens, "kept": kept}
    with replacing(folder / "round.json") as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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
        found = Round(number, (first, last), folder, content["tokens"], content["kept"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"the file '{file}' cannot be read", got=str(problem)) from problem
    if differing:
        raise DataError(
            f"the finished round in '{folder}' is of a run with another {', '.join(differing)}",
            got="; ".join(f"{k}: {content['made_of'].get(k)} there" for k in differing),
            why="its model was trained on other tokens",
            remedy="give another folder, or remove it",
        )
    return found
