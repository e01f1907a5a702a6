"""Runs: everything belongs to one. They form trees.

    join / child --> active --end (stopped | finished)---> over
                       |----its parent ends--------------> stopped
                       +----its deadline passes----------> expired

A root run is found by its name: joining gives the active one, or a new one. A run's ``deadline_ms`` is stored as the
earlier of its own and its parent's, so whether a run is active can be told from its own row and the clock alone, no
matter whether ``tick`` has been there yet. Ending a run writes the rows of all below it in the same step; their jobs
and keys read through the run's state and are tidied away later.
"""

from dataclasses import dataclass
from datetime import datetime, timezone

from runstate import wire
from runstated.store.tx import NotFound, Refusal, Tx, ValidationFailed
from runstated.waits import WATCH, Topic

SCHEMA = """
CREATE TABLE runs (
    run TEXT NOT NULL PRIMARY KEY,
    space TEXT NOT NULL,
    name TEXT,
    parent TEXT,
    path TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('active', 'stopped', 'finished', 'expired')),
    deadline_ms BIGINT,
    owner TEXT,
    created_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    tidied INTEGER NOT NULL DEFAULT 0,
    CHECK ((state = 'active') = (ended_ms IS NULL))
);
CREATE UNIQUE INDEX runs_by_path ON runs (path);
CREATE UNIQUE INDEX runs_by_name ON runs (space, name) WHERE parent IS NULL AND state = 'active';
CREATE INDEX runs_by_deadline ON runs (deadline_ms) WHERE state = 'active' AND deadline_ms IS NOT NULL;
CREATE INDEX runs_by_owner ON runs (owner) WHERE state = 'active' AND owner IS NOT NULL;
CREATE INDEX runs_untidied ON runs (ended_ms) WHERE state <> 'active' AND tidied = 0;
CREATE INDEX runs_active ON runs (space, created_ms) WHERE state = 'active';
"""

# Version 2: the runs that `gather` makes for its jobs end with their caller, whatever is held in them.
SCHEMA_2 = """
ALTER TABLE runs ADD COLUMN is_group INTEGER NOT NULL DEFAULT 0;
"""

# Of the tidied runs those that may go are found without a look at the others.
SCHEMA_TIDIED = """
CREATE INDEX runs_tidied ON runs (ended_ms) WHERE state <> 'active' AND tidied = 1;
"""

# Version 8: a week of ended child runs is not looked through for the active ones.
SCHEMA_8 = """
CREATE INDEX runs_active_by_path ON runs (path) WHERE state = 'active';
"""

COLUMNS = "run, space, name, parent, path, state, deadline_ms, owner, created_ms"
ENDED_IN_ONE_STEP = 50
NOBODY = ""  # owner of a child run whose session is gone


class RunOver(Refusal):
    """The run is over."""

    code = "SCOPE_CANCELLED"

    def __init__(self, run: "Run") -> None:
        super().__init__(over_message(run), run=run.run)


class RunExpired(RunOver):
    """The run's deadline has passed."""

    code = "DEADLINE_EXCEEDED"


@dataclass(frozen=True, slots=True)
class Run:
    """A row; ``state`` is the stored one, see ``effective``."""

    run: str
    space: str
    name: str | None
    parent: str | None
    path: str
    state: str
    deadline_ms: int | None
    owner: str | None
    created_ms: int


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


def join(tx: Tx, request: wire.RunsJoin) -> wire.RunView:
    """The active root run of that name, or a new one; the session hears of its end. A run's id gives that run, whatever
    has become of it: a name that looks like an id of this database is never made into a new run."""
    if tx.is_own_id("r", request.name):
        named = get(tx, request.name)
        is_over = effective(named, tx.now_ms) != "active"
        return view(named, tx.now_ms) if is_over else _joined(tx, named, request.deadline_ms)
    run = _active_root(tx, request.name)
    if run is not None and effective(run, tx.now_ms) != "active":
        _end_tree(tx, run, "expired")
        run = None
    if run is None:
        tx.need("work", f"create the run {request.name}")
        run = _create(tx, request.name, None, request.deadline_ms, owner=None)
    return _joined(tx, run, request.deadline_ms)


def child(tx: Tx, request: wire.RunsChild) -> wire.RunView:
    """A new run below ``parent``, always. It ends with its creator's session if nothing in it is held then."""
    parent = active(tx, request.parent)
    owner = tx.caller.session if request.owned else None
    run = _create(tx, request.name, parent, request.deadline_ms, owner=owner)
    tx.subscribe(signal(run.run))
    return view(run, tx.now_ms)


