"""Spaces: nothing of one space can be seen or touched from another. Each message that a client can send is tried with
every id of the other space, and is answered exactly as with an id that does not exist.

And keys: what a key lacks a permission for is refused, and only that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated.domain import nouns as dispatch
from runstated.domain.access import Access
from runstated.engine.entries import Acked, Cancelled, Nested
from tests.harness import Client, Harness


@dataclass(frozen=True)
class Ids:
    """What a request can name: one of everything in one space. ``slots`` and ``delivery`` (of the job) are tokens, as
    ``token`` (of the once key) is; ``call`` waits, and ``ticket`` is its arrival number."""

    run: str = "r999-test"
    group: str = "r998-test"
    key: str = "no-key"
    token: int = 999
    slots: int = 998
    job: str = "j999-test"
    delivery: int = 997
    reservation: str = "b999-test"
    queue: str = "no-queue"
    pool: str = "no-pool"
    limit: str = "no-limit"
    budget: str = "no-budget"
    timer: str = "no-timer"
    barrier: str = "no-barrier"
    call: int = 9_999
    ticket: int = 9_998
    event: int = 9_997
    finish: int = 9_996
    api_key: str = "k999-test"


UNKNOWN = Ids()
NUMBERED = {"token": 7_000, "event": 7_100, "finish": 7_200}  # so that no number of theirs is any other number, too


def one_of_everything(h: Harness, client: Client, word: str) -> Ids:
    """Made by a client in its space, with names that begin with a word."""
    run = client.ask(wire.RunsJoin(name=f"{word}-run")).run
    named = {noun: f"{word}-{noun}" for noun in ("key", "queue", "pool", "limit", "budget", "timer", "barrier")}
    queue, pool = named["queue"], named["pool"]
    key = client.ask(wire.OnceAcquire(run=run, key=named["key"]))
    slots = client.ask(wire.SlotsAcquire(run=run, pool=pool, max=1))
    client.ask(wire.QueuesSend(run=run, queue=queue, key="1", input=f'"{word}-input"', attempts=3))
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue=queue),))
    (job,) = client.ask(admit).jobs
    client.ask(wire.LimitsTake(run=run, limit=named["limit"], max=5, per_seconds=60))
    client.ask(wire.TimersSleep(run=run, name=named["timer"], after_ms=0))
    client.ask(wire.BarriersDeclare(run=run, name=named["barrier"], count=2))
    money = client.ask(wire.BudgetsReserve(run=run, budget=named["budget"], amount_minor=40, limit_minor=100))
    group = client.ask(wire.GroupsSubmit(run=run, queue=queue, members=(wire.NewJob(key="2", input="1"),))).run
    (member,) = client.ask(admit).jobs
    client.ask(wire.QueuesComplete(job=member.job, token=member.token, result="1"))
    waits = client.waits(wire.SlotsAcquire(run=run, pool=pool))
    return Ids(
        run=run,
        group=group,
        token=key.token,
        slots=slots.token,
        job=job.job,
        delivery=job.token,
        reservation=money.reservation,
        call=waits.id,
        ticket=waits.ticket,
        event=h.value("SELECT max(event) FROM events"),
        finish=h.value("SELECT max(finish) FROM jobs"),
        api_key=client.access.key,
        **named,
    )


class World:
    """Two spaces with one of everything in each: that of ``x``, who has a key, and that of ``a``."""

    def __init__(self) -> None:
        self.h = h = Harness()
        self.x = h.session("x", access=Access(space="other", key="k1"))
        self.own = one_of_everything(h, self.x, "own")
        before = self.rows()
        h.spaces.numbers.last.update(NUMBERED)
        self.a = h.session("a", access=Access(key="k2"))
        self.a._next, h._tickets = 7_300, 7_400
        self.theirs = one_of_everything(h, self.a, "their")
        self.rows_of_theirs = self.rows() - before
        self.state_of_theirs = self.memory()

    def rows(self) -> set[tuple[str, str]]:
        """All that is in the database, but for the daemon's own counters."""
        tables = {name for (name,) in self.h.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return {(name, repr(row)) for name in tables - {"counters"} for row in self.h.rows(f"SELECT * FROM {name}")}

    def memory(self) -> Any:
        """The calls and holds of the session ``a``, and what it was told."""
        calls = [(call.key, call.place, call.lines, call.away) for call in self.h.core().lines.of_session("a")]
        holds = [(lease.token, lease.expires) for lease in self.h.core().holds.of_session("a")]
        return calls, holds, list(self.a.pushes), [list(request.replies) for request in self.a.open.values()]

    def send(self, request: wire.Request[Any]) -> Any:
        """What ``x`` gets for a request."""
        x = self.x
        if isinstance(request, wire.Hello):
            return x.hello(request.runs).ended
        if isinstance(request, wire.Bye):
            return x.bye()
        if isinstance(request, wire.Ack):
            return self.h.run(Acked("x", request.calls))
        if isinstance(request, wire.Cancel):
            return self.h.run(Cancelled("x", request.call))
        if isinstance(request, wire.Nested):
            return self.h.run(Nested("x", request))
        if isinstance(request, wire.Beat):
            return x.beat(*request.tokens)
        return x.submit(request).reply

    def tried(self, make: Make, ids: Ids) -> tuple[Any, str]:
        """What ``x`` gets for a request; and that with all else that it sees, without the ids that were tried. Nothing
        of the other space has changed, and nothing of it shows."""
        told = len(self.x.pushes)
        got = self.send(make(ids))
        rows = self.rows()
        assert self.rows_of_theirs <= rows, "something of theirs is gone or has changed"
        assert self.memory() == self.state_of_theirs
        calls = [(call.rank, call.lines, call.signals) for call in self.h.core("other").lines.of_session("x")]
        pushes = [getattr(push, "behind", push) for push in self.x.pushes[told:]]
        seen = without(repr((got, pushes, calls)), ids)
        written = without(repr(rows - self.rows_of_theirs), ids)
        assert "their-" not in seen + written
        for each in (self.theirs.run, self.theirs.group, self.theirs.job, self.theirs.reservation):
            assert each not in re.findall(r"[\w-]+", seen + written)
        return got, seen


def without(text: str, ids: Ids) -> str:
    """The text with names of fields instead of these ids, and without secrets."""
    for name, value in asdict(ids).items():
        text = re.sub(rf"(?<![\w-]){re.escape(str(value))}(?![\w-])", f"<{name}>", text)
    return re.sub(r"(?<=secret=')[0-9a-f]{16}|(?<=')rsk_[\w-]+", "<random>", text)


def is_refused(got: Any) -> bool:
    """Also: told that the hold is gone, or that the run is not known any more."""
    if isinstance(got, wire.Released):
        return not got.held
    if isinstance(got, list):  # of a beat
        return False in got
    if isinstance(got, tuple):  # of a hello
        return bool(got)
    return isinstance(got, wire.Error)


def needs_of(t: Ids) -> wire.Needs:
    return wire.Needs(
        slots=(wire.UnitsNeeded(name=t.pool),),
        limits=(wire.UnitsNeeded(name=t.limit),),
        budgets=(wire.MoneyNeeded(name=t.budget, reserve_minor=5),),
    )


Make = Callable[[Ids], wire.Request[Any]]

# Every message that a client can send, with all that it can name.
TABLE: tuple[Make, ...] = (
    lambda t: wire.Hello(protocol=1, protocol_min=1, session="x", worker="w", runs=(t.run,)),
    lambda t: wire.Bye(),
    lambda t: wire.Ack(calls=(t.call,)),
    lambda t: wire.Cancel(call=t.call),
    lambda t: wire.Nested(call=t.call, within=(t.token,), inherited=(t.slots,)),
    lambda t: wire.Beat(tokens=(t.token, t.slots, t.delivery)),
    lambda t: wire.Release(token=t.token),
    lambda t: wire.Release(token=t.slots),
    lambda t: wire.Release(token=t.delivery),
    lambda t: wire.Renew(token=t.token, lease_ms=60_000),
    lambda t: wire.Renew(token=t.slots, lease_ms=60_000),
    lambda t: wire.Renew(token=t.delivery, lease_ms=60_000),
    lambda t: wire.RunsJoin(name=t.run),
    lambda t: wire.RunsChild(parent=t.run),
    lambda t: wire.RunsEnd(run=t.run, state="stopped"),
    lambda t: wire.RunsEnd(run=t.group, state="finished"),
    lambda t: wire.RunsGet(run=t.run),
    lambda t: wire.RunsStatus(run=t.run),
    lambda t: wire.OnceAcquire(run=t.run, key=t.key, within=(t.slots,), inherited=(t.delivery,)),
    lambda t: wire.OnceGet(run=t.run, key=t.key, within=(t.slots,)),
    lambda t: wire.OnceComplete(run=t.run, key=t.key, token=t.token, result="1"),
    lambda t: wire.OnceFail(run=t.run, key=t.key, token=t.token, error="E"),
    lambda t: wire.QueuesDeclare(queue=t.queue),
    lambda t: wire.QueuesDeclare(queue="new", attempts=3, needs=needs_of(t)),
    lambda t: wire.QueuesSend(run=t.run, queue=t.queue, key="1", input="1"),
    lambda t: wire.QueuesSend(run=t.run, queue=t.queue, key="new", input="1", needs=needs_of(t)),
    lambda t: wire.QueuesSendMany(run=t.run, queue=t.queue, members=(wire.NewJob(key="1", input="1"),)),
    lambda t: wire.QueuesSendMany(
        run=t.run, queue=t.queue, members=(wire.NewJob(key="new", input="1"),), needs=needs_of(t)
    ),
    lambda t: wire.QueuesResult(job=t.job, within=(t.token,)),
    lambda t: wire.QueuesAdmit(queues=(wire.AdmitFrom(run=t.run, queue=t.queue),)),
    lambda t: wire.QueuesStarted(tokens=(t.token, t.slots, t.delivery)),
    lambda t: wire.QueuesComplete(job=t.job, token=t.delivery, result="1", costs={t.reservation: 5}),
    lambda t: wire.QueuesFail(job=t.job, token=t.delivery, error="E"),
    lambda t: wire.LimitsDeclare(limit=t.limit),
    lambda t: wire.LimitsGet(limit=t.limit),
    lambda t: wire.LimitsTake(run=t.run, limit=t.limit, units=5, within=(t.token,)),
    lambda t: wire.SlotsDeclare(pool=t.pool),
    lambda t: wire.SlotsGet(pool=t.pool),
    lambda t: wire.SlotsAcquire(run=t.run, pool=t.pool, within=(t.token,), inherited=(t.delivery,)),
    lambda t: wire.SlotsAcquire(run=t.run, pool=t.pool, again=True, ticket=t.ticket),
    lambda t: wire.BudgetsDeclare(budget=t.budget),
    lambda t: wire.BudgetsGet(budget=t.budget, reservations=9),
    lambda t: wire.BudgetsReserve(run=t.run, budget=t.budget, amount_minor=1),
    lambda t: wire.BudgetsSettle(reservation=t.reservation, cost_minor=1, work_key="w"),
    lambda t: wire.BudgetsRelease(reservation=t.reservation),
    lambda t: wire.GroupsSubmit(run=t.run, queue=t.queue),
    lambda t: wire.GroupsSubmit(
        run=t.run, queue=t.queue, members=(wire.NewJob(key="3", input="1"),), needs=needs_of(t)
    ),
    lambda t: wire.GroupsEnded(run=t.group, after=t.finish),
    lambda t: wire.TimersSleep(run=t.run, name=t.timer, after_ms=60_000),
    lambda t: wire.TimersAck(run=t.run, name=t.timer),
    lambda t: wire.BarriersDeclare(run=t.run, name=t.barrier, count=2),
    lambda t: wire.BarriersGet(run=t.run, name=t.barrier),
    lambda t: wire.BarriersArrive(run=t.run, name=t.barrier, count=2, worker="w"),
    lambda t: wire.EventsRead(run=t.run, after=t.event),
    lambda t: wire.EventsWait(run=t.run, after=t.event),
    lambda t: wire.StatusGet(),
    lambda t: wire.KeysCreate(permissions=("work",)),
    lambda t: wire.KeysList(),
    lambda t: wire.KeysRevoke(key=t.api_key),
)
# What is not refused, because it would not be refused with an id that does not exist either:
# a name that may be new, then something of that name is made in the own space;
NEW = {(wire.OnceAcquire, "key"), (wire.OnceGet, "key"), (wire.TimersSleep, "timer")}
NEW |= {(wire.BarriersDeclare, "barrier"), (wire.BarriersArrive, "barrier")}
# a queue that a worker waits for;
NEW |= {(wire.QueuesAdmit, "queue")}
# numbers: the calls of the own session, a place in a line or in a stream, holds around the call, and what a job did
# not reserve.
NUMBERS = {(wire.Ack, "call"), (wire.Cancel, "call"), (wire.SlotsAcquire, "ticket"), (wire.GroupsEnded, "finish")}
NUMBERS |= {
    (wire.Nested, "call"),
    (wire.EventsRead, "event"),
    (wire.EventsWait, "event"),
    (wire.QueuesComplete, "reservation"),
}
NUMBERS |= {
    (kind, token)
    for kind in (
        wire.QueuesStarted,
        wire.Nested,
        wire.OnceAcquire,
        wire.OnceGet,
        wire.QueuesResult,
        wire.LimitsTake,
        wire.SlotsAcquire,
    )
    for token in ("token", "slots", "delivery")
}


def test_every_message_of_the_wire_is_tried() -> None:
    kinds = {kind.cls for kind in msgspec.inspect.type_info(wire.AnyRequest).types}  # type: ignore[attr-defined]
    assert {type(make(UNKNOWN)) for make in TABLE} == kinds
    named = {field.name for field in fields(Ids) if any(make(UNKNOWN) != make(tried(field.name)) for make in TABLE)}
    assert named == {field.name for field in fields(Ids)}


def tried(field: str) -> Ids:
    return replace(UNKNOWN, **{field: "x" if isinstance(getattr(UNKNOWN, field), str) else 1})


@pytest.mark.parametrize("make", TABLE, ids=[type(make(UNKNOWN)).__name__ for make in TABLE])
def test_an_id_of_another_space_is_one_that_does_not_exist(make: Make) -> None:
    world, kind = World(), type(make(UNKNOWN))
    for field in [field.name for field in fields(Ids) if make(UNKNOWN) != make(tried(field.name))]:
        got, unknown = world.tried(make, replace(world.own, **{field: getattr(UNKNOWN, field)}))
        assert is_refused(got) != ((kind, field) in NEW | NUMBERS), f"{field}: {got}"
        if not is_refused(got):
            world = World()
        got, theirs = world.tried(make, replace(world.own, **{field: getattr(world.theirs, field)}))
        if field != "event":  # a cursor names no event: one beyond all of them is a gap, in whichever space they are
            assert theirs == unknown, field
        if not is_refused(got):
            world = World()
    world.tried(make, world.theirs)
    world = World()
    got, _ = world.tried(make, world.own)
    assert not is_refused(got) or kind in (wire.KeysCreate, wire.KeysList, wire.KeysRevoke), "what is tried works"
    world.h.check()


# ---------------------------------------------------------------------------------------------------- permissions

CREATES: tuple[Callable[[str], wire.Request[Any]], ...] = (
    lambda run: wire.QueuesDeclare(queue="new", attempts=3),
    lambda run: wire.QueuesSend(run=run, queue="new", key="1", input="1", attempts=3),
    lambda run: wire.LimitsDeclare(limit="new", max=1, per_seconds=1),
    lambda run: wire.LimitsTake(run=run, limit="new", max=1, per_seconds=1),
    lambda run: wire.SlotsDeclare(pool="new", max=1),
    lambda run: wire.SlotsAcquire(run=run, pool="new", max=1),
    lambda run: wire.BudgetsDeclare(budget="new", limit_minor=5),
    lambda run: wire.BudgetsReserve(run=run, budget="new", amount_minor=1, limit_minor=5),
)


def keyed(h: Harness, *permissions: str) -> Client:
    return h.session("-".join(("key", *permissions)), access=Access(permissions=frozenset(permissions), key="k1"))


@pytest.mark.parametrize("make", CREATES)
def test_to_create_a_resource_a_key_needs_resource_config(h: Harness, make: Callable[[str], wire.Request[Any]]) -> None:
    run = h.session("a").ask(wire.RunsJoin(name="job")).run
    worker, admin = keyed(h, "work"), keyed(h, "work", "resource_config")
    refusal = worker.refused("FORBIDDEN", make(run))
    assert "resource_config" in refusal.message
    assert "new" in refusal.message
    assert not isinstance(admin.ask(make(run)), wire.Error)
    worker.submit(make(run))  # it exists: looked up and verified by anybody
    assert not [event for event in h.events(run) if "forbidden" in event]


@pytest.mark.parametrize("kind", [kind for kind in dispatch.VERBS if kind.permission])  # type: ignore[attr-defined]
def test_a_verb_says_which_permission_it_needs(kind: type) -> None:
    world = World()
    others = frozenset(wire.PERMISSIONS) - {kind.permission}  # type: ignore[attr-defined]
    client = world.h.session("k", access=Access(permissions=others, key="k2"))
    request = next(make for make in TABLE if type(make(UNKNOWN)) is kind)(world.theirs)
    before = world.rows()
    assert kind.permission in client.refused("FORBIDDEN", request).message  # type: ignore[attr-defined]
    assert world.rows() == before


def test_a_key_without_work_joins_a_run_that_is_there_and_makes_none(h: Harness) -> None:
    run = h.session("a").ask(wire.RunsJoin(name="job")).run
    looker = keyed(h, "usage")
    assert looker.ask(wire.RunsJoin(name="job")).run == run
    assert "work" in looker.refused("FORBIDDEN", wire.RunsJoin(name="new")).message
    assert looker.ask(wire.RunsStatus(run=run)).run.run == run
