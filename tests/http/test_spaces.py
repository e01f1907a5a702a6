"""Every endpoint is tried with every id of another space, and answers exactly as with an id that does not exist. The
application runs in the test's own loop, so that the database can be looked at after each call."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from runstate import wire
from runstated.http import names
from runstated.http.app import App
from runstated.http.call import TABLE
from runstated.http.gateway import Gateway
from runstated.http.hosts import Hosts
from runstated.server.sessions import Sessions
from tests.engines import Life, life, play

SECRET = "0123456789abcdef"


@dataclass(frozen=True)
class Ids:
    """What a call can name: one of everything in one space. ``claimed``, ``token``, ``grant`` and ``delivery`` are the
    tokens of a claim, a once key, slots and a job; ``idempotency`` is an Idempotency-Key that was used there."""

    space: str = "nowhere"
    run: str = "r999-none"
    group: str = "r998-none_" + names.to_id("q", "no-name")
    name: str = "no-name"  # of a queue, a limit, slots, a budget
    key: str = "no-key"
    token: str = f"999-{SECRET}"
    claimed: str = f"998-{SECRET}"
    grant: str = f"997-{SECRET}"
    job: str = "j999-none"
    delivery: str = f"996-{SECRET}"
    reservation: str = f"b999-none-{SECRET}"
    mailbox: str = names.to_id("q", "no-name")
    allowance: str = names.to_id("l", "no-name")
    permit: str = names.to_id("p", "no-name")
    budget: str = names.to_id("b", "no-name")
    timer: str = names.to_id("t", "r999-none", "no-name", "123")
    barrier: str = names.to_id("x", "r999-none", "no-name", "2")
    permit_waiter: str = names.to_id("w", "r999-none", "no-name", "=", "1", "0", "ff")
    allowance_waiter: str = names.to_id("w", "r999-none", "no-name", "=", "1", "5", "ff")
    cursor: str = "999999"
    idempotency: str = "never-used"


UNKNOWN = Ids()
OTHER = Ids(
    **{field.name: f"other-{field.name}" for field in fields(Ids)}
    | {noun: names.to_id(kind, "other") for noun, kind in (("allowance", "l"), ("permit", "p"), ("budget", "b"))}
    | {"mailbox": names.to_id("q", "other"), "timer": names.to_id("t", "r998-none", "other", "124")}
)
Body = dict[str, Any]
Make = Callable[[Ids], Body]


def path(**parts: str) -> Body:
    return {"path": parts}


ANY_BUDGET = names.to_id("b", "any")  # where a reservation, as where a claim's token, says all

# Each endpoint: what is in its path, and its body or query.
CALLS: dict[str, tuple[Make, ...]] = {
    "PUT /runs/{name}": (lambda t: path(name=t.run),),
    "POST /scopes": (lambda t: {"parentId": t.run}, lambda t: {"name": "new"}),
    "GET /scopes/{scopeId}": (lambda t: path(scopeId=t.run),),
    "POST /scopes/{scopeId}/cancel": (lambda t: path(scopeId=t.run),),
    "POST /scopes/{scopeId}/complete": (lambda t: path(scopeId=t.run),),
    "GET /ops/runs/{scopeId}": (lambda t: path(scopeId=t.run),),
    "POST /once/acquire": (
        lambda t: {"scopeId": t.run, "key": t.key},
        lambda t: {"scopeId": t.run, "key": f"of {t.idempotency}", "idempotency": t.idempotency},
    ),
    "GET /once": (lambda t: {"scopeId": t.run, "key": t.key},),
    "POST /once/renew": (lambda t: {"scopeId": t.run, "key": t.key, "token": t.token},),
    "POST /once/complete": (lambda t: {"scopeId": t.run, "key": t.key, "token": t.token},),
    "POST /once/fail": (lambda t: {"scopeId": t.run, "key": t.key, "token": t.token},),
    "POST /claims": (lambda t: {"scopeId": t.run, "key": t.key + "2"},),
    "POST /claims/{key}/renew": (lambda t: {**path(key="any"), "token": t.claimed},),
    "POST /claims/{key}/release": (lambda t: {**path(key="any"), "token": t.claimed},),
    "PUT /allowances/by-name/{name}": (lambda t: path(name=t.name),),
    "POST /allowances": (lambda t: {"name": t.name, "unitsLimit": 2, "windowSeconds": 86_400},),
    "GET /allowances/{allowanceId}": (lambda t: path(allowanceId=t.allowance),),
    "POST /allowances/{allowanceId}/consume": (lambda t: {**path(allowanceId=t.allowance), "scopeId": t.run},),
    "POST /allowances/{allowanceId}/wait": (lambda t: {**path(allowanceId=t.allowance), "scopeId": t.run},),
    "GET /allowance-waiters/{waiterId}": (lambda t: path(waiterId=t.allowance_waiter),),
    "POST /allowance-waiters/{waiterId}/cancel": (lambda t: path(waiterId=t.allowance_waiter),),
    "PUT /permits/by-name/{name}": (lambda t: path(name=t.name),),
    "POST /permits": (lambda t: {"name": t.name, "units": 1},),
    "POST /permits/{permitId}/acquire": (
        lambda t: {**path(permitId=t.permit), "scopeId": t.run},
        lambda t: {**path(permitId=t.permit), "scopeId": t.run, "waiterId": t.permit_waiter},
    ),
    "POST /permits/{permitId}/wait": (lambda t: {**path(permitId=t.permit), "scopeId": t.run},),
    "GET /permit-waiters/{waiterId}": (lambda t: path(waiterId=t.permit_waiter),),
    "POST /permit-waiters/{waiterId}/cancel": (lambda t: path(waiterId=t.permit_waiter),),
    "POST /grants/{grantId}/renew": (lambda t: {**path(grantId=t.grant), "token": t.grant},),
    "POST /grants/{grantId}/release": (lambda t: {**path(grantId=t.grant), "token": t.grant},),
    "PUT /budgets/by-name/{name}": (lambda t: path(name=t.name),),
    "POST /budgets": (lambda t: {"name": t.name, "limitMinor": "100", "currency": "USD", "scale": 2},),
    "GET /budgets/{budgetId}": (lambda t: path(budgetId=t.budget),),
    "POST /budgets/{budgetId}/reserve": (lambda t: {**path(budgetId=t.budget), "scopeId": t.run, "amountMinor": "1"},),
    "POST /budgets/{budgetId}/settle": (
        lambda t: {**path(budgetId=ANY_BUDGET), "reservationId": t.reservation, "amountMinor": "1", "workKey": "w"},
    ),
    "POST /budgets/{budgetId}/void": (lambda t: {**path(budgetId=ANY_BUDGET), "reservationId": t.reservation},),
    "PUT /mailboxes/by-name/{name}": (lambda t: path(name=t.name),),
    "POST /mailboxes": (lambda t: {"name": t.name, "maxAttempts": 3},),
    "POST /tasks": (
        lambda t: {"scopeId": t.run, "mailboxId": t.mailbox, "taskKey": "1"},
        lambda t: {"scopeId": t.run, "mailboxId": t.mailbox, "taskKey": "2", "requirements": needs_of(t)},
    ),
    "GET /tasks/{taskId}": (lambda t: path(taskId=t.job),),
    "POST /tasks/{taskId}/join": (lambda t: path(taskId=t.job),),
    "POST /tasks/{taskId}/detach": (lambda t: path(taskId=t.job),),
    "POST /mailboxes/{mailboxId}/messages": (lambda t: {**path(mailboxId=t.mailbox), "scopeId": t.run},),
    "POST /mailboxes/{mailboxId}/recv": (lambda t: {**path(mailboxId=t.mailbox), "scopeId": t.run},),
    "POST /tasks/admit": (
        lambda t: {"scopeId": t.run, "mailboxId": t.mailbox},
        lambda t: {"scopeId": t.run, "mailboxId": t.mailbox, "includeDescendants": True},
    ),
    "POST /messages/{messageId}/renew": (lambda t: {**path(messageId=t.job), "token": t.delivery},),
    "POST /messages/{messageId}/complete": (lambda t: {**path(messageId=t.job), "token": t.delivery},),
    "POST /messages/{messageId}/nack": (lambda t: {**path(messageId=t.job), "token": t.delivery},),
    "POST /task-groups": (lambda t: {"mailboxId": t.mailbox, "parentScopeId": t.run},),
    "POST /task-groups/{groupId}/tasks": (lambda t: {**path(groupId=t.group), "taskKey": "1"},),
    "POST /task-groups/{groupId}/tasks/{taskId}/accept": (lambda t: path(groupId=t.group, taskId=t.job),),
    "POST /task-groups/{groupId}/tasks/{taskId}/reject": (lambda t: path(groupId=t.group, taskId=t.job),),
    "PUT /timers/by-name/{name}": (lambda t: {**path(name=t.name), "scopeId": t.run, "afterSeconds": 0},),
    "POST /timers": (lambda t: {"scopeId": t.run, "afterSeconds": 0},),
    "POST /timers/{timerId}/ack": (lambda t: {**path(timerId=t.timer), "token": token_of(t.timer)},),
    "PUT /barriers/by-name/{name}": (lambda t: {**path(name=t.name), "scopeId": t.run, "target": 2},),
    "POST /barriers": (lambda t: {"scopeId": t.run, "target": 2},),
    "POST /barriers/{barrierId}/arrive": (lambda t: {**path(barrierId=t.barrier), "arrivalKey": "w"},),
    "GET /barriers/{barrierId}": (lambda t: path(barrierId=t.barrier),),
    "GET /watch": (lambda t: {"scopeId": t.run, "cursor": t.cursor, "waitSeconds": 0},),
}
# What is not refused, because it would not be refused with an id that does not exist either: a name that may be new,
# which makes something in the own space, and what is not looked at, as the rest of the call says all.
NOT_REFUSED = {
    *(("POST /once/acquire", "key"), ("POST /once/acquire", "idempotency")),
    *(("GET /once", "key"), ("POST /claims", "key")),
    *((f"POST /{noun}", "name") for noun in ("allowances", "permits", "budgets", "mailboxes")),
    *((f"PUT /{noun}/by-name/{{name}}", "name") for noun in ("timers", "barriers")),
    *(("POST /once/renew", "run"), ("POST /once/renew", "key")),
    *(("POST /messages/{messageId}/renew", "job"), ("GET /watch", "cursor")),
    *((f"{verb}-waiters/{{waiterId}}{end}", f"{kind}_waiter")
      for kind in ("permit", "allowance") for verb, end in ((f"GET /{kind}", ""), (f"POST /{kind}", "/cancel"))),
    *((f"POST /task-groups/{{groupId}}/tasks/{{taskId}}/{verb}", field)
      for verb in ("accept", "reject") for field in ("group", "job")),
}  # fmt: skip

BUSY = (409, 429)  # somebody has it, or there is nothing left of it
ENDS = ("cancel", "complete", "fail", "release", "settle", "void", "nack", "acquire")  # what these are of is used up


def needs_of(t: Ids) -> Body:
    """Names of what a job needs."""
    (pool,), (limit,), (budget,) = (
        names.from_id(kind, "thing", id_) for kind, id_ in (("p", t.permit), ("l", t.allowance), ("b", t.budget))
    )
    return {
        "pools": [{"name": pool}],
        "quotas": [{"name": limit}],
        "budgets": [{"name": budget, "reserveMinor": "1"}],
    }


def token_of(timer: str) -> str:
    return names.from_id("t", "timer", timer, 3)[2]


class Client:
    """One key of one space."""

    def __init__(self, app: App, space: str, secret: str) -> None:
        self.app, self.space, self.secret = app, space, secret

    async def call(self, endpoint: str, body: Body, space: str | None = None) -> tuple[int, Any]:
        """Status and JSON of one call of the application."""
        body = dict(body)
        method, _, template = endpoint.partition(" ")
        where = template.format(**body.pop("path", {}))
        idempotency = body.pop("idempotency", None)
        query = "&".join(f"{name}={value}" for name, value in body.items()) if method == "GET" else ""
        headers = {"host": "localhost:80", "authorization": f"Bearer {self.secret}"}
        headers |= {} if idempotency is None else {"idempotency-key": idempotency}
        full = f"/v1/spaces/{space or self.space}{where}"
        scope = {
            "type": "http",
            "client": None,
            "method": method,
            "path": full,
            "raw_path": full.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        received = [{"type": "http.request", "body": b"" if method == "GET" else json.dumps(body).encode()}]
        sent: list[Any] = []

        async def receive() -> Any:
            return received.pop() if received else await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(text) if text else None

    async def good(self, endpoint: str, body: Body) -> Any:
        status, answer = await self.call(endpoint, body)
        assert status in (200, 201), (endpoint, answer)
        return answer


async def one_of_everything(client: Client, word: str) -> Ids:
    """Made by a client in its space, with names that begin with a word."""
    good, name = client.good, f"{word}-name"
    run = (await good("PUT /runs/{name}", path(name=f"{word}-run")))["id"]
    key = f"{word}-key"
    once = await good("POST /once/acquire", {"scopeId": run, "key": key, "idempotency": f"{word}-call"})
    claim = await good("POST /claims", {"scopeId": run, "key": key})
    permit = (await good("POST /permits", {"name": name, "units": 1}))["id"]
    limits = {"name": name, "unitsLimit": 1, "windowSeconds": 86_400}
    allowance = (await good("POST /allowances", limits))["id"]
    money = {"name": name, "limitMinor": "100", "currency": "USD", "scale": 2}
    budget = (await good("POST /budgets", money))["id"]
    mailbox = (await good("POST /mailboxes", {"name": name, "maxAttempts": 3}))["id"]
    grant = (await good("POST /permits/{permitId}/acquire", {**path(permitId=permit), "scopeId": run}))["token"]
    await good("POST /allowances/{allowanceId}/consume", {**path(allowanceId=allowance), "scopeId": run})
    await good("POST /tasks", {"scopeId": run, "mailboxId": mailbox, "taskKey": "0", "input": f"{word}-input"})
    admitted = await good("POST /tasks/admit", {"scopeId": run, "mailboxId": mailbox})
    wanted = {**path(budgetId=budget), "scopeId": run, "amountMinor": "40"}
    reservation = (await good("POST /budgets/{budgetId}/reserve", wanted))["reservationId"]
    timed = {**path(name=name), "scopeId": run, "afterSeconds": 0}
    timer = (await good("PUT /timers/by-name/{name}", timed))["id"]
    met = {**path(name=name), "scopeId": run, "target": 2}
    barrier = (await good("PUT /barriers/by-name/{name}", met))["id"]
    group = (await good("POST /task-groups", {"mailboxId": mailbox, "parentScopeId": run}))["groupId"]
    slots_wait = {**path(permitId=permit), "scopeId": run}
    limit_wait = {**path(allowanceId=allowance), "scopeId": run}
    return Ids(
        space=client.space,
        run=run,
        group=group,
        name=name,
        key=key,
        token=once["token"],
        claimed=claim["token"],
        grant=grant,
        job=admitted["taskId"],
        delivery=admitted["token"],
        reservation=reservation,
        mailbox=mailbox,
        allowance=allowance,
        permit=permit,
        budget=budget,
        timer=timer,
        barrier=barrier,
        permit_waiter=(await good("POST /permits/{permitId}/wait", slots_wait))["waiterId"],
        allowance_waiter=(await good("POST /allowances/{allowanceId}/wait", limit_wait))["waiterId"],
        cursor=await newest(client, run),
        idempotency=f"{word}-call",
    )


async def newest(client: Client, run: str) -> str:
    """A cursor behind the newest event of all."""
    return str((await client.good("GET /watch", {"scopeId": run, "waitSeconds": 0}))["nextCursor"])


async def rows(it: Life) -> set[tuple[str, str]]:
    """All that is in the database, but for the daemon's own counters."""

    def read(connection: sqlite3.Connection) -> set[tuple[str, str]]:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return {
            (name, repr(row)) for name in tables - {"counters"} for row in connection.execute(f"SELECT * FROM {name}")
        }

    return await it.engine.store.run_read(read)


