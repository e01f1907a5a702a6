"""HTTP: whose a hold is, and what a key of another space, another key of the same space or a revoked key may do."""

from __future__ import annotations

import json
import socket
from typing import Any

from runstate import wire
from tests.daemons import PATIENCE_S
from tests.e2e.support import Raw
from tests.e2e.test_http import Api
from tests.e2e.test_http import api as api
from tests.e2e.test_http import served as served

WRONG = "0123456789abcdef"


def revoke(api: Api, secret: str) -> None:
    with Raw(api.daemon.socket) as owner:
        owner.hello(space=api.space)
        owner.ask(wire.KeysRevoke(key=secret.split("_")[1]))


def test_a_client_that_tries_all_small_numbers_ends_nobodys_hold(api: Api) -> None:
    """Neither with the key of the holder, nor with another one of the space."""
    permit, queue = api.slots(), api.queue()
    budget = api.good("PUT", "/budgets/by-name/llm", {"limitMinor": "100", "currency": "USD", "scale": 2})["id"]
    slots = api.acquire(permit)[1]
    once = {"scopeId": api.run, "key": "k"}
    key = api.good("POST", "/once/acquire", {**once, "holder": ""})
    api.send(queue, 1)
    job = api.admit(queue)[1]
    money = api.good("POST", f"/budgets/{budget}/reserve", {"scopeId": api.run, "amountMinor": "40"})
    last = max(int(token.partition("-")[0]) for token in (slots["token"], key["token"], job["token"]))
    (listed,) = api.good("GET", f"/budgets/{budget}")["reservations"]
    other = api.make_key()
    for secret in (api.key, other):
        sent = {"authorization": f"Bearer {secret}"}
        for number in range(1, last + 3):
            token = f"{number}-{WRONG}"
            for path, body in (
                (f"/grants/{token}/release", {}),
                (f"/grants/{token}/renew", {}),
                ("/claims/k/release", {}),
                ("/claims/k/renew", {}),
                ("/once/renew", once),
                ("/once/complete", once),
                ("/once/fail", {**once, "error": "E"}),
                (f"/messages/{job['messageId']}/renew", {}),
                (f"/messages/{job['messageId']}/complete", {}),
                (f"/messages/{job['messageId']}/nack", {}),
            ):
                api.refused(409, "STALE_CLAIM", "POST", path, {**body, "token": token}, **sent)
        for reservation in (listed["id"], f"{listed['id']}-{WRONG}", money["reservationId"][:-1] + "x"):
            settle = {"reservationId": reservation, "amountMinor": "1", "workKey": "w"}
            api.refused(404, "NOT_FOUND", "POST", f"/budgets/{budget}/settle", settle, **sent)
            api.refused(404, "NOT_FOUND", "POST", f"/budgets/{budget}/void", settle, **sent)
    with_other = {"authorization": f"Bearer {other}"}
    api.good("POST", f"/grants/{slots['grantId']}/release", {"token": slots["token"]}, **with_other)
    api.good("POST", "/once/complete", {**once, "token": key["token"], "result": 1}, **with_other)
    api.good("POST", f"/messages/{job['messageId']}/complete", {"token": job["token"]}, **with_other)
    settle = {"reservationId": money["reservationId"], "amountMinor": "1", "workKey": "w"}
    assert api.good("POST", f"/budgets/{budget}/settle", settle, **with_other)["chargedMinor"] == "1"


def test_the_number_of_a_token_grows_and_no_list_shows_more(api: Api) -> None:
    permit = api.slots()
    first = api.acquire(permit)[1]["token"]
    seen = [held.token for held in api.daemon.holdings()]
    assert seen == [int(first.partition("-")[0])]
    api.good("POST", f"/grants/{first}/release", {"token": first})
    assert int(api.acquire(permit)[1]["token"].partition("-")[0]) > seen[0]


