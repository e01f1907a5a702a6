"""Runs: everything belongs to one. They form trees.

    join / child --> active --end (stopped | finished)---> over
                       |----its parent ends--------------> stopped
                       +----its deadline passes----------> expired

A root run is found by its name: joining gives the active one, or a new one. A run's ``deadline_ms`` is stored as the
earlier of its own and its parent's, so whether a run is active can be told from itself and the clock alone, no matter
whether ``tick`` has been there yet. A run that is over, and in which and below which nothing is held, leaves memory.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from datetime import datetime, timezone

from runstate import wire
from runstated.domain.answers import NotFound, Refusal, ValidationFailed, must
from runstated.domain.core import Core
from runstated.domain.tables import UNSTORED, Index, Live, Table
from runstated.domain.waits import WATCH, Topic

ENDED_IN_ONE_STEP = 50
STALE_MAX = 64  # entries of the heap whose run has ended before its deadline, beside those that are active
NOBODY = ""  # owner of a child run whose session is gone


@dataclass(slots=True, eq=False)
class Run:
    """One run. ``path``: the ids from its root run down to itself, each followed by "/". ``owner``: the session with
    which a child run ends; None: with none. ``is_group``: it was made for the jobs of one `gather`. ``tidied``: 1 when
    nothing is left of what belonged to it.

    ``has_rows``: some of its finished keys, jobs ... may be on disk and not in memory, where they are to be looked for.
    """

    run: str
    space: str
    name: str | None
    parent: str | None
    path: str
    state: str
    deadline_ms: int | None
    owner: str | None
    created_ms: int
    ended_ms: int | None = None
    is_group: int = 0
    tidied: int = 0
    has_rows: bool = field(default=True, metadata=UNSTORED)
    children: dict[str, Run] = field(default_factory=dict, metadata=UNSTORED)  # those in memory


RUNS = Table(
    "runs",
    Run,
    key=("run",),
    live=Live("state", ("active",)),
    indexes=(
        Index("runs_by_path", ("path",)),
        Index("runs_active", ("space", "state", "created_ms")),
        Index("runs_ended", ("tidied", "ended_ms"), not_null="ended_ms"),
    ),
)


@dataclass(slots=True)
class Runs:
    """Active runs by name, by owner and by deadline."""

    of_name: dict[str, Run] = field(default_factory=dict)
    of_owner: dict[str, dict[str, Run]] = field(default_factory=dict)
    due: list[tuple[int, str]] = field(default_factory=list)  # heap of (deadline, run), checked when it comes up


class RunOver(Refusal):
    """The run is over."""

    code = "SCOPE_CANCELLED"

    def __init__(self, run: Run) -> None:
        super().__init__(over_message(run), run=run.run)


class RunExpired(RunOver):
    """The run's deadline has passed."""

    code = "DEADLINE_EXCEEDED"


def signal(run: str) -> Topic:
    """Those who wait for anything in a run wait for its end, too."""
    return ("run", run)


def watch(run: str) -> Topic:
    """Where workers stand who look again when the run ends: for a job of it that cannot start yet, which holds up
    nobody then."""
    return (WATCH, "run", run)


def effective(run: Run, now_ms: int) -> str:
    """The state by the clock."""
    if run.state == "active" and run.deadline_ms is not None and now_ms >= run.deadline_ms:
        return "expired"
    return run.state


def over_message(run: Run) -> str:
    called = f"the run {run.name!r}" if run.name else f"the child run {run.run}"
    ended = {"stopped": "was stopped", "finished": "is finished"}.get(run.state, "has passed its deadline")
    return f"{called} {ended}"


def view(run: Run, now_ms: int) -> wire.RunView:
    return wire.RunView(
        run=run.run,
        name=run.name,
        state=effective(run, now_ms),
        parent=run.parent,
        deadline_ms=run.deadline_ms,
        created_ms=run.created_ms,
    )


