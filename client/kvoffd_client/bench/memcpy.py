"""The floor of every copy: memcpy by as many threads, of as many bytes, between memory of the same kind."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from kvoffd_client.shared_memory import SharedMemory

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


class Memcpy:
    """Two touched memfds of ``size_bytes``, and ``threads`` threads that copy from one to the other."""

    def __init__(self, size_bytes: int, threads: int = 1) -> None:
        self._source, self._target = (
            SharedMemory(size_bytes, "memcpy-source"),
            SharedMemory(size_bytes, "memcpy-target"),
        )
        self._source.view.fill(1)
        self._target.view.fill(2)
        self._executor = ThreadPoolExecutor(threads)

    def speed(self, size_bytes: int, threads: int = 1) -> float:
        """Copy the first ``size_bytes``, each of ``threads`` a part in one piece; return bytes per second."""
        target, source = self._target.view.ctypes.data, self._source.view.ctypes.data
        part = size_bytes // threads
        begin = time.perf_counter()
        if threads == 1:
            _memmove(target, source, size_bytes)
        else:
            offsets = range(0, part * threads, part)
            list(self._executor.map(lambda offset: _memmove(target + offset, source + offset, part), offsets))
        return part * threads / (time.perf_counter() - begin)

    def close(self) -> None:
        """Free the memory."""
        self._executor.shutdown()
        self._source.close()
        self._target.close()

    def __enter__(self) -> Memcpy:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