def test_a_waiter_is_known_to_its_own_key_only(api: Api) -> None:
    elsewhere = f"{api.space}-other"
    others = {
        "another space": (elsewhere, api.make_key(space=elsewhere)),
        "another key": (api.space, api.make_key()),
    }
    permit = api.slots()
    held = api.acquire(permit)[1]
    limit = api.good("PUT", "/allowances/by-name/calls", {"unitsLimit": 1, "windowSeconds": 86_400})["id"]
    body = {"scopeId": api.run, "holder": "victim"}
    api.good("POST", f"/allowances/{limit}/consume", body)
    for kind, path in (("permit", f"/permits/{permit}/wait"), ("allowance", f"/allowances/{limit}/wait")):
        waiter = api.good("POST", path, body)["waiterId"]
        for what, (space, secret) in others.items():
            sent: dict[str, Any] = {"space": space, "authorization": f"Bearer {secret}"}
            asked = api.call("POST", f"/{kind}-waiters/{waiter}/cancel", **sent)
            assert asked[0] == 200, (what, asked)
            assert api.good("GET", f"/{kind}-waiters/{waiter}")["state"] == "WAITING", what
    api.good("POST", f"/grants/{held['grantId']}/release", {"token": held["token"]})


def test_answers_are_kept_for_the_key_that_asked(api: Api) -> None:
    """An Idempotency-Key that can be guessed gives nothing to another key, and blocks nothing."""
    body = {"scopeId": api.run, "key": "k"}
    other = {"authorization": f"Bearer {api.make_key()}"}
    assert api.good("POST", "/once/acquire", body, idempotency_key="deploy-1", **other)["state"] == "ACQUIRED"
    assert api.good("POST", "/once/acquire", body, idempotency_key="deploy-1")["state"] == "HELD"


def test_a_session_over_another_transport_has_nothing_to_do_with_one_over_http(api: Api) -> None:
    """Whatever id it chooses: the names of sessions over HTTP can be told by anybody."""
    api.acquire(api.slots(), holder="victim")
    with api.daemon.knock() as looker:
        looker.hello(space=api.space)
        (name,) = [worker.session for worker in looker.ask(wire.StatusGet()).workers if worker.worker == "victim"]
        assert "http" not in name, "it is no name that a hello could give"
        with Raw(api.daemon.socket) as thief:
            thief.hello(session=name, space=api.space)
            thief.ask(wire.Bye())
        assert looker.ask(wire.SlotsGet(pool="gpu")).used == 1


def test_a_key_that_was_revoked_while_a_body_was_on_its_way_gets_nothing(api: Api) -> None:
    secret = api.make_key()
    body = json.dumps({"scopeId": api.run, "key": "work", "holder": "late", "leaseSeconds": 600}).encode()
    head = (
        f"POST /v1/spaces/{api.space}/once/acquire HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\n"
        f"Authorization: Bearer {secret}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE_S) as slow:
        slow.sendall(head + body[:5])
        # Its head has been read by the time that a later connection is answered.
        api.good("GET", f"/scopes/{api.run}")
        revoke(api, secret)
        slow.sendall(body[5:])
        assert b" 401 " in slow.makefile("rb").readline()
    assert not api.daemon.holdings()


def test_a_call_that_waits_is_refused_when_its_key_is_revoked(api: Api) -> None:
    secret, queue = api.make_key(), api.queue()
    body = json.dumps({"scopeId": api.run, "mailboxId": queue, "holder": "late", "waitMs": 20_000}).encode()
    head = (
        f"POST /v1/spaces/{api.space}/tasks/admit HTTP/1.1\r\nHost: 127.0.0.1:{api.port}\r\n"
        f"Authorization: Bearer {secret}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE_S) as waits:
        waits.sendall(head + body)
        api.daemon.waits(1)
        revoke(api, secret)
        assert b" 401 " in waits.makefile("rb").readline()
    api.send(queue, 1)
    assert not api.daemon.holdings()
