"""One neighbour that is slow, wrong, full, silent or gone, beside good ones in each tier: these are served as if alone.

Clients that misbehave beside a good one are in ``test_misbehaving_clients``.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest

from kvoffd_client import GroupSpec, NamespaceSpec, RequestRefused
from tests.kit.checked import CheckedEngine, Truth, put_on_disk, wait_disk
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.slow_link import SlowLink
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys

pytestmark = pytest.mark.usefixtures("nixl")

PAGE_BYTES, PROMPT, PROMPTS = 65536, 8, 10
"""Blocks of a prompt, and prompts of each tier: half of them are the control."""
EVERY = PROMPT * PROMPTS
LARGE = 220
"""Blocks of a prompt of the bad store: nearly all of the 224 that leases may pin."""
HELD = 128
"""Blocks that a session keeps leased."""
DISK, STORE, PEER, BAD_STORE, BAD_PEER, BAD_SESSION, BAD_DISK = (number * 10_000 for number in range(7))
"""First keys of what each neighbour has."""
GOOD = {"disk": DISK, "store": STORE, "peer": PEER}
LEAST = 0.95
SLOW = 400_000
"""Bytes per second."""
PAUSE_S = 0.002
"""Between two calls of a bad neighbour's engine: one that never pauses takes a CPU from the others' engines."""
POOL, DISK_SIZE, DEADLINE = "16MiB", "16MiB", "3s"
SPEC = NamespaceSpec.named("neighbours", groups=[GroupSpec("full_attention", 16)], page_bytes=PAGE_BYTES)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def filled_disks(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the directories of a good disk and of one that may hang."""
    place = tmp_path_factory.mktemp("disks")
    for name, first in (("good", DISK), ("bad", BAD_DISK)):
        (place / name).mkdir()
        with DaemonProcess("8MiB", disk=f"{place / name}={DISK_SIZE}", disk_write="always") as daemon:
            wait_disk(daemon)
            with engine_of(daemon, truth) as engine:
                put_on_disk(daemon, engine, EVERY, first)
            daemon.stop()
    return place


@pytest.fixture(scope="module")
def stores(truth: Truth) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A bad store and a good one."""
    with RedisServer() as bad, RedisServer() as good:
        for server, first, count in ((bad, BAD_STORE, LARGE), (good, STORE, EVERY)):
            with DaemonProcess("64MiB", shared=server.url, shared_write="always") as daemon:
                wait_until(lambda daemon=daemon: books(daemon.directory).said.shared[0].up)
                with engine_of(daemon, truth) as engine:
                    engine.put(range(first, first + count))
                wait_until(lambda server=server, count=count: server.objects >= count)
        yield bad, good


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "secret"
    path.write_text("a secret for tests\n")
    path.chmod(0o600)
    return path


class Lender(DaemonProcess):
    """A peer with blocks."""

    def __init__(self, secret: Path, port: int, truth: Truth, first: int) -> None:
        self.address = f"127.0.0.1:{port}"
        super().__init__("64MiB", peer_listen=self.address, peer_secret_file=str(secret))
        self._truth, self._first = truth, first

    def fill(self) -> None:
        with engine_of(self, self._truth) as engine:
            engine.put(range(self._first, self._first + EVERY))

    def signal_all(self, number: int) -> None:
        """Send a signal to the daemon and its helper."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        every = [*map(int, children), self.pid]
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            every += map(int, task.read_text().split())
        for pid in dict.fromkeys(every):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def good_peer(secret: Path, truth: Truth) -> Iterator[Lender]:
    with Lender(secret, free_ports(1)[0], truth, PEER) as lender:
        lender.fill()
        yield lender


def engine_of(daemon: DaemonProcess, truth: Truth) -> CheckedEngine:
    return CheckedEngine(daemon, truth, SPEC, page_bytes=PAGE_BYTES)


