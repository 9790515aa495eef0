"""Nodes that read each other's pools over NIXL: right bytes; misses where an end is killed, stopped or wrong.

At night also in network namespaces, with cut and slow links: no wrong byte, no pin left, and soon back.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, RequestRefused
from tests.kit import sandbox
from tests.kit.amount import TIMES
from tests.kit.command import command, run_cli_here
from tests.kit.network import Network
from tests.kit.peer_node import BLOCKS, DEADLINE_S, Node
from tests.kit.ports import free_ports
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import KvSubscriber, books, keys

pytestmark = pytest.mark.usefixtures("nixl")

KILLS = 4 * TIMES
NAMED = 8
"""Peers of networks that are connected at once."""


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peers") / "secret"
    path.write_text("a secret for tests\n")
    return path


@pytest.fixture(scope="module")
def module_nodes(secret: Path) -> Iterator[tuple[Node, Node]]:
    one, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    with Node(secret, one, other) as left, Node(secret, other, one) as right:
        yield left, right


@pytest.fixture
def nodes(module_nodes: tuple[Node, Node]) -> tuple[Node, Node]:
    """The module's nodes, each of which has the other, without blocks."""
    for node in module_nodes:
        node.wait_up()
    clear_once_reached(module_nodes[0])
    return module_nodes


def clear_once_reached(node: Node) -> None:
    """Clear all nodes. One that is not back yet, or takes long, follows later, and drops what was stored until then."""

    def cleared() -> bool:
        with suppress(RequestRefused):
            node.clear_all_nodes()
            return True
        return False

    wait_until(cleared, DEADLINE_S)


@pytest.mark.parametrize("page_bytes", [4096, 1 << 20])
def test_both_load_what_the_other_stored(secret: Path, page_bytes: int) -> None:
    one, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    with (
        Node(secret, one, other, page_bytes=page_bytes) as left,
        Node(secret, other, one, page_bytes=page_bytes) as right,
    ):
        stored = left.store(0, 1), right.store(100, 2)
        assert (right.load(0), left.load(100)) == stored
        assert right.peer.read_blocks == left.peer.read_blocks == BLOCKS
        assert right.peer.promotions_failed == left.peer.promotions_failed == {}
        assert (right.problems, left.problems) == ([], [])
        lent = books(left.daemon.directory).said.lent
        assert lent is not None
        assert (lent.up, lent.blocks) == (True, BLOCKS)
        assert page_bytes > 4096 or not lent.refused_requests, "large blocks are more than may be lent at once"
        assert (lent.bytes, lent.found_keys >= BLOCKS) == (right.peer.read_bytes, True)
        shown = run_cli_here("stats", "tiers", "--directory", str(left.daemon.directory)).stdout
        assert f"lent to peers: {BLOCKS} blocks" in shown
        assert f"peer://{right.address}: up" in shown
        wait_until(lambda: not any(books(node.daemon.directory).said.pinned_blocks for node in (left, right)))


def test_kills_of_either_end_cost_misses_and_no_wrong_byte(nodes: tuple[Node, Node]) -> None:
    rng = random.Random(5)
    left, right = nodes
    for turn in range(KILLS):
        stored = left.store(turn * BLOCKS, turn)
        victim = rng.choice([left, right])
        right.engine.lookup(keys(*range(turn * BLOCKS, (turn + 1) * BLOCKS)))
        if rng.random() < 0.2:
            victim.restart()
            stored = left.store(turn * BLOCKS, turn)
        else:
            victim.kill_helper()
        assert right.load(turn * BLOCKS) == stored
        assert left.daemon.running
        assert right.daemon.running
    assert right.peer.mismatches == 0
    wait_until(lambda: not books(left.daemon.directory).said.pinned_blocks, DEADLINE_S)


def test_a_peer_that_is_started_again_with_another_pool_is_read_again(nodes: tuple[Node, Node]) -> None:
    left, right = nodes
    stored = left.store(0, 1)
    assert right.load(0) == stored
    left.daemon.kill()
    assert right.engine.lookup(keys(*range(50, 58))) == 0
    left.daemon.start()
    assert left.engine.wait_ready(DEADLINE_S)
    stored = left.store(200, 3)
    assert right.load(200) == stored
    assert right.peer.mismatches == 0


