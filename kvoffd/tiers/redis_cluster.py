"""A Redis or Valkey cluster as a store: each name is at the master that owns its slot.

A generation is stored under three names, one in each third of the slots, so that it survives the loss of one of three
masters: it is the highest of the copies that are reachable. Lookups and raises need two of them, so that a node sees at
least one copy that the last fleet-wide reset raised. A copy that a master lost is written again.
"""

from __future__ import annotations

import time
from binascii import crc_hqx
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from math import ceil, inf
from urllib.parse import parse_qs, urlsplit

from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.names import block_name, block_names, generation_name
from kvoffd.tiers.redis_connection import CONNECT_S, Demoted
from kvoffd.tiers.redis_replies import Refusal
from kvoffd.tiers.redis_store import Redis
from kvoffd.tiers.store import (
    Credentials,
    GetRequest,
    PutRequest,
    Received,
    Servers,
    Store,
    StoreError,
    StoreFault,
    StoreUsage,
    name_of,
)
from kvoffd_proto.units import is_host, parse_duration, quoted

SLOTS = 16_384
DOWN_PAUSE_S = 2.0
"""Pause before a failed master, or slots without an owner, are tried again."""
AGAIN_S, TLS_AGAIN_S, AGAIN_FACTOR = 0.05, 0.2, 3
"""Time to connect again to a master that failed, without and with TLS: short, since the same thread asks the others. It
is more if all masters are far away: this factor of what the fastest took."""
FIND_S = 2.0
"""Time for connecting to all masters, in equal parts; and for learning who they are, after which no more servers are
asked."""
RAISE_PAUSE_S = 60.0
"""Pause before a lost copy of a generation is written again, if this node may not write it."""
MAX_MASTERS = 256
"""Limit of masters, each of which takes five connections."""

COPIES, NEEDED_COPIES = 3, 2
"""Copies of a generation, and how many of them must be reachable."""
REMEMBERED_NAMES = 1024

NO_SLOTS = "make a cluster of the servers (redis-cli --cluster create), or name one that is in it."

Address = tuple[str, int]


def slot_of(name: bytes) -> int:
    """Hash a name without braces by CRC-16/XMODEM (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/)."""
    return crc_hqx(name, 0) % SLOTS


@lru_cache(REMEMBERED_NAMES)
def copies_of(fingerprint: bytes) -> list[bytes]:
    """Return the names of a generation's copies: the first ones in the first, second and last third of the slots."""
    own = generation_name(fingerprint)
    return [
        next(name for name in (b"%s/%d" % (own, number) for number in count()) if _part_of(name) == part)
        for part in range(COPIES)
    ]


def _part_of(name: bytes) -> int:
    return slot_of(name) * COPIES // SLOTS


def masters_of(reply: Sequence[object], asked: Address) -> dict[Address, list[range]]:
    """Return the slots of each master, from the reply of the server ``asked`` to CLUSTER SLOTS. Raises ValueError."""
    found: dict[Address, list[range]] = {}
    for one in reply:
        match one:
            # First and last slot, then the master and its replicas, each with the endpoint that the cluster prefers,
            # empty for the server that was asked; port, id and more.
            case [int(first), int(last), [str(endpoint), int(port), *more], *_]:
                pass
            case _:
                raise ValueError("a slot range has no master")
        if endpoint == "?" and len(more) > 1 and isinstance(words := more[1], list):
            # The cluster prefers host names, and this master has none: its IP is among names with values.
            pairs = zip(words[::2], words[1::2], strict=False)
            endpoint = next((str(value) for name, value in pairs if name == "ip"), "")
        if endpoint and not is_host(endpoint):
            raise ValueError(f"a master has an endpoint that is not a host: {quoted(endpoint)}")
        if not 0 <= first <= last < SLOTS or not 0 <= port < 65536:
            raise ValueError(f"a master has invalid slots ({first} to {last}) or an invalid port ({port})")
        if not port:
            continue  # its address is unknown, as after a restart without its nodes.conf
        found.setdefault((endpoint or asked[0], port), []).append(range(first, last + 1))
    if sum(len(part) for slots in found.values() for part in slots) > SLOTS or len(found) > MAX_MASTERS:
        raise ValueError(f"it has more than {MAX_MASTERS} masters, or a slot twice")
    return found


