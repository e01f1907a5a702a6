"""Circles of waiting calls: each holds what the one before waits for, so that none of them would ever go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from runstated.waits import Call, CallKey, Hold


def find(
    call: Call, holders: Callable[[Call], Iterable[Hold]], inside: Callable[[int], Iterable[Call]]
) -> list[Call] | None:
    """The circle of waiting calls that ``call`` would close, itself first; None if there is none.

    ``holders``: the leases that keep a call waiting; one of several that can end is enough to end a wait. ``inside``:
    the calls made while a lease is held. A lease is stuck if ``call`` itself is made in it, or if a call made inside it
    waits for stuck leases only; so two that hold a part of one pool each, and want the other's, are stuck.
    """
    mine = set(call.request.within)
    if not mine:
        return None
    # What the call waits for, the calls made inside of that, what they wait for, and so on.
    reached = [call]
    waits_for: dict[CallKey, set[int]] = {}
    calls_inside: dict[int, list[Call]] = {}
    known = {call.key}
    for each in reached:
        waits_for[each.key] = {hold.token for hold in holders(each)}
        for token in waits_for[each.key] - calls_inside.keys():
            calls_inside[token] = list(inside(token)) if token not in mine else []
            reached += [other for other in calls_inside[token] if other.key not in known]
            known.update(other.key for other in calls_inside[token])
    stuck = _stuck(mine, waits_for, calls_inside)
    return _path(call, mine, waits_for, calls_inside, stuck)


def _stuck(mine: set[int], waits_for: dict[CallKey, set[int]], calls_inside: dict[int, list[Call]]) -> set[int]:
    """All leases but those that can end: first those in which nobody waits, then those for which somebody waits who
    goes on then."""
    stuck = set(calls_inside)
    asked_by: dict[int, list[CallKey]] = {}
    around: dict[CallKey, list[int]] = {}
    for key, tokens in waits_for.items():
        for token in tokens:
            asked_by.setdefault(token, []).append(key)
    held_up = {token: len(calls) for token, calls in calls_inside.items()}
    for token, calls in calls_inside.items():
        for each in calls:
            around.setdefault(each.key, []).append(token)
    goes_on = deque(key for key, tokens in waits_for.items() if not tokens)
    ended = deque(token for token, count in held_up.items() if not count and token not in mine)
    seen = set(goes_on)
    while goes_on or ended:
        while goes_on:
            for token in around.get(goes_on.popleft(), ()):
                held_up[token] -= 1
                if not held_up[token]:
                    ended.append(token)
        while ended:
            token = ended.popleft()
            stuck.discard(token)
            for key in asked_by.get(token, ()):
                if key not in seen:
                    seen.add(key)
                    goes_on.append(key)
    return stuck


def _path(
    call: Call,
    mine: set[int],
    waits_for: dict[CallKey, set[int]],
    calls_inside: dict[int, list[Call]],
    stuck: set[int],
) -> list[Call] | None:
    """The shortest way from the call over stuck leases back to one that it is made in."""
    ways: deque[list[Call]] = deque([[call]])
    seen = {call.key}
    while ways:
        way = ways.popleft()
        tokens = waits_for[way[-1].key]
        if not tokens <= stuck:
            continue
        if tokens & mine:
            return way
        for token in sorted(tokens):
            for other in calls_inside[token]:
                if other.key not in seen:
                    seen.add(other.key)
                    ways.append([*way, other])
    return None