def end(tx: Tx, request: wire.RunsEnd) -> wire.RunView:
    """Ends a run and all below it; ending an ended one changes nothing."""
    run = get(tx, request.run)
    state = effective(run, tx.now_ms)
    if run.state == "active":
        state = request.state if state == "active" else state
        _end_tree(tx, run, state)
    return view(get(tx, request.run), tx.now_ms)


def look(tx: Tx, request: wire.RunsGet) -> wire.RunView:
    """A run, also after its end."""
    return view(get(tx, request.run), tx.now_ms)


# ---------------------------------------------------------------------------------------------------- for other nouns


def create_group(tx: Tx, parent: Run, *, owned: bool) -> Run:
    """A run below ``parent`` for the jobs of one `gather`; if it is owned, it ends with the caller's session."""
    run = _create(tx, None, parent, None, owner=tx.caller.session if owned else None)
    tx.run("UPDATE runs SET is_group = 1 WHERE run = :run", run=run.run)
    tx.subscribe(signal(run.run))
    return run


def get(tx: Tx, run: str) -> Run:
    """The run. Raises NotFound, also for a run of another space."""
    row = tx.one(f"SELECT {COLUMNS} FROM runs WHERE run = :run AND space = :space", run=run, space=tx.caller.space)
    if row is None:
        raise NotFound(f"run {run} not found")
    return Run(*row)


def get_any(tx: Tx, run: str) -> Run:
    """The run, whatever its space: for what the daemon does on its own."""
    row = tx.one(f"SELECT {COLUMNS} FROM runs WHERE run = :run", run=run)
    assert row is not None, "a run outlives what belongs to it"
    return Run(*row)


def active(tx: Tx, run: str) -> Run:
    """The run, if it is active by the clock. Raises RunOver or RunExpired otherwise."""
    found = get(tx, run)
    over = refusal(found, tx.now_ms)
    if over is not None:
        raise over
    return found


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


def alone(path: str) -> tuple[str, str]:
    """The bounds of the path of a run, without those under it."""
    return path, path + "\x00"


# ---------------------------------------------------------------------------------------------------- time, sessions


def tick(tx: Tx) -> int | None:
    """Ends the runs whose deadline has passed; when to look again."""
    rows = tx.all(
        f"SELECT {COLUMNS} FROM runs WHERE state = 'active' AND deadline_ms IS NOT NULL AND deadline_ms <= :now"
        " ORDER BY deadline_ms LIMIT :many",
        now=tx.now_ms,
        many=ENDED_IN_ONE_STEP,
    )
    _end_orphans(tx)
    for row in rows:
        current = tx.one(f"SELECT {COLUMNS} FROM runs WHERE run = :run AND state = 'active'", run=row[0])
        if current is not None:  # it may have ended with its parent a moment ago
            _end_tree(tx, Run(*current), "expired")
    first = tx.one(
        "SELECT deadline_ms FROM runs WHERE state = 'active' AND deadline_ms IS NOT NULL ORDER BY deadline_ms LIMIT 1"
    )
    return first[0] if first else None


def tell_ended(tx: Tx, signals: list[Topic]) -> None:
    """Answers those who wait for runs that are over, in case nobody has told them."""
    for topic in signals:
        row = tx.one(f"SELECT {COLUMNS} FROM runs WHERE run = :run", run=topic[-1])
        over = refusal(Run(*row), tx.now_ms) if row and topic == signal(row[0]) else None
        if row and over is not None:
            _tell(tx, Run(*row), over)


def leave(tx: Tx, session: str) -> None:
    """A session is gone: its groups end, and child runs that only it knew, as soon as nothing in them is held."""
    rows = tx.all(
        "UPDATE runs SET owner = :nobody WHERE state = 'active' AND owner = :session RETURNING run",
        nobody=NOBODY,
        session=session,
    )
    for (run,) in rows:
        tx.revisit(run)
    _end_orphans(tx)


def orphans(tx: Tx) -> list[str]:
    """The runs whose session is gone (for the start of the daemon)."""
    return [run for (run,) in tx.all("SELECT run FROM runs WHERE state = 'active' AND owner = :nobody", nobody=NOBODY)]


def _end_orphans(tx: Tx) -> None:
    """Ends some of the runs whose session is gone: groups, and child runs in which nothing is held. The end of what is
    held in one of the others makes ``tick`` look again."""
    for name in tx.take_revisits(ENDED_IN_ONE_STEP):
        row = tx.one(
            f"SELECT {COLUMNS}, is_group FROM runs WHERE run = :run AND state = 'active' AND owner = :nobody",
            run=name,
            nobody=NOBODY,
        )
        if row is None:
            continue  # it has ended since, perhaps with the one above
        *columns, is_group = row
        run = Run(*columns)
        low, high = below(run.path)
        held = tx.one(
            "SELECT token FROM leases WHERE run IN (SELECT run FROM runs WHERE path >= :low AND path < :high) LIMIT 1",
            low=low,
            high=high,
        )
        if held is None or is_group:
            _end_tree(tx, run, "stopped")
        else:
            tx.look_after(held[0], run.run)


