"""The contest's sides: what stands behind vLLM's own prefix cache, with the settings that its documentation gives.

A cache outside the engine is a process that can be started, stopped and emptied, and the engine has a connector to it.
``None`` of these is a side too: vLLM's own prefix cache alone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvoffd_client import AdminClient
from tests.bench.report_file import ROOT
from tests.kit.closing import Starting
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import connector_config, wait_connected
from tests.kit.filled_tiers import tiers_of
from tests.kit.ports import free_ports
from tests.kit.waiting import wait_until

NONE, KVOFFD, LMCACHE = "none", "kvoffd", "lmcache"
SIDES = (NONE, KVOFFD, LMCACHE)
CONTEST_PYTHON = ROOT / ".venv-contest" / "bin" / "python"
"""Python of the environment that has LMCache (``build_venv.py``); its other packages are those of ``.venv``."""
POOL_GIB = 2
"""Memory of each cache outside the engine."""
CACHE_START_S, CACHE_STOP_S, SETTLED_S = 60.0, 30.0, 60.0
LOOKS = 10
"""A cache is idle if it has nothing to do at this many looks, 50 ms apart."""
LMCACHE_SETTLES_S = 2.0
"""LMCache's own tests wait this long for its stores, of which its server reports no queue."""
S3_USER = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret"}


@dataclass(frozen=True)
class Tiers:
    """What a cache has behind its memory.

    Attributes:
        disk: a directory of a disk.
        redis: port of a Redis on 127.0.0.1, of which every node may read and write.
        s3: port of an S3 on 127.0.0.1.
        memory: a directory in memory that outlives the process, and not the node.
    """

    disk: Path | None = None
    redis: int | None = None
    s3: int | None = None
    memory: Path | None = None


class Cache(Starting):
    """A cache outside the engine.

    Attributes:
        name: the side's.
        python: what runs its engine.
        tiers: what it has from its next start on.
    """

    name = NONE
    python = Path(sys.executable)

    def __init__(self, tiers: Tiers = Tiers()) -> None:
        self.tiers = tiers

    @property
    def transfer_config(self) -> dict[str, Any] | None:
        """The engine's ``kv_transfer_config``."""
        return None

    @property
    def environ(self) -> dict[str, str]:
        """The engine's environment, besides that of all sides."""
        return {}

    @property
    def pid(self) -> int | None:
        """The process, None where there is none."""
        return None

    @property
    def log(self) -> str:
        return ""

    def start(self) -> Self:
        return self

    def stop(self) -> None:
        """End it as a service manager does. It can be started again."""

    def clear(self) -> None:
        """Forget everything in memory."""

    def wait_connected(self, pids: Collection[int]) -> None:
        """Wait until an engine with these processes is connected."""

    def settle(self) -> None:
        """Wait until everything that was computed is stored, and written to the tiers."""

    def close(self) -> None:
        self.stop()


