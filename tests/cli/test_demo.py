"""What the demo counts, and that a wrong number is seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from click.testing import CliRunner

import runstate_cli
from runstate_cli import demo, demo_facts
from runstate_cli.demo_facts import JOBS, LONG_JOB, WORKERS, Event, Facts, Kill

FIRST, HEIR, VICTIM, HELPER = 101, 102, 103, 104
RESULT = {"company": "acme", "by": HEIR}


def event(name: str, pid: int, at: float = 0.0, **data: Any) -> Event:
    return Event(name, at, pid, data)


def story() -> list[Event]:
    """What the workers of a perfect demo say."""
    pids = range(101, 101 + WORKERS)
    events = [event("ready", pid) for pid in pids] + [event("once.called", pid) for pid in pids]
    events += [event("once.started", FIRST, 1.0), event("once.started", HEIR, 2.008), event("once.ended", HEIR)]
    events += [event("once.returned", pid, result=RESULT) for pid in pids if pid != FIRST]
    events += [event("job.started", VICTIM, 3.0, number=LONG_JOB, attempt=1)]
    for number in range(JOBS):
        attempt = 2 if number == LONG_JOB else 1
        events += [event("job.started", HELPER, 4.013, number=number, attempt=attempt)]
        events += [event("job.ended", HELPER, 4.1, number=number, attempt=attempt)]
    return events + [event("left", pid) for pid in pids if pid not in (FIRST, VICTIM)]


def facts(events: list[Event], **changed: Any) -> Facts:
    results = [{"number": number, "attempt": 2 if number == LONG_JOB else 1} for number in range(JOBS)]
    seen: dict[str, Any] = {
        "once_kill": Kill(FIRST, 2.0),
        "job_kill": Kill(VICTIM, 4.0),
        "own_result": RESULT,
        "results": results,
        "exit_codes": [-9, 0, -9, *[0] * (WORKERS - 3)],
    }
    return demo_facts.gather(events, **{**seen, **changed})


def without(name: str, pid: int) -> list[Event]:
    return [each for each in story() if (each.name, each.pid) != (name, pid)]


def test_a_perfect_story_has_no_wrong_number() -> None:
    measured = facts(story())
    assert demo_facts.wrong(measured) == []
    assert measured.once_takeover_ms == pytest.approx(8)
    assert measured.job_takeover_ms == pytest.approx(13)


@pytest.mark.parametrize(
    ("events", "changed", "sentence"),
    [
        ([*story(), event("once.started", HELPER)], {}, "starts of the once function"),
        ([*story(), event("once.ended", HELPER)], {}, "times the once function ran to the end: 2, should be 1"),
        (without("once.returned", HELPER), {}, "callers that got the once result: 9, should be 10"),
        (without("once.started", HEIR), {}, "takeover of the once: none"),
        (without("ready", HELPER), {}, "worker processes that came up: 9, should be 10"),
        (without("left", HELPER), {}, "workers that left by themselves"),
        (story(), {"own_result": {"company": "acme", "by": 1}}, "different results that they got: 2, should be 1"),
        (story(), {"once_kill": Kill(FIRST, -9.0)}, "takeover of the once: 11008.0 ms, should be under 5000 ms"),
        (story(), {"once_kill": Kill(FIRST, 3.0)}, "takeover of the once: -992.0 ms"),
        (story(), {"job_kill": Kill(HELPER, 4.0)}, "another process finished the killed worker's job: False"),
        (story(), {"results": []}, f"jobs that were done: 0, should be {JOBS}"),
        (story(), {"exit_codes": [0] * WORKERS}, "exit codes of the workers"),
        (
            [*story(), event("job.started", HELPER, number=5, attempt=2), event("job.ended", HELPER)],
            {},
            "jobs that were delivered again: 2, should be 1",
        ),
    ],
)
def test_a_wrong_number_is_named(events: list[Event], changed: dict[str, Any], sentence: str) -> None:
    assert any(each.startswith(sentence) for each in demo_facts.wrong(facts(events, **changed)))


def test_every_number_counts() -> None:
    right = facts(story())
    for field in dataclasses.fields(Facts):
        broken = dataclasses.replace(right, **{field.name: None})
        assert demo_facts.wrong(broken), f"{field.name} is not checked"


def test_a_wrong_number_is_exit_code_1_with_a_line_that_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(facts(story()), once_ends=2)
    monkeypatch.setattr(demo, "_play", lambda cleanup: broken)
    answer = CliRunner().invoke(runstate_cli.cli, ["demo"])
    assert answer.exit_code == 1
    assert answer.stderr == "WRONG: times the once function ran to the end: 2, should be 1\n"
    assert "All numbers are right" not in answer.output


def test_right_numbers_are_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_play", lambda cleanup: facts(story()))
    answer = CliRunner().invoke(runstate_cli.cli, ["demo"])
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert "All numbers are right" in answer.output
