"""Nodes over one Redis or S3: what one stored the others load; a server that fails costs a miss and nothing else."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import obstore
import pytest
from obstore.store import S3Store

from kvoffd_client import AdminClient, GroupKeys, GroupSpec, HintAction, NamespaceSpec
from kvoffd_client.testing import FakeEngine
from tests.kit.command import run_cli_here
from tests.kit.daemon import DaemonProcess
from tests.kit.made_up_loads import chat_among_single_requests
from tests.kit.peer_node import BLOCKS, DEADLINE_S, Node
from tests.kit.redis_server import RedisCluster, RedisServer
from tests.kit.s3_server import BUCKET, S3Server
from tests.kit.slow_link import SlowLink
from tests.kit.waiting import wait_until
from tests.kit.wire import NamespaceStats, Said, SharedStats, ask_for, books, keys, said_of

KEYS = keys(*range(BLOCKS))
ASK_DEADLINE_S = 0.5
"""Of the setting `shared_ask_deadline`."""


class StoreNode(Node):
    """A daemon over the shared server, and an engine of it."""

    def __init__(self, url: str, **flags: str) -> None:
        super().__init__(None, "", pool_size="16MiB", shared=url, **{"shared_write": "always", **flags})

    def __enter__(self) -> Self:
        super().__enter__()
        self.wait_up()
        return self

    @property
    def shared(self) -> SharedStats:
        return self.peers[0]

    @property
    def space(self) -> NamespaceStats:
        return books(self.daemon.directory).namespaces[self.spec.fingerprint]

    def start_again(self) -> None:
        """Start the daemon, which has ended, and wait until all are connected."""
        self.daemon.start()
        assert self.engine.wait_ready(DEADLINE_S)
        self.wait_up()

    def store(self, first: int = 0, seed: int = 5) -> list[int]:
        """Store the blocks, and wait until they are written; returns their checksums."""
        written = self.shared.written_blocks
        sums = super().store(first, seed)
        wait_until(lambda: self.shared.written_blocks == written + BLOCKS, explain=lambda: self.shared)
        return sums

    def wait_unreachable(self) -> None:
        """Look up keys that nobody has until the store counts as unreachable: each is a miss."""
        more = itertools.count(10_000)

        def unreachable() -> bool:
            assert self.engine.lookup(keys(next(more))) == 0
            return not self.shared.up

        wait_until(unreachable)
        assert self.problems == ["shared_unreachable"]

    def reset_fleet(self) -> None:
        with AdminClient(self.daemon.directory) as admin:
            admin.reset_fleet(self.spec.fingerprint)


@pytest.fixture(scope="module")
def module_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(module_server: RedisServer) -> RedisServer:
    """An empty Redis that a test neither kills nor restricts."""
    module_server.command("FLUSHALL")
    return module_server


@pytest.fixture(scope="module")
def module_bucket() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture
def bucket(module_bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server of S3, empty, that a test may kill if it starts it again."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    module_bucket.flush()
    return module_bucket


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


# --- what is shared --------------------------------------------------------------------------------


def test_blocks_of_one_node_are_loaded_at_another(server: RedisServer) -> None:
    with StoreNode(server.url) as first:
        sums = first.store()
        with StoreNode(server.url) as second:
            assert second.engine.lookup(keys(*range(100, 500))) == 0
            wait_until(lambda: second.space.misses == {"unknown": 400}, explain=lambda: second.space)
            assert second.load(0) == sums
            found = second.space
            assert found.asked_keys == sum(found.found_keys.values()) + 400
            assert sum(found.misses.values()) == 400
            assert (second.shared.read_blocks, second.shared.mismatches) == (BLOCKS, 0)
            assert second.shared.written_blocks == 0, "what came from the store is not written there"
            asked = second.shared.asked_keys
            assert second.load(0) == sums
            assert second.shared.asked_keys == asked, "what the pool has is not asked for"
        with AdminClient(first.daemon.directory) as admin:
            assert admin.clear() == BLOCKS
        assert server.objects == BLOCKS, "clearing a node takes nothing from others"
    with StoreNode(server.url) as third:
        assert third.load(0) == sums, "when the first node is gone"


def test_prefetched_blocks_come_up_though_nobody_waits(server: RedisServer) -> None:
    with StoreNode(server.url) as node:
        sums = node.store()
    with StoreNode(server.url) as node:
        node.engine.scheduler.hint(HintAction.PREFETCH, [GroupKeys(0, b"".join(KEYS))])
        wait_until(lambda: node.space.ready_blocks == BLOCKS, explain=lambda: node.space)
        assert (node.space.prefetched_keys, node.shared.asked_keys) == (BLOCKS, BLOCKS)
        assert books(node.daemon.directory).pool.pinned_bytes == 0
        assert node.load(0) == sums
        assert node.shared.asked_keys == BLOCKS, "what the pool has is not asked for"


def test_of_two_stores_the_second_has_what_the_first_lost(server: RedisServer, own_server: RedisServer) -> None:
    url = f"{own_server.url},{server.url}"
    with StoreNode(url) as first:
        sums = first.store()
        wait_until(lambda: server.objects == BLOCKS)
    own_server.command("FLUSHALL")
    with StoreNode(url) as second:
        assert second.load(0) == sums
        assert [shared.read_blocks for shared in books(second.daemon.directory).shared] == [0, BLOCKS]
        own_server.kill()
        assert second.load(0) == sums


# --- resets ----------------------------------------------------------------------------------------


def test_a_reset_of_an_engine_holds_over_a_kill(server: RedisServer) -> None:
    """A node whose engine reset a namespace leaves the shared one, until the whole fleet is reset."""
    with StoreNode(server.url) as node:
        node.store()
        assert node.engine.scheduler.reset()
        asked = node.shared.asked_keys
        assert node.engine.lookup(KEYS) == 0
        node.engine.fill(range(BLOCKS), seed=6)
        assert node.engine.store(KEYS, range(BLOCKS)).ok
        assert node.load(0) == node.engine.checksums(range(BLOCKS))
        assert (node.shared.asked_keys, node.shared.written_blocks) == (asked, BLOCKS)
        node.daemon.kill()
        node.start_again()
        assert node.engine.lookup(KEYS) == 0
        assert (node.shared.asked_keys, node.shared.unshared_namespaces) == (0, 1)
        node.reset_fleet()
        wait_until(lambda: node.shared.unshared_namespaces == 0, explain=lambda: node.shared)


def test_a_reset_of_the_fleet_reaches_every_node(server: RedisServer, pool_file: Path) -> None:
    """Also one that was down, and kept its pool."""
    with (
        StoreNode(server.url) as first,
        StoreNode(server.url) as second,
        StoreNode(server.url, pool_file=str(pool_file)) as third,
    ):
        first.store()
        second.load(0)
        third.load(0)
        third.daemon.stop()
        first.reset_fleet()
        wait_until(lambda: second.space.ready_blocks == 0, DEADLINE_S, explain=lambda: second.space)
        assert second.engine.lookup(KEYS) == 0
        third.start_again()
        wait_until(lambda: books(third.daemon.directory).ready_blocks == 0, DEADLINE_S)
        assert third.engine.lookup(KEYS) == 0
        assert server.objects == BLOCKS + 1, "it wrote nothing stale under the new generation"
        sums = first.store(seed=6)
        assert second.load(0) == third.load(0) == sums, "what is stored since is shared again"


# --- faults ----------------------------------------------------------------------------------------


def assert_misses_in_time(node: StoreNode) -> None:
    """No lookup waits longer for a store than promised. None of the blocks comes from it."""
    for _ in range(20):
        started = time.monotonic()
        assert node.engine.lookup(KEYS) == 0
        assert time.monotonic() - started < 5 * ASK_DEADLINE_S
    assert node.shared.read_blocks == 0


def test_a_server_that_goes_away_is_a_miss_in_time(own_server: RedisServer) -> None:
    """One that stands still, and one that was killed. When it is back, so are the nodes."""
    with StoreNode(own_server.url) as first, StoreNode(own_server.url) as second:
        sums = first.store()
        for fault in ("stopped", "killed"):
            if fault == "stopped":
                own_server.signal(signal.SIGSTOP)
            else:
                own_server.kill()
            assert_misses_in_time(second)
            second.wait_unreachable()
            assert [server.up for server in second.shared.servers] == [False], fault
            if fault == "stopped":
                own_server.signal(signal.SIGCONT)
            else:
                own_server.start()
            first.wait_up()
            second.wait_up()
        assert first.load(0) == sums
        sums = first.store(seed=6, first=100)
        assert second.load(first=100) == sums


FAILING = {"tier_down", "tier_failed", "tier_late", "unanswered"}
"""Reasons of what a store that fails may have had."""


@pytest.mark.parametrize(
    "fault",
    ["standing still", "killed", *(pytest.param(fault, marks=pytest.mark.nightly) for fault in ("refusing", "slow"))],
)
def test_an_outage_is_the_reason_of_what_is_missed_meanwhile(own_server: RedisServer, fault: str) -> None:
    """Of keys that the store has and of others: in the line of each prompt and in the statistics, with its name."""
    with ExitStack() as stack:
        link = stack.enter_context(SlowLink(own_server.port))
        node = stack.enter_context(StoreNode(link.url if fault == "slow" else own_server.url))
        admin = stack.enter_context(AdminClient(node.daemon.directory))
        for first in range(0, 500, 100):
            node.store(first)
        node.clear()
        more = itertools.count()
        said_of_all: dict[str, Said] = {}

        def asked(its: list[bytes], patience_s: float = 10.0) -> tuple[Said, Counter[str]]:
            """What is said of a prompt, and its misses in the statistics."""
            before, name = Counter(node.space.misses), f"prompt {next(more)}."
            ask_for(node.engine.scheduler, name, its, patience_s)
            said_of_all[name] = said = wait_until(lambda: said_of(admin, name))
            return said, Counter(node.space.misses) - before

        if fault == "standing still":
            own_server.signal(signal.SIGSTOP)
        elif fault == "killed":
            own_server.kill()
        elif fault == "refusing":
            assert own_server.command("ACL", "SETUSER", "default", "-@all", "+acl") == b"+OK\r\n"
        else:
            link.bytes_per_second = 20.0
        url = node.shared.url
        for first in range(0, 400, 100):
            there, new = (keys(*range(at, at + BLOCKS)) for at in (first, first + 10_000))
            for its, patience_s in ((there, 10.0 * (first % 200 == 0)), (new, 10.0 * (first % 400 == 0))):
                said, misses = asked(its, patience_s)
                assert misses == {said.reason: len(its)}
                assert said.reason in FAILING
                assert said.tiers == [url]
        if fault != "slow":
            wait_until(lambda: not node.shared.up)
            before = node.shared.missed_keys
            said, misses = asked(keys(*range(400, 400 + BLOCKS)))
            assert (said.reason, misses) == ("tier_down", {"tier_down": BLOCKS})
            assert node.shared.missed_keys == before + BLOCKS
        lines = run_cli_here("clients", "--requests", "--directory", str(node.daemon.directory)).stdout
        for name, said in said_of_all.items():
            named = re.escape(f"({said.reason.replace('_', ' ')}: {url}).")
            assert re.search(f" {re.escape(name)} .* {named}", lines), lines
        shown = run_cli_here("stats", "--misses", "--directory", str(node.daemon.directory)).stdout
        assert re.search(rf"tier down +.*\n(.*\n)*.*{re.escape(url)}", shown), shown
        if fault == "standing still":
            own_server.signal(signal.SIGCONT)
        elif fault == "killed":
            own_server.start()
        elif fault == "refusing":
            assert own_server.command("ACL", "SETUSER", "default", "+@all") == b"+OK\r\n"
        else:
            link.bytes_per_second = None
        node.wait_up()
        wait_until(lambda: asked(keys(next(more) + 100_000))[0].reason == "unknown")


def test_bytes_that_changed_at_the_server_are_misses(server: RedisServer) -> None:
    """As are those that it lost."""
    with StoreNode(server.url) as first, StoreNode(server.url) as second:
        sums = first.store()
        for key in server.block_keys():
            assert server.command("SETRANGE", key, "30000", b"wrong bytes")[:1] == b":"
        assert_misses_in_time(second)
        # The first was enough: once its lookup was given up, the others are not read.
        wait_until(lambda: second.shared.mismatches > 0 == second.shared.queued_reads, explain=lambda: second.shared)
        found = second.shared.mismatches
        server.command("FLUSHALL")
        assert_misses_in_time(second)
        assert second.shared.mismatches == found <= BLOCKS
        assert first.load(0) == sums


def test_a_server_that_takes_no_writes_is_a_problem(own_server: RedisServer) -> None:
    with StoreNode(own_server.url) as node:
        assert own_server.command("ACL", "SETUSER", "default", "-set") == b"+OK\r\n"
        node.engine.fill(range(BLOCKS), seed=6)
        assert node.engine.store(KEYS, range(BLOCKS)).ok
        wait_until(lambda: node.problems == ["shared_refuses"], explain=lambda: node.problems)
        assert own_server.command("ACL", "SETUSER", "default", "+set") == b"+OK\r\n"
        more = itertools.count(BLOCKS)

        def over() -> bool:
            assert node.engine.store(keys(next(more)), [0]).ok
            return not node.problems

        wait_until(over, interval_s=0.5, explain=lambda: node.problems)


def test_a_full_store_gets_what_is_likely_to_come_back() -> None:
    spec = NamespaceSpec.named("chats", groups=[GroupSpec("full_attention", 16)], page_bytes=4096)
    with (
        RedisServer("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru") as server,
        DaemonProcess("1MiB", shared=server.url) as daemon,
        FakeEngine(daemon.directory, spec, page_bytes=4096, blocks=64) as engine,
    ):

        def now() -> SharedStats:
            return books(daemon.directory).shared[0]

        wait_until(lambda: now().up)
        for number, chain in enumerate(chat_among_single_requests(1, 2000)):
            wanted = keys(*chain)[:64]
            there = engine.lookup(wanted)
            assert engine.store(wanted[there:], range(len(wanted) - there)).ok
            if number % 20 == 0 and now().not_written.get("unlikely"):
                break
        assert (now().full, now().size_bytes, now().written_blocks > 200) == (True, 6 << 20, True)


def test_a_lost_server_of_a_cluster_is_named() -> None:
    with RedisCluster() as cluster, StoreNode(cluster.url) as node:
        assert [server.up for server in node.shared.servers] == [True] * 3
        cluster.servers[2].kill()

        def lost() -> bool:
            node.engine.lookup(keys(*range(100, 132)))
            return node.problems == ["shared_server"]

        wait_until(lost, explain=lambda: node.shared)
        shared, name = node.shared, f"127.0.0.1:{cluster.servers[2].port}"
        assert shared.up
        assert [server.name for server in shared.servers if server.problem] == [name]
        node.daemon.wait_log(f"{name} cannot be reached")


def test_blocks_are_shared_over_s3(bucket: S3Server) -> None:
    """And a server that was killed and came back empty serves again."""
    flags = {"shared_ask_deadline": "2s"}  # moto answers one request at a time
    with StoreNode(bucket.url, **flags) as first, StoreNode(bucket.url, **flags) as second:
        sums = first.store()
        assert second.load(0) == sums
        assert (second.shared.read_blocks, bucket.objects) == (BLOCKS, BLOCKS)
        bucket.kill()
        try:
            second.wait_unreachable()
            assert second.load(0) == sums, "from its pool"
        finally:
            bucket.start()
        first.wait_up()
        second.wait_up()
        sums = first.store(seed=6, first=100)
        assert second.load(first=100) == sums


def test_objects_that_the_bucket_deleted_are_read_once_and_computed(bucket: S3Server) -> None:
    """By a lifecycle rule, under a running daemon. S3 is not asked for each key, and promises one that is between."""
    with StoreNode(bucket.url, shared_ask_deadline="2s") as node:
        sums = node.store()
        node.clear()
        place = S3Store(BUCKET, endpoint=bucket.endpoint, region="us-east-1", client_options={"allow_http": True})
        gone = [KEYS[number].hex() for number in (3, 5)]
        obstore.delete(place, [path for path in paths_in(bucket) if path.endswith(tuple(gone))])
        assert bucket.objects == BLOCKS - 2
        # On a busy machine the lookup may end at the first of them, before the second is read.
        wait_until(lambda: node.engine.lookup(KEYS) == 3, explain=lambda: node.shared)
        found = node.shared.found_keys
        assert found >= BLOCKS, "S3 is not asked for each"
        for _ in range(5):
            assert node.engine.lookup(KEYS) == 3
        assert node.shared.found_keys == found, "nothing is promised again"
        assert node.shared.promotions_failed.keys() == {"gone"}
        assert node.shared.promotions_failed["gone"] <= 2, "each is read once"
        assert node.engine.store(KEYS, range(BLOCKS)).ok
        wait_until(lambda: bucket.objects == BLOCKS)
        node.clear()
        assert node.load(0) == sums


def paths_in(server: S3Server) -> list[str]:
    return re.findall("<Key>([^<]*)</Key>", server.request("GET", f"/{BUCKET}?list-type=2").decode())


@pytest.mark.parametrize("kind", ["disk", "redis", "s3"])
def test_engines_that_want_one_block_at_once_have_it_read_once(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As ranks do whose shards are equal (MLA at tensor parallel 4), which are stored once."""
    with ExitStack() as stack:
        if kind == "disk":
            flags = {"disk": f"{tmp_path}=64MiB", "disk_write": "always"}
        else:
            url = request.getfixturevalue("server" if kind == "redis" else "bucket").url
            flags = {"shared": url, "shared_write": "always", "shared_ask_deadline": "2s"}
        daemon = stack.enter_context(DaemonProcess("16MiB", **flags))
        ranks = [stack.enter_context(FakeEngine(daemon.directory, "mla", blocks=2 * BLOCKS)) for _ in range(4)]
        ranks[0].fill(range(BLOCKS), seed=1)

        def counts() -> tuple[int, int, int]:
            """Blocks written and read, and bytes read without the headers of a disk's blocks."""
            found = books(daemon.directory)
            if kind != "disk":
                (shared,) = found.said.shared
                return shared.written_blocks, shared.read_blocks, shared.read_bytes
            promoted = found.tiers.promoted_blocks
            return found.tiers.written_blocks, promoted, found.disks[0].read_bytes - 4096 * promoted

        def is_up() -> bool:
            found = books(daemon.directory)
            return all(one.up for one in found.said.shared) and all(one.state == "serving" for one in found.disks)

        wait_until(is_up)
        assert ranks[0].store(KEYS, range(BLOCKS)).ok
        wait_until(lambda: counts()[0] == BLOCKS, explain=counts)
        for first in range(1000, 1512, BLOCKS):  # pushes them out of the pool
            ranks[0].fill(range(BLOCKS), seed=first)
            assert ranks[0].store(keys(*range(first, first + BLOCKS)), range(BLOCKS)).ok
            wait_until(lambda: not books(daemon.directory).tiers.writes_waiting)
        _, blocks, nbytes = counts()
        with ThreadPoolExecutor(len(ranks)) as threads:
            assert list(threads.map(lambda one: one.lookup(KEYS), ranks)) == [BLOCKS] * 4
        assert all(one.load(KEYS, range(BLOCKS, 2 * BLOCKS)).ok for one in ranks)
        assert len({tuple(one.checksums(range(BLOCKS, 2 * BLOCKS))) for one in ranks}) == 1
        shard_bytes = ranks[0].layers * ranks[0].page_bytes
        assert counts()[1:] == (blocks + BLOCKS, nbytes + BLOCKS * shard_bytes)
