"""What a daemon writes down for the next one: the quotas of namespaces, what the policy learned, resets."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import NamespaceStats, books, keys

MIB = 1 << 20


def set_quota(daemon: DaemonProcess, most: str, status: int = 0) -> str:
    """``kvoffd-cli namespaces quota``; what it prints."""
    found, text = command(daemon, "namespaces", "quota", "demo", "--max", most)
    assert found == status, text
    return text


def namespace(daemon: DaemonProcess, label: str) -> NamespaceStats:
    return next(one for one in books(daemon.directory).namespaces.values() if one.model == label)


def use(daemon: DaemonProcess) -> None:
    """Store two blocks; look up others."""
    with FakeEngine(daemon.directory) as engine:
        assert engine.store(keys(1, 2), [0, 1]).ok
        assert engine.lookup(keys(1, 2, 3)) == 2
        assert engine.lookup(keys(1, 4, 5, 6)) == 1


def learned_requests(daemon: DaemonProcess) -> int:
    """Requests that what the policy knows is made of."""
    with AdminClient(daemon.directory) as admin:
        return admin.stats().learned.requests


# --- quotas of namespaces --------------------------------------------------------------------------


def test_a_quota_that_cannot_be_written_down_holds_and_is_written_when_the_daemon_ends(pool_file: Path) -> None:
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="lru") as daemon:
        file = daemon.directory / "kvoffd.state"
        use(daemon)
        (in_the_way := Path(f"{file}.new")).mkdir()
        assert f"{file} cannot be written: [Errno 21]" in set_quota(daemon, "4MiB", status=2)
        assert namespace(daemon, "demo").quota_bytes == 4 * MIB, "it holds"
        assert books(daemon.directory).problems == {"state_unwritable": 1}
        in_the_way.rmdir()
        daemon.stop()
        daemon.start()
        assert namespace(daemon, "demo").quota_bytes == 4 * MIB, "the end of the daemon tries it again"


# --- what the policy learned -----------------------------------------------------------------------


def test_policy_of_the_next_daemon_knows_what_was_learned(tmp_path: Path) -> None:
    """A link in the file's place is neither followed nor written through."""
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    with DaemonProcess("16MiB", eviction_policy="learned") as daemon:
        file = daemon.directory / "kvoffd.policy"
        Path(f"{file}.new").symlink_to(other)
        use(daemon)
        known = learned_requests(daemon)
        assert known
        assert daemon.stop() == 0
        assert file.read_bytes().startswith(b"learned\n")
        assert file.stat().st_mode & 0o777 == 0o600
        assert not file.is_symlink()
        daemon.start()
        assert learned_requests(daemon) == known
        assert "Ignoring the policy state" not in daemon.log
        daemon.stop()
        file.unlink()
        file.symlink_to(other)
        daemon.start()
        assert learned_requests(daemon) == 0
        assert "Ignoring the policy state" in daemon.log
        assert other.read_bytes() == b"mine"


# --- unusable files ------------------------------------------------------------------------------


def test_state_files_of_no_use_are_logged_and_left_out(pool_file: Path) -> None:
    """A file that is cut, flipped, another's or no file at all keeps no daemon from its start. The pool is void."""
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="learned") as daemon:
        use(daemon)
        set_quota(daemon, "8MiB")
        policy, state = daemon.directory / "kvoffd.policy", daemon.directory / "kvoffd.state"
        daemon.stop()
        good = {file: file.read_bytes() for file in (policy, state)}
        assert f":{8 * MIB}}}".encode() in good[state]
        for damaged in ({policy: good[policy][:-1], state: good[state][:20]}, {policy: b"", state: b""}, {}):
            said = len(daemon.log)
            for file in (policy, state):
                file.unlink(missing_ok=True)
                if damaged:
                    file.write_bytes(damaged[file])
                else:
                    os.mkfifo(file)
            daemon.start()
            assert learned_requests(daemon) == 0
            with FakeEngine(daemon.directory) as engine:
                assert engine.lookup(keys(1)) == 0, "nobody knows whether it was cleared"
                assert namespace(daemon, "demo").quota_bytes is None
            for file in (policy, state):
                pattern = f"(Ignoring the policy state in|Cannot use these parts of) {re.escape(str(file))}[:,]"
                wait_until(lambda pattern=pattern, said=said: re.search(pattern, daemon.log[said:]))  # type: ignore[misc]
            daemon.kill()
