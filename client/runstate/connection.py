"""The session: one connection to the daemon, shared by the threads and event loops of one process.

    callers ── register the call, write its frame under a lock ──> socket ──> daemon
    reader thread ── connects, says hello, hands out replies by request id, reconnects <──┘
    heartbeat thread ── renews what is held

A lost connection is not a death: the reader connects again, and sends what is open again under the same ids. A write
that ends in any exception leaves half a frame behind, so it closes the connection, with the same consequence.
"""

from __future__ import annotations

import atexit
import itertools
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from . import autostart, errors, framing, wire
from .calls import Answer, Call, Gate, future_waker
from .holds import Hold, Holds, granted
from .signals import running_loop

if TYPE_CHECKING:
    import asyncio

R = TypeVar("R")

RETRY_S_MIN = 0.02  # between two attempts to reach a daemon that was there a moment ago ...
RETRY_S_MAX = 0.25  # ... doubling up to this
RECEIVE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Address:
    """Where the daemon is and who we are. ``url`` None: this user's own daemon, which is started if need be."""

    url: str | None
    space: str
    key: str | None
    worker: str | None  # None: <hostname>-<pid>
    timeout_s: float
    retries: int


class RunWatch:
    """A run that this session has joined: told when it ends."""

    def __init__(self, run: str, ended: Callable[[errors.StoppedError], None]) -> None:
        self.run = run
        self.ended = ended


