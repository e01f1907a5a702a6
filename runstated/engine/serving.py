"""Answers: a verb is run, what is missing is fetched, who has to wait is parked, and the lines that were woken are
served by age, up to the first that stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from runstate import wire
from runstated.domain import keys, limits, nouns, queues, replies
from runstated.domain.access import Access
from runstated.domain.answers import Caller, Listing, Missing, Parked, Refusal, TooMany
from runstated.domain.core import Core
from runstated.domain.leases import is_own
from runstated.domain.waits import EVENTS, WATCH, Call, CallKey, Topic
from runstated.engine import circles, faults, tickets

T = TypeVar("T")
Fetch = Callable[[Missing], Any]

BEHIND_MAX = 16
HOLD_UP_NOBODY = frozenset(("budget", EVENTS, WATCH))  # lines in which all are looked at when they are woken


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that a listing answers."""

    key: CallKey
    listing: Listing


class Server:
    """See the module."""

    def __init__(self, fetch: Fetch, is_live_key: Callable[[str], bool]) -> None:
        self._fetch = fetch
        self._is_live_key = is_live_key
        self.listings: list[Asked] = []  # answers that need many rows
        self.failed: Mapping[str, str] = {}  # what is not run, see faultlog.py

    # ------------------------------------------------------------------ verbs

    def guarded(self, core: Core, key: CallKey | None, work: Callable[[], object], *, step: str = "") -> None:
        """Runs ``work``; a refusal, or a fault that comes before any change, is the answer to ``key``. ``step``: what
        the daemon does by itself, and for what; one that has failed before is skipped. Raises Fault."""
        if step and f"step {step}" in self.failed:
            return
        noted, woken = core.noted, len(core.woken)
        try:
            work()
        except Exception as fault:
            if core.noted != noted:
                raise faults.Fault(f"step {step}" if step else _doing(core, key), fault) from fault
            del core.woken[woken:]
            if key is None:
                faults.reply(fault)  # said in the log
                return
            core.lines.leave(key)
            core.lines.replies.append(([key], faults.reply(fault)))
        finally:
            core.forget_supplied()

    def fetching(self, core: Core, work: Callable[[], T]) -> T:
        """Runs ``work`` again for each object that it misses; it has changed nothing until then."""
        while True:
            noted = core.noted
            try:
                return work()
            except Missing as missing:
                if core.noted != noted:
                    raise
                self._supply(core, missing)

    def _supply(self, core: Core, missing: Missing) -> None:
        for each in missing.each():
            core.supply(each, self._fetch(each))

    def answer_of(self, core: Core, request: wire.Request[Any]) -> nouns.Answer:
        """What the verb says. Raises its refusals, and Forbidden when the caller's key does not allow the verb."""
        kind = type(request)
        if self.failed and _doing(core, (core.caller.session, core.caller.request_id)) in self.failed:
            raise faults.FailedBefore(f"the daemon failed at this request before; see its log ({_tag(request)})")
        if not self._is_live_key(core.caller.access.key):
            raise keys.KeyRevoked(f"the key {core.caller.access.key} was revoked")
        if kind.permission:
            core.need(kind.permission, f"send {kind.__struct_config__.tag}")
        verb = nouns.VERBS[kind]
        try:
            return verb(core, request)
        except Missing as missing:
            self._supply(core, missing)
        return self.fetching(core, lambda: verb(core, request))

    def answer(
        self, core: Core, key: CallKey, request: wire.Request[Any], answer: wire.Reply | Refusal | Listing
    ) -> None:
        if isinstance(answer, Listing):
            self.listings.append(Asked(key, answer))
            return
        reply = answer.reply() if isinstance(answer, Refusal) else answer
        core.lines.replies.append(([key], reply))
        replies.keep(core, key, request, reply)

    # ------------------------------------------------------------------ waiting

    def park_new(
        self, core: Core, access: Access, request: wire.Request[Any], answer: Parked, until: int | None
    ) -> None:
        """The caller's call begins to wait. ``until``: on the lease clock."""
        assert isinstance(request, wire.WaitingRequest), "only a request that may wait is parked"
        caller = core.caller
        call = Call(
            session=caller.session,
            access=access,
            request_id=caller.request_id,
            request=request,
            rank=caller.rank,
            ticket=caller.ticket,
            since_ms=core.now_ms,
            until=until,
            late=answer.late,
            over=answer.over,
            lines=answer.lines,
            signals=answer.signals,
            aside=answer.aside,
            ages=answer.ages,
            stands=answer.stands,
            at=answer.at,
        )
        self._park(core, call)

    def _park(self, core: Core, call: Call) -> None:
        """The call waits from now on, or is refused. What its verb has changed stays."""
        lines = core.lines
        if call.until is not None and call.until <= core.lease_ms:
            self.late(core, call)
            return
        old = lines.calls.get(call.key)
        if old is None and lines.awaiting(call.session) >= wire.WAITING_MAX:
            told = f"{wire.WAITING_MAX} calls of this session wait already, which is the most that may"
            self._refuse(core, call.key, TooMany(told))
            return
        circle = circles.closed_by(core, call)
        if circle is not None:
            self._refuse(core, call.key, circles.Deadlock(circle))
            return
        if old is None or old.ages != call.ages:
            lines.suspects.update(dict.fromkeys(call.stands))
        lines.park(call)
        behind = tuple(lease.token for lease in core.holders(call)[:BEHIND_MAX])
        lines.pushes.append((call.session, tickets.parked(core.numbers, call, behind)))

    def _refuse(self, core: Core, key: CallKey, refusal: Refusal) -> None:
        core.lines.leave(key)
        core.lines.replies.append(([key], refusal.reply()))

    def late(self, core: Core, call: Call) -> None:
        """The time of its wait is over."""
        core.lines.leave(call.key)
        reply = call.late if isinstance(call.late, wire.Reply) else call.late(core)
        core.lines.replies.append(([call.key], reply))

    def inside(
        self, core: Core, session: str, request: wire.WaitingRequest[Any] | wire.Nested
    ) -> dict[str, tuple[int, ...]]:
        """The holds that a call is made in. To name those of others must neither put it before others nor make a circle
        with them."""
        return {
            name: tuple(token for token in getattr(request, name) if is_own(core, session, token))
            for name in ("within", "inherited")
        }

    def nest(self, core: Core, key: CallKey, nested: wire.Request[Any]) -> None:
        """A call that may be waiting is made inside of other holds from now on."""
        call = core.lines.calls.get(key)
        if call is not None and isinstance(nested, wire.WaitingRequest | wire.Nested):
            request = msgspec.structs.replace(call.request, **self.inside(core, key[0], nested))
            if request != call.request:
                self.guarded(core, key, lambda: self._park(core, replace(call, request=request)))

    # ------------------------------------------------------------------ lines

    def serve(self, core: Core) -> None:
        """Runs again, by age, those who stand in a line that was woken; up to the first that stays in it, but in the
        lines of limits, which come first, all who may have what they want."""
        waiting: dict[Topic, None] = {}
        while True:
            self._serve_limits(core)
            self._take_woken(core, waiting)
            if waiting:
                line = next(iter(waiting))
                del waiting[line]
                if self._serve_line(core, line, waiting):
                    waiting[line] = None
            elif not self._serve_others(core):
                return

    def _serve_limits(self, core: Core) -> None:
        while (found := core.lines.stands.next()) is not None:
            line, stand = found
            if limits.may_have(core, line, stand):
                call = core.lines.calls[stand.key]
                self.guarded(core, call.key, lambda call=call: self._again(core, call))  # type: ignore[misc]

    def _take_woken(self, core: Core, waiting: dict[Topic, None]) -> None:
        left = core.lines.left
        if not left and not core.woken:
            return
        woken = [*(line for line in left if line[0] not in HOLD_UP_NOBODY), *core.woken]
        left.clear()
        core.woken.clear()
        for line in woken:
            if core.lines.is_awaited(line):
                waiting[line] = None
            for behind in queues.lines_behind(line):
                if core.lines.is_awaited(behind):
                    waiting[behind] = None

    def _serve_line(self, core: Core, line: Topic, waiting: dict[Topic, None]) -> bool:
        """Whether the line is to be looked at once more: somebody in it has gone back in it."""
        lines = core.lines
        went_back = False
        for call in lines.line(line):
            if call.away or lines.calls.get(call.key) is not call:
                continue
            place = call.place_in(line)
            self.guarded(core, call.key, lambda call=call: self._again(core, call))  # type: ignore[misc]
            now = lines.calls.get(call.key)
            if now is not None and line in now.lines and line[0] not in HOLD_UP_NOBODY:
                if now.place_in(line) <= place:
                    break
                went_back = True  # it stood there for another job before, and may have held up itself
        if line in lines.left:
            waiting.update(dict.fromkeys(queues.lines_behind(line)))
            lines.left[:] = [other for other in lines.left if other != line]
        return went_back

    def _serve_others(self, core: Core) -> bool:
        """Those who look again for another reason than a line; whether there were any."""
        lines = core.lines
        overtaken = [lines.calls[key] for key in lines.overtaken if key in lines.calls]
        lines.overtaken.clear()
        if not (overtaken or lines.suspects):
            return False
        if not overtaken:
            self.guarded(core, None, lambda: self._look_at_suspects(core), step="deadlocks")
        for call in sorted(overtaken, key=lambda call: call.place):
            if not call.away and lines.calls.get(call.key) is call:
                self.guarded(core, call.key, lambda call=call: self._again(core, call))  # type: ignore[misc]
        return True

    def _again(self, core: Core, call: Call) -> None:
        core.caller = Caller(call.session, call.access, call.request_id, call.rank, call.ticket, call.request)
        answer = self.answer_of(core, call.request)
        if not isinstance(answer, Parked):
            core.lines.leave(call.key)
            self.answer(core, call.key, call.request, answer)
            return
        stands = replace(
            call,
            late=answer.late,
            over=answer.over,
            lines=answer.lines,
            signals=answer.signals,
            aside=answer.aside,
            ages=answer.ages,
            stands=answer.stands,
            at=answer.at,
        )
        self._park(core, stands)

    def _look_at_suspects(self, core: Core) -> None:
        """Refuses a wait that has become one without end; looked for once more when it is gone."""
        lines = core.lines
        held = {lease.token for topic in lines.suspects for lease in core.holds.of_topic(topic)}
        calls = {call.key: call for token in held for call in lines.inside(token)}
        found = circles.standing(core, calls.values())
        if found is None:
            lines.suspects.clear()
        else:
            call, circle = found
            self._refuse(core, call.key, circles.Deadlock(circle))


def _doing(core: Core, key: CallKey | None) -> str:
    request = core.caller.request
    if key is None or request is None:
        return "step of the daemon's own"
    return f"{_tag(request)} {replies.fingerprint(key, request)}"


def _tag(request: wire.Request[Any]) -> str:
    return str(request.__struct_config__.tag)
