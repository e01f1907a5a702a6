"""`runstate status`: the daemon, its runs, who holds what, who waits for what behind whom, the queues."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import click

from . import render
from .render import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.text import Text

    from runstate import wire

    from .look import Onlooker

    Columns = list[str | Column]
    Table = tuple[Columns, list[tuple[str | int, ...]]]

REFRESH_S = 1.0
LIMIT = 200
LIMIT_MAX = 1_000  # as the wire allows
WORDS = {"timer": "sleep", "barrier": "together", "group": "gather", "events": "events of"}  # as the verbs are called
QUEUE_STATES = ("ready", "delayed", "running", "succeeded", "failed")  # always shown; others when there are any

_OWN_PID = re.compile(r"(.*-([0-9]+)) \(pid \2\)")  # the usual label names the process already


@click.command(
    "status",
    epilog="""\b
The object of --json has these keys, always all of them; times are Unix time
in milliseconds (null: none), and "more" names the lists that --limit cut:
  daemon   version pid started_ms now_ms socket state_dir database_bytes
           wal_bytes sessions trouble inherited[]
  runs[]   run name state parent deadline_ms created_ms
  workers[]  session worker pid command connected
    holdings[]  token kind name run since_ms until_ms
  waits[]  worker pid kind name run since_ms until_ms ahead behind[] lacks[]
  queues[]  queue attempts counts{state: jobs}
  more[]
  names{id: name}  of the limits, slots and budgets that are waited for

