"""What a node asks of many others: bounded, however many there are, and of those that a name has now."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, GroupSpec, NamespaceSpec, RequestRefused
from kvoffd_client.testing import FakeEngine
from tests.kit.answering_nodes import AnsweringNodes
from tests.kit.command import command
from tests.kit.counted_link import CountedLink
from tests.kit.hosts import Hosts
from tests.kit.peer_node import BLOCKS, DEADLINE_S, PAGE_BYTES, Node
from tests.kit.ports import free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.s3_server import BUCKET, S3Server
from tests.kit.waiting import wait_until
from tests.kit.wire import keys

pytestmark = pytest.mark.usefixtures("nixl")

FLEET, CONNECTED, NAMESPACES = 1000, 8, 10
IDLE_MESSAGES_PER_S = 20.0
"""Promised for an idle node of such a fleet: to its stores and peers, answers included."""
HEARD_S = 5.0
"""Promised time in which nodes that are connected hear of a clear of all nodes."""
NAME = "engines.test"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret for tests\n")
    return path


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path / "hosts")


@pytest.fixture
def node(secret: Path) -> Iterator[Callable[..., Node]]:
    with ExitStack() as stack:

        def started(address: str, *peers: str, hosts: Hosts | None = None, **flags: object) -> Node:
            file = hosts.path if hosts is not None else None
            return stack.enter_context(
                Node(secret, address, *peers, hosts=file, limits={"resolve_s": 0.2}, **flags)  # type: ignore[arg-type]
            )

        yield started


def open_namespaces(stack: ExitStack, one: Node, count: int) -> list[FakeEngine]:
    """Open namespaces on a node, and store a block in each: it is idle, and has them."""
    engines = []
    for number in range(count):
        spec = NamespaceSpec.named(f"fleet-{number}", groups=[GroupSpec("full_attention", 16)], page_bytes=PAGE_BYTES)
        engine = FakeEngine(one.daemon.directory, spec, page_bytes=PAGE_BYTES, blocks=BLOCKS)
        stack.callback(engine.close)
        assert engine.store(keys(number), [0]).ok
        engines.append(engine)
    return engines


def connected(one: Node) -> int:
    return sum(peer.up and peer.url.startswith("peer://") for peer in one.peers)


def test_an_idle_node_of_a_thousand_sends_few_messages(
    node: Callable[..., Node], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes are each other's thousand: each is connected to eight of these, and eight are connected to it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    hosts.set(NAME, (f"127.1.{number // 250}.{number % 250 + 1}" for number in range(FLEET)))
    lends, other_lends, at, other_at = free_ports(4)
    with ExitStack() as stack:
        redis, bucket = stack.enter_context(RedisServer()), stack.enter_context(S3Server())
        port_of = [int(url.rpartition(":")[2].partition("/")[0]) for url in (redis.url, bucket.endpoint)]
        to_redis, to_bucket = (stack.enter_context(CountedLink(port)) for port in port_of)
        to_node = stack.enter_context(CountedLink(lends, "0.0.0.0", at))
        to_other = stack.enter_context(CountedLink(other_lends, "0.0.0.0", other_at))
        shared = [
            f"redis://127.0.0.1:{to_redis.port}",
            f"s3://{BUCKET}?endpoint=http://127.0.0.1:{to_bucket.port}&region=us-east-1",
        ]
        one = node(f"127.0.0.1:{lends}", f"dns+{NAME}:{other_at}", hosts=hosts, shared=",".join(shared))
        other = node(f"127.0.0.1:{other_lends}", f"dns+{NAME}:{at}", hosts=hosts)
        for each in (one, other):
            open_namespaces(stack, each, NAMESPACES - 1)
            wait_until(lambda: connected(each) == CONNECTED, DEADLINE_S, explain=lambda: each.peers)  # noqa: B023
        wait_until(lambda: all(peer.up for peer in one.peers), DEADLINE_S, explain=lambda: one.peers)
        sent = {
            "to Redis": to_redis.asked,
            "to S3": to_bucket.asked,
            "to peers": to_other.asked,
            "answers to peers": to_node.answered,
        }
        began, before = time.monotonic(), {name: (one.messages, one.nbytes) for name, one in sent.items()}
        asked = to_redis.asked.messages
        wait_until(lambda: to_redis.asked.messages >= asked + 4, DEADLINE_S)  # two polls of each
        seconds = time.monotonic() - began
        counts = {name: one.messages - before[name][0] for name, one in sent.items()}
        nbytes = {name: one.nbytes - before[name][1] for name, one in sent.items()}
        print(f"{seconds:.1f} s: {counts}, {nbytes} bytes; {sum(counts.values()) / seconds:.1f} messages a second")
        assert min(counts["to peers"], counts["answers to peers"]) >= CONNECTED, "it is asked and asks"
        assert sum(counts.values()) <= IDLE_MESSAGES_PER_S * seconds


def test_nodes_behind_a_name_are_used_as_they_come_and_go(node: Callable[..., Node], hosts: Hosts) -> None:
    (port,) = free_ports(1)
    hosts.set(NAME, [])
    reader = node("", f"dns+{NAME}:{port}", hosts=hosts)
    wait_until(lambda: reader.problems == ["shared_unreachable"], DEADLINE_S)
    with AdminClient(reader.daemon.directory) as admin, pytest.raises(RequestRefused, match="its nodes are not known"):
        admin.reset_fleet(NamespaceSpec.named("another").fingerprint)
    lenders = [node(f"127.0.0.{number}:{port}") for number in (1, 2)]
    for turn, there in enumerate(([0], [0, 1], [1])):
        hosts.set(NAME, (f"127.0.0.{1 + number}" for number in there))
        if 0 not in there:
            lenders[0].daemon.kill()
        wait_until(
            lambda there=there: (
                {peer.url for peer in reader.peers if peer.up}  # type: ignore[misc]
                == {f"peer://127.0.0.{1 + number}:{port}" for number in there}
            ),
            DEADLINE_S,
            explain=lambda: reader.peers,
        )
        for number in there:
            stored = lenders[number].store(1000 * turn + 100 * number, turn)
            assert reader.load(1000 * turn + 100 * number) == stored
        assert reader.problems == []
    reader.clear_all_nodes()
    assert lenders[1].engine.lookup(keys(2100)) == 0


def test_a_clear_of_all_nodes_reaches_every_node_behind_a_name_or_names_those_that_it_did_not(
    node: Callable[..., Node], hosts: Hosts, secret: Path
) -> None:
    """Also those that are not connected, of which this fleet has nine at a time."""
    (port,) = free_ports(1)
    answering = [f"127.0.2.{number}" for number in range(1, 14)]
    real = [node(f"127.0.0.{number}:{port}") for number in (2, 3, 4)]
    clearing = node(f"127.0.0.1:{port}", f"dns+{NAME}:{port}", hosts=hosts)
    every = ["127.0.0.1", *(one.address.rpartition(":")[0] for one in real), *answering]
    hosts.set(NAME, every)
    with AnsweringNodes(secret.read_bytes().strip(), [f"{one}:{port}" for one in answering]) as others:
        for number, one in enumerate(real):
            wait_until(lambda: one.lends, DEADLINE_S)  # noqa: B023
            one.store(0, number)
        clearing.clear_all_nodes()
        assert [one.engine.lookup(keys(0)) for one in real] == [0, 0, 0], "they have cleared when it is answered"
        assert {one.rpartition(":")[0] for one in others.asked} == set(answering)

        real[1].store(0, 1)
        real[2].daemon.kill()
        os.kill(real[1].daemon.pid, signal.SIGSTOP)
        try:
            name = clearing.spec.fingerprint.hex()
            status, said = command(clearing.daemon, "clear", name, "--all-nodes", "--yes")
        finally:
            os.kill(real[1].daemon.pid, signal.SIGCONT)
        assert status == 2
        assert f"2 of its {len(every) - 1} nodes have not cleared:" in said
        assert all(f"{one.address} (" in said for one in real[1:])
        assert real[0].address not in said

        real[2].restart()
        wait_until(lambda: all(one.lends for one in real), DEADLINE_S)
        clearing.clear_all_nodes()
        assert real[1].engine.lookup(keys(0)) == 0


def test_a_peer_whose_name_gets_another_address_is_found_there(node: Callable[..., Node], hosts: Hosts) -> None:
    """As of a pod that is started again."""
    (port,) = free_ports(1)
    hosts.set(NAME, ["127.0.0.1"])
    reader, before = node("", f"{NAME}:{port}", hosts=hosts), node(f"127.0.0.1:{port}")
    stored = before.store(0, 1)
    assert reader.load(0) == stored
    before.daemon.kill()
    hosts.set(NAME, ["127.0.0.2"])
    stored = node(f"127.0.0.2:{port}").store(100, 2)
    assert reader.load(100) == stored


def test_a_node_that_names_its_own_name_leaves_itself_out(node: Callable[..., Node], hosts: Hosts) -> None:
    (port,) = free_ports(1)
    hosts.set(NAME, ["127.0.0.1", "127.0.0.2"])
    left, right = (node(f"127.0.0.{number}:{port}", f"dns+{NAME}:{port}", hosts=hosts) for number in (1, 2))
    for one, other in ((left, right), (right, left)):
        wait_until(lambda: connected(one) == 1, DEADLINE_S, explain=lambda: one.peers)  # noqa: B023
        assert [peer.url for peer in one.peers] == [f"peer://{other.address}"]
    stored = left.store(0, 1)
    assert right.load(0) == stored


def test_what_a_peer_has_does_not_wait_for_one_that_does_not_answer(node: Callable[..., Node]) -> None:
    """They are asked at once, and the first answer is taken."""
    dark_at, good_at = (f"127.0.0.1:{port}" for port in free_ports(2))
    dark, good = node(dark_at), node(good_at)
    reader = node("", dark_at, good_at, shared_ask_deadline=f"{10 * DEADLINE_S:.0f}s")
    reader.wait_up()
    stored = good.store(0, 1)
    os.kill(helper := dark.wait_helper(), signal.SIGSTOP)
    try:
        assert reader.load(0) == stored
    finally:
        with suppress(ProcessLookupError):
            os.kill(helper, signal.SIGCONT)


def test_a_clear_reaches_nodes_that_were_not_told_over_one_that_has_no_such_namespace(
    node: Callable[..., Node],
) -> None:
    """As in a fleet of which each node knows a few."""
    first, second, third = (f"127.0.0.1:{port}" for port in free_ports(3))
    last = node(third)
    middle = node(second, third)
    cleared = node(first, second)
    middle.engine.close()
    middle.clear()  # forgets the namespace, which nobody has open
    for one in (middle, cleared):
        one.wait_up()
    last.store(0, 1)
    cleared.clear_all_nodes()
    wait_until(lambda: last.engine.lookup(keys(0)) == 0, 5 * HEARD_S)
    anew = last.store(0, 2)
    assert last.load(0) == anew
    assert last.most_found(0, 1.0) == BLOCKS, "it is dropped once"
