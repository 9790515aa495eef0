"""Log records are one line each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvoffd.observe.logging import configure_logging

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
