"""How the HTTP API spells things: there and back, for any value."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runstate.wire import LATEST_MS
from runstated.http import names
from runstated.http.errors import ApiError

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=60)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(TEXT, min_size=1, max_size=3))
def test_an_id_is_made_of_its_names_and_fits_into_a_path(parts: list[str]) -> None:
    made = names.to_id("t", *parts)
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
    assert names.from_id("t", "timer", made, len(parts)) == tuple(parts)


@given(st.text(max_size=40))
def test_what_is_no_id_is_not_found(text: str) -> None:
    try:
        (name,) = names.from_id("q", "mailbox", text)
    except ApiError as error:
        assert error.code == "NOT_FOUND"
    else:
        assert name


@given(st.integers(0, LATEST_MS))
def test_times_come_back(ms: int) -> None:
    text = names.to_iso(ms)
    assert len(text) == 24 and text.endswith("Z")
    assert names.to_ms("at", msgspec.convert(text, datetime)) == ms
    assert names.to_ms("at", datetime.fromtimestamp(0, timezone.utc)) == 0


@pytest.mark.parametrize("text", ["1969-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00"])
def test_a_time_that_no_date_can_say_is_refused_and_the_field_named(text: str) -> None:
    with pytest.raises(ApiError, match=r"^deadline must be a time from 1970 to 9999"):
        names.to_ms("deadline", msgspec.convert(text, datetime))
    assert names.to_iso(2**53) == names.to_iso(LATEST_MS) == "9999-12-31T23:59:59.999Z"


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_a_payload_means_the_same_however_it_was_spelt(value: Any, escaped: bool, indent: int | None) -> None:
    sent = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    text = names.compact(msgspec.Raw(sent))
    assert json.loads(text) == value
    assert len(text.encode()) <= len(sent)


def test_characters_are_unescaped_where_they_may_be() -> None:
    sent = rb'{ "a\u00e9" : "\ud83d\ude00 \\u00e9 \u0022 \u005c \u0007 \n" }'
    assert names.compact(msgspec.Raw(sent)) == '{"aé":"😀 \\\\u00e9 \\u0022 \\u005c \\u0007 \\n"}'


SECRET = "0123456789abcdef"
NO_TOKENS = ("", "0", "-1", "x", "9" * 40, "\uff11", "17", "17-", f"17-{SECRET[1:]}", f"17-{SECRET}0", f"17-{SECRET}\n")
NO_TOKENS += (f"0-{SECRET}", f"-{SECRET}", f"\uff11-{SECRET}", f"{2**63}-{SECRET}", f"17-{SECRET.upper()}")


@pytest.mark.parametrize("text", NO_TOKENS)
def test_what_never_was_a_token_is_stale(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        names.from_token(text)
    assert refused.value.code == "STALE_CLAIM"


def test_a_token_is_its_number_and_its_secret() -> None:
    assert names.to_token(17, SECRET) == f"17-{SECRET}"
    assert names.from_token(f"17-{SECRET}") == (17, SECRET)
    assert names.from_reservation(names.to_reservation("b1-4f9a", SECRET)) == ("b1-4f9a", SECRET)


@pytest.mark.parametrize("text", ["b1-4f9a", f"b1-4f9a-{SECRET[1:]}", f"-{SECRET}", SECRET])
def test_a_reservation_without_its_secret_is_not_found(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        names.from_reservation(text)
    assert refused.value.code == "NOT_FOUND"


def test_half_of_a_character_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        names.compact(msgspec.Raw(b'"\\ud83d"'))
    assert refused.value.code == "VALIDATION_FAILED"
