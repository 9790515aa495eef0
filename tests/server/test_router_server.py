"""KV events for routers over TCP, read by libzmq as routers read them."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest
import zmq

from kvoffd.server.router_index import BLOCK_BYTES
from kvoffd.server.router_server import MAX_PEERS
from kvoffd_client.admin_client import AdminClient
from kvoffd_proto import messages as m
from kvoffd_proto import zmtp
from kvoffd_proto.messages import WANTS_TOKENS, RouterStats
from tests.chaos.footprint import Footprint
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port, free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.router_daemon import BLOCK_TOKENS, PromptEngine, Subscriber, replay, router_daemon
from tests.kit.struct_wire import WireClient
from tests.kit.waiting import wait_until

PROMPT = list(range(1000, 1000 + 4 * BLOCK_TOKENS))


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[DaemonProcess, int, int]]:
    with router_daemon() as found:
        yield found


@pytest.fixture
def engine(serving: tuple[DaemonProcess, int, int]) -> Iterator[PromptEngine]:
    with PromptEngine(serving[0]) as engine:
        engine.reset()
        yield engine


def router_stats(daemon: DaemonProcess) -> RouterStats:
    with AdminClient(str(daemon.directory)) as admin:
        found = admin.stats().routers
    assert found is not None
    return found


def test_a_subscriber_of_all_topics_gets_stores_and_evictions_without_gaps(serving, engine) -> None:
    _, port, _ = serving
    with Subscriber(port) as router:
        assert router.take_one(), "a heartbeat, or what clears a router's index"
        engine.store(PROMPT)
        router.take_until({1, 2, 3, 4})
        assert router.blocks["CPU", 1] == (None, tuple(PROMPT[:BLOCK_TOKENS]))
        assert router.blocks["CPU", 3] == (2, tuple(PROMPT[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS]))
        engine.invalidate(4)
        router.take_until({1, 2, 3})
        engine.invalidate(2)
        router.take_until({1})
        assert engine.held() == {1, 3}, "3 is there, and no router can use it without 2"
        engine.store(PROMPT, first=1)
        router.take_until({1, 2, 3, 4})
        engine.reset()
        router.take_until(set())
        assert set(router.topics) == {b""}


def test_what_is_loaded_is_told_and_so_is_what_was_stored_behind_it(serving, engine) -> None:
    _, port, _ = serving
    with Subscriber(port) as router:
        assert router.take_one()
        engine.store(PROMPT[: 2 * BLOCK_TOKENS], tells=False)
        engine.store(PROMPT, first=2)
        engine.load(PROMPT[: 2 * BLOCK_TOKENS], tells=False)
        engine.load(PROMPT[: 2 * BLOCK_TOKENS], first=1)
        router.take_one()
        assert router.blocks == {}, "of the first one nobody knows the tokens"
        engine.load(PROMPT[: 2 * BLOCK_TOKENS])
        router.take_until({1, 2, 3, 4})
        assert router.blocks["CPU", 2] == (1, tuple(PROMPT[BLOCK_TOKENS : 2 * BLOCK_TOKENS]))


def test_a_star_is_all_interfaces() -> None:
    ports = free_ports(2)
    flags = dict(zip(("event_address", "event_replay_address"), [f"*:{port}" for port in ports], strict=True))
    with DaemonProcess(**flags):
        for port in ports:
            socket.create_connection(("127.0.0.2", port), 5.0).close()


def test_blocks_that_an_earlier_daemon_left_are_told_once_they_are_loaded(pool_file: Path) -> None:
    with router_daemon(pool_file=str(pool_file)) as (daemon, port, _):
        with PromptEngine(daemon) as engine:
            engine.store(PROMPT)
            keys = engine.keys
        daemon.stop()
        daemon.start()
        with PromptEngine(daemon, keys=keys) as engine, Subscriber(port) as router:
            assert engine.held() == {1, 2, 3, 4}
            assert router.take_one()
            assert router.blocks == {}
            engine.load(PROMPT)
            router.take_until({1, 2, 3, 4})


def test_blocks_of_another_node_are_told_once_they_are_loaded_and_so_are_those_behind_them() -> None:
    with RedisServer() as redis, ExitStack() as running:
        flags = {"shared": redis.url, "shared_write": "always"}
        first, _, _ = running.enter_context(router_daemon("first", **flags))
        second, port, _ = running.enter_context(router_daemon("second", **flags))
        with PromptEngine(first) as engine:
            engine.store(PROMPT)
            wait_until(lambda: redis.objects >= 4, 10.0)
        with AdminClient(str(second.directory)) as admin:
            wait_until(lambda: admin.stats().shared[0].reachable, 10.0)
        router = running.enter_context(Subscriber(port))
        there = running.enter_context(PromptEngine(second, keys=engine.keys))
        assert router.take_one()
        longer = [*PROMPT, *range(BLOCK_TOKENS)]
        there.load(PROMPT)
        there.store(longer, first=4)
        router.take_until({1, 2, 3, 4, 5})
        assert router_stats(second).untold_blocks == 4, "as they came"


def test_a_namespace_that_is_forgotten_takes_no_memory_any_more() -> None:
    with router_daemon() as (daemon, _, _):
        with PromptEngine(daemon) as engine:
            name = engine.fingerprint
            engine.store(PROMPT)
            engine.invalidate(*engine.chain(PROMPT))
            assert router_stats(daemon).index_bytes == BLOCK_BYTES, "the beginning of all prompts"
        with WireClient(daemon.directory) as other:  # what is empty and not open gives its name to another geometry
            groups = [m.GroupSpec("full_attention", BLOCK_TOKENS)]
            other.ask(m.OpenNamespace, name, "", 1, 64, groups, "{}")
            assert router_stats(daemon).index_bytes == 0


def test_who_subscribes_to_topics_gets_them_and_only_them(serving, engine) -> None:
    _, port, _ = serving
    with Subscriber(port, b"kv@") as router, Subscriber(port, b"kv@node:node-a@other") as other:
        assert router.take_one()
        assert other.take_one()
        engine.store(PROMPT)
        router.take_until({1, 2, 3, 4})
        assert b"kv@node:node-a@model" in router.topics
        while other.numbers[-1] < router.numbers[-1]:
            assert other.take_one()
        assert (other.blocks, set(other.topics)) == ({}, {b"kv@node:node-a@other"})
        # It may know what an earlier daemon had there.
        wait_until(lambda: other.take_one() and bool(other.events), 5.0)
        assert [event["type"] for event in other.events] == ["AllBlocksCleared"]


def test_who_comes_late_is_told_all_and_others_see_no_gap(serving, engine) -> None:
    daemon, port, _ = serving
    with Subscriber(port) as early:
        assert early.take_one()
        prompts = [[number, *PROMPT] for number in range(20)]
        for prompt in prompts:
            engine.store(prompt)
        everything = {number for prompt in prompts for number in engine.chain(prompt)}
        early.take_until(everything)
        before = early.blocks
        snapshots = router_stats(daemon).snapshots
        with Subscriber(port, b"kv@") as late:
            late.take_until(everything)
            assert late.blocks == before
            assert late.events[0]["type"] == "AllBlocksCleared"
            while early.numbers[-1] < late.numbers[-1]:
                assert early.take_one()
        assert (early.blocks, router_stats(daemon).snapshots) == (before, snapshots + 1)
        assert router_stats(daemon).told_blocks == len(everything)


def test_what_was_missed_is_replayed_and_what_is_not_kept_is_not(serving, engine) -> None:
    _, port, replay_port = serving
    with Subscriber(port) as router:
        assert router.take_one()
        engine.store(PROMPT)
        router.take_until({1, 2, 3, 4})
        first, last = router.numbers[0], router.numbers[-1]
        found = replay(f"tcp://127.0.0.1:{replay_port}", first)
        assert [number for _, number, _ in found][: last - first + 1] == list(range(first, last + 1))
        assert {topic for topic, _, _ in found} == {b""}
        folded = dict(router.blocks)
        router.blocks.clear()
        for _, _, payload in found:
            router.fold(payload)
        assert router.blocks == folded
    assert replay(f"tcp://127.0.0.1:{replay_port}", 0) == []
    assert replay(f"tcp://127.0.0.1:{replay_port}", last + 10**9) == []


def test_a_router_that_listens_is_connected_to_when_it_comes_and_again_when_it_comes_back() -> None:
    port = free_port()
    with DaemonProcess(event_connect=f"127.0.0.1:{port}", event_node="far", event_heartbeat="0.2s") as daemon:
        with PromptEngine(daemon) as engine:
            engine.store(PROMPT)
            for _ in range(2):
                with Subscriber(port, b"kv@", listens=True) as router:
                    router.take_until({1, 2, 3, 4})
                    assert b"kv@node:far@model" in router.topics
            assert "No router at" in daemon.log


def test_numbers_go_on_after_a_restart_so_that_a_subscriber_sees_a_gap() -> None:
    with router_daemon() as (daemon, port, _):
        with Subscriber(port) as router:
            assert router.take_one()
            before = router.numbers[-1]
        daemon.stop()
        daemon.start()
        with Subscriber(port) as router:
            assert router.take_one()
            assert router.numbers[0] > before + 1


def test_what_is_no_zeromq_and_what_asks_for_too_much_is_disconnected(serving, engine) -> None:
    daemon, port, replay_port = serving
    context = zmq.Context()
    with Subscriber(port) as router:
        assert router.take_one()
        dropped = router_stats(daemon).dropped_subscribers
        for number in (port, replay_port):
            with socket.create_connection(("127.0.0.1", number), timeout=5) as stream:
                stream.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(80))
                while stream.recv(4096):
                    pass
        greedy = context.socket(zmq.SUB)
        for number in range(100):
            greedy.setsockopt(zmq.SUBSCRIBE, b"%d" % number)
        greedy.connect(f"tcp://127.0.0.1:{port}")
        wait_until(lambda: router_stats(daemon).dropped_subscribers >= dropped + 3)
        context.destroy(linger=0)
        engine.store(PROMPT)
        router.take_until({1, 2, 3, 4})


FLOODS = {
    "pings": ("event", zmtp.encode_command(b"PING", b"\0\0" + b"x" * 16)),
    "subscriptions": ("event", zmtp.encode([b"\x01a"]) + zmtp.encode([b"\x00a"])),
    "replays": ("replay", zmtp.encode([b"", bytes(8)])),
    "messages of no bytes": ("event", zmtp.encode_command(b"CANCEL", b"")),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_peer_that_floods_and_never_reads_takes_neither_the_loop_nor_memory(serving, engine, flood: str) -> None:
    daemon, *ports = serving
    of, message = FLOODS[flood]
    engine.store(PROMPT)
    with Subscriber(ports[0]) as router, socket.socket() as hostile:
        router.take_until({1, 2, 3, 4})
        dropped, replays = router_stats(daemon).dropped_subscribers, router_stats(daemon).replays
        began = time.monotonic()
        hostile.connect(("127.0.0.1", ports[of == "replay"]))
        hostile.sendall(zmtp.opening(b"SUB" if of == "event" else b"DEALER"))
        hostile.setblocking(False)
        sent, before = 0, Footprint.of(daemon.process.pid).anonymous_bytes
        parts = message * 4000
        times = []
        while len(times) < 30:  # what is not read fills the buffers between them, and no more
            try:
                while True:
                    sent += hostile.send(parts[sent % len(message) :])
            except BlockingIOError:
                pass
            started = time.monotonic()
            engine.held()
            times.append(time.monotonic() - started)
        assert median(times) < 2.5
        assert Footprint.of(daemon.process.pid).anonymous_bytes - before < 16 << 20
        engine.invalidate(4)
        router.take_until({1, 2, 3})
        if flood == "replays":
            assert router_stats(daemon).replays - replays <= 5 + 15 * (time.monotonic() - began), "ten a second"
        if flood == "pings":
            wait_until(lambda: router_stats(daemon).dropped_subscribers > dropped, 30.0)


def test_a_connection_without_a_handshake_gives_its_place_to_a_newcomer(serving, engine) -> None:
    _, port, _ = serving
    with ExitStack() as stack:
        for _ in range(MAX_PEERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        router = stack.enter_context(Subscriber(port))
        engine.store(PROMPT)
        router.take_until({1, 2, 3, 4})


def test_who_has_the_most_connections_gives_a_place_to_another_host_and_none_to_its_own() -> None:
    """Also where IPv4 comes over a socket of IPv6."""
    with router_daemon(host="*") as (daemon, port, _), ExitStack() as stack:

        def subscribe(host: str) -> socket.socket:
            stream = socket.create_connection(("127.0.0.1", port), 5, source_address=(host, 0))
            stream.sendall(zmtp.opening(b"SUB") + zmtp.encode([b"\1"]))
            return stack.enter_context(stream)

        def ended(stream: socket.socket) -> bool:
            stream.settimeout(0)
            try:
                while stream.recv(65536):
                    pass
            except BlockingIOError:
                return False
            except ConnectionError:
                pass
            return True

        greedy = [subscribe("127.0.0.1") for _ in range(MAX_PEERS)]
        wait_until(lambda: router_stats(daemon).subscribers == MAX_PEERS)
        polite = subscribe("127.0.0.2")
        wait_until(lambda: ended(greedy[0]))
        assert router_stats(daemon).subscribers == MAX_PEERS
        late = subscribe("127.0.0.1")
        wait_until(lambda: ended(late))
        assert not any(map(ended, [polite, *greedy[1:]]))


def test_engines_are_asked_for_tokens_only_where_there_are_routers(serving, shared_daemon) -> None:
    with PromptEngine(serving[0]) as engine:
        assert WANTS_TOKENS in engine.capabilities
    with PromptEngine(shared_daemon) as engine:
        assert WANTS_TOKENS not in engine.capabilities
        engine.store(PROMPT)
    with AdminClient(str(shared_daemon.directory)) as admin:
        assert admin.stats().routers is None


def test_an_address_that_is_taken_stops_the_start_with_a_sentence() -> None:
    with router_daemon() as (_, port, _):
        second = DaemonProcess(event_address=f"127.0.0.1:{port}").start(wait=False)
        assert second.process.wait(30) == 2
        assert re.search(r"KV events cannot be served at 127.0.0.1:\d+ \(.+\); free the address", second.log)
        second.close()
