"""Files from one daemon to the next: whole or not at all, and one of no use is no obstacle."""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvoffd.cache.lru import Lru
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server import persistence
from kvoffd.server.persistence import STATE_FILE, PolicyFile, State, StateFile
from kvoffd.tiers import generations
from kvoffd_proto.stats import Lifetime
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


Next = Callable[[], State]
NOW = 1_700_000_000


def unshare(state: State, fingerprint: bytes, until: int) -> None:
    """An engine resets a namespace: it is not shared until a higher fleet generation."""
    clock = state.generations._wall_clock
    state.generations._wall_clock = lambda: until - generations.AHEAD_S
    state.generations.stop_sharing(fingerprint)
    state.generations._wall_clock = clock


def follow(state: State, fingerprint: bytes, generation: int) -> None:
    """A namespace was voided on all nodes."""
    state.generations.hear(fingerprint, generation)
    state.generations.followed(fingerprint)


def test_its_thread_finds_out_whether_a_file_outlives_a_reboot(
    open_file: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the daemon's, which a file system that hangs would stop."""
    asked: list[threading.Thread] = []

    def in_memory(fd: int) -> int:
        asked.append(threading.current_thread())
        return persistence.IN_MEMORY[0]

    monkeypatch.setattr(persistence, "filesystem_magic", in_memory)
    file = open_file(STATE_FILE)
    file.save(b"content")
    assert file.flush(10.0)
    assert not file.outlives_reboot
    assert threading.main_thread() not in asked


@pytest.fixture
def clock() -> Clock:
    """In seconds since 1970."""
    clock = Clock()
    clock.now = NOW
    return clock


@pytest.fixture
def next_state(open_file: Open, clock: Clock) -> Next:
    """What the next daemon knows."""

    def restored() -> State:
        state = State(open_file(STATE_FILE), clock)
        state.restore()
        return state

    return restored


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o660])
def test_two_daemons_do_not_keep_their_resets_in_one_file(open_file: Open, tmp_path: Path, mode: int) -> None:
    """A kubelet widens the mode of a volume's files for fsGroup: the lock was skipped without a word."""
    lock = tmp_path / f"{STATE_FILE}.lock"
    lock.touch(mode)
    lock.chmod(mode)
    open_file(STATE_FILE).claim()
    with pytest.raises(KvoffdError, match="Another kvoffd keeps its clears and resets in"):
        open_file(STATE_FILE).claim()
    assert lock.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_is_not_this_users_is_said(
    open_file: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{STATE_FILE}.lock").touch(0o666)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(KvoffdError, match=rf"{STATE_FILE}\.lock belongs to user"):
        open_file(STATE_FILE).claim()


# --- generations and quotas ------------------------------------------------------------------------


def test_a_generation_is_a_time_and_above_all_that_were_seen(next_state: Next, clock: Clock) -> None:
    state = next_state()
    numbers, us = [state.generations.of(ONE)], 1_000_000 * NOW
    for change in (
        lambda: state.generations.void_here(ONE),
        lambda: state.generations.accept(ONE, us - 5),
        lambda: state.generations.void_here(ONE),
        lambda: setattr(clock, "now", NOW + 2),
        lambda: state.generations.accept(ONE, us + 7),
        lambda: setattr(clock, "now", NOW - 100),  # it is set back
        lambda: state.generations.void_here(None),
        lambda: state.generations.void_here(ONE),
    ):
        change()
        numbers.append(state.generations.of(ONE))
    assert numbers == [0, us, us, us + 1, us + 1, us + 7, us + 7, us + 8, us + 9]
    assert state.generations.of(OTHER) == us + 8, "all: also those that nobody has heard of yet"


def test_of_what_a_pool_or_disk_shows_the_highest_generation_counts(next_state: Next, clock: Clock) -> None:
    """But for one in the future: it was raised before the clock was set back, or after."""
    state, us = next_state(), 1_000_000 * NOW
    assert [state.generations.accept(ONE, one) for one in (0, 17, 17, 5)] == [True, True, True, False]
    assert not state.generations.accept(ONE, us + 1)
    assert state.generations.of(ONE) > us + 1


def test_the_oldest_names_are_forgotten_on_the_safe_side(monkeypatch: pytest.MonkeyPatch, next_state: Next) -> None:
    """Those of namespaces that there are stay."""
    monkeypatch.setattr(generations, "MAX_NAMES", 10)
    state = next_state()
    state.generations.known = [ONE, never := b"3" * 32]
    for name in (OTHER, ONE, *(bytes([number]) for number in range(9))):
        state.generations.void_here(name)
        unshare(state, name, 6)
    was = [state.generations.of(name) for name in (ONE, OTHER)]
    for number in range(9, 20):
        state.generations.void_here(bytes([number]))
        unshare(state, bytes([number]), 6)
    assert state.file.flush(10.0)
    again = next_state()
    assert again.generations.of(ONE) == was[0]
    assert again.generations.of(OTHER) >= was[1]
    assert again.generations.is_unshared(ONE)
    assert again.generations.is_unshared(OTHER)
    assert (again.generations.of(never), again.generations.is_unshared(never)) == (0, False)
    follow(again, OTHER, 6)
    assert again.generations.is_unshared(OTHER)
    follow(again, OTHER, 7)
    assert dict(again.generations) == {OTHER: 7}
    assert not again.generations.is_unshared(OTHER)
    assert len(again.generations.resets.generations) == len(again.generations.resets.unshared) == 10


def test_a_number_that_an_earlier_release_followed_blindly_can_be_raised(next_state: Next) -> None:
    """A store's false answer made it the mark of a namespace that is not shared."""
    state = next_state()
    state.generations.resets.unshared[ONE] = 10**18 - 2
    unshare(state, OTHER, 6)
    assert state.file.flush(10.0)
    again = next_state()
    assert (again.generations.unshared_at(ONE), again.generations.unshared_at(OTHER)) == (NOW, 6)
    follow(again, ONE, NOW + 1)
    assert not again.generations.is_unshared(ONE)


def test_a_reset_of_all_nodes_from_before_a_reset_here_shares_nothing(tmp_path: Path, next_state: Next) -> None:
    """Neither after a restart, nor after the resets were lost. A file of an earlier version said True."""
    state = next_state()
    unshare(state, ONE, 100)
    unshare(state, ONE, 50)
    follow(state, ONE, 100)
    assert state.file.flush(10.0)
    state = next_state()
    assert state.generations.is_unshared(ONE)
    follow(state, ONE, 101)
    assert not state.generations.is_unshared(ONE)
    state.generations.resets.unshared[OTHER] = True
    assert state.generations.is_unshared(OTHER)
    follow(state, OTHER, 101)
    assert not state.generations.is_unshared(OTHER)
    assert state.file.flush(10.0)
    (tmp_path / STATE_FILE).write_bytes(b"damaged")
    state = next_state()
    follow(state, ONE, 101)
    assert state.generations.is_unshared(ONE)
    follow(state, ONE, NOW + 1000)
    assert not state.generations.is_unshared(ONE)
    assert state.generations.is_unshared(OTHER)


def test_damage_of_any_byte_costs_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_state: Next, clock: Clock
) -> None:
    """What protects is there twice. Where both are lost, all that there was is void, and nothing is shared."""
    state, path = next_state(), tmp_path / STATE_FILE
    state.generations.void_here(ONE)
    unshare(state, OTHER, 1)
    state.save_quotas({ONE: 5})
    state.save_lifetime(Lifetime(1.0, 2, 3.0))
    assert state.file.flush(10.0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    whole, known = path.read_bytes(), state.generations.of(ONE)
    file = StateFile(str(path), 100_000)
    clock.now += 1
    for at in range(len(whole)):
        before, after = whole[:at], whole[at + 1 :]
        for damaged in (before + bytes([whole[at] ^ 1]) + after, before + b"\n" + after, before):
            assert file.flush(10.0)
            path.write_bytes(damaged)
            found = State(file, clock)
            found.restore()
            void = found.generations.of(ONE) > known
            assert found.generations.of(ONE) >= known
            assert found.generations.is_unshared(OTHER)
            assert found.generations.is_unshared(ONE) == void
            lost = [found.quotas != {ONE: 5}, found.counted.lifetime != Lifetime(1.0, 2, 3.0), void]
            assert sum(lost) <= 1 or len(damaged) < len(whole)
            assert not void or len(damaged) < whole.index(b"\n")
    file.close()


def test_a_total_that_cannot_be_costs_itself_alone(next_state: Next) -> None:
    state = next_state()
    state.generations.void_here(ONE)
    state.save_lifetime(Lifetime(1.0, 2, inf))
    assert state.file.flush(10.0)
    again = next_state()
    assert (again.generations.of(ONE), again.counted.lifetime) == (state.generations.of(ONE), Lifetime())


def test_a_file_of_deeply_nested_brackets_is_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, next_state: Next
) -> None:
    body = b'resets {"last":' + b"[" * 50_000
    (tmp_path / STATE_FILE).write_bytes(b"%08x %s" % (zlib.crc32(body), body))
    assert next_state().generations.of(ONE) == 1_000_000 * NOW
    assert "Cannot use these parts" in caplog.text


