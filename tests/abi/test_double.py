"""The double of the driver has what is not waited for show as wrong bytes, and refuses what the driver refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from kvoffd_proto import cuda
from kvoffd_proto.cuda import CudaError
from tests.kit.cuda_calls import copy_batch
from tests.kit.cuda_files import include_directory
from tests.kit.stub_cuda import SOURCE, DeviceBuffer, fresh_stub

KIB = 1 << 10
SIZE = 64 * KIB
GONE = 0xDB
INVALID_VALUE, INVALID_HANDLE, FAULT = 1, 400, 700


class Bench:
    """A stub, its context, a stream, an event, device memory, and registered host memory beside memory that is not."""

    def __init__(self, seed: int = 0) -> None:
        self.stub = fresh_stub()
        self.stub.set("seed", seed)
        self.stub.start()
        self.driver = self.stub.driver()
        self.stream = self.driver.create_stream(urgent=True)
        self.event = self.driver.create_event()
        self.gpu = self.stub.allocate(SIZE)
        self.gpu.view[:] = 1
        self._pages = np.zeros(3 * SIZE, dtype=np.uint8)
        self.host = -(-self._pages.ctypes.data // 4096) * 4096
        self.driver.register_host(self.host, SIZE)
        self.view = DeviceBuffer(self.host, 2 * SIZE).view

    def copy(self, to: int, source: int, size: int = 4 * KIB) -> None:
        self.driver._call("cuMemcpyAsync", to, source, size, self.stream)

    def batch(self, copies: list[tuple[int, int, int]], stream: int | None = None) -> None:
        if status := copy_batch(self.driver, copies, self.stream if stream is None else stream):
            raise self.driver.error("cuMemcpyBatchAsync", status)

    def wait(self, stream: int | None = None) -> None:
        self.driver._call("cuEventRecord", self.event, self.stream if stream is None else stream)
        self.driver._call("cuEventSynchronize", self.event)

    def refused(self, status: int, *call: object) -> None:
        """The call must fail with this status."""
        function, *arguments = call
        assert callable(function)
        with pytest.raises(CudaError) as caught:
            function(*arguments)
        assert caught.value.status == status, caught.value


@pytest.fixture
def bench() -> Bench:
    return Bench()


# These make or choose a context, or only tell of devices; cuda.h lists INVALID_CONTEXT for them all the same.
WITHOUT_CONTEXT = {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent"} | {
    f"cuDeviceGet{what}" for what in ("", "Count", "Name", "Attribute")
}
# cuda.h does not list it for these; their streams have one.
WITH_CONTEXT = {"cuMemcpyBatchAsync", "cuCtxGetStreamPriorityRange"}


def test_it_wants_a_context_where_the_header_says_so() -> None:
    header = (include_directory("newest") / "cuda.h").read_text()
    entered = dict(re.findall(r'ENTER\("(\w+)"\)(.*?)(?:\n\}|\}\n)', SOURCE.read_text(), re.DOTALL))
    assert len(entered) > 50
    for symbol, body in entered.items():
        name = re.sub(r"_v\d+$", "", symbol)
        documented = re.search(rf"/\*\*((?:(?!\*/).)*)\*/\s*CUresult CUDAAPI {name}\(", header, re.DOTALL)
        assert documented is not None, name
        listed = "CUDA_ERROR_INVALID_CONTEXT" in documented[1].partition("\\return")[2]
        wanted = (listed and symbol not in WITHOUT_CONTEXT) or symbol in WITH_CONTEXT
        assert ("NEED_CONTEXT" in body) == wanted, symbol


def test_what_is_not_waited_for_has_not_happened(bench: Bench) -> None:
    bench.copy(bench.host, bench.gpu.address)
    assert bench.view[0] == 0
    bench.gpu.view[:] = 2  # the source is written again before the copy ran
    bench.wait(bench.driver.create_stream(urgent=False))
    assert bench.view[0] == 0, "another stream was waited for"
    bench.wait()
    assert bench.view[0] == 2


def test_by_chance_copies_run_early_and_in_any_order() -> None:
    bench = Bench(seed=7)
    streams = [bench.driver.create_stream(urgent=False) for _ in range(2)]
    seen = set()
    for number in range(64):
        bench.view[:] = 0
        for at, stream in enumerate(streams):
            places = [bench.host + 32 * KIB * at + 4 * KIB * index for index in range(4)]
            bench.batch([(place, bench.gpu.address, KIB) for place in places], stream)
        for _ in range(number % 8):
            bench.driver._call("cuEventRecord", bench.event, bench.stream)
        seen.add(tuple(int(bench.view[at * 4 * KIB]) for at in (*range(4), *range(8, 12))))
        for stream in streams:
            bench.wait(stream)
    whole = {(1,) * 4, (0,) * 4}
    assert any(one[:4] == (0,) * 4 and any(one[4:]) for one in seen), "the second stream was never first"
    assert any(one[4:] == (0,) * 4 and any(one[:4]) for one in seen), "the first stream was never first"
    assert {one[:4] for one in seen} - whole, "a batch was never half done"
    assert any(not one[0] and one[1:4] != (0,) * 3 for one in seen), "the first of a batch was always first"


def test_copies_beyond_registered_memory_are_refused(bench: Bench) -> None:
    end, gpu = bench.host + SIZE, bench.gpu.address
    for call in (bench.copy, lambda *copy: bench.batch([copy])):
        bench.refused(INVALID_VALUE, call, end - KIB, gpu, 2 * KIB)
        bench.refused(INVALID_VALUE, call, bench.host, gpu + SIZE - KIB, 2 * KIB)
        bench.refused(INVALID_VALUE, call, bench.host, bench.host + 4 * KIB, KIB)
    bench.copy(end + 4 * KIB, gpu, KIB)
    bench.refused(INVALID_VALUE, bench.batch, [(bench.host, gpu, KIB), (end + 4 * KIB, gpu, KIB)])
    bench.driver.register_host(end, SIZE)
    bench.refused(INVALID_VALUE, bench.copy, end - KIB, gpu, 2 * KIB)  # in two registrations


@pytest.mark.parametrize("freed", [True, False])
def test_memory_that_goes_under_a_copy_is_a_lasting_fault(bench: Bench, freed: bool) -> None:
    bench.copy(bench.host, bench.gpu.address)
    if freed:
        bench.stub.free(bench.gpu)
    else:
        bench.driver.unregister_host(bench.host)
    bench.refused(FAULT, bench.wait)
    bench.refused(FAULT, bench.driver.create_event)
    bench.driver.set_context(0)
    bench.driver.release_context(0)
    bench.refused(FAULT, bench.driver.retain_context, 0)  # not even in a new context: "must be terminated"


def test_errors_that_end_a_process_last_and_others_do_not(bench: Bench) -> None:
    for status in (cuda.ERROR_OUT_OF_MEMORY, *cuda.RELAUNCH_ERRORS):
        bench.stub.fail("cuMemcpyAsync", 1, status)
        bench.refused(status, bench.copy, bench.host, bench.gpu.address)
        if status in cuda.RELAUNCH_ERRORS:
            bench.refused(status, bench.driver.devices)
        else:
            bench.copy(bench.host, bench.gpu.address)


EXPORTER = """
import sys
from tests.kit.stub_cuda import StubCuda
stub = StubCuda(sys.argv[1])
stub.start()
gpu = stub.allocate(65536)
gpu.view[:] = 5
print(gpu.handle.hex(), flush=True)
sys.stdin.read()
"""


def test_memory_of_an_exporter_that_died_has_no_bytes_to_store(bench: Bench) -> None:
    command = [sys.executable, "-c", EXPORTER, fresh_stub().path]
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as exporter:
        assert exporter.stdout is not None
        handle = bytes.fromhex(exporter.stdout.readline())
        address = bench.driver.open_ipc(handle)
        bench.copy(bench.host, address)
        bench.wait()
        assert bench.view[0] == 5
        bench.copy(bench.host, address)
        exporter.kill()
    bench.wait()
    assert bench.view[0] == GONE
    bench.driver.close_ipc(address)
    bench.refused(INVALID_HANDLE, bench.driver.open_ipc, handle)
