"""Replays a trace over several nodes: a router spreads the requests, and nodes read each other's pools and a store.

Real are each node's cache, policy and tiering, and its KV events. Models are the router, a store's eviction, and time:
nothing is copied, a request is over when the next one comes, and seconds are bytes and tokens by given speeds.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.cache.prompt_tokens import POOL
from kvoffd.simulate.replay import FoundPrefix, Node
from kvoffd.simulate.shared import BlockPlaces, NodeEvents, SimulatedPeers, SimulatedStore, StoreObjects
from kvoffd.simulate.tiers import DiskPlan
from kvoffd.simulate.trace import KEY_BYTES, RequestTrace
from kvoffd.tiering import WriteMode

SEED = 1
SESSION_BLOCKS = 2
"""Leading blocks that stand for a request's session if the trace has no sessions."""
SOURCES = "computed", "pool", "disk", "store", "peer"
"""Places from which the tokens of a prompt come: ``computed``, and the kinds of ``prompt_tokens.Source``."""
MEASURED_FROM_NODES = 32
"""Nodes from which on the user sees how much memory a replay takes before it begins: a node takes up to 20 MiB."""
MEASURED_NODES, MEASURED_ONE_OF = 4, 64
"""Least number of nodes over which that is measured, and how many nodes there are for each of them in a large fleet."""
LATER_REPLAYS = 1.25
"""Factor for replays after the first, measured: glibc's heap does not use all that a replay has freed."""


class Route(StrEnum):
    """The rule by which a router chooses the node of a request."""

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    PREFIX = "prefix"
    """The node that has the longest prefix, by the KV events, unless it is too busy; the least busy one of several."""
    SESSION = "session"
    """A node by a hash of the session, or of the first ``SESSION_BLOCKS`` blocks if the trace has no sessions."""


class Shares(StrEnum):
    """The things that nodes share with each other."""

    GIVEN = "given"
    """Peers and a store, as the plan says."""
    NOTHING = "nothing"
    ONE_POOL = "one pool"
    """All nodes have one pool, and one disk, of their sizes together. The least busy node computes."""


class Speeds(NamedTuple):
    """Speeds of one node that a single prompt has to itself."""

    compute_tokens: float
    """Tokens a second that a node computes."""
    memory_bytes: float
    """Bytes a second from the pool to the engine."""
    disk_bytes: float
    network_bytes: float
    """Bytes a second from other nodes' pools, and from the store."""


class FleetPlan(NamedTuple):
    """Nodes and what they share.

    Attributes:
        nodes: number of nodes.
        speeds: see ``Speeds``.
        block_bytes: bytes of a block, for links and speeds.
        route: see ``Route``.
        busy_s: seconds that a prompt may wait longer than at the least busy node, for the rule ``prefix``. Ignored if
            the trace has no times.
        least_prefix: part of a prompt that a prefix must have to count for this rule.
        staleness_s: age of the router's index.
        peers: number of nodes whose pools each node reads: those after it, the first after the last.
        named_peer: the router names the only one that is read: the other node with the longest prefix in its pool, by
            its index.
        store_blocks: size of the store; 0 for no limit, None for no store.
        store_write: which blocks are written to it.
        disk: of each node.
    """

    nodes: int
    speeds: Speeds
    block_bytes: int
    route: Route = Route.PREFIX
    busy_s: float = inf
    least_prefix: float = 0.0
    staleness_s: float = 0.0
    peers: int = 0
    named_peer: bool = False
    store_blocks: int | None = None
    store_write: WriteMode = WriteMode.AUTO
    disk: DiskPlan | None = None

    @property
    def is_sharing(self) -> bool:
        return bool(self.peers or self.named_peer or self.store_blocks is not None)


class FleetReplayed(NamedTuple):
    """Results of a replay over several nodes.

    Attributes:
        tokens: prompts' tokens by ``SOURCES``.
        links: bytes over each link: ``peer``, ``store_read``, ``store_written``, ``disk_read``, ``disk_written``.
        pooled_blocks: different blocks in all pools at the end.
        repeated_blocks: those of them that are in several pools.
        copies: blocks in all pools at the end.
        stored: blocks that engines stored in pools.
        first_token_s: mean seconds to load and compute a prompt.
        wait_s: mean seconds that a prompt waits until its node has computed earlier ones; None without times.
    """

    policy: str
    blocks: int
    plan: FleetPlan
    shares: Shares
    tokens: dict[str, int]
    links: dict[str, int]
    pooled_blocks: int
    repeated_blocks: int
    copies: int
    stored: int
    first_token_s: float
    wait_s: float | None

    def percent(self, source: str) -> float:
        """Return the part of all tokens that came from a source, in percent."""
        return 100 * self.tokens[source] / max(1, sum(self.tokens.values()))


