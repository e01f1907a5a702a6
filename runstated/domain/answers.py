"""What a verb answers beside a reply: that it cannot answer yet, or that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runstate import wire
from runstated.domain.access import OWNER, Access
from runstated.domain.tables import Table
from runstated.domain.waits import Stand, Topic


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a verb runs: a session and its request, or (the default) the daemon itself."""

    session: str = ""
    access: Access = OWNER
    request_id: int = 0
    rank: int = 1
    ticket: int = 0
    request: wire.Request[Any] | None = None

    @property
    def space(self) -> str:
        return self.access.space


NOBODY = Caller()


@dataclass(frozen=True, slots=True)
class Parked:
    """A verb's answer when it cannot answer yet. What it changed stays; a second run of it must leave that alone.

    ``lines``: served by age, one after the other, by running the verb again. ``signals``: answered all at once with
    the value that settled them. ``late``: the reply when the wait is over, or what tells it then. ``aside``: it stands
    in some of its lines only because it has there what it wants, so whoever comes to stand before it makes it look
    again. ``ages``: by whose age it stands in a line, if not by its own: that of the job for which it stands there, and
    ``stands``: what that job needs. ``at``: where it stands in its lines of limits.
    ``over``: tells the reply when its run ends, for a wait that the end of the run does not refuse. What tells a reply
    is given the ``Core``.
    """

    lines: tuple[Topic, ...]
    signals: tuple[Topic, ...]
    late: wire.Reply | Callable[[Any], wire.Reply]
    aside: bool = False
    ages: Mapping[Topic, int] = field(default_factory=dict)
    stands: Mapping[Topic, Any] = field(default_factory=dict)
    over: Callable[[Any], wire.Reply] | None = None
    at: Mapping[Topic, tuple[Stand, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listing:
    """A verb's answer that needs many rows: they are read on another thread when all that was noted is written.

    The rows of ``table`` whose columns have the values of ``equals`` and lie in the ranges of ``between`` (from, up to
    and without), by ``order`` (``newest``: the last first), at most ``many``; ``then`` makes the reply of them. With
    ``examined`` at most this many rows from the beginning of the range of ``order`` are looked at, and the last of them
    comes along, whether it is one of these or not.
    """

    table: Table[Any]
    then: Callable[[list[Any]], wire.Reply]
    equals: Mapping[str, Any] = field(default_factory=dict)
    between: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    order: str = ""
    newest: bool = False
    many: int = 1_000
    examined: int = 0


class Missing(Exception):
    """A verb needs an object that is not in memory, or several of a table (``others``: their values). Raised before its
    first change: the engine fetches them, and runs the verb again."""

    def __init__(
        self, table: Table[Any], columns: tuple[str, ...], value: Hashable, others: tuple[Hashable, ...] = ()
    ) -> None:
        super().__init__(f"{table.name} {columns} {value}")
        self.table = table
        self.columns = columns
        self.value = value
        self.others = others

    def each(self) -> list[Missing]:
        """One for each object."""
        return [self, *(Missing(self.table, self.columns, value) for value in self.others)]


class Refusal(Exception):
    """The caller's fault. ``says`` is the default message, ``code`` the stable name on the wire.

    Raised, it means that nothing was changed (the engine asserts it); returned, that what was changed stays.
    """

    code = "VALIDATION_FAILED"
    says = ""

    def __init__(self, message: str | None = None, *, run: str | None = None) -> None:
        super().__init__(message or self.says or self.code)
        self.run = run

    def reply(self) -> wire.Error:
        return wire.Error(code=self.code, message=str(self), run=self.run)


class ValidationFailed(Refusal):
    """The request is not valid."""


class NotFound(Refusal):
    """There is no such thing."""

    code = "NOT_FOUND"


class Conflict(Refusal):
    """It exists already, and differs."""

    code = "CONFLICT"


class Forbidden(Refusal):
    """The key does not allow this."""

    code = "FORBIDDEN"


class TooMany(Refusal):
    """One session holds or awaits more than it may."""

    code = "UNAVAILABLE"


def must(holds: bool, why: str) -> None:
    """An assertion that ``python -O`` keeps, for what would be recorded twice or wrongly if it did not hold."""
    if not holds:
        raise AssertionError(why)
