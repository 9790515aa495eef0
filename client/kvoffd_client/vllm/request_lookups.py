"""One request's lookups: which keys were asked for, what the daemon answered, which lease pins the blocks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.scheduler_client import Lookup
from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES, hashes_of
from kvoffd_client.vllm.connector_options import BEST_EFFORT, LIMIT
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.lookup_allowance import LookupAllowance
from kvoffd_client.vllm.namespace_client import NamespaceClient
from kvoffd_client.vllm.prefill_rate import PrefillRate
from kvoffd_proto.messages import ABSENT, COMING, PENDING, READY, SHARED, GroupKeys

MIN_RETRY_PAUSE_S = 0.002
MAX_RETRY_PAUSE_S = 0.05


class KeyStatus(Enum):
    HIT = auto()
    MISS = auto()
    PENDING = auto()  # the daemon brings the block up from disk or elsewhere, and the request waits for it
    RETRY = auto()  # the answer has not come yet
    TIMED_OUT = auto()  # a miss only because the answer did not come in time


class PendingLookup:
    """One lookup: its keys in the order of the message, and the ticket that the answer comes in.

    ``given_up``: its answer is waited for no longer. It is used if it comes before the request runs.
    """

    __slots__ = ("_places", "_states", "given_up", "sent_at", "ticket")

    def __init__(self, ticket: Lookup, keys: Iterable[OffloadKey], sent_at: float) -> None:
        self.ticket = ticket
        self.sent_at = sent_at
        self.given_up = False
        self._places = {key: place for place, key in enumerate(keys)}
        self._states: bytes | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._places

    def state(self, key: OffloadKey) -> int | None:
        """Return the key's state as the wire names it; None where it was not asked for. Only once answered."""
        place = self._places.get(key)
        if place is None:
            return None
        if self._states is None:
            self._states = b"".join(self.ticket.states)
        return self._states[place] if place < len(self._states) else ABSENT

    def pending_keys(self, *states: int) -> list[OffloadKey]:
        """Return the keys whose blocks the daemon brings up, those in these states. Only once answered."""
        return [key for key in self._places if self.state(key) in states] if self.ticket.pending else []

    @property
    def complete(self) -> bool:
        return self.ticket.pinned >= len(self._places)

    @property
    def usable(self) -> bool:
        """Whether the answer still holds: its lease lives, or nothing was pinned."""
        return self.ticket.alive or self.ticket.pinned == 0


@dataclass(frozen=True)
class LookupSettings:
    """What the lookups of all requests of an engine have in common.

    Attributes:
        positions: from a key's last four bytes to its group's index on the wire.
        deadline_s: an unanswered lookup counts as a miss after this many seconds at the latest.
        refresh_s: age at which an answer with misses is asked for again, and pause after a failed lookup, in seconds.
        clock: what time is measured with, as time.monotonic().
        prefill: how fast the engine computes; the mode "limit" waits no longer than that takes.
        allowance: how long an answer is waited for.
        disk_wait: what to do about blocks that the daemon reads from disk; see ``ConnectorOptions``.
        disk_wait_s: the most that the mode "limit" waits, from the first answer in which something was pending.
    """

    client: NamespaceClient
    positions: Mapping[bytes, int]
    deadline_s: float
    refresh_s: float
    clock: Callable[[], float]
    prefill: PrefillRate
    allowance: LookupAllowance
    disk_wait: str = LIMIT
    disk_wait_s: float = 1.0

    def release(self, lookup: PendingLookup | None) -> None:
        """End a lookup's lease, if there is one, or may be one since no answer told."""
        if lookup is not None and (lookup.ticket.pinned or lookup.ticket.failed or not lookup.ticket.done):
            self.client.release(lookup.ticket.lease_id)