class _Router:
    """Chooses the node of each request.

    Args:
        index: what the router knows of the nodes' blocks.
        busy_until: [nodes] times when the nodes have computed what they were given; the caller keeps them.
    """

    def __init__(
        self, trace: RequestTrace, plan: FleetPlan, index: BlockPlaces, busy_until: npt.NDArray[np.float64]
    ) -> None:
        self._trace, self._plan, self._index, self._busy_until = trace, plan, index, busy_until
        self._chance = random.Random(SEED)
        self.all_nodes = (1 << plan.nodes) - 1
        """All nodes, as a set of ``BlockPlaces``."""

    def choose(self, number: int, keys: Sequence[bytes], now: float) -> int:
        """Return the node of a request."""
        if self._plan.route is Route.RANDOM:
            return self._chance.randrange(self._plan.nodes)
        if self._plan.route is Route.ROUND_ROBIN:
            return number % self._plan.nodes
        if self._plan.route is Route.SESSION:
            sessions = self._trace.sessions
            session = sessions[number].to_bytes(8, "big") if sessions else b"".join(keys[:SESSION_BLOCKS])
            return int.from_bytes(blake2b(session, digest_size=8).digest(), "big") % self._plan.nodes
        candidates = self.all_nodes
        if self._trace.seconds and self._plan.busy_s < inf:
            waits = np.maximum(0.0, self._busy_until - now)
            candidates = _nodes(waits <= waits.min() + self._plan.busy_s)
        return self.least_busy(self._index.longest_prefix(keys, candidates, self._plan.least_prefix * len(keys)))

    def least_busy(self, nodes: int) -> int:
        """Return the node among these that has computed its prompts first; the first of several."""
        if nodes.bit_count() == 1:
            return nodes.bit_length() - 1
        if nodes == self.all_nodes:
            return int(self._busy_until.argmin())
        chosen = [at for at in range(nodes.bit_length()) if nodes >> at & 1]
        return chosen[int(self._busy_until[chosen].argmin())]

    def peer_of(self, node: int, keys: Sequence[bytes]) -> int:
        """Return the other node with the longest prefix in its pool, or any if none has the first key; as in
        ``BlockPlaces``."""
        holders = self._index.longest_prefix(keys, self.all_nodes & ~(1 << node), only_pools=True)
        return holders & -holders  # the first of them


