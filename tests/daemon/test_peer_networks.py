"""Nodes in network namespaces, over UCX's TCP: kills, cut and slow links, resets. No wrong byte, no pin left, and soon
back."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import quantiles

import pytest

from kvoffd_client import RequestRefused
from tests.kit.amount import TIMES
from tests.kit.network import Network
from tests.kit.peer_node import BLOCKS, DEADLINE_S, Node
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys

PORT, PAGE_BYTES = 7400, 4096
ROUNDS, SEED = 40 * TIMES, int(os.environ.get("TESTS_SEED", "1"))
BACK_S = 5.0
"""Time in which blocks come again once both ends and the link are there."""
LOOKUPS, TRIES = 1000, 8


@pytest.fixture(autouse=True)
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    require("nixl", importlib.util.find_spec("nixl_cu12"), "NIXL is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp")


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
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("a secret for tests\n")
    return path


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
    assert max(slowest.values()) <= BACK_S, slowest


def stop_helper_that_lends(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    os.kill(helper := fleet.nodes[writer].wait_helper(), signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 2.0))
    os.kill(helper, signal.SIGCONT)


def cut_link(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    fleet.network.cut = True
    time.sleep(rng.uniform(0.2, 2.0))
    fleet.network.cut = False


def take_link_down(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    number = rng.choice([writer, reader])
    fleet.network.set_link(number, "down")
    time.sleep(rng.uniform(0.2, 2.0))
    fleet.network.set_link(number, "up")


def slow_link(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    fleet.network.delay_s = rng.choice([0.0, 0.001, 0.01])


def reset_while_it_is_read(fleet: Fleet, rng: random.Random, writer: int, reader: int) -> None:
    assert fleet.nodes[writer].engine.scheduler.reset()
    with suppress(RequestRefused):  # a peer that takes long follows with the next question
        fleet.nodes[writer].clear_all_nodes()


EVENTS: dict[str, Callable[[Fleet, random.Random, int, int], object]] = {
    "kill the helper that lends": lambda fleet, _, writer, __: fleet.nodes[writer].kill_helper(),
    "kill the helper that reads": lambda fleet, _, __, reader: fleet.nodes[reader].kill_helper(),
    "kill the helper of a third": lambda fleet, _, writer, reader: fleet.nodes[3 - writer - reader].kill_helper(),
    "kill the daemon that lends": lambda fleet, _, writer, __: fleet.nodes[writer].restart(),
    "kill the daemon that reads": lambda fleet, _, __, reader: fleet.nodes[reader].restart(),
    "stop the helper that lends": stop_helper_that_lends,
    "cut the link": cut_link,
    "take the link down": take_link_down,
    "slow the link": slow_link,
    "reset while it is read": reset_while_it_is_read,
}
LOSE_BLOCKS = {"kill the daemon that lends", "reset while it is read"}


@pytest.mark.nightly
def test_lookups_take_no_longer_while_a_peer_is_dark(fleet_of: Callable[..., Fleet], secret: Path) -> None:
    """They are made in turn, and of several tries the best counts: others use this machine."""
    fleet = fleet_of(2)
    dark = fleet.nodes[0]
    ratios: list[float] = []
    every: list[tuple[float, float]] = []
    with Node(secret, "", page_bytes=PAGE_BYTES) as alone:
        fleet.network.cut = True
        wait_until(lambda: dark.engine.lookup(keys(1)) == 0 and not dark.peer.up, DEADLINE_S)
        for _ in range(TRIES):
            taken = [(_lookup_s(alone), _lookup_s(dark)) for _ in range(LOOKUPS)]
            every += taken
            without, with_dark = (quantiles(one, n=100)[98] for one in zip(*taken, strict=True))
            ratios.append(with_dark / without)
            print(f"p99 {without * 1e3:.2f} ms without peers, {with_dark * 1e3:.2f} ms with one that is dark")
    without, with_dark = (quantiles(one, n=100)[98] for one in zip(*every, strict=True))
    print(f"of all p99 {without * 1e3:.2f} ms and {with_dark * 1e3:.2f} ms: {with_dark / without:.2f}")
    assert min(ratios) <= 1.1, ratios


def _lookup_s(node: Node) -> float:
    began = time.perf_counter()
    node.engine.lookup(keys(*range(10**6, 10**6 + 64)))
    return time.perf_counter() - began
