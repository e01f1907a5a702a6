"""How the commands show things: tables for people, one JSON object for programs.

Pure, except that ``show`` and ``width`` look at the terminal. Rules for what is shown to people: times are relative;
whatever comes from other processes (labels, command lines, names) is cleaned of control characters, so that nobody's
command line can write to somebody else's terminal; long once keys are shortened. JSON is never cleaned or shortened.

The tables are made here because importing rich takes longer (90 ms) than all else that `runstate status` does; the live
view of --watch is rich's.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple
from unicodedata import combining, east_asian_width

import click

NOTHING = "-"
CUT_OFF = "~"
GAP = "  "
COLUMNS = 80  # of what is no terminal
COLUMN_MIN = 8  # narrower columns cannot be read
KEY_CHARACTERS = 8  # of the hash in a shortened once key: enough to tell the keys of one screen apart

_HASHED_KEY = re.compile(r"(?s)(.*:)([0-9a-f]{32})")


# ---------------------------------------------------------------------------------------------------- words


def duration(milliseconds: float) -> str:
    """A length of time in its two largest units, whole seconds at the smallest."""
    whole = max(0, int(milliseconds / 1000))
    parts = [(whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number) or "0 s"


def ago(at_ms: int, now_ms: int) -> str:
    """A point in time that is over, as "12 s ago"."""
    return "now" if now_ms - at_ms < 1000 else f"{duration(now_ms - at_ms)} ago"


def ahead(at_ms: int | None, now_ms: int) -> str:
    """A point in time that is to come, as "in 18 s"; a dash where there is none."""
    if at_ms is None:
        return NOTHING
    return "now" if at_ms - now_ms < 1000 else f"in {duration(at_ms - now_ms)}"


def size(number_of_bytes: int) -> str:
    """A number of bytes in binary units."""
    value = float(number_of_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, noun: str) -> str:
    """ "1 job", "2 jobs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short_key(key: str) -> str:
    """A once key or a job's key with its hash cut to what people can compare."""
    match = _HASHED_KEY.fullmatch(key)
    return f"{match[1]}{match[2][:KEY_CHARACTERS]}{CUT_OFF}" if match else key


def clean(text: str) -> str:
    """Text of another process without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


# ---------------------------------------------------------------------------------------------------- JSON


def json(view: Any) -> bytes:
    """One line: a Struct with every field, also those at their defaults, so that the keys are always the same."""
    import msgspec

    return msgspec.json.encode(plain(view)) + b"\n"


def plain(value: Any) -> Any:
    """A Struct as a dict, and what is in it alike."""
    fields = getattr(value, "__struct_fields__", None)
    if fields is not None:
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


# ---------------------------------------------------------------------------------------------------- lines


class Line(NamedTuple):
    """A line of output, clean. ``style``: "", "bold", "dim", "yellow" or "red"."""

    text: str
    style: str = ""


def line(text: str, style: str = "") -> Line:
    """A line, cleaned."""
    return Line(clean(text), style)


def show(lines: Iterable[Line]) -> None:
    """Prints to standard output: with styles on a terminal that wants them, plainly everywhere else."""
    if sys.stdout.encoding and not sys.stdout.encoding.lower().startswith("utf"):
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a name in other letters must not end the command
    styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for text, style in lines:
        click.echo(click.style(text, **_CLICK_STYLES[style]) if styled and style else text)


_CLICK_STYLES: dict[str, dict[str, Any]] = {
    "bold": {"bold": True},
    "dim": {"dim": True},
    "yellow": {"fg": "yellow"},
    "red": {"fg": "red"},
}


def width() -> int:
    """The columns of the terminal; 80 (or COLUMNS) where there is none."""
    return shutil.get_terminal_size((COLUMNS, 24)).columns


# ---------------------------------------------------------------------------------------------------- tables


class Column(NamedTuple):
    """``right``: numbers, never shortened. ``cut``: a long value is cut off instead of going on in the next line."""

    title: str
    right: bool = False
    cut: bool = False


def table(columns: Sequence[str | Column], rows: Iterable[Sequence[str | int]], room: int) -> list[Line]:
    """A table without rules, ``room`` columns wide at most as long as its numbers fit."""
    heads = [Column(named) if isinstance(named, str) else named for named in columns]
    cells = [[clean(str(cell)) for cell in row] for row in rows]
    natural = [
        max(columns_of(cell) for cell in (head.title, *values))
        for head, values in zip(heads, zip(*cells, strict=True) if cells else [()] * len(heads), strict=True)
    ]
    widths = _widths(natural, [index for index, head in enumerate(heads) if not head.right], room)
    made = [Line(_row([head.title for head in heads], heads, widths), "dim")]
    for row in cells:
        folded = [_fold(cell, wide, cut=head.cut) for cell, head, wide in zip(row, heads, widths, strict=True)]
        made += [Line(_row(parts, heads, widths)) for parts in zip_longest(*folded, fillvalue="")]
    return made


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: Chinese letters take two, combining accents none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 1 + (east_asian_width(each) in "WF") for each in text)


def _widths(natural: Sequence[int], shrinking: Sequence[int], room: int) -> list[int]:
    """The natural widths, or less: the widest gives way first."""
    room -= len(GAP) * (len(natural) - 1)
    widths = [min(wide, max(room, COLUMN_MIN)) for wide in natural]
    while sum(widths) > room:
        widest = max(shrinking, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= COLUMN_MIN:
            break
        widths[widest] -= 1
    return widths


def _row(parts: Sequence[str], heads: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for part, head, wide in zip(parts, heads, widths, strict=True):
        space = " " * (wide - columns_of(part))
        padded.append(space + part if head.right else part + space)
    return GAP.join(padded).rstrip()


def _fold(text: str, room: int, *, cut: bool) -> list[str]:
    """The text in lines of at most ``room`` columns, broken at spaces where there are some; or its start."""
    lines: list[str] = []
    while columns_of(text) > room:
        if cut:
            return [text[: _fitting(text, room - 1)] + CUT_OFF]
        end = _fitting(text, room)
        space = text.rfind(" ", 1, end + 1)
        end = space if space > 0 else end
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def _fitting(text: str, room: int) -> int:
    """How many characters of the text fit, at least one."""
    for end in range(1, len(text)):
        if columns_of(text[: end + 1]) > room:
            return end
    return len(text)
