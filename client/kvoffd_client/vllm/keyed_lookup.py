"""One lookup of a request: the keys that it asked for, and what the answer says of each."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import mul

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvoffd_client.scheduler_client import LookupFuture, StoredKeys
from kvoffd_client.vllm.chunk_groups import ChunkGroup, wire_keys
from kvoffd_proto.messages import ABSENT, READY, WRITING

HIT, COMES, MISS = b"h", b"c", b"m"
"""Results of a scan, one byte for each chunk: it is ready; it is being promoted, and waited for; neither."""
RESULTS = {HIT[0]: LookupResult.HIT, COMES[0]: LookupResult.HIT_PENDING, MISS[0]: LookupResult.MISS}
NOT_COMING = bytes([ABSENT, WRITING, READY])
"""States of keys that come from no tier. ``states.strip(NOT_COMING)`` is empty if all are such."""
NOTHING_AWAITED: frozenset[int] = frozenset()
_READY = bytes([READY])
_IS_LACKED = bytes(state in (ABSENT, WRITING) for state in range(256))
"""Table that makes 1 of the states of keys that the daemon does not have, and 0 of others."""


def result_of(state: int, awaited: frozenset[int]) -> LookupResult:
    """Return vLLM's result for a key's state, of which a request waits for the ``awaited`` ones."""
    if state == READY:
        return LookupResult.HIT
    # Not RETRY, after which vLLM would look for an earlier window.
    return LookupResult.HIT_PENDING if state in awaited else LookupResult.MISS


@functools.cache
def _results_table(awaited: frozenset[int]) -> bytes:
    """Return the table that makes results of states."""
    made = {READY: HIT} | dict.fromkeys(awaited, COMES)
    return b"".join([made.get(state, MISS) for state in range(256)])


@dataclass(slots=True, eq=False)
class KeyedLookup:
    """A lookup of one request.

    Attributes:
        groups: the offloaded groups, by index on the wire.
        adapter: content of the request's LoRA adapter, which the keys on the wire contain; empty if it has none.
        chunks: hashes of the complete chunks looked up, by group on the wire. ``future.states`` has the same order.
        tails: hashes of the tails looked up with them, by group on the wire; see ``ScannedTails``.
        sent_at: time when it was sent, by time.monotonic().
        sent_at_engine: the same by the engine's clock (``EngineClock``).
        tiers: states of the keys that come from tiers which the request allows, as ``RequestState.tiers``.
        only_prefixes: of each group only what is behind its ready chunks without a gap can be used.
        stored: keys that were stored recently, as the client knows them.
        compared: number of the last of the ``stored`` keys with which ``is_old`` has compared what the answer lacks.
            Those that were stored before the lookup was sent, it need not look at.
        given_up: the request no longer waits for the answer, but uses it if it comes before the request runs.
        is_read: whether the answer was read.
        is_coming: some key is being promoted, or a shared store is asked for it, whatever tiers the request allows.
        may_wait: some key comes, or may come, from a tier that the request allows.
        all_ready: all chunks are ready, and no tail is being promoted.
        least_tokens: tokens that can be loaded for sure: up to the first chunk of some group that is not ready.
        most_tokens: most tokens that can be loaded, by the group with the fewest: up to its last ready chunk, or up to
            its first that is not ready if only prefixes can be used; and one chunk more if tails were looked up.
    """

    future: LookupFuture
    groups: Sequence[ChunkGroup]
    adapter: bytes
    chunks: dict[int, Sequence[bytes]]
    tails: Mapping[int, Sequence[bytes]]
    sent_at: float
    sent_at_engine: float
    tiers: frozenset[int]
    only_prefixes: bool
    stored: StoredKeys
    compared: int
    given_up: bool
    is_read: bool = False
    is_coming: bool = False
    may_wait: bool = False
    all_ready: bool = False
    least_tokens: int = 0
    most_tokens: int = 0
    _is_old: bool = field(default=False, init=False)
    """Whether one of the keys with which it was compared is lacking in the answer."""
    _lacking_set: frozenset[bytes] | None = field(default=None, init=False)
    """``_lacking()``, once that was needed as a set."""

    @property
    def asked_chunks(self) -> int:
        """Number of chunks looked up."""
        return sum(map(len, self.chunks.values()))

    @property
    def states(self) -> list[bytes]:
        """States of the chunks of each group; empty without an answer."""
        counts = map(len, self.chunks.values())
        return [states[:count] for states, count in zip(self.future.states, counts, strict=False)]

    @property
    def usable(self) -> bool:
        """Whether the answer is still valid: its lease lives, or nothing was pinned."""
        return self.future.alive or self.future.pinned == 0

    def read(self) -> None:
        """Read the answer once it has come."""
        self.is_read = True
        self.is_coming = any(states.strip(NOT_COMING) for states in self.future.states)
        self.may_wait = self.is_coming and self.comes_from(self.tiers)
        self.all_ready = not self.is_coming and all(states.count(READY) == len(states) for states in self.states)
        sizes = [group.tokens_per_chunk for group in self.groups]
        leading = [*map(self.leading_ready, range(len(sizes)))]
        last = leading if self.only_prefixes else [self.chunk_states(at).rfind(_READY) + 1 for at in range(len(sizes))]
        self.least_tokens = min(map(mul, leading, sizes))
        self.most_tokens = min((chunks + bool(self.tails)) * size for chunks, size in zip(last, sizes, strict=True))

    def comes_from(self, tiers: Collection[int]) -> bool:
        """Return whether some key is being promoted, or may be, from one of these tiers, given by their states."""
        return any(state in states for states in self.future.states for state in tiers)

    @property
    def awaitable_tokens(self) -> int:
        """Tokens of the keys that are being promoted from tiers which the request allows, in the group with the most.
        Of the tails one is loaded."""
        most_tokens = 0
        for (index, chunks), states in zip(self.chunks.items(), self.future.states, strict=False):
            coming = sum(states.count(state, 0, len(chunks)) for state in self.tiers)
            if any(states.count(state, len(chunks)) for state in self.tiers):
                coming += 1  # a tail
            most_tokens = max(most_tokens, coming * self.groups[index].tokens_per_chunk)
        return most_tokens

    def _all_states(self, index: int) -> bytes:
        """Return the states of a group's chunks, then of its tails; empty without an answer, or if it was not asked."""
        for at, states in zip(self.chunks, self.future.states, strict=False):
            if at == index:
                return states
        return b""

    def chunk_states(self, index: int) -> bytes:
        """Return the states of a group's chunks, root first; empty without an answer, or if it was not asked."""
        return self._all_states(index)[: len(self.chunks.get(index, ()))]

    def results(self, awaited: frozenset[int]) -> dict[int, bytes]:
        """Return by group a byte for each chunk: HIT, COMES where its state is ``awaited``, or MISS."""
        table = _results_table(awaited)
        return {index: states.translate(table) for index, states in zip(self.chunks, self.states, strict=False)}

    def tail_states(self) -> dict[OffloadKey, int]:
        """Return the states of the tails by vLLM's keys."""
        found: dict[OffloadKey, int] = {}
        for index, tails in self.tails.items():
            states, suffix = self._all_states(index)[len(self.chunks[index]) :], self.groups[index].suffix
            found |= {OffloadKey(one + suffix): state for one, state in zip(tails, states, strict=False)}
        return found

    def is_ready(self, index: int, block_hash: bytes, end: int) -> bool:
        """Return whether a block of a group is ready. It ends at this number of tokens of the prompt: inside a chunk if
        it is a tail."""
        count, rest = divmod(end, self.groups[index].tokens_per_chunk)
        if not rest:
            states = self.chunk_states(index)
            return 0 < count <= len(states) and states[count - 1] == READY
        tails = self.tails.get(index, ())
        if block_hash not in tails:
            return False
        states = self._all_states(index)[len(self.chunks[index]) :]
        at = tails.index(block_hash)
        return at < len(states) and states[at] == READY

    def leading_ready(self, index: int) -> int:
        """Return the number of a group's chunks that are ready, before the first one that is not."""
        states = self.chunk_states(index)
        return len(states) - len(states.lstrip(_READY))

    def asks_tails_beyond(self, answer: KeyedLookup | None) -> bool:
        """Return whether it asks for tails that ``answer`` lacks. Lookups for the same tails share one object."""
        return bool(self.tails) and (answer is None or self.tails is not answer.tails)

    def is_old(self, stored: StoredKeys) -> bool:
        """Return whether something that the answer lacks was stored after this was sent.

        ``stored``: the present client's. If that is another one, the answer is about another namespace, and old.
        """
        if stored is not self.stored:
            return True
        if not self._is_old and (count := stored.count) != self.compared:
            self._is_old = self._lacks_newer(stored)
            self.compared = count
        return self._is_old

    def _lacks_newer(self, stored: StoredKeys) -> bool:
        """Return whether the answer lacks one of the keys that were stored since it was ``compared`` last."""
        if stored.forgotten > self.compared:
            return True  # some of these keys are not remembered, and may be among those that the answer lacks
        if self.only_prefixes:
            return any(stored.was_stored(key, self.compared) for key in self._lacking())
        if self._lacking_set is None:
            self._lacking_set = frozenset(self._lacking())
        return not self._lacking_set.isdisjoint(stored.since(self.compared))

    def _lacking(self) -> Sequence[bytes]:
        """Return the keys that the answer lacks and that could be used now, as they are on the wire: one of each group
        if only prefixes can be used, else many."""
        lacking: list[bytes] = []
        for index, chunks in self.chunks.items():
            if self.only_prefixes:
                first = self.leading_ready(index)
                lacking += chunks[first : first + 1]
            else:
                lacking += compress(chunks, self.chunk_states(index).translate(_IS_LACKED))
        return wire_keys(lacking, self.adapter)