def test_a_peer_that_is_stopped_is_dark_and_comes_back(nodes: tuple[Node, Node]) -> None:
    left, right = nodes
    stored = left.store(0, 1)
    helper = left.wait_helper()
    os.kill(helper, signal.SIGSTOP)
    try:
        wait_until(lambda: right.engine.lookup(keys(*range(BLOCKS))) == 0 and not right.peer.up, DEADLINE_S)
        assert right.problems == ["shared_unreachable"]
        own = right.store(300, 9)
        assert right.load(300) == own
    finally:
        with suppress(ProcessLookupError):  # one that hangs is killed
            os.kill(helper, signal.SIGCONT)
    assert right.load(0) == stored
    wait_until(lambda: not right.problems, DEADLINE_S)


def test_another_secret_is_no_peer(secret: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "other").write_text("another secret of tests")
    at = f"127.0.0.1:{port}"
    with Node(secret, at) as left, Node(tmp_path / "other", "", at) as right:
        left.store(0, 1)
        wait_until(lambda: bool(right.peer.errors.get("unreachable")), DEADLINE_S, explain=lambda: right.peer)
        assert not right.peer.up
        assert right.engine.lookup(keys(*range(BLOCKS))) == 0


def test_after_a_reset_on_one_side_it_lends_nothing_until_it_is_cleared_on_all_nodes(nodes: tuple[Node, Node]) -> None:
    """What an engine reset may be stale on the other side, and what it stores then is for other weights."""
    left, right = nodes
    stored = left.store(0, 1)
    right.engine.lookup(keys(*range(BLOCKS)))
    assert left.engine.scheduler.reset()
    left.store(0, 2)
    left.store(400, 5)
    if (there := right.engine.lookup(keys(*range(BLOCKS)))) == BLOCKS:  # they were on their way before
        assert right.load(0) == stored
    assert there in range(BLOCKS + 1)
    assert right.engine.lookup(keys(*range(400, 400 + BLOCKS))) == 0
    right.store(500, 6)
    assert left.engine.lookup(keys(*range(500, 500 + BLOCKS))) == 0
    left.clear()
    assert left.engine.lookup(keys(*range(500, 500 + BLOCKS))) == 0
    left.clear_all_nodes()
    assert left.most_found(500, 2.0) == right.most_found(0, 2.0) == 0, "both have dropped what was there"
    stored = left.store(600, 7)
    assert right.load(600) == stored


def test_what_was_cleared_on_all_nodes_does_not_come_back_from_a_peer(nodes: tuple[Node, Node]) -> None:
    """Promise 9. Without --all-nodes a peer's blocks are found, as a store's are."""
    left, right = nodes
    stored = left.store(0, 1)
    assert right.load(0) == stored
    left.clear()
    assert left.load(0) == stored
    left.clear_all_nodes()
    assert left.most_found(0, 2.0) == 0
    assert right.most_found(0, 2.0) == 0
    anew = right.store(0, 2)
    assert left.load(0) == anew


def test_a_clear_of_all_nodes_resets_each_node_once(nodes: tuple[Node, Node]) -> None:
    left, right = nodes
    left.store(0, 1)
    right.load(0)
    heard = [KvSubscriber(node.daemon.directory) for node in nodes]
    with heard[0], heard[1]:
        status, output = command(left.daemon, "clear", "peers", "--all-nodes", "--yes")
        assert (status, f"Dropped {BLOCKS} blocks " in output) == (0, True), output
        assert left.most_found(0, 2.0) == right.most_found(0, 2.0) == 0
        for one in heard:
            kinds = [event.kind for message in one.messages() for event in message.events]
            assert kinds.count("cleared") == 1


def test_what_is_stored_after_a_clear_of_all_nodes_stays(secret: Path) -> None:
    """Also where peers hear of it from each other before they are asked to follow."""
    at = [f"127.0.0.1:{port}" for port in free_ports(3)]
    with ExitStack() as stack:
        nodes = [stack.enter_context(Node(secret, one, *(each for each in at if each != one))) for one in at]
        for node in nodes:
            node.wait_up()
            node.store(0, 1)
        for turn in range(4):
            nodes[0].clear_all_nodes()
            stored = nodes[0].store(100, turn)
            assert nodes[1].load(100) == nodes[2].load(100) == stored


