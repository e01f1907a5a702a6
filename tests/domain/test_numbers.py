from __future__ import annotations

import pytest

from runstated.domain.numbers import LIFT, SECRETS, UNSYNCED_MAX, Numbers


def begun(last: dict[str, int], boot: str) -> tuple[Numbers, bool]:
    numbers = Numbers("test", dict(last))
    numbers.make_secrets()
    return numbers, numbers.begin(boot)


def after_a_life(boot: str, *, clean: bool) -> dict[str, int]:
    """What is on disk of a daemon that has lived in that boot."""
    numbers, _ = begun({}, boot)
    for _ in range(3):
        numbers.next("token")
    numbers.next("epoch")
    if clean:
        numbers.end()
    return numbers.last


@pytest.mark.parametrize(
    ("clean", "boot", "was_cut"),
    [(False, "second", True), (False, "first", False), (True, "second", False), (True, "first", False)],
)
def test_numbers_are_left_out_where_the_machine_has_ended_before_the_daemon(
    clean: bool, boot: str, was_cut: bool
) -> None:
    known = after_a_life("first", clean=clean)
    numbers, told = begun(known, boot)
    assert told == was_cut
    assert numbers.next("token") == 4 + LIFT * was_cut
    assert numbers.next("epoch") == 2, "it orders those who wait, and has few bits"
    assert {name: numbers.last[name] for name in SECRETS} == {name: known[name] for name in SECRETS}


def test_a_second_cut_leaves_out_numbers_again() -> None:
    known = after_a_life("first", clean=False)
    for number, boot in enumerate(("second", "third"), 1):
        numbers, was_cut = begun(known, boot)
        assert was_cut
        assert numbers.last["token"] == 3 + number * LIFT
        known = numbers.last


def test_where_boots_cannot_be_told_apart_each_end_without_order_may_have_been_the_machines() -> None:
    assert begun(after_a_life("", clean=False), "")[1]
    assert not begun(after_a_life("", clean=True), "")[1]


def test_a_new_database_leaves_nothing_out() -> None:
    numbers, was_cut = begun({}, "first")
    assert (numbers.next("token"), was_cut) == (1, False)


def test_more_numbers_are_left_out_than_are_given_without_being_on_disk() -> None:
    assert UNSYNCED_MAX < LIFT
    numbers, _ = begun({}, "first")
    for _ in range(5):
        numbers.next("event")
    assert numbers.unsynced == 5


def test_a_secret_is_told_again_and_is_of_this_database() -> None:
    ours, other = Numbers("a"), Numbers("b")
    for numbers in (ours, other):
        numbers.make_secrets()
    assert ours.secret_of(7) == ours.secret_of(7)
    assert len(ours.secret_of(7)) == 16
    assert len({ours.secret_of(7), ours.secret_of(8), other.secret_of(7)}) == 3
