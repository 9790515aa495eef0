"""``kvoffd-cli trace replay``: traces, what policies make of them, and the optimum."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tracemalloc
from array import array
from errno import ENOMEM
from itertools import islice, product
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvoffd.cache import POLICY_NAMES
from kvoffd.simulate.command import main
from kvoffd.simulate.disk import open_disk, region_blocks
from kvoffd.simulate.optimum import optimum_percent, uses_of
from kvoffd.simulate.replay import open_cache, open_namespace, replay, serve
from kvoffd.simulate.tiers import DiskPlan
from kvoffd.simulate.trace import KEY_BYTES, MAX_LINE_BYTES, BadTrace, RequestTrace, TracedHint, read_trace
from kvoffd.tiering import WriteMode
from kvoffd_client.cli import main as console
from kvoffd_proto.messages import READY, HintAction
from tests.kit.cases import case
from tests.kit.made_up_loads import LOADS, Traffic, chat_among_single_requests, trace_of


def write(path: Path, requests: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": keys}) + "\n" for keys in requests))
    return path


def most_hits(requests: list[list[int]], blocks: int) -> int:
    """By trying everything that may be kept after each request."""
    best = {frozenset[int](): 0}
    for keys in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            gained = next((number for number, key in enumerate(keys) if key not in kept), len(keys))
            known = sorted(kept | set(keys))
            for chosen in product((False, True), repeat=len(known)):
                keep = frozenset(key for key, wanted in zip(known, chosen, strict=True) if wanted)
                if len(keep) <= blocks:
                    after[keep] = max(after.get(keep, 0), hits + gained)
        best = after
    return max(best.values())


def test_the_optimum_is_what_trying_everything_finds() -> None:
    loads = (
        [[1, 2], [3], [1, 2], [3], [1, 4], [1, 2]],
        [[1, 2, 3], [1, 4], [5], [1, 2, 3], [5], [1, 4]],
        [[1], [2], [3], [1], [2], [3], [1], [2], [3]],
        [[1, 1, 1], [2], [1, 1, 2], [], [3, 3], [1, 2]],
    )
    for requests, blocks in product(loads, (1, 2, 3)):
        trace, hits = trace_of(requests), most_hits(requests, blocks)
        with case(requests, blocks):
            assert optimum_percent(uses_of(trace), blocks) == pytest.approx(100 * hits / trace.accesses)


def test_the_optimum_of_many_and_of_very_long_requests() -> None:
    requests, long = 1_200_000, array("Q", range(2_000_000)).tobytes()
    uses = uses_of(RequestTrace("wide", 512, [*[long[:KEY_BYTES]] * requests, long]))
    assert uses.next_uses[: requests + 1] == [*range(1, requests + 1), 0]


def test_an_lru_is_replayed_as_one() -> None:
    cycle = [[1], [2], [3]] * 5
    assert replay(trace_of(cycle), "lru", 2).hits == 0
    assert replay(trace_of(cycle), "lru", 3).hits == 12
    assert replay(trace_of([[1, 2, 3], [1, 2, 4], [1, 2, 3]]), "lru", 3).hits == 4  # tails go first
    assert replay(trace_of([[1, 2], [1, 2]]), "lru", 2).written == 2


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_disk_with_space_finds_what_left_the_pool(policy: str) -> None:
    cycle = trace_of([[*range(first, first + 4)] for first in range(0, 48, 4)] * 5)
    found = replay(cycle, policy, 16, DiskPlan(64))
    assert (found.hits, found.disk_written) == (4 * 48, 48), "each block is written once, and found from then on"
    assert found.disk_hits == found.hits - replay(cycle, policy, 16, DiskPlan(64, WriteMode.NEVER)).hits > 100
    assert found.written < cycle.accesses


def test_a_disk_that_is_only_read_leaves_to_the_policy_what_is_stored() -> None:
    """Only blocks in the pool are written to a disk: one that is written gets all of them."""
    trace = trace_of(chat_among_single_requests(1, 400))
    alone, above = (replay(trace, "learned", 100, disk) for disk in (None, DiskPlan(400, WriteMode.NEVER)))
    assert (above.hits, above.written) == (alone.hits, alone.written)
    assert alone.written < 0.8 * replay(trace, "learned", 100, DiskPlan(400, WriteMode.ALWAYS)).written


@pytest.mark.parametrize("blocks", [1, 100, 30_000, 200_000])
def test_a_disk_has_space_for_the_whole_regions_of_its_blocks(blocks: int) -> None:
    disk = open_disk(blocks, 1 << 20, lambda: 0.0, lambda call: call(), Mock())
    held = disk._file.head.regions * region_blocks(blocks)
    assert blocks - region_blocks(blocks) < held <= blocks
    disk.close(0.0)


def test_the_hand_of_a_full_disk_keeps_nearly_what_an_lru_would() -> None:
    """One that gave used blocks no second chance would find 7 % less (measured)."""
    trace = trace_of([*islice(LOADS["agents"](Traffic(1)), 427)])
    found = replay(trace, "lru", 128, DiskPlan(512, WriteMode.ALWAYS))
    assert found.hits > 0.95 * replay(trace, "lru", 512).hits


def test_a_full_disk_keeps_what_returns_later_than_it_would_keep_all() -> None:
    """Documents that return after 24 lifetimes of the pool, among requests that are made once."""
    firsts = [10 * (number // 4 % 30 if number % 4 == 0 else number + 100) for number in range(960)]
    trace = trace_of([[*range(first, first + 10)] for first in firsts])
    auto, always = (replay(trace, "learned", 50, DiskPlan(800, mode)) for mode in (WriteMode.AUTO, WriteMode.ALWAYS))
    assert auto.hits > 1000 > 10 * always.hits


@pytest.mark.nightly
def test_a_full_disk_is_written_much_less_and_finds_nearly_as_much() -> None:
    trace = trace_of(chat_among_single_requests(1, 1000))
    auto, always = (replay(trace, "learned", 200, DiskPlan(800, mode)) for mode in (WriteMode.AUTO, WriteMode.ALWAYS))
    assert auto.hits > 0.95 * always.hits
    assert auto.disk_written - 800 < 0.6 * (always.disk_written - 800)


def test_a_day_bounds_what_a_full_disk_is_written() -> None:
    """Beyond its first filling: an eighth of a day's blocks at once."""
    requests = [[*range(first, first + 4)] for first in range(0, 4000, 4)]
    trace = trace_of(requests)._replace(seconds=[0.0] * len(requests))
    assert replay(trace, "lru", 64, DiskPlan(128, per_day_blocks=800)).disk_written == 128 + 100


