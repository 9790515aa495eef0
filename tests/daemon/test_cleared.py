"""What was cleared or reset stays away, whatever became of disks and ``kvoffd.state``; else the command failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, GroupKeys, RequestRefused
from tests.kit.checked import CheckedEngine, Truth, over_disk, put_on_disk, wait_disk
from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import tmpfs
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, books, keys, refused

SOME = range(16)
FOLLOW_S = 5.0
"""Time after which a disk serves a namespace although a store has not answered about it."""


def reset(daemon: DaemonProcess, engine: CheckedEngine) -> bool:
    return engine.scheduler.reset()


def clear(daemon: DaemonProcess, engine: CheckedEngine) -> bool:
    with AdminClient(daemon.directory) as admin:
        try:
            admin.clear()
        except RequestRefused:
            return False
    return True


def invalidate(daemon: DaemonProcess, engine: CheckedEngine) -> bool:
    engine.scheduler.invalidate([GroupKeys(0, b"".join(keys(*SOME)))])  # which waits for no answer
    return engine.lookup(keys(*SOME)) == 0


Drop = Callable[[DaemonProcess, CheckedEngine], bool]
both = pytest.mark.parametrize("drop", [reset, clear])


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def over_store(server: RedisServer, directory: Path | None = None) -> DaemonProcess:
    return DaemonProcess("16MiB", directory, shared=server.url, shared_write="always")


def share(daemon: DaemonProcess, engine: CheckedEngine) -> None:
    """Store some blocks, and have them in the store."""
    wait_until(lambda: books(daemon.directory).shared[0].up)
    engine.put(SOME)
    wait_until(lambda: books(daemon.directory).shared[0].written_blocks == len(SOME))


def wait_found(daemon: DaemonProcess, engine: CheckedEngine) -> list[int]:
    """What of the blocks comes from the store, which is reachable."""
    wait_until(lambda: books(daemon.directory).shared[0].up)
    engine.lookup(keys(*SOME))
    wait_until(lambda: not books(daemon.directory).shared[0].queued_reads)
    return engine.get(SOME)


def lose_state(daemon: DaemonProcess) -> None:
    """As a reboot does where the daemon's directory is in memory."""
    for left in daemon.directory.iterdir():
        if left != daemon.log_path:
            left.unlink()


# --- kvoffd.state cannot be written --------------------------------------------------------------------


def test_a_reset_that_cannot_be_noted_is_no_success_without_disks(server: RedisServer) -> None:
    with over_store(server) as daemon, CheckedEngine(daemon) as engine:
        share(daemon, engine)
        (in_the_way := Path(f"{daemon.directory}/kvoffd.state.new")).mkdir()
        assert not engine.scheduler.reset()
        assert engine.lookup(keys(0)) == 0, "it is done here"
        in_the_way.rmdir()
        assert engine.scheduler.reset()
        engine.truth.drop()
        daemon.kill()
        daemon.start()
        assert engine.wait_ready(30.0)
        assert wait_found(daemon, engine) == []


@both
@pytest.mark.parametrize("disk", ["failed", "serving"])
def test_a_drop_that_cannot_be_noted_is_no_success_whatever_the_disk_does(
    tmp_path: Path, drop: Drop, disk: str
) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with over_disk(place, "2MiB", "16MiB", disk_start="optional") as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            put_on_disk(daemon, engine, 48)
            daemon.stop()
            if disk == "failed":
                place.rename(tmp_path / "away")
            daemon.start()
            wait_disk(daemon, "failed" if disk == "failed" else "serving")
            assert engine.wait_ready(30.0)
            (in_the_way := Path(f"{daemon.directory}/kvoffd.state.new")).mkdir()
            assert not drop(daemon, engine)
            in_the_way.rmdir()
            assert drop(daemon, engine)
            engine.truth.drop()
            daemon.kill()
            if disk == "failed":
                (tmp_path / "away").rename(place)
            daemon.start()
            wait_disk(daemon)
            assert engine.wait_ready(30.0)
            assert engine.get(SOME) == []


def test_an_invalidation_waits_for_nothing(tmp_path: Path) -> None:
    """Not for a disk that could not be opened, nor for ``kvoffd.state``: many at once are all answered."""
    with over_disk(tmp_path / "missing", disk_start="optional") as daemon, CheckedEngine(daemon) as engine:
        wait_disk(daemon, "failed")
        Path(f"{daemon.directory}/kvoffd.state.new").mkdir()
        engine.put(SOME)
        for number in SOME:
            for _ in range(10):
                engine.scheduler.invalidate([GroupKeys(0, keys(number)[0])])
        assert engine.get(SOME) == []
        assert books(daemon.directory).errors == {}


