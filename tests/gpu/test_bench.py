"""The GPU bench's copies, in miniature."""

from __future__ import annotations

import ctypes

import pytest

from kvoffd_client import AdminClient
from kvoffd_proto.cuda import LIBRARY_VARIABLE
from tests.bench.gpu.copies import measure_copies
from tests.kit.gpu_machine import Machine
from tests.kit.stub_cuda import Ranges
from tests.kit.waiting import wait_until

KIB, JOB_BYTES = 2**10, 4 << 20
SIZES = (16 * KIB, 64 * KIB)


def test_every_case_is_measured_and_nothing_is_left_behind(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.is_stub:
        monkeypatch.setenv(LIBRARY_VARIABLE, machine.library)
    directory = machine.daemon.directory
    rows = measure_copies(directory, SIZES, JOB_BYTES, rounds=2)
    assert len(rows) == 2 * 5 == len({row["case"] for row in rows})
    assert all(row["value"] > 0 and row["floor"] > 0 for row in rows)
    if machine.is_stub:
        driver = ctypes.CDLL(machine.library)
        assert [driver.stub_ranges(int(kind)) for kind in (Ranges.DEVICE, Ranges.HOST)] == [0, 0]
        assert driver.stub_contexts(0) == 0
    with AdminClient(directory) as admin:
        wait_until(lambda: admin.stats().pool.pinned_for_gpu_bytes == 0)
        stats = admin.stats()
    assert stats.pool.of("free") == stats.pool.size_bytes
    assert stats.errors == {}
    assert (stats.store.refused_batches, stats.load.refused_batches) == (0, 0)
