"""The simulated sockets between clients and the daemon. Only a connection keeps its order."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from kvoffd_proto import lifeline
from tests.sim.clock import Clock, Process
from tests.sim.scenario import Faults

if TYPE_CHECKING:
    from kvoffd.server.session import Session
    from tests.sim.daemon import SimDaemon
    from tests.sim.memory import Segment

Item = TypeVar("Item")
Frames = Sequence[bytes]
HIGH_WATER = 3
"""Messages that wait to be read by one client; what is published or answered beyond it is lost."""


class Line(Generic[Item]):
    """One direction of one connection: first in, first out."""

    def __init__(self, network: Network, receiver: Process, deliver: Callable[[Item], None]) -> None:
        self._network, self._receiver, self._deliver = network, receiver, deliver
        self._last = 0.0
        self.under_way = 0

    def send(self, item: Item) -> None:
        """Have ``item`` delivered some time after everything that was sent before."""
        self._last = max(self._last, self._network.clock.now + self._network.delay())
        self.under_way += 1
        self._network.clock.at(self._last, lambda: self._receiver.run(lambda: self._arrive(item)))

    def _arrive(self, item: Item) -> None:
        self.under_way -= 1
        self._deliver(item)


class Lifeline:
    """A unix stream. What the kernel knows (who holds which end) is known at once, what is read comes later."""

    def __init__(self, network: Network, client: Process, on_frame: Callable[[lifeline.FromDaemon | None], None]):
        self.daemon = network.daemon
        self.client_open = True
        self.server_open = True
        self.session: Session | None = None
        self.to_daemon: Line[tuple[lifeline.Attach, Segment] | None] = Line(
            network, self.daemon.process, lambda frame: self.daemon.lifeline_frame(self, frame)
        )
        self.to_client: Line[lifeline.FromDaemon | None] = Line(network, client, on_frame)
        network.clock.after(network.delay(), lambda: self.daemon.process.run(lambda: self.daemon.accept(self)))

    # --- the daemon's end: what ``kvoffd.server.session.Lifeline`` asks for -------------------------

    def alive(self) -> bool:
        """Whether the peer holds its end or has left something to read, as MSG_PEEK tells it."""
        return self.server_open and (self.client_open or self._unread() > 0)

    def _unread(self) -> int:
        return self.to_daemon.under_way - (not self.client_open)

    def close(self) -> None:
        if self.server_open:
            self.server_open = False
            self.to_client.send(None)

    def close_descriptor(self, fd: int) -> None:
        os.close(fd)

    # --- the client's end ------------------------------------------------------------------------

    def hang_up(self) -> None:
        if self.client_open:
            self.client_open = False
            self.to_daemon.send(None)


class Dealer:
    """The client's jobs socket, under a routing id: connects again by itself when the daemon does."""

    def __init__(self, network: Network, client: Process, name: bytes, on_reply: Callable[[Frames], None]) -> None:
        self.name = name
        self.open = True
        self._network = network
        self._life = network.daemon
        self._waiting: list[Frames] = []
        self._line = self._connect()
        self._replies: Line[Frames] = Line(network, client, on_reply)

    def _connect(self) -> Line[Frames]:
        life = self._life
        return Line(self._network, life.process, lambda frames: life.receive(self, frames))

    def send(self, frames: Frames) -> bool:
        """Send to the daemon; False when the queue is full."""
        network = self._network
        if network.faults.hit("send_refused"):
            return False
        if self._life is not network.daemon and network.daemon.process.alive:
            self._life = network.daemon
            self._line = self._connect()
            for waiting in self._waiting:
                self._line.send(waiting)
            self._waiting.clear()
        if not self._life.process.alive:
            if len(self._waiting) >= 8:
                return False
            self._waiting.append(frames)
        elif not network.faults.hit("request_drop"):
            self._line.send(frames)
        return True

    def reply(self, frames: Frames) -> None:
        if self._replies.under_way >= HIGH_WATER:
            self._network.faults.counts["high_water"] += 1
        elif self.open and not self._network.faults.hit("reply_drop"):
            self._replies.send(frames)

    def close(self) -> None:
        self.open = False


class Subscription:
    """A client's events socket."""

    def __init__(
        self, network: Network, topics: Sequence[bytes], client: Process, on_frames: Callable[[Frames], None]
    ) -> None:
        self.open = True
        self._topics = tuple(topics)
        self._network = network
        self._line: Line[Frames] = Line(network, client, on_frames)
        self._active_from = 0.0
        self.connect()

    def connect(self) -> None:
        """Subscribe: what is published before that has reached the daemon is not for us."""
        network = self._network
        late = network.faults.hit("late_subscription")
        pause = network.rng.uniform(0.005, 0.3) if late else network.delay()
        self._active_from = network.clock.now + pause

    def offer(self, frames: Frames) -> None:
        network = self._network
        if not self.open or network.clock.now < self._active_from or not frames[0].startswith(self._topics):
            return
        if self._line.under_way >= HIGH_WATER:
            network.faults.counts["high_water"] += 1
        elif not network.faults.hit("pub_drop"):
            self._line.send(frames)


class Network:
    """All connections between clients and the daemon."""

    def __init__(self, clock: Clock, faults: Faults, rng: random.Random) -> None:
        self.clock = clock
        self.faults = faults
        self.rng = rng
        self.daemon: SimDaemon
        self.subscriptions: list[Subscription] = []

    def delay(self) -> float:
        """Seconds of one message: some hundred microseconds, rarely much longer."""
        if self.faults.hit("slow_message"):
            return self.rng.uniform(0.01, 0.8)
        return self.rng.uniform(0.00002, 0.0006)

    def lifeline(self, client: Process, on_frame: Callable[[lifeline.FromDaemon | None], None]) -> Lifeline:
        """Connect a lifeline. Raises OSError when no daemon listens."""
        if not self.daemon.process.alive:
            raise ConnectionRefusedError(111, "Connection refused")
        return Lifeline(self, client, on_frame)

    def subscribe(self, client: Process, topics: Sequence[bytes], on_frames: Callable[[Frames], None]) -> Subscription:
        self.subscriptions = [one for one in self.subscriptions if one.open]
        subscription = Subscription(self, topics, client, on_frames)
        self.subscriptions.append(subscription)
        return subscription

    def publish(self, frames: Frames) -> None:
        for subscription in self.subscriptions:
            subscription.offer(frames)
