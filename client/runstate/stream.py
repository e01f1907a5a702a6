"""One connected socket: frames out without blocking, frames in.

A write that ends in an exception (Ctrl-C in the middle of a frame) leaves half a frame behind, a read that ends in one
may have lost bytes: then ``cut`` ends the connection, which is made anew and loses nothing.
"""

from __future__ import annotations

import select
import socket
import threading

from . import framing, threads

RECEIVE_BYTES = 64 * 1024
_DONT_WAIT = socket.MSG_DONTWAIT
POLL_MS_MAX = 2**31 - 1  # 24 days: who waits for longer looks again
WRITABLE_MS = 1_000  # between two looks whether a socket that takes nothing has been given up meanwhile


class Stream:
    """The writing methods are called with ``lock`` held; one thread at a time reads."""

    __slots__ = ("_lock", "_socket", "_splitter", "_unsent", "closed")

    def __init__(self, connected: socket.socket, splitter: framing.Splitter, lock: threading.RLock) -> None:
        self._socket = connected
        self._splitter = splitter
        self._lock = lock
        self._unsent = bytearray()
        self.closed = False

    def write(self, data: bytes) -> bool:
        """Sends, or keeps for a thread of its own what the socket does not take now. False: the other side is gone."""
        if self._unsent:
            self._unsent += data
            return True
        try:
            try:
                sent = self._socket.send(data, _DONT_WAIT)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._send_rest(data[sent:])
        except OSError:
            self.cut()
            return False
        except BaseException:
            self.cut()
            raise
        return True

    def _send_rest(self, data: bytes) -> None:
        self._unsent += data
        if threads.start(threading.Thread(target=self._flush, name="runstate-writer", daemon=True)):
            self._unsent.clear()  # nobody but us can do it
            self._socket.sendall(data)

    def write_now(self, data: bytes) -> None:
        """Sends if the socket takes it at once; without the lock, and without a word if not. For the end."""
        if not self._unsent:
            try:
                self._socket.send(data, _DONT_WAIT)
            except OSError:
                pass  # the kernel tells the daemon anyway

    def wait(self, seconds: float | None) -> bool:
        """Whether there is something to take in time. Several threads may wait; others decide which of them takes it.

        A thread that blocks in ``recv`` is woken twice on a Unix socket: when the daemon takes our request, too."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except (OSError, ValueError):
            return True  # closed: recv says so
        return bool(poll.poll(None if seconds is None else min(max(0.0, seconds) * 1000, POLL_MS_MAX)))

    def take(self) -> list[tuple[int, bytes]] | None:
        """The frames that have come, without waiting; None when the connection has ended."""
        try:
            data = self._socket.recv(RECEIVE_BYTES, _DONT_WAIT)
            return self._splitter.feed(data) if data else None
        except BlockingIOError:
            return []
        except (OSError, framing.FrameError):
            return None

    def cut(self) -> None:
        """Ends the connection; whoever reads sees it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def close(self) -> None:
        """Closes the descriptor: without a shutdown, so that a forked child can drop its copy."""
        self.closed = True
        self._socket.close()

    def _flush(self) -> None:
        while True:
            try:
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(WRITABLE_MS)
            except (OSError, ValueError):
                return  # closed
            with self._lock:
                if self.closed:
                    return
                try:
                    del self._unsent[: self._socket.send(self._unsent[:RECEIVE_BYTES], _DONT_WAIT)]
                except BlockingIOError:
                    continue
                except OSError:
                    self.cut()
                    return
                if not self._unsent:
                    return
