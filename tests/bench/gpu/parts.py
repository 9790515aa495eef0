"""What only a GPU can tell, in parts: each is a function that takes a ``Setup`` and returns an object for JSON."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffd.server.daemon import EXIT_GPU_LOST
from kvoffd.transfer.cuda.gpus import list_devices
from kvoffd_client import AdminClient, NamespaceSpec, SchedulerClient
from kvoffd_proto import cuda
from kvoffd_proto.messages import GroupKeys
from tests.bench.gpu.copies import STREAM_JOBS, Row, measure_copies
from tests.bench.gpu.driver import BenchDriver
from tests.bench.gpu.steps import Steps
from tests.bench.report_file import machine
from tests.kit.cuda_calls import SRC_ACCESS_ORDER_ANY, copy_batch
from tests.kit.daemon import DaemonProcess
from tests.kit.exporter import Exporter
from tests.kit.waiting import wait_until

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KEY = bytes(32)
NOBODY = 65534
READY_S = 60.0
WATCH_S = 2.0
"""For how long blocks are watched after the daemon was killed."""
KILLING_S = 50.0
"""After this long no further daemon is killed."""
BATCH_PIECES = 512
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a command as number 1 of a pid namespace of its own, with its own /proc, which CUDA reads; root may."""
NVIDIA_SMI_S = 10.0
"""Where no process has the GPU open, it starts the GPU first, which takes seconds."""
LOW_MEMLOCK = 8 << 20
"""Docker's and systemd's, for processes that are not root's."""
MEMORY_SHARE = 0.3
"""Of what is available, the largest pool that is pinned."""
FAULT_POOL_BYTES = 32 * MIB
FAULTING_MAIN = Path(__file__).with_name("faulting_main.py")

Found = dict[str, object]


@dataclass(frozen=True)
class Setup:
    """Where and how large to measure.

    Attributes:
        library: path of the driver; "" for the system's.
        double: whether it is the tests' double, on which nothing takes as long as on a GPU, and sizes are small.
    """

    library: str
    double: bool

    def daemon(self, pool_bytes: int, **flags: str) -> DaemonProcess:
        """A daemon that uses CUDA while engines are there and no longer; to be started."""
        used = {"cuda_library": self.library, "pin_pool": "use", **flags}
        return DaemonProcess(str(pool_bytes), limits={"pin_linger_s": 0}, **used)

    def exporter(self, daemon: DaemonProcess, kind: str = "ordinary", **shape: int) -> Exporter:
        return Exporter(daemon.directory, self.library, kind, **shape)

    @cached_property
    def pools(self) -> list[int]:
        """Sizes of pools that are pinned."""
        if self.double:
            return [64 * MIB, 128 * MIB]
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * KIB
        return [size for size in (GIB, 4 * GIB, 16 * GIB, 32 * GIB) if size <= MEMORY_SHARE * available]


def tried(what: Callable[[], object]) -> object:
    """What came of it, or the error in words. It is printed too, for a part that is not done in time."""
    try:
        found = what()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    print(found, flush=True)
    return found


@contextmanager
def context(setup: Setup) -> Iterator[BenchDriver]:
    """The driver with a context on GPU 0 in this thread."""
    driver = BenchDriver(setup.library)
    with driver.context(driver.devices()[0]):
        yield driver


