"""The shape of the source: layout, who may import whom, sizes, who reads the clock, what must not be written down.

Each rule is a test of its own that prints all places where it is broken. Exceptions are named here, with their reason;
one that is not needed any more is a failure too, so the lists only get shorter.
"""

from __future__ import annotations

import ast
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "runstated": ROOT / "runstated",
    "runstate": ROOT / "client/runstate",
    "runstate_cli": ROOT / "cli/runstate_cli",
}
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "runstated", "client", "cli", "tests", "systemd"}
GENERATED = {"__pycache__", "dist", "build"}

FUNCTION_LINES_MAX = 70  # signature and body, without the docstring
FILE_LINES_MAX = 500

LONG_FILES = {
    "client/runstate/wire.py": 1_250,  # every message, in one place by design
}
LONG_FUNCTIONS: dict[str, int] = {}

CLOCKS = ("time", "asyncio", "datetime", "datetime.datetime", "datetime.date")
READINGS = ("time", "monotonic", "perf_counter", "clock_gettime", "now", "utcnow", "today")
CLOCK_READERS = {
    "runstated/host/clock.py": "it is the clock",
    "runstated/store/sqlite.py": "perf_counter: where commits run, no rule depends on it",
    "runstated/engine/turns.py": "perf_counter: bounds the length of a turn, no rule depends on it",
    "runstated/main.py": "the command, not the daemon: how long it waits, what it shows",
}

ROOMS = {  # who may import whom, beside itself; "" are the files that put the rooms together
    "domain": set(),
    "store": {"domain", "settings"},
    "host": {"settings"},
    "engine": {"domain", "store", "host", "settings"},
    "server": {"domain", "engine", "host", "settings"},
    "http": {"domain", "engine", "server", "host", "settings"},
    "settings": set(),
}
NO_NOUNS = {  # what all nouns stand on
    "access", "answers", "core", "holds", "leases", "lines", "numbers", "payloads", "ready", "replies", "stands",
    "tables", "waits",
}  # fmt: skip
NOUNS_STAND_ON = {  # beside these
    "runs": set(),
    "once": {"runs"},
    "limits": {"runs"},
    "slots": {"runs"},
    "money": set(),
    "budgets": {"money", "runs"},
    "needs": {"limits", "slots", "budgets"},
    "jobs": {"runs", "needs"},
    "ahead": {"jobs", "runs"},
    "queues": {"ahead", "jobs", "runs", "needs", "budgets"},
    "admission": {"ahead", "queues", "jobs", "runs", "needs", "budgets"},
    "groups": {"ahead", "runs", "jobs", "queues", "needs"},
    "timers": {"runs"},
    "barriers": {"runs"},
    "events": {"runs"},
    "sessions": {"runs", "once", "queues", "slots", "budgets"},  # what the end of a session means for each
    "status": {"runs", "jobs", "queues", "sessions", "limits", "slots", "budgets", "money"},
    "keys": set(),
}
LATE_IMPORTS = {"late": 85, "TYPE_CHECKING": 59}  # how many there are; fewer is better
SILENT = {"runstate", "runstated"}  # what they have to say goes through errors and logs

NOT_WRITTEN_DOWN = re.compile(
    r"/work/|/tmp/v/|/home/(?!me/)[a-z]+/|/root/|pypi\.org|files\.pythonhosted|registry\.npmjs|--index-url|artifactory",
    re.I,
)


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the packages, by its path in the checkout."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for place in SOURCES.values()
        for path in sorted(place.rglob("*.py"))
    }


def module_name(path: str) -> str:
    """``runstated/domain/runs.py`` -> ``runstated.domain.runs``."""
    name = path.removeprefix("client/").removeprefix("cli/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


@cache
def modules() -> dict[str, ast.Module]:
    return {module_name(path): tree for path, tree in trees().items()}


def imports(name: str, *, at_import: bool = False) -> Iterator[tuple[str, str]]:
    """(module, name taken from it or "") of each import of ours; ``at_import``: only those that run with the module."""
    package = name if _is_package(name) else name.rpartition(".")[0]
    nodes = _run_at_import(modules()[name].body) if at_import else ast.walk(modules()[name])
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole, "") if whole in modules() else (base, alias.name)


