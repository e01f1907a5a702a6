"""For tests whose clients live in this process: a worker in a thread, and what the daemon says of resources."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from runstate import Runstate, wire

Make = Callable[..., Runstate]


class serving:
    """Serves a client's queues in a thread."""

    def __init__(self, client: Runstate, **options: Any) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(client, options))

    def _serve(self, client: Runstate, options: dict[str, Any]) -> None:
        try:
            client.serve(signal=self.stop, **options)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> serving:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        if self.error is not None:
            raise self.error


def used(make: Make, limit: str) -> int:
    return int(make()._connection().call(wire.LimitsGet(limit=limit)).reply.used)


def pool(make: Make, name: str) -> wire.SlotsView:
    return make()._connection().call(wire.SlotsGet(pool=name)).reply


def money(make: Make, name: str) -> tuple[int, int]:
    """(reserved, spent)"""
    view = make()._connection().call(wire.BudgetsGet(budget=name)).reply
    return view.reserved_minor, view.spent_minor
