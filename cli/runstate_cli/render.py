"""How the commands show things: tables for people, one JSON object for programs.

Pure, except that ``console`` looks at the terminal. Rules for what is shown to people: times are relative; whatever
comes from other processes (labels, command lines, names) is cleaned of control characters, so that nobody's command
line can write to somebody else's terminal; long once keys are shortened. JSON is never cleaned and never shortened.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

NOTHING = "-"
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
    return f"{match[1]}{match[2][:KEY_CHARACTERS]}~" if match else key


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


# ---------------------------------------------------------------------------------------------------- tables


class Column(NamedTuple):
    """``cut``: a long value is cut off at the table's edge instead of going on in the next line."""

    title: str
    right: bool = False
    cut: bool = False


def console() -> Console:
    """Standard output: styled on a terminal that wants it, plain text of 80 columns (or COLUMNS) in a pipe."""
    from rich.console import Console

    if sys.stdout.encoding and not sys.stdout.encoding.lower().startswith("utf"):
        _replace_what_cannot_be_shown()
    options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    if os.environ.get("NO_COLOR"):
        options["color_system"] = None  # rich alone would still send bold and dim
    return Console(**options)


def _replace_what_cannot_be_shown() -> None:
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def table(columns: Sequence[str | Column], rows: Iterable[Sequence[str | int]]) -> Table:
    """A table without lines that fits its width by folding."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    cells: list[dict[str, Any]] = []
    for named in columns:
        column = Column(named) if isinstance(named, str) else named
        # Of a column that may not wrap, rich takes nothing away until all others are gone: only numbers are such
        # columns. A cut column may wrap, and its cells do not.
        made.add_column(column.title, justify="right" if column.right else "left", no_wrap=column.right)
        cells.append({"no_wrap": column.cut, "overflow": "ellipsis" if column.cut else "fold"})
    for row in rows:
        made.add_row(*(Text(clean(str(cell)), **how) for cell, how in zip(row, cells, strict=True)))
    return made


def title(text: str) -> RenderableType:
    """The line above a table."""
    from rich.text import Text

    return Text(text, style="bold")


def line(text: str, style: str = "") -> RenderableType:
    """A line of its own, cleaned."""
    from rich.text import Text

    return Text(clean(text), style=style)
