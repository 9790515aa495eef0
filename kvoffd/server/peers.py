"""The other nodes whose pools this one reads, and that read this one's: the helper process, tiers, names and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address

from kvoffd.cache.cache import Cache
from kvoffd.config import Config, parse_peer, peer_addresses
from kvoffd.pool.pool import Pool
from kvoffd.server.host import Post
from kvoffd.server.lender import PeerServer
from kvoffd.server.peer_places import PeerPlaces
from kvoffd.server.persistence import State
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers.peer_caller import Calls, PeerCaller
from kvoffd.tiers.peer_messages import HelperSettings
from kvoffd.tiers.peer_names import NameResolver, PeerName, Resolved
from kvoffd.tiers.peer_process import HelperProcess, read_secret
from kvoffd.tiers.peer_store import PeerStore
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Store
from kvoffd.tiers.tier import PEER


class Peers:
    """The configured peers. For the daemon's thread, except ``_on_request`` and ``_on_helper_end``.

    Attributes:
        tiers: of those that are configured by themselves.
        networks: those that are networks, with their ports, as configured.
        server: what is lent to peers; None if nothing is.
        helper: the process that talks to them; None without peers.
        places: the peers of networks and behind names; None without such.
    """

    def __init__(
        self, config: Config, cache: Cache, pool: Pool, clock: Callable[[], float], post: Post, state: State
    ) -> None:
        self._config, self._cache, self._pool = config, cache, pool
        self._clock, self._post, self._state = clock, post, state
        self.tiers: list[SharedTier] = []
        self.helper: HelperProcess | None = None
        self.server: PeerServer | None = None
        self.places: PeerPlaces | None = None
        peers = list(map(parse_peer, config.peers))  # each is a single node, a network, or a name that has many
        self._single = [(str(peer.host).lower(), peer.text) for peer in peers if peer.is_one]
        """Host and address of each peer that is a single node."""
        self.networks = {peer.text: (peer.host, peer.port) for peer in peers if not isinstance(peer.host, str)}
        self._names = [PeerName(peer.text, str(peer.host), peer.port) for peer in peers if peer.has_many]
        """Names with several nodes. ``NameResolver`` and ``PeerPlaces.resolved`` mean one by its index here."""
        self._resolver: NameResolver | None = None
        self._caller: PeerCaller | None = None

    def start(self) -> None:
        """Start the helper, where peers are read or served, and the thread that calls nodes behind names.

        Raises NoMoreThreads.
        """
        config = self._config
        if not (config.peers or config.peer_listen):
            return
        if config.peer_listen:
            generations = self._state.generations
            self.server = PeerServer(self._cache, self._clock, lambda: self._state.is_saved, generations)
        secret = read_secret(config.peer_secret_file)
        settings = HelperSettings(peer_addresses(config.peers), config.peer_listen, secret)
        self.helper = HelperProcess(settings, self._pool.place, self._on_request, self._on_helper_end)
        if self._names:
            self._caller = PeerCaller(self._names, config.peer_listen, secret)

    def open(
        self,
        tiering: Tiering,
        make_tier: Callable[[str, Callable[[], Store], Tiering], SharedTier],
        settings: TieringSettings,
    ) -> None:
        """Make the tier of each peer that is configured by itself, and places for the others; resolve names.

        Args:
            make_tier: makes one by its name and a function that connects.

        Raises NoMoreThreads.
        """
        if (helper := self.helper) is None:
            return
        for number, peer in enumerate(peer_addresses(self._config.peers)):
            name = f"{PEER}{peer}" if peer else ""  # a place for a node that is not known yet
            tier = make_tier(name, partial(PeerStore, helper, number), tiering)
            source = tiering.add_store(tier, settings)
            if peer:
                self.tiers.append(tier)
                continue
            if self.places is None:
                replace = partial(tiering.replace_source, settings=settings)
                fixed = {f"{PEER}{text}" for _, text in self._single}
                self.places = PeerPlaces(helper, self._names, fixed, replace, self._clock)
            self.places.add(number, tier, source)
        if (places := self.places) is not None and self._names:

            def answered(number: int, answer: Resolved) -> None:
                self._post(partial(places.resolved, number, answer))

            every_s = self._config.limits.resolve_s
            self._resolver = NameResolver(self._names, self._config.peer_listen, every_s, answered)

    def at(self, host: str) -> str:
        """Return the name of the tier of the peer at a host that a request names, and have it connected. Empty if the
        peer is neither configured, nor in a network or behind a name that is, or all places are taken."""
        host = host.strip("[]").lower()
        if (peer := next((peer for name, peer in self._single if name == host), None)) is not None:
            return f"{PEER}{peer}"
        if (places := self.places) is None:
            return ""
        try:
            address = ip_address(host)
        except ValueError:
            return ""
        if "%" in host:  # the zone of another machine means nothing here
            return ""
        shown = str(address) if address.version == 4 else f"[{address}]"
        if listed := places.find(shown):  # behind a name: asked for other requests too
            return places.give(listed, only_named=False)
        for network, port in self.networks.values():
            if address in network:
                return places.give(f"{shown}:{port}", only_named=True)
        return ""

    def call(self, fingerprint: bytes, generation: int, cleared_at: int) -> Calls:
        """Begin to have all nodes behind names, connected or not, follow a namespace's generation. ``cleared_at``: see
        ``Follow``."""
        if self._caller is None or self.places is None:
            return Calls(nodes={}, unknown={}, ended=True)
        known = [[*one.addresses] for one in self.places.lists]
        return self._caller.call(fingerprint, generation, cleared_at, known)

    def _on_request(self, route: bytes, ident: int, kind: int, payload: bytes) -> None:
        """Answer a peer's request in the daemon's thread. Called in the thread that receives from the helper."""
        server, helper = self.server, self.helper
        if server is None or helper is None:
            return

        def answer() -> None:
            if (reply := server.answer(route, ident, kind, payload)) is not None:
                helper.reply(route, ident, reply)

        self._post(answer)

    def _on_helper_end(self) -> None:
        """End what peers have borrowed. Called in the thread that receives from the helper."""
        if (server := self.server) is not None:
            self._post(server.end_all)

    @property
    def problems(self) -> Iterator[tuple[str, str]]:
        """Problems: a word for the kind, and a sentence."""
        if (helper := self.helper) is not None and helper.problem:
            yield "peer_helper", f"{helper.problem} No blocks are read from peers or lent to them."
        for sentence in self.places.problems if self.places is not None else ():
            yield "shared_unreachable", sentence

    def stop(self) -> None:
        """End the threads that resolve names and call nodes, without waiting for them, and have those of peers' tiers
        wait for no answer any more."""
        for thread in (self._resolver, self._caller):
            if thread is not None:
                thread.close()
        if self.helper is not None:
            for tier in (*self.tiers, *(self.places.tiers if self.places is not None else ())):
                tier.closed = True
            self.helper.interrupt()
