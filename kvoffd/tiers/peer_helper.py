"""The process between a daemon and its peers: messages over ZeroMQ with CURVE, blocks over NIXL. ``peer_process``
is the daemon's end of it.

It has the pool's memory for reading only, and ends with its daemon. All nodes share one key pair, made from the secret:
nobody without it gets an answer. UCX neither encrypts nor authenticates what NIXL moves.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from kvoffd.system.mappings import map_shared
from kvoffd.system.newest import put_newest
from kvoffd.tiers.peer_messages import (
    ANSWER,
    BEAT,
    BEAT_S,
    CONNECT,
    DONE,
    FAILED,
    FIND,
    FOLLOW,
    FREE,
    MAX_MESSAGE_BYTES,
    MODULES,
    PIN,
    READ,
    RELEASE,
    REPLY,
    REQUEST,
    SLICE_BYTES,
    SLICES,
    STARTED,
    HelperSettings,
    curve_keys,
    frame,
    parsed,
    peer_socket,
)
from kvoffd.tiers.tier import READERS_NICE

IDLE_MS, WAITING_MS, WORKING_S = 20, 1, 0.00005
"""Pauses between calls that let NIXL work: without work, while something is lent or read and no byte comes, and with
work. A message ends the first two. NIXL's own thread would take a whole CPU (measured), even without work."""
CALLS_PER_TURN = 4
"""Such calls in a turn of the loop while there is work: looking for messages takes as long as several of them."""
MOVED_S = 0.000015
"""A call that took longer moved bytes, and another one follows without a pause: at 256 KiB 0.94 of the speed of NIXL
alone instead of 0.77. A call that finds nothing takes 2 µs."""
BUSY_AFTER_S = 0.02
"""Time after the last message or byte for which the pauses stay short."""
STUCK_S = 10.0
"""Time after which a read of a peer counts as stuck: its memory is free again once NIXL says how it ended. Until then a
peer all of whose reads are stuck is asked nothing."""
MAX_IN_FLIGHT = 16
"""Requests of all peers that the daemon has not answered."""
IN_FLIGHT_S = 1.0
"""Time after which such a request counts as answered."""
REQUESTS_PER_S, BURST = 2000, 400
"""Limit of a peer's requests; those beyond it are dropped, except returns of what is lent."""
MAX_ASKERS, MAX_ASKED = 1024, 1024
"""Connections of peers that are answered in one second, and questions whose answers are awaited."""
AT_ONCE = 64
"""Messages of one socket that are read before the others have their turn."""
KEEPS_AWAKE_S, MAX_LENT = 10.0, 65_536
"""Time for which what was lent keeps the pauses at ``WAITING_MS`` or less, unless it is returned, and limit of such
requests."""
HEARTBEAT_MS, LOST_MS = 3000, 4000
"""Interval at which the end that connected asks the other one for a sign of life, and time without one after which
it takes the connection for lost."""
KEEPALIVE_S, KEEPALIVE_PROBES = 3, 2
"""Time without a packet after which the kernel of the other end tests the connection, at this interval, and unanswered
tests after which it is lost. ZeroMQ's own time limit there would end with the next message."""
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
LINK_EVENTS = (
    zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | HANDSHAKE_FAILED
)
"""Events of a connection to a peer that ``Link`` needs."""
DOMAIN = "kvoffd"
PR_SET_PDEATHSIG = 1
RECONNECT_MS, MAX_RECONNECT_MS = 100, 1000
SIOCGIFFLAGS, SIOCGIFADDR, UP_AND_RUNNING = 0x8913, 0x8915, 0x41
"""See netdevice(7)."""
RTM_NEWLINK, RTM_DELLINK, RTM_DELADDR, RTMGRP_LINK_AND_IPV4 = 16, 17, 21, 0x11
"""See rtnetlink(7)."""
INFINIBAND, ACTIVE = Path("/sys/class/infiniband"), "4:"
"""See the kernel's Documentation/ABI/stable/sysfs-class-infiniband."""


