"""Names of columns and roles, messages of a chat, and marks: one reader for files and for Python.

A message is ``{"role", "content"}``, or ``{"from", "value"}`` in ShareGPT's form. Its content is a
text, or a list of parts, of which those of type ``text`` are text.

Marks are what rows and messages say of their own worth: they are learned, or not, or by a weight. A
mark that labels can carry is honoured: a message that is not to be learned has none. Weights are
read where the policy of a run asks for them (``Columns.weights``). Every other mark refuses its
row, so that nothing is learned against it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeGuard

from alphatoken.data.survey import Columns
from alphatoken.errors import DataError, short

PROMPTS = ("prompt", "instruction", "question", "query")
RESPONSES = ("response", "output", "answer", "completion")
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts")
CHATS = ("messages", "conversations")
ADDED = ("input", "context")
"""Columns that are written under the prompt."""
SYSTEMS = ("system", "system_prompt", "system_message")
CHANGING = (
    *ADDED, *SYSTEMS, *THOUGHTS, "tools", "documents", "chat_template_kwargs", "history",
    "functions", "function_call", "tool_calls", "tool_results", "document", "image", "images",
    "image_url", "image_urls", "image_path", "img", "audio", "audios", "audio_path", "video",
    "videos", "video_path", "files", "attachments",
)  # fmt: skip
"""Columns, and fields of messages, that change the conversation; read, or the row is refused."""

TRL_RESPONSES = ("completion", "chosen", "rejected")
"""Columns of which TRL learns all, whoever says it; a completion's mask is 1 from end to end."""
TRL_CHATS = ("prompt", *TRL_RESPONSES, *CHATS)
"""Columns in which TRL reads messages."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
SHAREGPT = {"from": "role", "value": "content"}
"""Names of a message's fields in ShareGPT's form, and the names that templates know."""
ROLE_FIELDS, CONTENT_FIELDS = ("role", "from"), ("content", "value")
# Types of the parts of a content that are text.
_TEXT_TYPES = (None, "text", "input_text", "output_text")


def are_messages(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """True for a list of messages."""
    return isinstance(value, list) and all(isinstance(message, Mapping) for message in value)


def is_chat(value: Any) -> bool:
    """True for a list of messages that each say whose they are."""
    return are_messages(value) and all(
        not message.keys().isdisjoint(ROLE_FIELDS) for message in value
    )


def role_of(message: Mapping[str, Any]) -> str:
    """Role of a message by the name that templates know; one that nobody knows as it is."""
    role = str(message.get("role") or message.get("from"))
    return ROLES.get(role, role)


def is_answer(message: Mapping[str, Any]) -> bool:
    """True for a message of the assistant, by one of its names.

    A role that nobody knows is no answer, and neither is a tool's: where TRL marks answers
    (``assistant_only_loss``) a template's generation marks stand around the assistant's turns.
    """
    return role_of(message) == "assistant"


def is_prompt(message: Mapping[str, Any]) -> bool:
    """True for a message of the user or the system, with which no response begins."""
    return role_of(message) in ("user", "system")


def content_of(message: Mapping[str, Any]) -> Any:
    """Content of a message, under either of its names."""
    return message.get("content", message.get("value"))


def content_parts(content: Any) -> Sequence[Any]:
    """Parts of a content; a text is one part."""
    if isinstance(content, str):
        return [{"text": content}]
    if isinstance(content, Sequence):
        return content
    return [] if content is None else [content]


def part_text(part: Any) -> str | None:
    """Text of a part of a content; None where it is a picture or the like."""
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_TYPES:
        return None
    # LLaMA-Factory's rows have ``value`` in a part.
    text = part.get("text", part.get("value"))
    return text if isinstance(text, str) else None


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message: its thoughts and its content."""
    values = [*map(message.get, THOUGHTS), content_of(message)]
    return ["".join(part_text(part) or "" for part in content_parts(value)) for value in values]


def answer_text(value: Any) -> str:
    """The text of a response, stripped: of a string, or of the assistant's messages and calls."""
    if isinstance(value, str):
        return value.strip()
    texts = []
    for message in filter(is_answer, value or []):
        texts.append(texts_of(message)[-1])
        texts += [str(call) for call in message.get("tool_calls") or ()]
    return "".join(texts).strip()


