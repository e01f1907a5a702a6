"""Fork and its relatives: each process is a session of its own, holds nothing of its parent's, and harms it in
nothing."""

from __future__ import annotations

import pytest

from tests.e2e.support import Daemon

# Python warns of a fork in a process with threads. Ours are made for it, which is what these tests are about.
QUIET = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"


def test_a_child_works_at_once_and_its_parent_goes_on(shared: Daemon) -> None:
    program = shared.program(
        QUIET
        + """
@runstate.once(lease="30s")
def outer():
    say("context before", runstate.context().key.split(":")[0])
    pid = os.fork()
    if pid == 0:
        say("child context", runstate.context())
        say("child", inner(1), job.result(timeout=0) if False else job.id == queue.send({"n": 1}).id)
        os._exit(0)
    os.waitpid(pid, 0)
    say("parent", inner(1), runstate.context().signal.is_set())
    return "outer done"
@runstate.once
def inner(n):
    return ["worked in", "child" if os.getpid() != parent else "parent"]
parent = os.getpid()
queue = runstate.queue("q", attempts=3)
job = queue.send({"n": 1})
say(outer())
say(outer())
hear()
"""
    )
    program.expect(
        "context before outer",
        "child context None",
        "child ['worked in', 'child'] True",
        "parent ['worked in', 'child'] False",
        "outer done",
        "outer done",
    )
    shared.nothing_is_left()


def test_fork_with_calls_under_way_in_the_parent(shared: Daemon) -> None:
    program = shared.program(
        QUIET
        + """
@runstate.once
def work(n):
    return n
def calls():
    n = 0
    while not over.is_set():
        n += 1
        assert work(n) == n
    good.append(n)
over, good = threading.Event(), []
waiting = runstate.queue("q", attempts=3).send({"n": 1})
waiter = threading.Thread(target=lambda: say("parent's job", waiting.result()), daemon=True)
waiter.start()
threads = [threading.Thread(target=calls, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for n in range(40):
    pid = os.fork()
    if pid == 0:
        ok = work("x" + str(n)) == "x" + str(n) and work(1) == 1
        os._exit(0 if ok else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
over.set()
for thread in threads:
    thread.join(20)
say(set(codes), len(good))
waiter.join(20)
"""
    )
    program.expect("{0} 3")
    worker = shared.program("@runstate.queue('q', attempts=3)\ndef handle(input): return 'kept'\nrunstate.serve()")
    assert program.ends_well() == ["parent's job kept"]
    worker.send_signal(15)
    assert worker.ends_well() == []


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_child_that_comes_back_out_of_the_function_settles_nothing(shared: Daemon, how: str) -> None:
    program = shared.program(
        QUIET
        + """
how = sys.argv[1]
@runstate.once
def work():
    pid = os.fork()
    if pid == 0:
        if how == "return": return "child"
        if how == "raise": raise ValueError("child")
        sys.exit(3)
    os.waitpid(pid, 0)
    return "parent"
parent = os.getpid()
try:
    result = work()
except BaseException as error:
    if os.getpid() == parent:
        raise
    say("child", type(error).__name__)
    os._exit(0)
say(result, work())
""",
        how,
    )
    lost = {"return": "LeaseLostError", "raise": "LeaseLostError", "exit": "SystemExit"}[how]
    assert program.ends_well() == [f"child {lost}", "parent parent"]
    shared.nothing_is_left()


def test_a_child_that_leaves_a_block_of_slots_gives_nothing_back(shared: Daemon) -> None:
    program = shared.program(
        QUIET
        + """
parent = os.getpid()
with runstate.slots("gpu", max=1):
    pid = os.fork()
    if pid != 0:
        say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        hear()
if os.getpid() != parent:
    os._exit(0)
say("out")
"""
    )
    program.expect("child 0")
    assert [held.name for held in shared.holdings()] == ["gpu"]
    program.say("leave")
    assert program.ends_well() == ["out"]
    shared.nothing_is_left()