def look_at_driver(setup: Setup) -> Found:
    """The driver, its devices, what it says of ordinary memory, and the limits of this process."""
    driver = cuda.Cuda(setup.library)
    devices = list_devices(driver)
    found: Found = {
        "cuda": driver.version(),
        "devices": [str(device) for device in devices],
        "card": devices[0].name,
        "release": _first_line("/proc/driver/nvidia/version"),
        "machine": machine(),
        "os": platform.platform(),
        "uid": os.getuid(),
        "shmem_huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "NVIDIA_VISIBLE"))
        },
    }
    with context(setup) as bench:
        address = bench.allocate(4 * MIB)
        found["batches"] = "batch" in driver.copy_calls()
        found["ordinary_memory"] = {
            "device": tried(lambda: bench.pointer_attribute(cuda.POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)),
            "has_ipc_handle": tried(
                lambda: bench.pointer_attribute(cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
            ),
            "is_pooled": tried(lambda: bench.pointer_attribute(cuda.POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address)),
            "range": tried(lambda: bench.address_range(address)[1]),
        }
        bench.free(address)
    if shutil.which("nvidia-smi"):
        found["nvidia_smi"] = tried(_ask_nvidia_smi)
    return found


def _ask_nvidia_smi() -> list[str]:
    asked = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,mig.mode.current,compute_mode"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        return process.communicate(timeout=NVIDIA_SMI_S)[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # in a call of a driver that hangs it does not end
            process.communicate(timeout=1.0)
        raise


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def share_memory(setup: Setup) -> Found:
    """Both kinds of memory: exported, mapped, copied; by another user; and let go when the exporter is killed."""
    found: Found = {}
    for kind in ("ordinary", "chunks"):
        with setup.daemon(256 * MIB) as daemon:
            found[kind] = tried(partial(_share, setup, daemon, kind))
        if os.getuid() == 0:
            with setup.daemon(256 * MIB, allowed_uids=str(NOBODY)) as daemon:
                daemon.directory.chmod(0o755)
                user = {**os.environ, "EXPORTER_UID": str(NOBODY)}
                found[f"{kind}, another user"] = tried(partial(_registers, setup, daemon, kind, environ=user))
            with setup.daemon(256 * MIB) as daemon:
                what = f"{kind}, another pid namespace"
                found[what] = tried(partial(_registers, setup, daemon, kind, under=OWN_PIDS))
            with _NumberOne(str(256 * MIB), cuda_library=setup.library, pin_pool="use") as daemon:
                what = f"{kind}, both with the same pid"
                found[what] = tried(partial(_registers, setup, daemon, kind, under=OWN_PIDS))
        else:
            found[f"{kind}, other users and namespaces"] = {"registered": None, "said": "not tried: only root can"}
    return found


class _NumberOne(DaemonProcess):
    """A daemon in a pid namespace of its own."""

    @property
    def program(self) -> list[str]:
        return [*OWN_PIDS, *super().program]


def _share(setup: Setup, daemon: DaemonProcess, kind: str) -> Found:
    with AdminClient(daemon.directory) as admin, setup.exporter(daemon, kind) as worker:
        began = time.monotonic()
        worker.wait_ready(READY_S)
        registered_s = time.monotonic() - began
        pages = worker.ask("fill", seed=1)["pages"]
        stored = worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])
        with scheduler(daemon) as client:
            worker.ask("fill", seed=2)
            loaded = worker.ask("load", job_id=2, lease_id=lease(client), keys=KEY.hex(), blocks=[3])
            right = worker.ask("pages")["pages"][3] == pages[0]
        worker.kill()
        began = time.monotonic()
        wait_until(lambda: not sum(session.registered_bytes for session in admin.sessions().sessions), READY_S)
        return {
            "registered_s": registered_s,
            "stored": stored["ok"],
            "loaded": loaded["ok"],
            "right_bytes": right,
            "let_go_after_kill_s": time.monotonic() - began,
        }


def _registers(setup: Setup, daemon: DaemonProcess, kind: str, **process: Any) -> Found:
    with Exporter(daemon.directory, setup.library, kind, **process) as worker:
        answer = worker.ask("ready", timeout_s=5.0)
        return {"registered": answer["ready"], "said": answer["problem"]}


@contextmanager
def scheduler(daemon: DaemonProcess) -> Iterator[SchedulerClient]:
    with SchedulerClient(daemon.directory, NamespaceSpec.named("gpu")) as client:
        assert client.wait_ready(READY_S)
        yield client


def lease(client: SchedulerClient, keys: bytes = KEY) -> int:
    future = client.lookup([GroupKeys(0, keys)])
    assert future.wait(READY_S)
    return future.lease_id


