"""Keys: made and revoked by the owner; the secret is shown once, and only its hash is kept."""

from __future__ import annotations

import hashlib

import pytest

from runstate import wire
from runstated.domain import keys
from runstated.domain.access import Access
from tests.harness import Client, Harness

MAKE = wire.KeysCreate(space="ci", permissions=("usage", "work"), name="note")


@pytest.fixture
def owner(h: Harness) -> Client:
    return h.session("owner")


def test_create_gives_a_secret_that_is_nowhere_in_the_database(h: Harness, owner: Client) -> None:
    made = owner.ask(MAKE)
    assert (made.id, made.space, made.permissions, made.name) == ("k1-test", "ci", ("work", "usage"), "note")
    assert made.secret.startswith("rsk_k1-test_")
    assert len(made.secret.removeprefix("rsk_k1-test_")) >= 43, "256 bits"
    (digest,) = h.rows("SELECT hash FROM keys")[0]
    assert digest == hashlib.sha256(made.secret.encode()).hexdigest()
    assert made.secret not in "".join(h.connection.iterdump())


def test_two_keys_differ(owner: Client) -> None:
    assert owner.ask(MAKE).secret != owner.ask(MAKE).secret


def test_list_shows_all_and_no_secret(h: Harness, owner: Client) -> None:
    made = owner.ask(MAKE)
    owner.ask(wire.KeysRevoke(key=made.id))
    other = owner.ask(MAKE)
    seen = owner.ask(wire.KeysList()).keys
    assert [(key.id, key.revoked_ms is None) for key in seen] == [(made.id, False), (other.id, True)]
    assert made.secret not in repr(seen)


def test_revoke_is_for_good_and_a_repeat_changes_nothing(h: Harness, owner: Client) -> None:
    made = owner.ask(MAKE)
    first = owner.ask(wire.KeysRevoke(key=made.id))
    h.pass_ms(5_000)
    assert owner.ask(wire.KeysRevoke(key=made.id)) == first
    assert [key.is_revoked for key in keys.stored(h.core(keys.SPACE))] == [True]
    owner.refused("NOT_FOUND", wire.KeysRevoke(key="k9-none"))


@pytest.mark.parametrize("request_", [MAKE, wire.KeysList(), wire.KeysRevoke(key="k1-test")])
def test_only_the_owner_manages_keys(h: Harness, request_: wire.Request[object]) -> None:
    h.session("k", access=Access(key="k7-test")).refused("FORBIDDEN", request_)


def test_a_key_without_permissions_is_refused(owner: Client) -> None:
    owner.refused("VALIDATION_FAILED", wire.KeysCreate(permissions=()))


def test_a_revoked_key_gets_nothing_from_the_same_batch_on(h: Harness) -> None:
    """Neither what was let in before, nor what waits and comes up behind the revocation."""
    owner = h.session("owner")
    run = owner.ask(wire.RunsJoin(name="job")).run
    key = owner.ask(wire.KeysCreate(permissions=("work",))).id
    late = h.session("late", access=Access(permissions=frozenset(("work",)), key=key))
    held = owner.ask(wire.SlotsAcquire(run=run, pool="gpu", max=1))
    waits = late.waits(wire.SlotsAcquire(run=run, pool="gpu"))
    requests = [
        owner.request(wire.KeysRevoke(key=key)),
        late.request(wire.OnceAcquire(run=run, key="k")),
        late.request(wire.Release(token=held.token, secret=held.secret)),
        owner.request(wire.Release(token=held.token)),
    ]
    h.run(*(request.client.entry(request) for request in requests))
    assert [request.reply.code for request in (*requests[1:3], waits)] == ["UNAUTHENTICATED"] * 3
    assert requests[3].reply == wire.Released(held=True)
    assert not h.held()