def test_requests_come_when_the_trace_says(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    file.write_text("".join(json.dumps({"timestamp": at, "hash_ids": [1]}) + "\n" for at in (500, 2000, 1500)))
    assert read_trace(file).seconds == [0.5, 2.0, 2.0]
    file.write_text(file.read_text() + '{"hash_ids": [1]}\n')
    assert not read_trace(file).seconds, "one of them does not say"


def test_hints_of_a_trace_are_obeyed_and_end(tmp_path: Path) -> None:
    """Blocks 1 and 2 outlive eight others in a pool of eight while they are retained, and go first when released."""

    def hits(*hints: dict[str, object], seconds: float = 1.0) -> int:
        lines: list[dict[str, object]] = [{"timestamp": 0, "hash_ids": [1, 2]}]
        lines += [{"timestamp": 0, "hash_ids": [1, 2], **hint} for hint in hints]
        lines += [{"timestamp": 1000, "hash_ids": [number]} for number in range(10, 18)]
        lines += [{"timestamp": 1000 * seconds, "hash_ids": [1, 2]}, {"timestamp": 1e7, "hash_ids": [3]}]
        file = tmp_path / "trace"
        file.write_text("\n".join(map(json.dumps, lines)))
        trace = read_trace(file)
        assert (len(trace.requests), len(trace.hints)) == (11, len(hints))
        assert replay(trace, "lru", 8).hits == 0, "without them"
        return replay(trace, "lru", 8, hints=True).hits

    retain, release = {"hint": "retain", "priority": 50, "ttl_s": 0.5}, {"hint": "release"}
    assert hits() == 0
    assert hits({**retain, "ttl_s": 60.0}) == 2
    assert hits(retain) == 0
    assert hits({**retain, "ttl_s": 60.0}, release) == 0


def test_the_replay_sets_aside_as_many_retained_blocks_as_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon's loop renews after each message what evictions may set aside: sixteen retained blocks outlive 200."""
    monkeypatch.setattr("kvoffd.cache.hints.SET_ASIDE_AT_ONCE", 4)
    trace = trace_of([[*range(16)], *([number] for number in range(100, 300)), [*range(16)]])
    hint = TracedHint(1, 0.0, HintAction.RETAIN, trace.requests[0], 50, 60.0)
    assert replay(trace, "lru", 64).hits == 0
    assert replay(trace._replace(hints=[hint]), "lru", 64, hints=True).hits == 16


def test_a_prefetch_brings_blocks_up_before_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the later ones: one that has ended does not count for the limit."""
    monkeypatch.setattr("kvoffd.cache.prefetches.MAX_PREFETCHES", 2)
    trace, disk = trace_of([[*range(first, first + 4)] for first in range(0, 48, 4)] * 3), DiskPlan(64)
    hints = [TracedHint(at, 0.0, HintAction.PREFETCH, keys) for at, keys in enumerate(trace.requests) if at >= 12]
    plain, hinted = (replay(trace._replace(hints=hints), "lru", 16, disk, hints=obeyed) for obeyed in (False, True))
    assert (plain.hits, plain.disk_hits) == (4 * 24, 4 * 24)
    assert (hinted.hits, hinted.disk_hits) == (4 * 24, 0)


def test_a_prompt_continues_behind_its_holes() -> None:
    """What fills a hole has the number of the prompt that is asked for, as it is offered with the key before it."""
    cache, trace = open_cache("lru", 16), trace_of([[*range(5)]])
    (keys,), namespace = trace.requests, open_namespace(cache, trace)
    serve(cache, namespace, keys)
    for number in (1, 3, 4):
        cache.invalidate(namespace, [(0, keys[number * KEY_BYTES :][:KEY_BYTES])])
    serve(cache, namespace, keys, step_blocks=2)
    states, blocks = cache.blocks.find(namespace.groups[0], keys)
    assert states == bytes([READY] * 5)
    assert len(set(cache.blocks.prompt[blocks].tolist())) == 1


def test_it_prints_json_as_documented(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "small.jsonl", [[1, 2, 3]] * 4)
    assert console(["trace", "replay", str(file), "--policy", "all", "--blocks", "2,3", "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert (printed["trace"], printed["accesses"]) == ("small", 12)
    assert [(one["policy"], one["blocks"]) for one in printed["results"]] == [
        (policy, blocks) for blocks in (2, 3) for policy in POLICY_NAMES
    ]
    assert printed["results"][POLICY_NAMES.index("lru")] == {
        "policy": "lru",
        "size": "2 blocks",
        "blocks": 2,
        "hit_percent": 50.0,
        "written_percent": pytest.approx(16.667),
        "optimum_percent": 50.0,
    }


def test_it_prints_a_table_with_the_sizes_as_given_(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "small.jsonl", [[1, 2, 3]] * 100)
    assert main([str(file), "--policy", "lru,learned", "--size", "6MiB,4MiB", "--block-size", "2MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 100 requests, 300 blocks of 512 tokens and 2.00 MiB"
    assert [line.split()[:2] for line in lines[2:6]] == [[s, p] for s in ("4MiB", "6MiB") for p in ("lru", "learned")]
    assert lines[4].split() == ["6MiB", "lru", "99.00", "1.00", "99.00"]
    assert lines[6:] == ["", "For this traffic the policies differ by less than a point."]
    assert main([str(file), "--policy", "lru", "--blocks", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "one policy needs no choice"
    cycle = write(tmp_path / "cycle.jsonl", [[1], [2], [3]] * 50)
    assert main([str(cycle), "--policy", "lru,learned", "--blocks", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = r"learned [\d.]+ %, lru 0.0 %; [\d.]+ % were possible"
    most = "For this traffic learned finds most in a pool of 2 blocks, where they differ most"
    assert re.fullmatch(rf"{most}: {found}.", last)
    assert main([str(cycle), "--policy", "lru,learned", "--block-size", "1MiB", "--pool", str(3 << 20)]) == 0
    assert "In your pool of 3.00 MiB the policies differ by less than a point.\n" in capsys.readouterr().out
    own = "--pool", str(2 << 20), "--disk", "1x"
    assert main([str(cycle), "--policy", "lru,learned", "--block-size", "1MiB", *own]) == 0
    assert "In your pool of 2.00 MiB + 1x " in capsys.readouterr().out


def test_a_trace_that_is_too_small_and_one_that_repeats_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write(tmp_path / "few.jsonl", [[number, 1] for number in range(98)] + [[5, 1]])
    assert main([str(few), "--policy", "lru,learned"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("Too early to choose a policy or a size: 100 requests are needed. Record for longer.\n")
    assert not re.search(r"0\.00 +[\d.]+ +0\.00", printed), "no row of a pool that could find nothing"
    never = write(tmp_path / "never.jsonl", [[number] for number in range(200)])
    assert main([str(never)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["No block comes back: no pool would find anything."]


def test_it_replays_over_disks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "cycle.jsonl", [[number] for number in range(12)] * 4)
    arguments = ["--policy", "lru", "--blocks", "4", "--disk", "2x,3MiB", "--disk-write", "auto,never"]
    assert console(["trace", "replay", str(file), *arguments, "--block-size", "1MiB", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["results"]
    assert [(one["size"], one["disk_blocks"], one["disk_write"]) for one in found] == [
        *(("4 blocks + 2x", 8, mode) for mode in ("auto", "never")),
        *(("4 blocks + 3MiB", 3, mode) for mode in ("auto", "never")),
    ]
    assert found[0]["disk_write_per_day_blocks"] == 8
    assert found[0]["hit_percent"] == found[0]["disk_hit_percent"] > 0 == found[1]["hit_percent"]
    assert found[0]["optimum_percent"] == 75
    assert main([str(file), *arguments, "--block-size", "1MiB"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].endswith("possible %  write    of disk %  to disk %")
    assert lines[2].split()[:6] == ["4", "blocks", "+", "2x", "lru", "50.00"]


def test_without_sizes_it_takes_parts_of_all_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "small.jsonl", [[*range(16)]] * 2)
    assert main([str(file), "--policy", "lru", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["results"]
    assert [(one["size"], one["blocks"]) for one in printed] == [(f"{n} blocks", n) for n in (2, 4, 8, 16)]


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "small.jsonl", [[1]])
    for arguments, sentence in (
        ("--blocks 0", "is not a list of block counts"),
        ("--blocks many", "is not a list of block counts"),
        ("--blocks 5 --policy fifo", "There is no policy 'fifo'"),
        ("--size 1GiB", "give --block-size"),
        ("--size 1GiB --block-size 0", "--block-size 0"),
        ("--size 1GiB --block-size 2GiB", "does not hold one block"),
        ("--blocks 2 --disk 1GiB", "give --block-size"),
        ("--blocks 2 --disk 1MiB --block-size 2MiB", "does not hold one block"),
        ("--blocks 2 --disk , --block-size 2MiB", "--disk: '' is not a size"),
        ("--blocks 2 --disk 4x,", "--disk: '' is not a size"),
        ("--blocks 2 --disk 4x --disk-write reuse", "choose from auto, always, never"),
        ("--blocks 2 --disk-write auto", "--disk-write needs a disk; give --disk too"),
        ("--blocks 2 --disk-write-per-day 1GiB", "--disk-write-per-day needs a disk; give --disk too"),
        ("--blocks 2 --block-size 1MiB --nodes 2 --disk-write never", "--disk-write needs a disk; give --disk too"),
        ("--blocks 2 --disk 4x --disk-write-per-day 1GiB", "--disk-write-per-day: the trace does not give the bytes"),
        ("--size much --block-size 2MiB", "--size: 'much' is not a size"),
        ("--size 1GiB --block-size 2PB", "--block-size: '2PB' has the unknown unit"),
    ):
        with case(arguments):
            assert main([str(file), *arguments.split()]) == 2
            assert sentence in capfd.readouterr().err
    for words, sentence in (
        (["--blocks=0"], "is not a list of block counts"),
        (["--blocks=2", "--disk-write=auto"], "--disk-write needs a disk"),
        (["--blocks=2", "--disk-write-per-day=auto"], "--disk-write-per-day needs a disk"),
    ):
        assert console(["trace", "replay", str(file), *words]) == 2
        assert sentence in capfd.readouterr().err


def test_a_mode_that_is_named_twice_is_replayed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the two would be compared as if they were policies."""
    cycle = write(tmp_path / "cycle.jsonl", [[1], [2], [3]] * 50)
    words = [str(cycle), "--blocks=2", "--disk=1x"]
    for policies in ("lru", "lru,learned"):
        printed = []
        for modes in ("auto", "auto,auto", "auto, auto,auto"):
            assert main([*words, "--policy", policies, "--disk-write", modes]) == 0
            printed.append(capsys.readouterr().out)
        with case(policies):
            assert len(set(printed)) == 1


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ("kvoffd.cache.hints.np.zeros", MemoryError()),
        ("kvoffd.simulate.replay.mmap.mmap", OSError(ENOMEM, os.strerror(ENOMEM))),
    ],
)
def test_a_replay_without_enough_memory_ends_with_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: str,
    error: Exception,
) -> None:
    monkeypatch.setattr(refused, Mock(side_effect=error))
    assert main([str(write(tmp_path / "small.jsonl", [[1]])), "--blocks=2"]) == 2
    assert capsys.readouterr().err.startswith("kvoffd-cli: The replay needs more memory than there is")