def with_standard_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the names ``role`` and ``content``.

    TRL takes ``from`` for the role also where that is null, so that none is left.
    """
    standard = {k: v for k, v in message.items() if k not in SHAREGPT}
    for other, name in SHAREGPT.items():
        if standard.get(name) is None and message.get(other) is not None:
            standard[name] = message[other]
    return standard


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of first items in which two sequences agree."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def chats_of(
    row: Mapping[str, Any],
) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Conversations of a row as TRL hands them to the chat template.

    Two conversations without a prompt begin with it.

    Returns:
        The column of each, the messages of the prompt before it, and its own.
    """
    chats = {column: chat for column in TRL_CHATS if are_messages(chat := row.get(column))}
    prompt = chats.pop("prompt", [])
    shared = 0
    if row.get("prompt") is None and {"chosen", "rejected"} <= chats.keys():
        shared = common_length(chats["chosen"], chats["rejected"])
    for column, messages in chats.items():
        before, chat = prompt if column in TRL_RESPONSES else [], messages
        if column in ("chosen", "rejected"):
            before, chat = [*before, *messages[:shared]], messages[shared:]
        yield column, list(map(with_standard_names, before)), list(map(with_standard_names, chat))


# --- marks ----------------------------------------------------------------------------------------

MESSAGE_WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""Fields of a message with a weight of its tokens, where weights are read."""
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight", "example_weight", "row_weight")
"""Columns with a weight of the whole row, where weights are read."""
SIDE_WEIGHTS = ("chosen_weight", "rejected_weight")
"""Columns with a weight of one response of a pair, where weights are read."""

# Fields of a message that is learned (1, true) or not (0, false).
_TRAINED = ("weight", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "loss", "train",
            "training", "trainable")  # fmt: skip
# Fields of a message that is not learned (true) or is (false).
_MASKED = ("mask", "masked")
# Words in the names of marks whose meaning is not known here.
_WORDS = {"learn", "learned", "loss", "mask", "masked", "masks", "train", "trainable", "trained",
          "training", "weight", "weights"}  # fmt: skip
# Words in the names of such marks where they are a truth value.
_SWITCHES = {"learnable", "supervise", "supervised", "ignore", "ignored", "masked", "unmasked"}

# Columns with a weight of the row, or of its tokens: 1 where all count alike.
_WEIGHTS = ("weight", "weights", "loss_weight", "loss_weights", "loss_scale", "loss_mask",
            "sample_weight", "example_weight")  # fmt: skip
# Columns that are 0 or false where a row is not to be learned.
_USED = ("train", "training", "trainable", "keep")
# Columns that are false where the response is a bad one.
_RIGHT = ("label", "kto_tag", "desirable", "correct", "is_correct", "accepted", "good", "is_good")
# Columns that are true where a row is not to be learned.
_WRONG = ("mask", "masked", "rejected", "bad", "is_bad", "wrong", "incorrect", "discard", "exclude",
          "ignore")  # fmt: skip
# Columns that are negative where the response is a bad one.
_REWARDS = ("reward", "score", "rating", "advantage")
# Columns that judge the response, and that may speak against a rejected one.
_JUDGES = (*_RIGHT, *_REWARDS, "rejected", "bad", "is_bad", "wrong", "incorrect")

# Other names of columns with a weight.
_WEIGHS = re.compile(
    "(row|sample|example|instance|token|loss|train|training)_(weights?|multipliers?|scales?)"
)
# Other names of columns that are false where a row is not to be learned.
_USES = re.compile(
    "((is|to|be|for|should|use|used|in)_)*(train|trained|training|trainable|learn|learned|"
    "learnable|keep|kept|supervised?|unmasked)"
)
# Other names of columns that are true where a row is not to be learned.
_LEAVES = re.compile(
    "((is|to|be|should)_)*(mask|masked|reject|rejected|discard|discarded|exclude|excluded|ignored?)"
    "|(no|not|dont|skip)_(loss|train|training|learn)"
)
_YES, _NO = ("yes", "y", "on"), ("no", "n", "off")

# Names of columns that judge the two responses of a pair.
_SCORED = re.compile(
    "score|rating|reward|grade|quality|helpful|harmless|honest|truthful|correctness|preference"
)
# Words for scores of which the smaller one is the better.
_RANKED = re.compile("rank|position|index")
# Names of columns that say by how much the chosen response is the better one.
_MARGINS = re.compile("margin|(score|rating|reward|grade|quality)s?_?(diff|delta|gap)")


# --- marks of messages ----------------------------------------------------------------------------


def _meaning(name: str, value: Any) -> bool | str | None:
    """True: learned; False: not learned; None: no mark; a text: what is wrong with the mark."""
    if name in _MASKED and (isinstance(value, bool) or (name == "masked" and value in (0, 1))):
        return not value
    if name in _TRAINED:
        if value in (0, 1):
            return bool(value)
        return "a turn is marked as trained in part, or by a weight of its own"
    switches = isinstance(value, bool) and not _SWITCHES.isdisjoint(_words(name))
    if value not in ("", [], {}) and (switches or not _WORDS.isdisjoint(_words(name))):
        return "a turn has a mark whose meaning is not certain"
    return "a turn is marked as a bad one" if _verdict(name, value, False) else None


@lru_cache(maxsize=1024)
def _words(name: str) -> tuple[str, ...]:
    parts = re.split(r"[^a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return tuple(filter(None, parts))


def is_learned(message: Columns, *, rejected: bool = False) -> bool:
    """True if a message, or a part of one, is to be learned by all of its marks, which are read.

    Args:
        message: its fields that were not read.
        rejected: it is of a pair's rejected response, which may be marked as a bad one.

    Raises:
        DataError: a mark that is neither yes nor no.
    """
    learned = True
    for name, value in message.left.items():
        meaning = None if rejected and _plain(name) in _JUDGES else _meaning(name, value)
        if isinstance(meaning, str):
            raise DataError(
                meaning,
                got=f"{message.place}: {name!r} is {short(repr(value), 40)}",
                why="a turn is learned whole, or not at all",
                remedy=f"write 'train' with true or false, {TRAIN_BY_WEIGHTS}or leave the field "
                f"aside: --unread_columns {name} (in Python Fields(unread=({name!r},)))",
            )
        if meaning is not None:
            learned &= meaning
            message.take(name, "mark")
    return learned


def mark_of(message: Mapping[str, Any], *, rejected: bool = False, weights: str = "refused") -> str:
    """The field by which a message, or a part of its content, is not to be learned whole; or "".

    Arguments are those of :func:`is_learned`; ``weights`` as for ``Columns``.
    """
    content = content_of(message)
    parts = content if isinstance(content, list) else []
    for fields in (message, *(part for part in parts if isinstance(part, Mapping))):
        for name, value in fields.items():
            if value is None or (rejected and _plain(name) in _JUDGES):
                continue
            if weights != "refused" and fields is message and weighs(name, value):
                continue
            if _meaning(name, value) not in (None, True):
                return f"{name!r} is {short(repr(value), 40)}"
    return ""


# --- marks of rows --------------------------------------------------------------------------------


def is_weight(name: str, value: Any) -> bool:
    """True for a field of a message that is a number by which it is weighed, not a yes or no."""
    return name in MESSAGE_WEIGHTS and value is not None and not isinstance(value, bool)


def weighs(name: str, value: Any) -> bool:
    """True for a field of a message by which it is weighed, or not learned."""
    return is_weight(name, value) or (value is not None and _meaning(name, value) is False)


def message_weight(message: Columns) -> float | None:
    """Weight of a message by its unread fields, which are then read; None where it has none.

    Raises:
        DataError: what is no weight; two weights that differ.
    """
    fields = MESSAGE_WEIGHTS if message.weights != "refused" else ()
    names = [name for name in fields if is_weight(name, message.left.get(name))]
    return _one_weight(message, names)


def row_weight(columns: Columns) -> float | None:
    """Weight of a row by its unread columns, which are then read; None where it has none.

    Raises:
        DataError: what is no weight; two weights that differ.
    """
    return _weight_in(columns, ROW_WEIGHTS)


def side_weight(columns: Columns, side: str) -> float | None:
    """The same of the response of a pair in the column ``side``."""
    return _weight_in(columns, tuple(n for n in SIDE_WEIGHTS if n == f"{side}_weight"))


def _weight_in(columns: Columns, names: Sequence[str]) -> float | None:
    left = columns.left if columns.weights != "refused" else {}
    return _one_weight(columns, [name for name in names if name in left])


def _one_weight(columns: Columns, names: Sequence[str]) -> float | None:
    weights = {
        name: checked_weight(
            _scalar(columns.left[name]), name, columns.place, signed=columns.weights == "signed"
        )
        for name in names
    }
    if len(set(weights.values())) > 1:
        raise DataError(
            "two weights contradict each other",
            got=f"{columns.place}: {', '.join(f'{n!r} is {w:g}' for n, w in weights.items())}",
            remedy="keep one of them, or leave one aside: "
            f"--unread_columns {names[0]} (in Python Fields(unread=({names[0]!r},)))",
        )
    for name in names:
        columns.take(name, "weight")
    return next(iter(weights.values()), None)


def checked_weight(value: Any, name: str, place: str, *, signed: bool) -> float:
    """A weight that a row brings, as a number.

    Raises:
        DataError: no real number within float32; a negative one, unless ``signed``.
    """
    value = int(value) if isinstance(value, bool) else value
    if not (_is_number(value) and abs(value) <= _FLOAT32):
        raise DataError(
            "a weight is no finite number",
            got=f"{place}: {name!r} is {short(repr(value), 40)}",
            why="each weight is a factor in float32 on the losses of tokens",
            remedy="write a finite number, or drop the row",
        )
    if value < 0 and not signed:
        raise DataError(
            "a weight is negative",
            got=f"{place}: {name!r} is {value!r}",
            why="the model would be trained away from the tokens",
            remedy="mend it (0 leaves tokens out); where it is meant, "
            """policy_options={"allow_negative": true}""",
        )
    return float(value)


def require_learned(columns: Columns, *, document: bool = False) -> None:
    """Refuse a row whose unread columns say that it is bad, or not to be learned, or by a weight.

    A 0 that may judge the row or not is noted, and the row stays.

    Args:
        columns: of the row; all that is read has been taken.
        document: the row is a plain text, whose labels are classes as a rule.
    """
    for name, value in columns.left.items():
        verdict = _verdict(name, value, document)
        if verdict:
            raise DataError(
                verdict,
                got=f"{columns.place}: {name!r} is {short(repr(value), 40)}",
                why="it would be valued and learned as the others are",
                remedy="drop such rows, or have them passed over (--on_bad_rows skip; not in "
                f"evaluate and merge); {TRAIN_BY_WEIGHTS if _is_row_weight(name) else ''}"
                f"if {name!r} says something else, leave it aside: "
                f"--unread_columns {name} (in Python Fields(unread=({name!r},)))",
            )
        if _plain(name) in (*_RIGHT, *_REWARDS) and _is_zero(_scalar(value)):
            columns.notes.append(f"{name} is {value!r}, and the row counts as the others do")


TRAIN_BY_WEIGHTS = "train by the weights (policy='weights'), "
"""Remedy for weights, which other policies do not read."""


def _is_row_weight(name: str) -> bool:
    return name in (*ROW_WEIGHTS, "loss_weights")


def _plain(name: str) -> str:
    return "_".join(_words(name))


def _verdict(name: str, value: Any, document: bool) -> str:
    """What a column says against a row, or ""."""
    against, value, name = (
        "the row is marked as one that is not to be learned",
        _scalar(value),
        _plain(name),
    )
    word = value.strip().lower() if isinstance(value, str) else None
    if name in _WEIGHTS or _WEIGHS.fullmatch(name):
        return _of_weights(value if isinstance(value, list) else [value], against)
    if name in _USED and (_is_zero(value) or word in _NO):
        return against
    if _USES.fullmatch(name) and (value is False or word in _NO):
        return against
    if name in _WRONG and name != "mask" and _is_number(value) and value == 1:
        return against
    if (name in _WRONG or _LEAVES.fullmatch(name)) and (value is True or word in _YES):
        return against
    if name == "verdict" and word == "drop":
        return against
    if name in ("mask", "masks") and isinstance(value, list) and value:
        return "the row has a mask whose meaning is not certain"
    if (name in _RIGHT and value is False and not document) or (
        name in _REWARDS and _is_number(value) and value < 0
    ):
        return "the response of the row is marked as a bad one"
    return ""


def _of_weights(weights: Sequence[Any], against: str) -> str:
    """What a column with a weight, or one for each token, says against a row, or ""."""
    if not all(_is_number(one) or isinstance(one, bool) for one in weights):
        return ""
    if not any(weights):
        return against if weights else ""
    return "" if all(one == 1 for one in weights) else "the row has a weight of its own"


def require_order(columns: Columns) -> None:
    """Refuse a pair whose scores say that the rejected response is the better one."""
    left = {name: _scalar(value) for name, value in columns.left.items()}
    plain = {_plain(name): name for name in left}
    for name, value in left.items():
        own = _plain(name)
        other = plain.get(own.replace("chosen", "rejected"), name)
        against = _MARGINS.search(own) and _is_number(value) and value < 0
        scores = f"{name!r} is {value!r}"
        is_score = _SCORED.search(own) is not None and _RANKED.search(own) is None
        if other != name and is_score and _is_number(value):
            worse = left[other]
            against = _is_number(worse) and value < worse
            scores += f", {other!r} is {worse!r}"
            if value == worse:
                columns.notes.append("both responses have the same score")
        if against:
            raise DataError(
                "the scores of a pair contradict its order",
                got=f"{columns.place}: {scores}",
                why="the response that is scored lower would be learned as the better one",
                remedy="swap or drop such pairs, or have them passed over (--on_bad_rows skip; not "
                f"in evaluate); if {name!r} says something else, leave it aside: --unread_columns "
                f"{name} (in Python Fields(unread=({name!r},)))",
            )


def _scalar(value: Any) -> Any:
    # All cells of a table are texts: what one says may be a truth value, a number or a list.
    if not isinstance(value, str) or len(value) > _LONGEST:
        return value
    try:
        parsed = json.loads(value.strip().lower() if value.strip() in _TRUTHS else value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, (bool, int, float, list)) else value


_TRUTHS = ("True", "False", "TRUE", "FALSE")
_FLOAT32 = 3.4028234663852886e38
# Characters of the longest text that is looked at: a mask of some thousand tokens.
_LONGEST = 1 << 16


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0
