"""CFT: train on the tokens whose replacement makes the model's answer wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.data.texts import marked_runs
from alphatoken.direction.sampling import greedy_responses
from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.model.batch import label_mask
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.train.policy import PolicySettings, PolicyStage
from alphatoken_lab.methods.static import static_pass
from alphatoken_lab.methods.static_mask import StaticMask
from alphatoken_lab.methods.token_table import TokenTable

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
"""A number, as answers of arithmetic problems end with one."""


def final_answer(text: str, pattern: str) -> str | None:
    """The last match of ``pattern`` (of its first group, if it has one); numbers by their value.

    >>> final_answer("3 and 4 make 7, so 1,007.0.", NUMBER)
    '1007'
    >>> final_answer("nothing", NUMBER) is None
    True
    """
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    last = matches[-1]
    said = last.group(1 if last.re.groups else 0).strip()
    try:
        value = Decimal(said.replace(",", ""))
    except InvalidOperation:
        return said
    return str(int(value)) if value == value.to_integral_value() else str(value.normalize())


class CFT(StaticMask):
    """Critical token fine-tuning, a policy.

        y^(t, a) = y_<t, a, greedy continuation        a: the K likeliest tokens but y_t
        wrong(t, a) = [answer(y^(t, a)) is not answer(y)]
        keep t  iff  wrong(t, a) for all K

    under the model as it is before training. A token is critical if no likely other one in its
    place still leads to the answer. Exact up to the rounding of a row inside a batch of
    continuations, which may turn an argmax between two tokens that are equally likely.

    Costs K continuations of up to ``max_new_tokens`` tokens for every response token of the rows:
    for T tokens about ``K T (T + max_new_tokens)`` forward positions, against T of a forward. A
    pass for small models, short rows or once for many runs; it is cached and resumable.

    At a budget: the tokens whose replacements are most often wrong, earlier ones first.

    Args:
        settings: mode, budget, scope, rounding.
        alternatives: K; 2 is published. [from 1; raise it to test each token against more; the
            paper's 2]
        max_new_tokens: length of a continuation; one without an answer by then is wrong.
            [from 1; as long as your answers are; ours]
        answer: regular expression of the answer, the last match of which counts. [a regular
            expression; where the answer is no number; ours]
        batch: continuations decoded at a time. [from 1; raise it where memory allows; ours]

    Raises:
        ConfigError: numbers below 1, a pattern that is none, no tokenizer.
        UnsupportedError: rows without padding in one batch (``padding_free``).

    Source: arXiv 2510.10974, whose rows are the model's own greedy answers that are right. Oracle:
    one continuation at a time, in tests/lab/test_policies_cft.py.
    """

    name: ClassVar[str] = "cft"
    source: ClassVar[str] = "arXiv 2510.10974"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        alternatives: int = 2,
        max_new_tokens: int = 256,
        answer: str = NUMBER,
        batch: int = 32,
    ) -> None:
        super().__init__(settings)
        if min(alternatives, max_new_tokens, batch) < 1:
            raise ConfigError(
                "alternatives, max_new_tokens and batch must be at least 1",
                got=f"{alternatives!r}, {max_new_tokens!r}, {batch!r}",
            )
        try:
            re.compile(answer)
        except re.error as problem:
            raise ConfigError(
                "answer is no regular expression", got=f"{answer!r}: {problem}"
            ) from None
        self.alternatives, self.max_new_tokens = alternatives, max_new_tokens
        self.answer, self.batch = answer, batch

    def measured(self, stage: PolicyStage) -> TokenTable:
        """``wrong``: share of replacements that end wrong; ``answered``: 1 beside an answer."""
        if stage.tokenizer is None:
            raise ConfigError("CFT reads answers as text, and there is no tokenizer")
        settings = {
            "alternatives": self.alternatives, "max_new_tokens": self.max_new_tokens,
            "answer": self.answer,
        }  # fmt: skip
        columns, measure = ("wrong", "answered"), partial(self._measure, stage.tokenizer.decode)
        return static_pass(stage, stage.model, columns, measure, "cft", settings=settings)

    def _measure(
        self, decode: Callable[..., str], model: Any, inputs: Mapping[str, Tensor], labels: Tensor
    ) -> dict[str, Tensor]:
        if not {"cu_seq_lens_q", "seq_idx", "position_ids"}.isdisjoint(inputs):
            raise UnsupportedError(
                "CFT goes on with one row at a time, and this batch has none of its own",
                got="padding_free",
                remedy="padding_free=False",
            )
        adapter = find_adapter(model)
        real = inputs.get("attention_mask", torch.ones_like(labels)) != 0
        mask = label_mask(labels)
        wrong = torch.zeros(labels.shape)
        answered = torch.zeros(labels.shape)
        for row in range(len(labels)):
            here = real[row].nonzero().flatten()
            ids = inputs["input_ids"][row, here]
            top = self._likeliest(adapter, ids) if bool(mask[row].any()) else None
            for start, end in marked_runs(mask[row, here].cpu()):  # one a turn of the conversation
                target = self._answer(decode, ids[start:end])
                if target is None:
                    continue
                assert top is not None
                places = here[start:end].cpu()
                answered[row, places] = 1.0
                wrong[row, places] = self._wrong(
                    decode, adapter, ids.cpu(), top, (start, end), target
                )
        return {"wrong": wrong, "answered": answered}

    def _likeliest(self, adapter: DecoderAdapter, ids: Tensor) -> Tensor:
        """(t, K + 1) tokens that the model finds likeliest after each position of one row."""
        one = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        return adapter.forward(one)[0].topk(self.alternatives + 1, dim=-1).indices.cpu()

    def _wrong(
        self,
        decode: Callable[..., str],
        adapter: DecoderAdapter,
        ids: Tensor,
        top: Tensor,
        turn: tuple[int, int],
        target: str,
    ) -> Tensor:
        """(end - start,) share of the replacements of each token whose answer is not ``target``."""
        start, end = turn
        prefixes = [
            torch.cat([ids[:t], other[None]])
            for t in range(start, end)
            # Without the token itself, wherever it stands among the likeliest.
            for other in top[t - 1][top[t - 1] != ids[t]][: self.alternatives]
        ]
        said = [
            self._answer(decode, torch.cat([prefix[start:], rest]))
            for first in range(0, len(prefixes), self.batch)
            for prefix, rest in self._continued(adapter, prefixes[first : first + self.batch])
        ]
        fails = torch.tensor([float(answer != target) for answer in said])
        return fails.view(end - start, self.alternatives).mean(-1)

    def _continued(
        self, adapter: DecoderAdapter, prefixes: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each with what the model goes on with; nothing after an end token or at the limit."""
        most, limit = self.max_new_tokens, adapter.max_positions()
        ends = set(adapter.end_tokens())
        room = [
            0 if int(prefix[-1]) in ends
            else most if limit is None else min(most, limit - len(prefix))
            for prefix in prefixes
        ]  # fmt: skip
        going = [i for i, left in enumerate(room) if left > 0]
        continuations = dict.fromkeys(range(len(prefixes)), torch.zeros(0, dtype=torch.int64))
        if going:
            chosen = [prefixes[i] for i in going]
            rests = greedy_responses(adapter, chosen, [room[i] for i in going])
            continuations |= dict(zip(going, rests, strict=True))
        return zip(prefixes, continuations.values(), strict=True)

    def _answer(self, decode: Callable[..., str], ids: Tensor) -> str | None:
        return final_answer(decode(ids.tolist(), skip_special_tokens=True), self.answer)

    def static_scores(self, table: TokenTable) -> NDArray[Any]:
        """Scores of the column ``wrong``."""
        return table.columns["wrong"]

    def native_keep(self, table: TokenTable) -> NDArray[Any]:
        """All replacements end wrong."""
        self._summary["answered_share"] = float(table.columns["answered"].mean())
        return np.asarray(table.columns["wrong"] == 1)
