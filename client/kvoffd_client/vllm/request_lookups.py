"""One request's lookups: what was asked, what is known, which lease holds it. No I/O but the client's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from kvoffd_client.scheduler_session import LookupTicket
from kvoffd_client.vllm.disk_wait import DiskWait, WaitRule, pause_s
from kvoffd_proto.messages import ABSENT, PENDING, READY, GroupKeys

GROUP_ID_BYTES = 4
MAX_KEYS_PER_LOOKUP = 60_000
"""Keys of one lookup; the daemon's default limit is 65,536. Keys beyond it count as absent."""

Key = bytes
"""vLLM's OffloadKey: block hash, then four bytes of group id."""


class LookupClient(Protocol):
    """The part of SchedulerClient that inquiries use."""

    @property
    def connected(self) -> bool: ...

    def lookup(self, groups: Sequence[GroupKeys], again: bool = False) -> LookupTicket: ...

    def release(self, lease_id: int) -> None: ...


class Verdict(Enum):
    """What is known about one key."""

    HIT = auto()
    MISS = auto()
    COMING = auto()
    """It comes up from disk, and that is waited for."""
    LATER = auto()
    TOO_LATE = auto()
    """A miss only because the answer did not come before the deadline."""


class PendingLookup:
    """One lookup: the keys in the order asked, and the ticket."""

    __slots__ = ("_places", "_states", "asked_at", "ticket")

    def __init__(self, ticket: LookupTicket, keys: Iterable[Key], asked_at: float) -> None:
        self.ticket = ticket
        self.asked_at = asked_at
        self._places = {key: place for place, key in enumerate(keys)}
        self._states: bytes | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def state(self, key: Key) -> int | None:
        """What was told of the key; None where it was not asked. Only for answered questions."""
        place = self._places.get(key)
        if place is None:
            return None
        if self._states is None:
            self._states = b"".join(self.ticket.states)
        return self._states[place] if place < len(self._states) else ABSENT

    def ready(self, key: Key) -> bool | None:
        """Whether the key was ready; None where it was not asked. Only for answered questions."""
        state = self.state(key)
        return None if state is None else state == READY

    def pending_keys(self) -> list[Key]:
        """Keys that come up from disk. Only for answered questions."""
        return [key for key in self._places if self.state(key) == PENDING] if self.ticket.pending else []

    @property
    def complete(self) -> bool:
        """Every key asked was ready."""
        return self.ticket.pinned >= len(self._places)

    @property
    def usable(self) -> bool:
        """The answer still holds: its pins live, or there never were any."""
        return self.ticket.alive or self.ticket.pinned == 0


@dataclass(frozen=True)
class Setting:
    """What all inquiries of an engine have in common.

    Attributes:
        asker: the scheduler's client.
        positions: from a key's last four bytes to its group's index on the wire.
        deadline_s: an unanswered question counts as a miss after this many seconds.
        refresh_s: age at which an answer with misses is asked for again, and pause after a failed question, in seconds.
        clock: what time is measured with, as time.monotonic().
        wait_rule: how long to wait for blocks that come up from disk.
    """

    asker: LookupClient
    positions: Mapping[bytes, int]
    deadline_s: float
    refresh_s: float
    clock: Callable[[], float]
    wait_rule: WaitRule = field(default_factory=WaitRule)

    def release(self, question: PendingLookup | None) -> None:
        """End a question's lease, if there is one, or may be one since no answer told."""
        if question is None or question.ticket.lease_id == 0:
            return
        if question.ticket.pinned or question.ticket.failed or not question.ticket.done:
            self.asker.release(question.ticket.lease_id)


