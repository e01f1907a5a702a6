"""Many processes on the same slots, limits and budgets, some of which are killed: never too many, nothing leaks.

Who is inside is judged by the kernel: each caller takes a file lock of its own for as long as it is inside, and there
are no more files than units. The lock goes with its process, before anybody can know of its death.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from runstate import wire
from tests.e2e.support import Daemon, Program, eventually

SEED = int(os.environ.get("SEED", 0)) or random.SystemRandom().randrange(1 << 32)


@pytest.fixture
def dice() -> random.Random:
    print(f"SEED={SEED}")  # shown when a test fails
    return random.Random(SEED)


def test_the_slots_of_a_killed_process_are_free_at_once(daemon: Daemon) -> None:
    holder = daemon.program(
        """
with runstate.slots("browser", max=2, units=2, lease="10m"):
    say("inside")
    hear()
"""
    )
    holder.expect("inside")
    waiter = daemon.program("with runstate.slots('browser', timeout='1h'): say('inside')")
    daemon.waits(1)
    began = time.monotonic()
    holder.kill()
    waiter.expect("inside")
    assert time.monotonic() - began < 3
    waiter.ends_well()
    daemon.nothing_is_left()


CALLERS = """
random.seed(int(sys.argv[1]))
pool = runstate.slots("three", max=3, timeout="10m")

