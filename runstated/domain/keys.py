"""Keys: who may come over TCP or HTTP, into which space, and what they may do there.

    create --> live --revoke--> revoked, for good: its sessions end, and all they held is handed on

The secret is shown once and only its hash is kept. It is 256 random bits, so nobody can try them all, and a plain
SHA-256 is as good as a slow hash, which is for secrets that people think up. Keys are the daemon's: they are objects of
a space of their own (``SPACE``), which no caller is in. Only the owner, over the Unix socket, manages keys.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from runstate import wire
from runstated.domain.access import StoredKey
from runstated.domain.answers import Forbidden, NotFound, Refusal, ValidationFailed
from runstated.domain.core import Core
from runstated.domain.tables import Table

SPACE = ""  # a caller's space has a name
KEYS_MAX = 10_000  # each is in the daemon's memory, also when it is revoked
REQUESTS = (wire.KeysCreate, wire.KeysList, wire.KeysRevoke)


@dataclass(slots=True, eq=False)
class Key:
    """A key. ``permissions``: names, with spaces between. ``hash``: of its secret, in hexadecimal digits."""

    id: str
    space: str
    name: str
    permissions: str
    hash: str
    created_ms: int
    revoked_ms: int | None = None


KEYS = Table("keys", Key, key=("id",))


class KeyRevoked(Refusal):
    """the key was revoked"""

    code = "UNAUTHENTICATED"


def create(core: Core, request: wire.KeysCreate) -> wire.KeyCreated:
    """A new key. A repeat makes another one: the secret is kept nowhere, so no answer can be given twice."""
    _owner_only(core)
    if len(core.live(KEYS)) >= KEYS_MAX:
        raise ValidationFailed(f"there are {KEYS_MAX} keys already")
    if not request.permissions:
        raise ValidationFailed(f"a key needs a permission: {', '.join(wire.PERMISSIONS)}")
    name = core.new_id("k")
    secret = f"rsk_{name}_{secrets.token_urlsafe(32)}"
    permissions = tuple(each for each in wire.PERMISSIONS if each in request.permissions)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    core.put(KEYS, Key(name, request.space, request.name, " ".join(permissions), digest, core.now_ms))
    return wire.KeyCreated(id=name, secret=secret, space=request.space, permissions=permissions, name=request.name)


def look(core: Core, request: wire.KeysList) -> wire.KeyList:
    """All keys, also those that are revoked, oldest first."""
    _owner_only(core)
    keys = sorted(core.live(KEYS).values(), key=lambda key: (key.created_ms, key.id))
    return wire.KeyList(keys=tuple(_view(key) for key in keys))


def revoke(core: Core, request: wire.KeysRevoke) -> wire.KeyList:
    """The key is worth nothing any more; a repeat changes nothing. Its sessions are ended after the commit."""
    _owner_only(core)
    key = core.live(KEYS).get(request.key)
    if key is None:
        raise NotFound(f"key {request.key} not found")
    if key.revoked_ms is None:
        key.revoked_ms = core.now_ms
        core.put(KEYS, key)
    return wire.KeyList(keys=(_view(key),))


def stored(core: Core) -> tuple[StoredKey, ...]:
    """Every key, as the keyring wants it."""
    return tuple(
        StoredKey(key.id, key.space, frozenset(key.permissions.split()), key.hash, key.revoked_ms is not None)
        for key in core.live(KEYS).values()
    )


def is_live(core: Core, key: str) -> bool:
    """Whether there is a key of that id that is not revoked. The owner's "" always is."""
    found = core.live(KEYS).get(key)
    return not key or (found is not None and found.revoked_ms is None)


def _owner_only(core: Core) -> None:
    if core.caller.access.key:
        raise Forbidden("keys are managed by the owner of the daemon, over its Unix socket")


def _view(key: Key) -> wire.KeyView:
    return wire.KeyView(
        id=key.id,
        space=key.space,
        name=key.name,
        permissions=tuple(key.permissions.split()),
        created_ms=key.created_ms,
        revoked_ms=key.revoked_ms,
    )
