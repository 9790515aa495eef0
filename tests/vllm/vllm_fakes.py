"""Stand-ins for the clients under the vLLM connector, driven by the test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvoffd_client import LookupFuture
from kvoffd_client.scheduler_client import StoredKeys
from kvoffd_client.worker_client import Job
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import PENDING, READY, SHARED, GroupKeys, GroupTransfer, HintAction, JobResult, PromptReport
from tests.kit.clock import Clock

KEY_BYTES = 32


@dataclass
class FakeSchedulerClient:
    """Holds lookups until the test answers them."""

    clock: Clock
    directory: str = "/run/kvoffd"
    epoch: int = 7
    ready: bool = True
    unreachable: bool = False
    is_full: bool = False
    """Whether the queue to the daemon is full."""
    session_id: int = 1
    reported_prefill_rate: float = 0.0
    asked: list[tuple[LookupFuture, list[GroupKeys]]] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    invalidated: list[GroupKeys] = field(default_factory=list)
    reports: list[tuple[float, ...]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    late_ages_s: list[float] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    reported: list[PromptReport] = field(default_factory=list)
    givers: list[int] = field(default_factory=list)
    """Givers that lookups and hints named."""
    hints: list[tuple[HintAction, Sequence[GroupKeys], int, float]] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    """Peers that lookups named."""
    stored: StoredKeys = field(default_factory=StoredKeys)
    closed: bool = False

    def now(self) -> float:
        """A lookup's time, as of its transport."""
        return self.clock()

    def add_stored(self, keys: Iterable[bytes]) -> None:
        self.stored.add(keys)

    def report_prompt(self, report: PromptReport) -> None:
        self.reported.append(report)

    def hint(self, action: HintAction, groups: Sequence[GroupKeys], priority: int, ttl_s: float, *, giver: int) -> bool:
        if self.is_full:
            return False
        self.hints.append((action, groups, priority, ttl_s))
        self.givers.append(giver)
        return True

    def lookup(
        self, groups: Sequence[GroupKeys], again: bool = False, *, reported: bool, peer: str = "", giver: int = 0
    ) -> LookupFuture:
        assert reported
        self.givers.append(giver)
        self.peers.append(peer)
        self.again.append(again)
        future = LookupFuture((1 << 32) + len(self.asked) + 1 if self.ready else 0)
        self.asked.append((future, list(groups)))
        if not self.ready:
            self.fail()
        return future

    def answer(
        self,
        ready: set[bytes],
        index: int = -1,
        coming: Collection[bytes] = (),
        wait_s: float = 0.0,
        shared: Collection[bytes] = (),
        asking: int = 0,
    ) -> LookupFuture:
        """Answer a lookup: these block hashes are ready, these on their way up from disk or from a shared store, which
        has not said yet whether it has ``asking`` of them."""
        future, groups = self.asked[index]
        for group in groups:
            state = {**dict.fromkeys(coming, PENDING), **dict.fromkeys(shared, SHARED), **dict.fromkeys(ready, READY)}
            future.states.append(bytes(state.get(block_hash, 0) for block_hash in split(group.keys)))
        future.wait_s, future.asking = wait_s, asking
        return self.end(future, leased=bool(coming or shared))

    def end(self, future: LookupFuture, *, leased: bool = False) -> LookupFuture:
        """End a lookup that has its states; it has a lease if some block is ready, or where it is ``leased``."""
        future.pinned = sum(states.count(READY) for states in future.states)
        future.ttl_ms = 60_000 if future.pinned or leased else 0
        future.transport, future.stale_at = self, float("inf") if future.pinned else 0.0  # type: ignore[assignment]
        future.answered_at = self.clock()
        future.done = True
        return future

    def fail(self, index: int = -1) -> None:
        """Let a lookup fail."""
        future = self.asked[index][0]
        future.answered_at = self.clock()
        future.failed = future.done = True

    def poll(self) -> None: ...

    def show_used(self, groups: Sequence[GroupKeys], *, giver: int) -> None:
        self.release(self.lookup(groups, reported=True, giver=giver).lease_id)

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        self.invalidated.extend(groups)

    def report(self, *figures: float, problem: str = "", late_age_s: float = 0.0) -> bool:
        if self.is_full:
            return False
        self.reports.append(figures)
        self.late_ages_s.append(late_age_s)
        self.problems.append(problem)
        return True

    def take_events(self) -> list[KvEvent]:
        taken, self.events = self.events, []
        return taken

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeWorkerClient:
    """Collects jobs; the test sets their results."""

    directory: str = "/run/kvoffd"
    epoch: int = 7
    problem: str | None = None
    ready: bool = True
    refusal: None = None
    credit_bytes: int = 1 << 20
    stores: dict[int, list[GroupTransfer]] = field(default_factory=dict)
    loads: dict[int, tuple[int, list[GroupTransfer]]] = field(default_factory=dict)
    results: list[JobResult] = field(default_factory=list)
    messages: list[list[int]] = field(default_factory=list)
    fences: list[tuple[list[int], float]] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)
    closed: bool = False
    unregistered: int = 0
    unfinished: int = 0

    def unregister(self, timeout_s: float) -> bool:
        self.unregistered += 1
        return True

    def submit(self, jobs: Sequence[Job]) -> None:
        self.messages.append([job.job_id for job in jobs])
        self.stores.update((job.job_id, list(job.groups)) for job in jobs if job.lease_id is None)
        self.loads.update((job.job_id, (job.lease_id, list(job.groups))) for job in jobs if job.lease_id is not None)

    def take_results(self) -> list[JobResult]:
        taken, self.results = self.results, []
        return taken

    def fence(self, job_ids: Sequence[int], timeout_s: float, busy: Callable[[], bool]) -> None:
        self.fences.append((list(job_ids), timeout_s))
        self.busy.append(busy())

    def close(self) -> None:
        self.closed = True


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def block_hash(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def key(number: int, group_id: int = 0) -> bytes:
    """vLLM's key of that block hash in a group."""
    return block_hash(number) + group_id.to_bytes(4, "big")
