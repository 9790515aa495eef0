"""Blocks of one peer's pool, as a store that is only read, by questions and reads that the helper process sends on.

NIXL reads a peer's memory one-sidedly, and may still write what it was asked for long after it was told to stop, as
measured with a peer that was stopped and continued. So it writes to memory of its own, from which a block is copied
into the pool while its checksum is computed; only the helper's end frees what a lost peer may still send.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import msgspec
import numpy as np

from kvoffd.system.files import address_of
from kvoffd.system.native import COUNT, NUMBER, VOID_P, declare, native
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.peer_messages import (
    BUSY,
    FIND,
    FOLLOW,
    GENERATION_BYTES,
    LENT,
    MAX_BLOCKS,
    MAX_FOLLOWED,
    MAX_KEYS,
    MAX_SHARDS,
    NOT_THERE,
    PIN,
    READ,
    SLICE_BYTES,
    SLICES,
    Find,
    Follow,
    Pin,
    Pinned,
    decode_followed,
    decode_raised,
)
from kvoffd.tiers.peer_process import HelperProcess, PeerCall
from kvoffd.tiers.store import GetRequest, PutRequest, Received, Store, StoreError, StoreFault
from kvoffd_proto.messages import FINGERPRINT_BYTES

declare(keep_gil=False, host_copy=(COUNT, *(VOID_P, VOID_P, VOID_P, NUMBER) * 2, VOID_P))

BUSY_S = 0.005
"""Pause after the peer has lent none because it was BUSY."""
AHEAD = 2
"""Reads of one thread that are under way."""


class PeerStore(Store):
    """The connection to one peer, of one thread. It is only read.

    Args:
        number: index of the peer in the helper's settings.
    """

    poll_s = 5.0
    most_window_keys = MAX_KEYS
    keys_at_once = MAX_KEYS
    blocks_at_once = MAX_BLOCKS
    bytes_at_once = 4 * SLICE_BYTES
    failed_s = 2.0  # a peer that was killed is back sooner than a store
    is_peer = True

    def __init__(self, helper: HelperProcess, number: int) -> None:
        self._helper, self._number = helper, number
        self._closed = False

    def connect(self) -> None:
        if self._closed:
            raise StoreError(StoreFault.CLOSED, "The daemon stops.")
        self._helper.check()

    def ping(self, deadline: float) -> None:
        self._call(FIND, Find(bytes(FINGERPRINT_BYTES), 0, 0, 1, b""), deadline)

    def _call(self, kind: int, message: msgspec.Struct, deadline: float) -> tuple[int, bytes]:
        return self._helper.call(kind, self._number, msgspec.msgpack.encode(message), deadline)

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        return self._generations(fingerprint, [], deadline)[0]

    def generations(self, fingerprints: Sequence[bytes], deadline: float) -> list[int | StoreError]:
        found = list[int | StoreError]()
        while len(found) < len(fingerprints):
            first, *others = fingerprints[len(found) : len(found) + 1 + MAX_FOLLOWED]
            found += self._generations(first, others, deadline)
            if others and len(found) == 1:  # an earlier build
                return [*found, *super().generations(fingerprints[1:], deadline)]
        return found

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        _, reply = self._call(FIND, _find_of(group, keys), deadline)
        if len(reply) != GENERATION_BYTES + len(keys):
            raise StoreError(StoreFault.PROTOCOL, f"The answer about {len(keys)} keys has {len(reply)} bytes.")
        return int.from_bytes(reply[:GENERATION_BYTES], "little"), [there == 1 for there in reply[GENERATION_BYTES:]]

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        """A peer decides itself what it keeps."""
        return [False] * len(blocks)

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | None]:
        def same(request: GetRequest) -> tuple[BlockGroup, list[int]]:
            return request.group, list(map(len, request.views))

        for (_, lengths), members in groupby(requests, same):  # one PIN is about blocks of one group and geometry
            rest, most = list(members), max(1, min(MAX_BLOCKS, MAX_SHARDS // max(1, len(lengths))))
            give_up_at = time.monotonic() + patience_s
            while rest:
                answered = 0
                for received in self._borrow(rest[:most], lengths, patience_s):
                    answered += 1
                    yield received
                del rest[:answered]
                if answered:
                    give_up_at = time.monotonic() + patience_s
                elif time.monotonic() >= give_up_at:
                    why = "The peer lends no more blocks now: it has lent as many as it may."
                    raise StoreError(StoreFault.BUSY, why)
                else:
                    time.sleep(BUSY_S)

    def _borrow(
        self, requests: Sequence[GetRequest], lengths: list[int], patience_s: float
    ) -> Iterator[Received | None]:
        """Yield the blocks, which are of one group, up to the first that is BUSY; None for one that the peer lacks."""
        began = time.monotonic()
        wanted = Pin(_find_of(requests[0].group, [request.key for request in requests]), lengths)
        ident, reply = self._call(PIN, wanted, began + patience_s)
        reading: _Reading | None = None
        try:
            pinned = _CheckedPinned(reply, len(requests), len(lengths))
            until = began + pinned.seconds  # counted from before the question: the peer's time begins later
            requests = requests[: len(pinned.places)]
            pieces_of = [
                [] if place is None else list(map(_Piece, place.offsets, request.views))
                for request, place in zip(requests, pinned.places, strict=True)
            ]
            reading = _Reading(self._helper, self._number, [piece for pieces in pieces_of for piece in pieces])
            for request, place, pieces in zip(requests, pinned.places, pieces_of, strict=True):
                if place is None:
                    yield None
                    continue
                while any(piece.missing_bytes for piece in pieces):
                    reading.land_next(min(until, time.monotonic() + patience_s))
                    if time.monotonic() >= until:
                        why = "The peer's blocks came too late: they may have been overwritten."
                        raise StoreError(StoreFault.TIMEOUT, why)
                block = Block(request.group, request.key, tuple(place.first_blocks), tuple(place.checksums))
                yield Received(block, [piece.checksum for piece in pieces])
        finally:
            if reading is not None:
                reading.end()
            self._helper.release(self._number, ident)

    def put(self, requests: Sequence[PutRequest], deadline: float) -> Sequence[bool | None]:
        """Nothing is written to a peer."""
        return [None] * len(requests)

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        """A peer's blocks are its own."""

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        return self.clear(fingerprint, seen, generation, 0, deadline)

    def clear(self, fingerprint: bytes, seen: int, generation: int, cleared_at: int, deadline: float) -> int:
        _, reply = self._call(FOLLOW, Follow(fingerprint, generation, b"", cleared_at), deadline)
        return decode_raised(reply, generation)

    def _generations(self, fingerprint: bytes, others: Sequence[bytes], deadline: float) -> list[int]:
        """Return the peer's generations; of a peer of an earlier build the first one alone."""
        _, reply = self._call(FOLLOW, Follow(fingerprint, 0, b"".join(others)), deadline)
        return [number for number, _ in decode_followed(reply, 1 + len(others))]

    def close(self) -> None: ...

    def interrupt(self) -> None:
        self._closed = True
        self._helper.fail_calls("The peer is not used any more.", self._number)