# ---------------------------------------------------------------------------------------------------- helpers


def _active_root(tx: Tx, name: str) -> Run | None:
    row = tx.one(
        f"SELECT {COLUMNS} FROM runs WHERE space = :space AND name = :name AND parent IS NULL AND state = 'active'",
        space=tx.caller.space,
        name=name,
    )
    return Run(*row) if row else None


def _joined(tx: Tx, run: Run, deadline_ms: int | None) -> wire.RunView:
    """An active run for one more session. A deadline is set where there is none yet; one that is there stays."""
    if deadline_ms is not None and run.deadline_ms is None:
        tx.need("work", f"set the deadline of the run {run.name or run.run}")
        _check_deadline(tx, run.name, deadline_ms, is_child=run.parent is not None)
        low, high = below(run.path)
        changed = tx.all(
            "UPDATE runs SET deadline_ms = :deadline_ms WHERE path >= :low AND path < :high AND state = 'active'"
            " AND (deadline_ms IS NULL OR deadline_ms > :deadline_ms) RETURNING run",
            deadline_ms=deadline_ms,
            low=low,
            high=high,
        )
        for (each,) in changed:
            tx.forget_run(each)  # its settled results are kept with the deadline of before
        tx.due(deadline_ms)
        run = get(tx, run.run)
    tx.subscribe(signal(run.run))
    return view(run, tx.now_ms)


def _check_deadline(tx: Tx, name: str | None, deadline_ms: int, *, is_child: bool) -> None:
    if deadline_ms <= tx.now_ms:
        raise ValidationFailed(
            f"the deadline of the {'child ' * is_child}run {name or 'without a name'} has passed already:"
            f" it was {_written(deadline_ms)}, and it is {_written(tx.now_ms)}"
        )


def _written(at_ms: int) -> str:
    """A wall time for people."""
    return datetime.fromtimestamp(at_ms / 1000, tz=timezone.utc).isoformat(timespec="milliseconds")


def _create(tx: Tx, name: str | None, parent: Run | None, deadline_ms: int | None, owner: str | None) -> Run:
    if deadline_ms is not None:
        _check_deadline(tx, name, deadline_ms, is_child=parent is not None)
    if parent is not None and parent.deadline_ms is not None:
        deadline_ms = parent.deadline_ms if deadline_ms is None else min(deadline_ms, parent.deadline_ms)
    run = tx.new_id("r")
    path = f"{parent.path if parent else '/'}{run}/"
    tx.run(
        "INSERT INTO runs (run, space, name, parent, path, state, deadline_ms, owner, created_ms)"
        " VALUES (:run, :space, :name, :parent, :path, 'active', :deadline_ms, :owner, :now)",
        run=run,
        space=tx.caller.space,
        name=name,
        parent=parent.run if parent else None,
        path=path,
        deadline_ms=deadline_ms,
        owner=owner,
        now=tx.now_ms,
    )
    if deadline_ms is not None:
        tx.due(deadline_ms)
    tx.emit("scope.created", run, {"scopeId": run, "name": name})
    return get(tx, run)


def _end_tree(tx: Tx, run: Run, state: str) -> None:
    """Writes the state of the run and of all below it, answers all that wait in them, tells their sessions."""
    low, high = below(run.path)
    rows = tx.all(
        "UPDATE runs SET state = CASE WHEN run = :run THEN :state ELSE :below END, ended_ms = :now"
        f" WHERE path >= :low AND path < :high AND state = 'active' RETURNING {COLUMNS}",
        run=run.run,
        state=state,
        below="expired" if state == "expired" else "stopped",
        now=tx.now_ms,
        low=low,
        high=high,
    )
    for row in rows:
        ended = Run(*row)
        over = refusal(ended, tx.now_ms)
        assert over is not None, "an ended run has a refusal"
        _tell(tx, ended, over)
        tx.wake(watch(ended.run))
        kind = {"stopped": "cancelled", "finished": "completed"}.get(ended.state, "expired")
        tx.emit(f"scope.{kind}", ended.run, {"scopeId": ended.run, "name": ended.name})
    tx.due(tx.now_ms)  # what is left of them is tidied from now on


def _tell(tx: Tx, run: Run, over: RunOver) -> None:
    push = wire.RunEnded(run=run.run, state=effective(run, tx.now_ms), message=str(over))
    tx.answer_over(signal(run.run), over.reply(), push)
    tx.forget_run(run.run)