@dataclass(slots=True)
class Masters:
    """The masters, as any thread's connections last found them: each can be asked when the URL's server cannot."""

    addresses: tuple[Address, ...] = ()


class RedisCluster(Store):
    """Connections to all masters, for one thread. The slot map is requested again after every failure.

    Blocks of an unreachable master are absent; without two copies of its generation, nothing of a namespace is known.
    """

    poll_s, most_window_keys = Redis.poll_s, Redis.most_window_keys
    keys_at_once, writers = Redis.keys_at_once, Redis.writers
    blocks_at_once, bytes_at_once = COPIES * Redis.blocks_at_once, COPIES * Redis.bytes_at_once

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        servers: Servers,
        masters: Masters,
        *,
        tls: bool,
        ttl_s: int = 0,
    ) -> None:
        self._seed, self._masters = (host, port), masters
        """``_seed``: the URL's server."""
        self._least_reconnect_s = TLS_AGAIN_S if tls else AGAIN_S
        """Least ``_reconnect_s``."""
        self.servers: Servers = servers
        self._open = partial(Redis, database=0, credentials=credentials, tls=tls, ttl_s=ttl_s, clustered=True)
        self._nodes: dict[Address, Redis] = {}
        self._down_until: dict[Address, float] = {}
        """Time until which a master that failed is skipped."""
        self._owners: list[Address | None] = []
        """Master of each slot; empty while unknown."""
        self._stale_at = inf
        """Time to request the map again: at once after a master failed or gave up slots, which others may have now;
        after a pause if slots have no owner, as while a replica is promoted."""
        self._unhelpful: dict[Address, float] = {}
        """Time when a server last did not say who the masters are, since one did: it is asked after the others."""
        self._raise_at = 0.0
        """Time from which lost copies of generations are written again: see RAISE_PAUSE_S."""

    def connect(self) -> None:
        self._connect(time.monotonic() + FIND_S)

    def _connect(self, until: float) -> set[Address]:
        """Find the masters, and connect to them; return those that are connected."""
        if not self._owners or time.monotonic() >= self._stale_at:
            self._find_owners(until)
        if not (up := self._reachable(until)):
            self._owners = []
            why = f"No master of the cluster at {self._name} answers.{self._why()}"
            raise StoreError(StoreFault.UNREACHABLE, why)
        return up

    @property
    def _name(self) -> str:
        return name_of(self._seed)

    def _why(self) -> str:
        """Return why one of the masters does not answer, as a sentence after a space."""
        return next((f" {server.problem}" for server in self.servers if not server.answers), "")

    def _reachable(self, until: float) -> set[Address]:
        """Connect to all masters; return those that are connected. Each gets an equal part of the time that is left."""
        up, left, reconnect_s = set[Address](), len(self._nodes), self._reconnect_s
        for address in self._nodes:
            if self._reach(address, max(reconnect_s, (until - time.monotonic()) / left), reconnect_s):
                up.add(address)
            left -= 1
        return up

    def _reach(self, address: Address, connect_s: float, reconnect_s: float) -> bool:
        """Connect to a master, unless it failed less than DOWN_PAUSE_S ago; return whether it is connected. It gets
        ``reconnect_s`` if it failed before, else ``connect_s``, at most CONNECT_S."""
        has_failed = address in self._down_until
        if has_failed and time.monotonic() < self._down_until[address]:
            return False
        connect_s = reconnect_s if has_failed else min(connect_s, CONNECT_S)
        try:
            self._nodes[address].connect(connect_s)
            if has_failed:  # a server that was stopped accepts connections, and answers nothing
                self._nodes[address].ping(time.monotonic() + connect_s)
        except StoreError as error:
            self._skip(address, error)
            return False
        if has_failed:
            del self._down_until[address]
            self.servers.answered(name_of(address))
        return True

    @property
    def _reconnect_s(self) -> float:
        """Time to connect to a master that failed, and the least for any: connecting takes less if all is well. See
        AGAIN_S."""
        took = (node.connected_in_s for node in self._nodes.values() if node.connected_in_s)
        return min(CONNECT_S, max(self._least_reconnect_s, AGAIN_FACTOR * min(took, default=0.0)))

    def _skip(self, address: Address, error: StoreError) -> None:
        """Continue without a master that failed, and request the map again."""
        self._pause(address, error, is_skipped=True)
        self._stale_at = 0.0

    def _pause(self, address: Address, error: StoreError, *, is_skipped: bool) -> None:
        """Do not use a master that failed for DOWN_PAUSE_S. ``is_skipped``: see ``Servers.failed``."""
        self._down_until[address] = time.monotonic() + DOWN_PAUSE_S
        self.servers.failed(name_of(address), error, is_skipped=is_skipped)

    def _find_owners(self, until: float) -> None:
        """Ask one server after the other who the masters are, until one says it; first those that said so before and
        have not failed."""
        failure: StoreError | None = None
        known = dict.fromkeys([*self._nodes, self._seed, *self._masters.addresses])
        for address in sorted(known, key=lambda one: (self._unhelpful.get(one, 0.0), self._down_until.get(one, 0.0))):
            if failure is not None and time.monotonic() >= until:  # the next call continues with the others
                break
            node = self._nodes.get(address) or self._open(*address)
            try:
                node.connect(self._reconnect_s if address in self._down_until else CONNECT_S)
                masters = masters_of(node.cluster_slots(time.monotonic() + CONNECT_S), address)
                if not masters:
                    why = f"{name_of(address)} knows no master with slots: {NO_SLOTS}"
                    raise StoreError(StoreFault.CLUSTER, why, is_lasting=True)
            except (StoreError, ValueError) as error:
                node.close()
                self._unhelpful[address] = time.monotonic()
                why = f"{self._name}: {error}."
                failure = error if isinstance(error, StoreError) else StoreError(StoreFault.PROTOCOL, why)
                continue
            self._unhelpful.clear()
            self._use(masters, {**self._nodes, address: node})
            return
        assert failure is not None
        raise failure

    def _use(self, masters: Mapping[Address, Sequence[range]], opened: Mapping[Address, Redis]) -> None:
        """Use these masters, by their slots. ``opened``: connections that are there; the others are closed."""
        owners: list[Address | None] = [None] * SLOTS
        for master, slots in masters.items():
            for part in slots:
                owners[part.start : part.stop] = [master] * len(part)
        for gone in opened.keys() - masters.keys():
            opened[gone].close()
        self._nodes = {master: opened.get(master) or self._open(*master) for master in masters}
        self._owners, self._masters.addresses = owners, tuple(masters)
        self._stale_at = time.monotonic() + DOWN_PAUSE_S if None in owners else inf
        self._down_until = {master: at for master, at in self._down_until.items() if master in masters}
        self.servers.update(map(name_of, masters))

    def close(self) -> None:
        self._owners = []
        for node in self._nodes.values():
            node.close()

    def interrupt(self) -> None:
        for node in list(self._nodes.values()):
            node.interrupt()

    def ping(self, deadline: float) -> None:
        self._owners = []
        self._down_until.clear()  # nobody waits for a ping: each gets the time of one that has not failed
        up = self._connect(time.monotonic() + FIND_S)
        until = time.monotonic() + CONNECT_S
        sent = [address for address in up if self._pings(address, Redis.send_ping, until)]
        # All have the same time. Once a silent one has used it up, the answers of those behind it have mostly come, and
        # each gets a moment to be received.
        answer = set[Address]()
        for address in sent:
            if self._pings(address, Redis.ping_answer, max(until, time.monotonic() + self._reconnect_s)):
                answer.add(address)
                self._answered(address)
        # Each third of the slots has a copy of each generation.
        thirds = {slot * COPIES // SLOTS for slot, owner in enumerate(self._owners) if owner in answer}
        if len(thirds) < NEEDED_COPIES:
            raise self._too_few()

    def _pings(self, address: Address, half: Callable[[Redis, float], None], deadline: float) -> bool:
        """Run the sending or the receiving half of a ping of a master; return whether it succeeded."""
        try:
            half(self._nodes[address], deadline)
        except StoreError as error:
            self._skip(address, error)
            return False
        return True

    def usage(self, deadline: float) -> StoreUsage | None:
        """Add up the answers of all reachable masters; without a limit if one has none."""
        found: list[StoreUsage] = []
        for address in self._reachable(deadline):
            with self._exchange(address) as node:
                if (one := node.usage(deadline)) is None:
                    return None
                found.append(one)
        if not all(one.size_bytes for one in found):
            found = [one._replace(size_bytes=0) for one in found]
        return StoreUsage(*map(sum, zip(*found, strict=True))) if found else None

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        return self._ask(fingerprint, [], deadline)[0]

    def generations(self, fingerprints: Sequence[bytes], deadline: float) -> list[int | StoreError]:
        try:
            numbers, _ = self._ask_all([], deadline, [name for one in fingerprints for name in copies_of(one)])
        except StoreError as error:
            if error.kind is not StoreFault.GENERATION:
                raise
            self.connect()  # the error closed all
            return super().generations(fingerprints, deadline)  # one by one: an invalid copy fails its namespace alone
        found = list[int | StoreError]()
        for fingerprint in fingerprints:  # enough copies of one may be reachable, and not of another
            known = {name: numbers[name] for name in copies_of(fingerprint) if name in numbers}
            found.append(self._highest(known, deadline) if len(known) >= NEEDED_COPIES else self._too_few())
        return found

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        return self._ask(group.fingerprint, block_names(group, keys), deadline)

    def _ask(self, fingerprint: bytes, names: Sequence[bytes], deadline: float) -> tuple[int, list[bool]]:
        numbers, found = self._ask_all(names, deadline, copies_of(fingerprint))
        return self._highest(numbers, deadline), found

    def _highest(self, numbers: Mapping[bytes, int], deadline: float) -> int:
        """Return the generation whose copies have these numbers, and raise those that lost it."""
        generation = max(numbers.values())
        if time.monotonic() >= self._raise_at:
            try:
                self._raise_copies(numbers, generation, deadline)
            except StoreError as error:
                if error.kind.skips_server:  # the master fails, not only this write
                    raise
                self._raise_at = time.monotonic() + RAISE_PAUSE_S  # a node with write permission does it
        return generation

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        return self._ask_all([block_name(block.group, block.key) for block in blocks], deadline, touches=True)[1]

    def _ask_all(
        self, names: Sequence[bytes], deadline: float, copies: Sequence[bytes] = (), *, touches: bool = False
    ) -> tuple[dict[bytes, int], list[bool]]:
        """Ask all masters at once, then receive from one after the other: the reachable copies of generations, and
        which names exist. ``touches``: those that do count as used."""
        up = self._reachable(deadline)
        parts, copies_at = self._by_owner(names, up), self._by_owner(copies, up)  # indices, by master
        if copies and sum(map(len, copies_at.values())) < NEEDED_COPIES:
            raise self._too_few()
        found, numbers = [False] * len(names), {}
        addresses = list(dict.fromkeys([*parts, *copies_at]))
        for address in addresses:
            asked = [names[at] for at in parts.get(address, ())]
            with self._exchange(address, sends_only=True) as node:
                if touches:
                    node.send_touches(asked, deadline)
                else:
                    node.send_questions(asked, deadline, [copies[at] for at in copies_at.get(address, ())])
        for address in addresses:
            places = parts.get(address, [])
            with self._exchange(address, skips_busy=True) as node:  # in the order in which ``send_questions`` sent
                for at in copies_at.get(address, ()):
                    if (number := node.generation_answer(copies[at], deadline)) is not None:
                        numbers[copies[at]] = number
                for at, there in zip(places, node.answers(len(places), deadline), strict=True):
                    found[at] = there
        if copies and len(numbers) < NEEDED_COPIES:
            raise self._too_few()
        return numbers, found

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | StoreError | None]:
        names = [block_name(request.group, request.key) for request in requests]
        parts = self._by_owner(names, self._reachable(time.monotonic() + patience_s))
        owner = {at: address for address, places in parts.items() for at in places}
        for address, places in parts.items():
            with self._exchange(address, sends_only=True) as node:
                node.send_gets([requests[at] for at in places], time.monotonic() + patience_s)
        for at, request in enumerate(requests):
            if at not in owner:
                yield None
                continue
            with self._exchange(owner[at]) as node:
                received = node.value(request, time.monotonic() + patience_s)
            if isinstance(received, StoreError):
                self._pause(owner[at], received, is_skipped=False)
            elif received is not None and received.block is None:
                self.close()  # values of other masters are still coming
                yield received
                return
            yield received

    def put(self, requests: Sequence[PutRequest], deadline: float) -> list[bool | None]:
        names = [block_name(block.group, block.key) for block, _ in requests]
        parts = self._by_owner(names, self._reachable(deadline))
        stored: list[bool | None] = [None] * len(requests)
        for address, places in parts.items():
            with self._exchange(address, sends_only=True) as node:
                node.send_puts([requests[at] for at in places], deadline)
        for address, places in parts.items():
            with self._exchange(address, skips_busy=True) as node:
                for at, done in zip(places, node.put_results(len(places), deadline), strict=True):
                    stored[at] = done
        return stored

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        names = block_names(group, keys)
        for address, places in self._by_owner(names, self._reachable(deadline)).items():
            with self._exchange(address) as node:
                node.remove_names([names[at] for at in places], deadline)

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        numbers, _ = self._ask_all([], deadline, copies_of(fingerprint))
        return max(self._raise_copies(numbers, generation, deadline))

    @contextmanager
    def _exchange(self, address: Address, *, skips_busy: bool = False, sends_only: bool = False) -> Iterator[Redis]:
        """Run a part of an exchange with a master. If it fails, close all: other masters' answers may be coming.

        Args:
            skips_busy: end the part without an error if the master is busy; others are served as before.
            sends_only: whether no answer is received, so that the master may be silent all the same.
        """
        node = self._nodes[address]
        try:
            yield node
            if elsewhere := node.elsewhere:  # it refused keys whose slots it does not own or serve now
                node.elsewhere = {}
                if Refusal.DOWN in elsewhere:  # it may have lost its slots while cut off from the others
                    self._pause(address, elsewhere[Refusal.DOWN], is_skipped=True)
                if Refusal.DOWN in elsewhere or Refusal.MOVED in elsewhere:
                    self._stale_at = 0.0
            elif not sends_only:
                self._answered(address)
        except StoreError as error:
            is_skipped = skips_busy and error.kind is StoreFault.BUSY
            if error.kind.skips_server:
                self._pause(address, error, is_skipped=is_skipped)
            if not is_skipped:
                self.close()
                raise

    def _answered(self, address: Address) -> None:
        """Record that a master answers: another connection may have recorded that it does not."""
        if not self.servers.all_answer:  # without the lock, since this is called for each answer
            self.servers.answered(name_of(address))

    def _too_few(self) -> StoreError:
        why = f"Too many masters of the cluster at {self._name} cannot be used.{self._why()}"
        return StoreError(StoreFault.UNREACHABLE, why, is_lasting=False)

    def _raise_copies(self, numbers: Mapping[bytes, int], generation: int, deadline: float) -> list[int]:
        """Raise copies of a generation from these numbers, by their names, to at least ``generation``; return their
        numbers then."""
        found = []
        for name, number in numbers.items():
            address = self._owners[slot_of(name)]
            if number < generation and address is not None:
                with self._exchange(address) as node:
                    number = node.raise_stored(name, number, generation, deadline)
            found.append(number)
        return found

    def _by_owner(self, names: Sequence[bytes], up: Collection[Address]) -> dict[Address, list[int]]:
        """Return the indices of the names of each of these masters."""
        parts: dict[Address, list[int]] = {}
        for at, name in enumerate(names):
            address = self._owners[slot_of(name)]
            if address is not None and address in up:
                parts.setdefault(address, []).append(at)
        return parts


def open_redis(url: str, credentials: Credentials) -> Callable[[], Store]:
    """Return a function that makes connections to the server, or cluster, at a URL."""
    parts = urlsplit(url)
    host, port, database = parts.hostname or "", parts.port or 6379, int(parts.path.strip("/") or 0)
    tls = parts.scheme.startswith("rediss")
    ttls = parse_qs(parts.query).get("ttl")
    ttl_s = ceil(parse_duration(ttls[-1])) if ttls else 0
    if parts.scheme.endswith("+cluster"):
        servers, masters = Servers(name_of((host, port))), Masters()
        return lambda: RedisCluster(host, port, credentials, servers, masters, tls=tls, ttl_s=ttl_s)
    demoted = Demoted()
    return lambda: Redis(host, port, database, credentials, tls=tls, ttl_s=ttl_s, demoted=demoted)
