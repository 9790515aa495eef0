"""Whoever logs does not wait for those who read the log."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress

from kvoffd.observe import log_writer
from kvoffd.observe.log_writer import MOST_LINES, LogWriter
from tests.kit.waiting import wait_until


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("kvoffd.test", logging.INFO, "", 0, text, None, None)


def test_a_reader_that_does_not_read_keeps_nobody_waiting_and_is_told_what_it_lost(monkeypatch) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_S", 0.01)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while os.write(write_end, b" " * 4096):
            """Until the pipe is full."""
    os.set_blocking(write_end, True)
    writer = LogWriter(write_end)
    logged = threading.Thread(target=lambda: [writer.emit(record(f"{n:0100}")) for n in range(2 * MOST_LINES)])
    logged.start()
    logged.join(30.0)
    assert not logged.is_alive()
    writer.flush()  # at the end of the process, which it does not delay
    with os.fdopen(read_end) as log:
        lines = [log.readline().strip()]
        while "were lost" not in lines[-1]:
            lines.append(log.readline().strip())
    assert [int(line) for line in lines[:-1]] == list(range(MOST_LINES)), "none is cut, and they keep their order"
    assert lines[-1].startswith(f"{MOST_LINES} lines of the log were lost")


def test_a_reader_that_is_gone_keeps_nobody_waiting() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = LogWriter(write_end)
    for n in range(3):
        writer.emit(record(str(n)))
    writer.flush()
    wait_until(lambda: writer._lost == 3)
