"""Plain values as text and back, between two interpreters that do not trust each other.

What arrives is made of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and
dict, exactly these classes, whatever was sent: an object whose ``==`` says yes to everything
arrives as what it holds, or not at all. The source of this file runs in both interpreters, so it
imports Python's own modules only.
"""

from __future__ import annotations

import json
from typing import Any

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> str:
    """One line of text.

    Raises:
        TypeError: something else than plain values is in it. RecursionError: it contains itself.
    """
    return json.dumps(_tagged(value))


def decode(text: str) -> Any:
    """The value again; never runs anything that the other side chose.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: this is no text of ``encode``.
    """
    return _plain(json.loads(text))


def _tagged(value: Any) -> Any:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": int.__repr__(value)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[_tagged(k), _tagged(v)] for k, v in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [_tagged(one) for one in value]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be handed over")


def _plain(tagged: Any) -> Any:
    if tagged is None or isinstance(tagged, (bool, str)):
        return tagged
    if not isinstance(tagged, dict) or len(tagged) != 1:
        raise ValueError("no value that was handed over")
    ((name, held),) = tagged.items()
    if name == "int":
        return int(held)
    if name == "float":
        return float.fromhex(held)
    if name == "complex":
        return complex(*map(float.fromhex, held))
    if name == "bytes":
        return bytes.fromhex(held)
    if name == "dict":
        return {_plain(k): _plain(v) for k, v in held}
    return _SEQUENCES[name](_plain(one) for one in held)