def test_a_sentence_is_not_behind_what_was_being_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("kvoffd.simulate.replay.mmap.mmap", Mock(side_effect=OSError(ENOMEM, "no memory")))
    assert main([str(write(tmp_path / "small.jsonl", [[1]])), "--policy=lru", "--blocks=2"]) == 2
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown[1] == "replaying: lru, 2 blocks"
    assert shown[2].startswith("kvoffd-cli: The replay needs more memory")


def test_what_a_recording_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gaps.jsonl"
    lines = [{"hash_ids": [1]}, {"hash_ids": [1], "dropped": 1200}, {"hash_ids": [2], "dropped": 34}]
    file.write_text("".join(json.dumps({**line, "block_tokens": 0}) + "\n" for line in lines))
    assert main(["--blocks=10", str(file)]) == 0
    said = capsys.readouterr()
    assert "gaps.jsonl lacks 1,234 lines" in said.err
    assert said.out.startswith("gaps: 3 requests, 3 blocks\n")


def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other"
    for content in (b"\x1f\x8b\x08gzip", b"\x28\xb5\x2f\xfd\0\0", b"\x8f\x7f" * 5000, b"", b'{"hash_ids":[1,0.5]}'):
        file.write_bytes(content)
        with case(content[:20]):
            assert main(["--blocks=10", str(file)]) == 2
            said = capsys.readouterr().err.replace(str(tmp_path), "")
            assert len(said) < 160
            assert ("zstd -d" in said) == content.startswith(b"\x28")