@dataclass
class RequestLookups:
    """The lookups of one request.

    Attributes:
        answer: the answer in force; its lease pins what it says is ready.
        pending: a lookup that is not answered yet. The answer in force is kept until it is replaced.
        last_answer: also after its lease was released; tells what need not be stored.
        told: blocks of which the daemon knows the tokens, or needs none; None where the request may tell none.
        adapter: content of the request's LoRA adapter; empty for none.
        adapter_id: vLLM's number of that adapter; 0 for none.
        outside: nothing of this request may be looked up or stored.
        load_failed: a load of this request failed; the request is recomputed and never looked up again.
        extra_keys: keys that vLLM asked for beside its chunks' (partial tails), and since when.
        from_disk: keys that the daemon read, or was to read, from disk for this request.
        from_elsewhere: the same, from a store that nodes share.
        disk_wait_since: when the first answer came in which something was pending; None before.
        disk_wait_limit_s: how long the mode "limit" waits from then on.
        disk_wait_over: the request does not wait for the disk any more, whatever is still pending.
        skip_counted: it was counted that its blocks were not loaded, since that is slow.
        groups: its keys as they were asked for last.
        missing_tokens: what is computed if nothing is loaded: all but what vLLM itself has; 0 before that is known.
        failed_at: when a lookup failed last; for a while none is sent then, lest the request is put off for ever.
    """

    settings: LookupSettings
    answer: PendingLookup | None = None
    pending: PendingLookup | None = None
    last_answer: PendingLookup | None = None
    told: Container[OffloadKey] | None = None
    adapter: bytes = b""
    adapter_id: int = 0
    outside: bool = False
    load_failed: bool = False
    extra_keys: dict[OffloadKey, float] = field(default_factory=dict)
    failed_at: float = float("-inf")
    timeout_counted: bool = False
    from_disk: set[OffloadKey] = field(default_factory=set)
    from_elsewhere: set[OffloadKey] = field(default_factory=set)
    disk_wait_since: float | None = None
    disk_wait_limit_s: float = 0.0
    disk_wait_over: bool = False
    disk_wait_counted: bool = False
    skip_counted: bool = False
    groups: Sequence[Sequence[OffloadKey]] = ()
    missing_tokens: int = 0

    def refresh(self, groups: Sequence[Sequence[OffloadKey]]) -> bool:
        """Take in an answer that came; send a lookup if it is missing, outdated or does not cover ``groups``.

        Called before each scan of the keys, never within one, so that a scan sees one answer. True when it sent one.
        """
        self._take_answer()
        if (
            self.outside
            or self.load_failed
            or self.pending is not None
            or self._failed_lately
            or not self.settings.client.ready
        ):
            return False
        count = sum(len(keys) for keys in groups)
        if (count == 0 and not self.extra_keys) or not self._outdated(count):
            return False
        self._send(groups)
        return True

    def status(self, key: OffloadKey) -> KeyStatus:
        if self.outside or self.load_failed:
            return KeyStatus.MISS
        if self.answer is not None:
            state = self.answer.state(key)
            if state == READY:
                return KeyStatus.HIT
            if state in COMING and self._wait_for_disk():
                return KeyStatus.PENDING
            if state is not None and (self.pending is None or state in COMING):
                return KeyStatus.MISS
        if self.pending is not None and key in self.pending:
            if self.pending.ticket.done:
                return KeyStatus.MISS if self.pending.ticket.failed else KeyStatus.RETRY
            return self._unanswered(self.pending.sent_at)
        if self._failed_lately or not self.settings.client.ready:
            return KeyStatus.MISS
        return self._unanswered(self.extra_keys.setdefault(key, self.settings.clock()))

    @property
    def tail_unanswered(self) -> bool:
        """Whether vLLM asked for keys beside the chunks', of which nothing is known yet."""
        return any(self.status(key) is KeyStatus.RETRY for key in self.extra_keys)

    def count_timeout(self) -> bool:
        """Return True at the first call for a lookup that timed out."""
        first, self.timeout_counted = not self.timeout_counted, True
        return first

    def count_disk_wait(self) -> bool:
        """Return True at the first call after the request stopped waiting for the disk."""
        first = self.disk_wait_over and not self.disk_wait_counted
        self.disk_wait_counted = self.disk_wait_over
        return first

    def take(self) -> PendingLookup | None:
        """Hand the answer in force, with its lease, to a load. Neither is used again here."""
        taken, self.answer = self.answer, None
        self.release()
        return taken

    def release(self) -> None:
        """End all leases: the request runs without a load, or is gone."""
        self.settings.release(self.answer)
        self.settings.release(self.pending)
        self.answer = self.pending = None
        self.extra_keys.clear()

    def forget(self) -> None:
        """End all leases, and forget what is stored."""
        self.release()
        self.last_answer = None

    def leave(self) -> None:
        """Look up and store nothing of this request any more."""
        self.release()
        self.outside = True

    def mark_load_failed(self) -> None:
        """Look nothing of this request up any more, and use no answer."""
        self.forget()
        self.load_failed = True

    def is_stored(self, key: OffloadKey) -> bool:
        """Return whether the last answer said that the block is in the pool, and its tokens need not be told."""
        ready = self.last_answer is not None and self.last_answer.state(key) == READY
        return ready and (self.told is None or key in self.told)

    @property
    def unanswered(self) -> bool:
        """Whether all that is known of this request is that a lookup was sent, whose answer is waited for."""
        pending = self.pending
        return self.answer is None and pending is not None and not (pending.ticket.done or pending.given_up)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer; False when it is not there after ``timeout_s`` seconds."""
        came = self.pending is None or self.pending.ticket.wait(timeout_s)
        self._take_answer()
        return came

    @property
    def _failed_lately(self) -> bool:
        return self.settings.clock() - self.failed_at < self.settings.refresh_s

    def _take_answer(self) -> None:
        pending = self.pending
        if pending is not None and not pending.ticket.done:
            self.settings.client.poll()
        if pending is not None and pending.ticket.done:
            self.pending = None
            if pending.ticket.failed or not pending.usable:
                self.settings.release(pending)
                self.failed_at = self.settings.clock()
            else:
                if not pending.given_up:
                    self.settings.allowance.answered(self.missing_tokens)
                # The new lease pins what the old one did, so nothing is unpinned in between.
                self.settings.release(self.answer)
                self.answer = self.last_answer = pending
                self.from_disk.update(pending.pending_keys(PENDING))
                self.from_elsewhere.update(pending.pending_keys(SHARED))
        if self.answer is not None and not self.answer.usable:
            self.answer = None

    def _outdated(self, count: int) -> bool:
        answer = self.answer
        if answer is None or count > len(answer) or any(key not in answer for key in self.extra_keys):
            return True
        if answer.complete:
            return False
        age_s = self.settings.clock() - answer.ticket.answered_at
        return age_s > (_retry_pause_s(answer.ticket.wait_s) if self._wait_for_disk() else self.settings.refresh_s)

    def _wait_for_disk(self) -> bool:
        """Return whether the request waits for blocks that the daemon reads from disk; begin or end its waiting."""
        answer = self.answer
        if answer is None or self.disk_wait_over or not answer.ticket.pending or not self._daemon_answers:
            return False
        now = self.settings.clock()
        if self.disk_wait_since is None:
            self.disk_wait_since = now
            computed_s = self.settings.prefill.seconds_for(answer.pending_keys(*COMING))
            self.disk_wait_limit_s = min(self.settings.disk_wait_s, computed_s)
        expected_s = now - self.disk_wait_since + answer.ticket.wait_s
        mode = self.settings.disk_wait
        self.disk_wait_over = mode == BEST_EFFORT or (mode == LIMIT and expected_s >= self.disk_wait_limit_s)
        return not self.disk_wait_over

    @property
    def _daemon_answers(self) -> bool:
        """Whether the daemon answers: only it says when something has come from disk, or never will."""
        if self._failed_lately or not self.settings.client.ready:
            return False
        pending = self.pending
        if pending is None or pending.ticket.done:
            return True
        return self.settings.clock() - pending.sent_at < self.settings.deadline_s

    def _send(self, groups: Sequence[Sequence[OffloadKey]]) -> None:
        count, limit = sum(map(len, groups)) + len(self.extra_keys), self.settings.client.max_keys
        room = limit // max(1, len(groups)) if count > limit else count
        if count > limit:
            logger.warning_once(  # type: ignore[attr-defined]
                "kvoffd: a prompt has %d block hashes in its groups, and the daemon takes %d in one lookup; the rest "
                "is computed. Raise the daemon's max_keys_per_request (and max_frame_size: 32 bytes each).",
                count,
                limit,
            )
        wanted = [list(keys[:room]) for keys in groups]
        beyond = [key for keys in groups for key in keys[room:]]
        for key in self.extra_keys:
            group = wanted[self.settings.positions[key[-GROUP_ID_BYTES:]]]
            if key not in group:  # the daemon refuses a key that is there twice
                group.append(key)
        hashes = [hashes_of(keys, self.adapter) for keys in wanted]
        message = [GroupKeys(index, joined) for index, joined in enumerate(hashes) if joined]
        self.timeout_counted = False
        ticket = self.settings.client.lookup(message, again=self.last_answer is not None)
        # Keys beyond the limit get places behind the last state, which reads as absent.
        self.pending = PendingLookup(ticket, [key for keys in wanted for key in keys] + beyond, self.settings.clock())

    def _unanswered(self, since: float) -> KeyStatus:
        pending = self.pending
        if pending is not None and pending.given_up:
            return KeyStatus.TIMED_OUT
        if self.settings.clock() - since < self._allowance_s:
            return KeyStatus.RETRY
        if pending is not None:
            pending.given_up = True
            self.settings.allowance.give_up(pending.ticket, pending.sent_at, self.missing_tokens)
        return KeyStatus.TIMED_OUT

    @property
    def _allowance_s(self) -> float:
        """How long to wait for an answer. While blocks come up from disk the next answer has the whole deadline."""
        if self.answer is not None and self.answer.ticket.pending and not self.disk_wait_over:
            return self.settings.deadline_s
        return self.settings.allowance.seconds_for(self.missing_tokens)


def _retry_pause_s(expected_s: float) -> float:
    """Return after how many seconds to ask again for what is pending: half of what is expected, within bounds."""
    return min(MAX_RETRY_PAUSE_S, max(MIN_RETRY_PAUSE_S, expected_s / 2))