@pytest.mark.parametrize(
    ("drop", "end"),
    [  # invalidated blocks may come back after a kill: see RELIABILITY.md
        (reset, DaemonProcess.stop),
        (reset, DaemonProcess.kill),
        (clear, DaemonProcess.stop),
        (clear, DaemonProcess.kill),
        (invalidate, DaemonProcess.stop),
    ],
)
def test_what_is_dropped_stays_away_from_each_of_two_disks(
    tmp_path: Path, drop: Drop, end: Callable[[DaemonProcess], object]
) -> None:
    """And the rest is found, on both."""
    every, other = range(64), "other"
    for name in "ab":
        (tmp_path / name).mkdir()
    disks = ",".join(f"{tmp_path / name}=16MiB" for name in "ab")
    with DaemonProcess("2MiB", disk=disks, disk_write="always") as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine, CheckedEngine(daemon, None, other) as neighbour:
            put_on_disk(daemon, engine, len(every))
            put_on_disk(daemon, neighbour, len(every))
            assert all(disk.blocks for disk in books(daemon.directory).disks)
            if end is DaemonProcess.kill:  # what the last seconds brought would be known to no index
                daemon.stop()
                daemon.start()
                wait_disk(daemon)
                assert engine.wait_ready(30.0)
                assert neighbour.wait_ready(30.0)
                assert engine.lookup(keys(*SOME)) == len(SOME)
            assert drop(daemon, engine)
            left = every[len(SOME) :] if drop is invalidate else range(0)
            end(daemon)
            daemon.start()
            wait_disk(daemon)
            assert engine.wait_ready(30.0)
            assert neighbour.wait_ready(30.0)
            assert engine.get(SOME) == []
            assert engine.get(every) == list(left)
            assert neighbour.has(every if drop is not clear else range(0))


# --- kvoffd.state is lost --------------------------------------------------------------------------


@both
def test_a_drop_after_the_state_was_lost_holds_for_a_disk_with_higher_numbers(tmp_path: Path, drop: Drop) -> None:
    """The disk is away at the drop."""
    with over_disk(tmp_path, "2MiB", "16MiB") as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            for _ in range(3):
                assert drop(daemon, engine)
            put_on_disk(daemon, engine, 16)
            daemon.stop()
            lose_state(daemon)
            disk = daemon.flags.pop("disk")
            daemon.start()
            assert engine.wait_ready(30.0)
            assert drop(daemon, engine)
            engine.truth.drop()
            daemon.stop()
            daemon.flags["disk"] = disk
            daemon.start()
            wait_disk(daemon)
            assert engine.wait_ready(30.0)
            assert engine.get(SOME) == []


def test_a_reset_that_a_reboot_would_undo_is_no_success(tmp_path: Path, server: RedisServer) -> None:
    """Where ``kvoffd.state`` is in memory, a daemon after the reboot would share what is stale."""
    with tmpfs(tmp_path / "run", "64m") as place, over_store(server, place) as daemon:
        with CheckedEngine(daemon) as engine:
            share(daemon, engine)
            assert not engine.scheduler.reset()
            assert engine.lookup(keys(0)) == 0, "it is done here"
        assert "a reboot would undo it" in daemon.log
        daemon.stop()


def test_after_a_damaged_state_nothing_of_before_is_served_or_shared(tmp_path: Path, server: RedisServer) -> None:
    """Until it is cleared on all nodes."""
    with over_disk(tmp_path, "2MiB", "16MiB", shared=server.url, shared_write="always") as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            share(daemon, engine)
            assert engine.scheduler.reset()
            daemon.stop()
            (daemon.directory / "kvoffd.state").write_bytes(b"")
            engine.truth.drop()
            daemon.start()
            wait_disk(daemon)
            assert engine.wait_ready(30.0)
            assert wait_found(daemon, engine) == []
            with AdminClient(daemon.directory) as admin:
                admin.reset_fleet(engine.scheduler._fingerprint)
            wait_until(lambda: not books(daemon.directory).shared[0].unshared_namespaces)
            engine.put(SOME)
            wait_until(lambda: books(daemon.directory).shared[0].written_blocks == len(SOME))


# --- numbers that cannot be --------------------------------------------------------------------------


def test_numbers_that_cannot_be_are_refused(daemon: DaemonProcess) -> None:
    """Sums of them would be infinite, and cost the file that has the resets."""
    with WireClient(daemon.directory, "scheduler") as engine:
        engine.open_namespace()
        for speed in (5e-324, 1e-7, 1e300, float("inf"), float("nan"), -1.0):
            assert refused(engine.report, 1, tokens_per_second=speed) == "malformed", speed
        engine.report(1, tokens_per_second=0.01)


# --- cleared on all nodes ------------------------------------------------------------------------------


def clear_all_nodes(daemon: DaemonProcess, engine: CheckedEngine) -> None:
    with AdminClient(daemon.directory) as admin:
        admin.reset_fleet(engine.scheduler._fingerprint)


def put_and_restart(daemon: DaemonProcess, truth: Truth) -> None:
    """Store some blocks that only the disk has then, of a namespace that nobody has open."""
    with CheckedEngine(daemon, truth) as engine:
        put_on_disk(daemon, engine, len(SOME))
    daemon.stop()
    daemon.start()
    wait_disk(daemon)


