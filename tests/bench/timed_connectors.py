"""Connectors whose calls are recorded, for ``prompt_parts.py``.

One does nothing, one asks another process for an echo of each new prompt, and one is kvoffd's.

Each process of an engine writes its records to ``$TESTS_RECORDS/PID.json`` at SIGUSR1.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvoffd_client.cli.bench import echo_process
from kvoffd_client.vllm.connector import KvoffdConnector
from tests.bench.idle_connector import IdleConnector

VARIABLE = "TESTS_RECORDS"
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_push_work",
    "request_finished_all_groups",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_kv_cache_events",
)
ASKED_BYTES, ANSWER_BYTES = 200, 64
"""Of a lookup of a prompt of 64 tokens, and its reply."""

_records: list[tuple[str, float, float, float, int]] = []
"""See ``Record`` of prompt_parts.py."""


def _recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    thread = resource.RUSAGE_THREAD

    @wraps(call)
    def recorded(*arguments: Any, **named: Any) -> Any:
        waits, cpu_s, began = resource.getrusage(thread).ru_nvcsw, time.thread_time(), time.monotonic()
        try:
            return call(*arguments, **named)
        finally:
            ended, cpu_s = time.monotonic(), time.thread_time() - cpu_s
            _records.append((name, began, ended - began, cpu_s, resource.getrusage(thread).ru_nvcsw - waits))

    return recorded


def _threads() -> dict[str, tuple[float, int]]:
    """Seconds of CPU of the client's own threads, and how often they waited, by name."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("kvoffd"):
            task = Path(f"/proc/self/task/{thread.native_id}")
            waits = next(line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
            found[thread.name] = int((task / "schedstat").read_text().split()[0]) / 1e9, int(waits.split()[1])
    return found


def _write(*_: object) -> None:
    path = Path(os.environ[VARIABLE], f"{os.getpid()}.json")
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps({"records": _records, "threads": _threads()}))
    whole.rename(path)


def _timed(kind: type[Any]) -> type[Any]:
    """A subclass whose calls are recorded, in a process that writes them."""

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        kind.__init__(self, *arguments, **named)
        signal.signal(signal.SIGUSR1, _write)
        Path(os.environ[VARIABLE], f"{os.getpid()}.pid").touch()

    calls = {name: _recorded(name, getattr(kind, name)) for name in CALLS}
    return type(f"Timed{kind.__name__}", (kind,), {"__init__": __init__, **calls})


class EchoConnector(IdleConnector):
    """Asks another process for an echo when vLLM asks it for a new prompt, and waits for it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._open = ExitStack()
            self._echo = self._open.enter_context(echo_process())

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._echo(ASKED_BYTES, ANSWER_BYTES)
        return 0, False


TimedIdle, TimedEcho, TimedKvoffd = map(_timed, (IdleConnector, EchoConnector, KvoffdConnector))
