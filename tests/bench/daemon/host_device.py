"""Devices that hold an engine's memory, and the host as one of them; how fast this machine copies there at best."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvoffd_client.memory import SharedMemory
from kvoffd_client.session import Closing
from tests.bench.daemon.synthetic_engine import EngineMemory, host_memory

STORE, LOAD, BOTH = "store", "load", "store and load at once"
DIRECTIONS = (STORE, LOAD, BOTH)

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


class Device(ABC):
    """What holds an engine's memory: the host, or (``gpu_device``) a GPU.

    Attributes:
        floor: what ``floor_speed`` measures, in a sentence without its full stop.
        floor_curves: floors that a plot shows: one of DIRECTIONS, and the name of its line.
    """

    floor: str
    floor_curves: Sequence[tuple[str, str]]

    @abstractmethod
    def allocate(self, size_bytes: int) -> EngineMemory:
        """Allocate memory for an engine, which closes it."""

    @abstractmethod
    def floor_speed(self, direction: str) -> float:
        """Copy in one of DIRECTIONS; return bytes per second, of both directions together."""


class Memcpy(Closing):
    """Two touched memfds of ``size_bytes``, and ``threads`` threads that copy from one to the other with memcpy."""

    def __init__(self, size_bytes: int, threads: int = 1) -> None:
        self._source = SharedMemory(size_bytes, "memcpy-source")
        self._target = SharedMemory(size_bytes, "memcpy-target")
        self._source.view.fill(1)
        self._target.view.fill(2)
        self._executor = ThreadPoolExecutor(threads)

    def speed(self, size_bytes: int, threads: int = 1) -> float:
        """Copy the first ``size_bytes``, one piece for each of ``threads``; return bytes per second."""
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
        self._executor.shutdown()
        self._source.close()
        self._target.close()


class HostDevice(Device):
    """The host: memcpy is the floor, by ``threads`` threads for each direction."""

    floor_curves = ((STORE, "memcpy, one direction"), (BOTH, "memcpy, at once"))

    def __init__(self, memcpy: Memcpy, size_bytes: int, threads: int) -> None:
        self._memcpy = memcpy
        self._size_bytes = size_bytes
        self._threads = threads
        by_threads = f"{threads} threads' memcpy" if threads > 1 else "one thread's memcpy"
        self.floor = (
            f"{by_threads} of as many bytes in large pieces between two memfds; at once: by twice as many threads"
        )

    def allocate(self, size_bytes: int) -> EngineMemory:
        return host_memory(size_bytes)

    def floor_speed(self, direction: str) -> float:
        return self._memcpy.speed(self._size_bytes, self._threads * (2 if direction == BOTH else 1))
