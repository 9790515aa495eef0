"""The JSON of every command, key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest

from kvoffd_client.cli import main
from kvoffd_client.cli.app import command_tree
from kvoffd_client.cli.json_objects import Disks, SharedTiers
from kvoffd_client.cli.json_output import describe, to_json, to_plain
from kvoffd_client.cli.monitor_commands import event_object
from kvoffd_client.cli.reference import JSON, page
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, kv_topic
from kvoffd_proto.messages import fields_of, struct_in
from kvoffd_proto.stats import StatsReply
from tests.kit.daemon import DaemonProcess

PAGE = Path(__file__).parents[2] / "client" / "JSON.md"
KEY = b"\x11" * 32


def same_keys(found: Any, struct: type[msgspec.Struct], where: str = "") -> None:
    """Assert that an object has exactly the keys of ``struct``, and so have those in it."""
    fields = {item.name: hint for item, hint, _ in fields_of(struct) if item.name != "request_id"}
    assert set(found) == set(fields), where
    for name, hint in fields.items():
        inner, value = struct_in(hint), found[name]
        if inner is None or value is None:
            continue
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        for one in value if get_origin(bare) is list else [value]:
            same_keys(one, inner, f"{where}{name}.")


def test_the_page_is_what_the_commands_print() -> None:
    assert PAGE.read_text() == page(), "python -m kvoffd_client.cli.reference > client/JSON.md"
    for command, struct in JSON.items():
        keys = dict(describe(struct))
        assert all(keys.values()), (command, [key for key, text in keys.items() if not text])


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with DaemonProcess("32MiB") as daemon, FakeEngine(daemon.directory, "tiny") as engine:
        assert engine.store([KEY, b"\x22" * 32], [0, 1]).ok
        yield daemon.directory


Cli = Callable[..., Any]


@pytest.fixture
def cli(directory: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command with --json and compares what it prints with its keys."""

    def run(command: str, *arguments: str) -> Any:
        words, _, option = command.partition(" --")
        options = [f"--{option}"] if option else []
        main([*words.split(), *arguments, *options, "--json", "--directory", str(directory)])
        found = json.loads(capsys.readouterr().out)
        same_keys(found, JSON[command], command)
        return found

    return run


@pytest.mark.parametrize(
    "command", ["stats", "health", "sessions", "sessions --engines", "namespaces", "scrub", "disk"]
)
def test_listings_have_the_keys_that_their_help_names(cli: Cli, command: str) -> None:
    assert cli(command)


def test_blocks_and_files_have_the_keys_that_their_help_names(cli: Cli, tmp_path: Path) -> None:
    of = ("--namespace", "tiny")
    file = str(tmp_path / "tiny.safetensors")
    assert len(cli("block ls", *of)["blocks"]) == 2
    assert cli("block show", KEY.hex(), *of)["shards"][0]["layers"]
    assert cli("export", file, *of)["blocks"] == 2
    assert cli("import --list", file)["blocks"][0]["key"] in (KEY.hex(), "22" * 32)
    assert cli("import", file)["present"] == 2
    assert cli("namespaces diff", "tiny", "tiny") == {"differences": []}
    assert cli("clear", *of, "--yes")["cleared_blocks"] == 2


def test_events_and_disks_have_the_keys_that_their_help_names(busy: StatsReply) -> None:
    stored = BlockStored([KEY], 16, "CPU", 1)
    batch = EventBatch(0.5, [stored, BlockRemoved([KEY], "CPU", 0), AllBlocksCleared()])
    same_keys(to_plain(event_object(kv_topic(KEY), 7, batch, {})), JSON["events"])
    same_keys(to_plain(Disks(busy.disks, busy.below)), JSON["disk"])
    same_keys(to_plain(SharedTiers(busy.shared)), JSON["shared"])
    same_keys(to_plain(busy), JSON["stats"])


def test_every_command_with_json_names_its_keys_and_brief_help_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def commands(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            yield f"{words}{name}", command
            yield from commands(command, f"{words}{name} ") if hasattr(command, "commands") else ()

    monkeypatch.setenv("COLUMNS", "80")
    for words, command in commands(command_tree()):
        with_json = any("--json" in parameter.opts for parameter in command.params)
        assert with_json == (words in JSON) == ("Keys of --json:\n" in (command.epilog or "")), words
        main([*words.split(), "-h"])
        brief = capsys.readouterr().out
        assert ("--help names the keys of --json too." in brief) == with_json
        if words == "stats":
            assert len(brief.splitlines()) <= 24
        if words == "clear":
            main([words, "--help"])
            whole = capsys.readouterr().out
            assert all(f"  {key}: " in whole for key, _ in describe(JSON[words]))


def test_fields_have_their_names_and_fingerprints_are_hex(busy: StatsReply) -> None:
    found = json.loads(to_json(busy))
    assert found["pool"]["free_bytes"] == busy.pool.free_bytes
    assert found["store"]["bytes_per_second"] == busy.store.bytes_per_second
    assert found["namespaces"][0]["namespace"] == busy.namespaces[0].namespace.hex()
    assert found["errors"] == busy.errors
    assert found["epoch"] == busy.epoch
    assert "request_id" not in found


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError):
        to_plain(object())
