"""KV events for routers over TCP: a PUB socket that listens, or that connects to routers, and one that replays.

Whoever can connect reads the token ids of all prompts that are stored: there is no encryption and no access control, as
with the publisher of vLLM. A subscriber that does not read is disconnected, and gets all anew when it comes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_network
from typing import cast

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.observe.logging import RareWarnings
from kvoffd.server.listening import listeners_of
from kvoffd.server.router_index import RouterIndex
from kvoffd.server.router_stream import RouterMessage, RouterStream
from kvoffd.settings import Address, parse_address
from kvoffd_proto import zmtp
from kvoffd_proto.events import SEQUENCE_BYTES

logger = logging.getLogger(__name__)

PUBLISH_S = 0.02
"""News are collected for so long."""
HANDSHAKE_S = 10.0
"""How long a peer may take to say that it speaks ZeroMQ."""
CONNECT_TIMEOUT_S = 5.0
"""How long a router may take to accept a connection."""
RECONNECT_S = 1.0
"""Between two attempts to connect to a router."""
MAX_PEERS = 64
"""Connections to each of the two addresses; a further one takes the place of one of the host that has the most."""
MAX_UNSENT_BYTES, MAX_ALL_UNSENT_BYTES = 8 * 1024**2, 64 * 1024**2
"""What a peer, and all together, may leave unread; beyond that it, or the one with most of it, is disconnected."""
SNAPSHOT_UNSENT_BYTES, SNAPSHOT_REST_S = 1024**2, 0.01
"""A snapshot rests while its readers have so much unread."""
SNAPSHOT_DEADLINE_S = 60.0
"""Readers for which a snapshot still rests then are disconnected: others wait for the next one."""
SNAPSHOT_PAUSE_S, SNAPSHOT_SHARE = 0.5, 4
"""Between two snapshots, or longer, so that they take one part in so many of the loop's time."""
OBEYED_AT_ONCE, REST_S = 16, 0.1
"""Messages of a peer that are obeyed before it is not read for so long, as after a replay: engines need the loop."""
MAX_RESTS = 20
"""A peer that has sent more each time is disconnected then."""
REPLAYED_AT_ONCE = 16
MAX_FRAME_BYTES, MAX_FRAMES = 512, 4
MAX_SUBSCRIPTIONS = 64


