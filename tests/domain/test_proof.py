"""Whoever ends, settles or renews a hold proves that it was given to them: numbers are small, and shown to everyone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from runstate import wire
from runstated.engine.entries import Nested
from tests.harness import Client, Harness

WRONG = "0123456789abcdef"


@dataclass(frozen=True)
class Held:
    """What the session ``a`` holds, each as its grant: a key, a job with a reservation, slots, an amount."""

    run: str
    key: wire.OnceGranted
    job: wire.JobGrant
    slots: wire.SlotsGranted
    money: wire.BudgetReserved

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.key.secret, self.job.secret, self.slots.secret, self.money.secret)


@pytest.fixture
def a(h: Harness) -> Client:
    return h.session("a")


@pytest.fixture
def b(h: Harness) -> Client:
    return h.session("b")


@pytest.fixture
def held(a: Client) -> Held:
    run = a.ask(wire.RunsJoin(name="job")).run
    key = a.ask(wire.OnceAcquire(run=run, key="k"))
    slots = a.ask(wire.SlotsAcquire(run=run, pool="gpu", max=1))
    money = a.ask(wire.BudgetsReserve(run=run, budget="llm", amount_minor=40, limit_minor=100))
    needs = wire.Needs(budgets=(wire.MoneyNeeded(name="llm", reserve_minor=10),))
    a.ask(wire.QueuesSend(run=run, queue="q", key="1", input="1", attempts=3, needs=needs))
    (job,) = a.ask(wire.QueuesAdmit(queues=(wire.AdmitFrom(run=run, queue="q"),))).jobs
    return Held(run, key, job, slots, money)


# Each verb that names a hold: the request with the secret of what it names, for each kind of what it may name.
PROVED: tuple[Callable[[Held], wire.Request[Any]], ...] = (
    lambda held: wire.Release(token=held.key.token, secret=held.key.secret),
    lambda held: wire.Release(token=held.job.token, secret=held.job.secret),
    lambda held: wire.Release(token=held.slots.token, secret=held.slots.secret),
    lambda held: wire.Release(token=held.money.token, secret=held.money.secret),
    lambda held: wire.Renew(token=held.key.token, secret=held.key.secret, lease_ms=600_000),
    lambda held: wire.Renew(token=held.job.token, secret=held.job.secret, lease_ms=600_000),
    lambda held: wire.Renew(token=held.slots.token, secret=held.slots.secret, lease_ms=600_000),
    lambda held: wire.OnceComplete(run=held.run, key="k", token=held.key.token, secret=held.key.secret, result="1"),
    lambda held: wire.OnceFail(run=held.run, key="k", token=held.key.token, secret=held.key.secret, error="E"),
    lambda held: wire.QueuesComplete(job=held.job.job, token=held.job.token, secret=held.job.secret, result="1"),
    lambda held: wire.QueuesFail(job=held.job.job, token=held.job.token, secret=held.job.secret, error="E"),
    lambda held: wire.BudgetsSettle(
        reservation=held.money.reservation, secret=held.money.secret, cost_minor=5, work_key="w"
    ),
    lambda held: wire.BudgetsSettle(
        reservation=held.job.reservations[0], secret=held.job.secret, cost_minor=5, work_key="w"
    ),
    lambda held: wire.BudgetsRelease(reservation=held.money.reservation, secret=held.money.secret),
    lambda held: wire.BudgetsRelease(reservation=held.job.reservations[0], secret=held.job.secret),
)
OF_THE_SESSION_ONLY = {wire.Beat, wire.QueuesStarted}  # no secret helps: see the tests of these two


def state(h: Harness) -> list[Any]:
    tables = ("leases", "once_keys", "jobs", "reservations", "budgets", "ledger", "events")
    memory = sorted((lease.token, lease.expires, lease.length_ms) for lease in h.core().holds.of_token.values())
    return [memory, *(h.rows(f"SELECT * FROM {table}") for table in tables)]


def is_refused(reply: Any) -> bool:
    if isinstance(reply, wire.Released):
        return not reply.held
    return isinstance(reply, wire.Error) and reply.code in ("LEASE_LOST", "NOT_FOUND")


def test_every_verb_that_names_a_hold_is_here(held: Held) -> None:
    naming = {
        kind.cls
        for kind in msgspec.inspect.type_info(wire.AnyRequest).types  # type: ignore[attr-defined]
        if {"token", "tokens", "reservation", "secret"} & {field.name for field in kind.fields}
    }
    assert naming == {type(make(held)) for make in PROVED} | OF_THE_SESSION_ONLY


@pytest.mark.parametrize("make", PROVED)
def test_a_hold_is_ended_by_its_session_or_with_its_secret(
    h: Harness, a: Client, b: Client, held: Held, make: Callable[[Held], wire.Request[Any]]
) -> None:
    request, before = make(held), state(h)
    assert is_refused(b.ask(msgspec.structs.replace(request, secret="")))
    assert is_refused(b.ask(msgspec.structs.replace(request, secret=WRONG)))
    assert is_refused(a.ask(msgspec.structs.replace(request, secret=WRONG))), (
        "a secret that is shown must be the right one"
    )
    for other in set(held.secrets) - {request.secret}:  # type: ignore[attr-defined]
        assert is_refused(b.ask(msgspec.structs.replace(request, secret=other)))
    assert is_refused(h.session("c", space="other").ask(request)), "nor does it help in another space"
    assert state(h) == before
    assert not is_refused(b.ask(request)), "to show it is enough"
    assert state(h) != before


@pytest.mark.parametrize("make", PROVED)
def test_the_session_that_holds_needs_no_secret(
    a: Client, held: Held, make: Callable[[Held], wire.Request[Any]]
) -> None:
    assert not is_refused(a.ask(msgspec.structs.replace(make(held), secret="")))


def test_a_session_that_tries_all_small_numbers_ends_nobodys_hold(h: Harness, a: Client, b: Client, held: Held) -> None:
    before = state(h)
    for make in PROVED:
        request = msgspec.structs.replace(make(held), secret="")
        for number in range(1, 60):
            guess = {"token": number} if hasattr(request, "token") else {"reservation": f"b{number}-test"}
            assert is_refused(b.ask(msgspec.structs.replace(request, **guess)))
    assert not any(b.beat(*range(1, 60)))
    assert state(h) == before
    assert all(a.beat(*(grant.token for grant in (held.key, held.job, held.slots, held.money))))


def test_a_beat_renews_what_its_session_holds(h: Harness, a: Client, b: Client, held: Held) -> None:
    assert (b.beat(held.key.token), a.beat(held.key.token)) == ([False], [True])


def test_a_job_that_was_taken_ahead_is_begun_by_its_session(h: Harness, a: Client, b: Client, held: Held) -> None:
    for key in "23":
        a.ask(wire.QueuesSend(run=held.run, queue="plain", key=key, input="1", attempts=3))
    admit = wire.QueuesAdmit(queues=(wire.AdmitFrom(run=held.run, queue="plain", ahead=1),))
    jobs = {job.ahead: job for job in a.ask(admit).jobs}
    begin, before = wire.QueuesStarted(tokens=(jobs[True].token,)), state(h)
    assert b.ask(begin) == h.session("c", space="other").ask(begin) == wire.Ok()
    assert state(h) == before
    a.ask(begin)
    assert state(h) != before


def test_the_session_is_the_same_after_it_came_back_and_after_a_restart(h: Harness, a: Client, held: Held) -> None:
    a.lose()
    a.resume()
    a.ask(wire.Renew(token=held.key.token, lease_ms=60_000))
    h.start()
    a.resume()
    assert a.ask(wire.Release(token=held.slots.token)).held
    assert a.ask(wire.OnceComplete(run=held.run, key="k", token=held.key.token, result="1")) == wire.OnceDone(
        result="1"
    )
    assert a.ask(wire.BudgetsSettle(reservation=held.money.reservation, cost_minor=5, work_key="w")).charged_minor == 5


def test_a_reservation_that_was_released_is_settled_late_by_whoever_it_was_given_to(
    h: Harness, a: Client, b: Client, held: Held
) -> None:
    a.ask(wire.QueuesComplete(job=held.job.job, token=held.job.token, result="1", keep_reserved=True))
    h.pass_ms(wire.SETTLE_BY_MS + 1)
    for reservation in (held.money.reservation, held.job.reservations[0]):
        late = wire.BudgetsSettle(reservation=reservation, cost_minor=5, work_key="w")
        b.refused("NOT_FOUND", late)
        assert a.ask(late).charged_minor == 5


def test_two_holds_have_different_secrets_and_no_list_shows_them(h: Harness, a: Client, b: Client, held: Held) -> None:
    assert len(set(held.secrets)) == 4
    assert all(len(secret) == 16 for secret in held.secrets)
    b.waits(wire.SlotsAcquire(run=held.run, pool="gpu"))
    b.waits(wire.OnceGet(run=held.run, key="k"))
    shown: list[Any] = [
        b.ask(request)
        for request in (
            wire.StatusGet(),
            wire.RunsStatus(run=held.run),
            wire.SlotsGet(pool="gpu"),
            wire.BudgetsGet(budget="llm", reservations=100),
            wire.EventsRead(run=held.run),
        )
    ]
    h.pass_ms(wire.SETTLE_BY_MS)  # all lapse
    shown += [*b.pushes, *(h.rows(f"SELECT * FROM {table}") for table in ("leases", "reservations", "events"))]
    assert not [secret for secret in held.secrets if secret in repr(shown)]


# ---------------------------------------------------------------------------------------------------- within


def test_to_name_the_holds_of_others_puts_nobody_first(h: Harness, a: Client, b: Client, held: Held) -> None:
    first = b.waits(wire.SlotsAcquire(run=held.run, pool="gpu"))
    pushy = [
        h.session(name).waits(wire.SlotsAcquire(run=held.run, pool="gpu", **{field: tuple(range(1, 60))}))
        for name, field in (("c", "within"), ("d", "inherited"))
    ]
    a.ask(wire.Release(token=held.slots.token))
    assert isinstance(first.reply, wire.SlotsGranted)
    assert [waits.reply for waits in pushy] == [None, None]


def test_to_name_the_holds_of_others_makes_no_circle(h: Harness, a: Client, b: Client, held: Held) -> None:
    theirs = b.ask(wire.OnceAcquire(run=held.run, key="other")).token
    h.session("c").waits(wire.OnceGet(run=held.run, key="k", within=(theirs,)))
    liar = h.session("d").waits(wire.OnceGet(run=held.run, key="k"))
    h.run(Nested("d", wire.Nested(call=liar.id, within=(theirs,))))
    a.waits(wire.OnceGet(run=held.run, key="other", within=(held.key.token,)))


def test_a_process_may_name_the_holds_of_all_its_sessions(h: Harness) -> None:
    """Clients of several configurations in one process: their holds nest as those of one do."""
    x, y = h.session("x", process="boot/ns/7/1"), h.session("y", process="boot/ns/7/1")
    run = x.ask(wire.RunsJoin(name="job")).run
    token = x.ask(wire.OnceAcquire(run=run, key="k")).token
    y.refused("DEADLOCK", wire.OnceAcquire(run=run, key="k", within=(token,)))
    z = h.session("z", process="boot/ns/8/1")
    z.waits(wire.OnceAcquire(run=run, key="k", within=(token,)))


def test_a_repeat_names_what_is_held_around_it_by_then(h: Harness, a: Client, held: Held) -> None:
    asked = a.submit(wire.OnceAcquire(run=held.run, key="new", within=(held.key.token, 999)))
    a.ask(wire.Release(token=held.key.token))
    assert asked.repeat(within=()).reply == asked.reply
