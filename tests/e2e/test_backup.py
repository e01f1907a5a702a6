"""`runstated backup` beside a daemon under load, `runstated restore`, and a holder that has lived through both."""

from __future__ import annotations

import stat

from runstate import wire
from tests.e2e.support import Daemon, eventually

LOAD = """
queue = runstate.queue("q", lambda input: input)
for n in range(10_000_000):
    runstate.once(lambda i: i, name="f")(n)
    if n == 20:
        say("works")
"""

HOLDER = """
runstate.configure(worker="holder")
runstate.setup(slots={"gpu": {"max": 1}})
say("there")
hear()

@runstate.once(name="g")
def hold(i):
    with runstate.slots("gpu"):
        say("holds")
        hear()
    return i

say(name(hold, 1))
"""

NEXT = """
runstate.configure(worker="next")

@runstate.once(name="g")
def hold(i):
    with runstate.slots("gpu"):
        say("holds")
        hear()
    return "mine"

say(hold(1))
"""


def test_a_backup_under_load_and_a_holder_from_after_it(daemon: Daemon) -> None:
    saved = daemon.directory / "saved.db"
    load = daemon.program(LOAD)
    load.expect("works")
    holder = daemon.program(HOLDER)
    holder.expect("there")
    answer = daemon.run("backup", str(saved))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert daemon.run("backup", str(saved)).returncode == 1
    load.kill()
    holder.say()
    holder.expect("holds")
    refused = daemon.run("restore", str(saved))
    assert refused.returncode == 1
    assert "run `runstated stop` first" in refused.stderr
    assert daemon.run("stop").returncode == 0  # no client starts it again
    restored = daemon.run("restore", str(saved))
    assert (restored.returncode, restored.stderr) == (0, "")
    assert "sessions" in restored.stdout
    daemon.start()
    after = daemon.program(NEXT)
    after.expect("holds")  # nothing of the holder's is in the way
    holder.say()
    assert holder.hear().endswith(" LEASE_LOST")
    assert {view.kind for view in daemon.holdings()} == {"once", "slots"}, "it has ended nothing of the next one"
    after.say()
    after.expect("mine")
    seen: wire.StatusView = daemon.status()
    assert seen.daemon is not None
    assert seen.daemon.trouble is None
    daemon.end_programs()  # none starts it again
    daemon.kill()
    log = daemon.state_dir / "runstate.db-wal"
    size = log.stat().st_size
    again = daemon.run("backup", "--force", str(saved))
    assert (again.returncode, again.stderr) == (0, "")
    assert log.stat().st_size == size, "what a crash has left stays as it is"
    eventually(lambda: not [path for path in daemon.directory.iterdir() if path.name.endswith(".part")])
