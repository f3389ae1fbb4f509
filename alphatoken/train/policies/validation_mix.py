"""Validation rows mixed into the training rows of every step, and its control of equal tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from alphatoken.errors import ConfigError, InputError, counted, require_choice
from alphatoken.model.batch import IGNORE
from alphatoken.train.ledger import rows_fingerprint
from alphatoken.train.policies.builtin import Standard
from alphatoken.train.policies.trained_weights import say_of_pass
from alphatoken.train.policy import Needs, PolicySettings, PolicyStage, response_tokens
from alphatoken.train.pool import ValidationPool

SOURCES = ("validation", "training")

Row = Mapping[str, Any]


class ValidationMix(Standard):
    """All tokens with weight 1, of the training rows of a step and of some validation rows.

        L_s = (sum of l_t over the training rows of step s and over V_s) / (all their tokens)

    V_s are ``added`` validation rows, drawn epoch by epoch in a seeded order: each comes once
    before one comes again, and no step has one twice. A function of seed and step, so a resumed run
    draws the same; ``added`` is over all micro-batches and processes of the step, which share them.
    The step is that of TRL's trainer on a data set with these rows in these places, and the divisor
    is the trainer's own over all tokens. Nothing is valued: the cost is that of the added rows.
    Mode "budget" keeps all tokens too. The validation loss in the logs is then that of rows that
    were trained on.

    With ``draw_from="training"`` it is the control of equal tokens. In place of each validation
    row, training rows are drawn at random (anew for each, none twice for one) until they have as
    many response tokens; the last of them ends with the token that makes them as many.

    Args:
        settings: see ``PolicySettings``.
        rows: number of rows added to each optimizer step, over all its micro-batches and processes;
            None for one beside every two training rows, at most all validation rows.
            [1 to the number of validation rows; fewer where they are few and steps many; ours]
        draw_from: "validation"; or "training", the control. ['validation' or 'training'; 'training'
            to tell the gain of the rows from that of more tokens a step; ours]

    Raises:
        ConfigError: not that many rows, another source, a stream, no validation rows.
        InputError: a validation row without a response token, of which no control has as many.

    Source: a control; replay of target rows, as in continual learning. Oracle: TRL's trainer on the
    same rows, put in place by hand (``tests/property/test_policies_validation_mix.py``).
    """

    name: ClassVar[str] = "validation-mix"
    family: ClassVar[str] = "sft"
    needs: ClassVar[Needs] = Needs(validation=True)
    source: ClassVar[str] = "control: clean rows in every step"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        rows: int | None = None,
        draw_from: str = "validation",
    ) -> None:
        super().__init__(settings)
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ConfigError(
                "rows of validation-mix is a whole number from 1, or none",
                got=repr(rows),
                why="it counts the rows that are added to each optimizer step",
            )
        require_choice("draw_from of validation-mix", draw_from, SOURCES)
        self.rows, self.draw_from = rows, draw_from
        self.added = rows or 1
        """Rows that are added to a step, of ``rows`` None as many as `prepare` finds fit."""
        self.added_rows = ""
        """Digest of the rows that are drawn from; a resumed run must have the same."""
        self._validation: Sequence[Row] = ()
        self._training: Sequence[Row] = ()
        self._documents: list[tuple[int, int, int]] = []
        self._pool: ValidationPool | None = None
        self._rows_of_step: int | None = None
        self._steps: int | None = None

    @property
    def variant(self) -> str:
        """The name, and of the control what it draws from."""
        return self.name if self.draw_from == "validation" else f"{self.name} (training rows)"

    @property
    def summary(self) -> Mapping[str, float]:
        """``rows`` added to a step, of ``validation_rows``, each once in ``steps_of_an_epoch``.

        Where they are known, ``training_rows_of_step`` too, the ``steps`` of the run, and
        ``added_rows`` in all of them (in the control these stand for training rows of as many
        tokens).
        """
        count = len(self._validation)
        of_run = {
            "training_rows_of_step": self._rows_of_step,
            "steps": self._steps,
            "added_rows": None if self._steps is None else self._steps * self.added,
        }
        return {
            "rows": float(self.added),
            "validation_rows": float(count),
            "steps_of_an_epoch": count / self.added,
            **{name: float(number) for name, number in of_run.items() if number is not None},
        }

    def prepare(self, stage: PolicyStage) -> None:
        """Read the rows that are drawn from, and say which."""
        rows = stage.validation
        if not len(stage.rows):
            raise ConfigError("validation-mix adds rows to training rows", got="0 training rows")
        if self.rows is None:
            self.added = max(1, min((stage.rows_of_step or 0) // 2, len(rows)))
        if self.added > len(rows):
            raise ConfigError(
                "a step would hold a validation row twice",
                got=f"rows={self.added}, {len(rows)} validation rows",
                remedy=f"rows={len(rows)} or fewer in policy_options, or more validation rows",
            )
        empty = [number for number, row in enumerate(rows) if not response_tokens(row)]
        if self.draw_from == "training" and empty:
            raise InputError(
                "a validation row has no response token, and its control none either",
                got=f"row {empty[0]}",
                remedy="leave it out of the validation rows",
            )
        if self.draw_from == "training":
            self._training, self._documents = stage.rows, list(_documents(stage.rows))
            if not self._documents:
                raise InputError(
                    "no training row has a response token to draw",
                    got=f"{len(stage.rows)} rows",
                    remedy="check the prompt/completion split and max_length",
                )
        self._validation, self.added_rows = rows, rows_fingerprint(rows)
        self._pool = ValidationPool(
            len(rows), self.added, mode="pool", held_out_share=0.0, seed=self.settings.seed
        )
        self._rows_of_step, self._steps = stage.rows_of_step, stage.steps
        self._say()

    def _say(self) -> None:
        count, of_step = len(self._validation), self._rows_of_step
        rows = f"{self.added} of {count} validation rows"
        beside = (
            "the training rows" if of_step is None else f"the {counted(of_step, 'training rows')}"
        )
        text = f"{rows} beside {beside} of each step; {self._dose()}; nothing is valued, and an "
        text += "added row costs what a training row does"
        if self.draw_from == "training":
            text = f"beside {beside} of each step others, of as many tokens as {rows} have"
        say_of_pass(f"policy '{self.name}': {text}")

    def _dose(self) -> str:
        """How often the validation rows come in the whole run, in words."""
        count = len(self._validation)
        if self._steps is None:
            return f"each once in {count / self.added:g} steps"
        often, more = divmod(self._steps * self.added, count)
        if not often:
            dose = f"{more} of them come{'s' * (more == 1)} once, and the others never"
        elif more:
            dose = f"each comes {often} or {often + 1} times"
        else:
            dose = f"each comes {often} times" if often > 1 else "each comes once"
        return f"{counted(self._steps, 'steps')}, so that {dose}"

    def step_rows(self, step: int) -> list[Row]:
        """The rows of a step; in the control the training rows in the place of each."""
        assert self._pool is not None
        drawn = [self._validation[number] for number in self._pool.rows(step)]
        if self.draw_from == "validation":
            return drawn
        return [
            row
            for place, own in enumerate(drawn)
            for row in self._as_long(response_tokens(own), step, place)
        ]

    def _as_long(self, tokens: int, step: int, place: int) -> Iterator[Row]:
        """Training rows with so many response tokens together, in a random order of their own."""
        generator = random.Random(f"validation mix {self.settings.seed} {step} {place}")
        drawn = set[int]()
        while tokens > 0:
            if len(drawn) == len(self._documents):
                drawn.clear()  # so few training rows that one comes again
            at = generator.randrange(len(self._documents))
            if at in drawn:
                continue
            drawn.add(at)
            number, start, end = self._documents[at]
            row = _cut(self._training[number], start, end, tokens)
            tokens -= response_tokens(row)
            yield row


def _documents(rows: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of each document with a response token."""
    for number, row in enumerate(rows):
        start = 0
        for length in row.get("seq_lengths") or (len(row["input_ids"]),):
            if response_tokens({"input_ids": row["labels"][start : start + length]}):
                yield number, start, start + length
            start += length


def _cut(row: Row, start: int, end: int, tokens: int) -> Row:
    """One document of a row, up to and with the response token of this number."""
    labels = row["labels"][start:end]
    response = [place for place, label in enumerate(labels) if place and label != IGNORE]
    stop = end if len(response) <= tokens else start + response[tokens - 1] + 1
    length = len(row["input_ids"])
    # Columns beside tokens and labels may have a number for each token too.
    by_token = {
        name: value[start:stop]
        for name, value in row.items()
        if hasattr(value, "__len__") and not isinstance(value, str) and len(value) == length
    }
    return {name: by_token.get(name, value) for name, value in row.items() if name != "seq_lengths"}
