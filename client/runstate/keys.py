"""Work keys: `<name>:<first 32 hex digits of SHA-256 of the canonical JSON of the argument list>`.

Canonical JSON is JavaScript's `JSON.stringify` with sorted keys and no spaces, in UTF-8, byte for byte: processes in
other languages that hash the same arguments get the same key (proved by tests/golden/keys.json).

    objects     string keys, sorted by UTF-16 code units; dataclass instances and pydantic models are their fields
    arrays      lists and tuples
    numbers     as ECMAScript prints them: 1.0 is 1, -0.0 is 0, 1e21 is 1e+21; whole numbers beyond 2^53 are doubles
    strings     surrogate pairs become their character, lone surrogates \\udxxx; only " \\ and control characters escape

Anything else (nan, sets, bytes, datetimes, objects, cycles) is a ConfigError that names the place, such as `$[0].x`.

Two writers give the same text. `_plain` is for the usual argument: exact built-in types, ASCII keys, shallow. It gives
up (None) on anything else, and `_walk` does it with all rules, with a stack of its own so that no depth of nesting can
exhaust Python's.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from json.encoder import encode_basestring as _quote
from json.encoder import encode_basestring_ascii as _quote_ascii
from typing import TYPE_CHECKING, Any, NamedTuple

from . import units
from .errors import ConfigError

if TYPE_CHECKING:
    import inspect

KEY_LENGTH_MAX = 255  # characters of a key chosen by the user, as in the hosted SDK
HASH_LENGTH = 32  # hex digits: 128 bits
DEPTH_MAX = 1000  # levels of nesting; Python's own json cannot write more either
PLACE_LENGTH_MAX = 200  # characters of a place in an error text

_EXACT = units.WHOLE_MAX  # up to 2^53 a double holds every whole number
_PLAIN_DEPTH = 16  # levels that the quick writer follows

# A place in the arguments: its parent's place and the index or key in it. None is the argument list, `$`.
_Place = tuple[Any, int | str] | None
# What the walk has still to do: write a text, leave the container with this id, or write the value at a place.
_Step = str | int | tuple[object, _Place]


def canonical(value: object, name: str | None = None) -> str:
    """The canonical JSON of a value. ConfigError names the place of what is not JSON, with the value itself as `$`.

    `name`: whose key it is for; it is warned, once, of numbers that share their JSON with others.
    """
    text = _plain(value, _PLAIN_DEPTH)
    if text is None:
        text = _walk(value, name)
    return text if text.isascii() else _settle_surrogates(text)


def work_key(name: str, args: Sequence[object]) -> str:
    """The key of a piece of work with these arguments: `<name>:<32 hex digits>`. Tuples and lists count the same."""
    from hashlib import sha256  # brings OpenSSL, which nobody needs before the first call

    text = _plain_array(args, _PLAIN_DEPTH - 1) if type(args) in (list, tuple) else None
    if text is None or not text.isascii():
        text = canonical(args, name)
    return f"{name}:{sha256(text.encode()).hexdigest()[:HASH_LENGTH]}"


def call_key(
    name: str,
    fn: Callable[..., Any],
    key: Callable[..., str] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str:
    """The key of the call `fn(*args, **kwargs)`, or `<name>:<key(*args, **kwargs)>`.

    Without `key`, keyword arguments that can be positional count as positional, so that `f("a")` and `f(name="a")` are
    the same work. The others (keyword-only, `**kwargs`, those after a skipped default) follow as one object. Defaults
    are not filled in. A call that does not fit the signature is hashed as written; it fails by itself later.
    With `key`, the function gets the arguments exactly as passed, and returns a string of 1 to 255 characters
    (otherwise ConfigError). What it raises is raised.
    """
    if key is not None:
        return f"{name}:{_chosen(key(*args, **kwargs), name)}"
    return work_key(name, arguments(fn, args, kwargs) if kwargs else args)


def queue_key(name: str, input: object, key: Callable[[Any], str] | None = None) -> str:
    """The key of a job: that of the one-element list `[input]`, or `<name>:<key(input)>`, as for calls."""
    if key is not None:
        return f"{name}:{_chosen(key(input), name)}"
    return work_key(name, (input,))


def arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The argument list that is hashed for a call: see call_key()."""
    shape = _shape(fn)
    if shape is not None:
        listed = shape.in_a_row(args, kwargs)
        if listed is not None:
            return listed
        try:
            bound = shape.signature.bind(*args, **kwargs)
        except TypeError:
            pass
        else:
            args, kwargs = bound.args, bound.kwargs
    return [*args, dict(kwargs)] if kwargs else list(args)


