"""The daemon's start and end, on real processes."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.daemon import Daemon
from tests.kit.ports import free_port


def http_status(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_are_answered_while_the_pool_is_touched(tmp_path, monkeypatch):
    """And a daemon whose memory is refused was alive until then."""
    told = {}

    def touch_slowly(config, *_):
        told.update({path: http_status(port, path) for path in ("/healthz", "/readyz", "/metrics")})
        raise KvoffdError("The memory is refused.")

    monkeypatch.setattr("kvoffd.server.daemon.take_pool", touch_slowly)
    port = free_port()

    async def serve() -> None:
        await Daemon(Config(directory=tmp_path, http_address=f"127.0.0.1:{port}")).serve()

    with pytest.raises(KvoffdError, match="refused"):
        asyncio.run(serve())
    sentence = "The daemon is starting.\n"
    assert told == {
        "/healthz": (200, f"ok\n{sentence}"),
        "/readyz": (503, f"not ok\n{sentence}"),
        "/metrics": (503, "The daemon is starting or stopping.\n"),
    }


def test_regular_work_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(Config())
    ticked: list[str] = []

    class Failing:
        def tick(self) -> None:
            ticked.append("service")
            raise RuntimeError("a bug")

    class Sound:
        def tick(self) -> None:
            ticked.append("sound")

    daemon._service, daemon._lifelines = Failing(), Sound()  # type: ignore[assignment]
    daemon._policy_file, daemon._state = Sound(), SimpleNamespace(file=Sound())  # type: ignore[assignment]
    for _ in range(3):
        daemon._tick()
    assert ticked == ["service", *["sound"] * 3] * 3
    assert len(caplog.records) == 1, "logged once a minute"


@pytest.mark.parametrize("works", [True, False])
def test_the_watchdog_is_fed_after_a_turn_of_the_message_loop_that_worked(works: bool) -> None:
    async def run() -> MagicMock:
        daemon = Daemon(Config())
        daemon._service = service = MagicMock()  # type: ignore[assignment]
        service.memory.stuck, service.memory.gpus.lost = False, None
        service.scrubber.has_work = False
        daemon._lifelines = daemon._policy_file = daemon._state = MagicMock()  # type: ignore[assignment]
        daemon._directory = MagicMock(**{"lost_sockets.return_value": ""})
        daemon._sockets, daemon._notifier = MagicMock(), MagicMock()  # type: ignore[assignment]
        daemon._sockets.serve.side_effect = lambda: daemon._stop.set() or works  # type: ignore[attr-defined]
        await daemon._main_loop()
        return daemon._notifier.watchdog  # type: ignore[return-value]

    assert asyncio.run(run()).call_count == works
