"""Durations, windows, leases, amounts, names and whole numbers: what users write, checked and in one unit.

    "500ms" 30 "10m"   -> seconds()       float seconds, never negative, always finite; also of a timedelta, a Decimal
                       -> milliseconds()  int, half up, at most 100 years
                       -> whole_seconds() int, rounded up (durable sleeps)
    "minute" "90s"     -> per_seconds()   int, 1 to 86400
    "30s" 5.5          -> lease_seconds() int, half up, then pulled into 5 to 600; never refused for its size
    0.40 "12.5"        -> minor()         int minor units at a scale, also of a Decimal; from_minor() is the way back

Everything refused is a ConfigError that says what was given, for what, and what to write. bool is never a number here.
The rules are those of the hosted SDK, proved by tests/golden/units.json. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, TypeGuard, Union

from .errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta
    from decimal import Decimal

# Union, not |: these names are public and are used at run time on 3.10.
Amount = Union[int, float, str, "Decimal"]
Duration = Union[int, float, str, "timedelta", "Decimal"]
Per = Union[int, float, str]  # noqa: UP007

UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
WINDOW_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}

DURATION_MS_MAX = 100 * 365 * 86_400_000  # 100 years: fits every timer, lock and date; longer means "no limit"
PER_SECONDS_MAX = 86_400  # a limit's window is at most a day
LEASE_SECONDS_MIN = 5  # under this a short pause of the machine would lose holds
LEASE_SECONDS_MAX = 600  # over this a hung process would hold up the others for too long
NAME_LENGTH_MAX = 256  # characters, as in the hosted API
SCALE_MAX = 9  # decimal places of a currency
WHOLE_MAX = 2**53  # exact in every language that reads our JSON, and far inside a database's 64 bits
AMOUNT_LENGTH_MAX = 400  # characters: the longest float has 309 digits; Python refuses int() of over 4300

_NOISE = 1e-9  # seconds: what float arithmetic may add to a whole number, and nobody means

_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)\s*")
_AMOUNT = re.compile(r"([0-9]+)(?:\.([0-9]+))?")
_CURRENCY = re.compile(r"[A-Za-z]{3}")
SURROGATE = re.compile("[\ud800-\udfff]")


def seconds(duration: object, what: str = "duration") -> float:
    """A duration in seconds: a finite number >= 0, a timedelta, or digits and ms, s, m, h or d (`"1.5h"`, `" 30 s "`).

    One number and one unit only: `"1h30m"`, `"10S"`, `"1e3s"` and `"-1s"` are a ConfigError.
    """
    if isinstance(duration, str):
        found = _DURATION.fullmatch(duration)
        value = float(found[1]) * UNIT_SECONDS[found[2]] if found else math.nan
    elif _is_timedelta(duration):
        value = duration.total_seconds()
    else:
        value = _float(duration)
    if math.isfinite(value) and value >= 0:
        return value + 0.0  # -0.0 becomes 0.0
    raise ConfigError(
        f"{what} is {shown(duration)}: give a number of seconds that is not negative, "
        'or one number with a unit, such as "500ms", "30s", "10m", "2h" or "1d"'
    )


def milliseconds(duration: object, what: str = "duration") -> int:
    """A duration in whole milliseconds, rounded half up and at most 100 years, so that it fits every timer."""
    value = seconds(duration, what)
    return min(_half_up(min(value, DURATION_MS_MAX) * 1000), DURATION_MS_MAX)


def whole_seconds(duration: object, what: str = "duration") -> int:
    """A duration rounded up to whole seconds (as durable sleeps are: never shorter), at most 100 years."""
    return math.ceil(min(seconds(duration, what), DURATION_MS_MAX / 1000) - _NOISE)


def per_seconds(per: object, what: str = "per") -> int:
    """The length of a limit's window: second, minute, hour, day, or a duration of 1 to 86400 whole seconds."""
    if isinstance(per, str) and per in WINDOW_SECONDS:
        return WINDOW_SECONDS[per]
    try:
        value = seconds(per, what)
    except ConfigError:
        value = 0.0
    nearest = round(min(value, PER_SECONDS_MAX + 1))
    if 1 <= nearest <= PER_SECONDS_MAX and abs(value - nearest) <= _NOISE:
        return nearest
    raise ConfigError(
        f'{what} is {shown(per)}: give "second", "minute", "hour", "day", '
        f'or a duration of 1 to {PER_SECONDS_MAX} whole seconds, such as "90s"'
    )


def lease_seconds(lease: object, what: str = "lease") -> int:
    """A lease in whole seconds: rounded half up, then pulled into 5 to 600, as the hosted SDK does."""
    value = min(seconds(lease, what), LEASE_SECONDS_MAX)
    return max(LEASE_SECONDS_MIN, _half_up(value))


def minor(amount: object, scale: int, what: str = "amount") -> int:
    """An amount of money in minor units: `0.40` and `"0.40"` are 40 at scale 2.

    A string is exact: `digits[.digits]`, spaces around it allowed, and more places than the scale (zeros aside) are a
    ConfigError. A number counts as its shortest decimal form and is rounded half up, so that float noise such as
    0.1 + 0.2 does no harm; a Decimal is rounded half up, too. Whole numbers beyond 2^53 count as doubles, which is all
    that other languages can send.
    """
    if isinstance(amount, str):
        return _minor_of_text(amount, scale, what)
    if _is_decimal(amount):
        return _minor_of_decimal(amount, scale, what)
    value = _float(amount)
    if not math.isfinite(value) or value < 0:
        raise _bad_amount(amount, what)
    if isinstance(amount, int) and amount <= WHOLE_MAX:
        return int(amount) * _power(scale)
    digits, exponent = decimal_parts(abs(value))
    return _rounded(digits, exponent + scale)


