"""How things are shown: lengths, ages, keys, tables, JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

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
    table = render.table(["NAME"], [["\x1b[2Jx"]])
    assert "\x1b" not in text_of(table)


def test_markup_of_others_is_shown_as_it_is() -> None:
    assert "[red]x[/red]" in text_of(render.table(["NAME"], [["[red]x[/red]"]]))


def test_a_name_that_is_too_long_goes_on_in_the_next_line_and_a_command_is_cut() -> None:
    shown = text_of(render.table(["NAME", render.Column("COMMAND", cut=True)], [["n" * 100, "c" * 100]]))
    assert shown.count("n") == 100
    assert shown.count("c") < 100
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_json_has_every_field_also_those_at_their_defaults() -> None:
    view = wire.StatusView(workers=(wire.WorkerView(session="s", worker="w", pid=1, command="c", connected=False),))
    shown = json.loads(render.json(view))
    assert list(shown) == ["daemon", "runs", "workers", "waits", "queues", "more"]
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


def test_nothing_is_styled_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    console = render.console()
    with console.capture() as captured:
        console.print(render.title("bold"), render.table(["DIM"], [["x"]]))
    assert "\x1b" not in captured.get()


def text_of(renderable: object) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(renderable)
    return file.getvalue()
