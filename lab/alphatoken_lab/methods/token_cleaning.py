"""Token Cleaning: keep the tokens that a fine-tuned reference finds easier than the base model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.errors import ConfigError, DataError
from alphatoken.support.resume import weights_digest
from alphatoken.support.storage import write_json
from alphatoken.train.ledger import rows_fingerprint
from alphatoken.train.policies.builtin import Standard
from alphatoken.train.policies.trained_weights import (
    load_copy,
    load_weights,
    save_weights,
    trained_copy,
    weights_folder,
)
from alphatoken.train.policy import Needs, PolicySettings, PolicyStage
from alphatoken_lab.methods.static import keep_best, model_losses
from alphatoken_lab.methods.static_mask import StaticMask, TableMask, second_model
from alphatoken_lab.methods.token_table import TokenTable

Array = NDArray[Any]


class TokenCleaning(StaticMask):
    """Token Cleaning: the global best by how much the reference gained on the base.

        s_t = l_t(theta_base) - l_t(theta_ref)        keep the top floor(rho N) of the data set

    Fixed-model: the reference is the base fine-tuned on a curated warm-up set, a model that was
    named or one that is trained first on ``warmup_share`` of the rows; training then starts from
    the base. Self-evolving (``rounds``): the rows are cut into that many consecutive parts, the
    first is trained on whole, and each round's model is the reference of the next round's part,
    which trains it further. Rounds before the last are trained by copies of the trainer, each with
    the trainer's own options: ``max_steps`` and epochs are a round's. Passes, and what is trained
    on the way, are cached.

    Args:
        settings: mode, budget, scope, rounding. The mode "native" keeps ``ratio``.
        ratio: rho as published, 0.6. [above 0, to 1; raise it for clean rows; the paper's 0.6]
        reference: the reference model. [null, or a folder or hub name; where there is one with the
            same tokenizer; the paper warms up on 10,000 of its rows]
        warmup_share: without a named reference model, train one on this share of the training
            rows, the first ones (give curated rows first). None asks for a reference model. [null,
            or above 0, to 1; where there is no second model; ours; the paper warms up on 10,000
            of its rows]
        rounds: parts of the self-evolving variant, 5 as published; None for the fixed-model one.
            [null, or from 2; for the self-evolving variant; the paper's 5]

    Raises:
        ConfigError: no reference model and neither ``warmup_share`` nor ``rounds``, or more than
            one of them; a share outside (0, 1]; fewer than 2 rounds.

    Source: UCSC-REAL/TokenCleaning, ``get_global_top_k_indices``, ``self_evolving_cleaning.sh``.
    """

    name: ClassVar[str] = "token-cleaning"
    rounding: ClassVar[str] = "floor"
    needs: ClassVar[Needs] = Needs(columns=("score", "keep"), model=True)
    source: ClassVar[str] = "github.com/UCSC-REAL/TokenCleaning"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        ratio: float = 0.6,
        reference: str | nn.Module | None = None,
        warmup_share: float | None = None,
        rounds: int | None = None,
    ) -> None:
        super().__init__(settings)
        for name, share in (("ratio", ratio), ("warmup_share", warmup_share)):
            if share is not None and not 0 < share <= 1:
                raise ConfigError(f"{name} of Token Cleaning lies in (0, 1]", got=repr(share))
        if reference is not None and rounds is not None:
            raise ConfigError(
                "self-evolving Token Cleaning takes no reference model",
                got=f"reference, rounds={rounds}",
                why="each round's model is the reference of the next",
                remedy="leave one of the two out",
            )
        if rounds is not None and (rounds < 2 or warmup_share is not None):
            raise ConfigError(
                "self-evolving Token Cleaning needs at least 2 rounds, and no warm-up",
                got=f"rounds={rounds}, warmup_share={warmup_share}",
                why="the first round is the warm-up",
            )
        self.native_ratio, self.warmup_share, self.rounds = ratio, warmup_share, rounds
        self.reference = reference
        self._last: Path | None = None

    @property
    def lacks(self) -> str | None:
        """The argument that is to name its second model; None if it needs none."""
        sources = (self.reference, self.warmup_share, self.rounds)
        return "reference" if sources == (None, None, None) else None

    @property
    def variant(self) -> str:
        """Name of the variant, with its rounds if it is self-evolving."""
        return self.name if self.rounds is None else f"{self.name}, {self.rounds} rounds"

    def choose_rows(self, stage: PolicyStage) -> Sequence[int] | None:
        """All rows; of the self-evolving variant the last part, after the rounds before it."""
        if self.rounds is None:
            return None
        if any(len(row.get("seq_lengths") or ()) > 1 for row in stage.rows):
            raise ConfigError(
                "the rounds of self-evolving Token Cleaning rank whole rows of a part together",
                got="packed rows",
                remedy="packing=False",
            )
        part, self._last, counts = _rounds_before(stage, self.rounds, self._share(), self.rounding)
        self._summary |= {f"earlier_{name}": float(count) for name, count in counts.items()}
        return part

    def _share(self) -> float:
        own = self.native_ratio if self.settings.mode == "native" else None
        return self.settings.keep_ratio if own is None else own

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses, scores and mask; a self-evolving run then starts from the last round's model."""
        table = super().prepare(stage)
        if self._last is not None:
            load_weights(stage.model, self._last)
        return table

    def measured(self, stage: PolicyStage) -> TokenTable:
        """Losses under base and reference."""
        reference = self._reference(stage) if self._last is None else load_copy(stage, self._last)
        return _excess_losses(stage, stage.model, reference)

    def _reference(self, stage: PolicyStage) -> Any:
        if self.reference is not None or self.warmup_share is None:
            return second_model(stage, self.reference, self.name)
        count = max(1, int(self.warmup_share * len(stage.rows)))
        rows = [stage.rows[i] for i in range(count)]
        # Epochs, also where the run itself counts steps.
        return trained_copy(
            stage,
            rows,
            {"max_steps": -1},
            kind="token-cleaning-warm-up",
            option=f"warmup_share={self.warmup_share}",
        )

    def static_scores(self, table: TokenTable) -> Array:
        """Loss under the base minus loss under the reference."""
        return table.columns["base"] - table.columns["reference"]


def _excess_losses(stage: PolicyStage, base: Any, reference: Any) -> TokenTable:
    return model_losses(stage, base, "base").join(model_losses(stage, reference, "reference"))


# --- the rounds of the self-evolving variant ------------------------------------------------------


def _rounds_before(
    stage: PolicyStage, rounds: int, ratio: float, rounding: str
) -> tuple[range, Path, Counter[str]]:
    """Rows of the last round, the folder of the round before it, and tokens trained on until then.

        theta_0 = FT(theta_base, D_0, all tokens)
        theta_t = FT(theta_(t-1), the top floor(rho N_t) tokens of D_t by
                     s = l(theta_base) - l(theta_(t-1)))               t = 1 .. rounds - 1

    ``D_0 .. D_(rounds-1)`` are consecutive parts of the rows; the last round is the run itself.

    Raises:
        ConfigError: a trainer that cannot train a copy, fewer rows than rounds.
        DataError: a finished round that cannot be read.
    """
    if stage.train is None:
        raise ConfigError(
            "this trainer cannot train the rounds of self-evolving Token Cleaning",
            got=f"rounds={rounds}",
            why="earlier rounds train a copy of the model, in one process with whole weights",
            remedy="one process",
        )
    if len(stage.rows) < rounds:
        raise ConfigError(
            "self-evolving Token Cleaning needs a row for each round",
            got=f"{rounds} rounds, {len(stage.rows)} rows",
        )
    kind = f"token-cleaning-{rounds}-rounds"
    model, data = weights_digest(stage.model), rows_fingerprint(stage.rows)
    top = weights_folder(stage, kind, model, data, ratio, rounding)
    bounds = [len(stage.rows) * t // rounds for t in range(rounds + 1)]
    counts: Counter[str] = Counter()
    before: Path | None = None
    for t in range(rounds - 1):
        folder = top / f"round-{t}"
        # Written last: after a kill, the round that was not finished is trained again.
        if not (folder / "round.json").exists():
            part = [stage.rows[i] for i in range(bounds[t], bounds[t + 1])]
            _train_round(replace(stage, rows=part, folder=folder), before, ratio, rounding)
        counts.update(_counts(folder))
        before = folder
    assert before is not None, "at least two rounds"
    return range(bounds[-2], bounds[-1]), before, counts


def _train_round(stage: PolicyStage, before: Path | None, ratio: float, rounding: str) -> None:
    """Train a copy on one part; after the first round on what base and last model choose of it."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    start, table = None, None
    if before is not None:
        start = load_copy(stage, before)
        table = _excess_losses(stage, stage.model, start)
        score = table.columns["base"] - table.columns["reference"]
        table = table.with_columns(keep=keep_best(table, score, ratio, rounding))
    counts = {"tokens": 0, "kept": 0}

    def record(mask: Tensor, weights: Tensor) -> None:
        counts["tokens"] += int(mask.sum())
        counts["kept"] += int((weights * mask != 0).sum())

    assert stage.train is not None
    policy = Standard() if table is None else TableMask(table)
    trained = stage.train(stage.rows, {}, model=start, policy=policy, record=record)
    save_weights(trained, stage.folder)
    write_json(stage.folder / "round.json", counts)


def _counts(folder: Path) -> dict[str, int]:
    """Tokens that a finished round has trained on, and those that it kept."""
    file = folder / "round.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {name: int(content[name]) for name in ("tokens", "kept")}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DataError(
            f"the file '{file}' cannot be read",
            got=f"{type(problem).__name__}: {problem}",
            remedy=f"remove the folder '{folder}': the round is trained again",
        ) from problem
