"""The reference model of preference pairs, which reads the policy's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alphatoken.errors import ConfigError, ModelError
from alphatoken.model.token_ids import embedding_rows
from alphatoken.train.given_rows import tokenizer_of
from alphatoken.train.loading import has_tokenizer, limits_of_named, load_tokenizer

__all__ = ["check_reference"]


def check_reference(given: Mapping[str, Any]) -> None:
    """Refuse a reference to which the policy's token ids are nothing, or other tokens.

    Its embedding may have fewer rows than the policy's where no token is among those it lacks. A
    token that its tokenizer does not name at all contradicts nothing: it may be a reserved one.

    Args:
        given: arguments of the trainer below; ``ref_model`` None is a copy of the policy.

    Raises:
        ConfigError: names what differs.
    """
    reference = given.get("ref_model")
    rows = None if reference is None else embedding_rows(reference)
    if rows is None:
        return
    own = tokenizer_of(given)
    model = given.get("model")
    if isinstance(model, str):
        held = limits_of_named(model, given.get("args")).tokens
    else:
        held = embedding_rows(model)
    tokens = min(len(own), held or len(own))
    if rows < tokens:
        raise ConfigError(
            "ref_model has no row for some tokens of the policy",
            got=f"{rows} rows, {tokens} tokens",
            why="it would be asked about tokens that it has never seen",
            remedy="ref_model=None, which copies the policy, or a reference of the same vocabulary",
        )
    other = _tokenizer_beside(reference, own)
    ids = {} if other is None else other.get_vocab()
    wrong = [text for text, number in own.get_vocab().items() if ids.get(text, number) != number]
    if wrong:
        text = wrong[0]
        raise ConfigError(
            "the tokens of ref_model are not the policy's",
            got=f"{len(wrong)} of {len(own)} tokens, such as {text!r}: id "
            f"{own.get_vocab()[text]} here, {ids[text]} in the reference",
            why="the same ids would be other words to it",
            remedy="ref_model=None, which copies the policy, or a reference of the same vocabulary",
        )


def _tokenizer_beside(reference: Any, own: Any) -> Any:
    """Of the folder, or the stored files of the hub, that the reference was loaded from."""
    name = getattr(getattr(reference, "config", None), "_name_or_path", None)
    if not name or name == getattr(own, "name_or_path", None):
        return None
    try:
        if has_tokenizer(name, local_files_only=True):
            return load_tokenizer(name, local_files_only=True)
    except ModelError:  # what is there cannot be read: nothing is known of it
        pass
    return None
