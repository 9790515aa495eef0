"""The binding of the driver, and the devices that it lists."""

from __future__ import annotations

import pytest

from kvoffd.transfer.cuda.gpus import NoSuchGpu, find_device, list_devices
from kvoffd_proto.cuda import Cuda, CudaError
from tests.kit.cases import case
from tests.kit.stub_cuda import StubCuda


def test_a_library_that_is_no_driver_is_told_so() -> None:
    for library, why in (("/nowhere/libcuda.so", "nowhere"), ("libc.so.6", "cuInit")):
        with case(library), pytest.raises(CudaError, match=rf"{why}.*KVOFFD_CUDA_LIBRARY"):
            Cuda(library)


def test_errors_name_call_and_status_and_say_what_to_look_at(stub: StubCuda) -> None:
    for call, status, said in (
        ("cuDevicePrimaryCtxRetain", 46, r"\(46\)\. .*compute mode"),
        ("cuDevicePrimaryCtxRetain", 2, r"CUDA_ERROR_OUT_OF_MEMORY \(2\)\. .*gpu_memory_utilization"),
        ("cuInit", 802, r"\(802\)\. .*nvidia-fabricmanager"),
        ("cuInit", 999, r"\(999\)\. .*[Rr]estart this process"),
        ("cuInit", 100, r"\(100\)\. .*give its container GPUs"),
        ("cuInit", 12345, r"an unknown error \(12345\)\."),
    ):
        stub.fail(call, status=status)
        with case(call, status), pytest.raises(CudaError, match=f"{call} failed: .*{said}") as caught:
            stub.start()
        assert (caught.value.call, caught.value.status) == (call, status)


def test_a_batch_is_called_in_the_form_the_driver_knows(stub: StubCuda) -> None:
    stub.start()
    for version, form in ((12080, 12080), (12090, 12080), (13000, 13000), (13020, 13000)):
        stub.set("version", version)
        with case(version):
            assert stub.driver().copy_calls()["at_batch"]
            assert [line for line in stub.log() if line.startswith("batch form")][-1] == f"batch form {form}"


def test_loads_have_the_most_urgent_stream_and_stores_the_least(stub: StubCuda) -> None:
    stub.start()
    driver = stub.driver()
    driver.create_stream(urgent=True)
    driver.create_stream(urgent=False)
    assert [line for line in stub.log() if "priority" in line] == ["stream priority -5", "stream priority 0"]


# --- devices --------------------------------------------------------------------------------------


def test_gpus_are_listed_without_a_context(stub: StubCuda) -> None:
    stub.set("devices", 2)
    devices = list_devices(stub.driver())
    assert [(device.ordinal, device.name, device.uuid[0]) for device in devices] == [
        (0, "Stub 0", 16),
        (1, "Stub 1", 17),
    ]
    assert stub.made_contexts() == 0
    assert find_device(devices, bytes([17] * 16)).ordinal == 1
    assert str(devices[0]) == "Stub 0 10101010-1010-1010-1010-101010101010"


def test_a_gpu_that_is_not_there(stub: StubCuda) -> None:
    said = r"does not see the engine's GPU.* 2020.*It sees Stub 0 1010.*NVIDIA_VISIBLE.*only one MIG instance"
    with pytest.raises(NoSuchGpu, match=said):
        find_device(list_devices(stub.driver()), bytes([32] * 16))
    with pytest.raises(NoSuchGpu, match="It sees no GPU"):
        find_device([], bytes([32] * 16))
