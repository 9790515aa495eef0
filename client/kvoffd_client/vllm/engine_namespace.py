"""Determines an engine's namespace, and then connects its scheduler half to the daemon."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.scheduler_client import SchedulerClient, StoredKeys
from kvoffd_client.vllm.adapters import UNREADABLE
from kvoffd_client.vllm.fingerprint import with_live_weights
from kvoffd_client.vllm.log import logger
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys, PromptReport
from kvoffd_proto.namespace_differences import differences

PATIENCE_S = 10.0
"""Time limit for the workers' memory states. For their registration a lookup's deadline is the limit."""
APART_S = 60.0
"""Time after which workers should be registered with the scheduler's daemon; ``doctor`` waits as long."""


class Search(Enum):
    """State of the search for the namespace, see ``EngineNamespace``."""

    UNNEEDED = auto()
    WANTED = auto()
    ASKED = auto()
    FOUND = auto()
    FAILED = auto()


@dataclass(frozen=True)
class MemoryState:
    """State of a worker's memory, sent after changes.

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
        credit_bytes: bytes of stores that it may have outstanding; None if it is not registered, or stores nothing.
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
    credit_bytes: int | None = None


@dataclass
class Apart:
    """Workers that are not registered with the scheduler's daemon.

    Attributes:
        since: time since when there are any.
        problem: sentence about them once that is APART_S; empty before.
    """

    since: float
    problem: str = ""


class Unconnected:
    """Stand-in for a SchedulerClient while the namespace is unknown: all that is used of one that is not ready."""

    directory = ""
    epoch = 0
    ready = unreachable = False
    reported_prefill_rate = 0.0
    stored = StoredKeys()

    def add_stored(self, keys: Iterable[bytes]) -> None: ...

    def release(self, lease_id: int) -> None: ...

    def show_used(self, groups: Sequence[GroupKeys], *, giver: int) -> None: ...

    def hint(self, *what: object, giver: int) -> bool:
        return False

    def invalidate(self, groups: Sequence[GroupKeys]) -> None: ...

    def report_prompt(self, report: PromptReport) -> None: ...

    def take_events(self) -> list[KvEvent]:
        return []

    def close(self) -> None: ...


class EngineNamespace:
    """Determines an engine's namespace from its workers' memory states, at the start and after changes of the weights.

    While it is unknown, nothing may be looked up, loaded or stored. vLLM resets its caches when an engine pauses,
    before the weights change, so after a reset the workers take the digest not at once but in the first step that
    computes something, or has a request to schedule.

    | search | entered | awaits_reports() | steps needed | next |
    |---|---|---|---|---|
    | UNNEEDED | by leave() | no | no | WANTED by want_digests() |
    | WANTED | at the start, by want_digests() | yes | yes | ASKED by the next step |
    | ASKED | by a step that asks the workers | for PATIENCE_S | as long | FOUND with the last state; FAILED |
    | FOUND | with the last worker's state | no, awaits_registration() | until they know it | UNNEEDED |
    | FAILED | if workers disagree, or are silent | no | no | UNNEEDED |

    ``current`` is the namespace once FOUND. ``registered``: all workers have registered their memory in it. ``serves``:
    it is known and the daemon answers.

    Args:
        world_size: workers of the engine.
        connect: connects the scheduler half in a namespace; returns None if it cannot.
        clock: clock such as time.monotonic().

    Attributes:
        client: the connection; a stand-in until the namespace is first known.
        generation: counter of resets and changes of weights.
        current: the namespace; None while unknown.
        engine_cache_has_other_weights: whether vLLM's own cache has blocks of other weights than the namespace; then
            nothing is stored.
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
        self.engine_cache_has_other_weights = False
        self.on_leave: Callable[[], None] = lambda: None
        self._last_namespace: NamespaceSpec | None = None
        """The one for which ``client`` was made; ``current`` may be unknown again."""
        self._memory: dict[int, MemoryState] = {}
        """The memory states of this generation, by rank."""
        self._search, self._search_began = Search.WANTED, 0.0
        """State, and the time when the workers were asked, or the namespace was found."""
        self._must_announce = False
        """The next step tells the workers the namespace."""
        self._engine_cache_kept = False
        """Whether vLLM's own cache still had old blocks at the last ``leave()``."""
        self._apart: Apart | None = None
        """None if all workers are registered with the scheduler's daemon."""
        self._must_name_daemon = False
        """The next step tells the workers the scheduler's daemon."""

    @property
    def problem(self) -> str:
        """Reason why nothing can be stored although the scheduler is connected; empty if there is none.

        A worker's memory cannot be registered, or has not been for ``APART_S``.
        """
        problems = (f"worker {rank}: {state.problem}" for rank, state in sorted(self._memory.items()) if state.problem)
        return next(problems, self._apart.problem if self._apart is not None else "")

    @property
    def directory(self) -> str:
        """Directory of the scheduler's daemon, for workers that run elsewhere in the file system; empty if unknown."""
        return os.path.abspath(self.client.directory) if self.client.directory else ""

    @property
    def registered(self) -> bool:
        """Whether every worker's memory is registered in the namespace."""
        known = self.current
        return known is not None and all(state.registered == known.fingerprint for state in self._memory.values())

    @property
    def serves(self) -> bool:
        """Whether lookups and stores are possible."""
        return self.current is not None and self.client.ready and not self.problem

    @property
    def credit_bytes(self) -> int | None:
        """Bytes of stores that each worker may have outstanding, the least of all; None while no credit is known."""
        known = (state.credit_bytes for state in self._memory.values() if state.credit_bytes is not None)
        return min(known, default=None)

    def adapter_digest(self, number: int, path: str) -> bytes | None:
        """Return the digest of a LoRA adapter by number, over all workers.

        None if they have not reported it for this path yet; UNREADABLE if they cannot determine it.
        """
        if self.current is None:
            return None
        digests: list[bytes] = []
        for _, state in sorted(self._memory.items()):
            if state.adapters is None:
                return UNREADABLE
            its_path, digest = state.adapters.get(number, ("", None))
            if digest == UNREADABLE:
                return UNREADABLE
            if digest is not None and its_path == path:
                digests.append(digest)
        is_known = digests and len(digests) == len(self._memory)
        return hashlib.sha256(b"".join(digests)).digest() if is_known else None

    def awaits_reports(self) -> bool:
        """Return whether further steps, even empty ones, may still determine the namespace."""
        if self._search is Search.ASKED:
            return self._clock() - self._search_began < PATIENCE_S
        return self._search is Search.WANTED

    def awaits_registration(self, patience_s: float) -> bool:
        """Return whether the namespace was found less than ``patience_s`` ago: its workers may still register."""
        return self._search is Search.FOUND and self._clock() - self._search_began < patience_s

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must run steps, even empty ones, to exchange messages with its workers."""
        return self._must_announce or (self.current is None and self.awaits_reports())

    def want_digests(self) -> None:
        """Ask the workers for their digests in the next step if the namespace is unknown, because it is needed now."""
        if self._search is Search.UNNEEDED:
            self._search = Search.WANTED

    def take_message(self) -> tuple[int | None, NamespaceSpec | None]:
        """Return what this step asks of the workers: the generation to report, the namespace to register in."""
        if self._must_announce:
            self._must_announce = False
            return self.generation, self.current
        if self.current is not None or self._search in (Search.UNNEEDED, Search.FAILED):
            return None, None
        if self._search is Search.WANTED:
            self._search, self._search_began = Search.ASKED, self._clock()
        if not self.awaits_reports():
            self._fail("Its workers did not report their memory in time.")
            return None, None
        return self.generation, None

    def step_ended(self) -> None:
        """Notice workers that are not registered with the scheduler's daemon, and report them after ``APART_S``.

        Called after a step, in which they have reported what has changed.
        """
        absent = self._absent_ranks()
        if not absent:
            self._apart = None
        elif self._apart is None:
            self._apart = Apart(self._clock())
        elif not self._apart.problem and self._clock() - self._apart.since >= APART_S:
            ranks = ", ".join(map(str, absent))
            self._apart.problem = (
                f"The scheduler is connected to the daemon in {self.directory}, but these workers have not registered "
                f"with it for {APART_S:.0f} s: {ranks}. Give all processes of the engine this directory of this daemon."
            )
            self._must_name_daemon = True
            logger.warning("kvoffd: this engine stores and loads nothing. %s", self._apart.problem)

    def _absent_ranks(self) -> list[int]:
        """Return the workers that may register, but are not registered with the scheduler's daemon."""
        if self.current is None or not self.client.ready:
            return []
        fingerprint, epoch = self.current.fingerprint, self.client.epoch
        return [
            rank
            for rank, state in sorted(self._memory.items())
            if not state.problem and (state.registered != fingerprint or state.daemon not in (None, epoch))
        ]

    def take_daemon(self) -> int | None:
        """Return the scheduler's daemon if the workers must compare it with theirs, once."""
        must_name, self._must_name_daemon = self._must_name_daemon, False
        return self.client.epoch if must_name else None

    def leave(self, engine_cache_kept: bool) -> None:
        """Handle a possible change of the weights. ``engine_cache_kept``: vLLM's own cache still has old blocks."""
        self.generation += 1
        self._memory.clear()
        self.current, self._search = None, Search.UNNEEDED
        self._must_announce = False
        self._apart = None
        self._engine_cache_kept = engine_cache_kept
        self.engine_cache_has_other_weights = self.engine_cache_has_other_weights and engine_cache_kept
        self.on_leave()

    def update(self, states: Mapping[int, MemoryState]) -> None:
        """Handle new memory states by rank. The namespace is decided once, when there is a state of each worker: what
        it depends on stays the same in later ones, until the next ``leave()``."""
        is_decided = len(self._memory) == self._world_size
        for rank, state in states.items():
            if state.generation != self.generation:
                continue
            if state.changed:
                # vLLM's own cache was not reset and still has blocks of the old weights.
                self.leave(engine_cache_kept=True)
                return
            self._memory[rank] = state
        if self._apart is not None and self._apart.problem and not self._absent_ranks():
            self._apart = None  # here too: an engine all of whose prompts wait makes no step that ``step_ended`` sees
        if self.current is None and not is_decided and len(self._memory) == self._world_size:
            self._decide([self._memory[rank] for rank in sorted(self._memory)])

    def _decide(self, states: Sequence[MemoryState]) -> None:
        namespace, *others = [state.namespace for state in states]
        for other in others:
            if other.fingerprint != namespace.fingerprint:
                names = ", ".join(name for name, _, _ in differences(namespace.description, other.description))
                self._fail(f"Its workers disagree on {names or 'their configuration'}. Please report this.")
                return
        if len({state.machine for state in states}) > 1:
            self._fail(
                "Its workers are on several machines, but a daemon serves one. Use tensor and pipeline parallelism "
                "within a machine, and data parallelism between machines."
            )
            return
        weights = [state.weights for state in states if state.weights is not None]
        if len(weights) < len(states):
            logger.warning(
                "kvoffd: the model of this engine was not found or could not be read in its workers, so its weights "
                "are unknown. Its blocks cannot be used by other engines, nor after a restart or reset."
            )
            weights = [uuid.uuid4().hex]
        last, namespace = self._last_namespace, with_live_weights(namespace, weights)
        self.join(namespace)
        self._must_announce, self._search, self._search_began = True, Search.FOUND, self._clock()
        changed = last is not None and last.fingerprint != namespace.fingerprint
        if changed and self._engine_cache_kept:
            self.engine_cache_has_other_weights = True
            logger.warning(
                "kvoffd: the weights were changed, but vLLM's own cache was not reset while idle. Nothing is stored "
                "until it is: call reset_prefix_cache with reset_running_requests and reset_connector."
            )
        of_changed = ", of the changed weights" if changed else ""
        logger.info("kvoffd: namespace %s (%s)%s.", namespace.fingerprint.hex()[:12], namespace.label, of_changed)

    def join(self, namespace: NamespaceSpec) -> None:
        """Enter this namespace, and connect unless already connected."""
        self.current = namespace
        is_same = self._last_namespace is not None and self._last_namespace.fingerprint == namespace.fingerprint
        if not is_same or isinstance(self.client, Unconnected):
            self.client.close()
            self.client = self._connect(namespace) or cast(SchedulerClient, Unconnected())
            self._last_namespace = namespace

    def _fail(self, reason: str) -> None:
        self._search = Search.FAILED
        logger.error("kvoffd: the engine runs without the daemon. %s", reason)
