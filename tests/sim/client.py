"""A real client session on the simulated network, and the process it lives in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvoffd_client import ClientOptions
from kvoffd_client.client_session import Session
from kvoffd_proto import codec, lifeline
from tests.sim.clock import Broken, Clock, Process
from tests.sim.memory import Segment
from tests.sim.network import Dealer, Lifeline, Network, Subscription

S = TypeVar("S", bound=Session)

OPTIONS = ClientOptions(
    handshake_timeout_s=1.0,
    request_timeout_s=0.5,
    backoff_min_s=0.02,
    backoff_max_s=0.4,
    job_patience_s=0.3,
    unresponsive_after_s=0.8,
)


MAX_SPINS = 20
"""Most ticks of a session at one point of time; more of them would be a busy loop in a real process."""


class SimLink:
    """The ``Link`` of a session. ``segments`` resolves the descriptors that the session sends."""

    def __init__(self, network: Network, process: Process, segments: Sequence[Segment]) -> None:
        self._network = network
        self._process = process
        self._segments = segments
        self.lifeline: Lifeline | None = None
        self._dealer: Dealer | None = None
        self._subscription: Subscription | None = None
        self.on_lifeline: Callable[[lifeline.FromDaemon | None], None]
        self.on_drained: Callable[[int], None]
        self.on_reply: Callable[[Sequence[bytes]], None]
        self.on_publication: Callable[[Sequence[bytes]], None]

    def open(self) -> None:
        self.close()

        def on_frame(frame: lifeline.FromDaemon | None) -> None:
            if self.lifeline is opened:
                self.on_lifeline(frame)
            elif frame is None and opened.draining is not None:
                self.on_drained(opened.draining)

        opened = self._network.lifeline(self._process, on_frame)
        self.lifeline = opened

    def open_sockets(self, topics: Sequence[bytes]) -> None:
        def on_reply(frames: Sequence[bytes]) -> None:
            if self._dealer is dealer:
                self.on_reply(frames)

        def on_publication(frames: Sequence[bytes]) -> None:
            if self._subscription is subscription:
                self.on_publication(frames)

        dealer = self._network.dealer(self._process, on_reply)
        subscription = self._network.subscribe(self._process, topics, on_publication)
        self._dealer, self._subscription = dealer, subscription

    def attach(self, message: lifeline.Attach, fd: int) -> None:
        if self.lifeline is None or not self.lifeline.server_open:
            raise OSError("the lifeline is closed")
        self.lifeline.to_daemon.send((message, self._segments[fd]))

    def send(self, frames: Sequence[bytes]) -> bool:
        return self._dealer is not None and self._dealer.send(frames)

    def close(self) -> None:
        if self.lifeline is not None:
            self.lifeline.hang_up()
            self.lifeline = None
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        if self._subscription is not None:
            self._subscription.open = False
            self._subscription = None

    def close_draining(self, generation: int) -> None:
        if self.lifeline is not None:
            self.lifeline.draining = generation
        self.close()


class SimClient(Generic[S]):
    """Drives one session as ``Connection`` does. ``on_change`` is called after whatever happened to it."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        process: Process,
        segments: Sequence[Segment],
        make: Callable[[SimLink, ClientOptions, random.Random], S],
        rng: random.Random,
        on_change: Callable[[], None],
    ) -> None:
        self.process = process
        self._clock = clock
        self._on_change = on_change
        self._armed_for = float("inf")
        self._arming = 0
        self._ticked_at = 0.0
        self._spins = 0
        self.link = SimLink(network, process, segments)
        self.link.on_lifeline = self._lifeline
        self.link.on_drained = lambda generation: self.act(lambda now: self.session.on_drained(generation, now))
        self.link.on_reply = self._reply
        self.link.on_publication = self._publication
        self.session = make(self.link, OPTIONS, rng)
        self.arm()

    def act(self, action: Callable[[float], None]) -> None:
        """Run ``action`` on the session, now."""
        action(self._clock.now)
        self.arm()
        self._on_change()

    def _lifeline(self, frame: lifeline.FromDaemon | None) -> None:
        if frame is None:
            self.act(self.session.on_lifeline_end)
        else:
            self.act(lambda now: self.session.on_lifeline_message(frame, now))

    def _publication(self, frames: Sequence[bytes]) -> None:
        topic, sequence, payload = frames
        self.act(lambda now: self.session.on_publication(topic, sequence, payload, now))

    def _reply(self, frames: Sequence[bytes]) -> None:
        if len(frames) == 4 and not frames[0]:
            self.act(lambda now: self.session.on_event_replay(frames[1], frames[2], frames[3], now))
        else:
            self.act(lambda now: self.session.on_reply(codec.decode_reply(frames[0]), now))

    def arm(self) -> None:
        """Schedule the next tick of the session for the time that it asks for."""
        wake_at = self.session.wake_at()
        if wake_at < self._armed_for:
            self._armed_for = wake_at
            self._arming += 1
            arming = self._arming
            self._clock.at(wake_at, lambda: self.process.run(lambda: self._tick(arming)))

    def _tick(self, arming: int) -> None:
        if arming != self._arming:
            return
        self._armed_for = float("inf")
        self._spins = self._spins + 1 if self._clock.now == self._ticked_at else 0
        self._ticked_at = self._clock.now
        if self._spins > MAX_SPINS:
            raise Broken(f"{self.process.name} spins: it wants to be woken for something that it does not do")
        self.act(self.session.tick)
