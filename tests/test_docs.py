"""The documents say what the code does: PROTOCOL.md against the wire, README.md against commands and settings.

Fields, ranges, defaults, error codes, example bytes, links, options and variables are read from both sides and
compared. Where a document is wrong, the message of the failed comparison is what it should say.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest
from msgspec import inspect as shape

import runstate_cli
from runstate import framing, wire
from runstate.holds import GRANTING
from runstated import main, settings
from runstated.domain import nouns as dispatch
from runstated.domain.answers import Refusal

ROOT = Path(__file__).parents[1]
PROTOCOL = (ROOT / "client" / "PROTOCOL.md").read_text()
README = (ROOT / "README.md").read_text()

# ---------------------------------------------------------------------------------------------------- what wire.py says


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every message and inner map of the wire by the name that it has in the document: its tag, or its class."""
    found = {}
    for name, value in vars(wire).items():
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == wire.__name__:
            tag = value.__struct_config__.tag
            found[str(tag) if tag else name] = value
    return found


BASES = {"Request": wire.Request, "WaitingRequest": wire.WaitingRequest, "Reply": wire.Reply, "Push": wire.Push}
MESSAGES = {name: struct for name, struct in structs().items() if name not in BASES}


def type_and_range(described: shape.Type) -> tuple[str, str]:
    """A type in the words of the document."""
    if isinstance(described, shape.UnionType):
        words = [type_and_range(each) for each in described.types if not isinstance(each, shape.NoneType)]
        return " or ".join([word for word, _ in words] + ["nil"]), "; ".join(range_ for _, range_ in words if range_)
    if isinstance(described, shape.StrType):
        length = described.max_length
        return "string", f"{described.min_length or 0} to {length} characters" if length else ""
    if isinstance(described, shape.IntType):
        if described.ge is None:
            return "integer", ""
        most = "2^63 - 1" if described.le == wire.NUMBER_MAX else described.le
        return "integer", f"at least {described.ge}" if most is None else f"{described.ge} to {most}"
    if isinstance(described, shape.BoolType):
        return "boolean", ""
    if isinstance(described, shape.AnyType):
        return "any", ""
    if isinstance(described, shape.LiteralType):
        return "string", " or ".join(f"`{value}`" for value in described.values)
    if isinstance(described, shape.VarTupleType):
        word, range_ = type_and_range(described.item_type)
        ranges = [f"each {range_}"] if range_ else []
        if described.max_length:
            ranges.insert(0, f"{described.min_length or 0} to {described.max_length} entries")
        return f"list of {word}", "; ".join(ranges)
    if isinstance(described, shape.StructType):
        return f"`{described.cls.__struct_config__.tag or described.cls.__name__}`", ""
    if isinstance(described, shape.DictType):
        range_ = f"{described.min_length or 0} to {described.max_length} entries" if described.max_length else ""
        return f"map of {type_and_range(described.key_type)[0]} to {type_and_range(described.value_type)[0]}", range_
    raise AssertionError(f"the document has no word for {described}")


def default_word(field: shape.Field) -> str:
    """A default in the words of the document."""
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[misc]
    words: dict[Any, str] = {None: "nil", (): "empty list", "": '`""`'}
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return "empty map"
    return words.get(value) or (f'`"{value}"`' if isinstance(value, str) else str(value))


def rows(struct: type[msgspec.Struct]) -> list[tuple[str, str, str, str]]:
    """(field, type, range, default) of each of its own fields: those of its bases are described once, there."""
    described = shape.type_info(struct)
    assert isinstance(described, shape.StructType)
    above: set[str] = set()
    for base in struct.__mro__[1:]:
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            above |= set(base.__struct_fields__)
    return [
        (field.encode_name, *type_and_range(field.type), default_word(field))
        for field in described.fields
        if field.name not in above
    ]