class Agent(NamedTuple):
    """Agent of NIXL in a peer, which this node's reads from. ``pool_at``: address of the peer's pool there."""

    metadata: bytes
    name: str
    pool_at: int


class PeerTransfer:
    """A read of a peer's memory, from when it begins until its slice is free.

    Attributes:
        agent: the peer's when it began.
        ident: the daemon's id of the read.
        handle: NIXL's; None once the read has ended.
    """

    def __init__(self, peer: int, agent: Agent, ident: int, slice_number: int, handle: Any, began: float) -> None:
        self.peer, self.agent, self.ident = peer, agent, ident
        self.slice_number, self.handle, self.began = slice_number, handle, began
        self.unawaited = False
        """Whether the daemon has freed it (FREE): its slice is free once it has ended."""


def events_of(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """Yield the events that a monitor socket has now, up to ``AT_ONCE``."""
    for _ in range(AT_ONCE):
        if not cast(int, monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            return
        yield parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]


class Link:
    """Reason why a peer is not connected, by the events of its socket.

    | event                                        | then the problem is                         |
    |----------------------------------------------|---------------------------------------------|
    | CONNECT_DELAYED                              | as before: an attempt begins                |
    | CLOSED, early or late after CONNECT_DELAYED  | CLOSED or SILENT                            |
    | CONNECT_RETRIED without CONNECT_DELAYED      | UNKNOWN: there was no address to connect to |
    | a handshake fails                            | REFUSED                                     |
    | HANDSHAKE_SUCCEEDED                          | none                                        |
    """

    SILENT = "{} cannot be reached: its host does not answer; check its address, and firewalls on the way."
    CLOSED = "{} cannot be reached: nothing listens there; check whether its daemon runs, and its peer_listen."
    UNKNOWN = "{} cannot be reached: its name is not known here; check how it is written in peers."
    REFUSED = "{} refuses this node: it has another secret, or is no kvoffd; give all nodes the same peer_secret_file."

    def __init__(self, peer: zmq.Socket[bytes]) -> None:
        self.events: zmq.Socket[bytes] = peer.get_monitor_socket(LINK_EVENTS)
        self.problem = ""
        """A sentence with a place for the peer's address, once an attempt has failed and none has succeeded since."""
        self._tried_at: float | None = None
        """Time when the last attempt to connect began."""

    def take(self) -> bool:
        """Read the events that are there. Returns whether it was connected among them."""
        connected = False
        for event in events_of(self.events):
            if event == zmq.EVENT_CONNECT_DELAYED:
                self._tried_at = time.monotonic()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.problem, connected = "", True
            elif event & HANDSHAKE_FAILED:
                self.problem = self.REFUSED
            elif event == zmq.EVENT_CLOSED and self._tried_at is not None:
                waited_ms = 1000 * (time.monotonic() - self._tried_at)
                self.problem = self.SILENT if waited_ms >= LOST_MS / 2 else self.CLOSED
            elif event == zmq.EVENT_CONNECT_RETRIED:
                if self._tried_at is None:
                    self.problem = self.UNKNOWN
                self._tried_at = None
        return connected


class Helper:
    """Passes requests and answers between the daemon and peers, and has NIXL read their memory. In one thread."""

    def __init__(self, channel: socket.socket, settings: HelperSettings) -> None:
        self._channel, self._settings = channel, settings
        self._zmq = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._poller.register(channel, zmq.POLLIN)
        self._keys = curve_keys(settings.secret)
        self._router: zmq.Socket[bytes] | None = None
        self._router_events: zmq.Socket[bytes] | None = None
        self._refused_handshakes = 0
        """Connections of peers whose handshake failed."""
        self._links: dict[int, Link] = {}
        self._without_socket: dict[int, str] = {}
        """Reasons why peers have no socket, by number."""
        self._lent_until: dict[tuple[bytes, int], float] = {}
        """Time until which what a request has borrowed, by its route and id, counts as lent."""
        self._in_flight: dict[tuple[bytes, int], float] = {}
        """Time at which a request, by its route and id, counts as answered."""
        self._spent: Counter[bytes] = Counter()
        """Requests of each peer, by its route: see ``REQUESTS_PER_S``."""
        self._spent_since = time.monotonic()
        """Time when a second's worth of them was last taken off."""
        self._asked: dict[int, int] = {}
        """Peers by the ids of questions that they have not answered."""
        self._free = [list(range(n * SLICES, (n + 1) * SLICES)) for n in range(len(settings.peers))]
        """Slices of the landing memory that each peer's reads may use now."""
        self._transfers: dict[int, PeerTransfer] = {}
        """Reads by the daemon's ids."""
        self._stuck = set[int]()
        """Peers that are asked nothing, because all of their reads are stuck."""
        self._stuck_reads = 0
        """Reads of all peers that are stuck: they alone do not count as work."""
        self._agents: dict[int, Agent] = {}
        """Agents by the peer's number. A peer that has two numbers, for two of its names, has one agent under both."""
        self._busy_until = self._beat_at = 0.0
        """Time until which the loop does not pause for long, and time of the next sign of life."""
        self._start_nixl()
        self._peers: list[zmq.Socket[bytes] | None] = [None] * len(settings.peers)
        self._connect_missing()
        if settings.listen:
            self._listen()

    def _start_nixl(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        # So that a peer that is gone is noticed within seconds.
        os.environ.setdefault("UCX_KEEPALIVE_INTERVAL", "1s")
        nixl: Any = None
        for name in MODULES:
            with suppress(ImportError):
                nixl = importlib.import_module(name)
                break
        if nixl is None:
            raise RuntimeError("NIXL is not installed.")
        with unbroken_interfaces() as self._interfaces:
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._nixl = nixl.nixl_agent(f"kvoffd-{os.urandom(8).hex()}", config)
        self._pool_at = self._landing_at = 0
        (pool, offset, pool_bytes), (landing, landing_bytes) = self._settings.pool, self._settings.landing
        regions = []
        if pool >= 0:
            self._pool_at = map_shared(pool, pool_bytes, offset, mmap.PROT_READ).address
            regions.append((self._pool_at, pool_bytes, 0, ""))
        if landing >= 0:
            self._landing_at = map_shared(landing, landing_bytes, 0).address
            regions.append((self._landing_at, landing_bytes, 0, ""))
        self._nixl.register_memory(regions, "DRAM")
        self._metadata = self._nixl.get_agent_metadata()

    # --- connections ------------------------------------------------------------------------------

    def _connect(self, number: int, peer: str, *, waits: bool) -> zmq.Socket[bytes]:
        """Begin to connect. Until that is done requests fail at once, or wait if ``waits``."""
        dealer = peer_socket(self._zmq, zmq.DEALER, self._keys)
        dealer.setsockopt(zmq.IMMEDIATE, not waits)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, LOST_MS)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, LOST_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_MS + LOST_MS)  # of the other end
        link = Link(dealer)
        dealer.connect(f"tcp://{peer}")
        self._links[number] = link
        self._poller.register(link.events, zmq.POLLIN)
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _replace(self, number: int, address: str) -> None:
        """Give a peer's number to another one, or to none."""
        if (before := self._peers[number]) is not None:
            self._poller.unregister(before)
            self._poller.unregister(self._links.pop(number).events)
            before.disable_monitor()
            before.close()
        self._asked = {ident: of for ident, of in self._asked.items() if of != number}
        agent = self._agents.pop(number, None)
        if agent is not None and agent not in self._agents.values():
            self._remove_agent(agent.name)
        self._settings.peers[number] = address
        self._peers[number] = None
        self._without_socket.pop(number, None)
        self._connect_missing(waits=True)

    def _connect_missing(self, *, waits: bool = False) -> None:
        """Begin to connect the peers without a socket, again at each sign of life: there may be no descriptor for it.
        ``waits``: see ``_connect``."""
        for number, address in enumerate(self._settings.peers):
            if not address or self._peers[number] is not None:
                continue
            try:
                self._peers[number] = self._connect(number, address, waits=waits)
            except zmq.ZMQError as error:
                if number not in self._without_socket:
                    print(f"{address} is not connected: {error}. It is tried again each second.", file=sys.stderr)
                self._without_socket[number] = str(error)
            else:
                self._without_socket.pop(number, None)

    def _listen(self) -> None:
        public, _ = self._keys

        class Provider:
            def callback(self, domain: str, key: bytes) -> bool:
                return key == public

        self._guard = ThreadAuthenticator(self._zmq)
        self._guard.start()
        self._guard.configure_curve_callback(DOMAIN, Provider())
        self._router = router = peer_socket(self._zmq, zmq.ROUTER, self._keys, is_server=True)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S),
            (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S),
            (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES),
            (zmq.TCP_MAXRT, LOST_MS + 1000 * KEEPALIVE_S * KEEPALIVE_PROBES),  # of what was sent
        ):
            router.setsockopt(option, value)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        self._router_events = router.get_monitor_socket(HANDSHAKE_FAILED)
        self._poller.register(self._router_events, zmq.POLLIN)
        host, _, port = self._settings.listen.rpartition(":")
        router.bind(f"tcp://{host or '*'}:{port}")
        self._poller.register(router, zmq.POLLIN)

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Pass messages and let NIXL work, until the daemon is gone, or there are interfaces that NIXL did not find at
        its start: then the daemon starts a new helper."""
        self._to_daemon(STARTED, 0, 0)
        fd = self._channel.fileno()
        while True:
            now = time.monotonic()
            self._drop_expired(now)
            if now >= self._beat_at:
                self._beat_at = now + BEAT_S
                self._to_daemon(BEAT, 0, self._refused_handshakes)
                self._connect_missing()
                if new := interfaces().keys() - self._interfaces:
                    print(f"The helper process for peers starts again, to use {', '.join(new)}.", file=sys.stderr)
                    return
            reading = len(self._transfers) > self._stuck_reads
            waiting = reading or bool(self._lent_until)
            pause_ms = 0 if now < self._busy_until else WAITING_MS if waiting else IDLE_MS
            if ready := dict(self._poller.poll(pause_ms)):
                self._busy_until = time.monotonic() + BUSY_AFTER_S
            if fd in ready:
                while select.select([fd], [], [], 0)[0]:
                    if not (data := self._channel.recv(MAX_MESSAGE_BYTES)):
                        return  # the daemon is gone
                    self._from_daemon(*parsed(data))
            for number, link in self._links.items():
                if ready.pop(link.events, 0) and link.take():
                    # NIXL connects again too, once ZeroMQ has: its old connection may hang as long as the network was
                    # away, since TCP doubles the time to its next try.
                    self._drop_agent(number)
            if self._router_events is not None and ready.pop(self._router_events, 0):
                self._refused_handshakes += sum(1 for _ in events_of(self._router_events))
            for number, peer in enumerate(self._peers):
                if peer is not None and peer in ready:
                    self._pass_answers(number, peer)
            if self._router is not None and self._router in ready:
                self._pass_requests(self._router)
            self._let_nixl_work(now, waiting=waiting)

    def _let_nixl_work(self, now: float, *, waiting: bool) -> None:
        """Call NIXL, several times while there is work or bytes move, and report the reads that have ended.
        ``waiting``: whether anything is lent or read."""
        busy = now < self._busy_until
        for call in range(CALLS_PER_TURN):
            began = time.perf_counter()
            self._nixl.get_new_notifs()
            moved = time.perf_counter() - began > MOVED_S
            if moved and (busy or waiting or call > 0):  # a turn's first call may take as long without work
                self._busy_until = time.monotonic() + BUSY_AFTER_S
            if self._transfers and self._end_transfers(now):
                break
            if not moved:
                if not busy:
                    break
                time.sleep(WORKING_S)

    def _drop_expired(self, now: float) -> None:
        """Drop the entries whose time has come, of tables in the order of these times, and count a new second."""
        for table in (self._lent_until, self._in_flight):
            while table and next(iter(table.values())) <= now:
                del table[next(iter(table))]
        if now >= self._spent_since + 1.0:
            self._spent_since = now
            self._spent = Counter({route: n - REQUESTS_PER_S for route, n in self._spent.items() if n > REQUESTS_PER_S})

    def _to_daemon(self, kind: int, number: int, ident: int, payload: bytes = b"") -> None:
        self._channel.send(frame(kind, number, ident, payload))

    def _from_daemon(self, kind: int, number: int, ident: int, payload: bytes) -> None:
        if kind in (FIND, PIN, RELEASE, FOLLOW):
            self._to_peer(kind, number, ident, payload)
        elif kind == READ:
            self._begin_read(number, ident, *np.frombuffer(payload, np.uint64).reshape(-1, 2).T)
        elif kind == FREE:
            self._free_slice(ident)
        elif kind == CONNECT:
            self._replace(number, payload.decode())
        elif kind == REPLY:
            self._reply(payload[:number], ident, payload[number:])

    def _to_peer(self, kind: int, number: int, ident: int, payload: bytes) -> None:
        """Send a question or a RELEASE to a peer. The daemon hears of a question that cannot be sent."""
        peer, link, name = self._peers[number], self._links.get(number), self._settings.peers[number]
        problem = link.problem if link is not None else ""
        if number in self._without_socket:
            problem = f"{{}} is not connected: {self._without_socket[number]}; it is tried again each second."
        if kind in (FIND, PIN) and number in self._stuck:
            why = (
                f"{name} answers, but its blocks do not come; let through the ports that UCX uses "
                "(UCX_TCP_PORT_RANGE), and look whether it hangs."
            )
            self._to_daemon(FAILED, number, ident, why.encode())
            return
        try:
            if peer is None or (kind != RELEASE and problem):
                raise zmq.Again
            peer.send_multipart([bytes([kind]), ident.to_bytes(8, "little"), payload], zmq.NOBLOCK)
        except zmq.Again:
            if kind != RELEASE:
                self._to_daemon(FAILED, number, ident, (problem or Link.SILENT).format(name).encode())
            return
        if kind != RELEASE:
            self._asked[ident] = number
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]

    # --- serving ----------------------------------------------------------------------------------

    def _pass_requests(self, router: zmq.Socket[bytes]) -> None:
        """Pass peers' requests to the daemon. What is not one, or too much, gets no answer."""
        for _ in range(AT_ONCE):
            if len(self._in_flight) >= MAX_IN_FLIGHT or not cast(int, router.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            route, *parts = router.recv_multipart(zmq.NOBLOCK)
            if len(parts) != 3 or len(parts[0]) != 1 or len(parts[1]) != 8:
                continue
            kind, ident = parts[0][0], int.from_bytes(parts[1], "little")
            if kind not in (FIND, PIN, RELEASE, FOLLOW):
                continue
            returns_lent = kind == RELEASE and self._lent_until.pop((route, ident), None) is not None
            if not (returns_lent or self._spend(route, ident)):
                continue
            if kind != RELEASE:
                self._in_flight[route, ident] = time.monotonic() + IN_FLIGHT_S
            if kind == PIN:
                put_newest(self._lent_until, (route, ident), time.monotonic() + KEEPS_AWAKE_S, MAX_LENT)
            self._to_daemon(REQUEST, len(route), ident, route + parts[0] + parts[2])

    def _spend(self, route: bytes, ident: int) -> bool:
        """Count a request; return False if it is beyond the limits, or repeats one that is not answered."""
        if len(self._spent) >= MAX_ASKERS and route not in self._spent:
            return False
        if self._spent[route] >= REQUESTS_PER_S + BURST or (route, ident) in self._in_flight:
            return False
        self._spent[route] += 1
        return True

    def _reply(self, route: bytes, ident: int, payload: bytes) -> None:
        """Send the daemon's answer to a peer, with how it reads this node's pool."""
        assert self._router is not None
        self._in_flight.pop((route, ident), None)
        where = msgspec.msgpack.encode((self._metadata, self._pool_at))
        with suppress(zmq.ZMQError):
            self._router.send_multipart([route, ident.to_bytes(8, "little"), payload, where], zmq.NOBLOCK)

    # --- reading ----------------------------------------------------------------------------------

    def _pass_answers(self, number: int, peer: zmq.Socket[bytes]) -> None:
        """Pass a peer's answers to the daemon."""
        for _ in range(AT_ONCE):
            if not cast(int, peer.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            parts = peer.recv_multipart(zmq.NOBLOCK)
            ident = int.from_bytes(parts[0], "little")
            if len(parts) != 3 or self._asked.get(ident) != number:
                continue  # nobody asked it
            del self._asked[ident]
            try:
                metadata, pool_at = msgspec.msgpack.decode(parts[2], type=tuple[bytes, int])
                self._set_agent(number, metadata, pool_at)
            except Exception as error:  # a peer that lies
                self._to_daemon(FAILED, number, ident, f"Its answer is not valid: {error}.".encode())
                continue
            self._to_daemon(ANSWER, number, ident, parts[1])

    def _set_agent(self, number: int, metadata: bytes, pool_at: int) -> None:
        """Have NIXL reach a peer by this agent; it has a new one after a restart."""
        known = self._agents.get(number)
        if known is not None and (known.metadata, known.pool_at) == (metadata, pool_at):
            return
        self._drop_agent(number)
        for agent in self._agents.values():
            if (agent.metadata, agent.pool_at) == (metadata, pool_at):
                self._agents[number] = agent
                return
        name = self._nixl.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        if any(agent.name == name for agent in self._agents.values()):
            raise ValueError("another peer has the same agent")
        self._agents[number] = Agent(metadata, name, pool_at)

    def _drop_agent(self, number: int) -> None:
        """Remove a peer's agent, if it has one, under all its numbers: NIXL connects again with its next answer."""
        if (known := self._agents.get(number)) is None:
            return
        self._agents = {at: agent for at, agent in self._agents.items() if agent.name != known.name}
        self._remove_agent(known.name)

    def _remove_agent(self, name: str) -> None:
        with suppress(Exception):  # of a peer that is gone; other peers are read all the same
            self._nixl.remove_remote_agent(name)

    def _begin_read(
        self, number: int, ident: int, offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
    ) -> None:
        """Begin to read pieces of a peer's pool into one of its slices, or tell the daemon that it cannot begin."""
        if (agent := self._agents.get(number)) is None:
            self._to_daemon(FAILED, number, ident, b"The peer is not known.")
            return
        if not self._free[number] or int(lengths.sum()) > SLICE_BYTES:
            why = b"Earlier reads of it hang." if not self._free[number] else b"One read is for too many bytes."
            self._to_daemon(FAILED, number, ident, why)
            return
        slice_number = self._free[number].pop()
        begins = np.cumsum(lengths, dtype=np.uint64) - lengths
        slice_at, devices = self._landing_at + slice_number * SLICE_BYTES, np.zeros_like(lengths)
        try:
            here = np.stack([begins + np.uint64(slice_at), lengths, devices], axis=1)
            there = np.stack([offsets + np.uint64(agent.pool_at), lengths, devices], axis=1)
            lists = self._nixl.get_xfer_descs(here, "DRAM"), self._nixl.get_xfer_descs(there, "DRAM")
            handle = self._nixl.initialize_xfer("READ", *lists, agent.name)
        except Exception as error:  # as for a descriptor that is not in the peer's memory
            self._free[number].append(slice_number)
            self._drop_agent(number)
            self._to_daemon(FAILED, number, ident, f"NIXL refuses to read from it: {error}.".encode())
            return
        transfer = PeerTransfer(number, agent, ident, slice_number, handle, time.monotonic())
        self._transfers[ident] = transfer
        self._report_if_ended(transfer, self._nixl.transfer)

    def _end_transfers(self, now: float) -> bool:
        """Report reads that have ended, and note which peers are stuck; return whether any has ended."""
        ended = False
        for transfer in list(self._transfers.values()):
            if transfer.handle is not None:
                ended |= self._report_if_ended(transfer, self._nixl.check_xfer_state)
        stuck = Counter(
            transfer.peer
            for transfer in self._transfers.values()
            if transfer.handle is not None and now - transfer.began > STUCK_S
        )
        self._stuck = {peer for peer, count in stuck.items() if count == SLICES}
        self._stuck_reads = stuck.total()
        return ended

    def _report_if_ended(self, transfer: PeerTransfer, state_of: Callable[[Any], str]) -> bool:
        """Report a read to the daemon if NIXL says that it has ended; return whether it has. ``state_of``: the call of
        NIXL that begins it, or looks at it."""
        try:
            state = state_of(transfer.handle)
        except Exception:
            state = "ERR"
        if state == "PROC":
            return False
        handle, transfer.handle = transfer.handle, None
        with suppress(Exception):
            self._nixl.release_xfer_handle(handle)
        if state != "DONE" or transfer.unawaited:
            self._free_slice(transfer.ident)
        if state == "DONE":
            self._to_daemon(DONE, transfer.peer, transfer.ident, bytes([transfer.slice_number]))
        else:
            if self._agents.get(transfer.peer) is transfer.agent:  # else a later one reads from it by now
                self._drop_agent(transfer.peer)
            self._to_daemon(FAILED, transfer.peer, transfer.ident, b"The connection to it was lost during a read.")
        return True

    def _free_slice(self, ident: int) -> None:
        """Have a read's slice used again: now, or once nothing can be written there any more."""
        if (transfer := self._transfers.get(ident)) is None:
            return
        transfer.unawaited = True
        if transfer.handle is None:
            del self._transfers[ident]
            self._free[transfer.peer].append(transfer.slice_number)


def interfaces() -> dict[str, int]:
    """Return the IPv4 addresses of interfaces that are up, with the interface's index, and the RDMA ports that are
    active, with 0.

    An agent of NIXL has those that UCX finds at its start: what came up later is never used, and a node that started
    before its network could never be reached.
    """
    found = dict[str, int]()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for state in INFINIBAND.glob("*/ports/*/state"):
            if state.read_text().startswith(ACTIVE):
                found[state.parts[-4]] = 0
        for index, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            with suppress(OSError):  # it has no address, or is gone
                address = socket.inet_ntoa(fcntl.ioctl(asked, SIOCGIFADDR, request)[20:24])
                (flags,) = struct.unpack_from("H", fcntl.ioctl(asked, SIOCGIFFLAGS, request), 16)
                if flags & UP_AND_RUNNING == UP_AND_RUNNING:
                    found[address] = index
    return found


@contextmanager
def unbroken_interfaces() -> Iterator[set[str]]:
    """Yield a set that gets, at the end, the ``interfaces`` that were up all the time: UCX may have missed others."""
    found = set[str]()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE) as changes:
        changes.bind((0, RTMGRP_LINK_AND_IPV4))
        before = interfaces()
        yield found  # which is filled below, for the caller to read after the ``with``
        broken = set[int]()
        with suppress(OSError):  # no more, or more than the kernel keeps
            while data := changes.recv(1 << 16):
                while data:
                    # Of a message about an address the index is at the same place, and the flags are not used.
                    nbytes, kind, index, flags = struct.unpack_from("IH14xiI", data)
                    is_up = flags & UP_AND_RUNNING == UP_AND_RUNNING
                    if kind in (RTM_DELLINK, RTM_DELADDR) or (kind == RTM_NEWLINK and not is_up):
                        broken.add(index)
                    data = data[-(-nbytes // 4) * 4 :]
        found |= {one for one, index in before.items() if index not in broken} & interfaces().keys()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it hangs; before that the channel is closed
    channel = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.msgpack.decode(channel.recv(MAX_MESSAGE_BYTES), type=HelperSettings)
    with suppress(OSError):
        os.nice(READERS_NICE)
    try:
        helper = Helper(channel, settings)
    except Exception as error:
        why = f"The helper process for peers cannot work: {error}."
        channel.send(frame(STARTED, 0, 0, why.encode()[:4096]))
        sys.exit(1)
    helper.run()
    os._exit(0)  # a hanging peer must not keep NIXL from ending


if __name__ == "__main__":
    main()
