"""What a request is answered with when answering it fails."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runstate import wire
from runstated.domain import nouns as dispatch
from runstated.domain import sessions
from runstated.domain.answers import NotFound, must
from runstated.domain.core import Core
from runstated.engine import faults
from runstated.engine.entries import Opened
from tests.engines import life, play
from tests.harness import Harness

SECRET = "what users have stored"
DAMAGED = f"CAST(CAST('{SECRET}' AS BLOB) || x'ff' AS TEXT)"


def raised(sql: str, *before: str) -> Exception:
    """What SQLite raises."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for statement in before:
        connection.execute(statement)
    try:
        connection.execute(sql).fetchall()
    except sqlite3.Error as error:
        return error
    raise AssertionError("it raises nothing")


@pytest.mark.parametrize(
    ("fault", "code", "retryable"),
    [
        (NotFound("no run"), "NOT_FOUND", False),
        (OverflowError("int too large"), "VALIDATION_FAILED", False),
        (sqlite3.OperationalError("disk I/O error"), "UNAVAILABLE", True),
        (raised("INSERT INTO t VALUES (zeroblob(100000))", "CREATE TABLE t (x)", "PRAGMA max_page_count = 3"),
         "UNAVAILABLE", True),
        (raised(f"SELECT {DAMAGED}"), "INTERNAL", False),
        (raised("SELECT * FROM nothing"), "INTERNAL", False),
        (raised("SELECT 1/0 FROM t", "CREATE TABLE t (x)", "PRAGMA writable_schema = ON",
                "UPDATE sqlite_master SET rootpage = 99", "PRAGMA writable_schema = RESET"), "INTERNAL", False),
        (ValueError(SECRET), "INTERNAL", False),
    ],
    ids=["refusal", "number", "disk", "full", "not UTF-8", "no table", "corrupt", "ours"],
)  # fmt: skip
def test_every_fault_has_an_answer_that_says_whose_it_is(fault: Exception, code: str, retryable: bool) -> None:
    answer = faults.reply(fault)
    assert (answer.code, answer.retryable) == (code, retryable)
    assert SECRET not in answer.message


def test_a_damaged_row_is_no_trouble_with_the_disk(h: Harness, caplog: pytest.LogCaptureFixture) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="x")).run
    for key in ("done", "other"):
        token = a.ask(wire.OnceAcquire(run=run, key=key)).token
        a.ask(wire.OnceComplete(run=run, key=key, token=token, result="1"))
    h.connection.execute(f"UPDATE once_keys SET result = {DAMAGED} WHERE key = 'done'")
    told = a.refused("INTERNAL", wire.OnceAcquire(run=run, key="done"))
    assert "damaged" in told.message
    assert isinstance(a.ask(wire.OnceAcquire(run=run, key="other")), wire.OnceDone)


def test_a_damaged_row_does_not_keep_the_daemon_from_its_own_work(h: Harness) -> None:
    """It would be tried for ever, with everything else behind it."""
    a, b = h.session("a"), h.session("b")
    run = a.ask(wire.RunsJoin(name="x")).run
    a.ask(wire.OnceAcquire(run=run, key="k"))
    h.connection.execute(f"UPDATE leases SET run = {DAMAGED} WHERE session = 'a'")
    a.die()
    assert b.ask(wire.RunsJoin(name="y")).state == "active"
    h.connection.execute("UPDATE leases SET run = :run WHERE session = 'a'", {"run": run})


def test_a_hello_that_cannot_be_served_is_answered(h: Harness) -> None:
    a = h.session("a")
    run = a.ask(wire.RunsJoin(name="x")).run
    a.ask(wire.RunsEnd(run=run, state="finished"))
    a.bye()
    h.connection.execute(f"UPDATE runs SET name = {DAMAGED}")
    hello = a.request(wire.Hello(protocol=1, protocol_min=1, session="a", worker=""))
    row = sessions.Session("a", "default", "worker", "", 1, "python x")
    h.run(Opened(row, hello.id, (run,), wire.Welcome(protocol=1, version="test", pid=1)))
    assert hello.reply.code == "INTERNAL"
    h.connection.execute("UPDATE runs SET name = 'x'")


def test_reads_are_answered_like_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            await it.ask("a", wire.RunsEnd(run=run, state="finished"))  # and it is read from the disk from now on
            await it.engine.store.write(lambda c: c.execute(f"UPDATE runs SET name = {DAMAGED}"))
            assert (await it.ask("a", wire.RunsGet(run=run))).code == "INTERNAL"
            assert it.engine.trouble is None

    play(story())


def test_a_reply_that_cannot_be_encoded_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def verb(core: Core, request: Any) -> wire.Reply:
        return wire.Welcome(protocol=1, version="\udce9", pid=1)

    monkeypatch.setattr(dispatch, "VERBS", {**dispatch.VERBS, wire.RunsGet: verb, wire.OnceGet: verb})

    async def story() -> None:
        async with life(tmp_path / "db") as it:
            await it.session("a")
            run = await it.run_id()
            for request in (wire.RunsGet(run=run), wire.OnceGet(run=run, key="k")):  # a read, and one of a batch
                assert (await it.ask("a", request)).code == "INTERNAL"
            assert await it.run_id(name="later")

    play(story())
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def test_what_must_hold_does_so_without_assertions_and_docstrings() -> None:
    """`python -OO` strips both: nothing may be granted twice for it, and the HTTP API describes itself all the same."""
    script = (
        "from runstated.http.app import TABLE, document\n"
        "from runstated.domain.leases import LeaseGone\n"
        "from runstated.domain.answers import must\n"
        "document(TABLE, '1')\n"
        "print(LeaseGone())\n"
        "try: must(False, 'kept')\n"
        "except AssertionError as error: print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-OO", "-c", script], capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines()[1:] == ["kept"], answer.stderr
    assert "the hold is gone" in answer.stdout
    must(True, "no harm")
