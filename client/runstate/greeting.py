"""The start of a connection: where the daemon is, who we are, and that no other package has our name."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from . import autostart, awake, command_line, errors, framing, wire
from .calls import unavailable
from .stream import RECEIVE_BYTES

S = TypeVar("S")

RETRY_S_MIN = 0.02  # between two attempts to reach a daemon that was there a moment ago ...
RETRY_S_MAX = 0.25  # ... doubling up to this


@dataclass(frozen=True)
class Address:
    """Where the daemon is and who we are. ``url`` None: this user's own daemon, which is started if need be.

    ``worker`` None: ``<hostname>-<pid>``. ``timeout_s``: for one request, and for getting a connection back.
    """

    url: str | None
    space: str
    key: str | None
    worker: str | None
    timeout_s: float
    retries: int

    @property
    def is_remote(self) -> bool:
        return self.url is not None and not self.url.startswith("unix://")


def reach(
    address: Address,
    greet: Callable[[socket.socket, float], S],
    *,
    is_wanted: Callable[[], bool],
    was_there: Callable[[], bool],
    may_start: Callable[[], bool],
) -> S:
    """What ``greet`` makes of a connected socket. Raises RunstateError: at once where the daemon was not there a moment
    ago, else after ``timeout``. That begins when it is wanted first."""
    deadline = time.monotonic() + address.timeout_s
    pause = RETRY_S_MIN
    wanted = slept = False
    while True:
        if not wanted and is_wanted():
            wanted, deadline = True, time.monotonic() + address.timeout_s
        connected: socket.socket | None = None
        try:
            connected = dial(address, deadline, may_start=may_start())
            return greet(connected, deadline)
        except (errors.UnavailableError, OSError) as error:
            if connected is not None:
                connected.close()
            if isinstance(error, ConnectionResetError):  # at the hello
                _refuse_plain(address)
            now = time.monotonic()
            if not slept and now > deadline + awake.ASLEEP_S:  # this process slept, and with it perhaps the daemon
                slept, deadline = True, now + address.timeout_s
                continue
            hopeless = isinstance(error, errors.UnavailableError) and not (was_there() or error.may_retry)
            if hopeless or now + pause >= deadline:
                raise unavailable(error) from error
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        time.sleep(pause)
        pause = min(RETRY_S_MAX, pause * 2)


def dial(address: Address, deadline: float, *, may_start: bool = True) -> socket.socket:
    """A connected socket. Raises UnavailableError or ConfigError."""
    _refuse_twin()
    if address.url is None and not may_start:
        connected = autostart.find(autostart.default_target(), deadline=deadline)
        if connected is None:
            raise errors.UnavailableError("runstated is not running", code="UNAVAILABLE")
        return connected
    if address.url is None:
        return autostart.connect(deadline=deadline)
    return autostart.dial(address.url, deadline=deadline)


def greet(
    connected: socket.socket, hello: wire.Hello, request_id: int, deadline: float
) -> tuple[wire.Welcome, framing.Splitter, list[tuple[int, bytes]]]:
    """Says hello and waits for the welcome; also gives the frames that came before it (what was open in a session that
    comes back has gone on meanwhile) or right behind it.

    Raises the mapped error of a refusal, OSError when the connection ends.
    """
    connected.settimeout(max(0.1, deadline - time.monotonic()))
    connected.sendall(framing.pack(request_id, wire.encode(hello)))
    splitter = framing.Splitter()
    frames: list[tuple[int, bytes]] = []
    reply: wire.Reply | None = None
    while reply is None:
        data = connected.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("runstated closed the connection at the hello")
        for number, body in splitter.feed(data):
            if reply is None and number in (request_id, 0):
                reply = _answer_to_hello(number, body)
                if reply is not None:
                    continue
            frames.append((number, body))
    if isinstance(reply, wire.Error):
        raise refused(reply)
    if not isinstance(reply, wire.Welcome):
        raise errors.RunstateError(f"runstated answered the hello with {reply!r}", code="PROTOCOL")
    connected.settimeout(None)
    return reply, splitter, frames


def _answer_to_hello(number: int, body: bytes) -> wire.Reply | None:
    """None for a push. Who is refused before the hello was read is told so under the id 0."""
    try:
        reply: wire.Reply = wire.decode_reply(body)
    except msgspec.ValidationError:
        if number:
            raise
        return None
    return reply


def hello(address: Address, session: str, runs: Iterable[str]) -> wire.Hello:
    """Who we are."""
    return wire.Hello(
        protocol=wire.PROTOCOL,
        protocol_min=wire.PROTOCOL_MIN,
        session=session,
        worker=address.worker or f"{socket.gethostname()}-{os.getpid()}",
        pid=os.getpid(),
        command=command_line.shown(),
        space=address.space,
        key=address.key,
        runs=tuple(dict.fromkeys(runs))[: wire.RUNS_MAX],
    )


def refused(error: wire.Error) -> errors.RunstateError:
    """The exception for a refusal of the daemon."""
    mapped = errors.map_error(error.code, errors.STATUSES.get(error.code, 0), error.message)
    mapped.run = error.run
    mapped.may_retry = error.retryable
    return mapped


def _refuse_plain(address: Address) -> None:
    """Raises ConfigError where the port expects TLS, which closes connections that do without."""
    if address.url is not None and address.url.startswith("tcp://"):
        from . import remote

        if remote.speaks_tls(address.url):
            raise errors.ConfigError(f"{address.url} expects TLS: write tls:// in base_url instead of tcp://")


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
                    f" run `pip uninstall runstate-sdk`, then install runstated again {_origin()}"
                )
    _twin_looked_for = True


def _origin() -> str:
    """Where this package was installed from, as far as that is written down: no index is ours."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("runstated").read_text("direct_url.json")
        url = json.loads(text)["url"] if text else None
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        url = None
    if url is None:
        return "from where you have it (`pip install --force-reinstall --no-deps` with its file or directory)"
    return f"from where it was installed: `pip install --force-reinstall --no-deps {url}`"
