"""KV events: who reads them from the start has the daemon's index, by tier, and who comes late what came since."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from kvoffd_client import AdminClient, NamespaceSpec, SchedulerClient, SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import (
    NAMESPACE,
    PAGE_BYTES,
    Eavesdropper,
    KvMessage,
    KvSubscriber,
    Page,
    Part,
    Segment,
    Store,
    Tensor,
    WireClient,
    books,
    key,
    keys,
)

OTHER, THIRD = bytes(reversed(NAMESPACE)), b"two groups".ljust(32)
POOL, DISK = "CPU", "STORAGE"
"""Media, as vLLM's own events name them."""


def folded(messages: Iterable[KvMessage]) -> dict[bytes, dict[str | None, set[bytes]]]:
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


def test_events_from_the_start_give_the_index() -> None:
    """Of each namespace, with evictions, keys that were invalidated, and a reset."""
    with (
        DaemonProcess("1MiB", limits={"leased_share": 1}) as daemon,
        KvSubscriber(daemon.directory) as events,
        SharedMemory(128 * PAGE_BYTES, "test") as memory,
        WireClient(daemon.directory) as worker,
        WireClient(daemon.directory, "scheduler") as scheduler,
    ):
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
        messages = events.messages()
        for space in (NAMESPACE, OTHER):
            numbers = [message.number for message in messages if message.namespace == space]
            assert numbers == list(range(len(numbers)))
        found = folded(messages)
        assert {space: tiers[POOL] for space, tiers in found.items()} == index
        assert not any(tiers[DISK] for tiers in found.values())


def test_blocks_of_a_disk_have_a_medium_of_their_own(tmp_path: Path) -> None:
    with DaemonProcess("8MiB", disk=f"{tmp_path}=64MiB", disk_write="always") as daemon:
        wait_until(lambda: books(daemon.directory).disks[0].state == "serving")
        with (
            KvSubscriber(daemon.directory) as events,
            FakeEngine(daemon.directory, page_bytes=65536, blocks=64) as engine,
        ):
            for first in range(0, 48, 8):  # the pool has room for 32
                assert engine.store(keys(*range(first, first + 8)), range(8)).ok
                wait_until(lambda end=first + 8: books(daemon.directory).disks[0].blocks == end)  # type: ignore[misc]
            assert engine.lookup(keys(0, 1)) == 2
            engine.release()
            space = engine.namespace.fingerprint
            index = folded(events.messages())[space]
            assert index[DISK] == set(keys(*range(48)))
            assert len(index[POOL]) == books(daemon.directory).namespaces[space].ready_blocks <= 32
            assert set(keys(0, 1)) <= index[POOL], "what came up is in both"
            assert engine.scheduler.reset()
            index = folded(events.messages())[space]
            assert index == {POOL: set(), DISK: set()}


def test_an_event_has_the_parents_and_tokens_that_its_store_told(
    shared_daemon: DaemonProcess, worker: WireClient, cache: bytes
) -> None:
    """Each key has its own, those of a store without any have none, and what was there before is in no event."""
    chain, tokens = keys(0, 1, 2, 3), [bytes([number]) * 64 for number in range(4)]
    with KvSubscriber(shared_daemon.directory) as events:
        assert worker.store(cache, chain[1:2], [1]).ok
        links = {"parents": [bytes(32), *chain[:3]], "tokens": b"".join(tokens)}
        assert worker.store(cache, chain, [0, 1, 2, 3], **links).ok
        assert worker.store(cache, keys(9), [4]).ok
        first, *others = [event for message in events.messages() for event in message.events if event.keys]
    assert (first.keys, first.parents, first.tokens) == (chain[1:2], [], b"")
    found = {key: (event.parents, event.tokens) for event in others for key in event.keys}
    new = [chain[0], chain[2], chain[3]]
    of_chain = [bytes(32), chain[1], chain[2]], tokens[0] + tokens[2] + tokens[3]
    assert found == {**dict.fromkeys(new, of_chain), key(9): ([], b"")}
    assert [key for event in others for key in event.keys if event.tokens] == new


