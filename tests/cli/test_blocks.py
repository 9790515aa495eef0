"""``kvoffd-cli`` lists, shows, exports and imports blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_client import Block, BlockClient
from kvoffd_client.testing import FakeEngine
from tests.kit.command import BLOCK_BYTES, EXPORT, IMPORT, KEYS, LABEL, LIST_BLOCKS, SHOW_BLOCK, Cli, Terminal
from tests.kit.daemon import DaemonProcess
from tests.kit.open_files import files_of_at_most
from tests.kit.wire import books, keys

NAMED = ("--namespace", LABEL)


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with DaemonProcess("32MiB") as running:
        yield running


def test_blocks_are_listed_and_shown(engine: FakeEngine, cli: Cli) -> None:
    status, out, err = cli(*LIST_BLOCKS, *NAMED)
    assert (status, err) == (0, "")
    assert all(key.hex() in out for key in KEYS)
    assert KEYS[0].hex() in cli(*LIST_BLOCKS, *NAMED, "--prefix", KEYS[0].hex()).out
    listed = json.loads(cli(*LIST_BLOCKS, *NAMED, "--json").out)
    assert {(one["key"], one["state"]) for one in listed["blocks"]} == {(key.hex(), "ready") for key in KEYS}
    status, out, _ = cli(*SHOW_BLOCK, KEYS[0].hex(), *NAMED)
    assert status == 0
    assert "match their checksums" in out
    shown = json.loads(cli(*SHOW_BLOCK, KEYS[0].hex(), *NAMED, "--json").out)
    assert (shown["sound"], len(shown["shards"])) == (True, 1)


def test_a_listing_ends_at_its_limit_and_takes_several_prefixes(engine: FakeEngine, cli: Cli) -> None:
    lines = cli(*LIST_BLOCKS, *NAMED, "--limit", "3").out.splitlines()
    assert (len(lines), lines[-1]) == (5, "There are more blocks; --limit 30 shows more of them.")
    chosen = [key.hex() for key in KEYS[:2]]
    listed = json.loads(cli(*LIST_BLOCKS, *NAMED, "--prefix", chosen[0], "--prefix", chosen[1], "--json").out)
    assert ([block["key"] for block in listed["blocks"]], listed["more"]) == (chosen, False)
    nothing = "There is no block in group 0 whose key begins with ff or fe.\n"
    assert cli(*LIST_BLOCKS, *NAMED, "--prefix", "ff", "--prefix", "fe") == (1, nothing, "")
    assert cli(*LIST_BLOCKS, *NAMED, "--prefix", "ff", "--json").status == 1


def test_keys_that_a_terminal_cuts_are_said_to_be_cut(shared_daemon: DaemonProcess, engine: FakeEngine) -> None:
    cut = "Keys are cut, but not in a pipe; `blocks show` accepts their first digits."
    for columns, is_cut in ((80, True), (120, False)):
        command = (*LIST_BLOCKS, *NAMED, "--directory", str(shared_daemon.directory))
        with Terminal(*command, columns=columns) as terminal:
            assert terminal.end() == 0
        assert (cut in terminal.seen, KEYS[0].hex() in terminal.seen) == (is_cut, not is_cut)


def test_reading_and_writing_blocks_is_in_no_count_of_traffic(shared_daemon: DaemonProcess, engine: FakeEngine) -> None:
    with BlockClient(shared_daemon.directory) as client:
        before = client.stats().since_start
        block = client.get_block(LABEL, KEYS[0])
        shards = [shard.data for shard in block.shards]
        assert client.put_block(LABEL, bytes(32), Block.of_bytes(block.geometry, 0, b"", shards))
        after = client.stats().since_start
    for name in ("lookups", "asked_keys", "loaded_keys", "loaded_tokens", "loaded_bytes", "stored_bytes"):
        assert getattr(after, name) == getattr(before, name), name


def test_what_cannot_be_done_is_one_sentence(engine: FakeEngine, cli: Cli, tmp_path: Path) -> None:
    for arguments, sentence in (
        ((*LIST_BLOCKS, "--namespace", "nobody"), "`kvoffd-cli namespaces` lists them."),
        (LIST_BLOCKS, "Missing option '--namespace'; `kvoffd-cli namespaces` lists them."),
        ((*SHOW_BLOCK, "ffff", *NAMED), "No key in the pool begins with 'ffff'"),
        ((*SHOW_BLOCK, "00", *NAMED), "Several keys begin"),
        ((*SHOW_BLOCK, "zz", *NAMED), "hex digits"),
        ((*SHOW_BLOCK, "11", *NAMED, "--group", "4"), "no group 4"),
        ((*IMPORT, str(tmp_path), "--list", "--beside"), "leave out --beside"),
        ((*EXPORT, str(tmp_path / "none" / "file"), *NAMED), "none"),
        ((*IMPORT, str(tmp_path / "none")), "none"),
        ((*IMPORT, str(tmp_path)), str(tmp_path)),
    ):
        assert sentence in cli(*arguments).sentence


def test_a_namespace_moves_to_another_daemon(engine: FakeEngine, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    exported = json.loads(cli(*EXPORT, str(file), *NAMED, "--json").out)
    assert (exported["blocks"], exported["bytes"]) == (8, 8 * BLOCK_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert "exists" in cli(*EXPORT, str(file), *NAMED).sentence
    with DaemonProcess("32MiB") as fresh:
        status, out, err = cli(*IMPORT, str(file), on=fresh)
        assert (status, err, LABEL in out, "8 blocks (512 KiB)" in out) == (0, "", True, True)
        assert "8 were in the pool already" in cli(*IMPORT, str(file), on=fresh).out
        with FakeEngine(fresh.directory, LABEL) as second:
            assert second.lookup(KEYS) == 8
            assert second.load(KEYS, range(8, 16)).ok
            assert second.checksums(range(8, 16)) == engine.checksums(range(8))
        assert json.loads(cli("clear", "--all", "--yes", "--json", on=fresh).out)["cleared_blocks"] == 8
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
        assert file.name in cli(*IMPORT, str(file), on=fresh).sentence
        assert books(fresh.directory).ready_blocks <= 7, "nothing that is damaged is put"


def test_an_import_beside_the_same_label_is_asked_for(engine: FakeEngine, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    assert cli(*EXPORT, str(file), *NAMED).status == 0
    with DaemonProcess("32MiB") as fresh, FakeEngine(fresh.directory, LABEL, page_bytes=4096) as other:
        assert other.store(KEYS[:1], [0]).ok
        assert "Add --beside to import them all the same." in cli(*IMPORT, str(file), on=fresh).sentence
        assert books(fresh.directory).ready_blocks == 1
        status, out, err = cli(*IMPORT, str(file), "--beside", on=fresh)
        assert (status, err, out.startswith("8 blocks (512 KiB) were put into the pool.")) == (0, "", True)
        spaces = json.loads(cli("namespaces", "--json", on=fresh).out)["namespaces"]
        assert [(one["label"], one["ready_blocks"]) for one in spaces] == [(LABEL, 1), (LABEL, 8)]


def test_an_export_onto_a_full_disk_is_one_sentence(engine: FakeEngine, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    with files_of_at_most(100_000):
        assert "File too large" in cli(*EXPORT, str(file), *NAMED).sentence
    assert not file.exists(), "a half file has no name that an import would take"
    assert cli(*EXPORT, str(file), *NAMED).status == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.nightly
def test_an_import_does_not_hold_the_file_in_memory(cli: Cli, tmp_path: Path) -> None:
    """96 MiB of blocks through a buffer of 8 MiB, an eighth of the pool, most of them evicted again."""
    file, most_kib = tmp_path / "large.safetensors", list[int]()
    with DaemonProcess("128MiB") as large:
        with FakeEngine(large.directory, "large", layers=1, blocks=96, page_bytes=1 << 20) as fake:
            assert fake.store(keys(*range(96)), range(96), timeout_s=60).ok
        assert cli(*EXPORT, str(file), "--namespace", "large", on=large).status == 0
    program = (
        "import sys, resource; from kvoffd_client.cli import main; status = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    with DaemonProcess("64MiB") as small:
        for more, status in (((), 1), (("--list",), 0)):
            command = [sys.executable, "-c", program, *IMPORT, str(file), *more, "--directory", str(small.directory)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == status, done.stderr
            *said, last = done.stdout.strip().splitlines()
            most_kib.append(int(last))
            if status:
                assert "96 blocks (96.0 MiB) were put into the pool" in said[0]
                assert said[1].endswith("blocks of the file were evicted: the pool is too small for all.")
    # The buffer, as many blocks beside it, and what the client itself needs.
    assert most_kib[0] - most_kib[1] < 40 << 10, most_kib


def test_what_cannot_be_a_key_or_a_file_of_blocks_is_one_sentence(engine: FakeEngine, cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for command, words in (
        ((*SHOW_BLOCK, os.fsdecode(b"\xff"), *NAMED), "is not UTF-8"),
        ((*SHOW_BLOCK, "a" * 129, *NAMED), "has 129 digits"),
        ((*LIST_BLOCKS, *NAMED, "--prefix", "a" * 200), "has 200 digits"),
        ((*EXPORT, str(tmp_path / "out"), *NAMED, "--prefix", "a" * 200), "has 200 digits"),
        ((*IMPORT, str(pipe)), "it is a pipe or a device"),
        ((*IMPORT, str(tmp_path)), "(Is a directory)"),
        ((*IMPORT, "/dev/zero"), "it is a pipe or a device"),
    ):
        status, out, err = cli(*command)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert words in err
    assert list(tmp_path.iterdir()) == [pipe]
