from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as shape

from runstate import framing, wire
from tests.messages import ALL, PUSHES, REPLIES, REQUESTS, tag

REMOVED = {"request hello": ("namespace", "client")}  # fields that older clients send and nobody reads
FRAMES = sorted((Path(__file__).parents[1] / "golden").glob("frames*.json"))  # those of each version
HANDLED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what the server answers, see server.py
DECODERS = {"request": wire.decode_request, "reply": wire.decode_reply, "push": wire.decode_push}


def raw(message: msgspec.Struct, **changes: object) -> bytes:
    """The message as a map, with some fields changed."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(message), **changes})


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("name", ALL)
def test_every_message_comes_back_as_it_was_sent(name: str) -> None:
    decode = DECODERS[name.partition(" ")[0]]
    assert decode(wire.encode(ALL[name])) == ALL[name]


def test_the_messages_of_these_tests_are_all_there_are() -> None:
    assert {type(message) for message in REQUESTS} == set(get_args(wire.AnyRequest))
    assert {type(message) for message in REPLIES} == set(get_args(wire.AnyReply))
    assert {type(message) for message in PUSHES} == set(get_args(wire.AnyPush))


@pytest.mark.parametrize("name", ALL)
def test_every_message_here_has_a_value_for_each_field(name: str) -> None:
    message = ALL[name]
    everywhere = {field.name for field in msgspec.structs.fields(wire.WaitingRequest)}
    own = {field.name for field in msgspec.structs.fields(message)} - everywhere
    sent = set(msgspec.msgpack.decode(wire.encode(message)))
    assert own <= sent, "a field with its default value is not sent, and so not tested"


def test_tags_are_the_names_of_the_verbs_and_differ() -> None:
    for group in (REQUESTS, REPLIES, PUSHES):
        assert len({tag(message) for message in group}) == len(group)


def test_a_field_with_its_default_value_is_left_out() -> None:
    assert wire.encode(wire.Bye()) == msgspec.msgpack.encode({"verb": "bye"})


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.name)
def test_golden_frames_are_read_for_ever_and_mean_what_they_did(path: Path) -> None:
    for name, digits in json.loads(path.read_text()).items():
        ((request_id, body),) = framing.Splitter().feed(bytes.fromhex(digits))
        message = DECODERS[name.partition(" ")[0]](body)
        assert request_id == 7
        meant = msgspec.msgpack.decode(body)
        for gone in REMOVED.get(name, ()):
            meant.pop(gone, None)
        assert (name.partition(" ")[2], msgspec.msgpack.decode(wire.encode(message))) == (tag(message), meant)


def test_the_newest_golden_frames_are_of_all_messages_as_they_are_now() -> None:
    golden = json.loads(FRAMES[-1].read_text())
    assert set(golden) == set(ALL), "run tests/golden/make.py under a new name for new messages"
    assert {name: framing.pack(7, wire.encode(message)).hex() for name, message in ALL.items()} == golden


# ------------------------------------------------------------------ versions differ


@pytest.mark.parametrize("name", ALL)
def test_unknown_fields_are_ignored(name: str) -> None:
    body = raw(ALL[name], a_field_of_the_future={"x": [1, None]})
    assert DECODERS[name.partition(" ")[0]](body) == ALL[name]


def test_an_unknown_verb_is_refused_by_its_name() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"slots\.steal"):
        wire.decode_request(msgspec.msgpack.encode({"verb": "slots.steal"}))


def test_a_message_without_a_verb_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="verb"):
        wire.decode_request(msgspec.msgpack.encode({"run": "r1-test"}))


def test_a_reply_is_no_request() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_request(wire.encode(wire.Ok()))


# ------------------------------------------------------------------ ranges

OUTSIDE: list[tuple[str, str, Any]] = [
    ("once.acquire", "lease_ms", 4_999),
    ("once.acquire", "lease_ms", 600_001),
    ("once.acquire", "wait_ms", -1),
    ("once.acquire", "wait_ms", 2**53 + 1),
    ("once.acquire", "within", [0]),
    ("once.acquire", "inherited", [0]),
    ("once.acquire", "ticket", -1),
    ("once.acquire", "run", ""),
    ("once.acquire", "run", "r" * 65),
    ("once.acquire", "key", ""),
    ("once.acquire", "key", "k" * 513),
    ("once.acquire", "key", 5),
    ("once.acquire", "key", None),
    ("once.complete", "token", 0),
    ("once.complete", "token", 1.5),
    ("once.complete", "result", b"bytes"),
    ("once.fail", "attempts", 0),
    ("once.fail", "attempts", 101),
    ("once.fail", "error", "e" * 4_001),
    ("runs.join", "name", ""),
    ("runs.join", "name", "n" * 257),
    ("runs.join", "deadline_ms", -1),
    ("runs.end", "state", "expired"),
    ("queues.declare", "attempts", 0),
    ("queues.admit", "queues", []),
    ("queues.admit", "queues", [{"run": "r", "queue": "q"}] * 257),
    ("queues.admit", "queues", [{"run": "r", "queue": "q", "places": -1}]),
    ("queues.admit", "queues", [{"run": "r", "queue": "q", "places": 1_001}]),
    ("queues.admit", "queues", [{"run": "r", "queue": "q", "lease_ms": 1}]),
    ("hello", "pid", -1),
    ("hello", "worker", "w" * 513),
    ("hello", "session", ""),
    ("status.get", "limit", 0),
    ("status.get", "limit", 1_001),
]
OUTSIDE += [
    ("once.acquire", "within", [1] * 257),
    ("once.acquire", "ticket", 2**63),
    ("beat", "tokens", [1] * 1_001),
    ("beat", "tokens", [2**63]),
    ("ack", "calls", [1] * 1_001),
    ("hello", "runs", ["r"] * 2_001),
    ("events.read", "after", 2**63),
    ("cancel", "call", -1),
]
BY_TAG = {tag(message): message for message in REQUESTS}


@pytest.mark.parametrize(("verb", "field", "value"), OUTSIDE)
def test_a_value_outside_its_range_is_refused_by_the_name_of_its_field(verb: str, field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
        wire.decode_request(raw(BY_TAG[verb], **{field: value}))


PAYLOADS = {"input", "result"}  # their bytes are counted by the verbs, with a message of their own


@pytest.mark.parametrize("message", REQUESTS, ids=tag)
def test_everything_that_a_client_can_send_has_a_bound(message: wire.Request[Any]) -> None:
    assert list(_unbounded(shape.type_info(type(message)), tag(message))) == []


def _unbounded(kind: shape.Type, where: str) -> Iterator[str]:
    if isinstance(kind, shape.StructType):
        for field in kind.fields:
            if field.name not in PAYLOADS:
                yield from _unbounded(field.type, f"{where}.{field.name}")
    elif isinstance(kind, shape.UnionType):
        for each in kind.types:
            yield from _unbounded(each, where)
    elif isinstance(kind, shape.IntType):
        if kind.ge is None or kind.le is None or kind.le > wire.NUMBER_MAX:
            yield where
    elif isinstance(kind, shape.VarTupleType | shape.DictType | shape.StrType):
        if kind.max_length is None:
            yield where
        parts = [kind.key_type, kind.value_type] if isinstance(kind, shape.DictType) else []
        for part in [kind.item_type] if isinstance(kind, shape.VarTupleType) else parts:
            yield from _unbounded(part, f"{where}[]")
    else:
        assert isinstance(kind, shape.BoolType | shape.LiteralType | shape.NoneType), kind


def test_a_field_that_is_missing_is_refused_by_its_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="`key`"):
        wire.decode_request(msgspec.msgpack.encode({"verb": "once.acquire", "run": "r"}))


# ------------------------------------------------------------------ noise


@given(st.binary(max_size=200))
def test_noise_raises_only_what_the_server_handles(noise: bytes) -> None:
    for decode in DECODERS.values():
        try:
            decode(noise)
        except HANDLED:
            pass


@given(name=st.sampled_from(sorted(ALL)), cut=st.integers(0, 400), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_damaged_message_raises_only_what_the_server_handles(name: str, cut: int, at: int, byte: int) -> None:
    body = bytearray(wire.encode(ALL[name]))
    body[at % len(body)] = byte
    for damaged in (bytes(body), bytes(body[: cut % (len(body) + 1)]), bytes(body) + b"\x00"):
        try:
            DECODERS[name.partition(" ")[0]](damaged)
        except HANDLED:
            pass


@pytest.mark.parametrize("body", [b"\x81" * 5_000, b"\x91" * 5_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_deep_or_endless_nesting_is_refused(body: bytes) -> None:
    prefix = msgspec.msgpack.encode({"verb": "bye"})[:-3]
    for each in (body, b"\x82\xa4verb\xa3bye\xa1x" + body, prefix + body):
        with pytest.raises(HANDLED):
            wire.decode_request(each)


def test_text_that_is_not_utf8_is_refused() -> None:
    body = wire.encode(wire.RunsJoin(name="abc")).replace(b"abc", b"a\xedc")
    with pytest.raises(HANDLED):
        wire.decode_request(body)


# ------------------------------------------------------------------ what the types say


def test_every_request_names_replies_that_are_replies() -> None:
    for kind in get_args(wire.AnyRequest):
        (base,) = kind.__orig_bases__
        (answer,) = get_args(base)
        for reply in typing.get_args(answer) or (answer,):
            assert reply in get_args(wire.AnyReply)


def test_what_is_replayed_waits_or_changes_something_and_what_reads_gives_nothing() -> None:
    for kind in get_args(wire.AnyRequest):
        assert not (kind.reads and (kind.replayed or kind.gives))
        assert not (kind.gives and issubclass(kind, wire.WaitingRequest)), "what gives something back never waits"
