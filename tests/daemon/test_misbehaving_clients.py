"""Clients that hang, crash, send garbage or other people's ids: they hurt nobody but themselves.

Beside every test an engine works and compares every byte. Afterwards the daemon holds what it held before.
Who may open the sockets is trusted not to attack: floods and fairness are not tested here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import multiprocessing
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Self

import pytest

from kvoffd_client import AdminClient, KvoffdClientError, SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.kit.checked import STEP, CheckedEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.kit.wire import (
    GARBAGE,
    LIFELINE_GARBAGE,
    NULL_GREETING,
    PAGE_BYTES,
    Eavesdropper,
    Page,
    Refused,
    Segment,
    Tensor,
    WireClient,
    answer,
    attach_frame,
    books,
    is_admitted,
    keys,
    load_of,
    refused,
    request_streams,
    store_of,
)

BLOCKS = 8
SIZE = BLOCKS * PAGE_BYTES
ADD_SEALS, SHRINK = 1033, 0x0002  # fcntl(2)
KEEP_SIZE, PUNCH_HOLE = 1, 2  # fallocate(2)
PAUSE_S = 0.02
"""Between two rounds of the neighbour, which otherwise takes half of a CPU."""
MAX_BLOCKED_S = 5.0
"""The loop is never blocked for so long. Nothing here takes it more than some milliseconds."""


class Neighbour:
    """An engine with nothing to do with all this. It stores, looks up, loads and compares until it is stopped."""

    def __init__(self, directory: Path) -> None:
        self._engine = CheckedEngine(directory, namespace="neighbour", page_bytes=PAGE_BYTES)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.rounds or self.failure)
        return self

    def __exit__(self, *_: object) -> None:
        """It must have worked in the end as in the beginning."""
        before = self.rounds
        wait_until(lambda: self.rounds > before + 1 or self.failure)
        self._stopping.set()
        self._thread.join()
        self._engine.close()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stopping.wait(PAUSE_S):
                first = (1 << 40) + self.rounds % 4 * STEP
                some = range(first, first + BLOCKS)
                self._engine.put(some)
                assert self._engine.get(some, 30.0) == list(some)
                self.rounds += 1
        except Exception as error:
            self.failure = error


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """The module's daemon, with a neighbour on it, and unharmed in the end."""
    directory = shared_daemon.directory
    # What the test before has left is released when its processes are gone.
    wait_until(lambda: not books(directory).held, explain=lambda: books(directory).held)
    before = books(directory)
    with Neighbour(directory):
        yield shared_daemon
    wait_until(lambda: not books(directory).held, explain=lambda: books(directory).held)
    wait_until(lambda: books(directory).descriptors <= before.descriptors + 4, explain=lambda: books(directory))
    after = books(directory)
    assert after.pid == before.pid
    assert after.balanced
    assert after.own_bytes <= before.own_bytes + (64 << 20)
    assert after.loop_blocked_max_seconds < MAX_BLOCKED_S
    assert "Traceback" not in shared_daemon.log, shared_daemon.log[-4000:]


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[WireClient]:
    """The one that misbehaves: a worker in a namespace of its own."""
    with WireClient(daemon.directory) as opened:
        opened.open_namespace()
        yield opened


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(SIZE, "misbehaving") as shared:
        yield shared


