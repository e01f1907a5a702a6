"""Faults of ours, remembered over the end of the process: what has thrown in the middle of a change is not tried again.

    fault --written here--> the process ends, nothing of the open turn counts --next life--> the request is answered
    INTERNAL unrun, a step of the daemon's own is skipped for its object and told as trouble; both for an hour

Each line of the file is one fault as JSON. A third one within a minute leaves the mark that nobody starts the daemon.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from runstate import paths, presence
from runstated.engine.faults import Fault

log = logging.getLogger(__name__)

NAME = "runstated.faults"
KEPT_MS = 3_600_000
MANY, MANY_MS = 3, 60_000  # so many in this time end it


class FaultLog:
    """See the module. ``doings``: what is not run, as ``Fault.doing`` says it."""

    def __init__(self, directory: Path, now_ms: int) -> None:
        self._path = directory / NAME
        self._times: list[int] = []
        self.doings: dict[str, str] = {}
        for line in self._lines():
            try:
                fault = json.loads(line)
                at_ms, doing, why = int(fault["at_ms"]), str(fault["doing"]), str(fault["why"])
            except (ValueError, TypeError, KeyError):
                continue  # the end of a line that was cut off
            if now_ms - at_ms < KEPT_MS:
                self._times.append(at_ms)
                self.doings[doing] = why

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text(errors="replace").splitlines()
        except OSError:
            return []

    @property
    def told(self) -> str | None:
        """What is skipped of the daemon's own steps, for people; None where nothing is."""
        steps = [f"{doing} ({why})" for doing, why in self.doings.items() if doing.startswith("step ")]
        return f"skipped after a fault of the daemon's own: {', '.join(steps)}; see its log" if steps else None

    def record(self, fault: Fault, now_ms: int) -> None:
        """Remembers a fault, on disk."""
        line = json.dumps({"at_ms": now_ms, "doing": fault.doing, "why": fault.why})
        try:
            with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write(f"{line}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.error("cannot record the fault in %s: %s", self._path, error)
        recent = [at_ms for at_ms in self._times if now_ms - at_ms < MANY_MS]
        if len(recent) + 1 >= MANY:
            log.critical("%d faults within a minute: no client starts the daemon any more", MANY)
            presence.mark_stopped(
                self._path.with_name(paths.STOPPED_NAME), "it has failed three times within a minute: see its log"
            )
