"""Calls of the CUDA driver that only tests make, declared as `kvoffd_proto.cuda` declares the product's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvoffd.transfer.cuda.driver import BatchCopy, CudaDriver
from kvoffd_proto import cuda

TEST_PROTOTYPES: dict[str, tuple[str, ...]] = {
    "cuMemcpyHtoD_v2": ("CUdeviceptr", "const void *", "size_t"),
    "cuMemcpyDtoH_v2": ("void *", "CUdeviceptr", "size_t"),
    "cuMemAllocAsync": ("CUdeviceptr *", "size_t", "CUstream"),
    "cuMemCreate": (
        *("CUmemGenericAllocationHandle *", "size_t", "const CUmemAllocationProp *", "unsigned long long"),
    ),
}


def load(library: str) -> ctypes.CDLL:
    """The driver library with the prototypes of everything that tests call."""
    loaded = ctypes.CDLL(library)
    cuda.declare(loaded, {**cuda.PROTOTYPES, **TEST_PROTOTYPES})
    return loaded


def copy_batch(
    driver: CudaDriver,
    copies: Sequence[tuple[int, int, int]],
    stream: int,
    batch: BatchCopy | None = None,
    order: int = cuda.MEMCPY_SRC_ACCESS_ORDER_STREAM,
) -> int:
    """Make one batch of (destination, source, size) as the copy loop in C does; its status."""
    batch = batch or driver.batch_copy()
    assert batch is not None
    columns = [(ctypes.c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)]
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    calls = driver.copy_calls(batch)
    form = cuda.argument_types(cuda.BATCH_FORMS[batch.form])
    fail_index = [ctypes.byref(failed)] if calls.has_fail_index else []
    attributes = cuda.MemcpyAttributes.from_buffer_copy(cuda.MemcpyAttributes.from_address(calls.attributes))
    attributes.srcAccessOrder = order
    arguments = [*columns, len(copies), ctypes.byref(attributes), ctypes.byref(first), 1, *fail_index, stream]
    return int(ctypes.CFUNCTYPE(ctypes.c_int, *form)(batch.function)(*arguments))


def pinned_properties(device: int, handle_types: int) -> cuda.MemAllocationProp:
    """Properties of memory for `cuMemCreate`, on one device."""
    return cuda.MemAllocationProp(
        type=cuda.MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes=handle_types,
        location=cuda.MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, device),
    )


def record_event(driver: CudaDriver, event: int, stream: int) -> None:
    """Have the event happen when everything in the stream so far is done, as the copy loop in C does."""
    driver._call("cuEventRecord", event, stream)


def wait_event(driver: CudaDriver, event: int) -> None:
    """Sleep until the event has happened."""
    driver._call("cuEventSynchronize", event)
