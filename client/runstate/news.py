"""What the daemon is told unasked, with the next frame: kept replies that have arrived, tokens given back, cancels.

Nobody answers these. A second one does no harm, so what may have been lost with its connection is sent once more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from . import calls, framing, wire

if TYPE_CHECKING:
    from .holds import Holds

RECENT_MAX = 256  # messages kept to be sent again on the next connection


class News:
    """Of one session. ``acks``: the ids of requests whose kept replies have arrived."""

    def __init__(self, holds: Holds) -> None:
        self.acks: list[int] = []
        self._holds = holds
        self._recent: deque[bytes] = deque(maxlen=RECENT_MAX)

    def __bool__(self) -> bool:
        return bool(self.acks or self._holds.given)

    def one_way(self, request: wire.Request[Any]) -> bytes:
        """The frame of a message that wants no answer."""
        frame = framing.pack(0, wire.encode(request))
        self._recent.append(frame)
        return frame

    def before(self, frame: bytes) -> bytes:
        """The frame behind all that there is to say."""
        if self.acks:
            acks, self.acks = self.acks, []
            frame = calls.acks(acks) + frame
        for token in self._holds.take_given():
            frame = self.one_way(wire.Release(token=token)) + frame
        return frame

    def recent(self) -> bytes:
        """What may have been lost with the last connection."""
        return b"".join(self._recent)
