"""What `status` shows beside the database: the daemon itself, who is connected, who waits for what behind whom."""

import os
from pathlib import Path

import msgspec

from runstate import wire
from runstated.domain import status
from runstated.domain.core import Core
from runstated.domain.waits import WATCH, Call
from runstated.engine.engine import Engine
from runstated.server.sessions import Sessions


class Overview:
    """Completes a StatusView. Runs on the loop between two batches or beside one: display only."""

    def __init__(
        self, engine: Engine, sessions: Sessions, *, version: str, socket_path: str, inherited: tuple[str, ...] = ()
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._version = version
        self._inherited = inherited
        self._socket_path = _shown(socket_path)
        self._started_ms = engine.clock.wall_ms()

    def complete(self, view: wire.StatusView, space: str, limit: int) -> wire.StatusView:
        """The view with ``daemon``, ``waits`` and what is only in memory of its workers."""
        core = self._engine.spaces.of(space)
        calls = core.calls()
        calls.sort(key=lambda call: (call.rank, call.ticket))
        return msgspec.structs.replace(
            view,
            daemon=self._daemon(),
            workers=tuple(self._worker(core, worker) for worker in view.workers),
            waits=tuple(self._wait(core, call, view.names) for call in calls[:limit]),
            more=view.more + (("waits",) if len(calls) > limit else ()),
        )

    def _daemon(self) -> wire.DaemonView:
        store = self._engine.store
        return wire.DaemonView(
            version=self._version,
            pid=os.getpid(),
            started_ms=self._started_ms,
            now_ms=self._engine.clock.wall_ms(),
            socket=self._socket_path,
            state_dir=_shown(store.path.parent),
            database_bytes=store.database_bytes(),
            wal_bytes=store.wal_bytes(),
            sessions=len(self._sessions),
            trouble=self._engine.told_trouble,
            inherited=self._inherited,
        )

    def _worker(self, core: Core, worker: wire.WorkerView) -> wire.WorkerView:
        held = tuple(
            msgspec.structs.replace(holding, until_ms=self._until_ms(core, holding.token))
            for holding in worker.holdings
        )
        row = self._sessions.row(worker.session)
        return msgspec.structs.replace(
            worker,
            session=wire.shown_session(row.id if row else worker.session),
            connected=self._sessions.is_connected(worker.session),
            holdings=held,
        )

    def _until_ms(self, core: Core, token: int) -> int | None:
        hold = core.holds.of_token.get(token)
        return None if hold is None else self._in_wall_time(hold.expires)

    def _in_wall_time(self, lease_ms: int) -> int:
        return self._engine.clock.lease_epoch_ms() + lease_ms

    def _wait(self, core: Core, call: Call, names: dict[str, str]) -> wire.WaitView:
        kind, run, *_ = topic = next(topic for topic in (*call.lines, *call.signals) if topic[0] != WATCH)
        lacks: tuple[str, ...] = ()
        if kind in status.RESOURCES:
            run = getattr(call.request, "run", run)  # a resource belongs to no run, the call does
        else:  # a worker: beside its queue it stands where its jobs lack something
            lines = dict.fromkeys(line for line in call.lines if line[0] in status.RESOURCES)
            lacks = tuple(f"{line[0]} {names.get(line[-1], line[-1])}" for line in lines)
        row = self._sessions.row(call.session)
        behind = []
        for hold in core.holders(call)[:8]:
            holder = self._sessions.row(hold.session)
            behind.append(f"{holder.worker} (pid {holder.pid})" if holder else "a session that has ended")
        return wire.WaitView(
            worker=row.worker if row else "",
            pid=row.pid if row else 0,
            kind=kind,
            name=names.get(topic[-1], topic[-1]) if kind in status.RESOURCES else topic[-1],
            run=run,
            since_ms=call.since_ms,
            until_ms=None if call.until is None else self._in_wall_time(call.until),
            ahead=core.lines.position(call),
            behind=tuple(behind),
            lacks=lacks,
        )


def _shown(path: str | Path) -> str:
    """A path as text. One that is no UTF-8 could not be sent."""
    return os.fsencode(path).decode(errors="replace")