def test_a_clear_from_before_a_reset_shares_nothing_again(secret: Path) -> None:
    """Though it is heard of only after it."""
    at = f"127.0.0.1:{free_ports(1)[0]}"
    with Node(secret, at) as left, Node(secret, "", at) as right:
        right.wait_up()
        left.store(0, 1)
        right.load(0)
        helper = right.wait_helper()
        os.kill(helper, signal.SIGSTOP)
        with pytest.raises(RequestRefused, match="nobody was told"):  # it is done here, and it only lends
            left.clear_all_nodes()
        left.store(100, 7)
        assert right.engine.scheduler.reset()
        os.kill(helper, signal.SIGCONT)
        assert right.most_found(100, 7.0) == 0
        right.clear_all_nodes()
        stored = left.store(200, 8)
        assert right.load(200) == stored


def test_a_peer_that_a_clear_of_all_nodes_reached_is_cleared_whatever_comes(secret: Path, pool_file: Path) -> None:
    """It is killed at once, and nobody tells it again."""
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    with Node(secret, first, second) as left, Node(secret, second, pool_file=str(pool_file)) as right:
        left.wait_up()
        right.store(0, 1)
        left.load(0)
        with AdminClient(left.daemon.directory) as admin:
            admin.reset_fleet(left.spec.fingerprint)
        right.daemon.kill()
        left.daemon.kill()
        right.daemon.start()
        assert right.engine.wait_ready(DEADLINE_S)
        assert right.engine.lookup(keys(*range(BLOCKS))) == 0


def test_a_peer_that_was_away_during_a_clear_of_all_nodes_lends_nothing_of_before(
    secret: Path, pool_file: Path
) -> None:
    """It comes back with its pool. What the other knows of the clear is in its kvoffd.state, if that restarts too."""
    one, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    with Node(secret, one, other) as left, Node(secret, other, one, pool_file=str(pool_file)) as right:
        for first, left_restarts in ((0, False), (200, True)):
            for node in (left, right):
                node.wait_up()
            stored = left.store(first, 1)
            assert right.load(first) == stored
            right.store(first + 50, 2)
            right.daemon.kill()
            with pytest.raises(RequestRefused, match="did not reach every shared store and peer"):
                left.clear_all_nodes()
            left.clear()
            if left_restarts:
                left.restart()
            right.daemon.start()
            assert right.engine.wait_ready(DEADLINE_S)
            assert left.most_found(first + 50, 1.0) == 0
            left.wait_up()
            assert left.most_found(first + 50, 2.0) == left.most_found(first, 1.0) == 0
            wait_until(lambda: right.engine.lookup(keys(*range(first, first + BLOCKS))) == 0, DEADLINE_S)  # noqa: B023
            anew = right.store(first, 3)
            assert left.load(first) == anew


def test_a_peer_that_cannot_write_its_state_is_read_as_any_other(secret: Path, pool_file: Path) -> None:
    """Who clears all nodes is told that a kill there would undo it. After one, it lends nothing of before."""
    one, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    with (
        Node(secret, one, pool_file=str(pool_file)) as left,
        Node(secret, other) as good,
        Node(secret, "", one, other) as right,
    ):
        right.wait_up()
        left.store(300, 1)
        (in_the_way := left.daemon.directory / "kvoffd.state.new").mkdir()
        with pytest.raises(RequestRefused, match=r"peer://\S+: The peer has not written the reset to its kvoffd.state"):
            right.clear_all_nodes()
        until, turn = time.monotonic() + 6.0, 0  # in which it is polled
        while time.monotonic() < until:
            turn += 1
            time.sleep(0.1)
            for node, first in ((left, 1000 * turn), (good, 1000 * turn + 500)):
                stored = node.store(first, turn)
                assert right.load(first) == stored
        assert (right.problems, [one.errors.get("busy") for one in right.peers]) == ([], [None, None])
        left.daemon.kill()
        in_the_way.rmdir()
        left.daemon.start()
        assert left.engine.wait_ready(DEADLINE_S)
        right.wait_up()
        assert right.most_found(300, 2.0) == 0


