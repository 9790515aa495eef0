"""The floor must be a floor: it answers with the size it was asked for, and ends with its parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.daemon.echo import HEADER_BYTES, Echo, ReplySocket, echo_request


@pytest.mark.parametrize("size", [HEADER_BYTES, 100, 70_000])
def test_requests_have_the_size_asked_for(size: int) -> None:
    assert len(echo_request(size, 10)) == size


@pytest.mark.parametrize("way", list(ReplySocket))
def test_answers_come_back_on_their_way(way: ReplySocket) -> None:
    with Echo() as echo:
        for answer_bytes in (0, 10, 100_000):
            assert 0 < echo.round_trip(echo_request(200, answer_bytes, way), way) < 5


def test_the_process_ends_when_its_parent_goes(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.bench.daemon.echo", str(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.wait(timeout=10) == 0
