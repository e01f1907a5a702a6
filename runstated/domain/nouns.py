"""All nouns: their tables, the one table from a request to the function that answers it, and what is done with them
when time passes, at the start, and when their run is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runstate import wire
from runstated.domain import (
    admission,
    ahead,
    barriers,
    budgets,
    events,
    groups,
    jobs,
    keys,
    limits,
    money,
    needs,
    once,
    queues,
    replies,
    runs,
    sessions,
    slots,
    status,
    timers,
)
from runstated.domain.answers import Listing, Parked, Refusal
from runstated.domain.core import EVENTS_TABLE, Core
from runstated.domain.holds import LEASES
from runstated.domain.tables import Table

Answer = wire.Reply | Refusal | Parked | Listing
Verb = Callable[[Core, Any], Answer]

TABLES: tuple[Table[Any], ...] = (  # in the order in which they are loaded
    keys.KEYS,
    sessions.SESSIONS,
    runs.RUNS,
    LEASES,
    replies.REPLIES,
    once.KEYS,
    queues.QUEUES,
    needs.SETS,
    jobs.JOBS,
    jobs.COUNTS,
    limits.LIMITS,
    slots.POOLS,
    money.BUDGETS,
    money.RESERVATIONS,
    money.LEDGER,
    timers.TIMERS,
    barriers.BARRIERS,
    barriers.ARRIVALS,
    EVENTS_TABLE,
)

LOADS: tuple[Callable[[Core], None], ...] = (  # after all objects were loaded
    sessions.load,
    runs.load,
    replies.load,
    once.load,
    limits.load,
    slots.load,
    budgets.load,
    needs.load,
    queues.load,
    jobs.load,
    timers.load,
    barriers.load,
)

ENDED: tuple[Callable[[Core, str], None], ...] = (jobs.run_ended,)  # a run is over: its objects leave memory by and by

TICKS: tuple[Callable[[Core], int | None], ...] = (
    runs.tick,
    queues.tick,
    limits.tick,
    budgets.tick,
    timers.tick,
)

VERBS: Mapping[type, Verb] = {
    wire.Release: sessions.release,
    wire.Renew: sessions.renew,
    wire.RunsJoin: runs.join,
    wire.RunsChild: runs.child,
    wire.RunsEnd: runs.end,
    wire.RunsGet: runs.look,
    wire.OnceAcquire: once.acquire,
    wire.OnceGet: once.look,
    wire.OnceComplete: once.complete,
    wire.OnceFail: once.fail,
    wire.QueuesDeclare: queues.declare,
    wire.QueuesSend: queues.send,
    wire.QueuesSendMany: queues.send_many,
    wire.QueuesResult: queues.result,
    wire.QueuesAdmit: admission.admit,
    wire.QueuesStarted: ahead.started,
    wire.QueuesComplete: queues.complete,
    wire.QueuesFail: queues.fail,
    wire.LimitsDeclare: limits.declare,
    wire.LimitsGet: limits.look,
    wire.LimitsTake: limits.take,
    wire.SlotsDeclare: slots.declare,
    wire.SlotsGet: slots.look,
    wire.SlotsAcquire: slots.acquire,
    wire.BudgetsDeclare: budgets.declare,
    wire.BudgetsGet: budgets.look,
    wire.BudgetsReserve: budgets.reserve,
    wire.BudgetsSettle: budgets.settle,
    wire.BudgetsRelease: budgets.void,
    wire.GroupsSubmit: groups.submit,
    wire.GroupsEnded: groups.ended,
    wire.TimersSleep: timers.sleep,
    wire.TimersAck: timers.ack,
    wire.BarriersDeclare: barriers.declare,
    wire.BarriersGet: barriers.look,
    wire.BarriersArrive: barriers.arrive,
    wire.EventsRead: events.read,
    wire.EventsWait: events.wait,
    wire.StatusGet: status.look,
    wire.RunsStatus: status.look_run,
    wire.KeysCreate: keys.create,
    wire.KeysList: keys.look,
    wire.KeysRevoke: keys.revoke,
}
