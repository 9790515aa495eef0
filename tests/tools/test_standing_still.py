"""The tool that runs tests as on a shared machine leaves no group behind, and returns the command's status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.waiting import DEADLINE_S
from tests.tools.standing_still import MOUNTS, main

TOOL = [sys.executable, "-m", "tests.tools.standing_still"]


def test_a_command_runs_in_groups_of_its_own() -> None:
    command = ["sh", "-c", "cat /proc/self/cgroup; exit 7"]
    done = subprocess.run(
        [*TOOL, "--still", "0.2", "--cores", "0.5", "--busy", "1", "--", *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (7, "")
    (name,) = {line.rpartition("/")[2] for line in done.stdout.splitlines() if "standing-still-" in line}
    assert not [path for path in (MOUNTS, *MOUNTS.iterdir()) if (path / name).exists()]


@pytest.mark.parametrize("wrong", [["--still", "1"], ["--still", "-0.1"], ["--cores", "-1"], ["--busy", "-1"]])
def test_numbers_that_mean_nothing_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*wrong, "--", "true"])
    assert ended.value.code == 2
    assert "--still is from 0 to less than 1" in capsys.readouterr().err
