"""`runstate limits | slots | budgets show`, and what `runstate status` says of those who wait for them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Home
from tests.e2e.support import Daemon, Program, eventually

SETUP = """
runstate.setup(limits={"search-api": {"max": 60, "per": "hour"}}, slots={"browser": {"max": 2}},
               budgets={"model-usd": {"limit": "12.50", "currency": "EUR"}})
"""


def shown(home: Home, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return home.python("-m", "runstate_cli", *arguments, **environ)


def found(home: Home, *arguments: str, **environ: str) -> dict[str, Any]:
    answer = shown(home, *arguments, "--json", **environ)
    assert (answer.returncode, answer.stderr) == (0, "")
    view: dict[str, Any] = json.loads(answer.stdout)
    return view


@pytest.fixture
def holder(daemon: Daemon) -> Program:
    """A process that holds a slot and money, and has used a limit."""
    program = daemon.program(
        SETUP
        + """
runstate.configure(worker="ada")
runstate.take("search-api", units=7)
runstate.budget("model-usd", lambda: 1, reserve="1.00", cost=lambda result: "0.35")()

@runstate.budget("model-usd", reserve="2.00")
def hold():
    with runstate.slots("browser"):
        say("holds")
        hear()
hold()
"""
    )
    program.expect("holds")
    return program


def test_each_resource_is_shown_as_one_json_object(daemon: Daemon, holder: Program) -> None:
    waiter = daemon.program("with runstate.slots('browser', units=2): pass")
    daemon.waits(1)
    assert found(daemon, "limits", "show", "search-api") == {
        "name": "search-api",
        "max": 60,
        "per_seconds": 3600,
        "used": 7,
        "waiting": 0,
    }
    assert found(daemon, "slots", "show", "browser") == {
        "name": "browser",
        "max": 2,
        "used": 1,
        "waiting": 1,
        "holders": ["ada"],
    }
    assert found(daemon, "budgets", "show", "model-usd") == {
        "name": "model-usd",
        "currency": "EUR",
        "scale": 2,
        "limit_minor": 1250,
        "reserved_minor": 200,
        "spent_minor": 35,
    }
    holder.say()
    holder.ends_well()
    waiter.ends_well()
    assert found(daemon, "slots", "show", "browser")["holders"] == []
    assert found(daemon, "budgets", "show", "model-usd")["spent_minor"] == 235


def test_each_resource_is_shown_to_people(daemon: Daemon, holder: Program) -> None:
    assert shown(daemon, "limits", "show", "search-api").stdout.splitlines() == [
        "limit:   search-api",
        "units:   7 of 60 used in this window",
        "window:  1 h",
        "waiting: 0 calls",
    ]
    assert shown(daemon, "slots", "show", "browser").stdout.splitlines() == [
        "slots:   browser",
        "units:   1 of 2 used",
        "waiting: 0 calls",
        "holders: ada",
    ]
    assert shown(daemon, "budgets", "show", "model-usd").stdout.splitlines() == [
        "budget:   model-usd",
        "limit:    12.50 EUR",
        "spent:    0.35 EUR",
        "reserved: 2.00 EUR",
        "left:     10.15 EUR",
    ]


NOUNS = {"limits": "limit", "slots": "slots", "budgets": "budget"}


def test_what_is_not_there_is_said_in_one_line(daemon: Daemon) -> None:
    daemon.program(SETUP).ends_well()
    for noun, name in NOUNS.items():
        answer = shown(daemon, noun, "show", "nothing", "--json")
        assert (answer.returncode, answer.stdout) == (1, "")
        assert answer.stderr.startswith(f"runstate: {name} nothing not found")
        assert answer.stderr.count("\n") == 1
    assert shown(daemon, "slots", "show", "browser", "--space", "elsewhere").returncode == 1


def test_it_never_starts_a_daemon(tmp_path: Path) -> None:
    absent = Home(tmp_path / "absent")
    for noun in NOUNS:
        answer = shown(absent, noun, "show", "x")
        assert (answer.returncode, answer.stdout) == (3, "")
        assert answer.stderr.startswith("runstate: runstated is not running")
    assert not absent.state_dir.exists()


def test_status_names_what_is_held_and_waited_for(daemon: Daemon, holder: Program) -> None:
    for source in (
        "with runstate.slots('browser', units=2): pass",
        "runstate.take('search-api', units=60)",
        "runstate.together('stage-2', 2)",
        "runstate.sleep('nap', '1h')",
        "runstate.queue('review', attempts=5).gather([1])",
        "next(runstate.events(types=['task.failed']))",
    ):
        daemon.program(source)
    daemon.program(
        """
runstate.setup(budgets={"small": {"limit": 1}})
@runstate.queue("review", slots={"name": "browser", "units": 2}, attempts=5)
def review(input): pass
runstate.serve()
"""
    )
    waits = eventually(lambda: (w := found(daemon, "status")["waits"]) and len(w) == 7 and w)
    words = {(wait["kind"], wait["name"]) for wait in waits}
    assert words >= {("slots", "browser"), ("limit", "search-api"), ("barrier", "stage-2"), ("timer", "nap")}
    assert words >= {("queue", "review")}
    lacking = [["slots browser"]]
    eventually(lambda: [w["lacks"] for w in found(daemon, "status")["waits"] if w["kind"] == "queue"] == lacking)
    (root,) = [run["run"] for run in found(daemon, "status")["runs"] if run["parent"] is None]
    assert {wait["run"] for wait in waits if wait["kind"] in ("slots", "limit")} == {root}
    text = " ".join(shown(daemon, "status", COLUMNS="200").stdout.split())
    for said in (
        "slots browser",
        "limit search-api",
        "together stage-2",
        "sleep nap",
        "work in review, whose jobs lack slots browser",
        "budget model-usd",
    ):
        assert said in text, text
