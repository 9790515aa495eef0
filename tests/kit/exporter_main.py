"""A worker with GPU memory, in a process of its own: obeys JSON lines on its standard input.
See ``tests.kit.exporter``.

Usage: exporter_main.py DIRECTORY LIBRARY KIND LAYERS BLOCKS PAGE_BYTES; EXPORTER_UID is the user that it becomes.
With EXPORTER_HASTY loads fail at the lifeline's end, whether or not the daemon's process is gone.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvoffd_client.transport  # noqa: F401 - the user that it becomes may not read Python's library
from kvoffd_client import NamespaceSpec, Registration, WorkerClient
from kvoffd_client.cuda_export import export_segments
from kvoffd_client.lifeline_stream import LifelineStream
from kvoffd_client.ordered_sender import Event, OrderedSender
from kvoffd_client.worker_client import Job
from kvoffd_proto import cuda
from kvoffd_proto.messages import GroupTransfer, PageRef, TensorLayout
from tests.kit.cuda_calls import load, map_chunks

CHUNK = 2 << 20
END_BYTES = 1024


class Gpu:
    """Memory of device 0: layers of blocks of pages, in one allocation, in one for each layer or in chunks of 2 MiB."""

    def __init__(self, library: str, kind: str, layers: int, blocks: int, page_bytes: int) -> None:
        self.layers, self.blocks, self.page_bytes = layers, blocks, page_bytes
        self.driver = cuda.Cuda(library)
        self.driver.init()
        self.driver.set_context(self.driver.retain_context(0))
        self.cuda = load(library or cuda.DEFAULT_LIBRARY)
        self.layer_bytes = blocks * page_bytes
        self.nbytes = layers * self.layer_bytes
        if kind == "apart":  # smaller allocations would share one
            self.addresses = [self._ordinary(max(CHUNK, self.layer_bytes)) for _ in range(layers)]
        else:
            first = self._ordinary(self.nbytes) if kind == "ordinary" else self._chunks()
            self.addresses = [first + layer * self.layer_bytes for layer in range(layers)]

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        assert status == 0, (name, status)

    def write(self, data: bytes, at: int = 0) -> None:
        for address, begin, end in self._spans(at, len(data)):
            self.call("cuMemcpyHtoD_v2", address, data[begin:end], end - begin)

    def read(self, nbytes: int, at: int = 0) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        for address, begin, end in self._spans(at, nbytes):
            self.call("cuMemcpyDtoH_v2", ctypes.addressof(data) + begin, address, end - begin)
        return data.raw

    def _spans(self, at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Where bytes that lie in one layer are, and which they are."""
        begin = 0
        while begin < nbytes:
            layer, within = divmod(at + begin, self.layer_bytes)
            end = min(nbytes, begin + self.layer_bytes - within)
            yield self.addresses[layer] + within, begin, end
            begin = end

    def ends(self, blocks: list[int]) -> list[int]:
        """Where the last END_BYTES of each page of these blocks begin: what a copy of a page writes last."""
        return [
            (layer * self.blocks + block + 1) * self.page_bytes - END_BYTES
            for layer in range(self.layers)
            for block in blocks
        ]

    def pages(self) -> list[str]:
        """A digest for each block, of all its layers."""
        data = np.frombuffer(self.read(self.nbytes), dtype=np.uint8).reshape(self.layers, self.blocks, self.page_bytes)
        return [hashlib.sha256(data[:, block].tobytes()).hexdigest() for block in range(self.blocks)]

    def _ordinary(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def _chunks(self) -> int:
        sizes = [CHUNK] * -(-self.nbytes // CHUNK)
        return map_chunks(self.cuda, self.driver, sizes, cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)

    def write_late(self, data: bytes) -> Event:
        """Has something write ``data`` in a while, as a kernel would; an event behind it."""
        context = self.driver.current_context()

        def write() -> None:
            self.driver.set_context(context)
            self.write(data)

        return _LateWriter(write)


class _LateWriter:
    """Writes later from a thread, as a kernel would, on a machine without a GPU."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._thread = threading.Timer(0.3, write)
        self._thread.start()

    def synchronize(self) -> None:
        self._thread.join()


class TorchGpu(Gpu):
    """Memory of torch's allocator, written by kernels."""

    def _ordinary(self, nbytes: int) -> int:
        import torch

        self.tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        return int(self.tensor.data_ptr())

    def write_late(self, data: bytes) -> Event:
        import torch

        staged = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        self.tensor.copy_(staged)
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


class _Nothing:
    """An event that has happened."""

    def synchronize(self) -> None: ...


def registration_of(gpu: Gpu) -> Registration:
    segments = export_segments([(address, gpu.layer_bytes) for address in gpu.addresses], gpu.driver)
    tensors = []
    for address in gpu.addresses:
        number, segment = [one for one in enumerate(segments) if one[1].address <= address][-1]
        tensors.append(TensorLayout(number, address - segment.address, gpu.page_bytes, gpu.blocks))
    pages = tuple(PageRef(layer, gpu.page_bytes) for layer in range(gpu.layers))
    return Registration(0, 1, tuple(segments), tuple(tensors), (pages,))


def main() -> None:
    if user := os.environ.get("EXPORTER_UID"):
        os.setuid(int(user))
    if os.environ.get("EXPORTER_HASTY"):  # the mistake that load_and_watch looks for
        LifelineStream.released = lambda stream, now: stream.ended  # type: ignore[method-assign]
    directory, library, kind = sys.argv[1:4]
    shape = [int(argument) for argument in sys.argv[4:7]]
    gpu = TorchGpu(library, "ordinary", *shape) if kind == "torch" else Gpu(library, kind, *shape)
    worker = WorkerClient(directory, NamespaceSpec.named("gpu"), registration_of(gpu), name="exporter")

    def transfer(keys: str, blocks: list[int]) -> list[GroupTransfer]:
        return [GroupTransfer(0, bytes.fromhex(keys), np.array(blocks, dtype="<i4").tobytes())]

    def result(job_id: int) -> dict[str, Any]:
        (one,) = worker.wait_results(30)
        assert one.job_id == job_id
        return {"ok": one.ok, "bytes": one.bytes, "error": one.error and one.error.name}

    def store(job_id: int, keys: str, blocks: list[int]) -> dict[str, Any]:
        worker.store(job_id, transfer(keys, blocks))
        return result(job_id)

    def load(job_id: int, lease_id: int, keys: str, blocks: list[int]) -> dict[str, Any]:
        worker.load(job_id, lease_id, transfer(keys, blocks))
        return result(job_id)

    def load_and_watch(pid: int, for_s: float, job_id: int, blocks: list[int], **job: Any) -> dict[str, Any]:
        """Load; use the blocks at once when that fails, and see whether what is in them stays for a while.

        A little is written to each page, so that copies that end a moment later are seen. Tells whether the daemon's
        process, of number ``pid``, was gone when the load had its result.
        """
        daemon, ends, used = os.pidfd_open(pid), gpu.ends(blocks), os.urandom(END_BYTES)
        loaded = load(job_id, blocks=blocks, **job)
        gone = bool(select.select([daemon], [], [], 0)[0])
        for end in ends:
            gpu.write(used, end)
        os.close(daemon)
        until = time.monotonic() + for_s
        stays = True
        while stays and time.monotonic() < until:
            stays = all(gpu.read(END_BYTES, end) == used for end in ends)
        return {**loaded, "gone": gone, "stays": stays}

    def ready(timeout_s: float) -> dict[str, Any]:
        return {"ready": worker.wait_ready(timeout_s), "problem": worker.problem, "epoch": worker.epoch}

    def fill(seed: int) -> dict[str, Any]:
        gpu.write(np.random.default_rng(seed).integers(0, 256, gpu.nbytes, dtype=np.uint8).tobytes())
        return {"pages": gpu.pages()}

    def race(job_id: int, keys: str, blocks: list[int], seed: int, wait: bool) -> dict[str, Any]:
        """Store what a kernel that still runs is writing, waiting for it or not."""
        data = np.random.default_rng(seed).integers(0, 256, gpu.nbytes, dtype=np.uint8).tobytes()
        event = gpu.write_late(data)
        sender = OrderedSender(lambda: event if wait else _Nothing())
        job = Job(job_id, ())
        sender.submit([job], lambda _: worker.store(job_id, transfer(keys, blocks)), lambda *_: None)
        answer = result(job_id)
        event.synchronize()
        return answer

    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "ready": ready,
        "fill": fill,
        "pages": lambda: {"pages": gpu.pages()},
        "store": store,
        "race": race,
        "load": load,
        "load_and_watch": load_and_watch,
        "unregister": lambda: {"ok": worker.unregister(10)},
    }
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(commands[name](**arguments)), flush=True)
    worker.close()


def run_forked(arguments: list[str], environ: dict[str, str]) -> int:
    """Be an exporter in a process that was forked for it with its input and output."""
    for fd, standard in zip(forkserver.get_inherited_fds(), (0, 1), strict=True):
        os.dup2(fd, standard)
    os.closerange(3, 1 << 16)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = arguments
    main()
    return 0


if __name__ == "__main__":
    main()