def test_what_0_2_wrote_is_read(tmp_path: Path, next_state: Next) -> None:
    names = {b64encode(ONE).decode(): 7}
    known = {"last": 9, "floor": 2, "generations": names, "missed": {"/mnt": {}}, "quotas": names}
    by_url = {"redis://a": 7, "redis://b": 5, "s3://c": 10**18}
    known["fleet"] = {url: dict.fromkeys(names, number) for url, number in by_url.items()}
    known["unshared"] = {b64encode(OTHER).decode(): True}
    body = json.dumps(known).encode()
    (tmp_path / STATE_FILE).write_bytes(b"%08x\n%s" % (zlib.crc32(body), body))
    state = next_state()
    for _ in range(2):
        table = state.generations
        assert (table.of(ONE), table.of(OTHER), state.quotas) == (7, 2, {ONE: 7})
        assert (table.fleet(ONE), table.unshared_at(OTHER)) == (7, 1), "the highest that a node can have written"
        assert state.file.flush(10.0)
        state = next_state()  # which reads what this release wrote


def line_of(name: str, content: object) -> bytes:
    """A part of the file."""
    body = f"{name} {json.dumps(content, separators=(',', ':'))}".encode()
    return b"%08x %s\n\n" % (zlib.crc32(body), body)


def parts_of(path: Path) -> dict[str, Any]:
    """The file's parts, whatever they are, as any release reads them."""
    parts = dict[str, Any]()
    for line in filter(None, path.read_bytes().split(b"\n")):
        checksum, _, body = line.partition(b" ")
        assert checksum == b"%08x" % zlib.crc32(body)
        name, _, encoded = body.decode().partition(" ")
        parts[name] = json.loads(encoded)
    return parts