# ---------------------------------------------------------------------------------------------------- verbs


def join(core: Core, request: wire.RunsJoin) -> wire.RunView:
    """The active root run of that name, or a new one; the session hears of its end. A run's id gives that run, whatever
    has become of it: a name that looks like an id of this database is never made into a new run."""
    if core.is_own_id("r", request.name):
        named = get(core, request.name)
        is_over = effective(named, core.now_ms) != "active"
        return view(named, core.now_ms) if is_over else _joined(core, named, request.deadline_ms)
    run = core.index(Runs).of_name.get(request.name)
    if run is not None and effective(run, core.now_ms) == "active":
        return _joined(core, run, request.deadline_ms)
    core.need("work", f"create the run {request.name}")
    if request.deadline_ms is not None:
        _check_deadline(core, request.name, request.deadline_ms, is_child=False)
    if run is not None:
        end_tree(core, run, "expired")
    return _joined(core, _create(core, request.name, None, request.deadline_ms, owner=None), None)


def child(core: Core, request: wire.RunsChild) -> wire.RunView:
    """A new run below ``parent``, always. It ends with its creator's session if nothing in it is held then."""
    parent = active(core, request.parent)
    if request.deadline_ms is not None:
        _check_deadline(core, request.name, request.deadline_ms, is_child=True)
    owner = core.caller.session if request.owned else None
    run = _create(core, request.name, parent, request.deadline_ms, owner=owner)
    core.subscribe(signal(run.run))
    return view(run, core.now_ms)


def end(core: Core, request: wire.RunsEnd) -> wire.RunView:
    """Ends a run and all below it; ending an ended one changes nothing."""
    run = get(core, request.run)
    if run.state == "active":
        state = effective(run, core.now_ms)
        end_tree(core, run, request.state if state == "active" else state)
    return view(run, core.now_ms)


def look(core: Core, request: wire.RunsGet) -> wire.RunView:
    """A run, also after its end."""
    return view(get(core, request.run), core.now_ms)


# ---------------------------------------------------------------------------------------------------- for other nouns


def create_group(core: Core, parent: Run, *, owned: bool) -> Run:
    """A run below ``parent`` for the jobs of one `gather`; if it is owned, it ends with the caller's session."""
    run = _create(core, None, parent, None, owner=core.caller.session if owned else None, is_group=1)
    core.subscribe(signal(run.run))
    return run


def find(core: Core, run: str) -> Run | None:
    """The run, if there is one in this space. Raises Missing."""
    found = core.live(RUNS).get(run) or core.find(RUNS, run)
    return found if found is not None and found.space == core.space else None


def get(core: Core, run: str) -> Run:
    """The run. Raises NotFound, also for a run of another space, and Missing."""
    found = find(core, run)
    if found is None:
        raise NotFound(f"run {run} not found")
    return found


def active(core: Core, run: str) -> Run:
    """The run, if it is active by the clock. Raises RunOver or RunExpired otherwise, NotFound and Missing."""
    found = get(core, run)
    over = refusal(found, core.now_ms)
    if over is not None:
        raise over
    return found


def in_memory(core: Core, run: str) -> Run:
    """A run that has something live: for what the daemon does on its own."""
    found = core.live(RUNS).get(run)
    must(found is not None, f"the run {run} of something live is in memory")
    return found  # type: ignore[return-value]


def refusal(run: Run, now_ms: int) -> RunOver | None:
    """What a verb on this run is refused with; None while it is active."""
    state = effective(run, now_ms)
    if state == "active":
        return None
    return RunExpired(run) if state == "expired" else RunOver(run)


def above(run: Run) -> list[str]:
    """The run itself and all above it, the run first."""
    return list(reversed(run.path.strip("/").split("/")))


def below(path: str) -> tuple[str, str]:
    """The bounds of the paths of a run and all under it: low <= path < high."""
    return path, path[:-1] + "0"  # "0" follows "/"


