"""``once`` as its users see it: one execution, one shape of result, failures, contexts, options."""

from __future__ import annotations

from tests.e2e.support import Daemon


def test_everybody_gets_the_value_as_it_comes_back_from_json(daemon: Daemon) -> None:
    source = """
@runstate.once
def work():
    effect("worked")
    return {"tuple": (1, 2), "float": 1.5, "text": chr(0x1F600), "none": None, "big": 2**60, "nested": [{"a": []}]}
@runstate.once(name="work")
async def awork():
    return "never"
say(json.dumps(work()), work() == asyncio.run(awork()))
"""
    first, second = (daemon.program(source).ends_well() for _ in range(2))
    assert first == second
    assert first[0].endswith(" True")
    assert '"tuple": [1, 2]' in first[0]
    assert daemon.effects() == ["worked"]


def test_results_that_cannot_be_recorded_count_as_failures(daemon: Daemon) -> None:
    said = daemon.program(
        """
@runstate.once(attempts=1)
def wrong(what):
    return {"set": {1}, "nan": float("nan"), "half": chr(0xD800), "large": "x" * 65_535, "fits": "x" * 65_534}[what]
for what in ("set", "nan", "half", "large"):
    first = name(wrong, what)
    try:
        wrong(what)
    except runstate.OnceFailedError as error:
        say(error.attempts, first, "JSON" in str(error) or "65536 bytes" in str(error))
say(name(wrong, "set"), len(wrong("fits")))

@runstate.once(attempts=2)
def twice(what):
    return {"set": {1}, "large": "x" * 65_535}[what]
say(name(twice, "set"), name(twice, "set"), name(twice, "large"), name(twice, "large"))
"""
    ).ends_well()
    failed = "OnceFailedError ONCE_FAILED"
    assert said == [
        *["1 ConfigError CONFIG_ERROR True"] * 3,
        "1 ResultTooLargeError RESULT_TOO_LARGE True",
        f"{failed} 65534",
        " ".join([*["ConfigError CONFIG_ERROR"] * 2, *["ResultTooLargeError RESULT_TOO_LARGE"] * 2]),
    ]


def test_the_failure_that_uses_up_the_attempts_is_a_once_failed_error_for_its_very_caller(daemon: Daemon) -> None:
    said = daemon.program(
        """
@runstate.once(attempts=2)
def fails():
    say("attempt", runstate.context().attempt)
    raise ValueError("always")
for _ in range(3):
    try:
        fails()
    except ValueError as error:
        say("own", error)
    except runstate.OnceFailedError as error:
        say(error.attempts, error, type(error.__cause__).__name__)
"""
    ).ends_well()
    assert said == [
        "attempt 1",
        "own always",
        "attempt 2",
        "2 ValueError: always ValueError",
        "2 ValueError: always FailedElsewhere",
    ]


def test_a_failure_lets_the_next_waiting_caller_try(daemon: Daemon) -> None:
    source = """
@runstate.once
def work():
    say("tries", runstate.context().attempt)
    if hear() == "fail":
        raise ValueError("first")
    return "second"
say(name(work))
"""
    first = daemon.program(source)
    first.expect("tries 1")
    second = daemon.program(source)
    daemon.waits(1)
    first.say("fail")
    assert first.ends_well() == ["ValueError "]
    second.expect("tries 2")
    second.say("good")
    assert second.ends_well() == ["'second'"]


def test_the_context_inside_and_outside(daemon: Daemon) -> None:
    said = daemon.program(
        """
import re, copy, pickle
@runstate.once
def outer():
    before = runstate.context()
    say(bool(re.fullmatch("outer:[0-9a-f]{32}", before.key)), before.attempt, before.run.name, before.signal)
    say(before.run.id == runstate.run_id(), runstate.Runstate().context() is before)
    inner()
    say(runstate.context() is before)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(runstate.context()))
    thread.start(); thread.join()
    say(seen, name(pickle.dumps, before.signal).split()[0])
    return None
@runstate.once(name="other", key=lambda: "mine")
def inner():
    say(runstate.context().key)
def in_thread():
    say(runstate.context().key.split(":")[0])
async def task():
    say(runstate.context().key.split(":")[0])
@runstate.once
async def around():
    await asyncio.gather(task(), asyncio.create_task(task()), asyncio.to_thread(in_thread))
say(runstate.context())
outer()
say(runstate.context())
asyncio.run(around())
say(runstate.context())
"""
    ).ends_well()
    assert said == [
        "None",
        "True 1 default <Combined set=False>",
        "True True",
        "other:mine",
        "True",
        "[None] TypeError",
        "None",
        "around",
        "around",
        "around",
        "None",
    ]


