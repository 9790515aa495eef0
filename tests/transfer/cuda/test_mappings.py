"""Engine memory is mapped whole or not at all, only where it was said to be, and unmapped at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from kvoffd.errors import KvoffdError, OutOfBounds
from kvoffd.transfer.cuda.mappings import IpcExport, OpenHandles, UnmappableHandle, VmmExport
from kvoffd_proto.cuda import CudaError
from kvoffd_proto.errors import ErrorCode
from tests.kit.cases import case
from tests.kit.open_files import open_files
from tests.kit.stub_cuda import DeviceBuffer, Ranges, StubCuda

SIZE = 1 << 20
CHUNK = 2 << 20


@pytest.fixture
def handles(stub: StubCuda) -> OpenHandles:
    stub.set("same_pid_allowed", 1)
    stub.start()
    return OpenHandles(stub.driver(), 0)


@pytest.fixture
def chunks() -> Iterator[list[int]]:
    """Descriptors of three chunks of CUDA's virtual memory."""
    fds = [os.memfd_create(f"chunk-{index}") for index in range(3)]
    for index, fd in enumerate(fds):
        os.ftruncate(fd, CHUNK)
        os.pwrite(fd, bytes([65 + index]), 0)
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_handle_is_of_one_registration(stub: StubCuda, handles: OpenHandles) -> None:
    """Memory that was freed and allocated again may have the same handle; the driver would give out the old mapping."""
    buffer = stub.allocate(SIZE)
    (old,) = handles.open([IpcExport(buffer.handle, SIZE)])
    with pytest.raises(KvoffdError, match="is mapped already") as caught:
        handles.open([IpcExport(buffer.handle, SIZE)])
    assert caught.value.code is ErrorCode.TOO_MANY
    old.close()
    (new,) = handles.open([IpcExport(buffer.handle, SIZE)])
    assert stub.calls("cuIpcOpenMemHandle_v2") == 2
    new.close()


def test_a_handle_that_did_not_close_is_never_new_memory(stub: StubCuda, handles: OpenHandles) -> None:
    """It is closed before it is opened again; while that fails too it is refused."""
    buffer = stub.allocate(SIZE)
    (old,) = handles.open([IpcExport(buffer.handle, SIZE)])
    for _ in range(2):
        stub.fail("cuIpcCloseMemHandle", status=999)
    with pytest.raises(CudaError):
        old.close()
    with pytest.raises(UnmappableHandle, match="cuIpcCloseMemHandle"):
        handles.open([IpcExport(buffer.handle, SIZE)])
    assert stub.calls("cuIpcOpenMemHandle_v2") == 1
    (new,) = handles.open([IpcExport(buffer.handle, SIZE)])
    assert stub.calls("cuIpcOpenMemHandle_v2") == 2
    assert stub.ranges(Ranges.IPC) == 1
    new.close()
    assert (stub.ranges(Ranges.IPC), handles._open) == (0, {})


def test_the_same_pid_at_both_ends_has_its_reason(stub: StubCuda, handles: OpenHandles) -> None:
    stub.set("same_pid_allowed", 0)
    buffer = stub.allocate(SIZE)
    with pytest.raises(UnmappableHandle, match=rf"same process id \({os.getpid()}\).*under an init or with hostPID"):
        handles.open([IpcExport(buffer.handle, SIZE)])


