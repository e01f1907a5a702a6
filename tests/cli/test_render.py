"""How things are shown: lengths, ages, keys, tables, JSON."""

from __future__ import annotations

import json

import pytest

from runstate import wire
from runstate_cli import render

NOW = 1_700_000_000_000
HASH = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (-5, "0 s"),
        (999, "0 s"),
        (12_345, "12 s"),
        (60_000, "1 min"),
        (61_000, "1 min 1 s"),
        (3_600_000, "1 h"),
        (3_605_000, "1 h"),
        (93_600_000 + 59_000, "1 d 2 h"),
    ],
)
def test_a_duration_is_told_in_its_two_largest_units(milliseconds: int, shown: str) -> None:
    assert render.duration(milliseconds) == shown


def test_points_in_time_are_relative() -> None:
    assert render.ago(NOW - 12_000, NOW) == "12 s ago"
    assert render.ago(NOW - 10, NOW) == "now"
    assert render.ahead(NOW + 18_000, NOW) == "in 18 s"
    assert render.ahead(NOW - 18_000, NOW) == "now"
    assert render.ahead(None, NOW) == render.NOTHING


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 20, "4.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_told_in_binary_units(size: int, shown: str) -> None:
    assert render.size(size) == shown


def test_only_the_hash_of_a_key_is_shortened() -> None:
    assert render.short_key(f"research:{HASH}") == "research:01234567~"
    assert render.short_key("a-key-of-my-own") == "a-key-of-my-own"
    assert render.short_key(f"research:{HASH}0") == f"research:{HASH}0"


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    assert render.clean("a\x1b]0;b\x07\n\u202ec") == "a?]0;b???c"
    assert "\x1b" not in render.line("\x1b[2Jx").text
    assert [line.text for line in render.table(["NAME"], [["\x1b[2Jx"]], 80)] == ["NAME", "?[2Jx"]


def test_columns_are_as_wide_as_what_is_in_them_and_numbers_stand_right() -> None:
    table = render.table(
        ["NAME", render.Column("JOBS", right=True), "AGE"], [["a", 7, "now"], ["bcdef", 12345, "-"]], 80
    )
    assert [line.text for line in table] == [
        "NAME    JOBS  AGE",
        "a          7  now",
        "bcdef  12345  -",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert [line.text for line in render.table(["A", "B"], [], 80)] == ["A  B"]


def test_a_name_that_is_too_long_goes_on_in_the_next_line_and_a_command_is_cut() -> None:
    columns = ["NAME", render.Column("PID", right=True), render.Column("COMMAND", cut=True)]
    lines = [line.text for line in render.table(columns, [["n" * 100, 4711, "c" * 100]], 80)]
    assert sum(line.count("n") for line in lines) == 100
    assert sum(line.count("c") for line in lines) < 100
    assert lines[1].endswith("c~")
    assert sum("4711" in line for line in lines) == 1
    assert max(len(line) for line in lines) <= 80


def test_words_are_kept_whole_where_they_fit() -> None:
    table = render.table(["WHAT"], [["once research in the run quickstart"]], 14)
    assert [line.text for line in table] == ["WHAT", "once research", "in the run", "quickstart"]


def test_letters_that_take_two_columns_are_counted_as_two() -> None:
    table = render.table(["NAME", "X"], [["\u7814\u7a76", "y"], ["e\u0301", "z"]], 80)
    assert [line.text for line in table] == ["NAME  X", "\u7814\u7a76  y", "e\u0301     z"]
    assert len(render.table(["NAME"], [["\u7814" * 50]], 20)) == 1 + 5


def test_a_terminal_that_is_too_narrow_still_shows_everything() -> None:
    table = render.table(["A", "B", "C"], [["a" * 30, "b" * 30, "c" * 30]], 5)
    assert sum(line.text.count("b") for line in table) == 30


def test_json_has_every_field_also_those_at_their_defaults() -> None:
    view = wire.StatusView(workers=(wire.WorkerView(session="s", worker="w", pid=1, command="c", connected=False),))
    shown = json.loads(render.json(view))
    assert list(shown) == ["daemon", "runs", "workers", "waits", "queues", "more", "names"]
    assert shown["workers"][0] == {
        "session": "s",
        "worker": "w",
        "pid": 1,
        "command": "c",
        "connected": False,
        "holdings": [],
    }


def test_json_is_one_line_and_keeps_what_tables_change() -> None:
    shown = render.json(wire.StatusView(more=(f"research:{HASH}", "a\nb\x1b")))
    assert shown.count(b"\n") == 1
    assert json.loads(shown)["more"] == [f"research:{HASH}", "a\nb\x1b"]
