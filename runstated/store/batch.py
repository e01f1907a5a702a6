"""A batch: what one commit writes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runstated.domain.tables import Row, Table


@dataclass(frozen=True, slots=True)
class Batch:
    """``rows``: of each table what becomes of its rows, by key, in the order of first change; None: the row goes.
    ``numbers``: the counters that have moved."""

    rows: Mapping[Table[Any], Mapping[Hashable, Row | None]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.numbers)