class Connection:
    """See the module. ``call`` blocks, ``acall`` does not, ``post`` wants no answer; all from any thread."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        """The state of a session that has not begun: when made, and in a child after fork."""
        self.pid = os.getpid()
        self.session = os.urandom(8).hex()
        self.holds = Holds()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._ids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._acks: list[int] = []
        self._runs: weakref.WeakValueDictionary[str, RunWatch] = weakref.WeakValueDictionary()
        self._reader: threading.Thread | None = None
        self._heart: threading.Thread | None = None

    # ------------------------------------------------------------------ calls

    def call(self, request: wire.Request[R]) -> Answer[R]:
        """Sends a request and waits for its reply, in plain code.

        Raises the mapped error of the daemon's refusal, UnavailableError when the daemon cannot be reached or does not
        answer, and whatever interrupts the wait; then the daemon is told that nobody waits any more.
        """
        before: Call | None = None
        for pause in self._pauses():
            gate = Gate()
            call = self._start(request, gate.open, running_loop(), blocking=True, before=before)
            try:
                if not gate.wait(self._patience(request)):
                    raise self._no_answer(request)
            except BaseException:
                self._abandon(call)
                raise
            try:
                return call.outcome()
            except errors.UnavailableError as error:
                if pause is None or not error.may_retry:
                    raise
            before = call
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def acall(self, request: wire.Request[R]) -> Answer[R]:
        """The same in a coroutine; a cancelled task leaves the connection usable."""
        import asyncio

        loop = asyncio.get_running_loop()
        before: Call | None = None
        for pause in self._pauses():
            future: asyncio.Future[None] = loop.create_future()
            call = self._start(request, future_waker(loop, future), loop, blocking=False, before=before)
            patience = self._patience(request)
            timer = None if patience is None else loop.call_later(patience, self._expire, call)
            try:
                await future
            except BaseException:
                self._abandon(call)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
            try:
                return call.outcome()
            except errors.UnavailableError as error:
                if pause is None or not error.may_retry:
                    raise
            before = call
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _expire(self, call: Call) -> None:
        self._abandon(call)
        call.finish(None, self._no_answer(call.request))

    def post(self, request: wire.Request[Any]) -> None:
        """Sends a request that wants no reply, if there is a connection; never waits, never raises."""
        with self._lock:
            if self._socket is not None:
                self._write(framing.pack(0, wire.encode(request)))

    def watch(self, watch: RunWatch) -> None:
        """``watch.ended`` is called when its run ends, for as long as the object lives."""
        self._runs[watch.run] = watch

    def unwatch(self, run: str) -> None:
        self._runs.pop(run, None)

    def _pauses(self) -> list[float | None]:
        """What to wait after each try that the daemon refused for a reason that may pass; None after the last."""
        return [*(0.1 * 2**n for n in range(self.address.retries)), None]

    def _patience(self, request: wire.Request[Any]) -> float | None:
        """How long to wait for the answer, in seconds: without a limit only where the caller has set none."""
        if isinstance(request, wire.WaitingRequest):
            return None if request.wait_ms is None else request.wait_ms / 1000 + self.address.timeout_s
        return self.address.timeout_s

    def _no_answer(self, request: wire.Request[Any]) -> errors.UnavailableError:
        verb = type(request).__struct_config__.tag
        return errors.UnavailableError(
            f"runstated did not answer {verb} within {self.address.timeout_s:g} s", code="UNAVAILABLE"
        )

    def _start(
        self,
        request: wire.Request[Any],
        wake: Callable[[], Any],
        loop: asyncio.AbstractEventLoop | None,
        *,
        blocking: bool,
        before: Call | None,
    ) -> Call:
        """Registers a call and sends it. ``before``: the same request, tried before, whose outcome is not known."""
        if self.pid != os.getpid():
            self._after_fork()  # a fork that Python did not see
        call = Call(before.request_id if before else next(self._ids), request, wake, loop, blocking=blocking)
        if before is not None:
            call.again, call.ticket = True, before.ticket
        with self._lock:
            self._calls[call.request_id] = call
            if self._socket is not None:
                self._write(self._with_news(framing.pack(call.request_id, call.body())))
                return call
        try:
            self._run_reader(call)
        except BaseException:
            self._abandon(call)
            raise
        return call

    def _abandon(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        with self._lock:
            waiting = self._calls.pop(call.request_id, None)
            answer, call.answer = call.answer, None
            for hold in answer.holds.values() if answer else ():
                hold.release()
            if waiting is not None and self._socket is not None:
                self._write(framing.pack(0, wire.encode(wire.Cancel(call=call.request_id))))

    # ------------------------------------------------------------------ writing (with the lock held)

    def _with_news(self, frame: bytes) -> bytes:
        """Puts before a frame what the daemon should know: kept replies that arrived, tokens given back."""
        if self._acks:
            acks, self._acks = self._acks, []
            frame = framing.pack(0, wire.encode(wire.Ack(calls=tuple(acks)))) + frame
        for token in self.holds.take_given():
            frame = framing.pack(0, wire.encode(wire.Release(token=token))) + frame
        return frame

    def _write(self, data: bytes) -> None:
        """Sends without blocking; what the socket does not take is sent by a thread made for it."""
        sock = self._socket
        if sock is None:
            return
        try:
            if self._unsent:
                self._unsent += data
                return
            sent = _send_some(sock, data)
            if sent < len(data):
                self._unsent += data[sent:]
                _start_thread(lambda: self._flush(sock), "runstate-writer")
        except OSError:
            _break(sock)  # the reader sees it, connects again and sends what is open
        except BaseException:
            _break(sock)
            raise

    def _flush(self, sock: socket.socket) -> None:
        while True:
            poll = select.poll()
            try:
                poll.register(sock, select.POLLOUT)
            except (OSError, ValueError):
                return
            poll.poll(1000)
            with self._lock:
                if self._socket is not sock or not self._unsent:
                    return
                try:
                    del self._unsent[: _send_some(sock, bytes(self._unsent[:RECEIVE_BYTES]))]
                except OSError:
                    _break(sock)
                    return
                if not self._unsent:
                    return

    # ------------------------------------------------------------------ the reader

    def _run_reader(self, call: Call) -> None:
        """Makes sure that somebody connects and reads: a thread, or, where none can be started, the caller."""
        with self._lock:
            if self._reader is not None or call.request_id not in self._calls:
                return
            reader = threading.Thread(target=self._live, name="runstate-reader", daemon=True)
            self._reader = reader
        try:
            reader.start()
        except RuntimeError:  # the interpreter is shutting down
            self._live(until=call)
        except BaseException:
            with self._lock:
                self._reader = None
            raise

    def _live(self, until: Call | None = None) -> None:
        """Connects, reads until the connection ends, and again while anything is open."""
        was_connected = False
        try:
            while True:
                sock, splitter = self._connect(was_connected)
                was_connected = True
                self._read(sock, splitter, until)
                with self._lock:
                    self._drop_socket(sock)
                    if (until is not None and until.request_id not in self._calls) or not (
                        self._calls or self.holds.live()
                    ):
                        self._reader = None
                        return
        except BaseException as error:
            self._give_up(error)

    def _connect(self, again: bool) -> tuple[socket.socket, framing.Splitter]:
        """A connection that has said hello and on which everything open has been sent.

        Raises RunstateError: at once on the first connection, after ``timeout`` on a later one.
        """
        deadline = time.monotonic() + self.address.timeout_s
        pause = RETRY_S_MIN
        while True:
            sock: socket.socket | None = None
            try:
                sock = self._dial(deadline)
                splitter = self._greet(sock, deadline)
                return sock, splitter
            except (errors.UnavailableError, OSError) as error:
                if sock is not None:
                    sock.close()
                if time.monotonic() + pause >= deadline or (not again and isinstance(error, errors.UnavailableError)):
                    raise _unavailable(error) from error
            except BaseException:
                if sock is not None:
                    sock.close()
                raise
            time.sleep(pause)
            pause = min(RETRY_S_MAX, pause * 2)

    def _dial(self, deadline: float) -> socket.socket:
        _refuse_twin()
        if self.address.url is None:
            return autostart.connect(deadline=deadline)
        return autostart.dial(self.address.url, deadline=deadline)

    def _greet(self, sock: socket.socket, deadline: float) -> framing.Splitter:
        """Says hello, waits for the welcome, and sends what is open."""
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        sock.sendall(framing.pack(next(self._ids), wire.encode(self._hello())))
        splitter = framing.Splitter()
        frames: list[tuple[int, bytes]] = []
        while not frames:
            data = sock.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("runstated closed the connection at the hello")
            frames = splitter.feed(data)
        welcome = wire.decode_reply(frames[0][1])
        if isinstance(welcome, wire.Error):
            raise _refused(welcome)
        if not isinstance(welcome, wire.Welcome):
            raise errors.RunstateError(f"runstated answered the hello with {welcome!r}", code="PROTOCOL")
        sock.settimeout(None)
        with self._lock:
            self._socket = sock
            self._unsent.clear()
            self.holds.wake()
            open_calls = [self._calls[request_id] for request_id in sorted(self._calls)]
            frame = b"".join(framing.pack(call.request_id, call.body()) for call in open_calls)
            tokens = self.holds.tokens()
            if tokens:
                frame += framing.pack(0, wire.encode(wire.Beat(tokens=tokens)))
            if frame:
                self._write(self._with_news(frame))
        for ended in welcome.ended:
            self._pushed(ended)
        for request_id, body in frames[1:]:
            self._frame(request_id, body)
        return splitter

    def _hello(self) -> wire.Hello:
        joined = {*self._runs.keys(), *(hold.run for hold in self.holds.live() if hold.run)}
        return wire.Hello(
            protocol=wire.PROTOCOL,
            protocol_min=wire.PROTOCOL_MIN,
            session=self.session,
            worker=self.address.worker or f"{socket.gethostname()}-{os.getpid()}",
            pid=os.getpid(),
            namespace=_namespace(),
            command=" ".join(sys.argv)[:256],
            space=self.address.space,
            key=self.address.key,
            runs=tuple(joined),
        )

    def _read(self, sock: socket.socket, splitter: framing.Splitter, until: Call | None) -> None:
        while until is None or until.request_id in self._calls:
            try:
                data = sock.recv(RECEIVE_BYTES)
            except OSError:
                return
            if not data:
                return
            try:
                for request_id, body in splitter.feed(data):
                    self._frame(request_id, body)
            except framing.FrameError:
                return

    def _frame(self, request_id: int, body: bytes) -> None:
        if request_id == 0:
            try:
                self._pushed(wire.decode_push(body))
            except msgspec.ValidationError:
                pass  # an error about the connection as a whole: it closes next; or a push of a newer daemon
            return
        reply = wire.decode_reply(body)
        with self._lock:
            call = self._calls.pop(request_id, None)
            if call is None:
                return  # its caller has gone; the daemon was told
            if reply.kept and call.request.replayed and not isinstance(reply, wire.OnceGranted | wire.JobsGranted):
                self._acks.append(request_id)
        if isinstance(reply, wire.Error):
            call.finish(None, _refused(reply))
            return
        holds = granted(self.holds, call.request, reply, None if call.blocking else call.loop)
        if holds:
            self._run_heart()
            if isinstance(reply, wire.JobsGranted):
                self._refuse_blocked(call.loop, {job.job for job in reply.jobs})
        call.finish(Answer(reply, holds))

    def _pushed(self, push: wire.AnyPush) -> None:
        if isinstance(push, wire.Parked):
            self._parked(push)
        elif isinstance(push, wire.LeaseLost):
            hold = self.holds.get(push.token)
            if hold is not None:
                hold.lose(errors.LeaseLostError(f"the hold on the work is lost: {push.reason}", code="LEASE_LOST"))
        elif isinstance(push, wire.RunEnded):
            error = errors.StoppedError(
                push.message, code="DEADLINE_EXCEEDED" if push.state == "expired" else "SCOPE_CANCELLED", status=409
            )
            for hold in self.holds.live():
                if hold.run == push.run:
                    hold.signal._set(error)
            watch = self._runs.pop(push.run, None)
            if watch is not None:
                watch.ended(error)
        # Reconnect: the daemon closes the connection next; the reader does the rest.

    # ------------------------------------------------------------------ waits that would block their own loop

    def _parked(self, push: wire.Parked) -> None:
        call = self._calls.get(push.call)
        if call is None:
            return
        call.ticket = push.ticket
        if call.blocking and call.loop is not None:
            for token in push.behind:
                hold = self.holds.get(token)
                if hold is not None and hold.loop is call.loop:
                    self._refuse_blocking(call)
                    return

    def _refuse_blocked(self, loop: asyncio.AbstractEventLoop | None, jobs: set[str]) -> None:
        """Jobs were given to a task of ``loop``: a blocking call in its thread must not wait for one of them."""
        for call in list(self._calls.values()):
            if call.blocking and call.loop is not None and call.loop is loop:
                request = call.request
                if isinstance(request, wire.QueuesResult) and request.job in jobs:
                    self._refuse_blocking(call)

    def _refuse_blocking(self, call: Call) -> None:
        self._abandon(call)
        call.finish(
            None,
            errors.ConfigError(
                "this blocking call would wait for a task of the event loop that it blocks: use the async form"
                " (await ...) here, or make the call in a thread"
            ),
        )

    # ------------------------------------------------------------------ the end of a connection

    def _drop_socket(self, sock: socket.socket) -> None:
        if self._socket is sock:
            self._socket = None
            self._unsent.clear()
        sock.close()

    def _give_up(self, error: BaseException) -> None:
        """The daemon cannot be reached: every open call fails, every hold counts as lost."""
        with self._lock:
            if self._socket is not None:
                self._drop_socket(self._socket)
            self._reader = None
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.finish(None, _copy(error))
        lost = error if isinstance(error, errors.RunstateError) else _unavailable(error)
        for hold in self.holds.live():
            hold.lose(lost)
        if not isinstance(error, Exception):
            raise error

    def retire(self) -> None:
        """Its clients are gone: the session ends, unless something in it is still open."""
        if not self._calls and not self.holds.live():
            self.close()

    def close(self) -> None:
        """Ends the session in good order, without waiting and without a lock: also at exit, also in a finaliser."""
        sock = self._socket
        if sock is not None and self.pid == os.getpid() and not self._unsent:
            try:
                sock.send(framing.pack(0, wire.encode(wire.Bye())), socket.MSG_DONTWAIT)
            except OSError:
                pass  # the kernel tells the daemon anyway

    # ------------------------------------------------------------------ heartbeat

    def _run_heart(self) -> None:
        with self._lock:
            if self._heart is None:
                self._heart = _start_thread(self._beat, "runstate-heartbeat")

    def _beat(self) -> None:
        holds = self.holds
        while holds is self.holds:
            due = holds.wait()
            with self._lock:
                if holds is not self.holds or self._socket is None:
                    continue
                tokens = holds.tokens() if due else ()
                news = self._with_news(b"")
                if tokens:
                    news += framing.pack(0, wire.encode(wire.Beat(tokens=tokens)))
                if news:
                    self._write(news)

    # ------------------------------------------------------------------ fork

    def _after_fork(self) -> None:
        """In a child: the copy of the descriptor is closed (no shutdown, the parent goes on), nothing is inherited."""
        sock = self._socket
        self._reset()
        if sock is not None:
            sock.close()


def _refused(error: wire.Error) -> errors.RunstateError:
    mapped = errors.map_error(error.code, errors.STATUSES.get(error.code, 0), error.message)
    mapped.run = error.run
    mapped.may_retry = error.retryable
    return mapped


def _unavailable(error: BaseException) -> errors.RunstateError:
    if isinstance(error, errors.RunstateError):
        return error
    return errors.UnavailableError(f"the connection to runstated failed: {error}", code="UNAVAILABLE")


def _copy(error: BaseException) -> BaseException:
    """An error of its own for each caller: tracebacks must not pile up on one object."""
    if isinstance(error, errors.RunstateError):
        copied = errors.map_error(error.code, error.status, error.message)
        return copied if type(copied) is type(error) else error
    return _unavailable(error)


def _send_some(sock: socket.socket, data: bytes) -> int:
    try:
        return sock.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def _break(sock: socket.socket) -> None:
    """Ends a connection in whose stream half a frame may stand; the reader's recv returns."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is broken already


def _start_thread(work: Callable[[], None], name: str) -> threading.Thread | None:
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down: the kernel will tell the daemon
        return None
    return thread


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_twin_looked_for = False


def _refuse_twin() -> None:
    """The hosted service's package has our import name: half of it and half of us would be imported.

    Raises ConfigError when it is installed beside us.
    """
    global _twin_looked_for
    if _twin_looked_for:
        return
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for directory in dict.fromkeys((here, *sys.path)):
        try:
            names = os.listdir(directory or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("runstate_sdk-") and name.endswith((".dist-info", ".egg-info")):
                raise errors.ConfigError(
                    f"runstate-sdk is installed in {directory} beside runstated, and both are imported as `runstate`:"
                    " run `pip uninstall runstate-sdk`, then `pip install --force-reinstall runstated`"
                )
    _twin_looked_for = True


_all: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forked() -> None:
    for connection in list(_all):
        connection._after_fork()


def _exit() -> None:
    for connection in list(_all):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
atexit.register(_exit)

__all__ = ["Address", "Answer", "Connection", "Hold", "RunWatch"]
