from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runstate.framing import FRAME_BYTES_MAX, FrameError, Splitter, pack

IDS = st.integers(0, 2**64 - 1)
FRAMES = st.lists(st.tuples(IDS, st.binary(max_size=40)), max_size=8)


def test_a_frame_is_a_length_an_id_and_a_body() -> None:
    assert pack(258, b"ab") == bytes.fromhex("0000000a 0000000000000102 6162")


def test_frames_may_come_byte_by_byte() -> None:
    splitter = Splitter()
    found = [frame for byte in pack(1, b"one") + pack(2, b"") for frame in splitter.feed(bytes([byte]))]
    assert found == [(1, b"one"), (2, b"")]


def test_a_frame_comes_out_with_its_last_byte_and_not_before() -> None:
    splitter = Splitter()
    data = pack(1, b"one")
    assert splitter.feed(data[:-1]) == []
    assert splitter.feed(data[-1:]) == [(1, b"one")]


def test_many_frames_may_come_at_once_with_the_beginning_of_another() -> None:
    splitter = Splitter()
    many = [(number, b"x" * number) for number in range(50)]
    data = b"".join(pack(*frame) for frame in many)
    last = pack(99, b"last")
    assert splitter.feed(data + last[:5]) == many
    assert splitter.feed(last[5:]) == [(99, b"last")]


def test_nothing_gives_nothing() -> None:
    assert Splitter().feed(b"") == []


@given(frames=FRAMES, seed=st.integers(0, 2**32))
def test_however_the_bytes_are_cut_the_frames_are_the_same(frames: list[tuple[int, bytes]], seed: int) -> None:
    data = b"".join(pack(*frame) for frame in frames)
    rng = random.Random(seed)
    splitter, found, at = Splitter(), [], 0
    while at < len(data):
        size = rng.choice([1, 2, 3, 11, 12, 13, 40, 400])
        found += splitter.feed(data[at : at + size])
        at += size
    assert found == frames


@pytest.mark.parametrize("length", [0, 7, FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_that_cannot_be_is_refused_as_soon_as_its_header_is_there(length: int) -> None:
    header = length.to_bytes(4, "big") + bytes(8)
    splitter = Splitter()
    assert splitter.feed(header[:11]) == []
    with pytest.raises(FrameError, match=str(length)):
        splitter.feed(header[11:])


def test_a_wrong_length_after_good_frames_is_refused() -> None:
    with pytest.raises(FrameError):
        Splitter().feed(pack(1, b"good") + bytes(12))


def test_the_largest_frame_passes_and_one_byte_more_is_refused_by_the_sender() -> None:
    body = bytes(FRAME_BYTES_MAX - 8)
    data = pack(1, body)
    splitter, found = Splitter(), []
    for at in range(0, len(data), 65_536):
        found += splitter.feed(data[at : at + 65_536])
    assert found == [(1, body)]
    with pytest.raises(FrameError, match=str(FRAME_BYTES_MAX)):
        pack(1, body + b"x")


def test_a_slow_large_frame_is_not_copied_for_each_piece() -> None:
    data = pack(1, bytes(1_000_000))
    splitter = Splitter()
    for at in range(0, len(data) - 1, 1_000):
        assert splitter.feed(data[at : min(at + 1_000, len(data) - 1)]) == []
        assert splitter._need == len(data) or at == 0
    assert len(splitter.feed(data[-1:])) == 1
