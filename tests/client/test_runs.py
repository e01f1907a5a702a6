"""Runs: joined, left, stopped and finished, in all processes at once."""

from __future__ import annotations

import time

import pytest

from tests.e2e.support import Daemon


def test_a_stop_is_pushed_to_every_process(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
@runstate.once
def work(who):
    say("works")
    runstate.context().signal.wait(60)
    at = time.monotonic()
    say(at, type(runstate.context().signal.reason).__name__, runstate.context().signal.reason.code)
@runstate.once
async def awork(who):
    say("works")
    await runstate.context().signal.wait(60)
    say(time.monotonic(), type(runstate.context().signal.reason).__name__, runstate.context().signal.reason.code)
call = (lambda: asyncio.run(awork(sys.argv[1]))) if int(sys.argv[1]) % 2 else (lambda: work(sys.argv[1]))
say(name(call), name(runstate.run_id))
"""
    programs = [daemon.program(source, n) for n in range(6)]
    for program in programs:
        program.expect("works")
    began = time.monotonic()
    assert daemon.program("say(time.monotonic()); runstate.stop()").ends_well()
    told_ms = []
    for program in programs:
        at, kind, code = program.hear().split()
        assert (kind, code) == ("StoppedError", "SCOPE_CANCELLED")
        told_ms.append((float(at) - began) * 1000)
        assert program.ends_well() == ["StoppedError SCOPE_CANCELLED StoppedError STOPPED"]
    assert max(told_ms) < 2_000 + 5_000, "the stopping program has to start, too"


def test_how_long_a_stop_takes(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    program = daemon.program(
        """
run = runstate.run("r")
@run.once
def work(n):
    if n == 0:
        ready.wait()
    signal = runstate.context().signal
    signal.add_callback(lambda: told.append(time.monotonic()))
    ready.wait() if n else None
    signal.wait(30)
told, ready = [], threading.Barrier(6)
clients = [runstate.Runstate(run="r") for _ in range(5)]
works = [client.once(lambda n: work.__wrapped__(n), name=f"work{n}") for n, client in enumerate(clients)]
threads = [threading.Thread(target=lambda n=n: name(works[n], n)) for n in range(5)]
for thread in threads: thread.start()
ready.wait()
time.sleep(0.1)
at = time.monotonic()
run.stop()
for thread in threads: thread.join()
say(len(told), max(told) - at)
"""
    )
    count, took = program.ends_well()[0].split()
    assert count == "5"
    assert float(took) < 2
    with capsys.disabled():
        print(f"\n  a stop reaches five sessions after {float(took) * 1000:.1f} ms")


def test_a_stopped_client_stays_stopped_and_a_new_one_joins_the_next_run(daemon: Daemon) -> None:
    said = daemon.program(
        """
old = runstate.Runstate(run="r")
first = old.run_id()
elsewhere = runstate.Runstate(run="r")
say(elsewhere.run_id() == first)
elsewhere.stop(); elsewhere.stop(); elsewhere.finish()
work = old.once(lambda: 1, name="work")
errors_ = []
for _ in range(2):
    try:
        work()
    except runstate.StoppedError as error:
        errors_.append(error)
        say(error.code, error.status, error.__cause__ is not None and error.__cause__.code)
say(type(errors_[1].__cause__) is type(errors_[0]), errors_[1].message == errors_[0].message, errors_[0].retryable)
for call in (old.run_id, old.queue("q", attempts=1).send, lambda: asyncio.run(old.arun_id())):
    say(name(call, *([1] if call.__name__ == "send" else [])))
old.configure(run="s", timeout="5s")
say(name(old.run_id))
say(old.stop(), old.finish())
new = runstate.Runstate(run="r")
say(new.run_id() != first, new.once(lambda: 2, name="work")(), old.run("r").run_id() == new.run_id())
new.finish()
say(name(new.run_id), runstate.Runstate(run="r").run_id() not in (first, new._binding().info.id))
"""
    ).ends_well()
    # The first error is the daemon's answer, or what it has said of the run's end if that was read before.
    assert said.pop(1) in ("SCOPE_CANCELLED 409 False", "STOPPED 0 SCOPE_CANCELLED")
    assert said == [
        "True",
        "STOPPED 0 SCOPE_CANCELLED",
        "True True False",
        *["StoppedError STOPPED"] * 3,
        "StoppedError STOPPED",
        "None None",
        "True 2 True",
        "StoppedError STOPPED True",
    ]


def test_child_runs_end_with_their_parent_and_a_deadline_with_the_clock(daemon: Daemon) -> None:
    said = daemon.program(
        """
root = runstate.run("root")
child = root.child("part")
grandchild = child.child(deadline="1h")
ids = {root.run_id(), child.run_id(), grandchild.run_id(), root.child("part").run_id()}
say(len(ids), child.run_id() in ids)
say(repr(root), repr(child), repr(grandchild), repr(runstate.Runstate()), repr(runstate.Runstate(run="x")))
child.stop()
say(name(child.run_id), name(grandchild.run_id), root.run_id() in ids)
other = root.child()
other.run_id()
root.stop()
say(name(other.once(lambda: 1, name="w")), name(other.run_id))
short = runstate.run("short", deadline="300ms")
@short.once
def work():
    signal = runstate.context().signal
    say(signal.wait(20), signal.reason.code)
    return 1
say(name(work), name(short.run_id))
say(name(runstate.run("x", deadline="0s").run_id))
"""
    ).ends_well()
    assert said == [
        "4 True",
        " ".join(f"<Runstate run={each}>" for each in ("root", "part", "(child run)", "(default run)", "x")),
        "StoppedError STOPPED StoppedError STOPPED True",
        "StoppedError STOPPED StoppedError STOPPED",
        "True DEADLINE_EXCEEDED",
        "StoppedError DEADLINE_EXCEEDED StoppedError STOPPED",
        "RunstateError VALIDATION_FAILED",
    ]


def test_threads_that_make_a_child_run_at_once_share_one(daemon: Daemon) -> None:
    said = daemon.program(
        """
for _ in range(20):
    child = runstate.child()
    barrier = threading.Barrier(8)
    found = []
    threads = [threading.Thread(target=lambda: (barrier.wait(), found.append(child.run_id()))) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(found) == 8 and len(set(found)) == 1, found
say("one each")
"""
    ).ends_well()
    assert said == ["one each"]


def test_a_fixed_client_hears_of_a_stop_after_configure(daemon: Daemon) -> None:
    program = daemon.program(
        """
run = runstate.run("r")
run.run_id()
runstate.configure(timeout="10s")
@run.once
def work():
    say("works")
    say(runstate.context().signal.wait(30))
say(name(work))
"""
    )
    program.expect("works")
    assert daemon.program("runstate.run('r').stop()").ends_well() == []
    assert program.ends_well() == ["True", "StoppedError SCOPE_CANCELLED"]


def test_spaces_do_not_see_each_other(daemon: Daemon) -> None:
    said = daemon.program(
        """
a, b = runstate.Runstate(space_id="a"), runstate.Runstate(space_id="b")
say(a.run_id() != b.run_id(), a.once(lambda: "a", name="w")(), b.once(lambda: "b", name="w")())
a.queue("q", attempts=1).send(1)
say(name(b.queue("q").send, 1))
"""
    ).ends_well()
    assert said == ["True a b", "RunstateError NOT_FOUND"]


def test_a_deadline_is_set_where_the_run_has_none_and_the_one_it_has_is_named_once(daemon: Daemon) -> None:
    said = daemon.program(
        """
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout)
runstate.Runstate(run="r").run_id()
first = runstate.run("r", deadline="1h")
deadline = first.status().run.deadline
say(deadline > datetime.datetime.now(datetime.timezone.utc))
second = runstate.run("r", deadline="2h")
say(second.status().run.deadline == deadline, second.run_id() == first.run_id())
child = second.child(deadline="3h")
say(child.status().run.deadline == deadline)
""".replace("import logging", "import datetime, logging")
    ).ends_well()
    assert [line.partition(" of ")[0] for line in said] == [
        "True",
        "the run r keeps its deadline",
        "True True",
        said[3].partition(" of ")[0],
        "True",
    ]
    assert "keeps its deadline" in said[3]


def test_a_client_made_for_a_runs_id_looks_at_that_run_and_makes_no_new_one(daemon: Daemon) -> None:
    said = daemon.program(
        """
old = runstate.Runstate(run="yesterday")
run, child = old.run_id(), old.child().run_id()
old.once(lambda: 1, name="f")()
same = runstate.run(run)
say(same.run_id() == run, same.once(lambda: 2, name="f")(), same.status().run.name)
old.finish()
late = runstate.run(run)
say(late.status().run.state, [event.type for _, event in zip(range(2), late.events())])
say(name(late.run_id), name(late.once(lambda: 3, name="f")), late.stop(), late.status().run.state)
try:
    runstate.run(run).run_id()
except runstate.StoppedError as error:
    say(error.code, error.status)
say(runstate.run(child).status().run.name, name(runstate.run(run.replace("r", "r9")).run_id))
"""
    ).ends_well()
    assert said == [
        "True 1 yesterday",
        "finished ['scope.created', 'scope.created']",
        "StoppedError STOPPED StoppedError STOPPED None finished",
        "SCOPE_CANCELLED 409",
        "(child run) RunstateError NOT_FOUND",
    ]
