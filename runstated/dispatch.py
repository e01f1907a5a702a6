"""The one table from a request to the function that answers it, and what the daemon does by itself when time passes."""

from collections.abc import Callable, Mapping
from typing import Any

from runstate import wire
from runstated.domain import once, queues, runs, sessions, status, tidy
from runstated.store.tx import Parked, Refusal, Tx

Answer = wire.Reply | Refusal | Parked
Verb = Callable[[Tx, Any], Answer]

VERBS: Mapping[type, Verb] = {
    wire.Release: sessions.release,
    wire.RunsJoin: runs.join,
    wire.RunsChild: runs.child,
    wire.RunsEnd: runs.end,
    wire.RunsGet: runs.look,
    wire.OnceAcquire: once.acquire,
    wire.OnceComplete: once.complete,
    wire.OnceFail: once.fail,
    wire.QueuesDeclare: queues.declare,
    wire.QueuesSend: queues.send,
    wire.QueuesResult: queues.result,
    wire.QueuesAdmit: queues.admit,
    wire.QueuesComplete: queues.complete,
    wire.QueuesFail: queues.fail,
    wire.StatusGet: status.look,
}

TICKS: tuple[Callable[[Tx], int | None], ...] = (runs.tick, queues.tick, tidy.tick)
