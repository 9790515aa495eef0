"""What only a GPU can tell, in parts: each is a function that takes a ``Setup`` and returns an object for JSON."""

from __future__ import annotations

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffd.server.daemon import EXIT_GPU_LOST
from kvoffd.transfer.cuda.gpus import list_devices
from kvoffd_client import AdminClient, NamespaceSpec, SchedulerClient
from kvoffd_proto import cuda
from tests.bench.gpu import vllm_parts
from tests.bench.gpu.copies import STREAM_JOBS, Row, has_tried_to_pin, measure_copies
from tests.bench.gpu.driver import BenchDriver
from tests.bench.gpu.setup import GIB, KIB, MIB, Found, Setup
from tests.bench.gpu.steps import Steps
from tests.bench.report_file import machine
from tests.kit.daemon import DaemonProcess
from tests.kit.exporter import Exporter
from tests.kit.waiting import wait_until

KEY = bytes(32)
NOBODY = 65534
READY_S = 60.0
WATCH_S = 2.0
"""For how long blocks are watched after the daemon was killed."""
KILLING_S = 50.0
"""After this long no further daemon is killed."""
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a command as number 1 of a pid namespace of its own, with its own /proc, which CUDA reads; root may."""
FAULT_POOL_BYTES = 32 * MIB
FAULTING_MAIN = Path(__file__).with_name("faulting_main.py")


def look_at_driver(setup: Setup) -> Found:
    """The driver, its devices, and the limits of this process."""
    driver = cuda.Cuda(setup.library)
    devices = list_devices(driver)
    return {
        "cuda": driver.version(),
        "devices": [str(device) for device in devices],
        "card": devices[0].name,
        "release": _first_line("/proc/driver/nvidia/version"),
        "machine": machine(),
        "os": platform.platform(),
        "uid": os.getuid(),
        "shmem_huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK),
    }


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def share_memory(setup: Setup) -> Found:
    """Whether engines of another user or pid namespace can register both kinds of memory."""
    if os.getuid() != 0:
        return {"other users and namespaces": "not tried: only root can"}
    found: Found = {}
    for kind in ("ordinary", "chunks"):
        with setup.daemon(256 * MIB, allowed_uids=str(NOBODY)) as daemon:
            daemon.directory.chmod(0o755)
            user = {**os.environ, "EXPORTER_UID": str(NOBODY)}
            found[f"{kind}, another user"] = _registers(setup, daemon, kind, environ=user)
        with setup.daemon(256 * MIB) as daemon:
            found[f"{kind}, another pid namespace"] = _registers(setup, daemon, kind, under=OWN_PIDS)
        with DaemonProcess(str(256 * MIB), before=OWN_PIDS, cuda_library=setup.library, pin_pool="use") as daemon:
            found[f"{kind}, both with the same pid"] = _registers(setup, daemon, kind, under=OWN_PIDS)
    return found


def _registers(setup: Setup, daemon: DaemonProcess, kind: str, **process: Any) -> Found:
    with Exporter(daemon.directory, setup.library, kind, **process) as worker:
        answer = worker.ask("ready", timeout_s=5.0)
        return {"registered": answer["ready"], "said": answer["problem"]}


@contextmanager
def scheduler(daemon: DaemonProcess) -> Iterator[SchedulerClient]:
    with SchedulerClient(daemon.directory, NamespaceSpec.named("gpu")) as client:
        assert client.wait_ready(READY_S)
        yield client


def pin_pools(setup: Setup) -> Found:
    """How fast pools are pinned, and what that and the daemon's context take of the GPU's memory."""
    bench, found = BenchDriver(setup.library), dict[str, Any]()
    for pool_bytes in setup.pools:
        with (
            bench.context(bench.devices()[0]),
            setup.daemon(pool_bytes) as daemon,
            AdminClient(daemon.directory) as admin,
        ):
            before = bench.free_bytes()
            with setup.exporter(daemon) as worker:
                began = time.monotonic()
                worker.wait_ready(READY_S)
                registered_at = time.monotonic()
                wait_until(lambda: has_tried_to_pin(admin), READY_S, interval_s=0.002)
                pinned_at = time.monotonic()
                worker.fill(1)
                pool = admin.stats().pool
                found[f"{pool_bytes / GIB:g} GiB"] = {
                    "registered_s": registered_at - began,
                    "pinned_s_after_that": pinned_at - registered_at,
                    "pinned_bytes": pool.pinned_for_gpu_bytes,
                    "refused_bytes": pool.unpinnable_bytes,
                    "gpu_bytes_of_pinning": pool.pinning_gpu_bytes,
                    "gpu_bytes_of_daemon_and_exporter": before - bench.free_bytes(),
                }
    return found


def run_tests(setup: Setup) -> Found:
    """``pytest -m gpu`` without its engines, which take minutes; on the double a few of them."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-pno:cacheprovider", "-ppytest_timeout"]
    command += ["-k", "byte_for_byte"] if setup.double else []
    command += ["tests/gpu", "--ignore", "tests/gpu/test_engines.py"]
    # This Python may have plugins that were written for another pytest.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as pytest:
        for line in pytest.stdout or ():
            print(line, end="", flush=True)  # the page has it where the part is not done in time
            lines.append(line.rstrip())
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": pytest.returncode, "summary": lines[-1] if lines else "", "failed": failed}


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
    numbers = range(blocks)
    found: Found = {}
    shape = {"layers": 8, "blocks": blocks, "page_bytes": page_bytes}
    with setup.daemon(GIB // 4 if setup.double else 8 * GIB) as daemon, setup.exporter(daemon, **shape) as worker:
        worker.wait_ready(READY_S)
        assert worker.store(keys, *numbers)["ok"]
        with scheduler(daemon) as client:

            def store() -> int:
                others = bytes(8).join(os.urandom(24) for _ in numbers) + bytes(8)
                return int(worker.store(others, *numbers)["bytes"])

            def load() -> int:
                return int(worker.load(client, keys, *numbers)["bytes"])

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
            worker.fill(number)
            assert worker.store(keys, *range(blocks // 2))["ok"]
            with scheduler(daemon) as client:
                into = range(blocks // 2, blocks)
                worker.begin_load("load_and_watch", client, keys, *into, pid=daemon.pid, for_s=WATCH_S)
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
    # A container's /dev/shm has 64 MiB by default.
    has_room = (
        os.access(pool_file.parent, os.W_OK) and shutil.disk_usage(pool_file.parent).free >= 1.25 * FAULT_POOL_BYTES
    )
    flags = {"cuda_library": setup.library, "pin_pool": "use"} | ({"pool_file": str(pool_file)} if has_room else {})
    program = [sys.executable, str(FAULTING_MAIN), setup.library]
    try:
        with DaemonProcess(str(FAULT_POOL_BYTES), program=program, **flags) as daemon, setup.exporter(daemon) as worker:
            epoch = worker.wait_ready(READY_S)["epoch"]
            pages = worker.fill(1)
            assert worker.store(KEY, 0)["ok"]
            daemon.process.send_signal(signal.SIGUSR1)
            daemon.wait_log("the fault: ")
            began = time.monotonic()
            failed = worker.store(bytes(31) + b"1", 1)
            status = daemon.process.wait(30)
            ended_s = time.monotonic() - began
            says = [line for line in daemon.log.splitlines() if "context on a GPU is lost" in line or "fault" in line]
            daemon.start()
            wait_until(lambda: worker.wait_ready(READY_S)["epoch"] != epoch, READY_S)
            again = None
            if has_room:
                with scheduler(daemon) as client:
                    loaded = worker.load(client, KEY, 2)
                again = loaded["ok"] and worker.pages()[2] == pages[0]
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


@dataclass(frozen=True)
class Part:
    """One part, and how long it may take: all together, with their ends, ten minutes."""

    run: Callable[[Setup], Mapping[str, Any]]
    most_s: float
    is_wrong: Callable[[Mapping[str, Any]], bool] = lambda found: False
    """Whether it found what must not be. Times, and what a driver refuses, are for people to judge."""


def _lacks_copies(found: Mapping[str, Any]) -> bool:
    return not all(one[name]["gb_per_s"] > 0 for one in found.values() for name in ("stores", "loads"))


PARTS = {
    "driver": Part(look_at_driver, 30),
    "sharing": Part(share_memory, 60),
    "pinning": Part(pin_pools, 70),
    # Where all were skipped nothing was tried.
    "tests": Part(run_tests, 110, lambda found: bool(found["status"] or " passed" not in found["summary"])),
    "copy": Part(copy, 90),
    "latency": Part(latency, 90, _lacks_copies),
    # Where no kill fell into a copy nothing was seen.
    "death": Part(die, 65, lambda found: bool(found["reverted"] or not found["during_loads"])),
    "fault": Part(fault, 35, lambda found: not found["status_is_right"] or found["block_is_back"] is False),
}
"""In the order in which they run; a process each, so that what hangs or crashes costs its own part only."""
VLLM_PARTS = {
    "vllm-start": Part(vllm_parts.start, 120, vllm_parts.is_unequal),
    "vllm-contest": Part(vllm_parts.contest, 210, vllm_parts.is_wrong),
    "vllm-restarts": Part(vllm_parts.restarts, 100, vllm_parts.is_wrong),
    "vllm-pressure": Part(vllm_parts.pressure, 60, vllm_parts.is_wrong),
    "vllm-equal": Part(vllm_parts.equal, 80, vllm_parts.is_wrong),
    "vllm-layouts": Part(vllm_parts.layouts, 55, vllm_parts.is_wrong),
    "vllm-hybrid": Part(vllm_parts.hybrid, 55, vllm_parts.is_wrong),
    "vllm-fp8": Part(vllm_parts.fp8, 55, vllm_parts.is_wrong),
}
"""Those with a real vLLM, the most telling first. All together have VLLM_S."""
VLLM_S = 480.0