def without(answer: Any, ids: Ids) -> str:
    """The answer without these ids, and without what differs in each answer."""
    text = re.sub(r"\b(their|own\d+|no)-name\b", "<name>", json.dumps(answer, sort_keys=True))  # also of an id
    for name, value in sorted(asdict(ids).items(), key=lambda item: -len(item[1])):
        text = re.sub(rf"(?<![\w-]){re.escape(value)}(?![\w-])", f"<{name}>", text)
    text = re.sub(
        r'("(?:requestId|id|consumptionId|waiterId|grantId|groupId|generation)": )("[^"]*"|\d+)', r"\1...", text
    )
    return re.sub(r"\d+-[0-9a-f]{16}|\b[rjb]\d+-\w+|\d{4}-\d\d-\d\dT[\d:.]+Z|\b[tx][\w-]{20,}", "...", text)


async def two_spaces(it: Life) -> tuple[Client, Client]:
    """A client of each, with keys of their own."""
    await it.session("owner")
    made = [
        await it.ask("owner", wire.KeysCreate(space=space, permissions=wire.PERMISSIONS))
        for space in ("theirs", "ours")
    ]
    app = App(Gateway(it.engine, Sessions(it.engine, "test", 1)), Hosts("localhost", ()), "test")
    a, x = (Client(app, key.space, key.secret) for key in made)
    return a, x