def tree(run: Run) -> list[Run]:
    """The run and all below it that are in memory, each before those below it."""
    found = [run]
    for each in found:  # grows while it is walked
        found += each.children.values()
    return found


# ---------------------------------------------------------------------------------------------------- time, sessions


def tick(core: Core) -> int | None:
    """Ends the runs whose deadline has passed; when to look again."""
    due = core.index(Runs).due
    _end_orphans(core)
    for _ in range(ENDED_IN_ONE_STEP):
        if not due or due[0][0] > core.now_ms:
            break
        _, name = heapq.heappop(due)
        run = core.live(RUNS).get(name)
        if run is not None and run.state == "active" and effective(run, core.now_ms) == "expired":
            end_tree(core, run, "expired")
    while due and not _is_pending(core, *due[0]):
        heapq.heappop(due)
    return due[0][0] if due else None


def _is_pending(core: Core, deadline_ms: int, name: str) -> bool:
    run = core.live(RUNS).get(name)
    return run is not None and run.state == "active" and run.deadline_ms == deadline_ms


def leave(core: Core, session: str) -> None:
    """A session is gone: its groups end, and child runs that only it knew, as soon as nothing in them is held."""
    for run in core.index(Runs).of_owner.pop(session, {}).values():
        run.owner = NOBODY
        core.put(RUNS, run)
        core.revisit_run(run.run)
    _end_orphans(core)


def _end_orphans(core: Core) -> None:
    """Ends some of the runs whose session is gone: groups, and child runs in which nothing is held. The end of what is
    held in one of the others makes ``tick`` look again."""
    for name in core.take_revisits(ENDED_IN_ONE_STEP):
        run = core.live(RUNS).get(name)
        if run is None or run.state != "active" or run.owner != NOBODY:
            continue  # it has ended since, perhaps with the one above
        held = next((each.run for each in tree(run) if core.holds.is_any_in_run(each.run)), None)
        if held is None or run.is_group:
            end_tree(core, run, "stopped")
        else:
            core.look_after(core.holds.of_run(held)[0], run.run)


# ---------------------------------------------------------------------------------------------------- memory


def load(core: Core) -> None:
    """The look-up tables, after the objects were loaded."""
    live = core.live(RUNS)
    in_order = sorted(live.items(), key=lambda item: (item[1].created_ms, number(item[1])))
    live.clear()
    live.update(in_order)  # the youngest last, as they are made
    for run in live.values():
        _link(core, run)
        if run.state != "active":
            continue
        _put_in(core, run)
        if run.owner == NOBODY:
            core.revisit[run.run] = None


def leave_memory(core: Core, name: str) -> None:
    """The run leaves memory if it is over and nothing is held in it or below it; then perhaps those above it, too."""
    run = core.live(RUNS).get(name)
    while run is not None and run.state != "active" and not run.children and not core.holds.is_any_in_run(run.run):
        core.drop(RUNS, run)
        parent = core.live(RUNS).get(run.parent or "")
        if parent is not None:
            parent.children.pop(run.run, None)
        run = parent


def number(run: Run) -> int:
    """What is before the suffix of its id: orders those that were made at the same time."""
    return int(run.run[1:].partition("-")[0])


# ---------------------------------------------------------------------------------------------------- helpers


def _joined(core: Core, run: Run, deadline_ms: int | None) -> wire.RunView:
    """An active run for one more session. A deadline is set where there is none yet; one that is there stays."""
    if deadline_ms is not None and run.deadline_ms is None:
        core.need("work", f"set the deadline of the run {run.name or run.run}")
        _check_deadline(core, run.name, deadline_ms, is_child=run.parent is not None)
        for each in tree(run):
            if each.state == "active" and (each.deadline_ms is None or each.deadline_ms > deadline_ms):
                each.deadline_ms = deadline_ms
                core.put(RUNS, each)
                _queue(core, each, deadline_ms)
                core.forget_run(each.run)  # its settled results are kept with the deadline of before
        core.due(deadline_ms)
    core.subscribe(signal(run.run))
    return view(run, core.now_ms)


