from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import uvloop

from runstated.host import processes
from runstated.host.processes import Deaths, Process, UnknownProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and pidfds are Linux's")

PATIENCE_S = 30
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LATENCY_S_MAX = 2  # milliseconds on a quiet machine; this only tells the kernel's word from any time-out

CONNECT = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=list(LOOPS))
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = LOOPS[request.param]()
    yield loop
    loop.close()


@pytest.fixture(params=["SO_PEERPIDFD", "pidfd_open"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to a peer's pidfd. That of kernels before 6.5 is reached by asking for an option that nobody has."""
    if request.param == "pidfd_open":
        monkeypatch.setattr(processes, "SO_PEERPIDFD", 9_999)
    return str(request.param)


@pytest.fixture(autouse=True)
def no_descriptor_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    children = request.getfixturevalue("child")
    before = open_descriptors()
    yield
    children.end()
    if "loop" not in request.fixturenames:
        assert open_descriptors() == before


class Children:
    """Starts processes that live until their standard input ends, and sees to it that none outlives the test."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def __call__(self, code: str = "import sys; print('up', flush=True); sys.stdin.read()", *arguments: str) -> Child:
        child = Child(
            [sys.executable, "-S", "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._all.append(child)
        child.heard = child.hear()
        return child

    def end(self) -> None:
        for child in self._all:
            if child.returncode is None:
                os.kill(child.pid, signal.SIGKILL)
                child.wait(PATIENCE_S)
            for stream in (child.stdin, child.stdout):
                assert stream is not None
                stream.close()
        self._all.clear()


class Child(subprocess.Popen[str]):
    heard: str

    def hear(self) -> str:
        """The child's next line. Byte by byte, so that nothing waits unseen in a buffer while we wait for the pipe."""
        assert self.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([self.stdout], [], [], PATIENCE_S)[0], "the child says nothing"
            byte = os.read(self.stdout.fileno(), 1)
            assert byte, "the child has ended"
            line += byte
        return line.decode().strip()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def zombify(self) -> None:
        """Kill it and leave it unreaped."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait(PATIENCE_S)


@pytest.fixture
def child() -> Iterator[Children]:
    children = Children()
    yield children
    children.end()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        yield listener


def accept(listener: socket.socket) -> socket.socket:
    return listener.accept()[0]


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def process_of(pid: int) -> Process:
    process = processes.of(pid)
    assert process is not None
    return process


def pidfd_of(pid: int) -> int:
    return os.pidfd_open(pid)


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in open_descriptors())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    fillers = []
    try:
        while True:
            try:
                fillers.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def refuse_pidfds(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)


# Who a process is


def test_a_process_survives_its_text(child: Children) -> None:
    for process in (processes.of_self(), processes.of(child().pid)):
        assert process is not None
        assert Process.from_text(process.to_text()) == process
        assert len(process.to_text()) < 100


@pytest.mark.parametrize("text", ["", "a/b/1", "a/b/1/2/3", "a/b/x/2", "a/b/ 1/2", "a/b/1_0/2"])
def test_a_text_that_names_no_process_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Process.from_text(text)


def test_of_self_names_this_process_and_no_other(child: Children) -> None:
    me, other = processes.of_self(), process_of(child().pid)
    assert me is not None
    assert me.pid == os.getpid()
    assert (me.boot_id, me.namespace) == (other.boot_id, other.namespace)
    assert me != other


def test_the_start_time_is_the_one_the_kernel_counts_from_boot(child: Children) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    before = int(time.clock_gettime(time.CLOCK_BOOTTIME) * ticks)
    start = process_of(child().pid).start
    assert before - 1 <= start <= int(time.clock_gettime(time.CLOCK_BOOTTIME) * ticks) + 1


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields(child: Children) -> None:
    rename = "import sys; open('/proc/self/comm', 'w').write(') R 1 (9 9'); print('up', flush=True); sys.stdin.read()"
    started = child(rename)
    assert b") R 1 (9 9)" in Path(f"/proc/{started.pid}/stat").read_bytes()
    assert process_of(started.pid).start >= process_of(os.getpid()).start


def test_exec_leaves_the_process_what_it_was(child: Children) -> None:
    replace_itself = (
        "import os, sys; print('first', flush=True); sys.stdin.readline(); "
        "os.execv(sys.executable, [sys.executable, '-S', '-c', \"print('second', flush=True); input()\"])"
    )
    started = child(replace_itself)
    before, pidfd = process_of(started.pid), pidfd_of(started.pid)
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()
    assert started.hear() == "second"
    assert process_of(started.pid) == before
    assert not processes.is_dead(pidfd)
    os.close(pidfd)


def test_nobody_is_found_under_a_pid_that_is_not_in_use(child: Children) -> None:
    started = child()
    started.reap()
    assert processes.of(started.pid) is None
    assert processes.of(0) is None
    assert processes.describe(started.pid) == ""


def test_with_a_pidfd_the_answer_is_about_its_process_only(child: Children) -> None:
    started = child()
    pidfd = pidfd_of(started.pid)
    assert processes.of(started.pid, pidfd) == process_of(started.pid)
    started.zombify()
    assert processes.of(started.pid, pidfd) is None
    os.close(pidfd)


def test_describe_shows_the_command_line_bounded_and_harmless(child: Children) -> None:
    loop_forever = "import sys; print('up', flush=True); sys.stdin.read()"
    plain = processes.describe(child(loop_forever, "work", "--fast").pid)
    assert plain.startswith(sys.executable)
    assert plain.endswith("work --fast")
    nasty = processes.describe(child(loop_forever, "\x1b[2J\nß\x9b").pid)
    assert nasty.endswith("?[2J?ß?")
    long = processes.describe(child(loop_forever, "ß" * 5_000).pid)
    assert len(long) == processes.COMMAND_CHARACTERS_MAX
    assert long.endswith("ß…")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_proc_of_another_pid_namespace_is_not_believed() -> None:
    ask = "from runstated.host import processes; print(processes.of_self())"
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if "unshare" in done.stderr:
        pytest.skip("no pid namespaces for us here")
    assert done.stdout == "None\n", done.stderr


# The other side of a socket


def test_the_peer_is_the_process_that_connected(child: Children, listener: socket.socket) -> None:
    started = child(CONNECT, listener.getsockname())
    with accept(listener) as connection:
        assert processes.peer(connection) == processes.Peer(started.pid, os.getuid(), os.getgid())


def test_the_peer_is_known_on_the_transports_of_both_loops(
    loop: asyncio.AbstractEventLoop, child: Children, tmp_path: Path, way: str
) -> None:
    path = str(tmp_path / "loop")

    async def story() -> None:
        seen: asyncio.Future[tuple[int, int | None]] = loop.create_future()

        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            pid = processes.peer(sock).pid
            seen.set_result((pid, processes.open_pidfd(sock, pid)))
            writer.close()

        server = await asyncio.start_unix_server(on_connection, path)
        started = await loop.run_in_executor(None, child, CONNECT, path)
        pid, pidfd = await asyncio.wait_for(seen, PATIENCE_S)
        assert pid == started.pid
        assert pidfd is not None
        assert processes.of(pid, pidfd) == process_of(started.pid)
        os.close(pidfd)
        server.close()
        await server.wait_closed()

    loop.run_until_complete(story())


def test_a_socket_without_credentials_has_an_unknown_peer_that_nobody_is() -> None:
    with socket.socket() as unconnected:
        assert processes.peer(unconnected) == processes.Peer(0, processes.NOBODY, processes.NOBODY)
        assert processes.open_pidfd(unconnected, 0) is None


def test_the_pidfd_of_a_peer_is_closed_on_exec_and_tells_its_death(
    child: Children, listener: socket.socket, way: str
) -> None:
    started = child(CONNECT, listener.getsockname())
    with accept(listener) as connection:
        pidfd = processes.open_pidfd(connection, started.pid)
        assert pidfd is not None
        assert not os.get_inheritable(pidfd)
        assert not processes.is_dead(pidfd)
        started.zombify()
        assert processes.is_dead(pidfd)
        started.wait(PATIENCE_S)
        assert processes.is_dead(pidfd)
        os.close(pidfd)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_peer_that_died_before_it_was_asked_for_is_never_taken_for_alive(
    child: Children, listener: socket.socket, way: str, reaped: bool
) -> None:
    started = child(CONNECT, listener.getsockname())
    with accept(listener) as connection:
        started.reap() if reaped else started.zombify()
        pidfd = processes.open_pidfd(connection, started.pid)
        assert pidfd is None or processes.is_dead(pidfd)
        if pidfd is not None:
            os.close(pidfd)


def test_a_pid_that_passed_to_another_process_gives_no_pidfd_by_number(
    child: Children, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SO_PEERPIDFD", 9_999)
    started, heir = child(CONNECT, listener.getsockname()), child()
    starts = [process_of(started.pid).start, process_of(heir.pid).start + 1]
    with accept(listener) as connection:
        monkeypatch.setattr(processes, "_start_of", lambda pid: starts.pop(0))
        assert processes.open_pidfd(connection, heir.pid) is None
        assert starts == []
        # Its connection has ended with it, whatever lives under its number now.
        monkeypatch.setattr(processes, "_start_of", lambda pid: 1)
        started.reap()
        assert processes.open_pidfd(connection, heir.pid) is None


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_system_without_pidfds_gives_none(
    child: Children, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(processes, "SO_PEERPIDFD", 9_999)
    refuse_pidfds(monkeypatch, number)
    started = child(CONNECT, listener.getsockname())
    with accept(listener) as connection:
        assert processes.open_pidfd(connection, started.pid) is None


def test_running_out_of_descriptors_is_reported_not_taken_for_an_answer(
    child: Children, listener: socket.socket, way: str
) -> None:
    started = child(CONNECT, listener.getsockname())
    process = process_of(started.pid)
    questions: list[Callable[[], object]] = [
        lambda: processes.open_pidfd(connection, started.pid),
        lambda: processes.reopen(process),
        lambda: processes.of(started.pid),
    ]
    with accept(listener) as connection:
        for ask in questions:
            with no_descriptor_free(), pytest.raises(OSError) as caught:
                ask()
            assert caught.value.errno == errno.EMFILE


def test_running_out_of_descriptors_only_when_the_pidfd_is_made_is_reported_too(
    child: Children, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(socket.socket):
        def getsockopt(self, *option: int) -> NoReturn:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    started = child(CONNECT, listener.getsockname())
    process = process_of(started.pid)
    with Full(socket.AF_UNIX) as full, pytest.raises(OSError, match="Too many open files"):
        processes.open_pidfd(full, started.pid)
    monkeypatch.setattr(processes, "SO_PEERPIDFD", 9_999)
    refuse_pidfds(monkeypatch, errno.EMFILE)
    with accept(listener) as connection, pytest.raises(OSError, match="Too many open files"):
        processes.open_pidfd(connection, started.pid)
    with pytest.raises(OSError, match="Too many open files"):
        processes.reopen(process)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_peer_outside_our_pid_namespace_is_not_visible(tmp_path: Path) -> None:
    ask = (
        "import socket, sys; from runstated.host import processes\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()\n"
        "print('up', flush=True); connection, _ = listener.accept(); pid = processes.peer(connection).pid\n"
        "print(pid, processes.open_pidfd(connection, pid))\n"
    )
    path = str(tmp_path / "inner")
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", ask, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as inner:
        assert inner.stdout is not None
        if inner.stdout.readline() != "up\n":
            pytest.skip("no pid namespaces for us here")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            assert inner.stdout.readline() == "0 None\n"


# After a restart of the daemon


def test_a_recorded_process_that_lives_is_found_again(child: Children) -> None:
    started = child()
    pidfd = processes.reopen(Process.from_text(process_of(started.pid).to_text()))
    assert pidfd is not None
    assert not processes.is_dead(pidfd)
    started.zombify()
    assert processes.is_dead(pidfd)
    os.close(pidfd)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_recorded_process_that_was_killed_is_gone_reaped_or_not(child: Children, reaped: bool) -> None:
    started = child()
    process = process_of(started.pid)
    started.reap() if reaped else started.zombify()
    assert os.path.exists(f"/proc/{started.pid}/stat") is not reaped
    assert processes.reopen(process) is None


def test_a_recorded_process_whose_pid_has_a_new_owner_is_gone(child: Children) -> None:
    process = process_of(child().pid)
    assert processes.reopen(replace(process, start=process.start - 1)) is None


def test_a_recorded_process_of_another_boot_is_gone_whatever_its_namespace(child: Children) -> None:
    process = process_of(child().pid)
    assert processes.reopen(replace(process, boot_id="other")) is None
    assert processes.reopen(replace(process, boot_id="other", namespace="pid:[1]")) is None


def test_a_recorded_process_whose_number_belongs_to_a_thread_now_is_gone(child: Children) -> None:
    threads = (
        "import sys, threading; t = threading.Thread(target=sys.stdin.read); t.start(); print(t.native_id, flush=True)"
    )
    started = child(threads)
    process = replace(process_of(started.pid), pid=int(started.heard), start=1)
    assert processes.reopen(process) is None


def test_a_stopped_process_is_not_gone(child: Children) -> None:
    started = child()
    process = process_of(started.pid)
    started.stop()
    pidfd = processes.reopen(process)
    assert pidfd is not None
    os.close(pidfd)


def test_a_recorded_process_of_another_pid_namespace_is_unknown(child: Children) -> None:
    process = process_of(child().pid)
    with pytest.raises(UnknownProcess):
        processes.reopen(replace(process, namespace="pid:[1]"))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_without_pidfds_only_a_process_whose_number_changed_hands_is_known_to_be_gone(
    child: Children, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    process = process_of(child().pid)
    refuse_pidfds(monkeypatch, number)
    with pytest.raises(UnknownProcess):
        processes.reopen(process)
    assert processes.reopen(replace(process, start=process.start - 1)) is None


def test_a_process_whose_start_time_is_hidden_is_unknown_while_it_lives(
    child: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = child()
    process = process_of(started.pid)
    monkeypatch.setattr(processes, "_start_of", lambda pid: None)
    with pytest.raises(UnknownProcess):
        processes.reopen(process)
    started.zombify()
    assert processes.reopen(process) is None


# Deaths


def test_a_death_is_told_once_within_milliseconds(loop: asyncio.AbstractEventLoop, child: Children) -> None:
    started = child()
    process = process_of(started.pid)
    latencies: list[float] = []

    async def story() -> None:
        dead: asyncio.Queue[Process] = asyncio.Queue()
        deaths = Deaths(loop)
        deaths.watch(process, pidfd_of(started.pid), dead.put_nowait)
        killed_at = time.perf_counter()
        os.kill(started.pid, signal.SIGKILL)
        assert await asyncio.wait_for(dead.get(), PATIENCE_S) == process
        latencies.append(time.perf_counter() - killed_at)
        started.wait(PATIENCE_S)
        deaths.forget(process)  # too late, and harmless
        await asyncio.sleep(0)
        assert dead.empty()
        assert len(deaths) == 0
        deaths.close()

    loop.run_until_complete(story())
    assert latencies[0] < LATENCY_S_MAX


def test_a_process_that_is_dead_when_it_is_watched_is_told_at_once(
    loop: asyncio.AbstractEventLoop, child: Children
) -> None:
    started = child()
    process, pidfd = process_of(started.pid), pidfd_of(started.pid)
    started.reap()

    async def story() -> None:
        dead: asyncio.Queue[Process] = asyncio.Queue()
        deaths = Deaths(loop)
        deaths.watch(process, pidfd, dead.put_nowait)
        assert await asyncio.wait_for(dead.get(), PATIENCE_S) == process

    loop.run_until_complete(story())


def test_stopping_and_exec_are_not_deaths(loop: asyncio.AbstractEventLoop, child: Children) -> None:
    started = child(
        "import os, sys; print('first', flush=True); sys.stdin.readline(); "
        "os.execv(sys.executable, [sys.executable, '-S', '-c', \"print('second', flush=True); input()\"])"
    )
    process = process_of(started.pid)

    async def story() -> None:
        dead: asyncio.Queue[Process] = asyncio.Queue()
        deaths = Deaths(loop)
        deaths.watch(process, pidfd_of(started.pid), dead.put_nowait)
        assert started.stdin is not None
        started.stdin.write("\n")
        started.stdin.flush()
        assert await loop.run_in_executor(None, started.hear) == "second"
        started.stop()
        await asyncio.sleep(0.05)
        assert dead.empty()
        os.kill(started.pid, signal.SIGKILL)
        assert await asyncio.wait_for(dead.get(), PATIENCE_S) == process

    loop.run_until_complete(story())


def test_a_process_outlives_its_first_thread(loop: asyncio.AbstractEventLoop, child: Children) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the number of a system call")
    started = child(
        "import ctypes, sys, threading\n"
        "main = threading.get_native_id()\n"
        "def outlive():\n"
        "    while ') Z ' not in open(f'/proc/self/task/{main}/stat').read(): pass\n"
        "    print('alone', flush=True); sys.stdin.read()\n"
        "threading.Thread(target=outlive).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit, of this thread alone
    )
    process = process_of(started.pid)

    async def story() -> None:
        dead: asyncio.Queue[Process] = asyncio.Queue()
        deaths = Deaths(loop)
        deaths.watch(process, pidfd_of(started.pid), dead.put_nowait)
        assert await loop.run_in_executor(None, started.hear) == "alone"
        await asyncio.sleep(0.05)
        assert dead.empty()
        pidfd = processes.reopen(process)
        assert pidfd is not None
        os.close(pidfd)
        os.kill(started.pid, signal.SIGKILL)
        assert await asyncio.wait_for(dead.get(), PATIENCE_S) == process

    loop.run_until_complete(story())


def test_several_sessions_of_one_process_share_one_pidfd_until_the_last_forgets_it(
    loop: asyncio.AbstractEventLoop, child: Children
) -> None:
    started = child()
    process = process_of(started.pid)

    async def story() -> None:
        dead: list[Process] = []
        deaths = Deaths(loop)
        before = open_descriptors()
        for _ in range(3):
            deaths.watch(process, pidfd_of(started.pid), dead.append)
        assert len(open_descriptors()) == len(before) + 1
        deaths.forget(process)
        deaths.forget(process)
        assert len(open_descriptors()) == len(before) + 1
        deaths.forget(process)
        assert open_descriptors() == before
        deaths.forget(process)

        told: asyncio.Queue[Process] = asyncio.Queue()
        deaths.watch(process, pidfd_of(started.pid), told.put_nowait)
        deaths.watch(process, pidfd_of(started.pid), told.put_nowait)
        deaths.forget(process)
        os.kill(started.pid, signal.SIGKILL)
        assert await asyncio.wait_for(told.get(), PATIENCE_S) == process
        await asyncio.sleep(0)
        assert told.empty()
        assert dead == []
        assert open_descriptors() == before

    loop.run_until_complete(story())


def test_forgotten_processes_and_closed_watches_tell_nothing_and_leave_no_descriptor(
    loop: asyncio.AbstractEventLoop, child: Children
) -> None:
    forgotten, closed, probe = child(), child(), child()
    names = {started.pid: process_of(started.pid) for started in (forgotten, closed, probe)}

    async def story() -> None:
        told: asyncio.Queue[Process] = asyncio.Queue()
        deaths, others = Deaths(loop), Deaths(loop)
        before = open_descriptors()
        deaths.watch(names[forgotten.pid], pidfd_of(forgotten.pid), told.put_nowait)
        deaths.watch(names[closed.pid], pidfd_of(closed.pid), told.put_nowait)
        others.watch(names[probe.pid], pidfd_of(probe.pid), told.put_nowait)
        deaths.forget(names[forgotten.pid])
        deaths.close()
        deaths.close()
        for started in (forgotten, closed, probe):
            started.zombify()
        assert await asyncio.wait_for(told.get(), PATIENCE_S) == names[probe.pid]
        await asyncio.sleep(0)
        assert told.empty()
        assert open_descriptors() == before

    loop.run_until_complete(story())


def test_a_thousand_watches_on_reused_descriptors_neither_leak_nor_tell_false_deaths(
    loop: asyncio.AbstractEventLoop, child: Children
) -> None:
    living, dead = child(), child()
    live, gone = process_of(living.pid), process_of(dead.pid)
    gone_pidfd = pidfd_of(dead.pid)
    dead.zombify()

    async def story() -> None:
        told: asyncio.Queue[Process] = asyncio.Queue()
        deaths = Deaths(loop)
        before = open_descriptors()
        for _ in range(1_000):
            deaths.watch(live, pidfd_of(living.pid), told.put_nowait)
            deaths.forget(live)
        for _ in range(100):  # a dead one's number is taken by a living one, and the other way round
            deaths.watch(gone, os.dup(gone_pidfd), told.put_nowait)
            assert await asyncio.wait_for(told.get(), PATIENCE_S) == gone
            deaths.watch(live, pidfd_of(living.pid), told.put_nowait)
            await asyncio.sleep(0)
            deaths.forget(live)
        assert told.empty()
        assert open_descriptors() == before

    loop.run_until_complete(story())
    os.close(gone_pidfd)


def test_an_error_in_the_callback_is_reported_and_the_death_not_told_again(
    loop: asyncio.AbstractEventLoop, child: Children
) -> None:
    started = child()
    process = process_of(started.pid)

    async def story() -> None:
        reported: asyncio.Queue[object] = asyncio.Queue()
        loop.set_exception_handler(lambda _, context: reported.put_nowait(context.get("exception")))

        def fail(process: Process) -> None:
            raise RuntimeError("in the callback")

        deaths = Deaths(loop)
        before = open_descriptors()
        deaths.watch(process, pidfd_of(started.pid), fail)
        os.kill(started.pid, signal.SIGKILL)
        assert isinstance(await asyncio.wait_for(reported.get(), PATIENCE_S), RuntimeError)
        await asyncio.sleep(0)
        assert reported.empty()
        assert open_descriptors() == before

    loop.run_until_complete(story())


def test_a_watch_that_fails_closes_its_pidfd(child: Children) -> None:
    process, pidfd = process_of(os.getpid()), pidfd_of(os.getpid())
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(Exception):  # noqa: B017 whatever a closed loop raises
        Deaths(loop).watch(process, pidfd, print)
    with pytest.raises(OSError):
        os.fstat(pidfd)


def test_a_closed_pidfd_is_a_bug_and_not_a_death() -> None:
    pidfd = pidfd_of(os.getpid())
    os.close(pidfd)
    with pytest.raises(AssertionError):
        processes.is_dead(pidfd)
