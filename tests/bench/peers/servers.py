"""The servers that are compared, each in a process of its own, and what /proc says of them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from kvoffd_proto.paths import SocketPaths
from tests.kit.closing import Starting
from tests.kit.ports import free_port

POOL_GIB = 1
"""Of every server."""
POOL_SIZE = f"{POOL_GIB}GiB"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
STEP_S = 0.01


class ServerFailed(Exception):
    """A server did not start or stop; the message names its log."""


class Server(Starting):
    """A server process, started by ``with``. In ``command``, DIRECTORY stands for a directory of its own."""

    name = ""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.directory = Path()
        self.command = list(command)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFD_", "LMCACHE_"))}
        self.environment.update(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    def answers(self) -> bool:
        """Its request sockets take connections."""
        raise NotImplementedError

    def player(self) -> list[str]:
        """The command of a client of it."""
        raise NotImplementedError

    @property
    def player_environment(self) -> dict[str, str]:
        """The client's environment."""
        return self.environment

    def start(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="kvoffd-peers-", dir="/tmp"))
        self.command = [part.replace("DIRECTORY", str(self.directory)) for part in self.command]
        log = self.directory / "server.log"
        begin = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment
            )
        self._wait(self.answers, log, begin)
        return self

    def _wait(self, ready: Callable[[], bool], log: Path, begin: float) -> None:
        while not ready():
            assert self._process is not None
            if self._process.poll() is not None or time.perf_counter() - begin > START_DEADLINE_S:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
                raise ServerFailed(f"{self.name} did not start:\n{tail}")
            time.sleep(STEP_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_DEADLINE_S)
        shutil.rmtree(self.directory, ignore_errors=True)


class KvoffdServer(Server):
    """``kvoffd serve`` with its defaults, its HTTP page included."""

    name = "kvoffd"

    def __init__(self, pool_size: str = POOL_SIZE) -> None:
        address = f"127.0.0.1:{free_port()}"
        command = f"{sys.executable} -m kvoffd serve --directory DIRECTORY --pool-size {pool_size}"
        super().__init__([*command.split(), "--http-address", address, "--log-level", "warning"], {})

    def answers(self) -> bool:
        paths = SocketPaths(self.directory)
        return all(_takes(socket.AF_UNIX, str(path)) for path in (paths.jobs, paths.events, paths.lifeline))

    def player(self) -> list[str]:
        return [sys.executable, "-m", "tests.bench.peers.play_kvoffd", str(self.directory), str(self.pid)]


class LMCacheServer(Server):
    """``lmcache server`` in its shared-memory mode for engines on CPU; all else but the chunk size is its default."""

    name = "LMCache"

    def __init__(self, python: Path, chunk_tokens: int, layout: str = "NHD") -> None:
        self._python, self._port, self._layout = python, free_port(), layout
        self.shared_memory = f"kvoffd-peers-{os.getpid()}-{self._port}"
        options = (
            f"--port {self._port} --http-port {free_port()} --l1-size-gb {POOL_GIB} --eviction-policy LRU"
            f" --chunk-size {chunk_tokens} --supported-transfer-mode engine_driven --shm-name {self.shared_memory}"
        )
        super().__init__([str(python.parent / "lmcache"), "server", *options.split()], lmcache_environment())

    def answers(self) -> bool:
        return _takes(socket.AF_INET, ("127.0.0.1", self._port))

    def player(self) -> list[str]:
        url = f"tcp://localhost:{self._port}"
        return [str(self._python), "-m", "tests.bench.peers.play_lmcache", url, str(self.pid), self._layout]

    @property
    def player_environment(self) -> dict[str, str]:
        """Memory that was freed is kept: LMCache copies through temporary tensors of up to a chunk's size.

        vLLM on CPU preloads tcmalloc, which keeps it too. As glibc is by itself, it gives them back to the kernel and
        gets them again, page by page, which costs LMCache up to two thirds of its speed.
        """
        return self.environment | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}

    def close(self) -> None:
        super().close()
        # It unlinks its segment itself unless it had to be killed.
        (Path("/dev/shm") / self.shared_memory).unlink(missing_ok=True)


def lmcache_environment() -> dict[str, str]:
    """No reports to its makers, and no logs of single requests, which would slow it down."""
    return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


def _takes(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
