"""The scheduler half's connection to the daemon: made once the namespace is known, reset after a change of weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvoffd_client.namespace_spec import NamespaceSpec
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.scheduler_session import LookupFuture
from kvoffd_client.vllm.log import logger
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys

CONFIRM_TIMEOUT_S = 2.0
PAUSE_S = 0.2


class NamespaceClient:
    """A SchedulerClient that is made when the workers have reported their namespace, and not connected before that."""

    def __init__(self, make: Callable[[NamespaceSpec], SchedulerClient]) -> None:
        self._make = make
        self._namespace: NamespaceSpec | None = None
        self._client: SchedulerClient | None = None
        self._closed = False

    def join(self, namespace: NamespaceSpec) -> None:
        """Connect to this namespace, leaving another one. Repeatable."""
        if self._closed or (self._namespace is not None and self._namespace.fingerprint == namespace.fingerprint):
            return
        if self._client is not None:
            self._client.close()
        self._namespace, self._client = namespace, self._make(namespace)

    @property
    def ready(self) -> bool:
        """Whether the namespace is known and open, and the daemon answers."""
        return self._client is not None and self._client.ready

    @property
    def credit_bytes(self) -> int:
        return self._client.credit_bytes if self._client is not None else 0

    def lookup(self, groups: Sequence[GroupKeys], again: bool = False) -> LookupFuture:
        assert self._client is not None, "ready before"
        return self._client.lookup(groups, again)

    def release(self, lease_id: int) -> None:
        if self._client is not None:
            self._client.release(lease_id)

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        if self._client is not None:
            self._client.invalidate(groups)

    def reset(self, timeout_s: float = 2.0) -> bool:
        # Without a namespace there is nothing to drop.
        return self._client is None or self._client.reset(timeout_s)

    def take_events(self) -> list[KvEvent]:
        return self._client.take_events() if self._client is not None else []

    def close(self) -> None:
        self._closed = True
        if self._client is not None:
            self._client.close()


class NamespaceReset:
    """Drops the namespace's blocks after a change of weights: asks the daemon, in a thread, until it confirms.

    The engine never waits for it. While ``due``, nothing that the daemon holds may be used: it is of other weights.
    ``drop`` drops the namespace, waits at most the given seconds, and returns whether the daemon confirmed.
    """

    def __init__(self, drop: Callable[[float], bool]) -> None:
        self._drop = drop
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._reports_due = 0
        self._again = False

    @property
    def due(self) -> bool:
        """Whether a reset was asked for and is not confirmed."""
        return self._thread is not None

    @property
    def flushing(self) -> bool:
        """Whether jobs from before the reset still run in the workers; then the engine must keep stepping."""
        return self._reports_due > 0

    def begin(self, reports_due: int) -> None:
        """Begin a reset while ``reports_due`` worker reports of running jobs are still to come (see ``report``).

        Stores among these jobs hold blocks of the old weights, so the daemon is asked once they have ended.
        """
        with self._lock:
            self._reports_due += reports_due
            self._again = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvoffd-reset", daemon=True)
                self._thread.start()

    def report(self, count: int) -> None:
        self._reports_due = max(0, self._reports_due - count)
        self._wake.set()

    def close(self) -> None:
        """Give up. Does not wait."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            if self._reports_due == 0:
                self._again = False
                if self._drop(CONFIRM_TIMEOUT_S):
                    with self._lock:
                        if not self._again:
                            self._thread = None
                            break
                    continue
            self._wake.wait(PAUSE_S)
        if not self._closed:
            logger.info("kvoffd: the daemon dropped all blocks of this engine's namespace.")
