"""GPUs are found by UUID, and a GPU that is not there is told apart from a part of one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kvoffd.transfer.cuda.gpus import NoSuchGpu, find_device, list_devices
from tests.kit.stub_cuda import StubCuda


def test_gpus_are_listed_without_a_context(stub: StubCuda) -> None:
    stub.set("devices", 2)
    devices = list_devices(stub.driver())
    assert [(device.ordinal, device.name, device.uuid[0]) for device in devices] == [
        (0, "Stub 0", 16),
        (1, "Stub 1", 17),
    ]
    assert stub.made_contexts() == 0
    assert find_device(devices, bytes([17] * 16)).ordinal == 1
    assert str(devices[0]) == "Stub 0 GPU-10101010-1010-1010-1010-101010101010"


def test_a_gpu_that_is_not_there(stub: StubCuda) -> None:
    with pytest.raises(NoSuchGpu, match=r"does not see the engine's GPU-2020.*It sees Stub 0 GPU-1010.*NVIDIA_VISIBLE"):
        find_device(list_devices(stub.driver()), bytes([32] * 16))
    with pytest.raises(NoSuchGpu, match="none at all"):
        find_device([], bytes([32] * 16))


def test_a_mig_instance_is_a_device_of_its_own(stub: StubCuda) -> None:
    stub.set("mig", 1)
    (device,) = list_devices(stub.driver())
    assert device.is_mig
    assert find_device([device], bytes([0x80] * 16)) is device
    with pytest.raises(NoSuchGpu, match=r"whole of GPU-1010.*only its MIG instance Stub 0 MIG-8080"):
        find_device([device], bytes([0x10] * 16))
    with pytest.raises(NoSuchGpu, match="one MIG instance only"):
        find_device([device], bytes([0x81] * 16))


class NewerLibrary(ctypes.CDLL):
    """A driver that has dropped what headers do not declare any more."""

    def __getattr__(self, name: str) -> Any:
        if name == "cuDeviceGetUuid":
            raise AttributeError(name)
        return super().__getattr__(name)


def test_a_driver_without_the_first_form_of_a_uuid_is_used(stub: StubCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.set("mig", 1)
    monkeypatch.setattr(ctypes, "CDLL", NewerLibrary)
    (device,) = list_devices(stub.driver())
    assert device.whole_uuid == device.uuid == bytes([0x80] * 16)