class _Place(NamedTuple):
    """A block that a peer lends: by rank, the offset in the peer's pool, the first engine block and the checksum."""

    offsets: list[int]
    first_blocks: list[int]
    checksums: list[int]


class _CheckedPinned:
    """A ``Pinned`` that was checked. Raises StoreError.

    Attributes:
        seconds: time until the peer may overwrite the blocks.
        places: of the requested blocks up to the first that is BUSY; None for one that the peer does not have.
    """

    def __init__(self, reply: bytes, keys: int, ranks: int) -> None:
        try:
            pinned = msgspec.msgpack.decode(reply, type=Pinned)
            there, self.seconds = pinned.there, pinned.seconds
            if len(there) != keys or not set(there) <= {NOT_THERE, LENT, BUSY}:
                raise ValueError("its length is wrong")
            columns = (pinned.offsets, "<u8"), (pinned.first_blocks, "<u2"), (pinned.checksums, "<u8")
            shape = there.count(LENT), ranks
            rows = zip(*(np.frombuffer(data, kind).reshape(shape).tolist() for data, kind in columns), strict=True)
            lent = map(_Place._make, rows)
            self.places = [next(lent) if state == LENT else None for state in there]
            if BUSY in there:
                del self.places[there.index(BUSY) :]
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreError(StoreFault.PROTOCOL, f"The peer's answer is not valid: {error}.") from error


class _Piece:
    """A shard to read: where it is in the peer's pool, and where it shall be."""

    __slots__ = ("address", "checksum", "missing_bytes", "offset", "view")

    def __init__(self, offset: int, view: memoryview) -> None:
        self.offset, self.view, self.missing_bytes = offset, view, len(view)
        self.address = address_of(view)
        self.checksum = 0
        """Checksum of its bytes; 0 if it came in several parts, or is short."""


