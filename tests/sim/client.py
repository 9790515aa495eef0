"""The transport of a real client on the simulated network, and the process it lives in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvoffd_client import ClientOptions
from kvoffd_client.session import Session
from kvoffd_proto import codec, lifeline
from tests.sim.clock import Broken, Process
from tests.sim.memory import Segment
from tests.sim.network import Dealer, Lifeline, Network, Subscription

OPTIONS = ClientOptions(handshake_timeout_s=1.0, request_timeout_s=0.5, backoff_max_s=0.4, unresponsive_after_s=0.8)
MAX_SPINS = 20
"""Most ticks of a session at one point of time; more of them would be a busy loop in a real process."""


class SimTransport:
    """The ``Transport`` of a session, which it drives as ``SocketTransport`` does. No call waits.

    Args:
        segments: what the descriptors that the session sends stand for.
        on_change: called after whatever the network or the clock did to the session.
    """

    def __init__(
        self, network: Network, process: Process, segments: Sequence[Segment], on_change: Callable[[], None]
    ) -> None:
        self._clock, self._network, self._process = network.clock, network, process
        self._segments, self._on_change = segments, on_change
        self._armed_for = float("inf")
        self._arming = 0
        self._ticked_at = 0.0
        self._spins = 0
        self._session: Session
        self._lifeline: Lifeline | None = None
        self._draining: Lifeline | None = None
        self._dealer: Dealer | None = None
        self._subscription: Subscription | None = None

    def start(self, session: Session) -> None:
        self._session = session
        self._arm()

    lock: AbstractContextManager[object] = nullcontext()

    def now(self) -> float:
        return self._clock.now

    def notify(self) -> None:
        self._arm()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        return ready()

    def stop(self) -> None:
        self.act(self._session.on_close)

    def act(self, action: Callable[[float], None]) -> None:
        action(self._clock.now)
        self._arm()
        self._on_change()

    # --- for the session -------------------------------------------------------------------------

    def open(self) -> None:
        if self._dealer is not None:
            raise Broken(f"{self._process.name} connects again, and its old jobs socket would speak to the next daemon")

        def on_frame(frame: lifeline.FromDaemon | None) -> None:
            session = self._session
            if self._lifeline is opened:
                if frame is None:
                    self.act(session.on_lifeline_end)
                else:
                    self.act(lambda now: session.on_lifeline_message(frame, now))
            elif frame is None and self._draining is opened:
                self._draining = None
                self.act(session.on_released)

        opened = self._network.lifeline(self._process, on_frame)
        self._lifeline = opened

    def connect(self, route: bytes, topics: Sequence[bytes]) -> None:
        def on_reply(frames: Sequence[bytes]) -> None:
            if self._dealer is dealer:
                self.act(lambda now: self._session.on_reply(codec.decode_reply(frames[0]), now))

        def on_publication(frames: Sequence[bytes]) -> None:
            if self._subscription is subscription:
                topic, sequence, payload = frames
                self.act(lambda now: self._session.on_publication(topic, sequence, payload, now))

        dealer = Dealer(self._network, self._process, route, on_reply)
        subscription = self._network.subscribe(self._process, topics, on_publication)
        self._dealer, self._subscription = dealer, subscription

    def attach(self, message: lifeline.Attach, fd: int) -> None:
        if self._lifeline is None or not self._lifeline.server_open:
            raise OSError("the lifeline is closed")
        self._lifeline.to_daemon.send((message, self._segments[fd]))

    def send(self, frame: bytes) -> bool:
        self._arm()
        return self._dealer is not None and self._dealer.send((frame,))

    def disconnect(self, *, drain: bool) -> None:
        if self._lifeline is not None:
            self._lifeline.hang_up()
        self._draining = self._lifeline if drain else None
        self._lifeline = None
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        if self._subscription is not None:
            self._subscription.open = False
            self._subscription = None

    # --- time ------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Schedule the next tick of the session for the time that it asks for, as only it says: no other call does."""
        wake_at = self._session.wake_at()
        if wake_at < self._armed_for:
            self._armed_for = wake_at
            self._arming += 1
            arming = self._arming
            self._clock.at(wake_at, lambda: self._process.run(lambda: self._tick(arming)))

    def _tick(self, arming: int) -> None:
        if arming != self._arming:
            return
        self._armed_for = float("inf")
        self._spins = self._spins + 1 if self._clock.now == self._ticked_at else 0
        self._ticked_at = self._clock.now
        if self._spins > MAX_SPINS:
            raise Broken(f"{self._process.name} spins: it wants to be woken for something that it does not do")
        self.act(self._session.tick)
