"""Calls of the CUDA driver that only tests and benches make, declared as `kvoffd_proto.cuda` declares the product's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvoffd_proto import cuda

MEMHOSTALLOC_PORTABLE = 1
MEM_ALLOCATION_TYPE_PINNED = 1

TEST_PROTOTYPES: dict[str, tuple[str, ...]] = {
    "cuMemAlloc_v2": ("CUdeviceptr *", "size_t"),
    "cuMemFree_v2": ("CUdeviceptr",),
    "cuMemHostAlloc": ("void **", "size_t", "unsigned int"),
    "cuMemFreeHost": ("void *",),
    "cuMemcpyHtoD_v2": ("CUdeviceptr", "const void *", "size_t"),
    "cuMemcpyDtoH_v2": ("void *", "CUdeviceptr", "size_t"),
    "cuMemAllocAsync": ("CUdeviceptr *", "size_t", "CUstream"),
    "cuMemCreate": ("CUmemGenericAllocationHandle *", "size_t", "const CUmemAllocationProp *", "unsigned long long"),
    "cuModuleLoadData": ("CUmodule *", "const void *"),
    "cuModuleGetFunction": ("CUfunction *", "CUmodule", "const char *"),
    "cuLaunchKernel": ("CUfunction", *("unsigned int",) * 7, "CUstream", "void **", "void **"),
}
cuda.TYPES.update({"CUmodule": ctypes.c_void_p, "CUfunction": ctypes.c_void_p})


def load(library: str) -> ctypes.CDLL:
    """The driver library with the prototypes of everything that tests call."""
    loaded = ctypes.CDLL(library)
    cuda.declare(loaded, {**cuda.PROTOTYPES, **TEST_PROTOTYPES})
    return loaded


def copy_batch(driver: cuda.Cuda, copies: Sequence[tuple[int, int, int]], stream: int) -> int:
    """Make one batch of (destination, source, size) as the copy loop in C does; its status."""
    calls = driver.copy_calls()
    columns = [(ctypes.c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)]
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    old, new = sorted(cuda.BATCH_FORMS)
    form = cuda.argument_types(cuda.BATCH_FORMS[old if calls["has_fail_index"] else new])
    fail_index = [ctypes.byref(failed)] if calls["has_fail_index"] else []
    attributes = cuda.MemcpyAttributes.from_buffer_copy(cuda.MemcpyAttributes.from_address(calls["at_attributes"]))
    arguments = [*columns, len(copies), ctypes.byref(attributes), ctypes.byref(first), 1, *fail_index, stream]
    return int(ctypes.CFUNCTYPE(ctypes.c_int, *form)(calls["at_batch"])(*arguments))


def map_chunks(library: ctypes.CDLL, driver: cuda.Cuda, sizes: Sequence[int], handle_types: int) -> int:
    """Memory of device 0 by CUDA's virtual memory API, in chunks of these sizes that follow each other."""
    address = at = driver.reserve(sum(sizes))
    location = cuda.MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, 0)
    wanted = cuda.MemAllocationProp(MEM_ALLOCATION_TYPE_PINNED, handle_types, location)
    for size in sizes:
        allocation = ctypes.c_uint64()
        assert library.cuMemCreate(ctypes.byref(allocation), size, ctypes.byref(wanted), 0) == 0
        driver.map(at, size, allocation.value)
        driver.release(allocation.value)
        at += size
    driver.allow_access(address, sum(sizes), 0)
    return address
