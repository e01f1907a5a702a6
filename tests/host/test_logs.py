"""One record, one line; nothing in it that a terminal obeys or that users have stored."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from runstated.domain.answers import Refusal
from runstated.host import logs

log = logging.getLogger("runstated.test")


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.OneLine(logs.FORMAT))
    log.addHandler(handler)
    yield stream
    log.removeHandler(handler)


def test_what_others_have_sent_cannot_make_lines_or_move_the_cursor(said: io.StringIO) -> None:
    log.warning("process 7 says %s", "a\r\n2026-01-01 CRITICAL\x1b[2J\u2028\u202egnp\x85\x00é")
    (line, rest) = said.getvalue().split("\n")
    assert rest == ""
    assert line.endswith(r"process 7 says a\x0d\n2026-01-01 CRITICAL\x1b[2J\u2028\u202egnp\x85\x00é")
    assert len(line.splitlines()) == 1


def test_a_long_message_is_cut(said: io.StringIO) -> None:
    log.warning("x" * 1_000_000)
    assert len(said.getvalue()) < 2 * logs.MESSAGE_CHARS_MAX
    assert said.getvalue().endswith("... (1000000 characters)\n")


def test_an_exception_is_on_the_line_with_its_places_and_without_foreign_words(said: io.StringIO) -> None:
    try:
        try:
            int("a secret\npayload")
        except ValueError as error:
            raise Refusal("the words of ours") from error
    except Refusal:
        log.exception("it failed")
    (line,) = said.getvalue().splitlines()
    assert "it failed | Refusal: the words of ours at test_logs.py:" in line
    assert ", after ValueError at test_logs.py:" in line
    assert "secret" not in line


def test_an_endless_recursion_is_a_line_too(said: io.StringIO) -> None:
    def again() -> None:
        again()

    with pytest.raises(RecursionError) as caught:
        again()
    log.error("it failed", exc_info=caught.value)
    (line,) = said.getvalue().splitlines()
    assert line.count(" again") == logs.PLACES_MAX