class Kvoffd(Cache):
    """The daemon, with the connector's and its own defaults."""

    name = KVOFFD

    def __init__(self, tiers: Tiers = Tiers()) -> None:
        super().__init__(tiers)
        self.directory = Path(tempfile.mkdtemp(prefix="kvoffd-contest-", dir="/tmp"))
        self._daemon: DaemonProcess | None = None

    @property
    def transfer_config(self) -> dict[str, Any]:
        return connector_config(self.directory, {})

    @property
    def pid(self) -> int | None:
        return self._daemon.pid if self._daemon and self._daemon.running else None

    @property
    def log(self) -> str:
        return self._daemon.log if self._daemon else ""

    @property
    def _settings(self) -> dict[str, str]:
        tiers, found = self.tiers, dict[str, str]()
        if tiers.disk:
            found["disk"] = f"{tiers.disk}={POOL_GIB}GiB"
        if tiers.memory:
            found["pool_file"] = str(tiers.memory / "pool")
        if tiers.redis:
            found["shared"] = f"redis://127.0.0.1:{tiers.redis}"
        if tiers.s3:
            found["shared"] = f"s3://bucket?endpoint=http://127.0.0.1:{tiers.s3}&region=us-east-1"
        return found

    def start(self) -> Self:
        size = f"{POOL_GIB}GiB"
        self._daemon = DaemonProcess(size, self.directory, fork=False, environ=S3_USER, **self._settings).start()
        return self

    def stop(self) -> None:
        if self._daemon and self._daemon.running:
            self._daemon.stop()

    def clear(self) -> None:
        with AdminClient(self.directory) as admin:
            admin.clear()

    def wait_connected(self, pids: Collection[int]) -> None:
        wait_connected(self.directory, 1, CACHE_START_S, lambda: pids)

    def settle(self) -> None:
        looks = 0
        with AdminClient(self.directory) as admin:

            def idle() -> bool:
                nonlocal looks
                stats = admin.stats()
                queued = stats.store.running_jobs + stats.store.queued_jobs
                queued += sum(one.queued_writes for one in tiers_of(stats))
                looks = 0 if queued else looks + 1
                return looks >= LOOKS

            wait_until(idle, SETTLED_S, interval_s=0.05)

    def close(self) -> None:
        if self._daemon:
            self._daemon.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Lmcache(Cache):
    """LMCache's multiprocess server and its connector, as its documentation has them on a CPU.

    The engine's worker copies over shared memory (``engine_driven``), which is its default on CPUs; the server needs
    flags for it.
    """

    name = LMCACHE
    python = CONTEST_PYTHON

    def __init__(self, tiers: Tiers = Tiers()) -> None:
        super().__init__(tiers)
        self._port, self._http_port, self._metrics_port = free_ports(3)
        self._shm = f"contest-{secrets.token_hex(4)}"
        self._place = Path("/tmp") / self._shm
        self._place.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}

    @property
    def transfer_config(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def log(self) -> str:
        path = self._place / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def http_port(self) -> int:
        return self._http_port

    @property
    def _adapters(self) -> list[dict[str, Any]]:
        tiers, found = self.tiers, list[dict[str, Any]]()
        if tiers.disk:
            found.append({"type": "fs", "base_path": str(tiers.disk)})
        if tiers.redis:
            found.append({"type": "resp", "host": "127.0.0.1", "port": tiers.redis})
        if tiers.s3:
            found.append(
                {
                    "type": "s3",
                    "s3_endpoint": f"127.0.0.1:{tiers.s3}",
                    "s3_region": "us-east-1",
                    "disable_tls": True,
                    "s3_prefer_http2": False,
                    "aws_access_key_id": S3_USER["AWS_ACCESS_KEY_ID"],
                    "aws_secret_access_key": S3_USER["AWS_SECRET_ACCESS_KEY"],
                }
            )
        return found

    def start(self) -> Self:
        flags = {
            "host": "127.0.0.1",
            "port": str(self._port),
            "http-host": "127.0.0.1",
            "http-port": str(self._http_port),
            "prometheus-port": str(self._metrics_port),
            "l1-size-gb": str(POOL_GIB),
            "eviction-policy": "LRU",
            "supported-transfer-mode": "engine_driven",
            "shm-name": self._shm,
        }
        command = [str(CONTEST_PYTHON.with_name("lmcache")), "server"]
        command += [word for name, value in flags.items() for word in (f"--{name}", value)]
        command += [word for one in self._adapters for word in ("--l2-adapter", json.dumps(one))]
        with (self._place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **self.environ}
            )

        def healthy() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"LMCache's server ended:\n{self.log[-3000:]}"
            with suppress(OSError):
                return self._ask("GET", "/healthcheck") == 200
            return False

        wait_until(healthy, CACHE_START_S, explain=lambda: self.log[-3000:], interval_s=0.1)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CACHE_STOP_S)
            self._process.kill()
            self._process.wait()
            self._process = None

    def clear(self) -> None:
        assert self._ask("POST", "/cache/clear") == 200

    def settle(self) -> None:
        time.sleep(LMCACHE_SETTLES_S)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._place, ignore_errors=True)
        for segment in Path("/dev/shm").glob(f"*{self._shm}*"):
            segment.unlink(missing_ok=True)

    def _ask(self, method: str, path: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{self._http_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            answer.read()
            return int(answer.status)


KINDS: dict[str, type[Cache]] = {NONE: Cache, KVOFFD: Kvoffd, LMCACHE: Lmcache}
