"""Control tokens in texts: which texts were put into a chat template before, and which name one.

A tokenizer reads the text of a control token as that token, wherever it stands. A prompt that ends
with what the template writes before an answer, or a response that ends with an end token, holds
the template's own markers: it is taken as it is, as TRL takes every text. Any other text that holds
one is a text about it, and is put into the template with the token in it.

What the markers are is read off the tokenizer and off what its template writes around two
questions and an answer; no list of them is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from alphatoken.data.messages import SYSTEMS, THOUGHTS
from alphatoken.data.rows import Row
from alphatoken.errors import DataError, short

_QUESTION, _ANSWER, _NEXT, _THOUGHT = "qxqueryq", "zxanswerz", "qxnextq", "zxthoughtz"
"""Texts that no template writes by itself."""
_PAIR = ["user", "assistant"]


@dataclass(frozen=True)
class Markers:
    """Control tokens of a tokenizer, and what its template writes around texts.

    Attributes:
        start: the start token, or "".
        ends: what an answer ends with: the end token, and the one that the template writes.
        controls: texts that the tokenizer reads as control tokens.
        template_controls: those that the template writes; without a template, all.
        heads: what the template writes before an answer, without white space.
        plain_heads: such as hold no control token.
        question: what it writes before a question, without white space and control tokens.
        template: there is one, and it could be looked at.
        tags_only: the template reads a thought from the content alone, in tags.
    """

    start: str = ""
    ends: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    template_controls: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    plain_heads: tuple[str, ...] = ()
    question: str = ""
    template: bool = False
    tags_only: bool = False

    def are_in(self, prompt: str, response: str) -> bool:
        """True if these texts were put into the template already."""
        prompt, packed = prompt.strip(), bare(prompt)
        if self.template:
            more = any(head in packed for head in self.heads)
        else:
            more = sum(prompt.count(control) for control in self.controls) > 1
        more = more or prompt.endswith(self.template_controls)
        return (
            bool(self.start and prompt.startswith(self.start))
            or packed.endswith(self.heads)
            or (self.question in packed and packed.endswith(self.plain_heads))
            or (prompt.startswith(self.template_controls) and more)
            or response.strip().endswith(self.ends)
        )


def bare(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())


def is_filled(row: Row, tokenizer: Any) -> bool:
    """True if a prompt and its response, or a text, hold the template's own markers already.

    Messages are not looked at: they are put into the template whatever they say, as TRL does.

    Raises:
        DataError: a system text stands beside such a prompt.
    """
    turns = [turn for turn in row.turns if turn.role != "system"]
    roles = [turn.role for turn in turns]
    if any(turn.message for turn in row.turns) or roles not in (_PAIR, _PAIR[:1], _PAIR[1:]):
        return False
    markers = find_markers(tokenizer)
    prompt, response = ("".join(t.text for t in turns if t.role == role) for role in _PAIR)
    if roles == _PAIR[1:]:
        first = (*markers.template_controls, *filter(None, [markers.start]))
        return response.lstrip().startswith(first) or response.rstrip().endswith(markers.ends)
    if not markers.are_in(prompt, response):
        return False
    if len(turns) < len(row.turns):
        raise DataError(
            "a system text stands beside a prompt that holds the template's own markers",
            got=f"{row.place}: {short(row.turns[0].text, 40)!r} beside {short(prompt, 40)!r}",
            why="such a prompt is taken as it is, and the system text would be lost",
            remedy="write it into the prompt, or leave it aside: --unread_columns "
            f"{','.join(SYSTEMS)} (in Python Fields(unread={SYSTEMS!r}))",
        )
    return True


def require_one_form(sides: Sequence[Row], tokenizer: Any) -> None:
    """Refuse a pair of which one side is taken as it is, and the other put into the template.

    Raises:
        DataError: one response ends with an end token, and the other does not.
    """
    if len({is_filled(row, tokenizer) for row in sides}) > 1:
        raise DataError(
            "one response of a pair ends with an end token, and the other does not",
            got=f"{sides[0].place}: " + " and ".join(repr(short(r.response, 40)) for r in sides),
            why="the one would be taken as it is, and the other not",
            remedy="an end token on both, or on neither",
        )


def verbatim_note(tokenizer: Any) -> str:
    """Note of rows that are taken as they are."""
    whose = "the template's own markers" if find_markers(tokenizer).template else "control tokens"
    return f"texts hold {whose}: taken as they are"


def control_notes(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """A note for each control token that these texts hold: it is read as one, as in TRL."""
    whole = "\n".join(texts)
    inside = [control for control in find_markers(tokenizer).controls if control in whole]
    return [f"a text holds the control token {control}, which is read as one" for control in inside]


def in_tags(thought: str, text: str) -> str:
    """A thought in tags before a text."""
    return f"<think>\n{thought}\n</think>\n\n{text}"


# --- what they are --------------------------------------------------------------------------------


def find_markers(tokenizer: Any) -> Markers:
    """The markers of a tokenizer and its template."""
    names = ("chat_template", "bos_token", "eos_token")
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    return _find(tokenizer, size, *(str(getattr(tokenizer, name, None) or "") for name in names))


@lru_cache(maxsize=8)
def _find(tokenizer: Any, size: int, template: str, start: str, end: str) -> Markers:
    # `size` is in the cache's key, so that tokens that are added later count.
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {token.content for token in tokens} - {""}
    special = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    special |= {token.content for token in tokens if token.special} | {start, end}
    controls, ends = special - {""}, tuple(filter(None, [end]))
    around = _around(tokenizer) if template else None
    if around is None:
        return Markers(start, ends, tuple(sorted(controls)), tuple(sorted(controls)))
    before, answer, question, last, opening, closing = around
    controls |= {text for text in texts if text in question}
    whole = "".join((before, answer, question, last))
    heads = {bare(answer), bare(last), *_openings(bare(opening), controls | texts)} - {""}
    plain_heads = {head for head in heads if not any(text in head for text in controls | texts)}
    words = bare(re.sub(_any_of(controls), "", question))
    return Markers(
        start,
        ends=(*ends, *(c for c in controls if c in closing or question.lstrip().startswith(c))),
        controls=tuple(sorted(controls)),
        template_controls=tuple(text for text in controls if text in whole),
        heads=tuple(heads - plain_heads),
        plain_heads=tuple(plain_heads) if words else (),
        question=words,
        template=True,
        tags_only=_reads_tags_only(tokenizer, template),
    )


def _any_of(texts: set[str]) -> str:
    # The longest first; of no texts the pattern matches nothing.
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"


def _around(tokenizer: Any) -> tuple[str, str, str, str, str, str] | None:
    """What the template writes around two questions and the answer between them.

    Before the first question, before the answer, before the second question, and after it; of the
    last what opens an answer; and what closes one at the end.
    """
    turns = [("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT)]
    chat = [{"role": role, "content": text} for role, text in turns]
    try:
        text, unopened, answered = (
            str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=opens))
            for part, opens in ((chat, True), (chat, False), (chat[:2], False))
        )
    except Exception:  # templates raise whatever their author wrote
        return None
    parts = re.split(f"{_QUESTION}|{_ANSWER}|{_NEXT}", text)
    if len(parts) != 4:
        return None
    before, answer, question, last = parts
    opening = text[len(unopened) :] * text.startswith(unopened)
    return before, answer, question, last, opening, answered.partition(_ANSWER)[2]


def _openings(head: str, controls: set[str]) -> list[str]:
    """Beginnings of what opens an answer that say whose turn it is: without a thought, or with."""
    pattern = _any_of(controls)
    role = re.match(rf"(?:{pattern})+[\w.-]*", head)
    if role is None:
        return [head]
    ends = {piece.end() for piece in re.finditer(rf"{pattern}|<[^<>]*>|[^<]+", head)}
    return [head[:end] for end in ends | {role.end()} if end >= role.end()]


def _reads_tags_only(tokenizer: Any, template: str) -> bool:
    if "</think>" not in template:
        return False

    def shows(message: dict[str, str]) -> bool:
        chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", **message}]
        try:
            return _THOUGHT in str(tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # as above
            return False

    if shows({"content": _ANSWER, **dict.fromkeys(THOUGHTS, _THOUGHT)}):
        return False
    return shows({"content": in_tags(_THOUGHT, _ANSWER)})
