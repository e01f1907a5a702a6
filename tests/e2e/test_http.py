"""The HTTP listener as any program sees it: raw calls, broken connections, a daemon that is killed."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import os
import signal
import socket
import sqlite3
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from runstate import wire
from runstated.domain import replies
from runstated.engine import retention
from runstated.http import names
from tests.daemons import PATIENCE_S
from tests.e2e.support import Daemon, eventually, running
from tests.e2e.test_tcp import OPENSSL

Reply = tuple[int, Any]
_spaces = itertools.count(1)


class Response:
    """What came back; the connection is closed."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        response = connection.getresponse()
        self.status, self.headers, self.body = response.status, response.headers, response.read()
        connection.close()


class Api:
    """A daemon that listens on HTTP, too, and one key for it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.space = daemon.space
        with daemon.knock() as owner:
            owner.hello(session=f"owner-{os.urandom(4).hex()}", space=self.space)
            self.key = owner.ask(wire.KeysCreate(space=self.space, permissions=wire.PERMISSIONS)).secret
        self.run = self.call("PUT", "/runs/job")[1]["id"]

    @property
    def port(self) -> int:
        return int(self.daemon.running().http.rpartition(":")[2])

    def make_key(self, *arguments: str, space: str | None = None) -> str:
        where = ["--space", self.space if space is None else space]
        made = self.daemon.python("-m", "runstate_cli", "keys", "create", "--json", *where, *arguments)
        assert made.returncode == 0, made.stderr
        secret: str = json.loads(made.stdout)["secret"]
        return secret

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def ask(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str | None
    ) -> Response:
        """One call on a connection of its own. Header names are given with underscores; None leaves one out."""
        sent = {"authorization": f"Bearer {self.key}", **{n.replace("_", "-"): v for n, v in headers.items()}}
        connection = self.connect()
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {name: value for name, value in sent.items() if value is not None})
        return Response(connection)

    def call(self, method: str, path: str, body: Any = None, space: str | None = None, **headers: str | None) -> Reply:
        """A call of the API proper: status and JSON."""
        if method != "GET" and body is None:
            body = {}
        response = self.ask(method, f"/v1/spaces/{self.space if space is None else space}{path}", body, **headers)
        return response.status, json.loads(response.body) if response.body else None

    def good(self, method: str, path: str, body: Any = None, **headers: str | None) -> Any:
        status, answer = self.call(method, path, body, **headers)
        assert status in (200, 201), answer
        return answer

    def refused(self, status: int, code: str, method: str, path: str, body: Any = None, **headers: str | None) -> str:
        """The message of a refusal."""
        got, answer = self.call(method, path, body, **headers)
        assert (got, answer["error"]["code"]) == (status, code), answer
        assert answer["error"]["requestId"]
        message: str = answer["error"]["message"]
        return message

    def slots(self, name: str = "gpu", units: int = 1) -> str:
        found: str = self.good("PUT", f"/permits/by-name/{name}", {"units": units})["id"]
        return found

    def acquire(self, permit: str, **more: Any) -> Reply:
        body = {"scopeId": self.run, "units": 1, "holder": "w", "holderSession": "s", "leaseSeconds": 30, **more}
        return self.call("POST", f"/permits/{permit}/acquire", body)

    def queue(self, name: str = "review") -> str:
        found: str = self.good("PUT", f"/mailboxes/by-name/{name}", {"maxAttempts": 2})["id"]
        return found

    def admit(self, queue: str, wait_ms: int = 0, **headers: str | None) -> Reply:
        body = {"scopeId": self.run, "mailboxId": queue, "holder": "w", "waitMs": wait_ms, "includeDescendants": True}
        return self.call("POST", "/tasks/admit", body, **headers)

    def send(self, queue: str, value: Any, **headers: str | None) -> Reply:
        body = {"scopeId": self.run, "mailboxId": queue, "taskKey": f"k:{str(value)[:9]}", "input": value}
        return self.call("POST", "/tasks", body, **headers)

    def waits(self) -> int:
        """How many calls wait in the engine."""
        return len(self.daemon.status().waits)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that the tests of a module share."""
    with running(tmp_path_factory.mktemp("daemon"), RUNSTATED_HTTP="127.0.0.1:0") as place:
        yield place


