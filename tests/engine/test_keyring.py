"""The keys in memory: what a secret gives access to, and what is said of one that gives none."""

from __future__ import annotations

import hashlib

import pytest

from runstated.domain.access import StoredKey
from runstated.engine.keyring import Keyring

SECRET = "rsk_k1-test_abc_def-1"


@pytest.fixture
def ring() -> Keyring:
    made = Keyring()
    made.replace([key(), key("k2-test", "rsk_k2-test_x", revoked=True)])
    return made


def key(name: str = "k1-test", secret: str = SECRET, *, revoked: bool = False) -> StoredKey:
    return StoredKey(name, "ci", frozenset({"work"}), hashlib.sha256(secret.encode()).hexdigest(), revoked)


def test_a_secret_gives_access_to_its_space(ring: Keyring) -> None:
    access = ring.find(SECRET)
    assert access is not None
    assert (access.space, access.key, access.may("work"), access.may("usage")) == ("ci", "k1-test", True, False)


@pytest.mark.parametrize(
    "secret",
    ["", "rsk", "rsk_", "rsk_k1-test", "rsk_k1-test_", SECRET + "x", SECRET[:-1], "x" + SECRET, "é\ud800", "rsk_k3_x"],
)
def test_anything_else_gives_none_and_a_reason(ring: Keyring, secret: str) -> None:
    assert ring.find(secret) is None
    assert "RUNSTATE_API_KEY" in ring.refusal(secret)


def test_a_revoked_key_is_told_only_to_who_has_its_secret(ring: Keyring) -> None:
    assert ring.find("rsk_k2-test_x") is None
    assert ring.refusal("rsk_k2-test_x") == "the key k2-test was revoked"
    assert "revoked" not in ring.refusal("rsk_k2-test_y")
    assert (ring.is_live(""), ring.is_live("k1-test"), ring.is_live("k2-test")) == (True, True, False)
