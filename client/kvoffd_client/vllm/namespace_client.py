"""Which namespace an engine is in, and the scheduler half's connection to the daemon, made once that is known."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.scheduler_client import Lookup, SchedulerClient
from kvoffd_client.vllm.connector_metadata import MemoryReport, NamespacesDiffer, common_namespace
from kvoffd_client.vllm.fingerprint import with_live_weights
from kvoffd_client.vllm.log import logger
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys

PATIENCE_S = 10.0
"""How long an engine waits in steps for its workers' reports, and then for the daemon to have their memory."""


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
    def max_keys(self) -> int:
        return self._client.max_keys if self._client is not None else 0

    @property
    def credit_bytes(self) -> int:
        return self._client.credit_bytes if self._client is not None else 0

    @property
    def epoch(self) -> int:
        return self._client.epoch if self._client is not None else 0

    @property
    def capabilities(self) -> frozenset[str]:
        return self._client.capabilities if self._client is not None else frozenset()

    def lookup(self, groups: Sequence[GroupKeys], again: bool = False) -> Lookup:
        assert self._client is not None, "ready before"
        return self._client.lookup(groups, again)

    def poll(self) -> None:
        if self._client is not None:
            self._client.poll()

    def release(self, lease_id: int) -> None:
        if self._client is not None:
            self._client.release(lease_id)

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        if self._client is not None:
            self._client.invalidate(groups)

    def report(
        self, prefill_rate: float, load_rate: float, skipped_loads: int, paused_stores: int, late_lookups: int = 0
    ) -> None:
        if self._client is not None:
            self._client.report(prefill_rate, load_rate, skipped_loads, paused_stores, late_lookups)

    def take_events(self) -> list[KvEvent]:
        return self._client.take_events() if self._client is not None else []

    def close(self) -> None:
        self._closed = True
        if self._client is not None:
            self._client.close()


class EngineNamespace:
    """Finds the namespace of an engine in its workers' reports, at the start and whenever the weights may have changed.

    While it is not known, nothing may be looked up, loaded or stored. vLLM resets its caches when an engine is paused,
    before the weights change, so a reset does not ask the workers at once: they take the digest in the first step after
    it that computes something, or has a request to schedule.

    Args:
        world_size: workers of the engine.
        client: the scheduler half's connection.
        clock: what time is measured with, as time.monotonic().

    Attributes:
        generation: counts resets and changes of weights.
        current: the namespace; None while it is not known.
        on_leave: called when the weights, or adapters, may be others from now on.
    """

    def __init__(self, world_size: int, client: NamespaceClient, clock: Callable[[], float]) -> None:
        self._world_size = world_size
        self._client = client
        self._clock = clock
        self.generation = 0
        self.current: NamespaceSpec | None = None
        self.on_leave: Callable[[], None] = lambda: None
        self._last: NamespaceSpec | None = None
        self._reports: dict[int, MemoryReport] = {}
        self._waiting_since: float | None = None
        self._asked = True
        self._to_tell = False
        self._failed = False
        self._engine_cache_kept = False
        self._engine_cache_stale = False

    @property
    def registered(self) -> bool:
        """Whether the namespace is known, the daemon answers, and has the memory of all workers under it."""
        current = self.current
        if current is None or not self._client.ready:
            return False
        return all(report.registered == current.fingerprint for report in self._reports.values())

    @property
    def may_store(self) -> bool:
        """Whether what vLLM offers was computed with the weights that the namespace names."""
        return self.current is not None and not self._engine_cache_stale

    @property
    def soon(self) -> bool:
        """Whether steps, empty ones too, will make the namespace known or the workers registered; for PATIENCE_S."""
        if self._failed or not self._asked or self.registered:
            return False
        if self.waited_s < PATIENCE_S:
            return True
        if self.current is None:
            self._fail("Its workers did not report what is in their memory.")
        self._asked = False
        return False

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must make steps, empty ones too, for the workers to report or to be told."""
        return self._to_tell or (self.current is None and self.soon)

    @property
    def waited_s(self) -> float:
        """Seconds since the workers were first asked, or the namespace was found."""
        return 0.0 if self._waiting_since is None else self._clock() - self._waiting_since

    def ask(self) -> None:
        """Have the workers asked in the next step, if the namespace is not known: somebody wants to use it now."""
        self._asked = self._asked or self.current is None

    def news(self) -> tuple[int | None, NamespaceSpec | None]:
        """Return what the workers must be told in this step: the generation to report, the namespace to register in."""
        if self.current is None:
            if not self._asked or self._failed:
                return None, None
            if self._waiting_since is None:
                self._waiting_since = self._clock()
            return self.generation, None
        tell, self._to_tell = self._to_tell, False
        return (self.generation, self.current) if tell else (None, None)

    def leave(self, engine_cache_kept: bool) -> None:
        """The weights may be others from now on. ``engine_cache_kept``: vLLM's own cache still has blocks of before."""
        self.generation += 1
        self._reports.clear()
        self.current = None
        self._asked = self._failed = False
        self._waiting_since = None
        self._engine_cache_kept = engine_cache_kept
        self._engine_cache_stale = self._engine_cache_stale and engine_cache_kept
        self.on_leave()

    def report(self, reports: Mapping[int, MemoryReport]) -> None:
        for rank, report in reports.items():
            if report.generation != self.generation:
                continue
            if report.changed:
                # Nobody reset vLLM's own cache, which still has blocks of the weights before.
                self.leave(engine_cache_kept=True)
                return
            self._reports[rank] = report
        if self.current is None and len(self._reports) == self._world_size:
            self._decide([self._reports[rank] for rank in sorted(self._reports)])

    def _decide(self, reports: Sequence[MemoryReport]) -> None:
        try:
            namespace = common_namespace([report.namespace for report in reports])
        except NamespacesDiffer as reason:
            self._fail(f"{reason} Please report this.")
            return
        if len({report.machine for report in reports}) > 1:
            self._fail(
                "Its workers are on several machines, and a daemon has the blocks of one. Use tensor and pipeline "
                "parallelism within a machine, and data parallelism between machines."
            )
            return
        weights = [report.weights for report in reports if report.weights is not None]
        if len(weights) < len(reports):
            logger.warning(
                "kvoffd: the model of this engine was not found or read in its workers, so nobody knows which weights "
                "are in memory. Its blocks are used by no other engine, and not after a restart or reset."
            )
            weights = [uuid.uuid4().hex]
        namespace = with_live_weights(namespace, weights)
        changed = self._last is not None and self._last.fingerprint != namespace.fingerprint
        if changed and self._engine_cache_kept:
            self._engine_cache_stale = True
            logger.warning(
                "kvoffd: the weights were changed, and vLLM's own cache was not reset with nothing running. Nothing is "
                "stored until it is: call reset_prefix_cache with reset_running_requests and reset_connector."
            )
        self.current = self._last = namespace
        self._to_tell = True
        self._waiting_since = self._clock()
        self._client.join(namespace)
        logger.info(
            "kvoffd: namespace %s (%s)%s.",
            namespace.fingerprint.hex()[:16],
            namespace.label,
            ", of the changed weights" if changed else "",
        )

    def _fail(self, reason: str) -> None:
        self._failed = True
        logger.error("kvoffd: the engine runs without the daemon. %s", reason)
