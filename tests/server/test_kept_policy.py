"""What the policy learned outlives the daemon that learned it."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.cache.policies import make_policy
from kvoffd.cache.policies.lru import Policy as LruPolicy
from kvoffd.config import Config
from kvoffd.server import kept_policy
from kvoffd.server.kept_file import KeptFile
from kvoffd_client import SharedMemory
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, keys
from tests.kit.waiting import wait_until

PAGE = 16384


def use(daemon: DaemonProcess) -> None:
    """Store two blocks; look up others."""
    with (
        SharedMemory(8 * PAGE, "test") as memory,
        WireClient(daemon.directory) as worker,
        WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler,
    ):
        for client in (worker, scheduler):
            client.open_namespace()
        registration = worker.register(memory)
        assert worker.store(registration, 1, keys(1, 2), ids(0, 1)).ok
        for lease, asked in enumerate([keys(1, 2, 3), keys(1, 4, 5, 6)]):
            groups = [m.GroupKeys(0, asked)]
            scheduler.ask(m.Lookup, NAMESPACE, scheduler.lease(lease), groups)


def left_by(daemon: DaemonProcess, kept: Path) -> bytes:
    use(daemon)
    daemon.stop()
    return kept.read_bytes()


def of_format(number: int, file: bytes) -> bytes:
    """The file with the number of another format, and its checksum."""
    name, _, record = file.partition(b"\n")
    changed = record[:-8] + struct.pack("=I", number)
    return name + b"\n" + changed + struct.pack("=I", zlib.crc32(changed))


def test_what_is_of_no_use_is_said_and_the_policy_learns_anew(
    pool_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Path(f"{pool_file}.policy")
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="learned") as daemon:
        good = left_by(daemon, kept)

    def known_to_the_next() -> int:
        caplog.clear()
        policy = make_policy("learned", 16 << 20)
        config = Config(pool_file=str(pool_file), pool_bytes=16 << 20, eviction_policy="learned")
        kept_policy.KeptPolicy(policy, config).go_on()
        return policy.ghosts

    assert known_to_the_next() == 6
    assert not caplog.messages
    for damage, sentence in (
        (good[:-1], "its checksum is wrong"),
        (good[:10], "it is cut off"),
        (b"", "it is empty"),
        (b"gate\n", "it is not of the policy learned"),
        (of_format(7, good), "its format is 7, not 4"),
        (bytes(17 << 20), "more than"),
        (None, "it is not a file of this user's"),
    ):
        kept.unlink()
        if damage is None:
            os.mkfifo(kept)
        else:
            kept.write_bytes(damage)
        assert known_to_the_next() == 0
        assert sentence in caplog.messages[0]
        assert "The policy begins without it." in caplog.messages[0]


class Remembering(LruPolicy):
    """A policy that has something to leave."""

    def record(self) -> Iterator[bytes]:
        return iter([b"what ", *[b"it "] * 99, b"knew"])


def test_it_is_written_now_and_then_for_a_daemon_that_is_killed(
    pool_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, now = Remembering(1 << 24), [1000.0]
    monkeypatch.setattr(kept_policy.time, "monotonic", lambda: now[0])
    kept = kept_policy.KeptPolicy(policy, Config(pool_file=str(pool_file), eviction_policy="lru"))
    file = Path(f"{pool_file}.policy")
    kept.tick()
    assert not file.exists()
    now[0] += kept_policy.KEPT_EVERY_S
    assert kept._file is not None
    kept.tick()
    assert not file.exists(), "not all of it is made at once"
    wait_until(lambda: kept.tick() or file.exists(), 10)
    assert file.read_bytes() == b"lru\nwhat " + 99 * b"it " + b"knew"
    file.unlink()
    kept.tick()
    assert not file.exists()
    kept.close()
    assert file.exists()


class Failing(LruPolicy):
    """Another package's policy, which fails."""

    def record(self) -> Iterator[bytes]:
        yield from [b"it "] * 40
        raise KeyError("what it knew")

    def go_on(self, record: bytes) -> None:
        raise TypeError("what it knew")


def test_a_policy_that_fails_ends_no_daemon_and_leaves_what_was_there(
    pool_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, file = [1000.0], Path(f"{pool_file}.policy")
    monkeypatch.setattr(kept_policy.time, "monotonic", lambda: now[0])
    file.write_bytes(b"lru\nbefore")
    file.chmod(0o600)
    kept = kept_policy.KeptPolicy(Failing(1 << 24), Config(pool_file=str(pool_file), eviction_policy="lru"))
    kept.go_on()
    assert "is of no use: the policy failed with TypeError('what it knew'). The policy begins without it" in caplog.text
    now[0] += kept_policy.KEPT_EVERY_S
    wait_until(lambda: kept.tick() or kept._file.error, 10)
    kept.close()
    assert "it was given up" in caplog.text
    assert file.read_bytes() == b"lru\nbefore"
    assert not Path(f"{file}.new").exists(), "on a small tmpfs it would take the room that is lacking"


def test_a_directory_in_its_place_costs_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        KeptFile(str(tmp_path), 100).read()
    assert os.listdir("/proc/self/fd") == before