def pin_pools(setup: Setup) -> Found:
    """How fast pools are pinned, what that and the daemon's context take of the GPU's memory, and what chunks stall."""
    with context(setup) as bench:
        found: Found = {f"{size / GIB:g} GiB": tried(partial(_pin, setup, bench, size)) for size in setup.pools}
        small, product, large = (8 * MIB, 16 * MIB, 32 * MIB) if setup.double else (64 * MIB, 256 * MIB, GIB)
        for chunk, pages in ((small, "4 KiB"), (product, "4 KiB"), (large, "4 KiB"), (product, "huge")):
            name = f"in chunks of {chunk // MIB} MiB, {pages} pages"
            found[name] = tried(partial(_pin_chunks, setup, chunk, huge=pages == "huge"))
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(LOW_MEMLOCK, hard) if hard >= 0 else LOW_MEMLOCK, hard))
        found[f"the same under ulimit -l {LOW_MEMLOCK // KIB}"] = tried(partial(_pin_chunks, setup, product, huge=True))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
        with Steps() as alone:
            time.sleep(0.2 if setup.double else 2.0)
            found["steps of another process, alone"] = alone.end()
        return found


def _pin_chunks(setup: Setup, chunk: int, *, huge: bool) -> Found:
    """Pin touched memory of this process chunk by chunk, while another process computes."""
    total, driver = (64 * MIB if setup.double else min(4 * GIB, setup.pools[-1])), cuda.Cuda(setup.library)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, total, private) as memory, Steps() as steps:
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        view = np.frombuffer(memory, dtype=np.uint8)
        view[::4096] = 1
        chunks = range(view.ctypes.data, view.ctypes.data + total, chunk)
        del view
        in_huge_pages = int(_smaps_rollup()["AnonHugePages"].split()[0]) * KIB
        began = time.perf_counter()
        for address in chunks:
            driver.register_host(address, chunk)
        seconds = time.perf_counter() - began
        beside = steps.end()
        for address in chunks:
            driver.unregister_host(address)
        return {"gb_per_s": total / seconds / 1e9, "bytes_in_huge_pages": in_huge_pages, "steps_beside": beside}


def _smaps_rollup() -> dict[str, str]:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _pin(setup: Setup, bench: BenchDriver, pool_bytes: int) -> Found:
    with setup.daemon(pool_bytes) as daemon, AdminClient(daemon.directory) as admin:
        before = bench.free_bytes()
        with setup.exporter(daemon) as worker:
            began = time.monotonic()
            worker.wait_ready(READY_S)
            registered_at = time.monotonic()
            wait_until(lambda: _tried_bytes(admin) >= pool_bytes, READY_S, interval_s=0.002)
            pinned_at = time.monotonic()
            worker.ask("fill", seed=1)
            pool = admin.stats().pool
            return {
                "registered_s": registered_at - began,
                "pinned_s_after_that": pinned_at - registered_at,
                "pinned_bytes": pool.pinned_for_gpu_bytes,
                "refused_bytes": pool.unpinnable_bytes,
                "gpu_bytes_of_pinning": pool.pinning_gpu_bytes,
                "gpu_bytes_of_daemon_and_exporter": before - bench.free_bytes(),
            }


def _tried_bytes(admin: AdminClient) -> int:
    pool = admin.stats().pool
    return pool.pinned_for_gpu_bytes + pool.unpinnable_bytes


def run_tests(setup: Setup) -> Found:
    """``pytest -m gpu`` without its engines, which take minutes; on the double a few of them."""
    plugins = [f"-p{name}" for name in ("no:cacheprovider", "pytest_timeout")]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *plugins]
    command += ["-k", "byte_for_byte"] if setup.double else []
    command.append("tests/gpu")
    command += ["--ignore", "tests/gpu/test_engines.py"]
    # This Python may have plugins that were written for another pytest.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as pytest:
        for line in pytest.stdout or ():
            print(line, end="", flush=True)  # what is told where the part is not done in time
            lines.append(line.rstrip())
    return {
        "status": pytest.returncode,
        "summary": lines[-1] if lines else "",
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        "end": [] if pytest.returncode == 0 else lines[-60:],
    }


