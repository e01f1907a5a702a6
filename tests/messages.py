"""One of every message, with every field set to something that is not its default."""

from __future__ import annotations

from typing import Any

import msgspec

from runstate import wire

_run = wire.RunView(run="r1-test", name="job", state="active", parent="r0-test", deadline_ms=5, created_ms=4)
_holding = wire.Holding(token=3, kind="once", name="k", run="job", since_ms=5, until_ms=6)
_worker = wire.WorkerView(session="s", worker="w", pid=7, command="python x", connected=True, holdings=(_holding,))
_wait = wire.WaitView(
    worker="w",
    pid=7,
    kind="once",
    name="k",
    run="r",
    since_ms=5,
    until_ms=6,
    ahead=1,
    behind=("w (pid 8)",),
    lacks=("slots browser",),
)
_daemon = wire.DaemonView(
    version="1", pid=2, started_ms=3, now_ms=4, socket="/s", state_dir="/d", database_bytes=5, wal_bytes=6, sessions=7,
    trouble="full",
)  # fmt: skip
_queue = wire.QueueView(queue="q", attempts=3, counts={"ready": 1})
_grant = wire.JobGrant(
    token=3,
    job="j1-test",
    run="r1-test",
    run_name="job",
    key="k",
    input='{"é": "😀"}',
    attempt=2,
    source=1,
    reason="worker_died",
    reservations=("b1-test",),
    secret="00c0ffee00c0ffee",
    ahead=True,
)
_needs = wire.Needs(
    slots=(wire.UnitsNeeded(name="s", units=2),),
    limits=(wire.UnitsNeeded(name="l", units=3),),
    budgets=(wire.MoneyNeeded(name="b", reserve_minor=40),),
)
_job = wire.JobView(job="j1-test", state="failed", attempt=2, result="1", reason="worker_died", traceback="T")
_sizes: dict[str, Any] = {"limit_minor": 5_000, "currency": "EUR", "scale": 9}
_holder = wire.HolderView(worker="w", holding=2, lease_expires_ms=9, names=("k", "s"))
_reservation = wire.ReservationView(
    reservation="b1-test", run="r1-test", state="active", left_minor=40, charged_minor=1
)
_waiting = wire.WaitingView(kind="slots", name="s", units=2)

_key = wire.KeyView(id="k1-test", space="s", permissions=("work",), name="ci", created_ms=4, revoked_ms=5)

