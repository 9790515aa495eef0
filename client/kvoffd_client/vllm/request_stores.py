"""Stores of the blocks that vLLM offers: which are stored now, later or not at all, within the workers' credit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.chunk_groups import GROUP_ID_BYTES, ChunkGroups, KeyedSpec, wire_keys
from kvoffd_client.vllm.config import ConnectorOptions
from kvoffd_client.vllm.do_no_harm import DoNoHarm
from kvoffd_client.vllm.engine_facts import EngineFacts
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.host_block_events import HostBlockEvents
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.request_state import RequestState
from kvoffd_proto.messages import GroupKeys

LATER = None
"""vLLM offers the keys again while the request runs."""


def _nothing() -> PrepareStoreOutput:
    """Return the answer after which vLLM takes the keys as stored."""
    return PrepareStoreOutput(keys_to_store=[], store_spec=KeyedSpec(()), evicted_keys=[])


class RequestStores:
    """The stores of an engine's requests.

    Args:
        clock: clock such as time.monotonic().
        counters: the engine's counters, which this adds to.
        options: the connector's options. A lookup without an answer by its deadline is not waited for.
        read_answer: reads the answer to a lookup, if it has come.

    Attributes:
        enabled: whether blocks are stored, by vLLM's kv_role.
        events: publisher of the daemon's blocks; None if the engine publishes no KV events.
        credit_bytes: bytes of stores that may be outstanding, as the workers reported. An offer that exceeds it is
            taken whole: vLLM never offers a rest again, and blocks behind a gap are rarely hits.
        outstanding_bytes: bytes of stores that no worker has reported as ended.
    """

    def __init__(
        self,
        namespace: EngineNamespace,
        groups: ChunkGroups,
        engine: EngineFacts,
        options: ConnectorOptions,
        harm: DoNoHarm,
        clock: Callable[[], float],
        counters: metrics.Counters,
        *,
        read_answer: Callable[[KeyedLookup], None],
    ) -> None:
        self._namespace, self._groups, self._clock, self._counters = namespace, groups, clock, counters
        self._shard_bytes, self._state_groups = engine.shard_bytes, frozenset(engine.state_groups)
        self._harm, self._deadline_s, self._read_answer = harm, options.lookup_deadline_s, read_answer
        self.enabled = True
        self.events: HostBlockEvents | None = None
        self.credit_bytes = self.outstanding_bytes = 0
        self._storing: dict[OffloadKey, int] = {}
        """Keys of stores that no worker has reported as ended, with their bytes."""
        self._unstored: set[bytes] = set()
        """Hashes of stores that failed, or that the daemon's policy rejected, until vLLM handles the store's end."""

    def prepare(
        self, state: RequestState | None, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Return which of the keys that vLLM offers are stored, as ``KvoffdManager.prepare_store``."""
        if state is None or not self._may_store(state):
            return _nothing()
        namespace, last, has_ended = self._namespace, state.last, state.request.is_finished()
        if namespace.current is None and namespace.awaits_reports():
            return LATER
        if namespace.engine_cache_has_other_weights or not namespace.serves:
            return _nothing()
        # vLLM offers the states of recurrent layers only once.
        may_defer = not self._state_groups or self._state_groups.isdisjoint(map(self._groups.index_of, keys))
        if may_defer and not has_ended and last is not None and self._is_awaited(last):
            return LATER  # blocks that the daemon has need not be stored
        ends = self._missing(state, keys, req_context)
        if not ends:
            return _nothing()
        if self._clock() < self._harm.stores_paused_until:
            self._counters[metrics.PAUSED_STORES] += 1
            return _nothing()
        if may_defer and self._exceeds_credit(has_ended=has_ended):
            self._counters[metrics.FAILED_STORES if has_ended else metrics.DEFERRED_STORES] += 1
            return LATER
        return PrepareStoreOutput(keys_to_store=list(ends), store_spec=self._begin(state, ends), evicted_keys=[])

    def _may_store(self, state: RequestState) -> bool:
        is_known = state.request.lora_request is None or state.adapter.content
        return self.enabled and not state.disabled and bool(is_known)

    def _is_awaited(self, lookup: KeyedLookup) -> bool:
        """Return whether a lookup has no answer, and may have one soon."""
        return not lookup.future.done and self._clock() - lookup.sent_at < self._deadline_s

    def _missing(
        self, state: RequestState, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> dict[OffloadKey, int]:
        """Return the keys that are neither in the daemon nor being stored, with the token at which each ends.

        vLLM offers the whole prompt when a request ends, unless it was aborted. But a request that ended with an error
        may have computed only a part, and one preempted during its last token has lost its blocks.
        """
        request, last = state.request, state.last
        if last is not None:
            self._read_answer(last)  # it may have come after the request was scheduled
        computed = request.num_computed_tokens if request.is_finished() else inf
        missing, indices = dict[OffloadKey, int](), self._groups.indices
        for key in keys:
            end = req_context.get_offload_key_position(key) or 0
            if end > computed or key in self._storing:
                continue
            if last is None or not last.is_ready(indices[key[-GROUP_ID_BYTES:]], key[:-GROUP_ID_BYTES], end):
                missing[key] = end
        return missing

    def _exceeds_credit(self, *, has_ended: bool) -> bool:
        """Return whether no more stores may begin. One alone always may. The last offer of a request may use twice the
        credit, which the daemon does not enforce."""
        most_bytes = 2 * self.credit_bytes if has_ended else self.credit_bytes
        return self.outstanding_bytes > 0 and self.outstanding_bytes >= most_bytes

    def _begin(self, state: RequestState, ends: Mapping[OffloadKey, int]) -> KeyedSpec:
        """Record a store as outstanding; return its keys for the workers."""
        indices, groups = self._groups.indices, self._groups
        sizes = {key: self._shard_bytes[indices[key[-GROUP_ID_BYTES:]]] for key in ends}
        self._storing |= sizes
        self.outstanding_bytes += sum(sizes.values())
        spec = self._groups.spec_of(ends, state.adapter.content)
        spec.before = self._before(state, ends)
        has_tail = any(end % groups[indices[key[-GROUP_ID_BYTES:]]].tokens_per_chunk for key, end in ends.items())
        if self.events is not None and not has_tail:  # routers get no events of tails
            spec.origins = self.events.origins_of(state.request, ends)
        return spec

    def _before(self, state: RequestState, ends: Mapping[OffloadKey, int]) -> dict[int, bytes]:
        """Return the key before the first one in the prompt, by group, if there is one."""
        first_ends: dict[bytes, int] = {}
        for key, end in ends.items():
            first_ends.setdefault(key[-GROUP_ID_BYTES:], end)
        hashes, before = state.request.block_hashes, dict[int, bytes]()
        for suffix, end in first_ends.items():
            index = self._groups.indices[suffix]
            group = self._groups[index]
            if chunks := max(0, end - 1) // group.tokens_per_chunk:
                last = bytes(hashes[chunks * group.hashes_per_chunk - 1])
                (before[index],) = wire_keys([last], state.adapter.content)
        return before

    def record_unstored(self, groups: Sequence[GroupKeys]) -> None:
        """Record that these keys of running stores will not be stored, before vLLM handles the stores' end."""
        if (namespace := self._namespace.current) is None:
            return
        for named in groups:
            hashes, size = named.keys, namespace.key_bytes
            suffix = self._groups[named.group].suffix if named.group < len(self._groups) else b""
            split = (hashes[at : at + size] for at in range(0, len(hashes), size))
            # Those of a request with an adapter, whose keys on the wire are not vLLM's, and of a job before a reset are
            # not among the running stores, and left out.
            self._unstored |= {one for one in split if one + suffix in self._storing}

    def ended(self, keys: Collection[OffloadKey], *, success: bool) -> None:
        """Record that vLLM handles the end of a store."""
        self.outstanding_bytes -= sum([self._storing.pop(key, 0) for key in keys])
        # Now, as the daemon's event of the same store may come later. The hashes of a request with an adapter are no
        # keys on the wire, so for these it does nothing, and the event does.
        hashes = {key[:-GROUP_ID_BYTES] for key in keys}
        self._namespace.client.add_stored(hashes - self._unstored if success else ())
        self._unstored -= hashes

    def reset(self) -> None:
        """Forget the running stores, whose end vLLM does not report after a reset."""
        self._storing.clear()
        self._unstored.clear()
        self.outstanding_bytes = 0
