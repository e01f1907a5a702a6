"""Money: the objects of budgets. Their rules are in budgets.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from runstated.domain.tables import UNSTORED, Index, Live, Table


@dataclass(slots=True, eq=False)
class Budget:
    """A budget."""

    id: str
    space: str
    name: str
    currency: str
    scale: int
    limit_minor: int
    spent_minor: int = 0
    reserved_minor: int = 0

    @property
    def available(self) -> int:
        return self.limit_minor - self.spent_minor - self.reserved_minor


@dataclass(slots=True, eq=False)
class Reservation:
    """A reservation. ``state``: active, settled or released. ``left_minor``: what is still reserved, of
    ``amount_minor``; ``assumed_minor``: what was charged because nobody said what was spent. ``path``: of its run.
    ``is_held``: 1 while it is active or its lease lives. ``works``: the work keys that were charged in this life of the
    daemon; there may be more on disk where ``has_rows``."""

    reservation: str
    space: str
    budget: str
    run: str
    path: str
    token: int
    state: str
    left_minor: int
    amount_minor: int
    settle_by_ms: int
    session: str
    proof: str = ""
    charged_minor: int = 0
    assumed_minor: int = 0
    ended_ms: int | None = None
    is_held: int = 1
    works: set[str] = field(default_factory=set, metadata=UNSTORED)
    has_rows: bool = field(default=True, metadata=UNSTORED)


@dataclass(slots=True, eq=False)
class Entry:
    """A row of the ledger: one movement, and the balance after it."""

    entry: int
    space: str
    budget: str
    reservation: str
    kind: str
    work_key: str | None
    change_minor: int
    balance_minor: int
    at_ms: int


BUDGETS = Table("budgets", Budget, key=("id",))
RESERVATIONS = Table(
    "reservations",
    Reservation,
    key=("reservation",),
    live=Live("is_held", (1,)),
    indexes=(
        Index("reservations_of_budget", ("budget", "settle_by_ms")),
        Index("reservations_ended", ("ended_ms",), not_null="ended_ms"),
    ),
)
LEDGER = Table("ledger", Entry, key=("entry",), asked_by=(("reservation", "work_key"),), appended=True)