def batches(setup: Setup) -> Found:
    """A batch beside single copies, by size of a piece and order of its sources; then a million pieces in batches."""
    with ExitStack() as undo:
        bench = undo.enter_context(context(setup))
        if "batch" not in bench.copy_calls():
            return {"said": "this driver has no batches"}
        nbytes, rounds = (4 * MIB, 2) if setup.double else (128 * MIB, 5)
        stream = bench.create_stream(urgent=False)
        undo.callback(bench.destroy_stream, stream)
        gpu, back, host = bench.allocate(nbytes), bench.allocate(nbytes), bench.allocate_pinned(2 * nbytes)
        for free, address in ((bench.free, gpu), (bench.free, back), (bench.free_pinned, host)):
            undo.callback(free, address)
        pattern = random.Random(1).randbytes(nbytes)
        ctypes.memmove(host, pattern, nbytes)

        def right() -> bool:
            """Whether the GPU has the pattern; it is spoiled there for the next time."""
            bench.copy(host + nbytes, gpu, nbytes, stream)
            bench.copy(gpu, back, nbytes, stream)
            bench.wait_stream(stream)
            return ctypes.string_at(host + nbytes, nbytes) == pattern

        def in_batches(pieces: list[tuple[int, int, int]], order: int) -> None:
            for first in range(0, len(pieces), BATCH_PIECES):
                status = copy_batch(bench, pieces[first : first + BATCH_PIECES], stream, order)
                if status:
                    raise bench.error(cuda.BATCH_SYMBOL, status)

        def one_by_one(pieces: list[tuple[int, int, int]]) -> None:
            for piece in pieces:
                bench.copy(*piece, stream)

        ways = {
            "single copies": one_by_one,
            "batch, order STREAM": partial(in_batches, order=cuda.MEMCPY_SRC_ACCESS_ORDER_STREAM),
            "batch, order ANY": partial(in_batches, order=SRC_ACCESS_ORDER_ANY),
        }

        def speed(way: Callable[[list[tuple[int, int, int]]], None], size: int) -> Found:
            pieces = [(gpu + at, host + at, size) for at in range(0, nbytes, size)]
            random.Random(2).shuffle(pieces)
            found, seconds = True, []
            for _ in range(rounds):
                began = time.perf_counter()
                way(pieces)
                bench.wait_stream(stream)
                seconds.append(time.perf_counter() - began)
                found = found and right()
            return {"gb_per_s": nbytes / min(seconds) / 1e9, "right_bytes": found}

        found: Found = {}
        for size in (64 * KIB,) if setup.double else (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB):
            for name, way in ways.items():
                found[f"{size // KIB} KiB, {name}"] = tried(partial(speed, way, size))
        pieces = [(gpu + at, host + at, 4 * KIB) for at in range(0, nbytes, 4 * KIB)]
        copied, began, stayed = 0, time.monotonic(), True
        while copied < (10_000 if setup.double else 1_000_000):
            in_batches(pieces, cuda.MEMCPY_SRC_ACCESS_ORDER_STREAM)
            copied += len(pieces)
            stayed = right() and stayed
        found["soak"] = {"pieces": copied, "seconds": time.monotonic() - began, "right_bytes": stayed}
        return found


def copy(setup: Setup) -> dict[str, list[Row]]:
    """Stores, loads and both at once, and one at a time, in pieces of 4 KiB to 2 MiB, each beside its floor."""
    sizes, job_bytes = (
        ([16 * KIB, 64 * KIB], 4 * MIB) if setup.double else ([4 * KIB << step for step in range(10)], 128 * MIB)
    )
    with setup.daemon(2 * job_bytes * STREAM_JOBS) as daemon:
        results = measure_copies(daemon.directory, sizes, job_bytes, 2 if setup.double else 5, sizes[:3:2])
        with AdminClient(daemon.directory) as admin:
            stats = admin.stats()
        return {"results": results, "refused_batches": [stats.store.refused_batches, stats.load.refused_batches]}


