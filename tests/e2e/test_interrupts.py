"""Ctrl-C and cancellation at any moment: the next call gets the right answer, nothing stays held, nobody waits longer.

The moments come from a seed that is printed. Leases are 30 s long, so a hold that leaks makes a test hang until its
limit instead of passing a little later.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest

from tests.e2e.support import Daemon

SEED = int(os.environ.get("RUNSTATE_TEST_SEED", random.randrange(10**6)))

INTERRUPTS = """
dice = random.Random(int(sys.argv[1]))
rounds = int(sys.argv[2])

def strike(delay):
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(call, within_s):
    # Calls it, and is hit by a real SIGINT at some moment of it, or just before or after.
    thread = threading.Thread(target=strike, args=(dice.random() * within_s,))
    result = "interrupted"
    try:
        thread.start()
        result = call()
        thread.join()
        time.sleep(10)  # until it strikes
    except KeyboardInterrupt as error:
        kept.append(error)  # as an interactive session does: a traceback that is kept must not keep what was held
    thread.join()
    return result

kept = []
hits = 0
"""


ONCE = (
    INTERRUPTS
    + """
@runstate.once(lease="30s")
def work(n):
    if nap:
        time.sleep(nap)
    return n
@runstate.once(lease="30s")
def other(n):
    return [n]

def others():  # calls of other threads must not suffer
    n = 0
    while not over.is_set():
        n += 1
        assert other(n) == [n]
    done.append(n)
assert other(0) == [0]  # what a first call imports is in place: an import that is interrupted is Python's own affair
over, done = threading.Event(), []
threads = [threading.Thread(target=others, daemon=True) for _ in range(int(sys.argv[3]))]
for thread in threads:
    thread.start()
worst = 0
for n in range(rounds):
    nap = dice.choice([0, 0.001])
    result = interrupted(lambda: work(n), 0.004)
    assert result in (n, "interrupted"), result
    hits += result == "interrupted"
    before = time.monotonic()
    assert work(n) == n, "the next call gets the right answer"
    worst = max(worst, time.monotonic() - before)
over.set()
for thread in threads:
    thread.join(10)
