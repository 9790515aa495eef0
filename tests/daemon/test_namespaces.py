"""A daemon has 64 namespaces: beyond them the oldest that nobody uses is given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd_client import AdminClient, KvoffdClientError
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, books, keys


def store(daemon: DaemonProcess, name: str, blocks: int = 1) -> None:
    """Blocks of an engine that is gone afterwards."""
    with FakeEngine(daemon.directory, name, blocks=blocks) as engine:
        assert engine.store(keys(*range(blocks)), range(blocks)).ok
    wait_until(lambda: all(one.engines == [] for one in books(daemon.directory).namespaces.values()))


def models(daemon: DaemonProcess) -> list[str]:
    return sorted(one.model for one in books(daemon.directory).namespaces.values())


def test_beyond_the_limit_the_namespace_that_was_unused_for_longest_goes() -> None:
    """Whatever it has: the weights of its model have changed."""
    with DaemonProcess(limits={"max_namespaces": 3}) as daemon:
        store(daemon, "many blocks", 8)
        store(daemon, "few blocks")
        store(daemon, "used again")
        store(daemon, "fourth")
        assert models(daemon) == ["few blocks", "fourth", "used again"]
        store(daemon, "few blocks")
        store(daemon, "fifth")
        assert models(daemon) == ["few blocks", "fifth", "fourth"]


def test_namespaces_that_were_only_opened_cost_no_other_its_blocks() -> None:
    with DaemonProcess(limits={"max_namespaces": 3}) as daemon:
        store(daemon, "has blocks")
        for number in range(6):
            with WireClient(daemon.directory) as client:
                client.open_namespace(bytes(31) + bytes([number]), label=f"empty {number}")
            wait_until(lambda: all(one.engines == [] for one in books(daemon.directory).namespaces.values()))
        with FakeEngine(daemon.directory, "has blocks") as engine:
            assert engine.lookup(keys(0)) == 1


def test_where_all_namespaces_are_open_a_further_one_is_refused() -> None:
    with (
        DaemonProcess(limits={"max_namespaces": 2}) as daemon,
        FakeEngine(daemon.directory, "one"),
        FakeEngine(daemon.directory, "two"),
    ):
        with pytest.raises(KvoffdClientError, match="All 2 namespaces are in use"):
            FakeEngine(daemon.directory, "three", connect_timeout_s=5.0).close()
        assert models(daemon) == ["one", "two"]


def test_of_the_namespaces_of_an_earlier_release_the_newest_come_back(pool_file: Path) -> None:
    """Release 0.2 had up to 1,024."""
    with DaemonProcess("8MiB", pool_file=str(pool_file), limits={"max_namespaces": 100}) as daemon:
        for number in range(67):
            store(daemon, f"{number:02}")
        assert len(models(daemon)) == 67
        assert daemon.stop() == 0
        with DaemonProcess("8MiB", pool_file=str(pool_file)) as later:
            assert models(later) == [f"{number:02}" for number in range(3, 67)]
            assert "The oldest 3 of the pool's 67 namespaces are left out: the limit is 64." in later.log
            assert books(later.directory).balanced
            for number in (3, 66):
                with FakeEngine(later.directory, f"{number:02}") as engine:
                    assert engine.lookup(keys(0)) == 1
            with FakeEngine(later.directory, "00") as engine:
                assert engine.lookup(keys(0)) == 0
                assert engine.store(keys(0), [0]).ok
            with AdminClient(later.directory) as admin:
                assert admin.clear() == 64


def test_namespaces_that_begin_alike_are_not_two_rows_of_one_id() -> None:
    """The daemon's page of metrics would have a series twice."""
    with DaemonProcess() as daemon, WireClient(daemon.directory) as client:
        for last in (1, 2):
            client.open_namespace(bytes(31) + bytes([last]))
        with AdminClient(daemon.directory) as admin:
            assert len(admin.namespaces().namespaces) == 2
            assert [one.id for one in admin.stats().namespaces] == ["000000000000"]