def test_a_node_that_follows_through_its_store_takes_nothing_from_a_peer_that_has_not(secret: Path) -> None:
    """It would write what is void into the store's new generation, from which all nodes read."""
    one, other, third = (f"127.0.0.1:{port}" for port in free_ports(3))
    with (
        RedisServer() as redis,
        Node(secret, one, shared=redis.url) as left,
        Node(secret, other, third, shared=redis.url) as middle,
        Node(secret, third) as last,
    ):
        middle.wait_up()
        stored = last.store(0, 1)
        assert middle.load(0) == stored
        assert left.load(0) == stored, "through the store"
        os.kill(helper := last.wait_helper(), signal.SIGSTOP)
        left.clear_all_nodes()
        wait_until(lambda: middle.engine.lookup(keys(*range(BLOCKS))) == 0, DEADLINE_S)
        with suppress(ProcessLookupError):
            os.kill(helper, signal.SIGCONT)
        middle.wait_up()
        for node in (middle, left, last):
            assert node.most_found(0, 2.0) == 0
        anew = last.store(0, 2)
        assert middle.load(0) == left.load(0) == anew


def test_a_reset_on_a_node_that_only_lends_must_outlive_a_reboot(secret: Path, pool_file: Path) -> None:
    """That it shares nothing any more is in kvoffd.state."""
    (port,) = free_ports(1)
    with Node(secret, f"127.0.0.1:{port}", directory=pool_file.parent) as node:  # in memory
        assert not node.engine.scheduler.reset()
        wait_until(lambda: "a reboot would undo it" in node.daemon.log, explain=lambda: node.daemon.log)


def test_a_node_that_only_lends_says_that_nobody_was_told_of_a_clear(secret: Path) -> None:
    (port,) = free_ports(1)
    with Node(secret, f"127.0.0.1:{port}") as node:
        node.store(0, 1)
        status, output = command(node.daemon, "clear", "peers", "--all-nodes", "--yes")
        assert (status, "nobody was told" in output, f"{BLOCKS} blocks were dropped" in output) == (2, True, True), (
            output
        )
        assert node.engine.lookup(keys(0)) == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has numbers of x86-64's calls")
def test_nodes_read_each_other_under_what_the_systemd_unit_allows(secret: Path) -> None:
    """With the lines of deploy/peers.md: UCX needs AF_NETLINK."""
    inside = [sys.executable, sandbox.__file__, sandbox.families("systemd/kvoffd.service", "peers.md")]
    (port,) = free_ports(1)
    at = f"127.0.0.1:{port}"
    with Node(secret, at, before=inside) as left, Node(secret, "", at, before=inside) as right:
        stored = left.store(0, 1)
        assert right.load(0) == stored


def test_a_helper_that_hangs_does_not_outlive_its_daemon(nodes: tuple[Node, Node]) -> None:
    left, right = nodes
    helper = left.wait_helper()
    os.kill(helper, signal.SIGSTOP)
    left.restart()
    wait_until(lambda: not Path(f"/proc/{helper}").exists(), DEADLINE_S)
    stored = left.store(0, 1)
    assert right.load(0) == stored


def test_a_node_of_a_network_is_asked_for_a_request_that_names_it(secret: Path) -> None:
    """Also after others were named in its place, which are not there. Their absence is no problem of this node."""
    (port,) = free_ports(1)
    hosts = ["127.0.0.1", "127.0.0.2"]
    with ExitStack() as stack:
        lenders = [stack.enter_context(Node(secret, f"{host}:{port}")) for host in hosts]
        reader = stack.enter_context(Node(secret, "", f"127.0.0.0/24:{port}"))
        stored = [lender.store(100 * at, at) for at, lender in enumerate(lenders)]
        reader.wait_helper()
        assert reader.most_found(0, 0.5) == 0, "nobody named it"
        for at, host in enumerate(hosts):
            assert reader.load(100 * at, host) == stored[at]
        assert reader.engine.lookup(keys(900), peer="10.0.0.1") == 0, "outside the network"
        dark = [f"127.0.0.{10 + number}" for number in range(NAMED)]
        assert {one.url for one in reader.peers} == {f"peer://{host}:{port}" for host in hosts}

        def others_are_named() -> bool:
            assert not any(reader.engine.lookup(keys(900), peer=host) for host in dark)
            return not reader.peers

        wait_until(others_are_named, DEADLINE_S)  # one that was just named is not replaced
        stored = [lender.store(100 * at + 50, 7 + at) for at, lender in enumerate(lenders)]
        for at, host in reversed(list(enumerate(hosts))):
            assert reader.load(100 * at + 50, host) == stored[at]
        os.kill(reader.wait_helper(), signal.SIGKILL)
        stored[0] = lenders[0].store(200, 3)
        assert reader.load(200, hosts[0]) == stored[0]
        assert reader.problems == []
        with pytest.raises(RequestRefused, match=rf"127\.0\.0\.0/24:{port}: its nodes hear of it"):
            reader.clear_all_nodes()
        assert reader.engine.lookup(keys(200), peer=hosts[0]) == 0
        wait_until(lambda: lenders[0].engine.lookup(keys(200)) == 0, DEADLINE_S)  # it follows once it is asked


