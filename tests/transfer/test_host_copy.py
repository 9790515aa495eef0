"""The copy loop in C: it moves what the plan says, and its checksums are those of the library."""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffd.system.native import LIBRARY, Native, NotCompiled, native
from kvoffd.transfer.engine import SlotChecksums, Transfer, host_copy, try_out
from kvoffd.transfer.plan import Direction, Plan
from tests.kit.amount import TIMES
from tests.kit.copy_buffers import address_of, random_bytes

STRIPE, BLOCK = 64, 1024  # of XXH3
SHORTEST = 241
MIB = 1 << 20


class Buffers:
    """Two buffers of random bytes. Offsets are counted from their first address that is a multiple of a stripe."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.pool = random_bytes(nbytes + 2 * STRIPE, 1), random_bytes(nbytes + 2 * STRIPE, 2)
        self.before = self.pool.copy()
        self.from_address = address_of(self.source) + -address_of(self.source) % STRIPE
        self.to_address = address_of(self.pool) + -address_of(self.pool) % STRIPE

    def plan(self, pieces: list[tuple[int, int, int]]) -> Plan:
        """Of pieces given by offset in the pool, offset in the source, and size."""
        to, source, size = (np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True))
        return Plan(to + np.uint64(self.to_address), source + np.uint64(self.from_address), size)

    def slots(self, *slots: tuple[int, int]) -> list[tuple[int, int]]:
        return [(self.to_address + offset, length) for offset, length in slots]

    def read(self, offset: int, length: int) -> bytes:
        return ctypes.string_at(self.to_address + offset, length)

    def expected(self, pieces: list[tuple[int, int, int]]) -> bytes:
        """The whole pool after the pieces were copied."""
        wanted = self.before.copy()
        to, back = (a - address_of(b) for a, b in ((self.to_address, self.pool), (self.from_address, self.source)))
        for offset, source, size in pieces:
            wanted[to + offset : to + offset + size] = self.source[back + source : back + source + size]
        return wanted.tobytes()


def compiled(*flags: str) -> Native:
    """The loop alone, compiled otherwise than hatch_build.py does."""
    common = ["-O3", "-std=gnu11", "-Wno-psabi", "-fPIC", "-shared"]
    source = LIBRARY.parent / "transfer" / "host_copy.c"
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        subprocess.run(["gcc", *common, *flags, "-o", file.name, str(source)], check=True, timeout=60)
        function = ctypes.CDLL(file.name).kvoffd_host_copy
    function.argtypes = native().host_copy.argtypes  # type: ignore[attr-defined]
    return cast(Native, SimpleNamespace(host_copy=function))


@functools.cache
def only(version: str) -> Native:
    """One version of the loop. ``checked`` dies of undefined behaviour."""
    flags = {
        "without SSE2": ["-U__SSE2__", "-DON_AMD=1"],
        "checked": ["-O1", "-DON_AMD=0", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"],
    }
    return compiled(*flags[version])


@pytest.fixture(params=["installed", "without SSE2", "checked"])
def library(request: pytest.FixtureRequest) -> Native:
    return native() if request.param == "installed" else only(request.param)


def run(plan: Plan, slots: list[tuple[int, int]], library: Native | None = None, stop: int = 0) -> list[int]:
    taken = SlotChecksums(lambda _: [], slots, [0] * len(slots))
    transfer = Transfer(Direction.STORE, lambda: plan, 0.0, lambda *_: None, checksums=taken)
    transfer.stop.value = stop
    host_copy(transfer, library)
    return taken.sums


def cut(length: int, at: list[int]) -> list[int]:
    """Sizes of the parts that ``length`` falls into at these places."""
    places = sorted({0, length, *(place for place in at if 0 < place < length)})
    return [end - begin for begin, end in itertools.pairwise(places)]


def test_a_slot_of_any_length_has_the_checksum_of_the_library(library: Native) -> None:
    for length in (*range(SHORTEST, 330), *range(1000, 1100), 2047, 2048, 2049, 65537, 2**20):
        buffers = Buffers(length)
        sums = run(buffers.plan([(0, 5, length)]), buffers.slots((0, length)), library)
        assert sums == [xxhash.xxh3_64_intdigest(buffers.read(0, length))], length
        assert buffers.pool.tobytes() == buffers.expected([(0, 5, length)])


@settings(max_examples=30 * TIMES**2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slots_are_filled_in_pieces_of_any_size(library: Native, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=4), "lengths")
    gaps = data.draw(st.lists(st.sampled_from([0, 0, STRIPE, 1000]), min_size=len(lengths), max_size=len(lengths)))
    offsets: list[int] = []
    end = 0
    for length, gap in zip(lengths, gaps, strict=True):
        offsets.append(end + gap)
        end += gap + length + (-length % STRIPE if data.draw(st.booleans()) else 0)
    pieces: list[tuple[int, int, int]] = []
    skipped = data.draw(st.integers(0, lengths[0] - 1) | st.just(0), "skipped")
    source = 0
    for index, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        begin = skipped if index == 0 else 0
        for size in cut(length - begin, data.draw(st.lists(st.integers(1, length), max_size=6))):
            pieces.append((offset + begin, source, size))
            begin += size
            source += size + data.draw(st.sampled_from([0, 1, 64]))
    if data.draw(st.booleans(), "merged"):  # as a plan merges pieces that touch on both sides, across slots too
        pieces = merged(pieces)
    buffers = Buffers(max(end, source) + 64)
    sums = run(buffers.plan(pieces), buffers.slots(*zip(offsets, lengths, strict=True)), library)
    assert buffers.pool.tobytes() == buffers.expected(pieces)
    for index, (offset, length, found) in enumerate(zip(offsets, lengths, sums, strict=True)):
        takes = length >= SHORTEST and offset % STRIPE == 0 and not (index == 0 and skipped)
        assert found == (xxhash.xxh3_64_intdigest(buffers.read(offset, length)) if takes else 0)


def merged(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    found = [pieces[0]]
    for to, source, size in pieces[1:]:
        last_to, last_source, last_size = found[-1]
        if (last_to + last_size, last_source + last_size) == (to, source):
            found[-1] = (last_to, last_source, last_size + size)
        else:
            found.append((to, source, size))
    return found


def test_pieces_are_copied_across_looks_at_the_stop_flag(library: Native) -> None:
    """It looks each MiB, in the middle of a piece too, or 512 pieces."""
    for piece in (1, 64, 1000, 4096, 16384 + 64, 700_000, MIB + 64, 5 * MIB):
        nbytes = min(5 * MIB, 1200 * piece) // piece * piece
        pieces = [(at, at, piece) for at in range(0, nbytes, piece)]
        for summed in (True, False):
            buffers = Buffers(nbytes)
            sums = run(buffers.plan(pieces), buffers.slots((0, nbytes)) if summed else [], library)
            assert sums == [xxhash.xxh3_64_intdigest(buffers.read(0, nbytes))] * summed, piece
            assert buffers.pool.tobytes() == buffers.expected(pieces), piece


def test_what_is_not_copied_has_no_checksum(library: Native) -> None:
    buffers = Buffers(8192)
    plan = buffers.plan([(0, 0, 4096), (4096, 4096, 4096)])
    assert run(plan, buffers.slots((0, 4096)), library, stop=1) == [0]
    assert np.array_equal(buffers.pool, buffers.before)
    plan = buffers.plan([(0, 0, 4096), (4096, 4096, 4095)])  # the second slot does not become full
    assert list(map(bool, run(plan, buffers.slots((0, 4096), (4096, 4096)), library))) == [True, False]


def test_a_loop_that_was_compiled_wrongly_never_copies() -> None:
    try_out(native())
    with pytest.raises(NotCompiled, match="miscompiled"):
        try_out(compiled("-DSWAPPED(v)=(v)"))


def test_an_installation_that_was_not_compiled_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match="install kvoffd again on a machine with a C compiler"):
        Native(tmp_path / "libkvoffd.so")
