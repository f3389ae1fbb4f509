"""Reads rows as ``sft`` and ``dpo`` do, and shows which tokens of them are trained on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from alphatoken.cli.marked_text import marked_text
from alphatoken.cli.recipes import recipes_of
from alphatoken.cli.show import ShowOptions, ShowRequest
from alphatoken.cli.training import load_tokenizer, trainer_of, vocabulary_of
from alphatoken.data import Example, Pair
from alphatoken.data.pairs import CHOSEN, REJECTED
from alphatoken.data.source import find_source
from alphatoken.data.weights import PAIR_WEIGHTS
from alphatoken.errors import ConfigError, InputError, counted, first_few
from alphatoken.model.batch import IGNORE
from alphatoken.support.terminal import has_colour

# Nothing is trained here, so that a machine without a GPU shows what one with a GPU trains on.
_HERE = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false")


@dataclass(frozen=True)
class TrainedTokens:
    """Tokens of one sequence of a row, as they reach a batch.

    Attributes:
        index: of the row in its source, from 0.
        place: of the row, for people.
        side: "chosen" or "rejected" of a pair, else "".
        ids: (t,) tokens that are left after truncation.
        weights: (t,) weight of each; None where it has no label or nothing predicts it.
        cut: number of tokens that truncation took.
        weighted: whether the row brings weights.
    """

    index: int
    place: str
    side: str
    ids: list[int]
    weights: list[float | None]
    cut: int
    weighted: bool

    @property
    def trained(self) -> list[float]:
        """Weights of the tokens that are trained on."""
        return [weight for weight in self.weights if weight]


def run(request: ShowRequest) -> None:
    """Show the rows on stdout; errors are those of :func:`read_tokens` and a row there is not."""
    tokens, reader = read_tokens(request)
    _print(_report(tokens, reader, request))


def read_tokens(request: ShowRequest) -> tuple[list[TrainedTokens], Any]:
    """All rows as ``sft`` or ``dpo`` trains on them, and the ``RowReader`` that read them.

    Raises:
        AlphaTokenError: what ``sft`` or ``dpo`` refuses of these rows and options.
    """
    command = "dpo" if request.options.dpo or _has_pairs(request) else "sft"
    arguments = _arguments(request, command)
    tokenizer = load_tokenizer(arguments)
    from alphatoken.cli.training_rows import RowReader

    # Unless a policy is named, weights are read where there are any.
    named = _names_policy(request.words)
    weights, vocabulary = None if named else "signed", vocabulary_of(arguments)
    reader = RowReader(arguments, tokenizer, vocabulary, weights, needs_weights=named)
    items: list[Any] = reader.training_rows()
    return [*(_of_pairs if reader.pairs else _of_rows)(items, reader)], reader


def _arguments(request: ShowRequest, command: str) -> Any:
    configuration, _ = trainer_of(command, request.words)
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training_rows import check_rows

    file = () if request.file is None else ("--train_file", request.file)
    arguments = read_arguments(command, [*request.words, *file, *_HERE], configuration)
    if arguments.model.model_name_or_path is None:
        raise ConfigError("no model is named", remedy="--model_name_or_path FOLDER_OR_HUB_NAME")
    check_rows(arguments)
    # A row that cannot be read is counted: it must not hide the others.
    if "--on_bad_rows" not in " ".join(request.words):
        arguments.data.on_bad_rows = "skip"
    return arguments


def _has_pairs(request: ShowRequest) -> bool:
    if any(recipe.command == "dpo" for recipe in recipes_of(request.words)):
        return True
    named = (word for name, word in pairwise(request.words) if name == "--train_file")
    file = next(named, None) if request.file is None else request.file
    if file is None or not Path(file).exists():
        return False
    records = (row.record for row in find_source(file).read())
    for names in islice((own for own in records if isinstance(own, dict)), 1):
        return all(any(names.get(n) is not None for n in some) for some in (CHOSEN, REJECTED))
    return False


def _names_policy(words: Sequence[str]) -> bool:
    typed = any(word.split("=")[0] == "--policy" for word in words)
    return typed or any("policy" in recipe.options for recipe in recipes_of(words))


# --- tokens as they reach a batch -----------------------------------------------------------------


def _of_rows(items: Sequence[Example], reader: Any) -> Iterator[TrainedTokens]:
    from alphatoken.cli.training_rows import is_weighted
    from alphatoken.train.python_rows import kept_tokens

    args = reader.arguments.training
    kept = kept_tokens(args, packed=getattr(args, "packing", False))
    for item in items:
        own = item.weights or [1.0] * len(item.input_ids)
        pairs = zip(item.labels, own, strict=True)
        weights = [None if label == IGNORE else weight for label, weight in pairs]
        yield _cut(item, "", item.input_ids, weights, kept, is_weighted(item))


def _of_pairs(items: Sequence[Pair], reader: Any) -> Iterator[TrainedTokens]:
    from trl.trainer.dpo_trainer import DPOTrainer

    from alphatoken.cli.training_rows import is_weighted
    from alphatoken.train.dpo import whole_pairs
    from alphatoken.train.python_rows import bars_of_many, cut_pair, kept_tokens

    args, tokenizer = reader.arguments.training, reader.tokenizer
    # All that TRL's preparation of pairs reads of its trainer.
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    prepare = partial(
        DPOTrainer._prepare_dataset,
        trainer,
        processing_class=tokenizer,
        dataset_name="train",
    )
    rows = reader.dataset(items, weighed=reader.weights != "refused")
    rows = rows.add_column("number", list(range(len(items))))
    with bars_of_many(rows):
        pairs = whole_pairs(prepare, rows, args, tokenizer, reader.weights)
    kept = kept_tokens(args, packed=False)
    for whole in pairs:
        pair = cut_pair(
            whole, max_prompt=args.max_prompt_length, max_response=args.max_response_length
        )
        item, prompt = items[pair["number"]], pair["prompt_ids"]
        for side, name in zip(("chosen", "rejected"), PAIR_WEIGHTS, strict=True):
            ids = pair[f"{side}_ids"]
            weights = [None] * len(prompt) + (pair.get(name) or [1.0] * len(ids))
            own = _cut(item, side, [*prompt, *ids], weights, kept, is_weighted(item))
            length = len(whole["prompt_ids"]) + len(whole[f"{side}_ids"])
            yield replace(own, cut=length - len(own.ids))


def _cut(
    item: Any,
    side: str,
    ids: list[int],
    weights: list[float | None],
    kept: slice,
    weighted: bool,
) -> TrainedTokens:
    left, own = ids[kept], weights[kept]
    own[:1] = [None] * len(own[:1])  # nothing predicts the first token
    place = item.row.place
    return TrainedTokens(item.row.index, place, side, left, own, len(ids) - len(left), weighted)


# --- what is printed ------------------------------------------------------------------------------


def _report(tokens: Sequence[TrainedTokens], reader: Any, request: ShowRequest) -> Iterator[str]:
    from alphatoken.train.python_rows import said_limits

    colour = has_colour(sys.stdout, request.options.color)
    length = said_limits(reader.arguments.training, between=" ", before="--")
    for own in _chosen(tokens, request.options):
        yield f"row {own.index + 1} ({', '.join(filter(None, (own.place, own.side)))})"
        text = marked_text(reader.tokenizer, own.ids, own.weights, colour=colour)
        yield text.removesuffix("\n")
        cut = f"; {counted(own.cut, 'tokens')} cut by {length}" if own.cut else ""
        yield f"trained {_counts([own])}{cut}\n"
    yield from _summary(tokens, reader, length)
    yield from _next(tokens, reader, request)


def _chosen(tokens: Sequence[TrainedTokens], options: ShowOptions) -> list[TrainedTokens]:
    indices = dict.fromkeys(own.index for own in tokens)
    if options.row is None:
        shown = {*islice(indices, options.rows)}
        return [own for own in tokens if own.index in shown]
    for number in options.row:
        if number - 1 not in indices:
            raise InputError(
                "there is no such row to show",
                got=f"--row {number}; rows that are trained on: "
                f"{first_few([str(i + 1) for i in indices], 10)}",
                why="rows are counted from 1, and those that are left out have no tokens",
                remedy="another number",
            )
    return [own for number in options.row for own in tokens if own.index == number - 1]


def _counts(tokens: Sequence[TrainedTokens]) -> str:
    count, trained = sum(len(own.ids) for own in tokens), [w for own in tokens for w in own.trained]
    share = 100 * len(trained) / max(count, 1)
    return f"{len(trained)} of {count} tokens ({share:.0f} %), sum of weights {sum(trained):.6g}"


def _summary(tokens: Sequence[TrainedTokens], reader: Any, length: str) -> Iterator[str]:
    rows, items = len({own.index for own in tokens}), "pairs" if reader.pairs else "rows"
    yield f"all {counted(rows, items)}: trained {_counts(tokens)}"
    weighted = {own.index for own in tokens if own.weighted}
    if weighted:
        # Also of tokens whose weight is 0.
        weights = [w for own in tokens if own.weighted for w in own.weights if w is not None]
        least, most = min(weights, default=0.0), max(weights, default=0.0)
        without = rows - len(weighted)
        others = (
            f"; {without} bring{'s' * (without == 1)} none, which counts as 1" if without else ""
        )
        yield f"weights of {counted(len(weighted), items)}: {least:g} to {most:g}{others}"
    else:
        yield "weights: no row brings one; every trained token counts as 1"
    untrained = {own.index for own in tokens} - {own.index for own in tokens if own.trained}
    yield f"without a trained token: {counted(len(untrained), items)}"
    cut = [own for own in tokens if own.cut]
    lost = f" by {length}, {counted(sum(own.cut for own in cut), 'tokens')}" if cut else ""
    yield f"cut: {counted(len({own.index for own in cut}), items)}{lost}"
    yield from reader.surveys["training"].left_out(f"{items} left out")


def _next(tokens: Sequence[TrainedTokens], reader: Any, request: ShowRequest) -> Iterator[str]:
    arguments, words = reader.arguments, list(request.words)
    if request.file is not None:
        words = ["--train_file", request.file, *words]
    if reader.surveys["training"].bad_rows and "--on_bad_rows" not in " ".join(words):
        words += ["--on_bad_rows", "skip"]
    weighted = any(own.weighted for own in tokens)
    unnamed = reader.weights != "refused" and not reader.needs_weights
    if unnamed and weighted:
        words += ["--policy", "weights", "--validation_rows", "0"]
        if any(weight < 0 for own in tokens for weight in own.trained):
            words += ["--policy_options", '{"allow_negative": true}']
    elif any(form.startswith("input_ids") for form in reader.surveys["training"].forms):
        yield (
            "\nnext: AlphaSFTTrainer in Python, which takes rows of tokens (alphatoken sft reads "
            "them where a row brings a weight)"
        )
        return
    elif not _names_policy(request.words):  # the tokens that are shown, all of them
        words += ["--policy", "standard", "--validation_rows", "0"]
    yield f"\nnext: {shlex.join(['alphatoken', arguments.command, *words])}"


def _print(lines: Iterator[str]) -> None:
    # A terminal that lacks a character shows its number.
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        print(line.encode(encoding, "backslashreplace").decode(encoding))
