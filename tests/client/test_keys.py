"""Work keys: golden vectors, the rules of canonical JSON, keyword binding, and every refusal with its place."""

import collections
import dataclasses
import datetime
import enum
import functools
import gc
import hashlib
import inspect
import json
import math
import pathlib
import struct
import sys
import weakref
from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runstate import keys
from runstate.errors import ConfigError

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "keys.json").read_text("utf-8"))

texts = st.text(st.characters(exclude_categories=[]))  # lone surrogates too
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts.map(lambda text: joined(text)), inner, max_size=4)
    ),
    max_leaves=20,
)


def joined(text):
    """The text as other languages see it: pairs of surrogates are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    HI = "hi"


class Plain(enum.Enum):
    A = 1


class Text(str):
    def __str__(self):
        return "not this"

    __repr__ = __str__


class Number(int):
    def __repr__(self):
        return "not this"

    __str__ = __int__ = __index__ = __repr__


class Real(float):
    def __repr__(self):
        return "not this"


@dataclasses.dataclass
class Point:
    x: int
    y: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int


class Model:
    """Looks like a pydantic v2 model."""

    def __init__(self, fields):
        self.fields = fields

    def model_dump(self):
        if isinstance(self.fields, Exception):
            raise self.fields
        return self.fields

    def __repr__(self) -> str:
        return "Model()"  # without its address: all workers of a run in parallel name the tests alike


class Endless:
    def model_dump(self):
        return Endless()


class Anything:
    def __getattr__(self, name):
        return lambda *args, **kwargs: {}


# The golden file


@pytest.mark.parametrize("number", range(len(GOLDEN["cases"])))
def test_golden_keys(number):
    case = GOLDEN["cases"][number]
    assert keys.canonical(case["args"]) == case["canonical"]
    assert keys.work_key(case["name"], case["args"]) == case["key"]
    assert keys.work_key(case["name"], tuple(case["args"])) == case["key"]


def test_known_keys_of_the_hosted_sdk():
    assert keys.call_key("f", f, None, (), {}) == "f:4f53cda18c2baa0c0354bb5f9a3ecbe5"
    assert keys.call_key("research", f, None, ("acme",), {}) == "research:07fad54f7446269afc481e306a48f046"
    assert keys.queue_key("double", {"n": 21}) == "double:362416049e6abb1723db6408c318f61c"


# Canonical JSON


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (0.1 + 0.2, "0.30000000000000004"),
        (2**53, "9007199254740992"),
        (2**53 + 1, "9007199254740992"),
        (-(2**53) - 1, "-9007199254740992"),
        (2**60, "1152921504606847000"),
        (1e16, "10000000000000000"),
        (1.5e16, "15000000000000000"),
        (123456789012345680.0, "123456789012345680"),
        (999999999999999900000.0, "999999999999999900000"),
        (1e21, "1e+21"),
        (-1.5e21, "-1.5e+21"),
        (10**21, "1e+21"),
        (1e-4, "0.0001"),
        (1e-5, "0.00001"),
        (-1.25e-5, "-0.0000125"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (-1.5e-7, "-1.5e-7"),
        (5e-324, "5e-324"),
        (sys.float_info.max, "1.7976931348623157e+308"),
        (True, "true"),
        (1, "1"),
        (None, "null"),
        ('"\\\b\f\n\r\t', '"\\"\\\\\\b\\f\\n\\r\\t"'),
        ("\x00\x1f", '"\\u0000\\u001f"'),
        ("\x7f\u2028\u2029/", '"\x7f\u2028\u2029/"'),
        ("\ud800", '"\\ud800"'),
        ("\udfffx", '"\\udfffx"'),
        ("\ud83d\ude00", '"\U0001f600"'),
        ("\ud83d\ud83d\ude00\ude00", '"\\ud83d\U0001f600\\ude00"'),
        (["\ud83d", "\ude00"], '["\\ud83d","\\ude00"]'),
        ({"\ud83d\ude00": 1}, '{"\U0001f600":1}'),
        ({"\uffff": 1, "\U0001f600": 2, "a": 3}, '{"a":3,"\U0001f600":2,"\uffff":1}'),
        ({"b": {"d": 1, "c": 2}, "a": ()}, '{"a":[],"b":{"c":2,"d":1}}'),
        ({"10": 1, "9": 2}, '{"10":1,"9":2}'),
        (Level.LOW, "1"),
        (Word.HI, '"hi"'),
        (Text("text"), '"text"'),
        (Number(7), "7"),
        (Real(1.5), "1.5"),
        ({Word.HI: 1, Text("a"): 2}, '{"a":2,"hi":1}'),
        (collections.OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
        (collections.namedtuple("Pair", "x y")(1, 2), "[1,2]"),
        (Point(1, [Slotted(2)]), '{"x":1,"y":[{"x":2}]}'),
        (Model({"b": Point(1), "a": Model([1])}), '{"a":[1],"b":{"x":1,"y":null}}'),
    ],
    ids=ascii,
)
def test_values_are_written_as_javascript_writes_them(value, text):
    assert keys.canonical(value) == text
    assert keys.canonical([value]) == f"[{text}]"


@given(values)
def test_the_text_reads_back_as_the_same_value(value):
    assert json.loads(keys.canonical(value), parse_int=float) == through_json(value)


@given(values)
def test_the_text_of_what_was_read_back_is_the_same(value):
    text = keys.canonical(value)
    assert keys.canonical(json.loads(text)) == text


@given(values)
def test_both_writers_agree(value):
    plain = keys._plain(value, 16)
    assert plain is None or plain == keys._walk(value)


@given(values)
def test_the_text_can_be_encoded_and_has_no_spaces_outside_strings(value):
    text = keys.canonical(value)
    text.encode("utf-8")
    assert keys.canonical([value, value]) == f"[{text},{text}]"


@given(st.dictionaries(texts.map(joined), st.integers(), max_size=8), st.randoms())
def test_the_order_of_insertion_does_not_matter_and_keys_sort_as_utf16(fields, random):
    shuffled = list(fields.items())
    random.shuffle(shuffled)
    text = keys.canonical(fields)
    assert keys.canonical(dict(shuffled)) == text
    read = list(json.loads(text))
    assert read == sorted(read, key=lambda key: key.encode("utf-16-be", "surrogatepass"))


@given(st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0]))
@example(math.nextafter(1e21, 0))
@example(math.nextafter(1e-6, 0))
def test_every_number_is_written_in_its_shortest_form_with_the_exponents_of_ecmascript(value):
    if not math.isfinite(value):
        return
    text = keys.canonical(value)
    assert float(text) == value
    assert digits(text) == digits(repr(value))
    assert ("e" in text) == (value != 0 and not 1e-6 <= abs(value) < 1e21)
    assert "e0" not in text and "e-0" not in text and "e+0" not in text and not text.endswith(".0")


@given(st.integers(2**53, 10**308), st.sampled_from([1, -1]))
def test_whole_numbers_beyond_2_to_the_53_are_doubles(value, sign):
    assert keys.canonical(sign * value) == keys.canonical(sign * float(value))


@pytest.mark.parametrize("value", [[], {}, "x", 0])
def test_a_class_of_a_dataclass_or_model_is_not_its_instance(value):
    for kind in (Point, Model, dict, Level):
        with pytest.raises(ConfigError, match=r"^\$\[1\] is of type"):
            keys.canonical([value, kind])


# Refusals


def looped_list():
    value = [1]
    value.append({"again": value})
    return value


def looped_dataclass():
    value = Point(1)
    value.y = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"x": math.nan}, "$[0].x is nan"),
        ({"x": math.inf}, "$[0].x is inf"),
        ([[-math.inf]], "$[0][0][0] is -inf"),
        ({1: 2}, "$[0] has the key 1"),
        ({"a": {None: 2}}, "$[0].a has the key None"),
        ({"a b": {1, 2}}, '$[0]["a b"] is of type set'),
        ({"\ud800": b"x"}, '$[0]["\\ud800"] is of type bytes'),
        ({Text("ab"): set()}, "$[0].ab is of type set"),
        ({"": bytearray()}, '$[0][""] is of type bytearray'),
        (datetime.datetime(2026, 1, 1), "$[0] is of type datetime"),
        (datetime.date(2026, 1, 1), "$[0] is of type date"),
        (object(), "$[0] is of type object"),
        (Plain.A, "$[0] is of type Plain"),
        (len, "$[0] is of type builtin_function_or_method"),
        (range(3), "$[0] is of type range"),
        (iter([]), "$[0] is of type list_iterator"),
        (1j, "$[0] is of type complex"),
        (MappingProxyType({}), "$[0] is of type mappingproxy"),
        (Anything(), "$[0] is of type Anything"),
        (10**309, "$[0] is a whole number too large"),
        (-(10**5000), "$[0] is a whole number too large"),
        (Point(1, {1}), "$[0].y is of type set"),
        (Model({"when": datetime.date(2026, 1, 1)}), "$[0].when is of type date"),
        (Model(ValueError("no")), "$[0].model_dump() failed: no"),
        (Point.__new__(Point), "$[0] lacks a field"),
        (looped_list(), "$[0][1].again contains itself"),
        (looped_dataclass(), "$[0].y[0] contains itself"),
        (Endless(), "$[0] is nested more than 1000 levels"),
        ({"\U0001f600": 1, "\ud83d\ude00": 2}, "$[0] has the key "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_json_is_refused_and_the_place_is_named(value, text):
    for function in (lambda: keys.queue_key("q", value), lambda: keys.call_key("f", f, None, (value,), {})):
        with pytest.raises(ConfigError) as caught:
            function()
        assert str(caught.value).startswith(text)


def test_a_value_may_occur_twice_when_it_does_not_contain_itself():
    shared = Point(1, Model({}))
    assert keys.canonical([shared, shared, {"again": shared}]).count('{"x":1,"y":{}}') == 3


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"k": value}, lambda value: Point(1, value)])
def test_deep_nesting_works_up_to_a_limit_and_is_refused_beyond_it(wrap):
    value = 1.5
    for _ in range(keys.DEPTH_MAX - 1):
        value = wrap(value)
    assert len(keys.work_key("f", [value])) == 34
    for _ in range(100_000 if wrap(0) == [0] else 1):
        value = wrap(value)
    with pytest.raises(ConfigError, match="nested more than 1000 levels") as caught:
        keys.work_key("f", [value])
    assert len(str(caught.value)) < 400
    while isinstance(value, list):  # taken apart by hand: some Pythons crash when they free what is nested so deep
        (value,) = value


def test_a_full_stack_does_not_change_the_key():
    value = functools.reduce(lambda inner, _: [inner], range(60), Point(1))
    expected = keys.canonical(value)

    def at_depth(left):
        return at_depth(left - 1) if left else keys.canonical(value)

    assert at_depth(sys.getrecursionlimit() - len(inspect.stack()) - 60) == expected


# Keywords


def f(name=None, depth=1, *, c=None): ...
def positional_only(a, b=1, /, c=2, **rest): ...
def gather(a, *rest, b=1, **more): ...
def required(a, b, *, c): ...
def two(a, b): ...
def nothing(): ...


FUNCTIONS = [
    f,
    two,
    positional_only,
    gather,
    required,
    nothing,
    functools.partial(required, 1, c=2),
    [].append,
    Model({}),
]


@pytest.mark.parametrize(
    ("args", "kwargs", "hashed"),
    [
        ((), {"name": "a"}, ["a"]),
        (("a",), {"depth": 2}, ["a", 2]),
        ((), {"depth": 2, "name": "a"}, ["a", 2]),
        (("x",), {"c": 5}, ["x", {"c": 5}]),
        ((), {"depth": 2}, [{"depth": 2}]),
        ((), {"depth": 2, "c": 3}, [{"depth": 2, "c": 3}]),
        (("x",), {"depth": 1, "c": 3}, ["x", 1, {"c": 3}]),
        (("x",), {"unknown": 3}, ["x", {"unknown": 3}]),
        (("x",), {"name": "y"}, ["x", {"name": "y"}]),
        ((1, 2, 3), {"c": 4}, [1, 2, 3, {"c": 4}]),
        ((1, 2, 3), {}, [1, 2, 3]),
    ],
)
def test_keywords_are_bound_to_the_signature(args, kwargs, hashed):
    assert keys.call_key("f", f, None, args, kwargs) == keys.work_key("f", hashed)


def test_defaults_are_not_filled_in():
    assert keys.call_key("f", f, None, ("x",), {}) != keys.call_key("f", f, None, ("x", 1), {})


def test_a_keyword_only_argument_counts_as_an_object_at_the_end():
    def g(a, *, depth): ...

    assert keys.call_key("g", g, None, ("a",), {"depth": 2}) == keys.call_key("g", g, None, ("a", {"depth": 2}), {})


@given(
    st.sampled_from(FUNCTIONS),
    st.lists(st.integers(), max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["a", "b", "c", "name", "depth", "rest", "z"]), st.integers(), max_size=4),
)
@example(two, (), {"a": 1})
@example(required, (1,), {"b": 2})
@example(positional_only, (1,), {"b": 2})
@example(two, (1, 2, 3), {"a": 1})
def test_arguments_are_those_that_the_signature_binds(function, args, kwargs):
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        expected = [*bound.args, bound.kwargs] if bound.kwargs else list(bound.args)
    except (TypeError, ValueError):
        expected = [*args, kwargs] if kwargs else list(args)
    assert keys.arguments(function, args, kwargs) == expected


def test_a_builtin_without_a_signature_is_hashed_as_written():
    with pytest.raises(ValueError):
        inspect.signature(dict.update)
    assert keys.arguments(dict.update, (1,), {"a": 2}) == [1, {"a": 2}]


def test_a_signature_is_read_once_and_forgotten_with_its_function(monkeypatch):
    reads = []
    read = keys._read_shape
    monkeypatch.setattr(keys, "_read_shape", lambda fn: reads.append(1) or read(fn))

    def g(a): ...

    for _ in range(3):
        assert keys.arguments(g, (), {"a": 1}) == [1]
    assert len(reads) == 1
    gone = weakref.ref(g)
    del g
    gc.collect()
    assert gone() is None


class Unhashable:
    __hash__ = None

    def __call__(self, a): ...


def test_a_callable_that_cannot_be_remembered_works_too():
    assert keys.arguments(Unhashable(), (), {"a": 1}) == [1]


# Keys chosen by the user


def test_a_custom_key_gets_the_arguments_exactly_as_passed():
    seen = []

    def key(*args, **kwargs):
        seen.append((args, kwargs))
        return "k"

    assert keys.call_key("f", f, key, ("a",), {"depth": {1}}) == "f:k"
    assert keys.queue_key("q", {1}, lambda value: key(value)) == "q:k"
    assert seen == [(("a",), {"depth": {1}}), (({1},), {})]


@pytest.mark.parametrize("chosen", ["x", "x" * 255, "\u540d\u524d", "a:b", Word.HI])
def test_a_custom_key_of_1_to_255_characters_is_used_as_it_is(chosen):
    expected = "f:hi" if chosen is Word.HI else f"f:{chosen}"
    assert keys.call_key("f", f, lambda: chosen, (), {}) == expected
    assert keys.queue_key("f", 1, lambda _: chosen) == expected


@pytest.mark.parametrize("chosen", ["", "x" * 256, None, 5, b"x", ["x"], "\ud800"])
def test_any_other_custom_key_is_refused(chosen):
    with pytest.raises(ConfigError, match="key function of 'f' returned"):
        keys.call_key("f", f, lambda: chosen, (), {})
    with pytest.raises(ConfigError, match="key function of 'f' returned"):
        keys.queue_key("f", 1, lambda _: chosen)


def test_an_async_custom_key_is_refused_without_a_warning():
    async def key():
        return "x"

    with pytest.raises(ConfigError, match="coroutine"):
        keys.call_key("f", f, key, (), {})
    gc.collect()  # where a coroutine that was not closed would warn, and warnings are errors


def test_what_a_custom_key_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        keys.call_key("f", f, lambda: 1 // 0, (), {})


@given(st.text(st.characters(exclude_categories=["Cs"])), values)
def test_a_key_is_the_name_and_32_hex_digits_of_the_hash(name, value):
    hashed = hashlib.sha256(keys.canonical([value]).encode()).hexdigest()[:32]
    assert keys.queue_key(name, value) == keys.work_key(name, (value,)) == f"{name}:{hashed}"


def digits(text):
    return text.lstrip("-").partition("e")[0].replace(".", "").strip("0")


def through_json(value):
    """A value as other languages read it: every number a double, lists for tuples, joined surrogates."""
    if isinstance(value, str):
        return joined(value)
    if isinstance(value, (list, tuple)):
        return [through_json(item) for item in value]
    if isinstance(value, dict):
        return {joined(key): through_json(item) for key, item in value.items()}
    return value
