"""The life of a client: it works until the power fails, and comes back if it is not on that machine."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable

from tests.power.book import Book
from tests.power.speaker import CutOff

PATIENCE_S = 60


class Life:
    """``go`` until the cut; ``come_back`` after it, if it has survived that; and again."""

    def __init__(self, name: str, book: Book) -> None:
        self.name, self.book = name, book
        self.pause_s = 0.0  # the longest between two requests
        self._thread: threading.Thread | None = None

    def go(self) -> None:
        self._thread = threading.Thread(target=self._guarded, args=(self._work,), name=self.name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until it has noticed the cut, or is back."""
        assert self._thread is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.name} hangs"

    def come_back(self) -> None:
        """Begins to; ``join`` waits for it."""
        self._thread = threading.Thread(target=self._guarded, args=(self._come_back,), name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives up what it has open."""

    def _work(self) -> None:
        try:
            while True:
                self._act()
                time.sleep(self.pause_s * random.random())
        except CutOff:
            pass

    def _guarded(self, work: Callable[[], None]) -> None:
        """What goes wrong is in the book."""
        try:
            work()
        except BaseException:
            self.book.blame(f"{self.name}: {traceback.format_exc()}")

    def _act(self) -> None:
        """One thing to do. Raises CutOff."""
        raise NotImplementedError

    def _come_back(self) -> None:
        """Looks whether what it was given is still its own."""
        raise NotImplementedError
