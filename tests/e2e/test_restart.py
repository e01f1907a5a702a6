"""The daemon is killed, restarted and stopped under its clients: what was acknowledged stays, and they just go on."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import time

from runstate import wire
from tests.e2e.support import Daemon, Raw, eventually

SEED = int(os.environ.get("RUNSTATE_TEST_SEED", random.randrange(10**6)))

# Eight of these work until they are told to stop. What they did to the world is in the effects file, what was
# acknowledged to them is what they say at the end.
LOAD = """
number = int(sys.argv[1])
over = threading.Event()
@runstate.once
def cycle(n):
    effect("once", n, runstate.context().attempt)
    return [n, os.getpid(), random.random()]

@runstate.queue("jobs", concurrency=2)
def jobs(input):
    effect("job", input["n"], runstate.context().attempt)
    return {"n": input["n"], "by": os.getpid(), "r": random.random()}

results, seen = {}, {}
def call_once():
    n = 0
    while not over.is_set():
        n += 1
        results[n] = cycle(n)
def call_jobs():
    n = 0
    while not over.is_set():
        n += 1
        seen[n] = jobs({"n": n})
def serve():
    runstate.serve(signal=over)
failed = []
def guarded(work):
    def run():
        try:
            work()
        except BaseException as error:
            failed.append(repr(error))
            say("failed", repr(error))
            raise
    return threading.Thread(target=run, daemon=True)
threads = [guarded(call_once), guarded(call_jobs)]
server = guarded(serve)
for thread in (*threads, server):
    thread.start()
say("started")
hear()
over.set()
for thread in (*threads, server):
    thread.join(40)
say(json.dumps({"alive": [t.is_alive() for t in (*threads, server)], "failed": failed, "once": results, "jobs": seen}))
"""


def under_load(daemon: Daemon, disturb: collections.abc.Callable[[random.Random], None], times: int) -> None:
    """Disturbs the daemon again and again while eight processes work, then checks that every promise was kept."""
    print(f"RUNSTATE_TEST_SEED={SEED}")
    dice = random.Random(SEED)
    programs = [daemon.program(LOAD, n) for n in range(8)]
    for program in programs:
        program.expect("started")
    for _ in range(times):
        before = len(daemon.effects())
        eventually(lambda before=before: len(daemon.effects()) > before + 10, "the work goes on")
        time.sleep(dice.random() / 20)  # a random moment is the point here
        disturb(dice)
    before = len(daemon.effects())
    eventually(lambda: len(daemon.effects()) > before + 10, "the work goes on")
    for program in programs:
        program.say("stop")
    said = [json.loads(program.hear()) for program in programs]
    for program in programs:
        assert program.end() == 0, program.errors()
    for told in said:
        assert (told["alive"], told["failed"]) == ([False] * 3, [])
    daemon.nothing_is_left()
    daemon.terminate()
    check_promises(daemon, said)


def check_promises(daemon: Daemon, said: list[dict[str, dict[str, object]]]) -> None:
    recorded = {key: json.loads(r) for key, r in daemon.rows("SELECT key, result FROM once_keys WHERE state = 'done'")}
    once = {json.dumps(result[0]): result for result in recorded.values()}
    jobs = {}
    for state, result in daemon.rows("SELECT state, result FROM jobs"):
        assert state == "succeeded", state
        jobs[json.dumps(json.loads(result)["n"])] = json.loads(result)
    for told in said:
        for n, result in told["once"].items():
            assert once[n] == result, "an acknowledged result is recorded, and the same for all"
        for n, result in told["jobs"].items():
            assert jobs[n] == result
    assert len(once) == max(len(told["once"]) for told in said)
    # No process died, so nothing may have been done twice: neither a key nor a job.
    twice = {effect: count for effect, count in collections.Counter(daemon.effects()).items() if count > 1}
    assert not twice
    assert all(line.split()[2] == "1" for line in daemon.effects()), "first attempts only"
    events = collections.Counter(kind for (kind,) in daemon.rows("SELECT type FROM events"))
    assert events["once.completed"] == len(once)
    assert events["task.succeeded"] == len(jobs)
    assert not daemon.rows("SELECT * FROM leases")


def test_the_daemon_killed_again_and_again_under_load_breaks_no_promise(daemon: Daemon) -> None:
    def disturb(dice: random.Random) -> None:
        daemon.kill()
        daemon.start()

    under_load(daemon, disturb, 4)


def test_clean_restarts_under_load_break_no_promise(daemon: Daemon) -> None:
    def disturb(dice: random.Random) -> None:
        if dice.random() < 0.5:
            daemon.restart()
        else:
            answer = daemon.run("restart")
            assert answer.returncode == 0, answer.stderr

    under_load(daemon, disturb, 3)


def test_waiting_calls_keep_their_order_across_a_kill(daemon: Daemon) -> None:
    holder = daemon.program(
        """
@runstate.once(lease="30s")
def work():
    say("works"); hear(); raise ValueError("next, please")
say(name(work))
"""
    )
    holder.expect("works")
    source = """
@runstate.once(lease="30s", attempts=100)
def work():
    effect(sys.argv[1]); raise ValueError("next, please")
