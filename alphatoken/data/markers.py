"""Control tokens in texts: which texts were put into a chat template before, and which name one.

A tokenizer reads the text of a control token as that token, wherever it stands. A prompt that ends
with what the template writes before an answer, or a response that ends with an end token, holds
the template's own markers: it is taken as it is, as TRL takes every text. Any other text that holds
one is a text about it, and is written into the template with the token in it.

What the markers are is read off the tokenizer and off what its template writes around two
questions and an answer; no list of them is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from alphatoken.data.reading import short
from alphatoken.data.rows import THOUGHTS, Row
from alphatoken.errors import DataError

__all__ = [
    "Markers",
    "bare",
    "control_notes",
    "filled_note",
    "find_markers",
    "is_filled",
    "require_one_form",
    "tagged",
]

_ASKED, _SAID, _THEN, _THOUGHT = "qxqueryq", "zxanswerz", "qxquestionq", "zxthoughtz"
"""Texts that no template writes by itself."""


@dataclass(frozen=True)
class Markers:
    """Control tokens of a tokenizer, and what its template writes around texts.

    Attributes:
        start: the start token, or "".
        ends: what an answer ends with: the end token, and the one that the template writes.
        controls: texts that the tokenizer reads as control tokens.
        written: those that the template writes; without a template, all.
        heads: what the template writes before an answer, without white space.
        plain_heads: such as hold no control token.
        question: what it writes before a question, without white space and control tokens.
        template: there is one, and it could be looked at.
        tagged: the template reads a thought from the content alone, in tags.
    """

    start: str = ""
    ends: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    plain_heads: tuple[str, ...] = ()
    question: str = ""
    template: bool = False
    tagged: bool = False

    def holds(self, prompt: str, response: str) -> bool:
        """True if these texts were put into the template already."""
        asked, packed = prompt.strip(), bare(prompt)
        inner = any(head in packed for head in self.heads)
        if not self.template:
            inner = sum(asked.count(control) for control in self.controls) > 1
        return (
            bool(self.start and asked.startswith(self.start))
            or packed.endswith(self.heads)
            or (self.question in packed and packed.endswith(self.plain_heads))
            or (asked.startswith(self.written) and (inner or asked.endswith(self.written)))
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
    turns = row.turns
    texts = [turn for turn in turns if turn.role != "system"]
    roles = [turn.role for turn in texts]
    if any(turn.message for turn in turns) or roles not in (_PAIR, _PAIR[:1], _PAIR[1:]):
        return False
    markers = find_markers(tokenizer)
    asked, said = ("".join(turn.text for turn in texts if turn.role == role) for role in _PAIR)
    if roles == _PAIR[1:]:
        first = (*markers.written, *filter(None, [markers.start]))
        return said.lstrip().startswith(first) or said.rstrip().endswith(markers.ends)
    filled = markers.holds(asked, said)
    if filled and len(texts) < len(turns):
        raise DataError(
            "a system text stands beside a prompt that holds the template's own markers",
            got=f"{row.place}: {short(turns[0].text, 40)!r} beside {short(asked, 40)!r}",
            why="such a prompt is taken as it is, and the system text would be lost",
            remedy="write it into the prompt, or leave it aside: --unread_columns system",
        )
    return filled


_PAIR = ["user", "assistant"]


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


def filled_note(tokenizer: Any) -> str:
    """Note of rows that are taken as they are."""
    whose = "the template's own markers" if find_markers(tokenizer).template else "control tokens"
    return f"texts hold {whose}: taken as they are"


def control_notes(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """A note for each control token that these texts hold: it is read as one, as in TRL."""
    controls = find_markers(tokenizer).controls
    joined = "\n".join(texts)
    inside = [control for control in controls if control in joined]
    return [f"a text holds the control token {control}, which is read as one" for control in inside]


def find_markers(tokenizer: Any) -> Markers:
    """The markers of a tokenizer and its template."""
    names = ("chat_template", "bos_token", "eos_token")
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
    return _find(tokenizer, size, *(str(getattr(tokenizer, name, None) or "") for name in names))


@lru_cache(maxsize=8)
def _find(tokenizer: Any, size: int, template: str, start: str, end: str) -> Markers:
    added = [t for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if t.content]
    special = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    special |= {token.content for token in added if token.special} | {start, end} - {""}
    ends = (end,) if end else ()
    plain = Markers(start, ends, tuple(sorted(special)), tuple(sorted(special)))
    around = _around(tokenizer) if template else None
    if around is None:
        return plain
    before, answer, question, last, opened = around
    controls = special | {t.content for t in added if t.content in question}
    known = controls | {token.content for token in added}
    text = "".join((before, answer, question, last))
    written = tuple(sorted(control for control in controls if control in text))
    heads = {bare(answer), bare(last), *_openings(bare(opened), known)} - {""}
    marked = {head for head in heads if any(control in head for control in known)}
    own = question
    for control in sorted(controls, key=len, reverse=True):
        own = own.replace(control, "")
    closing = [control for control in controls if question.lstrip().startswith(control)]
    return Markers(
        start,
        (*ends, *closing),
        tuple(sorted(controls)),
        written,
        heads=tuple(marked),
        plain_heads=tuple(heads - marked) if bare(own) else (),
        question=bare(own),
        template=True,
        tagged=_is_tagged(tokenizer, template),
    )


def _around(tokenizer: Any) -> tuple[str, str, str, str, str] | None:
    """What the template writes around two questions and the answer between them.

    Before the first question, before the answer, before the second question, and after it; and of
    the last what opens an answer.
    """
    turns = [("user", _ASKED), ("assistant", _SAID), ("user", _THEN)]
    chat = [{"role": role, "content": text} for role, text in turns]
    try:
        text, closed = (
            str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opens))
            for opens in (True, False)
        )
    except Exception:  # templates raise whatever their author wrote
        return None
    parts = re.split(f"{_ASKED}|{_SAID}|{_THEN}", text)
    if len(parts) != 4:
        return None
    opened = text.removeprefix(closed)
    before, answer, question, last = parts
    return before, answer, question, last, opened if len(opened) < len(text) else ""


def _openings(head: str, controls: set[str]) -> list[str]:
    """Beginnings of what opens an answer that say whose turn it is: without a thought, or with."""
    names = "|".join(re.escape(control) for control in sorted(controls, key=len, reverse=True))
    if not (names and (first := re.match(rf"(?:{names})+[\w.-]*", head))):
        return [head]
    ends = [
        m.end() for m in re.finditer(rf"{names}|<[^<>]*>|[^<]+", head) if m.end() >= first.end()
    ]
    return [head[:end] for end in {first.end(), *ends}]


def _is_tagged(tokenizer: Any, template: str) -> bool:
    """True if a thought reaches the text from the content, and by no field of its own."""
    if "</think>" not in template:
        return False

    def shows(message: dict[str, str]) -> bool:
        chat = [{"role": "user", "content": _ASKED}, {"role": "assistant", **message}]
        try:
            return _THOUGHT in str(tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # as above
            return False

    if shows({"content": _SAID, **dict.fromkeys(THOUGHTS, _THOUGHT)}):
        return False
    return shows({"content": tagged(_THOUGHT, _SAID)})


def tagged(thought: str, text: str) -> str:
    """A thought in tags before a text."""
    return f"<think>\n{thought}\n</think>\n\n{text}"
