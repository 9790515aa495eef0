"""Processes that are forked from one that has imported vLLM, by multiprocessing's server for that; from two such."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([f"{__package__}.engine_imports"])

_V2_SERVER = forkserver.ForkServer()
_V2_SERVER.set_forkserver_preload([f"{__package__}.engine_imports_v2"])


class _Popen(Popen):
    def _launch(self, process: Any) -> None:
        # multiprocessing knows of one server.
        with mock.patch.object(forkserver, "connect_to_new_process", _V2_SERVER.connect_to_new_process):
            super()._launch(process)  # type: ignore[misc]


class _V2Process(BaseProcess):
    """Forked from the process that has imported vLLM for the second model runner."""

    _start_method = "forkserver"

    @staticmethod
    def _Popen(process: Any) -> _Popen:
        return _Popen(process)


def forked(target: Callable[..., None], arguments: tuple[Any, ...], *, v2: bool) -> BaseProcess:
    """A process, not started, that has vLLM imported when it begins."""
    return (_V2Process if v2 else FORKED.Process)(target=target, args=arguments)


def server_with_vllm(*, v2: bool) -> forkserver.ForkServer:
    """The server of such processes, for ``tests.kit.forked``."""
    return _V2_SERVER if v2 else forkserver._forkserver  # type: ignore[attr-defined, no-any-return]


def import_vllm(*, v2: bool) -> None:
    """Have the process begin to import vLLM that others are forked from, beside what else is done."""
    (_V2_SERVER if v2 else forkserver).ensure_running()
