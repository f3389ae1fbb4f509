"""Three pools that share nothing: training rows, validation rows, Fisher prompts.

A validation row that is also trained on makes every value look good; a Fisher prompt that is also
trained on is not a held-out sample of what the model knew. Both are checked here, not assumed.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alphatoken.data.encode import Example, prompt_tokens
from alphatoken.data.rows import KEEP_MARKS, Row
from alphatoken.data.survey import add_place, said_places
from alphatoken.errors import ConfigError, DataError, counted
from alphatoken.model.batch import IGNORE


@dataclass(frozen=True)
class Pools:
    """The result of :func:`split_pools`; ``counts`` says what was held out and removed, and why.

    ``places`` has, by the name of a count, where the first few rows are that were removed.
    """

    train: list[Row]
    validation: list[Row]
    fisher: list[Row]
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)


def normalise(text: str) -> str:
    """NFKC, case folded, runs of white space as one space: what counts as the same text."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def leak_keys(row: Row, by: str = "prompt") -> set[str]:
    """Digests of the normalised prompt and of the conversation, with roles; a common one is a leak.

    An empty prompt has no digest: rows of plain text are compared as wholes only. So are all rows
    by "conversation", for data in which rows share their prompt.
    """
    prompt = normalise(row.prompt)
    keys = {_digest("prompt", prompt)} if prompt and by == "prompt" else set()
    turns = (f"{turn.role}\x1e{normalise(turn.thought + turn.text)}" for turn in row.turns)
    return keys | {_digest("row", "\x1f".join(turns))}


def token_keys(example: Example, by: str = "prompt") -> set[str]:
    """The same of the tokens of a row: texts that differ may be one row to the model.

    A filled template is one beside the messages that it is made of, and so is a text that begins
    with the start token. Tokens behind the last label make no difference.
    """
    ids, labels = example.input_ids, example.labels
    last = max((i for i, label in enumerate(labels) if label != IGNORE), default=len(ids) - 1)
    keys = {_digest("tokens", _hex(ids)), _digest("tokens", _hex(ids[: last + 1]))}
    prompt = prompt_tokens(ids, labels)
    if by == "prompt" and len(prompt) < len(ids) and normalise(example.row.prompt):
        keys.add(_digest("prompt tokens", _hex(prompt)))
    return keys


def repeated_in(keys: Collection[str], pools: Mapping[str, AbstractSet[str]]) -> str | None:
    """The first of these pools, name -> keys of its rows, that has the row with these ``keys``."""
    return next((name for name, others in pools.items() if not others.isdisjoint(keys)), None)


def repeat_of(
    keys: Callable[[str], Collection[str]], by: str, pools: Mapping[str, AbstractSet[str]]
) -> tuple[str, bool] | None:
    """The first pool that has a row, and whether it has all of it; None where none has.

    Args:
        keys: keys of the row, by an option ``leak_key``.
        by: that option: by "prompt" a row may share the prompt alone.
        pools: as of :func:`repeated_in`.
    """
    pool = repeated_in(keys(by), pools)
    return None if pool is None else (pool, repeated_in(keys("conversation"), pools) is not None)


def _hex(ids: Sequence[int]) -> str:
    return array("q", ids).tobytes().hex()


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"{kind}\x1d{text}".encode()).hexdigest()