def _is_package(name: str) -> bool:
    return any(path.endswith("/__init__.py") and module_name(path) == name for path in trees())


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements that run when the module is imported: not those in functions, nor those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from _run_at_import(getattr(node, field, []))


def ours(name: str) -> bool:
    return name.split(".")[0] in SOURCES


# ---------------------------------------------------------------------------------------------------- layout


def test_the_top_level_is_the_agreed_one() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - GENERATED
    assert {name for name in found if not name.endswith(".egg-info")} == TOP_LEVEL


def test_every_module_says_what_it_is_for() -> None:
    assert [path for path, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_every_test_file_mirrors_something() -> None:
    """Tests of one module are named after it; other tests stand where real processes, faults or seeds are at home."""
    rooms = ("domain", "engine", "store", "server", "host")
    mirrored = {**{room: f"runstated/{room}" for room in rooms}, "shell": "runstated"}
    mirrored |= {"client": "client/runstate", "cli": "cli/runstate_cli"}
    stray = []
    for directory, source in mirrored.items():
        known = {path.stem for path in (ROOT / source).glob("*.py")}
        for path in sorted((ROOT / "tests" / directory).glob("test_*.py")):
            noun = path.stem.removeprefix("test_").removesuffix("_model")
            if noun not in known and noun not in ("proof", "spaces", "tidy"):  # of all nouns
                stray.append(path.relative_to(ROOT).as_posix())
    assert stray == [], "no module of that name"


# ---------------------------------------------------------------------------------------------------- imports


def test_the_library_imports_nothing_else_of_ours() -> None:
    found = [
        (name, other)
        for name in modules()
        if name.split(".")[0] == "runstate"
        for other, _ in imports(name)
        if ours(other) and other.split(".")[0] != "runstate"
    ]
    assert found == []


def test_the_command_line_imports_the_library_only() -> None:
    found = [
        (name, other)
        for name in modules()
        if name.split(".")[0] == "runstate_cli"
        for other, _ in imports(name)
        if other.split(".")[0] == "runstated"
    ]
    assert found == []


def room_of(name: str) -> str:
    """The room of a module of the daemon; "" for those that put the rooms together."""
    _, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    return room if room in ROOMS else ""


def test_data_flows_one_way_through_the_rooms() -> None:
    found = [
        (name, other)
        for name in modules()
        if name.startswith("runstated.") and room_of(name)
        for other, _ in imports(name)
        if other.startswith("runstated.") and room_of(other) not in ROOMS[room_of(name)] | {room_of(name)}
    ]
    assert found == []


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("runstated.domain.")])
def test_a_noun_imports_what_it_stands_on_and_no_machine(name: str) -> None:
    noun = name.rpartition(".")[2]
    if noun == "nouns":  # the list of them all
        return
    assert noun in NOUNS_STAND_ON or noun in NO_NOUNS, "say here what the new noun stands on"
    below = {f"runstated.domain.{other}" for other in NOUNS_STAND_ON.get(noun, set()) | NO_NOUNS}
    for other, _ in imports(name):
        if ours(other):
            assert other in below | {"runstate.wire", "runstate.context"}, other
        assert other.split(".")[0] not in ("asyncio", "time", "random", "socket", "logging", "os", "threading"), other


