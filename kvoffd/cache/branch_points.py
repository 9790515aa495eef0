"""Finds where prompts differ although what follows is the same: a date or an id there keeps the rest from being shared.

A block is found again only if all tokens before it are equal. Stores send the tokens of each block, so the daemon sees
blocks of equal tokens that were stored under different keys: their prompts branched before them. Such tokens would have
been shared, had what differs come after them. Only prompts whose difference takes as many tokens are seen, since blocks
must have the same borders.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvoffd.cache.namespace import Namespace

MAX_KNOWN = 32_768
"""Blocks of all namespaces that are remembered, about 250 bytes each. A namespace that comes gets its part of them."""
FORGOTTEN_AT_ONCE = 4
"""Places, and contents, that a new block makes a namespace forget while it has too many."""
MAX_QUEUED, MAX_QUEUED_BYTES, BLOCKS_PER_TICK = 4096, 16 << 20, 256
"""Most blocks that wait for ``tick``, and bytes of their tokens, beyond which further ones are left out; and blocks of
one call: 1 to 3 ms."""
MAX_POINTS = 64
"""Branch points of a namespace; the one that costs least goes."""
HALVED_EVERY_S = 86_400.0
"""Interval after which older counts are halved."""
EXAMPLES, MAX_EXAMPLE_BYTES = 2, 2048
TOKEN_ID_BYTES = 4


@dataclass(slots=True, eq=False)
class Branch:
    """A place at which prompts with one beginning differ.

    Attributes:
        at_tokens: tokens of the common beginning.
        prompts: prompts that continued differently there, weighted by age, as are all counts.
        repeated_tokens: tokens behind that were computed although an equal block had been stored.
        examples: token ids of the first different block of the last two such prompts, uint32, or its beginning.
    """

    at_tokens: int
    prompts: float = 0.0
    repeated_tokens: float = 0.0
    examples: deque[bytes] = field(default_factory=lambda: deque(maxlen=EXAMPLES))


class Branches(NamedTuple):
    """Branch points of a namespace's prompts."""

    seen_tokens: int
    """Tokens of the blocks that were seen."""
    points: list[Branch]
    """The one that costs most first."""


@dataclass(slots=True, eq=False)
class _Place:
    """A known block. ``point``: the first branch point before it at which its prompt differed from an earlier one."""

    end_tokens: int
    point: Branch | None
    has_child: bool = False


class _KnownBlocks:
    """Known blocks of a namespace's prompts."""

    def __init__(self) -> None:
        self.root = _Place(0, None)
        self.places: OrderedDict[int, _Place] = OrderedDict()
        self.contents: OrderedDict[int, None] = OrderedDict()
        """Hashes of blocks' tokens."""
        self.points: dict[_Place, Branch] = {}
        self.seen_tokens = 0.0


class BranchPoints:
    """Branch points of all namespaces. For the daemon's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._halved_at = clock, clock()
        self._queue: deque[tuple[Namespace, bytes, bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._of: dict[Namespace, _KnownBlocks] = {}

    def offered(self, namespace: Namespace, keys: Sequence[bytes], parents: bytes, token_ids: bytes) -> None:
        """Record blocks that an engine stores: their keys, and parents and token ids of all, end to end."""
        if not (keys and parents and token_ids) or len(self._queue) + len(keys) > MAX_QUEUED:
            return
        if self._queued_bytes + len(token_ids) > MAX_QUEUED_BYTES:
            return
        self._queued_bytes += len(token_ids)
        size, each = len(parents) // len(keys), len(token_ids) // len(keys)
        for at, key in enumerate(keys):
            parent, tokens = parents[at * size : (at + 1) * size], token_ids[at * each : (at + 1) * each]
            self._queue.append((namespace, key, parent, tokens))

    def tick(self) -> None:
        for _ in range(min(len(self._queue), BLOCKS_PER_TICK)):
            namespace, key, parent, tokens = self._queue.popleft()
            self._queued_bytes -= len(tokens)
            known = self._of.get(namespace)
            if known is None:
                known = self._of[namespace] = _KnownBlocks()
            _add(known, key, parent, tokens)
            _forget_oldest(known, MAX_KNOWN // len(self._of))
        if self._clock() - self._halved_at >= HALVED_EVERY_S:
            self._halved_at = self._clock()
            for known in self._of.values():
                known.seen_tokens /= 2
                for point in known.points.values():
                    point.prompts /= 2
                    point.repeated_tokens /= 2

    def namespace_forgotten(self, namespace: Namespace) -> None:
        self._of.pop(namespace, None)
        self._queue = deque(one for one in self._queue if one[0] is not namespace)
        self._queued_bytes = sum(len(tokens) for *_, tokens in self._queue)

    def of(self, namespace: Namespace) -> Branches:
        if (known := self._of.get(namespace)) is None:
            return Branches(0, [])
        points = sorted(known.points.values(), key=lambda point: -point.repeated_tokens)
        return Branches(round(known.seen_tokens), [point for point in points if point.repeated_tokens])


def _add(known: _KnownBlocks, key: bytes, parent: bytes, tokens: bytes) -> None:
    places, own, content = known.places, hash(key), hash(tokens)
    if own in places:  # it was stored before
        places.move_to_end(own)
        return
    before = places.get(hash(parent)) if any(parent) else known.root  # a first block's parent is all zeros
    if before is None:
        return  # what comes before it is not remembered
    if before is not known.root:
        places.move_to_end(hash(parent))
    count = len(tokens) // TOKEN_ID_BYTES
    known.seen_tokens += count
    is_known, point = content in known.contents, before.point
    if is_known and point is not None:  # behind a difference: equal tokens are stored already
        point.repeated_tokens += count
    elif not is_known and point is None and before.has_child:  # the same beginning has another continuation
        point = known.points.get(before)
        if point is None:
            point = known.points[before] = Branch(before.end_tokens)
            if len(known.points) > MAX_POINTS:
                others = islice(known.points.items(), MAX_POINTS)  # all but the new one, which has cost nothing yet
                least, gone = min(others, key=lambda item: item[1].repeated_tokens)
                del known.points[least]
                gone.examples.clear()  # blocks behind it still refer to it
        point.prompts += 1
        point.examples.append(tokens[:MAX_EXAMPLE_BYTES])
    before.has_child = True
    places[own] = _Place(before.end_tokens + count, point)
    known.contents[content] = None
    known.contents.move_to_end(content)


def _forget_oldest(known: _KnownBlocks, most: int) -> None:
    for _ in range(FORGOTTEN_AT_ONCE):
        if len(known.places) > most:
            known.places.popitem(last=False)
        if len(known.contents) > most:
            known.contents.popitem(last=False)