assert len(done) == len(threads), "a call of another thread hangs"
say("hits", hits > rounds // 10, "worst", worst)
hear()
"""
)


@pytest.mark.parametrize("others", [0, 2])
def test_ctrl_c_in_once_at_any_moment(shared: Daemon, others: int) -> None:
    print(f"RUNSTATE_TEST_SEED={SEED}")
    program = shared.program(ONCE, SEED, 150, others)
    said = program.hear().split()
    assert said[:3] == ["hits", "True", "worst"], program.errors()
    assert float(said[3]) < 2, "taken over at once, not when the lease is over"
    shared.nothing_is_left()


def test_ctrl_c_while_connecting(shared: Daemon) -> None:
    """The first call of a client, again and again: in the start of its threads, in the connect, in the hello."""
    program = shared.program(
        INTERRUPTS
        + """
clients = []  # their finalisers would swallow an interrupt, as all finalisers do
for n in range(rounds):
    client = runstate.Runstate(run="r")
    clients.append(client)
    work = client.once(lambda n: n, name="work")
    result = interrupted(lambda: work(n), 0.003)
    assert result in (n, "interrupted"), result
    hits += result == "interrupted"
    assert work(n) == n
say("hits", hits > rounds // 10)
hear()
""",
        SEED,
        80,
    )
    program.expect("hits True")
    shared.nothing_is_left()


def test_ctrl_c_in_the_middle_of_a_frame(shared: Daemon) -> None:
    """A socket that takes little at a time: frames are cut in the middle, and the next call must not follow half of
    one."""
    program = shared.program(
        INTERRUPTS
        + """
import socket
from runstate import stream
real = stream.Stream.__init__
def small(self, connected, *rest):
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    real(self, connected, *rest)
stream.Stream.__init__ = small
queue = runstate.queue("big", attempts=5)
for n in range(rounds):
    text = str(n) + "x" * 60_000
    job = interrupted(lambda: queue.send(text), 0.004)
    hits += job == "interrupted"
    again = queue.send(text)
    assert job == "interrupted" or job.id == again.id
    assert queue.send("small").id == (first := queue.send("small").id)
say("hits", hits > rounds // 10)
hear()
""",
        SEED,
        80,
    )
    program.expect("hits True")
    shared.nothing_is_left()
    jobs = {view.queue: view.counts for view in shared.status().queues}
    assert jobs == {"big": {"ready": 81}}


def test_ctrl_c_in_a_wait_leaves_the_line(shared: Daemon) -> None:
    holder = shared.program("@runstate.once\ndef work(): say('works'); hear(); raise ValueError\nsay(name(work))")
    holder.expect("works")
    waiter = shared.program(
        """
@runstate.once
def work():
    return "second try"
try:
    work()
except KeyboardInterrupt:
    say("interrupted")
hear()
say(work())
"""
    )
    shared.waits(1)
    behind = shared.program("@runstate.once\ndef work(): return 'behind'\nsay(work())")
    shared.waits(2)
    waiter.send_signal(2)
    waiter.expect("interrupted")
    shared.waits(1)
    holder.say()
    assert behind.ends_well() == ["behind"]
    waiter.say()
    assert waiter.ends_well() == ["behind"]


def test_ctrl_c_in_the_function_hands_the_work_on_at_once(shared: Daemon) -> None:
    holder = shared.program(
        """
@runstate.once(lease="600s")
def work():
    say("works")
    time.sleep(60)
try:
    work()
except KeyboardInterrupt as error:
    kept = error
    say("interrupted")
hear()
"""
    )
    holder.expect("works")
    waiter = shared.program("@runstate.once\ndef work(): return runstate.context().attempt\nsay(work())")
    shared.waits(1)
    holder.send_signal(2)
    holder.expect("interrupted")
    assert waiter.ends_well() == ["1"], "an interrupt is not a failure"
    shared.nothing_is_left()


def test_a_signal_handler_may_call_while_its_thread_waits(shared: Daemon) -> None:
    """The handler runs in the middle of the wait, in the same thread: it must not wait for itself."""
    program = shared.program(
        """
@runstate.once
def quick(n):
    return n
def handler(number, frame):
    say("handled", quick(7))
signal.signal(signal.SIGUSR1, handler)
job = runstate.queue("q", attempts=5).send({"n": 1})
say("waits")
say(job.result())
"""
    )
    program.expect("waits")
    shared.waits(1)
    program.send_signal(10)
    program.expect("handled 7")
    program.send_signal(10)
    program.expect("handled 7")
    worker = shared.program("@runstate.queue('q')\ndef handle(input): return 'result'\nrunstate.serve()")
    assert program.ends_well() == ["result"]
    worker.send_signal(15)
    assert worker.ends_well() == []


CANCELS = """
dice = random.Random(int(sys.argv[1]))
@runstate.once(lease="30s")
async def work(n):
    await asyncio.sleep(dice.choice([0, 0, 0.001]))
    return n
@runstate.queue("q", lease="30s", concurrency=4)
async def handle(input):
    return input["n"]

async def cancelled(coroutine, turns):
    task = asyncio.ensure_future(coroutine)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not turns:
        await asyncio.sleep(dice.random() * 0.004)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return "cancelled"

async def main():
    hits = 0
    over = threading.Event()
    server = asyncio.ensure_future(runstate.aserve(signal=over))
    for n in range(200):
        turns = n % 20
        result = await cancelled(work(n), turns)
        assert result in (n, "cancelled"), result
        hits += result == "cancelled"
        assert await work(n) == n
        result = await cancelled(handle({"n": n}), turns)
        assert result in (n, "cancelled"), result
        assert await handle({"n": n}) == n
    for n in range(50):  # cancelling a worker gives back what it has
        await cancelled(runstate.aserve(), n % 20)
    assert await handle({"n": "last"}) == "last"
    over.set()
    await server
    say("hits", hits > 20)
asyncio.run(main())
hear()
"""


def test_cancellation_at_any_await(shared: Daemon) -> None:
    print(f"RUNSTATE_TEST_SEED={SEED}")
    program = shared.program(CANCELS, SEED)
    program.expect("hits True")
    shared.nothing_is_left()
    assert [view.counts for view in shared.status().queues] == [{"succeeded": 201}]
    program.say()
    program.end()


FIRST = (
    INTERRUPTS
    + """
def others():
    assert other() == "other"
    done.append(1)
other = runstate.once(lambda: "other", name="other")
done = []
threads = [threading.Thread(target=others, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
work = runstate.once(lambda: 5, name="work")
interrupted(work, 0.06)
assert work() == 5
for thread in threads:
    thread.join(10)
say(len(done))
"""
)


def test_ctrl_c_in_the_first_call_with_all_that_it_imports(shared: Daemon) -> None:
    """An import that is broken off can leave Python's import locks taken, and half-made decoders that crash."""
    for n in range(2):
        programs = [shared.program(FIRST, SEED + 4 * n + k, 1, fresh=True) for k in range(4)]
        assert [program.ends_well() for program in programs] == [["2"]] * 4


EVERY_LINE = """
import faulthandler, linecache, queue, socket
from runstate import calls, framing, inbox, steps, stream, wire
# An interrupt before the first line of ours that a call executes, before the second, ... until it gets through.
PACKAGE = os.path.dirname(runstate.__file__)
what, other, struck_by, first, step = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
@runstate.once(name="work", lease="30s")
def once(n):
    return n
def send(n):  # holds nothing: the caller reads its own answer
    return n if runstate.queue("q", attempts=1).send(n).id == runstate.queue("q", attempts=1).send(n).id else None
def outcome(n):
    ends = wire.RunsEnd(run=ended_run, state="finished")
    connection.outcomes.deliver(steps.Deliver(ends, None))
    return n
clients = {}
def first_call(n):
    return clients.setdefault(n, runstate.Runstate(run="r")).run_id() and n
work = {"once": once, "send": send, "outcome": outcome, "first call": first_call, "while held": send}[what]
ended_run = runstate.Runstate(run="ended").run_id()
send(0)
connection = runstate._default._core.connection()

# The other thread begins while the call of the main thread reads: its answer comes with the same bytes, or later.
meeting = {"another is answered": stream.Stream.wait, "another waits": inbox.Inbox.frame}.get(other)
begin, answered = queue.SimpleQueue(), queue.SimpleQueue()

def meet():
    begin.put(n)
    while sys._current_frames()[thread.ident].f_code is not calls.Gate.wait.__code__:
        time.sleep(0)
    while other == "another is answered":
        data = connection._stream._socket.recv(65536, socket.MSG_PEEK)
        if len(framing.Splitter().feed(data)) >= 2:
            break

def interrupt_at(line):
    entered, has_met = set(), meeting is None
    def trace(frame, event, argument):
        nonlocal line, has_met
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if not has_met:
            if frame.f_code is meeting.__code__:
                has_met = True
                meet()
        elif event == "line":
            text, place = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip(), (frame, frame.f_lineno)
            if text.startswith("pass ") or place in entered:  # or on the way out: Python itself looks for no signal
                entered.discard(place)
                return trace
            if text.startswith("with "):
                entered.add(place)
            line -= 1
            if line == 0:
                at.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
                print(at[-1], file=sys.stderr, flush=True)  # the last one is the one after which all hang
                entered.clear()
                if struck_by == "Ctrl-C":
                    raise KeyboardInterrupt
                sys.settrace(read_by_turns)
                assert name(send, 7) in ("7", "UnavailableError UNAVAILABLE"), "a signal handler that calls"
        return trace
    sys.settrace(trace)

def read_by_turns(frame, event, argument):
    if frame.f_code is stream.Stream.take.__code__ and frame.f_locals["self"] is connection._stream:
        assert connection._turn_of == threading.get_ident(), "two threads read, and one gets what the other waits for"

def others():
    n = 0
    while not over.is_set():
        n = begin.get() if meeting else (n + 1) % 50
        assert send(n) == n
        answered.put(n)

at, over = [], threading.Event()
thread = threading.Thread(target=others, daemon=True)
if other != "no other":
    thread.start()
n = first
held = runstate.slots("s", max=1)
if what == "while held":
    held.__enter__()
while True:
    faulthandler.dump_traceback_later(6, exit=True)
    while other != "another at any moment" and connection._turn is not None:
        send(7)  # soon nothing is open and nobody reads: so the next call reads itself
    while what == "while held" and not (connection._turn is connection._reader and connection._is_polling):
        time.sleep(0.001)  # until the reader thread reads: the next call displaces it
    struck = len(at)
    try:
        interrupt_at(n)
        work(n)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    if meeting:  # for which nothing else must be done here
        assert answered.get() == n, at[-1]
    assert work(n) == n, at[-1]
    clients.clear()
    if len(at) == struck:  # and not where it gets through because a finaliser swallows the interrupt
        break
    n += step
over.set()
if other == "another at any moment":
    thread.join()
if what == "while held":
    held.__exit__(None, None, None)  # which says whether it was lost meanwhile
faulthandler.cancel_dump_traceback_later()
say("got through at line", n > 20)
hear()
"""


@pytest.mark.parametrize(
    ("what", "other"),
    [
        *itertools.product(("send", "outcome"), ("no other", "another is answered", "another waits")),
        *itertools.product(("once",), ("no other", "another waits")),
        ("send", "another at any moment"),
        ("while held", "no other"),
        ("first call", "no other"),  # in a session of its own
    ],
)
def test_an_interrupt_at_every_line(shared: Daemon, what: str, other: str) -> None:
    programs = [shared.program(EVERY_LINE, what, other, "Ctrl-C", first, 2) for first in (1, 2)]
    for program in programs:
        program.expect("got through at line True")
    shared.nothing_is_left()


@pytest.mark.parametrize("what", ["send", "outcome", "while held"])
def test_a_signal_handler_that_calls_at_every_line(shared: Daemon, what: str) -> None:
    programs = [shared.program(EVERY_LINE, what, "no other", "a signal", first, 2) for first in (1, 2)]
    for program in programs:
        program.expect("got through at line True")
    shared.nothing_is_left()
