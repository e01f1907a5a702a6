"""Durations, windows, leases, amounts, names and whole numbers: golden vectors, properties, and every refusal."""

import enum
import json
import math
import pathlib
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runstate import units
from runstate.errors import ConfigError

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "units.json").read_text("utf-8"))
YEAR = 365 * 86_400

scales = st.integers(0, units.SCALE_MAX)
not_numbers = st.sampled_from(
    [True, False, None, [], {}, b"1s", 1j, math.nan, math.inf, -math.inf, -1, -0.1, Decimal("nan"), Decimal("1e500")]
)


class Color(enum.IntEnum):
    RED = 3


class Word(str, enum.Enum):
    HI = "hi"


def outcome(function, *args):
    try:
        return {"ok": function(*args)}
    except ConfigError:
        return {"error": "ConfigError"}


@pytest.mark.parametrize("case", GOLDEN["durations"], ids=lambda case: repr(case["input"]))
def test_golden_durations(case):
    assert outcome(units.seconds, case["input"]) == case["seconds"]


@pytest.mark.parametrize("case", GOLDEN["pers"], ids=lambda case: repr(case["input"]))
def test_golden_windows(case):
    assert outcome(units.per_seconds, case["input"]) == case["seconds"]


@pytest.mark.parametrize("case", GOLDEN["amounts"], ids=lambda case: f"{case['amount']!r} at {case['scale']}")
def test_golden_amounts(case):
    assert outcome(lambda: str(units.minor(case["amount"], case["scale"]))) == case["minor"]


@pytest.mark.parametrize("case", GOLDEN["from_minor"], ids=lambda case: f"{case['minor']} at {case['scale']}")
def test_golden_amounts_from_minor_units(case):
    assert units.from_minor(case["minor"], case["scale"]) == case["amount"]
    assert units.from_minor(int(case["minor"]), case["scale"]) == case["amount"]


# Durations


@pytest.mark.parametrize(
    "text", ["-1s", "1h30m", "10S", "1e3s", "nan", "inf", "infs", "1s\x00", "1 2s", "9" * 400 + "s"]
)
def test_a_duration_string_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match=r'timeout is .*"30s"'):
        units.seconds(text, "timeout")


@given(not_numbers)
def test_a_duration_that_is_no_finite_number_from_0_up_is_refused(value):
    for function in (units.seconds, units.milliseconds, units.whole_seconds, units.per_seconds, units.lease_seconds):
        with pytest.raises(ConfigError):
            function(value)


def test_a_number_too_large_for_a_float_is_refused():
    for function in (units.seconds, units.milliseconds, units.lease_seconds, units.per_seconds):
        with pytest.raises(ConfigError):
            function(10**400)
    with pytest.raises(ConfigError):
        units.minor(10**400, 2)


@given(st.floats(0, allow_nan=False, allow_infinity=False))
def test_a_number_of_seconds_is_itself(value):
    assert units.seconds(value) == value
    assert math.copysign(1, units.seconds(-0.0)) == 1


@given(st.integers(0, 10**6), st.sampled_from(list(units.UNIT_SECONDS)), st.sampled_from(["", " ", "\t\n "]))
def test_spaces_around_the_parts_of_a_duration_do_not_matter(number, unit, space):
    assert units.seconds(f"{space}{number}{space}{unit}{space}") == number * units.UNIT_SECONDS[unit]


@pytest.mark.parametrize(
    ("duration", "expected"),
    [(0, 0), (0.0004, 0), (0.0005, 1), (0.00049999, 0), ("1.5ms", 2), ("2.5ms", 3), (1.2344, 1234), ("1m", 60_000)],
)
def test_milliseconds_are_rounded_half_up(duration, expected):
    assert units.milliseconds(duration) == expected


@pytest.mark.parametrize("duration", [1e308, "99999999999d", 101 * YEAR])
def test_milliseconds_end_at_a_hundred_years(duration):
    assert units.milliseconds(duration) == units.whole_seconds(duration) * 1000 == 100 * YEAR * 1000


@pytest.mark.parametrize(
    ("duration", "expected"), [(0, 0), (0.001, 1), (1, 1), (1.001, 2), ("1500ms", 2), ("1000ms", 1), ("0.1m", 6)]
)
def test_whole_seconds_are_rounded_up(duration, expected):
    assert units.whole_seconds(duration) == expected


@given(st.integers(1, units.PER_SECONDS_MAX))
def test_every_whole_second_up_to_a_day_is_a_window(value):
    assert units.per_seconds(value) == units.per_seconds(float(value)) == units.per_seconds(f"{value}s") == value


@pytest.mark.parametrize("per", ["1.0004s", 1e308, "minutes", " minute", "0.7s"])
def test_a_window_of_another_length_is_refused(per):
    with pytest.raises(ConfigError, match="per is"):
        units.per_seconds(per)


@pytest.mark.parametrize(
    ("lease", "expected"),
    [
        (0, 5),
        ("1s", 5),
        (5.4999, 5),
        (5.5, 6),
        (7.5, 8),
        (6.5, 7),
        ("30s", 30),
        (599.5, 600),
        ("20m", 600),
        (1e308, 600),
    ],
)
def test_a_lease_is_rounded_half_up_and_pulled_into_its_bounds(lease, expected):
    assert units.lease_seconds(lease) == expected


# Amounts


