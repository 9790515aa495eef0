"""Files from one daemon to the next: whole or not at all, and one of no use is no obstacle."""

from __future__ import annotations

import os
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffd.cache.queues import Queues
from kvoffd.config import Config
from kvoffd.server import persistence
from kvoffd.server.persistence import STATE_FILE, PolicyFile, State, StateFile
from tests.kit.clock import Clock
from tests.kit.waiting import wait_until

ONE, OTHER = b"1" * 32, b"2" * 32
Open = Callable[[str], StateFile]


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Open]:
    made: list[StateFile] = []

    def opened(name: str) -> StateFile:
        made.append(StateFile(str(tmp_path / name), 100_000))
        return made[-1]

    yield opened
    for file in made:
        file.close(10.0)


@pytest.fixture
def next_state(open_file: Open) -> Callable[[], State]:
    """What the next daemon knows."""

    def restored() -> State:
        state = State(open_file(STATE_FILE))
        state.restore()
        return state

    return restored


# --- generations and quotas ------------------------------------------------------------------------


def test_so_many_names_are_known_and_those_of_namespaces_that_there_are_stay(
    monkeypatch: pytest.MonkeyPatch, next_state: Callable[[], State]
) -> None:
    monkeypatch.setattr(persistence, "MAX_NAMES", 10)
    state = next_state()
    state.is_there = {ONE}.__contains__
    for name in (OTHER, ONE, *(bytes([number]) for number in range(20))):
        state.raise_generation(name)
        state.unshare(name)
    assert state.file.flush(10.0)
    again = next_state()
    assert list(again.known.unshared) == [ONE, *(bytes([number]) for number in range(11, 20))]
    assert (again.generation(ONE), again.generation(OTHER), again.generation(b"\x13")) == (2, 0, 22)


def test_damage_of_any_byte_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, next_state: Callable[[], State]
) -> None:
    state, path = next_state(), tmp_path / STATE_FILE
    state.raise_generation(ONE)
    state.followed(OTHER, {"a": 17})
    assert state.file.flush(10.0)
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at]):
            caplog.clear()
            path.write_bytes(damaged)
            state.restore()
            assert "is of no use" in caplog.text
            assert state.file.flush(10.0)


def test_a_file_of_deeply_nested_brackets_is_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, next_state: Callable[[], State]
) -> None:
    body = b'{"lifetime":{"x":' + b"[" * 50_000
    (tmp_path / STATE_FILE).write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    assert next_state().generation(ONE) == 0
    assert "is of no use" in caplog.text


def test_generations_only_rise_and_all_are_raised_at_once(next_state: Callable[[], State]) -> None:
    state = next_state()
    numbers = [state.generation(ONE)]
    for change in (
        lambda: state.raise_generation(ONE),
        lambda: state.found(ONE, 7),
        lambda: state.found(ONE, 3),
        lambda: state.raise_generation(ONE),
        state.raise_all,
        lambda: state.raise_generation(ONE),
    ):
        change()
        numbers.append(state.generation(ONE))
    assert numbers == [0, 1, 7, 7, 8, 9, 10]
    assert state.generation(OTHER) == 9, "all: also those that nobody has heard of yet"


# --- how files are read and written ----------------------------------------------------------------


def test_a_file_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_file: Open
) -> None:
    """A power cut leaves the old one or the new one."""
    calls: list[str] = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or real_sync(fd))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace") or real_replace(old, new))
    file = open_file("file")
    file.save(b"all of it")
    assert file.flush(10.0)
    assert calls == [str(tmp_path / "file.new"), "replace", str(tmp_path)]
    assert file.read() == b"all of it"


def test_a_file_system_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> None:
    hangs, replace = threading.Event(), os.replace
    monkeypatch.setattr(os, "replace", lambda *names: hangs.wait(30.0) and replace(*names))
    file = open_file("file")
    for content in (b"first", b"second", b"third"):
        file.save(content)
    assert not file.flush(0.01)
    assert "takes long" in file.problem
    hangs.set()
    assert file.flush(30.0)
    assert (file.read(), file.problem) == (b"third", "")


# --- what a policy learned -------------------------------------------------------------------------


class Remembering(Queues):
    """A policy that has something to leave."""

    def state(self) -> bytes:
        return b"what it knew"

    def restore(self, state: bytes) -> None:
        assert state == b"what it knew"


KNEW = b"lru\nwhat it knew"


def policy_file(pool_file: Path, **settings: Any) -> PolicyFile:
    return PolicyFile(Remembering(16), Config(pool_file=str(pool_file), eviction_policy="lru", **settings))


def test_what_another_policy_knew_stays_for_it(pool_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = Path(f"{pool_file}.policy")
    file.write_bytes(b"learned\nmuch")
    policy_file(pool_file).restore()
    assert file.read_bytes() == b"learned\nmuch"
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_beside_a_pool_of_huge_pages_nothing_can_be_written_so_it_is_kept_in_the_directory(tmp_path: Path) -> None:
    where = tmp_path / "huge"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "hugetlbfs", "none", where], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no hugetlbfs can be mounted: {mounted.stderr}")
    try:
        policy_file(where / "pool", directory=tmp_path).close()
        assert (tmp_path / "kvoffd.policy").read_bytes() == KNEW
        assert not list(where.iterdir())
    finally:
        subprocess.run(["umount", where], check=True)


def test_a_policy_is_written_now_and_then_and_at_the_end(
    pool_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(persistence.time, "monotonic", clock)
    saved, file = policy_file(pool_file), Path(f"{pool_file}.policy")
    saved.tick()
    clock.now += persistence.POLICY_EVERY_S
    saved.tick()
    wait_until(file.exists, 10)
    assert file.read_bytes() == KNEW
    file.unlink()
    saved.tick()
    assert not file.exists()
    saved.close()
    assert file.read_bytes() == KNEW
    assert not Path(f"{file}.new").exists()
    policy_file(pool_file).restore()
    assert not caplog.text