def test_every_endpoint_is_tried() -> None:
    assert set(CALLS) == {f"{row.method} {row.path}" for row in TABLE}
    used = {
        field.name for makes in CALLS.values() for make in makes for field in fields(Ids) if differs(make, field.name)
    }
    assert used | {"space"} == {field.name for field in fields(Ids)}


def differs(make: Make, field: str) -> bool:
    """Whether the call names what is in that field."""
    return make(replace(UNKNOWN, **{field: getattr(OTHER, field)})) != make(UNKNOWN)


def test_an_id_of_another_space_is_one_that_does_not_exist(tmp_path: Path) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            a, x = await two_spaces(it)
            theirs = await one_of_everything(a, "their")
            of_theirs = await rows(it)
            state = {
                token: (hold.session, hold.length_ms)
                for token, hold in it.engine.spaces.of("theirs").holds.of_token.items()
            }
            calls = set(it.engine.spaces.of("theirs").lines.calls)
            own = await one_of_everything(x, "own0")
            nobodys = replace(UNKNOWN, run=f"r999-{it.engine.store.instance}")  # as ids of this database look

            async def tried(endpoint: str, make: Make, ids: Ids) -> tuple[int, str]:
                status, answer = await x.call(endpoint, make(ids), ids.space)
                now = await rows(it)
                assert of_theirs <= now, f"{endpoint}: something of theirs is gone or has changed"
                holds = it.engine.spaces.of("theirs").holds.of_token
                assert {token: (holds[token].session, holds[token].length_ms) for token in state} == state
                assert calls <= set(it.engine.spaces.of("theirs").lines.calls)
                seen = without(answer, ids)
                assert "their" not in seen, f"{endpoint}: {seen}"
                return status, f"{status} {seen}"

            sets = itertools.count(1)
            tries = [(endpoint, make) for endpoint, makes in CALLS.items() for make in makes]
            # Last those that make things with their names in our own space.
            for endpoint, make in sorted(tries, key=lambda each: (each[0], "name") in NOT_REFUSED):
                for field in ["space", *(field.name for field in fields(Ids) if differs(make, field.name))]:
                    # The spaces share the numbers of events; a cursor beyond all of them has expired.
                    gone = await newest(x, own.run) if field == "cursor" else getattr(nobodys, field)
                    status, unknown = await tried(endpoint, make, replace(own, **{field: gone}))
                    assert (status < 400) == ((endpoint, field) in NOT_REFUSED), f"{endpoint}: {field}: {unknown}"
                    if field == "cursor":  # their newest: nothing of ours comes after it
                        await a.good("POST /scopes", {"parentId": theirs.run})
                        theirs = replace(theirs, cursor=await newest(a, theirs.run))
                    _, foreign = await tried(endpoint, make, replace(own, **{field: getattr(theirs, field)}))
                    assert foreign == unknown, f"{endpoint}: {field}"
                await tried(endpoint, make, replace(theirs, space=own.space))
                status, answer = await tried(endpoint, make, own)
                assert status < 400 or status in BUSY, f"what is tried works: {endpoint}: {answer}"
                if endpoint.rpartition("/")[2] in ENDS:
                    own = await one_of_everything(x, f"own{next(sets)}")

    play(story())
