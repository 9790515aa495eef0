"""Passes on the hints of requests: what each names, when it is sent, and how many keys they may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey

from kvoffd_client.vllm import metrics
from kvoffd_client.vllm.adapter_contents import AdapterContents
from kvoffd_client.vllm.chunk_groups import ChunkGroup, ChunkGroups, wire_keys
from kvoffd_client.vllm.engine_namespace import EngineNamespace
from kvoffd_client.vllm.hints import RequestHint, name_of
from kvoffd_client.vllm.request_state import RequestState
from kvoffd_proto.messages import READY, GroupKeys, HintAction
from kvoffd_proto.units import plural

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_KEYS = 4096
"""Keys of one hint, of all groups together, that are passed on: two milliseconds of the daemon."""
MAX_TAILS = 16
"""Tails of one group that a hint names."""
KEYS_PER_SECOND, KEYS_AT_ONCE = 32_768, 16_384
"""Keys of hints that an engine passes on: a twentieth of the daemon's time, in which others' lookups wait."""


class HintBudget:
    """The keys that an engine's hints may still name: KEYS_AT_ONCE, which come back at KEYS_PER_SECOND.

    Args:
        clock: clock such as time.monotonic().
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left, self._at = float(KEYS_AT_ONCE), clock()

    def take(self, keys: int) -> bool:
        """Return whether a hint of this many keys may be passed on, and take them."""
        now = self._clock()
        self._left = min(KEYS_AT_ONCE, self._left + max(0.0, now - self._at) * KEYS_PER_SECOND)
        self._at = now
        if keys > self._left:
            return False
        self._left -= keys
        return True


class HintSender:
    """Sends the hints of an engine's requests.

    ``kv.prefetch`` is sent once at a request's start and ``kv.release`` at its end. ``kv.retain`` is sent at both, to
    include what was generated and to have its time begin at the end.

    Args:
        clock: clock such as time.monotonic().
        counters: the engine's counters, which this adds to.
        tail_tokens: tokens per hash if tails are stored, else 0.
    """

    def __init__(
        self,
        namespace: EngineNamespace,
        adapters: AdapterContents,
        groups: ChunkGroups,
        clock: Callable[[], float],
        counters: metrics.Counters,
        tail_tokens: int,
    ) -> None:
        self._namespace, self._adapters, self._groups = namespace, adapters, groups
        self._counters, self._tail_tokens = counters, tail_tokens
        self._budget = HintBudget(clock)

    def send_start_hints(self, state: RequestState) -> None:
        """Send the hints for a request's start, once: when the daemon can be reached and the adapter is known."""
        if not state.hints.known or state.start_hints_sent:
            return
        if self._adapters.identify(state) and self._namespace.serves:
            state.start_hints_sent = True
            self._send(state, [hint for hint in state.hints.known if hint.action is not HintAction.RELEASE])

    def send_end_hints(self, state: RequestState) -> None:
        """Send the hints for the end of a request that was scheduled. A daemon that stands still takes them later."""
        if state.hints.known and self._adapters.identify(state):
            self._send(state, [hint for hint in state.hints.known if hint.action is not HintAction.PREFETCH])

    def _send(self, state: RequestState, hints: Sequence[RequestHint]) -> None:
        if state.disabled or not hints:
            return
        namespace, client, notes = self._namespace.current, self._namespace.client, state.hint_notes
        if namespace is None or self._namespace.problem:
            self._counters[metrics.IGNORED_HINTS] += len(hints)
            return
        named: dict[int, list[GroupKeys]] = {}  # by the first token of what a hint applies to
        for hint in hints:
            if hint.start not in named:
                named[hint.start] = self._keys_of(state, hint.start)
            if not (groups := named[hint.start]):
                notes[name_of(hint)] = "of no whole block"
                continue
            keys = sum(len(group.keys) for group in groups) // namespace.key_bytes
            if not self._budget.take(keys):
                self._counters[metrics.IGNORED_HINTS] += 1
                notes[name_of(hint)] = "dropped, as the engine had passed on too many"
            else:
                was_sent = client.hint(hint.action, groups, hint.priority, hint.ttl_s, giver=state.hints.giver)
                self._counters[metrics.IGNORED_HINTS] += not was_sent
                notes[name_of(hint)] = f"of {keys} key{plural(keys)}" if was_sent else "lost, as it could not be sent"

    def _keys_of(self, state: RequestState, start: int) -> list[GroupKeys]:
        """Return the keys that a request's hint names, from the token ``start`` on."""
        states: Mapping[OffloadKey, int] = state.last.tail_states() if state.last is not None else {}
        tails = self._groups.hashes_of(key for key, key_state in states.items() if key_state == READY)
        hashes = hinted_hashes(self._groups, state.request, start, self._tail_tokens, tails)
        adapter = state.adapter.content
        return [GroupKeys(index, b"".join(wire_keys(chosen, adapter))) for index, chosen in hashes.items()]


def hinted_hashes(
    groups: Sequence[ChunkGroup],
    request: Request,
    start: int,
    tail_tokens: int,
    found_tails: Mapping[int, Sequence[bytes]],
) -> dict[int, list[bytes]]:
    """Return what a hint of a request names: by index of the group, the hashes of its complete chunks from the token
    ``start`` on, root first and MAX_KEYS at most, then those of its tails.

    Args:
        tail_tokens: tokens per hash if tails are stored, else 0.
        found_tails: hashes of tails that were found for the request, by index of the group.
    """
    hashes, named = request.block_hashes, dict[int, list[bytes]]()
    # MAX_KEYS keys of all groups together are of this many tokens.
    most_tokens = MAX_KEYS / sum(1 / group.tokens_per_chunk for group in groups)
    tail_end = 0  # hashes up to the end of the prompt's longest tail
    if tail_tokens and request.num_prompt_tokens > start:
        tail_end = (request.num_prompt_tokens - 1) // tail_tokens
    for index, group in enumerate(groups):
        size, tokens = group.hashes_per_chunk, group.tokens_per_chunk
        chunks, first = len(hashes) // size, -(-start // tokens)
        last = min(first + int(most_tokens / tokens), chunks)
        reaches_end = last == chunks
        chosen = list(group.hashes(hashes[first * size : last * size])) if first < last else []
        if tail_end and reaches_end:
            chosen += found_tails.get(index, ())[:MAX_TAILS]
            if tail_end % size and tail_end <= len(hashes):
                chosen.append(hashes[tail_end - 1])
        if chosen:
            named[index] = list(dict.fromkeys(chosen))
    return named