def _nodes(chosen: npt.NDArray[np.bool_]) -> int:
    """Return the chosen nodes as in ``BlockPlaces``."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


class _Fleet:
    """The nodes of a replay, their router, and what they share. See ``replay_fleet``."""

    def __init__(self, trace: RequestTrace, policy: str, blocks: int, plan: FleetPlan, shares: Shares) -> None:
        self._trace, self._plan, self._shares, self.now = trace, plan, shares, 0.0
        self.places = BlockPlaces(self._clock)
        """The blocks that each node has now."""
        index = BlockPlaces(self._clock, plan.staleness_s) if plan.staleness_s else self.places
        self._indexes = [self.places] if index is self.places else [self.places, index]
        self.busy_until = np.zeros(plan.nodes)
        self.router = _Router(trace, plan, index, self.busy_until)
        self.peers: list[SimulatedPeers] = []
        self.stores: list[SimulatedStore] = []
        size, disk, pools = blocks, plan.disk, plan.nodes
        if shares is Shares.ONE_POOL:
            size, pools = blocks * plan.nodes, 1
            if disk is not None:
                disk = disk._replace(blocks=disk.blocks * plan.nodes, per_day_blocks=disk.per_day_blocks * plan.nodes)
        is_sharing = shares is not Shares.NOTHING and plan.is_sharing
        self.nodes = [
            Node(trace, policy, size, self._clock, NodeEvents(at, self._indexes), disk, has_shared_tiers=is_sharing)
            for at in range(pools)
        ]
        if is_sharing:
            self._share()

    def _clock(self) -> float:
        return self.now

    def _share(self) -> None:
        """Give each node the store and its peers, in the order in which a daemon asks them."""
        plan = self._plan
        objects = StoreObjects(plan.store_blocks or 0)
        for at, node in enumerate(self.nodes):
            assert node.below is not None
            if plan.store_blocks is not None:
                self.stores.append(node.below.add_store(objects, plan.store_write))
            if (plan.peers or plan.named_peer) and self._shares is Shares.GIVEN:
                others = [(at + distance) % plan.nodes for distance in range(1, plan.peers + 1)]
                self.peers.append(node.below.add_peers(self.places, sum(1 << other for other in others)))

    def serve(self, number: int) -> tuple[int, FoundPrefix]:
        """Serve a request of the trace. Returns the node that computes it, and what was found."""
        packed, seconds = self._trace.requests[number], self._trace.seconds
        self.now = max(self.now, seconds[number]) if seconds else 0.0
        for index in self._indexes:
            index.update()
        if self._shares is Shares.ONE_POOL:
            return self.router.least_busy(self.router.all_nodes), self.nodes[0].serve(packed)
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        at = self.router.choose(number, keys, self.now)
        if self._plan.named_peer and self.peers:
            self.peers[at].peers = self.router.peer_of(at, keys)
        return at, self.nodes[at].serve(packed)


def replay_fleet(
    trace: RequestTrace, policy: str, blocks: int, plan: FleetPlan, shares: Shares = Shares.GIVEN
) -> FleetReplayed:
    """Replay a trace, without its hints, over nodes with a pool of this many blocks each. The same arguments give the
    same result."""
    fleet, speeds = _Fleet(trace, policy, blocks, plan, shares), plan.speeds
    blocks_by_source: Counter[str] = Counter()
    first_token_s = wait_s = 0.0
    for number, packed in enumerate(trace.requests):
        at, found = fleet.serve(number)
        sources = _by_source(found)
        computed = len(packed) // KEY_BYTES - found.hits
        blocks_by_source.update(sources, computed=computed)
        computing_s = computed * trace.tokens_per_block / speeds.compute_tokens
        loading_s = plan.block_bytes * found.hits / speeds.memory_bytes
        loading_s += plan.block_bytes * sources["disk"] / speeds.disk_bytes
        loading_s += plan.block_bytes * (sources["store"] + sources["peer"]) / speeds.network_bytes
        first_token_s += loading_s + computing_s
        waiting_s = max(0.0, float(fleet.busy_until[at]) - fleet.now)
        wait_s += waiting_s
        fleet.busy_until[at] = fleet.now + waiting_s + computing_s
    below = [node.below for node in fleet.nodes if node.below is not None]
    links = {
        "peer": sum(tier.counters.read_blocks for tier in fleet.peers),
        "store_read": sum(tier.counters.read_blocks for tier in fleet.stores),
        "store_written": sum(tier.counters.written_blocks for tier in fleet.stores),
        "disk_read": sum(tiers.read_from_disk for tiers in below),
        "disk_written": sum(tiers.written_to_disk for tiers in below),
    }
    for node in fleet.nodes:
        node.close()
    copies = [nodes.bit_count() for nodes in fleet.places.pools.values()]
    requests = max(1, len(trace.requests))
    return FleetReplayed(
        policy=policy,
        blocks=blocks,
        plan=plan,
        shares=shares,
        tokens={source: blocks_by_source[source] * trace.tokens_per_block for source in SOURCES},
        links={link: count * plan.block_bytes for link, count in links.items()},
        pooled_blocks=len(copies),
        repeated_blocks=sum(count > 1 for count in copies),
        copies=sum(copies),
        stored=sum(node.stored for node in fleet.nodes),
        first_token_s=first_token_s / requests,
        wait_s=wait_s / requests if trace.seconds else None,
    )


def expected_bytes(trace: RequestTrace, policy: str, blocks: int, plan: FleetPlan) -> int:
    """Return about how much memory replays over the plan's nodes take besides the trace: some of them are measured.

    Most of it is tables, of which each key touches a few pages. So it is most if requests go round, as they do here.
    """
    count = max(MEASURED_NODES, plan.nodes // MEASURED_ONE_OF)
    few = plan._replace(nodes=count, route=Route.ROUND_ROBIN, peers=min(plan.peers, count - 1))
    fleets, taken = [], 0
    for _ in range(2):  # the first fleet fills what the process had free, as the trace was read
        before = _resident_bytes()
        fleets.append(fleet := _Fleet(trace, policy, blocks, few, Shares.GIVEN))
        for number in range(len(trace.requests)):
            if number % plan.nodes < count:  # else it would go to a node that is left out
                fleet.serve(number)
        taken = _resident_bytes() - before
    for fleet in fleets:
        for node in fleet.nodes:
            node.close()
    return int(LATER_REPLAYS * taken * plan.nodes / count)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _by_source(found: FoundPrefix) -> Counter[str]:
    """Return the number of found keys by the kind of their source, one of ``SOURCES``."""
    if found.loaded is None:
        return Counter({POOL.kind: found.hits})
    sources: Counter[str] = Counter()
    for number, count in Counter(found.loaded.numbers).items():  # a byte for each key: the number of its source
        sources[found.loaded.sources.get(number, POOL).kind] += count
    return sources
