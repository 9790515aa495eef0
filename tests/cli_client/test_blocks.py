"""``kvoffd-cli block``, ``export`` and ``import`` against real daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd_client import BlockFile
from kvoffd_client.block_file import BlockFileWriter
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.units import format_size
from tests.kit.daemon import DaemonProcess
from tests.kit.open_files import files_of_at_most

KEYS = [bytes([16 * n + n]) * 32 for n in range(1, 9)]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("32MiB") as running:
        yield running


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.directory, "tiny", world_size=2, blocks=32, page_bytes=4096) as fake:
        fake.fill(range(8), seed=1)
        assert fake.store(KEYS, range(8)).ok
        yield fake


@pytest.fixture
def cli(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command on the daemon; returns (status, stdout, stderr)."""

    def run(*arguments: str, on: DaemonProcess = daemon) -> tuple[int, str, str]:
        status = main([*arguments, "--directory", str(on.directory)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ls", "--namespace", "nobody"), "kvoffd-cli namespaces"),
        (("show", "ffff", "--namespace", "tiny"), "No key begins with 'ffff'"),
        (("show", "", "--namespace", "tiny"), "Several keys begin"),
        (("show", "zz", "--namespace", "tiny"), "hex digits"),
        (("show", "11", "--namespace", "tiny", "--group", "4"), "no group 4"),
        (("put", "/nonexistent", "--namespace", "tiny"), "cannot be opened"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    cli: Cli, engine: FakeEngine, arguments: tuple[str, ...], sentence: str
) -> None:
    status, out, err = cli("block", *arguments)
    assert (status, out) == (2, "")
    assert sentence in err


def test_an_export_that_finds_no_room_says_so_and_goes_on_when_there_is_some(
    cli: Cli, engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "all.safetensors"
    with files_of_at_most(40_000):
        status, out, err = cli("export", str(file), "--namespace", "tiny")
    assert (status, out) == (2, "")
    assert err == (
        f"kvoffd-cli: {file}.part cannot be written to its end (File too large); the same command goes on where it "
        "stopped.\n"
    )
    assert cli("export", str(file), "--namespace", "tiny")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_one_block_goes_into_a_file_and_back(cli: Cli, engine: FakeEngine, tmp_path: Path) -> None:
    file, other = tmp_path / "one.safetensors", bytes(31) + b"\x01"
    assert cli("block", "get", "11", str(file), "--namespace", "tiny")[0] == 0
    status, _, err = cli("block", "get", "11", str(file), "--namespace", "tiny")
    assert (status, "exists" in err) == (2, True)
    assert cli("block", "put", str(file), "--namespace", "tiny")[0] == 1, "it is there"
    assert cli("block", "put", str(file), "--namespace", "tiny", "--key", other.hex())[0] == 0
    assert engine.lookup([other]) == 1
    assert engine.load([other], [20]).ok
    assert engine.checksums([20]) == engine.checksums([0])
    assert "whole key" in cli("block", "put", str(file), "--namespace", "tiny", "--key", "1234")[2]
    cli("clear", "--namespace", "tiny", "--yes")


@pytest.mark.parametrize("layers", [1, 20, 40, 60, 80])
def test_one_small_block_finds_room_in_the_header(cli: Cli, daemon: DaemonProcess, tmp_path: Path, layers: int) -> None:
    """However much of its last 4 KiB the header takes without any block."""
    file, name = tmp_path / "one.safetensors", f"{layers} layers"
    with FakeEngine(daemon.directory, name, layers=layers, blocks=4, page_bytes=512) as fake:
        assert fake.store(KEYS[:1], [0]).ok
        assert cli("block", "get", "11", str(file), "--namespace", name) == (
            0,
            f"Block {KEYS[0].hex()} ({format_size(512 * layers)}) is in {file}.\n",
            "",
        )


def test_a_file_of_another_engine_is_refused(cli: Cli, engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    cli("export", str(file), "--namespace", "tiny")
    with (
        DaemonProcess("32MiB") as second,
        FakeEngine(second.directory, "tiny", world_size=1, blocks=32, page_bytes=8192),
    ):
        for arguments in (("import", str(file)), ("import", str(file), "--namespace", "tiny")):
            status, out, err = cli(*arguments, on=second)
            assert (status, out) == (2, "")
            assert "world_size" in err, "what they differ in"
        assert cli("namespaces", on=second)[1].count("tiny") == 1
        status, out, _ = cli("import", str(file), "--beside", on=second)
        assert (status, "8 blocks" in out) == (0, True)
        assert "--namespace" in cli("import", str(file), "--list", "--beside", on=second)[2]


PROGRAM = """
import sys
from kvoffd_client import block_file as module
write = module.BlockFileWriter.add
def slowly(part, block):
    done = write(part, block)
    print(len(part.entries), flush=True)
    sys.stdin.readline()
    return done
module.BlockFileWriter.add = slowly
from kvoffd_client.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_export_that_is_killed_goes_on_where_it_was(
    cli: Cli, daemon: DaemonProcess, engine: FakeEngine, tmp_path: Path
) -> None:
    file = tmp_path / "all.safetensors"
    arguments = ["export", str(file), "--namespace", "tiny", "--directory", str(daemon.directory)]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for expected in range(1, 6):
        assert process.stdout.readline() == f"{expected}\n"
        if expected < 5:
            process.stdin.write("\n")
            process.stdin.flush()
    status, _, err = cli("export", str(file), "--namespace", "tiny")
    assert (status, "Another export" in err) == (2, True)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdin.close()
    process.stdout.close()
    assert not file.exists()
    part, log = tmp_path / "all.safetensors.part", tmp_path / "all.safetensors.part.log"
    # The machine lost the end of the fifth block and half a line of the log.
    os.truncate(part, part.stat().st_size - 100)
    with log.open("ab") as journal:
        journal.write(b"0:1234")
    exported = json.loads(cli("export", str(file), "--namespace", "tiny", "--json")[1])
    assert (exported["blocks"], exported["resumed"]) == (8, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.safetensors"]
    with BlockFile(file) as source:
        for number in range(8):
            source.read(number)
        assert {entry.key for entry in source.entries} == set(KEYS)


def test_what_another_export_left_is_not_mixed_in(
    cli: Cli, daemon: DaemonProcess, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.safetensors"

    def give_up(part: object) -> None:
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(BlockFileWriter, "finish", give_up)
        assert cli("export", str(file), "--namespace", "tiny")[0] == 2
    with FakeEngine(daemon.directory, "other", page_bytes=4096) as other:
        other.store(KEYS[:1], [0])
        status, _, err = cli("export", str(file), "--namespace", "other")
        assert (status, "another namespace" in err) == (2, True)
    assert json.loads(cli("export", str(file), "--namespace", "tiny", "--json")[1])["resumed"] == 8


def test_an_import_does_not_hold_the_file_in_memory(cli: Cli, tmp_path: Path) -> None:
    """96 MiB of blocks through a buffer of 8 MiB, an eighth of the pool, most of them evicted again."""
    file = tmp_path / "large.safetensors"
    with DaemonProcess("128MiB") as large:
        with FakeEngine(large.directory, "large", layers=1, blocks=96, page_bytes=1 << 20) as fake:
            keys = [n.to_bytes(32, "big") for n in range(96)]
            assert fake.store(keys, range(96), timeout_s=60).ok
        assert cli("export", str(file), "--namespace", "large", on=large)[0] == 0
    with DaemonProcess("64MiB") as small:
        program = (
            "import sys, resource; from kvoffd_client.cli import main; status = main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
        )
        most_kib: list[int] = []
        for more in ((), ("--list",)):
            command = [sys.executable, "-c", program, "import", str(file), *more]
            command += ["--directory", str(small.directory)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            *said, last = done.stdout.strip().splitlines()
            most_kib.append(int(last))
            assert more or "96 blocks (96.0 MiB) were put into the pool" in said[0]
        # The buffer, as many blocks beside it, and what the client itself needs.
        assert most_kib[0] - most_kib[1] < 40 << 10, most_kib
