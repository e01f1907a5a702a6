"""The one table from a request to the function that answers it, and what the daemon does by itself when time passes."""

from collections.abc import Callable, Mapping
from typing import Any

from runstate import wire
from runstated import replies
from runstated.domain import (
    barriers,
    budgets,
    events,
    groups,
    keys,
    limits,
    once,
    queues,
    runs,
    sessions,
    slots,
    status,
    tidy,
    timers,
)
from runstated.store.tx import Parked, Refusal, Tx

Answer = wire.Reply | Refusal | Parked
Verb = Callable[[Tx, Any], Answer]

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
    wire.QueuesResult: queues.result,
    wire.QueuesAdmit: queues.admit,
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


def answer(tx: Tx, request: wire.Request[Any]) -> Answer:
    """What the verb says. Raises its refusals, and KeyRevoked or Forbidden when the caller's key does not allow the
    verb at all."""
    keys.check_live(tx)
    kind = type(request)
    if kind.permission:
        tx.need(kind.permission, f"send {kind.__struct_config__.tag}")
    return VERBS[kind](tx, request)


TICKS: tuple[Callable[[Tx], int | None], ...] = (
    runs.tick,
    queues.tick,
    limits.tick,
    budgets.tick,
    timers.tick,
    tidy.tick,
    replies.tick,
)
