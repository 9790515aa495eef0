"""Memory of the simulation: virtual addresses, the workers' KV tensors, and who may touch which byte of them."""

from __future__ import annotations

import random

import numpy as np

from kvoffd_proto.messages import PageRef, TensorLayout
from tests.sim.clock import Broken
from tests.sim.content import Bytes, Content

_BASE_BITS = 40


class Segment:
    """One memfd of a worker. Masks say which bytes the daemon may read and, at this moment, write."""

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, dtype=np.uint8)
        self.registered = np.zeros(size, dtype=np.bool_)
        self.writable = np.zeros(size, dtype=np.bool_)
        self.owner_dead = False


class Mapping:
    """Bytes at an address, as the daemon sees them. Has what ``HostMapping`` has."""

    def __init__(self, space: AddressSpace, address: int, data: Bytes, segment: Segment | None) -> None:
        self.data = data
        self.segment = segment
        self.size_bytes = data.size
        self.closed = False
        self._space = space
        self._address = address

    @property
    def address(self) -> int:
        if self.closed:
            raise Broken("the address of an unmapped segment was asked for")
        return self._address

    def close(self) -> None:
        if not self.closed:
            self._space.check_idle(self)
        self.closed = True


class AddressSpace:
    """All mappings of one daemon. Addresses are never used twice, so a stale one is always found out."""

    def __init__(self) -> None:
        self._mappings: list[Mapping] = []
        self.busy: dict[int, int] = {}
        """By number of the mapping, transfers that hold addresses inside it."""

    def map(self, data: Bytes, segment: Segment | None = None) -> Mapping:
        mapping = Mapping(self, (len(self._mappings) + 1) << _BASE_BITS, data, segment)
        self._mappings.append(mapping)
        return mapping

    @staticmethod
    def number(address: int) -> int:
        return address >> _BASE_BITS

    def find(self, address: int, size: int) -> tuple[Mapping, int]:
        """The mapping and the offset in it. Raises Broken where the daemon may not be."""
        number, offset = address >> _BASE_BITS, address & ((1 << _BASE_BITS) - 1)
        if not 1 <= number <= len(self._mappings):
            raise Broken(f"address {address:#x} belongs to nothing")
        mapping = self._mappings[number - 1]
        if mapping.closed:
            raise Broken("a copy touches memory that is unmapped")
        if offset + size > mapping.size_bytes:
            raise Broken("a copy runs beyond its mapping")
        return mapping, offset

    def check_idle(self, mapping: Mapping) -> None:
        """Raise Broken if a transfer that has not ended holds addresses inside."""
        if self.busy.get(self.number(mapping.address), 0):
            raise Broken("memory is unmapped while a transfer uses it")

    def mapped_segments(self) -> set[Segment]:
        return {mapping.segment for mapping in self._mappings if mapping.segment is not None and not mapping.closed}

    def busy_segments(self) -> set[Segment]:
        """The segments of workers that unfinished transfers use."""
        busy = [self._mappings[number - 1] for number, transfers in self.busy.items() if transfers]
        return {mapping.segment for mapping in busy if mapping.segment is not None}


class WorkerMemory:
    """The KV tensors of one worker in some layout, and what the engine does to them."""

    def __init__(self, content: Content, rank: int, num_blocks: int, rng: random.Random) -> None:
        self.content = content
        self.rank = rank
        self.num_blocks = num_blocks
        self.segments: list[Segment] = []
        self.tensors: list[TensorLayout] = []
        self.groups: list[tuple[PageRef, ...]] = []
        self._rng = rng
        layout = rng.choice(("packed", "padded", "interleaved", "segments"))
        plan: list[int] = []  # segment sizes
        for group in content.groups:
            pages = content.pages[rank][group]
            refs: list[PageRef] = []
            if layout == "interleaved" or not plan:
                plan.append(rng.choice((0, 64)))
            offset = 0
            for page in pages:
                if layout == "interleaved":
                    self.tensors.append(TensorLayout(len(plan) - 1, plan[-1] + offset, sum(pages), num_blocks))
                    offset += page
                else:
                    if layout == "segments":
                        plan.append(0)
                    stride = page + (40 if layout == "padded" else 0)
                    self.tensors.append(TensorLayout(len(plan) - 1, plan[-1], stride, num_blocks))
                    plan[-1] += num_blocks * stride
                refs.append(PageRef(len(self.tensors) - 1, page))
            if layout == "interleaved":
                plan[-1] += num_blocks * sum(pages)
            self.groups.append(tuple(refs))
        self.segments = [Segment(max(size, 8)) for size in plan]
        for group in content.groups:
            for block in range(num_blocks):
                for segment, start, size in self._places(group, block):
                    segment.registered[start : start + size] = True

    def _places(self, group: int, block: int) -> list[tuple[Segment, int, int]]:
        """For each layer, the segment, the offset and the size of a block's page."""
        places = []
        for page in self.groups[group]:
            tensor = self.tensors[page.tensor]
            start = tensor.offset_bytes + block * tensor.stride_bytes
            places.append((self.segments[tensor.segment], start, page.page_bytes))
        return places

    def compute(self, group: int, key: bytes, sub: int, block: int) -> None:
        for layer, (segment, start, size) in enumerate(self._places(group, block)):
            segment.data[start : start + size] = self.content.page(self.rank, group, key, layer, sub)

    def scribble(self, group: int, block: int) -> None:
        value = self._rng.randrange(256)
        for segment, start, size in self._places(group, block):
            segment.data[start : start + size] = value

    def verify(self, group: int, key: bytes, sub: int, block: int) -> None:
        """Raise Broken unless the block holds that part of the key."""
        for layer, (segment, start, size) in enumerate(self._places(group, block)):
            expected = self.content.page(self.rank, group, key, layer, sub)
            if not np.array_equal(segment.data[start : start + size], expected):
                raise Broken(
                    f"a load reported ok but rank {self.rank} group {group} key {key.hex()[:8]} sub-block {sub} "
                    f"layer {layer} is wrong in block {block}"
                )

    def allow(self, group: int, block: int, allowed: bool) -> None:
        """Whether the daemon may write a block: while a load into it has no result."""
        for segment, start, size in self._places(group, block):
            segment.writable[start : start + size] = allowed

    def die(self) -> None:
        for segment in self.segments:
            segment.owner_dead = True