def work(number):
    # One lock file per place: whoever holds a lock on it is inside, and the kernel lets go when a process dies.
    with pool:
        for place in range(3):
            file = os.open(f"{os.environ['EFFECTS']}-{place}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(file)
        else:
            effect("FOUR INSIDE")
            return
        effect("in", os.getpid(), number)
        time.sleep(random.uniform(0, 0.004))
        os.close(file)

import fcntl
say("ready")
hear()
threads = [threading.Thread(target=lambda number=number: [work(number) for _ in range(3)]) for number in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say("done")
"""


def test_two_hundred_callers_in_twenty_processes_on_three_slots_with_kills(daemon: Daemon, dice: random.Random) -> None:
    programs = [daemon.program(CALLERS, dice.randrange(1 << 32)) for _ in range(20)]
    for program in programs:
        program.expect("ready")
    for program in programs:
        program.say()
    victims = dice.sample(programs, 6)
    for number, victim in enumerate(victims):
        eventually(lambda number=number: len(daemon.effects()) > 40 * (number + 1) or all_done(programs))
        victim.kill()
    for program in programs:
        if program not in victims:
            assert program.ends_well() == ["done"]
    effects = daemon.effects()
    assert "FOUR INSIDE" not in effects
    assert len(effects) >= 14 * 30
    daemon.nothing_is_left()
    assert slots(daemon, "three").used == 0


def all_done(programs: list[Program]) -> bool:
    return all(program.has_said() for program in programs)


def ask(daemon: Daemon, request: wire.Request[object]) -> object:
    with daemon.knock() as raw:
        raw.hello(session=f"look-{os.urandom(4).hex()}")
        reply = raw.ask(request)
        raw.ask(wire.Bye())
        return reply


def slots(daemon: Daemon, name: str) -> wire.SlotsView:
    reply = ask(daemon, wire.SlotsGet(pool=name))
    assert isinstance(reply, wire.SlotsView), reply
    return reply


SPENDERS = """
random.seed(int(sys.argv[1]))

@runstate.budget("money", reserve="0.50", cost=lambda result: result, limit=50)
def spend(kind, cost):
    if kind == "fails":
        raise ValueError
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return cost

say("ready")
hear()
for number in range(60):
    kind = random.choices(["pays", "fails", "over", "dies"], [60, 20, 20, 1])[0]
    cost = f"{random.randrange(40, 60) / 100:.2f}" if kind == "over" else f"{random.randrange(0, 50) / 100:.2f}"
    try:
        spend(kind, cost)
        effect("paid", cost)
    except ValueError:
        pass
    except runstate.BudgetExceededError:
        effect("refused")
        break
say("done")
"""


def test_a_budget_of_fifty_under_eight_processes_adds_up_and_is_never_over(daemon: Daemon, dice: random.Random) -> None:
    programs = [daemon.program(SPENDERS, dice.randrange(1 << 32)) for _ in range(8)]
    for program in programs:
        program.expect("ready")
    for program in programs:
        program.say()
    dice.choice(programs).kill()
    for program in programs:
        program.end()
    daemon.nothing_is_left()
    view = ask(daemon, wire.BudgetsGet(budget="money"))
    assert isinstance(view, wire.BudgetView)
    assert view.reserved_minor == 0
    assert 0 < view.spent_minor <= view.limit_minor == 5000
    daemon.terminate()
    paid = sum(round(float(effect.split()[1]) * 100) for effect in daemon.effects() if effect.startswith("paid"))
    (overrun,) = daemon.rows(
        "SELECT coalesce(sum(data ->> 'overrunMinor'), 0) FROM events WHERE type = 'budget.overrun'"
    )[0]
    unsaid = len(programs) * 60  # a process may die between its charge and its line: at most one of each
    assert paid - overrun <= view.spent_minor <= paid + unsaid
    ledger = daemon.rows("SELECT change_minor, balance_minor FROM ledger ORDER BY entry")
    balance = view.limit_minor
    for change, after in ledger:
        balance += change
        assert 0 <= balance == after
    assert balance == view.limit_minor - view.spent_minor
    charged = daemon.rows("SELECT sum(charged_minor), sum(left_minor) FROM reservations")
    assert charged == [(view.spent_minor, 0)]


TAKERS = """
say("ready")
hear()
@runstate.limit("api", max=5, per=1, timeout="10m")
def call():
    effect(time.time())
for _ in range(4):
    call()
say("done")
"""


def test_a_limit_across_five_processes_never_gives_more_than_its_units_per_window(daemon: Daemon) -> None:
    programs = [daemon.program(TAKERS) for _ in range(5)]
    for program in programs:
        program.expect("ready")
    first = int(time.time())
    for program in programs:
        program.say()
    for program in programs:
        assert program.ends_well() == ["done"]
    times = sorted(map(float, daemon.effects()))
    assert len(times) == 20
    # A call is seen a moment after its units were taken, never before; windows are aligned to whole seconds.
    for number, at in enumerate(times):
        assert at >= first + number // 5
    daemon.terminate()
    assert daemon.rows("SELECT max FROM limits WHERE used <= max") == [(5,)]


JOBS = """
@runstate.queue("review", slots="browser", limit="rpm", budget={"name": "money", "reserve": 1}, attempts=100,
                concurrency=4)
def review(number):
    effect("in", os.getpid())
    time.sleep(0.002)
    effect("out", os.getpid())
    return number
"""


def test_killed_workers_leave_nothing_of_what_their_jobs_needed(daemon: Daemon, dice: random.Random) -> None:
    setup = """
runstate.setup(slots={"browser": {"max": 3}}, limits={"rpm": {"max": 100_000, "per": "day"}},
               budgets={"money": {"limit": 100}})
"""
    daemon.program(setup).ends_well()
    workers = [daemon.program(JOBS + "say('ready'); runstate.serve()") for _ in range(4)]
    for worker in workers:
        worker.expect("ready")
    producer = daemon.program(JOBS + "say(len(review.gather(range(60))))")
    for number in range(2):
        eventually(lambda number=number: len(daemon.effects()) > 20 * (number + 1))
        workers.pop(dice.randrange(len(workers))).kill()
    producer.expect("60")
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
        assert worker.ends_well() == []
    daemon.nothing_is_left()
    money = ask(daemon, wire.BudgetsGet(budget="money"))
    assert isinstance(money, wire.BudgetView)
    assert (money.reserved_minor, slots(daemon, "browser").used) == (0, 0)
    daemon.terminate()
    ((unknown,),) = daemon.rows("SELECT count(*) FROM events WHERE type = 'budget.assumed'")
    assert money.spent_minor == 6000 + 100 * unknown, "what is not the jobs' is told by an event"
    assert unknown <= 2 * 3, "what two workers may have had of three slots"