def memfd(size: int, *, seal: bool = True) -> int:
    fd = os.memfd_create("misbehaving", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seal:
        fcntl.fcntl(fd, ADD_SEALS, SHRINK)
    return fd


def register(client: WireClient, segment: int, size: int = SIZE, **layout: object) -> bytes:
    """Register attached memory as the blocks of one tensor."""
    parts = {"tensors": [Tensor(0, 0, PAGE_BYTES, BLOCKS)], "groups": [[Page(0, PAGE_BYTES)]]} | layout
    return client.register_layout([Segment(segment, size)], **parts)


# --- memory ----------------------------------------------------------------------------------------


def other_descriptors() -> dict[str, Callable[[], int]]:
    def file() -> int:
        with TemporaryFile() as made:
            return os.dup(made.fileno())

    def epoll() -> int:
        with select.epoll() as made:
            return os.dup(made.fileno())

    def deep() -> int:
        """A directory whose path is longer than the kernel tells (PATH_MAX)."""
        with TemporaryDirectory() as top:
            fd = os.open(top, os.O_RDONLY)
            for _ in range(20):
                os.mkdir("d" * 250, dir_fd=fd)
                fd, outer = os.open("d" * 250, os.O_RDONLY, dir_fd=fd), fd
                os.close(outer)
        return fd

    return {
        "deep": deep,
        "pipe": lambda: os.pipe()[0],
        "socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
        "directory": lambda: os.open("/", os.O_RDONLY),
        "file": file,
        "path": lambda: os.open("/etc/passwd", os.O_PATH),
        "device": lambda: os.open("/dev/zero", os.O_RDWR),
        "terminal": lambda: os.openpty()[1],
        "epoll": epoll,
        "event": lambda: os.eventfd(0),
        "process": lambda: os.pidfd_open(os.getpid()),
    }


def test_descriptors_that_are_no_memory(client: WireClient) -> None:
    for number, (kind, make) in enumerate(other_descriptors().items()):
        fd = make()
        assert refused(client.attach, fd, number) == "unsafe_segment", kind
        os.close(fd)


def test_memory_that_is_not_safe(client: WireClient) -> None:
    """A copy into pages that were cut off would end the daemon with SIGBUS. A page that is not allocated is charged to
    the process that touches it first, which would be the daemon."""
    fd = memfd(SIZE)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert refused(lambda: register(client, client.attach(read_only))) == "unsafe_segment"
    os.close(read_only)
    os.close(fd)
    fd = memfd(SIZE, seal=False)
    segment = client.attach(fd)
    assert refused(register, client, segment) == "unsafe_segment"
    os.ftruncate(fd, PAGE_BYTES)
    fcntl.fcntl(fd, ADD_SEALS, SHRINK)
    assert refused(register, client, segment) == "unsafe_segment"
    os.close(fd)
    for size in (2**40, SIZE):
        fd = memfd(size)
        os.pwrite(fd, bytes(SIZE - mmap.PAGESIZE), 0)
        segment = client.attach(fd)
        assert refused(register, client, segment, size) == "unsafe_segment"
        assert os.fstat(fd).st_blocks * 512 < SIZE
        os.close(fd)


def test_memory_that_is_emptied_under_its_jobs(client: WireClient) -> None:
    """The seal keeps the file's length; its pages can be taken out all the same."""
    fd = memfd(SIZE)
    with mmap.mmap(fd, SIZE) as mapped:
        mapped[:] = b"\xaa" * SIZE
    cache = register(client, client.attach(fd))
    jobs = range(1, 17)
    client.submit(cache, [store_of(job, keys(*range(8 * job, 8 * job + 8)), range(8)) for job in jobs])
    client.unacknowledged()  # they are accepted
    assert ctypes.CDLL(None).fallocate(fd, KEEP_SIZE | PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(SIZE)) == 0
    os.close(fd)
    client.wait_ended(*jobs)


# --- the lifeline ----------------------------------------------------------------------------------


def test_garbage_on_the_lifeline(daemon: DaemonProcess) -> None:
    """It ends that session, and no other."""
    before = books(daemon.directory).ended_sessions.get("malformed", 0)
    for data in LIFELINE_GARBAGE.values():
        with WireClient(daemon.directory) as client:
            client.send_lifeline(data)
            client.wait_lifeline_ended()
    assert books(daemon.directory).ended_sessions["malformed"] == before + len(LIFELINE_GARBAGE)


def test_a_frame_in_pieces(client: WireClient, memory: SharedMemory) -> None:
    """A frame that comes byte by byte is a frame."""
    frame = attach_frame(7)
    client.send_lifeline(frame[:1], [memory.fd])
    for byte in frame[1:]:
        client.send_lifeline(bytes([byte]))
    assert client.attached() == 7
    register(client, 7)


def test_descriptors_that_belong_to_no_frame(daemon: DaemonProcess) -> None:
    """A few wait for their frames. More end the session, and none of them stays open."""
    null = os.open(os.devnull, os.O_RDONLY)
    for count in (2, 17, 200):
        with WireClient(daemon.directory) as client:
            with contextlib.suppress(OSError):
                for byte in attach_frame(1)[:-1] * 3:
                    client.send_lifeline(bytes([byte]), [null] * count)
            client.wait_lifeline_ended()
    os.close(null)


def test_a_client_that_does_not_read_its_lifeline(daemon: DaemonProcess) -> None:
    """It is ended once its answers find no room, and the descriptors that it sends do not pile up."""
    null, before = os.open(os.devnull, os.O_RDONLY), books(daemon.directory).descriptors
    with WireClient(daemon.directory) as client:
        with contextlib.suppress(OSError):
            for _ in range(20_000):
                client.send_lifeline(attach_frame(1), [null])
        assert books(daemon.directory).descriptors < before + 100
        client.wait_lifeline_ended()
    os.close(null)


def test_a_lifeline_sent_over_itself(daemon: DaemonProcess) -> None:
    """The daemon would hold its client's end open, and never see that the client is gone."""
    with WireClient(daemon.directory) as client:
        assert refused(client.attach, client.stream.fileno()) == "unsafe_segment"
        client.send_lifeline(b"\0", [client.stream.fileno()] * 8)


# --- requests --------------------------------------------------------------------------------------


NO_ZEROMQ = (
    *(b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65536),
    *(NULL_GREETING[:10], NULL_GREETING, NULL_GREETING + b"\0\3abc"),
)


def test_other_protocols_on_the_request_sockets(daemon: DaemonProcess) -> None:
    """They and half handshakes stay, and keep nobody waiting."""
    with contextlib.ExitStack() as held:
        for path, data in itertools.product(request_streams(daemon.directory), NO_ZEROMQ):
            stream = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stream.connect(str(path))
            stream.setblocking(False)
            with contextlib.suppress(OSError):  # the daemon has closed it, or takes no more
                stream.send(data)
        with WireClient(daemon.directory) as client:
            assert client.health() == "ok"


def test_a_client_that_keeps_connections_open_is_refused_before_the_daemon_ends() -> None:
    """libzmq aborts a process that has no descriptor for a connection. Who is connected works on."""
    limit = 1024
    with (
        DaemonProcess("12MiB", before=["prlimit", f"--nofile={limit}:{limit}"]) as daemon,
        CheckedEngine(daemon) as engine,
    ):
        path, refusals = request_streams(daemon.directory)[0], 0

        def connect(held: contextlib.ExitStack) -> bool:
            stream = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stream.connect(str(path))
            if not (admitted := is_admitted(stream)):
                stream.close()
            return admitted

        with contextlib.ExitStack() as held:
            for _ in range(limit):
                refusals += not connect(held)
            assert limit / 8 < refusals < limit / 4
            assert daemon.running
            engine.put([1])
            assert engine.has([1])
            with WireClient(daemon.directory, None) as newcomer:
                assert newcomer.rejected
                assert "few descriptors left" in str(newcomer.rejected)
        with contextlib.ExitStack() as held:
            wait_until(lambda: connect(held))
        with FakeEngine(daemon.directory) as later:
            assert later.store(keys(7), [0]).ok


def test_a_client_that_reads_nothing(daemon: DaemonProcess) -> None:
    """It can send no more at some time, or is ended. The daemon's memory does not grow with what it sends."""

    before = books(daemon.directory)

    def dropped() -> int:
        return books(daemon.directory).replies_dropped.get("unread", 0) - before.replies_dropped.get("unread", 0)

    def run() -> None:
        with WireClient(daemon.directory) as client:
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline or not dropped():
                client.send_raw(GARBAGE["a map"], block=False)
            os.kill(os.getpid(), signal.SIGSTOP)

    with child(run) as (process, _):
        assert process.pid is not None
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with Neighbour(daemon.directory):
            pass
        after = books(daemon.directory)
        assert after.own_bytes < before.own_bytes + (16 << 20)
        assert dropped()


def test_a_subscriber_that_reads_nothing(memory: SharedMemory) -> None:
    """What it does not read is dropped at some time."""
    with (
        DaemonProcess() as daemon,
        WireClient(daemon.directory) as client,
        Eavesdropper(daemon.directory, unread=1) as slow,
    ):
        client.open_namespace()
        cache, jobs = client.register(memory), range(1, 1001)
        for job in jobs:
            assert client.store(cache, keys(*range(64 * job, 64 * job + 64)), [0] * 64, job=job).ok
        # A job has two messages and more: its result, the keys that came, and those that were evicted. The kernel has
        # some of them.
        assert 0 < slow.unread() < len(jobs)


def test_a_client_that_acknowledges_nothing(client: WireClient) -> None:
    """What it has not acknowledged is bounded: at some time its jobs are refused, until it acknowledges."""
    count, size, at_once, code = 256, 4096, 2, ""  # more keys at once are too many for one message
    with SharedMemory(count * size, "misbehaving") as memory, WireClient(client.directory, "scheduler") as scheduler:
        scheduler.open_namespace()
        cache = client.register(memory, size)
        assert client.store(cache, keys(1), [0]).ok
        assert scheduler.lookup(1, keys(1)).pinned == 1
        wanted = keys(*range(5000, 5000 + count))
        for first in range(100, 2100, at_once):
            jobs = range(first, first + at_once)
            client.submit(cache, [], [load_of(job, scheduler.lease(1), wanted, range(count)) for job in jobs])
            try:
                client.wait_ended(*jobs)
            except Refused as refusal:
                code = refusal.code
                break
        assert code == "too_many"
        unacknowledged = client.unacknowledged()
        said_bytes = sum(32 * len(result.failed) for result in unacknowledged.results)
        assert 1 << 20 < said_bytes < 8 << 20, "one reply has all of it"
        assert client.acknowledge(unacknowledged.batches[-1].number) > 0
        assert client.store(cache, keys(2), [0]).ok


def test_a_connection_that_breaks(client: WireClient, memory: SharedMemory) -> None:
    """ZeroMQ ends that of a client which sends far too much. The client's ZeroMQ connects again without a word."""
    cache, limit = client.register(memory), client.limits["max_frame_bytes"]
    for number in range(3):
        assert refused(client.raw, bytes(limit + 1)) == "too_large"
        client.send_raw(bytes(2 * limit + 1))
        wait_until(lambda: client.is_answered(1.0))
        assert client.store(cache, keys(number), [0]).ok


def numbered_routing_ids(count: int = 96) -> Iterator[bytes]:
    """What libzmq's ROUTER would call its next clients that have no name: numbers of an unseeded ``rand``."""
    libc = ctypes.CDLL(None)
    libc.srand(1)
    firsts = [libc.rand() | libc.rand() << 31 for _ in range(8)]
    for number in range(count):
        yield b"\0" + struct.pack(">I", firsts[number % 8] + number // 8 & 0xFFFFFFFF)


def test_routing_ids_that_zeromq_would_choose(daemon: DaemonProcess) -> None:
    """A plain ROUTER ends its process when a client already has the name that it makes for the next one."""
    with contextlib.ExitStack() as opened:
        for name in numbered_routing_ids():
            opened.enter_context(Eavesdropper(daemon.directory, name)).ask()
        for _ in range(30):
            with Eavesdropper(daemon.directory) as nameless:
                nameless.ask()
                nameless.is_answered(0.01)
        with WireClient(daemon.directory) as client:
            assert client.health() == "ok"


def test_clients_that_come_and_go_in_a_loop(daemon: DaemonProcess) -> None:
    """Each opens as many namespaces as it may, asks for what nobody has, and listens to all that is published."""
    for number in range(20):
        names = [f"{number}-{one}".encode().ljust(32) for one in range(16)]
        with WireClient(daemon.directory, "scheduler") as client, Eavesdropper(daemon.directory) as listening:
            for name in names:
                client.open_namespace(name)
            assert refused(client.open_namespace, b"one more".ljust(32)) == "too_many"
            assert client.lookup(1, keys(*range(1000)), names[0]).states == "-" * 1000
            listening.ask()


def test_a_process_that_opens_ever_more_sessions_and_namespaces(daemon: DaemonProcess) -> None:
    """It gets half of the 64 that a daemon has, with that of its neighbour here: other processes find space."""

    def run() -> None:
        with WireClient(daemon.directory) as other:
            assert other.open_namespace(b"another process".ljust(32))

    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(WireClient(daemon.directory)) for _ in range(3)]
        names = [f"hoarded {number}".encode().ljust(32) for number in range(16 * len(sessions))]
        codes = [answer(sessions[at // 16].open_namespace, name) for at, name in enumerate(names)]
        assert codes == ["taken"] * 31 + ["too_many"] * 17
        assert answer(sessions[2].open_namespace, names[0]) == "taken", "the process has it open already"
        with child(run) as (process, _):
            process.join(60)
            assert process.exitcode == 0


# --- what belongs to others --------------------------------------------------------------------------


def test_what_belongs_to_another_session(client: WireClient, memory: SharedMemory) -> None:
    """Its lease, registration, memory, jobs and namespace cannot be named."""
    name = b"victim".ljust(32)
    with SharedMemory(SIZE, "victim") as own, WireClient(client.directory) as owner:
        with (
            WireClient(client.directory, "scheduler") as theirs,
            WireClient(client.directory, "scheduler") as scheduler,
        ):
            for one in (owner, theirs):
                one.open_namespace(name)
            scheduler.open_namespace()
            own.view[:] = 7
            memory.view[:] = 1
            cache = owner.register(own, namespace=name)
            assert owner.store(cache, keys(1, 2), [0, 1], job=50).ok
            assert theirs.lookup(1, keys(1, 2), name).pinned == 2
            lease = theirs.lease(1)

            assert scheduler.release(lease) == 0
            assert refused(scheduler.lookup, 1, keys(1), name) == "unknown_namespace"
            assert refused(scheduler.invalidate, keys(1), name) == "unknown_namespace"
            assert refused(scheduler.reset, name) == "unknown_namespace"
            assert refused(scheduler.lookup, lease, keys(1)) == "unknown_lease"
            assert scheduler.lookup(2, keys(1, 2)).states == "--"
            mine = client.register(memory)
            assert client.load(mine, lease, keys(1, 2), [0, 1]).error == "unknown_lease"
            assert refused(client.store, cache, keys(3), [0]) == "unknown_registration"
            assert refused(client.unregister, cache) == "unknown_registration"
            assert refused(register, client, owner.attach(own.fd)) == "unknown_segment"
            assert client.cancel(*range(100)) == 0
            assert set(memory.view.tobytes()) == {1}

            assert owner.load(cache, lease, keys(1, 2), [4, 5]).ok
            assert set(own.view.tobytes()) == {7}


def test_who_opened_a_name_first_does_not_own_it(daemon: DaemonProcess) -> None:
    """Another geometry is taken once nobody has it open and it is empty; an operator can empty it."""
    name = b"squatted".ljust(32)
    with WireClient(daemon.directory) as owner, WireClient(daemon.directory, "admin") as admin:
        with WireClient(daemon.directory) as squatter, SharedMemory(SIZE, "squatter") as memory:
            squatter.open_namespace(name, groups=2)
            assert refused(owner.open_namespace, name) == "namespace_mismatch"
            squatter.open_namespace(name[::-1])
            assert squatter.store(squatter.register(memory, namespace=name[::-1]), keys(1), [0]).ok

        def opens(name: bytes, groups: int) -> bool:
            with contextlib.suppress(Refused):
                owner.open_namespace(name, groups=groups)
                return True
            return False

        wait_until(lambda: opens(name, 1))
        assert refused(owner.open_namespace, name[::-1], groups=2) == "namespace_mismatch"
        assert admin.clear(name[::-1]) == 1
        wait_until(lambda: opens(name[::-1], 2))


def test_names_cannot_write_into_the_log_or_a_terminal(daemon: DaemonProcess) -> None:
    evil = "x\n2026 ERROR root: all is lost\x1b[2J"
    with WireClient(daemon.directory, None) as client:
        client.hello("worker", name=evil, software=evil)
        client.open_namespace(b"evil".ljust(32), label=evil, description=evil)
        said = books(daemon.directory)
        shown = [text for one in said.clients for text in (one.name, one.software)]
        shown += [one.model for one in said.namespaces.values()]
        assert all(text.isprintable() for text in shown)
    daemon.wait_log("x?2026 ERROR")
    assert "\nx\n2026 ERROR" not in daemon.log
    assert "\x1b" not in daemon.log


# --- processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def child(
    run: Callable[[], object], uid: int | None = None
) -> Iterator[tuple[multiprocessing.process.BaseProcess, multiprocessing.connection.Connection]]:
    """A process that sends what ``run`` returns; it is killed in the end."""
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def main() -> None:
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        sending.send(run())

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    sending.close()
    try:
        with receiving:
            yield process, receiving
    finally:
        process.kill()
        process.join()


def test_a_client_that_is_stopped(daemon: DaemonProcess) -> None:
    """Nobody waits for it. When it goes on, it finds every result."""

    def run() -> list[bool]:
        with FakeEngine(daemon.directory, "stopped", layers=1, blocks=8) as engine:
            stored = []
            for number in range(300):
                stored.append(engine.store(keys(number), [0], 60.0).ok)
                if number == 100:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return stored

    with child(run) as (process, result):
        assert process.pid is not None
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT) is not None
        with Neighbour(daemon.directory):
            pass
        os.kill(process.pid, signal.SIGCONT)
        assert result.poll(60)
        assert all(result.recv())


def test_a_client_that_is_killed(daemon: DaemonProcess) -> None:
    """What it held is free at once: leases, memory, descriptors."""

    def run() -> None:
        client, scheduler = WireClient(daemon.directory), WireClient(daemon.directory, "scheduler")
        memory = SharedMemory(SIZE, "killed")
        for one in (client, scheduler):
            one.open_namespace()
        assert client.store(client.register(memory), keys(1), [0]).ok
        assert scheduler.lookup(1, keys(1)).pinned == 1
        for _ in range(10):
            client.attach(memory.fd)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        with child(run) as (process, _):
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
    wait_until(lambda: "memfd:killed" not in Path(f"/proc/{daemon.pid}/maps").read_text())


def test_connections_until_descriptors_run_out(pool_file: Path) -> None:
    """ZeroMQ ends the daemon's process. The next one has every block, and engines go on by themselves."""
    few = 1024
    with (
        DaemonProcess("4MiB", before=["prlimit", f"--nofile={few}:{few}"], pool_file=str(pool_file)) as daemon,
        CheckedEngine(daemon) as engine,
    ):
        engine.put(range(BLOCKS))
        with contextlib.ExitStack() as held:
            for _ in range(few):
                stream = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stream.setblocking(False)
                with contextlib.suppress(OSError):
                    stream.connect(str(request_streams(daemon.directory)[0]))
            assert daemon.process.wait(60) == -signal.SIGABRT
        daemon.start()
        assert engine.wait_ready(60.0)
        wait_until(lambda: engine.has(range(BLOCKS)))


# --- who may connect ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restricted() -> Iterator[DaemonProcess]:
    """A daemon for the users 4242 and 4343, of whom the second may administer. All files are open to everybody.

    So the kernel's credentials decide, and not the file system.
    """
    require("root", os.geteuid() == 0, "only root can be somebody else")
    with DaemonProcess(allowed_uids="4242,4343", allowed_gids="4242", admin_uids="4343") as daemon:
        for path in (daemon.directory, *daemon.directory.glob("*.sock")):
            path.chmod(0o777)
        yield daemon


@pytest.fixture(scope="module")
def silent(restricted: DaemonProcess) -> Iterator[WireClient]:
    """A session that says nothing from the first test on."""
    with WireClient(restricted.directory, None) as client:
        yield client


def cleared_by(daemon: DaemonProcess, uid: int) -> str:
    """What a user's attempt to clear the cache comes to."""

    def run() -> str:
        try:
            with AdminClient(daemon.directory) as admin:
                return str(admin.clear())
        except KvoffdClientError as error:
            return str(error)

    with child(run, uid) as (_, result):
        assert result.poll(60), "the process did not answer"
        return str(result.recv())


@pytest.mark.usefixtures("silent")
def test_users_who_are_not_allowed_are_refused(restricted: DaemonProcess) -> None:
    """With a sentence. Root, which could read the daemon's memory anyway, is never locked out. An engine's user may not
    clear what others stored."""
    for uid, why, setting in (
        (4444, "User 4444 (group 4444) may not use this kvoffd", "allowed_uids"),
        (4242, "User 4242 may not administer", "admin_uids"),
    ):
        said = cleared_by(restricted, uid)
        assert why in said
        assert setting in said
    assert cleared_by(restricted, 0) == cleared_by(restricted, 4343) == "0"


@pytest.mark.usefixtures("silent")
@pytest.mark.timeout(300)  # two processes start, and wait for a minute at most
def test_every_socket_asks_the_kernel_who_is_there(restricted: DaemonProcess) -> None:
    """Results and KV events are for allowed users too."""

    def listens(timeout_s: float) -> tuple[bool, bool]:
        with Eavesdropper(restricted.directory) as listening:
            listening.ask()
            return listening.is_answered(timeout_s), listening.hears(timeout_s)

    with FakeEngine(restricted.directory, blocks=2) as engine:
        assert engine.store(keys(0), [0]).ok
        with child(lambda: listens(30.0), 4242) as (_, allowed), child(lambda: listens(2.0), 4444) as (_, other):
            for number in itertools.count(1):
                assert engine.store(keys(number), [0]).ok
                if allowed.poll(0.05) and other.poll(0):
                    break
            assert allowed.recv() == (True, True)
            assert other.recv() == (False, False)


def test_a_session_that_never_says_hello(restricted: DaemonProcess, silent: WireClient) -> None:
    """It is ended after ten seconds."""
    silent.wait_lifeline_ended()
    assert books(restricted.directory).ended_sessions["no_hello"] == 1