def test_a_stop_reaches_a_child_that_was_forked_after_the_run_was_joined(shared: Daemon) -> None:
    program = shared.program(
        QUIET
        + """
run = runstate.run("shared")
say(run.run_id() != "")
pid = os.fork()
if pid == 0:
    @run.once
    def work():
        say("child works")
        say("child told", runstate.context().signal.wait(30), type(runstate.context().signal.reason).__name__)
    say(name(work))
    os._exit(0)
os.waitpid(pid, 0)
"""
    )
    program.expect("True", "child works")
    assert shared.program("runstate.run('shared').stop()").ends_well() == []
    program.expect("child told True StoppedError")
    assert program.ends_well() == ["StoppedError SCOPE_CANCELLED"]


MULTIPROCESSING = """
import sys, multiprocessing, os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import runstate

@runstate.once
def work(n):
    return [n, "once"]

def in_child(n):
    return work(n), runstate.context() is None, os.getpid()

@runstate.once
def outer():
    with multiprocessing.get_context(sys.argv[1]).Pool(3) as pool:
        return pool.map(in_child, [1, 2, 3, 1])

if __name__ == "__main__":
    work(1)
    results = outer()
    print([r[0] for r in results], all(r[1] for r in results), os.getpid() not in {r[2] for r in results})
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(shared: Daemon, method: str) -> None:
    file = shared.directory / "pool.py"
    file.write_text(MULTIPROCESSING)
    answer = shared.python(str(file), method)
    assert answer.stdout == "[[1, 'once'], [2, 'once'], [3, 'once'], [1, 'once']] True True\n", answer.stderr
    assert answer.stderr == ""


def test_a_client_that_was_used_before_the_process_became_a_daemon(shared: Daemon) -> None:
    """Double fork, new session, closed descriptors: without telling anybody."""
    program = shared.program(
        QUIET
        + """
@runstate.once
def work(n):
    return n
say(work(1))
keep = os.dup(1)
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
os.dup2(keep, 200)
for fd in range(3, 200):
    try: os.close(fd)
    except OSError: pass
say(work(1), work(2), runstate.run_id() != "")
"""
    )
    assert program.ends_well() == ["1", "1 2 True"]


def test_calls_at_the_very_end(shared: Daemon) -> None:
    program = shared.program(
        """
import atexit
@runstate.once
def work(n):
    return n
atexit.register(lambda: say("atexit, registered before the first call", work(1)))
atexit.register(lambda: say("atexit with a large result", len(big())))
@runstate.once
def big():
    return "x" * 60_000
say(work(2))
def forever():
    try:
        runstate.queue("q", attempts=1)("never")
    finally:
        pass
threading.Thread(target=forever, daemon=True).start()
def calling():
    n = 100
    while True:
        n += 1
        work(n)
threading.Thread(target=calling, daemon=True).start()
"""
    )
    said = program.ends_well()
    assert said == [
        "2",
        "atexit with a large result 60000",
        "atexit, registered before the first call 1",
    ]
    shared.nothing_is_left()


def test_a_thread_at_the_end_of_the_process_gives_its_work_back(shared: Daemon) -> None:
    holder = shared.program(
        """
@runstate.once(lease="600s")
def work():
    say("works")
    time.sleep(100)
thread = threading.Thread(target=work, daemon=True)
thread.start()
hear()
"""
    )
    holder.expect("works")
    waiter = shared.program("@runstate.once\ndef work(): return runstate.context().attempt\nsay(work())")
    shared.waits(1)
    holder.say()
    assert holder.ends_well() == []
    assert waiter.ends_well() == ["1"]


def test_a_call_in_the_teardown_of_the_interpreter_is_an_error_and_no_hang(shared: Daemon) -> None:
    program = shared.program(
        """
@runstate.once
def work(n):
    return n
def make_last(write, work):  # by now the names of this module are gone
    class Last:
        def __del__(self):
            try:
                said = str(work(3))
            except Exception as error:
                said = type(error).__name__
            write(1, b"finaliser " + said.encode() + b"\\n")
    return Last()
last = make_last(os.write, work)
say(work(2))
"""
    )
    assert program.ends_well() == ["2", "finaliser UnavailableError"]
