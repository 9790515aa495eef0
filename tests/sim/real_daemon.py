"""The real daemon in this process, on real sockets, with real clients in a thread beside it: one life of it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path

from kvoffd.config import Config, Limits
from kvoffd.errors import KvoffdError
from kvoffd.server.daemon import Daemon
from kvoffd_client import ClientOptions, NamespaceSpec, Registration, SchedulerClient, SharedMemory, WorkerClient
from kvoffd_client.jobs import GroupTransfer
from kvoffd_proto.messages import GroupKeys, PageRef, TensorLayout
from tests.kit.open_files import open_files
from tests.sim.rank import ids

PAGE = 4096
BLOCKS = 8
KEYS = b"".join(bytes([number]) * 32 for number in range(4))
OPTIONS = ClientOptions(handshake_timeout_s=0.3, request_timeout_s=0.3, backoff_max_s=0.05)
PATIENCE_S = 1.5
SPEC = NamespaceSpec.named("live")


class Traces:
    """What a daemon may leave behind in its process: descriptors, mappings, threads."""

    def __init__(self) -> None:
        gc.collect()
        self.descriptors = sorted(link.split(":[")[0] for _, link in open_files())
        maps = Path("/proc/self/maps").read_text().splitlines()
        self.mappings = sum("memfd:kvoffd" in line or ".pool" in line for line in maps)
        self.threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffd"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traces) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return str(vars(self))


def live(directory: Path, pool_file: Path | None) -> str:
    """Start a daemon, store, look up and load, stop it. Returns why it did not start; empty when it did.

    Raises whatever ends the daemon but a refusal to start, and AssertionError when a load that was ok brought a wrong
    byte or a job got no result.
    """
    config = Config(
        directory=directory,
        pool_bytes=4 << 20,
        pool_file=str(pool_file) if pool_file else "",
        http_address="",
        shutdown_deadline_s=0.5,
        limits=Limits(touch_threads=1),
    )
    failures: list[BaseException] = []

    async def serve() -> None:
        daemon = Daemon(config)
        loop = asyncio.get_running_loop()

        def use() -> None:
            try:
                _use(directory, ended)
            except BaseException as error:
                failures.append(error)
            finally:
                loop.call_soon_threadsafe(daemon._stop.set)

        ended = threading.Event()
        client = threading.Thread(target=use, name="client")
        client.start()
        try:
            await daemon.serve()
        finally:
            ended.set()
            await loop.run_in_executor(None, client.join)

    reason = ""
    try:
        asyncio.run(serve())
    except KvoffdError as error:
        reason = error.message
    if failures:
        raise failures[0]
    return reason


def _use(directory: Path, ended: threading.Event) -> None:
    """A client's whole day. Not being served is no failure; being served wrong bytes, or left waiting, is."""
    with SharedMemory(BLOCKS * PAGE, "live") as memory:
        page, tensor = PageRef(0, PAGE), TensorLayout(0, 0, PAGE, BLOCKS)
        registration = Registration(0, 1, (memory,), (tensor,), ((page,),))
        worker = WorkerClient(directory, SPEC, registration, options=OPTIONS)
        scheduler = SchedulerClient(directory, SPEC, options=OPTIONS)
        try:
            memory.view[: 4 * PAGE] = content = [block // PAGE + 1 for block in range(4 * PAGE)]
            until = time.monotonic() + PATIENCE_S
            while not (worker.wait_ready(0.02) and scheduler.wait_ready(0.02)):
                if ended.is_set() or time.monotonic() > until:
                    return
            worker.store(1, [GroupTransfer(0, KEYS, ids(range(4)))])
            _wait_for(worker, 1)
            future = scheduler.lookup([GroupKeys(0, KEYS)])
            future.wait(PATIENCE_S)
            found = future.leading_ready()
            if found:
                blocks = ids(range(4, 4 + found))
                worker.load(2, future.lease_id, [GroupTransfer(0, KEYS[: found * 32], blocks)])
                if _wait_for(worker, 2):
                    assert memory.view[4 * PAGE : (4 + found) * PAGE].tolist() == content[: found * PAGE], "wrong bytes"
                scheduler.release(future.lease_id)
        finally:
            scheduler.close()
            worker.close()


def _wait_for(worker: WorkerClient, job_id: int) -> bool:
    until = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < until:
        for result in worker.wait_results(0.1):
            if result.job_id == job_id:
                return result.ok
    raise AssertionError(f"job {job_id} got no result")
