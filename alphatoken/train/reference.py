"""Second models must read the trained model's tokens: those of other ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError, ModelError
from alphatoken.model.batch import embedding_rows
from alphatoken.model.folder import is_adapter
from alphatoken.model.loading import has_tokenizer, limits_of, load_tokenizer, model_name
from alphatoken.train.python_rows import tokenizer_of

_REMEDY = "a reference of the same family and vocabulary; ref_model=None copies the trained model"


def check_tokens(own: Any, rows: int, other: Any = None, tokens: int | None = None) -> None:
    """Refuse a second model to which the trained model's token ids are nothing, or other tokens.

    Args:
        own: tokenizer of the trained model.
        rows: of the second model's embedding.
        other: tokenizer of the second model, where it has one.
        tokens: rows of the trained model's embedding, where it has fewer than its tokenizer tokens.

    Raises:
        ConfigError: names what differs.
    """
    # It may have fewer rows than the trained model where no token is among those it lacks.
    count = min(len(own), tokens or len(own))
    if rows < count:
        raise ConfigError(
            "the reference model has no row for some tokens of the trained model",
            got=f"{rows} rows, {count} tokens",
            why="it would be asked about tokens that it has never seen",
            remedy=_REMEDY,
        )
    # A token that its tokenizer does not name contradicts nothing: it may be a reserved one.
    ids = {} if other is None else other.get_vocab()
    wrong = [text for text, number in own.get_vocab().items() if ids.get(text, number) != number]
    if wrong:
        text = wrong[0]
        raise ConfigError(
            "the tokens of the reference model are not the trained model's",
            got=f"{len(wrong)} of {len(own)} tokens, such as {text!r}: id "
            f"{own.get_vocab()[text]} here, {ids[text]} in the reference",
            why="the same ids would be other words to it",
            remedy=_REMEDY,
        )


def _check_follows(arguments: Mapping[str, Any]) -> None:
    args: Any = arguments.get("args")
    model = arguments.get("model")
    adapted = arguments.get("peft_config") is not None or hasattr(model, "peft_config")
    if isinstance(model, (str, Path)):  # which is loaded later
        adapted = adapted or is_adapter(model)
    if not getattr(args, "sync_ref_model", False):
        return
    if adapted or args.precompute_ref_log_probs:
        raise ConfigError(
            "sync_ref_model moves a reference model, and there is none",
            got="adapters, which are switched off for the reference"
            if adapted
            else "precompute_ref_log_probs=True",
            why="the run would be measured against one that stands still",
            remedy="sync_ref_model=False, or full fine-tuning without precompute_ref_log_probs",
        )


def check_reference(arguments: Mapping[str, Any]) -> None:
    """Refuse a reference of preference pairs that reads other tokens; see :func:`check_tokens`.

    A reference that is to follow the trained model must be a model of its own.

    Args:
        arguments: of the trainer, by name; ``ref_model`` None is a copy of the trained model.

    Raises:
        ConfigError: names what differs, or what cannot follow.
    """
    _check_follows(arguments)
    reference = arguments.get("ref_model")
    rows = None if reference is None else embedding_rows(reference)
    if rows is None:
        return
    own, model = tokenizer_of(arguments), arguments.get("model")
    policy_rows = (
        limits_of(model, arguments.get("args")).tokens
        if isinstance(model, str)
        else embedding_rows(model)
    )
    name = model_name(reference)
    other = None
    if name and name != getattr(own, "name_or_path", None):
        try:
            if has_tokenizer(name, local_files_only=True):
                other = load_tokenizer(name, local_files_only=True)
        except ModelError:  # what is there cannot be read: nothing is known of it
            pass
    check_tokens(own, rows, other, policy_rows)
