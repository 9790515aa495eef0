"""A CUDA driver without a GPU (stub_cuda.c), one of its own for each test. Needs a real cuda.h to be built with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from enum import IntEnum
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from kvoffd_proto.cuda import Cuda, IpcMemHandle
from tests.kit.cuda_abi import compiler
from tests.kit.cuda_calls import load, map_chunks
from tests.kit.cuda_files import include_directory
from tests.kit.waiting import wait_until

SOURCE = Path(__file__).with_suffix(".c")
COMPILER_FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wmissing-prototypes", "-Werror"]
_numbers = count()


class Ranges(IntEnum):
    """Kinds of memory that the stub knows of."""

    DEVICE = 1
    IPC = 2
    VMM = 3
    RESERVED = 4
    HOST = 5
    POOLED = 6


@cache
def _build() -> TemporaryDirectory[str]:
    """Compiles the library; skips the test where there is no C compiler, or no cuda.h."""
    directory = TemporaryDirectory(prefix="kvoffd-stub-")
    command = [
        compiler(),
        *COMPILER_FLAGS,
        "-shared",
        "-fPIC",
        "-isystem",
        str(include_directory("newest")),
        str(SOURCE),
    ]
    subprocess.run([*command, "-o", f"{directory.name}/libcuda.so", "-lpthread"], check=True)
    return directory


def fresh_stub() -> StubCuda:
    """A driver that nobody else uses: the loader takes a copy of the file for another library."""
    directory = Path(_build().name)
    return StubCuda(Path(shutil.copy(directory / "libcuda.so", directory / f"libcuda-{next(_numbers)}.so")))


class StubCuda:
    """The library loaded a first time, its knobs, and what it saw.

    Args:
        library: a file that nobody else has loaded.
    """

    def __init__(self, library: str | Path) -> None:
        self.path = str(library)
        self._library = load(self.path)
        self._library.stub_log_length.restype = ctypes.c_size_t

    def driver(self) -> Cuda:
        return Cuda(self.path)

    def set(self, what: str, value: int) -> None:
        """version, devices, same_pid_allowed, batch_missing, seed; import_ranges: imports have a range;
        translated: GPUs have a host's memory at other addresses; integrated: they take the host's memory.
        """
        self._library.stub_set(what.encode(), value)

    def fail(self, call: str, nth: int = 1, status: int = 999) -> None:
        """The n-th call from now fails; 0 for every one."""
        self._library.stub_fail(call.encode(), nth, status)

    def ignore(self, call: str) -> None:
        """Every such call succeeds from now on and does nothing: as if our code did not make it."""
        self.fail(call, 0, -1)

    def hang(self, call: str, nth: int = 1) -> None:
        """The n-th call from now does not return before ``release``; 0 for every one."""
        self._library.stub_hang(call.encode(), nth)

    def release(self) -> None:
        self._library.stub_release()

    def wait_hanging(self) -> None:
        wait_until(lambda: self._library.stub_hanging() > 0)

    def calls(self, name: str) -> int:
        return int(self._library.stub_calls(name.encode()))

    def ranges(self, kind: Ranges) -> int:
        return int(self._library.stub_ranges(int(kind)))

    def contexts(self, device: int = 0) -> int:
        """How often the device's primary context is retained."""
        return int(self._library.stub_contexts(device))

    def made_contexts(self) -> int:
        return int(self._library.stub_made_contexts())

    def log(self) -> list[str]:
        room = int(self._library.stub_log_length()) + 4096
        text = ctypes.create_string_buffer(room)
        self._library.stub_log(text, room)
        return text.value.decode().splitlines()

    def start(self) -> int:
        """Makes the context of device 0 and makes it current in this thread."""
        driver = self.driver()
        driver.init()
        context = driver.retain_context(0)
        driver.set_context(context)
        return context

    def allocate(self, size: int) -> DeviceBuffer:
        """Ordinary device memory; needs a context."""
        address = ctypes.c_uint64()
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), size) == 0
        return DeviceBuffer(address.value, size, self.ipc_handle(address.value))

    def allocate_pooled(self, size: int, stream: int) -> DeviceBuffer:
        """Memory of cudaMallocAsync."""
        address = ctypes.c_uint64()
        assert self._library.cuMemAllocAsync(ctypes.byref(address), size, stream) == 0
        return DeviceBuffer(address.value, size)

    def add_range(self, kind: Ranges, address: int, size: int) -> None:
        """Has host memory count as device memory, or as registered."""
        self._library.stub_add_range(int(kind), ctypes.c_uint64(address), ctypes.c_size_t(size))

    def free(self, buffer: DeviceBuffer) -> None:
        assert self._library.cuMemFree_v2(buffer.address) == 0

    def map_chunks(self, sizes: list[int], handle_types: int = 1) -> DeviceBuffer:
        """Memory of the virtual memory API, in chunks; needs a context."""
        return DeviceBuffer(map_chunks(self._library, self.driver(), sizes, handle_types), sum(sizes))

    def ipc_handle(self, address: int) -> bytes:
        handle = IpcMemHandle()
        assert self._library.cuIpcGetMemHandle(ctypes.byref(handle), address) == 0
        return bytes(handle)


class DeviceBuffer:
    """Device memory that the test can look into, since it is host memory."""

    def __init__(self, address: int, size: int, handle: bytes = b"") -> None:
        self.address = address
        self.handle = handle
        self.view: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