REQUESTS: tuple[wire.Request[object], ...] = (
    wire.Hello(
        protocol=1, protocol_min=1, session="s", worker="w", pid=7, command="python x",
        space="other", key="secret", runs=("r1-test",),
    ),
    wire.Bye(),
    wire.Ack(calls=(1, 2)),
    wire.Cancel(call=5),
    wire.Nested(call=5, within=(1,), inherited=(2, 3)),
    wire.Beat(tokens=(1, 2)),
    wire.Release(token=3, secret="00c0ffee00c0ffee", again=True, keep=True),
    wire.Renew(token=3, secret="00c0ffee00c0ffee", lease_ms=5_000),
    wire.RunsJoin(name="job", deadline_ms=5),
    wire.RunsChild(parent="r1-test", name="c", deadline_ms=5, owned=False, again=True),
    wire.RunsEnd(run="r1-test", state="finished"),
    wire.RunsGet(run="r1-test"),
    wire.OnceAcquire(run="r1-test", key="k", lease_ms=5_000, wait_ms=0, within=(1, 2), ticket=9, again=True),
    wire.OnceGet(run="r1-test", key="k", wait_ms=0),
    wire.OnceComplete(run="r1-test", key="k", token=3, secret="00c0ffee00c0ffee", result='"é"'),
    wire.OnceFail(run="r1-test", key="k", token=3, secret="00c0ffee00c0ffee", error="E", attempts=100, traceback="T"),
    wire.QueuesDeclare(queue="q", attempts=1, needs=_needs),
    wire.QueuesSend(run="r1-test", queue="q", key="k", input="{}", attempts=3, needs=_needs),
    wire.QueuesSendMany(
        run="r1-test", queue="q", members=(wire.NewJob(key="k", input="{}"),), attempts=3, needs=_needs
    ),
    wire.QueuesResult(job="j1-test", wait_ms=2**53),
    wire.QueuesAdmit(
        queues=(wire.AdmitFrom(run="r1-test", queue="q", places=1_000, lease_ms=600_000, below=False, ahead=4),)
    ),
    wire.QueuesStarted(tokens=(3,)),
    wire.QueuesComplete(
        job="j1-test", token=3, secret="00c0ffee00c0ffee", result="null", costs={"b1-test": 0}, keep_reserved=True,
    ),
    wire.QueuesFail(job="j1-test", token=3, secret="00c0ffee00c0ffee", error="E", retry=False, traceback="T"),
    wire.LimitsDeclare(limit="l", max=60, per_seconds=86_400),
    wire.LimitsGet(limit="l"),
    wire.LimitsTake(run="r1-test", limit="l", units=2, max=60, per_seconds=1, wait_ms=1, within=(1,), inherited=(2,)),
    wire.SlotsDeclare(pool="s", max=5),
    wire.SlotsGet(pool="s"),
    wire.SlotsAcquire(run="r1-test", pool="s", units=2, lease_ms=5_000, max=5, wait_ms=1, ticket=9),
    wire.BudgetsDeclare(budget="b", **_sizes),
    wire.BudgetsGet(budget="b", reservations=1_000),
    wire.BudgetsReserve(run="r1-test", budget="b", amount_minor=2**53, settle_by_ms=6, **_sizes),
    wire.BudgetsSettle(
        reservation="b1-test", secret="00c0ffee00c0ffee", cost_minor=0, work_key="k", keep_rest=True, overrun=False,
        late=False,
    ),
    wire.BudgetsRelease(reservation="b1-test", secret="00c0ffee00c0ffee", late=False),
    wire.GroupsSubmit(
        run="r1-test", queue="q", members=(wire.NewJob(key="k", input="1"),), attempts=3, needs=_needs,
        owned=False,
    ),
    wire.GroupsEnded(run="r1-test", after=4, wait_ms=1),
    wire.TimersSleep(run="r1-test", name="t", after_ms=0, at_ms=5),
    wire.TimersAck(run="r1-test", name="t"),
    wire.BarriersDeclare(run="r1-test", name="t", count=3),
    wire.BarriersGet(run="r1-test", name="t"),
    wire.BarriersArrive(run="r1-test", name="t", count=3, worker="w"),
    wire.EventsRead(run="r1-test", after=4, types=("task.failed",), limit=500),
    wire.EventsWait(run="r1-test", after=4),
    wire.StatusGet(limit=1_000),
    wire.RunsStatus(run="r1-test"),
    wire.KeysCreate(space="s", permissions=("work",), name="ci"),
    wire.KeysList(),
    wire.KeysRevoke(key="k1-test"),
)  # fmt: skip
REPLIES: tuple[wire.Reply, ...] = (
    wire.Ok(),
    wire.Error(code="STOPPED", message="no", retryable=True, run="r1-test"),
    wire.Welcome(
        protocol=1,
        version="0.1",
        pid=2,
        resumed=True,
        ended=(wire.RunEnded(run="r1-test", state="stopped", message="m"),),
    ),
    _run,
    wire.OnceGranted(token=3, secret="00c0ffee00c0ffee", attempt=2, takeovers=1),
    wire.OnceDone(result="1"),
    wire.OnceFailed(attempts=3, error="E", traceback="T"),
    wire.OnceHeld(attempts=2),
    wire.OnceOpen(attempts=2),
    wire.OnceFailCounted(attempts=1, failed=True),
    _queue,
    _job,
    wire.JobsSent(jobs=("j1-test",)),
    wire.JobsGranted(jobs=(_grant,)),
    wire.Released(held=True),
    wire.Renewed(lease_expires_ms=5),
    wire.LimitView(id="l1-test", limit="l", max=60, per_seconds=1, used=2, waiting=3),
    wire.LimitTaken(),
    wire.LimitBusy(),
    wire.SlotsView(id="p1-test", pool="s", max=5, used=2, waiting=3, holders=("w",)),
    wire.SlotsGranted(token=3, secret="00c0ffee00c0ffee"),
    wire.SlotsBusy(),
    wire.BudgetView(id="m1-test", budget="b", reserved_minor=1, spent_minor=2, reservations=(_reservation,), **_sizes),
    wire.BudgetReserved(token=3, secret="00c0ffee00c0ffee", reservation="b1-test", scale=2),
    wire.BudgetSettled(state="active", charged_minor=1, left_minor=2),
    wire.GroupView(run="r1-test", jobs=("j1-test",)),
    wire.GroupEnded(jobs=(_job,), cursor=4),
    wire.TimerView(fired=True, fire_ms=5, acked=True),
    wire.BarrierView(released=True, target=3, arrivals=2),
    wire.EventsPage(
        events=(wire.Event(event=4, type="task.failed", at_ms=5, data={"taskId": "j1-test"}),),
        cursor=4,
        more=True,
        gap=True,
    ),
    wire.StatusView(
        daemon=_daemon, runs=(_run,), workers=(_worker,), waits=(_wait,), queues=(_queue,), more=("runs",),
        names={"p1-test": "s"},
    ),
    wire.RunStatusView(run=_run, workers=(_holder,), waiting=(_waiting,)),
    wire.KeyCreated(id="k1-test", secret="rsk_k1-test_x", space="s", permissions=("work",), name="ci"),
    wire.KeyList(keys=(_key,)),
)  # fmt: skip
PUSHES: tuple[wire.Push, ...] = (
    wire.Parked(call=5, ticket=2**45, behind=(3,)),
    wire.LeaseLost(token=3, reason="gone"),
    wire.RunEnded(run="r1-test", state="expired", message="m"),
    wire.JobsReturn(tokens=(3,)),
    wire.Reconnect(),
)


def tag(message: object) -> str:
    """The message's name on the wire."""
    return str(type(message).__struct_config__.tag)  # type: ignore[attr-defined]


ALL: dict[str, msgspec.Struct] = {
    **{f"request {tag(message)}": message for message in REQUESTS},
    **{f"reply {tag(message)}": message for message in REPLIES},
    **{f"push {tag(message)}": message for message in PUSHES},
}
