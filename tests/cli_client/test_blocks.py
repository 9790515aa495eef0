"""``kvoffd-cli blocks`` against real daemons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd_client import Block, BlockClient
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

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
        status = main(["blocks", *arguments, "--directory", str(on.directory)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_a_listing_ends_at_its_limit_and_takes_several_prefixes(cli: Cli, engine: FakeEngine) -> None:
    _, out, _ = cli("ls", "--namespace", "tiny", "--limit", "3")
    assert out.splitlines()[-1] == "There are more blocks; --limit 30 shows more of them."
    assert len(out.splitlines()) == 5
    listed = json.loads(cli("ls", "--namespace", "tiny", "--prefix", "11", "--prefix", "22", "--json")[1])
    assert ([block["key"][:2] for block in listed["blocks"]], listed["more"]) == (["11", "22"], False)
    assert cli("ls", "--namespace", "tiny", "--prefix", "ff") == (0, "There is no such block.\n", "")


def test_a_block_s_layers_are_shown_and_names_are_text(cli: Cli, daemon: DaemonProcess) -> None:
    name = "a\x1b[31mb"
    with FakeEngine(daemon.directory, name, layers=2, blocks=4, page_bytes=512) as fake:
        assert fake.store(KEYS[:1], [0]).ok
        status, out, _ = cli("show", "11", "--namespace", fake.namespace.fingerprint.hex()[:12])
    assert (status, "match their checksums" in out, "\x1b" in out) == (0, True, False)
    assert len([line for line in out.splitlines() if "uint8" in line]) == 2


def test_one_block_goes_into_a_file_whatever_its_header_needs(cli: Cli, daemon: DaemonProcess, tmp_path: Path) -> None:
    for layers in (1, 40, 80):
        file, name = tmp_path / f"{layers}.safetensors", f"{layers} layers"
        with FakeEngine(daemon.directory, name, layers=layers, blocks=4, page_bytes=512) as fake:
            assert fake.store(KEYS[:2], [0, 1]).ok
            status, out, _ = cli("export", str(file), "--namespace", name, "--prefix", KEYS[0].hex())
            assert (status, out.startswith("1 block (")) == (0, True)
            fake.scheduler.reset()
            assert "1 block" in cli("import", str(file))[1]
            assert fake.lookup(KEYS[:2]) == 1


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
            assert "shards of a block" in err, "what they differ in"
        status, out, _ = cli("import", str(file), "--beside", on=second)
        assert (status, "8 blocks" in out) == (0, True)


def test_blocks_that_find_no_space_are_told_apart_from_those_that_are_there(cli: Cli, tmp_path: Path) -> None:
    """Where engines have leased the whole pool."""
    file = tmp_path / "some.safetensors"
    with DaemonProcess("1MiB", limits={"leased_share": 1}) as small:
        with FakeEngine(small.directory, "tiny", layers=1, blocks=16, page_bytes=65536) as fake:
            assert fake.store(KEYS, range(8)).ok
            assert cli("export", str(file), "--namespace", "tiny", "--prefix", "11", "--prefix", "22", on=small)[0] == 0
            fake.scheduler.reset()
            others = [bytes([100 + n]) * 32 for n in range(16)]
            assert fake.store([KEYS[0], *others[:15]], range(16)).ok
            assert fake.lookup([KEYS[0], *others[:15]]) == 16
            status, out, _ = cli("import", str(file), "--json", on=small)
    done = json.loads(out)
    assert (status, done["blocks"], done["present"], done["no_space"], done["evicted"]) == (1, 0, 1, 1, 0)


def test_what_is_imported_into_a_full_pool_stays_until_others_are_stored(cli: Cli, tmp_path: Path) -> None:
    """It does not give way to the next block of the same file."""
    file, count = tmp_path / "many.safetensors", 40
    with DaemonProcess("8MiB") as first, DaemonProcess("8MiB", eviction_policy="learned") as second:
        shape = {"layers": 1, "blocks": 128, "page_bytes": 65536}
        keys = [n.to_bytes(32, "big") for n in range(count)]
        with FakeEngine(first.directory, "tiny", **shape) as fake:
            assert fake.store(keys, range(count)).ok
        assert cli("export", str(file), "--namespace", "tiny", on=first)[0] == 0
        with FakeEngine(second.directory, "tiny", **shape) as user:
            used = [n.to_bytes(32, "big") for n in range(1000, 1120)]
            for _ in range(8):
                user.lookup(used)
                user.release()
                assert user.store(used, range(120)).ok
            assert f"{count} blocks" in cli("import", str(file), on=second)[1]
            assert user.lookup(keys) == count


def test_reading_and_writing_blocks_is_in_no_count_of_traffic(daemon: DaemonProcess, engine: FakeEngine) -> None:
    with BlockClient(daemon.directory) as client:
        before = client.stats().since_start
        block = client.get_block("tiny", KEYS[0])
        assert client.put_block(
            "tiny", bytes(32), Block.of_bytes(block.geometry, 0, b"", [s.data for s in block.shards])
        )
        after = client.stats().since_start
    for name in ("lookups", "asked_keys", "loaded_keys", "loaded_tokens", "loaded_bytes", "stored_bytes"):
        assert getattr(after, name) == getattr(before, name), name


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
            command = [sys.executable, "-c", program, "blocks", "import", str(file), *more]
            command += ["--directory", str(small.directory)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == (0 if more else 1), done.stderr
            *said, last = done.stdout.strip().splitlines()
            most_kib.append(int(last))
            if not more:
                assert "96 blocks (96.0 MiB) were put into the pool" in said[0]
                assert said[1].endswith("blocks of the file were evicted: the pool is too small for all.")
        # The buffer, as many blocks beside it, and what the client itself needs.
        assert most_kib[0] - most_kib[1] < 40 << 10, most_kib
