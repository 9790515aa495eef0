"""Log records are one line each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from kvoffd.observe.logging import RareWarnings, configure_logging, print_refusal

NASTY = "name\nERROR forged\r\x1b[31m\x00\u2028\x9b end"


@pytest.fixture(autouse=True)
def root_logger_given_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:], root.level = handlers, level


def fail() -> None:
    try:
        raise OSError("disk\nfull")
    except OSError:
        logging.getLogger("kvoffd.test").exception("It failed.")


def test_text_lines_say_when_how_bad_who_and_what() -> None:
    stream = io.StringIO()
    configure_logging("info", "text", stream)
    logging.getLogger("kvoffd.test").warning("%d blocks left", 3)
    time, rest = stream.getvalue().split(" ", 1)
    assert rest == "WARNING kvoffd.test: 3 blocks left\n"
    assert time.endswith("Z")
    assert "T" in time


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_nasty_text_cannot_forge_a_line_or_talk_to_the_terminal(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging("info", log_format, stream)
    logging.getLogger("kvoffd.test").info("client %s", NASTY)
    written = stream.getvalue()
    assert len(written.splitlines()) == 1
    assert written.rstrip("\n").isprintable()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_stays_in_the_line(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging("info", log_format, stream)
    fail()
    written = stream.getvalue()
    assert len(written.splitlines()) == 1
    assert "Traceback" in written
    assert "OSError" in written


def test_json_lines_are_objects_that_hold_the_text_as_it_was() -> None:
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    logging.getLogger("kvoffd.test").debug("client %s", NASTY)
    fail()
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["message"] == f"client {NASTY}"
    assert (first["level"], first["logger"]) == ("debug", "kvoffd.test")
    assert "exception" not in first
    assert second["exception"].endswith("OSError: disk\nfull")


def test_what_is_below_the_level_is_not_logged() -> None:
    stream = io.StringIO()
    configure_logging("warning", "text", stream)
    logging.getLogger("kvoffd.test").info("quiet")
    assert stream.getvalue() == ""


def test_configuring_again_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "text", first)
    configure_logging("info", "text", second)
    logging.getLogger("kvoffd.test").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextIO:
    """A file that systemd would say is its journal."""
    stream = (tmp_path / "journal").open("w")
    found = os.fstat(stream.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    return stream


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_journal_is_told_priorities(log_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with journal(tmp_path, monkeypatch) as stream:
        configure_logging("debug", log_format, stream)
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(logging.getLogger("kvoffd.test"), level)("said")
        print_refusal("It cannot start.", log_format, stream)
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>", "<3>"]
    if log_format == "json":
        assert [json.loads(line[3:])["message"] for line in lines] == ["said"] * 5 + ["It cannot start."]
    else:
        assert lines[-1] == "<3>kvoffd: It cannot start."


def test_another_file_than_the_journal_gets_no_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell under systemd inherits the variable, and redirects stderr."""
    journal(tmp_path, monkeypatch).close()
    with (tmp_path / "log").open("w") as stream:
        configure_logging("info", "text", stream)
        logging.getLogger("kvoffd.test").error("said")
    assert (tmp_path / "log").read_text().startswith("2")


def test_of_rare_warnings_one_a_minute_goes_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("kvoffd.observe.logging.time.monotonic", lambda: now[0])
    warnings = RareWarnings(logging.getLogger("rare"))
    with caplog.at_level(logging.DEBUG):
        for after_s in (0.0, 1.0, 58.0, 1.0):
            now[0] += after_s
            warnings.warn("%s came.", "Somebody")
    levels = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "rare"]
    assert levels == [(level, "Somebody came.") for level in ("WARNING", "DEBUG", "DEBUG", "WARNING")]
