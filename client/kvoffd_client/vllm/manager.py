"""The scheduler's half: answers vLLM's questions about blocks from what the daemon has answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffd_client.scheduler_client import Lookup
from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.block_tokens import BlockTokens, EventGroup, HostBlockEvents, hashed_by_tokens, tokens_of
from kvoffd_client.vllm.connector_metadata import GROUP_ID_BYTES, FailedJob, KeyedSpec, hashes_of
from kvoffd_client.vllm.do_no_harm import DoNoHarm
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.log import logger
from kvoffd_client.vllm.lookup_allowance import LookupAllowance
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import ABSENT, COMING, PENDING, READY, SHARED, GroupKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Errors that say something about the blocks. After any other one they are as good as before.
BLOCKS_UNUSABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.COPY_FAILED, ErrorCode.CHECKSUM})
REFRESH_S = 1.0
"""Age at which an answer with misses is asked for again, and pause after a lookup that failed."""
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.002, 0.05
"""Between lookups of blocks that come up from disk."""
LOOKUP_WAIT_S = 0.001
"""How long the scheduler waits for answers in one step, of all its new requests together. Without that an engine with
nothing else to run would make an empty step, after which vLLM sleeps for a millisecond."""
WAIT_PAUSE_S = 1.0
"""After an answer was awaited in vain none is awaited for so long: a daemon that hangs costs 1 ms a second."""


@dataclass(frozen=True)
class ChunkGroup:
    """One offloaded KV cache group.

    Attributes:
        suffix: the end of vLLM's keys of the group.
        hashes_per_chunk: block hashes of a request that one key stands for, the last of which is in the key.
        tokens_per_chunk: tokens that one key stands for.
        shard_bytes: about the bytes of one worker's shard of a block.
    """

    group_id: int
    hashes_per_chunk: int
    tokens_per_chunk: int
    shard_bytes: int

    @property
    def suffix(self) -> bytes:
        return self.group_id.to_bytes(GROUP_ID_BYTES, "big")

    def extend(self, keys: list[OffloadKey], block_hashes: Sequence[bytes]) -> None:
        """Add the keys of a request's further whole chunks, by its block hashes."""
        count = self.hashes_per_chunk
        ends = range((len(keys) + 1) * count - 1, len(block_hashes), count)
        keys.extend([make_offload_key(block_hashes[end], self.group_id) for end in ends])


class StoreWindow:
    """Counts the bytes of stores that were offered to vLLM and that no worker has reported as ended.

    The credit is soft: one offer may pass it. An offer is all the new blocks of a request's step, and a part of it
    would be worth little (vLLM does not offer the rest again, and a prefix without its sliding windows is no hit); an
    offer larger than the whole credit would otherwise never be made. ``shard_bytes`` are those of one worker's shard of
    a block, by a key's last four bytes.
    """

    def __init__(self, shard_bytes: Mapping[bytes, int]) -> None:
        self._shard_bytes = shard_bytes
        self._in_flight: set[OffloadKey] = set()
        self.outstanding_bytes = 0
        self.credit_bytes = 0

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._in_flight

    def admits(self, keys: Collection[OffloadKey], *, last: bool) -> bool:
        """Whether a store of these keys may be offered now.

        ``last``: their request has ended, and vLLM offers them no more. They may pass the credit as far as the daemon
        takes stores: to twice the credit.
        """
        if self.outstanding_bytes == 0 or self.outstanding_bytes < self.credit_bytes:
            return True
        return last and self.outstanding_bytes + self._bytes_of(keys) <= 2 * self.credit_bytes

    def begin(self, keys: Collection[OffloadKey]) -> None:
        """Count keys, none of them in flight, that are offered now."""
        self._in_flight.update(keys)
        self.outstanding_bytes += self._bytes_of(keys)

    def end(self, keys: Collection[OffloadKey]) -> None:
        """Forget the keys of a store that ended, well or not. Keys that are not in flight (any more) are ignored."""
        ended = self._in_flight.intersection(keys)
        self._in_flight -= ended
        self.outstanding_bytes -= self._bytes_of(ended)

    def clear(self) -> None:
        """Forget all stores: vLLM does not tell how they end after a reset."""
        self._in_flight.clear()
        self.outstanding_bytes = 0

    def _bytes_of(self, keys: Collection[OffloadKey]) -> int:
        return sum(self._shard_bytes[key[-GROUP_ID_BYTES:]] for key in keys)