def test_another_users_memory_has_its_reason(
    stub: StubCuda, handles: OpenHandles, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, user = stub.allocate(SIZE), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    for status in (1, 205, 400, 800):
        stub.fail("cuIpcOpenMemHandle_v2", status=status)
        with pytest.raises(
            UnmappableHandle, match=rf"engine runs as user {user} and the daemon as {user + 1}; .*: run both"
        ):
            handles.open([IpcExport(buffer.handle, SIZE, user)])
    stub.fail("cuIpcOpenMemHandle_v2", status=205)
    with pytest.raises(UnmappableHandle, match="split GPUs") as caught:
        handles.open([IpcExport(buffer.handle, SIZE, user + 1)])
    assert "user" not in caught.value.message


def test_a_low_limit_of_descriptors_has_its_reason(stub: StubCuda, handles: OpenHandles, chunks: list[int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = os.dup(0)  # the lowest that is free
    os.close(limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(UnmappableHandle, match=f"Import.*its limit of {limit} open files.*ulimit"):
            handles.open([VmmExport(chunks, [CHUNK] * 3)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (segment,) = handles.open([VmmExport(chunks, [CHUNK] * 3)])
    segment.close()


@pytest.mark.parametrize("known", [0, 1], ids=["by its attributes", "by its range"])
def test_the_size_of_mapped_memory_is_the_drivers_word(stub: StubCuda, handles: OpenHandles, known: int) -> None:
    """cuMemGetAddressRange is promised for the process's own allocations only."""
    stub.set("import_ranges", known)
    buffer = stub.allocate(SIZE)
    (segment,) = handles.open([IpcExport(buffer.handle, SIZE)])
    assert (stub.calls("cuPointerGetAttribute") > 0) == (not known)
    segment.close()
    with pytest.raises(OutOfBounds, match=f"has {SIZE} bytes but was declared with {SIZE + 1}"):
        handles.open([IpcExport(buffer.handle, SIZE + 1)])
    assert (stub.ranges(Ranges.IPC), handles._open) == (0, {})


def test_refusals_of_the_driver_are_explained_and_leave_nothing(stub: StubCuda, handles: OpenHandles) -> None:
    buffers = [stub.allocate(SIZE) for _ in range(3)]
    for status, said in ((217, "cannot access"), (400, "stale"), (205, "split GPUs"), (801, "sandboxes"), (999, "log")):
        stub.fail("cuIpcOpenMemHandle_v2", 3, status)
        with pytest.raises(UnmappableHandle, match=rf"cuIpcOpenMemHandle_v2 failed.*\({status}\).*{said}"):
            handles.open([IpcExport(buffer.handle, SIZE) for buffer in buffers])
        assert (stub.ranges(Ranges.IPC), handles._open) == (0, {})


def test_chunks_lie_one_after_the_other(stub: StubCuda, handles: OpenHandles, chunks: list[int]) -> None:
    before = open_files()
    (segment,) = handles.open([VmmExport(chunks, [CHUNK] * 3)])
    view = DeviceBuffer(segment.address, 3 * CHUNK).view
    assert bytes(view[::CHUNK]) == b"ABC"
    view[CHUNK + 1] = 66
    assert os.pread(chunks[1], 2, 0) == b"BB"
    segment.close()
    assert stub.ranges(Ranges.RESERVED) + stub.ranges(Ranges.VMM) == 0
    assert open_files() <= before


def test_an_import_that_fails_leaves_nothing_behind(stub: StubCuda, handles: OpenHandles, chunks: list[int]) -> None:
    for call, nth in (
        ("cuMemAddressReserve", 1),
        ("cuMemImportFromShareableHandle", 1),
        ("cuMemImportFromShareableHandle", 3),
        ("cuMemMap", 1),
        ("cuMemMap", 2),
        ("cuMemRelease", 2),
        ("cuMemSetAccess", 1),
    ):
        before = open_files()
        stub.fail(call, nth, 1)
        with case(call, nth), pytest.raises(UnmappableHandle, match=call):
            handles.open([VmmExport(chunks, [CHUNK] * 3)])
        assert stub.ranges(Ranges.RESERVED) + stub.ranges(Ranges.VMM) == 0
        assert len(open_files() - before) == (call == "cuMemRelease")  # the driver kept what it would not release
    for sizes in ([CHUNK], [CHUNK, CHUNK, 2 * CHUNK], [0, 0, 0], [1 << 62, 1 << 62, 1 << 62]):
        with case(sizes), pytest.raises(UnmappableHandle):
            handles.open([VmmExport(chunks, sizes)])


def test_a_part_that_stays_mapped_keeps_no_other(stub: StubCuda, handles: OpenHandles, chunks: list[int]) -> None:
    (segment,) = handles.open([VmmExport(chunks, [CHUNK] * 3)])
    stub.fail("cuMemUnmap", 1, 999)
    with pytest.raises(CudaError):
        segment.close()
    assert stub.ranges(Ranges.VMM) == 1
