"""What only the published SDK before 0.3 asks for, as far as it is one of our nouns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.test_http import Api
from tests.e2e.test_http import api as api
from tests.e2e.test_http import served as served


def body(api: Api, **more: Any) -> dict[str, Any]:
    return {"scopeId": api.run, "holder": "w", "holderSession": "s", **more}


def test_a_claim_is_held_by_one_renewed_and_given_back(api: Api) -> None:
    wanted = body(api, key="doc/1", leaseSeconds=30)
    first = api.good("POST", "/claims", wanted)
    api.refused(409, "CLAIM_HELD", "POST", "/claims", wanted)
    assert api.good("POST", "/claims", body(api, key="doc/2"))["token"] != first["token"]
    renewed = api.good("POST", "/claims/doc%2F1/renew", {"token": first["token"], "leaseSeconds": 60})
    assert renewed["leaseExpiresAt"] > first["leaseExpiresAt"]
    api.good("POST", "/claims/doc%2F1/release", {"token": first["token"], "observation": {"seen": 1}})
    api.refused(409, "STALE_CLAIM", "POST", "/claims/doc%2F1/release", {"token": first["token"]})
    second = api.good("POST", "/claims", wanted)
    assert second["generation"] > first["generation"]


def test_a_claim_is_no_once_key_of_the_same_name(api: Api) -> None:
    api.good("POST", "/claims", body(api, key="k"))
    assert api.good("POST", "/once/acquire", body(api, key="k"))["state"] == "ACQUIRED"


def test_resources_are_created_with_all_their_sizes_and_other_sizes_are_a_conflict(api: Api) -> None:
    for path, sizes, other in (
        ("/permits", {"units": 2}, {"units": 3}),
        ("/allowances", {"unitsLimit": 2, "windowSeconds": 60}, {"unitsLimit": 2, "windowSeconds": 61}),
        ("/budgets", {"limitMinor": "500", "currency": "USD", "scale": 2}, {"limitMinor": "501"}),
        ("/mailboxes", {"mode": "INBOX"}, {"maxAttempts": 2}),
    ):
        made = api.good("POST", path, {"name": "x/y", **sizes})
        assert made["name"] == "x/y"
        assert {name: made[name] for name in sizes} == sizes
        assert api.good("POST", path, {"name": "x/y", **sizes})["id"] == made["id"]
        api.refused(409, "CONFLICT", "POST", path, {"name": "x/y", **sizes, **other})
        assert api.good("PUT", f"{path}/by-name/x%2Fy", {})["id"] == made["id"]
    assert api.good("POST", "/permits", {"name": "x/y", "units": 2})["unitsTotal"] == 2


def test_units_are_consumed_without_waiting(api: Api) -> None:
    limit = api.good("POST", "/allowances", {"name": "calls", "unitsLimit": 3, "windowSeconds": 86_400})["id"]
    took = api.good("POST", f"/allowances/{limit}/consume", body(api, units=2))
    assert (took["units"], took["remaining"]) == (2, 1)
    message = api.refused(429, "ALLOWANCE_EXHAUSTED", "POST", f"/allowances/{limit}/consume", body(api, units=2))
    assert "calls" in message
    waited = api.good("POST", f"/allowances/{limit}/wait", body(api, units=1))
    assert (waited["state"], waited["consumptionId"]) == ("GRANTED", waited["waiterId"])
    assert api.good("GET", f"/allowance-waiters/{waited['waiterId']}")["consumptionId"] == waited["waiterId"]


def test_messages_are_put_received_and_completed(api: Api) -> None:
    box = api.good("POST", "/mailboxes", {"name": "in"})["id"]
    wanted = body(api, waitMs=0)
    assert api.call("POST", f"/mailboxes/{box}/recv", wanted) == (204, None)
    put = [api.good("POST", f"/mailboxes/{box}/messages", {"scopeId": api.run, "payload": n}) for n in (1, 1)]
    same = [
        api.good("POST", f"/mailboxes/{box}/messages", {"scopeId": api.run, "payload": 2, "workKey": "k"})["id"]
        for _ in range(2)
    ]
    assert put[0]["id"] != put[1]["id"]
    assert same[0] == same[1]
    got = api.good("POST", f"/mailboxes/{box}/recv", wanted)
    assert got["message"] == {"id": put[0]["id"], "payload": 1, "attempt": 1, "scopeId": api.run}
    api.good("POST", f"/messages/{put[0]['id']}/renew", {"token": got["token"], "leaseSeconds": 30})
    api.good("POST", f"/messages/{put[0]['id']}/complete", {"token": got["token"]})
    assert api.good("GET", f"/tasks/{put[0]['id']}")["state"] == "SUCCEEDED"
    assert api.good("POST", f"/mailboxes/{box}/recv", wanted)["message"]["id"] == put[1]["id"]


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        ("/mailboxes", {"name": "q", "backlogLimit": 3}, "backlogLimit"),
        ("/tasks", {"mailboxId": "q", "taskKey": "k", "deadline": "2030-01-01T00:00:00Z"}, "deadline"),
        ("/tasks", {"mailboxId": "q", "taskKey": "k", "workLimit": "w"}, "workLimit"),
        ("/mailboxes/q/messages", {"payload": 1, "deadline": "2030-01-01T00:00:00Z"}, "deadline"),
    ],
)
def test_what_we_do_not_have_is_refused_and_not_ignored(api: Api, path: str, more: dict[str, Any], field: str) -> None:
    assert api.refused(400, "VALIDATION_FAILED", "POST", path, {"scopeId": api.run, **more}).startswith(field)


def test_who_follows_a_task_does_not_matter(api: Api) -> None:
    task = api.send(api.queue(), 1)[1]["taskId"]
    for verb in ("join", "detach"):
        seen = api.good("POST", f"/tasks/{task}/{verb}", {"subscriberId": "a", "scopeId": api.run})
        assert (seen["id"], seen["state"]) == (task, "QUEUED")


def test_what_has_no_name_is_the_same_for_a_repeat_and_another_for_all_else(api: Api) -> None:
    timer = {"scopeId": api.run, "afterSeconds": 3_600}
    barrier = {"scopeId": api.run, "target": 2}
    for path, wanted in (("/timers", timer), ("/barriers", barrier), ("/scopes", {})):
        first = api.good("POST", path, wanted, idempotency_key=f"one-{path}")
        assert api.good("POST", path, wanted, idempotency_key=f"one-{path}")["id"] == first["id"]
        others = [api.good("POST", path, wanted, idempotency_key=f"two-{path}"), api.good("POST", path, wanted)]
        assert len({first["id"], *(other["id"] for other in others)}) == 3
    fired = api.good("POST", "/timers", {"scopeId": api.run, "afterSeconds": 0})
    assert fired["state"] == "FIRED"
    api.good("POST", f"/timers/{fired['id']}/ack", {"token": fired["token"]})
    opened = api.good("POST", "/barriers", {"scopeId": api.run, "target": 1})["id"]
    assert api.good("POST", f"/barriers/{opened}/arrive", {"arrivalKey": "a"})["state"] == "RELEASED"