def test_a_block_of_several_ranks_is_published_with_its_tokens_when_it_is_whole(
    shared_daemon: DaemonProcess, worker: WireClient, memory: SharedMemory
) -> None:
    with KvSubscriber(shared_daemon.directory) as events:
        worker.open_namespace(OTHER, world_size=2)
        caches = [worker.register(memory, rank=rank, namespace=OTHER) for rank in range(2)]
        links = {"parents": [bytes(32)], "tokens": bytes(range(64))}
        assert worker.store(caches[0], keys(1), [1], **links).ok
        assert not any(event.keys for message in events.messages() for event in message.events)
        assert worker.store(caches[1], keys(1), [1], **links).ok
        (event,) = [event for message in events.messages() for event in message.events if event.keys]
        assert (event.keys, event.parents, event.tokens) == (keys(1), [bytes(32)], bytes(range(64)))


def test_equal_keys_of_two_groups_keep_their_own_parents_and_tokens(
    shared_daemon: DaemonProcess, memory: SharedMemory
) -> None:
    """One store of a key in both groups; only the first one's tokens are sent in a second store of them."""
    with KvSubscriber(shared_daemon.directory) as events, WireClient(shared_daemon.directory) as worker:
        worker.open_namespace(THIRD, groups=2)
        cache = worker.register_layout(
            [Segment(worker.attach(memory.fd), memory.size_bytes)],
            [Tensor(0, 0, PAGE_BYTES, 8), Tensor(0, 8 * PAGE_BYTES, PAGE_BYTES, 8)],
            [[Page(0, PAGE_BYTES)], [Page(1, PAGE_BYTES)]],
            namespace=THIRD,
        )
        links = [([key(100 + group)], bytes([group]) * 64) for group in (0, 1)]
        parts = [Part(keys(1), [1], group, parents=parents, tokens=sent) for group, (parents, sent) in enumerate(links)]
        assert worker.step(cache, [Store(1, parts)])[1].ok
        parts = [Part(keys(2), [2], 0, parents=links[0][0], tokens=links[0][1]), Part(keys(2), [2], 1)]
        assert worker.step(cache, [Store(2, parts)])[2].ok
        stored = [event for message in events.messages() for event in message.events if event.keys]
    found = {(event.group, *event.keys): (event.parents, event.tokens) for event in stored}
    assert found == {(0, key(1)): links[0], (1, key(1)): links[1], (0, key(2)): links[0], (1, key(2)): ([], b"")}


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
    """From when it has come, and over a restart of the daemon: each connection begins with nothing."""
    numbers = itertools.count(1)
    with FakeEngine(daemon.directory) as engine, Reader(daemon, engine.namespace) as reader:

        def heard() -> bool:
            assert engine.store(keys(next(numbers)), [1]).ok
            return bool(reader.read())

        def reads(expected: set[bytes]) -> None:
            wait_until(lambda: reader.read() == expected, explain=lambda: reader.there)

        wait_until(heard)
        assert engine.scheduler.reset()
        reads(set())
        assert engine.store(keys(1001, 1002), [1, 2]).ok
        reads(set(keys(1001, 1002)))
        with AdminClient(daemon.directory) as admin:
            admin.clear()
        reads(set())
        clears = reader.clears
        daemon.kill()
        daemon.start()
        assert engine.wait_ready(60.0)
        wait_until(lambda: reader.read() == set() and reader.clears > clears, explain=lambda: reader.there)
        wait_until(heard)
        assert reader.events_lost == 0


def test_events_are_published_as_they_happen(shared_daemon: DaemonProcess) -> None:
    with Eavesdropper(shared_daemon.directory) as subscriber, WireClient(shared_daemon.directory) as client:

        def hears(number: int) -> bool:
            client.open_namespace(number.to_bytes(32, "big"))
            return subscriber.hears(1.0)

        assert any(hears(number) for number in range(12)), "nothing was published"
    with AdminClient(shared_daemon.directory) as admin:
        assert admin.stats().kv_events > 0
