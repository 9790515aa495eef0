"""Determines an engine's namespace, and then connects its scheduler half to the daemon."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import cast

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.scheduler_client import SchedulerClient, StoredKeys
from kvoffd_client.vllm.fingerprint import with_live_weights
from kvoffd_client.vllm.log import logger
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys, PromptReport
from kvoffd_proto.namespace_differences import differences

PATIENCE_S = 10.0
"""Time limit for the workers' reports. Registration has ``deadline_s``."""
APART_S = 60.0
"""Time after which workers should be registered with the scheduler's daemon; ``doctor`` waits as long."""
WANTED, FAILED = inf, -inf
"""Values of ``_waiting_since``, with which pending() is true, or false: ask in the next step; not before leave()."""


@dataclass(frozen=True)
class MemoryReport:
    """A worker's report of its memory, sent after changes.

    Only workers know these facts: loading the model changes their copy of the configuration (vLLM resolves
    ``kv_cache_dtype: auto``, some models rewrite their config), but not the scheduler's.

    Attributes:
        namespace: derived from the worker's configuration, without the weights.
        weights: digest of the live weights; None if not found or unreadable.
        generation: the scheduler's number of the digest; see ``ConnectorMetadata``.
        machine: id of the worker's machine.
        changed: whether the weights may have changed since the digest was taken.
        registered: fingerprint of the namespace in which its memory is registered; None if it is not.
        problem: why its memory cannot be registered; empty if it is, or may still be.
        adapters: path and digest of its LoRA adapters by vLLM's number; None if unknown.
        daemon: random number of the run of the daemon with which its memory is registered; None if it is not.
    """

    namespace: NamespaceSpec
    weights: str | None
    generation: int
    machine: str = ""
    changed: bool = False
    registered: bytes | None = None
    problem: str = ""
    adapters: Mapping[int, tuple[str, bytes]] | None = None
    daemon: int | None = None


class Unconnected:
    """Stand-in for a SchedulerClient while the namespace is unknown."""

    directory = ""
    epoch = 0
    ready = unreachable = False
    reported_prefill_rate = 0.0
    stored = StoredKeys()

    def add_stored(self, keys: Iterable[bytes]) -> None: ...

    def release(self, lease_id: int) -> None: ...

    def invalidate(self, groups: Sequence[GroupKeys]) -> None: ...

    def report_prompt(self, report: PromptReport) -> None: ...

    def take_events(self) -> list[KvEvent]:
        return []

    def close(self) -> None: ...


