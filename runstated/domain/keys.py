"""Keys: who may come over TCP or HTTP, into which space, and what they may do there.

    create --> live --revoke--> revoked, for good: its sessions end, and all they held is handed on

The secret is shown once and only its hash is kept. It is 256 random bits, so nobody can try them all, and a plain
SHA-256 is as good as a slow hash, which is for secrets that people think up. Which keys there are is told to the
daemon's keyring after the commit. Only the owner, over the Unix socket, manages keys.
"""

import hashlib

from runstate import wire
from runstated.store.tx import Forbidden, NotFound, Refusal, StoredKey, Tx, ValidationFailed

SCHEMA = """
CREATE TABLE keys (
    id TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT NOT NULL,
    permissions TEXT NOT NULL,
    hash TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    revoked_ms BIGINT
);
"""


class KeyRevoked(Refusal):
    """the key was revoked"""

    code = "UNAUTHENTICATED"


KEYS_MAX = 10_000  # each is in the daemon's memory, also when it is revoked
COLUMNS = "id, space, name, permissions, created_ms, revoked_ms"


def create(tx: Tx, request: wire.KeysCreate) -> wire.KeyCreated:
    """A new key. A repeat makes another one: the secret is kept nowhere, so no answer can be given twice."""
    _owner_only(tx)
    count = tx.one("SELECT count(*) FROM keys")
    if count is not None and count[0] >= KEYS_MAX:
        raise ValidationFailed(f"there are {KEYS_MAX} keys already")
    if not request.permissions:
        raise ValidationFailed(f"a key needs a permission: {', '.join(wire.PERMISSIONS)}")
    key = tx.new_id("k")
    secret = f"rsk_{key}_{tx.random_text()}"
    permissions = tuple(each for each in wire.PERMISSIONS if each in request.permissions)
    tx.run(
        "INSERT INTO keys (id, space, name, permissions, hash, created_ms)"
        " VALUES (:id, :space, :name, :permissions, :hash, :now)",
        id=key,
        space=request.space,
        name=request.name,
        permissions=" ".join(permissions),
        hash=hashlib.sha256(secret.encode()).hexdigest(),
        now=tx.now_ms,
    )
    tx.set_keys(stored(tx))
    return wire.KeyCreated(id=key, secret=secret, space=request.space, permissions=permissions, name=request.name)


def look(tx: Tx, request: wire.KeysList) -> wire.KeyList:
    """All keys, also those that are revoked, oldest first."""
    _owner_only(tx)
    rows = tx.all(f"SELECT {COLUMNS} FROM keys ORDER BY created_ms, id")
    return wire.KeyList(keys=tuple(_view(*row) for row in rows))


def revoke(tx: Tx, request: wire.KeysRevoke) -> wire.KeyList:
    """The key is worth nothing any more; a repeat changes nothing. Its sessions are ended after the commit."""
    _owner_only(tx)
    row = tx.one(
        f"UPDATE keys SET revoked_ms = coalesce(revoked_ms, :now) WHERE id = :id RETURNING {COLUMNS}",
        id=request.key,
        now=tx.now_ms,
    )
    if row is None:
        raise NotFound(f"key {request.key} not found")
    tx.set_keys(stored(tx))
    return wire.KeyList(keys=(_view(*row),))


def stored(tx: Tx) -> tuple[StoredKey, ...]:
    """Every key, as the keyring wants it."""
    rows = tx.all("SELECT id, space, permissions, hash, revoked_ms FROM keys")
    return tuple(
        StoredKey(key, space, frozenset(permissions.split()), digest, revoked_ms is not None)
        for key, space, permissions, digest, revoked_ms in rows
    )


def check_live(tx: Tx) -> None:
    """Raises KeyRevoked for a caller whose key was revoked after the request was let in."""
    key = tx.caller.access.key
    if key and tx.one("SELECT id FROM keys WHERE id = :id AND revoked_ms IS NULL", id=key) is None:
        raise KeyRevoked(f"the key {key} was revoked")


def _owner_only(tx: Tx) -> None:
    if tx.caller.access.key:
        raise Forbidden("keys are managed by the owner of the daemon, over its Unix socket")


def _view(key: str, space: str, name: str, permissions: str, created_ms: int, revoked_ms: int | None) -> wire.KeyView:
    return wire.KeyView(
        id=key,
        space=space,
        name=name,
        permissions=tuple(permissions.split()),
        created_ms=created_ms,
        revoked_ms=revoked_ms,
    )
