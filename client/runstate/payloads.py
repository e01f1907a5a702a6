"""Inputs and results as JSON text: encoded and measured here, before anything is sent."""

from __future__ import annotations

import json
from typing import Any

from . import errors

PAYLOAD_BYTES_MAX = 65_536


def encode(what: str, value: object) -> str:
    """Compact JSON text.

    Raises ConfigError when the value is not JSON (nan and infinities are not), ResultTooLargeError when the text is
    longer than 65,536 bytes of UTF-8.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_refuse)
        size = len(text) if text.isascii() else len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError (lone surrogates) is a ValueError
        raise errors.ConfigError(f"{what} cannot be written as JSON: {error}; return or send JSON values") from error
    _check_keys(what, value)
    if size > PAYLOAD_BYTES_MAX:
        raise errors.ResultTooLargeError(
            f"{what} of {size} bytes exceeds {PAYLOAD_BYTES_MAX} bytes: store it elsewhere and pass a reference",
            code="RESULT_TOO_LARGE",
        )
    return text


def _refuse(value: object) -> object:
    """What JSON has no word for. Guessing one would give other callers something else than this one returned."""
    hint = ": use its .model_dump()" if hasattr(value, "model_dump") else ""
    raise TypeError(f"{type(value).__name__} is not JSON{hint}")


def _check_keys(what: str, value: object) -> None:
    """Raises ConfigError where two keys of an object are one in JSON, such as 1 and "1"."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if any(type(key) is not str for key in each) and len(json.loads(json.dumps(dict.fromkeys(each)))) < len(
                each
            ):
                raise errors.ConfigError(
                    f"{what} has an object with keys that are the same in JSON: {sorted(map(repr, each))[:10]}; make"
                    " them different strings"
                )
            left += each.values()
        elif isinstance(each, (list, tuple)):
            left += each


_raw_decode = json.JSONDecoder().raw_decode


def decode(text: str) -> Any:
    """The value of JSON text that ``encode`` (of any client) has written: nothing stands around it."""
    return _raw_decode(text)[0]


def error_text(error: BaseException) -> str:
    """How a failure is recorded: ``<Type>: <message>``, at most 2,000 characters, without what UTF-8 cannot carry."""
    try:
        message = str(error)
    except Exception as worse:  # the user's own code, too
        message = f"(its text cannot be had: {type(worse).__name__})"
    return f"{type(error).__name__}: {message}"[:2000].encode("utf-8", "replace").decode()