class EngineNamespace:
    """Determines an engine's namespace from its workers' reports, at the start and after changes of the weights.

    While it is unknown, nothing may be looked up, loaded or stored. vLLM resets its caches when an engine pauses,
    before the weights change, so after a reset the workers take the digest not at once but in the first step that
    computes something, or has a request to schedule.

    Args:
        world_size: workers of the engine.
        connect: connects the scheduler half in a namespace; returns None if it cannot.
        clock: clock such as time.monotonic().

    Attributes:
        client: the connection; a stand-in until the namespace is first known.
        generation: counter of resets and changes of weights.
        current: the namespace; None while unknown.
        engine_cache_stale: whether vLLM's own cache has blocks of other weights than the namespace; then nothing is
            stored.
        on_leave: called when the weights, or adapters, may have changed.
    """

    def __init__(
        self, world_size: int, connect: Callable[[NamespaceSpec], SchedulerClient | None], clock: Callable[[], float]
    ) -> None:
        self._world_size = world_size
        self._connect = connect
        self._clock = clock
        self.client = cast(SchedulerClient, Unconnected())
        self.generation = 0
        self.current: NamespaceSpec | None = None
        self.engine_cache_stale = False
        self.on_leave: Callable[[], None] = lambda: None
        self._last: NamespaceSpec | None = None
        self._reports: dict[int, MemoryReport] = {}
        self._waiting_since: float | None = WANTED
        """Time when the workers were asked, or the namespace was found; None while it is not needed; FAILED; WANTED."""
        self._to_tell = False
        self._engine_cache_kept = False
        self._apart_since: float | None = None
        """Time since when workers are not registered with the scheduler's daemon; None if all are."""
        self._apart, self._to_tell_daemon = "", False

    @property
    def problem(self) -> str:
        """Reason why nothing can be stored although the scheduler is connected; empty if there is none.

        A worker's memory cannot be registered, or has not been for ``APART_S``.
        """
        problems = (f"worker {rank}: {one.problem}" for rank, one in sorted(self._reports.items()) if one.problem)
        return next(problems, self._apart)

    @property
    def directory(self) -> str:
        """Directory of the scheduler's daemon, for workers that run elsewhere in the file system; empty if unknown."""
        return os.path.abspath(self.client.directory) if self.client.directory else ""

    @property
    def registered(self) -> bool:
        """Whether every worker's memory is registered in the namespace."""
        known = self.current
        return known is not None and all(one.registered == known.fingerprint for one in self._reports.values())

    @property
    def serves(self) -> bool:
        """Whether lookups and stores are possible."""
        return self.current is not None and self.client.ready and not self.problem

    def adapter(self, number: int, path: str) -> bytes | None:
        """Return the digest of a LoRA adapter by number, over all workers.

        None if they have not reported it for this path yet; empty if they cannot determine it.
        """
        if self.current is None:
            return None
        reports = [self._reports[rank].adapters for rank in sorted(self._reports)]
        known = [("", b"") if adapters is None else adapters.get(number) for adapters in reports]
        if any(one is not None and one[1] == b"" for one in known):
            return b""
        digests = [one[1] for one in known if one is not None and one[0] == path]
        return hashlib.sha256(b"".join(digests)).digest() if digests and len(digests) == len(known) else None

    def pending(self, patience_s: float = PATIENCE_S) -> bool:
        """Return whether further steps, even empty ones, may still determine the namespace, or register the workers,
        within ``patience_s``."""
        return self._waiting_since is not None and self._clock() - self._waiting_since < patience_s

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must run steps, even empty ones, to exchange messages with its workers."""
        return self._to_tell or (self.current is None and self.pending())

    def ask(self) -> None:
        """Ask the workers in the next step if the namespace is unknown, because it is needed now."""
        if self._waiting_since is None:
            self._waiting_since = WANTED

    def begin_step(self) -> tuple[int | None, NamespaceSpec | None]:
        """Return the message to the workers for this step: the generation to report, the namespace to register in."""
        if self._to_tell:
            self._to_tell = False
            return self.generation, self.current
        if self.current is not None or self._waiting_since in (None, FAILED):
            return None, None
        if self._waiting_since == WANTED:
            self._waiting_since = self._clock()
        if not self.pending():
            self._fail("Its workers did not report their memory in time.")
            return None, None
        return self.generation, None

    def step_ended(self) -> None:
        """Notice workers that do not meet the scheduler at its daemon. What changed in them has been reported."""
        absent = self._absent()
        if not absent:
            self._apart_since, self._apart = None, ""
        elif self._apart_since is None:
            self._apart_since = self._clock()
        elif not self._apart and self._clock() - self._apart_since >= APART_S:
            ranks = ", ".join(map(str, absent))
            self._apart = (
                f"The scheduler is connected to the daemon in {self.directory}, but these workers have not registered "
                f"with it for {APART_S:.0f} s: {ranks}. Give all processes of the engine this directory of this daemon."
            )
            self._to_tell_daemon = True
            logger.warning("kvoffd: this engine stores and loads nothing. %s", self._apart)

    def _absent(self) -> list[int]:
        """Return the workers that may register, but are not registered with the scheduler's daemon."""
        if self.current is None or not self.client.ready:
            return []
        wanted = self.current.fingerprint, self.client.epoch
        return [
            rank
            for rank, one in sorted(self._reports.items())
            if not one.problem and (one.registered, one.daemon or wanted[1]) != wanted
        ]

    def take_daemon(self) -> int | None:
        """Return the scheduler's daemon if the workers must compare it with theirs, once."""
        wanted, self._to_tell_daemon = self._to_tell_daemon, False
        return self.client.epoch if wanted else None

    def leave(self, engine_cache_kept: bool) -> None:
        """Handle a possible change of the weights. ``engine_cache_kept``: vLLM's own cache still has old blocks."""
        self.generation += 1
        self._reports.clear()
        self.current = self._waiting_since = None
        self._to_tell = False
        self._apart_since, self._apart = None, ""
        self._engine_cache_kept = engine_cache_kept
        self.engine_cache_stale = self.engine_cache_stale and engine_cache_kept
        self.on_leave()

    def report(self, reports: Mapping[int, MemoryReport]) -> None:
        for rank, report in reports.items():
            if report.generation != self.generation:
                continue
            if report.changed:
                # vLLM's own cache was not reset and still has blocks of the old weights.
                self.leave(engine_cache_kept=True)
                return
            self._reports[rank] = report
        if self._apart and not self._absent():
            self._apart_since, self._apart = None, ""
        if self.current is None and len(self._reports) == self._world_size:
            self._decide([self._reports[rank] for rank in sorted(self._reports)])

    def _decide(self, reports: Sequence[MemoryReport]) -> None:
        namespace, *others = [report.namespace for report in reports]
        for other in others:
            if other.fingerprint != namespace.fingerprint:
                names = ", ".join(name for name, _, _ in differences(namespace.description, other.description))
                self._fail(f"Its workers disagree on {names or 'their configuration'}. Please report this.")
                return
        if len({report.machine for report in reports}) > 1:
            self._fail(
                "Its workers are on several machines, but a daemon serves one. Use tensor and pipeline parallelism "
                "within a machine, and data parallelism between machines."
            )
            return
        weights = [report.weights for report in reports if report.weights is not None]
        if len(weights) < len(reports):
            logger.warning(
                "kvoffd: the model of this engine was not found or could not be read in its workers, so its weights "
                "are unknown. Its blocks cannot be used by other engines, nor after a restart or reset."
            )
            weights = [uuid.uuid4().hex]
        last, namespace = self._last, with_live_weights(namespace, weights)
        self.join(namespace)
        self._to_tell, self._waiting_since = True, self._clock()
        changed = last is not None and last.fingerprint != namespace.fingerprint
        if changed and self._engine_cache_kept:
            self.engine_cache_stale = True
            logger.warning(
                "kvoffd: the weights were changed, but vLLM's own cache was not reset while idle. Nothing is stored "
                "until it is: call reset_prefix_cache with reset_running_requests and reset_connector."
            )
        of_changed = ", of the changed weights" if changed else ""
        logger.info("kvoffd: namespace %s (%s)%s.", namespace.fingerprint.hex()[:12], namespace.label, of_changed)

    def join(self, namespace: NamespaceSpec) -> None:
        """Enter this namespace, and connect unless already connected."""
        self.current = namespace
        is_same = self._last is not None and self._last.fingerprint == namespace.fingerprint
        if not is_same or isinstance(self.client, Unconnected):
            self.client.close()
            self.client, self._last = self._connect(namespace) or cast(SchedulerClient, Unconnected()), namespace

    def _fail(self, reason: str) -> None:
        self._waiting_since = FAILED
        logger.error("kvoffd: the engine runs without the daemon. %s", reason)