class KeyedLookup:
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

    def keys_in(self, *states: int) -> list[OffloadKey]:
        """Return the keys in these states, on their way up from a tier. Only once answered."""
        return [key for key in self._places if self.state(key) in states] if self.ticket.pending else []

    @property
    def answered(self) -> bool:
        return self.ticket.done and not self.ticket.failed

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
        namespace: has the connection to the daemon.
        groups: the offloaded KV cache groups, by index on the wire.
        deadline_s: an unanswered lookup counts as a miss after this many seconds at the latest.
        clock: what time is measured with, as time.monotonic().
        allowance: how long an answer is waited for, and how fast the engine computes.
        disk_wait_s: the most that a request waits for blocks from a tier below the pool, from the first answer in which
            some were on their way.
    """

    namespace: EngineNamespace
    groups: tuple[ChunkGroup, ...]
    deadline_s: float
    clock: Callable[[], float]
    allowance: LookupAllowance
    disk_wait_s: float = 1.0

    def release(self, lookup: KeyedLookup | None) -> None:
        """End a lookup's lease, if there is one, or may be one since no answer told."""
        if lookup is not None and (lookup.ticket.pinned or lookup.ticket.failed or not lookup.ticket.done):
            self.namespace.client.release(lookup.ticket.lease_id)


