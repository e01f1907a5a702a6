"""Workers: how they take jobs, how they stop, and what becomes of the jobs of those that do not stop well."""

from __future__ import annotations

import json

import pytest

from tests.e2e.support import Daemon, eventually

ECHO = """
@runstate.queue("q", concurrency=3)
def handle(input):
    ctx = runstate.context()
    effect("began", input["n"], ctx.attempt)
    if input.get("wait"):
        say("handles", input["n"]); hear()
    return {"n": input["n"], "attempt": ctx.attempt, "main": threading.current_thread() is threading.main_thread()}
"""


def producer(daemon: Daemon, call: str) -> list[str]:
    return daemon.program(f"q = runstate.queue('q')\n{call}").ends_well()


def test_concurrency_is_how_many_handlers_run_at_once(daemon: Daemon) -> None:
    worker = daemon.program(
        """
running, most = [], []
barrier = threading.Barrier(3)
@runstate.queue("q", concurrency=3)
def handle(input):
    running.append(1)
    most.append(len(running))
    barrier.wait(20)
    running.pop()
    return max(most)
@runstate.queue("one")
async def one(input):
    running_one.append(1)
    most_one.append(len(running_one))
    await asyncio.sleep(0.005)
    running_one.pop()
    return max(most_one)
running_one, most_one = [], []
say("serves")
runstate.serve()
"""
    )
    worker.expect("serves")
    said = daemon.program(
        """
q, one = runstate.queue("q", attempts=5), runstate.queue("one", attempts=5)
jobs = [q.send({"n": n}) for n in range(6)] + [one.send({"n": n}) for n in range(6)]
say({job.result() for job in jobs[:6]}, {job.result() for job in jobs[6:]})
"""
    ).ends_well()
    assert said[0] in ("{3} {1}", "{2, 3} {1}", "{1, 2, 3} {1}", "{1, 3} {1}"), said
    worker.send_signal(15)
    assert worker.ends_well() == []


def test_concurrency_of_serve_overrides_that_of_the_queues(daemon: Daemon) -> None:
    worker = daemon.program(
        """
both = threading.Barrier(2)
@runstate.queue("q")
def handle(input):
    both.wait(20)
    return "two at once"
runstate.serve(concurrency=2)
"""
    )
    daemon.waits(1)
    said = producer(daemon, "say({job.result() for job in [q.send({'n': n}) for n in range(2)]})")
    assert said == ["{'two at once'}"]
    worker.send_signal(15)
    assert worker.ends_well() == []


def test_queues_picks_what_is_served(daemon: Daemon) -> None:
    worker = daemon.program(
        """
a = runstate.queue("a", lambda input: "from a")
b = runstate.queue("b", lambda input: "from b")
say(name(runstate.serve, queues=[runstate.queue("c")]))
say(name(runstate.serve, queues=[]))
say(name(runstate.serve, queues=["a"]), name(runstate.serve, concurrency=0), name(runstate.serve, signal=7))
runstate.serve(queues=[b, b])
"""
    )
    worker.expect("ConfigError CONFIG_ERROR", "ConfigError CONFIG_ERROR")
    worker.expect("ConfigError CONFIG_ERROR ConfigError CONFIG_ERROR ConfigError CONFIG_ERROR")
    assert [wait.name for wait in daemon.waits(1)] == ["b"]
    worker.send_signal(15)
    assert worker.ends_well() == []


@pytest.mark.parametrize("kind", ["runstate.Signal()", "threading.Event()", "asyncio.Event()"])
@pytest.mark.parametrize("how", ["serve", "aserve"])
def test_a_signal_ends_serving(daemon: Daemon, kind: str, how: str) -> None:
    program = daemon.program(
        f"""
@runstate.queue("q")
def handle(input): pass
stop = {kind}
set_it = stop.set if hasattr(stop, "set") else stop._set
async def main():
    asyncio.get_running_loop().call_later(0.05, set_it)
    await runstate.aserve(signal=stop)
if {how!r} == "aserve":
    asyncio.run(main())
else:
    threading.Timer(0.05, set_it).start()
    runstate.serve(signal=stop)
say("left", runstate.serve(signal=stop))
"""
    )
    assert program.ends_well() == ["left None"]


