"""A disk that can lose its power: what a program wrote, what it synced, and what a cut leaves of it.

    power_on   the files as they are now are safe; gives the environment for the program (the shim writes the log)
    cut        after the program was killed: makes of the files what the disk would hold

What is not synced survives by chance:

- Each **page** of 4 KiB by itself is as it was at its last sync, as it is now, or as it was in between.
- A file's **size** likewise. What lies in it without ever having been written is zero.
- A **name** (a file that was made, renamed, removed) counts when its directory was synced; until then the changes of a
  directory are there in order, as far as they are there at all: that is what journaling file systems do.
- A sync covers what was written before it began. After a sync that **failed** the kernel takes the pages for
  clean: they survive by chance, although a later sync succeeds, until they are written and synced once more.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

PAGE = 4_096
RECORD = struct.Struct("<IIQQ")
IGNORED = ("-shm", ".log", ".sock")  # as in shim.c
SHIM = Path(__file__).with_name("shim.c")
ZEROS = bytes(PAGE)
LUCKS = (0.0, 0.5, 0.9, 1.0)

T = TypeVar("T")
Version = tuple[int, bytes]  # the number of the record that wrote it, the content of the page


class NotModelled(AssertionError):
    """The program did something to its files of which we do not know what a power cut makes of it."""


def compile_shim(directory: Path) -> Path:
    """The shim as a library. Needs a C compiler, `cc`."""
    library = directory / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SHIM)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return library


@dataclass
class File:
    """The content of one file and what of it is not safe. The first version of a page, and the first size, are."""

    pages: dict[int, list[Version]] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=lambda: [(-1, 0)])
    dirty: dict[int, int] = field(default_factory=dict)  # by page: the last record that wrote it since the last sync
    is_resized: int = -1  # the last record that changed the size since the last sync

    @classmethod
    def of(cls, content: bytes) -> File:
        """A file that is safe."""
        pages = range(0, len(content), PAGE)
        versions = {at // PAGE: [(-1, content[at : at + PAGE].ljust(PAGE, b"\0"))] for at in pages}
        return cls(versions, [(-1, len(content))])

    @property
    def size(self) -> int:
        """As the program sees it."""
        return self.sizes[-1][1]

    def write(self, number: int, offset: int, data: bytes) -> None:
        at = offset
        while data:
            page, start = divmod(at, PAGE)
            piece, data = data[: PAGE - start], data[PAGE - start :]
            self._change(number, page, start, piece)
            at += len(piece)
        if at > self.size:
            self._resize(number, at)

    def resize(self, number: int, size: int) -> None:
        """Cuts the file off, or makes it longer with zeros."""
        for page in [page for page in self.pages if (page + 1) * PAGE > size]:
            start = max(0, size - page * PAGE)
            self._change(number, page, start, ZEROS[start:])
        self._resize(number, size)

    def _change(self, number: int, page: int, start: int, piece: bytes) -> None:
        versions = self.pages.setdefault(page, [(-1, ZEROS)])
        before = versions[-1][1]
        versions.append((number, before[:start] + piece + before[start + len(piece) :]))
        self.dirty[page] = number

    def _resize(self, number: int, size: int) -> None:
        self.sizes.append((number, size))
        self.is_resized = number

    def sync(self, begun: int, *, succeeded: bool) -> None:
        """A sync that began with that record has ended: it covered what was written before, or the kernel has forgotten
        that there was something to write."""
        for page, last in list(self.dirty.items()):
            if succeeded:
                self.pages[page] = since(self.pages[page], begun)
            if last < begun:
                del self.dirty[page]
        if self.is_resized >= 0 and succeeded:
            self.sizes = since(self.sizes, begun)
        if self.is_resized < begun:
            self.is_resized = -1

    def after_cut(self, rng: random.Random, luck: float) -> bytes:
        """What is left of it. ``luck``: how likely the newest version of something survives."""
        size = choose(rng, luck, self.sizes)
        content = bytearray(size)
        for page, versions in self.pages.items():
            if page * PAGE < size:
                kept = choose(rng, luck, versions)
                content[page * PAGE : (page + 1) * PAGE] = kept[: size - page * PAGE]
        return bytes(content)

    @property
    def unsafe_pages(self) -> int:
        """How many pages a cut may throw back."""
        return sum(len(versions) > 1 for versions in self.pages.values())


def since(versions: list[tuple[int, T]], begun: int) -> list[tuple[int, T]]:
    """The last version from before a record, and those after it."""
    first = max((index for index, (number, _) in enumerate(versions) if number < begun), default=0)
    return versions[first:]


def choose(rng: random.Random, luck: float, versions: list[tuple[int, T]]) -> T:
    if len(versions) == 1 or rng.random() < luck:
        return versions[-1][1]
    return rng.choice(versions[:-1])[1]


Change = tuple[int, dict[str, "File | None"]]  # the record, what names lead to from then on; None: to nothing


class Names:
    """The names in the directory: those that are safe, and the changes since, in order."""

    def __init__(self, safe: dict[str, bytes]) -> None:
        self.safe: dict[str, File | None] = {name: File.of(content) for name, content in safe.items()}
        self.changes: list[Change] = []

    @property
    def now(self) -> dict[str, File]:
        """As the program sees them."""
        return self._with(len(self.changes))

    def _with(self, count: int) -> dict[str, File]:
        """With the first changes."""
        names = dict(self.safe)
        for _, change in self.changes[:count]:
            names |= change
        return {name: file for name, file in names.items() if file is not None}

    def change(self, number: int, names: dict[str, File | None]) -> None:
        self.changes.append((number, names))

    def sync(self, directory: str, begun: int) -> None:
        """A sync of a directory that began with that record has succeeded."""
        later = []
        for number, names in self.changes:
            if number < begun and directory in map(os.path.dirname, names):
                self.safe |= names
            else:
                later.append((number, names))
        self.changes = later

    def after_cut(self, rng: random.Random, luck: float) -> dict[str, File]:
        return self._with(len(self.changes) if rng.random() < luck else rng.randint(0, len(self.changes)))


@dataclass
class Cut:
    """What a cut did, for people."""

    luck: float
    unsafe: dict[str, int]  # by name: how many pages were not safe
    records: int = 0
    syncs: int = 0
    failed: int = 0

    def __str__(self) -> str:
        pages = ", ".join(f"{name} {count}" for name, count in sorted(self.unsafe.items()) if count) or "none"
        return f"{self.syncs} syncs, {self.failed} failed; unsafe pages: {pages}; luck {self.luck}"


class Disk:
    """The disk below one directory."""

    def __init__(self, directory: Path, library: Path, scratch: Path) -> None:
        self.directory = directory
        self.library = library
        self.log = scratch / "disk-log"
        self.boot_id = scratch / "boot-id"
        self.armed = scratch / "armed"
        self.boots = 0
        self.before: dict[str, bytes] = {}
        self.past: list[Record] = []  # of programs that have ended since then

    def power_on(self, fail: str = "", end: int | None = None, slow_ms: int = 0) -> dict[str, str]:
        """The environment for the program that is to run on it: a new boot of the machine. ``fail``, ``end``: as in
        shim.c, which syncs fail, counted from ``arm``, and at which record the program is killed. ``slow_ms``: what
        each sync takes more."""
        self.boots += 1
        self.boot_id.write_text(f"00000000-0000-4000-8000-{self.boots:012d}\n")
        self.armed.unlink(missing_ok=True)
        self.before, self.past = self.contents(), []
        environ = self.go_on()
        if fail:
            environ |= {"POWER_FAIL": fail, "POWER_ARM": str(self.armed)}
        if slow_ms:
            environ["POWER_SLOW"] = str(slow_ms)
        if end is not None:
            environ["POWER_END"] = str(end)
        return environ

    def go_on(self) -> dict[str, str]:
        """The environment for another program in the same boot, after ``settle``."""
        self.log.unlink(missing_ok=True)
        environ = {"LD_PRELOAD": str(self.library), "POWER_DIR": str(self.directory), "POWER_LOG": str(self.log)}
        return {**environ, "POWER_BOOT": str(self.boot_id)}

    def settle(self) -> None:
        """The program has ended, and the power is on: what it has not synced is still to be lost."""
        self.past = self._log_as_made()

    def arm(self) -> None:
        """From now on syncs fail, if any are to."""
        self.armed.touch()

    def contents(self) -> dict[str, bytes]:
        """What is in the files, by path."""
        return {str(path): path.read_bytes() for path in self._files()}

    def _files(self) -> list[Path]:
        return [
            path for path in sorted(self.directory.rglob("*")) if path.is_file() and not path.name.endswith(IGNORED)
        ]

    def cut(self, rng: random.Random, lucks: tuple[float, ...] = LUCKS) -> Cut:
        """Makes of the files what the disk holds after a power cut. The program must have been killed. ``lucks``: how
        likely the newest version of something survives that was not synced; one of them is taken."""
        play = Play(Names(self.before), self._log_as_made())
        luck = rng.choice(lucks)
        kept = play.names.after_cut(rng, luck)
        unsafe = {os.path.basename(name): file.unsafe_pages for name, file in kept.items()}
        self.write({name: file.after_cut(rng, luck) for name, file in sorted(kept.items())})
        return Cut(luck, unsafe, play.records, play.syncs, play.failed)

    def records_so_far(self) -> int:
        """How many records the log has."""
        return len(records(self.log.read_bytes()))

    def _log_as_made(self) -> list[Record]:
        """The log without what was not made any more. It is complete if it leads to what the program sees."""
        log = self.past + records(self.log.read_bytes() if self.log.exists() else b"", after=self.past)
        found = self.contents()
        for made in (log, *unfinished(log)):
            if Play(Names(self.before), made).seen() == found:
                return made
        raise NotModelled(f"the log does not lead to what is in {self.directory}: {sorted(found)}")

    def write(self, contents: dict[str, bytes]) -> None:
        """Makes these the files."""
        for path in (*self._files(), *self.directory.rglob("*-shm")):
            path.unlink()
        for name, content in contents.items():
            Path(name).write_bytes(content)
            Path(name).chmod(0o600)

    def save(self, target: Path) -> None:
        """A copy of the files, to look at."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.directory, target, ignore=shutil.ignore_patterns("*.sock"))


