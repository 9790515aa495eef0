"""Log records are one line each, whatever is in them."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvoffd.observe.logging import MAX_LINES, configure_logging, print_refusal
from kvoffd.system.rare_warnings import RareWarnings

NASTY = "name\nERROR forged\r\x1b[31m\x00\u2028\x9b end"


@pytest.fixture(autouse=True)
def root_logger_given_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:], root.level = handlers, level


class Log:
    """A file that is logged to."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("w+")

    @property
    def fd(self) -> int:
        return self.stream.fileno()

    def text(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        self.stream.seek(0)
        return self.stream.read()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log")
    with made.stream:
        yield made


def fail() -> None:
    try:
        raise OSError("disk\nfull")
    except OSError:
        logging.getLogger("kvoffd.test").exception("It failed.")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_nasty_text_and_a_traceback_stay_in_one_printable_line(log_format: str, log: Log) -> None:
    configure_logging("info", log_format, log.fd)
    logging.getLogger("kvoffd.test").info("client %s", NASTY)
    fail()
    written = log.text()
    first, second = written.splitlines()
    assert written.replace("\n", "").isprintable()
    if log_format == "text":
        assert re.fullmatch(r"\d{4}-\S+T\S+Z INFO kvoffd.test: client name.*", first)
    assert "Traceback" in second
    if log_format == "json":
        assert json.loads(first)["message"] == f"client {NASTY}"
        assert json.loads(second)["exception"].endswith("OSError: disk\nfull")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_journal_is_told_priorities(log_format: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.fstat(log.fd)
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    configure_logging("debug", log_format, log.fd)
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logging.getLogger("kvoffd.test"), level)("said")
    lines = log.text().splitlines()
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    if log_format == "json":
        assert [json.loads(line[3:])["message"] for line in lines] == ["said"] * 5
    elsewhere = os.stat("/")  # a shell under systemd inherits the variable, and redirects stderr
    monkeypatch.setenv("JOURNAL_STREAM", f"{elsewhere.st_dev}:{elsewhere.st_ino}")
    configure_logging("info", log_format, log.fd)
    logging.getLogger("kvoffd.test").error("said")
    assert log.text().splitlines()[-1][0] in "2{"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_refusal_is_one_line_for_people(log_format: str, capfd: pytest.CaptureFixture[str]) -> None:
    print_refusal("It cannot start.", log_format)
    said = capfd.readouterr().err
    if log_format == "json":
        assert json.loads(said)["message"] == "It cannot start."
    else:
        assert said == "kvoffd: It cannot start.\n"


def test_a_reader_that_does_not_read_keeps_nobody_waiting_and_is_told_what_it_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvoffd.observe.logging.FLUSH_S", 0.01)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while os.write(write_end, b" " * 4096):
            """Until the pipe is full."""
    os.set_blocking(write_end, True)
    configure_logging("info", "text", write_end)
    (handler,) = logging.getLogger().handlers
    logger = logging.getLogger("kvoffd.test")
    logged = threading.Thread(target=lambda: [logger.info(f"{n:0100}") for n in range(2 * MAX_LINES)])
    logged.start()
    logged.join(30.0)
    assert not logged.is_alive()
    handler.flush()  # at the end of the process, which it does not delay
    with os.fdopen(read_end) as log:
        lines = [log.readline().strip()]
        while "were lost" not in lines[-1]:
            lines.append(log.readline().strip())
    written = [int(line.split()[-1]) for line in lines[:-1]]
    assert written == list(range(len(written))), "none is cut, and they keep their order"
    assert MAX_LINES <= len(written) <= MAX_LINES + 1
    assert f": {2 * MAX_LINES - len(written)} lines of the log were lost" in lines[-1]


def test_of_rare_warnings_one_a_minute_goes_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("kvoffd.system.rare_warnings.time.monotonic", lambda: now[0])
    warnings = RareWarnings(logging.getLogger("rare"))
    with caplog.at_level(logging.DEBUG):
        for after_s in (0.0, 1.0, 58.0, 1.0):
            now[0] += after_s
            warnings.warn("%s came.", "Somebody")
    levels = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "rare"]
    assert levels == [(level, "Somebody came.") for level in ("WARNING", "DEBUG", "DEBUG", "WARNING")]