@pytest.mark.parametrize("number", [15, 2])
def test_a_worker_that_is_told_to_stop_finishes_what_it_has_and_takes_no_more(daemon: Daemon, number: int) -> None:
    worker = daemon.program(ECHO + "say('before', signal.getsignal(15)); runstate.serve(concurrency=1); say('left')")
    assert worker.hear().startswith("before")
    sender = daemon.program(
        "q = runstate.queue('q', attempts=5)\n"
        "say(q.send({'n': 1, 'wait': True}).id != '', q.send({'n': 2}).id != '')\n"
        "say(q({'n': 1, 'wait': True}))"
    )
    sender.expect("True True")
    worker.expect("handles 1")
    worker.send_signal(number)
    eventually(lambda: not [w for w in daemon.status().waits if w.kind == "queue" and w.pid == worker.pid])
    worker.say()
    worker.expect("left")
    assert worker.end() == 0
    assert sender.ends_well() == ["{'n': 1, 'attempt': 1, 'main': False}"]
    assert daemon.effects() == ["began 1 1"]
    assert daemon.status().queues[0].counts == {"ready": 1, "succeeded": 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_second_ctrl_c_leaves_at_once_and_the_job_goes_to_another_worker_uncounted(
    daemon: Daemon, asynchronous: bool
) -> None:
    handler = "async def handle(input):\n    say('handles')\n    await asyncio.sleep(100)"
    if not asynchronous:
        handler = "def handle(input):\n    say('handles')\n    time.sleep(100)"
    worker = daemon.program(
        f"""
@runstate.queue("q", lease="600s", concurrency=2)
{handler}
try:
    runstate.serve()
except KeyboardInterrupt:
    say("interrupted")
"""
    )
    sender = daemon.program("say(runstate.queue('q', attempts=5)({'n': 1}))")
    worker.expect("handles")
    # By the wait for its free place one sees that the first signal was noticed: two at once are one to Python.
    eventually(lambda: bool([w for w in daemon.status().waits if w.pid == worker.pid]))
    worker.send_signal(2)
    eventually(lambda: not [w for w in daemon.status().waits if w.pid == worker.pid])
    worker.send_signal(2)
    worker.expect("interrupted")
    assert worker.end() == 0
    other = daemon.program(ECHO + "runstate.serve()")
    assert sender.ends_well() == ["{'n': 1, 'attempt': 1, 'main': False}"]
    other.send_signal(15)
    assert other.ends_well() == []


def test_after_the_drain_coroutines_give_their_jobs_back_and_threads_keep_theirs(daemon: Daemon) -> None:
    """A thread cannot be ended. While it goes on, nobody else may do its job."""
    worker = daemon.program(
        """
from runstate import serving
serving.DRAIN_S = 0.2
go_on = threading.Event()
@runstate.queue("thread", lease="600s")
def thread(input):
    say("thread handles"); go_on.wait(); say("thread ends")
@runstate.queue("coroutine", lease="600s")
async def coroutine(input):
    try:
        say("coroutine handles"); await asyncio.sleep(100)
    finally:
        say("coroutine ends")
over = threading.Event()
threading.Thread(target=lambda: (hear(), over.set())).start()
runstate.serve(signal=over)
say("left")
hear(); go_on.set()
hear()
"""
    )
    sender = daemon.program(
        "jobs = [runstate.queue(n, attempts=5).send(1) for n in ('thread', 'coroutine')]\n"
        "say('sent'); say([job.result() for job in jobs[::-1]])"
    )
    sender.expect("sent")
    assert {worker.hear(), worker.hear()} == {"thread handles", "coroutine handles"}
    worker.say()
    worker.expect("coroutine ends", "left")
    other = daemon.program(
        "for q in ('thread', 'coroutine'):\n"
        "    runstate.queue(q, lambda input, q=q: say('other takes', q) or runstate.context().attempt)\n"
        "runstate.serve()"
    )
    other.expect("other takes coroutine")
    daemon.waits(3)
    assert [holding.kind for holding in daemon.holdings()] == ["job"], "the thread still has its job"
    assert not other.has_said()
    worker.say()
    worker.expect("thread ends")
    other.expect("other takes thread")
    assert sender.ends_well() == ["[1, 1]"]
    other.send_signal(15)
    assert other.ends_well() == []


def test_failures_are_retried_with_a_growing_pause_until_the_attempts_are_used_up(daemon: Daemon) -> None:
    worker = daemon.program(
        """
@runstate.queue("q", attempts=2)
def handle(input):
    effect(runstate.context().attempt, time.monotonic())
    if runstate.context().attempt >= input["good_from"]:
        return "good"
    raise ValueError(f"bad doc {input['n']}")
runstate.serve()
"""
    )
    said = daemon.program(
        """
q = runstate.queue("q", attempts=2)
say(q({"n": 1, "good_from": 2}))
try:
    q({"n": 3, "good_from": 9})
except runstate.TaskFailedError as error:
    say(error, "|", error.reason, "|", error.code, error.job_id == q.send({"n": 3, "good_from": 9}).id)
"""
    ).ends_well()
    assert said == ["good", "ValueError: bad doc 3 | handler_error: ValueError: bad doc 3 | TASK_FAILED True"]
    tries = [line.split() for line in daemon.effects()]
    assert [attempt for attempt, _ in tries] == ["1", "2", "1", "2"]
    assert all(float(tries[n + 1][1]) - float(tries[n][1]) >= 0.5 for n in (0, 2))
    worker.send_signal(15)
    assert worker.ends_well() == []


ODD = """
import dataclasses, logging
logging.getLogger("runstate.failures").disabled = True
class Odd(BaseException): pass
HANDLERS = {
    "set": lambda: {1, 2},
    "nan": lambda: float("nan"),
    "surrogate": lambda: chr(0xD800),
    "large": lambda: "x" * 65_535,
    "exactly": lambda: "x" * 65_534,
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "odd": lambda: (_ for _ in ()).throw(Odd("odd")),
    "stop": lambda: next(iter(())),
    "cancel": lambda: (_ for _ in ()).throw(asyncio.CancelledError()),
    "deep": lambda: __import__("functools").reduce(lambda a, _: [a], range(100_000), 0),
    "long": lambda: (_ for _ in ()).throw(ValueError("y" * 5_000 + chr(0xD800))),
    "tuple": lambda: (1, 2),
}
@runstate.queue("plain", attempts=1, concurrency=4)
def plain(what): return HANDLERS[what]()
@runstate.queue("asynchronous", attempts=1, concurrency=4)
async def asynchronous(what): return HANDLERS[what]()
"""


@pytest.mark.parametrize("how", ["serve", "aserve"])
def test_no_handler_takes_its_worker_down(daemon: Daemon, how: str) -> None:
    worker = daemon.program(
        ODD + ("runstate.serve()" if how == "serve" else "asyncio.run(runstate.aserve())"),
        fresh=True,
        PYTHONWARNINGS="error",
    )
    said = daemon.program(
        ODD
        + """
for queue in (plain, asynchronous):
    outcomes = {}
    for what in HANDLERS:
        try:
            outcomes[what] = str(queue.send(what).result("15s"))[:60]
        except runstate.RunstateError as error:
            outcomes[what] = f"{type(error).__name__} {error}"[:110]
    say(json.dumps(outcomes))
"""
    ).ends_well()
    for line in said:
        outcomes = json.loads(line)
        assert outcomes.pop("exactly") == "x" * 60
        assert outcomes.pop("tuple") == "[1, 2]"
        for what in ("set", "nan", "surrogate", "deep"):
            outcome = outcomes.pop(what)
            assert outcome.startswith("TaskFailedError ConfigError: "), (what, outcome)
            assert "JSON" in outcome, (what, outcome)
        assert outcomes.pop("large").startswith("TaskFailedError"), outcomes
        assert outcomes.pop("exit") == "TaskFailedError SystemExit: 3"
        assert outcomes.pop("interrupt").startswith("TaskFailedError KeyboardInterrupt")
        assert outcomes.pop("odd") == "TaskFailedError Odd: odd"
        assert "StopIteration" in outcomes.pop("stop")
        assert outcomes.pop("cancel").startswith("TaskFailedError CancelledError")
        assert outcomes.pop("long").startswith("TaskFailedError ValueError: yyyy")
        assert not outcomes
    if how == "serve":
        worker.send_signal(15)
        assert worker.ends_well() == []
    assert worker.errors() == ""


def test_jobs_of_child_runs_are_served_from_above_by_age_and_by_whoever_came_first(daemon: Daemon) -> None:
    worker = daemon.program(
        """
@runstate.queue("q")
def handle(input):
    return [runstate.context().run.name, runstate.context().run.id]
runstate.serve()
"""
    )
    daemon.waits(1)
    said = daemon.program(
        """
child = runstate.child("part")
grandchild = child.child()
queue = grandchild.queue("q", attempts=5)
run_name, run_id = queue({"n": 1})
say(run_name, run_id == grandchild.run_id())
run_name, run_id = child.queue("q")({"n": 1})
say(run_name, run_id == child.run_id())
"""
    ).ends_well()
    assert said == ["(child run) True", "part True"]
    worker.send_signal(15)
    assert worker.ends_well() == []


def test_a_worker_of_a_child_run_that_waits_first_does_not_keep_the_roots_jobs_from_others(daemon: Daemon) -> None:
    boss = daemon.program(
        """
child = runstate.child("part")
say(child.run_id())
@child.queue("q")
def handle(input):
    return "by the worker of the child"
runstate.serve(queues=[handle])
"""
    )
    boss.hear()
    daemon.waits(1)
    root = daemon.program("runstate.queue('q', lambda input: 'by the worker of the root')\nrunstate.serve()")
    daemon.waits(2)
    said = daemon.program("q = runstate.queue('q')\nsay({q({'n': n}) for n in range(3)})").ends_well()
    assert said == ["{'by the worker of the root'}"]
    for worker in (boss, root):
        worker.send_signal(15)
        assert worker.ends_well() == []


def test_a_stop_ends_serve_at_once(daemon: Daemon) -> None:
    worker = daemon.program(
        """
@runstate.queue("q")
def handle(input):
    say("handles")
    say(runstate.context().signal.wait(30), type(runstate.context().signal.reason).__name__)
say(runstate.serve())
"""
    )
    sender = daemon.program("say('sends'); say(name(runstate.queue('q', attempts=5), {'n': 1}))")
    sender.expect("sends")
    worker.expect("handles")
    assert daemon.program("runstate.stop()").ends_well() == []
    assert worker.ends_well() == ["True StoppedError", "None"]
    assert sender.ends_well() == ["StoppedError SCOPE_CANCELLED"]


def test_serve_goes_on_while_one_of_its_runs_is_over(daemon: Daemon) -> None:
    worker = daemon.program(
        """
other = runstate.run("other")
@other.queue("a")
def a(input): return "a"
@runstate.queue("b")
def b(input): return "b"
say(runstate.serve())
"""
    )
    daemon.waits(2)
    assert daemon.program("runstate.run('other').stop()").ends_well() == []
    daemon.waits(1)
    assert daemon.program("say(runstate.queue('b')(1)); runstate.stop()").ends_well() == ["b"]
    assert worker.ends_well() == ["None"]


def test_serve_twice_and_a_cancelled_aserve(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.queue("q")
async def handle(input):
    handled.set()
    await asyncio.sleep(0.05)
    return "finished in the drain"
async def main():
    global handled
    handled = asyncio.Event()
    server = asyncio.ensure_future(runstate.aserve())
    job = await handle.asend(1)
    await handled.wait()
    server.cancel()
    [outcome] = await asyncio.gather(server, return_exceptions=True)
    say(type(outcome).__name__, await job.aresult())
asyncio.run(main())
over = threading.Event(); over.set()
say(runstate.serve(signal=over), runstate.serve(signal=over))
async def inside():
    say(name(runstate.serve))
asyncio.run(inside())
"""
    )
    assert program.ends_well() == ["CancelledError finished in the drain", "None None", "ConfigError CONFIG_ERROR"]


def test_serve_in_a_thread_does_not_touch_signals(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.queue("q")
def handle(input): return "handled"
over = threading.Event()
before = signal.getsignal(2), signal.getsignal(15)
thread = threading.Thread(target=lambda: runstate.serve(signal=over))
thread.start()
say(handle(1), (signal.getsignal(2), signal.getsignal(15)) == before)
over.set(); thread.join()
"""
    )
    assert program.ends_well() == ["handled True"]


def test_errors_at_the_start_end_serve(daemon: Daemon) -> None:
    daemon.program("runstate.queue('q', attempts=7).send(1)").ends_well()
    said = daemon.program(
        """
runstate.queue("fine", lambda input: 1)
runstate.queue("q", lambda input: 1)
say(name(runstate.serve), threading.active_count() < 6)
"""
    ).ends_well()
    assert said == ["ConflictError CONFLICT True"]