@dataclass
class RequestState:
    """What is known of one request.

    Attributes:
        request: vLLM's, whose block hashes grow; None until the connector has told.
        keys: its whole chunks' keys, by group on the wire.
        answer: the answer in force; its lease pins what it says is ready.
        pending: a lookup that is not answered yet. The answer in force stays until it is replaced.
        last: the lookup that was sent last, also after its lease was released; tells what need not be stored.
        adapter: content of the request's LoRA adapter; empty for none.
        adapter_id: vLLM's number of that adapter; 0 for none.
        disabled: nothing of this request may be looked up or stored.
        load_failed: a load of this request failed; the request is recomputed and never looked up again.
        has_all: vLLM's own cache has all of the request that it may have: nothing is loaded.
        from_disk: keys that the daemon read, or was to read, from disk for this request.
        from_elsewhere: the same, from a store that nodes share.
        disk_wait_since: when the first answer came in which something was on its way; None before.
        disk_wait_limit_s: how long the request waits from then on.
        disk_wait_over: the request does not wait for tiers below the pool any more.
        waits_for_disk: the request waits for what the answer says is on its way.
        late: no answer came in time.
        skip_counted: it was counted that its blocks were not loaded, since that is slow.
        missing_tokens: what is computed if nothing is loaded: all but what vLLM itself has; 0 before that is known.
        failed_at: when a lookup failed last; for a while none is sent then, lest the request is put off for ever.
    """

    settings: LookupSettings
    request: Request | None = None
    keys: tuple[list[OffloadKey], ...] = ()
    answer: KeyedLookup | None = None
    pending: KeyedLookup | None = None
    last: KeyedLookup | None = None
    adapter: bytes = b""
    adapter_id: int = 0
    disabled: bool = False
    load_failed: bool = False
    has_all: bool = False
    from_disk: set[OffloadKey] = field(default_factory=set)
    from_elsewhere: set[OffloadKey] = field(default_factory=set)
    disk_wait_since: float | None = None
    disk_wait_limit_s: float = 0.0
    disk_wait_over: bool = False
    waits_for_disk: bool = False
    late: bool = False
    skip_counted: bool = False
    missing_tokens: int = 0
    failed_at: float = float("-inf")

    def refresh(self) -> bool:
        """Take in an answer that came; send a lookup if it is missing, outdated or does not cover the keys.

        Called before each scan of the keys, never within one, so that a scan sees one answer. True when it sent one.
        """
        self.take_answer()
        sends = (
            not (self.disabled or self.load_failed)
            and self.pending is None
            and not self._failed_lately
            and self.settings.namespace.client.ready
            and self._outdated(sum(map(len, self.keys)))
        )
        if sends:
            self._send()
        self._give_up_late_answer()
        return sends

    def take_answer(self) -> None:
        """Take in an answer that came, and decide whether to wait for what it says is on its way."""
        pending, settings = self.pending, self.settings
        if pending is not None and not pending.ticket.done:
            settings.namespace.client.poll()
        if pending is not None and pending.ticket.done:
            self.pending = None
            if pending.ticket.failed or not pending.usable:
                settings.release(pending)
                self.failed_at = settings.clock()
            else:
                if not pending.given_up:
                    settings.allowance.answered(self.missing_tokens)
                # The new lease pins what the old one did, so nothing is unpinned in between.
                settings.release(self.answer)
                self.answer = pending
                self.from_disk.update(pending.keys_in(PENDING))
                self.from_elsewhere.update(pending.keys_in(SHARED))
        if self.answer is not None and not self.answer.usable:
            self.answer = None
        self._decide_disk_wait()

    def result(self, key: OffloadKey) -> LookupResult:
        """Return vLLM's word for what is known of a key. Keys inside a chunk, of the end of a prompt, are misses."""
        if self.disabled or self.load_failed or self.has_all:
            return LookupResult.MISS
        if self.answer is not None:
            state = self.answer.state(key)
            if state == READY:
                return LookupResult.HIT
            if state in COMING and self.waits_for_disk:
                # Not RETRY, after which vLLM would look for an earlier window although this one will be there.
                return LookupResult.HIT_PENDING
            if state is not None and (self.pending is None or state in COMING):
                return LookupResult.MISS
        pending = self.pending
        if pending is None or key not in pending or pending.given_up or pending.ticket.failed:
            return LookupResult.MISS
        return LookupResult.RETRY

    def take(self) -> KeyedLookup | None:
        """Hand the answer in force, with its lease, to a load. Neither is used again here."""
        taken, self.answer = self.answer, None
        self.release()
        return taken

    def release(self) -> None:
        """End all leases: the request runs without a load, or is gone."""
        self.settings.release(self.answer)
        self.settings.release(self.pending)
        self.answer = self.pending = None

    def forget(self) -> None:
        """End all leases, and forget what is stored."""
        self.release()
        self.last = None

    def disable(self) -> None:
        """Look up and store nothing of this request any more."""
        self.release()
        self.disabled = True

    def mark_load_failed(self) -> None:
        """Look nothing of this request up any more, and use no answer."""
        self.forget()
        self.load_failed = True

    def is_stored(self, key: OffloadKey) -> bool:
        """Return whether the last answer said that the block is in the pool."""
        return self.last is not None and self.last.answered and self.last.state(key) == READY

    @property
    def has_ended(self) -> bool:
        """Whether vLLM's request has ended, with what result ever."""
        return self.request is not None and self.request.is_finished()

    @property
    def unanswered(self) -> bool:
        """Whether all that is known of this request is that a lookup was sent, whose answer is waited for."""
        pending = self.pending
        return self.answer is None and pending is not None and not (pending.ticket.done or pending.given_up)

    @property
    def is_answer_near(self) -> bool:
        """Whether the last lookup's answer has not come, and is not overdue. Its lease may be released."""
        last = self.last
        return last is not None and not last.ticket.done and self._age_s(last) < self.settings.deadline_s

    def _age_s(self, lookup: KeyedLookup) -> float:
        return self.settings.clock() - lookup.sent_at

    @property
    def _failed_lately(self) -> bool:
        return self.settings.clock() - self.failed_at < REFRESH_S

    def _outdated(self, count: int) -> bool:
        answer = self.answer
        if answer is None or count > len(answer):
            return count > 0
        if answer.complete:
            return False
        age_s = self.settings.clock() - answer.ticket.answered_at
        # While blocks come up from disk: half of what the daemon expects.
        pause_s = min(MAX_RETRY_PAUSE_S, max(MIN_RETRY_PAUSE_S, answer.ticket.wait_s / 2))
        return age_s > (pause_s if self.waits_for_disk else REFRESH_S)

    def _decide_disk_wait(self) -> None:
        answer, settings = self.answer, self.settings
        self.waits_for_disk = False
        if answer is None or self.disk_wait_over or not answer.ticket.pending or not self._daemon_answers:
            return
        now = settings.clock()
        if self.disk_wait_since is None:
            self.disk_wait_since = now
            self.disk_wait_limit_s = settings.disk_wait_s
            if settings.allowance.active:
                computed_s = settings.allowance.prefill.seconds_for(answer.keys_in(*COMING))
                self.disk_wait_limit_s = min(settings.disk_wait_s, computed_s)
        expected_s = now - self.disk_wait_since + answer.ticket.wait_s
        self.disk_wait_over = expected_s >= self.disk_wait_limit_s
        self.waits_for_disk = not self.disk_wait_over

    @property
    def _daemon_answers(self) -> bool:
        """Whether the daemon answers: only it says when something has come from disk, or never will."""
        if self._failed_lately or not self.settings.namespace.client.ready:
            return False
        pending = self.pending
        return pending is None or pending.ticket.done or self._age_s(pending) < self.settings.deadline_s

    def _send(self) -> None:
        client = self.settings.namespace.client
        count, limit = sum(map(len, self.keys)), client.max_keys
        room = limit // max(1, len(self.keys)) if count > limit else count
        if count > limit:
            logger.warning_once(  # type: ignore[attr-defined]
                "kvoffd: a prompt has %d block hashes in its groups, and the daemon takes %d in one lookup; the rest "
                "is computed. Have each hash cover more tokens (--block-size).",
                count,
                limit,
            )
        wanted = [keys[:room] for keys in self.keys]
        beyond = [key for keys in self.keys for key in keys[room:]]
        hashes = [hashes_of(keys, self.adapter) for keys in wanted]
        message = [GroupKeys(index, joined) for index, joined in enumerate(hashes) if joined]
        ticket = client.lookup(message, again=self.last is not None)
        # Keys beyond the limit get places behind the last state, which reads as absent.
        keys = [*(key for keys in wanted for key in keys), *beyond]
        self.pending = self.last = KeyedLookup(ticket, keys, self.settings.clock())
        self.late = False

    def _give_up_late_answer(self) -> None:
        pending, settings = self.pending, self.settings
        if pending is None or pending.ticket.done or pending.given_up:
            return
        # While blocks come up from disk the next answer has the whole deadline.
        comes_up = self.answer is not None and self.answer.ticket.pending and not self.disk_wait_over
        allowed_s = settings.deadline_s if comes_up else settings.allowance.seconds_for(self.missing_tokens)
        if self._age_s(pending) >= allowed_s:
            pending.given_up = self.late = True
            settings.allowance.give_up(pending.ticket, pending.sent_at, self.missing_tokens)


