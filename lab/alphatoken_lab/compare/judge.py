"""Judges of two answers: an interface, one that works offline, one over HTTP.

    rate = mean over prompts of [judge(prompt, ours, theirs) + 1 - judge(prompt, theirs, ours)] / 2

A judge says how likely the first answer is the better one, in [0, 1]. Each pair is shown in both
orders, so that a judge that prefers a place contributes one half.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from alphatoken.errors import ConfigError, DataError, require_choice
from alphatoken_lab.compare.generation import prompt_ids
from alphatoken_lab.compare.judge_prompt import OWN, read_judge_prompt

__all__ = [
    "EndpointJudge",
    "Judge",
    "LikelihoodJudge",
    "make_judge",
    "preferences",
    "win_rate",
]


@runtime_checkable
class Judge(Protocol):
    """Anything that can be called like this."""

    def __call__(self, prompt: str, first: str, second: str) -> float:
        """Probability that ``first`` is the better answer to ``prompt``; 0.5 is a tie."""


def win_rate(
    judge: Judge, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str]
) -> float:
    """Percentage of comparisons that ours win, ties counted half; equal answers are a tie.

    Raises:
        DataError: nothing to compare, or other numbers of answers.
    """
    return 100.0 * fmean(preferences(judge, prompts, ours, theirs))


def preferences(
    judge: Judge, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str]
) -> list[float]:
    """Preference for each of our answers, in [0, 1]: the mean over both orders; equal ones tie.

    Raises:
        DataError: nothing to compare, or other numbers of answers.
    """
    if not prompts or len(prompts) != len(ours) or len(ours) != len(theirs):
        raise DataError(
            "a win rate needs one answer of each side to every prompt",
            got=f"{len(prompts)} prompts, {len(ours)} and {len(theirs)} answers",
        )
    return [
        0.5
        if own.strip() == other.strip()
        else (judge(prompt, own, other) + 1 - judge(prompt, other, own)) / 2
        for prompt, own, other in zip(prompts, ours, theirs, strict=True)
    ]


def make_judge(settings: Mapping[str, Any]) -> Judge:
    """A judge by its settings.

    ``{kind: likelihood, model: PATH}`` or ``{kind: endpoint, url: ..., model: ..., key_variable:
    NAME, prompt: FILE}``. No model is loaded before the judge is first asked.

    Raises:
        ConfigError: an unknown kind, settings that it does not take, or a file that does not exist.
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
        self._load: Callable[[], tuple[nn.Module, Any]] = lambda: (model.eval(), tokenizer)
        self.chat = chat

    @classmethod
    def load(cls, model: str, *, chat: bool = True) -> LikelihoodJudge:
        """Load the judge from a folder or hub name, at its first use.

        Raises:
            ConfigError: there is no such folder.
        """
        from alphatoken.model.loading import load_causal_model, load_tokenizer

        if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
            raise ConfigError("the judge's model does not exist", got=model)
        judge = cls.__new__(cls)
        judge.chat = chat
        judge._load = cache(lambda: (load_causal_model(model), load_tokenizer(model)))
        return judge

    def __call__(self, prompt: str, first: str, second: str) -> float:
        """Judge as ``Judge`` describes."""
        left, right = self.score(prompt, first), self.score(prompt, second)
        return 0.5 if left == right else float(left > right)

    @torch.no_grad()
    def score(self, prompt: str, answer: str) -> float:
        """Mean log-probability of the answer's tokens; -inf for an answer without any."""
        model, tokenizer = self._load()
        before = prompt_ids(tokenizer, prompt, chat=self.chat)
        ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        ids = ids if limit is None else ids[: limit - 1]
        before = before if limit is None else before[-max(limit - len(ids), 1) :]
        if not ids or not before:
            return float("-inf")
        device = next(model.parameters()).device
        given = torch.tensor([before + ids], device=device)
        logits = model(input_ids=given, use_cache=False).logits[0, len(before) - 1 : -1]
        found = logits.float().log_softmax(-1).gather(-1, given[0, len(before) :, None])
        return float(found.double().mean())


# --- over HTTP ----------------------------------------------------------------------------------


class EndpointJudge:
    """A model behind any endpoint that speaks OpenAI's chat completions.

    Args:
        url: up to and without ``/chat/completions``, such as ``http://localhost:8000/v1``.
        model: name that the endpoint knows.
        key_variable: environment variable with the key; None sends none. The key is in no file.
        prompt: file of the question that it is asked, in one of the layouts of
            ``alphatoken_lab.compare.judge_prompt``; None for our own.
        tries: after errors of the network or the server, with growing pauses.
        timeout: seconds of one try.
        pause: seconds before the second try.

    Raises:
        ConfigError: no address, the variable is not set, or a prompt in no known layout.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_variable: str | None = None,
        prompt: str | None = None,
        tries: int = 4,
        timeout: float = 60.0,
        pause: float = 1.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("the judge's url is no address", got=url, remedy="http://HOST/v1")
        self.url, self.model = url.rstrip("/") + "/chat/completions", model
        self.tries, self.timeout, self.pause = tries, timeout, pause
        self.prompt = OWN if prompt is None else read_judge_prompt(prompt)
        self._key = None
        if key_variable is not None:
            self._key = os.environ.get(key_variable)
            if not self._key:
                raise ConfigError("the judge's key is not set", got=f"${key_variable} is empty")

    def __call__(self, prompt: str, first: str, second: str) -> float:
        """Judge as ``Judge`` describes.

        Raises:
            DataError: no answer after all tries, or one that names no winner.
        """
        return self.prompt.preference(self._ask(self.prompt.messages(prompt, first, second)))

    def _ask(self, messages: list[dict[str, str]]) -> Mapping[str, Any]:
        """The first choice of the reply."""
        body = {
            "model": self.model, "messages": messages, "temperature": 0, **self.prompt.asking()
        }  # fmt: skip
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
                    choice = json.load(reply)["choices"][0]
                    str(choice["message"]["content"])  # or it is tried again
                    return dict(choice)
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {error.reason}"
                error.close()
                if error.code < 500 and error.code != 429:  # asking again changes nothing
                    break
            except (OSError, ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise DataError("the judge does not answer", got=f"{self.url}: {problem}")
