"""Numbers: tokens, ids, events, arrivals. None is given twice in a database, though some may be skipped."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

SECRETS = ("ticket_secret", "lease_secret")  # 62 random bits each, kept beside the counters
BOOT, CLEAN = "boot", "clean"  # kept beside the counters: which boot wrote last, and whether it has stopped in order
NOT_LIFTED = ("epoch", BOOT, CLEAN, *SECRETS)
LIFT = 100_000  # numbers that are left out after a power cut ...
UNSYNCED_MAX = LIFT // 2  # ... which are more than are ever given without being on disk


@dataclass(slots=True)
class Numbers:
    """The counters of a database, shared by all its spaces. ``changed``: those that the next commit writes.
    ``unsynced``: how many numbers were given since the last sync. ``instance``: the database's own short name, the
    suffix of all its ids. ``oldest_event``: the first that is kept; 0 where there is none.
    """

    instance: str
    last: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    oldest_event: int = 0
    unsynced: int = 0
    _key: bytes = b""

    def next(self, counter: str) -> int:
        value = self.last[counter] = self.last.get(counter, 0) + 1
        self.changed.add(counter)
        self.unsynced += 1
        return value

    def lift(self, by: int) -> None:
        """Leaves out so many numbers, which may have been given before and not be on this disk."""
        for counter in self.last:
            if counter not in NOT_LIFTED:
                self.last[counter] += by
                self.changed.add(counter)

    def make_secrets(self) -> None:
        """What proofs are made with, once for each database."""
        for name in SECRETS:
            if name not in self.last:
                self.last[name] = secrets.randbits(62) | 1
                self.changed.add(name)
        self._key = b"".join(self.last[name].to_bytes(8, "big") for name in SECRETS)

    def secret_of(self, token: int) -> str:
        """The 64 bits, in hexadecimal digits, that prove a hold from another session: only this database gives them for
        this token, and always the same, so that an answer can be given once more."""
        return hashlib.blake2b(token.to_bytes(8, "big"), key=self._key, digest_size=8).hexdigest()

    def begin(self, boot: str) -> bool:
        """A life of the daemon begins in this boot of the machine ("": not known). Whether the last one ended with its
        machine, as far as that is known: then numbers may have been given that are not on this disk, and some are left
        out."""
        number = int.from_bytes(hashlib.blake2b(boot.encode(), digest_size=8).digest(), "big") >> 2 | 1
        may_be_another = not boot or self.last.get(BOOT, number) != number
        was_cut = BOOT in self.last and not self.last.get(CLEAN) and may_be_another
        if was_cut:
            self.lift(LIFT)
        self.last[BOOT], self.last[CLEAN] = number, 0
        self.changed |= {BOOT, CLEAN}
        return was_cut

    def end(self) -> None:
        """It ends in good order: all that was given is on disk."""
        self.last[CLEAN] = 1
        self.changed.add(CLEAN)