@given(st.floats(0, 1e300), scales)
def test_a_float_amount_is_its_shortest_decimal_form_rounded_half_up(value, scale):
    with localcontext() as context:
        context.prec = 400
        expected = (Decimal(repr(value)) * 10**scale).to_integral_value(ROUND_HALF_UP)
    assert units.minor(value, scale) == int(expected)


@given(st.decimals(0, 10**100, allow_nan=False), scales)
def test_a_decimal_amount_is_rounded_half_up(value, scale):
    with localcontext() as context:
        context.prec = 400
        expected = (value * 10**scale).to_integral_value(ROUND_HALF_UP)
    assert units.minor(value, scale) == int(expected)


@pytest.mark.parametrize("value", ["0.4e-999999999", "1e-999999999", "0e-999999999"])
def test_a_decimal_far_below_the_smallest_unit_is_nothing(value):
    assert units.minor(Decimal(value), 2) == 0


@pytest.mark.parametrize("value", ["1e999999999", "0." + "1" * 401, "snan", "-1"])
def test_a_decimal_that_is_no_amount_is_refused(value):
    with pytest.raises(ConfigError, match="amount is"):
        units.minor(Decimal(value), 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(timedelta(minutes=1, milliseconds=500), 60.5), (timedelta(0), 0), (Decimal("1.5"), 1.5)],
)
def test_a_duration_may_be_a_timedelta_or_a_decimal(value, expected):
    assert units.seconds(value) == expected


def test_a_duration_before_now_is_refused():
    with pytest.raises(ConfigError, match="duration is"):
        units.seconds(timedelta(seconds=-1))


@given(st.integers(0, 2**53), scales)
def test_a_whole_amount_is_exact(value, scale):
    assert units.minor(value, scale) == value * 10**scale == units.minor(str(value), scale)


@given(st.integers(0, 10**40), scales)
def test_an_amount_written_from_minor_units_reads_back_as_the_same(value, scale):
    assert units.minor(units.from_minor(value, scale), scale) == value


@given(st.integers(0, 10**12), scales, st.integers(0, 5))
def test_trailing_zeros_cost_nothing_in_an_amount(value, scale, zeros):
    text = units.from_minor(value, scale)
    text = text + "0" * zeros if "." in text else text
    assert units.minor(f" {text} ", scale) == value


def test_more_places_than_the_scale_are_refused_and_the_scale_is_told():
    with pytest.raises(ConfigError, match="at most 1 decimal places"):
        units.minor("1.55", 1)


@pytest.mark.parametrize("amount", ["+1", ".5", "1e3", "-1", "1_000", "0x1", "nan", "1.2.3", "1\n2", "9" * 5000])
def test_an_amount_string_of_another_form_is_refused(amount):
    with pytest.raises(ConfigError, match="reserve is"):
        units.minor(amount, 2, "reserve")


@given(not_numbers, scales)
def test_an_amount_that_is_no_finite_number_from_0_up_is_refused(value, scale):
    with pytest.raises(ConfigError):
        units.minor(value, scale)


# Names and whole numbers


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256))
def test_any_text_of_1_to_256_characters_is_a_name(value):
    assert units.name(value) == value


@pytest.mark.parametrize("value", ["", "x" * 257, None, 5, b"x", True, ["x"], "a\ud800", "\ude00"])
def test_anything_else_is_no_name(value):
    with pytest.raises(ConfigError, match="the queue's name"):
        units.name(value, "the queue's name")


def test_names_and_numbers_of_a_subclass_become_plain():
    assert type(units.name(Word.HI)) is str and units.name(Word.HI) == "hi"
    assert type(units.whole(Color.RED, "max")) is int and units.whole(Color.RED, "max") == 3
    assert units.minor(Color.RED, 2) == 300


@given(st.integers(1, 100))
def test_a_whole_number_between_its_bounds_is_kept(value):
    assert units.whole(value, "attempts", 1, 100) == value


@pytest.mark.parametrize("value", [0, -1, 101, 1.0, True, "1", None, math.nan, 10**30])
def test_any_other_whole_number_is_refused_with_its_bounds(value):
    with pytest.raises(ConfigError, match=r"attempts is .*: give a whole number from 1 to 100"):
        units.whole(value, "attempts", 1, 100)


@pytest.mark.parametrize("value", [0, 2**53 + 1])
def test_a_whole_number_without_an_upper_bound_still_has_to_fit_the_wire(value):
    with pytest.raises(ConfigError, match=r"max is .*: give a whole number of at least 1$"):
        units.whole(value, "max")
    assert units.whole(2**53, "max") == 2**53


@pytest.mark.parametrize("value", ["usd", "USD", "Usd"])
def test_a_currency_is_upper_cased(value):
    assert units.currency(value) == "USD"


@pytest.mark.parametrize("value", ["", "US", "USDT", "U$D", "\u00e9ur", "USD\n", None, 123])
def test_another_currency_is_refused(value):
    with pytest.raises(ConfigError, match="currency is"):
        units.currency(value)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


def test_any_value_can_be_shown_in_a_message():
    assert units.shown(Unprintable()) == "<Unprintable>"
    assert units.shown("x" * 1000).endswith("...") and len(units.shown("x" * 1000)) == 80
    assert units.shown("\u540d").encode() == b"'\xe5\x90\x8d'"


@given(st.text(st.characters()))
def test_every_message_can_be_printed(value):
    units.shown(value).encode("utf-8")
