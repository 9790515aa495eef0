"""The GPUs that this process may use, found by UUID, never by ordinal: the engine may count them otherwise."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from kvoffd.errors import KvoffdError
from kvoffd.transfer.cuda.driver import CudaDriver
from kvoffd_proto.errors import ErrorCode


class NoSuchGpu(KvoffdError):
    """The daemon does not see the GPU that an engine named."""

    code = ErrorCode.UNSUPPORTED


class Device(NamedTuple):
    """One GPU, or one MIG instance; ``ordinal`` is the driver's number for it in this process."""

    ordinal: int
    uuid: bytes
    whole_uuid: bytes
    """The GPU's UUID; another one than ``uuid`` where the device is a MIG instance of that GPU."""
    name: str
    pci_bus_id: str

    @property
    def is_mig(self) -> bool:
        return self.uuid != self.whole_uuid

    def __str__(self) -> str:
        return f"{self.name} {gpu_name(self.uuid, is_mig=self.is_mig)}"


def gpu_name(uuid: bytes, *, is_mig: bool = False) -> str:
    """Return a UUID as nvidia-smi prints it."""
    return f"{'MIG' if is_mig else 'GPU'}-{UUID(bytes=uuid)}"


def list_devices(driver: CudaDriver) -> list[Device]:
    """Start the driver and return all devices. Makes no context. Raises CudaError."""
    driver.init()
    devices = map(driver.device, range(driver.device_count()))
    return [
        Device(n, driver.device_uuid(n), driver.whole_uuid(n), driver.device_name(n), driver.pci_bus_id(n))
        for n in devices
    ]


def find_device(devices: list[Device], uuid: bytes) -> Device:
    """Return the device with this UUID. Raises NoSuchGpu with a sentence that says what is there instead."""
    for device in devices:
        if device.uuid == uuid:
            return device
    seen = "none at all" if not devices else ", ".join(map(str, devices))
    for device in devices:
        if device.whole_uuid == uuid:
            raise NoSuchGpu(
                f"The engine runs on the whole of {gpu_name(uuid)}, the daemon sees only its MIG instance {device}; "
                "give both the same."
            )
    if any(device.is_mig for device in devices):
        raise NoSuchGpu(
            f"The daemon does not see the engine's GPU {UUID(bytes=uuid)}. It sees {seen}, and CUDA lets a process use "
            "one MIG instance only: run one daemon for each instance, with the engine's CUDA_VISIBLE_DEVICES."
        )
    raise NoSuchGpu(
        f"The daemon does not see the engine's {gpu_name(uuid)} (if that is a MIG instance, it must be given to the "
        f"daemon by name). It sees {seen}. Give its container all GPUs that engines use (NVIDIA_VISIBLE_DEVICES=all, "
        "no CUDA_VISIBLE_DEVICES)."
    )
