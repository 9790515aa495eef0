"""KV events: a reader who replays them has the daemon's index, by tier, whenever the reader comes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvoffd_client import NamespaceSpec, SchedulerClient, SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess, clear_daemon
from tests.kit.waiting import wait_until
from tests.kit.wire import NAMESPACE, PAGE_BYTES, Eavesdropper, KvMessage, WireClient, books, key, keys, kv_messages

OTHER = bytes(reversed(NAMESPACE))
POOL, DISK = "CPU", "STORAGE"
"""Media, as vLLM's own events name them."""


def replayed(messages: Iterable[KvMessage]) -> dict[bytes, dict[str | None, set[bytes]]]:
    """What a reader knows: keys by namespace and medium. No event may contradict those before it."""
    index: dict[bytes, dict[str | None, set[bytes]]] = {}
    for message in messages:
        for event in message.events:
            if event.kind == "cleared":
                index[message.namespace] = {POOL: set(), DISK: set()}
                continue
            there = index[message.namespace][event.medium]
            assert event.group == 0
            if event.kind == "stored":
                assert there.isdisjoint(event.keys)
                there.update(event.keys)
            else:
                assert there.issuperset(event.keys)
                there.difference_update(event.keys)
    return index


def test_a_replay_from_the_start_gives_the_index() -> None:
    """Of each namespace, with evictions, keys that were invalidated, and a reset."""
    with DaemonProcess("1MiB", limits={"leased_share": 1}) as daemon, SharedMemory(128 * PAGE_BYTES, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
            for client in (worker, scheduler):
                client.open_namespace()
                client.open_namespace(OTHER)
            other = worker.register(memory, namespace=OTHER)
            assert worker.store(other, keys(1, 2, 3), [1, 2, 3]).ok
            assert scheduler.reset(OTHER) == 3
            assert worker.store(other, keys(3), [3]).ok
            cache = worker.register(memory)
            for first in range(0, 128, 4):  # twice what the pool holds
                numbers = range(first, first + 4)
                assert worker.store(cache, keys(*numbers), list(numbers)).ok
            assert scheduler.invalidate(keys(126, 127)) == 2
            index: dict[bytes, set[bytes]] = {}
            for lease, (space, numbers) in enumerate(((NAMESPACE, range(128)), (OTHER, range(8))), 1):
                states = scheduler.lookup(lease, keys(*numbers), space).states
                index[space] = {key(number) for number, state in zip(numbers, states, strict=True) if state == "R"}
            assert 0 < len(index[NAMESPACE]) < 126
            messages = kv_messages(daemon.directory)
            assert [message.number for message in messages] == list(range(len(messages)))
            found = replayed(messages)
            assert {space: tiers[POOL] for space, tiers in found.items()} == index
            assert not any(tiers[DISK] for tiers in found.values())


def test_blocks_of_a_disk_have_a_medium_of_their_own(tmp_path: Path) -> None:
    with DaemonProcess("8MiB", disk=f"{tmp_path}=64MiB", disk_write="always") as daemon:
        wait_until(lambda: books(daemon.directory).disks[0].state == "serving")
        with FakeEngine(daemon.directory, page_bytes=65536, blocks=64) as engine:
            for first in range(0, 48, 8):  # the pool has room for 32
                assert engine.store(keys(*range(first, first + 8)), range(8)).ok
                wait_until(lambda end=first + 8: books(daemon.directory).disks[0].blocks == end)  # type: ignore[misc]
            assert engine.lookup(keys(0, 1)) == 2
            engine.release()
            space = engine.namespace.fingerprint
            index = replayed(kv_messages(daemon.directory))[space]
            assert index[DISK] == set(keys(*range(48)))
            assert len(index[POOL]) == books(daemon.directory).namespaces[space].ready_blocks <= 32
            assert set(keys(0, 1)) <= index[POOL], "what came up is in both"
            assert engine.scheduler.reset()
            index = replayed(kv_messages(daemon.directory))[space]
            assert index == {POOL: set(), DISK: set()}


def test_a_replay_begins_where_it_is_asked_to(shared_daemon: DaemonProcess) -> None:
    with WireClient(shared_daemon.directory) as worker, SharedMemory(8 * PAGE_BYTES, "test") as memory:
        worker.open_namespace()
        cache = worker.register(memory)
        for number in range(3):
            assert worker.store(cache, keys(number), [number]).ok
        whole = kv_messages(shared_daemon.directory)
        assert [message.events[0].keys for message in whole[-3:]] == [keys(0), keys(1), keys(2)]
        assert kv_messages(shared_daemon.directory, whole[-2].number) == whole[-2:]
        assert kv_messages(shared_daemon.directory, whole[-1].number + 99) == []


def test_a_new_namespace_begins_empty() -> None:
    """Its first message says so. Beyond the buffer a replay begins later, and its number tells the reader."""
    with DaemonProcess(event_buffer_steps="2") as daemon, WireClient(daemon.directory) as worker:
        for number in range(5):
            worker.open_namespace(bytes([number]) * 32)
        messages = kv_messages(daemon.directory)
        assert [message.number for message in messages] == [3, 4]
        assert [message.namespace for message in messages] == [b"\3" * 32, b"\4" * 32]
        assert {event.kind for message in messages for event in message.events} == {"cleared"}


class Reader(SchedulerClient):
    """An engine's scheduler that collects the namespace's events, as vLLM's names have them."""

    def __init__(self, daemon: DaemonProcess, space: NamespaceSpec) -> None:
        super().__init__(daemon.directory, space, subscribe_events=True)
        self.there: set[bytes] = set()
        self.clears = 0

    def read(self) -> set[bytes]:
        for event in self.take_events():
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.clears += 1
                self.there.clear()
            elif kind == "BlockStored":
                self.there.update(event.block_hashes)
            else:
                assert kind == "BlockRemoved"
                self.there.difference_update(event.block_hashes)
        return self.there


def test_an_engine_reads_what_others_store(daemon: DaemonProcess) -> None:
    """From the start of the daemon's life, however late the engine comes, and over a restart of the daemon."""
    with FakeEngine(daemon.directory) as engine:
        assert engine.store(keys(1, 2), [1, 2]).ok
        with Reader(daemon, engine.namespace) as reader:
            wait_until(lambda: reader.read() == set(keys(1, 2)), explain=lambda: reader.there)
            assert engine.store(keys(3), [3]).ok
            wait_until(lambda: reader.read() == set(keys(1, 2, 3)), explain=lambda: reader.there)
            clears = reader.clears
            assert engine.scheduler.reset()
            wait_until(lambda: reader.read() == set() and reader.clears > clears)
            assert engine.store(keys(4), [4]).ok
            wait_until(lambda: reader.read() == set(keys(4)), explain=lambda: reader.there)
            clears = reader.clears
            daemon.kill()
            daemon.start()
            assert engine.wait_ready(60.0)
            assert engine.store(keys(5), [5]).ok
            wait_until(lambda: reader.read() == set(keys(5)) and reader.clears > clears, explain=lambda: reader.there)
            assert reader.events_lost == 0


def test_clear_is_published_to_every_namespace(shared_daemon: DaemonProcess) -> None:
    with FakeEngine(shared_daemon.directory, "one") as one, FakeEngine(shared_daemon.directory, "two") as two:
        for engine in (one, two):
            assert engine.store(keys(1), [1]).ok
        spaces = {one.namespace.fingerprint, two.namespace.fingerprint}
        found = replayed(kv_messages(shared_daemon.directory))
        assert all(found[space][POOL] == set(keys(1)) for space in spaces)
    clear_daemon(shared_daemon)
    found = replayed(kv_messages(shared_daemon.directory))
    assert not any(found[space][POOL] for space in spaces)


def test_events_are_published_as_they_happen(shared_daemon: DaemonProcess) -> None:
    """A subscriber that asks for nothing hears that namespaces begin; who only asks for a replay would hear it late."""
    with Eavesdropper(shared_daemon.directory) as subscriber, WireClient(shared_daemon.directory) as client:

        def hears(number: int) -> bool:
            client.open_namespace(number.to_bytes(32, "big"))
            return subscriber.hears(1.0)

        assert any(hears(number) for number in range(12)), "nothing was published"
