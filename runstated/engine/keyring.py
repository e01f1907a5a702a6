"""The keys in memory: asked at every hello over TCP and at every HTTP request, changed only after a commit."""

import hashlib
import hmac
from collections.abc import Iterable

from runstated.domain.access import Access, StoredKey


class Keyring:
    """See the module."""

    def __init__(self) -> None:
        self._keys: dict[str, StoredKey] = {}

    def replace(self, keys: Iterable[StoredKey]) -> None:
        """What the database says now."""
        self._keys = {key.id: key for key in keys}

    def find(self, secret: str) -> Access | None:
        """What a secret gives access to; None for one that is not known or revoked."""
        key = self._find(secret)
        return Access(key.space, key.permissions, key.id) if key is not None and not key.is_revoked else None

    def refusal(self, secret: str | None) -> str:
        """Why a secret gives no access, for who shows it. That a key is revoked is told only to who has its secret."""
        if not secret:
            return "a key is needed here: make one with `runstate keys create` and set RUNSTATE_API_KEY"
        key = self._find(secret)
        if key is None:
            return "the key is not one of this daemon's: see `runstate keys list`, and check RUNSTATE_API_KEY"
        return f"the key {key.id} was revoked"

    def is_live(self, key: str) -> bool:
        """Whether there is a key of that id that is not revoked. The owner's "" always is."""
        return not key or (key in self._keys and not self._keys[key].is_revoked)

    def _find(self, secret: str) -> StoredKey | None:
        kind, _, rest = secret.partition("_")
        key = self._keys.get(rest.partition("_")[0]) if kind == "rsk" else None
        # The comparison takes as long whatever it finds; which ids there are is no secret.
        digest = hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
        return key if key is not None and hmac.compare_digest(key.hash, digest) else None
