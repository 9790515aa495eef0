"""What is known of resets goes from one daemon to the next, and a file that is of no use is no obstacle."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvoffd.server import kept_file, kept_resets
from kvoffd.server.kept_file import checked
from kvoffd.server.kept_resets import FILE, KeptResets
from tests.kit.waiting import wait_until

ONE, OTHER = b"1" * 32, b"2" * 32


def test_what_was_noted_is_known_again(tmp_path: Path) -> None:
    kept = KeptResets.of(tmp_path)
    assert (kept.unshared, kept.generations_of("a")) == ([], {})
    kept.note(ONE, {"a": 3, "b": 0}, [])
    kept.note(ONE, None, [("/there", 0)])
    kept.note(OTHER, None, [])
    kept.note(OTHER, {"a": 9}, [])
    kept.close()
    again = KeptResets.of(tmp_path)
    assert again.unshared == [ONE]
    assert again.generations_of("a") == {ONE: 3, OTHER: 9}
    assert again.take_missed("/there") == [OTHER]
    assert set(again.take_missed("/away")) == {ONE, OTHER}
    again.close()
    last = KeptResets.of(tmp_path)
    assert last.take_missed("/there") == last.take_missed("/away") == []
    last.note(ONE, None, [("/away", 0)])
    assert (last.take_missed("/there"), last.take_missed("/away")) == ([ONE], [])
    last.close()
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600


def test_an_older_copy_has_not_seen_what_came_after_it(tmp_path: Path) -> None:
    kept = KeptResets.of(tmp_path)
    kept.note(ONE, None, [("disk", 7)])
    assert kept.take_missed("disk", 8) == kept.take_missed("disk", 7) == []
    assert kept.take_missed("disk", 6) == [ONE]
    assert kept.take_missed("disk", 6) == [], "now it has"


NESTED = '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"left": {"no hex": null}}', '{"generations": {"a": {"0": "x"}}}', NESTED]
)
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_bytes(checked(text.encode()))
    kept = KeptResets.of(tmp_path)
    assert (kept.unshared, kept.generations_of("a")) == ([], {})
    assert "is of no use" in caplog.text
    kept.close()
    caplog.clear()
    kept = KeptResets.of(tmp_path)
    assert (kept.unshared, caplog.messages) == ([], [])
    kept.note(ONE, None, [])
    kept.close()
    assert KeptResets.of(tmp_path).unshared == [ONE]


def test_damage_of_any_byte_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptResets.of(tmp_path)
    kept.note(ONE, None, [("/there", 0)])
    kept.note(OTHER, {"a": 17}, [("/there", 0)])
    kept.close()
    whole = (tmp_path / FILE).read_bytes()
    for at in range(len(whole)):
        for bit in (1, 16):  # one digit becomes another
            caplog.clear()
            (tmp_path / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            assert KeptResets.of(tmp_path).unshared == []
            assert "is of no use" in caplog.text
        (tmp_path / FILE).write_bytes(whole[:at])
        assert KeptResets.of(tmp_path).unshared == []


def test_no_more_is_kept_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_resets, "MOST_NAMES", 2)
    kept = KeptResets.of(tmp_path)
    for number in range(4):
        kept.note(bytes([number]), None, [(f"/{number}", 0)])
    assert kept.unshared == [b"\2", b"\3"]


def test_whoever_resets_very_many_makes_that_of_no_other_that_there_is_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_resets, "MOST_NAMES", 10)
    kept = KeptResets.of(tmp_path, {ONE}.__contains__)
    for name in (OTHER, ONE, *(bytes([number]) for number in range(20))):
        kept.note(name, None, [])
    kept.close()
    again = KeptResets.of(tmp_path)
    assert again.unshared == [ONE, *(bytes([number]) for number in range(11, 20))]
    assert ONE in again.take_missed("/away")


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptResets.of(tmp_path / "missing")
    kept.note(ONE, None, [])
    kept.close()
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("at_the_end", [True, False])
def test_what_could_not_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_the_end: bool
) -> None:
    monkeypatch.setattr(kept_resets, "AGAIN_S", 600.0 if at_the_end else 0.0)
    kept = KeptResets.of(tmp_path / "later")
    kept.note(ONE, None, [])
    for _ in range(3):
        wait_until(lambda: kept.is_kept)
        kept.tick()
    (tmp_path / "later").mkdir()
    wait_until(lambda: at_the_end or kept.tick() or (tmp_path / "later" / FILE).exists())
    kept.close()
    assert KeptResets.of(tmp_path / "later").unshared == [ONE]
    assert caplog.text.count("cannot be kept") == 1


def test_a_file_system_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, replace = threading.Event(), os.replace

    def hang(*names: str) -> None:
        hangs.wait(30.0)
        replace(*names)

    monkeypatch.setattr(kept_file, "WRITER_CLOSE_S", 0.01)
    monkeypatch.setattr(os, "replace", hang)
    kept = KeptResets.of(tmp_path)
    for name in (ONE, OTHER):
        kept.note(name, None, [])
    kept.close()
    assert not kept.is_kept
    hangs.set()
    monkeypatch.setattr(kept_file, "WRITER_CLOSE_S", 30.0)
    kept.close()
    assert kept.is_kept
    assert KeptResets.of(tmp_path).unshared == [ONE, OTHER]