def test_no_text_of_the_domain_is_sql() -> None:
    """Rules are about objects: the store makes all SQL."""
    connection = sqlite3.connect(":memory:")
    found = []
    for path, tree in trees().items():
        if path.startswith("runstated/domain/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_sql(connection, node.value):
                    found.append((path, node.value))
    assert found == []


def _is_sql(connection: sqlite3.Connection, text: str) -> bool:
    """Whether SQLite takes it for a statement, though it may not know the table."""
    if len(text.split()) < 2 or text.split()[0].isdigit():
        return False
    try:
        connection.execute(f"EXPLAIN {text}")
    except sqlite3.Error as error:
        return str(error).startswith(("no such table", "no such column"))
    except (ValueError, sqlite3.Warning):
        return False
    return True


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Through imports at the top of modules; those inside of functions are there to be late."""
    edges = {
        name: {other for other, _ in imports(name, at_import=True) if other in modules() and other != name}
        for name in modules()
    }
    done: set[str] = set()
    while free := {name for name, others in edges.items() if name not in done and others <= done}:
        done |= free
    assert sorted(set(edges) - done) == []


def test_late_imports_are_counted() -> None:
    """Those inside of functions and those for type checkers hide circles: their number is known, and only falls."""
    late: set[int] = set()
    typing: set[int] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                late |= {id(each) for each in ast.walk(node) if _is_of_ours(each)}
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                typing |= {id(each) for each in ast.walk(node) if _is_of_ours(each)}
    assert {"late": len(late), "TYPE_CHECKING": len(typing)} == LATE_IMPORTS


def _is_of_ours(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(ours(alias.name) for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (bool(node.level) or ours(node.module or ""))


def test_only_the_store_imports_aiosqlite() -> None:
    users = {name for name in modules() for other, _ in imports(name) if other.split(".")[0] == "aiosqlite"}
    assert users == {"runstated.store.sqlite"}


def test_importing_the_library_is_light_and_does_nothing() -> None:
    """In a new interpreter: no event loop, no terminal library, no thread, no descriptor."""
    script = (
        "import os, sys, threading\n"
        "count = lambda: len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 0\n"
        "before = count()\n"
        "import runstate\n"
        "heavy = {'asyncio', 'rich', 'click', 'platformdirs', 'aiosqlite', 'uvloop', 'runstated', 'runstate_cli'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count(), count() - before)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (answer.stdout, answer.stderr) == ("[] 1 0\n", "")


# ---------------------------------------------------------------------------------------------------- time


def test_only_the_clock_reads_time_in_the_daemon() -> None:
    readers: dict[str, set[str]] = {}
    for path, tree in trees().items():
        if path.startswith("runstated/"):
            taken = {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
                for alias in node.names
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    head, _, rest = called.partition(".")
                    called = taken[head] + (f".{rest}" if rest else "") if head in taken else called
                    clock, _, reading = called.rpartition(".")
                    if clock in CLOCKS and reading.removesuffix("_ns") in READINGS:
                        readers.setdefault(path, set()).add(called)
    assert set(readers) == set(CLOCK_READERS), readers
    for path in ("runstated/engine/turns.py", "runstated/store/sqlite.py"):
        assert {call.rpartition(".")[2] for call in readers[path]} <= {"perf_counter", "perf_counter_ns"}


# ---------------------------------------------------------------------------------------------------- size


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the signature and the body, without the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def test_functions_are_short() -> None:
    long = {
        f"{path}: {node.name}": function_lines(node)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > FUNCTION_LINES_MAX
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), long
    assert all(lines <= LONG_FUNCTIONS[name] for name, lines in long.items()), "what is too long must not grow"


def test_files_are_short() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in trees()}
    long = {path: lines for path, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert long.keys() == LONG_FILES.keys(), long
    assert all(lines <= LONG_FILES[path] for path, lines in long.items()), f"what is too long must not grow: {long}"


# ---------------------------------------------------------------------------------------------------- words


def test_the_library_and_the_daemon_do_not_print() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if module_name(path).split(".")[0] in SILENT
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "breakpoint")
    ]
    assert found == []


def texts() -> Iterator[tuple[str, str]]:
    """Every text file that belongs to the project."""
    for place in (*sorted(TOP_LEVEL), ".ci", ".gitignore"):
        for path in [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "__pycache__" not in name and path.name != Path(__file__).name:
                yield name, path.read_text(errors="replace")


def test_no_path_of_one_machine_and_no_registry_is_written_down() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if NOT_WRITTEN_DOWN.search(line)
    ]
    assert found == []
