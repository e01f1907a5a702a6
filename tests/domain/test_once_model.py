"""Once and leases against a plain model: sessions come and go, time passes, requests are repeated and cancelled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runstate import wire
from runstated.host.clock import ASLEEP_MS
from tests.harness import Client, Harness, Request

NAMES = ("a", "b", "c", "d")
KEYS = ("x", "y", "z")
LENGTHS = (5_000, 12_000, 30_000)
ATTEMPTS = 3


@dataclass
class Held:
    client: str
    run: str
    key: str
    expires: int
    length: int
    request: int


@dataclass
class Key:
    state: str = "open"
    failures: int = 0
    token: int | None = None
    answer: Any = None


@dataclass(eq=False)
class Wait:
    request: Request
    key: str
    place: tuple[int, int]
    until: int | None
    within: tuple[int, ...]


@dataclass
class Model:
    """What should be, in the plainest words."""

    keys: dict[str, Key] = field(default_factory=lambda: {key: Key() for key in KEYS})
    holds: dict[int, Held] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    away: set[str] = field(default_factory=set)

    def leads_to(self, token: int, mine: tuple[int, ...], seen: frozenset[int] = frozenset()) -> bool:
        """Whether the end of a hold waits for one of mine."""
        if token in mine:
            return True
        inside = [wait for wait in self.waits if token in wait.within]
        holders = {self.keys[wait.key].token for wait in inside} - seen
        return any(self.leads_to(holder, mine, seen | {token}) for holder in holders if holder is not None)


class OnceMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.h = Harness()
        self.model = Model()
        self.requests: list[Request] = []
        self.number = 0
        self.results: dict[tuple[str, str], str] = {}
        self.run_id = ""
        self.keeper = self.h.session("keeper")
        self.new_run()
        for name in NAMES:
            self.h.session(name)

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.close()

    def new_run(self) -> None:
        self.number += 1
        self.run_id = self.keeper.ask(wire.RunsJoin(name=f"n{self.number}")).run

    # ------------------------------------------------------------------ expectations

    def now(self) -> int:
        return self.h.clock.lease_ms()

    def granted(self, request: Request, key: str, length: int) -> None:
        state = self.model.keys[key]
        reply = request.reply
        assert isinstance(reply, wire.OnceGranted), (reply, key)
        assert reply.attempt == state.failures + 1
        assert state.state == "open"
        state.state, state.token = "held", reply.token
        self.model.holds[reply.token] = Held(
            request.client.name, self.run_id, key, self.now() + length, length, request.id
        )

    def serve(self, key: str) -> None:
        """The key is open: the first in line that is there has got it."""
        there = [
            wait for wait in self.model.waits if wait.key == key and wait.request.client.name not in self.model.away
        ]
        if self.model.keys[key].state == "open" and there:
            first = min(there, key=lambda wait: wait.place)
            self.model.waits.remove(first)
            asked = first.request.request
            assert isinstance(asked, wire.OnceAcquire)
            self.granted(first.request, key, asked.lease_ms)

    def settle(self, key: str, state: str, answer: Any) -> None:
        self.model.keys[key].state, self.model.keys[key].answer = state, answer
        for wait in [wait for wait in self.model.waits if wait.key == key]:
            assert wait.request.replies == [answer]
            self.model.waits.remove(wait)

    def let_go(self, token: int) -> str | None:
        """A hold has ended without an outcome; the key that is open now."""
        held = self.model.holds.pop(token)
        if held.run != self.run_id:
            return None
        self.model.keys[held.key].state = "open"
        return held.key

    def due(self) -> None:
        """Everything that has become due by now: first all leases, then all waits, then the lines."""
        now = self.now()
        lapsed = [token for token, held in self.model.holds.items() if held.expires <= now]
        opened = [self.let_go(token) for token in lapsed]
        for wait in [wait for wait in self.model.waits if wait.until is not None and wait.until <= now]:
            failures = self.model.keys[wait.key].failures
            assert wait.request.replies == [wire.OnceHeld(attempts=failures)]
            self.model.waits.remove(wait)
        for key in opened:
            if key is not None:
                self.serve(key)

    def asked(self, request: Request) -> None:
        """A request has been run: what should have come of it?"""
        asked = request.request
        assert isinstance(asked, wire.OnceAcquire)
        state = self.model.keys[asked.key]
        self.requests.append(request)
        if asked.run != self.run_id:
            assert request.reply.code == "SCOPE_CANCELLED"
        elif state.state in ("done", "failed"):
            assert request.reply == state.answer
        elif state.state == "open":
            self.granted(request, asked.key, asked.lease_ms)
        elif asked.wait_ms == 0:
            assert request.reply == wire.OnceHeld(attempts=state.failures)
        elif asked.within and self.model.leads_to(state.token or 0, asked.within):
            assert request.reply.code == "DEADLOCK"
        else:
            assert request.reply is None, request.reply
            rank = 0 if any(token in self.model.holds for token in asked.within) else 1
            until = None if asked.wait_ms is None else self.now() + asked.wait_ms
            self.model.waits.append(Wait(request, asked.key, (rank, request.ticket), until, asked.within))

    def here(self, name: str) -> Client | None:
        return self.h.clients[name] if name not in self.model.away else None

    # ------------------------------------------------------------------ rules

    @rule(
        name=st.sampled_from(NAMES),
        key=st.sampled_from(KEYS),
        wait_ms=st.sampled_from((None, None, 0, 3_000, 20_000)),
        lease_ms=st.sampled_from(LENGTHS),
        inside=st.booleans(),
    )
    def acquire(self, name: str, key: str, wait_ms: int | None, lease_ms: int, inside: bool) -> None:
        client = self.here(name)
        if client is None:
            return
        mine = tuple(token for token, held in self.model.holds.items() if held.client == name) if inside else ()
        self.asked(
            client.submit(wire.OnceAcquire(run=self.run_id, key=key, wait_ms=wait_ms, lease_ms=lease_ms, within=mine))
        )

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data(), how=st.sampled_from(("complete", "complete", "fail", "release")))
    def end(self, data: st.DataObject, how: str) -> None:
        token = data.draw(st.sampled_from(sorted(self.model.holds)))
        held = self.model.holds[token]
        client = self.here(held.client)
        if client is None:
            return
        over = held.run != self.run_id
        if how == "release":
            assert client.ask(wire.Release(token=token)).held
            key = self.let_go(token)
            if key is not None:
                self.serve(key)
        elif how == "complete":
            reply = client.ask(wire.OnceComplete(run=held.run, key=held.key, token=token, result=str(token)))
            del self.model.holds[token]
            if over:
                assert reply.code == "SCOPE_CANCELLED"
                return
            assert reply == wire.OnceDone(result=str(token))
            assert self.results.setdefault((held.run, held.key), str(token)) == str(token), "a second outcome"
            self.settle(held.key, "done", reply)
        else:
            fail = wire.OnceFail(run=held.run, key=held.key, token=token, error="E", attempts=ATTEMPTS)
            failed = client.submit(fail)
            del self.model.holds[token]
            if over:
                assert failed.reply.code == "SCOPE_CANCELLED"
                return
            state = self.model.keys[held.key]
            state.failures += 1
            last = state.failures == ATTEMPTS
            assert failed.reply == wire.OnceFailCounted(attempts=state.failures, failed=last)
            if last:
                self.settle(held.key, "failed", wire.OnceFailed(attempts=ATTEMPTS, error="E"))
            else:
                state.state = "open"
                self.serve(held.key)
            assert failed.repeat().reply == failed.reply

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(KEYS), token=st.integers(1, 30), fails=st.booleans())
    def end_with_a_dead_token(self, name: str, key: str, token: int, fails: bool) -> None:
        client = self.here(name)
        if client is None or token in self.model.holds:
            return
        state = self.model.keys[key]
        if fails:
            client.refused("LEASE_LOST", wire.OnceFail(run=self.run_id, key=key, token=token, error="E"))
        elif state.state == "done" and state.answer.result == str(token):
            late = wire.OnceComplete(run=self.run_id, key=key, token=token, result="other")
            assert client.ask(late) == state.answer
        else:
            client.refused("LEASE_LOST", wire.OnceComplete(run=self.run_id, key=key, token=token, result="other"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests[-8:]))
        client = self.here(request.client.name)
        if client is None or client.open.get(request.id) is not request:
            return
        self.requests.remove(request)
        for wait in self.model.waits:
            if wait.request is request:
                wait.request = request.repeat()
                assert wait.request.reply is None
                self.requests.append(wait.request)
                return
        again = request.repeat()
        kept = request.reply
        if isinstance(kept, wire.OnceGranted) and kept.token in self.model.holds:
            assert again.reply == kept
            self.requests.append(again)
        else:
            self.asked(again)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests[-8:]))
        client = self.here(request.client.name)
        if client is None or client.open.get(request.id) is not request:
            return
        request.cancel()
        self.requests.remove(request)
        self.model.waits = [wait for wait in self.model.waits if wait.request is not request]
        granted = [
            token
            for token, held in self.model.holds.items()
            if (held.client, held.request) == (client.name, request.id)
        ]
        for token in granted:
            key = self.let_go(token)
            if key is not None:
                self.serve(key)

    @rule(name=st.sampled_from(NAMES), part=st.integers(0, 3))
    def beat(self, name: str, part: int) -> None:
        client = self.here(name)
        if client is None:
            return
        tokens = [token for token, held in self.model.holds.items() if held.client == name][part:]
        assert client.beat(*tokens) == [True] * len(tokens)
        for token in tokens:
            self.model.holds[token].expires = self.now() + self.model.holds[token].length

    @rule(ms=st.sampled_from((1, 2_999, 3_000, 5_000, 12_000, 31_000)))
    def time_passes(self, ms: int) -> None:
        end = self.now() + ms
        while True:
            times = [held.expires for held in self.model.holds.values()]
            times += [wait.until for wait in self.model.waits if wait.until is not None]
            step = min([end, *(at for at in times if at > self.now())])
            self.h.pass_ms(step - self.now())
            self.due()
            if step == end:
                return

    @rule(ms=st.sampled_from((100, 5_000, 60_000)))
    def daemon_stalls(self, ms: int) -> None:
        self.h.stall(ms)
        if ms > ASLEEP_MS:  # then there is time for a beat, whatever was left before
            for held in self.model.holds.values():
                held.expires = max(held.expires, self.now() + held.length // 2)
        self.due()

    @rule()
    def machine_sleeps(self) -> None:
        self.h.suspend(3_600_000)

    @rule(name=st.sampled_from(NAMES))
    def connection_is_lost(self, name: str) -> None:
        if self.here(name) is not None:
            self.h.clients[name].lose()
            self.model.away.add(name)

    @rule(name=st.sampled_from(NAMES))
    def connection_is_back(self, name: str) -> None:
        if self.here(name) is None:
            self.model.away.discard(name)
            self.h.clients[name].resume()
            for key in KEYS:
                self.serve(key)

    @rule(name=st.sampled_from(NAMES), bye=st.booleans())
    def session_ends(self, name: str, bye: bool) -> None:
        client = self.h.clients[name]
        self.model.waits = [wait for wait in self.model.waits if wait.request.client is not client]
        self.requests = [request for request in self.requests if request.client is not client]
        client.bye() if bye else client.die()
        self.model.away.discard(name)
        opened = [self.let_go(token) for token, held in list(self.model.holds.items()) if held.client == name]
        for key in opened:
            if key is not None:
                self.serve(key)
        self.h.session(name)

    @rule()
    def run_ends(self) -> None:
        self.keeper.ask(wire.RunsEnd(run=self.run_id, state="finished"))
        for wait in self.model.waits:
            assert wait.request.reply.code == "SCOPE_CANCELLED"
        self.model.waits.clear()
        self.model.keys = {key: Key() for key in KEYS}
        self.new_run()

    # ------------------------------------------------------------------ what is always so

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.check()
        rows = self.h.rows("SELECT key, state, failures FROM once_keys WHERE run = :run", run=self.run_id)
        found = {key: (state, failures) for key, state, failures in rows}
        for key, state in self.model.keys.items():
            on_disk = "open" if state.state == "held" else state.state  # a lease says the rest
            assert found.get(key, ("open", 0)) == (on_disk, state.failures)
        woke = self.h.clock.woke_ms()  # the next tick spares the leases for it, before any of them lapses
        live = self.h.core().holds.of_token.values()
        leases = {lease.token: max(lease.expires, woke + lease.length_ms // 2) for lease in live}
        assert leases == {token: held.expires for token, held in self.model.holds.items()}
        assert set(self.h.core().lines.calls) == {
            (wait.request.client.name, wait.request.id) for wait in self.model.waits
        }
        assert all(not wait.request.replies for wait in self.model.waits)


OnceMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestOnce = OnceMachine.TestCase