def split_pools(
    data: Sequence[Row],
    *,
    validation: Sequence[Row] | None = None,
    validation_rows: int = 0,
    fisher: Sequence[Row] | None = None,
    fisher_rows: int = 0,
    fisher_keys: Collection[str] = (),
    leak_key: str = "prompt",
    seed: int = 0,
    keys: Callable[[Row, str], set[str]] = leak_keys,
) -> Pools:
    """Training pool = data minus validation rows minus Fisher prompts, and what repeats them.

    A training row with the same prompt as a held-out one, or the same whole conversation, is
    removed. "Same" is exact after NFKC, case folding and white-space folding. An empty prompt
    never counts as the same.

    Args:
        data: rows to train on, before anything is held out.
        validation: validation rows of their own; or else
        validation_rows: how many rows to draw from ``data`` (seeded, without replacement).
        fisher: rows whose prompts the Fisher uses; or else
        fisher_rows: how many rows to draw from ``data`` for them.
        fisher_keys: :func:`leak_keys` of the rows a Fisher was fitted on earlier.
        leak_key: "conversation" lets rows share their prompt, and compares them as wholes.
        seed: of the draw.
        keys: of a row, by ``leak_key``; rows that have one in common repeat each other.

    Returns:
        The pools. Order within each is the order of the input. A row that is in the validation
        pool never enters the Fisher pool.

    Raises:
        ConfigError: more rows asked for than there are, or two sources for one pool.
        DataError: nothing left to train on.
    """
    if (validation is not None and validation_rows) or (fisher is not None and fisher_rows):
        raise ConfigError(
            "two sources for one held-out pool", remedy="give either a file or a number of rows"
        )
    drawn_validation, rest = _draw(data, validation_rows, "validation rows", seed)
    validation_pool = list(validation) if validation is not None else drawn_validation
    drawn_fisher, rest = _draw(rest, fisher_rows, "Fisher prompts", seed + 1)
    prompts = list(fisher) if fisher is not None else drawn_fisher

    validation_keys = _all_keys(validation_pool, keys)
    fisher_pool, places = list[Row](), defaultdict[str, list[str]](list)
    for row in prompts:
        if validation_keys & keys(row, leak_key):
            add_place(places["fisher_removed_same_as_validation"], row.place)
        else:
            fisher_pool.append(row)
    kept_out = _all_keys(fisher_pool, keys) | set(fisher_keys)
    train: list[Row] = []
    leaks, whole = {"validation": 0, "fisher": 0}, 0
    held_out = {"validation": validation_keys, "fisher": kept_out}
    for row in rest:
        repeat = repeat_of(partial(keys, row), leak_key, held_out)
        if repeat is None:
            train.append(row)
        else:
            pool, all_of_it = repeat
            leaks[pool] += 1
            whole += all_of_it
            add_place(places[f"removed_same_as_{pool}"], row.place)
    counts = {
        "rows": len(data),
        "drawn_validation": len(drawn_validation),
        "drawn_fisher": len(drawn_fisher),
        "removed_same_as_validation": leaks["validation"],
        "removed_same_as_fisher": leaks["fisher"],
        "fisher_removed_same_as_validation": len(prompts) - len(fisher_pool),
        "train": len(train),
        "validation": len(validation_pool),
        "fisher": len(fisher_pool),
    }
    if not train:
        raise none_left(counts, whole=whole)
    return Pools(train, validation_pool, fisher_pool, counts, dict(places))


def none_left(
    counts: Mapping[str, int], *, marked: bool = False, cut: bool = False, whole: int = 0
) -> DataError:
    """Error that no training row is left, with a remedy by the fate of the rows.

    Args:
        counts: of rows, by what becomes of them.
        marked: by their marks there is nothing to be learned of rows without response.
        cut: rows without response have one, beyond the length.
        whole: rows that were removed since all of them is a held-out row, not the prompt alone.
    """
    what, remedy = "no training row is left", "hold out fewer rows"
    removed = sum(counts.get(f"removed_same_as_{pool}", 0) for pool in ("validation", "fisher"))
    drawn = counts.get("drawn_validation", 0) + counts.get("drawn_fisher", 0)
    if removed and removed + drawn == counts.get("rows"):
        what += ": each repeats a held-out row" + " or its prompt" * (whole < removed)
    if counts.get("without_response") == counts.get("rows"):
        remedy = "look at the column of responses, or name it: --response_column NAME"
        remedy = KEEP_MARKS if marked else remedy
        remedy = "a larger --max_length: the responses begin beyond it" if cut else remedy
    elif removed and whole < removed:
        remedy = f"{removed - whole} share the prompt alone: compare whole conversations, "
        remedy += "--leak_key conversation (leak_key='conversation'); or other held-out rows"
    elif removed:
        remedy = "other training rows, or other held-out rows"
        for pool, what_drawn in (("validation", "validation rows"), ("fisher", "Fisher prompts")):
            if counts.get(f"drawn_{pool}") and counts.get(f"removed_same_as_{pool}"):
                remedy = f"{_FEWER[what_drawn]}; or more training rows that are no copies"
                break  # what is left repeats those that were drawn
    elif counts.get("bad_rows"):
        remedy = "look at the columns: without --on_bad_rows skip the first bad row is named"
    got = (f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count)
    return DataError(what, got=", ".join(got), remedy=remedy)