def from_minor(minor_units: int | str, scale: int) -> str:
    """Minor units as a decimal string with exactly `scale` places: 40 at scale 2 is `"0.40"`."""
    value = int(minor_units)
    digits = str(abs(value)).rjust(scale + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}" if scale else sign + digits


def name(value: object, what: str = "name") -> str:
    """A name of a run, limit, pool, budget, queue, timer or barrier: a string of 1 to 256 characters, kept as it is."""
    return text(value, what, NAME_LENGTH_MAX)


def text(value: object, what: str, longest: int) -> str:
    """A string of 1 to `longest` characters that can be sent (no lone surrogates), as a plain str."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} is {shown(value)}: give a string of 1 to {longest} characters")
    if not 1 <= len(value) <= longest:
        raise ConfigError(f"{what} has {len(value)} characters: give a string of 1 to {longest} characters")
    if not value.isascii() and SURROGATE.search(value):
        raise ConfigError(f"{what} is {shown(value)}, which holds half a character (a surrogate): give valid text")
    return str.__str__(value)  # of a subclass or an enum member, the text itself


def whole(value: object, what: str, low: int = 1, high: int = WHOLE_MAX) -> int:
    """A whole number from `low` to `high`, as a plain int. bool and float are refused: 1.0 is often a slip."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return int.__index__(value)  # of a subclass or an enum member, the number itself
    span = f"of at least {low}" if high == WHOLE_MAX else f"from {low} to {high}"
    raise ConfigError(f"{what} is {shown(value)}: give a whole number {span}")


def currency(value: object, what: str = "currency") -> str:
    """A currency of three ASCII letters, in upper case."""
    if isinstance(value, str) and _CURRENCY.fullmatch(value):
        return value.upper()
    raise ConfigError(f'{what} is {shown(value)}: give three letters, such as "USD"')


def shown(value: object) -> str:
    """A value for an error text: its repr, printable and at most 80 characters, whatever the value is."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= 80 else text[:77] + "..."


def decimal_parts(value: float) -> tuple[str, int]:
    """The shortest decimal form of a float >= 0 as digits and a power of ten: 1.005 is ("1005", -3)."""
    mantissa, _, exponent = float.__repr__(value).partition("e")
    before, _, after = mantissa.partition(".")
    return before + after, int(exponent or 0) - len(after)


def _float(value: object) -> float:
    """A number as a float; nan, which every caller refuses, where it is none or too large."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or _is_decimal(value)):
        return math.nan
    try:
        return float(value)
    except (OverflowError, ValueError):  # too large; a signalling nan
        return math.nan


def _half_up(value: float) -> int:
    # floor(value + 0.5) is off by one just below a half; this difference is exact.
    below = math.floor(value)
    return below + (value - below >= 0.5)


def _power(exponent: int) -> int:
    result: int = 10**exponent  # typed as Any, because a negative exponent would give a float
    return result


# Nobody has one of these before its module is imported, so we need not import it: that takes longer than this package.


def _is_decimal(value: object) -> TypeGuard[Decimal]:
    module = sys.modules.get("decimal")
    return module is not None and isinstance(value, module.Decimal)


def _is_timedelta(value: object) -> TypeGuard[timedelta]:
    module = sys.modules.get("datetime")
    return module is not None and isinstance(value, module.timedelta)


def _rounded(digits: str, shift: int) -> int:
    """A whole number of digits times a power of ten, rounded half up."""
    if shift >= 0:
        return int(digits) * _power(shift)
    unit = _power(-shift)
    return (int(digits) * 2 + unit) // (unit * 2)


def _minor_of_decimal(amount: Decimal, scale: int, what: str) -> int:
    if not amount.is_finite() or amount < 0 or amount.adjusted() > AMOUNT_LENGTH_MAX:
        raise _bad_amount(amount, what)
    if amount.adjusted() + scale < -1:
        return 0  # less than a tenth of a unit, however many places it has
    _, digits, exponent = amount.as_tuple()
    if len(digits) > AMOUNT_LENGTH_MAX or not isinstance(exponent, int):
        raise _bad_amount(amount, what)
    return _rounded("".join(map(str, digits)), exponent + scale)


def _minor_of_text(amount: str, scale: int, what: str) -> int:
    found = _AMOUNT.fullmatch(amount.strip())
    if not found or len(amount) > AMOUNT_LENGTH_MAX:
        raise _bad_amount(amount, what)
    places = (found[2] or "").rstrip("0")
    if len(places) > scale:
        raise ConfigError(f"{what} is {shown(amount)}: give at most {scale} decimal places, the budget's scale")
    return int(found[1] + places.ljust(scale, "0"))


def _bad_amount(amount: object, what: str) -> ConfigError:
    return ConfigError(
        f'{what} is {shown(amount)}: give a number that is not negative, or a decimal string such as "12.50"'
    )