say(name(work))
"""
    waiters = []
    for n in range(5):
        waiters.append(daemon.program(source, n))
        daemon.waits(n + 1)
    daemon.restart(kill=True)
    eventually(lambda: len(daemon.status().waits) == 5)
    assert [w.ahead for w in daemon.status().waits] == [0, 1, 2, 3, 4]
    late = daemon.program(source, "late")
    daemon.waits(6)
    holder.say()
    for program in (holder, *waiters, late):
        assert program.ends_well() == ["ValueError "]
    assert daemon.effects() == ["0", "1", "2", "3", "4", "late"]


def test_a_client_that_is_not_back_yet_is_not_overtaken(daemon: Daemon) -> None:
    """The lines stay shut until every live session is back: a stopped process keeps them shut for at most 2 s."""
    source = """
@runstate.once(lease="30s", attempts=100)
def work():
    effect(sys.argv[1]); say("works", sys.argv[1]); hear(); raise ValueError("next, please")
say(name(work))
"""
    first = daemon.program(source, "first")
    first.expect("works first")
    second = daemon.program(source, "second")
    daemon.waits(1)
    first.send_signal(signal.SIGSTOP)
    second.send_signal(signal.SIGSTOP)
    daemon.restart(kill=True)
    third = daemon.program(source, "third")
    second.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGCONT)
    daemon.waits(2)
    first.say()
    second.expect("works second")
    second.say()
    third.expect("works third")
    assert daemon.effects() == ["first", "second", "third"]


def test_a_stop_during_the_absence_is_noticed(daemon: Daemon) -> None:
    """A run ends while a client is cut off; when it is back it is told at once, in its signal and in its waits."""
    worker = daemon.program(
        """
@runstate.once
def work():
    signal = runstate.context().signal
    say("works", runstate.run_id())
    say(signal.wait(30), type(signal.reason).__name__)
    return 1
say(name(work))
"""
    )
    run = worker.hear().split()[1]
    waiter = daemon.program("@runstate.once\ndef work(): return 2\nsay(name(work))")
    daemon.waits(1)
    for program in (worker, waiter):
        program.send_signal(signal.SIGSTOP)
    daemon.restart(kill=True)
    with Raw(daemon.socket) as raw:
        raw.hello()
        assert raw.ask(wire.RunsEnd(run=run, state="stopped")).state == "stopped"
        for program in (worker, waiter):
            program.send_signal(signal.SIGCONT)
        worker.expect("True StoppedError", "StoppedError SCOPE_CANCELLED")
        waiter.expect("StoppedError SCOPE_CANCELLED")


def test_a_client_that_only_listens_comes_back_and_keeps_its_child_run(daemon: Daemon) -> None:
    """With no call open and nothing held, too: otherwise its child run would end when its session does."""
    program = daemon.program(
        """
child = runstate.child("part")
say(child.run_id())
say(hear())
@child.once
def work(): return "done in the child"
say(work())
"""
    )
    run = program.hear()
    daemon.restart(kill=True)
    back = eventually(lambda: [w for w in daemon.status().workers if w.pid == program.pid and w.connected])
    assert back
    with Raw(daemon.socket) as raw:
        raw.hello()
        assert raw.ask(wire.RunsGet(run=run)).state == "active"
    program.say("go on")
    assert program.ends_well() == ["go on", "done in the child"]


def test_a_client_that_only_listens_starts_no_daemon(daemon: Daemon) -> None:
    program = daemon.program(
        """
from runstate import autostart
find = autostart.find
autostart.find = lambda *a, **k: (effect("looked"), find(*a, **k))[1]
say(runstate.child().run_id() != "")
kept = runstate.child()
say(kept.run_id() != "")
hear()
"""
    )
    program.expect("True", "True")
    before = len(daemon.effects())
    daemon.kill()
    eventually(lambda: len(daemon.effects()) >= before + 3, "it looks for a daemon")
    assert daemon.holder() is None
    daemon.start()
    eventually(lambda: any(w.pid == program.pid and w.connected for w in daemon.status().workers))


GIVEN_UP = """
@runstate.once(name="work")
async def work():
    raise AssertionError("nobody waits for it")
from runstate import greeting
dial = greeting.dial
def late(*args, **options):
    say("away"); hear(); return dial(*args, **options)
async def main():
    task = asyncio.ensure_future(work())
    await asyncio.to_thread(hear)
    greeting.dial = late
    [connection] = runstate._default._core._made.values()
    connection._stream.cut()
    while connection._stream is not None:
        await asyncio.sleep(0.01)
    task.cancel()
    [given_up] = await asyncio.gather(task, return_exceptions=True)
    say(type(given_up).__name__)
    await asyncio.to_thread(hear)
asyncio.run(main())
"""


def test_a_wait_that_was_given_up_while_the_connection_was_lost_is_not_served(daemon: Daemon) -> None:
    """The session is resumed with its old waits; what nobody waits for any more must not hold up the others."""
    holder = daemon.program("@runstate.once\ndef work(): say('works'); hear(); raise ValueError\nsay(name(work))")
    holder.expect("works")
    program = daemon.program(GIVEN_UP)
    daemon.waits(1)
    behind = daemon.program("@runstate.once\ndef work(): return 'at once'\nsay(work())")
    daemon.waits(2)
    program.say("cut")
    assert {program.hear(), program.hear()} == {"away", "CancelledError"}
    program.say("dial")
    daemon.waits(1)
    holder.say()
    assert behind.ends_well() == ["at once"]
    assert holder.ends_well() == ["ValueError "]
    daemon.nothing_is_left()
    program.say("end")
    assert program.ends_well() == []
