"""Rows handed over in Python, of whatever library: checked, and none that teaches nothing.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``prompt``, ``chosen`` and ``rejected``; what else a row says it passes over, so rows that it would
read otherwise than they are meant are refused. For the other forms that the command line knows,
``alphatoken.data.encode_row`` makes the tokens and labels.

TRL trains on whatever its preparation leaves over: an empty response, a pair with two equal
responses or a prompt that fills the whole length cost a place in a batch and teach nothing, or are
dropped without a word. Here they are left out or refused by ``on_empty``, by row number.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

from alphatoken.data import Survey
from alphatoken.data.messages import (
    CHANGING,
    CHATS,
    PROMPTS,
    RESPONSES,
    ROW_WEIGHTS,
    TRL_CHATS,
    answer_text,
    common_length,
)
from alphatoken.data.pairs import pair_problem
from alphatoken.data.texts import TOKENS_DIGEST
from alphatoken.data.trl_rows import (
    check_row,
    check_tokens,
    has_labels,
    in_trls_form,
    lost_of_messages,
    other_meaning,
)
from alphatoken.data.weights import (
    LOSS_WEIGHTS,
    PAIR_WEIGHTS,
    WEIGHT_COLUMNS,
    WEIGHTLESS,
    has_weights,
    listed_weights,
    no_weights,
    unweighted_messages,
)
from alphatoken.errors import AlphaTokenWarning, InputError, warn_caller
from alphatoken.model.loading import (
    find_parts,
    load_tokenizer,
    model_name,
    rows_tokenizer,
    text_tokenizer,
)

_TRLS = {"tools", "chat_template_kwargs", "image", "images"}
"""Columns that TRL reads beside these, or that are refused elsewhere."""
_FIRST_ROWS = 1024
"""Rows of a stream that are looked at before any work; each is looked at as it is read."""

_MANY_ROWS = 2048
"""Rows from which on a preparation takes seconds, so that datasets shows its bars."""

WEIGHTS = "row_weights"
"""Key among a reader's arguments: "read" or "signed" where weights of the rows are read."""

Problem = Callable[[Mapping[str, Any]], str | None]
"""Gives the reason for which a row cannot be trained on; None for one that can."""


@contextmanager
def bars_of_many(rows: Any) -> Iterator[None]:
    """Context in which datasets draws its bars, several for each data set, for many rows alone."""
    from datasets import disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    few = hasattr(rows, "__len__") and len(rows) < _MANY_ROWS
    hides = few and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


def form_of(columns: Collection[str], text_field: str) -> tuple[str, ...]:
    """Columns of a row without a pair that TRL reads; none of a form that it does not know."""
    if "input_ids" in columns:
        return ("input_ids",)
    if "prompt" in columns and "completion" in columns:
        return ("prompt", "completion")
    chats = tuple(name for name in CHATS if name in columns)
    return chats or ((text_field,) if text_field in columns else ())