def latency(setup: Setup) -> Found:
    """Steps of a process that decodes: alone, beside loads, beside stores, alone again; by size of a piece."""
    sizes = [64 * KIB] if setup.double else [16 * KIB, 64 * KIB, MIB]
    return {f"pieces of {size // KIB} KiB": _latency(setup, size) for size in sizes}


def _latency(setup: Setup, page_bytes: int) -> Found:
    seconds, blocks = (0.2, 8) if setup.double else (4.0, 64)
    keys = b"".join(number.to_bytes(32, "big") for number in range(blocks))
    numbers = list(range(blocks))
    job = iter(range(1, 1 << 20))
    found: Found = {}
    shape = {"layers": 8, "blocks": blocks, "page_bytes": page_bytes}
    with setup.daemon(GIB // 4 if setup.double else 8 * GIB) as daemon, setup.exporter(daemon, **shape) as worker:
        worker.wait_ready(READY_S)
        assert worker.ask("store", job_id=next(job), keys=keys.hex(), blocks=numbers)["ok"]
        with scheduler(daemon) as client:

            def store() -> int:
                others = bytes(8).join(os.urandom(24) for _ in numbers) + bytes(8)
                stored = worker.ask("store", job_id=next(job), keys=others.hex(), blocks=numbers)
                return int(stored["bytes"])

            def load() -> int:
                asked = {"job_id": next(job), "lease_id": lease(client, keys), "keys": keys.hex(), "blocks": numbers}
                return int(worker.ask("load", **asked)["bytes"])

            def nothing() -> int:
                time.sleep(0.01)
                return 0

            # Loads first: stores evict what is loaded.
            for name, work in {"alone": nothing, "loads": load, "stores": store, "alone again": nothing}.items():
                with Steps() as steps:
                    nbytes, until = 0, time.monotonic() + seconds
                    while time.monotonic() < until:
                        nbytes += work()
                    found[name] = {"gb_per_s": nbytes / seconds / 1e9, **steps.end()}
    return found


def die(setup: Setup) -> Found:
    """``kill -9`` of the daemon while it loads; then the engine uses the blocks again, and nothing may land in them."""
    blocks, rounds = (16, 2) if setup.double else (64, 8)
    shape = {"layers": 8, "blocks": blocks, "page_bytes": 256 * KIB}
    keys = b"".join(number.to_bytes(32, "big") for number in range(blocks // 2))
    began, chance, kills = time.monotonic(), random.Random(1), []
    with setup.daemon(GIB // 4 if setup.double else GIB) as daemon, setup.exporter(daemon, **shape) as worker:
        for number in range(rounds):
            worker.wait_ready(READY_S)
            worker.ask("fill", seed=number)
            assert worker.ask("store", job_id=2 * number, keys=keys.hex(), blocks=list(range(blocks // 2)))["ok"]
            with scheduler(daemon) as client:
                load: Mapping[str, object] = {
                    "job_id": 2 * number + 1,
                    "lease_id": lease(client, keys),
                    "keys": keys.hex(),
                    "blocks": list(range(blocks // 2, blocks)),
                }
                worker.send("load_and_watch", **load, pid=daemon.pid, for_s=WATCH_S)
                after_s = chance.uniform(0.0, 0.006)
                time.sleep(after_s)
                daemon.kill()
                kills.append({"killed_after_s": after_s, **worker.answer()})
            if number == rounds - 1 or time.monotonic() - began > KILLING_S:
                break
            daemon.start()
    return {
        "kills": kills,
        "during_loads": sum(not one["ok"] for one in kills),
        "reverted": sum(not one["stays"] for one in kills),
    }


def fault(setup: Setup) -> Found:
    """A kernel in the daemon's own context writes where nothing is: the daemon ends, the next one has the pool."""
    pool_file = Path("/dev/shm") / f"kvoffd-gpu-{os.getpid()}.pool"
    flags = {"pool_file": str(pool_file)} if _has_room(pool_file.parent) else {}
    try:
        with _FaultingDaemon(setup, **flags) as daemon, setup.exporter(daemon) as worker:
            epoch = worker.wait_ready(READY_S)["epoch"]
            pages = worker.ask("fill", seed=1)["pages"]
            assert worker.ask("store", job_id=1, keys=KEY.hex(), blocks=[0])["ok"]
            daemon.process.send_signal(signal.SIGUSR1)
            daemon.wait_log("the fault: ")
            began = time.monotonic()
            failed = worker.ask("store", job_id=2, keys=bytes(31).hex() + "01", blocks=[1])
            status = daemon.process.wait(30)
            ended_s = time.monotonic() - began
            says = [line for line in daemon.log.splitlines() if "context on a GPU is lost" in line or "fault" in line]
            daemon.start()
            wait_until(lambda: worker.wait_ready(READY_S)["epoch"] != epoch, READY_S)
            again = None
            if flags:
                with scheduler(daemon) as client:
                    loaded = worker.ask("load", job_id=3, lease_id=lease(client), keys=KEY.hex(), blocks=[2])
                again = loaded["ok"] and worker.ask("pages")["pages"][2] == pages[0]
        return {
            "job": failed["error"],
            "status": status,
            "status_is_right": status == EXIT_GPU_LOST,
            "ended_s": ended_s,
            "log": [re.sub(r"\s+", " ", line) for line in says],
            "block_is_back": again,
        }
    finally:
        for path in pool_file.parent.glob(f"{pool_file.name}*"):  # with what the policy knows
            path.unlink()


def _has_room(directory: Path) -> bool:
    """Whether a pool file fits: a container's /dev/shm has 64 MiB unless it is told otherwise."""
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free >= 1.25 * FAULT_POOL_BYTES


class _FaultingDaemon(DaemonProcess):
    def __init__(self, setup: Setup, **flags: str) -> None:
        used = {"cuda_library": setup.library, "pin_pool": "use"}
        super().__init__(str(FAULT_POOL_BYTES), **used, **flags)
        self._library = setup.library

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(FAULTING_MAIN), self._library]


@dataclass(frozen=True)
class Part:
    """One part, and how long it may take: all together, with their ends, ten minutes."""

    run: Callable[[Setup], Mapping[str, object]]
    most_s: float


PARTS = {
    "driver": Part(look_at_driver, 30),
    "sharing": Part(share_memory, 60),
    "pinning": Part(pin_pools, 70),
    "tests": Part(run_tests, 110),
    "batches": Part(batches, 50),
    "copy": Part(copy, 90),
    "latency": Part(latency, 90),
    "death": Part(die, 65),
    "fault": Part(fault, 35),
}
"""In the order in which they run; a process each, so that what hangs or crashes costs its own part only."""


def is_wrong(name: str, found: Mapping[str, Any]) -> bool:
    """Whether a part ran and found what must not be. Times, and what a driver refuses, are for people to judge."""
    match name:
        case "sharing" | "pinning":
            return any(isinstance(one, str) or one.get("right_bytes") is False for one in found.values())
        case "latency":  # the copies beside the steps must have been there
            return not all(one[name]["gb_per_s"] > 0 for one in found.values() for name in ("stores", "loads"))
        case "batches":
            return any(isinstance(one, dict) and one["right_bytes"] is False for one in found.values())
        case "tests":
            return bool(found["status"] or " passed" not in found["summary"])  # all skipped: nothing was tried
        case "death":
            return bool(found["reverted"] or not found["during_loads"])  # no kill fell into a copy: nothing was seen
        case "fault":
            return not found["status_is_right"] or found["block_is_back"] is False
    return False
