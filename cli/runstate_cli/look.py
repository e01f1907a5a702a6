"""Looking at the daemon without changing anything: never starts it, and works while it cannot write.

An onlooker is a session like any other, but it speaks a few frames itself instead of using the client's connection:
that one starts an absent daemon, has threads, and waits for the welcome, which comes only after the session is on disk.
Here a question goes out with the hello, and its answer is enough, so that a full disk hides nothing.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from pathlib import Path
from typing import IO, Any, TypeVar, get_args

import click
import msgspec

from runstate import autostart, errors, framing, greeting, paths, presence, wire

ANSWER_S = 5.0  # a daemon that takes longer to accept or to answer is reported as not answering
RECEIVE_BYTES = 256 * 1024

R = TypeVar("R")

URL_VARIABLE = "RUNSTATE_BASE_URL"
SPACE_VARIABLE = "RUNSTATE_SPACE_ID"
KEY_VARIABLE = "RUNSTATE_API_KEY"


class CannotLook(click.ClickException):
    """The daemon cannot be looked at."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"runstate: {self.message}", file=file, err=file is None)


class NotRunning(CannotLook):
    """There is no daemon."""

    exit_code = 3  # as in the init scripts' convention


class Denied(CannotLook):
    """There may be a daemon, and this process may not talk to it."""

    exit_code = 4


def setting(variable: str) -> str | None:
    """An environment variable; blank is nothing."""
    return os.environ.get(variable, "").strip() or None


def reach() -> socket.socket:
    """A socket to the daemon that the environment names, else to this user's. Raises CannotLook."""
    deadline = time.monotonic() + ANSWER_S
    url = (setting(URL_VARIABLE) or "").rstrip("/")
    try:
        if not url:
            target = autostart.default_target()
            found = autostart.find(target, deadline=deadline)
            if found is None:
                raise _absent(target)
        elif url.startswith("unix:///"):
            found = autostart.knock(paths.fit(Path(url.removeprefix("unix://"))), deadline=deadline)
            if found is None:
                raise NotRunning(f"runstated is not running: nothing listens on {url}")
        else:
            found = autostart.dial(url, deadline=deadline)
    except errors.RunstateError as error:
        raise _kind(error)(str(error)) from error
    return found


def _absent(target: autostart.Target) -> CannotLook:
    holder = autostart.holder_of(target)
    if holder is not None and not holder.socket:
        return NotRunning(f"runstated (pid {holder.pid}) is starting and does not listen yet")
    if holder is not None:
        return CannotLook(f"runstated (pid {holder.pid}) runs, but nothing listens on {holder.socket}")
    message = f"runstated is not running (nothing listens on {target.socket})"
    if presence.is_marked_stopped(target.stopped):
        message += "; it was stopped with `runstated stop`: run `runstated start`"
    return NotRunning(message)


def _kind(error: errors.RunstateError) -> type[CannotLook]:
    """Which no this is, by what the kernel said."""
    cause = error.__cause__
    if not isinstance(cause, OSError):
        return CannotLook
    if cause.errno in autostart.DENIED:
        return Denied
    return NotRunning if cause.errno == errno.ECONNREFUSED else CannotLook


class Onlooker:
    """One session that only asks. A lost connection is made anew at the next look, as the same session: after a
    restart the daemon waits for the sessions it knew."""

    def __init__(self, space: str | None = None) -> None:
        self.session = os.urandom(8).hex()
        self._address = greeting.Address(
            url=None,  # of no use here: see reach
            space=space or setting(SPACE_VARIABLE) or "default",
            key=setting(KEY_VARIABLE),
            worker=None,
            timeout_s=ANSWER_S,
            retries=0,
        )
        self._socket: socket.socket | None = None
        self._splitter = framing.Splitter()
        self._hello_id = self._last_id = 0

    def look(self, limit: int) -> wire.StatusView:
        """The status without this onlooker. Raises CannotLook."""
        return self._without_me(self.ask(wire.StatusGet(limit=limit)))

    def ask(self, request: wire.Request[R]) -> R:
        """The answer to a request. Raises CannotLook."""
        try:
            return self._ask(request)
        except TimeoutError:
            self._drop()
            raise CannotLook(f"runstated did not answer within {ANSWER_S:g} s") from None
        except (OSError, framing.FrameError, msgspec.MsgspecError) as error:
            self._drop()
            raise CannotLook(f"the connection to runstated failed: {error}") from error
        except BaseException:
            self._drop()  # a question without its answer: the stream is of no use
            raise

    def wait(self, seconds: float) -> None:
        """Until the time is over or, with a connection, the daemon ends it."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._socket is None:
                time.sleep(left)
            elif select.select([self._socket], [], [], left)[0] and not self._is_alive(self._socket):
                self._drop()
                return

    def _is_alive(self, sock: socket.socket) -> bool:
        """Takes in what has come: a push, which is of no interest here, or the end."""
        try:
            data = sock.recv(RECEIVE_BYTES)
            self._splitter.feed(data)
        except (OSError, framing.FrameError):
            return False
        return bool(data)

    def close(self) -> None:
        """Ends the session in good order, without waiting."""
        if self._socket is not None:
            try:
                self._socket.send(framing.pack(0, wire.encode(wire.Bye())), socket.MSG_DONTWAIT)
            except OSError:
                pass  # the kernel tells the daemon anyway
        self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, request: wire.Request[R]) -> R:
        frames = b""
        if self._socket is None:
            self._socket = reach()
            self._splitter = framing.Splitter()
            frames = self._frame(greeting.hello(self._address, self.session, ()))
            self._hello_id = self._last_id
            if not request.reads:  # what changes something must come after the welcome
                self._exchange(self._socket, frames, wire.Welcome)
                frames = b""
        replies: type[R] = get_args(type(request).__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return self._exchange(self._socket, frames + self._frame(request), replies)

    def _exchange(self, connected: socket.socket, frames: bytes, wanted: type[R]) -> R:
        """Sends, and waits for a reply of that kind."""
        connected.settimeout(ANSWER_S)
        connected.sendall(frames)
        deadline = time.monotonic() + ANSWER_S
        while True:
            connected.settimeout(max(0.01, deadline - time.monotonic()))
            data = connected.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("runstated closed it")
            for request_id, body in self._splitter.feed(data):
                reply = self._answer(request_id, body)
                if isinstance(reply, wanted):
                    return reply

    def _frame(self, request: wire.Request[Any]) -> bytes:
        self._last_id += 1
        return framing.pack(self._last_id, wire.encode(request))

    def _answer(self, request_id: int, body: bytes) -> wire.Reply | None:
        """The reply, if this frame is one. Raises CannotLook for a refusal."""
        if request_id not in (0, self._hello_id, self._last_id):
            return None
        try:
            reply: wire.Reply = wire.decode_reply(body)
        except msgspec.ValidationError:
            if request_id == 0:
                return None  # a push
            raise
        if isinstance(reply, wire.Error):
            if reply.code == "NOT_FOUND":
                raise CannotLook(reply.message)
            kind = Denied if reply.code in ("FORBIDDEN", "UNAUTHENTICATED") else CannotLook
            raise kind(f"runstated refuses to be looked at: {reply.message}")
        return reply

    def _without_me(self, view: wire.StatusView) -> wire.StatusView:
        """Who looks is no part of the picture."""
        mine = wire.shown_session(self.session)
        others = tuple(worker for worker in view.workers if worker.session != mine)
        daemon = view.daemon
        if daemon is not None:
            daemon = msgspec.structs.replace(daemon, sessions=max(0, daemon.sessions - 1))
        return msgspec.structs.replace(view, workers=others, daemon=daemon)
