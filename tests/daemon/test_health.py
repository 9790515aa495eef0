"""Health has levels: what makes the cache worse is said with its reason, and is neither death nor refusal."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from kvoffd_client import AdminClient, ErrorCode, SharedMemory
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.checked import CheckedEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port, http_get
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, books, keys, request_streams

BLOCKS = 192
"""Of 64 KiB: as many as a pool of 12 MiB holds."""


def test_health_a_pool_that_one_lease_pins_is_degraded() -> None:
    """It says whose lease that is, and which stores found no space."""
    with (
        DaemonProcess("12MiB", limits={"leased_share": 1}) as daemon,
        FakeEngine(daemon.directory, blocks=256) as engine,
        AdminClient(daemon.directory) as admin,
    ):

        def reasons() -> list[str]:
            return [cause.reason for cause in admin.health().causes]

        assert admin.health().level == "ok"
        assert books(daemon.directory).problems == {}
        stored = keys(*range(BLOCKS))
        assert engine.store(stored, range(BLOCKS)).ok
        assert engine.lookup(stored) == BLOCKS
        wait_until(lambda: admin.health().level == "degraded")
        (cause,) = admin.health().causes
        assert cause.reason == "pool_pinned"
        assert "12.0 MiB by session" in cause.sentence
        assert "(fake engine scheduler)" in cause.sentence
        assert engine.store(keys(1000), [0]).error is ErrorCode.NO_SPACE
        assert reasons() == ["pool_pinned", "stores_without_space"]
        assert (
            "1 block that engines offered were not stored: leases and copies pinned the pool, "
            in (admin.health().problems[1])
        )
        assert books(daemon.directory).problems == {"pool_pinned": 1, "stores_without_space": 1}
        engine.release()
        wait_until(lambda: reasons() == ["stores_without_space"])


def test_ranks_that_are_not_registered_are_why_nothing_is_stored(memory: SharedMemory) -> None:
    """As where the daemon cannot use the GPU of one of two workers."""
    with (
        DaemonProcess("8MiB") as daemon,
        WireClient(daemon.directory, "worker") as worker,
        AdminClient(daemon.directory) as admin,
    ):
        worker.open_namespace(world_size=2)
        cache = worker.register(memory, rank=0)
        assert worker.store(cache, keys(1), [1]).error == "no_space"
        (cause,) = admin.health().causes
        assert cause.reason == "stores_without_space"
        assert "not all ranks of an engine have registered" in cause.sentence
        assert "lacks rank 1)" in cause.sentence
        assert "Enlarge" not in cause.sentence


def test_health_without_its_sockets_is_down_wherever_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with DaemonProcess(http_address=f"127.0.0.1:{port}") as daemon, CheckedEngine(daemon) as engine:
        socket_file = daemon.directory / "jobs.sock"

        def answers() -> tuple[str, int, int, bool]:
            """Level, exit status of a probe, status of another, and ``kvoffd_ready``."""
            status = main(["health", "--ready", "--json", "--url", f"http://127.0.0.1:{port}"])
            level = json.loads(capsys.readouterr().out)["level"]
            return (
                level,
                status,
                http_get(port, "/healthz")[0],
                int("\nkvoffd_ready 1.0\n" in http_get(port, "/metrics")[1]),
            )

        daemon.wait_log("Serving ")
        assert answers() == ("ok", 0, 200, True)
        socket_file.rename(daemon.directory / "elsewhere")
        wait_until(lambda: answers() == ("down", 2, 503, False), explain=answers)
        assert "jobs.sock" in http_get(port, "/healthz")[1]
        engine.put(range(8))
        assert engine.has(range(8)), "engines that are connected are served"
        (daemon.directory / "elsewhere").rename(socket_file)
        wait_until(lambda: answers() == ("ok", 0, 200, True), explain=answers)


def test_health_many_late_lookups_are_degraded_until_they_are_few() -> None:
    with DaemonProcess() as daemon, FakeEngine(daemon.directory) as engine, AdminClient(daemon.directory) as admin:

        def reasons(lookups: int, late: int) -> list[str]:
            """What is wrong after so many more of them, which the engine reports as the connector does."""
            before = admin.stats().since_start.late_lookups
            for _ in range(lookups):
                engine.lookup(keys(1))
            engine.scheduler.report(0.0, 0, 0, late)
            wait_until(lambda: admin.stats().since_start.late_lookups == before + late)
            return [cause.reason for cause in admin.health().causes]

        assert reasons(100, 19) == [], "19 are fewer than 20"
        assert reasons(0, 6) == ["lookups_late"]
        (cause,) = admin.health().causes
        assert "25 of 100 lookups" in cause.sentence
        assert "CPUAffinity" in cause.sentence
        assert reasons(400, 0) == [], "25 of 500 are 5 %"


def test_health_nearly_all_descriptors_in_use_is_degraded() -> None:
    """With the last one the daemon would end, so it says so before."""
    few = 1024
    with (
        DaemonProcess("12MiB", before=["prlimit", f"--nofile={few}:{few}"]) as daemon,
        AdminClient(daemon.directory) as admin,
    ):
        assert admin.health().level == "ok"
        with contextlib.ExitStack() as held:
            for _ in range(round(0.85 * few)):
                stream = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stream.connect(str(request_streams(daemon.directory)[1]))
            wait_until(lambda: admin.health().level == "degraded")
            (cause,) = admin.health().causes
            assert cause.reason == "descriptors"
            assert "of the 1,024 files" in cause.sentence
            assert admin.health().ready
        wait_until(lambda: admin.health().level == "ok")