def test_tokens_of_a_block_are_computed_from_lengths(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    cases: tuple[tuple[list[tuple[object, int]], int], ...] = (
        ([(640, 10), (65, 2), (1, 1)], 64),
        ([(5120, 10), (513, 2)], 512),
        ([(9, 1)], 512),  # any would do
        ([(640, 10), (6400, 10)], 512),  # none fits
        ([("x", 3)], 512),  # no length
        ([(4100, 4), (3071, 2), (7000, 6)], 1024),
        ([(40, 2), (63, 3)], 16),
    )
    for lengths, tokens in cases:
        lines = [json.dumps({"input_length": length, "hash_ids": [*range(count)]}) + "\n" for length, count in lengths]
        file.write_text("".join(lines))
        with case(lengths):
            assert read_trace(file).tokens_per_block == tokens
            with file.open("a") as more:
                more.write('{"hash_ids": [1], "block_tokens": 32}\n')
            assert read_trace(file).tokens_per_block == 32


@pytest.mark.parametrize("weights", [None, [60]])
def test_a_request_of_kvcache_simulator_has_a_block_size(tmp_path: Path, weights: list[int] | None) -> None:
    """Its ``block_tokens`` are those of each block of the request."""
    file, line = tmp_path / "t.jsonl", {"hash_ids": [1], "block_size": 64, "input_length": 60}
    file.write_text(json.dumps(line | ({"block_tokens": weights} if weights else {})) + "\n")
    trace = read_trace(file)
    assert (len(trace.requests), trace.accesses, trace.tokens_per_block) == (1, 1, 64)
    file.write_text(json.dumps(line | {"block_tokens": 48}) + "\n")
    assert read_trace(file).tokens_per_block == 48, "as kvoffd-cli trace record writes it"


def test_requests_without_blocks_have_no_say_in_the_size_of_a_block(tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    empty = [{"hash_ids": [], "block_tokens": tokens, "block_bytes": tokens} for tokens in (16, 32)]
    file.write_text("\n".join(map(json.dumps, empty)))
    trace = read_trace(file)
    assert (trace.accesses, trace.block_bytes, trace.others) == (0, 0, [])
    file.write_text("\n".join(map(json.dumps, [*empty, {"hash_ids": [1], "block_tokens": 64, "block_bytes": 5}])))
    trace = read_trace(file)
    assert (trace.tokens_per_block, trace.block_bytes, trace.others) == (64, 5, [])


def test_tokens_of_a_block_are_those_of_most_whatever_their_bytes(tmp_path: Path) -> None:
    """The bytes are unknown until a worker has registered."""
    file = tmp_path / "two.jsonl"
    kinds = ((2, 16, 0), (2, 16, 100), (3, 32, 200))
    lines = [
        {"hash_ids": [*range(blocks)], "block_tokens": tokens, "block_bytes": nbytes}
        for blocks, tokens, nbytes in kinds
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_trace(file).tokens_per_block == 16


def test_a_file_that_is_no_trace_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    for line in (
        *("nonsense", "5", "[[]]", '{"hash_ids": "12"}', '{"hash_ids": {}}', '{"hash_ids": [1.5]}'),
        *('{"hash_ids": [true]}', '{"hash_ids": [-9223372036854775809]}', '{"hash_ids": [18446744073709551616]}'),
        *('{"hash_ids": [], "block_bytes": -1}', '{"hash_ids": [1], "block_tokens": 2147483648}'),
        *('{"requests": [{"hash_ids": [0.5]}]}', '{"requests": [], "hash_id_scope": "node"}', '{"requests": {}}'),
        *('{"requests": [], "block_size": 0}', '{"requests": [[]]}', '{"requests": [], "block_size": 2147483648}'),
        *('{"requests": [], "block_size": 1%s}' % ("0" * 400), '{"requests": [], "block_size": true}'),
        '{"hash_ids": [1], "x": ' + 9999 * "[" + 9999 * "]" + "}",
    ):
        file.write_text('{"hash_ids": [1]}\n' + line + "\n")
        with case(line[:40]), pytest.raises(BadTrace, match=r"bad\.jsonl:2 is neither a request"):
            read_trace(file)


def test_a_time_that_is_no_clocks_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    for time in ("1" + "0" * 400, "-1" + "0" * 400, "1e300", "9223372036854775809"):
        for field in ("timestamp", "t"):
            one = f'{{"hash_ids": [1], "{field}": {time}}}'
            for line in (one, f'{{"requests": [{{"requests": [{one}]}}]}}'):
                file.write_text('{"hash_ids": [1]}\n' + line + "\n")
                with case(line[:60]), pytest.raises(BadTrace, match=r"bad\.jsonl:2 has a time beyond 2\^63"):
                    read_trace(file)
    file.write_text('{"hash_ids": [1], "timestamp": 9223372036854775808}\n')
    assert read_trace(file).seconds == [2**63 / 1000]


SESSION = {
    "id": "f64a",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "s", "model": "m", "in": 130, "out": 86, "hash_ids": [1, 2, 3]},
        {"t": 9.5, "type": "n", "model": "m", "in": 190, "out": 8, "hash_ids": [1, 2, 4]},
        {
            "t": 2.0,
            "type": "subagent",
            "requests": [{"t": 3.5, "type": "n", "in": 64, "hash_ids": [1]}, {"t": 4, "type": "n", "hash_ids": None}],
        },
    ],
}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_session_is_read_in_its_own_order(tmp_path: Path, indent: int | None) -> None:
    file = tmp_path / "session.json"
    file.write_text("\ufeff" + json.dumps(SESSION, indent=indent))
    trace = read_trace(file)
    assert (trace.name, trace.tokens_per_block, trace.seconds) == ("session", 64, [0.0, 3.5, 4, 9.5])
    assert [len(keys) // KEY_BYTES for keys in trace.requests] == [3, 1, 0, 3]
    first, inner, _, last = trace.requests
    assert first[: 2 * KEY_BYTES] == last[: 2 * KEY_BYTES] != first[KEY_BYTES:]
    assert inner == first[:KEY_BYTES]


@pytest.mark.parametrize(("scope", "blocks"), [("local", 8), ("global", 4)])
@pytest.mark.parametrize("is_list", [False, True])
def test_sessions_share_numbers_only_if_they_say_so(tmp_path: Path, scope: str, blocks: int, is_list: bool) -> None:
    file = tmp_path / "sessions.jsonl"
    sessions = [{**SESSION, "hash_id_scope": scope}] * 2
    file.write_text(json.dumps(sessions, indent=1) if is_list else "".join(json.dumps(one) + "\n" for one in sessions))
    trace = read_trace(file)
    keys = {keys[at : at + KEY_BYTES] for keys in trace.requests for at in range(0, len(keys), KEY_BYTES)}
    assert (len(trace.requests), len(keys)) == (8, blocks)
    assert list(trace.seconds) == sorted(trace.seconds), "sessions begin together"


def test_a_sessions_times_do_not_depend_on_other_sessions(tmp_path: Path) -> None:
    """Sessions begin together, also where the times of their requests are timestamps, in milliseconds."""
    file = tmp_path / "sessions.jsonl"
    sessions = [{"requests": [{"hash_ids": [1], "timestamp": 1000 * at} for at in times]} for times in ((1, 9), (2, 4))]
    file.write_text("\n".join(map(json.dumps, sessions)))
    trace = read_trace(file)
    assert (trace.seconds, trace.sessions) == ([1, 2, 4, 9], [0, 1, 1, 0])


def test_hints_of_sessions_stay_with_the_requests_of_their_time(tmp_path: Path) -> None:
    file = tmp_path / "sessions.jsonl"
    hint = {"hint": "release", "hash_id_scope": "global"}
    lines: list[dict[str, object]] = [
        {"requests": [{"hash_ids": [1], "t": 1}, {"hash_ids": [2], "t": 9}]},
        {**hint, "hash_ids": [2]},  # it has no time: behind the request before it
        {**hint, "hash_ids": [4], "timestamp": 5000},
        {**hint, "requests": [{"hash_ids": [1], "t": 1}]},
        {"requests": [{"hash_ids": [3], "t": 2}, {"hash_ids": [4], "t": 5}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(file)
    assert trace.seconds == [1, 2, 5, 9]
    last_keys = [int.from_bytes(one.keys, "big") for one in trace.hints]
    assert [(one.before, one.seconds) for one in trace.hints] == [(1, 1), (2, 5), (4, 9)]
    assert last_keys == [1, 4, 2]


def test_requests_may_be_a_list_and_hashes_signed_or_missing(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text(
        "\ufeff" + json.dumps([{"hash_ids": [-1, 5]}, {"hash_ids": None}, {"hash_ids": [2**64 - 1]}], indent=2)
    )
    signed, nothing, unsigned = read_trace(file).requests
    assert (signed[:KEY_BYTES], nothing) == (unsigned, b"")


def test_objects_without_blocks_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.jsonl"
    lines = '{"aborted": true}', '{"hash_ids": [1, 2]}', "[{}, {}]", '{"hash_ids": [1, 2]}', '{"summary": 1}'
    file.write_text("\n".join(lines))
    trace = read_trace(file)
    assert (len(trace.requests), trace.accesses, trace.skipped, trace.cut_off) == (2, 4, 4, False)
    assert main([str(file), "--policy", "lru", "--blocks", "5"]) == 0
    assert "some.jsonl has 4 objects without hash_ids, which are left out." in capsys.readouterr().err
    file.write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(BadTrace, match=r"some\.jsonl is not a trace: none of its objects has hash_ids"):
        read_trace(file)


def test_a_file_cut_off_is_replayed_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, packed = tmp_path / "cut.jsonl", tmp_path / "cut.gz"
    file.write_text('{"hash_ids": [1]}\n{"hash_ids": [1]}\n{"hash_')
    packed.write_bytes(gzip.compress(b"{}" * 50)[:12])
    assert main([str(file), "--policy", "lru", "--blocks", "5", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["results"][0]["hit_percent"] == 50.0
    assert "ends in the middle: it is replayed up to there" in said.err
    assert main([str(packed), "--blocks", "5"]) == 2
    assert "ends before its first request" in capsys.readouterr().err


def test_a_file_without_lines_takes_no_memory(tmp_path: Path) -> None:
    plain, packed, nbytes = tmp_path / "sparse.jsonl", tmp_path / "bomb.gz", 4 * MAX_LINE_BYTES
    plain.touch()
    os.truncate(plain, nbytes)
    with gzip.open(packed, "wb", compresslevel=1) as writer:
        for _ in range(nbytes >> 20):
            writer.write(bytes(1 << 20))
    for file in (plain, packed):
        tracemalloc.start()
        with pytest.raises(BadTrace, match="a line of more than 64 MiB"):
            read_trace(file)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 3 * MAX_LINE_BYTES


def test_a_trace_may_come_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, pipe = write(tmp_path / "small.jsonl", [[1, 2, 3]] * 4), tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat {file} > {pipe}"]):
        assert main([str(pipe), "--policy", "lru", "--blocks", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["hit_percent"] == 75.0


def test_a_trace_with_bytes_of_blocks_needs_no_block_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "asked.jsonl"
    lines = [{"hash_ids": [1, 2, 3], "block_tokens": 16, "block_bytes": nbytes} for nbytes in (0, 4096, 8192)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(file), "--policy", "lru", "--size", "18KiB"]) == 0
    found = capsys.readouterr()
    printed = found.out.splitlines()
    assert "16 tokens in 4.00 KiB (50.0 %), 16 tokens in 8.00 KiB (50.0 %)" in found.err
    assert "with their mean size, 6.00 KiB" in found.err
    assert printed[0] == "asked: 3 requests, 9 blocks of 16 tokens and 6.00 KiB"
    assert printed[2].split()[:3] == ["18KiB", "lru", "66.67"]


def test_where_it_cannot_print_that_is_said_and_not_of_the_trace(tmp_path: Path) -> None:
    file = write(tmp_path / "small.jsonl", [[1, 2, 3]])
    words = [sys.executable, "-m", "kvoffd.simulate.command", str(file), "--policy=lru", "--blocks=3"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "kvoffd-cli: The result cannot be printed (No space left on device).\n"
    read, written = os.pipe()
    os.close(read)
    ended = subprocess.run(words, stdout=written, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(written)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_trace_of_too_many_requests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvoffd.simulate.trace.MAX_REQUESTS_AND_BLOCKS", 10)
    assert read_trace(write(tmp_path / "fits.jsonl", [[1, 2, 3], [1, 2, 3], [], []])).accesses == 6
    for requests in ([[]] * 11, [[1, 2, 3], [1, 2, 3], [1, 2]], [[*range(10)]]):
        file = write(tmp_path / "many.jsonl", requests)
        assert main([str(file), "--blocks", "5"]) == 2
        said = capsys.readouterr().err
        assert "many.jsonl has more than 10 requests and blocks of requests, together, which are too many" in said
