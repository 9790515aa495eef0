"""Memory of this process's GPU is exported whole, each allocation once; what cannot be is found."""

from __future__ import annotations

import os
import resource
import threading

import pytest

from kvoffd_client import KvoffdClientError
from kvoffd_client.cuda_export import GpuSegment, NotExportable, export_segments
from kvoffd_proto.cuda import Cuda
from tests.kit.open_files import open_files
from tests.kit.stub_cuda import StubCuda

SIZE = 1 << 20
CHUNK = 2 << 20


def export(stub: StubCuda, *spans: tuple[int, int]) -> list[GpuSegment]:
    return export_segments(spans, Cuda(stub.path))


def test_a_machine_without_a_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFD_CUDA_LIBRARY", "/nowhere/libcuda.so")
    with pytest.raises(KvoffdClientError, match=r"nowhere/libcuda\.so.*KVOFFD_CUDA_LIBRARY"):
        export_segments([(1, 1)])
    assert export_segments([]) == [], "no tensors need none"


def test_tensors_of_one_allocation_are_one_segment(stub: StubCuda) -> None:
    one, other = sorted((stub.allocate(SIZE) for _ in range(2)), key=lambda buffer: buffer.address)
    spans = [(one.address + 4096, 100), (other.address, SIZE), (one.address, 4096), (one.address + SIZE - 1, 1)]
    first, second = export(stub, *spans)
    assert (first.address, first.size_bytes, first.handle) == (one.address, SIZE, one.handle)
    assert (second.address, second.handle) == (other.address, other.handle)
    assert first.gpu_uuid == bytes([0x10] * 16)
    assert stub.calls("cuIpcGetMemHandle") == 4  # two by the test itself


def test_virtual_memory_is_exported_by_the_chunks_that_the_tensors_touch(stub: StubCuda) -> None:
    buffer = stub.map_chunks([CHUNK, 2 * CHUNK, CHUNK, CHUNK])
    before = open_files()
    (segment,) = export(stub, (buffer.address + CHUNK + 5, 2 * CHUNK), (buffer.address + 3 * CHUNK, 7))
    assert (segment.address, segment.chunk_bytes, segment.handle) == (buffer.address + CHUNK, (2 * CHUNK, CHUNK), None)
    assert len(open_files() - before) == 2
    first, last = export(stub, (buffer.address, 1), (buffer.address + 4 * CHUNK, 1))
    assert (first.chunk_bytes, last.chunk_bytes) == ((CHUNK,), (CHUNK,))
    for exported in (segment, first, last):
        exported.close()
    assert open_files() <= before


def test_a_thread_without_a_context_exports_too_and_leaves_none(stub: StubCuda) -> None:
    buffer = stub.allocate(SIZE)
    before = stub.contexts()
    found: list[GpuSegment] = []
    left: list[int] = []

    def run() -> None:
        driver = Cuda(stub.path)
        found.extend(export_segments([(buffer.address, SIZE)], driver))
        left.append(driver.current_context())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0].handle == buffer.handle
    assert left == [0]
    assert stub.contexts() == before


def test_memory_that_cannot_be_shared_is_told_apart(stub: StubCuda) -> None:
    """A GPU's does not work in virtual machines and sandboxes."""

    def refused(address: int, sentence: str) -> None:
        with pytest.raises(NotExportable, match=sentence):
            export(stub, (address, 1))

    refused(16, "0x10 is not GPU memory")
    refused(stub.map_chunks([CHUNK], 8).address, "fabric handles only.*IMEX.*expandable_segments")
    refused(stub.map_chunks([CHUNK], 0).address, "virtual memory API without sharing")
    pooled = stub.allocate_pooled(SIZE, stub.driver().create_stream(urgent=False))
    refused(pooled.address, r"by cudaMallocAsync.*backend:cudaMallocAsync")
    ordinary = stub.allocate(SIZE)
    stub.fail("cuIpcGetMemHandle", status=801)
    refused(ordinary.address, r"CUDA_ERROR_NOT_SUPPORTED \(801\).*virtual machines and sandboxes")


def test_wsl_is_named_where_memory_cannot_be_shared(stub: StubCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    release = os.uname_result(("Linux", "pc", "5.15.153.1-microsoft-standard-WSL2", "#1 SMP", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: release)
    ordinary, chunks = stub.allocate(SIZE), stub.map_chunks([CHUNK])
    for call, address in (("cuIpcGetMemHandle", ordinary.address), ("cuMemExportToShareableHandle", chunks.address)):
        stub.fail(call, status=801)
        with pytest.raises(NotExportable, match=r"NOT_SUPPORTED.* This is WSL 2: .* or run engine and daemon on Linux"):
            export(stub, (address, 1))


@pytest.mark.parametrize("call", ["cuMemExportToShareableHandle", "cuMemRetainAllocationHandle"])
def test_an_export_that_fails_leaves_no_descriptors(stub: StubCuda, call: str) -> None:
    buffer = stub.map_chunks([CHUNK] * 3)
    before = open_files()
    stub.fail(call, 3, 304)
    with pytest.raises(NotExportable, match=rf"Chunk 2 of 3.*{call} failed[^.]*\.$"):
        export(stub, (buffer.address, 3 * CHUNK))
    assert open_files() <= before


def test_a_low_limit_of_descriptors_is_told_apart(stub: StubCuda) -> None:
    buffer = stub.map_chunks([CHUNK] * 40)
    driver = Cuda(stub.path)
    before = open_files()
    *free, limit = [os.dup(0) for _ in range(21)]  # the lowest that are free: the limit is one of their numbers
    for descriptor in (*free, limit):
        os.close(descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(
            NotExportable, match=rf"Chunk \d+ of 40.*\(304\)\. .*its limit of {limit} open files.*ulimit"
        ):
            export_segments([(buffer.address, 40 * CHUNK)], driver)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files() <= before


def test_a_process_that_uses_no_gpu_exports_nothing(stub: StubCuda) -> None:
    buffer = stub.allocate(SIZE)
    stub.driver().set_context(0)
    stub.driver().release_context(0)
    with pytest.raises(NotExportable, match="is not GPU memory"):
        export(stub, (buffer.address, 1))


def test_a_thread_on_another_gpu_exports_memory_and_stays_there(stub: StubCuda) -> None:
    stub.set("devices", 2)
    buffer, driver = stub.allocate(SIZE), Cuda(stub.path)
    first = driver.current_context()
    with driver.context(1):
        other = driver.current_context()
        assert other != first
        (segment,) = export_segments([(buffer.address, SIZE)], driver)
        assert (segment.address, driver.current_context()) == (buffer.address, other)
    assert (driver.current_context(), stub.contexts(1)) == (first, 0)
