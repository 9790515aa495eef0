"""Processes that are forked from one that has imported vLLM, by multiprocessing's server for that; from two such."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar
from unittest import mock


class VllmServer(forkserver.ForkServer):
    """Where vLLM is imported once; ``lend`` and ``borrow`` make it that of another process, too."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.set_forkserver_preload([f"{__package__}.{module}"])
        self._borrowed = False

    def ensure_running(self) -> None:
        if self._borrowed:
            resource_tracker.ensure_running()
        else:
            super().ensure_running()

    def lend(self) -> tuple[dict[str, Any], int]:
        """What ``borrow`` takes, and a descriptor to be inherited: the server ends once nobody has it any more."""
        self.ensure_running()
        names = "_forkserver_address", "_forkserver_authkey"  # the key from Python 3.14 on
        given: Any = vars(self)
        return {name: given[name] for name in names if name in given}, given["_forkserver_alive_fd"]

    def borrow(self, lent: dict[str, Any], alive_fd: int) -> None:
        vars(self).update(lent, _forkserver_alive_fd=alive_fd, _borrowed=True)


_V1_SERVER, _V2_SERVER = VllmServer("engine_imports"), VllmServer("engine_imports_v2")


class _Popen(Popen):
    def _launch(self, process: Any) -> None:
        # multiprocessing knows of one server.
        with mock.patch.object(forkserver, "connect_to_new_process", process.server.connect_to_new_process):
            super()._launch(process)  # type: ignore[misc]


class _V1Process(BaseProcess):
    """Forked from the process that has imported vLLM."""

    _start_method = "forkserver"
    server: ClassVar[VllmServer] = _V1_SERVER

    @staticmethod
    def _Popen(process: Any) -> _Popen:
        return _Popen(process)


class _V2Process(_V1Process):
    """Forked from the process that has imported vLLM for the second model runner."""

    server = _V2_SERVER


def forked(target: Callable[..., None], arguments: tuple[Any, ...], *, v2: bool) -> BaseProcess:
    """A process, not started, that has vLLM imported when it begins."""
    return (_V2Process if v2 else _V1Process)(target=target, args=arguments)


def server_with_vllm(*, v2: bool) -> VllmServer:
    """The server of such processes, for ``tests.kit.forked``. ``ensure_running`` has it begin to import vLLM, beside
    what else is done."""
    return _V2_SERVER if v2 else _V1_SERVER
