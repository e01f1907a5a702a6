"""The shape of the source: layout, who may import whom, sizes, who reads the clock, what must not be written down.

Each rule is a test of its own that prints all places where it is broken. Exceptions are named here, with their reason;
one that is not needed any more is a failure too, so the lists only get shorter.
"""

from __future__ import annotations

import ast
import re
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
    "runstated/clock.py": "it is the clock",
    "runstated/batch.py": "perf_counter: bounds the length of a batch, no rule depends on it",
    "runstated/next/store/sqlite.py": "perf_counter: where commits run, no rule depends on it",
    "runstated/next/engine/turns.py": "perf_counter: bounds the length of a turn, no rule depends on it",
    "runstated/main.py": "the command, not the daemon: how long it waits, what it shows",
}

DOMAIN_MAY_IMPORT = {"runstate.wire", "runstated.store.tx", "runstated.waits"}
DOMAIN_FROM_LINES = {"Topic", "EVENTS", "WATCH"}  # names of lines and signals; nothing that can do something
DOMAIN_FOUNDATION = {"leases", "payloads"}
NOUNS_STAND_ON = {  # beside the foundation
    "leases": set(),
    "payloads": set(),
    "runs": set(),
    "once": {"runs"},
    "limits": {"runs"},
    "slots": {"runs"},
    "budgets": {"runs"},
    "needs": {"limits", "slots", "budgets"},
    "jobs": {"runs"},
    "queues": {"jobs", "runs", "needs", "budgets"},
    "groups": {"runs", "jobs", "queues"},
    "timers": {"runs"},
    "barriers": {"runs"},
    "events": {"runs"},
    "sessions": {"runs", "once", "queues", "slots", "budgets"},  # what the end of a session means for each
    "status": {"runs"},
    "keys": set(),
    "tidy": {"once", "queues", "budgets", "timers", "barriers"},
}
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
    mirrored = {"domain": "runstated/domain", "store": "runstated/store", "shell": "runstated"}
    mirrored |= {"client": "client/runstate", "cli": "cli/runstate_cli"}
    stray = []
    for directory, source in mirrored.items():
        known = {path.stem for path in (ROOT / source).glob("*.py")}
        for path in sorted((ROOT / "tests" / directory).glob("test_*.py")):
            noun = path.stem.removeprefix("test_").removesuffix("_model")
            if noun not in known and noun not in ("proof", "spaces"):  # of all nouns
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


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("runstated.domain.")])
def test_a_noun_imports_the_transaction_the_wire_and_what_it_stands_on(name: str) -> None:
    noun = name.rpartition(".")[2]
    assert noun in NOUNS_STAND_ON, "say here what the new noun stands on"
    below = {f"runstated.domain.{other}" for other in NOUNS_STAND_ON[noun] | DOMAIN_FOUNDATION}
    for other, what in imports(name):
        if ours(other):
            assert other in DOMAIN_MAY_IMPORT | below, other
        if other == "runstated.waits":
            assert what in DOMAIN_FROM_LINES, what
        assert other.split(".")[0] not in ("asyncio", "time", "random", "socket", "logging", "os", "threading"), other


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


def test_only_the_store_imports_aiosqlite() -> None:
    users = {name for name in modules() for other, _ in imports(name) if other.split(".")[0] == "aiosqlite"}
    assert users == {"runstated.store.sqlite", "runstated.next.store.sqlite"}  # the next one grows beside the old one


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
    assert {call.rpartition(".")[2] for call in readers["runstated/batch.py"]} <= {"perf_counter", "perf_counter_ns"}


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