def replies_of(request: type[msgspec.Struct]) -> set[str]:
    """The tags of the replies that a request names as its type parameter."""
    argument = get_args(request.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    return {str(each.__struct_config__.tag) for each in get_args(argument) or (argument,)}


# ---------------------------------------------------------------------------------------------------- what is written


def section(document: str, title: str) -> str:
    """From a heading to the next one of its level or above."""
    level = title.split(" ")[0]
    start = re.search(rf"^{re.escape(title)}$", document, re.MULTILINE)
    assert start is not None, f"there is no heading {title!r}"
    end = re.search(rf"^#{{1,{len(level)}}} ", document[start.end() :], re.MULTILINE)
    return document[start.end() : start.end() + end.start()] if end else document[start.end() :]


def table(text: str, first: str) -> list[tuple[str, ...]]:
    """The rows of the table in ``text`` whose first heading is ``first``; none if there is no such table."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            return list(_cells(lines))
    return []


def _cells(lines: Iterator[str]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])


def fields(text: str) -> list[tuple[str, str, str, str]]:
    return [(row[0].strip("`"), row[1], row[2], row[3]) for row in table(text, "field")]


def codes_in(text: str) -> set[str]:
    return set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", text))


# ---------------------------------------------------------------------------------------------------- PROTOCOL.md


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "error"])
def test_every_message_is_described_field_by_field(name: str) -> None:
    assert fields(section(PROTOCOL, f"#### `{name}`")) == rows(MESSAGES[name])


def test_the_fields_that_messages_share_are_described() -> None:
    assert fields(section(PROTOCOL, "## Repeats")) == rows(wire.Request)
    assert fields(section(PROTOCOL, "## Waiting")) == rows(wire.WaitingRequest)
    assert fields(section(PROTOCOL, "## Errors")) == rows(wire.Error)


def test_every_heading_of_a_message_is_a_message() -> None:
    assert set(re.findall(r"^#### `(.+)`$", PROTOCOL, re.MULTILINE)) == set(MESSAGES) - {"error"}


@pytest.mark.parametrize("kind", ["Requests", "Replies", "Pushes", "Inner maps"])
def test_messages_stand_under_their_kind(kind: str) -> None:
    bases = {"Requests": wire.Request, "Replies": wire.Reply, "Pushes": wire.Push}
    found = re.findall(r"^#### `(.+)`$", section(PROTOCOL, f"## {kind}"), re.MULTILINE)
    expected = [
        name
        for name, struct in MESSAGES.items()
        if name != "error"
        and (issubclass(struct, bases[kind]) if kind in bases else not issubclass(struct, tuple(bases.values())))
    ]
    assert sorted(found) == sorted(expected)


REQUESTS = {name: struct for name, struct in MESSAGES.items() if issubclass(struct, wire.Request)}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_names_its_replies_and_whether_it_waits_and_is_kept(name: str) -> None:
    request = REQUESTS[name]
    text = section(PROTOCOL, f"#### `{name}`")
    line = next(line for line in text.splitlines() if line.startswith("Replies: "))
    assert set(re.findall(r"`([a-z_.]+)`", line)) == replies_of(request)
    assert ("*May wait.*" in text) is issubclass(request, wire.WaitingRequest)
    assert ("*Reply kept.*" in text) is request.replayed  # type: ignore[attr-defined]


def test_what_needs_an_ack_is_named() -> None:
    """Kept replies that give no hold; the reply that gave a hold is forgotten with it."""
    kept = set()
    for name, request in REQUESTS.items():
        if request.replayed:  # type: ignore[attr-defined]
            kept |= {reply for reply in replies_of(request) if MESSAGES[reply].kept}  # type: ignore[attr-defined]
            assert name in dispatch_names(), "only a request of the domain is kept"
    granting = {str(reply.__struct_config__.tag) for reply in GRANTING}
    line = next(line for line in PROTOCOL.splitlines() if "**Ack.**" in line)
    assert set(re.findall(r"`([a-z_.]+)`", line.partition("and it is")[2].partition(", tell")[0])) == kept - granting


def dispatch_names() -> set[str]:
    return {str(request.__struct_config__.tag) for request in dispatch.VERBS}


# ---------------------------------------------------------------------------------------------------- error codes


def codes_of_the_daemon() -> set[str]:
    """Every code that the daemon can send: those of refusals, and those written where an error is made."""
    found = {refusal.code for refusal in all_below(Refusal)}
    for path in (ROOT / "runstated").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in ("Error", "HelloRefused", "_fail", "_error"):
                    found |= set(_codes_among([*node.args, *(keyword.value for keyword in node.keywords)]))
    return found


def _codes_among(arguments: list[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        value = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(value, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", value):
            yield value


def all_below(kind: type[Refusal]) -> set[type[Refusal]]:
    found = {kind}
    for below in kind.__subclasses__():
        found |= all_below(below)
    return found


def test_every_error_code_of_the_daemon_is_in_the_table_and_no_other() -> None:
    written = [row[0].strip("`") for row in table(section(PROTOCOL, "### All codes"), "code")]
    assert sorted(written) == sorted(codes_of_the_daemon())


def test_only_codes_of_the_table_are_mentioned() -> None:
    assert codes_in(PROTOCOL) - {"ENOENT", "ECONNREFUSED", "EAGAIN"} == codes_of_the_daemon()


# ---------------------------------------------------------------------------------------------------- the example

RESULT = '{"company":"acme","summary":"acme makes widgets"}'
KEY = "research:9bb5a9d6e0f24c3d8f3f7e1f5a2b6c70"

EXAMPLE: tuple[tuple[str, int, msgspec.Struct], ...] = (
    (
        "client: hello",
        1,
        wire.Hello(protocol=1, protocol_min=1, session="5f3a9c0d1e2b4a67", worker="host-4242", pid=4242),
    ),
    ("daemon: welcome", 1, wire.Welcome(protocol=1, version="0.1.0", pid=4100)),
    ("client: runs.join", 2, wire.RunsJoin(name="default")),
    (
        "daemon: run",
        2,
        wire.RunView(run="r1-4f9a", name="default", state="active", created_ms=1_764_460_800_000),
    ),
    ("client: once.acquire", 3, wire.OnceAcquire(run="r1-4f9a", key=KEY, wait_ms=60_000)),
    ("daemon: once.granted", 3, wire.OnceGranted(token=17, attempt=1, secret="9c41d07ea2b85f36")),
    (
        "daemon to another client, which asked under its id 9: parked",
        0,
        wire.Parked(call=9, ticket=2**40 + 12, behind=(17,)),
    ),
    ("client, every ten seconds: beat", 0, wire.Beat(tokens=(17,))),
    ("client: once.complete", 4, wire.OnceComplete(run="r1-4f9a", key=KEY, token=17, result=RESULT)),
    ("daemon: once.done", 4, wire.OnceDone(result=RESULT)),
    ("daemon to the other client: once.done", 9, wire.OnceDone(result=RESULT)),
    (
        "client: once.complete once more, with a wrong token",
        5,
        wire.OnceComplete(run="r1", key="k", token=1, result="1"),
    ),
    ("daemon: error", 5, wire.Error(code="NOT_FOUND", message="run r9-4f9a not found")),
)


def dump(data: bytes) -> str:
    """Sixteen bytes in a line: where, in hexadecimal, as text."""
    lines = []
    for at in range(0, len(data), 16):
        piece = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{at:04x}  {piece.hex(' '):<47}  {text}")
    return "\n".join(lines)


def shown(title: str, request_id: int, message: msgspec.Struct) -> str:
    """One frame of the example as it stands in the document."""
    frame = framing.pack(request_id, wire.encode(message))
    body = msgspec.json.encode(message).decode()
    return f"**{title}** (id {request_id})\n\n```\n{body}\n\n{dump(frame)}\n```"


def test_the_example_shows_the_bytes_that_are_sent() -> None:
    written = section(PROTOCOL, "## The bytes of an example")
    assert [block.strip() for block in re.findall(r"\*\*.+?\n```\n.+?\n```", written, re.DOTALL)] == [
        shown(*each) for each in EXAMPLE
    ]


def test_the_bytes_of_the_example_are_read_back_by_the_daemon_and_by_the_client() -> None:
    lines = re.findall(r"^[0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+)", section(PROTOCOL, "## The bytes of an example"), re.M)
    frames = framing.Splitter().feed(b"".join(bytes.fromhex(line) for line in lines))
    assert [request_id for request_id, _ in frames] == [request_id for _, request_id, _ in EXAMPLE]
    for (_, body), (_, _, message) in zip(frames, EXAMPLE, strict=True):
        decode = {wire.Request: wire.decode_request, wire.Reply: wire.decode_reply, wire.Push: wire.decode_push}
        read = next(read for base, read in decode.items() if isinstance(message, base))
        assert read(body) == message


# ---------------------------------------------------------------------------------------------------- numbers in prose


def test_the_limits_in_the_document_are_those_of_the_code() -> None:
    limits = " ".join(" ".join(row) for row in table(section(PROTOCOL, "## Payloads and limits"), "what"))
    for number in (framing.FRAME_BYTES_MAX, wire.PAYLOAD_BYTES_MAX, wire.LEASE_MS_MIN, wire.LEASE_MS_MAX):
        assert f"{number:,}" in limits
    assert f"{settings.HELLO_MS // 1000} s" in limits
    assert f"{settings.RESUME_MS // 1000} s" in limits
    assert f"within {settings.RESUME_MS // 1000} s" in section(PROTOCOL, "## Sessions")
    assert f"up to {settings.CONNECTIONS_PER_PROCESS_MAX} connections" in section(PROTOCOL, "## Sessions")
    assert f"at most {settings.OPENING_MS // 1000} s" in section(PROTOCOL, "## Draining")
    assert f"version {wire.PROTOCOL}" in PROTOCOL.splitlines()[0]


@pytest.mark.parametrize("document", [PROTOCOL, README], ids=["PROTOCOL.md", "README.md"])
def test_links_lead_somewhere(document: str) -> None:
    """Inside a document to a heading, outside of it to a file of the checkout."""
    headings = re.findall(r"^#+ (.+)$", document, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", document):
        if target.startswith("#"):
            assert target[1:] in slugs, target
        else:
            assert (ROOT / target.partition("#")[0]).exists(), target


# ---------------------------------------------------------------------------------------------------- README.md


def two_commands() -> list[str]:
    """The two lines that a newcomer copies: the first two shell blocks."""
    blocks = re.findall(r"^```sh\n(.+?)\n```$", README, re.DOTALL | re.MULTILINE)
    return blocks[:2]


def test_the_two_commands_are_single_lines_and_the_ones_that_ci_runs() -> None:
    demo, tests = two_commands()
    assert "\n" not in demo + tests
    assert demo.endswith("runstate demo") and tests.endswith("pytest -n 2 --dist loadfile")
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_command 1" in script and "readme_command 2" in script, "it reads them from README.md by number"


def test_the_verb_table_is_the_wire() -> None:
    rows_ = table(section(README, "## From a verb to its file"), "verb")
    assert [row[0].strip("`") for row in rows_] == list(REQUESTS)
    for verb, daemon, client in (row[:3] for row in rows_):
        tag = verb.strip("`")
        function = re.fullmatch(r"`([\w/.]+)`: `(\w+)`", daemon)
        assert function is not None, daemon
        path, name = function.groups()
        assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), daemon
        verb_function = dispatch.VERBS.get(REQUESTS[tag])
        if verb_function is not None:
            module = verb_function.__module__.replace(".", "/") + ".py"
            assert (path, name) == (module, verb_function.__name__), tag
        made = f"wire.{REQUESTS[tag].__name__}("
        users = [path for path in python_files("client", "cli", "runstated/http") if made in path.read_text()]
        assert client == "not used yet" if not users else ROOT / client.strip("`") in users, (tag, users)


def python_files(*places: str) -> list[Path]:
    return [path for place in places for path in sorted((ROOT / place).rglob("*.py"))]


GROUPS: dict[str, click.Group] = {"runstated": main.cli, "runstate": runstate_cli.cli}


def commands(group: click.Group) -> dict[str, click.Command]:
    """The commands of a program by their words; those of its groups, not the groups themselves."""
    found = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= {f"{name} {below}": each for below, each in commands(command).items()}
        elif not command.hidden:
            found[name] = command
    return found


@pytest.mark.parametrize("program", GROUPS)
def test_the_commands_in_the_readme_are_those_of_the_program(program: str) -> None:
    written = [row[0].strip("`") for row in table(section(README, f"### `{program}`"), "command")]
    assert written == [f"{program} {name}" for name in commands(GROUPS[program])]


@pytest.mark.parametrize("program", GROUPS)
def test_the_options_in_the_readme_are_those_of_the_commands(program: str) -> None:
    for row in table(section(README, f"### `{program}`"), "command"):
        command = commands(GROUPS[program])[row[0].strip("`").partition(" ")[2]]
        options = {option for param in command.params for option in param.opts if option.startswith("--")}
        assert set(re.findall(r"`(--[a-z-]+)[^`]*`", row[2])) == options - {"--help"}, row[0]


@pytest.mark.parametrize("program", GROUPS)
def test_every_command_and_option_has_a_help_text(program: str) -> None:
    for name, command in commands(GROUPS[program]).items():
        assert command.help, name
        for param in command.params:
            if isinstance(param, click.Option):
                assert param.help, f"{name} {param.name}"


def test_the_settings_table_is_that_of_the_daemon() -> None:
    written = {row[0].strip("`"): row for row in table(section(README, "## Settings"), "key")}
    assert list(written) == list(settings.FILE_KEYS)
    for key, row in written.items():
        assert row[1] == f"`RUNSTATED_{key.upper()}`"
        assert row[2] == f"`--{key.replace('_', '-')}`"
    defaults = {field.name: field.default for field in dataclasses.fields(settings.Settings)}
    for key, allowed in (("sync", settings.SYNC_MODES), ("log_level", settings.LOG_LEVELS)):
        assert written[key][3] == f"`{defaults[key]}`"
        assert {word for word in allowed if f"`{word}`" in " ".join(written[key])} == set(allowed)


def test_every_variable_in_the_readme_is_read_by_the_code_and_vice_versa() -> None:
    code = "\n".join(path.read_text() for path in python_files("runstated", "client", "cli"))
    read = set(re.findall(r"\"(RUNSTATED?_[A-Z_]*[A-Z])\"", code)) | {
        f"RUNSTATED_{k.upper()}" for k in settings.FILE_KEYS
    }
    assert set(re.findall(r"\b(RUNSTATED?_[A-Z_]*[A-Z])\b", README)) == read


def test_the_events_in_the_readme_are_those_that_the_daemon_emits() -> None:
    """Their payloads are compared in tests/e2e/test_events.py."""
    kind = re.compile(r"(scope|once|task|lease|budget|timer|barrier)\.[a-z_]+")
    emitted = set()
    for path in python_files("runstated"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("emit", "_emit", "_ended"):
                for argument in node.args:
                    text = argument.value if isinstance(argument, ast.Constant) else None
                    if isinstance(text, str) and kind.fullmatch(text):
                        emitted.add(text)
                    if isinstance(argument, ast.JoinedStr):
                        assert ast.unparse(argument) == "f'scope.{kind}'", "say here what it can be"
                        emitted |= {"scope.cancelled", "scope.completed", "scope.expired"}
    written = [row[0].strip("`") for row in table(section(README, "## Events"), "type")]
    assert sorted(written) == sorted(emitted)


def test_the_readme_installs_the_units_that_there_are() -> None:
    text = section(README, "## systemd")
    for unit in (ROOT / "systemd").iterdir():
        assert f"systemd/{unit.name}" in text


def test_the_programs_in_the_readme_are_python() -> None:
    programs = re.findall(r"^```python\n(.+?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(programs) == 6
    for program in programs:
        compile(program, "README.md", "exec")