def _check_deadline(core: Core, name: str | None, deadline_ms: int, *, is_child: bool) -> None:
    if deadline_ms <= core.now_ms:
        raise ValidationFailed(
            f"the deadline of the {'child ' * is_child}run {name or 'without a name'} has passed already:"
            f" it was {_written(deadline_ms)}, and it is {_written(core.now_ms)}"
        )


def _written(at_ms: int) -> str:
    """A wall time for people."""
    return datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc).isoformat(timespec="milliseconds")


def _create(
    core: Core, name: str | None, parent: Run | None, deadline_ms: int | None, owner: str | None, is_group: int = 0
) -> Run:
    """A new run, after its deadline was checked."""
    if parent is not None and parent.deadline_ms is not None:
        deadline_ms = parent.deadline_ms if deadline_ms is None else min(deadline_ms, parent.deadline_ms)
    name_of = core.new_id("r")
    run = Run(
        name_of,
        core.space,
        name,
        parent.run if parent else None,
        f"{parent.path if parent else '/'}{name_of}/",
        "active",
        deadline_ms,
        owner,
        core.now_ms,
        is_group=is_group,
        has_rows=False,
    )
    core.put(RUNS, run)
    _link(core, run)
    _put_in(core, run)
    if deadline_ms is not None:
        core.due(deadline_ms)
    core.emit("scope.created", run.run, run.path, {"scopeId": run.run, "name": name})
    return run


def _link(core: Core, run: Run) -> None:
    parent = core.live(RUNS).get(run.parent or "")
    if parent is not None:
        parent.children[run.run] = run


def _put_in(core: Core, run: Run) -> None:
    index = core.index(Runs)
    if run.parent is None and run.name is not None:
        index.of_name[run.name] = run
    if run.owner:
        index.of_owner.setdefault(run.owner, {})[run.run] = run
    if run.deadline_ms is not None:
        _queue(core, run, run.deadline_ms)


def _queue(core: Core, run: Run, deadline_ms: int) -> None:
    """It expires then. The entries of those that end before go when they come up, or are too many."""
    index = core.index(Runs)
    heapq.heappush(index.due, (deadline_ms, run.run))
    if len(index.due) > 2 * len(core.live(RUNS)) + STALE_MAX:
        index.due = [entry for entry in index.due if _is_pending(core, *entry)]
        heapq.heapify(index.due)


def _take_out(index: Runs, run: Run) -> None:
    if run.parent is None and run.name is not None and index.of_name.get(run.name) is run:
        del index.of_name[run.name]
    owned = index.of_owner.get(run.owner or "")
    if owned is not None:
        owned.pop(run.run, None)
        if not owned:
            del index.of_owner[run.owner or ""]


def end_tree(core: Core, run: Run, state: str) -> None:
    """Ends the run and all below it, answers all that wait in them, tells their sessions."""
    for each in tree(run):
        if each.state != "active":
            continue
        each.state = state if each is run else "expired" if state == "expired" else "stopped"
        each.ended_ms = core.now_ms
        core.put(RUNS, each)
        _take_out(core.index(Runs), each)
        _tell(core, each)
        core.wake(watch(each.run))
        kind = {"stopped": "cancelled", "finished": "completed"}.get(each.state, "expired")
        core.emit(f"scope.{kind}", each.run, each.path, {"scopeId": each.run, "name": each.name})
        core.ended.append(each.run)


def _tell(core: Core, run: Run) -> None:
    over = refusal(run, core.now_ms)
    if over is None:
        raise AssertionError("an ended run has a refusal")
    push = wire.RunEnded(run=run.run, state=run.state, message=str(over))
    core.answer_over(signal(run.run), over.reply(), push)
    core.forget_run(run.run)