class _Shape(NamedTuple):
    """What binding needs to know of a function."""

    signature: inspect.Signature
    names: tuple[str, ...]  # of the parameters that may be positional, in order
    only_positional: int  # so many of them cannot be keywords
    required: int  # so many of them have no default
    needs_keywords: bool  # there is a keyword-only parameter without a default

    def in_a_row(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The result for the usual call, whose keywords go on where its positional arguments end; None for others.

        Signature.bind() does all calls, at three times the cost of hashing a short list.
        """
        if self.needs_keywords or len(args) < self.only_positional:
            return None
        listed = list(args)
        for name in self.names[len(args) :]:
            if name not in kwargs:
                break
            listed.append(kwargs[name])
        return listed if len(listed) == len(args) + len(kwargs) and len(listed) >= self.required else None


# inspect.signature() takes longer than all the rest. Weak, so that a function made in a loop can go.
_shapes: weakref.WeakKeyDictionary[Callable[..., Any], _Shape | None] = weakref.WeakKeyDictionary()


def _shape(fn: Callable[..., Any]) -> _Shape | None:
    """The shape of a function, or None where it has no signature to read (some built-ins)."""
    try:
        return _shapes[fn]
    except (KeyError, TypeError):  # TypeError: a callable that cannot be hashed or weakly referenced is not kept
        pass
    found = _read_shape(fn)
    try:
        _shapes[fn] = found
    except TypeError:
        pass
    return found


def _read_shape(fn: Callable[..., Any]) -> _Shape | None:
    import inspect

    options: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        # Annotations are evaluated on demand there, and names imported for type checkers only must not break a call.
        import annotationlib

        options["annotation_format"] = annotationlib.Format.FORWARDREF
    try:
        signature = inspect.signature(fn, **options)
    except (TypeError, ValueError):
        return None
    all_of_them = signature.parameters.values()
    first = [one for one in all_of_them if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return _Shape(
        signature,
        tuple(one.name for one in first),
        sum(one.kind is one.POSITIONAL_ONLY for one in first),
        sum(one.default is one.empty for one in first),
        any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in all_of_them),
    )


def _chosen(key: object, name: str) -> str:
    """A key that the user's function returned, checked."""
    if isinstance(key, Coroutine):
        key.close()  # refused below; without a second complaint that it was never awaited
    return units.text(key, f"the key that the key function of {name!r} returned", KEY_LENGTH_MAX)


# --------------------------------------------------------------------------------------------------------------------
# The quick writer


def _plain(value: Any, depth: int) -> str | None:
    """The JSON of a value made of exact built-in types, at most `depth` levels deep; None is "not one of those"."""
    kind = type(value)
    if kind is str:
        return _quote(value)
    if kind is int:
        return int.__repr__(value) if -_EXACT <= value <= _EXACT else None
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is float:
        return _number(value) if math.isfinite(value) else None
    if depth:
        if kind is list or kind is tuple:
            return _plain_array(value, depth - 1)
        if kind is dict:
            return _plain_object(value, depth - 1)
    return None


def _plain_array(items: Sequence[Any], depth: int) -> str | None:
    parts = []
    text: str | None
    for item in items:
        kind = type(item)  # the usual ones here, the others there
        if kind is str:
            text = _quote(item)
        elif kind is int and -_EXACT <= item <= _EXACT:
            text = int.__repr__(item)
        else:
            text = _plain(item, depth)
        if text is None:
            return None
        parts.append(text)
    return f"[{','.join(parts)}]"


def _plain_object(fields: dict[Any, Any], depth: int) -> str | None:
    for key in fields:
        if type(key) is not str or not key.isascii():  # others may sort differently in UTF-16
            return None
    parts = []
    for key in sorted(fields):
        text = _plain(fields[key], depth)
        if text is None:
            return None
        parts.append(f"{_quote(key)}:{text}")
    return f"{{{','.join(parts)}}}"


# --------------------------------------------------------------------------------------------------------------------
# The full writer


def _walk(root: object, name: str | None = None) -> str:
    """The JSON of any value, by all the rules. Raises ConfigError."""
    out: list[str] = []
    inside: dict[int, object] = {}  # the containers around the present value; kept alive, so that no id is used twice
    todo: list[_Step] = [(root, None)]
    while todo:
        step = todo.pop()
        if isinstance(step, str):
            out.append(step)
            continue
        if isinstance(step, int):
            del inside[step]
            continue
        value, place = step
        if name is not None and isinstance(value, int) and not -_EXACT <= value <= _EXACT:
            _warn_of_large(name, place)
        scalar = _scalar(value, place)
        if scalar is not None:
            out.append(scalar)
            continue
        if id(value) in inside:
            raise ConfigError(f"{_shown_place(place)} contains itself, so it has no JSON: pass a value without cycles")
        if len(inside) >= DEPTH_MAX:
            raise ConfigError(
                f"{_shown_place(place)} is nested more than {DEPTH_MAX} levels deep: pass a flatter value"
            )
        inside[id(value)] = value
        todo.append(id(value))
        todo.extend(reversed(_contents(value, place)))
    return "".join(out)


_warned: set[str] = set()


def _warn_of_large(name: str, place: _Place) -> None:
    """Neighbours among whole numbers above 2^53 are one number in JSON, and so one key."""
    if name in _warned:
        return
    _warned.add(name)
    import logging

    logging.getLogger(__name__).warning(
        "%s: %s is a whole number above 2^53, which shares its key with its neighbours: pass it as a string, or give"
        " key= to choose the key yourself",
        name,
        _shown_place(place),
    )


def _scalar(value: object, place: _Place) -> str | None:
    """The JSON of a value that holds no others, or None. Subclasses and enum members with a value count as it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return _quote(str.__str__(value))
    if isinstance(value, bool):  # before int, of which it is a subclass
        return "true" if value else "false"
    if isinstance(value, int):
        return _whole(int.__index__(value), place)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{_shown_place(place)} is {float.__repr__(value)}, which JSON does not have")
        return _number(value)
    return None


def _contents(value: object, place: _Place) -> list[_Step]:
    """What to write for a container, in order."""
    kind = type(value)
    if callable(getattr(kind, "model_dump", None)):
        return [(_dumped(value, place), place)]
    # Of a dataclass or model only instances count: a class itself has a class (`type`) without fields.
    if dataclasses.is_dataclass(kind):
        return _object(_fields(value, place), place)
    if isinstance(value, dict):
        return _object(value, place)
    if isinstance(value, (list, tuple)):
        return _array(value, place)
    raise ConfigError(
        f"{_shown_place(place)} is of type {kind.__qualname__}, which is not JSON: pass strings, numbers, booleans, "
        "None, lists, dicts, dataclasses or pydantic models, or give key= to choose the key yourself"
    )


def _array(items: Sequence[object], place: _Place) -> list[_Step]:
    steps: list[_Step] = ["["]
    for index, item in enumerate(items):
        if index:
            steps.append(",")
        steps.append((item, (place, index)))
    steps.append("]")
    return steps


def _object(fields: Mapping[object, object], place: _Place) -> list[_Step]:
    by_utf16: dict[bytes, tuple[str, object]] = {}
    for key, item in list(fields.items()):
        if not isinstance(key, str):
            raise ConfigError(
                f"{_shown_place(place)} has the key {units.shown(key)}: pass objects with string keys only"
            )
        key = str.__str__(key)
        units16 = key.encode("utf-16-be", "surrogatepass")
        if units16 in by_utf16:  # a character and its two surrogates are different strings in Python only
            raise ConfigError(f"{_shown_place(place)} has the key {units.shown(key)} twice, which no JSON object can")
        by_utf16[units16] = (key, item)
    steps: list[_Step] = ["{"]
    for units16 in sorted(by_utf16):
        key, item = by_utf16[units16]
        steps.append(f"{',' if len(steps) > 1 else ''}{_quote(key)}:")
        steps.append((item, (place, key)))
    steps.append("}")
    return steps


def _dumped(value: Any, place: _Place) -> object:
    """The fields of a pydantic model as Python values, so that what JSON lacks (datetimes) is refused, as elsewhere."""
    try:
        return value.model_dump()
    except Exception as error:
        raise ConfigError(f"{_shown_place(place)}.model_dump() failed: {error}") from error


def _fields(value: Any, place: _Place) -> dict[object, object]:
    try:
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    except AttributeError as error:
        raise ConfigError(f"{_shown_place(place)} lacks a field of its dataclass: {error}") from error


def _whole(value: int, place: _Place) -> str:
    if -_EXACT <= value <= _EXACT:
        return repr(value)
    try:
        return _number(float(value))
    except OverflowError:
        raise ConfigError(f"{_shown_place(place)} is a whole number too large for JSON: pass it as a string") from None


def _number(value: float) -> str:
    """A finite number as ECMAScript's Number::toString prints it; both languages use the shortest digits.

    They differ in where exponents begin: Python at 1e16 and below 1e-4, ECMAScript at 1e21 and below 1e-6.
    """
    text = float.__repr__(value)
    if "e" not in text:
        if not text.endswith(".0"):
            return text
        return text[:-2] if value else "0"
    mantissa, _, power = text.partition("e")
    exponent = int(power)
    if exponent >= 21 or exponent < -6:
        return f"{mantissa}e{exponent:+d}"
    sign = "-" if value < 0 else ""
    digits = mantissa.lstrip("-").replace(".", "")
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    return sign + digits.ljust(exponent + 1, "0")


def _settle_surrogates(text: str) -> str:
    """Joins pairs of surrogates to their character and escapes the lone ones, as JSON.stringify does.

    On the finished text: a quote stands between two strings, so no pair can form across them.
    """
    if not units.SURROGATE.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return units.SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", joined)


def _shown_place(place: _Place) -> str:
    """A place as text: `$[0].x`, or `$[0]["a b"]`; the front of it where it is long."""
    parts: list[str] = []
    while place is not None:
        place, step = place
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if step.isascii() and step.isidentifier() else f"[{_quote_ascii(step)}]")
    text = "$" + "".join(reversed(parts))
    return text if len(text) <= PLACE_LENGTH_MAX else text[:PLACE_LENGTH_MAX] + "..."
