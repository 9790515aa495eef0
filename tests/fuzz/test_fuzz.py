"""Every decoder, and the service behind them, under inputs that hypothesis makes up; `make fuzz` goes further."""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffd.pool.slot_table import SlotTable, TableGeometry
from kvoffd.server.service import Service
from kvoffd.server.sessions import Sessions
from kvoffd.transfer.plan import Direction, Outcome
from kvoffd_proto import codec
from tests.fuzz.corpus import seeds
from tests.fuzz.decoders import DECODERS
from tests.fuzz.service import Choices, ServiceHarness, service
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


def test_messages_in_any_order_never_harm_the_service() -> None:
    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=400))
    def check(data: bytes) -> None:
        service(data)

    check()


def test_the_runs_reach_what_they_are_about() -> None:
    """Or they would prove nothing: jobs of both directions are done, and every kind of refusal is seen."""
    errors: Counter[str] = Counter()
    ended: Counter[tuple[Direction, Outcome]] = Counter()
    for number in range(150):
        harness = ServiceHarness(Choices(random.Random(number).randbytes(400)))
        harness.run()
        errors += harness.service.errors
        ended += harness.engine.ended
    assert ended[Direction.STORE, Outcome.DONE] > 50, ended
    assert ended[Direction.LOAD, Outcome.DONE] > 2, ended
    wanted = (
        "malformed bad_version bad_token no_hello wrong_role unknown_namespace namespace_mismatch bad_geometry "
        "unknown_registration unknown_segment unsafe_segment bad_keys bad_block_ids duplicate_job "
        "too_many"
    )
    assert not [name for name in wanted.split() if not errors[name]], errors


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


def keep_descriptors_of_refused_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(_: object, descriptors: dict[int, int]) -> None:
        for fd in descriptors.values():
            os.close(fd)

    monkeypatch.setattr("kvoffd.server.requests._give_back", close)


def forget_slots_of_failed_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.cache.Cache.abort_store", lambda *_: None)


def serve_ended_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lasting(dict[bytes, object]):
        def __delitem__(self, route: bytes) -> None:
            pass

    original = Service.__init__

    def init(service: Service, *arguments: object) -> None:
        original(service, *arguments)  # type: ignore[arg-type]
        service.sessions.by_route = Lasting()  # type: ignore[assignment]

    monkeypatch.setattr(Service, "__init__", init)
    monkeypatch.setattr(Sessions, "has_departed", lambda sessions, route: False)


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (DECODERS["slot_table"], believe_every_record),
        (service, keep_descriptors_of_refused_registrations),
        (service, forget_slots_of_failed_stores),
        (service, serve_ended_sessions),
    ],
)
def test_a_planted_fault_is_found(
    target: Callable[[bytes], None], fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    inputs = [rng.randbytes(200) for _ in range(300)]
    assert not any(breaks(target, data) for data in inputs[:20])
    fault(monkeypatch)
    assert any(breaks(target, data) for data in inputs)


def breaks(target: Callable[[bytes], None], data: bytes) -> bool:
    try:
        target(data)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", DECODERS)
def test_seeds_are_inputs_of_their_decoder(name: str) -> None:
    for seed in seeds(name):
        DECODERS[name](seed)
    if name == "request":
        assert len({type(codec.decode_request(seed)) for seed in seeds(name)}) > 10


def test_a_refused_namespace_has_cleared_none() -> None:
    # A third namespace of at most two, while the one that nobody has open is being written.
    service(b"\xa0Y\x19")
