"""The binding says the same as the driver's header."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvoffd_proto.cuda import Cuda, CudaError
from tests.kit.copy_buffers import address_of, random_bytes
from tests.kit.cuda_calls import copy_batch
from tests.kit.stub_cuda import Ranges, StubCuda


def test_a_machine_without_a_driver_is_told_so() -> None:
    with pytest.raises(CudaError, match=r"nowhere/libcuda\.so.*KVOFFD_CUDA_LIBRARY"):
        Cuda("/nowhere/libcuda.so")


def test_a_library_that_is_no_driver_is_told_so() -> None:
    with pytest.raises(CudaError, match="cuInit"):
        Cuda("libc.so.6")


def test_an_error_names_the_call_and_the_status(stub: StubCuda) -> None:
    stub.fail("cuInit", status=801)
    with pytest.raises(CudaError, match=r"cuInit failed: CUDA_ERROR_NOT_SUPPORTED \(801\)") as caught:
        stub.driver().init()
    assert (caught.value.call, caught.value.status) == ("cuInit", 801)
    stub.fail("cuInit", status=12345)
    with pytest.raises(CudaError, match=r"an unknown error \(12345\)"):
        stub.driver().init()


def test_a_call_needs_the_context_in_its_own_thread(stub: StubCuda) -> None:
    context = stub.start()
    driver = stub.driver()
    stream = driver.create_stream(urgent=False)
    seen: list[int] = []

    def other_thread() -> None:
        try:
            driver.create_event()
        except CudaError as error:
            seen.append(error.status)
        driver.set_context(context)
        driver.destroy_event(driver.create_event())
        driver.destroy_stream(stream)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [201]


@pytest.mark.parametrize(("version", "form"), [(12080, 12080), (12090, 12080), (13000, 13000), (13020, 13000)])
def test_a_batch_is_called_in_the_form_the_driver_knows(stub: StubCuda, version: int, form: int) -> None:
    stub.set("version", version)
    stub.start()
    driver = stub.driver()
    assert driver.copy_calls()["batch"]
    assert f"batch form {form}" in stub.log()
    stream, event = driver.create_stream(urgent=True), driver.create_event()
    source = random_bytes(3 * 4096)
    to = np.zeros_like(source)
    stub.adopt(Ranges.DEVICE, address_of(source), source.size)
    stub.adopt(Ranges.HOST, address_of(to), to.size)
    copies = [(address_of(to) + offset, address_of(source) + offset, 4096) for offset in (0, 4096, 8192)]
    assert copy_batch(driver, copies, stream) == 0
    assert not to.any(), "a batch is asynchronous"
    driver._call("cuEventRecord", event, stream)
    driver._call("cuEventSynchronize", event)
    assert np.array_equal(to, source)
    stub.fail("cuMemcpyBatchAsync", status=1)
    assert copy_batch(driver, copies, stream) == 1


@pytest.mark.parametrize(
    ("call", "status", "advice"),
    [
        ("cuDevicePrimaryCtxRetain", 46, "compute mode"),
        ("cuDevicePrimaryCtxRetain", 2, "gpu_memory_utilization"),
        ("cuInit", 802, "nvidia-fabricmanager"),
        ("cuInit", 999, "start this process again"),
        ("cuInit", 100, "give its container GPUs"),
    ],
)
def test_errors_of_a_machine_say_what_to_look_at(stub: StubCuda, call: str, status: int, advice: str) -> None:
    stub.fail(call, status=status)
    with pytest.raises(CudaError, match=rf"{call} failed: .*\({status}\)\. .*{advice}"):
        stub.start()


@pytest.mark.parametrize("setting", [("version", 12070), ("batch_missing", 1), ("translated", 1)])
def test_a_driver_without_batches_is_no_error(stub: StubCuda, setting: tuple[str, int]) -> None:
    stub.set(*setting)
    stub.start()
    assert "batch" not in stub.driver().copy_calls()


def test_an_operator_may_switch_batches_off(stub: StubCuda) -> None:
    stub.start()
    assert Cuda(stub.path, batches=False).copy_calls().keys().isdisjoint(["batch"])
    assert Cuda(stub.path, batches=True).copy_calls()["batch"]


def test_loads_have_the_most_urgent_stream_and_stores_the_least(stub: StubCuda) -> None:
    stub.start()
    driver = stub.driver()
    driver.create_stream(urgent=True)
    driver.create_stream(urgent=False)
    assert [line for line in stub.log() if "priority" in line] == ["stream priority -5", "stream priority 0"]
