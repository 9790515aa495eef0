"""The comparison with simulators of others: what they are given, what is read from them, and what it comes down to."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvoffd.simulate.replay import replay
from kvoffd.simulate.trace import RequestTrace, read_trace
from tests.bench.foreign_simulators import (
    STATISTICS,
    Found,
    Lengths,
    endless_table,
    own_hits,
    run_analyze_trace,
    run_simulator,
    statistics_of,
    write_weighed,
)
from tests.kit.made_up_loads import LOADS, Traffic, trace_of

REQUESTS = [[1, 2, 3], [1, 2, 4, 5], [6], [1, 2, 3]]
TOKENS = [1100, 2048, 7, 1500]
FOUND = Found(lru=5, optimal=6, total=11)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    file = tmp_path / "made.jsonl"
    lines = zip(TOKENS, REQUESTS, strict=True)
    file.write_text("".join(json.dumps({"input_length": n, "hash_ids": ids}) + "\n" for n, ids in lines))
    return file


def program(file: Path, printed: object, option: str = "") -> Path:
    """Make a program that prints this as JSON, or writes it into the file that an option names."""
    target = f"open(sys.argv[sys.argv.index({option!r}) + 1], 'w')" if option else "sys.stdout"
    file.write_text(f"#!{sys.executable}\nimport sys\n{target}.write({json.dumps(printed)!r})\n")
    file.chmod(0o700)
    return file


def tree_lru_hits(trace: RequestTrace, most: int) -> int:
    """Return the hits of an LRU of prefixes, of which only a block that nothing follows is evicted, nor one of the
    request that is being stored."""
    used: dict[tuple[int, ...], int] = {}
    hits = clock = 0
    for keys in trace.requests:
        ids = np.frombuffer(keys, ">u8").tolist()
        path = [tuple(ids[: at + 1]) for at in range(len(ids))]
        found = next((at for at, one in enumerate(path) if one not in used), len(path))
        hits += found
        for at, one in enumerate(path):
            if at >= found and len(used) >= most:
                parents = {each[:-1] for each in used}
                leaves = [each for each in used if each not in parents and each not in path]
                if not leaves:
                    break
                del used[min(leaves, key=used.__getitem__)]
            used[one] = clock = clock + 1
    return hits


@pytest.mark.parametrize("load", ["chat", "agents"])
@pytest.mark.parametrize("most", [20, 90])
def test_with_its_prompt_last_the_replay_is_an_lru_of_prefixes(load: str, most: int) -> None:
    trace = trace_of([*islice(LOADS[load](Traffic(1)), 100)])
    assert sum(own_hits(trace, most)) == replay(trace, "lru", most).hits
    assert sum(own_hits(trace, most)) <= sum(own_hits(trace, most, at_once=True)) <= tree_lru_hits(trace, most)
    assert sum(own_hits(trace, most, prompt_last=True)) == tree_lru_hits(trace, most)


def test_a_simulator_gets_blocks_of_weight_one_behind_requests_that_fill_its_cache(
    trace_file: Path, tmp_path: Path
) -> None:
    weighed = tmp_path / "weighed.jsonl"
    write_weighed(Lengths.read(trace_file, 4), 10, weighed)
    lines = [json.loads(line) for line in weighed.read_text().splitlines()]
    before, after = lines[:4], lines[4:]
    assert [line["hash_ids"] for line in after] == REQUESTS
    filler = [block for line in before for block in line["hash_ids"]]
    assert len(set(filler) - {*range(10)}) == len(filler) >= 10
    for line in lines:
        assert line["block_tokens"] == [1] * line["input_length"] == [1] * len(line["hash_ids"])


def test_tokens_of_hits_end_with_the_prompt(trace_file: Path) -> None:
    lengths = Lengths.read(trace_file, 2)
    assert lengths == (TOKENS[:2], REQUESTS[:2])
    assert [lengths.tokens_of(0, hits) for hits in range(4)] == [0, 512, 1024, 1100]


def test_what_the_programs_say_is_compared(trace_file: Path, tmp_path: Path) -> None:
    trace, lengths = read_trace(trace_file), Lengths.read(trace_file, 4)
    hits = own_hits(trace, trace.accesses)
    assert hits == [0, 2, 0, 3]
    endless = {"hitTokens": 5, "totalTokens": 11}
    point = {"hitTokens": 5, "totalTokens": 11}, {"hitTokens": 6, "totalTokens": 11}
    printed = {"ceiling": endless, "points": [{"cacheBlocks": 3, "results": {"lru": point[0], "optimal": point[1]}}]}
    found = run_simulator(program(tmp_path / "kvcache-simulator", printed), trace_file, [3])
    assert found == {0: Found(5, 5, 11), 3: FOUND}
    report = {"total_requests": 4, "unique_prefixes": 6, "hit_rate_stats": statistics_of(hits, lengths)}
    told = run_analyze_trace(program(tmp_path / "aiperf", report, "--output-file"), trace_file)
    assert told == report
    assert tuple(told["hit_rate_stats"]) == STATISTICS
    assert "NO" not in endless_table(told, found[0], hits, lengths)
    assert endless_table(told, found[0]._replace(lru=4), hits, lengths).count("NO") == 1
