"""The values that the client hands to its users: contexts, events, status. Frozen; times are aware datetimes.

Names, fields and their order are those of the hosted SDK. Further fields may only be added at the end.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from .signals import Signal


@dataclasses.dataclass(frozen=True, slots=True)
class RunInfo:
    """Which run: `id` is unique, `name` is what it was joined by (`(child run)` for a child without a name)."""

    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class RunContext:
    """Where the code runs: what `context()` gives inside a wrapped function or a queue handler."""

    run: RunInfo
    signal: Signal  # set when the work should stop: the run is over, or the hold on the work is lost
    attempt: int  # 1 for the first try
    key: str | None  # the work key of a once call or a job; None elsewhere


@dataclasses.dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened in a run. `data` is the event's payload; an event without one has `{}`."""

    id: str
    type: str
    at: datetime.datetime
    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.data is None:
            object.__setattr__(self, "data", {})


@dataclasses.dataclass(frozen=True, slots=True)
class RunState:
    """A run and how it stands: `state` is "running", "stopped", "finished" or "expired"."""

    id: str
    name: str
    state: str
    deadline: datetime.datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker (by its label), how many things it holds, and when the first of those leases lapses unless renewed."""

    worker: str
    holding: int
    lease_expires_at: datetime.datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """Something that waits: `kind` is "slots", "limit", "once" or "queue"; `units` is how many it asks for."""

    kind: str
    name: str
    units: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunStatus:
    """What `status()` gives: the run, who holds work in it, and what waits."""

    run: RunState
    workers: list[WorkerStatus]
    waiting: list[Waiting]