Record = tuple[str, int, int, bytes]  # as in shim.c: kind, handle, offset, payload


def records(log: bytes, after: list[Record] | None = None) -> list[Record]:
    """The log of the shim, which comes after another one. The last record may be cut short: then its call was never
    made."""
    start, last_handle = len(after or ()), max((record[1] for record in after or ()), default=0)
    found: list[Record] = []
    at = 0
    while at + RECORD.size <= len(log):
        kind, handle, offset, length = RECORD.unpack_from(log, at)
        at += RECORD.size + length
        offset += start if chr(kind) in "SF" else 0  # there it is the number of a record
        if at <= len(log):
            found.append((chr(kind), handle + last_handle, offset, log[at - length : at]))
    return found


def unfinished(log: list[Record]) -> Iterator[list[Record]]:
    """The logs of a program that was killed in its last change: it was not made, or stops at the end of a page."""
    last = max((index for index, record in enumerate(log) if record[0] in "OWTRU"), default=None)
    if last is None:
        return
    yield log[:last]
    kind, handle, offset, data = log[last]
    if kind == "W":
        for size in range(PAGE - offset % PAGE, len(data), PAGE):
            yield [*log[:last], (kind, handle, offset, data[:size])]


class Play:
    """What a log made of the files."""

    def __init__(self, names: Names, log: list[Record]) -> None:
        self.names = names
        self.files: dict[int, File] = {}  # by handle
        self.directories: dict[int, str] = {}
        self.syncs = self.failed = 0
        self.records = len(log)
        for number, record in enumerate(log):
            self._play(number, *record)

    def seen(self) -> dict[str, bytes]:
        """The contents, by name, as the program sees them."""
        return {name: file.after_cut(random.Random(0), 1.0) for name, file in self.names.now.items()}

    def _play(self, number: int, kind: str, handle: int, offset: int, data: bytes) -> None:
        if kind == "X":
            raise NotModelled(f"{data.decode()} of a file that should survive a power cut")
        if kind == "O":
            self._open(number, handle, offset, os.path.normpath(data.decode()))
        elif kind == "R":
            old, _, new = data.decode().partition("\0")
            self.names.change(number, {new: self.names.now[old], old: None})
        elif kind == "U":
            self.names.change(number, {data.decode(): None})
        elif kind == "W":
            self.files[handle].write(number, offset, data)
        elif kind == "T":
            self.files[handle].resize(number, offset)
        elif kind in "SF":
            self._sync(handle, offset, succeeded=kind == "S")

    def _open(self, number: int, handle: int, how: int, path: str) -> None:
        if os.path.isdir(path):
            self.directories[handle] = path
            return
        if how == 1:
            self.names.change(number, {path: File()})
        self.files[handle] = self.names.now[path]
        if how == 2:
            self.files[handle].resize(number, 0)

    def _sync(self, handle: int, begun: int, *, succeeded: bool) -> None:
        self.syncs += succeeded
        self.failed += not succeeded
        if handle in self.directories:
            if succeeded:
                self.names.sync(self.directories[handle], begun)
        else:
            self.files[handle].sync(begun, succeeded=succeeded)
