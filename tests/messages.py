"""One of every message, with every field set to something that is not its default."""

from __future__ import annotations

import msgspec

from runstate import wire

_run = wire.RunView(run="r1-test", name="job", state="active", parent="r0-test", deadline_ms=5, created_ms=4)
_holding = wire.Holding(token=3, kind="once", name="k", run="job", since_ms=5, until_ms=6)
_worker = wire.WorkerView(session="s", worker="w", pid=7, command="python x", connected=True, holdings=(_holding,))
_wait = wire.WaitView(
    worker="w", pid=7, kind="once", name="k", run="r", since_ms=5, until_ms=6, ahead=1, behind=("w (pid 8)",)
)
_daemon = wire.DaemonView(
    version="1", pid=2, started_ms=3, now_ms=4, socket="/s", state_dir="/d", database_bytes=5, wal_bytes=6, sessions=7,
    trouble="full",
)  # fmt: skip
_queue = wire.QueueView(queue="q", attempts=3, counts={"ready": 1})
_grant = wire.JobGrant(
    token=3, job="j1-test", run="r1-test", run_name="job", key="k", input='{"é": "😀"}', attempt=2, source=1
)

REQUESTS: tuple[wire.Request[object], ...] = (
    wire.Hello(
        protocol=1, protocol_min=1, session="s", worker="w", pid=7, namespace="pid:[4026531836]", command="python x",
        space="other", key="secret", client="python/1", runs=("r1-test",),
    ),
    wire.Bye(),
    wire.Ack(calls=(1, 2)),
    wire.Cancel(call=5),
    wire.Beat(tokens=(1, 2)),
    wire.Release(token=3, again=True),
    wire.RunsJoin(name="job", deadline_ms=5),
    wire.RunsChild(parent="r1-test", name="c", deadline_ms=5, again=True),
    wire.RunsEnd(run="r1-test", state="finished"),
    wire.RunsGet(run="r1-test"),
    wire.OnceAcquire(run="r1-test", key="k", lease_ms=5_000, wait_ms=0, within=(1, 2), ticket=9, again=True),
    wire.OnceComplete(run="r1-test", key="k", token=3, result='"é"'),
    wire.OnceFail(run="r1-test", key="k", token=3, error="E", attempts=100),
    wire.QueuesDeclare(queue="q", attempts=1),
    wire.QueuesSend(run="r1-test", queue="q", key="k", input="{}", attempts=3),
    wire.QueuesResult(job="j1-test", wait_ms=2**53),
    wire.QueuesAdmit(queues=(wire.AdmitFrom(run="r1-test", queue="q", places=1_000, lease_ms=600_000),)),
    wire.QueuesComplete(job="j1-test", token=3, result="null"),
    wire.QueuesFail(job="j1-test", token=3, error="E", retry=False),
    wire.StatusGet(limit=1_000),
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
    wire.OnceGranted(token=3, attempt=2),
    wire.OnceDone(result="1"),
    wire.OnceFailed(attempts=3, error="E"),
    wire.OnceHeld(),
    wire.OnceFailCounted(attempts=1, failed=True),
    _queue,
    wire.JobView(job="j1-test", state="failed", attempt=2, result="1", reason="worker_died"),
    wire.JobsGranted(jobs=(_grant,)),
    wire.StatusView(daemon=_daemon, runs=(_run,), workers=(_worker,), waits=(_wait,), queues=(_queue,), more=("runs",)),
)
PUSHES: tuple[wire.Push, ...] = (
    wire.Parked(call=5, ticket=2**45, behind=(3,)),
    wire.LeaseLost(token=3, reason="gone"),
    wire.RunEnded(run="r1-test", state="expired", message="m"),
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
