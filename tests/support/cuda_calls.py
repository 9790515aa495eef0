"""Calls of the CUDA driver that only tests make, declared as `kvoffd_proto.cuda_driver` declares the product's."""

from __future__ import annotations

import ctypes

from kvoffd_proto import cuda_driver as cuda

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


def pinned_properties(device: int, handle_types: int) -> cuda.MemAllocationProp:
    """Properties of memory for `cuMemCreate`, on one device."""
    return cuda.MemAllocationProp(
        type=cuda.MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes=handle_types,
        location=cuda.MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, device),
    )