def test_a_disk_serves_a_namespace_once_a_store_has_said_whether_it_was_cleared(
    tmp_path: Path, server: RedisServer
) -> None:
    """Another node cleared it while nobody had it open here, and only the disk knew it."""
    (place := tmp_path / "disk").mkdir()
    truth = Truth()
    with over_disk(place, shared=server.url) as daemon, over_store(server) as other:
        for drops in (True, False):
            put_and_restart(daemon, truth)
            wait_until(lambda: books(daemon.directory).shared[0].up)
            if drops:
                with CheckedEngine(other, truth) as elsewhere:
                    wait_until(lambda: books(other.directory).shared[0].up)
                    clear_all_nodes(other, elsewhere)
                truth.drop()
            with CheckedEngine(daemon, truth) as engine:
                if drops:
                    for _ in range(100):
                        assert engine.get(SOME) == []
                else:
                    wait_until(lambda: engine.has(SOME))


def test_a_disk_serves_a_namespace_whose_store_is_away(tmp_path: Path, server: RedisServer) -> None:
    (place := tmp_path / "disk").mkdir()
    truth = Truth()
    with over_disk(place, shared=server.url) as daemon:
        server.kill()
        put_and_restart(daemon, truth)
        with CheckedEngine(daemon, truth) as engine:
            wait_until(lambda: engine.has(SOME), 2 * FOLLOW_S + 5.0)


@pytest.mark.parametrize("what", ["demo", "--all"])
def test_a_clear_of_all_nodes_whose_store_is_away_clears_this_node(
    tmp_path: Path, server: RedisServer, what: str
) -> None:
    """Its disk too, and with ``--all`` namespaces that nobody has opened since the start."""
    (place := tmp_path / "disk").mkdir()
    truth = Truth()
    with over_disk(place, shared=server.url) as daemon:
        wait_until(lambda: books(daemon.directory).shared[0].up)
        server.kill()
        put_and_restart(daemon, truth)
        with CheckedEngine(daemon, truth, "demo" if what == "demo" else "another"):
            status, output = command(daemon, "clear", what, "--all-nodes", "--yes")
        assert status == 2
        assert server.name in output
        assert "On this node" in output
        truth.drop()
        with CheckedEngine(daemon, truth) as engine:
            until = time.monotonic() + FOLLOW_S + 1.0
            while time.monotonic() < until:
                assert engine.get(SOME) == []
                time.sleep(0.05)


def command_in(output: str) -> list[str]:
    """Return the words of the last command that an output says to run."""
    return output.strip().splitlines()[-1].split()[1:]


@pytest.mark.parametrize("what", ["demo", "--all"])
@pytest.mark.parametrize("stays", [True, False])
def test_clear_names_the_store_that_keeps_copies_and_a_command_that_voids_them(
    server: RedisServer, what: str, stays: bool
) -> None:
    truth = Truth()
    with over_store(server) as daemon:
        engine = CheckedEngine(daemon, truth)
        share(daemon, engine)
        if not stays:
            engine.close()
        status, output = command(daemon, "clear", what, "--yes")
        assert status == 0
        assert f"{server.name} keeps its copies" in output
        if not stays:
            engine = CheckedEngine(daemon, truth)
        assert engine.has(SOME), "that is so"
        if not stays:
            engine.close()
            with AdminClient(daemon.directory) as admin:
                admin.clear()  # it forgets the namespace
        status, said = command(daemon, *command_in(output), "--yes")
        assert (status, "keeps its copies" in said) == (0, False), said
        truth.drop()
        if not stays:
            engine = CheckedEngine(daemon, truth)
        with engine:
            assert engine.get(SOME) == []


def test_clear_names_no_store_where_there_is_none(daemon: DaemonProcess) -> None:
    with CheckedEngine(daemon):
        status, output = command(daemon, "clear", "demo", "--yes")
        assert (status, output.count("\n")) == (0, 1), output


def test_a_namespace_that_is_not_shared_and_forgotten_is_shared_again(server: RedisServer) -> None:
    truth = Truth()
    with over_store(server) as daemon:
        with CheckedEngine(daemon, truth) as engine:
            share(daemon, engine)
            assert engine.scheduler.reset()
            truth.drop()
        with AdminClient(daemon.directory) as admin:
            admin.clear()  # it forgets the namespace
        assert books(daemon.directory).shared[0].unshared_namespaces == 1
        status, output = command(daemon, "clear", "--all", "--all-nodes", "--yes")
        assert status == 0
        assert "1 more that was not shared" in output
        assert books(daemon.directory).shared[0].unshared_namespaces == 0
        with CheckedEngine(daemon, truth) as engine:
            assert engine.get(SOME) == []
            engine.put(SOME)
            wait_until(lambda: books(daemon.directory).shared[0].written_blocks == 2 * len(SOME))
