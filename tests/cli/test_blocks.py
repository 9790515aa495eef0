"""``kvoffd-cli`` lists and shows blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from kvoffd_client import Block, BlockClient
from kvoffd_client.testing import FakeEngine
from tests.kit.command import KEYS, LABEL, LIST_BLOCKS, SHOW_BLOCK, Cli, Terminal
from tests.kit.daemon import DaemonProcess

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


def test_what_cannot_be_done_is_one_sentence(engine: FakeEngine, cli: Cli) -> None:
    for arguments, sentence in (
        ((*LIST_BLOCKS, "--namespace", "nobody"), "`kvoffd-cli namespaces` lists them."),
        (LIST_BLOCKS, "Missing option '--namespace'; `kvoffd-cli namespaces` lists them."),
        ((*SHOW_BLOCK, "ffff", *NAMED), "No key in the pool begins with 'ffff'"),
        ((*SHOW_BLOCK, "00", *NAMED), "Several keys begin"),
        ((*SHOW_BLOCK, "zz", *NAMED), "hex digits"),
        ((*SHOW_BLOCK, "11", *NAMED, "--group", "4"), "no group 4"),
    ):
        assert sentence in cli(*arguments).sentence


def test_what_cannot_be_a_key_is_one_sentence(engine: FakeEngine, cli: Cli) -> None:
    for command, words in (
        ((*SHOW_BLOCK, os.fsdecode(b"\xff"), *NAMED), "is not UTF-8"),
        ((*SHOW_BLOCK, "a" * 129, *NAMED), "has 129 digits"),
        ((*LIST_BLOCKS, *NAMED, "--prefix", "a" * 200), "has 200 digits"),
    ):
        status, out, err = cli(*command)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert words in err
