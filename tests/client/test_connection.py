"""The session as its users see it: threads, event loops, interrupted loops, lost connections, finalisers."""

from __future__ import annotations

import pytest

from tests.e2e.support import Daemon, eventually


def test_twenty_threads_share_one_client_and_one_session(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.once
def work(n):
    effect(n)
    return [n]
barrier = threading.Barrier(20)
wrong = []
def calls(number):
    barrier.wait()
    for n in range(30):
        if work(n) != [n]:
            wrong.append(n)
threads = [threading.Thread(target=calls, args=(n,)) for n in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(wrong)
hear()
"""
    )
    program.expect("[]")
    assert sorted(map(int, daemon.effects())) == list(range(30)), "concurrent calls in one client share one execution"
    assert len([w for w in daemon.status().workers if w.pid == program.pid]) == 1


def test_two_callers_in_one_process_share_one_execution(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.once
async def work(n):
    effect(n)
    await asyncio.sleep(0.05)
    return n
@runstate.once(name="work")
def plain(n):
    effect("plain", n)
    return n
async def main():
    a, b, c = await asyncio.gather(work(1), work(1), asyncio.to_thread(plain, 1))
    say(a, b, c)
asyncio.run(main())
"""
    )
    assert program.ends_well() == ["1 1 1"]
    assert len(daemon.effects()) == 1


def test_three_event_loops_at_once_and_one_after_the_other(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.once
async def work(n):
    await asyncio.sleep(0.001)
    return n
async def main(first):
    found = await asyncio.gather(*(work(n) for n in range(first, first + 50)))
    assert found == list(range(first, first + 50)), found
    return found[0]
threads = [threading.Thread(target=lambda n=n: say(asyncio.run(main(n)))) for n in (0, 1, 2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(asyncio.run(main(0)), asyncio.run(main(60)))
"""
    )
    assert sorted(program.ends_well()) == ["0", "0 60", "1", "2"]


def test_a_loop_that_is_closed_while_a_call_is_under_way(daemon: Daemon) -> None:
    holder = daemon.program("@runstate.once\ndef work(): say('works'); hear(); raise ValueError\nsay(name(work))")
    holder.expect("works")
    program = daemon.program(
        """
import gc, warnings
warnings.simplefilter("ignore")
@runstate.once(name="work")
async def work():
    say("must not run")
@runstate.once
def other(n):
    return n
loop = asyncio.new_event_loop()
task = loop.create_task(work())
loop.run_until_complete(asyncio.sleep(0.2))
loop.set_exception_handler(lambda *_: None)
loop.close()
say("closed", other(1))
hear()
del task
gc.collect()
say(other(2), asyncio.run(asyncio.wait_for(asyncio.to_thread(other, 3), 10)))
hear()
"""
    )
    daemon.waits(1)
    program.expect("closed 1")
    behind = daemon.program("@runstate.once\ndef work(): return 'behind'\nsay(work())")
    daemon.waits(2)
    holder.say()
    assert holder.ends_well() == ["ValueError "]
    assert behind.ends_well() == ["behind"], "what nobody waits for is given back at once"
    program.say()
    program.expect("2 3")
    daemon.nothing_is_left()


BLOCKED = """
running = asyncio.Event()
@runstate.once(name="work")
async def awaited(n):
    say("awaited runs")
    running.set()
    await asyncio.sleep(0.01)
    return n
@runstate.once(name="work")
def blocking(n):
    return [n]
@runstate.queue("q")
async def handle(input):
    await asyncio.sleep(0)
    return input["n"]
"""


def test_a_blocking_call_that_waits_for_a_task_of_its_own_loop_is_refused(daemon: Daemon) -> None:
    program = daemon.program(
        BLOCKED
        + """
async def main():
    task = asyncio.ensure_future(awaited(1))
    await running.wait()
    say(name(blocking, 1))
    say(blocking(2), "works where nobody is blocked")
    say(await task, blocking(1))
asyncio.run(main())
"""
    )
    assert program.ends_well() == [
        "awaited runs",
        "ConfigError CONFIG_ERROR",
        "[2] works where nobody is blocked",
        "1 1",
    ]


def test_a_blocking_call_is_refused_when_a_task_of_its_loop_takes_the_work_over(daemon: Daemon) -> None:
    """At first it waits for another process, which is fine. That one dies, and a task of the blocked loop is next."""
    holder = daemon.program("@runstate.once\ndef work(n): say('works'); hear()\nwork(1)")
    holder.expect("works")
    program = daemon.program(
        BLOCKED
        + """
async def main():
    task = asyncio.ensure_future(awaited(1))
    await asyncio.to_thread(hear)
    say(name(blocking, 1))
    say(await task)
asyncio.run(main())
"""
    )
    daemon.waits(1)
    program.say()
    daemon.waits(2)
    holder.kill()
    assert program.ends_well() == ["ConfigError CONFIG_ERROR", "awaited runs", "1"]


def test_a_blocking_producer_in_the_loop_that_serves_is_refused_unless_another_worker_takes_the_job(
    daemon: Daemon,
) -> None:
    source = (
        BLOCKED
        + """
async def main():
    over = threading.Event()
    server = asyncio.ensure_future(runstate.aserve(signal=over, concurrency=int(sys.argv[1])))
    queue = runstate.queue("q")
    say("serves")
    await asyncio.to_thread(hear)
    say(name(lambda: queue.send({"n": 7}).result()))
    say(await queue({"n": 8}))
    over.set()
    await server
asyncio.run(main())
"""
    )
    alone = daemon.program(source, 1)
    alone.expect("serves")
    daemon.waits(1)
    alone.say()
    assert alone.ends_well() == ["ConfigError CONFIG_ERROR", "8"]


def test_a_blocking_producer_in_a_loop_works_when_another_process_handles_the_job(daemon: Daemon) -> None:
    worker = daemon.program(BLOCKED + "runstate.serve()")
    daemon.waits(1)
    program = daemon.program(
        """
async def main():
    say(runstate.queue("q").send({"n": 7}).result())
asyncio.run(main())
"""
    )
    assert program.ends_well() == ["7"]
    worker.send_signal(15)
    assert worker.ends_well() == []


CIRCLE = """
me, other = sys.argv[1:3]
@runstate.once
def a(): return step("a", b)
@runstate.once
def b(): return step("b", c if len(sys.argv) > 3 else a)
@runstate.once
def c(): return step("c", a)
def step(mine, then):
    if mine != me:
        return "ran " + mine
    say("holds", mine); hear()
    try:
        return then()
    except runstate.RunstateError as error:
        say(type(error).__name__, error.code, error)
        return "refused"
say({"a": a, "b": b, "c": c}[me]())
"""


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_wait_that_would_close_a_circle_of_processes_is_refused(daemon: Daemon, names: str) -> None:
    more = ["three"] if len(names) == 3 else []
    programs = [daemon.program(CIRCLE, name, names[(n + 1) % len(names)], *more) for n, name in enumerate(names)]
    for program, name in zip(programs, names, strict=True):
        program.expect(f"holds {name}")
    for n, program in enumerate(programs[:-1]):
        program.say()
        daemon.waits(n + 1)
    programs[-1].say()
    refused = programs[-1].hear()
    assert refused.startswith("RunstateError DEADLOCK deadlock: "), refused
    for program in programs:
        assert f"(pid {program.pid})" in refused
    for program in programs:
        assert program.ends_well() == ["refused"]


def test_a_circle_within_one_thread_is_refused(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.once
def work(n):
    return work(n)
say(name(work, 1))
@runstate.once
async def awork(n):
    return await awork(n)
say(name(asyncio.run, awork(1)))
"""
    )
    assert program.ends_well() == ["RunstateError DEADLOCK"] * 2


def test_a_lost_connection_is_made_anew_without_an_error(daemon: Daemon) -> None:
    """Cut again and again under four threads and a hold; the session and the lease stay."""
    program = daemon.program(
        """
@runstate.once(lease="5s")
def outer():
    [connection] = runstate._default._core._made.values()
    session = connection.session
    def calls(number):
        for n in range(60):
            assert work(number, n) == [number, n]
        good.append(number)
    threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
    for thread in threads: thread.start()
    while any(thread.is_alive() for thread in threads):
        stream = connection._stream
        if stream is not None:
            stream.cut()
        time.sleep(0.01)
    return [len(good), runstate.context().signal.is_set(), connection.session == session]
good = []
@runstate.once
def work(number, n):
    effect(number, n)
    return [number, n]
say(outer())
hear()
"""
    )
    program.expect("[4, False, True]")
    assert len(daemon.effects()) == len(set(daemon.effects())) == 240
    daemon.nothing_is_left()


def test_what_nobody_refers_to_any_more_goes_back_at_once(daemon: Daemon) -> None:
    program = daemon.program(
        """
from runstate import wire
import gc
client = runstate.Runstate()
run = client.run_id()
connection = client._core.connection()
answer = connection.call(wire.OnceAcquire(run=run, key="k", lease_ms=600_000))
say("held"); hear()
del answer
say("dropped"); hear()
circle = [connection.call(wire.OnceAcquire(run=run, key="k", lease_ms=600_000))]
circle.append(circle)
del circle
gc.collect()
say("collected"); hear()
"""
    )
    program.expect("held")
    assert len(daemon.holdings()) == 1
    program.say()
    program.expect("dropped")
    daemon.nothing_is_left()
    program.say()
    program.expect("collected")
    daemon.nothing_is_left()


def test_clients_that_are_gone_leave_no_threads_sessions_or_descriptors(daemon: Daemon) -> None:
    program = daemon.program(
        """
import gc
def use():
    client = runstate.Runstate(run="r")
    client.configure(timeout="10s")
    assert client.once(lambda: 1, name="one")() == 1
    client.configure(timeout="20s")
    assert client.once(lambda n: n, name="fresh")(os.urandom(4).hex())
before = threading.active_count(), len(os.listdir("/proc/self/fd"))
for _ in range(20):
    use()
gc.collect()
deadline = time.monotonic() + 15
while (threading.active_count(), len(os.listdir("/proc/self/fd"))) != before and time.monotonic() < deadline:
    time.sleep(0.01)
say(threading.active_count() - before[0], len(os.listdir("/proc/self/fd")) - before[1])
hear()
"""
    )
    program.expect("0 0")
    eventually(lambda: not [w for w in daemon.status().workers if w.pid == program.pid])


def test_a_daemon_that_does_not_answer_is_reported_after_the_timeout(daemon: Daemon) -> None:
    program = daemon.program(
        """
import time
runstate.configure(timeout="1500ms", retries=0)
say(runstate.run_id() != "")
hear()
began = time.monotonic()
say(name(runstate.run("other").run_id), time.monotonic() - began < 2.8)
say(name(asyncio.run, runstate.run("other").arun_id()))
hear()
say(runstate.run("other").run_id() != "")
"""
    )
    program.expect("True")
    daemon.pause()
    program.say()
    program.expect("UnavailableError UNAVAILABLE True")  # after one time-out, not two
    program.expect("UnavailableError UNAVAILABLE")
    daemon.go_on()
    program.say()
    assert program.ends_well() == ["True"]


def test_a_call_from_a_finaliser_or_a_handler_in_the_middle_of_a_send_is_an_error_and_no_hang(daemon: Daemon) -> None:
    program = daemon.program(
        """
@runstate.once
def work(n):
    return n
say(work(1))
connection = runstate._default._core.connection()
with connection._lock:
    say(name(work, 2))
say(work(2))
"""
    )
    assert program.ends_well() == ["1", "UnavailableError UNAVAILABLE", "2"]


def test_a_call_that_begins_while_its_session_is_closed_is_answered(daemon: Daemon) -> None:
    program = daemon.program(
        """
from runstate.connection import Connection
client = runstate.Runstate()
connection = client._core.connection()
def trace(frame, event, argument):
    if event == "return" and frame.f_code is Connection._wake_reader.__code__:
        connection.close()  # as another thread does, before the reader thread has looked
    return trace
sys.settrace(trace)
say(client.run_id() != "")
sys.settrace(None)
say(client.once(lambda: 1, name="work")())
"""
    )
    assert program.ends_well() == ["True", "1"]
