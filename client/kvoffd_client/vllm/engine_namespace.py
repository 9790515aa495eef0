"""Which namespace an engine is in, and its scheduler half's connection to the daemon, made once that is known."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import cast

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.namespace_differences import differences
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.vllm.fingerprint import with_live_weights
from kvoffd_client.vllm.log import logger
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import RequestReport

PATIENCE_S = 10.0
"""How long an engine waits in steps for its workers' reports, and then for the daemon to have their memory."""
WANTED, FAILED = inf, -inf
"""In place of the time since when the namespace is waited for: it will be, or never."""


@dataclass(frozen=True)
class MemoryReport:
    """What one worker says of its memory. Sent when something of it is new.

    Only the workers can tell. They hold the model, and loading it changes the configuration that they see (vLLM turns
    ``kv_cache_dtype: auto`` into the checkpoint's there, some models rewrite their config); the scheduler's copy stays
    as it was.

    Attributes:
        namespace: what the worker derived from its configuration; it does not name the weights.
        weights: digest of the live weights; None where vLLM's model was not found.
        generation: the scheduler's number of the digest; see ``ConnectorMetadata``.
        machine: what tells the worker's machine from others.
        changed: the weights may have changed since the digest was taken.
        registered: fingerprint of the namespace in which the daemon has this worker's memory; None for none.
        problem: why the daemon does not get its memory; empty where it has it, or may still get it.
        adapters: by vLLM's number, path and digest of the LoRA adapters that it computes with; None where none can be
            seen.
    """

    namespace: NamespaceSpec
    weights: str | None
    generation: int
    machine: str = ""
    changed: bool = False
    registered: bytes | None = None
    problem: str = ""
    adapters: Mapping[int, tuple[str, bytes]] | None = None


class Unconnected:
    """As much of a SchedulerClient as is used before the namespace is known."""

    ready = False
    reported_prefill_rate = 0.0

    def note_request(self, report: RequestReport) -> None: ...

    def take_events(self) -> list[KvEvent]:
        return []

    def close(self) -> None: ...


class EngineNamespace:
    """Finds the namespace of an engine in its workers' reports, at the start and whenever the weights may have changed.

    While it is not known, nothing may be looked up, loaded or stored. vLLM resets its caches when an engine is paused,
    before the weights change, so a reset does not ask the workers at once: they take the digest in the first step after
    it that computes something, or has a request to schedule.

    Args:
        world_size: workers of the engine.
        connect: makes the scheduler half's connection in a namespace; None where it cannot.
        clock: what time is measured with, as time.monotonic().

    Attributes:
        client: the connection; one that is not ready before the namespace is known first.
        generation: counts resets and changes of weights.
        current: the namespace; None while it is not known.
        engine_cache_stale: vLLM's own cache has blocks of other weights than the namespace names: nothing is stored.
        on_leave: called when the weights, or adapters, may be others from now on.
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
        """When the workers were asked, or the namespace was found; None while nobody wants it, or FAILED."""
        self._to_tell = False
        self._engine_cache_kept = False

    @property
    def problem(self) -> str:
        """Why the daemon does not get the memory of a worker, as far as they have said; empty for none."""
        problems = (f"worker {rank}: {one.problem}" for rank, one in sorted(self._reports.items()) if one.problem)
        return next(problems, "")

    @property
    def registered(self) -> bool:
        """Whether every worker's memory is registered in the namespace."""
        known = self.current
        return known is not None and all(one.registered == known.fingerprint for one in self._reports.values())

    @property
    def serves(self) -> bool:
        """Whether the daemon may be asked, and given blocks."""
        return self.current is not None and self.client.ready and not self.problem

    def adapter(self, number: int, path: str) -> bytes | None:
        """Return a digest of the LoRA adapter with which the workers compute under this number.

        None where they have not said it yet for this path, an empty one where they cannot.
        """
        reports = [self._reports[rank].adapters for rank in sorted(self._reports)] if self.current is not None else []
        known = [each.get(number, ("", None)) if each is not None else ("", b"") for each in reports]
        if any(content == b"" for _, content in known):
            return b""
        digests = [content for of, content in known if content is not None and of == path]
        return hashlib.sha256(b"".join(digests)).digest() if digests and len(digests) == len(known) else None

    def pending(self, patience_s: float = PATIENCE_S) -> bool:
        """Where the namespace is not known, or the workers are not registered: whether steps, empty ones too, will make
        it so in that time."""
        return self._waiting_since is not None and self._clock() - self._waiting_since < patience_s

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must make steps, empty ones too, for the workers to report or to hear."""
        return self._to_tell or (self.current is None and self.pending())

    def ask(self) -> None:
        """Have the workers asked in the next step, if the namespace is not known: somebody wants to use it now."""
        if self._waiting_since is None:
            self._waiting_since = WANTED

    def begin_step(self) -> tuple[int | None, NamespaceSpec | None]:
        """Return what the workers must hear in this step: the generation to report, the namespace to register in."""
        if self._to_tell:
            self._to_tell = False
            return self.generation, self.current
        if self.current is not None or self._waiting_since in (None, FAILED):
            return None, None
        if self._waiting_since == WANTED:
            self._waiting_since = self._clock()
        if not self.pending():
            self._fail("Its workers did not report what is in their memory.")
            return None, None
        return self.generation, None

    def leave(self, engine_cache_kept: bool) -> None:
        """The weights may be others from now on. ``engine_cache_kept``: vLLM's own cache still has blocks of before."""
        self.generation += 1
        self._reports.clear()
        self.current = self._waiting_since = None
        self._to_tell = False
        self._engine_cache_kept = engine_cache_kept
        self.engine_cache_stale = self.engine_cache_stale and engine_cache_kept
        self.on_leave()

    def report(self, reports: Mapping[int, MemoryReport]) -> None:
        """Take what workers, by rank, say of their memory."""
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
        namespace, *others = [report.namespace for report in reports]
        for other in others:
            if other.fingerprint != namespace.fingerprint:
                names = ", ".join(name for name, _, _ in differences(namespace.description, other.description))
                self._fail(f"Its workers disagree on {names or 'their configuration'}. Please report this.")
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
        last, namespace = self._last, with_live_weights(namespace, weights)
        self.join(namespace)
        self._to_tell, self._waiting_since = True, self._clock()
        changed = last is not None and last is not self._last
        if changed and self._engine_cache_kept:
            self.engine_cache_stale = True
            logger.warning(
                "kvoffd: the weights were changed, and vLLM's own cache was not reset with nothing running. Nothing is "
                "stored until it is: call reset_prefix_cache with reset_running_requests and reset_connector."
            )
        of_changed = ", of the changed weights" if changed else ""
        logger.info("kvoffd: namespace %s (%s)%s.", namespace.fingerprint.hex()[:12], namespace.label, of_changed)

    def join(self, namespace: NamespaceSpec) -> None:
        """Be in this namespace, and connect unless the connection is there already."""
        self.current = namespace
        is_same = self._last is not None and self._last.fingerprint == namespace.fingerprint
        if not is_same or isinstance(self.client, Unconnected):
            self.client.close()
            self.client, self._last = self._connect(namespace) or cast(SchedulerClient, Unconnected()), namespace

    def _fail(self, reason: str) -> None:
        self._waiting_since = FAILED
        logger.error("kvoffd: the engine runs without the daemon. %s", reason)