class _Peer(asyncio.Protocol):
    """One connection. ``type`` is our socket's; ``ours``: it was opened here."""

    def __init__(self, server: RouterServer, socket_type: bytes, peers: frozenset[bytes], ours: bool = False) -> None:
        self._server = server
        self._type = socket_type
        self.ours = ours
        self._input = zmtp.Input(peers, MAX_FRAME_BYTES, MAX_FRAMES)
        self._replay: Iterator[tuple[bytes, bytes, bytes]] | None = None
        self._paused = False
        self._resting = False
        """What it sent is obeyed later, and no more is read."""
        self._rests = 0
        """One after another with as much to obey as is obeyed at once."""
        self.transport: asyncio.Transport
        self.prefixes: set[bytes] = set()
        """What it subscribed to."""
        self.opened_at = 0.0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of another class
        self.opened_at = asyncio.get_running_loop().time()
        host = (transport.get_extra_info("peername") or ("",))[0].partition("%")[0].removeprefix("::ffff:")
        # Who has an IPv6 address has many.
        self.host = str(ip_network((host, 64), strict=False)) if ":" in host else host
        if not self._server.admit(self, self._type):
            self.transport.abort()
            return
        self.transport.write(zmtp.opening(self._type))

    def connection_lost(self, error: Exception | None) -> None:
        self._replay = None
        self._server.forget(self)
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._input.feed(data)
        if not self._resting:
            self._obey_some()

    def _obey_some(self) -> None:
        """Obey some of what has arrived, and read on or rest."""
        transport = self.transport
        if transport.is_closing():
            return
        self._resting = False
        try:
            for _ in range(OBEYED_AT_ONCE):
                if self._replay is not None or (taken := self._input.next()) is None:
                    self._rests = 0
                    break
                self._obey(taken)
                if self._resting or transport.is_closing():  # a short replay is over already
                    break
            else:
                self._rests += 1
                if self._rests > MAX_RESTS:
                    raise zmtp.ZmtpError("more than anybody needs")
                self._rest()
        except zmtp.ZmtpError as error:
            self.abort(f"it sent {error}")
        if self._replay is None and not self._resting and not transport.is_closing() and not transport.is_reading():
            transport.resume_reading()

    def _rest(self) -> None:
        if not self.transport.is_closing():
            self._resting = True
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(REST_S, self._obey_some)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on_replaying()

    @property
    def ready(self) -> bool:
        return self._input.ready

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.transport.is_closing() else self.transport.get_write_buffer_size()

    def send(self, frames: tuple[bytes, ...]) -> None:
        self._write(zmtp.encode(frames))

    def _write(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(data)
        if self.unsent_bytes > MAX_UNSENT_BYTES:
            self.abort_unread()
        elif self._server.unsent_bytes > MAX_ALL_UNSENT_BYTES:
            self._server.drop_slowest()

    def abort_unread(self) -> None:
        self.abort(f"it left {self.unsent_bytes} bytes unread")

    def abort(self, why: str) -> None:
        if not self.transport.is_closing():
            name = self.transport.get_extra_info("peername")
            self._server.dropped_subscribers += 1
            self._server.warnings.warn("The connection of the router at %s was closed: %s.", name, why)
            self.transport.abort()

    def _obey(self, taken: list[bytes] | zmtp.Command | zmtp.TooLong) -> None:
        if isinstance(taken, zmtp.TooLong):
            raise zmtp.ZmtpError(f"a frame of {taken.frame_bytes} bytes")
        if isinstance(taken, zmtp.Command):
            if taken.name == b"PING":
                self._write(zmtp.encode_pong(taken))
            elif taken.name in (b"SUBSCRIBE", b"CANCEL") and self._type == b"PUB":
                self._subscribe(taken.data, wanted=taken.name == b"SUBSCRIBE")
        elif self._type == b"PUB":
            wanted, prefix = zmtp.decode_subscription(taken)
            self._subscribe(prefix, wanted=wanted)
        elif len(taken) == 2 and not taken[0] and len(taken[1]) == SEQUENCE_BYTES:
            self._replay = self._server.replay(int.from_bytes(taken[1], "big"))
            self.transport.pause_reading()
            self._go_on_replaying()
        else:
            raise zmtp.ZmtpError("what is no request for a replay")

    def _subscribe(self, prefix: bytes, *, wanted: bool) -> None:
        if not wanted:
            self.prefixes.discard(prefix)
        elif prefix not in self.prefixes:
            if len(self.prefixes) == MAX_SUBSCRIPTIONS:
                raise zmtp.ZmtpError(f"more than {MAX_SUBSCRIPTIONS} subscriptions")
            self.prefixes.add(prefix)
            self._server.joined(self)

    def _go_on_replaying(self) -> None:
        """Send some of a replay, and the rest at later turns of the loop, as far as it is read."""
        for _ in range(REPLAYED_AT_ONCE):
            if self._replay is None or self._paused:
                return
            if (frames := next(self._replay, None)) is None:
                self._replay = None
                self._rest()
                return
            self.send((b"", *frames))
        asyncio.get_running_loop().call_soon(self._go_on_replaying)


class RouterServer:
    """Publishes what ``index`` has, from ``open`` to ``close``."""

    def __init__(self, index: RouterIndex, config: Config) -> None:
        self._index = index
        self._config = config
        self._stream = RouterStream(index, config.event_buffer_steps)
        self._loop = asyncio.get_running_loop()
        self._peers: dict[_Peer, bytes] = {}
        """All connections, and which socket of ours they are to."""
        self._joining: set[_Peer] = set()
        self._readers: set[_Peer] = set()
        """Those to whom the running snapshot goes."""
        self._snapshot: Iterator[tuple[RouterMessage, RouterMessage]] | None = None
        self._snapshot_began_at = 0.0
        self._snapshot_s = 0.0
        """What it took of the loop's time."""
        self._next_snapshot_at = 0.0
        self._going_on: asyncio.TimerHandle | None = None
        self._servers: list[asyncio.Server] = []
        self._connectors: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._last_at = self._loop.time()
        self.warnings = RareWarnings(logger)
        self.snapshots = 0
        self.replays = 0
        self.dropped_subscribers = 0

    @property
    def subscribers(self) -> int:
        return sum(bool(peer.prefixes) for peer in self._peers)

    @property
    def unsent_bytes(self) -> int:
        return sum(peer.unsent_bytes for peer in self._peers)

    @property
    def messages(self) -> int:
        return self._stream.messages

    async def open(self) -> None:
        """Listen and begin to connect. Raises KvoffdError where an address cannot be had."""
        publish = partial(_Peer, self, b"PUB", frozenset({b"SUB", b"XSUB"}))
        replay = partial(_Peer, self, b"ROUTER", frozenset({b"DEALER", b"REQ"}))
        addresses = ((self._config.event_address, publish), (self._config.event_replay_address, replay))
        for address, factory in addresses:
            if address:
                await self._listen(parse_address(address), factory)
        for address in self._config.event_connect:
            factory = partial(publish, ours=True)
            self._connectors.append(asyncio.create_task(self._stay_connected(parse_address(address), factory)))
        self._timer = self._loop.call_later(PUBLISH_S, self._tick)

    async def _listen(self, address: Address, factory: partial[_Peer]) -> None:
        try:
            for listener in await listeners_of(address, MAX_PEERS):
                self._servers.append(await self._loop.create_server(factory, sock=listener))
        except OSError as error:
            await self.close()
            raise KvoffdError(
                f"KV events cannot be served at {address.host}:{address.port} ({error.strerror or error}); free the "
                "address, or choose another event_address or event_replay_address."
            ) from error

    async def _stay_connected(self, address: Address, factory: partial[_Peer]) -> None:
        logged = False
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, peer = await self._loop.create_connection(factory, address.host, address.port)
            except OSError as error:  # a TimeoutError is one
                if not logged:
                    logger.warning("No router at %s:%d yet: %s.", address.host, address.port, error)
                logged = True
            else:
                logged = False
                await peer.closed
            await asyncio.sleep(RECONNECT_S)

    async def close(self) -> None:
        for timer in (self._timer, self._going_on):
            if timer is not None:
                timer.cancel()
        for task in self._connectors:
            task.cancel()
        await asyncio.gather(*self._connectors, return_exceptions=True)
        for server in self._servers:
            server.close()
        for peer in list(self._peers):
            peer.transport.close()

    # --- called by connections --------------------------------------------------------------------

    def admit(self, peer: _Peer, socket_type: bytes) -> bool:
        same = [one for one, of_type in self._peers.items() if of_type == socket_type and not one.ours]
        if len(same) >= MAX_PEERS and not peer.ours and not self._make_place(peer, same):
            self.warnings.warn("A router was refused: %d are connected already.", MAX_PEERS)
            return False
        self._peers[peer] = socket_type
        return True

    def _make_place(self, newcomer: _Peer, others: list[_Peer]) -> bool:
        """Close a connection without a handshake, or the oldest of the host that has more than the newcomer's would."""
        why, hosts = "it has not finished ZeroMQ's handshake", Counter([one.host for one in others])
        gone = next((one for one in others if not one.ready), None)
        if gone is None:
            host, most = hosts.most_common(1)[0]
            if hosts[newcomer.host] + 1 >= most:
                return False
            why, gone = "its host has the most connections", next(one for one in others if one.host == host)
        gone.abort(f"others want its place, and {why}")
        self.forget(gone)
        return True

    def forget(self, peer: _Peer) -> None:
        self._peers.pop(peer, None)
        self._joining.discard(peer)
        self._readers.discard(peer)

    def joined(self, peer: _Peer) -> None:
        """The peer has subscribed: it is to get all that is published."""
        self._joining.add(peer)
        self._go_on_at(self._next_snapshot_at)

    def drop_slowest(self) -> None:
        """Disconnect whoever has left most unread."""
        max(self._peers, key=lambda peer: peer.unsent_bytes).abort_unread()

    def replay(self, start: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        self.replays += 1
        return self._stream.replay(start)

    # --- publishing -------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PUBLISH_S, self._tick)
        now = self._loop.time()
        try:
            if self._index.has_news:
                self._publish_news()
            if now - self._last_at >= self._config.event_heartbeat_s:
                self._publish(self._stream.heartbeat())
        except Exception:  # the loop that serves engines must outlive it
            logger.exception("KV events for routers failed inside the daemon.")
        for peer in list(self._peers):
            if not peer.ready and now - peer.opened_at > HANDSHAKE_S:
                peer.abort("it did not finish ZeroMQ's handshake")

    def _publish_news(self) -> None:
        for message in self._stream.take():
            self._publish(message)

    def _publish(self, message: RouterMessage, late: RouterMessage | None = None) -> None:
        """Send ``message`` to all subscribers, or to the readers of the snapshot ``late`` in its place."""
        self._last_at = self._loop.time()
        empty = self._stream.empty_batch()
        encoded: dict[frozenset[bytes], tuple[bytes, bytes, bytes]] = {}
        for peer in list(self._peers):
            if not peer.prefixes:
                continue
            if late is not None and peer in self._readers:
                peer.send(late.frames(peer.prefixes, empty))
                continue
            key = frozenset(peer.prefixes)
            if key not in encoded:
                encoded[key] = message.frames(peer.prefixes, empty)
            peer.send(encoded[key])

    def _go_on_at(self, at: float) -> None:
        if self._going_on is None:
            self._going_on = self._loop.call_at(at, self._go_on)

    def _go_on(self) -> None:
        self._going_on = None
        began = time.monotonic()
        self._send_of_snapshot()
        self._snapshot_s += time.monotonic() - began
        now = self._loop.time()
        if self._snapshot is None:
            self._next_snapshot_at = now + max(SNAPSHOT_PAUSE_S, (SNAPSHOT_SHARE - 1) * self._snapshot_s)
            if self._joining:
                self._go_on_at(self._next_snapshot_at)
            return
        behind = [peer for peer in self._readers if peer.unsent_bytes > SNAPSHOT_UNSENT_BYTES]
        if behind and now - self._snapshot_began_at > SNAPSHOT_DEADLINE_S:
            for peer in behind:
                peer.abort_unread()
        self._go_on_at(now + SNAPSHOT_REST_S if behind else now)

    def _send_of_snapshot(self) -> None:
        """Send the next message of a snapshot, or begin one for those who have come since the last."""
        if self._snapshot is None:
            if not self._joining:
                return
            self._readers, self._joining = self._joining, set()
            self._publish_news()
            self._snapshot = self._stream.snapshot({prefix for peer in self._readers for prefix in peer.prefixes})
            self._snapshot_began_at, self._snapshot_s = self._loop.time(), 0.0
            self.snapshots += 1
        if any(peer.unsent_bytes > SNAPSHOT_UNSENT_BYTES for peer in self._readers):
            return
        self._publish_news()
        found = next(self._snapshot, None)
        if found is None or not self._readers:
            self._snapshot.close()  # type: ignore[attr-defined]
            self._snapshot = None
            self._readers.clear()
        else:
            late, others = found
            self._publish(others, late)
