"""Circles of waiting calls: each holds what the one before waits for, so that none of them would ever go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from runstated.waits import Call, CallKey, Hold


def find(
    call: Call, holders: Callable[[Call], Iterable[Hold]], inside: Callable[[int], Iterable[Call]]
) -> list[Call] | None:
    """The circle of waiting calls that ``call`` would close, itself first; None if there is none.

    ``holders``: the leases that keep a call waiting. ``inside``: the calls made while a lease is held. A lease leads
    back if a call made inside it waits and all that this call waits for leads back to a lease that ``call`` itself is
    made in. All: one of several holders that can go on is enough to end a wait.
    """
    mine = set(call.request.within)
    if not mine:
        return None
    # Forwards: what the call waits for, the calls made inside of that, what they wait for, and so on.
    reached = [call]
    known = {call.key}
    open_ended: dict[CallKey, set[int]] = {}  # what a call waits for and does not lead back, as far as we know
    asked_by: dict[int, list[Call]] = {}
    for each in reached:
        open_ended[each.key] = {hold.token for hold in holders(each)}
        for token in open_ended[each.key]:
            asked_by.setdefault(token, []).append(each)
            for other in inside(token) if token not in mine else ():
                if other.key not in known:
                    known.add(other.key)
                    reached.append(other)
    return _path_back(call, mine, open_ended, asked_by)


def _path_back(
    call: Call, mine: set[int], open_ended: dict[CallKey, set[int]], asked_by: dict[int, list[Call]]
) -> list[Call] | None:
    """Backwards, from the leases that ``call`` is made in to itself."""
    through: dict[int, Call | None] = {token: None for token in sorted(mine) if token in asked_by}
    last: dict[CallKey, int] = {}  # call -> the last of its leases that was found to lead back
    found = deque(through)
    while found:
        token = found.popleft()
        for each in asked_by[token]:
            open_ended[each.key].discard(token)
            if open_ended[each.key]:
                continue
            last[each.key] = token
            for outer in each.request.within:
                if outer in asked_by and outer not in through:
                    through[outer] = each
                    found.append(outer)
    if call.key not in last:
        return None
    path = [call]
    while (onward := through[last[path[-1].key]]) is not None:
        path.append(onward)
    return path
