"""Two daemons over one Redis: what one stored the other loads; a server that fails costs a miss and nothing else."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from kvoffd.server.kept_resets import KeptResets
from kvoffd_client import AdminClient
from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisCluster, RedisServer, needs_redis
from tests.kit.slow_proxy import SlowProxy
from tests.kit.struct_wire import key_list
from tests.kit.waiting import wait_until

pytestmark = needs_redis
DEADLINE_S = 30.0
PAGE = 65536
BLOCKS = 8


KEYS = key_list(*range(BLOCKS))


class Node:
    """A daemon over the shared server, and an engine of it."""

    def __init__(self, url: str, **flags: str) -> None:
        self.daemon = DaemonProcess("16MiB", shared=url, **{"shared_write": "always", **flags})

    def __enter__(self) -> Node:
        self.daemon.start()
        self.engine = FakeEngine(self.daemon.directory, page_bytes=PAGE, blocks=64)
        self.admin = AdminClient(self.daemon.directory)
        wait_until(lambda: self.shared.reachable, DEADLINE_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.admin.close()
        self.engine.close()
        self.daemon.close()

    @property
    def shared(self) -> m.SharedStats:
        return self.admin.stats().shared[0]

    @property
    def namespace(self) -> m.NamespaceStats:
        return self.admin.stats().namespaces[0]

    def start_again(self) -> None:
        """Start the daemon, which has ended, and wait until all are connected."""
        self.admin.close()
        self.daemon.start()
        assert self.engine.wait_ready(DEADLINE_S)
        self.admin = AdminClient(self.daemon.directory)
        wait_until(lambda: self.shared.reachable, DEADLINE_S)

    @property
    def ready_blocks(self) -> int:
        return sum(one.ready_blocks for one in self.admin.namespaces().namespaces)

    def store(self) -> list[int]:
        """Store the blocks, and wait until they are written; returns their checksums."""
        self.engine.fill(range(BLOCKS), seed=5)
        assert self.engine.store(KEYS, range(BLOCKS)).ok
        wait_until(lambda: self.shared.written_blocks == BLOCKS, DEADLINE_S, explain=lambda: self.shared)
        return self.engine.checksums(range(BLOCKS))

    def load(self) -> list[int]:
        """Look up until all is there, load, and return the checksums."""
        wait_until(lambda: self.engine.lookup(KEYS) == BLOCKS, DEADLINE_S, explain=lambda: self.shared)
        assert self.engine.load(KEYS, range(32, 32 + BLOCKS)).ok
        return self.engine.checksums(range(32, 32 + BLOCKS))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def test_what_one_node_stored_another_loads_also_when_the_first_is_gone(server: RedisServer) -> None:
    with Node(server.url) as first:
        sums = first.store()
        with Node(server.url) as second:
            assert second.load() == sums
            assert second.shared.read_blocks == BLOCKS
        first.admin.clear()
        assert server.objects == BLOCKS, "clearing a node takes nothing from others"
    with Node(server.url) as third:
        assert third.load() == sums
        assert third.shared.mismatches == 0
        assert third.shared.written_blocks == 0, "what came from there is not written there"


def test_keys_that_nobody_has_are_misses_and_those_of_the_store_its_hits(server: RedisServer) -> None:
    with Node(server.url) as first, Node(server.url) as second:
        first.store()
        assert second.engine.lookup(key_list(*range(100, 500))) == 0
        wait_until(
            lambda: second.namespace.misses == {"never_stored": 400}, DEADLINE_S, explain=lambda: second.namespace
        )
        assert (second.namespace.keys_asked, second.namespace.keys_pending) == (400, 0)
        second.load()
        found = second.namespace
        assert found.keys_shared == found.keys_pending >= BLOCKS
        assert found.keys_asked == found.keys_ready + found.keys_pending + 400
        assert sum(found.misses.values()) == 400


def test_what_the_pool_has_is_not_asked_for(server: RedisServer) -> None:
    with Node(server.url) as node:
        node.store()
        before = node.shared.asked_keys
        assert node.engine.lookup(KEYS) == BLOCKS
        assert node.shared.asked_keys == before


def test_of_two_stores_the_second_has_what_the_first_lost(server: RedisServer) -> None:
    with RedisServer() as other:
        with Node(f"{server.url},{other.url}") as first:
            sums = first.store()
            wait_until(lambda: other.objects == BLOCKS, DEADLINE_S)
        server.command("FLUSHALL")
        with Node(f"{server.url},{other.url}") as second:
            assert second.load() == sums
            lost, kept = second.admin.stats().shared
            assert (lost.read_blocks, kept.read_blocks) == (0, BLOCKS)
            server.kill()
            assert second.load() == sums


def test_a_reset_of_the_fleet_reaches_every_node(server: RedisServer) -> None:
    with Node(server.url) as first, Node(server.url) as second:
        first.store()
        second.load()
        (namespace,) = first.admin.namespaces().namespaces
        first.engine.scheduler.reset()
        assert first.admin.reset_fleet(namespace.namespace) == 1
        wait_until(lambda: second.admin.namespaces().namespaces[0].ready_blocks == 0, 8.0)
        assert second.engine.lookup(KEYS) == 0
        first.engine.fill(range(BLOCKS), seed=6)
        assert first.engine.store(KEYS, range(BLOCKS)).ok
        wait_until(lambda: first.shared.written_blocks == 2 * BLOCKS, DEADLINE_S, explain=lambda: first.shared)
        assert second.load() == first.engine.checksums(range(BLOCKS)), "what is stored since is shared again"


def test_a_node_that_was_down_when_the_fleet_was_reset_follows_after_its_start(
    server: RedisServer, pool_file: Path
) -> None:
    with Node(server.url) as first, Node(server.url, pool_file=str(pool_file)) as second:
        first.store()
        second.load()
        second.daemon.stop()
        (namespace,) = first.admin.namespaces().namespaces
        assert first.admin.reset_fleet(namespace.namespace) == 1
        second.start_again()
        wait_until(lambda: second.ready_blocks == 0, DEADLINE_S)
        assert second.engine.lookup(KEYS) == 0
        assert server.objects == BLOCKS + 1, "it has written nothing stale under the new generation"
        directory, name = second.daemon.directory, namespace.namespace
        wait_until(lambda: KeptResets.of(directory).generations_of(server.url).get(name, 0) > 0)  # for the next daemon


def test_a_namespace_that_an_engine_reset_is_not_shared_after_a_restart_either(server: RedisServer) -> None:
    with Node(server.url) as node:
        node.store()
        assert node.engine.scheduler.reset()
        node.daemon.kill()
        node.start_again()
        assert node.engine.lookup(KEYS) == 0
        assert node.shared.asked_keys == 0
        assert node.shared.left_namespaces == 1
        (namespace,) = node.admin.namespaces().namespaces
        node.admin.reset_fleet(namespace.namespace)
        wait_until(lambda: node.shared.left_namespaces == 0, DEADLINE_S)


def test_after_a_reset_nothing_comes_from_there(server: RedisServer) -> None:
    with Node(server.url) as node:
        node.store()
        assert node.engine.scheduler.reset()
        asked = node.shared.asked_keys
        assert node.engine.lookup(KEYS) == 0
        assert node.shared.asked_keys == asked
        node.engine.fill(range(BLOCKS), seed=6)
        assert node.engine.store(KEYS, range(BLOCKS)).ok
        assert node.load() == node.engine.checksums(range(BLOCKS))
        assert node.shared.written_blocks == BLOCKS


def test_a_master_of_a_cluster_that_is_gone_is_told_of() -> None:
    with RedisCluster() as cluster, Node(cluster.url) as node:
        assert [server.answers for server in node.shared.servers] == [True] * 3
        cluster.servers[2].kill()
        name = f"127.0.0.1:{cluster.servers[2].port}"

        def lost() -> list[str]:
            node.engine.lookup(key_list(*range(100, 132)))
            return [server.name for server in node.shared.servers if not server.answers]

        wait_until(lambda: lost() == [name], DEADLINE_S, explain=lambda: node.shared)
        wait_until(lambda: node.shared.errors, DEADLINE_S, explain=lambda: node.shared)
        assert node.shared.reachable
        health = node.admin.health()
        assert health.ready
        assert [cause.reason for cause in health.causes] == ["shared_server"]
        assert name in health.causes[0].sentence
        assert f"{name} cannot be reached" in node.daemon.log


@pytest.mark.parametrize(
    ("bytes_per_s", "read", "why"),
    [(2e6, 2, {"slower"}), (1e5, 0, {"slower", "deadline", "overdue"}), (1e4, 0, {"slower", "failed"})],
    ids=["slow", "too slow", "hangs"],
)
def test_what_comes_slower_than_it_is_computed_is_not_read_once_that_is_known(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, read: int, why: set[str]
) -> None:
    groups = (m.GroupSpec("full_attention", 16),)
    monkeypatch.setattr(NamespaceSpec, "named", partial(NamespaceSpec.named, groups=groups))
    with ExitStack() as running:
        proxy, first = running.enter_context(SlowProxy(server.port)), running.enter_context(Node(server.url))
        second = running.enter_context(Node(proxy.url, shared_ask_deadline="2s"))
        first.store()
        proxy.bytes_per_s = bytes_per_s
        second.engine.scheduler.report(16_000.0, 0.0, 0, 0)  # a block in a millisecond
        wait_until(lambda: second.namespace.prefill_tokens_per_second)
        for key in KEYS[:2]:  # how fast it is nobody knows at first, and once a minute it is tried
            second.engine.lookup([key])
        before = second.shared
        assert before.read_blocks == read
        for _ in range(10):
            for key in KEYS[2:]:
                assert second.engine.lookup([key]) == 0
        after = second.shared
        assert (after.read_blocks, after.queued_reads, after.reachable, after.opened) == (read, 0, True, 0)
        slower = after.failed_promotions["slower"] - before.failed_promotions.get("slower", 0)
        assert slower == 60
        assert set(after.failed_promotions) <= why
        assert first.load() == first.engine.checksums(range(BLOCKS))


def test_a_server_that_takes_no_writes_is_told_of_until_it_takes_one(server: RedisServer) -> None:
    with Node(server.url) as node:
        assert server.command("ACL", "SETUSER", "default", "-set") == b"+OK\r\n"
        node.engine.fill(range(BLOCKS), seed=6)
        assert node.engine.store(KEYS, range(BLOCKS)).ok

        def causes() -> list[str]:
            return [cause.reason for cause in node.admin.health().causes]

        wait_until(lambda: causes() == ["shared_refuses"], DEADLINE_S)
        assert "+set" in node.admin.health().causes[0].sentence
        assert node.admin.health().ready
        server.command("ACL", "SETUSER", "default", "+set")
        more = itertools.count(BLOCKS)
        wait_until(lambda: node.engine.store(key_list(next(more)), [0]).ok and not causes(), DEADLINE_S, interval_s=0.5)


@pytest.mark.timing
@pytest.mark.parametrize("fault", ["killed", "stopped", "emptied", "spoilt"])
def test_a_server_that_fails_is_a_miss_in_time_and_never_a_wrong_byte(server: RedisServer, fault: str) -> None:
    with Node(server.url) as first, Node(server.url) as second:
        sums = first.store()
        if fault == "killed":
            server.kill()
        elif fault == "stopped":
            server.signal(signal.SIGSTOP)
        elif fault == "emptied":
            server.command("FLUSHALL")
        else:
            for key in server.block_keys():
                assert server.command("SETRANGE", key, "30000", b"wrong bytes")[:1] == b":"
        times = []
        for _ in range(100):
            started = time.monotonic()
            assert second.engine.lookup(KEYS) == 0
            times.append(time.monotonic() - started)
        # A lookup of the test's engine waits for all that is pending; a busy machine may hold up any.
        assert median(times) < 0.05
        assert max(times) < 2.0
        shared = second.shared
        assert shared.read_blocks == 0
        assert shared.mismatches == (BLOCKS if fault == "spoilt" else 0)
        number = BLOCKS
        while fault in ("killed", "stopped") and second.shared.reachable:
            number += 1
            started = time.monotonic()
            assert second.engine.lookup(key_list(number)) == 0
            assert time.monotonic() - started < 2.0
        if fault in ("killed", "stopped"):
            assert [cause.reason for cause in second.admin.health().causes] == ["shared_unreachable"]
            assert [server.answers for server in second.shared.servers] == [False]
        if fault == "killed":
            server.start()
        server.signal(signal.SIGCONT)
        wait_until(lambda: first.shared.reachable and second.shared.reachable, 10.0)
        assert first.load() == sums