def read_rows(rows: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Rows for ``SFTTrainer``, of which TRL loses nothing, without those that teach nothing.

    Raises:
        InputError: no rows; no column that TRL reads; TRL would read a row otherwise than it is
            meant; rows with an empty response (a call of a tool is one), by ``on_empty``.
    """
    dataset, text = as_dataset(rows, name), arguments["args"].dataset_text_field
    columns = columns_of(plain_rows(dataset), name)
    read = form_of(columns, text)
    if not read:
        raise InputError(
            f"the {name} data set has none of the columns that SFT needs",
            got=", ".join(sorted(columns)),
            remedy="input_ids, messages, conversations, prompt and completion, or "
            f"{text} (dataset_text_field)",
        )
    if read == ("input_ids",):
        return _tokens(dataset, name, arguments)
    other: set[str] = set()
    if "completion" in read:
        other = {*CHATS}
    elif read[0] in CHATS:
        other = {"prompt"}
    elif read == ("text",) and columns & {*PROMPTS} and columns & {*RESPONSES}:
        other = {*PROMPTS, *RESPONSES}
    response = "completion" if "completion" in read else read[0]

    def problem(row: Mapping[str, Any]) -> str | None:
        empty = not answer_text(row[response])
        return f"the {'text' if response == text else 'response'} is empty" if empty else None

    return _texts(dataset, name, {*read}, other | {*CHANGING}, arguments, problem)


def read_pairs(rows: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Pairs for ``DPOTrainer``, of which TRL loses nothing, without those that teach nothing.

    Raises:
        InputError: no rows; a needed column is missing; TRL would read a pair otherwise than it is
            meant; pairs with an empty response or two equal ones, also as the limits of their
            length leave them, by ``on_empty``.
    """
    dataset, args = as_dataset(rows, name), arguments["args"]
    columns = columns_of(plain_rows(dataset), name)
    missing = [column for column in ("chosen", "rejected") if column not in columns]
    if missing:
        raise InputError(
            f"the {name} data set has no column {' and no column '.join(map(repr, missing))}",
            got=", ".join(sorted(columns)),
            why="DPO compares two responses to one prompt",
            remedy="give prompt, chosen and rejected",
        )
    read = columns & {"prompt", "chosen", "rejected"}
    # A prompt by another name would not be refused by TRL: it would look for a common beginning of
    # the two responses instead.
    other = {*CHANGING} if "prompt" in columns else {*CHANGING, *PROMPTS, *CHATS}
    limited = bool(pair_limits(args))
    tokenizer = rows_tokenizer(args, tokenizer_of(arguments)) if limited else None

    def problem(row: Mapping[str, Any]) -> str | None:
        if (reason := pair_problem(row)) or tokenizer is None:
            return reason
        tokens = pair_tokens(row, tokenizer)
        return cut_problem(tokens, pair_left(tokens, args), args)

    return _texts(dataset, name, read, other, arguments, problem)


def require_tokens(
    dataset: Any,
    name: str,
    read: Collection[str],
    arguments: Mapping[str, Any],
    problem: Problem | None = None,
) -> Any:
    """Refuse tokenised rows of which something would be lost, and name the columns nothing reads.

    Args:
        dataset: of rows with ``input_ids``.
        name: of it, for messages.
        read: columns that the trainer below reads.
        arguments: its arguments; a collator of the caller's own reads what it likes.
        problem: looked for in each row, except in those of a stream.

    Returns:
        The rows, of which those of a stream are looked at as they are read too.

    Raises:
        InputError: names the first row of which something would be lost.
    """
    if not _reads_no_more(arguments):
        return _checked_rows(dataset, name, arguments, None, problem)
    columns = columns_of(plain_rows(dataset), name)
    read = {*read, *(columns & WEIGHT_COLUMNS if arguments.get(WEIGHTS) else ())}
    unread = sorted(columns - {*read, "attention_mask", TOKENS_DIGEST})
    tokenizer = tokenizer_of(arguments) if TOKENS_DIGEST in columns else None
    check = partial(check_tokens, read=read, tokenizer=tokenizer)
    return _checked_rows(dataset, name, arguments, check, problem, unread)


def tokenizer_of(arguments: Mapping[str, Any]) -> Any:
    """The trainer's; where none was handed over, the model's."""
    tokenizer, model = arguments.get("processing_class"), arguments.get("model")
    if tokenizer is None and model is not None:
        name = find_parts(model).tokenizer if isinstance(model, str) else model_name(model)
        tokenizer = load_tokenizer(name)
    return text_tokenizer(tokenizer)


# --- a data set, row by row -----------------------------------------------------------------------


def _checked_rows(
    dataset: Any,
    name: str,
    arguments: Mapping[str, Any],
    check: Callable[..., dict[str, Any]] | None,
    problem: Problem | None,
    unread: Sequence[str] = (),
) -> Any:
    """The data set in TRL's form, without rows that cannot be trained on; logs what was read.

    ``check`` refuses a row, or gives its columns in TRL's form; of a stream as it is read, too.
    """
    rows, args, weights = plain_rows(dataset), arguments["args"], arguments.get(WEIGHTS)
    whole = hasattr(rows, "__len__")
    survey = Survey(f"{name} rows" + f" (of a stream the first {_FIRST_ROWS})" * (not whole))
    survey.unread |= dict.fromkeys(unread)
    if check is not None:
        check = partial(check, name=name, unread=unread, survey=survey)
    problems, any_changes, weightless = dict[int, str](), False, 0
    for number, row in enumerate(islice(rows, None if whole else _FIRST_ROWS)):
        changes = {} if check is None else check(row, number)
        if weights and not has_weights(row, f"row {number}", weights):
            weightless += 1
        any_changes = any_changes or bool(changes)
        # The responses of a Fisher's rows are not read, and of a stream no row can be left out.
        if problem is not None and whole and name != "Fisher":
            reason = problem({**row, **changes})
            problems |= {number: reason} if reason else {}
    if weights:
        survey.rows = survey.rows or number + 1
        _note_weights(survey, weightless, whole=whole)
    if args.process_index == 0 and (survey.unread or survey.notes or weights):
        survey.log()
    if not whole and check is not None and hasattr(dataset, "map"):
        dataset = dataset.map(check, with_indices=True)
    elif any_changes:
        dataset = dataset.map(partial(in_trls_form, name=name), with_indices=True)
    return without_rows(problems, dataset, name, args.on_empty)


def _note_weights(survey: Survey, weightless: int, *, whole: bool = True) -> None:
    """Note how many rows bring no weight.

    Args:
        survey: of the rows.
        weightless: rows without one.
        whole: whether there are no others.

    Raises:
        InputError: none brings one.
    """
    if whole and weightless == survey.rows:
        raise no_weights(str(survey))
    if weightless:
        survey.notes[WEIGHTLESS] += weightless


def _reads_no_more(arguments: Mapping[str, Any]) -> bool:
    # A collator of the caller's own may read any column.
    return arguments.get("data_collator") is None and bool(arguments["args"].remove_unused_columns)


# --- texts and messages ---------------------------------------------------------------------------


def _texts(
    dataset: Any,
    name: str,
    read: set[str],
    other: set[str],
    arguments: Mapping[str, Any],
    problem: Problem,
) -> Any:
    """The data set of texts or messages, checked; ``other`` columns change what a row says."""
    columns = columns_of(plain_rows(dataset), name)
    weighed = WEIGHT_COLUMNS if arguments.get(WEIGHTS) else frozenset[str]()
    unread = sorted(columns - read - _TRLS - weighed) if _reads_no_more(arguments) else []
    check = partial(
        check_row,
        weights=arguments.get(WEIGHTS, "refused"),
        read=read,
        beside=sorted((columns - read) & (other - _TRLS)),
        tokenizer=_with_trls_template(arguments["args"], tokenizer_of(arguments)),
    )
    return _checked_rows(dataset, name, arguments, check, problem, unread)


def _with_trls_template(args: Any, tokenizer: Any) -> Any:
    # Where it marks the answers TRL writes with a template of its own.
    tokenizer = rows_tokenizer(args, tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    marks = re.search(r"{%-?\s*generation", str(template))
    if template and getattr(args, "assistant_only_loss", False) and marks is None:
        from trl import get_training_chat_template

        with suppress(ValueError):  # raised where TRL makes the rows
            template = get_training_chat_template(tokenizer) or template
            tokenizer = deepcopy(tokenizer)
            tokenizer.chat_template = template
    return tokenizer


# --- tokens ---------------------------------------------------------------------------------------


def _tokens(dataset: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    # Labels stay as they are; the columns are those that ``SFTTrainer`` reads.
    columns, args = columns_of(plain_rows(dataset), name), arguments["args"]
    read = {"input_ids", "labels"} & columns
    if "labels" not in columns:
        read |= {"assistant_masks"} & columns
        read |= {"completion_mask"} & columns if _completions_only(arguments) else set()
    if name == "training" and getattr(args, "padding_free", False) and not args.packing:
        read |= {"seq_lengths"} & columns

    def problem(row: Mapping[str, Any]) -> str | None:
        return None if has_labels(row, read) else "the response is empty"

    dataset = require_tokens(dataset, name, read, arguments, problem)
    return with_token_weights(dataset, name, arguments)


def with_token_weights(dataset: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Tokenised rows with one column of weights, by token; as they are where none is read.

    Raises:
        InputError: rows of a kind that no column can be added to, and that state weights otherwise.
    """
    weights = arguments.get(WEIGHTS)
    if not weights:
        return dataset
    weigh = partial(_token_weights, weights=weights)
    columns = columns_of(plain_rows(dataset), name)
    others = sorted(columns & {*ROW_WEIGHTS})
    if isinstance(dataset, (list, tuple)):
        rows = [{**row, **weigh(row, number)} for number, row in enumerate(dataset)]
        return [{k: v for k, v in row.items() if k not in others} for row in rows]
    if _can_map(dataset):
        return dataset.map(weigh, with_indices=True, remove_columns=others)
    if others or LOSS_WEIGHTS not in columns:
        raise InputError(
            f"weights of the {name} rows cannot be laid on their tokens",
            got=f"{type(dataset).__name__} with {', '.join(sorted(columns))}",
            why="nothing can be added to rows that are made as they are read",
            remedy=f"give them {LOSS_WEIGHTS}, one number a token, and no other weight; or a "
            "datasets.Dataset",
        )
    return dataset


def without_weights(dataset: Any) -> Any:
    """Training rows without the weights that they bring; all else stays, in its order.

    Raises:
        InputError: rows of a kind that nothing can be taken from.
    """
    columns = columns_of(plain_rows(dataset), "training")
    if not _can_map(dataset):
        raise InputError(
            "weights cannot be taken from the training rows",
            got=type(dataset).__name__,
            why="rows that are made as they are read cannot be changed",
            remedy="a list of rows, or a datasets.Dataset without a transform",
        )
    rest = dataset.remove_columns(sorted(columns & WEIGHT_COLUMNS))
    return rest.map(unweighted_messages) if columns & {*TRL_CHATS} else rest


def _can_map(dataset: Any) -> bool:
    form = (getattr(dataset, "format", None) or {}).get("type")
    return hasattr(dataset, "map") and form != "custom"


def _token_weights(row: Mapping[str, Any], number: int, weights: str) -> dict[str, list[float]]:
    plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()}
    tokens = len(plain["input_ids"])
    listed = listed_weights(plain, LOSS_WEIGHTS, tokens, f"row {number}", weights)
    return {LOSS_WEIGHTS: [1.0] * tokens if listed is None else listed}


def _completions_only(arguments: Mapping[str, Any]) -> bool:
    # TRL decides by the first training row.
    only = arguments["args"].completion_only_loss
    if only is not None:
        return bool(only)
    train = arguments.get("train_dataset")
    first = next(iter(train), None) if train is not None else None
    return isinstance(first, Mapping) and {"prompt", "completion"} <= set(first)


# --- sets of rows ---------------------------------------------------------------------------------


class _PlainRows:
    """Rows read one by one by their number, tensors and arrays in them as lists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # a data set of one's own may have another end
        row = self._dataset[index]
        try:
            columns = dict(row)
        except (TypeError, ValueError):
            raise InputError(
                "a row of a data set has no columns",
                got=f"row {index} of a {type(self._dataset).__name__}: {type(row).__name__}",
                why="rows are read by the names of their columns",
                remedy="rows as dictionaries, such as {'input_ids': ..., 'labels': ...}",
            ) from None
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def plain_rows(dataset: Any) -> Any:
    """A data set whose rows are mappings of lists, numbers and texts, for whoever reads them.

    Streams stay, and all that give plain rows already.
    """
    kind = (getattr(dataset, "format", None) or {}).get("type")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return dataset
    if isinstance(dataset, (list, tuple, _PlainRows)):
        return dataset
    if hasattr(dataset, "column_names") and kind is None:
        return dataset
    # In a format of tensors or with a transform, and of a torch Dataset, rows are tensors, or have
    # columns that are not those that are stored.
    return _PlainRows(dataset)


def columns_of(dataset: Any, name: str) -> set[str]:
    """Names of the columns; of a stream that does not know them, those of its first row.

    Raises:
        InputError: no rows.
    """
    columns = getattr(dataset, "column_names", None)
    first = next(iter(dataset), None)
    if first is None:
        raise InputError(f"the {name} data set has no rows", got="0 rows", remedy="give some")
    return set(columns if columns is not None else first)


def as_dataset(rows: Any, name: str) -> Any:
    """A list of records or of texts as a ``datasets.Dataset``; a data set as it is.

    Raises:
        InputError: no rows, a path, or a mapping; records that are not of one form; the message
            says what to give.
    """
    if not isinstance(rows, (str, Mapping, list, tuple)):
        return rows
    if isinstance(rows, (list, tuple)) and rows:
        from datasets import Dataset

        if all(isinstance(row, str) for row in rows):
            return Dataset.from_dict({"text": list(rows)})
        if all(isinstance(row, Mapping) for row in rows):
            records = [{**row, **in_trls_form(row, n, name)} for n, row in enumerate(rows)]
            # ``Dataset.from_list`` would take the first record's columns for all.
            columns = dict.fromkeys(column for row in records for column in row)
            return _of_columns({c: [row.get(c) for row in records] for c in columns}, name, records)
    raise InputError(
        f"the {name} data set is no set of rows",
        got=f"{type(rows).__name__}: {str(rows)[:60]!r}",
        remedy="give a datasets.Dataset (one split of it), a list of records or a list of texts; "
        "load_dataset('json', data_files=FILE, split='train') reads a file",
    )


def _of_columns(columns: Mapping[str, list[Any]], name: str, rows: Sequence[Any]) -> Any:
    """A data set of these columns, each of which holds values of one kind.

    Raises:
        InputError: one holds several; the message names what is lost of ``rows`` first.
    """
    import pyarrow as pa
    from datasets import Dataset

    try:
        return Dataset.from_dict(columns)
    except pa.ArrowException as error:
        for number, row in enumerate(rows):
            if lost := lost_of_messages(row):
                raise other_meaning(lost, row, name, number) from None
        kinds = {c: {type(v).__name__ for v in own if v is not None} for c, own in columns.items()}
        several = {c: " and ".join(sorted(k)) for c, k in kinds.items() if len(k) > 1}
        raise InputError(
            f"the {name} rows are of several forms",
            got="; ".join(f"{c!r} holds {own}" for c, own in several.items()) or str(error),
            why="a column of a data set holds values of one kind",
            remedy="write a column in one kind for all rows: texts, or messages of which each "
            "field is of one kind",
        ) from None


def require_rows(rows: Any, name: str) -> None:
    """Refuse tables and iterators of other libraries, which TRL reads in none of its forms.

    Raises:
        InputError: names what makes a data set of them.
    """
    library = type(rows).__module__.partition(".")[0]
    remedy = {
        "pandas": "datasets.Dataset.from_pandas(rows, preserve_index=False)",
        "polars": "datasets.Dataset.from_polars(rows)",
        "pyarrow": "datasets.Dataset(rows)",
        "numpy": "datasets.Dataset.from_list(rows.tolist())",
    }.get(library)
    if remedy is None and (isinstance(rows, Iterator) or inspect.isfunction(rows)):
        remedy = (
            "datasets.Dataset.from_list(list(rows)), or datasets.IterableDataset.from_generator"
        )
    if remedy is not None:
        raise InputError(
            f"the {name} data set is no set of rows",
            got=f"{type(rows).__module__}.{type(rows).__qualname__}",
            why="rows are looked at by their number before training, and again in it",
            remedy=remedy,
        )


def require_trls_dataset(rows: Any) -> None:
    """Refuse training rows that TRL does not take.

    Raises:
        InputError: they are no data set of ``datasets``.
    """
    from datasets import Dataset, IterableDataset

    if not isinstance(rows, (Dataset, IterableDataset)):
        raise InputError(
            "the training data set is none that TRL reads",
            got=f"{type(rows).__module__}.{type(rows).__qualname__}",
            remedy="datasets.Dataset.from_list([dict(row) for row in rows])",
        )


# --- rows that are left out -----------------------------------------------------------------------


def without_rows(problems: Mapping[int, str], dataset: Any, name: str, on_empty: str) -> Any:
    """The data set without rows that cannot be trained on, or an error that names them.

    Args:
        problems: number of a row, from 0 -> reason for which it cannot be trained on.
        dataset: the rows.
        name: of the data set, for messages.
        on_empty: "error", or "skip" to leave them out with a warning.

    Raises:
        InputError: holds count and row numbers.
    """
    if not problems:
        return dataset
    survey, total = Survey(f"{name} rows"), len(dataset)
    for number, reason in problems.items():
        survey.leave_out(reason, f"row {number}")
    can_skip = hasattr(dataset, "select") and len(problems) < total
    if on_empty == "error" or not can_skip:
        raise InputError(
            f"{len(problems)} of {total} {name} rows cannot be trained on",
            got="; ".join(survey.left_out("rows")),
            why="they would take a place in a batch and teach nothing, or noise",
            remedy=f"mend them{', or on_empty=skip leaves them out' if can_skip else ''}",
        )
    sentences = survey.left_out(f"of {total} {name} rows left out")
    warn_caller(f"{'; '.join(sentences)}. on_empty='error' stops instead.", AlphaTokenWarning)
    return dataset.select([number for number in range(total) if number not in problems])


def check_left(rows: Any, prepared: Any, args: Any) -> None:
    """Count the training rows that the trainer below left out, of which no response token is left.

    Raises:
        InputError: no row is left.
    """
    if not (hasattr(prepared, "__len__") and hasattr(rows, "__len__")):
        return
    before, after, limit = len(rows), len(prepared), getattr(args, "max_length", None)
    if before and not after:
        raise InputError(
            "no training row has a response token left",
            got=f"{before} rows, max_length {limit}",
            why="there would be nothing to train on",
            remedy="a larger max_length, or shorter prompts",
        )
    # Packed rows are other rows, and are not counted.
    if not getattr(args, "packing", False):
        warn_of_left(rows, prepared, "training", args)


def warn_of_left(rows: Any, kept: Any, name: str, args: Any) -> None:
    """Warn of rows that were left out because no response token is left of them, by their number.

    Args:
        rows: as they were handed over; of a stream nothing is counted.
        kept: those that are left.
        name: of the data set.
        args: configuration of the trainer.
    """
    before = len(rows) if hasattr(rows, "__len__") else 0
    if len(kept) >= before:
        return
    survey, limit = Survey(f"{name} rows"), getattr(args, "max_length", None)
    within = "" if limit is None else f" within max_length={limit}"
    survey.leave_out(f"no response token{within}", count=before - len(kept))
    (sentence,) = survey.left_out(f"of {before} {name} rows left out")
    warn_caller(f"{sentence}.", AlphaTokenWarning)


# --- rows that are cut ----------------------------------------------------------------------------


def kept_tokens(args: Any, *, packed: bool) -> slice:
    """Tokens of a row that TRL's truncation leaves.

    Args:
        args: configuration of the trainer.
        packed: the rows are packed.
    """
    limit = getattr(args, "max_length", None)
    prepared = not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if limit is None or not prepared:
        return slice(None)
    if packed:
        # Only this way of packing cuts rows; the others go on in the next block.
        return slice(limit if args.packing_strategy == "bfd" else None)
    return slice(None, limit) if args.truncation_mode == "keep_start" else slice(-limit, None)


def trained_parts(row: Mapping[str, Any], args: Any) -> Iterator[dict[str, Any]]:
    """What TRL trains on of a tokenised row: its tokens that are left, or parts of a split row.

    Args:
        row: with ``input_ids``, before it is cut or packed.
        args: configuration of the trainer.
    """
    length, packed = len(row["input_ids"]), bool(getattr(args, "packing", False))
    parts = [kept_tokens(args, packed=packed)]
    if packed and args.packing_strategy == "bfd_split":
        parts = [slice(at, at + args.max_length) for at in range(0, length, args.max_length)]
    read = {name: row[name] for name in ("input_ids", "labels") if row.get(name) is not None}
    yield from ({name: tokens[part] for name, tokens in read.items()} for part in parts)


def cut_pair(
    row: Mapping[str, Any], *, max_prompt: int | None, max_response: int | None
) -> dict[str, Any]:
    """A tokenised pair whose prompt and responses are each cut to a length of their own."""
    # A prompt keeps its end, which the response answers; a response keeps its start, which no later
    # token has changed. So did TRL while it had two limits.
    prompt = row["prompt_ids"] if max_prompt is None else row["prompt_ids"][-max_prompt:]
    cut = [name for name in ("chosen_ids", "rejected_ids", *PAIR_WEIGHTS) if name in row]
    responses = {name: row[name][:max_response] for name in cut}
    return {**row, "prompt_ids": prompt, **responses}


def pair_limits(args: Any) -> dict[str, int]:
    """The limits of a pair's length that are set, by name; of any trainer's configuration."""
    names = ("max_length", "max_prompt_length", "max_response_length")
    return {name: own for name in names if (own := getattr(args, name, None)) is not None}


def said_limits(args: Any, *, between: str = "=", before: str = "") -> str:
    """The limits of a pair's length in words: ``max_length=64, max_response_length=9``."""
    return ", ".join(f"{before}{name}{between}{own}" for name, own in pair_limits(args).items())


def pair_tokens(row: Mapping[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    """Tokens of a pair in TRL's form, before any is cut, as TRL makes them."""
    if "prompt" not in row:
        from trl.data_utils import extract_prompt

        row = {**row, **extract_prompt(dict(row))}
    prompt = row["prompt"]
    texts = [prompt, *(prompt + row[side] for side in ("chosen", "rejected"))]
    if plain := isinstance(prompt, str):
        end = getattr(tokenizer, "eos_token", None) or ""
        texts[1:] = [text if text.endswith(end) else text + end for text in texts[1:]]
    else:
        tools = row.get("tools")
        how = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        how |= row.get("chat_template_kwargs") or {}
        texts = [
            tokenizer.apply_chat_template(
                own, tokenize=False, **how, **({} if number else {"add_generation_prompt": True})
            )
            for number, own in enumerate(texts)
        ]
    first, chosen, rejected = (
        tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"] for text in texts
    )
    count = min(common_length(first, own) for own in (chosen, rejected))
    responses = {"chosen_ids": chosen[count:], "rejected_ids": rejected[count:]}
    return {"prompt_ids": first[:count], **responses}


def pair_left(pair: Mapping[str, Any], args: Any) -> list[list[tuple[int, bool]]]:
    """Tokens of both sides that all limits leave, each with whether it is of the response.

    Args:
        pair: with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, before they are cut.
        args: configuration of the trainer.
    """
    limits, kept = pair_limits(args), kept_tokens(args, packed=False)
    prompt, response = (limits.get(f"max_{name}_length") for name in ("prompt", "response"))
    cut = cut_pair(pair, max_prompt=prompt, max_response=response)
    before = [(token, False) for token in cut["prompt_ids"]]
    return [
        [*before, *((token, True) for token in cut[side])][kept]
        for side in ("chosen_ids", "rejected_ids")
    ]


def cut_problem(
    pair: Mapping[str, Any], left: Sequence[Sequence[tuple[int, bool]]], args: Any
) -> str | None:
    """Reason for which DPO cannot train on a pair as it is cut.

    Args:
        pair: before it is cut.
        left: of both sides, by :func:`pair_left`.
        args: configuration of the trainer.
    """
    chosen, rejected = left
    # A prompt that leaves no room for a response is another matter, and TRL drops it.
    has_response = any(own for _, own in chosen)
    if not has_response or chosen != rejected:
        return None
    if pair["chosen_ids"] == pair["rejected_ids"]:
        return "chosen and rejected are the same tokens"
    return f"chosen and rejected are equal within {said_limits(args)}"
