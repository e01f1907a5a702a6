"""Ids, tokens, times and amounts as the HTTP API spells them.

An id in a path has only letters, digits, ``-`` and ``_``. Those of runs, jobs and reservations are the daemon's own;
those of things that have a name are made of the name, so that they mean the same after a restart.
"""

import base64
import binascii
import json
import math
import re
from datetime import datetime, timedelta, timezone

import msgspec

from runstate.wire import LATEST_MS
from runstated.http.errors import ApiError

NAME_MAX = 520  # characters of a part of an id: the longest is a worker's label
_SECRET = "([0-9a-f]{16})"
_TOKEN = re.compile(f"([0-9]{{1,19}})-{_SECRET}", re.ASCII)
_RESERVATION = re.compile(f"(.+)-{_SECRET}", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def to_id(kind: str, *names: str) -> str:
    """The id of something that has a name: ``kind`` is one letter."""
    return kind + base64.urlsafe_b64encode(msgspec.json.encode(names)).decode().rstrip("=")


def from_id(kind: str, word: str, text: str, count: int = 1) -> tuple[str, ...]:
    """The names in an id. Raises ApiError (NOT_FOUND) for what is no id of this kind."""
    try:
        if text[:1] != kind:
            raise ValueError("another kind of id")
        found = base64.urlsafe_b64decode(text[1:] + "=" * (-len(text[1:]) % 4))
        names = msgspec.json.decode(found, type=tuple[str, ...])
        if len(names) != count or not all(0 < len(name) <= NAME_MAX for name in names):
            raise ValueError("another number of names")
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise ApiError("NOT_FOUND", f"{word} {text[:100]} not found") from error
    return names


def to_token(token: int, secret: str) -> str:
    """``NUMBER-SECRET``: callers share sessions here, so the secret alone proves a hold. Numbers grow."""
    return f"{token}-{secret}"


def from_token(text: str) -> tuple[int, str]:
    """Number and secret. Raises ApiError (STALE_CLAIM) for what never was a token."""
    found = _TOKEN.fullmatch(text)
    if found is None or not 0 < int(found[1]) < 2**63:
        raise ApiError("STALE_CLAIM", "the token is not one of a live hold")
    return int(found[1]), found[2]


def to_reservation(reservation: str, secret: str) -> str:
    """The id of a reservation for whoever made it: with the secret that proves it."""
    return f"{reservation}-{secret}"


def from_reservation(text: str) -> tuple[str, str]:
    """Id and secret. Raises ApiError (NOT_FOUND) for an id without a secret, as lists show them."""
    found = _RESERVATION.fullmatch(text)
    if found is None:
        raise ApiError("NOT_FOUND", f"reservation {text[:100]} not found")
    return found[1], found[2]


def to_iso(ms: int) -> str:
    """``YYYY-MM-DDTHH:MM:SS.mmmZ``; a timer may be set for later than that can say."""
    ms = min(ms, LATEST_MS)
    moment = datetime.fromtimestamp(ms // 1000, timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def to_ms(field: str, moment: datetime) -> int:
    """Unix time of a moment with a zone. Raises ApiError for one that is before 1970 or, in UTC, after 9999."""
    ms = (moment - EPOCH) // timedelta(milliseconds=1)
    if not 0 <= ms <= LATEST_MS:
        raise ApiError("VALIDATION_FAILED", f"{field} must be a time from 1970 to 9999")
    return ms


def compact(value: msgspec.Raw) -> str:
    """A JSON value as it was sent, number by number, but without spaces between its parts and with its characters
    unescaped: the form whose size counts. Raises ApiError for what is no strict JSON."""
    try:
        text = msgspec.json.format(bytes(value), indent=-1).decode()
        if _MAY_BE_HUGE.search(text):
            json.loads(text, parse_int=_finite, parse_float=_finite)
        return _ESCAPE.sub(_unescaped, text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("VALIDATION_FAILED", f"not valid JSON: {error}") from error


_MAY_BE_HUGE = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{309}")


def _finite(number: str) -> float:
    """Raises ApiError for a number that every other client would read as infinity."""
    value = float(number)
    if math.isinf(value):
        raise ApiError("VALIDATION_FAILED", f"the number {number[:40]} is too large for JSON's readers")
    return value


_ESCAPE = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\.")


def _unescaped(found: re.Match[str]) -> str:
    """The character for an escape, where JSON lets it stand as it is."""
    high, low, single = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    code = int(single, 16) if single else 0
    if code < 0x20 or code in (0x22, 0x5C) or 0xD800 <= code <= 0xDFFF:
        return found[0]
    return chr(code)
