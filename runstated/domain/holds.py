"""Holds: the leases that live, how long each still runs, and who holds what.

A lease's length counts on the lease clock; a beat gives it its full length again, in memory only. After a restart of
the daemon every lease has its full length.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from runstated.domain.tables import UNSTORED, Index, Table
from runstated.domain.waits import Topic

SHARED = frozenset(("slots", "budget"))  # kinds whose subject belongs to the space and not to a run
STALE_MAX = 1_000  # entries of the heap whose lease has ended, beside those that live


class Units(Protocol):
    """What units are taken of (a pool of slots)."""

    id: str
    used: int


@dataclass(slots=True, eq=False)
class Lease:
    """One hold. ``subject``: what is held, in the noun's own words (a once key, a job id, a pool's or budget's id).
    ``request``: the id of the request that it was granted to, of which ``fingerprint`` is told; a repeat of it gets the
    same answer. ``units``: of slots; ``needs``: the set that a job took (0: none). ``proof``: the digest of a secret
    that an older version made, or ""."""

    token: int
    space: str
    kind: str
    subject: str
    run: str
    session: str
    request: int
    length_ms: int
    granted_ms: int
    units: int = 0
    needs: int = 0
    fingerprint: str = ""
    proof: str = ""
    topic: Topic = field(default=(), metadata=UNSTORED)
    expires: int = field(default=0, metadata=UNSTORED)  # on the lease clock
    taken: list[tuple[Units, int]] = field(default_factory=list, metadata=UNSTORED)  # units, and of what

    def __post_init__(self) -> None:
        self.topic = topic(self.kind, self.subject, self.run)

    @property
    def topics(self) -> list[Topic]:
        """All that somebody may wait for and that this lease holds."""
        return [self.topic, *(other for pool, _ in self.taken if (other := pool_topic(pool.id)) != self.topic)]


LEASES = Table("leases", Lease, key=("token",), indexes=(Index("leases_by_run", ("run",)),))


def topic(kind: str, subject: str, run: str) -> Topic:
    """Where those stand who wait for what is held."""
    return (kind, "" if kind in SHARED else run, subject)


def pool_topic(pool: str) -> Topic:
    """Where those stand who wait for units of a pool."""
    return ("slots", "", pool)


@dataclass(slots=True)
class Holds:
    """All live leases of a space, by token, holder, request and subject."""

    of_token: dict[int, Lease] = field(default_factory=dict)
    _of_session: dict[str, dict[int, Lease]] = field(default_factory=dict)
    _of_request: dict[tuple[str, int], dict[int, Lease]] = field(default_factory=dict)
    _of_topic: dict[Topic, dict[int, Lease]] = field(default_factory=dict)
    _of_run: dict[str, dict[int, Lease]] = field(default_factory=dict)
    _lapses: list[tuple[int, int]] = field(default_factory=list)  # heap of (expires, token), checked when it comes up

    def add(self, lease: Lease, lease_ms: int) -> None:
        """It lives from now on, for its full length."""
        lease.expires = lease_ms + lease.length_ms
        for index, key in self._indexes(lease):
            index.setdefault(key, {})[lease.token] = lease
        self.of_token[lease.token] = lease
        heapq.heappush(self._lapses, (lease.expires, lease.token))

    def add_units(self, lease: Lease, pool: Units, units: int) -> None:
        """Units of a pool go with a lease."""
        lease.taken.append((pool, units))
        pool.used += units
        self._of_topic.setdefault(pool_topic(pool.id), {})[lease.token] = lease

    def drop(self, lease: Lease) -> None:
        """It has ended; its units are free."""
        del self.of_token[lease.token]
        for index, key in self._indexes(lease):
            members = index[key]
            members.pop(lease.token, None)
            if not members:
                del index[key]
        for pool, units in lease.taken:
            pool.used -= units

    def _indexes(self, lease: Lease) -> Iterator[tuple[dict[Any, dict[int, Lease]], Any]]:
        yield self._of_session, lease.session
        yield self._of_request, (lease.session, lease.request)
        yield self._of_run, lease.run
        for each in lease.topics:
            yield self._of_topic, each

    # ------------------------------------------------------------------ who holds what

    def of_session(self, session: str) -> list[Lease]:
        """What a session holds, oldest first."""
        return list(self._of_session.get(session, {}).values())

    def number_of_session(self, session: str) -> int:
        return len(self._of_session.get(session, ()))

    def of_request(self, session: str, request: int) -> list[Lease]:
        """What one request of a session was given and still holds, oldest first."""
        return list(self._of_request.get((session, request), {}).values())

    def of_topic(self, topic: Topic) -> list[Lease]:
        """The leases on a topic, oldest first."""
        return list(self._of_topic.get(topic, {}).values())

    def is_held(self, topic: Topic) -> bool:
        return topic in self._of_topic

    def of_run(self, run: str) -> list[Lease]:
        """What is held in a run itself."""
        return list(self._of_run.get(run, {}).values())

    def is_any_in_run(self, run: str) -> bool:
        return run in self._of_run

    # ------------------------------------------------------------------ how long they run

    def beat(self, session: str, token: int, lease_ms: int) -> bool:
        """Renews a lease; False when the session does not hold it."""
        lease = self.of_token.get(token)
        if lease is None or lease.session != session:
            return False
        lease.expires = lease_ms + lease.length_ms
        return True

    def renew(self, lease: Lease, length_ms: int, lease_ms: int) -> None:
        """Renews a lease, from now on of another length."""
        lease.length_ms = length_ms
        lease.expires = lease_ms + length_ms
        heapq.heappush(self._lapses, (lease.expires, lease.token))  # it may be shorter than it was

    def spare(self, lease_ms: int) -> None:
        """Gives every lease the time for a beat and more: its holder may have slept as the daemon did."""
        for lease in self.of_token.values():
            lease.expires = max(lease.expires, lease_ms + lease.length_ms // 2)

    def lapsed(self, lease_ms: int) -> list[Lease]:
        """The leases that are over. Those renewed since they were queued are queued again."""
        over: dict[int, Lease] = {}
        while self._lapses and self._lapses[0][0] <= lease_ms:
            _, token = heapq.heappop(self._lapses)
            lease = self.of_token.get(token)
            if lease is not None and lease.expires <= lease_ms:
                over[token] = lease
            elif lease is not None:
                heapq.heappush(self._lapses, (lease.expires, token))
        return list(over.values())

    def next_lapse(self) -> int | None:
        """When, on the lease clock, the next lease may be over. What has ended since wakes nobody."""
        if len(self._lapses) > 2 * len(self.of_token) + STALE_MAX:
            self._lapses = [(lease.expires, token) for token, lease in self.of_token.items()]
            heapq.heapify(self._lapses)
        while self._lapses and self._lapses[0][1] not in self.of_token:
            heapq.heappop(self._lapses)
        return self._lapses[0][0] if self._lapses else None