@dataclass
class RequestLookups:
    """The lookups of one request.

    Attributes:
        setting: shared by all requests.
        answer: the answer in force; its lease holds what it says is ready.
        pending: a question that is not answered yet. The answer in force is kept until it is replaced.
        seen: the last answer, also after its lease was let go; tells what need not be stored.
        barred: a load of this request failed; it is recomputed and never looked up again.
        extra: keys vLLM asked for beside its chunks' (partial tails), and since when.
        from_disk: keys that came, or were to come, up from disk for this request.
        late: the question was counted as too late.
        failed_at: when a question failed last; none is asked for a while then, lest the request is put off for ever.
    """

    setting: Setting
    answer: PendingLookup | None = None
    pending: PendingLookup | None = None
    seen: PendingLookup | None = None
    barred: bool = False
    extra: dict[Key, float] = field(default_factory=dict)
    failed_at: float = float("-inf")
    late: bool = False
    from_disk: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.wait = DiskWait(self.setting.wait_rule)
        self.wait_noted = False

    def begin(self, groups: Sequence[Sequence[Key]]) -> bool:
        """Take in what came, and ask if the answer is missing, outdated or does not cover ``groups``.

        Called before each scan of the keys, never within one, so that a scan sees one answer. True when it asked.
        """
        self._settle()
        if self.barred or self.pending is not None or self._failed_lately or not self.setting.asker.connected:
            return False
        count = sum(len(keys) for keys in groups)
        if count == 0 or not self._outdated(count):
            return False
        self._ask(groups)
        return True

    def verdict(self, key: Key) -> Verdict:
        """What is known about a key now."""
        if self.barred:
            return Verdict.MISS
        if self.answer is not None:
            state = self.answer.state(key)
            if state == READY:
                return Verdict.HIT
            if state == PENDING and self._waits:
                return Verdict.COMING
            if state is not None and (self.pending is None or state == PENDING):
                return Verdict.MISS
        if self.pending is not None and key in self.pending:
            if self.pending.ticket.done:
                return Verdict.MISS if self.pending.ticket.failed else Verdict.LATER
            return self._later(self.pending.asked_at)
        if self._failed_lately or not self.setting.asker.connected:
            return Verdict.MISS
        return self._later(self.extra.setdefault(key, self.setting.clock()))

    def note_late(self) -> bool:
        """True at the first call for a question that came too late."""
        first, self.late = not self.late, True
        return first

    def take(self) -> PendingLookup | None:
        """Hand the answer in force, with its lease, to a load. Neither is used again here."""
        taken, self.answer = self.answer, None
        self.let_go()
        return taken

    def let_go(self) -> None:
        """Release all leases: the request runs without a load, or is gone."""
        self.setting.release(self.answer)
        self.setting.release(self.pending)
        self.answer = self.pending = None
        self.extra.clear()

    def bar(self) -> None:
        """A load failed: nothing of this request is looked up or believed any more."""
        self.let_go()
        self.barred = True
        self.seen = None

    def is_stored(self, key: Key) -> bool:
        """Whether the last answer said that the block is in the pool."""
        return self.seen is not None and bool(self.seen.ready(key))

    @property
    def _failed_lately(self) -> bool:
        return self.setting.clock() - self.failed_at < self.setting.refresh_s

    def _settle(self) -> None:
        pending = self.pending
        if pending is not None and pending.ticket.done:
            self.pending = None
            if pending.ticket.failed or not pending.usable:
                self.setting.release(pending)
                self.failed_at = self.setting.clock()
            else:
                # The new lease pins what the old one did, so nothing is unpinned in between.
                self.setting.release(self.answer)
                self.answer = self.seen = pending
                self.from_disk.update(pending.pending_keys())
        if self.answer is not None and not self.answer.usable:
            self.answer = None

    def _outdated(self, count: int) -> bool:
        answer = self.answer
        if answer is None or count > len(answer) or any(key not in answer for key in self.extra):
            return True
        if answer.complete:
            return False
        age_s = self.setting.clock() - answer.ticket.answered_at
        return age_s > (pause_s(answer.ticket.wait_s) if self._waits else self.setting.refresh_s)

    @property
    def _waits(self) -> bool:
        """Whether something in the answer in force comes up from disk and is waited for."""
        if self.answer is None or self.wait.over or not self.answer.ticket.pending:
            return False
        if not self._is_told:
            return False
        return self.wait.goes_on(self.answer.ticket.wait_s, self.setting.clock())

    @property
    def _is_told(self) -> bool:
        """Whether the daemon answers: only it says when something has come up, or never will."""
        if self._failed_lately or not self.setting.asker.connected:
            return False
        pending = self.pending
        if pending is None or pending.ticket.done:
            return True
        return self.setting.clock() - pending.asked_at < self.setting.deadline_s

    def _ask(self, groups: Sequence[Sequence[Key]]) -> None:
        room = MAX_KEYS_PER_LOOKUP // max(1, len(groups))
        wanted = [list(keys[:room]) for keys in groups]
        beyond = [key for keys in groups for key in keys[room:]]
        for key in self.extra:
            group = wanted[self.setting.positions[key[-GROUP_ID_BYTES:]]]
            if key not in group:  # the daemon refuses a key that is there twice
                group.append(key)
        message = [
            GroupKeys(index, b"".join([key[:-GROUP_ID_BYTES] for key in keys]))
            for index, keys in enumerate(wanted)
            if keys
        ]
        self.late = False
        ticket = self.setting.asker.lookup(message, again=self.answer is not None and self.answer.ticket.pending)
        # Keys beyond the limit get places behind the last state, which reads as absent.
        self.pending = PendingLookup(ticket, [key for keys in wanted for key in keys] + beyond, self.setting.clock())

    def _later(self, since: float) -> Verdict:
        return Verdict.LATER if self.setting.clock() - since < self.setting.deadline_s else Verdict.TOO_LATE