class World:
    """A daemon over two disks, two stores and two peers, of which one each is bad, with an engine for each."""

    def __init__(
        self,
        place: Path,
        stores: tuple[RedisServer, RedisServer],
        good_peer: Lender,
        secret: Path,
        truth: Truth,
        shared_write: str,
    ) -> None:
        self.place, self.truth = place, truth
        self.bad_store, good_store = stores
        self._parts, self._stopping = ExitStack(), threading.Event()
        self.link = self._parts.enter_context(SlowLink(self.bad_store.port))
        self.bad_peer = Lender(secret, free_ports(1)[0], truth, BAD_PEER)
        flags: dict[str, Any] = {"disk_write": "never", "shared_write": shared_write}
        self.daemon = DaemonProcess(
            POOL,
            faults=True,
            disk=f"{place}/good={DISK_SIZE},{place}/bad={DISK_SIZE}",
            shared=f"{self.link.url},{good_store.url}",
            peers=f"{self.bad_peer.address},{good_peer.address}",
            peer_secret_file=str(secret),
            disk_deadline=DEADLINE,
            shared_deadline=DEADLINE,
            **flags,
        )

    def __enter__(self) -> Self:
        self._parts.enter_context(self.bad_peer).fill()
        self._parts.enter_context(self.daemon)
        wait_disk(self.daemon)
        wait_until(lambda: all(one.up for one in books(self.daemon.directory).said.shared))
        self._good = self._parts.enter_context(engine_of(self.daemon, self.truth))
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        with suppress(OSError):  # it is gone
            self.bad_peer.signal_all(signal.SIGCONT)
        self.link.resume()
        self._parts.close()

    def hits(self, tier: str, prompts: range) -> int:
        """Return how many blocks of these prompts one lookup each finds in a good tier. Their bytes are right."""
        hits = 0
        for first in (GOOD[tier] + number * PROMPT for number in prompts):
            found = self._good.lookup(keys(*range(first, first + PROMPT)))
            assert self._good.has(range(first, first + found))
            hits += found
        return hits

    def want(self, first: int, count: int) -> None:
        """Have an engine look for blocks of a bad neighbour, again and again, until the end."""
        engine = self._parts.enter_context(engine_of(self.daemon, self.truth))
        wanted = keys(*range(first, first + count))

        def look() -> None:
            while not self._stopping.is_set():
                with suppress(RequestRefused):
                    engine.lookup(wanted, 1.0)
                    engine.release()
                self._stopping.wait(PAUSE_S)

        self._run(look)

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        self._parts.callback(thread.join)

    # --- what may be wrong -----------------------------------------------------------------------

    def store_is_slow(self) -> None:
        self.link.bytes_per_second = SLOW

    def store_is_silent(self) -> None:
        self.link.hang_after(0)

    def store_is_gone(self) -> None:
        self.link.close()

    def store_is_wrong(self) -> None:
        for name in self.bad_store.block_keys():
            right = self.bad_store.command("GETRANGE", name, "5000", "5004").split(b"\r\n", 1)[1][:-2]
            self._parts.callback(self.bad_store.command, "SETRANGE", name, "5000", right)
            self.bad_store.command("SETRANGE", name, "5000", "wrong")

    def store_is_full(self) -> None:
        """While a session stores new blocks, again and again."""
        self.bad_store.command("CONFIG", "SET", "maxmemory", "1mb")
        self._parts.callback(self.bad_store.command, "CONFIG", "SET", "maxmemory", "0")
        engine, numbers = self._parts.enter_context(engine_of(self.daemon, self.truth)), count(BAD_SESSION, PROMPT)

        def put() -> None:
            while not self._stopping.is_set():
                first = next(numbers)
                engine.put(range(first, first + PROMPT))
                self._stopping.wait(PAUSE_S)

        self._run(put)

    def peer_is_silent(self) -> None:
        self.bad_peer.signal_all(signal.SIGSTOP)

    def peer_is_gone(self) -> None:
        self.bad_peer.kill()

    def disk_hangs(self) -> None:
        self._parts.enter_context(self.daemon.fault(f"disk hangs {self.place}/bad"))

    def disk_is_wrong(self) -> None:
        for file in (self.place / "bad").rglob("*"):
            if file.is_file():
                with file.open("r+b") as opened:
                    for at in range(0, file.stat().st_size, 4096):
                        opened.seek(at + 100)
                        opened.write(b"wrong")

    def session_keeps_what_it_finds(self) -> None:
        engine = self._parts.enter_context(engine_of(self.daemon, self.truth))
        numbers = range(BAD_SESSION, BAD_SESSION + HELD)
        engine.put(numbers)
        engine.lookup(keys(*numbers))


@pytest.mark.parametrize(
    ("goes_wrong", "wanted"),
    [
        (World.store_is_slow, (BAD_STORE, LARGE)),
        (World.store_is_silent, (BAD_STORE, LARGE)),
        (World.store_is_gone, (BAD_STORE, LARGE)),
        (World.store_is_wrong, (BAD_STORE, LARGE)),
        (World.store_is_full, (BAD_STORE, LARGE)),
        (World.peer_is_silent, (BAD_PEER, EVERY)),
        (World.peer_is_gone, (BAD_PEER, EVERY)),
        (World.disk_is_wrong, (BAD_DISK, EVERY)),
        (World.disk_hangs, (BAD_DISK, EVERY)),
        (World.session_keeps_what_it_finds, (BAD_SESSION, HELD)),
    ],
    ids=lambda one: one.__name__ if callable(one) else str(one[1]),
)
def test_good_neighbours_are_served_as_if_alone(
    goes_wrong: Callable[[World], None],
    wanted: tuple[int, int],
    filled_disks: Path,
    stores: tuple[RedisServer, RedisServer],
    good_peer: Lender,
    secret: Path,
    truth: Truth,
    tmp_path: Path,
) -> None:
    place = tmp_path / "disks"
    shutil.copytree(filled_disks, place)
    shared_write = "always" if goes_wrong is World.store_is_full else "never"
    with World(place, stores, good_peer, secret, truth, shared_write) as world:
        control = {tier: world.hits(tier, range(PROMPTS // 2)) for tier in GOOD}
        assert control == dict.fromkeys(GOOD, EVERY // 2)
        goes_wrong(world)
        world.want(*wanted)
        found = {tier: world.hits(tier, range(PROMPTS // 2, PROMPTS)) for tier in GOOD}
        assert all(found[tier] >= LEAST * control[tier] for tier in GOOD), (found, control)