# --- in networks ---------------------------------------------------------------------------------------

PORT, PAGE_BYTES = 7400, 4096
ROUNDS, SEED = 40 * TIMES, int(os.environ.get("TESTS_SEED", "1"))
BACK_S = 5.0
"""Time in which blocks come again once both ends and the link are there, as promised."""
LOOKUPS = 1000


class Fleet:
    """Nodes that all lend and read."""

    def __init__(self, network: Network, secret: Path, count: int, stack: ExitStack, page_bytes: int) -> None:
        self.network = network
        at = [f"{network.address(number)}:{PORT}" for number in range(count)]
        self.nodes = [
            stack.enter_context(
                Node(
                    secret,
                    one,
                    *(other for other in at if other != one),
                    before=network.inside(n),
                    page_bytes=page_bytes,
                )
            )
            for n, one in enumerate(at)
        ]
        for node in self.nodes:
            node.wait_up()


@pytest.fixture
def fleet_of(secret: Path) -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def fleet(count: int, page_bytes: int = PAGE_BYTES) -> Fleet:
            return Fleet(stack.enter_context(Network(count)), secret, count, stack, page_bytes)

        yield fleet


@pytest.mark.nightly
@pytest.mark.parametrize("page_bytes", [1024, 64 << 10, 1 << 20])
def test_blocks_of_every_size_cross_a_slow_link(fleet_of: Callable[..., Fleet], page_bytes: int) -> None:
    fleet = fleet_of(2, page_bytes)
    fleet.network.delay_s = 0.005
    left, right = fleet.nodes
    stored = left.store(0, 1)
    assert right.load(0) == stored


def test_a_node_that_started_before_its_network_is_used_once_that_is_there(fleet_of: Callable[..., Fleet]) -> None:
    """UCX takes the interfaces that are up when NIXL starts."""
    fleet = fleet_of(2)
    lender, reader = fleet.nodes
    fleet.network.set_link(0, "down")
    os.kill(before := lender.wait_helper(), signal.SIGKILL)
    wait_until(lambda: lender.wait_helper() != before, DEADLINE_S)
    wait_until(lambda: lender.lends, DEADLINE_S)
    fleet.network.set_link(0, "up")
    stored = lender.store(0, 1)
    assert reader.load(0) == stored


