"""Questions to a judge at an endpoint, and the reading of its replies.

A prompt's file belongs to one of three families, told apart by the names that stand in braces:

    {prompt}       {first}       {second}       ours; the reply begins with A, B or T
    {instruction}  {output_1}    {output_2}     AlpacaEval 2; the reply is m or M: weighed by their
                                                probabilities where the endpoint gives them
    {question_1}   {answer_1}    {answer_2}     Arena-Hard; the reply holds [[A>>B]] to [[B>>A]];
    {QUESTION}     {ANSWER_A}    {ANSWER_B}     the same, as its later versions write them

The file is a text, whose parts ``<|im_start|>system ... <|im_end|>`` are messages as AlpacaEval
writes them; or YAML with ``prompt_template`` and perhaps ``system_prompt``, as Arena-Hard has it.
Prompts of others are not shipped: they are files that the user gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError, DataError

__all__ = ["OWN", "JudgePrompt", "read_judge_prompt"]

_NAMES = {
    "ours": [("prompt", "first", "second")],
    "alpaca_eval": [("instruction", "output_1", "output_2")],
    "arena_hard": [("question_1", "answer_1", "answer_2"), ("QUESTION", "ANSWER_A", "ANSWER_B")],
}

_ASKING: dict[str, dict[str, Any]] = {
    "ours": {"max_tokens": 8},
    "alpaca_eval": {"max_tokens": 1, "logprobs": True, "top_logprobs": 5},
    "arena_hard": {"max_tokens": 4096},
}
"""Parts of the reply that are asked for."""

_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)\n?<\|im_end\|>", re.DOTALL)
_VERDICT = re.compile(r"\[\[(A>>B|A>B|A=B|B>A|B>>A)\]\]")
_LETTER = re.compile(r"\W*(?:answer\s+)?([ABT])\b", re.IGNORECASE)


@dataclass(frozen=True)
class JudgePrompt:
    """Messages with names in braces, and the family that says how the reply is read.

    Attributes:
        parts: (role, text) of each message.
        names: those that stand for the question, the first and the second answer.
        family: "ours", "alpaca_eval" or "arena_hard".
    """

    parts: tuple[tuple[str, str], ...]
    names: tuple[str, str, str]
    family: str

    def messages(self, prompt: str, first: str, second: str) -> list[dict[str, str]]:
        """The messages about two answers; nothing within the answers is replaced."""
        values = dict(zip(self.names, (prompt, first, second), strict=True))
        named = re.compile("{(" + "|".join(self.names) + ")}")
        return [
            {"role": role, "content": named.sub(lambda match: values[match[1]], text)}
            for role, text in self.parts
        ]

    def asking(self) -> dict[str, Any]:
        """Further fields of the request."""
        return dict(_ASKING[self.family])

    def preference(self, choice: Mapping[str, Any]) -> float:
        """Probability that the first answer is the better one, by the reply's first choice.

        Raises:
            DataError: the reply names no winner, or several.
        """
        said = str(choice["message"]["content"])
        if self.family == "alpaca_eval":
            return _by_probability(choice, said)
        if self.family == "arena_hard":
            found = set(_VERDICT.findall(said))
            if len(found) != 1:
                raise DataError("the judge gave no verdict such as [[A>B]]", got=said[-100:])
            (verdict,) = found
            return {"A": 1.0, "B": 0.0}[verdict[0]] if "=" not in verdict else 0.5
        letter = _LETTER.match(said)
        if letter is None:
            raise DataError("the judge did not say A, B or T", got=said[:100])
        return {"A": 1.0, "B": 0.0, "T": 0.5}[letter.group(1).upper()]


def _by_probability(choice: Mapping[str, Any], said: str) -> float:
    """P(m) / (P(m) + P(M)) of the first token; without probabilities 1 for m, 0 for M."""
    content = (choice.get("logprobs") or {}).get("content") or [{}]
    likely = {one["token"]: math.exp(one["logprob"]) for one in content[0].get("top_logprobs", [])}
    both = likely.get("m", 0.0) + likely.get("M", 0.0)
    if both > 0:
        return likely.get("m", 0.0) / both
    if said.strip() not in ("m", "M"):
        raise DataError("the judge said neither m nor M", got=said[:100])
    return float(said.strip() == "m")


OWN = JudgePrompt(
    (
        (
            "user",
            """\
Which answer to the question is better: more helpful, correct and clear? Length alone is no merit.

[Question]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Reply with one letter: A, B, or T for a tie.""",
        ),
    ),
    ("prompt", "first", "second"),
    "ours",
)
"""Our own prompt."""


def read_judge_prompt(path: str | Path) -> JudgePrompt:
    """The prompt of a file.

    Raises:
        ConfigError: there is no such file, or it is in none of the families' layouts.
    """
    place = Path(path).expanduser()
    if not place.is_file():
        raise ConfigError("the judge's prompt does not exist", got=str(path))
    text = place.read_text(encoding="utf-8")
    if place.suffix in (".yaml", ".yml"):
        parts = _of_yaml(text, str(path))
    else:
        parts = tuple(_CHATML.findall(text)) or (("user", text.strip()),)
    whole = "\n".join(one for _, one in parts)
    for family, layouts in _NAMES.items():
        for names in layouts:
            if all(f"{{{name}}}" in whole for name in names):
                return JudgePrompt(parts, names, family)
    raise ConfigError(
        "the judge's prompt names no question and two answers",
        got=str(path),
        remedy="{prompt}, {first} and {second}, or the names of AlpacaEval or Arena-Hard",
    )


def _of_yaml(text: str, path: str) -> tuple[tuple[str, str], ...]:
    import yaml

    found = yaml.safe_load(text)
    template = found.get("prompt_template") if isinstance(found, Mapping) else None
    if isinstance(template, list) and len(template) == 1:
        template = template[0]
    if not isinstance(template, str):
        raise ConfigError("the judge's prompt has no prompt_template", got=path)
    system = found.get("system_prompt")
    first = (("system", str(system)),) if system else ()
    return (*first, ("user", template))