class KvoffdManager(OffloadingManager):
    """vLLM's OffloadingManager over the daemon. Where the daemon is away or slow, every answer is a miss.

    Attributes:
        namespace: which namespace the engine is in, with the connection. It was left before reset_cache() is called.
        events: what the engine publishes of the daemon's blocks; None where it publishes no KV events.
    """

    def __init__(
        self,
        settings: LookupSettings,
        *,
        do_no_harm: bool = True,
        config_info: Mapping[str, str | float] | None = None,
    ) -> None:
        self._settings = settings
        self._positions = {group.suffix: index for index, group in enumerate(settings.groups)}
        self._store_window = StoreWindow({group.suffix: group.shard_bytes for group in settings.groups})
        self.events: HostBlockEvents | None = None
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[str, KeyedLookup] = {}
        self._counters = metrics.Counters()
        self.namespace = settings.namespace
        self.namespace.on_leave = self._disable_adapters
        self._loads = self._stores = True
        self._harm = DoNoHarm(settings.allowance.prefill, settings.clock, do_no_harm)
        self._config_info = config_info or {}
        self._credit_reported = False
        self._on_hold = False  # one answer for all keys of a scan
        self._wait_left_s = LOOKUP_WAIT_S
        self._no_wait_before = float("-inf")

    # --- what the connector calls beyond vLLM's interface ---

    def begin_engine(
        self,
        *,
        loads: bool,
        stores: bool,
        most_running: int,
        largest_chunk: int,
        event_kinds: Mapping[int, str] | None = None,
    ) -> None:
        """Take what the engine's configuration says, before the first request.

        Without ``loads`` everything is a miss, without ``stores`` nothing is stored: vLLM's kv_role. Where the engine
        publishes KV events, ``event_kinds`` are those of its groups of full attention, by index on the wire. For the
        others see ``PrefillRate``.
        """
        self._loads, self._stores = loads, stores
        if event_kinds is not None:
            groups = self._settings.groups
            self.events = HostBlockEvents(
                {
                    index: EventGroup(groups[index].group_id, groups[index].tokens_per_chunk, kind)
                    for index, kind in event_kinds.items()
                }
            )
        self._settings.allowance.prefill.begin_engine(most_running, largest_chunk)

    def begin_request(self, request: Request) -> None:
        """Note a new request, after vLLM's on_new_request()."""
        state = self._requests[request.request_id]
        state.request = request
        state.keys = tuple([[] for _ in self._settings.groups])

    def start_lookup(self, request_id: str) -> None:
        """Look up the keys of a request's whole chunks, unless a good answer is there or on its way."""
        state = self._requests.get(request_id)
        if state is None or state.request is None:
            return
        self._on_hold = self._waits_for_namespace
        for keys, group in zip(state.keys, self._settings.groups, strict=True):
            group.extend(keys, state.request.block_hashes)
        self._settings.allowance.settle()
        was_late = state.late
        if self._loads and self._may_use_daemon and state.refresh():
            self._counters.count(metrics.LOOKUPS)
        if state.late and not was_late:
            self._counters.count(metrics.LATE_LOOKUPS)
            self._harm.late_lookups += 1

    def prepare_scan(self, request_id: str, computed_tokens: int, *, has_all: bool) -> None:
        """Have an answer, if possible, before vLLM asks for a request's keys: wait a moment for it.

        ``computed_tokens`` are in vLLM's own cache; ``has_all``: see ``RequestState``.
        """
        state = self._requests.get(request_id)
        if state is None or state.request is None:
            return
        state.missing_tokens = state.request.num_tokens - computed_tokens
        state.has_all = has_all
        self.start_lookup(request_id)
        if self._on_hold or has_all or not state.unanswered:
            return
        now = self._settings.clock()
        if self._wait_left_s <= 0 or now < self._no_wait_before:
            return
        assert state.pending is not None
        self._counters.count(metrics.LOOKUP_WAITS)
        came = state.pending.ticket.wait(self._wait_left_s)
        after = self._settings.clock()
        self._wait_left_s -= after - now
        if came:
            state.take_answer()
        else:
            self._counters.count(metrics.LOOKUP_WAITS_IN_VAIN)
            self._no_wait_before = after + WAIT_PAUSE_S

    def step_begins(self, request_tokens: Collection[int]) -> None:
        """Note that the scheduler begins a step with so many tokens of each request; tell the daemon now and then."""
        self._wait_left_s = LOOKUP_WAIT_S
        self._settings.allowance.prefill.step_begins(request_tokens)
        # While the daemon does not answer, as when lookups are late, the counts wait for it.
        client = self.namespace.client
        if client.ready and (figures := self._harm.news()) is not None:
            client.report(*figures)

    def step_ended(self) -> None:
        """Note that the output of the first of the steps that run has come."""
        self._settings.allowance.prefill.step_ended()

    @property
    def is_busy(self) -> bool:
        """Whether steps are needed: for a load to be taken in, or for the namespace."""
        return bool(self._loading) or self.has_pending_work()

    def load_is_worth_it(self, request_id: str, tokens: int) -> bool:
        """Whether to load so many tokens of a request, and not to compute them."""
        if self._harm.load_is_worth_it(tokens):
            return True
        state = self._requests.get(request_id)
        if state is None or not state.skip_counted:
            self._counters.count(metrics.SLOW_LOADS)
            self._harm.skipped_loads += 1
        if state is not None:
            state.skip_counted = True
        return False

    def load_ended(self, keys_of_groups: Sequence[int], seconds: float) -> None:
        """Note how long a load of so many keys of each group took, the slowest rank's."""
        groups = zip(keys_of_groups, self._settings.groups, strict=True)
        self._harm.loads.note(max(count * group.tokens_per_chunk for count, group in groups), seconds)

    def ready_tokens(self, request_id: str, index: int) -> int:
        """Return of how many tokens of a group, from a request's first one on, the answer says that they are there."""
        state = self._requests.get(request_id)
        if state is None or state.answer is None or not all(state.keys):
            return 0
        chunks = min(state.answer.ticket.leading_ready(index), len(state.keys[index]))
        return chunks * self._settings.groups[index].tokens_per_chunk

    def publish_found(self, request_id: str) -> None:
        """Publish what a request's answer in force says is there, which another engine may have stored."""
        state = self._requests.get(request_id)
        if self.events is None or state is None or state.answer is None or not state.answer.usable:
            return
        for index in self.events.groups:
            self.events.found(state.request, index, state.keys[index], state.answer.ticket.leading_ready(index))

    def begin_adapter(self, request_id: str, content: bytes | None, adapter_id: int) -> None:
        """Have a new request's keys hold the content of its LoRA adapter; None: it is not known, so use nothing.

        Where other requests have other content under the same id, nobody knows which of it vLLM computes them with.
        """
        if (state := self._requests.get(request_id)) is None:
            return
        state.adapter, state.adapter_id, state.disabled = content or b"", adapter_id, content is None
        same_id = [other for other in self._requests.values() if other.adapter_id == adapter_id and other.adapter]
        if any(other.adapter != content for other in same_id):
            for other in same_id:
                other.disable()

    def _disable_adapters(self) -> None:
        """Adapters may have been replaced in place, and vLLM goes on with the requests that began with others."""
        for state in self._requests.values():
            if state.adapter:
                state.disable()

    def disable(self, request_id: str) -> None:
        """Look up and store nothing of a new request."""
        if state := self._requests.get(request_id):
            state.disable()

    def scheduled_without_load(self, request_id: str) -> None:
        """Unpin the blocks of a request that was scheduled and needs none of them."""
        if state := self._requests.get(request_id):
            state.release()

    def job_failed(self, failed: FailedJob) -> None:
        """Take note that a store left blocks out, or that a load failed, whose request is recomputed."""
        reason = failed.error.sentence if failed.error is not None else "The daemon gave no reason."
        if failed.request_id is None:  # of a store's blocks nothing is known here, so there is nothing to forget
            self._counters.count(metrics.FAILED_STORES)
            logger.debug("kvoffd: a store failed. %s", reason)
            return
        self._counters.count(metrics.FAILED_LOADS)
        if state := self._requests.get(failed.request_id):
            state.mark_load_failed()
        if failed.error in BLOCKS_UNUSABLE:
            self.namespace.client.invalidate([GroupKeys(group, hashes) for group, hashes in failed.keys if hashes])
        logger.warning("kvoffd: a load failed; request %s is recomputed. %s", failed.request_id, reason)

    def workers_report(self, credit_bytes: int | None, waited_s: float) -> None:
        """Take the workers' report: how much each may have outstanding, how long vLLM waited for stores."""
        self._harm.waited(waited_s)
        if credit_bytes is not None:
            self._store_window.credit_bytes = credit_bytes
            self._credit_reported = True

    # --- vLLM's interface ---

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        state = RequestState(self._settings)
        # kv_load_tiers of the request: the pool is vLLM's primary tier, which no request can leave out.
        state.disk_wait_over = not req_context.load_tier_filter.allows(Medium.STORAGE, Locality.LOCAL)
        self._requests[req_context.req_id] = state
        # What was loaded is offered for a store too: it is stored where the load failed, and else left out there.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self._requests.get(req_context.req_id)
        if state is None or not self._loads:
            return LookupResult.MISS
        if self._on_hold and not state.has_all:
            return LookupResult.RETRY
        return state.result(key) if self._may_use_daemon else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = self._requests.get(req_context.req_id)
        if state is not None and key in state.from_elsewhere:
            return CacheHitSource.EXTERNAL_UNSPECIFIED  # what vLLM calls a remote store
        from_disk = state is not None and key in state.from_disk
        return CacheHitSource.DISK if from_disk else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeyedSpec:
        state = self._requests.get(req_context.req_id)
        answer = state.take() if state is not None else None
        if state is None or answer is None:
            return KeyedSpec.of(keys, self._positions, request_id=req_context.req_id)
        self._loading[req_context.req_id] = answer
        return KeyedSpec.of(
            keys, self._positions, answer.ticket.lease_id, adapter=state.adapter, request_id=req_context.req_id
        )

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._settings.release(self._loading.pop(req_context.req_id, None))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """As vLLM's. None, after which vLLM offers the keys again in the next step, where it is too early to say."""
        state = self._requests.get(req_context.req_id)
        wanted: list[OffloadKey] = []
        if state is not None and self._stores and not state.disabled:
            if self.namespace.current is None and self.namespace.pending():
                return None
            if self._may_use_daemon and self.namespace.may_store and self.namespace.client.ready:
                if state.is_answer_near and not state.has_ended:
                    return None
                wanted = self._storable(state, keys, req_context)
        if wanted and self._harm.leave_store_out():
            self._counters.count(metrics.PAUSED_STORES)
            wanted = []
        if wanted:
            if not self._credit_reported:
                self._store_window.credit_bytes = self.namespace.client.credit_bytes
            if not self._store_window.admits(wanted, last=state is not None and state.has_ended):
                self._counters.count(metrics.DEFERRED_STORES)
                return None
            self._store_window.begin(wanted)
        spec = KeyedSpec.of(wanted, self._positions, adapter=state.adapter if state is not None else b"")
        if wanted and state is not None:
            self._attach_tokens(spec, state, wanted, req_context)
        return PrepareStoreOutput(keys_to_store=wanted, store_spec=spec, evicted_keys=[])

    def _attach_tokens(
        self, spec: KeyedSpec, state: RequestState, keys: Iterable[OffloadKey], context: ReqContext
    ) -> None:
        """Have a store tell the parents and token ids of its blocks where the engine publishes KV events."""
        request = state.request
        if self.events is None or request is None or not hashed_by_tokens(request):
            return
        found: list[list[BlockTokens]] = [[] for _ in self._settings.groups]
        for key in keys:
            index = self._positions[key[-GROUP_ID_BYTES:]]
            if index in self.events.groups:
                group, chain = self._settings.groups[index], state.keys[index]
                group.extend(chain, request.block_hashes)
                place = (context.get_offload_key_position(key) or 0) // group.tokens_per_chunk - 1
                found[index].append(tokens_of(request, chain, place, group.tokens_per_chunk))
        spec.parents = tuple([b"".join([one.parent[:-GROUP_ID_BYTES] for one in of_group]) for of_group in found])
        spec.tokens = tuple([b"".join([one.token_ids for one in of_group]) for of_group in found])

    def _storable(self, state: RequestState, keys: Collection[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Return those of a request's keys that are to be stored.

        vLLM offers all of a prompt when a request ends, although one that ends with an error may have computed a part
        of it, and one that was preempted while its last token was on its way has lost its blocks to others.
        """
        request = state.request
        computed = request.num_computed_tokens if request is not None and request.is_finished() else None
        wanted = []
        for key in keys:
            end = context.get_offload_key_position(key) or 0
            whole = end % self._settings.groups[self._positions[key[-GROUP_ID_BYTES:]]].tokens_per_chunk == 0
            if whole and (computed is None or end <= computed) and key not in self._store_window:
                wanted.append(key)
        return [key for key in wanted if not state.is_stored(key)]

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._store_window.end(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        if state := self._requests.pop(req_context.req_id, None):
            state.release()

    def has_pending_work(self) -> bool:
        # Not for requests that wait for an answer: vLLM makes steps for them, but none while it is paused, and a pause
        # ends only when nothing is pending.
        return self.namespace.needs_steps

    def reset_cache(self) -> None:
        for state in self._requests.values():
            state.forget()
        for lookup in self._loading.values():
            self._settings.release(lookup)
        self._loading.clear()
        self._store_window.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._counters.take(self.namespace.client.ready, lambda: self._harm.rates)

    def config_info(self) -> Sequence[Mapping[str, str | float]]:
        """Labels of vLLM's metric kv_offload_config_info (0.33; never asked for before)."""
        return [self._config_info]

    def shutdown(self) -> None:
        self.namespace.close()

    @property
    def _may_use_daemon(self) -> bool:
        """Whether the workers can share their memory, and it is known which blocks are of the weights in it."""
        return self.namespace.current is not None and self.namespace.usable

    @property
    def _waits_for_namespace(self) -> bool:
        """Whether a request should wait a moment: the namespace is about to be known, or the workers registered."""
        namespace = self.namespace
        return namespace.usable and (
            namespace.pending() if namespace.current is None else namespace.pending(self._settings.deadline_s)
        )
