"""What Prometheus asks for: HTTP calls, and how many runs, workers, waits and jobs the key's space has."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import Scope

from runstate import wire
from runstated.domain.access import Access
from runstated.http.gateway import Gateway

LIST_MAX = 1_000


class Metrics:
    """See the module."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._calls_registry = CollectorRegistry()
        self._calls = Counter(
            "runstated_http_calls", "HTTP calls answered.", ("method", "route", "status"), registry=self._calls_registry
        )

    def count(self, scope: Scope, status: int) -> None:
        """One more call. Its label is the route, not the path: paths are without number."""
        route = scope.get("route")
        method = scope["method"] if route is not None else "OTHER"
        self._calls.labels(method, getattr(route, "path", "unknown"), str(status)).inc()

    async def text(self, access: Access) -> tuple[bytes, str]:
        """The text and its content type. Needs the permission `usage`."""
        status = await self._gateway.ask(access, "", wire.StatusGet(limit=LIST_MAX))
        assert isinstance(status, wire.StatusView), "that is what it asks for"
        registry = CollectorRegistry()
        holds = Tally(held.kind for worker in status.workers for held in worker.holdings)
        waits = Tally(wait.kind for wait in status.waits)
        jobs: dict[tuple[str, ...], int] = {
            (queue.queue, state): n for queue in status.queues for state, n in queue.counts.items()
        }
        for name, told, value in (
            ("runstated_runs", "Active runs, at most 1000.", len(status.runs)),
            ("runstated_workers", "Open sessions, at most 1000.", len(status.workers)),
            ("runstated_database_bytes", "Size of the database.", status.daemon.database_bytes if status.daemon else 0),
            ("runstated_wal_bytes", "Size of its log.", status.daemon.wal_bytes if status.daemon else 0),
        ):
            Gauge(name, told, registry=registry).set(value)
        _fill(
            Gauge("runstated_holds", "What is held.", ("kind",), registry=registry), {(k,): n for k, n in holds.items()}
        )
        _fill(
            Gauge("runstated_waits", "What waits.", ("kind",), registry=registry), {(k,): n for k, n in waits.items()}
        )
        _fill(Gauge("runstated_jobs", "Jobs by state.", ("queue", "state"), registry=registry), jobs)
        return generate_latest(registry) + generate_latest(self._calls_registry), CONTENT_TYPE_LATEST


def _fill(gauge: Gauge, values: dict[tuple[str, ...], int]) -> None:
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