def test_what_a_later_release_has_added_stays_when_one_goes_back(tmp_path: Path, next_state: Next) -> None:
    path, names = tmp_path / STATE_FILE, {b64encode(ONE).decode(): 7}
    added = {"since": "later", "deep": {"whom": [1, {"two": None}]}}
    path.write_bytes(
        line_of("resets", {"floor": 2, "generations": names, "added": added})
        + line_of("leases", {"of": added})
        + line_of("quotas", {"quotas": names})
        + line_of("counted", {"added": 0.1})
        + line_of("format", {"number": persistence.FORMAT})
    )
    state = next_state()
    for change in (
        lambda: None,
        lambda: state.save_quotas({OTHER: 5}),
        lambda: state.save_lifetime(Lifetime(1.0, 2, 3.0)),
        lambda: state.generations.void_here(OTHER),
    ):
        change()
        assert state.file.flush(10.0)
        found = parts_of(path)
        assert (found["resets"]["added"], found["leases"], found["counted"]["added"]) == (added, {"of": added}, 0.1)
        assert found["format"] == {"number": persistence.FORMAT}
    known = state.generations
    state = next_state()
    assert (state.generations.of(ONE), state.generations.of(OTHER)) == (7, known.of(OTHER))
    assert (state.quotas, state.counted.lifetime) == ({OTHER: 5}, Lifetime(1.0, 2, 3.0))
    assert state.file.requested == 0, "it was as this release writes it"


def test_a_file_that_this_release_would_destroy_is_refused(tmp_path: Path, next_state: Next) -> None:
    content = line_of("resets", {"generations": "in another form"}) + line_of("format", {"number": 2, "why": "new"})
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(KvoffdError, match="is in format 2 of a later release of kvoffd"):
        next_state()
    assert (tmp_path / STATE_FILE).read_bytes() == content


