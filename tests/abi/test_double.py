"""The double of the driver refuses what the driver refuses, and has what is not waited for show as wrong bytes."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffd_proto import cuda
from kvoffd_proto.cuda import Cuda, CudaError
from tests.kit.cuda_calls import copy_batch, load
from tests.kit.cuda_files import include_directory
from tests.kit.stub_cuda import SOURCE, DeviceBuffer, StubCuda, fresh_stub

KIB = 1 << 10
SIZE = 64 * KIB
CHUNK = 2 << 20
GONE = 0xDB
INVALID_VALUE, INVALID_CONTEXT, ALREADY_MAPPED, INVALID_HANDLE, NOT_FOUND, FAULT = 1, 201, 208, 400, 500, 700


class Bench:
    """A stub, its context, a stream, an event, device memory, and registered host memory beside memory that is not."""

    def __init__(self, stub: StubCuda, seed: int = 0) -> None:
        self.stub = stub
        stub.set("seed", seed)
        self.context = stub.start()
        self.driver = stub.driver()
        self.stream = self.driver.create_stream(urgent=True)
        self.event = self.driver.create_event()
        self.gpu = stub.allocate(SIZE)
        self.gpu.view[:] = 1
        self._pages = np.zeros(3 * SIZE, dtype=np.uint8)
        self.host = -(-self._pages.ctypes.data // 4096) * 4096
        self.driver.register_host(self.host, SIZE)
        self.view = DeviceBuffer(self.host, 2 * SIZE).view

    def copy(self, to: int, source: int, size: int = 4 * KIB) -> None:
        self.copy_in(self.stream, to, source, size)

    def copy_in(self, stream: int, to: int, source: int, size: int) -> None:
        self.driver._call("cuMemcpyAsync", to, source, size, stream)

    def batch(self, copies: list[tuple[int, int, int]], stream: int | None = None) -> None:
        if status := copy_batch(self.driver, copies, self.stream if stream is None else stream):
            raise self.driver.error("cuMemcpyBatchAsync", status)

    def record(self, stream: int) -> None:
        self.driver._call("cuEventRecord", self.event, stream)

    def wait_event(self) -> None:
        self.driver._call("cuEventSynchronize", self.event)

    def wait(self) -> None:
        self.record(self.stream)
        self.wait_event()

    def refused(self, status: int, *call: object) -> None:
        """The call must fail with this status."""
        function, *arguments = call
        assert callable(function)
        with pytest.raises(CudaError) as caught:
            function(*arguments)
        assert caught.value.status == status, caught.value


@pytest.fixture
def stub() -> Iterator[StubCuda]:
    stub = fresh_stub()
    yield stub
    stub.release()


@pytest.fixture
def bench(stub: StubCuda) -> Bench:
    return Bench(stub)


# --- it is held to the header -----------------------------------------------------------------------


# These make or choose a context, or only tell of devices; cuda.h lists INVALID_CONTEXT for them all the same.
WITHOUT_CONTEXT = {
    *(
        "cuDeviceGet",
        "cuDeviceGetCount",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
    ),
    "cuCtxSetCurrent",
}
# cuda.h does not list it for these; their streams have one.
WITH_CONTEXT = {"cuMemcpyBatchAsync", "cuCtxGetStreamPriorityRange"}


def test_it_wants_a_context_where_the_header_says_so() -> None:
    header = (include_directory("newest") / "cuda.h").read_text()
    source = SOURCE.read_text()
    entered = dict(re.findall(r'ENTER\("(\w+)"\)(.*?)(?:\n\}|\}\n)', source, re.DOTALL))
    assert len(entered) > 50
    for symbol, body in entered.items():
        name = re.sub(r"_v\d+$", "", symbol)
        documented = re.search(rf"/\*\*((?:(?!\*/).)*)\*/\s*CUresult CUDAAPI {name}\(", header, re.DOTALL)
        assert documented is not None, name
        listed = "CUDA_ERROR_INVALID_CONTEXT" in documented[1].partition("\\return")[2]
        wanted = (listed and symbol not in WITHOUT_CONTEXT) or symbol in WITH_CONTEXT
        assert ("NEED_CONTEXT" in body) == wanted, symbol


def test_a_thread_without_a_context_is_refused(bench: Bench) -> None:
    def other_thread() -> None:
        for call, arguments in (
            (bench.copy, (bench.host, bench.gpu.address)),
            (bench.wait_event, ()),
            (bench.driver.register_host, (bench.host + SIZE, SIZE)),
            (bench.driver.address_range, (bench.gpu.address,)),
            (bench.driver.open_ipc, (bench.gpu.handle,)),
        ):
            bench.refused(INVALID_CONTEXT, call, *arguments)
        done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert done


# --- copies -----------------------------------------------------------------------------------------


def test_a_batch_wants_a_stream_of_its_own(bench: Bench) -> None:
    copies = [(bench.host, bench.gpu.address, KIB)]
    bench.refused(INVALID_VALUE, bench.batch, copies, 0)
    bench.refused(INVALID_VALUE, bench.batch, copies, 1)  # CU_STREAM_LEGACY
    bench.driver.destroy_stream(bench.stream)
    bench.refused(INVALID_HANDLE, bench.batch, copies)
    bench.refused(INVALID_HANDLE, bench.copy, bench.host, bench.gpu.address)


def test_copies_beyond_what_was_registered_or_allocated_are_refused(bench: Bench) -> None:
    end, gpu = bench.host + SIZE, bench.gpu.address
    for call in (bench.copy, lambda *copy: bench.batch([copy])):
        bench.refused(INVALID_VALUE, call, end - KIB, gpu, 2 * KIB)
        bench.refused(INVALID_VALUE, call, bench.host, gpu + SIZE - KIB, 2 * KIB)
        bench.refused(INVALID_VALUE, call, bench.host, bench.host + 4 * KIB, KIB)
    bench.copy(end + 4 * KIB, gpu, KIB)
    bench.refused(INVALID_VALUE, bench.batch, [(bench.host, gpu, KIB), (end + 4 * KIB, gpu, KIB)])
    bench.driver.register_host(end, SIZE)
    bench.refused(INVALID_VALUE, bench.copy, end - KIB, gpu, 2 * KIB)  # in two registrations


def test_where_a_hosts_addresses_are_translated_only_single_copies_know_them(bench: Bench) -> None:
    copy = (bench.host, bench.gpu.address, KIB)
    before = bench.driver.copy_calls()
    bench.stub.set("translated", 1)
    bench.copy(*copy)
    bench.wait()
    assert "batch" not in bench.driver.copy_calls()
    bench.driver.copy_calls = lambda: before  # type: ignore[method-assign]
    assert copy_batch(bench.driver, [copy], bench.stream) == 0
    bench.refused(FAULT, bench.wait)


@pytest.mark.parametrize("version", [12080, 13000])
def test_both_forms_of_the_batch_call_are_its_own(stub: StubCuda, version: int) -> None:
    stub.set("version", version)
    bench = Bench(stub)
    bench.batch([(bench.host, bench.gpu.address, KIB), (bench.host + 8 * KIB, bench.gpu.address, KIB)])
    bench.wait()
    assert bench.view[0] == bench.view[8 * KIB] == 1
    raw, function, found = load(stub.path), ctypes.c_void_p(), ctypes.c_uint()
    assert raw.cuGetProcAddress_v2(b"cuMemcpyBatchAsync", ctypes.byref(function), 13000, 0, ctypes.byref(found)) == 0
    newest_form = function.value
    assert raw.cuGetProcAddress_v2(b"cuMemcpyBatchAsync", ctypes.byref(function), 12080, 0, ctypes.byref(found)) == 0
    assert (function.value == newest_form) == (version == 12080), "a driver gives the form it has"


def test_what_is_not_waited_for_has_not_happened(bench: Bench) -> None:
    bench.copy(bench.host, bench.gpu.address)
    assert bench.view[0] == 0
    bench.gpu.view[:] = 2  # the source is written again before the copy ran
    bench.wait()
    assert bench.view[0] == 2
    other = bench.driver.create_stream(urgent=False)
    bench.copy_in(other, bench.host + 8 * KIB, bench.gpu.address, KIB)
    bench.wait()
    assert bench.view[8 * KIB] == 0, "another stream was not waited for"


def test_by_chance_copies_happen_sooner_and_streams_and_batches_have_no_order(stub: StubCuda) -> None:
    bench = Bench(stub, seed=7)
    streams = [bench.driver.create_stream(urgent=False) for _ in range(2)]
    seen = set()
    for number in range(64):
        bench.view[:] = 0
        sizes = [(bench.host + 4 * KIB * index, bench.gpu.address, KIB) for index in range(4)]
        for stream in streams:
            bench.batch(sizes, stream)
            sizes = [(to + 32 * KIB, source, size) for to, source, size in sizes]
        for _ in range(number % 8):
            bench.record(bench.stream)
        seen.add(tuple(int(bench.view[at * 4 * KIB]) for at in (*range(4), *range(8, 12))))
        for stream in streams:
            bench.record(stream)
            bench.wait_event()
    whole = {(1,) * 4, (0,) * 4}
    assert any(one[:4] == (0,) * 4 and any(one[4:]) for one in seen), "the second stream was never first"
    assert any(one[4:] == (0,) * 4 and any(one[:4]) for one in seen), "the first stream was never first"
    assert {one[:4] for one in seen} - whole, "a batch was never half done"
    assert any(not one[0] and one[1:4] != (0,) * 3 for one in seen), "the first of a batch was always first"


# --- faults -----------------------------------------------------------------------------------------


def unregister(bench: Bench) -> None:
    bench.driver.unregister_host(bench.host)


def free(bench: Bench) -> None:
    bench.stub.free(bench.gpu)


@pytest.mark.parametrize("take_away", [unregister, free])
def test_memory_that_goes_under_a_copy_is_a_fault_and_no_call_works_after_it(bench: Bench, take_away: object) -> None:
    assert callable(take_away)
    bench.copy(bench.host, bench.gpu.address)
    take_away(bench)
    bench.refused(FAULT, bench.wait)
    bench.refused(FAULT, bench.driver.create_event)
    bench.refused(FAULT, bench.driver.register_host, bench.host, SIZE)
    bench.driver.set_context(0)
    bench.driver.release_context(0)
    bench.refused(FAULT, bench.driver.retain_context, 0)  # not even in a new context: "must be terminated"


def test_an_error_that_ends_the_process_sticks_and_another_does_not(stub: StubCuda) -> None:
    bench = Bench(stub)
    driver, address = bench.driver, bench.gpu.address
    stub.fail("cuMemcpyAsync", 1, 2)
    bench.refused(2, bench.copy, bench.host, address)
    bench.copy(bench.host, address)
    for status in sorted(cuda.RELAUNCH_ERRORS):
        stub.fail("cuMemcpyAsync", 1, status)
        for _ in range(2):
            bench.refused(status, bench.copy, bench.host, address)
        for call, arguments in (
            (driver.devices, ()),
            (driver.set_context, (bench.context,)),
            (driver.reserve, (CHUNK,)),
            (driver.import_descriptor, (0,)),
            (driver.allow_access, (address, CHUNK, 0)),
            (driver.release, (1,)),
        ):
            bench.refused(status, call, *arguments)
    driver.set_context(0)
    driver.release_context(0)


# --- memory of another process ----------------------------------------------------------------------


def test_its_own_handles_are_refused(bench: Bench) -> None:
    bench.refused(INVALID_CONTEXT, bench.driver.open_ipc, bench.gpu.handle)


def test_a_handle_is_open_once_in_a_process(stub: StubCuda) -> None:
    """cuda.h would have the second opening counted, but drivers have refused it (openucx/ucx#3192)."""
    stub.set("same_pid_allowed", 1)
    stub.set("devices", 2)
    bench = Bench(stub)
    address = bench.driver.open_ipc(bench.gpu.handle)
    bench.refused(ALREADY_MAPPED, bench.driver.open_ipc, bench.gpu.handle)
    bench.driver.set_context(bench.driver.retain_context(1))
    bench.refused(ALREADY_MAPPED, bench.driver.open_ipc, bench.gpu.handle)
    bench.refused(INVALID_VALUE, bench.driver.close_ipc, address)
    bench.driver.set_context(bench.context)
    bench.copy(bench.host, address)
    bench.driver.close_ipc(address)
    bench.refused(INVALID_VALUE, bench.driver.close_ipc, address)
    bench.refused(INVALID_VALUE, bench.copy, bench.host, address)
    bench.refused(FAULT, bench.wait)  # for the first copy, which had not run yet


def test_memory_without_ipc_handles_gets_none(bench: Bench) -> None:
    raw = load(bench.stub.path)
    chunks, pooled = bench.stub.map_chunks([CHUNK]), bench.stub.allocate_pooled(SIZE, bench.stream)
    for address in (chunks.address, pooled.address, bench.gpu.address + KIB):
        assert raw.cuIpcGetMemHandle(ctypes.byref(cuda.IpcMemHandle()), address) == INVALID_VALUE
        capable = ctypes.c_uint(9)
        legacy = cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        assert raw.cuPointerGetAttribute(ctypes.byref(capable), legacy, address) == 0
        assert capable.value == (address == bench.gpu.address + KIB)


EXPORTER = """
import os, sys
from tests.kit.stub_cuda import StubCuda
stub = StubCuda(sys.argv[1])
os.seteuid(int(sys.argv[2]))
stub.start()
gpu = stub.allocate(65536)
gpu.view[:] = 5
print(gpu.handle.hex(), flush=True)
for line in sys.stdin:
    stub.free(gpu)
    print("freed", flush=True)
"""


def start_exporter(user: int) -> subprocess.Popen[str]:
    """A process with memory that prints its handle, and frees it at a line of input."""
    return subprocess.Popen(
        [sys.executable, "-c", EXPORTER, fresh_stub().path, str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of several users")
def test_another_users_memory_is_refused(bench: Bench) -> None:
    with start_exporter(user=65534) as exporter:
        bench.refused(cuda.ERROR_MAP_FAILED, bench.driver.open_ipc, bytes.fromhex(exporter.stdout.readline()))
        exporter.kill()


@pytest.mark.parametrize("how", ["dies", "frees"])
def test_what_an_exporter_took_with_it_has_no_bytes_to_store(bench: Bench, how: str) -> None:
    with start_exporter(os.geteuid()) as exporter:
        assert exporter.stdin is not None
        handle = bytes.fromhex(exporter.stdout.readline())
        address = bench.driver.open_ipc(handle)
        bench.copy(bench.host, address)
        bench.wait()
        assert bench.view[0] == 5
        bench.copy(bench.host, address)
        if how == "frees":
            exporter.stdin.write("free\n")
            exporter.stdin.flush()
            exporter.stdout.readline()
        else:
            exporter.kill()
            exporter.wait()
        bench.wait()
        assert bench.view[0] == GONE
        bench.driver.close_ipc(address)
        bench.refused(INVALID_HANDLE, bench.driver.open_ipc, handle)
        exporter.kill()


def test_ranges_of_imported_memory_are_told_by_attributes_only(stub: StubCuda) -> None:
    stub.set("same_pid_allowed", 1)
    bench = Bench(stub)
    raw, base, size = load(stub.path), ctypes.c_uint64(), ctypes.c_size_t()
    address = bench.driver.open_ipc(bench.gpu.handle)
    ranges = (ctypes.byref(base), ctypes.byref(size), address + KIB)
    assert raw.cuMemGetAddressRange_v2(*ranges) == NOT_FOUND
    stub.set("import_ranges", 1)  # as some drivers may
    assert raw.cuMemGetAddressRange_v2(*ranges) == 0
    assert (base.value, size.value) == (address, SIZE)


def test_chunks_are_copied_only_when_access_was_given(bench: Bench) -> None:
    address = bench.driver.reserve(2 * CHUNK)
    fd = os.memfd_create("chunk")
    os.ftruncate(fd, CHUNK)
    try:
        for at in (address, address + CHUNK):
            allocation = bench.driver.import_descriptor(fd)
            bench.driver.map(at, CHUNK, allocation)
            bench.driver.release(allocation)
            bench.refused(INVALID_VALUE, bench.driver.release, allocation)
    finally:
        os.close(fd)
    middle = address + CHUNK - KIB
    bench.refused(INVALID_VALUE, bench.copy, middle, bench.host, 2 * KIB)
    bench.driver.allow_access(address, CHUNK, 0)
    bench.refused(INVALID_VALUE, bench.copy, middle, bench.host, 2 * KIB)
    bench.driver.allow_access(address, 2 * CHUNK, 0)
    bench.copy(middle, bench.host, 2 * KIB)
    bench.driver.unmap(address, CHUNK)
    bench.refused(FAULT, bench.wait)


def test_a_machine_without_gpus_does_not_start_cuda() -> None:
    stub = fresh_stub()
    stub.set("devices", 0)
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE"):
        Cuda(stub.path).init()
