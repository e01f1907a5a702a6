"""Holds without a daemon: what is renewed, what is given back, and from where."""

from __future__ import annotations

import gc
import os
import threading
import time

from runstate import errors, wire
from runstate.holds import Heart, Holds, granted

LEASE_MS = 30_000
PATIENCE_S = 30


def test_only_handles_that_exist_are_renewed() -> None:
    holds = Holds()
    kept, dropped = holds.add(1, "r", LEASE_MS, None), holds.add(2, "r", LEASE_MS, None)
    assert holds.tokens() == (1, 2)
    assert holds.get(2) is dropped
    del dropped
    gc.collect()
    assert holds.tokens() == (1,)
    assert holds.take_given() == [2]
    assert holds.take_given() == []
    kept.settle()
    assert (holds.tokens(), holds.take_given(), bool(holds)) == ((), [], False)


def test_a_hold_ends_once() -> None:
    holds = Holds()
    released, settled, lost = (holds.add(token, "r", LEASE_MS, None) for token in (1, 2, 3))
    released.release()
    released.release()
    released.settle()
    settled.settle()
    settled.release()
    reason = errors.LeaseLostError("gone", code="LEASE_LOST")
    lost.lose(reason)
    lost.release()
    assert holds.take_given() == [1]
    assert (lost.signal.reason, released.signal.is_set()) == (reason, False)
    del released, settled, lost
    assert holds.take_given() == []


def test_the_same_answer_once_more_is_the_same_hold() -> None:
    holds = Holds()
    request = wire.OnceAcquire(run="r", key="k")
    first = granted(holds, request, wire.OnceGranted(token=7, attempt=1), None)
    again = granted(holds, request, wire.OnceGranted(token=7, attempt=1), None)
    assert first[7] is again[7]
    del again
    gc.collect()
    assert (holds.take_given(), holds.tokens()) == ([], (7,))


def test_jobs_are_held_with_the_lease_of_the_queue_they_came_from() -> None:
    holds = Holds()
    queues = (wire.AdmitFrom(run="r", queue="a"), wire.AdmitFrom(run="r", queue="b", lease_ms=60_000))
    job = wire.JobGrant(token=1, job="j", run="child", run_name=None, key="k", input="1", attempt=1, source=1)
    found = granted(holds, wire.QueuesAdmit(queues=queues), wire.JobsGranted(jobs=(job,)), None)
    assert (found[1].lease_ms, found[1].run) == (60_000, "child")
    assert granted(holds, wire.QueuesAdmit(queues=queues), wire.JobsGranted(), None) == {}


def test_a_hold_that_is_dropped_in_a_child_is_its_parents() -> None:
    holds = Holds()
    hold = holds.add(1, "r", LEASE_MS, None)
    hold.pid = os.getpid() + 1
    del hold
    gc.collect()
    assert holds.take_given() == []


def test_the_heartbeat_beats_at_a_third_of_the_shortest_lease_and_tells_at_once_what_goes_back() -> None:
    holds = Holds()
    beats: list[tuple[int, ...]] = []
    heard = threading.Semaphore(0)

    def beat(tokens: tuple[int, ...]) -> None:
        beats.append(tokens or tuple(-token for token in holds.take_given()))
        if beats[-1]:
            heard.release()

    heart = Heart(holds, beat)
    began = time.monotonic()
    hold = holds.add(1, "r", 300, None)
    heart.start()
    assert heard.acquire(timeout=PATIENCE_S)
    assert heard.acquire(timeout=PATIENCE_S)
    assert time.monotonic() - began >= 0.2
    long = holds.add(2, "r", 3_000_000, None)
    hold.settle()
    del long
    assert heard.acquire(timeout=PATIENCE_S)
    assert [told for told in beats if told][-1] == (-2,)
    heart.stop()


def test_the_heartbeats_thread_ends_and_begins_again() -> None:
    def hearts() -> list[threading.Thread]:
        return [
            thread for thread in threading.enumerate() if thread.name == "runstate-heartbeat" and thread not in others
        ]

    others: list[threading.Thread] = []
    others = hearts()
    heart = Heart(Holds(), lambda tokens: None)
    for _ in range(2):
        heart.start()
        heart.start()
        [thread] = hearts()
        heart.stop()
        thread.join(PATIENCE_S)
        assert hearts() == []