def refuse_one_file(
    train: str | None, held_out: Mapping[str, str | None], *, drawn: bool = True
) -> None:
    """Check that no held-out rows are those of the training file.

    Args:
        train: the training file.
        held_out: option -> file, or None.
        drawn: whether validation rows can be drawn from the training rows instead.

    Raises:
        ConfigError: the two are one file, under whatever name.
    """
    for flag, path in held_out.items():
        if train is not None and path is not None and Path(train).resolve() == Path(path).resolve():
            draw = "; or --validation_rows N in its place draws them from the training rows"
            raise ConfigError(
                f"--train_file and {flag} are the same file",
                got=str(path),
                why="each training row repeats a held-out row, and none would be left",
                remedy=f"{flag} of other rows{draw * (drawn and flag == '--validation_file')}",
            )


def about_pools(
    counts: Mapping[str, int],
    fisher_rows: str = "retention rows",
    places: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Sentences about rows removed to keep pools apart.

    Args:
        counts: of rows, by what becomes of them.
        fisher_rows: what those of the Fisher's pool are called.
        places: of the first few, by the name of their count.
    """
    removed = {
        "removed_same_as_validation": "training rows repeat a validation row or prompt",
        "removed_same_as_fisher": "training rows repeat a retention row or a prompt of the Fisher",
        "fisher_removed_same_as_validation": f"{fisher_rows} repeat a validation row or prompt",
    }
    shared = "; --leak_key conversation keeps those that share the prompt alone"
    return [
        f"{counted(counts[key], f'{what} and were removed')}"
        f"{said_places((places or {}).get(key, ()), counts[key])}"
        f"{shared * (counts[key] > counts['train'])}."
        for key, what in removed.items()
        if counts.get(key)
    ]


def _all_keys(rows: Sequence[Row], keys: Callable[[Row, str], set[str]]) -> set[str]:
    return {key for row in rows for key in keys(row, "prompt")}


# Kind of drawn rows -> options that draw fewer.
_FEWER = {
    "validation rows": "--validation_rows N for fewer, or --validation_file FILE",
    "Fisher prompts": "--fisher_prompts N for fewer (0 fits the Fisher on training prompts), "
    "--fisher_data FILE, or --retention none for no Fisher",
}


def check_draw(count: int, rows: int, what: str, fewer: str | None = None) -> None:
    """Check that so many of these rows can be drawn, and some remain.

    Args:
        count: rows to draw.
        rows: of which.
        what: they are called.
        fewer: what draws fewer of them, where it is no option of training.

    Raises:
        ConfigError: they cannot.
    """
    if count < 0 or (count >= max(1, rows) and count):
        raise ConfigError(
            f"{what} cannot be drawn from the data",
            got=f"{count} of {rows} rows",
            remedy=(fewer or _FEWER.get(what, "ask for fewer")) + "; rows to train on must remain",
        )


def _draw(rows: Sequence[Row], count: int, what: str, seed: int) -> tuple[list[Row], list[Row]]:
    check_draw(count, len(rows), what)
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    return (
        [row for index, row in enumerate(rows) if index in chosen],
        [row for index, row in enumerate(rows) if index not in chosen],
    )
