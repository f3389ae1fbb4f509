"""Who of two answers is better: an interface, a judge that works offline, one over HTTP.

    rate = mean over prompts of [judge(prompt, ours, theirs) + 1 - judge(prompt, theirs, ours)] / 2

A judge says how likely the first answer is the better one, in [0, 1]. Each pair is shown in both
orders, so that a judge that prefers a place contributes one half.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from alphatoken.compare.generation import answers, prompt_ids
from alphatoken.data import read_records
from alphatoken.errors import ConfigError, DataError, require_choice
from alphatoken.support.storage import write_json

__all__ = [
    "EndpointJudge",
    "Judge",
    "LikelihoodJudge",
    "make_judge",
    "win_rate",
    "win_rate_against",
]


@runtime_checkable
class Judge(Protocol):
    """Anything that can be called like this."""

    def __call__(self, prompt: str, first: str, second: str) -> float:
        """How likely ``first`` is the better answer to ``prompt``, in [0, 1]; 0.5 is a tie."""


def win_rate(
    judge: Judge, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str]
) -> float:
    """Percentage of comparisons that ours win, ties counted half; equal answers are a tie.

    Raises:
        DataError: nothing to compare, or other numbers of answers.
    """
    if not prompts or len(prompts) != len(ours) or len(ours) != len(theirs):
        raise DataError(
            "a win rate needs one answer of each side to every prompt",
            got=f"{len(prompts)} prompts, {len(ours)} and {len(theirs)} answers",
        )
    won = 0.0
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        same = own.strip() == other.strip()
        won += 0.5 if same else (judge(prompt, own, other) + 1 - judge(prompt, other, own)) / 2
    return 100.0 * won / len(prompts)


def win_rate_against(
    model: nn.Module,
    other: nn.Module,
    tokenizer: Any,
    questions: str | Path,
    judge: Judge,
    *,
    max_new_tokens: int = 256,
    limit: int | None = None,
    folder: Path | None = None,
) -> float:
    """Win rate of a model's greedy answers against another model's.

    Args:
        model: whose rate it is.
        other: what it is compared with.
        tokenizer: of both.
        questions: file of rows with ``prompt``, ``instruction``, ``question`` or ``turns``.
        judge: who decides.
        max_new_tokens: of each answer.
        limit: the first questions only.
        folder: ``answers.json`` is written there.
    """
    prompts = _questions(questions)[:limit]
    ours = answers(model, tokenizer, prompts, max_new_tokens=max_new_tokens)
    theirs = answers(other, tokenizer, prompts, max_new_tokens=max_new_tokens)
    if folder is not None:
        rows = [
            {"prompt": prompt, "answer": own, "other": against}
            for prompt, own, against in zip(prompts, ours, theirs, strict=True)
        ]
        write_json(folder / "answers.json", rows)
    return win_rate(judge, prompts, ours, theirs)


def _questions(path: str | Path) -> list[str]:
    found = []
    for place, record in read_records(path):
        name = next((n for n in ("prompt", "instruction", "question", "turns") if n in record), "")
        value = record.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, str) or not value.strip():
            raise DataError("the row has no question", got=f"{place}: {', '.join(record)}")
        found.append(value)
    return found


def make_judge(settings: Mapping[str, Any]) -> Judge:
    """A judge by its settings.

    ``{kind: likelihood, model: PATH}`` or ``{kind: endpoint, url: ..., model: ..., key_variable:
    NAME}``.

    Raises:
        ConfigError: an unknown kind, or settings that it does not take.
    """
    kinds: dict[str, Any] = {"likelihood": LikelihoodJudge.load, "endpoint": EndpointJudge}
    own = dict(settings)
    kind = own.pop("kind", None)
    require_choice("the kind of judge", kind, kinds)
    try:
        judge: Judge = kinds[kind](**own)
    except TypeError as error:
        raise ConfigError("the judge does not take these settings", got=str(error)) from None
    return judge


# --- offline ------------------------------------------------------------------------------------


class LikelihoodJudge:
    """Prefers the answer that another model finds likelier, token by token.

        p(first) = 1 if mean log p(first | prompt) > mean log p(second | prompt), 1/2 if equal

    Works offline and always says the same; it measures closeness to that model, not quality, and
    favours what repeats itself. An empty answer loses.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, chat: bool = True) -> None:
        self.model, self.tokenizer, self.chat = model.eval(), tokenizer, chat

    @classmethod
    def load(cls, model: str, *, chat: bool = True) -> LikelihoodJudge:
        """From a folder or hub name."""
        from alphatoken.train.loading import load_with_tokenizer

        return cls(*load_with_tokenizer(model), chat=chat)

    def __call__(self, prompt: str, first: str, second: str) -> float:
        """As in ``Judge``."""
        left, right = self.score(prompt, first), self.score(prompt, second)
        return 0.5 if left == right else float(left > right)

    @torch.no_grad()
    def score(self, prompt: str, answer: str) -> float:
        """Mean log-probability of the answer's tokens; -inf for an answer without any."""
        before = prompt_ids(self.tokenizer, prompt, chat=self.chat)
        ids = list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
        limit = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        ids = ids if limit is None else ids[: limit - 1]
        before = before if limit is None else before[-max(limit - len(ids), 1) :]
        if not ids or not before:
            return float("-inf")
        device = next(self.model.parameters()).device
        given = torch.tensor([before + ids], device=device)
        logits = self.model(input_ids=given, use_cache=False).logits[0, len(before) - 1 : -1]
        found = logits.float().log_softmax(-1).gather(-1, given[0, len(before) :, None])
        return float(found.double().mean())


# --- over HTTP ----------------------------------------------------------------------------------

_QUESTION = """\
Which answer to the question is better: more helpful, correct and clear? Length alone is no merit.

[Question]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Reply with one letter: A, B, or T for a tie."""


class EndpointJudge:
    """A model behind any endpoint that speaks OpenAI's chat completions.

    Args:
        url: up to and without ``/chat/completions``, such as ``http://localhost:8000/v1``.
        model: name that the endpoint knows.
        key_variable: environment variable with the key; None sends none. The key is in no file.
        tries: after errors of the network or the server, with growing pauses.
        timeout: seconds of one try.
        pause: seconds before the second try.

    Raises:
        ConfigError: no address, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_variable: str | None = None,
        tries: int = 4,
        timeout: float = 60.0,
        pause: float = 1.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("the judge's url is no address", got=url, remedy="http://HOST/v1")
        self.url, self.model = url.rstrip("/") + "/chat/completions", model
        self.tries, self.timeout, self.pause = tries, timeout, pause
        self._key = None
        if key_variable is not None:
            self._key = os.environ.get(key_variable)
            if not self._key:
                raise ConfigError("the judge's key is not set", got=f"${key_variable} is empty")

    def __call__(self, prompt: str, first: str, second: str) -> float:
        """As in ``Judge``.

        Raises:
            DataError: no answer after all tries, or one that is neither A, B nor T.
        """
        question = _QUESTION.format(prompt=prompt, first=first, second=second)
        said = self._ask(question)
        found = re.match(r"\W*(?:answer\s+)?([ABT])\b", said, re.IGNORECASE)
        if found is None:
            raise DataError("the judge did not say A, B or T", got=said[:100])
        return {"A": 1.0, "B": 0.0, "T": 0.5}[found.group(1).upper()]

    def _ask(self, question: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 8,
        }
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        problem = ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return str(json.load(reply)["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {error.reason}"
                error.close()
                if error.code < 500 and error.code != 429:  # asking again changes nothing
                    break
            except (OSError, ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise DataError("the judge does not answer", got=f"{self.url}: {problem}")
