"""The scheduler's client: lookups, leases, KV events."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence

from kvoffd_client.client_options import DEFAULT_OPTIONS, ClientOptions, Identity
from kvoffd_client.connection import SessionClient
from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.scheduler_session import LookupFuture, SchedulerSession
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys, Role


class SchedulerClient(SessionClient[SchedulerSession]):
    """Asks one daemon which blocks of one namespace are ready; while it is not ready every lookup is a miss.

    Args:
        directory: where the daemon's sockets are.
        namespace: opened (or joined) at every connection.
        name: shown to operators.
        software: client and engine versions, shown to operators.
        subscribe_events: collect the namespace's KV events for take_events().
        options: timeouts and bounds.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: NamespaceSpec,
        *,
        name: str = "scheduler",
        software: str = "",
        subscribe_events: bool = False,
        options: ClientOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._count_keys = namespace.count_keys
        identity = Identity(os.fspath(directory), Role.SCHEDULER, name, software, namespace)
        super().__init__(identity, options, functools.partial(SchedulerSession, events=subscribe_events))

    @property
    def events_lost(self) -> int:
        """KV event messages that no replay could bring, and events dropped because take_events() was not called."""
        return 0 if self._session.events is None else self._session.events.lost

    def lookup(self, groups: Sequence[GroupKeys], again: bool = False) -> LookupFuture:
        """Ask which keys are ready and pin those under a new lease. When not ready the future has failed already.

        Args:
            groups: keys, root of the prefix first.
            again: the same was asked before, and some of it was pending: the daemon does not count it a second time.

        Raises:
            ValueError: the keys of a group are not a whole number of the namespace's key_bytes.
        """
        counts = [self._count_keys(item.keys) for item in groups]
        future = self._connection.call(self._session.lookup, groups, counts, time.monotonic(), again)
        future.waiter = self._connection.wait
        return future

    def poll(self) -> None:
        """Read answers that have arrived, in this thread; otherwise they are read when the client's thread gets to it.

        For callers that are about to read futures and busy otherwise: a thread that computes keeps the GIL from the
        client's own thread for up to ``sys.getswitchinterval()``.
        """
        self._connection.poll()

    def release(self, lease_id: int) -> None:
        """End a lease. Harmless when it has ended, or its lookup is not answered yet or was never sent."""
        self._connection.call(self._session.release, lease_id)

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        """Have the daemon forget blocks that proved unusable. Does nothing when not ready."""
        for item in groups:
            self._count_keys(item.keys)
        self._connection.call(self._session.invalidate, groups)

    def report(
        self, prefill_rate: float, load_rate: float, skipped_loads: int, paused_stores: int, late_lookups: int = 0
    ) -> None:
        """Tell operators what the engine learned: tokens a second, and what it counted since the last call.

        ``late_lookups``: those whose answers came too late to be used.
        """
        counts = skipped_loads, paused_stores, late_lookups
        self._connection.call(self._session.report, prefill_rate, load_rate, *counts)

    def reset(self, timeout_s: float = 2.0) -> bool:
        """Drop every block of the namespace and wait until that is done; False when the daemon did not confirm it."""
        return self._connection.outcome_of(self._session.reset, timeout_s) == [True]

    def take_events(self) -> list[KvEvent]:
        """KV events of the namespace since the last call, in order, from the start of the daemon's life.

        When the daemon was restarted, ``AllBlocksCleared`` comes first, since the new one's index began empty.
        """
        events = self._session.events
        return [] if events is None else self._connection.call(events.take)
