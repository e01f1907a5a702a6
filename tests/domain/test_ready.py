from __future__ import annotations

import random

import pytest

from runstated.domain.ready import STALE_MAX, Ready

ABOVE = {"root": ("root",), "left": ("left", "root"), "right": ("right", "root"), "leaf": ("leaf", "left", "root")}
Waiting = dict[int, tuple[str, str, int]]  # by number, which is the age, too: run, queue, needs


def expected(waiting: Waiting, queue: str, run: str, below: bool, over: set[str]) -> list[int]:
    """One look at all of them."""
    oldest: dict[int, int] = {}
    for number, (where, of, needs) in sorted(waiting.items()):
        is_there = run in ABOVE[where] if below else run == where
        if of == queue and is_there and where not in over:
            oldest.setdefault(needs, number)
    return sorted(oldest.values())


@pytest.mark.parametrize("seed", range(40))
def test_heads_are_what_one_look_at_all_of_them_gives(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    ready: Ready[int] = Ready()
    waiting: Waiting = {}
    taken: Waiting = {}
    over: set[str] = set()
    for step in range(400):
        kind = rng.choice(("add", "add", "take", "take", "back", "end", "over"))
        if kind == "add":
            number, where = step, (rng.choice(list(ABOVE)), rng.choice("pq"), rng.choice((0, 0, 7)))
            waiting[number] = where
            ready.add(ABOVE[where[0]], where[1], where[2], (number, number), number)
        elif kind == "take" and waiting:
            where = rng.choice(list(waiting.values()))
            oldest = min(number for number, other in waiting.items() if other == where)
            assert ready.take(*where) == oldest
            taken[oldest] = waiting.pop(oldest)
        elif kind == "back" and taken:
            number = rng.choice(list(taken))
            where = waiting[number] = taken.pop(number)
            ready.add(ABOVE[where[0]], where[1], where[2], (number, number), number)
        elif kind == "end" and rng.random() < 0.1:
            run = rng.choice(list(ABOVE))
            ready.forget(run)
            waiting = {number: where for number, where in waiting.items() if where[0] != run}
        elif kind == "over":
            over ^= {rng.choice(list(ABOVE))}
        queue, run, below = rng.choice("pq"), rng.choice(list(ABOVE)), rng.random() < 0.7
        found = ready.heads(queue, run, below=below, is_over=over.__contains__)
        assert found == expected(waiting, queue, run, below, over), f"seed {seed}, step {step}"
        assert sum(len(heap) for heap in ready.all().values()) == len(waiting)


def test_what_nobody_looks_at_does_not_grow() -> None:
    ready: Ready[int] = Ready()
    for number in range(10_000):
        ready.add(ABOVE["leaf"], "q", 0, (number, number), number)
        assert ready.heads("q", "leaf", below=False, is_over=set().__contains__) == [number]
        if number % 10:
            ready.take("leaf", "q", 0)
            continue
        ready.add(ABOVE["left"], "q", 0, (number, number), number)
        ready.take("left", "q", 0)
        ready.take("leaf", "q", 0)
    ready.add(ABOVE["leaf"], "q", 0, (1, 1), 1)
    ready.add(ABOVE["right"], "q", 0, (2, 2), 2)
    assert ready.heads("q", "root", below=True, is_over=set().__contains__) == [1]
    entries = [len(top.heap) for tops in ready._tops.values() for top in tops.values()]
    assert max(entries) <= STALE_MAX + 4


def test_nothing_is_left_of_what_has_started_and_ended() -> None:
    ready: Ready[int] = Ready()
    for number, run in enumerate(ABOVE):
        ready.add(ABOVE[run], "q", 0, (number, number), number)
    ready.take("root", "q", 0)
    for run in ("left", "right", "leaf"):
        ready.forget(run)
    assert (ready._of_run, ready._tops) == ({}, {})