class _Part:
    """The spans of pieces that one read of the helper brings, each with its begin in the piece and its length.

    Attributes:
        call: the read, once it has begun.
        addresses: where the spans go in the pool.
        where: the payload of READ.
    """

    call: PeerCall

    def __init__(self, spans: Sequence[tuple[_Piece, int, int]]) -> None:
        # Whole pieces come first: ``host_copy`` computes no checksum behind a span of which it gets no slot.
        spans = sorted(spans, key=lambda span: span[2] < len(span[0].view))
        self.spans, self.lengths = spans, [length for _, _, length in spans]
        self.addresses = [piece.address + begin for piece, begin, _ in spans]
        offsets = [(piece.offset + begin) % 2**64 for piece, begin, _ in spans]
        self.where = np.array([offsets, self.lengths], np.uint64).T.tobytes()


class _Reading:
    """Reads pieces from a peer, in parts, of which up to ``AHEAD`` are under way. For one thread.

    Args:
        peer: the peer's number.
        pieces: in the order in which they are read.
    """

    def __init__(self, helper: HelperProcess, peer: int, pieces: Sequence[_Piece]) -> None:
        self._helper, self._peer = helper, peer
        self._to_begin = _parts(pieces)
        self._under_way: deque[_Part] = deque()

    def land_next(self, deadline: float) -> None:
        """Begin to read parts, up to ``AHEAD``; wait for the next one, and copy it into the pool, by a call of C that
        also computes the checksums of whole pieces. Raises StoreError."""
        helper = self._helper
        while len(self._under_way) < AHEAD and (begun := next(self._to_begin, None)) is not None:
            begun.call = helper.begin(READ, self._peer, begun.where)
            self._under_way.append(begun)
        part = self._under_way[0]
        # The answer is the number of a slice. Even a wrong one leads to those of this peer.
        which = self._peer * SLICES + helper.wait(part.call, deadline)[0] % SLICES
        landed = helper.landing_address + which * SLICE_BYTES
        whole = [piece for piece, _, length in part.spans if length == len(piece.view)]
        slots = array("Q", [piece.address for piece in whole])
        slot_bytes, sums = array("Q", [len(piece.view) for piece in whole]), array("Q", bytes(8 * len(whole)))
        sources = array("Q", [landed + start for start in accumulate((0, *part.lengths[:-1]))])
        columns = array("Q", part.addresses), sources, array("Q", part.lengths), slots, slot_bytes, sums
        to, of, sizes, *checked = (column.buffer_info()[0] for column in columns)
        is_stopped = ctypes.c_uint32(0)  # by nobody
        native().host_copy(to, of, sizes, len(part.spans), *checked, len(whole), ctypes.byref(is_stopped))
        self._under_way.popleft()  # until here ``end`` would end it
        helper.end(part.call)
        if helper.life != part.call.life:  # another one may have written there
            raise StoreError(StoreFault.DISCONNECTED, "The helper process for peers ended during a read.")
        for piece, found in zip(whole, sums, strict=True):
            piece.checksum = found
        for piece, _, length in part.spans:
            piece.missing_bytes -= length

    def end(self) -> None:
        """End what is under way; its memory is used again once nothing can be written there any more."""
        for part in self._under_way:
            self._helper.end(part.call)


def _parts(pieces: Sequence[_Piece]) -> Iterator[_Part]:
    """Divide pieces into parts that the helper reads at once. Only a piece that is larger than one is divided."""
    spans: list[tuple[_Piece, int, int]] = []
    left = SLICE_BYTES
    for piece in pieces:
        if left < len(piece.view) <= SLICE_BYTES:
            yield _Part(spans)
            spans, left = [], SLICE_BYTES
        begin = 0
        while begin < len(piece.view):
            length = min(len(piece.view) - begin, left)
            spans.append((piece, begin, length))
            begin, left = begin + length, left - length
            if not left:
                yield _Part(spans)
                spans, left = [], SLICE_BYTES
    if spans:
        yield _Part(spans)


def _find_of(group: BlockGroup, keys: Sequence[bytes]) -> Find:
    return Find(group.fingerprint, group.generation, group.group_index, len(keys[0]), b"".join(keys))