\b
Exit codes: 0 shown, 1 the daemon does not answer, 3 it is not running,
4 this process may not connect to it (a sandbox).""",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--watch", is_flag=True, help="Look again every second until Ctrl-C.")
@click.option("--space", metavar="NAME", help="Which space to look at. Default: RUNSTATE_SPACE_ID, else `default`.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="The longest any list gets.",
)
def command(as_json: bool, watch: bool, space: str | None, limit: int) -> None:
    """Show what runs, who holds what, and who waits for whom.

    Never starts the daemon. RUNSTATE_BASE_URL (unix:///path or tcp://host:port) names another one than this user's.
    With --watch, output that is no terminal gets a new table, or a new line of JSON, every second.
    """
    from .look import Onlooker

    onlooker = Onlooker(space)
    try:
        if watch:
            _watch(onlooker, limit, as_json=as_json)
        else:
            _show(onlooker.look(limit), as_json=as_json)
    finally:
        onlooker.close()


def _show(view: wire.StatusView, *, as_json: bool) -> None:
    if as_json:
        click.echo(render.json(view), nl=False)
    else:
        render.show(picture(view, render.width()))


# ---------------------------------------------------------------------------------------------------- --watch


def _watch(onlooker: Onlooker, limit: int, *, as_json: bool) -> None:
    try:
        view = onlooker.look(limit)  # a daemon that is absent now is reported as without --watch
        if as_json or not sys.stdout.isatty():
            _watch_in_lines(onlooker, limit, view, as_json=as_json)
        else:
            _watch_live(onlooker, limit, view)
    except KeyboardInterrupt:
        pass  # this is how one leaves


def _watch_in_lines(onlooker: Onlooker, limit: int, view: wire.StatusView, *, as_json: bool) -> None:
    def show(view: wire.StatusView) -> None:
        _show(view, as_json=as_json)
        if not as_json:
            click.echo()
        sys.stdout.flush()

    show(view)
    _look_again(onlooker, limit, show, lambda message: click.echo(f"runstate: {message}", err=True))


def _watch_live(onlooker: Onlooker, limit: int, view: wire.StatusView) -> None:
    from rich.console import Console
    from rich.live import Live

    # rich alone would still send bold and dim with NO_COLOR
    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")
    live = Live(_live(picture(view, console.width)), console=console, screen=True, auto_refresh=False)
    try:  # not `with`: Ctrl-C may come while it is entered, and the terminal must be given back all the same
        live.start(refresh=True)
        _look_again(
            onlooker,
            limit,
            lambda view: live.update(_live(picture(view, console.width)), refresh=True),
            lambda message: live.update(_live([render.line(f"{message}; looking again ...")]), refresh=True),
        )
    finally:
        live.stop()


def _live(lines: Iterable[render.Line]) -> Text:
    from rich.text import Text

    return Text("\n").join(Text(text, style) for text, style in lines)


def _look_again(
    onlooker: Onlooker, limit: int, show: Callable[[wire.StatusView], None], complain: Callable[[str], None]
) -> None:
    """For ever; a daemon that is away comes back."""
    from .look import CannotLook

    while True:
        onlooker.wait(REFRESH_S)
        try:
            show(onlooker.look(limit))
        except CannotLook as error:
            complain(error.message)


# ---------------------------------------------------------------------------------------------------- the picture


def picture(view: wire.StatusView, room: int) -> list[render.Line]:
    """Everything, in ``room`` columns. Pure: "now" is the daemon's."""
    now_ms = view.daemon.now_ms if view.daemon else 0
    names = {run.run: run.name or run.run for run in view.runs}
    lines = [*_daemon(view)]
    held = _held(view)
    for heading, entries, (columns, rows) in (
        ("Active runs", view.runs, _runs(view.runs, now_ms)),
        ("Workers", view.workers, _workers(view.workers)),
        ("Held", held, _holdings(held, names, now_ms)),
        ("Waiting", view.waits, _waits(view.waits, names, now_ms)),
        ("Queues", view.queues, _queues(view.queues)),
    ):
        lines += [render.line(""), render.line(f"{heading}: {len(entries) or 'none'}", "bold")]
        if entries:
            lines += render.table(columns, rows, room)
    if view.more:
        cut = ", ".join(view.more)
        lines += [render.line(""), render.line(f"There are more {cut} than shown: see --limit.", "yellow")]
    return lines


def _daemon(view: wire.StatusView) -> Iterable[render.Line]:
    import runstate

    daemon = view.daemon
    if daemon is None:
        yield render.line("runstated says nothing of itself", "yellow")
        return
    yield render.line(f"runstated {daemon.version}, pid {daemon.pid}, up {render.duration(_age_ms(daemon))}", "bold")
    database = f"{render.size(daemon.database_bytes)}, write-ahead log {render.size(daemon.wal_bytes)}"
    for name, value in (
        ("socket", daemon.socket),
        ("state", daemon.state_dir),
        ("database", database),
        ("sessions", str(daemon.sessions)),
    ):
        yield render.line(f"  {name + ':':<10} {value}")
    if daemon.trouble:
        yield render.line(f"  TROUBLE: writes fail ({daemon.trouble}); everybody waits until they work again", "red")
    if daemon.inherited:
        yield render.line(
            f"  LIMITED: {', '.join(daemon.inherited)}: inherited from the program that started it; run"
            " `runstated restart` in a new shell",
            "yellow",
        )
    if daemon.version != runstate.__version__:
        yield render.line(
            f"  binary replaced, restart pending: {runstate.__version__} is installed; run `runstated restart`",
            "yellow",
        )


def _age_ms(daemon: wire.DaemonView) -> int:
    return daemon.now_ms - daemon.started_ms


def _runs(runs: Iterable[wire.RunView], now_ms: int) -> Table:
    columns: Columns = ["NAME", "ID", "STARTED", "DEADLINE", "PART OF"]
    return columns, [
        (
            run.name or render.NOTHING,
            run.run,
            render.ago(run.created_ms, now_ms),
            render.ahead(run.deadline_ms, now_ms),
            run.parent or render.NOTHING,
        )
        for run in runs
    ]


def _workers(workers: Iterable[wire.WorkerView]) -> Table:
    columns: Columns = [
        "WORKER",
        Column("PID", right=True),
        "STATE",
        Column("HOLDS", right=True),
        Column("COMMAND", cut=True),
    ]
    return columns, [
        (
            worker.worker,
            worker.pid,
            "connected" if worker.connected else "away",
            len(worker.holdings),
            worker.command,
        )
        for worker in workers
    ]


def _held(view: wire.StatusView) -> list[tuple[wire.WorkerView, wire.Holding]]:
    return [(worker, holding) for worker in view.workers for holding in worker.holdings]


def _holdings(held: Iterable[tuple[wire.WorkerView, wire.Holding]], names: Mapping[str, str], now_ms: int) -> Table:
    columns: Columns = ["WHAT", "RUN", "BY", "SINCE", "UNTIL"]
    return columns, [
        (
            f"{holding.kind} {render.short_key(holding.name)}",
            names.get(holding.run or "", holding.run or render.NOTHING),
            _who(worker.worker, worker.pid),
            render.ago(holding.since_ms, now_ms),
            render.ahead(holding.until_ms, now_ms),
        )
        for worker, holding in held
    ]


def _waits(waits: Iterable[wire.WaitView], names: dict[str, str], now_ms: int) -> Table:
    columns: Columns = ["WHO", "WAITS FOR", "RUN", "SINCE", "UNTIL", Column("AHEAD", right=True), "BEHIND"]
    return columns, [
        (
            _who(wait.worker, wait.pid),
            _what(wait),
            names.get(wait.run or "", wait.run or render.NOTHING),
            render.ago(wait.since_ms, now_ms),
            render.ahead(wait.until_ms, now_ms),
            wait.ahead,
            ", ".join(_OWN_PID.sub(r"\1", holder) for holder in wait.behind) or render.NOTHING,
        )
        for wait in waits
    ]


def _what(wait: wire.WaitView) -> str:
    """A worker that waits at its queue has nothing to do, unless its jobs lack something; everybody else has something
    to get."""
    name = render.short_key(wait.name)
    if wait.kind == "queue":
        return f"work in {name}" + (f", whose jobs lack {', '.join(wait.lacks)}" if wait.lacks else "")
    return f"{WORDS.get(wait.kind, wait.kind)} {name}"


def _who(worker: str, pid: int) -> str:
    """A worker's label, with the pid where the label does not end in it, as the usual one does."""
    return worker if worker.endswith(f"-{pid}") else f"{worker} ({pid})"


def _queues(queues: Iterable[wire.QueueView]) -> Table:
    found = list(queues)
    seen = {state for queue in found for state in queue.counts}
    states = [*QUEUE_STATES, *sorted(seen.difference(QUEUE_STATES))]
    columns: Columns = ["QUEUE", *(Column(state.upper(), right=True) for state in [*states, "attempts"])]
    return columns, [
        (queue.queue, *(queue.counts.get(state, 0) for state in states), queue.attempts) for queue in found
    ]