def test_arguments_and_options(daemon: Daemon) -> None:
    said = daemon.program(
        """
import functools, inspect
@runstate.once
def work(a, b=1, *rest, c=2, **more):
    "Documented."
    effect("work", a, b, c)
    return [a, b, c]
say(work("x"), work(a="x"), work("x", 1), work("x", c=5), work("x", c=5))
say(work.__name__, work.__doc__, inspect.signature(work), inspect.iscoroutinefunction(work))
@runstate.once(name="named")
async def other(): return 1
say(other.__name__, inspect.iscoroutinefunction(other), asyncio.run(other()))
say(runstate.once(lambda: 3, name="lambda")(), runstate.once(name="lambda")(lambda: 4)())
class Company:
    def __init__(self, domain): self.domain = domain
    @runstate.once(name="method", key=lambda self: self.domain)
    def method(self): return self.domain
say(Company("a").method(), Company("a").method())
say(name(work), name(work, object()), name(work, {1}))
for wrong in (dict(attempts=0), dict(attempts=101), dict(attempts=1.0), dict(lease="x"), dict(name=""), dict(key=3)):
    say(name(lambda: runstate.once(work, **wrong)))
say(name(runstate.once, 7), name(runstate.once, functools.partial(work, 1)))
for key in (lambda: 7, lambda: "", lambda: "x" * 256):
    say(name(runstate.once(lambda: 1, name="k", key=key)))
"""
    ).ends_well()
    config = "ConfigError CONFIG_ERROR"
    assert said == [
        "['x', 1, 2] ['x', 1, 2] ['x', 1, 2] ['x', 1, 5] ['x', 1, 5]",
        "work Documented. (a, b=1, *rest, c=2, **more) False",
        "named True 1",
        "3 3",
        "a a",
        f"TypeError  {config} {config}",
        *[config] * 6,
        f"{config} {config}",
        *[config] * 3,
    ]
    assert daemon.effects() == ["work x 1 2", "work x 1 2", "work x 1 5"]


def test_a_stop_iteration_or_an_exit_in_the_function_is_passed_on(daemon: Daemon) -> None:
    said = daemon.program(
        """
@runstate.once(attempts=1)
def stops(): raise StopIteration("x")
@runstate.once(attempts=1)
def exits(): sys.exit(4)
@runstate.once(attempts=1)
async def cancels(): raise asyncio.CancelledError
say(name(stops), name(stops), name(exits), name(exits), name(asyncio.run, cancels()), name(asyncio.run, cancels()))
"""
    ).ends_well()
    once_failed = "OnceFailedError ONCE_FAILED"
    assert said == [
        f"{once_failed} {once_failed} SystemExit 4 SystemExit 4 CancelledError  CancelledError ",
    ], "exits and cancellations are no failures"
    daemon.nothing_is_left()


HANDED_OVER = """
from runstate.calls import Gate
from runstate.inbox import Inbox
from runstate.stream import Stream
at_the_socket, woken = [], []
def profile(frame, event, argument):
    if event == "call" and frame.f_code is Gate.open.__code__ and frame.f_locals["self"] is connection._reader:
        woken.append(number)
    if event == "call" and frame.f_code in (Stream.write.__code__, Stream.take.__code__, Inbox.frame.__code__):
        at_the_socket.append(threading.get_ident())
threading.setprofile(profile)  # of the threads that the first call starts
@runstate.once
def work(n):
    return n
number, connection = 0, runstate._default._core.connection()
def handed_over(n):
    # How often another thread than the one before was at the socket, in one call.
    global number
    number, at_the_socket[:] = n, [threading.get_ident()]
    sys.setprofile(profile)
    work(n)
    sys.setprofile(None)
    return sum(one != other for one, other in zip(at_the_socket, at_the_socket[1:]))
"""


def test_a_caller_writes_and_reads_itself_also_while_it_holds_what_it_was_granted(daemon: Daemon) -> None:
    said = daemon.program(
        HANDED_OVER
        + """
work(0)
changes = [handed_over(n) for n in range(1, 101)]
say(max(changes) <= 2, changes.count(0) >= 90, len(set(woken)) < 100, changes)
"""
    ).ends_well()
    assert said[0].startswith("True True True"), "and a grant wakes nobody, but for the first after a while"


def test_a_caller_takes_the_turn_from_the_reader_thread(daemon: Daemon) -> None:
    """Which has it while something is held for longer, to hear of its loss."""
    program = daemon.program(
        HANDED_OVER
        + """
def reads():
    while not (connection._turn is connection._reader and connection._is_polling):
        time.sleep(0.001)
with runstate.slots("s", max=1) as context:
    changes = []
    for n in range(20):
        reads()
        changes.append(handed_over(n))
    say(max(changes) <= 2, changes.count(0) >= 15, changes)
    reads()
    hear()
    context.signal.wait(60)
    say(type(context.signal.reason).__name__)
    hear()
"""
    )
    said = program.hear()
    assert said.startswith("True True"), said
    assert daemon.program("runstate.stop()").ends_well() == []
    program.say()
    program.expect("StoppedError")


HOPS_MAX = 48  # calls of functions of ours, where asyncio is imported; the aim is 30


def test_the_way_from_the_decorator_to_the_function_is_short(daemon: Daemon) -> None:
    """Calls of Python functions of ours in the caller's thread: the fewest of some calls."""
    said = daemon.program(
        """
home = os.path.dirname(runstate.__file__)
@runstate.once
def work(n):
    sys.setprofile(None)
    return n
def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(home):
        hops.append(frame.f_code.co_name)
work(0)
found = []
for n in range(1, 11):
    hops = []
    sys.setprofile(profile)
    work(n)
    found.append(hops)
say(*min(found, key=len))
"""
    ).ends_well()
    hops = said[0].split()
    assert len(hops) <= HOPS_MAX, hops
