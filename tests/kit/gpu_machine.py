"""A daemon over a stub driver or a real one, with the clients that belong to it."""

from __future__ import annotations

import os
from pathlib import Path

from kvoffd.system.files import OnError
from kvoffd.transfer.cuda.gpus import list_devices
from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_proto.cuda import Cuda, CudaError
from tests.kit.daemon import DaemonProcess
from tests.kit.exporter import Exporter


def real_gpus() -> int:
    try:
        return len(list_devices(Cuda()))
    except CudaError:
        return 0


class Machine:
    """A driver, a daemon over it, and a scheduler; exporters come and go."""

    def __init__(
        self,
        library: str,
        log: Path | None,
        *,
        dies_slowly: bool = False,
        limits: dict[str, float] | None = None,
        **flags: str,
    ) -> None:
        self.library = library
        self.is_stub = log is not None
        self._log = log
        # So that CUDA is in use while engines are there, and no longer, unless a test wants it otherwise.
        flags = {"cuda_library": library, "pin_pool": "use", **flags}
        limits = {"pin_linger_s": 0, **(limits or {})}
        self.daemon = DaemonProcess(dies_slowly=library if dies_slowly else "", limits=limits, **flags)

    def exporter(self, kind: str = "ordinary", *, ready: bool = True, gpu: int | None = None, **shape: int) -> Exporter:
        """A worker of this daemon, once it is ready; ``gpu``: it sees the GPU of this number only, as its first."""
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu), "STUB_FIRST": str(gpu)}
        worker = Exporter(self.daemon.directory, self.library, kind, environ={**os.environ, **visible}, **shape)
        with OnError(worker.close):
            if ready:
                worker.wait_ready()
        return worker

    def scheduler(self) -> SchedulerClient:
        """A scheduler of the same namespace."""
        client = SchedulerClient(self.daemon.directory, NamespaceSpec.named("gpu"))
        assert client.wait_ready(10)
        return client

    def driver_log(self) -> list[str]:
        """What the daemon's and the exporters' stub did."""
        return self._log.read_text().splitlines() if self._log.exists() else []