def test_a_read_that_fails_is_not_the_same_as_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_state: Next
) -> None:
    state = next_state()
    state.generations.void_here(ONE)
    assert state.file.flush(10.0)
    content = (tmp_path / STATE_FILE).read_bytes()

    def fails(file: StateFile) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(StateFile, "read", fails)
    with pytest.raises(KvoffdError, match="cannot be read"):
        next_state()
    assert (tmp_path / STATE_FILE).read_bytes() == content


# --- how files are read and written ----------------------------------------------------------------


def test_a_file_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_file: Open
) -> None:
    """A power cut leaves the old one or the new one, and what a kill left of a new one is in nobody's way."""
    (tmp_path / "file.new").write_bytes(b"a part")
    calls: list[str] = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or real_sync(fd))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace") or real_replace(old, new))
    file = open_file("file")
    file.save(b"all of it")
    assert file.flush(10.0)
    assert calls == [str(tmp_path / "file.new"), "replace", str(tmp_path)]
    assert file.read() == b"all of it"


def test_a_file_whose_writing_raises_whatever_is_written_later(
    monkeypatch: pytest.MonkeyPatch, open_file: Open
) -> None:
    real, raised = os.replace, list[str]()

    def replace(old: str, new: str) -> None:
        if not raised:
            raised.append(new)
            raise RuntimeError("surprise")
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(persistence, "RETRY_S", 0.01)
    file = open_file("file")
    file.save(b"all of it")
    wait_until(lambda: file.written == file.requested == 1)
    assert raised
    assert (file.read(), file.unsaved_reason) == (b"all of it", "")


def test_a_file_system_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> None:
    hangs, replace = threading.Event(), os.replace
    monkeypatch.setattr(os, "replace", lambda *names: hangs.wait(30.0) and replace(*names))
    file = open_file("file")
    for content in (b"first", b"second", b"third"):
        file.save(content)
    assert not file.flush(0.01)
    assert "takes long" in file.unsaved_reason
    hangs.set()
    assert file.flush(30.0)
    assert (file.read(), file.unsaved_reason) == (b"third", "")


def test_a_write_is_a_problem_once_it_hangs(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> None:
    """Until then what the one before it found holds."""
    hangs, replace = threading.Event(), os.replace
    monkeypatch.setattr(os, "replace", lambda *names: hangs.wait(30.0) and replace(*names))
    monkeypatch.setattr(persistence, "HANGS_S", inf)
    file = open_file("file")
    file.save(b"content")
    wait_until(lambda: file._began_at)
    assert (file.is_tried, file.broken_reason) == (False, "")
    monkeypatch.setattr(persistence, "HANGS_S", 0.0)
    assert "has been being written for" in file.broken_reason
    hangs.set()
    assert file.flush(30.0)
    assert file.broken_reason == ""


def test_a_file_whose_write_hangs_at_the_end_stays_locked(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> None:
    """The write may end at any time, and would undo what another daemon has written since."""
    file = open_file("file")
    file.claim()
    with monkeypatch.context() as patch:
        hangs, replace = threading.Event(), os.replace
        patch.setattr(os, "replace", lambda *names: hangs.wait(30.0) and replace(*names))
        file.save(b"of the daemon before")
        file.close(0.01)
        with pytest.raises(KvoffdError, match="Another kvoffd"):
            open_file("file").claim()
        hangs.set()
        wait_until(lambda: file.is_tried)
    os.close(file._lock_fd)  # as at the end of the process
    other = open_file("file")
    other.claim()
    other.close()
    open_file("file").claim()


# --- what a policy learned -------------------------------------------------------------------------


class Remembering(Lru):
    """A policy that has something to leave."""

    def state(self) -> bytes:
        return b"what it knew"

    def restore(self, state: bytes) -> None:
        assert state == b"what it knew"


KNEW = b"lru\nwhat it knew"


def policy_file(directory: Path) -> PolicyFile:
    return PolicyFile(Remembering(16), Config(directory=directory, eviction_policy="lru"))


def test_what_another_policy_knew_stays_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "kvoffd.policy"
    file.write_bytes(b"learned\nmuch")
    policy_file(tmp_path).restore()
    assert file.read_bytes() == b"learned\nmuch"
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_policy_is_written_now_and_then_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    saved, file = policy_file(tmp_path), tmp_path / "kvoffd.policy"
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
    policy_file(tmp_path).restore()
    assert not caplog.text
