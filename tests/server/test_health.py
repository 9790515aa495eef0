"""Health has levels: what makes the cache worse is said with its reason, and is neither death nor refusal."""

from __future__ import annotations

import socket

import pytest

from kvoffd.config import Config
from kvoffd_client import AdminClient
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import HealthLevel
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import key
from tests.kit.waiting import wait_until

DEADLINE_S = 10.0
BLOCKS = 192
"""Of 64 KiB: as many as a pool of 12 MiB holds."""


def test_a_taken_http_port_is_degraded_and_does_not_keep_the_daemon_from_serving() -> None:
    address = Config().http_address
    host, _, port = address.rpartition(":")
    with socket.socket() as other:
        try:
            other.bind((host, int(port)))
            other.listen()
        except OSError:
            pass  # somebody else has it, which does as well
        with DaemonProcess(http_address=address) as daemon, AdminClient(daemon.directory) as admin:
            (cause,) = admin.health().causes
            assert (admin.health().level, cause.reason) == (HealthLevel.DEGRADED, "http_unavailable")
            assert f"The HTTP address {address} cannot be listened on" in cause.sentence
            assert admin.stats().health_problems == {"http_unavailable": 1}


def test_a_pool_that_one_lease_pins_is_degraded_and_says_who(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess("12MiB", leased_share="1") as daemon, FakeEngine(daemon.directory, blocks=256) as engine:
        with AdminClient(daemon.directory) as admin:
            assert (admin.health().level, admin.stats().health_problems) == (HealthLevel.OK, {})
            keys = [key(number) for number in range(BLOCKS)]
            assert engine.store(keys, range(BLOCKS)).ok
            assert engine.lookup(keys) == BLOCKS
            wait_until(lambda: admin.health().level is HealthLevel.DEGRADED, DEADLINE_S)
            (cause,) = admin.health().causes
            assert cause.reason == "pool_pinned"
            assert "12.0 MiB by session" in cause.sentence
            assert "(fake engine scheduler)" in cause.sentence
            assert engine.store([key(1000)], [0]).error is ErrorCode.NO_ROOM
            assert [cause.reason for cause in admin.health().causes] == ["pool_pinned", "stores_without_room"]
            assert "no room for 1 block" in admin.health().problems[1]
            assert admin.stats().health_problems == {"pool_pinned": 1, "stores_without_room": 1}
            for options, status in (([], 1), (["--live"], 0), (["--ready"], 0)):
                assert main(["health", *options, "--directory", str(daemon.directory)]) == status
                assert capsys.readouterr().out.startswith("degraded: ")
            engine.release()
            wait_until(lambda: [c.reason for c in admin.health().causes] == ["stores_without_room"], DEADLINE_S)