@pytest.fixture(scope="module", autouse=True)
def slow(served: Daemon) -> Iterator[socket.socket]:
    """A client that began to send when the module did: nobody has to sit out the ten seconds that it is given."""
    port = int(served.running().http.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connected:
        connected.sendall(b"GET /healthz HT")
        yield connected


@pytest.fixture
def api(served: Daemon) -> Iterator[Api]:
    """A space of its own in it."""
    served.fresh(f"space-{next(_spaces)}")
    yield Api(served)
    served.end_programs()


@pytest.fixture
def own_api(no_daemon: Daemon) -> Api:
    """A daemon of its own, which may be killed."""
    no_daemon.environ["RUNSTATED_HTTP"] = "127.0.0.1:0"
    no_daemon.start()
    return Api(no_daemon)


def in_thread(work: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(work(*args)), daemon=True)
    thread.start()
    return thread, got


# ------------------------------------------------------------------ who may call


def test_every_call_but_healthz_needs_a_key(api: Api) -> None:
    assert api.ask("GET", "/healthz", authorization=None).status == 200
    for path in ("/openapi.json", "/metrics", f"/v1/spaces/{api.space}/scopes/r1", "/nothing"):
        response = api.ask("GET", path, authorization=None)
        assert (response.status, json.loads(response.body)["error"]["code"]) == (401, "UNAUTHENTICATED"), path
    assert api.ask("GET", "/openapi.json", authorization="Bearer rsk_k1_wrong").status == 401


def test_a_key_is_good_for_its_own_space_and_until_it_is_revoked(api: Api) -> None:
    api.refused(403, "FORBIDDEN", "PUT", "/runs/x", space="other")
    other = api.make_key(space="other")
    api.refused(404, "NOT_FOUND", "GET", f"/scopes/{api.run}", space="other", authorization=f"Bearer {other}")
    listed = json.loads(api.daemon.python("-m", "runstate_cli", "keys", "list", "--json").stdout)["keys"]
    (found,) = [key["id"] for key in listed if key["space"] == "other"]
    assert api.daemon.python("-m", "runstate_cli", "keys", "revoke", found).returncode == 0
    api.refused(401, "UNAUTHENTICATED", "PUT", "/runs/x", space="other", authorization=f"Bearer {other}")


def test_permissions_of_a_key(api: Api) -> None:
    api.slots()
    work = f"Bearer {api.make_key('--permission', 'work')}"
    assert api.call("PUT", "/permits/by-name/gpu", {"units": 1}, authorization=work)[0] == 200
    told = api.refused(403, "FORBIDDEN", "PUT", "/permits/by-name/new", {"units": 1}, authorization=work)
    assert "resource_config" in told
    api.refused(404, "NOT_FOUND", "PUT", "/permits/by-name/new", {}, authorization=work)
    api.refused(403, "FORBIDDEN", "GET", f"/ops/runs/{api.run}", authorization=work)


def test_a_page_of_another_site_gets_nothing(api: Api) -> None:
    response = api.ask("GET", "/healthz", host="evil.example")
    assert response.status == 403
    response = api.ask(
        "OPTIONS", f"/v1/spaces/{api.space}/runs/x", origin="http://evil.example", host=f"localhost:{api.port}"
    )
    assert response.status == 405
    assert not [name for name in response.headers if name.lower().startswith("access-control")]


def test_a_host_is_ours_by_its_name_and_any_port_will_do(api: Api) -> None:
    for host in ("localhost", "localhost:9000", "127.0.0.1:1", "[::1]:80", "LOCALHOST."):
        assert api.ask("GET", "/healthz", host=host).status == 200, host
    for host in ("", "localhost.evil.example", "127.0.0.1.evil.example:80", "0.0.0.0", "10.0.0.1"):
        assert api.ask("GET", "/healthz", host=host).status == 403, host


def test_statuses_come_with_the_headers_that_say_what_to_do(api: Api) -> None:
    assert api.ask("GET", "/openapi.json", authorization=None).headers["www-authenticate"].startswith("Bearer")
    limit = api.good("PUT", "/allowances/by-name/calls", {"unitsLimit": 1, "windowSeconds": 86_400})["id"]
    path, body = f"/v1/spaces/{api.space}/allowances/{limit}/consume", {"scopeId": api.run}
    assert api.ask("POST", path, body).status == 200
    busy = api.ask("POST", path, body)
    assert (busy.status, 1 <= int(busy.headers["retry-after"]) <= 86_400) == (429, True)


# ------------------------------------------------------------------ bad input


def test_an_integer_may_be_spelt_as_a_number_with_a_point(api: Api) -> None:
    body = f'{{"scopeId": "{api.run}", "key": "spelt", "leaseSeconds": 30.0, "holder": "w"}}'
    answer = api.ask("POST", f"/v1/spaces/{api.space}/once/acquire", raw=body.encode())
    assert (answer.status, json.loads(answer.body)["state"]) == (200, "ACQUIRED")
    half = body.replace("30.0", "30.5").encode()
    assert api.ask("POST", f"/v1/spaces/{api.space}/once/acquire", raw=half).status == 400


@pytest.mark.parametrize("number", ["1E400", "-1e+999", "1" * 400, '[0, {"a": 1E400}]'])
def test_a_number_that_others_would_read_as_infinity_is_refused(api: Api, number: str) -> None:
    body = f'{{"scopeId": "{api.run}", "mailboxId": "{api.queue()}", "taskKey": "k", "input": {number}}}'
    answer = api.ask("POST", f"/v1/spaces/{api.space}/tasks", raw=body.encode())
    assert (answer.status, "too large" in answer.body.decode()) == (400, True)
    text = body.replace(number, '"1E400"').encode()
    assert api.ask("POST", f"/v1/spaces/{api.space}/tasks", raw=text).status == 201


def test_a_field_that_is_not_known_is_named_where_it_may_be_the_reason(api: Api) -> None:
    told = api.refused(404, "NOT_FOUND", "PUT", "/permits/by-name/new", {"max": 3})
    assert "'max'" in told
    assert "units" in told
    api.queue()
    told = api.refused(409, "CONFLICT", "PUT", "/mailboxes/by-name/review", {"maxAttempts": 9})
    assert "maxAttempts=9" in told
    assert "query: " in api.refused(400, "VALIDATION_FAILED", "GET", "/once")


def test_a_compressed_body_is_refused_as_such(api: Api) -> None:
    path = f"/v1/spaces/{api.space}/runs/x"
    answer = api.ask("PUT", path, raw=gzip.compress(b"{}"), content_encoding="gzip")
    assert (answer.status, "gzip" in answer.body.decode()) == (415, True)


def test_a_request_with_two_lengths_is_the_last_one_of_its_connection(api: Api) -> None:
    head = (
        f"PUT /v1/spaces/{api.space}/runs/two HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.key}\r\n"
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", api.port), PATIENCE_S) as sock:
        sock.sendall(head.encode())
        said = b""
        while part := sock.recv(65_536):
            said += part
    assert said.startswith(b"HTTP/1.1 ")
    assert b"connection: close" in said.lower()


@pytest.mark.parametrize(
    ("method", "path", "body", "named"),
    [
        ("POST", "/once/acquire", {"scopeId": "r", "key": "k", "leaseSeconds": 4}, "leaseSeconds"),
        ("POST", "/once/acquire", {"scopeId": 7, "key": "k"}, "scopeId"),
        ("POST", "/once/acquire", {"key": "k"}, "scopeId"),
        ("PUT", "/allowances/by-name/x", {"unitsLimit": 0, "windowSeconds": 1}, "unitsLimit"),
        ("PUT", "/budgets/by-name/x", {"limitMinor": "1.5"}, "limitMinor"),
        ("POST", "/scopes", {"parentId": "r", "deadline": "tomorrow"}, "deadline"),
        ("PUT", "/runs/x", {"deadline": "9999-12-31T23:59:59-12:00"}, "deadline"),
        ("PUT", "/allowances/by-name/x", {"unitsLimit": 1}, "windowSeconds"),
        ("PUT", "/budgets/by-name/x", {"limitMinor": "1", "currency": "usd", "scale": 2}, "currency"),
        ("POST", "/task-groups", {"mailboxId": "q", "parentScopeId": "r", "condition": "SOME"}, "condition"),
        ("POST", "/task-groups", {"mailboxId": "q", "parentScopeId": "r", "threshold": 0}, "threshold"),
        ("GET", "/once?scopeId=r&key=k&waitMs=25001", None, "waitMs"),
        ("PUT", "/timers/by-name/x", {"scopeId": "r"}, "afterSeconds"),
        ("PUT", "/runs/" + "x" * 257, {}, "256"),
        ("PUT", "/runs/%ff", {}, "UTF-8"),
    ],
)
def test_what_is_wrong_is_named(api: Api, method: str, path: str, body: Any, named: str) -> None:
    assert named in api.refused(400, "VALIDATION_FAILED", method, path, body)


@pytest.mark.parametrize("raw", [b"{", b'{"scopeId": NaN}', b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_strict_json_object_is_refused(api: Api, raw: bytes) -> None:
    response = api.ask("POST", f"/v1/spaces/{api.space}/once/acquire", raw=raw)
    assert (response.status, json.loads(response.body)["error"]["code"]) == (400, "VALIDATION_FAILED")


def test_sizes_are_those_of_the_value(api: Api) -> None:
    queue = api.queue()
    assert api.send(queue, "é" * 32_767)[0] == 201
    assert "exceeds 65536 bytes" in api.send(queue, "x" * 65_535)[1]["error"]["message"]
    response = api.ask("POST", f"/v1/spaces/{api.space}/tasks", raw=b" " * (2 * 1024 * 1024 + 1))
    assert (response.status, "exceeds 2097152 bytes" in response.body.decode()) == (400, True)


def test_unknown_paths_methods_and_ids(api: Api) -> None:
    api.refused(404, "NOT_FOUND", "GET", "/nothing")
    api.refused(405, "METHOD_NOT_ALLOWED", "DELETE", "/runs/x")
    assert api.ask("OPTIONS", f"/v1/spaces/{api.space}/tasks/admit").headers["allow"] == "POST"
    for key in ("a b", "x" * 256):
        assert "Idempotency-Key" in api.refused(400, "VALIDATION_FAILED", "PUT", "/runs/x", {}, idempotency_key=key)
    for path in ("/scopes/r9", "/tasks/j9", "/allowances/x", "/budgets/b!", "/barriers/xWyJhIl0"):
        api.refused(404, "NOT_FOUND", "GET", path)
    assert api.refused(404, "NOT_FOUND", "PUT", "/mailboxes/by-name/review") == "queue review not found"
    for target in ("abc", "-1", "0", "1" * 30):
        forged = names.to_id("x", api.run, "n", target)
        api.refused(404, "NOT_FOUND", "POST", f"/barriers/{forged}/arrive", {"arrivalKey": "a"})
    body = {"scopeId": api.run, "mailboxId": names.to_id("q", "unknown"), "waitMs": 20_000}
    api.refused(404, "NOT_FOUND", "POST", "/tasks/admit", body)
    assert api.call("GET", "/permit-waiters/nothing")[1] == {"state": "EXPIRED"}


def test_a_name_may_have_a_slash_and_anything_else(api: Api) -> None:
    assert api.good("PUT", "/runs/a%2Fb%20c'%C3%A9(~)*!.%25")["name"] == "a/b c'é(~)*!.%"


def test_a_cursor_beyond_the_end_has_expired(api: Api) -> None:
    api.refused(410, "CURSOR_EXPIRED", "GET", f"/watch?scopeId={api.run}&cursor=999999999&waitSeconds=25")
    page = api.good("GET", f"/watch?scopeId={api.run}&waitSeconds=0")
    again = api.good("GET", f"/watch?scopeId={api.run}&cursor={page['nextCursor']}&waitSeconds=0")
    assert again["events"] == []


# ------------------------------------------------------------------ Idempotency-Key


def test_a_repeat_gets_the_first_answer_and_another_body_is_a_conflict(api: Api) -> None:
    first = api.good("PUT", "/runs/other", idempotency_key="k1")
    api.good("POST", f"/scopes/{first['id']}/cancel")
    assert api.good("PUT", "/runs/other", idempotency_key="k1") == first
    assert api.good("PUT", "/runs/other", idempotency_key="k2")["id"] != first["id"]
    api.refused(409, "IDEMPOTENCY_CONFLICT", "PUT", "/runs/third", idempotency_key="k1")


def test_a_repeat_by_another_worker_of_the_key_is_a_conflict_and_not_a_second_hold(api: Api) -> None:
    permit = api.slots(units=2)
    assert api.acquire(permit, holder="a") != api.acquire(permit, holder="b")
    permit = api.slots("other", units=2)
    body = {"scopeId": api.run, "units": 1, "holderSession": "s"}
    path = f"/permits/{permit}/acquire"
    first = api.good("POST", path, {**body, "holder": "a"}, idempotency_key="x")
    api.refused(409, "IDEMPOTENCY_CONFLICT", "POST", path, {**body, "holder": "b"}, idempotency_key="x")
    assert api.good("POST", path, {**body, "holder": "a"}, idempotency_key="x") == first
    api.good("POST", f"/grants/{first['grantId']}/release", {"token": first["token"]})
    again = api.good("POST", path, {**body, "holder": "a"}, idempotency_key="x")
    assert again["token"] != first["token"], "an answer with a dead token is not given again"


def test_a_refusal_is_not_kept(api: Api) -> None:
    permit = api.slots()
    body = {"scopeId": api.run, "units": 1, "holder": "w", "holderSession": "s", "leaseSeconds": 30}
    held = api.good("POST", f"/permits/{permit}/acquire", body)
    path = f"/permits/{permit}/acquire"
    api.refused(409, "CAPACITY_UNAVAILABLE", "POST", path, body, idempotency_key="k")
    api.good("POST", f"/grants/{held['grantId']}/release", {"token": held["token"]})
    again = api.good("POST", path, body, idempotency_key="k")
    assert api.good("POST", path, body, idempotency_key="k") == again


def test_a_result_is_given_again_with_a_repeat(api: Api) -> None:
    body = {"scopeId": api.run, "key": "k", "holder": "w", "holderSession": "s", "leaseSeconds": 30}
    token = api.good("POST", "/once/acquire", body)["token"]
    api.good("POST", "/once/complete", {**body, "token": token, "result": {"n": 1}})
    for _ in range(2):
        assert api.good("POST", "/once/acquire", body, idempotency_key="x") == {"state": "DONE", "result": {"n": 1}}


def test_a_token_is_given_again_only_while_it_lives(api: Api) -> None:
    body = {"scopeId": api.run, "key": "k:1", "holder": "w", "holderSession": "s", "leaseSeconds": 30}
    first = api.good("POST", "/once/acquire", body, idempotency_key="k")
    assert first["state"] == "ACQUIRED"
    assert api.good("POST", "/once/acquire", body, idempotency_key="k") == first
    assert api.good("POST", "/once/acquire", body)["state"] == "HELD"
    told = {"scopeId": api.run, "key": "k:1", "token": first["token"], "error": "ValueError: x", "maxAttempts": 3}
    assert api.good("POST", "/once/fail", told) == {"state": "OPEN", "attempts": 1}
    again = api.good("POST", "/once/acquire", body, idempotency_key="k")
    assert again["state"] == "ACQUIRED"
    assert again["token"] != first["token"]


def test_answers_to_calls_without_an_idempotency_key_are_not_kept(own_api: Api) -> None:
    api = own_api
    for n in range(3):
        api.good("POST", "/scopes", {"parentScopeId": api.run})
        api.good("PUT", f"/runs/r{n}")
    api.good("POST", "/scopes", {"parentScopeId": api.run}, idempotency_key="kept")
    with contextlib.closing(sqlite3.connect(api.daemon.state_dir / "runstate.db")) as database:
        eventually(lambda: database.execute("SELECT count(*) FROM replies").fetchone() == (1,))


def test_a_key_that_fills_its_share_of_kept_answers_is_told_for_how_long_they_are_kept(own_api: Api) -> None:
    api = own_api
    first = api.ask("PUT", f"/v1/spaces/{api.space}/runs/first", {}, idempotency_key="first")
    assert first.headers.get("idempotency-kept-seconds") is None
    api.daemon.terminate()
    with contextlib.closing(sqlite3.connect(api.daemon.state_dir / "runstate.db")) as database, database:
        database.execute(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :many)"
            " INSERT INTO replies (session, request, space, fingerprint, reply, until_ms, bytes)"
            " SELECT session, i, space, '', '{}', until_ms - 500 * i, 2 FROM replies JOIN n",
            {"many": retention.REPLIES_KEPT},
        )
    api.daemon.start()
    numbers = itertools.count()

    def told() -> str | None:
        path, key = f"/v1/spaces/{api.space}/runs/r", f"k{next(numbers)}"
        return api.ask("PUT", path, {}, idempotency_key=key).headers.get("idempotency-kept-seconds")

    for _ in range(replies.LOOK_EACH - 1):
        assert told() is None
    eventually(told)
    assert 0 < int(told() or 0) < 86_400


def test_the_daemon_is_killed_between_a_request_and_its_answer_and_the_repeat_has_one_effect(own_api: Api) -> None:
    api = own_api
    queue = api.queue()
    for n in range(5):
        connection = api.connect()
        body = {"scopeId": api.run, "mailboxId": queue, "taskKey": f"k:{n}", "input": n}
        headers = {"authorization": f"Bearer {api.key}", "idempotency-key": f"key-{n}"}
        connection.request("POST", f"/v1/spaces/{api.space}/tasks", json.dumps(body).encode(), headers)
        api.daemon.kill()
        connection.close()
        api.daemon.start()
        assert api.send(queue, n, idempotency_key=f"key-{n}")[0] == 201
        assert api.send(queue, n, idempotency_key=f"key-{n}")[0] == 201
    assert sorted(api.admit(queue)[1]["payload"] for _ in range(5)) == list(range(5))
    assert api.admit(queue) == (204, None)


# ------------------------------------------------------------------ waiting


def test_a_repeat_says_when_the_lease_ends_and_not_when_it_was_asked(api: Api) -> None:
    queue = api.queue()
    api.send(queue, 1)
    first = api.admit(queue, idempotency_key="a")[1]
    eventually(lambda: datetime.now(timezone.utc).microsecond // 1000 != int(first["leaseExpiresAt"][-4:-1]))
    assert api.admit(queue, idempotency_key="a")[1] == first


def test_a_worker_that_has_gone_is_given_no_job(api: Api) -> None:
    queue = api.queue()
    connection = api.connect()
    body = {"scopeId": api.run, "mailboxId": queue, "holder": "gone", "waitMs": 20_000, "includeDescendants": True}
    headers = {"authorization": f"Bearer {api.key}", "idempotency-key": "k"}
    connection.request("POST", f"/v1/spaces/{api.space}/tasks/admit", json.dumps(body).encode(), headers)
    eventually(lambda: api.waits() == 1)
    connection.close()
    eventually(lambda: api.waits() == 0)
    api.send(queue, 1)
    assert api.admit(queue)[1]["attempt"] == 1


def test_a_long_poll_is_answered_when_there_is_something_and_costs_nothing_before(api: Api) -> None:
    queue = api.queue()
    thread, got = in_thread(api.admit, queue, 20_000)
    eventually(lambda: api.waits() == 1)
    sent = api.send(queue, {"é": [1.0, 1e21, 0.30000000000000004]})[1]["taskId"]
    thread.join(PATIENCE_S)
    ((status, job),) = got
    assert (status, job["payload"], job["attempt"]) == (200, {"é": [1.0, 1e21, 0.30000000000000004]}, 1)
    thread, got = in_thread(api.call, "GET", f"/tasks/{sent}?waitMs=25000")
    eventually(lambda: api.waits() == 1)
    done = {"token": job["token"], "result": {"payload": "done"}}
    api.good("POST", f"/messages/{job['messageId']}/complete", done)
    thread.join(PATIENCE_S)
    assert got[0][1]["outcome"] == "done"
    api.refused(409, "STALE_CLAIM", "POST", f"/messages/{job['messageId']}/renew", {"token": job["token"]})


def test_the_end_of_a_run_ends_its_polls(api: Api) -> None:
    queue = api.queue()
    thread, got = in_thread(api.admit, queue, 20_000)
    eventually(lambda: api.waits() == 1)
    api.good("POST", f"/scopes/{api.run}/cancel")
    thread.join(PATIENCE_S)
    assert (got[0][0], got[0][1]["error"]["code"]) == (409, "SCOPE_CANCELLED")


def test_waiters_stand_in_the_same_line_as_everybody_and_survive_a_restart_without_an_error(own_api: Api) -> None:
    api = own_api
    permit = api.slots()
    held = api.acquire(permit)[1]
    body = {"scopeId": api.run, "units": 1, "holder": "w2"}
    waiter = api.good("POST", f"/permits/{permit}/wait", body)["waiterId"]
    assert api.good("GET", f"/permit-waiters/{waiter}") == {"state": "WAITING"}
    assert api.good("GET", f"/ops/runs/{api.run}")["waiting"] == [{"permit": "gpu", "units": 1}]
    api.good("POST", f"/grants/{held['grantId']}/release", {"token": held["token"]})
    assert api.good("GET", f"/permit-waiters/{waiter}") == {"state": "SIGNALED"}
    assert api.acquire(permit)[0] == 409  # promised
    claimed = api.acquire(permit, waiterId=waiter, holder="w2")[1]
    later = api.good("POST", f"/permits/{permit}/wait", body)["waiterId"]
    api.daemon.kill()
    api.daemon.start()
    assert api.good("GET", f"/permit-waiters/{later}") == {"state": "WAITING"}
    api.good("POST", f"/grants/{claimed['grantId']}/renew", {"token": claimed["token"], "leaseSeconds": 30})
    api.good("POST", f"/grants/{claimed['grantId']}/release", {"token": claimed["token"]})
    assert api.good("GET", f"/permit-waiters/{later}") == {"state": "SIGNALED"}
    api.good("POST", f"/scopes/{api.run}/cancel")
    api.daemon.kill()
    api.daemon.start()
    assert api.good("GET", f"/permit-waiters/{later}") == {"state": "CANCELLED"}


def test_a_waiter_of_a_limit_survives_a_restart_and_its_units_are_spent_once(own_api: Api) -> None:
    api = own_api
    limit = api.good("PUT", "/allowances/by-name/calls", {"unitsLimit": 2, "windowSeconds": 86_400})["id"]
    body = {"scopeId": api.run, "units": 2, "holder": "w", "ttlSeconds": 60}
    taken = api.good("POST", f"/allowances/{limit}/wait", body)
    waits = api.good("POST", f"/allowances/{limit}/wait", body)["waiterId"]
    api.daemon.kill()
    api.daemon.start()
    assert api.good("GET", f"/allowance-waiters/{taken['waiterId']}")["state"] == "GRANTED"
    assert api.good("GET", f"/allowance-waiters/{waits}") == {"state": "WAITING"}
    assert api.good("GET", f"/allowances/{limit}")["remaining"] == 0
    api.daemon.kill()
    api.daemon.start()
    assert api.good("POST", f"/allowance-waiters/{waits}/cancel") == {"state": "CANCELLED"}
    eventually(lambda: api.waits() == 0)


def test_a_promise_is_claimed_once_also_after_a_restart_and_ends_with_its_run(own_api: Api) -> None:
    api = own_api
    permit = api.slots()
    body = {"scopeId": api.run, "units": 1, "holder": "w2"}

    def promised() -> str:
        waiter: str = api.good("POST", f"/permits/{permit}/wait", body)["waiterId"]
        assert api.good("GET", f"/permit-waiters/{waiter}") == {"state": "SIGNALED"}
        return waiter

    def claim(waiter: str, key: str) -> Reply:
        wanted = {**body, "leaseSeconds": 30, "waiterId": waiter}
        return api.call("POST", f"/permits/{permit}/acquire", wanted, idempotency_key=key)

    waiter = promised()
    other = api.slots("other")
    wrong = {**body, "waiterId": waiter}
    api.refused(409, "CAPACITY_UNAVAILABLE", "POST", f"/permits/{other}/acquire", wrong)
    status, grant = claim(waiter, "one")
    assert status == 200
    assert claim(waiter, "one") == (200, grant)
    assert claim(waiter, "two")[1]["error"]["code"] == "CAPACITY_UNAVAILABLE"
    api.daemon.kill()
    api.daemon.start()
    assert claim(waiter, "one") == (200, grant)
    api.good("POST", f"/grants/{grant['grantId']}/release", {"token": grant["token"]})
    waiter = promised()
    api.daemon.kill()
    api.daemon.start()
    status, grant = claim(waiter, "three")
    assert status == 200
    api.good("POST", f"/grants/{grant['grantId']}/release", {"token": grant["token"]})
    for unknown in ("nothing", f"{api.run}_zz", f"{api.run}_" + "f" * 40):
        api.refused(409, "CAPACITY_UNAVAILABLE", "POST", f"/permits/{permit}/acquire", {**body, "waiterId": unknown})
    waiter = promised()
    api.good("POST", f"/scopes/{api.run}/cancel")
    assert api.good("GET", f"/permit-waiters/{waiter}") == {"state": "CANCELLED"}


def test_a_stopping_daemon_tells_its_polls_to_come_again(own_api: Api) -> None:
    api = own_api
    newest = api.good("GET", f"/watch?scopeId={api.run}&waitSeconds=0")["nextCursor"]
    path = f"/v1/spaces/{api.space}/watch?scopeId={api.run}&cursor={newest}&waitSeconds=20"
    thread, got = in_thread(api.ask, "GET", path)
    eventually(lambda: api.waits() == 1)
    os.kill(api.daemon.running().pid, signal.SIGTERM)
    thread.join(PATIENCE_S)
    assert got[0].status == 503
    assert "error" not in json.loads(got[0].body)


# ------------------------------------------------------------------ money, time


def test_a_cost_above_the_reservation_takes_what_is_left(api: Api) -> None:
    budget = api.good("PUT", "/budgets/by-name/usd", {"limitMinor": "100", "currency": "USD", "scale": 2})["id"]

    def reserve(amount: str) -> str:
        body = {"scopeId": api.run, "holder": "w", "amountMinor": amount}
        found: str = api.good("POST", f"/budgets/{budget}/reserve", body)["reservationId"]
        return found

    def settle(reservation: str, amount: str) -> Any:
        body = {"reservationId": reservation, "amountMinor": amount, "workKey": f"settle:{reservation}"}
        return api.call("POST", f"/budgets/{budget}/settle", {**body, "allowOverrun": True})

    first = reserve("40")
    assert settle(first, "30")[1]["state"] == "ACTIVE"
    assert settle(first, "30")[1]["chargedMinor"] == "30"
    void = {"reservationId": first, "workKey": f"void:{first}"}
    assert api.good("POST", f"/budgets/{budget}/void", void)["state"] == "SETTLED"
    api.refused(409, "CONFLICT", "POST", f"/budgets/{budget}/void", void)
    assert settle(reserve("40"), "90")[1]["state"] == "SETTLED"
    seen = api.good("GET", f"/budgets/{budget}")
    assert (seen["settledMinor"], seen["reservedMinor"], len(seen["reservations"])) == ("100", "0", 2)
    overrun = {"scopeId": api.run, "holder": "w", "amountMinor": "1"}
    api.refused(409, "INSUFFICIENT_BUDGET", "POST", f"/budgets/{budget}/reserve", overrun)
    assert [e["type"] for e in api.good("GET", f"/watch?scopeId={api.run}&types=budget.overrun")["events"]]


def test_timers_and_barriers(api: Api) -> None:
    due = api.good("PUT", "/timers/by-name/t", {"scopeId": api.run, "afterSeconds": 0})
    assert due["state"] == "FIRED"
    assert api.good("POST", f"/timers/{due['id']}/ack", {"token": due["token"]})["state"] == "ACKED"
    for token in (due["token"], "bogus"):
        api.refused(409, "CONFLICT", "POST", f"/timers/{due['id']}/ack", {"token": token})
    assert api.good("PUT", "/timers/by-name/t", {"scopeId": api.run, "afterSeconds": 9})["state"] == "ACKED"
    assert api.good("PUT", "/timers/by-name/u", {"scopeId": api.run, "afterSeconds": 900})["state"] == "PENDING"
    meet = api.good("PUT", "/barriers/by-name/m", {"scopeId": api.run, "target": 2})
    api.refused(409, "CONFLICT", "PUT", "/barriers/by-name/m", {"scopeId": api.run, "target": 3})
    for label, state in (("a", "OPEN"), ("a", "OPEN"), ("b", "RELEASED"), ("c", "RELEASED")):
        assert api.good("POST", f"/barriers/{meet['id']}/arrive", {"arrivalKey": label})["state"] == state
    assert api.good("GET", f"/barriers/{meet['id']}")["epoch"] == meet["epoch"]
    other = api.good("PUT", "/barriers/by-name/o", {"scopeId": api.run, "target": 2})
    api.good("POST", f"/scopes/{api.run}/complete")  # whoever arrives last may end the run at once
    assert api.good("GET", f"/barriers/{meet['id']}")["state"] == "RELEASED"
    api.refused(409, "SCOPE_CANCELLED", "GET", f"/barriers/{other['id']}")


# ------------------------------------------------------------------ the rest


def test_the_document_names_every_endpoint_and_metrics_count_calls(own_api: Api) -> None:
    api = own_api
    document = json.loads(api.ask("GET", "/openapi.json").body)
    assert {"/healthz", "/v1/spaces/{spaceId}/once/acquire", "/v1/spaces/{spaceId}/watch"} <= set(document["paths"])
    text = api.ask("GET", "/metrics").body.decode()
    assert 'runstated_http_calls_total{method="PUT",route="/v1/spaces/{spaceId}/runs/{name}",status="200"} 1.0' in text
    assert "runstated_runs 1.0" in text
    assert json.loads(api.ask("GET", "/healthz").body) == {"status": "ok"}


SHARING = """
run = runstate.run("job")
say(run.queue("review")(21))
say(run.once(name="x", key=lambda: "k")(lambda: "not this")())
"""


def test_our_client_and_http_share_queues_and_keys(api: Api) -> None:
    queue = api.queue()
    body = {"scopeId": api.run, "key": "x:k", "holder": "w", "holderSession": "s", "leaseSeconds": 30}
    taken = api.good("POST", "/once/acquire", body)
    done = {"scopeId": api.run, "key": "x:k", "token": taken["token"], "result": {"by": "http"}}
    api.good("POST", "/once/complete", done)
    program = api.daemon.program(SHARING)
    job = api.admit(queue, 20_000)[1]
    done = {"token": job["token"], "result": {"payload": job["payload"] * 2}}
    api.good("POST", f"/messages/{job['messageId']}/complete", done)
    program.expect("42", "{'by': 'http'}")


def test_https_with_a_certificate_of_ones_own(no_daemon: Daemon, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names_ = "subjectAltName=DNS:localhost,IP:127.0.0.1,DNS:in-the-certificate.example"
    command = [*OPENSSL[:-1], names_, "-keyout", str(key), "-out", str(certificate)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    no_daemon.environ |= {
        "RUNSTATED_HTTP": "127.0.0.1:0",
        "RUNSTATED_TLS_CERT": str(certificate),
        "RUNSTATED_TLS_KEY": str(key),
        "RUNSTATED_HTTP_HOSTS": "named.example, other.example",
    }
    no_daemon.start()
    port = int(no_daemon.running().http.rpartition(":")[2])
    trusted = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=trusted)
    connection.request("GET", "/healthz")
    assert Response(connection).status == 200
    for host, status in (("in-the-certificate.example", 200), ("named.example:1", 200), ("evil.example", 403)):
        connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=trusted)
        connection.request("GET", "/healthz", headers={"Host": host})
        assert Response(connection).status == status, host
    plain = http.client.HTTPConnection("localhost", port, timeout=PATIENCE_S)
    plain.request("GET", "/healthz")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    plain.close()


def test_a_client_that_sends_its_head_too_slowly_is_dropped(slow: socket.socket) -> None:
    assert slow.recv(1_000) == b""


def test_strangers_cannot_fill_the_log(served: Daemon) -> None:
    port, before = int(served.running().http.rpartition(":")[2]), served.output.count("Invalid HTTP")
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connected:
            connected.sendall(b"100% GARBAGE\r\n\r\n")
            assert connected.recv(12) == b"HTTP/1.1 400"
    assert 0 < served.output.count("Invalid HTTP") - before < 50  # one a second
