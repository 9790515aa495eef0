"""Every decoder under inputs that hypothesis makes up; `make fuzz` goes further."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffd.pool.slot_table import SlotTable, TableGeometry
from kvoffd_proto import codec
from tests.fuzz.corpus import seeds
from tests.fuzz.decoders import DECODERS
from tests.fuzz.tables import recovered, written

quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes(name: str) -> None:
    @quick
    @given(st.binary(max_size=512))
    def check(data: bytes) -> None:
        DECODERS[name](data)

    check()


@pytest.mark.parametrize("name", DECODERS)
def test_right_inputs_with_some_bytes_changed(name: str) -> None:
    known = seeds(name)

    @quick
    @given(st.sampled_from(known), st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=4)), max_size=4))
    def check(seed: bytes, changes: list[tuple[int, bytes]]) -> None:
        data = bytearray(seed)
        for at, piece in changes:
            at %= len(data) + 1
            data[at : at + len(piece)] = piece
        DECODERS[name](bytes(data))
        DECODERS[name](bytes(data[: len(data) // 2]))

    check()


def test_recoveries_find_blocks_to_serve() -> None:
    """Recoveries of undamaged tables find blocks; otherwise fuzzing them would prove nothing."""
    with recovered(written().data) as served:
        assert len(served) > 20


def believe_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no bit of a record could be wrong: each CRC is made right before it is compared."""
    original = SlotTable.__init__

    def init(table: SlotTable, memory: memoryview, geometry: TableGeometry, *, new: bool) -> None:
        original(table, memory, geometry, new=new)
        for slot in np.flatnonzero(table.records["state"]).tolist():
            table.records["crc"][slot] = zlib.crc32(table.records[slot].tobytes()[8:104])

    monkeypatch.setattr(SlotTable, "__init__", init)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    inputs = [rng.randbytes(200) for _ in range(300)]
    assert not any(breaks(data) for data in inputs[:20])
    believe_every_record(monkeypatch)
    assert any(breaks(data) for data in inputs)


def breaks(data: bytes) -> bool:
    try:
        DECODERS["slot_table"](data)
    except Exception:
        return True
    return False


def test_seeds_are_inputs_of_their_decoder() -> None:
    for name, decoder in DECODERS.items():
        for seed in seeds(name):
            decoder(seed)
    assert len({type(codec.decode_request(seed)) for seed in seeds("request")}) > 10
