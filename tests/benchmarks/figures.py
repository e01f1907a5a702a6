"""What was measured for one row, and whether it reaches a goal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

MET, CLOSE, MISSED, OPEN = "met", "within the ranges", "missed", "-"


@dataclass
class Figures:
    """A row's samples, one of each round. ``floor``: what the machine can do without us. ``peers``: by their names.
    ``absent``: why there is nothing of ours, or of a peer."""

    ours: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def stored(self) -> dict[str, object]:
        return {"ours": self.ours, "floor": self.floor, "peers": self.peers, "absent": self.absent, "note": self.note}


@dataclass(frozen=True)
class Goal:
    """``text`` as in the table, ``reached`` looks at the figures."""

    text: str
    reached: Callable[[Figures], str]


def measured_in_turns(work: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """One sample of each in each round: what disturbs the machine disturbs all of them."""
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, measure in work.items():
            samples[name].append(measure())
    return samples


# ---------------------------------------------------------------------------------------------------- goals


def at_least_of_floor(ratio: float) -> Goal:
    return Goal(f">= {ratio} of floor", lambda it: _more(it.ours, it.floor, ratio))


def at_least_of(ratio: float, *names: str) -> Goal:
    """Of the best of these peers."""
    return Goal(f">= {ratio} x {_any(names)}", lambda it: _more(it.ours, _best(it, names, max), ratio))


def at_most_of(ratio: float, *names: str) -> Goal:
    return Goal(f"<= {ratio} x {_any(names)}", lambda it: _less(it.ours, _best(it, names, min), ratio))


def above_floor(allowed: float, unit: str) -> Goal:
    def reached(it: Figures) -> str:
        if not it.ours or not it.floor:
            return OPEN
        return MET if median(it.ours) - median(it.floor) <= allowed else MISSED

    return Goal(f"<= {allowed} {unit} above floor", reached)


def at_most(most: float, unit: str = "") -> Goal:
    return Goal(f"<= {most:g} {unit}".strip(), lambda it: _judged(it.ours, lambda value: value <= most))


def at_least(least: float, unit: str = "") -> Goal:
    return Goal(f">= {least:g} {unit}".strip(), lambda it: _judged(it.ours, lambda value: value >= least))


def against_before(ratio: float, before: Callable[[], Figures | None]) -> Goal:
    """Of what was kept as "before": both as shares of the floor of their run."""

    def reached(it: Figures) -> str:
        old = before()
        if old is None or not (it.ours and it.floor and old.ours and old.floor):
            return OPEN
        shares = [median(one.ours) / median(one.floor) for one in (it, old)]
        return MET if shares[0] >= ratio * shares[1] else MISSED

    return Goal(f">= {ratio} x before", reached)


def _any(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "the best"


def _best(it: Figures, names: Sequence[str], choose: Callable) -> list[float]:
    """The samples of the peer with the best median."""
    there = [it.peers[name] for name in names if it.peers.get(name)]
    return choose(there, key=statistics.median) if there else []


def _judged(samples: list[float], is_good: Callable[[float], bool]) -> str:
    if not samples:
        return OPEN
    return MET if is_good(median(samples)) else MISSED


def _more(ours: list[float], others: list[float], ratio: float) -> str:
    """A ratio is missed only where the ranges do not overlap."""
    if not ours or not others:
        return OPEN
    if median(ours) >= ratio * median(others):
        return MET
    return CLOSE if max(ours) >= ratio * min(others) else MISSED


def _less(ours: list[float], others: list[float], ratio: float) -> str:
    if not ours or not others:
        return OPEN
    if median(ours) <= ratio * median(others):
        return MET
    return CLOSE if min(ours) <= ratio * max(others) else MISSED
