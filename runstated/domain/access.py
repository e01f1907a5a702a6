"""Access: what a session may do, and in which space. Given at its hello, by the socket's owner or by a key."""

from dataclasses import dataclass

from runstate.wire import PERMISSIONS

DEFAULT_SPACE = "default"


@dataclass(frozen=True, slots=True)
class Access:
    """``key``: the id of the API key; "" for the owner, who comes over the Unix socket and may do everything."""

    space: str = DEFAULT_SPACE
    permissions: frozenset[str] = frozenset(PERMISSIONS)
    key: str = ""

    def session_name(self, transport: str, session: str) -> str:
        """What the daemon calls the session to which a client gives that id: never the name of one that was opened in
        another space, with another key or over another transport, whatever id it has."""
        return f"{transport}/{len(self.space)}:{self.space}/{self.key}/{session}"

    def may(self, permission: str) -> bool:
        return permission in self.permissions


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as it is kept. ``hash``: the SHA-256 of its secret, in hexadecimal digits."""

    id: str
    space: str
    permissions: frozenset[str]
    hash: str
    is_revoked: bool


OWNER = Access()