def test_a_peer_whose_blocks_cannot_come_does_not_harm_another(fleet_of: Callable[..., Fleet]) -> None:
    """As where a NetworkPolicy admits ``peer_listen``, and not the ports of UCX. Both have other blocks."""
    fleet = fleet_of(3)
    good, dark, reader = fleet.nodes
    helper, count = reader.wait_helper(), 40
    stored = [good.store(100 * turn, turn) for turn in range(count)]
    for turn in range(count):
        dark.store(10_000 + 100 * turn, turn)
    fleet.network.only_port[1] = PORT
    for turn in range(count):
        reader.engine.lookup(keys(*range(10_000 + 100 * turn, 10_000 + 100 * turn + BLOCKS)))
        assert reader.load(100 * turn) == stored[turn]
        time.sleep(0.3)
    assert reader.helper == helper, "none was started anew"
    print([one.errors for one in reader.peers], reader.problems)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_whatever_is_killed_or_cut_costs_misses_only(fleet_of: Callable[..., Fleet]) -> None:
    fleet, rng = fleet_of(3), random.Random(SEED)
    counts, slowest = Counter[str](), dict[str, float]()
    for turn in range(ROUNDS):
        at = rng.sample(range(3), 2)
        writer, reader = (fleet.nodes[one] for one in at)
        first = 2 * BLOCKS * turn
        stored = [writer.store(first, turn), writer.store(first + BLOCKS, turn + 1)]
        reader.engine.lookup(keys(*range(first, first + BLOCKS)))
        time.sleep(rng.choice([0.0, 0.003, 0.02, 0.1]))
        event = rng.choice(list(EVENTS))
        counts[event] += 1
        EVENTS[event](fleet, rng, *at)
        if event in LOSE_BLOCKS:
            writer.store(10**6 + turn * BLOCKS, turn)  # so that the others are in other places of its pool
            stored = [writer.store(first, turn), writer.store(first + BLOCKS, turn + 1)]
        began = time.monotonic()
        try:
            assert [reader.load(first), reader.load(first + BLOCKS)] == stored
        except AssertionError:
            for node in fleet.nodes:
                print(turn, event, at, node.address, node.helper, node.problems, node.daemon.log[-1500:])
            raise
        took = time.monotonic() - began
        slowest[event] = max(took, slowest.get(event, 0.0))
        print(f"{turn} {event} {took:.1f}", flush=True)
    print(f"{ROUNDS} rounds, seed {SEED}: {dict(counts)}; slowest {slowest}", flush=True)
    for node in fleet.nodes:
        said = books(node.daemon.directory).said
        assert not any(one.mismatches for one in said.shared)
        wait_until(lambda: not books(node.daemon.directory).said.pinned_blocks, DEADLINE_S)  # noqa: B023
        lent = books(node.daemon.directory).said.lent
        assert lent is not None
        assert (lent.leases, lent.pinned_bytes) == (0, 0)
    assert max(slowest.values()) <= 5 * BACK_S, slowest


def stop_helper_that_lends(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    os.kill(helper := fleet.nodes[writer].wait_helper(), signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 2.0))
    os.kill(helper, signal.SIGCONT)


def cut_link(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    fleet.network.cut = True
    time.sleep(rng.uniform(0.2, 2.0))
    fleet.network.cut = False


def take_link_down(fleet: Fleet, rng: random.Random, writer: int, reader: int, *, starting: bool = False) -> None:
    number = rng.choice([writer, reader])
    if starting:
        fleet.nodes[number].kill_helper()
        time.sleep(rng.uniform(0.0, 1.5))
    fleet.network.set_link(number, "down")
    time.sleep(rng.uniform(0.2, 2.0))
    fleet.network.set_link(number, "up")


def slow_link(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    fleet.network.delay_s = rng.choice([0.0, 0.001, 0.01])


def reset_while_it_is_read(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    assert fleet.nodes[writer].engine.scheduler.reset()
    clear_once_reached(fleet.nodes[writer])


EVENTS: dict[str, Callable[[Fleet, random.Random, int, int], object]] = {
    "kill the helper that lends": lambda fleet, _, writer, __: fleet.nodes[writer].kill_helper(),
    "kill the helper that reads": lambda fleet, _, __, reader: fleet.nodes[reader].kill_helper(),
    "kill the helper of a third": lambda fleet, _, writer, reader: fleet.nodes[3 - writer - reader].kill_helper(),
    "kill the daemon that lends": lambda fleet, _, writer, __: fleet.nodes[writer].restart(),
    "kill the daemon that reads": lambda fleet, _, __, reader: fleet.nodes[reader].restart(),
    "stop the helper that lends": stop_helper_that_lends,
    "cut the link": cut_link,
    "take the link down": take_link_down,
    "take the link down while a helper starts": functools.partial(take_link_down, starting=True),
    "slow the link": slow_link,
    "reset while it is read": reset_while_it_is_read,
}
LOSE_BLOCKS = {"kill the daemon that lends", "reset while it is read"}


@pytest.mark.nightly
def test_a_dark_peer_is_asked_nothing(fleet_of: Callable[..., Fleet]) -> None:
    """What that takes is measured by tests/bench/dark_peer.py."""
    fleet = fleet_of(2)
    dark = fleet.nodes[0]
    fleet.network.cut = True
    wait_until(lambda: dark.engine.lookup(keys(1)) == 0 and not dark.peer.up, DEADLINE_S)
    before = dark.peer.asked_keys
    for number in range(LOOKUPS):
        assert dark.engine.lookup(keys(10**6 + number)) == 0
    assert (dark.peer.up, dark.peer.asked_keys) == (False, before)
